//! Embeddings: encoders and decoders, pooling, and the files of sentence-transformers.

mod adapters;
mod folders;
mod lasttoken;
mod stored;

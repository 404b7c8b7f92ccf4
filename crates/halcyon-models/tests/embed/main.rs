//! Embeddings: encoders and decoders, pooling, and the files of sentence-transformers.

mod adapters;
mod lasttoken;
mod stored;

//! Language models: reads GGUF files and folders in Hugging Face's layout, and computes with their weights as
//! they are stored, on any backend.
//!
//! - [`source`]: opens a model and finds its tensors.
//! - [`family`]: one file per family; reads its configuration into a [`spec::Spec`].
//! - [`decoder`]: computes a step; [`placement`]: on which devices.
//! - [`encoder`] and [`embed`]: encoders, and vectors of texts.
//! - [`fit`]: computes the memory that an engine needs.
//! - [`generator`]: prompts in, text out; alone, in batches ([`batch`]) or on a thread ([`worker`]).
//! - [`lora`]: low-rank adapters, trained and merged.
//! - [`sample`] and [`chain`]: choose tokens; [`device_sample`]: the part of it on the device.
//! - [`constrain`]: texts that match a grammar or a JSON schema.
//! - [`speculate`]: several tokens per step, proposed by a draft.
//! - [`export`]: writes GGUF files and folders.
pub mod batch;
pub mod chain;
pub mod constrain;
pub mod decoder;
pub mod device_sample;
pub mod embed;
pub mod encoder;
pub mod engine;
pub mod export;
pub mod family;
pub mod fit;
pub mod generate;
pub mod generator;
pub mod grid;
pub mod hub;
pub mod lora;
pub mod model;
pub mod placement;
pub mod rope;
pub mod sample;
pub mod source;
pub mod spec;
pub mod speculate;
pub mod worker;

pub use batch::{Batch, Event, Request};
pub use chain::{Candidates, SampleStep, StepName, TokenMask};
pub use constrain::{Constraint, Mark};
pub use decoder::cache::{CacheTypes, cache_name};
pub use decoder::{Activations, CacheLayout, CacheShape, Decoder, LoadOptions, Rows};
pub use embed::{EmbedOptions, Embedder, Pooling};
pub use encoder::{Encoder, EncoderEngine, EncoderSpec};
pub use engine::{Engine, EngineOptions, Feed};
pub use fit::MemoryNeed;
pub use generate::{Finish, GenerateOptions, Generation, Piece, Session, generate};
pub use generator::{Generator, GeneratorOptions, Pieces, Prompt, chat_tokens};
pub use grid::Grid;
pub use lora::{Lora, LoraOptions};
pub use model::ModelFile;
pub use placement::{DevicePart, LayerPlace, Placement};
pub use sample::{Sampler, Sampling};
pub use source::Source;
pub use spec::Spec;
pub use speculate::{Speculation, SpeculationOptions, SpeculationStats};
pub use worker::{AsyncPieces, Worker};

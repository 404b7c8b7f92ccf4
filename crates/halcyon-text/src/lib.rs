//! Text for language models: tokenizers and chat templates.
//!
//! A [`Tokenizer`] is made from the metadata of a GGUF file ([`GgufTokenizer`]) or from a `tokenizer.json`.
//! Its token ids for GGUF are those of llama.cpp. A [`ChatTemplate`] turns messages into the text that a
//! model was trained on.
//!
//! Vocabularies and templates come from files that nobody checked. Every failure is an [`Error`]; nothing
//! panics, and neither a template nor a text can make the work grow faster than almost linearly.

mod bpe;
mod gguf;
mod json;
mod merge;
mod pre;
mod special;
mod spm;
mod template;
mod texts;
mod to_json;
mod tokenizer;
mod value;
mod vocab;
mod wordpiece;

pub use gguf::GgufTokenizer;
pub use halcyon_ir::{Error, Result};
pub use template::{ChatTemplate, Message, RenderOptions};
pub use to_json::from_base64;
pub use tokenizer::{Stream, Tokenizer};
pub use value::Json;
pub use vocab::SpecialIds;

/// A malformed vocabulary; `place` names the key or field.
fn bad(place: &str, what: impl std::fmt::Display) -> Error {
    Error::Format { file: "tokenizer".into(), what: format!("{place}: {what}") }
}

//! Writes models: GGUF files with other types, GGUF files of folders, and folders of GGUF files.
//!
//! [`Content`] is a model in the form of a GGUF file, whose tensors are read when they are written.
//! [`write()`] writes it with a type for each tensor; [`choose`] finds the types of a mixture.

mod changes;
mod config_json;
mod content;
mod encoder;
mod folder;
mod keys;
mod merged;
mod mixture;
mod names;
mod outputs;
mod to_folder;
mod tokenizer_json;
mod vocabulary;
mod write;

pub(crate) use changes::{Turn, tiled_pick};
pub use content::{Content, Entry};
pub use merged::{merged_content, write_merged_folder};
pub use mixture::{FILE_TYPES, FileType, MixtureOptions, TypeRule, choose, is_quantised};
pub(crate) use outputs::Pick;
pub use to_folder::{FolderWritten, write_folder};
pub use write::{WriteOptions, Written, write};

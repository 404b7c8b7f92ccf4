//! Datasets and a loader that prefetches batches, for training and evaluation.
//!
//! A [`Dataset`] has rows. Each row has one array per [`Column`], for example an image and its label, or a
//! window of text and the character that follows each of its characters. [`Arrays`] holds columns in memory;
//! [`idx`], [`read_csv`], [`ImageFolder`] and [`Text`] read files; [`open`] makes a dataset from a
//! description ([`DataSpec`]), such as a table of a TOML file. [`DatasetExt`] has subsets, splits and
//! transforms.
//!
//! A [`DataLoader`] makes batches of a dataset, optionally on several threads. The order of the batches does
//! not depend on the threads. The position of a loader ([`LoaderState`]) can be saved and restored, so that
//! an interrupted training continues with the same batches as without the interruption.
//!
//! ```
//! use halcyon_data::{Arrays, ConstData, DataLoader, DatasetExt, LoaderOptions};
//!
//! # fn main() -> halcyon_data::Result<()> {
//! let x = ConstData::from_slice(&[6, 2], &[0u8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])?;
//! let y = ConstData::from_slice(&[6], &[0i32, 1, 0, 1, 0, 1])?;
//! let data = Arrays::new([("x", x), ("y", y)])?.scale("x", 255.0)?;
//! let mut loader = DataLoader::new(data, LoaderOptions::new(4).shuffle(18).workers(2))?;
//! for epoch in 0..3 {
//!     for batch in loader.epoch() {
//!         let batch = batch?;
//!         assert_eq!((batch.epoch, batch.arrays.len()), (epoch, 2));
//!         // let tensors = batch.to(&backend)?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Files may be truncated, damaged or hostile. Every length is checked against the file before memory is
//! allocated for it. A damaged file gives an [`halcyon_ir::Error::Format`] that names the file, and for a
//! wrong value in a table also the line and the column. A kind of file that is not read, such as a compressed
//! table, gives an [`halcyon_ir::Error::Unsupported`].
#![forbid(unsafe_code)]

mod arrays;
mod compose;
mod dataset;
pub mod idx;
mod images;
mod loader;
mod order;
mod resize;
mod spec;
mod table;
mod text;
mod transform;

pub use arrays::Arrays;
pub use compose::{Concat, Select, Subset};
pub use dataset::{Column, Dataset, DatasetExt};
pub use halcyon_ir::{ConstData, DType, Error, Result};
pub use images::{ImageFolder, ImageOptions};
pub use loader::{Batch, DataLoader, Epoch, LoaderOptions, LoaderState};
pub use order::permutation;
pub use spec::{DataSpec, Kind, Normalise, Part, Subrange, open};
pub use table::{CsvOptions, LabelKind, parse_csv, read_csv};
pub use text::{Text, TextOptions, Vocabulary};
pub use transform::Mapped;

/// An [`Error::Format`] about `file`.
pub(crate) fn bad(file: &str, what: impl Into<String>) -> Error {
    Error::Format { file: file.into(), what: what.into() }
}

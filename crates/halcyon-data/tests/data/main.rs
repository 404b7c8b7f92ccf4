//! Datasets from files, the loader, and files that are damaged.
#![allow(missing_docs)]

mod hostile;
mod loader;
#[cfg(feature = "images")]
mod pictures;
mod sources;

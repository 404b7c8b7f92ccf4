//! Tests of datasets from files, of the loader, and of damaged files.
#![allow(missing_docs)]

mod hostile;
mod loader;
#[cfg(feature = "images")]
mod pictures;
mod sources;

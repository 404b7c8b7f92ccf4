//! Datasets from files, the loader, and files that are damaged.
#![allow(missing_docs)]

mod hostile;
mod loader;
mod sources;

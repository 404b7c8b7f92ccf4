//! Graph, passes, kernel IR and renderers. No FFI and no `unsafe`.
//!
//! Read in this order: [`dtype`], [`shape`], [`ops::element_wise`], [`ops`], [`graph`], [`composite`], then
//! the passes and the kernel IR.
#![forbid(unsafe_code)]
pub mod blocks;
pub mod composite;
pub mod convert;
pub mod cost;
pub mod custom;
pub mod data;
pub mod dtype;
pub mod error;
pub mod fused;
pub mod grad;
pub mod graph;
pub mod kernel;
pub mod layout;
pub mod lower;
pub mod minifloat;
pub mod ops;
pub mod passes;
pub mod plan;
pub mod polynomials;
pub mod reference;
pub mod render;
pub mod shape;
pub mod target;
pub use convert::Rounding;
pub use data::ConstData;
pub use dtype::{DType, Element, Scalar};
pub use error::{Error, Result, Span};
pub use graph::{Graph, NodeId};
pub use ops::Op;
pub use ops::element_wise::ScalarOp;
pub use shape::{Bindings, Dim, Dims, Shape, TensorType};

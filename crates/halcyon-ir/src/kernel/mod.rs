//! Kernels: the IR (its builder, verifier, interpreter and templates follow).

pub mod ir;
pub mod lower;
pub use ir::*;

use crate::dtype::Scalar;
use serde::{Deserialize, Serialize};

/// How a kernel is launched: groups along each dimension, and a value for each parameter in order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Launch {
    pub groups: [u32; 3],
    pub params: Vec<Scalar>,
}

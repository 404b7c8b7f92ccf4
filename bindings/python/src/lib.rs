//! The native module `halcyon._native`. It holds no logic of its own: arrays, sessions and models are the
//! objects of the Rust crates. The Python files beside it add Python's conventions.
//!
//! `dlpack.rs` and `interface.rs` exchange memory with other libraries and contain all `unsafe` code.
#![deny(unsafe_code)]

mod array_ops;
mod backend;
mod calls;
mod cli;
mod compile;
mod convert;
mod dlpack;
mod errors;
mod interface;
mod language;
mod linalg;
mod linalg_grad;
mod ops;
mod report;
mod session;
mod tensor;
mod torch_ops;
mod training;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::backend::{Backend, devices};
    #[pymodule_export]
    use crate::cli::{command, set_program};
    #[pymodule_export]
    use crate::compile::{Compiled, gradients, value_and_grad};
    #[pymodule_export]
    use crate::dlpack::{Lent, dlpack_device, from_dlpack, lend, to_dlpack};
    #[pymodule_export]
    use crate::interface::from_array_interface;
    #[pymodule_export]
    use crate::language::{Embedder, Generation, LanguageModel, Piece, TextStream};
    #[pymodule_export]
    use crate::report::{
        discover, doctor_backends, doctor_host, doctor_section, doctor_verdict, select_backend, selection,
    };
    #[pymodule_export]
    use crate::session::{Cancel, OnnxModel, OnnxSession, fit_onnx, to_numpy};
    #[pymodule_export]
    use crate::tensor::{Tensor, eval};
    #[pymodule_export]
    use crate::torch_ops::Weights;
    #[pymodule_export]
    use crate::training::{TrainStep, checkpoints, load_tensors, save_tensors};

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::calls::register(m)?;
        crate::ops::register(m)?;
        crate::array_ops::register(m)
    }
}

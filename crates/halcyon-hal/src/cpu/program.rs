//! Kernel IR on the CPU device: the fallback for what has no native kernel.

use super::memory::Ptr;
use crate::{Error, Program, Result};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::Kernel;
use std::any::Any;
use std::sync::atomic::AtomicU32;

/// A kernel to interpret.
#[derive(Debug)]
pub(crate) struct CpuProgram {
    kernel: Kernel,
}

impl CpuProgram {
    pub(crate) fn new(kernel: &Kernel) -> Result<CpuProgram> {
        Ok(CpuProgram { kernel: kernel.clone() })
    }

    pub(crate) fn run(&self, _: [u32; 3], _: &[Ptr], _: &[Scalar], _: u32, _: &AtomicU32) -> Result<()> {
        Err(Error::unsupported(format!("kernel {} on the CPU", self.kernel.name), "The interpreter follows"))
    }
}

impl Program for CpuProgram {
    fn name(&self) -> &str {
        &self.kernel.name
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

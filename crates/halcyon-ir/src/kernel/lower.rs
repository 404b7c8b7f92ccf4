//! From fused kernels and structured ops to kernel IR. The signatures here are what `crate::lower` calls.

use super::{Kernel, Launch};
use crate::error::{Error, Result};
use crate::fused::Fused;
use crate::op::Op;
use crate::target::{Caps, Declined, Operand};

/// Kernels that together do one op.
#[derive(Debug, Default)]
pub struct Lowered {
    /// Kernel, launch, and for each of its buffers (read ones declared before written ones; without the fault word, which the
    /// device binds) a number: inputs first, then the output, then temporaries.
    pub steps: Vec<(Kernel, Launch, Vec<usize>)>,
    /// Bytes of each temporary.
    pub temps: Vec<usize>,
}

/// One kernel for a fused chain. Its buffers are the sources (`Load::input`) in order, then the outputs in order.
pub fn lower_fused(_f: &Fused, _caps: &Caps) -> Result<(Kernel, Launch)> {
    Err(Error::unsupported(
        "fused kernels through the kernel IR",
        "Use the cpu backend",
    ))
}

/// Which of `Fused::params` parameter `k` of a kernel made by [`lower_fused`] carries.
pub fn fused_param(_kernel: &Kernel, _k: usize) -> Option<usize> {
    None
}

/// Kernels for a structured op or a composite. `inputs` may be strided (a template that cannot take that declines with
/// [`Declined::needs_dense`]); the output is dense. `in_place`: the output's buffer is input 0's ([`Op::UpdateSlice`]).
pub fn lower_op(
    op: &Op,
    _inputs: &[Operand],
    _outputs: &[Operand],
    _in_place: bool,
    _caps: &Caps,
) -> Result<Lowered, Declined> {
    Err(Declined::because(format!("no template for {}", op.name())))
}

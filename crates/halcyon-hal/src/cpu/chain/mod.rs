//! The executor of fused chains: runs a chain block by block, each instruction over a whole block in the
//! first-level cache.
//!
//! `plan::Plan::new` compiles each fused kernel once: it merges axes of the kernel's space, chooses one or
//! two of them to form blocks of at most `BLOCK` elements, and assigns registers to the instructions. A block
//! of an operand is read in place if it is contiguous, needs no conversion and lies inside the mask. All
//! other blocks (strided, broadcast, partly masked, or of a type that needs conversion) are first copied to a
//! register. Reductions combine values in 64-bit accumulators, in an order that depends on shapes alone, so
//! results do not depend on the number of threads.

pub(super) mod convert;
mod exec;
mod flush;
pub(crate) mod lane;
mod ops;
mod plan;
mod quantize;
#[cfg(test)]
mod quantize_tests;
mod reduce;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use ops::apply;

use super::library::CpuKernel;
use super::sys::Isa;
use crate::Declined;
use crate::library_call::CallForm;
use halcyon_ir::fused::{Fused, Param};

/// Elements of a block: long enough to hide the overhead of an instruction, short enough that the blocks of a
/// chain fit 48 KiB of cache.
pub(crate) const BLOCK: usize = 256;

/// Compiles a fused chain to a kernel.
pub(crate) fn kernel(isa: Isa, f: &Fused, call: &CallForm<'_>) -> Result<CpuKernel, Declined> {
    // `Plan::new` checks the chain. The code below relies on this check.
    let plan = plan::Plan::new(f, call)?;
    if let Some(k) = quantize::kernel(f, call)? {
        return Ok(k);
    }
    let args = f
        .params
        .iter()
        .filter_map(|p| if let Param::Arg(a) = p.1 { Some(a as usize + 1) } else { None })
        .max();
    let name = format!("cpu.chain.{}", isa.name());
    // SAFETY: the plan was made for `call`, whose buffers `CpuKernel::run` has checked.
    let k = CpuKernel::new(name, call, move |r| unsafe { exec::run(&plan, r) })?;
    Ok(k.with_args(args.unwrap_or(0)))
}

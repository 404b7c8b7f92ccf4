//! The tile executor: runs a fused chain block by block, each instruction over a whole block in the
//! first-level cache.
//!
//! A `plan::Plan` is made once per fused kernel: the space is collapsed, two of its axes are chosen to make
//! blocks of at most `BLOCK` elements, instructions get registers. Operands that are contiguous and need no
//! conversion are used where they lie; everything else (strides, broadcasts, masks, small types) is brought
//! into a block first. Reductions go into 64-bit accumulators, in an order that depends on shapes alone, so
//! results do not depend on the number of threads.

pub(super) mod convert;
mod exec;
mod flush;
pub(crate) mod lane;
mod ops;
mod plan;
mod reduce;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use ops::apply;

use super::library::CpuKernel;
use super::sys::Isa;
use crate::{Declined, LibraryCall};
use halcyon_ir::fused::{Fused, Param};

/// Elements of a block: long enough to hide what an instruction costs, short enough that a chain stays in 48
/// KiB.
pub(crate) const BLOCK: usize = 256;

/// The kernel of a fused chain.
pub(crate) fn kernel(isa: Isa, f: &Fused, call: &LibraryCall<'_>) -> Result<CpuKernel, Declined> {
    let plan = plan::Plan::new(f, call)?;
    let args = f
        .params
        .iter()
        .filter_map(|p| if let Param::Arg(a) = p.1 { Some(a as usize + 1) } else { None })
        .max();
    let name = format!("cpu.tile.{}", isa.name());
    let k = CpuKernel::new(name, call, move |r| exec::run(&plan, r))?;
    Ok(k.with_args(args.unwrap_or(0)))
}

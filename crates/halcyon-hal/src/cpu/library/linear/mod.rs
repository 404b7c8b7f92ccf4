//! The composite `row_matmul`: activations times weights that are stored by rows, as floats or in blocks.
//!
//! Weights are packed in panels of 16 outputs: ahead of time if they are a constant, otherwise while they are
//! multiplied. With weights in blocks, the activations are rounded to bytes first, and the products are
//! summed as integers, so decoding a token reads little more than the bits of the weights.
//!
//! The bits of a row of the result depend on that row, its matrix and the instruction set, and on nothing
//! else: not on the number of rows, the threads, or the time of packing.

#[cfg(test)]
mod call_tests;
mod floats;
mod ints;
#[cfg(target_arch = "aarch64")]
mod ints_neon;
#[cfg(target_arch = "x86_64")]
mod ints_x86;
mod layout;
mod product;
mod quantise;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::calls::dense;
use super::strided::{Indices, place};
use super::{CpuKernel, Run};
use crate::Declined;
use crate::cpu::sys::Isa;
use crate::library_call::CallForm;
use halcyon_ir::DType;
use halcyon_ir::composite::Composite;
use halcyon_ir::layout::View;
use halcyon_ir::ops::RowMatmulSizes;
use product::{Operands, Product, Size, Weights};

/// The kernel of a call of the composite `row_matmul`.
pub(crate) fn call(isa: Isa, call: &CallForm<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let Some(RowMatmulSizes { m, n, k, matrices }) = c.row_matmul_sizes(call.inputs, call.outputs) else {
        return no("the operands have other types or shapes");
    };
    let [_, w, which @ ..] = call.inputs else { return no("activations and weights are needed") };
    if call.epilogue.is_some() || call.packed.is_some_and(|p| p != 1) {
        return no("this product has no epilogue, and packs its weights only");
    }
    // Weights that are packed are read as they are stored in the constant, which is dense.
    dense(call, &[0, 1])?;
    let weights = match (c.weight_blocks(), w.dtype) {
        (Some(b), DType::U8) => Weights::Blocks(b),
        (None, DType::F32) => Weights::F32,
        (None, DType::F16) => Weights::F16,
        (None, DType::BF16) => Weights::BF16,
        _ => return no("weights of this type are not supported"),
    };
    let size = Size { m, n, k, matrices };
    let few = [m, matrices].iter().all(|n| u32::try_from(*n).is_ok());
    if !few {
        return no("there are too many rows or matrices");
    }
    if matrices == 0 && m > 0 {
        return no("there are no matrices to choose from");
    }
    let product = Product { fine: c.fine_activations(), ..Product::new(isa, size, weights) };
    let Some(bytes) = product.packed_bytes() else {
        return no("the packed weights are larger than the address space");
    };
    let views = [0, 1].map(|i| call.inputs[i].view.clone());
    let chosen = which.first().map(|i| Indices::new(i.dtype, &i.view));
    let packed = call.packed.is_some();
    let name = format!("cpu.linear.{}{}", product.name(), if packed { ".packed" } else { "" });
    let out = call.inputs.len();
    let kernel = CpuKernel::new(name, call, move |r| run(r, &product, &views, chosen.as_ref(), out, packed))?;
    let kernel = kernel.with_workspace(product.workspace());
    if !packed {
        return Ok(kernel);
    }
    let offset = w.view.offset * w.dtype.bytes(1) as isize;
    let key = format!("{} {offset}", product.key());
    Ok(kernel.with_packed(1, bytes / size_of::<f32>(), key, move |team, from, to| {
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant and that `to` has room
        // for the packed weights.
        unsafe { product.pack(team, from.wrapping_offset(offset), to) }
    }))
}

/// The body of the kernel.
fn run(r: &Run<'_>, p: &Product, views: &[View; 2], which: Option<&Indices>, out: usize, packed: bool) {
    let w = match (packed, p.weights) {
        (true, _) => r.bufs[1].ptr.cast_const(),
        (false, Weights::F32) => r.ptr::<f32>(1, &views[1]).cast(),
        (false, Weights::F16 | Weights::BF16) => r.ptr::<u16>(1, &views[1]).cast(),
        (false, Weights::Blocks(_)) => r.ptr::<u8>(1, &views[1]),
    };
    let work = r.bufs[out + 1].ptr;
    if let Some(which) = which {
        for i in 0..p.size.m {
            // SAFETY: `CpuKernel::run` has checked that the numbers of matrices lie in their buffer. The
            // workspace begins with room for one per row, and it is aligned.
            unsafe {
                let j = place(which.get(r.bufs[2].ptr, i), p.size.matrices, r.fault);
                work.cast::<u32>().add(i).write(j as u32);
            }
        }
    }
    let o = Operands { x: r.ptr::<f32>(0, &views[0]), w, packed, y: r.bufs[out].ptr.cast(), work };
    // SAFETY: `CpuKernel::run` has checked that the dense operands, the output and the workspace lie in their
    // buffers, and that output and workspace share no buffer with another operand. If the weights are packed,
    // input 1 is bound to what `pack` wrote. `place` returns numbers less than `matrices`.
    unsafe { p.run(r.team, o, which.is_some()) };
}

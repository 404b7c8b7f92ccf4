//! Matrix products, and the functions that find the kernel of a product.

pub mod gemv;
// Only the kernels for x86-64 multiply K groups.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) mod k_groups;
#[cfg(test)]
mod low_precision_call_tests;
pub(super) mod low_precision_calls;
#[cfg(test)]
mod low_precision_tests;
pub mod matrix;
mod packed_bf16;
pub(super) mod panels;
pub mod product_any;
pub mod product_bf16;
pub mod product_f32;
#[cfg(test)]
mod product_f32_tests;
pub(super) mod product_int16;
pub(super) mod product_int4;
pub mod product_int8;
#[cfg(target_arch = "x86_64")]
mod product_int8_vectors;
#[cfg(target_arch = "x86_64")]
pub(super) mod tile_registers;
#[cfg(target_arch = "x86_64")]
mod tile_registers_int8;

use super::CpuKernel;
use super::epilogue::{BoundChain, EpilogueChain};
use crate::Declined;
use crate::cpu::sys::Isa;
use crate::library_call::CallForm;
use halcyon_ir::DType;
use halcyon_ir::target::MatmulPrecision;
use half::{bf16, f16};
use low_precision_calls::narrow_matmul;
use matrix::{Epilogue, Gemm, MatMut, Product};
use product_any::{gemm_any, gemm_rounded};
use product_bf16::Bf16Code;
use product_f32::matmul_f32;
use product_int8::gemm_i8_wrapped;

/// Finds the kernel of a matrix product whose operands have any strides. Products of f32, f16 and bf16 are
/// summed in f32, products of f64 in f64; sums of integers wrap. [`narrow_matmul`] finds the kernels whose
/// result has another type than the factors, the bf16 kernels that need medium precision, and the kernels
/// that round f32 factors to bf16.
pub(crate) fn matmul(isa: Isa, call: &CallForm<'_>) -> Result<CpuKernel, Declined> {
    matmul_where(isa, call, isa.bf16_is_faster().then(|| Bf16Code::best(isa)))
}

/// Like [`matmul`], but the caller chooses the instructions that multiply bf16. With `None`, no product uses
/// bf16 instructions. [`matmul`] passes `None` on CPUs on which bf16 is not faster than f32.
pub(crate) fn matmul_where(
    isa: Isa,
    call: &CallForm<'_>,
    bf16: Option<Bf16Code>,
) -> Result<CpuKernel, Declined> {
    let [a, b, ..] = call.inputs else {
        return Err(Declined::because("two operands are needed"));
    };
    if a.view.rank() < 2 || a.view.rank() != b.view.rank() {
        return Err(Declined::because("the operands must have the same rank, at least 2"));
    }
    let p = Product::new(&a.view, &b.view);
    let all = [a.dtype, b.dtype, call.outputs[0].dtype];
    // f32 factors may be rounded to bf16 only at precision `Medium`.
    let exact = all == [DType::F32; 3] && call.precision < MatmulPrecision::Medium;
    if !exact && let Some(kernel) = narrow_matmul(isa, call, &p, bf16) {
        return kernel;
    }
    if all != [a.dtype; 3] {
        return Err(Declined::because(
            "operands and result of one type, or 8-bit or i16 operands with an i32 result, are needed",
        ));
    }
    match a.dtype {
        DType::F32 => matmul_f32(isa, call, p),
        d => matmul_any(call, p, d),
    }
}

/// A product whose operands and result are of the type `d`, other than f32.
fn matmul_any(call: &CallForm<'_>, p: Product, d: DType) -> Result<CpuKernel, Declined> {
    if d == DType::Bool {
        return Err(Declined::because("products of bool are not supported"));
    }
    let chain = match d {
        DType::F16 => EpilogueChain::or_half(call, 2, p.n)?,
        _ if call.epilogue.is_some() => {
            return Err(Declined::because("this product supports no epilogue"));
        }
        _ => None,
    };
    if chain.is_some() && p.k == 0 {
        return Err(Declined::because("this kernel supports no epilogue if the summed axis is empty"));
    }
    if call.packed.is_some() {
        return Err(Declined::because("this product reads its operands unpacked"));
    }
    let (out, size) = (call.inputs.len(), d.bytes(call.outputs[0].view.numel()));
    let args = chain.as_ref().map_or(0, |c| c.args);
    let kernel = CpuKernel::new(format!("cpu.gemm.{d}"), call, move |r| {
        if p.k == 0 {
            // SAFETY: `CpuKernel::run` has checked that the output buffer is writable and holds the dense
            // view, `size` bytes.
            unsafe { std::ptr::write_bytes(r.bufs[out].ptr, 0, size) };
            return;
        }
        let (team, isa) = (r.team, r.isa);
        macro_rules! each {
            ($t:ty, |$g:ident| $e:expr) => {{
                let (ma, mb) = p.mats::<$t>(r);
                let c = r.bufs[out].ptr as *mut $t;
                p.groups(|x, y, z| {
                    for i in 0..p.batch as isize {
                        let (a, b) = (ma.offset(x + i * p.step[0]), mb.offset(y + i * p.step[1]));
                        let at = z + i * p.step[2];
                        let c = MatMut::rows(c.wrapping_offset(at), p.n);
                        // SAFETY: the chain is owned by this closure and `r` outlives the product.
                        let chain = unsafe { BoundChain::new(chain.as_ref(), r) };
                        let epi = Epilogue {
                            chain: chain.below(at.unsigned_abs() / p.n.max(1)),
                            ..Epilogue::default()
                        };
                        let $g = Gemm::new(p.size(), a, b, c).with(epi);
                        // SAFETY: `CpuKernel::run` has checked that the views lie in their buffers and that
                        // the output shares no buffer with an input. It is dense, so the results do not
                        // overlap.
                        unsafe { $e };
                    }
                });
            }};
        }
        macro_rules! any {
            ($t:ty) => {
                each!($t, |g| gemm_any(team, isa, &g.plain()))
            };
        }
        match d {
            DType::F16 => each!(f16, |g| gemm_rounded(team, isa, &g)),
            DType::BF16 => each!(bf16, |g| gemm_rounded(team, isa, &g)),
            DType::F64 => any!(f64),
            DType::I8 => each!(i8, |g| gemm_i8_wrapped(team, isa, &g.plain())),
            DType::I16 => any!(i16),
            DType::I32 => any!(i32),
            DType::I64 => any!(i64),
            DType::U8 => each!(u8, |g| gemm_i8_wrapped(team, isa, &g.plain())),
            DType::U16 => any!(u16),
            DType::U32 => any!(u32),
            DType::U64 => any!(u64),
            // f32 and bool are handled above; small types are declined by `super::find`.
            _ => {}
        }
    })?;
    Ok(kernel.with_args(args))
}

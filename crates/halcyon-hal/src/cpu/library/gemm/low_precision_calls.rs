//! Library calls for low-precision products: bf16 factors with f32 sums, and factors of 8 or 16 bits
//! (integers) with i32 sums. Also attention in bf16.

use super::k_groups::batch;
use super::matrix::Product;
#[cfg(target_arch = "x86_64")]
use super::product_bf16::gemm_bf16_tiles;
use super::product_bf16::{Bf16Code, Bf16Elem, Bf16Out, gemm_bf16_batched_by};
#[cfg(target_arch = "x86_64")]
use super::product_f32::by_panels;
use super::product_f32::{Epilogue, Gemm, Mat, MatMut};
use super::product_int8::{Byte, gemm_i8_batched};
use super::product_int16::{PairElem, PairShape, gemm_pairs, gemm_pairs_packed, isa_of_pairs};
#[cfg(target_arch = "x86_64")]
use super::tile_registers::PackedShape;
#[cfg(target_arch = "x86_64")]
use super::tile_registers_int8::{gemm_i8_tiles, pack_i8_tiles};
use crate::Declined;
use crate::cpu::library::CpuKernel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::Run;
use crate::cpu::library::attention::Attention;
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::attention::flash_bf16::{MaskElem, OutElem, attention_bf16};
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::attention::{Heads, Operands};
use crate::cpu::library::epilogue::{BoundChain, EpilogueChain};
use crate::cpu::sys::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use halcyon_ir::DType;
#[cfg(target_arch = "x86_64")]
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::layout::View;
use halcyon_ir::target::MatmulPrecision;
use half::bf16;

/// Finds kernels for low-precision products. Products of 8-bit factors into i32 have a kernel on every
/// processor; with an epilogue, they have one only where kernels may use neither AMX-INT8 nor AVX512_VNNI.
/// Products of i16 into i32 have a kernel only on x86-64 with AVX2. Products of bf16 factors (into bf16 or
/// f32) need [`MatmulPrecision::Medium`]; those of f32 factors that are rounded to bf16 also need the
/// instructions `code`. `code` is `None` if products must not use bf16 instructions; then those of bf16
/// factors multiply in f32. The chain of an epilogue reads the f32 sums of a bf16 product. Returns `None` if
/// no kernel of this file computes the call.
pub(crate) fn narrow_matmul(
    isa: Isa,
    call: &CallForm<'_>,
    p: &Product,
    code: Option<Bf16Code>,
) -> Option<Result<CpuKernel, Declined>> {
    let (a, b, c) = (call.inputs[0].dtype, call.inputs[1].dtype, call.outputs[0].dtype);
    // Whether the sums are i32. With an epilogue, `c` is the type of the chain's result, so look at the type
    // in which the chain loads the product.
    let sums = match &call.epilogue {
        None => c == DType::I32,
        Some(e) => e.fused.loads.iter().any(|l| l.input == e.product && l.dtype == DType::I32),
    };
    match (a, b) {
        (DType::U8 | DType::I8, DType::U8 | DType::I8) if sums => Some(match (a, b) {
            (DType::U8, DType::I8) => bytes::<u8, i8>(isa, call, p),
            (DType::I8, DType::I8) => bytes::<i8, i8>(isa, call, p),
            (DType::I8, _) => bytes::<i8, u8>(isa, call, p),
            _ => bytes::<u8, u8>(isa, call, p),
        }),
        (DType::I16, DType::I16) if sums => Some(match isa_of_pairs(isa) {
            // Plain integer arithmetic is not faster than f32.
            Isa::Portable => Err(Declined::because("products of 16-bit integers need AVX2")),
            _ => pairs::<i16, i16>(isa, call, p),
        }),
        _ if call.precision < MatmulPrecision::Medium => None,
        // Without bf16 instructions too, the chain of an epilogue reads sums that are not rounded.
        (DType::BF16, DType::BF16) => {
            let code = code.unwrap_or(Bf16Code::Wide);
            match c {
                DType::BF16 => Some(halves::<bf16, bf16, bf16>(isa, call, p, code)),
                DType::F32 => Some(halves::<bf16, bf16, f32>(isa, call, p, code)),
                _ => None,
            }
        }
        // Products with few rows or columns are bound by memory: f32 is as fast for them, and more accurate.
        (DType::F32, DType::F32) if p.m.min(p.n) > super::gemv::ROWS => match c {
            DType::F32 => Some(halves::<f32, f32, f32>(isa, call, p, code?)),
            DType::BF16 if call.epilogue.is_some() => Some(halves::<f32, f32, bf16>(isa, call, p, code?)),
            _ => None,
        },
        _ => None,
    }
}

/// Size of the result in bytes.
fn size(call: &CallForm<'_>) -> usize {
    call.outputs[0].dtype.bytes(call.outputs[0].view.numel())
}

/// `C = A B` with bf16 factors, from operands of types A and B to a result of type C.
fn halves<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    isa: Isa,
    call: &CallForm<'_>,
    p: &Product,
    code: Bf16Code,
) -> Result<CpuKernel, Declined> {
    let chain = EpilogueChain::or_half(call, 2, p.n)?;
    if chain.is_some() && p.k == 0 {
        return Err(Declined::because("this kernel supports no epilogue if the summed axis is empty"));
    }
    if let Some(which) = call.packed {
        return halves_packed::<A, B, C>(isa, call, p, code, which, chain);
    }
    let (p, size, out) = (p.clone(), size(call), call.inputs.len());
    let args = chain.as_ref().map_or(0, |p| p.args);
    let kernel = CpuKernel::new(format!("cpu.gemm_bf16.{}", code.name()), call, move |r| {
        if p.k == 0 {
            // SAFETY: `CpuKernel::run` checked that the output buffer has `size` bytes and is writable.
            unsafe { std::ptr::write_bytes(r.bufs[out].ptr, 0, size) };
            return;
        }
        let (a, b, c) = (p.a::<A>(r), p.b::<B>(r), r.bufs[out].ptr as *mut C);
        p.groups(|x, y, z| {
            let c = MatMut::rows(c.wrapping_offset(z), p.n);
            let g = Gemm::new(p.size(), a.offset(x), b.offset(y), c);
            // SAFETY: `CpuKernel::run` checked that the views lie in their buffers and that the dense result
            // overlaps no operand; the chain is owned by this closure and `r` outlives the call.
            unsafe {
                let chain = BoundChain::new(chain.as_ref(), r).below(z.unsigned_abs() / p.n.max(1));
                let epi = Epilogue { chain, ..Epilogue::default() };
                gemm_bf16_batched_by(code, r.team, isa, p.all(), &g.with(epi));
            }
        });
    })?;
    Ok(kernel.with_args(args))
}

#[cfg(not(target_arch = "x86_64"))]
fn halves_packed<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    _: Isa,
    _: &CallForm<'_>,
    _: &Product,
    _: Bf16Code,
    _: usize,
    _: Option<EpilogueChain>,
) -> Result<CpuKernel, Declined> {
    Err(Declined::because("bf16 factors are packed for tile registers only"))
}

/// `halves` with a right operand packed for tile registers.
#[cfg(target_arch = "x86_64")]
fn halves_packed<A: Bf16Elem, B: Bf16Elem, C: Bf16Out>(
    isa: Isa,
    call: &CallForm<'_>,
    p: &Product,
    code: Bf16Code,
    which: usize,
    chain: Option<EpilogueChain>,
) -> Result<CpuKernel, Declined> {
    if code != Bf16Code::Tiles {
        return Err(Declined::because("bf16 factors are packed for tile registers only"));
    }
    let (shape, [sa, sb]) = packable(p, which, 2)?;
    let mat = |(rs, cs): (isize, isize)| Mat::<f32> { ptr: std::ptr::null(), rs, cs };
    if !by_panels(p.m, p.n, &mat(sa), &mat(sb)) {
        return Err(Declined::because("a product of this size does not pack its operands"));
    }
    let (offset, of) = (p.b.offset, call.inputs[1].dtype);
    let key = format!("tiles.b {shape:?} {of} {sb:?} {offset}");
    let (out, args) = (call.inputs.len(), chain.as_ref().map_or(0, |p| p.args));
    let p = p.clone();
    let kernel = CpuKernel::new(format!("cpu.gemm_bf16.{}.packed", code.name()), call, move |r| {
        let a = Mat { ptr: r.ptr::<A>(0, &p.a), rs: sa.0, cs: sa.1 };
        let c = MatMut::rows(r.bufs[out].ptr as *mut C, p.n);
        // SAFETY: `CpuKernel::run` checked that A and the result lie in their buffers. Buffer 1 has the size
        // of the packed operand, which `pack` wrote. The chain is owned by this closure, `r` outlives the
        // call, and `Bf16Code::Tiles` was chosen because the process may use tile registers.
        unsafe {
            let epi = Epilogue { chain: BoundChain::new(chain.as_ref(), r), ..Epilogue::default() };
            gemm_bf16_tiles(r.team, isa, &Gemm::new(p.size(), a, r.bufs[1].ptr.cast_const(), c).with(epi));
        }
    })?;
    Ok(kernel.with_args(args).with_packed(1, shape.bytes() / 4, key, move |team, from, to| {
        let b = Mat { ptr: (from as *const B).wrapping_offset(offset), rs: sb.0, cs: sb.1 };
        // SAFETY: `CpuKernel::pack` checked that `from` holds the view and `to` the packed bytes.
        unsafe { shape.pack(Some(team), b, to) }
    }))
}

/// The packed form of the right operand, with `group` elements per K group, and the strides of both operands.
/// Declines the calls that [`one_product`] declines.
#[cfg(target_arch = "x86_64")]
fn packable(p: &Product, which: usize, group: usize) -> Result<(PackedShape, [(isize, isize); 2]), Declined> {
    Ok((PackedShape { k: p.k, n: p.n, group }, one_product(p, which)?))
}

/// The strides of both operands. Declines the call unless it is one product with K > 0 and operand `which`,
/// the packed one, is the right operand.
fn one_product(p: &Product, which: usize) -> Result<[(isize, isize); 2], Declined> {
    if which != 1 || p.k == 0 || p.batch != 1 || !p.outer.is_empty() {
        return Err(Declined::because("only the right operand of a single product with K > 0 can be packed"));
    }
    let rank = p.a.rank();
    let strides = |v: &View| (v.strides[rank - 2], v.strides[rank - 1]);
    Ok([strides(&p.a), strides(&p.b)])
}

/// `C = A B` with 8-bit operands of types A and B into i32.
fn bytes<A: Byte, B: Byte>(isa: Isa, call: &CallForm<'_>, p: &Product) -> Result<CpuKernel, Declined> {
    let with = match isa {
        _ if isa.has_int8_tiles() => "amx_int8",
        _ if isa.has_vnni() => "avx512_vnni",
        _ => return pairs::<A, B>(isa, call, p),
    };
    if call.epilogue.is_some() {
        return Err(Declined::because("products of 8-bit factors support no epilogue on this processor"));
    }
    if let Some(which) = call.packed {
        return bytes_packed::<A, B>(isa, call, p, which);
    }
    let p = p.clone();
    CpuKernel::new(format!("cpu.gemm_i8.{with}"), call, move |r| {
        let (a, b, c) = (p.a::<A>(r), p.b::<B>(r), r.bufs[2].ptr as *mut i32);
        p.groups(|x, y, z| {
            let c = MatMut::rows(c.wrapping_offset(z), p.n);
            let g = Gemm::new(p.size(), a.offset(x), b.offset(y), c);
            // SAFETY: `CpuKernel::run` checked that the views lie in their buffers and that the dense result
            // overlaps no operand.
            unsafe { gemm_i8_batched(r.team, r.isa, p.all(), &g) };
        });
    })
}

/// `C = A B` with integers of 8 or 16 bits into i32, multiplied in pairs. The chain of an epilogue reads the
/// sums, converted to f32.
fn pairs<A: PairElem, B: PairElem>(
    isa: Isa,
    call: &CallForm<'_>,
    p: &Product,
) -> Result<CpuKernel, Declined> {
    let chain = EpilogueChain::of_sums(call, 2, p.n)?;
    let args = chain.as_ref().map_or(0, |p| p.args);
    let (out, p) = (call.inputs.len(), p.clone());
    let name = format!("cpu.gemm_i{}.{}", 8 * size_of::<A>(), isa_of_pairs(isa).name());
    if let Some(which) = call.packed {
        let [sa, sb] = one_product(&p, which)?;
        let (offset, shape) = (p.b.offset, PairShape::new(isa, p.k, p.n));
        let key = format!("pairs.b {shape:?} {} {sb:?} {offset}", call.inputs[1].dtype);
        let kernel = CpuKernel::new(format!("{name}.packed"), call, move |r| {
            let a = Mat { ptr: r.ptr::<A>(0, &p.a), rs: sa.0, cs: sa.1 };
            let c = MatMut::rows(r.bufs[out].ptr as *mut i32, p.n);
            let b = (shape, r.bufs[1].ptr as *const u32);
            // SAFETY: `CpuKernel::run` checked that A and the result lie in their buffers. Buffer 1 has the
            // size of the packed operand, which `pack` wrote. The chain is owned by this closure, and `r`
            // outlives the call.
            unsafe {
                let epi = Epilogue { chain: BoundChain::new(chain.as_ref(), r), ..Epilogue::default() };
                gemm_pairs_packed(r.team, isa, &Gemm::new(p.size(), a, b, c).with(epi));
            }
        })?;
        return Ok(kernel.with_args(args).with_packed(1, shape.words(), key, move |team, from, to| {
            let b = Mat { ptr: (from as *const B).wrapping_offset(offset), rs: sb.0, cs: sb.1 };
            // SAFETY: `CpuKernel::pack` checked that `from` holds the view and `to` the packed bytes.
            unsafe { shape.pack(Some(team), b, to.cast()) }
        }));
    }
    let kernel = CpuKernel::new(name, call, move |r| {
        let (a, b, c) = (p.a::<A>(r), p.b::<B>(r), r.bufs[out].ptr as *mut i32);
        p.groups(|x, y, z| {
            let c = MatMut::rows(c.wrapping_offset(z), p.n);
            let g = Gemm::<_, _, _, Epilogue>::new(p.size(), a.offset(x), b.offset(y), c);
            let first = z.unsigned_abs() / p.n.max(1);
            batch(r.team, p.batch, g.work(), &|i, threads| {
                // SAFETY: `CpuKernel::run` checked that the views lie in their buffers and that the result
                // overlaps no operand. It is dense, so the results of the products do not overlap. The chain
                // is owned by this closure, and `r` outlives the call.
                unsafe {
                    let chain = BoundChain::new(chain.as_ref(), r).below(first + i * p.m);
                    let epi = Epilogue { chain, ..Epilogue::default() };
                    gemm_pairs(r.team, threads, isa, &p.all().item(&g, i).with(epi));
                }
            });
        });
    })?;
    Ok(kernel.with_args(args))
}

#[cfg(not(target_arch = "x86_64"))]
fn bytes_packed<A: Byte, B: Byte>(
    _: Isa,
    _: &CallForm<'_>,
    _: &Product,
    _: usize,
) -> Result<CpuKernel, Declined> {
    Err(Declined::because("8-bit factors are packed for tile registers and as pairs only"))
}

/// `bytes` with a right operand packed for tile registers.
#[cfg(target_arch = "x86_64")]
fn bytes_packed<A: Byte, B: Byte>(
    isa: Isa,
    call: &CallForm<'_>,
    p: &Product,
    which: usize,
) -> Result<CpuKernel, Declined> {
    if !isa.has_int8_tiles() {
        return Err(Declined::because("8-bit factors are packed for tile registers only"));
    }
    let (shape, [sa, sb]) = packable(p, which, 4)?;
    let offset = p.b.offset;
    let key = format!("tiles.b {shape:?} {sb:?} {offset}");
    let p = p.clone();
    let kernel = CpuKernel::new("cpu.gemm_i8.amx_int8.packed", call, move |r: &Run<'_>| {
        let a = Mat { ptr: r.ptr::<A>(0, &p.a), rs: sa.0, cs: sa.1 };
        let c = MatMut::rows(r.bufs[2].ptr as *mut i32, p.n);
        // SAFETY: `CpuKernel::run` checked that A and the result lie in their buffers. Buffer 1 has the size
        // of the packed operand, which `pack` wrote. `has_int8_tiles` was checked above.
        unsafe { gemm_i8_tiles(r.team, &Gemm::new(p.size(), a, (r.bufs[1].ptr.cast_const(), B::SIGNED), c)) };
    })?;
    Ok(kernel.with_packed(1, shape.bytes() / 4, key, move |team, from, to| {
        let b = Mat { ptr: (from as *const B).wrapping_offset(offset), rs: sb.0, cs: sb.1 };
        // SAFETY: `CpuKernel::pack` checked that `from` holds the view and `to` the packed bytes.
        unsafe { pack_i8_tiles(&shape, Some(team), b, to) }
    }))
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn attend_halves(
    _: Isa,
    _: &CallForm<'_>,
    _: Attention,
    _: Option<View>,
) -> Result<CpuKernel, Declined> {
    Err(Declined::because("attention in bf16 needs tile registers"))
}

/// Attention with bf16 queries, keys and values on tile registers. The mask, if there is one, is f32 or bf16
/// and has the shape of the scores.
#[cfg(target_arch = "x86_64")]
pub(crate) fn attend_halves(
    isa: Isa,
    call: &CallForm<'_>,
    a: Attention,
    mask: Option<View>,
) -> Result<CpuKernel, Declined> {
    if !isa.has_bf16_tiles() || call.precision < MatmulPrecision::Medium {
        return Err(Declined::because("attention in bf16 needs tile registers and medium precision (O2)"));
    }
    // Attention of few queries is bound by memory, and packing would double its memory traffic.
    if a.heads / a.kv_heads * a.queries <= super::gemv::ROWS || a.keys == 0 {
        return Err(Declined::because("attention with few queries does not use tile registers"));
    }
    match (call.inputs.get(3).map_or(DType::F32, |m| m.dtype), call.outputs[0].dtype) {
        (DType::F32, DType::F32) => attend_as::<f32, f32>(call, a, mask),
        (DType::F32, DType::BF16) => attend_as::<f32, bf16>(call, a, mask),
        (DType::BF16, DType::F32) => attend_as::<bf16, f32>(call, a, mask),
        (DType::BF16, DType::BF16) => attend_as::<bf16, bf16>(call, a, mask),
        (m, y) => {
            Err(Declined::because(format!("there is no kernel with a mask of {m} and a result of {y}")))
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn attend_as<M: MaskElem + 'static, Y: OutElem + 'static>(
    call: &CallForm<'_>,
    a: Attention,
    mask: Option<View>,
) -> Result<CpuKernel, Declined> {
    let views = [0, 1, 2].map(|i| call.inputs[i].view.clone());
    let out = View::dense(&[a.batch, a.heads, a.queries, a.dv]);
    let last = call.inputs.len();
    fn strides(v: &View) -> [isize; 4] {
        [v.strides[0], v.strides[1], v.strides[2], v.strides[3]]
    }
    CpuKernel::new(format!("cpu.{}.amx_bf16", CompositeKind::Attention), call, move |r| {
        let heads =
            |i: usize| Heads { ptr: SharedConst(r.ptr::<bf16>(i, &views[i])), strides: strides(&views[i]) };
        let y = Heads { ptr: SharedMut(r.bufs[last].ptr as *mut Y), strides: strides(&out) };
        let mask = mask.as_ref().map(|m| Heads { ptr: SharedConst(r.ptr::<M>(3, m)), strides: strides(m) });
        // SAFETY: `CpuKernel::run` checked that the views lie in their buffers and that the output overlaps
        // no operand; `attend_halves` checked for tile registers.
        unsafe {
            let operands = Operands { q: heads(0), k: heads(1), v: heads(2), mask, y };
            attention_bf16(r.team, r.isa, &a, operands)
        }
    })
}

//! Turns library calls for convolutions of bytes in the blocked layout into kernels.

use super::blocked::Buffers;
use super::blocked_calls::{Simple, result_of};
use super::blocked_int8::{BLOCK, Blocked8, ByteEpilogue, Engine, Store};
use super::plain::Conv;
use crate::Declined;
use crate::cpu::library::CpuKernel;
use crate::cpu::sys::Isa;
use crate::library_call::CallForm;
use halcyon_ir::fused::{Fused, InstrKind, Param};
use halcyon_ir::target::Epilogue;
use halcyon_ir::{DType, ScalarOp};
use std::borrow::Cow;

/// The number that a register holds, if it is a literal.
fn literal(f: &Fused, r: u32) -> Option<f64> {
    let InstrKind::Param(k) = f.body.get(r as usize)?.kind else { return None };
    match f.params.get(k as usize)? {
        (_, Param::Literal(v)) => Some(v.as_f64()),
        _ => None,
    }
}

/// Splits an epilogue into the part that computes floats, and the way in which its result is stored. The
/// chain quantises a result of bytes with a division (or multiplication) by a literal, a rounding, possibly
/// an addition of the zero point, and a cast.
fn store(f: &Fused) -> Option<(Cow<'_, Fused>, Store)> {
    let [out] = &f.outs[..] else { return None };
    let signed = match out.dtype {
        DType::F32 => return Some((Cow::Borrowed(f), Store::Float)),
        DType::I8 => true,
        DType::U8 => false,
        _ => return None,
    };
    let op = |r: u32| match f.body.get(r as usize).map(|i| (&i.kind, &i.args)) {
        Some((InstrKind::Op(op), args)) => Some((*op, args)),
        _ => None,
    };
    let (mut at, mut zero) = (out.value, 0.0);
    if let Some(i) = f.body.get(at as usize)
        && i.kind == InstrKind::Cast
        && i.dtype == out.dtype
    {
        at = i.args[0];
    }
    if let Some((ScalarOp::Add, args)) = op(at) {
        zero = literal(f, args[1])?;
        at = args[0];
    }
    let Some((ScalarOp::Round, args)) = op(at) else { return None };
    let (by, args) = op(args[0])?;
    let factor = literal(f, args[1]).filter(|v| v.is_finite() && *v != 0.0)?;
    let inverse = match by {
        ScalarOp::Div => 1.0 / factor as f32,
        ScalarOp::Mul => factor as f32,
        _ => return None,
    };
    let value = args[0];
    let mut f = f.clone();
    f.body.truncate(value as usize + 1);
    if f.body.last().is_none_or(|i| i.dtype != DType::F32) || !inverse.is_finite() {
        return None;
    }
    (f.outs[0].value, f.outs[0].dtype) = (value, DType::F32);
    Some((Cow::Owned(f), Store::Byte { inverse, zero: zero as f32, signed }))
}

/// Convolution of bytes. `inner` is the number of channels of an input block, `out` the size of the result.
pub(super) fn conv8(
    isa: Isa,
    threads: usize,
    call: &CallForm<'_>,
    conv: Conv,
    inner: usize,
    out: [usize; 5],
) -> Result<CpuKernel, Declined> {
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let Some(engine) = Engine::of(isa) else {
        return no("this processor has no instructions for products of bytes");
    };
    let (x, w, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let k = Blocked8::new(conv, threads, engine, x.dtype == DType::I8);
    let Some(k) = k.filter(|_| inner == BLOCK && out[4] == BLOCK) else {
        return no("the channels do not fill whole blocks of 64");
    };
    if out != result_of(&conv, BLOCK) || conv.weight_len() != w.view.numel() {
        return no("the sizes of the operands and of the result do not match");
    }
    let [n, ob, oh, ow, ol] = out;
    let (simple, to) = match &call.epilogue {
        None if y.dtype != DType::F32 => return no("without an epilogue, the result must be f32"),
        None => (Simple::default(), Store::Float),
        Some(e) => {
            let found = store(e.fused).and_then(|(fused, to)| {
                let e = Epilogue { fused: &fused, ..*e };
                let s = Simple::of(call, &e, [n, ob, oh * ow, ol])?;
                (!s.half_residual && !s.half_out).then_some((s, to))
            });
            match found {
                Some(found) => found,
                None => {
                    return no("the epilogue must consist of scale, bias, residual, clamp and quantisation");
                }
            }
        }
    };
    if call.packed.is_some_and(|p| p != 1) {
        return no("only the weights can be packed");
    }
    let packed = call.packed.is_some();
    let own = if packed { 0 } else { k.weights().next_multiple_of(64) };
    let name = format!("cpu.conv_blocked8.{}{}", engine.name(), if packed { ".packed" } else { "" });
    let (places, xv, wv, kernel) = (call.inputs.len(), x.view.clone(), w.view.clone(), k.clone());
    let made = CpuKernel::new(name, call, move |r| {
        let work = r.bufs.get(places + 1).map_or(std::ptr::null_mut(), |b| b.ptr);
        let (x, y) = (r.ptr::<u8>(0, &xv), r.bufs[places].ptr);
        let f = simple.bind(r);
        let after = ByteEpilogue { scale: f.scale, bias: f.bias, residual: f.residual, act: f.act, to };
        // SAFETY: `CpuKernel::run` has checked that the dense operands, the output and the workspace lie in
        // their buffers, and that output and workspace share no buffer with another operand; sizes were
        // checked above. `w` holds weights that `pack` wrote, either just above or before the device bound
        // them. `Engine::of` has checked for the instructions.
        unsafe {
            let w = if packed {
                r.bufs[1].ptr as *const u8
            } else {
                kernel.pack(r.team, r.ptr::<i8>(1, &wv), work);
                work as *const u8
            };
            kernel.run(r.team, isa, Buffers { x, w, y, work: work.wrapping_add(own) }, after);
        }
    })?;
    let made = made.with_workspace(own + k.workspace());
    if !packed {
        return Ok(made);
    }
    let (offset, ws) = (w.view.offset, &w.view.shape);
    let key = format!("conv_blocked8 {} {ws:?} {offset}", conv.groups);
    Ok(made.with_packed(1, k.weights() / size_of::<f32>(), key, move |team, from, to| {
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant, and that `to` has room
        // for `k.weights()` bytes.
        unsafe { k.pack(team, (from as *const i8).wrapping_offset(offset), to) }
    }))
}

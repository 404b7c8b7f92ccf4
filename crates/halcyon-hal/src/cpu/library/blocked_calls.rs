//! From calls to the kernels over channels in blocks.

use super::blocked::{Blocked, Finish};
use super::blocked_tile::{Act, pool as pool_tiles};
use super::calls::{dense, pool_kind, pool_window, ptr, reason};
use super::conv::Conv;
use super::post::{Post, PostRun};
use super::simd::lanes;
use super::window::Window;
use super::{CpuKernel, Run};
use crate::cpu::sys::Isa;
use crate::cpu::team::SharedConst;
use crate::{Declined, LibraryCall};
use halcyon_ir::composite::Composite;
use halcyon_ir::fused::{InstrKind, Param};
use halcyon_ir::layout::{View, dense_strides};
use halcyon_ir::op::Op;
use halcyon_ir::target::Epilogue;
use halcyon_ir::{DType, ScalarOp};

/// The one node of the body that is no view.
fn inner(c: &Composite) -> Result<&Op, Declined> {
    let mut ops = c.body.nodes().iter().map(|n| &n.op).filter(|op| !op.is_leaf() && !op.is_view());
    ops.next().ok_or_else(|| Declined::because("the body is empty"))
}

/// Sizes `[N, C / B, H, W, B]`, or `[N, C, H, W]` as blocks of one.
fn blocks(shape: &[usize]) -> Option<[usize; 5]> {
    match *shape {
        [n, c, h, w] => Some([n, c, h, w, 1]),
        [n, c, h, w, b] => Some([n, c, h, w, b]),
        _ => None,
    }
}

/// Operands: the input in blocks, or `[N, C, H, W]`; the weights `[O, C / groups, KH, KW]`.
pub(crate) fn conv(
    isa: Isa,
    threads: usize,
    call: &LibraryCall<'_>,
    c: &Composite,
) -> Result<CpuKernel, Declined> {
    let ([x, w, ..], [y]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("two operands and one result are needed"));
    };
    dense(call, &[0, 1])?;
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let (Op::Conv(o), Some([n, cb, h, v, b]), Some(out)) =
        (inner(c)?, blocks(&x.view.shape), blocks(&y.view.shape))
    else {
        return no("an image in blocks is needed");
    };
    if [x.dtype, w.dtype, y.dtype] != [DType::F32; 3] || w.view.rank() != 4 || y.view.rank() != 5 {
        return no("f32 in blocks, and weights of two spatial axes, are needed");
    }
    let ws = &w.view.shape;
    let pads: Vec<(isize, isize)> = o.pad.iter().map(|p| (p.0 as isize, p.1 as isize)).collect();
    let window = reason(Window::new(&[h, v], &ws[2..], &o.stride, &o.dilation, &pads, &o.input_dilation))?;
    let conv = reason(Conv::new(n, cb * b, ws[0], o.groups, window))?;
    let Some(k) = Blocked::new(isa, conv, b).filter(|_| out[4] == lanes(isa)) else {
        return no("the channels do not fill whole blocks of a vector");
    };
    if conv.output_len() != y.view.numel() || conv.weight_len() != w.view.numel() {
        return no("the operands have other sizes");
    }
    let [_, ob, oh, ow, ol] = out;
    let simple = call.epilogue.as_ref().and_then(|e| Simple::of(call, e, [n, ob, oh * ow, ol]));
    let post = if simple.is_some() { None } else { Post::new(call, 2, oh * ow * ol)? };
    let simple = simple.unwrap_or_default();
    let (places, args) = (call.inputs.len(), post.as_ref().map_or(0, |p| p.args));
    let (xv, wv, packed) = (x.view.clone(), w.view.clone(), call.packed);
    if packed.is_some_and(|p| p != 1) {
        return no("only the weights are packed");
    }
    // Weights that are not packed ahead are packed for every run.
    let own = if packed.is_some() { 0 } else { k.weights().next_multiple_of(16) };
    let name = format!("cpu.conv_blocked.{}{}", isa.name(), if packed.is_some() { ".packed" } else { "" });
    let workspace = (own + k.workspace(threads)) * size_of::<f32>();
    let kernel = CpuKernel::new(name, call, move |r| {
        // The workspace is for so many: the device has one team.
        assert_eq!(r.team.threads(), threads, "the kernel was made for another team");
        let work = r.bufs.get(places + 1).map_or(std::ptr::null_mut(), |b| b.ptr as *mut f32);
        let x = ptr::<f32>(r, 0, &xv);
        let finish = simple.bind(r);
        // SAFETY: the kernel's checks: dense operands inside their buffers, an output and a workspace shared with nothing; weights
        // are packed by the device or here; the chain lives in this closure, whose run is under way.
        unsafe {
            let w = if packed.is_some() {
                r.bufs[1].ptr as *const f32
            } else {
                k.pack(r.team, ptr::<f32>(r, 1, &wv), work);
                work as *const f32
            };
            let post = PostRun::new(post.as_ref(), r);
            k.run(r.team, isa, x, w, r.bufs[places].ptr as *mut f32, finish, post, work.wrapping_add(own));
        }
    })?;
    let kernel = kernel.with_args(args).with_workspace(workspace);
    if packed.is_none() {
        return Ok(kernel);
    }
    let offset = w.view.offset;
    // The sizes belong to it: one constant may be seen as weights of several shapes.
    let key = format!("conv_blocked {} {b} {} {ws:?} {offset}", lanes(isa), o.groups);
    Ok(kernel.with_packed(1, k.weights(), key, move |team, from, to| {
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant, and the room.
        unsafe { k.pack(team, (from as *const f32).wrapping_offset(offset), to as *mut f32) }
    }))
}

/// An epilogue that the register tiles do themselves: where its operands are.
#[derive(Clone, Copy, Debug, Default)]
struct Simple {
    /// Buffer, and the first element.
    scale: Option<(usize, isize)>,
    bias: Option<(usize, isize)>,
    residual: Option<(usize, isize)>,
    act: Option<Act>,
}

impl Simple {
    /// Reads a chain as scale, bias, residual and activation, each at most once and in this order, over `[N, O / B, pixels, B]`.
    fn of(call: &LibraryCall<'_>, e: &Epilogue<'_>, dims: [usize; 4]) -> Option<Simple> {
        let f = e.fused;
        let [out] = &f.outs[..] else { return None };
        let [_, ob, pixels, lanes] = dims;
        let strides = |v: &View, axes: &[usize]| {
            let v = View { shape: f.space.clone(), mask: None, ..v.clone() };
            v.reshape(axes).map(|v| v.strides)
        };
        let like = |v: &View, want: &[isize]| {
            strides(v, &dims)
                .is_some_and(|s| dims.iter().zip(s.iter().zip(want)).all(|(d, (s, w))| *d == 1 || s == w))
        };
        let dense = dense_strides(&dims);
        let total: usize = dims.iter().product();
        let same = f.space.iter().product::<usize>() == total;
        if f.reduced > 0 || out.reduce.is_some() || out.dtype != DType::F32 || !same {
            return None;
        }
        if out.view.offset != 0 || !like(&out.view, &dense) {
            return None;
        }
        let mut s = Simple::default();
        // The chain's value so far, and how much has been done to it: 1 scale, 2 bias, 3 residual, 4 activation.
        let (mut value, mut done) = (None, 0);
        for (i, instr) in f.body.iter().enumerate() {
            let i = i as u32;
            let op = match instr.kind {
                InstrKind::Load(k) => {
                    let l = &f.loads[k as usize];
                    if l.dtype != DType::F32 || l.view.mask.is_some() {
                        return None;
                    }
                    if l.input == e.product {
                        if value.is_some() || l.view.offset != 0 || !like(&l.view, &dense) {
                            return None;
                        }
                        value = Some(i);
                    }
                    continue;
                }
                InstrKind::Param(_) => continue,
                InstrKind::Op(op) => op,
                _ => return None,
            };
            // Only the chain itself is computed.
            let at = instr.args.iter().position(|a| Some(*a) == value)?;
            let other = instr.args.get(1 - at.min(1)).map(|r| &f.body[*r as usize]);
            let load = other.and_then(|o| match o.kind {
                InstrKind::Load(k) => Some(&f.loads[k as usize]).filter(|l| l.input != e.product),
                _ => None,
            });
            let literal = other.and_then(|o| match o.kind {
                InstrKind::Param(k) => match f.params[k as usize] {
                    // (A bound that is NaN makes all values NaN, which the tiles' clamp does not.)
                    (DType::F32, Param::Literal(v)) => Some(v.as_f64() as f32).filter(|v| !v.is_nan()),
                    _ => None,
                },
                _ => None,
            });
            // Where an operand begins, if it lies as wanted and inside its buffer.
            let place = |want: &[isize]| {
                let l = load?;
                let k = 2 + l.input as usize - usize::from(l.input > e.product);
                let size = call.inputs.get(k)?.view.numel() as isize;
                let (lo, hi) = l.view.range()?;
                (like(&l.view, want) && lo >= 0 && hi < size).then_some((k, l.view.offset))
            };
            let channels = [0, if ob == 1 { 0 } else { lanes as isize }, 0, 1];
            let by_channel = || if pixels * dims[0] == 1 { None } else { place(&channels) };
            match op {
                ScalarOp::Mul if done < 1 => (s.scale, done) = (Some(by_channel()?), 1),
                ScalarOp::Add => match by_channel() {
                    Some(p) if done < 2 => (s.bias, done) = (Some(p), 2),
                    // (Of one pixel, what is a bias and what a residual is one.)
                    _ if done < 3 => (s.residual, done) = (Some(place(&dense)?), 3),
                    _ => return None,
                },
                ScalarOp::Relu if done < 4 => (s.act, done) = (Some(Act::Relu), 4),
                ScalarOp::Max if done < 4 => (s.act, done) = (Some(Act::Clamp(literal?, f32::INFINITY)), 4),
                ScalarOp::Min => {
                    let hi = literal?;
                    s.act = Some(match s.act {
                        None => Act::Clamp(f32::NEG_INFINITY, hi),
                        Some(Act::Relu) => Act::Clamp(0.0, hi),
                        Some(Act::Clamp(lo, h)) if h == f32::INFINITY && lo <= hi => Act::Clamp(lo, hi),
                        _ => return None,
                    });
                    done = 4;
                }
                _ => return None,
            }
            value = Some(i);
        }
        (value == Some(out.value)).then_some(s)
    }

    fn bind(&self, r: &Run<'_>) -> Finish {
        let at = |p: Option<(usize, isize)>| {
            SharedConst(p.map_or(std::ptr::null(), |(k, offset)| {
                (r.bufs[k].ptr as *const f32).wrapping_offset(offset)
            }))
        };
        Finish {
            scale: at(self.scale),
            bias: at(self.bias),
            residual: at(self.residual),
            act: self.act.unwrap_or(Act::None),
        }
    }
}

/// Pooling of an image in blocks.
pub(crate) fn pool(isa: Isa, call: &LibraryCall<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    let ([x], [y]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("one operand and one result are needed"));
    };
    dense(call, &[0])?;
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let (Op::Pool(p), [n, cb, h, v, b], DType::F32) = (inner(c)?, &x.view.shape[..], x.dtype) else {
        return no("an f32 image in blocks is needed");
    };
    let window = pool_window(p, &[*h, *v])?;
    if *b != lanes(isa) || n * cb * window.out_size() * b != y.view.numel() {
        return no("the blocks are not a vector's, or the output has another size");
    }
    let (kind, planes, v) = (pool_kind(p), n * cb, x.view.clone());
    CpuKernel::new(format!("cpu.pool_blocked.{}", isa.name()), call, move |r| {
        let (x, y) = (ptr::<f32>(r, 0, &v), r.bufs[1].ptr as *mut f32);
        // SAFETY: the kernel's checks: a dense operand inside its buffer, an output shared with nothing.
        unsafe { pool_tiles(r.team, isa, kind, planes, &window, x, y) }
    })
}

//! Turns library calls into kernels: convolutions, pooling, row kernels and attention, with the gradients of
//! pooling, layer norm and attention.

use super::attention::grad::{GradOperands, attention_grad};
use super::attention::{Attention, Heads, Operands, attention};
use super::conv::max_grad;
use super::conv::plain::{Conv, ConvOperands, ConvWeights, conv_f32, conv_rows};
use super::conv::pool::{Pool, pool};
use super::conv::window::Window;
use super::epilogue::{BoundChain, EpilogueChain, run_all};
use super::rows::layer_norm_grad::layer_norm_grad;
use super::rows::softmax;
use super::wide::{Wide, Widened, with_type};
use super::{CpuKernel, Run};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use crate::{Declined, Operand};
use halcyon_ir::composite::{Composite, CompositeKind};
use halcyon_ir::layout::View;
use halcyon_ir::ops::{self, PoolKind};
use halcyon_ir::{DType, Result as IrResult};
use half::{bf16, f16};

/// Declines unless the inputs `which` have dense strides (at any offset).
pub(super) fn dense(call: &CallForm<'_>, which: &[usize]) -> Result<(), Declined> {
    let bad: Vec<usize> =
        which.iter().copied().filter(|&i| !call.inputs[i].view.has_dense_strides()).collect();
    if bad.is_empty() { Ok(()) } else { Err(Declined::needs_dense(bad)) }
}

pub(super) fn reason<T>(r: IrResult<T>) -> Result<T, Declined> {
    r.map_err(|e| Declined::because(e.to_string()))
}

pub(crate) fn conv(isa: Isa, call: &CallForm<'_>, c: &ops::Conv) -> Result<CpuKernel, Declined> {
    let [x, w, ..] = call.inputs else {
        return Err(Declined::because("two operands are needed"));
    };
    dense(call, &[0, 1])?;
    let (xs, ws) = (&x.view.shape, &w.view.shape);
    let pads: Vec<(isize, isize)> = c.pad.iter().map(|p| (p.0 as isize, p.1 as isize)).collect();
    let window = reason(Window::new(&xs[2..], &ws[2..], &c.stride, &c.dilation, &pads, &c.input_dilation))?;
    let conv = reason(Conv::new(xs[0], xs[1], ws[0], c.groups, window))?;
    if conv.output_len() != call.outputs[0].view.numel() {
        return Err(Declined::because("the output buffer does not have the size of the result"));
    }
    let (d, xv, wv) = (x.dtype, x.view.clone(), w.view.clone());
    let name = if d == DType::F32 { format!("cpu.conv.{}", isa.name()) } else { format!("cpu.conv.{d}") };
    if !d.is_float() {
        return Err(Declined::because("a float type is needed"));
    }
    let chain = EpilogueChain::new(call, 2, conv.window.out_size())?;
    if chain.is_some() && d != DType::F32 {
        return Err(Declined::because("only convolutions of f32 support an epilogue"));
    }
    if let Some(which) = call.packed {
        return conv_packed(isa, call, conv, which, chain);
    }
    let (out, args) = (call.inputs.len(), chain.as_ref().map_or(0, |p| p.args));
    let kernel = CpuKernel::new(name, call, move |r| {
        let y = r.bufs[out].ptr;
        macro_rules! rows {
            ($t:ty) => {{
                let (x, w) = (r.ptr::<$t>(0, &xv), r.ptr::<$t>(1, &wv));
                let operands = ConvOperands::new(x, w, y as *mut $t);
                // SAFETY: `CpuKernel::run` has checked that the dense operands lie in their buffers and that
                // the output, of the size checked above, shares no buffer with an input.
                unsafe { conv_rows(r.team, r.isa, &conv, &operands) }
            }};
        }
        match d {
            DType::F32 => {
                let (x, w) = (r.ptr::<f32>(0, &xv), r.ptr::<f32>(1, &wv));
                let y = y as *mut f32;
                // SAFETY: `CpuKernel::run` has checked the buffers as for `rows`. The chain lives in this
                // closure and its operands in `r`. Both outlive this call.
                unsafe {
                    let on_the_way = BoundChain::new(chain.as_ref().filter(|_| !conv.few()), r);
                    let operands = ConvOperands { chain: on_the_way, ..ConvOperands::new(x, w, y) };
                    conv_f32(r.team, r.isa, &conv, None, &operands);
                    let planes = conv.batch * conv.c_out;
                    run_all(chain.as_ref().filter(|_| conv.few()), r, planes, y);
                }
            }
            DType::F16 => rows!(f16),
            DType::BF16 => rows!(bf16),
            _ => rows!(f64),
        }
    })?;
    Ok(kernel.with_args(args))
}

fn conv_packed(
    isa: Isa,
    call: &CallForm<'_>,
    conv: Conv,
    which: usize,
    chain: Option<EpilogueChain>,
) -> Result<CpuKernel, Declined> {
    let floats = ConvWeights::floats(isa, &conv).filter(|_| which == 1 && call.inputs[1].dtype == DType::F32);
    let Some(floats) = floats else {
        return Err(Declined::because("this convolution does not support packed weights"));
    };
    let (xv, offset) = (call.inputs[0].view.clone(), call.inputs[1].view.offset);
    let sizes = (conv.c_in, conv.c_out, conv.groups, conv.window.kernel);
    let key = format!("conv {sizes:?} {isa:?} {offset}");
    let (out, args) = (call.inputs.len(), chain.as_ref().map_or(0, |p| p.args));
    let kernel = CpuKernel::new(format!("cpu.conv.{}.packed", isa.name()), call, move |r| {
        let x = r.ptr::<f32>(0, &xv);
        // SAFETY: `CpuKernel::run` has checked that the operands lie in their buffers and that the output
        // shares no buffer with an input. Input 1 is bound to the buffer that `pack` wrote, and the kernel
        // reads the weights from there, so the pointer to unpacked weights may be null.
        unsafe {
            let w = ConvWeights::new(isa, &conv, r.bufs[1].ptr as *const f32);
            let (null, y) = (std::ptr::null(), r.bufs[out].ptr as *mut f32);
            let chain = BoundChain::new(chain.as_ref(), r);
            conv_f32(r.team, isa, &conv, Some(&w), &ConvOperands { chain, ..ConvOperands::new(x, null, y) })
        }
    })?;
    Ok(kernel.with_args(args).with_packed(1, floats, key, move |team, from, to| {
        let w = (from as *const f32).wrapping_offset(offset);
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant, and that `to` has room
        // for `floats` floats.
        unsafe { ConvWeights::pack(Some(team), isa, &conv, w, to as *mut f32) }
    }))
}

/// The window of a pooling op over the given spatial sizes.
pub(super) fn pool_window(p: &ops::Pool, spatial: &[usize]) -> Result<Window, Declined> {
    let pads: Vec<(isize, isize)> = p.pad.iter().map(|p| (p.0 as isize, p.1 as isize)).collect();
    let ones = vec![1; p.kernel.len()];
    reason(Window::new(spatial, &p.kernel, &p.stride, &p.dilation, &pads, &ones))
}

pub(super) fn pool_kind(p: &ops::Pool) -> Pool {
    match p.kind {
        PoolKind::Max => Pool::Max,
        PoolKind::Avg { count_include_pad } => Pool::Average { count_include_pad },
    }
}

pub(crate) fn pooling(call: &CallForm<'_>, p: &ops::Pool) -> Result<CpuKernel, Declined> {
    let [x] = call.inputs else {
        return Err(Declined::because("one operand is needed"));
    };
    dense(call, &[0])?;
    let window = pool_window(p, &x.view.shape[2..])?;
    let planes = x.view.shape[0] * x.view.shape[1];
    if planes * window.out_size() != call.outputs[0].view.numel() {
        return Err(Declined::because("the output buffer does not have the size of the result"));
    }
    let (kind, d, v) = (pool_kind(p), x.dtype, x.view.clone());
    CpuKernel::new("cpu.pool", call, move |r| {
        // SAFETY: `CpuKernel::run` has checked that the dense operand lies in its buffer and that the output,
        // of the size checked above, shares no buffer with it.
        with_type!(d, T => unsafe { pool(r.team, r.isa, kind, planes, &window, r.ptr::<T>(0, &v), r.bufs[1].ptr as *mut T) })
    })
}

/// Gradient of pooling with operands x, y and dy (y is not read). For max pooling in f32 over windows that do
/// not overlap, each element gets at most one gradient. Otherwise the gradients of each plane are summed in
/// f64 and rounded once.
pub(crate) fn pool_grad(isa: Isa, call: &CallForm<'_>, p: &ops::Pool) -> Result<CpuKernel, Declined> {
    let [x, _, dy] = call.inputs else {
        return Err(Declined::because("three operands are needed"));
    };
    dense(call, &[0, 2])?;
    if !x.dtype.is_float() {
        return Err(Declined::because("a float type is needed"));
    }
    let window = pool_window(p, &x.view.shape[2..])?;
    let planes = x.view.shape[0] * x.view.shape[1];
    if planes * window.out_size() != dy.view.numel() {
        return Err(Declined::because("dy has another size"));
    }
    let (kind, d, xv, gv) = (pool_kind(p), x.dtype, x.view.clone(), dy.view.clone());
    if d == DType::F32 && kind == Pool::Max && max_grad::is_separate(&window) {
        return CpuKernel::new(format!("cpu.max_pool_grad.{}", isa.name()), call, move |r| {
            let (x, g) = (r.ptr::<f32>(0, &xv), r.ptr::<f32>(2, &gv));
            // SAFETY: `CpuKernel::run` has checked that the dense operands and the output lie in their
            // buffers and do not overlap; the sizes were checked above.
            unsafe { max_grad::run(r.team, r.isa, planes, &window, (x, g), r.bufs[3].ptr as *mut f32) }
        });
    }
    CpuKernel::new("cpu.pool_grad", call, move |r| {
        with_type!(d, T => {
            let (xs, gs) = (SharedConst(r.ptr::<T>(0, &xv)), SharedConst(r.ptr::<T>(2, &gv)));
            let out = SharedMut(r.bufs[3].ptr as *mut T);
            let (n_in, n_out) = (window.in_size(), window.out_size());
            r.team.ranges(planes, (8192 / (n_out * window.kernel_size()).max(1)).max(1), &|a, b| {
                let mut acc = vec![0f64; n_in];
                for q in a..b {
                    acc.fill(0.0);
                    // SAFETY: `CpuKernel::run` has checked that the dense operands and the output lie in
                    // their buffers and do not overlap; parts write disjoint planes.
                    unsafe {
                        let x = std::slice::from_raw_parts(xs.get().add(q * n_in), n_in);
                        let g = std::slice::from_raw_parts(gs.get().add(q * n_out), n_out);
                        plane_grad(&window, kind, x, g, &mut acc);
                        for (i, v) in acc.iter().enumerate() {
                            *out.get().add(q * n_in + i) = T::narrow(<<T as Widened>::W as Wide>::from_f64(*v));
                        }
                    }
                }
            });
        })
    })
}

/// Adds each window's gradient to the input elements that determined the window's result.
fn plane_grad<T: Widened>(w: &Window, kind: Pool, x: &[T], g: &[T], acc: &mut [f64]) {
    let mut o = 0;
    for od in 0..w.output[0] {
        for oh in 0..w.output[1] {
            for ow in 0..w.output[2] {
                let dy = g[o].wide().as_f64();
                o += 1;
                let mut best: Option<usize> = None;
                let mut inside: smallvec::SmallVec<[usize; 32]> = smallvec::SmallVec::new();
                for kd in 0..w.kernel[0] {
                    for kh in 0..w.kernel[1] {
                        for kw in 0..w.kernel[2] {
                            let at = (w.read(0, od, kd), w.read(1, oh, kh), w.read(2, ow, kw));
                            let (Some(d), Some(h), Some(c)) = at else { continue };
                            let i = (d * w.input[1] + h) * w.input[2] + c;
                            if kind == Pool::Max {
                                // If several elements are the largest, the first of them is used. NaN counts
                                // as the largest.
                                let larger = |b: usize| x[i].wide().order(x[b].wide()).is_gt();
                                best = best.filter(|b| !larger(*b)).or(Some(i));
                            } else {
                                inside.push(i);
                            }
                        }
                    }
                }
                match kind {
                    Pool::Max => {
                        if let Some(b) = best {
                            acc[b] += dy;
                        }
                    }
                    Pool::Average { count_include_pad } => {
                        let n = if count_include_pad { w.kernel_size() } else { inside.len() };
                        inside.iter().for_each(|i| acc[*i] += dy / n.max(1) as f64);
                    }
                }
            }
        }
    }
}

/// Declines types other than f32, f16 and bf16. The row kernels support these three types and compute in f32.
fn row_type(d: DType) -> Result<(), Declined> {
    match d {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        d => Err(Declined::because(format!("row kernels support f32, f16 and bf16, not {d}"))),
    }
}

macro_rules! row_call {
    ($d:expr, $t:ident => $e:expr) => {
        match $d {
            DType::F16 => {
                type $t = f16;
                $e
            }
            DType::BF16 => {
                type $t = bf16;
                $e
            }
            _ => {
                type $t = f32;
                $e
            }
        }
    };
}

/// Declines a call whose result has another shape or type. The body of a composite may have such a result.
pub(super) fn like(call: &CallForm<'_>, shape: &[usize], dtype: DType) -> Result<(), Declined> {
    match call.outputs {
        [y] if y.view.shape[..] == *shape && y.dtype == dtype => Ok(()),
        _ => Err(Declined::because("the result has another shape or type")),
    }
}

fn soft(isa: Isa, call: &CallForm<'_>, axis: usize, log: bool) -> Result<CpuKernel, Declined> {
    let [x] = call.inputs else {
        return Err(Declined::because("one operand is needed"));
    };
    row_type(x.dtype)?;
    if axis + 1 != x.view.rank() {
        return Err(Declined::because("the axis is not the last one"));
    }
    dense(call, &[0])?;
    like(call, &x.view.shape, x.dtype)?;
    let n = x.view.shape[axis];
    let (rows, d, v) = (x.view.numel() / n.max(1), x.dtype, x.view.clone());
    let kind = if log { CompositeKind::LogSoftmax } else { CompositeKind::Softmax };
    let name = format!("cpu.{kind}.{}", isa.name());
    CpuKernel::new(name, call, move |r| {
        row_call!(d, T => {
            let (x, y) = (r.ptr::<T>(0, &v), r.bufs[1].ptr as *mut T);
            // SAFETY: `CpuKernel::run` has checked that the dense operand lies in its buffer, and that the
            // output, of the same shape by the op's rules, shares no buffer with it.
            unsafe {
                if log {
                    softmax::log_softmax(r.team, r.isa, &softmax::Rows { rows, n, x, y })
                } else {
                    softmax::softmax(r.team, r.isa, &softmax::Rows { rows, n, x, y })
                }
            }
        })
    })
}

/// A vector of `n` elements as f32. An f32 operand is read in place; f16 and bf16 are converted into `room`.
///
/// # Safety
/// `v` is a dense view of `n` elements of type `d`, which is f32, f16 or bf16. Buffer `buf` holds it and is
/// not written during the run.
unsafe fn floats<'a>(
    r: &Run<'a>,
    buf: usize,
    v: &View,
    d: DType,
    n: usize,
    room: &'a mut Vec<f32>,
) -> &'a [f32] {
    // SAFETY: the contract gives `n` contiguous elements of type `d`, which nothing writes.
    unsafe {
        match d {
            DType::F16 => {
                let x = std::slice::from_raw_parts(r.ptr::<f16>(buf, v), n);
                room.extend(x.iter().map(|x| x.to_f32()));
            }
            DType::BF16 => {
                let x = std::slice::from_raw_parts(r.ptr::<bf16>(buf, v), n);
                room.extend(x.iter().map(|x| x.to_f32()));
            }
            _ => return std::slice::from_raw_parts(r.ptr::<f32>(buf, v), n),
        }
    }
    room
}

fn norm(isa: Isa, call: &CallForm<'_>, axis: usize, eps: f32, centred: bool) -> Result<CpuKernel, Declined> {
    let Some(x) = call.inputs.first() else {
        return Err(Declined::because("operands are needed"));
    };
    row_type(x.dtype)?;
    let Some(row) = x.view.shape.get(axis..) else {
        return Err(Declined::because("the rows begin at an axis that the operand does not have"));
    };
    // Scales and biases of other shapes need a broadcast. Only the composite's body supports this.
    let ones = |v: &View| v.shape.iter().rev().skip(row.len()).all(|n| *n == 1);
    let fits = |o: &Operand| {
        let typed = o.dtype == x.dtype || o.dtype == DType::F32;
        o.view.rank() >= row.len() && o.view.shape.ends_with(row) && ones(&o.view) && typed
    };
    let most = if centred { 3 } else { 2 };
    if !(2..=most).contains(&call.inputs.len()) || !call.inputs[1..].iter().all(fits) {
        return Err(Declined::because("scale and bias must have the shape of a row, in its type or f32"));
    }
    dense(call, &(0..call.inputs.len()).collect::<Vec<_>>())?;
    like(call, &x.view.shape, x.dtype)?;
    let n: usize = row.iter().product();
    let (rows, d) = (x.view.numel() / n.max(1), x.dtype);
    let views: Vec<View> = call.inputs.iter().map(|o| o.view.clone()).collect();
    let types: Vec<DType> = call.inputs.iter().map(|o| o.dtype).collect();
    let kind = if centred { CompositeKind::LayerNorm } else { CompositeKind::RmsNorm };
    let name = format!("cpu.{kind}.{}", isa.name());
    CpuKernel::new(name, call, move |r| {
        let (mut s, mut b) = (vec![], vec![]);
        // SAFETY: scale and bias are dense, have the shape of a row, `n` elements, and the type of the input
        // or f32, as checked above. `CpuKernel::run` has checked their buffers, and nothing writes inputs.
        let (scale, shift) = unsafe {
            let shift = views.get(2).map_or(&[][..], |v| floats(r, 2, v, types[2], n, &mut b));
            (floats(r, 1, &views[1], types[1], n, &mut s), shift)
        };
        row_call!(d, T => {
            let (x, y) = (r.ptr::<T>(0, &views[0]), r.bufs[views.len()].ptr as *mut T);
            // SAFETY: `CpuKernel::run` has checked that the dense operands lie in their buffers, and that the
            // output, of the input's shape by the op's rules, shares no buffer with them.
            unsafe {
                let rows = softmax::Rows { rows, n, x, y };
                if centred {
                    softmax::layer_norm(r.team, r.isa, &rows, scale, shift, eps)
                } else {
                    softmax::rms_norm(r.team, r.isa, &rows, scale, eps)
                }
            }
        })
    })
}

fn norm_grad(isa: Isa, call: &CallForm<'_>, axis: usize, eps: f32) -> Result<CpuKernel, Declined> {
    let [x, scale, dy] = call.inputs else {
        return Err(Declined::because("three operands are needed"));
    };
    if call.inputs.iter().chain(call.outputs).any(|o| o.dtype != DType::F32) {
        return Err(Declined::because("f32 is needed"));
    }
    let Some(row) = x.view.shape.get(axis..) else {
        return Err(Declined::because("the rows begin at an axis that the operand does not have"));
    };
    let n: usize = row.iter().product();
    if scale.view.numel() != n || dy.view.shape != x.view.shape {
        return Err(Declined::because("the scale is not as long as a row, or dy has another shape"));
    }
    dense(call, &[0, 1, 2])?;
    let rows = x.view.numel() / n.max(1);
    like(call, &[(rows + 2) * n], DType::F32)?;
    let views: Vec<View> = call.inputs.iter().map(|o| o.view.clone()).collect();
    CpuKernel::new(format!("cpu.{}.{}", CompositeKind::LayerNormGrad, isa.name()), call, move |r| {
        let from = [0, 1, 2].map(|i| r.ptr::<f32>(i, &views[i]));
        // SAFETY: `CpuKernel::run` has checked that the dense operands, whose sizes were checked above, lie
        // in their buffers, and that the dense output shares no buffer with them.
        unsafe { layer_norm_grad(r.team, r.isa, (rows, n), eps, from, r.bufs[3].ptr as *mut f32) }
    })
}

fn attend(isa: Isa, call: &CallForm<'_>, causal: bool, scale: f32) -> Result<CpuKernel, Declined> {
    let ([q, k, v] | [q, k, v, _]) = call.inputs else {
        return Err(Declined::because("three or four operands are needed"));
    };
    let halves = [q, k, v].iter().all(|o| o.dtype == DType::BF16);
    if !halves && call.inputs.iter().any(|o| o.dtype != DType::F32) {
        return Err(Declined::because("attention of f32 or bf16 is needed"));
    }
    if call.inputs[..3].iter().any(|o| o.view.rank() != 4) {
        return Err(Declined::because("operands [b, h, s, d] are needed"));
    }
    let a = Attention {
        batch: q.view.shape[0],
        heads: q.view.shape[1],
        kv_heads: k.view.shape[1],
        queries: q.view.shape[2],
        keys: k.view.shape[2],
        d: q.view.shape[3],
        dv: v.view.shape[3],
        scale,
        causal,
    };
    let kv = [a.batch, a.kv_heads, a.keys];
    if a.kv_heads == 0
        || !a.heads.is_multiple_of(a.kv_heads)
        || k.view.shape[..3] != kv
        || v.view.shape[..3] != kv
        || k.view.shape[3] != a.d
    {
        return Err(Declined::because("the shapes of queries, keys and values do not fit together"));
    }
    // The CPU's bf16 kernel stores f32 or bf16. It checks the result's type itself.
    like(
        call,
        &[a.batch, a.heads, a.queries, a.dv],
        if halves { call.outputs[0].dtype } else { DType::F32 },
    )?;
    let scores = [a.batch, a.heads, a.queries, a.keys];
    let expands = |m: &View| m.shape.iter().rev().zip(scores.iter().rev()).all(|(n, s)| *n == 1 || n == s);
    let mask = match call.inputs.get(3) {
        Some(m) if m.view.rank() > 4 => return Err(Declined::because("the mask has more than four axes")),
        Some(m) if !expands(&m.view) => {
            return Err(Declined::because("the mask does not expand to the scores"));
        }
        Some(m) => Some(m.view.expand(&scores)),
        None => None,
    };
    if halves {
        return super::gemm::low_precision_calls::attend_halves(isa, call, a, mask);
    }
    let views = [q.view.clone(), k.view.clone(), v.view.clone()];
    let out = View::dense(&[a.batch, a.heads, a.queries, a.dv]);
    let last = call.inputs.len();
    fn strides(v: &View) -> [isize; 4] {
        [v.strides[0], v.strides[1], v.strides[2], v.strides[3]]
    }
    CpuKernel::new(format!("cpu.{}.{}", CompositeKind::Attention, isa.name()), call, move |r| {
        let heads = |i: usize, v: &View| Heads { ptr: SharedConst(r.ptr::<f32>(i, v)), strides: strides(v) };
        let y = Heads { ptr: SharedMut(r.bufs[last].ptr as *mut f32), strides: strides(&out) };
        // SAFETY: `CpuKernel::run` has checked that the views lie in their buffers, and that the output,
        // `[b, h, s, dv]` by the op's rules, shares no buffer with an input. Shapes of q, k, v and mask were
        // checked above.
        unsafe {
            let [q, k, v] = [0, 1, 2].map(|i| heads(i, &views[i]));
            let mask = mask.as_ref().map(|m| heads(3, m));
            attention(r.team, r.isa, &a, &[], Operands { q, k, v, mask, y })
        }
    })
}

fn attend_grad(isa: Isa, call: &CallForm<'_>, causal: bool, scale: f32) -> Result<CpuKernel, Declined> {
    let [q, k, v, dy] = call.inputs else {
        return Err(Declined::because("four operands are needed, without a mask"));
    };
    if call.inputs.iter().chain(call.outputs).any(|o| o.dtype != DType::F32) {
        return Err(Declined::because("f32 is needed"));
    }
    if call.inputs.iter().any(|o| o.view.rank() != 4) {
        return Err(Declined::because("operands [b, h, s, d] are needed"));
    }
    let (qs, ks, dv) = (&q.view.shape, &k.view.shape, v.view.shape[3]);
    let (batch, heads, queries, keys, d) = (qs[0], qs[1], qs[2], ks[2], qs[3]);
    let a = Attention { batch, heads, kv_heads: heads, queries, keys, d, dv, scale, causal };
    let shapes =
        [(k, [batch, heads, keys, d]), (v, [batch, heads, keys, dv]), (dy, [batch, heads, queries, dv])];
    if shapes.iter().any(|(o, s)| o.view.shape[..] != s[..]) {
        return Err(Declined::because("the shapes of the operands do not fit together"));
    }
    if causal && queries > keys {
        return Err(Declined::because("some queries attend to no key"));
    }
    like(call, &[batch * heads * (queries * d + keys * (d + dv))], DType::F32)?;
    let views: Vec<View> = call.inputs.iter().map(|o| o.view.clone()).collect();
    CpuKernel::new(format!("cpu.{}.{}", CompositeKind::AttentionGrad, isa.name()), call, move |r| {
        let heads = |i: usize| {
            let s = &views[i].strides;
            Heads { ptr: SharedConst(r.ptr::<f32>(i, &views[i])), strides: [s[0], s[1], s[2], s[3]] }
        };
        let out = SharedMut(r.bufs[4].ptr as *mut f32);
        let o = GradOperands { q: heads(0), k: heads(1), v: heads(2), dy: heads(3), out };
        // SAFETY: `CpuKernel::run` has checked that the views lie in their buffers, and that the dense output
        // of the size checked above shares no buffer with an input.
        unsafe { attention_grad(r.team, r.isa, &a, o) }
    })
}

/// Kernels for composites. A composite without a kernel is declined, and its body replaces it.
pub(crate) fn composite(isa: Isa, call: &CallForm<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    let axis =
        || c.int("axis").and_then(|a| usize::try_from(a).ok()).ok_or_else(|| Declined::because("no axis"));
    let eps = || c.float("eps").map(|e| e as f32).ok_or_else(|| Declined::because("no epsilon"));
    match &c.kind {
        CompositeKind::Softmax => soft(isa, call, axis()?, false),
        CompositeKind::LogSoftmax => soft(isa, call, axis()?, true),
        CompositeKind::LayerNorm => norm(isa, call, axis()?, eps()?, true),
        CompositeKind::RmsNorm => {
            norm(isa, call, call.inputs.first().map_or(0, |x| x.view.rank().saturating_sub(1)), eps()?, false)
        }
        CompositeKind::Attention => {
            let scale = c.float("scale").ok_or_else(|| Declined::because("no scale"))?;
            attend(isa, call, c.flag("causal"), scale as f32)
        }
        CompositeKind::LayerNormGrad => norm_grad(isa, call, axis()?, eps()?),
        CompositeKind::AttentionGrad => {
            let scale = c.float("scale").ok_or_else(|| Declined::because("no scale"))?;
            attend_grad(isa, call, c.flag("causal"), scale as f32)
        }
        kind => Err(Declined::because(format!("the CPU has no kernel for {kind}"))),
    }
}

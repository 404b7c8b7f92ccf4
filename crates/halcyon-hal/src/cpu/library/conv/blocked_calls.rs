//! Turns library calls in the blocked layout (convolution and pooling) into kernels.

use super::blocked::{AffineEpilogue, Blocked, Buffers};
use super::blocked_bf16::{Bf16Epilogue, Blocked16};
use super::blocked_bf16_tile::BLOCK;
use super::blocked_bf16_vector::{Depthwise16, pool as pool16};
use super::blocked_int8_calls::conv8;
use super::blocked_max_grad::MaxGrad;
use super::blocked_tile::{Activation, pool as pool_tiles};
use super::max_grad::is_separate;
use super::plain::Conv;
use super::window::Window;
use crate::cpu::library::calls::{dense, pool_kind, pool_window, reason};
use crate::cpu::library::epilogue::{BoundChain, EpilogueChain};
use crate::cpu::library::gemm::product_bf16::Bf16Code;
use crate::cpu::library::simd::lanes;
use crate::cpu::library::{CpuKernel, Run};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};
use crate::library_call::CallForm;
use crate::{Declined, reach};
use halcyon_ir::composite::Composite;
use halcyon_ir::fused::AffineActivation;
use halcyon_ir::ops::{Op, Pool, PoolKind};
use halcyon_ir::target::Epilogue;
use halcyon_ir::{DType, ScalarOp};

/// The first node of the composite's body that is neither a leaf nor a view nor a cast.
fn inner(c: &Composite) -> Result<&Op, Declined> {
    let calculates = |op: &&Op| !op.is_leaf() && !op.is_view() && **op != Op::Cast;
    let mut ops = c.body.nodes().iter().map(|n| &n.op).filter(calculates);
    ops.next().ok_or_else(|| Declined::because("the body is empty"))
}

/// The sizes of an image as `[N, C / B, H, W, B]`. An image `[N, C, H, W]` has B = 1.
fn blocks(shape: &[usize]) -> Option<[usize; 5]> {
    match *shape {
        [n, c, h, w] => Some([n, c, h, w, 1]),
        [n, c, h, w, b] => Some([n, c, h, w, b]),
        _ => None,
    }
}

/// Sizes of a convolution's result in blocks of `block` channels. The call's output must be compared with
/// them, because the body of a composite could give other sizes.
pub(super) fn result_of(conv: &Conv, block: usize) -> [usize; 5] {
    [conv.batch, conv.c_out / block, conv.window.output[1], conv.window.output[2], block]
}

/// Convolution in the blocked layout. Operands: the input in blocks or as `[N, C, H, W]`, and the weights
/// `[O, C / groups, KH, KW]`.
pub(crate) fn conv(
    isa: Isa,
    threads: usize,
    call: &CallForm<'_>,
    c: &Composite,
) -> Result<CpuKernel, Declined> {
    let ([x, w, ..], [y]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("two operands and one result are needed"));
    };
    dense(call, &[0, 1])?;
    let no = |why: &str| Err(Declined::because(why.to_string()));
    if call.own != 2 {
        return no("a convolution has an image and weights");
    }
    let (Op::Conv(o), Some([n, cb, h, v, b]), Some(out)) =
        (inner(c)?, blocks(&x.view.shape), blocks(&y.view.shape))
    else {
        return no("an image in blocks is needed");
    };
    if w.view.rank() != 4 || y.view.rank() != 5 {
        return no("a result in blocks and weights with two spatial axes are needed");
    }
    let bytes = matches!(x.dtype, DType::I8 | DType::U8) && w.dtype == DType::I8;
    let bf16 = [x.dtype, w.dtype] == [DType::BF16; 2] && matches!(y.dtype, DType::F32 | DType::BF16);
    if !bf16 && !bytes && [x.dtype, w.dtype, y.dtype] != [DType::F32; 3] {
        return no("f32, bf16 or bytes are needed");
    }
    let ws = &w.view.shape;
    let pads: Vec<(isize, isize)> = o.pad.iter().map(|p| (p.0 as isize, p.1 as isize)).collect();
    let window = reason(Window::new(&[h, v], &ws[2..], &o.stride, &o.dilation, &pads, &o.input_dilation))?;
    let conv = reason(Conv::new(n, cb * b, ws[0], o.groups, window))?;
    if bf16 {
        return conv16(isa, threads, call, conv, b, out);
    }
    if bytes {
        return conv8(isa, threads, call, conv, b, out);
    }
    if call.packed.is_none() && call.epilogue.is_none() && conv.has_few_positions() {
        return no("with few positions per image, the plain layout is faster");
    }
    let Some(k) = Blocked::new(isa, conv, b).filter(|_| out[4] == lanes(isa)) else {
        return no("the channels do not fill whole vectors");
    };
    if out != result_of(&conv, lanes(isa)) || conv.weight_len() != w.view.numel() {
        return no("the sizes of the operands and of the result do not match");
    }
    let [_, ob, oh, ow, ol] = out;
    let simple = call.epilogue.as_ref().and_then(|e| Simple::of(call, e, [n, ob, oh * ow, ol]));
    let simple = simple.filter(|s| !s.half_residual && !s.half_out);
    let chain = if simple.is_some() { None } else { EpilogueChain::new(call, 2, oh * ow * ol)? };
    let simple = simple.unwrap_or_default();
    let (places, args) = (call.inputs.len(), chain.as_ref().map_or(0, |p| p.args));
    let (xv, wv, packed) = (x.view.clone(), w.view.clone(), call.packed);
    if packed.is_some_and(|p| p != 1) {
        return no("only the weights can be packed");
    }
    // Weights that are not packed ahead of time are packed into the workspace in every run.
    let own = if packed.is_some() { 0 } else { k.weights().next_multiple_of(16) };
    let name = format!("cpu.conv_blocked.{}{}", isa.name(), if packed.is_some() { ".packed" } else { "" });
    let workspace = (own + k.workspace(threads)) * size_of::<f32>();
    let kernel = CpuKernel::new(name, call, move |r| {
        // The size of the workspace depends on the number of threads; a device has one team.
        assert_eq!(r.team.threads(), threads, "the kernel was made for another team");
        let work = r.bufs.get(places + 1).map_or(std::ptr::null_mut(), |b| b.ptr as *mut f32);
        let x = r.ptr::<f32>(0, &xv);
        let finish = simple.bind(r);
        // SAFETY: `CpuKernel::run` has checked that the dense operands, the output and the workspace lie in
        // their buffers, and that output and workspace share no buffer with another operand; sizes were
        // checked above. `w` holds weights that `pack` wrote, either just above or before the device bound
        // them. This closure owns the chain and `r` holds the chain's operands; both outlive this call.
        unsafe {
            let w = if packed.is_some() {
                r.bufs[1].ptr as *const f32
            } else {
                k.pack(r.team, r.ptr::<f32>(1, &wv), work);
                work as *const f32
            };
            let chain = BoundChain::new(chain.as_ref(), r);
            let y = r.bufs[places].ptr as *mut f32;
            k.run(r.team, isa, Buffers { x, w, y, work: work.wrapping_add(own) }, finish, chain);
        }
    })?;
    let kernel = kernel.with_args(args).with_workspace(workspace);
    if packed.is_none() {
        return Ok(kernel);
    }
    let offset = w.view.offset;
    // The key includes the shape: one constant may serve as weights of several shapes.
    let key = format!("conv_blocked {} {b} {} {ws:?} {offset}", lanes(isa), o.groups);
    Ok(kernel.with_packed(1, k.weights(), key, move |team, from, to| {
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant, and that `to` has room
        // for `k.weights()` floats.
        unsafe { k.pack(team, (from as *const f32).wrapping_offset(offset), to as *mut f32) }
    }))
}

/// The kernel of a bf16 convolution in blocks of 32 channels.
#[derive(Clone, Debug)]
enum Kernel16 {
    Products(Blocked16),
    Vectors(Depthwise16),
}

impl Kernel16 {
    /// Size of the packed weights in bytes.
    fn weights(&self) -> usize {
        match self {
            Kernel16::Products(k) => k.weights(),
            Kernel16::Vectors(k) => k.weights() * size_of::<f32>(),
        }
    }

    /// Packs `[O, C / groups, KH, KW]` weights into the layout that the kernel reads.
    ///
    /// # Safety
    /// The weights are readable at `from`; `to` is writable for [`Kernel16::weights`] bytes, aligned to 4
    /// bytes, and overlaps nothing else.
    unsafe fn pack(&self, team: &Team, from: *const u16, to: *mut u8) {
        // SAFETY: by contract `from` holds all weights and `to` has room for the packed ones, as both kernels
        // require.
        unsafe {
            match self {
                Kernel16::Products(k) => k.pack(team, from, to as *mut u16),
                Kernel16::Vectors(k) => k.pack(from, to as *mut f32),
            }
        }
    }
}

/// bf16 convolution with an input in blocks of 32 channels (`inner` is 32) or not in blocks (`inner` is 1).
/// `out` is the size of the result.
fn conv16(
    isa: Isa,
    threads: usize,
    call: &CallForm<'_>,
    conv: Conv,
    inner: usize,
    out: [usize; 5],
) -> Result<CpuKernel, Declined> {
    let no = |why: &str| Err(Declined::because(why.to_string()));
    if !super::blocked_bf16::available(isa) {
        return no("this processor has no bf16 products that are faster than f32 products");
    }
    let code = Bf16Code::best(isa);
    let (x, w, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let k = match Depthwise16::new(conv).filter(|_| inner == BLOCK) {
        Some(k) => Some(Kernel16::Vectors(k)),
        None => Blocked16::new(conv, inner, threads, code).map(Kernel16::Products),
    };
    let Some(k) = k.filter(|_| out[4] == BLOCK) else {
        return no("the channels do not fill whole blocks of 32");
    };
    if out != result_of(&conv, BLOCK) || conv.weight_len() != w.view.numel() {
        return no("the sizes of the operands and of the result do not match");
    }
    let [n, ob, oh, ow, ol] = out;
    let wide = y.dtype == DType::F32;
    let simple = match &call.epilogue {
        None if wide => return no("without an epilogue, the result must be bf16"),
        None => Simple::default(),
        Some(e) => match Simple::of(call, e, [n, ob, oh * ow, ol]) {
            Some(s) => s,
            None => return no("the epilogue must consist of scale, bias, residual and clamp"),
        },
    };
    if call.packed.is_some_and(|p| p != 1) {
        return no("only the weights can be packed");
    }
    let packed = call.packed.is_some();
    let own = if packed { 0 } else { k.weights().next_multiple_of(64) };
    let (isa_name, room) = match &k {
        Kernel16::Products(k) => (code.name(), k.workspace()),
        Kernel16::Vectors(_) => (isa.name(), 0),
    };
    let name = format!("cpu.conv_blocked16.{isa_name}{}", if packed { ".packed" } else { "" });
    let (places, xv, wv, kernel) = (call.inputs.len(), x.view.clone(), w.view.clone(), k.clone());
    let made = CpuKernel::new(name, call, move |r| {
        let work = r.bufs.get(places + 1).map_or(std::ptr::null_mut(), |b| b.ptr);
        let (x, y) = (r.ptr::<u16>(0, &xv), r.bufs[places].ptr);
        let after = simple.after(r, wide);
        // SAFETY: `CpuKernel::run` has checked that the dense operands, the output and the workspace lie in
        // their buffers, and that output and workspace share no buffer with another operand; sizes were
        // checked above. `w` holds weights that `pack` wrote, either just above or before the device bound
        // them. `Bf16Code::best` has chosen instructions that this processor has.
        unsafe {
            let w = if packed {
                r.bufs[1].ptr as *const u8
            } else {
                kernel.pack(r.team, r.ptr::<u16>(1, &wv), work);
                work as *const u8
            };
            match &kernel {
                Kernel16::Products(k) => {
                    let buffers = Buffers { x, w: w as *const u16, y, work: work.wrapping_add(own) };
                    k.run(r.team, isa, buffers, after);
                }
                Kernel16::Vectors(k) => k.run(r.team, isa, x, w as *const f32, y, after),
            }
        }
    })?;
    let made = made.with_workspace(own + room);
    if !packed {
        return Ok(made);
    }
    let (offset, ws) = (w.view.offset, &w.view.shape);
    let key = format!("conv_blocked16 {inner} {} {ws:?} {offset}", conv.groups);
    Ok(made.with_packed(1, k.weights() / size_of::<f32>(), key, move |team, from, to| {
        // SAFETY: `CpuKernel::pack` has checked that the weights lie in the constant, and that `to` has room
        // for `k.weights()` bytes.
        unsafe { k.pack(team, (from as *const u16).wrapping_offset(offset), to) }
    }))
}

/// The operands of an epilogue that the micro-kernels can apply: scale, bias, residual, activation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Simple {
    /// Index of the buffer, and offset of the first element.
    scale: Option<(usize, isize)>,
    bias: Option<(usize, isize)>,
    residual: Option<(usize, isize)>,
    act: Option<Activation>,
    /// Whether the residual is bf16; otherwise it is f32.
    pub(super) half_residual: bool,
    /// Whether the result is bf16; otherwise it is f32.
    pub(super) half_out: bool,
}

impl Simple {
    /// The epilogue `e` over `[N, O / B, pixels, B]`. `None` unless the epilogue is affine (with ReLU, a
    /// clamp or no activation), is computed in f32, and has a product and a result in f32 or bf16. Of its
    /// operands, only the residual may be bf16.
    pub(super) fn of(call: &CallForm<'_>, e: &Epilogue<'_>, dims: [usize; 4]) -> Option<Simple> {
        let mut a = e.fused.as_affine(e.product, &dims, &[1, 3]).ok()?;
        let half = |d: DType| matches!(d, DType::F32 | DType::BF16).then_some(d == DType::BF16);
        half(a.product)?;
        if a.compute != DType::F32 {
            return None;
        }
        // With a single pixel, a bias has the strides of a residual, so it is treated as a residual.
        if dims[0] * dims[2] == 1 {
            if a.scale.is_some() || a.bias.is_some() && a.residual.is_some() {
                return None;
            }
            a.residual = a.bias.take().or(a.residual);
        }
        // The buffer and offset of a load. Returns `None` from the function if the load reaches past its
        // operand.
        let place = |load: Option<usize>| match load {
            None => Some(None),
            Some(k) => {
                let l = &e.fused.loads[k];
                let k = call.epilogue_input(e, l);
                reach::load_fits(e.fused, l, call.inputs.get(k)?).then_some(Some((k, l.view.offset)))
            }
        };
        let act = match a.activation {
            None => None,
            Some(AffineActivation::Function(ScalarOp::Relu)) => Some(Activation::Relu),
            Some(AffineActivation::Function(_)) => return None,
            Some(AffineActivation::Clamp { lo, hi }) => Some(Activation::Clamp(lo as f32, hi as f32)),
        };
        Some(Simple {
            scale: place(a.scale)?,
            bias: place(a.bias)?,
            residual: place(a.residual)?,
            act,
            half_residual: a.residual.map_or(Some(false), |k| half(e.fused.loads[k].dtype))?,
            half_out: half(a.out)?,
        })
    }

    fn after(&self, r: &Run<'_>, wide: bool) -> Bf16Epilogue {
        let f = self.bind(r);
        let residual = match self.residual {
            // The offset is in elements.
            Some((k, at)) if self.half_residual => {
                (r.bufs[k].ptr as *const u16).wrapping_offset(at) as *const u8
            }
            _ => f.residual.get() as *const u8,
        };
        Bf16Epilogue {
            scale: f.scale,
            bias: f.bias,
            residual: SharedConst(residual),
            residual_wide: !self.half_residual,
            wide,
            act: f.act,
        }
    }

    pub(super) fn bind(&self, r: &Run<'_>) -> AffineEpilogue {
        let at = |p: Option<(usize, isize)>| {
            SharedConst(p.map_or(std::ptr::null(), |(k, offset)| {
                (r.bufs[k].ptr as *const f32).wrapping_offset(offset)
            }))
        };
        AffineEpilogue {
            scale: at(self.scale),
            bias: at(self.bias),
            residual: at(self.residual),
            act: self.act.unwrap_or(Activation::None),
        }
    }
}

/// Pooling in the blocked layout, or its gradient.
pub(crate) fn pool(isa: Isa, call: &CallForm<'_>, c: &Composite) -> Result<CpuKernel, Declined> {
    if let Op::PoolGrad(p) = inner(c)? {
        return pool_grad(isa, call, p);
    }
    let ([x], [y]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("one operand and one result are needed"));
    };
    dense(call, &[0])?;
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let (Op::Pool(p), [n, cb, h, v, b]) = (inner(c)?, &x.view.shape[..]) else {
        return no("an image in blocks is needed");
    };
    let window = pool_window(p, &[*h, *v])?;
    if x.dtype == DType::BF16 && y.dtype == x.dtype {
        if *b != BLOCK || n * cb * window.out_size() * b != y.view.numel() {
            return no(
                "the blocks are not of 32 channels, or the output buffer does not have the size of the result",
            );
        }
        let (kind, planes, v) = (pool_kind(p), (*n, *cb), x.view.clone());
        return CpuKernel::new(format!("cpu.pool_blocked16.{}", isa.name()), call, move |r| {
            let (x, y) = (r.ptr::<u16>(0, &v), r.bufs[1].ptr as *mut u16);
            // SAFETY: `CpuKernel::run` has checked that the dense operand lies in its buffer and that the
            // output, of the size checked above, shares no buffer with it.
            unsafe { pool16(r.team, isa, kind, planes, &window, x, y) }
        });
    }
    if [x.dtype, y.dtype] != [DType::F32; 2] {
        return no("f32 or bf16 is needed");
    }
    if *b != lanes(isa) || n * cb * window.out_size() * b != y.view.numel() {
        return no(
            "the blocks do not have the size of a vector, or the output buffer does not have the size of the result",
        );
    }
    let (kind, planes, v) = (pool_kind(p), n * cb, x.view.clone());
    CpuKernel::new(format!("cpu.pool_blocked.{}", isa.name()), call, move |r| {
        let (x, y) = (r.ptr::<f32>(0, &v), r.bufs[1].ptr as *mut f32);
        // SAFETY: `CpuKernel::run` has checked that the dense operand lies in its buffer and that the output,
        // of the size checked above, shares no buffer with it.
        unsafe { pool_tiles(r.team, isa, kind, planes, &window, x, y) }
    })
}

/// The gradient of max pooling in the blocked layout, for windows that do not overlap. The operands are x, y
/// and dy; y is not read.
fn pool_grad(isa: Isa, call: &CallForm<'_>, p: &Pool) -> Result<CpuKernel, Declined> {
    let ([x, _, dy], [dx]) = (call.inputs, call.outputs) else {
        return Err(Declined::because("three operands and one result are needed"));
    };
    dense(call, &[0, 2])?;
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let [n, cb, h, v, b] = x.view.shape[..] else { return no("an image in blocks is needed") };
    let window = pool_window(p, &[h, v])?;
    if p.kind != PoolKind::Max || !is_separate(&window) {
        return no("max pooling over windows that do not overlap is needed");
    }
    let planes = n * cb;
    if x.view.numel() != dx.view.numel() || planes * window.out_size() * b != dy.view.numel() {
        return no("the sizes of the operands and of the result do not match");
    }
    let Some(grad) = MaxGrad::new(planes, b, window) else {
        return no("blocks of 4, 8, 16 or 32 channels are needed");
    };
    let (xv, gv) = (x.view.clone(), dy.view.clone());
    let name = format!("cpu.max_pool_grad_blocked.{}", isa.name());
    match [x.dtype, dy.dtype, dx.dtype] {
        [DType::F32, DType::F32, DType::F32] => CpuKernel::new(name, call, move |r| {
            let (x, g) = (r.ptr::<f32>(0, &xv), r.ptr::<f32>(2, &gv));
            // SAFETY: `CpuKernel::run` has checked that the dense operands and the output lie in their
            // buffers and do not overlap; the sizes were checked above.
            unsafe { grad.run(r.team, isa, x, g, r.bufs[3].ptr as *mut f32) }
        }),
        [DType::BF16, DType::BF16, DType::BF16] => CpuKernel::new(name, call, move |r| {
            let (x, g) = (r.ptr::<u16>(0, &xv), r.ptr::<u16>(2, &gv));
            // SAFETY: `CpuKernel::run` has checked that the dense operands and the output lie in their
            // buffers and do not overlap; the sizes were checked above.
            unsafe { grad.run(r.team, isa, x, g, r.bufs[3].ptr as *mut u16) }
        }),
        _ => no("f32 or bf16 is needed"),
    }
}

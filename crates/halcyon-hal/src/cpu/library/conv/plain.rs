//! Convolution over one to three spatial axes, with groups. The layout of the input is `NC[DHW]`, of the
//! weights `OI[DHW]`.
//!
//! In f32, a convolution is a matrix product whose right factor is the unrolled input (im2col). The unrolled
//! input is never stored as a whole: its panels are gathered straight into the packing buffers of the
//! product. For one-by-one kernels the input itself is the right factor. Depthwise convolutions with few
//! outputs per channel, dilated inputs (transposed convolution) and other element types are computed row by
//! row instead.

use super::few_positions::conv_few_positions;
pub use super::window::Window;
use crate::cpu::library::accumulator::Accumulated;
use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::library::gemm::gemv::ROWS;
use crate::cpu::library::gemm::panels::{Left, gemm_panels, inline_floats, panels_inline};
use crate::cpu::library::gemm::product_f32::{
    Epilogue, Gemm, Mat, MatMut, PackElem, PackShape, Packed, Panels, gemm, gemm_packed_a,
};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use halcyon_ir::{Error, Result};

/// A convolution's sizes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Conv {
    pub batch: usize,
    /// Channels of the input and output, over all groups.
    pub c_in: usize,
    pub c_out: usize,
    pub groups: usize,
    pub window: Window,
}

impl Conv {
    /// A convolution whose weights have shape `[c_out, c_in / groups, kernel..]`.
    ///
    /// # Errors
    /// `Argument` if `groups` is 0 or does not divide both numbers of channels.
    pub fn new(batch: usize, c_in: usize, c_out: usize, groups: usize, window: Window) -> Result<Conv> {
        if groups == 0 || !c_in.is_multiple_of(groups) || !c_out.is_multiple_of(groups) {
            return Err(Error::argument(
                "conv",
                format!("{groups} groups do not divide {c_in} input and {c_out} output channels"),
            ));
        }
        Ok(Conv { batch, c_in, c_out, groups, window })
    }

    /// Whether a padded copy of the whole input, for each image or for each thread of a team, has a size that
    /// can be computed without overflow. A dilation of 2^32 may lie between two taps, all in the padding.
    pub(crate) fn can_be_copied(&self) -> bool {
        const MOST: u128 = 1 << 60;
        // More than a team has.
        const THREADS: usize = 1 << 12;
        let w = &self.window;
        // An upper bound of the rows or columns that the copy has, also if its pixels are arranged by tap.
        let axis = |i: usize| {
            let [out, stride, kernel, dilation] =
                [w.output[i], w.stride[i], w.kernel[i], w.dilation[i]].map(|n| n as u128);
            let span = out.saturating_mul(stride).saturating_add(kernel.saturating_mul(dilation));
            span.saturating_mul(kernel)
        };
        let copies = self.batch.max(THREADS) as u128;
        let bytes = [axis(1), axis(2), self.c_in as u128, copies, size_of::<f32>() as u128];
        bytes.into_iter().fold(1u128, u128::saturating_mul) < MOST
    }

    /// Number of elements of the input.
    pub fn input_len(&self) -> usize {
        self.batch * self.c_in * self.window.in_size()
    }
    /// Number of elements of the weights, `[c_out, c_in / groups, kernel..]`.
    pub fn weight_len(&self) -> usize {
        self.c_out * self.k()
    }
    /// Number of elements of the output.
    pub fn output_len(&self) -> usize {
        self.batch * self.c_out * self.window.out_size()
    }
    /// Number of multiply-adds.
    pub fn macs(&self) -> usize {
        self.batch * self.c_out * self.window.out_size() * self.k()
    }
    /// Number of products summed for one output element.
    pub(crate) fn k(&self) -> usize {
        self.c_in / self.groups * self.window.kernel_size()
    }
    fn is_depthwise(&self) -> bool {
        self.c_in == self.groups
    }
    /// Whether the convolution is a product with so few rows or columns that `gemm` computes it without
    /// panels.
    pub(crate) fn few(&self) -> bool {
        let (m, n) = (self.c_out / self.groups, self.window.out_size());
        !self.by_rows() && self.window.is_pointwise() && m.min(n) <= ROWS
    }
    fn by_rows(&self) -> bool {
        let w = &self.window;
        // `RowSpan` stores offsets inside a plane in 32 bits.
        self.is_depthwise() && self.c_out / self.groups < 4
            || w.input_dilation != [1; 3]
            || u32::try_from(w.in_size()).is_err()
    }
}

/// Weights that are packed once for many calls: the left factors of all groups, one after another. This value
/// does not own the memory.
#[derive(Clone, Copy, Debug)]
pub struct ConvWeights {
    conv: Conv,
    isa: Isa,
    shape: PackShape,
    data: SharedConst<f32>,
}

impl ConvWeights {
    fn shape(isa: Isa, conv: &Conv) -> PackShape {
        PackShape::a(isa, conv.c_out / conv.groups, conv.k())
    }

    /// Size of the packed weights in floats, or `None` if the convolution reads them unpacked.
    pub fn floats(isa: Isa, conv: &Conv) -> Option<usize> {
        // `gemm` computes products with few rows or columns without panels. With packed weights, they would
        // be computed with panels and have other results.
        (!conv.by_rows() && !conv.few()).then(|| conv.groups * ConvWeights::shape(isa, conv).floats())
    }

    /// Packs `[c_out, c_in / groups, kernel..]` weights.
    ///
    /// # Safety
    /// `conv.weight_len()` elements at `w` are readable, [`ConvWeights::floats`] floats at `dst` are
    /// writable; `w` and `dst` do not overlap.
    pub unsafe fn pack<T: PackElem>(team: Option<&Team>, isa: Isa, conv: &Conv, w: *const T, dst: *mut f32) {
        let (m, k, shape) = (conv.c_out / conv.groups, conv.k(), ConvWeights::shape(isa, conv));
        for g in 0..conv.groups {
            // SAFETY: by contract `w` holds `m * k` elements and `dst` `shape.floats()` floats for each
            // group.
            unsafe {
                let w = Mat::rows(w.wrapping_add(g * m * k), k);
                shape.pack_a(team, w, dst.wrapping_add(g * shape.floats()));
            }
        }
    }

    /// Wraps weights that [`ConvWeights::pack`] wrote. The weights also serve convolutions that differ from
    /// `conv` only in the batch and spatial sizes.
    ///
    /// # Safety
    /// `data` was packed for `conv` and `isa`, and stays readable and unchanged while the returned value is
    /// used.
    pub unsafe fn new(isa: Isa, conv: &Conv, data: *const f32) -> ConvWeights {
        ConvWeights { conv: *conv, isa, shape: ConvWeights::shape(isa, conv), data: SharedConst(data) }
    }

    fn group(&self, g: usize) -> Packed {
        // SAFETY: `new` requires weights that are packed for this shape and readable for all groups.
        unsafe { Packed::new(self.shape, self.data.get().wrapping_add(g * self.shape.floats())) }
    }
}

/// The unrolled input of one image and group. It is a matrix with a row for each channel and tap of the
/// kernel, and a column for each output position `(od, oh, ow)`.
struct Unrolled {
    x: SharedConst<f32>,
    w: Window,
}

/// A contiguous part of a row of a panel: `n` columns from `to` on. They receive `n` elements of the
/// channel's plane. The first element is at offset `from`, and consecutive elements are a stride apart.
#[derive(Clone, Copy, Default)]
struct RowSpan {
    from: u32,
    to: u8,
    n: u8,
}

/// The spans `first..last` that one tap contributes to a row of a panel. `full` says whether the spans cover
/// the whole row.
#[derive(Clone, Copy, Default)]
struct Tap {
    first: u16,
    last: u16,
    full: bool,
}

/// Capacities of the lists of spans and of taps of a panel. If they do not suffice for a kernel, the taps are
/// processed in several parts.
const MAX_SPANS: usize = 256;
const TAPS: usize = 64;
/// The widest panel, in columns.
const COLUMNS: usize = 48;
#[cfg(target_arch = "x86_64")]
const _: () =
    assert!(crate::cpu::library::simd::Avx512::VECS * crate::cpu::library::simd::Avx512::W <= COLUMNS);

impl Unrolled {
    /// Lists the spans of the taps from `t0` on for columns `j .. j + cols`, for as many taps as fit the
    /// lists. Returns the number of these taps.
    fn taps(
        &self,
        t0: usize,
        j: usize,
        cols: usize,
        nr: usize,
        row_spans: &mut [RowSpan; MAX_SPANS],
        taps: &mut [Tap; TAPS],
    ) -> usize {
        let w = &self.w;
        let [_, oh, ow] = w.output;
        let [ih, iw] = [w.input[1], w.input[2]];
        // Runs of columns within one output line: first column, length, and output position (od, oh, ow).
        let mut runs = [(0, 0, 0, 0, 0); COLUMNS];
        let (mut count, mut c) = (0, 0);
        while c < cols {
            let (line, ox) = ((j + c) / ow, (j + c) % ow);
            let len = (ow - ox).min(cols - c);
            runs[count] = (c, len, line / oh, line % oh, ox);
            count += 1;
            c += len;
        }
        let (mut used, mut done) = (0, 0);
        // Each tap adds at most one span per column.
        while done < TAPS && t0 + done < w.kernel_size() && used + cols <= MAX_SPANS {
            let t = t0 + done;
            let (td, th, tw) =
                (t / (w.kernel[1] * w.kernel[2]), t / w.kernel[2] % w.kernel[1], t % w.kernel[2]);
            let (lo, hi) = w.span(2, tw);
            let (first, mut filled) = (used, 0);
            for &(c, len, od, oh, ox) in &runs[..count] {
                let (a, b) = (ox.max(lo), (ox + len).min(hi));
                if let (Some(d), Some(h), true) = (w.read(0, od, td), w.read(1, oh, th), a < b) {
                    let from = (d * ih + h) * iw + w.at(2, a, tw) as usize;
                    row_spans[used] = RowSpan { from: from as u32, to: (c + a - ox) as u8, n: (b - a) as u8 };
                    used += 1;
                    filled += b - a;
                }
            }
            taps[done] = Tap { first: first as u16, last: used as u16, full: filled == nr };
            done += 1;
        }
        done
    }
}

impl Panels for Unrolled {
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) {
        let mut row_spans = [RowSpan::default(); MAX_SPANS];
        let mut taps = [Tap::default(); TAPS];
        let (all, plane, step) = (self.w.kernel_size(), self.w.in_size(), self.w.stride[2]);
        let mut t0 = 0;
        while t0 < all {
            let n = self.taps(t0, j, cols, nr, &mut row_spans, &mut taps);
            // Rows `k = c * all + t` of the K block, for taps `t0 .. t0 + n`, one channel at a time.
            let mut c = k0 / all;
            while c * all + t0 < k0 + kc {
                // SAFETY: `taps` clips spans to the channel's plane and to the panel's `cols` columns.
                // `Panels::pack` guarantees that rows `k0 .. k0 + kc` exist, so channel `c` does, and that
                // `dst` holds `kc * nr` floats.
                unsafe {
                    let src = self.x.0.add(c * plane);
                    for t in 0..n {
                        let k = c * all + t0 + t;
                        if k < k0 || k >= k0 + kc {
                            continue;
                        }
                        let row = dst.add((k - k0) * nr);
                        let tap = taps[t];
                        if !tap.full {
                            for v in (0..nr).step_by(S::W) {
                                S::store(row.add(v), S::zero());
                            }
                        }
                        for p in &row_spans[tap.first as usize..tap.last as usize] {
                            copy_piece::<S>(
                                src.add(p.from as usize),
                                step,
                                p.n as usize,
                                row.add(p.to as usize),
                            );
                        }
                    }
                }
                c += 1;
            }
            t0 += n;
        }
    }
}

/// `out[i] = src[i * step]` for `i < n`.
///
/// # Safety
/// `src[i * step]` is readable and `out[i]` writable for `i < n`; they do not overlap; the calling function
/// is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn copy_piece<S: Simd>(src: *const f32, step: usize, n: usize, out: *mut f32) {
    // SAFETY: `src[i * step]` and `out[i]` are valid for `i < n` by contract; partial vectors access only the
    // `lanes` elements that are left.
    unsafe {
        if step > 2 {
            for i in 0..n {
                *out.add(i) = *src.add(i * step);
            }
            return;
        }
        let mut i = 0;
        while i < n {
            let lanes = (n - i).min(S::W);
            let v = if step == 2 {
                S::load_even(src.add(2 * i), lanes)
            } else if lanes == S::W {
                S::load(src.add(i))
            } else {
                S::load_part(src.add(i), lanes)
            };
            if lanes == S::W {
                S::store(out.add(i), v);
            } else {
                S::store_part(out.add(i), v, lanes);
            }
            i += lanes;
        }
    }
}

/// The operands of a convolution with its epilogue: `conv(x, w) + bias`, then ReLU, then a chain.
#[derive(Clone, Copy, Debug)]
pub struct ConvOperands<T> {
    /// The input, [`Conv::input_len`] elements.
    pub x: *const T,
    /// The weights, [`Conv::weight_len`] elements.
    pub w: *const T,
    /// `c_out` elements, or null.
    pub bias: *const T,
    /// Whether negative results become 0.
    pub relu: bool,
    /// A chain that is applied in place to each part of the output. Each output plane is a row for the chain.
    /// If `Conv::few` holds and the weights are not packed, [`conv_f32`] does not apply the chain, and the
    /// caller runs it afterwards.
    pub chain: BoundChain,
    /// The output, [`Conv::output_len`] elements.
    pub y: *mut T,
}

impl<T> ConvOperands<T> {
    /// `y = conv(x, w)`, without an epilogue.
    pub fn new(x: *const T, w: *const T, y: *mut T) -> ConvOperands<T> {
        ConvOperands { x, w, bias: std::ptr::null(), relu: false, chain: BoundChain::default(), y }
    }
}

/// A convolution in f32 with its epilogue. `packed` holds the same weights in packed form.
///
/// # Safety
/// The operands are readable for the lengths that [`ConvOperands`] states (the weights are not read if
/// `packed` is given and [`ConvWeights::floats`] is `Some` for `conv`); `y` is writable and overlaps nothing
/// else. The chain's operands are bound.
///
/// # Panics
/// If `packed` belongs to another convolution.
pub unsafe fn conv_f32(
    team: &Team,
    isa: Isa,
    conv: &Conv,
    packed: Option<&ConvWeights>,
    operands: &ConvOperands<f32>,
) {
    let ConvOperands { x, w, bias, relu, chain, y } = *operands;
    if conv.output_len() == 0 {
        return;
    }
    if packed.is_none() && bias.is_null() && !relu && !chain.is_some() && conv.has_few_positions() {
        // SAFETY: `conv_f32` requires operands of these lengths; there is no epilogue.
        return unsafe { conv_few_positions(team, isa, conv, operands) };
    }
    if conv.by_rows() {
        // SAFETY: `conv_f32` requires operands of the lengths that `conv` states, as both callees do. The
        // further conditions of `depthwise` are checked here, and the output is not empty.
        unsafe {
            let win = &conv.window;
            let few = win.kernel_size() <= DEPTH_TAPS;
            if conv.is_depthwise() && win.stride[2] == 1 && win.input_dilation == [1; 3] && few {
                return depthwise(team, isa, conv, operands);
            }
            return conv_rows(team, isa, conv, operands);
        }
    }
    if let Some(p) = packed {
        let same = (p.conv.c_in, p.conv.c_out, p.conv.groups, p.conv.window.kernel);
        assert!(
            same == (conv.c_in, conv.c_out, conv.groups, conv.window.kernel),
            "the weights were packed for another convolution"
        );
    }
    let isa = packed.map_or(isa, |p| p.isa);
    let (m, k, n) = (conv.c_out / conv.groups, conv.k(), conv.window.out_size());
    let c_group = conv.c_in / conv.groups;
    let items = conv.batch * conv.groups;
    let (xs, ys, ws) = (SharedConst(x), SharedMut(y), SharedConst(w));
    // The operands of image `i / groups` and group `i % groups`.
    let item = |i: usize| {
        let g = i % conv.groups;
        let x = xs.get().wrapping_add(i * c_group * conv.window.in_size());
        let y = MatMut::rows(ys.get().wrapping_add(i * m * n), n);
        let epi = Epilogue {
            bias_row: SharedConst(if bias.is_null() { bias } else { bias.wrapping_add(g * m) }),
            relu,
            chain: chain.below(i * m),
            ..Epilogue::default()
        };
        let a = match packed {
            Some(p) => Left::Packed(p.group(g)),
            None => Left::Plain(Mat::rows(ws.get().wrapping_add(g * m * k), k)),
        };
        (a, x, y, epi)
    };
    // SAFETY: the closure computes pointers and sizes from its arguments; each item is one image and group,
    // whose output no other item writes.
    let item = unsafe { &AssertSync::new(item) };
    // If there are enough images and groups, each thread computes whole products. Otherwise all threads share
    // one product. Products that `gemm` computes without panels are always left to `gemm`, so that the number
    // of threads does not change results.
    let few = packed.is_none() && conv.few();
    if items >= 2 * team.threads() && m * n * k < 64 << 20 && !few {
        let each = inline_floats(isa, m, n, k, true);
        let scratch = team.scratch(each * team.threads());
        let buf = SharedMut(scratch.ptr());
        let parts = if conv.macs() < 300_000 { 1 } else { items.min(team.threads() * 8) };
        team.run_with(parts, &|worker, part| {
            for i in items * part / parts..items * (part + 1) / parts {
                let (a, x, y, epi) = item.get()(i);
                let g = Gemm::new((m, n, k), &a, x, y).with(epi);
                // SAFETY: `conv_f32` requires the operands of every image and group; items write different
                // planes; each thread uses its own `each` floats of scratch memory.
                unsafe {
                    let buf = buf.get().add(worker * each);
                    if conv.window.is_pointwise() {
                        panels_inline(isa, &g.with_b(&Mat::rows(x, n)), buf);
                    } else {
                        let b = Unrolled { x: SharedConst(x), w: conv.window };
                        panels_inline(isa, &g.with_b(&b), buf);
                    }
                }
            }
        });
        return;
    }
    for i in 0..items {
        let (a, x, y, epi) = item.get()(i);
        let g = Gemm::new((m, n, k), &a, x, y).with(epi);
        // SAFETY: `conv_f32` requires the operands of every image and group.
        unsafe {
            if conv.window.is_pointwise() {
                let g = g.with_b(Mat::rows(x, n));
                match &a {
                    Left::Plain(a) => gemm(team, isa, &g.with_a(*a)),
                    Left::Packed(a) => gemm_packed_a(team, &g.with_a(a)),
                }
            } else {
                let b = Unrolled { x: SharedConst(x), w: conv.window };
                gemm_panels(team, isa, &g.with_b(&b));
            }
        }
    }
}

/// One output line of a depthwise convolution with stride 1 along the width.
struct DepthLine<'a> {
    w: &'a Window,
    /// The input plane of the channel.
    x: *const f32,
    /// The weights of the channel.
    taps: *const f32,
    bias: f32,
    relu: bool,
    od: usize,
    oh: usize,
    y: *mut f32,
}

/// The most taps that [`depthwise`] handles.
const DEPTH_TAPS: usize = 128;

/// Computes one output line. Keeps four vectors of outputs in registers and adds the products of every tap to
/// them, in the order of the taps. Outputs near an edge skip the taps that are outside of the input line.
///
/// # Safety
/// `l.x` is readable for an input plane, `l.taps` for the kernel, `l.y` writable for an output line; `od` and
/// `oh` are inside the output. The width has stride 1 and an undilated input, and the kernel has at most
/// `DEPTH_TAPS` taps. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn depth_body<S: Simd>(l: &DepthLine<'_>) {
    let w = l.w;
    let [kd, kh, kw] = w.kernel;
    let (ih, iw, ow) = (w.input[1], w.input[2], w.output[2]);
    // The outputs `lo..hi` for which every tap is inside the line.
    let (mut lo, mut hi) = (0, ow);
    for t in 0..kw {
        let (a, b) = w.span(2, t);
        (lo, hi) = (lo.max(a), hi.min(b));
    }
    let (lo, hi) = (lo.min(ow), hi.max(lo.min(ow)));
    let first = w.at(2, 0, 0);
    // SAFETY: taps outside the plane are skipped. For outputs `lo..hi` all taps along the width are inside
    // the line, so each load lies in the plane; partial vectors touch only outputs below `hi`.
    unsafe {
        // A loop, not a closure: a closure would not be compiled for the instruction set.
        for o in (0..lo).chain(hi..ow) {
            let mut s = S::splat(l.bias);
            for td in 0..kd {
                let Some(d) = w.read(0, l.od, td) else { continue };
                for th in 0..kh {
                    let Some(h) = w.read(1, l.oh, th) else { continue };
                    let line = l.x.add((d * ih + h) * iw);
                    for tw in 0..kw {
                        if let Some(i) = w.read(2, o, tw) {
                            let t = S::splat(*l.taps.add((td * kh + th) * kw + tw));
                            s = S::fma(S::splat(*line.add(i)), t, s);
                        }
                    }
                }
            }
            S::store_part(l.y.add(o), if l.relu { S::relu(s) } else { s }, 1);
        }
        // Lists the taps whose depth and height are inside the plane.
        let mut ptrs = [l.x; DEPTH_TAPS];
        let mut weights = [0f32; DEPTH_TAPS];
        let mut count = 0;
        for td in 0..kd {
            let Some(d) = w.read(0, l.od, td) else { continue };
            for th in 0..kh {
                let Some(h) = w.read(1, l.oh, th) else { continue };
                for tw in 0..kw {
                    let at = ((d * ih + h) * iw) as isize + first + (tw * w.dilation[2]) as isize;
                    // The pointer may lie before the plane; adding an output `o >= lo` moves it inside.
                    ptrs[count] = l.x.wrapping_offset(at);
                    weights[count] = *l.taps.add((td * kh + th) * kw + tw);
                    count += 1;
                }
            }
        }
        let mut o = lo;
        while o < hi {
            let left = hi - o;
            let mut s = [S::splat(l.bias); 4];
            for (p, t) in ptrs[..count].iter().zip(&weights) {
                let (p, t) = (p.wrapping_add(o), S::splat(*t));
                for u in 0..4 {
                    let n = left.saturating_sub(u * S::W).min(S::W);
                    let v = S::load_part(p.wrapping_add(u * S::W), n);
                    s[u] = S::fma(v, t, s[u]);
                }
            }
            for u in 0..4 {
                let n = left.saturating_sub(u * S::W).min(S::W);
                let v = if l.relu { S::relu(s[u]) } else { s[u] };
                S::store_part(l.y.wrapping_add(o + u * S::W), v, n);
            }
            o += 4 * S::W;
        }
    }
}
dispatch_simd! {
    /// [`depth_body`] for `isa`.
    ///
    /// # Safety
    /// The contract of [`depth_body`]; the dispatch checks that the processor has `isa`.
    unsafe fn depth_line[][](isa, l: &DepthLine<'_>) = depth_body
}

/// Depthwise convolution with stride 1 along the width.
///
/// # Safety
/// The contract of [`conv_f32`]; `conv` is depthwise with an undilated input, width stride 1 and at most
/// `DEPTH_TAPS` taps; its output is not empty.
unsafe fn depthwise(team: &Team, isa: Isa, conv: &Conv, operands: &ConvOperands<f32>) {
    let ConvOperands { x, w, bias, relu, chain, y } = *operands;
    let win = &conv.window;
    let (ow, per_plane, multiplier) =
        (win.output[2], win.out_size() / win.output[2], conv.c_out / conv.groups);
    let (xs, ws, bs, ys) = (SharedConst(x), SharedConst(w), SharedConst(bias), SharedMut(y));
    let lines = conv.batch * conv.c_out * per_plane;
    let parts = if conv.macs() < 100_000 { 1 } else { lines.min(team.threads() * 8) };
    team.run(parts, &|part| {
        for line in lines * part / parts..lines * (part + 1) / parts {
            let (plane, l) = (line / per_plane, line % per_plane);
            let (image, co) = (plane / conv.c_out, plane % conv.c_out);
            // SAFETY: `depthwise` requires the operands of all images and channels; `line < lines` selects a
            // plane, a channel's weights and an output line inside them; parts write disjoint lines.
            unsafe {
                let job = DepthLine {
                    w: win,
                    x: xs.get().add((image * conv.c_in + co / multiplier) * win.in_size()),
                    taps: ws.get().add(co * win.kernel_size()),
                    bias: if bs.0.is_null() { 0.0 } else { *bs.get().add(co) },
                    relu,
                    od: l / win.output[1],
                    oh: l % win.output[1],
                    y: ys.get().add(line * ow),
                };
                depth_line(isa, &job);
                chain.run(isa, plane, l * ow, ow, job.y);
            }
        }
    });
}

/// One output row of one channel.
struct Row<'a, T: Accumulated> {
    conv: &'a Conv,
    /// The input channels of the group.
    x: &'a [T],
    /// The weights of the output channel.
    w: &'a [T],
    bias: T::Acc,
    relu: bool,
    od: usize,
    oh: usize,
    acc: &'a mut [T::Acc],
    y: &'a mut [T],
}

#[inline(always)]
fn row_body<const FMA: bool, T: Accumulated>(r: Row<'_, T>) {
    let w = &r.conv.window;
    r.acc.fill(r.bias);
    let taps = w.kernel_size();
    for c in 0..r.conv.c_in / r.conv.groups {
        let plane = &r.x[c * w.in_size()..][..w.in_size()];
        for td in 0..w.kernel[0] {
            let Some(d) = w.read(0, r.od, td) else { continue };
            for th in 0..w.kernel[1] {
                let Some(h) = w.read(1, r.oh, th) else { continue };
                let line = &plane[(d * w.input[1] + h) * w.input[2]..][..w.input[2]];
                for tw in 0..w.kernel[2] {
                    let f = r.w[c * taps + (td * w.kernel[1] + th) * w.kernel[2] + tw].up();
                    let (lo, hi) = w.span(2, tw);
                    if lo >= hi {
                        continue;
                    }
                    let first = w.at(2, lo, tw) as usize;
                    let (s, spread) = (w.stride[2], w.input_dilation[2]);
                    let acc = &mut r.acc[lo..hi];
                    if s == 1 && spread == 1 {
                        for (a, x) in acc.iter_mut().zip(&line[first..]) {
                            *a = T::mul_add::<FMA>(x.up(), f, *a);
                        }
                    } else if spread == 1 {
                        for (a, x) in acc.iter_mut().zip(line[first..].iter().step_by(s)) {
                            *a = T::mul_add::<FMA>(x.up(), f, *a);
                        }
                    } else {
                        for (i, a) in acc.iter_mut().enumerate() {
                            let p = first + i * s;
                            if p.is_multiple_of(spread) {
                                *a = T::mul_add::<FMA>(line[p / spread].up(), f, *a);
                            }
                        }
                    }
                }
            }
        }
    }
    for (y, &a) in r.y.iter_mut().zip(r.acc.iter()) {
        let zero = T::Acc::default();
        *y = T::down(if r.relu && a < zero { zero } else { a });
    }
}
dispatch! {
    fn row[T: Accumulated][T](isa, r: Row<'_, T>) = row_body
}

/// Convolution row by row, for any geometry and element type. f16 and bf16 are summed in f32 and rounded
/// once; integer sums wrap.
///
/// # Safety
/// The operands are readable for the lengths that [`ConvOperands`] states; `y` is writable and overlaps
/// nothing else. A chain needs f32, and its operands are bound.
pub unsafe fn conv_rows<T: Accumulated>(team: &Team, isa: Isa, conv: &Conv, operands: &ConvOperands<T>) {
    let ConvOperands { x, w, bias, relu, chain, y } = *operands;
    let win = &conv.window;
    let out = win.out_size();
    let planes = conv.batch * conv.c_out;
    if planes * out == 0 {
        return;
    }
    let (k, c_group, m) = (conv.k(), conv.c_in / conv.groups, conv.c_out / conv.groups);
    let ow = win.output[2];
    let lines = planes * (out / ow);
    // Number of floats whose memory suffices for one row of sums of type `T::Acc`.
    let each = (ow * size_of::<T::Acc>()).div_ceil(4).next_multiple_of(16);
    let scratch = team.scratch(each * team.threads());
    let buf = SharedMut(scratch.ptr());
    let (xs, ws, bs, ys) = (SharedConst(x), SharedConst(w), SharedConst(bias), SharedMut(y));
    let work = conv.macs();
    let parts = if work < 100_000 { 1 } else { lines.min(team.threads() * 8) };
    team.run_with(parts, &|worker, part| {
        // SAFETY: `conv_rows` requires operands of the lengths that `conv` states; parts write disjoint
        // lines of `y`; each thread uses its own `each` floats of scratch memory, initialised before the
        // slice is made.
        unsafe {
            let acc = buf.get().add(worker * each) as *mut T::Acc;
            for i in 0..ow {
                acc.add(i).write(T::Acc::default());
            }
            let acc = std::slice::from_raw_parts_mut(acc, ow);
            for line in lines * part / parts..lines * (part + 1) / parts {
                let (plane, l) = (line / (out / ow), line % (out / ow));
                let (image, co) = (plane / conv.c_out, plane % conv.c_out);
                let x = xs.get().add((image * conv.c_in + co / m * c_group) * win.in_size());
                let x = std::slice::from_raw_parts(x, c_group * win.in_size());
                let w = std::slice::from_raw_parts(ws.get().add(co * k), k);
                let bias = if bs.0.is_null() { T::Acc::default() } else { (*bs.get().add(co)).up() };
                let y = std::slice::from_raw_parts_mut(ys.get().add(line * ow), ow);
                let (od, oh) = (l / win.output[1], l % win.output[1]);
                let at = y.as_mut_ptr() as *mut f32;
                row(isa, Row { conv, x, w, bias, relu, od, oh, acc: &mut *acc, y });
                // Only f32 calls have a chain.
                chain.run(isa, plane, l * ow, ow, at);
            }
        }
    });
}

//! Convolution over one to three spatial axes: NC[DHW] input, OI[DHW] weights, groups.
//!
//! f32 runs as a matrix product whose right operand (the unrolled input) is never stored: its panels are gathered straight
//! into the product's packing buffers. One-by-one kernels skip the gathering, depthwise kernels run row by row. Spread inputs
//! (transposed convolution) and other element types take the row-by-row path with their accumulation type.

use super::elem::Elem;
use super::gemm::gemm_panels;
use super::gemm::{
    Epilogue, Left, Mat, MatMut, PackElem, Packed, Panels, gemm, gemm_packed_a, inline_floats, panels_inline,
};
use super::simd::Simd;
pub use super::window::Window;
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::team::{SharedConst, SharedMut, Team};
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
    /// # Errors
    /// `Argument` when the groups do not divide the channels.
    pub fn new(batch: usize, c_in: usize, c_out: usize, groups: usize, window: Window) -> Result<Conv> {
        if groups == 0 || c_in % groups != 0 || c_out % groups != 0 {
            return Err(Error::argument(
                "conv",
                format!("{groups} groups do not divide {c_in} input and {c_out} output channels"),
            ));
        }
        Ok(Conv {
            batch,
            c_in,
            c_out,
            groups,
            window,
        })
    }

    /// Elements of the input, weights (`[c_out, c_in / groups, kernel..]`) and output.
    pub fn input_len(&self) -> usize {
        self.batch * self.c_in * self.window.in_size()
    }
    pub fn weight_len(&self) -> usize {
        self.c_out * self.k()
    }
    pub fn output_len(&self) -> usize {
        self.batch * self.c_out * self.window.out_size()
    }
    /// Multiply-adds.
    pub fn macs(&self) -> usize {
        self.batch * self.c_out * self.window.out_size() * self.k()
    }
    /// Length of one output's sum.
    fn k(&self) -> usize {
        self.c_in / self.groups * self.window.kernel_size()
    }
    fn is_depthwise(&self) -> bool {
        self.c_in == self.groups
    }
    fn by_rows(&self) -> bool {
        self.is_depthwise() && self.c_out / self.groups < 4 || self.window.input_dilation != [1; 3]
    }
}

/// Weights packed once for many calls.
#[derive(Debug)]
pub struct ConvWeights {
    conv: Conv,
    isa: Isa,
    groups: Vec<Packed>,
}

impl ConvWeights {
    /// Packs `[c_out, c_in / groups, kernel..]` weights; `None` where the convolution reads them as they are. Batch and
    /// spatial sizes may differ between calls.
    ///
    /// # Safety
    /// `conv.weight_len()` elements are readable.
    pub unsafe fn new<T: PackElem>(isa: Isa, conv: &Conv, w: *const T) -> Option<ConvWeights> {
        if conv.by_rows() {
            return None;
        }
        let (m, k) = (conv.c_out / conv.groups, conv.k());
        let groups = (0..conv.groups)
            // SAFETY: the caller's weights hold every group.
            .map(|g| unsafe { Packed::a(isa, Mat::rows(w.wrapping_add(g * m * k), k), m, k) })
            .collect();
        Some(ConvWeights {
            conv: *conv,
            isa,
            groups,
        })
    }

    /// Bytes of memory it keeps.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(Packed::bytes).sum()
    }
}

/// The unrolled input of one image and group as a matrix: row `(c, tap)`, column `(od, oh, ow)`.
struct Unrolled {
    x: SharedConst<f32>,
    w: Window,
}

impl Panels for Unrolled {
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) {
        let w = &self.w;
        let [_, oh, ow] = w.output;
        // Runs of columns within one output row: first column of the panel, length, and output position.
        let mut runs = [(0usize, 0usize, 0usize, 0usize, 0usize); 32];
        let mut count = 0;
        let mut c = 0;
        while c < cols {
            let p = j + c;
            let x = p % ow;
            let len = (ow - x).min(cols - c);
            runs[count] = (c, len, p / ow / oh, p / ow % oh, x);
            count += 1;
            c += len;
        }
        let taps = w.kernel_size();
        let (mut ch, mut tap) = (k0 / taps, k0 % taps);
        let [ih, iw] = [w.input[1], w.input[2]];
        let step = w.stride[2];
        // SAFETY: reads are clipped to the input, writes stay in the panel.
        unsafe {
            for k in 0..kc {
                let row = dst.add(k * nr);
                for v in 0..nr / S::W {
                    S::store(row.add(v * S::W), S::zero());
                }
                let (td, th, tw) = (
                    tap / (w.kernel[1] * w.kernel[2]),
                    tap / w.kernel[2] % w.kernel[1],
                    tap % w.kernel[2],
                );
                let plane = self.x.0.add(ch * w.in_size());
                for &(at, len, od, oh, ox) in &runs[..count] {
                    let (d, h) = (w.at(0, od, td), w.at(1, oh, th));
                    if d < 0 || d >= w.input[0] as isize || h < 0 || h >= ih as isize {
                        continue;
                    }
                    let line = plane.add((d as usize * ih + h as usize) * iw);
                    let first = w.at(2, ox, tw);
                    // Columns lo..hi of the run are inside the line.
                    let s = step as isize;
                    let lo = if first >= 0 {
                        0
                    } else {
                        (((-first) + s - 1) / s) as usize
                    };
                    let room = iw as isize - first;
                    let hi = if room <= 0 {
                        0
                    } else {
                        len.min(((room + s - 1) / s) as usize)
                    };
                    if lo >= hi {
                        continue;
                    }
                    let src = line.offset(first + (lo * step) as isize);
                    let out = row.add(at + lo);
                    let n = hi - lo;
                    if step == 1 {
                        let mut i = 0;
                        while i + S::W <= n {
                            S::store(out.add(i), S::load(src.add(i)));
                            i += S::W;
                        }
                        if i < n {
                            S::store_part(out.add(i), S::load_part(src.add(i), n - i), n - i);
                        }
                    } else {
                        for i in 0..n {
                            *out.add(i) = *src.add(i * step);
                        }
                    }
                }
                tap += 1;
                if tap == taps {
                    tap = 0;
                    ch += 1;
                }
            }
        }
    }
}

/// `y = act(conv(x, w) + bias)` in f32. `bias` has `c_out` elements or is null. `packed` are the same weights packed.
///
/// # Safety
/// The pointers cover the lengths that `conv` states; `y` overlaps nothing else.
///
/// # Panics
/// When `packed` belongs to another convolution.
pub unsafe fn conv_f32(
    team: &Team,
    isa: Isa,
    conv: &Conv,
    x: *const f32,
    w: *const f32,
    packed: Option<&ConvWeights>,
    bias: *const f32,
    relu: bool,
    y: *mut f32,
) {
    if conv.output_len() == 0 {
        return;
    }
    if conv.by_rows() {
        // SAFETY: the caller's.
        return unsafe { conv_rows(team, isa, conv, x, w, bias, relu, y) };
    }
    if let Some(p) = packed {
        let same = (p.conv.c_in, p.conv.c_out, p.conv.groups, p.conv.window.kernel);
        assert!(
            same == (conv.c_in, conv.c_out, conv.groups, conv.window.kernel),
            "weights packed for another convolution"
        );
    }
    let isa = packed.map_or(isa, |p| p.isa);
    let (m, k, n) = (conv.c_out / conv.groups, conv.k(), conv.window.out_size());
    let c_group = conv.c_in / conv.groups;
    let items = conv.batch * conv.groups;
    let (xs, ys, ws) = (SharedConst(x), SharedMut(y), SharedConst(w));
    // Operands of image `i / groups`, group `i % groups`.
    let item = |i: usize| {
        let g = i % conv.groups;
        let x = xs.get().wrapping_add(i * c_group * conv.window.in_size());
        let y = MatMut::rows(ys.get().wrapping_add(i * m * n), n);
        let epi = Epilogue {
            bias_row: SharedConst(if bias.is_null() {
                bias
            } else {
                bias.wrapping_add(g * m)
            }),
            relu,
            ..Epilogue::default()
        };
        let a = match packed {
            Some(p) => Left::Packed(&p.groups[g]),
            None => Left::Plain(Mat::rows(ws.get().wrapping_add(g * m * k), k)),
        };
        (a, x, y, epi)
    };
    let item = &Together(item);
    // Several images or groups: whole products per thread; else all threads on one product.
    if items >= 2 * team.threads() && m * n * k < 64 << 20 {
        let each = inline_floats(isa, m, n, k);
        let scratch = team.scratch(each * team.threads());
        let buf = SharedMut(scratch.ptr());
        let parts = if conv.macs() < 300_000 {
            1
        } else {
            items.min(team.threads() * 8)
        };
        team.run_with(parts, &|worker, part| {
            for i in items * part / parts..items * (part + 1) / parts {
                let (a, x, y, epi) = (item.0)(i);
                // SAFETY: the caller's; items write different planes; a worker's scratch is its own.
                unsafe {
                    let buf = buf.get().add(worker * each);
                    if conv.window.is_pointwise() {
                        panels_inline(isa, m, n, k, &a, &Mat::rows(x, n), y, epi, buf);
                    } else {
                        let b = Unrolled {
                            x: SharedConst(x),
                            w: conv.window,
                        };
                        panels_inline(isa, m, n, k, &a, &b, y, epi, buf);
                    }
                }
            }
        });
        return;
    }
    for i in 0..items {
        let (a, x, y, epi) = (item.0)(i);
        // SAFETY: the caller's.
        unsafe {
            if conv.window.is_pointwise() {
                let b = Mat::rows(x, n);
                match a {
                    Left::Plain(a) => gemm(team, isa, m, n, k, a, b, y, epi),
                    Left::Packed(a) => gemm_packed_a(team, m, n, k, a, b, y, epi),
                }
            } else {
                let b = Unrolled {
                    x: SharedConst(x),
                    w: conv.window,
                };
                gemm_panels(team, isa, m, n, k, &a, &b, y, epi);
            }
        }
    }
}

/// Lets a closure over raw pointers cross threads.
struct Together<F>(F);
// SAFETY: the closure only computes addresses; their use is checked where they are dereferenced.
unsafe impl<F> Sync for Together<F> {}

/// One output row of one channel.
struct Row<'a, T: Elem> {
    conv: &'a Conv,
    /// First input channel of the group, and this output channel's weights.
    x: &'a [T],
    w: &'a [T],
    bias: T::Acc,
    relu: bool,
    od: usize,
    oh: usize,
    acc: &'a mut [T::Acc],
    y: &'a mut [T],
}

#[inline(always)]
fn row_body<const FMA: bool, T: Elem>(r: Row<'_, T>) {
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
                            if p % spread == 0 {
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
    fn row[T: Elem][T](isa, r: Row<'_, T>) = row_body
}

/// Convolution row by row, any geometry and element type (halves are summed in f32 and rounded once, integers wrap).
///
/// # Safety
/// As [`conv_f32`].
pub unsafe fn conv_rows<T: Elem>(
    team: &Team,
    isa: Isa,
    conv: &Conv,
    x: *const T,
    w: *const T,
    bias: *const T,
    relu: bool,
    y: *mut T,
) {
    let win = &conv.window;
    let out = win.out_size();
    let planes = conv.batch * conv.c_out;
    if planes * out == 0 {
        return;
    }
    let (k, c_group, m) = (conv.k(), conv.c_in / conv.groups, conv.c_out / conv.groups);
    let ow = win.output[2];
    let lines = planes * (out / ow);
    // Floats for one row of sums, whatever their type.
    let each = (ow * size_of::<T::Acc>()).div_ceil(4).next_multiple_of(16);
    let scratch = team.scratch(each * team.threads());
    let buf = SharedMut(scratch.ptr());
    let (xs, ws, bs, ys) = (SharedConst(x), SharedConst(w), SharedConst(bias), SharedMut(y));
    let work = conv.macs();
    let parts = if work < 100_000 {
        1
    } else {
        lines.min(team.threads() * 8)
    };
    team.run_with(parts, &|worker, part| {
        // SAFETY: the caller's operands; lines of different parts are disjoint; a worker's sums are its own and are
        // written before they are read.
        unsafe {
            let acc = buf.get().add(worker * each) as *mut T::Acc;
            for i in 0..ow {
                acc.add(i).write(T::Acc::default());
            }
            let acc = std::slice::from_raw_parts_mut(acc, ow);
            for line in lines * part / parts..lines * (part + 1) / parts {
                let (plane, l) = (line / (out / ow), line % (out / ow));
                let (image, co) = (plane / conv.c_out, plane % conv.c_out);
                let x = xs
                    .get()
                    .add((image * conv.c_in + co / m * c_group) * win.in_size());
                let x = std::slice::from_raw_parts(x, c_group * win.in_size());
                let w = std::slice::from_raw_parts(ws.get().add(co * k), k);
                let bias = if bs.0.is_null() {
                    T::Acc::default()
                } else {
                    (*bs.get().add(co)).up()
                };
                let y = std::slice::from_raw_parts_mut(ys.get().add(line * ow), ow);
                let (od, oh) = (l / win.output[1], l % win.output[1]);
                row(
                    isa,
                    Row {
                        conv,
                        x,
                        w,
                        bias,
                        relu,
                        od,
                        oh,
                        acc: &mut *acc,
                        y,
                    },
                );
            }
        }
    });
}

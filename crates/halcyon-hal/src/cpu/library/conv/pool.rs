//! Max and average pooling over one to three spatial axes of `NC[DHW]`, for any numeric element type.

pub use super::window::Window;
use crate::cpu::library::accumulator::Accumulated;
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// The reduction of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pool {
    /// The largest element; NaN if any is NaN; the least value (-inf for floats) if the window lies in
    /// padding only.
    Max,
    /// The mean. If `count_include_pad`, padding counts as zeros; otherwise sum and count leave padding out.
    /// Positions past the far padding never count. The mean of integers is truncated. If nothing is counted,
    /// the mean is NaN for floats and 0 for integers.
    Average { count_include_pad: bool },
}

/// One line (last axis) of the output.
struct Line<'a, T: Accumulated> {
    pool: Pool,
    w: &'a Window,
    x: &'a [T],
    od: usize,
    oh: usize,
    acc: &'a mut [T::Acc],
    y: &'a mut [T],
}

/// For output `o` on `axis`: the number of taps before the end of the far padding, and how many of these are
/// inside the input.
pub(crate) fn counts(w: &Window, axis: usize, o: usize) -> (usize, usize) {
    let end = w.input[axis] as isize + w.pad_hi[axis];
    let all = (0..w.kernel[axis]).filter(|&t| w.at(axis, o, t) < end).count();
    let inside = (0..w.kernel[axis]).filter(|&t| w.read(axis, o, t).is_some()).count();
    (all, inside)
}

#[inline(always)]
fn line_body<const FMA: bool, T: Accumulated>(l: Line<'_, T>) {
    let w = l.w;
    let average = matches!(l.pool, Pool::Average { .. });
    l.acc.fill(if average { T::Acc::default() } else { T::LEAST });
    for td in 0..w.kernel[0] {
        let Some(d) = w.read(0, l.od, td) else { continue };
        for th in 0..w.kernel[1] {
            let Some(h) = w.read(1, l.oh, th) else { continue };
            let line = &l.x[(d * w.input[1] + h) * w.input[2]..][..w.input[2]];
            for tw in 0..w.kernel[2] {
                let (lo, hi) = w.span(2, tw);
                if lo >= hi {
                    continue;
                }
                let x = &line[w.at(2, lo, tw) as usize..];
                let acc = &mut l.acc[lo..hi];
                match (average, w.stride[2]) {
                    (true, 1) => acc.iter_mut().zip(x).for_each(|(a, x)| *a = T::add(*a, x.up())),
                    (true, s) => {
                        acc.iter_mut().zip(x.iter().step_by(s)).for_each(|(a, x)| *a = T::add(*a, x.up()))
                    }
                    (false, 1) => acc.iter_mut().zip(x).for_each(|(a, x)| *a = T::max(*a, x.up())),
                    (false, s) => {
                        acc.iter_mut().zip(x.iter().step_by(s)).for_each(|(a, x)| *a = T::max(*a, x.up()))
                    }
                }
            }
        }
    }
    match l.pool {
        Pool::Max => l.y.iter_mut().zip(l.acc.iter()).for_each(|(y, a)| *y = T::down(*a)),
        Pool::Average { count_include_pad } => {
            let (d, h) = (counts(w, 0, l.od), counts(w, 1, l.oh));
            for (o, (y, a)) in l.y.iter_mut().zip(l.acc.iter()).enumerate() {
                let v = counts(w, 2, o);
                let n = if count_include_pad { d.0 * h.0 * v.0 } else { d.1 * h.1 * v.1 };
                *y = T::down(T::div(*a, n));
            }
        }
    }
}
dispatch! {
    fn line[T: Accumulated][T](isa, l: Line<'_, T>) = line_body
}

/// Pools `planes` (batch times channels) images.
///
/// # Safety
/// `x` has `planes * window.in_size()` readable elements. `y` has `planes * window.out_size()` writable
/// elements, which nothing else uses. `x` and `y` do not overlap.
///
/// # Panics
/// If the window dilates its input, which pooling does not define.
pub unsafe fn pool<T: Accumulated>(
    team: &Team,
    isa: Isa,
    kind: Pool,
    planes: usize,
    window: &Window,
    x: *const T,
    y: *mut T,
) {
    assert!(window.input_dilation == [1; 3], "pooling does not support input dilation");
    let (n_in, n_out, ow) = (window.in_size(), window.out_size(), window.output[2]);
    if planes * n_out == 0 {
        return;
    }
    let per_plane = n_out / ow;
    let lines = planes * per_plane;
    let each = (ow * size_of::<T::Acc>()).div_ceil(4).next_multiple_of(16);
    let scratch = team.scratch(each * team.threads());
    let buf = SharedMut(scratch.ptr());
    let (xs, ys) = (SharedConst(x), SharedMut(y));
    let parts = if lines * ow * window.kernel_size() < 50_000 { 1 } else { lines.min(team.threads() * 4) };
    team.run_with(parts, &|worker, part| {
        // SAFETY: the contract makes all images valid; lines of different parts are disjoint; each worker has
        // its own `ow` sums and writes them before it reads them.
        unsafe {
            let acc = buf.get().add(worker * each) as *mut T::Acc;
            for i in 0..ow {
                acc.add(i).write(T::Acc::default());
            }
            let acc = std::slice::from_raw_parts_mut(acc, ow);
            for l in lines * part / parts..lines * (part + 1) / parts {
                let (plane, r) = (l / per_plane, l % per_plane);
                let x = std::slice::from_raw_parts(xs.get().add(plane * n_in), n_in);
                let y = std::slice::from_raw_parts_mut(ys.get().add(l * ow), ow);
                let (od, oh) = (r / window.output[1], r % window.output[1]);
                line(isa, Line { pool: kind, w: window, x, od, oh, acc: &mut *acc, y });
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;
    use half::f16;

    /// The definition in f64, over the padded image.
    fn reference(kind: Pool, planes: usize, w: &Window, x: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for p in 0..planes {
            for o in 0..w.out_size() {
                let at = [o / (w.output[1] * w.output[2]), o / w.output[2] % w.output[1], o % w.output[2]];
                let (mut best, mut sum, mut inside, mut all) = (f64::NEG_INFINITY, 0.0, 0, 0);
                for t in 0..w.kernel_size() {
                    let tap =
                        [t / (w.kernel[1] * w.kernel[2]), t / w.kernel[2] % w.kernel[1], t % w.kernel[2]];
                    let pos: [i64; 3] = std::array::from_fn(|a| {
                        (at[a] * w.stride[a] + tap[a] * w.dilation[a]) as i64 - w.pad_lo[a] as i64
                    });
                    if (0..3).all(|a| pos[a] < w.input[a] as i64 + w.pad_hi[a] as i64) {
                        all += 1;
                    }
                    if (0..3).all(|a| pos[a] >= 0 && pos[a] < w.input[a] as i64) {
                        let i =
                            (pos[0] as usize * w.input[1] + pos[1] as usize) * w.input[2] + pos[2] as usize;
                        let v = x[p * w.in_size() + i];
                        inside += 1;
                        sum += v;
                        best = if v.is_nan() || best.is_nan() { f64::NAN } else { best.max(v) };
                    }
                }
                y.push(match kind {
                    Pool::Max => best,
                    Pool::Average { count_include_pad: true } => sum / all as f64,
                    Pool::Average { .. } => sum / inside as f64,
                });
            }
        }
        y
    }

    #[test]
    fn pools_follow_f64_between_guard_pages() {
        let mut rng = Rng::new();
        let team = Team::new(2);
        let kinds = [
            Pool::Max,
            Pool::Average { count_include_pad: true },
            Pool::Average { count_include_pad: false },
        ];
        for isa in Isa::available() {
            for _ in 0..150 {
                let dims = 1 + rng.below(3);
                let mut list =
                    |lo: usize, n: usize| -> Vec<usize> { (0..dims).map(|_| lo + rng.below(n)).collect() };
                let (input, kernel) = (list(1, if dims == 3 { 9 } else { 37 }), list(1, 3));
                let (stride, dilation, lo, hi) = (list(1, 3), list(1, 2), list(0, 2), list(0, 2));
                let pads: Vec<_> = lo.iter().zip(&hi).map(|(a, b)| (*a as isize, *b as isize)).collect();
                let mut w = Window::new(&input, &kernel, &stride, &dilation, &pads, &vec![1; dims]).unwrap();
                if rng.below(4) == 0 && w.output[2] > 0 {
                    // Emulates an output size that is rounded up: the last window then extends past the far
                    // padding.
                    w.output[2] += 1;
                }
                let planes = 1 + rng.below(4);
                let side = [Side::Start, Side::End][rng.below(2)];
                let mut data = rng.vec(planes * w.in_size());
                if rng.below(3) == 0 {
                    let at = rng.below(data.len());
                    data[at] = f32::NAN;
                }
                let kind = kinds[rng.below(3)];
                let x = Guarded::new(&data, side);
                let y = Guarded::new(&vec![7e7f32; planes * w.out_size()], side);
                let h = Guarded::new(&data.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>(), side);
                let yh = Guarded::new(&vec![f16::ONE; planes * w.out_size()], side);
                let i = Guarded::new(&data.iter().map(|v| (v * 100.0) as i8).collect::<Vec<_>>(), side);
                let yi = Guarded::new(&vec![3i8; planes * w.out_size()], side);
                // SAFETY: the guarded vectors hold `planes` images.
                unsafe {
                    pool(&team, isa, kind, planes, &w, x.ptr(), y.mut_ptr());
                    pool(&team, isa, kind, planes, &w, h.ptr(), yh.mut_ptr());
                    pool(&team, isa, kind, planes, &w, i.ptr(), yi.mut_ptr());
                }
                let wide: Vec<f64> = data.iter().map(|v| *v as f64).collect();
                for (got, want) in y.slice().iter().zip(reference(kind, planes, &w, &wide)) {
                    close(*got, want, 1.0, 1e-6, &(kind, &w));
                }
                let wide: Vec<f64> = h.slice().iter().map(|v| v.to_f64()).collect();
                for (got, want) in yh.slice().iter().zip(reference(kind, planes, &w, &wide)) {
                    close(got.to_f32(), want, 1.0, 1e-3, &(kind, &w));
                }
                let wide: Vec<f64> = i.slice().iter().map(|v| *v as f64).collect();
                for (got, want) in yi.slice().iter().zip(reference(kind, planes, &w, &wide)) {
                    let want = if want.is_nan() { 0.0 } else { want.max(-128.0).trunc() };
                    assert_eq!(*got as f64, want, "{kind:?} {w:?}");
                }
            }
        }
    }
}

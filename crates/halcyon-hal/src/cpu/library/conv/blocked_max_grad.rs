//! The gradient of max pooling of images in the blocked layout, for windows that do not overlap. Each input
//! element then gets the gradient of at most one window, so nothing is summed. The channels of a block are
//! computed together, in vectors.

use super::blocked_bf16_tile::widen;
use super::window::Window;
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::team::{SharedConst, SharedMut, Team};

/// An element of an image: f32, or the bits of a bf16.
pub(super) trait Element: Copy + Default + Send + Sync + 'static {
    fn wide(self) -> f32;
}
impl Element for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}
impl Element for u16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        widen(self)
    }
}

/// The sizes of the gradient.
#[derive(Clone, Debug)]
pub(super) struct MaxGrad {
    /// Number of images times number of channel blocks of an image.
    planes: usize,
    /// Channels of a block.
    block: usize,
    window: Window,
}

impl MaxGrad {
    /// `None` unless a block has 4, 8, 16 or 32 channels and the window has two spatial axes. The windows
    /// must not overlap ([`super::max_grad::is_separate`]).
    pub(super) fn new(planes: usize, block: usize, window: Window) -> Option<MaxGrad> {
        let flat = window.input[0] == 1 && window.kernel[0] == 1 && window.output[0] == 1;
        (flat && [4, 8, 16, 32].contains(&block)).then_some(MaxGrad { planes, block, window })
    }

    /// Computes the gradient `dx` from the images `x` and the gradient `dy` of the pooled images.
    ///
    /// # Safety
    /// `x` is readable for `planes * window.in_size() * block` elements, and `dy` for `planes *
    /// window.out_size() * block`. `dx` is writable for as many elements as `x`, and nothing else uses it.
    pub(super) unsafe fn run<T: Element>(
        &self,
        team: &Team,
        isa: Isa,
        x: *const T,
        dy: *const T,
        dx: *mut T,
    ) {
        let w = &self.window;
        let (n_in, n_out) = (w.in_size() * self.block, w.out_size() * self.block);
        let (xs, gs, out) = (SharedConst(x), SharedConst(dy), SharedMut(dx));
        team.ranges(self.planes, (16384 / n_in.max(1)).max(1), &|a, b| {
            for q in a..b {
                // SAFETY: by contract all planes are valid; ranges are disjoint. The output may be
                // uninitialised memory, so it is filled before it becomes a slice.
                let (x, dy, dx) = unsafe {
                    let dx = out.get().add(q * n_in);
                    std::ptr::write_bytes(dx, 0, n_in);
                    (
                        std::slice::from_raw_parts(xs.get().add(q * n_in), n_in),
                        std::slice::from_raw_parts(gs.get().add(q * n_out), n_out),
                        std::slice::from_raw_parts_mut(dx, n_in),
                    )
                };
                match self.block {
                    4 => plane::<T, 4>(isa, w, x, dy, dx),
                    8 => plane::<T, 8>(isa, w, x, dy, dx),
                    16 => plane::<T, 16>(isa, w, x, dy, dx),
                    _ => plane::<T, 32>(isa, w, x, dy, dx),
                }
            }
        });
    }
}

dispatch! {
    fn plane[T: Element, const B: usize][T, B](isa, w: &Window, x: &[T], dy: &[T], dx: &mut [T]) = plane_body
}

/// The gradient of one plane, whose pixels are blocks of `B` channels. `dx` is zero.
#[inline(always)]
fn plane_body<const FMA: bool, T: Element, const B: usize>(w: &Window, x: &[T], dy: &[T], dx: &mut [T]) {
    let (x, dy, dx) = (x.as_chunks::<B>().0, dy.as_chunks::<B>().0, dx.as_chunks_mut::<B>().0);
    // The pixels of the taps that lie inside of the image.
    let mut taps = Vec::with_capacity(w.kernel_size());
    for (row, line) in dy.chunks_exact(w.output[2].max(1)).enumerate() {
        for (col, dy) in line.iter().enumerate() {
            taps.clear();
            for h in (0..w.kernel[1]).filter_map(|i| w.read(1, row, i)) {
                taps.extend((0..w.kernel[2]).filter_map(|j| Some(h * w.input[2] + w.read(2, col, j)?)));
            }
            let Some((first, rest)) = taps.split_first() else { continue };
            // The first of the largest elements gets the gradient. NaN counts as the largest.
            let (mut best, mut which) = (x[*first].map(T::wide), [0u32; B]);
            for (tap, pixel) in rest.iter().enumerate() {
                let (x, tap) = (&x[*pixel], tap as u32 + 1);
                for c in 0..B {
                    let v = x[c].wide();
                    let larger = (v > best[c]) | (v.is_nan() & !best[c].is_nan());
                    best[c] = if larger { v } else { best[c] };
                    which[c] = if larger { tap } else { which[c] };
                }
            }
            for (tap, pixel) in taps.iter().enumerate() {
                let dx = &mut dx[*pixel];
                for c in 0..B {
                    dx[c] = if which[c] == tap as u32 { dy[c] } else { T::default() };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::conv::max_grad;
    use crate::cpu::library::testing::*;

    /// Reorders planes of `size` elements, `[P * B, size]`, to `[P, size, B]`.
    fn block<T: Copy>(x: &[T], size: usize, b: usize) -> Vec<T> {
        (0..x.len()).map(|i| x[(i / (size * b) * b + i % b) * size + i / b % size]).collect()
    }

    #[test]
    fn gradients_are_those_of_the_plain_layout() {
        let mut rng = Rng::new();
        for threads in [1, 3] {
            let team = Team::new(threads);
            for isa in Isa::available() {
                for _ in 0..40 {
                    let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
                    let (input, kernel, more, pad) = (two(3, 12), two(1, 3), two(0, 2), two(0, 2));
                    let stride = [kernel[0] + more[0], kernel[1] + more[1]];
                    let pads = [0, 1].map(|i| (pad[i].min(kernel[i] - 1) as isize, pad[1 - i] as isize));
                    let w = Window::new(&input, &kernel, &stride, &[1, 1], &pads, &[1, 1]).unwrap();
                    let (planes, b) = (1 + rng.below(3), [4, 8, 16, 32][rng.below(4)]);
                    let (n_in, n_out) = (planes * b * w.in_size(), planes * b * w.out_size());
                    // Few different values, so that ties occur, and a NaN. All of them are exact in bf16.
                    let mut x: Vec<f32> = (0..n_in).map(|_| rng.below(7) as f32 - 3.0).collect();
                    x[rng.below(n_in)] = f32::NAN;
                    let dy: Vec<f32> = (0..n_out).map(|_| rng.below(200) as f32 - 100.0).collect();
                    let mut want = vec![f32::NAN; n_in];
                    // SAFETY: the vectors hold the sizes of `w`.
                    unsafe {
                        let all = (x.as_ptr(), dy.as_ptr());
                        max_grad::run(&team, isa, planes * b, &w, all, want.as_mut_ptr());
                    }
                    let want = block(&want, w.in_size(), b);
                    let (x, dy) = (block(&x, w.in_size(), b), block(&dy, w.out_size(), b));
                    let grad = MaxGrad::new(planes, b, w).unwrap();
                    let half = |v: &[f32]| v.iter().map(|v| (v.to_bits() >> 16) as u16).collect::<Vec<_>>();
                    let side = [Side::Start, Side::End][rng.below(2)];
                    let (gx, gy) = (Guarded::new(&x, side), Guarded::new(&dy, side));
                    let (hx, hy) = (Guarded::new(&half(&x), side), Guarded::new(&half(&dy), side));
                    let got = Guarded::new(&vec![f32::NAN; n_in], side);
                    let low = Guarded::new(&vec![0x7fc0u16; n_in], side);
                    // SAFETY: the guarded vectors hold the sizes of `w`; the outputs are separate memory.
                    unsafe {
                        grad.run(&team, isa, gx.ptr(), gy.ptr(), got.mut_ptr());
                        grad.run(&team, isa, hx.ptr(), hy.ptr(), low.mut_ptr());
                    }
                    assert_eq!(got.slice(), want, "{isa:?} {grad:?}");
                    assert_eq!(low.slice(), half(&want), "{isa:?} {grad:?}");
                }
            }
        }
    }
}

//! Tests of convolution and pooling in the blocked layout, for every instruction set of this processor, with
//! operands between guard pages. Results are compared with the f64 reference and with plain pooling.

use super::blocked::*;
use super::blocked_tile::{Activation, pool as pool_tiles};
use super::plain::Conv;
use super::plain_tests::reference;
use super::pool::Pool;
use super::window::Window;
use crate::cpu::library::epilogue::BoundChain;
use crate::cpu::library::simd::lanes;
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};

/// Reorders `[N, C, S]` into `[N, C / b, S, b]`.
fn block(x: &[f32], channels: usize, size: usize, b: usize) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    for (i, v) in x.iter().enumerate() {
        let (n, c, s) = (i / (channels * size), i / size % channels, i % size);
        y[((n * (channels / b) + c / b) * size + s) * b + c % b] = *v;
    }
    y
}

/// A random convolution over whole blocks, and the channels of an input block (`b` or 1).
fn random(rng: &mut Rng, b: usize) -> (Conv, usize) {
    let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
    let (input, kernel, stride, dilation) = (two(1, 20), two(1, 4), two(1, 3), two(1, 2));
    let (lo, hi) = (two(0, 3), two(0, 3));
    let crop = rng.below(6) == 0;
    let pads: Vec<(isize, isize)> =
        (0..2).map(|i| (if crop { -(lo[i] as isize) } else { lo[i] as isize }, hi[i] as isize)).collect();
    let plain = rng.below(4) == 0;
    let window = match plain {
        // Pointwise.
        true => Window::new(&input, &[1, 1], &[1, 1], &[1, 1], &[(0, 0), (0, 0)], &[1, 1]),
        false => Window::new(&input, &kernel, &stride, &dilation, &pads, &[1, 1]),
    };
    let (groups, ci, co, inner) = match rng.below(5) {
        0 => (1, 1 + rng.below(5), b * (1 + rng.below(3)), 1),
        1 => (b * (1 + rng.below(3)), 1, 1, b),
        2 => (1 + rng.below(3), b, b * (1 + rng.below(3)), b),
        _ => (1, b * (1 + rng.below(3)), b * (1 + rng.below(6)), b),
    };
    let n = 1 + rng.below(3);
    (Conv::new(n, groups * ci, groups * co, groups, window.unwrap()).unwrap(), inner)
}

#[test]
fn blocked_convolutions_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    let none = SharedConst(std::ptr::null());
    for threads in [1, 2] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            let (b, mut ran) = (lanes(isa), 0);
            for _ in 0..120 {
                let (c, inner) = random(&mut rng, b);
                let Some(k) = Blocked::new(isa, c, inner) else {
                    assert_eq!(c.output_len(), 0, "{c:?}");
                    continue;
                };
                ran += 1;
                let side = [Side::Start, Side::End][rng.below(2)];
                let (size_in, size_out) = (c.window.in_size(), c.window.out_size());
                let (x, w) = (rng.vec(c.input_len()), Guarded::new(&rng.vec(c.weight_len()), side));
                let placed = Guarded::new(&block(&x, c.c_in, size_in, inner), side);
                let (scale, bias) =
                    (Guarded::new(&rng.vec(c.c_out), side), Guarded::new(&rng.vec(c.c_out), side));
                let residual = rng.vec(c.output_len());
                let rest = Guarded::new(&block(&residual, c.c_out, size_out, b), side);
                let has = [rng.below(2) == 0, rng.below(2) == 0, rng.below(2) == 0];
                let given = |k: usize, v: &Guarded<f32>| if has[k] { SharedConst(v.ptr()) } else { none };
                let act = [Activation::None, Activation::Relu, Activation::Clamp(-0.25, 0.5)][rng.below(3)];
                let finish = AffineEpilogue {
                    scale: given(0, &scale),
                    bias: given(1, &bias),
                    residual: given(2, &rest),
                    act,
                };
                let packed = Guarded::new(&vec![f32::NAN; k.weights()], side);
                let work = Guarded::new(&vec![f32::NAN; k.workspace(threads)], side);
                let y = Guarded::new(&vec![f32::NAN; c.output_len()], side);
                // SAFETY: the guarded vectors hold the lengths that `c` and `k` state; the output is separate
                // memory.
                unsafe {
                    k.pack(&team, w.ptr(), packed.ptr() as *mut f32);
                    let (to, room) = (y.ptr() as *mut f32, work.ptr() as *mut f32);
                    let chain = BoundChain::default();
                    k.run(
                        &team,
                        isa,
                        Buffers { x: placed.ptr(), w: packed.ptr(), y: to, work: room },
                        finish,
                        chain,
                    );
                }
                let up = |v: &[f32]| v.iter().map(|&v| v as f64).collect::<Vec<_>>();
                let want = reference(&c, &up(&x), &up(w.slice()), None, false);
                let got = y.slice();
                for (i, (sum, mag)) in want.into_iter().enumerate() {
                    let channel = i / size_out % c.c_out;
                    let (n, s) = (i / (c.c_out * size_out), i % size_out);
                    let at = ((n * (c.c_out / b) + channel / b) * size_out + s) * b + channel % b;
                    let (mut v, mut slack) = (sum, mag);
                    if has[0] {
                        v *= scale.slice()[channel] as f64;
                        slack *= scale.slice()[channel].abs() as f64;
                    }
                    if has[1] {
                        v += bias.slice()[channel] as f64;
                    }
                    if has[2] {
                        v += residual[i] as f64;
                    }
                    v = match act {
                        Activation::None => v,
                        Activation::Relu => v.max(0.0),
                        Activation::Clamp(lo, hi) => v.clamp(lo as f64, hi as f64),
                    };
                    let bound = 4e-6 * (slack + 2.0);
                    let g = got[at] as f64;
                    assert!(
                        (g - v).abs() <= bound,
                        "{isa:?} {threads} {c:?} {i}: {g} for {v} within {bound}"
                    );
                }
            }
            assert!(ran > 60, "{ran}");
        }
    }
}

/// The order of the sums does not depend on the number of threads.
#[test]
fn blocked_convolutions_are_the_same_on_any_number_of_threads() {
    let mut rng = Rng::new();
    let isa = Isa::best();
    let b = lanes(isa);
    for (size, ci, co) in [(28, 4, 4), (7, 8, 16), (9, 3, 5)] {
        let window = Window::new(&[size, size], &[3, 3], &[1, 1], &[1, 1], &[(1, 1), (1, 1)], &[1, 1]);
        let c = Conv::new(2, ci * b, co * b, 1, window.unwrap()).unwrap();
        let k = Blocked::new(isa, c, b).unwrap();
        let (x, w) = (rng.vec(c.input_len()), rng.vec(c.weight_len()));
        let run = |threads: usize| {
            let team = Team::new(threads);
            let mut packed = vec![f32::NAN; k.weights()];
            let mut work = vec![f32::NAN; k.workspace(threads)];
            let mut y = vec![f32::NAN; c.output_len()];
            // SAFETY: the vectors hold the lengths that `c` and `k` state; the output is separate memory.
            unsafe {
                k.pack(&team, w.as_ptr(), packed.as_mut_ptr());
                let (x, w, y, work) = (x.as_ptr(), packed.as_ptr(), y.as_mut_ptr(), work.as_mut_ptr());
                let (finish, chain) = (AffineEpilogue::default(), BoundChain::default());
                k.run(&team, isa, Buffers { x, w, y, work }, finish, chain);
            }
            y
        };
        let one = run(1);
        assert!(one.iter().all(|v| v.is_finite()));
        for threads in [2, 3] {
            assert!(one == run(threads), "{threads} threads");
        }
    }
}

#[test]
fn blocked_pools_are_the_plain_ones() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for isa in Isa::available() {
        let b = lanes(isa);
        for round in 0..60 {
            let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
            let (input, kernel, stride, dilation) = (two(1, 15), two(1, 4), two(1, 3), two(1, 2));
            let (lo, hi) = (two(0, 2), two(0, 2));
            let pads = [0, 1].map(|i| (lo[i] as isize, hi[i] as isize));
            let w = Window::new(&input, &kernel, &stride, &dilation, &pads, &[1, 1]).unwrap();
            let (n, channels) = (1 + rng.below(2), b * (1 + rng.below(3)));
            let mut x = rng.vec(n * channels * w.in_size());
            if round % 3 == 0 {
                let at = rng.below(x.len());
                x[at] = f32::NAN;
            }
            let placed = Guarded::new(&block(&x, channels, w.in_size(), b), Side::End);
            for kind in [
                Pool::Max,
                Pool::Average { count_include_pad: true },
                Pool::Average { count_include_pad: false },
            ] {
                let size = n * channels * w.out_size();
                let mut want = vec![0f32; size];
                let got = Guarded::new(&vec![f32::INFINITY; size], Side::End);
                // SAFETY: the vectors hold the planes of the window's sizes; outputs are separate memory.
                unsafe {
                    super::pool::pool(&team, isa, kind, n * channels, &w, x.as_ptr(), want.as_mut_ptr());
                    let to = got.ptr() as *mut f32;
                    pool_tiles(&team, isa, kind, n * channels / b, &w, placed.ptr(), to);
                }
                for (v, want) in got.slice().iter().zip(block(&want, channels, w.out_size(), b)) {
                    let same = (v - want).abs() <= 1e-6 || *v == want || v.is_nan() && want.is_nan();
                    assert!(same, "{isa:?} {w:?} {kind:?}: {v} for {want}");
                }
            }
        }
    }
}

/// Two taps with 2^32 rows and columns between them, which lie in the padding: the type rule accepts it, and
/// a padded copy would have 2^64 pixels.
#[test]
fn convolutions_whose_padded_copy_overflows_are_left_to_others() {
    let pads = [(1 << 31, (1 << 31) - 4); 2];
    let window = Window::new(&[4, 4], &[2, 2], &[1, 1], &[(1 << 32) - 1; 2], &pads, &[1, 1]).unwrap();
    for isa in Isa::available() {
        let b = lanes(isa);
        let c = Conv::new(1, b, b, 1, window).unwrap();
        assert_eq!(c.output_len(), b);
        assert!(Blocked::new(isa, c, b).is_none());
    }
    let c = Conv::new(1, 16, 16, 1, window).unwrap();
    assert!(!c.can_be_copied());
}

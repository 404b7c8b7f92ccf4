//! Tests of bf16 convolution and pooling in blocks of 32 channels, with all instructions of this processor,
//! with operands between guard pages. Results are compared with results in f64 of the same rounded operands.

use super::blocked::Buffers;
use super::blocked_bf16::*;
use super::blocked_bf16_vector::{Depthwise16, pool};
use super::blocked_tile::Activation;
use super::plain::Conv;
use super::plain_tests::reference;
use super::pool::Pool;
use super::window::Window;
use crate::cpu::library::gemm::product_bf16::Bf16Code;
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};
use half::bf16;

fn bits(v: &[f32]) -> Vec<u16> {
    v.iter().map(|v| bf16::from_f32(*v).to_bits()).collect()
}

fn up(v: &[u16]) -> Vec<f64> {
    v.iter().map(|v| bf16::from_bits(*v).to_f64()).collect()
}

/// Reorders `[N, C, S]` into `[N, C / b, S, b]`.
fn block<T: Copy>(x: &[T], channels: usize, size: usize, b: usize) -> Vec<T> {
    let mut y = x.to_vec();
    for (i, v) in x.iter().enumerate() {
        y[place(i, channels, size, b)] = *v;
    }
    y
}

fn place(i: usize, channels: usize, size: usize, b: usize) -> usize {
    let (n, c, s) = (i / (channels * size), i / size % channels, i % size);
    ((n * (channels / b) + c / b) * size + s) * b + c % b
}

/// The instructions that this processor has.
fn codes() -> Vec<Bf16Code> {
    [Bf16Code::Wide, Bf16Code::Pairs, Bf16Code::Tiles].into_iter().filter(|c| c.runs(Isa::best())).collect()
}

/// A random convolution over whole blocks, and the number of channels of an input block (32 or 1).
fn random(rng: &mut Rng) -> (Conv, usize) {
    let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
    let (input, stride, dilation) = (two(1, 20), two(1, 3), two(1, 2));
    let (lo, hi, kernel) = (two(0, 4), two(0, 4), two(0, 4));
    let mut kernel = kernel.map(|k| [1, 3, 5, 7][k]);
    if rng.below(3) == 0 {
        kernel = [1 + rng.below(4), 1 + rng.below(4)];
    }
    let crop = rng.below(6) == 0;
    let pads: Vec<(isize, isize)> =
        (0..2).map(|i| (if crop { -(lo[i] as isize) } else { lo[i] as isize }, hi[i] as isize)).collect();
    let (groups, ci, co, inner) = match rng.below(5) {
        0 => (1, 1 + rng.below(9), BLOCK * (1 + rng.below(3)), 1),
        1 => (1 + rng.below(3), BLOCK, BLOCK * (1 + rng.below(3)), BLOCK),
        _ => (1, BLOCK * (1 + rng.below(3)), BLOCK * (1 + rng.below(6)), BLOCK),
    };
    let dilation = [dilation[0], if inner == 1 { 1 } else { dilation[1] }];
    let window = match rng.below(4) {
        // Pointwise.
        0 => Window::new(&input, &[1, 1], &[1, 1], &[1, 1], &[(0, 0), (0, 0)], &[1, 1]),
        _ => Window::new(&input, &kernel, &stride, &dilation, &pads, &[1, 1]),
    };
    let n = 1 + rng.below(3);
    (Conv::new(n, groups * ci, groups * co, groups, window.unwrap()).unwrap(), inner)
}

#[test]
fn blocked_convolutions_of_bf16_follow_f64_between_guard_pages() {
    if halcyon_test_host::left_out("blocked_convolutions_of_bf16_follow_f64_between_guard_pages") {
        return;
    }
    let mut rng = Rng::new();
    for threads in [1, 2, 3] {
        let team = Team::new(threads);
        for code in codes() {
            let mut ran = 0;
            for _ in 0..40 {
                let (c, inner) = random(&mut rng);
                let Some(k) = Blocked16::new(c, inner, threads, code) else {
                    assert_eq!(c.output_len(), 0, "{c:?}");
                    continue;
                };
                ran += 1;
                one(&mut rng, &team, code, &c, inner, &k);
            }
            assert!(ran > 20, "{ran}");
        }
    }
}

/// Convolutions whose results have few pixels per image, like the gradients of weights. Their tiles have
/// pixels of several images.
#[test]
fn blocked_convolutions_with_few_pixels_follow_f64_between_guard_pages() {
    if halcyon_test_host::left_out("blocked_convolutions_with_few_pixels_follow_f64_between_guard_pages") {
        return;
    }
    let (mut rng, mut across) = (Rng::new(), 0);
    for threads in [1, 3] {
        let team = Team::new(threads);
        for code in codes() {
            for _ in 0..12 {
                let input = [6 + rng.below(5), 6 + rng.below(5)];
                let (out, pad) = ([1 + rng.below(4), 1 + rng.below(4)], [rng.below(3), rng.below(3)]);
                let step = if rng.below(4) == 0 { 2 } else { 1 };
                let kernel = [0, 1].map(|i| (input[i] + 2 * pad[i] - out[i]) / step + 1);
                let pads = pad.map(|p| (p as isize, p as isize));
                let stride = if rng.below(4) == 0 { [2, 2] } else { [1, 1] };
                let window = Window::new(&input, &kernel, &stride, &[step; 2], &pads, &[1, 1]).unwrap();
                let groups = 1 + rng.below(2);
                let (ci, co) = (BLOCK * groups, BLOCK * groups * (1 + rng.below(2)));
                let c = Conv::new(4 + rng.below(20), ci, co, groups, window).unwrap();
                let k = Blocked16::new(c, BLOCK, threads, code).unwrap();
                across += usize::from(k.is_across_images());
                one(&mut rng, &team, code, &c, BLOCK, &k);
            }
        }
    }
    assert!(across > 4, "{across}");
}

fn one(rng: &mut Rng, team: &Team, code: Bf16Code, c: &Conv, inner: usize, k: &Blocked16) {
    let isa = match code {
        Bf16Code::Wide => Isa::available()[rng.below(Isa::available().len())],
        _ => Isa::best(),
    };
    let side = [Side::Start, Side::End][rng.below(2)];
    let (size_in, size_out) = (c.window.in_size(), c.window.out_size());
    let x = bits(&rng.vec(c.input_len()));
    let w = Guarded::new(&bits(&rng.vec(c.weight_len())), side);
    let placed = Guarded::new(&block(&x, c.c_in, size_in, inner), side);
    let (scale, bias) = (Guarded::new(&rng.vec(c.c_out), side), Guarded::new(&rng.vec(c.c_out), side));
    let has = [0; 5].map(|_| rng.below(2) == 0);
    let given = |k: usize, v: &Guarded<f32>| SharedConst(if has[k] { v.ptr() } else { std::ptr::null() });
    let (residual_wide, wide) = (has[3], has[4]);
    let residual: Vec<f32> = rng.vec(c.output_len()).iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    let rest = block(&residual, c.c_out, size_out, BLOCK);
    let rest: Vec<u16> = match residual_wide {
        true => rest.iter().flat_map(|v| [v.to_bits() as u16, (v.to_bits() >> 16) as u16]).collect(),
        false => bits(&rest),
    };
    let rest = Guarded::new(&rest, side);
    let act = [Activation::None, Activation::Relu, Activation::Clamp(-0.25, 0.5)][rng.below(3)];
    let after = Bf16Epilogue {
        scale: given(0, &scale),
        bias: given(1, &bias),
        residual: SharedConst(if has[2] { rest.ptr() as *const u8 } else { std::ptr::null() }),
        residual_wide,
        wide,
        act,
    };
    let packed = Guarded::new(&vec![0x7fc0u16; k.weights() / 2], side);
    let work = Guarded::new(&vec![0x7fc0u16; k.workspace() / 2], Side::Start);
    let y = Guarded::new(&vec![0x7fc0u16; c.output_len() * if wide { 2 } else { 1 }], side);
    // SAFETY: the guarded vectors hold the lengths that `c` and `k` state; the output is separate memory.
    unsafe {
        k.pack(team, w.ptr(), packed.mut_ptr());
        let (to, room) = (y.mut_ptr() as *mut u8, work.mut_ptr() as *mut u8);
        k.run(team, isa, Buffers { x: placed.ptr(), w: packed.ptr(), y: to, work: room }, after);
    }
    let want = reference(c, &up(&x), &up(w.slice()), None, false);
    let got = y.slice();
    for (i, (sum, mag)) in want.into_iter().enumerate() {
        let (channel, at) = (i / size_out % c.c_out, place(i, c.c_out, size_out, BLOCK));
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
        let g = match wide {
            true => f32::from_bits(got[2 * at] as u32 | (got[2 * at + 1] as u32) << 16) as f64,
            false => bf16::from_bits(got[at]).to_f64(),
        };
        // The error of the sums, plus that of rounding the result to bf16, which has eight significant bits.
        let bound = 4e-6 * (slack + 2.0) + if wide { 0.0 } else { v.abs() / 256.0 };
        assert!(
            (g - v).abs() <= bound,
            "{code:?}, {} threads {c:?} {i}: {g} for {v} within {bound}",
            team.threads()
        );
    }
}

/// The order of the sums does not depend on the number of threads.
#[test]
fn blocked_convolutions_of_bf16_are_the_same_on_any_number_of_threads() {
    let mut rng = Rng::new();
    for (n, size, ci, co, kernel, stride) in [
        (1, 28, 2, 4, 3, 1),
        (1, 7, 4, 16, 3, 1),
        (2, 9, 3, 5, 1, 1),
        (1, 14, 4, 12, 1, 2),
        (2, 15, 2, 2, 3, 2),
    ] {
        let (k2, s2, p) = ([kernel; 2], [stride; 2], (kernel as isize / 2, kernel as isize / 2));
        let window = Window::new(&[size, size], &k2, &s2, &[1, 1], &[p, p], &[1, 1]).unwrap();
        let c = Conv::new(n, ci * BLOCK, co * BLOCK, 1, window).unwrap();
        let (x, w) = (bits(&rng.vec(c.input_len())), bits(&rng.vec(c.weight_len())));
        for code in codes() {
            let run = |threads: usize| {
                let team = Team::new(threads);
                let k = Blocked16::new(c, BLOCK, threads, code).unwrap();
                let mut packed = vec![0x7fc0u16; k.weights() / 2];
                let mut work = vec![0xffu8; k.workspace()];
                let mut y = vec![0x7fc0u16; c.output_len()];
                // SAFETY: the vectors hold the lengths that `c` and `k` state; the output is separate memory.
                unsafe {
                    k.pack(&team, w.as_ptr(), packed.as_mut_ptr());
                    let (to, room) = (y.as_mut_ptr() as *mut u8, work.as_mut_ptr());
                    let buffers = Buffers { x: x.as_ptr(), w: packed.as_ptr(), y: to, work: room };
                    k.run(&team, Isa::best(), buffers, Bf16Epilogue::default());
                }
                y
            };
            let one = run(1);
            assert!(one.iter().all(|v| bf16::from_bits(*v).is_finite()));
            for threads in [2, 3] {
                assert!(one == run(threads), "{threads} threads");
            }
        }
    }
}

/// A NaN in the input reaches exactly the outputs whose windows contain it.
#[test]
fn values_that_are_not_finite_stay_where_they_belong() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for (inner, ci) in [(BLOCK, BLOCK), (1, 3)] {
        let pad = (1, 1);
        let window = Window::new(&[13, 11], &[3, 3], &[1, 1], &[1, 1], &[pad, pad], &[1, 1]).unwrap();
        let c = Conv::new(1, ci, BLOCK, 1, window).unwrap();
        for code in codes() {
            let k = Blocked16::new(c, inner, 2, code).unwrap();
            let mut x = bits(&rng.vec(c.input_len()));
            let (row, col, channel) = (rng.below(13), rng.below(11), rng.below(ci));
            x[(channel * 13 + row) * 11 + col] = bf16::NAN.to_bits();
            let placed = block(&x, ci, 13 * 11, inner);
            let w = bits(&vec![0.5; c.weight_len()]);
            let mut packed = vec![0x7fc0u16; k.weights() / 2];
            let mut work = vec![0xffu8; k.workspace()];
            let mut y = vec![0x7fc0u16; c.output_len()];
            // SAFETY: the vectors hold the lengths that `c` and `k` state; the output is separate memory.
            unsafe {
                k.pack(&team, w.as_ptr(), packed.as_mut_ptr());
                let (to, room) = (y.as_mut_ptr() as *mut u8, work.as_mut_ptr());
                let buffers = Buffers { x: placed.as_ptr(), w: packed.as_ptr(), y: to, work: room };
                k.run(&team, Isa::best(), buffers, Bf16Epilogue::default());
            }
            for (i, v) in y.iter().enumerate() {
                let (r, q) = (i / BLOCK / 11, i / BLOCK % 11);
                let reads = r.abs_diff(row) <= 1 && q.abs_diff(col) <= 1;
                assert_eq!(bf16::from_bits(*v).is_nan(), reads, "{code:?} {inner} {r} {q}, at {row} {col}");
            }
        }
    }
}

/// A random window of up to five taps per axis.
fn window(rng: &mut Rng) -> Window {
    let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
    let (input, kernel, stride, dilation) = (two(1, 40), two(1, 5), two(1, 3), two(1, 2));
    let (lo, hi) = (two(0, 3), two(0, 3));
    let pads = [0, 1].map(|i| (lo[i] as isize, hi[i] as isize));
    Window::new(&input, &kernel, &stride, &dilation, &pads, &[1, 1]).unwrap()
}

#[test]
fn depthwise_convolutions_of_bf16_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 2, 3] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            let mut ran = 0;
            for _ in 0..25 {
                let channels = BLOCK * (1 + rng.below(3));
                let c = Conv::new(1 + rng.below(2), channels, channels, channels, window(&mut rng)).unwrap();
                let Some(k) = Depthwise16::new(c) else {
                    assert_eq!(c.output_len(), 0, "{c:?}");
                    continue;
                };
                ran += 1;
                let side = [Side::Start, Side::End][rng.below(2)];
                let (size_in, size_out) = (c.window.in_size(), c.window.out_size());
                let (x, w) = (bits(&rng.vec(c.input_len())), bits(&rng.vec(c.weight_len())));
                let placed = Guarded::new(&block(&x, channels, size_in, BLOCK), side);
                let bias = Guarded::new(&rng.vec(channels), side);
                let packed = Guarded::new(&vec![f32::NAN; k.weights()], side);
                let y = Guarded::new(&vec![0x7fc0u16; c.output_len()], side);
                let after = Bf16Epilogue {
                    bias: SharedConst(bias.ptr()),
                    act: Activation::Relu,
                    ..Bf16Epilogue::default()
                };
                // SAFETY: the guarded vectors hold the lengths that `c` and `k` state; the output is separate
                // memory.
                unsafe {
                    k.pack(w.as_ptr(), packed.mut_ptr());
                    k.run(&team, isa, placed.ptr(), packed.ptr(), y.mut_ptr() as *mut u8, after);
                }
                for (i, (sum, mag)) in reference(&c, &up(&x), &up(&w), None, false).into_iter().enumerate() {
                    let want = (sum + bias.slice()[i / size_out % channels] as f64).max(0.0);
                    let got = bf16::from_bits(y.slice()[place(i, channels, size_out, BLOCK)]).to_f64();
                    let bound = 4e-6 * (mag + 2.0) + want / 256.0;
                    assert!((got - want).abs() <= bound, "{isa:?} {threads} {c:?} {i}: {got} for {want}");
                }
            }
            assert!(ran > 10, "{ran}");
        }
    }
}

#[test]
fn pools_of_bf16_in_blocks_are_the_plain_ones() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    for isa in Isa::available() {
        for round in 0..40 {
            let w = window(&mut rng);
            let (n, blocks) = (1 + rng.below(2), 1 + rng.below(3));
            let channels = BLOCK * blocks;
            let mut x = bits(&rng.vec(n * channels * w.in_size()));
            if round % 3 == 0 {
                let at = rng.below(x.len());
                x[at] = bf16::NAN.to_bits();
            }
            let placed = Guarded::new(&block(&x, channels, w.in_size(), BLOCK), Side::End);
            let halves: Vec<bf16> = x.iter().map(|v| bf16::from_bits(*v)).collect();
            for kind in [
                Pool::Max,
                Pool::Average { count_include_pad: true },
                Pool::Average { count_include_pad: false },
            ] {
                let size = n * channels * w.out_size();
                let mut want = vec![bf16::ZERO; size];
                let got = Guarded::new(&vec![0x7f80u16; size], Side::End);
                // SAFETY: the vectors hold the planes of the window's sizes; outputs are separate memory.
                unsafe {
                    super::pool::pool(&team, isa, kind, n * channels, &w, halves.as_ptr(), want.as_mut_ptr());
                    pool(&team, isa, kind, (n, blocks), &w, placed.ptr(), got.mut_ptr());
                }
                for (v, want) in got.slice().iter().zip(block(&want, channels, w.out_size(), BLOCK)) {
                    let (v, want) = (bf16::from_bits(*v).to_f32(), want.to_f32());
                    // (The terms of a mean are added in another order, so means may differ slightly.)
                    let near =
                        matches!(kind, Pool::Average { .. }) && (v - want).abs() <= want.abs() / 128.0 + 1e-6;
                    assert!(
                        v == want || near || v.is_nan() && want.is_nan(),
                        "{isa:?} {w:?} {kind:?}: {v} for {want}"
                    );
                }
            }
        }
    }
}

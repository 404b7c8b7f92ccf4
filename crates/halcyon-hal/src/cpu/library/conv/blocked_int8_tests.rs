//! Tests of convolutions of bytes in blocks of 64 channels, on every engine of the processor, with operands
//! between guard pages. Sums are exact, so the tests compare the results with sums in i64.

use super::blocked::Buffers;
use super::blocked_int8::*;
use super::blocked_tile::Activation;
use super::plain::Conv;
use super::window::Window;
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, Team};

/// The engines of this processor, each with the processor's best instruction set.
fn engines() -> Vec<(Engine, Isa)> {
    let best = Isa::best();
    let all = [Engine::Tiles, Engine::Vnni, Engine::Avx2];
    let has = |e: &Engine| match e {
        Engine::Tiles => best.has_int8_tiles(),
        Engine::Vnni => best.has_vnni(),
        Engine::Avx2 => Engine::of(best).is_some(),
    };
    all.into_iter().filter(has).map(|e| (e, best)).collect()
}

/// Reorders `[N, C, S]` into `[N, C / 64, S, 64]`.
fn block<T: Copy>(x: &[T], channels: usize, size: usize) -> Vec<T> {
    let mut y = x.to_vec();
    for (i, v) in x.iter().enumerate() {
        let (n, c, s) = (i / (channels * size), i / size % channels, i % size);
        y[((n * (channels / BLOCK) + c / BLOCK) * size + s) * BLOCK + c % BLOCK] = *v;
    }
    y
}

fn random(rng: &mut Rng) -> Conv {
    let mut two = |lo: usize, n: usize| [lo + rng.below(n), lo + rng.below(n)];
    let (input, stride, dilation, kernel) = (two(1, 18), two(1, 3), two(1, 2), two(0, 3));
    let (lo, hi) = (two(0, 3), two(0, 3));
    let kernel = kernel.map(|k| [1, 3, 5][k]);
    let pads: Vec<(isize, isize)> = (0..2).map(|i| (lo[i] as isize, hi[i] as isize)).collect();
    let window = match rng.below(3) {
        0 => Window::new(&input, &[1, 1], &[1, 1], &[1, 1], &[(0, 0), (0, 0)], &[1, 1]),
        _ => Window::new(&input, &kernel, &stride, &dilation, &pads, &[1, 1]),
    };
    let (groups, n) = (1 + rng.below(2), 1 + rng.below(2));
    let (ci, co) = (groups * BLOCK * (1 + rng.below(2)), groups * BLOCK * (1 + rng.below(3)));
    Conv::new(n, ci, co, groups, window.unwrap()).unwrap()
}

/// The sums, computed in i64 by the definition of a convolution.
fn sums(c: &Conv, x: &[i64], w: &[i64]) -> Vec<i64> {
    let v = &c.window;
    let (si, so, taps) = (v.in_size(), v.out_size(), v.kernel_size());
    let (per_in, per_out) = (c.c_in / c.groups, c.c_out / c.groups);
    let mut y = vec![0; c.output_len()];
    for (i, y) in y.iter_mut().enumerate() {
        let (n, o, p) = (i / (c.c_out * so), i / so % c.c_out, i % so);
        let (row, col) = (p / v.output[2], p % v.output[2]);
        for t in 0..taps {
            let (a, b) = (v.at(1, row, t / v.kernel[2]), v.at(2, col, t % v.kernel[2]));
            if a < 0 || b < 0 || a >= v.input[1] as isize || b >= v.input[2] as isize {
                continue;
            }
            for k in 0..per_in {
                let channel = o / per_out * per_in + k;
                let at = (n * c.c_in + channel) * si + a as usize * v.input[2] + b as usize;
                *y += x[at] * w[(o * per_in + k) * taps + t];
            }
        }
    }
    y
}

#[test]
fn blocked_convolutions_of_bytes_are_exact_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 3] {
        let team = Team::new(threads);
        for (engine, isa) in engines() {
            let mut ran = 0;
            for _ in 0..24 {
                let c = random(&mut rng);
                let signed = rng.below(2) == 0;
                let Some(k) = Blocked8::new(c, threads, engine, signed) else {
                    assert_eq!(c.output_len(), 0, "{c:?}");
                    continue;
                };
                ran += 1;
                one(&mut rng, &team, (engine, isa), &c, signed, &k);
            }
            assert!(ran > 10, "{ran}");
        }
    }
}

fn one(rng: &mut Rng, team: &Team, (engine, isa): (Engine, Isa), c: &Conv, signed: bool, k: &Blocked8) {
    let side = [Side::Start, Side::End][rng.below(2)];
    let (si, so) = (c.window.in_size(), c.window.out_size());
    // On AVX2, sums of two products can saturate 16 bits with weights of 8 bits, but not with weights of 7
    // bits.
    let most = [63, 127][rng.below(2)];
    let ends = rng.below(2) == 0;
    let mut value = |lo: i64, hi: i64| match ends {
        true => [lo, hi][rng.below(2)],
        false => lo + rng.below((hi - lo + 1) as usize) as i64,
    };
    let (lo, hi) = if signed { (-128, 127) } else { (0, 255) };
    let x: Vec<i64> = (0..c.input_len()).map(|_| value(lo, hi)).collect();
    let w: Vec<i64> = (0..c.weight_len()).map(|_| value(-most, most)).collect();
    let want = sums(c, &x, &w);
    let xs: Vec<u8> = x.iter().map(|v| *v as u8).collect();
    let ws: Vec<i8> = w.iter().map(|v| *v as i8).collect();
    let (placed, weights) = (Guarded::new(&block(&xs, c.c_in, si), side), Guarded::new(&ws, side));
    let packed = Guarded::new(&vec![0xaau8; k.weights()], Side::Start);
    let scale: Vec<f32> = rng.vec(c.c_out).iter().map(|v| v * 1e-3).collect();
    let (scale, bias) = (Guarded::new(&scale, side), Guarded::new(&rng.vec(c.c_out), side));
    let residual = rng.vec(c.output_len());
    let rest = Guarded::new(&block(&residual, c.c_out, so), side);
    let has = [0; 3].map(|_| rng.below(2) == 0);
    let given = |k: usize, v: &Guarded<f32>| SharedConst(if has[k] { v.ptr() } else { std::ptr::null() });
    let act = [Activation::None, Activation::Relu, Activation::Clamp(-0.5, 2.0)][rng.below(3)];
    let to = [
        Store::Float,
        Store::Byte { inverse: 37.5, zero: 0.0, signed: false },
        Store::Byte { inverse: 21.25, zero: -3.0, signed: true },
    ][rng.below(3)];
    let after =
        ByteEpilogue { scale: given(0, &scale), bias: given(1, &bias), residual: given(2, &rest), act, to };
    let y = Guarded::new(&vec![0xa5u8; c.output_len() * to.size()], side);
    let work = Guarded::new(&vec![0u8; k.workspace().max(1)], Side::Start);
    // SAFETY: the buffers have the sizes that `pack` and `run` require, and `engines` lists only engines that
    // the processor has.
    unsafe {
        k.pack(team, weights.ptr(), packed.mut_ptr());
        let buffers = Buffers { x: placed.ptr(), w: packed.ptr(), y: y.mut_ptr(), work: work.mut_ptr() };
        k.run(team, isa, buffers, after);
    }
    let want: Vec<f32> = want
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let o = i / so % c.c_out;
            let mut v = *s as f64;
            v *= if has[0] { scale.slice()[o].into() } else { 1.0 };
            v += if has[1] { bias.slice()[o].into() } else { 0.0 };
            v += if has[2] { residual[i].into() } else { 0.0 };
            let v = match act {
                Activation::None => v,
                Activation::Relu => v.max(0.0),
                Activation::Clamp(lo, hi) => v.clamp(lo.into(), hi.into()),
            };
            v as f32
        })
        .collect();
    let want = block(&want, c.c_out, so);
    let got = y.slice();
    for (i, want) in want.iter().enumerate() {
        let what = || format!("{engine:?} {c:?} signed {signed} {after:?} at {i}");
        match to {
            Store::Float => {
                let got = f32::from_le_bytes(got[4 * i..4 * i + 4].try_into().unwrap());
                let bound = 1e-5 * want.abs().max(1.0);
                assert!((got - want).abs() <= bound, "{got} for {want}: {}", what());
            }
            Store::Byte { inverse, zero, signed } => {
                let got = if signed { f32::from(got[i] as i8) } else { f32::from(got[i]) };
                let (lo, hi) = if signed { (-128.0, 127.0) } else { (0.0, 255.0) };
                // Also try values just below and above, because an error of rounding may decide a tie.
                let codes = [1.0 - 1e-5, 1.0, 1.0 + 1e-5]
                    .map(|f| ((want * f * inverse).round_ties_even() + zero).clamp(lo, hi));
                assert!(codes.contains(&got), "{got} for {codes:?}: {}", what());
            }
        }
    }
}

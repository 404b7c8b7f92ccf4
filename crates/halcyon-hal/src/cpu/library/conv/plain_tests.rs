//! Tests of convolution against f64, for every instruction set of this processor, with operands between guard
//! pages.

use super::plain::*;
use crate::cpu::library::accumulator::Accumulated;
use crate::cpu::library::testing::*;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use half::{bf16, f16};

/// Convolution by its definition in f64. For each output, returns the value, and 1 plus the sum of the
/// magnitudes of the products.
pub(crate) fn reference(c: &Conv, x: &[f64], w: &[f64], bias: Option<&[f64]>, relu: bool) -> Vec<(f64, f64)> {
    let win = &c.window;
    let (cg, mg) = (c.c_in / c.groups, c.c_out / c.groups);
    let [id, ih, iw] = win.input;
    let [kd, kh, kw] = win.kernel;
    let mut y = Vec::new();
    // The input position that tap `t` of output `o` reads on axis `a`, if any.
    let pos = |a: usize, o: usize, t: usize| -> Option<usize> {
        let p = (o * win.stride[a] + t * win.dilation[a]) as i64 - win.pad_lo[a] as i64;
        let s = win.input_dilation[a] as i64;
        (p >= 0 && p % s == 0 && p / s < win.input[a] as i64).then_some((p / s) as usize)
    };
    for n in 0..c.batch {
        for co in 0..c.c_out {
            for od in 0..win.output[0] {
                for oh in 0..win.output[1] {
                    for ow in 0..win.output[2] {
                        let mut s = bias.map_or(0.0, |b| b[co]);
                        let mut mag = 1.0;
                        for ci in 0..cg {
                            for (td, th, tw) in (0..kd)
                                .flat_map(|a| (0..kh).flat_map(move |b| (0..kw).map(move |c| (a, b, c))))
                            {
                                if let (Some(d), Some(h), Some(v)) =
                                    (pos(0, od, td), pos(1, oh, th), pos(2, ow, tw))
                                {
                                    let xc = n * c.c_in + co / mg * cg + ci;
                                    let p = x[((xc * id + d) * ih + h) * iw + v]
                                        * w[(((co * cg + ci) * kd + td) * kh + th) * kw + tw];
                                    s += p;
                                    mag += p.abs();
                                }
                            }
                        }
                        y.push((if relu { s.max(0.0) } else { s }, mag));
                    }
                }
            }
        }
    }
    y
}

fn random_conv(rng: &mut Rng, spread: bool) -> Conv {
    let dims = 1 + rng.below(3);
    let mut list = |lo: usize, n: usize| -> Vec<usize> { (0..dims).map(|_| lo + rng.below(n)).collect() };
    let input = list(1, if dims == 3 { 7 } else { 40 });
    let kernel = list(1, 4);
    let stride = list(1, 3);
    let dilation = list(1, 2);
    let (lo, hi) = (list(0, 3), list(0, 3));
    let input_dilation = if spread { list(1, 3) } else { vec![1; dims] };
    // One case in five crops the start of each axis instead of padding it.
    let crop = rng.below(5) == 0;
    let pads: Vec<(isize, isize)> = lo
        .iter()
        .zip(&hi)
        .map(|(&a, &b)| (if crop { -(a as isize) } else { a as isize }, b as isize))
        .collect();
    let window = Window::new(&input, &kernel, &stride, &dilation, &pads, &input_dilation).unwrap();
    let groups = 1 + rng.below(3);
    let (ci, co) = match rng.below(4) {
        0 => (1, 1 + rng.below(5)),
        1 => (1, 1),
        _ => (1 + rng.below(6), 1 + rng.below(30)),
    };
    Conv::new(1 + rng.below(3), groups * ci, groups * co, groups, window).unwrap()
}

#[test]
fn convolutions_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for threads in [1, 2] {
        let team = Team::new(threads);
        for isa in Isa::available() {
            for round in 0..120 {
                let c = random_conv(&mut rng, round % 4 == 0);
                let side = [Side::Start, Side::End][rng.below(2)];
                let x = Guarded::new(&rng.vec(c.input_len()), side);
                let w = Guarded::new(&rng.vec(c.weight_len()), side);
                let bias = Guarded::new(&rng.vec(c.c_out), side);
                let (with_bias, relu) = (rng.below(2) == 0, rng.below(2) == 0);
                let b = if with_bias { bias.ptr() } else { std::ptr::null() };
                let up = |v: &[f32]| v.iter().map(|&v| v as f64).collect::<Vec<_>>();
                let wide = up(bias.slice());
                let want =
                    reference(&c, &up(x.slice()), &up(w.slice()), with_bias.then_some(&wide[..]), relu);
                let mut kept = vec![f32::NAN; ConvWeights::floats(isa, &c).unwrap_or(0)];
                let packed = ConvWeights::floats(isa, &c).map(|_| {
                    // SAFETY: `w` holds `c.weight_len()` elements and `kept` `ConvWeights::floats`; `kept`
                    // outlives `packed` and is not changed.
                    unsafe {
                        ConvWeights::pack(Some(&team), isa, &c, w.ptr(), kept.as_mut_ptr());
                        ConvWeights::new(isa, &c, kept.as_ptr())
                    }
                });
                for p in [None, packed.as_ref()] {
                    let y = Guarded::new(&vec![f32::NAN; c.output_len()], side);
                    // SAFETY: the guarded vectors hold the lengths that `c` states; `y` is separate memory.
                    unsafe {
                        let operands = ConvOperands::new(x.ptr(), w.ptr(), y.mut_ptr());
                        conv_f32(&team, isa, &c, p, &ConvOperands { bias: b, relu, ..operands })
                    };
                    for (i, (&got, &(want, mag))) in y.slice().iter().zip(&want).enumerate() {
                        close(got, want, mag, sum_tolerance(c.k()), &(isa, &c, with_bias, relu, i));
                    }
                }
            }
        }
    }
}

/// Compares the row-by-row path in one element type with f64. `eps` bounds the type's relative rounding
/// error.
fn check_rows<T: Accumulated>(rng: &mut Rng, isa: Isa, conv: fn(f32) -> T, wide: fn(T) -> f64, eps: f64) {
    let team = Team::new(2);
    for round in 0..30 {
        let c = random_conv(rng, round % 2 == 0);
        let mut make = |n| rng.vec(n).into_iter().map(conv).collect::<Vec<T>>();
        let x = Guarded::new(&make(c.input_len()), Side::End);
        let w = Guarded::new(&make(c.weight_len()), Side::Start);
        let b = Guarded::new(&make(c.c_out), Side::End);
        let y = Guarded::new(&vec![conv(f32::NAN); c.output_len()], Side::Start);
        // SAFETY: the guarded vectors hold the lengths that `c` states; `y` is separate memory.
        unsafe {
            let operands = ConvOperands::new(x.ptr(), w.ptr(), y.mut_ptr());
            conv_rows(&team, isa, &c, &ConvOperands { bias: b.ptr(), ..operands })
        };
        let up = |v: &[T]| v.iter().map(|&v| wide(v)).collect::<Vec<_>>();
        let want = reference(&c, &up(x.slice()), &up(w.slice()), Some(&up(b.slice())), false);
        for (i, (&got, &(want, mag))) in y.slice().iter().zip(&want).enumerate() {
            let got = wide(got);
            assert!(
                (got - want).abs()
                    <= eps * (want.abs() + 1e-6 * mag)
                        + sum_tolerance(c.k()) * mag * (eps > 1e-9) as u8 as f64,
                "{got} {want} {c:?} {i}"
            );
        }
    }
}

#[test]
fn other_element_types_follow_f64() {
    let mut rng = Rng::new();
    for isa in Isa::available() {
        check_rows::<f64>(&mut rng, isa, |x| x as f64, |x| x, 1e-10);
        check_rows::<f16>(&mut rng, isa, f16::from_f32, f16::to_f64, 6e-4);
        check_rows::<bf16>(&mut rng, isa, bf16::from_f32, bf16::to_f64, 5e-3);
    }
}

#[test]
fn groups_must_divide_channels() {
    let w = Window::new(&[4], &[1], &[1], &[1], &[(0, 0)], &[1]).unwrap();
    assert!(Conv::new(1, 6, 6, 4, w).is_err());
    assert!(Conv::new(1, 6, 6, 0, w).is_err());
}

/// The output is one column wide, so every column of a panel belongs to another output line.
#[test]
fn lines_of_one_column_follow_f64() {
    let mut rng = Rng::new();
    let team = Team::new(2);
    let window = Window::new(&[110, 3], &[3, 3], &[1, 1], &[1, 1], &[(1, 1), (0, 0)], &[1, 1]).unwrap();
    let c = Conv::new(1, 3, 20, 1, window).unwrap();
    let (x, w) = (rng.vec(c.input_len()), rng.vec(c.weight_len()));
    let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
    let want = reference(&c, &wide(&x), &wide(&w), None, false);
    for isa in Isa::available() {
        let mut y = vec![f32::NAN; c.output_len()];
        let operands = ConvOperands::new(x.as_ptr(), w.as_ptr(), y.as_mut_ptr());
        // SAFETY: the vectors hold the lengths that `c` states; `y` is separate memory.
        unsafe { conv_f32(&team, isa, &c, None, &operands) };
        for (i, (y, (want, mag))) in y.iter().zip(&want).enumerate() {
            close(*y, *want, *mag, sum_tolerance(c.k()), &(isa, i));
        }
    }
}

/// Convolutions like those of weight gradients: the kernel is about as large as the image, and there are few
/// outputs.
#[test]
fn few_positions_follow_f64_between_guard_pages() {
    let mut rng = Rng::new();
    for isa in Isa::available() {
        for round in 0..12 {
            let dims = 1 + rng.below(3);
            let list = |rng: &mut Rng, lo: usize, n: usize| -> Vec<usize> {
                (0..dims).map(|_| lo + rng.below(n)).collect()
            };
            let kernel = list(&mut rng, [90, 11, 6][dims - 1], [60, 8, 2][dims - 1]);
            let extra = list(&mut rng, 0, 3);
            let dilation: Vec<usize> = (0..dims).map(|_| if round % 3 == 0 { 2 } else { 1 }).collect();
            let input: Vec<usize> =
                kernel.iter().zip(&dilation).zip(&extra).map(|((k, d), e)| (k - 1) * d + 1 + e).collect();
            let pads: Vec<(isize, isize)> =
                (0..dims).map(|_| (rng.below(2) as isize, rng.below(2) as isize)).collect();
            let w = Window::new(&input, &kernel, &vec![1; dims], &dilation, &pads, &vec![1; dims]).unwrap();
            let c = Conv::new(8 + rng.below(5), 12 + rng.below(9), 8 + rng.below(30), 1, w).unwrap();
            if !c.has_few_positions() {
                continue;
            }
            let side = [Side::Start, Side::End][rng.below(2)];
            let (xs, ws) = (rng.vec(c.input_len()), rng.vec(c.weight_len()));
            let (x, f) = (Guarded::new(&xs, side), Guarded::new(&ws, side));
            let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
            let want = reference(&c, &wide(&xs), &wide(&ws), None, false);
            let mut first: Option<Vec<f32>> = None;
            for threads in [1, 3] {
                let y = Guarded::new(&vec![f32::NAN; c.output_len()], side);
                // SAFETY: the operands have the lengths of the convolution, and the output is apart from
                // them.
                unsafe {
                    let o = ConvOperands::new(x.ptr(), f.ptr(), y.mut_ptr());
                    conv_f32(&Team::new(threads), isa, &c, None, &o);
                }
                for (got, (want, size)) in y.slice().iter().zip(&want) {
                    close(*got, *want, *size, sum_tolerance(c.k()), &c);
                }
                let all = first.get_or_insert_with(|| y.slice().to_vec());
                assert_eq!(all, y.slice(), "{threads} threads change the results");
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let mut rng = Rng::new();
    let teams: Vec<Team> = [1, 2, 5].map(Team::new).into();
    for round in 0..60 {
        let c = random_conv(&mut rng, round % 5 == 0);
        let (x, w) = (rng.vec(c.input_len()), rng.vec(c.weight_len()));
        let runs: Vec<Vec<f32>> = teams
            .iter()
            .map(|t| {
                let mut y = vec![f32::NAN; c.output_len()];
                // SAFETY: the vectors hold the lengths that `c` states; `y` is separate memory.
                unsafe {
                    let operands = ConvOperands::new(x.as_ptr(), w.as_ptr(), y.as_mut_ptr());
                    conv_f32(t, Isa::best(), &c, None, &operands);
                }
                y
            })
            .collect();
        assert!(runs[0] == runs[1] && runs[0] == runs[2], "{c:?}");
    }
}

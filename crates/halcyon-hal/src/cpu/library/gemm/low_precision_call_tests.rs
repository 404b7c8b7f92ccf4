//! Low-precision products of bf16 and integers through library calls, with packed weights and epilogues,
//! against f64.

use super::matmul_where;
use super::product_bf16::Bf16Code;
use crate::cpu::library::testing::*;
use crate::cpu::library::{CpuKernel, Fault, Run};
use crate::cpu::memory::Ptr;
use crate::cpu::sys::Isa;
use crate::cpu::team::Team;
use crate::library_call::CallForm;
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out, Param};
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::{Epilogue, LibraryCall, LibraryKernel, MatmulPrecision, Operand, Work};
use halcyon_ir::{DType, Scalar, ScalarOp};
use half::{bf16, f16};
use std::sync::atomic::AtomicU32;

fn half(v: Vec<f32>) -> Vec<bf16> {
    v.into_iter().map(bf16::from_f32).collect()
}

fn at<T: Copy>(g: &Guarded<T>, write: bool) -> Ptr {
    Ptr { ptr: g.mut_ptr().cast(), bytes: size_of_val(g.slice()), read_only: !write }
}

fn run(kernel: &CpuKernel, team: &Team, bufs: &[Ptr]) {
    run_on(Isa::best(), kernel, team, bufs);
}

fn run_on(isa: Isa, kernel: &CpuKernel, team: &Team, bufs: &[Ptr]) {
    let word = AtomicU32::new(0);
    // SAFETY: the tests bind live memory that nothing else uses.
    unsafe { kernel.run(&Run { bufs, args: &[], team, isa, fault: Fault::new(&word, 1) }) }.unwrap();
}

/// Room for the packed right operand of a kernel; empty if the kernel packs nothing.
fn room_of(kernel: &CpuKernel) -> Guarded<f32> {
    Guarded::new(&vec![f32::NAN; kernel.packing().map_or(0, |p| p.bytes / 4)], Side::End)
}

/// The right operand that the kernel reads: `b` itself, or `b` packed in `room`.
fn packed_or_plain(kernel: &CpuKernel, team: &Team, b: Ptr, room: &Guarded<f32>) -> Ptr {
    if room.slice().is_empty() {
        return b;
    }
    // SAFETY: both are live vectors that nothing else uses.
    unsafe { kernel.pack(team, &b, &at(room, true)) }.unwrap();
    at(room, false)
}

/// The chain `(x + bias) * 0.5 + residual` on the product `x`, computed in f32 and stored as `out`. The
/// residual is f16 if the product is, else bf16.
fn chain(dims: &[usize], product: DType, out: DType) -> Fused {
    let f32_ = DType::F32;
    let b16 = if product == DType::F16 { DType::F16 } else { DType::BF16 };
    let load = |input, dtype, view: View| Load { input, dtype, view, fill: None };
    let n = *dims.last().unwrap();
    let bias = View::dense(&[n]).expand(dims);
    let mut body = vec![];
    let mut add = |kind, dtype, args: &[u32]| {
        body.push(Instr { kind, dtype, args: args.into() });
        body.len() as u32 - 1
    };
    let x = add(InstrKind::Load(0), product, &[]);
    let x = add(InstrKind::Cast, f32_, &[x]);
    let b = add(InstrKind::Load(1), f32_, &[]);
    let x = add(InstrKind::Op(ScalarOp::Add), f32_, &[x, b]);
    let s = add(InstrKind::Param(0), f32_, &[]);
    let x = add(InstrKind::Op(ScalarOp::Mul), f32_, &[x, s]);
    let r = add(InstrKind::Load(2), b16, &[]);
    let r = add(InstrKind::Cast, f32_, &[r]);
    let x = add(InstrKind::Op(ScalarOp::Add), f32_, &[x, r]);
    let value = add(InstrKind::Cast, out, &[x]);
    Fused {
        space: dims.into(),
        reduced: 0,
        loads: vec![
            load(0, product, View::dense(dims)),
            load(1, f32_, bias),
            load(2, b16, View::dense(dims)),
        ],
        params: vec![(f32_, Param::Literal(Scalar::F(0.5)))],
        body,
        outs: vec![Out { value, dtype: out, reduce: None, view: View::dense(dims) }],
    }
}

/// Batches, rows, columns, K, and whether all batches share one weight matrix.
const SHAPES: [(usize, usize, usize, usize, bool); 7] = [
    (1, 33, 70, 40, true),
    (1, 7, 300, 513, true),
    (2, 16, 48, 64, true),
    (3, 19, 37, 33, false),
    (1, 65, 31, 4200, true),
    (1, 2, 90, 50, true),
    (40, 20, 20, 20, false),
];

#[test]
fn chains_read_the_sums_of_bf16_products() {
    let mut rng = Rng::new();
    let (isa, side) = (Isa::best(), Side::End);
    for threads in [1, 2, 3] {
        let team = Team::new(threads);
        for code in [Bf16Code::Tiles, Bf16Code::Pairs, Bf16Code::Wide].into_iter().filter(|c| c.runs(isa)) {
            for (batch, m, n, k, shared) in SHAPES {
                for (out, packed) in
                    [(DType::BF16, None), (DType::F32, None), (DType::BF16, Some(1)), (DType::F32, Some(1))]
                {
                    let dims = [batch, m, n];
                    let weights = if shared { 1 } else { batch };
                    let a = Guarded::new(&half(rng.vec(batch * m * k)), side);
                    let b = Guarded::new(&half(rng.vec(weights * k * n)), side);
                    let bias = Guarded::new(&rng.vec(n), side);
                    let rest = Guarded::new(&half(rng.vec(batch * m * n)), side);
                    let f = chain(&dims, DType::BF16, out);
                    let view = View::dense(&[weights, k, n]).expand(&[batch, k, n]);
                    let inputs = [
                        Operand { dtype: DType::BF16, view: View::dense(&[batch, m, k]) },
                        Operand { dtype: DType::BF16, view },
                        Operand { dtype: DType::F32, view: View::dense(&[n]) },
                        Operand { dtype: DType::BF16, view: View::dense(&dims) },
                    ];
                    let output = [Operand { dtype: out, view: View::dense(&dims) }];
                    let (more, to) = (&inputs[2..], &output[0]);
                    let call = CallForm {
                        precision: MatmulPrecision::Medium,
                        own: 2,
                        packed,
                        epilogue: Some(Epilogue { fused: &f, product: 0, inputs: more, output: to }),
                        ..CallForm::plain(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &output))
                    };
                    let what = (code, threads, dims, k, out, packed);
                    let one = shared && batch * m > super::gemv::ROWS;
                    let kernel = match matmul_where(isa, &call, Some(code)) {
                        Err(d) => {
                            assert!(
                                packed.is_some() && !(one && code == Bf16Code::Tiles),
                                "{what:?}: {}",
                                d.reason
                            );
                            continue;
                        }
                        Ok(k) => k,
                    };
                    let room = room_of(&kernel);
                    assert_eq!(!room.slice().is_empty(), packed.is_some(), "{what:?}");
                    let second = packed_or_plain(&kernel, &team, at(&b, false), &room);
                    let y32 = Guarded::new(&vec![f32::NAN; batch * m * n], side);
                    let y16 = Guarded::new(&vec![bf16::NAN; batch * m * n], side);
                    let y = if out == DType::F32 { at(&y32, true) } else { at(&y16, true) };
                    run(&kernel, &team, &[at(&a, false), second, at(&bias, false), at(&rest, false), y]);
                    for i in 0..batch * m * n {
                        let (g, r, c) = (i / (m * n), i / n % m, i % n);
                        let (mut sum, mut mag) = (0f64, 1f64);
                        for q in 0..k {
                            let w = b.slice()[(g % weights * k + q) * n + c].to_f64();
                            let t = a.slice()[(g * m + r) * k + q].to_f64() * w;
                            (sum, mag) = (sum + t, mag + t.abs());
                        }
                        let want = (sum + f64::from(bias.slice()[c])) * 0.5 + rest.slice()[i].to_f64();
                        let (got, unit) = match out {
                            DType::F32 => (f64::from(y32.slice()[i]), 0.0),
                            _ => (y16.slice()[i].to_f64(), want.abs() / 256.0),
                        };
                        let most = unit + 2e-6 * mag;
                        assert!((got - want).abs() <= most, "{what:?} {i}: {got} for {want}");
                    }
                }
            }
        }
    }
}

/// Each product has a term of 4,096 that cancels against the last one, so a sum that is rounded to f16 before
/// the chain reads it is wrong by up to 1.
#[test]
fn chains_read_the_sums_of_f16_products() {
    let mut rng = Rng::new();
    let side = Side::End;
    let small = |rng: &mut Rng, n| rng.vec(n).into_iter().map(f16::from_f32).collect::<Vec<f16>>();
    for isa in Isa::available() {
        for threads in [1, 3] {
            let team = Team::new(threads);
            for (batch, m, n, k, shared) in SHAPES {
                let dims = [batch, m, n];
                let weights = if shared { 1 } else { batch };
                let (mut av, mut bv) = (small(&mut rng, batch * m * k), small(&mut rng, weights * k * n));
                let rest = Guarded::new(&small(&mut rng, batch * m * n), side);
                let bias = Guarded::new(&vec![-4096.0f32; n], side);
                av.iter_mut().step_by(k).for_each(|x| *x = f16::from_f32(64.0));
                let first_rows = bv.chunks_mut(k * n).flat_map(|w| &mut w[..n]);
                first_rows.for_each(|x| *x = f16::from_f32(64.0));
                let (a, b) = (Guarded::new(&av, side), Guarded::new(&bv, side));
                let f = chain(&dims, DType::F16, DType::F16);
                let view = View::dense(&[weights, k, n]).expand(&[batch, k, n]);
                let inputs = [
                    Operand { dtype: DType::F16, view: View::dense(&[batch, m, k]) },
                    Operand { dtype: DType::F16, view },
                    Operand { dtype: DType::F32, view: View::dense(&[n]) },
                    Operand { dtype: DType::F16, view: View::dense(&dims) },
                ];
                let output = [Operand { dtype: DType::F16, view: View::dense(&dims) }];
                let (more, to) = (&inputs[2..], &output[0]);
                let call = CallForm {
                    own: 2,
                    epilogue: Some(Epilogue { fused: &f, product: 0, inputs: more, output: to }),
                    ..CallForm::plain(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &output))
                };
                let kernel = matmul_where(isa, &call, None).map_err(|d| d.reason).unwrap();
                // Work of f16 reads the rounded product, so it is no epilogue.
                let mut narrow = f.clone();
                narrow.body[3].args[0] = 0;
                let e = Epilogue { fused: &narrow, product: 0, inputs: more, output: to };
                let refused = matmul_where(isa, &CallForm { epilogue: Some(e), ..call }, None);
                assert!(refused.is_err_and(|d| d.reason.contains("without widening")));
                let y = Guarded::new(&vec![f16::NAN; batch * m * n], side);
                let operands =
                    [at(&a, false), at(&b, false), at(&bias, false), at(&rest, false), at(&y, true)];
                run_on(isa, &kernel, &team, &operands);
                for i in 0..batch * m * n {
                    let (g, r, c) = (i / (m * n), i / n % m, i % n);
                    let term = |q: usize| {
                        av[(g * m + r) * k + q].to_f64() * bv[(g % weights * k + q) * n + c].to_f64()
                    };
                    let sum: f64 = (1..k).map(term).sum();
                    let want = sum * 0.5 + rest.slice()[i].to_f64();
                    let got = y.slice()[i].to_f64();
                    // Half a unit of f16, and the rounding of f32 sums of about 4,096.
                    let most = want.abs() / 2048.0 + 1e-3 * (k as f64).sqrt();
                    assert!(
                        (got - want).abs() <= most,
                        "{isa:?} {threads} {dims:?} {k} {i}: {got} for {want}"
                    );
                }
            }
        }
    }
}

/// The sums of integers are exact, so results differ from f64 only by the rounding of the chain.
#[test]
fn chains_read_the_sums_of_integer_products() {
    let mut rng = Rng::new();
    let side = Side::End;
    for isa in Isa::available() {
        for threads in [1, 3] {
            let team = Team::new(threads);
            for (batch, m, n, k, shared) in SHAPES {
                for (d, packed) in
                    [(DType::I16, None), (DType::I16, Some(1)), (DType::I8, None), (DType::I8, Some(1))]
                {
                    // VNNI's products of bytes support no epilogue, and products of 16-bit integers need
                    // AVX2.
                    if d == DType::I8 && isa.has_vnni() || d == DType::I16 && isa == Isa::Portable {
                        continue;
                    }
                    let dims = [batch, m, n];
                    let weights = if shared { 1 } else { batch };
                    let limit = if d == DType::I8 { 127.0 } else { 700.0 };
                    let mut codes = |len: usize| -> Vec<i16> {
                        rng.vec(len).into_iter().map(|v| (v * limit) as i16).collect()
                    };
                    let (a, b) = (codes(batch * m * k), codes(weights * k * n));
                    let narrow = |v: &[i16]| v.iter().map(|v| *v as i8).collect::<Vec<_>>();
                    let (a8, b8) = (Guarded::new(&narrow(&a), side), Guarded::new(&narrow(&b), side));
                    let (a16, b16) = (Guarded::new(&a, side), Guarded::new(&b, side));
                    let [pa, pb] = match d {
                        DType::I8 => [at(&a8, false), at(&b8, false)],
                        _ => [at(&a16, false), at(&b16, false)],
                    };
                    let bias = Guarded::new(&rng.vec(n), side);
                    let rest = Guarded::new(&half(rng.vec(batch * m * n)), side);
                    let f = chain(&dims, DType::I32, DType::F32);
                    let view = View::dense(&[weights, k, n]).expand(&[batch, k, n]);
                    let inputs = [
                        Operand { dtype: d, view: View::dense(&[batch, m, k]) },
                        Operand { dtype: d, view },
                        Operand { dtype: DType::F32, view: View::dense(&[n]) },
                        Operand { dtype: DType::BF16, view: View::dense(&dims) },
                    ];
                    let output = [Operand { dtype: DType::F32, view: View::dense(&dims) }];
                    let (more, to) = (&inputs[2..], &output[0]);
                    let call = CallForm {
                        own: 2,
                        packed,
                        epilogue: Some(Epilogue { fused: &f, product: 0, inputs: more, output: to }),
                        ..CallForm::plain(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &output))
                    };
                    let what = (isa, threads, dims, k, d, packed);
                    let kernel = match matmul_where(isa, &call, None) {
                        Err(e) => {
                            assert!(packed.is_some() && !shared, "{what:?}: {}", e.reason);
                            continue;
                        }
                        Ok(k) => k,
                    };
                    let room = room_of(&kernel);
                    assert_eq!(!room.slice().is_empty(), packed.is_some(), "{what:?}");
                    let second = packed_or_plain(&kernel, &team, pb, &room);
                    let y = Guarded::new(&vec![f32::NAN; batch * m * n], side);
                    run(&kernel, &team, &[pa, second, at(&bias, false), at(&rest, false), at(&y, true)]);
                    for i in 0..batch * m * n {
                        let (g, r, c) = (i / (m * n), i / n % m, i % n);
                        let term = |q: usize| {
                            i64::from(a[(g * m + r) * k + q]) * i64::from(b[(g % weights * k + q) * n + c])
                        };
                        let sum = (0..k).map(term).sum::<i64>() as f64;
                        let want = (sum + f64::from(bias.slice()[c])) * 0.5 + rest.slice()[i].to_f64();
                        let got = f64::from(y.slice()[i]);
                        assert!(
                            (got - want).abs() <= 4e-7 * (sum.abs() + 2.0),
                            "{what:?} {i}: {got} for {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn packed_bytes_give_the_same_products() {
    let isa = Isa::best();
    if !isa.has_int8_tiles() {
        println!("skipped: no AMX-INT8 for this process");
        return;
    }
    let mut rng = Rng::new();
    let team = Team::new(2);
    for (m, n, k) in [(33, 70, 40), (1, 300, 513), (65, 31, 129), (40, 8, 64)] {
        let a = Guarded::new(&(0..m * k).map(|_| rng.bits() as u8).collect::<Vec<_>>(), Side::End);
        let b = Guarded::new(&(0..k * n).map(|_| rng.bits() as i8).collect::<Vec<_>>(), Side::End);
        let inputs = [
            Operand { dtype: DType::U8, view: View::dense(&[m, k]) },
            // The transpose of the stored matrix.
            Operand { dtype: DType::I8, view: View::dense(&[n, k]).permute(&[1, 0]) },
        ];
        let output = [Operand { dtype: DType::I32, view: View::dense(&[m, n]) }];
        let plain = LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &output);
        let call = CallForm { packed: Some(1), ..CallForm::plain(&plain) };
        let kernel = matmul_where(isa, &call, None).unwrap();
        let room = Guarded::new(&vec![f32::NAN; kernel.packing().unwrap().bytes / 4], Side::End);
        // SAFETY: both are live vectors that nothing else uses.
        unsafe { kernel.pack(&team, &at(&b, false), &at(&room, true)) }.unwrap();
        let y = Guarded::new(&vec![7i32; m * n], Side::End);
        run(&kernel, &team, &[at(&a, false), at(&room, false), at(&y, true)]);
        for i in 0..m * n {
            let term = |q: usize| i32::from(a.slice()[i / n * k + q]) * i32::from(b.slice()[i % n * k + q]);
            assert_eq!(y.slice()[i], (0..k).map(term).sum::<i32>(), "{m} {n} {k} {i}");
        }
    }
}

//! Tests of the chains of quantisation against a scalar evaluation.

use super::tests::{Rng, device, execute, instr, load, operand, out, pack, reference, unpack};
use crate::Target;
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Param};
use halcyon_ir::layout::View;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::target::{LibraryCall, Work};
use halcyon_ir::{DType, Scalar, ScalarOp};

const F: DType = DType::F32;

fn op(o: ScalarOp, args: &[u32]) -> Instr {
    instr(InstrKind::Op(o), F, args)
}

fn floats(v: impl IntoIterator<Item = f32>) -> Vec<Scalar> {
    v.into_iter().map(|x| Scalar::F(f64::from(x))).collect()
}

/// Numbers with ties, and now and then a zero, an infinity, NaN or a denormal.
fn numbers(rng: &mut Rng, n: usize) -> Vec<Scalar> {
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-41, f32::MAX];
    floats((0..n).map(|_| match rng.below(40) {
        0 => special[rng.below(special.len())],
        1..4 => (rng.below(9) as f32 - 4.0) * 0.5,
        _ => ((rng.unit() - 0.5) * 20.0) as f32,
    }))
}

/// The name of the kernel that the CPU device chooses.
fn name_of(f: &Fused, sizes: &[(DType, usize)], result: usize) -> String {
    let ins: Vec<_> = sizes.iter().map(|(d, n)| operand(*d, *n)).collect();
    let outs = [operand(f.outs[0].dtype, result)];
    let call = LibraryCall::new(Work::Fused(f), &ins, &outs);
    device(1).library(&call).expect("a kernel").name().to_string()
}

/// `cast(min(max(round(x / max(s * 0.01, 1e-30)), low), high))` over `space`, with `s` read through `scale`.
fn codes(space: &[usize], scale: View, to: DType, limit: Option<(f64, f64)>) -> Fused {
    let mut params = vec![0.01, 1e-30];
    params.extend(limit.map(|l| [l.0, l.1]).into_iter().flatten());
    let mut body = vec![
        instr(InstrKind::Load(0), F, &[]),
        instr(InstrKind::Load(1), F, &[]),
        instr(InstrKind::Param(0), F, &[]),
        instr(InstrKind::Param(1), F, &[]),
        op(ScalarOp::Mul, &[1, 2]),
        op(ScalarOp::Max, &[4, 3]),
        op(ScalarOp::Div, &[0, 5]),
        op(ScalarOp::Round, &[6]),
    ];
    if limit.is_some() {
        body.push(instr(InstrKind::Param(2), F, &[]));
        body.push(instr(InstrKind::Param(3), F, &[]));
        body.push(op(ScalarOp::Max, &[7, 8]));
        body.push(op(ScalarOp::Min, &[9, 10]));
    }
    let last = body.len() as u32 - 1;
    body.push(instr(InstrKind::Cast, to, &[last]));
    Fused {
        space: space.into(),
        reduced: 0,
        loads: vec![load(0, F, View::dense(space)), load(1, F, scale)],
        params: params.into_iter().map(|p| (F, Param::Literal(Scalar::F(p)))).collect(),
        outs: vec![out(last + 1, to, space, None)],
        body,
    }
}

fn per_row(rows: usize, cols: usize) -> View {
    View::dense(&[rows, 1]).expand(&[rows, cols])
}

#[test]
fn codes_are_those_of_the_chain() {
    let mut rng = Rng(71);
    let cases = [(1, 16), (3, 17), (65, 40), (130, 129), (2, 9000), (200, 384)];
    for (rows, cols) in cases {
        for (to, limit) in [
            (DType::I8, None),
            (DType::U8, None),
            (DType::I16, Some((-8192.0, 8192.0))),
            (DType::I16, Some((-1e9, 1e9))),
            (DType::U16, Some((3.0, 70.0))),
        ] {
            for scale in [per_row(rows, cols), View::dense(&[1, 1]).expand(&[rows, cols])] {
                let n = if scale.strides[0] == 0 { 1 } else { rows };
                let f = codes(&[rows, cols], scale, to, limit);
                let inputs = [numbers(&mut rng, rows * cols), numbers(&mut rng, n)];
                assert_eq!(name_of(&f, &[(F, rows * cols), (F, n)], rows * cols), "cpu.quantize");
                let want = reference(&f, &inputs, &[], &[rows * cols]);
                for threads in [1, 3] {
                    let got = execute(&device(threads), &f, &inputs, &[], &[rows * cols]).expect("it runs");
                    let got = unpack(to, &got[0]);
                    let bad = (0..got.len()).find(|&i| got[i] != want[0][i]);
                    let pair = bad.map(|i| (i, got[i], want[0][i]));
                    assert_eq!(pair, None, "{rows}x{cols} {to} {limit:?}");
                }
            }
        }
    }
}

/// Similar chains run on the general executor, with correct results.
#[test]
fn similar_chains_are_not_taken() {
    let mut rng = Rng(5);
    let (rows, cols) = (8, 32);
    let (good, n) = (codes(&[rows, cols], per_row(rows, cols), DType::I16, Some((-9.0, 9.0))), rows * cols);
    let changed = |change: &dyn Fn(&mut Fused)| {
        let mut f = good.clone();
        change(&mut f);
        f
    };
    let chains = [
        // Limits that form no interval, that are not integers, or that are NaN.
        changed(&|f| f.params[2].1 = Param::Literal(Scalar::F(12.0))),
        changed(&|f| f.params[3].1 = Param::Literal(Scalar::F(8.5))),
        changed(&|f| f.params[3].1 = Param::Literal(Scalar::F(f64::NAN))),
        // A chain that does not round to nearest.
        changed(&|f| f.body[7] = op(ScalarOp::Floor, &[6])),
        // A scale for each column.
        changed(&|f| f.loads[1].view = View::dense(&[1, cols]).expand(&[rows, cols])),
        // Columns of a transposed matrix.
        changed(&|f| f.loads[0].view = View::dense(&[cols, rows]).permute(&[1, 0])),
    ];
    for f in &chains {
        let sizes = [n, if f.loads[1].view.strides[0] == 0 { cols } else { rows }];
        let inputs = sizes.map(|n| numbers(&mut rng, n));
        assert_ne!(name_of(f, &[(F, sizes[0]), (F, sizes[1])], n), "cpu.quantize", "{f:?}");
        let got = execute(&device(1), f, &inputs, &[], &[n]).expect("it runs");
        assert_eq!(unpack(DType::I16, &got[0]), reference(f, &inputs, &[], &[n])[0], "{f:?}");
    }
}

/// Chains that lowering never builds are declined before they are compared with those of quantisation.
#[test]
fn malformed_chains_are_declined() {
    let (rows, cols) = (8, 32);
    let good = codes(&[rows, cols], per_row(rows, cols), DType::I16, Some((-9.0, 9.0)));
    let inputs = [floats(vec![1.0; rows * cols]), floats(vec![1.0; rows])];
    let bad: [&dyn Fn(&mut Fused); 6] = [
        // Instructions that use themselves, a later one, and one that does not exist.
        &|f| f.body[10].args[0] = 10,
        &|f| f.body[10].args[0] = 11,
        &|f| f.body[6].args[1] = 99,
        // Too few operands, operands of another type, and no operand.
        &|f| f.body[5].args.truncate(1),
        &|f| f.body[4] = op(ScalarOp::Select, &[1, 2, 3]),
        &|f| f.body[12].args.clear(),
    ];
    for (i, change) in bad.iter().enumerate() {
        let mut f = good.clone();
        change(&mut f);
        assert!(execute(&device(1), &f, &inputs, &[], &[rows * cols]).is_err(), "{i}");
    }
}

#[test]
fn magnitudes_are_those_of_the_chain() {
    let mut rng = Rng(9);
    for (rows, cols) in [(32, 16), (33, 31), (100, 384), (40, 5000)] {
        let loads: Vec<Load> = vec![load(0, F, View::dense(&[rows, cols]))];
        let f = Fused {
            space: [rows, cols].as_slice().into(),
            reduced: 1,
            loads,
            params: vec![],
            body: vec![instr(InstrKind::Load(0), F, &[]), op(ScalarOp::Abs, &[0])],
            outs: vec![out(1, F, &[rows], Some(ReduceKind::Max))],
        };
        assert_eq!(name_of(&f, &[(F, rows * cols)], rows), "cpu.magnitude");
        let inputs = [numbers(&mut rng, rows * cols)];
        // Some rows have no NaN and no infinity.
        let mut plain = inputs.clone();
        plain[0].iter_mut().filter(|v| !v.as_f64().is_finite()).for_each(|v| *v = Scalar::F(0.5));
        for inputs in [inputs, plain] {
            let got = execute(&device(2), &f, &inputs, &[], &[rows]).expect("it runs");
            let want = pack(F, &reference(&f, &inputs, &[], &[rows])[0]);
            for (g, w) in got[0].chunks(4).zip(want.chunks(4)) {
                let [g, w] = [g, w].map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
                assert!(g == w || g.is_nan() && w.is_nan(), "{rows}x{cols}: {g} {w}");
            }
        }
    }
}

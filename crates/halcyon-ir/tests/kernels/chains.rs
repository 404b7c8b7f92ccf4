//! Runs fused kernels in the interpreter, with several subgroup sizes, work-items in random order and
//! poisoned outputs, and compares the results with an evaluation of the instructions at every point.

use crate::tensor::*;
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out, Param};
use halcyon_ir::kernel::interp::{Options, run};
use halcyon_ir::kernel::lower::{
    fused_choices, fused_param, lower_fused, lower_fused_as, reduction_in_parts,
};
use halcyon_ir::kernel::{BufId, Kernel, Launch};
use halcyon_ir::layout::View;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::target::Caps;
use halcyon_ir::{DType, Scalar, ScalarOp};

fn instr(kind: InstrKind, dtype: DType, args: &[u32]) -> Instr {
    Instr { kind, dtype, args: args.iter().copied().collect() }
}

/// Evaluates one point by the ops' definitions, in f64 or exact integers.
fn point(f: &Fused, x: &[Tensor], args: &[Scalar], idx: &[usize]) -> Vec<Scalar> {
    let mut v: Vec<Scalar> = vec![];
    for i in &f.body {
        let a = |k: usize| v[i.args[k] as usize];
        let d = || f.body[i.args[i.args.len() - 1] as usize].dtype;
        let r = match i.kind {
            InstrKind::Load(l) => {
                let l = &f.loads[l as usize];
                match l.view.at(idx) {
                    Some(at) => Scalar::from_bytes(
                        l.dtype,
                        &x[l.input as usize].bytes[at as usize * l.dtype.size()..],
                    ),
                    None => args[l.fill.unwrap() as usize],
                }
            }
            InstrKind::Iota(k) => Scalar::from(idx[k as usize]).cast(i.dtype),
            InstrKind::Param(p) => args[p as usize],
            InstrKind::Op(op) => {
                let all: Vec<Scalar> = (0..i.args.len()).map(a).collect();
                op.eval(d(), &all)
            }
            InstrKind::Cast => a(0).cast(i.dtype),
            InstrKind::Bitcast => Scalar::from_bytes(i.dtype, &a(0).to_bytes(d())),
        };
        v.push(r);
    }
    v
}

fn check_fused(f: &Fused, x: &[Tensor], caps: &Caps, tolerance: f64) -> Kernel {
    let (k, l) = lower_fused(f, caps).unwrap();
    check_kernel(&k, l, f, x, &[1, 4, 32, 64], tolerance);
    // All variants that tuning may choose give the same results.
    for (i, v) in fused_choices(f, caps).others.iter().enumerate() {
        let (k, l) = lower_fused_as(f, caps, v).unwrap();
        check_kernel(&k, l, f, x, &[[1, 4, 32, 64][i % 4]], tolerance);
    }
    k
}

fn check_kernel(k: &Kernel, l: Launch, f: &Fused, x: &[Tensor], subgroups: &[u32], tolerance: f64) {
    let args: Vec<Scalar> = f
        .params
        .iter()
        .map(|(d, p)| match p {
            Param::Literal(s) => s.cast(*d),
            Param::Arg(_) => Scalar::F(1.5).cast(*d),
        })
        .collect();
    // Fill in the run-time arguments, as the run of a plan does.
    let mut l: Launch = l;
    for i in 0..k.params.len() {
        if let Some(p) = fused_param(k, i)
            && let Param::Arg(_) = f.params[p].1
        {
            l.params[i] = args[p];
        }
    }
    let inner = indices(f.inner());
    for &subgroup in subgroups {
        let mut mem: Vec<Vec<u8>> = x.iter().map(|t| t.bytes.clone()).collect();
        let poisoned = (0..f.outs.len()).map(|i| BufId((x.len() + i) as u32)).collect();
        for o in &f.outs {
            let n = o.view.range().map_or(0, |r| r.1 as usize + 1);
            mem.push(vec![0; n * o.dtype.size()]);
        }
        let o =
            Options { subgroup, seed: Some(subgroup as u64), sanitize: true, poisoned, ..Options::default() };
        let r = run(k, &l, &mut mem, &o).unwrap();
        assert!(r.reports.is_empty(), "{}", r.reports[0]);
        for (n, o) in f.outs.iter().enumerate() {
            let d = f.body[o.value as usize].dtype;
            let (mut got, mut want) = (vec![], vec![]);
            for idx in indices(f.outer()) {
                let mut acc = o.reduce.map(|r| r.identity(d));
                for r in &inner {
                    let v = point(f, x, &args, &[idx.clone(), r.clone()].concat())[o.value as usize];
                    acc = Some(match (acc, o.reduce) {
                        (Some(a), Some(kind)) => {
                            let c = if d.is_float() { DType::F64 } else { d };
                            kind.op(d).eval(c, &[a.cast(c), v.cast(c)])
                        }
                        _ => v,
                    });
                }
                want.push(acc.unwrap().cast(o.dtype).as_f64());
                let at = o.view.at(&idx).unwrap() as usize * o.dtype.size();
                got.push(Scalar::from_bytes(o.dtype, &mem[x.len() + n][at..]).as_f64());
            }
            close(&k.name, &got, &want, o.dtype, tolerance);
        }
    }
}

#[test]
fn fused_chains() {
    let mut g = Rng(9);
    let types = FLOATS.into_iter().enumerate();
    // The second size lets work-items process several neighbours.
    for ((n, d), last) in types.flat_map(|t| [(t, 5), (t, 16)]) {
        let shape = [3, 4, last];
        // silu(x) * w + b, with broadcast w, and b transposed, masked and with a fill value.
        let x = Tensor::random(d, &shape, n, &mut g);
        let w = Tensor::random(d, &[last], 0, &mut g);
        let b = Tensor::random(d, &[2, 4, last], 1, &mut g);
        let load = |i: u32, v: View, fill| Load { input: i, dtype: d, view: v, fill };
        let f = Fused {
            space: shape.as_slice().into(),
            reduced: 0,
            loads: vec![
                load(0, x.operand.view.clone(), None),
                load(1, w.operand.view.expand(&shape), None),
                load(2, b.operand.view.pad(&[1, 0, 0], &[0, 0, 0]), Some(1)),
            ],
            params: vec![(d, Param::Arg(0)), (d, Param::Literal(Scalar::F(0.125)))],
            body: vec![
                instr(InstrKind::Load(0), d, &[]),
                instr(InstrKind::Load(1), d, &[]),
                instr(InstrKind::Load(2), d, &[]),
                instr(InstrKind::Op(ScalarOp::Silu), d, &[0]),
                instr(InstrKind::Op(ScalarOp::Mul), d, &[3, 1]),
                instr(InstrKind::Op(ScalarOp::Add), d, &[4, 2]),
                instr(InstrKind::Param(0), d, &[]),
                instr(InstrKind::Op(ScalarOp::Mul), d, &[5, 6]),
                instr(InstrKind::Op(ScalarOp::Lt), DType::Bool, &[7, 0]),
            ],
            outs: vec![
                Out { value: 7, dtype: d, reduce: None, view: View::dense(&shape) },
                Out {
                    value: 8,
                    dtype: DType::Bool,
                    reduce: None,
                    view: View::dense(&shape).permute(&[0, 1, 2]),
                },
            ],
        };
        let k = if matches!(d, DType::F32 | DType::F64) {
            check_fused(&f, &[x, w, b], &caps(), 4.0)
        } else {
            // 16-bit types stay in f32 between instructions, so only the float result is compared.
            let f = Fused { outs: f.outs[..1].to_vec(), ..f };
            check_fused(&f, &[x, w, b], &caps(), 4.0)
        };
        let vector = last == 16 && d != DType::F64;
        assert_eq!(k.name, if vector { "chain_vector" } else { "chain" }, "{d} {last}");
    }
}

/// Neighbouring elements are read and written as vectors and words if they are all aligned and contiguous,
/// and one by one otherwise.
#[test]
fn neighbours_in_runs() {
    let mut g = Rng(21);
    let all = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::U16,
        DType::F16,
        DType::BF16,
        DType::I32,
        DType::F32,
    ];
    for (n, d) in all.into_iter().enumerate() {
        for (shape, vector) in [([6, 32], true), ([5, 24], true), ([3, 4], true), ([4, 6], false)] {
            // The operands: one dense, one part of a larger tensor, one transposed; then a row and a column.
            let x: Vec<Tensor> = [0, 2, 1].iter().map(|l| Tensor::random(d, &shape, *l, &mut g)).collect();
            let row = Tensor::random(DType::F32, &[shape[1]], 0, &mut g);
            let column = Tensor::random(DType::F32, &[shape[0], 1], 0, &mut g);
            let mut loads: Vec<Load> = (0..3)
                .map(|i| Load { input: i, dtype: d, view: x[i as usize].operand.view.clone(), fill: None })
                .collect();
            for (i, t) in [&row, &column].into_iter().enumerate() {
                let view = t.operand.view.expand(&shape);
                loads.push(Load { input: 3 + i as u32, dtype: DType::F32, view, fill: None });
            }
            let mut body: Vec<Instr> =
                (0..5).map(|i| instr(InstrKind::Load(i), if i < 3 { d } else { DType::F32 }, &[])).collect();
            body.extend((0..3).map(|i| instr(InstrKind::Cast, DType::F32, &[i])));
            body.push(instr(InstrKind::Iota(1), DType::F32, &[]));
            body.extend(
                [(5, 6), (9, 7), (10, 3), (11, 4), (12, 8)]
                    .map(|(a, b)| instr(InstrKind::Op(ScalarOp::Add), DType::F32, &[a, b])),
            );
            let out = |value, dtype| Out { value, dtype, reduce: None, view: View::dense(&shape) };
            let f = Fused {
                space: shape.as_slice().into(),
                reduced: 0,
                loads,
                params: vec![],
                body,
                outs: vec![out(0, d), out(13, DType::F32)],
            };
            let tensors: Vec<Tensor> = x.into_iter().chain([row, column]).collect();
            let k = check_fused(&f, &tensors, &caps(), 4.0 + n as f64);
            assert_eq!(k.name, if vector { "chain_vector" } else { "chain" }, "{d} {shape:?}");
            let cpu = Caps { is_cpu: true, ..caps() };
            assert_eq!(lower_fused(&f, &cpu).unwrap().0.name, "chain");
        }
    }
}

#[test]
fn fused_integers_wrap() {
    let mut g = Rng(10);
    for d in [DType::U8, DType::I8, DType::U16, DType::I16, DType::I32, DType::U32, DType::I64, DType::U64] {
        let x = Tensor::new(d, &[40], 0, |_| g.below(250) as f64);
        let y = Tensor::new(d, &[40], 2, |_| g.below(250) as f64 + 1.0);
        let load = |i: u32, t: &Tensor| Load { input: i, dtype: d, view: t.operand.view.clone(), fill: None };
        let mut body = vec![instr(InstrKind::Load(0), d, &[]), instr(InstrKind::Load(1), d, &[])];
        for op in [
            ScalarOp::Mul,
            ScalarOp::Mul,
            ScalarOp::Sub,
            ScalarOp::Div,
            ScalarOp::Add,
            ScalarOp::Mod,
            ScalarOp::Max,
        ] {
            let last = body.len() as u32 - 1;
            body.push(instr(InstrKind::Op(op), d, &[last, last % 3]));
        }
        let last = body.len() as u32 - 1;
        body.push(instr(InstrKind::Cast, DType::F32, &[last]));
        body.push(instr(InstrKind::Iota(0), DType::F32, &[]));
        body.push(instr(InstrKind::Op(ScalarOp::Add), DType::F32, &[last + 1, last + 2]));
        let f = Fused {
            space: [40].as_slice().into(),
            reduced: 0,
            loads: vec![load(0, &x), load(1, &y)],
            params: vec![],
            body,
            outs: vec![
                Out { value: last, dtype: d, reduce: None, view: View::dense(&[40]) },
                Out { value: last + 3, dtype: DType::F32, reduce: None, view: View::dense(&[40]) },
            ],
        };
        check_fused(&f, &[x, y], &caps(), 1.0);
    }
}

#[test]
fn fused_reductions() {
    let mut g = Rng(11);
    for (n, d) in [DType::F32, DType::F64, DType::BF16, DType::I32, DType::U8].into_iter().enumerate() {
        // One result from rank 1; a long inner axis; a short one; two inner axes with an outer one; an empty
        // axis.
        for (shape, reduced) in
            [(vec![300], 1), (vec![5, 200], 1), (vec![9, 3], 1), (vec![2, 6, 7], 2), (vec![3, 0], 1)]
        {
            let x = Tensor::random(d, &shape, n, &mut g);
            let outer = &shape[..shape.len() - reduced];
            let f = Fused {
                space: shape.as_slice().into(),
                reduced,
                loads: vec![Load { input: 0, dtype: d, view: x.operand.view.clone(), fill: None }],
                params: vec![],
                body: vec![
                    instr(InstrKind::Load(0), d, &[]),
                    instr(InstrKind::Op(ScalarOp::Mul), d, &[0, 0]),
                ],
                outs: [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min]
                    .map(|k| Out { value: 1, dtype: d, reduce: Some(k), view: View::dense(outer) })
                    .to_vec(),
            };
            check_fused(&f, std::slice::from_ref(&x), &caps(), 3.0);
            check_fused(&f, &[x], &Caps { is_cpu: true, ..caps() }, 3.0);
        }
    }
}

/// Reductions along the last axis read contiguous neighbours together, in rows, in parts of rows and in a
/// broadcast row. They read a broadcast column once for all neighbours, and transposed operands one by one.
#[test]
fn reductions_in_runs() {
    let mut g = Rng(12);
    for (n, d) in [DType::F32, DType::F16, DType::BF16, DType::U8, DType::I16].into_iter().enumerate() {
        for (shape, reduced, vector) in [
            (vec![5, 272], 1, true),
            (vec![1024], 1, true),
            (vec![3, 6, 48], 2, true),
            (vec![2, 36], 1, true),
            (vec![4, 75], 1, false),
        ] {
            let rank = shape.len();
            let x: Vec<Tensor> = [0, 2, 1].iter().map(|l| Tensor::random(d, &shape, *l, &mut g)).collect();
            let row = Tensor::random(d, &shape[rank - 1..], 0, &mut g);
            let one = Tensor::random(d, &[&shape[..rank - 1], &[1]].concat(), 0, &mut g);
            let tensors: Vec<Tensor> = x.into_iter().chain([row, one]).collect();
            let view = |t: &Tensor| t.operand.view.expand(&shape);
            let load =
                |(i, t): (usize, &Tensor)| Load { input: i as u32, dtype: d, view: view(t), fill: None };
            let mut body: Vec<Instr> = (0..5).map(|i| instr(InstrKind::Load(i), d, &[])).collect();
            body.extend((0..5).map(|i| instr(InstrKind::Cast, DType::F32, &[i])));
            body.push(instr(InstrKind::Iota(rank as u32 - 1), DType::F32, &[]));
            body.extend(
                [(5, 6), (11, 7), (12, 8), (13, 9), (14, 10)]
                    .map(|(a, b)| instr(InstrKind::Op(ScalarOp::Add), DType::F32, &[a, b])),
            );
            let outer = &shape[..rank - reduced];
            let out = |k| Out { value: 15, dtype: DType::F32, reduce: Some(k), view: View::dense(outer) };
            let f = Fused {
                space: shape.as_slice().into(),
                reduced,
                loads: tensors.iter().enumerate().map(load).collect(),
                params: vec![],
                body,
                outs: [ReduceKind::Sum, ReduceKind::Max].map(out).to_vec(),
            };
            let k = check_fused(&f, &tensors, &caps(), 4.0 + n as f64);
            let name = if vector { "chain_reduce_vector" } else { "chain_reduce_group" };
            assert_eq!(k.name, name, "{d} {shape:?}");
        }
    }
}

/// Long reductions with few results are done in parts. The partial results have the type of the sums.
#[test]
fn long_reductions_in_parts() {
    let mut g = Rng(13);
    let wide = Caps { compute_units: Some(8), ..caps() };
    for (shape, reduced, parts) in [
        (vec![49_152], 1, Some(12)),
        (vec![3, 20_000], 1, Some(2)),
        (vec![2, 7, 3000], 2, Some(5)),
        // A reduction of a prime length, a short reduction, and a reduction with enough results are not
        // split.
        (vec![10_007], 1, None),
        (vec![8000], 1, None),
        (vec![16, 20_000], 1, None),
    ] {
        for (d, value) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::U8, DType::U32)] {
            // The elements are multiples of 1/8, or integers. All types represent them, and their sums are
            // exact.
            let step = if d.is_float() { 0.125 } else { 1.0 };
            let x = Tensor::new(d, &shape, 0, |_| g.below(32) as f64 * step);
            let outer = &shape[..shape.len() - reduced];
            for kind in [ReduceKind::Sum, ReduceKind::Max] {
                let f = Fused {
                    space: shape.as_slice().into(),
                    reduced,
                    loads: vec![Load { input: 0, dtype: d, view: x.operand.view.clone(), fill: None }],
                    params: vec![],
                    body: vec![instr(InstrKind::Load(0), d, &[])],
                    outs: vec![Out { value: 0, dtype: d, reduce: Some(kind), view: View::dense(outer) }],
                };
                let two = reduction_in_parts(&f, &wide);
                assert_eq!(two.as_ref().map(|[_, last]| *last.space.last().unwrap()), parts, "{shape:?}");
                assert!(reduction_in_parts(&f, &Caps { is_cpu: true, ..wide.clone() }).is_none());
                let Some([first, last]) = two else { continue };
                assert_eq!((first.outs[0].dtype, last.outs[0].dtype), (value, d));
                let mut bytes = x.bytes.clone();
                for f in [&first, &last] {
                    let (k, l) = lower_fused(f, &wide).unwrap();
                    let o = &f.outs[0];
                    let mut all = vec![bytes, vec![0xCD; o.dtype.bytes(o.view.numel())]];
                    let options = Options { sanitize: true, poisoned: vec![BufId(1)], ..Options::default() };
                    let r = run(&k, &l, &mut all, &options).unwrap();
                    assert!(r.reports.is_empty(), "{}", r.reports[0]);
                    bytes = all.pop().unwrap();
                }
                let n = x.values.len() / outer.iter().product::<usize>();
                let want: Vec<Scalar> = x
                    .values
                    .chunks(n)
                    .map(|row| match kind {
                        ReduceKind::Sum if d == DType::U8 => row.iter().sum::<f64>() % 256.0,
                        ReduceKind::Sum => row.iter().sum(),
                        _ => row.iter().fold(0.0, |m, v| f64::max(m, *v)),
                    })
                    .map(|v| Scalar::F(v).cast(d))
                    .collect();
                let got: Vec<Scalar> = bytes.chunks(d.size()).map(|b| Scalar::from_bytes(d, b)).collect();
                assert_eq!(got, want, "{d} {shape:?} {kind:?}");
            }
        }
    }
}

#[test]
fn bit_casts() {
    let pairs = [
        (DType::F32, DType::I32),
        (DType::U32, DType::F32),
        (DType::F64, DType::U64),
        (DType::BF16, DType::U16),
        (DType::I16, DType::BF16),
        (DType::U8, DType::I8),
        (DType::I32, DType::U32),
    ];
    for (a, b) in pairs {
        let x = Tensor::new(a, &[20], 0, |i| {
            i as f64 * 7.0 - if a.class() == halcyon_ir::dtype::Class::Uint { 0.0 } else { 60.0 }
        });
        let f = Fused {
            space: [20].as_slice().into(),
            reduced: 0,
            loads: vec![Load { input: 0, dtype: a, view: x.operand.view.clone(), fill: None }],
            params: vec![],
            body: vec![instr(InstrKind::Load(0), a, &[]), instr(InstrKind::Bitcast, b, &[0])],
            outs: vec![Out { value: 1, dtype: b, reduce: None, view: View::dense(&[20]) }],
        };
        check_fused(&f, &[x], &caps(), 0.0);
    }
}

#[test]
fn equal_chains_of_other_sizes_share_a_program() {
    let make = |shape: &[usize], value: f64| {
        let f = Fused {
            space: shape.into(),
            reduced: 0,
            loads: vec![Load { input: 0, dtype: DType::F32, view: View::dense(shape), fill: None }],
            params: vec![(DType::F32, Param::Literal(Scalar::F(value)))],
            body: vec![
                instr(InstrKind::Load(0), DType::F32, &[]),
                instr(InstrKind::Param(0), DType::F32, &[]),
                instr(InstrKind::Op(ScalarOp::Add), DType::F32, &[0, 1]),
            ],
            outs: vec![Out { value: 2, dtype: DType::F32, reduce: None, view: View::dense(shape) }],
        };
        lower_fused(&f, &caps()).unwrap().0.key()
    };
    // Sizes that are a multiple of the vector width have their own program.
    assert_eq!(make(&[100], 1.0), make(&[7776], -3.0));
    assert_eq!(make(&[101], 1.0), make(&[7777], -3.0));
    assert_ne!(make(&[100], 1.0), make(&[101], 1.0));
    assert_ne!(make(&[100], 1.0), make(&[10, 10], 1.0));
}

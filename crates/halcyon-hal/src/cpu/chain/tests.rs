//! Tests that compare the CPU's kernels for fused chains with a scalar evaluation of the same chain.

use crate::cpu::CpuDevice;
use crate::library_call::CallForm;
use crate::{Command, Device, Options, Tag, Target};
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out, Param};
use halcyon_ir::layout::View;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::target::{LibraryCall, Operand, Work};
use halcyon_ir::{DType, Scalar, ScalarOp};

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) struct Rng(pub u64);
impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    /// A random value. Floats are from the interval `dom`. Integers are small, or from the whole range of the
    /// type.
    pub(crate) fn value(&mut self, d: DType, dom: (f64, f64)) -> Scalar {
        match d {
            d if d.is_float() => Scalar::F(dom.0 + (dom.1 - dom.0) * self.unit()).cast(d),
            DType::Bool => Scalar::Bool(self.next() & 1 == 1),
            d => {
                let v = self.next() as i64;
                Scalar::I(if v & 3 == 0 { v >> 2 } else { v % 9 }).cast(d)
            }
        }
    }
}

pub(crate) fn pack(d: DType, v: &[Scalar]) -> Vec<u8> {
    v.iter().flat_map(|s| s.to_bytes(d)[..d.size()].to_vec()).collect()
}
pub(crate) fn unpack(d: DType, b: &[u8]) -> Vec<Scalar> {
    b.chunks_exact(d.size()).map(|c| Scalar::from_bytes(d, c)).collect()
}

/// Every multi-index of a shape, in row-major order.
pub(crate) fn points(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..shape.iter().product()).map(|mut i| {
        let mut p = vec![0; shape.len()];
        for k in (0..shape.len()).rev() {
            p[k] = i % shape[k];
            i /= shape[k];
        }
        p
    })
}

/// Evaluates the chain element by element. This function rounds f16 and bf16 values after every op; the
/// kernel under test need not.
pub(super) fn reference(
    f: &Fused,
    inputs: &[Vec<Scalar>],
    args: &[Scalar],
    sizes: &[usize],
) -> Vec<Vec<Scalar>> {
    let param = |i: u32| match f.params[i as usize] {
        (d, Param::Literal(s)) => s.cast(d),
        (d, Param::Arg(a)) => args[a as usize].cast(d),
    };
    let outer = f.outer().len();
    let mut outs: Vec<Vec<Scalar>> =
        f.outs.iter().zip(sizes).map(|(o, n)| vec![Scalar::I(0).cast(o.dtype); *n]).collect();
    for p in points(f.outer()) {
        for (o, out) in f.outs.iter().enumerate() {
            if let (Some(k), Some(at)) = (out.reduce, out.view.at(&p)) {
                outs[o][at as usize] = k.identity(out.dtype);
            }
        }
    }
    for p in points(&f.space) {
        let mut v: Vec<Scalar> = vec![];
        for i in &f.body {
            let a: Vec<Scalar> = i.args.iter().map(|r| v[*r as usize]).collect();
            let of = |k: usize| f.body[i.args[k] as usize].dtype;
            v.push(match i.kind {
                InstrKind::Load(l) => {
                    let l = &f.loads[l as usize];
                    l.view
                        .at(&p)
                        .map_or_else(|| param(l.fill.unwrap()), |at| inputs[l.input as usize][at as usize])
                }
                InstrKind::Iota(k) => Scalar::I(p[k as usize] as i64).cast(i.dtype),
                InstrKind::Param(n) => param(n),
                InstrKind::Op(op) => op.eval(if op == ScalarOp::Select { of(1) } else { of(0) }, &a),
                InstrKind::Cast => a[0].cast(i.dtype),
                InstrKind::Bitcast => Scalar::from_bytes(i.dtype, &a[0].to_bytes(of(0))),
            });
        }
        for (o, out) in f.outs.iter().enumerate() {
            let at = out.view.at(&p[..outer]).unwrap() as usize;
            let x = v[out.value as usize];
            outs[o][at] = match out.reduce {
                None => x,
                // Accumulate in f64, so that the reference is practically exact.
                Some(k) if out.dtype.is_float() => {
                    Scalar::F(k.op(DType::F64).eval(DType::F64, &[outs[o][at], x]).as_f64())
                }
                Some(k) => k.op(out.dtype).eval(out.dtype, &[outs[o][at], x]),
            };
        }
    }
    outs
}

pub(super) fn operand(d: DType, n: usize) -> Operand {
    Operand { dtype: d, view: View::dense(&[n]) }
}

/// Runs the fused kernel on a device. Output `n` has `sizes[n]` elements.
pub(super) fn execute(
    dev: &CpuDevice,
    f: &Fused,
    inputs: &[Vec<Scalar>],
    args: &[Scalar],
    sizes: &[usize],
) -> Result<Vec<Vec<u8>>, String> {
    let mut types = vec![DType::U8; inputs.len()];
    f.loads.iter().for_each(|l| types[l.input as usize] = l.dtype);
    let ins: Vec<Operand> = inputs.iter().zip(&types).map(|(v, d)| operand(*d, v.len())).collect();
    let outs: Vec<Operand> = f.outs.iter().zip(sizes).map(|(o, n)| operand(o.dtype, *n)).collect();
    let call = LibraryCall::new(Work::Fused(f), &ins, &outs);
    let k = dev.library(&call).map_err(|d| d.reason)?;
    let mut bufs = vec![];
    for (v, d) in inputs.iter().zip(&types) {
        let b = dev.alloc(d.bytes(v.len()), Tag::Io).unwrap();
        dev.write(&b, 0, &pack(*d, v)).unwrap();
        bufs.push(b);
    }
    for o in &outs {
        let b = dev.alloc(o.dtype.bytes(o.view.numel()), Tag::Io).unwrap();
        dev.write(&b, 0, &vec![0; b.bytes()]).unwrap();
        bufs.push(b);
    }
    if k.workspace() > 0 {
        bufs.push(dev.alloc(k.workspace(), Tag::Workspace).unwrap());
    }
    dev.submit(&[Command::Library { kernel: &k, buffers: &bufs, args, fault: 1 }])
        .map_err(|e| e.to_string())?;
    Ok((0..outs.len())
        .map(|i| {
            let b = &bufs[inputs.len() + i];
            let mut v = vec![0; b.bytes()];
            dev.read(b, 0, &mut v).unwrap();
            v
        })
        .collect())
}

pub(super) fn device(threads: usize) -> CpuDevice {
    CpuDevice::new(&Options { threads: Some(threads), ..Default::default() }).unwrap()
}

fn eps(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F32 => f32::EPSILON as f64,
        _ => f64::EPSILON,
    }
}

/// Magnitude below which errors are absolute, because denormals may be flushed.
fn tiny(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-14),
        DType::F64 => f64::MIN_POSITIVE,
        _ => f32::MIN_POSITIVE as f64,
    }
}

/// Whether the difference is at most `ulps` units of rounding (`eps`) of the larger of `want` and `scale`.
fn close(d: DType, got: Scalar, want: Scalar, ulps: f64, scale: f64) -> bool {
    if !d.is_float() {
        return got == want;
    }
    let (g, w) = (got.as_f64(), want.as_f64());
    if w.is_nan() || g.is_nan() {
        return w.is_nan() && g.is_nan();
    }
    let flushed = w.abs() < tiny(d) && g == 0.0;
    g == w || flushed || (g - w).abs() <= ulps * eps(d) * w.abs().max(scale).max(tiny(d))
}

pub(super) fn instr(kind: InstrKind, dtype: DType, args: &[u32]) -> Instr {
    Instr { kind, dtype, args: args.into() }
}
pub(super) fn load(input: u32, dtype: DType, view: View) -> Load {
    Load { input, dtype, view, fill: None }
}
pub(super) fn out(value: u32, dtype: DType, shape: &[usize], reduce: Option<ReduceKind>) -> Out {
    Out { value, dtype, reduce, view: View::dense(shape) }
}

fn check(
    dev: &CpuDevice,
    f: &Fused,
    inputs: &[Vec<Scalar>],
    args: &[Scalar],
    (ulps, scale): (f64, f64),
    what: &str,
) {
    let sizes: Vec<usize> = f.outs.iter().map(|o| o.view.range().map_or(0, |r| r.1 as usize + 1)).collect();
    let got = execute(dev, f, inputs, args, &sizes).unwrap_or_else(|e| panic!("{what}: {e}"));
    let want = reference(f, inputs, args, &sizes);
    for (o, out) in f.outs.iter().enumerate() {
        for (i, (g, w)) in unpack(out.dtype, &got[o]).iter().zip(&want[o]).enumerate() {
            let w = if out.reduce.is_some() { w.cast(out.dtype) } else { *w };
            assert!(close(out.dtype, *g, w, ulps, scale), "{what}: output {o}[{i}] is {g:?}, not {w:?}");
        }
    }
}

#[test]
fn every_scalar_op_on_every_type() {
    let dev = device(2);
    let mut rng = Rng(1);
    for row in halcyon_ir::ops::element_wise::ROWS {
        for d in DType::native().filter(|d| row.op.takes(*d)) {
            for n in [0, 1, 127, 1000] {
                let select = row.op == ScalarOp::Select;
                let ty = |k: usize| if select && k == 0 { DType::Bool } else { d };
                let mut ins: Vec<Vec<Scalar>> =
                    (0..row.arity).map(|k| (0..n).map(|_| rng.value(ty(k), row.domain)).collect()).collect();
                if d.is_float() && n == 1000 {
                    let special = [
                        f64::NAN,
                        f64::INFINITY,
                        f64::NEG_INFINITY,
                        -0.0,
                        0.0,
                        1.0,
                        -1.0,
                        2.5,
                        -2.5,
                        1e-30,
                        3e38,
                    ];
                    for (k, x) in ins.iter_mut().enumerate().filter(|(k, _)| ty(*k) == d) {
                        for i in 0..121 {
                            // The first two operands have every pair of special values.
                            x[i] = Scalar::F(special[if k == 0 { i % 11 } else { i / 11 }]).cast(d);
                        }
                    }
                }
                let mut body: Vec<Instr> =
                    (0..row.arity).map(|k| instr(InstrKind::Load(k as u32), ty(k), &[])).collect();
                let args: Vec<u32> = (0..row.arity as u32).collect();
                body.push(instr(InstrKind::Op(row.op), row.op.result(d), &args));
                let f = Fused {
                    space: [n].as_slice().into(),
                    reduced: 0,
                    loads: (0..row.arity).map(|k| load(k as u32, ty(k), View::dense(&[n]))).collect(),
                    params: vec![],
                    body,
                    outs: vec![out(row.arity as u32, row.op.result(d), &[n], None)],
                };
                check(
                    &dev,
                    &f,
                    &ins,
                    &[],
                    (row.ulps.max(if d.size() == 2 { 1.0 } else { 0.0 }), 0.0),
                    &format!("{} {d} {n}", row.name),
                );
            }
        }
    }
}

#[test]
fn every_cast_and_bitcast() {
    let dev = device(1);
    let mut rng = Rng(2);
    for a in DType::native() {
        for b in DType::native() {
            let mut x: Vec<Scalar> = (0..517).map(|_| rng.value(a, (-300.0, 300.0))).collect();
            if a.is_float() {
                for (i, v) in
                    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e30, -1e30, 65519.9, 2049.0, 0.5]
                        .into_iter()
                        .enumerate()
                {
                    x[i] = Scalar::F(v).cast(a);
                }
            }
            for bit in [false, true] {
                if bit && a.bits() != b.bits() {
                    continue;
                }
                let kind = if bit { InstrKind::Bitcast } else { InstrKind::Cast };
                let f = Fused {
                    space: [517].as_slice().into(),
                    reduced: 0,
                    loads: vec![load(0, a, View::dense(&[517]))],
                    params: vec![],
                    body: vec![instr(InstrKind::Load(0), a, &[]), instr(kind, b, &[0])],
                    outs: vec![out(1, b, &[517], None)],
                };
                check(
                    &dev,
                    &f,
                    std::slice::from_ref(&x),
                    &[],
                    (0.0, 0.0),
                    &format!("{a} to {b}, bits {bit}"),
                );
            }
        }
    }
}

/// A random view of a buffer, and the size of the buffer. The view may be permuted, and each axis may be
/// broadcast, strided with an offset, or reversed.
fn random_view(rng: &mut Rng, shape: &[usize]) -> (View, usize) {
    let r = shape.len();
    let mut perm: Vec<usize> = (0..r).collect();
    if rng.below(2) == 0 {
        (0..r).for_each(|i| perm.swap(i, rng.below(r)));
    }
    // The buffer's shape, from which the view is cut.
    let mut dims = vec![1; r];
    let (mut start, mut step) = (vec![0; r], vec![1isize; r]);
    let mut repeat = vec![false; r];
    for (i, &p) in perm.iter().enumerate() {
        match rng.below(6) {
            0 => repeat[i] = true,
            1 => {
                dims[i] = shape[p] * 2 + 1;
                (start[i], step[i]) = (1, 2);
            }
            2 => {
                dims[i] = shape[p];
                (start[i], step[i]) = (shape[p].saturating_sub(1), -1);
            }
            _ => dims[i] = shape[p],
        }
    }
    let len: Vec<usize> = (0..r).map(|i| if repeat[i] { 1 } else { shape[perm[i]] }).collect();
    let v = View::dense(&dims).slice(&start, &step, &len);
    let mut inverse = vec![0; r];
    perm.iter().enumerate().for_each(|(i, p)| inverse[*p] = i);
    (v.permute(&inverse).expand(shape), dims.iter().product())
}

fn random_shape(rng: &mut Rng, rank: usize) -> Vec<usize> {
    let sizes = [1, 2, 3, 5, 8, 17, 33];
    let mut s: Vec<usize> = (0..rank).map(|_| sizes[rng.below(sizes.len())]).collect();
    if rng.below(3) == 0 && rank > 0 {
        let k = rng.below(rank);
        s[k] = 300 + rng.below(40);
    }
    while s.iter().product::<usize>() > 40_000 {
        let k = (0..rank).max_by_key(|k| s[*k]).unwrap_or(0);
        s[k] = s[k].div_ceil(2);
    }
    s
}

/// `a * b + parameter + index` over two random views `a` and `b`, some with masks.
#[test]
fn any_views_masks_and_indices() {
    let devs = [device(1), device(3)];
    let mut rng = Rng(3);
    for round in 0..400 {
        let d = [DType::F32, DType::F64, DType::I32, DType::I64, DType::U8, DType::F16][round % 6];
        let rank = rng.below(5);
        let shape = random_shape(&mut rng, rank);
        let (mut loads, mut inputs) = (vec![], vec![]);
        for k in 0..2u32 {
            let (mut v, n) = random_view(&mut rng, &shape);
            let masked = rng.below(3) == 0;
            if masked {
                // Slices the view and pads it back, which makes a mask.
                let lo: Vec<usize> = shape.iter().map(|n| rng.below(*n)).collect();
                let len: Vec<usize> = shape.iter().zip(&lo).map(|(n, l)| 1 + rng.below(n - l)).collect();
                let hi: Vec<usize> = (0..rank).map(|k| shape[k] - lo[k] - len[k]).collect();
                v = v.slice(&lo, &vec![1; rank], &len).pad(&lo, &hi);
            }
            loads.push(Load { input: k, dtype: d, view: v, fill: Some(0) });
            inputs.push((0..n).map(|_| rng.value(d, (-3.0, 3.0))).collect());
        }
        let mut body = vec![
            instr(InstrKind::Load(0), d, &[]),
            instr(InstrKind::Load(1), d, &[]),
            instr(InstrKind::Op(ScalarOp::Mul), d, &[0, 1]),
            instr(InstrKind::Param(1), d, &[]),
            instr(InstrKind::Op(ScalarOp::Add), d, &[2, 3]),
        ];
        if rank > 0 {
            body.push(instr(InstrKind::Iota(rng.below(rank) as u32), DType::I32, &[]));
            body.push(instr(InstrKind::Cast, d, &[5]));
            body.push(instr(InstrKind::Op(ScalarOp::Add), d, &[4, 6]));
        }
        let last = body.len() as u32 - 1;
        // Two results: the value of the whole chain, and a loaded value.
        let mut second = View::dense(&shape);
        second.offset = 3;
        let outs = vec![out(last, d, &shape, None), Out { value: 1, dtype: d, reduce: None, view: second }];
        let params = vec![(d, Param::Literal(Scalar::I(7).cast(d))), (d, Param::Arg(0))];
        let f = Fused { space: shape.as_slice().into(), reduced: 0, loads, params, body, outs };
        for dev in &devs {
            // Terms of up to 9 may cancel, so errors are relative to the result or to 16, whichever is
            // larger.
            check(
                dev,
                &f,
                &inputs,
                &[Scalar::F(2.0)],
                (4.0, 16.0),
                &format!("round {round} {d} {shape:?} {:?}", f.loads),
            );
        }
    }
}

#[test]
fn copies_of_every_type() {
    let dev = device(2);
    let mut rng = Rng(4);
    for round in 0..60 {
        for d in DType::native() {
            let rank = 1 + rng.below(3);
            let shape = random_shape(&mut rng, rank);
            let (view, n) = random_view(&mut rng, &shape);
            let f = Fused {
                space: shape.as_slice().into(),
                reduced: 0,
                loads: vec![load(0, d, view)],
                params: vec![],
                body: vec![instr(InstrKind::Load(0), d, &[])],
                outs: vec![out(0, d, &shape, None)],
            };
            let x: Vec<Scalar> = (0..n).map(|_| rng.value(d, (-9.0, 9.0))).collect();
            check(&dev, &f, &[x], &[], (0.0, 0.0), &format!("round {round} {d} {shape:?}"));
        }
    }
}

const KINDS: [ReduceKind; 4] = [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min];

/// Compares every kind of reduction with a reference in f64. The random views lead to reductions of rows, of
/// columns and of both.
#[test]
fn reductions_of_every_kind_and_layout() {
    let devs = [device(1), device(3)];
    let mut rng = Rng(5);
    for round in 0..300 {
        for d in
            [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I8, DType::U64, DType::Bool]
        {
            let kind = KINDS[round % 4];
            if d == DType::Bool && matches!(kind, ReduceKind::Sum | ReduceKind::Prod) {
                continue;
            }
            let rank = 1 + rng.below(4);
            let mut shape = random_shape(&mut rng, rank);
            if round % 37 == 0 {
                shape[rank - 1] = 0;
            }
            let reduced = 1 + rng.below(rank);
            let (view, n) = random_view(&mut rng, &shape);
            // Keep products in range.
            let dom = if kind == ReduceKind::Prod { (0.99, 1.01) } else { (-2.0, 2.0) };
            let mut x: Vec<Scalar> = (0..n).map(|_| rng.value(d, dom)).collect();
            if d.is_float() && round % 10 == 3 && n > 2 {
                let i = rng.below(n);
                x[i] = Scalar::F(f64::NAN);
            }
            let f = Fused {
                space: shape.as_slice().into(),
                reduced,
                loads: vec![load(0, d, view)],
                params: vec![],
                body: vec![instr(InstrKind::Load(0), d, &[])],
                outs: vec![out(0, d, &shape[..rank - reduced], Some(kind))],
            };
            for dev in &devs {
                // Terms may cancel, so the error of a sum is relative to the typical size of a sum of as many
                // random terms. Every factor of a product may add a rounding error.
                let slack = match kind {
                    // In f64 the reference, a single running sum, has the larger rounding error.
                    ReduceKind::Sum if d == DType::F64 => (64.0, shape.iter().product::<usize>() as f64),
                    ReduceKind::Sum => (4.0, 2.0 * (shape.iter().product::<usize>() as f64).sqrt()),
                    ReduceKind::Prod => (4.0 + shape[rank - reduced..].iter().product::<usize>() as f64, 0.0),
                    _ => (0.0, 0.0),
                };
                check(
                    dev,
                    &f,
                    std::slice::from_ref(&x),
                    &[],
                    slack,
                    &format!("round {round} {kind:?} {d} {shape:?} {reduced} {:?}", f.loads),
                );
            }
        }
    }
}

/// The sum of a million numbers has a relative error of at most 1e-6, whether it is one sum, or the total of
/// the sums of columns.
#[test]
fn long_sums_are_accurate() {
    let dev = device(2);
    let mut rng = Rng(6);
    let n = 1 << 20;
    let x: Vec<f32> = (0..n).map(|_| rng.unit() as f32).collect();
    let v: Vec<Scalar> = x.iter().map(|x| Scalar::F(*x as f64)).collect();
    let want: f64 = x.iter().map(|x| *x as f64).sum();
    for (view, outer) in [(View::dense(&[n]), 0), (View::dense(&[n / 4, 4]).permute(&[1, 0]), 1)] {
        let shape = view.shape.clone();
        let f = Fused {
            space: shape.clone(),
            reduced: 1,
            loads: vec![load(0, DType::F32, view)],
            params: vec![],
            body: vec![instr(InstrKind::Load(0), DType::F32, &[])],
            outs: vec![out(0, DType::F32, &shape[..outer], Some(ReduceKind::Sum))],
        };
        let size = shape[..outer].iter().product();
        let got = execute(&dev, &f, std::slice::from_ref(&v), &[], &[size]).unwrap();
        let sum: f64 = unpack(DType::F32, &got[0]).iter().map(|s| s.as_f64()).sum();
        assert!((sum - want).abs() <= 1e-6 * want, "{sum} {want}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let devs = [device(1), device(2), device(3)];
    let mut rng = Rng(7);
    let d = DType::F32;
    for (shape, perm, reduced) in [
        (vec![300_000], vec![0], 1),
        (vec![3, 70_001], vec![0, 1], 1),
        (vec![5, 40_000], vec![1, 0], 1),
        (vec![700, 300], vec![0, 1], 0),
        (vec![64, 33, 65], vec![2, 0, 1], 2),
    ] {
        let view = View::dense(&shape).permute(&perm);
        let space = view.shape.clone();
        let n = shape.iter().product();
        let x: Vec<Scalar> = (0..n).map(|_| rng.value(d, (-1.0, 1.0))).collect();
        let kind = (reduced > 0).then_some(ReduceKind::Sum);
        let outer = &space[..space.len() - reduced];
        let f = Fused {
            space: space.clone(),
            reduced,
            loads: vec![load(0, d, view)],
            params: vec![],
            body: vec![instr(InstrKind::Load(0), d, &[]), instr(InstrKind::Op(ScalarOp::Tanh), d, &[0])],
            outs: vec![out(1, d, outer, kind)],
        };
        let size = outer.iter().product();
        let results: Vec<Vec<Vec<u8>>> = devs
            .iter()
            .map(|dev| execute(dev, &f, std::slice::from_ref(&x), &[], &[size]).unwrap())
            .collect();
        assert_eq!(results[0], results[1], "{shape:?}");
        assert_eq!(results[0], results[2], "{shape:?}");
    }
}

/// The operands start or end at an inaccessible page, so that loads and stores outside of them crash the
/// test.
#[test]
fn blocks_stay_inside_their_operands() {
    use crate::cpu::library::testing::{Guarded, Side};
    use crate::cpu::library::{Fault, Run};
    use crate::cpu::memory::Ptr;
    use crate::cpu::sys::Isa;
    let team = crate::cpu::team::Team::new(1);
    let word = std::sync::atomic::AtomicU32::new(0);
    for isa in Isa::available() {
        for (d, n) in [1usize, 7, 15, 16, 17, 63, 255, 256, 257, 1000]
            .into_iter()
            .flat_map(|n| [(DType::F32, n), (DType::F16, n), (DType::U8, n), (DType::F64, n)])
        {
            for side in [Side::Start, Side::End] {
                let f = Fused {
                    space: [n].as_slice().into(),
                    reduced: 0,
                    loads: vec![
                        load(0, d, View::dense(&[n])),
                        load(1, d, View::dense(&[n]).slice(&[n - 1], &[-1], &[n])),
                    ],
                    params: vec![],
                    body: vec![
                        instr(InstrKind::Load(0), d, &[]),
                        instr(InstrKind::Load(1), d, &[]),
                        instr(InstrKind::Op(ScalarOp::Add), d, &[0, 1]),
                    ],
                    outs: vec![out(2, d, &[n], None)],
                };
                let one = pack(d, &vec![Scalar::I(1).cast(d); n]);
                let (a, b) = (Guarded::new(&one, side), Guarded::new(&one, side));
                let y = Guarded::new(&vec![0u8; one.len()], side);
                let ops = [operand(d, n), operand(d, n)];
                let outs = [operand(d, n)];
                let call = CallForm::plain(&LibraryCall::new(Work::Fused(&f), &ops, &outs));
                let k = super::kernel(isa, &f, &call).unwrap();
                let at = |p: *mut u8| Ptr { ptr: p, bytes: one.len(), read_only: false };
                let bufs = [at(a.mut_ptr()), at(b.mut_ptr()), at(y.mut_ptr())];
                let fault = Fault::new(&word, 1);
                // SAFETY: the buffers are live vectors that nothing else uses.
                unsafe { k.run(&Run { bufs: &bufs, args: &[], team: &team, isa, fault }) }.unwrap();
                assert_eq!(y.slice(), pack(d, &vec![Scalar::I(2).cast(d); n]), "{d} {n} {isa:?}");
            }
        }
    }
}

/// Multiply-add rounds only once on every instruction set. In all cases but the last, rounding the product
/// would make it overflow, or remove the digits that are left after the addition.
#[test]
fn multiply_add_rounds_once_under_every_instruction_set() {
    use crate::cpu::library::{Fault, Run};
    use crate::cpu::memory::Ptr;
    use crate::cpu::sys::Isa;
    let team = crate::cpu::team::Team::new(1);
    let word = std::sync::atomic::AtomicU32::new(0);
    let inf = f64::INFINITY;
    let (large32, large64) = (f64::from(f32::MAX), f64::MAX);
    let (tiny32, tiny64) = (0.5f64.powi(12), 0.5f64.powi(27));
    let cases = [
        (
            DType::F32,
            large32,
            [(large32, 2.0, -large32, large32), (1.0 + tiny32, 1.0 - tiny32, -1.0, -tiny32 * tiny32)],
        ),
        (
            DType::F64,
            large64,
            [(large64, 2.0, -large64, large64), (1.0 + tiny64, 1.0 - tiny64, -1.0, -tiny64 * tiny64)],
        ),
    ];
    for isa in Isa::available() {
        for (d, large, values) in cases {
            for (x, y, z, want) in values.into_iter().chain([(large, -2.0, inf, inf), (2.0, 3.0, 4.0, 10.0)])
            {
                // The length of some full vectors and a remainder.
                let n = 19;
                let f = Fused {
                    space: [n].as_slice().into(),
                    reduced: 0,
                    loads: (0..3).map(|i| load(i, d, View::dense(&[n]))).collect(),
                    params: vec![],
                    body: (0..3)
                        .map(|i| instr(InstrKind::Load(i), d, &[]))
                        .chain([instr(InstrKind::Op(ScalarOp::Fma), d, &[0, 1, 2])])
                        .collect(),
                    outs: vec![out(3, d, &[n], None)],
                };
                let bytes = [x, y, z].map(|v| pack(d, &vec![Scalar::F(v); n]));
                let mut got = vec![0u8; bytes[0].len()];
                let (ops, outs) = ([operand(d, n), operand(d, n), operand(d, n)], [operand(d, n)]);
                let call = CallForm::plain(&LibraryCall::new(Work::Fused(&f), &ops, &outs));
                let k = super::kernel(isa, &f, &call).unwrap();
                let at = |b: &[u8]| Ptr { ptr: b.as_ptr().cast_mut(), bytes: b.len(), read_only: true };
                let y_at = Ptr { ptr: got.as_mut_ptr(), bytes: got.len(), read_only: false };
                let bufs = [at(&bytes[0]), at(&bytes[1]), at(&bytes[2]), y_at];
                let fault = Fault::new(&word, 1);
                // SAFETY: the buffers are live vectors that nothing else uses.
                unsafe { k.run(&Run { bufs: &bufs, args: &[], team: &team, isa, fault }) }.unwrap();
                assert_eq!(got, pack(d, &vec![Scalar::F(want); n]), "{d} {isa:?}: {x:e} * {y:e} + {z:e}");
            }
        }
    }
}

#[test]
fn malformed_chains_are_declined() {
    let dev = device(1);
    let good = Fused {
        space: [4].as_slice().into(),
        reduced: 0,
        loads: vec![load(0, DType::F32, View::dense(&[4]))],
        params: vec![],
        body: vec![
            instr(InstrKind::Load(0), DType::F32, &[]),
            instr(InstrKind::Op(ScalarOp::Exp), DType::F32, &[0]),
        ],
        outs: vec![out(1, DType::F32, &[4], None)],
    };
    let x = vec![vec![Scalar::F(1.0); 4]];
    assert!(execute(&dev, &good, &x, &[], &[4]).is_ok());
    // The buffer is too small for the view of an input or an output.
    assert!(execute(&dev, &good, &[vec![Scalar::F(1.0); 3]], &[], &[4]).is_err());
    assert!(execute(&dev, &good, &x, &[], &[3]).is_err());
    let mut f = good.clone();
    f.body[1].args[0] = 1;
    assert!(execute(&dev, &f, &x, &[], &[4]).is_err());
    let mut f = good.clone();
    f.body[1].dtype = DType::I32;
    assert!(execute(&dev, &f, &x, &[], &[4]).is_err());
    let mut f = good.clone();
    f.outs[0].value = 9;
    assert!(execute(&dev, &f, &x, &[], &[4]).is_err());
    let mut f = good.clone();
    f.loads[0].view.offset = -1;
    assert!(execute(&dev, &f, &x, &[], &[4]).is_err());
    let mut f = good;
    f.params.push((DType::F32, Param::Arg(0)));
    assert!(execute(&dev, &f, &x, &[], &[4]).is_err());
}

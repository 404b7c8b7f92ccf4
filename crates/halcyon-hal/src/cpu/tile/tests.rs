//! The executor against a scalar evaluation of the same chain.

use crate::cpu::CpuDevice;
use crate::{Command, Device, Options, Tag, Target};
use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out, Param};
use halcyon_ir::layout::View;
use halcyon_ir::op::ReduceKind;
use halcyon_ir::target::{LibraryCall, MatmulPrecision, Operand, Work};
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
    /// A value of the type: floats from an interval, integers over their whole range or small.
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

/// Every multi-index of a shape, in order.
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

/// The chain point by point. Values of half types round at every op, which the executor need not do.
fn reference(f: &Fused, inputs: &[Vec<Scalar>], args: &[Scalar], sizes: &[usize]) -> Vec<Vec<Scalar>> {
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
                    l.view.at(&p).map_or_else(|| param(l.fill.unwrap()), |at| inputs[l.input as usize][at as usize])
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
                // In f64, so that the reference is the exact sum for practical purposes.
                Some(k) if out.dtype.is_float() => {
                    Scalar::F(k.op(DType::F64).eval(DType::F64, &[outs[o][at], x]).as_f64())
                }
                Some(k) => k.op(out.dtype).eval(out.dtype, &[outs[o][at], x]),
            };
        }
    }
    outs
}

fn operand(d: DType, n: usize) -> Operand {
    Operand { dtype: d, view: View::dense(&[n]) }
}

/// Runs the chain on a device; output `n` has `sizes[n]` elements.
fn execute(
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
    let call = LibraryCall {
        work: Work::Fused(f),
        inputs: &ins,
        outputs: &outs,
        precision: MatmulPrecision::Highest,
        in_place: false,
    };
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
    dev.submit(&[Command::Library { kernel: &k, buffers: &bufs, args, fault: 1 }]).map_err(|e| e.to_string())?;
    Ok((0..outs.len())
        .map(|i| {
            let b = &bufs[inputs.len() + i];
            let mut v = vec![0; b.bytes()];
            dev.read(b, 0, &mut v).unwrap();
            v
        })
        .collect())
}

fn device(threads: usize) -> CpuDevice {
    CpuDevice::new(&Options { threads: Some(threads), ..Default::default() })
}

fn eps(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F32 => f32::EPSILON as f64,
        _ => f64::EPSILON,
    }
}

/// Smallest magnitude below which errors are absolute: denormals may be flushed.
fn tiny(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-14),
        DType::F64 => f64::MIN_POSITIVE,
        _ => f32::MIN_POSITIVE as f64,
    }
}

fn close(d: DType, got: Scalar, want: Scalar, ulps: f64) -> bool {
    if !d.is_float() {
        return got == want;
    }
    let (g, w) = (got.as_f64(), want.as_f64());
    if w.is_nan() || g.is_nan() {
        return w.is_nan() && g.is_nan();
    }
    let flushed = w.abs() < tiny(d) && g == 0.0;
    g == w || flushed || (g - w).abs() <= ulps * eps(d) * w.abs().max(tiny(d))
}

fn instr(kind: InstrKind, dtype: DType, args: &[u32]) -> Instr {
    Instr { kind, dtype, args: args.into() }
}
fn load(input: u32, dtype: DType, view: View) -> Load {
    Load { input, dtype, view, fill: None }
}
fn out(value: u32, dtype: DType, shape: &[usize], reduce: Option<ReduceKind>) -> Out {
    Out { value, dtype, reduce, view: View::dense(shape) }
}

fn check(dev: &CpuDevice, f: &Fused, inputs: &[Vec<Scalar>], args: &[Scalar], ulps: f64, what: &str) {
    let sizes: Vec<usize> = f.outs.iter().map(|o| o.view.range().map_or(0, |r| r.1 as usize + 1)).collect();
    let got = execute(dev, f, inputs, args, &sizes).unwrap_or_else(|e| panic!("{what}: {e}"));
    let want = reference(f, inputs, args, &sizes);
    for (o, out) in f.outs.iter().enumerate() {
        for (i, (g, w)) in unpack(out.dtype, &got[o]).iter().zip(&want[o]).enumerate() {
            let w = if out.reduce.is_some() { w.cast(out.dtype) } else { *w };
            assert!(close(out.dtype, *g, w, ulps), "{what}: output {o}[{i}] is {g:?}, not {w:?}");
        }
    }
}

#[test]
fn every_scalar_op_on_every_type() {
    let dev = device(2);
    let mut rng = Rng(1);
    for row in halcyon_ir::scalar_op::ROWS {
        for d in DType::all().filter(|d| row.op.takes(*d)) {
            for n in [0, 1, 127, 1000] {
                let select = row.op == ScalarOp::Select;
                let ty = |k: usize| if select && k == 0 { DType::Bool } else { d };
                let mut ins: Vec<Vec<Scalar>> =
                    (0..row.arity).map(|k| (0..n).map(|_| rng.value(ty(k), row.domain)).collect()).collect();
                if d.is_float() && n == 1000 {
                    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1.0, -1.0, 2.5, -2.5, 1e-30, 3e38];
                    for (k, x) in ins.iter_mut().enumerate().filter(|(k, _)| ty(*k) == d) {
                        for i in 0..121 {
                            // Every pair of specials among the first two operands.
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
                check(&dev, &f, &ins, &[], row.ulps.max(if d.size() == 2 { 1.0 } else { 0.0 }), &format!("{} {d} {n}", row.name));
            }
        }
    }
}

#[test]
fn every_cast_and_bitcast() {
    let dev = device(1);
    let mut rng = Rng(2);
    for a in DType::all() {
        for b in DType::all() {
            let mut x: Vec<Scalar> = (0..517).map(|_| rng.value(a, (-300.0, 300.0))).collect();
            if a.is_float() {
                for (i, v) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e30, -1e30, 65519.9, 2049.0, 0.5].into_iter().enumerate() {
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
                check(&dev, &f, std::slice::from_ref(&x), &[], 0.0, &format!("{a} to {b}, bits {bit}"));
            }
        }
    }
}

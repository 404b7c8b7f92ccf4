use super::*;
use crate::convert::Rounding;
use crate::minifloat::Format;
use crate::ops::element_wise::{ROWS, ScalarOp};
use crate::ops::{Conv, Pool, PoolKind, ScatterKind};
use crate::reference::eval;
use crate::shape::Shape;
use std::sync::Arc;

fn small() -> impl Iterator<Item = DType> {
    DType::all().filter(|d| !d.is_native())
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Random bits, also in the unused bits of the last byte.
    fn data(&mut self, d: DType, dims: &[usize]) -> ConstData {
        let n = d.bytes(dims.iter().product());
        let b: Vec<u8> = (0..n).map(|_| self.next() as u8 & if d == DType::Bool { 1 } else { 255 }).collect();
        ConstData::new(d, dims, Arc::new(b)).unwrap()
    }
}

/// Every pattern of a dtype of at most 16 bits, in order.
fn patterns(d: DType) -> ConstData {
    let n = if d == DType::Bool { 2 } else { 1usize << d.bits() };
    let v = (0..n as u64).map(|p| Scalar::from_bytes(d, &p.to_le_bytes()));
    // Patterns of whole bytes are stored directly, to include every NaN.
    if d.bits() < 8 {
        return ConstData::from_scalars(d, &[n], v).unwrap();
    }
    let b: Vec<u8> = (0..n as u64).flat_map(|p| p.to_le_bytes()[..d.size()].to_vec()).collect();
    ConstData::new(d, &[n], Arc::new(b)).unwrap()
}

/// Values of a wide dtype: near every value of the small types, near powers of two, special values, and
/// random bits.
fn wide_values(d: DType, rng: &mut Rng) -> ConstData {
    if d.bits() <= 16 {
        return patterns(d);
    }
    let mut v: Vec<Scalar> = vec![];
    for s in small() {
        for p in 0..1u32 << s.bits().min(8) {
            let x = Scalar::from_bytes(s, &[p as u8]).as_f64();
            let y = Scalar::from_bytes(s, &[(p + 1) as u8]).as_f64();
            for m in [x, (x + y) / 2.0] {
                for e in [0.0, 1e-7, -1e-7, 1e-12, -1e-12, 3e-16] {
                    v.push(Scalar::F(m * (1.0 + e)));
                }
            }
        }
    }
    for k in 0..64 {
        for w in [1u64 << k, (1 << k) + 1, (1 << k) - 1, 3 << k, (3 << k) - 1, (3 << k) + 1] {
            v.push(if d.class() == Class::Uint { Scalar::U(w) } else { Scalar::I(w as i64) });
            v.push(Scalar::I((w as i64).wrapping_neg()));
        }
    }
    v.extend([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e300, -1e300, 1e-300].map(Scalar::F));
    v.extend((0..3000).map(|_| Scalar::from_bytes(d, &rng.next().to_le_bytes())));
    ConstData::from_scalars(d, &[v.len()], v).unwrap()
}

/// The data in the form in which an input or output of the rewritten graph stores it.
fn store(c: &ConstData) -> ConstData {
    let t = stored(&TensorType::new(c.dtype, &c.dims)).unwrap();
    ConstData::new(t.dtype, &t.shape.dims().unwrap(), c.owner()).unwrap()
}

/// Results of the graph and of the rewritten graph. Checks that the rewritten graph has no small types and
/// passes every type rule.
fn both(g: &Graph, inputs: &[ConstData], args: &[Scalar]) -> (Vec<ConstData>, Vec<ConstData>) {
    let want = eval(g, inputs, args).unwrap();
    let h = run(g).unwrap();
    assert!(!crate::passes::has_small_types(&h));
    h.bind(&Default::default()).unwrap();
    let got = eval(&h, &inputs.iter().map(store).collect::<Vec<_>>(), args).unwrap();
    let got = got.iter().zip(&want).map(|(y, w)| ConstData::new(w.dtype, &w.dims, y.owner()).unwrap());
    (want.clone(), got.collect())
}

fn same(a: Scalar, b: Scalar) -> bool {
    a == b || a.as_f64().is_nan() && b.as_f64().is_nan()
}

/// Whether two numbers are equal or neighbours in their dtype.
fn near(d: DType, a: Scalar, b: Scalar) -> bool {
    let (a, b) = (a.as_f64(), b.as_f64());
    let Some(f) = Format::of(d) else {
        // E8M0 has only powers of two, and NaN, which counts as the neighbour of the smallest and the
        // largest.
        return a.is_nan() || b.is_nan() || (a / b).log2().abs() <= 1.0;
    };
    let place = |v: f64| (f.encode(v.abs()) as i32 & (f.sign() as i32 - 1)) * if v < 0.0 { -1 } else { 1 };
    let past = |v: f64| v.is_nan() || v.is_infinite();
    (past(a) && past(b))
        || (past(a) || past(b)) && a.abs().min(b.abs()) >= f.max()
        || (place(a) - place(b)).abs() <= 1
}

fn check(what: &str, g: &Graph, inputs: &[ConstData], args: &[Scalar], exact: bool) {
    let (want, got) = both(g, inputs, args);
    for (w, y) in want.iter().zip(&got) {
        for (i, (a, b)) in w.scalars().zip(y.scalars()).enumerate() {
            let ok = same(a, b) || !exact && w.dtype.is_float() && near(w.dtype, a, b);
            let x: Vec<Option<Scalar>> = inputs.iter().map(|c| c.get(i % c.numel().max(1))).collect();
            assert!(ok, "{what}, element {i} of {x:?}: {b:?} instead of {a:?}");
        }
        if w.dtype.bits() < 8 {
            let used = w.numel() * w.dtype.bits() as usize % 8;
            assert!(used == 0 || y.bytes().last().is_some_and(|b| b >> used == 0), "{what}: padding");
        }
    }
}

fn unary(d: DType, n: &[usize], f: impl Fn(&mut Graph, NodeId) -> Result<NodeId>) -> Result<Graph> {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(d, n));
    let y = f(&mut g, x)?;
    g.output("y", y);
    Ok(g)
}

#[test]
fn casts_agree_with_the_reference_on_all_patterns() {
    let mut rng = Rng(1);
    for from in DType::all() {
        let x = wide_values(from, &mut rng);
        for to in DType::all().filter(|to| *to != from && !(to.is_native() && from.is_native())) {
            let g = unary(from, &x.dims, |g, x| g.cast(x, to)).unwrap();
            check(&format!("cast of {from} to {to}"), &g, std::slice::from_ref(&x), &[], true);
        }
    }
}

#[test]
fn bitcasts_keep_bits() {
    for from in DType::all() {
        for to in DType::all().filter(|to| to.bits() == from.bits() && *to != from) {
            if from.is_native() && to.is_native() || to == DType::Bool {
                continue;
            }
            let g = unary(from, &[if from == DType::Bool { 2 } else { 1 << from.bits() }], |g, x| {
                g.bitcast(x, to)
            });
            let x = patterns(from);
            let h = run(&g.unwrap()).unwrap();
            let y = eval(&h, &[store(&x)], &[]).unwrap();
            assert_eq!(y[0].bytes(), x.bytes(), "{from} to {to}");
        }
    }
}

#[test]
fn ops_that_move_elements_keep_their_bits() {
    let mut rng = Rng(2);
    for d in small() {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(d, [3usize, 5]));
        let z = g.input("z", TensorType::new(d, [2usize, 5]));
        let i = g.input("i", TensorType::new(DType::I64, [4usize]));
        let c = g.input("c", TensorType::new(DType::Bool, [5usize, 3]));
        let mut out = vec![x];
        out.push(g.transpose(x, 0, 1).unwrap());
        out.push(g.reshape(x, [15usize]).unwrap());
        out.push(g.flip(x, &[1]).unwrap());
        out.push(g.narrow(x, 1, 1, 3).unwrap());
        out.push(g.pad(x, &[1, 0], &[0, 2], 2.0).unwrap());
        out.push(g.concat(&[x, z], 0).unwrap());
        out.push(g.gather(x, i, 1).unwrap());
        let row = g.narrow(x, 0, 2, 1).unwrap();
        out.push(g.expand(row, &Shape::from([4usize, 5])).unwrap());
        out.push(g.select(c, out[1], out[1]).unwrap());
        let one = g.full(DType::I32, Shape::scalar(), 1i64);
        out.push(g.update_slice(x, z, one, 0).unwrap());
        let i2 = g.full(DType::I64, [2usize], 1i64);
        out.push(g.scatter_rows(x, i2, z, 0, ScatterKind::Set).unwrap());
        let empty = g.narrow(x, 0, 0, 0).unwrap();
        out.push(empty);
        for (k, o) in out.iter().enumerate() {
            g.output(&k.to_string(), *o);
        }
        let x = rng.data(d, &[3, 5]);
        let inputs = [
            x.clone(),
            rng.data(d, &[2, 5]),
            ConstData::from_slice(&[4], &[4i64, 0, -1, 2]).unwrap(),
            rng.data(DType::Bool, &[5, 3]),
        ];
        check(&format!("{d}"), &g, &inputs, &[], true);
        let (_, got) = both(&g, &inputs, &[]);
        // Compares bytes too, because `Scalar` does not keep the payload of a NaN.
        if d.bits() == 8 {
            assert_eq!((got[0].bytes(), got[2].bytes()), (x.bytes(), x.bytes()), "{d}");
        }
    }
}

#[test]
fn every_scalar_op_on_every_small_type() {
    let mut rng = Rng(3);
    for row in ROWS {
        for d in small().filter(|d| row.op.takes(*d)) {
            let mut g = Graph::new();
            let n = 301usize;
            let cond = row.rule == Rule::Select;
            let ty = |k: usize| if cond && k == 0 { DType::Bool } else { d };
            let x: Vec<NodeId> =
                (0..row.arity).map(|k| g.input(&k.to_string(), TensorType::new(ty(k), [n]))).collect();
            let y = g.scalar(row.op, &x).unwrap();
            g.output("y", y);
            let inputs: Vec<ConstData> = (0..row.arity).map(|k| rng.data(ty(k), &[n])).collect();
            // Computations in f32 and in f64 differ in the last place and at poles.
            let loose = row.ulps > 0.0 || row.op == ScalarOp::Sign;
            check(&format!("{} of {d}", row.name), &g, &inputs, &[], !loose);
        }
    }
}

#[test]
fn reductions_scans_and_products() {
    let mut rng = Rng(4);
    let kinds = [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min];
    for d in small() {
        let exact = !d.is_float();
        for kind in kinds {
            for n in [0usize, 1, 5] {
                let g = unary(d, &[3, n], |g, x| g.reduce(kind, x, &[1], false)).unwrap();
                check(&format!("{kind:?} of {n} {d}"), &g, &[rng.data(d, &[3, n])], &[], exact);
            }
            for (exclusive, reverse) in [(false, false), (true, false), (true, true)] {
                let g = unary(d, &[3, 4], |g, x| g.scan(kind, x, 1, exclusive, reverse)).unwrap();
                check(&format!("scan {kind:?} of {d}"), &g, &[rng.data(d, &[3, 4])], &[], exact);
            }
        }
        for scatter in [ScatterKind::Add, ScatterKind::Mul, ScatterKind::Max, ScatterKind::Min] {
            let mut g = Graph::new();
            let x = g.input("x", TensorType::new(d, [5usize]));
            let u = g.input("u", TensorType::new(d, [2usize]));
            let i = g.constant(ConstData::from_slice(&[2], &[4i64, 1]).unwrap());
            let y = g.scatter_elements(x, i, u, 0, scatter).unwrap();
            g.output("y", y);
            check(&format!("{scatter:?} of {d}"), &g, &[rng.data(d, &[5]), rng.data(d, &[2])], &[], exact);
        }
        let x = rng.data(d, &[4, 6]);
        for max in [false, true] {
            let g = unary(d, &x.dims, |g, x| g.argreduce(max, x, 1, false, false)).unwrap();
            check(&format!("argreduce of {d}"), &g, std::slice::from_ref(&x), &[], true);
            let g = unary(d, &x.dims, |g, x| g.argsort(x, 1, max)).unwrap();
            check(&format!("argsort of {d}"), &g, std::slice::from_ref(&x), &[], true);
        }
        let mut g = Graph::new();
        let a = g.input("a", TensorType::new(d, [3usize, 4]));
        let b = g.input("b", TensorType::new(d, [4usize, 2]));
        let y = g.matmul(a, b).unwrap();
        g.output("y", y);
        check(&format!("matmul of {d}"), &g, &[rng.data(d, &[3, 4]), rng.data(d, &[4, 2])], &[], exact);
        let pool = Pool {
            kind: PoolKind::Max,
            kernel: [2].into_iter().collect(),
            stride: [2].into_iter().collect(),
            pad: [(2, 1)].into_iter().collect(),
            dilation: [1].into_iter().collect(),
        };
        let g = unary(d, &[1, 2, 5], |g, x| g.pool(x, pool.clone())).unwrap();
        check(&format!("pool of {d}"), &g, &[rng.data(d, &[1, 2, 5])], &[], exact);
        if d.is_float() {
            let mut g = Graph::new();
            let x = g.input("x", TensorType::new(d, [1usize, 2, 5]));
            let w = g.input("w", TensorType::new(d, [3usize, 2, 2]));
            let y = g.conv(x, w, Conv::new(1)).unwrap();
            g.output("y", y);
            check(
                &format!("conv of {d}"),
                &g,
                &[rng.data(d, &[1, 2, 5]), rng.data(d, &[3, 2, 2])],
                &[],
                false,
            );
        }
    }
}

#[test]
fn leaves_states_and_large_constants() {
    let mut rng = Rng(5);
    for d in small() {
        let mut g = Graph::new();
        let s = g.input("s", TensorType::new(d, [7usize]));
        let a = g.arg(d);
        let a = g.expand(a, &Shape::from([7usize])).unwrap();
        let yes = g.full(DType::Bool, [7usize], true);
        let y = g.select(yes, a, s).unwrap();
        let o = g.output("next", y);
        g.state(0, o).unwrap();
        let f = g.full(d, [3usize], 1.5);
        g.output("full", f);
        let i = g.iota(d, [2usize, 40], 1).unwrap();
        g.output("iota", i);
        let c = g.constant(rng.data(d, &[3, 3]));
        g.output("const", c);
        let big = g.constant(rng.data(d, &[70_001]));
        let tail = g.narrow(big, 0, 69_990, 11).unwrap();
        g.output("tail", tail);
        let v = Scalar::F(2.0).cast(d);
        check(&format!("{d}"), &g, &[rng.data(d, &[7])], &[v], true);
        assert_eq!(run(&g).unwrap().states(), [(0, 0)]);
    }
}

#[test]
fn saturating_casts_stop_at_the_ends() {
    let mut rng = Rng(6);
    for from in DType::all() {
        let x = wide_values(from, &mut rng);
        for to in DType::all().filter(|to| *to != DType::F8E8M0) {
            let g = unary(from, &x.dims, |g, x| g.cast_saturating(x, to)).unwrap();
            let y = eval(&g, std::slice::from_ref(&x), &[]).unwrap().remove(0);
            let (lo, hi) = to.finite_range();
            for (a, b) in x.scalars().zip(y.scalars()) {
                let exact = match a {
                    _ if to == DType::Bool || from == to => a.cast(to),
                    Scalar::F(v) if v.is_nan() => a.cast(to),
                    Scalar::F(v) => Scalar::F(v.clamp(lo, hi)).cast(to),
                    v if v.as_f64() > hi => Scalar::F(hi).cast(to),
                    v if v.as_f64() < lo => Scalar::F(lo).cast(to),
                    // The top of i64, which f64 cannot distinguish from 2^63.
                    Scalar::U(u) if to == DType::I64 && u > i64::MAX as u64 => Scalar::I(i64::MAX),
                    v => v.cast(to),
                };
                assert!(same(b, exact), "{from} {a:?} to {to}: {b:?} instead of {exact:?}");
            }
            if !to.is_native() || !from.is_native() {
                check(&format!("saturating {from} to {to}"), &g, std::slice::from_ref(&x), &[], true);
            }
        }
    }
}

#[test]
fn powers_of_two_by_every_rounding() {
    let p = |k: i32| 2f64.powi(k);
    let mut rng = Rng(7);
    for from in DType::all() {
        let x = wide_values(from, &mut rng);
        for (rounding, saturate) in [Rounding::Nearest, Rounding::Up, Rounding::Down]
            .into_iter()
            .flat_map(|r| [(r, false), (r, true)])
        {
            let g = unary(from, &x.dims, |g, x| g.cast_e8m0(x, rounding, saturate)).unwrap();
            let y = eval(&g, std::slice::from_ref(&x), &[]).unwrap().remove(0);
            for (a, b) in x.scalars().zip(y.scalars()) {
                // 64-bit integers are compared exactly, because f64 rounds them.
                let (v, int) = match a {
                    Scalar::U(u) => (u as f64, Some(u as i128)),
                    Scalar::I(i) => (i as f64, Some(i as i128)),
                    s => (s.as_f64(), None),
                };
                let low = match int {
                    Some(i) if i > 0 => p(i.ilog2() as i32),
                    _ if v > 0.0 && v.is_finite() => {
                        let e = v.log2().floor() as i32;
                        // The logarithm may have been rounded up.
                        if e > -1022 && p(e) > v { p(e - 1) } else { p(e.max(-1022)) }
                    }
                    _ => 0.0,
                };
                let above = int.map_or(v > low, |i| i as f64 > low || i > 0 && i & (i - 1) != 0);
                let half = int.map_or(v >= 1.5 * low, |i| i > 0 && 2 * i >= 3 << i.ilog2());
                let want = if v.is_nan() || v < 0.0 {
                    f64::NAN
                } else if v < p(-127) {
                    if saturate { p(-127) } else { f64::NAN }
                } else if v > p(127) {
                    if saturate { p(127) } else { f64::NAN }
                } else {
                    match rounding {
                        Rounding::Up if above => 2.0 * low,
                        Rounding::Nearest if half => 2.0 * low,
                        _ => low,
                    }
                };
                assert!(
                    same(b, Scalar::F(want)),
                    "{from} {a:?} {rounding:?} {saturate}: {b:?} instead of {want}"
                );
            }
            check(&format!("{from} {rounding:?}"), &g, std::slice::from_ref(&x), &[], true);
        }
    }
}

#[derive(Debug)]
struct Twice;

impl crate::custom::CustomOp for Twice {
    fn name(&self) -> &str {
        "twice"
    }
    fn infer(&self, x: &[TensorType]) -> Result<TensorType> {
        Ok(x[0].clone())
    }
    fn reference(&self, x: &[ConstData]) -> Result<ConstData> {
        Ok(x[0].clone())
    }
}

#[test]
fn custom_ops_take_wider_types() {
    let g = unary(DType::I4, &[3], |g, x| g.custom(Arc::new(Twice), &[x])).unwrap();
    let e = run(&g).unwrap_err();
    assert!(matches!(&e, Error::Unsupported { what, .. } if what.contains("i4")), "{e}");
}

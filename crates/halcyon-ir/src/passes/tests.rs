//! Passes must not change a bit of any output.

use super::*;
use crate::composite::CompositeKind;
use crate::data::ConstData;
use crate::dtype::{DType, Scalar};
use crate::error::{Result, Span};
use crate::graph::{Graph, NodeId};
use crate::ops::element_wise::{ROWS, Rule, ScalarOp};
use crate::ops::{Op, ReduceKind};
use crate::reference::eval;
use crate::shape::{Dim, Shape, TensorType};

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((x >> 33) as usize) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn data(&mut self, d: DType, dims: &[usize]) -> ConstData {
        let n = dims.iter().product();
        let special = [0.0, -0.0, 1.0, -1.0, 2.5, -7.0, 100.0, f64::NAN, f64::INFINITY, 0.1];
        let flat = self.below(4) == 0;
        let v0 = self.pick(&special);
        let v: Vec<f64> = (0..n).map(|_| if flat { v0 } else { self.pick(&special) }).collect();
        let c = ConstData::from_slice(dims, &v).unwrap();
        let mut b = vec![];
        c.scalars().for_each(|s| b.extend_from_slice(&s.to_bytes(d)[..d.size()]));
        ConstData::new(d, dims, std::sync::Arc::new(b)).unwrap()
    }
}

const TYPES: [DType; 7] = [DType::F32, DType::F16, DType::F64, DType::I32, DType::U8, DType::I8, DType::Bool];

/// Adds one random node over the existing ones. Returns the builder's errors.
fn grow(g: &mut Graph, r: &mut Rng) -> Result<NodeId> {
    let n = g.nodes().len();
    // Mostly recent nodes, so that ops build on each other.
    let any =
        |r: &mut Rng| NodeId((if r.below(3) == 0 { r.below(n) } else { n - 1 - r.below(n.min(6)) }) as u32);
    let x = any(r);
    let s = g.shape(x).clone();
    let rank = s.rank();
    let axis = if rank > 0 { r.below(rank) } else { 0 };
    match r.below(20) {
        0..=4 => {
            let op = ROWS[r.below(ROWS.len())].op;
            let mut v = vec![x];
            while v.len() < op.arity() {
                let y = match r.below(5) {
                    0 => g.lit(x, 1.0),
                    1 => g.lit(x, r.pick(&[0.0, -0.0, -1.0, f64::INFINITY, f64::NEG_INFINITY])),
                    2 => x,
                    3 => {
                        let a = any(r);
                        g.cast(a, g.dtype(x))?
                    }
                    _ => any(r),
                };
                v.push(y);
            }
            if op.row().rule == Rule::Select {
                v[0] = g.cast(v[0], DType::Bool)?;
            }
            g.scalar(op, &v)
        }
        5 => g.cast(x, r.pick(&TYPES)),
        6 => {
            let mut p: Vec<usize> = (0..rank).collect();
            if rank > 1 {
                p.swap(axis, r.below(rank));
            }
            g.push(Op::Permute(p.into()), &[x], None)
        }
        7 => {
            let n = s.numel();
            let shapes = [Shape::from([n]), Shape::from([Dim::from(1), n]), s.clone()];
            let ty = TensorType::new(g.dtype(x), &shapes[r.below(3)]);
            g.push(Op::Reshape, &[x], Some(ty))
        }
        8 => {
            let mut t = s.clone();
            if rank > 0 && s[axis].is(1) {
                t.0[axis] = Dim::from(2);
            } else {
                t.0.insert(0, Dim::from(1 + r.below(2)));
            }
            g.push(Op::Expand, &[x], Some(TensorType::new(g.dtype(x), t)))
        }
        9 | 10 => {
            let (mut start, mut step, mut len) = (vec![], vec![], vec![]);
            for d in s.dims()? {
                let (a, t) = (r.below(d.max(1)), r.pick(&[1, 1, 2, -1, -2i64]));
                let room =
                    if t > 0 { (d.max(1) - 1 - a) / t as usize } else { a / t.unsigned_abs() as usize };
                start.push(Dim::from(a));
                step.push(t);
                len.push(Dim::from(if d == 0 { 0 } else { 1 + r.below(room + 1) }));
            }
            g.slice(x, &start, &step, &len)
        }
        11 => {
            let lo: Vec<usize> = (0..rank).map(|_| r.below(2)).collect();
            let hi: Vec<usize> = (0..rank).map(|_| r.below(2)).collect();
            let op = Op::Pad {
                lo: lo.as_slice().into(),
                hi: hi.as_slice().into(),
                value: Scalar::F(r.pick(&[0.0, 1.0])).cast(g.dtype(x)),
            };
            g.push(op, &[x], None)
        }
        12 => {
            let y = any(r);
            let v = [x, y, x];
            g.push(Op::Concat { axis }, &v[..1 + r.below(3)], None)
        }
        13 => {
            let k = r.pick(&[ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min]);
            g.reduce(k, x, &[axis], r.below(2) == 0)
        }
        14 => {
            let d = r.pick(&TYPES);
            let dims = r.pick(&[[2, 3], [1, 3], [2, 1]]);
            let c = r.data(d, &dims);
            Ok(g.constant(c))
        }
        15 => {
            let v = Scalar::F(r.pick(&[0.0, 1.0, -1.0, 3.0, -0.0]));
            let (d, like) = (r.pick(&TYPES), g.shape(x).clone());
            Ok(g.full(d, like, v))
        }
        16 => g.softmax(x, axis),
        _ => {
            // A copy of an existing node.
            let n = g.node(x).clone();
            if matches!(n.op, Op::Input(_) | Op::Arg(_)) {
                return g.scan(ReduceKind::Sum, x, axis, false, false);
            }
            Ok(g.push_unchecked(n))
        }
    }
}

fn random(r: &mut Rng) -> Graph {
    let mut g = Graph::new();
    for k in 0..3 {
        g.span = Span::new(format!("input {k}"));
        let d = r.pick(&TYPES);
        g.input(&format!("in{k}"), TensorType::new(d, [[2usize, 3], [1, 3], [2, 1]][r.below(3)]));
    }
    g.arg(DType::F32);
    for k in 0..120 {
        g.span = Span::new(format!("line {k}"));
        let before = g.clone();
        match grow(&mut g, r) {
            Ok(n) if g.shape(n).numel().known().is_some_and(|n| n <= 256) && g.shape(n).rank() < 6 => {}
            _ => g = before,
        }
    }
    let n = g.nodes().len();
    for k in 0..8 {
        let o = NodeId((n - 1 - r.below(n.min(30))) as u32);
        g.output(&format!("out{k}"), o);
    }
    for i in 0..3 {
        for o in 0..8 {
            if r.below(2) == 0 {
                // An error if the types differ.
                let _ = g.state(i, o);
            }
        }
    }
    g
}

fn same(a: &ConstData, b: &ConstData) -> bool {
    let nan = |s: Scalar| s.as_f64().is_nan();
    a.dtype == b.dtype
        && a.dims == b.dims
        && a.scalars().zip(b.scalars()).all(|(x, y)| x == y || (nan(x) && nan(y)))
}

type Pass = fn(&Graph) -> Result<(Graph, usize)>;

fn inline_all(g: &Graph) -> Result<(Graph, usize)> {
    let n = g.nodes().iter().filter(|n| matches!(n.op, Op::Composite(_))).count();
    let (h, _) = inline::inline_composites(g, &|_| false)?;
    assert!(!h.nodes().iter().any(|n| matches!(n.op, Op::Composite(_))));
    Ok((h, n))
}

#[test]
fn random_graphs_keep_their_values() {
    let passes: [(&str, Pass); 4] =
        [("fold", fold::run), ("cse", cse::run), ("simplify", simplify::run), ("inline", inline_all)];
    let seed = halcyon_test_host::any_seed();
    let mut r = Rng(seed);
    let mut total = [0; 4];
    for round in 0..300 {
        let place = format!("round {round}, HALCYON_SEED={seed}");
        let g = random(&mut r);
        g.check().unwrap();
        let x: Vec<ConstData> =
            g.inputs().iter().map(|i| r.data(g.dtype(i.node), &g.shape(i.node).dims().unwrap())).collect();
        let want = eval(&g, &x, &[Scalar::F(2.0)]).unwrap();
        let agree = |h: &Graph, name: &str| {
            h.check().unwrap_or_else(|e| panic!("{name}, {place}: {e}\n{h}"));
            let names = |g: &Graph| g.inputs().iter().map(|i| i.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&g), names(h), "{name}, {place}");
            assert_eq!((g.args(), g.states()), (h.args(), h.states()), "{name}, {place}");
            let got = eval(h, &x, &[Scalar::F(2.0)]).unwrap();
            for (k, (a, b)) in want.iter().zip(&got).enumerate() {
                assert!(same(a, b), "{name}, output {k}, {place}: {a:?} became {b:?}\n{g}\n{h}");
            }
        };
        let mut all = g.clone();
        for (k, (name, pass)) in passes.iter().enumerate() {
            let (h, n) = pass(&g).unwrap();
            total[k] += n;
            agree(&h, name);
            let (h2, again) = pass(&h).unwrap();
            assert_eq!(again, 0, "{name} finds more in its own result, {place}\n{g}\n{h}\n{h2}");
            if *name == "inline" {
                // `optimize` inlines only graphs that inlining changes.
                let changed = format!("{g:?}") != format!("{h:?}");
                assert_eq!(
                    (inlining_changes(&g), inlining_changes(&h)),
                    (changed, false),
                    "{place}\n{g}\n{h}"
                );
            }
            all = pass(&all).unwrap().0;
            agree(&all, &format!("everything up to {name}"));
        }
        // Applied repeatedly, the passes reach a fixed point.
        let rest = (0..20).any(|_| {
            let mut n = 0;
            for (_, pass) in &passes {
                let (h, k) = pass(&all).unwrap();
                all = h;
                n += k;
            }
            n == 0
        });
        assert!(rest, "{place}");
        agree(&all, "the fixed point");
    }
    assert!(total.iter().all(|n| *n > 100), "the graphs exercise too little: {total:?}");
}

fn input(g: &mut Graph, d: DType, dims: &[usize]) -> NodeId {
    g.input("x", TensorType::new(d, dims))
}

/// Number of nodes left after simplifying `build(x)`, inputs included.
fn left(d: DType, build: impl Fn(&mut Graph, NodeId) -> Result<NodeId>) -> usize {
    let mut g = Graph::new();
    let x = input(&mut g, d, &[4, 6]);
    let y = build(&mut g, x).unwrap();
    g.output("y", y);
    let before = g.nodes().len();
    let (h, n) = simplify::run(&g).unwrap();
    assert_eq!(n > 0, h != g, "{before} nodes\n{g}\n{h}");
    h.nodes().len()
}

#[test]
fn identities() {
    use DType::*;
    let f = |b: &dyn Fn(&mut Graph, NodeId) -> Result<NodeId>| left(F32, b);
    assert_eq!(
        f(&|g, x| {
            let y = g.neg(x)?;
            g.neg(y)
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let k = g.lit(x, 1.0);
            let y = g.mul(k, x)?;
            g.div(y, k)
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let k = g.lit(x, -0.0);
            g.add(x, k)
        }),
        1
    );
    // +0 is not neutral: -0 + 0 is +0.
    assert_eq!(
        f(&|g, x| {
            let k = g.lit(x, 0.0);
            g.add(x, k)
        }),
        4
    );
    assert_eq!(
        f(&|g, x| {
            let k = g.lit(x, 0.0);
            g.sub(x, k)
        }),
        1
    );
    assert_eq!(f(&|g, x| g.max(x, x)), 1);
    assert_eq!(
        f(&|g, x| {
            let y = g.transpose(x, 0, 1)?;
            g.transpose(y, 0, 1)
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.reshape(x, [24usize])?;
            let y = g.reshape(y, [3usize, 8])?;
            g.reshape(y, [4usize, 6])
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.flip(x, &[0, 1])?;
            g.flip(y, &[1, 0])
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.narrow(x, 1, 1usize, 4usize)?;
            g.narrow(y, 1, 2usize, 2usize)
        }),
        2
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.cast(x, F64)?;
            g.cast(y, F32)
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.cast(x, F16)?;
            g.cast(y, F32)
        }),
        3
    );
    assert_eq!(
        f(&|g, x| {
            let c = g.isnan(x)?;
            let c = g.not(c)?;
            let n = g.neg(x)?;
            g.select(c, x, n)
        }),
        4
    );
    assert_eq!(
        f(&|g, x| {
            let c = g.full(Bool, [4usize, 6], true);
            let n = g.neg(x)?;
            g.select(c, x, n)
        }),
        1
    );
    assert_eq!(
        f(&|g, x| {
            let y = g.floor(x)?;
            g.round(y)
        }),
        2
    );
    // By way of a float, 200 saturates to 127; a direct cast wraps it to -56.
    assert_eq!(
        left(U8, |g, x| {
            let y = g.cast(x, F32)?;
            g.cast(y, I8)
        }),
        3
    );
    assert_eq!(
        left(U8, |g, x| {
            let y = g.cast(x, I32)?;
            g.cast(y, I8)
        }),
        2
    );
    assert_eq!(
        left(I32, |g, x| {
            let k = g.lit(x, 0);
            g.add(x, k)
        }),
        1
    );
    assert_eq!(
        left(Bool, |g, x| {
            let y = g.not(x)?;
            g.not(y)
        }),
        1
    );
    assert_eq!(
        left(F32, |g, x| {
            g.exp(x)?;
            g.neg(x)
        }),
        2
    );
}

#[test]
fn literals_fold_without_elements_and_constants_do_not_grow() {
    let mut g = Graph::new();
    let n = Dim::sym("n");
    let a = g.full(DType::F32, [n, 1_000_000.into()], 2.0);
    let b = g.exp(a).unwrap();
    let c = g.transpose(b, 0, 1).unwrap();
    let d = g.cast(c, DType::F16).unwrap();
    g.output("d", d);
    let (h, _) = fold::run(&g).unwrap();
    let want = Scalar::F(2f64.exp()).cast(DType::F32).cast(DType::F16);
    assert_eq!(h.nodes().len(), 1);
    assert_eq!(h.nodes()[0].op, Op::Full(want));

    let mut g = Graph::new();
    let c = g.constant(ConstData::from_slice(&[3, 1], &[1.0f32, 2.0, 3.0]).unwrap());
    let e = g.expand(c, &[3usize, 1000].into()).unwrap();
    let k = g.constant(ConstData::from_slice(&[3, 1], &[1.0f32, 2.0, 4.0]).unwrap());
    let m = g.mul(c, k).unwrap();
    let s = g.mul(m, e).unwrap();
    let s = g.sum(s, &[1], false).unwrap();
    g.output("e", e);
    g.output("s", s);
    let (h, _) = fold::run(&g).unwrap();
    let out: Vec<&Op> = h.outputs().iter().map(|o| &h.node(o.node).op).collect();
    assert_eq!(out[0], &Op::Expand);
    assert!(matches!(out[1], Op::Const(c) if c.to_vec::<f64>() == [1000.0, 8000.0, 36000.0]));
    // `run_lean`, for a stored graph, does not fold a result that is larger than its operands. It folds
    // results that are computed from such a result.
    let mut g = Graph::new();
    let bytes: Vec<i8> = (0..100).collect();
    let w = g.constant(ConstData::from_slice(&[100], &bytes).unwrap());
    let wide = g.cast(w, DType::F32).unwrap();
    let wider = g.cast(wide, DType::F64).unwrap();
    let narrow = g.cast(wider, DType::F32).unwrap();
    let sum = g.sum(wider, &[0], false).unwrap();
    let same = g.neg(w).unwrap();
    let few = g.constant(ConstData::from_slice(&[4], &[1i8, 2, 3, 4]).unwrap());
    let few = g.cast(few, DType::F32).unwrap();
    for (name, node) in [("narrow", narrow), ("sum", sum), ("same", same), ("few", few)] {
        g.output(name, node);
    }
    let (whole, lean) = (fold::run(&g).unwrap().0, fold::run_lean(&g).unwrap().0);
    let constant = |g: &Graph| -> Vec<bool> {
        g.outputs().iter().map(|o| matches!(g.node(o.node).op, Op::Const(_) | Op::Full(_))).collect()
    };
    assert_eq!((constant(&whole), constant(&lean)), (vec![true; 4], vec![false, true, true, true]));
    // An index out of range is reported when the graph runs; folding neither hides nor raises the error.
    let mut g = Graph::new();
    let c = g.constant(ConstData::from_slice(&[2], &[1.0f32, 2.0]).unwrap());
    let i = g.constant(ConstData::from_slice(&[2], &[0i64, 7]).unwrap());
    let y = g.gather(c, i, 0).unwrap();
    g.output("y", y);
    let (h, n) = fold::run(&g).unwrap();
    assert_eq!((n, h.nodes().len()), (0, 3));
}

#[test]
fn cse_merges_whatever_is_equal() {
    let mut g = Graph::new();
    let x = input(&mut g, DType::F32, &[4, 6]);
    let y = input(&mut g, DType::F32, &[4, 6]);
    let dead = input(&mut g, DType::I8, &[1]);
    let (a, b) = (g.add(x, y).unwrap(), g.add(y, x).unwrap());
    let (s, t) = (g.softmax(a, 1).unwrap(), g.softmax(b, 1).unwrap());
    let (d, e) = (g.sub(s, y).unwrap(), g.sub(y, t).unwrap());
    let (z, w) = (g.full(DType::F32, [2usize], 0.0), g.full(DType::F32, [2usize], -0.0));
    for n in [d, e, z, w] {
        g.output("o", n);
    }
    let (h, n) = cse::run(&g).unwrap();
    assert_eq!((n, h.nodes().len()), (2, g.nodes().len() - 2));
    assert_eq!((h.inputs().len(), h.ty(h.inputs()[2].node)), (3, g.ty(dead)));
}

#[test]
fn inlining_keeps_claimed_composites_and_spans() {
    let mut g = Graph::new();
    g.span = Span::new("block.rs:9");
    let q = g.input("q", TensorType::new(DType::F32, [1usize, 2, 3, 4]));
    let y = g.attention(q, q, q, None, true, 0.5).unwrap();
    let y = g.scalar(ScalarOp::Exp, &[y]).unwrap();
    g.output("y", y);
    let names = |g: &Graph| -> Vec<String> {
        g.nodes().iter().filter(|n| matches!(n.op, Op::Composite(_))).map(|n| n.op.name()).collect()
    };
    let (some, map) = inline::inline_composites(&g, &|c| c.kind == CompositeKind::Softmax).unwrap();
    assert_eq!(names(&some), ["softmax"]);
    assert_eq!(some.node(map[y.index()]).op, Op::Scalar(ScalarOp::Exp));
    assert!(some.nodes().iter().all(|n| n.span == Span::new("block.rs:9")));
    let (all, _) = inline::inline_composites(&g, &|_| false).unwrap();
    assert!(names(&all).is_empty());
    let c =
        ConstData::from_slice(&[1, 2, 3, 4], &(0..24).map(|i| i as f32 / 24.0).collect::<Vec<_>>()).unwrap();
    let run = |g: &Graph| eval(g, std::slice::from_ref(&c), &[]).unwrap();
    assert_eq!(run(&g), run(&all));
    assert_eq!(run(&g), run(&some));
}

#[test]
fn a_training_step_shrinks_and_keeps_its_gradients() {
    let mut g = Graph::new();
    let t = |d: &[usize]| TensorType::new(DType::F32, d);
    let x = g.input("x", t(&[4, 6]));
    let w = g.input("w", t(&[6, 5]));
    let k = g.input("scale", t(&[5]));
    let h = g.matmul(x, w).unwrap();
    let h = g.gelu(h).unwrap();
    let h = g.layer_norm(h, k, None, 1, 1e-5).unwrap();
    let labels = g.constant(ConstData::from_slice(&[4], &[0i64, 4, 2, 2]).unwrap());
    let loss = g.cross_entropy(h, labels, Some(-100)).unwrap();
    g.output("loss", loss);
    for d in crate::grad::gradients(&mut g, loss, &[w, k], None).unwrap() {
        g.output("d", d.unwrap());
    }
    let mut h = inline::inline_composites(&g, &|_| false).unwrap().0;
    let before = h.nodes().len();
    for pass in [fold::run, simplify::run, cse::run, fold::run, simplify::run] {
        h = pass(&h).unwrap().0;
        h.check().unwrap();
    }
    // The forward parts repeated by the gradients have been merged.
    assert!(h.nodes().len() * 4 < before * 3, "{before} to {}\n{h}", h.nodes().len());
    let fill = |d: &[usize], s: f32| {
        let n = d.iter().product::<usize>();
        ConstData::from_slice(d, &(0..n).map(|i| (i as f32 * s).sin()).collect::<Vec<_>>()).unwrap()
    };
    let data = [fill(&[4, 6], 0.7), fill(&[6, 5], 1.3), fill(&[5], 2.1)];
    assert_eq!(eval(&g, &data, &[]).unwrap(), eval(&h, &data, &[]).unwrap());
}

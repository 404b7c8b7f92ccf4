//! Checks the gradient of every op against central differences in f64, on inputs that differ from run to run.
//! A failure prints the seed; set `HALCYON_SEED` to repeat the run.

use super::*;
use crate::custom::CustomOp;
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::Span;
use crate::graph::OutputSpec;
use crate::ops::element_wise::{ROWS, Rule, ScalarOp};
use crate::ops::{Conv, Pool, PoolKind, ReduceKind, ScatterKind};
use crate::reference::{eval, promote};
use crate::shape::{Dim, Shape, TensorType};
use std::sync::Arc;

struct Rng(u64);

impl Rng {
    fn fresh() -> Rng {
        Rng(halcyon_test_host::any_seed())
    }

    /// SplitMix64 (Steele, Lea, Flood 2014), as a number in `0..1`.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn data(&mut self, dims: &[usize], (lo, hi): (f64, f64)) -> ConstData {
        let n = dims.iter().product();
        let v: Vec<f64> = (0..n).map(|_| lo + (hi - lo) * self.next()).collect();
        ConstData::from_slice(dims, &v).unwrap()
    }

    fn index(&mut self, dims: &[usize], n: usize) -> ConstData {
        let k = dims.iter().product();
        let v: Vec<i64> = (0..k)
            .map(|_| (self.next() * n as f64) as i64 - if self.next() < 0.3 { n as i64 } else { 0 })
            .collect();
        ConstData::from_slice(dims, &v).unwrap()
    }
}

/// `Σ x·r` with random `r`, so that every element has a different incoming gradient.
fn weighted(g: &mut Graph, x: NodeId, r: &mut Rng) -> Result<NodeId> {
    let dims = g.shape(x).dims()?;
    let w = r.data(&dims, (0.5, 1.5));
    let w = g.constant(w);
    let w = g.cast(w, g.dtype(x))?;
    let p = g.mul(x, w)?;
    let axes: Vec<usize> = (0..dims.len()).collect();
    g.sum(p, &axes, false)
}

type Build<'a> = &'a dyn Fn(&mut Graph, &[NodeId], &mut Rng) -> Result<NodeId>;
const ANY: (f64, f64) = (-2.0, 2.0);

/// Builds `Σ r·build(x)` (with random `r`) and its gradients in f32, evaluates both in f64, and compares the
/// gradients with central differences.
fn check_in(name: &str, shapes: &[&[usize]], domain: (f64, f64), build: Build) {
    let mut r = Rng::fresh();
    let seed = r.0;
    let mut g = Graph::new();
    let x: Vec<NodeId> = shapes.iter().map(|s| g.input("x", TensorType::new(DType::F32, *s))).collect();
    let y = build(&mut g, &x, &mut r).unwrap_or_else(|e| panic!("{name}: {e}"));
    let loss = weighted(&mut g, y, &mut r).unwrap();
    let d = gradients(&mut g, loss, &x, None).unwrap_or_else(|e| panic!("{name}: {e}"));
    g.check().unwrap();
    let mut value = g.clone();
    value.set_outputs(vec![OutputSpec { name: "loss".into(), node: loss }]);
    let value = promote(&value).unwrap();
    for (k, d) in d.iter().enumerate() {
        let d = d.unwrap_or_else(|| panic!("{name}: operand {k} has no gradient"));
        assert_eq!(g.ty(d), g.ty(x[k]), "{name}");
        g.output("d", d);
    }
    let data: Vec<ConstData> = shapes.iter().map(|s| r.data(s, domain)).collect();
    let got = eval(&promote(&g).unwrap(), &data, &[]).unwrap();
    for k in 0..data.len() {
        let base: Vec<f64> = data[k].to_vec();
        let got: Vec<f64> = got[k].to_vec();
        for i in 0..base.len() {
            let slope = |h: f64| {
                let at = |v: f64| {
                    let (mut p, mut all) = (base.clone(), data.clone());
                    p[i] = v;
                    all[k] = ConstData::from_slice(&data[k].dims, &p).unwrap();
                    eval(&value, &all, &[]).unwrap()[0].to_vec::<f64>()[0]
                };
                (at(base[i] + h) - at(base[i] - h)) / (2.0 * h)
            };
            let near = |s: f64, tol: f64| (s - got[i]).abs() <= tol * (1.0 + s.abs());
            // The second, finer difference is for inputs that happen to lie next to a kink.
            let (a, b) = (slope(1e-5), slope(1e-7));
            assert!(
                near(a, 3e-6) || near(b, 1e-4),
                "{name}: operand {k}, element {i} at {}: gradient {}, differences {a} and {b} (HALCYON_SEED={seed})",
                base[i],
                got[i]
            );
        }
    }
}

fn check(name: &str, shapes: &[&[usize]], build: Build) {
    check_in(name, shapes, ANY, build);
}

/// Second order: differentiates a weighted sum of gradients.
fn check_twice(name: &str, shapes: &[&[usize]], domain: (f64, f64), build: Build) {
    check_in(name, shapes, domain, &|g, x, r| {
        let y = build(g, x, r)?;
        let loss = weighted(g, y, r)?;
        let d = gradients(g, loss, x, None)?;
        let mut total = g.lit(loss, 0.0);
        for d in d.into_iter().flatten() {
            let s = weighted(g, d, r)?;
            total = g.add(total, s)?;
        }
        Ok(total)
    });
}

#[test]
fn gradients_of_scalar_ops_agree_with_differences() {
    for row in ROWS.iter().filter(|r| r.float.is_some()) {
        let grad = row.gradient;
        if row.rule == Rule::Test {
            assert!(matches!(grad, ScalarGrad::Zero), "{}", row.name);
            continue;
        }
        let floats = row.arity - (row.rule == Rule::Select) as usize;
        let shapes: Vec<&[usize]> = vec![&[9]; floats];
        let build = |g: &mut Graph, x: &[NodeId], r: &mut Rng| {
            let mut ops = x.to_vec();
            if row.rule == Rule::Select {
                let c = r.data(&[9], ANY);
                let c = g.constant(c);
                let z = g.lit(c, 0.0);
                ops.insert(0, g.lt(c, z)?);
            }
            let y = g.scalar(row.op, &ops)?;
            if matches!(grad, ScalarGrad::Zero) {
                // `gradients` returns `None` for an operand that gets no gradient. Add `x[0]`, so that there
                // is a gradient to compare.
                return g.add(y, x[0]);
            }
            Ok(y)
        };
        check_in(row.name, &shapes, row.domain, &build);
    }
    for row in ROWS.iter().filter(|r| r.float.is_none()) {
        assert!(matches!(row.gradient, ScalarGrad::Zero), "{} takes no floats", row.name);
    }
}

#[test]
fn negative_arguments_of_remainders_and_powers() {
    let away = |g: &mut Graph, x: NodeId| {
        // Divisors of both signs, away from zero.
        let s = g.sign(x)?;
        g.add(x, s)
    };
    for op in [ScalarOp::Rem, ScalarOp::Mod, ScalarOp::Div, ScalarOp::Atan2] {
        check(op.name(), &[&[12], &[12]], &|g, x, _| {
            let d = away(g, x[1])?;
            g.scalar(op, &[x[0], d])
        });
    }
    check("square of negatives", &[&[8]], &|g, x, _| {
        let two = g.lit(x[0], 2.0);
        g.pow(x[0], two)
    });
}

fn run(g: &mut Graph, x: &[ConstData], out: &[NodeId]) -> Vec<Vec<f64>> {
    let specs = out.iter().map(|n| OutputSpec { name: "y".into(), node: *n });
    g.set_outputs(specs.collect());
    eval(g, x, &[]).unwrap().iter().map(|c| c.to_vec()).collect()
}

fn floats(dims: &[usize], v: &[f32]) -> ConstData {
    ConstData::from_slice(dims, v).unwrap()
}

/// Gradient of the sum of `build(x)` at `v`.
fn at(v: &[f32], build: impl Fn(&mut Graph, NodeId) -> Result<NodeId>) -> Vec<f64> {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [v.len()]));
    let y = build(&mut g, x).unwrap();
    let seed = g.full(DType::F32, g.shape(y).clone(), 1.0);
    let d = gradients(&mut g, y, &[x], Some(seed)).unwrap()[0].unwrap();
    run(&mut g, &[floats(&[v.len()], v)], &[d]).remove(0)
}

#[test]
fn special_points() {
    let z = |g: &mut Graph, x| Ok(g.lit(x, 0.0));
    assert_eq!(
        at(&[0.0, 1.0], |g, x| {
            let k = z(g, x)?;
            g.pow(x, k)
        }),
        [0.0, 0.0]
    );
    assert_eq!(
        at(&[0.0, 3.0], |g, x| {
            let k = g.lit(x, 1.0);
            g.pow(x, k)
        }),
        [1.0, 1.0]
    );
    assert_eq!(at(&[0.0, -1.0, 2.0], |g, x| g.relu(x)), [0.0, 0.0, 1.0]);
    assert_eq!(at(&[5.0, 1.0], |g, x| g.max(x, x)), [1.0, 1.0]);
    assert_eq!(
        at(&[2.0, 7.0, 7.0, 1.0], |g, x| g.reduce(ReduceKind::Max, x, &[0], false)),
        [0.0, 0.5, 0.5, 0.0]
    );
    assert_eq!(
        at(&[2.0, 1.0, 7.0, 1.0], |g, x| g.reduce(ReduceKind::Min, x, &[0], true)),
        [0.0, 0.5, 0.0, 0.5]
    );
    let prod = |v: &[f32]| at(v, |g, x| g.reduce(ReduceKind::Prod, x, &[0], false));
    assert_eq!(prod(&[2.0, 0.0, 3.0]), [0.0, 6.0, 0.0]);
    assert_eq!(prod(&[2.0, 0.0, 0.0]), [0.0, 0.0, 0.0]);
    let scan = at(&[2.0, 0.0, 3.0], |g, x| g.scan(ReduceKind::Prod, x, 0, false, false));
    assert_eq!(scan, [1.0, 2.0 + 6.0, 0.0]);
    // Rounding and comparisons propagate no gradient.
    assert_eq!(
        at(&[1.4], |g, x| {
            let f = g.floor(x)?;
            g.add(f, x)
        }),
        [1.0]
    );
}

#[test]
fn broadcasting_and_reuse() {
    check("broadcast", &[&[3, 1], &[1, 4], &[2, 1, 1]], &|g, x, _| {
        let y = g.mul(x[0], x[1])?;
        g.add(y, x[2])
    });
    check("diamond", &[&[5]], &|g, x, _| {
        let a = g.sin(x[0])?;
        let b = g.mul(a, x[0])?;
        let c = g.add(b, a)?;
        let d = g.mul(c, a)?;
        g.add(d, c)
    });
    check("same operand twice", &[&[3, 3]], &|g, x, _| g.matmul(x[0], x[0]));
    check("cast", &[&[6]], &|g, x, _| {
        let h = g.cast(x[0], DType::F16)?;
        let h = g.mul(h, h)?;
        g.cast(h, DType::F32)
    });
}

#[test]
fn views() {
    check("reshape and permute", &[&[2, 3, 4]], &|g, x, _| {
        let p = g.permute(x[0], &[2, 0, 1])?;
        let p = g.reshape(p, [8usize, 3])?;
        g.mul(p, p)
    });
    check("expand", &[&[3, 1]], &|g, x, _| g.expand(x[0], &[2usize, 3, 4].into()));
    check("expand of ones", &[&[1, 1]], &|g, x, _| g.expand(x[0], &[1usize, 1, 1].into()));
    check("pad", &[&[2, 3]], &|g, x, _| g.pad(x[0], &[1, 0], &[2, 3], 7.0));
    check("concat", &[&[2, 3], &[2, 1], &[2, 2]], &|g, x, _| g.concat(x, 1));
    check("concat of one operand twice", &[&[2, 3]], &|g, x, _| g.concat(&[x[0], x[0]], 0));
    check("flip", &[&[3, 4]], &|g, x, _| g.flip(x[0], &[0, 1]));
    for (start, step, len) in
        [(1, 1, 3), (1, 2, 3), (0, 3, 2), (5, -1, 4), (6, -2, 4), (5, -3, 2), (2, 5, 1), (2, -5, 1)]
    {
        check(&format!("slice {start} {step} {len}"), &[&[2, 7, 3]], &|g, x, _| {
            let d = |n: usize| Dim::from(n);
            g.slice(x[0], &[d(0), d(start), d(2)], &[1, step, -1], &[d(2), d(len), d(3)])
        });
    }
    check("symbolic slices", &[&[2, 3]], &|g, x, _| g.narrow(x[0], 1, 0usize, 2usize));
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [Dim::sym("n"), 4.into()]));
    let y = g.narrow(x, 1, 1usize, 2usize).unwrap();
    let s = g.sum(y, &[0, 1], false).unwrap();
    let d = gradients(&mut g, s, &[x], None).unwrap()[0].unwrap();
    assert_eq!(run(&mut g, &[floats(&[1, 4], &[1.0; 4])], &[d])[0], [0.0, 1.0, 1.0, 0.0]);
    let z = g.narrow(x, 0, 1usize, 2usize).unwrap();
    let s = g.sum(z, &[0, 1], false).unwrap();
    assert!(matches!(gradients(&mut g, s, &[x], None), Err(Error::Unsupported { .. })));
}

#[test]
fn reductions_and_scans() {
    for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
        for (axes, keep) in [(vec![1], false), (vec![0, 2], true), (vec![0, 1, 2], false)] {
            check(&format!("{} {axes:?}", kind.name()), &[&[2, 3, 2]], &|g, x, _| {
                g.reduce(kind, x[0], &axes, keep)
            });
        }
        for bits in 0..4 {
            check(&format!("scan {} {bits}", kind.name()), &[&[2, 4, 2]], &|g, x, _| {
                g.scan(
                    kind,
                    x[0],
                    1,
                    bits & 1 == 1 && kind != ReduceKind::Max && kind != ReduceKind::Min,
                    bits & 2 == 2,
                )
            });
        }
    }
    // An exclusive maximum starts at -inf, where differences are NaN, so it is clamped before the check.
    check("exclusive scan max", &[&[5]], &|g, x, _| {
        let s = g.scan(ReduceKind::Max, x[0], 0, true, false)?;
        let lo = g.lit(s, -100.0);
        g.max(s, lo)
    });
}

#[test]
fn matmuls() {
    check("matmul", &[&[3, 4], &[4, 2]], &|g, x, _| g.matmul(x[0], x[1]));
    check("batched", &[&[2, 1, 3, 4], &[5, 4, 2]], &|g, x, _| g.matmul(x[0], x[1]));
    check("vectors", &[&[4], &[4]], &|g, x, _| g.matmul(x[0], x[1]));
    check_twice("matmul", &[&[2, 3], &[3, 2]], ANY, &|g, x, _| {
        let y = g.matmul(x[0], x[1])?;
        g.mul(y, y)
    });
    // A right operand that all products of the batch share: as it is, and transposed.
    check("matmul shared", &[&[4, 3, 5], &[5, 7]], &|g, x, _| g.matmul(x[0], x[1]));
    check("matmul shared, transposed", &[&[4, 3, 5], &[7, 5]], &|g, x, _| {
        let t = g.transpose(x[1], 0, 1)?;
        g.matmul(x[0], t)
    });
    // A right operand that is expanded along the batch, along its rows, or along several axes.
    for from in [[1, 1, 7], [1, 5, 1], [1, 1, 1], [1, 5, 7], [4, 1, 7]] {
        check("matmul of an expanded matrix", &[&[4, 3, 5], &from], &|g, x, _| {
            let w = g.expand(x[1], &[4usize, 5, 7].into())?;
            g.matmul(x[0], w)
        });
    }
}

fn conv(s: &[usize], p: &[(i64, i64)], d: &[usize], e: &[usize], groups: usize) -> Conv {
    Conv { stride: s.into(), pad: p.into(), dilation: d.into(), input_dilation: e.into(), groups }
}

#[test]
fn convolutions() {
    let cases: &[(&[usize], &[usize], Conv)] = &[
        (&[2, 2, 7], &[3, 2, 3], conv(&[1], &[(0, 0)], &[1], &[1], 1)),
        (&[2, 2, 8], &[3, 2, 3], conv(&[2], &[(1, 2)], &[1], &[1], 1)),
        (&[1, 2, 9], &[2, 2, 3], conv(&[3], &[(2, 0)], &[2], &[1], 1)),
        (&[1, 4, 7], &[6, 2, 2], conv(&[2], &[(1, 1)], &[1], &[1], 2)),
        (&[1, 3, 6], &[3, 1, 3], conv(&[1], &[(-1, 1)], &[1], &[1], 3)),
        (&[2, 2, 4], &[2, 2, 3], conv(&[1], &[(2, 1)], &[1], &[2], 1)),
        (&[1, 2, 4], &[4, 1, 2], conv(&[2], &[(1, 2)], &[2], &[3], 2)),
        (&[1, 2, 5, 4], &[2, 2, 3, 2], conv(&[2, 1], &[(1, 1), (0, 1)], &[1, 2], &[1, 1], 1)),
        (&[2, 2, 4, 5], &[2, 1, 2, 3], conv(&[1, 3], &[(0, 1), (2, 1)], &[2, 1], &[1, 2], 2)),
        (
            &[1, 1, 3, 4, 3],
            &[2, 1, 2, 2, 2],
            conv(&[1, 2, 1], &[(0, 0), (1, 0), (1, 1)], &[1, 1, 2], &[1, 1, 1], 1),
        ),
    ];
    for (x, w, c) in cases {
        check(&format!("conv {x:?} {w:?} {c:?}"), &[x, w], &|g, v, _| g.conv(v[0], v[1], c.clone()));
    }
    // A stride that leaves the last elements unread.
    check("ragged", &[&[1, 1, 8], &[1, 1, 2]], &|g, v, _| {
        g.conv(v[0], v[1], conv(&[3], &[(0, 0)], &[1], &[1], 1))
    });
    check_twice("conv", &[&[1, 2, 6], &[2, 1, 3]], ANY, &|g, v, _| {
        let y = g.conv(v[0], v[1], conv(&[2], &[(1, 1)], &[1], &[1], 2))?;
        g.tanh(y)
    });
}

#[test]
fn pools() {
    let pool = |kind, k: usize, s: usize, p: usize, d: usize| Pool {
        kind,
        kernel: smallvec![k, 2],
        stride: smallvec![s, 1],
        pad: smallvec![(p, 0), (0, p)],
        dilation: smallvec![d, 1],
    };
    let kinds = [
        PoolKind::Max,
        PoolKind::Avg { count_include_pad: true },
        PoolKind::Avg { count_include_pad: false },
    ];
    for kind in kinds {
        for (k, s, p, d) in [(2, 2, 0, 1), (3, 1, 1, 1), (2, 1, 1, 2), (3, 2, 1, 1)] {
            check(&format!("{kind:?} {k} {s} {p} {d}"), &[&[1, 2, 5, 4]], &|g, x, _| {
                g.pool(x[0], pool(kind, k, s, p, d))
            });
        }
    }
    check_twice("average pool", &[&[1, 1, 4, 3]], ANY, &|g, x, _| {
        let y = g.pool(x[0], pool(kinds[2], 2, 1, 1, 1))?;
        g.mul(y, y)
    });
    let mut g = Graph::new();
    g.span = Span::new("net.rs:3");
    let x = g.input("x", TensorType::new(DType::F32, [1usize, 1, 4, 4]));
    let y = g.pool(x, pool(PoolKind::Max, 2, 2, 0, 1)).unwrap();
    let s = g.sum(y, &[0, 1, 2, 3], false).unwrap();
    let d = gradients(&mut g, s, &[x], None).unwrap()[0].unwrap();
    let q = g.mul(d, d).unwrap();
    let q = g.sum(q, &[0, 1, 2, 3], false).unwrap();
    // The gradient of a max pool depends on `x`, and a second gradient is not supported.
    let e = gradients(&mut g, q, &[x], None).unwrap_err().to_string();
    assert!(e.contains("max_pool") && e.contains("net.rs:3"), "{e}");
}

#[test]
fn gathers_and_scatters() {
    check("gather", &[&[3, 4, 2]], &|g, x, r| {
        let i = r.index(&[2, 3], 4);
        let i = g.constant(i);
        g.gather(x[0], i, 1)
    });
    check("gather_elements", &[&[3, 4]], &|g, x, r| {
        let i = r.index(&[2, 6], 4);
        let i = g.constant(i);
        g.gather_elements(x[0], i, 1)
    });
    for kind in [ScatterKind::Set, ScatterKind::Add, ScatterKind::Max, ScatterKind::Min] {
        // More updates than places, so in every run some updates have the same index.
        check(&format!("scatter_rows {kind:?}"), &[&[2, 3, 2], &[2, 5, 2]], &|g, x, r| {
            let i = r.index(&[5], 3);
            let i = g.constant(i);
            g.scatter_rows(x[0], i, x[1], 1, kind)
        });
        check(&format!("scatter_rows {kind:?} matrix index"), &[&[4], &[2, 3]], &|g, x, r| {
            let i = r.index(&[2, 3], 4);
            let i = g.constant(i);
            g.scatter_rows(x[0], i, x[1], 0, kind)
        });
        check(&format!("scatter_elements {kind:?}"), &[&[3, 4], &[5, 3]], &|g, x, r| {
            let i = r.index(&[5, 3], 3);
            let i = g.constant(i);
            g.scatter_elements(x[0], i, x[1], 0, kind)
        });
    }
    check("scatter mul, base", &[&[3, 2]], &|g, x, r| {
        let (i, u) = (r.index(&[4], 3), r.data(&[4, 2], ANY));
        let (i, u) = (g.constant(i), g.constant(u));
        let u = g.cast(u, DType::F32)?;
        g.scatter_rows(x[0], i, u, 0, ScatterKind::Mul)
    });
    check("update_slice", &[&[2, 5, 2], &[2, 2, 2]], &|g, x, _| {
        let p = g.full(DType::I32, Shape::scalar(), 2i32);
        g.update_slice(x[0], x[1], p, 1)
    });
    check("sorted", &[&[3, 4]], &|g, x, _| {
        let i = g.argsort(x[0], 1, true)?;
        g.gather_elements(x[0], i, 1)
    });
}

#[test]
fn composites() {
    let softmax: [(&str, Build); 2] =
        [("softmax", &|g, x, _| g.softmax(x[0], 1)), ("log_softmax", &|g, x, _| g.log_softmax(x[0], 1))];
    for (name, build) in softmax {
        check(name, &[&[2, 4]], build);
        check_twice(name, &[&[2, 3]], ANY, build);
    }
    check("layer_norm", &[&[2, 5], &[5], &[5]], &|g, x, _| g.layer_norm(x[0], x[1], Some(x[2]), 1, 1e-3));
    check("rms_norm", &[&[3, 4], &[4]], &|g, x, _| g.rms_norm(x[0], x[1], 1e-3));
    check_in("batch_norm", &[&[2, 3, 2], &[3], &[3], &[3], &[3]], (0.5, 2.0), &|g, x, _| {
        g.batch_norm(x[0], x[1], x[2], x[3], x[4], 1e-3)
    });
    check("attention", &[&[1, 4, 3, 2], &[1, 2, 4, 2], &[1, 2, 4, 2]], &|g, x, _| {
        g.attention(x[0], x[1], x[2], None, true, 0.7)
    });
    check("cross_entropy", &[&[3, 4]], &|g, x, r| {
        // `Rng::index` also returns negative indices, which are not labels.
        let labels: Vec<i64> = (0..3).map(|_| (r.next() * 4.0) as i64).collect();
        let i = g.constant(ConstData::from_slice(&[3], &labels)?);
        g.cross_entropy(x[0], i, Some(-100))
    });
    check("softmax with another body", &[&[2, 3]], &|g, x, _| {
        let a = [("axis".to_string(), crate::composite::Attr::Int(1))].into();
        g.composite("softmax", a, &[x[0]], |g, x| g.mul(x[0], x[0]))
    });
    check("identity", &[&[3]], &|g, x, _| {
        let y = g.composite("same", Default::default(), &[x[0]], |_, x| Ok(x[0]))?;
        g.mul(y, x[0])
    });
    check_twice("layer_norm", &[&[2, 3], &[3]], ANY, &|g, x, _| g.layer_norm(x[0], x[1], None, 1, 1e-1));
}

#[test]
fn second_order_of_scalars_and_reductions() {
    for op in [ScalarOp::Exp, ScalarOp::Tanh, ScalarOp::Gelu, ScalarOp::Silu, ScalarOp::Rsqrt, ScalarOp::Log]
    {
        check_twice(op.name(), &[&[4]], (0.3, 2.0), &|g, x, _| g.scalar(op, &[x[0]]));
    }
    check_twice("pow", &[&[4], &[4]], (0.3, 2.0), &|g, x, _| g.pow(x[0], x[1]));
    check_twice("div", &[&[4], &[4]], (0.3, 2.0), &|g, x, _| g.div(x[0], x[1]));
    check_twice("prod", &[&[2, 3]], ANY, &|g, x, _| g.reduce(ReduceKind::Prod, x[0], &[1], false));
    check_twice("slices", &[&[7]], ANY, &|g, x, _| {
        let s = g.slice(x[0], &[6.into()], &[-2], &[3.into()])?;
        let q = g.mul(s, s)?;
        g.mul(q, s)
    });
}

#[derive(Debug)]
struct Cube;

impl CustomOp for Cube {
    fn name(&self) -> &str {
        "test.cube"
    }
    fn infer(&self, x: &[TensorType]) -> Result<TensorType> {
        Ok(x[0].clone())
    }
    fn reference(&self, x: &[ConstData]) -> Result<ConstData> {
        let v: Vec<f64> = x[0].to_vec::<f64>().iter().map(|v| v * v * v).collect();
        ConstData::from_slice(&x[0].dims, &v)
    }
    fn gradient(&self, g: &mut Graph, x: &[NodeId], _: NodeId, dy: NodeId) -> Result<Vec<Option<NodeId>>> {
        let s = g.mul(x[0], x[0])?;
        let k = g.lit(s, 3.0);
        let s = g.mul(s, k)?;
        Ok(vec![Some(g.mul(s, dy)?)])
    }
}

#[test]
fn custom_ops() {
    check("custom", &[&[5]], &|g, x, _| g.custom(Arc::new(Cube), &[x[0]]));
}

#[test]
fn invalid_losses_are_errors() {
    let mut g = Graph::new();
    g.span = Span::new("train.rs:12");
    let x = g.input("x", TensorType::new(DType::F32, [2usize, 3]));
    let i = g.input("i", TensorType::new(DType::I32, [2usize, 3]));
    let y = g.exp(x).unwrap();
    let e = gradients(&mut g, y, &[x], None).unwrap_err().to_string();
    assert!(e.contains("[2, 3]") && e.contains("train.rs:12"), "{e}");
    let j = g.sum(i, &[0, 1], false).unwrap();
    assert!(matches!(gradients(&mut g, j, &[i], None), Err(Error::DType { .. })));
    let wrong = g.full(DType::F32, [3usize], 1.0);
    assert!(gradients(&mut g, y, &[x], Some(wrong)).is_err());
    // Gradients with respect to, in this order: an input that the loss does not use, an integer input, an
    // intermediate node, the loss itself, and an input that the loss uses.
    let s = g.sum(y, &[0, 1], false).unwrap();
    let other = g.input("z", TensorType::new(DType::F32, [1usize]));
    let f = g.cast(i, DType::F32).unwrap();
    let t = g.sum(f, &[0, 1], false).unwrap();
    let s = g.add(s, t).unwrap();
    let d = gradients(&mut g, s, &[other, i, y, s, x], None).unwrap();
    assert!(d[0].is_none() && d[1].is_none() && d[2].is_some() && d[3].is_some() && d[4].is_some());
    let grads: Vec<NodeId> = d.into_iter().flatten().collect();
    // Gradients take the span of the node they differentiate. The caller's span is left unchanged.
    assert_eq!(g.node(grads[2]).span, g.node(y).span);
    assert_eq!(g.span, Span::new("train.rs:12"));
}

#[test]
fn long_chains() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [2usize]));
    let mut y = x;
    for k in 0..100_000 {
        y = if k % 2 == 0 { g.neg(y) } else { g.add(y, x) }.unwrap();
    }
    let s = g.sum(y, &[0], false).unwrap();
    let d = gradients(&mut g, s, &[x], None).unwrap()[0].unwrap();
    // y(k+2) = -y(k) + x with y(0) = x, so y(2) = 0, y(4) = x, and y is x again after every four ops.
    assert_eq!(run(&mut g, &[floats(&[2], &[1.5, -2.0])], &[d])[0], [1.0, 1.0]);
}

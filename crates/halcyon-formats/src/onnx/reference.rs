//! A simple graph evaluator for the importer's tests. It computes each op directly from its definition, one
//! element at a time. Floats are computed in f64 and rounded to the node's type after each op; sums are not
//! rounded between terms.

use halcyon_ir::graph::Node;
use halcyon_ir::layout::View;
use halcyon_ir::ops::{PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::{ConstData, DType, Graph, NodeId, Op, Scalar, ScalarOp};

#[derive(Clone)]
struct Tensor {
    dtype: DType,
    dims: Vec<usize>,
    v: Vec<Scalar>,
}

fn positions(dims: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for &n in dims {
        all = all.into_iter().flat_map(|p| (0..n).map(move |i| [&p[..], &[i]].concat())).collect();
    }
    all
}

impl Tensor {
    fn at(&self, p: &[usize]) -> Scalar {
        let strides = View::dense(&self.dims).strides;
        self.v[p.iter().zip(&strides).map(|(i, s)| i * *s as usize).sum::<usize>()]
    }

    fn update(&mut self, kind: ScatterKind, p: &[usize], v: Scalar) {
        let op = match kind {
            ScatterKind::Set => None,
            ScatterKind::Add => Some(ScalarOp::Add),
            ScatterKind::Mul => Some(ScalarOp::Mul),
            ScatterKind::Max => Some(ScalarOp::Max),
            ScatterKind::Min => Some(ScalarOp::Min),
        };
        let v = op.map_or(v, |op| op.eval(self.dtype, &[self.at(p), v]));
        let strides = View::dense(&self.dims).strides;
        self.v[p.iter().zip(&strides).map(|(i, s)| i * *s as usize).sum::<usize>()] = v;
    }

    fn make(dtype: DType, dims: &[usize], mut f: impl FnMut(&[usize]) -> Scalar) -> Tensor {
        let v = positions(dims).iter().map(|p| f(p).cast(dtype)).collect();
        Tensor { dtype, dims: dims.to_vec(), v }
    }
}

/// Evaluates the graph's outputs. Panics on ops that the importer tests do not use.
pub(super) fn run(g: &Graph, inputs: &[ConstData]) -> Vec<ConstData> {
    let t = |c: &ConstData| Tensor { dtype: c.dtype, dims: c.dims.to_vec(), v: c.scalars().collect() };
    let ins: Vec<Tensor> = inputs.iter().map(t).collect();
    eval(g, &ins).into_iter().map(|t| crate::data::from_scalars(t.dtype, &t.dims, t.v).unwrap()).collect()
}

fn eval(g: &Graph, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut val: Vec<Tensor> = Vec::new();
    for n in g.nodes() {
        let x: Vec<&Tensor> = n.inputs.iter().map(|i: &NodeId| &val[i.index()]).collect();
        let groups = [moved, indexed, reduced_or_sorted, summed];
        let y = match groups.iter().find_map(|f| f(n, &x)) {
            Some(y) => y,
            None => element_wise(n, &x, inputs),
        };
        val.push(y);
    }
    g.outputs().iter().map(|o| val[o.node.index()].clone()).collect()
}

/// Evaluates the ops that the other functions leave: inputs, constants, element-wise ops, reshapes, and
/// composites (their bodies).
fn element_wise(n: &Node, x: &[&Tensor], inputs: &[Tensor]) -> Tensor {
    let (d, dims) = (n.ty.dtype, n.ty.shape.dims().unwrap().to_vec());
    let make = |f: &mut dyn FnMut(&[usize]) -> Scalar| Tensor::make(d, &dims, f);
    match &n.op {
        Op::Input(k) => {
            assert_eq!((inputs[*k as usize].dtype, &inputs[*k as usize].dims), (d, &dims));
            inputs[*k as usize].clone()
        }
        Op::Const(c) => Tensor { dtype: d, dims, v: c.scalars().collect() },
        Op::Full(s) => make(&mut |_| *s),
        Op::Iota { axis } => make(&mut |p| Scalar::from(p[*axis])),
        Op::Scalar(op) => {
            let of = if halcyon_ir::graph::has_condition(*op) { x[1].dtype } else { x[0].dtype };
            let v = (0..x[0].v.len())
                .map(|i| op.eval(of, &x.iter().map(|t| t.v[i]).collect::<Vec<_>>()))
                .collect();
            Tensor { dtype: d, dims, v }
        }
        Op::Cast => Tensor { dtype: d, dims, v: x[0].v.iter().map(|s| s.cast(d)).collect() },
        Op::Reshape => Tensor { dtype: d, dims, v: x[0].v.clone() },
        Op::ClassIndex { classes, ignore } => make(&mut |p| {
            let l = x[0].at(p).as_f64() as i64;
            let ok = (0..classes.known().unwrap() as i64).contains(&l);
            assert!(ok || Some(l) == *ignore, "label {l} outside of the classes");
            Scalar::from(if ok { l } else { 0 })
        }),
        Op::Composite(c) => {
            let args: Vec<Tensor> = x.iter().map(|t| (*t).clone()).collect();
            eval(&c.body, &args).remove(0)
        }
        Op::Bitcast => {
            let from = x[0].dtype;
            let v = x[0].v.iter().map(|v| Scalar::from_bytes(d, &v.to_bytes(from))).collect();
            Tensor { dtype: d, dims, v }
        }
        op => panic!("the test evaluator lacks {}", op.name()),
    }
}

/// Evaluates permutes, expands, slices, paddings and concatenations; None for other ops.
fn moved(n: &Node, x: &[&Tensor]) -> Option<Tensor> {
    let (d, dims) = (n.ty.dtype, n.ty.shape.dims().unwrap().to_vec());
    let make = |f: &mut dyn FnMut(&[usize]) -> Scalar| Tensor::make(d, &dims, f);
    Some(match &n.op {
        Op::Permute(perm) => make(&mut |p| {
            let mut q = vec![0; p.len()];
            perm.iter().zip(p).for_each(|(&a, &i)| q[a] = i);
            x[0].at(&q)
        }),
        Op::Expand => {
            let lead = dims.len() - x[0].dims.len();
            make(&mut |p| {
                let q: Vec<usize> =
                    p[lead..].iter().zip(&x[0].dims).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect();
                x[0].at(&q)
            })
        }
        Op::Slice(axes) => make(&mut |p| {
            let q: Vec<usize> = p
                .iter()
                .zip(axes)
                .map(|(&i, a)| (a.start.known().unwrap() as i64 + i as i64 * a.step) as usize)
                .collect();
            x[0].at(&q)
        }),
        Op::Pad { lo, value, .. } => make(&mut |p| {
            let q: Option<Vec<usize>> = p
                .iter()
                .zip(lo)
                .zip(&x[0].dims)
                .map(|((&i, &l), &n)| i.checked_sub(l).filter(|i| *i < n))
                .collect();
            q.map_or(*value, |q| x[0].at(&q))
        }),
        Op::Concat { axis } => make(&mut |p| {
            let mut q = p.to_vec();
            for t in x {
                if q[*axis] < t.dims[*axis] {
                    return t.at(&q);
                }
                q[*axis] -= t.dims[*axis];
            }
            unreachable!()
        }),
        _ => return None,
    })
}

/// Evaluates gathers and scatters; None for other ops.
fn indexed(n: &Node, x: &[&Tensor]) -> Option<Tensor> {
    let (d, dims) = (n.ty.dtype, n.ty.shape.dims().unwrap().to_vec());
    let make = |f: &mut dyn FnMut(&[usize]) -> Scalar| Tensor::make(d, &dims, f);
    Some(match &n.op {
        Op::Gather { axis } => {
            let r = x[1].dims.len();
            make(&mut |p| {
                let i = wrap(x[1].at(&p[*axis..axis + r]), x[0].dims[*axis]);
                x[0].at(&[&p[..*axis], &[i], &p[axis + r..]].concat())
            })
        }
        Op::GatherElements { axis } => make(&mut |p| {
            let mut q = p.to_vec();
            q[*axis] = wrap(x[1].at(p), x[0].dims[*axis]);
            x[0].at(&q)
        }),
        Op::ScatterElements { axis, kind } => {
            let mut y = x[0].clone();
            for p in positions(&x[1].dims) {
                let mut q = p.clone();
                q[*axis] = wrap(x[1].at(&p), dims[*axis]);
                y.update(*kind, &q, x[2].at(&p));
            }
            y
        }
        Op::ScatterRows { axis, kind } => {
            let (mut y, r) = (x[0].clone(), x[1].dims.len());
            for p in positions(&x[2].dims) {
                let i = wrap(x[1].at(&p[*axis..axis + r]), dims[*axis]);
                y.update(*kind, &[&p[..*axis], &[i], &p[axis + r..]].concat(), x[2].at(&p));
            }
            y
        }
        _ => return None,
    })
}

/// Evaluates reductions, sorts and scans; None for other ops.
fn reduced_or_sorted(n: &Node, x: &[&Tensor]) -> Option<Tensor> {
    let (d, dims) = (n.ty.dtype, n.ty.shape.dims().unwrap().to_vec());
    let make = |f: &mut dyn FnMut(&[usize]) -> Scalar| Tensor::make(d, &dims, f);
    Some(match &n.op {
        Op::Reduce { kind, axes, keep } => {
            let part = reduced(&x[0].dims, axes);
            let mut acc = vec![None; part.iter().product()];
            let strides = View::dense(&part).strides;
            for (p, s) in positions(&x[0].dims).iter().zip(&x[0].v) {
                let at: usize = (0..p.len())
                    .map(|k| if axes.contains(&k) { 0 } else { p[k] * strides[k] as usize })
                    .sum();
                acc[at] = Some(match acc[at] {
                    None => *s,
                    Some(a) => combine(*kind, d, a, *s),
                });
            }
            let v = acc.into_iter().map(|a| a.unwrap_or(kind.identity(d)).cast(d)).collect();
            assert_eq!(*keep, part.len() == dims.len() || axes.is_empty());
            Tensor { dtype: d, dims, v }
        }
        Op::ArgReduce { max, axis, keep, last } => make(&mut |p| {
            let mut q = p.to_vec();
            if !keep {
                q.insert(*axis, 0);
            }
            let mut best = 0;
            let mut top = f64::NAN;
            for i in 0..x[0].dims[*axis] {
                q[*axis] = i;
                let v = x[0].at(&q).as_f64() * if *max { 1.0 } else { -1.0 };
                if i == 0 || v > top || (v == top && *last) {
                    (best, top) = (i, v);
                }
            }
            Scalar::from(best)
        }),
        Op::ArgSort { axis, descending } => make(&mut |p| {
            let mut q = p.to_vec();
            let mut order: Vec<usize> = (0..x[0].dims[*axis]).collect();
            let mut key = |i: usize| {
                q[*axis] = i;
                x[0].at(&q).as_f64() * if *descending { -1.0 } else { 1.0 }
            };
            order.sort_by(|&a, &b| key(a).total_cmp(&key(b)));
            Scalar::from(order[p[*axis]])
        }),
        Op::Scan { kind, axis, exclusive, reverse } => make(&mut |p| {
            let mut q = p.to_vec();
            let n = x[0].dims[*axis];
            let range = match (reverse, exclusive) {
                (false, false) => 0..p[*axis] + 1,
                (false, true) => 0..p[*axis],
                (true, false) => p[*axis]..n,
                (true, true) => p[*axis] + 1..n,
            };
            range.fold(kind.identity(d), |a, i| {
                q[*axis] = i;
                combine(*kind, d, a, x[0].at(&q))
            })
        }),
        _ => return None,
    })
}

/// Evaluates products, convolutions and pools; None for other ops.
fn summed(n: &Node, x: &[&Tensor]) -> Option<Tensor> {
    let (d, dims) = (n.ty.dtype, n.ty.shape.dims().unwrap().to_vec());
    let make = |f: &mut dyn FnMut(&[usize]) -> Scalar| Tensor::make(d, &dims, f);
    Some(match &n.op {
        Op::Matmul => make(&mut |p| {
            let r = p.len();
            let k = x[0].dims[r - 1];
            let (mut a, mut b) = (p.to_vec(), p.to_vec());
            (0..k).fold(Scalar::F(0.0), |s, i| {
                (a[r - 1], b[r - 2]) = (i, i);
                total(d, s, x[0].at(&a), x[1].at(&b))
            })
        }),
        Op::Conv(c) => make(&mut |p| {
            let (per, out) = (x[1].dims[1], x[1].dims[0] / c.groups);
            let mut s = Scalar::F(0.0);
            for k in positions(&x[1].dims[2..]) {
                let at: Option<Vec<usize>> = (0..k.len())
                    .map(|a| {
                        let i = (p[a + 2] * c.stride[a] + k[a] * c.dilation[a]) as i64 - c.pad[a].0;
                        let i = usize::try_from(i).ok().filter(|i| i.is_multiple_of(c.input_dilation[a]))?;
                        Some(i / c.input_dilation[a]).filter(|i| *i < x[0].dims[a + 2])
                    })
                    .collect();
                let Some(at) = at else { continue };
                for ch in 0..per {
                    let xs = x[0].at(&[&[p[0], p[1] / out * per + ch], &at[..]].concat());
                    s = total(d, s, xs, x[1].at(&[&[p[1], ch], &k[..]].concat()));
                }
            }
            s
        }),
        Op::Pool(c) => make(&mut |p| {
            let mut seen = Vec::new();
            for k in positions(&c.kernel) {
                let at: Option<Vec<usize>> = (0..k.len())
                    .map(|a| {
                        let i = (p[a + 2] * c.stride[a] + k[a] * c.dilation[a]) as i64 - c.pad[a].0 as i64;
                        usize::try_from(i).ok().filter(|i| *i < x[0].dims[a + 2])
                    })
                    .collect();
                if let Some(at) = at {
                    seen.push(x[0].at(&[&p[..2], &at[..]].concat()).as_f64());
                }
            }
            Scalar::F(match c.kind {
                PoolKind::Max => seen.into_iter().fold(f64::NEG_INFINITY, f64::max),
                PoolKind::Avg { count_include_pad } => {
                    let n = if count_include_pad { c.kernel.iter().product() } else { seen.len() };
                    seen.iter().sum::<f64>() / n as f64
                }
            })
        }),
        _ => return None,
    })
}

fn wrap(i: Scalar, n: usize) -> usize {
    let i = i.as_i64();
    if i < 0 { (i + n as i64) as usize } else { i as usize }
}

fn reduced(dims: &[usize], axes: &[usize]) -> Vec<usize> {
    dims.iter().enumerate().map(|(k, &n)| if axes.contains(&k) { 1 } else { n }).collect()
}

/// Combines two values of a reduction. Floats are combined in f64, so that a long sum has only f64's rounding
/// error.
fn combine(kind: ReduceKind, d: DType, a: Scalar, b: Scalar) -> Scalar {
    let wide = if d.is_float() { DType::F64 } else { d };
    kind.op(d).eval(wide, &[a, b])
}

/// `s + a * b`.
fn total(d: DType, s: Scalar, a: Scalar, b: Scalar) -> Scalar {
    if d.is_float() {
        Scalar::F(s.as_f64() + a.as_f64() * b.as_f64())
    } else {
        Scalar::I(s.as_i64().wrapping_add(a.as_i64().wrapping_mul(b.as_i64())))
    }
}

//! Runs every template in the interpreter: at four subgroup sizes, with work-items in random order, poisoned
//! outputs and strided operands. Results are compared with references in f64 that follow the definitions of
//! the ops.

mod matrices;

use crate::tensor::*;
use halcyon_ir::graph::Graph;
use halcyon_ir::kernel::BufId;
use halcyon_ir::kernel::interp::{Options, run};
use halcyon_ir::kernel::lower::lower_op;
use halcyon_ir::layout::View;
use halcyon_ir::ops::{Conv, Op, Pool, PoolKind, ReduceKind, ScatterKind};
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{DType, Scalar, TensorType};
use halcyon_test_host::drawn;

/// Runs the kernels of an op at four subgroup sizes. Returns the elements of the result and whether the fault
/// word was set.
fn execute(
    op: &Op,
    x: &[&Tensor],
    d: DType,
    shape: &[usize],
    in_place: bool,
    caps: &Caps,
) -> (Vec<f64>, bool) {
    let out = Operand { dtype: d, view: View::dense(shape) };
    let inputs: Vec<Operand> = x.iter().map(|t| t.operand.clone()).collect();
    let low = match lower_op(op, &inputs, std::slice::from_ref(&out), in_place, caps) {
        Ok(low) => low,
        // The caller copies the operands that the kernels need dense.
        Err(e) if !e.dense.is_empty() => {
            let mut copies: Vec<Tensor> = x.iter().map(|&t| t.clone()).collect();
            for i in e.dense {
                assert!(!copies[i].operand.view.is_dense(), "{}: input {i} is dense", op.name());
                copies[i] = copies[i].dense();
            }
            return execute(op, &copies.iter().collect::<Vec<_>>(), d, shape, in_place, caps);
        }
        Err(e) => panic!("{}: {}", op.name(), e.reason),
    };
    let bytes = out.view.numel() * d.size();
    let mut first: Option<(Vec<u8>, bool)> = None;
    for (n, subgroup) in [1, 4, 32, 64].into_iter().enumerate() {
        let mut all: Vec<Vec<u8>> = x.iter().map(|t| t.bytes.clone()).collect();
        all.push(if in_place { x[0].bytes.clone() } else { vec![0xCD; bytes] });
        let mut written = in_place;
        let mut fault = vec![0; 4];
        for (k, l, binding) in &low.steps {
            let mut mem: Vec<Vec<u8>> = binding.iter().map(|&b| std::mem::take(&mut all[b])).collect();
            let faults = mem.len() < k.buffers.len();
            if faults {
                mem.push(std::mem::take(&mut fault));
            }
            let mut l = l.clone();
            for (p, v) in k.params.iter().zip(&mut l.params) {
                if p.name == "fault" {
                    *v = Scalar::U(7);
                }
            }
            // Concatenations and updates write one result with several kernels. Only the first kernel starts
            // from an unwritten buffer.
            let poisoned = if written { vec![] } else { vec![BufId(binding.len() as u32 - 1)] };
            let o = Options {
                subgroup,
                seed: Some(n as u64 * 31 + 5),
                sanitize: true,
                poisoned,
                ..Options::default()
            };
            let r = run(k, &l, &mut mem, &o).unwrap();
            assert!(r.reports.is_empty(), "{}: {}", op.name(), r.reports[0]);
            written = true;
            if faults {
                fault = mem.pop().unwrap();
            }
            for (&b, m) in binding.iter().zip(mem) {
                all[b] = m;
            }
        }
        let got = (all.pop().unwrap(), fault[0] == 7);
        match &first {
            Some(f) => assert!(*f == got, "{} depends on order or subgroup size", op.name()),
            None => first = Some(got),
        }
    }
    let (b, fault) = first.unwrap();
    (b.chunks(d.size()).map(|c| Scalar::from_bytes(d, c).as_f64()).collect(), fault)
}

#[test]
fn matmul() {
    let mut g = Rng(1);
    let sizes = [
        (1, 1, 1),
        (3, 5, 7),
        (17, 33, 20),
        (70, 65, 35),
        (1, 40, 300),
        (64, 64, 16),
        (2, 3, 0),
        (4, 72, 96),
        (96, 1, 72),
    ];
    for (n, (m, c, k)) in sizes.into_iter().enumerate() {
        for (j, d) in [DType::F32, DType::F64, DType::BF16, DType::I32, DType::U8].into_iter().enumerate() {
            for batch in [&[][..], &[2, 3][..]] {
                if batch.len() == 2 && (m > 20 || d != DType::F32) {
                    continue;
                }
                let full = |a: usize, b: usize| [batch, &[a, b]].concat();
                let a = Tensor::random(d, &full(m, k), n + j, &mut g);
                let b = Tensor::random(d, &full(k, c), n + j + 1, &mut g);
                let (got, _) = execute(&Op::Matmul, &[&a, &b], d, &full(m, c), false, &caps());
                let want: Vec<f64> = indices(&full(m, c))
                    .iter()
                    .map(|i| {
                        let r = i.len();
                        let s: f64 = (0..k)
                            .map(|p| {
                                let (mut x, mut y) = (i.clone(), i.clone());
                                (x[r - 1], y[r - 2]) = (p, p);
                                a.get(&x) * b.get(&y)
                            })
                            .sum();
                        if d == DType::U8 { (s as i64 & 255) as f64 } else { s }
                    })
                    .collect();
                close("matmul", &got, &want, d, 4.0 + k as f64 / 16.0);
            }
        }
    }
    // A dot product whose right operand is transposed in memory uses the split kernel.
    let a = Tensor::random(DType::F32, &[2, 300], 0, &mut g);
    let b = Tensor::random(DType::F32, &[300, 3], 1, &mut g);
    let low = lower_op(
        &Op::Matmul,
        &[a.operand.clone(), b.operand.clone()],
        &[Operand { dtype: DType::F32, view: View::dense(&[2, 3]) }],
        false,
        &caps(),
    );
    assert_eq!(low.unwrap().steps[0].0.name, "matmul_split");
}

#[test]
fn one_program_serves_every_shape_of_a_class() {
    let key = |m: usize, k: usize, n: usize| {
        let o = |a, b| Operand { dtype: DType::F32, view: View::dense(&[a, b]) };
        lower_op(&Op::Matmul, &[o(m, k), o(k, n)], &[o(m, n)], false, &caps()).unwrap().steps[0].0.key()
    };
    assert_eq!(key(200, 64, 64), key(100, 33, 77));
    assert_eq!(key(3, 5, 7), key(2, 30, 9));
    assert_ne!(key(3, 5, 7), key(100, 64, 77));
}

fn conv_reference(c: &Conv, x: &Tensor, w: &Tensor, out: &[usize]) -> Vec<f64> {
    let axes = c.stride.len();
    let (cg, og) = (w.shape()[1], w.shape()[0] / c.groups);
    let points = indices(out);
    points
        .iter()
        .map(|o| {
            let mut s = 0.0;
            for ci in 0..cg {
                for tap in indices(&w.shape()[2..]) {
                    let mut xi = vec![o[0], o[1] / og * cg + ci];
                    let mut inside = true;
                    for k in 0..axes {
                        let p = (o[2 + k] * c.stride[k] + tap[k] * c.dilation[k]) as i64 - c.pad[k].0;
                        let d = c.input_dilation[k] as i64;
                        inside &= p >= 0 && p % d == 0 && p / d < x.shape()[2 + k] as i64;
                        xi.push((p / d).max(0) as usize);
                    }
                    if inside {
                        let wi = [&[o[1], ci][..], &tap].concat();
                        s += x.get(&xi) * w.get(&wi);
                    }
                }
            }
            s
        })
        .collect()
}

#[test]
fn conv() {
    let mut g = Rng(2);
    let cases: Vec<(Vec<usize>, Vec<usize>, Conv)> = vec![
        (
            vec![2, 4, 9],
            vec![6, 2, 3],
            Conv {
                stride: [2].as_slice().into(),
                pad: [(1, 2)].as_slice().into(),
                dilation: [2].as_slice().into(),
                input_dilation: [1].as_slice().into(),
                groups: 2,
            },
        ),
        (
            vec![1, 3, 7, 6],
            vec![4, 3, 3, 2],
            Conv { pad: [(1, 1), (0, 1)].as_slice().into(), ..Conv::new(2) },
        ),
        (
            vec![1, 2, 4, 5],
            vec![3, 2, 3, 3],
            Conv {
                input_dilation: [2, 3].as_slice().into(),
                pad: [(2, 2), (1, 0)].as_slice().into(),
                ..Conv::new(2)
            },
        ),
        (
            vec![1, 2, 6, 6],
            vec![2, 1, 2, 2],
            Conv { pad: [(-1, 0), (-1, -2)].as_slice().into(), groups: 2, ..Conv::new(2) },
        ),
        (
            vec![1, 2, 4, 3, 5],
            vec![3, 2, 2, 2, 3],
            Conv {
                stride: [1, 2, 1].as_slice().into(),
                pad: [(0, 1), (1, 1), (1, 1)].as_slice().into(),
                ..Conv::new(3)
            },
        ),
    ];
    for (n, (xs, ws, c)) in cases.into_iter().enumerate() {
        for d in FLOATS {
            let x = Tensor::random(d, &xs, n, &mut g);
            let w = Tensor::random(d, &ws, n + 1, &mut g);
            let op = Op::Conv(c.clone());
            let t = op
                .infer(&[&TensorType::new(d, xs.as_slice()), &TensorType::new(d, ws.as_slice())], None)
                .unwrap();
            let shape: Vec<usize> = t.shape.iter().map(|d| d.known().unwrap()).collect();
            let (got, _) = execute(&op, &[&x, &w], d, &shape, false, &caps());
            close("conv", &got, &conv_reference(&c, &x, &w, &shape), d, 8.0);
        }
    }
}

fn pool(kind: PoolKind) -> Pool {
    Pool {
        kind,
        kernel: [3, 2].as_slice().into(),
        stride: [2, 1].as_slice().into(),
        pad: [(1, 1), (0, 1)].as_slice().into(),
        dilation: [1, 2].as_slice().into(),
    }
}

/// Elements of the window at `y` that are inside the input.
fn window(p: &Pool, x: &[usize], y: &[usize]) -> Vec<Vec<usize>> {
    indices(&p.kernel)
        .iter()
        .filter_map(|t| {
            let mut i = vec![y[0], y[1]];
            for k in 0..t.len() {
                let q = (y[2 + k] * p.stride[k] + t[k] * p.dilation[k]) as i64 - p.pad[k].0 as i64;
                if q < 0 || q >= x[2 + k] as i64 {
                    return None;
                }
                i.push(q as usize);
            }
            Some(i)
        })
        .collect()
}

#[test]
fn pools_and_their_gradients() {
    let mut g = Rng(3);
    let kinds = [
        PoolKind::Max,
        PoolKind::Avg { count_include_pad: true },
        PoolKind::Avg { count_include_pad: false },
    ];
    for kind in kinds {
        for (n, d) in FLOATS.into_iter().chain([DType::I32, DType::U8]).enumerate() {
            if !d.is_float() && kind != PoolKind::Max {
                continue;
            }
            let p = pool(kind);
            let xs = [2, 3, 7, 6];
            // Few distinct values, so that maxima tie.
            let x = Tensor::new(d, &xs, n, |_| g.below(4) as f64 + 1.0);
            let op = Op::Pool(p.clone());
            let t = op.infer(&[&TensorType::new(d, xs.as_slice())], None).unwrap();
            let shape: Vec<usize> = t.shape.iter().map(|d| d.known().unwrap()).collect();
            let count = |w: usize| match kind {
                PoolKind::Avg { count_include_pad: true } => p.kernel.iter().product::<usize>() as f64,
                _ => w as f64,
            };
            let want: Vec<f64> = indices(&shape)
                .iter()
                .map(|y| {
                    let w = window(&p, &xs, y);
                    let v = w.iter().map(|i| x.get(i));
                    match kind {
                        PoolKind::Max => v.fold(f64::NEG_INFINITY, f64::max),
                        _ => v.sum::<f64>() / count(w.len()),
                    }
                })
                .collect();
            let (got, _) = execute(&op, &[&x], d, &shape, false, &caps());
            close("pool", &got, &want, d, 4.0);
            if !d.is_float() {
                continue;
            }
            let y = Tensor::new(d, &shape, n + 1, |i| got[i]);
            let dy = Tensor::random(d, &shape, n + 2, &mut g);
            let mut dx = vec![0.0; x.values.len()];
            for o in indices(&shape) {
                let w = window(&p, &xs, &o);
                match kind {
                    PoolKind::Max => {
                        let top = w.iter().find(|i| x.get(i) == y.get(&o)).unwrap();
                        dx[linear(&xs, top)] += dy.get(&o);
                    }
                    _ => w.iter().for_each(|i| dx[linear(&xs, i)] += dy.get(&o) / count(w.len())),
                }
            }
            let (got, _) = execute(&Op::PoolGrad(p.clone()), &[&x, &y, &dy], d, &xs, false, &caps());
            close("pool gradient", &got, &dx, d, 8.0);
        }
    }
}

/// The composite op that `f` adds to a graph with inputs of the given types.
fn composite(x: &[&Tensor], f: impl FnOnce(&mut Graph, &[halcyon_ir::NodeId]) -> halcyon_ir::NodeId) -> Op {
    let mut g = Graph::new();
    let ids: Vec<_> = x.iter().map(|t| g.input("x", TensorType::new(t.operand.dtype, t.shape()))).collect();
    let n = f(&mut g, &ids);
    g.node(n).op.clone()
}

#[test]
fn softmax_and_norms() {
    let mut g = Rng(4);
    for (n, d) in FLOATS.into_iter().enumerate() {
        for shape in [vec![3, 5], vec![2, 3, 200], vec![4, 1]] {
            for axis in 0..shape.len() {
                let x = Tensor::random(d, &shape, n, &mut g);
                let line = |i: &[usize]| -> Vec<f64> {
                    (0..shape[axis])
                        .map(|s| {
                            let mut j = i.to_vec();
                            j[axis] = s;
                            x.get(&j).exp()
                        })
                        .collect()
                };
                let soft: Vec<f64> =
                    indices(&shape).iter().map(|i| x.get(i).exp() / line(i).iter().sum::<f64>()).collect();
                let op = composite(&[&x], |g, i| g.softmax(i[0], axis).unwrap());
                close("softmax", &execute(&op, &[&x], d, &shape, false, &caps()).0, &soft, d, 4.0);
                let op = composite(&[&x], |g, i| g.log_softmax(i[0], axis).unwrap());
                let log: Vec<f64> = soft.iter().map(|v| v.ln()).collect();
                close("log_softmax", &execute(&op, &[&x], d, &shape, false, &caps()).0, &log, d, 4.0);
            }
            for rms in [false, true] {
                let axis = if rms { shape.len() - 1 } else { 1 };
                let x = Tensor::random(d, &shape, n, &mut g);
                let tail = &shape[axis..];
                let (k, b) = (Tensor::random(d, tail, 0, &mut g), Tensor::random(d, tail, 2, &mut g));
                let len: usize = tail.iter().product();
                let want: Vec<f64> = (0..x.values.len())
                    .map(|i| {
                        let row = &x.values[i / len * len..][..len];
                        let mean = if rms { 0.0 } else { row.iter().sum::<f64>() / len as f64 };
                        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / len as f64;
                        let y = (x.values[i] - mean) / (var + 1e-5).sqrt() * k.values[i % len];
                        if rms { y } else { y + b.values[i % len] }
                    })
                    .collect();
                let got = if rms {
                    let op = composite(&[&x, &k], |g, i| g.rms_norm(i[0], i[1], 1e-5).unwrap());
                    execute(&op, &[&x, &k], d, &shape, false, &caps()).0
                } else {
                    let op = composite(&[&x, &k, &b], |g, i| {
                        g.layer_norm(i[0], i[1], Some(i[2]), axis, 1e-5).unwrap()
                    });
                    execute(&op, &[&x, &k, &b], d, &shape, false, &caps()).0
                };
                close("norm", &got, &want, d, 30.0);
            }
        }
    }
}

#[test]
fn attention() {
    let mut g = Rng(5);
    let one = drawn("templates::attention", FLOATS.len());
    for (n, d) in FLOATS.into_iter().enumerate().filter(|(i, _)| one.is_none_or(|one| *i == one)) {
        for (b, h, hk, sq, sk, w) in [(1, 1, 1, 1, 1, 4), (2, 4, 2, 5, 70, 9), (1, 2, 1, 3, 130, 70)] {
            for (causal, masked) in [(false, false), (true, false), (false, true), (true, true)] {
                let q = Tensor::random(d, &[b, h, sq, w], n, &mut g);
                let k = Tensor::random(d, &[b, hk, sk, w], n + 1, &mut g);
                let v = Tensor::random(d, &[b, hk, sk, w], n + 2, &mut g);
                // Operands as mixed precision makes them: an f32 mask, and a composite that computes in f32.
                let mixed = causal && d.size() == 2;
                let wide = |d| if mixed { DType::F32 } else { d };
                let m = Tensor::new(wide(d), &[b, 1, 1, sk], 0, |i| {
                    if i % 5 == 1 && sk > 1 { f64::NEG_INFINITY } else { 0.25 }
                });
                let mut x = vec![&q, &k, &v];
                if masked {
                    x.push(&m);
                }
                let mut types: Vec<Tensor> = x.iter().map(|t| (*t).clone()).collect();
                types.iter_mut().for_each(|t| t.operand.dtype = wide(t.operand.dtype));
                let op = composite(&types.iter().collect::<Vec<_>>(), |g, i| {
                    g.attention(i[0], i[1], i[2], i.get(3).copied(), causal, 0.4).unwrap()
                });
                let want: Vec<f64> = indices(&[b, h, sq, w])
                    .iter()
                    .map(|o| {
                        let head = o[1] / (h / hk);
                        let e: Vec<f64> = (0..sk)
                            .map(|j| {
                                if causal && j as i64 > o[2] as i64 + sk as i64 - sq as i64 {
                                    return 0.0;
                                }
                                let s: f64 = (0..w)
                                    .map(|c| q.get(&[o[0], o[1], o[2], c]) * k.get(&[o[0], head, j, c]))
                                    .sum();
                                (s * 0.4 + if masked { m.get(&[o[0], 0, 0, j]) } else { 0.0 }).exp()
                            })
                            .collect();
                        let t: f64 = e.iter().sum();
                        (0..sk).map(|j| e[j] / t * v.get(&[o[0], head, j, o[3]])).sum()
                    })
                    .collect();
                let got = execute(&op, &x, d, &[b, h, sq, w], false, &caps()).0;
                close("attention", &got, &want, d, 6.0);
            }
        }
    }
}

#[test]
fn gathers() {
    let mut g = Rng(6);
    for (n, d) in [DType::F32, DType::F16, DType::I64, DType::Bool, DType::U8].into_iter().enumerate() {
        for (t, it) in [DType::I64, DType::I32, DType::U8].into_iter().enumerate() {
            let shape = [3, 5, 4];
            let x = Tensor::random(d, &shape, n, &mut g);
            for axis in 0..3 {
                let len = shape[axis] as i64;
                let pick = |g: &mut Rng| {
                    (g.below(len as usize) as i64 - if it == DType::U8 { 0 } else { g.below(2) as i64 * len })
                        as f64
                };
                let i = Tensor::new(it, &[2, 3], t, |_| pick(&mut g));
                let wrap = |v: f64| (if v < 0.0 { v as i64 + len } else { v as i64 }) as usize;
                let out = [&shape[..axis], &[2, 3], &shape[axis + 1..]].concat();
                let want: Vec<f64> = indices(&out)
                    .iter()
                    .map(|o| {
                        let at = wrap(i.get(&o[axis..axis + 2]));
                        x.get(&[&o[..axis], &[at], &o[axis + 2..]].concat())
                    })
                    .collect();
                let (got, fault) = execute(&Op::Gather { axis }, &[&x, &i], d, &out, false, &caps());
                close("gather", &got, &want, d, 0.0);
                assert!(!fault);
                let mut is = shape;
                is[axis] = 2;
                let i = Tensor::new(it, &is, t, |_| pick(&mut g));
                let want: Vec<f64> = indices(&is)
                    .iter()
                    .map(|o| {
                        let mut at = o.clone();
                        at[axis] = wrap(i.get(o));
                        x.get(&at)
                    })
                    .collect();
                let (got, fault) = execute(&Op::GatherElements { axis }, &[&x, &i], d, &is, false, &caps());
                close("gather_elements", &got, &want, d, 0.0);
                assert!(!fault);
            }
        }
    }
    // An index out of range is clamped and reported, even if its low 32 bits are a valid index.
    let x = Tensor::new(DType::F32, &[4], 0, |i| i as f64);
    for (bad, to) in [(4.0, 3.0), (-5.0, 0.0), ((1u64 << 32) as f64, 3.0)] {
        let i = Tensor::new(DType::I64, &[1], 0, |_| bad);
        let (got, fault) = execute(&Op::Gather { axis: 0 }, &[&x, &i], DType::F32, &[1], false, &caps());
        assert!(got == [to] && fault, "{bad}: {got:?} {fault}");
    }
}

#[test]
fn scatters_and_updates() {
    let mut g = Rng(7);
    let kinds = [ScatterKind::Set, ScatterKind::Add, ScatterKind::Mul, ScatterKind::Max, ScatterKind::Min];
    let combine = |k: ScatterKind, a: f64, u: f64| match k {
        ScatterKind::Set => u,
        ScatterKind::Add => a + u,
        ScatterKind::Mul => a * u,
        ScatterKind::Max => a.max(u),
        ScatterKind::Min => a.min(u),
    };
    for (n, d) in [DType::F32, DType::F64, DType::I32, DType::I16].into_iter().enumerate() {
        for kind in kinds {
            for axis in 0..2 {
                let shape = [4, 3];
                let x = Tensor::random(d, &shape, n, &mut g);
                // The indices repeat, and some are negative. Their shape is smaller than the base's on the
                // other axis.
                let mut is = [2, 2];
                is[axis] = 5;
                let i =
                    Tensor::new(DType::I64, &is, n, |_| g.below(shape[axis] * 2) as f64 - shape[axis] as f64);
                let u = Tensor::random(d, &is, n + 1, &mut g);
                let mut want = x.values.clone();
                for o in indices(&is) {
                    let mut at = o.clone();
                    let v = i.get(&o) as i64;
                    at[axis] = if v < 0 { v + shape[axis] as i64 } else { v } as usize;
                    let w = &mut want[linear(&shape, &at)];
                    *w = Scalar::F(combine(kind, *w, u.get(&o))).cast(d.compute()).as_f64();
                }
                let op = Op::ScatterElements { axis, kind };
                let (got, fault) = execute(&op, &[&x, &i, &u], d, &shape, false, &caps());
                close("scatter_elements", &got, &want, d, 2.0);
                assert!(!fault);
                let i = Tensor::new(DType::I32, &[2, 2], 0, |_| g.below(shape[axis]) as f64);
                let us = [&shape[..axis], &[2, 2], &shape[axis + 1..]].concat();
                let u = Tensor::random(d, &us, n + 2, &mut g);
                let mut want = x.values.clone();
                for o in indices(&us) {
                    let at = [&o[..axis], &[i.get(&o[axis..axis + 2]) as usize], &o[axis + 2..]].concat();
                    let w = &mut want[linear(&shape, &at)];
                    *w = Scalar::F(combine(kind, *w, u.get(&o))).cast(d.compute()).as_f64();
                }
                let op = Op::ScatterRows { axis, kind };
                let (got, _) = execute(&op, &[&x, &i, &u], d, &shape, false, &caps());
                close("scatter_rows", &got, &want, d, 2.0);
                if kind == ScatterKind::Set {
                    let cpu = Caps { is_cpu: true, ..caps() };
                    for (caps, in_place) in [(caps(), true), (cpu.clone(), true), (cpu, false)] {
                        let (got, fault) = execute(&op, &[&x.dense(), &i, &u], d, &shape, in_place, &caps);
                        close("scatter_rows in place", &got, &want, d, 0.0);
                        assert!(!fault);
                    }
                }
            }
        }
        for caps in [caps(), Caps { is_cpu: true, ..caps() }] {
            // Many updates of a few rows: the last one of a row counts. Indices out of range are clamped.
            let shape = [2, 9, 70];
            let x = Tensor::random(d, &shape, 0, &mut g);
            let i = Tensor::new(DType::I64, &[130], 0, |_| g.below(22) as f64 - 11.0);
            let u = Tensor::random(d, &[2, 130, 70], n, &mut g);
            let mut want = x.values.clone();
            for o in indices(u.shape()) {
                let at = i.get(&o[1..2]);
                let at = (if at < 0.0 { at + 9.0 } else { at }).clamp(0.0, 8.0);
                want[linear(&shape, &[o[0], at as usize, o[2]])] = u.get(&o);
            }
            let op = Op::ScatterRows { axis: 1, kind: ScatterKind::Set };
            let (got, fault) = execute(&op, &[&x, &i, &u], d, &shape, true, &caps);
            close("scatter_rows in place", &got, &want, d, 0.0);
            assert!(fault);
        }
        for (at, clamped, in_place) in [(1.0, 1, false), (2.0, 2, true), (9.0, 3, true), (-1.0, 0, false)] {
            let base = Tensor::random(d, &[2, 5, 3], 0, &mut g);
            let u = Tensor::random(d, &[2, 2, 3], n, &mut g);
            let p = Tensor::new(DType::I64, &[], 0, |_| at);
            let mut want = base.values.clone();
            for o in indices(u.shape()) {
                want[linear(base.shape(), &[o[0], o[1] + clamped, o[2]])] = u.get(&o);
            }
            let (got, fault) =
                execute(&Op::UpdateSlice { axis: 1 }, &[&base, &u, &p], d, &[2, 5, 3], in_place, &caps());
            close("update_slice", &got, &want, d, 0.0);
            assert_eq!(fault, at != clamped as f64);
        }
    }
}

#[test]
fn scans_sorts_extremes_and_concatenation() {
    let mut g = Rng(8);
    for (n, d) in
        [DType::F32, DType::F16, DType::I32, DType::U8, DType::I64, DType::F64].into_iter().enumerate()
    {
        let shape = [3, 7, 2];
        for axis in 0..3 {
            let len = shape[axis];
            // Repeated values, and NaN for floats.
            let x = Tensor::new(d, &shape, n, |i| {
                if d.is_float() && i % 11 == 3 { f64::NAN } else { g.below(5) as f64 }
            });
            let line = |o: &[usize]| -> Vec<f64> {
                (0..len)
                    .map(|s| {
                        let mut i = o.to_vec();
                        i[axis] = s;
                        x.get(&i)
                    })
                    .collect()
            };
            for descending in [false, true] {
                let mut want = vec![0.0; x.values.len()];
                for o in indices(&shape).iter().filter(|o| o[axis] == 0) {
                    let l = line(o);
                    let mut order: Vec<usize> = (0..len).collect();
                    let key = |v: f64| if v.is_nan() { f64::INFINITY } else { v };
                    order.sort_by(|&a, &b| {
                        let c = key(l[a]).total_cmp(&key(l[b]));
                        if descending { c.reverse() } else { c }
                    });
                    for (s, i) in order.into_iter().enumerate() {
                        let mut at = o.clone();
                        at[axis] = s;
                        want[linear(&shape, &at)] = i as f64;
                    }
                }
                let (got, _) =
                    execute(&Op::ArgSort { axis, descending }, &[&x], DType::I64, &shape, false, &caps());
                close("argsort", &got, &want, DType::I64, 0.0);
            }
            for (max, last, keep) in
                [(true, false, false), (false, false, true), (true, true, true), (false, true, false)]
            {
                let mut out = shape.to_vec();
                if keep {
                    out[axis] = 1
                } else {
                    out.remove(axis);
                }
                let want: Vec<f64> = indices(&shape)
                    .iter()
                    .filter(|o| o[axis] == 0)
                    .map(|o| {
                        let l = line(o);
                        let mut best = 0;
                        for s in 1..len {
                            let (v, t) = (l[s], l[best]);
                            let better = (v.is_nan() && !t.is_nan()) || if max { v > t } else { v < t };
                            let tie = v == t || (v.is_nan() && t.is_nan());
                            if better || (last && tie) {
                                best = s;
                            }
                        }
                        best as f64
                    })
                    .collect();
                let op = Op::ArgReduce { max, axis, keep, last };
                close(
                    "argreduce",
                    &execute(&op, &[&x], DType::I64, &out, false, &caps()).0,
                    &want,
                    DType::I64,
                    0.0,
                );
            }
            let x = Tensor::random(d, &shape, n, &mut g);
            for kind in [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min] {
                for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
                    let mut want = vec![0.0; x.values.len()];
                    for o in indices(&shape).iter().filter(|o| o[axis] == 0) {
                        let mut acc = kind.identity(d);
                        for s in 0..len {
                            let mut at = o.clone();
                            at[axis] = if reverse { len - 1 - s } else { s };
                            let i = linear(&shape, &at);
                            let c = if d.is_float() { DType::F64 } else { d };
                            let v = Scalar::F(x.values[i]).cast(c);
                            let after = kind.op(d).eval(c, &[acc.cast(c), v]);
                            want[i] = if exclusive { acc } else { after }.as_f64();
                            acc = after;
                        }
                    }
                    let op = Op::Scan { kind, axis, exclusive, reverse };
                    close("scan", &execute(&op, &[&x], d, &shape, false, &caps()).0, &want, d, 8.0);
                }
            }
            let (mut a, mut b) = (shape, shape);
            (a[axis], b[axis]) = (2, 0);
            let (a, b, c) = (
                Tensor::random(d, &a, n, &mut g),
                Tensor::random(d, &b, 0, &mut g),
                Tensor::random(d, &shape, n + 1, &mut g),
            );
            let mut out = shape;
            out[axis] += 2;
            let want: Vec<f64> = indices(&out)
                .iter()
                .map(|o| {
                    let mut i = o.clone();
                    if o[axis] < 2 {
                        a.get(&i)
                    } else {
                        i[axis] -= 2;
                        c.get(&i)
                    }
                })
                .collect();
            close(
                "concat",
                &execute(&Op::Concat { axis }, &[&a, &b, &c], d, &out, false, &caps()).0,
                &want,
                d,
                0.0,
            );
        }
    }
}

#[test]
fn a_masked_operand_is_declined_with_its_number() {
    let m = Operand { dtype: DType::F32, view: View::dense(&[2, 2]).pad(&[1, 0], &[0, 0]) };
    let o = |a, b| Operand { dtype: DType::F32, view: View::dense(&[a, b]) };
    let e = lower_op(&Op::Matmul, &[o(4, 3), m], &[o(4, 2)], false, &caps()).unwrap_err();
    assert_eq!(e.dense, [1]);
}

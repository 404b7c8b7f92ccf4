//! Runs the kernel templates on the available OpenCL devices, lowered for the device and for a GPU. Templates
//! for matrix units run on stand-ins. The results are compared with the float64 reference or with exact sums.

mod common;

use common::*;
use halcyon_hal::{BackendType, Command, Device, Tag};
use halcyon_ir::kernel::MatrixType;
use halcyon_ir::kernel::lower::{Lowered, lower_op};
use halcyon_ir::layout::View;
use halcyon_ir::ops::{Conv, Op, Pool, PoolKind};
use halcyon_ir::reference::eval_f64;
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{ConstData, DType, Graph, NodeId, Result, Scalar, TensorType};

/// Capabilities of a GPU: workgroups of at most 256 work-items and 32 KiB of workgroup memory.
fn like_a_gpu(caps: &Caps) -> Caps {
    Caps {
        is_cpu: false,
        max_workgroup: caps.max_workgroup.min(256),
        workgroup_memory: caps.workgroup_memory.min(32 << 10),
        ..caps.clone()
    }
}

fn check(shapes: &[&[usize]], build: impl Fn(&mut Graph, &[NodeId]) -> Result<NodeId>) {
    let mut r = Random::fresh();
    for under_test in devices_under_test().iter().filter(|l| l.driver.kind() == BackendType::OpenCl) {
        let dev = under_test.open();
        let mut g = Graph::new();
        let data: Vec<ConstData> = shapes
            .iter()
            .map(|s| {
                let v: Vec<f32> = (0..s.iter().product::<usize>())
                    .map(|_| (r.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
                    .collect();
                ConstData::from_slice(s, &v).unwrap()
            })
            .collect();
        let ids: Vec<NodeId> = shapes.iter().map(|s| g.input("x", TensorType::new(DType::F32, *s))).collect();
        let y = build(&mut g, &ids).unwrap();
        g.output("y", y);
        let want = eval_f64(&g, &data, &[]).unwrap()[0].to_vec::<f64>();
        let dense = |s: &[usize]| Operand { dtype: DType::F32, view: View::dense(s) };
        let ins: Vec<Operand> = shapes.iter().map(|s| dense(s)).collect();
        let out = dense(&g.shape(y).known().unwrap());
        for caps in [dev.caps().clone(), like_a_gpu(dev.caps())] {
            let op = &g.node(y).op;
            let low = lower_op(op, &ins, std::slice::from_ref(&out), false, &caps).unwrap();
            let name = low.steps[0].0.name.clone();
            let got = launch(&*dev, &low, &data, want.len());
            let scale = want.iter().fold(0f64, |m, v| m.max(v.abs()));
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let ok = (*g as f64 - w).abs() <= 2e-5 * scale;
                assert!(ok, "{} {name} {shapes:?}: element {i} is {g}, expected {w}", op.name());
            }
        }
    }
}

/// Products on the matrix units of NVIDIA's GPUs, and of AMD's GPUs with waves of 64 or 32 work-items. The
/// stand-ins exchange registers as the instructions do, so a misplaced element gives wrong results.
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
#[test]
fn products_on_matrix_units() {
    let mut r = Random::fresh();
    let Some(narrow) = standin::waves_of_32() else { return };
    let all = standin::all();
    for (s, width, units) in [(&all[0], 32, 3), (&all[1], 64, 2), (&narrow, 32, 2)] {
        let dev = DeviceUnderTest::new(s.driver.clone()).unwrap().open();
        let caps = dev.caps();
        let name = &dev.info().id;
        assert_eq!((caps.subgroup, caps.matrix.len()), (Some(width), units), "{name}");
        for op in &caps.matrix {
            let d = op.operand.storage();
            let shapes = [
                ([64, 64, 64], [false, false]),
                ([72, 40, 136], [true, false]),
                ([35, 33, 65], [false, true]),
            ];
            for ([m, k, n], turned) in shapes {
                // Multiples of 1/8 between -2 and 2, which all types represent, so that products and sums are
                // exact.
                let mut data =
                    |n: usize| -> Vec<f64> { (0..n).map(|_| (r.next() >> 59) as f64 / 8.0 - 2.0).collect() };
                let (a, b) = (data(m * k), data(k * n));
                let bytes = |v: &[f64], d: DType| -> Vec<u8> {
                    v.iter().flat_map(|x| Scalar::F(*x).to_bytes(d)[..d.size()].to_vec()).collect()
                };
                let view = |rows: usize, columns: usize, turned: bool| match turned {
                    true => View::dense(&[columns, rows]).permute(&[1, 0]),
                    false => View::dense(&[rows, columns]),
                };
                let views = [view(m, k, turned[0]), view(k, n, turned[1])];
                let at = |v: &[f64], view: &View, i: usize, j: usize| v[view.at(&[i, j]).unwrap() as usize];
                let inputs = views.clone().map(|view| Operand { dtype: d, view });
                let output = [Operand { dtype: DType::F32, view: View::dense(&[m, n]) }];
                let low = lower_op(&Op::Matmul, &inputs, &output, false, caps).unwrap();
                assert_eq!(low.steps[0].0.name, "matmul_matrix", "{name}");
                let got = run_steps(&*dev, &low, &[bytes(&a, d), bytes(&b, d)], m * n);
                for i in 0..m {
                    for j in 0..n {
                        let term = |l: usize| at(&a, &views[0], i, l) * at(&b, &views[1], l, j);
                        let (got, want) = (got[i * n + j] as f64, (0..k).map(term).sum::<f64>());
                        assert!(got == want, "{name} {op:?} {m}×{k}×{n} [{i}, {j}]: {got}, expected {want}");
                    }
                }
            }
        }
    }
}

/// Attention for prompts on matrix units. Unlike a product, it reads registers of other work-items, and the
/// weights, which are results of the first product, become operands of the second.
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
#[test]
fn attention_on_matrix_units() {
    if halcyon_test_host::left_out("attention_on_matrix_units") {
        return;
    }
    let mut r = Random::fresh();
    let Some(narrow) = standin::waves_of_32() else { return };
    let all = standin::all();
    for s in [&all[0], &all[1], &narrow] {
        let dev = DeviceUnderTest::new(s.driver.clone()).unwrap().open();
        let name = &dev.info().id;
        for (d, eps) in dev.caps().matrix.iter().map(|o| match o.operand {
            MatrixType::BF16 => (DType::BF16, 2f64.powi(-8)),
            _ => (o.operand.storage(), 2f64.powi(-10)),
        }) {
            // Batch, query heads, key heads, queries, keys, row length; whether masked.
            for ([n, h, hk, sq, sk, w], masked) in
                [([1, 4, 2, 40, 75, 64], false), ([2, 2, 1, 33, 37, 20], true)]
            {
                let mut g = Graph::new();
                let mut shapes = vec![vec![n, h, sq, w], vec![n, hk, sk, w], vec![n, hk, sk, w]];
                shapes.extend(masked.then(|| vec![sq, sk]));
                let data: Vec<ConstData> = shapes
                    .iter()
                    .map(|s| {
                        let random = || Scalar::F((r.next() >> 40) as f64 / (1u64 << 23) as f64 - 1.0);
                        let v: Vec<u8> = std::iter::repeat_with(random)
                            .take(s.iter().product())
                            .flat_map(|x| x.to_bytes(d)[..d.size()].to_vec())
                            .collect();
                        ConstData::new(d, s, std::sync::Arc::new(v)).unwrap()
                    })
                    .collect();
                let x: Vec<NodeId> =
                    shapes.iter().map(|s| g.input("x", TensorType::new(d, &s[..]))).collect();
                let y = g.attention(x[0], x[1], x[2], x.get(3).copied(), true, 0.5).unwrap();
                g.output("y", y);
                let want: Vec<f64> =
                    eval_f64(&g, &data, &[]).unwrap()[0].scalars().map(|v| v.as_f64()).collect();
                let dense = |s: &[usize]| Operand { dtype: d, view: View::dense(s) };
                let inputs: Vec<Operand> = shapes.iter().map(|s| dense(s)).collect();
                let output = [dense(&shapes[0])];
                let low = lower_op(&g.node(y).op, &inputs, &output, false, dev.caps()).unwrap();
                assert_eq!(low.steps[0].0.name, "attention_matrix", "{name}");
                let bytes: Vec<Vec<u8>> = data.iter().map(|d| d.bytes().to_vec()).collect();
                let got = run_bytes(&*dev, &low, &bytes, want.len() * d.size());
                for (i, (g, w)) in got.chunks(d.size()).zip(&want).enumerate() {
                    let g = Scalar::from_bytes(d, g).as_f64();
                    // Operands, weights and results are rounded; results are at most 1.
                    assert!((g - w).abs() <= 2.0 * eps, "{name} {d} [{i}]: {g}, expected {w}");
                }
            }
        }
    }
}

fn launch(dev: &dyn Device, low: &Lowered, data: &[ConstData], results: usize) -> Vec<f32> {
    run_steps(dev, low, &data.iter().map(|d| d.bytes().to_vec()).collect::<Vec<_>>(), results)
}

fn run_steps(dev: &dyn Device, low: &Lowered, data: &[Vec<u8>], results: usize) -> Vec<f32> {
    let raw = run_bytes(dev, low, data, results * 4);
    raw.chunks(4).map(|b| b.try_into().map_or(f32::NAN, f32::from_le_bytes)).collect()
}

fn run_bytes(dev: &dyn Device, low: &Lowered, data: &[Vec<u8>], bytes: usize) -> Vec<u8> {
    let mut raw = vec![0xFF; bytes];
    let poison = low.temps.iter().map(|n| vec![0xFF; *n]);
    let mut all = vec![];
    for d in data.iter().cloned().chain([raw.clone()]).chain(poison) {
        let b = dev.alloc(d.len(), Tag::Io).unwrap();
        dev.write(&b, 0, &d).unwrap();
        all.push(b);
    }
    for (k, l, places) in &low.steps {
        let program = dev.compile(k).unwrap();
        let buffers: Vec<_> = places.iter().map(|&i| all[i].clone()).collect();
        dev.submit(&[Command::Launch {
            program: &program,
            groups: l.groups,
            buffers: &buffers,
            params: &l.params,
            fault: 0,
        }])
        .unwrap();
    }
    dev.read(&all[data.len()], 0, &mut raw).unwrap();
    raw
}

#[test]
fn products() {
    for (m, k, n) in [(1, 300, 70), (8, 64, 172), (70, 65, 5), (67, 33, 130), (3, 5, 7)] {
        check(&[&[2, m, k], &[2, k, n]], |g, x| g.matmul(x[0], x[1]));
    }
}

#[test]
fn convolutions_and_pools() {
    let mut c = Conv::new(2);
    c.pad = [(1, 1), (1, 0)].as_slice().into();
    check(&[&[2, 6, 9, 19], &[10, 6, 3, 3]], |g, x| g.conv(x[0], x[1], c.clone()));
    check(&[&[2, 6, 9, 19], &[10, 6, 1, 1]], |g, x| g.conv(x[0], x[1], Conv::new(2)));
    for kind in [PoolKind::Max, PoolKind::Avg { count_include_pad: false }] {
        let p = Pool {
            kind,
            kernel: [3, 2].as_slice().into(),
            stride: [2, 1].as_slice().into(),
            pad: [(1, 1), (0, 1)].as_slice().into(),
            dilation: [1, 1].as_slice().into(),
        };
        check(&[&[2, 3, 9, 12]], |g, x| g.pool(x[0], p.clone()));
    }
}

#[test]
fn rows() {
    for (shape, axis) in [([5, 70, 1], 1), ([30, 65, 3], 1), ([3, 1, 1100], 2)] {
        check(&[&shape], |g, x| g.softmax(x[0], axis));
        check(&[&shape], |g, x| g.log_softmax(x[0], axis));
    }
    for n in [9, 100, 1030] {
        check(&[&[7, n], &[n], &[n]], |g, x| g.layer_norm(x[0], x[1], Some(x[2]), 1, 1e-5));
        check(&[&[7, n], &[n]], |g, x| g.rms_norm(x[0], x[1], 1e-5));
    }
}

#[test]
fn attention() {
    for (sq, sk, d) in [(1, 150, 64), (19, 37, 20), (5, 40, 100), (3, 20, 200)] {
        let (q, k) = ([2, 4, sq, d], [2, 2, sk, d]);
        check(&[&q, &k, &k, &[sq, sk]], |g, x| g.attention(x[0], x[1], x[2], Some(x[3]), true, 0.2));
    }
    // Few queries and many keys, which GPUs process in parts.
    for (h, sq, sk, d) in [(4, 1, 700, 64), (2, 3, 300, 20)] {
        let (q, k) = ([1, h, sq, d], [1, 1, sk, d]);
        check(&[&q, &k, &k, &[sq, sk]], |g, x| g.attention(x[0], x[1], x[2], Some(x[3]), true, 0.2));
    }
}

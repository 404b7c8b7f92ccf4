//! Tests of the interpreter. Its values must be those of the scalar ops' definitions, they must not depend on
//! the subgroup size or the order of work-items, and the sanitizer must report planted faults.

use crate::common;
use halcyon_ir::kernel::interp::{Fault, Options, Outcome, Space, run};
use halcyon_ir::kernel::*;
use halcyon_ir::{DType, Scalar};

fn bytes(d: DType, v: &[f64]) -> Vec<u8> {
    v.iter().flat_map(|&x| Scalar::F(x).to_bytes(d)[..d.size()].to_vec()).collect()
}

fn values(d: DType, b: &[u8]) -> Vec<Scalar> {
    b.chunks(d.size()).map(|c| Scalar::from_bytes(d, c)).collect()
}

fn options(subgroup: u32, seed: u64) -> Options {
    Options { subgroup, seed: Some(seed), sanitize: true, ..Options::default() }
}

fn launch(k: &Kernel, groups: u32, p: &[(&str, Scalar)]) -> Launch {
    Launch::bind(k, [groups, 1, 1], p).unwrap()
}

#[test]
fn casts_follow_the_scalar_rules() {
    let inputs = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        2.5,
        255.7,
        256.0,
        -129.0,
        70000.0,
        3e9,
        -3e9,
        1e20,
        65520.0,
        1.0009765625,
        f64::NAN,
        f64::INFINITY,
        16777217.0,
    ];
    for k in DType::native().flat_map(|a| DType::native().map(move |b| (a, b))) {
        let kernel = common::cast(k.0, k.1);
        let mut mem = vec![bytes(k.0, &inputs), vec![0; inputs.len() * k.1.size()]];
        let l = launch(&kernel, 1, &[("n", Scalar::from(inputs.len()))]);
        assert_eq!(run(&kernel, &l, &mut mem, &options(1, 1)).unwrap().faults, 0);
        for (x, y) in values(k.0, &mem[0]).into_iter().zip(values(k.1, &mem[1])) {
            assert_eq!(x.cast(k.1).to_bytes(k.1), y.to_bytes(k.1), "{x:?} from {} to {}", k.0, k.1);
        }
    }
}

#[test]
fn scalar_ops_follow_their_rows() {
    let x = [-2.5, 0.25, 1.0, 7.0, -7.0, 0.0, 3.0];
    for d in [DType::Bool, DType::I32, DType::U32, DType::I64, DType::U64, DType::F32, DType::F64] {
        for r in halcyon_ir::ops::element_wise::ROWS.iter().filter(|r| r.op.takes(d)) {
            let k = common::scalar(r.op, d);
            let types: Vec<DType> = k.buffers.iter().map(|b| b.dtype).collect();
            let mut mem: Vec<Vec<u8>> = (0..r.arity)
                .map(|i| bytes(types[i], &(0..x.len()).map(|j| x[(j + i * 3) % x.len()]).collect::<Vec<_>>()))
                .collect();
            let out = types[r.arity];
            mem.push(vec![0; x.len() * out.size()]);
            let l = launch(&k, 1, &[("n", Scalar::from(x.len()))]);
            run(&k, &l, &mut mem, &options(4, 9)).unwrap();
            for j in 0..x.len() {
                let a: Vec<Scalar> = (0..r.arity).map(|i| values(types[i], &mem[i])[j]).collect();
                let (want, got) = (r.op.eval(d, &a), values(out, &mem[r.arity])[j]);
                let nan = want.as_f64().is_nan() && got.as_f64().is_nan();
                assert!(
                    nan || want.as_f64() == got.as_f64(),
                    "{} on {d}: {a:?} gives {got:?}, not {want:?}",
                    r.name
                );
            }
        }
    }
}

#[test]
fn row_sums_at_every_subgroup_size_and_order() {
    let (rows, n) = (5, 100);
    let x: Vec<f64> = (0..rows * n).map(|i| ((i * 37) % 101) as f64 - 50.0).collect();
    for d in [DType::F32, DType::F64, DType::I32, DType::I16] {
        let k = common::row_sum(d);
        for s in [1, 4, 32, 64] {
            let mut mem = vec![bytes(d, &x), vec![0; rows * d.size()], vec![0; rows * d.size()]];
            let o = Options { poisoned: vec![BufId(1), BufId(2)], ..options(s, s as u64 + 3) };
            let l = launch(&k, rows as u32, &[("n", Scalar::from(n))]);
            let out = run(&k, &l, &mut mem, &o).unwrap();
            assert!(out.reports.is_empty(), "{}", out.reports[0]);
            for r in 0..rows {
                let row = &x[r * n..][..n];
                assert_eq!(values(d, &mem[1])[r].as_f64(), row.iter().sum::<f64>());
                assert_eq!(values(d, &mem[2])[r].as_f64(), row.iter().fold(f64::MIN, |a, &b| a.max(b)));
            }
        }
    }
}

fn subgroup_results(k: &Kernel, width: usize) -> Vec<f64> {
    let x: Vec<f64> = (0..64).map(|i| 1.0 + (i % 3) as f64 * 0.25).collect();
    let mut mem = vec![bytes(DType::F32, &x), vec![0; 64 * 24], vec![0; 64 * 4]];
    let out = run(k, &launch(k, 1, &[]), &mut mem, &options(width as u32, 5)).unwrap();
    assert_eq!(out.faults, 0, "{:?}", out.reports);
    values(DType::F32, &mem[1]).iter().map(|s| s.as_f64()).collect()
}

#[test]
fn subgroup_operations_and_their_stand_in() {
    let x: Vec<f64> = (0..64).map(|i| 1.0 + (i % 3) as f64 * 0.25).collect();
    let k = common::subgroup(DType::F32);
    for width in [1usize, 4, 32, 64] {
        let y = subgroup_results(&k, width);
        for i in 0..64 {
            let s = &x[i / width * width..][..width];
            assert_eq!(y[i * 6], s.iter().sum::<f64>());
            let p: f64 = s.iter().product();
            assert!((y[i * 6 + 1] - p).abs() <= 1e-5 * p);
            assert_eq!(y[i * 6 + 2], s.iter().fold(9.0, |a: f64, &b| a.min(b)));
            assert_eq!(y[i * 6 + 3], s.iter().fold(0.0, |a: f64, &b| a.max(b)));
            if width > 1 {
                assert_eq!(y[i * 6 + 4], x[i ^ 1]);
            }
            assert_eq!(y[i * 6 + 5], x[i / width * width + width - 1 - i % width]);
        }
    }
    // On devices without subgroups, the rewritten kernel behaves as with subgroups of 32.
    let plain = halcyon_ir::render::without_subgroups(&k);
    verify(&plain).unwrap();
    assert!(!plain.uses_subgroups());
    assert_eq!(subgroup_results(&plain, 1), subgroup_results(&k, 32));
}

#[test]
fn every_node_runs_clean() {
    let k = common::everything();
    let n = 128usize;
    let f: Vec<f64> = (0..n * 4).map(|i| (i % 17) as f64).collect();
    let packed: Vec<f64> = (0..n * 4).map(|i| (i % 255) as f64 - 127.0).collect();
    let mut first: Option<Vec<Vec<u8>>> = None;
    for s in [1, 4, 32, 64] {
        let mut mem = vec![
            bytes(DType::F32, &f),
            vec![0; n * 16],
            bytes(DType::I8, &packed),
            vec![0; n * 4],
            vec![0; 8],
            vec![0; n],
            vec![0; 4],
        ];
        let l = launch(&k, 2, &[("n", Scalar::from(n)), ("wide", Scalar::from(7i64 << 40))]);
        let out = run(&k, &l, &mut mem, &options(s, 77 + s as u64)).unwrap();
        assert!(out.reports.is_empty(), "{}", out.reports[0]);
        let counts = values(DType::U32, &mem[4]);
        assert_eq!(counts[0].as_i64(), 44, "multiples of 3 below 64, twice");
        assert_eq!(counts[1].as_i64(), 2 * (128 - 44));
        let i = 5;
        let row: Vec<i64> = values(DType::I8, &mem[2])[i * 4..i * 4 + 4].iter().map(|s| s.as_i64()).collect();
        let dot: i64 = 3 + row.iter().map(|&b| b * ((b as u8 ^ 1) as i8 as i64)).sum::<i64>();
        assert_eq!(values(DType::I32, &mem[3])[i].as_i64(), dot);
        match &first {
            Some(m) => assert!(*m == mem, "results depend on order or subgroup size"),
            None => first = Some(mem),
        }
    }
}

fn planted(f: impl FnOnce(&Builder, Buf, Buf)) -> (Kernel, Outcome) {
    let b = Builder::new("planted", [8, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::F32, true));
    f(&b, x, y);
    let k = b.finish().unwrap();
    let mut mem = vec![vec![0; 64], vec![0; 64]];
    let o = Options { poisoned: vec![BufId(1)], ..options(4, 11) };
    let l = Launch { groups: [2, 1, 1], params: vec![] };
    let out = run(&k, &l, &mut mem, &o).unwrap();
    (k, out)
}

#[test]
fn a_planted_race_is_found() {
    // Neighbours read each other's element of workgroup memory without a barrier.
    let (_, out) = planted(|b, x, y| {
        let l = b.local(Ty::F32, 8);
        let me = b.local_id(0);
        l.store(me, b.load(x, me));
        b.store(y, b.linear_id(), l.load((me + 1).imod(8)));
    });
    assert!(out.reports.iter().any(|r| r.fault == Fault::Race && r.space == Space::Local(LocalId(0))));
    // With a barrier there is no race.
    let (_, out) = planted(|b, x, y| {
        let l = b.local(Ty::F32, 8);
        let me = b.local_id(0);
        l.store(me, b.load(x, me));
        b.barrier();
        b.store(y, b.linear_id(), l.load((me + 1).imod(8)));
    });
    assert_eq!(out.faults, 0, "{:?}", out.reports);
    // Two workgroups write the same element.
    let (_, out) = planted(|b, x, y| {
        b.store(y, b.local_id(0), b.load(x, b.linear_id()));
    });
    let r = out.reports.iter().find(|r| r.fault == Fault::Race).unwrap();
    assert_eq!((r.space, r.statement), (Space::Global(BufId(1)), 1));
    // A barrier for workgroup memory does not order accesses to global memory. A barrier for global memory
    // does, within a workgroup.
    for global in [false, true] {
        let (_, out) = planted(|b, x, y| {
            b.store(y, b.linear_id(), b.load(x, b.linear_id()));
            if global {
                b.barrier_global()
            } else {
                b.barrier()
            };
            let other = b.load(y, b.linear_group() * 8 + 7 - b.local_id(0));
            let l = b.local(Ty::F32, 8);
            l.store(b.local_id(0), other);
        });
        assert_eq!(out.reports.iter().any(|r| r.fault == Fault::Race), !global);
    }
}

#[test]
fn a_planted_out_of_bounds_access_is_found() {
    let (_, out) = planted(|b, x, y| {
        let i = b.linear_id();
        b.store(y, i, b.load(x, i + 1));
    });
    assert_eq!(out.faults, 1);
    let r = out.reports[0];
    assert_eq!(
        (r.fault, r.space, r.index, r.item, r.statement),
        (Fault::OutOfBounds, Space::Global(BufId(0)), 16, 15, 0)
    );
    let (_, out) = planted(|b, _, y| {
        let p = b.private(Ty::F32, 2);
        p.store(b.local_id(0), 1.0);
        b.store(y, b.linear_id() - 1, 0.0);
    });
    assert!(out.reports.iter().any(|r| r.space == Space::Private(PrivateId(0)) && r.index == 7));
    assert!(out.reports.iter().any(|r| r.space == Space::Global(BufId(1)) && r.index == -1));
}

#[test]
fn a_planted_uninitialised_read_is_found() {
    let (_, out) = planted(|b, _, y| {
        let l = b.local(Ty::F32, 8);
        let p = b.private(Ty::F32, 2);
        let g = b.load(y, b.linear_id());
        b.store(y, b.linear_id(), l.load(0) + p.load(1) + g);
    });
    for s in [Space::Local(LocalId(0)), Space::Private(PrivateId(0)), Space::Global(BufId(1))] {
        assert!(out.reports.iter().any(|r| r.fault == Fault::Uninitialised && r.space == s), "{s:?}");
    }
}

fn refused(f: impl FnOnce(&Builder, Buf, Buf)) -> String {
    let b = Builder::new("refused", [8, 1, 1]);
    let (x, y) = (b.raw_buffer(DType::F32, false), b.raw_buffer(DType::F32, true));
    f(&b, x, y);
    b.finish().unwrap_err().to_string()
}

#[test]
fn the_verifier_refuses() {
    let has = |e: String, what: &str| assert!(e.contains(what), "{e}");
    has(refused(|b, x, _| b.store(x, 0, 1.0)), "read-only");
    has(refused(|b, _, y| b.store(y, b.constant(Ty::F32, 1.0), 1.0)), "not an integer");
    has(refused(|b, _, y| b.store(y, 0, b.constant(Ty::I32, 1))), "not f32");
    has(refused(|b, x, y| b.store(y, 0, b.load(x, 0) + b.index(1))), "operand types differ");
    has(refused(|b, _, _| b.if_(b.local_id(0).lt(3), || b.barrier())), "differs between work-items");
    has(refused(|b, _, _| b.for_(0, b.local_id(0), 1, |_| b.barrier())), "differs between work-items");
    // In the second iteration, the condition differs between work-items, because the first one has set the
    // variable.
    let e = refused(|b, x, _| {
        let v = b.var_of(Ty::F32, 0.0);
        b.for_(0, 4, 1, |_| {
            b.if_(v.get().lt(1.0), || b.barrier());
            v.set(b.load(x, b.local_id(0)));
        });
    });
    has(e, "differs between work-items");
    has(refused(|b, _, _| b.local(Ty::F32, 4).store(4, 1.0)), "which has 4 elements");
    let e = refused(|b, x, y| {
        let mut leak = None;
        b.if_(b.local_id(0).lt(1), || leak = Some(b.load(x, 0)));
        b.store(y, 0, leak.unwrap());
    });
    has(e, "not in scope");
    has(
        refused(|b, _, y| b.store(y, 0, b.subgroup_reduce(Reduce::Add, b.constant(Ty::F32, 1.0)))),
        "whole subgroups",
    );
    has(refused(|b, _, _| b.for_(0, 4, 0, |_| {})), "not positive");
}

#[test]
fn a_barrier_in_uniform_flow_is_accepted() {
    let b = Builder::new("uniform", [8, 1, 1]);
    let x = b.raw_buffer(DType::I32, false);
    let n = b.load(x, b.group_id(0));
    b.for_(0, n, 1, |_| b.barrier());
    b.if_(n.gt(b.size("m")), || b.barrier());
    b.finish().unwrap();
}

#[test]
fn limits_of_a_device_are_checked() {
    let caps =
        halcyon_ir::target::Caps { f64: false, max_workgroup: 32, ..halcyon_ir::target::Caps::generous() };
    assert!(verify_for(&common::axpy(DType::F32), &caps).unwrap_err().to_string().contains("64 work-items"));
    let caps = halcyon_ir::target::Caps { max_workgroup: 64, ..caps };
    assert!(verify_for(&common::axpy(DType::F64), &caps).unwrap_err().to_string().contains("f64"));
    verify_for(&common::axpy(DType::F32), &caps).unwrap();
}

#[test]
fn the_key_ignores_names_and_survives_serde() {
    let k = common::everything();
    let mut renamed = k.clone();
    renamed.name = "other".into();
    renamed.params[0].name = "m".into();
    assert_eq!(k.key(), renamed.key());
    assert_ne!(k.key(), common::axpy(DType::F32).key());
    assert_ne!(common::axpy(DType::F16).key(), common::axpy(DType::BF16).key());
    let back: Kernel = serde_json::from_str(&serde_json::to_string(&k).unwrap()).unwrap();
    assert_eq!(back, k);
    assert_eq!(back.key(), k.key());
}

#[test]
fn a_launch_names_what_is_missing() {
    let k = common::axpy(DType::F32);
    let e = Launch::bind(&k, [1, 1, 1], &[("n", Scalar::from(4usize))]).unwrap_err();
    assert!(e.to_string().contains("parameter a not given"), "{e}");
    let e = Launch::bind(&k, [1, 1, 1], &[("n", Scalar::from(1u64 << 40)), ("a", Scalar::from(1.0f32))])
        .unwrap_err();
    assert!(e.to_string().contains("does not fit"), "{e}");
    assert_eq!(Launch::fold(10, 65_535), [10, 1, 1]);
    let [x, y, _] = Launch::fold(200_000, 65_535);
    assert!(x <= 65_535 && x as u64 * y as u64 >= 200_000);
}

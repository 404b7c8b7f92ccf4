//! The op table: every op, with every dtype it takes, on every device present, at levels O0 and O1. Forward
//! results are compared with the float64 reference and gradients with finite differences, and the generated
//! kernels of a sample of the cases run under the sanitizer.
//!
//! `HALCYON_SEED` repeats a run's inputs; `HALCYON_ROW` selects rows by a part of their name. On devices that
//! build a program for each case, one case in 48 of a quarter of the rows is run, and at least one of each of
//! these rows, drawn anew in every run. `HALCYON_CASES=all` or `HALCYON_ROW` runs all of them, and
//! `HALCYON_CASES=N` one case in N on every device.

use halcyon::ir::composite::CompositeKind;
use halcyon::ir::ops::element_wise::ROWS;
use halcyon::ir::ops::{KINDS, PoolKind, ReduceKind, ScatterKind};
use halcyon::ir::{Graph, Op, ScalarOp};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, Order, Scan};
use halcyon_test::devices::{devices, drawn_backends, open};
use halcyon_test::optable::case::Row;
use halcyon_test::optable::check::{Tally, check_rows, check_some, selects};
use halcyon_test::optable::{elementwise, grads, random, rows, sanitizer, small};
use halcyon_test::{Rng, one_in};
use std::collections::BTreeSet;

fn forward(what: &str, kind: BackendType, rows: &[Row]) {
    let backends: Vec<Backend> =
        [Level::O0, Level::O1].into_iter().filter_map(|l| open(what, kind, l)).collect();
    if !backends.is_empty() && selects(what, rows) {
        check_rows(what, rows, &backends, &mut Rng::fresh(what)).finish(what);
    }
}

/// The rows of a test on a device that builds a program for each case: a quarter of them, drawn for each
/// device, unless all cases or certain rows run.
fn quarter(what: &str, rows: Vec<Row>) -> Vec<Row> {
    if std::env::var_os("HALCYON_ROW").is_some() || one_in(2) == 1 {
        return rows;
    }
    let mut rng = Rng::fresh(&format!("rows of {what}"));
    rows.into_iter().filter(|_| rng.below(4) == 0).collect()
}

#[test]
fn forward_on_cpu() {
    forward("forward on cpu", BackendType::Cpu, &rows());
}

// The rows are tested by two tests, which can run at the same time: most of the time is spent building
// programs one after another.
fn forward_elementwise(kind: BackendType) {
    let rows: Vec<Row> = elementwise::rows().into_iter().chain(small::rows()).collect();
    let what = format!("element-wise ops on {kind}");
    forward(&what, kind, &quarter(&what, rows));
}

fn forward_structured(kind: BackendType) {
    let others: BTreeSet<String> =
        elementwise::rows().into_iter().chain(small::rows()).map(|r| r.name).collect();
    let rows: Vec<Row> = rows().into_iter().filter(|r| !others.contains(&r.name)).collect();
    let what = format!("structured ops on {kind}");
    forward(&what, kind, &quarter(&what, rows));
}

/// Runs a test on the devices other than the CPU, at the same time.
fn on_each(test: &str, f: fn(BackendType)) {
    std::thread::scope(|s| {
        for kind in drawn_backends(test).into_iter().filter(|k| *k != BackendType::Cpu) {
            s.spawn(move || f(kind));
        }
    });
}

#[test]
fn forward_on_devices_elementwise() {
    on_each("forward_on_devices_elementwise", forward_elementwise);
}

#[test]
fn forward_on_devices_structured() {
    on_each("forward_on_devices_structured", forward_structured);
}

#[test]
fn gradients_agree_with_finite_differences() {
    let what = "gradients";
    let graded: Vec<Row> = rows().into_iter().filter(|r| r.cases.iter().any(|c| c.grad)).collect();
    if selects(what, &graded) {
        let backends = devices(what, Level::O1);
        grads::check_rows(&graded, &backends, &mut Rng::fresh(what)).finish(what);
    }
}

fn gradients_through(how: grads::Through) {
    let what = format!("gradients through {how:?}");
    let backends = devices(&what, Level::O2);
    let t = grads::check_through(&rows(), how, &backends, &mut Rng::fresh(&what));
    let drawn = std::env::var_os("HALCYON_ROW").is_some() || backends.is_empty();
    assert!(drawn || t.cases >= 10, "only {} gradients were compared", t.cases);
    t.finish(&what);
}

#[test]
fn gradients_through_views() {
    gradients_through(grads::Through::Views);
}

#[test]
fn gradients_through_broadcasts() {
    gradients_through(grads::Through::Broadcast);
}

#[test]
fn gradients_through_checkpoints() {
    gradients_through(grads::Through::Checkpoint);
}

#[test]
fn gradients_in_mixed_precision() {
    let what = "gradients in mixed precision";
    let mixed = |b: &Backend| {
        let n = Backend::builder().backend_type(b.info().backend).level(Level::O2);
        n.amp(AmpPolicy::Bf16).force_amp(true).build().unwrap()
    };
    let backends: Vec<Backend> = devices(what, Level::O2).iter().map(mixed).collect();
    // Rounding to bf16 has a relative error of up to 2^-8. It happens to operands, to results and to the
    // gradients of the loss.
    let t = grads::check_mixed(&rows(), 0.03, &backends, &mut Rng::fresh(what));
    assert!(std::env::var_os("HALCYON_ROW").is_some() || backends.is_empty() || t.cases >= 5);
    t.finish(what);
}

#[test]
fn second_gradients_agree_with_finite_differences() {
    let what = "second gradients";
    let backends = devices(what, Level::O1);
    let (t, without) = grads::check_second(&rows(), &backends, &mut Rng::fresh(what));
    let drawn = std::env::var_os("HALCYON_ROW").is_some() || backends.is_empty();
    assert!(drawn || t.cases > without, "{} have a second gradient, {without} have none", t.cases);
    t.finish(what);
}

#[test]
fn random_graphs_on_cpu() {
    let what = "random graphs on cpu";
    let backends: Vec<Backend> =
        [Level::O0, Level::O1].into_iter().filter_map(|l| open(what, BackendType::Cpu, l)).collect();
    let mut rng = Rng::fresh(what);
    // `HALCYON_GRAPH` repeats one graph.
    let seeds = match std::env::var("HALCYON_GRAPH").ok().and_then(|s| s.parse().ok()) {
        Some(one) => vec![one],
        None => (0..200).map(|_| rng.next()).collect(),
    };
    let failures = seeds.into_iter().filter_map(|s| random::check(s, &backends).err()).collect();
    Tally { cases: 200 * backends.len(), failures, ..Tally::default() }.finish(what);
}

fn random_graphs(kind: BackendType) {
    let what = format!("random graphs on {kind}");
    let Some(b) = open(&what, kind, Level::O1) else {
        return;
    };
    // Uses the same graphs in every run: each graph has its own programs, which the disk cache keeps.
    let failures = (1..=30).filter_map(|seed| random::check(seed, std::slice::from_ref(&b)).err()).collect();
    Tally { cases: 30, failures, ..Tally::default() }.finish(&what);
}

#[test]
fn random_graphs_on_devices() {
    on_each("random_graphs_on_devices", random_graphs);
}

/// Maximum operand elements of cases that the interpreter runs in moderate time.
const SANITIZED_ELEMENTS: usize = 3000;

/// Runs the kernels that a third of the table's small cases (all with `HALCYON_CASES=all`) lower to on a
/// device without library kernels, with this subgroup size.
fn sanitized(subgroup: u32) {
    let what = format!("sanitizer, subgroups of {subgroup}");
    let mut rng = Rng::fresh(&what);
    let mut rows = rows();
    for row in &mut rows {
        row.cases.retain(|c| {
            c.ins.iter().map(|i| i.dims.iter().product::<usize>()).sum::<usize>() <= SANITIZED_ELEMENTS
        });
        for c in row.cases.iter_mut().filter(|c| c.slow) {
            c.only = vec![DType::F32];
        }
    }
    // With subgroups of 4 and 64 the device reports that it is a CPU, for which templates choose other
    // shapes.
    let (b, s) = sanitizer::backend(subgroup, subgroup == 4 || subgroup == 64, rng.next(), Level::O1);
    let mut t = check_some(&what, &rows, &[b], 3, &mut rng);
    let whole = std::env::var_os("HALCYON_ROW").is_none() && one_in(3) <= 3;
    let least = if whole { 1000 } else { 1 };
    assert!(s.launches() >= least, "only {} launches", s.launches());
    t.failures.extend(s.take_reports());
    t.finish(&what);
}

#[test]
fn kernels_under_the_sanitizer_1() {
    sanitized(1);
}

#[test]
fn kernels_under_the_sanitizer_4() {
    sanitized(4);
}

#[test]
fn kernels_under_the_sanitizer_32() {
    sanitized(32);
}

#[test]
fn kernels_under_the_sanitizer_64() {
    sanitized(64);
}

/// The kind of an op, with the variants that have code of their own.
fn kind(op: &Op) -> String {
    match op {
        Op::Scalar(s) => s.name().into(),
        Op::Reduce { kind, .. } => format!("reduce {}", reduction(*kind)),
        Op::Scan { kind, .. } => format!("scan {}", reduction(*kind)),
        Op::ArgReduce { max, .. } => format!("arg_reduce {}", if *max { "max" } else { "min" }),
        Op::ScatterElements { kind, .. } => format!("scatter_elements {}", scatter(*kind)),
        Op::ScatterRows { kind, .. } => format!("scatter_rows {}", scatter(*kind)),
        Op::Pool(p) => format!("pool {}", pool(p.kind)),
        Op::PoolGrad(p) => format!("pool_grad {}", pool(p.kind)),
        Op::Composite(c) => c.name().to_string(),
        op => op.kind().into(),
    }
}

fn reduction(k: ReduceKind) -> &'static str {
    match k {
        ReduceKind::Sum => "sum",
        ReduceKind::Prod => "prod",
        ReduceKind::Max => "max",
        ReduceKind::Min => "min",
    }
}

fn scatter(k: ScatterKind) -> &'static str {
    match k {
        ScatterKind::Set => "set",
        ScatterKind::Add => "add",
        ScatterKind::Mul => "mul",
        ScatterKind::Max => "max",
        ScatterKind::Min => "min",
    }
}

fn pool(k: PoolKind) -> &'static str {
    match k {
        PoolKind::Max => "max",
        PoolKind::Avg { count_include_pad: true } => "avg with padding",
        PoolKind::Avg { count_include_pad: false } => "avg",
    }
}

/// The names that [`kind`] gives to ops that are neither scalar ops nor composites.
fn structured_kinds() -> BTreeSet<String> {
    let reductions = ["sum", "prod", "max", "min"].as_slice();
    let scatters = ["set", "add", "mul", "max", "min"].as_slice();
    let pools = ["max", "avg", "avg with padding"].as_slice();
    let variants = |kind: &str| match kind {
        "reduce" | "scan" => reductions,
        "scatter_elements" | "scatter_rows" => scatters,
        "pool" | "pool_grad" => pools,
        "arg_reduce" => ["max", "min"].as_slice(),
        _ => &[],
    };
    let mut all = BTreeSet::new();
    for &kind in KINDS.iter().filter(|k| !["scalar", "composite"].contains(k)) {
        match variants(kind) {
            [] => all.extend([kind.to_string()]),
            some => all.extend(some.iter().map(|v| format!("{kind} {v}"))),
        }
    }
    all
}

/// Names of the formulas (functions of `Graph` in `composite.rs`), read from the source, and of the built-in
/// composites that have a builder.
fn composites() -> BTreeSet<String> {
    let source = include_str!("../../halcyon-ir/src/composite.rs");
    let (_, builders) = source.split_once("impl Graph {").expect("formulas are methods of Graph");
    let formulas = builders
        .lines()
        .filter_map(|l| l.trim().strip_prefix("pub fn "))
        .filter_map(|l| l.split_once('(').map(|(name, _)| name.to_string()))
        .filter(|n| n != "composite");
    let built_in =
        CompositeKind::BUILT_IN.iter().filter(|k| k.row().has_builder).map(|k| k.name().to_string());
    formulas.chain(built_in).collect()
}

#[test]
fn nothing_is_missing() {
    let rows = rows();
    let mut seen: BTreeSet<(String, String)> = BTreeSet::new();
    let mut walk = |g: &Graph| {
        for n in g.nodes() {
            let on = n.inputs.last().map_or(n.ty.dtype, |x| g.dtype(*x));
            seen.insert((kind(&n.op), on.name().into()));
        }
    };
    for row in &rows {
        for c in &row.cases {
            for d in row.dtypes.iter().filter(|d| c.takes(**d)) {
                let g = c.graph(*d).unwrap_or_else(|e| panic!("{} [{}]: {e}", row.name, c.label));
                walk(&g);
            }
        }
    }
    let kinds: BTreeSet<&str> = seen.iter().map(|(k, _)| k.as_str()).collect();
    let mut missing: Vec<String> = vec![];
    for r in ROWS {
        for d in DType::native().filter(|d| r.op.takes(*d)) {
            if !seen.contains(&(r.name.into(), d.name().into())) {
                missing.push(format!("{} on {d}", r.name));
            }
        }
    }
    missing.extend(structured_kinds().into_iter().filter(|k| !kinds.contains(k.as_str())));
    missing.extend(composites().into_iter().filter(|k| !rows.iter().any(|r| r.name == *k)));
    assert!(missing.is_empty(), "no row for {missing:?}");
    // The gradient of every scalar op on floats is checked, also if it is zero everywhere.
    for r in ROWS.iter().filter(|r| r.op.takes(DType::F32) && r.op.result(DType::F32) == DType::F32) {
        let graded =
            rows.iter().any(|x| x.name == r.name && x.cases.iter().any(|c| c.grad && c.takes(DType::F32)));
        assert!(graded, "the gradient of {} is not checked", r.name);
    }
    assert!(ScalarOp::from_name("add").is_some());
}

#[test]
fn tensor_methods_give_what_graphs_give() {
    for b in devices("tensor methods", Level::O1) {
        let f = |v: &[f32]| Tensor::from_slice(&b, [v.len()], v).unwrap();
        let (x, y) = (f(&[1.0, -2.0, 3.5]), f(&[4.0, 0.5, -1.0]));
        let v = |t: Tensor| t.to_vec::<f32>().unwrap();
        assert_eq!(v(&x + &y), [5.0, -1.5, 2.5]);
        assert_eq!(v(2.0 - &x), [1.0, 4.0, -1.5]);
        assert_eq!(v((&x * &y).relu()), [4.0, 0.0, 0.0]);
        assert_eq!(v(x.lt(&y).select(&x, &y)), [1.0, -2.0, -1.0]);
        assert_eq!(v(x.maximum(&y).sum(..)), [8.0]);
        assert_eq!(v(x.reshape([3usize, 1]).matmul(&y.reshape([1usize, 3])).sum([0])), [10.0, 1.25, -2.5]);
        assert_eq!(v(Tensor::cat(&[&x, &y], 0).narrow(0, 2usize, 2usize)), [3.5, 4.0]);
        assert_eq!(v(x.flip(&[0]).pad(&[1], &[0], 9.0)), [9.0, 3.5, -2.0, 1.0]);
        assert_eq!(x.argsort(0, Order::Descending).to_vec::<i64>().unwrap(), [2, 0, 1]);
        assert_eq!(v(x.scan(ReduceKind::Sum, 0, Scan { reverse: true, ..Scan::default() })), [2.5, 1.5, 3.5]);
        let i = Tensor::from_slice(&b, [2], &[-1i64, 0]).unwrap();
        assert_eq!(v(x.gather(&i, 0)), [3.5, 1.0]);
        assert_eq!(v(x.scatter_rows(&i, &f(&[7.0, 8.0]), 0, ScatterKind::Add)), [9.0, -2.0, 10.5]);
        assert_eq!(x.cast(DType::I32).to_vec::<i32>().unwrap(), [1, -2, 3]);
        assert_eq!(Tensor::arange(&b, 4, DType::U8).to_vec::<u8>().unwrap(), [0, 1, 2, 3]);
    }
}

#[test]
fn bad_indices_are_reported_with_op_and_range() {
    for level in [Level::O0, Level::O1] {
        for b in devices("bad indices", level) {
            let x = Tensor::from_slice(&b, [4, 2], &[0f32; 8]).unwrap();
            let u = Tensor::from_slice(&b, [1, 2], &[1f32; 2]).unwrap();
            let at = |v: i64| Tensor::from_slice(&b, [1], &[v]).unwrap();
            let names = |t: Tensor, what: &str, range: &str| {
                let e = t.to_data().expect_err("an index out of range must be reported");
                assert!(matches!(&e, halcyon::Error::Index { .. }), "{} {what}: {e}", b.id());
                let s = e.to_string();
                assert!(
                    s.contains(what) && s.contains(range) && s.contains("ops.rs"),
                    "{} {what}: {s}",
                    b.id()
                );
            };
            for bad in [4, -5, i64::MAX] {
                names(x.gather(&at(bad), 0), "gather", "-4..4");
                names(x.scatter_rows(&at(bad), &u, 0, ScatterKind::Set), "scatter_rows", "-4..4");
                let wide = at(bad).reshape([1usize, 1]).expand([1usize, 2]);
                names(x.gather_elements(&wide, 0), "gather_elements", "-4..4");
                names(x.scatter_elements(&wide, &u, 0, ScatterKind::Add), "scatter_elements", "-4..4");
            }
            for bad in [4, -1] {
                names(x.update_slice(&u, &Tensor::scalar(&b, bad, DType::I64), 0), "update_slice", "0..4");
            }
            // The device keeps working.
            assert_eq!(x.gather(&at(3), 0).to_vec::<f32>().unwrap(), [0.0, 0.0]);
        }
    }
}

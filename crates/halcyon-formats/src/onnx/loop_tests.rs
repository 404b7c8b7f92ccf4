//! Loops in staged runs: bodies are compiled once, and give the same results as plain loops.

use super::limits::{Cancel, RunOptions};
use super::proto::*;
use super::stage::{Engine, Handle};
use super::stage_tests::{Plain, graph, sub, values, whole};
use super::test_models::*;
use super::{Datum, Placement, reference};
use halcyon_ir::{ConstData, DType, Error, Graph, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Counts the calls to an engine.
#[derive(Clone, Debug, Default)]
struct CallCounts {
    /// Number of graphs run once (`runs`), of graphs prepared for many runs, and of launches of these.
    runs: Rc<Cell<usize>>,
    prepared: Rc<Cell<usize>>,
    launches: Rc<Cell<usize>>,
    /// Number of launches after which the run is cancelled.
    patience: Option<(usize, Cancel)>,
}

#[derive(Debug)]
struct Watched(CallCounts);

fn add(c: &Cell<usize>) {
    c.set(c.get() + 1);
}

impl Engine for Watched {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        add(&self.0.runs);
        Plain.run(graph, inputs)
    }
    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Plain.upload(data)
    }
    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        Plain.read(tensor)
    }
    fn prepare(&mut self, graph: Graph) -> Result<Handle> {
        add(&self.0.prepared);
        graph.check()?;
        Plain.prepare(graph)
    }
    fn launch(&mut self, p: &Handle, v: &mut [Option<Handle>], i: &[usize], o: &[usize]) -> Result<()> {
        add(&self.0.launches);
        if let Some((n, cancel)) = &self.0.patience
            && self.0.launches.get() == *n
        {
            cancel.cancel();
        }
        Plain.launch(p, v, i, o)
    }
}

struct Ran {
    out: Vec<Datum>,
    placement: Placement,
    asked: CallCounts,
}

impl Ran {
    fn values(&self, k: usize) -> Vec<f64> {
        values(&self.out[k])
    }
    fn dims(&self, k: usize) -> Vec<usize> {
        self.out[k].tensor().unwrap().dims.to_vec()
    }
    fn prepared(&self) -> usize {
        self.asked.prepared.get()
    }
}

fn run_with(m: ModelProto, inputs: &[ConstData], options: &RunOptions) -> Result<Ran> {
    let inputs: Vec<Datum> = inputs.iter().cloned().map(Datum::Tensor).collect();
    let asked = CallCounts::default();
    let (out, placement) = open(m).run_staged_with(&inputs, Box::new(Watched(asked.clone())), options)?;
    Ok(Ran { out, placement, asked })
}

fn run(m: ModelProto, inputs: &[ConstData]) -> Ran {
    run_with(m, inputs, &RunOptions::default()).unwrap()
}

fn bounded(m: ModelProto, inputs: &[ConstData], max_iterations: u64) -> Result<Ran> {
    run_with(m, inputs, &RunOptions { max_iterations, ..RunOptions::default() })
}

fn number() -> ValueInfoProto {
    port("i", DType::I64, &[])
}

fn go() -> ValueInfoProto {
    port("c", DType::Bool, &[])
}

fn vector(name: &str, n: &str) -> ValueInfoProto {
    port(name, DType::F32, &[n])
}

/// A model of nodes over `x: f32[2]` with weights.
fn model_of(nodes: Vec<NodeProto>, outputs: &[&str], weights: &[(&str, ConstData)]) -> ModelProto {
    let mut g = graph(nodes, vec![vector("x", "2")], outputs);
    g.initializer = weights.iter().map(|(n, d)| super::tensor::encode(d, n)).collect();
    whole(g)
}

/// `v = v * half + i + 1` while `sum(v) < limit`, with each `v` as a row of a scanned result.
fn until(limit: f32, trip: &str, weights: &[(&str, ConstData)]) -> ModelProto {
    let body = graph(
        vec![
            node("Mul", &["v", "half"], &["h"]),
            node("Cast", &["i"], &["f"]).int("to", 1),
            node("Add", &["f", "one"], &["g"]),
            node("Add", &["h", "g"], &["w"]),
            node("ReduceSum", &["w"], &["s"]).int("keepdims", 0),
            node("Less", &["s", "limit"], &["on"]),
            node("Identity", &["w"], &["row"]),
        ],
        vec![number(), go(), vector("v", "2")],
        &["on", "w", "row"],
    );
    let all = [("half", t(&[], &[0.5f32])), ("one", t(&[], &[1f32])), ("limit", t(&[], &[limit]))];
    let all: Vec<(&str, ConstData)> = all.into_iter().chain(weights.iter().cloned()).collect();
    model_of(vec![sub(node("Loop", &[trip, "", "x"], &["y", "rows"]), "body", body)], &["y", "rows"], &all)
}

/// Computes the loop in Rust. Returns the last value and all values.
fn plainly(mut v: [f32; 2], limit: f32, trips: usize) -> ([f32; 2], Vec<f64>) {
    let mut rows = vec![];
    for i in 0..trips {
        v = v.map(|x| x * 0.5 + (i as f32 + 1.0));
        rows.extend(v.map(f64::from));
        if v[0] + v[1] >= limit {
            break;
        }
    }
    (v, rows)
}

#[test]
fn a_loop_ended_by_a_condition_compiles_its_body_once() {
    // About 10,000 iterations. Unrolled, they would be 60,000 operations, which every later stage would visit
    // again.
    let limit = 39_993.0;
    let r = run(until(limit, "", &[]), &[t(&[2], &[1f32, -3.0])]);
    let (last, rows) = plainly([1.0, -3.0], limit, usize::MAX);
    assert!(rows.len() > 19_000, "{}", rows.len());
    assert_eq!(r.values(0), last.map(f64::from));
    assert_eq!((r.dims(1), r.values(1)), (vec![rows.len() / 2, 2], rows.clone()));
    assert_eq!(r.prepared(), 1);
    assert_eq!(r.asked.launches.get(), rows.len() / 2);
    assert_eq!(r.placement.loops[0].iterations as usize, rows.len() / 2);
    assert!(r.placement.warnings.is_empty(), "{:?}", r.placement.warnings);
}

#[test]
fn a_long_loop_is_compiled_and_a_short_one_is_unrolled() {
    let x = t(&[2], &[1f32, 2.0]);
    for trips in [3i64, 300] {
        let r = run(until(1e30, "n", &[("n", t(&[], &[trips]))]), std::slice::from_ref(&x));
        let (last, rows) = plainly([1.0, 2.0], 1e30, trips as usize);
        assert_eq!((r.values(0), r.values(1)), (last.map(f64::from).to_vec(), rows));
        assert_eq!(r.prepared(), 1);
    }
    // A loop without a condition is compiled only if it is long.
    let steady = |trips: i64| {
        let body = graph(
            vec![node("Add", &["v", "v"], &["d"]), node("Sub", &["d", "x"], &["w"])],
            vec![number(), go(), vector("v", "2")],
            &["c", "w"],
        );
        let n = sub(node("Loop", &["n", "", "x"], &["y"]), "body", body);
        model_of(vec![n], &["y"], &[("n", t(&[], &[trips]))])
    };
    assert_eq!(run(steady(20), std::slice::from_ref(&x)).prepared(), 0);
    let r = run(steady(1000), std::slice::from_ref(&x));
    assert_eq!((r.prepared(), r.asked.launches.get()), (1, 1000));
    assert_eq!(r.values(0), [1.0, 2.0]);
    // `import` makes one graph, and `outcome` chooses stages.
    let m = open(steady(1000));
    assert!(matches!(m.outcome(&[], &[]).unwrap(), super::Outcome::Staged(_)));
    let whole = m.import(&[]).unwrap();
    assert_eq!(reference::run(&whole.graph, &[x])[0].to_vec::<f64>(), [1.0, 2.0]);
    assert!(matches!(open(steady(20)).outcome(&[], &[]).unwrap(), super::Outcome::Graph(_)));
}

#[test]
fn a_trip_count_from_an_input_does_not_need_a_graph_per_value() {
    let body =
        graph(vec![node("Add", &["v", "x"], &["w"])], vec![number(), go(), vector("v", "2")], &["c", "w"]);
    let mut m = model_of(vec![sub(node("Loop", &["n", "", "x"], &["y"]), "body", body)], &["y"], &[]);
    m.graph.as_mut().unwrap().input.push(port("n", DType::I64, &[]));
    let given = [("n", t(&[], &[7i64]))];
    assert!(matches!(open(m.clone()).outcome(&[], &given).unwrap(), super::Outcome::Staged(_)));
    assert_eq!(open(m.clone()).import_with(&[], &given).unwrap().fixed, ["n"]);
    for n in [0i64, 1, 7] {
        let r = run(m.clone(), &[t(&[2], &[1f32, 2.0]), t(&[], &[n])]);
        assert_eq!(r.values(0), [1.0 + n as f64, 2.0 + 2.0 * n as f64]);
        assert_eq!(r.prepared(), usize::from(n > 0));
    }
}

#[test]
fn a_condition_from_an_input_does_not_need_a_graph_per_value() {
    let x = t(&[2], &[1f32, -3.0]);
    let m = open(until(1000.0, "", &[]));
    let made = m.outcome(&[], &[("x", x.clone())]).unwrap();
    assert!(matches!(made, super::Outcome::Staged(why) if why.contains("the condition of Loop")));
    // If one graph is requested, the value of the input may be built into it.
    assert_eq!(m.import_with(&[], &[("x", x)]).unwrap().fixed, ["x"]);
}

/// In iteration `i` of the outer loop, adds `x` `i` times. Then multiplies the value by 1/8 if its sum
/// exceeds 100, else doubles it.
fn nested(outer: i64) -> ModelProto {
    let inner = graph(
        vec![node("Add", &["u", "x"], &["z"])],
        vec![port("j", DType::I64, &[]), port("d", DType::Bool, &[]), vector("u", "2")],
        &["d", "z"],
    );
    let side = |n: NodeProto| {
        let out = n.output[0].clone();
        graph(vec![n], vec![], &[&out])
    };
    let branch = sub(
        sub(node("If", &["high"], &["w"]), "then_branch", side(node("Mul", &["q", "tenth"], &["a"]))),
        "else_branch",
        side(node("Add", &["q", "q"], &["b"])),
    );
    let body = graph(
        vec![
            sub(node("Loop", &["i", "", "v"], &["q"]), "body", inner),
            node("ReduceSum", &["q"], &["s"]).int("keepdims", 0),
            node("Greater", &["s", "hundred"], &["high"]),
            branch,
            node("Identity", &["s"], &["row"]),
        ],
        vec![number(), go(), vector("v", "2")],
        &["c", "w", "row"],
    );
    let n = sub(node("Loop", &["n", "", "x"], &["y", "rows"]), "body", body);
    let w = [("n", t(&[], &[outer])), ("hundred", t(&[], &[100f32])), ("tenth", t(&[], &[0.125f32]))];
    model_of(vec![n], &["y", "rows"], &w)
}

#[test]
fn loops_and_branches_in_a_body_are_compiled_once_too() {
    let x = [1f32, 0.5];
    let mut prepared = vec![];
    for outer in [200i64, 400] {
        let r = run(nested(outer), &[t(&[2], &x)]);
        let (mut v, mut rows) = (x, vec![]);
        for i in 0..outer {
            (0..i).for_each(|_| v = [v[0] + x[0], v[1] + x[1]]);
            let s = v[0] + v[1];
            rows.push(f64::from(s));
            v = v.map(|v| if s > 100.0 { v * 0.125 } else { v + v });
        }
        assert_eq!((r.values(0), r.values(1)), (v.map(f64::from).to_vec(), rows));
        assert!(r.placement.warnings.is_empty(), "{:?}", r.placement.warnings);
        prepared.push(r.prepared());
    }
    // The inner body, the part after it, and two branches; the counter may be a separate part.
    assert_eq!(prepared[0], prepared[1]);
    assert!(prepared[0] <= 5, "{prepared:?}");
}

#[test]
fn a_branch_is_compiled_when_it_is_taken() {
    // All sums are 0, so the branch for sums above 100 is never taken.
    let r = run(nested(2), &[t(&[2], &[0f32, 0.0])]);
    assert_eq!(r.values(0), [0.0, 0.0]);
    let mut long = nested(300);
    let all = run(long.clone(), &[t(&[2], &[1f32, 1.0])]).prepared();
    long.graph.as_mut().unwrap().initializer.retain(|t| t.name != "hundred");
    let high = super::tensor::encode(&t(&[], &[f32::MAX]), "hundred");
    long.graph.as_mut().unwrap().initializer.push(high);
    assert_eq!(run(long, &[t(&[2], &[0f32, 0.0])]).prepared(), all - 1);
}

#[test]
fn a_state_that_grows_has_a_body_for_each_shape() {
    let body = graph(
        vec![
            node("Gather", &["v", "last"], &["e"]).int("axis", 0),
            node("Concat", &["v", "e"], &["w"]).int("axis", 0),
            node("ReduceSum", &["w"], &["s"]).int("keepdims", 0),
            node("Less", &["s", "limit"], &["on"]),
        ],
        vec![number(), go(), vector("v", "")],
        &["on", "w"],
    );
    let n = sub(node("Loop", &["", "", "x"], &["y"]), "body", body);
    let m = model_of(vec![n], &["y"], &[("last", t(&[1], &[-1i64])), ("limit", t(&[], &[80f32]))]);
    let r = run(m, &[t(&[2], &[0f32, 2.0])]);
    let want: Vec<f64> = [0.0].into_iter().chain([2.0; 40]).collect();
    assert_eq!(r.values(0), want);
    assert_eq!((r.prepared(), r.placement.loops[0].bodies), (39, 39));
    let w = &r.placement.warnings;
    assert!(w.len() == 1 && w[0].contains("Loop-y") && w[0].contains("39 sets of shapes"), "{w:?}");
    // Shapes that recur reuse their compiled bodies.
    let flip = graph(
        vec![node("Transpose", &["v"], &["w"])],
        vec![number(), go(), port("v", DType::F32, &["", ""])],
        &["c", "w"],
    );
    let mut g = graph(
        vec![sub(node("Loop", &["n", "", "x"], &["y"]), "body", flip)],
        vec![port("x", DType::F32, &["2", "3"])],
        &["y"],
    );
    g.initializer.push(super::tensor::encode(&t(&[], &[999i64]), "n"));
    let r = run(whole(g), &[t(&[2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0])]);
    assert_eq!((r.dims(0), r.prepared()), (vec![3, 2], 2));
    assert_eq!(r.values(0), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn loops_that_cannot_be_compiled_are_reported_and_give_the_same_results() {
    // A slice at the index of the iteration.
    let body = graph(
        vec![
            node("Unsqueeze", &["i", "zero"], &["k"]),
            node("Add", &["k", "one"], &["l"]),
            node("Slice", &["t", "k", "l"], &["e"]),
            node("Add", &["v", "e"], &["w"]),
        ],
        vec![number(), go(), vector("v", "2")],
        &["c", "w"],
    );
    let n = 2000usize;
    let table: Vec<f32> = (0..n).map(|k| (k % 7) as f32).collect();
    let w = [
        ("zero", t(&[1], &[0i64])),
        ("one", t(&[1], &[1i64])),
        ("t", t(&[n], &table)),
        ("n", t(&[], &[n as i64])),
    ];
    let loops = sub(node("Loop", &["n", "", "x"], &["y"]), "body", body);
    let r = run(model_of(vec![loops], &["y"], &w), &[t(&[2], &[0f32, 0.5])]);
    let sum: f64 = table.iter().map(|v| f64::from(*v)).sum();
    assert_eq!(r.values(0), [sum, sum + 0.5]);
    let w = &r.placement.warnings;
    assert!(w.len() == 1 && w[0].contains("Loop-y") && w[0].contains("Slice"), "{w:?}");
    assert_eq!(r.prepared(), 0);
}

#[test]
fn a_body_may_need_outer_values_during_import() {
    // The axes of a sum are computed from an input.
    let body = graph(
        vec![node("ReduceSum", &["v", "axes"], &["s"]), node("Add", &["v", "s"], &["w"])],
        vec![number(), go(), vector("v", "2")],
        &["c", "w"],
    );
    let nodes = vec![
        node("ReduceMax", &["x"], &["m"]).int("keepdims", 1),
        node("Sub", &["m", "m"], &["none"]),
        node("Cast", &["none"], &["axes"]).int("to", 7),
        sub(node("Loop", &["n", "", "x"], &["y"]), "body", body),
    ];
    let r = run(model_of(nodes, &["y"], &[("n", t(&[], &[500i64]))]), &[t(&[2], &[1e-30f32, 0.0])]);
    assert!(r.placement.warnings.is_empty(), "{:?}", r.placement.warnings);
    assert_eq!(r.prepared(), 1);
    assert!(r.values(0)[0].is_infinite());
}

#[test]
fn a_long_scan_is_a_loop() {
    let body = graph(
        vec![node("Add", &["s", "v"], &["w"]), node("Sub", &["v", "x"], &["o"])],
        vec![vector("s", "2"), vector("v", "2")],
        &["w", "o"],
    );
    let (n, mut all) = (700usize, vec![]);
    (0..2 * n).for_each(|k| all.push((k % 11) as f32));
    for back in [false, true] {
        let scan = sub(node("Scan", &["x", "t"], &["f", "y"]), "body", body.clone())
            .int("num_scan_inputs", 1)
            .ints("scan_input_axes", &[1])
            .ints("scan_input_directions", &[i64::from(back)])
            .ints("scan_output_axes", &[1])
            .ints("scan_output_directions", &[i64::from(back)]);
        let m = model_of(vec![scan], &["f", "y"], &[("t", t(&[2, n], &all))]);
        let r = run(m, &[t(&[2], &[1f32, 2.0])]);
        assert_eq!((r.prepared(), r.asked.launches.get()), (1, n));
        let sum = |k: usize| all[k * n..][..n].iter().map(|v| f64::from(*v)).sum::<f64>();
        assert_eq!(r.values(0), [1.0 + sum(0), 2.0 + sum(1)]);
        let want: Vec<f64> =
            all.iter().enumerate().map(|(k, v)| f64::from(*v) - if k < n { 1.0 } else { 2.0 }).collect();
        assert_eq!((r.dims(1), r.values(1)), (vec![2, n], want));
    }
}

#[test]
fn an_endless_loop_is_an_error_with_its_bound() {
    let x = [t(&[2], &[1f32, 1.0])];
    let text = |m: ModelProto, n: u64| match bounded(m, &x, n) {
        Err(e @ Error::Endless { .. }) => e.to_string(),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("it ended"),
    };
    let mut endless = until(f32::INFINITY, "", &[]);
    endless.graph.as_mut().unwrap().node[0].name.clear();
    assert!(text(endless, 50).starts_with("Loop#0 has not ended after 50 iterations"));
    // Trip counts far above the limit, just above it, and equal to it.
    for trips in [600i64, 51] {
        let m = || until(1e30, "n", &[("n", t(&[], &[trips]))]);
        assert!(text(m(), 50).contains("Loop-y has not ended after 50 iterations"));
        bounded(m(), &x, trips as u64).unwrap();
    }
    // A loop without any effect.
    let idle = |trips: &[(&str, ConstData)]| {
        let body = graph(vec![], vec![number(), go(), vector("v", "2")], &["c", "v"]);
        let n = sub(node("Loop", &[if trips.is_empty() { "" } else { "n" }, "", "x"], &["y"]), "body", body);
        model_of(vec![n], &["y"], trips)
    };
    assert!(text(idle(&[]), 10_000_000).contains("Loop-y has not ended after 10000000 iterations"));
    assert_eq!(
        bounded(idle(&[("n", t(&[], &[9_000_000i64]))]), &x, 10_000_000).unwrap().values(0),
        [1.0, 1.0]
    );
}

#[test]
fn a_run_ends_when_it_is_cancelled() {
    let options = RunOptions::default();
    let asked = CallCounts { patience: Some((100, options.cancel.clone())), ..CallCounts::default() };
    let m = open(until(f32::INFINITY, "", &[]));
    let x = [Datum::Tensor(t(&[2], &[1f32, 1.0]))];
    let e = m.run_staged_with(&x, Box::new(Watched(asked.clone())), &options).unwrap_err();
    assert!(matches!(&e, Error::Interrupted { what } if what == "Loop-y, after 100 iterations"), "{e}");
    assert_eq!((asked.launches.get(), e.exit_code()), (100, 130));
}

#[test]
fn an_expanded_loop_drops_the_nodes_of_past_iterations() {
    // The state is a sequence, so the loop cannot be compiled. Every iteration computes the condition for the
    // next.
    let body = graph(
        vec![
            node("SequenceAt", &["q", "zero"], &["v"]),
            node("Add", &["v", "x"], &["w"]),
            node("SequenceConstruct", &["w"], &["r"]),
            node("ReduceSum", &["w"], &["s"]).int("keepdims", 0),
            node("Less", &["s", "limit"], &["on"]),
        ],
        vec![number(), go(), vector("q", "2")],
        &["on", "r"],
    );
    let nodes = vec![
        node("SequenceConstruct", &["x"], &["first"]),
        sub(node("Loop", &["", "", "first"], &["last"]), "body", body),
        node("SequenceAt", &["last", "zero"], &["y"]),
    ];
    let m = model_of(nodes, &["y"], &[("zero", t(&[], &[0i64])), ("limit", t(&[], &[20_000f32]))]);
    let r = run(m, &[t(&[2], &[1f32, 1.0])]);
    assert_eq!(r.values(0), [10_000.0, 10_000.0]);
    let w = &r.placement.warnings;
    assert!(
        w.len() == 1 && w[0].contains("Loop-last") && w[0].contains("a carried value is a sequence"),
        "{w:?}"
    );
}

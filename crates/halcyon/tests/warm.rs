//! A warm run allocates nothing, causes no page faults and reads no file. There is only one test, because the
//! counters count for the whole process.

use halcyon::hal::heap::Counting;
use halcyon::host;
use halcyon::ir::ops::Conv;
use halcyon::prelude::*;
use halcyon::{CapturedGraph, ConstData, DType, Session, session};
use halcyon_formats::onnx::{Model, Outcome};
use halcyon_test::{Rng, testdata};

#[global_allocator]
static HEAP: Counting = Counting::new();

/// Runs per round, and number of rounds. The system may reclaim pages during a round, so only the best round
/// counts.
const RUNS: usize = 5;
const ROUNDS: usize = 10;

/// Allocations and page faults of the best round.
fn least(rounds: usize, mut run: impl FnMut()) -> (u64, Option<u64>) {
    // The first runs start threads and touch scratch memory, so they are not counted.
    (0..5).for_each(|_| run());
    let (mut allocations, mut faults) = (u64::MAX, None::<u64>);
    for _ in 0..rounds {
        let before = (host::page_faults(), HEAP.allocations());
        (0..RUNS).for_each(|_| run());
        let after = (HEAP.allocations(), host::page_faults());
        allocations = allocations.min(after.0 - before.1);
        let round = after.1.zip(before.0).map(|(a, b)| a - b);
        faults = faults.map_or(round, |f| round.map(|r| r.min(f)));
    }
    (allocations, faults)
}

fn costs_nothing(what: &str, rounds: usize, g: &CapturedGraph) {
    let (allocations, faults) = least(rounds, || g.launch().unwrap());
    println!(
        "{what}: {allocations} allocations, {faults:?} page faults in {RUNS} replays of {} steps",
        g.executable().plan().steps.len()
    );
    assert_eq!(allocations, 0, "{what} allocates");
    assert_eq!(faults.unwrap_or(0), 0, "{what} takes page faults");
}

/// A network with convolution, pooling, products, attention, norms, softmax, gather, reductions and
/// element-wise chains.
fn network(b: &Backend, rng: &mut Rng) -> impl Fn(&Tensor, &Tensor) -> Tensor + use<> {
    let mut weight = |dims: &[usize]| {
        let n: usize = dims.iter().product();
        let v: Vec<f32> = rng.f32s(n).iter().map(|v| v / (n as f32).sqrt()).collect();
        Tensor::from_slice(b, dims, &v).unwrap()
    };
    let (k, w, v, t) = (weight(&[16, 3, 3, 3]), weight(&[256, 64]), weight(&[64, 64]), weight(&[50, 64]));
    let scale = weight(&[64]);
    move |x, ids| {
        let pad = Conv { pad: [(1, 1), (1, 1)].into_iter().collect(), ..Conv::new(2) };
        let y = x.reshape([1, 3, 32, 32]).conv(&k, pad).relu();
        let y = y.reshape([64, 256]).matmul(&w).gelu();
        let y = y + t.gather(ids, 0);
        let z = y.layer_norm(&scale, None, -1, 1e-5).matmul(&v).softmax(-1);
        let z = (z.sigmoid() * 2.0 - 1.0).tanh() + &y;
        z.sum([1])
    }
}

/// System calls of the process that read, so far. `None` if the system does not report them.
fn reads() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|l| l.strip_prefix("syscr: "))?.trim().parse().ok()
}

/// A run of a session copies its inputs and outputs, and takes a few microseconds. Reading one file, for
/// example to find out how much memory is free, would take longer.
fn sessions_read_no_file(rng: &mut Rng) {
    let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(2).build().unwrap();
    let x = Tensor::placeholder(&b, DType::F32, [4, 4]);
    let g = Tensor::trace(&[("x", &x)], &[("y", &x.tanh())]).unwrap();
    let (s, data) = (Session::new(&b, g), [ConstData::from_slice(&[4, 4], &rng.f32s(16)).unwrap()]);
    s.run(&data).unwrap();
    let (before, runs) = (reads(), 200);
    (0..runs).for_each(|_| drop(s.run(&data).unwrap()));
    let Some(n) = reads().zip(before).map(|(after, before)| after - before) else {
        println!("the system does not count reads");
        return;
    };
    println!("{n} reads in {runs} runs");
    // The reads of the counter itself count too.
    assert!(n < 20, "{n} reads in {runs} runs");
}

#[test]
fn a_warm_run_allocates_nothing_and_takes_no_page_fault() {
    let name = "a_warm_run_allocates_nothing_and_takes_no_page_fault";
    let mut rng = Rng::fresh(name);
    sessions_read_no_file(&mut rng);
    for level in [Level::O0, Level::O1, Level::O2] {
        for threads in [1, 3] {
            let b = Backend::builder()
                .backend_type(BackendType::Cpu)
                .level(level)
                .num_threads(threads)
                .build()
                .unwrap();
            let f = network(&b, &mut rng);
            let x = Tensor::from_slice(&b, [3 * 32 * 32], &rng.f32s(3 * 32 * 32)).unwrap();
            let ids = Tensor::from_slice(&b, [64], &(0..64).map(|i| i % 50).collect::<Vec<i64>>()).unwrap();
            let g = b.capture_graph(|| f(&x, &ids)).unwrap();
            costs_nothing(&format!("{level}, {threads} threads"), ROUNDS, &g);
            // The results equal those of an evaluation.
            let want = f(&x, &ids).to_data().unwrap();
            assert_eq!(session::difference(&[g.outputs().unwrap()[0].to_data().unwrap()], &[want]), 0.0);
            // A run without bound outputs allocates the handles of its outputs and the list of the handles,
            // and nothing else.
            let c = b.compile(|x: &[Tensor]| f(&x[0], &x[1]));
            let (allocations, faults) = least(ROUNDS, || drop(c.call(&[&x, &ids]).unwrap()));
            println!(
                "{level}, {threads} threads, compiled: {allocations} allocations in {RUNS} calls, {faults:?} page faults"
            );
            assert!(allocations <= 8 * RUNS as u64, "{allocations}");
            assert_eq!(faults.unwrap_or(0), 0);
        }
    }
    let Some(dir) = testdata(name, "models/random/light_resnet50") else { return };
    let model = Model::open(&dir.join("model.onnx")).unwrap();
    let x = ConstData::from_slice(&[1, 3, 224, 224], &rng.f32s(3 * 224 * 224)).unwrap();
    assert_eq!(x.dtype, DType::F32);
    let port = model.inputs().unwrap().remove(0);
    let shapes = [(port.name.as_str(), halcyon::Shape::from(&x.dims))];
    let Outcome::Graph(imported) = model.outcome(&shapes, &[]).unwrap() else {
        panic!("ResNet-50 is one graph")
    };
    let b = Backend::builder().backend_type(BackendType::Cpu).level(Level::O2).build().unwrap();
    let s = Session::new(&b, imported.graph.clone());
    let g = s.capture(std::slice::from_ref(&x)).unwrap();
    costs_nothing("ResNet-50", 3, &g);
    let want = s.run(&[x]).unwrap();
    let got: Vec<ConstData> = g.outputs().unwrap().iter().map(|t| t.to_data().unwrap()).collect();
    assert_eq!(session::difference(&got, &want), 0.0);
}

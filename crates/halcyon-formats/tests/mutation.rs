//! Mutation tests: for any file contents, importing and running a model must return within limits on time and
//! memory.
//!
//! The tests change the models of `halcyon_test::seed_models`, and build random models of one node for every
//! operator. With `HALCYON_TESTDATA`, they also change every model of less than 64 KiB below that folder.
//! `HALCYON_MUTATIONS` multiplies the number of cases. `HALCYON_SEED` selects the random choices, except in
//! the merge tier, where they are the same in every run.

use bytes::Bytes;
use halcyon_formats::ConstData;
use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::tensor::External;
use halcyon_formats::onnx::{Datum, Engine, Handle, Model, Outcome, PortType, RunOptions, ops};
use halcyon_ir::ops::Op;
use halcyon_ir::{Bindings, DType, Error, Graph, Result, Scalar, Shape};
use halcyon_test::{given_seed, mutate, seed_models, skip};
use prost::Message;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// An allocator that counts live bytes and their peak.
struct Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to `System`, a valid `GlobalAlloc`, with unchanged arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        let now = LIVE.fetch_add(l.size(), Ordering::Relaxed) + l.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: `GlobalAlloc::alloc` requires that the caller passes a layout of non-zero size, which is
        // all that `System.alloc` requires.
        unsafe { System.alloc(l) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        LIVE.fetch_sub(l.size(), Ordering::Relaxed);
        // SAFETY: `GlobalAlloc::dealloc` requires that `p` was allocated here with layout `l`, and `alloc`
        // here returns blocks of `System.alloc`.
        unsafe { System.dealloc(p, l) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Cases run one at a time, so that memory is attributed to the right case.
static TURN: Mutex<()> = Mutex::new(());

/// Limit in bytes on the memory for importing and running a model, in addition to 64 bytes per byte of its
/// file. It includes the memory of the evaluator below.
const MEMORY: usize = 192 << 20;
/// Limit on the processor time of a case, for an unoptimised build.
const TIME: Duration = Duration::from_secs(10);
/// Graphs of a larger [`cost`] than this are not evaluated.
const SMALL: usize = 1 << 16;

/// Limit on the stages of a run, because a model may loop forever.
const STAGES: usize = 3;

/// An engine that evaluates small graphs with the reference.
#[derive(Debug, Default)]
struct Reference {
    runs: usize,
}

/// An estimate of the work of evaluating a graph: at least the number of elements of its values and of
/// products in its sums. `None` if a size is not known.
fn cost(g: &Graph) -> Option<usize> {
    let (g, _) = halcyon_ir::passes::inline::inline_composites(g, &|_| false).ok()?;
    g.nodes().iter().try_fold(0usize, |sum, n| {
        let numel = |s: &Shape| s.known()?.iter().try_fold(1usize, |a, b| a.checked_mul(*b));
        let out = numel(&n.ty.shape)?;
        let each = match &n.op {
            Op::Matmul => numel(g.shape(n.inputs[0]))?,
            Op::Conv(_) => numel(g.shape(n.inputs[1]))?,
            Op::Pool(p) => p.kernel.iter().try_fold(1usize, |a, b| a.checked_mul(*b))?,
            _ => 1,
        };
        sum.checked_add(out.checked_mul(each)?)
    })
}

fn evaluate(g: &Graph, inputs: &[ConstData]) -> Result<Vec<ConstData>> {
    g.check()?;
    match cost(g) {
        Some(n) if n <= SMALL => halcyon_ir::reference::eval(g, inputs, &[]),
        _ => Err(Error::unsupported("a large graph", "Not in this test")),
    }
}

impl Engine for Reference {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        self.runs += 1;
        if self.runs > STAGES {
            return Err(Error::unsupported("a long loop", "Not in this test"));
        }
        let x = inputs.iter().map(|h| self.read(h)).collect::<Result<Vec<_>>>()?;
        Ok(evaluate(&graph, &x)?.into_iter().map(|c| Arc::new(c) as Handle).collect())
    }
    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Ok(Arc::new(data.clone()))
    }
    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        tensor
            .downcast_ref::<ConstData>()
            .cloned()
            .ok_or_else(|| Error::internal("not a tensor of this engine"))
    }
}

/// A value for a port. `None` for a map, and for a tensor of more than 4096 elements.
fn value(t: &PortType, r: &mut mutate::Rng) -> Option<Datum> {
    Some(match t {
        PortType::Tensor { dtype, shape } => {
            let dims = match shape {
                None => vec![2],
                Some(s) => {
                    let mut names = BTreeSet::new();
                    s.iter().for_each(|d| d.symbols(&mut names));
                    let b: Bindings = names.into_iter().map(|n| (n, 2)).collect();
                    s.bind(&b).ok()?.known()?.to_vec()
                }
            };
            let n = dims.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).filter(|n| *n <= 4096)?;
            let hostile = r.once_in(4);
            let one = |r: &mut mutate::Rng| match dtype.is_float() || *dtype == DType::Bool {
                true => Scalar::F(r.below(5) as f64 - 2.0),
                false if hostile => Scalar::I(mutate::number(r)),
                false => Scalar::I(r.below(4) as i64),
            };
            let v: Vec<Scalar> = (0..n).map(|_| one(r)).collect();
            Datum::Tensor(halcyon_formats::data::from_scalars(*dtype, &dims, v).ok()?)
        }
        PortType::Text { .. } => {
            Datum::Text(halcyon_formats::onnx::Text { dims: vec![1], vals: vec!["a b".into()] })
        }
        PortType::Sequence(t) => {
            Datum::Sequence((0..r.below(3)).map(|_| value(t, r)).collect::<Option<_>>()?)
        }
        PortType::Optional(_) if r.once_in(2) => Datum::Optional(None),
        PortType::Optional(t) => Datum::Optional(Some(Box::new(value(t, r)?))),
        PortType::Map(_) => return None,
    })
}

/// The running case and its start time.
static CURRENT: Mutex<Option<(Instant, String, Bytes)>> = Mutex::new(None);

/// Saves a model that shows a bug to the folder `HALCYON_KEEP`, if set.
fn keep(name: &str, model: &[u8]) {
    if let Some(dir) = std::env::var_os("HALCYON_KEEP") {
        let _ = std::fs::write(PathBuf::from(dir).join(format!("{name}.onnx")), model);
    }
}

/// CPU time of this thread, so that a busy machine does not look like a slow importer. Zero where the system
/// does not report it, which disables the time check.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ns = text.and_then(|t| t.split_whitespace().next()?.parse().ok());
    ns.map_or(Duration::ZERO, Duration::from_nanos)
}

/// Starts a watchdog that ends the process if a case does not return; a test cannot end itself otherwise.
fn watch() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let now = CURRENT.lock().unwrap_or_else(|e| e.into_inner()).clone();
                if let Some((since, name, model)) = now
                    && since.elapsed() > 30 * TIME
                {
                    keep(&name, &model);
                    eprintln!("{name} does not return");
                    std::process::abort();
                }
            }
        });
    });
}

/// Checks, imports, optimises and evaluates a model. Returns errors without judging them.
fn attempt(file: Bytes, r: &mut mutate::Rng) -> Result<&'static str> {
    let m = Model::parse(file, External::none(), "m")?;
    m.check("test")?;
    let ports = m.inputs()?;
    m.outputs()?;
    // With the declared shapes, including symbols.
    let _ = m.import(&[]);
    let Some(inputs) = ports.iter().map(|p| value(&p.ty, r)).collect::<Option<Vec<Datum>>>() else {
        return Ok("large inputs");
    };
    let tensors: Vec<Option<&ConstData>> = inputs.iter().map(|d| d.tensor()).collect();
    let named = || ports.iter().zip(&tensors).filter_map(|(p, t)| t.map(|t| (p.name.as_str(), t)));
    let shapes: Vec<(&str, Shape)> = named().map(|(n, t)| (n, Shape::from(&t.dims))).collect();
    let values: Vec<(&str, ConstData)> = named().map(|(n, t)| (n, t.clone())).collect();
    match m.outcome(&shapes, &values)? {
        Outcome::Staged(_) => {
            let options = RunOptions { max_iterations: 1000, ..RunOptions::default() };
            m.run_staged_with(&inputs, Box::new(Reference::default()), &options)?;
            Ok("ran in stages")
        }
        Outcome::Graph(g) => {
            let (folded, _) = halcyon_ir::passes::fold::run(&g.graph)?;
            let (simple, _) = halcyon_ir::passes::simplify::run(&folded)?;
            let (merged, _) = halcyon_ir::passes::cse::run(&simple)?;
            merged.check()?;
            let x: Vec<ConstData> = tensors.into_iter().flatten().cloned().collect();
            evaluate(&g.graph, &x)?;
            Ok("ran")
        }
    }
}

/// Counts of the cases' outcomes.
#[derive(Default, Debug)]
struct Tally {
    cases: usize,
    ran: usize,
    slowest: (Duration, String),
    largest: (usize, String),
    bugs: Vec<String>,
}

impl Tally {
    fn case(&mut self, name: &str, m: &ModelProto, seed: u64) {
        let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let file = Bytes::from(m.encode_to_vec());
        let size = file.len();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let start = Instant::now();
        let had = busy();
        watch();
        let current = |c| *CURRENT.lock().unwrap_or_else(|e| e.into_inner()) = c;
        current(Some((start, format!("{name}-{seed:#x}"), file.clone())));
        let result = catch_unwind(AssertUnwindSafe(|| attempt(file, &mut mutate::Rng(seed))));
        let took = busy().saturating_sub(had);
        current(None);
        let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        self.cases += 1;
        let mut bug = |what: String| {
            keep(&format!("{name}-{seed:#x}"), &m.encode_to_vec());
            self.bugs.push(format!("{name}, case {seed:#x}: {what}"));
        };
        match result {
            Err(p) => {
                let text = p.downcast_ref::<String>().cloned();
                bug(format!(
                    "panic: {}",
                    text.or_else(|| p.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
                ));
            }
            Ok(Err(Error::Internal(what))) => bug(format!("internal error: {what}")),
            Ok(Err(e)) => {
                let text = e.to_string();
                if !(1..=5).contains(&e.exit_code()) || text.is_empty() {
                    bug(format!("no clear error: {text}"));
                }
            }
            Ok(Ok(_)) => self.ran += 1,
        }
        if peak > MEMORY + 64 * size {
            bug(format!("{peak} bytes of memory for a file of {size}"));
        }
        if took > TIME {
            bug(format!("{took:?}"));
        }
        if took > self.slowest.0 {
            self.slowest = (took, format!("{name} {seed:#x}"));
        }
        if peak > self.largest.0 {
            self.largest = (peak, format!("{name} {seed:#x}"));
        }
    }

    fn finish(self) {
        println!(
            "{} cases, {} ran to the end; slowest {:?} ({}), most memory {} ({})",
            self.cases, self.ran, self.slowest.0, self.slowest.1, self.largest.0, self.largest.1
        );
        let text: String = self.bugs.iter().take(40).map(|b| format!("  {b}\n")).collect();
        assert!(self.bugs.is_empty(), "{} bugs\n{text}", self.bugs.len());
        // If almost all cases were rejected, only the first checks would be tested.
        assert!(self.ran * 50 >= self.cases, "only {} of {} ran", self.ran, self.cases);
    }
}

fn seed() -> u64 {
    match std::env::var("HALCYON_TIER").as_deref() {
        Ok("merge" | "fast") => 0x5eed,
        _ => given_seed().unwrap_or(0x5eed),
    }
}

fn rounds(base: usize) -> usize {
    base * std::env::var("HALCYON_MUTATIONS").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

/// A model of one node with operands that are often valid.
fn one_node(op: &ops::Row, r: &mut mutate::Rng) -> ModelProto {
    let opset = match r.below(3) {
        0 => op.since.max(7) + r.below((ops::LATEST - op.since.max(7) + 1).max(1) as usize) as i64,
        1 => 13,
        _ => 21,
    };
    let types: &[i32] = if r.once_in(3) { &[1, 7, 6, 9, 2, 3, 10, 11] } else { &[1] };
    let base: Vec<i64> = (0..r.below(5)).map(|_| 1 + r.below(4) as i64).collect();
    let (mut inputs, mut weights, mut names) = (vec![], vec![], vec![]);
    for k in 0..1 + r.below(5) {
        let name = format!("x{k}");
        match r.below(12) {
            0 => {
                names.push(String::new());
                continue;
            }
            1..4 => weights.push(mutate::small_tensor(&name, r)),
            4 | 5 => {
                // Small sizes and axes, as i64 vectors like shape operands.
                let v: Vec<i64> = (0..r.below(4)).map(|_| r.below(4) as i64).collect();
                weights.push(seed_models::ints(&name, &v));
            }
            6 => weights.push(seed_models::scalar(seed_models::ints(&name, &[mutate::number(r)]))),
            _ => {
                let mut dims = base.clone();
                if r.once_in(3) {
                    dims = (0..r.below(5)).map(|_| r.below(4) as i64).collect();
                }
                inputs.push(seed_models::port(&name, r.pick(types), &dims));
            }
        }
        names.push(name);
    }
    let outs: Vec<String> = (0..1 + r.below(3)).map(|k| format!("y{k}")).collect();
    let mut n = seed_models::node(op.op, &[], &[]);
    (n.input, n.output) = (names, outs.clone());
    for _ in 0..r.below(4) {
        n.attribute.push(mutate::new_attribute(op.op, r));
    }
    let ports = outs.iter().map(|o| seed_models::port(o, 1, &[])).collect();
    seed_models::model(opset, seed_models::graph(vec![n], inputs, ports, weights))
}

#[test]
fn every_operator_takes_any_operands() {
    let mut t = Tally::default();
    for op in ops::rows() {
        for k in 0..rounds(120) {
            let s = seed() ^ (k as u64) << 20 ^ (t.cases as u64) << 32;
            t.case(op.op, &one_node(op, &mut mutate::Rng(s)), s);
        }
    }
    t.finish();
}

#[test]
fn changed_models_are_refused_or_run() {
    let mut t = Tally::default();
    for (name, m) in seed_models::all() {
        let before = t.ran;
        t.case(name, &m, seed());
        assert_eq!(t.ran, before + 1, "{name} itself does not run");
        for k in 0..rounds(400) {
            let s = seed() ^ (k as u64) << 24 ^ t.cases as u64;
            let mut r = mutate::Rng(s);
            let mut m = m.clone();
            mutate::model(&mut m, &mut r);
            t.case(name, &m, s);
        }
    }
    t.finish();
}

fn find(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for e in entries.flatten() {
        let path = e.path();
        if path.is_dir() {
            find(&path, out);
        } else if path.extension().is_some_and(|x| x == "onnx")
            && e.metadata().is_ok_and(|m| m.len() < 65_536)
        {
            out.push(path);
        }
    }
}

#[test]
fn changed_models_of_the_suite_are_refused_or_run() {
    let Some(dir) = std::env::var_os("HALCYON_TESTDATA") else {
        return skip("changed_models_of_the_suite_are_refused_or_run", "HALCYON_TESTDATA is not set");
    };
    let mut files = vec![];
    find(Path::new(&dir), &mut files);
    files.sort();
    let mut t = Tally::default();
    for path in files {
        let Ok(m) = ModelProto::decode(&*std::fs::read(&path).expect("a readable model")) else { continue };
        let name = path
            .parent()
            .and_then(|p| p.file_name())
            .map_or("?".into(), |n| n.to_string_lossy().into_owned());
        for k in 0..rounds(4) {
            let s = seed() ^ (k as u64) << 48 ^ t.cases as u64;
            let mut m = m.clone();
            mutate::model(&mut m, &mut mutate::Rng(s));
            t.case(&name, &m, s);
        }
    }
    t.finish();
}

/// Runs a saved file again: `HALCYON_CASE=model.onnx`.
#[test]
fn a_kept_case() {
    let Some(path) = std::env::var_os("HALCYON_CASE") else { return };
    let m = ModelProto::decode(&*std::fs::read(&path).expect("a readable model")).expect("a model");
    let mut t = Tally::default();
    t.case("kept", &m, seed());
    println!("{t:?}");
    assert!(t.bugs.is_empty(), "{:?}", t.bugs);
}

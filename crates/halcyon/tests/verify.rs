//! Tests of runs that are checked against a reference: a device's wrong result is found in the step that
//! computed it, correct devices pass, and the replay file identifies the step.
#![cfg(feature = "onnx")]

use halcyon::hal::{
    Accounts, BufferRef, Caps, Command, Counters, Declined, Device, DeviceInfo, Driver, LibraryCall,
    LibraryKernel, Options, Program, Tag, Target, registry,
};
use halcyon::ir::kernel::Kernel;
use halcyon::ir::ops::ReduceKind;
use halcyon::ir::shape::TensorType;
use halcyon::ir::{Graph, NodeId};
use halcyon::optable::{Tol, check};
use halcyon::prelude::*;
use halcyon::verify::{Outcome, Recorded, Replay, VerifyOptions, VerifyReport};
use halcyon::{ConstData, Error, Session};
use halcyon_formats::onnx::Model;
use halcyon_test::devices::devices;
use halcyon_test::{Rng, models, one_in, optable, root};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the device currently gives wrong results.
static BROKEN: AtomicBool = AtomicBool::new(true);

/// A driver that opens the CPU under the name of a backend that has no driver in this build.
#[derive(Debug)]
struct FaultyDriver;

impl Driver for FaultyDriver {
    fn kind(&self) -> BackendType {
        BackendType::Cuda
    }
    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![info()])
    }
    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        let inner = registry::driver(BackendType::Cpu)?.open(index, options)?;
        Ok(Arc::new(Faulty { inner, info: info() }))
    }
}

fn info() -> DeviceInfo {
    DeviceInfo {
        backend: BackendType::Cuda,
        id: "cuda:0".into(),
        index: 0,
        name: "a CPU with a fault".into(),
        vendor: String::new(),
        driver_version: Some("0.1".into()),
        total_memory: None,
        free_memory: None,
        compute_capability: None,
        compute_units: None,
        unified_memory: true,
        software: false,
        properties: Default::default(),
    }
}

/// Forwards everything, but falsifies one number in the output of a product's kernel.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Device>,
    info: DeviceInfo,
}

impl Target for Faulty {
    fn caps(&self) -> &Caps {
        self.inner.as_target().caps()
    }
    fn library(&self, call: &LibraryCall<'_>) -> Result<Arc<dyn LibraryKernel>, Declined> {
        self.inner.as_target().library(call)
    }
    fn part_alignment(&self) -> Option<usize> {
        self.inner.as_target().part_alignment()
    }
    fn has_epilogues(&self) -> bool {
        self.inner.as_target().has_epilogues()
    }
}

impl Device for Faulty {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn pool(&self) -> &dyn Accounts {
        self.inner.pool()
    }
    fn pinned(&self) -> u64 {
        self.inner.pinned()
    }
    fn alloc(&self, bytes: usize, tag: Tag) -> Result<BufferRef> {
        self.inner.alloc(bytes, tag)
    }
    fn part(&self, of: &BufferRef, offset: usize, bytes: usize) -> Result<BufferRef> {
        self.inner.part(of, offset, bytes)
    }
    fn write(&self, dst: &BufferRef, offset: usize, src: &[u8]) -> Result<()> {
        self.inner.write(dst, offset, src)
    }
    fn read(&self, src: &BufferRef, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.inner.read(src, offset, dst)
    }
    fn pack(&self, kernel: &dyn LibraryKernel, from: &BufferRef, to: &BufferRef) -> Result<()> {
        self.inner.pack(kernel, from, to)
    }
    fn compile(&self, kernel: &Kernel) -> Result<Arc<dyn Program>> {
        self.inner.compile(kernel)
    }
    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        for c in commands {
            self.inner.submit(std::slice::from_ref(c))?;
            let Command::Library { kernel, buffers, .. } = c else { continue };
            let workspace = (kernel.workspace() > 0) as usize;
            if kernel.name().contains("gem") && BROKEN.load(Ordering::Relaxed) {
                let result = &buffers[buffers.len() - 1 - workspace];
                let mut v = [0; 4];
                self.inner.read(result, 8, &mut v)?;
                self.inner.write(result, 8, &(f32::from_le_bytes(v) * 1.001 + 1e-3).to_le_bytes())?;
            }
        }
        Ok(())
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn take_fault(&self) -> Result<Option<u32>> {
        self.inner.take_fault()
    }
    fn as_target(&self) -> &dyn Target {
        self
    }
}

fn reference() -> Backend {
    Backend::builder().backend_type(BackendType::Cpu).level(Level::O0).build().unwrap()
}

fn at(kind: BackendType, level: Level) -> Backend {
    Backend::builder().backend_type(kind).level(level).build().unwrap()
}

/// `softmax(relu(x·w + b)·v)`, whose products have epilogues.
fn network() -> Graph {
    let mut rng = Rng::new(7);
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [6usize, 40]));
    let mut weights = |g: &mut Graph, dims: &[usize]| {
        let n = dims.iter().product();
        g.constant(ConstData::from_slice(dims, &rng.f32s(n)).unwrap())
    };
    let (w, b, v) = (weights(&mut g, &[40, 64]), weights(&mut g, &[64]), weights(&mut g, &[64, 9]));
    g.span = halcyon::ir::error::Span::new("network.onnx: /fc1");
    let y = g.matmul(x, w).unwrap();
    let y = g.add(y, b).unwrap();
    let y = g.relu(y).unwrap();
    g.span = halcyon::ir::error::Span::new("network.onnx: /fc2");
    let y = g.matmul(y, v).unwrap();
    let y = g.softmax(y, 1).unwrap();
    g.output("y", y);
    g
}

fn numbers(seed: u64, dims: &[usize]) -> ConstData {
    ConstData::from_slice(dims, &Rng::new(seed).f32s(dims.iter().product())).unwrap()
}

fn all(s: &Session, inputs: &[ConstData]) -> VerifyReport {
    s.verify(inputs, &VerifyOptions::new(&reference())).unwrap()
}

fn wrong(r: &VerifyReport) -> String {
    let bad = r.checks.iter().find(|c| c.wrong.is_some());
    bad.map_or(String::new(), |c| {
        format!("{} {} by {} at {}: {:?}", r.backend, c.op, c.kernel, c.span, c.wrong)
    })
}

#[test]
fn a_fault_is_found_in_its_step_and_its_file_repeats_it() {
    registry::register(Arc::new(FaultyDriver)).unwrap();
    let x = [numbers(3, &[6, 40])];
    let dir = tempfile::tempdir().unwrap();
    for level in [Level::O0, Level::O1, Level::O2] {
        BROKEN.store(true, Ordering::Relaxed);
        let bad = at(BackendType::Cuda, level);
        let s = Session::new(&bad, network());
        let r = all(&s, &x);
        let last = r.checks.last().unwrap();
        // The first product is found, not a step before or after it.
        assert!(last.op.starts_with("matmul") && last.kernel.contains("gem"), "{level}: {r:?}");
        assert!(last.span.contains("/fc1") && last.errors.of_tolerance > 1.0, "{level}: {last:?}");
        assert!(r.checks.iter().rev().skip(1).all(|c| c.wrong.is_none()) && r.outputs.is_empty());

        let path = dir.path().join("fault.replay");
        let size = r.divergence.as_ref().unwrap().write(&path).unwrap();
        assert_eq!(size, std::fs::metadata(&path).unwrap().len());
        // The file contains the constants of this step and no others.
        assert!(size < 40 * 64 * 4 + 64 * 4 + 6 * 40 * 4 + 2 * 6 * 64 * 4 + 6000, "{size} bytes");
        let replay = Replay::read(&path).unwrap();
        let about = &replay.about;
        assert_eq!((about.backend, about.level, about.step), (BackendType::Cuda, level, Some(last.step)));
        assert_eq!(about.device, "a CPU with a fault");
        assert!(about.wrong.is_some() && about.span == last.span && about.seed == Some(r.seed));

        let again = replay.run(&about.backend().build().unwrap(), &reference()).unwrap();
        assert!(matches!(again.outcome, Outcome::Diverges(_)), "{level}: {again:?}");
        assert_eq!(again.recorded, Recorded::Same, "{level}");
        assert!(again.errors.abs > 1e-4, "{again:?}");
        let unaltered = replay.run(&at(BackendType::Cpu, level), &reference()).unwrap();
        assert!(matches!(unaltered.outcome, Outcome::Agrees), "{level}: {unaltered:?}");
        assert_eq!(unaltered.recorded, Recorded::Differs);

        // Without its fault the device gives correct results.
        BROKEN.store(false, Ordering::Relaxed);
        let r = all(&s, &x);
        assert!(r.agrees() && r.checks.len() == r.pieces, "{}", wrong(&r));
        assert_eq!(r.outputs, s.run(&x).unwrap());
    }
}

/// A model as one graph, with random inputs.
fn model(path: &Path) -> (Graph, Vec<ConstData>) {
    let m = Model::open(path).unwrap();
    let graph = match m.import(&[]) {
        Ok(i) => i.graph,
        Err(e) => panic!("{}: {e}", path.display()),
    };
    let sizes: std::collections::BTreeMap<_, _> = graph.symbols().into_iter().map(|s| (s, 2)).collect();
    let graph = graph.bind(&sizes).unwrap();
    let data = graph.inputs().iter().enumerate().map(|(k, i)| {
        let t = graph.ty(i.node);
        ConstData::from_scalars(
            t.dtype,
            &t.shape.dims().unwrap(),
            numbers(k as u64 + 1, &t.shape.dims().unwrap()).scalars(),
        )
        .unwrap()
    });
    let inputs = data.collect();
    (graph, inputs)
}

#[test]
fn right_models_agree_on_every_device_and_level() {
    let test = "verified models";
    let mut paths = vec![root().join("models/digits.onnx")];
    paths.extend(models(test, "mnist").map(|d| d.join("mnist.onnx")).filter(|p| p.exists()));
    for path in paths {
        let (graph, inputs) = model(&path);
        for level in [Level::O0, Level::O1, Level::O2] {
            for b in devices(test, level) {
                let r = all(&Session::new(&b, graph.clone()), &inputs);
                assert!(r.agrees() && r.pieces > 2, "{} {level}: {}", path.display(), wrong(&r));
                assert_eq!((r.checks.len(), r.share), (r.pieces, 1.0));
                assert_eq!(r.checks.iter().map(|c| c.steps).sum::<usize>(), r.steps);
            }
        }
    }
}

#[test]
fn a_small_share_checks_at_least_one_step_and_the_seed_says_which() {
    let b = at(BackendType::Cpu, Level::O1);
    let s = Session::new(&b, network());
    let x = [numbers(3, &[6, 40])];
    let o = VerifyOptions::new(&reference()).share(0.01);
    let before = reference().counters();
    let (r, same) = (s.verify(&x, &o).unwrap(), s.verify(&x, &o).unwrap());
    assert_eq!((r.checks.len(), before.library_calls), (1, 0));
    assert_eq!(r.checks[0].step, same.checks[0].step);
    assert_eq!(r.outputs, s.run(&x).unwrap());
    // The reference must be at level O0.
    let e = s.verify(&x, &VerifyOptions::new(&b)).unwrap_err();
    assert!(e.to_string().contains("level O0"), "{e}");
    for share in [0.0, -1.0, 1.5, f64::NAN] {
        let o = VerifyOptions::new(&reference()).share(share);
        assert_eq!(s.verify(&x, &o).unwrap_err().exit_code(), 2);
    }
}

/// Fused chains, reductions and products of all shapes: correct results must not be reported as wrong.
#[test]
fn random_graphs_agree() {
    let mut rng = Rng::fresh("verified random graphs");
    let backends = [at(BackendType::Cpu, Level::O1), at(BackendType::Cpu, Level::O2)];
    let count = std::env::var("HALCYON_GRAPHS").ok().and_then(|v| v.parse().ok()).unwrap_or(30);
    for _ in 0..count {
        let seed = rng.next();
        let (g, inputs) = optable::random::graph(30, &mut Rng::new(seed)).unwrap();
        for b in &backends {
            let r = all(&Session::new(b, g.clone()), &inputs);
            assert!(r.agrees(), "graph {seed} at {}: {}\n{:?}", b.level(), wrong(&r), r.divergence);
        }
    }
}

/// Attention without keys gives zeros, so no step reads some of the inputs. This is not an error.
#[test]
fn inputs_that_no_step_reads_agree() {
    let row = optable::rows().into_iter().find(|r| r.name == "attention").expect("the row");
    let c = row.cases.iter().find(|c| c.label == "no keys").expect("the case");
    for level in [Level::O0, Level::O1, Level::O2] {
        let b = at(BackendType::Cpu, level);
        let (g, x) = (c.graph(DType::F32).unwrap(), c.inputs(DType::F32, &mut Rng::new(1)).unwrap());
        let r = Session::new(&b, g).verify(&x, &VerifyOptions::new(&reference())).unwrap();
        assert!(r.agrees(), "{level}: {}", wrong(&r));
    }
}

/// Every op with NaN, infinities and views among its operands: one case in twelve, or as `HALCYON_CASES`
/// describes.
#[test]
fn cases_of_the_op_table_agree() {
    let what = "verified cases of the op table";
    let every = one_in(12);
    let mut rng = Rng::fresh(what);
    let b = at(BackendType::Cpu, Level::O2);
    let o = VerifyOptions::new(&reference());
    let (mut cases, mut failures) = (0, vec![]);
    for row in optable::rows() {
        for d in &row.dtypes {
            for c in row.cases.iter().filter(|c| c.takes(*d) && c.args.is_empty()) {
                let seed = rng.next();
                if rng.below(every) != 0 {
                    continue;
                }
                let (g, x) = (c.graph(*d).unwrap(), c.inputs(*d, &mut Rng::new(seed)).unwrap());
                let r = Session::new(&b, g).verify(&x, &o);
                cases += 1;
                match r {
                    Ok(r) if r.agrees() => {}
                    Ok(r) => failures.push(format!("{} {d} [{}]: {}", row.name, c.label, wrong(&r))),
                    Err(e) => failures.push(format!("{} {d} [{}]: {e}", row.name, c.label)),
                }
            }
        }
    }
    assert!(
        failures.is_empty() && cases > if every <= 12 { 200 } else { 0 },
        "{} of {cases}:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn a_failing_run_leaves_the_step_that_fails() {
    let b = at(BackendType::Cpu, Level::O1);
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [4usize, 3]));
    let i = g.input("i", TensorType::new(DType::I64, [2usize]));
    let y = g.exp(x).unwrap();
    let y = g.reduce(ReduceKind::Sum, y, &[1], true).unwrap();
    let t = g.gather(y, i, 0).unwrap();
    let out: NodeId = g.neg(t).unwrap();
    g.output("y", out);
    let s = Session::new(&b, g);
    let inputs = [numbers(1, &[4, 3]), ConstData::from_slice(&[2], &[1i64, 9]).unwrap()];
    let e = s.run(&inputs).unwrap_err();
    assert!(matches!(e, Error::Index { .. }), "{e}");
    let replay = s.replay_of(&inputs, &e).unwrap();
    assert!(replay.about.op.contains("gather") && replay.about.step.is_some(), "{:?}", replay.about);
    assert!(replay.about.failure.as_ref().is_some_and(|f| f.contains("-4..4")), "{:?}", replay.about);
    let replay = Replay::from_bytes(&replay.to_bytes().unwrap(), "memory").unwrap();
    let again = replay.run(&b, &reference()).unwrap();
    assert!(matches!(again.outcome, Outcome::Fails(Error::Index { .. })), "{again:?}");
    // With valid inputs no step fails alone, so the whole graph is kept, with the given error.
    let inputs = [inputs[0].clone(), ConstData::from_slice(&[2], &[1i64, 3]).unwrap()];
    let whole = s.replay_of(&inputs, &Error::internal("seen once")).unwrap();
    assert_eq!((whole.graph.inputs().len(), whole.about.step), (2, None));
    assert!(matches!(whole.run(&b, &reference()).unwrap().outcome, Outcome::Agrees));
}

/// A valid replay file, and the position where its header ends.
fn file() -> (Vec<u8>, usize) {
    let b = at(BackendType::Cpu, Level::O1);
    let x = [numbers(3, &[6, 40])];
    let s = Session::new(&b, network());
    let bytes = s.replay_of(&x, &Error::internal("none")).unwrap().to_bytes().unwrap();
    let header = u64::from_le_bytes(bytes[8..16].try_into().unwrap()) as usize;
    (bytes, 16 + header)
}

fn refused(bytes: &[u8], what: &str) -> String {
    match Replay::from_bytes(bytes, "evil.replay") {
        Err(Error::Format { file, what }) if file == "evil.replay" => what,
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn attack_a_file_that_ends_early() {
    let (bytes, header) = file();
    assert!(Replay::from_bytes(&bytes, "good").is_ok());
    for n in [0, 4, 8, 12, 16, 40, header - 1, header, header + 7, header + 100, bytes.len() - 1] {
        refused(&bytes[..n], &format!("{n} bytes"));
    }
}

#[test]
fn attack_bytes_at_the_end() {
    let (mut bytes, _) = file();
    bytes.push(0);
    assert!(refused(&bytes, "one more").contains("bytes of data"));
}

#[test]
fn attack_another_version() {
    let (mut bytes, _) = file();
    bytes[7] = b'2';
    assert!(refused(&bytes, "version 2").contains("version"));
}

#[test]
fn attack_a_header_length_past_the_file() {
    for n in [u64::MAX, 1 << 40, (16 << 20) + 1] {
        let (mut bytes, _) = file();
        bytes[8..16].copy_from_slice(&n.to_le_bytes());
        assert!(refused(&bytes, "header length").contains("its header should have"));
    }
}

#[test]
fn attack_sizes_and_shapes_in_the_header() {
    let (bytes, end) = file();
    let head = std::str::from_utf8(&bytes[16..end]).unwrap();
    let n = head.split("\"graph_bytes\":").nth(1).unwrap().split(',').next().unwrap();
    let dims = "\"dims\":[6,40]";
    for (from, to) in [
        (format!("\"graph_bytes\":{n}"), "\"graph_bytes\":18446744073709551615".to_string()),
        (format!("\"graph_bytes\":{n}"), "\"graph_bytes\":0".to_string()),
        (dims.into(), "\"dims\":[6,41]".into()),
        (dims.into(), "\"dims\":[40,6]".into()),
        (dims.into(), "\"dims\":[18446744073709551615,2]".into()),
        (dims.into(), "\"dims\":[4294967296,4294967296]".into()),
        (dims.into(), "\"dims\":[-6,40]".into()),
        ("\"role\":\"input\"".into(), "\"role\":\"got\"".into()),
        ("\"role\":\"input\"".into(), "\"role\":\"root\"".into()),
        ("\"dtype\":\"f32\"".into(), "\"dtype\":\"i32\"".into()),
        ("\"level\":\"O1\"".into(), "\"level\":\"O9\"".into()),
    ] {
        assert!(head.contains(&from), "{from} is not in {head}");
        let text = head.replacen(&from, &to, 1);
        let mut v = bytes[..8].to_vec();
        v.extend((text.len() as u64).to_le_bytes());
        v.extend(text.as_bytes());
        v.extend(&bytes[end..]);
        refused(&v, &to);
    }
}

#[test]
fn attack_every_byte_in_turn() {
    let (bytes, end) = file();
    // Changes every third byte. The tensors may hold any values; everything before them must be parsed
    // defensively. A file with changed text may still be valid.
    let mut rng = Rng::new(11);
    for at in (0..end + 600).step_by(3) {
        let mut b = bytes.clone();
        b[at] ^= 1 << rng.below(8);
        if let Ok(r) = Replay::from_bytes(&b, "changed") {
            assert_eq!(r.graph.inputs().len(), r.inputs.len());
        }
    }
}

#[test]
fn infinite_errors_survive_in_a_file() {
    let (bytes, _) = file();
    let mut r = Replay::from_bytes(&bytes, "file").unwrap();
    let lost = check::Expected::equal(numbers(1, &[3])).judge(&numbers(1, &[4])).unwrap_err();
    r.about.errors = Some(lost.errors);
    let again = Replay::from_bytes(&r.to_bytes().unwrap(), "again").unwrap();
    assert_eq!((again.about.errors.unwrap().abs, again.about), (f64::INFINITY, r.about));
}

#[test]
fn tolerances_bite() {
    let rows = optable::rows();
    let row = rows.iter().find(|r| r.name == "tanh").unwrap();
    let b = at(BackendType::Cpu, Level::O1);
    let judged = |tol: Tol| {
        let s = row.cases[0].sample(tol, DType::F32, &mut Rng::new(5)).unwrap();
        check::judge(&b, &s).unwrap()
    };
    let right = judged(row.tol).unwrap();
    assert!(right.ulp > 0.0 && right.of_tolerance <= 1.0, "{right:?}");
    // Judges the same results with a tolerance that no device meets.
    let wrong = judged(Tol::Ulps(1e-9)).unwrap_err();
    assert!(wrong.errors.of_tolerance > 1.0 && wrong.what.contains("wrong"), "{wrong:?}");
    assert_eq!(wrong.errors.ulp, right.ulp);
}

//! Tests the CUDA and ROCm drivers over stand-ins for the vendors' libraries. Kernels are rendered as for a
//! GPU, with subgroups of 32 and 64, and compiled as C++. The tests check that the op table, the end-to-end
//! tests, models and captured graphs give the right answers, that nothing leaks, and that failures are typed
//! errors after which the same work succeeds.
#![cfg(all(unix, feature = "cuda", feature = "rocm"))]

mod graphs;
mod launches;
mod options;
mod peers;

use halcyon::hal::{Driver, registry};
use halcyon::ir::ops::Conv;
use halcyon::ir::reference::eval_f64;
use halcyon::ir::{Graph, Scalar, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, Error, MatmulPrecision, OnnxSession, Session};
use halcyon_formats::npy;
use halcyon_formats::onnx::{Datum, Model};
use halcyon_test::optable::check::{Tally, check_some};
use halcyon_test::optable::{random, rows};
use halcyon_test::standins::{self, StandIn};
use halcyon_test::works::{WORK, captured};
use halcyon_test::{Rng, drawn_of, end_to_end, models, root, skip, soon, testdata};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

/// Exclusive use of a backend's stand-in during a test, because the library has global state.
struct Held {
    s: Arc<StandIn>,
    kind: BackendType,
    /// The live objects of the stand-in before the test.
    before: [i64; 6],
    start: Instant,
    _turn: MutexGuard<'static, ()>,
}

impl Held {
    /// `None` if the stand-in could not be built.
    fn new(kind: BackendType) -> Option<Held> {
        static TURNS: [Mutex<()>; 2] = [Mutex::new(()), Mutex::new(())];
        static REGISTERED: OnceLock<()> = OnceLock::new();
        let all = standins::all();
        REGISTERED.get_or_init(|| all.iter().for_each(|s| registry::register(s.driver.clone()).unwrap()));
        let at = all.iter().position(|s| s.driver.kind() == kind)?;
        let turn = TURNS[at].lock().unwrap_or_else(|e| e.into_inner());
        let s = all[at].clone();
        // The streams of the last test may take a moment to release the context. A failed test may keep it.
        soon(|| held(&s) == [0; 6]);
        Some(Held { before: held(&s), s, kind, start: Instant::now(), _turn: turn })
    }

    fn open(&self, level: Level) -> Backend {
        Backend::builder().backend_type(self.kind).level(level).build().unwrap()
    }

    /// Waits until everything was released. A stream may take a moment to release its events.
    fn settled(&self) {
        assert!(
            soon(|| held(&self.s) == self.before),
            "{}: {:?} (memory, pages, streams, events, modules, contexts) were held before, {:?} now",
            self.kind,
            self.before,
            held(&self.s)
        );
    }

    /// Ends a test: nothing may be left, and something must have been launched.
    fn done(self, launches: i64, what: &str) {
        self.settled();
        let n = self.s.get("launches") - launches;
        assert!(n > 0, "{}: {what} launched nothing", self.kind);
        println!("{}: {what}: {n} launches, {:.1} s", self.kind, self.start.elapsed().as_secs_f64());
    }
}

/// A stand-in for a test that inspects it, and the guard that keeps other tests away from it.
fn alone(kind: BackendType) -> Option<(Arc<StandIn>, Held)> {
    Held::new(kind).map(|h| (h.s.clone(), h))
}

fn held(s: &StandIn) -> [i64; 6] {
    ["memory", "pages", "streams", "events", "modules", "contexts"].map(|n| s.get(n))
}

/// Runs a test on one backend, then checks for leaks.
fn on(kind: BackendType, what: &str, f: impl FnOnce(&Held)) {
    let Some(h) = Held::new(kind) else { return };
    let launches = h.s.get("launches");
    f(&h);
    h.done(launches, what);
}

fn op_table(kind: BackendType) {
    let what = format!("op table on {kind} over its stand-in");
    on(kind, &what, |h| {
        let b = h.open(Level::O1);
        // Compiling a kernel runs the C++ compiler, so only some cases are checked.
        check_some(&what, &rows(), std::slice::from_ref(&b), 48, &mut Rng::fresh(&what)).finish(&what);
        let failures =
            (1..=20).filter_map(|seed| random::check(seed, std::slice::from_ref(&b)).err()).collect();
        Tally { cases: 20, failures, ..Tally::default() }.finish(&what);
    });
}

fn decoding_and_training(kind: BackendType) {
    let test = "end_to_end_over_the_stand_ins";
    let (Some(stories), Some(mlp)) = (models(test, "stories260k"), testdata(test, "mlp")) else { return };
    let data = root().join("models/digits.npz");
    on(kind, "end to end", |h| {
        let found = [
            end_to_end::stories(&h.open(Level::O1), &stories, 8).unwrap(),
            end_to_end::mlp(&h.open(Level::O1), &mlp, &data, 20).unwrap(),
        ];
        println!("{kind}: {}; {}", found[0], found[1]);
    });
}

/// Values of a model's only output.
fn infer(s: &OnnxSession, inputs: Vec<ConstData>) -> Vec<f64> {
    let inputs: Vec<Datum> = inputs.into_iter().map(Datum::Tensor).collect();
    let out = s.run_data(&inputs).unwrap().outputs;
    out[0].tensor().unwrap().to_vec::<f64>()
}

fn close(what: &str, got: &[f64], want: &[f64], within: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= within, "{what}: {g}, expected {w}");
    }
}

fn mnist(kind: BackendType) {
    let Some(dir) = models("mnist_over_the_stand_ins", "mnist") else { return };
    let expected: BTreeMap<String, Vec<f64>> =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    assert_eq!(expected.len(), 10);
    on(kind, "mnist", |h| {
        let s = OnnxSession::new(&h.open(Level::O2), Model::open(&dir.join("mnist.onnx")).unwrap()).unwrap();
        for (i, (file, want)) in expected.iter().enumerate() {
            let got = infer(&s, vec![npy::read(&dir.join(file)).unwrap()]);
            close(file, &got, want, 1e-4);
            let best = (0..got.len()).max_by(|a, b| got[*a].total_cmp(&got[*b]));
            assert_eq!(best, Some(i), "{file}");
        }
    });
}

fn minilm(kind: BackendType) {
    #[derive(serde::Deserialize)]
    struct Sentence {
        ids: Vec<i64>,
        embedding: Vec<f64>,
    }
    let test = "minilm_over_the_stand_ins";
    let Some(dir) = models(test, "minilm") else { return };
    let Some(weights) = std::env::var_os("HALCYON_MINILM") else {
        return skip(test, "HALCYON_MINILM is not set");
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(dir.join("minilm.onnx"), folder.path().join("minilm.onnx")).unwrap();
    std::fs::copy(Path::new(&weights).join("model.safetensors"), folder.path().join("model.safetensors"))
        .unwrap();
    let all: Vec<Sentence> =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let shortest = all.iter().min_by_key(|s| s.ids.len()).unwrap();
    let n = shortest.ids.len();
    on(kind, "MiniLM", |h| {
        let s =
            OnnxSession::new(&h.open(Level::O2), Model::open(&folder.path().join("minilm.onnx")).unwrap())
                .unwrap();
        let ids = ConstData::from_slice(&[1, n], &shortest.ids).unwrap();
        let mask = ConstData::from_slice(&[1, n], &vec![1i64; n]).unwrap();
        close("embedding", &infer(&s, vec![ids, mask]), &shortest.embedding, 1e-5);
    });
}

/// SqueezeNet, compared with its stored output: convolutions, pools and concatenations of realistic sizes.
fn light(kind: BackendType) {
    let Some(dir) = testdata("light_over_the_stand_ins", "squeezenet") else { return };
    on(kind, "SqueezeNet", |h| {
        let s = OnnxSession::new(&h.open(Level::O2), Model::open(&dir.join("model.onnx")).unwrap()).unwrap();
        let got = infer(&s, vec![npy::read(&dir.join("input.npy")).unwrap()]);
        let want = npy::read(&dir.join("output.npy")).unwrap().to_vec::<f64>();
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() <= 1e-3 * w.abs(), "{g}, expected {w}");
        }
    });
}

fn capture(kind: BackendType) {
    on(kind, "captured graphs", |h| {
        for level in [Level::O0, Level::O1, Level::O2] {
            let b = h.open(level);
            let want =
                captured(&Backend::builder().backend_type(BackendType::Cpu).level(level).build().unwrap())
                    .unwrap();
            let got = captured(&b).unwrap();
            let far = got.iter().zip(&want).map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
            assert!(got.len() == want.len() && far.fold(0.0, f32::max) <= 1e-3, "{kind} {level}");
            // A launch of a captured graph compiles, plans and uploads nothing, and reads its current inputs.
            let x = Tensor::from_slice(&b, [4, 4], &[0.5f32; 16]).unwrap();
            let g = b.capture_graph(|| [x.matmul(&x).relu().sum([1])]).unwrap();
            for k in 1..=3 {
                let y = Tensor::from_slice(&b, [4, 4], &[k as f32; 16]).unwrap();
                g.bind(&[&y]).unwrap();
                g.launch().unwrap();
                let (c, n) = (b.counters(), b.cache_stats().plans_built);
                g.launch().unwrap();
                b.synchronize().unwrap();
                let d = b.counters();
                assert_eq!(
                    (d.compiles, d.uploads, b.cache_stats().plans_built),
                    (c.compiles, c.uploads, n),
                    "{kind} {level}"
                );
                assert!(d.launches + d.library_calls > c.launches + c.library_calls);
                assert_eq!(g.outputs().unwrap()[0].to_vec::<f32>().unwrap(), [16.0 * (k * k) as f32; 4]);
            }
        }
    });
}

/// Fails every allocation of models, training and captures in turn.
fn out_of_memory(kind: BackendType) {
    on(kind, "out of memory", |h| {
        let cache = tempfile::tempdir().unwrap();
        let open = || {
            Backend::builder().backend_type(kind).level(Level::O2).cache_dir(cache.path()).build().unwrap()
        };
        for (name, work) in drawn_of(&format!("out of memory on {kind}"), WORK) {
            let want = work(&open()).unwrap();
            h.settled();
            let n = h.s.get("allocations");
            assert_eq!(work(&open()).unwrap(), want);
            let n = h.s.get("allocations") - n;
            assert!(n >= 2, "{kind} {name}: {n} allocations");
            let mut errors = 0;
            for i in 0..n {
                let what = format!("{kind} {name}, allocation {i} of {n}");
                h.s.set("fail allocation", i);
                let b = match Backend::builder()
                    .backend_type(kind)
                    .level(Level::O2)
                    .cache_dir(cache.path())
                    .build()
                {
                    Ok(b) => b,
                    Err(e) => {
                        assert!(e.to_string().contains("out of memory"), "{what}: {e}");
                        h.s.set("fail allocation", -1);
                        errors += 1;
                        continue;
                    }
                };
                match work(&b) {
                    // The pool released its cache and retried, or a smaller plan was used.
                    Ok(got) => close(&what, &floats(&got), &floats(&want), 1e-4),
                    Err(e) => {
                        errors += 1;
                        let memory =
                            matches!(e, Error::OutOfMemory { .. }) || e.to_string().contains("out of memory");
                        assert!(memory, "{what}: {e}");
                    }
                }
                h.s.set("fail allocation", -1);
                // Afterwards the backend works again, with bit-identical results.
                assert_eq!(work(&b).unwrap(), want, "{what}: the run after it");
                drop(b);
                h.settled();
            }
            println!("{kind} {name}: {errors} errors of {n} allocations that failed");
        }
    });
}

fn floats(v: &[u32]) -> Vec<f64> {
    v.iter().map(|b| f32::from_bits(*b) as f64).collect()
}

/// Devices that are lost at the first, a middle or the last launch, and read-backs that differ from the
/// device's contents.
fn lost_and_falsified(kind: BackendType) {
    on(kind, "lost devices and falsified answers", |h| {
        for (name, work) in WORK {
            let b = h.open(Level::O2);
            let want = work(&b).unwrap();
            let launches = h.s.get("launches");
            assert_eq!(work(&b).unwrap(), want);
            let launches = h.s.get("launches") - launches;
            assert!(launches > 0);
            for at in [0, launches / 2, launches - 1] {
                let b = h.open(Level::O2);
                h.s.set("lose at launch", at);
                let e = work(&b).unwrap_err();
                let lost = |e: &Error| matches!(e, Error::Driver { .. }) && e.to_string().contains("719");
                assert!(lost(&e), "{kind} {name}, launch {at}: {e}");
                // Later calls fail too, with the same reason.
                let then = work(&b).unwrap_err();
                assert!(lost(&then) && b.synchronize().is_err(), "{kind} {name}, after launch {at}: {then}");
                // The stand-in releases nothing for a lost device.
                h.s.set("lost", 0);
                drop(b);
                assert_eq!(work(&h.open(Level::O2)).unwrap(), want, "{kind} {name}: a device opened anew");
            }
            // Falsify each of the first 64 words that are read back, one at a time. Only the value of that
            // word may differ from the expected results.
            let mut seen = 0;
            for at in 0..64 {
                h.s.set("falsify", 4 * at + 2);
                match work(&b) {
                    Ok(got) => {
                        let others = got.iter().zip(&want).filter(|(a, b)| a != b).count();
                        assert!(
                            got.len() == want.len() && others <= 1,
                            "{kind} {name}: {others} values differ"
                        );
                        seen += others;
                    }
                    // The falsified word was the one in which kernels report faults.
                    Err(e) => assert!(e.to_string().contains("fault"), "{kind} {name}: {e}"),
                }
            }
            assert!(seen >= 4, "{kind} {name}: {seen} falsified words show");
            h.s.set("falsify", -1);
            assert_eq!(work(&b).unwrap(), want);
        }
    });
}

/// Two layers of a network, and a convolution.
fn layers() -> (Graph, Vec<ConstData>) {
    let (mut rng, mut g) = (Rng::new(11), Graph::new());
    let mut data = |dims: &[usize]| ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap();
    let inputs = vec![data(&[2, 24, 96]), data(&[2, 4, 12, 12])];
    let weights: Vec<_> =
        [&[96, 64][..], &[64], &[80, 64], &[8, 4, 3, 3], &[1, 8, 1, 1]].map(|d| g.constant(data(d))).into();
    let of = |i: usize| TensorType::new(DType::F32, &inputs[i].dims);
    let (x, image) = (g.input("x", of(0)), g.input("image", of(1)));
    let y = g.matmul(x, weights[0]).unwrap();
    let y = g.add(y, weights[1]).unwrap();
    let y = g.relu(y).unwrap();
    let turned = g.permute(weights[2], &[1, 0]).unwrap();
    let z = g.matmul(y, turned).unwrap();
    let z = g.gelu_tanh(z).unwrap();
    g.output("z", z);
    let c = g.conv(image, weights[3], Conv::new(2)).unwrap();
    let c = g.add(c, weights[4]).unwrap();
    let c = g.relu(c).unwrap();
    g.output("c", c);
    (g, inputs)
}

/// Names of the kernels that run [`layers`], and the largest difference of each result from `want`.
fn kernels_and_errors(b: &Backend, want: &[ConstData]) -> (Vec<String>, Vec<f64>) {
    let (g, inputs) = layers();
    let session = Session::new(b, g);
    let calls = b.counters().library_calls;
    let got = session.run(&inputs).unwrap();
    let plan = session.prepare(&inputs).unwrap();
    let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
    let library = names.iter().filter(|n| !n.starts_with("ir.")).count();
    assert_eq!(b.counters().library_calls - calls, library as u64, "{names:?}");
    let error = |(g, w): (&ConstData, &ConstData)| {
        let pairs = g.scalars().zip(w.scalars());
        pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max)
    };
    (names, got.iter().zip(want).map(error).collect())
}

fn vendors_libraries(kind: BackendType) {
    let (g, inputs) = layers();
    let want = eval_f64(&g, &inputs, &[]).unwrap();
    let conv = kind == BackendType::Cuda;
    let products = if conv { "cublaslt" } else { "hipblaslt" };
    on(kind, "vendors' libraries", |h| {
        let plain = h.open(Level::O2);
        let (names, exact) = kernels_and_errors(&plain, &want);
        let has = |names: &[String], n: &str| assert!(names.iter().any(|x| x == n), "no {n} in {names:?}");
        has(&names, &format!("{products}.f32.relu"));
        has(&names, &format!("{products}.f32.gelu"));
        if conv {
            has(&names, "cudnn.conv.f32.relu");
        }
        assert!(exact.iter().all(|e| *e < 1e-4), "{kind}: {exact:?}");
        // First disable cuDNN, then require it, which fails if it is not installed.
        let cudnn = |on| Backend::builder().backend_type(kind).level(Level::O2).enable_cudnn(on).build();
        let (names, e) = kernels_and_errors(&cudnn(false).unwrap(), &want);
        assert!(!names.iter().any(|n| n.starts_with("cudnn")) && e[1] < 1e-4, "{kind}: {names:?}, {e:?}");
        match cudnn(true) {
            Ok(b) => {
                assert!(conv && b.info().properties["cudnn"].contains("9."), "{:?}", b.info());
                has(&kernels_and_errors(&b, &want).0, "cudnn.conv.f32.relu");
            }
            Err(e) => assert!(!conv && matches!(e, Error::Unsupported { .. }), "{kind}: {e}"),
        }
        // If the precision allows TF32, TF32 shows in the plan and in the accuracy.
        let with = |level, p| {
            let b = Backend::builder().backend_type(kind).level(level).precision(p);
            kernels_and_errors(&b.build().unwrap(), &want)
        };
        let (names, loose) = with(Level::O2, MatmulPrecision::High);
        if !conv {
            // AMD's devices multiply f32 without rounding.
            has(&names, &format!("{products}.f32.relu"));
            assert!(loose[0] < 1e-4, "{kind}: {loose:?}");
            return;
        }
        has(&names, "cublaslt.tf32.relu");
        has(&names, "cudnn.conv.tf32.relu");
        assert!(loose[0] > 20.0 * exact[0] && loose[0] < 0.1, "{kind}: {exact:?}, {loose:?}");
        assert!(loose[1] > 20.0 * exact[1] && loose[1] < 0.1, "{kind}: {exact:?}, {loose:?}");
        // Below O2, results have the accuracy of the highest precision, and epilogues are separate kernels.
        let (names, e) = with(Level::O1, MatmulPrecision::High);
        has(&names, "cublaslt.f32");
        assert!(e.iter().all(|e| *e < 1e-4), "{kind}: {e:?}");
    });
}

/// A quantised layer in f32 (with a scale for its input and one per column of its weights), one in bf16 with
/// bias and activation, and one of integers.
fn quantised(f8: DType) -> (Graph, Vec<ConstData>) {
    let (mut rng, mut g) = (Rng::fresh("8-bit floats"), Graph::new());
    let mut data = |d: DType, dims: &[usize]| {
        let v = rng.f32s(dims.iter().product());
        let times = if d.is_int() { 100.0 } else { 1.0 };
        let low = if d == DType::U8 { 100.0 } else { 0.0 };
        let v = v.iter().map(|v| Scalar::F(f64::from(*v) * times + low).cast(d));
        ConstData::from_scalars(d, dims, v).unwrap()
    };
    let mut inputs = vec![data(f8, &[2, 24, 96]), data(DType::F32, &[1])];
    let weights = [(f8, &[96, 64][..]), (DType::F32, &[64]), (f8, &[80, 96]), (DType::BF16, &[80])];
    let weights = weights.map(|(d, dims)| g.constant(data(d, dims)));
    let of = |c: &ConstData| TensorType::new(c.dtype, &c.dims);
    let (x, scale) = (g.input("x", of(&inputs[0])), g.input("scale", of(&inputs[1])));
    let wide = g.cast(x, DType::F32).unwrap();
    let wide = g.mul(wide, scale).unwrap();
    let w = g.cast(weights[0], DType::F32).unwrap();
    let w = g.mul(w, weights[1]).unwrap();
    let y = g.matmul(wide, w).unwrap();
    g.output("y", y);
    let half = g.cast(x, DType::BF16).unwrap();
    let w = g.cast(weights[2], DType::BF16).unwrap();
    let w = g.permute(w, &[1, 0]).unwrap();
    let z = g.matmul(half, w).unwrap();
    let z = g.add(z, weights[3]).unwrap();
    let z = g.relu(z).unwrap();
    g.output("z", z);
    // And one of integers, as ONNX's MatMulInteger defines it.
    inputs.extend([data(DType::U8, &[40, 72]), data(DType::U8, &[1])]);
    let w = data(DType::I8, &[72, 48]);
    let (q, zero) = (g.input("q", of(&inputs[2])), g.input("zero", of(&inputs[3])));
    let (q, zero) = (g.cast(q, DType::F32).unwrap(), g.cast(zero, DType::F32).unwrap());
    let q = g.sub(q, zero).unwrap();
    let w = g.constant(w);
    let w = g.cast(w, DType::F32).unwrap();
    let i = g.matmul(q, w).unwrap();
    let i = g.cast(i, DType::I32).unwrap();
    g.output("i", i);
    (g, inputs)
}

fn eight_bits(kind: BackendType) {
    let cuda = kind == BackendType::Cuda;
    let (f8, name) = match cuda {
        true => (DType::F8E4M3FN, "cublaslt.f8e4m3fn"),
        false => (DType::F8E4M3FNUZ, "hipblaslt.f8e4m3fnuz"),
    };
    let (g, inputs) = quantised(f8);
    let want = eval_f64(&g, &inputs, &[]).unwrap();
    on(kind, "8-bit floats", |h| {
        let of = |level, p| {
            let b = Backend::builder().backend_type(kind).level(level).precision(p).build().unwrap();
            let session = Session::new(&b, g.clone());
            let got = session.run(&inputs).unwrap();
            for ((g, w), within) in got.iter().zip(&want).zip([1e-5, 8e-3, 0.0]) {
                let most = w.scalars().map(|v| v.as_f64().abs()).fold(0.0, f64::max);
                let pairs = g.scalars().zip(w.scalars());
                let e = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max);
                assert!(most > 0.0 && e <= within * most, "{kind}, {level}, {p:?}: {e} of {most}");
            }
            let plan = session.prepare(&inputs).unwrap();
            let steps = &plan.plan().steps;
            let mut names: Vec<String> = steps.iter().map(|s| s.work.kernel_name()).collect();
            names.retain(|n| n.starts_with(name) || n.ends_with("lt.i8"));
            names.sort();
            names
        };
        let integers = if cuda { "cublaslt.i8" } else { "hipblaslt.i8" };
        let ended = format!("{name}.relu");
        assert_eq!(of(Level::O2, MatmulPrecision::High), [name, &*ended, integers]);
        // At the highest precision a result in f32 must have the accuracy of f32, so the library does not
        // compute it. A result in bf16 is rounded, so the bits that the matrix units drop do not matter.
        assert_eq!(of(Level::O2, MatmulPrecision::Highest), [&*ended, integers]);
        assert!(of(Level::O1, MatmulPrecision::High).is_empty());
        assert!(h.s.get("library calls") > 0);
    });
}

/// Operands that the library declines are copied one by one until it accepts the product. Here these are
/// views of every second element, and right factors that are stored by rows.
fn scattered_bytes(kind: BackendType) {
    let mut rng = Rng::fresh("scattered bytes");
    let mut data = |d: DType, dims: &[usize]| {
        let v = rng.f32s(dims.iter().product());
        ConstData::from_scalars(d, dims, v.iter().map(|v| Scalar::F(f64::from(*v) * 100.0).cast(d))).unwrap()
    };
    let f8 = if kind == BackendType::Cuda { DType::F8E4M3FN } else { DType::F8E4M3FNUZ };
    let views = [(true, false), (false, true), (true, true)];
    let all = [DType::I8, f8].map(|d| views.map(|v| (d, v))).concat();
    for &(d, (left, right)) in drawn_of(&format!("scattered bytes on {kind}"), &all) {
        let inputs = [data(d, &[64, 128]), data(d, &[64, 128])];
        let mut g = Graph::new();
        let [a, b] = [0, 1].map(|i| g.input("x", TensorType::new(d, &inputs[i].dims)));
        let half = |g: &mut Graph, x, second| match second {
            true => g.slice(x, &[0.into(), 0.into()], &[1, 2], &[64.into(), 64.into()]).unwrap(),
            false => g.narrow(x, 1, 0, 64).unwrap(),
        };
        let (a, b) = (half(&mut g, a, left), half(&mut g, b, right));
        let (a, b) = (g.cast(a, DType::F32).unwrap(), g.cast(b, DType::F32).unwrap());
        let y = g.matmul(a, b).unwrap();
        g.output("y", y);
        let want = eval_f64(&g, &inputs, &[]).unwrap();
        on(kind, "scattered bytes", |_| {
            let b = Backend::builder().backend_type(kind).precision(MatmulPrecision::High);
            let session = Session::new(&b.build().unwrap(), g.clone());
            let got = session.run(&inputs).unwrap();
            // Integers must be exact; otherwise 64 products of up to 10,000 each are summed in f32.
            let within = if d == DType::I8 { 0.0 } else { 0.1 };
            close("scattered bytes", &got[0].to_vec::<f64>(), &want[0].to_vec::<f64>(), within);
            let plan = session.prepare(&inputs).unwrap();
            let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
            let name = if d == DType::I8 { "lt.i8".into() } else { format!("lt.{d}") };
            assert!(names.iter().any(|n| n.ends_with(&name)), "{left} {right}: {names:?}");
        });
    }
}

/// Attention over a prompt, in a dtype that the vendor has kernels for.
fn prompts(kind: BackendType) {
    let mut rng = Rng::fresh("attention of a prompt");
    let (mut g, mut inputs) = (Graph::new(), vec![]);
    let mut input = |g: &mut Graph, dims: [usize; 4]| {
        let values = rng.f32s(dims.iter().product());
        let halves = values.iter().map(|v| Scalar::F(f64::from(*v)).cast(DType::F16));
        inputs.push(ConstData::from_scalars(DType::F16, &dims, halves).unwrap());
        g.input(&format!("x{}", inputs.len()), TensorType::new(DType::F16, dims))
    };
    // `[batch, rows, heads, size]`, as projections produce it.
    let rows =
        [input(&mut g, [1, 163, 8, 64]), input(&mut g, [1, 420, 2, 64]), input(&mut g, [1, 420, 2, 64])];
    let [q, k, v] = rows.map(|x| g.permute(x, &[0, 2, 1, 3]).unwrap());
    let y = g.attention(q, k, v, None, true, 0.3).unwrap();
    g.output("y", y);
    let want = eval_f64(&g, &inputs, &[]).unwrap();
    let launch = |b: &Backend| {
        assert_eq!(Tensor::from_slice(b, [1], &[0f32]).unwrap().exp().to_vec::<f32>().unwrap(), [1.0])
    };
    on(kind, "attention of a prompt", |h| {
        let b = h.open(Level::O2);
        let session = Session::new(&b, g);
        let plan = session.prepare(&inputs).unwrap();
        let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
        if kind != BackendType::Cuda {
            assert!(names.iter().all(|n| n.starts_with("ir.")), "{names:?}");
            // Launch something cheap: attention itself would take long here.
            return launch(&b);
        }
        assert_eq!(names, ["cudnn.attention.f16.causal"]);
        let calls = b.counters().library_calls;
        // The commands are submitted individually at first, and launched as a captured graph later.
        for _ in 0..4 {
            let got = session.run(&inputs).unwrap();
            let pairs = got[0].scalars().zip(want[0].scalars());
            let e = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max);
            assert!(e < 2e-3, "{kind}: {e}");
        }
        assert_eq!(b.counters().library_calls - calls, 4);
        assert!(b.counters().capture_launches > 0);
        launch(&b);
    });
}

/// A product or a convolution of random sizes, and random ops that its epilogue may contain.
fn drawn(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let (mut g, mut inputs) = (Graph::new(), vec![]);
    let mut input = |g: &mut Graph, rng: &mut Rng, dims: &[usize]| {
        inputs.push(ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap());
        g.input(&format!("x{}", inputs.len()), TensorType::new(DType::F32, dims))
    };
    let conv = rng.below(3) == 0;
    let mut y = if conv {
        let (b, c, o, n) = (1 + rng.below(3), 2 + rng.below(4), 2 + rng.below(8), 8 + rng.below(8));
        let x = input(&mut g, rng, &[b, c, n + 4, n]);
        let w = input(&mut g, rng, &[o, c, 3, 3]);
        g.conv(x, w, Conv::new(2)).unwrap()
    } else {
        let (m, k, n) = (16 + rng.below(24), 40 + rng.below(60), 16 + rng.below(40));
        let head: Vec<usize> = (0..rng.below(3)).map(|_| 1 + rng.below(3)).collect();
        let x = input(&mut g, rng, &[&head[..], &[m, k]].concat());
        let w = match rng.below(3) {
            0 => input(&mut g, rng, &[k, n]),
            1 => input(&mut g, rng, &[&head[..], &[k, n]].concat()),
            _ => {
                let t = input(&mut g, rng, &[n, k]);
                g.permute(t, &[1, 0]).unwrap()
            }
        };
        g.matmul(x, w).unwrap()
    };
    let dims: Vec<usize> = g.shape(y).known().unwrap().to_vec();
    for _ in 0..rng.below(4) {
        let along = |axis: usize| -> Vec<usize> {
            (0..dims.len()).map(|a| if a == axis { dims[a] } else { 1 }).collect()
        };
        y = match rng.below(7) {
            0 | 1 => {
                let b = input(&mut g, rng, &along(if conv { 1 } else { dims.len() - 1 }));
                g.add(b, y).unwrap()
            }
            // An operand along another axis, or of the full shape. It is not a bias.
            2 => {
                let b = input(&mut g, rng, &along(0));
                g.add(y, b).unwrap()
            }
            3 => {
                let b = input(&mut g, rng, &dims);
                g.add(y, b).unwrap()
            }
            4 => g.gelu(y).unwrap(),
            5 => g.gelu_tanh(y).unwrap(),
            _ => g.relu(y).unwrap(),
        };
    }
    g.output("y", y);
    (g, inputs)
}

fn chains_on_top(kind: BackendType) {
    let what = "chains on top of the vendors' kernels";
    let mut rng = Rng::fresh(what);
    on(kind, what, |h| {
        let b = h.open(Level::O2);
        let (mut calls, mut chains) = (0, 0);
        for round in 0..12 {
            let (g, inputs) = drawn(&mut rng);
            let want = eval_f64(&g, &inputs, &[]).unwrap();
            let session = Session::new(&b, g);
            let got = session.run(&inputs).unwrap();
            let plan = session.prepare(&inputs).unwrap();
            let library = plan.plan().steps.iter().filter(|s| !s.work.kernel_name().starts_with("ir."));
            library.for_each(|s| (calls, chains) = (calls + 1, chains + u32::from(s.fused.is_some())));
            let pairs = got[0].scalars().zip(want[0].scalars());
            let e = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max);
            assert!(e < 1e-4, "{kind}, round {round}: {e}\n{}", plan.plan());
        }
        assert!(calls > 0, "{kind}: no library was called");
        println!("{kind}: {calls} calls, {chains} with chains on top");
    });
}

/// Runs a test on one backend, if the seed of the run has drawn this backend for it. With
/// `HALCYON_CASES=all` each test runs on both.
fn if_drawn(kind: BackendType, name: &str, test: fn(BackendType)) {
    if drawn_of(&format!("vendor of {name}"), &[BackendType::Cuda, BackendType::Rocm]).contains(&kind) {
        test(kind);
    } else {
        let why = "one of the two stand-ins runs it; HALCYON_CASES=all runs it on both";
        skip(&format!("{name} on {kind}"), why);
    }
}

/// Defines each test once per backend.
macro_rules! on_both {
    ($($name:ident: $f:ident;)*) => {
        mod cuda {
            $(#[test] fn $name() { super::if_drawn(halcyon::BackendType::Cuda, stringify!($name), super::$f); })*
        }
        mod rocm {
            $(#[test] fn $name() { super::if_drawn(halcyon::BackendType::Rocm, stringify!($name), super::$f); })*
        }
    };
}

on_both! {
    op_table: op_table;
    stories_and_mlp_end_to_end: decoding_and_training;
    mnist_recognises_ten_of_ten_digits: mnist;
    minilm_embeds_a_sentence: minilm;
    squeezenet_follows_onnxruntime: light;
    captured_graphs_give_what_evaluations_do: capture;
    out_of_memory_at_every_allocation_leaves_nothing_behind: out_of_memory;
    plans_use_the_vendors_libraries: vendors_libraries;
    products_of_8_bit_floats_are_the_vendors: eight_bits;
    products_of_scattered_bytes_copy_them_first: scattered_bytes;
    chains_on_top_follow_float64: chains_on_top;
    prompts_are_attended_to_by_the_vendors_kernel: prompts;
    lost_devices_are_errors_and_falsified_answers_show: lost_and_falsified;
}

//! Tests of checkpoints: a checkpoint is complete at every moment, loading restores the same bits, and
//! damaged files give typed errors.

use halcyon::Error;
use halcyon::prelude::*;
use halcyon_nn::*;
use halcyon_train::{Checkpoint, CheckpointOptions, Checkpoints, Goal, Progress};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Module)]
struct Net {
    fc1: Linear,
    norm: BatchNorm,
    fc2: Linear,
}

fn net(b: &Backend) -> Net {
    Net {
        fc1: Linear::new(b, 4, 6).unwrap(),
        norm: BatchNorm::new(b, 6).unwrap(),
        fc2: Linear::new(b, 6, 2).unwrap(),
    }
}

fn step<'n>(net: &'n Net, scaler: Option<LossScaler>) -> TrainStep<'n> {
    let optimizer = Optimizer::builder(Adam::w().rate(0.01));
    let optimizer = optimizer.schedule(Schedule::Cosine { steps: 50, least: 1e-4 }).build(net).unwrap();
    let f = |net: &&Net, x: &[Tensor]| {
        let h = net.norm.forward(&net.fc1.forward(&x[0].cast(dtype(net)))).relu();
        Ok(vec![net.fc2.forward(&h).cast(DType::F32).sqr().mean(..)])
    };
    match scaler {
        None => TrainStep::new(net, optimizer, f),
        Some(s) => TrainStep::with_scaler(net, optimizer, s, f),
    }
    .unwrap()
}

fn dtype(net: &Net) -> DType {
    net.fc1.weight.value().dtype().unwrap()
}

fn batch(b: &Backend) -> Tensor {
    let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.37).sin()).collect();
    Tensor::from_slice(b, [8, 4], &x).unwrap()
}

/// All bits of the model and of the training step.
fn bits(net: &Net, step: &TrainStep<'_>) -> Vec<(String, DType, Vec<u8>)> {
    let own = net.slots().into_iter().map(|(n, s)| (n, s.value()));
    let all = own.chain(step.state());
    all.map(|(n, t)| (n, t.dtype().unwrap(), t.to_data().unwrap().bytes().to_vec())).collect()
}

fn at(step: u64) -> Progress {
    Progress { step, ..Progress::default() }
}

#[test]
fn every_bit_comes_back_also_from_several_files() {
    for shard_bytes in [2u64 << 30, 100] {
        let dir = tempfile::tempdir().unwrap();
        let b = Backend::cpu().unwrap();
        let store = Checkpoints::new(dir.path(), CheckpointOptions { shard_bytes, ..Default::default() });
        assert_eq!(store.latest().unwrap(), None);
        let (a, other) = (net(&b), net(&b));
        let mut s = step(&a, None).seed(77);
        for _ in 0..3 {
            s.run(&[&batch(&b)]).unwrap();
        }
        let metrics = [("accuracy".to_string(), 0.5), ("bad".to_string(), f64::NAN)].into();
        let data = serde_json::json!({ "next": 3 });
        let progress = Progress { step: 3, epoch: 1, metrics, data: data.clone(), ..Progress::default() };
        let path = store.save(&a, &s, &progress).unwrap();
        assert_eq!(path, dir.path().join("step-000003"));
        let files: Vec<String> =
            fs::read_dir(&path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let index = files.contains(&"model.safetensors.index.json".to_string());
        assert_eq!((index, files.len() > 8), (shard_bytes == 100, shard_bytes == 100), "{files:?}");
        let mut t = step(&other, None);
        let c = Checkpoint::open(&store.latest().unwrap().unwrap()).unwrap();
        c.load(&other, &mut t).unwrap();
        assert_eq!(bits(&a, &s), bits(&other, &t));
        assert_eq!((t.current_seed(), t.with_optimizer(|o| o.steps())), (77, 3));
        let m = c.manifest();
        assert_eq!((m.step, m.epoch, &m.data, m.metrics.len()), (3, 1, &data, 1));
        assert_eq!((m.optimizer.groups[0].rule.as_str(), m.dtypes["f32"]), ("adamw", 8));
        // Both runs continue with the same results.
        let next = |s: &mut TrainStep<'_>| s.run(&[&batch(&b)]).unwrap()[0].item::<f32>().unwrap().to_bits();
        assert_eq!(next(&mut s), next(&mut t));
        assert_eq!(bits(&a, &s), bits(&other, &t));
        // The weights alone are a safetensors file of the model.
        if !index {
            net(&b).load(&path.join("model.safetensors"), Strictness::Strict).unwrap();
        }
    }
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let best = Some(("accuracy".to_string(), Goal::Largest));
    let store = Checkpoints::new(dir.path(), CheckpointOptions { keep: 2, best, ..Default::default() });
    let a = net(&b);
    let s = step(&a, None);
    for (n, accuracy) in [(1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8), (4, 0.6)] {
        let metrics = [("accuracy".to_string(), accuracy)].into();
        store.save(&a, &s, &Progress { step: n, metrics, ..Progress::default() }).unwrap();
    }
    let names: Vec<PathBuf> = store.list().unwrap();
    let want = ["step-000002", "step-000003", "step-000004-2"].map(|n| dir.path().join(n));
    assert_eq!(names, want);
    assert_eq!(store.best().unwrap().unwrap(), want[0]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "nothing hidden is left over");
    // Folders with other names are not checkpoints.
    for name in ["step-7", "step-000009.old", "step-abc", "other"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("step-000010"), "a file").unwrap();
    assert_eq!(store.list().unwrap(), want);
    // Each save of a step replaces the one before.
    for n in 3..6 {
        let path = store.save(&a, &s, &Progress { step: 4, ..Progress::default() }).unwrap();
        assert_eq!(path, dir.path().join(format!("step-000004-{n}")));
        assert_eq!(store.latest().unwrap(), Some(path));
        assert_eq!(store.list().unwrap().len(), 3);
    }
}

#[test]
fn dtypes_and_scalers_are_those_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let half = net(&b);
    half.to_dtype(DType::BF16).unwrap();
    let scaler = LossScaler { initial: 4.0, ..LossScaler::default() };
    let mut s = step(&half, Some(scaler));
    for _ in 0..2 {
        s.run(&[&batch(&b)]).unwrap();
    }
    let c = Checkpoint::open(&store.save(&half, &s, &at(2)).unwrap()).unwrap();
    assert_eq!(c.manifest().scaler.as_ref().unwrap().scale, 4.0);
    assert!(c.manifest().dtypes["bf16"] >= 6, "{:?}", c.manifest().dtypes);
    // A run in f32 takes the f32 copies.
    let full = net(&b);
    let mut t = step(&full, None);
    c.load(&full, &mut t).unwrap();
    let state: std::collections::HashMap<String, Tensor> = s.state().into_iter().collect();
    let master = state["fc1.weight.master"].to_vec::<f32>().unwrap();
    assert_eq!(full.fc1.weight.value().to_vec::<f32>().unwrap(), master);
    assert_eq!(dtype(&full), DType::F32);
    // In the other direction, a run in bf16 makes its f32 copies from f32 parameters.
    let c = Checkpoint::open(&store.save(&full, &t, &at(3)).unwrap()).unwrap();
    let again = net(&b);
    again.to_dtype(DType::BF16).unwrap();
    let mut u = step(&again, Some(scaler));
    c.load(&again, &mut u).unwrap();
    let state: std::collections::HashMap<String, Tensor> = u.state().into_iter().collect();
    assert_eq!(state["fc1.weight.master"].to_vec::<f32>().unwrap(), master);
    u.run(&[&batch(&b)]).unwrap();
}

/// Two fields share a parameter. The file has its weights under both names, and its f32 copy under one name.
#[test]
fn a_tied_parameter_takes_its_f32_copy() {
    #[derive(Module)]
    struct Tied {
        first: Linear,
        second: Param,
    }
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let tied = || {
        let first = Linear::new(&b, 3, 3).unwrap();
        let second = first.weight.clone();
        Tied { first, second }
    };
    let forward = |m: &&Tied, x: &[Tensor]| {
        let d = m.second.value().dtype()?;
        Ok(vec![m.first.forward(&x[0].cast(d)).matmul(&m.second.value()).cast(DType::F32).sqr().mean(..)])
    };
    let x = b.randn([4, 3], DType::F32);
    let half = tied();
    half.to_dtype(DType::BF16).unwrap();
    let mut s = TrainStep::new(&half, Optimizer::new(&half, Adam::w()).unwrap(), forward).unwrap();
    for _ in 0..3 {
        s.run(&[&x]).unwrap();
    }
    let c = Checkpoint::open(&store.save(&half, &s, &at(3)).unwrap()).unwrap();
    let full = tied();
    let mut t = TrainStep::new(&full, Optimizer::new(&full, Adam::w()).unwrap(), forward).unwrap();
    c.load(&full, &mut t).unwrap();
    let state: std::collections::HashMap<String, Tensor> = s.state().into_iter().collect();
    let master = state["first.weight.master"].to_vec::<f32>().unwrap();
    assert_ne!(half.second.value().to_vec::<f32>().unwrap(), master, "bf16 loses digits");
    assert_eq!(full.first.weight.value().to_vec::<f32>().unwrap(), master);
    assert_eq!(full.second.value().to_vec::<f32>().unwrap(), master);
}

/// A run moves through checkpoints from one test device to the next and back to the CPU, and every bit of its
/// state is kept.
#[test]
fn checkpoints_move_between_devices() {
    let dir = tempfile::tempdir().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let devices = halcyon_test::devices::devices("checkpoints_move_between_devices", Level::O2);
    let cpu = Backend::cpu().unwrap();
    let mut saved: Option<Vec<(String, DType, Vec<u8>)>> = None;
    let mut last = f64::INFINITY;
    for (i, b) in devices.into_iter().chain([cpu]).enumerate() {
        let model = net(&b);
        let mut s = step(&model, None);
        if let Some(before) = &saved {
            Checkpoint::open(&store.latest().unwrap().unwrap()).unwrap().load(&model, &mut s).unwrap();
            assert_eq!(&bits(&model, &s), before, "{}", b.id());
        }
        for _ in 0..5 {
            let loss = s.run(&[&batch(&b)]).unwrap()[0].item::<f64>().unwrap();
            assert!(loss < last, "{}: {loss} after {last}", b.id());
            last = loss;
        }
        store.save(&model, &s, &at(i as u64 + 1)).unwrap();
        saved = Some(bits(&model, &s));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let a = net(&b);
    let s = step(&a, None);
    let c = Checkpoint::open(&store.save(&a, &s, &at(0)).unwrap()).unwrap();
    let error = |model: Net, make: &dyn Fn(&Net) -> Result<Optimizer>| -> String {
        let optimizer = make(&model).unwrap();
        let mut t =
            TrainStep::new(&model, optimizer, |_: &&Net, x: &[Tensor]| Ok(vec![x[0].sum(..)])).unwrap();
        let before = bits(&model, &t);
        let e = c.load(&model, &mut t).unwrap_err().to_string();
        assert_eq!(bits(&model, &t), before, "nothing is replaced after an error");
        e
    };
    let adam = |m: &Net| Optimizer::new(m, Adam::w());
    let e = error(Net { fc2: Linear::new(&b, 6, 3).unwrap(), ..net(&b) }, &adam);
    assert!(e.contains("fc2.weight") && e.contains("[2, 6]") && e.contains("[3, 6]"), "{e}");
    let bare = LinearOptions { bias: false, ..LinearOptions::default() };
    let e = error(Net { fc2: Linear::with(&b, 6, 2, bare).unwrap(), ..net(&b) }, &adam);
    assert!(e.contains("fc2.bias"), "{e}");
    let e = error(net(&b), &|m| Optimizer::new(m, Sgd::new().momentum(0.9)));
    assert!(e.contains("adamw") && e.contains("sgd"), "{e}");
    let e = error(net(&b), &|m| Optimizer::new(m, Adam { amsgrad: true, ..Adam::w() }));
    assert!(e.contains("max_exp_avg_sq"), "{e}");
}

#[test]
fn damaged_and_hostile_files_are_typed_errors() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let options = CheckpointOptions { shard_bytes: 150, keep: 0, ..Default::default() };
    let store = Checkpoints::new(dir.path(), options);
    let a = net(&b);
    let s = step(&a, None);
    let good = store.save(&a, &s, &at(1)).unwrap();
    let copy = dir.path().join("step-000002");
    let fresh = || {
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir(&copy).unwrap();
        for e in fs::read_dir(&good).unwrap().flatten() {
            fs::copy(e.path(), copy.join(e.file_name())).unwrap();
        }
    };
    let fails = |what: &str| {
        let m = net(&b);
        let mut t = step(&m, None);
        match Checkpoint::open(&copy).and_then(|c| c.load(&m, &mut t)) {
            Err(
                Error::Format { .. } | Error::Io { .. } | Error::Unsupported { .. } | Error::Argument { .. },
            ) => {}
            other => panic!("{what}: {other:?}"),
        }
    };
    let names: Vec<_> = fs::read_dir(&good).unwrap().flatten().map(|e| e.file_name()).collect();
    for name in &names {
        fresh();
        let path = copy.join(name);
        let bytes = fs::read(&path).unwrap();
        for cut in [0, bytes.len() / 2, bytes.len() - 1] {
            fs::write(&path, &bytes[..cut]).unwrap();
            fails(&format!("{name:?} cut at {cut}"));
        }
        let mut flipped = bytes.clone();
        let middle = flipped.len() - 9;
        flipped[middle] ^= 1;
        fs::write(&path, &flipped).unwrap();
        if name != "checkpoint.json" {
            fails(&format!("{name:?} with a flipped bit"));
        }
        fs::remove_file(&path).unwrap();
        fails(&format!("{name:?} missing"));
    }
    let text = fs::read_to_string(good.join("checkpoint.json")).unwrap();
    for (from, to) in [
        ("\"version\": 1", "\"version\": 2"),
        ("\"version\": 1", "\"version\": 0"),
        ("halcyon-checkpoint", "other"),
        ("\"step\": 1", "\"step\": -1"),
        ("\"step\": 1", "\"step\": 1, \"other\": 2"),
        ("\"optimizer-00001", "\"../optimizer-00001"),
        ("\"bytes\": ", "\"bytes\": 1"),
        ("\"adamw\"", "\"lion\""),
    ] {
        assert!(text.contains(from), "{from}");
        fresh();
        fs::write(copy.join("checkpoint.json"), text.replacen(from, to, 1)).unwrap();
        fails(&format!("{from} → {to}"));
    }
    let deep = "[".repeat(100_000);
    fresh();
    fs::write(copy.join("checkpoint.json"), deep).unwrap();
    fails("deep nesting");
    fresh();
    let index = copy.join("model.safetensors.index.json");
    let original = fs::read_to_string(&index).unwrap();
    let hostile = original.replacen("model-00001", "../model-00001", 1);
    fs::write(&index, hostile).unwrap();
    fails("an index that leads out of the folder");
}

const CHILD: &str = "CHECKPOINT_TEST_FOLDER";

/// The child process of the tests below. It saves checkpoints until it is killed or a save fails, and prints
/// the step of each complete checkpoint.
#[test]
fn child_that_saves() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let b = Backend::cpu().unwrap();
    let options = CheckpointOptions { keep: 2, shard_bytes: 200, ..Default::default() };
    let store = Checkpoints::new(folder, options);
    let a = net(&b);
    let mut s = step(&a, None);
    let first = match store.latest().unwrap() {
        None => 0,
        Some(path) => {
            let c = Checkpoint::open(&path).unwrap();
            c.load(&a, &mut s).unwrap();
            c.manifest().step
        }
    };
    for n in first + 1.. {
        s.run(&[&batch(&b)]).unwrap();
        match store.save(&a, &s, &at(n)) {
            Ok(_) => println!("\nsaved {n}"),
            Err(e) => {
                println!("\nfailed {e}");
                return;
            }
        }
    }
}

fn child(folder: &Path) -> Command {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["--exact", "child_that_saves", "--nocapture", "--test-threads=1"]).env(CHILD, folder);
    c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    c
}

/// Kills the child 200 times at random moments. The latest checkpoint always loads, and is never older than
/// the last checkpoint that was reported as complete.
#[test]
fn kills_at_random_moments_lose_nothing_that_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let mut rng = halcyon_test::Rng::fresh("checkpoints");
    let (model, mut newest) = (net(&b), 0);
    let mut s = step(&model, None);
    for kill in 0..200 {
        let mut c = child(dir.path()).spawn().unwrap();
        let mut out = BufReader::new(c.stdout.take().unwrap());
        // The random time counts from the first save, because the start of a process takes longer than a
        // save.
        let mut line = String::new();
        let mut reported = 0;
        while out.read_line(&mut line).unwrap() > 0 {
            if let Some(n) = line.trim().strip_prefix("saved ") {
                reported = n.parse().unwrap();
                break;
            }
            line.clear();
        }
        let wait = Duration::from_micros((rng.uniform(0.0, 1.0) * 30_000.0) as u64);
        let start = Instant::now();
        while start.elapsed() < wait {
            std::thread::sleep(Duration::from_micros(200));
        }
        c.kill().unwrap();
        c.wait().unwrap();
        for l in out.lines().map_while(|l| l.ok()) {
            if let Some(n) = l.strip_prefix("saved ").and_then(|n| n.parse::<u64>().ok()) {
                reported = n;
            }
        }
        let c = Checkpoint::open(&store.latest().unwrap().unwrap()).unwrap();
        c.load(&model, &mut s).unwrap_or_else(|e| panic!("kill {kill}: {e}"));
        let step = c.manifest().step;
        assert!(
            step >= reported && step > newest,
            "kill {kill}: {step}, reported {reported}, before {newest}"
        );
        assert_eq!(s.with_optimizer(|o| o.steps()), step);
        newest = step;
    }
}

/// A write fails in the middle, as on a full disk. The test sets a limit on file sizes and ignores the signal
/// of the limit, so that the write returns an error.
#[cfg(unix)]
#[test]
fn a_write_that_fails_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let store = Checkpoints::new(dir.path(), CheckpointOptions::default());
    let model = net(&b);
    let mut s = step(&model, None);
    let path = store.save(&model, &s, &at(1)).unwrap();
    let before = bits(&model, &s);
    let exe = std::env::current_exe().unwrap();
    let line = "trap '' XFSZ; ulimit -f 1; exec \"$0\" --exact child_that_saves --nocapture";
    let out = Command::new("bash").args(["-c", line]).arg(&exe).env(CHILD, dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("failed") && text.contains("too large") && !text.contains("saved 2"), "{text}");
    assert_eq!(store.list().unwrap(), std::slice::from_ref(&path));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the failed one is removed");
    Checkpoint::open(&path).unwrap().load(&model, &mut s).unwrap();
    assert_eq!(bits(&model, &s), before);
}

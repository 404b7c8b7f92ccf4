//! Tests of tuning: tuned kernels are used and cached; variants that give wrong results, fail, crash or do
//! not fit are quarantined; several processes tune concurrently.

use halcyon::ir::kernel::lower::Lowered;
use halcyon::ir::plan::Plan;
use halcyon::ir::target::{Caps, Declined};
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::receipts::Effort;
use halcyon::session::difference;
use halcyon::tune::{
    Best, Entry, RejectReason, Rejection, Space, Table, Templates, Tunable, TuneOptions, TuningCache,
    TuningMode, Variant,
};
use halcyon::{BackendBuilder, ConstData, Error, Session};
use halcyon_test::Rng;
use halcyon_test::devices::open;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::Duration;

/// Measurements are short, because these tests check what is recorded, not what is fast.
fn quick<'a>() -> TuneOptions<'a> {
    let effort = Effort { pairs: 3, interval: 1.0, burst: Duration::from_micros(200) };
    TuneOptions { effort, ..TuneOptions::default() }
}

fn builder(file: &Path) -> BackendBuilder {
    Backend::builder().backend_type(BackendType::OpenCl).autotuning_cache_file(file)
}

/// The device whose kernels can be tuned here, with the given cache file.
fn backend(test: &str, file: &Path) -> Option<Backend> {
    open(test, BackendType::OpenCl, Level::O2)?;
    Some(builder(file).build().unwrap())
}

fn product(m: usize, k: usize, n: usize) -> Graph {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [m, k]));
    let w = g.input("w", TensorType::new(DType::F32, [k, n]));
    let y = g.matmul(x, w).unwrap();
    g.output("y", y);
    g
}

fn inputs(g: &Graph) -> Vec<ConstData> {
    let mut rng = Rng::new(7);
    let one = |i: &halcyon::ir::graph::InputSpec| {
        let dims = g.shape(i.node).dims().unwrap();
        ConstData::from_slice(&dims, &rng.f32s(dims.iter().product())).unwrap()
    };
    g.inputs().iter().map(one).collect()
}

fn tuned(p: &Plan) -> usize {
    p.steps.iter().filter(|s| s.tunable.as_ref().is_some_and(|t| t.tuned)).count()
}

#[test]
fn what_is_found_is_kept_and_used_from_o2_on() {
    let test = "what_is_found_is_kept_and_used_from_o2_on";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let Some(b) = backend(test, &file) else { return };
    let mut g = product(96, 200, 64);
    let y = g.outputs()[0].node;
    let z = g.softmax(y, 1).unwrap();
    let z = g.sum(z, &[0], false).unwrap();
    g.output("z", z);
    let report = b.tune_with(std::slice::from_ref(&g), &quick()).unwrap();
    assert_eq!((report.tuned.len(), report.known, report.left), (3, 0, 0), "{report:?}");
    for k in &report.tuned {
        let Best { gain, interval, tried, error, .. } = k.best.clone();
        println!("{}: {} -> {} {gain:.2}x", k.key, k.best.default, k.best.variant);
        assert!(
            gain >= 1.0 && interval.0 <= gain && gain <= interval.1 && tried > 3 && error <= 1.0,
            "{k:?}"
        );
        let broken = k.rejected.iter().any(|r| r.why != RejectReason::TooSlow);
        assert!(!broken, "every variant that is listed works here: {k:?}");
    }
    assert_eq!(b.cache_stats().kernels_tuned, 3);
    let again = b.tune_with(std::slice::from_ref(&g), &quick()).unwrap();
    assert_eq!((again.tuned.len(), again.known), (0, 3));

    let data = inputs(&g);
    let run = |b: &Backend| {
        let s = Session::new(b, g.clone());
        (s.run(&data).unwrap(), s.prepare(&data).unwrap())
    };
    let (reference, plain) = run(&builder(&file).level(Level::O1).build().unwrap());
    // At O1, where the order of sums is fixed, nothing is tuned, and the cache file has no influence.
    assert!(plain.plan().steps.iter().all(|s| s.tunable.is_none()));
    let without =
        Backend::builder().backend_type(BackendType::OpenCl).level(Level::O1).tuning(TuningMode::Off);
    assert_eq!(run(&without.build().unwrap()).0[0].bytes(), reference[0].bytes());
    let e = builder(&file).level(Level::O1).build().unwrap().tune(&g, None).unwrap_err();
    assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains("O2"), "{e}");

    // Choose another variant than the default, regardless of which is fastest.
    let c = TuningCache::at(&file);
    let key = &report.tuned.iter().find(|k| k.op == "matmul").unwrap().key;
    let t = plan_of(&b, &g).into_iter().find(|t| t.choices.key == *key).unwrap();
    let other = t.choices.others.last().unwrap().clone();
    let low = t.build(&other, b.device().as_target().caps()).unwrap();
    let mut e = c.get(b.tuning_device(), key).unwrap();
    let best = e.best.as_mut().unwrap();
    (best.variant, best.measured) = (other.clone(), best.measured + 1);
    best.program = format!("{:032x}", halcyon::ir::kernel::tune::digest(&low));
    c.add(&e);
    c.save().unwrap();
    let second = builder(&file).build().unwrap();
    let (y, exe) = run(&second);
    assert_eq!((tuned(exe.plan()), second.cache_stats().candidates_tried), (3, 0));
    assert!(exe.plan().to_string().contains(&format!("tuned: {other}")), "{}", exe.plan());
    assert!(exe.plan().receipts.iter().any(|r| r.transformation == "tuned kernels"));
    assert!(difference(&y, &reference) < 1e-5);
    // Tuned kernels are not used if they are disabled.
    for b in [builder(&file).without("tuned kernels"), builder(&file).tuning(TuningMode::Off)] {
        assert_eq!(tuned(run(&b.build().unwrap()).1.plan()), 0);
    }
}

fn plan_of(b: &Backend, g: &Graph) -> Vec<Tunable> {
    let plan = halcyon::ir::lower::lower(g, b.device().as_target(), &b.lower_options()).unwrap();
    plan.steps.iter().filter_map(|s| s.tunable.as_deref().cloned()).collect()
}

#[test]
fn budgets_stop_and_new_plans_are_tuned_in_theirs() {
    let test = "budgets_stop_and_new_plans_are_tuned_in_theirs";
    let dir = tempfile::tempdir().unwrap();
    let Some(b) = backend(test, &dir.path().join("a.json")) else { return };
    let graphs: Vec<Graph> = [40, 72, 200].map(|n| product(n, 64, 48)).into();
    let r = b.tune_with(&graphs, &TuneOptions { budget: Some(Duration::ZERO), ..quick() }).unwrap();
    assert_eq!((r.tuned.len(), r.left), (0, 3));
    // With any budget, every key is counted once.
    let r =
        b.tune_with(&graphs, &TuneOptions { budget: Some(Duration::from_millis(100)), ..quick() }).unwrap();
    assert_eq!(r.tuned.len() + r.left, 3, "{r:?}");

    let b = builder(&dir.path().join("b.json")).tuning(TuningMode::Budget(Duration::from_secs(900))).build();
    let b = b.unwrap();
    let s = Session::new(&b, graphs[0].clone());
    let exe = s.prepare(&inputs(&graphs[0])).unwrap();
    assert_eq!(b.cache_stats().kernels_tuned, 1);
    // The plan is made after tuning, so it uses the best variant. It has a receipt if that is not the
    // default.
    let e = b.tuning_cache().table();
    let best = e.entries().next().and_then(|e| e.best()).unwrap().clone();
    let step = exe.plan().steps.iter().find_map(|s| s.tunable.as_ref()).unwrap();
    assert!(step.tuned && step.variant == best.variant, "{step:?}");
    let receipt = exe.plan().receipts.iter().any(|r| r.transformation == "tuned kernels");
    assert_eq!(receipt, best.variant != best.default);
}

/// Level O3 tunes all kernels of a plan before its first run, unless a mode is set.
#[test]
fn level_o3_tunes_everything_unless_a_mode_is_set() {
    if backend("level_o3", Path::new("unused.json")).is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let g = product(40, 96, 72);
    // The environment of the tests may set a mode. Such a mode counts as the user's choice.
    let default = std::env::var_os(halcyon::hal::tune::VARIABLE).is_none();
    let (all, cached) = (TuningMode::Exhaustive, TuningMode::Cached);
    for (mode, level, tuned) in [
        (Some(all), Level::O3, 1),
        (Some(cached), Level::O3, 0),
        (None, Level::O3, usize::from(default)),
        (None, Level::O2, 0),
    ] {
        let file = dir.path().join(format!("{mode:?} {level}.json"));
        let b = builder(&file).level(level);
        let b = mode.into_iter().fold(b, |b, m| b.tuning(m)).build().unwrap();
        Session::new(&b, g.clone()).prepare(&inputs(&g)).unwrap();
        assert_eq!(b.cache_stats().kernels_tuned, tuned as u64, "{mode:?} {level}");
        // A handle with another level follows the same rule.
        let o3 = b.with_level(Level::O3).unwrap();
        let expected = mode.unwrap_or(if default { all } else { cached });
        assert_eq!(o3.tuning_mode(), expected, "{mode:?} {level}");
    }
}

/// The variants `names`, most of which are faulty, and one variant of the template.
struct Planted {
    names: &'static [&'static str],
    built: Mutex<Vec<String>>,
}

impl Planted {
    fn new(names: &'static [&'static str]) -> Planted {
        Planted { names, built: Mutex::default() }
    }
}

impl Space for Planted {
    fn variants(&self, t: &Tunable) -> Vec<Variant> {
        let mut all: Vec<Variant> = self.names.iter().map(|n| Variant::new(n, &[])).collect();
        all.push(t.choices.others[0].clone());
        all
    }

    fn build(&self, t: &Tunable, v: &Variant, caps: &Caps) -> Result<Lowered, Declined> {
        self.built.lock().unwrap().push(v.kernel.clone());
        let mut low = Templates.build(
            t,
            if self.names.contains(&&*v.kernel) { &t.choices.default } else { v },
            caps,
        )?;
        match &*v.kernel {
            // Swaps the operands.
            "planted wrong" => low.steps[0].2.swap(0, 1),
            // Only one group writes its part of the result.
            "planted lazy" => low.steps[0].1.groups = [1, 1, 1],
            // Differs from the default's kernel in more than its name: devices cache programs regardless of
            // names.
            "planted refused" => {
                low.steps[0].0.workgroup = [9, 1, 1];
                low.steps[0].0.name = "no name".into();
            }
            "planted large" => low.steps[0].0.workgroup = [1 << 20, 1, 1],
            "planted declined" => return Err(Declined::because("it wants what no device has")),
            "planted slow" => {
                let (k, l, b) = low.steps.remove(0);
                low.steps = (0..400).map(|_| (k.clone(), l.clone(), b.clone())).collect();
            }
            "planted crash" => std::process::abort(),
            _ => {}
        }
        Ok(low)
    }
}

#[test]
fn what_is_wrong_or_fails_is_quarantined_with_the_reason() {
    let test = "what_is_wrong_or_fails_is_quarantined_with_the_reason";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let Some(b) = backend(test, &file) else { return };
    let space = Planted::new(&[
        "planted wrong",
        "planted lazy",
        "planted refused",
        "planted large",
        "planted declined",
        "planted slow",
        "planted right",
    ]);
    let g = product(64, 64, 64);
    let r = b.tune_with(std::slice::from_ref(&g), &TuneOptions { space: &space, ..quick() }).unwrap();
    let [k] = &r.tuned[..] else { panic!("{r:?}") };
    let why = |n: &str| k.rejected.iter().find(|r| r.variant.kernel == n).map(|r| (r.why, r.detail.clone()));
    for (name, reason, part) in [
        ("planted wrong", RejectReason::Wrong, "differ from the default's"),
        ("planted lazy", RejectReason::Wrong, "instead of"),
        ("planted refused", RejectReason::DoesNotCompile, "not a C identifier"),
        ("planted large", RejectReason::DoesNotFit, "1048576 work-items"),
        ("planted declined", RejectReason::DoesNotFit, "no device has"),
        ("planted slow", RejectReason::TooSlow, "a run of the default"),
    ] {
        let (why, detail) = why(name).unwrap_or_else(|| panic!("{name} is not rejected: {k:?}"));
        println!("{name}: {why}: {detail}");
        assert!(why == reason && detail.contains(part), "{name}: {why}: {detail}");
    }
    assert!(why("planted right").is_none(), "{k:?}");
    // The template's own variants may be slow on this machine.
    assert!(
        k.rejected.iter().all(|r| r.variant.kernel.starts_with("planted") || r.why == RejectReason::TooSlow)
    );
    assert_eq!(k.best.tried, 9);

    // The file records the rejected variants. Another process does not try them again, even if it has to tune
    // again.
    let there = Table::read(&file).unwrap().unwrap();
    assert_eq!(there.get(b.tuning_device(), &k.key).unwrap().rejected, k.rejected);
    let other = dir.path().join("other.json");
    let c = TuningCache::at(&other);
    c.add(&Entry { rejected: k.rejected.clone(), ..Entry::new(b.tuning_device(), &k.key) });
    c.save().unwrap();
    space.built.lock().unwrap().clear();
    let fresh = builder(&other).build().unwrap();
    let r = fresh.tune_with(std::slice::from_ref(&g), &TuneOptions { space: &space, ..quick() }).unwrap();
    let mut built = space.built.lock().unwrap().clone();
    built.retain(|n| n.starts_with("planted"));
    assert_eq!((built, r.tuned.len()), (vec!["planted right".to_string()], 1));
    // A planted variant is not one of the template's, so plans do not use it.
    assert!(plan_of(&fresh, &g)[0].variant.kernel != "planted right");
}

/// The command that runs the test `as_a_child` of this file in a separate process.
fn child(job: &str, file: &Path) -> Command {
    let mut c = Command::new(std::env::current_exe().unwrap());
    c.args(["as_a_child", "--exact", "--nocapture"])
        .env("HALCYON_TUNE_JOB", job)
        .env("HALCYON_TUNE_FILE", file);
    c
}

fn text(o: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
}

#[test]
fn as_a_child() {
    let (Ok(job), Ok(file)) = (std::env::var("HALCYON_TUNE_JOB"), std::env::var("HALCYON_TUNE_FILE")) else {
        return;
    };
    let b = builder(Path::new(&file)).build().unwrap();
    let crash = Planted::new(&["planted crash"]);
    let (graphs, options) = match &*job {
        "crash" => (vec![product(64, 64, 64)], TuneOptions { space: &crash, ..quick() }),
        n => {
            let n: usize = n.parse().unwrap();
            (vec![product(64, 64, 64), product(n, 32, 64)], quick())
        }
    };
    let r = b.tune_with(&graphs, &options).unwrap();
    println!("\ntuned {} recovered {}", r.tuned.len(), r.recovered.len());
}

#[test]
fn a_candidate_that_ends_the_process_is_quarantined_at_the_next_start() {
    let test = "a_candidate_that_ends_the_process_is_quarantined_at_the_next_start";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let Some(b) = backend(test, &file) else { return };
    let o = child("crash", &file).output().unwrap();
    assert!(!o.status.success(), "{}", text(&o));
    // In a second process, the candidate is quarantined, and not tried.
    let o = child("crash", &file).output().unwrap();
    assert!(o.status.success() && text(&o).contains("tuned 1 recovered 1"), "{}", text(&o));
    let there = Table::read(&file).unwrap().unwrap();
    let all: Vec<&Rejection> = there.entries().flat_map(|e| &e.rejected).collect();
    let [r] = all[..] else { panic!("{all:?}") };
    assert_eq!((&*r.variant.kernel, r.why), ("planted crash", RejectReason::Crashed));
    assert!(there.entries().all(|e| e.device == b.tuning_device() && e.best().is_some()));
}

#[test]
fn two_processes_tune_at_once() {
    let test = "two_processes_tune_at_once";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let Some(b) = backend(test, &file) else { return };
    let both: Vec<_> = ["24", "72"]
        .map(|n| child(n, &file).stdout(std::process::Stdio::piped()).spawn().unwrap())
        .into_iter()
        .map(|c| c.wait_with_output().unwrap())
        .collect();
    for o in &both {
        assert!(o.status.success() && text(o).contains("recovered 0"), "{}", text(o));
    }
    // The cache has the results of both processes: the product that they share, and one more product of each.
    let there = Table::read(&file).unwrap().unwrap();
    assert_eq!(there.entries().filter(|e| e.best().is_some()).count(), 3);
    let graphs = [product(64, 64, 64), product(24, 32, 64), product(72, 32, 64)];
    assert_eq!(b.tune_with(&graphs, &quick()).unwrap().known, 3);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().map(|f| f.file_name()).collect();
    assert_eq!(left.len(), 2, "the cache and its lock: {left:?}");
}

#[test]
fn a_cache_that_cannot_be_used_is_an_error_when_asked_and_a_warning_otherwise() {
    let test = "a_cache_that_cannot_be_used_is_an_error_when_asked_and_a_warning_otherwise";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("folder/tuning.json");
    let blocked = dir.path().join("folder");
    let block = || {
        std::fs::remove_dir_all(&blocked).unwrap();
        std::fs::write(&blocked, b"").unwrap();
    };
    std::fs::create_dir(&blocked).unwrap();
    let Some(b) = backend(test, &file) else { return };
    block();
    let g = product(40, 40, 40);
    // Naming an unusable file is an error.
    assert!(matches!(builder(&file).build().unwrap_err(), Error::Io { .. }));
    let e = b.tune_with(std::slice::from_ref(&g), &quick()).unwrap_err();
    assert!(matches!(e, Error::Io { .. }), "{e}");
    assert_eq!(b.cache_stats().candidates_tried, 0, "nothing is measured if it cannot be saved");
    // In background tuning, an unusable file only causes a warning.
    std::fs::remove_file(&blocked).unwrap();
    std::fs::create_dir(&blocked).unwrap();
    let b = builder(&file).enable_autotuning(true).build().unwrap();
    block();
    Session::new(&b, g.clone()).run(&inputs(&g)).unwrap();
    assert!(b.wait_for_tuning(Duration::from_secs(900)));
    // A damaged file is treated as empty, and renamed.
    let damaged = dir.path().join("damaged.json");
    std::fs::write(&damaged, b"{\"format\": 1, \"entr").unwrap();
    let b = builder(&damaged).build().unwrap();
    let r = b.tune_with(std::slice::from_ref(&g), &quick()).unwrap();
    assert_eq!(r.tuned.len(), 1);
    assert!(dir.path().join("damaged.json.bad").exists() && Table::read(&damaged).unwrap().is_some());
}

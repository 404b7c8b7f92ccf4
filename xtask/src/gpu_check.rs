//! `cargo xtask gpu-check`: builds the binary and the data that are copied to a machine with an accelerator,
//! and rehearses the check here, on stand-ins for the vendors' libraries and on the CPU. See
//! `docs/gpu-check.md`.

use crate::prerequisites;
use crate::report::{Counts, Outcome, run};
use crate::{Failure, testdata};
use halcyon_test_host::standin;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum size of binary and data together, in bytes.
const MAX_SIZE: u64 = 63 << 20;
/// Number of parts of the suite. Each part runs in its own process, so a crash loses only the cases of its
/// part.
const PARTS: usize = 24;

/// Folders of the generated data, and their names in the data file.
const GENERATED: &[(&str, &str)] =
    &[("models/light", "light"), ("models/shapes", "shapes"), ("mlp", "mlp"), ("seeded", "seeded")];
/// Files of the models beside the repository.
const MODELS: &[(&str, &[&str])] = &[
    ("stories260k", &["model.safetensors", "config.json", "expected.json"]),
    ("mnist", &["mnist.onnx", "expected.json", "digit-*.npy"]),
];

/// The backends of the rehearsal. For each one: the environment variables that name its libraries, and the
/// stand-in that all of them name.
const REHEARSED: &[(&str, &[&str], &str)] = &[
    (
        "cuda",
        &[
            "HALCYON_CUDA_LIBRARY",
            "HALCYON_NVRTC_LIBRARY",
            "HALCYON_CUBLASLT_LIBRARY",
            "HALCYON_CUDNN_LIBRARY",
        ],
        "standin-cuda.so",
    ),
    (
        "rocm",
        &[
            "HALCYON_HIP_LIBRARY",
            "HALCYON_HIPRTC_LIBRARY",
            "HALCYON_HIPBLASLT_LIBRARY",
            "HALCYON_ROCBLAS_LIBRARY",
        ],
        "standin-hip.so",
    ),
    ("cpu", &[], ""),
];

pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    let (mut out, mut rehearse) = (crate::target_dir().join("gpu-check"), false);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--rehearse" => rehearse = true,
            "--out" => match args.next() {
                Some(dir) => out = PathBuf::from(dir),
                None => return Err(Failure::Usage("--out needs a folder".into())),
            },
            other => return Err(Failure::Usage(format!("`gpu-check` has no option `{other}`"))),
        }
    }
    println!("{}", pack(&out)?);
    if !rehearse {
        return Ok(true);
    }
    match rehearsal(&out) {
        Outcome::Tests(c, why) => {
            println!("{} passed, {} failed, {} skipped {why}", c.passed, c.failed, c.skipped);
            Ok(c.failed == 0)
        }
        Outcome::Passed(note) | Outcome::Skipped(note) => {
            println!("{note}");
            Ok(true)
        }
        Outcome::Failed(why) => Err(Failure::Other(why)),
    }
}

/// The step of `cargo xtask test`.
pub(crate) fn step() -> Outcome {
    let out = crate::target_dir().join("gpu-check");
    match pack(&out) {
        Ok(what) => {
            println!("    {what}");
            rehearsal(&out)
        }
        Err(why) => Outcome::Failed(why),
    }
}

fn binary(dir: &Path) -> PathBuf {
    dir.join(if cfg!(windows) { "halcyon-check.exe" } else { "halcyon-check" })
}

/// Builds the binary, collects the data, and writes both to a folder.
fn pack(out: &Path) -> Result<String, String> {
    let at = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    std::fs::create_dir_all(out).map_err(|e| at(out, e))?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Use the settings of the tests' other release builds, so that the crates compiled there are reused.
    cargo.current_dir(crate::root()).env("CARGO_INCREMENTAL", "0");
    cargo.args(["build", "--release", "-p", "halcyon-check"]);
    if let Some(commit) = commit() {
        cargo.env("HALCYON_COMMIT", commit);
    }
    run(&mut cargo)?;
    let made = binary(&crate::target_dir().join("release"));
    std::fs::copy(&made, binary(out)).map_err(|e| at(&made, e))?;

    let files = gather()?;
    let list = out.join("halcyon-check.list");
    let text: String = files.iter().map(|(name, path)| format!("{name}\t{}\n", path.display())).collect();
    std::fs::write(&list, text).map_err(|e| at(&list, e))?;
    let data = out.join("halcyon-check.dat");
    run(Command::new(binary(out)).arg("__pack").args([&list, &data]))?;
    // The list contains file names of this machine.
    std::fs::remove_file(&list).map_err(|e| at(&list, e))?;

    let size = |path: &Path| std::fs::metadata(path).map(|m| m.len()).map_err(|e| at(path, e));
    let (code, content) = (size(&binary(out))?, size(&data)?);
    let mib = |n: u64| format!("{:.1} MiB", n as f64 / (1 << 20) as f64);
    let text = format!(
        "{} {} and {} {} ({} files); copy both to the machine, then run the first",
        binary(out).display(),
        mib(code),
        data.display(),
        mib(content),
        files.len()
    );
    if code + content > MAX_SIZE {
        Err(format!("{text}: together more than {}", mib(MAX_SIZE)))
    } else {
        Ok(text)
    }
}

fn commit() -> Option<String> {
    let out = Command::new("git")
        .current_dir(crate::root())
        .args(["rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()?;
    let text = String::from_utf8(out.stdout).ok()?.trim().to_string();
    (out.status.success() && !text.is_empty()).then_some(text)
}

/// The contents of the data file: names and source files.
fn gather() -> Result<Vec<(String, PathBuf)>, String> {
    let generated = std::env::var_os("HALCYON_TESTDATA").map_or_else(testdata::dir, PathBuf::from);
    let mut files = vec![];
    for (folder, name) in GENERATED {
        let dir = generated.join(folder);
        if !dir.is_dir() {
            return Err(format!(
                "{} is not there; `cargo xtask test --only install-python --only python --only testdata` makes it",
                dir.display()
            ));
        }
        below(&dir, name, &mut files)?;
    }
    let mut cases = vec![];
    find_cases(&generated.join("suite"), "", &mut cases)?;
    cases.sort();
    for (i, (name, dir)) in cases.iter().enumerate() {
        below(dir, &format!("suite/{:02}{name}", i % PARTS), &mut files)?;
    }
    files.push(("digits.npz".into(), crate::root().join("models/digits.npz")));
    for (folder, wanted) in MODELS {
        let mut all = vec![];
        if testdata::models().join(folder).is_dir() {
            below(&testdata::models().join(folder), folder, &mut all)?;
        }
        let fits = |name: &str| {
            let name = name.rsplit('/').next().unwrap_or(name);
            wanted.iter().any(|w| match w.split_once('*') {
                Some((start, end)) => name.starts_with(start) && name.ends_with(end),
                None => name == *w,
            })
        };
        files.extend(all.into_iter().filter(|(name, _)| fits(name)));
    }
    Ok(files)
}

/// The files below a folder, sorted by name.
fn below(dir: &Path, name: &str, out: &mut Vec<(String, PathBuf)>) -> Result<(), String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    for path in paths {
        let name = format!("{name}/{}", path.file_name().unwrap_or_default().to_string_lossy());
        match path.is_dir() {
            true => below(&path, &name, out)?,
            false => out.push((name, path)),
        }
    }
    Ok(())
}

/// Folders that contain a model.
fn find_cases(dir: &Path, name: &str, out: &mut Vec<(String, PathBuf)>) -> Result<(), String> {
    if dir.join("model.onnx").is_file() {
        out.push((name.into(), dir.into()));
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?.flatten() {
        if entry.path().is_dir() {
            find_cases(&entry.path(), &format!("{name}/{}", entry.file_name().to_string_lossy()), out)?;
        }
    }
    Ok(())
}

/// Runs the packed check on the stand-ins and on the CPU, in parallel. Each section must have run and
/// reported something.
fn rehearsal(dir: &Path) -> Outcome {
    let cxx = cfg!(unix) && prerequisites::is_installed("install-cxx");
    let ran: Vec<(&str, Result<Counts, String>)> = std::thread::scope(|s| {
        let one = |(backend, variables, library): &'static (
            &'static str,
            &'static [&'static str],
            &'static str,
        )| {
            s.spawn(move || match library.is_empty() || cxx {
                true => (*backend, rehearse(dir, backend, variables, library)),
                false => (*backend, Ok(Counts { skipped: 1, ..Counts::default() })),
            })
        };
        let all: Vec<_> = REHEARSED.iter().map(one).collect();
        let panicked = |_| ("?", Err("the rehearsal's thread panicked".to_string()));
        all.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
    });
    let (mut counts, mut bad) = (Counts::default(), vec![]);
    for (backend, result) in ran {
        match result {
            Ok(c) => {
                println!(
                    "    {backend}: {} sections passed, {} failed, {} skipped",
                    c.passed, c.failed, c.skipped
                );
                if c.failed > 0 {
                    bad.push(format!(
                        "{backend}: see {}",
                        dir.join(format!("rehearsal-{backend}")).display()
                    ));
                }
                counts.add(c);
            }
            Err(why) => {
                counts.failed += 1;
                bad.push(format!("{backend}: {why}"));
            }
        }
    }
    Outcome::Tests(counts, bad.join("; "))
}

fn rehearse(dir: &Path, backend: &str, variables: &[&str], library: &str) -> Result<Counts, String> {
    let reports = dir.join(format!("rehearsal-{backend}"));
    // Remove old reports, which would be read instead of new ones.
    let _ = std::fs::remove_dir_all(&reports);
    let mut command = Command::new(binary(dir));
    command.args(["--rehearsal", "--backend", backend, "--minutes", "9", "--out"]).arg(&reports);
    if !library.is_empty() {
        stand_in(dir, library)?;
        command.arg("--no-torch").envs(variables.iter().map(|v| (v, dir.join(library))));
    }
    let out = command.output().map_err(|e| format!("{}: {e}", binary(dir).display()))?;
    let counts = check_reports(&binary(dir), &reports, testdata::models().is_dir())?;
    match out.status.code() {
        Some(0) => Ok(counts),
        // Some data was missing. The sections that need it are already counted as skipped.
        Some(3) if counts.skipped > 0 => Ok(counts),
        _ if counts.failed > 0 => Ok(counts),
        _ => Err(format!("{}: {}", out.status, String::from_utf8_lossy(&out.stderr))),
    }
}

/// Counts each section as one test. If `models` is set, the sections that need the models beside the
/// repository must have run.
fn check_reports(binary: &Path, reports: &Path, models: bool) -> Result<Counts, String> {
    let out =
        Command::new(binary).arg("--list").output().map_err(|e| format!("{}: {e}", binary.display()))?;
    let names = String::from_utf8_lossy(&out.stdout).into_owned();
    let names: Vec<&str> = names.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let files = std::fs::read_dir(reports).map_err(|e| format!("{}: {e}", reports.display()))?;
    let report = files
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "json"))
        .ok_or("no report was written")?;
    let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
    let v: Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", report.display()))?;
    if v["rehearsal"] != true || names.is_empty() {
        return Err(format!("{} is not a report of a rehearsal", report.display()));
    }
    let mut counts = Counts::default();
    for name in names {
        let Some(s) = v["sections"].as_array().into_iter().flatten().find(|s| s["section"] == name) else {
            println!("    {name}: it is not in the report");
            counts.failed += 1;
            continue;
        };
        let told = s["passed"].as_u64().unwrap_or(0) + s["figures"].as_array().map_or(0, |f| f.len() as u64);
        match s["skipped"].as_str() {
            Some(why) if !models && why.starts_with("the data folder has no") => counts.skipped += 1,
            None if s["verdict"] == "ok" && told > 0 => counts.passed += 1,
            _ => {
                println!("    {name}: {s}");
                counts.failed += 1;
            }
        }
    }
    Ok(counts)
}

/// Builds the stand-in for a vendor's library.
fn stand_in(dir: &Path, library: &str) -> Result<(), String> {
    let flags: &[&str] = if library.contains("hip") { &["-DSTANDIN_HIP"] } else { &[] };
    standin::compile(&dir.join(library), flags)
}

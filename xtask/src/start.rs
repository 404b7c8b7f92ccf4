//! `cargo xtask bench start`: measures the time of short runs of the command, from the start of the process
//! to its end.
//!
//! Each run is a separate process of the release build: `halcyon --version`, `halcyon devices --json` with
//! remembered probe results, and `halcyon run MODEL --input random --backend cpu`. A cold run packs the
//! weights. A warm run reads packed weights from the disk cache, which an earlier run filled. In both, the
//! model's file is in the system's file cache. The commands take turns, and the report contains the median of
//! each.

use crate::Failure;
use crate::report::run;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const ROUNDS: usize = 9;

/// A command, the source of its packed weights, and its maximum time in seconds.
struct Kind {
    name: &'static str,
    args: Vec<OsString>,
    /// Value of HALCYON_CACHE: `programs` packs in the run, `packed` reads what an earlier run packed.
    cache: &'static str,
    bound: f64,
}

/// The file of ResNet-50: the file that `HALCYON_RESNET50` names, the model of `cargo xtask bench peers`, or
/// the model of the test data.
fn resnet() -> Option<PathBuf> {
    let of = |path: &str| crate::target_dir().join(path);
    let own = std::env::var_os("HALCYON_RESNET50").map(PathBuf::from);
    own.into_iter()
        .chain([of("peer-models/resnet50.onnx"), of("testdata/models/random/light_resnet50/model.onnx")])
        .find(|p| p.is_file())
}

fn mnist() -> PathBuf {
    let own = std::env::var_os("HALCYON_MNIST").map(|d| PathBuf::from(d).join("mnist.onnx"));
    own.filter(|p| p.is_file()).unwrap_or_else(|| crate::root().join("models/digits.onnx"))
}

fn median(times: &[f64]) -> f64 {
    let mut t = times.to_vec();
    t.sort_by(f64::total_cmp);
    t[t.len() / 2]
}

/// The arguments of a command as text.
fn command_line(args: &[OsString]) -> String {
    args.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Wall time in seconds of one process.
fn once(binary: &Path, kind: &Kind, cache: &Path) -> Result<f64, String> {
    let mut c = Command::new(binary);
    c.args(&kind.args);
    c.env("HALCYON_CACHE", kind.cache).env("XDG_CACHE_HOME", cache).env("LOCALAPPDATA", cache);
    c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let start = Instant::now();
    let status = c.status().map_err(|e| format!("{}: {e}", binary.display()))?;
    let took = start.elapsed().as_secs_f64();
    if status.success() { Ok(took) } else { Err(format!("{}: {status}", kind.name)) }
}

pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    let (mut rounds, mut as_json) = (ROUNDS, false);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--json" => as_json = true,
            "--rounds" => {
                let n = args.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
                rounds = n.ok_or_else(|| Failure::Usage("--rounds needs a number above 0".into()))?;
            }
            other => return Err(Failure::Usage(format!("`bench start` has no option `{other}`"))),
        }
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(Command::new(cargo).current_dir(crate::root()).args(["build", "--release", "-p", "halcyon-cli"]))?;
    let binary =
        crate::target_dir().join("release").join(if cfg!(windows) { "halcyon.exe" } else { "halcyon" });
    let plain = |name, args: &[&str], bound| {
        let args = args.iter().map(OsString::from).collect();
        Kind { name, args, cache: "programs", bound }
    };
    let of = |name, model: PathBuf, cache, bound| {
        let mut args: Vec<OsString> = vec!["run".into(), model.into()];
        args.extend(["--input", "random", "--backend", "cpu"].map(OsString::from));
        Kind { name, args, cache, bound }
    };
    let mut kinds = vec![
        plain("--version", &["--version"], 0.020),
        plain("devices", &["devices", "--json"], 0.300),
        of("mnist", mnist(), "programs", 0.040),
    ];
    match resnet() {
        Some(model) => {
            kinds.push(of("ResNet-50, cold", model.clone(), "programs", 0.250));
            kinds.push(of("ResNet-50, warm cache", model, "packed", 0.150));
        }
        None => {
            eprintln!(
                "ResNet-50 is not measured, because its file is missing; `cargo xtask bench peers --only model` makes it"
            )
        }
    }
    let cache = crate::target_dir().join("start-cache");
    // Remove files that another version may have left.
    let _ = std::fs::remove_dir_all(&cache);
    let mut times = vec![vec![]; kinds.len()];
    for round in 0..=rounds {
        for (kind, times) in kinds.iter().zip(&mut times) {
            let t = once(&binary, kind, &cache)?;
            // The first round fills the caches.
            if round > 0 {
                times.push(t);
            }
        }
    }
    let _ = std::fs::remove_dir_all(&cache);
    let rows: Vec<Value> = kinds
        .iter()
        .zip(&times)
        .map(|(k, t)| {
            let least = t.iter().copied().fold(f64::INFINITY, f64::min);
            let most = t.iter().copied().fold(0.0, f64::max);
            json!({
                "name": k.name, "command": command_line(&k.args), "median_ms": median(t) * 1e3, "min_ms": least * 1e3,
                "max_ms": most * 1e3, "bound_ms": k.bound * 1e3, "runs": t.len(),
            })
        })
        .collect();
    if as_json {
        println!("{:#}", json!({ "report": "bench start", "rows": rows }));
    } else {
        println!(
            "{:<24}{:>10}{:>10}{:>10}{:>10}",
            "process start to answer", "median", "min", "max", "bound"
        );
        for r in &rows {
            let ms = |k: &str| format!("{:.1} ms", r[k].as_f64().unwrap_or(f64::NAN));
            let [a, b, c, d] = ["median_ms", "min_ms", "max_ms", "bound_ms"].map(ms);
            println!("{:<24}{a:>10}{b:>10}{c:>10}{d:>10}", r["name"].as_str().unwrap_or_default());
        }
    }
    Ok(kinds.iter().zip(&times).all(|(k, t)| median(t) < k.bound))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_middle_one_counts() {
        assert_eq!(super::median(&[3.0, 1.0, 2.0]), 2.0);
    }
}

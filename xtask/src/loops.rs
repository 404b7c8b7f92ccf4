//! `cargo xtask bench loops`: compares loops of ONNX models with onnxruntime, interleaved in one run by the
//! protocol of `bench peers`. It also measures the peak memory of `halcyon run` for increasing numbers of
//! iterations.

use crate::Failure;
use crate::bench::{Side, Work, build, interleave, median};
use crate::prerequisites::{Requirements, Venv};
use crate::report::run;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Names of models that `loop_models.py` makes.
const ITEMS: &[&str] = &[
    "count_4x4",
    "count_16x16",
    "count_64x64",
    "count_1x64",
    "data_1x64",
    "rows_1x64",
    "trips_1x64",
    "trips_16x16",
    "long_1x64",
    "long_16x16",
    "longtrips_16x16",
];
/// One model with 1,000, 10,000 and 100,000 iterations.
const MEMORY: &[&str] = &["count_1x64_1000", "count_1x64", "count_1x64_100000"];

pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    let (mut rounds, mut threads) = (9usize, std::thread::available_parallelism().map_or(1, usize::from));
    let mut args = args.iter();
    while let Some(flag) = args.next() {
        let value = || Failure::Usage(format!("{flag} needs a number above 0"));
        let n = || args.clone().next().and_then(|n| n.parse().ok()).filter(|n| *n > 0).ok_or_else(value);
        match *flag {
            "--rounds" => rounds = n()?,
            "--threads" => threads = n()?,
            other => return Err(Failure::Usage(format!("`bench loops` has no option `{other}`"))),
        }
        args.next();
    }
    let venv = Venv::new("venv-peers");
    let requirements = [Requirements { file: "requirements-peers.txt", flags: &[] }];
    println!("peers' environment: {}", venv.prepare(&requirements)?);
    build()?;
    let models = crate::target_dir().join("loop-models");
    run(Command::new(venv.python()).arg(crate::root().join("xtask/scripts/loop_models.py")).arg(&models))?;

    let release = crate::target_dir().join("release");
    let exe = std::env::consts::EXE_SUFFIX;
    let count = threads.to_string();
    let mut ours = Command::new(release.join("examples").join(format!("bench_server{exe}")));
    ours.args(["--serve", "--threads", &count]).env("HALCYON_PEER_MODELS", &models);
    let mut peer = Command::new(venv.python());
    peer.arg(crate::root().join("xtask/scripts/peers.py"));
    peer.args(["--engine", "onnxruntime", "--threads", &count]).env("HALCYON_PEER_MODELS", &models);
    let mut sides = vec![Side::spawn(ours, None)?, Side::spawn(peer, None)?];
    println!("{threads} threads, {rounds} rounds, interleaved: {} | {}", sides[0].name, sides[1].name);

    let mut rows = vec![];
    for item in ITEMS {
        let times = interleave(&mut sides, &format!("model.loop_{item}.1"), Work::Run, rounds)?;
        let ratios = times[0].iter().zip(&times[1]).map(|(a, b)| a / b).collect();
        let middle =
            |v: Vec<f64>| median(v).ok_or_else(|| format!("Halcyon or onnxruntime does not run {item}"));
        let ratio = middle(ratios)?;
        let (a, b) = (middle(times[0].clone())?, middle(times[1].clone())?);
        println!("{item:<18}{:>10.2} ms{:>10.2} ms{ratio:>8.2}x", a * 1e3, b * 1e3);
        rows.push(json!({"name": item, "ours_ms": a * 1e3, "onnxruntime_ms": b * 1e3, "ratio": ratio}));
    }
    drop(sides);
    let mut memory = vec![];
    for item in MEMORY {
        let peak = peak(&release.join(format!("halcyon{exe}")), &models.join(format!("loop_{item}.onnx")))?;
        println!("{item:<18}{:>10.1} MiB at most", peak as f64 / (1 << 20) as f64);
        memory.push(json!({"name": item, "peak_bytes": peak}));
    }
    let record = json!({"threads": threads, "rounds": rounds, "items": rows, "memory": memory});
    let path = crate::target_dir().join("bench-loops.json");
    std::fs::write(&path, format!("{record:#}\n")).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("written to {}", path.display());
    Ok(true)
}

/// Peak memory in bytes of a process that runs the model once.
fn peak(binary: &Path, model: &Path) -> Result<u64, String> {
    let out = Command::new(binary)
        .arg("run")
        .arg(model)
        .args(["--input", "ones", "--backend", "cpu", "--json"])
        .output()
        .map_err(|e| format!("{}: {e}", binary.display()))?;
    let v: Value = serde_json::from_slice(&out.stdout).map_err(|e| format!("{}: {e}", model.display()))?;
    let bytes = v["memory"]["process_peak_bytes"].as_u64();
    bytes.ok_or_else(|| format!("{} reports no `process_peak_bytes`: {v}", binary.display()))
}

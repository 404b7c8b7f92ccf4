//! `cargo xtask bench peers`: measures Halcyon against its peers, interleaved in one run.
//!
//! # Protocol
//! Each side is a child process. It reads requests from its standard input and writes each answer to its
//! standard output, as one line of JSON.
//! - Ours: `target/release/examples/bench_server --serve --threads N` (an example of the `halcyon` package).
//! - Peers: `python xtask/scripts/peers.py --engine E --threads N`.
//!
//! 1. The child starts by printing its name and version, `{"name": "onnxruntime 1.31.1"}`.
//! 2. The parent writes an item's name and a newline. If the item differs from the previous one, the child
//!    first prepares it, which is not timed: it frees the previous item, generates data from a normal
//!    distribution, packs, compiles, and does two warm-up runs. Then it runs the item repeatedly for 30 ms,
//!    at least once, and answers `{"seconds": S}`, the mean wall time per run. Memory is kept between runs.
//! 3. For an item that it does not have, the child answers `{"unsupported": "reason"}`.
//! 4. The child exits when its input ends.
//!
//! Items use float32 unless stated otherwise:
//! - `gemm.N`: `C = A B`, all N x N. B is a weight and may be packed beforehand; A may not.
//! - `gemm16.N`, `gemv16.RxC`: as `gemm.N` and `gemv.RxC`, with factors and result in bfloat16, and sums in
//!   float32.
//! - `igemm.N`: as `gemm.N`, with unsigned or signed bytes in A, signed bytes in B, and a result of 32-bit
//!   integers.
//! - `gemv.RxC`: `y = A x` with A of R x C.
//! - `chain.RxC`: `y = silu(x) * w + b` with x of R x C, and w and b of length C broadcast over rows.
//! - `softmax.RxC`, `layernorm.RxC`: softmax and layer norm of each row of an R x C matrix. The layer norm
//!   has a scale and a shift.
//! - `silu.N`: SiLU of N values.
//! - `attention.HxLxD`, `causal.HxLxD`: softmax(Q K^T / sqrt(D)) V for H heads of size D with L queries and L
//!   keys; the second with a causal mask.
//! - `model.NAME.SIZES`: a model of `xtask/scripts/peer_models.py` with these sizes as the values of its
//!   symbols.
//! - `model16.NAME.SIZES`: as `model.NAME.SIZES`, with products and convolutions allowed in bfloat16 (mixed
//!   precision).
//! - `train.NAME`, `train16.NAME`: one training step with AdamW, batch upload and loss included: `mlp`
//!   (784-512-512-10, batch 128), `cnn` (two convolutions and two linear layers on images of 28x28, batch
//!   64), `gpt` (6 layers, 384 wide, context 256, batch 16). `train16` allows products and convolutions in
//!   bfloat16. Ours is the example `bench_train` of `halcyon-nn`. Each of these items has processes of its
//!   own, whose peak memory is reported (`"peak_memory"`, bytes).
//! - `peak.fma`, `peak.bf16`, `peak.int8`, `peak.read`, `peak.copy`: the machine's peaks with N threads.
//!   These are multiply-adds in registers of float32, bfloat16 and 8-bit integers (work in operations, two
//!   per multiply-add), reads of memory far larger than the caches (bytes), and copies of such memory (bytes
//!   read plus written). The answers also contain `"work": W`, the amount of work done in `seconds`.
//!
//! `start` is not a request: the parent starts a process that classifies one image and exits, and measures
//! the wall time. Halcyon's process is `halcyon run MODEL --input FILE --threads N`. The environment variable
//! `HALCYON_MNIST` can name a folder with the model, `mnist.onnx`, and the image, `digit-7.npy`. Without it,
//! the model is `models/digits.onnx`.
//!
//! The sides take turns within each round, in a rotating order. A pause keeps one side's spinning threads
//! from disturbing the next side. The report contains, for each side, the median time, the rate relative to
//! the best peak that any side reached, and how many times as fast Halcyon is (the median over the
//! rounds). A run over all items writes these figures into `docs/performance.md`, between the markers that
//! `performance.rs` describes, unless `--no-write` is given. torch takes part if it can be imported; `--with
//! torch` installs it.

use crate::Failure;
use crate::prerequisites::{Requirements, Venv};
use crate::report::run;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable that gives both sides the folder of the models.
const MODELS: &str = "HALCYON_PEER_MODELS";
const PAUSE: Duration = Duration::from_millis(60);

/// The unit of an item's work, which determines the peak it is compared with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Work {
    /// Floating-point operations, compared with `peak.fma`.
    Flops(f64),
    /// Floating-point operations with bfloat16 factors, compared with `peak.bf16`.
    Bf16(f64),
    /// Operations on bytes, compared with `peak.int8`.
    Int8(f64),
    /// Bytes read, compared with `peak.read`.
    Read(f64),
    /// Bytes read and written, compared with `peak.copy`.
    Copy(f64),
    /// Wall time only.
    Run,
    /// Wall time of a training step, and the peak memory of its process.
    Training,
    /// Wall time of a separate process.
    Start,
}

const ITEMS: &[(&str, Work)] = &[
    ("gemm.512", Work::Flops(2.0 * 512.0 * 512.0 * 512.0)),
    ("gemm.1024", Work::Flops(2.0 * 1024.0 * 1024.0 * 1024.0)),
    ("gemm.2048", Work::Flops(2.0 * 2048.0 * 2048.0 * 2048.0)),
    ("gemm.4096", Work::Flops(2.0 * 4096.0 * 4096.0 * 4096.0)),
    ("gemm16.1024", Work::Bf16(2.0 * 1024.0 * 1024.0 * 1024.0)),
    ("gemm16.2048", Work::Bf16(2.0 * 2048.0 * 2048.0 * 2048.0)),
    ("igemm.1024", Work::Int8(2.0 * 1024.0 * 1024.0 * 1024.0)),
    ("igemm.2048", Work::Int8(2.0 * 2048.0 * 2048.0 * 2048.0)),
    ("gemv.4096x4096", Work::Read(4.0 * 4096.0 * 4096.0)),
    ("gemv.14336x4096", Work::Read(4.0 * 14336.0 * 4096.0)),
    ("gemv16.4096x4096", Work::Read(2.0 * 4096.0 * 4096.0)),
    ("chain.4096x4096", Work::Copy(8.0 * 4096.0 * 4096.0)),
    ("softmax.4096x4096", Work::Copy(8.0 * 4096.0 * 4096.0)),
    ("layernorm.4096x4096", Work::Copy(8.0 * 4096.0 * 4096.0)),
    ("silu.16777216", Work::Copy(8.0 * 16777216.0)),
    ("attention.32x1024x128", Work::Flops(32.0 * 1024.0 * 1024.0 * 4.0 * 128.0)),
    ("causal.32x1024x128", Work::Flops(32.0 * 1024.0 * 1025.0 / 2.0 * 4.0 * 128.0)),
    ("model.resnet50.1", Work::Run),
    ("model.resnet50.8", Work::Run),
    ("model.minilm.1x128", Work::Run),
    ("model.minilm.32x128", Work::Run),
    ("model16.resnet50.1", Work::Run),
    ("model16.resnet50.8", Work::Run),
    ("model16.minilm.1x128", Work::Run),
    ("model16.minilm.32x128", Work::Run),
    ("train.mlp", Work::Training),
    ("train.cnn", Work::Training),
    ("train.gpt", Work::Training),
    ("train16.mlp", Work::Training),
    ("train16.cnn", Work::Training),
    ("train16.gpt", Work::Training),
    ("start", Work::Start),
];

impl Work {
    fn peak(self) -> Option<&'static str> {
        match self {
            Work::Flops(_) => Some("peak.fma"),
            Work::Bf16(_) => Some("peak.bf16"),
            Work::Int8(_) => Some("peak.int8"),
            Work::Read(_) => Some("peak.read"),
            Work::Copy(_) => Some("peak.copy"),
            Work::Run | Work::Training | Work::Start => None,
        }
    }

    /// Giga-operations or gigabytes per second.
    fn rate(self, seconds: f64) -> Option<f64> {
        match self {
            Work::Flops(n) | Work::Bf16(n) | Work::Int8(n) | Work::Read(n) | Work::Copy(n) => {
                Some(n / seconds / 1e9)
            }
            Work::Run | Work::Training | Work::Start => None,
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Work::Flops(_) | Work::Bf16(_) => "GFLOP/s",
            Work::Int8(_) => "GOP/s",
            Work::Read(_) | Work::Copy(_) => "GB/s",
            Work::Run | Work::Training | Work::Start => "",
        }
    }
}

/// One side of the comparison.
pub(crate) struct Side {
    pub(crate) name: String,
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// Command of the process for `start`; None if this side does not take part in it.
    start: Option<Vec<PathBuf>>,
    /// Peak memory of the process in bytes, from its last answer.
    memory: Option<u64>,
}

impl Side {
    pub(crate) fn spawn(mut command: Command, start: Option<Vec<PathBuf>>) -> Result<Side, String> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("`{program}` did not start: {e}"))?;
        let requests = child.stdin.take();
        let stdout = child.stdout.take().ok_or("no pipe from the child")?;
        let mut side =
            Side { name: program, child, requests, answers: BufReader::new(stdout), start, memory: None };
        let hello = side.read()?;
        side.name = hello["name"]
            .as_str()
            .ok_or(format!("`{}` began with {hello}, which has no `name`", side.name))?
            .into();
        Ok(side)
    }

    fn read(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line).map_err(|e| format!("{}: {e}", self.name))?;
        if read == 0 {
            return Err(format!("{} ended without an answer", self.name));
        }
        serde_json::from_str(&line).map_err(|e| format!("{} answered `{}`: {e}", self.name, line.trim()))
    }

    fn ask(&mut self, item: &str) -> Result<Value, String> {
        let requests = self.requests.as_mut().ok_or("the child takes no requests")?;
        writeln!(requests, "{item}")
            .and_then(|()| requests.flush())
            .map_err(|e| format!("{}: {e}", self.name))?;
        self.read()
    }

    /// Seconds per run of the item; None if this side does not have it.
    fn measure(&mut self, item: &str, work: Work) -> Result<Option<f64>, String> {
        if work == Work::Start {
            let Some((program, args)) = self.start.as_deref().and_then(<[PathBuf]>::split_first) else {
                return Ok(None);
            };
            let begin = Instant::now();
            let out = Command::new(program)
                .args(args)
                .output()
                .map_err(|e| format!("{}: {e}", program.display()))?;
            let seconds = begin.elapsed().as_secs_f64();
            if !out.status.success() {
                let why = String::from_utf8_lossy(&out.stderr).into_owned();
                return Err(format!("{} ended with {}: {why}", program.display(), out.status));
            }
            return Ok(Some(seconds));
        }
        let answer = self.ask(item)?;
        if !answer["unsupported"].is_null() {
            return Ok(None);
        }
        self.memory = answer["peak_memory"].as_u64();
        match answer["seconds"].as_f64() {
            Some(seconds) if seconds > 0.0 => Ok(Some(seconds)),
            _ => Err(format!(
                "{} answered {answer} for {item}, without a positive number in `seconds`",
                self.name
            )),
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // The child exits when its input closes.
        drop(self.requests.take());
        let _ = self.child.wait();
    }
}

struct Options {
    rounds: usize,
    threads: usize,
    only: Vec<String>,
    torch: bool,
    write: bool,
}

impl Options {
    fn parse(args: &[&str]) -> Result<Options, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = Options { rounds: 15, threads: cores, only: Vec::new(), torch: false, write: true };
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            if *flag == "--no-write" {
                options.write = false;
                continue;
            }
            let value = || {
                Failure::Usage(format!(
                    "{flag} needs a valid value: a positive number, for --only the start of an item's name, for --with `torch`"
                ))
            };
            let next = args.next().ok_or_else(value)?;
            match *flag {
                "--rounds" => options.rounds = next.parse().ok().filter(|&n| n > 0).ok_or_else(value)?,
                "--threads" => options.threads = next.parse().ok().filter(|&n| n > 0).ok_or_else(value)?,
                "--only" if ITEMS.iter().any(|(name, _)| name.starts_with(next)) => {
                    options.only.push(next.to_string())
                }
                "--with" if *next == "torch" => options.torch = true,
                "--only" | "--with" => return Err(value()),
                _ => return Err(Failure::Usage(format!("`bench peers` has no option `{flag}`"))),
            }
        }
        Ok(options)
    }

    /// Whether `--only` selects the item. `item` may also be the beginning of names, such as `model.`: then
    /// whether `--only` may select one of these items.
    fn selects(&self, item: &str) -> bool {
        let asked = |only: &String| item.starts_with(only.as_str()) || only.starts_with(item);
        self.only.is_empty() || self.only.iter().any(asked)
    }
}

/// Builds the command and the examples `bench_server` and `bench_train`, which are Halcyon's side of the
/// benchmarks, in release mode.
pub(crate) fn build() -> Result<(), Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let what =
        "-p halcyon-cli -p halcyon -p halcyon-nn --bin halcyon --example bench_server --example bench_train";
    run(Command::new(cargo).current_dir(crate::root()).args(["build", "--release"]).args(what.split(' ')))?;
    Ok(())
}

pub(crate) fn peers(args: &[&str]) -> Result<bool, Failure> {
    let options = Options::parse(args)?;
    let mut requirements = vec![Requirements { file: "requirements-peers.txt", flags: &[] }];
    if options.torch {
        requirements.push(Requirements { file: "requirements-torch.txt", flags: &[] });
    }
    let venv = Venv::new(if options.torch { "venv-peers-torch" } else { "venv-peers" });
    println!("peers' environment: {}", venv.prepare(&requirements)?);
    build()?;

    let models = crate::target_dir().join("peer-models");
    if (options.selects("model.") || options.selects("model16.")) && !models.join("minilm.onnx").exists() {
        println!("making the models");
        run(Command::new(venv.python())
            .arg(crate::root().join("xtask/scripts/peer_models.py"))
            .arg(&models))?;
    }
    let torch = options.torch
        || crate::prerequisites::succeeds(Command::new(venv.python()).args(["-c", "import torch"]));
    let mut sides = spawn_sides(&options, &venv, &models, torch)?;
    let names: Vec<String> = sides.iter().map(|side| side.name.clone()).collect();
    println!("{} threads, {} rounds, interleaved: {}", options.threads, options.rounds, names.join(" | "));

    let items: Vec<_> = ITEMS.iter().filter(|(name, _)| options.selects(name)).collect();
    let peaks = measure_peaks(&mut sides, &items)?;
    let mut rows = Vec::new();
    for &&(item, work) in &items {
        if work == Work::Training {
            rows.extend(training(&options, &venv, torch, item)?);
            continue;
        }
        let rounds = interleave(&mut sides, item, work, options.rounds)?;
        rows.push(report_item(item, work, &names, &rounds, &peaks));
    }
    let record = json!({"threads": options.threads, "rounds": options.rounds, "sides": names, "items": rows,
        "peaks": peaks.iter().map(|c| json!({"name": c.0, "giga_per_second": c.1, "by": c.2})).collect::<Vec<_>>()});
    let path = crate::target_dir().join("bench-peers.json");
    std::fs::write(&path, format!("{record:#}\n")).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("written to {}", path.display());
    match (options.write, options.only.is_empty()) {
        (true, true) => {
            let page = crate::root().join("docs/performance.md");
            crate::performance::write(&page, &record)?;
            println!("written to {}", page.display());
        }
        (true, false) => {
            println!("docs/performance.md is unchanged, because it holds only runs over all items")
        }
        _ => {}
    }
    Ok(true)
}

/// Starts the sides. Halcyon's comes first in the result.
fn spawn_sides(options: &Options, venv: &Venv, models: &Path, torch: bool) -> Result<Vec<Side>, String> {
    let threads = options.threads.to_string();
    let release = crate::target_dir().join("release");
    let (model, image, array) = start_input(venv)?;
    let mut ours =
        Command::new(release.join("examples").join(format!("bench_server{}", std::env::consts::EXE_SUFFIX)));
    ours.args(["--serve", "--threads", &threads]).env(MODELS, models);
    let start: Vec<PathBuf> = [
        release.join(format!("halcyon{}", std::env::consts::EXE_SUFFIX)),
        "run".into(),
        model.clone(),
        "--input".into(),
        image,
        "--threads".into(),
        threads.clone().into(),
    ]
    .into();
    let mut sides = vec![Side::spawn(ours, Some(start))?];
    let script = crate::root().join("xtask/scripts/peers.py");
    let engines = ["onnxruntime", "openvino", "numpy"].into_iter().chain(torch.then_some("torch"));
    for engine in engines {
        let args: Vec<PathBuf> =
            [script.clone(), "--engine".into(), engine.into(), "--threads".into(), threads.clone().into()]
                .into();
        let mut command = Command::new(venv.python());
        command.args(&args).env(MODELS, models);
        let start = (engine == "onnxruntime").then(|| {
            let once = ["--start".into(), model.clone(), array.clone()];
            [venv.python()].into_iter().chain(args).chain(once).collect()
        });
        sides.push(Side::spawn(command, start)?);
    }
    Ok(sides)
}

/// Measures a training step. The only peer is torch.
fn training(options: &Options, venv: &Venv, torch: bool, item: &str) -> Result<Option<Value>, String> {
    if !torch {
        println!("{item}: not measured, because torch is missing; add `--with torch`");
        return Ok(None);
    }
    let threads = options.threads.to_string();
    let exe = format!("release/examples/bench_train{}", std::env::consts::EXE_SUFFIX);
    let mut ours = Command::new(crate::target_dir().join(exe));
    ours.args(["--serve", "--threads", &threads]);
    let mut theirs = Command::new(venv.python());
    theirs.arg(crate::root().join("xtask/scripts/peers.py"));
    theirs.args(["--engine", "torch", "--threads", &threads]);
    let mut sides = [Side::spawn(ours, None)?, Side::spawn(theirs, None)?];
    let names: Vec<String> = sides.iter().map(|side| side.name.clone()).collect();
    let rounds = interleave(&mut sides, item, Work::Training, options.rounds)?;
    let mut row = report_item(item, Work::Training, &names, &rounds, &Peaks::new());
    for (side, i) in sides.iter().zip(0..) {
        if let Some(bytes) = side.memory {
            println!("  {:<24} {:>10.1} MB at most", side.name, bytes as f64 / 1e6);
            row["sides"][i]["peak_memory"] = json!(bytes);
        }
    }
    Ok(Some(row))
}

/// The model for `start`, its input as a file for the command, and the same input as an array for the peer.
fn start_input(venv: &Venv) -> Result<(PathBuf, PathBuf, PathBuf), String> {
    if let Some(dir) = std::env::var_os("HALCYON_MNIST").map(PathBuf::from) {
        let array = dir.join("digit-7.npy");
        return Ok((dir.join("mnist.onnx"), array.clone(), array));
    }
    let models = crate::root().join("models");
    let array = crate::target_dir().join("digit-7.npy");
    let code = "import numpy as np, sys; d = np.load(sys.argv[1]); i = int(np.flatnonzero(d['test_labels'] == 7)[0]); \
                np.save(sys.argv[2], (d['test_images'][i] / 16).astype(np.float32)[None, None])";
    let mut command = Command::new(venv.python());
    command.args([Path::new("-c"), Path::new(code), &models.join("digits.npz"), &array]);
    let status = command.status().map_err(|e| format!("the peers' Python did not start: {e}"))?;
    if !status.success() {
        return Err(format!("the peers' Python did not write the image for `start`: {status}"));
    }
    Ok((models.join("digits.onnx"), models.join("digit-7.png"), array))
}

/// The machine's peaks in giga-units per second: the best of any side, and which side it was.
type Peaks = Vec<(&'static str, f64, String)>;

fn measure_peaks(sides: &mut [Side], items: &[&(&str, Work)]) -> Result<Peaks, String> {
    let mut peaks: Peaks = Vec::new();
    for name in ["peak.fma", "peak.bf16", "peak.int8", "peak.read", "peak.copy"] {
        if !items.iter().any(|(_, work)| work.peak() == Some(name)) {
            continue;
        }
        for side in sides.iter_mut() {
            let mut best = 0.0_f64;
            for _ in 0..5 {
                let answer = side.ask(name)?;
                let (Some(seconds), Some(work)) = (answer["seconds"].as_f64(), answer["work"].as_f64())
                else {
                    break;
                };
                best = best.max(work / seconds / 1e9);
                std::thread::sleep(PAUSE);
            }
            if best == 0.0 {
                continue;
            }
            println!("{name}: {best:.1} G/s by {}", side.name);
            match peaks.iter_mut().find(|c| c.0 == name) {
                Some(known) if known.1 < best => *known = (name, best, side.name.clone()),
                Some(_) => (),
                None => peaks.push((name, best, side.name.clone())),
            }
        }
    }
    Ok(peaks)
}

/// Seconds per round for each side; an empty list if a side does not have the item.
pub(crate) fn interleave(
    sides: &mut [Side],
    item: &str,
    work: Work,
    rounds: usize,
) -> Result<Vec<Vec<f64>>, String> {
    let mut seconds = vec![Vec::new(); sides.len()];
    let mut absent = vec![false; sides.len()];
    for round in 0..rounds {
        for turn in 0..sides.len() {
            let at = (round + turn) % sides.len();
            if absent[at] {
                continue;
            }
            match sides[at].measure(item, work)? {
                Some(time) => seconds[at].push(time),
                None => absent[at] = true,
            }
            std::thread::sleep(PAUSE);
        }
    }
    Ok(seconds)
}

fn report_item(item: &str, work: Work, names: &[String], rounds: &[Vec<f64>], peaks: &Peaks) -> Value {
    let ours = &rounds[0];
    let mut sides = Vec::new();
    println!("{item}");
    for (name, times) in names.iter().zip(rounds) {
        let Some(time) = median(times.clone()) else {
            continue;
        };
        let rate = work.rate(time);
        let share = rate.and_then(|rate| {
            let peak = peaks.iter().find(|c| Some(c.0) == work.peak())?;
            Some(rate / peak.1)
        });
        // How many times as fast Halcyon is as this side: the median over the rounds.
        let ratio = median(times.iter().zip(ours).map(|(theirs, ours)| theirs / ours).collect());
        let mut line = format!("  {name:<24} {:>10.3} ms", time * 1e3);
        if let Some(rate) = rate {
            line.push_str(&format!("  {rate:>7.1} {}", work.unit()));
        }
        if let Some(share) = share {
            line.push_str(&format!("  {:>5.1} % of the peak", share * 100.0));
        }
        if let Some(ratio) = ratio.filter(|_| name != &names[0]) {
            line.push_str(&format!("  ours is {ratio:.2}x as fast"));
        }
        println!("{line}");
        sides.push(
            json!({"name": name, "median_seconds": time, "giga_per_second": rate, "share_of_peak": share,
            "ours_times_as_fast": ratio, "seconds": times}),
        );
    }
    json!({"item": item, "unit": work.unit(), "sides": sides})
}

/// The median; for an even count, the mean of the middle two.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 { None } else { Some((values[(n - 1) / 2] + values[n / 2]) / 2.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn options_are_checked() {
        assert!(Options::parse(&["--rounds", "0"]).is_err());
        assert!(Options::parse(&["--only", "nothing"]).is_err());
        assert!(Options::parse(&["--only"]).is_err());
        assert!(
            Options::parse(&["--no-write"]).is_ok_and(|o| !o.write)
                && Options::parse(&[]).is_ok_and(|o| o.write)
        );
        assert_eq!(Options::parse(&["--only", "gemm", "--rounds", "3"]).map(|o| o.rounds).ok(), Some(3));
    }
}

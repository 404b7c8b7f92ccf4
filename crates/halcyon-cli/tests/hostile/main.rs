//! Tests of specific attacks. For any file contents, the command must succeed, or end with one clear error
//! and the documented exit code, within limits on time and memory. It must not panic or run into the system's
//! own limits.
//!
//! Tests with many damaged files call the library in this process. Tests of exit codes, messages and memory
//! run the command.

#[path = "../common/mod.rs"]
mod common;
mod damaged;
mod files;
mod graphs;
mod sizes;

use bytes::Bytes;
use common::*;
use halcyon::{Backend, BackendType, ConstData, Error, Level, OnnxSession, Replay, Result, Session};
use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::tensor::{self, External};
use halcyon_formats::onnx::{Datum, Model, PortType, RunOptions};
use halcyon_formats::{gguf, npy, npz, safetensors};
use halcyon_ir::{Bindings, DType, Graph, TensorType};
use halcyon_test::seed_models::{body, floats, graph, int, ints, list, model, node, port, scalar, with};
use halcyon_test::{mutate, seed_models};
use prost::Message;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Limit on the command's resident memory in every attack.
const RESIDENT: u64 = 400 << 20;
/// Limit on the command's address space, which includes the stacks of threads and mapped files.
const ADDRESSES: u64 = 8 << 30;

static DIGITS: LazyLock<Bytes> =
    LazyLock::new(|| std::fs::read(root().join("models/digits.onnx")).expect("the model").into());

/// The CPU with a small memory limit.
static CPU: LazyLock<Backend> = LazyLock::new(|| {
    let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(1).memory_limit(256 << 20);
    b.build().expect("the CPU is a device")
});

/// Zeros for a model's inputs, with 1 for every symbol. `None` if an input is not a tensor or is large.
fn inputs(m: &Model) -> Result<Option<Vec<Datum>>> {
    let one = |t: &PortType| {
        let PortType::Tensor { dtype, shape: Some(s) } = t else { return None };
        let mut names = BTreeSet::new();
        s.iter().for_each(|d| d.symbols(&mut names));
        let dims = s.bind(&names.into_iter().map(|n| (n, 1)).collect::<Bindings>()).ok()?.known()?;
        let n = dims.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).filter(|n| *n <= 65_536)?;
        ConstData::new(*dtype, &dims, std::sync::Arc::new(vec![0u8; dtype.bytes(n)])).ok().map(Datum::Tensor)
    };
    Ok(m.inputs()?.iter().map(|p| one(&p.ty)).collect())
}

/// Parses, checks and runs a model. It is run only if its inputs are small.
fn run(file: Bytes) -> Result<()> {
    let m = Model::parse(file, External::none(), "m.onnx")?;
    m.check("cpu")?;
    if let Some(x) = inputs(&m)? {
        let options = RunOptions { max_iterations: 1000, ..RunOptions::default() };
        OnnxSession::new(&CPU, m)?.with_options(options).run_data(&x)?;
    }
    Ok(())
}

/// Checks that `f` does not panic, and that an error is not internal and has an exit code from 1 to 5.
/// Returns whether `f` succeeded.
#[track_caller]
fn returns<T>(what: &str, f: impl FnOnce() -> Result<T>) -> bool {
    match catch_unwind(AssertUnwindSafe(f)) {
        Err(_) => panic!("{what}: a panic"),
        Ok(Err(e)) => {
            assert!(!matches!(e, Error::Internal(_)), "{what}: {e}");
            assert!((1..=5).contains(&e.exit_code()), "{what}: {e}");
            false
        }
        Ok(Ok(_)) => true,
    }
}

/// Runs the command with limited address space. Returns its output, how it ended, and its peak memory.
fn attack(args: &[&str]) -> (Done, Option<u64>) {
    let mut c = if cfg!(target_os = "linux") {
        let mut c = Command::new("sh");
        let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", ADDRESSES >> 10);
        c.args(["-c", &script, env!("CARGO_BIN_EXE_halcyon")]);
        c
    } else {
        Command::new(env!("CARGO_BIN_EXE_halcyon"))
    };
    c.args(args).current_dir(root()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = c.spawn().expect("the command starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
        peak = line.and_then(|n| n.trim().parse::<u64>().ok()).map(|k| k << 10).or(peak);
        if child.try_wait().expect("the command can be waited for").is_some() {
            break;
        }
        if start.elapsed() > Duration::from_secs(300) {
            let _ = child.kill();
            panic!("{args:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let o = child.wait_with_output().expect("the command ended");
    let text = |b| String::from_utf8(b).expect("text");
    (Done { code: o.status.code().unwrap_or(-1), out: text(o.stdout), err: text(o.stderr) }, peak)
}

/// Checks that the command fails with this code, that one line of its output contains all of these parts, and
/// that the command used little memory.
#[track_caller]
fn refused(args: &[&str], code: i32, parts: &[&str]) {
    let (done, peak) = attack(args);
    assert!(!done.err.contains("panicked") && !done.err.contains("internal error"), "{args:?}: {done:?}");
    assert!(peak.is_none_or(|p| p < RESIDENT), "{args:?}: {peak:?} bytes, {done:?}");
    let text = done.err.trim_end().to_string();
    done.fails(code, parts);
    assert!(text.lines().count() == 1 && text.len() < 5000, "{text}");
}

/// Writes models to a folder and runs the command on each, with a memory limit of 512 MiB. `graph` also sets
/// every input to ones.
struct Attacks {
    dir: tempfile::TempDir,
    count: usize,
}

impl Attacks {
    fn new() -> Attacks {
        Attacks { dir: tempfile::tempdir().expect("a folder"), count: 0 }
    }

    #[track_caller]
    fn bytes(&mut self, file: &[u8], more: &[&str], code: i32, parts: &[&str]) {
        self.count += 1;
        let path = self.dir.path().join(format!("m{}.onnx", self.count));
        std::fs::write(&path, file).expect("the model is written");
        let mut args = vec!["run", text(&path), "--backend", "cpu", "--memory-limit", "512M"];
        args.extend(more);
        refused(&args, code, parts);
    }

    #[track_caller]
    fn model(&mut self, m: &ModelProto, more: &[&str], code: i32, parts: &[&str]) {
        self.bytes(&m.encode_to_vec(), more, code, parts);
    }

    #[track_caller]
    fn graph(&mut self, g: GraphProto, code: i32, parts: &[&str]) {
        let given: Vec<String> = g.input.iter().map(|_| "ones".to_string()).collect();
        let more: Vec<&str> = given.iter().flat_map(|s| ["--input", s]).collect();
        self.model(&model(17, g), &more, code, parts);
    }
}

/// The graph `y = op(x, w…)`, where `x` has two floats.
fn op(n: NodeProto, weights: Vec<TensorProto>) -> GraphProto {
    graph(vec![n], vec![port("x", 1, &[2])], vec![port("y", 1, &[])], weights)
}

//! Shared by the tests: running the command, small models, skipping with a message.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

use halcyon_formats::onnx::proto::*;
use halcyon_hal::backend::{BUILT_IN, TestDevice};
use halcyon_ir::DType;
use prost::Message;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The output of the command, and its exit code.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// Parses standard output, which must be a single JSON value.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("no JSON ({e}): {self:?}"))
    }

    #[track_caller]
    pub fn ok(self) -> Done {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Checks the exit code, and that either stream contains `part`.
    #[track_caller]
    pub fn code_is(self, code: i32, part: &str) {
        assert!(self.code == code && (self.err.contains(part) || self.out.contains(part)), "{self:?}");
    }

    /// Checks the exit code, and that stderr contains all parts.
    #[track_caller]
    pub fn fails(self, code: i32, parts: &[&str]) -> Done {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.starts_with("error: "), "{self:?}");
        for p in parts {
            assert!(self.err.contains(p), "\"{p}\" is not in {}", self.err);
        }
        self
    }
}

/// The command, with the workspace root as its working directory.
pub fn command(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_halcyon"));
    c.args(args).current_dir(root());
    c
}

pub fn halcyon(args: &[&str]) -> Done {
    finish(&mut command(args))
}

pub fn finish(c: &mut Command) -> Done {
    let o = c.output().expect("the command starts");
    Done {
        code: o.status.code().unwrap_or(-1),
        out: String::from_utf8(o.stdout).expect("stdout is text"),
        err: String::from_utf8(o.stderr).expect("stderr is text"),
    }
}

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn text(p: &Path) -> &str {
    p.to_str().expect("the path is text")
}

/// Reports a skipped test on the terminal and in the list that the test command collects.
pub fn skip(test: &str, reason: &str) {
    println!("skipped {test}: {reason}");
    if let Ok(path) = std::env::var("HALCYON_SKIPS")
        && let Ok(mut f) = std::fs::OpenOptions::new().append(true).create(true).open(path)
    {
        let _ = writeln!(f, "{test}: {reason}");
    }
}

pub fn required() -> bool {
    std::env::var("HALCYON_REQUIRE_ALL").is_ok_and(|v| v == "1")
}

/// If HALCYON_CASES is above one, draws a sample: the index of the drawn case among `n`. HALCYON_SEED repeats
/// a draw.
pub fn drawn(what: &str, n: usize) -> Option<usize> {
    let one_in: usize = std::env::var("HALCYON_CASES").ok()?.parse().ok()?;
    let given = std::env::var("HALCYON_SEED").ok().and_then(|s| s.parse().ok());
    let now = || std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos() as u64);
    // FNV-1a of the name, so that the tests of one run draw differently.
    let seed: u64 = given.unwrap_or_else(now);
    let bytes = seed.to_le_bytes().into_iter().chain(what.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let at = ((hash >> 32) % n.max(1) as u64) as usize;
    println!("{what}: {at} of {n} is drawn, HALCYON_SEED={seed}");
    (one_in > 1).then_some(at)
}

/// The backends that compute and have a test device on every test machine.
pub fn test_backends() -> Vec<&'static str> {
    let mut all: Vec<&str> = BUILT_IN
        .iter()
        .filter(|b| {
            matches!(b.test, TestDevice::Always | TestDevice::Installed(_)) && b.row.priority.is_some()
        })
        .map(|b| b.row.id)
        .collect();
    // The CPU first.
    all.sort_by_key(|id| *id != "cpu");
    all
}

/// Whether a backend has a device here. With HALCYON_REQUIRE_ALL=1 a missing one is a failure.
/// HALCYON_DEVICES=cpu,webgpu excludes all other backends.
pub fn there(test: &str, backend: &str) -> bool {
    if std::env::var("HALCYON_DEVICES").is_ok_and(|o| !o.split(',').any(|n| n == backend)) {
        return false;
    }
    if BUILT_IN.iter().any(|b| b.row.id == backend && (b.driver)().is_none()) {
        skip(test, &format!("{backend}: the feature is switched off"));
        return false;
    }
    static DEVICES: LazyLock<Value> = LazyLock::new(|| halcyon(&["devices", "--json"]).ok().json());
    let row =
        DEVICES.as_array().and_then(|a| a.iter().find(|r| r["id"] == backend)).cloned().unwrap_or_default();
    if row["available"] == true {
        return true;
    }
    assert!(!required(), "{backend}: {}", row["reason"]);
    skip(test, &format!("{backend}: {}", row["reason"]));
    false
}

/// A folder of models with known outputs, beside the repository or in HALCYON_MODELS. With
/// HALCYON_REQUIRE_ALL=1 a missing one is a failure.
pub fn models(test: &str, name: &str) -> Option<PathBuf> {
    let all =
        std::env::var_os("HALCYON_MODELS").map_or_else(|| root().join("../shared/models"), PathBuf::from);
    let dir = all.join(name);
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(!required(), "{} is missing: HALCYON_MODELS names the folder of models", dir.display());
    skip(test, "the models folder beside the repository is absent; HALCYON_MODELS names it");
    None
}

/// A folder prepared by the test command.
pub fn prepared(test: &str, variable: &str, name: &str) -> Option<PathBuf> {
    let dir = std::env::var_os(variable).map(|d| PathBuf::from(d).join(name));
    match dir {
        Some(d) if d.is_dir() => Some(d),
        _ => {
            assert!(!required(), "{variable} does not lead to test data");
            skip(test, &format!("{variable} is not set; `cargo xtask test` sets it"));
            None
        }
    }
}

/// The declaration of a tensor; `Err` names a symbol.
pub fn port(name: &str, dtype: DType, dims: &[Result<i64, &str>]) -> ValueInfoProto {
    let dim = |d: &Result<i64, &str>| Dimension {
        value: Some(match d {
            Ok(n) => DimValue::Value(*n),
            Err(s) => DimValue::Param(s.to_string()),
        }),
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(TensorType { elem_type: dtype.row().onnx, shape: Some(shape) })),
        }),
    }
}

/// A model of one node.
pub fn model(op: &str, domain: &str, inputs: Vec<ValueInfoProto>, output: ValueInfoProto) -> ModelProto {
    let node = NodeProto {
        input: inputs.iter().map(|i| i.name.clone()).collect(),
        output: vec![output.name.clone()],
        name: format!("the_{op}"),
        op_type: op.into(),
        domain: domain.into(),
        ..Default::default()
    };
    let set = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
    ModelProto {
        ir_version: 8,
        opset_import: vec![set("", 17), set("our.domain", 1)],
        graph: Some(GraphProto {
            node: vec![node],
            name: "g".into(),
            input: inputs,
            output: vec![output],
            ..Default::default()
        }),
        ..Default::default()
    }
}

pub fn save(m: &ModelProto, path: &Path) {
    std::fs::write(path, m.encode_to_vec()).expect("the model is written");
}

/// `sum = a + b` on `[n, 3]`.
pub fn add(dtype: DType) -> ModelProto {
    let of = |name: &str| port(name, dtype, &[Err("n"), Ok(3)]);
    model("Add", "", vec![of("a"), of("b")], of("sum"))
}

//! Shared by the tests: running the command, and small models.
#![allow(dead_code, unused_imports)]
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

#[cfg(feature = "language")]
pub mod language;

use halcyon_formats::onnx::proto::*;
use halcyon_hal::backend::{BUILT_IN, TestDevice};
use halcyon_ir::DType;
pub use halcyon_test::{drawn, drawn_of, left_out, models, one_in, prepared, required, root, skip};
use prost::Message;
use serde_json::Value;
use std::path::Path;
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

    /// Checks the exit code, and that stderr begins with `error: ` and contains all parts.
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

pub fn text(p: &Path) -> &str {
    p.to_str().expect("the path is text")
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

/// The backends that a test runs on: the CPU and one of the others, which the seed of the run draws for each
/// test. With `HALCYON_CASES=all` it is all of them.
pub fn drawn_backends(test: &'static str) -> impl Iterator<Item = &'static str> {
    let (mut ids, others): (Vec<_>, Vec<_>) = test_backends().into_iter().partition(|b| *b == "cpu");
    ids.extend(drawn_of(&format!("device of {test}"), &others));
    ids.into_iter().filter(move |b| there(test, b))
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

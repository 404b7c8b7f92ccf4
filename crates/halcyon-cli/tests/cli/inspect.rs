//! Tests of `halcyon inspect` and `halcyon export`.

use crate::common::*;
use halcyon_formats::gguf::{self, GgmlType, TensorInfo};
use halcyon_formats::npy;
use halcyon_formats::onnx::proto::*;
use halcyon_ir::DType;
use serde_json::Value;

const DIGITS: &str = "models/digits.onnx";

fn on_cpu(args: &[&str]) -> Done {
    halcyon(&[&["inspect"], args, &["--backend", "cpu"]].concat())
}

fn operator<'v>(v: &'v Value, name: &str) -> &'v Value {
    let all = v["operators"].as_array().expect("operators");
    all.iter().find(|o| o["op"] == name).unwrap_or_else(|| panic!("no {name} in {v}"))
}

#[test]
fn a_model_is_described_without_a_run() {
    let text = on_cpu(&[DIGITS]).ok().out;
    for part in [
        "ai.onnx 21",
        "f32[batch, 1, 8, 8]",
        "taken as f32[1, 1, 8, 8]",
        "6,092 in 7 tensors",
        "conv2.weight",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let v = on_cpu(&[DIGITS, "--json"]).ok().json();
    assert_eq!(v["parameters"]["elements"], 6092);
    assert_eq!(v["parameters"]["by_dtype"][0]["dtype"], "f32");
    assert_eq!(operator(&v, "Conv")["nodes"], 2);
    // Two convolutions: 9 * (1 * 16 * 8 * 8 + 16 * 32 * 4 * 4) multiply-adds, which count as two each. The
    // biases are counted in other operators.
    let conv = 2 * 9 * (16 * 64 + 16 * 32 * 16);
    assert_eq!(operator(&v, "Conv")["flops"], conv);
    assert!(v["work"]["flops"].as_u64() > Some(conv));
    let backend = &v["backends"][0];
    assert_eq!((&backend["id"], &backend["supported"]), (&Value::from("cpu:0"), &Value::from(true)));
    let plan = |k: &str| backend["plan"][k].as_u64().expect("a figure");
    assert_eq!(plan("library") + plan("generated") + plan("host"), plan("steps"));
    assert!(
        operator(&v, "Softmax")["on"]["cpu:0"].as_str().is_some_and(|s| s.contains("cpu.softmax")),
        "{v}"
    );
    assert_eq!(v["largest_weights"][0]["name"], "conv2.weight");
}

#[test]
fn sizes_are_bound_by_the_command_line() {
    let flops = |args: &[&str]| {
        let v = on_cpu(&[&[DIGITS, "--json"], args].concat()).ok().json();
        v["work"]["flops"].as_u64().expect("a figure")
    };
    assert_eq!(flops(&["--input", "image=8x1x8x8"]), 8 * flops(&[]));
    assert_eq!(flops(&["--input", "3x1x8x8"]), 3 * flops(&[]));
    on_cpu(&[DIGITS, "--input", "picture=1x1x8x8"]).fails(2, &["no input 'picture'"]);
    on_cpu(&[DIGITS, "--input", "1x1x9x9"]).fails(2, &["9"]);
}

#[test]
fn unsupported_operators_are_named_and_the_rest_is_there() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    let x = || port("x", DType::F32, &[Err("n"), Ok(3)]);
    let mut m = model("Unheard", "our.domain", vec![x()], port("h", DType::F32, &[]));
    let g = m.graph.as_mut().expect("a graph");
    g.node.push(NodeProto {
        op_type: "Relu".into(),
        name: "last".into(),
        input: vec!["h".into()],
        output: vec!["y".into()],
        ..Default::default()
    });
    g.output = vec![port("y", DType::F32, &[])];
    save(&m, &path);
    let v = on_cpu(&[text(&path), "--json"]).ok().json();
    let odd = operator(&v, "Unheard");
    assert_eq!(odd["domain"], "our.domain");
    assert_eq!(odd["refused"][0]["nodes"][0], "the_Unheard");
    assert_eq!(odd["on"]["cpu:0"], "no");
    assert_eq!(operator(&v, "Relu")["nodes"], 1);
    assert_eq!(v["inputs"][0]["type"], "f32[n, 3]");
    assert!(v["work"].is_null() && v["no_work_because"].as_str().is_some(), "{v}");
    let t = on_cpu(&[text(&path)]).ok().out;
    assert!(t.contains("our.domain.Unheard (opset 1)") && t.contains("no such operator"), "{t}");
}

#[test]
fn a_broken_model_is_described_and_is_an_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    let x = |name: &str, n| port(name, DType::F32, &[Ok(n)]);
    save(&model("Add", "", vec![x("a", 2), x("b", 3)], x("y", 3)), &path);
    let told = on_cpu(&[text(&path)]).fails(1, &["the_Add"]);
    assert!(told.out.contains("Add"), "{told:?}");
    // With --json the report itself gives the reason, and stderr is empty.
    let told = on_cpu(&[text(&path), "--json"]);
    assert_eq!((told.code, told.err.as_str()), (1, ""));
    let v = told.json();
    assert!(v["no_work_because"].as_str().is_some_and(|w| w.contains("the_Add")), "{v}");
}

#[test]
fn a_model_in_stages_is_described() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    save(
        &model(
            "NonZero",
            "",
            vec![port("x", DType::F32, &[Ok(4)])],
            port("y", DType::I64, &[Ok(1), Err("k")]),
        ),
        &path,
    );
    let v = on_cpu(&[text(&path), "--json"]).ok().json();
    assert!(v["work"]["staged"].as_str().is_some_and(|s| s.contains("NonZero")), "{v}");
    assert_eq!(v["work"]["host_nodes"][0]["op"], "NonZero");
    assert_eq!(operator(&v, "NonZero")["on"]["cpu:0"], "host");
    halcyon(&["export", text(&path), "-o", text(&dir.path().join("out.onnx"))]).fails(3, &["NonZero"]);
}

#[test]
fn files_of_tensors_and_files_that_are_none() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let header = br#"{"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend([0u8; 12]);
    std::fs::write(at("t.bin"), file).expect("written");
    let v = halcyon(&["inspect", text(&at("t.bin")), "--json"]).ok().json();
    assert_eq!((&v["kind"], &v["tensors"][0]["dtype"]), (&Value::from("safetensors"), &Value::from("bf16")));
    assert_eq!(v["parameters"]["bytes"], 12);
    halcyon(&["inspect", "models/digit-7.png"]).fails(1, &["is not a model"]);
    std::fs::write(at("text.onnx"), "hello").expect("written");
    on_cpu(&[text(&at("text.onnx"))]).fails(1, &["not an ONNX model"]);
}

/// Writes part `k` of a model in two files, with one tensor.
fn gguf_part(path: &std::path::Path, k: u16) {
    let mut m = vec![("split.no".to_string(), k.into()), ("split.count".into(), 2u16.into())];
    if k == 0 {
        m.push(("general.architecture".into(), "llama".into()));
        m.push(("llama.rope.freq_base".into(), 1e-5f32.into()));
        m.push(("odd".into(), f32::NAN.into()));
        m.push(("tokens".into(), (0..9).map(|i| format!("t\u{1b}{i}")).collect::<Vec<_>>().into()));
    }
    let q8 = GgmlType::from_name("q8_0").expect("a type");
    let t = TensorInfo::new(format!("blk.{k}.weight"), &[3, 64], q8);
    gguf::write(path, &m, &[(t, &[0; 3 * 68])]).expect("written");
}

#[test]
fn a_gguf_file_in_parts() {
    let dir = tempfile::tempdir().expect("a folder");
    let paths = [1, 2].map(|n| dir.path().join(format!("m-0000{n}-of-00002.gguf")));
    paths.iter().zip(0..).for_each(|(p, k)| gguf_part(p, k));
    for p in &paths {
        let told = halcyon(&["inspect", text(p)]).ok().out;
        for part in [
            "GGUF version 3",
            "in 2 files",
            "architecture: llama",
            "384 in 2 tensors",
            "q8_0[3, 64]",
            "blk.1.weight",
            "string[9]",
            "…]",
            "1e-5",
            "NaN",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(!told.contains('\u{1b}'), "{told}");
    }
    let v = halcyon(&["inspect", text(&paths[1]), "--json"]).ok().json();
    assert_eq!((&v["kind"], &v["architecture"]), (&Value::from("GGUF"), &Value::from("llama")));
    assert_eq!((&v["version"], v["files"].as_array().map(Vec::len)), (&Value::from(3), Some(2)));
    assert_eq!((&v["parameters"]["elements"], &v["parameters"]["bytes"]), (&384.into(), &408.into()));
    assert_eq!(v["parameters"]["by_dtype"][0]["dtype"], "q8_0");
    assert_eq!(
        (&v["metadata"]["llama.rope.freq_base"], &v["metadata"]["odd"]),
        (&1e-5.into(), &"NaN".into())
    );
    let tokens = &v["metadata"]["tokens"];
    assert_eq!((&tokens["count"], &tokens["first"][1]), (&9.into(), &"t\u{1b}1".into()));
    assert_eq!((&v["tensors"][1]["shape"], &v["tensors"][1]["bytes"]), (&vec![3, 64].into(), &204.into()));
    std::fs::remove_file(&paths[0]).expect("removed");
    halcyon(&["inspect", text(&paths[1])]).fails(1, &[text(&paths[0]), "part 1 of 2", "into one folder"]);
}

#[test]
fn gguf_files_that_are_damaged_or_big_endian() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    let t = TensorInfo::new("t", &[64], GgmlType::F32);
    let mut b = gguf::encode(&[], &[(t, &[0; 256])]).expect("a file");
    std::fs::write(&path, &b[..b.len() - 1]).expect("written");
    halcyon(&["inspect", text(&path)]).fails(1, &[text(&path), "tensor 't'", "cut short"]);
    b[4..8].reverse();
    std::fs::write(&path, &b).expect("written");
    halcyon(&["inspect", text(&path)]).fails(3, &[text(&path), "big-endian", "gguf_convert_endian.py"]);
}

#[test]
fn an_exported_model_gives_the_same_numbers() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let run = |model: &str, out: &str| -> Vec<f32> {
        let (out, random) = (at(out), "random:5x1x8x8");
        halcyon(&["run", model, "--input", random, "--backend", "cpu", "--output-dir", text(&out)]).ok();
        npy::read(&out.join("probabilities.npy")).expect("saved").to_vec()
    };
    let want = run(DIGITS, "a");
    for (name, more) in
        [("plain.onnx", &[][..]), ("new.onnx", &["--opset", "28"]), ("split.onnx", &["--external-data"])]
    {
        let path = at(name);
        let d = halcyon(&[&["export", DIGITS, "-o", text(&path), "--json"], more].concat()).ok().json();
        assert_eq!(d["nodes"]["before"], 12);
        assert_eq!(d["data"].is_null(), more != ["--external-data"]);
        let got = run(text(&path), name.trim_end_matches(".onnx"));
        assert!(
            got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6),
            "{name}: {got:?} instead of {want:?}"
        );
    }
    halcyon(&["export", DIGITS, "-o", text(&at("x.onnx")), "--opset", "7"]).fails(2, &["20..=28"]);
    halcyon(&["export", DIGITS, "-o", text(&at("x.onnx")), "--input", "x=1x1x8x8"])
        .fails(2, &["no input 'x'"]);
    assert!(!at("x.onnx").exists());
}

//! Tests of common mistakes: each message names the mistake and what the user can do.

use crate::common::*;
use halcyon_formats::onnx::proto::{StringStringEntryProto, TensorProto};
use halcyon_formats::{npy, npz};
use halcyon_ir::{ConstData, DType};

const DIGITS: &str = "models/digits.onnx";
const SEVEN: &str = "models/digit-7.png";

#[test]
fn files_that_are_no_models_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let x = ConstData::from_slice(&[1], &[1f32]).expect("a value");
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90405214\n";
    let torch = b"PK\x03\x04\0\0\0\0archive/data.pkl".to_vec();
    for (content, parts) in [
        (lfs.as_bytes().to_vec(), ["Git LFS pointer", "git lfs pull"]),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>".to_vec(), ["HTML page", "download"]),
        (b"\x02\0\0\0\0\0\0\0{}".to_vec(), ["safetensors", "export the model to ONNX"]),
        (b"GGUF\x03\0\0\0\0\0\0\0".to_vec(), ["GGUF", "halcyon inspect"]),
        (torch, ["PyTorch", "torch.onnx.export"]),
        (
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.".to_vec(),
            ["PyTorch", "torch.onnx.export"],
        ),
        (b"\x80\x04\x95\x10\0\0\0\0\0\0\0".to_vec(), ["pickle", "torch.onnx.export"]),
        (b"PK\x03\x04\0\0\0\0model.onnx".to_vec(), ["zip archive", "Unpack it"]),
        (b"\x89HDF\r\n\x1a\n\0\0".to_vec(), ["HDF5", "tf2onnx"]),
        (b"\x1c\0\0\0TFL3\0\0\0\0".to_vec(), ["TensorFlow Lite", "tf2onnx"]),
        (npy::encode(&x).expect("an array"), [".npy", "--input"]),
        (npz::encode(&[("a", &x)]).expect("an archive"), [".npz", "--input"]),
        (std::fs::read(root().join(SEVEN)).expect("a picture"), ["a picture", "--input"]),
        (b"{\"model_type\": \"bert\"}".to_vec(), ["JSON", ".onnx file"]),
        (vec![], ["an empty file", "make the file again"]),
    ] {
        let path = dir.path().join("model.onnx");
        std::fs::write(&path, content).expect("written");
        for command in ["run", "inspect", "trace"] {
            // `inspect` reads some of these kinds.
            let d = halcyon(&[command, text(&path)]);
            if command == "inspect" && !d.err.contains("not an ONNX model") {
                continue;
            }
            d.fails(1, &["not an ONNX model: this is ", parts[0], parts[1]]);
        }
    }
}

#[test]
fn weights_that_are_missing_say_where_they_go() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    let of = |n: &str| port(n, DType::F32, &[Ok(3)]);
    let mut m = model("Add", "", vec![of("x")], of("y"));
    let g = m.graph.as_mut().expect("a graph");
    g.node[0].input.push("w".into());
    let entry = StringStringEntryProto { key: "location".into(), value: "model.onnx_data".into() };
    g.initializer.push(TensorProto {
        dims: vec![3],
        data_type: 1,
        name: "w".into(),
        external_data: vec![entry],
        data_location: 1,
        ..Default::default()
    });
    save(&m, &at("model.onnx"));
    let run = || halcyon(&["run", text(&at("model.onnx")), "-i", "ones", "--backend", "cpu"]);
    let weights = at("model.onnx_data");
    run().fails(1, &[text(&weights), "these are the model's weights", "Put the file there"]);
    std::fs::write(&weights, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
        .expect("written");
    run().fails(1, &[text(&weights), "Git LFS pointer", "git lfs pull"]);
    std::fs::write(&weights, [0u8; 12]).expect("written");
    run().ok();
}

#[test]
fn names_with_typing_errors_get_the_right_one() {
    halcyon(&["run", "models/digit.onnx"]).fails(1, &["no such file", "Did you mean models/digits.onnx?"]);
    halcyon(&["run", "model/digits.onnx"]).fails(1, &["no such file", "model does not exist"]);
    halcyon(&["run", "models"]).fails(1, &["a folder", "models/digits.onnx"]);
    halcyon(&["run", DIGITS, "-i", "models/digit7.png"]).fails(1, &["Did you mean models/digit-7.png?"]);
    halcyon(&["run", DIGITS, "-i", SEVEN, "--labels", "models/digit-labels.txt"])
        .fails(1, &["Did you mean models/digits-labels.txt?"]);
    halcyon(&["run", DIGITS, "-i", "imag=models/digit-7.png"])
        .fails(2, &["no input 'imag'", "it takes image", "Did you mean --input image=models/digit-7.png?"]);
    halcyon(&[DIGITS]).code_is(2, "halcyon run models/digits.onnx");
    halcyon(&["run", DIGITS]).fails(2, &["--input image=PICTURE.png", "random:1x1x8x8"]);
    halcyon(&["run", DIGITS, "-i", "text:hello"])
        .fails(2, &["has no input for text", "image f32[batch, 1, 8, 8]"]);
    halcyon(&["run", SEVEN, "-i", DIGITS]).fails(1, &["a picture", "give the .onnx file first"]);
}

#[test]
fn devices_that_are_called_otherwise_are_found() {
    let run = |more: &[&str]| halcyon(&[&["run", DIGITS, "-i", SEVEN], more].concat());
    run(&["--backend", "gpu"])
        .fails(2, &["\"gpu\" is not a backend", "auto, the default, takes the first GPU", "cuda"]);
    run(&["--backend", "CUDAExecutionProvider"]).fails(2, &["it is called cuda here"]);
    run(&["--backend", "directml"]).fails(2, &["webgpu"]);
    run(&["--backend", "tensorrt"]).fails(2, &["it is cuda"]);
    run(&["--device", "cpu"]).code_is(2, "--backend cpu");
    run(&["--device", "first"]).code_is(2, "halcyon devices");
}

/// A table of 5 rows that is indexed by the input.
fn embedding(dir: &std::path::Path) -> std::path::PathBuf {
    let ids = port("ids", DType::I64, &[Err("b"), Err("s")]);
    let table = port("table", DType::F32, &[Ok(5), Ok(2)]);
    let out = port("y", DType::F32, &[Err("b"), Err("s"), Ok(2)]);
    let path = dir.join("embedding.onnx");
    save(&model("Gather", "", vec![table, ids], out), &path);
    path
}

#[test]
fn a_bad_token_id_is_named_with_its_place() {
    let dir = tempfile::tempdir().expect("a folder");
    let m = embedding(dir.path());
    for backend in test_backends() {
        if backend != "cpu" && !there("a_bad_token_id_is_named_with_its_place", backend) {
            continue;
        }
        let run = |ids: &str, more: &[&str]| {
            let ids = format!("ids={ids}");
            halcyon(
                &[&["run", text(&m), "-i", "table=ones", "-i", &ids, "--backend", backend], more].concat(),
            )
        };
        run("[[0, 4], [-5, 1]]", &[]).ok();
        let d = run("[[0, 4], [30522, 1]]", &[]);
        d.fails(
            1,
            &["index out of range in gather", "input 'ids' is 30522 at [1, 0]", "the valid range is -5..5"],
        );
        let v = run("[[0, -6]]", &["--json"]).json();
        assert_eq!(v["error"]["facts"]["input"], "input 'ids' is -6 at [0, 1]", "{v:#}");
    }
}

#[test]
fn inputs_of_a_wrong_kind_say_what_is_right() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |n: &str| dir.path().join(n);
    std::fs::write(at("x.png"), "<!DOCTYPE html><html></html>").expect("written");
    halcyon(&["run", DIGITS, "-i", text(&at("x.png"))]).fails(1, &["an HTML page", ".npy"]);
    let m = embedding(dir.path());
    // An image given to a model of token ids.
    halcyon(&["run", text(&m), "-i", "table=ones", "-i", SEVEN, "--backend", "cpu"])
        .fails(2, &["'ids'", "i64[b, s]"]);
    halcyon(&["run", DIGITS, "-i", "zeros:1x3x8x8", "--backend", "cpu"]).fails(
        2,
        &["input 'image'", "takes f32[batch, 1, 8, 8]", "[1, 3, 8, 8] is given", "size 3 where it has 1"],
    );
    halcyon(&["run", DIGITS, "-i", "[1, 2, 3]", "--backend", "cpu"])
        .fails(2, &["input 'image'", "1 dimension, not 4 dimensions"]);
    halcyon(&["bench", "model", DIGITS, "-i", "models"]).fails(2, &["only `halcyon run`"]);
}

//! Tests of `halcyon quantize`.

use crate::common::language::*;
use halcyon_formats::gguf::{self, GgmlType, Gguf, TensorInfo, Value};
use halcyon_ir::blocks::BlockType;
use std::fs;
use std::path::Path;

fn open(path: &Path) -> Gguf {
    Gguf::open(path).expect("a GGUF file")
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn a_quantised_file_has_the_blocks_of_its_weights_and_runs() {
    let dir = folder();
    let args = ["quantize", "tiny.gguf", "q.gguf", "--type", "q8_0", "--threads", "2", "--json"];
    let v = at(&dir, &args).ok().json();
    assert_eq!((v["type"].as_str(), v["changed"].as_u64()), (Some("q8_0"), Some(16)), "{v}");
    let (old, new) = (open(&dir.path().join("tiny.gguf")), open(&dir.path().join("q.gguf")));
    assert_eq!(v["file_bytes"].as_u64(), Some(new.file_bytes()));
    let m = new.metadata();
    assert_eq!(m.u64("general.file_type").expect("a number"), 7);
    assert_eq!(m.u64("general.quantization_version").expect("a number"), 2);
    for (k, v) in old.metadata().entries() {
        assert_eq!(m.get(k), Some(v), "{k}");
    }
    for t in old.tensors() {
        let n = new.tensor(t.name()).expect("the same tensors");
        if t.shape().len() == 1 {
            assert_eq!((n.ty(), &n.data), (GgmlType::F32, &t.data), "{}", t.name());
            continue;
        }
        let mut want = vec![0; n.data.len()];
        BlockType::Q8_0.encode(&f32s(&t.data), &mut want);
        assert_eq!((n.ty(), &n.data[..]), (GgmlType::Block(BlockType::Q8_0), &want[..]), "{}", t.name());
    }
    let args = ["generate", "q.gguf", "-p", "the", "-n", "2", "--backend", "cpu"];
    at(&dir, &args).ok();
}

#[test]
fn a_dry_run_lists_the_types_and_writes_nothing() {
    let dir = folder();
    let before = fs::read_dir(dir.path()).expect("a folder").count();
    let list = at(&dir, &["quantize", "tiny.gguf", "--type", "q4_k_m", "--dry-run"]).ok().out;
    // Rows of 32 elements are too short for blocks of 256.
    let line = list.lines().find(|l| l.contains("blk.0.attn_q.weight")).expect("a line");
    assert!(line.contains("f32") && line.contains("q5_0"), "{line}");
    assert!(list.lines().last().expect("a line").starts_with("q4_k_m: "), "{list}");
    let args = ["quantize", "tiny.gguf", "no.gguf", "--type", "q4_0", "--dry-run", "--json"];
    let v = at(&dir, &args).ok().json();
    assert_eq!(v["tensors"].as_array().expect("a list").len(), 21);
    assert!(v["new_bytes"].as_u64() < v["bytes"].as_u64());
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), before);
}

#[test]
fn options_choose_types() {
    let dir = folder();
    let mut args = vec!["quantize", "tiny.gguf", "q.gguf", "--type", "q4_0", "--output-tensor-type", "f16"];
    args.extend(["--token-embedding-type", "q5_1", "--tensor-type", "attn_v=q8_0"]);
    at(&dir, &args).ok();
    let file = open(&dir.path().join("q.gguf"));
    let ty = |name: &str| file.tensor(name).expect("a tensor").ty().name();
    assert_eq!((ty("output.weight"), ty("token_embd.weight")), ("f16", "q5_1"));
    assert_eq!((ty("blk.1.attn_v.weight"), ty("blk.1.attn_k.weight")), ("q8_0", "q4_0"));
}

#[test]
fn blocks_are_quantised_again_on_request_only() {
    let dir = folder();
    at(&dir, &["quantize", "tiny.gguf", "q8.gguf", "--type", "q8_0"]).ok();
    let again = ["quantize", "q8.gguf", "q4.gguf", "--type", "q4_0"];
    at(&dir, &again).fails(2, &["is q8_0", "--allow-requantize"]);
    assert!(!dir.path().join("q4.gguf").exists());
    at(&dir, &[&again[..], &["--allow-requantize"]].concat()).ok();
    // The same type is a copy.
    at(&dir, &["quantize", "q8.gguf", "copy.gguf", "--type", "q8_0"]).ok();
    let (a, b) = (open(&dir.path().join("q8.gguf")), open(&dir.path().join("copy.gguf")));
    assert!(a.tensors().iter().all(|t| b.tensor(t.name()).expect("a tensor").data == t.data));
}

#[test]
fn wrong_input_is_refused_and_leaves_no_file() {
    let dir = folder();
    let q = |args: &[&str]| at(&dir, &[&["quantize"], args].concat());
    q(&["tiny.gguf", "o.gguf", "--type", "q9_k"]).fails(3, &["'q9_k'", "q4_k_m"]);
    q(&["tiny.gguf", "--type", "q4_0"]).code_is(2, "OUT");
    q(&["tiny.gguf", "o.gguf"]).code_is(2, "--type");
    q(&["tiny.gguf", "tiny.gguf", "--type", "q4_0"]).fails(2, &["the model itself"]);
    q(&["none.gguf", "o.gguf", "--type", "q4_0"]).fails(1, &["none.gguf"]);
    q(&["text.txt", "o.gguf", "--type", "q4_0"]).fails(1, &["not a GGUF file"]);
    q(&["tiny.gguf", "none/o.gguf", "--type", "q4_0"]).fails(1, &["none/o.gguf"]);
    q(&["tiny.gguf", "o.gguf", "--type", "q4_0", "--tensor-type", "x"]).fails(2, &["NAME=TYPE"]);
    q(&["tiny.gguf", "o.gguf", "--type", "q4_0", "--tensor-type", "x=iq1_s"]).fails(2, &["'iq1_s'", "q4_0"]);
    q(&["tiny.gguf", "o.gguf", "--type", "q4_0", "--output-type", "y"]).fails(2, &["--output-type", "'y'"]);
    q(&["tiny.gguf", "o.gguf", "--type", "f16", "--pure"]).fails(2, &["--pure", "no effect"]);
    q(&["tiny.gguf", "-", "--type", "f16", "--json"]).code_is(2, "standard output");
    #[cfg(target_os = "linux")]
    q(&["tiny.gguf", "/dev/full", "--type", "q4_0"]).fails(1, &["/dev/full", "space"]);
    // Values that a type does not have.
    let metadata: Vec<(String, Value)> = vec![("general.architecture".into(), "llama".into())];
    for (value, ty) in [(f32::NAN, "q8_0"), (f32::INFINITY, "q4_0"), (1e6, "f16")] {
        let mut values = [1f32; 64];
        values[40] = value;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let info = TensorInfo::new("blk.0.attn_q.weight", &[2, 32], GgmlType::F32);
        gguf::write(&dir.path().join("odd.gguf"), &metadata, &[(info, &bytes)]).expect("written");
        q(&["odd.gguf", "o.gguf", "--type", ty]).fails(1, &["blk.0.attn_q.weight", &value.to_string(), ty]);
    }
    let left = fs::read_dir(dir.path()).expect("a folder").flatten().map(|e| e.file_name());
    let left: Vec<_> = left.filter(|n| n == "o.gguf" || n.to_string_lossy().contains(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}

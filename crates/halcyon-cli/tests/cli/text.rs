//! Tests of text as the input of an encoder.

use crate::common::*;
use halcyon_formats::npy;
use halcyon_ir::DType;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// An encoder that returns its inputs: `y` are the ids, `m` the mask, `t` the types.
fn echo(dir: &Path, ids: &str, mask: Option<&str>, length: Result<i64, &str>) -> PathBuf {
    let of = |n: &str| port(n, DType::I64, &[Err("b"), length]);
    let mut m = model("Identity", "", vec![of(ids)], of("y"));
    let g = m.graph.as_mut().expect("a graph");
    for (name, out) in mask.map(|m| (m, "m")).into_iter().chain([("token_type_ids", "t")]) {
        let mut node = g.node[0].clone();
        (node.input, node.output, node.name) = (vec![name.into()], vec![out.into()], out.into());
        g.node.push(node);
        g.input.push(of(name));
        g.output.push(of(out));
    }
    let path = dir.join("echo.onnx");
    save(&m, &path);
    path
}

/// Writes a tokenizer with a small vocabulary that adds `[CLS]` and `[SEP]` around the words.
fn tokenizer(dir: &Path, longest: Option<u64>) {
    let words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "the", "cat"];
    let vocab: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(i, w)| (w.to_string(), json!(i))).collect();
    let special = |id: usize, w: &str| json!({ "id": w, "ids": [id], "tokens": [w] });
    let t = json!({
        "version": "1.0",
        "truncation": longest.map(|n| json!({ "direction": "Right", "max_length": n, "strategy": "LongestFirst", "stride": 0 })),
        "padding": { "strategy": { "Fixed": 16 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "[PAD]" },
        "added_tokens": [],
        "normalizer": { "type": "Lowercase" },
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "[CLS]", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                { "SpecialToken": { "id": "[SEP]", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "[CLS]": special(2, "[CLS]"), "[SEP]": special(3, "[SEP]") } },
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" },
    });
    std::fs::write(dir.join("tokenizer.json"), t.to_string()).expect("written");
}

fn run(model: &Path, more: &[&str]) -> Done {
    halcyon(&[&["run", text(model), "--backend", "cpu"], more].concat())
}

/// The values of each output of a row.
fn row(v: &Value, i: usize) -> Vec<Value> {
    v["rows"][i]["outputs"].as_array().expect("outputs").iter().map(|o| o["values"].clone()).collect()
}

#[test]
fn text_fills_ids_mask_and_types() {
    let dir = tempfile::tempdir().expect("a folder");
    tokenizer(dir.path(), None);
    for (ids, mask) in [("input_ids", "attention_mask"), ("ids", "mask")] {
        let m = echo(dir.path(), ids, Some(mask), Err("s"));
        let v = run(&m, &["-i", "text:Hello  world", "--json"]).ok().json();
        let all: Vec<&Value> =
            v["outputs"].as_array().expect("outputs").iter().map(|o| &o["values"]).collect();
        assert_eq!(all, [&json!([2, 4, 5, 3]), &json!([1, 1, 1, 1]), &json!([0, 0, 0, 0])]);
        // Several lines are padded to the longest.
        let lines = dir.path().join("lines.txt");
        std::fs::write(&lines, "hello\r\n\r\nthe cat nowhere\r\n").expect("written");
        let at = format!("@{}", text(&lines));
        for batch in [&["--batch", "1"][..], &["--batch", "2"], &[]] {
            let v = run(&m, &[&["-i", &at, "--json"], batch].concat()).ok().json();
            assert_eq!(v["rows"].as_array().map(Vec::len), Some(3), "{v:#}");
            assert_eq!(v["rows"][2]["text"], "the cat nowhere");
            assert_eq!(row(&v, 0), [json!([2, 4, 3, 0, 0]), json!([1, 1, 1, 0, 0]), json!([0, 0, 0, 0, 0])]);
            assert_eq!(row(&v, 1)[0], json!([2, 3, 0, 0, 0]));
            assert_eq!(row(&v, 2)[..2], [json!([2, 6, 7, 1, 3]), json!([1, 1, 1, 1, 1])]);
        }
        let v = run(&m, &["-i", "text:hello", "-i", "text:the cat", "--json"]).ok().json();
        assert_eq!(row(&v, 1)[0], json!([2, 6, 7, 3]));
    }
    // Text for a named input, whatever its name.
    let m = echo(dir.path(), "words", Some("mask"), Err("s"));
    run(&m, &["-i", "text:hello"]).fails(2, &["input_ids, ids", "words i64[b, s]", "NAME=text:"]);
    let v = run(&m, &["-i", "words=text:hello", "--json"]).ok().json();
    assert_eq!(v["outputs"][0]["values"], json!([2, 4, 3]));
}

#[test]
fn lines_that_are_too_long_are_cut_with_a_warning() {
    let dir = tempfile::tempdir().expect("a folder");
    tokenizer(dir.path(), None);
    let long = "text:the cat the cat the cat";
    let m = echo(dir.path(), "ids", Some("mask"), Ok(5));
    let d = run(&m, &["-i", long, "--json"]).ok();
    assert_eq!(d.json()["outputs"][0]["values"], json!([2, 6, 7, 6, 3]));
    assert!(d.err.contains("warning: line 1 is cut to the 5 tokens that the shape of 'ids' allows"), "{d:?}");
    let d = run(&m, &["-i", "text:cat", "--json"]).ok();
    assert_eq!((&d.json()["outputs"][0]["values"], d.err.as_str()), (&json!([2, 7, 3, 0, 0]), ""));
    // The tokenizer's limit, and the limit of the model's configuration.
    let m = echo(dir.path(), "ids", Some("mask"), Err("s"));
    assert_eq!(run(&m, &["-i", long, "--json"]).ok().json()["outputs"][0]["shape"], json!([1, 8]));
    std::fs::write(dir.path().join("config.json"), r#"{"max_position_embeddings": 6}"#).expect("written");
    let d = run(&m, &["-i", long, "-i", "text:cat"]).ok();
    assert!(d.err.contains("6 tokens that config.json allows"), "{d:?}");
    tokenizer(dir.path(), Some(4));
    let d = run(&m, &["-i", long, "--json"]).ok();
    assert!(d.err.contains("4 tokens that tokenizer.json allows"), "{d:?}");
    assert_eq!(d.json()["outputs"][0]["values"], json!([2, 6, 7, 3]));
}

#[test]
fn text_without_a_tokenizer_says_what_the_model_takes() {
    let dir = tempfile::tempdir().expect("a folder");
    let m = echo(dir.path(), "input_ids", Some("attention_mask"), Err("s"));
    run(&m, &["-i", "text:hello"]).fails(
        2,
        &[
            "tokenizer.json",
            "--tokenizer",
            "input_ids i64[b, s]",
            "attention_mask",
            "--input input_ids='[1,2,3]'",
        ],
    );
    run(&m, &["-i", "@gone.txt"]).fails(1, &["gone.txt", "no such file"]);
    std::fs::write(dir.path().join("tokenizer.json"), "{}").expect("written");
    run(&m, &["-i", "text:hello"]).fails(1, &["tokenizer.json", "not a tokenizer"]);
    let other = tempfile::tempdir().expect("a folder");
    tokenizer(other.path(), None);
    let named = other.path().join("tokenizer.json");
    let v = run(&m, &["-i", "text:hello", "--tokenizer", text(&named), "--json"]).ok().json();
    assert_eq!(v["outputs"][0]["values"], json!([2, 4, 3]));
    // A model of floats does not accept text.
    save(&add(DType::F32), &m);
    run(&m, &["-i", "text:hello"]).fails(2, &["a f32[n, 3]", "b f32[n, 3]"]);
}

#[derive(Deserialize)]
struct Sentence {
    text: String,
    embedding: Vec<f64>,
}

#[test]
fn sentences_of_a_file_become_their_embeddings() {
    let test = "sentences_of_a_file_become_their_embeddings";
    let Some(dir) = models(test, "minilm") else { return };
    let Some(weights) = prepared(test, "HALCYON_MINILM", "") else {
        return;
    };
    let work = tempfile::tempdir().expect("a folder");
    let at = |n: &str| work.path().join(n);
    std::fs::copy(dir.join("minilm.onnx"), at("minilm.onnx")).expect("the model");
    for n in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(weights.join(n), at(n)).expect("a file of the model");
    }
    let sentences: Vec<Sentence> =
        serde_json::from_slice(&std::fs::read(dir.join("expected.json")).expect("expected.json"))
            .expect("is JSON");
    let lines: Vec<&str> = sentences.iter().map(|s| s.text.as_str()).collect();
    std::fs::write(at("lines.txt"), lines.join("\n") + "\n").expect("written");
    let input = format!("@{}", text(&at("lines.txt")));
    for batch in ["3", "32"] {
        let out = at("embeddings.npy");
        run(&at("minilm.onnx"), &["-i", &input, "--batch", batch, "-o", text(&out)]).ok();
        let e = npy::read(&out).expect("saved");
        assert_eq!(e.dims.as_slice(), [sentences.len(), 384]);
        for (row, s) in e.to_vec::<f64>().chunks(384).zip(&sentences) {
            for (got, want) in row.iter().zip(&s.embedding) {
                assert!((got - want).abs() <= 1e-5, "\"{}\": {got}, expected {want}", s.text);
            }
        }
    }
}

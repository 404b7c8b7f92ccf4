//! The type that each tensor gets, against what llama.cpp chose for the same shapes.

use halcyon_formats::gguf::{self, GgmlType, Gguf, TensorInfo, Value};
use halcyon_models::export::{FILE_TYPES, FileType, MixtureOptions, TypeRule, choose};
use serde_json::Value as Json;

/// A model's shapes: metadata, and the matrices in order.
struct Shapes {
    metadata: Gguf,
    tensors: Vec<TensorInfo>,
}

fn shapes(case: &Json) -> Shapes {
    let arch = case["arch"].as_str().expect("a name");
    let n = |key: &str| case[key].as_u64().expect("a number");
    let key = |k: &str, v: u64| (format!("{arch}.{k}"), Value::from(v as u32));
    let metadata = vec![
        ("general.architecture".to_string(), arch.into()),
        key("block_count", n("layers")),
        key("attention.head_count", n("heads")),
        key("attention.head_count_kv", n("shared")),
        key("expert_count", n("experts")),
    ];
    let rows = case["rows"].as_object().expect("sizes");
    let matrix = |name: String, k: &Json| {
        let k = k.as_u64().expect("a size") as usize;
        let shape = if name.contains("_exps") { vec![2, 2, k] } else { vec![2, k] };
        TensorInfo::new(name, &shape, GgmlType::F32)
    };
    let top = rows.iter().filter(|(n, _)| is_top(n)).map(|(n, k)| matrix(n.clone(), k));
    let of_layer =
        |i| rows.iter().filter(|(n, _)| !is_top(n)).map(move |(n, k)| matrix(format!("blk.{i}.{n}"), k));
    let tensors = top.chain((0..n("layers")).flat_map(of_layer)).collect();
    let file = gguf::encode(&metadata, &[]).expect("a file");
    Shapes { metadata: Gguf::parse(file.into(), "shapes.gguf").expect("a file"), tensors }
}

fn is_top(name: &str) -> bool {
    name.starts_with("token_embd") || name.starts_with("output.")
}

/// `q6_k*3 q4_k` as a list.
fn expanded(text: &str) -> Vec<String> {
    let one = |part: &str| match part.split_once('*') {
        Some((ty, n)) => vec![ty.to_string(); n.parse().expect("a number")],
        None => vec![part.to_string()],
    };
    text.split(' ').flat_map(one).collect()
}

fn stored() -> Json {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/types.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("the file")).expect("JSON")
}

#[test]
fn types_are_those_of_llama_cpp() {
    for (name, case) in stored().as_object().expect("cases") {
        let s = shapes(case);
        let files = case["types"].as_object().expect("types");
        assert_eq!(files.len(), FILE_TYPES.len(), "{name}: types of files");
        for (file, expected) in files {
            let options = MixtureOptions::new(FileType::from_name(file).expect("a known type"));
            let got = choose(s.metadata.metadata(), &s.tensors, &options).expect("types");
            for (t, ty) in s.tensors.iter().zip(got) {
                let (layer, kind) = match t.name.strip_prefix("blk.").and_then(|n| n.split_once('.')) {
                    Some((i, kind)) => (i.parse().expect("a layer"), kind),
                    None => (0usize, t.name.as_str()),
                };
                // What is absent stays f32.
                let want = expected.get(kind).map(|v| expanded(v.as_str().expect("a list"))[layer].clone());
                assert_eq!(ty.name(), want.as_deref().unwrap_or("f32"), "{name} {file}: {}", t.name);
            }
        }
    }
}

#[test]
fn options_come_before_the_mixture() {
    let all = stored();
    let s = shapes(&all["1b"]);
    let mut options = MixtureOptions::new(FileType::from_name("Q4_K").expect("an alias"));
    assert_eq!(options.file.name, "q4_k_m");
    options.output = GgmlType::from_name("q8_0");
    options.embedding = GgmlType::from_name("f16");
    options.rules = vec![
        TypeRule { pattern: "blk.1.*down".into(), ty: GgmlType::BF16 },
        TypeRule { pattern: "ffn_down".into(), ty: GgmlType::from_name("q5_k").expect("a type") },
    ];
    let types = choose(s.metadata.metadata(), &s.tensors, &options).expect("types");
    let of = |name: &str| {
        let i = s.tensors.iter().position(|t| t.name == name).expect("a tensor");
        types[i].name()
    };
    assert_eq!(of("output.weight"), "q8_0");
    assert_eq!(of("token_embd.weight"), "f16");
    assert_eq!(of("blk.1.ffn_down.weight"), "bf16");
    assert_eq!(of("blk.0.ffn_down.weight"), "q5_k");
    assert_eq!(of("blk.0.ffn_up.weight"), "q4_k");
    options.pure = true;
    options.rules.clear();
    let types = choose(s.metadata.metadata(), &s.tensors, &options).expect("types");
    assert_eq!(types.iter().filter(|t| t.name() == "q4_k").count(), s.tensors.len() - 2);
}

#[test]
fn another_type_is_named_with_those_that_are_known() {
    let e = FileType::from_name("q9_k").expect_err("an error").to_string();
    assert!(e.contains("'q9_k'") && e.contains("q4_k_m") && e.contains("mxfp4_moe"), "{e}");
}

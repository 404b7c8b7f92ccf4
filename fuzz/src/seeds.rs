//! Writes the initial inputs for fuzzing: `seeds CORPUS [FOLDER]…`. The folders hold ONNX models and tensors
//! of the test suite. One of each kind is used.

use halcyon::{Backend, Session};
use halcyon_formats::gguf::{self, GgmlType, TensorInfo};
use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::tensor::{self, External};
use halcyon_formats::onnx::{Model, ops};
use halcyon_formats::{ConstData, data, npy, npz};
use halcyon_fuzz::seed_models;
use halcyon_ir::{DType, Graph, Scalar, TensorType};
use image::{DynamicImage, ImageFormat};
use prost::Message;
use std::collections::{BTreeMap, HashSet};
use std::error::Error;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

/// Maximum sizes in bytes of a model and of a tensor.
const MODEL: u64 = 6144;
const TENSOR: u64 = 512;

struct Corpus(PathBuf);

impl Corpus {
    fn put(&self, target: &str, name: &str, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        let dir = self.0.join(target);
        std::fs::create_dir_all(&dir)?;
        Ok(std::fs::write(dir.join(name), bytes)?)
    }
}

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for e in entries.flatten() {
        match e.path() {
            p if p.is_dir() => files(&p, out),
            p => out.push(p),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let c = Corpus(args.next().ok_or("usage: seeds CORPUS [FOLDER]...")?.into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");

    // Models.
    for (name, m) in seed_models::all() {
        c.put("onnx_model", name, &m.encode_to_vec())?;
    }
    c.put("onnx_model", "digits", &std::fs::read(root.join("models/digits.onnx"))?)?;
    for (k, op) in ops::rows().enumerate() {
        // One node of every operator, with operands that fit most operators.
        let ports = ["a", "b"].map(|n| seed_models::port(n, 1, &[2, 3]));
        let n = seed_models::node(op.op, &["a", "b"][..1 + k % 2], &["y"]);
        let g = seed_models::graph(vec![n], ports.into(), vec![seed_models::port("y", 1, &[])], vec![]);
        c.put(
            "onnx_model",
            &format!("op-{}", op.op),
            &seed_models::model(21.max(op.since), g).encode_to_vec(),
        )?;
    }
    let mut found = vec![];
    args.for_each(|dir| files(Path::new(&dir), &mut found));
    found.sort();
    let small = |p: &Path, most| p.metadata().is_ok_and(|m| m.len() <= most);
    let mut kinds: BTreeMap<Vec<String>, PathBuf> = BTreeMap::new();
    for p in found.iter().filter(|p| p.extension().is_some_and(|e| e == "onnx") && small(p, MODEL)) {
        let Ok(m) = ModelProto::decode(&*std::fs::read(p)?) else { continue };
        let Some(g) = m.graph else { continue };
        let mut kind: HashSet<String> = g.node.iter().map(|n| n.op_type.clone()).collect();
        kind.extend(g.node.iter().flat_map(|n| &n.attribute).map(|a| a.name.clone()));
        let mut kind: Vec<String> = kind.into_iter().collect();
        kind.sort();
        kinds.entry(kind).or_insert_with(|| p.clone());
    }
    for (k, p) in kinds.values().enumerate() {
        c.put("onnx_model", &format!("suite-{k}"), &std::fs::read(p)?)?;
    }

    // Tensors, one of each dtype and rank.
    let mut seen = HashSet::new();
    for p in found.iter().filter(|p| p.extension().is_some_and(|e| e == "pb") && small(p, TENSOR)) {
        let b = std::fs::read(p)?;
        let kind = TensorProto::decode(&*b).map_or((-1, b.len()), |t| (t.data_type, t.dims.len()));
        if seen.insert(kind) {
            c.put("onnx_tensor", &format!("suite-{}", seen.len()), &b)?;
        }
    }
    let mut all = vec![];
    for d in DType::all() {
        for dims in [&[][..], &[3], &[2, 2], &[0, 4]] {
            let n = dims.iter().product::<usize>();
            let Ok(t) = data::from_scalars(d, dims, (0..n).map(|k| Scalar::F(k as f64))) else { continue };
            let name = format!("{d}-{}-{n}", dims.len());
            c.put("onnx_tensor", &name, &tensor::encode(&t, "t").encode_to_vec())?;
            if let Ok(b) = npy::encode(&t) {
                c.put("npy", &name, &b)?;
                all.push((name, t));
            }
        }
    }
    let typed = TensorProto { dims: vec![2], data_type: 7, int64_data: vec![1, -1], ..Default::default() };
    c.put("onnx_tensor", "typed", &typed.encode_to_vec())?;
    let words = vec!["a".into(), "ü".into()];
    let text = TensorProto { dims: vec![2], data_type: 8, string_data: words, ..Default::default() };
    c.put("onnx_tensor", "text", &text.encode_to_vec())?;
    let sparse = SparseTensorProto {
        values: Some(seed_models::floats("s", &[2], &[1.0, 2.0])),
        indices: Some(seed_models::ints("", &[1, 4])),
        dims: vec![2, 3],
    };
    c.put("onnx_tensor", "sparse", &sparse.encode_to_vec())?;
    c.put("npy", "fortran", b"\x93NUMPY\x01\0\x3e\0{'descr': '>i2', 'fortran_order': True, 'shape': (2, 2), }     \n\0\x01\0\x02\0\x03\0\x04")?;

    // Archives. Their members are stored without compression.
    let few: Vec<(&str, &ConstData)> = all.iter().take(3).map(|(n, t)| (n.as_str(), t)).collect();
    c.put("npz", "stored", &npz::encode(&few)?)?;
    c.put("npz", "empty", &npz::encode(&[])?)?;
    let deflated = {
        let b = npz::encode(&[("x", &ConstData::from_slice(&[64], &[7i64; 64])?)])?;
        b[..b.len().min(4096)].to_vec()
    };
    c.put("npz", "run", &deflated)?;

    let st =
        |header: &str, body: &[u8]| [&(header.len() as u64).to_le_bytes(), header.as_bytes(), body].concat();
    let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},"a":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]}}"#;
    c.put("safetensors", "two", &st(header, &[0; 10]))?;
    c.put("safetensors", "none", &st("{}", &[]))?;
    c.put("safetensors", "empty", &st(r#"{"a":{"dtype":"I64","shape":[0,3],"data_offsets":[0,0]}}"#, &[]))?;

    let arrays = || gguf::Array::Array(vec![gguf::Array::I16(vec![1, 2]), gguf::Array::Bool(vec![true])]);
    let metadata: Vec<(String, gguf::Value)> = vec![
        ("general.architecture".into(), "llama".into()),
        ("general.alignment".into(), 8u32.into()),
        ("a.count".into(), 7u64.into()),
        ("a.flag".into(), true.into()),
        ("a.epsilon".into(), 1e-5f32.into()),
        ("a.tokens".into(), vec!["a".to_string(), "\u{e4}".into()].into()),
        ("a.scores".into(), vec![0.5f32, -1.0].into()),
        ("a.nested".into(), gguf::Value::Array(arrays())),
    ];
    c.put("gguf", "metadata", &gguf::encode(&metadata, &[])?)?;
    let body = vec![1u8; 1024];
    let all: Vec<(TensorInfo, &[u8])> = GgmlType::all()
        .map(|t| (TensorInfo::new(t.name(), &[1, t.elements()], t), &body[..t.bytes()]))
        .collect();
    for (k, some) in all.chunks(6).enumerate() {
        c.put("gguf", &format!("types-{k}"), &gguf::encode(&metadata[..k.min(metadata.len())], some)?)?;
    }

    for e in std::fs::read_dir(root.join("crates/halcyon-formats/tests/data/torch"))?.flatten() {
        if e.path().extension().is_some_and(|x| x == "pt") {
            c.put("torch", &e.file_name().to_string_lossy(), &std::fs::read(e.path())?)?;
        }
    }

    let grammars = [
        ("gbnf", "root ::= \"a\" x{1,3} | [^b-d\\n]* # c\nx ::= (\"\\u00e9\" | root)? .\n"),
        ("lark", "%import common.INT\n%ignore / +/\nstart: \"x\"i INT~1..2 | [\"a\"..\"c\"] /b+/ -> y\n"),
    ];
    for (name, text) in grammars {
        c.put("grammar", name, text.as_bytes())?;
    }
    let schemas = [
        ("object", r##"{"properties":{"a":{"type":"integer","minimum":-3},"b":{"$ref":"#"}},"required":["a"]}"##),
        ("array", r#"{"items":{"enum":["x",1]},"prefixItems":[{"pattern":"^a+$"}],"minItems":1,"maxItems":4}"#),
        ("merged", r##"{"allOf":[{"$ref":"#/$defs/n"},{"maximum":2.5}],"$defs":{"n":{"type":"number"}}}"##),
        ("either", r#"{"oneOf":[{"type":"null"},{"format":"date"}],"anyOf":[true,{"maxLength":3}]}"#),
    ];
    for (name, text) in schemas {
        c.put("json_schema", name, text.as_bytes())?;
    }
    let template = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}{{ bos_token }}";
    c.put("template", "plain", template.as_bytes())?;
    let tokenizer = r#"{"version":"1.0","added_tokens":[{"id":3,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],
        "normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
        "decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
        "model":{"type":"BPE","vocab":{"A":0,"b":1,"Ab":2},"merges":["A b"]}}"#;
    c.put("tokenizer", "bpe", tokenizer.as_bytes())?;
    let index = b"{\"metadata\":{},\"weight_map\":{\"model.norm.weight\":\"model-1.safetensors\"}}";
    let config = br#"{"model_type":"llama","hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,"intermediate_size":16,"vocab_size":32,"rms_norm_eps":1e-5}"#;
    c.put("folder", "llama", &[&index[..], &[0], &config[..]].concat())?;

    // Datasets. The first byte selects the format (`fuzz_targets/dataset.rs`).
    let idx = |code: u8, dims: &[u32], body: &[u8]| {
        let sizes: Vec<u8> = dims.iter().flat_map(|d| d.to_be_bytes()).collect();
        [&[0, 0, code, dims.len() as u8], &sizes[..], body].concat()
    };
    let bytes = idx(0x08, &[2, 1, 3], &[0, 1, 2, 3, 4, 255]);
    let floats = idx(0x0d, &[2], &[0x3f, 0x80, 0, 0, 0xc0, 0, 0, 0]);
    for (name, kind, content) in [
        ("idx-bytes", 0u8, &bytes[..]),
        ("idx-floats", 0, &floats),
        ("idx-bytes-gzip", 1, &bytes),
        ("idx-floats-gzip", 1, &floats),
        ("csv-classes", 2, b"a,y\n1,u\n-2.5e1,\"v,\"\"w\"\n"),
        ("csv-numbers", 2, b"\xef\xbb\xbfa, y\r\n1,0.5\r\n\r\n2, 3\r\n"),
        ("csv-no-header", 2 | 3 << 2, b"1\t2\n3\t4\n"),
        ("csv-no-label", 2 | 4 << 2, b"a,b\n1,2\n"),
        ("text", 3, "the \u{e4}hre \u{1f33e}".as_bytes()),
        ("text-windows", 3 | 2 << 2, b"hello hello"),
    ] {
        c.put("dataset", name, &[&[kind], content].concat())?;
    }
    let mut packed = flate2::write::GzEncoder::new(vec![0u8], flate2::Compression::fast());
    packed.write_all(&bytes)?;
    c.put("dataset", "idx-file-gzip", &packed.finish()?)?;

    // Images of every colour type, and the images of the suite's tests of ImageDecoder.
    for p in found.iter().filter(|p| p.ends_with("test_data_set_0/input_0.pb")) {
        let Some(name) = p.ancestors().nth(2).and_then(|d| d.file_name()?.to_str()) else { continue };
        if let Some(format) = name.strip_prefix("test_image_decoder_decode_") {
            let t = TensorProto::decode(&*std::fs::read(p)?)?;
            c.put("picture", format, &t.raw_data.unwrap_or_default())?;
        }
    }
    c.put("image", "digit", &std::fs::read(root.join("models/digit-7.png"))?)?;
    let kinds = [
        ("l8", DynamicImage::new_luma8(5, 3)),
        ("la8", DynamicImage::new_luma_a8(5, 3)),
        ("rgb8", DynamicImage::new_rgb8(5, 3)),
        ("rgba8", DynamicImage::new_rgba8(5, 3)),
        ("l16", DynamicImage::new_luma16(5, 3)),
        ("rgb16", DynamicImage::new_rgb16(5, 3)),
    ];
    for (name, i) in kinds {
        for format in [ImageFormat::Png, ImageFormat::Jpeg] {
            let mut b = Cursor::new(vec![]);
            if i.write_to(&mut b, format).is_ok() {
                for target in ["image", "picture"] {
                    c.put(target, &format!("{name}-{format:?}"), b.get_ref())?;
                }
            }
        }
    }

    // Graphs: the whole file, and the file without its first 16 bytes.
    let graph = |name: &str, g: &Graph| -> Result<(), Box<dyn Error>> {
        let b = g.to_bytes()?;
        c.put("graph", &format!("{name}-file"), &b)?;
        c.put("graph", name, &b[16..])
    };
    for (name, m) in seed_models::all() {
        if let Ok(i) = Model::new(m, External::none(), "m").and_then(|m| m.import(&[])) {
            graph(name, &i.graph)?;
        }
    }
    let mut g = Graph::new();
    let q = g.input("q", TensorType::new(DType::F32, [1usize, 2, 3, 4]));
    let y = g.attention(q, q, q, None, true, 0.5)?;
    g.output("y", y);
    graph("attention", &g)?;
    let x = [ConstData::splat(DType::F32, &[1, 2, 3, 4], 0.5.into())?];
    let session = Session::new(&Backend::cpu()?, g);
    let replay = session.replay_of(&x, &halcyon::Error::unsupported("a seed", "Change it"))?;
    c.put("replay", "attention", &replay.to_bytes()?)?;
    Ok(())
}

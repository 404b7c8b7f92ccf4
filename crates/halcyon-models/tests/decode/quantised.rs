//! Folders with quantised weights: every matrix is decoded bit for bit, is kept in the expected type, and
//! gives the stored logits.

use crate::common::*;
use halcyon::ir::dtype::ROWS;
use halcyon::prelude::*;
use halcyon::{ConstData, DType, Error};
use halcyon_formats::npz::Npz;
use halcyon_formats::safetensors::SafeTensors;
use halcyon_models::source::Weights;
use halcyon_models::{ModelFile, Source, family};
use halcyon_test::Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The folders of `tests/quantised`.
fn folders() -> Vec<PathBuf> {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/quantised");
    let all = std::fs::read_dir(data).expect("the stored models").flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = all.filter(|p| p.is_dir()).collect();
    all.sort();
    assert_eq!(all.len(), 18, "{all:?}");
    all
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
}

/// The values as f32, and the name of the type in which they are kept.
fn decoded(w: &Weights) -> (Vec<f32>, &'static str) {
    match w.blocks {
        Some(b) => {
            let mut v = vec![0f32; w.dims().iter().product()];
            b.decode(w.data.bytes(), &mut v);
            (v, b.name())
        }
        None => {
            let wide = halcyon_formats::data::cast(&w.data, DType::F32).expect("floats");
            (wide.to_vec::<f32>(), w.data.dtype.name())
        }
    }
}

#[test]
fn quantised_matrices_are_decoded_bit_for_bit() {
    for dir in folders() {
        let source = Source::open(&dir).expect("the folder opens");
        let spec = family::spec(&source).expect("the configuration is valid");
        let expected = json_of(&dir.join("expected.json"));
        let expected = expected.as_object().expect("an object");
        assert!(expected.len() >= 3, "{}", dir.display());
        for (name, want) in expected {
            let who = format!("{}: {name}", dir.display());
            let w = source.find(&spec, name).expect("it is read").expect("it is there");
            let (values, form) = decoded(&w);
            assert_eq!(form, want[0], "{who}");
            // Zeros lose their sign in some types.
            let bytes: Vec<u8> = values.iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect();
            let mut crc = flate2::Crc::new();
            crc.update(&bytes);
            assert_eq!(u64::from(crc.sum()), want[1].as_u64().expect("a number"), "{who}");
        }
    }
}

/// At level O0 every composite is its body, which decodes the blocks and multiplies in f32. The CPU's kernels
/// round activations to 8 bits.
#[test]
fn quantised_folders_compute_the_stored_logits() {
    let open =
        |level| Backend::builder().backend_type(BackendType::Cpu).level(level).build().expect("the CPU");
    let (plain, fast) = (open(Level::O0), open(Level::O2));
    for dir in folders() {
        let stored = Npz::open(&dir.join("expected.npz")).expect("the expected values");
        let get = |name: &str| stored.get(name).expect("an array");
        let ids: Vec<u32> = get("ids").to_vec::<i64>().iter().map(|v| *v as u32).collect();
        let want = get("logits").to_vec::<f64>();
        let mean = want.iter().sum::<f64>() / want.len() as f64;
        let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        let source = Source::open(&dir).expect("the folder opens");
        for (b, most) in [(&plain, 1e-3), (&fast, 0.25)] {
            let got = feed(&mut engine(&decoder(b, &source, 32), 1, 512), &ids, true);
            let far = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs() / std).fold(0.0, f64::max);
            assert!(far < most, "{} at {:?}: {far} standard deviations", dir.display(), b.level());
            println!("{} at {:?}: {far:.1e}", dir.display(), b.level());
        }
    }
}

/// A copy of a folder with another configuration and other tensors.
fn altered(dir: &Path, quantisation: Option<Value>, tensors: &BTreeMap<String, ConstData>) -> TempDir {
    let out = tempfile::tempdir().expect("a folder");
    let mut config = json_of(&dir.join("config.json"));
    if let Some(q) = quantisation {
        config["quantization_config"] = q;
    }
    std::fs::write(out.path().join("config.json"), config.to_string()).expect("it is written");
    // Thousands of files are written, so nothing waits for the disk.
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, t) in tensors {
        let row = ROWS.iter().find(|r| r.dtype == t.dtype).expect("a dtype");
        let end = data.len() + t.bytes().len();
        let info = json!({"dtype": row.safetensors, "shape": &t.dims[..], "data_offsets": [data.len(), end]});
        header.insert(name.clone(), info);
        data.extend_from_slice(t.bytes());
    }
    let header = Value::from(header).to_string();
    let parts = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data];
    std::fs::write(out.path().join("model.safetensors"), parts.concat()).expect("it is written");
    out
}

fn stored_tensors(dir: &Path) -> BTreeMap<String, ConstData> {
    let file = SafeTensors::open(&dir.join("model.safetensors")).expect("the tensors");
    file.names().map(|n| (n.to_string(), file.get(n).expect("a tensor"))).collect()
}

#[test]
fn methods_and_variants_that_are_not_read_are_named() {
    let dir = folders().remove(0);
    let tensors = stored_tensors(&dir);
    for (q, names) in [
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes"),
        (json!({"load_in_8bit": true}), "bitsandbytes"),
        (json!({"quant_method": "quark"}), "quark"),
        (json!({"quant_method": "fp8", "fmt": "e3m4"}), "e3m4"),
        (json!({"quant_method": "gptq", "bits": 5}), "5 bits"),
        (json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}), "marlin"),
        (json!({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}), "int16"),
        (json!({"quant_method": "awq", "version": "gemv"}), "gemv"),
        (json!({"quant_method": "awq", "bits": 8}), "8 bits"),
        (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "marlin-24"),
        (
            json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}),
            "sparse-24-bitmask",
        ),
        (
            json!({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}),
            "transform_config",
        ),
    ] {
        let e = Source::open(altered(&dir, Some(q.clone()), &tensors).path()).expect_err("it is not read");
        assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains(names), "{q}: {e}");
    }
    let e = Source::open(altered(&dir, Some(json!({"quant_method": 3})), &tensors).path());
    assert!(matches!(e, Err(Error::Format { .. })), "{e:?}");
}

/// Tensors that are missing, have other shapes or types, or are full of ones.
#[test]
fn malformed_quantised_matrices_are_errors() {
    let zeros = |dtype: DType, dims: &[usize]| {
        let n: usize = dims.iter().product();
        halcyon_formats::data::from_bytes(dtype, dims, vec![0u8; dtype.bytes(n)].into()).expect("a tensor")
    };
    let mut rng = Rng::fresh("malformed_quantised_matrices_are_errors");
    let mut errors = 0;
    for dir in folders() {
        let all = stored_tensors(&dir);
        let own = |n: &&String| n.contains("q_proj.") || n.contains("experts.gate_up_proj_");
        for name in all.keys().filter(own).filter(|n| !n.ends_with("bias")) {
            let t = &all[name];
            let shapes = (0..t.dims.len()).flat_map(|axis| {
                [0, 1, t.dims[axis] - t.dims[axis].min(1), t.dims[axis] + 1].map(|n| {
                    let mut dims = t.dims.to_vec();
                    dims[axis] = n;
                    dims
                })
            });
            let shapes: Vec<Vec<usize>> = shapes.chain([vec![], vec![t.dims.iter().product()]]).collect();
            let mut changes: Vec<Option<ConstData>> =
                shapes.iter().map(|d| Some(zeros(t.dtype, d))).collect();
            changes.extend([DType::F32, DType::I64, DType::U8].map(|dtype| Some(zeros(dtype, &t.dims))));
            let ones = vec![0xffu8; t.bytes().len()];
            changes.push(Some(
                halcyon_formats::data::from_bytes(t.dtype, &t.dims, ones.into()).expect("a tensor"),
            ));
            changes.push(None);
            // Each run draws a third.
            let first = rng.below(3);
            for change in changes.into_iter().skip(first).step_by(3) {
                let mut tensors = all.clone();
                let who = format!("{}: {name} {:?}", dir.display(), change.as_ref().map(|c| c.dims.clone()));
                match change {
                    Some(c) => tensors.insert(name.clone(), c),
                    None => tensors.remove(name),
                };
                let folder = altered(&dir, None, &tensors);
                let open = || -> Result<bool> {
                    let file = ModelFile::open(folder.path())?;
                    file.warnings()?;
                    let which = if name.contains("experts") {
                        "blk.0.ffn_gate_exps.weight"
                    } else {
                        "blk.0.attn_q.weight"
                    };
                    Ok(file.source.find(&file.spec, which)?.is_some())
                };
                match catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| panic!("{who} panics")) {
                    Ok(_) => {}
                    Err(e) => {
                        assert!(!matches!(e, Error::Internal(_)), "{who}: {e}");
                        errors += 1;
                    }
                }
            }
        }
    }
    assert!(errors > 100, "{errors}");
    println!("{errors} errors");
}

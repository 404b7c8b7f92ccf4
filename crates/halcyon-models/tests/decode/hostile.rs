//! Configurations with missing keys, wrong types and absurd numbers give errors: nothing panics, and no
//! memory is taken for them.

use crate::common::*;
use crate::stored::folders;
use halcyon::Error;
use halcyon::prelude::*;
use halcyon_formats::gguf::Value;
use halcyon_models::{Decoder, Engine, EngineOptions, Feed, Source, Spec, family};
use halcyon_test::{Rng, one_in};
use serde_json::{Value as Json, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Errors that say that the model is at fault, not Halcyon.
fn typed(e: &Error) -> bool {
    !matches!(e, Error::Internal(_))
}

/// Opens, loads and runs. `original` is the specification without the change.
fn attempt(b: &Backend, source: &Source, original: &Spec) -> Result<()> {
    let spec = family::spec(source)?;
    if spec == *original {
        return Ok(());
    }
    let decoder = Arc::new(Decoder::load(b, source, spec, 8)?);
    let options = EngineOptions { positions: 8, page: 4, ..EngineOptions::default() };
    let mut e = Engine::new(decoder, options)?;
    e.feed(&[Feed { sequence: 0, tokens: &[0, 1, 2], all: false }])?;
    Ok(())
}

/// Runs an attempt. Returns whether it gave an error.
fn survives(what: &str, f: impl FnOnce() -> Result<()>) -> bool {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => false,
        Ok(Err(e)) => {
            assert!(typed(&e), "{what}: {e}");
            assert!(!e.to_string().is_empty(), "{what}");
            true
        }
        Err(_) => panic!("{what} panics"),
    }
}

/// A change of a key; `None` removes it.
fn changes() -> Vec<Option<Json>> {
    let mut all = vec![None];
    all.extend(
        [
            json!(null),
            json!(0),
            json!(1),
            json!(-1),
            json!(3),
            json!(0.5),
            json!(1u64 << 31),
            json!(u64::MAX),
            json!(1e300),
            json!("text"),
            json!([]),
            json!({}),
            json!([{"a": 1}, "b", -1]),
            json!(true),
        ]
        .map(Some),
    );
    all
}

fn changed(at: &mut Json, key: &str, to: &Option<Json>) {
    if let Some(map) = at.as_object_mut() {
        match to {
            Some(v) => map.insert(key.into(), v.clone()),
            None => map.remove(key),
        };
    }
}

#[test]
fn every_key_of_a_folders_configuration_may_be_wrong() {
    if halcyon_test::left_out("every_key_of_a_folders_configuration_may_be_wrong") {
        return;
    }
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    // Every folder is loaded hundreds of times, so one run takes some of them.
    let mut rng = Rng::fresh("every_key_of_a_folders_configuration_may_be_wrong");
    let step = one_in(6);
    let first = rng.below(step);
    let (mut refused, mut tried) = (0, 0);
    for dir in folders().into_iter().skip(first).step_by(step) {
        tried += 1;
        let mut source = Source::open(&dir).expect("the model opens");
        let original = family::spec(&source).expect("the configuration is valid");
        let Source::Folder(folder) = &source else { panic!("not a folder") };
        let whole = folder.config.clone();
        let keys = |v: &Json| -> Vec<String> {
            v.as_object().map(|m| m.keys().cloned().collect()).unwrap_or_default()
        };
        // The keys of the rotation are one level deeper.
        let nested = ["rope_parameters", "rope_scaling"].into_iter();
        let nested = nested.flat_map(|n| keys(&whole[n]).into_iter().map(move |k| (Some(n), k)));
        let all: Vec<(Option<&str>, String)> =
            keys(&whole).into_iter().map(|k| (None, k)).chain(nested).collect();
        assert!(all.len() > 10, "{all:?}");
        for (outer, key) in &all {
            for to in changes() {
                let mut config = whole.clone();
                match outer {
                    Some(o) => changed(&mut config[*o], key, &to),
                    None => changed(&mut config, key, &to),
                }
                if let Source::Folder(f) = &mut source {
                    f.config = config;
                }
                let what = format!("{}: {outer:?} {key} = {to:?}", dir.display());
                refused += usize::from(survives(&what, || attempt(&cpu, &source, &original)));
            }
        }
    }
    assert!(refused > 60 * tried, "{refused} of {tried} models");
}

#[test]
fn every_key_of_a_file_may_be_wrong() {
    if halcyon_test::left_out("every_key_of_a_file_may_be_wrong") {
        return;
    }
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let weights = tensors(None);
    let archs: Vec<&str> = family::FAMILIES.iter().map(|f| f.name).collect();
    let mut refused = 0;
    for arch in archs {
        let plain = metadata(arch);
        let original = family::spec(&file(&plain, &weights));
        let values = [
            Value::from(0u32),
            Value::from(1u32),
            Value::from(3u32),
            Value::from(u64::MAX),
            Value::from(-1i32),
            Value::from(f32::NAN),
            Value::from(f32::INFINITY),
            Value::from("text"),
            Value::from(true),
            Value::from(vec![1u32, 2]),
        ];
        // Keys that the plain file lacks, too.
        let more = [
            "attention.key_length",
            "attention.sliding_window",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
            "expert_shared_count",
            "expert_group_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "nextn_predict_layers",
            "leading_dense_block_count",
        ]
        .map(|k| format!("{arch}.{k}"));
        let keys: Vec<String> = plain.iter().map(|(k, _)| k.clone()).chain(more).collect();
        for key in keys {
            let rest: Vec<(String, Value)> = plain.iter().filter(|(k, _)| *k != key).cloned().collect();
            for to in std::iter::once(None).chain(values.iter().cloned().map(Some)) {
                let what = format!("{key} = {to:?}");
                let mut m = rest.clone();
                m.extend(to.map(|v| (key.clone(), v)));
                let source = file(&m, &weights);
                refused += usize::from(survives(&what, || match &original {
                    Ok(o) => attempt(&cpu, &source, o),
                    Err(_) => family::spec(&source).map(|_| ()),
                }));
            }
        }
    }
    assert!(refused > 300, "{refused}");
}

#[test]
fn errors_name_what_is_wrong() {
    let weights = tensors(None);
    let source = |key: &str, v: Option<Value>| {
        let mut m = metadata("llama");
        m.retain(|(k, _)| k != key);
        m.extend(v.map(|v| (key.to_string(), v)));
        family::spec(&file(&m, &weights)).expect_err("a wrong configuration").to_string()
    };
    for (key, v, parts) in [
        ("llama.attention.head_count", Some(Value::from(0u32)), ["head_count", "0"]),
        ("llama.attention.head_count", None, ["llama.attention.head_count", ""]),
        ("llama.block_count", Some(Value::from(u64::MAX)), ["layers", "4096"]),
        ("llama.embedding_length", Some(Value::from("wide")), ["llama.embedding_length", ""]),
        ("llama.attention.head_count_kv", Some(Value::from(3u32)), ["3 key heads", "4 heads"]),
        ("general.architecture", Some(Value::from("mamba9")), ["mamba9", "gpt-oss"]),
    ] {
        let e = source(key, v);
        parts.iter().for_each(|p| assert!(e.contains(p), "{p}: {e}"));
    }
}

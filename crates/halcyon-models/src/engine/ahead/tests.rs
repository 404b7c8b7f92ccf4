//! What the layer predicts, against the formulas of vLLM in float64 (`xtask/scripts/mtp_case.py`).

#[path = "../../../tests/common/mtp.rs"]
mod cases;

use super::*;
use crate::engine::EngineOptions;
use crate::export::{Content, WriteOptions, write, write_folder};
use crate::model::ModelFile;
use crate::sample::Sampling;
use halcyon::{Backend, DType};
use halcyon_formats::gguf::GgmlType;
use halcyon_formats::npz::Npz;
use std::path::Path;

struct Case {
    ids: Vec<u32>,
    /// The tokens after each of `ids`.
    after: Vec<u32>,
    logits: Vec<f64>,
    drafts: Vec<u32>,
}

fn case(name: &str) -> Case {
    let stored = Npz::open(&cases::stored(name, "expected.npz")).unwrap();
    let get = |name: &str| stored.get(name).unwrap();
    let ids = |name: &str| -> Vec<u32> { get(name).to_vec::<i64>().iter().map(|v| *v as u32).collect() };
    let prompt = ids("ids");
    Case {
        after: [&prompt[1..], &ids("next")].concat(),
        ids: prompt,
        logits: [get("ahead").to_vec::<f64>(), get("draft_logits").to_vec::<f64>()[..].to_vec()].concat(),
        drafts: ids("drafts"),
    }
}

fn decoders(path: &Path) -> [Arc<Decoder>; 2] {
    let b = Backend::cpu().unwrap();
    let file = ModelFile::open(path).unwrap();
    let main = file.load(&b, 64).unwrap();
    let ahead = file.load_ahead(&main, 64).unwrap().expect("a layer for further tokens");
    [Arc::new(main), Arc::new(ahead)]
}

fn options(chunk: usize) -> EngineOptions {
    EngineOptions { positions: 64, page: 4, cache: DType::F32.into(), chunk, ..EngineOptions::default() }
}

/// The logits at each position of the prompt, then those of each proposal.
fn logits(path: &Path, c: &Case) -> Vec<f32> {
    let [main, layer] = decoders(path);
    let mut main = Engine::of_activations(main, options(512)).unwrap();
    let before = main.feed(&[Feed { sequence: 0, tokens: &c.ids, all: true }]).unwrap().remove(0);
    let of = |chunk| Engine::of(layer.clone(), options(chunk), Want::only(Kind::Ahead)).unwrap();
    let hidden = layer.spec.hidden;
    let mut one = of(512);
    let (mut out, mut last) = (vec![], Default::default());
    for (t, x) in c.after.iter().zip(before.chunks(hidden)) {
        last = one.feed_after(0, &[*t], x).unwrap();
        out.extend_from_slice(&last[0]);
    }
    for chunk in [512, 5] {
        let whole = of(chunk).feed_after(0, &c.after, &before).unwrap();
        assert_eq!(whole, last, "{}: in chunks of {chunk}", path.display());
    }
    for t in &c.drafts {
        out.extend_from_slice(&last[0]);
        last = one.feed_after(0, &[*t], &last[1]).unwrap();
    }
    out
}

fn compare(who: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{who}");
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    let far = |(g, w): (&f32, &f64)| g.is_nan() || (f64::from(*g) - w).abs() > 1e-3 * std;
    if let Some(at) = got.iter().zip(want).position(far) {
        panic!("{who}: logit {at} is {}, expected {}, deviation {std}", got[at], want[at]);
    }
}

/// Folders, the files made of them, and the folders made of these.
#[test]
fn the_layer_computes_the_stored_logits() {
    let dir = tempfile::tempdir().unwrap();
    for name in cases::FAMILIES {
        let c = case(name);
        let from = cases::folder(dir.path(), name);
        compare(name, &logits(&from, &c), &c.logits);
        let (file, back) = (dir.path().join("m.gguf"), dir.path().join(format!("{name}-back")));
        let source = ModelFile::open(&from).unwrap().source;
        let content = Content::of(&source).unwrap();
        let types: Vec<GgmlType> = content.tensors.iter().map(|t| t.info.ty).collect();
        let mut options =
            WriteOptions { threads: None, requantise: false, interrupted: &|| false, progress: &mut || {} };
        write(&content, &types, &file, &mut options).unwrap();
        let layer = format!("blk.{}.nextn.", ModelFile::open(&from).unwrap().spec.layers.len());
        let all = content.tensors.iter().filter_map(|t| t.info.name.strip_prefix(&layer));
        let all: Vec<&str> = all.filter_map(|n| n.strip_suffix(".weight")).collect();
        // The names of llama.cpp's converter, in their order.
        let own = ["eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm"];
        let shared = name.starts_with("qwen");
        let want = own.into_iter().filter(|n| !shared || !["embed_tokens", "shared_head_head"].contains(n));
        assert!(want.eq(all), "{name}");
        compare(&format!("{name} as a file"), &logits(&file, &c), &c.logits);
        write_folder(&ModelFile::open(&file).unwrap().source, &back, DType::F32, &|| false, &mut |_| {})
            .unwrap();
        compare(&format!("{name} as a folder again"), &logits(&back, &c), &c.logits);
    }
}

/// The model hands its activations over, whatever steps they come from.
#[test]
fn an_engine_proposes_the_stored_tokens() {
    let dir = tempfile::tempdir().unwrap();
    for name in cases::FAMILIES {
        let c = case(name);
        let [main, layer] = decoders(&cases::folder(dir.path(), name));
        for chunk in [512, 5, 1] {
            let mut e = Engine::new(main.clone(), options(chunk)).unwrap();
            e.look_ahead(Some(layer.clone())).unwrap();
            let sampler = || Sampler::new(&Sampling::greedy()).unwrap();
            for again in [false, true] {
                let who = format!("{name} in chunks of {chunk}, again: {again}");
                e.feed(&[Feed { sequence: 0, tokens: &c.ids, all: false }]).unwrap();
                let past = [&c.ids[..], &c.after[c.after.len() - 1..]].concat();
                assert_eq!(e.propose_ahead(0, &past, 3, sampler()).unwrap(), c.drafts, "{who}");
                // The activations are used up until the model computes the token.
                assert!(e.propose_ahead(0, &past, 3, sampler()).unwrap().is_empty(), "{who}");
                let rest = [&past[past.len() - 1..], &c.drafts[..]].concat();
                e.feed(&[Feed { sequence: 0, tokens: &rest, all: true }]).unwrap();
                // Two proposals are rejected; then the model goes on after the first one.
                assert_eq!(e.truncate(0, past.len() + 1), past.len() + 1);
                let past = [&past[..], &c.drafts[..1], &[5]].concat();
                let next = e.propose_ahead(0, &past, 1, sampler()).unwrap();
                let mut other = Engine::new(main.clone(), options(7)).unwrap();
                other.look_ahead(Some(layer.clone())).unwrap();
                other.feed(&[Feed { sequence: 0, tokens: &past[..past.len() - 1], all: false }]).unwrap();
                assert_eq!(next, other.propose_ahead(0, &past, 1, sampler()).unwrap(), "{who}");
                e.truncate(0, 0);
            }
        }
    }
}

#[test]
fn a_layer_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [main, _] = decoders(&cases::folder(dir.path(), "glm4_moe"));
    let [_, other] = decoders(&cases::folder(dir.path(), "qwen3_5"));
    let mut e = Engine::new(main.clone(), options(8)).unwrap();
    assert!(e.look_ahead(Some(other)).unwrap_err().to_string().contains("not of this model"));
    assert!(e.look_ahead(Some(main)).unwrap_err().to_string().contains("not of this model"));
    assert!(!e.looks_ahead());
}

/// A layer that fails keeps what waits, and proposes again when it works.
#[test]
fn a_failed_layer_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let c = case("glm4_moe");
    let [main, layer] = decoders(&cases::folder(dir.path(), "glm4_moe"));
    let mut e = Engine::new(main.clone(), options(512)).unwrap();
    e.look_ahead(Some(layer.clone())).unwrap();
    e.feed(&[Feed { sequence: 0, tokens: &c.ids, all: false }]).unwrap();
    let past = [&c.ids[..], &c.after[c.after.len() - 1..]].concat();
    let after = |e: &mut Engine, past: &[u32], n: usize| {
        e.propose_ahead(0, past, n, Sampler::new(&Sampling::greedy()).unwrap())
    };
    let propose = |e: &mut Engine| after(e, &past, 3);
    // Steps of fewer rows compute nothing, as if the device failed.
    let broken = |e: &mut Engine, rows: usize| {
        let (model, layout) = (layer.clone(), options(512).layout());
        let f: StepFn = Box::new(move |x: &[Tensor]| match x[0].dims().unwrap()[0] < rows {
            true => vec![],
            false => stages::stage_results(&model, 0, layout, Want::only(Kind::Ahead), x),
        });
        e.ahead.as_mut().unwrap().engine.stages[0].step = layer.backend().compile(f);
    };
    broken(&mut e, usize::MAX);
    assert!(propose(&mut e).is_err());
    broken(&mut e, 0);
    assert_eq!(propose(&mut e).unwrap(), c.drafts);
    // The prompt is computed, and the second proposal fails: the layer goes on after the model's next step.
    e.truncate(0, 0);
    e.feed(&[Feed { sequence: 0, tokens: &c.ids, all: false }]).unwrap();
    broken(&mut e, 2);
    assert!(propose(&mut e).is_err());
    broken(&mut e, 0);
    assert!(propose(&mut e).unwrap().is_empty());
    let rest = [&past[past.len() - 1..], &c.drafts[..1]].concat();
    e.feed(&[Feed { sequence: 0, tokens: &rest, all: true }]).unwrap();
    let past = [&past[..], &c.drafts[..2]].concat();
    let next = after(&mut e, &past, 1).unwrap();
    let mut whole = Engine::new(main, options(512)).unwrap();
    whole.look_ahead(Some(layer.clone())).unwrap();
    whole.feed(&[Feed { sequence: 0, tokens: &past[..past.len() - 1], all: false }]).unwrap();
    assert_eq!(next, after(&mut whole, &past, 1).unwrap());
}

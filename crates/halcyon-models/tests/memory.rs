//! Memory of a model: the estimate from its sizes, the prediction from its plans, and what it takes. The
//! tests run one after the other in a process of their own, because they read the memory of device and
//! process.

#[path = "common/mtp.rs"]
mod cases;

use halcyon::hal::Tag;
use halcyon::{Backend, host};
use halcyon_compat::inference::estimate_inference_memory;
use halcyon_formats::gguf::{self, GgmlType, TensorInfo, Value};
use halcyon_ir::DType;
use halcyon_models::fit::{StepSize, chat, generation, verification};
use halcyon_models::{
    Engine, EngineOptions, Feed, GenerateOptions, Generator, MemoryNeed, ModelFile, Placement, Sampling,
    Speculation, SpeculationOptions,
};
use halcyon_test::models;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

static ALONE: Mutex<()> = Mutex::new(());

/// Sizes in the order of `estimate_inference_memory`.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    inner: usize,
    layers: usize,
    vocabulary: usize,
    heads: usize,
    shared: usize,
}

fn file(path: &Path, s: Sizes) {
    let entries = [
        ("context_length", 8192),
        ("embedding_length", s.hidden),
        ("block_count", s.layers),
        ("feed_forward_length", s.inner),
        ("attention.head_count", s.heads),
        ("attention.head_count_kv", s.shared),
        ("vocab_size", s.vocabulary),
    ];
    let mut metadata: Vec<(String, Value)> =
        entries.iter().map(|(k, v)| (format!("llama.{k}"), Value::from(*v as u32))).collect();
    metadata.push(("general.architecture".into(), "llama".into()));
    metadata.push(("llama.attention.layer_norm_rms_epsilon".into(), 1e-5f32.into()));
    let (h, kv) = (s.hidden, s.hidden / s.heads * s.shared);
    let mut shapes = vec![
        ("token_embd".to_string(), vec![s.vocabulary, h]),
        ("output_norm".into(), vec![h]),
        ("output".into(), vec![s.vocabulary, h]),
    ];
    for i in 0..s.layers {
        let of = [
            ("attn_norm", vec![h]),
            ("ffn_norm", vec![h]),
            ("attn_q", vec![h, h]),
            ("attn_k", vec![kv, h]),
            ("attn_v", vec![kv, h]),
            ("attn_output", vec![h, h]),
            ("ffn_gate", vec![s.inner, h]),
            ("ffn_up", vec![s.inner, h]),
            ("ffn_down", vec![h, s.inner]),
        ];
        shapes.extend(of.map(|(n, d)| (format!("blk.{i}.{n}"), d)));
    }
    let mut seed = 3u64;
    // Equal constants are stored once, so no two tensors are equal.
    let mut make = |(name, dims): &(String, Vec<usize>)| {
        let mut bytes = vec![];
        for _ in 0..dims.iter().product() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bytes.extend(((seed >> 40) as f32 / (1u64 << 26) as f32 - 0.125).to_le_bytes());
        }
        (TensorInfo::new(format!("{name}.weight"), dims, GgmlType::Plain(DType::F32)), bytes)
    };
    let all: Vec<(TensorInfo, Vec<u8>)> = shapes.iter().map(&mut make).collect();
    let tensors: Vec<(TensorInfo, &[u8])> = all.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    std::fs::write(path, gguf::encode(&metadata, &tensors).expect("a file")).expect("written");
}

/// The estimate knows only the sizes; a plan also has buffers for rows that fill up a step, and the pool
/// rounds sizes up. So the estimate is held against the peak within 5 %, each part apart.
#[test]
fn s1_07_the_estimate_is_what_a_model_takes() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    let wide = Sizes { hidden: 256, inner: 768, layers: 6, vocabulary: 3000, heads: 8, shared: 4 };
    let deep = Sizes { hidden: 128, inner: 320, layers: 16, vocabulary: 1500, heads: 4, shared: 1 };
    // With the page that belongs to no sequence, the caches have sizes that the pool does not round up.
    for (s, positions) in [(wide, 992), (deep, 4064)] {
        file(&path, s);
        let e = estimate_inference_memory(
            s.hidden,
            s.inner,
            s.layers,
            s.vocabulary,
            s.heads,
            s.shared,
            positions,
            4,
        );
        let backend = Backend::cpu().expect("a device");
        let model = ModelFile::open(&path).expect("a model");
        let decoder = Arc::new(model.load(&backend, positions).expect("loaded"));
        let options =
            EngineOptions { positions, cache: DType::F32.into(), chunk: 1, ..EngineOptions::default() };
        let single = StepSize { rows: 1, logits: 1, sequences: 1 };
        let need = MemoryNeed::of(&decoder, options, &[single]).expect("planned");
        assert_eq!(backend.memory().allocated, 0, "planning allocates nothing");
        let mut engine = Engine::new(decoder, options).expect("a cache");
        for token in [1, 5, 9] {
            engine.feed(&[Feed { sequence: 0, tokens: &[token], all: false }]).expect("logits");
        }
        let m = backend.memory();
        let near = |what: &str, predicted: u64, measured: u64, percent: u64| {
            println!("{s:?} {what}: {predicted}, measured {measured}");
            assert!(
                predicted.abs_diff(measured) <= measured * percent / 100,
                "{what} {predicted} {measured}"
            );
        };
        near("need", need.device(), m.peak, 1);
        let weights = m.peak_by_tag.get(&Tag::Weights).copied().unwrap_or(0) + need.in_place;
        near("weights", e.weights_bytes, weights, 5);
        let io = m.peak_by_tag.get(&Tag::Io).copied().unwrap_or(0);
        near("cache", e.kv_cache_bytes, io, 5);
        near("total", e.total_bytes, m.peak + need.in_place, 5);
    }
}

/// Prompts of a chat have any length, so the steps of all sizes keep their buffers.
#[test]
fn a_chat_takes_what_its_steps_need() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    file(&path, Sizes { hidden: 256, inner: 768, layers: 4, vocabulary: 3000, heads: 8, shared: 4 });
    let backend = Backend::cpu().expect("a device");
    let model = ModelFile::open(&path).expect("a model");
    let decoder = Arc::new(model.load(&backend, 512).expect("loaded"));
    let options = EngineOptions { positions: 512, chunk: 128, ..EngineOptions::default() };
    let need = |steps: &[StepSize]| MemoryNeed::of(&decoder, options, steps).expect("planned").device();
    let (one, all) = (need(&generation(&decoder, options)), need(&chat(&decoder, options)));
    let mut engine = Engine::new(decoder.clone(), options).expect("a cache");
    for length in [128, 1, 100, 64, 30, 12, 8, 3, 2, 5] {
        let tokens: Vec<u32> = (0..length).collect();
        engine.feed(&[Feed { sequence: 0, tokens: &tokens, all: false }]).expect("logits");
    }
    let peak = backend.memory().peak;
    println!("a generation {one}, a chat {all}, measured {peak}");
    assert!(all.abs_diff(peak) <= peak / 100 && one < peak - peak / 50, "{one} {all} {peak}");
}

/// A layer for further tokens makes the model give the activations of all rows, also where the head is alone
/// on a device.
#[test]
fn a_followed_model_takes_what_is_predicted() {
    let _alone = ALONE.lock();
    let dir = tempfile::tempdir().expect("a folder");
    let model = ModelFile::open(&cases::folder(dir.path(), "glm4_moe")).expect("a model");
    let [a, b] = [(); 2].map(|()| Backend::cpu().expect("a device"));
    let mut placement = Placement::single(&a, model.spec.layers.len());
    placement.devices.push(b.clone());
    placement.head = 1;
    let main = Arc::new(model.load_on(placement, 128).expect("loaded"));
    let layer = model.load_ahead(&main, 128).expect("loaded").expect("a layer");
    let o = EngineOptions { positions: 128, chunk: 64, ..EngineOptions::default() };
    // The prompt, and steps with one proposal each.
    let prompt = StepSize { rows: 64, logits: 1, sequences: 1 };
    let steps = [&[prompt][..], &verification(o, 1)].concat();
    let beside = |model: MemoryNeed| {
        let own = MemoryNeed::of_ahead(&layer, o, &[prompt], &model).expect("planned");
        model.device() + own.device()
    };
    let need = beside(MemoryNeed::of_followed(&main, 1, o, &steps).expect("planned"));
    let less = beside(MemoryNeed::of_device(&main, 1, o, &steps).expect("planned"));
    assert_eq!(b.memory().allocated, 0, "planning allocates nothing");
    let mut engine = Engine::new(main, o).expect("a cache");
    let always = SpeculationOptions { most: 1, always: true };
    let mut s = Speculation::ahead(Arc::new(layer), &mut engine, always).expect("the layer is of the model");
    let options =
        GenerateOptions { max_tokens: Some(20), sampling: Sampling::greedy(), ..Default::default() };
    let tokens: Vec<u32> = (0..64).map(|i| i % 40).collect();
    // With the second prompt, all plans have their buffers.
    for _ in 0..2 {
        engine.truncate(0, 0);
        let on_text = &mut |_: &str| ControlFlow::Continue(());
        s.generate(&mut engine, 0, None, &tokens, &options, on_text).expect("a text");
    }
    let peak = b.memory().peak;
    println!("predicted {need}, without activations {less}, measured {peak}");
    assert!(need.abs_diff(peak) <= peak / 20 && less + peak / 50 < peak, "{need} {less} {peak}");
}

/// What a step could make new: plans, kernels, memory of the driver, and live buffers.
fn made(b: &Backend) -> [u64; 4] {
    let (c, m) = (b.counters(), b.memory());
    [b.cache_stats().plans_built, c.compiles, c.allocations, m.allocated]
}

#[test]
fn a_generation_of_4096_tokens_makes_nothing_after_its_first_block() {
    let _alone = ALONE.lock();
    let name = "a_generation_of_4096_tokens_makes_nothing_after_its_first_block";
    let Some(dir) = models(name, "stories260k") else { return };
    let b = Backend::cpu().expect("the CPU");
    let file = ModelFile::open(&dir.join("stories260k-q8_0.gguf")).expect("a model");
    // Eight times the context for which the model was made: the text is nonsense, the work is not.
    let options = EngineOptions { positions: 4352, ..EngineOptions::default() };
    let decoder = Arc::new(file.load(&b, options.positions).expect("loaded"));
    let engine = Engine::new(decoder, options).expect("a cache");
    let mut g = Generator::new(engine, file.tokenizer().expect("a tokenizer"), None);
    let options = GenerateOptions {
        max_tokens: Some(4096),
        ignore_eos: true,
        sampling: Sampling { seed: 4, ..Sampling::default() },
        ..GenerateOptions::default()
    };
    let (mut tokens, mut first, mut memory) = (0, None, vec![]);
    for piece in g.stream("Once upon a time", &options).expect("a prompt") {
        tokens += usize::from(piece.expect("a token").token.is_some());
        // A block of the cache has 32 positions, of which the prompt has some.
        if tokens == 64 {
            first = Some(made(&b));
        }
        if tokens >= 64 && tokens.is_multiple_of(64) {
            memory.extend(host::anonymous());
        }
    }
    assert_eq!(tokens, 4096);
    assert_eq!(Some(made(&b)), first, "plans, kernels, allocations, allocated bytes");
    let Some(begun) = memory.first() else { return };
    let most = memory.iter().max().expect("a reading");
    println!("{begun} bytes after 64 tokens, at most {most}, {} readings", memory.len());
    assert!(*most <= begun + (512 << 10), "{begun} bytes after 64 tokens, {most} later");
}

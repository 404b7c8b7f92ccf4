//! Proposals of a model's own layer for further tokens change the time of a generation and nothing else.

#[path = "../common/mtp.rs"]
mod cases;

use crate::common::*;
use halcyon::prelude::*;
use halcyon_formats::gguf::{GgmlType, TensorInfo, Value};
use halcyon_models::{
    Decoder, Engine, EngineOptions, GenerateOptions, Generation, Generator, GeneratorOptions, MemoryNeed,
    ModelFile, Sampling, Source, Speculation, SpeculationOptions, generate,
};
use halcyon_test::devices;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

fn always(most: usize) -> SpeculationOptions {
    SpeculationOptions { most, always: true }
}

/// A model and its layer for further tokens.
fn both(b: &Backend, file: &ModelFile, context: usize) -> [Arc<Decoder>; 2] {
    let main = file.load(b, context).expect("the weights are loaded");
    let layer = file.load_ahead(&main, context).expect("the weights are loaded").expect("a layer");
    [main, layer].map(Arc::new)
}

fn run(e: &mut Engine, s: Option<&mut Speculation>, prompt: &[u32], o: &GenerateOptions) -> Generation {
    e.truncate(0, 0);
    let on_text = &mut |_: &str| ControlFlow::Continue(());
    match s {
        None => generate(e, 0, None, prompt, o, on_text),
        Some(s) => s.generate(e, 0, None, prompt, o, on_text),
    }
    .expect("a text")
}

fn options(seed: u64, n: usize) -> GenerateOptions {
    let sampling = match seed {
        0 => Sampling::greedy(),
        seed => Sampling { seed, temperature: 1.1, repeat_penalty: 1.1, ..Sampling::default() },
    };
    GenerateOptions { max_tokens: Some(n), sampling, ..GenerateOptions::default() }
}

fn open(dir: &Path, name: &str) -> ModelFile {
    ModelFile::open(&cases::folder(dir, name)).expect("the model opens")
}

#[test]
fn the_layer_does_not_change_the_tokens() {
    if halcyon_test::left_out("the_layer_does_not_change_the_tokens") {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let mut backends = vec![Backend::cpu().expect("the CPU")];
    if devices::test_backends().contains(&BackendType::OpenCl) {
        backends.extend(devices::open(
            "the_layer_does_not_change_the_tokens",
            BackendType::OpenCl,
            Level::O2,
        ));
    }
    let files = cases::FAMILIES.map(|name| open(dir.path(), name));
    // Emulated devices are slow, and have tests of their own for the kernels.
    let of = |b: &Backend| if is_cpu(b) { 0..4 } else { 1..2 };
    let cases = backends.iter().flat_map(|b| files[of(b)].iter().map(move |f| (b, f)));
    for (b, file) in cases {
        let [main, layer] = both(b, file, 64);
        let prompt: Vec<u32> = (0..18).map(|i| (i * 7 + i / 9) % 40).collect();
        // Seed, tokens, proposals at once, rows of a step.
        let runs = if is_cpu(b) { vec![(0, 46, 4, 7), (1, 30, 1, 64)] } else { vec![(1, 8, 3, 64)] };
        for (seed, n, most, chunk) in runs {
            let who = format!("{} on {}, seed {seed}", main.spec.family, b.id());
            let o = options(seed, n);
            let want = run(&mut engine(&main, 1, chunk), None, &prompt, &o);
            let mut e = engine(&main, 1, chunk);
            let s = Speculation::ahead(layer.clone(), &mut e, always(most));
            let mut s = s.expect("the layer is of the model");
            let got = run(&mut e, Some(&mut s), &prompt, &o);
            assert_eq!((got.tokens, got.finish), (want.tokens.clone(), want.finish), "{who}");
            assert!(s.stats().verified > n / 8, "{who}: {:?}", s.stats());
            if seed > 0 {
                continue;
            }
            // Without proposals the layer only follows.
            assert_eq!(run(&mut e, None, &prompt, &o).tokens, want.tokens, "{who}");
            e.look_ahead(None).expect("the engine works without the layer");
            assert_eq!(run(&mut e, Some(&mut s), &prompt, &o).tokens, want.tokens, "{who}");
        }
    }
}

/// Batches, streams, and a chat that goes back to a part of what the cache holds.
#[test]
fn generators_with_the_layer_generate_the_same() {
    let dir = tempfile::tempdir().expect("a folder");
    let b = Backend::cpu().expect("the CPU");
    for name in ["glm4_moe", "qwen3_next"] {
        let [main, layer] = both(&b, &open(dir.path(), name), 80);
        let sizes =
            EngineOptions { sequences: 2, positions: 160, page: 4, cache: DType::F32.into(), chunk: 64 };
        let made = || Generator::new(Engine::new(main.clone(), sizes).expect("an engine"), None, None);
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| (0..20 + i).map(|t| t * 7 % 30 + i).collect()).collect();
        let o = options(3, 30);
        let batch = |g: &mut Generator| -> Vec<Vec<u32>> {
            g.batch(prompts.clone(), &o).expect("a batch").into_iter().map(|g| g.tokens).collect()
        };
        let want = batch(&mut made());
        let mut g = made();
        let s = Speculation::ahead(layer, g.engine(), always(3)).expect("the layer is of the model");
        g.speculate(s);
        assert_eq!(batch(&mut g), want, "{name}");
        for (prompt, want) in prompts.iter().zip(&want) {
            let pieces = g.stream(prompt.clone(), &o).expect("a stream");
            let tokens: Vec<u32> = pieces.filter_map(|p| p.expect("a piece").token).collect();
            assert_eq!(&tokens, want, "{name}");
        }
        // A part of the prompt is in the cache, and another token follows.
        let mut s = g.speculate(None).expect("the speculation");
        assert!(s.stats().verified > 10, "{name}: {:?}", s.stats());
        let e = g.engine();
        let length = e.length(0);
        let kept = e.truncate(0, length - 9);
        assert_eq!(kept, length - 9);
        let (rest, o) = ([9, 8, 7], options(0, 12));
        let got = s.generate(e, 0, None, &rest, &o, &mut |_| ControlFlow::Continue(())).expect("a text");
        let whole = [&prompts[2][..], &want[2][..]].concat();
        let whole = [&whole[..kept], &rest].concat();
        assert_eq!(got.tokens, run(made().engine(), None, &whole, &o).tokens, "{name}");
    }
}

/// The layer on a model whose parts are on several devices.
#[test]
fn the_layer_works_with_a_split_model() {
    let dir = tempfile::tempdir().expect("a folder");
    let [a, b] = [(); 2].map(|()| Backend::cpu().expect("the CPU"));
    let file = open(dir.path(), "glm4_moe");
    let [whole, _] = both(&a, &file, 48);
    let prompt = [3, 1, 4, 1, 5, 9, 2, 6];
    let o = options(0, 30);
    let want = run(&mut engine(&whole, 1, 64), None, &prompt, &o).tokens;
    let layers = halcyon_models::Placement::last_layers(&a, &b, 1, &file.spec).expect("a placement");
    let mut head = halcyon_models::Placement::single(&a, 3);
    head.devices.push(b.clone());
    head.head = 1;
    for placement in [layers, head] {
        let main = file.load_on(placement, 48).expect("the weights are loaded");
        let layer = file.load_ahead(&main, 48).expect("the weights are loaded").expect("a layer");
        let mut e = engine(&Arc::new(main), 1, 5);
        let mut s =
            Speculation::ahead(Arc::new(layer), &mut e, always(2)).expect("the layer is of the model");
        assert_eq!(run(&mut e, Some(&mut s), &prompt, &o).tokens, want);
        assert!(s.stats().verified > 5, "{:?}", s.stats());
    }
}

/// A file of GLM-4 in which each token alone decides what follows, and whose layer for further tokens knows
/// this: both have the same random embedding and output, and everything between adds nothing.
fn predictable() -> Source {
    const HIDDEN: usize = 64;
    const TOKENS: usize = 90;
    let sizes = [
        ("context_length", 256),
        ("embedding_length", HIDDEN),
        ("block_count", 2),
        ("nextn_predict_layers", 1),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 2),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", 8),
    ];
    let mut metadata: Vec<(String, Value)> =
        sizes.iter().map(|(k, v)| (format!("glm4moe.{k}"), Value::from(*v as u32))).collect();
    metadata.push(("general.architecture".into(), "glm4moe".into()));
    metadata.push(("glm4moe.attention.layer_norm_rms_epsilon".into(), 1e-5f32.into()));
    let mut rng = halcyon_test::Rng::new(11);
    let mut tensors: Vec<(TensorInfo, Vec<u8>)> = vec![];
    let mut add = |name: &str, shape: &[usize], values: Vec<f32>| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.push((TensorInfo::new(format!("{name}.weight"), shape, GgmlType::F32), bytes));
    };
    for name in ["token_embd", "output"] {
        add(name, &[TOKENS, HIDDEN], rng.f32s(TOKENS * HIDDEN));
    }
    add("output_norm", &[HIDDEN], vec![1.0; HIDDEN]);
    for i in 0..2 {
        for (name, shape) in [
            ("attn_q", [32, HIDDEN]),
            ("attn_k", [16, HIDDEN]),
            ("attn_v", [16, HIDDEN]),
            ("ffn_gate", [8, HIDDEN]),
            ("ffn_up", [8, HIDDEN]),
        ] {
            add(&format!("blk.{i}.{name}"), &shape, rng.f32s(shape[0] * shape[1]));
        }
        add(&format!("blk.{i}.attn_output"), &[HIDDEN, 32], vec![0.0; HIDDEN * 32]);
        add(&format!("blk.{i}.ffn_down"), &[HIDDEN, 8], vec![0.0; HIDDEN * 8]);
        for name in ["attn_norm", "post_attention_norm"] {
            add(&format!("blk.{i}.{name}"), &[HIDDEN], vec![1.0; HIDDEN]);
        }
    }
    for name in ["enorm", "hnorm", "shared_head_norm"] {
        add(&format!("blk.1.nextn.{name}"), &[HIDDEN], vec![1.0; HIDDEN]);
    }
    let eye = (0..2 * HIDDEN * HIDDEN).map(|i| if i / (2 * HIDDEN) == i % (2 * HIDDEN) { 1.0 } else { 0.0 });
    add("blk.1.nextn.eh_proj", &[HIDDEN, 2 * HIDDEN], eye.collect());
    file(&metadata, &tensors)
}

#[test]
fn proposals_of_a_perfect_layer_are_accepted() {
    let b = Backend::cpu().expect("the CPU");
    let source = predictable();
    let spec = halcyon_models::family::spec(&source).expect("the configuration is valid");
    let main = Decoder::load(&b, &source, spec, 256).expect("the weights are loaded");
    let layer = main.load_ahead(&source, 256).expect("the weights are loaded").expect("a layer");
    let [main, layer] = [main, layer].map(Arc::new);
    for seed in [0, 5] {
        // Penalties and draws count for proposals too.
        let o = options(seed, 161);
        let want = run(&mut engine(&main, 1, 64), None, &[1, 2, 3], &o);
        let mut e = engine(&main, 1, 64);
        let s = Speculation::ahead(layer.clone(), &mut e, always(7));
        let mut s = s.expect("the layer is of the model");
        assert_eq!(run(&mut e, Some(&mut s), &[1, 2, 3], &o).tokens, want.tokens);
        let stats = s.stats();
        // 3 proposals, then 7 at once; the last step proposes more than there is room for.
        assert!(stats.acceptance() > 0.95, "{stats:?}");
        assert!(stats.verified <= 22, "{stats:?}");
    }
}

/// A generator that is opened uses the layer unless it is switched off, or there is no room for it.
#[test]
fn an_opened_generator_uses_the_layer() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = cases::folder(dir.path(), "glm4_moe");
    let b = Backend::cpu().expect("the CPU");
    let engine = EngineOptions { positions: 64, chunk: 16, ..EngineOptions::default() };
    let open =
        |b: &Backend, path: &Path, o: GeneratorOptions| Generator::open(path, b, o).expect("a generator");
    let with = GeneratorOptions { speculation: always(3), ..GeneratorOptions::from(engine) };
    let (mut on, mut off) =
        (open(&b, &path, with), open(&b, &path, GeneratorOptions { further_tokens: false, ..with }));
    assert!(off.speculation().is_none());
    // Whole steps, so that no others need memory.
    let prompt: Vec<u32> = (1..17).collect();
    let o = options(0, 30);
    let tokens = |g: &mut Generator| g.generate(prompt.clone(), &o).expect("a text").tokens;
    assert_eq!(tokens(&mut on), tokens(&mut off));
    assert!(on.speculation().expect("the layer is used").stats().verified > 5);
    assert!(Generator::open(&path, &b, engine).expect("a generator").speculation().is_some());
    // Bad options are said.
    let bad = GeneratorOptions { speculation: always(0), ..with };
    let e = Generator::open(&path, &b, bad).map(drop).expect_err("no proposals");
    assert!(e.to_string().contains("1 to 15"), "{e}");
    // With room for the model alone the layer is left out.
    let file = ModelFile::open(&path).expect("the model opens");
    let need =
        MemoryNeed::of_generation(&file.load(&b, 64).expect("the weights load"), engine).expect("a need");
    let small = Backend::builder().backend_type(BackendType::Cpu).memory_limit(need.device() + 512);
    let small = small.build().expect("the CPU");
    let mut g = open(&small, &path, with);
    assert!(g.speculation().is_none());
    assert_eq!(tokens(&mut g), tokens(&mut off));
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/glm4_moe");
    assert!(open(&b, &stored, with).speculation().is_none());
}

#[test]
fn a_model_without_the_layer_has_none() {
    let b = Backend::cpu().expect("the CPU");
    // Its configuration counts a layer that was not saved.
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/glm4_moe");
    let file = ModelFile::open(&dir).expect("the model opens");
    assert!(file.spec.ahead.is_empty());
    let main = file.load(&b, 16).expect("the weights are loaded");
    assert!(file.load_ahead(&main, 16).expect("no error").is_none());
}

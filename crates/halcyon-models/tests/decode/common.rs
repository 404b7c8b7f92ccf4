//! Engines, greedy choices, and files with random weights.
#![allow(dead_code, reason = "other test binaries use a part")]

use halcyon::BlockType;
use halcyon::prelude::*;
use halcyon_formats::gguf::{self, GgmlType, Gguf, TensorInfo, Value};
use halcyon_models::{CacheTypes, Decoder, Engine, EngineOptions, Feed, Source, family};
use halcyon_test::Rng;
use std::sync::Arc;

/// The decoder of a source.
pub(crate) fn decoder(b: &Backend, source: &Source, context: usize) -> Arc<Decoder> {
    let spec = family::spec(source).expect("the configuration is valid");
    Arc::new(Decoder::load(b, source, spec, context).expect("the weights are loaded"))
}

/// An engine with a cache in f32 and pages of 4 positions, so that short texts have several.
pub(crate) fn engine(decoder: &Arc<Decoder>, sequences: usize, chunk: usize) -> Engine {
    engine_in(DType::F32.into(), decoder, sequences, chunk)
}

/// An engine with a cache of this type and pages of 4 positions.
pub(crate) fn engine_in(cache: CacheTypes, decoder: &Arc<Decoder>, sequences: usize, chunk: usize) -> Engine {
    let positions = decoder.context() * sequences;
    let options = EngineOptions { sequences, positions, page: 4, cache, chunk };
    Engine::new(decoder.clone(), options).expect("an engine")
}

/// Feeds one sequence.
pub(crate) fn feed(e: &mut Engine, tokens: &[u32], all: bool) -> Vec<f32> {
    e.feed(&[Feed { sequence: 0, tokens, all }]).expect("the tokens are computed").remove(0)
}

/// The token with the largest logit.
pub(crate) fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a logit") as u32
}

/// The next `n` tokens, if `logits` are those of the last one.
pub(crate) fn greedy(e: &mut Engine, mut logits: Vec<f32>, n: usize) -> Vec<u32> {
    let mut out = vec![];
    for i in 0..n {
        out.push(best(&logits));
        if i + 1 < n {
            logits = feed(e, &[out[i]], false);
        }
    }
    out
}

/// Sizes of the random model.
pub(crate) const VOCABULARY: usize = 300;
const HIDDEN: usize = 256;
const HEADS: usize = 4;
const SHARED: usize = 2;
const INNER: usize = 512;
const LAYERS: usize = 2;

/// Metadata of the random model.
pub(crate) fn metadata(arch: &str) -> Vec<(String, Value)> {
    let n = |key: &str, v: usize| (format!("{arch}.{key}"), Value::from(v as u32));
    vec![
        ("general.architecture".into(), arch.into()),
        n("context_length", 128),
        n("embedding_length", HIDDEN),
        n("block_count", LAYERS),
        n("feed_forward_length", INNER),
        n("attention.head_count", HEADS),
        n("attention.head_count_kv", SHARED),
        (format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32.into()),
        n("rope.dimension_count", HIDDEN / HEADS),
    ]
}

/// The tensors of a Llama model whose matrices are random blocks, or f32.
pub(crate) fn tensors(blocks: Option<BlockType>) -> Vec<(TensorInfo, Vec<u8>)> {
    tensors_of(|_| blocks)
}

/// The tensors of a Llama model in the mixture that is called Q4_K_M.
pub(crate) fn tensors_q4_k_m() -> Vec<(TensorInfo, Vec<u8>)> {
    let finer = |name: &str| ["attn_v", "ffn_down", "output"].iter().any(|n| name.ends_with(n));
    tensors_of(|name| Some(if finer(name) { BlockType::Q6_K } else { BlockType::Q4_K }))
}

/// The tensors of a Llama model whose matrices have the types that `blocks` chooses by name.
fn tensors_of(blocks: impl Fn(&str) -> Option<BlockType>) -> Vec<(TensorInfo, Vec<u8>)> {
    let kv = HIDDEN / HEADS * SHARED;
    let mut shapes = vec![
        ("token_embd".to_string(), vec![VOCABULARY, HIDDEN]),
        ("output_norm".into(), vec![HIDDEN]),
        ("output".into(), vec![VOCABULARY, HIDDEN]),
    ];
    for i in 0..LAYERS {
        let layer: [(&str, &[usize]); 9] = [
            ("attn_norm", &[HIDDEN]),
            ("attn_q", &[HIDDEN, HIDDEN]),
            ("attn_k", &[kv, HIDDEN]),
            ("attn_v", &[kv, HIDDEN]),
            ("attn_output", &[HIDDEN, HIDDEN]),
            ("ffn_norm", &[HIDDEN]),
            ("ffn_gate", &[INNER, HIDDEN]),
            ("ffn_up", &[INNER, HIDDEN]),
            ("ffn_down", &[HIDDEN, INNER]),
        ];
        shapes.extend(layer.map(|(name, shape)| (format!("blk.{i}.{name}"), shape.to_vec())));
    }
    let mut rng = Rng::new(5);
    let mut make = |(name, shape): &(String, Vec<usize>)| {
        let values: Vec<f32> = rng.f32s(shape.iter().product()).iter().map(|v| v * 0.1).collect();
        let blocks = blocks(name);
        let name = format!("{name}.weight");
        match blocks.filter(|_| shape.len() > 1) {
            Some(b) => {
                let mut bytes = vec![0; b.bytes_of(values.len()).expect("whole blocks")];
                b.encode(&values, &mut bytes);
                (TensorInfo::new(name, shape, GgmlType::Block(b)), bytes)
            }
            None => {
                let one = if shape.len() == 1 { 1.0 } else { 0.0 };
                let bytes = values.iter().flat_map(|v| (one + v).to_le_bytes()).collect();
                (TensorInfo::new(name, shape, GgmlType::Plain(DType::F32)), bytes)
            }
        }
    };
    shapes.iter().map(&mut make).collect()
}

/// Metadata of a tokenizer whose tokens are bytes and some pairs of letters.
pub(crate) fn tokenizer() -> Vec<(String, Value)> {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let pairs =
        (0..VOCABULARY - 259).map(|i| format!("{}a", char::from_u32(97 + i as u32).expect("a letter")));
    let named = ["<unk>", "<s>", "</s>"].map(String::from);
    let tokens: Vec<String> = named.into_iter().chain(bytes).chain(pairs).collect();
    let types: Vec<i32> = (0..VOCABULARY)
        .map(|i| match i {
            0 => 2,
            1 | 2 => 3,
            3..259 => 6,
            _ => 1,
        })
        .collect();
    vec![
        ("tokenizer.ggml.model".into(), "llama".into()),
        ("tokenizer.ggml.tokens".into(), tokens.into()),
        ("tokenizer.ggml.scores".into(), vec![0f32; VOCABULARY].into()),
        ("tokenizer.ggml.token_type".into(), types.into()),
        ("tokenizer.ggml.bos_token_id".into(), 1u32.into()),
        ("tokenizer.ggml.eos_token_id".into(), 2u32.into()),
        (
            "tokenizer.chat_template".into(),
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}".into(),
        ),
    ]
}

/// A file of metadata and tensors.
pub(crate) fn file(metadata: &[(String, Value)], tensors: &[(TensorInfo, Vec<u8>)]) -> Source {
    let tensors: Vec<(TensorInfo, &[u8])> = tensors.iter().map(|(t, b)| (t.clone(), &b[..])).collect();
    let bytes = gguf::encode(metadata, &tensors).expect("a file");
    Source::Gguf(Gguf::parse(bytes.into(), "random.gguf").expect("a valid file"))
}

/// Whether this is the CPU backend. The other test devices are emulated, and slow.
pub(crate) fn is_cpu(b: &Backend) -> bool {
    b.id() == "cpu:0"
}

/// The bits of values, for comparisons that NaN must not pass as equal by accident.
pub(crate) fn bits(v: &[f32]) -> Vec<u32> {
    assert!(v.iter().all(|v| v.is_finite()), "a logit is not finite");
    v.iter().map(|v| v.to_bits()).collect()
}

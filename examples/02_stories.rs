//! Decodes a Llama model token by token, with its KV caches as states. One plan serves every token.
//!
//! `cargo run --release -p halcyon --example 02_stories -- DIR [BACKEND]`, where DIR holds
//! `model.safetensors`, `config.json` and `expected.json` (prompt ids, expected ids and text).

use halcyon::Attention;
use halcyon::ir::error::Error;
use halcyon::prelude::*;
use halcyon_formats::safetensors::SafeTensors;
use std::path::Path;

/// The sizes of a Llama model, under their Hugging Face names.
#[derive(Debug, serde::Deserialize)]
pub struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
}

#[derive(Debug)]
struct Layer {
    attn_norm: Tensor,
    /// Projections, transposed once to [in, out].
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    mlp_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    /// The caches have shape [1, kv heads, positions, head size].
    k_cache: State,
    v_cache: State,
}

#[derive(Debug)]
pub struct Llama {
    backend: Backend,
    config: Config,
    embed: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
    /// Cosines and sines, [positions, head size]. Both halves of a row are equal.
    cos: Tensor,
    sin: Tensor,
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let io = |what: String| Error::Io { path: path.display().to_string(), what };
    let text = std::fs::read_to_string(path).map_err(|e| io(e.to_string()))?;
    serde_json::from_str(&text).map_err(|e| io(e.to_string()))
}

impl Llama {
    pub fn load(backend: &Backend, dir: &Path) -> Result<Llama> {
        let config: Config = read_json(&dir.join("config.json"))?;
        let file = SafeTensors::open(&dir.join("model.safetensors"))?;
        let get = |name: &str| Tensor::from_weights(backend, &file.get(name)?);
        let proj = |name: String| -> Result<Tensor> { Ok(get(&name)?.transpose(0, 1)) };
        let hd = config.hidden_size / config.num_attention_heads;
        let cache = || {
            let shape = [1, config.num_key_value_heads, config.max_position_embeddings, hd];
            let zeros = Tensor::zeros(backend, shape, DType::F32);
            zeros.eval()?;
            Ok::<_, Error>(State::new(zeros))
        };
        let layers = (0..config.num_hidden_layers)
            .map(|i| {
                let p = format!("model.layers.{i}");
                Ok(Layer {
                    attn_norm: get(&format!("{p}.input_layernorm.weight"))?,
                    q: proj(format!("{p}.self_attn.q_proj.weight"))?,
                    k: proj(format!("{p}.self_attn.k_proj.weight"))?,
                    v: proj(format!("{p}.self_attn.v_proj.weight"))?,
                    o: proj(format!("{p}.self_attn.o_proj.weight"))?,
                    mlp_norm: get(&format!("{p}.post_attention_layernorm.weight"))?,
                    gate: proj(format!("{p}.mlp.gate_proj.weight"))?,
                    up: proj(format!("{p}.mlp.up_proj.weight"))?,
                    down: proj(format!("{p}.mlp.down_proj.weight"))?,
                    k_cache: cache()?,
                    v_cache: cache()?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        // Rotary embedding (Su et al. 2021), in the half-split order of Hugging Face's Llama.
        let angle =
            |p: usize, j: usize| p as f64 * config.rope_theta.powf(-2.0 * (j % (hd / 2)) as f64 / hd as f64);
        let table = |f: fn(f64) -> f64| {
            let v: Vec<f32> =
                (0..config.max_position_embeddings * hd).map(|i| f(angle(i / hd, i % hd)) as f32).collect();
            Tensor::from_slice(backend, [config.max_position_embeddings, hd], &v)
        };
        Ok(Llama {
            embed: get("model.embed_tokens.weight")?,
            norm: get("model.norm.weight")?,
            head: proj("lm_head.weight".into())?,
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            backend: backend.clone(),
            config,
            layers,
        })
    }

    /// Logits over the vocabulary after `token` at `position`. Token and position are run-time arguments.
    pub fn step(&self, token: u32, position: usize) -> Result<Tensor> {
        let c = &self.config;
        let (h, hk) = (c.num_attention_heads, c.num_key_value_heads);
        let hd = c.hidden_size / h;
        let b = &self.backend;
        let pos = Tensor::scalar(b, position, DType::I32);
        let at = pos.reshape([1]);
        let mut x = self.embed.gather(&Tensor::scalar(b, token, DType::I32).reshape([1]), 0);
        let (cos, sin) = (self.cos.gather(&at, 0), self.sin.gather(&at, 0));
        // Mask the cache entries after this position, which are not yet written.
        let seen = Tensor::arange(b, c.max_position_embeddings, DType::I32).le(&pos);
        let (zero, ninf) =
            (Tensor::scalar(b, 0.0, DType::F32), Tensor::scalar(b, f64::NEG_INFINITY, DType::F32));
        let mask = seen.select(&zero, &ninf).reshape([1, 1, 1, c.max_position_embeddings]);
        let rotate = |t: &Tensor| {
            let (lo, hi) = (t.narrow(-1, 0, hd / 2), t.narrow(-1, hd / 2, hd / 2));
            t * &cos + Tensor::cat(&[&-hi, &lo], 2) * &sin
        };
        for l in &self.layers {
            let n = x.rms_norm(&l.attn_norm, c.rms_norm_eps);
            let q = rotate(&n.matmul(&l.q).reshape([h, 1, hd])).reshape([1, h, 1, hd]);
            let k = rotate(&n.matmul(&l.k).reshape([hk, 1, hd])).reshape([1, hk, 1, hd]);
            let v = n.matmul(&l.v).reshape([1, hk, 1, hd]);
            let keys = l.k_cache.append(&k, &pos, 2)?;
            let values = l.v_cache.append(&v, &pos, 2)?;
            let a = q.attention(&keys, &values, Attention { mask: Some(&mask), ..Attention::default() });
            x = x + a.reshape([1, c.hidden_size]).matmul(&l.o);
            let n = x.rms_norm(&l.mlp_norm, c.rms_norm_eps);
            x = x + (n.matmul(&l.gate).silu() * n.matmul(&l.up)).matmul(&l.down);
        }
        Ok(x.rms_norm(&self.norm, c.rms_norm_eps).matmul(&self.head).squeeze(0))
    }
}

/// The expected results in the model's folder.
#[derive(Debug, serde::Deserialize)]
pub struct Expected {
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub greedy_text: String,
    pub last_logits: Vec<f64>,
}

#[derive(Debug)]
pub struct Decoded {
    pub ids: Vec<u32>,
    /// Logits after the prompt.
    pub logits: Vec<f32>,
    /// The numbers, after each token, of plans built, kernels compiled (or loaded from the disk cache) and
    /// buffers allocated.
    pub made: Vec<(u64, u64, u64)>,
}

/// Feeds the prompt token by token, then decodes `n` tokens greedily.
pub fn decode(backend: &Backend, dir: &Path, prompt: &[u32], n: usize) -> Result<Decoded> {
    let model = Llama::load(backend, dir)?;
    let mut out = Decoded { ids: vec![], logits: vec![], made: vec![] };
    let mut token = *prompt.first().ok_or_else(|| Error::argument("decode", "the prompt is empty"))?;
    for position in 0..prompt.len() + n - 1 {
        let logits = model.step(token, position)?.to_vec::<f32>()?;
        let (s, c) = (backend.cache_stats(), backend.counters());
        out.made.push((s.plans_built, c.compiles + c.compile_cache_hits, c.allocations));
        if position + 1 < prompt.len() {
            token = prompt[position + 1];
            continue;
        }
        token = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i as u32);
        if out.ids.is_empty() {
            out.logits = logits;
        }
        out.ids.push(token);
    }
    Ok(out)
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(dir) = args.next() else {
        println!(
            "usage: 02_stories DIR [BACKEND]; DIR holds model.safetensors, config.json and expected.json"
        );
        return Ok(());
    };
    let backend = Backend::new(args.next().unwrap_or_else(|| "cpu".into()).parse()?)?;
    println!("{}", backend.selection());
    let expected: Expected = read_json(&Path::new(&dir).join("expected.json"))?;
    let start = std::time::Instant::now();
    let d = decode(&backend, Path::new(&dir), &expected.prompt_ids, expected.greedy_ids.len())?;
    let t = start.elapsed().as_secs_f64();
    let s = backend.cache_stats();
    println!(
        "{} steps in {t:.3} s; plans built {}, programs {}, kernels compiled {}",
        d.made.len(),
        s.plans_built,
        s.programs,
        backend.counters().compiles
    );
    println!(
        "after the second token: {} plans and {} kernels more",
        d.made[d.made.len() - 1].0 - d.made[1].0,
        d.made[d.made.len() - 1].1 - d.made[1].1
    );
    let same = d.ids.iter().zip(&expected.greedy_ids).filter(|(a, b)| a == b).count();
    let worst =
        d.logits.iter().zip(&expected.last_logits).map(|(a, b)| (*a as f64 - b).abs()).fold(0.0, f64::max);
    println!("{same} of {} tokens as expected, logits within {worst:.1e}", expected.greedy_ids.len());
    println!("expected text: {}", expected.greedy_text);
    Ok(())
}

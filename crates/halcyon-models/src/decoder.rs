//! A decoder: the weights of a [`Spec`] and the computation of one step over rows of tokens.
//!
//! A step gets rows of tokens. Each row belongs to a sequence and has a position in it. Keys and values of
//! all rows are written to the cache first, then each row attends to the positions of its sequence up to its
//! own. So one step can hold a chunk of one prompt, single tokens of many sequences, or both.

use crate::rope::{Layout, Rope, Scaling};
use crate::source::{Source, Weights, floats};
use crate::spec::*;
use halcyon::Order as Sort;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, BlockType, Cache, CachedAttention, ConstData, DType, ScatterKind, Tensor};
use std::collections::HashMap;

/// A matrix of weights `[outputs, inputs]`, or several of them.
#[derive(Debug)]
struct Matrix {
    data: Tensor,
    blocks: Option<BlockType>,
    /// f32 `[outputs]`, or `[matrices, outputs]`.
    bias: Option<Tensor>,
}

impl Matrix {
    fn apply(&self, x: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.blocks, None);
        match &self.bias {
            Some(b) => y + b,
            None => y,
        }
    }

    /// Multiplies each row by its own matrix.
    fn apply_which(&self, x: &Tensor, which: &Tensor) -> Tensor {
        let y = x.row_matmul(&self.data, self.blocks, Some(which));
        match &self.bias {
            Some(b) => y + b.gather(which, 0),
            None => y,
        }
    }

    /// The rows with these numbers, in f32.
    fn rows(&self, which: &Tensor) -> Tensor {
        let rows = self.data.gather(which, 0);
        match self.blocks {
            Some(b) => rows.decode_blocks(b),
            None => rows.cast(DType::F32),
        }
    }
}

#[derive(Debug)]
struct NormWeights {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    spec: Norm,
}

impl NormWeights {
    fn apply(&self, x: &Tensor) -> Tensor {
        let eps = self.spec.eps;
        let Some(w) = &self.weight else {
            let size = x.dims().ok().and_then(|d| d.last().copied()).unwrap_or(1);
            let ones = Tensor::ones(x.backend(), [size], DType::F32);
            return x.rms_norm(&ones, eps);
        };
        match self.spec.kind {
            NormKind::Layer => x.layer_norm(w, self.bias.as_ref(), -1, eps),
            NormKind::Rms | NormKind::RmsPlusOne => x.rms_norm(w, eps),
        }
    }
}

#[derive(Debug)]
struct AttentionWeights {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    q_norm: Option<NormWeights>,
    k_norm: Option<NormWeights>,
    sinks: Option<Tensor>,
    /// The number of the rotation.
    rotation: Option<usize>,
}

#[derive(Debug)]
struct Dense {
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
}

#[derive(Debug)]
struct ExpertWeights {
    router: Matrix,
    choice_bias: Option<Tensor>,
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
    common: Option<Dense>,
    common_gate: Option<Matrix>,
}

#[derive(Debug)]
enum FfnWeights {
    Dense(Dense, Activation),
    Experts(Box<ExpertWeights>, Experts),
}

#[derive(Debug)]
struct LayerWeights {
    /// Before the mixer, after it, before the feed-forward part, after it.
    norms: [Option<NormWeights>; 4],
    attention: AttentionWeights,
    ffn: FfnWeights,
}

/// A decoder on a backend.
#[derive(Debug)]
pub struct Decoder {
    pub spec: Spec,
    backend: Backend,
    /// The longest sequence.
    context: usize,
    embedding: Matrix,
    positions: Option<Matrix>,
    embedding_norm: Option<NormWeights>,
    layers: Vec<LayerWeights>,
    final_norm: NormWeights,
    /// `None`: the embedding's matrix is used.
    head: Option<Matrix>,
    /// The different rotations of the layers.
    ropes: Vec<Rope>,
}

/// What one step computes. All tensors are i32, unless their description has another type.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// `[rows]`.
    pub tokens: &'a Tensor,
    /// `[rows]`; negative for unused rows.
    pub position: &'a Tensor,
    /// `[rows]`: the row of `table` that holds the pages of the row's sequence.
    pub sequence: &'a Tensor,
    /// `[rows]`: where the row's keys and values are written, `page * page size + offset`. Unused rows write
    /// to page 0, which no sequence uses.
    pub slot: &'a Tensor,
    /// `[sequences, pages]`.
    pub table: &'a Tensor,
    /// `[n]`: the rows whose logits are computed.
    pub wanted: &'a Tensor,
    /// Cosines and sines of the rows for each of [`Decoder::ropes`], f32 `[rows, size / 2]` each.
    pub rotations: &'a [Tensor],
}

/// The layout of the cache of keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLayout {
    pub pages: usize,
    /// Positions per page.
    pub page: usize,
    pub dtype: DType,
}

struct Loader<'a> {
    source: &'a Source,
    spec: &'a Spec,
    backend: &'a Backend,
}

impl Loader<'_> {
    fn find(&self, name: &str) -> Result<Option<Weights>> {
        self.source.find(self.spec, name)
    }

    fn need(&self, name: &str) -> Result<Weights> {
        self.find(name)?.ok_or_else(|| {
            Error::argument("load", format!("the {} model has no tensor '{name}'", self.spec.family))
        })
    }

    /// The bias or another vector in f32, of `dims`.
    fn vector(&self, name: &str, dims: &[usize]) -> Result<Option<Tensor>> {
        let Some(w) = self.find(name)? else { return Ok(None) };
        expect(name, &w.dims(), dims)?;
        let values = self.floats(&w)?;
        Ok(Some(Tensor::constant(self.backend, &ConstData::from_slice(dims, &values)?)))
    }

    fn floats(&self, w: &Weights) -> Result<Vec<f32>> {
        match w.blocks {
            None => floats(&w.data),
            Some(b) => {
                let mut v = vec![0f32; w.dims().iter().product()];
                b.decode(w.data.bytes(), &mut v);
                Ok(v)
            }
        }
    }

    /// The matrix `stem.weight` of `dims`, and `stem.bias` if there is one.
    fn matrix(&self, stem: &str, dims: &[usize]) -> Result<Matrix> {
        let name = format!("{stem}.weight");
        let mut w = self.need(&name)?;
        if stem.ends_with(".ffn_up") {
            w = crate::source::gguf::up_of_joined(w, dims[0])?;
        }
        expect(&name, &w.dims(), dims)?;
        let mut data = w.data;
        if w.blocks.is_none() && !matches!(data.dtype, DType::F32 | DType::F16 | DType::BF16) {
            data = halcyon_formats::data::cast(&data, DType::F32)?;
        }
        let bias = self.vector(&format!("{stem}.bias"), &dims[..dims.len() - 1])?;
        Ok(Matrix { data: Tensor::constant(self.backend, &data), blocks: w.blocks, bias })
    }

    fn maybe(&self, stem: &str, dims: &[usize]) -> Result<Option<Matrix>> {
        match self.find(&format!("{stem}.weight"))? {
            Some(_) => self.matrix(stem, dims).map(Some),
            None => Ok(None),
        }
    }

    fn norm(&self, stem: &str, size: usize, spec: Norm) -> Result<NormWeights> {
        let name = format!("{stem}.weight");
        let w = self.need(&name)?;
        expect(&name, &w.dims(), &[size])?;
        let mut values = self.floats(&w)?;
        if spec.kind == NormKind::RmsPlusOne {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        let weight = Tensor::constant(self.backend, &ConstData::from_slice(&[size], &values)?);
        Ok(NormWeights { weight: Some(weight), bias: self.vector(&format!("{stem}.bias"), &[size])?, spec })
    }

    fn norms(&self, i: usize, l: &Layer) -> Result<[Option<NormWeights>; 4]> {
        let h = self.spec.hidden;
        let one = |name: &str| self.norm(&format!("blk.{i}.{name}"), h, l.norm).map(Some);
        Ok(match l.order {
            Order::Before => [one("attn_norm")?, None, one("ffn_norm")?, None],
            Order::After => [None, one("post_attention_norm")?, None, one("post_ffw_norm")?],
            Order::Both => {
                [one("attn_norm")?, one("post_attention_norm")?, one("ffn_norm")?, one("post_ffw_norm")?]
            }
            Order::Parallel => [one("attn_norm")?, None, None, None],
            // GGUF calls the norm before the feed-forward part `attn_norm`.
            Order::ParallelTwo => [one("attn_norm_2")?, None, one("attn_norm")?, None],
        })
    }

    fn attention(&self, i: usize, a: &Attention, ropes: &mut Rotations) -> Result<AttentionWeights> {
        let (h, p) = (self.spec.hidden, format!("blk.{i}"));
        let qk = |stem: &str, heads: usize| -> Result<Option<NormWeights>> {
            let Some(n) = a.qk_norm else { return Ok(None) };
            let size = if n.by_head { a.key } else { heads * a.key };
            self.norm(&format!("{p}.{stem}"), size, n.norm).map(Some)
        };
        let rotation = match &a.rope {
            Some(r) if r.size > 0 => {
                let mut r = r.clone();
                let factors = |name: &str| -> Result<Option<Vec<f64>>> {
                    let Some(w) = self.find(name)? else { return Ok(None) };
                    Ok(Some(self.floats(&w)?.into_iter().map(f64::from).collect()))
                };
                r.factors = factors("rope_freqs.weight")?.unwrap_or_default();
                if let Scaling::Long { short, long, .. } = &mut r.scaling
                    && short.is_empty()
                {
                    let need = |v: Option<Vec<f64>>| {
                        v.ok_or_else(|| {
                            Error::argument("load", "the model has no rope_factors_short and _long")
                        })
                    };
                    *short = need(factors("rope_factors_short.weight")?)?;
                    *long = need(factors("rope_factors_long.weight")?)?;
                }
                Some(ropes.add(&r))
            }
            _ => None,
        };
        let sinks =
            match a.sinks {
                true => {
                    let name = format!("{p}.attn_sinks.weight");
                    let found = self.vector(&name, &[a.heads])?;
                    Some(found.ok_or_else(|| {
                        Error::argument("load", format!("the model has no tensor '{name}'"))
                    })?)
                }
                false => None,
            };
        Ok(AttentionWeights {
            q: self.matrix(&format!("{p}.attn_q"), &[a.heads * a.key, h])?,
            k: self.matrix(&format!("{p}.attn_k"), &[a.shared * a.key, h])?,
            v: self.matrix(&format!("{p}.attn_v"), &[a.shared * a.value, h])?,
            o: self.matrix(&format!("{p}.attn_output"), &[h, a.heads * a.value])?,
            q_norm: qk("attn_q_norm", a.heads)?,
            k_norm: qk("attn_k_norm", a.shared)?,
            sinks,
            rotation,
        })
    }

    fn dense(&self, stem: &str, suffix: &str, inner: usize, gated: bool) -> Result<Dense> {
        let h = self.spec.hidden;
        let name = |n: &str| format!("{stem}.ffn_{n}{suffix}");
        Ok(Dense {
            gate: gated.then(|| self.matrix(&name("gate"), &[inner, h])).transpose()?,
            up: self.matrix(&name("up"), &[inner, h])?,
            down: self.matrix(&name("down"), &[h, inner])?,
        })
    }

    fn ffn(&self, i: usize, l: &Layer) -> Result<FfnWeights> {
        let (h, p, n) = (self.spec.hidden, format!("blk.{i}"), l.inner);
        let e = match &l.ffn {
            Ffn::Gated(a) => return Ok(FfnWeights::Dense(self.dense(&p, "", n, true)?, *a)),
            Ffn::Plain(a) => return Ok(FfnWeights::Dense(self.dense(&p, "", n, false)?, *a)),
            Ffn::Experts(e) => e,
        };
        let shared = match e.common {
            Some(inner) => Some(self.dense(&p, "_shexp", inner, true)?),
            None => None,
        };
        let choice = format!("{p}.exp_probs_b.bias");
        let weights = Box::new(ExpertWeights {
            router: self.matrix(&format!("{p}.ffn_gate_inp"), &[e.count, h])?,
            choice_bias: if e.choice_bias { self.vector(&choice, &[e.count])? } else { None },
            gate: Some(self.matrix(&format!("{p}.ffn_gate_exps"), &[e.count, n, h])?),
            up: self.matrix(&format!("{p}.ffn_up_exps"), &[e.count, n, h])?,
            down: self.matrix(&format!("{p}.ffn_down_exps"), &[e.count, h, n])?,
            common: shared,
            common_gate: match e.common_gate {
                true => Some(self.row_gate(&format!("{p}.ffn_gate_inp_shexp"))?),
                false => None,
            },
        });
        Ok(FfnWeights::Experts(weights, e.clone()))
    }

    /// A gate with one output. Files store it as a vector or as a matrix of one row.
    fn row_gate(&self, stem: &str) -> Result<Matrix> {
        let name = format!("{stem}.weight");
        let values = self.floats(&self.need(&name)?)?;
        expect(&name, &[values.len()], &[self.spec.hidden])?;
        let data = ConstData::from_slice(&[1, values.len()], &values)?;
        Ok(Matrix { data: Tensor::constant(self.backend, &data), blocks: None, bias: None })
    }
}

fn expect(name: &str, found: &[usize], want: &[usize]) -> Result<()> {
    match found == want {
        true => Ok(()),
        false => {
            Err(Error::shape("load", format!("'{name}' is {found:?}, but the configuration means {want:?}")))
        }
    }
}

/// The different rotations of a model.
#[derive(Default)]
struct Rotations {
    known: HashMap<String, usize>,
    ropes: Vec<Rope>,
}

impl Rotations {
    /// The number of a rotation.
    fn add(&mut self, r: &Rope) -> usize {
        let n = self.ropes.len();
        *self.known.entry(format!("{r:?}")).or_insert_with(|| {
            self.ropes.push(r.clone());
            n
        })
    }
}

impl Decoder {
    /// Loads the weights of a model for sequences of up to `context` positions.
    ///
    /// # Errors
    /// `Error::Argument` for a tensor that is missing; `Error::Shape` for one whose shape does not follow
    /// from the configuration; errors of reading.
    pub fn load(backend: &Backend, source: &Source, spec: Spec, context: usize) -> Result<Decoder> {
        let l = Loader { source, spec: &spec, backend };
        let mut ropes = Rotations::default();
        let (v, h) = (spec.vocabulary, spec.hidden);
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (i, layer) in spec.layers.iter().enumerate() {
            let Mixer::Attention(a) = &layer.mixer;
            layers.push(LayerWeights {
                norms: l.norms(i, layer)?,
                attention: l.attention(i, a, &mut ropes)?,
                ffn: l.ffn(i, layer)?,
            });
        }
        let positions = match spec.learned_positions {
            true => Some(l.matrix("position_embd", &[spec.context, h])?),
            false => None,
        };
        let embedding_norm = spec.embedding_norm.map(|n| l.norm("token_embd_norm", h, n)).transpose()?;
        Ok(Decoder {
            embedding: l.matrix("token_embd", &[v, h])?,
            positions,
            embedding_norm,
            final_norm: l.norm("output_norm", h, spec.final_norm)?,
            head: l.maybe("output", &[v, h])?,
            ropes: ropes.ropes,
            layers,
            context,
            backend: backend.clone(),
            spec,
        })
    }

    /// The backend of the weights.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The longest sequence for which the decoder was loaded.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The different rotations of the layers: a step gets cosines and sines for each.
    pub fn ropes(&self) -> &[Rope] {
        &self.ropes
    }

    /// Types of the states of the cache, in the order of [`Decoder::step`]: keys and values of each layer,
    /// each `[pages * heads * page, size]`.
    pub fn cache_shapes(&self, c: CacheLayout) -> Vec<[usize; 2]> {
        let layers = self.spec.layers.iter();
        let of = |l: &Layer| {
            let Mixer::Attention(a) = &l.mixer;
            let rows = c.pages * a.shared * c.page;
            [[rows, a.key], [rows, a.value]]
        };
        layers.flat_map(of).collect()
    }

    /// The activations of the rows after the last norm, `[rows, hidden]`, and the new states of the cache.
    pub fn activations(
        &self,
        rows: Rows<'_>,
        cache: &[Tensor],
        layout: CacheLayout,
    ) -> (Tensor, Vec<Tensor>) {
        let s = &self.spec;
        let mut x = self.embedding.rows(rows.tokens);
        if let Some(scale) = s.embedding_scale {
            x = x * scale;
        }
        if let Some(p) = &self.positions {
            let zero = Tensor::scalar(&self.backend, 0, DType::I32);
            x = x + p.rows(&rows.position.maximum(&zero));
        }
        if let Some(n) = &self.embedding_norm {
            x = n.apply(&x);
        }
        let mut states = Vec::with_capacity(cache.len());
        for ((w, l), state) in self.layers.iter().zip(&s.layers).zip(cache.chunks_exact(2)) {
            let Mixer::Attention(a) = &l.mixer;
            let step = AttentionStep { a, w: &w.attention, rows, layout };
            let scaled = |y: Tensor| match l.residual_scale {
                Some(by) => y * by,
                None => y,
            };
            let normed =
                |n: &Option<NormWeights>, x: &Tensor| n.as_ref().map_or_else(|| x.clone(), |n| n.apply(x));
            let input = normed(&w.norms[0], &x);
            let (y, keys, values) = step.run(&input, &state[0], &state[1]);
            states.extend([keys, values]);
            if matches!(l.order, Order::Parallel | Order::ParallelTwo) {
                let z = match &w.norms[2] {
                    Some(n) => n.apply(&x),
                    None => input,
                };
                x = x + scaled(y) + scaled(feed_forward(&w.ffn, &z));
                continue;
            }
            x = x + scaled(normed(&w.norms[1], &y));
            let y = feed_forward(&w.ffn, &normed(&w.norms[2], &x));
            x = x + scaled(normed(&w.norms[3], &y));
        }
        (self.final_norm.apply(&x), states)
    }

    /// The logits of the wanted rows, f32 `[n, vocabulary]`, and the new states of the cache.
    pub fn step(&self, rows: Rows<'_>, cache: &[Tensor], layout: CacheLayout) -> (Tensor, Vec<Tensor>) {
        let (x, states) = self.activations(rows, cache, layout);
        let x = x.gather(rows.wanted, 0);
        let mut z = self.head.as_ref().unwrap_or(&self.embedding).apply(&x);
        if let Some(scale) = self.spec.logit_scale {
            z = z * scale;
        }
        if let Some(cap) = self.spec.logit_cap {
            z = (z / cap).tanh() * cap;
        }
        (z, states)
    }
}

struct AttentionStep<'a> {
    a: &'a Attention,
    w: &'a AttentionWeights,
    rows: Rows<'a>,
    layout: CacheLayout,
}

impl AttentionStep<'_> {
    fn run(&self, x: &Tensor, keys: &Tensor, values: &Tensor) -> (Tensor, Tensor, Tensor) {
        let (a, w) = (self.a, self.w);
        let q = self.heads(w.q.apply(x), a.heads, &w.q_norm);
        let k = self.heads(w.k.apply(x), a.shared, &w.k_norm);
        let n = self.count();
        let v = w.v.apply(x).reshape([n, a.shared, a.value]);
        let (keys, values) = (self.write(keys, &k, a.key), self.write(values, &v, a.value));
        let CacheLayout { pages, page, .. } = self.layout;
        let cache = Cache {
            keys: &keys.reshape([pages, a.shared, page, a.key]),
            values: &values.reshape([pages, a.shared, page, a.value]),
            table: self.rows.table,
            sequence: self.rows.sequence,
            position: self.rows.position,
            sinks: w.sinks.as_ref(),
        };
        let options = CachedAttention { scale: a.scale, softcap: a.softcap, window: a.window };
        let y = q.cached_attention(cache, options).reshape([n, a.heads * a.value]);
        (w.o.apply(&y), keys, values)
    }

    fn count(&self) -> usize {
        self.rows.tokens.dims().map_or(0, |d| d[0])
    }

    /// Queries or keys `[rows, heads, size]`, normed and rotated.
    fn heads(&self, x: Tensor, heads: usize, norm: &Option<NormWeights>) -> Tensor {
        let (n, size) = (self.count(), self.a.key);
        let qk = self.a.qk_norm;
        let norms = |x: Tensor, after: bool| match (qk, norm) {
            (Some(q), Some(w)) if q.after_rope == after => match q.by_head {
                true => w.apply(&x),
                false => w.apply(&x.reshape([n, heads * size])).reshape([n, heads, size]),
            },
            _ => x,
        };
        let x = norms(x.reshape([n, heads, size]), false);
        norms(self.rotate(x, heads), true)
    }

    fn rotate(&self, x: Tensor, heads: usize) -> Tensor {
        let (Some(rope), Some(number)) = (&self.a.rope, self.w.rotation) else { return x };
        let (n, half) = (self.count(), rope.size / 2);
        let [cos, sin] = &self.rows.rotations[2 * number..][..2] else { return x };
        let turned = match rope.layout {
            Layout::Half => {
                let [cos, sin] = [cos, sin].map(|t| t.reshape([n, 1, half]));
                let (lo, hi) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
                Tensor::cat(&[&(&lo * &cos - &hi * &sin), &(&hi * &cos + &lo * &sin)], 2)
            }
            Layout::Pairs => {
                let [cos, sin] = [cos, sin].map(|t| t.reshape([n, 1, half, 1]));
                let pairs = x.narrow(-1, 0, rope.size).reshape([n, heads, half, 2]);
                let (a, b) = (pairs.narrow(-1, 0, 1), pairs.narrow(-1, 1, 1));
                let both = Tensor::cat(&[&(&a * &cos - &b * &sin), &(&b * &cos + &a * &sin)], 3);
                both.reshape([n, heads, rope.size])
            }
        };
        match rope.size == self.a.key {
            true => turned,
            false => Tensor::cat(&[&turned, &x.narrow(-1, rope.size, self.a.key - rope.size)], 2),
        }
    }

    /// The cache `[pages * heads * page, size]` with `new` `[rows, heads, size]` in its slots.
    fn write(&self, cache: &Tensor, new: &Tensor, size: usize) -> Tensor {
        let (n, heads, page) = (self.count(), self.a.shared, self.layout.page);
        let b = cache.backend();
        let int = |v: usize| Tensor::scalar(b, v as i64, DType::I32);
        let slot = self.rows.slot.reshape([n, 1]);
        let which = &slot / &int(page);
        let offset = &slot - &(&which * &int(page));
        let head = Tensor::arange(b, heads, DType::I32).reshape([1, heads]);
        let at = (which * int(heads) + head) * int(page) + offset;
        let rows = new.reshape([n * heads, size]).cast(self.layout.dtype);
        cache.scatter_rows(&at.reshape([n * heads]), &rows, 0, ScatterKind::Set)
    }
}

fn activate(a: Activation, gate: &Tensor) -> Tensor {
    match a {
        Activation::Silu => gate.silu(),
        Activation::GeluTanh => gate.gelu_tanh(),
        Activation::Gelu => gate.gelu(),
        Activation::Relu => gate.relu(),
        Activation::ReluSquared => {
            let r = gate.relu();
            &r * &r
        }
        Activation::ClampedSwiglu { alpha, .. } => gate * &(gate * alpha).sigmoid(),
    }
}

/// The product of gate and up part.
fn gated(a: Activation, gate: Tensor, up: Tensor) -> Tensor {
    if let Activation::ClampedSwiglu { limit, .. } = a {
        let g = gate.minimum(limit);
        let u = up.clamp(-limit, limit);
        return activate(a, &g) * (u + 1.0);
    }
    activate(a, &gate) * up
}

fn dense(w: &Dense, a: Activation, x: &Tensor) -> Tensor {
    let up = w.up.apply(x);
    let inner = match &w.gate {
        Some(g) => gated(a, g.apply(x), up),
        None => activate(a, &up),
    };
    w.down.apply(&inner)
}

fn feed_forward(w: &FfnWeights, x: &Tensor) -> Tensor {
    match w {
        FfnWeights::Dense(d, a) => dense(d, *a, x),
        FfnWeights::Experts(w, e) => experts(w, e, x),
    }
}

/// The numbers of the chosen experts, i64 `[rows, used]`, and their weights, f32 `[rows, used]`.
fn choose(w: &ExpertWeights, e: &Experts, x: &Tensor) -> (Tensor, Tensor) {
    let logits = w.router.apply(x);
    let scores = match e.score {
        Score::Softmax => logits.softmax(-1),
        Score::Sigmoid => logits.sigmoid(),
        Score::SoftmaxOfChosen => logits.clone(),
    };
    let mut judged = match &w.choice_bias {
        Some(b) => &scores + b,
        None => scores.clone(),
    };
    if let Some((groups, kept)) = e.groups.filter(|(n, kept)| kept < n) {
        judged = in_groups(judged, e, groups, kept);
    }
    let order = judged.argsort(-1, Sort::Descending).narrow(-1, 0, e.used);
    let mut weights = scores.gather_elements(&order, -1);
    if e.score == Score::SoftmaxOfChosen {
        weights = weights.softmax(-1);
    }
    if e.normalise {
        let sum = weights.sum_keepdim(-1);
        // DeepSeek's models add a small number for sums of zero.
        weights = weights / (sum + 1e-20);
    }
    if let Some(by) = e.scale {
        weights = weights * by;
    }
    (order, weights)
}

/// The scores with those of experts outside of the best groups replaced. The score of a group is the sum of
/// its two best experts if the choice has a bias, else its best expert (DeepSeek-V3 and V2).
fn in_groups(scores: Tensor, e: &Experts, groups: usize, kept: usize) -> Tensor {
    let n = scores.dims().map_or(0, |d| d[0]);
    let size = e.count / groups;
    let by_group = scores.reshape([n, groups, size]);
    let best = if e.choice_bias { 2.min(size) } else { 1 };
    let top = by_group.argsort(-1, Sort::Descending).narrow(-1, 0, best);
    let judged = by_group.gather_elements(&top, -1).sum(-1);
    let order = judged.argsort(-1, Sort::Descending).narrow(-1, 0, kept);
    let zeros = Tensor::zeros(scores.backend(), [n, groups], DType::F32);
    let ones = Tensor::ones(scores.backend(), [n, kept], DType::F32);
    let mask = zeros.scatter_elements(&order, &ones, -1, ScatterKind::Set).reshape([n, groups, 1]);
    let none =
        Tensor::scalar(scores.backend(), if e.choice_bias { f64::NEG_INFINITY } else { 0.0 }, DType::F32);
    mask.gt(0.5).select(&by_group, &none).reshape([n, e.count])
}

fn experts(w: &ExpertWeights, e: &Experts, x: &Tensor) -> Tensor {
    let (order, weights) = choose(w, e, x);
    let dims = x.dims().unwrap_or_default();
    let (n, h) = (dims.first().copied().unwrap_or(0), dims.last().copied().unwrap_or(0));
    let which = order.cast(DType::I32).reshape([n * e.used]);
    let rows = x.reshape([n, 1, h]).expand([n, e.used, h]).reshape([n * e.used, h]);
    let up = w.up.apply_which(&rows, &which);
    let inner = match &w.gate {
        Some(g) => gated(e.activation, g.apply_which(&rows, &which), up),
        None => activate(e.activation, &up),
    };
    let y = w.down.apply_which(&inner, &which).reshape([n, e.used, h]);
    let mut y = (y * weights.reshape([n, e.used, 1])).sum(1);
    if let Some(c) = &w.common {
        let mut z = dense(c, e.activation, x);
        if let Some(g) = &w.common_gate {
            z = z * g.apply(x).sigmoid();
        }
        y = y + z;
    }
    y
}

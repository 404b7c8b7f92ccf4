//! The computation of a step, and the arrangement of its rows.

use super::{Encoder, LayerWeights};
use crate::decoder::ffn::feed_forward;
use halcyon::hal::Tag;
use halcyon::ir::error::{Error, Result};
use halcyon::{Cache, CachedAttention, Compiled, ConstData, DType, Tensor};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// Positions per page.
const PAGE: usize = 16;
/// Texts are computed together up to this number of rows. A longer text has a step of its own.
const ROWS: usize = 512;
/// Numbers of texts of a step.
const TEXTS: &[usize] = &[1, 8, 64, ROWS];
/// Further elements of queries and keys of local layers: the first one hides positions after a text's end.
/// There are four so that rows stay aligned.
const MARK: usize = 4;
/// The mark of a hidden position. Its weight is 0 exactly.
const HIDDEN: f32 = -1e30;

/// The inputs of a step, in the order of [`inputs`].
struct Step<'a> {
    /// i32 `[rows]`: tokens, positions in their texts, texts, last positions of their texts (negative for
    /// unused rows), and the last positions that local layers see.
    tokens: &'a Tensor,
    place: &'a Tensor,
    text: &'a Tensor,
    last: &'a Tensor,
    near: &'a Tensor,
    /// i32 `[texts, n]`: the pages of each text.
    table: &'a Tensor,
    /// i32 `[pages * PAGE]`: the row of each slot of the pages; `rows` for a slot without a row.
    slots: &'a Tensor,
    /// Cosines and sines of each rotation, f32 `[rows, size / 2]`.
    rotations: &'a [Tensor],
}

/// Slots of keys and values `[pages, heads, PAGE]` as rows of `[rows * heads, size]`.
struct Places {
    with_hidden: Tensor,
    rows_only: Tensor,
    pages: usize,
}

impl Encoder {
    /// The vectors of the rows, f32 `[rows, hidden]`.
    fn step(&self, s: &Step<'_>) -> Tensor {
        let n = s.tokens.dims().map_or(0, |d| d[0]);
        let mut x = self.embedding.rows(s.tokens);
        if let (Some(p), Some(first)) = (&self.positions, self.spec.first_position) {
            let first = Tensor::scalar(&self.backend, first as i64, DType::I32);
            x = x + p.rows(&(s.place + &first));
        }
        if let Some(t) = &self.token_type {
            x = x + t;
        }
        x = self.embedding_norm.apply(&x);
        let places = self.places(s, n);
        for (w, l) in self.layers.iter().zip(&self.spec.layers) {
            if self.spec.norm_after {
                let y = &x + &self.attention(s, w, l.local, &x, &places);
                let y = w.attention_norm.as_ref().map_or_else(|| y.clone(), |norm| norm.apply(&y));
                x = w.ffn_norm.apply(&(&y + &feed_forward(&w.ffn, &y, &y)));
            } else {
                let input = w.attention_norm.as_ref().map_or_else(|| x.clone(), |norm| norm.apply(&x));
                x = &x + &self.attention(s, w, l.local, &input, &places);
                x = &x + &feed_forward(&w.ffn, &w.ffn_norm.apply(&x), &x);
            }
        }
        self.final_norm.as_ref().map_or_else(|| x.clone(), |norm| norm.apply(&x))
    }

    fn places(&self, s: &Step<'_>, rows: usize) -> Places {
        let heads = self.spec.heads;
        let int = |v: usize| Tensor::scalar(&self.backend, v as i64, DType::I32);
        let pages = s.slots.dims().map_or(0, |d| d[0] / PAGE);
        let head = Tensor::arange(&self.backend, heads, DType::I32).reshape([1, heads, 1]);
        let of = |slots: Tensor| {
            (slots.reshape([pages, 1, PAGE]) * int(heads) + &head).reshape([pages * heads * PAGE])
        };
        Places {
            with_hidden: of(s.slots.clone()),
            rows_only: of(s.slots.minimum(int(rows.saturating_sub(1)))),
            pages,
        }
    }

    fn attention(&self, s: &Step<'_>, w: &LayerWeights, local: bool, x: &Tensor, at: &Places) -> Tensor {
        let (heads, size) = (self.spec.heads, self.spec.head());
        let n = s.tokens.dims().map_or(0, |d| d[0]);
        let split = |y: Tensor| y.reshape([n, heads, size]);
        let q = self.rotate(s, split(w.q.apply(x)), w.rotation);
        let k = self.rotate(s, split(w.k.apply(x)), w.rotation);
        let v = w.v.apply(x).reshape([n * heads, size]);
        let values = v.gather(&at.rows_only, 0).reshape([at.pages, heads, PAGE, size]);
        // A local row sees as many positions after its own as before it, so the last ones of a text also see
        // slots after its end.
        let (q, keys, position, window) = match local {
            true => {
                let wide = size + MARK;
                let q = Tensor::cat(&[&q, &self.mark(1.0, [n, heads])], 2);
                let k = Tensor::cat(&[&k, &self.mark(0.0, [n, heads])], 2);
                let zeros = Tensor::zeros(&self.backend, [1, heads, size], DType::F32);
                let hidden = Tensor::cat(&[&zeros, &self.mark(HIDDEN, [1, heads])], 2);
                let k = Tensor::cat(&[&k, &hidden], 0).reshape([(n + 1) * heads, wide]);
                let keys = k.gather(&at.with_hidden, 0).reshape([at.pages, heads, PAGE, wide]);
                (q, keys, s.near, Some(2 * self.spec.reach + 1))
            }
            false => {
                let keys = k.reshape([n * heads, size]).gather(&at.rows_only, 0);
                (q, keys.reshape([at.pages, heads, PAGE, size]), s.last, None)
            }
        };
        let cache =
            Cache { keys: &keys, values: &values, table: s.table, sequence: s.text, position, sinks: None };
        let options = CachedAttention { scale: 1.0 / (size as f64).sqrt(), softcap: None, window };
        w.o.apply(&q.cached_attention(cache, options).reshape([n, heads * size]))
    }

    /// f32 `[rows, heads, MARK]`: `first`, then zeros.
    fn mark(&self, first: f32, dims: [usize; 2]) -> Tensor {
        let mut values = [0f32; MARK];
        values[0] = first;
        let one = Tensor::from_slice(&self.backend, [1, 1, MARK], &values);
        match one {
            Ok(t) => t.expand([dims[0], dims[1], MARK]),
            Err(_) => Tensor::zeros(&self.backend, [dims[0], dims[1], MARK], DType::F32),
        }
    }

    /// Rotates `[rows, heads, size]`.
    fn rotate(&self, s: &Step<'_>, x: Tensor, rotation: Option<usize>) -> Tensor {
        let Some([cos, sin]) = rotation.and_then(|r| s.rotations.get(2 * r..2 * r + 2)) else { return x };
        let half = self.spec.head() / 2;
        let n = s.tokens.dims().map_or(0, |d| d[0]);
        let [cos, sin] = [cos, sin].map(|t| t.reshape([n, 1, half]));
        let (lo, hi) = (x.narrow(-1, 0, half), x.narrow(-1, half, half));
        Tensor::cat(&[&(&lo * &cos - &hi * &sin), &(&hi * &cos + &lo * &sin)], 2)
    }
}

/// The smallest number of rows of a step that is at least `n`: powers of two, and from 64 on also the middle
/// between two of them.
fn padded(n: usize) -> usize {
    let power = n.max(8).next_power_of_two();
    let middle = power / 4 * 3;
    if power > 64 && n <= middle { middle } else { power }
}

/// Texts that are computed together.
fn groups<'a, 'b>(texts: &'a [&'b [u32]]) -> impl Iterator<Item = &'a [&'b [u32]]> {
    let mut rest = texts;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let mut rows = 0;
        let fits = |t: &&&[u32]| {
            rows += t.len();
            rows <= ROWS
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (group, after) = rest.split_at(count);
        rest = after;
        Some(group)
    })
}

/// The vectors of the rows, from the inputs of a step.
fn results(model: &Encoder, x: &[Tensor]) -> Vec<Tensor> {
    let [tokens, place, text, last, near, table, slots, rotations @ ..] = x else { return vec![] };
    vec![model.step(&Step { tokens, place, text, last, near, table, slots, rotations })]
}

type StepFn = Box<dyn Fn(&[Tensor]) -> Vec<Tensor> + Send + Sync>;

/// Computes the vectors of texts. It keeps a plan for each number of rows and texts of a step.
pub struct EncoderEngine {
    encoder: Arc<Encoder>,
    step: Compiled<StepFn>,
}

impl fmt::Debug for EncoderEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EncoderEngine({})", self.encoder.spec.body.family)
    }
}

impl EncoderEngine {
    /// An engine for an encoder.
    pub fn new(encoder: Arc<Encoder>) -> EncoderEngine {
        let model = encoder.clone();
        let f: StepFn = Box::new(move |x: &[Tensor]| results(&model, x));
        EncoderEngine { step: encoder.backend().compile(f), encoder }
    }

    /// The encoder.
    pub fn encoder(&self) -> &Encoder {
        &self.encoder
    }

    /// The vectors of the tokens of each text, f32 `[tokens, hidden]` in row-major order. The bits of a
    /// text's vectors do not depend on the other texts.
    ///
    /// # Errors
    /// `Error::Argument` for a text without tokens, with more tokens than [`Encoder::context`], or with a
    /// token outside of the vocabulary; errors of the device.
    pub fn hidden(&self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        self.check(texts)?;
        let mut out = Vec::with_capacity(texts.len());
        for group in groups(texts) {
            out.extend(self.together(group)?);
        }
        Ok(out)
    }

    /// Bytes of the weights, and of everything else that the texts take on the device. Nothing stays
    /// allocated.
    ///
    /// # Errors
    /// Those of [`EncoderEngine::hidden`]; errors of planning.
    pub(crate) fn need(&self, texts: &[&[u32]]) -> Result<(u64, u64)> {
        self.check(texts)?;
        let b = self.encoder.backend();
        let (mut weights, mut buffers, mut io) = (0u64, 0u64, 0u64);
        let mut seen = HashSet::new();
        for group in groups(texts) {
            let (mut inputs, mut bytes) = (vec![], 0u64);
            let mut shapes = vec![];
            for t in self.inputs(group)? {
                let (dtype, dims) = (t.dtype()?, t.dims()?);
                let size = b.device().footprint(dtype.bytes(dims.iter().product()), Tag::Io);
                bytes = bytes.saturating_add(size as u64);
                inputs.push(Tensor::placeholder(b, dtype, dims.as_slice()));
                shapes.push(dims);
            }
            // Each set of sizes has a plan, which keeps its buffers.
            if !seen.insert(shapes) {
                continue;
            }
            let results = results(&self.encoder, &inputs);
            let fit = b.fit_of(&inputs, &vec![false; inputs.len()], &results, None)?;
            weights = weights.max(fit.weights.saturating_add(fit.packed));
            buffers = buffers.saturating_add(fit.activations).saturating_add(fit.workspace);
            io = io.max(fit.outputs.saturating_add(bytes));
        }
        Ok((weights, buffers.saturating_add(io)))
    }

    fn check(&self, texts: &[&[u32]]) -> Result<()> {
        let (context, vocabulary) = (self.encoder.context(), self.encoder.spec.body.vocabulary);
        let bad = |what: String| Err(Error::argument("embed", what));
        for (i, t) in texts.iter().enumerate() {
            if t.is_empty() || t.len() > context {
                return bad(format!("text {i} has {} tokens: expected 1 to {context}", t.len()));
            }
            if let Some(t) = t.iter().find(|t| **t as usize >= vocabulary) {
                return bad(format!("token {t} is not in the vocabulary of {vocabulary}"));
            }
        }
        Ok(())
    }

    /// Computes texts in one step.
    fn together(&self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let inputs = self.inputs(texts)?;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let x = self.step.call(&inputs)?.pop().ok_or_else(|| Error::internal("a step has no result"))?;
        let (x, h) = (x.to_vec::<f32>()?, self.encoder.hidden());
        let mut at = 0;
        let of = |t: &&[u32]| {
            let from = at;
            at += t.len() * h;
            x[from..at].to_vec()
        };
        Ok(texts.iter().map(of).collect())
    }

    fn inputs(&self, texts: &[&[u32]]) -> Result<Vec<Tensor>> {
        let reach = self.encoder.spec.reach;
        let used: usize = texts.iter().map(|t| t.len()).sum();
        let n = padded(used);
        let count = TEXTS.iter().copied().find(|c| *c >= texts.len()).unwrap_or(texts.len());
        let columns = (n + reach).div_ceil(PAGE);
        // Each text may leave its last page partly empty.
        let pages = n / PAGE + count * (1 + reach.div_ceil(PAGE));
        let [mut token, mut place, mut text] = [vec![0i32; n], vec![0i32; n], vec![0i32; n]];
        let [mut last, mut near] = [vec![-1i32; n], vec![-1i32; n]];
        let mut table = vec![0i32; count * columns];
        let mut slots = vec![n as i32; pages * PAGE];
        let (mut row, mut page) = (0, 0);
        for (t, tokens) in texts.iter().enumerate() {
            for (i, id) in tokens.iter().enumerate() {
                token[row] = *id as i32;
                place[row] = i as i32;
                text[row] = t as i32;
                last[row] = tokens.len() as i32 - 1;
                near[row] = (i + reach) as i32;
                slots[page * PAGE + i] = row as i32;
                row += 1;
            }
            let own = (tokens.len() + reach).div_ceil(PAGE);
            for (column, entry) in table[t * columns..][..own].iter_mut().enumerate() {
                *entry = (page + column) as i32;
            }
            page += own;
        }
        let b = self.encoder.backend();
        let vector = |v: &[i32]| Tensor::from_slice(b, [v.len()], v);
        let mut inputs =
            vec![vector(&token)?, vector(&place)?, vector(&text)?, vector(&last)?, vector(&near)?];
        inputs.push(Tensor::from_slice(b, [count, columns], &table)?);
        inputs.push(vector(&slots)?);
        let lengths: Vec<usize> = last.iter().map(|l| (l + 1).max(1) as usize).collect();
        for rope in &self.encoder.ropes {
            let (cos, sin) = rope.rotations(&place, &lengths);
            for v in [cos, sin] {
                let data = ConstData::from_slice(&[n, rope.size / 2], &v)?;
                inputs.push(Tensor::constant(b, &data));
            }
        }
        Ok(inputs)
    }
}

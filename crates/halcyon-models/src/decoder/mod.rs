//! A decoder: the weights of a [`Spec`] and the computation of one step over rows of tokens.
//!
//! A step gets rows of tokens. Each row belongs to a sequence and has a position in it. Keys and values of
//! all rows are written to the cache first, then each row attends to the positions of its sequence up to its
//! own. So one step can hold a chunk of one prompt, single tokens of many sequences, or both.

mod attention;
pub(crate) mod ffn;
mod latent;
pub(crate) mod load;
mod per_layer;
mod recurrent;
pub(crate) mod weights;
mod whole;

use crate::grid::Grid;
use crate::lora::Lora;
use crate::rope::Rope;
use crate::source::Source;
use crate::spec::*;
use attention::{AttentionStep, AttentionWeights, cache_shapes};
use ffn::{FfnWeights, feed_forward};
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, DType, Tensor};
use load::{Loader, Rotations};
use per_layer::{InputWeights, OwnInput};
use recurrent::{RecurrentStep, RecurrentWeights};
use std::ops::Range;
use weights::{Matrix, NormWeights};

#[derive(Debug)]
struct LayerWeights {
    /// Before the mixer, after it, before the feed-forward part, after it.
    norms: [Option<NormWeights>; 4],
    mixer: MixerWeights,
    ffn: FfnWeights,
    /// For a further input of the layer.
    input: Option<OwnInput>,
    /// The layer's result is multiplied by this.
    output_scale: Option<Tensor>,
}

#[derive(Debug)]
enum MixerWeights {
    Attention(AttentionWeights, Box<Attention>),
    Recurrent(Box<RecurrentWeights>, Recurrent),
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
    inputs: Option<InputWeights>,
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
    /// For models with recurrent layers.
    pub grid: Option<Grid<'a>>,
}

/// The layout of the cache of keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLayout {
    /// 0: there is no cache, and the rows are whole sequences of `page` tokens, one after the other.
    pub pages: usize,
    /// Positions per page.
    pub page: usize,
    pub dtype: DType,
    /// Sequences at a time.
    pub sequences: usize,
}

/// The type of a state of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    pub dims: [usize; 2],
    pub dtype: DType,
}

impl CacheShape {
    /// Bytes of a state.
    pub fn bytes(&self) -> usize {
        self.dtype.bytes(self.dims[0].saturating_mul(self.dims[1]))
    }
}

/// How activations are rounded in products with weights in blocks. Backends whose kernels do not round them
/// give the same numbers for both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Activations {
    /// To 8 bits in groups of 32, as llama.cpp does; to 15 bits where that costs little.
    #[default]
    Fast,
    /// To 15 bits: logits are close to those of weights in f32.
    Fine,
}

/// Options of [`Decoder::load`]. A number is the context, with the defaults for the rest.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions<'a> {
    /// The longest sequence, in positions.
    pub context: usize,
    pub activations: Activations,
    /// Adapters, whose products are added to those of the matrices.
    pub lora: Option<&'a Lora>,
}

impl From<usize> for LoadOptions<'_> {
    fn from(context: usize) -> Self {
        LoadOptions { context, activations: Activations::default(), lora: None }
    }
}

impl Decoder {
    /// Loads the weights of a model.
    ///
    /// # Errors
    /// `Error::Argument` for a tensor that is missing; `Error::Shape` for one whose shape does not follow
    /// from the configuration, or for an adapter that does not fit its matrix; errors of reading.
    pub fn load<'a>(
        backend: &Backend,
        source: &Source,
        spec: Spec,
        options: impl Into<LoadOptions<'a>>,
    ) -> Result<Decoder> {
        let LoadOptions { context, activations, lora } = options.into();
        let l = Loader { source, spec: &spec, backend, activations, lora };
        let mut ropes = Rotations::default();
        let (v, h) = (spec.vocabulary, spec.hidden);
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (i, layer) in spec.layers.iter().enumerate() {
            let mixer = match &layer.mixer {
                Mixer::Attention(a) => MixerWeights::Attention(l.attention(i, a, &mut ropes)?, a.clone()),
                Mixer::Recurrent(r) => MixerWeights::Recurrent(Box::new(l.recurrent(i, r)?), *r),
            };
            layers.push(LayerWeights {
                norms: l.norms(i, layer)?,
                mixer,
                ffn: l.ffn(i, layer)?,
                input: spec.per_layer.map(|p| l.own_input(i, layer, p)).transpose()?,
                output_scale: l.vector(&format!("blk.{i}.layer_output_scale.weight"), &[1])?,
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
            inputs: spec.per_layer.map(|p| l.inputs(p)).transpose()?,
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

    /// The states of the cache, in the order of [`Decoder::step`]. An attention layer has keys and values,
    /// each `[pages * heads * page, size]`, or one state for both, or none if it reads those of another
    /// layer. A recurrent layer has a ring of inputs, `[rows, size]`, and if it scans, matrices,
    /// `[2 * (sequences + 1), heads * key * value]`, both in f32.
    pub fn cache_shapes(&self, c: CacheLayout) -> Vec<CacheShape> {
        self.spec.layers.iter().flat_map(|l| self.layer_shapes(l, c)).collect()
    }

    fn layer_shapes(&self, l: &Layer, c: CacheLayout) -> Vec<CacheShape> {
        match &l.mixer {
            Mixer::Attention(a) => {
                let of = |dims| CacheShape { dims, dtype: c.dtype };
                cache_shapes(a, c).into_iter().map(of).collect()
            }
            Mixer::Recurrent(r) => recurrent::cache_shapes(r, self.spec.hidden, c.sequences),
        }
    }

    /// Positions that the convolutions of recurrent layers see; `None` if the model has no such layers.
    pub(crate) fn kernel(&self) -> Option<usize> {
        self.spec.layers.iter().find_map(|l| match &l.mixer {
            Mixer::Recurrent(r) => Some(r.kernel),
            Mixer::Attention(_) => None,
        })
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
        let inputs = self.inputs.as_ref().map(|w| w.inputs(rows.tokens, &x));
        let mut states = Vec::with_capacity(cache.len());
        // The states of each layer among all of them.
        let mut own: Vec<Range<usize>> = Vec::with_capacity(s.layers.len());
        for (i, (w, l)) in self.layers.iter().zip(&s.layers).enumerate() {
            let scaled = |y: Tensor| match l.residual_scale {
                Some(by) => y * by,
                None => y,
            };
            let normed =
                |n: &Option<NormWeights>, x: &Tensor| n.as_ref().map_or_else(|| x.clone(), |n| n.apply(x));
            let input = normed(&w.norms[0], &x);
            let first = states.len();
            own.push(first..first + self.layer_shapes(l, layout).len());
            let other = match &l.mixer {
                Mixer::Attention(a) => a.keys_of,
                Mixer::Recurrent(_) => None,
            };
            let before = match other {
                Some(other) => &states[own[other].clone()],
                None => &cache[own[own.len() - 1].clone()],
            };
            let (y, new) = mix(&w.mixer, &input, rows, before, layout);
            states.extend(new);
            if matches!(l.order, Order::Parallel | Order::ParallelTwo) {
                let z = match &w.norms[2] {
                    Some(n) => n.apply(&x),
                    None => input,
                };
                let z = scaled(feed_forward(&w.ffn, &z, &x));
                x = x + scaled(y) + z;
                continue;
            }
            x = x + scaled(normed(&w.norms[1], &y));
            let y = feed_forward(&w.ffn, &normed(&w.norms[2], &x), &x);
            x = x + scaled(normed(&w.norms[3], &y));
            if let (Some(own), Some(inputs)) = (&w.input, &inputs) {
                x = own.apply(x, inputs, i);
            }
            if let Some(scale) = &w.output_scale {
                x = x * scale;
            }
        }
        (self.final_norm.apply(&x), states)
    }

    /// The logits of the wanted rows, f32 `[n, vocabulary]`, and the new states of the cache.
    pub fn step(&self, rows: Rows<'_>, cache: &[Tensor], layout: CacheLayout) -> (Tensor, Vec<Tensor>) {
        let (x, states) = self.activations(rows, cache, layout);
        (self.logits(&x.gather(rows.wanted, 0)), states)
    }

    /// The logits of activations `[n, hidden]` after the last norm.
    fn logits(&self, x: &Tensor) -> Tensor {
        let mut z = self.head.as_ref().unwrap_or(&self.embedding).apply(x);
        if let Some(scale) = self.spec.logit_scale {
            z = z * scale;
        }
        if let Some(cap) = self.spec.logit_cap {
            z = (z / cap).tanh() * cap;
        }
        z
    }
}

/// The result of a mixer, and the new versions of its states.
fn mix(
    mixer: &MixerWeights,
    x: &Tensor,
    rows: Rows<'_>,
    states: &[Tensor],
    layout: CacheLayout,
) -> (Tensor, Vec<Tensor>) {
    match (mixer, rows.grid) {
        (MixerWeights::Attention(w, a), _) => AttentionStep { a, w, rows, layout }.run(x, states),
        (MixerWeights::Recurrent(w, r), Some(grid)) => {
            RecurrentStep { r, w, grid, slots: layout.sequences }.run(x, states)
        }
        (MixerWeights::Recurrent(..), None) => {
            let missing = || Error::argument("step", "a model with recurrent layers needs `Rows::grid`");
            (x.narrow(0, 0, usize::MAX).map_error(|_| missing()), states.to_vec())
        }
    }
}

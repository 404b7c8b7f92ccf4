//! A decoder: the weights of a [`Spec`] and the computation of one step over rows of tokens.
//!
//! A step gets rows of tokens. Each row belongs to a sequence and has a position in it. Keys and values of
//! all rows are written to the cache first, then each row attends to the positions of its sequence up to its
//! own. So one step can hold a chunk of one prompt, single tokens of many sequences, or both.

mod ahead;
mod attention;
pub mod cache;
pub(crate) mod ffn;
mod latent;
pub(crate) mod load;
mod per_layer;
mod recurrent;
pub(crate) mod run;
pub(crate) mod weights;
mod whole;

use crate::grid::Grid;
use crate::lora::Lora;
use crate::placement::{Placement, Stage};
use crate::rope::Rope;
use crate::source::Source;
use crate::spec::*;
use ahead::Joint;
use attention::{AttentionWeights, cache_shapes};
use cache::CacheTypes;
use ffn::FfnWeights;
use halcyon::ir::error::Result;
use halcyon::{Backend, DType, Tensor};
use load::{Loader, Rotations};
use per_layer::{InputWeights, OwnInput};
use recurrent::RecurrentWeights;
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

/// A decoder on a device, or on several.
#[derive(Debug)]
pub struct Decoder {
    pub spec: Spec,
    pub(crate) placement: Placement,
    pub(crate) stages: Vec<Stage>,
    /// Bytes of the weights of each part.
    pub(crate) bytes: Vec<u64>,
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
    /// Whether the head is the embedding's matrix, or a copy of it on another device.
    tied: bool,
    /// The different rotations of the layers.
    ropes: Vec<Rope>,
    /// What joins embeddings with the activations of another decoder, if this one predicts further tokens.
    joint: Option<Joint>,
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
    /// f32 `[rows, hidden]`, for decoders that predict further tokens: activations after the last norm at the
    /// positions before the tokens.
    pub before: Option<&'a Tensor>,
}

/// The layout of the cache of keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheLayout {
    /// 0: there is no cache, and the rows are whole sequences of `page` tokens, one after the other.
    pub pages: usize,
    /// Positions per page.
    pub page: usize,
    pub types: CacheTypes,
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
    /// Whether the decoder takes the adapters' present values as weights: they may be on any device, take
    /// device memory only when the first step needs them, and count in [`crate::MemoryNeed`]. The decoder
    /// does not follow their training then. On several devices this is always so.
    pub fixed: bool,
}

impl From<usize> for LoadOptions<'_> {
    fn from(context: usize) -> Self {
        LoadOptions { context, activations: Activations::default(), lora: None, fixed: false }
    }
}

impl Decoder {
    /// Loads the weights of a model on one device.
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
        Decoder::load_on(Placement::single(backend, spec.layers.len()), source, spec, options)
    }

    /// Loads each part of a model on its device. On several devices, adapters are [`LoadOptions::fixed`].
    ///
    /// # Errors
    /// The errors of [`Decoder::load`] and [`Placement::check`].
    pub fn load_on<'a>(
        placement: Placement,
        source: &Source,
        spec: Spec,
        options: impl Into<LoadOptions<'a>>,
    ) -> Result<Decoder> {
        placement.check(&spec)?;
        let LoadOptions { context, activations, lora, fixed } = options.into();
        let fixed = fixed || placement.devices.len() > 1;
        let on = |d: usize| Loader {
            fixed,
            ..Loader::new(source, &spec, &placement.devices[d], activations, lora)
        };
        let mut ropes = Rotations::default();
        let (v, h) = (spec.vocabulary, spec.hidden);
        let mut bytes = vec![0];
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (i, (layer, place)) in spec.layers.iter().zip(&placement.layers).enumerate() {
            let (mixer, feed_forward) = (on(place.mixer), on(place.feed_forward));
            layers.push(mixer.layer(i, layer, &feed_forward, &mut ropes)?);
            bytes.extend([mixer.bytes.get(), feed_forward.bytes.get()]);
        }
        let l = on(placement.embedding);
        let embedding = l.matrix("token_embd", &[v, h])?;
        let positions = match spec.learned_positions {
            true => Some(l.matrix("position_embd", &[spec.context, h])?),
            false => None,
        };
        let embedding_norm = spec.embedding_norm.map(|n| l.norm("token_embd_norm", h, n)).transpose()?;
        let inputs = spec.per_layer.map(|p| l.inputs(p)).transpose()?;
        bytes[0] = l.bytes.get();
        let l = on(placement.head);
        let final_norm = l.norm("output_norm", h, spec.final_norm)?;
        let own = l.maybe("output", &[v, h])?;
        let tied = own.is_none();
        let head = match placement.head == placement.embedding {
            false if tied => Some(l.matrix("token_embd", &[v, h])?),
            _ => own,
        };
        bytes.push(l.bytes.get());
        Ok(Decoder {
            stages: placement.stages(&spec),
            placement,
            bytes,
            embedding,
            positions,
            embedding_norm,
            inputs,
            final_norm,
            head,
            tied,
            ropes: ropes.ropes,
            joint: None,
            layers,
            context,
            spec,
        })
    }

    /// The backend that computes the logits.
    pub fn backend(&self) -> &Backend {
        &self.placement.devices[self.placement.head]
    }

    /// Whether the head is the embedding's matrix.
    pub(crate) fn is_tied(&self) -> bool {
        self.tied
    }

    /// Bytes of the embedding's matrix.
    pub(crate) fn embedding_bytes(&self) -> u64 {
        self.embedding.bytes()
    }

    /// The longest sequence for which the decoder was loaded.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The different rotations of the layers: a step gets cosines and sines for each.
    pub fn ropes(&self) -> &[Rope] {
        &self.ropes
    }

    /// The states of the cache, layer by layer. An attention layer has keys and values,
    /// each `[pages * heads * page, size]`, or one state for both, or none if it reads those of another
    /// layer. A recurrent layer has a ring of inputs, `[rows, size]`, and if it scans, matrices,
    /// `[2 * (sequences + 1), heads * key * value]`, both in f32.
    pub fn cache_shapes(&self, c: CacheLayout) -> Vec<CacheShape> {
        self.spec.layers.iter().flat_map(|l| self.layer_shapes(l, c)).collect()
    }

    pub(crate) fn layer_shapes(&self, l: &Layer, c: CacheLayout) -> Vec<CacheShape> {
        match &l.mixer {
            Mixer::Attention(a) => cache_shapes(a, c),
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
}

//! Encoders: models that turn each token of a text into a vector, where every position may read all others.
//!
//! A step computes rows of tokens of several texts, without padding. The keys and values of a layer are
//! arranged in pages as if they were a cache, so the same batch-invariant composites compute encoders and
//! decoders: the bits of a text's vectors do not depend on the other texts of the step.

mod bert;
mod modernbert;
mod step;
mod xlm_roberta;

use crate::decoder::Activations;
use crate::decoder::ffn::FfnWeights;
use crate::decoder::load::{Loader, Rotations, expect};
use crate::decoder::weights::{Matrix, NormWeights};
use crate::family::{Base, Hf, Meta};
use crate::lora::Lora;
use crate::rope::Rope;
use crate::source::Source;
use crate::spec::{Norm, Spec};
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, Tensor};
use serde_json::Value as Json;
use std::path::Path;
pub use step::EncoderEngine;

/// A family of encoders. Its fields are those of a family of decoders.
struct Family {
    name: &'static str,
    hf: &'static [&'static str],
    from_hf: fn(&Hf<'_>) -> Result<EncoderSpec>,
    gguf: &'static [&'static str],
    from_gguf: fn(&Meta<'_>) -> Result<EncoderSpec>,
}

const FAMILIES: &[Family] = &[bert::FAMILY, xlm_roberta::FAMILY, modernbert::FAMILY];

/// The names of the families of encoders.
pub fn names() -> Vec<&'static str> {
    FAMILIES.iter().map(|f| f.name).collect()
}

/// Whether this is `model_type` or `general.architecture` of an encoder.
pub(crate) fn is_encoder(name: &str) -> bool {
    FAMILIES.iter().any(|f| f.hf.contains(&name) || f.gguf.contains(&name))
}

/// What an encoder computes.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// Sizes, and the feed-forward parts of the layers.
    pub body: Spec,
    /// The norm of the embeddings and of the layers.
    pub norm: Norm,
    /// Norms come after the addition to the residual, else before the parts of a layer.
    pub norm_after: bool,
    pub heads: usize,
    /// The row of the learned positions for the first token of a text; `None` without learned positions.
    pub first_position: Option<usize>,
    pub layers: Vec<EncoderLayer>,
    /// Positions on each side that a local layer sees, besides its own.
    pub reach: usize,
}

/// What differs between the layers of an encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderLayer {
    /// Whether the layer sees [`EncoderSpec::reach`] positions on each side, else all.
    pub local: bool,
    pub rope: Option<Rope>,
}

impl EncoderSpec {
    /// Size of a head.
    fn head(&self) -> usize {
        self.body.hidden / self.heads.max(1)
    }

    /// An encoder with BERT's layers.
    fn post_norm(base: &Base, first_position: usize) -> EncoderSpec {
        let mut body = base.spec();
        body.learned_positions = true;
        EncoderSpec {
            layers: vec![EncoderLayer { local: false, rope: None }; body.layers.len()],
            body,
            norm: base.layer_norm(),
            norm_after: true,
            heads: base.heads,
            first_position: Some(first_position),
            reach: 0,
        }
    }

    /// What an encoder computes, by the configuration of its source; `None` if the model is no encoder.
    ///
    /// # Errors
    /// `Error::Format` or `Error::Argument` for a configuration that lacks something or has values that are
    /// not supported.
    pub fn of(source: &Source) -> Result<Option<EncoderSpec>> {
        match source {
            Source::Gguf(file) => {
                let name = file.metadata().str("general.architecture")?;
                if !FAMILIES.iter().any(|f| f.gguf.contains(&name)) {
                    return Ok(None);
                }
                EncoderSpec::from_metadata(&Meta::new(file, name)?).map(Some)
            }
            Source::Folder(folder) => EncoderSpec::from_config(&folder.config, folder.path()),
        }
    }

    /// What the encoder of a folder with this configuration computes; `None` if the model is no encoder.
    pub(crate) fn from_config(config: &Json, folder: &Path) -> Result<Option<EncoderSpec>> {
        let hf = Hf::new(config, folder);
        let name = hf.str("model_type")?;
        let Some(f) = FAMILIES.iter().find(|f| f.hf.contains(&name)) else { return Ok(None) };
        (f.from_hf)(&hf)?.checked().map(Some)
    }

    /// What the encoder of a GGUF file computes.
    pub(crate) fn from_metadata(meta: &Meta<'_>) -> Result<EncoderSpec> {
        let unknown = || Error::argument("configuration", format!("'{}' is no encoder", meta.arch));
        let family = FAMILIES.iter().find(|f| f.gguf.contains(&meta.arch)).ok_or_else(unknown)?;
        (family.from_gguf)(meta)?.checked()
    }

    fn checked(self) -> Result<EncoderSpec> {
        crate::family::check(&self.body)?;
        if self.head() * self.heads != self.body.hidden {
            let what = format!("{} heads for a hidden size of {}", self.heads, self.body.hidden);
            return Err(Error::argument("configuration", what));
        }
        Ok(self)
    }
}

#[derive(Debug)]
struct LayerWeights {
    /// Before or after the attention; ModernBERT's first layer has none.
    attention_norm: Option<NormWeights>,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    ffn_norm: NormWeights,
    ffn: FfnWeights,
    rotation: Option<usize>,
}

/// An encoder on a backend.
#[derive(Debug)]
pub struct Encoder {
    pub spec: EncoderSpec,
    backend: Backend,
    embedding: Matrix,
    positions: Option<Matrix>,
    /// The embedding of the first token type, f32 `[1, hidden]`: texts have no second part.
    token_type: Option<Tensor>,
    embedding_norm: NormWeights,
    layers: Vec<LayerWeights>,
    final_norm: Option<NormWeights>,
    /// The different rotations of the layers.
    ropes: Vec<Rope>,
}

impl Encoder {
    /// Loads the weights of an encoder. The products of adapters, which may be on any device, are added to
    /// those of the matrices; the encoder does not follow their training.
    ///
    /// # Errors
    /// `Error::Argument` for a tensor that is missing; `Error::Shape` for one whose shape does not follow
    /// from the configuration, or for an adapter that does not fit its matrix; errors of reading.
    pub fn load(
        backend: &Backend,
        source: &Source,
        spec: EncoderSpec,
        lora: Option<&Lora>,
    ) -> Result<Encoder> {
        let l = Loader { fixed: true, ..Loader::new(source, &spec.body, backend, Activations::Fine, lora) };
        let (h, norm) = (spec.body.hidden, spec.norm);
        let mut ropes = Rotations::default();
        let mut layers = vec![];
        for (i, layer) in spec.layers.iter().enumerate() {
            let p = format!("blk.{i}");
            let square = |name: &str| l.matrix(&format!("{p}.{name}"), &[h, h]);
            let (attention_norm, ffn_norm) = match spec.norm_after {
                true => ("attn_output_norm", "layer_output_norm"),
                false => ("attn_norm", "ffn_norm"),
            };
            let missing = i == 0 && !spec.norm_after;
            let normed = |name: &str| l.norm(&format!("{p}.{name}"), h, norm);
            layers.push(LayerWeights {
                attention_norm: (!missing).then(|| normed(attention_norm)).transpose()?,
                q: square("attn_q")?,
                k: square("attn_k")?,
                v: square("attn_v")?,
                o: square("attn_output")?,
                ffn_norm: normed(ffn_norm)?,
                ffn: l.ffn(i, &spec.body.layers[i])?,
                rotation: layer.rope.as_ref().map(|r| ropes.add(r)),
            });
        }
        let positions = spec.first_position.map(|first| positions(&l, first)).transpose()?;
        Ok(Encoder {
            embedding: l.matrix("token_embd", &[spec.body.vocabulary, h])?,
            positions,
            token_type: if spec.norm_after { token_type(&l)? } else { None },
            embedding_norm: l.norm("token_embd_norm", h, norm)?,
            final_norm: (!spec.norm_after).then(|| l.norm("output_norm", h, norm)).transpose()?,
            layers,
            ropes: ropes.ropes,
            backend: backend.clone(),
            spec,
        })
    }

    /// The backend of the weights.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Size of a token's vector.
    pub fn hidden(&self) -> usize {
        self.spec.body.hidden
    }

    /// The longest text in tokens.
    pub fn context(&self) -> usize {
        self.spec.body.context
    }
}

/// The learned positions, of which there must be enough for the longest text.
fn positions(l: &Loader<'_>, first: usize) -> Result<Matrix> {
    let name = "position_embd";
    let rows = l.need(&format!("{name}.weight"))?.dims().first().copied().unwrap_or(0);
    if rows < first.saturating_add(l.spec.context) {
        let what = format!("{rows} learned positions, but texts may have {} tokens", l.spec.context);
        return Err(Error::shape("load", what));
    }
    l.matrix(name, &[rows, l.spec.hidden])
}

fn token_type(l: &Loader<'_>) -> Result<Option<Tensor>> {
    let (name, h) = ("token_types.weight", l.spec.hidden);
    let Some(w) = l.find(name)? else { return Ok(None) };
    let dims = w.dims();
    let rows = dims.first().copied().unwrap_or(0).max(1);
    expect(name, &dims, &[rows, h])?;
    let values = l.floats(&w)?;
    Ok(Some(Tensor::constant(l.backend, &ConstData::from_slice(&[1, h], &values[..h])?)))
}

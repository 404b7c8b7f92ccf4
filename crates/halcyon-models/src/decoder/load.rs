//! Finds weights, checks their shapes, and puts them on the backend.

use super::weights::{Matrix, NormWeights};
use super::{Activations, LayerWeights, MixerWeights};
use crate::lora::Lora;
use crate::rope::Rope;
use crate::source::{Source, Weights};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, DType, Tensor};
use std::cell::Cell;
use std::collections::HashMap;

pub(crate) struct Loader<'a> {
    pub(crate) source: &'a Source,
    pub(crate) spec: &'a Spec,
    pub(crate) backend: &'a Backend,
    pub(crate) activations: Activations,
    pub(crate) lora: Option<&'a Lora>,
    /// Whether adapters become constants of the backend.
    pub(crate) fixed: bool,
    /// Bytes of the weights so far.
    pub(crate) bytes: Cell<u64>,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        source: &'a Source,
        spec: &'a Spec,
        backend: &'a Backend,
        activations: Activations,
        lora: Option<&'a Lora>,
    ) -> Loader<'a> {
        Loader { source, spec, backend, activations, lora, fixed: false, bytes: Cell::new(0) }
    }
}

impl Loader<'_> {
    /// The weights of layer `i`, whose feed-forward part `feed_forward` loads.
    pub(super) fn layer(
        &self,
        i: usize,
        layer: &Layer,
        feed_forward: &Loader<'_>,
        ropes: &mut Rotations,
    ) -> Result<LayerWeights> {
        let mixer = match &layer.mixer {
            Mixer::Attention(a) => MixerWeights::Attention(self.attention(i, a, ropes)?, a.clone()),
            Mixer::Recurrent(r) => MixerWeights::Recurrent(Box::new(self.recurrent(i, r)?), *r),
        };
        let l = feed_forward;
        let [before, after] = [self.norm_of(i, layer, 0)?, self.norm_of(i, layer, 1)?];
        Ok(LayerWeights {
            norms: [before, after, l.norm_of(i, layer, 2)?, l.norm_of(i, layer, 3)?],
            mixer,
            ffn: l.ffn(i, layer)?,
            input: self.spec.per_layer.map(|p| l.own_input(i, layer, p)).transpose()?,
            output_scale: l.vector(&format!("blk.{i}.layer_output_scale.weight"), &[1])?,
        })
    }

    /// Counts weights of a type.
    pub(super) fn count(&self, dtype: DType, dims: &[usize]) {
        self.bytes.set(self.bytes.get() + dtype.bytes(dims.iter().product()) as u64);
    }

    pub(crate) fn find(&self, name: &str) -> Result<Option<Weights>> {
        self.source.find(self.spec, name)
    }

    pub(crate) fn need(&self, name: &str) -> Result<Weights> {
        self.find(name)?.ok_or_else(|| {
            Error::argument("load", format!("the {} model has no tensor '{name}'", self.spec.family))
        })
    }

    /// The bias or another vector in f32, of `dims`.
    pub(crate) fn vector(&self, name: &str, dims: &[usize]) -> Result<Option<Tensor>> {
        let Some(w) = self.find(name)? else { return Ok(None) };
        expect(name, &w.dims(), dims)?;
        let values = self.floats(&w)?;
        Ok(Some(Tensor::constant(self.backend, &ConstData::from_slice(dims, &values)?)))
    }

    pub(crate) fn floats(&self, w: &Weights) -> Result<Vec<f32>> {
        self.count(DType::F32, &w.dims());
        w.floats()
    }

    /// The matrix `stem.weight` of `dims`, and `stem.bias` if there is one.
    pub(crate) fn matrix(&self, stem: &str, dims: &[usize]) -> Result<Matrix> {
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
        self.count(data.dtype, &data.dims);
        let mut adapter = self.lora.and_then(|l| l.adapter(stem)).cloned();
        if let Some(a) = &mut adapter {
            a.check(stem, dims)?;
            if self.fixed {
                *a = a.fixed_on(self.backend)?;
            }
        }
        // Rounding errors of values reach the result without a softmax or a gate in between, and their matrix
        // is small if heads are shared.
        let fine = self.activations == Activations::Fine || stem.ends_with(".attn_v");
        Ok(Matrix { fine, bias, adapter, ..Matrix::new(Tensor::constant(self.backend, &data), w.blocks) })
    }

    pub(crate) fn maybe(&self, stem: &str, dims: &[usize]) -> Result<Option<Matrix>> {
        match self.find(&format!("{stem}.weight"))? {
            Some(_) => self.matrix(stem, dims).map(Some),
            None => Ok(None),
        }
    }

    pub(crate) fn norm(&self, stem: &str, size: usize, spec: Norm) -> Result<NormWeights> {
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

    /// The norm before the mixer of a layer (0), after it (1), before the feed-forward part (2) or after it
    /// (3), if the layer has one there.
    pub(crate) fn norm_of(&self, i: usize, l: &Layer, n: usize) -> Result<Option<NormWeights>> {
        let names = match l.order {
            Order::Before => [Some("attn_norm"), None, Some("ffn_norm"), None],
            Order::After => [None, Some("post_attention_norm"), None, Some("post_ffw_norm")],
            Order::Both => ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"].map(Some),
            Order::Parallel => [Some("attn_norm"), None, None, None],
            // GGUF calls the norm before the feed-forward part `attn_norm`.
            Order::ParallelTwo => [Some("attn_norm_2"), None, Some("attn_norm"), None],
        };
        let one = |name: &str| self.norm(&format!("blk.{i}.{name}"), self.spec.hidden, l.norm);
        names[n].map(one).transpose()
    }
}

pub(crate) fn expect(name: &str, found: &[usize], want: &[usize]) -> Result<()> {
    match found == want {
        true => Ok(()),
        false => {
            Err(Error::shape("load", format!("'{name}' is {found:?}, but the configuration means {want:?}")))
        }
    }
}

/// The different rotations of a model.
#[derive(Default)]
pub(crate) struct Rotations {
    pub(crate) known: HashMap<String, usize>,
    pub(crate) ropes: Vec<Rope>,
}

impl Rotations {
    /// The number of a rotation.
    pub(crate) fn add(&mut self, r: &Rope) -> usize {
        let n = self.ropes.len();
        *self.known.entry(format!("{r:?}")).or_insert_with(|| {
            self.ropes.push(r.clone());
            n
        })
    }
}

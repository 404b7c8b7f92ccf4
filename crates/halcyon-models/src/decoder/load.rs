//! Finds weights, checks their shapes, and puts them on the backend.

use super::Activations;
use super::weights::{Matrix, NormWeights};
use crate::lora::Lora;
use crate::rope::Rope;
use crate::source::{Source, Weights};
use crate::spec::*;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, DType, Tensor};
use std::collections::HashMap;

pub(crate) struct Loader<'a> {
    pub(crate) source: &'a Source,
    pub(crate) spec: &'a Spec,
    pub(crate) backend: &'a Backend,
    pub(crate) activations: Activations,
    pub(crate) lora: Option<&'a Lora>,
}

impl Loader<'_> {
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
        let adapter = self.lora.and_then(|l| l.adapter(stem)).cloned();
        if let Some(a) = &adapter {
            a.check(stem, dims)?;
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

    pub(crate) fn norms(&self, i: usize, l: &Layer) -> Result<[Option<NormWeights>; 4]> {
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

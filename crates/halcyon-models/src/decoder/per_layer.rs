//! Inputs that each layer gets beside the activations.

use super::ffn::activate;
use super::load::Loader;
use super::weights::{Matrix, NormWeights};
use crate::spec::*;
use halcyon::Tensor;
use halcyon::ir::error::Result;

/// Makes the inputs of all layers.
#[derive(Debug)]
pub(super) struct InputWeights {
    spec: PerLayer,
    layers: usize,
    hidden: usize,
    /// A row of `layers * size` elements per token.
    embedding: Matrix,
    projection: Matrix,
    norm: NormWeights,
}

/// The weights with which a layer uses its input.
#[derive(Debug)]
pub(super) struct OwnInput {
    spec: PerLayer,
    gate: Matrix,
    up: Matrix,
    norm: NormWeights,
}

impl Loader<'_> {
    pub(super) fn inputs(&self, p: PerLayer) -> Result<InputWeights> {
        let (s, layers) = (self.spec, self.spec.layers.len());
        Ok(InputWeights {
            spec: p,
            layers,
            hidden: s.hidden,
            embedding: self.matrix("per_layer_token_embd", &[s.vocabulary, layers * p.size])?,
            projection: self.matrix("per_layer_model_proj", &[layers * p.size, s.hidden])?,
            norm: self.norm("per_layer_proj_norm", p.size, p.norm)?,
        })
    }

    pub(super) fn own_input(&self, i: usize, l: &Layer, p: PerLayer) -> Result<OwnInput> {
        let (h, name) = (self.spec.hidden, |n: &str| format!("blk.{i}.{n}"));
        Ok(OwnInput {
            spec: p,
            gate: self.matrix(&name("inp_gate"), &[p.size, h])?,
            up: self.matrix(&name("proj"), &[h, p.size])?,
            norm: self.norm(&name("post_norm"), h, l.norm)?,
        })
    }
}

impl InputWeights {
    /// The inputs of all layers `[rows, layers, size]`, by the tokens and their scaled embeddings `x`.
    pub(super) fn inputs(&self, tokens: &Tensor, x: &Tensor) -> Tensor {
        let n = tokens.dims().map_or(0, |d| d[0]);
        let shape = [n, self.layers, self.spec.size];
        let own = self.embedding.rows(tokens) * (self.spec.size as f64).sqrt();
        let made = self.projection.apply(x) * (self.hidden as f64).powf(-0.5);
        (self.norm.apply(&made.reshape(shape)) + own.reshape(shape)) * 0.5f64.sqrt()
    }
}

impl OwnInput {
    /// The activations after layer `i` has used its input.
    pub(super) fn apply(&self, x: Tensor, inputs: &Tensor, i: usize) -> Tensor {
        let n = x.dims().map_or(0, |d| d[0]);
        let own = inputs.narrow(1, i, 1).reshape([n, self.spec.size]);
        let inner = activate(self.spec.activation, &self.gate.apply(&x)) * own;
        let y = self.norm.apply(&self.up.apply(&inner));
        x + y
    }
}

//! The layer that predicts further tokens (multi-token prediction, MTP): a decoder of one layer.
//!
//! Position `i` gets the activations of the main decoder after its last norm at this position, and the token
//! at the next one. Both are normed and joined, the embedding first, and a product makes one vector of them.
//! The layer, a norm and the head follow. The logits are those of the token at position `i + 2`. With its own
//! activations after the norm in place of the main decoder's, it predicts the token after that.
//!
//! This is what vLLM computes in `deepseek_mtp.py`, `glm4_moe_mtp.py` and `qwen3_next_mtp.py`, except that it
//! sets the embedding of the first position to 0 for DeepSeek; SGLang and llama.cpp do not.

use super::load::{Loader, Rotations};
use super::weights::{Matrix, NormWeights};
use super::{Decoder, LoadOptions};
use crate::placement::Placement;
use crate::source::Source;
use crate::spec::Spec;
use halcyon::Tensor;
use halcyon::ir::error::Result;

/// Makes the input of the layer.
#[derive(Debug)]
pub(super) struct Joint {
    /// Of the embedding.
    embedding: NormWeights,
    /// Of the activations.
    before: NormWeights,
    /// `[hidden, 2 * hidden]`.
    product: Matrix,
    /// Whether the embedding's matrix and the head are those of the main decoder.
    shared: [bool; 2],
}

impl Joint {
    pub(super) fn apply(&self, embedding: &Tensor, before: &Tensor) -> Tensor {
        let both = [self.embedding.apply(embedding), self.before.apply(before)];
        self.product.apply(&Tensor::cat(&[&both[0], &both[1]], 1))
    }
}

impl Decoder {
    /// The decoder of the first layer that predicts further tokens, on the device that computes the logits;
    /// `None` if the model has no such layer. `options` are those of this decoder. Matrices for embeddings
    /// and logits that the two have in common are in memory once on that device.
    ///
    /// # Errors
    /// The errors of [`Decoder::load`].
    pub fn load_ahead<'a>(
        &self,
        source: &Source,
        options: impl Into<LoadOptions<'a>>,
    ) -> Result<Option<Decoder>> {
        let Some(layer) = self.spec.ahead.first() else { return Ok(None) };
        let LoadOptions { context, activations, lora, fixed } = options.into();
        let (backend, n, h) = (self.backend(), self.spec.layers.len(), self.spec.hidden);
        let l = Loader { fixed, ..Loader::new(source, &self.spec, backend, activations, lora) };
        let name = |own: &str| format!("blk.{n}.nextn.{own}");
        let mut ropes = Rotations::default();
        let mut joint = Joint {
            shared: [false; 2],
            embedding: l.norm(&name("enorm"), h, self.spec.final_norm)?,
            before: l.norm(&name("hnorm"), h, self.spec.final_norm)?,
            product: l.matrix(&name("eh_proj"), &[h, 2 * h])?,
        };
        let own = l.layer(n, layer, &l, &mut ropes)?;
        let layers = l.bytes.get();
        let final_norm = match l.find(&format!("{}.weight", name("shared_head_norm")))? {
            Some(_) => l.norm(&name("shared_head_norm"), h, self.spec.final_norm)?,
            None => l.norm("output_norm", h, self.spec.final_norm)?,
        };
        let before = l.bytes.get();
        let same = self.placement.embedding == self.placement.head;
        let embedding = match own_matrix(&l, &name("embed_tokens"), "token_embd")? {
            Some(own) => own,
            None if same || self.tied => {
                joint.shared[0] = true;
                // With tied embeddings, the device that computes the logits has the matrix as its head.
                self.head.as_ref().filter(|_| !same).unwrap_or(&self.embedding).clone()
            }
            None => l.matrix("token_embd", &[self.spec.vocabulary, h])?,
        };
        let embeddings = l.bytes.get() - before;
        let main = if self.tied { "token_embd" } else { "output" };
        let head = match own_matrix(&l, &name("shared_head_head"), main)? {
            Some(own) => own,
            None => {
                joint.shared[1] = true;
                self.head.as_ref().unwrap_or(&self.embedding).clone()
            }
        };
        let rest = l.bytes.get() - layers - embeddings;
        let spec = Spec { layers: vec![layer.clone()], ahead: vec![], ..self.spec.clone() };
        let placement = Placement::single(backend, 1);
        Ok(Some(Decoder {
            stages: placement.stages(&spec),
            placement,
            bytes: vec![embeddings, layers, 0, rest],
            context,
            embedding,
            positions: None,
            embedding_norm: None,
            inputs: None,
            layers: vec![own],
            final_norm,
            head: Some(head),
            tied: false,
            ropes: ropes.ropes,
            joint: Some(joint),
            spec,
        }))
    }

    /// What the matrices compute that this decoder shares with the main one, of a token and of activations.
    pub(crate) fn shared_results(&self, token: &Tensor, x: &Tensor) -> Vec<Tensor> {
        let [embedding, head] = self.joint.as_ref().map_or([false; 2], |j| j.shared);
        let embedding = embedding.then(|| self.embedding.rows(token));
        let head = self.head.as_ref().filter(|_| head).map(|h| h.apply(x));
        embedding.into_iter().chain(head).collect()
    }

    /// Whether steps need the activations of another decoder ([`super::Rows::before`]).
    pub(crate) fn is_ahead(&self) -> bool {
        self.joint.is_some()
    }
}

/// A matrix that the layer has for itself; `None` if it is not in the file, or a copy of the main decoder's.
fn own_matrix(l: &Loader<'_>, stem: &str, main: &str) -> Result<Option<Matrix>> {
    let find = |stem: &str| l.find(&format!("{stem}.weight"));
    let Some(own) = find(stem)? else { return Ok(None) };
    if let Some(main) = find(main)?
        && (main.dims(), main.blocks, main.data.dtype) == (own.dims(), own.blocks, own.data.dtype)
        && main.data.bytes() == own.data.bytes()
    {
        return Ok(None);
    }
    l.matrix(stem, &[l.spec.vocabulary, l.spec.hidden]).map(Some)
}

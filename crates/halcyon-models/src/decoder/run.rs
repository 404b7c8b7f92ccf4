//! The computation of a step, part by part.

use super::attention::AttentionStep;
use super::ffn::feed_forward;
use super::recurrent::RecurrentStep;
use super::weights::NormWeights;
use super::{CacheLayout, Decoder, MixerWeights, Rows};
use crate::placement::{keys_of, mixer};
use crate::spec::Order;
use halcyon::ir::error::Error;
use halcyon::{DType, Tensor};
use std::ops::Range;

/// What a stage hands to the next one.
#[derive(Clone, Debug)]
pub(crate) struct Handed {
    /// The activations, f32 `[rows, hidden]`; of the wanted rows only if nothing but the head follows.
    pub(crate) x: Tensor,
    /// The layers' own inputs, f32 `[rows, layers, size]`, if the model has some.
    pub(crate) inputs: Option<Tensor>,
}

/// The states that a stage reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageStates<'a> {
    /// Those of the stage's own layers.
    pub(crate) own: &'a [Tensor],
    /// Those of other layers, in the order of [`crate::placement::Stage::shared`].
    pub(crate) shared: &'a [Tensor],
    pub(crate) layout: CacheLayout,
}

fn normed(n: &Option<NormWeights>, x: &Tensor) -> Tensor {
    n.as_ref().map_or_else(|| x.clone(), |n| n.apply(x))
}

impl Decoder {
    /// Computes the parts of stage `n` up to the last norm. `handed` is what the stage before made; `None`
    /// for the first stage. Returns the new versions of the stage's own states too.
    pub(crate) fn run(
        &self,
        n: usize,
        handed: Option<Handed>,
        rows: Rows<'_>,
        states: StageStates<'_>,
    ) -> (Handed, Vec<Tensor>) {
        let (stage, layout) = (&self.stages[n], states.layout);
        let Handed { mut x, inputs } = match handed {
            Some(h) => h,
            None => self.embedded(rows),
        };
        let shared = self.shared_ranges(n, layout);
        let mut new: Vec<Tensor> = Vec::with_capacity(states.own.len());
        // The states of each layer of the stage among its own.
        let mut own: Vec<(usize, Range<usize>)> = vec![];
        for (i, (w, l)) in self.layers.iter().zip(&self.spec.layers).enumerate() {
            let scaled = |y: Tensor| match l.residual_scale {
                Some(by) => y * by,
                None => y,
            };
            let mut side = None;
            if stage.parts.contains(&mixer(i)) {
                let input = normed(&w.norms[0], &x);
                let here = new.len()..new.len() + self.layer_shapes(l, layout).len();
                let find = |all: &[(usize, Range<usize>)], k: usize| {
                    all.iter().find(|(layer, _)| *layer == k).map(|(_, r)| r.clone())
                };
                let before = match keys_of(&self.spec, i) {
                    Some(k) => match find(&own, k) {
                        Some(r) => &new[r],
                        None => &states.shared[find(&shared, k).unwrap_or(0..0)],
                    },
                    None => &states.own[here.clone()],
                };
                own.push((i, here));
                let (y, made) = mix(&w.mixer, &input, rows, before, layout);
                new.extend(made);
                match l.order {
                    Order::Parallel | Order::ParallelTwo => side = Some((input, y)),
                    _ => x = x + scaled(normed(&w.norms[1], &y)),
                }
            }
            if !stage.parts.contains(&(mixer(i) + 1)) {
                continue;
            }
            if let Some((input, y)) = side {
                let z = match &w.norms[2] {
                    Some(n) => n.apply(&x),
                    None => input,
                };
                let z = scaled(feed_forward(&w.ffn, &z, &x));
                x = x + scaled(y) + z;
                continue;
            }
            let y = feed_forward(&w.ffn, &normed(&w.norms[2], &x), &x);
            x = x + scaled(normed(&w.norms[3], &y));
            if let (Some(own), Some(inputs)) = (&w.input, &inputs) {
                x = own.apply(x, inputs, i);
            }
            if let Some(scale) = &w.output_scale {
                x = x * scale;
            }
        }
        (Handed { x, inputs }, new)
    }

    /// The embeddings of the rows, and the layers' own inputs.
    fn embedded(&self, rows: Rows<'_>) -> Handed {
        let mut x = self.embedding.rows(rows.tokens);
        if let (Some(joint), Some(before)) = (&self.joint, rows.before) {
            x = joint.apply(&x, before);
        }
        if let Some(scale) = self.spec.embedding_scale {
            x = x * scale;
        }
        if let Some(p) = &self.positions {
            let zero = Tensor::scalar(rows.position.backend(), 0, DType::I32);
            x = x + p.rows(&rows.position.maximum(&zero));
        }
        if let Some(n) = &self.embedding_norm {
            x = n.apply(&x);
        }
        let inputs = self.inputs.as_ref().map(|w| w.inputs(rows.tokens, &x));
        Handed { x, inputs }
    }

    /// The states of the layers that stage `n` shares with earlier stages, among all that it gets of them.
    fn shared_ranges(&self, n: usize, layout: CacheLayout) -> Vec<(usize, Range<usize>)> {
        let mut at = 0;
        let of = |k: &usize| {
            let count = self.layer_shapes(&self.spec.layers[*k], layout).len();
            at += count;
            (*k, at - count..at)
        };
        self.stages[n].shared.iter().map(of).collect()
    }

    /// The activations after the last norm.
    pub(crate) fn finished(&self, x: &Tensor) -> Tensor {
        self.final_norm.apply(x)
    }

    /// The logits of activations `[n, hidden]` after the last norm.
    pub(crate) fn logits(&self, x: &Tensor) -> Tensor {
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
            let done = RecurrentStep { r, w, grid, slots: layout.sequences }.run(x, states);
            done.unwrap_or_else(|e| (failed(x, e), states.to_vec()))
        }
        (MixerWeights::Recurrent(w, r), None) => {
            let y = match layout.pages {
                // Whole sequences.
                0 => w.whole(r, x, layout.page),
                _ => Err(Error::argument("step", "a model with recurrent layers needs `Rows::grid`")),
            };
            (y.unwrap_or_else(|e| failed(x, e)), states.to_vec())
        }
    }
}

/// A tensor that carries the error.
fn failed(x: &Tensor, e: Error) -> Tensor {
    x.narrow(0, 0, usize::MAX).map_error(|_| e)
}

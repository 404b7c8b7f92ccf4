//! Proposals of the model's own layer for further tokens ([`Decoder::load_ahead`]).
//!
//! The layer has an engine of its own, whose position `i` needs the activations at position `i` of the model
//! and the token after it. So it follows the model one position behind: activations wait until the next token
//! is known, and until there are enough of them for a step, or tokens are to be proposed.
//!
//! What the layer computes only decides which tokens are proposed. Where a sequence was cut back, its last
//! position may hold a token that is no longer the next one.

use super::inputs::StepRows;
use super::stages::{self, Kind, Want};
use super::{Engine, Feed, StepFn};
use crate::decoder::Decoder;
use crate::sample::Sampler;
use halcyon::ir::error::{Error, Result};
use halcyon::{Compiled, Tensor};
use std::sync::Arc;

/// Positions that wait at most before the layer computes them, beside those of the last step.
pub(crate) const WAITING: usize = 64;

/// The layer with its cache.
pub(super) struct Ahead {
    pub(super) engine: Engine,
    /// Of each sequence.
    waiting: Vec<Waiting>,
}

/// The positions of a sequence from the length that the layer has up to that of the model.
#[derive(Clone, Default)]
struct Waiting {
    /// The model's activations, each of the hidden size.
    activations: Vec<f32>,
    /// The tokens after the positions: one less, because the last one is not known.
    tokens: Vec<u32>,
}

impl Ahead {
    /// Keeps `length` positions of a sequence that had more.
    pub(super) fn truncate(&mut self, sequence: usize, length: usize) {
        let hidden = self.engine.decoder.spec.hidden;
        let Some(w) = self.waiting.get_mut(sequence) else { return };
        let left = length.saturating_sub(self.engine.length(sequence));
        w.activations.truncate(left * hidden);
        w.tokens.truncate(left.saturating_sub(1));
        if left == 0 {
            self.engine.truncate(sequence, length);
        }
    }

    /// Computes what waits, where it is enough for a step.
    fn settle(&mut self) -> Result<()> {
        let hidden = self.engine.decoder.spec.hidden;
        for (sequence, w) in self.waiting.iter_mut().enumerate() {
            if w.tokens.len() < WAITING {
                continue;
            }
            let tokens = std::mem::take(&mut w.tokens);
            let rest = w.activations.split_off(tokens.len() * hidden);
            let before = std::mem::replace(&mut w.activations, rest);
            if let Err(e) = self.engine.feed_after(sequence, &tokens, &before) {
                w.tokens.splice(0..0, tokens);
                w.activations.splice(0..0, before);
                return Err(e);
            }
        }
        Ok(())
    }

    /// Takes the activations of the rows of a step of the model.
    fn learn(&mut self, rows: &StepRows, activations: &[f32]) {
        let size = self.engine.decoder.spec.hidden;
        for ((sequence, token), x) in rows.used().zip(activations.chunks_exact(size)) {
            let Some(w) = self.waiting.get_mut(sequence) else { continue };
            if !w.activations.is_empty() {
                w.tokens.push(token);
            }
            w.activations.extend_from_slice(x);
        }
    }
}

impl Engine {
    /// Follows all sequences with the model's own layer for further tokens from now on
    /// ([`Decoder::load_ahead`]), so that it can propose tokens; `None` ends this. All sequences become
    /// empty.
    ///
    /// # Errors
    /// `Error::Argument` for a layer of another model; errors of the device, such as out of memory.
    pub fn look_ahead(&mut self, layer: Option<Arc<Decoder>>) -> Result<()> {
        let sizes = |d: &Decoder| [d.spec.hidden, d.spec.vocabulary];
        if layer.as_ref().is_some_and(|l| !l.is_ahead() || sizes(l) != sizes(&self.decoder)) {
            return Err(Error::argument("speculation", "the layer for further tokens is not of this model"));
        }
        (0..self.lengths.len()).for_each(|s| {
            self.truncate(s, 0);
        });
        let ahead = match layer {
            Some(l) => Some(Box::new(Ahead {
                engine: Engine::of(l, self.options, Want::only(Kind::Ahead))?,
                waiting: vec![Waiting::default(); self.options.sequences],
            })),
            None => None,
        };
        self.want.activations = ahead.is_some();
        self.ahead = ahead;
        self.largest = None;
        let layout = self.options.layout();
        for (n, s) in self.stages.iter_mut().enumerate() {
            s.step = stages::compile(&self.decoder, n, layout, self.want);
        }
        Ok(())
    }

    /// Whether the model's own layer follows the sequences.
    pub fn looks_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// Computes a step, and gives the layer for further tokens its part.
    pub(super) fn results(
        &mut self,
        rows: &StepRows,
        last: Option<&Compiled<StepFn>>,
    ) -> Result<Vec<Tensor>> {
        if let Some(a) = &mut self.ahead {
            a.settle()?;
        }
        let mut out = self.run(rows, last)?;
        if let Some(a) = &mut self.ahead {
            let all = out.pop().ok_or_else(|| Error::internal("a step lacks a result"))?;
            a.learn(rows, &all.to_vec::<f32>()?);
        }
        Ok(out)
    }

    /// Adds tokens to a sequence of a decoder for further tokens. `before` are the activations before each,
    /// `[tokens, hidden]`. Returns the logits after the last token, and its activations.
    fn feed_after(&mut self, sequence: usize, tokens: &[u32], before: &[f32]) -> Result<[Vec<f32>; 2]> {
        let feeds = [Feed { sequence, tokens, all: false }];
        self.check(&feeds)?;
        let length = self.length(sequence);
        let made = self.after(&feeds, before);
        if made.is_err() {
            self.truncate(sequence, length);
        }
        made
    }

    fn after(&mut self, feeds: &[Feed<'_>], before: &[f32]) -> Result<[Vec<f32>; 2]> {
        let (lengths, hidden) = (self.ends(feeds, &[]), self.decoder.spec.hidden);
        let (mut out, mut rest) = (Default::default(), before);
        for step in self.steps(feeds) {
            let wanted = self.wanted(feeds, &lengths, &step);
            let mut rows = self.rows(feeds, &lengths, &step, &wanted)?;
            let (own, later) = rest.split_at((step.len() * hidden).min(rest.len()));
            (rows.before, rest) = (own.to_vec(), later);
            let made = self.run(&rows, None)?;
            let [logits, activations] = &made[..] else {
                return Err(Error::internal("a step lacks a result"));
            };
            if !wanted.is_empty() {
                out = [logits.to_vec::<f32>()?, activations.to_vec::<f32>()?];
            }
        }
        Ok(out)
    }

    /// At most `n` tokens that may follow `past`, whose last token the sequence does not hold yet.
    pub(crate) fn propose_ahead(
        &mut self,
        sequence: usize,
        past: &[u32],
        n: usize,
        mut sampler: Sampler,
    ) -> Result<Vec<u32>> {
        let Some(Ahead { engine, waiting }) = self.ahead.as_deref_mut() else { return Ok(vec![]) };
        let (Some(w), Some(token)) = (waiting.get_mut(sequence), past.last()) else { return Ok(vec![]) };
        // After a cut, the last activations are not known.
        if w.activations.is_empty() || n == 0 {
            return Ok(vec![]);
        }
        let tokens = [&w.tokens[..], &[*token]].concat();
        if engine.check(&[Feed { sequence, tokens: &tokens, all: false }]).is_err() {
            return Ok(vec![]);
        }
        let known = engine.length(sequence) + tokens.len();
        // Until the layer has computed the positions that wait, they stay.
        let mut made = engine.feed_after(sequence, &tokens, &w.activations)?;
        *w = Waiting::default();
        let (mut all, mut out) = (past.to_vec(), vec![]);
        let failed = loop {
            let [logits, activations] = made;
            // A grammar that no token can continue is an error of the generation, not of its proposals.
            let Ok(token) = sampler.next(&logits, &all) else { break None };
            if sampler.accept(token).is_err() {
                break None;
            }
            out.push(token);
            all.push(token);
            let full = engine.check(&[Feed { sequence, tokens: &[token], all: false }]).is_err();
            if out.len() >= n || sampler.is_complete() || full {
                break None;
            }
            made = match engine.feed_after(sequence, &[token], &activations) {
                Ok(next) => next,
                Err(e) => break Some(e),
            };
        };
        // What follows was computed from proposals.
        engine.truncate(sequence, known);
        failed.map_or(Ok(out), Err)
    }
}

#[cfg(test)]
mod tests;

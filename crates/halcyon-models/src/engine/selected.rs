//! Steps of which only the largest logits are copied to the host.

use super::inputs::StepRows;
use super::stages::{self, Kind, Want};
use super::{Engine, Feed};
use crate::device_sample::Largest;
use halcyon::ir::error::{Error, Result};
use halcyon::{BackendType, Tensor};

/// A step that the device computes.
#[derive(Debug)]
pub(crate) struct Pending {
    ids: Tensor,
    values: Tensor,
    k: usize,
    sequence: usize,
}

impl Pending {
    /// The largest logits of each row.
    fn wait(&self) -> Result<Vec<Largest>> {
        let (ids, values) = (self.ids.to_vec::<i32>()?, self.values.to_vec::<f32>()?);
        let rows = ids.chunks(self.k).zip(values.chunks(self.k));
        let row = |(i, v): (&[i32], &[f32])| i.iter().map(|i| *i as u32).zip(v.iter().copied()).collect();
        Ok(rows.map(row).collect())
    }
}

impl Engine {
    /// Whether selecting logits on the device is faster than copying all of them. On the CPU nothing is
    /// copied to another memory, and the host selects faster.
    pub fn selects(&self) -> bool {
        self.decoder.backend().info().backend != BackendType::Cpu
    }

    /// Adds a token to a sequence. Returns the `k` largest logits after it with their tokens, the largest
    /// first; of equal ones, the smaller token first. Only these are copied from the device. `k` is cut to
    /// the vocabulary's size.
    ///
    /// # Errors
    /// Those of [`Engine::feed`]; `Error::Argument` if `k` is 0.
    pub fn feed_largest(&mut self, sequence: usize, token: u32, k: usize) -> Result<Largest> {
        let pending = self.start_largest(sequence, token, k)?;
        self.finish_largest(&pending)
    }

    /// [`Engine::feed_largest`] that does not wait for the device.
    pub(crate) fn start_largest(&mut self, sequence: usize, token: u32, k: usize) -> Result<Pending> {
        let feeds = [Feed { sequence, tokens: &[token], all: false }];
        let k = self.check_largest(&feeds, k)?;
        let before = self.lengths[sequence];
        let rows = self.rows(&feeds, &[before + 1], &[(0, 0)], &[0]);
        let made = rows.and_then(|rows| self.run_largest(&rows, k, sequence));
        if made.is_err() {
            self.truncate(sequence, before);
        }
        made
    }

    /// Waits for a step of [`Engine::start_largest`], which must be the sequence's last one.
    pub(crate) fn finish_largest(&mut self, pending: &Pending) -> Result<Largest> {
        let made = pending.wait().and_then(|mut rows| {
            let short = || Error::internal("a step lacks a result");
            if rows.is_empty() { Err(short()) } else { Ok(rows.swap_remove(0)) }
        });
        if made.is_err() {
            self.truncate(pending.sequence, self.length(pending.sequence).saturating_sub(1));
        }
        made
    }

    /// [`Engine::feed_each`] that returns only the `k` largest of each row of logits.
    ///
    /// # Errors
    /// Those of [`Engine::feed`]; `Error::Argument` if `k` is 0.
    pub fn feed_selected(
        &mut self,
        feeds: &[Feed<'_>],
        ends: &[usize],
        k: usize,
    ) -> Result<Vec<Vec<Largest>>> {
        let k = self.check_largest(feeds, k)?;
        let before: Vec<(usize, usize)> =
            feeds.iter().map(|f| (f.sequence, self.lengths[f.sequence])).collect();
        self.each = true;
        let made = self.selected(feeds, ends, k);
        self.each = false;
        if made.is_err() {
            before.into_iter().for_each(|(sequence, length)| {
                self.truncate(sequence, length);
            });
        }
        made
    }

    fn selected(&mut self, feeds: &[Feed<'_>], ends: &[usize], k: usize) -> Result<Vec<Vec<Largest>>> {
        let mut out: Vec<Vec<Largest>> = vec![vec![]; feeds.len()];
        let lengths = self.ends(feeds, ends);
        for step in self.steps(feeds) {
            let wanted = self.wanted(feeds, &lengths, &step);
            let rows = self.rows(feeds, &lengths, &step, &wanted)?;
            if wanted.is_empty() {
                self.results(&rows, None)?;
                continue;
            }
            let made = self.run_largest(&rows, k, 0)?.wait()?;
            for (r, z) in wanted.into_iter().zip(made) {
                out[step[r].0].push(z);
            }
        }
        Ok(out)
    }

    /// Checks feeds, and cuts `k` to the vocabulary's size.
    fn check_largest(&self, feeds: &[Feed<'_>], k: usize) -> Result<usize> {
        if k == 0 {
            return Err(Error::argument("generate", "no logits are wanted"));
        }
        self.check(feeds)?;
        Ok(k.min(self.decoder.spec.vocabulary))
    }

    fn run_largest(&mut self, rows: &StepRows, k: usize, sequence: usize) -> Result<Pending> {
        if self.largest.as_ref().is_none_or(|l| l.0 != k) {
            let (model, layout) = (&self.decoder, self.options.layout());
            let last = model.stages.len() - 1;
            let want = Want { kind: Kind::Largest(k), ..self.want };
            self.largest = Some(Box::new((k, stages::compile(model, last, layout, want))));
        }
        let largest = self.largest.take();
        let made = self.results(rows, largest.as_deref().map(|l| &l.1));
        self.largest = largest;
        let out = made?;
        let [ids, values] = &out[..] else { return Err(Error::internal("a step lacks a result")) };
        Ok(Pending { ids: ids.clone(), values: values.clone(), k, sequence })
    }
}

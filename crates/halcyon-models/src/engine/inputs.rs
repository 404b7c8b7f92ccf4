//! The inputs of a step.

use super::{Engine, Feed, padded};
use crate::decoder::{Decoder, Rows};
use crate::grid::{self, Grid};
use crate::rope::Rope;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Tensor};

/// The rows of a step on the host: see [`Rows`].
pub(super) struct StepRows {
    token: Vec<i32>,
    position: Vec<i32>,
    sequence: Vec<i32>,
    slot: Vec<i32>,
    /// Rows and columns, and the pages.
    table: ([usize; 2], Vec<i32>),
    wanted: Vec<i32>,
    /// Half the size of each rotation, and its cosines and sines.
    rotations: Vec<(usize, [Vec<f32>; 2])>,
    /// For decoders that predict further tokens: [`Rows::before`].
    pub(super) before: Vec<f32>,
    /// Sequence and position of each row that is used.
    at: Vec<(usize, usize)>,
}

impl StepRows {
    /// The sequence and the token of each row that is used.
    pub(super) fn used(&self) -> impl Iterator<Item = (usize, u32)> {
        self.at.iter().zip(&self.token).map(|((sequence, _), token)| (*sequence, *token as u32))
    }
}

impl Engine {
    /// The rows `(feed, token of the feed)` of a step, for which pages are taken. `lengths` are those of the
    /// sequences after all steps.
    pub(super) fn rows(
        &mut self,
        feeds: &[Feed<'_>],
        lengths: &[usize],
        rows: &[(usize, usize)],
        wanted: &[usize],
    ) -> Result<StepRows> {
        let page = self.options.page;
        let padded = padded(rows.len());
        let mut token = vec![0i32; padded];
        let mut position = vec![-1i32; padded];
        let mut sequence = vec![0i32; padded];
        let mut slot = vec![0i32; padded];
        let mut length = vec![1usize; padded];
        let mut places = Vec::with_capacity(rows.len());
        for (r, &(f, i)) in rows.iter().enumerate() {
            let feed = &feeds[f];
            let s = feed.sequence;
            let at = self.lengths[s];
            if at / page == self.pages[s].len() {
                let next = self.free.pop().ok_or_else(|| Error::internal("the cache has no free page"))?;
                self.pages[s].push(next);
            }
            token[r] = feed.tokens[i] as i32;
            position[r] = at as i32;
            sequence[r] = s as i32;
            length[r] = if self.each && feed.all { at + 1 } else { lengths[f] };
            slot[r] = (self.pages[s][at / page] as usize * page + at % page) as i32;
            places.push((s, at));
            self.lengths[s] = at + 1;
            if self.decoder.kernel().is_some() {
                self.floors[s] = self.floors[s].max(grid::floor(at + 1));
            }
        }
        let columns = self.context().div_ceil(page);
        let mut table = vec![0i32; self.pages.len() * columns];
        for (s, pages) in self.pages.iter().enumerate() {
            for (p, page) in pages.iter().enumerate() {
                table[s * columns + p] = *page as i32;
            }
        }
        // The plan computes the logits of at least one row. Few numbers of rows mean few plans.
        let mut want: Vec<i32> = wanted.iter().map(|r| *r as i32).collect();
        want.resize(self::padded(wanted.len().max(1)).min(padded), 0);
        let angles = |rope: &Rope| {
            let (cos, sin) = rope.rotations(&position, &length);
            (rope.size / 2, [cos, sin])
        };
        Ok(StepRows {
            rotations: self.decoder.ropes().iter().map(angles).collect(),
            token,
            position,
            sequence,
            slot,
            table: ([self.pages.len(), columns], table),
            wanted: want,
            before: vec![],
            at: places,
        })
    }

    /// The inputs of a step on a backend, in the order of [`split`].
    pub(super) fn inputs(&self, backend: &Backend, rows: &StepRows) -> Result<Vec<Tensor>> {
        let vector = |v: &[i32]| Tensor::from_slice(backend, [v.len()], v);
        let (dims, table) = &rows.table;
        let mut inputs = vec![
            vector(&rows.token)?,
            vector(&rows.position)?,
            vector(&rows.sequence)?,
            vector(&rows.slot)?,
            Tensor::from_slice(backend, *dims, table)?,
            vector(&rows.wanted)?,
        ];
        let padded = rows.token.len();
        for (half, both) in &rows.rotations {
            for v in both {
                inputs.push(Tensor::from_slice(backend, [padded, *half], v)?);
            }
        }
        if let Some(kernel) = self.decoder.kernel() {
            inputs.extend(grid::inputs(backend, &rows.at, padded, self.options.sequences, kernel)?);
        }
        if self.decoder.is_ahead() {
            let hidden = self.decoder.spec.hidden;
            let mut before = rows.before.clone();
            before.resize(padded * hidden, 0.0);
            inputs.push(Tensor::from_slice(backend, [padded, hidden], &before)?);
        }
        Ok(inputs)
    }
}

/// The rows in a step's inputs, and the inputs after them: states.
pub(super) fn split<'a>(x: &'a [Tensor], model: &Decoder) -> Option<(Rows<'a>, &'a [Tensor])> {
    let [tokens, position, sequence, slot, table, wanted, rest @ ..] = x else { return None };
    let (rotations, rest) = rest.split_at_checked(2 * model.ropes().len())?;
    let (grid, rest) = rest.split_at_checked(if model.kernel().is_some() { Grid::COUNT } else { 0 })?;
    let grid = Grid::of(grid);
    let (before, rest) = rest.split_at_checked(usize::from(model.is_ahead()))?;
    let before = before.first();
    Some((Rows { tokens, position, sequence, slot, table, wanted, rotations, grid, before }, rest))
}

//! Runs a decoder: the paged cache of keys and values, and for each stage one compiled plan for each number
//! of rows and of rows whose logits are wanted.

pub(crate) mod ahead;
mod inputs;
mod selected;
pub(crate) mod stages;

use crate::decoder::cache::CacheTypes;
use crate::decoder::{CacheLayout, Decoder};
use crate::grid;
use ahead::Ahead;
use halcyon::ir::error::{Error, Result};
use halcyon::{Compiled, DType, Supply};
pub(crate) use selected::Pending;
use stages::{Kind, Runner, StepFn, Want};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Numbers of rows of a step. A step with fewer rows is filled up with unused rows.
const ROWS: &[usize] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Options of [`Engine::new`].
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Sequences at a time.
    pub sequences: usize,
    /// Positions of all sequences together for which the cache has room.
    pub positions: usize,
    /// Positions per page of the cache.
    pub page: usize,
    /// The types of cached keys and values; `DType::F16.into()` is f16 for both.
    pub cache: CacheTypes,
    /// The most rows of a step: longer prompts are computed in chunks.
    pub chunk: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions { sequences: 1, positions: 4096, page: 32, cache: DType::F16.into(), chunk: 512 }
    }
}

impl EngineOptions {
    /// The layout of the cache.
    pub fn layout(&self) -> CacheLayout {
        // Page 0 belongs to no sequence, and each sequence may leave its last page partly empty.
        let pages = self.positions.div_ceil(self.page.max(1)).saturating_add(self.sequences);
        CacheLayout { pages, page: self.page, types: self.cache, sequences: self.sequences }
    }
}

/// Tokens to compute: `tokens[i]` follows the positions that the sequence already has.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    pub sequence: usize,
    pub tokens: &'a [u32],
    /// Whether the logits of every token are wanted, or only those of the last one.
    pub all: bool,
}

/// A decoder with a cache.
pub struct Engine {
    decoder: Arc<Decoder>,
    options: EngineOptions,
    stages: Vec<Runner>,
    /// The last stage of a step that gives the largest logits only, and their number.
    largest: Option<Box<(usize, Compiled<StepFn>)>>,
    /// The pages of each sequence. Page 0 belongs to none: unused rows write there.
    pages: Vec<Vec<u32>>,
    free: Vec<u32>,
    /// Positions of each sequence.
    lengths: Vec<usize>,
    /// The shortest length, apart from 0, to which each sequence can be cut.
    floors: Vec<usize>,
    /// What steps give.
    want: Want,
    /// The model's own layer for further tokens.
    ahead: Option<Box<Ahead>>,
    /// Set after the first step: the thread on which the system supplies the rest of the caches' memory.
    /// Before it, the first token would come later.
    supply: OnceLock<Vec<Supply>>,
    /// Whether feeds whose logits are all wanted have the rotations of tokens that are fed one by one.
    each: bool,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({}, {:?})", self.decoder.spec.family, self.options)
    }
}

impl Engine {
    /// Allocates the cache.
    ///
    /// # Errors
    /// `Error::Argument` for sizes of 0; the errors of [`Decoder::check_cache`]; errors of the device, such
    /// as out of memory.
    pub fn new(decoder: Arc<Decoder>, options: EngineOptions) -> Result<Engine> {
        Engine::of(decoder, options, Want::only(Kind::Logits))
    }

    /// An engine whose [`Engine::feed`] returns the activations after the last norm, each of the hidden size,
    /// in place of logits.
    pub(crate) fn of_activations(decoder: Arc<Decoder>, options: EngineOptions) -> Result<Engine> {
        Engine::of(decoder, options, Want::only(Kind::Activations))
    }

    fn of(decoder: Arc<Decoder>, options: EngineOptions, want: Want) -> Result<Engine> {
        let o = options;
        if o.sequences == 0 || o.positions == 0 || o.page == 0 || o.chunk == 0 {
            return Err(Error::argument("engine", format!("{o:?}: every size must be at least 1")));
        }
        decoder.check_cache(o.cache)?;
        let pages = o.layout().pages;
        Ok(Engine {
            stages: stages::runners(&decoder, options, want)?,
            pages: vec![vec![]; o.sequences],
            free: (1..pages as u32).rev().collect(),
            lengths: vec![0; o.sequences],
            floors: vec![0; o.sequences],
            want,
            ahead: None,
            supply: OnceLock::new(),
            each: false,
            largest: None,
            decoder,
            options,
        })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// The options.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Whether the cache has its values. If the device failed during a step, they may be lost.
    pub fn is_whole(&self) -> bool {
        self.stages.iter().flat_map(|s| &s.states).all(|s| s.value().eval().is_ok())
            && self.ahead.as_ref().is_none_or(|a| a.engine.is_whole())
    }

    /// Positions that a sequence has; 0 for one that does not exist.
    pub fn length(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// The longest sequence.
    pub fn context(&self) -> usize {
        self.decoder.context().min(self.options.positions)
    }

    /// Whether [`Engine::truncate`] keeps exactly `length` positions of a sequence, or all if it has fewer.
    pub fn can_truncate(&self, sequence: usize, length: usize) -> bool {
        length == 0 || self.floors.get(sequence).is_none_or(|f| length >= *f)
    }

    /// Forgets all positions of a sequence from `length` on. Returns the length that the sequence has then.
    ///
    /// A model with recurrent layers can go back by at least 16 positions from the longest length that the
    /// sequence has had since it was empty. Where it cannot ([`Engine::can_truncate`]), the sequence becomes
    /// empty, and the caller feeds all its tokens again.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> usize {
        if length >= self.length(sequence) {
            return self.length(sequence);
        }
        let length = if self.can_truncate(sequence, length) { length } else { 0 };
        if length == 0 {
            self.floors[sequence] = 0;
        }
        self.lengths[sequence] = length;
        let keep = length.div_ceil(self.options.page);
        self.free.extend(self.pages[sequence].drain(keep..));
        if let Some(a) = &mut self.ahead {
            a.truncate(sequence, length);
        }
        length
    }

    /// Computes tokens of one or several sequences. Returns the logits: for each feed those of its last
    /// token, or of all its tokens, each of the vocabulary's size, one after the other.
    ///
    /// # Errors
    /// `Error::Argument` for a token outside of the vocabulary, a sequence that does not exist, an empty
    /// feed, a sequence that would become longer than the context, or a cache without enough free pages;
    /// errors of the device. After an error the sequences have the lengths that they had before the call (or
    /// are empty, see [`Engine::truncate`]); if the device failed during a step, the cached values are lost,
    /// and further calls fail.
    pub fn feed(&mut self, feeds: &[Feed<'_>]) -> Result<Vec<Vec<f32>>> {
        self.feed_parts(feeds, &[])
    }

    /// [`Engine::feed_parts`] in which the feeds whose logits are all wanted have the results of tokens that
    /// are fed one by one: rotations that depend on the length of a sequence take for each token the length
    /// that the sequence has after it.
    ///
    /// # Errors
    /// Those of [`Engine::feed`].
    pub fn feed_each(&mut self, feeds: &[Feed<'_>], ends: &[usize]) -> Result<Vec<Vec<f32>>> {
        self.each = true;
        let made = self.feed_parts(feeds, ends);
        self.each = false;
        made
    }

    /// [`Engine::feed`] of prompts whose other parts follow in further calls. `ends` are the lengths of the
    /// sequences after the last part, on which some rotations depend; none: this is the last part of all. A
    /// feed that does not reach its end has no logits.
    ///
    /// # Errors
    /// Those of [`Engine::feed`].
    pub fn feed_parts(&mut self, feeds: &[Feed<'_>], ends: &[usize]) -> Result<Vec<Vec<f32>>> {
        self.check(feeds)?;
        let before: Vec<(usize, usize)> =
            feeds.iter().map(|f| (f.sequence, self.lengths[f.sequence])).collect();
        let made = self.feed_checked(feeds, ends);
        if made.is_err() {
            before.into_iter().for_each(|(sequence, length)| {
                self.truncate(sequence, length);
            });
        }
        made
    }

    /// [`Engine::feed`] without its checks. After an error the lengths are too large.
    fn feed_checked(&mut self, feeds: &[Feed<'_>], ends: &[usize]) -> Result<Vec<Vec<f32>>> {
        let mut out: Vec<Vec<f32>> = vec![vec![]; feeds.len()];
        let lengths = self.ends(feeds, ends);
        for chunk in self.steps(feeds) {
            let wanted = self.wanted(feeds, &lengths, &chunk);
            let logits = self.chunk(feeds, &lengths, &chunk, &wanted)?;
            let spec = &self.decoder.spec;
            let size = if self.want.kind == Kind::Activations { spec.hidden } else { spec.vocabulary };
            for (r, z) in wanted.into_iter().zip(logits.chunks_exact(size)) {
                out[chunk[r].0].extend_from_slice(z);
            }
        }
        Ok(out)
    }

    /// The lengths of the sequences after the last part of each feed.
    fn ends(&self, feeds: &[Feed<'_>], ends: &[usize]) -> Vec<usize> {
        let after = |f: &Feed<'_>| self.lengths[f.sequence] + f.tokens.len();
        feeds.iter().enumerate().map(|(i, f)| ends.get(i).map_or(after(f), |e| after(f).max(*e))).collect()
    }

    /// The rows of a step whose logits are wanted: of a feed all, the last one, or none. `lengths` are those
    /// of [`Engine::ends`], and the sequences have the lengths from before the step.
    fn wanted(&self, feeds: &[Feed<'_>], lengths: &[usize], rows: &[(usize, usize)]) -> Vec<usize> {
        let mut next: Vec<usize> = feeds.iter().map(|f| self.lengths[f.sequence]).collect();
        let want = |(r, &(f, _)): (usize, &(usize, usize))| {
            next[f] += 1;
            (feeds[f].all || next[f] == lengths[f]).then_some(r)
        };
        rows.iter().enumerate().filter_map(want).collect()
    }

    /// The rows `(feed, token of the feed)` of each step.
    fn steps(&self, feeds: &[Feed<'_>]) -> Vec<Vec<(usize, usize)>> {
        if self.decoder.kernel().is_some() {
            let lengths: Vec<usize> = feeds.iter().map(|f| self.lengths[f.sequence]).collect();
            return grid::steps(feeds, &lengths, self.options.chunk);
        }
        let of = |(f, feed): (usize, &Feed<'_>)| (0..feed.tokens.len()).map(move |i| (f, i));
        let rows: Vec<(usize, usize)> = feeds.iter().enumerate().flat_map(of).collect();
        rows.chunks(self.options.chunk).map(<[_]>::to_vec).collect()
    }

    /// Whether an empty sequence can take these tokens.
    ///
    /// # Errors
    /// `Error::Argument` if there are none, one is outside of the vocabulary, or the context has no room.
    pub fn check_prompt(&self, tokens: &[u32]) -> Result<()> {
        let bad = |what: String| Err(Error::argument("generate", what));
        if tokens.is_empty() {
            return bad("the prompt has no tokens".into());
        }
        self.check_vocabulary(tokens)?;
        match tokens.len() <= self.context() {
            true => Ok(()),
            false => bad(format!("{} positions, but the context has {}", tokens.len(), self.context())),
        }
    }

    fn check_vocabulary(&self, tokens: &[u32]) -> Result<()> {
        let size = self.decoder.spec.vocabulary;
        match tokens.iter().find(|t| **t as usize >= size) {
            None => Ok(()),
            Some(t) => {
                Err(Error::argument("generate", format!("token {t} is not in the vocabulary of {size}")))
            }
        }
    }

    fn check(&self, feeds: &[Feed<'_>]) -> Result<()> {
        let bad = |what: String| Err(Error::argument("generate", what));
        let mut need = 0;
        for (i, f) in feeds.iter().enumerate() {
            if f.sequence >= self.lengths.len() || feeds[..i].iter().any(|g| g.sequence == f.sequence) {
                return bad(format!(
                    "sequence {} is given twice, or is not below {}",
                    f.sequence,
                    self.lengths.len()
                ));
            }
            if f.tokens.is_empty() {
                return bad(format!("sequence {} gets no tokens", f.sequence));
            }
            self.check_vocabulary(f.tokens)?;
            let length = self.lengths[f.sequence] + f.tokens.len();
            if length > self.context() {
                return bad(format!("{length} positions, but the context has {}", self.context()));
            }
            need += length.div_ceil(self.options.page) - self.pages[f.sequence].len();
        }
        match need <= self.free.len() {
            true => Ok(()),
            false => bad(format!("the cache needs {need} pages more, but {} are free", self.free.len())),
        }
    }

    /// Computes the rows `(feed, token of the feed)` of one step. `lengths` are those of the sequences after
    /// all chunks. Returns the logits of the rows `wanted`, and perhaps further ones.
    fn chunk(
        &mut self,
        feeds: &[Feed<'_>],
        lengths: &[usize],
        rows: &[(usize, usize)],
        wanted: &[usize],
    ) -> Result<Vec<f32>> {
        let rows = self.rows(feeds, lengths, rows, wanted)?;
        let mut out = self.results(&rows, None)?;
        let z = out.pop().ok_or_else(|| Error::internal("a step has no result"))?;
        if wanted.is_empty() { Ok(vec![]) } else { z.to_vec::<f32>() }
    }
}

/// The number of rows that a plan computes for `n` of them.
pub(crate) fn padded(n: usize) -> usize {
    ROWS.iter().copied().find(|r| *r >= n).unwrap_or(n)
}

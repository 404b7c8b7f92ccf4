//! Many prompts at once. A finished sequence's place is taken by the next prompt; pieces of prompts and
//! single tokens of other sequences share the steps.

use crate::device_sample::Scores;
use crate::engine::{Engine, Feed};
use crate::generate::{GenerateOptions, Generation, Piece, Session};
use crate::speculate::{Speculation, Step, Verified, stuck, verify};
use halcyon::ir::error::{Error, Result};
use halcyon_text::Tokenizer;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prompt with its own options, seed included: its tokens do not depend on the other requests.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub options: GenerateOptions,
}

/// What a step brought for one request.
#[derive(Debug)]
pub enum Event {
    Piece(Piece),
    /// The request ended; the last piece came before.
    Done(Box<Generation>),
    /// The request ended with an error of its own, for example of its mask.
    Failed(Error),
}

/// The state of the requests; the engine computes their tokens.
#[derive(Debug, Default)]
pub struct Batch {
    tokenizer: Option<Arc<Tokenizer>>,
    waiting: VecDeque<(usize, Request)>,
    /// One per sequence of the engine.
    slots: Vec<Option<Running>>,
    next: usize,
    speculation: Option<Speculation>,
}

#[derive(Debug)]
struct Running {
    id: usize,
    session: Session<Arc<Tokenizer>>,
    /// Tokens to feed: what is left of the prompt, or the last token and proposed ones.
    rest: Vec<u32>,
    /// The number of proposed tokens in `rest`.
    proposed: usize,
    prompt: usize,
    /// Positions that the request may take.
    reserved: usize,
    start: Instant,
    prompt_time: Option<Duration>,
}

/// Positions that a request may take: the last token is not fed.
fn reserved(engine: &Engine, r: &Request) -> usize {
    let answer = r.options.max_tokens.unwrap_or(usize::MAX).saturating_sub(1);
    r.prompt.len().saturating_add(answer).min(engine.context())
}

impl Batch {
    /// A batch without requests.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>) -> Batch {
        Batch { tokenizer, ..Batch::default() }
    }

    /// Adds a request. Returns its number; the first one is 0.
    ///
    /// # Errors
    /// `Error::Argument` for a prompt that is empty, does not fit the context, or has tokens outside of the
    /// vocabulary, or for bad options.
    pub fn push(&mut self, engine: &Engine, request: Request) -> Result<usize> {
        engine.check_prompt(&request.prompt)?;
        request.options.sampling.check()?;
        self.waiting.push_back((self.next, request));
        self.next += 1;
        Ok(self.next - 1)
    }

    /// Generates with proposals of a draft from now on, or without: the texts stay the same. Returns what was
    /// used until now. A draft model serves as many sequences as its engine has.
    pub fn speculate(&mut self, with: impl Into<Option<Speculation>>) -> Option<Speculation> {
        std::mem::replace(&mut self.speculation, with.into())
    }

    /// The draft in use.
    pub fn speculation(&self) -> Option<&Speculation> {
        self.speculation.as_ref()
    }

    /// Whether no request is waiting or running.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Ends a request without a further event. Does nothing if it has ended.
    pub fn cancel(&mut self, engine: &mut Engine, id: usize) {
        self.waiting.retain(|(i, _)| *i != id);
        for (sequence, slot) in self.slots.iter_mut().enumerate() {
            if slot.take_if(|r| r.id == id).is_some() {
                engine.truncate(sequence, 0);
            }
        }
    }

    /// Computes one step. Returns what it brought, each with the request's number.
    ///
    /// # Errors
    /// Errors of the engine. All running requests are lost then.
    pub fn step(&mut self, engine: &mut Engine) -> Result<Vec<(usize, Event)>> {
        let mut out = vec![];
        self.admit(engine, &mut out);
        let start = Instant::now();
        // Single tokens go first, so that long prompts do not hold up other requests; then the requests that
        // came first.
        let mut order: Vec<usize> = (0..self.slots.len()).filter(|s| self.slots[*s].is_some()).collect();
        order.sort_by_key(|s| self.slots[*s].as_ref().map(|r| (r.prompt_time.is_none(), r.id)));
        self.propose(engine, &order)?;
        let mut room = engine.options().chunk;
        let (mut feeds, mut ends) = (vec![], vec![]);
        for &sequence in &order {
            let Some(r) = &self.slots[sequence] else { continue };
            let n = r.rest.len().min(room);
            if n == 0 {
                break;
            }
            room -= n;
            feeds.push(Feed { sequence, tokens: &r.rest[..n], all: r.proposed > 0 });
            ends.push(engine.length(sequence) + r.rest.len());
        }
        let fed: Vec<(usize, usize)> = feeds.iter().map(|f| (f.sequence, f.tokens.len())).collect();
        let made = match self.selected(engine) {
            _ if feeds.is_empty() => Ok(vec![]),
            Some(k) => engine
                .feed_selected(&feeds, &ends, k)
                .map(|rows| rows.into_iter().map(Scores::Selected).collect::<Vec<_>>()),
            None => {
                engine.feed_each(&feeds, &ends).map(|z| z.into_iter().map(Scores::All).collect::<Vec<_>>())
            }
        };
        let made = made.inspect_err(|_| {
            for s in 0..self.slots.len() {
                engine.truncate(s, 0);
            }
            self.slots.clear();
        })?;
        let running = |s: &usize| self.slots[*s].as_ref();
        // The time of a step with parts of prompts says nothing about proposals.
        let only_tokens = order.iter().filter_map(running).all(|r| r.prompt_time.is_some());
        let mut step = Step { sequences: fed.len(), proposed: 0, accepted: 0 };
        for ((sequence, n), scores) in fed.into_iter().zip(made) {
            let (proposed, accepted) = self.advance(engine, sequence, n, &scores, &mut out);
            step.proposed += proposed;
            step.accepted += accepted;
        }
        if let Some(s) = self.speculation.as_mut().filter(|_| only_tokens && step.sequences > 0) {
            s.record(step, start.elapsed());
        }
        Ok(out)
    }

    /// How many of the largest logits are enough for every running request, if the device selects them. Few
    /// different numbers mean few plans.
    fn selected(&self, engine: &Engine) -> Option<usize> {
        let all = self.slots.iter().flatten().map(|r| r.session.needed());
        let most = all.collect::<Option<Vec<_>>>().filter(|_| engine.selects())?.into_iter().max()?;
        Some(if most == 1 { 1 } else { most.next_multiple_of(64) })
    }

    /// Adds proposed tokens to the last token of each request. Steps with a part of a prompt have none.
    fn propose(&mut self, engine: &mut Engine, order: &[usize]) -> Result<()> {
        let Some(s) = &mut self.speculation else { return Ok(()) };
        let tokens = |r: &Running| r.prompt_time.is_some() && r.rest.len() == 1;
        if order.is_empty() || !self.slots.iter().flatten().all(tokens) {
            return Ok(());
        }
        let count = s.count(order.len());
        let mut room = engine.options().chunk.saturating_sub(order.len());
        for &sequence in order {
            let Some(r) = &mut self.slots[sequence] else { continue };
            // Neither the request nor the step takes more than it may.
            let most = r.reserved.saturating_sub(engine.length(sequence) + 1).min(room);
            let proposed = s.propose(engine, sequence, &mut r.session, count.min(most))?;
            r.proposed = proposed.len();
            room -= r.proposed;
            r.rest.extend(proposed);
        }
        Ok(())
    }

    /// Gives free sequences to waiting requests, in their order.
    fn admit(&mut self, engine: &mut Engine, out: &mut Vec<(usize, Event)>) {
        self.slots.resize_with(engine.options().sequences, || None);
        while let Some((_, request)) = self.waiting.front() {
            let Some(sequence) = self.slots.iter().position(Option::is_none) else { return };
            let need = reserved(engine, request);
            let used: usize = self.slots.iter().flatten().map(|r| r.reserved).sum();
            if used + need > engine.options().positions {
                return;
            }
            let Some((id, request)) = self.waiting.pop_front() else { return };
            match Session::new(self.tokenizer.clone(), &request.prompt, &request.options) {
                Err(e) => out.push((id, Event::Failed(e))),
                Ok(session) => {
                    engine.truncate(sequence, 0);
                    let prompt = request.prompt.len();
                    let (start, rest) = (Instant::now(), request.prompt);
                    let (reserved, proposed, prompt_time) = (need, 0, None);
                    let r = Running { id, session, rest, proposed, prompt, reserved, start, prompt_time };
                    self.slots[sequence] = Some(r);
                }
            }
        }
    }

    /// Takes over what the engine computed for a sequence. Returns the numbers of proposed tokens, and of
    /// those that were chosen.
    fn advance(
        &mut self,
        engine: &mut Engine,
        sequence: usize,
        fed: usize,
        scores: &Scores,
        out: &mut Vec<(usize, Event)>,
    ) -> (usize, usize) {
        let Some(r) = &mut self.slots[sequence] else { return (0, 0) };
        let done: Vec<u32> = r.rest.drain(..fed).collect();
        if !r.rest.is_empty() {
            return (0, 0);
        }
        r.prompt_time.get_or_insert_with(|| r.start.elapsed());
        let proposed = &done[fed - std::mem::take(&mut r.proposed)..];
        let base = engine.length(sequence) - proposed.len() - 1;
        let made = verify(&mut r.session, scores, proposed, (base, engine.context()), &mut |_| true);
        let Verified { accepted, mut last } = made;
        let counts = (proposed.len(), accepted.len());
        let length = base + 1 + accepted.len();
        if !proposed.is_empty() && engine.truncate(sequence, length) != length {
            last = Err(stuck());
        }
        out.extend(accepted.into_iter().map(|p| (r.id, Event::Piece(p))));
        let ended = match last {
            Ok(piece) => {
                let piece = piece.unwrap_or_default();
                r.rest.extend(piece.token);
                let ended = piece.finish.is_some();
                out.push((r.id, Event::Piece(piece)));
                ended
            }
            Err(e) => {
                out.push((r.id, Event::Failed(e)));
                engine.truncate(sequence, 0);
                self.slots[sequence] = None;
                return counts;
            }
        };
        if ended && let Some(r) = self.slots[sequence].take() {
            engine.truncate(sequence, 0);
            let prompt_time = r.prompt_time.unwrap_or_default();
            let time = r.start.elapsed().saturating_sub(prompt_time);
            out.push((r.id, Event::Done(Box::new(r.session.into_generation(r.prompt, prompt_time, time)))));
        }
        counts
    }
}

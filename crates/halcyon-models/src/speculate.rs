//! Speculative decoding: several tokens per step of the model.
//!
//! A draft proposes the next tokens, and one step of the model computes the logits after each of them. From
//! these logits, tokens are chosen as always, one after the other, as long as they are the proposed ones. So
//! each token comes from the same logits, the same steps of the sampler and the same number of the seed's
//! sequence as without a draft, and is the same token: for every temperature, mask and seed. (The bits of the
//! logits do not depend on the number of rows of a step; see [`Engine`].) How many tokens are proposed, and
//! whether any are, only changes the time, and therefore may follow measured times.
//!
//! A draft model draws with the same numbers as the model, and so does the model's own layer for further
//! tokens. Where both have the same distribution, it proposes the token that the model chooses.

use crate::decoder::Decoder;
use crate::device_sample::Scores;
use crate::engine::{Engine, Feed};
use crate::generate::{GenerateOptions, Generation, Piece, Session};
use crate::sample::Sampler;
use halcyon::ir::error::{Error, Result};
use halcyon_text::Tokenizer;
use std::collections::HashSet;
use std::fmt;
use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rounds with proposals after which their rate is judged.
const ROUNDS: usize = 8;

/// Steps without proposals after they did not pay. Doubled each time, up to 32 times as many.
const PAUSE: usize = 16;

/// Lengths of the texts that a lookup compares, longest first.
const NGRAMS: [usize; 3] = [4, 3, 2];

/// Tokens back to which a lookup searches.
const WINDOW: usize = 1 << 14;

/// What a model does for speculation: one sequence that grows and shrinks.
trait Model {
    fn length(&self) -> usize;
    fn context(&self) -> usize;
    /// Adds tokens. Returns the logits after all of them, or after the last one.
    fn feed(&mut self, tokens: &[u32], all: bool) -> Result<Vec<f32>>;
    fn truncate(&mut self, length: usize);
    /// Tokens that the model's own layer for further tokens proposes after `past`.
    fn ahead(&mut self, _past: &[u32], _n: usize, _sampler: Sampler) -> Result<Vec<u32>> {
        Ok(vec![])
    }
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// A sequence of an engine.
struct Sequence<'a>(&'a mut Engine, usize);

impl Model for Sequence<'_> {
    fn length(&self) -> usize {
        self.0.length(self.1)
    }

    fn context(&self) -> usize {
        self.0.context()
    }

    fn feed(&mut self, tokens: &[u32], all: bool) -> Result<Vec<f32>> {
        let feed = [Feed { sequence: self.1, tokens, all }];
        let made = if all { self.0.feed_each(&feed, &[]) } else { self.0.feed(&feed) };
        Ok(made?.pop().unwrap_or_default())
    }

    fn truncate(&mut self, length: usize) {
        self.0.truncate(self.1, length);
    }

    fn ahead(&mut self, past: &[u32], n: usize, sampler: Sampler) -> Result<Vec<u32>> {
        self.0.propose_ahead(self.1, past, n, sampler)
    }
}

/// Options of a [`Speculation`].
#[derive(Clone, Copy, Debug)]
pub struct SpeculationOptions {
    /// The most tokens that are proposed at once, from 1 to 15.
    pub most: usize,
    /// Whether tokens are also proposed where this was measured to take longer.
    pub always: bool,
}

impl SpeculationOptions {
    /// The most tokens that can be proposed at once. Recurrent layers cannot go back further.
    pub const MOST: usize = 15;
}

impl Default for SpeculationOptions {
    fn default() -> SpeculationOptions {
        SpeculationOptions { most: 7, always: false }
    }
}

/// Where proposals come from.
enum Draft {
    /// What followed the last tokens where they occurred before.
    Lookup,
    /// A model with the same vocabulary, and the tokens that each of its sequences holds.
    Model(Box<Engine>, Vec<Vec<u32>>),
    /// The model's own layer for further tokens.
    Ahead,
    /// These tokens.
    #[cfg(test)]
    Fixed(Vec<u32>),
}

impl Draft {
    fn propose(
        &mut self,
        model: &mut dyn Model,
        sequence: usize,
        (past, n): (&[u32], usize),
        sampler: Sampler,
    ) -> Result<Vec<u32>> {
        match self {
            Draft::Lookup => Ok(lookup(past, n).to_vec()),
            Draft::Ahead => model.ahead(past, n, sampler),
            Draft::Model(engine, held) => {
                let o = engine.options();
                // The sequences of the draft share its cache in equal parts.
                if sequence >= o.sequences || past.len() + n > o.positions / o.sequences {
                    return Ok(vec![]);
                }
                held.resize_with(o.sequences, Vec::new);
                drafted(&mut Sequence(engine, sequence), &mut held[sequence], past, n, sampler)
            }
            #[cfg(test)]
            Draft::Fixed(tokens) => Ok(tokens[..n.min(tokens.len())].to_vec()),
        }
    }
}

/// What the speculation of a [`Speculation`] brought so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpeculationStats {
    /// Steps of the model with proposed tokens.
    pub verified: usize,
    /// Steps without.
    pub plain: usize,
    /// Proposed tokens.
    pub proposed: usize,
    /// Those of them that were chosen.
    pub accepted: usize,
    /// Tokens per second divided by those of steps without proposals; `None` if none were measured.
    pub speed_up: Option<f64>,
}

impl SpeculationStats {
    /// The part of the proposed tokens that were chosen; 0 if none were proposed.
    pub fn acceptance(&self) -> f64 {
        self.accepted as f64 / self.proposed.max(1) as f64
    }
}

/// Generates with proposals of a draft. It keeps what it measured from one generation to the next.
pub struct Speculation {
    draft: Draft,
    pace: Pace,
}

impl fmt::Debug for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let draft = match &self.draft {
            Draft::Lookup => "lookup".to_string(),
            Draft::Ahead => "ahead".into(),
            Draft::Model(engine, _) => format!("{engine:?}"),
            #[cfg(test)]
            Draft::Fixed(_) => "fixed".into(),
        };
        write!(f, "Speculation({draft}, {:?})", self.pace.stats())
    }
}

impl Speculation {
    /// Proposes the tokens that followed the last ones where they occurred before: in answers that repeat
    /// parts of the prompt, such as changes of a text, these are often right. Takes no other model.
    ///
    /// # Errors
    /// `Error::Argument` for a number of tokens outside of 1 to 15.
    pub fn lookup(options: SpeculationOptions) -> Result<Speculation> {
        Ok(Speculation { draft: Draft::Lookup, pace: Pace::new(options)? })
    }

    /// Proposes the tokens of another model, usually a smaller one of the same family. `draft` uses its
    /// sequence 0 for this, and in a [`crate::Batch`] the sequence with the number of the model's. Sequences
    /// that it does not have get no proposals.
    ///
    /// # Errors
    /// `Error::Argument` if the vocabulary has another size than the model's, or for a number of tokens
    /// outside of 1 to 15.
    pub fn with_model(draft: Engine, model: &Engine, options: SpeculationOptions) -> Result<Speculation> {
        let [a, b] = [&draft, model].map(|e| e.decoder().spec.vocabulary);
        if a != b {
            let what =
                format!("the draft model has {a} tokens, but the model {b}; both need the same tokens");
            return Err(Error::argument("speculation", what));
        }
        Ok(Speculation { draft: Draft::Model(Box::new(draft), vec![]), pace: Pace::new(options)? })
    }

    /// Proposes the tokens that the model's own layer for further tokens (MTP) predicts: `layer` is that of
    /// [`crate::Decoder::load_ahead`]. `engine` follows all its sequences with the layer from now on, and
    /// they become empty ([`Engine::look_ahead`]). Other engines get no proposals.
    ///
    /// # Errors
    /// Those of [`Engine::look_ahead`]; `Error::Argument` for a number of tokens outside of 1 to 15.
    pub fn ahead(
        layer: Arc<Decoder>,
        engine: &mut Engine,
        options: SpeculationOptions,
    ) -> Result<Speculation> {
        let pace = Pace::new(options)?;
        engine.look_ahead(Some(layer))?;
        Ok(Speculation { draft: Draft::Ahead, pace })
    }

    /// What it brought so far.
    pub fn stats(&self) -> SpeculationStats {
        self.pace.stats()
    }

    /// [`crate::generate()`] with proposals: the same tokens, finish and length of the sequence.
    ///
    /// # Errors
    /// Those of [`crate::generate()`], and those of the draft model.
    pub fn generate(
        &mut self,
        engine: &mut Engine,
        sequence: usize,
        tokenizer: Option<&Tokenizer>,
        prompt: &[u32],
        options: &GenerateOptions,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let session = Session::new(tokenizer, prompt, options)?;
        let mut model = Sequence(engine, sequence);
        self.run(&mut model, session, prompt, sequence, on_text)
    }

    fn run(
        &mut self,
        model: &mut dyn Model,
        mut session: Session<&Tokenizer>,
        prompt: &[u32],
        sequence: usize,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let start = Instant::now();
        let logits = model.feed(prompt, false)?;
        let prompt_time = start.elapsed();
        let start = Instant::now();
        let mut piece = session.next(&logits, model.length() >= model.context())?;
        let mut stopped = false;
        let mut pass = |text: &str| {
            stopped = stopped || !text.is_empty() && on_text(text).is_break();
            !stopped
        };
        loop {
            let goes_on = pass(&piece.text);
            let Some(token) = piece.token.filter(|_| piece.finish.is_none() && goes_on) else { break };
            let verified = self.round(model, sequence, &mut session, token, &mut |p| pass(&p.text))?;
            match verified.last? {
                Some(p) => piece = p,
                None => break,
            }
        }
        Ok(session.into_generation(prompt.len(), prompt_time, start.elapsed()))
    }

    /// A step of an engine's sequence, for a caller that hands out the pieces.
    pub(crate) fn step<T: Deref<Target = Tokenizer> + Clone>(
        &mut self,
        engine: &mut Engine,
        sequence: usize,
        session: &mut Session<T>,
        token: u32,
    ) -> Result<Verified> {
        self.round(&mut Sequence(engine, sequence), sequence, session, token, &mut |_| true)
    }

    /// A step of the model: computes `token` and proposals that follow it.
    fn round<T: Deref<Target = Tokenizer> + Clone>(
        &mut self,
        model: &mut dyn Model,
        sequence: usize,
        session: &mut Session<T>,
        token: u32,
        goes_on: &mut dyn FnMut(&Piece) -> bool,
    ) -> Result<Verified> {
        let base = model.length();
        let start = model.now();
        let count = self.pace.count(1).min(model.context().saturating_sub(base + 1));
        let proposed = self.proposals(model, sequence, session, count)?;
        let fed = [&[token], &proposed[..]].concat();
        let rows = Scores::All(model.feed(&fed, !proposed.is_empty())?);
        let verified = verify(session, &rows, &proposed, (base, model.context()), goes_on);
        let length = base + 1 + verified.accepted.len();
        model.truncate(length);
        if model.length() != length {
            return Err(stuck());
        }
        let time = model.now().duration_since(start);
        self.pace
            .record(Step { sequences: 1, proposed: proposed.len(), accepted: verified.accepted.len() }, time);
        Ok(verified)
    }

    /// At most `count` tokens that may follow those of a session.
    pub(crate) fn propose<T: Deref<Target = Tokenizer> + Clone>(
        &mut self,
        engine: &mut Engine,
        sequence: usize,
        session: &mut Session<T>,
        count: usize,
    ) -> Result<Vec<u32>> {
        self.proposals(&mut Sequence(engine, sequence), sequence, session, count)
    }

    fn proposals<T: Deref<Target = Tokenizer> + Clone>(
        &mut self,
        model: &mut dyn Model,
        sequence: usize,
        session: &mut Session<T>,
        count: usize,
    ) -> Result<Vec<u32>> {
        if count == 0 {
            return Ok(vec![]);
        }
        let sampler = session.fork_sampler();
        self.draft.propose(model, sequence, (session.past(), count), sampler)
    }

    /// How many tokens to propose for each of some sequences.
    pub(crate) fn count(&mut self, sequences: usize) -> usize {
        self.pace.count(sequences)
    }

    /// Takes what a step brought, and its time.
    pub(crate) fn record(&mut self, step: Step, time: Duration) {
        self.pace.record(step, time);
    }
}

/// The layers of a model keep no state to which a sequence could go back.
pub(crate) fn stuck() -> Error {
    let what = "speculative decoding with layers that cannot go back";
    Error::unsupported(what, "Generate without a draft.")
}

/// What a step with proposals gave.
#[derive(Debug)]
pub(crate) struct Verified {
    /// The proposed tokens that were chosen.
    pub(crate) accepted: Vec<Piece>,
    /// The piece after them, whose token the sequence does not hold; `None` if the caller ended the text.
    pub(crate) last: Result<Option<Piece>>,
}

/// Chooses tokens from the logits after a token and those proposed to follow it, as long as they are the
/// proposed ones and `goes_on` allows it. `base` is the length of the sequence before the token.
pub(crate) fn verify<T: Deref<Target = Tokenizer> + Clone>(
    session: &mut Session<T>,
    rows: &Scores,
    proposed: &[u32],
    (base, context): (usize, usize),
    goes_on: &mut dyn FnMut(&Piece) -> bool,
) -> Verified {
    let mut accepted = vec![];
    loop {
        let n = accepted.len();
        let made = session.next_row(rows, n, 1 + proposed.len(), base + n + 1 >= context);
        match made {
            Ok(p) if p.finish.is_none() && p.token.is_some() && p.token == proposed.get(n).copied() => {
                if !goes_on(&p) {
                    return Verified { accepted, last: Ok(None) };
                }
                accepted.push(p);
            }
            last => return Verified { accepted, last: last.map(Some) },
        }
    }
}

/// The tokens that followed the latest earlier occurrence of the last tokens.
fn lookup(past: &[u32], n: usize) -> &[u32] {
    let past = &past[past.len().saturating_sub(WINDOW)..];
    for length in NGRAMS {
        let Some(from) = past.len().checked_sub(length).filter(|f| *f > 0) else { continue };
        let tail = &past[from..];
        // The match may overlap the tail, but not be it.
        if let Some(at) = past[..past.len() - 1].windows(length).rposition(|w| w == tail) {
            let next = at + length;
            return &past[next..(next + n).min(past.len())];
        }
    }
    &[]
}

/// Tokens that a model draws after `past`. `held` are the tokens of its sequence.
fn drafted(
    model: &mut dyn Model,
    held: &mut Vec<u32>,
    past: &[u32],
    n: usize,
    mut sampler: Sampler,
) -> Result<Vec<u32>> {
    if past.is_empty() || past.len() + n > model.context() {
        return Ok(vec![]);
    }
    let common = held.iter().zip(past).take_while(|(a, b)| a == b).count().min(past.len() - 1);
    model.truncate(common);
    held.truncate(model.length());
    let mut all = past.to_vec();
    let mut out = vec![];
    while out.len() < n && !sampler.is_complete() {
        let next = all[held.len()..].to_vec();
        let logits = model.feed(&next, false)?;
        held.extend(next);
        // A grammar that no token of the vocabulary can continue is an error of the generation, not of the
        // draft.
        let Ok(token) = sampler.next(&logits, &all) else { break };
        if sampler.accept(token).is_err() {
            break;
        }
        out.push(token);
        all.push(token);
    }
    Ok(out)
}

/// Tokens and the time that they took, of which older ones count less.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, tokens: usize, time: Duration) {
        self.tokens = self.tokens * 0.9 + tokens as f64;
        self.seconds = self.seconds * 0.9 + time.as_secs_f64();
    }

    fn per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

/// A step of some sequences, each of which got one token more than accepted ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) sequences: usize,
    pub(crate) proposed: usize,
    pub(crate) accepted: usize,
}

/// Decides how many tokens are proposed.
#[derive(Debug)]
struct Pace {
    options: SpeculationOptions,
    /// The present number.
    count: usize,
    /// Steps without proposals that are left before the next attempt.
    pause: usize,
    pauses: u32,
    /// Rounds of this attempt.
    rounds: usize,
    plain: Rate,
    drafted: Rate,
    /// The number of sequences that the rates are about, rounded up to a power of two.
    sequences: usize,
    /// Numbers of rows that occurred: the first step of each builds a plan, and does not count.
    seen: HashSet<usize>,
    total: SpeculationStats,
    /// Tokens and seconds of all steps that count.
    measured: (usize, f64),
}

impl Pace {
    fn new(options: SpeculationOptions) -> Result<Pace> {
        let most = SpeculationOptions::MOST;
        if !(1..=most).contains(&options.most) {
            let what = format!("{} proposed tokens: expected 1 to {most}", options.most);
            return Err(Error::argument("speculation", what));
        }
        Ok(Pace {
            options,
            count: options.most.min(3),
            pause: 0,
            pauses: 0,
            rounds: 0,
            plain: Rate::default(),
            drafted: Rate::default(),
            sequences: 1,
            seen: HashSet::new(),
            total: SpeculationStats::default(),
            measured: (0, 0.0),
        })
    }

    /// How many tokens to propose for each of some sequences.
    fn count(&mut self, sequences: usize) -> usize {
        let sequences = sequences.next_power_of_two();
        if self.sequences != sequences {
            // A step of other sequences takes another time.
            self.sequences = sequences;
            (self.plain, self.drafted) = (Rate::default(), Rate::default());
            (self.rounds, self.pause, self.pauses) = (0, 0, 0);
        }
        if self.options.always {
            return self.count;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        // Without the rate of plain steps, nothing can be judged.
        if self.plain.per_second().is_none() { 0 } else { self.count }
    }

    fn record(&mut self, step: Step, time: Duration) {
        let Step { sequences, proposed, accepted } = step;
        self.total.proposed += proposed;
        self.total.accepted += accepted;
        match proposed {
            0 => self.total.plain += 1,
            _ => self.total.verified += 1,
        }
        let first = self.seen.insert((proposed + sequences).next_power_of_two());
        if !first {
            let rate = if proposed == 0 { &mut self.plain } else { &mut self.drafted };
            rate.add(accepted + sequences, time);
            self.measured.0 += accepted + sequences;
            self.measured.1 += time.as_secs_f64();
        }
        if proposed == 0 {
            return;
        }
        // A step has a power of two of rows, one of which is that of the last token.
        if accepted == proposed {
            self.count = (self.count * 2 + 1).min(self.options.most);
        } else if accepted * 2 < proposed {
            self.count = (self.count / 2).max(1);
        }
        self.rounds += usize::from(!first);
        if self.rounds < ROUNDS || self.options.always {
            return;
        }
        if self.drafted.per_second() < self.plain.per_second() {
            self.pause = PAUSE << self.pauses.min(5);
            self.pauses += 1;
            self.rounds = 0;
            self.drafted = Rate::default();
        } else {
            self.pauses = 0;
        }
    }

    fn stats(&self) -> SpeculationStats {
        let rate = Rate { tokens: self.measured.0 as f64, seconds: self.measured.1 };
        let speed_up = rate.per_second().zip(self.plain.per_second()).map(|(all, plain)| all / plain);
        SpeculationStats { speed_up, ..self.total }
    }
}

#[cfg(test)]
mod tests;

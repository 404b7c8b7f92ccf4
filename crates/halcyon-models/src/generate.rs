//! Generates text: feeds the prompt, samples, decodes, and finds stop strings.

use crate::chain::{Candidates, TokenMask};
use crate::device_sample::{Scores, needed};
use crate::engine::{Engine, Feed, Pending};
use crate::sample::{Sampler, Sampling};
use halcyon::ir::error::{Error, Result};
use halcyon_text::{Stream, Tokenizer};
use std::fmt;
use std::ops::{ControlFlow, Deref};
use std::time::{Duration, Instant};

/// Options of a generation.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// The most tokens to generate. `None`: until the context is full.
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    /// Texts at which the generation ends. They are not part of the result.
    pub stop: Vec<String>,
    /// Whether tokens that end a text are treated as ordinary tokens.
    pub ignore_eos: bool,
    /// Tokens that the sequence holds already, to which penalties apply too.
    pub past: Vec<u32>,
    /// Which tokens may come next, for example by a grammar.
    pub mask: Option<Box<dyn TokenMask>>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended the text, or a stop string appeared.
    Stop,
    /// The limit of tokens is reached, or the context is full.
    Length,
    /// The caller ended it.
    Cancelled,
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        })
    }
}

/// What was generated.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The tokens, without one that ended the text.
    pub tokens: Vec<u32>,
    /// The text before a stop string. Empty without a tokenizer.
    pub text: String,
    pub finish: Finish,
    /// Tokens of the prompt that were computed, and the time for them.
    pub prompt_tokens: usize,
    pub prompt_time: Duration,
    pub time: Duration,
}

/// The text of a generation that is known not to be part of a stop string.
#[derive(Debug)]
struct Held {
    stop: Vec<String>,
    text: String,
    /// Bytes of `text` that were passed on.
    passed: usize,
}

impl Held {
    /// Adds text. Returns what may be passed on, and whether a stop string ended the text.
    fn push(&mut self, more: &str) -> (String, bool) {
        // A stop string may begin in earlier text that was held back.
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0);
        let mut from = self.text.len().saturating_sub(longest);
        while !self.text.is_char_boundary(from) {
            from -= 1;
        }
        self.text.push_str(more);
        let found =
            self.stop.iter().filter(|s| !s.is_empty()).filter_map(|s| self.text[from..].find(s.as_str()));
        if let Some(at) = found.min() {
            self.text.truncate(from + at);
            return (self.take(self.text.len()), true);
        }
        let held = self.stop.iter().map(|s| overlap(&self.text, s)).max().unwrap_or(0);
        (self.take(self.text.len() - held), false)
    }

    fn take(&mut self, end: usize) -> String {
        let out = self.text.get(self.passed..end).unwrap_or("").to_string();
        self.passed = self.passed.max(end);
        out
    }
}

/// The longest beginning of `stop`, shorter than it, with which `text` ends.
fn overlap(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(i, _)| i).filter(|i| *i > 0);
    ends.filter(|i| text.ends_with(&stop[..*i])).max().unwrap_or(0)
}

/// What one token adds.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// The chosen token; `None` if the text ended without one.
    pub token: Option<u32>,
    /// Text that is final now; often empty. Empty without a tokenizer.
    pub text: String,
    /// Set in the last piece.
    pub finish: Option<Finish>,
}

/// A generation apart from the model: chooses tokens from logits, makes text of them, and finds the end. `T`
/// is a reference to a tokenizer, or an `Arc` of it.
#[derive(Debug)]
pub struct Session<T> {
    sampler: Sampler,
    /// How many of the largest logits are enough; `None`: all are needed.
    needed: Option<usize>,
    tokenizer: Option<T>,
    stream: Option<Stream<T>>,
    held: Held,
    max_tokens: Option<usize>,
    ignore_eos: bool,
    /// Tokens that penalties count.
    past: Vec<u32>,
    tokens: Vec<u32>,
    finish: Option<Finish>,
}

impl<T: Deref<Target = Tokenizer> + Clone> Session<T> {
    /// # Errors
    /// `Error::Argument` for an empty prompt or bad options.
    pub fn new(tokenizer: Option<T>, prompt: &[u32], options: &GenerateOptions) -> Result<Session<T>> {
        if prompt.is_empty() {
            return Err(Error::argument("generate", "the prompt has no tokens"));
        }
        let mut sampler = Sampler::new(&options.sampling)?;
        if let Some(mask) = &options.mask {
            sampler.put_first(Box::new(mask.clone()));
        }
        Ok(Session {
            sampler,
            needed: if options.mask.is_none() { needed(&options.sampling) } else { None },
            stream: tokenizer.clone().map(|t| Stream::new(t, true)),
            tokenizer,
            held: Held { stop: options.stop.clone(), text: String::new(), passed: 0 },
            max_tokens: options.max_tokens,
            ignore_eos: options.ignore_eos,
            past: [&options.past[..], prompt].concat(),
            tokens: vec![],
            finish: None,
        })
    }

    /// Whether no token is wanted, so that the prompt's logits are not needed.
    fn satisfied(&self) -> bool {
        self.max_tokens.is_some_and(|n| self.tokens.len() >= n)
    }

    /// The sampler, to be changed.
    pub fn sampler(&mut self) -> &mut Sampler {
        // Other steps may need other logits.
        self.needed = None;
        &mut self.sampler
    }

    /// A copy of the sampler.
    pub(crate) fn fork_sampler(&self) -> Sampler {
        self.sampler.clone()
    }

    /// How many of the largest logits are enough to choose a token; `None`: all are needed.
    pub fn needed(&self) -> Option<usize> {
        self.needed
    }

    /// The tokens that penalties count: the prompt and the chosen ones.
    pub fn past(&self) -> &[u32] {
        &self.past
    }

    /// The chosen tokens, without one that ended the text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The text before a stop string.
    pub fn text(&self) -> &str {
        &self.held.text
    }

    /// Why the text ended, if it did.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Chooses the next token. `full`: the sequence has no room for it, so it is the last one.
    ///
    /// # Errors
    /// Errors of the sampler's steps.
    pub fn next(&mut self, logits: &[f32], full: bool) -> Result<Piece> {
        if self.satisfied() {
            return Ok(self.end(Finish::Length, Piece::default()));
        }
        let token = self.sampler.next(logits, &self.past)?;
        self.push(token, full)
    }

    /// Chooses a token from row `n` of `rows`.
    fn choose(&mut self, scores: &Scores, n: usize, rows: usize) -> Result<u32> {
        match scores {
            Scores::All(z) => {
                let size = z.len() / rows;
                self.sampler.next(&z[n * size..(n + 1) * size], &self.past)
            }
            Scores::Selected(all) => {
                let few = all.get(n).cloned().unwrap_or_default();
                let among = self.sampler.distribution_of(Candidates::of(few), &self.past)?;
                Ok(self.sampler.draw(&among))
            }
        }
    }

    /// [`Session::next`] from row `n` of `rows`.
    pub(crate) fn next_row(&mut self, scores: &Scores, n: usize, rows: usize, full: bool) -> Result<Piece> {
        if self.satisfied() {
            return Ok(self.end(Finish::Length, Piece::default()));
        }
        let token = self.choose(scores, n, rows)?;
        self.push(token, full)
    }

    /// Chooses a token for a sequence, starts the step that computes it, and only then makes text of the
    /// token: the device and the host work at the same time. Returns the started step, if the text goes on.
    /// If the text ends where only the text shows it, at a stop string, the step was in vain, and the
    /// sequence gives its position back.
    pub(crate) fn next_ahead(
        &mut self,
        engine: &mut Engine,
        sequence: usize,
        scores: &Scores,
        k: usize,
    ) -> Result<(Piece, Option<Pending>)> {
        let base = engine.length(sequence);
        let full = base >= engine.context();
        if self.satisfied() {
            return Ok((self.end(Finish::Length, Piece::default()), None));
        }
        let token = self.choose(scores, 0, 1)?;
        let last = full
            || self.max_tokens.is_some_and(|n| self.tokens.len() + 1 >= n)
            || !self.ignore_eos && self.tokenizer.as_ref().is_some_and(|t| t.is_end(token));
        let pending = if last { None } else { Some(engine.start_largest(sequence, token, k)?) };
        match self.push(token, full) {
            Ok(piece) if piece.finish.is_none() => Ok((piece, pending)),
            ended => {
                engine.truncate(sequence, base);
                Ok((ended?, None))
            }
        }
    }

    /// [`Session::next`] with the candidates that are left after the device selected some.
    ///
    /// # Errors
    /// Errors of the sampler's steps.
    pub fn next_of(&mut self, candidates: Candidates, full: bool) -> Result<Piece> {
        if self.satisfied() {
            return Ok(self.end(Finish::Length, Piece::default()));
        }
        let among = self.sampler.distribution_of(candidates, &self.past)?;
        let token = self.sampler.draw(&among);
        self.push(token, full)
    }

    /// Adds a token that the caller chose.
    ///
    /// # Errors
    /// Errors of the sampler's steps, such as a grammar that does not allow the token.
    pub fn push(&mut self, token: u32, full: bool) -> Result<Piece> {
        if self.satisfied() {
            return Ok(self.end(Finish::Length, Piece::default()));
        }
        if !self.ignore_eos && self.tokenizer.as_ref().is_some_and(|t| t.is_end(token)) {
            return Ok(self.end(Finish::Stop, Piece::default()));
        }
        self.sampler.accept(token)?;
        self.tokens.push(token);
        self.past.push(token);
        let mut piece = Piece { token: Some(token), ..Piece::default() };
        if let Some(s) = &mut self.stream {
            let (text, stopped) = self.held.push(&s.push(token));
            piece.text = text;
            if stopped {
                // What follows a stop string is not part of the text.
                self.stream = None;
                return Ok(self.end(Finish::Stop, piece));
            }
        }
        if self.sampler.is_complete() {
            return Ok(self.end(Finish::Stop, piece));
        }
        match full || self.satisfied() {
            true => Ok(self.end(Finish::Length, piece)),
            false => Ok(piece),
        }
    }

    /// Ends the text, and adds what was held back to the piece.
    fn end(&mut self, finish: Finish, mut piece: Piece) -> Piece {
        if let Some(s) = self.stream.take() {
            piece.text += &self.held.push(&s.finish()).0;
            piece.text += &self.held.take(self.held.text.len());
        }
        self.finish = Some(finish);
        Piece { finish: Some(finish), ..piece }
    }

    /// Ends the session. A text that had not ended counts as cancelled.
    pub fn into_generation(self, prompt_tokens: usize, prompt_time: Duration, time: Duration) -> Generation {
        let finish = self.finish.unwrap_or(Finish::Cancelled);
        Generation { tokens: self.tokens, text: self.held.text, finish, prompt_tokens, prompt_time, time }
    }
}

/// Feeds `prompt` to a sequence and generates. Penalties count the tokens of `prompt` and the generated ones,
/// not those that the sequence had before. `on_text` gets each piece of text as soon as it is final, and may
/// end the generation.
///
/// The last sampled token is not fed: the sequence holds the prompt and all tokens before it.
///
/// # Errors
/// `Error::Argument` for an empty prompt, for one that does not fit the context, or for bad options; errors
/// of the device and of the mask.
pub fn generate(
    engine: &mut Engine,
    sequence: usize,
    tokenizer: Option<&Tokenizer>,
    prompt: &[u32],
    options: &GenerateOptions,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Generation> {
    let mut session = Session::new(tokenizer, prompt, options)?;
    let start = Instant::now();
    let mut logits = engine.feed(&[Feed { sequence, tokens: prompt, all: false }])?.pop().unwrap_or_default();
    let prompt_time = start.elapsed();
    let start = Instant::now();
    if let Some(k) = session.needed().filter(|_| engine.selects()) {
        let mut scores = Scores::All(logits);
        loop {
            let (piece, pending) = session.next_ahead(engine, sequence, &scores, k)?;
            let stopped = !piece.text.is_empty() && on_text(&piece.text).is_break();
            let Some(pending) = pending else { break };
            if stopped {
                engine.truncate(sequence, engine.length(sequence) - 1);
                break;
            }
            scores = Scores::Selected(vec![engine.finish_largest(&pending)?]);
        }
        return Ok(session.into_generation(prompt.len(), prompt_time, start.elapsed()));
    }
    let mut piece = session.next(&logits, engine.length(sequence) >= engine.context())?;
    loop {
        let stopped = !piece.text.is_empty() && on_text(&piece.text).is_break();
        let Some(token) = piece.token.filter(|_| piece.finish.is_none() && !stopped) else { break };
        let full = engine.length(sequence) + 1 >= engine.context();
        let feed = Feed { sequence, tokens: &[token], all: false };
        logits = engine.feed(&[feed])?.pop().unwrap_or_default();
        piece = session.next(&logits, full)?;
    }
    Ok(session.into_generation(prompt.len(), prompt_time, start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stop: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let stop: Vec<String> = stop.iter().map(|s| s.to_string()).collect();
        let mut h = Held { stop, text: String::new(), passed: 0 };
        let mut out = vec![];
        for p in pieces {
            let (text, stopped) = h.push(p);
            out.push(text);
            if stopped {
                return (out, true, h.text);
            }
        }
        out.push(h.take(h.text.len()));
        (out, false, h.text)
    }

    #[test]
    fn a_stop_string_across_pieces_is_not_passed_on() {
        let (out, stopped, text) = run(&["<end>"], &["ab<", "en", "d>cd"]);
        assert_eq!((out.concat().as_str(), stopped, text.as_str()), ("ab", true, "ab"));
        assert_eq!(out, ["ab", "", ""]);
        let (out, stopped, text) = run(&["<end>", "\n\n"], &["a<en", "x\n", "b"]);
        assert_eq!((out.concat().as_str(), stopped, text.as_str()), ("a<enx\nb", false, "a<enx\nb"));
        assert_eq!(out, ["a", "<enx", "\nb", ""]);
        let (out, _, _) = run(&["aab"], &["aa", "aab"]);
        assert_eq!(out.concat(), "aa");
        let (out, stopped, _) = run(&["é!"], &["xé", "é", "!"]);
        assert_eq!((out.concat().as_str(), stopped), ("xé", true));
        assert_eq!(run(&[], &["a", "b"]).0.concat(), "ab");
    }
}

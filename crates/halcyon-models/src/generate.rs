//! Generates text: feeds the prompt, samples, decodes, and finds stop strings.

use crate::engine::{Engine, Feed};
use crate::sample::{Sampler, Sampling};
use halcyon::ir::error::{Error, Result};
use halcyon_text::Tokenizer;
use std::fmt;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Options of [`generate`].
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
struct Held<'a> {
    stop: &'a [String],
    text: String,
    /// Bytes of `text` that were passed on.
    passed: usize,
}

impl Held<'_> {
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

/// Feeds `prompt` to a sequence and generates. Penalties count the tokens of `prompt` and the generated ones,
/// not those that the sequence had before. `on_text` gets each piece of text as soon as it is final, and may
/// end the generation.
///
/// The last sampled token is not fed: the sequence holds the prompt and all tokens before it.
///
/// # Errors
/// `Error::Argument` for an empty prompt, for one that does not fit the context, or for bad options; errors
/// of the device.
pub fn generate(
    engine: &mut Engine,
    sequence: usize,
    tokenizer: Option<&Tokenizer>,
    prompt: &[u32],
    options: &GenerateOptions,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Generation> {
    let mut sampler = Sampler::new(options.sampling)?;
    if prompt.is_empty() {
        return Err(Error::argument("generate", "the prompt has no tokens"));
    }
    let start = Instant::now();
    let mut logits = engine.feed(&[Feed { sequence, tokens: prompt, all: false }])?.pop().unwrap_or_default();
    let prompt_time = start.elapsed();
    let mut past = [&options.past[..], prompt].concat();
    let mut held = Held { stop: &options.stop, text: String::new(), passed: 0 };
    let mut stream = tokenizer.map(|t| t.stream(true));
    let mut tokens = vec![];
    let start = Instant::now();
    // A stop string was found: what follows it is not part of the text.
    let mut cut = false;
    let finish = loop {
        if options.max_tokens.is_some_and(|n| tokens.len() >= n) {
            break Finish::Length;
        }
        let token = sampler.next(&logits, &past);
        if !options.ignore_eos && tokenizer.is_some_and(|t| t.is_end(token)) {
            break Finish::Stop;
        }
        tokens.push(token);
        past.push(token);
        if let Some(s) = &mut stream {
            let (piece, stopped) = held.push(&s.push(token));
            if !piece.is_empty() && on_text(&piece).is_break() {
                break Finish::Cancelled;
            }
            if stopped {
                cut = true;
                break Finish::Stop;
            }
        }
        if options.max_tokens.is_some_and(|n| tokens.len() >= n)
            || engine.length(sequence) >= engine.context()
        {
            break Finish::Length;
        }
        logits = engine.feed(&[Feed { sequence, tokens: &[token], all: false }])?.pop().unwrap_or_default();
    };
    let time = start.elapsed();
    if let Some(s) = stream.filter(|_| !cut && finish != Finish::Cancelled) {
        let (piece, _) = held.push(&s.finish());
        let end = held.text.len();
        for piece in [piece, held.take(end)] {
            if !piece.is_empty() && on_text(&piece).is_break() {
                break;
            }
        }
    }
    Ok(Generation { tokens, text: held.text, finish, prompt_tokens: prompt.len(), prompt_time, time })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stop: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let stop: Vec<String> = stop.iter().map(|s| s.to_string()).collect();
        let mut h = Held { stop: &stop, text: String::new(), passed: 0 };
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

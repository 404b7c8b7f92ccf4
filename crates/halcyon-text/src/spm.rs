//! SentencePiece's way of merging: the pair whose token has the highest score is merged first. Text that no
//! token covers becomes byte tokens.

use crate::bad;
use crate::bpe::char_len;
use crate::merge::Symbols;
use crate::vocab::{Vocab, few};
use halcyon_ir::Result;
use std::collections::{HashMap, HashSet};

/// Stands for a space in the tokens.
pub(crate) const SPACE: &str = "▁";

pub(crate) fn escape_space(text: &str) -> String {
    text.replace(' ', SPACE)
}

#[derive(Debug)]
pub(crate) struct Spm {
    /// Priority of each token: lower is merged first.
    priority: Vec<u32>,
    max_len: usize,
    /// Characters that come before ▁ inside a token. After all others, a text can be cut before ▁.
    before_space: HashSet<char>,
    /// The token of each byte, or the unknown token, or nothing.
    bytes: Vec<Option<u32>>,
}

impl Spm {
    /// # Errors
    /// [`halcyon_ir::Error::Format`] for too few scores, or one that is not a number.
    pub(crate) fn new(vocab: &Vocab, scores: &[f32], unk: Option<u32>) -> Result<Spm> {
        let place = "tokenizer.ggml.scores";
        if !scores.is_empty() && scores.len() < vocab.len() {
            return Err(bad(place, few(scores.len(), vocab.len())));
        }
        if let Some(i) = scores.iter().position(|s| s.is_nan()) {
            return Err(bad(place, format!("the score of token {i} is not a number")));
        }
        let score = |i: usize| scores.get(i).copied().unwrap_or(0.0);
        let bytes = (0..=255).map(|b| vocab.byte_token(b).or(unk)).collect();
        Ok(Spm {
            priority: (0..vocab.len()).map(|i| priority(score(i))).collect(),
            max_len: vocab.max_len(),
            before_space: vocab.text.iter().flat_map(|t| before_space(t)).collect(),
            bytes,
        })
    }

    /// Appends the tokens of a text whose spaces are written as ▁.
    pub(crate) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let mut seen: HashMap<&str, (usize, usize)> = HashMap::new();
        let mut work = Symbols::default();
        let mut rest = text;
        while !rest.is_empty() {
            let word = &rest[..self.word_end(rest)];
            rest = &rest[word.len()..];
            if let Some(&(from, to)) = seen.get(word) {
                out.extend_from_within(from..to);
                continue;
            }
            let from = out.len();
            self.word(vocab, word, &mut work, out);
            seen.insert(word, (from, out.len()));
        }
    }

    /// The first place where the text can be cut: no token goes across it, so what is on one side of it does
    /// not change how the other side is merged.
    fn word_end(&self, text: &str) -> usize {
        let cut = text
            .match_indices(SPACE)
            .find(|(i, _)| text[..*i].chars().next_back().is_some_and(|c| !self.before_space.contains(&c)));
        cut.map_or(text.len(), |(i, _)| i)
    }

    fn word(&self, vocab: &Vocab, word: &str, work: &mut Symbols, out: &mut Vec<u32>) {
        work.clear();
        let bytes = word.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let len = char_len(bytes[at]).min(bytes.len() - at);
            // The id is only needed of symbols that were not merged, and these are looked up at the end.
            work.push(len, 0);
            at += len;
        }
        work.merge(|l, r| {
            let (from, len) = (l.start as usize, (l.len + r.len) as usize);
            if len > self.max_len {
                return None;
            }
            let id = vocab.id(word.get(from..from + len)?)?;
            Some((self.priority[id as usize], id))
        });
        for s in work.iter() {
            let range = s.start as usize..(s.start + s.len) as usize;
            match word.get(range.clone()).and_then(|t| vocab.id(t)) {
                Some(id) => out.push(id),
                None => out.extend(bytes[range].iter().filter_map(|&b| self.bytes[b as usize])),
            }
        }
    }
}

/// Numbers in the opposite order of the scores.
fn priority(score: f32) -> u32 {
    // Both zeros are equal.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

/// The characters that come before a ▁ that is not the first character.
fn before_space(text: &str) -> impl Iterator<Item = char> + '_ {
    text.match_indices(SPACE).filter_map(|(i, _)| text[..i].chars().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_scores_have_lower_priority_values() {
        let scores = [f32::INFINITY, 3.0, 0.5, 0.0, -0.5, -3.0, -1e9, f32::NEG_INFINITY];
        assert!(scores.map(priority).is_sorted_by(|a, b| a < b));
        assert_eq!(priority(0.0), priority(-0.0));
    }
}

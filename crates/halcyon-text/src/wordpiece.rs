//! WordPiece, as BERT's models use it: a word is cut into the longest tokens from its beginning.
//!
//! In GGUF, a token that begins a word begins with ▁, and the others have no mark.

use crate::spm::SPACE;
use crate::vocab::Vocab;
use regex::Regex;
use std::collections::HashMap;
use std::sync::OnceLock;
use unicode_normalization_alignments::char::decompose_canonical;

/// How a word is normalised before it is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalizer {
    pub(crate) lowercase: bool,
    pub(crate) strip_accents: bool,
}

#[derive(Debug)]
pub(crate) struct WordPiece {
    normalizer: Normalizer,
    unk: Option<u32>,
    /// Edges of a tree of all tokens, from a node by a byte to the next node.
    edges: HashMap<(u32, u8), u32>,
    /// The token that ends at each node.
    tokens: Vec<Option<u32>>,
}

impl WordPiece {
    pub(crate) fn new(vocab: &Vocab, normalizer: Normalizer, unk: Option<u32>) -> WordPiece {
        let (mut edges, mut tokens) = (HashMap::new(), vec![None]);
        for (id, text) in vocab.text.iter().enumerate() {
            let mut node = 0;
            for &b in text.as_bytes() {
                node = *edges.entry((node, b)).or_insert_with(|| {
                    tokens.push(None);
                    tokens.len() as u32 - 1
                });
            }
            tokens[node as usize] = Some(id as u32);
        }
        WordPiece { normalizer, unk, edges, tokens }
    }

    /// Appends the tokens of a text without special tokens.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut seen: HashMap<String, (usize, usize)> = HashMap::new();
        for word in words(text, self.normalizer) {
            if let Some(&(from, to)) = seen.get(&word) {
                out.extend_from_within(from..to);
                continue;
            }
            let from = out.len();
            if !self.word(&format!("{SPACE}{word}"), out) {
                out.truncate(from);
                out.extend(self.unk);
            }
            seen.insert(word, (from, out.len()));
        }
    }

    /// Whether tokens cover the whole word.
    fn word(&self, word: &str, out: &mut Vec<u32>) -> bool {
        let mut rest = word.as_bytes();
        while !rest.is_empty() {
            let (mut node, mut best) = (0, None);
            for (i, &b) in rest.iter().enumerate() {
                let Some(&next) = self.edges.get(&(node, b)) else { break };
                node = next;
                if let Some(id) = self.tokens[node as usize] {
                    best = Some((i + 1, id));
                }
            }
            let Some((len, id)) = best else { return false };
            out.push(id);
            rest = &rest[len..];
        }
        true
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    punctuation: bool,
    mark: bool,
    control: bool,
}

impl Class {
    fn of(c: char) -> Class {
        static PATTERNS: OnceLock<[Option<Regex>; 3]> = OnceLock::new();
        let [punctuation, mark, control] = PATTERNS
            .get_or_init(|| [r"^\p{P}$", r"^\p{M}$", r"^[\p{Cc}\p{Cf}\p{Co}]$"].map(|p| Regex::new(p).ok()));
        let mut buffer = [0; 4];
        let text = c.encode_utf8(&mut buffer);
        let is = |p: &Option<Regex>| p.as_ref().is_some_and(|p| p.is_match(text));
        Class { punctuation: is(punctuation), mark: is(mark), control: is(control) }
    }
}

/// The normalised words of a text. Punctuation and ideographs are words of one character.
fn words(text: &str, n: Normalizer) -> Vec<String> {
    let (mut list, mut word) = (vec![], String::new());
    let mut classes: HashMap<char, Class> = HashMap::new();
    let flush = |word: &mut String, list: &mut Vec<String>| {
        if !word.is_empty() {
            list.push(std::mem::take(word));
        }
    };
    for c in text.chars() {
        let c = if n.strip_accents { base(c) } else { c };
        if c.is_whitespace() {
            flush(&mut word, &mut list);
            continue;
        }
        let class = match c.is_ascii() {
            true => {
                Class { punctuation: c.is_ascii_punctuation(), mark: false, control: c.is_ascii_control() }
            }
            false => *classes.entry(c).or_insert_with(|| Class::of(c)),
        };
        if c == '\0' || c == '\u{fffd}' || class.control || (n.strip_accents && class.mark) {
            continue;
        }
        if class.punctuation || is_ideograph(c) {
            flush(&mut word, &mut list);
            list.push(lower(c, n).to_string());
        } else {
            word.push(lower(c, n));
        }
    }
    flush(&mut word, &mut list);
    list
}

/// The first character of the canonical decomposition.
fn base(c: char) -> char {
    let mut first = None;
    if !c.is_ascii() {
        decompose_canonical(c, |d| {
            first.get_or_insert(d);
        });
    }
    first.unwrap_or(c)
}

/// Like llama.cpp, the first character of the lower case.
fn lower(c: char, n: Normalizer) -> char {
    if n.lowercase { c.to_lowercase().next().unwrap_or(c) } else { c }
}

fn is_ideograph(c: char) -> bool {
    matches!(c as u32,
        0x4e00..=0x9fff | 0x3400..=0x4dbf | 0x20000..=0x2a6df | 0x2a700..=0x2b73f | 0x2b740..=0x2b81f
        | 0x2b920..=0x2ceaf | 0xf900..=0xfaff | 0x2f800..=0x2fa1f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_lower_case_without_accents_and_apart_from_punctuation() {
        let n = Normalizer { lowercase: true, strip_accents: true };
        let got = words("Héllo,\u{200b} WORLD!中文 e\u{301}\0x $5", n);
        assert_eq!(got, ["hello", ",", "world", "!", "中", "文", "ex", "$", "5"]);
        let n = Normalizer { lowercase: false, strip_accents: false };
        assert_eq!(words("Héllo\tX", n), ["Héllo", "X"]);
    }
}

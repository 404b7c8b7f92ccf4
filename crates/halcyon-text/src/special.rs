//! Special tokens in a text: they are cut out before anything else is done.

use crate::vocab::{Vocab, kind};
use std::collections::{BTreeMap, HashMap};

/// A part of a text, or a token that was found in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Part<'a> {
    Text(&'a str),
    Token(u32),
}

/// Which white space beside a token belongs to the token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Strip {
    pub(crate) left: bool,
    pub(crate) right: bool,
}

/// The tokens that are searched for in a text, grouped by length. Longer ones are found first, wherever they
/// are; this is llama.cpp's order, and it decides which of two overlapping tokens wins.
#[derive(Debug, Default)]
pub(crate) struct Specials {
    /// With `parse_special`, and without it.
    all: Group,
    plain: Group,
    strip: HashMap<u32, Strip>,
}

#[derive(Debug)]
struct Group {
    /// Longest first: length, first bytes, tokens.
    lengths: Vec<(usize, Box<[bool; 256]>, HashMap<Box<[u8]>, u32>)>,
    /// The first two bytes of tokens; a token of one byte stands for all pairs.
    pairs: Box<[u64]>,
}

impl Default for Group {
    fn default() -> Group {
        Group { lengths: vec![], pairs: vec![0; 1024].into() }
    }
}

impl Group {
    fn new<'a>(tokens: impl Iterator<Item = (u32, &'a str)>) -> Group {
        let mut by_len: BTreeMap<usize, HashMap<Box<[u8]>, u32>> = BTreeMap::new();
        let mut group = Group::default();
        for (id, text) in tokens {
            let bytes = text.as_bytes();
            let Some(&first) = bytes.first() else { continue };
            match bytes.get(1) {
                Some(&second) => group.mark(first, second),
                None => (0..=255).for_each(|second| group.mark(first, second)),
            }
            by_len.entry(bytes.len()).or_default().insert(bytes.into(), id);
        }
        group.lengths = by_len
            .into_iter()
            .rev()
            .map(|(len, tokens)| {
                let mut first = Box::new([false; 256]);
                tokens.keys().for_each(|t| first[t[0] as usize] = true);
                (len, first, tokens)
            })
            .collect();
        group
    }

    fn mark(&mut self, first: u8, second: u8) {
        let bit = (first as usize) << 8 | second as usize;
        self.pairs[bit / 64] |= 1 << (bit % 64);
    }

    fn may_begin(&self, first: u8, second: u8) -> bool {
        let bit = (first as usize) << 8 | second as usize;
        self.pairs[bit / 64] >> (bit % 64) & 1 != 0
    }
}

impl Specials {
    pub(crate) fn new(vocab: &Vocab, strip: HashMap<u32, Strip>) -> Specials {
        let of = |bits: u8, not: u8| {
            let ids = (0..vocab.len() as u32).filter(move |&i| vocab.is(i, bits) && !vocab.is(i, not));
            Group::new(ids.map(|i| (i, vocab.text[i as usize].as_str())))
        };
        let hidden = kind::CONTROL | kind::UNKNOWN;
        Specials { all: of(hidden | kind::USER_DEFINED, 0), plain: of(kind::USER_DEFINED, hidden), strip }
    }

    /// Cuts a text at its special tokens. Without `parse_special`, only tokens that the vocabulary marks as
    /// user-defined count, and all others are plain text.
    pub(crate) fn split<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Part<'a>> {
        let group = if parse_special { &self.all } else { &self.plain };
        let bytes = text.as_bytes();
        let next = |i: usize| bytes.get(i + 1).copied().unwrap_or(0);
        let starts: Vec<usize> = (0..bytes.len()).filter(|&i| group.may_begin(bytes[i], next(i))).collect();
        let mut found: Vec<(usize, u32)> = vec![];
        // Bytes that belong to a token, or that a token swallowed.
        let mut taken = if starts.is_empty() { vec![] } else { vec![false; bytes.len()] };
        for (len, first, tokens) in &group.lengths {
            for &at in &starts {
                let end = at + len;
                if end > bytes.len() || !first[bytes[at] as usize] || taken[at] || taken[end - 1] {
                    continue;
                }
                // Tokens that were found before are at least as long, so none lies inside this one.
                if let Some(&id) = tokens.get(&bytes[at..end]) {
                    taken[at..end].fill(true);
                    self.strip(id, bytes, at, end, &mut taken);
                    found.push((at, id));
                }
            }
        }
        found.sort_unstable();
        parts(text, &taken, &found)
    }

    fn strip(&self, id: u32, bytes: &[u8], at: usize, end: usize, taken: &mut [bool]) {
        let Some(strip) = self.strip.get(&id) else { return };
        let space = |b: u8| b == b' ' || (9..=13).contains(&b);
        if strip.left {
            let run = (0..at).rev().take_while(|&i| !taken[i] && space(bytes[i])).count();
            taken[at - run..at].fill(true);
        }
        if strip.right {
            let run = (end..bytes.len()).take_while(|&i| !taken[i] && space(bytes[i])).count();
            taken[end..end + run].fill(true);
        }
    }
}

fn parts<'a>(text: &'a str, taken: &[bool], found: &[(usize, u32)]) -> Vec<Part<'a>> {
    if found.is_empty() {
        return if text.is_empty() { vec![] } else { vec![Part::Text(text)] };
    }
    let mut out = vec![];
    let (mut at, mut tokens) = (0, found.iter().peekable());
    while at < text.len() {
        if let Some(&(_, id)) = tokens.next_if(|t| t.0 == at) {
            out.push(Part::Token(id));
            at += 1;
        } else if taken[at] {
            at += 1;
        } else {
            let len = taken[at..].iter().position(|&t| t).unwrap_or(text.len() - at);
            out.push(Part::Text(&text[at..at + len]));
            at += len;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(list: &[(&str, i32)], strip: HashMap<u32, Strip>) -> Specials {
        let vocab = Vocab::new(
            list.iter().map(|t| t.0.to_string()).collect(),
            &list.iter().map(|t| t.1).collect::<Vec<_>>(),
        );
        Specials::new(&vocab.unwrap(), strip)
    }

    #[test]
    fn longer_tokens_win_wherever_they_begin() {
        let s = specials(&[("xab", 4), ("abcd", 4), ("a", 1), ("<s>", 3), ("é", 4)], HashMap::new());
        assert_eq!(s.split("xabcd", true), [Part::Text("x"), Part::Token(1)]);
        assert_eq!(s.split("xabxab", false), [Part::Token(0), Part::Token(0)]);
        assert_eq!(s.split("q<s>é", true), [Part::Text("q"), Part::Token(3), Part::Token(4)]);
        assert_eq!(s.split("q<s>", false), [Part::Text("q<s>")]);
        assert_eq!(s.split("", true), []);
        assert_eq!(s.split("aé", true), [Part::Text("a"), Part::Token(4)]);
    }

    #[test]
    fn tokens_swallow_white_space_beside_them() {
        let strip =
            HashMap::from([(0, Strip { left: false, right: true }), (1, Strip { left: true, right: false })]);
        let s = specials(&[("<a>", 3), ("<b>", 3)], strip);
        let got = s.split(" <a> \n x \t<b> y<a> ", true);
        let (a, b) = (Part::Token(0), Part::Token(1));
        assert_eq!(got, [Part::Text(" "), a, Part::Text("x"), b, Part::Text(" y"), a]);
    }
}

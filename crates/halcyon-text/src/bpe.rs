//! Byte-pair encoding: pairs are merged in the order of a list.

use crate::bad;
use crate::merge::{NONE, Symbols};
use crate::pre::Pre;
use crate::spm::escape_space;
use crate::texts::Texts;
use crate::vocab::Vocab;
use halcyon_ir::Result;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::OnceLock;

/// The printable character that stands for a byte in byte-level vocabularies (GPT-2's table): the byte itself
/// if it is printable in Latin-1, and a character from U+0100 on otherwise.
pub(crate) fn byte_to_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match printable(byte) {
        true => byte as char,
        false => {
            let rank = (0..byte).filter(|&b| !printable(b)).count() as u32;
            char::from_u32(256 + rank).unwrap_or('\u{fffd}')
        }
    }
}

/// Characters that stand for bytes have numbers below this.
const BYTE_CHARS: usize = 0x150;

/// The byte that each character below [`BYTE_CHARS`] stands for.
fn byte_chars() -> &'static [Option<u8>; BYTE_CHARS] {
    static TABLE: OnceLock<[Option<u8>; BYTE_CHARS]> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = [None; BYTE_CHARS];
        (0..=255).for_each(|b| table[byte_to_char(b) as usize] = Some(b));
        table
    })
}

/// Appends the bytes that the characters of a byte-level token stand for. `None` if one of them stands for no
/// byte; `out` then has the bytes of those before it.
fn append_bytes(text: &str, out: &mut Vec<u8>) -> Option<()> {
    let table = byte_chars();
    text.chars().try_for_each(|c| {
        out.push((*table.get(c as usize)?)?);
        Some(())
    })
}

/// The bytes that the characters of a byte-level token stand for. `None` if one of them stands for no byte.
pub(crate) fn chars_to_bytes(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    append_bytes(text, &mut out)?;
    Some(out)
}

/// Two symbols as the key of a table.
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Hashes pairs of symbols: looking them up is most of the work. A malicious vocabulary can only slow itself
/// down.
#[derive(Clone, Copy, Debug, Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u64(b.into()));
    }

    fn write_u64(&mut self, n: u64) {
        // The product of both halves mixes all bits into all others.
        let product = u128::from(self.0 ^ n ^ 0x243f_6a88_85a3_08d3) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

/// Texts and pairs of them. Symbols below the size of the vocabulary are tokens; the others are only steps on
/// the way to one.
#[derive(Debug)]
pub(crate) struct Bpe {
    pub(crate) pre: Pre,
    symbols: Texts,
    /// The rank of a pair, and what it becomes.
    pairs: HashMap<u64, (u32, u32), BuildHasherDefault<PairHasher>>,
    /// The symbol of each single byte, of byte-level vocabularies.
    bytes: [u32; 256],
    tokens: u32,
    /// The token `<0x00>` and so on, of plain vocabularies.
    byte_tokens: Vec<Option<u32>>,
}

impl Bpe {
    /// # Errors
    /// [`halcyon_ir::Error::Format`] if the number of merges passes what ranks can count.
    pub(crate) fn new(vocab: &Vocab, pre: Pre, merges: &[String]) -> Result<Bpe> {
        if merges.len() >= NONE as usize / 4 {
            return Err(bad("tokenizer.ggml.merges", format!("{} merges are too many", merges.len())));
        }
        let append = |text: &str, out: &mut Vec<u8>| match pre.byte_level {
            true => append_bytes(text, out),
            false => {
                out.extend_from_slice(text.as_bytes());
                Some(())
            }
        };
        let tokens = vocab.len() as u32;
        let bytes = vocab.text.iter().map(String::len).sum();
        let mut symbols = Texts::with_capacity(vocab.len(), bytes);
        let mut work = vec![];
        for text in &vocab.text {
            work.clear();
            match append(text, &mut work) {
                Some(()) => _ = symbols.intern(&work),
                // A token that byte-level text cannot form, such as a special one, is not found by merging.
                None => symbols.skip(),
            }
        }
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), Default::default());
        for (rank, merge) in merges.iter().enumerate() {
            // The left side may begin with the space that separates the two.
            let space = merge.bytes().skip(1).position(|b| b == b' ').map(|i| i + 1);
            let Some((left, right)) = space.and_then(|i| Some((merge.get(..i)?, merge.get(i + 1..)?))) else {
                continue;
            };
            work.clear();
            let middle = append(left, &mut work).map(|()| work.len());
            let (Some(middle), Some(())) = (middle, append(right, &mut work)) else { continue };
            if middle == 0 || middle == work.len() {
                continue;
            }
            let pair = pair(symbols.intern(&work[..middle]), symbols.intern(&work[middle..]));
            let merged = symbols.intern(&work);
            pairs.entry(pair).or_insert((rank as u32, merged));
        }
        let bytes = std::array::from_fn(|b| symbols.get(&[b as u8]).unwrap_or(NONE));
        let byte_tokens = (0..=255).map(|b: u8| vocab.id(&format!("<0x{b:02X}>"))).collect();
        Ok(Bpe { pre, symbols, pairs, bytes, tokens, byte_tokens })
    }

    /// Appends the tokens of a text without special tokens.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let escaped = self.pre.escape_space.then(|| escape_space(text));
        let text = escaped.as_deref().unwrap_or(text);
        // Where the tokens of a word are in `out`. Words are repeated often.
        let mut seen: HashMap<&str, (usize, usize)> = HashMap::new();
        let mut work = Symbols::default();
        self.pre.words(text, &mut |word| {
            if let Some(&(from, to)) = seen.get(word) {
                out.extend_from_within(from..to);
                return;
            }
            let from = out.len();
            self.word(word.as_bytes(), &mut work, out);
            seen.insert(word, (from, out.len()));
        });
    }

    fn token(&self, bytes: &[u8]) -> Option<u32> {
        self.symbols.get(bytes).filter(|&id| id < self.tokens)
    }

    fn word(&self, word: &[u8], work: &mut Symbols, out: &mut Vec<u32>) {
        let newlines = self.pre.whole_newlines && word.iter().all(|&b| b == b'\n');
        if (self.pre.ignore_merges || newlines)
            && let Some(id) = self.token(word)
        {
            out.push(id);
            return;
        }
        work.clear();
        match self.pre.byte_level {
            true => word.iter().for_each(|&b| work.push(1, self.bytes[b as usize])),
            false => {
                let mut at = 0;
                while at < word.len() {
                    let len = char_len(word[at]).min(word.len() - at);
                    let id = self.symbols.get(&word[at..at + len]).unwrap_or(NONE);
                    work.push(len, id);
                    at += len;
                }
            }
        }
        work.merge(|l, r| self.pairs.get(&pair(l.id, r.id)).copied());
        for s in work.iter() {
            let bytes = &word[s.start as usize..(s.start + s.len) as usize];
            if s.id < self.tokens {
                out.push(s.id);
            } else if self.pre.byte_level {
                // Only a byte that is written as itself can be a token here. Others are dropped, as in
                // llama.cpp.
                let single = |b: &u8| self.token(&[*b]).filter(|_| b.is_ascii_graphic());
                out.extend(bytes.iter().filter_map(single));
            } else {
                out.extend(bytes.iter().filter_map(|&b| self.byte_tokens[b as usize]));
            }
        }
    }
}

/// Length in bytes of the UTF-8 character that begins with this byte.
pub(crate) fn char_len(first: u8) -> usize {
    match first {
        0..0xc0 => 1,
        0xc0..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_their_characters_are_inverse() {
        assert_eq!((byte_to_char(b' '), byte_to_char(b'\n'), byte_to_char(b'a')), ('Ġ', 'Ċ', 'a'));
        let all: String = (0..=255).map(byte_to_char).collect();
        assert_eq!(chars_to_bytes(&all).unwrap(), (0..=255).collect::<Vec<u8>>());
        assert_eq!(chars_to_bytes("a b"), None);
    }
}

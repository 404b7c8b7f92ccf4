//! Byte strings with numbers. A vocabulary has up to millions of them, so all share one allocation.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// Byte strings, numbered from 0 in the order in which they were added.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    bytes: Vec<u8>,
    /// Where each string is in `bytes`.
    spans: Vec<(usize, usize)>,
    table: HashTable<u32>,
    hash: DefaultHashBuilder,
}

impl Texts {
    /// Room for `count` strings of `bytes` bytes in total.
    pub(crate) fn with_capacity(count: usize, bytes: usize) -> Texts {
        Texts {
            bytes: Vec::with_capacity(bytes),
            spans: Vec::with_capacity(count),
            table: HashTable::with_capacity(count),
            hash: DefaultHashBuilder::default(),
        }
    }

    pub(crate) fn get(&self, text: &[u8]) -> Option<u32> {
        let same = |&n: &u32| of(&self.bytes, &self.spans, n) == text;
        self.table.find(self.hash.hash_one(text), same).copied()
    }

    /// The number of this string, which is added unless it exists.
    pub(crate) fn intern(&mut self, text: &[u8]) -> u32 {
        let Texts { bytes, spans, table, hash } = self;
        let same = |&n: &u32| of(bytes, spans, n) == text;
        let rehash = |&n: &u32| hash.hash_one(of(bytes, spans, n));
        match table.entry(hash.hash_one(text), same, rehash) {
            hashbrown::hash_table::Entry::Occupied(e) => *e.get(),
            hashbrown::hash_table::Entry::Vacant(e) => {
                let number = spans.len() as u32;
                e.insert(number);
                spans.push((bytes.len(), text.len()));
                bytes.extend_from_slice(text);
                number
            }
        }
    }

    /// Gives the next number to no string.
    pub(crate) fn skip(&mut self) {
        self.spans.push((self.bytes.len(), 0));
    }
}

fn of<'a>(bytes: &'a [u8], spans: &[(usize, usize)], number: u32) -> &'a [u8] {
    let (start, len) = spans[number as usize];
    &bytes[start..start + len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_keep_their_numbers() {
        let mut texts = Texts::default();
        assert_eq!((texts.intern(b"a"), texts.intern(b"bc"), texts.intern(b"")), (0, 1, 2));
        texts.skip();
        let many: Vec<String> = (0..1000).map(|i| format!("text {i}")).collect();
        for (i, text) in many.iter().enumerate() {
            assert_eq!(texts.intern(text.as_bytes()), 4 + i as u32);
        }
        assert_eq!((texts.intern(b"bc"), texts.intern(b"text 7")), (1, 11));
        assert_eq!((texts.get(b"a"), texts.get(b""), texts.get(b"text 999")), (Some(0), Some(2), Some(1003)));
        assert_eq!(texts.get(b"abc"), None);
    }
}

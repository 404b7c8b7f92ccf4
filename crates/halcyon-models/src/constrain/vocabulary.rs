//! The bytes of all tokens, as a tree.

use halcyon_text::Tokenizer;
use std::fmt;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) byte: u8,
    /// Bytes before this one.
    pub(super) depth: u16,
    /// The node after this one and all below it.
    pub(super) end: u32,
    /// The tokens that end here, as a range of [`Vocabulary::tokens`].
    pub(super) tokens: (u32, u32),
}

/// The tokens of a vocabulary that stand for text, sorted by their bytes.
pub(super) struct Vocabulary {
    pub(super) nodes: Vec<Node>,
    pub(super) tokens: Vec<u32>,
    /// The bytes of each token; empty for one that must not be chosen.
    pub(super) bytes: Vec<Vec<u8>>,
    /// The tokens that end a text.
    pub(super) ends: Vec<u32>,
    /// The longest token in bytes.
    pub(super) longest: usize,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vocabulary({} tokens)", self.bytes.len())
    }
}

impl Vocabulary {
    pub(super) fn of(t: &Tokenizer) -> Vocabulary {
        let ends = t.end_ids();
        let text = |id: u32| match t.is_special(id) || ends.contains(&id) {
            true => vec![],
            false => t.token_bytes(id),
        };
        Vocabulary::new((0..t.vocab_size() as u32).map(text).collect(), ends)
    }

    pub(super) fn new(mut bytes: Vec<Vec<u8>>, ends: Vec<u32>) -> Vocabulary {
        // A longer token could not be a path of the tree. None is that long in practice.
        bytes.iter_mut().filter(|b| b.len() > usize::from(u16::MAX)).for_each(Vec::clear);
        let mut tokens: Vec<u32> =
            (0..bytes.len() as u32).filter(|i| !bytes[*i as usize].is_empty()).collect();
        tokens.sort_by(|a, b| bytes[*a as usize].cmp(&bytes[*b as usize]));
        let mut nodes: Vec<Node> = vec![];
        // The nodes from the root to the last token.
        let mut path: Vec<u32> = vec![];
        let mut last: &[u8] = &[];
        for (place, id) in tokens.iter().enumerate() {
            let text = &bytes[*id as usize][..];
            let common = last.iter().zip(text).take_while(|(a, b)| a == b).count();
            for n in path.drain(common..) {
                nodes[n as usize].end = nodes.len() as u32;
            }
            for (depth, byte) in text.iter().enumerate().skip(common) {
                path.push(nodes.len() as u32);
                let place = place as u32;
                nodes.push(Node { byte: *byte, depth: depth as u16, end: 0, tokens: (place, place) });
            }
            if let Some(n) = path.last() {
                nodes[*n as usize].tokens.1 = place as u32 + 1;
            }
            last = text;
        }
        for n in path {
            nodes[n as usize].end = nodes.len() as u32;
        }
        let longest = bytes.iter().map(Vec::len).max().unwrap_or(0);
        Vocabulary { nodes, tokens, bytes, ends, longest }
    }
}

//! Merging neighbours in order of priority, as byte-pair encoding and SentencePiece do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No neighbour, or no entry in the table.
pub(crate) const NONE: u32 = u32::MAX;

/// A part of a text, linked to its neighbours. A part of length 0 was merged into the part on its left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    pub(crate) start: u32,
    pub(crate) len: u32,
    /// What the text is in the caller's table, or [`NONE`].
    pub(crate) id: u32,
    prev: u32,
    next: u32,
}

/// A list of symbols that follow each other. Its memory is used again for the next word.
#[derive(Debug, Default)]
pub(crate) struct Symbols {
    list: Vec<Symbol>,
    /// Priority, left symbol, right symbol, length of both, id of the result.
    queue: BinaryHeap<Reverse<(u32, u32, u32, u32, u32)>>,
}

impl Symbols {
    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `len` bytes.
    pub(crate) fn push(&mut self, len: usize, id: u32) {
        let at = self.list.len() as u32;
        let start = self.list.last().map_or(0, |s| s.start + s.len);
        if let Some(last) = self.list.last_mut() {
            last.next = at;
        }
        let prev = if at == 0 { NONE } else { at - 1 };
        self.list.push(Symbol { start, len: len as u32, id, prev, next: NONE });
    }

    /// The symbols that are left, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Symbol> {
        self.list.iter().filter(|s| s.len > 0)
    }

    /// Merges pairs until `rule` accepts none. `rule` gives the priority of a pair and the id of the result.
    /// The pair of lowest priority value is merged first; of equal ones, the leftmost.
    pub(crate) fn merge(&mut self, rule: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for i in 1..self.list.len() {
            self.offer(i as u32 - 1, i as u32, &rule);
        }
        while let Some(Reverse((_, left, right, len, id))) = self.queue.pop() {
            let (l, r) = (self.list[left as usize], self.list[right as usize]);
            // One of the two was merged with another symbol since the pair was offered.
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            self.list[right as usize].len = 0;
            let merged = &mut self.list[left as usize];
            (merged.len, merged.id, merged.next) = (len, id, r.next);
            if r.next != NONE {
                self.list[r.next as usize].prev = left;
            }
            self.offer(l.prev, left, &rule);
            self.offer(left, r.next, &rule);
        }
    }

    fn offer(&mut self, left: u32, right: u32, rule: &impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        if left == NONE || right == NONE {
            return;
        }
        let (l, r) = (&self.list[left as usize], &self.list[right as usize]);
        if let Some((priority, id)) = rule(l, r) {
            self.queue.push(Reverse((priority, left, right, l.len + r.len, id)));
        }
    }
}

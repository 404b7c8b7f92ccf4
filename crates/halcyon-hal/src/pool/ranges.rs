//! Chooses the range of a chunk that serves a request, and the moves that defragment chunks. This module only
//! computes offsets; it does not access memory.

use super::AllocationStrategy;
use std::collections::{BTreeMap, BTreeSet};

/// The free ranges of one chunk. Adjacent free ranges are merged; in a buddy allocator, only the two halves
/// of one block are merged.
#[derive(Clone, Debug)]
pub(super) struct Ranges {
    strategy: AllocationStrategy,
    bytes: usize,
    free_bytes: usize,
    /// Maps the offset of each free range to its size in bytes.
    free: BTreeMap<usize, usize>,
    /// The same ranges as (bytes, offset).
    sizes: BTreeSet<(usize, usize)>,
}

/// Bytes that a request occupies: a multiple of `unit`, or a power of two in a buddy allocator.
pub(super) fn rounded(strategy: AllocationStrategy, bytes: usize, unit: usize) -> usize {
    let b = bytes.max(unit);
    match strategy {
        AllocationStrategy::Buddy => b.checked_next_power_of_two().unwrap_or(usize::MAX),
        _ => b.checked_next_multiple_of(unit).unwrap_or(usize::MAX),
    }
}

impl Ranges {
    /// A chunk of `bytes` bytes (a multiple of the unit), all of them free. A buddy allocator starts with the
    /// blocks whose sizes are the powers of two that add up to `bytes`, the largest first.
    pub(super) fn new(strategy: AllocationStrategy, bytes: usize) -> Ranges {
        let mut r = Ranges { strategy, bytes, free_bytes: 0, free: BTreeMap::new(), sizes: BTreeSet::new() };
        let mut at = 0;
        while at < bytes {
            let whole = match strategy {
                AllocationStrategy::Buddy => 1 << (bytes - at).ilog2(),
                _ => bytes - at,
            };
            r.insert(at, whole);
            at += whole;
        }
        r
    }

    /// A chunk whose bytes are all free except the ranges `taken` (offset, bytes), which must not overlap.
    pub(super) fn with(strategy: AllocationStrategy, bytes: usize, taken: &[(usize, usize)]) -> Ranges {
        let mut r = Ranges::new(strategy, bytes);
        for (at, n) in taken {
            let found = r.take_at(*at, *n);
            debug_assert!(found, "{n} bytes at {at} are taken twice");
        }
        r
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    pub(super) fn is_free(&self) -> bool {
        self.free_bytes == self.bytes
    }

    /// Bytes of the largest free range.
    pub(super) fn largest(&self) -> usize {
        self.sizes.last().map_or(0, |(n, _)| *n)
    }

    /// Free ranges (bytes, offset) of at least this size, smallest first.
    pub(super) fn from(&self, bytes: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> + '_ {
        self.sizes.range((bytes, 0)..).copied()
    }

    /// The free range (bytes, offset) from which a request of this rounded size would be served.
    pub(super) fn fit(&self, bytes: usize) -> Option<(usize, usize)> {
        match self.strategy {
            AllocationStrategy::FirstFit => {
                self.free.iter().find(|(_, n)| **n >= bytes).map(|(at, n)| (*n, *at))
            }
            _ => self.from(bytes).next(),
        }
    }

    /// Allocates a range; returns its offset.
    pub(super) fn take(&mut self, bytes: usize) -> Option<usize> {
        let (_, at) = self.fit(bytes)?;
        self.take_at(at, bytes).then_some(at)
    }

    /// Allocates exactly this range if it is free.
    pub(super) fn take_at(&mut self, at: usize, bytes: usize) -> bool {
        let Some((start, n)) = self.free.range(..=at).next_back().map(|(s, n)| (*s, *n)) else {
            return false;
        };
        if at + bytes > start + n {
            return false;
        }
        self.remove(start, n);
        match self.strategy {
            AllocationStrategy::Buddy => {
                // Split in halves; the half without the range stays free.
                let (mut start, mut n) = (start, n);
                while n > bytes {
                    n /= 2;
                    let (keep, spare) = if at < start + n { (start, start + n) } else { (start + n, start) };
                    self.insert(spare, n);
                    start = keep;
                }
            }
            _ => {
                if at > start {
                    self.insert(start, at - start);
                }
                if at + bytes < start + n {
                    self.insert(at + bytes, start + n - at - bytes);
                }
            }
        }
        true
    }

    /// Frees the range at `at`.
    pub(super) fn give(&mut self, at: usize, bytes: usize) {
        let (mut at, mut n) = (at, bytes);
        match self.strategy {
            AllocationStrategy::Buddy => {
                while self.free.get(&(at ^ n)) == Some(&n) {
                    self.remove(at ^ n, n);
                    at &= !n;
                    n *= 2;
                }
            }
            _ => {
                if let Some((before, m)) = self.free.range(..at).next_back().map(|(s, m)| (*s, *m))
                    && before + m == at
                {
                    self.remove(before, m);
                    (at, n) = (before, m + n);
                }
                if let Some(m) = self.free.get(&(at + n)).copied() {
                    self.remove(at + n, m);
                    n += m;
                }
            }
        }
        self.insert(at, n);
    }

    fn insert(&mut self, at: usize, n: usize) {
        self.free.insert(at, n);
        self.sizes.insert((n, at));
        self.free_bytes += n;
    }

    fn remove(&mut self, at: usize, n: usize) {
        self.free.remove(&at);
        self.sizes.remove(&(n, at));
        self.free_bytes -= n;
    }
}

/// An allocated range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AllocatedRange {
    /// Index of the chunk.
    pub chunk: usize,
    pub offset: usize,
    pub bytes: usize,
    /// Whether the range must not be moved.
    pub pinned: bool,
}

/// Moves the allocated range with index `block`. `from` and `to` are (chunk, offset). Within one chunk, the
/// old and the new range may overlap; the new one is then at a lower offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub block: usize,
    pub from: (usize, usize),
    pub to: (usize, usize),
}

/// A sequence of moves that merges free ranges within chunks and empties chunks where possible. `chunks`
/// holds the sizes of the chunks in bytes.
pub(super) fn compact(
    strategy: AllocationStrategy,
    chunks: &[usize],
    blocks: &[AllocatedRange],
) -> Vec<Move> {
    let mut c = Compaction { strategy, chunks, at: blocks.to_vec(), moves: vec![] };
    match strategy {
        AllocationStrategy::Buddy => c.merge(),
        _ => {
            c.slide();
            c.evacuate();
        }
    }
    c.moves
}

struct Compaction<'a> {
    strategy: AllocationStrategy,
    chunks: &'a [usize],
    /// The current positions of the ranges.
    at: Vec<AllocatedRange>,
    moves: Vec<Move>,
}

impl Compaction<'_> {
    fn go(&mut self, block: usize, to: (usize, usize)) {
        let b = &mut self.at[block];
        self.moves.push(Move { block, from: (b.chunk, b.offset), to });
        (b.chunk, b.offset) = to;
    }

    /// The ranges of a chunk, by offset.
    fn inside(&self, chunk: usize) -> Vec<usize> {
        let mut v: Vec<usize> = (0..self.at.len()).filter(|b| self.at[*b].chunk == chunk).collect();
        v.sort_by_key(|b| self.at[*b].offset);
        v
    }

    fn ranges(&self, chunk: usize) -> Ranges {
        let taken: Vec<_> =
            self.inside(chunk).iter().map(|b| (self.at[*b].offset, self.at[*b].bytes)).collect();
        Ranges::with(self.strategy, self.chunks[chunk], &taken)
    }

    /// Moves every range that is not pinned towards the start of its chunk.
    fn slide(&mut self) {
        for chunk in 0..self.chunks.len() {
            let mut end = 0;
            for b in self.inside(chunk) {
                let l = self.at[b];
                if !l.pinned && l.offset > end {
                    self.go(b, (chunk, end));
                }
                end = self.at[b].offset + l.bytes;
            }
        }
    }

    /// Moves the ranges of the least filled chunk to fuller chunks, if all of them fit and none is pinned.
    /// Then continues with the next chunk.
    fn evacuate(&mut self) {
        let load = |c: &Self, chunk: usize| c.inside(chunk).iter().map(|b| c.at[*b].bytes).sum::<usize>();
        let mut order: Vec<usize> = (0..self.chunks.len()).filter(|k| load(self, *k) > 0).collect();
        order.sort_by_key(|k| load(self, *k));
        for (n, &chunk) in order.iter().enumerate() {
            let mut all = self.inside(chunk);
            if all.iter().any(|b| self.at[*b].pinned) {
                continue;
            }
            all.sort_by_key(|b| std::cmp::Reverse(self.at[*b].bytes));
            let others = order.iter().copied().skip(n + 1);
            let mut rooms: Vec<(usize, Ranges)> = others.map(|k| (k, self.ranges(k))).collect();
            let found = all.iter().map(|b| {
                let bytes = self.at[*b].bytes;
                rooms.iter_mut().find_map(|(k, r)| Some((*b, (*k, r.take(bytes)?))))
            });
            if let Some(places) = found.collect::<Option<Vec<_>>>() {
                places.into_iter().for_each(|(b, to)| self.go(b, to));
            }
        }
    }

    /// For two free ranges of the same size, moves the contents of the first range's buddy into the second
    /// range. Then the first range merges with its buddy. Proceeds from small to large sizes. If no range is
    /// pinned, two free ranges have the same size afterwards only if the buddy of each would reach past the
    /// end of its chunk.
    fn merge(&mut self) {
        let mut rooms: Vec<Ranges> = (0..self.chunks.len()).map(|k| self.ranges(k)).collect();
        let most = self.chunks.iter().max().map_or(0, |n| n.ilog2());
        for size in (0..=most).map(|k| 1usize << k) {
            loop {
                let mut free: Vec<(usize, usize)> = vec![];
                for (k, r) in rooms.iter().enumerate() {
                    free.extend(r.from(size).take_while(|(n, _)| *n == size).map(|(_, at)| (k, at)));
                }
                // Empties the buddy of the highest free range whose buddy can be moved into the lowest other
                // free range.
                let pair = free.iter().rev().find_map(|&(k, at)| {
                    let buddy = at ^ size;
                    let inside =
                        |l: &AllocatedRange| l.chunk == k && (buddy..buddy + size).contains(&l.offset);
                    let to = free.iter().copied().find(|f| *f != (k, at))?;
                    let all: Vec<usize> = (0..self.at.len()).filter(|b| inside(&self.at[*b])).collect();
                    let moves = buddy + size <= self.chunks[k] && !all.iter().any(|b| self.at[*b].pinned);
                    moves.then_some((k, buddy, to, all))
                });
                let Some((k, buddy, (chunk, start), all)) = pair else { break };
                for b in all {
                    let l = self.at[b];
                    let to = start + (l.offset - buddy);
                    rooms[chunk].take_at(to, l.bytes);
                    rooms[k].give(l.offset, l.bytes);
                    self.go(b, (chunk, to));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNIT: usize = 64;
    const ARENAS: [AllocationStrategy; 3] =
        [AllocationStrategy::BestFit, AllocationStrategy::FirstFit, AllocationStrategy::Buddy];

    /// Checks the invariants of the free ranges against the allocated ones.
    fn check(r: &Ranges, taken: &[(usize, usize)]) {
        let mut all: Vec<(usize, usize, bool)> = taken.iter().map(|(at, n)| (*at, *n, true)).collect();
        all.extend(r.free.iter().map(|(at, n)| (*at, *n, false)));
        all.sort();
        // No gaps and no overlaps, from start to end.
        let mut end = 0;
        for (at, n, _) in &all {
            assert_eq!((*at, *n > 0), (end, true), "{all:?}");
            end += n;
        }
        assert_eq!(end, r.bytes());
        assert_eq!(r.free_bytes(), r.bytes() - taken.iter().map(|t| t.1).sum::<usize>());
        assert_eq!(r.sizes, r.free.iter().map(|(at, n)| (*n, *at)).collect());
        if r.strategy == AllocationStrategy::Buddy {
            for (at, n) in &r.free {
                assert!(n.is_power_of_two() && at.is_multiple_of(*n));
                assert_ne!(r.free.get(&(at ^ n)), Some(n), "buddies that did not merge");
            }
        } else {
            assert!(all.windows(2).all(|w| w[0].2 || w[1].2), "free ranges that touch: {all:?}");
        }
        assert_eq!(r.is_free(), taken.is_empty());
    }

    /// Steps of a test: `(false, bytes)` requests a range, and `(true, n)` frees the range with index `n`,
    /// modulo the number of allocated ranges.
    fn steps() -> impl Strategy<Value = Vec<(bool, usize)>> {
        proptest::collection::vec((any::<bool>(), 0usize..3000), 0..150)
    }

    /// The allocated ranges of chunks after some requests and frees.
    fn fragmented(s: AllocationStrategy, chunks: &[usize], steps: &[(bool, usize)]) -> Vec<AllocatedRange> {
        let mut rooms: Vec<Ranges> = chunks.iter().map(|n| Ranges::new(s, *n)).collect();
        let mut taken: Vec<AllocatedRange> = vec![];
        for (give, n) in steps {
            if *give && !taken.is_empty() {
                let l = taken.swap_remove(n % taken.len());
                rooms[l.chunk].give(l.offset, l.bytes);
                continue;
            }
            let bytes = rounded(s, *n, UNIT);
            let found = rooms.iter_mut().enumerate().find_map(|(k, r)| Some((k, r.take(bytes)?)));
            taken.extend(found.map(|(chunk, offset)| AllocatedRange {
                chunk,
                offset,
                bytes,
                pinned: *n % 17 == 0,
            }));
        }
        taken
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_free_ones_merge(steps in steps(), units in 1usize..400) {
            for s in ARENAS {
                let mut r = Ranges::new(s, units * UNIT);
                let mut taken: Vec<(usize, usize)> = vec![];
                for (give, n) in &steps {
                    if *give && !taken.is_empty() {
                        let (at, n) = taken.swap_remove(n % taken.len());
                        r.give(at, n);
                    } else {
                        let bytes = rounded(s, *n, UNIT);
                        let largest = r.largest();
                        let got = r.take(bytes);
                        // A range is found exactly if one is large enough.
                        prop_assert_eq!(got.is_some(), largest >= bytes);
                        taken.extend(got.map(|at| (at, bytes)));
                    }
                    check(&r, &taken);
                }
                let again = Ranges::with(s, units * UNIT, &taken);
                prop_assert_eq!((&again.free, again.free_bytes()), (&r.free, r.free_bytes()));
                while let Some((at, n)) = taken.pop() {
                    r.give(at, n);
                }
                check(&r, &[]);
                prop_assert_eq!(&r.free, &Ranges::new(s, units * UNIT).free);
            }
        }

        #[test]
        fn moves_keep_every_byte_and_leave_whole_ranges(
            steps in steps(), sizes in proptest::collection::vec(1usize..120, 1..4), pins in any::<bool>()
        ) {
            for s in ARENAS {
                let chunks: Vec<usize> = sizes.iter().map(|n| n * UNIT).collect();
                let mut blocks = fragmented(s, &chunks, &steps);
                blocks.iter_mut().for_each(|b| b.pinned &= pins);
                let mut memory: Vec<Vec<usize>> = chunks.iter().map(|n| vec![usize::MAX; *n]).collect();
                for (i, b) in blocks.iter().enumerate() {
                    memory[b.chunk][b.offset..b.offset + b.bytes].fill(i);
                }
                let mut at = blocks.clone();
                for m in compact(s, &chunks, &blocks) {
                    let b = &mut at[m.block];
                    prop_assert!(!b.pinned && (b.chunk, b.offset) == m.from && m.from != m.to);
                    let data = memory[b.chunk][b.offset..b.offset + b.bytes].to_vec();
                    if m.from.0 == m.to.0 && m.from.1.abs_diff(m.to.1) < b.bytes {
                        prop_assert!(m.to.1 < m.from.1, "overlapping places go down");
                    }
                    (b.chunk, b.offset) = m.to;
                    memory[b.chunk][b.offset..b.offset + b.bytes].copy_from_slice(&data);
                }
                let mut free: Vec<(usize, bool)> = vec![];
                for (k, n) in chunks.iter().enumerate() {
                    let taken: Vec<_> = at.iter().filter(|b| b.chunk == k).map(|b| (b.offset, b.bytes)).collect();
                    let r = Ranges::with(s, *n, &taken);
                    check(&r, &taken);
                    if s != AllocationStrategy::Buddy && !at.iter().any(|b| b.pinned) {
                        prop_assert_eq!(r.largest(), r.free_bytes(), "one free range in each chunk");
                    }
                    free.extend(r.free.iter().map(|(at, m)| (*m, (at ^ m) + m <= *n)));
                }
                if s == AllocationStrategy::Buddy && !at.iter().any(|b| b.pinned) {
                    free.sort();
                    let two = free.windows(2).find(|w| w[0].0 == w[1].0 && (w[0].1 || w[1].1));
                    prop_assert!(two.is_none(), "two free ranges of one size: {:?}", free);
                }
                for (i, b) in at.iter().enumerate() {
                    prop_assert!(memory[b.chunk][b.offset..b.offset + b.bytes].iter().all(|x| *x == i), "block {i}");
                }
            }
        }
    }

    #[test]
    fn each_strategy_takes_the_right_range() {
        use AllocationStrategy::*;
        // Free: 512 bytes at 0, 128 at 1024, 256 at 1536, 256 at the end.
        let taken = [(512, 512), (1152, 384), (1792, 2048)];
        let free = |s| Ranges::with(s, 4096, &taken);
        assert_eq!(free(BestFit).take(100), Some(1024));
        assert_eq!(free(FirstFit).take(100), Some(0));
        assert_eq!(free(BestFit).take(200), Some(1536));
        assert_eq!(free(BestFit).take(513), None);
        let mut b = Ranges::new(Buddy, 1024 + 256);
        assert_eq!((b.take(256), b.take(256), b.take(512)), (Some(1024), Some(0), Some(512)));
        b.give(512, 512);
        b.give(0, 256);
        assert_eq!(b.largest(), 1024);
        assert_eq!(
            [rounded(Buddy, 300, 64), rounded(BestFit, 300, 64), rounded(Buddy, 0, 64)],
            [512, 320, 64]
        );
        assert_eq!(rounded(Buddy, usize::MAX, 64), usize::MAX);
    }

    #[test]
    fn a_nearly_empty_chunk_is_emptied_into_the_others() {
        use AllocationStrategy::*;
        let l = |chunk, offset, bytes| AllocatedRange { chunk, offset, bytes, pinned: false };
        let blocks = [l(0, 0, 512), l(1, 256, 128), l(1, 896, 128)];
        for s in [BestFit, FirstFit] {
            let moves = compact(s, &[1024, 1024], &blocks);
            let ends = moves.iter().rev().find(|m| m.block == 2).map(|m| m.to.0);
            assert_eq!(ends, Some(0), "{moves:?}");
        }
        let pinned: Vec<AllocatedRange> =
            blocks.iter().map(|b| AllocatedRange { pinned: true, ..*b }).collect();
        assert!(compact(BestFit, &[1024, 1024], &pinned).is_empty());
        // Two chunks, each half full: afterwards one of them is empty.
        let moves = compact(Buddy, &[1024, 1024], &[l(0, 0, 512), l(1, 0, 512)]);
        assert_eq!(moves.len(), 1, "{moves:?}");
    }
}

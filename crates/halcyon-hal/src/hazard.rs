//! Hazard tracking: records which pending work uses which memory, to order the queues of one device.

use smallvec::SmallVec;
use std::collections::VecDeque;

/// Ranges of addresses, or of the numbers that a driver without addresses gives to its bytes (OpenCL). After
/// [`Spans::normalise`] they are sorted and disjoint.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans(SmallVec<[(usize, usize); 8]>);

impl Spans {
    /// Adds the range of `bytes` bytes at `start`. [`Spans::normalise`] must be called before any query.
    pub(crate) fn add(&mut self, start: usize, bytes: usize) {
        if bytes > 0 {
            self.0.push((start, start.saturating_add(bytes)));
        }
    }

    pub(crate) fn normalise(&mut self) {
        self.0.sort_unstable();
        self.0.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
    }

    /// Whether the two sets share an address.
    pub(crate) fn meets(&self, o: &Spans) -> bool {
        let (mut i, mut j) = (0, 0);
        while let (Some(a), Some(b)) = (self.0.get(i), o.0.get(j)) {
            if a.0 < b.1 && b.0 < a.1 {
                return true;
            }
            if a.1 <= b.1 { i += 1 } else { j += 1 }
        }
        false
    }

    /// Whether the set contains all of `start..end`.
    pub(crate) fn covers(&self, start: usize, end: usize) -> bool {
        self.0.iter().any(|s| s.0 <= start && end <= s.1)
    }

    /// The parts of a range that are not in the set.
    pub(crate) fn without(&self, (from, end): (usize, usize)) -> SmallVec<[(usize, usize); 4]> {
        let (mut left, mut start) = (SmallVec::new(), from);
        for s in self.0.iter().filter(|s| s.1 > from && s.0 < end) {
            if s.0 > start {
                left.push((start, s.0));
            }
            start = start.max(s.1);
        }
        if start < end {
            left.push((start, end));
        }
        left
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        self.0.iter().copied()
    }
}

/// The memory that some work reads and writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    pub reads: Spans,
    pub writes: Spans,
}

impl Access {
    pub(crate) fn normalise(&mut self) {
        self.reads.normalise();
        self.writes.normalise();
    }

    /// Whether either one writes memory that the other uses. Both must be normalised.
    pub(crate) fn conflicts(&self, o: &Access) -> bool {
        self.writes.meets(&o.writes) || self.writes.meets(&o.reads) || self.reads.meets(&o.writes)
    }
}

/// Pending work.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    ticket: u64,
    queue: u64,
    access: Access,
    pub mark: T,
}

/// The pending work of all queues of a device, in submission order.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    next: u64,
    entries: VecDeque<Entry<T>>,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        Ledger { next: 0, entries: VecDeque::new() }
    }
}

impl<T> Ledger<T> {
    /// Pending work of other queues that must finish before work with this access starts. Work of `queue`
    /// itself is left out, because a queue runs its work in order.
    pub(crate) fn before(&self, queue: u64, access: &Access) -> impl Iterator<Item = &Entry<T>> {
        self.entries.iter().filter(move |e| e.queue != queue && e.access.conflicts(access))
    }

    /// Adds work and returns its ticket. Tickets increase in the order of the calls.
    pub(crate) fn enter(&mut self, queue: u64, access: Access, mark: T) -> u64 {
        self.next += 1;
        self.entries.push_back(Entry { ticket: self.next, queue, access, mark });
        self.next
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&ticket, |e| e.ticket).ok()
    }

    pub(crate) fn is_open(&self, ticket: u64) -> bool {
        self.place(ticket).is_some()
    }

    /// Removes finished work.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Entry<T>> {
        self.place(ticket).and_then(|i| self.entries.remove(i))
    }

    /// Calls `f` for every entry, in submission order, and removes the entries for which it returns false.
    pub(crate) fn retain(&mut self, f: impl FnMut(&Entry<T>) -> bool) {
        self.entries.retain(f);
    }

    /// The ticket of the oldest pending work.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.entries.front().map(|e| e.ticket)
    }

    /// The ticket issued last.
    pub(crate) fn newest(&self) -> u64 {
        self.next
    }
}

impl<T> Entry<T> {
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    pub(crate) fn access(&self) -> &Access {
        &self.access
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(of: &[(usize, usize)]) -> Spans {
        let mut s = Spans::default();
        of.iter().for_each(|(at, n)| s.add(*at, *n));
        s.normalise();
        s
    }

    #[test]
    fn spans_join_meet_and_cover() {
        let s = spans(&[(30, 10), (0, 10), (10, 5), (32, 2), (50, 0)]);
        assert_eq!(s.iter().collect::<Vec<_>>(), [(0, 15), (30, 40)]);
        assert!(s.covers(2, 15) && !s.covers(2, 16) && s.covers(30, 40));
        for (span, left) in [
            ((5, 35), &[(15, 30)][..]),
            ((0, 15), &[]),
            ((10, 50), &[(15, 30), (40, 50)]),
            ((20, 25), &[(20, 25)]),
        ] {
            assert_eq!(s.without(span).as_slice(), left, "{span:?}");
        }
        for (of, meets) in [(&[(15, 15)], false), (&[(14, 1)], true), (&[(39, 5)], true), (&[(40, 1)], false)]
        {
            assert_eq!((s.meets(&spans(of)), spans(of).meets(&s)), (meets, meets), "{of:?}");
        }
    }

    /// Compares [`Access::conflicts`] with its definition, evaluated byte by byte.
    #[test]
    fn conflicts_are_those_of_the_bytes() {
        let mut x = 7u64;
        let mut draw = |n: u64| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((x >> 33) % n) as usize
        };
        for _ in 0..if cfg!(miri) { 50 } else { 2000 } {
            let mut one = || {
                let mut of = || (0..draw(4)).map(|_| (draw(60), draw(6))).collect::<Vec<_>>();
                (of(), of())
            };
            let (a, b) = (one(), one());
            let has = |v: &[(usize, usize)], at: usize| v.iter().any(|(s, n)| (*s..s + n).contains(&at));
            let want = (0..70)
                .any(|i| has(&a.1, i) && (has(&b.0, i) || has(&b.1, i)) || has(&a.0, i) && has(&b.1, i));
            let access = |v: &(Vec<_>, Vec<_>)| Access { reads: spans(&v.0), writes: spans(&v.1) };
            assert_eq!(access(&a).conflicts(&access(&b)), want, "{a:?} {b:?}");
        }
    }

    #[test]
    fn a_queue_does_not_wait_for_itself() {
        let w = |at| Access { writes: spans(&[(at, 8)]), ..Access::default() };
        let mut l = Ledger::default();
        let (a, b) = (l.enter(1, w(0), ()), l.enter(2, w(100), ()));
        assert_eq!(l.before(1, &w(0)).count(), 0);
        assert_eq!(l.before(3, &w(0)).map(Entry::ticket).collect::<Vec<_>>(), [a]);
        assert!(l.leave(a).is_some() && l.leave(a).is_none() && l.is_open(b) && !l.is_open(a));
        assert_eq!((l.oldest(), l.newest()), (Some(b), b));
    }
}

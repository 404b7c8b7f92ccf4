//! A small bounded cache that evicts the least recently used entry.

use std::collections::HashMap;
use std::hash::Hash;

#[derive(Debug)]
pub(crate) struct Lru<K, V> {
    map: HashMap<K, (u64, V)>,
    clock: u64,
    cap: usize,
}

impl<K: Hash + Eq + Clone, V: Clone> Lru<K, V> {
    pub(crate) fn new(cap: usize) -> Lru<K, V> {
        Lru { map: HashMap::new(), clock: 0, cap }
    }

    pub(crate) fn get(&mut self, k: &K) -> Option<V> {
        self.clock += 1;
        let e = self.map.get_mut(k)?;
        e.0 = self.clock;
        Some(e.1.clone())
    }

    /// Adds a value; returns the value evicted for it, if any.
    pub(crate) fn put(&mut self, k: K, v: V) -> Option<V> {
        self.clock += 1;
        let mut out = None;
        if self.map.len() >= self.cap
            && !self.map.contains_key(&k)
            && let Some(old) = self.map.iter().min_by_key(|(_, (t, _))| *t).map(|(k, _)| k.clone())
        {
            out = self.map.remove(&old).map(|(_, v)| v);
        }
        self.map.insert(k, (self.clock, v));
        out
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn clear(&mut self) {
        self.map.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let mut l = Lru::new(2);
        l.put(1, 'a');
        l.put(2, 'b');
        l.get(&1);
        assert_eq!(l.put(3, 'c'), Some('b'));
        assert_eq!((l.get(&1), l.get(&2), l.len()), (Some('a'), None, 2));
    }
}

//! Accounts for the memory of values that are created during import. A node of a few bytes may create
//! megabytes (resize weights, a window of a million samples, concatenated strings), so a small file with many
//! such nodes could otherwise fill the memory.

use super::build::{Builder, Value};
use super::item::{Item, Text};
use halcyon_ir::ops::Op;
use halcyon_ir::{Error, Result};
use std::collections::HashSet;
use std::fmt::Debug;
use std::rc::{Rc, Weak};

/// Bytes that any model may create.
const BASE: usize = 512 << 20;
/// Further bytes that a model may create per byte of its files.
const PER_BYTE: usize = 8;
/// Smaller values are not counted.
const MIN_COUNTED_BYTES: usize = 1024;

#[derive(Debug)]
pub(super) struct Ledger {
    /// Bytes of the model file.
    file: usize,
    base: usize,
    /// Dead values are removed from the list when the total exceeds this number of bytes.
    next: usize,
    live: Vec<(Weak<dyn Debug>, usize)>,
    sum: usize,
    /// The constants of the graph that are counted in `fixed`. Each is counted once.
    constants: HashSet<(usize, usize)>,
    /// Bytes of the constants.
    fixed: usize,
    /// Number of nodes of the graph that were searched for constants.
    nodes: usize,
}

fn text(t: &Text) -> usize {
    t.vals.iter().map(|s| size_of::<String>() + s.len()).sum()
}

impl Ledger {
    /// The account of a model file of `file` bytes.
    pub(super) fn new(file: usize) -> Ledger {
        Ledger::with(file, BASE)
    }

    fn with(file: usize, base: usize) -> Ledger {
        Ledger { file, base, next: base, live: vec![], sum: 0, constants: HashSet::new(), fixed: 0, nodes: 0 }
    }

    /// Adds the results of a node and the constants that it put into the graph. `external` returns the bytes
    /// of the model's external data.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the live values exceed the allowance.
    pub(super) fn note(&mut self, b: &Builder, out: &[Item], external: impl Fn() -> usize) -> Result<()> {
        let mut todo: Vec<&Item> = out.iter().collect();
        while let Some(i) = todo.pop() {
            match i {
                Item::Tensor(v) => self.value(v),
                Item::Text(t) => self.add(Rc::downgrade(&(t.clone() as Rc<dyn Debug>)), text(t)),
                // The elements of a sequence were counted as earlier results, except the parts that
                // SplitToSequence makes.
                Item::Sequence(_) | Item::Optional(None) => {}
                Item::Optional(Some(i)) => todo.push(i),
                Item::Map(m) => todo.push(&m.1),
            }
        }
        for n in b.g.nodes().get(self.nodes..).unwrap_or(&[]) {
            if let Op::Const(c) = &n.op
                && self.constants.insert(c.key())
            {
                self.fixed = self.fixed.saturating_add(c.bytes().len());
            }
        }
        self.nodes = b.g.nodes().len();
        if self.sum.saturating_add(self.fixed) <= self.next {
            return Ok(());
        }
        let mut seen = HashSet::new();
        self.live.retain(|(w, _)| w.strong_count() > 0 && seen.insert(w.as_ptr().addr()));
        self.sum = self.live.iter().map(|(_, n)| *n).fold(0, usize::saturating_add);
        let all = self.sum.saturating_add(self.fixed);
        let files = self.file.saturating_add(external());
        let most = files.saturating_mul(PER_BYTE).saturating_add(self.base);
        if all > most {
            return Err(Error::unsupported(
                format!("a model whose import computes values of {all} bytes"),
                "Compute them outside of the model, or from its inputs",
            ));
        }
        self.next = all + most / 4;
        Ok(())
    }

    fn value(&mut self, v: &Value) {
        if let Some((w, bytes)) = v.stored() {
            self.add(w, bytes);
        }
    }

    fn add(&mut self, w: Weak<dyn Debug>, bytes: usize) {
        if bytes >= MIN_COUNTED_BYTES {
            self.sum = self.sum.saturating_add(bytes);
            self.live.push((w, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::ConstData;

    fn large() -> Value {
        Value::weight(ConstData::from_slice(&[1 << 20], &vec![1u8; 1 << 20]).unwrap(), "w")
    }

    #[test]
    fn live_values_are_counted_once() {
        let b = Builder::default();
        let mut l = Ledger::with(0, 10 << 20);
        for _ in 0..100 {
            l.note(&b, &[large().into()], || 0).unwrap();
        }
        let v = large();
        for _ in 0..100 {
            l.note(&b, &[v.clone().into()], || 0).unwrap();
        }
        let mut kept = vec![];
        let r = (0..20).try_for_each(|_| {
            kept.push(Item::from(large()));
            l.note(&b, &kept[kept.len() - 1..], || 0)
        });
        assert!(matches!(r, Err(Error::Unsupported { .. })));
        assert!((10..=14).contains(&kept.len()), "{}", kept.len());
    }

    #[test]
    fn constants_of_the_graph_and_strings_count() {
        let mut b = Builder::default();
        let mut l = Ledger::with(0, 4 << 20);
        let v = large();
        b.id(&v).unwrap();
        for _ in 0..10 {
            b.g.constant(v.data().unwrap().unwrap());
            l.note(&b, &[], || 0).unwrap();
        }
        let words = Rc::new(Text { dims: vec![1], vals: vec!["w".repeat(5 << 20)] });
        let out = [Item::Text(words)];
        assert!(l.note(&b, &out, || 0).is_err());
        // External data raises the allowance.
        l.note(&b, &out, || 1 << 20).unwrap();
    }
}

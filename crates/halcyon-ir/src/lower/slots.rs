//! Scratch memory: buffers whose lifetimes do not meet share a slot.

use super::*;
use std::collections::BTreeSet;

impl Lowerer<'_> {
    /// Gives scratch buffers slots; buffers whose lifetimes do not meet share one.
    pub(super) fn assign_slots(&mut self) {
        let n = self.plan.buffers.len();
        let mut last = vec![0usize; n];
        for (t, s) in self.plan.steps.iter().enumerate() {
            for b in &s.buffers {
                last[b.0 as usize] = t;
            }
        }
        // By size, then number.
        let mut free: BTreeSet<(usize, u32)> = BTreeSet::new();
        let mut placed = vec![false; n];
        for t in 0..self.plan.steps.len() {
            let bufs = self.plan.steps[t].buffers.clone();
            for b in &bufs {
                let k = b.0 as usize;
                let spec = &self.plan.buffers[k];
                if placed[k] || !matches!(spec.storage, Storage::Slot(_)) {
                    continue;
                }
                placed[k] = true;
                let want = spec.bytes;
                // The smallest free slot that holds it, else the largest one grown, else a new one.
                let slots = &mut self.plan.slots;
                let fit = free.range((want, 0)..).next().or_else(|| free.last()).copied();
                let slot = match fit {
                    Some(at) => {
                        free.remove(&at);
                        at.1
                    }
                    None => {
                        slots.push(0);
                        slots.len() as u32 - 1
                    }
                };
                slots[slot as usize] = slots[slot as usize].max(want);
                self.plan.buffers[k].storage = Storage::Slot(slot);
            }
            let mut done: Vec<BufId> = bufs;
            done.sort();
            done.dedup();
            for b in done {
                if let Storage::Slot(s) = self.plan.buffers[b.0 as usize].storage
                    && last[b.0 as usize] == t
                {
                    free.insert((self.plan.slots[s as usize], s));
                }
            }
        }
        // Buffers that no step touches (empty tensors).
        for spec in &mut self.plan.buffers {
            if spec.storage == Storage::Slot(u32::MAX) {
                self.plan.slots.push(spec.bytes);
                spec.storage = Storage::Slot(self.plan.slots.len() as u32 - 1);
            }
        }
    }
}

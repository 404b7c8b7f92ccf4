//! Scratch memory: buffers whose lifetimes do not meet share a slot.

use super::*;

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
        let mut free: Vec<u32> = vec![];
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
                let fit = free
                    .iter()
                    .enumerate()
                    .min_by_key(|(_, s)| {
                        let have = slots[**s as usize];
                        if have >= want { (0, have) } else { (1, usize::MAX - have) }
                    })
                    .map(|(at, _)| at);
                let slot = match fit {
                    Some(at) => free.swap_remove(at),
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
                    free.push(s);
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

//! Runs kernels with parts ([`Parts`]).

use super::code::Code;
use super::{Interp, Memory, Options, Outcome, Space};
use crate::error::{Error, Result};
use crate::kernel::ir::BufId;
use crate::kernel::{Launch, Parts};

/// The memory of one part of a kernel.
struct PartMemory<'a, M: ?Sized> {
    memory: &'a mut M,
    parts: &'a Parts,
    part: usize,
}

impl<M: Memory + ?Sized> Memory for PartMemory<'_, M> {
    fn len(&self, buf: usize) -> usize {
        self.memory.len(self.parts.buffer(self.part, buf))
    }

    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        self.memory.load(self.parts.buffer(self.part, buf), at, bytes)
    }

    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        self.memory.store(self.parts.buffer(self.part, buf), at, bytes, value);
    }
}

impl Interp {
    /// Runs the parts one after another. Races between parts are not found.
    pub(super) fn run_parts<M: Memory + ?Sized>(
        &self,
        parts: &Parts,
        launch: &Launch,
        memory: &mut M,
        o: &Options,
    ) -> Result<Outcome> {
        let k = &self.kernel;
        if launch.params.len() != k.params.len() {
            let what = format!("{} parameters given, expected {}", launch.params.len(), k.params.len());
            return Err(Error::argument(format!("kernel {}", k.name), what));
        }
        let one = Interp { code: Code::new(&parts.kernel), kernel: parts.kernel.clone() };
        let mut all = Outcome::default();
        for (part, launch) in parts.launches(launch).iter().enumerate() {
            // Buffers have other numbers in a part.
            let outer = |b: usize| BufId(parts.buffer(part, b) as u32);
            let of_part = 0..parts.kernel.buffers.len();
            let poisoned = of_part.filter(|b| o.poisoned.contains(&outer(*b))).map(|b| BufId(b as u32));
            let o = Options { poisoned: poisoned.collect(), ..o.clone() };
            let mut memory = PartMemory { memory: &mut *memory, parts, part };
            let mut out = one.run_whole(launch, &mut memory, &o)?;
            for r in &mut out.reports {
                if let Space::Global(b) = &mut r.space {
                    *b = outer(b.ix());
                }
            }
            all.reports.extend(out.reports);
            all.faults += out.faults;
            all.steps += out.steps;
        }
        all.reports.truncate(o.max_reports);
        Ok(all)
    }
}

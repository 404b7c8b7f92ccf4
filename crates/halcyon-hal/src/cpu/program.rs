//! Kernel IR on the CPU device: interpreted, for what has no native kernel (custom ops, mostly).

use super::memory::Ptr;
use crate::{Error, Program, Result};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::interp::{Interp, Memory, Options};
use halcyon_ir::kernel::{Kernel, Launch};
use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};

/// A verified kernel, ready to be interpreted.
#[derive(Debug)]
pub(crate) struct CpuProgram {
    name: String,
    interp: Interp,
    /// Whether each buffer is written; without the fault word.
    pub(crate) writes: Vec<bool>,
    /// Place of the parameter `fault`, in kernels that can meet a bad index.
    fault: Option<usize>,
}

/// The buffers of one launch.
struct Buffers<'a> {
    at: &'a [Ptr],
    fault: &'a AtomicU32,
}

impl Memory for Buffers<'_> {
    fn len(&self, buf: usize) -> usize {
        self.at.get(buf).map_or(4, |p| p.bytes)
    }

    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        match self.at.get(buf) {
            Some(p) if at + bytes <= p.bytes && bytes <= 8 => {
                let mut w = [0u8; 8];
                // SAFETY: inside the buffer, which lives as long as the launch; the device's tracker keeps
                // others out that would write it.
                unsafe { std::ptr::copy_nonoverlapping(p.ptr.add(at), w.as_mut_ptr(), bytes) };
                u64::from_le_bytes(w)
            }
            Some(_) => 0,
            None => self.fault.load(Ordering::Acquire) as u64,
        }
    }

    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        match self.at.get(buf) {
            Some(p) if at + bytes <= p.bytes && bytes <= 8 && !p.read_only => {
                // SAFETY: as above; a buffer that the kernel declares as read only, and that others may read
                // meanwhile, is not stored to: the verifier sees to it.
                unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), p.ptr.add(at), bytes) };
            }
            Some(_) => {}
            None => {
                // The first fault stays.
                let _ = self.fault.compare_exchange(0, value as u32, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

impl CpuProgram {
    /// # Errors
    /// What the verifier finds.
    pub(crate) fn new(kernel: &Kernel) -> Result<CpuProgram> {
        let fault = kernel.params.iter().position(|p| p.name == "fault");
        let mut writes: Vec<bool> = kernel.buffers.iter().map(|b| b.write).collect();
        if fault.is_some() {
            writes.pop();
        }
        Ok(CpuProgram { name: kernel.name.clone(), interp: Interp::new(kernel)?, writes, fault })
    }

    /// One launch over buffers in the kernel's order, the fault word left out.
    ///
    /// # Errors
    /// `Argument` when buffers or parameters do not match, or the kernel left a buffer (nothing outside was
    /// touched).
    pub(crate) fn run(
        &self,
        groups: [u32; 3],
        at: &[Ptr],
        params: &[Scalar],
        id: u32,
        fault: &AtomicU32,
    ) -> Result<()> {
        let bad = |w: String| Err(Error::argument(format!("kernel {}", self.name), w));
        if at.len() != self.writes.len() {
            return bad(format!("{} buffers were bound, it has {}", at.len(), self.writes.len()));
        }
        for (p, _) in at.iter().zip(&self.writes).filter(|(_, w)| **w) {
            super::device::check_writable(&self.name, p)?;
        }
        let mut params = params.to_vec();
        if let Some(p) = self.fault.and_then(|i| params.get_mut(i)) {
            *p = Scalar::U(id as u64);
        }
        let found =
            self.interp.run(&Launch { groups, params }, &mut Buffers { at, fault }, &Options::default())?;
        match found.reports.first() {
            None => Ok(()),
            Some(r) => bad(format!("{} bad accesses, the first: {r}", found.faults)),
        }
    }
}

impl Program for CpuProgram {
    fn name(&self) -> &str {
        &self.name
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

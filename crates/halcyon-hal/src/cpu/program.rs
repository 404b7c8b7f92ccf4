//! Interprets kernel IR on the CPU device. The device does this for ops without a library kernel, mostly
//! custom ops.

use super::memory::Ptr;
use crate::{Error, Program, Result};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::interp::{Interp, Memory, Options};
use halcyon_ir::kernel::{Kernel, Launch};
use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};

/// A verified kernel that is ready to be interpreted.
#[derive(Debug)]
pub(crate) struct CpuProgram {
    name: String,
    interp: Interp,
    /// For each buffer except the fault word, whether the kernel writes it.
    pub(crate) writes: Vec<bool>,
    /// Position of the parameter `fault`. Only kernels that may find an index out of range have it.
    fault: Option<usize>,
}

/// The buffers of one launch.
struct Buffers<'a> {
    at: &'a [Ptr],
    fault: &'a AtomicU32,
}

impl<'a> Buffers<'a> {
    /// # Safety
    /// While the value lives, every entry of `at` points to live memory that no other command writes. No
    /// other command uses an entry that the kernel writes, unless the entry is `read_only`.
    unsafe fn new(at: &'a [Ptr], fault: &'a AtomicU32) -> Buffers<'a> {
        Buffers { at, fault }
    }
}

/// Whether an access to `bytes` bytes at offset `at` has at most 8 bytes (the largest value) and ends inside
/// a buffer of `len` bytes.
fn inside(at: usize, bytes: usize, len: usize) -> bool {
    bytes <= 8 && at.checked_add(bytes).is_some_and(|end| end <= len)
}

impl Memory for Buffers<'_> {
    fn len(&self, buf: usize) -> usize {
        self.at.get(buf).map_or(4, |p| p.bytes)
    }

    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        match self.at.get(buf) {
            Some(p) if inside(at, bytes, p.bytes) => {
                let mut w = [0u8; 8];
                // SAFETY: `inside` checked that the bytes lie in the buffer and are at most 8, the size of
                // `w`. `Buffers::new` requires that the buffer is live and that no other command writes it.
                unsafe { std::ptr::copy_nonoverlapping(p.ptr.add(at), w.as_mut_ptr(), bytes) };
                u64::from_le_bytes(w)
            }
            Some(_) => 0,
            None => self.fault.load(Ordering::Acquire) as u64,
        }
    }

    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        match self.at.get(buf) {
            Some(p) if inside(at, bytes, p.bytes) && !p.read_only => {
                // SAFETY: `inside` checked that the bytes lie in the buffer and are at most 8. The verifier
                // rejects stores to buffers that the kernel does not declare as written, so the kernel writes
                // this buffer, and the condition above excludes buffers that are `read_only`. `Buffers::new`
                // requires that a buffer that is written and not `read_only` is live, and that no other
                // command uses it.
                unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), p.ptr.add(at), bytes) };
            }
            Some(_) => {}
            None => {
                // Keep the first fault.
                let _ = self.fault.compare_exchange(0, value as u32, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

impl CpuProgram {
    /// Prepares a kernel for interpretation.
    ///
    /// # Errors
    /// The errors that the verifier finds.
    pub(crate) fn new(kernel: &Kernel) -> Result<CpuProgram> {
        let fault = kernel.params.iter().position(|p| p.name == "fault");
        let mut writes: Vec<bool> = kernel.buffers.iter().map(|b| b.write).collect();
        if fault.is_some() {
            writes.pop();
        }
        Ok(CpuProgram { name: kernel.name.clone(), interp: Interp::new(kernel)?, writes, fault })
    }

    /// Runs one launch. `at` holds the buffers in the kernel's order, without the fault word.
    ///
    /// # Errors
    /// `Argument` if buffers or parameters do not match, or if the interpreter found a fault (see
    /// [`halcyon_ir::kernel::interp::Fault`]): an access out of range, which the interpreter does not carry
    /// out, or another error, such as a division of an index by zero.
    ///
    /// # Safety
    /// Every entry of `at` points to live memory. During the call, no other command writes it, and no other
    /// command uses the buffers that the kernel writes.
    pub(crate) unsafe fn run(
        &self,
        groups: [u32; 3],
        at: &[Ptr],
        params: &[Scalar],
        id: u32,
        fault: &AtomicU32,
    ) -> Result<()> {
        let bad = |w: String| Err(Error::argument(format!("kernel {}", self.name), w));
        if at.len() != self.writes.len() {
            return bad(format!("{} buffers were bound, but the kernel has {}", at.len(), self.writes.len()));
        }
        for (p, _) in at.iter().zip(&self.writes).filter(|(_, w)| **w) {
            super::device::check_writable(&self.name, p)?;
        }
        let mut params = params.to_vec();
        if let Some(p) = self.fault.and_then(|i| params.get_mut(i)) {
            *p = Scalar::U(id as u64);
        }
        // SAFETY: `run` requires that the buffers are live, that no other command writes them, and that no
        // other command uses the ones that the kernel writes. `memory` lives only in this call.
        let mut memory = unsafe { Buffers::new(at, fault) };
        let found = self.interp.run(&Launch { groups, params }, &mut memory, &Options::default())?;
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

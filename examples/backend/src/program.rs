//! Compiled kernels: kernel IR prepared for the interpreter. A hardware driver renders source here
//! (`halcyon_ir::render`) and passes it to its compiler.

use crate::memory::{InterpreterBuffer, Spot, lock};
use halcyon_hal::validate::Signature;
use halcyon_hal::{Caps, Error, Program, Result};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::interp::{Interp, Memory, Options};
use halcyon_ir::kernel::{Kernel, Launch, verify_for};
use std::any::Any;
use std::sync::{Arc, MutexGuard};

/// A verified kernel, ready to run.
#[derive(Debug)]
pub struct InterpreterProgram {
    interp: Interp,
    signature: Signature,
    /// Number of the device instance that compiled it.
    pub(crate) owner: u64,
}

/// The buffers of one launch.
struct Bound<'a> {
    /// The locked allocations that contain the buffers.
    memory: Vec<MutexGuard<'a, Vec<u8>>>,
    /// For each binding: the index of its allocation, the offset in it, and the size. Two bindings may be the
    /// same buffer.
    which: Vec<(usize, usize, usize)>,
    /// The fault word. The kernel accesses it as an additional buffer after its own buffers.
    fault: u32,
}

impl Memory for Bound<'_> {
    fn len(&self, buf: usize) -> usize {
        self.which.get(buf).map_or(4, |(_, _, bytes)| *bytes)
    }

    fn load(&self, buf: usize, at: usize, bytes: usize) -> u64 {
        let Some((i, start, _)) = self.which.get(buf) else { return self.fault as u64 };
        let (mut word, at) = ([0; 8], start + at);
        word[..bytes].copy_from_slice(&self.memory[*i][at..at + bytes]);
        u64::from_le_bytes(word)
    }

    fn store(&mut self, buf: usize, at: usize, bytes: usize, value: u64) {
        match self.which.get(buf) {
            Some((i, start, _)) => {
                let at = start + at;
                self.memory[*i][at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            }
            // Later faults are ignored, because only the first fault is reported.
            None if self.fault == 0 => self.fault = value as u32,
            None => {}
        }
    }
}

impl InterpreterProgram {
    /// # Errors
    /// The errors of the verifier, with the kernel's name.
    pub(crate) fn new(kernel: &Kernel, caps: &Caps, owner: u64) -> Result<InterpreterProgram> {
        verify_for(kernel, caps)?;
        Ok(InterpreterProgram { interp: Interp::new(kernel)?, signature: Signature::of(kernel)?, owner })
    }

    /// Runs one launch and returns the fault word; 0 means no fault.
    ///
    /// # Errors
    /// [`Error::Argument`] if the launch does not fit the kernel, or the kernel accesses a buffer out of
    /// bounds.
    pub(crate) fn run(
        &self,
        groups: [u32; 3],
        buffers: &[&InterpreterBuffer],
        params: &[Scalar],
        fault: u32,
    ) -> Result<u32> {
        self.signature.arguments(buffers.len(), params, fault)?;
        if groups.contains(&0) {
            return Ok(0);
        }
        let spots: Vec<Spot> = buffers.iter().map(|b| b.spot()).collect();
        let mut bound = Bound { memory: vec![], which: vec![], fault: 0 };
        let mut locked: Vec<&Spot> = vec![];
        for (b, spot) in buffers.iter().zip(&spots) {
            let known = locked.iter().position(|l| Arc::ptr_eq(&l.memory, &spot.memory));
            let i = known.unwrap_or(locked.len());
            if known.is_none() {
                locked.push(spot);
                bound.memory.push(lock(&spot.memory));
            }
            bound.which.push((i, spot.offset, halcyon_hal::Buffer::bytes(*b)));
        }
        let declared = self.signature.params.iter().zip(params);
        let params = declared.map(|(p, v)| if p.name == "fault" { Scalar::U(fault.into()) } else { *v });
        let launch = Launch { groups, params: params.collect() };
        let found = self.interp.run(&launch, &mut bound, &Options::default())?;
        match found.reports.first() {
            None => Ok(bound.fault),
            Some(r) => Err(Error::argument(
                format!("kernel {}", self.signature.name),
                format!("{} bad accesses, the first: {r}", found.faults),
            )),
        }
    }
}

impl Program for InterpreterProgram {
    fn name(&self) -> &str {
        &self.signature.name
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Compiled kernels: what the interpreter makes of kernel IR. A driver of hardware renders source here
//! (`halcyon_ir::render`) and gives it to its compiler.

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
    /// Number of the opening that made it.
    pub(crate) owner: u64,
}

/// The buffers of one launch.
struct Bound<'a> {
    /// The allocations that they lie in.
    memory: Vec<MutexGuard<'a, Vec<u8>>>,
    /// Of each binding its allocation, the place there and the size. Two bindings may be one buffer.
    which: Vec<(usize, usize, usize)>,
    /// What the kernel sees after its own buffers: the fault word.
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
            // The first fault stays.
            None if self.fault == 0 => self.fault = value as u32,
            None => {}
        }
    }
}

impl InterpreterProgram {
    /// # Errors
    /// What the verifier finds, with the kernel's name.
    pub(crate) fn new(kernel: &Kernel, caps: &Caps, owner: u64) -> Result<InterpreterProgram> {
        verify_for(kernel, caps)?;
        Ok(InterpreterProgram { interp: Interp::new(kernel)?, signature: Signature::of(kernel)?, owner })
    }

    /// Runs one launch; gives the fault word, 0 for no fault.
    ///
    /// # Errors
    /// [`Error::Argument`] where the launch does not fit the kernel, or the kernel leaves a buffer.
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

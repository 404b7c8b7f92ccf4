//! The loop over submitted commands. It checks each command, calls the driver's action and counts the
//! command. A driver provides the three actions ([`Actions`]) and distinguishes its buffers and programs from
//! those of other devices ([`DeviceInstance`]).

use crate::hazard::Access;
use crate::validate::{self, Argument, Signature};
use crate::{BufferRef, Command, Counts, Error, LibraryKernel, Program, Result};
use smallvec::SmallVec;
use std::any::Any;
use std::sync::Arc;

/// A buffer or program of one opening of a device.
pub(crate) trait HasOwner: Any {
    /// The number of the opening ([`DeviceInstance::number`]).
    fn owner(&self) -> u64;
}

/// A compiled kernel of a driver.
pub(crate) trait Compiled: HasOwner {
    fn signature(&self) -> &Signature;
}

/// One opening of a device, the result of one `Driver::open`. It decides which buffers and programs belong to
/// it.
pub(crate) trait DeviceInstance {
    type Buffer: HasOwner;
    type Program: Compiled;

    /// The device's id, for errors.
    fn id(&self) -> &str;
    /// Different for every opening of every device of the driver.
    fn number(&self) -> u64;

    /// The driver's buffer behind `b`.
    ///
    /// # Errors
    /// [`Error::Argument`] if it belongs to another opening.
    fn buffer<'a>(&self, call: &str, b: &'a BufferRef) -> Result<&'a Self::Buffer> {
        b.as_any().downcast_ref::<Self::Buffer>().filter(|b| b.owner() == self.number()).ok_or_else(|| {
            Error::argument(call, format!("{b:?} does not belong to this opening of {}", self.id()))
        })
    }

    /// Whether the buffer is imported memory, which nothing may write.
    fn is_read_only(&self, _: &Self::Buffer) -> bool {
        false
    }

    /// The driver's buffer behind `b`, which `call` writes.
    ///
    /// # Errors
    /// [`Error::Argument`] if it belongs to another opening, or is read-only.
    fn writable<'a>(&self, call: &str, b: &'a BufferRef) -> Result<&'a Self::Buffer> {
        let b = self.buffer(call, b)?;
        match self.is_read_only(b) {
            true => Err(Error::argument(call, "the buffer holds imported data, which is read-only")),
            false => Ok(b),
        }
    }

    /// The driver's program behind `p`.
    ///
    /// # Errors
    /// [`Error::Argument`] if it belongs to another opening.
    fn program<'a>(&self, p: &'a Arc<dyn Program>) -> Result<&'a Self::Program> {
        p.as_any()
            .downcast_ref::<Self::Program>()
            .filter(|p| p.owner() == self.number())
            .ok_or_else(|| Error::argument("launch", format!("{} was compiled for another device", p.name())))
    }
}

/// The actions of a queue for each kind of command. Commands without work (no groups, no bytes) are passed
/// too, because profiling reports a time for every command.
pub(crate) trait Actions<D: DeviceInstance> {
    /// Runs or enqueues a kernel.
    ///
    /// # Safety
    /// `p` and `buffers` must belong to the queue's opening of its device. `p`'s signature must have returned
    /// `arguments` for this number of buffers. The buffers must be as large as the kernel requires for these
    /// arguments and `groups`. An implementation may add conditions.
    unsafe fn launch(
        &mut self,
        p: &D::Program,
        groups: [u32; 3],
        buffers: &[&D::Buffer],
        arguments: &[Argument],
    ) -> Result<()>;

    /// Runs or enqueues a copy between parts of buffers, each given with its offset.
    ///
    /// # Safety
    /// Both buffers must belong to the queue's opening of its device. For each, its offset plus `bytes` must
    /// not exceed its size. The ranges must not overlap.
    unsafe fn copy(&mut self, src: (&D::Buffer, usize), dst: (&D::Buffer, usize), bytes: usize)
    -> Result<()>;

    /// Checks and enqueues a library kernel.
    ///
    /// # Errors
    /// [`Error::Argument`] for a kernel or a buffer of another device.
    fn library(&mut self, device: &D, kernel: &Arc<dyn LibraryKernel>, buffers: &[BufferRef]) -> Result<()> {
        let _ = (device, buffers);
        Err(Error::argument("submit", format!("{} is a library kernel of another device", kernel.name())))
    }
}

/// Checks, runs and counts commands (launches without groups and copies without bytes are not counted). Stops
/// at the first command that is invalid or fails.
///
/// # Safety
/// The buffers of each launch must be as large as its kernel requires, which the driver contract leaves to
/// the caller of `submit`. The caller must meet the conditions that `A` adds to [`Actions::launch`].
pub(crate) unsafe fn run<D: DeviceInstance, A: Actions<D>>(
    device: &D,
    actions: &mut A,
    counts: &Counts,
    commands: &[Command<'_>],
) -> Result<()> {
    for c in commands {
        match c {
            Command::Launch { program, groups, buffers, params, fault } => {
                let p = device.program(program)?;
                let arguments = p.signature().arguments(buffers.len(), params, *fault)?;
                let declared = &p.signature().buffers;
                let own = |(i, b): (usize, _)| match declared.get(i).is_some_and(|d| d.write) {
                    true => device.writable("launch", b),
                    false => device.buffer("launch", b),
                };
                let buffers = buffers.iter().enumerate().map(own).collect::<Result<SmallVec<[_; 16]>>>()?;
                // SAFETY: `program` and `buffer` checked the owners, and the signature made the arguments for
                // these buffers. `run` requires buffers that contain every byte that the kernel accesses, and
                // the conditions that `A` adds.
                unsafe { actions.launch(p, *groups, &buffers, &arguments)? };
                Counts::add(&counts.launches, !groups.contains(&0) as u64);
            }
            Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                let (from, to) = (device.buffer("copy", src)?, device.writable("copy", dst)?);
                let same = std::ptr::eq(from, to);
                validate::copy([src.bytes(), *src_offset], [dst.bytes(), *dst_offset], *bytes, same)?;
                // SAFETY: `buffer` checked the owners and `validate::copy` the ranges.
                unsafe { actions.copy((from, *src_offset), (to, *dst_offset), *bytes)? };
                Counts::add(&counts.device_copies, (*bytes > 0) as u64);
            }
            Command::Library { kernel, buffers, .. } => {
                actions.library(device, kernel, buffers)?;
                Counts::add(&counts.library_calls, 1);
            }
        }
    }
    Ok(())
}

/// A device whose buffers have addresses. With them, [`crate::queues`] finds the commands of different queues
/// that must wait for each other because they use the same memory.
pub(crate) trait Addressed: DeviceInstance {
    /// The address and the size of a buffer.
    fn span(b: &Self::Buffer) -> (usize, usize);

    /// Whether a library kernel writes its buffer of this index; `None` for a kernel of another device.
    fn kernel_writes(&self, kernel: &Arc<dyn LibraryKernel>, buffer: usize) -> Option<bool> {
        let _ = (kernel, buffer);
        None
    }

    /// The memory that commands use. Invalid commands are left out here, and reported when they are enqueued.
    fn access(&self, commands: &[Command<'_>]) -> Access {
        let mut a = Access::default();
        let at = |b: &BufferRef| self.buffer("", b).ok().map(Self::span);
        let mut add = |b: &BufferRef, writes: bool| {
            let spans = if writes { &mut a.writes } else { &mut a.reads };
            at(b).into_iter().for_each(|(at, bytes)| spans.add(at, bytes));
        };
        for c in commands {
            match c {
                Command::Launch { program, buffers, .. } => {
                    let Ok(p) = self.program(program) else { continue };
                    buffers.iter().zip(&p.signature().buffers).for_each(|(b, d)| add(b, d.write));
                }
                Command::Copy { src, dst, .. } => {
                    add(src, false);
                    add(dst, true);
                }
                Command::Library { kernel, buffers, .. } => {
                    for (i, b) in buffers.iter().enumerate() {
                        if let Some(writes) = self.kernel_writes(kernel, i) {
                            add(b, writes);
                        }
                    }
                }
            }
        }
        a
    }
}

//! Orders work that uses the same memory in different queues of a CPU device, and records memory that failed
//! work should have written.

use super::device::{kernel_of, program_of};
use super::library::CpuKernel;
use super::memory::{CpuBuffer, HostSource, Keep, Ptr};
use super::program::CpuProgram;
use crate::hazard::{Access, Ledger, Spans};
use crate::pool::WeakBlock;
use crate::{BufferRef, Command, Error, Result};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Number of the device's own queue in the ledger; streams have larger numbers.
pub(super) const OWN: u64 = 0;

/// A poisoned range: memory that failed work should have written. It is stored as a range of a block of the
/// pool, because the pool may move the block.
#[derive(Debug)]
struct Poisoned {
    of: WeakBlock<HostSource>,
    offset: usize,
    bytes: usize,
    error: Error,
}

impl Poisoned {
    /// The range's current addresses; `None` once the block has been freed.
    fn span(&self) -> Option<(usize, usize)> {
        let start = self.of.upgrade()?.place().get() as usize + self.offset;
        Some((start, start + self.bytes))
    }
}

#[derive(Debug, Default)]
struct Traffic {
    ledger: Ledger<()>,
    poisoned: Vec<Poisoned>,
}

/// Orders the work of a device's queues. While there are no streams, the device lock alone orders the work.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    state: Mutex<Traffic>,
    changed: Condvar,
    /// The number of streams now.
    pub(super) streams: AtomicUsize,
    /// The number of queues ever made, without the device's own.
    pub(super) queues: AtomicU64,
}

/// `each(f)` calls `f` once for each command of the work, in order, with the memory that the command uses.
/// Every `Access` is normalised.
pub(super) type Each<'a> = &'a dyn Fn(&mut dyn FnMut(&Access));

impl Tracker {
    fn lock(&self) -> MutexGuard<'_, Traffic> {
        // Every update leaves the state valid, so the state can be used after a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are no streams. Streams are created under the device lock, so if there are none, this
    /// does not change while the caller holds that lock.
    pub(super) fn is_quiet(&self) -> bool {
        self.streams.load(Ordering::Acquire) == 0
    }

    /// Registers work of a queue. Returns its ticket and the tickets it has to wait for.
    pub(super) fn enter(&self, queue: u64, access: Access) -> (u64, SmallVec<[u64; 4]>) {
        let mut s = self.lock();
        let before = s.ledger.before(queue, &access).map(|e| e.ticket()).collect();
        (s.ledger.enter(queue, access, ()), before)
    }

    /// Waits until all work with the tickets `before` has ended. If the work that `each` describes would then
    /// read poisoned memory, returns the error with which the memory was poisoned.
    pub(super) fn admit(&self, before: &[u64], each: Each<'_>) -> Result<()> {
        let mut s = self.lock();
        while before.iter().any(|t| s.ledger.is_open(*t)) {
            s = self.changed.wait(s).unwrap_or_else(PoisonError::into_inner);
        }
        s.poisoned.retain(|x| x.of.is_held());
        if s.poisoned.is_empty() {
            return Ok(());
        }
        let poisoned: Vec<_> = s.poisoned.iter().filter_map(|x| Some((x.span()?, &x.error))).collect();
        let (mut written, mut found) = (Spans::default(), None);
        each(&mut |a| {
            let hit = poisoned.iter().find(|(span, _)| {
                // Poisoned memory is valid again if an earlier command of the same work has written it.
                let reads = a.reads.iter().map(|r| (r.0.max(span.0), r.1.min(span.1)));
                reads.filter(|r| r.0 < r.1).any(|r| !written.covers(r.0, r.1))
            });
            found = found.take().or_else(|| hit.map(|(_, e)| (*e).clone()));
            a.writes.iter().for_each(|w| written.add(w.0, w.1 - w.0));
            written.normalise();
        });
        found.map_or(Ok(()), Err)
    }

    /// Removes finished work and updates the poisoned ranges.
    pub(super) fn leave(&self, ticket: u64, end: End<'_>) {
        let mut s = self.lock();
        let Some(entry) = s.ledger.leave(ticket) else { return };
        let writes = &entry.access().writes;
        if !matches!(end, End::Refused) {
            // Memory that has been written again is no longer poisoned.
            for x in std::mem::take(&mut s.poisoned) {
                let Some(span) = x.span() else { continue };
                let left = writes.without(span);
                s.poisoned.extend(left.into_iter().map(|(from, end)| Poisoned {
                    of: x.of.clone(),
                    offset: x.offset + (from - span.0),
                    bytes: end - from,
                    error: x.error.clone(),
                }));
            }
        }
        if let End::Failed(error, keep) = end {
            for span in writes.iter() {
                s.poisoned.extend(keep.iter().filter_map(|k| k.poisoned(span, error)));
            }
        }
        drop(s);
        self.changed.notify_all();
    }

    /// Runs work of the device's own queue after the work that it conflicts with has ended. The caller holds
    /// the device lock.
    pub(super) fn pass<R>(&self, each: Each<'_>, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let (ticket, before) = self.enter(OWN, union(each));
        // Removes the work from the ledger even if a kernel panics.
        let mut left = Left(self, ticket, false);
        self.admit(&before, each)?;
        let r = f();
        left.2 = r.is_ok();
        r
    }

    /// Waits for all work that was submitted before this call.
    pub(super) fn drain(&self) {
        if self.is_quiet() {
            return;
        }
        let mut s = self.lock();
        let last = s.ledger.newest();
        while s.ledger.oldest().is_some_and(|t| t <= last) {
            s = self.changed.wait(s).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How work ended.
pub(super) enum End<'a> {
    Done,
    /// The work failed after its submission returned. It may have written part of its outputs.
    Failed(&'a Error, &'a [Keep]),
    /// The work failed, and its caller received the error. The poisoned ranges do not change.
    Refused,
}

/// Removes work of the device's own queue from the ledger when dropped. The flag is true if the work
/// succeeded.
struct Left<'a>(&'a Tracker, u64, bool);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1, if self.2 { End::Done } else { End::Refused });
    }
}

pub(super) fn union(each: Each<'_>) -> Access {
    let mut all = Access::default();
    each(&mut |a| {
        a.reads.iter().for_each(|r| all.reads.add(r.0, r.1 - r.0));
        a.writes.iter().for_each(|w| all.writes.add(w.0, w.1 - w.0));
    });
    all.normalise();
    all
}

impl Keep {
    /// The part of this memory that becomes poisoned when work that writes `span` fails.
    fn poisoned(&self, span: (usize, usize), error: &Error) -> Option<Poisoned> {
        let Keep::Pooled(p) = self else { return None };
        let (block, start) = (p.block(), p.block().place().get() as usize);
        let (from, end) = (span.0.max(start), span.1.min(start + block.bytes()));
        (from < end).then(|| Poisoned {
            of: block.downgrade(),
            offset: from - start,
            bytes: end - from,
            error: error.clone(),
        })
    }
}

/// The memory that a kernel with these buffers accesses.
pub(super) fn of_kernel(k: &CpuKernel, at: &[Ptr]) -> Access {
    let mut a = Access::default();
    for (i, p) in at.iter().enumerate().take(k.buffers()) {
        let (reads, writes) = k.uses(i);
        if reads {
            a.reads.add(p.ptr as usize, p.bytes);
        }
        if writes {
            a.writes.add(p.ptr as usize, p.bytes);
        }
    }
    a.normalise();
    a
}

pub(super) fn of_program(p: &CpuProgram, at: &[Ptr]) -> Access {
    let mut a = Access::default();
    for (p, writes) in at.iter().zip(&p.writes) {
        if *writes { &mut a.writes } else { &mut a.reads }.add(p.ptr as usize, p.bytes);
    }
    a.normalise();
    a
}

/// The memory that a copy accesses: it reads one range and writes another.
pub(crate) fn of_copy(src: &Ptr, dst: &Ptr) -> Access {
    let mut a = reading(src);
    a.writes.add(dst.ptr as usize, dst.bytes);
    a
}

/// The access of work that reads a range.
pub(crate) fn reading(p: &Ptr) -> Access {
    let mut a = Access::default();
    a.reads.add(p.ptr as usize, p.bytes);
    a
}

/// The access of work that writes a range.
pub(crate) fn writing(p: &Ptr) -> Access {
    let mut a = Access::default();
    a.writes.add(p.ptr as usize, p.bytes);
    a
}

/// The memory that a command of the device's own queue accesses. For an invalid command the result may be
/// incomplete; the error is reported when the command runs.
pub(crate) fn of_command(c: &Command<'_>, owner: u64) -> Access {
    let at = |b: &BufferRef| CpuBuffer::of(&**b, owner, "").ok().map(CpuBuffer::at);
    let all = |buffers: &[BufferRef]| buffers.iter().map_while(at).collect::<SmallVec<[Ptr; 16]>>();
    match c {
        Command::Launch { program, buffers, .. } => {
            program_of(program).map_or_else(|_| Access::default(), |p| of_program(p, &all(buffers)))
        }
        Command::Library { kernel, buffers, .. } => {
            kernel_of(&***kernel).map_or_else(|_| Access::default(), |k| of_kernel(k, &all(buffers)))
        }
        Command::Copy { src, src_offset, dst, dst_offset, bytes } => match (at(src), at(dst)) {
            (Some(s), Some(d)) => of_copy(&s.part(*src_offset, *bytes), &d.part(*dst_offset, *bytes)),
            _ => Access::default(),
        },
    }
}

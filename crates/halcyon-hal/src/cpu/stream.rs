//! Streams of the CPU device. Each stream has a thread and a team of its own; the tracker orders conflicting
//! work.

use super::device::{Execution, check_range, check_writable, kernel_of, program_of};
use super::library::CpuKernel;
use super::memory::{CpuBuffer, HostSource, Keep, Ptr};
use super::program::CpuProgram;
use super::sys::Isa;
use super::team::Team;
use crate::hazard::{Access, Ledger, Spans};
use crate::pool::WeakBlock;
use crate::stream::{self, Report};
use crate::{
    BufferRef, Command, Counts, Download, Error, Event, LibraryKernel, Program, Result, Stream, StreamOptions,
};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Work items that may wait in one stream. A caller that submits more blocks until there is room.
const MANY: usize = 1024;

/// Number of the device's own queue in the ledger; streams have larger numbers.
const OWN: u64 = 0;

/// A poisoned range: failed work was to write it. Stored as a range of a block, because the block may be
/// moved.
#[derive(Debug)]
struct Spoiled {
    of: WeakBlock<HostSource>,
    offset: usize,
    bytes: usize,
    error: Error,
}

impl Spoiled {
    /// The range's current addresses; `None` once the block has been freed.
    fn span(&self) -> Option<(usize, usize)> {
        let start = self.of.upgrade()?.place().get() as usize + self.offset;
        Some((start, start + self.bytes))
    }
}

#[derive(Debug, Default)]
struct Traffic {
    ledger: Ledger<()>,
    spoiled: Vec<Spoiled>,
}

/// Orders the work of a device's queues. While there are no streams, the device lock alone does that.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    state: Mutex<Traffic>,
    changed: Condvar,
    streams: AtomicUsize,
    queues: AtomicU64,
}

/// Calls its argument with the memory that each of several commands uses, in order. Every `Access` is
/// settled.
type Each<'a> = &'a dyn Fn(&mut dyn FnMut(&Access));

impl Tracker {
    fn lock(&self) -> MutexGuard<'_, Traffic> {
        // No update leaves the state half-written, so a panic elsewhere does not damage it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there are no streams. If so, none is created while the device lock is held.
    pub(super) fn is_quiet(&self) -> bool {
        self.streams.load(Ordering::Acquire) == 0
    }

    /// Registers work of a queue. Returns its ticket and the tickets it has to wait for.
    fn enter(&self, queue: u64, access: Access) -> (u64, SmallVec<[u64; 4]>) {
        let mut s = self.lock();
        let before = s.ledger.before(queue, &access).map(|e| e.ticket()).collect();
        (s.ledger.enter(queue, access, ()), before)
    }

    /// Waits until all work in `before` has ended. Returns the error of poisoned memory that the work would
    /// read.
    fn admit(&self, before: &[u64], each: Each<'_>) -> Result<()> {
        let mut s = self.lock();
        while before.iter().any(|t| s.ledger.is_open(*t)) {
            s = self.changed.wait(s).unwrap_or_else(PoisonError::into_inner);
        }
        s.spoiled.retain(|x| x.of.is_held());
        if s.spoiled.is_empty() {
            return Ok(());
        }
        let spoiled: Vec<_> = s.spoiled.iter().filter_map(|x| Some((x.span()?, &x.error))).collect();
        let (mut written, mut found) = (Spans::default(), None);
        each(&mut |a| {
            let hit = spoiled.iter().find(|(span, _)| {
                // Poisoned memory that the work itself has written before is valid again.
                let reads = a.reads.iter().map(|r| (r.0.max(span.0), r.1.min(span.1)));
                reads.filter(|r| r.0 < r.1).any(|r| !written.covers(r.0, r.1))
            });
            found = found.take().or_else(|| hit.map(|(_, e)| (*e).clone()));
            a.writes.iter().for_each(|w| written.add(w.0, w.1 - w.0));
            written.settle();
        });
        found.map_or(Ok(()), Err)
    }

    /// Removes finished work and updates the poisoned ranges.
    fn leave(&self, ticket: u64, end: End<'_>) {
        let mut s = self.lock();
        let Some(entry) = s.ledger.leave(ticket) else { return };
        let writes = &entry.access().writes;
        if !matches!(end, End::Refused) {
            // Memory that has been written again is no longer poisoned.
            for x in std::mem::take(&mut s.spoiled) {
                let Some(span) = x.span() else { continue };
                let left = writes.without(span);
                s.spoiled.extend(left.into_iter().map(|(from, end)| Spoiled {
                    of: x.of.clone(),
                    offset: x.offset + (from - span.0),
                    bytes: end - from,
                    error: x.error.clone(),
                }));
            }
        }
        if let End::Failed(error, keep) = end {
            for span in writes.iter() {
                s.spoiled.extend(keep.iter().filter_map(|k| k.spoiled(span, error)));
            }
        }
        drop(s);
        self.changed.notify_all();
    }

    /// Runs work of the device's own queue after the work that it conflicts with has ended. The caller holds
    /// the device lock.
    pub(super) fn pass<R>(&self, each: Each<'_>, f: impl FnOnce() -> Result<R>) -> Result<R> {
        if self.is_quiet() {
            return f();
        }
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

/// How a piece of work ended.
enum End<'a> {
    Done,
    /// It failed after its submission returned; it may have written part of its outputs.
    Failed(&'a Error, &'a [Keep]),
    /// It failed, and its caller received the error.
    Refused,
}

/// Removes work of the device's own queue from the ledger when dropped. The flag says whether it succeeded.
struct Left<'a>(&'a Tracker, u64, bool);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1, if self.2 { End::Done } else { End::Refused });
    }
}

fn union(each: Each<'_>) -> Access {
    let mut all = Access::default();
    each(&mut |a| {
        a.reads.iter().for_each(|r| all.reads.add(r.0, r.1 - r.0));
        a.writes.iter().for_each(|w| all.writes.add(w.0, w.1 - w.0));
    });
    all.settle();
    all
}

impl Keep {
    /// The part of this memory that becomes poisoned when work that writes `span` fails.
    fn spoiled(&self, span: (usize, usize), error: &Error) -> Option<Spoiled> {
        let Keep::Pooled(p) = self else { return None };
        let (block, start) = (p.block(), p.block().place().get() as usize);
        let (from, end) = (span.0.max(start), span.1.min(start + block.bytes()));
        (from < end).then(|| Spoiled {
            of: block.downgrade(),
            offset: from - start,
            bytes: end - from,
            error: error.clone(),
        })
    }
}

/// The memory that a kernel with these buffers accesses.
fn of_kernel(k: &CpuKernel, at: &[Ptr]) -> Access {
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
    a.settle();
    a
}

fn of_program(p: &CpuProgram, at: &[Ptr]) -> Access {
    let mut a = Access::default();
    for (p, writes) in at.iter().zip(&p.writes) {
        if *writes { &mut a.writes } else { &mut a.reads }.add(p.ptr as usize, p.bytes);
    }
    a.settle();
    a
}

/// Reads one range and writes another.
pub(crate) fn of_copy(src: &Ptr, dst: &Ptr) -> Access {
    let mut a = reading(src);
    a.writes.add(dst.ptr as usize, dst.bytes);
    a
}

/// Reads a range.
pub(crate) fn reading(p: &Ptr) -> Access {
    let mut a = Access::default();
    a.reads.add(p.ptr as usize, p.bytes);
    a
}

/// Writes a range.
pub(crate) fn writing(p: &Ptr) -> Access {
    let mut a = Access::default();
    a.writes.add(p.ptr as usize, p.bytes);
    a
}

/// The memory that a command of the device's own queue accesses. Invalid commands are reported when they run.
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
            (Some(s), Some(d)) => of_copy(&sub(&s, *src_offset, *bytes), &sub(&d, *dst_offset, *bytes)),
            _ => Access::default(),
        },
    }
}

/// A range of a buffer. Neither checks the range nor dereferences the pointer.
pub(crate) fn sub(p: &Ptr, offset: usize, bytes: usize) -> Ptr {
    Ptr { ptr: p.ptr.wrapping_add(offset), bytes, read_only: p.read_only }
}

/// A command that owns its data, with the addresses of its buffers looked up.
enum Step {
    Launch {
        program: Arc<dyn Program>,
        groups: [u32; 3],
        at: SmallVec<[Ptr; 8]>,
        params: SmallVec<[Scalar; 8]>,
        fault: u32,
    },
    Library {
        kernel: Arc<dyn LibraryKernel>,
        at: SmallVec<[Ptr; 8]>,
        args: SmallVec<[Scalar; 4]>,
        fault: u32,
    },
    Copy {
        src: Ptr,
        dst: Ptr,
    },
    Write {
        src: Arc<dyn Bytes>,
        dst: Ptr,
    },
    Read {
        src: Ptr,
        dst: Arc<Mutex<Vec<u8>>>,
    },
}

impl Step {
    fn access(&self) -> Access {
        match self {
            Step::Launch { program, at, .. } => {
                program_of(program).map_or_else(|_| Access::default(), |p| of_program(p, at))
            }
            Step::Library { kernel, at, .. } => {
                kernel_of(&**kernel).map_or_else(|_| Access::default(), |k| of_kernel(k, at))
            }
            Step::Copy { src, dst } => of_copy(src, dst),
            Step::Write { dst, .. } => writing(dst),
            Step::Read { src, .. } => reading(src),
        }
    }

    fn run(&self, on: &Execution<'_>) -> Result<()> {
        match self {
            Step::Launch { program, groups, at, params, fault } => {
                on.launch(program_of(program)?, *groups, at, params, *fault)
            }
            Step::Library { kernel, at, args, fault } => on.library(kernel_of(&**kernel)?, at, args, *fault),
            Step::Copy { src, dst } => {
                // SAFETY: `CpuStream::submit` checked both ranges and that `dst` is writable; the tracker
                // gives this step exclusive use of `dst`, and the step keeps both buffers alive.
                unsafe { on.copy(src, dst) };
                Ok(())
            }
            Step::Write { src, dst } => {
                // SAFETY: `CpuStream::write` checked that `dst` lies in its buffer and is writable, and the
                // tracker gives this step exclusive use of it. `src` is kept alive by the step; the length is
                // at most that of `src` and of `dst`.
                unsafe { on.write(src.bytes().as_ptr(), dst, src.bytes().len().min(dst.bytes)) };
                Ok(())
            }
            Step::Read { src, dst } => {
                let mut to = dst.lock().unwrap_or_else(PoisonError::into_inner);
                let n = to.len().min(src.bytes);
                // SAFETY: `CpuStream::read` checked the range; the tracker keeps writers out, and the step
                // keeps the buffer alive.
                unsafe { on.read(src, &mut to[..n]) };
                Ok(())
            }
        }
    }
}

/// Steps that were submitted together.
struct Job {
    steps: Vec<Step>,
    /// Keeps the memory of all steps alive and in place.
    keep: Vec<Keep>,
    ticket: u64,
    before: SmallVec<[u64; 4]>,
    report: Arc<Report>,
}

enum Item {
    Job(Job),
    Wait(Event),
    Done(Event),
}

struct Queue {
    items: VecDeque<Item>,
    /// Report of the work after the last event.
    report: Arc<Report>,
    closed: bool,
}

/// State shared by the stream and its thread.
struct Shared {
    id: String,
    /// Number of the device instance.
    owner: u64,
    /// Its number in the tracker.
    number: u64,
    queue: Mutex<Queue>,
    ready: Condvar,
    room: Condvar,
    tracker: Arc<Tracker>,
    counts: Arc<Counts>,
    isa: Isa,
    team: Team,
    threads: usize,
}

/// A stream of the CPU device.
pub(crate) struct CpuStream {
    shared: Arc<Shared>,
    /// Only if no thread could be started: locked while the caller runs the work itself.
    inline: Option<Mutex<()>>,
}

impl fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuStream({}, {} threads)", self.shared.id, self.shared.threads)
    }
}

fn message(p: &(dyn std::any::Any + Send)) -> &str {
    p.downcast_ref::<&str>()
        .copied()
        .or_else(|| p.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("?")
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, job: Job) {
        let Job { steps, keep, ticket, before, report } = job;
        let each = |f: &mut dyn FnMut(&Access)| steps.iter().for_each(|s| f(&s.access()));
        let ran = self.tracker.admit(&before, &each).and_then(|()| {
            let begin = stream::now();
            let on =
                Execution { team: &self.team, isa: self.isa, counts: &self.counts, fault: report.fault() };
            let r = catch_unwind(AssertUnwindSafe(|| steps.iter().try_for_each(|s| s.run(&on))));
            report.ran(begin, stream::now());
            r.unwrap_or_else(|p| {
                Err(Error::internal(format!(
                    "a kernel panicked in a stream of {}: {}",
                    self.id,
                    message(&*p)
                )))
            })
        });
        // Report the error before other queues may use the memory.
        if let Err(e) = &ran {
            report.fail(e.clone());
        }
        self.tracker.leave(ticket, ran.as_ref().map_or_else(|e| End::Failed(e, &keep), |()| End::Done));
    }

    fn item(&self, i: Item) {
        match i {
            Item::Job(j) => self.perform(j),
            // A failure of that event is reported by its own queue.
            Item::Wait(e) => drop(e.wait()),
            Item::Done(e) => e.complete(),
        }
    }

    /// Main loop of the stream's thread.
    fn serve(&self) {
        loop {
            let mut q = self.lock();
            let item = loop {
                match q.items.pop_front() {
                    Some(i) => break i,
                    None if q.closed => {
                        self.tracker.streams.fetch_sub(1, Ordering::AcqRel);
                        return;
                    }
                    None => q = self.ready.wait(q).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(q);
            self.room.notify_one();
            self.item(item);
        }
    }
}

impl CpuStream {
    /// A stream with the number of threads that `options` asks for (default: half of `width`, the threads of
    /// the device, for which kernels are made). The caller holds the device lock, so that no unregistered
    /// work of the device's own queue is running.
    pub(super) fn new(
        id: &str,
        owner: u64,
        isa: Isa,
        width: usize,
        tracker: &Arc<Tracker>,
        counts: &Arc<Counts>,
        options: &StreamOptions,
    ) -> Result<CpuStream> {
        if options.threads == Some(0) {
            return Err(Error::argument("create_stream", "at least one thread is needed"));
        }
        let threads = options.threads.unwrap_or(width / 2).clamp(1, width);
        let number = tracker.queues.fetch_add(1, Ordering::Relaxed) + OWN + 1;
        let queue = Queue { items: VecDeque::new(), report: Arc::default(), closed: false };
        let shared = Arc::new(Shared {
            id: id.into(),
            owner,
            number,
            queue: Mutex::new(queue),
            ready: Condvar::new(),
            room: Condvar::new(),
            tracker: tracker.clone(),
            counts: counts.clone(),
            isa,
            team: Team::with_width(threads, width),
            threads,
        });
        tracker.streams.fetch_add(1, Ordering::AcqRel);
        let s = shared.clone();
        let thread =
            std::thread::Builder::new().name(format!("halcyon-stream-{number}")).spawn(move || s.serve());
        let inline = thread.err().map(|e| {
            tracing::debug!("no thread for a stream, whose work is run by who hands it over: {e}");
            Mutex::new(())
        });
        Ok(CpuStream { shared, inline })
    }

    fn places(&self) -> Places {
        Places { owner: self.shared.owner, keep: vec![] }
    }

    /// Appends the item that `make` creates to the queue, and blocks while the queue is full. Without a
    /// thread, runs it at once.
    fn push<R>(&self, make: impl FnOnce(&mut Queue) -> (Item, R)) -> R {
        let s = &*self.shared;
        if let Some(turn) = &self.inline {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let (item, r) = make(&mut s.lock());
            s.item(item);
            return r;
        }
        let mut q = s.lock();
        while q.items.len() >= MANY {
            q = s.room.wait(q).unwrap_or_else(PoisonError::into_inner);
        }
        // Take the ticket under the lock, so that tickets rise in queue order and work waits only for older
        // work.
        let (item, r) = make(&mut q);
        q.items.push_back(item);
        drop(q);
        s.ready.notify_one();
        r
    }

    fn job(&self, steps: Vec<Step>, mut keep: Vec<Keep>) {
        keep.sort_unstable_by_key(Keep::key);
        keep.dedup_by_key(|k| k.key());
        let access = union(&|f| steps.iter().for_each(|s| f(&s.access())));
        self.push(|q| {
            let (ticket, before) = self.shared.tracker.enter(self.shared.number, access);
            (Item::Job(Job { steps, keep, ticket, before, report: q.report.clone() }), ())
        });
    }
}

/// Looks up the addresses of buffers and keeps their memory alive and in place.
struct Places {
    owner: u64,
    keep: Vec<Keep>,
}

impl Places {
    fn of(&mut self, b: &BufferRef, what: &str) -> Result<Ptr> {
        let b = CpuBuffer::of(&**b, self.owner, what)?;
        // Pin the memory first; from then on it is not moved.
        self.keep.push(b.keep());
        Ok(b.at())
    }

    fn all(&mut self, buffers: &[BufferRef], what: &str) -> Result<SmallVec<[Ptr; 8]>> {
        buffers.iter().map(|b| self.of(b, what)).collect()
    }
}

fn bound(what: &str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::argument(what, format!("{got} buffers were bound, it has {want}")))
}

impl Stream for CpuStream {
    fn overlaps(&self) -> bool {
        self.inline.is_none()
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let (mut steps, mut places) = (Vec::with_capacity(commands.len()), self.places());
        for c in commands {
            steps.push(match c {
                Command::Launch { program, groups, buffers, params, fault } => {
                    let p = program_of(program)?;
                    bound(p.name(), buffers.len(), p.writes.len())?;
                    Step::Launch {
                        program: Arc::clone(program),
                        groups: *groups,
                        at: places.all(buffers, p.name())?,
                        params: SmallVec::from_slice(params),
                        fault: *fault,
                    }
                }
                Command::Library { kernel, buffers, args, fault } => {
                    let k = kernel_of(&***kernel)?;
                    bound(k.name(), buffers.len(), k.buffers())?;
                    Step::Library {
                        kernel: Arc::clone(kernel),
                        at: places.all(buffers, k.name())?,
                        args: SmallVec::from_slice(args),
                        fault: *fault,
                    }
                }
                Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                    let (s, d) = (places.of(src, "copy")?, places.of(dst, "copy")?);
                    let same = std::ptr::eq(s.ptr, d.ptr);
                    crate::validate::copy([s.bytes, *src_offset], [d.bytes, *dst_offset], *bytes, same)?;
                    check_writable("copy", &d)?;
                    Step::Copy { src: sub(&s, *src_offset, *bytes), dst: sub(&d, *dst_offset, *bytes) }
                }
            });
        }
        if !steps.is_empty() {
            self.job(steps, places.keep);
        }
        Ok(())
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let mut places = self.places();
        let d = places.of(dst, "write")?;
        let n = src.bytes().len();
        check_range("write", &d, offset, n)?;
        check_writable("write", &d)?;
        self.job(vec![Step::Write { src, dst: sub(&d, offset, n) }], places.keep);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        let mut places = self.places();
        let s = places.of(src, "read")?;
        check_range("read", &s, offset, bytes)?;
        let to = Arc::new(Mutex::new(halcyon_host::zeros(bytes, "a copy to the host")?));
        self.job(vec![Step::Read { src: sub(&s, offset, bytes), dst: to.clone() }], places.keep);
        Ok(Download::new(self.record()?, to))
    }

    fn record(&self) -> Result<Event> {
        Ok(self.push(|q| {
            let event = Event::new(std::mem::take(&mut q.report), None);
            (Item::Done(event.clone()), event)
        }))
    }

    fn wait(&self, event: &Event) -> Result<()> {
        if !event.is_done() {
            self.push(|_| (Item::Wait(event.clone()), ()));
        }
        Ok(())
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        if self.inline.is_some() {
            self.shared.tracker.streams.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        self.shared.lock().closed = true;
        self.shared.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::CpuDevice;
    use super::*;
    use crate::library_call::CallForm;
    use crate::{Device, LibraryCall, Operand, Options, Tag};
    use halcyon_ir::DType;
    use halcyon_ir::layout::View;
    use halcyon_ir::ops::Op;
    use halcyon_ir::target::Work;
    use std::sync::atomic::AtomicBool;

    /// A kernel that calls `f`, then copies 64 bytes.
    fn kernel(name: &str, f: impl Fn() + Send + Sync + 'static) -> Arc<dyn LibraryKernel> {
        let op = Op::Full(Scalar::F(0.0));
        let one = Operand { dtype: DType::U8, view: View::dense(&[64]) };
        let (inputs, outputs) = ([one.clone()], [one]);
        let call = CallForm::plain(&LibraryCall::new(Work::Op(&op), &inputs, &outputs));
        let body = move |r: &super::super::library::Run<'_>| {
            f();
            // SAFETY: both operands have 64 bytes, which `CpuKernel::run` checks; the tracker keeps other
            // work out.
            unsafe { std::ptr::copy(r.bufs[0].ptr, r.bufs[1].ptr, 64) };
        };
        Arc::new(CpuKernel::new(name, &call, body).unwrap())
    }

    fn device() -> CpuDevice {
        CpuDevice::new(&Options { threads: Some(2), ..Options::default() }).unwrap()
    }

    fn filled(d: &CpuDevice, v: u8) -> BufferRef {
        let b = d.alloc(64, Tag::Io).unwrap();
        d.write(&b, 0, &[v; 64]).unwrap();
        b
    }

    fn go<'a>(kernel: &'a Arc<dyn LibraryKernel>, buffers: &'a [BufferRef]) -> Command<'a> {
        Command::Library { kernel, buffers, args: &[], fault: 0 }
    }

    #[test]
    fn a_panic_is_an_error_at_the_event_and_spoils_what_was_to_be_written() {
        let d = device();
        let [s, t] = [0, 1].map(|_| d.create_stream(&StreamOptions::default()).unwrap());
        let (a, b, c) = (filled(&d, 1), filled(&d, 2), filled(&d, 3));
        let bad = kernel("bad", || panic!("at the wrong moment"));
        let good = kernel("good", || ());
        s.submit(&[go(&bad, &[a.clone(), b.clone()])]).unwrap();
        // Work of the other stream fails too, whether it is submitted before or after the failure is known.
        t.submit(&[go(&good, &[b.clone(), c.clone()])]).unwrap();
        for e in [s.synchronize(), t.synchronize()] {
            let e = e.unwrap_err().to_string();
            assert!(e.contains("at the wrong moment") && e.contains("cpu:0"), "{e}");
        }
        let mut got = [0; 64];
        for x in [&b, &c] {
            assert!(d.read(x, 0, &mut got).unwrap_err().to_string().contains("wrong moment"));
        }
        d.read(&a, 0, &mut got).unwrap();
        // Later events report nothing. Memory that is rewritten whole is valid; a partial write is not
        // enough.
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
        d.write(&b, 0, &[7; 8]).unwrap();
        assert!(d.read(&b, 0, &mut got).is_err());
        d.submit(&[go(&good, &[a.clone(), b.clone()]), go(&good, &[b.clone(), c.clone()])]).unwrap();
        d.read(&c, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        // Only the parts of a block that were not rewritten stay poisoned.
        let block = d.alloc(192, Tag::Activations).unwrap();
        let [p, q, r] = [0, 64, 128].map(|at| d.part(&block, at, 64).unwrap());
        s.submit(&[
            go(&bad, &[a.clone(), p.clone()]),
            go(&good, &[p.clone(), q.clone()]),
            go(&good, &[q.clone(), r.clone()]),
        ])
        .unwrap();
        s.submit(&[go(&good, &[r.clone(), p.clone()])]).unwrap();
        assert!(s.synchronize().is_err());
        s.submit(&[go(&good, &[a.clone(), q.clone()])]).unwrap();
        s.submit(&[go(&good, &[q.clone(), p.clone()])]).unwrap();
        assert_eq!(s.synchronize().unwrap(), None);
        d.read(&p, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        assert!(d.read(&r, 0, &mut got).is_err());
        // Once the buffer is freed, its memory is reused and is no longer poisoned.
        s.submit(&[go(&bad, &[a.clone(), b.clone()])]).unwrap();
        assert!(s.synchronize().is_err());
        let was = d.start_of(&b);
        drop(b);
        let again = filled(&d, 9);
        assert_eq!(d.start_of(&again), was);
        d.read(&again, 0, &mut got).unwrap();
        assert_eq!(got, [9; 64]);
    }

    /// Nothing would order the work of two device instances on one buffer.
    #[test]
    fn buffers_of_another_opening_are_refused() {
        let (d, e) = (device(), device());
        let (a, b) = (filled(&d, 1), filled(&e, 2));
        let refused = |r: Result<()>| assert!(r.unwrap_err().to_string().contains("another opening"));
        refused(d.submit(&[go(&kernel("k", || ()), &[a.clone(), b.clone()])]));
        refused(d.submit(&[Command::Copy { src: &b, src_offset: 0, dst: &a, dst_offset: 0, bytes: 1 }]));
        refused(d.read(&b, 0, &mut [0; 4]));
        refused(d.part(&b, 0, 8).map(drop));
        let s = d.create_stream(&StreamOptions::default()).unwrap();
        refused(s.submit(&[go(&kernel("k", || ()), &[b.clone(), a.clone()])]));
        refused(s.write(&b, 0, Arc::new(vec![0u8; 4])));
    }

    /// The first two kernels each end only after both have started.
    #[test]
    fn kernels_of_two_streams_run_at_one_time_unless_one_writes_what_the_other_uses() {
        let d = device();
        let [s, t] = [0, 1].map(|_| d.create_stream(&StreamOptions::default()).unwrap());
        let (a, b, c) = (filled(&d, 1), filled(&d, 2), filled(&d, 3));
        let flags = Arc::new([const { AtomicBool::new(false) }; 2]);
        let meet = |i: usize| {
            let f = flags.clone();
            kernel("meet", move || {
                f[i].store(true, Ordering::SeqCst);
                let start = std::time::Instant::now();
                while !f[1 - i].load(Ordering::SeqCst) {
                    assert!(start.elapsed().as_secs() < 900, "the other never began");
                    std::thread::yield_now();
                }
            })
        };
        // Both read `a`, so they overlap.
        s.submit(&[go(&meet(0), &[a.clone(), b.clone()])]).unwrap();
        t.submit(&[go(&meet(1), &[a.clone(), c.clone()])]).unwrap();
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
        // Here one writes what the next reads: they never overlap, and run in order.
        let (busy, rounds) = (Arc::new(AtomicBool::new(false)), 50);
        let alone = || {
            let busy = busy.clone();
            kernel("alone", move || {
                assert!(!busy.swap(true, Ordering::SeqCst), "two at a time");
                std::thread::sleep(std::time::Duration::from_micros(50));
                busy.store(false, Ordering::SeqCst);
            })
        };
        for i in 0..rounds {
            d.write(&a, 0, &[i; 64]).unwrap();
            s.submit(&[go(&alone(), &[a.clone(), b.clone()])]).unwrap();
            t.submit(&[go(&alone(), &[b.clone(), c.clone()])]).unwrap();
            d.submit(&[go(&alone(), &[c.clone(), a.clone()])]).unwrap();
            let mut got = [0; 64];
            d.read(&a, 0, &mut got).unwrap();
            assert_eq!(got, [i; 64]);
        }
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
    }

    #[test]
    fn a_stream_that_is_dropped_runs_on_and_the_device_is_quiet_again() {
        let d = device();
        let s = d.create_stream(&StreamOptions::default()).unwrap();
        let (a, b) = (filled(&d, 1), filled(&d, 2));
        let slow = kernel("slow", || std::thread::sleep(std::time::Duration::from_millis(20)));
        for _ in 0..3 {
            s.submit(&[go(&slow, &[a.clone(), b.clone()])]).unwrap();
        }
        let e = s.record().unwrap();
        drop((s, a));
        e.wait().unwrap();
        let mut got = [0; 64];
        d.read(&b, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        let start = std::time::Instant::now();
        while !d.is_quiet() {
            assert!(start.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
    }
}

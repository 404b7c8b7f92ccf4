//! The in-order queue of a device.

use super::device::Shared;
use super::memory::{Memory, SimtBuffer, SimtPages, SimtSource};
use super::program::{Function, SimtProgram};
use super::sys::{self, Address, Context, GraphFunctions, Handle, Peers};
use crate::commands::{Actions, DeviceInstance};
use crate::pool::{Defragmented, Pool, Relocation};
use crate::queues::{Fenced, Mark};
use crate::validate::Argument;
use crate::{BufferRef, Counts, Error, LibraryKernel, Result, Timing};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

/// When this number of timings is pending, they are converted to times, or (for a stream) reduced to the
/// first and the last.
const MAX_PENDING_EVENTS: usize = 4096;
/// Size in bytes of the staging buffer for moves whose ranges overlap.
const STAGING_BYTES: usize = 4 << 20;

/// Destroys an event, from any thread.
///
/// # Safety
/// `raw` must be an event of this context, which nothing uses afterwards.
unsafe fn forget_event(context: &Context, raw: Handle) {
    let code = match context.visit() {
        // SAFETY: `forget_event` requires a live event. CUDA or HIP defers the destruction while work uses
        // the event.
        Ok(_visit) => unsafe { (context.api.f.event_destroy)(raw) },
        Err(e) => return tracing::warn!(device = context.id, "an event could not be destroyed: {e}"),
    };
    if code != sys::SUCCESS {
        let code = sys::code_name(context.api.family, code);
        tracing::warn!(device = context.id, %code, "an event could not be destroyed");
    }
}

/// An event that other queues or the host wait for.
#[derive(Debug)]
pub(super) struct Point {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: `raw` is an opaque handle of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Point {}
// SAFETY: `raw` is never modified, and the event functions of CUDA and HIP are thread-safe.
unsafe impl Sync for Point {}

impl Mark for Point {
    fn is_done(&self) -> bool {
        // SAFETY: `self` owns the event, so it is live. Any result other than `NOT_READY` is final.
        self.context.enter().is_err()
            || unsafe { (self.context.api.f.event_query)(self.raw) } != sys::NOT_READY
    }

    fn wait(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: `self` owns the event, so it is live.
        self.context.check("waiting for an event", unsafe { (self.context.api.f.event_wait)(self.raw) })
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // SAFETY: `self` created the event in this context and is its only owner.
        unsafe { forget_event(&self.context, self.raw) };
    }
}

impl Fenced for Queue {
    type Mark = Point;

    fn wait_for_marks(&self, marks: &[Arc<Point>]) -> Result<()> {
        for m in marks {
            // SAFETY: `self` owns the stream and `m` the event; no flags are defined.
            let code = unsafe { (self.context.api.f.stream_behind)(self.raw, m.raw, 0) };
            self.check("ordering two streams", code)?;
        }
        Ok(())
    }

    fn mark(&self) -> Result<Point> {
        let f = &self.context.api.f;
        let mut raw: Handle = std::ptr::null_mut();
        // SAFETY: CUDA or HIP writes one handle to `raw`.
        self.check("creating an event", unsafe { (f.event_create)(&mut raw, sys::DISABLE_TIMING) })?;
        let point = Point { context: self.context.clone(), raw };
        // SAFETY: `point` owns the event and `self` the stream.
        self.check("recording an event", unsafe { (f.event_record)(raw, self.raw) })?;
        Ok(point)
    }

    fn finish(&self) -> Result<()> {
        Queue::finish(self)
    }
}

/// An event with a time stamp.
#[derive(Debug)]
pub(super) struct Stamp {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: `raw` is an opaque handle of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Stamp {}
// SAFETY: `raw` is never modified, and the event functions of CUDA and HIP are thread-safe.
unsafe impl Sync for Stamp {}

impl Stamp {
    /// Records an event after all commands that the queue holds so far.
    fn new(queue: &Queue) -> Result<Stamp> {
        let context = &queue.context;
        let mut raw: Handle = std::ptr::null_mut();
        // SAFETY: CUDA or HIP writes one handle to `raw`.
        context.check("creating an event", unsafe { (context.api.f.event_create)(&mut raw, 0) })?;
        let stamp = Stamp { context: context.clone(), raw };
        // SAFETY: `stamp` owns the event and `queue` the stream.
        context.check("recording an event", unsafe { (context.api.f.event_record)(raw, queue.raw) })?;
        Ok(stamp)
    }

    /// Nanoseconds since an earlier stamp. Both must have been reached.
    pub(super) fn since(&self, begin: &Stamp) -> Result<u64> {
        let mut ms = 0f32;
        // SAFETY: CUDA or HIP writes one number to `ms`; both stamps own their events.
        let code = unsafe { (self.context.api.f.event_elapsed)(&mut ms, begin.raw, self.raw) };
        self.context.check("querying the time of a command", code)?;
        Ok((ms.max(0.0) as f64 * 1e6) as u64)
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        // SAFETY: `self` created the event in this context and is its only owner.
        unsafe { forget_event(&self.context, self.raw) };
    }
}

#[derive(Debug, Default)]
struct State {
    done: Vec<Timing>,
    /// Start and end of timed commands; `None` for commands without work.
    stamps: Vec<Option<(Stamp, Stamp)>>,
    /// Whether a kernel that can fault was enqueued since the fault word was last read.
    may_have_faulted: bool,
}

/// One stream of CUDA or HIP, with its own fault word.
#[derive(Debug)]
pub(super) struct Queue {
    context: Arc<Context>,
    raw: Handle,
    fault: Memory,
    pool: Arc<Pool<SimtSource>>,
    counts: Arc<Counts>,
    profile: bool,
    /// Whether the queue belongs to a stream. The commands of a stream are timed together.
    spans: bool,
    state: Mutex<State>,
}

// SAFETY: `raw` is an opaque handle of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Queue {}
// SAFETY: the stream functions of CUDA and HIP are thread-safe; the mutable state is behind a mutex.
unsafe impl Sync for Queue {}

/// Enqueues a list of commands. Holds the queue's lock.
#[derive(Debug)]
pub(super) struct Submission<'a> {
    queue: &'a Queue,
    state: MutexGuard<'a, State>,
}

impl Queue {
    pub(super) fn new(
        context: &Arc<Context>,
        pool: Arc<Pool<SimtSource>>,
        counts: Arc<Counts>,
        profile: bool,
        spans: bool,
    ) -> Result<Queue> {
        let fault = Memory::new(context, 4).map_err(|what| Error::Driver {
            device: context.id.clone(),
            call: "allocating four bytes".into(),
            code: what,
            next: "Free memory on the device, or choose another one".into(),
        })?;
        let mut raw: Handle = std::ptr::null_mut();
        // SAFETY: CUDA or HIP writes one handle to `raw`.
        let code = unsafe { (context.api.f.stream_create)(&mut raw, sys::NON_BLOCKING) };
        context.check("creating a stream", code)?;
        let state = Mutex::default();
        let q = Queue { context: context.clone(), raw, fault, pool, counts, profile, spans, state };
        // SAFETY: `q.fault` is an allocation of four bytes, and `raw` the stream created above.
        let code = unsafe { (context.api.f.fill)(q.fault.at(), 0, 4, raw) };
        context.check("clearing the fault word", code)?;
        Ok(q)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn check(&self, call: &str, code: i32) -> Result<()> {
        self.context.check(call, code)
    }

    /// The stream.
    pub(super) fn raw(&self) -> Handle {
        self.raw
    }

    /// Address of the fault word of this queue's kernels.
    pub(super) fn fault_at(&self) -> Address {
        self.fault.at()
    }

    /// The counters of commands in this queue.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Whether the queue's commands are timed.
    pub(super) fn profiles(&self) -> bool {
        self.profile
    }

    /// Waits for an event. The thread must have entered the context.
    pub(super) fn wait_for(&self, point: &Point) -> Result<()> {
        // SAFETY: `point` owns the event, so it is live.
        self.check("waiting for an event", unsafe { (self.context.api.f.event_wait)(point.raw) })
    }

    /// Records an event again, after all commands enqueued so far.
    pub(super) fn mark_again(&self, point: &Point) -> Result<()> {
        // SAFETY: `point` owns the event and `self` the stream.
        self.check("recording an event", unsafe { (self.context.api.f.event_record)(point.raw, self.raw) })
    }

    /// Waits for all enqueued commands.
    pub(super) fn finish(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: `self` owns the stream, so it is live.
        self.check("waiting for the stream", unsafe { (self.context.api.f.stream_wait)(self.raw) })
    }

    /// Copies host bytes to a validated range, after all submitted work.
    ///
    /// # Safety
    /// `dst` must be a buffer of this queue's device, and `offset + src.len()` must not exceed its size.
    pub(super) unsafe fn write(&self, dst: &SimtBuffer, offset: usize, src: &[u8]) -> Result<()> {
        let _state = self.lock();
        self.context.enter()?;
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: `write` requires a range inside of the buffer, which is not moved while the lock is held.
        unsafe { self.write_raw(dst.address() + offset as u64, src) }
    }

    /// # Safety
    /// The `src.len()` bytes at `to` must lie in a live allocation of this queue's device.
    unsafe fn write_raw(&self, to: Address, src: &[u8]) -> Result<()> {
        // SAFETY: `write_raw` requires `src.len()` bytes at `to`; `finish` below waits for the copy before
        // the borrow of `src` ends.
        let code = unsafe { (self.context.api.f.write)(to, src.as_ptr().cast(), src.len(), self.raw) };
        let copied = self.check("copying to the device", code);
        self.finish()?;
        copied
    }

    /// Copies a validated range to the host, after all submitted work.
    ///
    /// # Safety
    /// `src` must be a buffer of this queue's device, and `offset + dst.len()` must not exceed its size.
    pub(super) unsafe fn read(&self, src: &SimtBuffer, offset: usize, dst: &mut [u8]) -> Result<()> {
        let _state = self.lock();
        self.context.enter()?;
        if dst.is_empty() {
            return self.finish();
        }
        // SAFETY: `read` requires a range inside of the buffer, which is not moved while the lock is held.
        unsafe { self.read_raw(src.address() + offset as u64, dst) }
    }

    /// # Safety
    /// The `dst.len()` bytes at `from` must lie in a live allocation of this queue's device.
    unsafe fn read_raw(&self, from: Address, dst: &mut [u8]) -> Result<()> {
        // SAFETY: `read_raw` requires `dst.len()` bytes at `from`; `finish` below waits for the copy before
        // the borrow of `dst` ends.
        let code = unsafe { (self.context.api.f.read)(dst.as_mut_ptr().cast(), from, dst.len(), self.raw) };
        let copied = self.check("copying from the device", code);
        self.finish()?;
        copied
    }

    /// Waits for all commands, then moves the pool's buffers together.
    ///
    /// # Safety
    /// No other queue may have pending work that uses buffers of the pool, and none may enqueue any during
    /// the call.
    pub(super) unsafe fn defragment(&self) -> Result<Defragmented> {
        let _state = self.lock();
        self.finish()?;
        let mut detour = None;
        let did = self.pool.defragment(&mut |m| self.relocate(&mut detour, &m));
        self.finish()?;
        did
    }

    /// Performs one move. The pool's lock is held, so error paths must not query the pool.
    fn relocate(&self, detour: &mut Option<Memory>, m: &Relocation<'_, Memory>) -> Result<()> {
        let copy = |from: Address, to: Address, bytes: usize| {
            // SAFETY: both ranges of `bytes` bytes lie in live allocations. The pool computes the moves, so
            // their ranges lie in its allocations; the other ranges lie in `room`. The code below checks that
            // they do not overlap.
            self.check("moving a buffer", unsafe { (self.context.api.f.copy)(to, from, bytes, self.raw) })
        };
        let (from, to) = (m.from.0.at() + m.from.1 as u64, m.to.0.at() + m.to.1 as u64);
        if !m.overlaps() {
            return copy(from, to, m.bytes);
        }
        let room = match detour {
            Some(d) => d,
            None => {
                detour.insert(Memory::new(&self.context, STAGING_BYTES).map_err(|code| Error::Driver {
                    device: self.context.id.clone(),
                    call: "allocating room to move buffers".into(),
                    code,
                    next: "Free memory on the device".into(),
                })?)
            }
        };
        // Moves go to lower addresses, so each part is read before it is overwritten.
        for at in (0..m.bytes).step_by(STAGING_BYTES) {
            let n = STAGING_BYTES.min(m.bytes - at);
            copy(from + at as u64, room.at(), n)?;
            copy(room.at(), to + at as u64, n)?;
        }
        Ok(())
    }

    /// A time stamp after all commands enqueued so far.
    pub(super) fn stamp(&self) -> Result<Stamp> {
        self.context.enter()?;
        Stamp::new(self)
    }

    /// Fills a buffer with a byte.
    ///
    /// # Safety
    /// `b` must be a buffer of this queue's device, and nothing else may use it until the work is done.
    pub(super) unsafe fn fill(&self, b: &SimtBuffer, byte: u8) -> Result<()> {
        let _state = self.lock();
        self.context.enter()?;
        let (at, bytes) = (b.address(), crate::Buffer::bytes(b));
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the buffer has `bytes` bytes at this address, which nothing else uses.
        self.check("filling memory", unsafe { (self.context.api.f.fill)(at, byte, bytes, self.raw) })
    }

    /// Start and end of the commands that were timed since the last call.
    pub(super) fn take_stamps(&self) -> Vec<(Stamp, Stamp)> {
        std::mem::take(&mut self.lock().stamps).into_iter().flatten().collect()
    }

    /// Enqueues a copy to a validated range.
    ///
    /// # Safety
    /// `dst` must be a buffer of this queue's device, and `offset + bytes` must not exceed its size. The
    /// `bytes` bytes at `src` must stay valid and unchanged until the copy is done.
    pub(super) unsafe fn write_later(
        &self,
        dst: &SimtBuffer,
        offset: usize,
        src: *const c_void,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the range lies inside of the buffer, and `src` holds `bytes` bytes until the copy is done,
        // as `write_later` requires.
        unsafe { self.write_raw_later(dst.address() + offset as u64, src, bytes) }
    }

    /// Enqueues a copy to an address.
    ///
    /// # Safety
    /// The `bytes` bytes at `to` must lie in a live allocation of this queue's device. The `bytes` bytes at
    /// `src` must stay valid and unchanged until the copy is done.
    pub(super) unsafe fn write_raw_later(&self, to: Address, src: *const c_void, bytes: usize) -> Result<()> {
        // SAFETY: `write_raw_later` requires valid source and destination ranges of `bytes` bytes until the
        // copy is done.
        self.check("copying to the device", unsafe { (self.context.api.f.write)(to, src, bytes, self.raw) })
    }

    /// Enqueues a copy of a validated range to the host.
    ///
    /// # Safety
    /// `src` must be a buffer of this queue's device, and `offset + bytes` must not exceed its size. The
    /// `bytes` bytes at `dst` must stay valid, and nothing else may access them, until the copy is done.
    pub(super) unsafe fn read_later(
        &self,
        src: &SimtBuffer,
        offset: usize,
        dst: *mut c_void,
        bytes: usize,
    ) -> Result<()> {
        let from = src.address() + offset as u64;
        // SAFETY: `read_later` requires that the source range lies inside of the buffer and that `dst` has
        // `bytes` exclusive bytes until the copy is done.
        self.check("copying from the device", unsafe {
            (self.context.api.f.read)(dst, from, bytes, self.raw)
        })
    }

    /// Whether a kernel that can fault was enqueued since the fault word was last read.
    pub(super) fn may_have_faulted(&self) -> bool {
        self.lock().may_have_faulted
    }

    /// Enqueues a copy of the fault word to host pages, then clears the word.
    ///
    /// # Safety
    /// `to` must have at least four bytes and live until the copy is done, and nothing else may access its
    /// first four bytes until then.
    pub(super) unsafe fn move_fault(&self, to: &SimtPages) -> Result<()> {
        let f = &self.context.api.f;
        // SAFETY: the fault word has four bytes; `move_fault` requires that `to` has as many, which nothing
        // else uses until the copy is done.
        self.check("reading the fault word", unsafe { (f.read)(to.at(), self.fault.at(), 4, self.raw) })?;
        // SAFETY: `self.fault` is a live allocation of four bytes.
        self.check("clearing the fault word", unsafe { (f.fill)(self.fault.at(), 0, 4, self.raw) })?;
        self.lock().may_have_faulted = false;
        Ok(())
    }

    pub(super) fn begin(&self) -> Result<Submission<'_>> {
        let state = self.lock();
        self.context.enter()?;
        Ok(Submission { queue: self, state })
    }

    /// Waits, then returns and clears the fault word.
    pub(super) fn take_fault(&self) -> Result<Option<u32>> {
        let mut s = self.lock();
        self.finish()?;
        if !s.may_have_faulted {
            return Ok(None);
        }
        let mut word = [0; 4];
        // SAFETY: the fault word is a live allocation of four bytes.
        unsafe { self.read_raw(self.fault.at(), &mut word)? };
        let id = u32::from_ne_bytes(word);
        if id != 0 {
            // SAFETY: the fault word is a live allocation of four bytes.
            unsafe { self.write_raw(self.fault.at(), &0u32.to_ne_bytes())? };
        }
        s.may_have_faulted = false;
        Ok((id != 0).then_some(id))
    }

    /// Waits, then returns the times of all commands since the last call.
    pub(super) fn take_timings(&self) -> Result<Vec<Timing>> {
        let mut s = self.lock();
        self.convert_times(&mut s)?;
        Ok(std::mem::take(&mut s.done))
    }

    /// Converts stamps to times.
    fn convert_times(&self, s: &mut State) -> Result<()> {
        if s.stamps.is_empty() {
            return Ok(());
        }
        self.finish()?;
        for pair in std::mem::take(&mut s.stamps) {
            let nanoseconds = pair.map_or(Ok(0), |(begin, end)| end.since(&begin))?;
            s.done.push(Timing { nanoseconds });
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _visit = match self.context.visit() {
            Ok(visit) => visit,
            Err(e) => {
                return tracing::warn!(device = self.context.id, "a stream could not be destroyed: {e}");
            }
        };
        if let Err(e) = self.finish() {
            tracing::warn!(device = self.context.id, "the last commands of a queue failed: {e}");
        }
        // SAFETY: `self` created the stream and destroys it once; `finish` above waited for its work.
        let code = unsafe { (self.context.api.f.stream_destroy)(self.raw) };
        if code != sys::SUCCESS {
            let code = sys::code_name(self.context.api.family, code);
            tracing::warn!(device = self.context.id, %code, "a stream could not be destroyed");
        }
    }
}

impl Submission<'_> {
    /// Enqueues one command, timed if the device is profiled.
    fn timed(&mut self, f: impl FnOnce(&Queue) -> Result<()>) -> Result<()> {
        let q = self.queue;
        if !q.profile {
            return f(q);
        }
        let begin = Stamp::new(q)?;
        f(q)?;
        let end = Stamp::new(q)?;
        self.note(Some((begin, end)))
    }

    fn note(&mut self, stamps: Option<(Stamp, Stamp)>) -> Result<()> {
        if !self.queue.profile {
            return Ok(());
        }
        self.state.stamps.push(stamps);
        if self.state.stamps.len() >= MAX_PENDING_EVENTS {
            match self.queue.spans {
                // A stream reports only the start of its first and the end of its last command.
                true => {
                    let mut all = std::mem::take(&mut self.state.stamps).into_iter().flatten();
                    let first = all.next();
                    let last = all.last();
                    self.state.stamps = first.into_iter().chain(last).map(Some).collect();
                }
                false => self.queue.convert_times(&mut self.state)?,
            }
        }
        Ok(())
    }

    /// Enqueues an entry point of a program with these words as its arguments.
    ///
    /// # Safety
    /// `function` must be an entry point of `p`, and both must belong to this queue's device. `words` must
    /// hold a value for each of its arguments. Each address among them must be of a live allocation that is
    /// as large as the kernel requires for the other arguments and `groups`.
    pub(super) unsafe fn launch_words(
        &mut self,
        p: &SimtProgram,
        function: &Function,
        groups: [u32; 3],
        mut words: SmallVec<[u64; 32]>,
    ) -> Result<()> {
        let mut pointers: SmallVec<[*mut c_void; 32]> =
            words.iter_mut().map(|w| std::ptr::from_mut(w).cast()).collect();
        self.timed(|q| {
            let ([x, y, z], [i, j, k]) = (groups, p.workgroup);
            // SAFETY: the function is loaded and gets as many arguments as it has, which `launch_words`
            // requires; none is larger than eight bytes, and CUDA or HIP copies them. The buffers stay
            // allocated: commands that reuse the memory of a freed one run after this launch.
            let code = unsafe {
                (q.context.api.f.launch)(
                    function.raw(),
                    x,
                    y,
                    z,
                    i,
                    j,
                    k,
                    0,
                    q.raw,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            if code != sys::SUCCESS {
                let call = format!("launching {} ({groups:?} groups of {:?})", p.signature.name, p.workgroup);
                q.check(&call, code)?;
            }
            Ok(())
        })
    }

    /// Copies between validated ranges, from another device to this one.
    ///
    /// # Safety
    /// `to` must be a buffer of this queue's device, and `src` a buffer of the device of `other`. For each,
    /// its offset plus `bytes` must not exceed its size. Until the copy has run, `src` must neither be moved
    /// nor reused.
    pub(super) unsafe fn copy_peer(
        &mut self,
        peers: Peers,
        to: (&SimtBuffer, usize),
        (other, src, offset): (&Context, &SimtBuffer, usize),
        bytes: usize,
    ) -> Result<()> {
        let (to, from) = (to.0.address() + to.1 as u64, src.address() + offset as u64);
        self.timed(|q| {
            // SAFETY: `copy_peer` requires ranges inside of live buffers of the two devices, and `q` owns the
            // stream.
            let code = unsafe { q.context.copy_peer(peers, to, (other, from), bytes, q.raw) };
            q.check("copying from another device", code)
        })
    }

    /// Enqueues a captured graph.
    ///
    /// # Safety
    /// `exec` must be a live graph that `graphs` instantiated. The graph and everything that it uses must
    /// stay live until it has run.
    pub(super) unsafe fn launch_graph(
        &mut self,
        graphs: &GraphFunctions,
        exec: Handle,
        faults: bool,
    ) -> Result<()> {
        // SAFETY: the queue owns the stream. `launch_graph` requires that `exec` and everything that it uses
        // are live until the graph has run.
        self.timed(|q| q.check("launching a graph", unsafe { (graphs.launch)(exec, q.raw) }))?;
        self.state.may_have_faulted |= faults;
        Ok(())
    }
}

impl Actions<Shared> for Submission<'_> {
    unsafe fn launch(
        &mut self,
        p: &SimtProgram,
        groups: [u32; 3],
        buffers: &[&SimtBuffer],
        arguments: &[Argument],
    ) -> Result<()> {
        if groups.contains(&0) {
            return self.note(None);
        }
        // An argument of a smaller type is read from the first bytes of its word.
        const { assert!(cfg!(target_endian = "little")) };
        let mut words: SmallVec<[u64; 32]> = buffers.iter().map(|b| b.address()).collect();
        if p.signature.faults {
            words.push(self.queue.fault.at());
        }
        words.extend(arguments.iter().map(|a| a.bits));
        // SAFETY: the words are those of the signature: the address of each buffer, that of the fault word if
        // the kernel declares it, and one word for each parameter. `launch` requires buffers of this device
        // that contain every byte that the kernel accesses.
        unsafe { self.launch_words(p, &p.function, groups, words)? };
        self.state.may_have_faulted |= p.signature.faults;
        Ok(())
    }

    unsafe fn copy(
        &mut self,
        src: (&SimtBuffer, usize),
        dst: (&SimtBuffer, usize),
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return self.note(None);
        }
        let (from, to) = (src.0.address() + src.1 as u64, dst.0.address() + dst.1 as u64);
        self.timed(|q| {
            // SAFETY: `copy` requires ranges inside of live buffers that do not overlap.
            let code = unsafe { (q.context.api.f.copy)(to, from, bytes, q.raw) };
            q.check("copying on the device", code)
        })
    }

    fn library(
        &mut self,
        device: &Shared,
        kernel: &Arc<dyn LibraryKernel>,
        buffers: &[BufferRef],
    ) -> Result<()> {
        let k = device.kernel(kernel)?;
        let own = |(i, b)| match k.writes(i) {
            true => device.writable(k.name(), b),
            false => device.buffer(k.name(), b),
        };
        let buffers = buffers.iter().enumerate().map(own).collect::<Result<SmallVec<[_; 6]>>>()?;
        k.check(&buffers)?;
        // SAFETY: `q` owns the stream. `kernel` and `buffer` checked the owners, and the buffers passed
        // `check` while this value holds the queue's lock, so they are not moved. They stay allocated,
        // because commands that reuse the memory of a freed buffer run after this call.
        self.timed(|q| unsafe { k.enqueue(q.raw, &buffers) })
    }
}

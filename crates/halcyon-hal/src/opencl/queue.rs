//! The in-order queues of a device: its own queue and those of its streams.

use super::adapter::Adapter;
use super::command_buffer::CommandBuffers;
use super::memory::{ClBuffer, ClSource, Memory};
use super::program::ClProgram;
use super::stream::Shared;
use super::sys::{
    self, Api, CommandBuffer, CommandQueue, Context, Event, Handle, Memory as MemoryObject, Owned,
};
use crate::commands::Actions;
use crate::pool::{Defragmented, Pool, Relocation};
use crate::validate::Argument;
use crate::{Error, Result, Timing};
use halcyon_ir::kernel::Ty;
use smallvec::SmallVec;
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, RwLock, Weak};

/// Once this many events are pending, their times are collected. In the queue of a stream, all events but the
/// first and the last are dropped instead.
const MAX_PENDING_EVENTS: usize = 4096;

#[derive(Debug, Default)]
struct State {
    done: Vec<Timing>,
    events: Vec<Option<Owned<Event>>>,
    /// Whether a kernel that can fault was enqueued since the fault word was last known to be 0.
    may_have_faulted: bool,
}

/// One in-order queue with its own fault word.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) api: &'static Api,
    raw: Arc<Owned<CommandQueue>>,
    fault: Owned<MemoryObject>,
    pub(super) id: Arc<str>,
    /// The pool whose statistics are reported in out-of-memory errors.
    pool: Arc<Pool<ClSource>>,
    profile: bool,
    /// Whether the queue belongs to a stream. The commands of a stream are timed together.
    spans: bool,
    /// Copies between host and device lock this for reading, so that several may run concurrently. Moving
    /// buffers locks it for writing, so that no buffer is moved during such a copy.
    moves: RwLock<()>,
    state: Mutex<State>,
    /// Tells captures whether the queue still exists.
    open: Arc<()>,
}

/// Size in bytes of the staging buffer for moves whose ranges overlap.
const STAGING_BYTES: usize = 1 << 20;

/// An event that completes when all commands enqueued so far have completed; the error is the code.
pub(super) fn marker(
    api: &'static Api,
    queue: &Owned<CommandQueue>,
) -> std::result::Result<Owned<Event>, i32> {
    let mut event: Handle = std::ptr::null_mut();
    // SAFETY: the queue is live. Without a wait list the marker waits for all earlier commands.
    let code = unsafe { (api.clEnqueueMarkerWithWaitList)(queue.raw(), 0, std::ptr::null(), &mut event) };
    // SAFETY: the call returned this event; `clReleaseEvent` releases it.
    unsafe { Owned::new(event, code, api.clReleaseEvent) }
}

/// The numbers of work-items of a launch.
///
/// # Errors
/// [`Error::Unsupported`] if a number is too large.
pub(super) fn grid(groups: [u32; 3], workgroup: [u32; 3]) -> Result<[usize; 3]> {
    let mut global = [0usize; 3];
    for d in 0..3 {
        global[d] = (groups[d] as usize).checked_mul(workgroup[d] as usize).ok_or_else(|| {
            let what = format!("a grid of {groups:?} groups of {workgroup:?}");
            Error::unsupported(what, "Use a smaller batch")
        })?;
    }
    Ok(global)
}

/// Calls `set` with the size of an argument and a pointer to it.
pub(super) fn with_argument<R>(a: &Argument, set: &mut impl FnMut(usize, *const c_void) -> R) -> R {
    match a.ty {
        Ty::I64 | Ty::U64 | Ty::F64 => set(8, (&raw const a.bits).cast()),
        _ => {
            let word = a.bits as u32;
            set(4, (&raw const word).cast())
        }
    }
}

/// Enqueues a list of commands. Holds the queue's lock.
#[derive(Debug)]
pub(super) struct Submission<'a> {
    queue: &'a Queue,
    state: MutexGuard<'a, State>,
}

impl Queue {
    pub(super) fn new(
        adapter: &Adapter,
        context: &Owned<Context>,
        id: &str,
        pool: Arc<Pool<ClSource>>,
        profile: bool,
        spans: bool,
    ) -> Result<Queue> {
        let (api, device) = (adapter.api, adapter.device);
        let fault =
            super::memory::buffer(api, context, 4).map_err(|c| sys::driver_error(id, "clCreateBuffer", c))?;
        let mut code = 0;
        let properties = if profile { sys::QUEUE_PROFILING_ENABLE } else { 0 };
        // SAFETY: the context is live, and `device` belongs to it.
        let raw = unsafe { (api.clCreateCommandQueue)(context.raw(), device, properties, &mut code) };
        // SAFETY: `clCreateCommandQueue` returned this queue with one reference; `clReleaseCommandQueue`
        // releases it.
        let raw = unsafe { Owned::new(raw, code, api.clReleaseCommandQueue) }
            .map_err(|c| sys::driver_error(id, "clCreateCommandQueue", c))?;
        let (raw, moves, state) = (Arc::new(raw), RwLock::default(), Mutex::default());
        let open = Arc::default();
        let q = Queue { api, raw, fault, id: id.into(), pool, profile, spans, moves, state, open };
        // SAFETY: `new` allocated the fault word with four bytes.
        unsafe { q.write_raw(q.fault.raw(), 0, &0u32.to_ne_bytes())? };
        Ok(q)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn check(&self, call: &str, code: i32) -> Result<()> {
        if code == sys::MEM_OBJECT_ALLOCATION_FAILURE {
            let m = self.pool.stats();
            let total = m.limit.unwrap_or(0);
            return Err(Error::OutOfMemory {
                device: self.id.to_string(),
                what: format!(
                    "all live buffers, which the driver allocates at first use; {call} gave {}",
                    sys::code_name(code)
                ),
                requested: m.allocated,
                free: total.saturating_sub(m.allocated),
                total,
                next: "Use a smaller batch, or set a memory limit below what is free".into(),
            });
        }
        sys::check(&self.id, call, code)
    }

    /// # Safety
    /// `dst` must be a live buffer of this queue's device with `src.len()` bytes from `offset` on.
    unsafe fn write_raw(&self, dst: Handle, offset: usize, src: &[u8]) -> Result<()> {
        // SAFETY: `write_raw` requires a range inside of a live buffer; the call blocks, so `src` outlives
        // the copy.
        let code = unsafe {
            (self.api.clEnqueueWriteBuffer)(
                self.raw.raw(),
                dst,
                sys::TRUE,
                offset,
                src.len(),
                src.as_ptr().cast(),
                0,
                std::ptr::null(),
                std::ptr::null_mut(),
            )
        };
        self.check("clEnqueueWriteBuffer", code)
    }

    /// # Safety
    /// `src` must be a live buffer of this queue's device with `dst.len()` bytes from `offset` on.
    unsafe fn read_raw(&self, src: Handle, offset: usize, dst: &mut [u8]) -> Result<()> {
        // SAFETY: `read_raw` requires a range inside of a live buffer; the call blocks, so `dst` outlives the
        // copy.
        let code = unsafe {
            (self.api.clEnqueueReadBuffer)(
                self.raw.raw(),
                src,
                sys::TRUE,
                offset,
                dst.len(),
                dst.as_mut_ptr().cast(),
                0,
                std::ptr::null(),
                std::ptr::null_mut(),
            )
        };
        self.check("clEnqueueReadBuffer", code)
    }

    /// Copies host bytes to a validated range, after all submitted work.
    ///
    /// # Safety
    /// `dst` must be a buffer of this queue's device, and `offset + src.len()` must not exceed its size.
    pub(super) unsafe fn write(&self, dst: &ClBuffer, offset: usize, src: &[u8]) -> Result<()> {
        let _stays = self.moves.read().unwrap_or_else(|e| e.into_inner());
        if src.is_empty() {
            return Ok(());
        }
        // SAFETY: `write` requires a range inside of the buffer, whose object is held during the call.
        unsafe { self.write_raw(dst.object().raw(), offset, src) }
    }

    /// Copies a validated range to the host, after all submitted work.
    ///
    /// # Safety
    /// `src` must be a buffer of this queue's device, and `offset + dst.len()` must not exceed its size.
    pub(super) unsafe fn read(&self, src: &ClBuffer, offset: usize, dst: &mut [u8]) -> Result<()> {
        let _stays = self.moves.read().unwrap_or_else(|e| e.into_inner());
        if dst.is_empty() {
            return self.finish();
        }
        // SAFETY: `read` requires a range inside of the buffer, whose object is held during the call.
        unsafe { self.read_raw(src.object().raw(), offset, dst) }
    }

    /// The OpenCL queue, for users that outlive this value.
    pub(super) fn object(&self) -> Arc<Owned<CommandQueue>> {
        self.raw.clone()
    }

    pub(super) fn raw(&self) -> Handle {
        self.raw.raw()
    }

    /// The object of the fault word of this queue's kernels.
    pub(super) fn fault(&self) -> Handle {
        self.fault.raw()
    }

    /// Whether the queue's commands are timed.
    pub(super) fn profiles(&self) -> bool {
        self.profile
    }

    /// A reference that is dead when this value has been dropped.
    pub(super) fn open(&self) -> Weak<()> {
        Arc::downgrade(&self.open)
    }

    /// Waits for the work of this queue, then moves the pool's buffers together.
    ///
    /// # Safety
    /// No other queue may have pending work that uses buffers of the pool, and none may enqueue any during
    /// the call.
    pub(super) unsafe fn defragment(&self, context: &Owned<Context>) -> Result<Defragmented> {
        let _state = self.lock();
        let _moves = self.moves.write().unwrap_or_else(|e| e.into_inner());
        self.finish()?;
        let mut detour = None;
        let did = self.pool.defragment(&mut |m| self.relocate(context, &mut detour, &m));
        self.finish()?;
        did
    }

    /// Performs one move. The pool's lock is held, so error paths must not query the pool.
    fn relocate(
        &self,
        context: &Owned<Context>,
        detour: &mut Option<Owned<MemoryObject>>,
        m: &Relocation<'_, Memory>,
    ) -> Result<()> {
        let copy =
            |src: &Owned<MemoryObject>, from: usize, dst: &Owned<MemoryObject>, to: usize, bytes: usize| {
                // SAFETY: both objects are live, and the ranges lie inside of them: inside allocations of the
                // pool, because the pool computes the moves, or inside `room`. Overlapping ranges are split
                // below.
                let code = unsafe {
                    (self.api.clEnqueueCopyBuffer)(
                        self.raw.raw(),
                        src.raw(),
                        dst.raw(),
                        from,
                        to,
                        bytes,
                        0,
                        std::ptr::null(),
                        std::ptr::null_mut(),
                    )
                };
                sys::check(&self.id, "clEnqueueCopyBuffer", code)
            };
        let ((from, start), (to, end)) = ((&m.from.0.object, m.from.1), (&m.to.0.object, m.to.1));
        if !m.overlaps() {
            return copy(from, start, to, end, m.bytes);
        }
        let room = match detour {
            Some(d) => d,
            None => detour.insert(
                super::memory::buffer(self.api, context, STAGING_BYTES)
                    .map_err(|c| sys::driver_error(&self.id, "clCreateBuffer", c))?,
            ),
        };
        // Moves go to lower offsets, so each piece is read before it is overwritten.
        for at in (0..m.bytes).step_by(STAGING_BYTES) {
            let n = STAGING_BYTES.min(m.bytes - at);
            copy(from, start + at, room, 0, n)?;
            copy(room, 0, to, end + at, n)?;
        }
        Ok(())
    }

    pub(super) fn begin(&self) -> Submission<'_> {
        Submission { queue: self, state: self.lock() }
    }

    pub(super) fn finish(&self) -> Result<()> {
        // SAFETY: `self` holds a reference to the queue.
        self.check("clFinish", unsafe { (self.api.clFinish)(self.raw.raw()) })
    }

    /// Waits, then returns and clears the fault word.
    pub(super) fn take_fault(&self) -> Result<Option<u32>> {
        let mut s = self.lock();
        self.finish()?;
        if !s.may_have_faulted {
            return Ok(None);
        }
        let mut word = [0; 4];
        // SAFETY: `new` allocated the fault word with four bytes.
        unsafe { self.read_raw(self.fault.raw(), 0, &mut word)? };
        let id = u32::from_ne_bytes(word);
        if id != 0 {
            // SAFETY: `new` allocated the fault word with four bytes.
            unsafe { self.write_raw(self.fault.raw(), 0, &0u32.to_ne_bytes())? };
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

    /// Converts events to times.
    fn convert_times(&self, s: &mut State) -> Result<()> {
        if s.events.is_empty() {
            return Ok(());
        }
        self.finish()?;
        for e in std::mem::take(&mut s.events) {
            let nanoseconds = match &e {
                Some(e) => self
                    .stamp(e, sys::PROFILING_COMMAND_END)?
                    .saturating_sub(self.stamp(e, sys::PROFILING_COMMAND_START)?),
                None => 0,
            };
            s.done.push(Timing { nanoseconds });
        }
        Ok(())
    }

    fn stamp(&self, e: &Owned<Event>, which: u32) -> Result<u64> {
        sys::stamp(self.api, e, which).or_else(|c| self.check("clGetEventProfilingInfo", c).map(|()| 0))
    }

    /// The events of the timed commands since the last call.
    pub(super) fn take_events(&self) -> Vec<Option<Owned<Event>>> {
        std::mem::take(&mut self.lock().events)
    }

    /// Makes all later commands wait for these events.
    pub(super) fn barrier(&self, events: &[&Owned<Event>]) -> Result<()> {
        let events: SmallVec<[Handle; 8]> = events.iter().map(|e| e.raw()).collect();
        // SAFETY: `self` holds a reference to the queue, and the borrowed events are live.
        let code = unsafe {
            (self.api.clEnqueueBarrierWithWaitList)(
                self.raw.raw(),
                events.len() as u32,
                events.as_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("clEnqueueBarrierWithWaitList", code)
    }

    /// An event that completes when all commands enqueued so far have completed.
    pub(super) fn marker(&self) -> Result<Owned<Event>> {
        marker(self.api, &self.raw).or_else(|code| {
            let call = "clEnqueueMarkerWithWaitList";
            self.check(call, code).and_then(|()| Err(Error::internal(format!("{call} gave no event"))))
        })
    }

    /// Takes ownership of the event that an enqueue call returned with `code`.
    ///
    /// # Safety
    /// If `code` is success, `raw` must be null or an event with a reference that the caller owns.
    unsafe fn event(&self, call: &str, raw: Handle, code: i32) -> Result<Owned<Event>> {
        // SAFETY: `event` requires an owned reference if `code` is success; `clReleaseEvent` releases it.
        unsafe { Owned::new(raw, code, self.api.clReleaseEvent) }.or_else(|c| {
            self.check(call, c).and_then(|()| Err(Error::internal(format!("{call} gave no event"))))
        })
    }

    pub(super) fn flush(&self) -> Result<()> {
        // SAFETY: `self` holds a reference to the queue.
        self.check("clFlush", unsafe { (self.api.clFlush)(self.raw.raw()) })
    }

    /// Enqueues a copy to a validated range; returns the event of its completion.
    ///
    /// # Safety
    /// `dst` must be a buffer of this queue's device, and `offset + src.len()` must not exceed its size.
    /// `src` must stay valid and unchanged until the event is done.
    pub(super) unsafe fn write_later(
        &self,
        dst: &ClBuffer,
        offset: usize,
        src: &[u8],
    ) -> Result<Owned<Event>> {
        // SAFETY: `write_later` requires a range inside of the buffer, and `src` valid and unchanged until
        // the event is done.
        unsafe { self.write_raw_later(dst.handle(), offset, src.as_ptr().cast(), src.len()) }
    }

    /// Enqueues a copy to an object; returns the event of its completion.
    ///
    /// # Safety
    /// `dst` must be a live buffer of this queue's device with `bytes` bytes from `offset` on. The `bytes`
    /// bytes at `src` must stay valid and unchanged until the event is done.
    pub(super) unsafe fn write_raw_later(
        &self,
        dst: Handle,
        offset: usize,
        src: *const c_void,
        bytes: usize,
    ) -> Result<Owned<Event>> {
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: `write_raw_later` requires a range inside of the live buffer, and `src` valid and unchanged
        // until the event is done.
        let code = unsafe {
            (self.api.clEnqueueWriteBuffer)(
                self.raw.raw(),
                dst,
                sys::FALSE,
                offset,
                bytes,
                src,
                0,
                std::ptr::null(),
                &mut event,
            )
        };
        // SAFETY: the call returned this event.
        unsafe { self.event("clEnqueueWriteBuffer", event, code) }
    }

    /// Enqueues a copy of a validated range to the host; returns the event of its completion.
    ///
    /// # Safety
    /// `src` must be a buffer of this queue's device, and `offset + bytes` must not exceed its size. The
    /// `bytes` bytes at `dst` must stay valid, and nothing else may access them, until the event is done.
    pub(super) unsafe fn read_later(
        &self,
        src: &ClBuffer,
        offset: usize,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<Owned<Event>> {
        // SAFETY: `read_later` requires a range inside of the buffer and exclusive use of `bytes` bytes at
        // `dst` until the event is done.
        unsafe { self.read_raw_later(src.handle(), offset, dst, bytes) }
    }

    /// # Safety
    /// `src` must be a live buffer with `bytes` bytes from `offset` on. The `bytes` bytes at `dst` must stay
    /// valid, and nothing else may access them, until the event is done.
    unsafe fn read_raw_later(
        &self,
        src: Handle,
        offset: usize,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<Owned<Event>> {
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: `read_raw_later` requires a range inside of the live buffer and exclusive use of `bytes`
        // bytes at `dst` until the event is done.
        let code = unsafe {
            (self.api.clEnqueueReadBuffer)(
                self.raw.raw(),
                src,
                sys::FALSE,
                offset,
                bytes,
                dst.cast(),
                0,
                std::ptr::null(),
                &mut event,
            )
        };
        // SAFETY: the call returned this event.
        unsafe { self.event("clEnqueueReadBuffer", event, code) }
    }

    /// If a kernel that can fault was enqueued since the fault word was last cleared, enqueues a copy of the
    /// word to `to` and returns true.
    ///
    /// # Safety
    /// `to` must stay valid until the copy is done, and nothing else may write it until then.
    pub(super) unsafe fn read_fault(&self, to: &AtomicU32) -> Result<bool> {
        if !self.lock().may_have_faulted {
            return Ok(false);
        }
        // SAFETY: `new` allocated the fault word with four bytes; `read_fault` requires that `to` lives and
        // is not written until the copy is done. Other threads read `to` as an atomic, and it is aligned, so
        // they get the old word or the new one.
        unsafe { self.read_raw_later(self.fault.raw(), 0, to.as_ptr().cast(), 4)? };
        Ok(true)
    }

    /// If a kernel may have set the fault word, enqueues a write that clears it.
    pub(super) fn clear_fault(&self) -> Result<()> {
        static NONE: u32 = 0;
        if !std::mem::take(&mut self.lock().may_have_faulted) {
            return Ok(());
        }
        // SAFETY: the source is a static, and `new` allocated the fault word with four bytes.
        let code = unsafe {
            (self.api.clEnqueueWriteBuffer)(
                self.raw.raw(),
                self.fault.raw(),
                sys::FALSE,
                0,
                4,
                (&raw const NONE).cast(),
                0,
                std::ptr::null(),
                std::ptr::null_mut(),
            )
        };
        self.check("clEnqueueWriteBuffer", code)
    }
}

impl Submission<'_> {
    /// Stores the event of an enqueued command; `None` for a command without work.
    ///
    /// # Safety
    /// If the queue is profiled, `event` must be `None` or an event with a reference that the caller owns.
    unsafe fn note(&mut self, event: Option<Handle>) -> Result<()> {
        if !self.queue.profile {
            return Ok(());
        }
        let event = match event {
            // SAFETY: `note` requires an owned reference; `clReleaseEvent` releases it.
            Some(raw) => Some(
                unsafe { Owned::new(raw, sys::SUCCESS, self.queue.api.clReleaseEvent) }
                    .map_err(|c| sys::driver_error(&self.queue.id, "clEnqueue…", c))?,
            ),
            None => None,
        };
        self.keep(event)
    }

    /// Stores the event of a timed command.
    fn keep(&mut self, event: Option<Owned<Event>>) -> Result<()> {
        self.state.events.push(event);
        if self.state.events.len() >= MAX_PENDING_EVENTS {
            match self.queue.spans {
                // A stream reports only the start of its first and the end of its last command.
                true => {
                    let mut all = std::mem::take(&mut self.state.events).into_iter().flatten();
                    let first = all.next();
                    let last = all.last();
                    self.state.events = first.into_iter().chain(last).map(Some).collect();
                }
                false => self.queue.convert_times(&mut self.state)?,
            }
        }
        Ok(())
    }

    /// Enqueues a command buffer.
    ///
    /// # Safety
    /// `buffer` must be a finished command buffer that was made for this queue by `f`. The objects that its
    /// commands use must live until they have run.
    pub(super) unsafe fn launch_buffer(
        &mut self,
        f: &CommandBuffers,
        buffer: &Owned<CommandBuffer>,
        faults: bool,
    ) -> Result<()> {
        let q = self.queue;
        // The markers enclose the time of all commands: drivers differ in when a command buffer begins.
        if q.profile {
            self.keep(Some(q.marker()?))?;
        }
        // SAFETY: the contract of this function.
        q.check("clEnqueueCommandBufferKHR", unsafe { f.enqueue(buffer) })?;
        self.state.may_have_faulted |= faults;
        if q.profile {
            self.keep(Some(q.marker()?))?;
        }
        Ok(())
    }

    /// Submits the enqueued commands to the device.
    pub(super) fn flush(self) -> Result<()> {
        self.queue.flush()
    }
}

impl Actions<Shared> for Submission<'_> {
    /// Sets all arguments and enqueues the kernel.
    ///
    /// # Safety
    /// The conditions of [`Actions::launch`] apply. No other thread may launch `p` during the call: while the
    /// device has streams, the caller must hold the ledger's lock, which all queues share.
    unsafe fn launch(
        &mut self,
        p: &ClProgram,
        groups: [u32; 3],
        buffers: &[&ClBuffer],
        arguments: &[Argument],
    ) -> Result<()> {
        let (q, k) = (self.queue, p.entry.kernel.raw());
        if groups.contains(&0) {
            // SAFETY: there is no event.
            return unsafe { self.note(None) };
        }
        let mut at = 0u32;
        let mut set = |bytes: usize, value: *const c_void| {
            // SAFETY: every call of `set` below passes a pointer to `bytes` bytes, which the library copies
            // before it returns. `launch` requires that no other thread sets arguments of this kernel now.
            let code = unsafe { (q.api.clSetKernelArg)(k, at, bytes, value) };
            if code != sys::SUCCESS {
                q.check(&format!("clSetKernelArg({}, {at})", p.signature.name), code)?;
            }
            at += 1;
            Ok::<(), Error>(())
        };
        for b in buffers {
            let h = b.handle();
            set(size_of::<Handle>(), (&raw const h).cast())?;
        }
        if p.signature.faults {
            let h = q.fault.raw();
            set(size_of::<Handle>(), (&raw const h).cast())?;
        }
        for a in arguments {
            with_argument(a, &mut set)?;
        }
        let local = p.workgroup.map(|n| n as usize);
        let global = grid(groups, p.workgroup)?;
        let mut event: Handle = std::ptr::null_mut();
        let out = if q.profile { &raw mut event } else { std::ptr::null_mut() };
        // SAFETY: the queue and kernel are live, all arguments are set, and the sizes have three dimensions.
        // `launch` requires buffers that are large enough. They stay alive: the queue retains what it has
        // enqueued, and the pool reuses a freed buffer only for later commands of this queue or of queues
        // that wait for this one.
        let code = unsafe {
            (q.api.clEnqueueNDRangeKernel)(
                q.raw.raw(),
                k,
                3,
                std::ptr::null(),
                global.as_ptr(),
                local.as_ptr(),
                0,
                std::ptr::null(),
                out,
            )
        };
        if code != sys::SUCCESS {
            q.check(&format!("clEnqueueNDRangeKernel({}, {global:?} in {local:?})", p.signature.name), code)?;
        }
        self.state.may_have_faulted |= p.signature.faults;
        // SAFETY: if the queue is profiled, the call returned this event.
        unsafe { self.note(q.profile.then_some(event)) }
    }

    unsafe fn copy(&mut self, src: (&ClBuffer, usize), dst: (&ClBuffer, usize), bytes: usize) -> Result<()> {
        if bytes == 0 {
            // SAFETY: there is no event.
            return unsafe { self.note(None) };
        }
        let q = self.queue;
        let mut event: Handle = std::ptr::null_mut();
        let out = if q.profile { &raw mut event } else { std::ptr::null_mut() };
        // SAFETY: `copy` requires ranges inside of live buffers that do not overlap.
        let code = unsafe {
            (q.api.clEnqueueCopyBuffer)(
                q.raw.raw(),
                src.0.handle(),
                dst.0.handle(),
                src.1,
                dst.1,
                bytes,
                0,
                std::ptr::null(),
                out,
            )
        };
        q.check("clEnqueueCopyBuffer", code)?;
        // SAFETY: if the queue is profiled, the call returned this event.
        unsafe { self.note(q.profile.then_some(event)) }
    }
}

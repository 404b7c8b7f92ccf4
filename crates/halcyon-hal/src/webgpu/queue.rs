//! The in-order queue of a device.

use super::memory::{self, Slice, WgBuffer, WgSource};
use super::program::{Bindings, Builder, PARAM_BYTES, WgProgram};
use super::stream::Core;
use super::sys::{self, UnscopedError};
use crate::commands::Actions;
use crate::pool::{Defragmented, Pool, Relocation};
use crate::stream::Report;
use crate::validate::Argument;
use crate::{Counts, Error, Result, Timing};
use halcyon_ir::DType;
use halcyon_ir::kernel::{self, Ty};
use smallvec::SmallVec;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Bytes of kernel parameters per submission.
const RING: u64 = 128 << 10;
/// If an integer argument of a launch is at least this and below 2³¹, the launch counts as long: its loops,
/// single or nested, may exceed the iteration limit of devices that abort long loops.
const LONG_LOOP: u64 = 1 << 12;
/// Maximum number of commands timed together.
const MAX_TIMED: u32 = 512;
/// Maximum number of bytes that a blocking read maps at a time. A write is also submitted in pieces of this
/// size.
const CHUNK: usize = 32 << 20;
/// Size in bytes of the staging buffer for moves within one buffer.
const STAGING_BYTES: u64 = 1 << 20;

#[derive(Debug, Default)]
struct State {
    done: Vec<Timing>,
    /// Whether a kernel that can fault was enqueued since the fault word was last read.
    may_have_faulted: bool,
    /// The mappable buffer for reads. It is kept for the next read.
    staging: Option<wgpu::Buffer>,
}

/// Time stamps of commands.
#[derive(Debug)]
struct Clock {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    /// Nanoseconds per tick.
    period: f64,
}

/// One in-order queue with its own fault word.
#[derive(Debug)]
pub struct Queue {
    device: wgpu::Device,
    raw: wgpu::Queue,
    id: String,
    fault: wgpu::Buffer,
    /// On devices that abort long loops: the word that an aborted loop sets.
    cut: Option<wgpu::Buffer>,
    /// Parameters of the pending launches, each at its own offset.
    ring: wgpu::Buffer,
    ring_group: wgpu::BindGroup,
    ring_align: u32,
    max_groups: u32,
    /// The pool of the device, whose statistics out-of-memory errors report.
    pool: Arc<Pool<WgSource>>,
    clock: Option<Clock>,
    stray: Arc<UnscopedError>,
    /// A kernel for copies that WebGPU's copy commands do not support: unaligned copies, and copies within
    /// one buffer.
    byte_copy: OnceLock<WgProgram>,
    builder: Arc<Builder>,
    state: Mutex<State>,
}

/// A pending copy to the host.
#[derive(Debug)]
pub struct Fetch {
    staging: wgpu::Buffer,
    mapped: Arc<Mutex<Option<std::result::Result<(), String>>>>,
    index: wgpu::SubmissionIndex,
    /// The range of the bytes in the staging buffer.
    bytes: std::ops::Range<usize>,
    /// Offset in the staging buffer of the fault word (if it was copied) and, after it, the word of aborted
    /// loops.
    words: usize,
    fault: bool,
    cut: bool,
}

/// Enqueues a list of commands. Holds the queue's lock.
#[derive(Debug)]
pub struct Submission<'a> {
    queue: &'a Queue,
    state: MutexGuard<'a, State>,
    /// The submitter's fault word, and whether a kernel used it.
    fault: &'a wgpu::Buffer,
    faulted: bool,
    encoder: Option<wgpu::CommandEncoder>,
    pass: Option<wgpu::ComputePass<'static>>,
    params: Vec<u8>,
    /// For each timed command, whether it had work.
    timed: Vec<bool>,
}

impl Queue {
    /// With `profile`, every command is timed. Not every adapter supports this.
    pub fn new(
        device: wgpu::Device,
        raw: wgpu::Queue,
        stray: Arc<UnscopedError>,
        builder: Arc<Builder>,
        pool: Arc<Pool<WgSource>>,
        profile: bool,
    ) -> Result<Queue> {
        use wgpu::{BufferUsages as U, Features as F};
        let id = builder.id.clone();
        let failed = |e: wgpu::Error| sys::driver_error(&id, "createBuffer", sys::text(&e));
        let fault = memory::buffer(&device, 4, U::STORAGE | U::COPY_SRC | U::COPY_DST).map_err(failed)?;
        let cut = match builder.options.short_loops {
            true => Some(memory::buffer(&device, 4, U::STORAGE | U::COPY_SRC | U::COPY_DST).map_err(failed)?),
            false => None,
        };
        let ring = memory::buffer(&device, RING, U::UNIFORM | U::COPY_DST).map_err(failed)?;
        let mut entries = vec![wgpu::BindGroupEntry {
            binding: 0,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &ring,
                offset: 0,
                size: wgpu::BufferSize::new(PARAM_BYTES as u64),
            }),
        }];
        entries.extend(
            cut.as_ref().map(|c| wgpu::BindGroupEntry { binding: 1, resource: c.as_entire_binding() }),
        );
        let ring_group = sys::scoped(&device, || {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &builder.params,
                entries: &entries,
            })
        })
        .map_err(|e| sys::driver_error(&id, "createBindGroup", sys::text(&e)))?;
        let clock = match profile {
            false => None,
            true if device.features().contains(F::TIMESTAMP_QUERY | F::TIMESTAMP_QUERY_INSIDE_ENCODERS) => {
                let set = sys::scoped(&device, || {
                    device.create_query_set(&wgpu::QuerySetDescriptor {
                        label: None,
                        ty: wgpu::QueryType::Timestamp,
                        count: 2 * MAX_TIMED,
                    })
                });
                let set = set.map_err(|e| sys::driver_error(&id, "createQuerySet", sys::text(&e)))?;
                let bytes = 2 * MAX_TIMED as u64 * 8;
                let resolved =
                    memory::buffer(&device, bytes, U::QUERY_RESOLVE | U::COPY_SRC).map_err(failed)?;
                Some(Clock { set, resolved, period: raw.get_timestamp_period() as f64 })
            }
            true => {
                return Err(Error::unsupported(
                    format!("profiling on {id}: the adapter has no time stamps"),
                    "Open it without profiling",
                ));
            }
        };
        let l = device.limits();
        raw.write_buffer(&fault, 0, &[0; 4]);
        if let Some(c) = &cut {
            raw.write_buffer(c, 0, &[0; 4]);
        }
        Ok(Queue {
            id,
            fault,
            cut,
            ring,
            ring_group,
            ring_align: l.min_uniform_buffer_offset_alignment.max(16),
            max_groups: l.max_compute_workgroups_per_dimension,
            pool,
            clock,
            stray,
            byte_copy: OnceLock::new(),
            builder,
            state: Mutex::default(),
            device,
            raw,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every update leaves the state consistent, so a poisoned lock is safe to use.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn error(&self, call: &str, e: &wgpu::Error) -> Error {
        if !matches!(e, wgpu::Error::OutOfMemory { .. }) {
            return sys::driver_error(&self.id, call, sys::text(e));
        }
        let m = self.pool.stats();
        let total = m.limit.unwrap_or(0);
        Error::OutOfMemory {
            device: self.id.clone(),
            what: format!("memory of the driver for {call}, besides the live buffers"),
            requested: m.allocated,
            free: total.saturating_sub(m.allocated),
            total,
            next: "Use a smaller batch, or set a memory limit below what is free".into(),
        }
    }

    /// Runs calls inside error scopes of every kind.
    fn call<T>(&self, name: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        // An earlier error names the cause better than an error of this call.
        self.stray.check(&self.id)?;
        match sys::scoped(&self.device, f) {
            Ok(r) => r,
            Err(e) => Err(self.error(name, &e)),
        }
    }

    /// Copies host bytes to a validated range, after all submitted work.
    pub fn write(&self, dst: &WgBuffer, offset: usize, src: &[u8]) -> Result<()> {
        if src.is_empty() {
            return Ok(());
        }
        let mut state = self.lock();
        // Whole words are written directly. Bytes past the end of a buffer are its padding.
        let head = (offset.next_multiple_of(4) - offset).min(src.len());
        let (first, rest) = src.split_at(head);
        let last = offset + src.len() == memory_end(dst);
        let words = if last { rest.len() } else { rest.len() / 4 * 4 };
        let (middle, tail) = rest.split_at(words);
        let Slice { buffer: to, offset: base, .. } = &dst.slice();
        self.call("writeBuffer", || {
            let mut at = base + (offset + head) as u64;
            for part in middle.chunks(CHUNK) {
                let whole = part.len() / 4 * 4;
                self.raw.write_buffer(to, at, &part[..whole]);
                if whole < part.len() {
                    let mut word = [0; 4];
                    word[..part.len() - whole].copy_from_slice(&part[whole..]);
                    self.raw.write_buffer(to, at + whole as u64, &word);
                }
                at += part.len() as u64;
                if part.len() == CHUNK {
                    self.raw.submit([]);
                }
            }
            Ok(())
        })?;
        for (at, bytes) in [(offset, first), (offset + src.len() - tail.len(), tail)] {
            if !bytes.is_empty() {
                state = self.patch(state, dst, at, bytes)?;
            }
        }
        Ok(())
    }

    /// Writes bytes that are not whole words with a kernel, because WebGPU copies whole words only.
    fn patch<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        dst: &WgBuffer,
        offset: usize,
        bytes: &[u8],
    ) -> Result<MutexGuard<'a, State>> {
        let mut words = bytes.to_vec();
        words.resize(bytes.len().next_multiple_of(4), 0);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        let from = memory::buffer(&self.device, words.len() as u64, usage)
            .map_err(|e| self.error("createBuffer", &e))?;
        self.run_with(state, None, |s| {
            s.queue.raw.write_buffer(&from, 0, &words);
            s.copy_bytes(&Slice::whole(&from), 0, &dst.slice(), offset, bytes.len())
        })
    }

    /// Copies a validated range to the host, after all submitted work.
    pub fn read(&self, src: &WgBuffer, offset: usize, dst: &mut [u8]) -> Result<()> {
        if dst.is_empty() {
            return self.finish();
        }
        let mut state = self.lock();
        let from = src.slice();
        self.read_raw(&mut state, &from.buffer, from.offset as usize + offset, dst)
    }

    /// Waits, then moves the pool's buffers together.
    pub fn defragment(&self) -> Result<Defragmented> {
        let _state = self.lock();
        self.finish()?;
        let mut detour = None;
        let did = self.pool.defragment(&mut |m| self.relocate(&mut detour, &m));
        self.finish()?;
        did
    }

    /// Performs and submits one move. The pool's lock is held, so error paths must not query the pool.
    fn relocate(&self, detour: &mut Option<wgpu::Buffer>, m: &Relocation<'_, wgpu::Buffer>) -> Result<()> {
        let failed = |call: &str, e: wgpu::Error| sys::driver_error(&self.id, call, sys::text(&e));
        let (from, to) = ((m.from.0, m.from.1 as u64), (m.to.0, m.to.1 as u64));
        // WebGPU forbids copies within one buffer, even of disjoint ranges, so they go through a staging
        // buffer.
        let room = match (m.same, &mut *detour) {
            (false, _) => None,
            (true, Some(d)) => Some(&*d),
            (true, none) => {
                let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
                let d = memory::buffer(&self.device, STAGING_BYTES, usage)
                    .map_err(|e| failed("createBuffer", e))?;
                Some(&*none.insert(d))
            }
        };
        sys::scoped(&self.device, || {
            let mut e = self.device.create_command_encoder(&Default::default());
            match room {
                None => e.copy_buffer_to_buffer(from.0, from.1, to.0, to.1, m.bytes as u64),
                // Moves go to lower offsets, so each piece is read before it is overwritten.
                Some(room) => {
                    for at in (0..m.bytes as u64).step_by(STAGING_BYTES as usize) {
                        let n = STAGING_BYTES.min(m.bytes as u64 - at);
                        e.copy_buffer_to_buffer(from.0, from.1 + at, room, 0, n);
                        e.copy_buffer_to_buffer(room, 0, to.0, to.1 + at, n);
                    }
                }
            }
            self.raw.submit([e.finish()]);
        })
        .map_err(|e| failed("copyBufferToBuffer", e))
    }

    fn read_raw(&self, state: &mut State, src: &wgpu::Buffer, offset: usize, dst: &mut [u8]) -> Result<()> {
        let mut at = offset;
        for part in dst.chunks_mut(CHUNK) {
            let start = at / 4 * 4;
            let end = (at + part.len()).next_multiple_of(4);
            let bytes = (end - start) as u64;
            // The word of aborted loops is appended.
            let all = bytes + if self.cut.is_some() { 4 } else { 0 };
            let staging = self.staging(state, all)?;
            let view = self.call("mapAsync", || {
                let mut e = self.device.create_command_encoder(&Default::default());
                e.copy_buffer_to_buffer(src, start as u64, &staging, 0, bytes);
                if let Some(c) = &self.cut {
                    e.copy_buffer_to_buffer(c, 0, &staging, bytes, 4);
                }
                let index = self.raw.submit([e.finish()]);
                let result: Arc<Mutex<Option<String>>> = Arc::default();
                let r = result.clone();
                staging.map_async(wgpu::MapMode::Read, 0..all, move |got| {
                    if let Err(e) = got {
                        *r.lock().unwrap_or_else(|e| e.into_inner()) = Some(sys::text(&e));
                    }
                });
                self.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: None })?;
                if let Some(why) = result.lock().unwrap_or_else(|e| e.into_inner()).take() {
                    return Err(sys::driver_error(&self.id, "mapAsync", why));
                }
                staging
                    .get_mapped_range(0..all)
                    .map_err(|e| sys::driver_error(&self.id, "getMappedRange", sys::text(&e)))
            })?;
            part.copy_from_slice(&view[at - start..at - start + part.len()]);
            let cut = view[bytes as usize..].first_chunk().map_or(0, |w| u32::from_le_bytes(*w));
            drop(view);
            staging.unmap();
            if cut != 0
                && let Some(c) = &self.cut
            {
                self.raw.write_buffer(c, 0, &[0; 4]);
                return Err(self.gave_up(cut));
            }
            at += part.len();
        }
        Ok(())
    }

    /// A mappable buffer of at least `bytes` bytes.
    fn staging(&self, state: &mut State, bytes: u64) -> Result<wgpu::Buffer> {
        if let Some(b) = &state.staging
            && b.size() >= bytes
        {
            return Ok(b.clone());
        }
        let size = bytes.next_power_of_two().max(4096);
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let b = memory::buffer(&self.device, size, usage).map_err(|e| self.error("createBuffer", &e))?;
        state.staging = Some(b.clone());
        Ok(b)
    }

    fn poll(&self, how: wgpu::PollType) -> Result<()> {
        let r = self.device.poll(how);
        r.map(|_| ()).map_err(|e| sys::driver_error(&self.id, "poll", sys::text(&e)))
    }

    /// Enqueues and submits the commands of `f`, including those before a failed one.
    pub fn run(&self, f: impl FnOnce(&mut Submission<'_>) -> Result<()>) -> Result<()> {
        self.run_with(self.lock(), None, f).map(drop)
    }

    /// Like [`Queue::run`], with a stream's own fault word. Sets `used` if a kernel that was submitted may
    /// write the word, also if a later command fails.
    pub fn run_for(
        &self,
        fault: &wgpu::Buffer,
        used: &mut bool,
        f: impl FnOnce(&mut Submission<'_>) -> Result<()>,
    ) -> Result<()> {
        self.run_with(self.lock(), Some((fault, used)), f).map(drop)
    }

    /// `stream` is the fault word of a stream and whether a kernel used it; without it, the queue's own word
    /// serves.
    fn run_with<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        stream: Option<(&'a wgpu::Buffer, &mut bool)>,
        f: impl FnOnce(&mut Submission<'_>) -> Result<()>,
    ) -> Result<MutexGuard<'a, State>> {
        let (fault, used) = match stream {
            Some((word, used)) => (word, Some(used)),
            None => (&self.fault, None),
        };
        self.call("submit", || {
            let mut s = Submission {
                queue: self,
                state,
                fault,
                faulted: false,
                encoder: None,
                pass: None,
                params: vec![],
                timed: vec![],
            };
            let r = f(&mut s);
            let flushed = s.flush();
            match used {
                Some(used) => *used |= s.faulted,
                None => s.state.may_have_faulted |= s.faulted,
            }
            flushed.and(r).map(|()| s.state)
        })
    }

    /// A cleared fault word for a stream.
    pub fn word(&self) -> Result<wgpu::Buffer> {
        use wgpu::BufferUsages as U;
        let b = memory::buffer(&self.device, 4, U::STORAGE | U::COPY_SRC | U::COPY_DST)
            .map_err(|e| self.error("createBuffer", &e))?;
        self.call("writeBuffer", || {
            self.raw.write_buffer(&b, 0, &[0; 4]);
            Ok(())
        })?;
        Ok(b)
    }

    /// Enqueues a copy of a validated range to the host, after all submitted work. Also copies and clears the
    /// fault word, if `fault` is given, and the word of aborted loops, if there is one.
    pub fn fetch(
        &self,
        from: Option<(&WgBuffer, usize, usize)>,
        fault: Option<&wgpu::Buffer>,
    ) -> Result<Fetch> {
        let _state = self.lock();
        let (start, end) = from.map_or((0, 0), |(_, at, n)| (at / 4 * 4, (at + n).next_multiple_of(4)));
        let words: SmallVec<[&wgpu::Buffer; 2]> = fault.into_iter().chain(&self.cut).collect();
        let size = ((end - start) + 4 * words.len()).max(4) as u64;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging =
            memory::buffer(&self.device, size, usage).map_err(|e| self.error("createBuffer", &e))?;
        let mapped: Arc<Mutex<Option<std::result::Result<(), String>>>> = Arc::default();
        let index = self.call("mapAsync", || {
            let mut e = self.device.create_command_encoder(&Default::default());
            if let Some((b, ..)) = from.filter(|_| end > start) {
                let Slice { buffer, offset, .. } = b.slice();
                e.copy_buffer_to_buffer(&buffer, offset + start as u64, &staging, 0, (end - start) as u64);
            }
            for (i, w) in words.iter().enumerate() {
                e.copy_buffer_to_buffer(w, 0, &staging, (end - start + 4 * i) as u64, 4);
                e.clear_buffer(w, 0, Some(4));
            }
            let index = self.raw.submit([e.finish()]);
            let m = mapped.clone();
            staging.map_async(wgpu::MapMode::Read, 0..size, move |got| {
                *m.lock().unwrap_or_else(|e| e.into_inner()) = Some(got.map_err(|e| sys::text(&e)));
            });
            Ok(index)
        })?;
        let skip = from.map_or(0, |(_, at, _)| at - start);
        let fetch = Fetch {
            bytes: skip..skip + from.map_or(0, |(_, _, n)| n),
            words: end - start,
            fault: fault.is_some(),
            cut: self.cut.is_some(),
            staging,
            mapped,
            index,
        };
        Ok(fetch)
    }

    /// If the device has reached the fetch, copies its bytes to `to`, adds faults and errors to `report` and
    /// returns true. After an error that makes the bytes unavailable, such as a lost device, also returns
    /// true. Does not wait.
    pub fn finish_fetch(&self, f: &Fetch, to: &mut [u8], report: &Report) -> bool {
        if let Err(e) = self.poll(wgpu::PollType::Poll) {
            report.fail(e);
            return true;
        }
        let Some(got) = f.mapped.lock().unwrap_or_else(|e| e.into_inner()).take() else {
            // A lost device completes no mappings.
            return self.stray.check(&self.id).map_err(|e| report.fail(e)).is_err();
        };
        let view = got.and_then(|()| f.staging.get_mapped_range(..).map_err(|e| sys::text(&e)));
        match view {
            Err(why) => report.fail(sys::driver_error(&self.id, "mapAsync", why)),
            Ok(view) => {
                to.copy_from_slice(&view[f.bytes.clone()]);
                let word = |i: usize| {
                    view[f.words + 4 * i..].iter().take(4).rev().fold(0u32, |v, b| v << 8 | *b as u32)
                };
                if f.fault {
                    report.fault().store(word(0), std::sync::atomic::Ordering::Release);
                }
                match word(f.fault as usize) {
                    cut if f.cut && cut != 0 => report.fail(self.gave_up(cut)),
                    _ => {}
                }
            }
        }
        f.staging.unmap();
        true
    }

    /// Waits until the device has reached the fetch.
    pub fn await_fetch(&self, f: &Fetch) {
        if let Err(e) =
            self.poll(wgpu::PollType::Wait { submission_index: Some(f.index.clone()), timeout: None })
        {
            tracing::debug!("waiting for a stream: {e}");
        }
    }

    /// The error of an aborted loop; `word` is the number of its kernel.
    fn gave_up(&self, word: u32) -> Error {
        let marks = self.builder.marks.lock().unwrap_or_else(|e| e.into_inner());
        let kernel = marks.get(&word).map_or("unknown", String::as_str);
        Error::unsupported(
            format!(
                "kernel {kernel}: its loops have more iterations than {} allows (llvmpipe: 65,535 per work-item)",
                self.id
            ),
            "Use --backend cpu or a GPU, or smaller tensors",
        )
    }

    pub fn finish(&self) -> Result<()> {
        self.call("poll", || self.poll(wgpu::PollType::wait_indefinitely()))
    }

    /// Waits, then returns and clears the fault word.
    pub fn take_fault(&self) -> Result<Option<u32>> {
        let mut s = self.lock();
        self.finish()?;
        if !s.may_have_faulted {
            return Ok(None);
        }
        let mut word = [0; 4];
        self.read_raw(&mut s, &self.fault, 0, &mut word)?;
        let id = u32::from_le_bytes(word);
        if id != 0 {
            self.call("writeBuffer", || {
                self.raw.write_buffer(&self.fault, 0, &[0; 4]);
                Ok(())
            })?;
        }
        s.may_have_faulted = false;
        Ok((id != 0).then_some(id))
    }

    /// The times of all commands since the last call.
    pub fn take_timings(&self) -> Result<Vec<Timing>> {
        Ok(std::mem::take(&mut self.lock().done))
    }

    fn byte_copy(&self) -> Result<&WgProgram> {
        if let Some(p) = self.byte_copy.get() {
            return Ok(p);
        }
        let b = kernel::Builder::new("copy_bytes", [64, 1, 1]);
        b.may_alias();
        let (src, dst) = (b.raw_buffer(DType::U8, false), b.raw_buffer(DType::U8, true));
        let (n, from, to) = (b.param("n", Ty::U32), b.param("from", Ty::U32), b.param("to", Ty::U32));
        let i = b.linear_id().to(Ty::U32);
        b.if_(i.lt(n), || b.store(dst, to + i, b.load(src, from + i)));
        // The caller did not request this kernel, so it is not counted.
        let own = Builder {
            device: self.device.clone(),
            id: self.id.clone(),
            options: self.builder.options.clone(),
            params: self.builder.params.clone(),
            counts: Arc::new(Counts::default()),
            kept: None,
            marks: Mutex::default(),
        };
        let p = Arc::new(own).program(&b.finish()?, 0)?;
        Ok(self.byte_copy.get_or_init(|| p))
    }
}

/// Bytes of a buffer without padding.
fn memory_end(b: &WgBuffer) -> usize {
    b.block.bytes()
}

impl Submission<'_> {
    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        let device = &self.queue.device;
        self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// Records the start (0) or the end (1) of a command.
    fn stamp(&mut self, end: u32) {
        let q = self.queue;
        if let Some(c) = &q.clock {
            let at = 2 * self.timed.len() as u32 + end;
            self.encoder().write_timestamp(&c.set, at);
        }
    }

    /// Counts a command as timed; `did` is false for a command without work.
    fn note(&mut self, did: bool) -> Result<()> {
        if self.queue.clock.is_none() {
            return Ok(());
        }
        self.timed.push(did);
        if self.timed.len() as u32 >= MAX_TIMED { self.flush() } else { Ok(()) }
    }

    fn dispatch(
        &mut self,
        p: &WgProgram,
        groups: [u32; 3],
        buffers: &[Slice],
        arguments: &[Argument],
    ) -> Result<()> {
        let q = self.queue;
        if groups.iter().any(|g| *g > q.max_groups) {
            return Err(Error::unsupported(
                format!(
                    "a grid of {groups:?} groups on {}, which allows {} per dimension",
                    q.id, q.max_groups
                ),
                "Use a smaller batch",
            ));
        }
        // A dispatch may bind the same range only once.
        let mut bound: SmallVec<[&Slice; 16]> = SmallVec::new();
        let bindings: Bindings = buffers
            .iter()
            .map(|b| {
                bound.iter().position(|x| *x == b).unwrap_or_else(|| {
                    bound.push(b);
                    bound.len() - 1
                })
            })
            .collect();
        let long = arguments.iter().any(|a| {
            let size = match a.ty {
                Ty::I32 | Ty::U32 => a.bits as u32 as u64,
                Ty::I64 | Ty::U64 => a.bits,
                _ => 0,
            };
            (LONG_LOOP..1 << 31).contains(&size)
        });
        let v = p.bound(&bindings, long)?;
        let at = self.params.len().next_multiple_of(q.ring_align as usize);
        if (at + PARAM_BYTES as usize) as u64 > RING {
            self.hand_over();
        }
        let at = self.params.len().next_multiple_of(q.ring_align as usize);
        self.params.resize(at + p.params.1 as usize, 0);
        for (a, place) in arguments.iter().zip(&p.params.0) {
            let n = a.ty.size().min(8);
            let place = at + *place as usize;
            self.params[place..place + n].copy_from_slice(&a.bits.to_le_bytes()[..n]);
        }
        let entries: SmallVec<[wgpu::BindGroupEntry<'_>; 16]> = bound
            .iter()
            .enumerate()
            .map(|(i, b)| wgpu::BindGroupEntry { binding: i as u32, resource: b.binding() })
            .collect();
        let group = q.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &v.layout,
            entries: &entries,
        });
        if self.pass.is_none() {
            self.pass = Some(self.encoder().begin_compute_pass(&Default::default()).forget_lifetime());
        }
        if let Some(pass) = &mut self.pass {
            pass.set_pipeline(&v.pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.set_bind_group(1, &q.ring_group, &[at as u32]);
            pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
        }
        Ok(())
    }

    fn copy_bytes(
        &mut self,
        from: &Slice,
        src_offset: usize,
        to: &Slice,
        dst_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let p = self.queue.byte_copy()?;
        let word = |n: usize| Argument { ty: Ty::U32, bits: n as u64 };
        let arguments = [word(bytes), word(src_offset), word(dst_offset)];
        let groups = kernel::Launch::fold(bytes.div_ceil(64) as u64, self.queue.max_groups);
        self.dispatch(p, groups, &[from.clone(), to.clone()], &arguments)
    }

    /// Submits the encoded commands.
    fn hand_over(&mut self) {
        self.pass = None;
        if !self.params.is_empty() {
            // `write_buffer` takes effect before the commands of this submission and after those of earlier
            // ones, so the ring is reused from the start.
            self.params.resize(self.params.len().next_multiple_of(4), 0);
            self.queue.raw.write_buffer(&self.queue.ring, 0, &self.params);
            self.params.clear();
        }
        if let Some(e) = self.encoder.take() {
            self.queue.raw.submit([e.finish()]);
        }
    }

    /// Submits the enqueued commands. If they are timed, waits for their times.
    fn flush(&mut self) -> Result<()> {
        let q = self.queue;
        let n = self.timed.len() as u32;
        let Some(c) = q.clock.as_ref().filter(|_| n > 0) else {
            self.hand_over();
            return Ok(());
        };
        self.encoder().resolve_query_set(&c.set, 0..2 * n, &c.resolved, 0);
        self.hand_over();
        let mut bytes = vec![0; 2 * n as usize * 8];
        q.read_raw(&mut self.state, &c.resolved, 0, &mut bytes)?;
        let ticks: Vec<u64> =
            bytes.chunks_exact(8).map(|b| b.iter().rev().fold(0, |v, b| v << 8 | *b as u64)).collect();
        for (did, t) in std::mem::take(&mut self.timed).into_iter().zip(ticks.chunks_exact(2)) {
            let nanoseconds = if did { (t[1].saturating_sub(t[0]) as f64 * c.period) as u64 } else { 0 };
            self.state.done.push(Timing { nanoseconds });
        }
        Ok(())
    }
}

/// No condition of [`Actions`] matters for memory safety here: `wgpu` checks ranges and bindings.
impl Actions<Core> for Submission<'_> {
    unsafe fn launch(
        &mut self,
        p: &WgProgram,
        groups: [u32; 3],
        buffers: &[&WgBuffer],
        arguments: &[Argument],
    ) -> Result<()> {
        if groups.contains(&0) {
            return self.note(false);
        }
        let mut slices: SmallVec<[Slice; 16]> = buffers.iter().map(|b| b.slice()).collect();
        if p.signature.faults {
            slices.push(Slice::whole(self.fault));
            self.faulted = true;
        }
        self.stamp(0);
        self.dispatch(p, groups, &slices, arguments)?;
        self.stamp(1);
        self.note(true)
    }

    unsafe fn copy(&mut self, src: (&WgBuffer, usize), dst: (&WgBuffer, usize), bytes: usize) -> Result<()> {
        if bytes == 0 {
            return self.note(false);
        }
        self.stamp(0);
        let (from, to) = (src.0.slice(), dst.0.slice());
        let words = src.1.is_multiple_of(4) && dst.1.is_multiple_of(4);
        // Bytes past the end of a buffer are padding.
        let whole = bytes.is_multiple_of(4) || dst.1 + bytes == memory_end(dst.0);
        if words && whole && from.buffer != to.buffer {
            let n = bytes.next_multiple_of(4) as u64;
            let (start, end) = (from.offset + src.1 as u64, to.offset + dst.1 as u64);
            self.encoder().copy_buffer_to_buffer(&from.buffer, start, &to.buffer, end, n);
        } else {
            self.copy_bytes(&from, src.1, &to, dst.1, bytes)?;
        }
        self.stamp(1);
        self.note(true)
    }
}

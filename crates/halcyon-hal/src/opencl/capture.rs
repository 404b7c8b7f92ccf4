//! Captures as command buffers of `cl_khr_command_buffer`.
//!
//! A command buffer belongs to one queue, because its kernels report faults in the queue's fault word. So a
//! capture records one for the device's queue, and one for each stream that launches it.
//!
//! The values that change between launches are in one buffer of 64-bit words. Kernels that use any of them
//! have a second entry point ([`render::render_indirect`]) that reads them from the buffer. If the values
//! differ from those of the queue's last launch, a launch first copies the words from host memory, in queue
//! order. That memory is a ring of entries, so that several launches can be pending.
//!
//! Each recorded launch has a kernel object of its own. OpenCL records the arguments that are set at that
//! time; but PoCL before 5.0 runs with those that are set when the command buffer is enqueued.
//!
//! Command buffers keep their buffers' objects alive. A capture may not keep memory that the pool returns to
//! the driver, so it ends when that happens ([`Recordings::end`]), and its commands must be captured again.

use super::command_buffer::{CommandBuffers, Failed, Recorder};
use super::device::OpenClDevice;
use super::memory;
use super::program::{ClProgram, Entry};
use super::queue::{self, Queue};
use super::stream::{Point, Shared};
use super::sys::{self, CommandBuffer, CommandQueue, Event, Kernel, Memory as MemoryObject, Owned};
use crate::commands::DeviceInstance;
use crate::hazard::Access;
use crate::queues::Mark;
use crate::recorded::{self, CapturedBuffer, Varying};
use crate::validate::{self, Argument};
use crate::{BufferRef, Capture, Command, Counters, Counts, Error, Program, Recording, Result, capture};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::{Ty, const_bits};
use halcyon_ir::render::{self, Indirect, Language};
use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Number of entries of the ring: how many launches that copy words can be pending.
const RING_ENTRIES: usize = 16;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the content consistent, so a poisoned lock is safe to use.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// A command as it is recorded for each queue.
#[derive(Debug)]
enum Recordable {
    Launch {
        entry: Arc<Entry>,
        global: [usize; 3],
        local: [usize; 3],
        buffers: Vec<Arc<Owned<MemoryObject>>>,
        faults: bool,
        /// The arguments that do not vary.
        arguments: Vec<Argument>,
        /// The first word and the number of words of those that do.
        words: (usize, usize),
    },
    Copy {
        src: (Arc<Owned<MemoryObject>>, usize),
        dst: (Arc<Owned<MemoryObject>>, usize),
        bytes: usize,
    },
}

/// The commands of a capture, and their command buffers.
#[derive(Debug)]
struct Recorded {
    commands: Vec<Recordable>,
    of: Vec<Arc<OfQueue>>,
}

/// What a capture has recorded; nothing, if it has ended.
#[derive(Debug, Default)]
pub(super) struct Recordings(Mutex<Option<Recorded>>);

impl Recordings {
    /// Releases the command buffers, and with them the objects of the buffers. The capture cannot be launched
    /// afterwards. Does not wait.
    pub(super) fn end(&self) {
        // The lock is not held while the objects are released.
        let ended = lock(&self.0).take();
        drop(ended);
    }
}

/// The words of a queue's launches.
#[derive(Debug)]
struct Ring {
    /// Room for the words of each entry.
    entries: Vec<u64>,
    /// For each entry, the event after the copy that reads it.
    copied: Vec<Option<Owned<Event>>>,
    now: usize,
    /// The words that the last launch copied; `None` if they are unknown.
    sent: Option<Vec<u64>>,
    words: Vec<u64>,
}

/// The command buffer for one queue. The objects are released in this order.
#[derive(Debug)]
struct Objects {
    /// `None` if the commands have no work.
    buffer: Option<Owned<CommandBuffer>>,
    _kernels: Vec<Owned<Kernel>>,
    _parts: Vec<Owned<MemoryObject>>,
    words: Option<Owned<MemoryObject>>,
    ring: Mutex<Ring>,
    _buffers: Vec<Arc<Owned<MemoryObject>>>,
    queue: Arc<Owned<CommandQueue>>,
    open: Weak<()>,
}

/// [`Objects`], which are released when the queue has run what was launched.
#[derive(Debug)]
struct OfQueue {
    shared: Arc<Shared>,
    objects: Option<Objects>,
}

impl OfQueue {
    fn is_of(&self, queue: &Queue) -> bool {
        self.objects.as_ref().is_some_and(|o| o.queue.raw() == queue.raw())
    }

    /// Whether the queue may launch the command buffer again.
    fn is_used(&self) -> bool {
        self.objects.as_ref().is_some_and(|o| o.open.strong_count() > 0)
    }
}

impl Drop for OfQueue {
    fn drop(&mut self) {
        let Some(objects) = self.objects.take() else { return };
        let (api, id) = (self.shared.api, &self.shared.id);
        // A driver need not keep kernels' arguments alive until a command buffer has run.
        let marker = queue::marker(api, &objects.queue)
            .map_err(|code| sys::driver_error(id, "clEnqueueMarkerWithWaitList", code));
        let queue = objects.queue.clone();
        let later = marker.and_then(|event| {
            let point = Point::new(api, id.as_str().into(), event);
            // If the driver refuses the callback, this waits.
            point.when_done(move |_| drop(objects))
        });
        // SAFETY: the queue is live.
        let flushed = sys::check(id, "clFlush", unsafe { (api.clFlush)(queue.raw()) });
        if let Err(e) = later.and(flushed) {
            tracing::debug!(device = %id, "the end of a captured plan: {e}");
        }
    }
}

/// A capture.
#[derive(Debug)]
pub(crate) struct ClCapture {
    functions: Arc<CommandBuffers>,
    recordings: Arc<Recordings>,
    buffers: Vec<CapturedBuffer>,
    /// The word and the type of each variable.
    variables: Vec<(usize, Ty)>,
    words: usize,
    /// Whether a kernel can fault.
    faults: bool,
    commands: usize,
    /// Counters of one launch.
    counts: Counters,
    _programs: Vec<Arc<dyn Program>>,
    shared: Arc<Shared>,
}

impl OpenClDevice {
    /// The entry point of a program that reads these parameters from a buffer.
    fn indirect(&self, p: &ClProgram, params: &[usize]) -> Result<Arc<Entry>> {
        // The lock is held while compiling, so that two threads do not build the same entry point.
        let mut all = lock(&p.indirect);
        if let Some((_, e)) = all.iter().find(|(of, _)| of == params) {
            return Ok(e.clone());
        }
        let indirect = Indirect { fault: false, params: params.to_vec() };
        let source = render::render_indirect(&p.ir, Language::OpenCl, &indirect)?;
        let entry =
            source.entries.first().ok_or_else(|| Error::internal("a rendered kernel without an entry"))?;
        let _driver = crate::driver_output::capture("opencl");
        let built = Arc::new(self.build(&p.ir.name, &source.text, entry, p.ir.items())?);
        all.push((params.to_vec(), built.clone()));
        Ok(built)
    }

    /// A command as it is recorded. `None` if it has no work.
    fn recordable(
        &self,
        by: &Arc<Recordings>,
        command: &Command<'_>,
        varying: &[Varying],
        words: &mut usize,
    ) -> Result<Option<Recordable>> {
        let shared = self.shared();
        Ok(match command {
            Command::Launch { program, groups, buffers, params, fault } => {
                let p = shared.program(program)?;
                let given = p.signature.arguments(buffers.len(), params, *fault)?;
                let indices: Vec<usize> = varying.iter().map(|v| v.param).collect();
                let first = *words;
                *words += self.words(varying.len());
                if groups.contains(&0) {
                    return Ok(None);
                }
                let mut objects = vec![];
                for (i, b) in buffers.iter().enumerate() {
                    let own = match p.signature.buffers.get(i).is_some_and(|d| d.write) {
                        true => shared.writable("launch", b)?,
                        false => shared.buffer("launch", b)?,
                    };
                    objects.push(own.recorded_object(by));
                }
                let fixed = given.iter().enumerate().filter(|(k, _)| !indices.contains(k));
                Some(Recordable::Launch {
                    entry: match indices.is_empty() {
                        true => p.entry.clone(),
                        false => self.indirect(p, &indices)?,
                    },
                    global: queue::grid(*groups, p.workgroup)?,
                    local: p.workgroup.map(|n| n as usize),
                    buffers: objects,
                    faults: p.signature.faults,
                    arguments: fixed.map(|(_, a)| *a).collect(),
                    words: (first, varying.len()),
                })
            }
            Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                let (from, to) = (shared.buffer("copy", src)?, shared.writable("copy", dst)?);
                let same = std::ptr::eq(from, to);
                validate::copy([src.bytes(), *src_offset], [dst.bytes(), *dst_offset], *bytes, same)?;
                let (from, to) = (from.recorded_object(by), to.recorded_object(by));
                let (src, dst) = ((from, *src_offset), (to, *dst_offset));
                (*bytes > 0).then_some(Recordable::Copy { src, dst, bytes: *bytes })
            }
            Command::Library { kernel, .. } => {
                let what = format!("{} is a library kernel of another device", kernel.name());
                return Err(Error::argument("capture", what));
            }
        })
    }

    /// The words that a launch with `n` variables takes of the argument buffer. Each launch has a sub-buffer.
    fn words(&self, n: usize) -> usize {
        n.next_multiple_of(self.sub_buffer_alignment().div_ceil(8))
    }
}

impl ClCapture {
    /// # Errors
    /// The errors of [`Device::capture`](crate::Device::capture).
    pub(super) fn new(d: &OpenClDevice, r: &Recording<'_>) -> Result<ClCapture> {
        let shared = d.shared();
        let refused = |what: &str, next: &str| {
            Error::unsupported(format!("captured commands on {}: {what}", shared.id), next)
        };
        let functions = d.command_buffers().map_err(|why| refused(why, "Submit the commands"))?;
        if d.queue().profiles() {
            let what = "profiling is on, and a launch of a capture is timed as a whole";
            return Err(refused(what, "Open the device without profiling"));
        }
        let varying = recorded::varying(&**shared, r)?;
        if varying.iter().any(|v| !v.is_empty()) && !d.has_words() {
            return Err(refused("it has no 64-bit integers for run-time arguments", "Submit the commands"));
        }
        // While this guard is held, no buffer is moved, so its object stays the same.
        let still = d.queue().begin();
        let buffers = recorded::buffers(&**shared, r)?;
        let recordings = Arc::new(Recordings::default());
        let (mut words, mut variables) = (0, vec![(0, Ty::I32); r.variables.len()]);
        let (mut commands, mut counts, mut programs) = (vec![], Counters::default(), vec![]);
        for (c, varying) in r.commands.iter().zip(&varying) {
            for (k, v) in varying.iter().enumerate() {
                variables[v.variable] = (words + k, v.ty);
            }
            let made = d.recordable(&recordings, c, varying, &mut words)?;
            match &made {
                Some(Recordable::Launch { .. }) => counts.launches += 1,
                Some(Recordable::Copy { .. }) => counts.device_copies += 1,
                None => {}
            }
            commands.extend(made);
            if let Command::Launch { program, .. } = c {
                programs.push((*program).clone());
            }
        }
        drop(still);
        let faults = commands.iter().any(|c| matches!(c, Recordable::Launch { faults: true, .. }));
        *lock(&recordings.0) = Some(Recorded { commands, of: vec![] });
        let capture = ClCapture {
            functions: functions.clone(),
            recordings,
            buffers,
            variables,
            words,
            faults,
            commands: r.commands.len(),
            counts,
            _programs: programs,
            shared: shared.clone(),
        };
        // Errors of the driver are found here and not at the first launch.
        capture.of_queue(d.queue())?;
        Ok(capture)
    }

    /// Returns the capture if this device recorded it.
    pub(super) fn of<'a>(shared: &Arc<Shared>, c: &'a dyn Capture) -> Result<&'a ClCapture> {
        let own = |r: &&ClCapture| Arc::ptr_eq(&r.shared, shared);
        let r = c.as_any().downcast_ref::<ClCapture>().filter(own);
        r.ok_or_else(|| capture::foreign(c, &shared.id))
    }

    /// The memory that a launch uses.
    pub(super) fn access(&self, buffers: &[&BufferRef]) -> Access {
        recorded::access(&*self.shared, buffers, &self.buffers)
    }

    /// Enqueues a launch. Returns `false` if a buffer is not at its captured address or is smaller than it
    /// was at the capture, or if the capture has ended. The caller orders the launch with other queues.
    pub(super) fn launch(&self, queue: &Queue, buffers: &[&BufferRef], values: &[Scalar]) -> Result<bool> {
        recorded::check("buffers", buffers.len(), self.buffers.len())?;
        recorded::check("values", values.len(), self.variables.len())?;
        // The queue's lock is held, so no buffer is moved meanwhile.
        let mut s = queue.begin();
        if !recorded::are_there(&*self.shared, buffers, &self.buffers)? {
            return Ok(false);
        }
        let Some(own) = self.of_queue(queue)? else { return Ok(false) };
        let Some(objects) = &own.objects else { return Ok(false) };
        let mut ring = lock(&objects.ring);
        for ((w, ty), v) in self.variables.iter().zip(values) {
            ring.words[*w] = const_bits(*ty, *v);
        }
        if ring.sent.as_ref() != Some(&ring.words) {
            self.send(objects, &mut ring, queue)?;
        }
        if let Some(b) = &objects.buffer {
            // SAFETY: the command buffer was recorded for this queue. The checks above found the buffers at
            // their captured addresses, so their objects are those of the commands; the caller holds them
            // until the launch is enqueued, and `OfQueue` until it has run. The pool reuses a freed buffer
            // only for work that runs later.
            unsafe { s.launch_buffer(&self.functions, b, self.faults) }?;
        }
        s.flush()?;
        let (c, n) = (&self.shared.counts, &self.counts);
        for (counter, n) in
            [(&c.launches, n.launches), (&c.device_copies, n.device_copies), (&c.capture_launches, 1)]
        {
            Counts::add(counter, n);
        }
        Ok(true)
    }

    /// Copies the words to the argument buffer, from the next entry of the ring. Waits if a pending copy
    /// still reads that entry.
    fn send(&self, objects: &Objects, ring: &mut Ring, queue: &Queue) -> Result<()> {
        let Some(words) = &objects.words else { return Ok(()) };
        ring.now = (ring.now + 1) % RING_ENTRIES;
        if let Some(event) = ring.copied[ring.now].take() {
            Point::new(self.shared.api, self.shared.id.as_str().into(), event).wait()?;
        }
        // If a call below fails, the content of the argument buffer is unknown.
        ring.sent = None;
        let (first, n) = (ring.now * self.words, self.words);
        ring.entries[first..first + n].copy_from_slice(&ring.words);
        let from = ring.entries[first..first + n].as_ptr().cast();
        // SAFETY: the argument buffer has `8 n` bytes. The entry stays as it is until its event, because this
        // function waits for it before it writes the entry again, and `OfQueue` releases the ring after all
        // work of the queue.
        let event = unsafe { queue.write_raw_later(words.raw(), 0, from, 8 * n) }?;
        ring.copied[ring.now] = Some(event);
        ring.sent = Some(ring.words.clone());
        Counts::add(&self.shared.counts.uploads, 1);
        Counts::add(&self.shared.counts.uploaded_bytes, 8 * n as u64);
        Ok(())
    }

    /// The command buffer for a queue, which is recorded at its first launch there. `None` if the capture has
    /// ended.
    fn of_queue(&self, queue: &Queue) -> Result<Option<Arc<OfQueue>>> {
        // Nothing may ask for the pool's lock while this lock is held: a thread that ends the capture holds
        // the pool's lock and waits for this one. So errors are made without the pool's statistics.
        let mut recorded = lock(&self.recordings.0);
        let Some(Recorded { commands, of }) = &mut *recorded else { return Ok(None) };
        if let Some(own) = of.iter().find(|o| o.is_of(queue)) {
            return Ok(Some(own.clone()));
        }
        let objects = self.record(commands, queue)?;
        let own = Arc::new(OfQueue { shared: self.shared.clone(), objects: Some(objects) });
        of.retain(|o| o.is_used());
        of.push(own.clone());
        Ok(Some(own))
    }

    /// Records the commands for a queue.
    fn record(&self, commands: &[Recordable], queue: &Queue) -> Result<Objects> {
        let (api, id) = (self.shared.api, self.shared.id.as_str());
        let failed = |(call, code): Failed| sys::driver_error(id, call, code);
        let words = match self.words {
            0 => None,
            n => Some(
                memory::buffer(api, &self.shared.context, 8 * n)
                    .map_err(|c| failed(("clCreateBuffer", c)))?,
            ),
        };
        let (mut kernels, mut parts, mut buffers) = (vec![], vec![], vec![]);
        let object = queue.object();
        let mut recorder = Recorder::new(&self.functions, &object).map_err(failed)?;
        for c in commands {
            match c {
                Recordable::Launch {
                    entry,
                    global,
                    local,
                    buffers: own,
                    faults,
                    arguments,
                    words: (at, n),
                } => {
                    let kernel = entry.instance(api, id)?;
                    let mut index = 0;
                    let mut set = |bytes: usize, value: *const c_void| {
                        // SAFETY: every call of `set` below passes a pointer to `bytes` bytes, which the
                        // library copies before it returns. Nothing else uses this kernel object.
                        let code = unsafe { (api.clSetKernelArg)(kernel.raw(), index, bytes, value) };
                        index += 1;
                        sys::check(id, "clSetKernelArg", code)
                    };
                    let handles = own.iter().map(|b| b.raw()).chain(faults.then(|| queue.fault()));
                    for h in handles {
                        set(size_of_val(&h), (&raw const h).cast())?;
                    }
                    for a in arguments {
                        queue::with_argument(a, &mut set)?;
                    }
                    if let Some(words) = words.as_ref().filter(|_| *n > 0) {
                        let part = memory::sub_buffer(api, words, [8 * at, 8 * n])
                            .map_err(|c| failed(("clCreateSubBuffer", c)))?;
                        let h = part.raw();
                        set(size_of_val(&h), (&raw const h).cast())?;
                        parts.push(part);
                    }
                    buffers.extend(own.iter().cloned());
                    // SAFETY: all arguments are set. `Objects` keeps the buffers, the words and the kernel,
                    // and is released after the command buffer. By the driver contract, the caller of
                    // `capture` passes buffers that are large enough.
                    unsafe { recorder.launch(&kernel, global, local) }.map_err(failed)?;
                    kernels.push(kernel);
                }
                Recordable::Copy { src, dst, bytes } => {
                    buffers.extend([src.0.clone(), dst.0.clone()]);
                    // SAFETY: `validate::copy` checked the ranges. `Objects` keeps the objects.
                    unsafe { recorder.copy((&src.0, src.1), (&dst.0, dst.1), *bytes) }.map_err(failed)?;
                }
            }
        }
        let buffer = if commands.is_empty() { None } else { Some(recorder.end().map_err(failed)?) };
        let n = self.words;
        let ring = Mutex::new(Ring {
            entries: vec![0; n * RING_ENTRIES],
            copied: (0..RING_ENTRIES).map(|_| None).collect(),
            now: 0,
            sent: None,
            words: vec![0; n],
        });
        Ok(Objects {
            buffer,
            _kernels: kernels,
            _parts: parts,
            words,
            ring,
            _buffers: buffers,
            queue: object,
            open: queue.open(),
        })
    }
}

impl Capture for ClCapture {
    fn commands(&self) -> usize {
        self.commands
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

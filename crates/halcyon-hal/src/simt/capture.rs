//! Captures as CUDA or HIP graphs.
//!
//! Commands are recorded by stream capture on a dedicated stream, not by building graph nodes: stream capture
//! also records the work that vendor libraries enqueue, and CUDA and HIP have long supported it. The capture
//! mode restricts only calls of the recording thread.
//!
//! The values that change between launches are in one buffer of 64-bit words: the values of variables, and
//! the address of the queue's fault word for each kernel that can fault. Kernels that use any of these have a
//! second entry point ([`render::render_indirect`]) that reads them from the buffer. If the words differ from
//! the buffer's content, or if another queue copied the content there, a launch copies the words from
//! page-locked memory in queue order. That memory is a ring of entries, so that several launches can be
//! pending.

use super::device::{Shared, SimtDevice};
use super::memory::{Memory, SimtPages};
use super::program::{Function, SimtProgram};
use super::queue::{Point, Queue, Submission};
use super::sys::{self, Context, GraphFunctions, Handle};
use crate::commands::DeviceInstance;
use crate::hazard::Access;
use crate::queues::{Fenced, Mark};
use crate::recorded::{self, CapturedBuffer};
use crate::{
    BufferRef, Capture, Command, Counters, Counts, Error, LibraryKernel, Program, Recording, Result, capture,
    validate,
};
use halcyon_ir::Scalar;
use halcyon_ir::kernel::{Ty, const_bits};
use halcyon_ir::render::{self, Indirect};
use smallvec::SmallVec;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

/// Number of entries of the ring: how many launches that copy words can be pending.
const RING_ENTRIES: usize = 16;

/// A CUDA or HIP graph that is not instantiated.
struct Template<'a> {
    graphs: &'a GraphFunctions,
    raw: Handle,
}

impl Drop for Template<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: `end` created `raw`, and only this call destroys it. Graphs instantiated from it are
            // independent of it.
            unsafe { (self.graphs.destroy)(self.raw) };
        }
    }
}

/// An instantiated graph.
#[derive(Debug)]
struct Exec {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: `raw` is an opaque handle of CUDA or HIP, whose functions may be called from any thread.
unsafe impl Send for Exec {}
// SAFETY: `raw` is never modified; launches are serialised by the lock of [`Ring`].
unsafe impl Sync for Exec {}

impl Drop for Exec {
    fn drop(&mut self) {
        if let (Ok(_visit), Ok(g)) = (self.context.visit(), &self.context.api.graphs) {
            // SAFETY: `instantiate` created `raw`, and only this call destroys it. No launch is pending:
            // dropping `SimtCapture` waits for all launches first.
            let code = unsafe { (g.exec_destroy)(self.raw) };
            if code != sys::SUCCESS {
                let code = sys::code_name(self.context.api.family, code);
                tracing::warn!(device = self.context.id, %code, "a graph could not be destroyed");
            }
        }
    }
}

/// The mutable state shared by launches.
#[derive(Debug)]
struct Ring {
    /// Page-locked memory with room for all words of the argument buffer, once for each entry of the ring.
    pages: Option<SimtPages>,
    /// For each entry, the event after the last launch that used it.
    entries: Vec<Option<Point>>,
    /// The entry that was used last.
    now: usize,
    /// The content of the argument buffer. `by` identifies the queue that copied it there; if `by` is `None`,
    /// the content is unknown.
    sent: Vec<u64>,
    by: Option<u64>,
    /// The words of the current launch.
    words: Vec<u64>,
}

impl Ring {
    /// Marks the end of the launch that uses the current entry.
    fn mark(&mut self, queue: &Queue) -> Result<()> {
        match &self.entries[self.now] {
            Some(p) => queue.mark_again(p)?,
            None => self.entries[self.now] = Some(queue.mark()?),
        }
        Ok(())
    }
}

/// A capture.
#[derive(Debug)]
pub(crate) struct SimtCapture {
    /// This field is first, so that the graph is dropped before the things that it uses.
    exec: Exec,
    ring: Mutex<Ring>,
    buffers: Vec<CapturedBuffer>,
    /// Index and type of each variable's word.
    variables: Vec<(usize, Ty)>,
    /// Indices of words that hold the address of the queue's fault word.
    faults: Vec<usize>,
    /// The argument buffer; it never moves.
    arguments: Option<Memory>,
    commands: usize,
    /// Counters of one launch.
    counts: Counters,
    _functions: Vec<Arc<Function>>,
    _programs: Vec<Arc<dyn Program>>,
    _libraries: Vec<Arc<dyn LibraryKernel>>,
    shared: Arc<Shared>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic leaves the events and words consistent, so a poisoned lock is safe to use.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// How to record a launch whose kernel reads words of the argument buffer.
struct IndirectLaunch {
    function: Arc<Function>,
    indirect: Indirect,
    first: usize,
}

impl SimtDevice {
    /// The entry point of a program that reads these arguments from a buffer.
    fn indirect(&self, p: &SimtProgram, indirect: &Indirect) -> Result<Arc<Function>> {
        // The lock is held while compiling, so that two threads do not build the same entry point.
        let mut all = lock(&p.indirect);
        if let Some((_, f)) = all.iter().find(|(i, _)| i == indirect) {
            return Ok(f.clone());
        }
        let source = render::render_indirect(&p.kernel, self.shared.context.api.family.language, indirect)?;
        let entry =
            source.entries.first().ok_or_else(|| Error::internal("a rendered kernel without an entry"))?;
        let f = Arc::new(self.build(&p.kernel.name, &source.text, entry, p.kernel.items())?);
        all.push((indirect.clone(), f.clone()));
        Ok(f)
    }
}

/// The words of each command, their total, and the words of variables and fault addresses.
#[derive(Default)]
struct Layout {
    commands: Vec<Option<IndirectLaunch>>,
    variables: Vec<(usize, Ty)>,
    faults: Vec<usize>,
    words: usize,
}

impl Layout {
    fn of(d: &SimtDevice, r: &Recording<'_>) -> Result<Layout> {
        let shared = &d.shared;
        let mut l = Layout { variables: vec![(0, Ty::I32); r.variables.len()], ..Layout::default() };
        for (c, own) in r.commands.iter().zip(recorded::varying(&**shared, r)?) {
            let Command::Launch { program, .. } = c else {
                l.commands.push(None);
                continue;
            };
            let p = shared.program(program)?;
            let indirect =
                Indirect { fault: p.signature.faults, params: own.iter().map(|v| v.param).collect() };
            if indirect == Indirect::default() {
                l.commands.push(None);
                continue;
            }
            let first = l.words;
            if indirect.fault {
                l.faults.push(first);
            }
            for (k, v) in own.iter().enumerate() {
                l.variables[v.variable] = (first + indirect.fault as usize + k, v.ty);
            }
            l.words += indirect.fault as usize + own.len();
            l.commands.push(Some(IndirectLaunch { function: d.indirect(p, &indirect)?, indirect, first }));
        }
        Ok(l)
    }
}

impl SimtCapture {
    /// # Errors
    /// The errors of [`Device::capture`].
    pub(super) fn new(d: &SimtDevice, r: &Recording<'_>) -> Result<SimtCapture> {
        let shared = &d.shared;
        let (context, api) = (&shared.context, shared.context.api);
        let refused = |what: String, next: &str| {
            Err(Error::unsupported(format!("captured commands on {}: {what}", context.id), next))
        };
        let graphs = match &api.graphs {
            Ok(g) => g,
            Err(f) => {
                return refused(format!("{} has no function {f}", api.library), "Update the GPU's driver");
            }
        };
        if d.queue.profiles() {
            let what = "profiling is on, and a launch of a capture is timed as a whole".to_string();
            return refused(what, "Open the device without profiling");
        }
        let layout = Layout::of(d, r)?;
        let full = |bytes: usize, what: &str, why: String| Error::OutOfMemory {
            device: context.id.clone(),
            what: format!("{what} for the arguments of captured commands: {why}"),
            requested: bytes as u64,
            free: 0,
            total: 0,
            next: "Submit the commands".into(),
        };
        let (mut arguments, mut pages) = (None, None);
        if layout.words > 0 {
            let (one, all) = (8 * layout.words, 8 * layout.words * RING_ENTRIES);
            arguments = Some(Memory::new(context, one).map_err(|why| full(one, "memory", why))?);
            pages = Some(SimtPages::new(context, all).map_err(|why| full(all, "page-locked memory", why))?);
        }
        let mut recorder = lock(&d.recorder);
        // The queue of a failed capture is not put back, because it may be unusable.
        let queue = match recorder.take() {
            Some(q) => q,
            None => {
                let counts = Arc::new(Counts::default());
                Queue::new(context, d.pool.clone(), counts, false, false)?
            }
        };
        for c in r.commands {
            if let Command::Library { kernel, .. } = c {
                let k = shared.kernel(kernel)?;
                // SAFETY: `queue` owns the stream. The stream and the kernel belong to this device, and
                // nothing else uses the stream while `recorder` is locked.
                unsafe { k.prepare(queue.raw()) }?;
            }
        }
        // While this guard is held, no buffer is moved, so the addresses that are read stay valid.
        let still = d.queue.begin()?;
        let buffers = recorded::buffers(&**shared, r)?;
        let before = queue.counts().snapshot();
        // SAFETY: the queue owns the stream, which is idle and used by this capture only.
        context.check("beginning a capture", unsafe { (graphs.begin)(queue.raw(), sys::THREAD_LOCAL) })?;
        let recorded = record(shared, &queue, r, &layout, arguments.as_ref());
        let mut template = Template { graphs, raw: std::ptr::null_mut() };
        // SAFETY: this thread began the capture above; one handle is written.
        let code = unsafe { (graphs.end)(queue.raw(), &mut template.raw) };
        recorded?;
        context.check("ending a capture", code)?;
        let after = queue.counts().snapshot();
        *recorder = Some(queue);
        drop(still);
        let mut raw: Handle = std::ptr::null_mut();
        // SAFETY: `template.raw` is a complete graph; one handle is written; no flags are set.
        let code = unsafe { (graphs.instantiate)(&mut raw, template.raw, 0) };
        context.check("instantiating a graph", code)?;
        let exec = Exec { context: context.clone(), raw };
        let programs = r.commands.iter().filter_map(|c| match c {
            Command::Launch { program, .. } => Some((*program).clone()),
            _ => None,
        });
        let libraries = r.commands.iter().filter_map(|c| match c {
            Command::Library { kernel, .. } => Some((*kernel).clone()),
            _ => None,
        });
        let n = layout.words;
        Ok(SimtCapture {
            exec,
            ring: Mutex::new(Ring {
                pages,
                entries: (0..RING_ENTRIES).map(|_| None).collect(),
                now: 0,
                sent: vec![0; n],
                by: None,
                words: vec![0; n],
            }),
            buffers,
            variables: layout.variables,
            faults: layout.faults,
            arguments,
            commands: r.commands.len(),
            counts: Counters {
                launches: after.launches - before.launches,
                library_calls: after.library_calls - before.library_calls,
                device_copies: after.device_copies - before.device_copies,
                ..Counters::default()
            },
            _functions: layout.commands.into_iter().flatten().map(|w| w.function).collect(),
            _programs: programs.collect(),
            _libraries: libraries.collect(),
            shared: shared.clone(),
        })
    }

    /// Returns the capture if this device recorded it.
    pub(super) fn of<'a>(shared: &Arc<Shared>, c: &'a dyn Capture) -> Result<&'a SimtCapture> {
        let own = |r: &&SimtCapture| Arc::ptr_eq(&r.shared, shared);
        let r = c.as_any().downcast_ref::<SimtCapture>().filter(own);
        r.ok_or_else(|| capture::foreign(c, &shared.context.id))
    }

    /// The memory that a launch uses. Ignores invalid buffers, because they are reported when the launch is
    /// enqueued.
    pub(super) fn access(&self, buffers: &[&BufferRef]) -> Access {
        let mut a = recorded::access(&*self.shared, buffers, &self.buffers);
        if let Some(words) = &self.arguments {
            a.writes.add(words.at() as usize, 1);
        }
        a
    }

    /// Enqueues a launch. Returns `false` if a buffer is not at its captured address or is smaller than it
    /// was at the capture. The caller orders the launch with other queues.
    pub(super) fn launch(&self, queue: &Queue, buffers: &[&BufferRef], values: &[Scalar]) -> Result<bool> {
        recorded::check("buffers", buffers.len(), self.buffers.len())?;
        recorded::check("values", values.len(), self.variables.len())?;
        let mut ring = lock(&self.ring);
        let mut s = queue.begin()?;
        if !recorded::are_there(&*self.shared, buffers, &self.buffers)? {
            return Ok(false);
        }
        self.faults.iter().for_each(|w| ring.words[*w] = queue.fault_at());
        for ((w, ty), v) in self.variables.iter().zip(values) {
            ring.words[*w] = const_bits(*ty, *v);
        }
        // If a call below fails, the content of the argument buffer is unknown.
        let by = ring.by.take();
        let sent = by == Some(queue.fault_at()) && ring.sent == ring.words;
        if !sent {
            self.send(&mut ring, queue)?;
        }
        let graphs = self.shared.context.api.graphs.as_ref();
        let graphs = graphs.map_err(|f| Error::internal(format!("there is a graph, but no function {f}")))?;
        // SAFETY: the checks above found the buffers at their captured addresses and at least as large as
        // captured. They stay allocated, because the pool reuses a freed buffer only for work that runs
        // later. `self` keeps everything else that the graph uses until the graph has run.
        let launched = unsafe { s.launch_graph(graphs, self.exec.raw, !self.faults.is_empty()) };
        if let Err(e) = launched.and_then(|()| ring.mark(queue)) {
            // Wait for the queue now: without a mark, no later launch would wait until the copy has read this
            // entry of the ring.
            queue.finish()?;
            return Err(e);
        }
        ring.by = Some(queue.fault_at());
        let (c, n) = (&self.shared.counts, &self.counts);
        for (counter, n) in [
            (&c.launches, n.launches),
            (&c.library_calls, n.library_calls),
            (&c.device_copies, n.device_copies),
            (&c.capture_launches, 1),
        ] {
            Counts::add(counter, n);
        }
        Ok(true)
    }

    /// Copies the words to the argument buffer, through the next entry of the ring. Waits if a pending launch
    /// still uses that entry.
    fn send(&self, ring: &mut Ring, queue: &Queue) -> Result<()> {
        ring.now = (ring.now + 1) % RING_ENTRIES;
        if let Some(p) = &ring.entries[ring.now] {
            queue.wait_for(p)?;
        }
        let (Some(pages), Some(words)) = (&ring.pages, &self.arguments) else { return Ok(()) };
        let first = ring.now * ring.words.len();
        // SAFETY: the ring is locked, and the last launch that used this entry has run, because `wait_for`
        // above waited for its mark.
        unsafe { pages.copy_words(first, &ring.words) }?;
        let bytes = 8 * ring.words.len();
        // SAFETY: the argument buffer has `bytes` bytes, and the entry lies within the pages, which
        // `copy_words` checked. The entry is not written again before its launch has run. `SimtCapture` waits
        // for all launches before it drops the pages.
        unsafe { queue.write_raw_later(words.at(), pages.at().cast::<u64>().add(first).cast(), bytes) }?;
        ring.sent.copy_from_slice(&ring.words);
        Counts::add(&self.shared.counts.uploads, 1);
        Counts::add(&self.shared.counts.uploaded_bytes, bytes as u64);
        Ok(())
    }
}

/// Enqueues the commands in a stream that is being captured.
fn record(
    shared: &Shared,
    queue: &Queue,
    r: &Recording<'_>,
    layout: &Layout,
    arguments: Option<&Memory>,
) -> Result<()> {
    for (c, words) in r.commands.iter().zip(&layout.commands) {
        match (c, words, arguments) {
            (Command::Launch { program, groups, buffers, params, fault }, Some(w), Some(at)) => {
                let p = shared.program(program)?;
                let arguments = p.signature.arguments(buffers.len(), params, *fault)?;
                let mut all: SmallVec<[u64; 32]> = SmallVec::new();
                for (i, b) in buffers.iter().enumerate() {
                    let own = match p.signature.buffers.get(i).is_some_and(|d| d.write) {
                        true => shared.writable("launch", b)?,
                        false => shared.buffer("launch", b)?,
                    };
                    all.push(own.address());
                }
                let fixed = |(k, _): &(usize, &validate::Argument)| !w.indirect.params.contains(k);
                all.extend(arguments.iter().enumerate().filter(fixed).map(|(_, a)| a.bits));
                all.push(at.at() + 8 * w.first as u64);
                if !groups.contains(&0) {
                    let mut s: Submission<'_> = queue.begin()?;
                    // SAFETY: `Layout::of` built the function from `p` for this command. The words are the
                    // arguments of its entry point: the buffers, the parameters that do not vary, and the
                    // address of this command's words, which lie inside `at`. `program` and `buffer` checked
                    // the owners. By the driver contract, the caller of `capture` passes buffers that are
                    // large enough.
                    unsafe { s.launch_words(p, &w.function, *groups, all)? };
                    Counts::add(&queue.counts().launches, 1);
                }
            }
            _ => shared.enqueue(queue, std::slice::from_ref(c))?,
        }
    }
    Ok(())
}

impl Drop for SimtCapture {
    fn drop(&mut self) {
        let _visit = self.shared.context.visit();
        // Wait for the launches, because CUDA or HIP might not keep the graph alive until they have run.
        let entries = &self.ring.get_mut().unwrap_or_else(|e| e.into_inner()).entries;
        for p in entries.iter().flatten() {
            if let Err(e) = p.wait() {
                tracing::debug!(device = self.shared.context.id, "waiting for a captured graph failed: {e}");
            }
        }
    }
}

impl Capture for SimtCapture {
    fn commands(&self) -> usize {
        self.commands
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

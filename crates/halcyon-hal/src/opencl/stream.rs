//! Streams: further in-order queues of a device, ordered among each other by OpenCL's events.

use super::memory::ClBuffer;
use super::program::ClProgram;
use super::queue::Queue;
use super::sys::{self, Api, Handle, Owned};
use crate::hazard::Access;
use crate::lanes::{Fenced, Lanes, Mark};
use crate::stream::{Progress, Report};
use crate::validate;
use crate::{BufferRef, Command, Counts, Download, Error, Event, Result, Stream};
use halcyon_ir::data::Bytes;
use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

/// A point of a queue.
#[derive(Debug)]
pub(crate) struct Point {
    api: &'static Api,
    id: Arc<str>,
    event: Owned,
}

impl Point {
    /// What the driver says of it: 0 is done, below that failed.
    fn status(&self) -> Option<i32> {
        let mut status = 0i32;
        // SAFETY: the event is live; the answer is one 32-bit number.
        let code = unsafe {
            (self.api.clGetEventInfo)(
                self.event.raw(),
                sys::EVENT_COMMAND_EXECUTION_STATUS,
                4,
                (&raw mut status).cast(),
                std::ptr::null_mut(),
            )
        };
        (code == sys::SUCCESS).then_some(status)
    }

    /// Calls `f` with the status when it is done, on a thread of the driver.
    fn when_done(&self, f: impl FnOnce(i32) + Send + 'static) -> Result<()> {
        type Call = Box<dyn FnOnce(i32) + Send>;
        unsafe extern "system" fn call(_: Handle, status: i32, data: *mut c_void) {
            // SAFETY: the box that was given away below; OpenCL calls once.
            let f = unsafe { Box::from_raw(data.cast::<Call>()) };
            // A panic must not reach the driver.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(status))).is_err() {
                tracing::error!("a callback of an OpenCL event panicked");
            }
        }
        let data = Box::into_raw(Box::new(Box::new(f) as Call));
        // SAFETY: the event is live, and `call` takes what `data` points at.
        let code = unsafe {
            (self.api.clSetEventCallback)(self.event.raw(), sys::COMPLETE, Some(call), data.cast())
        };
        if code != sys::SUCCESS {
            // SAFETY: the driver did not take it, so it is ours again.
            let f = unsafe { Box::from_raw(data) };
            // Whatever `f` keeps for the device may go only now.
            let _ = self.wait();
            f(code.min(0));
            return sys::check(&self.id, "clSetEventCallback", code);
        }
        Ok(())
    }
}

impl Mark for Point {
    fn is_done(&self) -> bool {
        self.status().is_some_and(|s| s <= 0)
    }

    fn wait(&self) -> Result<()> {
        let raw = self.event.raw();
        // SAFETY: the event is live.
        sys::check(&self.id, "clWaitForEvents", unsafe { (self.api.clWaitForEvents)(1, &raw) })
    }
}

impl Fenced for Queue {
    type Mark = Point;

    fn behind(&self, marks: &[Arc<Point>]) -> Result<()> {
        let raw: Vec<Handle> = marks.iter().map(|m| m.event.raw()).collect();
        self.barrier(&raw)
    }

    fn mark(&self) -> Result<Point> {
        self.marker().map(|e| self.point(e))
    }

    fn finish(&self) -> Result<()> {
        Queue::finish(self)
    }

    fn flush(&self) -> Result<()> {
        Queue::flush(self)
    }
}

impl Queue {
    /// An event of this queue as a point of it.
    pub(super) fn point(&self, event: Owned) -> Point {
        Point { api: self.api, id: self.id.clone(), event }
    }
}

/// What the queues of one device share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub api: &'static Api,
    pub context: Arc<Owned>,
    pub id: String,
    /// Tells its buffers and programs from those of other devices.
    pub number: u64,
    pub counts: Arc<Counts>,
    pub lanes: Lanes<Point>,
}

impl Shared {
    pub fn new(
        api: &'static Api,
        context: Arc<Owned>,
        id: String,
        number: u64,
        counts: Arc<Counts>,
    ) -> Arc<Shared> {
        Arc::new(Shared { api, context, id, number, counts, lanes: Lanes::default() })
    }

    pub fn buffer<'a>(&self, call: &str, b: &'a BufferRef) -> Result<&'a ClBuffer> {
        b.as_any().downcast_ref::<ClBuffer>().filter(|b| b.owner == self.number).ok_or_else(|| {
            Error::argument(call, format!("{b:?} does not belong to this opening of {}", self.id))
        })
    }

    /// Enqueues commands, and says how far it came.
    pub fn enqueue(&self, queue: &Queue, commands: &[Command<'_>]) -> Result<()> {
        let mut s = queue.begin();
        for c in commands {
            match c {
                Command::Launch { program, groups, buffers, params, fault } => {
                    let p = self.program(program)?;
                    let arguments = p.signature.arguments(buffers.len(), params, *fault)?;
                    let own = |b| self.buffer("launch", b);
                    let buffers = buffers.iter().map(own).collect::<Result<smallvec::SmallVec<[_; 16]>>>()?;
                    s.launch(p, *groups, &buffers, &arguments)?;
                    if !groups.contains(&0) {
                        Counts::add(&self.counts.launches, 1);
                    }
                }
                Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                    let (from, to) = (self.buffer("copy", src)?, self.buffer("copy", dst)?);
                    let same = std::ptr::eq(from, to);
                    validate::copy([src.bytes(), *src_offset], [dst.bytes(), *dst_offset], *bytes, same)?;
                    s.copy(from, *src_offset, to, *dst_offset, *bytes)?;
                    Counts::add(&self.counts.device_copies, (*bytes > 0) as u64);
                }
                Command::Library { kernel, .. } => {
                    let what = format!("{} is another device's kernel", kernel.name());
                    return Err(Error::argument("submit", what));
                }
            }
        }
        s.flush()
    }

    fn program<'a>(&self, p: &'a Arc<dyn crate::Program>) -> Result<&'a ClProgram> {
        p.as_any()
            .downcast_ref::<ClProgram>()
            .filter(|p| p.owner == self.number)
            .ok_or_else(|| Error::argument("launch", format!("{} was compiled for another device", p.name())))
    }

    /// What commands use. What is wrong with them is said when they are enqueued.
    pub fn access(&self, commands: &[Command<'_>]) -> Access {
        let mut a = Access::default();
        let at = |b: &BufferRef| self.buffer("", b).ok().map(ClBuffer::span);
        for c in commands {
            match c {
                Command::Launch { program, buffers, .. } => {
                    let Ok(p) = self.program(program) else { continue };
                    for (h, d) in buffers.iter().map(at).zip(&p.signature.buffers) {
                        let spans = if d.write { &mut a.writes } else { &mut a.reads };
                        h.into_iter().for_each(|(at, bytes)| spans.add(at, bytes));
                    }
                }
                Command::Copy { src, dst, .. } => {
                    at(src).into_iter().for_each(|(at, bytes)| a.reads.add(at, bytes));
                    at(dst).into_iter().for_each(|(at, bytes)| a.writes.add(at, bytes));
                }
                Command::Library { .. } => {}
            }
        }
        a
    }
}

/// What is behind an [`Event`]: a marker, and what has to be done when it is done, by the driver's callback
/// or by who asks first.
struct Marker {
    shared: Arc<Shared>,
    point: Arc<Point>,
    report: Arc<Report>,
    open: Mutex<Option<Open>>,
}

/// What an event needs until it is done.
struct Open {
    /// The events of timed commands.
    stamps: Vec<Option<Owned>>,
    /// Where the device copies to.
    _keep: Option<Arc<Mutex<Vec<u8>>>>,
}

impl Marker {
    /// The marker has this status, which is final. The report is whole afterwards.
    fn end(&self, status: i32) {
        let mut open = self.open.lock().unwrap_or_else(|e| e.into_inner());
        let Some(o) = open.take() else { return };
        if status < 0 {
            self.report.fail(sys::driver_error(&self.shared.id, "a command of a stream", status));
        }
        for e in o.stamps.iter().flatten() {
            let at = |which| sys::stamp(self.shared.api, e, which);
            if let (Ok(begin), Ok(end)) = (at(sys::PROFILING_COMMAND_START), at(sys::PROFILING_COMMAND_END)) {
                self.report.ran(begin, end);
            }
        }
    }
}

/// One of two handles on a marker; the other is the callback's.
struct Asked(Arc<Marker>);

impl Progress for Asked {
    fn poll(&self) -> bool {
        let status = self.0.point.status().filter(|s| *s <= 0);
        status.map(|s| self.0.end(s)).is_some()
    }

    fn wait(&self) {
        // The marker's status says what became of it.
        if let Err(e) = self.0.point.wait() {
            tracing::debug!("an event of a stream failed: {e}");
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A stream of an OpenCL device.
#[derive(Debug)]
pub(crate) struct ClStream {
    shared: Arc<Shared>,
    queue: Queue,
    lane: u64,
    /// Of what follows the last event. Held over every call, so that a report and the queue agree.
    report: Mutex<Arc<Report>>,
}

impl ClStream {
    /// A stream over a queue of its own. `own` is the device's, which has nothing under way afterwards that
    /// the ledger does not know.
    pub fn new(shared: &Arc<Shared>, own: &Queue, queue: Queue) -> Result<ClStream> {
        let lane = shared.lanes.open(own)?;
        Ok(ClStream { shared: shared.clone(), queue, lane, report: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Report>> {
        self.report.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn ordered<R>(
        &self,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<Point>, R)>,
    ) -> Result<(Arc<Point>, R)> {
        self.shared.lanes.marked(self.lane, &self.queue, access, f)
    }

    /// After an error, waits: what the host lends to the queue is about to go.
    fn settled<R>(&self, r: Result<R>) -> Result<R> {
        if r.is_err() {
            self.queue.finish()?;
        }
        r
    }

    /// Ends the report under way in an event. `keep` is what the device uses until then.
    fn close(&self, report: &mut Arc<Report>, keep: Option<Arc<Mutex<Vec<u8>>>>) -> Result<Event> {
        let (point, stamps) = self.ordered(Access::default, || {
            self.queue.clear_fault()?;
            Ok((None, self.queue.take_events()))
        })?;
        let report = std::mem::take(report);
        let (shared, open) = (self.shared.clone(), Mutex::new(Some(Open { stamps, _keep: keep })));
        let marker = Arc::new(Marker { shared, point: point.clone(), report: report.clone(), open });
        let event = Event::new(report, Some(Box::new(Asked(marker.clone()))));
        let done = event.clone();
        point.when_done(move |status| {
            marker.end(status);
            done.complete();
        })?;
        Ok(event)
    }
}

impl Stream for ClStream {
    fn overlaps(&self) -> bool {
        true
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let report = self.lock();
        let (point, read) = self.settled(self.ordered(
            || self.shared.access(commands),
            || {
                self.shared.enqueue(&self.queue, commands)?;
                // SAFETY: the word is the report's, which lives until the callback below has let go of it.
                let read = unsafe { self.queue.read_fault(report.fault().as_ptr())? };
                Ok((None, read))
            },
        ))?;
        if read {
            let keep = report.clone();
            point.when_done(move |_| drop(keep))?;
        }
        Ok(())
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let _report = self.lock();
        let b = self.shared.buffer("write", dst)?;
        let bytes = src.bytes();
        validate::range("write", dst.bytes(), offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (point, ()) = self.settled(self.ordered(
            || b.writing(),
            || {
                // SAFETY: the range was checked; the callback below keeps the bytes until they are copied.
                let event = unsafe { self.queue.write_later(b, offset, bytes)? };
                Ok((Some(self.queue.point(event)), ()))
            },
        ))?;
        Counts::add(&self.shared.counts.uploads, 1);
        Counts::add(&self.shared.counts.uploaded_bytes, bytes.len() as u64);
        let keep = src.clone();
        point.when_done(move |_| drop(keep))
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        let mut report = self.lock();
        let b = self.shared.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, bytes)?;
        let mut to = halcyon_ir::host::zeros(bytes, "a copy to the host")?;
        let at = to.as_mut_ptr();
        let to = Arc::new(Mutex::new(to));
        if bytes > 0 {
            // SAFETY: the range was checked, and the vector has room for it, which nobody else looks at
            // before the event is done. What keeps it until then is the callback that `close` sets, or an
            // error's wait for the queue.
            let read = || unsafe { self.queue.read_later(b, offset, at, bytes) };
            self.settled(self.ordered(|| b.reading(), || Ok((Some(self.queue.point(read()?)), ()))))?;
        }
        Counts::add(&self.shared.counts.downloads, 1);
        Counts::add(&self.shared.counts.downloaded_bytes, bytes as u64);
        let event = self.settled(self.close(&mut report, Some(to.clone())))?;
        Ok(Download::new(event, to))
    }

    fn record(&self) -> Result<Event> {
        self.close(&mut self.lock(), None)
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let _report = self.lock();
        if event.is_done() {
            return Ok(());
        }
        let same = |m: &&Asked| Arc::ptr_eq(&m.0.shared.context, &self.shared.context);
        let marker = event.progress().and_then(|p| p.as_any().downcast_ref::<Asked>()).filter(same);
        let (api, mut code) = (self.shared.api, 0);
        let foreign = match marker {
            Some(_) => None,
            None => {
                // SAFETY: the context is live.
                let raw = unsafe { (api.clCreateUserEvent)(self.shared.context.raw(), &mut code) };
                // SAFETY: an event created just now, released by its own function.
                let own = unsafe { Owned::new(raw, code, api.clReleaseEvent) };
                Some(own.map_err(|c| sys::driver_error(&self.shared.id, "clCreateUserEvent", c))?)
            }
        };
        let raw = foreign.as_ref().map_or_else(|| marker.map(|m| m.0.point.event.raw()), |o| Some(o.raw()));
        let enqueued = self.ordered(Access::default, || {
            raw.map_or(Ok(()), |h| self.queue.barrier(&[h])).map(|()| (None, ()))
        });
        if let Some(own) = foreign {
            event.on_done(move || {
                // SAFETY: the event is live, and its status is set here only. A failure would leave the queue
                // waiting: it is said.
                let code = unsafe { (api.clSetUserEventStatus)(own.raw(), sys::COMPLETE) };
                if code != sys::SUCCESS {
                    tracing::error!(code = %sys::code_name(code), "an event of another device could not be passed on");
                }
            });
        }
        enqueued.map(drop)
    }
}

impl Drop for ClStream {
    fn drop(&mut self) {
        // The queue goes on until it is empty; until then the device counts it.
        let shared = self.shared.clone();
        match self.ordered(Access::default, || Ok((None, ()))) {
            Ok((point, ())) => {
                // On an error it was called already.
                let _ = point.when_done(move |_| shared.lanes.close());
            }
            Err(e) => {
                tracing::warn!("a stream ends with {e}");
                shared.lanes.close();
            }
        }
    }
}

//! Streams: additional in-order queues of a device. OpenCL's events order the queues among each other.

use super::capture::ClCapture;
use super::memory::ClBuffer;
use super::program::ClProgram;
use super::queue::Queue;
use super::sys::{self, Api, Context, Handle, Owned};
use crate::commands::{self, Addressed, DeviceInstance};
use crate::hazard::Access;
use crate::queues::{Fenced, Mark, Queues};
use crate::stream::{Progress, Report};
use crate::validate;
use crate::{BufferRef, Capture, Command, Counts, Download, Event, Result, Stream};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use smallvec::SmallVec;
use std::any::Any;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

/// An event of a queue, for which other queues can wait.
#[derive(Debug)]
pub(crate) struct Point {
    api: &'static Api,
    id: Arc<str>,
    event: Owned<sys::Event>,
}

impl Point {
    pub(super) fn new(api: &'static Api, id: Arc<str>, event: Owned<sys::Event>) -> Point {
        Point { api, id, event }
    }

    /// The execution status: 0 is done, negative values are errors.
    fn status(&self) -> Option<i32> {
        let mut status = 0i32;
        // SAFETY: `self` holds a reference to the event, and the result is one 32-bit number.
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

    /// Calls `f` with the status when the event is done, on a thread of the driver. If the driver refuses the
    /// callback, waits for the event, calls `f` on this thread and returns the error.
    pub(super) fn when_done(&self, f: impl FnOnce(i32) + Send + 'static) -> Result<()> {
        type Call = Box<dyn FnOnce(i32) + Send>;
        /// # Safety
        /// `data` must come from `Box::into_raw` of a `Box<Call>`, and the function must be called only once
        /// with it.
        unsafe extern "system" fn call(_: Handle, status: i32, data: *mut c_void) {
            // SAFETY: `data` is the box leaked below, and OpenCL calls this function once.
            let f = unsafe { Box::from_raw(data.cast::<Call>()) };
            // A panic must not unwind into the driver.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(status))).is_err() {
                tracing::error!("a callback of an OpenCL event panicked");
            }
        }
        let data = Box::into_raw(Box::new(Box::new(f) as Call));
        // SAFETY: the event is live, and `call` expects a pointer to the leaked box.
        let code = unsafe {
            (self.api.clSetEventCallback)(self.event.raw(), sys::COMPLETE, Some(call), data.cast())
        };
        if code != sys::SUCCESS {
            // SAFETY: the driver did not register the callback, so it never uses `data`.
            let f = unsafe { Box::from_raw(data) };
            // The device may use the objects that `f` keeps alive, so they may be released only after the
            // event.
            f(if self.wait().is_ok() { sys::COMPLETE } else { code.min(-1) });
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
        // SAFETY: `self` holds a reference to the event.
        sys::check(&self.id, "clWaitForEvents", unsafe { (self.api.clWaitForEvents)(1, &raw) })
    }
}

impl Fenced for Queue {
    type Mark = Point;

    fn wait_for_marks(&self, marks: &[Arc<Point>]) -> Result<()> {
        let events: SmallVec<[_; 8]> = marks.iter().map(|m| &m.event).collect();
        self.barrier(&events)
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
    /// Wraps an event of this queue.
    pub(super) fn point(&self, event: Owned<sys::Event>) -> Point {
        Point::new(self.api, self.id.clone(), event)
    }
}

/// The state shared by the queues of one device.
#[derive(Debug)]
pub(crate) struct Shared {
    pub api: &'static Api,
    pub context: Arc<Owned<Context>>,
    pub id: String,
    /// Identifies this device instance; buffers and programs of another instance are rejected.
    pub number: u64,
    pub counts: Arc<Counts>,
    pub queues: Queues<Point>,
}

impl Shared {
    pub(super) fn new(
        api: &'static Api,
        context: Arc<Owned<Context>>,
        id: String,
        number: u64,
        counts: Arc<Counts>,
    ) -> Arc<Shared> {
        Arc::new(Shared { api, context, id, number, counts, queues: Queues::default() })
    }

    /// Enqueues commands up to the first invalid one.
    ///
    /// # Safety
    /// Must be called through [`Queues`]. While there are streams, it holds the ledger's lock, which all
    /// queues share.
    pub(super) unsafe fn enqueue(&self, queue: &Queue, commands: &[Command<'_>]) -> Result<()> {
        let mut s = queue.begin();
        // SAFETY: the driver contract requires that the submitted commands have buffers as large as the
        // kernels need. Nothing else launches a program meanwhile: either there are streams, and `Queues`
        // holds the lock that all queues share, or this is the only queue, and `s` locks it.
        unsafe { commands::run(self, &mut s, &self.counts, commands)? };
        s.flush()
    }
}

impl DeviceInstance for Shared {
    type Buffer = ClBuffer;
    type Program = ClProgram;

    fn id(&self) -> &str {
        &self.id
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn is_read_only(&self, b: &ClBuffer) -> bool {
        b.is_imported()
    }
}

impl Addressed for Shared {
    fn span(b: &ClBuffer) -> (usize, usize) {
        b.span()
    }
}

/// The state behind an [`Event`]: a marker, and the work to do when the marker is done. The driver's callback
/// or the first caller that polls does this work.
struct Marker {
    shared: Arc<Shared>,
    point: Arc<Point>,
    report: Arc<Report>,
    open: Mutex<Option<Open>>,
}

/// The resources that an event holds until it is done.
struct Open {
    /// The events of timed commands.
    stamps: Vec<Option<Owned<sys::Event>>>,
    /// The destination of a copy to the host.
    _keep: Option<Arc<Mutex<Vec<u8>>>>,
}

impl Marker {
    /// Completes the report. `status` is the marker's final status.
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

/// A handle on a marker for the [`Event`]; the driver's callback has another one.
struct MarkerHandle(Arc<Marker>);

impl Progress for MarkerHandle {
    fn poll(&self) -> bool {
        let status = self.0.point.status().filter(|s| *s <= 0);
        status.map(|s| self.0.end(s)).is_some()
    }

    fn wait(&self) {
        // The marker's status reports the error.
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
    /// The number of its queue among the queues of the device.
    number: u64,
    /// The report of the work since the last event. Every call holds the lock, so that the report matches the
    /// queue's content.
    report: Mutex<Arc<Report>>,
}

impl ClStream {
    /// Creates a stream with its own queue. Waits for all work of the device's queue `own`, because the
    /// ledger does not contain the work that was enqueued while there was no stream.
    pub(super) fn new(shared: &Arc<Shared>, own: &Queue, queue: Queue) -> Result<ClStream> {
        let number = shared.queues.open(own)?;
        Ok(ClStream { shared: shared.clone(), queue, number, report: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Report>> {
        self.report.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn ordered<R>(
        &self,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<Point>, R)>,
    ) -> Result<(Arc<Point>, R)> {
        self.shared.queues.marked(self.number, &self.queue, access, f)
    }

    /// Waits after an error, because host memory lent to the queue is about to be released.
    fn wait_on_error<R>(&self, r: Result<R>) -> Result<R> {
        if r.is_err() {
            self.queue.finish()?;
        }
        r
    }

    /// Records an event that ends the current report. `keep` is memory that the device uses until the event
    /// is done.
    fn close(&self, report: &mut Arc<Report>, keep: Option<Arc<Mutex<Vec<u8>>>>) -> Result<Event> {
        let (point, stamps) = self.ordered(Access::default, || {
            self.queue.clear_fault()?;
            Ok((None, self.queue.take_events()))
        })?;
        let report = std::mem::take(report);
        let (shared, open) = (self.shared.clone(), Mutex::new(Some(Open { stamps, _keep: keep })));
        let marker = Arc::new(Marker { shared, point: point.clone(), report: report.clone(), open });
        let event = Event::new(report, Some(Box::new(MarkerHandle(marker.clone()))));
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
        let (point, read) = self.wait_on_error(self.ordered(
            || self.shared.access(commands),
            || {
                // SAFETY: `ordered` calls this through `Queues`.
                unsafe { self.shared.enqueue(&self.queue, commands)? };
                // SAFETY: the word belongs to the report, which the callback below keeps alive until the copy
                // is done; after an error `wait_on_error` waits. Only the stream writes it.
                let read = unsafe { self.queue.read_fault(report.fault())? };
                Ok((None, read))
            },
        ))?;
        if read {
            let keep = report.clone();
            point.when_done(move |_| drop(keep))?;
        }
        Ok(())
    }

    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let report = self.lock();
        let r = ClCapture::of(&self.shared, capture)?;
        let launch = || {
            let ran = r.launch(&self.queue, buffers, values)?;
            // SAFETY: the word belongs to the report, which the callback below keeps alive until the copy is
            // done; after an error `wait_on_error` waits. Only the stream writes it.
            let read = ran && unsafe { self.queue.read_fault(report.fault())? };
            Ok((None, (ran, read)))
        };
        let (point, (ran, read)) = self.wait_on_error(self.ordered(|| r.access(buffers), launch))?;
        if read {
            let keep = report.clone();
            point.when_done(move |_| drop(keep))?;
        }
        Ok(ran)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let _report = self.lock();
        let b = self.shared.writable("write", dst)?;
        let bytes = src.bytes();
        validate::range("write", dst.bytes(), offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (point, ()) = self.wait_on_error(self.ordered(
            || b.writing(),
            || {
                // SAFETY: the range was validated; the callback below keeps the bytes alive until they are
                // copied.
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
        let mut to = halcyon_host::zeros(bytes, "a copy to the host")?;
        let at = to.as_mut_ptr();
        let to = Arc::new(Mutex::new(to));
        if bytes > 0 {
            // SAFETY: the range was validated, and the vector has `bytes` bytes, which nothing accesses
            // before the event is done. The callback set by `close` keeps it alive until then; after an
            // error, `wait_on_error` waits for the queue.
            let read = || unsafe { self.queue.read_later(b, offset, at, bytes) };
            self.wait_on_error(self.ordered(|| b.reading(), || Ok((Some(self.queue.point(read()?)), ()))))?;
        }
        Counts::add(&self.shared.counts.downloads, 1);
        Counts::add(&self.shared.counts.downloaded_bytes, bytes as u64);
        let event = self.wait_on_error(self.close(&mut report, Some(to.clone())))?;
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
        let same = |m: &&MarkerHandle| Arc::ptr_eq(&m.0.shared.context, &self.shared.context);
        let marker = event.progress().and_then(|p| p.as_any().downcast_ref::<MarkerHandle>()).filter(same);
        let (api, mut code) = (self.shared.api, 0);
        let foreign = match marker {
            Some(_) => None,
            None => {
                // SAFETY: `shared` holds a reference to the context.
                let raw = unsafe { (api.clCreateUserEvent)(self.shared.context.raw(), &mut code) };
                // SAFETY: `clCreateUserEvent` returned this event with one reference; `clReleaseEvent`
                // releases it.
                let own = unsafe { Owned::<sys::Event>::new(raw, code, api.clReleaseEvent) };
                Some(own.map_err(|c| sys::driver_error(&self.shared.id, "clCreateUserEvent", c))?)
            }
        };
        let before = foreign.as_ref().or(marker.map(|m| &m.0.point.event));
        let enqueued = self.ordered(Access::default, || {
            before.map_or(Ok(()), |e| self.queue.barrier(&[e])).map(|()| (None, ()))
        });
        if let Some(own) = foreign {
            event.on_done(move || {
                // SAFETY: `own` holds a reference to the event, and its status is set only here. If the call
                // fails, the queue waits forever, so the failure is logged.
                let code = unsafe { (api.clSetUserEventStatus)(own.raw(), sys::COMPLETE) };
                if code != sys::SUCCESS {
                    tracing::error!(code = %sys::code_name(code), "could not signal an event of another device");
                }
            });
        }
        enqueued.map(drop)
    }
}

impl Drop for ClStream {
    fn drop(&mut self) {
        // The queue continues until it is empty. Until then the stream counts as open.
        let shared = self.shared.clone();
        match self.ordered(Access::default, || Ok((None, ()))) {
            Ok((point, ())) => {
                // The error can be ignored, because `when_done` has called the closure in that case too.
                let _ = point.when_done(move |_| shared.queues.close());
            }
            Err(e) => {
                tracing::warn!("a stream ends with {e}");
                shared.queues.close();
            }
        }
    }
}

//! Streams: queues of a device beside its own, events that order them, and copies that nobody waits for.
//!
//! - A stream is in order. Streams of one device, and the device's own queue
//!   ([`Device::submit`](crate::Device::submit)), run side by side where the device can, unless they use the
//!   same memory: work that writes what other work reads or writes waits for it, in the order of the calls.
//!   Reads do not exclude each other. No caller has to order anything for the results to be defined; events
//!   are for order beyond that.
//! - A call hands work over and returns. Commands, programs and memory that they use stay alive until they
//!   have run, whatever the caller drops; what a copy reads of the host is owned by it or shared with it.
//! - What goes wrong in a stream is told by the next [`Event`] recorded in it. Memory that failed work was to
//!   write is spoiled until it is written again: what reads it, in any queue, fails with the same error,
//!   where the device keeps account (`cpu`), or with the driver's.
//! - Dropping a stream cancels nothing.

use crate::{BufferRef, Command, Error, Replay, Result};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use std::any::Any;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

/// Settings of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Threads of a stream of the CPU device. `None`: half of the device's, at least one.
    pub threads: Option<usize>,
    /// Events tell when the device began and ended ([`Event::elapsed`]), where asking costs time. On the CPU
    /// they always do.
    pub profile: bool,
}

/// A queue of a device. See the [module](self) for what holds.
pub trait Stream: Send + Sync + fmt::Debug {
    /// Whether work of this stream can run at one time with work of the device's other queues.
    fn overlaps(&self) -> bool;

    /// Enqueues the commands.
    ///
    /// # Errors
    /// What can be said at once, as [`Device::submit`](crate::Device::submit); the rest is told by the next
    /// event.
    fn submit(&self, commands: &[Command<'_>]) -> Result<()>;

    /// Launches captured commands, as [`Device::replay`](crate::Device::replay).
    ///
    /// # Errors
    /// As there.
    fn replay(&self, replay: &dyn Replay, buffers: &[&BufferRef], values: &[Scalar]) -> Result<bool> {
        let _ = (buffers, values);
        Err(crate::replay::foreign(replay, "this stream's device"))
    }

    /// Enqueues a copy of all of `src` into a buffer.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range outside of the buffer.
    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to the host and records an event behind it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range outside of the buffer; [`Error::OutOfMemory`] where the host has no
    /// room.
    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download>;

    /// An event that is done when what was enqueued before is.
    ///
    /// # Errors
    /// Those of the driver.
    fn record(&self) -> Result<Event>;

    /// What is enqueued from here on begins when the event is done. The caller does not wait, unless the
    /// event is another device's and the driver cannot be told of it (`webgpu`).
    ///
    /// # Errors
    /// Those of the driver.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Waits for what was enqueued; what its events, and the work since the last one, report: see
    /// [`Event::wait`].
    ///
    /// # Errors
    /// As [`Event::wait`].
    fn synchronize(&self) -> Result<Option<u32>> {
        self.record()?.wait()
    }
}

/// When the work that an event reports ran: nanoseconds on a clock that the device's streams share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed {
    /// Start of the first command since the event before.
    pub begin: u64,
    /// End of the last one.
    pub end: u64,
}

/// What happened in a stream between two events. Drivers write it, before they complete the event or tell
/// others that the memory is written.
#[derive(Debug, Default)]
pub struct Report {
    fault: AtomicU32,
    error: Mutex<Option<Error>>,
    elapsed: Mutex<Option<Elapsed>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the value whole, so a panic elsewhere does not damage it.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Report {
    /// Where kernels report a bad index; 0 is none.
    pub fn fault(&self) -> &AtomicU32 {
        &self.fault
    }

    /// Keeps the first error.
    pub fn fail(&self, e: Error) {
        lock(&self.error).get_or_insert(e);
    }

    /// Work ran from `begin` to `end`.
    pub fn ran(&self, begin: u64, end: u64) {
        let mut all = lock(&self.elapsed);
        let e = all.get_or_insert(Elapsed { begin, end });
        (e.begin, e.end) = (e.begin.min(begin), e.end.max(end));
    }

    fn outcome(&self) -> Result<Option<u32>> {
        match &*lock(&self.error) {
            Some(e) => Err(e.clone()),
            None => Ok(Some(self.fault.load(Ordering::Acquire)).filter(|f| *f != 0)),
        }
    }
}

/// Nanoseconds since the process first asked.
#[cfg(feature = "cpu")]
pub(crate) fn now() -> u64 {
    use std::{sync::OnceLock, time::Instant};
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// How a driver sees that an event is done, where the driver does not say so by itself.
pub trait Progress: Send + Sync {
    /// Looks, without waiting, whether the device has come that far and the report is whole. Not asked where
    /// the driver completes the event by itself.
    fn poll(&self) -> bool {
        false
    }
    /// Waits for the device, without promise that it has come that far then.
    fn wait(&self) {}
    /// Somebody is to be called when the event is done: sees to it that it is looked at ([`Event::is_done`])
    /// though nobody asks.
    fn watch(&self, event: &Event) {
        let _ = event;
    }
    /// The driver's own.
    fn as_any(&self) -> &dyn Any;
}

type Callback = Box<dyn FnOnce() + Send>;

struct Inner {
    report: Arc<Report>,
    /// Callbacks; `None` once it is done.
    then: Mutex<Option<Vec<Callback>>>,
    done: Condvar,
    progress: Option<Box<dyn Progress>>,
}

/// A point in a stream. It is a future's source too: `event.await` is [`Event::wait`] on any executor.
#[derive(Clone)]
pub struct Event(Arc<Inner>);

impl Event {
    /// An event over what `report` gathers. The driver calls [`Event::complete`].
    pub fn new(report: Arc<Report>, progress: Option<Box<dyn Progress>>) -> Event {
        Event(Arc::new(Inner { report, then: Mutex::new(Some(vec![])), done: Condvar::new(), progress }))
    }

    /// An event that is done.
    pub fn completed(report: Arc<Report>) -> Event {
        Event(Arc::new(Inner { report, then: Mutex::new(None), done: Condvar::new(), progress: None }))
    }

    /// For drivers: the device has come to this event. Calls what waits for it.
    pub fn complete(&self) {
        let then = lock(&self.0.then).take();
        self.0.done.notify_all();
        for f in then.into_iter().flatten() {
            // What an executor's waker does wrong must not end the driver's thread.
            if catch_unwind(AssertUnwindSafe(f)).is_err() {
                tracing::error!("a callback of an event panicked");
            }
        }
    }

    /// What the driver made it with.
    pub fn progress(&self) -> Option<&dyn Progress> {
        self.0.progress.as_deref()
    }

    /// Whether the device has come to it. Does not wait.
    pub fn is_done(&self) -> bool {
        let open = || lock(&self.0.then).is_some();
        if self.progress().is_some_and(|p| open() && p.poll()) {
            self.complete();
        }
        !open()
    }

    /// Waits; the id of the first fault of the work since the event before in its stream, as in
    /// [`Device::take_fault`](crate::Device::take_fault). The answer is the same each time.
    ///
    /// # Errors
    /// The first error of that work.
    pub fn wait(&self) -> Result<Option<u32>> {
        if let Some(p) = self.progress().filter(|_| !self.is_done()) {
            p.wait();
            if p.poll() {
                self.complete();
            }
        }
        let mut then = lock(&self.0.then);
        while then.is_some() {
            then = self.0.done.wait(then).unwrap_or_else(|e| e.into_inner());
        }
        drop(then);
        self.0.report.outcome()
    }

    /// What is known by now of what [`Event::wait`] will say. It is all of it for work whose memory has been
    /// read since.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn so_far(&self) -> Result<Option<u32>> {
        // Drivers that say nothing by themselves fill the report when they are asked.
        self.is_done();
        self.0.report.outcome()
    }

    /// Calls `f` when it is done, at once if it is. `f` runs on a thread of the driver: it must be short and
    /// must not wait for a stream.
    pub fn on_done(&self, f: impl FnOnce() + Send + 'static) {
        let mut then = lock(&self.0.then);
        match &mut *then {
            Some(v) => {
                v.push(Box::new(f));
                drop(then);
                if let Some(p) = self.progress() {
                    p.watch(self);
                }
            }
            None => {
                drop(then);
                f();
            }
        }
    }

    /// When the device did the work since the event before, once it is done; `None` where nothing ran, or
    /// nobody measured.
    pub fn elapsed(&self) -> Option<Elapsed> {
        if self.is_done() { *lock(&self.0.report.elapsed) } else { None }
    }

    /// Whether both are the same event.
    pub fn same(&self, o: &Event) -> bool {
        Arc::ptr_eq(&self.0, &o.0)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = lock(&self.0.then).is_some();
        write!(f, "Event({}, {:?})", if open { "open" } else { "done" }, self.0.report)
    }
}

impl IntoFuture for Event {
    type Output = Result<Option<u32>>;
    type IntoFuture = Reached;
    fn into_future(self) -> Reached {
        Reached { event: self, waker: None }
    }
}

/// The future of an [`Event`]. Dropping it leaves the work as it is.
#[derive(Debug)]
pub struct Reached {
    event: Event,
    /// Whom the event wakes; there once it was polled.
    waker: Option<Arc<Mutex<Waker>>>,
}

impl Reached {
    pub fn event(&self) -> &Event {
        &self.event
    }
}

impl Future for Reached {
    type Output = Result<Option<u32>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.event.is_done() {
            return Poll::Ready(self.event.so_far());
        }
        match &self.waker {
            // The task may have moved to another executor meanwhile.
            Some(w) => lock(w).clone_from(cx.waker()),
            None => {
                let w = Arc::new(Mutex::new(cx.waker().clone()));
                self.waker = Some(w.clone());
                self.event.on_done(move || lock(&w).wake_by_ref());
            }
        }
        // It may have been done before the waker was there.
        if self.event.is_done() { Poll::Ready(self.event.so_far()) } else { Poll::Pending }
    }
}

/// Bytes on their way to the host.
#[derive(Debug)]
pub struct Download {
    event: Event,
    /// The driver writes them until the event is done, and nobody else looks.
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Download {
    /// For drivers: `bytes` holds what was copied when the event is done.
    pub fn new(event: Event, bytes: Arc<Mutex<Vec<u8>>>) -> Download {
        Download { event, bytes }
    }

    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Waits; the bytes. A fault is not looked at: it is the event's.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn take(self) -> Result<Vec<u8>> {
        self.event.wait()?;
        Ok(std::mem::take(&mut *lock(&self.bytes)))
    }
}

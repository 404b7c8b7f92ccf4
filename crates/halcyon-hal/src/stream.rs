//! Streams: further queues of a device, events that order them, and asynchronous copies.
//!
//! - A stream runs its work in order. Streams of one device and the device's own queue
//!   ([`Device::submit`](crate::Device::submit)) run concurrently if the device can. Hazards are resolved
//!   automatically: if two pieces of work use the same memory and at least one of them writes it, the one
//!   that was enqueued later waits for the other one. Results are therefore defined without any events;
//!   events add further ordering.
//! - A call enqueues work and returns. The commands, programs and memory in use stay alive until the work has
//!   run, even if the caller drops them. A copy owns the host memory that it reads, or shares its ownership
//!   with the caller.
//! - Errors are reported by the next [`Event`] recorded in the stream. Outputs of failed work are poisoned
//!   until overwritten: work that reads them, in any queue, fails with the same error if the device tracks
//!   poisoned memory (`cpu`), or with the driver's error.
//! - Dropping a stream does not cancel its work.

use crate::{BufferRef, Capture, Command, Error, Result};
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
    /// Threads of a stream of the CPU device, at most the device's number. `None`: half of that number, at
    /// least one. `Some(0)` is an error.
    pub threads: Option<usize>,
    /// Records when the work of each event ran ([`Event::elapsed`]) on devices where this costs time. The CPU
    /// device always records it.
    pub profile: bool,
}

/// A queue of a device. See the [module](self) for its guarantees.
pub trait Stream: Send + Sync + fmt::Debug {
    /// Whether work of this stream can run concurrently with work of the device's other queues.
    fn overlaps(&self) -> bool;

    /// Enqueues the commands.
    ///
    /// # Errors
    /// Errors that are detected at once, the same as those of [`Device::submit`](crate::Device::submit). The
    /// next event reports all others.
    fn submit(&self, commands: &[Command<'_>]) -> Result<()>;

    /// Launches captured commands, as [`Device::launch_capture`](crate::Device::launch_capture) does.
    ///
    /// # Errors
    /// The errors of [`Device::launch_capture`](crate::Device::launch_capture).
    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let _ = (buffers, values);
        Err(crate::capture::foreign(capture, "this stream's device"))
    }

    /// Enqueues a copy of all of `src` into a buffer.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range outside of the buffer.
    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to the host and records an event after it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range outside of the buffer; [`Error::OutOfMemory`] if the host has no
    /// memory for the copy.
    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download>;

    /// Records an event that completes when all work enqueued so far has completed.
    ///
    /// # Errors
    /// Errors of the driver.
    fn record(&self) -> Result<Event>;

    /// Makes later work of this stream wait for the event. The call returns at once, unless the event belongs
    /// to another device and the driver cannot express that dependency (`cuda`, `rocm`, `webgpu`, `metal`).
    /// The call then waits for the event.
    ///
    /// # Errors
    /// Errors of the driver.
    fn wait(&self, event: &Event) -> Result<()>;

    /// Waits for all enqueued work. Returns the fault of the work since the last event, see [`Event::wait`].
    ///
    /// # Errors
    /// The errors of [`Event::wait`].
    fn synchronize(&self) -> Result<Option<u32>> {
        self.record()?.wait()
    }
}

/// When the work of an event ran, in nanoseconds on a clock shared by the device's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed {
    /// Start of the first command after the previous event.
    pub begin: u64,
    /// End of the last command.
    pub end: u64,
}

/// The outcome of a stream's work between two events. Drivers fill it before they complete the event and
/// before they announce the written memory to other queues.
#[derive(Debug, Default)]
pub struct Report {
    fault: AtomicU32,
    error: Mutex<Option<Error>>,
    elapsed: Mutex<Option<Elapsed>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the value consistent, so a poisoned lock is safe to use.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Report {
    /// The word in which kernels report a fault; 0 is none.
    pub fn fault(&self) -> &AtomicU32 {
        &self.fault
    }

    /// Records an error; only the first one is kept.
    pub fn fail(&self, e: Error) {
        lock(&self.error).get_or_insert(e);
    }

    /// Extends the measured interval by work that ran from `begin` to `end`.
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

/// Nanoseconds since the first call in this process.
#[allow(dead_code)]
pub(crate) fn now() -> u64 {
    use std::{sync::OnceLock, time::Instant};
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// How callers detect the completion of an event before, or without, a call of [`Event::complete`] by the
/// driver.
pub trait Progress: Send + Sync {
    /// Whether the device has reached the event and the report is complete. Does not wait.
    fn poll(&self) -> bool {
        false
    }
    /// Waits for the device. May return before the event is reached.
    fn wait(&self) {}
    /// Called when a callback was registered: the driver must then poll [`Event::is_done`] by itself until
    /// the event is done.
    fn watch(&self, event: &Event) {
        let _ = event;
    }
    /// The driver's type.
    fn as_any(&self) -> &dyn Any;
}

type Callback = Box<dyn FnOnce() + Send>;

struct Inner {
    report: Arc<Report>,
    /// Callbacks; `None` once the event is done.
    then: Mutex<Option<Vec<Callback>>>,
    done: Condvar,
    progress: Option<Box<dyn Progress>>,
}

/// A point in a stream. `event.await` is [`Event::wait`] on any executor.
#[derive(Clone)]
pub struct Event(Arc<Inner>);

impl Event {
    /// An event with the given report. The driver must call [`Event::complete`].
    pub fn new(report: Arc<Report>, progress: Option<Box<dyn Progress>>) -> Event {
        Event(Arc::new(Inner { report, then: Mutex::new(Some(vec![])), done: Condvar::new(), progress }))
    }

    /// An event that is already done.
    pub fn completed(report: Arc<Report>) -> Event {
        Event(Arc::new(Inner { report, then: Mutex::new(None), done: Condvar::new(), progress: None }))
    }

    /// For drivers: marks the event as done and runs its callbacks.
    pub fn complete(&self) {
        let then = lock(&self.0.then).take();
        self.0.done.notify_all();
        for f in then.into_iter().flatten() {
            // A panic in a callback (an executor's waker) must not end the driver's thread.
            if catch_unwind(AssertUnwindSafe(f)).is_err() {
                tracing::error!("a callback of an event panicked");
            }
        }
    }

    /// The `progress` given to `Event::new`.
    pub fn progress(&self) -> Option<&dyn Progress> {
        self.0.progress.as_deref()
    }

    /// Whether the device has reached the event. Does not wait.
    pub fn is_done(&self) -> bool {
        let open = || lock(&self.0.then).is_some();
        if self.progress().is_some_and(|p| open() && p.poll()) {
            self.complete();
        }
        !open()
    }

    /// Waits for the event. Returns the id of the first fault of the work since the stream's previous event,
    /// as [`Device::take_fault`](crate::Device::take_fault) does. Repeated calls return the same result.
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

    /// The part of [`Event::wait`]'s result that is known now. Does not wait. If the caller has read outputs
    /// of the work after this event was recorded, the faults and errors of the commands that computed them
    /// are included.
    ///
    /// # Errors
    /// The errors of [`Event::wait`].
    pub fn known_outcome(&self) -> Result<Option<u32>> {
        // Drivers without completion callbacks fill the report when polled.
        self.is_done();
        self.0.report.outcome()
    }

    /// Calls `f` when the event is done, or at once if it is. `f` runs on a thread of the driver, or on the
    /// thread whose call of a method of this type finds the event done. `f` must be short and must not wait
    /// for a stream.
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

    /// When the work since the previous event ran. `None` until the event is done, if nothing ran, or if
    /// times were not measured.
    pub fn elapsed(&self) -> Option<Elapsed> {
        if self.is_done() { *lock(&self.0.report.elapsed) } else { None }
    }

    /// Whether both are the same event.
    pub fn is_same(&self, o: &Event) -> bool {
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
    type IntoFuture = EventFuture;
    fn into_future(self) -> EventFuture {
        EventFuture { event: self, waker: None }
    }
}

/// The future of an [`Event`]. Dropping it does not cancel the work.
#[derive(Debug)]
pub struct EventFuture {
    event: Event,
    /// The waker that the event calls; set by the first poll.
    waker: Option<Arc<Mutex<Waker>>>,
}

impl EventFuture {
    pub fn event(&self) -> &Event {
        &self.event
    }
}

impl Future for EventFuture {
    type Output = Result<Option<u32>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.event.is_done() {
            return Poll::Ready(self.event.known_outcome());
        }
        match &self.waker {
            // The task may have moved to another executor since the last poll.
            Some(w) => lock(w).clone_from(cx.waker()),
            None => {
                let w = Arc::new(Mutex::new(cx.waker().clone()));
                self.waker = Some(w.clone());
                self.event.on_done(move || lock(&w).wake_by_ref());
            }
        }
        // The event may have completed before the waker was registered.
        if self.event.is_done() { Poll::Ready(self.event.known_outcome()) } else { Poll::Pending }
    }
}

/// An asynchronous copy to the host.
pub struct Download {
    event: Event,
    /// Written by the driver until the event is done; not read before.
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Download {
    /// For drivers: `bytes` must hold the copied bytes when the event is done.
    pub fn new(event: Event, bytes: Arc<Mutex<Vec<u8>>>) -> Download {
        Download { event, bytes }
    }

    pub fn event(&self) -> &Event {
        &self.event
    }

    /// Waits and returns the bytes. A fault is not checked; query the event for it.
    ///
    /// # Errors
    /// The errors of [`Event::wait`].
    pub fn take(self) -> Result<Vec<u8>> {
        self.event.wait()?;
        Ok(std::mem::take(&mut *lock(&self.bytes)))
    }
}

impl fmt::Debug for Download {
    /// Omits the bytes, because the driver may be writing them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").field("event", &self.event).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_text_of_a_download_does_not_read_its_bytes() {
        let d = Download::new(Event::new(Arc::default(), None), Arc::new(Mutex::new(vec![171, 172])));
        let text = format!("{d:?}");
        assert!(text.contains("open") && !text.contains("171"), "{text}");
    }
}

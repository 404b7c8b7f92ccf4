//! Streams: further in-order queues of a device. Events of CUDA or HIP order the work of different streams.

use super::capture::SimtCapture;
use super::device::Shared;
use super::memory::SimtPages;
use super::queue::{Point, Queue, Stamp};
use crate::commands::{Addressed, DeviceInstance};
use crate::hazard::Access;
use crate::queues::{Fenced, Mark};
use crate::stream::{Progress, Report};
use crate::{BufferRef, Capture, Command, Counts, Download, Event, Result, Stream, validate};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How long the watcher thread waits for new events before it ends.
const IDLE: Duration = Duration::from_millis(200);
/// Polling interval while several events are pending.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the value consistent, so a poisoned lock is safe to use.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// A thread that completes events when no caller polls them. Started on demand.
#[derive(Debug, Default)]
pub(crate) struct Watcher(Arc<(Mutex<Watched>, Condvar)>);

#[derive(Debug, Default)]
struct Watched {
    open: VecDeque<Event>,
    runs: bool,
}

impl Watcher {
    fn watch(&self, e: Event) {
        let mut w = lock(&self.0.0);
        w.open.push_back(e);
        self.0.1.notify_one();
        if w.runs {
            return;
        }
        let both = self.0.clone();
        let thread = std::thread::Builder::new().name("halcyon-events".into()).spawn(move || watch(&both));
        match thread {
            Ok(_) => w.runs = true,
            Err(e) => {
                // Without a thread, complete the events here, because a caller may have registered a callback
                // and never wait for the event.
                tracing::warn!("no thread could be started that completes events: {e}");
                let open = std::mem::take(&mut w.open);
                drop(w);
                open.iter().filter_map(Event::progress).for_each(Progress::wait);
                let _ = open.iter().filter(|e| !e.is_done()).count();
            }
        }
    }
}

fn watch(both: &(Mutex<Watched>, Condvar)) {
    loop {
        let open: Vec<Event> = {
            let mut w = lock(&both.0);
            if w.open.is_empty() {
                w = both.1.wait_timeout(w, IDLE).unwrap_or_else(|e| e.into_inner()).0;
            }
            if w.open.is_empty() {
                w.runs = false;
                return;
            }
            w.open.drain(..).collect()
        };
        // If only one event is open, this thread waits for it. If several are open, it polls them, because
        // any of them may complete first.
        if let [e] = &open[..]
            && let Some(p) = e.progress()
        {
            p.wait();
        }
        let n = open.len();
        let left: Vec<Event> = open.into_iter().filter(|e| !e.is_done()).collect();
        let still = left.len() == n;
        let mut w = lock(&both.0);
        for e in left.into_iter().rev() {
            w.open.push_front(e);
        }
        drop(w);
        if still {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Page-locked host buffers that are not in use, with their sizes.
#[derive(Debug, Default)]
pub(crate) struct Staging(Mutex<Vec<(usize, SimtPages)>>);

/// Maximum bytes of unused pages that are kept. If the writes of a stream since its last event hold more than
/// this, the host waits for them.
const MAX_KEPT_BYTES: usize = 64 << 20;

impl Staging {
    /// Pages of at least `bytes` bytes.
    fn take(&self, shared: &Shared, bytes: usize) -> Result<(usize, SimtPages)> {
        let size = bytes.max(4096).next_power_of_two();
        let mut kept = lock(&self.0);
        if let Some(i) = kept.iter().position(|k| k.0 == size) {
            return Ok(kept.swap_remove(i));
        }
        drop(kept);
        let made = SimtPages::new(&shared.context, size);
        made.map(|p| (size, p)).map_err(|why| crate::Error::OutOfMemory {
            device: shared.context.id.clone(),
            what: format!("page-locked host memory for a copy: {why}"),
            requested: size as u64,
            free: 0,
            total: 0,
            next: "Copy in smaller parts".into(),
        })
    }

    fn give(&self, pages: (usize, SimtPages)) {
        let mut kept = lock(&self.0);
        if kept.iter().map(|k| k.0).sum::<usize>() + pages.0 <= MAX_KEPT_BYTES {
            kept.push(pages);
        }
    }
}

/// The state behind an [`Event`]: the event of CUDA or HIP, and what is left to do when the device has
/// reached it.
struct Marker {
    shared: Arc<Shared>,
    point: Arc<Point>,
    report: Arc<Report>,
    open: Mutex<Option<Open>>,
}

/// The resources that an event holds until it is done.
struct Open {
    stamps: Vec<(Stamp, Stamp)>,
    /// The pages that receive the fault word.
    fault: Option<(usize, SimtPages)>,
    /// Pages that the device reads.
    written: Vec<(usize, SimtPages)>,
    /// Pages that the device writes, and the destination of their content.
    read: Option<((usize, SimtPages), Arc<Mutex<Vec<u8>>>)>,
}

impl Marker {
    /// Completes the report once the device has reached the event.
    fn end(&self) {
        let mut open = lock(&self.open);
        let Some(o) = open.take() else { return };
        let Shared { staging, .. } = &*self.shared;
        if let Err(e) = self.point.wait() {
            // The device may still write the pages, so they are neither read nor used again.
            return self.report.fail(e);
        }
        if let Some(pages) = o.fault {
            let mut word = [0; 4];
            // SAFETY: this value owns the pages, and the copy of the fault word to them is done, because the
            // code above waited for the event after the copy.
            match unsafe { pages.1.copy_to(&mut word) } {
                Ok(()) => self.report.fault().store(u32::from_ne_bytes(word), Ordering::Release),
                Err(e) => self.report.fail(e),
            }
            staging.give(pages);
        }
        for (begin, end) in &o.stamps {
            let origin = |s: &Stamp| self.shared.origin().and_then(|o| s.since(o));
            if let (Ok(begin), Ok(end)) = (origin(begin), origin(end)) {
                self.report.ran(begin, end);
            }
        }
        if let Some((pages, to)) = o.read {
            // SAFETY: this value owns the pages, and the copy of the device's bytes to them is done, because
            // the code above waited for the event after the copy.
            if let Err(e) = unsafe { pages.1.copy_to(&mut lock(&to)) } {
                self.report.fail(e);
            }
            staging.give(pages);
        }
        o.written.into_iter().for_each(|p| staging.give(p));
    }
}

struct MarkerHandle(Arc<Marker>);

impl Progress for MarkerHandle {
    fn poll(&self) -> bool {
        let done = self.0.point.is_done();
        if done {
            self.0.end();
        }
        done
    }

    fn wait(&self) {
        // `end` reports the error.
        if let Err(e) = self.0.point.wait() {
            tracing::debug!("an event of a stream failed: {e}");
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The state that has accumulated since the last event.
#[derive(Debug, Default)]
struct PendingWork {
    report: Arc<Report>,
    written: Vec<(usize, SimtPages)>,
}

/// A stream of a device.
#[derive(Debug)]
pub(crate) struct SimtStream {
    shared: Arc<Shared>,
    queue: Queue,
    /// The id of its queue among those of the device.
    number: u64,
    /// Held during every call, so that the report matches the queue's content.
    since: Mutex<PendingWork>,
}

impl SimtStream {
    /// Creates a stream with its own queue. `own` is the device's queue.
    pub(super) fn new(shared: &Arc<Shared>, own: &Queue, queue: Queue) -> Result<SimtStream> {
        let number = shared.queues.open(own)?;
        Ok(SimtStream { shared: shared.clone(), queue, number, since: Mutex::default() })
    }

    fn ordered<R>(
        &self,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<Point>, R)> {
        self.shared.context.enter()?;
        self.shared.queues.ordered(self.number, &self.queue, access, f)
    }

    /// Records an event that ends the current report.
    fn close(
        &self,
        since: &mut PendingWork,
        read: Option<((usize, SimtPages), Arc<Mutex<Vec<u8>>>)>,
    ) -> Result<Event> {
        let mut fault = None;
        if self.queue.may_have_faulted() {
            match self.shared.staging.take(&self.shared, 4) {
                Ok(pages) => fault = Some(pages),
                Err(e) => {
                    // The device may still write the pages of `read`.
                    self.queue.finish()?;
                    return Err(e);
                }
            }
        }
        let enqueue = || match &fault {
            // SAFETY: `take` returned at least four bytes. `pages` moves to the marker, which waits for the
            // event before it reads or reuses them. After an error, `finish` below waits for the queue.
            Some((_, pages)) => unsafe { self.queue.move_fault(pages) },
            None => Ok(()),
        };
        let point = match self.ordered(Access::default, enqueue) {
            Ok((point, ())) => point,
            Err(e) => {
                // The device may still use the pages.
                self.queue.finish()?;
                return Err(e);
            }
        };
        let PendingWork { report, written } = std::mem::take(since);
        let open = Open { stamps: self.queue.take_stamps(), fault, written, read };
        let (shared, open) = (self.shared.clone(), Mutex::new(Some(open)));
        let marker = Arc::new(Marker { shared, point, report: report.clone(), open });
        let event = Event::new(report, Some(Box::new(MarkerHandle(marker))));
        // The watcher releases the pages and wakes futures even if no caller polls.
        self.shared.watcher.watch(event.clone());
        Ok(event)
    }
}

impl Stream for SimtStream {
    fn overlaps(&self) -> bool {
        self.shared.overlaps
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let _since = lock(&self.since);
        let access = || self.shared.access(commands);
        self.ordered(access, || self.shared.enqueue(&self.queue, commands)).map(drop)
    }

    fn launch_capture(
        &self,
        capture: &dyn Capture,
        buffers: &[&BufferRef],
        values: &[Scalar],
    ) -> Result<bool> {
        let _since = lock(&self.since);
        let r = SimtCapture::of(&self.shared, capture)?;
        let launch = || r.launch(&self.queue, buffers, values);
        self.ordered(|| r.access(buffers), launch).map(|(_, ran)| ran)
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let mut since = lock(&self.since);
        let b = self.shared.writable("write", dst)?;
        let bytes = src.bytes();
        validate::range("write", dst.bytes(), offset, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let pages = self.shared.staging.take(&self.shared, bytes.len())?;
        // SAFETY: `take` returned pages that nothing else uses.
        unsafe { pages.1.copy_from(bytes)? };
        // SAFETY: the range was validated. `pages` has `bytes.len()` bytes and lives until the stream's next
        // event is done; dropping the stream waits too.
        let write = || unsafe { self.queue.write_later(b, offset, pages.1.at(), bytes.len()) };
        let made = self.ordered(|| b.writing(), write);
        since.written.push(pages);
        made?;
        // If the caller records no events, pages would accumulate without bound.
        if since.written.iter().map(|p| p.0).sum::<usize>() > MAX_KEPT_BYTES {
            self.queue.finish()?;
            since.written.drain(..).for_each(|p| self.shared.staging.give(p));
        }
        Counts::add(&self.shared.counts.uploads, 1);
        Counts::add(&self.shared.counts.uploaded_bytes, bytes.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        let mut since = lock(&self.since);
        let b = self.shared.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, bytes)?;
        let to = Arc::new(Mutex::new(halcyon_host::zeros(bytes, "a copy to the host")?));
        let pages = self.shared.staging.take(&self.shared, bytes)?;
        if bytes > 0 {
            // SAFETY: the range was validated. `pages` has `bytes` bytes, is used by nothing else and moves
            // to the event below; after an error `finish` waits for the queue.
            let read = || unsafe { self.queue.read_later(b, offset, pages.1.at(), bytes) };
            if let Err(e) = self.ordered(|| b.reading(), read) {
                self.queue.finish()?;
                return Err(e);
            }
        }
        Counts::add(&self.shared.counts.downloads, 1);
        Counts::add(&self.shared.counts.downloaded_bytes, bytes as u64);
        let event = self.close(&mut since, Some((pages, to.clone())))?;
        Ok(Download::new(event, to))
    }

    fn record(&self) -> Result<Event> {
        self.close(&mut lock(&self.since), None)
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let _since = lock(&self.since);
        if event.is_done() {
            return Ok(());
        }
        let same = |m: &&MarkerHandle| Arc::ptr_eq(&m.0.shared, &self.shared);
        match event.progress().and_then(|p| p.as_any().downcast_ref::<MarkerHandle>()).filter(same) {
            Some(m) => self
                .ordered(Access::default, || self.queue.wait_for_marks(std::slice::from_ref(&m.0.point)))
                .map(drop),
            // CUDA or HIP cannot wait for an event of another device, so this thread waits. Whoever waits for
            // the event itself receives its error.
            None => {
                if let Err(e) = event.wait() {
                    tracing::debug!("an event of another device failed: {e}");
                }
                Ok(())
            }
        }
    }
}

impl Drop for SimtStream {
    fn drop(&mut self) {
        let _visit = self.shared.context.visit();
        // Until the queue has finished, the device may read and write the pages.
        if let Err(e) = self.queue.finish() {
            tracing::warn!(device = self.shared.context.id, "the work of a dropped stream failed: {e}");
        }
        self.shared.queues.close();
    }
}

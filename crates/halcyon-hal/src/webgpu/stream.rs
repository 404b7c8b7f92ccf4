//! Streams over `wgpu`'s only queue. All streams of a device share this queue, so their work never runs
//! concurrently. They only add asynchronous calls: copies to the host, events and futures.

use super::memory::WgBuffer;
use super::program::WgProgram;
use super::queue::{Fetch, Queue, Submission};
use crate::commands::{self, DeviceInstance};
use crate::stream::{Progress, Report};
use crate::validate;
use crate::{BufferRef, Command, Counts, Download, Event, Result, Stream};
use halcyon_ir::data::Bytes;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// The state that a device shares with its streams.
#[derive(Debug)]
pub(crate) struct Core {
    pub queue: Queue,
    counts: Arc<Counts>,
    id: String,
    number: u64,
    /// Events with callbacks, and whether a thread is waiting for them.
    watched: Mutex<(VecDeque<Event>, bool)>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the value consistent, so a poisoned lock is safe to use.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl Core {
    pub(crate) fn new(queue: Queue, counts: Arc<Counts>, id: String, number: u64) -> Core {
        Core { queue, counts, id, number, watched: Mutex::default() }
    }

    pub(crate) fn enqueue(&self, s: &mut Submission<'_>, commands: &[Command<'_>]) -> Result<()> {
        // SAFETY: `wgpu` checks bindings, and shaders do not access memory past them.
        unsafe { commands::run(self, s, &self.counts, commands) }
    }
}

impl DeviceInstance for Core {
    type Buffer = WgBuffer;
    type Program = WgProgram;

    fn id(&self) -> &str {
        &self.id
    }

    fn number(&self) -> u64 {
        self.number
    }
}

/// The state behind an [`Event`]. The device must be polled; it makes no callbacks by itself.
struct Marker {
    core: Arc<Core>,
    fetch: Fetch,
    report: Arc<Report>,
    to: Arc<Mutex<Vec<u8>>>,
    done: Mutex<bool>,
}

impl Progress for Marker {
    fn poll(&self) -> bool {
        let mut done = lock(&self.done);
        *done = *done || self.core.queue.finish_fetch(&self.fetch, &mut lock(&self.to), &self.report);
        *done
    }

    fn wait(&self) {
        self.core.queue.await_fetch(&self.fetch);
    }

    /// Adds the event to those that a thread waits for, one after another. If the device has no such thread,
    /// starts one, which ends when no events are left.
    fn watch(&self, event: &Event) {
        let mut w = lock(&self.core.watched);
        w.0.push_back(event.clone());
        if w.1 {
            return;
        }
        w.1 = true;
        drop(w);
        let core = self.core.clone();
        let serve = move || {
            loop {
                let mut w = lock(&core.watched);
                let Some(e) = w.0.pop_front() else {
                    w.1 = false;
                    return;
                };
                drop(w);
                // The outcome is ignored here: the event reports it to its waiters.
                let _ = e.wait();
            }
        };
        if let Err(e) = std::thread::Builder::new().name("halcyon-webgpu".into()).spawn(serve.clone()) {
            tracing::debug!("no thread to poll events could be started, so the caller polls them: {e}");
            serve();
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A stream of a WebGPU device.
pub(super) struct WgStream {
    core: Arc<Core>,
    fault: wgpu::Buffer,
    /// The report of the work since the last event, and whether a kernel that can fault is part of this work.
    open: Mutex<(Arc<Report>, bool)>,
}

impl fmt::Debug for WgStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgStream({})", self.core.id)
    }
}

impl WgStream {
    pub(super) fn new(core: &Arc<Core>) -> Result<WgStream> {
        Ok(WgStream { core: core.clone(), fault: core.queue.word()?, open: Mutex::default() })
    }

    fn close(&self, from: Option<(&WgBuffer, usize, usize)>, to: Vec<u8>) -> Result<Download> {
        let mut open = lock(&self.open);
        let fault = open.1.then_some(&self.fault);
        let fetch = self.core.queue.fetch(from, fault)?;
        let (report, _) = std::mem::take(&mut *open);
        let to = Arc::new(Mutex::new(to));
        let (core, done) = (self.core.clone(), Mutex::new(false));
        let marker = Marker { core, fetch, report: report.clone(), to: to.clone(), done };
        Ok(Download::new(Event::new(report, Some(Box::new(marker))), to))
    }
}

impl Stream for WgStream {
    fn overlaps(&self) -> bool {
        false
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let mut open = lock(&self.open);
        self.core.queue.run_for(&self.fault, &mut open.1, |s| self.core.enqueue(s, commands))
    }

    /// `wgpu` copies the bytes before this returns.
    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let b = self.core.buffer("write", dst)?;
        let bytes = src.bytes();
        validate::range("write", dst.bytes(), offset, bytes.len())?;
        self.core.queue.write(b, offset, bytes)?;
        Counts::add(&self.core.counts.uploads, 1);
        Counts::add(&self.core.counts.uploaded_bytes, bytes.len() as u64);
        Ok(())
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        let b = self.core.buffer("read", src)?;
        validate::range("read", src.bytes(), offset, bytes)?;
        let to = halcyon_host::zeros(bytes, "a copy to the host")?;
        let d = self.close(Some((b, offset, bytes)), to)?;
        Counts::add(&self.core.counts.downloads, 1);
        Counts::add(&self.core.counts.downloaded_bytes, bytes as u64);
        Ok(d)
    }

    fn record(&self) -> Result<Event> {
        self.close(None, vec![]).map(|d| d.event().clone())
    }

    fn wait(&self, event: &Event) -> Result<()> {
        let marker = event.progress().and_then(|p| p.as_any().downcast_ref::<Marker>());
        if !marker.is_some_and(|m| Arc::ptr_eq(&m.core, &self.core)) {
            // An error of the other device's work is ignored here: that device reports it.
            let _ = event.wait();
        }
        Ok(())
    }
}

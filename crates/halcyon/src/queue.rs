//! Queues of a device: those of streams, and those in which futures run. The device's own queue has no
//! [`Queue`] value.

use crate::sync::lock;
use halcyon_hal::{BufferRef, Capture, Command, Device, Event, Stream, StreamOptions};
use halcyon_ir::Scalar;
use halcyon_ir::error::{Error, Result};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A queue besides the device's own.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) raw: Arc<dyn Stream>,
    /// The queue's number among the queues of its backend.
    pub(crate) id: u64,
    /// The number of the [`Queues`] that it belongs to.
    owner: u64,
}

/// The queues of one backend, and the runs in them whose outcome has not been reported.
#[derive(Debug)]
pub(crate) struct Queues {
    /// A number that no other value of this type has.
    number: u64,
    next: AtomicU64,
    /// The queue of futures that name no stream, and the queue of their copies.
    work: Mutex<Option<Arc<Queue>>>,
    copies: Mutex<Option<Arc<Queue>>>,
    /// The number of the queue of each run, and the event after the run.
    unreported: Mutex<Vec<(u64, Event)>>,
}

impl Default for Queues {
    fn default() -> Queues {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Queues {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            next: AtomicU64::default(),
            work: Mutex::default(),
            copies: Mutex::default(),
            unreported: Mutex::default(),
        }
    }
}

thread_local! {
    /// The queues of the streams whose `run` this thread is inside, innermost last.
    static CURRENT: RefCell<Vec<Arc<Queue>>> = const { RefCell::new(Vec::new()) };
}

impl Queues {
    /// Makes a queue.
    ///
    /// # Errors
    /// As [`Device::create_stream`].
    pub(crate) fn create(&self, device: &dyn Device, options: &StreamOptions) -> Result<Arc<Queue>> {
        let raw = device.create_stream(options)?;
        Ok(Arc::new(Queue { raw, id: self.next.fetch_add(1, Ordering::Relaxed), owner: self.number }))
    }

    /// The queue that this thread's work goes to; `None` for the device's own.
    pub(crate) fn current(&self) -> Option<Arc<Queue>> {
        CURRENT.with_borrow(|c| c.iter().rev().find(|q| q.owner == self.number).cloned())
    }

    /// The queue for a future's work: the current one, or else the one in `kept`, made if missing; `None` if
    /// the device has no streams.
    fn current_or(
        &self,
        kept: &Mutex<Option<Arc<Queue>>>,
        device: &dyn Device,
        threads: usize,
    ) -> Result<Option<Arc<Queue>>> {
        if let Some(q) = self.current() {
            return Ok(Some(q));
        }
        let mut kept = lock(kept);
        if kept.is_none() {
            match self.create(device, &StreamOptions { threads: Some(threads), ..StreamOptions::default() }) {
                Ok(q) => *kept = Some(q),
                Err(Error::Unsupported { .. }) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(kept.clone())
    }

    /// The queue of asynchronous evaluations. It has all threads, because an awaiting caller needs none.
    pub(crate) fn for_work(&self, device: &dyn Device) -> Result<Option<Arc<Queue>>> {
        self.current_or(&self.work, device, usize::MAX)
    }

    /// The queue of asynchronous copies.
    pub(crate) fn for_copies(&self, device: &dyn Device) -> Result<Option<Arc<Queue>>> {
        self.current_or(&self.copies, device, 1)
    }

    /// Keeps the event of a run until its outcome is reported.
    pub(crate) fn track(&self, queue: u64, event: &Event) {
        let mut all = lock(&self.unreported);
        all.retain(|(_, e)| !e.is_done() || !matches!(e.known_outcome(), Ok(None)));
        all.push((queue, event.clone()));
    }

    /// Marks the outcome of a run as reported.
    pub(crate) fn reported(&self, event: &Event) {
        lock(&self.unreported).retain(|(_, e)| !e.is_same(event));
    }

    /// The first fault found so far by work whose outcome has not been reported.
    pub(crate) fn fault(&self) -> Option<u32> {
        let mut all = lock(&self.unreported);
        let at = all.iter().position(|(_, e)| matches!(e.known_outcome(), Ok(Some(_))))?;
        all.remove(at).1.known_outcome().ok().flatten()
    }

    /// Takes the events of the runs of one queue, or of all, whose outcome has not been reported.
    pub(crate) fn take(&self, queue: Option<u64>) -> Vec<Event> {
        let mut taken = vec![];
        lock(&self.unreported).retain(|(id, e)| {
            let is = queue.is_none_or(|q| q == *id);
            if is {
                taken.push(e.clone());
            }
            !is
        });
        taken
    }
}

/// Calls `f` with a queue as the current one.
pub(crate) fn with_current<R>(queue: &Arc<Queue>, f: impl FnOnce() -> R) -> R {
    struct PopOnDrop;
    impl Drop for PopOnDrop {
        fn drop(&mut self) {
            let left = CURRENT.with_borrow_mut(Vec::pop);
            drop(left);
        }
    }
    CURRENT.with_borrow_mut(|c| c.push(queue.clone()));
    let _leave = PopOnDrop;
    f()
}

/// Submits commands to a queue, or to the device's own.
pub(crate) fn submit(device: &dyn Device, on: Option<&Queue>, commands: &[Command<'_>]) -> Result<()> {
    match on {
        Some(q) => q.raw.submit(commands),
        None => device.submit(commands),
    }
}

/// Launches captured commands in a queue, or in the device's own.
pub(crate) fn launch(
    device: &dyn Device,
    on: Option<&Queue>,
    captured: &dyn Capture,
    buffers: &[&BufferRef],
    values: &[Scalar],
) -> Result<bool> {
    match on {
        Some(q) => q.raw.launch_capture(captured, buffers, values),
        None => device.launch_capture(captured, buffers, values),
    }
}

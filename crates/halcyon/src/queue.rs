//! Queues of a device: the queues of streams, and the queues in which futures run. The device's own queue has
//! no [`Queue`] value.

use crate::sync::lock;
use halcyon_hal::{Device, Stream, StreamOptions};
use halcyon_ir::error::{Error, Result};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A queue besides the device's own.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) raw: Arc<dyn Stream>,
    /// The queue's number among the queues of its runtime.
    pub(crate) id: u64,
    /// The number of the [`Queues`] that the queue belongs to.
    owner: u64,
}

/// The queues of one runtime.
#[derive(Debug)]
pub(crate) struct Queues {
    /// A number that no other value of this type has.
    number: u64,
    next: AtomicU64,
    /// The queue of futures that name no stream, and the queue of their copies.
    work: Mutex<Option<Arc<Queue>>>,
    copies: Mutex<Option<Arc<Queue>>>,
}

impl Default for Queues {
    fn default() -> Queues {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Queues {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            next: AtomicU64::default(),
            work: Mutex::default(),
            copies: Mutex::default(),
        }
    }
}

thread_local! {
    /// The queues of the streams whose `run` this thread is executing, innermost last.
    static CURRENT: RefCell<Vec<Arc<Queue>>> = const { RefCell::new(Vec::new()) };
}

impl Queues {
    /// Makes a queue.
    ///
    /// # Errors
    /// The errors of [`Device::create_stream`].
    pub(crate) fn create(&self, device: &dyn Device, options: &StreamOptions) -> Result<Arc<Queue>> {
        let raw = device.create_stream(options)?;
        Ok(Arc::new(Queue { raw, id: self.next.fetch_add(1, Ordering::Relaxed), owner: self.number }))
    }

    /// The queue that this thread's work goes to; `None` for the device's own.
    pub(crate) fn current(&self) -> Option<Arc<Queue>> {
        CURRENT.with_borrow(|c| c.iter().rev().find(|q| q.owner == self.number).cloned())
    }

    /// The queue for a future's work: the current queue, or, if there is none, the queue in `kept`, which is
    /// made if it is missing. `None` if the device has no streams.
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
}

/// Calls `f` with a queue as the current queue.
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

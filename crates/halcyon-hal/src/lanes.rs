//! The queues of one device: its own and its streams', ordered among each other by what their work reads and
//! writes.

use crate::Result;
use crate::hazard::{Access, Ledger};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The device's own queue among the lanes.
const OWN: u64 = 0;

/// A point of a queue.
pub(crate) trait Mark: Send + Sync + fmt::Debug {
    /// Whether the device has come to it, or never will.
    fn is_done(&self) -> bool;
    /// Waits for it.
    fn wait(&self) -> Result<()>;
}

/// What the driver's queues can do for their order.
pub(crate) trait Fenced {
    type Mark: Mark;
    /// What is enqueued from here on begins when these are done.
    fn behind(&self, marks: &[Arc<Self::Mark>]) -> Result<()>;
    /// A point behind all that was enqueued.
    fn mark(&self) -> Result<Self::Mark>;
    /// Waits for all that was enqueued.
    fn finish(&self) -> Result<()>;
    /// Hands over what was enqueued, so that other queues may wait for it.
    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

/// What the queues of one device know of each other.
#[derive(Debug)]
pub(crate) struct Lanes<M> {
    /// Work under way, each with the point of its end. Whoever enqueues while there are streams holds this
    /// lock.
    traffic: Mutex<Ledger<Arc<M>>>,
    /// Streams, until their work is done.
    streams: AtomicUsize,
    /// Calls of the device's own queue that found no streams.
    unseen: AtomicUsize,
    next: AtomicU64,
}

impl<M> Default for Lanes<M> {
    fn default() -> Self {
        let (streams, unseen) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Lanes { traffic: Mutex::default(), streams, unseen, next: AtomicU64::new(OWN + 1) }
    }
}

impl<M: Mark> Lanes<M> {
    fn lock(&self) -> MutexGuard<'_, Ledger<Arc<M>>> {
        // Every update leaves the ledger whole, so a panic elsewhere does not damage it.
        self.traffic.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A lane for a stream. `own` is the device's queue, which has nothing under way afterwards that the
    /// ledger does not know.
    pub fn open(&self, own: &impl Fenced<Mark = M>) -> Result<u64> {
        self.streams.fetch_add(1, Ordering::SeqCst);
        while self.unseen.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        own.finish().inspect_err(|_| self.close())?;
        Ok(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A stream's work is done, and no more will come.
    pub fn close(&self) {
        self.streams.fetch_sub(1, Ordering::SeqCst);
    }

    /// Runs a call of the device's own queue that needs no order with streams, because there are none. `None`
    /// where there are.
    pub fn alone<R>(&self, f: impl FnOnce() -> R) -> Option<R> {
        struct Count<'a>(&'a AtomicUsize);
        impl Drop for Count<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        // Both sides write their own number and then look at the other's, so one of them sees the other.
        self.unseen.fetch_add(1, Ordering::SeqCst);
        let _end = Count(&self.unseen);
        (self.streams.load(Ordering::SeqCst) == 0).then(f)
    }

    /// Enqueues work behind what it conflicts with; the point of its end.
    pub fn ordered<R>(
        &self,
        lane: u64,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<M>, R)> {
        self.marked(lane, queue, access, || f().map(|r| (None, r)))
    }

    /// [`Lanes::ordered`] for work that may know the point of its end.
    pub fn marked<R>(
        &self,
        lane: u64,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<M>, R)>,
    ) -> Result<(Arc<M>, R)> {
        let mut t = self.lock();
        // Asked with the lock: nothing moves meanwhile.
        let mut access = access();
        access.settle();
        t.retain(|e| !e.mark.is_done());
        let before: Vec<Arc<M>> = t.before(lane, &access).map(|e| e.mark.clone()).collect();
        if !before.is_empty() {
            queue.behind(&before)?;
        }
        // What was enqueued before an error runs too.
        let (end, made) = match f() {
            Ok((Some(m), r)) => (m, Ok(r)),
            Ok((None, r)) => (queue.mark()?, Ok(r)),
            Err(e) => (queue.mark()?, Err(e)),
        };
        let end = Arc::new(end);
        t.enter(lane, access, end.clone());
        queue.flush()?;
        Ok((end, made?))
    }

    /// [`Lanes::ordered`] for the device's own queue.
    pub fn own<R>(
        &self,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<M>, R)> {
        self.ordered(OWN, queue, access, f)
    }

    /// [`Lanes::marked`] for the device's own queue.
    #[cfg(feature = "opencl")]
    pub fn own_marked<R>(
        &self,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<M>, R)>,
    ) -> Result<(Arc<M>, R)> {
        self.marked(OWN, queue, access, f)
    }

    /// Runs `f` while no queue has work under way and none gets any, but for calls that found no streams,
    /// which the queue's own locks keep out.
    pub fn still<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut t = self.lock();
        let mut open = vec![];
        t.retain(|e| {
            open.push(e.mark.clone());
            false
        });
        settle(open);
        f()
    }

    /// Waits for the work of streams that is under way. What failed is told by its own events.
    pub fn drain(&self) {
        if self.streams.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut open = vec![];
        self.lock().retain(|e| {
            open.push(e.mark.clone());
            true
        });
        settle(open);
    }
}

fn settle<M: Mark>(open: Vec<Arc<M>>) {
    for m in open {
        if let Err(e) = m.wait() {
            tracing::debug!("work of a stream failed: {e}");
        }
    }
}

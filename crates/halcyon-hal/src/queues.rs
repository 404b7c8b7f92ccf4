//! The queues of one device (its own and its streams'), ordered by the memory that their work reads and
//! writes.

use crate::Result;
use crate::hazard::{Access, Ledger};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The id of the device's own queue.
const DEVICE_QUEUE: u64 = 0;

/// A point in a queue, for which the host and other queues can wait.
pub(crate) trait Mark: Send + Sync + fmt::Debug {
    /// Whether the device has reached the mark or will never reach it.
    fn is_done(&self) -> bool;
    /// Waits until the device reaches the mark.
    fn wait(&self) -> Result<()>;
}

/// The ordering operations of a driver's queue.
pub(crate) trait Fenced {
    type Mark: Mark;
    /// Makes everything enqueued later wait for these marks.
    fn wait_for_marks(&self, marks: &[Arc<Self::Mark>]) -> Result<()>;
    /// A mark after all commands enqueued so far.
    fn mark(&self) -> Result<Self::Mark>;
    /// Waits for all commands enqueued so far.
    fn finish(&self) -> Result<()>;
    /// Submits the enqueued commands, so that other queues may wait for them.
    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

/// The shared state of the queues of one device.
#[derive(Debug)]
pub(crate) struct Queues<M> {
    /// Pending work with the mark at its end. While streams exist, work is enqueued under this lock.
    traffic: Mutex<Ledger<Arc<M>>>,
    /// Number of open streams. A dropped stream counts until its work is done.
    streams: AtomicUsize,
    /// Number of running calls of the device's own queue that skip the ledger because no stream existed.
    unseen: AtomicUsize,
    next: AtomicU64,
}

impl<M> Default for Queues<M> {
    fn default() -> Self {
        let (streams, unseen) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Queues { traffic: Mutex::default(), streams, unseen, next: AtomicU64::new(DEVICE_QUEUE + 1) }
    }
}

impl<M: Mark> Queues<M> {
    fn lock(&self) -> MutexGuard<'_, Ledger<Arc<M>>> {
        // Every update leaves the ledger consistent, so a poisoned lock is safe to use.
        self.traffic.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns an id for a new stream's queue. Waits for all work of the device's queue `own`, because the
    /// ledger does not contain the work that was enqueued while there was no stream.
    pub(crate) fn open(&self, own: &impl Fenced<Mark = M>) -> Result<u64> {
        self.streams.fetch_add(1, Ordering::SeqCst);
        while self.unseen.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        own.finish().inspect_err(|_| self.close())?;
        Ok(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Closes a stream whose work is done.
    pub(crate) fn close(&self) {
        self.streams.fetch_sub(1, Ordering::SeqCst);
    }

    /// Runs a call of the device's own queue without ordering if there are no streams. `None` if there are
    /// streams.
    pub(crate) fn unordered<R>(&self, f: impl FnOnce() -> R) -> Option<R> {
        struct Count<'a>(&'a AtomicUsize);
        impl Drop for Count<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        // This function increments `unseen` before it reads `streams`, and `open` increments `streams` before
        // it reads `unseen` (SeqCst). So at least one of the two sees the other's increment.
        self.unseen.fetch_add(1, Ordering::SeqCst);
        let _end = Count(&self.unseen);
        (self.streams.load(Ordering::SeqCst) == 0).then(f)
    }

    /// Enqueues work so that it runs after everything it conflicts with. Returns the mark at its end.
    pub(crate) fn ordered<R>(
        &self,
        number: u64,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<M>, R)> {
        self.marked(number, queue, access, || f().map(|r| (None, r)))
    }

    /// Like [`Queues::ordered`], for work that may create the mark at its end itself.
    pub(crate) fn marked<R>(
        &self,
        number: u64,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<M>, R)>,
    ) -> Result<(Arc<M>, R)> {
        let mut t = self.lock();
        // `access` is called under the lock, so that no buffer is moved between this call and the enqueueing.
        let mut access = access();
        access.normalise();
        t.retain(|e| !e.mark.is_done());
        let before: Vec<Arc<M>> = t.before(number, &access).map(|e| e.mark.clone()).collect();
        if !before.is_empty() {
            queue.wait_for_marks(&before)?;
        }
        // Commands that were enqueued before an error run too, so the work is entered into the ledger in
        // either case.
        let (end, made) = match f() {
            Ok((Some(m), r)) => (m, Ok(r)),
            Ok((None, r)) => (queue.mark()?, Ok(r)),
            Err(e) => (queue.mark()?, Err(e)),
        };
        let end = Arc::new(end);
        t.enter(number, access, end.clone());
        queue.flush()?;
        Ok((end, made?))
    }

    /// [`Queues::ordered`] for the device's own queue.
    pub(crate) fn ordered_own<R>(
        &self,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<(Arc<M>, R)> {
        self.ordered(DEVICE_QUEUE, queue, access, f)
    }

    /// [`Queues::marked`] for the device's own queue.
    pub(crate) fn own_marked<R>(
        &self,
        queue: &impl Fenced<Mark = M>,
        access: impl FnOnce() -> Access,
        f: impl FnOnce() -> Result<(Option<M>, R)>,
    ) -> Result<(Arc<M>, R)> {
        self.marked(DEVICE_QUEUE, queue, access, f)
    }

    /// Runs `f` while the ledger has no pending work and no queue can enqueue through it. For calls of the
    /// device's queue that skip the ledger (`Queues::unordered`), `f` must wait itself and must take the
    /// locks of that queue.
    pub(crate) fn while_idle<R>(&self, f: impl FnOnce() -> Result<R>) -> Result<R> {
        let mut t = self.lock();
        let mut open = vec![];
        t.retain(|e| {
            open.push(e.mark.clone());
            false
        });
        settle(open);
        f()
    }

    /// Waits for the pending work of all queues if there are streams. Errors are reported by the streams'
    /// events.
    pub(crate) fn drain(&self) {
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

//! Streams, events and futures: work that is handed over now and waited for later, or never.
//!
//! A future here is a plain [`std::future::Future`] for any executor. The work begins with the call, not with
//! the first poll; awaiting it tells when it is done and what went wrong. Dropping a future cancels nothing.

use crate::backend::Backend;
use crate::tensor::{self, Tensor};
use halcyon_hal as hal;
use halcyon_hal::stream::{Elapsed, Reached};
use halcyon_hal::{BufferRef, Command, Replay, StreamOptions, Tag};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::TensorType;
use halcyon_ir::{ConstData, Scalar};
use std::cell::RefCell;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update leaves the value whole, so a panic elsewhere does not damage it.
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// A queue of a device, as the backend numbers it.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) raw: Arc<dyn hal::Stream>,
    pub(crate) id: u64,
}

/// What a backend knows of its streams.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    next: AtomicU64,
    /// Where futures run that name no stream, and where their copies do.
    work: Mutex<Option<Arc<Lane>>>,
    copies: Mutex<Option<Arc<Lane>>>,
    /// Runs whose outcome nobody was told: the stream and the event behind each.
    flights: Mutex<Vec<(u64, hal::Event)>>,
}

impl Lanes {
    /// Keeps the event of a run until its outcome was told.
    pub(crate) fn follow(&self, lane: u64, event: &hal::Event) {
        let mut f = lock(&self.flights);
        f.retain(|(_, e)| !e.is_done() || !matches!(e.so_far(), Ok(None)));
        f.push((lane, event.clone()));
    }

    /// The outcome of a run was told.
    fn told(&self, event: &hal::Event) {
        lock(&self.flights).retain(|(_, e)| !e.same(event));
    }

    /// The first fault that work reported by now.
    pub(crate) fn fault(&self) -> Option<u32> {
        let mut f = lock(&self.flights);
        let at = f.iter().position(|(_, e)| matches!(e.so_far(), Ok(Some(_))))?;
        f.remove(at).1.so_far().ok().flatten()
    }

    /// Waits for the runs of a stream, or of all; the first error that nobody was told.
    pub(crate) fn settle(&self, lane: Option<u64>, backend: &Backend) -> Result<()> {
        let mut mine = vec![];
        lock(&self.flights).retain(|(id, e)| {
            let is = lane.is_none_or(|l| l == *id);
            if is {
                mine.push(e.clone());
            }
            !is
        });
        let outcomes: Vec<Result<()>> = mine.iter().map(|e| explain(e.wait(), backend)).collect();
        outcomes.into_iter().collect()
    }
}

/// The outcome of work as an error that names its op.
fn explain(outcome: Result<Option<u32>>, backend: &Backend) -> Result<()> {
    match outcome? {
        None => Ok(()),
        Some(id) => Err(backend.0.faults.explain(id, &**backend.device())),
    }
}

thread_local! {
    /// The streams whose `run` this thread is in, the innermost last.
    static CURRENT: RefCell<Vec<(Backend, Arc<Lane>)>> = const { RefCell::new(Vec::new()) };
}

/// The stream that work of this thread goes to; `None` for the device's own queue.
pub(crate) fn current(backend: &Backend) -> Option<Arc<Lane>> {
    CURRENT.with_borrow(|c| c.iter().rev().find(|(b, _)| b.same(backend)).map(|(_, l)| l.clone()))
}

/// Runs `f` with a stream as the current one.
fn within<R>(backend: &Backend, lane: &Arc<Lane>, f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            let left = CURRENT.with_borrow_mut(Vec::pop);
            drop(left);
        }
    }
    CURRENT.with_borrow_mut(|c| c.push((backend.clone(), lane.clone())));
    let _leave = Leave;
    f()
}

/// Hands commands to a stream, or to the device's own queue.
pub(crate) fn submit(backend: &Backend, on: Option<&Lane>, commands: &[Command<'_>]) -> Result<()> {
    match on {
        Some(l) => l.raw.submit(commands),
        None => backend.device().submit(commands),
    }
}

/// Launches captured commands in a stream, or in the device's own queue.
pub(crate) fn replay(
    backend: &Backend,
    on: Option<&Lane>,
    replay: &dyn Replay,
    buffers: &[&BufferRef],
    values: &[Scalar],
) -> Result<bool> {
    match on {
        Some(l) => l.raw.replay(replay, buffers, values),
        None => backend.device().replay(replay, buffers, values),
    }
}

/// A queue of a device beside its own, in order by itself. Work on values that another stream computes waits
/// for them without being told; what shares nothing runs side by side where the device can
/// ([`Stream::overlaps`]). Cloning shares it; dropping it cancels nothing.
///
/// ```
/// use halcyon::prelude::*;
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let x = Tensor::from_slice(&b, [2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// let (s, t) = (b.create_stream()?, b.create_stream()?);
/// let (y, z) = (x.matmul(&x), &x + 1.0);
/// s.eval(std::slice::from_ref(&y))?;
/// let done = t.eval(std::slice::from_ref(&z))?;
/// done.wait()?;
/// assert_eq!((&y + &z).to_vec::<f32>()?, [9.0, 13.0, 19.0, 27.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Stream {
    backend: Backend,
    lane: Arc<Lane>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} of {})", self.lane.id, self.backend.id())
    }
}

impl Stream {
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Whether work of this stream can run at one time with that of others.
    pub fn overlaps(&self) -> bool {
        self.lane.raw.overlaps()
    }

    /// Runs `f` at once, on this thread; what it evaluates, launches and copies without waiting, on this
    /// backend, goes to this stream. Reading values on the host ([`Tensor::to_vec`]) waits for them as ever.
    /// Custom ops without a kernel make the evaluation wait too.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        within(&self.backend, &self.lane, f)
    }

    /// Hands the computation of several tensors over as one plan; the event is done when they are computed.
    /// They can be used at once.
    ///
    /// # Errors
    /// As [`crate::eval`], for what can be said before anything runs; the rest is the event's.
    pub fn eval(&self, outputs: &[Tensor]) -> Result<Event> {
        if let Some(t) = outputs.iter().find(|t| !t.backend().same(&self.backend)) {
            return Err(Error::MixedDevices {
                op: "Stream::eval".into(),
                a: self.backend.id().into(),
                b: t.backend().id().into(),
                at: t.0.span.clone(),
            });
        }
        if let Some(raw) = self.run(|| tensor::eval_now(outputs))? {
            return Ok(Event { backend: self.backend.clone(), raw });
        }
        for e in outputs.iter().filter_map(Tensor::flight) {
            self.lane.raw.wait(&e)?;
        }
        self.record()
    }

    /// An event that is done when what was handed to this stream before is. What evaluations come to is told
    /// by their own events, futures, and [`Stream::synchronize`].
    pub fn record(&self) -> Result<Event> {
        Ok(Event { backend: self.backend.clone(), raw: self.lane.raw.record()? })
    }

    /// What is handed to this stream from here on begins when the event is done, which may be of another
    /// device.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.lane.raw.wait(&event.raw)
    }

    /// Waits for what was handed to this stream.
    ///
    /// # Errors
    /// The first error of its work that nobody was told: [`Error::Index`] for a bad index, that of the
    /// driver, [`Error::Internal`] for a kernel that panicked.
    pub fn synchronize(&self) -> Result<()> {
        let last = self.lane.raw.synchronize();
        let told = self.backend.0.lanes.settle(Some(self.lane.id), &self.backend);
        explain(last, &self.backend).and(told)
    }
}

/// A point in a stream. `event.await` is [`Event::wait`].
#[derive(Clone)]
pub struct Event {
    backend: Backend,
    raw: hal::Event,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

impl Event {
    pub fn is_done(&self) -> bool {
        self.raw.is_done()
    }

    /// Waits.
    ///
    /// # Errors
    /// Those of the work that it stands behind.
    pub fn wait(&self) -> Result<()> {
        let outcome = self.raw.wait();
        self.backend.0.lanes.told(&self.raw);
        explain(outcome, &self.backend)
    }

    /// When the device did the work that it stands behind, once it is done and where that is measured.
    pub fn elapsed(&self) -> Option<Elapsed> {
        self.raw.elapsed()
    }
}

impl IntoFuture for Event {
    type Output = Result<()>;
    type IntoFuture = Pending<()>;
    fn into_future(self) -> Pending<()> {
        Pending::new(&self.backend, Some(self.raw), || Ok(()))
    }
}

/// A value that a device is at work on: a future for any executor. The work was handed over already, and is
/// done whether or not anyone asks; dropping this cancels nothing.
pub struct Pending<T> {
    backend: Option<Backend>,
    reached: Option<Reached>,
    /// The value, when the device has come so far; taken by the poll that gives it.
    finish: Option<Box<dyn FnOnce() -> Result<T> + Send>>,
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.reached)
    }
}

impl<T> Pending<T> {
    fn new(
        backend: &Backend,
        event: Option<hal::Event>,
        finish: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (reached, finish) = (event.map(hal::Event::into_future), Box::new(finish));
        Pending { backend: Some(backend.clone()), reached, finish: Some(finish) }
    }

    fn failed(e: Error) -> Pending<T> {
        Pending { backend: None, reached: None, finish: Some(Box::new(|| Err(e))) }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let mut outcome = Ok(());
        if let Some(reached) = &mut self.reached {
            let Poll::Ready(r) = Pin::new(&mut *reached).poll(cx) else { return Poll::Pending };
            let event = reached.event().clone();
            if let Some(b) = &self.backend {
                b.0.lanes.told(&event);
                outcome = explain(r, b);
            }
        }
        match self.finish.take() {
            Some(f) => Poll::Ready(outcome.and_then(|()| f())),
            None => Poll::Ready(Err(Error::argument("poll", "the future has given its value already"))),
        }
    }
}

impl Backend {
    /// A stream. On the CPU it has a thread of its own and half of the backend's threads.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device has none; those of the driver.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamOptions::default())
    }

    /// As [`Backend::create_stream`], with a number of threads (CPU), or with times in its events.
    ///
    /// # Errors
    /// As there; [`Error::Argument`] for no threads.
    pub fn create_stream_with(&self, options: &StreamOptions) -> Result<Stream> {
        Ok(Stream { backend: self.clone(), lane: self.lane(options)? })
    }

    fn lane(&self, options: &StreamOptions) -> Result<Arc<Lane>> {
        let raw = self.device().create_stream(options)?;
        Ok(Arc::new(Lane { raw, id: self.0.lanes.next.fetch_add(1, Ordering::Relaxed) }))
    }

    /// The stream that a future's work goes to: the current one, or the one kept in `kept`; `None` where the
    /// device has none.
    fn lane_for(&self, kept: &Mutex<Option<Arc<Lane>>>, threads: usize) -> Result<Option<Arc<Lane>>> {
        if let Some(l) = current(self) {
            return Ok(Some(l));
        }
        let mut kept = lock(kept);
        if kept.is_none() {
            match self.lane(&StreamOptions { threads: Some(threads), ..StreamOptions::default() }) {
                Ok(l) => *kept = Some(l),
                Err(Error::Unsupported { .. }) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(kept.clone())
    }

    /// Where evaluations of futures run. Who awaits them needs no thread meanwhile, so it has all.
    fn work_lane(&self) -> Result<Option<Arc<Lane>>> {
        self.lane_for(&self.0.lanes.work, usize::MAX)
    }

    fn copy_lane(&self) -> Result<Option<Arc<Lane>>> {
        self.lane_for(&self.0.lanes.copies, 1)
    }

    /// Copies host data to the device without waiting. The data is shared, not copied first; the tensor is
    /// the future's value.
    ///
    /// # Errors
    /// The future's: where the device has no room, and those of the driver.
    #[track_caller]
    pub fn copy_host_to_device_async(&self, data: &ConstData) -> Pending<Tensor> {
        let span = Span::caller();
        let begin = || -> Result<(Tensor, Option<hal::Event>)> {
            let b = self.device().alloc(data.bytes().len(), Tag::Io)?;
            let event = match self.copy_lane()? {
                Some(l) => {
                    l.raw.write(&b, 0, data.owner())?;
                    let e = l.raw.record()?;
                    self.0.lanes.follow(l.id, &e);
                    Some(e)
                }
                None => {
                    self.device().write(&b, 0, data.bytes())?;
                    None
                }
            };
            let t = Tensor::at(self, TensorType::new(data.dtype, &data.dims), b, span);
            t.set_flight(event.clone());
            Ok((t, event))
        };
        match begin() {
            Ok((t, event)) => Pending::new(self, event, || Ok(t)),
            Err(e) => Pending::failed(e),
        }
    }

    /// Computes a tensor and copies it to the host without waiting: [`Tensor::to_data_async`].
    pub fn copy_device_to_host_async(&self, t: &Tensor) -> Pending<ConstData> {
        if !t.backend().same(self) {
            return Pending::failed(Error::MixedDevices {
                op: "copy_device_to_host_async".into(),
                a: self.id().into(),
                b: t.backend().id().into(),
                at: t.0.span.clone(),
            });
        }
        t.to_data_async()
    }
}

/// Futures. What can be said at once (shapes, types, memory) is the future's error too.
impl Tensor {
    /// Hands the computation over, to the current stream ([`Stream::run`]) or one of the backend's own, and
    /// returns. The value is this tensor, which can be used at once: what reads it waits for it on the
    /// device.
    ///
    /// Planning and compiling a plan that is not kept yet happen in this call, and so does all of the
    /// computation on a device without streams and of custom ops without a kernel.
    pub fn eval_async(&self) -> Pending<Tensor> {
        match self.hand_over() {
            Ok((_, event)) => {
                let t = self.clone();
                Pending::new(self.backend(), event, || Ok(t))
            }
            Err(e) => Pending::failed(e),
        }
    }

    /// The lane that took the evaluation, and the event of its end.
    fn hand_over(&self) -> Result<(Option<Arc<Lane>>, Option<hal::Event>)> {
        let b = self.backend();
        let Some(lane) = b.work_lane()? else {
            self.eval()?;
            b.synchronize()?;
            return Ok((None, None));
        };
        let event = within(b, &lane, || tensor::eval_now(std::slice::from_ref(self)))?;
        Ok((Some(lane), event.or_else(|| self.flight())))
    }

    /// The values on the host.
    ///
    /// # Errors
    /// The future's: as [`Tensor::to_data`]. A bad index in work of the device's own queue is told by the
    /// next call that waits for it.
    pub fn to_data_async(&self) -> Pending<ConstData> {
        let begin = || -> Result<Pending<ConstData>> {
            let (lane, run) = self.hand_over()?;
            let Some(lane) = lane else {
                let d = self.to_data()?;
                return Ok(Pending::new(self.backend(), None, || Ok(d)));
            };
            let (dims, dtype) = (self.dims()?, self.0.ty.dtype);
            let got = lane.raw.read(&self.ready()?, 0, dtype.bytes(dims.iter().product()))?;
            let (event, backend) = (got.event().clone(), self.backend().clone());
            let finish = move || {
                if let Some(run) = run {
                    // It came before the copy.
                    let outcome = run.so_far();
                    backend.0.lanes.told(&run);
                    explain(outcome, &backend)?;
                }
                backend.stray()?;
                ConstData::new(dtype, &dims, Arc::new(got.take()?))
            };
            Ok(Pending::new(self.backend(), Some(event), finish))
        };
        begin().unwrap_or_else(Pending::failed)
    }

    /// The values on the host, converted to `T`.
    ///
    /// # Errors
    /// As [`Tensor::to_data_async`].
    pub fn to_vec_async<T: halcyon_ir::Element + Send>(&self) -> impl Future<Output = Result<Vec<T>>> + Send {
        let data = self.to_data_async();
        async move { Ok(data.await?.to_vec()) }
    }

    /// [`Tensor::matmul`], handed over at once as by [`Tensor::eval_async`].
    #[track_caller]
    pub fn matmul_async(&self, rhs: &Tensor) -> Pending<Tensor> {
        self.matmul(rhs).eval_async()
    }
}

//! Streams, events and futures: asynchronous work.
//!
//! A future here is a plain [`std::future::Future`] for any executor. The work starts with the call, not with
//! the first poll; awaiting the future waits for completion and returns errors. Dropping a future does not
//! cancel the work.

use crate::backend::Backend;
use crate::queue::{self, Queue};
use crate::runtime::Runtime;
use crate::tensor::{self, Tensor};
use halcyon_hal as hal;
use halcyon_hal::stream::{Elapsed, EventFuture};
use halcyon_hal::{StreamOptions, Tag};
use halcyon_ir::ConstData;
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::TensorType;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A further queue of a device. Its work runs in order. Work that uses values computed by another stream
/// waits for them automatically; independent work runs concurrently if the device can ([`Stream::overlaps`]).
/// Clones share the queue. Dropping a stream does not cancel its work.
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
    queue: Arc<Queue>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({} of {})", self.queue.id, self.backend.id())
    }
}

impl Stream {
    /// The backend whose device the stream belongs to.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Whether this stream's work can run concurrently with that of other streams.
    pub fn overlaps(&self) -> bool {
        self.queue.raw.overlaps()
    }

    /// Calls `f` immediately, on this thread. Evaluations, launches and asynchronous copies that `f` makes on
    /// this backend go to this stream. Reading values on the host ([`Tensor::to_vec`]) still waits for them.
    /// An evaluation that contains a custom op without a kernel also waits.
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        queue::with_current(&self.queue, f)
    }

    /// Enqueues the computation of several tensors as one plan. The event completes when they are computed.
    /// The tensors can be used immediately: work that uses them waits on the device until they are computed.
    ///
    /// # Errors
    /// The errors of [`crate::eval`] that are found before anything runs. The event reports later errors.
    pub fn eval(&self, outputs: &[Tensor]) -> Result<Event> {
        if let Some(t) = outputs.iter().find(|t| !t.backend().is_same(&self.backend)) {
            return Err(Error::MixedDevices {
                op: "Stream::eval".into(),
                a: self.backend.id().into(),
                b: t.backend().id().into(),
                at: t.0.span.clone(),
            });
        }
        if let Some(raw) = self.run(|| tensor::eval_now(outputs))? {
            return Ok(self.event(raw));
        }
        for e in outputs.iter().filter_map(Tensor::completion) {
            self.queue.raw.wait(&e)?;
        }
        self.record()
    }

    fn event(&self, raw: hal::Event) -> Event {
        Event { runtime: self.backend.runtime().clone(), raw }
    }

    /// An event that completes after all work enqueued in this stream so far. It does not report errors of
    /// evaluations. The evaluations' own events and futures, and [`Stream::synchronize`], report these
    /// errors.
    pub fn record(&self) -> Result<Event> {
        Ok(self.event(self.queue.raw.record()?))
    }

    /// Makes all work enqueued in this stream from now on wait for the event, which may belong to another
    /// device.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.queue.raw.wait(&event.raw)
    }

    /// Waits for all work enqueued in this stream.
    ///
    /// # Errors
    /// The first error of the stream's work that has not been reported yet: [`Error::Index`] for an index out
    /// of range, errors of the driver, [`Error::Internal`] for a kernel that panicked.
    pub fn synchronize(&self) -> Result<()> {
        let last = self.queue.raw.synchronize();
        let runtime = self.backend.runtime();
        let settled = runtime.wait_for_runs(Some(self.queue.id));
        runtime.explain(last).and(settled)
    }
}

/// A point in a stream's queue. `event.await` is the same as [`Event::wait`].
#[derive(Clone)]
pub struct Event {
    runtime: Arc<Runtime>,
    raw: hal::Event,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

impl Event {
    /// Whether the device has passed the event. Does not wait.
    pub fn is_done(&self) -> bool {
        self.raw.is_done()
    }

    /// Waits until the device has passed the event.
    ///
    /// # Errors
    /// Errors of the work before the event.
    pub fn wait(&self) -> Result<()> {
        let outcome = self.raw.wait();
        self.runtime.unreported.reported(&self.raw);
        self.runtime.explain(outcome)
    }

    /// The device times of the work before the event; `None` until it is done, or if the stream does not
    /// measure times.
    pub fn elapsed(&self) -> Option<Elapsed> {
        self.raw.elapsed()
    }
}

impl IntoFuture for Event {
    type Output = Result<()>;
    type IntoFuture = Pending<()>;
    fn into_future(self) -> Pending<()> {
        Pending::new(&self.runtime, Some(self.raw), || Ok(()))
    }
}

/// A value that a device is computing: a future for any executor. The work was enqueued already and runs to
/// its end whether or not the future is awaited; dropping the future does not cancel it.
pub struct Pending<T> {
    runtime: Option<Arc<Runtime>>,
    reached: Option<EventFuture>,
    /// Produces the value once the device has passed the event. The poll that returns the value takes this
    /// function.
    finish: Option<Box<dyn FnOnce() -> Result<T> + Send>>,
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({:?})", self.reached)
    }
}

impl<T> Pending<T> {
    fn new(
        runtime: &Arc<Runtime>,
        event: Option<hal::Event>,
        finish: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let (reached, finish) = (event.map(hal::Event::into_future), Box::new(finish));
        Pending { runtime: Some(runtime.clone()), reached, finish: Some(finish) }
    }

    fn failed(e: Error) -> Pending<T> {
        Pending { runtime: None, reached: None, finish: Some(Box::new(|| Err(e))) }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let mut outcome = Ok(());
        if let Some(reached) = &mut self.reached {
            let Poll::Ready(r) = Pin::new(&mut *reached).poll(cx) else { return Poll::Pending };
            let event = reached.event().clone();
            if let Some(runtime) = &self.runtime {
                runtime.unreported.reported(&event);
                outcome = runtime.explain(r);
            }
        }
        match self.finish.take() {
            Some(f) => Poll::Ready(outcome.and_then(|()| f())),
            None => Poll::Ready(Err(Error::argument("poll", "the future has already returned its value"))),
        }
    }
}

impl Backend {
    /// Creates a stream. On the CPU, the stream runs its commands on a thread of its own, with a team of half
    /// as many threads as the device's team has, at least one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no streams; errors of the driver.
    pub fn create_stream(&self) -> Result<Stream> {
        self.create_stream_with(&StreamOptions::default())
    }

    /// Like [`Backend::create_stream`], with a number of threads (CPU), or with measured times in its events.
    ///
    /// # Errors
    /// The errors of [`Backend::create_stream`]; [`Error::Argument`] for zero threads.
    pub fn create_stream_with(&self, options: &StreamOptions) -> Result<Stream> {
        let r = self.runtime();
        Ok(Stream { backend: self.clone(), queue: r.queues.create(&*r.device, options)? })
    }

    /// Copies host data to the device without waiting, directly from the shared `data`. (If the device has no
    /// streams, this call does the copy.) The future's value is the tensor.
    ///
    /// # Errors
    /// Reported by the future: out of memory, and errors of the driver.
    #[track_caller]
    pub fn copy_host_to_device_async(&self, data: &ConstData) -> Pending<Tensor> {
        let span = Span::caller();
        let r = self.runtime();
        let begin = || -> Result<(Tensor, Option<hal::Event>)> {
            let b = self.device().alloc(data.bytes().len(), Tag::Io)?;
            let event = match r.queues.for_copies(&*r.device)? {
                Some(q) => {
                    q.raw.write(&b, 0, data.owner())?;
                    let e = q.raw.record()?;
                    r.unreported.track(q.id, &e);
                    Some(e)
                }
                None => {
                    self.device().write(&b, 0, data.bytes())?;
                    None
                }
            };
            let t = Tensor::at(self, TensorType::new(data.dtype, &data.dims), b, span);
            t.set_completion(event.clone());
            Ok((t, event))
        };
        match begin() {
            Ok((t, event)) => Pending::new(r, event, || Ok(t)),
            Err(e) => Pending::failed(e),
        }
    }

    /// Computes a tensor and copies it to the host without waiting, like [`Tensor::to_data_async`].
    pub fn copy_device_to_host_async(&self, t: &Tensor) -> Pending<ConstData> {
        if !t.backend().is_same(self) {
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

/// Asynchronous evaluation and reading. Errors found immediately (shapes, dtypes, memory) are also reported
/// by the future.
impl Tensor {
    /// Enqueues the computation in the current stream ([`Stream::run`]), or, if there is none, in a stream
    /// that the backend owns, and returns. The future's value is this tensor. The tensor can be used
    /// immediately: work that uses it waits on the device until it is computed.
    ///
    /// This call itself plans and compiles if the plan is not cached. If the device has no streams, or if the
    /// computation contains a custom op without a kernel, this call also waits for the computation.
    pub fn eval_async(&self) -> Pending<Tensor> {
        match self.hand_over() {
            Ok((_, event)) => {
                let t = self.clone();
                Pending::new(self.backend().runtime(), event, || Ok(t))
            }
            Err(e) => Pending::failed(e),
        }
    }

    /// Enqueues the evaluation. Returns the stream, and the event after which the value is complete, if a
    /// stream computes the value. If the device has no streams, waits for the evaluation and returns neither.
    fn hand_over(&self) -> Result<(Option<Arc<Queue>>, Option<hal::Event>)> {
        let b = self.backend();
        let r = b.runtime();
        let Some(queue) = r.queues.for_work(&*r.device)? else {
            self.eval()?;
            b.synchronize()?;
            return Ok((None, None));
        };
        let event = queue::with_current(&queue, || tensor::eval_now(std::slice::from_ref(self)))?;
        Ok((Some(queue), event.or_else(|| self.completion())))
    }

    /// Evaluates the tensor if needed and copies its values to the host, without waiting, except in the cases
    /// in which [`Tensor::eval_async`] waits.
    ///
    /// # Errors
    /// Reported by the future: the errors of [`Tensor::to_data`]. An index out of range in work of the
    /// device's own queue is reported by the next call that waits for that queue.
    pub fn to_data_async(&self) -> Pending<ConstData> {
        let begin = || -> Result<Pending<ConstData>> {
            let (queue, run) = self.hand_over()?;
            let Some(queue) = queue else {
                let d = self.to_data()?;
                return Ok(Pending::new(self.backend().runtime(), None, || Ok(d)));
            };
            let (dims, dtype) = (self.dims()?, self.0.ty.dtype);
            let got = queue.raw.read(&self.ready()?, 0, dtype.bytes(dims.iter().product()))?;
            let (event, runtime) = (got.event().clone(), self.backend().runtime().clone());
            let finish = move || {
                if let Some(run) = run {
                    // The run has completed, because the copy follows the run in the queue and has completed.
                    let outcome = run.known_outcome();
                    runtime.unreported.reported(&run);
                    runtime.explain(outcome)?;
                }
                runtime.check_queues()?;
                ConstData::new(dtype, &dims, Arc::new(got.take()?))
            };
            Ok(Pending::new(self.backend().runtime(), Some(event), finish))
        };
        begin().unwrap_or_else(Pending::failed)
    }

    /// Like [`Tensor::to_data_async`], with the values converted to `T`, in row-major order.
    ///
    /// # Errors
    /// The errors of [`Tensor::to_data_async`].
    pub fn to_vec_async<T: halcyon_ir::Element + Send>(&self) -> impl Future<Output = Result<Vec<T>>> + Send {
        let data = self.to_data_async();
        async move { Ok(data.await?.to_vec()) }
    }

    /// [`Tensor::matmul`], enqueued immediately as by [`Tensor::eval_async`].
    #[track_caller]
    pub fn matmul_async(&self, rhs: &Tensor) -> Pending<Tensor> {
        self.matmul(rhs).eval_async()
    }
}

//! Streams of the CPU device. Each stream has its own thread, and its own team for kernels; the tracker
//! orders conflicting work.

use super::device::{Execution, check_range, check_writable, kernel_of, program_of};
use super::memory::{CpuBuffer, Keep, Ptr};
use super::sys::Isa;
use super::team::Team;
use super::tracker::{End, OWN, Tracker, of_copy, of_kernel, of_program, reading, union, writing};
use crate::fork::Origin;
use crate::hazard::Access;
use crate::stream::{self, Report};
use crate::{
    BackendType, BufferRef, Command, Counts, Download, Error, Event, LibraryKernel, Program, Result, Stream,
    StreamOptions,
};
use halcyon_ir::Scalar;
use halcyon_ir::data::Bytes;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Maximum number of items that wait in one stream. A caller that submits more waits until there is room.
const MANY: usize = 1024;

/// A command that owns its data, with the addresses of its buffers looked up.
enum Step {
    Launch {
        program: Arc<dyn Program>,
        groups: [u32; 3],
        at: SmallVec<[Ptr; 8]>,
        params: SmallVec<[Scalar; 8]>,
        fault: u32,
    },
    Library {
        kernel: Arc<dyn LibraryKernel>,
        at: SmallVec<[Ptr; 8]>,
        args: SmallVec<[Scalar; 4]>,
        fault: u32,
    },
    Copy {
        src: Ptr,
        dst: Ptr,
    },
    Write {
        src: Arc<dyn Bytes>,
        dst: Ptr,
    },
    Read {
        src: Ptr,
        dst: Arc<Mutex<Vec<u8>>>,
    },
}

impl Step {
    fn access(&self) -> Access {
        match self {
            Step::Launch { program, at, .. } => {
                program_of(program).map_or_else(|_| Access::default(), |p| of_program(p, at))
            }
            Step::Library { kernel, at, .. } => {
                kernel_of(&**kernel).map_or_else(|_| Access::default(), |k| of_kernel(k, at))
            }
            Step::Copy { src, dst } => of_copy(src, dst),
            Step::Write { dst, .. } => writing(dst),
            Step::Read { src, .. } => reading(src),
        }
    }

    /// Runs the command.
    ///
    /// # Safety
    /// `CpuStream::submit`, `write` or `read` made this value and checked its ranges. The job that holds the
    /// value keeps its buffers alive and in place, and the tracker has admitted the job.
    unsafe fn run(&self, on: &Execution<'_>) -> Result<()> {
        match self {
            // SAFETY: `run` requires live buffers and that the tracker has admitted this command, whose
            // memory `Step::access` gave to the tracker.
            Step::Launch { program, groups, at, params, fault } => unsafe {
                on.launch(program_of(program)?, *groups, at, params, *fault)
            },
            // SAFETY: `run` requires live buffers and that the tracker has admitted this command, whose
            // memory `Step::access` gave to the tracker.
            Step::Library { kernel, at, args, fault } => unsafe {
                on.library(kernel_of(&**kernel)?, at, args, *fault)
            },
            Step::Copy { src, dst } => {
                // SAFETY: `CpuStream::submit` checked both ranges and that `dst` is writable. `run` requires
                // live buffers and that the tracker has admitted this command.
                unsafe { on.copy(src, dst) };
                Ok(())
            }
            Step::Write { src, dst } => {
                let from = src.bytes();
                // SAFETY: `CpuStream::write` checked that `dst` lies in its buffer and is writable. `run`
                // requires a live buffer and that the tracker has admitted this command. The length is at
                // most the length of `from` and of `dst`.
                unsafe { on.write(from.as_ptr(), dst, from.len().min(dst.bytes)) };
                Ok(())
            }
            Step::Read { src, dst } => {
                let mut to = dst.lock().unwrap_or_else(PoisonError::into_inner);
                let n = to.len().min(src.bytes);
                // SAFETY: `CpuStream::read` checked the range. `run` requires a live buffer and that the
                // tracker has admitted this command.
                unsafe { on.read(src, &mut to[..n]) };
                Ok(())
            }
        }
    }
}

/// Commands that were submitted together.
struct Job {
    steps: Vec<Step>,
    /// Keeps the memory of all commands alive and in place.
    keep: Vec<Keep>,
    ticket: u64,
    before: SmallVec<[u64; 4]>,
    report: Arc<Report>,
}

enum Item {
    Job(Job),
    Wait(Event),
    Done(Event),
}

struct Queue {
    items: VecDeque<Item>,
    /// Receives the outcome of the work that is submitted after the last recorded event.
    report: Arc<Report>,
    closed: bool,
}

/// State shared by the stream and its thread.
struct Shared {
    id: String,
    /// Number of the device instance.
    owner: u64,
    /// The stream's number in the tracker.
    number: u64,
    queue: Mutex<Queue>,
    ready: Condvar,
    room: Condvar,
    tracker: Arc<Tracker>,
    counts: Arc<Counts>,
    isa: Isa,
    team: Team,
    threads: usize,
}

/// A stream of the CPU device.
pub(crate) struct CpuStream {
    shared: Arc<Shared>,
    /// The process that has the stream's thread.
    origin: Origin,
    /// Present only if no thread could be started. Callers then run the stream's work on their own threads,
    /// and hold this lock meanwhile.
    inline: Option<Mutex<()>>,
}

impl fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuStream({}, {} threads)", self.shared.id, self.shared.threads)
    }
}

fn message(p: &(dyn std::any::Any + Send)) -> &str {
    p.downcast_ref::<&str>()
        .copied()
        .or_else(|| p.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("?")
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, job: Job) {
        let Job { steps, keep, ticket, before, report } = job;
        let each = |f: &mut dyn FnMut(&Access)| steps.iter().for_each(|s| f(&s.access()));
        let ran = self.tracker.admit(&before, &each).and_then(|()| {
            let begin = stream::now();
            let on =
                Execution { team: &self.team, isa: self.isa, counts: &self.counts, fault: report.fault() };
            // SAFETY: `submit`, `write` or `read` made the commands and checked their ranges, `keep` holds
            // their buffers, and `admit` has just admitted the job.
            let run = |s: &Step| unsafe { s.run(&on) };
            let r = catch_unwind(AssertUnwindSafe(|| steps.iter().try_for_each(run)));
            report.ran(begin, stream::now());
            r.unwrap_or_else(|p| {
                Err(Error::internal(format!(
                    "a kernel panicked in a stream of {}: {}",
                    self.id,
                    message(&*p)
                )))
            })
        });
        // Report the error before other queues may use the memory.
        if let Err(e) = &ran {
            report.fail(e.clone());
        }
        self.tracker.leave(ticket, ran.as_ref().map_or_else(|e| End::Failed(e, &keep), |()| End::Done));
    }

    fn item(&self, i: Item) {
        match i {
            Item::Job(j) => self.perform(j),
            // A failure is ignored here, because the queue that recorded the event reports it.
            Item::Wait(e) => drop(e.wait()),
            Item::Done(e) => e.complete(),
        }
    }

    /// Main loop of the stream's thread.
    fn serve(&self) {
        loop {
            let mut q = self.lock();
            let item = loop {
                match q.items.pop_front() {
                    Some(i) => break i,
                    None if q.closed => {
                        self.tracker.streams.fetch_sub(1, Ordering::AcqRel);
                        return;
                    }
                    None => q = self.ready.wait(q).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(q);
            self.room.notify_one();
            self.item(item);
        }
    }
}

impl CpuStream {
    /// A stream with the number of threads that `options` requests, at most `width`; the default is half of
    /// `width`, at least 1. `width` is the device's number of threads, for which kernels are made. The caller
    /// holds the device lock, so that no unregistered work of the device's own queue is running.
    pub(super) fn new(
        id: &str,
        owner: u64,
        isa: Isa,
        width: usize,
        tracker: &Arc<Tracker>,
        counts: &Arc<Counts>,
        options: &StreamOptions,
    ) -> Result<CpuStream> {
        if options.threads == Some(0) {
            return Err(Error::argument("create_stream", "at least one thread is needed"));
        }
        let threads = options.threads.unwrap_or(width / 2).clamp(1, width);
        let number = tracker.queues.fetch_add(1, Ordering::Relaxed) + OWN + 1;
        let queue = Queue { items: VecDeque::new(), report: Arc::default(), closed: false };
        let shared = Arc::new(Shared {
            id: id.into(),
            owner,
            number,
            queue: Mutex::new(queue),
            ready: Condvar::new(),
            room: Condvar::new(),
            tracker: tracker.clone(),
            counts: counts.clone(),
            isa,
            team: Team::with_width(threads, width),
            threads,
        });
        tracker.streams.fetch_add(1, Ordering::AcqRel);
        let s = shared.clone();
        let thread =
            std::thread::Builder::new().name(format!("halcyon-stream-{number}")).spawn(move || s.serve());
        let inline = thread.err().map(|e| {
            tracing::debug!("no thread could be started for a stream, so its callers run its work: {e}");
            Mutex::new(())
        });
        Ok(CpuStream { shared, inline, origin: Origin::here() })
    }

    fn places(&self) -> Places {
        Places { owner: self.shared.owner, keep: vec![] }
    }

    /// Appends the item that `make` creates to the queue, and blocks while the queue is full. If the stream
    /// has no thread, runs the item at once.
    fn push<R>(&self, make: impl FnOnce(&mut Queue) -> (Item, R)) -> Result<R> {
        let s = &*self.shared;
        self.origin.check(BackendType::Cpu, &s.id)?;
        if let Some(turn) = &self.inline {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let (item, r) = make(&mut s.lock());
            s.item(item);
            return Ok(r);
        }
        let mut q = s.lock();
        while q.items.len() >= MANY {
            q = s.room.wait(q).unwrap_or_else(PoisonError::into_inner);
        }
        // Take the ticket under the lock, so that tickets rise in queue order and work waits only for older
        // work.
        let (item, r) = make(&mut q);
        q.items.push_back(item);
        drop(q);
        s.ready.notify_one();
        Ok(r)
    }

    fn job(&self, steps: Vec<Step>, mut keep: Vec<Keep>) -> Result<()> {
        keep.sort_unstable_by_key(Keep::key);
        keep.dedup_by_key(|k| k.key());
        let access = union(&|f| steps.iter().for_each(|s| f(&s.access())));
        self.push(|q| {
            let (ticket, before) = self.shared.tracker.enter(self.shared.number, access);
            (Item::Job(Job { steps, keep, ticket, before, report: q.report.clone() }), ())
        })
    }
}

/// Looks up the addresses of buffers and keeps their memory alive and in place.
struct Places {
    owner: u64,
    keep: Vec<Keep>,
}

impl Places {
    fn of(&mut self, b: &BufferRef, what: &str) -> Result<Ptr> {
        let b = CpuBuffer::of(&**b, self.owner, what)?;
        // Keep the memory in place before reading its address, because the pool may move it until then.
        self.keep.push(b.keep());
        Ok(b.at())
    }

    fn all(&mut self, buffers: &[BufferRef], what: &str) -> Result<SmallVec<[Ptr; 8]>> {
        buffers.iter().map(|b| self.of(b, what)).collect()
    }
}

fn bound(what: &str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::argument(what, format!("{got} buffers were bound, but it has {want}")))
}

impl Stream for CpuStream {
    fn overlaps(&self) -> bool {
        self.inline.is_none()
    }

    fn submit(&self, commands: &[Command<'_>]) -> Result<()> {
        let (mut steps, mut places) = (Vec::with_capacity(commands.len()), self.places());
        for c in commands {
            steps.push(match c {
                Command::Launch { program, groups, buffers, params, fault } => {
                    let p = program_of(program)?;
                    bound(p.name(), buffers.len(), p.writes.len())?;
                    Step::Launch {
                        program: Arc::clone(program),
                        groups: *groups,
                        at: places.all(buffers, p.name())?,
                        params: SmallVec::from_slice(params),
                        fault: *fault,
                    }
                }
                Command::Library { kernel, buffers, args, fault } => {
                    let k = kernel_of(&***kernel)?;
                    bound(k.name(), buffers.len(), k.buffers())?;
                    Step::Library {
                        kernel: Arc::clone(kernel),
                        at: places.all(buffers, k.name())?,
                        args: SmallVec::from_slice(args),
                        fault: *fault,
                    }
                }
                Command::Copy { src, src_offset, dst, dst_offset, bytes } => {
                    let (s, d) = (places.of(src, "copy")?, places.of(dst, "copy")?);
                    let same = std::ptr::eq(s.ptr, d.ptr);
                    crate::validate::copy([s.bytes, *src_offset], [d.bytes, *dst_offset], *bytes, same)?;
                    check_writable("copy", &d)?;
                    Step::Copy { src: s.part(*src_offset, *bytes), dst: d.part(*dst_offset, *bytes) }
                }
            });
        }
        if steps.is_empty() { Ok(()) } else { self.job(steps, places.keep) }
    }

    fn write(&self, dst: &BufferRef, offset: usize, src: Arc<dyn Bytes>) -> Result<()> {
        let mut places = self.places();
        let d = places.of(dst, "write")?;
        let n = src.bytes().len();
        check_range("write", &d, offset, n)?;
        check_writable("write", &d)?;
        self.job(vec![Step::Write { src, dst: d.part(offset, n) }], places.keep)
    }

    fn read(&self, src: &BufferRef, offset: usize, bytes: usize) -> Result<Download> {
        let mut places = self.places();
        let s = places.of(src, "read")?;
        check_range("read", &s, offset, bytes)?;
        let to = Arc::new(Mutex::new(halcyon_host::zeros(bytes, "a copy to the host")?));
        self.job(vec![Step::Read { src: s.part(offset, bytes), dst: to.clone() }], places.keep)?;
        Ok(Download::new(self.record()?, to))
    }

    fn record(&self) -> Result<Event> {
        self.push(|q| {
            let event = Event::new(std::mem::take(&mut q.report), None);
            (Item::Done(event.clone()), event)
        })
    }

    fn wait(&self, event: &Event) -> Result<()> {
        if event.is_done() { Ok(()) } else { self.push(|_| (Item::Wait(event.clone()), ())) }
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        if self.inline.is_some() {
            self.shared.tracker.streams.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        self.shared.lock().closed = true;
        self.shared.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::CpuDevice;
    use super::super::library::CpuKernel;
    use super::*;
    use crate::library_call::CallForm;
    use crate::{Device, LibraryCall, Operand, Options, Tag};
    use halcyon_ir::DType;
    use halcyon_ir::layout::View;
    use halcyon_ir::ops::Op;
    use halcyon_ir::target::Work;
    use std::sync::atomic::AtomicBool;

    /// A kernel that calls `f`, then copies 64 bytes.
    fn kernel(name: &str, f: impl Fn() + Send + Sync + 'static) -> Arc<dyn LibraryKernel> {
        let op = Op::Full(Scalar::F(0.0));
        let one = Operand { dtype: DType::U8, view: View::dense(&[64]) };
        let (inputs, outputs) = ([one.clone()], [one]);
        let call = CallForm::plain(&LibraryCall::new(Work::Op(&op), &inputs, &outputs));
        let body = move |r: &super::super::library::Run<'_>| {
            f();
            // SAFETY: both operands have 64 bytes, which `CpuKernel::run` checks; the tracker admits no
            // conflicting work at the same time.
            unsafe { std::ptr::copy(r.bufs[0].ptr, r.bufs[1].ptr, 64) };
        };
        Arc::new(CpuKernel::new(name, &call, body).unwrap())
    }

    fn device() -> CpuDevice {
        CpuDevice::new(&Options { threads: Some(2), ..Options::default() }).unwrap()
    }

    fn filled(d: &CpuDevice, v: u8) -> BufferRef {
        let b = d.alloc(64, Tag::Io).unwrap();
        d.write(&b, 0, &[v; 64]).unwrap();
        b
    }

    fn go<'a>(kernel: &'a Arc<dyn LibraryKernel>, buffers: &'a [BufferRef]) -> Command<'a> {
        Command::Library { kernel, buffers, args: &[], fault: 0 }
    }

    #[test]
    fn a_panic_is_an_error_at_the_event_and_spoils_what_was_to_be_written() {
        let d = device();
        let [s, t] = [0, 1].map(|_| d.create_stream(&StreamOptions::default()).unwrap());
        let (a, b, c) = (filled(&d, 1), filled(&d, 2), filled(&d, 3));
        let bad = kernel("bad", || panic!("at the wrong moment"));
        let good = kernel("good", || ());
        s.submit(&[go(&bad, &[a.clone(), b.clone()])]).unwrap();
        // Work of the other stream fails too, whether it is submitted before or after the failure is known.
        t.submit(&[go(&good, &[b.clone(), c.clone()])]).unwrap();
        for e in [s.synchronize(), t.synchronize()] {
            let e = e.unwrap_err().to_string();
            assert!(e.contains("at the wrong moment") && e.contains("cpu:0"), "{e}");
        }
        let mut got = [0; 64];
        for x in [&b, &c] {
            assert!(d.read(x, 0, &mut got).unwrap_err().to_string().contains("wrong moment"));
        }
        d.read(&a, 0, &mut got).unwrap();
        // Later events report no error. Memory is valid again only after all of it has been overwritten.
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
        d.write(&b, 0, &[7; 8]).unwrap();
        assert!(d.read(&b, 0, &mut got).is_err());
        d.submit(&[go(&good, &[a.clone(), b.clone()]), go(&good, &[b.clone(), c.clone()])]).unwrap();
        d.read(&c, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        // If a larger buffer is partly overwritten, only the other parts stay poisoned.
        let block = d.alloc(192, Tag::Activations).unwrap();
        let [p, q, r] = [0, 64, 128].map(|at| d.part(&block, at, 64).unwrap());
        s.submit(&[
            go(&bad, &[a.clone(), p.clone()]),
            go(&good, &[p.clone(), q.clone()]),
            go(&good, &[q.clone(), r.clone()]),
        ])
        .unwrap();
        s.submit(&[go(&good, &[r.clone(), p.clone()])]).unwrap();
        assert!(s.synchronize().is_err());
        s.submit(&[go(&good, &[a.clone(), q.clone()])]).unwrap();
        s.submit(&[go(&good, &[q.clone(), p.clone()])]).unwrap();
        assert_eq!(s.synchronize().unwrap(), None);
        d.read(&p, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        assert!(d.read(&r, 0, &mut got).is_err());
        // Once the buffer is freed, its memory is reused and is no longer poisoned.
        s.submit(&[go(&bad, &[a.clone(), b.clone()])]).unwrap();
        assert!(s.synchronize().is_err());
        let was = d.start_of(&b);
        drop(b);
        let again = filled(&d, 9);
        assert_eq!(d.start_of(&again), was);
        d.read(&again, 0, &mut got).unwrap();
        assert_eq!(got, [9; 64]);
    }

    /// Two device instances do not order their work on one buffer, so each rejects the buffers of the other.
    #[test]
    fn buffers_of_another_opening_are_refused() {
        let (d, e) = (device(), device());
        let (a, b) = (filled(&d, 1), filled(&e, 2));
        let refused = |r: Result<()>| assert!(r.unwrap_err().to_string().contains("another opening"));
        refused(d.submit(&[go(&kernel("k", || ()), &[a.clone(), b.clone()])]));
        refused(d.submit(&[Command::Copy { src: &b, src_offset: 0, dst: &a, dst_offset: 0, bytes: 1 }]));
        refused(d.read(&b, 0, &mut [0; 4]));
        refused(d.part(&b, 0, 8).map(drop));
        let s = d.create_stream(&StreamOptions::default()).unwrap();
        refused(s.submit(&[go(&kernel("k", || ()), &[b.clone(), a.clone()])]));
        refused(s.write(&b, 0, Arc::new(vec![0u8; 4])));
    }

    /// The first two kernels each end only after both have started.
    #[test]
    fn kernels_of_two_streams_run_at_one_time_unless_one_writes_what_the_other_uses() {
        let d = device();
        let [s, t] = [0, 1].map(|_| d.create_stream(&StreamOptions::default()).unwrap());
        let (a, b, c) = (filled(&d, 1), filled(&d, 2), filled(&d, 3));
        let flags = Arc::new([const { AtomicBool::new(false) }; 2]);
        let meet = |i: usize| {
            let f = flags.clone();
            kernel("meet", move || {
                f[i].store(true, Ordering::SeqCst);
                let start = std::time::Instant::now();
                while !f[1 - i].load(Ordering::SeqCst) {
                    assert!(start.elapsed().as_secs() < 900, "the other never began");
                    std::thread::yield_now();
                }
            })
        };
        // Both kernels only read `a`, so they may run at the same time.
        s.submit(&[go(&meet(0), &[a.clone(), b.clone()])]).unwrap();
        t.submit(&[go(&meet(1), &[a.clone(), c.clone()])]).unwrap();
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
        // Here each kernel writes memory that the next one reads, so they never overlap and run in order.
        let (busy, rounds) = (Arc::new(AtomicBool::new(false)), 50);
        let alone = || {
            let busy = busy.clone();
            kernel("alone", move || {
                assert!(!busy.swap(true, Ordering::SeqCst), "two at a time");
                std::thread::sleep(std::time::Duration::from_micros(50));
                busy.store(false, Ordering::SeqCst);
            })
        };
        for i in 0..rounds {
            d.write(&a, 0, &[i; 64]).unwrap();
            s.submit(&[go(&alone(), &[a.clone(), b.clone()])]).unwrap();
            t.submit(&[go(&alone(), &[b.clone(), c.clone()])]).unwrap();
            d.submit(&[go(&alone(), &[c.clone(), a.clone()])]).unwrap();
            let mut got = [0; 64];
            d.read(&a, 0, &mut got).unwrap();
            assert_eq!(got, [i; 64]);
        }
        assert_eq!((s.synchronize().unwrap(), t.synchronize().unwrap()), (None, None));
    }

    #[test]
    fn a_stream_that_is_dropped_runs_on_and_the_device_is_quiet_again() {
        let d = device();
        let s = d.create_stream(&StreamOptions::default()).unwrap();
        let (a, b) = (filled(&d, 1), filled(&d, 2));
        let slow = kernel("slow", || std::thread::sleep(std::time::Duration::from_millis(20)));
        for _ in 0..3 {
            s.submit(&[go(&slow, &[a.clone(), b.clone()])]).unwrap();
        }
        let e = s.record().unwrap();
        drop((s, a));
        e.wait().unwrap();
        let mut got = [0; 64];
        d.read(&b, 0, &mut got).unwrap();
        assert_eq!(got, [1; 64]);
        let start = std::time::Instant::now();
        while !d.is_quiet() {
            assert!(start.elapsed().as_secs() < 60);
            std::thread::yield_now();
        }
    }
}

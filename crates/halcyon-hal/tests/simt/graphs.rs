//! Tests of captures: the commands they run, the counters, the number of calls, and the errors.

use crate::common::standin::{self, StandIn};
use crate::common::*;
use halcyon_hal::{
    BufferRef, Capture, Command, Device, Driver, Error, MemoryPoolConfig, Options, Program, Recording,
    Result, StreamOptions, Tag,
};
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;

const FAULT: u32 = 77;

/// `y = x * a + c` with `a` and `c` as variables, `z = y[index]`, which can fault, and a copy of `z`.
struct Work {
    d: Arc<dyn Device>,
    programs: [Arc<dyn Program>; 2],
    /// x, y, index, z, copy.
    b: [BufferRef; 5],
}

const N: usize = 4;
const VARIABLES: [(usize, usize); 2] = [(0, 2), (0, 1)];

fn f32s(d: &dyn Device, b: &BufferRef) -> Vec<f64> {
    unpack(DType::F32, &download(d, b)).iter().map(|v| v.as_f64()).collect()
}

impl Work {
    fn new(s: &StandIn, options: &Options) -> Work {
        let d = s.driver.open(0, options).unwrap();
        let programs = [affine(DType::F32), gather()].map(|k| d.compile(&k).unwrap());
        let x = upload(&*d, &pack(DType::F32, &[1.0, 2.0, 3.0, 4.0].map(Scalar::F)));
        let index = upload(&*d, &pack(DType::I32, &[3, 2, 1, 0].map(Scalar::I)));
        let new = || d.alloc(4 * N, Tag::Io).unwrap();
        let b = [x, new(), index, new(), new()];
        Work { d, programs, b }
    }

    fn with<R>(&self, [a, c]: [f64; 2], f: impl FnOnce(&[Command<'_>]) -> R) -> R {
        let [x, y, index, z, copy] = &self.b;
        let (first, second) = ([x.clone(), y.clone()], [y.clone(), index.clone(), z.clone()]);
        let n = Scalar::I(N as i64);
        let (scale, sizes) = ([n, Scalar::F(a), Scalar::F(c)], [n, n, Scalar::U(0)]);
        let launch = |k: usize, buffers, params, fault| Command::Launch {
            program: &self.programs[k],
            groups: [1, 1, 1],
            buffers,
            params,
            fault,
        };
        f(&[
            launch(0, &first, &scale, 0),
            launch(1, &second, &sizes, FAULT),
            Command::Copy { src: z, src_offset: 0, dst: copy, dst_offset: 0, bytes: 4 * N },
        ])
    }

    fn buffers(&self) -> [&BufferRef; 5] {
        self.b.each_ref()
    }

    fn capture(&self) -> Result<Arc<dyn Capture>> {
        self.with([0.0; 2], |commands| {
            let (buffers, variables) = (&self.buffers()[..], &VARIABLES[..]);
            self.d.capture(&Recording { commands, buffers, variables })
        })
    }

    /// Launches with values for `a` and `c`.
    fn launch(&self, r: &Arc<dyn Capture>, [a, c]: [f64; 2]) -> bool {
        self.d.launch_capture(&**r, &self.buffers(), &[c, a].map(Scalar::F)).unwrap()
    }

    fn answer(&self) -> Vec<f64> {
        f32s(&*self.d, &self.b[4])
    }
}

fn want([a, c]: [f64; 2]) -> Vec<f64> {
    [4.0, 3.0, 2.0, 1.0].iter().map(|x| x * a + c).collect()
}

pub(crate) fn check(s: &StandIn) {
    let kind = s.driver.kind();
    let w = Work::new(s, &Options::default());
    let r = w.capture().unwrap();
    assert_eq!((r.commands(), s.get("graphs"), s.get("execs")), (3, 0, 1), "{kind}");
    assert_eq!((w.d.counters().launches, w.d.counters().capture_launches), (0, 0), "{kind}: nothing ran");

    // Same results and counters as a submission, with new values in each launch.
    for v in [[2.0, 1.0], [-3.0, 0.5], [0.0, 7.0]] {
        let before = w.d.counters();
        w.with(v, |c| w.d.submit(c)).unwrap();
        let (plain, between) = (w.answer(), w.d.counters());
        assert_eq!(plain, want(v), "{kind}");
        w.d.write(&w.b[4], 0, &[0; 4 * N]).unwrap();
        let start = w.d.counters();
        assert!(w.launch(&r, v));
        let after = w.d.counters();
        assert_eq!(w.answer(), plain, "{kind}");
        let ran = |a: &halcyon_hal::Counters, b: &halcyon_hal::Counters| {
            (b.launches - a.launches, b.device_copies - a.device_copies)
        };
        assert_eq!(ran(&before, &between), (2, 1), "{kind}");
        assert_eq!(ran(&start, &after), (2, 1), "{kind}");
        // Uploads: two values and the address of the fault word.
        assert_eq!(
            (after.capture_launches - start.capture_launches, after.uploaded_bytes - start.uploaded_bytes),
            (1, 24)
        );
    }

    // Number of CUDA or HIP calls: set the device, launch, record an event. A launch with new values adds a
    // copy of them, and an event that records the last use of their entry in the ring.
    let calls = |v| {
        let n = s.get("calls");
        assert!(w.launch(&r, v));
        s.get("calls") - n
    };
    for _ in 0..20 {
        calls([5.0, 5.0]);
    }
    assert_eq!(calls([5.0, 5.0]), 3, "{kind}");
    for i in 0..40 {
        calls([i as f64, 0.0]);
    }
    assert_eq!(calls([6.0, 5.0]), 5, "{kind}");

    // A launch reads the current content of memory.
    w.d.write(&w.b[0], 0, &pack(DType::F32, &[Scalar::F(10.0); N])).unwrap();
    assert!(w.launch(&r, [2.0, 1.0]));
    assert_eq!(w.answer(), [21.0; N], "{kind}");
    w.d.write(&w.b[0], 0, &pack(DType::F32, &[1.0, 2.0, 3.0, 4.0].map(Scalar::F))).unwrap();

    // Many pending launches in the device's queue and in streams, each with its own values.
    s.set("defer", 1);
    let streams = [0, 1].map(|_| w.d.create_stream(&StreamOptions::default()).unwrap());
    let kept: Vec<BufferRef> = (0..60).map(|_| w.d.alloc(4 * N, Tag::Io).unwrap()).collect();
    for round in 0..2 {
        for (i, to) in kept.iter().enumerate() {
            let v = [i as f64 / 2.0, (i / 2) as f64];
            let keep = [Command::Copy { src: &w.b[4], src_offset: 0, dst: to, dst_offset: 0, bytes: 4 * N }];
            match (round, i % 3) {
                (1, k @ 1..) => {
                    let t = &streams[k - 1];
                    assert!(t.launch_capture(&*r, &w.buffers(), &[v[1], v[0]].map(Scalar::F)).unwrap());
                    t.submit(&keep).unwrap();
                }
                _ => {
                    assert!(w.launch(&r, v));
                    w.d.submit(&keep).unwrap();
                }
            }
        }
        for (i, b) in kept.iter().enumerate() {
            assert_eq!(f32s(&*w.d, b), want([i as f64 / 2.0, (i / 2) as f64]), "{kind}: {round}, {i}");
        }
    }
    assert!(w.d.take_fault().unwrap().is_none());

    // Only the queue of the launch reports its fault.
    w.d.write(&w.b[2], 0, &pack(DType::I32, &[9, 2, 1, 0].map(Scalar::I))).unwrap();
    let values = [Scalar::F(0.0), Scalar::F(1.0)];
    assert!(streams[0].launch_capture(&*r, &w.buffers(), &values).unwrap());
    let (mine, others) = (streams[0].record().unwrap(), streams[1].record().unwrap());
    assert_eq!((mine.wait().unwrap(), others.wait().unwrap()), (Some(FAULT), None), "{kind}");
    assert_eq!(w.d.take_fault().unwrap(), None, "{kind}");
    assert!(w.launch(&r, [1.0, 0.0]));
    assert_eq!(streams[0].synchronize().unwrap(), None, "{kind}");
    assert_eq!((w.d.take_fault().unwrap(), w.d.take_fault().unwrap()), (Some(FAULT), None), "{kind}");
    w.d.write(&w.b[2], 0, &pack(DType::I32, &[3, 2, 1, 0].map(Scalar::I))).unwrap();
    drop((streams, kept));

    // Dropping a capture waits for its pending launch.
    assert!(w.launch(&r, [8.0, 8.0]));
    drop(r);
    assert_eq!((s.get("execs"), w.answer()), (0, want([8.0, 8.0])), "{kind}");
    s.set("defer", 0);

    refused(s, &w);
    moved(s);
    smaller(s);
}

fn refused(s: &StandIn, w: &Work) {
    let kind = s.driver.kind();
    let r = w.capture().unwrap();
    let values = [Scalar::F(1.0); 2];
    let argument = |e: Error, what: &str| {
        assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains(what), "{kind}: {e}");
    };
    argument(w.d.launch_capture(&*r, &w.buffers()[..4], &values).unwrap_err(), "4 buffers given, 5 captured");
    argument(w.d.launch_capture(&*r, &w.buffers(), &values[..1]).unwrap_err(), "1 values given, 2 captured");
    let other = Work::new(s, &Options::default());
    argument(
        other.d.launch_capture(&*r, &other.buffers(), &values).unwrap_err(),
        "was not captured by this opening",
    );
    argument(w.d.launch_capture(&*r, &other.buffers(), &values).unwrap_err(), "does not belong");
    let record = |buffers: &[&BufferRef], variables: &[(usize, usize)]| {
        w.with([1.0; 2], |commands| w.d.capture(&Recording { commands, buffers, variables })).unwrap_err()
    };
    argument(record(&w.buffers()[..4], &[]), "not among those of the recording");
    argument(record(&w.buffers(), &[(2, 0)]), "no parameters");
    argument(record(&w.buffers(), &[(3, 0)]), "no command 3");
    // The fault id belongs to the command; a parameter can be a variable only once.
    argument(record(&w.buffers(), &[(1, 2)]), "cannot vary");
    argument(record(&w.buffers(), &[(0, 1), (0, 1)]), "cannot vary");

    // A different buffer is detected.
    let new = w.d.alloc(4 * N, Tag::Io).unwrap();
    let mut all = w.buffers();
    all[4] = &new;
    assert!(!w.d.launch_capture(&*r, &all, &values).unwrap(), "{kind}");
    assert!(w.launch(&r, [3.0, 1.0]));
    assert_eq!(w.answer(), want([3.0, 1.0]), "{kind}");

    // A failed instantiation leaks nothing, and submissions still work.
    s.set("fail instantiate", 0);
    let e = w.capture().unwrap_err();
    assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("instantiating"), "{kind}: {e}");
    assert_eq!((s.get("graphs"), s.get("execs")), (0, 1), "{kind}");
    w.with([1.0, 2.0], |c| w.d.submit(c)).unwrap();
    assert_eq!(w.answer(), want([1.0, 2.0]), "{kind}");
    // A failure during the capture ends it; the next capture works.
    let wrong = w.with([1.0; 2], |c| {
        let (Command::Launch { program, buffers, params, .. }, copy) = (&c[0], &c[2]) else { panic!() };
        let short = Command::Launch { program, groups: [1, 1, 1], buffers, params: &params[..2], fault: 0 };
        let copy = || match copy {
            Command::Copy { src, dst, .. } => {
                Command::Copy { src, src_offset: 0, dst, dst_offset: 0, bytes: 4 }
            }
            _ => panic!(),
        };
        let commands = [copy(), short, copy()];
        w.d.capture(&Recording { commands: &commands, buffers: &w.buffers(), variables: &[] })
    });
    assert!(matches!(wrong, Err(Error::Internal { .. })), "{kind}: {wrong:?}");
    assert!(w.launch(&w.capture().unwrap(), [1.0, 1.0]));
    assert_eq!((w.answer(), s.get("graphs"), s.get("execs")), (want([1.0, 1.0]), 0, 1), "{kind}");

    let e = Work::new(s, &Options { profile: true, ..Options::default() }).capture().unwrap_err();
    assert!(
        matches!(e, Error::Unsupported { .. }) && e.to_string().contains("profiling is on"),
        "{kind}: {e}"
    );
}

/// Moved buffers are detected, and a new capture works.
fn moved(s: &StandIn) {
    let pool: MemoryPoolConfig = "best-fit:1MiB,defragment".parse().unwrap();
    let w = {
        let options = Options { memory_pool: Some(pool), ..Options::default() };
        let d = s.driver.open(0, &options).unwrap();
        let hole = d.alloc(64 << 10, Tag::Io).unwrap();
        let mut w = Work::new(s, &options);
        let programs = [affine(DType::F32), gather()].map(|k| d.compile(&k).unwrap());
        let b = w.buffers().map(|b| upload(&*d, &download(&*w.d, b)));
        drop(hole);
        w.b = b;
        Work { d, programs, ..w }
    };
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [2.0, 1.0]));
    assert_eq!(w.answer(), want([2.0, 1.0]));
    let generation = w.d.memory().generation;
    w.d.defragment().unwrap();
    assert_eq!(w.d.memory().generation, generation + 1);
    assert!(!w.launch(&r, [3.0, 1.0]), "{}", s.driver.kind());
    assert_eq!(w.answer(), want([2.0, 1.0]), "nothing ran");
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [3.0, 1.0]));
    assert_eq!(w.answer(), want([3.0, 1.0]));
}

/// A smaller buffer in the memory of a captured one is detected.
fn smaller(s: &StandIn) {
    let mut w = Work::new(s, &Options::default());
    let r = w.capture().unwrap();
    let place = w.b[4].place();
    w.b[4] = w.d.alloc(0, Tag::Io).unwrap();
    w.b[4] = w.d.alloc(4, Tag::Io).unwrap();
    assert_eq!(w.b[4].place(), place, "the pool reuses the memory");
    assert!(!w.launch(&r, [2.0, 1.0]), "{}", s.driver.kind());
}

/// If the vendor's library has no graphs, the error names the missing function.
pub(crate) fn without(s: &StandIn) {
    let w = Work::new(s, &Options::default());
    let e = w.capture().unwrap_err();
    let names = e.to_string().contains("cuStreamBeginCapture_v2");
    assert!(matches!(e, Error::Unsupported { .. }) && names, "{e}");
    w.with([2.0, 1.0], |c| w.d.submit(c)).unwrap();
    assert_eq!(w.answer(), want([2.0, 1.0]));
}

#[test]
fn an_older_runtime_has_no_graphs() {
    let Some(first) = standin::all().into_iter().next() else { return };
    let old = standin::older();
    assert_ne!(first.path, old.path);
    without(&old);
}

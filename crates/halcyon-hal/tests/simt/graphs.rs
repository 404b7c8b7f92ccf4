//! Tests of captures on the stand-ins: the numbers of calls and of live objects, and failures. The
//! conformance suite tests the results (`halcyon_hal::conformance::captures`).

use crate::common::standin::{self, StandIn};
use halcyon_hal::conformance::captures::{N, Work, f32s, want};
use halcyon_hal::{BufferRef, Command, Driver, Error, Options, Recording, StreamOptions, Tag};
use halcyon_ir::Scalar;

fn work(s: &StandIn) -> Work {
    Work::new(s.driver.open(0, &Options::default()).unwrap())
}

pub(crate) fn check(s: &StandIn) {
    let kind = s.driver.kind();
    let w = work(s);
    let r = w.capture().unwrap();
    assert_eq!((r.commands(), s.get("graphs"), s.get("execs")), (3, 0, 1), "{kind}");
    assert_eq!(
        (w.device.counters().launches, w.device.counters().capture_launches),
        (0, 0),
        "{kind}: nothing ran"
    );

    let before = w.device.counters();
    assert!(w.launch(&r, [2.0, 1.0]));
    assert_eq!(w.answer(), want([2.0, 1.0]), "{kind}");
    // Two values and the address of the fault word.
    assert_eq!(w.device.counters().uploaded_bytes - before.uploaded_bytes, 24, "{kind}");

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

    // Many pending launches in the device's queue and in streams, each with its own values.
    s.set("defer", 1);
    let streams = [0, 1].map(|_| w.device.create_stream(&StreamOptions::default()).unwrap());
    let kept: Vec<BufferRef> = (0..60).map(|_| w.device.alloc(4 * N, Tag::Io).unwrap()).collect();
    for round in 0..2 {
        for (i, to) in kept.iter().enumerate() {
            let v = [i as f64 / 2.0, (i / 2) as f64];
            let keep =
                [Command::Copy { src: &w.buffers[4], src_offset: 0, dst: to, dst_offset: 0, bytes: 4 * N }];
            match (round, i % 3) {
                (1, k @ 1..) => {
                    let t = &streams[k - 1];
                    assert!(t.launch_capture(&*r, &w.refs(), &[v[1], v[0]].map(Scalar::F)).unwrap());
                    t.submit(&keep).unwrap();
                }
                _ => {
                    assert!(w.launch(&r, v));
                    w.device.submit(&keep).unwrap();
                }
            }
        }
        for (i, b) in kept.iter().enumerate() {
            assert_eq!(f32s(&*w.device, b), want([i as f64 / 2.0, (i / 2) as f64]), "{kind}: {round}, {i}");
        }
    }
    drop((streams, kept));

    // Dropping a capture waits for its pending launch.
    assert!(w.launch(&r, [8.0, 8.0]));
    drop(r);
    assert_eq!((s.get("execs"), w.answer()), (0, want([8.0, 8.0])), "{kind}");
    s.set("defer", 0);

    failures(s, &w);
}

fn failures(s: &StandIn, w: &Work) {
    let kind = s.driver.kind();
    // A capture that lives meanwhile.
    let _r = w.capture().unwrap();
    // A failed instantiation leaks nothing, and submissions still work.
    s.set("fail instantiate", 0);
    let e = w.capture().unwrap_err();
    assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("instantiating"), "{kind}: {e}");
    assert_eq!((s.get("graphs"), s.get("execs")), (0, 1), "{kind}");
    w.submit([1.0, 2.0]);
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
        w.device.capture(&Recording { commands: &commands, buffers: &w.refs(), variables: &[] })
    });
    assert!(matches!(wrong, Err(Error::Internal { .. })), "{kind}: {wrong:?}");
    assert!(w.launch(&w.capture().unwrap(), [1.0, 1.0]));
    assert_eq!((w.answer(), s.get("graphs"), s.get("execs")), (want([1.0, 1.0]), 0, 1), "{kind}");
}

/// If the vendor's library has no graphs, the error names the missing function.
pub(crate) fn without(s: &StandIn) {
    let w = work(s);
    let e = w.capture().unwrap_err();
    let names = e.to_string().contains("cuStreamBeginCapture_v2");
    assert!(matches!(e, Error::Unsupported { .. }) && names, "{e}");
    w.submit([2.0, 1.0]);
    assert_eq!(w.answer(), want([2.0, 1.0]));
}

#[test]
fn an_older_runtime_has_no_graphs() {
    let _alone = crate::ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(first) = standin::all().into_iter().next() else { return };
    let old = standin::older();
    assert_ne!(first.path, old.path);
    without(&old);
}

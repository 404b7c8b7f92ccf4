//! The contract of [`crate::stream`]. Devices without streams pass.

use super::kernels::*;
use super::{DeviceUnderTest, HANGS};
use crate::stream::{Elapsed, Stream, StreamOptions};
use crate::{BufferRef, Command, Device, Error, Event, Program, Tag};
use halcyon_ir::{DType, Scalar};
use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

/// Whether the device supports streams.
fn has_streams(d: &dyn Device) -> bool {
    match d.create_stream(&StreamOptions::default()) {
        Ok(_) => true,
        Err(Error::Unsupported { .. }) => {
            println!("{}: no streams", d.info().id);
            false
        }
        Err(e) => panic!("{e}"),
    }
}

fn stream(d: &dyn Device) -> Arc<dyn Stream> {
    d.create_stream(&StreamOptions::default()).unwrap()
}

/// Unparks a thread and counts the wake-ups.
struct Unpark(std::thread::Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

/// A minimal executor that polls only when woken.
fn block_on<F: Future>(f: F) -> F::Output {
    let me = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(1)));
    let waker = Waker::from(me.clone());
    let mut f = pin!(f);
    loop {
        if me.1.swap(0, Ordering::SeqCst) == 0 {
            std::thread::park();
            continue;
        }
        if let Poll::Ready(v) = f.as_mut().poll(&mut Context::from_waker(&waker)) {
            return v;
        }
    }
}

fn i32s(v: &[i32]) -> Vec<u8> {
    v.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn of(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// A queue of a device: the device's own queue or a stream.
enum Queue {
    Own(Arc<dyn Device>),
    Other(Arc<dyn Stream>),
}

impl Queue {
    fn submit(&self, c: &[Command<'_>]) {
        match self {
            Queue::Own(d) => d.submit(c).unwrap(),
            Queue::Other(s) => s.submit(c).unwrap(),
        }
    }
}

/// Writes, kernels and copies in three queues over a few buffers, some of which are dropped and allocated
/// again, give the same results as one queue in the order of the calls.
pub fn queues_that_share_memory_act_in_the_order_of_the_calls(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let mut r = Random::fresh();
    let p = d.compile(&affine(DType::I32)).unwrap();
    let n = 3000usize;
    let queues = [Queue::Own(d.clone()), Queue::Other(stream(&*d)), Queue::Other(stream(&*d))];
    let mut want: Vec<Vec<i32>> = vec![];
    let mut have: Vec<BufferRef> = vec![];
    for k in 0..4 {
        want.push(vec![k; n]);
        have.push(upload(&*d, &i32s(&want[k as usize])));
    }
    let mut events: Vec<Event> = vec![];
    for round in 0..150 {
        let q = &queues[r.below(3) as usize];
        let (a, b) = (r.below(4) as usize, r.below(4) as usize);
        match r.below(6) {
            0..=2 if a != b => {
                let (m, c) = (r.below(3) as i32 + 1, r.below(9) as i32);
                let params = [Scalar::I(n as i64), Scalar::I(m as i64), Scalar::I(c as i64)];
                let buffers = [have[a].clone(), have[b].clone()];
                let groups = [n.div_ceil(32) as u32, 1, 1];
                q.submit(&[Command::Launch {
                    program: &p,
                    groups,
                    buffers: &buffers,
                    params: &params,
                    fault: 0,
                }]);
                want[b] = want[a].iter().map(|v| v.wrapping_mul(m).wrapping_add(c)).collect();
            }
            3 if a != b => {
                let (from, to, len) =
                    (r.below(1000) as usize, r.below(1000) as usize, r.below(2000) as usize);
                let (src, dst) = (&have[a], &have[b]);
                let c = Command::Copy { src, src_offset: from * 4, dst, dst_offset: to * 4, bytes: len * 4 };
                q.submit(&[c]);
                let moved = want[a][from..from + len].to_vec();
                want[b][to..to + len].copy_from_slice(&moved);
            }
            4 => {
                let (at, data) = (r.below(1000) as usize, vec![round; 1 + r.below(2000) as usize]);
                match q {
                    Queue::Own(d) => d.write(&have[a], at * 4, &i32s(&data)).unwrap(),
                    Queue::Other(s) => s.write(&have[a], at * 4, Arc::new(i32s(&data))).unwrap(),
                }
                want[a][at..at + data.len()].copy_from_slice(&data);
            }
            _ => {
                // The buffer is dropped while work may use it, and its memory may be reused for another one.
                have[a] = d.alloc(n * 4, Tag::Io).unwrap();
                match q {
                    Queue::Own(d) => d.write(&have[a], 0, &vec![7; n * 4]).unwrap(),
                    Queue::Other(s) => s.write(&have[a], 0, Arc::new(vec![7u8; n * 4])).unwrap(),
                }
                want[a] = vec![i32::from_le_bytes([7; 4]); n];
            }
        }
        if let Queue::Other(s) = q {
            match r.below(8) {
                0 => events.push(s.record().unwrap()),
                1 if !events.is_empty() => s.wait(&events[r.below(events.len() as u64) as usize]).unwrap(),
                2 if l.computes => {
                    let got = s.read(&have[b], 0, n * 4).unwrap().take().unwrap();
                    assert_eq!(of(&got), want[b], "round {round}");
                }
                _ => {}
            }
        }
    }
    if l.computes {
        for (b, w) in have.iter().zip(&want) {
            assert_eq!(&of(&download(&*d, b)), w);
        }
    }
    for e in events {
        assert_eq!(block_on(e.into_future()).unwrap(), None);
    }
    d.synchronize().unwrap();
}

pub fn a_stream_alone_is_in_order_and_its_copies_own_their_data(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let s = stream(&*d);
    let p = d.compile(&affine(DType::I32)).unwrap();
    let (a, b) = (d.alloc(400, Tag::Io).unwrap(), d.alloc(400, Tag::Io).unwrap());
    let params = [Scalar::I(100), Scalar::I(3), Scalar::I(1)];
    let counters = d.counters();
    for i in 0..20 {
        let data = Arc::new(i32s(&[i; 100]));
        s.write(&a, 0, data.clone()).unwrap();
        drop(data);
        let (there, back) = ([a.clone(), b.clone()], [b.clone(), a.clone()]);
        let go =
            |buffers| Command::Launch { program: &p, groups: [4, 1, 1], buffers, params: &params, fault: 0 };
        s.submit(&[go(&there), go(&back)]).unwrap();
        let got = s.read(&a, 40, 80).unwrap();
        let bytes = got.take().unwrap();
        assert_eq!(bytes.len(), 80);
        if l.computes {
            assert_eq!(of(&bytes), [9 * i + 4; 20]);
        }
    }
    let c = d.counters();
    assert_eq!((c.launches - counters.launches, c.uploads - counters.uploads), (40, 20));
    assert_eq!(
        (c.uploaded_bytes - counters.uploaded_bytes, c.downloaded_bytes - counters.downloaded_bytes),
        (8000, 1600)
    );
    assert_eq!(s.synchronize().unwrap(), None);
    // Empty submissions and copies are valid.
    s.submit(&[]).unwrap();
    s.write(&a, 400, Arc::new(vec![])).unwrap();
    assert!(s.read(&a, 0, 0).unwrap().take().unwrap().is_empty());
}

pub fn events_tell_faults_once_and_errors_are_values(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let (s, t) = (stream(&*d), stream(&*d));
    let p = d.compile(&gather()).unwrap();
    let table = upload(&*d, &pack(DType::F32, &(0..10).map(|i| Scalar::F(i as f64)).collect::<Vec<_>>()));
    let run = |s: &dyn Stream, index: &[i64], fault| {
        let idx: Vec<Scalar> = index.iter().map(|i| Scalar::I(*i)).collect();
        let buffers =
            [table.clone(), upload(&*d, &pack(DType::I32, &idx)), upload(&*d, &vec![0; index.len() * 4])];
        let params = [Scalar::I(10), Scalar::I(index.len() as i64), Scalar::U(0)];
        s.submit(&[Command::Launch {
            program: &p,
            groups: [1, 1, 1],
            buffers: &buffers,
            params: &params,
            fault,
        }])
        .unwrap();
        buffers[2].clone()
    };
    let (bad, other) = (run(&*s, &[3, 77, -1], 5), run(&*t, &[9], 6));
    run(&*s, &[99], 7);
    let (e, f) = (s.record().unwrap(), t.record().unwrap());
    let after = run(&*s, &[1, 2], 8);
    let g = s.record().unwrap();
    if l.computes {
        // The fault is known once the output can be read. It is the first fault of this work, it is the same
        // at each call, and it is not a fault of other work.
        assert_eq!(unpack(DType::F32, &download(&*d, &bad)), [3.0, 9.0, 0.0].map(Scalar::F));
        assert!(matches!(e.known_outcome(), Ok(Some(5))), "{e:?}");
        assert_eq!(
            (e.wait().unwrap(), e.wait().unwrap(), block_on(e.into_future()).unwrap()),
            (Some(5), Some(5), Some(5))
        );
        assert_eq!(unpack(DType::F32, &download(&*d, &after)), [1.0, 2.0].map(Scalar::F));
        assert_eq!(unpack(DType::F32, &download(&*d, &other)), [Scalar::F(9.0)]);
    }
    assert_eq!((f.wait().unwrap(), g.wait().unwrap()), (None, None));
    assert_eq!(d.take_fault().unwrap(), None, "the device's own queue has no fault");
    // Invalid calls.
    let small = d.alloc(8, Tag::Io).unwrap();
    assert!(s.write(&small, 4, Arc::new(vec![0u8; 5])).is_err() && s.read(&small, usize::MAX, 2).is_err());
    let one = [small.clone()];
    let c = Command::Launch { program: &p, groups: [1, 1, 1], buffers: &one, params: &[], fault: 1 };
    assert!(s.submit(&[c]).and_then(|()| s.synchronize()).is_err());
    let c = Command::Copy { src: &small, src_offset: 0, dst: &small, dst_offset: 4, bytes: 8 };
    assert!(s.submit(&[c]).and_then(|()| s.synchronize()).is_err());
    let e = d.create_stream(&StreamOptions { threads: Some(0), ..Default::default() });
    assert!(e.is_ok() || matches!(e, Err(Error::Argument { .. })));
    assert_eq!(s.synchronize().unwrap(), None, "an invalid call does not end the stream");
}

pub fn callbacks_and_futures_come_without_anyone_waiting(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let s = stream(&*d);
    let (a, b) = (upload(&*d, &vec![1; 1 << 20]), d.alloc(1 << 20, Tag::Io).unwrap());
    let copy = || Command::Copy { src: &a, src_offset: 0, dst: &b, dst_offset: 0, bytes: 1 << 20 };
    let (send, told) = std::sync::mpsc::channel();
    for i in 0..10 {
        s.submit(&[copy()]).unwrap();
        let send = send.clone();
        s.record().unwrap().on_done(move || send.send(i).unwrap());
    }
    let order: Vec<i32> = (0..10).map(|_| told.recv_timeout(HANGS).unwrap()).collect();
    assert_eq!(order, (0..10).collect::<Vec<_>>());
    // A dropped future, one that is polled by several tasks in turn, and one that is awaited late.
    s.submit(&[copy()]).unwrap();
    drop(s.record().unwrap().into_future());
    s.submit(&[copy()]).unwrap();
    let mut moved = Box::pin(s.record().unwrap().into_future());
    let _ = moved.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(block_on(moved).unwrap(), None);
    let late = s.record().unwrap();
    late.wait().unwrap();
    assert!(late.is_done());
    assert_eq!(block_on(late.into_future()).unwrap(), None);
}

pub fn what_is_dropped_early_lives_as_long_as_the_work(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let before = d.memory().allocated;
    let s = stream(&*d);
    let p = d.compile(&affine(DType::F32)).unwrap();
    let (n, rounds) = (20_000usize, 10);
    let ones = pack(DType::F32, &vec![Scalar::F(1.0); n]);
    let params = [Scalar::I(n as i64), Scalar::F(2.0), Scalar::F(0.0)];
    let mut last = d.alloc(n * 4, Tag::Io).unwrap();
    s.write(&last, 0, Arc::new(ones)).unwrap();
    for _ in 0..rounds {
        let next = d.alloc(n * 4, Tag::Io).unwrap();
        let buffers = [last, next.clone()];
        let groups = [n.div_ceil(32) as u32, 1, 1];
        s.submit(&[Command::Launch { program: &p, groups, buffers: &buffers, params: &params, fault: 0 }])
            .unwrap();
        // The input is dropped in this round.
        last = next;
    }
    let got = s.read(&last, 0, n * 4).unwrap();
    drop((last, p, s));
    let bytes = got.take().unwrap();
    if l.computes {
        assert!(unpack(DType::F32, &bytes).iter().all(|v| *v == Scalar::F(1024.0)));
    }
    d.synchronize().unwrap();
    let start = Instant::now();
    while d.memory().allocated != before {
        assert!(start.elapsed() < HANGS, "memory is not freed: {:?}", d.memory());
        std::thread::yield_now();
    }
    // The device is dropped before its stream.
    let s = stream(&*d);
    let b = d.alloc(64, Tag::Io).unwrap();
    drop(d);
    s.write(&b, 0, Arc::new(vec![5u8; 64])).unwrap();
    assert_eq!(s.read(&b, 0, 64).unwrap().take().unwrap(), [5; 64]);
}

fn overlap(a: Elapsed, b: Elapsed) -> f64 {
    let both = a.end.min(b.end).saturating_sub(a.begin.max(b.begin)) as f64;
    both / (a.end - a.begin).min(b.end - b.begin).max(1) as f64
}

/// Checks, by the device's own times, that most of the shorter work runs concurrently with the longer work.
/// If one writes memory that the other uses, they must not overlap at all.
pub fn two_streams_overlap_where_the_device_can(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let profile = StreamOptions { profile: true, ..StreamOptions::default() };
    let [s, t] = [0, 1].map(|_| d.create_stream(&profile).unwrap());
    if !s.overlaps() {
        println!("{}: one queue", l.name());
        return;
    }
    if d.info().compute_units.is_some_and(|n| n < 2) {
        println!("{}: one compute unit", l.name());
        return;
    }
    let p = d.compile(&slow()).unwrap();
    let buffer = || upload(&*d, &1f32.to_le_bytes());
    let (x, y, z) = (buffer(), buffer(), buffer());
    let go = |s: &Arc<dyn Stream>, p: &Arc<dyn Program>, from: &BufferRef, to: &BufferRef, n: i64| -> Event {
        let (buffers, params) = ([from.clone(), to.clone()], [Scalar::I(n), Scalar::F(0.999)]);
        s.submit(&[Command::Launch {
            program: p,
            groups: [1, 1, 1],
            buffers: &buffers,
            params: &params,
            fault: 0,
        }])
        .unwrap();
        s.record().unwrap()
    };
    // More than 20 ms of work.
    let mut n = 20_000;
    let time = loop {
        let e = go(&s, &p, &x, &y, n);
        e.wait().unwrap();
        let took = e.elapsed().unwrap();
        if took.end - took.begin > 20_000_000 || n > 1 << 34 {
            break took;
        }
        n *= 2;
    };
    let mut best = (0.0, 0.0f64);
    for _ in 0..30 {
        let (e, f) = (go(&s, &p, &x, &y, n), go(&t, &p, &x, &z, n));
        assert_eq!((e.wait().unwrap(), f.wait().unwrap()), (None, None));
        let (e, f) = (e.elapsed().unwrap(), f.elapsed().unwrap());
        let both = (e.end.max(f.end) - e.begin.min(f.begin)) as f64;
        let one = (e.end - e.begin + f.end - f.begin) as f64;
        if overlap(e, f) > best.0 {
            best = (overlap(e, f), one / both);
        }
        if best.0 > 0.8 {
            break;
        }
    }
    println!(
        "{}: {:.2} ms each; {:.0} % of the shorter run side by side, {:.2} streams busy on average",
        l.name(),
        (time.end - time.begin) as f64 / 1e6,
        best.0 * 100.0,
        best.1
    );
    assert!(best.0 > 0.5, "{}: {best:?}", l.name());
    // The second work reads what the first writes.
    let (e, f) = (go(&s, &p, &x, &y, n), go(&t, &p, &y, &z, n));
    // The second work therefore waits for the first, although no stream waits for an event.
    assert_eq!((f.wait().unwrap(), e.wait().unwrap()), (None, None));
    assert_eq!(overlap(e.elapsed().unwrap(), f.elapsed().unwrap()), 0.0, "{}", l.name());
}

pub fn many_streams_come_and_go(l: &DeviceUnderTest) {
    let d = l.open();
    if !has_streams(&*d) {
        return;
    }
    let a = upload(&*d, &[0; 64]);
    for i in 0..20u8 {
        let streams: Vec<_> = (0..3).map(|_| stream(&*d)).collect();
        for (k, s) in streams.iter().enumerate() {
            s.write(&a, k * 4, Arc::new(vec![i; 4])).unwrap();
        }
        drop(streams);
        assert_eq!(download(&*d, &a)[..12], [i; 12]);
    }
}

pub fn an_event_of_one_device_orders_another(l: &DeviceUnderTest) {
    an_event_orders(l, l);
}

/// Checks that a stream of the second device waits for an event of the first device.
pub fn an_event_orders(l: &DeviceUnderTest, m: &DeviceUnderTest) {
    let (d, e) = (l.open(), m.open());
    if !has_streams(&*d) || !has_streams(&*e) {
        return;
    }
    let (s, t) = (stream(&*d), stream(&*e));
    let p = d.compile(&slow()).unwrap();
    let (x, y) = (upload(&*d, &1f32.to_le_bytes()), upload(&*d, &[0; 4]));
    let (buffers, params) = ([x, y], [Scalar::I(60_000), Scalar::F(0.5)]);
    let c = Command::Launch { program: &p, groups: [1, 1, 1], buffers: &buffers, params: &params, fault: 0 };
    s.submit(&[c]).unwrap();
    let first = s.record().unwrap();
    t.wait(&first).unwrap();
    let b = e.alloc(4, Tag::Io).unwrap();
    t.write(&b, 0, Arc::new(vec![1u8; 4])).unwrap();
    let second = t.record().unwrap();
    second.wait().unwrap();
    assert!(first.is_done(), "{} before {}", l.name(), m.name());
}

//! Tests of one graph over two devices of CUDA or ROCm, with values copied directly between the devices.

use crate::alone;
use halcyon::hal::{Counters, Device, Error, Options, StreamOptions, Tag};
use halcyon::ir::Graph;
use halcyon::ir::TensorType;
use halcyon::prelude::*;
use halcyon::{ConstData, Session, Split};
use halcyon_test::Rng;
use halcyon_test::standins::StandIn;
use std::sync::Arc;

fn network(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let mut g = Graph::new();
    let mut h = g.input("x", TensorType::new(DType::F32, [4usize, 16]));
    for _ in 0..6 {
        let w: Vec<f32> = rng.f32s(256).iter().map(|v| v / 4.0).collect();
        let w = g.constant(ConstData::from_slice(&[16, 16], &w).unwrap());
        let y = g.matmul(h, w).unwrap();
        let y = g.tanh(y).unwrap();
        h = g.add(h, y).unwrap();
    }
    g.output("y", h);
    (g, vec![ConstData::from_slice(&[4, 16], &rng.f32s(64)).unwrap()])
}

#[test]
fn values_between_two_devices_of_a_runtime_do_not_meet_the_host() {
    for kind in [BackendType::Cuda, BackendType::Rocm] {
        let Some((s, _alone)) = alone(kind) else { return };
        let mut rng = Rng::fresh("values_between_two_devices_of_a_runtime_do_not_meet_the_host");
        let open = |level: Level| {
            [0, 1].map(|i| Backend::builder().backend_type(kind).device(i).level(level).build().unwrap())
        };
        let (g, inputs) = network(&mut rng);
        let cpu = Backend::builder().backend_type(BackendType::Cpu).level(Level::O0).build().unwrap();
        let want = Session::new(&cpu, g.clone()).run(&inputs).unwrap();
        let counters = |b: &[Backend; 2]| b.each_ref().map(|b| b.counters());
        for (level, deferred) in [(Level::O1, 0), (Level::O2, 1)] {
            s.set("defer", deferred);
            let b = open(level);
            let [first, second] = b.clone();
            // Back and forth, so that copies go both ways.
            let parts = [(first.clone(), 1.0), (second.clone(), 1.0), (first, 1.0), (second, 1.0)];
            let split = Split::layers(&parts, g.clone()).unwrap();
            let p = split.placement();
            assert!(p.copies.iter().all(|c| c.direct == (c.from.is_some() && c.to.is_some())), "{p:?}");
            for run in 0..5 {
                let before = counters(&b);
                let got = split.run(&inputs, &[]).unwrap();
                let d = halcyon::session::difference(&got, &want);
                assert!(d < 1e-5, "{kind} {level} {run}: {d}");
                let after = counters(&b);
                let sum = |f: fn(&Counters) -> u64| {
                    after.iter().map(f).sum::<u64>() - before.iter().map(f).sum::<u64>()
                };
                // The input is uploaded once, the result downloaded once, and intermediate values are copied
                // three times.
                assert_eq!((sum(|c| c.uploads), sum(|c| c.uploaded_bytes)), (1, 256), "{kind} {level}");
                assert_eq!((sum(|c| c.downloads), sum(|c| c.downloaded_bytes)), (1, 256), "{kind} {level}");
                assert_eq!(sum(|c| c.peer_bytes), p.between(), "{kind} {level}");
            }
            // The later runs launched captured commands.
            let replays: u64 = counters(&b).iter().map(|c| c.capture_launches).sum();
            assert_eq!(replays > 0, level == Level::O2, "{kind} {level}: {replays}");
            s.set("defer", 0);
        }
        ordered(&s);

        // Without peer access, values go through the host, and the placement reports it.
        s.set("peers", 0);
        let [first, second] = open(Level::O1);
        let e = second.device().can_copy_from(&**first.device()).unwrap_err();
        assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains("cannot access"), "{e}");
        let split = Split::layers(&[(first.clone(), 1.0), (second.clone(), 1.0)], g.clone()).unwrap();
        let p = split.placement();
        assert!(p.copies.iter().all(|c| !c.direct) && p.between() > 0, "{p:?}");
        let got = split.run(&inputs, &[]).unwrap();
        assert!(halcyon::session::difference(&got, &want) < 1e-5, "{kind}");
        assert_eq!((first.counters().peer_bytes, second.counters().peer_bytes), (0, 0), "{kind}");
        s.set("peers", 1);
        assert!(second.device().can_copy_from(&**cpu.device()).is_err(), "{kind}");
    }
}

/// Checks that a copy waits for work that was submitted before it, also in streams, and that later work waits
/// for the copy. The devices defer all work.
fn ordered(s: &StandIn) {
    use halcyon::hal::Driver;
    let open = |i| -> Arc<dyn Device> { s.driver.open(i, &Options::default()).unwrap() };
    let (a, b) = (open(0), open(1));
    let buffer = |d: &Arc<dyn Device>| d.alloc(1 << 10, Tag::Io).unwrap();
    let (src, dst, back) = (buffer(&a), buffer(&b), buffer(&a));
    let streams = [&a, &b].map(|d| d.create_stream(&StreamOptions::default()).unwrap());
    s.set("defer", 1);
    for round in 1..6u8 {
        // In a stream of the first device: write, copy, and overwrite immediately.
        streams[0].write(&src, 0, Arc::new(vec![round; 1 << 10])).unwrap();
        b.copy_from_peer(&*a, &src, 0, &dst, 0, 1 << 10).unwrap();
        streams[0].write(&src, 0, Arc::new(vec![99; 1 << 10])).unwrap();
        a.copy_from_peer(&*b, &dst, 0, &back, 0, 1 << 10).unwrap();
        streams[1].write(&dst, 0, Arc::new(vec![98; 1 << 10])).unwrap();
        // Read the second device's part first.
        let mut got = vec![0; 1 << 10];
        b.read(&dst, 0, &mut got).unwrap();
        assert!(got.iter().all(|v| *v == 98));
        a.read(&back, 0, &mut got).unwrap();
        assert!(got.iter().all(|v| *v == round), "{round}: {}", got[0]);
    }
    s.set("defer", 0);
    assert_eq!((a.counters().peer_bytes, b.counters().peer_bytes), (5 << 10, 5 << 10));
    let argument = |e: Error| assert!(matches!(e, Error::Argument { .. }), "{e}");
    argument(b.copy_from_peer(&*a, &src, 4, &dst, 0, 1 << 10).unwrap_err());
    argument(b.copy_from_peer(&*a, &dst, 0, &dst, 0, 4).unwrap_err());
    // Two instances of one device.
    let again = open(0);
    let own = buffer(&again);
    again.copy_from_peer(&*a, &src, 0, &own, 0, 1 << 10).unwrap();
    let mut got = vec![0; 1 << 10];
    again.read(&own, 0, &mut got).unwrap();
    assert!(got.iter().all(|v| *v == 99));
    // Copies in both directions at the same time.
    std::thread::scope(|t| {
        let (a, b, src, dst) = (&a, &b, &src, &dst);
        t.spawn(move || (0..200).for_each(|_| b.copy_from_peer(&**a, src, 0, dst, 0, 64).unwrap()));
        t.spawn(move || (0..200).for_each(|_| a.copy_from_peer(&**b, dst, 0, src, 0, 64).unwrap()));
    });
}

//! Captured graphs and warm plans, launched by the device as captured commands.

use crate::alone;
use halcyon::prelude::*;
use halcyon::{Captures, Error, Executable};
use halcyon_test::Rng;
use halcyon_test::standins::StandIn;
use std::time::Instant;

const KINDS: [BackendType; 2] = [BackendType::Cuda, BackendType::Rocm];

fn of(b: &Backend, dims: &[usize], v: &[f32]) -> Tensor {
    Tensor::from_slice(b, dims, v).unwrap()
}

/// Rows of a product, selected by an index that may be out of range, times a literal.
fn f(x: &Tensor, w: &Tensor, i: &Tensor, s: &Tensor) -> Tensor {
    let y = x.matmul(w).relu();
    y.gather(i, 0) * s + 1.0
}

/// The result of `f` on the CPU, which shares no code with the drivers of these devices.
fn expected(x: &[f32], w: &[f32], i: &[i64], s: f32) -> Vec<f32> {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(Level::O0).build().unwrap();
    let index = Tensor::from_slice(&b, [i.len()], i).unwrap();
    let scale = Tensor::scalar(&b, s as f64, DType::F32);
    f(&of(&b, &[4, 8], x), &of(&b, &[8, 8], w), &index, &scale).to_vec().unwrap()
}

fn same(got: &[f32], want: &[f32], what: &str) {
    let near = got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0));
    assert!(got.len() == want.len() && near, "{what}: {got:?}, {want:?}");
}

fn counts(e: &Executable) -> (u64, u64, u64) {
    let Captures { made, launched, submitted, .. } = e.captures();
    (made, launched, submitted)
}

#[test]
fn captured_graphs_are_replayed_by_the_device() {
    for kind in KINDS {
        let Some((s, _alone)) = alone(kind) else { return };
        let before = ["memory", "graphs", "execs", "modules", "events"].map(|n| s.get(n));
        let mut rng = Rng::fresh("captured_graphs_are_replayed_by_the_device");
        captured(&s, kind, &mut rng);
        warm(&s, kind, &mut rng);
        given_up(&s, kind, &mut rng);
        cost(&s, kind);
        let left = || ["memory", "graphs", "execs", "modules", "events"].map(|n| s.get(n)) == before;
        // A stream may take a moment to release its events.
        (0..6000)
            .take_while(|_| !left())
            .for_each(|_| std::thread::sleep(std::time::Duration::from_millis(10)));
        assert!(left(), "{kind}");
    }
}

fn builder(kind: BackendType, level: Level) -> halcyon::backend::BackendBuilder {
    Backend::builder().backend_type(kind).level(level)
}

fn captured(s: &StandIn, kind: BackendType, rng: &mut Rng) {
    let pool = "best-fit:4MiB,defragment".parse().unwrap();
    let b = builder(kind, Level::O2).memory_pool(pool).build().unwrap();
    let hole = of(&b, &[4096], &[0.0; 4096]);
    let (xs, ws) = (rng.f32s(32), rng.f32s(64));
    let (x, w) = (of(&b, &[4, 8], &xs), of(&b, &[8, 8], &ws));
    let rows = [3i64, 0, 2];
    let i = Tensor::from_slice(&b, [3], &rows).unwrap();
    let scale = Tensor::scalar(&b, 2.0, DType::F32);
    let g = b.capture_graph(|| f(&x, &w, &i, &scale)).unwrap();
    let exe = g.executable();
    let steps = exe.plan().steps.len() as u64;
    let run = |inputs: &[&Tensor]| b.launch_graph(&g, inputs).unwrap()[0].to_vec::<f32>().unwrap();

    // The commands are captured at the first launch. The counter `launches` counts each command of a capture.
    let start = b.counters();
    same(&run(&[]), &expected(&xs, &ws, &rows, 2.0), "first");
    for v in [0.5f32, -3.0, 1.25] {
        g.set_argument(&scale, v as f64).unwrap();
        same(&run(&[]), &expected(&xs, &ws, &rows, v), "another scalar");
    }
    assert_eq!(counts(exe), (1, 4, 0), "{g:?}");
    let now = b.counters();
    assert_eq!(
        (now.capture_launches - start.capture_launches, now.launches - start.launches),
        (4, 4 * steps)
    );
    assert!(format!("{g:?}").contains("4 launched as captures, 0 submitted)"), "{g:?}");

    // With another input, the commands are submitted at first, and captured when the input recurs. Both
    // captures are kept.
    let ys = rng.f32s(32);
    let y = of(&b, &[4, 8], &ys);
    g.set_argument(&scale, 1.0).unwrap();
    for _ in 0..4 {
        same(&run(&[&y, &w, &i]), &expected(&ys, &ws, &rows, 1.0), "another input");
        same(&run(&[&x, &w, &i]), &expected(&xs, &ws, &rows, 1.0), "the first input");
    }
    assert_eq!(counts(exe), (2, 11, 1), "{g:?}");

    // If buffers move, the commands are captured again.
    drop(hole);
    let generation = b.memory().generation;
    b.defragment().unwrap();
    assert_eq!(b.memory().generation, generation + 1);
    for _ in 0..3 {
        same(&run(&[]), &expected(&xs, &ws, &rows, 1.0), "moved");
    }
    assert_eq!(counts(exe), (3, 13, 2), "{g:?}");

    // In streams: two concurrent launches with different arguments, and a result that is held.
    s.set("defer", 1);
    let streams = [b.create_stream().unwrap(), b.create_stream().unwrap()];
    for k in 0..6 {
        let mut held = vec![];
        for (v, t) in [(2.0f32, &streams[0]), (-4.0, &streams[1])] {
            g.set_argument(&scale, v as f64).unwrap();
            held.push((v, t.run(|| b.launch_graph(&g, &[])).unwrap()));
        }
        for (v, out) in held {
            same(&out[0].to_vec::<f32>().unwrap(), &expected(&xs, &ws, &rows, v), &format!("stream, {k}"));
        }
    }
    assert!(counts(exe).1 >= 13 + 8, "{g:?}");

    // An index out of range, in the device's queue and in a stream.
    let bad = Tensor::from_slice(&b, [3], &[3i64, 17, 2]).unwrap();
    let index = |e: Error| assert!(matches!(e, Error::Index { .. }), "{e}");
    b.launch_graph(&g, &[&x, &w, &bad]).unwrap();
    index(b.launch_graph(&g, &[]).unwrap()[0].to_vec::<f32>().unwrap_err());
    b.launch_graph(&g, &[]).unwrap();
    let replayed = counts(exe).1;
    streams[0].run(|| g.launch()).unwrap();
    index(streams[0].synchronize().unwrap_err());
    assert_eq!(counts(exe).1, replayed + 1, "{g:?}");
    let _ = b.synchronize();
    g.set_argument(&scale, 2.0).unwrap();
    same(&run(&[&x, &w, &i]), &expected(&xs, &ws, &rows, 2.0), "after a fault");
    s.set("defer", 0);

    // Commands that cannot be instantiated are submitted individually, and the reason is reported.
    s.set("fail instantiate", 0);
    let h = b.capture_graph(|| f(&x, &w, &i, &scale) - 5.0).unwrap();
    let want: Vec<f32> = expected(&xs, &ws, &rows, 2.0).iter().map(|v| v - 5.0).collect();
    for _ in 0..3 {
        same(&b.launch_graph(&h, &[]).unwrap()[0].to_vec::<f32>().unwrap(), &want, "not instantiated");
    }
    assert_eq!(counts(h.executable()), (0, 0, 3));
    assert!(format!("{h:?}").contains("instantiating a graph"), "{h:?}");
    s.set("fail instantiate", -1);

    // Below O2, and if commands are timed, each command is submitted individually.
    for (b, why) in [
        (builder(kind, Level::O1).build().unwrap(), "level O1"),
        (builder(kind, Level::O2).profile(true).build().unwrap(), "profiling is on"),
    ] {
        let (x, w) = (of(&b, &[4, 8], &xs), of(&b, &[8, 8], &ws));
        let g = b.capture_graph(|| x.matmul(&w)).unwrap();
        (0..3).for_each(|_| g.launch().unwrap());
        assert_eq!((counts(g.executable()), b.counters().capture_launches), ((0, 0, 3), 0));
        assert!(format!("{g:?}").contains(why), "{g:?}");
    }
}

/// Plans that are not captured explicitly: results are new buffers in each run, for which the pool returns
/// the same addresses.
fn warm(s: &StandIn, kind: BackendType, rng: &mut Rng) {
    let b = builder(kind, Level::O2).build().unwrap();
    let (xs, ws) = (rng.f32s(32), rng.f32s(64));
    let (x, w) = (of(&b, &[4, 8], &xs), of(&b, &[8, 8], &ws));
    let rows = [1i64, 1, 0];
    let i = Tensor::from_slice(&b, [3], &rows).unwrap();
    let eval = |v: f32| f(&x, &w, &i, &Tensor::scalar(&b, v as f64, DType::F32)).to_vec::<f32>().unwrap();
    (0..4).for_each(|_| drop(eval(1.0)));
    let (start, execs) = (b.counters(), s.get("execs"));
    for k in 0..10 {
        let v = k as f32 - 4.0;
        same(&eval(v), &expected(&xs, &ws, &rows, v), "warm");
    }
    let now = b.counters();
    assert_eq!(
        (now.capture_launches - start.capture_launches, now.allocations, now.compiles),
        (10, start.allocations, start.compiles)
    );
    assert_eq!(s.get("execs"), execs);
    // Only the arguments are uploaded, and only if they have changed.
    let (copies, bytes) = (now.uploads - start.uploads, now.uploaded_bytes - start.uploaded_bytes);
    assert!(copies == 10 && bytes % 80 == 0 && bytes <= 10 * 64, "{kind}: {copies} copies, {bytes} bytes");
    (0..5).for_each(|_| drop(eval(5.0)));
    let last = b.counters();
    assert_eq!((last.capture_launches - now.capture_launches, last.uploads - now.uploads), (5, 0), "{kind}");

    // A compiled function.
    let c = b.compile(|t: &[Tensor]| t[0].matmul(&t[1]).tanh());
    let n = b.counters().capture_launches;
    for _ in 0..6 {
        c.call(&[&x, &w]).unwrap();
    }
    assert!(b.counters().capture_launches - n >= 4, "{kind}");
}

/// Bindings that each occur twice and never again.
fn given_up(s: &StandIn, kind: BackendType, rng: &mut Rng) {
    let b = builder(kind, Level::O2).build().unwrap();
    let xs: Vec<Tensor> = (0..30).map(|_| of(&b, &[8], &rng.f32s(8))).collect();
    let g = b.capture_graph(|| xs[0].tanh()).unwrap();
    let execs = s.get("execs");
    for x in &xs {
        for _ in 0..2 {
            b.launch_graph(&g, &[x]).unwrap();
        }
        assert!(s.get("execs") <= execs + 4, "{kind}: captures are bounded");
    }
    let r = g.executable().captures();
    assert!(r.made <= 12 && r.reason.is_some_and(|w| w.contains("captures were dropped")), "{g:?}");
    assert_eq!(s.get("execs"), execs, "{kind}: none is kept");
}

/// Runtime calls and host time of a plan with a hundred kernels. The device defers all work.
fn cost(s: &StandIn, kind: BackendType) {
    let run = |level: Level| {
        let b = builder(kind, level).build().unwrap();
        let (x, w) = (of(&b, &[2, 2], &[1.0, 0.5, 0.25, 1.0]), of(&b, &[2, 2], &[0.5, 0.25, 0.5, 0.5]));
        let chain = |x: &Tensor| (0..100).fold(x.clone(), |x, _| x.matmul(&w));
        let g = b.capture_graph(|| chain(&x)).unwrap();
        assert_eq!(g.executable().plan().steps.len(), 100);
        (0..3).for_each(|_| g.launch().unwrap());
        b.synchronize().unwrap();
        s.set("defer", 1);
        let (calls, start) = (s.get("calls"), Instant::now());
        (0..20).for_each(|_| g.launch().unwrap());
        let (took, calls) = (start.elapsed() / 20, (s.get("calls") - calls) as f64 / 20.0);
        s.set("defer", 0);
        b.synchronize().unwrap();
        println!("{kind}, {level}: {calls} calls and {took:?} of the host for a launch of 100 kernels");
        calls
    };
    let (plain, replayed) = (run(Level::O1), run(Level::O2));
    assert_eq!((plain, replayed), (104.0, 3.0), "{kind}");
}

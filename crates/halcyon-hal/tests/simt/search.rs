//! Algorithm search over the stand-ins: what is measured, when, and what is taken. The stand-in's clock
//! advances by the time that a test gives each algorithm.

use crate::ALONE;
use crate::common::standin::{self, StandIn};
use crate::libraries::{Call, conv_of, error};
use halcyon_hal::tune::{ALGORITHM, AlgorithmSearch, RejectReason, TuningCache, device_key};
use halcyon_hal::{BackendType, Device, Driver, Options};
use halcyon_ir::DType;
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::MatmulPrecision;
use std::path::Path;
use std::sync::Arc;

fn open(s: &StandIn, file: Option<&Path>) -> (Arc<dyn Device>, Arc<TuningCache>) {
    let cache = Arc::new(file.map_or_else(TuningCache::memory, TuningCache::at));
    let search = Some(AlgorithmSearch(cache.clone()));
    let d = s.driver.open(0, &Options { algorithm_search: search, ..Options::default() }).unwrap();
    (d, cache)
}

fn product<'a>(rows: usize) -> Call<'a> {
    let f32s = |dims: &[usize]| (DType::F32, View::dense(dims));
    Call::new(&Op::Matmul, &[f32s(&[rows, 96]), f32s(&[96, 48])], (DType::F32, &[rows, 48]))
}

fn convolution(op: &Op) -> Call<'_> {
    let f32s = |dims: &[usize]| (DType::F32, View::dense(dims));
    let mut call =
        Call::new(op, &[f32s(&[2, 8, 12, 12]), f32s(&[8, 8, 3, 3])], (DType::F32, &[2, 8, 12, 12]));
    // Winograd's algorithm loses digits, which this precision allows.
    call.precision = MatmulPrecision::High;
    call
}

fn measured(d: &dyn Device) -> u64 {
    d.counters().algorithms_measured
}

/// Sets the times of the algorithms of products and of convolutions; the others take no time.
fn takes(s: &StandIn, products: &[i64], convolutions: &[(usize, i64)]) {
    (0..8).for_each(|i| s.set(&format!("product takes {i}"), products.get(i).copied().unwrap_or(0)));
    let of = |i| convolutions.iter().find(|(k, _)| *k == i).map_or(0, |(_, t)| *t);
    (0..8).for_each(|i| s.set(&format!("convolution takes {i}"), of(i)));
}

fn products(s: &StandIn) {
    let kind = s.driver.kind();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    takes(s, &[40, 30, 50], &[]);
    let (d, cache) = open(s, Some(&file));
    assert_eq!((measured(&*d), d.searches_algorithms()), (0, Ok(())), "{kind}");
    let calls = s.get("library calls");
    let (name, first) = product(32).run(&*d, false);
    // The fastest of the three algorithms is the second; it alone runs when the call does.
    assert_eq!((measured(&*d), s.get("product algorithm")), (3, 1), "{kind}: {name}");
    assert!(s.get("library calls") > calls + 3 * 9, "{kind}");
    // Once for each call, in this device and in every later one with this cache.
    let calls = s.get("library calls");
    product(32).run(&*d, true);
    assert_eq!((measured(&*d), s.get("library calls")), (3, calls + 1), "{kind}");
    let entry = |cache: &TuningCache, d: &dyn Device| {
        let device = device_key(d.info(), d.as_target().caps());
        let all = cache.table();
        let own: Vec<_> = all.entries().filter(|e| e.device == device).cloned().collect();
        assert!(own.iter().all(|e| e.key.starts_with(ALGORITHM)), "{own:?}");
        own
    };
    let own = entry(&cache, &*d);
    let [e] = &own[..] else { panic!("{own:?}") };
    let best = e.best.as_ref().unwrap();
    assert!(e.key.contains(&name) && e.key.contains("32x96x48") && e.rejected.is_empty(), "{e:?}");
    assert!((best.gain - 4.0 / 3.0).abs() < 0.1 && best.tried == 3, "{best:?}");
    assert!((best.seconds - 30e-6).abs() < 2e-6 && (best.default_seconds - 40e-6).abs() < 2e-6, "{best:?}");
    assert_ne!(best.variant, best.default);
    // What generated kernels were tuned to is another matter.
    assert!(cache.tuned_variants(&e.device).is_empty());
    drop((d, cache));
    // The times have changed, but nothing is measured.
    takes(s, &[10, 80, 80], &[]);
    let (d, cache) = open(s, Some(&file));
    let (_, again) = product(32).run(&*d, false);
    assert_eq!((measured(&*d), s.get("product algorithm")), (0, 1), "{kind}");
    assert_eq!(error(&again, &first), 0.0);
    assert_eq!(entry(&cache, &*d).len(), 1);
    // Another size is another call.
    product(64).run(&*d, false);
    assert_eq!((measured(&*d), s.get("product algorithm")), (3, 0), "{kind}");
    assert_eq!(entry(&cache, &*d).len(), 2);
    drop((d, cache));
    // Without the search, nothing is measured, and the library's first choice is taken.
    takes(s, &[80, 10, 10], &[]);
    let d = s.driver.open(0, &Options::default()).unwrap();
    let calls = s.get("library calls");
    product(32).run(&*d, false);
    assert_eq!((measured(&*d), s.get("library calls")), (0, calls + 1), "{kind}");
    assert_eq!((s.get("product algorithm"), d.searches_algorithms().is_err()), (0, true), "{kind}");
}

fn failures(s: &StandIn) {
    let kind = s.driver.kind();
    // The algorithm that would be the fastest fails when it runs: it is dropped, and not tried again.
    takes(s, &[40, 5, 20], &[]);
    s.set("failing product", 1);
    let (d, cache) = open(s, None);
    product(32).run(&*d, false);
    assert_eq!((measured(&*d), s.get("product algorithm")), (3, 2), "{kind}");
    let all = cache.table();
    let entries: Vec<_> = all.entries().collect();
    let [e] = &entries[..] else { panic!("{entries:?}") };
    let [r] = &e.rejected[..] else { panic!("{e:?}") };
    assert!(r.why == RejectReason::DeviceError && r.detail.contains("not supported"), "{r:?}");
    // Without the result, the failed algorithm is still known.
    let mut bare = (*e).clone();
    bare.best = None;
    drop(d);
    let (d, cache) = open(s, None);
    cache.add(&bare);
    product(32).run(&*d, false);
    assert_eq!((measured(&*d), s.get("product algorithm")), (2, 2), "{kind}");
    // The library's first choice fails.
    s.set("failing product", 0);
    let (d, _) = open(s, None);
    product(32).run(&*d, false);
    assert_eq!(s.get("product algorithm"), 1, "{kind}");
    s.set("failing product", -1);
    // An algorithm that takes far longer is dropped after its first runs.
    takes(s, &[10, 900, 10], &[]);
    let (d, cache) = open(s, None);
    product(32).run(&*d, false);
    let why: Vec<_> = cache.table().entries().flat_map(|e| e.rejected.clone()).map(|r| r.why).collect();
    assert_eq!((why, s.get("product algorithm")), (vec![RejectReason::TooSlow], 0), "{kind}");
    // Differences of one percent are noise: the library's choice stays.
    takes(s, &[1000, 990, 995], &[]);
    let (d, _) = open(s, None);
    product(32).run(&*d, false);
    assert_eq!((measured(&*d), s.get("product algorithm")), (3, 0), "{kind}");
    drop(d);
    // Without memory for the measurement, the library's choice is taken, and nothing is stored.
    takes(s, &[40, 30, 50], &[]);
    let cache = Arc::new(TuningCache::memory());
    let search = Some(AlgorithmSearch(cache.clone()));
    let options = Options { algorithm_search: search, memory_limit: Some(1 << 14), ..Options::default() };
    let d = s.driver.open(0, &options).unwrap();
    let kernel = product(64).kernel(&*d).unwrap();
    assert!(kernel.name().contains("f32") && cache.table().is_empty(), "{kind}: {}", kernel.name());
    assert_eq!((measured(&*d), d.memory().allocated), (0, 0), "{kind}");
}

fn convolutions(s: &StandIn) {
    let op = conv_of(&[1, 1], &[1, 1], &[1, 1], 1);
    // In the library's order, Winograd's algorithm (6) comes before 1 and 0; 4 is not deterministic, so it is
    // no candidate.
    takes(s, &[], &[(6, 90), (1, 70), (0, 60), (4, 1)]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let (d, cache) = open(s, Some(&file));
    let (name, _) = convolution(&op).run(&*d, false);
    assert_eq!((measured(&*d), s.get("convolution algorithm")), (3, 0), "{name}");
    let all = cache.table();
    let e = all.entries().next().unwrap();
    assert!(e.key.contains("cudnn.conv.tf32, image 2x8x12x12, filters 8x8x3x3"), "{}", e.key);
    assert_eq!(e.best.as_ref().unwrap().variant.values["algorithm"], 0);
    drop((d, cache));
    let (d, _) = open(s, Some(&file));
    convolution(&op).run(&*d, false);
    assert_eq!((measured(&*d), s.get("convolution algorithm")), (0, 0));
    // Where f32 must be exact, only algorithms that are products are candidates.
    let mut exact = convolution(&op);
    exact.precision = MatmulPrecision::Highest;
    takes(s, &[], &[(6, 1), (1, 20), (0, 30)]);
    exact.run(&*d, false);
    assert_eq!((measured(&*d), s.get("convolution algorithm")), (2, 1));
    drop(d);
    // Another version of the library: its list of algorithms is another one.
    s.set("dnn version", 91_003);
    let (d, _) = open(s, Some(&file));
    convolution(&op).run(&*d, false);
    assert_eq!((measured(&*d), s.get("convolution algorithm")), (3, 6));
    s.set("dnn version", 91_002);
    // A failing algorithm of cuDNN.
    s.set("failing convolution", 6);
    let (d, cache) = open(s, None);
    convolution(&op).run(&*d, false);
    assert_eq!(s.get("convolution algorithm"), 1);
    assert_eq!(cache.table().entries().next().unwrap().rejected.len(), 1);
    s.set("failing convolution", -1);
    drop((d, cache));
    // Without the search, the first one.
    let d = s.driver.open(0, &Options::default()).unwrap();
    convolution(&op).run(&*d, false);
    assert_eq!((measured(&*d), s.get("convolution algorithm")), (0, 6));
}

#[test]
fn algorithms_are_measured_once_and_the_fastest_is_kept() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let held = |s: &StandIn| {
            ["handles", "descriptions", "memory", "streams", "events", "contexts"].map(|n| s.get(n))
        };
        let before = held(&s);
        products(&s);
        failures(&s);
        if s.driver.kind() == BackendType::Cuda {
            convolutions(&s);
        }
        takes(&s, &[], &[]);
        assert_eq!(held(&s), before, "{}", s.driver.kind());
    }
}

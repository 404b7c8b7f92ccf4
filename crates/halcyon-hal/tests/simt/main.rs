//! Tests of the CUDA and ROCm drivers with stand-ins for the vendor libraries: failures are typed errors,
//! nothing leaks, and the results are those of the library.
#![cfg(all(unix, feature = "cuda", feature = "rocm"))]

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod compilers;
mod exchange;
mod graphs;
mod libraries;
mod search;
mod threads;

use common::standin::{self, StandIn};
use common::*;
use halcyon_hal::simt::SimtDriver;
use halcyon_hal::simt::program::Output;
use halcyon_hal::{Command, Device, Driver, Error, Options, Result, StreamOptions, Tag, cuda, rocm};
use halcyon_ir::{DType, Scalar};
use std::sync::{Arc, Mutex};

/// A stand-in's state is global, so tests that read its counters run one at a time. So do tests that launch
/// kernels: two stand-ins that compile the same kernel load one library, which knows only one of them.
static ALONE: Mutex<()> = Mutex::new(());

/// Numbers of the library's resources that are in use.
fn held(s: &StandIn) -> [i64; 8] {
    ["memory", "pages", "streams", "events", "modules", "contexts", "graphs", "execs"].map(|n| s.get(n))
}

/// Opens a device and runs a kernel and copies in its own queue and in a stream. Returns `x * 2 + 1` for x =
/// 1, 2, 3, read through the stream and again without it.
fn work(s: &StandIn) -> Result<Vec<f64>> {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { cache_dir: Some(dir.path().into()), profile: true, ..Options::default() };
    let d: Arc<dyn Device> = s.driver.open(0, &options)?;
    let answer = work_on(&d)?;
    assert_eq!(d.take_timings()?.len(), 1);
    Ok(answer)
}

/// Like `work`, on an open device.
fn work_on(d: &Arc<dyn Device>) -> Result<Vec<f64>> {
    let p = d.compile(&affine(DType::F32))?;
    let x = pack(DType::F32, &[1.0, 2.0, 3.0].map(Scalar::F));
    let (a, b) = (d.alloc(x.len(), Tag::Io)?, d.alloc(x.len(), Tag::Io)?);
    d.write(&a, 0, &x)?;
    let params = [Scalar::I(3), Scalar::F(2.0), Scalar::F(1.0)];
    let buffers = [a.clone(), b.clone()];
    let launch =
        [Command::Launch { program: &p, groups: [1, 1, 1], buffers: &buffers, params: &params, fault: 0 }];
    d.submit(&launch)?;
    let host = d.alloc_host(64)?;
    let t = d.create_stream(&StreamOptions { profile: true, ..StreamOptions::default() })?;
    t.submit(&launch)?;
    let got = t.read(&b, 0, x.len())?;
    let from_stream = got.take()?;
    let mut bytes = vec![0; x.len()];
    d.read(&b, 0, &mut bytes)?;
    drop(host);
    // Both results are returned, so a falsified read-back shows up in one of them.
    let (one, other) = (unpack(DType::F32, &from_stream), unpack(DType::F32, &bytes));
    Ok(one.iter().chain(&other).map(|v| v.as_f64()).collect())
}

const ANSWER: [f64; 6] = [3.0, 5.0, 7.0, 3.0, 5.0, 7.0];

#[test]
fn memory_that_another_process_took_is_not_free() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let kind = s.driver.kind();
        let before = held(&s);
        let free = || s.driver.probe().unwrap()[0].free_memory.unwrap();
        let all = free();
        assert!(
            s.driver.list().unwrap()[0].free_memory.is_none(),
            "{kind}: listing devices makes no context"
        );
        let d = s.driver.open(0, &Options::default()).unwrap();
        let open = d.free_memory().unwrap();
        assert!(open <= all && d.available().unwrap() <= open && d.unknown_free().is_empty(), "{kind}");
        // The pool's limit is unchanged. The available memory is the free memory that the driver reports.
        s.set("others", (open - (1 << 20)) as i64);
        assert_eq!(d.free_memory(), Some(1 << 20), "{kind}");
        assert_eq!(d.available(), Some(1 << 20), "{kind}");
        assert!(d.memory().limit.unwrap() > 1 << 20, "{kind}");
        assert!(free() <= 1 << 20, "{kind}");
        assert!(matches!(d.alloc(2 << 20, Tag::Io), Err(Error::OutOfMemory { .. })), "{kind}");
        drop(d.alloc(1 << 16, Tag::Io).unwrap());
        s.set("others", 0);
        drop(d);
        assert_eq!(held(&s), before, "{kind}: the contexts of queries are released");
    }
}

#[test]
fn what_fails_is_an_error_and_nothing_is_left() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let kind = s.driver.kind();
        let (before, launches) = (held(&s), s.get("launches"));
        assert_eq!(work(&s).unwrap(), ANSWER, "{kind}");
        // The watcher thread may hold events of a stream a moment longer.
        let settled = || {
            let released = halcyon_test_host::soon(|| held(&s) == before);
            assert!(released, "{kind}: {before:?} were held before, {:?} now", held(&s));
        };
        settled();
        assert_eq!(s.get("launches") - launches, 2, "{kind}");

        // Each allocation fails in turn.
        let n = s.get("allocations");
        work(&s).unwrap();
        let n = s.get("allocations") - n;
        assert!(n >= 3, "{kind}: {n} allocations");
        for i in 0..n {
            s.set("fail allocation", i);
            match work(&s) {
                // The pool's retry succeeded.
                Ok(v) => assert_eq!(v, ANSWER, "{kind}: allocation {i}"),
                Err(e) => {
                    let memory =
                        matches!(e, Error::OutOfMemory { .. }) || e.to_string().contains("out of memory");
                    assert!(memory, "{kind}: allocation {i}: {e}");
                }
            }
            s.set("fail allocation", -1);
            settled();
        }

        // If the stand-in falsifies one byte of a copy to the host, exactly one result is wrong.
        s.set("falsify", 13);
        let v = work(&s).unwrap();
        assert!(v != ANSWER && v.iter().zip(ANSWER).filter(|(a, b)| **a != *b).count() == 1, "{kind}: {v:?}");
        s.set("falsify", -1);

        // Many writes without an event reuse page-locked memory.
        let d = s.driver.open(0, &Options::default()).unwrap();
        let (b, t) =
            (d.alloc(8 << 20, Tag::Io).unwrap(), d.create_stream(&StreamOptions::default()).unwrap());
        for i in 0..24u8 {
            t.write(&b, 0, Arc::new(vec![i; 8 << 20])).unwrap();
        }
        assert!((1..=10).contains(&s.get("pages")), "{kind}: {} pieces", s.get("pages"));
        assert!(t.read(&b, 0, 8 << 20).unwrap().take().unwrap().iter().all(|v| *v == 23), "{kind}");
        drop((b, t, d));
        settled();

        // A stream's time spans all of its commands, whatever their number.
        let d = s.driver.open(0, &Options::default()).unwrap();
        let t = d.create_stream(&StreamOptions { profile: true, ..StreamOptions::default() }).unwrap();
        let (a, b) = (d.alloc(64, Tag::Io).unwrap(), d.alloc(64, Tag::Io).unwrap());
        let copy = || Command::Copy { src: &a, src_offset: 0, dst: &b, dst_offset: 0, bytes: 64 };
        for _ in 0..50 {
            t.submit(&std::array::from_fn::<_, 100, _>(|_| copy())).unwrap();
        }
        let e = t.record().unwrap();
        e.wait().unwrap();
        let ran = e.elapsed().unwrap();
        // The stand-in's clock advances by a microsecond per event, and each command has two events.
        assert!(ran.end - ran.begin >= 2 * 5000 * 1000 - 1000, "{kind}: {ran:?}");
        drop((e, t, a, b, d));
        settled();

        graphs::check(&s);
        settled();

        // The device is lost during use.
        let d = s.driver.open(0, &Options::default()).unwrap();
        let b = d.alloc(64, Tag::Io).unwrap();
        s.set("lost", 719);
        let e = d.read(&b, 0, &mut [0; 64]).unwrap_err();
        assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("719"), "{kind}: {e}");
        assert!(d.write(&b, 0, &[0; 64]).is_err() && d.synchronize().is_err(), "{kind}");
        s.set("lost", 0);
        drop((b, d));
        settled();

        // No devices.
        s.set("devices", 0);
        let e = s.driver.probe().unwrap_err();
        assert!(e.exit_code() == 4 && e.to_string().contains("finds no device"), "{kind}: {e}");
        assert!(!e.to_string().contains("nstall"), "the advice is to install what is installed: {e}");
        s.set("devices", 2);
        let all = s.driver.probe().unwrap();
        assert_eq!((all.len(), all[1].id()), (2, format!("{kind}:1").as_str()));
        let e = s.driver.open(2, &Options::default()).unwrap_err().to_string();
        assert!(e.contains("there is no device 2") && e.contains("Choose device 0 or 1"), "{e}");
        let two = [0, 1].map(|i| s.driver.open(i, &Options::default()).unwrap());
        let b = two[0].alloc(4, Tag::Io).unwrap();
        assert!(matches!(two[1].write(&b, 0, &[0; 4]), Err(Error::Argument { .. })), "{kind}");
    }
}

#[test]
fn libraries_that_are_missing_or_others_are_named() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let (family, lacks, own) = match s.driver.kind() {
            halcyon_hal::BackendType::Cuda => (&cuda::CUDA, ["cuInit", "nvrtcVersion"], "sm_90"),
            _ => (&rocm::ROCM, ["hipInit", "hiprtcVersion"], "gfx90a"),
        };
        let over = |runtime: &str, compiler: &str| {
            // SAFETY: the libraries below are stand-ins, do not exist, or are the C library, which has none
            // of the functions.
            let driver = unsafe { SimtDriver::over(family, runtime, compiler) };
            driver.open(0, &Options::default()).unwrap_err().to_string()
        };
        let e = over("libnothing-here.so.7", &s.path);
        assert!(e.contains("libnothing-here.so.7: ") && e.contains("on this machine"), "{e}");
        let e = over("libc.so.6", &s.path);
        assert!(e.contains(&format!("libc.so.6: it has no function {}", lacks[0])), "{e}");
        let e = over(&s.path, "/nowhere/lib.so");
        assert!(e.contains("/nowhere/lib.so: ") && e.contains("run-time compiler"), "{e}");
        let e = over(&s.path, "libc.so.6");
        assert!(e.contains(&format!("libc.so.6: it has no function {}", lacks[1])), "{e}");

        // SAFETY: this is a stand-in, whose functions have the vendor's signatures.
        let compiler = unsafe { family.compiler(std::slice::from_ref(&s.path)) }.unwrap();
        let flags = (family.flags)(Some(own)).unwrap();
        let e = compiler
            .compile("cuda:0", "broken", "int f() { return undeclared_name; }", &flags, Output::Binary)
            .unwrap_err();
        let Error::Compile { kernel, log, .. } = &e else { panic!("{e}") };
        assert!(kernel == "broken" && log.contains("undeclared_name"), "{e}");
    }
    assert_eq!((cuda::CUDA.flags)(None), None);
}

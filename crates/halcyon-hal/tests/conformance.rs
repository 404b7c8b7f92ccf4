//! The driver contract of `halcyon_hal`, checked on every available driver.

mod common;

use common::*;
use halcyon_hal::BackendType;
use halcyon_hal::conformance::CASES;
use halcyon_ir::{DType, Scalar};

halcyon_hal::conformance_tests!(devices_under_test());

fn each(f: impl Fn(&DeviceUnderTest)) {
    for under_test in devices_under_test() {
        println!("device under test: {}", under_test.name());
        f(&under_test);
    }
}

#[test]
fn devices_keep_their_programs_and_opencl_keeps_them_on_disk() {
    each(|l| {
        if l.driver.kind() == BackendType::Cpu {
            return;
        }
        let d = l.open();
        let p = d.compile(&affine(DType::F32)).unwrap();
        d.compile(&affine(DType::F32)).unwrap();
        assert_eq!((d.counters().compiles, d.counters().compile_cache_hits), (1, 0));
        if l.driver.kind() == BackendType::OpenCl {
            assert!(p.source().unwrap().contains("__kernel"));
            let warm = l.open();
            let p = warm.compile(&affine(DType::F32)).unwrap();
            assert_eq!((warm.counters().compiles, warm.counters().compile_cache_hits), (0, 1));
            let (a, b) = (upload(&*warm, &pack(DType::F32, &[Scalar::F(5.0)])), upload(&*warm, &[0; 4]));
            launch(&*warm, &p, [1, 1, 1], &[&a, &b], &[Scalar::I(1), Scalar::F(2.0), Scalar::F(1.0)])
                .unwrap();
            let got = unpack(DType::F32, &download(&*warm, &b));
            assert_eq!(got, [Scalar::F(11.0)], "the cached program is right");
        }
        if l.driver.kind() == BackendType::WebGpu {
            // A cache file is kept only if the driver's pipeline cache contains pipelines; llvmpipe's never
            // does.
            let dir = l.options.cache_dir.as_ref().unwrap().join("webgpu");
            let kept = std::fs::read_dir(dir).map_or(0, |d| d.count());
            let warm = l.open();
            warm.compile(&affine(DType::F32)).unwrap();
            let want = if kept > 0 { (0, 1) } else { (1, 0) };
            assert_eq!((warm.counters().compiles, warm.counters().compile_cache_hits), want, "{kept} kept");
        }
    });
}

/// Drivers for processors submit the commands of a capture, unless a variable asks for command buffers. A
/// process with the variable runs the cases of captures.
#[test]
fn captures_are_command_buffers_of_opencl_on_request() {
    const VARIABLE: &str = "HALCYON_OPENCL_COMMAND_BUFFERS";
    let Some(l) = devices_under_test().into_iter().find(|l| l.driver.kind() == BackendType::OpenCl) else {
        return;
    };
    let listed = l.open().info().properties["extensions"].contains("cl_khr_command_buffer");
    let mut c = std::process::Command::new(std::env::current_exe().unwrap());
    let cases: Vec<_> = CASES.iter().map(|c| c.0).filter(|name| name.contains("captur")).collect();
    assert_eq!(cases.len(), 4, "{cases:?}");
    c.arg("--exact").args(&cases).args(["--nocapture", "--test-threads=2"]).env(VARIABLE, "on");
    let o = c.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    assert!(o.status.success() && text.contains("4 passed"), "{text}");
    let refused = text.lines().find(|l| l.starts_with("opencl: "));
    match refused {
        Some(why) => {
            assert!(!listed || why.contains("is not one of"), "{why}");
            halcyon_test_host::skip("captures on OpenCL", why);
        }
        None => assert!(listed, "{text}"),
    }
}

#[test]
fn an_event_of_one_backend_orders_another() {
    let all = devices_under_test();
    for (l, m) in all.iter().flat_map(|l| all.iter().map(move |m| (l, m))) {
        halcyon_hal::conformance::streams::an_event_orders(l, m);
    }
}

//! The choice among several run-time compilers.

use crate::common::standin::{self, StandIn};
use crate::common::*;
use crate::{ALONE, ANSWER, work_on};
use halcyon_hal::simt::SimtDriver;
use halcyon_hal::simt::program::Output;
use halcyon_hal::{BackendType, Device, Driver, Error, Options, Result, cuda};
use halcyon_ir::DType;
use std::sync::Arc;

/// The device's description of its compiler.
fn told(d: &dyn Device) -> String {
    d.kernel_libraries().pop().unwrap().1
}

#[test]
fn a_compiler_whose_kernels_the_driver_loads_is_taken() {
    if halcyon_test_host::left_out("a_compiler_whose_kernels_the_driver_loads_is_taken") {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let all = standin::all();
    let Some(s) = all.iter().find(|s| s.driver.kind() == BackendType::Cuda) else { return };
    let one = |name: &str, set: &[(&str, i64)]| {
        let c = standin::copy(s, name);
        set.iter().for_each(|(what, v)| c.set(what, *v));
        c
    };
    let good = one("libnvrtc.so.12.a", &[]);
    let newer = one("libnvrtc.so.13", &[("compiler", 13)]);
    // Its file name contains no version.
    let unnamed = one("libnvrtc.so", &[("compiler", 13)]);
    let broken = one("libnvrtc.so.12.b", &[("broken", 1)]);
    let before = one("libnvrtc.so.12.c", &[("newest generation", 86)]);
    let behind = one("libnvrtc.so.12.d", &[("oldest generation", 100)]);
    let cache = tempfile::tempdir().unwrap();
    let open = |compilers: &[&StandIn]| -> Result<Arc<dyn Device>> {
        let paths: Vec<&str> = compilers.iter().map(|c| c.path.as_str()).collect();
        // SAFETY: the paths are those of stand-ins, whose functions have the vendor's types.
        let driver = unsafe { SimtDriver::over(&cuda::CUDA, &s.path, "").with_compilers(&paths) };
        driver.open(0, &Options { cache_dir: Some(cache.path().into()), ..Options::default() })
    };

    // The first one of the driver's major version is chosen. It is tested by compiling a trivial kernel, once
    // per process.
    let d = open(&[&unnamed, &newer, &good]).unwrap();
    assert_eq!((good.get("compiles"), newer.get("compiles"), unnamed.get("compiles")), (1, 0, 0));
    assert_eq!(told(&*d), format!("{} 12.4", good.path));
    assert!(!d.info().properties.contains_key("compilers_passed_over"));
    open(&[&unnamed, &newer, &good]).unwrap();
    assert_eq!((good.get("compiles"), d.counters().compiles), (1, 0));
    assert_eq!(work_on(&d).unwrap(), ANSWER);

    // A compiler that fails and one that no longer supports the device are skipped and listed.
    let d = open(&[&broken, &behind, &good]).unwrap();
    let (text, property) = (told(&*d), d.info().properties["compilers_passed_over"].clone());
    for (c, why) in [(&broken, "libnvrtc-builtins"), (&behind, "it does not know devices as old as sm_90")] {
        assert!(text.starts_with(&good.path) && text.contains(&format!("{} 12.4: ", c.path)), "{text}");
        assert!(text.contains(why) && property.contains(why), "{text}\n{property}");
    }
    assert_eq!(behind.get("compiles"), 0);

    // A compiler whose output the driver does not load is skipped, too. Each of these codes means that the
    // driver cannot load it.
    for code in [200, 209, 218, 221, 222, 223] {
        let other = one(&format!("libnvrtc.so.12.{code}"), &[]);
        s.set("refuse module", code);
        // An empty cache, so that the kernel must be compiled.
        let dir = tempfile::tempdir().unwrap();
        let compilers = [other.path.as_str(), &good.path];
        // SAFETY: the paths are those of stand-ins, whose functions have the vendor's types.
        let driver = unsafe { SimtDriver::over(&cuda::CUDA, &s.path, "").with_compilers(&compilers) };
        let d =
            driver.open(0, &Options { cache_dir: Some(dir.path().into()), ..Options::default() }).unwrap();
        let text = told(&*d);
        assert!(text.starts_with(&good.path) && text.contains(&format!("error {code} ")), "{text}");
    }
    // Other codes are errors of the device.
    let other = one("libnvrtc.so.12.719", &[]);
    s.set("refuse module", 719);
    let e = open(&[&other, &good]).unwrap_err();
    assert!(matches!(e, Error::Driver { .. }) && e.to_string().contains("719"), "{e}");

    // For a device newer than the compiler, the compiler makes PTX, which the driver compiles. In the disk
    // cache, PTX and binary of a kernel have different keys.
    let own = d.compile(&affine(DType::F32)).unwrap();
    let ptx = s.get("ptx");
    let d = open(&[&before]).unwrap();
    assert!(told(&*d).contains("PTX (compute_86), compiled by the driver"), "{}", told(&*d));
    assert_eq!(work_on(&d).unwrap(), ANSWER);
    assert!(s.get("ptx") >= ptx + 2, "the trivial kernel and the other one");
    assert_eq!(own.source(), d.compile(&affine(DType::F32)).unwrap().source());
    assert_eq!((d.counters().compiles, d.counters().compile_cache_hits), (1, 0));
    // The driver prefers a compiler that supports the device.
    assert!(told(&*open(&[&before, &good]).unwrap()).starts_with(&good.path));
    // PTX is loaded from the disk cache as PTX; a truncated entry is rebuilt.
    let (warm, ptx) = (open(&[&before]).unwrap(), s.get("ptx"));
    assert_eq!(work_on(&warm).unwrap(), ANSWER);
    assert_eq!((warm.counters().compile_cache_hits, s.get("ptx")), (1, ptx + 1));

    // If no compiler works, the error lists for each one its path and the reason.
    let e = open(&[&unnamed, &newer, &broken]).unwrap_err();
    let Error::Unavailable { tried, reason, fix, .. } = &e else { panic!("{e}") };
    assert!(reason.contains("no run-time compiler makes kernels that the driver of cuda:0 loads"), "{e}");
    assert!(tried.len() == 3 && tried[1].contains("13.4: ") && tried[1].contains("error 200"), "{tried:?}");
    assert!(fix.contains("nvidia-cuda-nvrtc"), "{fix}");

    // A cuBLASLt for a newer CUDA than the driver's does not hide one that works.
    // SAFETY: the paths are those of stand-ins, whose functions have the vendor's types.
    let driver = unsafe { SimtDriver::over(&cuda::CUDA, &s.path, &s.path).with_kernels(&newer.path) };
    let found = driver.open(0, &Options::default()).unwrap().kernel_libraries();
    assert!(found[0].1.contains(&newer.path) && found[0].1.contains("not initialised"), "{found:?}");
}

/// Tests the real NVRTC, if a Python package has it. NVRTC must have the functions that the driver uses, and
/// its PTX must not fuse multiplications and additions.
#[test]
fn nvrtc_makes_ptx_for_devices_that_it_does_not_know() {
    let named = std::env::var_os("HALCYON_PYTHON").is_some();
    // SAFETY: the candidates are NVIDIA's names, or the library that the user named instead.
    let compiler = match unsafe { cuda::CUDA.compiler(&cuda::CUDA.compiler_candidates()) } {
        Ok(c) => c,
        Err(e) => {
            let must = named && halcyon_test_host::required();
            assert!(!must, "{e}");
            let test = "nvrtc_makes_ptx_for_devices_that_it_does_not_know";
            return halcyon_test_host::skip(test, &e.to_string());
        }
    };
    assert!(compiler.generations.contains(&90) && compiler.version.0 >= 11, "{compiler:?}");
    let newest = compiler.generations.iter().max().unwrap();
    let text = "extern \"C\" __global__ void __launch_bounds__(1)\nk(float* x, float y) {\n  x[0] = x[0] * y + y;\n}\n";
    let make = |architecture: &str, output| {
        let flags = (cuda::CUDA.flags)(Some(architecture)).unwrap();
        compiler.compile("cuda:0", "k", text, &flags, output)
    };
    let ptx = String::from_utf8(make(&format!("compute_{newest}"), Output::Ptx).unwrap()).unwrap();
    assert!(ptx.ends_with('\0') && ptx.contains(&format!(".target sm_{newest}")), "{ptx}");
    // Explicitly rounded operations, which the driver's compiler does not fuse.
    assert!(ptx.contains("mul.rn.f32") && ptx.contains("add.rn.f32") && !ptx.contains("fma"), "{ptx}");
    assert!(make("sm_90", Output::Binary).unwrap().starts_with(b"\x7fELF"));
    // A virtual architecture yields no device code.
    assert!(make("compute_90", Output::Binary).is_err() && make("sm_999", Output::Binary).is_err());
}

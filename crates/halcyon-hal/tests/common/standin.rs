//! Drivers of CUDA and ROCm over libraries that stand in for the vendors' (`tests/simt`): built here, where there is a C++ compiler.
//! Another crate's tests may include this file by path.
#![allow(dead_code)]

use halcyon_hal::simt::adapter::Adapter;
use halcyon_hal::simt::{Family, SimtDriver};
use halcyon_hal::{cuda, rocm};
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};

/// A stand-in that is loaded, and a driver over it.
#[derive(Debug)]
pub struct StandIn {
    pub driver: Arc<SimtDriver>,
    pub path: String,
    get: unsafe extern "C" fn(*const c_char) -> i64,
    set: unsafe extern "C" fn(*const c_char, i64) -> c_int,
}

impl StandIn {
    /// One of what the library counts.
    pub fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: a text that ends in zero.
        unsafe { (self.get)(name.as_ptr()) }
    }

    /// Sets one of what the library can be told.
    pub fn set(&self, name: &str, v: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { (self.set)(name.as_ptr(), v) }, 0);
    }
}

/// Both, or none where there is no C++ compiler, which HALCYON_REQUIRE_LANES=1 does not allow.
pub fn all() -> Vec<Arc<StandIn>> {
    static BUILT: LazyLock<Vec<Arc<StandIn>>> = LazyLock::new(|| {
        let compiler = Command::new("c++").arg("--version").output();
        if !cfg!(target_os = "linux") || compiler.is_err() {
            assert!(std::env::var("HALCYON_REQUIRE_LANES").as_deref() != Ok("1"), "c++ is not there");
            eprintln!("skipped on the stand-ins of cuda and rocm: there is no c++");
            return vec![];
        }
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin");
        vec![build(&cuda::CUDA, "cuda", &[], &dir), build(amd("gfx90a"), "hip", &["-DSTANDIN_HIP"], &dir)]
    });
    BUILT.clone()
}

/// One of AMD's GPUs whose waves are 32 work-items, as [`all`].
pub fn waves_of_32() -> Option<Arc<StandIn>> {
    static BUILT: LazyLock<Option<Arc<StandIn>>> = LazyLock::new(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin");
        let flags = ["-DSTANDIN_HIP", "-DSTANDIN_WARP=32", "-DSTANDIN_ARCH=\"gfx1100\""];
        (!all().is_empty()).then(|| build(amd("gfx1100"), "hip32", &flags, &dir))
    });
    BUILT.clone()
}

/// HIP, on an architecture: the kernel's topology tells none of a stand-in's device.
fn amd(architecture: &'static str) -> &'static Family {
    let of = match architecture {
        "gfx1100" => |_: &Adapter| Some("gfx1100".to_string()),
        _ => |_: &Adapter| Some("gfx90a".to_string()),
    };
    Box::leak(Box::new(Family { architecture: of, ..rocm::ROCM }))
}

/// Each process has a library of its own: it has a state.
fn build(family: &'static Family, name: &str, flags: &[&str], dir: &Path) -> Arc<StandIn> {
    let modules = dir.join("modules");
    std::fs::create_dir_all(&modules).unwrap();
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../halcyon-hal/tests/simt");
    let lib = dir.join(format!("{name}-{}.so", std::process::id()));
    let mut c = Command::new("c++");
    c.args(["-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared"]).args(flags);
    c.arg(format!("-DH_KERNEL=\"{}\"", sources.join("kernel.h").display()));
    c.arg(format!("-DH_FOLDER=\"{}\"", modules.display()));
    c.arg("-o").arg(&lib).arg(sources.join("standin.cpp")).arg("-ldl");
    let done = c.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let path = lib.display().to_string();
    // SAFETY: the library was built just now; it has no initialisers but of its own state. It stays.
    let l = std::mem::ManuallyDrop::new(unsafe { libloading::Library::new(&lib) }.unwrap());
    // SAFETY: the types are those of the source.
    let (get, set) = unsafe { (*l.get(b"standin_get").unwrap(), *l.get(b"standin_set").unwrap()) };
    let driver = Arc::new(SimtDriver::over(family, &path, &path));
    halcyon_hal::Driver::probe(&*driver).unwrap();
    Arc::new(StandIn { driver, path, get, set })
}

//! CUDA and ROCm drivers over stand-ins for the vendor libraries (`tests/simt`), built if there is a C++
//! compiler. Tests of other crates may include this file by path.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

#[path = "standin_build.rs"]
mod standin_build;

use halcyon_hal::simt::adapter::Adapter;
use halcyon_hal::simt::{Family, SimtDriver};
use halcyon_hal::{cuda, rocm};
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};

/// A loaded stand-in and a driver that uses it.
#[derive(Debug)]
pub struct StandIn {
    pub driver: Arc<SimtDriver>,
    pub path: String,
    get: unsafe extern "C" fn(*const c_char) -> i64,
    set: unsafe extern "C" fn(*const c_char, i64) -> c_int,
}

impl StandIn {
    /// Reads one of the library's counters.
    pub fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: `name` is NUL-terminated, and `open` resolved the function with its type in the source.
        unsafe { (self.get)(name.as_ptr()) }
    }

    /// Sets one of the library's controls.
    pub fn set(&self, name: &str, v: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: `name` is NUL-terminated, and `open` resolved the function with its type in the source.
        assert_eq!(unsafe { (self.set)(name.as_ptr(), v) }, 0);
    }
}

/// A stand-in's backend, file name and flags.
type Row = (fn() -> &'static Family, &'static str, &'static [&'static str]);

static ROWS: [Row; 2] =
    [(|| &cuda::CUDA, "cuda", &[]), (|| amd(|_| Some("gfx90a".into())), "hip", &["-DSTANDIN_HIP"])];
/// An AMD GPU with waves of 32 work-items.
const WAVES_OF_32: Row = (
    || amd(|_| Some("gfx1100".into())),
    "hip32",
    &["-DSTANDIN_HIP", "-DSTANDIN_WARP=32", "-DSTANDIN_ARCH=\"gfx1100\""],
);
/// A libcuda without support for graphs.
const OLDER: Row = (|| &cuda::CUDA, "cuda-older", &["-DSTANDIN_OLDER"]);

/// The build directory; `None` without a C++ compiler, which is an error if HALCYON_REQUIRE_ALL=1.
fn folder() -> Option<PathBuf> {
    let compiler = Command::new("c++").arg("--version").output();
    if !cfg!(target_os = "linux") || compiler.is_err() {
        assert!(std::env::var("HALCYON_REQUIRE_ALL").as_deref() != Ok("1"), "c++ is not there");
        eprintln!("skipped on the stand-ins of cuda and rocm: there is no c++");
        return None;
    }
    Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin"))
}

/// Both stand-ins, or none if they cannot be built.
pub fn all() -> Vec<Arc<StandIn>> {
    static BUILT: LazyLock<Vec<Arc<StandIn>>> = LazyLock::new(|| {
        let Some(dir) = folder() else { return vec![] };
        ROWS.iter().map(|row| Arc::new(load(row, &dir))).collect()
    });
    BUILT.clone()
}

/// Backends with the paths of their stand-ins, for loading in another process; none if they cannot be built.
pub fn paths() -> Vec<(&'static Family, String)> {
    static BUILT: LazyLock<Vec<(&'static Family, String)>> = LazyLock::new(|| {
        let Some(dir) = folder() else { return vec![] };
        ROWS.iter().map(|row| (row.0(), build(row, &dir).display().to_string())).collect()
    });
    BUILT.clone()
}

/// The stand-in of [`WAVES_OF_32`]; `None` if it cannot be built.
pub fn waves_of_32() -> Option<Arc<StandIn>> {
    static BUILT: LazyLock<Option<Arc<StandIn>>> =
        LazyLock::new(|| folder().map(|dir| Arc::new(load(&WAVES_OF_32, &dir))));
    BUILT.clone()
}

/// The stand-in of [`OLDER`]. Only call this if [`all`] is not empty.
pub fn older() -> StandIn {
    load(&OLDER, &Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin"))
}

/// HIP with a fixed architecture: the kernel's topology files do not list a stand-in's device.
fn amd(architecture: fn(&Adapter) -> Option<String>) -> &'static Family {
    Box::leak(Box::new(Family { architecture, ..rocm::ROCM }))
}

/// Each process builds its own library, because the library has state.
fn build((_, name, flags): &Row, dir: &Path) -> PathBuf {
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../halcyon-hal/tests/simt");
    let lib = dir.join(format!("{name}-{}.so", std::process::id()));
    standin_build::compile(&sources, &dir.join("modules"), &lib, flags).unwrap_or_else(|why| panic!("{why}"));
    lib
}

fn load(row: &Row, dir: &Path) -> StandIn {
    let s = open(row.0(), &build(row, dir));
    halcyon_hal::Driver::probe(&*s.driver).unwrap();
    s
}

/// A copy of a stand-in with separate state. `name` is its file name in a directory of this process.
pub fn copy(s: &StandIn, name: &str) -> StandIn {
    let from = Path::new(&s.path);
    let dir = from.with_extension("copies");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(from, dir.join(name)).unwrap();
    let family = if s.path.contains("/cuda-") { &cuda::CUDA } else { &rocm::ROCM };
    open(family, &dir.join(name))
}

fn open(family: &'static Family, lib: &Path) -> StandIn {
    let path = lib.display().to_string();
    // SAFETY: `build` compiled this library; its initialisers only set up its own state. It is never
    // unloaded.
    let l = std::mem::ManuallyDrop::new(unsafe { libloading::Library::new(lib) }.unwrap());
    // SAFETY: the types are those of the functions in standin.cpp, and the library is never unloaded.
    let (get, set) = unsafe { (*l.get(b"standin_get").unwrap(), *l.get(b"standin_set").unwrap()) };
    // The same library replaces those of the vendor's kernels.
    // SAFETY: `build` compiled this library, whose functions have the vendor's types.
    let driver = unsafe { SimtDriver::over(family, &path, &path).with_kernels(&path) };
    let driver = Arc::new(driver);
    StandIn { driver, path, get, set }
}

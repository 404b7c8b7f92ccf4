//! Stand-ins for the vendors' libraries of CUDA and ROCm (`crates/halcyon-hal/tests/simt`). One library takes
//! the place of all libraries of a vendor; its device is this machine's CPU. The stand-ins are built only on
//! Linux, and only if there is a C++ compiler.

use crate::{required, root, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
#[cfg(feature = "load")]
use std::{
    ffi::{CString, c_char, c_int},
    sync::Arc,
};

/// A stand-in: the name of its file, and the flags that it is compiled with.
#[derive(Debug)]
pub struct Kind {
    name: &'static str,
    flags: &'static [&'static str],
    /// The architecture of the stand-in's device, if that is an AMD device.
    pub amd: Option<&'static str>,
}

pub const CUDA: Kind = Kind { name: "cuda", flags: &[], amd: None };
/// A libcuda without CUDA graphs.
pub const OLDER_CUDA: Kind = Kind { name: "cuda-older", flags: &["-DSTANDIN_OLDER"], amd: None };
pub const HIP: Kind = Kind { name: "hip", flags: &["-DSTANDIN_HIP"], amd: Some("gfx90a") };
/// An AMD GPU with waves of 32 work-items.
pub const HIP_WAVES_OF_32: Kind = Kind {
    name: "hip32",
    flags: &["-DSTANDIN_HIP", "-DSTANDIN_WARP=32", "-DSTANDIN_ARCH=\"gfx1100\""],
    amd: Some("gfx1100"),
};

/// The folder of the stand-ins, and of the kernels that they compile.
pub fn dir() -> PathBuf {
    target_dir().join("tmp/standin")
}

/// Like [`dir`], but `None` if there is no C++ compiler or the system is not Linux. With
/// `HALCYON_REQUIRE_ALL=1` this function panics instead.
pub fn folder() -> Option<PathBuf> {
    let compiler = Command::new("c++").arg("--version").output();
    if !cfg!(target_os = "linux") || compiler.is_err() {
        assert!(!required(), "the stand-ins need Linux and c++, and HALCYON_REQUIRE_ALL=1 requires them");
        eprintln!("skipped on the stand-ins of cuda and rocm: they need Linux and c++");
        return None;
    }
    Some(dir())
}

/// Builds a stand-in in a folder. The file's name has the number of the process, so that processes do not
/// overwrite each other's files.
fn build(kind: &Kind, dir: &Path) -> PathBuf {
    let lib = dir.join(format!("{}-{}.so", kind.name, std::process::id()));
    compile(&lib, kind.flags).unwrap_or_else(|why| panic!("{why}"));
    lib
}

/// Backends with the paths of their stand-ins, for loading in another process. Empty if [`folder`] returns
/// `None`.
pub fn paths() -> Vec<(&'static str, String)> {
    static BUILT: LazyLock<Vec<(&str, String)>> = LazyLock::new(|| {
        let Some(dir) = folder() else { return vec![] };
        [("cuda", &CUDA), ("rocm", &HIP)]
            .map(|(id, kind)| (id, build(kind, &dir).display().to_string()))
            .into()
    });
    BUILT.clone()
}

/// Compiles a stand-in to `lib`. At run time the stand-in compiles kernels, and keeps them in a folder below
/// [`dir`].
pub fn compile(lib: &Path, flags: &[&str]) -> Result<(), String> {
    let sources = root().join("crates/halcyon-hal/tests/simt");
    let modules = dir().join("modules");
    std::fs::create_dir_all(&modules).map_err(|e| format!("{}: {e}", modules.display()))?;
    let mut c = Command::new("c++");
    c.args(["-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared"]).args(flags);
    c.arg(format!("-DH_KERNEL=\"{}\"", sources.join("kernel.h").display()));
    c.arg(format!("-DH_FOLDER=\"{}\"", modules.display()));
    c.arg("-o").arg(lib).arg(sources.join("standin.cpp")).arg("-ldl");
    // AMD's libraries keep their kernels in files in a folder next to the library, one file per architecture.
    let folder = lib.parent().unwrap_or(Path::new("."));
    for (library, architecture) in
        ["rocblas", "hipblaslt"].into_iter().flat_map(|l| [(l, "gfx90a"), (l, "gfx1100")])
    {
        let kernels = folder.join(library).join("library");
        let file = kernels.join(format!("TensileLibrary_lazy_{architecture}.dat"));
        let made = std::fs::create_dir_all(&kernels).and_then(|()| std::fs::write(&file, ""));
        made.map_err(|e| format!("{}: {e}", file.display()))?;
    }
    let done = c.output().map_err(|e| format!("c++: {e}"))?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!("c++: {}\n{}", done.status, String::from_utf8_lossy(&done.stderr))),
    }
}

/// A loaded stand-in, and a driver `D` that uses it.
#[cfg(feature = "load")]
#[derive(Debug)]
pub struct StandIn<D> {
    pub driver: Arc<D>,
    pub path: String,
    kind: &'static Kind,
    get: unsafe extern "C" fn(*const c_char) -> i64,
    set: unsafe extern "C" fn(*const c_char, i64) -> c_int,
}

#[cfg(feature = "load")]
impl<D> StandIn<D> {
    /// Builds a stand-in in a folder and loads it. `driver` makes the driver from the library's path.
    pub fn new(kind: &'static Kind, dir: &Path, driver: impl FnOnce(&Kind, &str) -> D) -> StandIn<D> {
        StandIn::open(kind, &build(kind, dir), driver)
    }

    /// A copy with separate state. `name` is the name of its file, in a folder of this process's copies.
    pub fn copy(&self, name: &str, driver: impl FnOnce(&Kind, &str) -> D) -> StandIn<D> {
        let from = Path::new(&self.path);
        let dir = from.with_extension("copies");
        std::fs::create_dir_all(&dir).expect("a folder");
        std::fs::copy(from, dir.join(name)).expect("the library is copied");
        StandIn::open(self.kind, &dir.join(name), driver)
    }

    fn open(kind: &'static Kind, lib: &Path, driver: impl FnOnce(&Kind, &str) -> D) -> StandIn<D> {
        let path = lib.display().to_string();
        // SAFETY: `build` compiled this library; its initialisers only set up its own state. It is never
        // unloaded.
        let l = std::mem::ManuallyDrop::new(unsafe { libloading::Library::new(lib) }.expect("it loads"));
        // SAFETY: the types are those of the functions in standin.cpp, and the library is never unloaded.
        let (get, set) = unsafe {
            (*l.get(b"standin_get").expect("a function"), *l.get(b"standin_set").expect("a function"))
        };
        StandIn { driver: Arc::new(driver(kind, &path)), path, kind, get, set }
    }

    /// Reads one of the library's counters.
    pub fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).expect("a name");
        // SAFETY: `name` is NUL-terminated, and `open` resolved the function with its type in the source.
        unsafe { (self.get)(name.as_ptr()) }
    }

    /// Sets one of the library's controls.
    pub fn set(&self, name: &str, v: i64) {
        let name = CString::new(name).expect("a name");
        // SAFETY: `name` is NUL-terminated, and `open` resolved the function with its type in the source.
        assert_eq!(unsafe { (self.set)(name.as_ptr(), v) }, 0);
    }
}

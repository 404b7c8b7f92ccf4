//! Stand-ins for the vendors' libraries of CUDA and ROCm (`crates/halcyon-hal/tests/simt`). One library takes
//! the place of all libraries of a vendor; its device is this machine's CPU. The stand-ins are built only on
//! Linux, and only if there is a C++ compiler.

use crate::{required, root, target_dir};
use std::hash::{DefaultHasher, Hash, Hasher};
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

/// Makes a stand-in in `lib`. At run time the stand-in compiles kernels, and keeps them in a folder below
/// [`dir`].
pub fn compile(lib: &Path, flags: &[&str]) -> Result<(), String> {
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
    // A library at this place may be loaded already, so a new file replaces it.
    let own = own_name(lib);
    std::fs::copy(compiled(flags)?, &own)
        .and_then(|_| std::fs::rename(&own, lib))
        .map_err(|e| format!("{}: {e}", lib.display()))
}

/// A name beside a file that no other thread or process uses.
fn own_name(file: &Path) -> PathBuf {
    file.with_extension(format!("{}.{:?}", std::process::id(), std::thread::current().id()))
}

/// The compiled stand-in, which tests share: compiling it takes seconds, and many test processes need it. Its
/// name follows from the sources and the command line.
fn compiled(flags: &[&str]) -> Result<PathBuf, String> {
    let sources = root().join("crates/halcyon-hal/tests/simt");
    let (modules, libraries) = (dir().join("modules"), dir().join("compiled"));
    for made in [&modules, &libraries] {
        std::fs::create_dir_all(made).map_err(|e| format!("{}: {e}", made.display()))?;
    }
    let mut args: Vec<String> =
        ["-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared"].map(String::from).into();
    args.extend(flags.iter().map(|f| f.to_string()));
    args.push(format!("-DH_KERNEL=\"{}\"", sources.join("kernel.h").display()));
    args.push(format!("-DH_FOLDER=\"{}\"", modules.display()));
    args.push(sources.join("standin.cpp").display().to_string());
    args.push("-ldl".into());
    let lib = libraries.join(format!("{:016x}.so", digest(&sources, &args)?));
    if lib.is_file() {
        return Ok(lib);
    }
    // Another process may compile the same one. Each has a file of its own, and the last to end replaces
    // the others' with the same contents.
    let own = own_name(&lib);
    let done =
        Command::new("c++").args(&args).arg("-o").arg(&own).output().map_err(|e| format!("c++: {e}"))?;
    if !done.status.success() {
        return Err(format!("c++: {}\n{}", done.status, String::from_utf8_lossy(&done.stderr)));
    }
    std::fs::rename(&own, &lib).map_err(|e| format!("{}: {e}", lib.display()))?;
    Ok(lib)
}

/// A digest of the C++ files in a folder and of the command line.
fn digest(sources: &Path, args: &[String]) -> Result<u64, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", sources.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(sources).map_err(failed)?.flatten().map(|entry| entry.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "cpp" || e == "h"));
    files.sort();
    let mut hasher = DefaultHasher::new();
    args.hash(&mut hasher);
    for file in files {
        std::fs::read(&file).map_err(failed)?.hash(&mut hasher);
    }
    Ok(hasher.finish())
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

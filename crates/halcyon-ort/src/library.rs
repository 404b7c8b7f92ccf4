//! Finds and loads the library of ONNX Runtime.

use crate::{NAME, failed};
use halcyon_host::python;
use halcyon_ir::{Error, Result};
use libloading::{Library, Symbol};
use ort::environment::Environment;
use ort::logging::LogLevel;
use ort::sys::{OrtApi, OrtApiBase};
use std::ffi::{CStr, OsStr};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The oldest version that works: 1.N.
pub const OLDEST: u32 = ort::MINOR_VERSION;

/// The variable that names the library. Programs that use `ort` read it too.
const VARIABLE: &str = "ORT_DYLIB_PATH";

/// File names of the library, without a folder.
const NAMES: &[&str] = if cfg!(windows) {
    &["onnxruntime.dll"]
} else if cfg!(target_vendor = "apple") {
    &["libonnxruntime.dylib"]
} else {
    &["libonnxruntime.so.1", "libonnxruntime.so"]
};

/// How a library was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// The caller named it.
    Caller,
    /// The environment variable `ORT_DYLIB_PATH`.
    Variable,
    /// The search of the system's loader, which knows its own folders and `LD_LIBRARY_PATH` or `PATH`.
    System,
    /// The package onnxruntime of a Python.
    Python,
}

impl fmt::Display for FoundBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FoundBy::Caller => "named by the caller",
            FoundBy::Variable => VARIABLE,
            FoundBy::System => "the system's search",
            FoundBy::Python => "a Python package",
        })
    }
}

/// A loaded library of ONNX Runtime. A process has one.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) environment: Environment,
    path: PathBuf,
    version: String,
    found_by: FoundBy,
    /// What the caller named.
    named: Option<PathBuf>,
}

static OPEN: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

/// What the library reported: warnings and errors. A message is kept once.
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());
const MAX_MESSAGES: usize = 100;

impl Runtime {
    /// Loads the library. `named` is its file. Without it, the variable `ORT_DYLIB_PATH` names the file; if
    /// it is not set, the library is looked for by the system's loader, then in the package onnxruntime of
    /// Python environments (`halcyon_host::python`). A library that is named is the only one that is tried.
    /// No library is executed before its version was read, except for the functions that the system's loader
    /// runs when it loads a file.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with every file that was tried and why it was rejected; [`Error::Argument`] if
    /// this process has loaded another library.
    pub fn open(named: Option<&Path>) -> Result<Arc<Runtime>> {
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(r) = &*open {
            return match named {
                Some(n) if r.named.as_deref() != Some(n) => Err(Error::argument(
                    "ONNX Runtime",
                    format!("{} is loaded already, and a process can load one", r.path.display()),
                )),
                _ => Ok(r.clone()),
            };
        }
        let variable = std::env::var_os(VARIABLE).filter(|v| !v.is_empty());
        let found = find(&candidates(named, variable.as_deref(), python::packages))?;
        let r = Arc::new(Runtime::start(found, named)?);
        *open = Some(r.clone());
        Ok(r)
    }

    fn start(found: Found, named: Option<&Path>) -> Result<Runtime> {
        let builder = ort::init_from(&found.path).map_err(|e| {
            let tried = vec![format!("{}: {e}", found.path.display())];
            unavailable(tried, "its library does not load twice".into())
        })?;
        let builder = builder.with_name("halcyon").with_telemetry(false).with_logger(Arc::new(log));
        let environment = builder.build().map_err(|e| failed("its environment", &e))?;
        environment.set_log_level(LogLevel::Warning);
        let Found { path, version, found_by } = found;
        tracing::info!(path = %path.display(), version, "ONNX Runtime is loaded");
        Ok(Runtime { environment, path, version, found_by, named: named.map(Path::to_path_buf) })
    }

    /// The file of the library, as the system reports it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, such as `1.31.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    pub fn found_by(&self) -> FoundBy {
        self.found_by
    }

    /// Names of the execution providers that the library was built with, in its order of preference.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn providers(&self) -> Result<Vec<String>> {
        let api: &OrtApi = ort::api();
        let (mut names, mut count) = (std::ptr::null_mut(), 0);
        // SAFETY: `api` belongs to the library that `start` loaded, which stays loaded. Both pointers are to
        // variables that live during the call.
        let status = unsafe { (api.GetAvailableProviders)(&mut names, &mut count) };
        // SAFETY: the status comes from the call above and is used once.
        unsafe { ort::Error::result_from_status(status) }.map_err(|e| failed("GetAvailableProviders", &e))?;
        let mut all = vec![];
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the call returned `count` strings that end with a zero and belong to this function
            // until they are released below.
            all.push(unsafe { CStr::from_ptr(*names.add(i)) }.to_string_lossy().into_owned());
        }
        // SAFETY: `names` and `count` are those of the call above, and nothing uses the strings after this.
        let status = unsafe { (api.ReleaseAvailableProviders)(names, count) };
        // SAFETY: the status comes from the call above and is used once.
        unsafe { ort::Error::result_from_status(status) }
            .map_err(|e| failed("ReleaseAvailableProviders", &e))?;
        Ok(all)
    }

    /// The warnings and errors that the library has reported so far, each once. Telemetry is off.
    pub fn messages(&self) -> Vec<String> {
        MESSAGES.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

fn log(level: LogLevel, category: &str, _id: &str, location: &str, message: &str) {
    tracing::debug!(target: "onnxruntime", ?level, category, location, "{message}");
    if !matches!(level, LogLevel::Warning | LogLevel::Error | LogLevel::Fatal) {
        return;
    }
    let mut all = MESSAGES.lock().unwrap_or_else(|e| e.into_inner());
    let text = message.trim().to_string();
    if all.len() < MAX_MESSAGES && !all.contains(&text) {
        all.push(text);
    }
}

/// A library that loads and is new enough.
#[derive(Debug)]
struct Found {
    path: PathBuf,
    version: String,
    found_by: FoundBy,
}

/// The files to try, in this order.
fn candidates(
    named: Option<&Path>,
    variable: Option<&OsStr>,
    packages: impl Fn() -> Vec<PathBuf>,
) -> Vec<(FoundBy, PathBuf)> {
    if let Some(n) = named {
        return vec![(FoundBy::Caller, n.into())];
    }
    if let Some(v) = variable {
        return vec![(FoundBy::Variable, v.into())];
    }
    let mut all: Vec<(FoundBy, PathBuf)> =
        NAMES.iter().map(|n| (FoundBy::System, PathBuf::from(n))).collect();
    for folder in packages() {
        all.extend(in_package(&folder.join("onnxruntime/capi")).map(|p| (FoundBy::Python, p)));
    }
    all
}

/// The library in the folder of the package onnxruntime, whose name has the version:
/// `libonnxruntime.so.1.31.1`, `libonnxruntime.1.31.1.dylib`, `onnxruntime.dll`.
fn in_package(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = entries.filter(|p| p.file_name().is_some_and(is_library)).collect();
    all.sort();
    all.pop()
}

fn is_library(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let version = |v: &str| v.chars().all(|c| c.is_ascii_digit() || c == '.');
    match () {
        _ if cfg!(windows) => name == "onnxruntime.dll",
        _ if cfg!(target_vendor = "apple") => {
            let rest = name.strip_prefix("libonnxruntime").and_then(|r| r.strip_suffix(".dylib"));
            rest.is_some_and(version)
        }
        _ => name.strip_prefix("libonnxruntime.so").is_some_and(version),
    }
}

/// Loads the first candidate that works.
fn find(candidates: &[(FoundBy, PathBuf)]) -> Result<Found> {
    let mut tried = vec![];
    for (found_by, path) in candidates {
        match load(path) {
            Ok((path, version)) => return Ok(Found { path, version, found_by: *found_by }),
            Err(why) => tried.push(format!("{}: {why}", path.display())),
        }
    }
    let by = |b: FoundBy| candidates.iter().any(|(by, _)| *by == b);
    let reason = match by(FoundBy::Caller) || by(FoundBy::Variable) {
        true => "the library that was named does not load",
        false => "no library of ONNX Runtime was found that works",
    };
    if by(FoundBy::System) && !by(FoundBy::Python) {
        tried.push("the packages of Python environments: none of them is onnxruntime".into());
    }
    Err(unavailable(tried, reason.into()))
}

fn unavailable(tried: Vec<String>, reason: String) -> Error {
    Error::Unavailable {
        backend: NAME.into(),
        tried,
        reason,
        fix: format!(
            "Install ONNX Runtime 1.{OLDEST} or newer (pip install onnxruntime), or name its library with \
             --ort-library or {VARIABLE}"
        ),
    }
}

/// Loads a library and reads its version. Returns the path that the system reports.
fn load(path: &Path) -> std::result::Result<(PathBuf, String), String> {
    // SAFETY: loading a library runs its initialisers. The caller named the file, or it has the name of ONNX
    // Runtime in a folder of the system or of a Python package. Its initialisers have no requirements.
    let library = unsafe { Library::new(path) }.map_err(|e| loader_text(path, &e))?;
    // SAFETY: `OrtGetApiBase` has this type in every version of ONNX Runtime (onnxruntime_c_api.h).
    let get: Symbol<'_, unsafe extern "system" fn() -> *const OrtApiBase> =
        unsafe { library.get(b"OrtGetApiBase") }.map_err(|_| "it is not ONNX Runtime: no OrtGetApiBase")?;
    // SAFETY: the function takes nothing and returns a pointer to a table in the library, or null.
    let base = unsafe { get() };
    if base.is_null() {
        return Err("its OrtGetApiBase returns nothing".into());
    }
    // SAFETY: `base` is not null and points to the library's table. The version is a string with an end that
    // is part of the library, which is loaded until this function returns.
    let version = unsafe { CStr::from_ptr(((*base).GetVersionString)()) }.to_string_lossy().into_owned();
    match minor(&version) {
        Some(n) if n >= OLDEST => {}
        _ => return Err(format!("its version is {version}, and 1.{OLDEST} or newer is needed")),
    }
    let path = file_of(base.cast()).unwrap_or_else(|| path.to_path_buf());
    // The library stays loaded, because `ort` loads the same file and keeps it.
    std::mem::forget(library);
    Ok((path, version))
}

/// `N` of the version `1.N.P`.
fn minor(version: &str) -> Option<u32> {
    version.strip_prefix("1.")?.split('.').next()?.parse().ok()
}

/// The loader's message: the innermost error, without the file's name as prefix.
fn loader_text(path: &Path, e: &dyn std::error::Error) -> String {
    let mut e = e;
    while let Some(s) = e.source() {
        e = s;
    }
    let text = e.to_string();
    text.strip_prefix(&format!("{}: ", path.display())).map(String::from).unwrap_or(text)
}

/// The file of the library that contains an address.
#[cfg(unix)]
fn file_of(address: *const std::ffi::c_void) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `info` is writable; `dladdr` only reads the loader's tables, for any address.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    // SAFETY: the structure was zeroed, and all of its fields may be zero.
    let info = unsafe { info.assume_init() };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: after success, `dli_fname` is a string with an end that the loader keeps while the library is
    // loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    path.canonicalize().ok()
}

#[cfg(not(unix))]
fn file_of(_address: *const std::ffi::c_void) -> Option<PathBuf> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let packages = || vec![PathBuf::from("/none")];
        let named = candidates(Some(Path::new("/a.so")), Some(OsStr::new("/b.so")), packages);
        assert_eq!(named, [(FoundBy::Caller, PathBuf::from("/a.so"))]);
        let variable = candidates(None, Some(OsStr::new("/b.so")), packages);
        assert_eq!(variable, [(FoundBy::Variable, PathBuf::from("/b.so"))]);
        let rest = candidates(None, None, packages);
        assert_eq!(rest.len(), NAMES.len());
        assert!(rest.iter().all(|(by, _)| *by == FoundBy::System));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_library_of_a_python_package_is_found_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let capi = dir.path().join("onnxruntime/capi");
        std::fs::create_dir_all(&capi).unwrap();
        for name in [
            "libonnxruntime_providers_shared.so",
            "onnxruntime_pybind11_state.so",
            "libonnxruntime.so.txt",
            "libonnxruntime.so.1.9.9",
        ] {
            std::fs::write(capi.join(name), "").unwrap();
        }
        let all = candidates(None, None, || vec![dir.path().into()]);
        assert_eq!(all.last(), Some(&(FoundBy::Python, capi.join("libonnxruntime.so.1.9.9"))));
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(minor("1.31.1"), Some(31));
        assert_eq!(minor("1.9"), Some(9));
        assert_eq!(minor("2.0.0"), None);
        assert_eq!(minor("odd"), None);
    }

    #[test]
    fn every_candidate_and_its_reason_are_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text.so");
        std::fs::write(&text, "not a library").unwrap();
        let missing = dir.path().join("missing.so");
        let e = find(&[(FoundBy::Caller, text.clone()), (FoundBy::Caller, missing.clone())]).unwrap_err();
        assert_eq!(e.exit_code(), 4);
        let Error::Unavailable { tried, reason, fix, .. } = e else { panic!("{e}") };
        assert!(reason.contains("named"), "{reason}");
        assert!(fix.contains("--ort-library") && fix.contains(VARIABLE), "{fix}");
        for (path, line) in [text, missing].iter().zip(&tried) {
            let reason = line.strip_prefix(&format!("{}: ", path.display())).unwrap();
            assert!(!reason.is_empty(), "{line}");
        }
    }

    /// The C library is a library, and it is not ONNX Runtime.
    #[cfg(target_os = "linux")]
    #[test]
    fn another_library_is_rejected() {
        let e = find(&[(FoundBy::System, PathBuf::from("libc.so.6"))]).unwrap_err();
        assert!(e.to_string().contains("libc.so.6: it is not ONNX Runtime"), "{e}");
    }
}

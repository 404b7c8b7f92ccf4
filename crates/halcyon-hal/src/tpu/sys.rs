//! The start of a PJRT plugin's function table (OpenXLA, `xla/pjrt/c/pjrt_c_api.h`): enough to query its
//! version.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Mutex;

/// Environment variable that names the only library to try.
pub const VARIABLE: &str = "HALCYON_TPU_LIBRARY";

/// `PJRT_Api_Version`.
#[repr(C)]
struct ApiVersion {
    struct_size: usize,
    extension_start: *mut c_void,
    major: i32,
    minor: i32,
}

/// The first members of `PJRT_Api`.
#[repr(C)]
struct Api {
    struct_size: usize,
    extension_start: *mut c_void,
    version: ApiVersion,
}

/// The PJRT API version that a plugin was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    pub major: i32,
    pub minor: i32,
}

/// Possible locations of a plugin: the one that [`VARIABLE`] names, or else those that the environment
/// variables of libtpu and JAX name, the Python package of the active environment, and the loader's path.
pub fn candidates() -> Vec<String> {
    let var = |n: &str| std::env::var(n).ok().filter(|v| !v.trim().is_empty());
    if let Some(one) = var(VARIABLE) {
        return vec![one];
    }
    let mut names: Vec<String> = var("TPU_LIBRARY_PATH").into_iter().collect();
    // The variable contains pairs `name:path`, separated by commas.
    let pairs = var("PJRT_NAMES_AND_LIBRARY_PATHS").unwrap_or_default();
    names.extend(pairs.split(',').filter_map(|p| p.trim().strip_prefix("tpu:")).map(String::from));
    let python = std::env::var_os("VIRTUAL_ENV").map(|v| PathBuf::from(v).join("lib"));
    for dir in python.and_then(|lib| std::fs::read_dir(lib).ok()).into_iter().flatten().flatten() {
        let plugin = dir.path().join("site-packages/libtpu/libtpu.so");
        if plugin.is_file() {
            names.push(plugin.display().to_string());
        }
    }
    names.push("libtpu.so".into());
    names
}

/// Loads a plugin permanently and queries its version.
///
/// # Errors
/// The loader's message, or what is wrong with the library.
///
/// # Safety
/// It must be safe to load the library `name` and never to unload it. If it has a function `GetPjrtApi`, that
/// function must have the type that PJRT declares.
pub unsafe fn version(name: &str) -> Result<Version, String> {
    static SEEN: Mutex<BTreeMap<String, Version>> = Mutex::new(BTreeMap::new());
    let mut seen = SEEN.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(v) = seen.get(name) {
        return Ok(*v);
    }
    // SAFETY: loading runs the library's initialisers; `version` requires a library that is safe to load.
    let lib = unsafe { libloading::Library::new(name) }.map_err(|e| crate::loader::loader_text(name, &e))?;
    // Its initialisers may have started threads, so it is never unloaded.
    let lib = std::mem::ManuallyDrop::new(lib);
    // SAFETY: the PJRT API declares `GetPjrtApi` with this type, which `version` requires.
    let get = unsafe { lib.get::<unsafe extern "C" fn() -> *const Api>(b"GetPjrtApi\0") };
    let get = get.map_err(|_| "it has no function GetPjrtApi".to_string())?;
    // SAFETY: `GetPjrtApi` takes no arguments and returns null or a table that lives as long as the library.
    let api = unsafe { get() };
    if api.is_null() {
        return Err("GetPjrtApi returned no table".into());
    }
    // SAFETY: `api` is not null, and a PJRT table begins with its size. Later members are read only if the
    // size covers them.
    let size = unsafe { std::ptr::addr_of!((*api).struct_size).read_unaligned() };
    if size < size_of::<Api>() {
        return Err(format!("its table has {size} bytes, expected at least {}", size_of::<Api>()));
    }
    // SAFETY: `size` covers `Api`, checked above.
    let head = unsafe { std::ptr::addr_of!((*api).version).read_unaligned() };
    if head.struct_size < size_of::<ApiVersion>() {
        return Err(format!(
            "its version has {} bytes, expected at least {}",
            head.struct_size,
            size_of::<ApiVersion>()
        ));
    }
    let v = Version { major: head.major, minor: head.minor };
    seen.insert(name.into(), v);
    Ok(v)
}

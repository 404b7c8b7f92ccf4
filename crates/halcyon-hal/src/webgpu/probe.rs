//! The probe for adapters, which [`crate::probe`] runs. If no adapter is found, `wgpu` gives no reason, so
//! this module looks for the reason in the files that register Vulkan drivers.

use super::adapter::Adapter;
use crate::probe::{ProbeDependencies, ProbeSpec, State, entries};
use crate::{BackendType, DeviceInfo, Result};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The probe for the adapters of all APIs that `wgpu` uses.
pub static PROBE: ProbeSpec = ProbeSpec {
    backend: BackendType::WebGpu,
    list: list_devices,
    repeat: true,
    depends,
    fix: "Remove the broken driver (on Linux: its file in /usr/share/vulkan/icd.d or /etc/vulkan/icd.d), or list the files of \
          working drivers in VK_DRIVER_FILES",
    state: Mutex::new(State::new()),
};

/// Whether `wgpu` uses only Vulkan on this system. If so, there is a loader library, and files register
/// drivers.
pub const VULKAN: bool = cfg!(all(unix, not(target_vendor = "apple")));

/// The name by which `wgpu` loads Vulkan's loader if [`VULKAN`] is set.
pub const LIBRARY: &str = if cfg!(target_os = "android") { "libvulkan.so" } else { "libvulkan.so.1" };

fn list_devices() -> Result<Vec<DeviceInfo>> {
    Ok(Adapter::all(BackendType::WebGpu)?.iter().map(|a| a.info()).collect())
}

fn depends(root: &Path) -> ProbeDependencies {
    let kinds = ["vulkan/implicit_layer.d", "vulkan/explicit_layer.d", "vulkan/loader_settings.d"];
    let mut layers: Vec<PathBuf> = kinds.iter().flat_map(|k| folders(root, k)).collect();
    for name in ["VK_LAYER_PATH", "VK_ADD_LAYER_PATH", "VK_IMPLICIT_LAYER_PATH", "VK_ADD_IMPLICIT_LAYER_PATH"]
    {
        layers.extend(std::env::split_paths(&std::env::var_os(name).unwrap_or_default()));
    }
    let mut manifests = drivers(root);
    manifests.extend(layers.iter().flat_map(|d| entries(d)).map(|f| {
        let library = library_of(&f);
        (f, library)
    }));
    ProbeDependencies {
        libraries: if VULKAN { vec![LIBRARY.into()] } else { vec![] },
        later: vec![],
        manifests,
        variables: &[
            "VK_", "XDG_", "HOME", "MESA_", "DRI_", "LP_", "NVIDIA_", "CUDA_", "AMD_", "RADV_", "ENABLE_",
            "DISABLE_", "GALLIUM_",
        ],
    }
}

/// The directories in which Vulkan's loader searches for files, in the order of its search. Each ends with
/// the relative path `kind`.
fn folders(root: &Path, kind: &str) -> Vec<PathBuf> {
    let one = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let home = |rest: &str| one("HOME").map(|h| h.join(rest));
    let list = |name: &str, usual: &[&str]| -> Vec<PathBuf> {
        match std::env::var_os(name).filter(|v| !v.is_empty()) {
            Some(v) => std::env::split_paths(&v).collect(),
            None => usual.iter().map(|p| root.join(p)).collect(),
        }
    };
    let mut all: Vec<PathBuf> = one("XDG_CONFIG_HOME").or_else(|| home(".config")).into_iter().collect();
    all.extend(list("XDG_CONFIG_DIRS", &["etc/xdg"]));
    all.extend([root.join("etc"), root.join("usr/local/etc")]);
    all.extend(one("XDG_DATA_HOME").or_else(|| home(".local/share")));
    all.extend(list("XDG_DATA_DIRS", &["usr/local/share", "usr/share"]));
    all.iter().map(|d| d.join(kind)).collect()
}

/// The files that register drivers, each with the library that it names. An environment variable may list the
/// files; otherwise they are in the directories that Vulkan's loader searches, and another variable may add
/// some.
pub fn drivers(root: &Path) -> Vec<(PathBuf, Option<PathBuf>)> {
    if !VULKAN {
        return vec![];
    }
    let listed = |name: &str| -> Option<Vec<PathBuf>> {
        let v = std::env::var_os(name).filter(|v| !v.is_empty())?;
        let files = |p: PathBuf| if p.is_dir() { entries(&p) } else { vec![p] };
        Some(std::env::split_paths(&v).flat_map(files).collect())
    };
    let files = listed("VK_DRIVER_FILES").or_else(|| listed("VK_ICD_FILENAMES")).unwrap_or_else(|| {
        let mut files = listed("VK_ADD_DRIVER_FILES").unwrap_or_default();
        files.extend(folders(root, "vulkan/icd.d").iter().flat_map(|d| entries(d)));
        files.retain(|f| f.extension().is_some_and(|e| e == "json"));
        files
    });
    files
        .into_iter()
        .map(|file| {
            let library = library_of(&file);
            (file, library)
        })
        .collect()
}

/// The library named by the file of a driver or layer. A relative path with directories is relative to the
/// file's directory. The dynamic loader searches for a bare name.
fn library_of(file: &Path) -> Option<PathBuf> {
    let manifest: serde_json::Value = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    let named = ["ICD", "layer"].iter().find_map(|of| manifest[of]["library_path"].as_str());
    let named = PathBuf::from(named?);
    Some(match (named.components().count() > 1, file.parent()) {
        (true, Some(dir)) => dir.join(named),
        _ => named,
    })
}

/// Checks whether Vulkan's loader library can be used.
///
/// # Errors
/// The dynamic loader's message, or the function that the library lacks.
///
/// # Safety
/// It must be safe to load the library `name` and never to unload it.
pub unsafe fn library(name: &str) -> std::result::Result<(), String> {
    // SAFETY: loading runs the library's initialisers. `library` requires a library that is safe to load, and
    // `ManuallyDrop` keeps it loaded.
    let lib = unsafe { libloading::Library::new(name) }.map_err(|e| crate::loader::loader_text(name, &e))?;
    // Drivers that the loader library loads leave threads and exit handlers behind, so it is never unloaded.
    let lib = std::mem::ManuallyDrop::new(lib);
    // SAFETY: the function is looked up but not called, so its type does not matter.
    let entry = unsafe { lib.get::<unsafe extern "system" fn()>(b"vkGetInstanceProcAddr\0") };
    entry.map(drop).map_err(|_| "it has no function vkGetInstanceProcAddr".into())
}

/// For each registered driver, a text that says why it has no adapter: its file, its library, and the dynamic
/// loader's message or what is missing (a function or a device).
pub fn driver_reasons() -> Vec<String> {
    let one = |(file, library): (PathBuf, Option<PathBuf>)| {
        let file = file.display();
        let Some(library) = library else {
            return format!("{file}: it cannot be read, or names no library");
        };
        let name = library.display().to_string();
        // SAFETY: loading runs the library's initialisers, which is what Vulkan's loader does with the same
        // library.
        let lib = match unsafe { libloading::Library::new(&library) } {
            Ok(l) => std::mem::ManuallyDrop::new(l),
            Err(e) => return format!("{file}: {name}: {}", crate::loader::loader_text(&name, &e)),
        };
        // SAFETY: the function is looked up but not called, so its type does not matter.
        let entry = unsafe { lib.get::<unsafe extern "system" fn()>(b"vk_icdGetInstanceProcAddr\0") };
        match entry {
            Ok(_) => format!("{file}: {name}: it has no device with compute shaders on this machine"),
            Err(_) => format!("{file}: {name}: it has no function vk_icdGetInstanceProcAddr"),
        }
    };
    drivers(Path::new("/")).into_iter().map(one).collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_vulkan_is_named_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("libvulkan.so.1");
        std::fs::write(&text, "no library").unwrap();
        // SAFETY: of the three names, one names no file and one names a text file, so nothing is loaded. The
        // third names the C library, which this process has loaded already.
        let of = |name: &str| unsafe { library(name) }.unwrap_err();
        assert!(of("libnothing-here.so.7").contains("No such file"), "{}", of("libnothing-here.so.7"));
        assert!(of(text.to_str().unwrap()).contains("too short"), "{}", of(text.to_str().unwrap()));
        assert_eq!(of("libc.so.6"), "it has no function vkGetInstanceProcAddr");
    }

    #[test]
    fn manifests_name_libraries_beside_them_by_path_or_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let with = |name: &str, library: &str| {
            let file = dir.path().join(name);
            let text = format!(r#"{{"file_format_version":"1.0.0","ICD":{{"library_path":"{library}"}}}}"#);
            std::fs::write(&file, text).unwrap();
            library_of(&file)
        };
        assert_eq!(with("a.json", "/x/liba.so"), Some("/x/liba.so".into()));
        assert_eq!(with("b.json", "libb.so"), Some("libb.so".into()));
        assert_eq!(with("c.json", "./libc.so"), Some(dir.path().join("./libc.so")));
        std::fs::write(dir.path().join("d.json"), "no JSON").unwrap();
        assert_eq!(library_of(&dir.path().join("d.json")), None);
    }
}

//! The files and places that a list of devices depends on, and the files that a probe loaded.
//!
//! A successful probe is valid only for the files that it loaded. The record of a probe is therefore valid
//! only while each of these files is unchanged ([`Seen`]) and while nothing changed in the places where the
//! loader searches ([`Key`]): a new file there could be loaded instead.

use super::{ProbeDependencies, entries};
use crate::cache;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum number of files examined in the loader's directories. If there are more, successful probes are not
/// stored.
const MAX_FILES: usize = 20_000;

/// Subdirectories of library directories in which glibc searches for processor-specific libraries.
const BY_PROCESSOR: [&str; 11] = [
    "glibc-hwcaps",
    "tls",
    "haswell",
    "xeon_phi",
    "avx512_1",
    "x86_64",
    "i686",
    "i586",
    "sse2",
    "aarch64",
    "atomics",
];

/// Default directories of the loader, below the root, including Debian's directories for x86-64 and AArch64.
const DEFAULT_DIRS: [&str; 9] = [
    "lib",
    "usr/lib",
    "lib64",
    "usr/lib64",
    "usr/local/lib",
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
];

/// The recorded state of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seen {
    path: PathBuf,
    state: String,
}

impl Seen {
    pub fn of(path: PathBuf) -> Seen {
        Seen { state: state(&path), path }
    }

    /// Whether the state is unchanged.
    pub fn holds(&self) -> bool {
        !self.state.is_empty() && state(&self.path) == self.state
    }
}

/// Identifies the version of a file: device and inode number, size, modification time, and change time (which
/// cannot be set by programs). A directory's state changes when an entry is created, renamed or removed.
/// Empty if the path does not exist.
#[cfg(unix)]
fn state(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let Ok(m) = std::fs::metadata(path) else { return String::new() };
    let times = [m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()].map(|t| t.to_string()).join(".");
    format!("{} {} {} {times}", m.dev(), m.ino(), m.len())
}

#[cfg(not(unix))]
fn state(path: &Path) -> String {
    let Ok(m) = std::fs::metadata(path) else { return String::new() };
    format!("{} {:?}", m.len(), m.modified().ok())
}

/// A digest of everything that a list of devices depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub digest: u128,
    /// Whether the digest covers everything relevant. If not, successful probes are not stored.
    pub whole: bool,
}

/// The key of a backend on the system below a root directory (`/` outside of tests). It covers everything
/// that can change the list of devices: a reboot, a driver's files, its kernel module, device nodes, and
/// variables that filter devices.
pub fn key(backend: &str, depends: &ProbeDependencies, root: &Path) -> Key {
    let at = |p: &str| root.join(p);
    let mut parts: Vec<String> = vec!["look 2".into(), env!("CARGO_PKG_VERSION").into(), backend.into()];
    let boot = std::fs::read_to_string(at("proc/sys/kernel/random/boot_id"));
    let mut whole = cfg!(target_os = "linux") && boot.is_ok();
    parts.push(boot.unwrap_or_default());
    let mut names: BTreeSet<String> = BTreeSet::new();
    let drivers = depends
        .manifests
        .iter()
        .filter_map(|(_, driver)| Some(driver.as_ref()?.to_string_lossy().into_owned()));
    for library in depends.libraries.iter().chain(&depends.later).cloned().chain(drivers) {
        parts.push(format!(
            "{library} {}",
            if library.contains('/') { state(Path::new(&library)) } else { String::new() }
        ));
        if !library.contains(['/', '\\']) {
            names.insert(library);
        }
    }
    for (file, _) in &depends.manifests {
        parts.extend([file.display().to_string(), std::fs::read_to_string(file).unwrap_or_default()]);
    }
    whole &= variables(depends, &mut parts);
    let mut places = Places { names, parts: &mut parts, left: MAX_FILES };
    whole &= places.all(root);
    for module in ["nvidia", "amdgpu", "i915", "xe"] {
        let version = at("sys/module").join(module).join("version");
        parts.push(std::fs::read_to_string(version).unwrap_or_default());
    }
    parts.extend(device_nodes(root));
    let bytes: Vec<&[u8]> = parts.iter().map(|p| p.as_bytes()).collect();
    Key { digest: cache::digest(&bytes), whole }
}

/// The device nodes that drivers use.
pub fn device_nodes(root: &Path) -> Vec<String> {
    let nodes = entries(&root.join("dev")).into_iter().filter(|p| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        ["nvidia", "nvhost", "nvmap", "accel", "kfd", "dxg"].iter().any(|n| name.starts_with(n))
    });
    entries(&root.join("dev/dri")).into_iter().chain(nodes).map(|p| p.display().to_string()).collect()
}

/// Collects the variables that affect the libraries, and the state of the files and directories they name.
/// Returns whether the collection is complete.
fn variables(depends: &ProbeDependencies, parts: &mut Vec<String>) -> bool {
    let steers = |name: &str| depends.variables.iter().chain(&["LD_", "DYLD_"]).any(|f| name.starts_with(f));
    let mut all: Vec<(String, String)> = std::env::vars_os()
        .map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
        .filter(|(k, _)| steers(k) || (cfg!(windows) && k.eq_ignore_ascii_case("PATH")))
        .collect();
    all.sort();
    let mut whole = true;
    for (name, value) in all {
        // `HOME` and `XDG_*` name directories that many programs change, so their state is left out.
        if name != "HOME" && !name.starts_with("XDG_") {
            let named = value.split([':', ';', ',', ' ']).filter(|p| p.contains('/'));
            parts.extend(named.map(|p| state(Path::new(p))));
        }
        // The loader expands `$` in `LD_*` variables depending on the processor and the library, so the key
        // would be incomplete.
        whole &= !(name.starts_with("LD_") && value.contains('$'));
        parts.push(format!("{name}={value}"));
    }
    whole
}

/// Collects the state of the places where a loader searches for libraries.
struct Places<'a> {
    /// File names without a directory, which the loader searches for.
    names: BTreeSet<String>,
    parts: &'a mut Vec<String>,
    left: usize,
}

impl Places<'_> {
    /// Collects the state of all places. Returns whether everything was examined.
    fn all(&mut self, root: &Path) -> bool {
        // As in glibc and musl: an empty entry is the working directory, an empty variable is ignored.
        let listed = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default().to_string_lossy().into_owned();
        let mut whole = true;
        for entry in listed.split([':', ';']).filter(|_| !listed.is_empty()) {
            let mut folder = PathBuf::from(entry);
            if folder.is_relative() {
                match std::env::current_dir() {
                    Ok(here) => folder = here.join(folder),
                    Err(_) => whole = false,
                }
            }
            // The user named this directory, so each library in it may be one that another library depends
            // on.
            self.folder(&folder, true, 0);
        }
        let cache = root.join("etc/ld.so.cache");
        self.note(&cache);
        // The cache contains paths as NUL-terminated strings.
        for text in std::fs::read(&cache).unwrap_or_default().split(|b| *b == 0) {
            let Ok(path) = std::str::from_utf8(text) else { continue };
            let name = path.rsplit('/').next().unwrap_or_default();
            if path.starts_with('/') && self.names.contains(name) {
                self.note(Path::new(path));
            }
        }
        for folder in DEFAULT_DIRS {
            self.folder(&root.join(folder), false, 0);
        }
        whole && self.left > 0
    }

    fn note(&mut self, path: &Path) {
        self.left = self.left.saturating_sub(1);
        self.parts.push(format!("{} {}", path.display(), state(path)));
    }

    /// Adds a directory and its libraries: all of them if `every` is set, otherwise only those in `names`.
    fn folder(&mut self, folder: &Path, every: bool, depth: usize) {
        if self.left == 0 {
            return;
        }
        self.note(folder);
        if every {
            for file in entries(folder) {
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if name.contains(".so") || self.names.contains(&name) {
                    self.note(&file);
                }
            }
        } else {
            for file in self.names.iter().map(|n| folder.join(n)).collect::<Vec<_>>() {
                let there = state(&file);
                if !there.is_empty() {
                    self.parts.push(format!("{} {there}", file.display()));
                }
            }
        }
        for name in BY_PROCESSOR {
            let below = folder.join(name);
            if depth < 3 && below.is_dir() {
                self.folder(&below, every, depth + 1);
            }
        }
        // The subdirectories of `glibc-hwcaps` are named after versions of the architecture, such as
        // x86-64-v3.
        if folder.ends_with("glibc-hwcaps") {
            for below in entries(folder).into_iter().filter(|p| p.is_dir()) {
                self.folder(&below, every, depth + 1);
            }
        }
    }
}

/// The shared libraries mapped into this process; `None` if the system does not report them or a mapped
/// library has been deleted.
pub fn mapped() -> Option<BTreeSet<PathBuf>> {
    let text = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut all = BTreeSet::new();
    for line in text.lines() {
        // Fields: address, permissions, offset, device, inode, path.
        let Some(path) = line.find('/').map(|at| &line[at..]) else { continue };
        let permissions = line.split_whitespace().nth(1).unwrap_or_default();
        let generated = ["/memfd:", "/dev/", "/SYSV"].iter().any(|p| path.starts_with(p));
        if !permissions.contains('x') || generated {
            continue;
        }
        match path.strip_suffix(" (deleted)") {
            Some(gone) if gone.contains(".so") => return None,
            Some(_) => {}
            None => {
                all.insert(PathBuf::from(path));
            }
        }
    }
    Some(all)
}

/// The state of the libraries mapped since `before`, and of their directories; `None` if the system does not
/// report them.
pub fn loaded_since(before: &Option<BTreeSet<PathBuf>>) -> Option<Vec<Seen>> {
    let (before, now) = (before.as_ref()?, mapped()?);
    let files: Vec<PathBuf> = now.difference(before).cloned().collect();
    let folders: BTreeSet<PathBuf> = files.iter().filter_map(|f| Some(f.parent()?.to_path_buf())).collect();
    Some(files.into_iter().chain(folders).map(Seen::of).collect())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_until_anything_about_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lib.so");
        assert!(!Seen::of(file.clone()).holds(), "a record of a missing file does not hold");
        std::fs::write(&file, "one").unwrap();
        let before = Seen::of(file.clone());
        assert!(before.holds());
        let time = std::fs::metadata(&file).unwrap().modified().unwrap();
        // Another file of the same size and modification time.
        let other = dir.path().join("other");
        std::fs::write(&other, "two").unwrap();
        std::fs::File::options().append(true).open(&other).unwrap().set_modified(time).unwrap();
        std::fs::rename(&other, &file).unwrap();
        assert!(!before.holds());
    }

    #[test]
    fn loaded_libraries_are_reported() {
        let before = mapped();
        assert!(
            before.as_ref().is_some_and(|m| m.iter().any(|p| p.to_string_lossy().contains("libc"))),
            "{before:?}"
        );
        let all = loaded_since(&Some(BTreeSet::new())).unwrap();
        assert!(all.len() > 2 && all.iter().all(Seen::holds), "{all:?}");
    }
}

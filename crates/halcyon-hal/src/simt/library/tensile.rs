//! Checks whether AMD's libraries can be used for a device.
//!
//! The kernels of these libraries are in files beside them, for each architecture
//! (`lib/rocblas/library/TensileLibrary_lazy_gfx90a.dat`). Without files for the device, rocBLAS terminates
//! the process at its first product, and hipBLASLt continues without kernels. The files are therefore checked
//! first. A library that loads a second HIP runtime would misinterpret the streams of the first, so it is
//! rejected too.

use crate::simt::adapter::Adapter;
use crate::simt::sys::{Context, Side};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum depth of the search below each directory that may have the kernels.
const MAX_SEARCH_DEPTH: usize = 3;

/// The location of a library's kernels.
pub(super) struct Kernels {
    /// The library's name in messages.
    pub title: &'static str,
    /// The name of the directory beside the library, such as `rocblas`.
    pub folder: &'static str,
    /// The environment variable by which the library lets users choose the directory.
    pub variable: &'static str,
}

impl Kernels {
    /// Fails unless an AMD library is known to have kernels for the device and to load no second HIP runtime.
    /// CUDA devices always pass. `function` is the address of one of the library's functions.
    pub(super) fn check(&self, context: &Context, function: usize) -> Result<()> {
        if context.api.family.side == Side::Cuda {
            return Ok(());
        }
        let no = |why: String| {
            let next = "Install the library of the driver's ROCm with kernels for this device, or leave the library out: products then use generated kernels";
            Err(Error::unsupported(format!("{} on {}: {why}", self.title, context.id), next))
        };
        let adapter = Adapter { api: context.api, device: context.device, index: 0 };
        let Some(architecture) = adapter.architecture() else {
            return no(
                "the device's architecture is not known, so it is unknown whether there are kernels for it"
                    .into(),
            );
        };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let runtimes = named(&maps, "libamdhip64.so");
        if runtimes.len() > 1 {
            let all: Vec<String> = runtimes.iter().map(|r| r.display().to_string()).collect();
            return no(format!("it loads another HIP runtime ({})", all.join(", ")));
        }
        let folders = match std::env::var_os(self.variable).filter(|v| !v.is_empty()) {
            Some(named) => vec![PathBuf::from(named)],
            None => {
                let Some(own) = at(&maps, function).and_then(Path::parent) else {
                    return no("the location of its file is not known".into());
                };
                // Some builds of the library have the files in one of the two other directories.
                [self.folder, "library", "../Tensile/library"].map(|f| own.join(f)).into()
            }
        };
        let name = architecture.split(':').next().unwrap_or_default();
        match folders.iter().any(|f| has(f, name)) {
            true => Ok(()),
            false => {
                let folders: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
                no(format!("it has no kernels for {name} in {}", folders.join(", ")))
            }
        }
    }
}

/// The address ranges and files in a list of a process's mappings, which has lines such as `7f10-7f20 r-xp
/// 00000000 08:01 42 /lib/x.so`.
fn mapped(maps: &str) -> impl Iterator<Item = ((usize, usize), &Path)> {
    maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let hex = |n| usize::from_str_radix(n, 16).ok();
        Some(((hex(from)?, hex(to)?), Path::new(&rest[rest.find('/')?..])))
    })
}

/// The file mapped at an address.
fn at(maps: &str, address: usize) -> Option<&Path> {
    mapped(maps).find(|((from, to), _)| (*from..*to).contains(&address)).map(|(_, file)| file)
}

/// Mapped files whose names start with `name`.
fn named<'a>(maps: &'a str, name: &str) -> BTreeSet<&'a Path> {
    let own = |p: &&Path| p.file_name().is_some_and(|f| f.to_string_lossy().starts_with(name));
    mapped(maps).map(|(_, file)| file).filter(own).collect()
}

/// Whether a directory and those below it contain kernels for an architecture: a name that starts with
/// `TensileLibrary`, and a file (perhaps the same one) with the architecture in its name.
fn has(folder: &Path, architecture: &str) -> bool {
    fn search(folder: &Path, depth: usize, architecture: &str, found: &mut [bool; 2]) {
        for path in crate::probe::entries(folder) {
            if *found == [true; 2] {
                return;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with("TensileLibrary") {
                found[0] = true;
            }
            if path.is_dir() {
                if depth < MAX_SEARCH_DEPTH {
                    search(&path, depth + 1, architecture, found);
                }
            } else if name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == architecture) {
                found[1] = true;
            }
        }
    }
    let mut found = [false; 2];
    search(folder, 0, architecture, &mut found);
    found == [true; 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_architecture() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("rocblas/4.4/library");
        std::fs::create_dir_all(library.join("gfx1151")).unwrap();
        for file in [
            "TensileLibrary_lazy_gfx90a.dat",
            "Kernels.so-000-gfx90a-xnack+.hsaco",
            "TensileLibrary_Type_HH_fallback.dat",
            "gfx1151/TensileLibrary_lazy_gfx1151.dat.zlib",
        ] {
            std::fs::write(library.join(file), "").unwrap();
        }
        let folder = dir.path().join("rocblas");
        let known = ["gfx90a", "gfx1151", "gfx90", "gfx950", "gfx115", "gfx1200"].map(|a| has(&folder, a));
        assert_eq!(known, [true, true, false, false, false, false]);
        assert!(!has(&dir.path().join("nothing"), "gfx90a"));
    }

    #[test]
    fn libraries_are_found_by_their_addresses() {
        let maps = "1000-2000 r--p 00000000 08:01 1   /opt/rocm/lib/libamdhip64.so.6.3\n\
                    2000-3000 r-xp 00001000 08:01 1   /opt/rocm/lib/libamdhip64.so.6.3\n\
                    3000-4000 rw-p 00000000 00:00 0 \n\
                    4000-5000 r-xp 00000000 08:01 2   /a folder/librocblas.so.4\n";
        assert_eq!(at(maps, 0x4123), Some(Path::new("/a folder/librocblas.so.4")));
        assert_eq!((at(maps, 0x3123), at(maps, 0x5000)), (None, None));
        assert_eq!(named(maps, "libamdhip64.so").len(), 1);
    }
}

//! Directories of Python packages, which may contain vendors' libraries, such as
//! `site-packages/nvidia/<library>/lib` and `site-packages/onnxruntime/capi`. No Python is run to find them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Package directories, in this order: of the interpreter that HALCYON_PYTHON names, of active environments,
/// of each Python interpreter in PATH, of the user, and of the system.
pub fn packages() -> Vec<PathBuf> {
    let variable = |n: &str| std::env::var_os(n).filter(|v| !v.is_empty());
    let mut roots: Vec<PathBuf> = vec![];
    roots.extend(variable("HALCYON_PYTHON").and_then(|p| root_of(Path::new(&p))));
    roots.extend(["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from));
    roots.extend(in_path(&variable("PATH").unwrap_or_default()));
    roots.extend(variable("HOME").map(|h| Path::new(&h).join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    below(&roots)
}

/// File names of the Python interpreter.
const PROGRAMS: [&str; 2] = if cfg!(windows) { ["python.exe", "python3.exe"] } else { ["python3", "python"] };

/// The environments of the Python interpreters in a list of directories. Links are not followed, because the
/// interpreter of a virtual environment is a link out of the environment. Relative directories are ignored,
/// because libraries are loaded from the result.
fn in_path(path: &OsStr) -> Vec<PathBuf> {
    let folders = std::env::split_paths(path).filter(|f| f.is_absolute());
    let there = |f: &PathBuf| PROGRAMS.iter().any(|p| f.join(p).is_file());
    folders.filter(there).filter_map(|f| root_of(&f.join(PROGRAMS[0]))).collect()
}

/// The environment of an interpreter: `/x` for `/x/bin/python3`. On Windows it is the parent of `Scripts`, or
/// the interpreter's directory.
fn root_of(program: &Path) -> Option<PathBuf> {
    let folder = program.parent().filter(|f| f.is_absolute())?;
    let own = cfg!(windows) && !folder.ends_with("Scripts");
    if own { Some(folder.into()) } else { folder.parent().map(PathBuf::from) }
}

/// The files of a directory, sorted by name.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

/// The package directories below roots, without duplicates.
fn below(roots: &[PathBuf]) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = vec![];
    let mut seen = vec![];
    let mut add = |dir: PathBuf| {
        // `lib64` may be a link to `lib`.
        let Ok(real) = dir.canonicalize() else { return };
        if real.is_dir() && !seen.contains(&real) {
            seen.push(real);
            all.push(dir);
        }
    };
    for root in roots {
        for lib in ["lib", "lib64"] {
            for dir in entries(&root.join(lib)) {
                if dir.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python")) {
                    ["site-packages", "dist-packages"].into_iter().for_each(|p| add(dir.join(p)));
                }
            }
        }
        if cfg!(windows) {
            add(root.join("Lib").join("site-packages"));
        }
    }
    all
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_environment_of_the_pythons_in_the_path_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (system, venv, empty) =
            (dir.path().join("usr"), dir.path().join("opt/x/.venv"), dir.path().join("empty"));
        let site = |root: &Path| root.join("lib/python3.12/site-packages");
        for root in [&system, &venv] {
            std::fs::create_dir_all(root.join("bin")).unwrap();
            std::fs::create_dir_all(site(root)).unwrap();
        }
        std::fs::create_dir_all(site(&empty)).unwrap();
        std::fs::create_dir_all(empty.join("bin")).unwrap();
        std::fs::write(system.join("bin/python3"), "").unwrap();
        // A virtual environment's interpreter links to the system's, and its lib64 to its lib.
        symlink(system.join("bin/python3"), venv.join("bin/python")).unwrap();
        symlink(venv.join("lib"), venv.join("lib64")).unwrap();
        let path = std::env::join_paths([
            PathBuf::from("bin"),
            empty.join("bin"),
            venv.join("bin"),
            system.join("bin"),
            venv.join("bin"),
        ]);
        let roots = in_path(&path.unwrap());
        assert_eq!(roots, [venv.clone(), system.clone(), venv.clone()]);
        assert_eq!(below(&roots), [site(&venv), site(&system)]);
        assert_eq!(root_of(&venv.join("bin/python3")), Some(venv));
        // A name without a directory has no environment.
        assert_eq!(root_of(Path::new("python3")), None);
    }
}

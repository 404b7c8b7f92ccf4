//! A workspace of the Python package and Halcyon's crates, generated below `target`.
//!
//! Cargo tells a crate outside of a workspace's folder from the same crate inside, and compiles both. The
//! Python package is a workspace of its own, so that a Rust build needs no Python; its build would compile
//! Halcyon's crates a second time, for five minutes. In the generated workspace, the crates are where they
//! are in Halcyon's own, so cargo uses what a build of the command left in `target`.

use crate::wheel::locked;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The folder of the Python package within the generated workspace.
const MEMBER: &str = "python";

/// What went wrong with a file.
fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    let path = path.display().to_string();
    move |e| format!("{path}: {e}")
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(at(path))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(at(path))
}

/// The tables of a manifest whose headers pass `keep`, with the comments above them.
fn tables(manifest: &str, keep: impl Fn(&str) -> bool) -> String {
    let (mut out, mut above, mut inside) = (String::new(), String::new(), keep(""));
    for line in manifest.lines() {
        if line.starts_with('#') || line.trim().is_empty() {
            above.push_str(line);
            above.push('\n');
            continue;
        }
        if line.starts_with('[') {
            inside = keep(line);
        }
        let above = std::mem::take(&mut above);
        if inside {
            out.push_str(&above);
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// The manifest of the generated workspace, from the manifests of Halcyon's workspace and of the package.
fn root_manifest(ours: &str, package: &str) -> String {
    let is_profile = |header: &str| header.starts_with("[profile.");
    format!(
        "[workspace]\nresolver = \"3\"\nmembers = [\"{MEMBER}\"]\n\n{}\n{}",
        tables(ours, |header| header != "[workspace]" && !header.is_empty()),
        tables(package, is_profile)
    )
}

/// The package's manifest in the generated workspace.
fn member_manifest(package: &str) -> String {
    let is_own = |header: &str| header != "[workspace]" && !header.starts_with("[profile.");
    tables(package, is_own).replace("\"../../crates/", "\"../crates/")
}

/// A lock file with the packages of both, of which cargo removes those that are not used.
fn union(ours: &str, package: &str) -> String {
    const ENTRY: &str = "[[package]]\n";
    let known = locked(ours);
    let mut out = ours.trim_end().to_string();
    for entry in package.split(ENTRY).skip(1) {
        let is_known = |(name, versions): (&String, &_)| {
            known.get(name).is_some_and(|k: &BTreeSet<String>| k.is_superset(versions))
        };
        if !locked(&format!("{ENTRY}{entry}")).iter().all(is_known) {
            out.push_str("\n\n");
            out.push_str(ENTRY);
            out.push_str(entry.trim_end());
        }
    }
    out.push('\n');
    out
}

fn copy_all(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::create_dir_all(to).map_err(at(to))?;
    for entry in std::fs::read_dir(from).map_err(at(from))?.flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            if entry.file_name() != "__pycache__" {
                copy_all(&path, &to)?;
            }
        } else {
            std::fs::copy(&path, &to).map_err(at(&path))?;
        }
    }
    Ok(())
}

/// A generated workspace.
pub(crate) struct Generated {
    /// The folder of the package.
    pub(crate) package: PathBuf,
    lock: PathBuf,
    union: String,
}

impl Generated {
    /// Generates the workspace for the package in the folder `project`.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub(crate) fn new(project: &Path) -> Result<Generated, String> {
        let (root, dir) = (crate::root(), crate::target_dir().join("python-workspace"));
        if dir.exists() {
            std::fs::remove_dir_all(&dir).map_err(at(&dir))?;
        }
        let package = dir.join(MEMBER);
        std::fs::create_dir_all(&package).map_err(at(&package))?;
        let files = std::fs::read_dir(project).map_err(at(project))?.flatten();
        for file in files.filter(|f| f.path().is_file() && f.file_name() != "Cargo.lock") {
            std::fs::copy(file.path(), package.join(file.file_name())).map_err(at(&file.path()))?;
        }
        // maturin does not follow links to folders of Python code.
        copy_all(&project.join("python"), &package.join("python"))?;
        link(&project.join("src"), &package.join("src"))?;
        link(&root.join("crates"), &dir.join("crates"))?;
        let (ours, own) = (read(&root.join("Cargo.toml"))?, read(&project.join("Cargo.toml"))?);
        write(&dir.join("Cargo.toml"), &root_manifest(&ours, &own))?;
        write(&package.join("Cargo.toml"), &member_manifest(&own))?;
        let (ours, own) = (read(&root.join("Cargo.lock"))?, read(&project.join("Cargo.lock"))?);
        let (lock, union) = (dir.join("Cargo.lock"), union(&ours, &own));
        write(&lock, &union)?;
        Ok(Generated { package, lock, union })
    }

    /// Checks that a build used only packages of the two lock files.
    ///
    /// # Errors
    /// The packages with other versions.
    pub(crate) fn check_lock(&self) -> Result<(), String> {
        let known = locked(&self.union);
        let used = locked(&read(&self.lock)?);
        let is_other = |(name, versions): &(&String, &BTreeSet<String>)| {
            !known.get(*name).is_some_and(|k| k.is_superset(versions))
        };
        let other: Vec<&str> = used.iter().filter(is_other).map(|(name, _)| name.as_str()).collect();
        match other.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "cargo did not find these packages in the lock files of the workspace and of bindings/python: {}",
                other.join(", ")
            )),
        }
    }
}

#[cfg(unix)]
fn link(folder: &Path, to: &Path) -> Result<(), String> {
    std::os::unix::fs::symlink(folder, to).map_err(at(to))
}

/// A copy: links need a privilege on Windows.
#[cfg(not(unix))]
fn link(folder: &Path, to: &Path) -> Result<(), String> {
    copy_all(folder, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifests_have_their_parts() {
        let ours = "[workspace]\nmembers = [\"crates/*\"]\n\n[workspace.package]\nversion = \"1\"\n\n# Why.\n[profile.release]\nlto = \"off\"\n";
        let own = "[package]\nname = \"p\"\n\n[workspace]\n\n[dependencies]\na = { path = \"../../crates/a\" }\n\n[profile.release.package.p]\nopt-level = 3\n";
        let root = root_manifest(ours, own);
        assert!(root.starts_with("[workspace]\nresolver = \"3\"\nmembers = [\"python\"]\n"), "{root}");
        assert!(root.contains("[workspace.package]\nversion = \"1\"\n"), "{root}");
        assert!(root.contains("# Why.\n[profile.release]\nlto = \"off\"\n"), "{root}");
        assert!(root.contains("[profile.release.package.p]\nopt-level = 3\n"), "{root}");
        assert!(!root.contains("crates/*") && !root.contains("[package]"), "{root}");
        let member = member_manifest(own);
        assert!(member.contains("a = { path = \"../crates/a\" }"), "{member}");
        assert!(!member.contains("[workspace]") && !member.contains("[profile"), "{member}");
    }

    #[test]
    fn a_union_has_every_package_once() {
        let entry = |name: &str, version: &str| {
            format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\ndependencies = [\n \"x\",\n]\n")
        };
        let ours = format!("version = 4\n\n{}\n{}", entry("a", "1.0.0"), entry("b", "2.0.0"));
        let own = format!("version = 4\n\n{}\n{}", entry("a", "1.0.0"), entry("c", "3.0.0"));
        let both = union(&ours, &own);
        assert_eq!(both.matches("name = \"a\"").count(), 1, "{both}");
        assert_eq!(locked(&both).len(), 3, "{both}");
        assert!(both.ends_with("]\n") && both.starts_with("version = 4\n"), "{both}");
    }
}

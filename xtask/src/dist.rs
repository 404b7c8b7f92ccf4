//! `cargo xtask dist`: what a release has, for the platform that this runs on.

use crate::report::run;
use crate::{Failure, book, wheel};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The release of cargo-cyclonedx, which lists all dependencies in the CycloneDX format.
const CYCLONEDX: &str = "0.5.9";

pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    let out = match args {
        [] => crate::target_dir().join("dist"),
        ["--out", dir] => PathBuf::from(dir),
        [other, ..] => return Err(Failure::Usage(format!("`dist` has no option `{other}`"))),
    };
    all(&out)?;
    Ok(true)
}

fn all(out: &Path) -> Result<(), String> {
    let io = |p: &Path, e: std::io::Error| format!("{}: {e}", p.display());
    if out.exists() {
        std::fs::remove_dir_all(out).map_err(|e| io(out, e))?;
    }
    std::fs::create_dir_all(out).map_err(|e| io(out, e))?;
    let out = &std::fs::canonicalize(out).map_err(|e| io(out, e))?;
    let version = env!("CARGO_PKG_VERSION");
    let platform = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);

    run(crate::cargo().args([
        "build",
        "--release",
        "--locked",
        "-p",
        "halcyon-cli",
        "--features",
        "edit,hub",
    ]))?;
    let name = format!("halcyon-{version}-{platform}");
    let dir = stage(out, &name, &["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"])?;
    let program = format!("halcyon{}", std::env::consts::EXE_SUFFIX);
    let binary = dir.join(&program);
    copy(&crate::target_dir().join("release").join(&program), &binary)?;
    for (shell, file) in [("bash", "halcyon.bash"), ("zsh", "_halcyon"), ("fish", "halcyon.fish")] {
        let text = Command::new(&binary).args(["completions", shell]).output().map_err(|e| io(&binary, e))?;
        if !text.status.success() {
            return Err(format!("halcyon completions {shell}: {}", String::from_utf8_lossy(&text.stderr)));
        }
        std::fs::write(dir.join(file), text.stdout).map_err(|e| io(&dir, e))?;
    }
    archive(out, &name)?;

    let profiles = crate::profiles::workspace()?;
    let manifest = crate::root().join("bindings/c/Cargo.toml");
    let mut c = crate::cargo();
    c.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest).arg("--config").arg(profiles);
    c.arg("--target-dir").arg(crate::target_dir());
    run(&mut c)?;
    let name = format!("halcyon-c-{version}-{platform}");
    let dir = stage(out, &name, &["LICENSE-MIT", "LICENSE-APACHE", "docs/c-api.md"])?;
    for file in ["bindings/c/include/halcyon.h", "bindings/c/include/halcyon.hpp"] {
        copy(&crate::root().join(file), &dir.join(file.rsplit('/').next().unwrap_or(file)))?;
    }
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let archive_name = if cfg!(windows) { "halcyon.lib" } else { "libhalcyon.a" };
    for file in [format!("{prefix}halcyon{suffix}"), archive_name.into()] {
        copy(&crate::target_dir().join("release").join(&file), &dir.join(&file))?;
    }
    archive(out, &name)?;

    let wheel = wheel::build()?;
    copy(&wheel, &out.join(wheel.file_name().ok_or("a wheel without a name")?))?;

    let book = book::build(crate::cargo(), true)?;
    let name = format!("halcyon-book-{version}");
    run(Command::new("cp").arg("-r").arg(&book).arg(out.join(&name)))?;
    archive(out, &name)?;

    bill_of_materials(out)?;
    checksums(out)
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to).map(drop).map_err(|e| format!("{} to {}: {e}", from.display(), to.display()))
}

/// A folder with files of the repository.
fn stage(out: &Path, name: &str, files: &[&str]) -> Result<PathBuf, String> {
    let dir = out.join(name);
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for file in files {
        copy(&crate::root().join(file), &dir.join(file.rsplit('/').next().unwrap_or(file)))?;
    }
    Ok(dir)
}

/// Replaces a folder by an archive of it. Owners, times and the order of files do not depend on this machine.
fn archive(out: &Path, name: &str) -> Result<(), String> {
    let mut tar = Command::new("tar");
    tar.current_dir(out).args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    run(tar.arg("-czf").arg(format!("{name}.tar.gz")).arg(name))?;
    let dir = out.join(name);
    std::fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))
}

/// Writes the dependencies of the command with versions, licences and checksums.
fn bill_of_materials(out: &Path) -> Result<(), String> {
    let tool = book::installed(crate::cargo(), "cargo-cyclonedx", CYCLONEDX, &[], true)?;
    let manifest = crate::root().join("crates/halcyon-cli/Cargo.toml");
    let mut c = Command::new(tool);
    c.current_dir(crate::root()).args(["cyclonedx", "--format", "json", "--features", "edit,hub"]);
    run(c.args(["--override-filename", "halcyon-sbom", "--manifest-path"]).arg(&manifest))?;
    // The tool writes beside the manifest of each member of the workspace.
    let made = crate::root().join("crates/halcyon-cli/halcyon-sbom.json");
    copy(&made, &out.join("halcyon-sbom.cdx.json"))?;
    for dir in std::fs::read_dir(crate::root().join("crates")).map_err(|e| e.to_string())?.flatten() {
        let _ = std::fs::remove_file(dir.path().join("halcyon-sbom.json"));
    }
    let _ = std::fs::remove_file(crate::root().join("xtask/halcyon-sbom.json"));
    Ok(())
}

/// Writes `SHA256SUMS`, which `sha256sum --check` reads.
fn checksums(out: &Path) -> Result<(), String> {
    let entries = std::fs::read_dir(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let mut names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into()).collect();
    names.sort();
    let sums = Command::new("sha256sum").current_dir(out).args(&names).output();
    let sums = sums.map_err(|e| format!("sha256sum: {e}; it is a part of GNU coreutils"))?;
    if !sums.status.success() {
        return Err(format!("sha256sum: {}", String::from_utf8_lossy(&sums.stderr)));
    }
    print!("{}", String::from_utf8_lossy(&sums.stdout));
    let to = out.join("SHA256SUMS");
    std::fs::write(&to, sums.stdout).map_err(|e| format!("{}: {e}", to.display()))
}

//! Builds the stand-ins for the vendor libraries (`tests/simt`). Tests and the development commands include
//! this file by path.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

use std::path::Path;
use std::process::Command;

/// Compiles the stand-in in `sources` to `lib`. At run time it compiles kernels into the directory `modules`.
pub fn compile(sources: &Path, modules: &Path, lib: &Path, flags: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(modules).map_err(|e| format!("{}: {e}", modules.display()))?;
    let mut c = Command::new("c++");
    c.args(["-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-shared"]).args(flags);
    c.arg(format!("-DH_KERNEL=\"{}\"", sources.join("kernel.h").display()));
    c.arg(format!("-DH_FOLDER=\"{}\"", modules.display()));
    c.arg("-o").arg(lib).arg(sources.join("standin.cpp")).arg("-ldl");
    // AMD's libraries keep their kernels in files beside them, by architecture.
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

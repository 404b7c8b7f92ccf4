//! Checks this machine for the requirements of the tests, and installs the missing ones: Debian packages, a
//! Python environment, Rust targets.

use crate::report::{Outcome, retry, run};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A requirement of some tests beyond the Rust toolchain.
#[derive(Debug)]
pub(crate) struct Prerequisite {
    /// The step's name.
    pub name: &'static str,
    /// The tests that are skipped if it is missing.
    pub purpose: &'static str,
    /// The Debian 12 packages that provide it.
    packages: &'static [&'static str],
    present: fn() -> bool,
}

/// Every test requirement, in the order of installation.
pub(crate) const PREREQUISITES: &[Prerequisite] = &[
    Prerequisite {
        name: "install-python",
        purpose: "independent references in Python",
        packages: &["python3", "python3-venv"],
        present: || succeeds(Command::new("python3").args(["-c", "import venv, ensurepip"])),
    },
    Prerequisite {
        name: "install-opencl",
        purpose: "the OpenCL backend on PoCL",
        packages: &["ocl-icd-libopencl1", "pocl-opencl-icd"],
        present: || library("libOpenCL.so.1") && has_file("/etc/OpenCL/vendors", ".icd"),
    },
    Prerequisite {
        name: "install-vulkan",
        purpose: "the WebGPU backend on lavapipe",
        packages: &["libvulkan1", "mesa-vulkan-drivers"],
        present: || library("libvulkan.so.1") && has_file("/usr/share/vulkan/icd.d", ".json"),
    },
    Prerequisite {
        name: "install-qemu",
        purpose: "the CPU's kernels on NEON",
        packages: &["qemu-user"],
        present: || succeeds(Command::new("qemu-aarch64").arg("--version")),
    },
    Prerequisite {
        name: "install-cxx",
        purpose: "the CUDA and ROCm drivers with stand-ins for the vendors' libraries",
        packages: &["g++"],
        present: || succeeds(Command::new("c++").arg("--version")),
    },
    Prerequisite {
        name: "install-hiprtc",
        purpose: "compiling the HIP dialect without a GPU",
        packages: &["libamdhip64-5", "libhiprtc-builtins5", "rocm-device-libs"],
        present: || {
            library("libamdhip64.so") && (library("libhiprtc-builtins.so") || library("libhiprtc.so"))
        },
    },
    Prerequisite {
        name: "install-clang",
        purpose: "compiling the HIP dialect for architectures that Debian's hipRTC does not know",
        packages: &["clang-19", "lld-19", "rocm-device-libs"],
        present: || {
            ["clang++-19", "ld.lld-19"].iter().all(|tool| succeeds(Command::new(tool).arg("--version")))
                && has_file("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "ocml.bc")
        },
    },
];

impl Prerequisite {
    /// Installs the requirement if possible. If `strict` is set, a missing requirement is a failure.
    pub(crate) fn prepare(&self, install: bool, strict: bool) -> Outcome {
        if (self.present)() {
            return Outcome::Passed("present".into());
        }
        let missing = |why: String| {
            let packages = self.packages.join(" ");
            let text = format!(
                "{why}; not tested without it: {}; to install it: apt-get install {packages}",
                self.purpose
            );
            if strict { Outcome::Failed(text) } else { Outcome::Skipped(text) }
        };
        if !install {
            return missing("not installed (--no-install)".into());
        }
        match apt_install(self.packages) {
            Err(why) => missing(why),
            Ok(()) if (self.present)() => Outcome::Passed(format!("installed {}", self.packages.join(" "))),
            Ok(()) => {
                missing("its packages are installed, but its files are not in the expected places".into())
            }
        }
    }
}

/// Whether the requirement with this name is installed now.
pub(crate) fn is_installed(name: &str) -> bool {
    PREREQUISITES.iter().any(|prerequisite| prerequisite.name == name && (prerequisite.present)())
}

fn apt_install(packages: &[&str]) -> Result<(), String> {
    if !succeeds(Command::new("apt-get").arg("--version")) {
        return Err("no apt-get on this machine".into());
    }
    let user = Command::new("id").arg("-u").output().map_err(|e| format!("`id -u`: {e}"))?;
    if user.stdout.trim_ascii() != b"0" {
        return Err("not root, so apt-get cannot install".into());
    }
    let apt = |args: &[&str]| {
        let options = ["-q", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"];
        run(Command::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args(options).args(args))
    };
    retry(|| {
        apt(&["update"])?;
        apt(&[&["install", "-y", "--no-install-recommends"], packages].concat())
    })
}

/// Whether a shared library whose file name starts with `prefix` is in the loader's cache or in ROCm's
/// folder.
fn library(prefix: &str) -> bool {
    let cached = ["ldconfig", "/sbin/ldconfig"].iter().any(|ldconfig| {
        Command::new(ldconfig).arg("-p").output().is_ok_and(|out| {
            String::from_utf8_lossy(&out.stdout).lines().any(|line| line.trim_start().starts_with(prefix))
        })
    });
    cached || entries("/opt/rocm/lib").any(|name| name.starts_with(prefix))
}

fn has_file(folder: &str, suffix: &str) -> bool {
    entries(folder).any(|name| name.ends_with(suffix))
}

fn entries(folder: &str) -> impl Iterator<Item = String> {
    let read = std::fs::read_dir(folder).into_iter().flatten().flatten();
    read.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Whether the command starts and succeeds. Its output is discarded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// A Python environment of this project, below the build folder.
#[derive(Debug, Clone)]
pub(crate) struct Venv {
    dir: PathBuf,
}

impl Venv {
    pub(crate) fn new(name: &str) -> Self {
        Venv { dir: crate::target_dir().join(name) }
    }

    pub(crate) fn python(&self) -> PathBuf {
        self.dir.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
    }

    /// The folder of an installed package. Python locates it without importing the package.
    pub(crate) fn package_dir(&self, package: &str) -> Option<PathBuf> {
        let code = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.submodule_search_locations[0])";
        let out = Command::new(self.python()).args(["-c", code, package]).output().ok()?;
        let path = PathBuf::from(String::from_utf8(out.stdout).ok()?.trim());
        (out.status.success() && path.is_dir()).then_some(path)
    }

    /// Whether exactly these requirements are installed here.
    pub(crate) fn is_installed(&self, requirements: &[Requirements]) -> bool {
        let wanted = stamp(requirements);
        wanted.is_ok_and(|w| {
            std::fs::read_to_string(self.dir.join("installed.txt")).is_ok_and(|have| have == w)
        }) && succeeds(Command::new(self.python()).args(["-c", "pass"]))
    }

    /// Creates the environment and installs the requirements, unless exactly these are already installed.
    pub(crate) fn prepare(&self, requirements: &[Requirements]) -> Result<String, String> {
        if self.is_installed(requirements) {
            return Ok("present".into());
        }
        let wanted = stamp(requirements)?;
        retry(|| {
            run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&self.dir))?;
            for one in requirements {
                let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
                let mut command = Command::new(self.python());
                command.args(pip).args(one.flags).arg("-r").arg(one.path());
                run(&mut command)?;
            }
            Ok(())
        })?;
        std::fs::write(self.dir.join("installed.txt"), &wanted).map_err(|e| e.to_string())?;
        let count = wanted.lines().filter(|l| l.contains("==")).count();
        Ok(format!("{count} pinned packages installed"))
    }
}

/// A list of pinned packages in this crate, and the pip flags for it.
#[derive(Debug)]
pub(crate) struct Requirements {
    pub file: &'static str,
    pub flags: &'static [&'static str],
}

impl Requirements {
    pub(crate) fn path(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(self.file)
    }
}

fn stamp(requirements: &[Requirements]) -> Result<String, String> {
    let mut out = String::new();
    for one in requirements {
        let path = one.path();
        out.push_str(&std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?);
    }
    Ok(out)
}

/// Checks that the standard library of a Rust target is installed. If not, installs it with rustup.
pub(crate) fn rust_target(target: &str, install: bool) -> Result<(), String> {
    let installed = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", target])
        .output()
        .map_err(|e| format!("rustc: {e}"))?;
    let dir = PathBuf::from(String::from_utf8_lossy(&installed.stdout).trim());
    let has_core = |dir: &Path| {
        std::fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| {
            let name = entry.file_name();
            name.to_string_lossy().starts_with("libcore-")
                && Path::new(&name).extension() == Some(OsStr::new("rlib"))
        })
    };
    if has_core(&dir) {
        return Ok(());
    }
    if !install {
        return Err(format!("the Rust target {target} is not installed (--no-install)"));
    }
    retry(|| run(Command::new("rustup").args(["target", "add", target])))
        .map_err(|e| format!("the Rust target {target} could not be added: {e}"))
}

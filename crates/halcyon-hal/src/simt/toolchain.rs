//! Choice of the run-time compiler for a device.
//!
//! A machine may have several: the toolkit's, those of Python packages, versions newer than the driver or too
//! old for the device. Each is tried with a trivial kernel, which the driver must load, until one succeeds.

use super::adapter::Adapter;
use super::program::{Function, Output};
use super::sys::{self, Compiler, Context, REFUSED, Side};
use crate::cache::{self, DiskCache};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// A kernel that every compiler accepts and every device runs.
const TRIVIAL: (&str, &str) = (
    "halcyon_loads",
    "extern \"C\" __global__ void __launch_bounds__(1)\nhalcyon_loads(unsigned int* x) {\n  x[0] = 1u;\n}\n",
);

/// A run-time compiler with its settings for one device.
#[derive(Debug)]
pub(super) struct Toolchain {
    pub compiler: &'static Compiler,
    flags: Vec<String>,
    output: Output,
    /// Properties of the device that a kernel's binary depends on, besides its text and the flags.
    device: [String; 2],
    /// Compilers that were rejected, and why.
    pub passed: Vec<String>,
}

/// How to use a compiler for a device.
struct Service {
    flags: Vec<String>,
    output: Output,
}

/// The result of trying a compiler.
enum Verdict {
    Loads,
    /// The device does not load the compiler's kernels, for this reason. Another compiler may work.
    No(String),
}

impl Toolchain {
    /// Chooses the first of the compilers `names` whose kernels the device loads. They are tried in the order
    /// of [`sys::by_major`] for the driver's version. Compilers that can only make PTX because they do not
    /// know the device yet, and (in CUDA) those of a newer major version than the driver, come last.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is none, with a reason for each compiler; [`Error::Unsupported`] if
    /// the driver does not report the device's architecture; the device's error if it fails in another way.
    ///
    /// # Safety
    /// The contract of [`Family::compiler`](super::Family::compiler), for `names`.
    pub(super) unsafe fn choose(
        adapter: &Adapter,
        context: &Arc<Context>,
        names: &[String],
        disk: Option<&DiskCache>,
    ) -> Result<Toolchain> {
        let family = adapter.api.family;
        let info = adapter.info();
        let architecture = adapter.architecture();
        // An unknown architecture is a problem of the device, so no compiler is tried.
        (family.flags)(architecture.as_deref()).ok_or_else(|| {
            Error::unsupported(
                format!("{}: the driver does not report its architecture", info.id),
                "Update the GPU's driver, or choose another backend",
            )
        })?;
        let major = adapter.api.major();
        let names = major.map_or_else(|| names.to_vec(), |m| sys::by_major(names.to_vec(), m));
        let device = [info.name, info.driver_version.unwrap_or_default()];
        let (mut absent, mut passed, mut later) = (vec![], vec![], vec![]);
        let mut reason = None;
        let made = |compiler, service: Service| {
            let Service { flags, output } = service;
            Toolchain { compiler, flags, output, device: device.clone(), passed: vec![] }
        };
        for name in &names {
            // SAFETY: `choose` requires the contract of `compiler` for `names`, and `name` is one of them.
            let compiler = match unsafe { family.compiler(std::slice::from_ref(name)) } {
                Ok(c) => c,
                Err(Error::Unavailable { tried, reason: why, .. }) => {
                    reason.get_or_insert(why);
                    absent.extend(tried);
                    continue;
                }
                Err(e) => return Err(e),
            };
            let service = match serve(compiler, architecture.as_deref()) {
                Ok(s) => s,
                Err(why) => {
                    passed.push(format!("{}: {why}", compiler.describe()));
                    continue;
                }
            };
            let newer = family.side == Side::Cuda && major.is_some_and(|m| compiler.version.0 > m as i32);
            if newer || service.output == Output::Ptx {
                // Compilers that are newer than the driver come after the others. In each of the two groups,
                // the newest compiler comes first.
                let rank = (newer, std::cmp::Reverse(compiler.version));
                later.push((rank, made(compiler, service)));
                continue;
            }
            let toolchain = made(compiler, service);
            match toolchain.check_loads(context, disk)? {
                Verdict::Loads => return Ok(Toolchain { passed, ..toolchain }),
                Verdict::No(why) => passed.push(format!("{}: {why}", compiler.describe())),
            }
        }
        later.sort_by_key(|l| l.0);
        for (_, toolchain) in later {
            match toolchain.check_loads(context, disk)? {
                Verdict::Loads => return Ok(Toolchain { passed, ..toolchain }),
                Verdict::No(why) => passed.push(format!("{}: {why}", toolchain.compiler.describe())),
            }
        }
        let reason = match passed.is_empty() {
            true => reason
                .unwrap_or_else(|| format!("no file name of {}'s run-time compiler is known", family.title)),
            false => format!("no run-time compiler makes kernels that the driver of {} loads", context.id),
        };
        let tried = passed.into_iter().chain(absent).collect();
        Err(Error::Unavailable {
            backend: family.kind.id().into(),
            tried,
            reason,
            fix: family.compiler_fix.into(),
        })
    }

    /// Text for messages: `libnvrtc.so.12 12.9`, and the output format if it is not the device's own code.
    pub(super) fn describe(&self) -> String {
        let what = match self.output {
            Output::Binary => String::new(),
            Output::Ptx => format!(
                ", which does not know this device yet: PTX ({}), compiled by the driver",
                self.flags.first().map_or("", |f| f.trim_start_matches("--gpu-architecture="))
            ),
        };
        format!("{}{what}", self.compiler.describe())
    }

    /// Whether the device loads a kernel from this compiler. Success is remembered for the process.
    fn check_loads(&self, context: &Arc<Context>, disk: Option<&DiskCache>) -> Result<Verdict> {
        static GOOD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let key = format!("{} {} {:?}", context.id, self.compiler.library, self.flags);
        let mut good = GOOD.lock().unwrap_or_else(|e| e.into_inner());
        if good.contains(&key) {
            return Ok(Verdict::Loads);
        }
        // The library's name is part of the text, so that the compiler is not accepted because of a binary
        // that another compiler of the same version left in the disk cache.
        let (name, text) = (TRIVIAL.0, format!("// {}\n{}", self.compiler.library, TRIVIAL.1));
        match self.build(context, disk, name, &text, name, 1) {
            Ok(_) => {
                good.insert(key);
                Ok(Verdict::Loads)
            }
            Err(BuildError::Refused(e)) => Ok(Verdict::No(e.to_string())),
            Err(BuildError::Other(e @ Error::Compile { .. })) => Ok(Verdict::No(e.to_string())),
            Err(BuildError::Other(e)) => Err(e),
        }
    }

    /// Builds an entry point of source text. Also returns whether its binary came from the disk cache.
    pub(super) fn build(
        &self,
        context: &Arc<Context>,
        disk: Option<&DiskCache>,
        name: &str,
        text: &str,
        entry: &str,
        items: u32,
    ) -> Result<(Function, bool), BuildError> {
        // The key contains everything that the binary depends on. The text also changes when a renderer
        // changes.
        let version = format!("{:?}", self.compiler.version);
        let mut parts = vec![text.as_bytes(), version.as_bytes(), env!("CARGO_PKG_VERSION").as_bytes()];
        parts.extend(self.device.iter().map(|d| d.as_bytes()));
        parts.extend(self.flags.iter().map(|f| f.as_bytes()));
        let key = cache::digest(&parts);
        if let Some(disk) = disk
            && let Some(binary) = disk.get(key)
        {
            let loaded = match self.output.is_whole(&binary) {
                // SAFETY: `get` compared the digest, so these are the bytes that `put` stored below: a
                // compiler's whole output. `is_whole` found that PTX ends in NUL.
                true => unsafe { Function::load(context, &binary, entry, items) }.map_err(|f| f.error()),
                false => Err(Error::internal("the cached program is incomplete")),
            };
            match loaded {
                Ok(f) => return Ok((f, true)),
                Err(e) => {
                    tracing::warn!(
                        kernel = name,
                        "the driver refuses a cached program; it is built again: {e}"
                    );
                    disk.remove(key);
                }
            }
        }
        // hipRTC may query the current device, so make the context's device the current one.
        context.enter().map_err(BuildError::Other)?;
        let binary = self
            .compiler
            .compile(&context.id, name, text, &self.flags, self.output)
            .map_err(BuildError::Other)?;
        // SAFETY: `compile` returns a compiler's whole output, and PTX only if it ends in NUL.
        let function = unsafe { Function::load(context, &binary, entry, items)? };
        if let Some(disk) = disk {
            disk.put(key, &binary);
        }
        Ok((function, false))
    }
}

/// How to use a compiler for an architecture, or why it cannot be used.
fn serve(compiler: &Compiler, architecture: Option<&str>) -> Result<Service, String> {
    let family = compiler.family;
    let flags =
        |a: Option<&str>| (family.flags)(a).ok_or_else(|| "the architecture is not known".to_string());
    let own = || Ok(Service { flags: flags(architecture)?, output: Output::Binary });
    // AMD's compilers do not list architectures; they report an unknown one when compiling.
    let Some(number) = architecture.and_then(|a| a.strip_prefix("sm_")?.parse::<u32>().ok()) else {
        return own();
    };
    if compiler.generations.is_empty() || compiler.generations.contains(&number) {
        return own();
    }
    // PTX for one architecture also runs on later ones, because the driver compiles it.
    match compiler.generations.iter().filter(|g| **g < number).max() {
        Some(g) if compiler.ptx.is_some() => {
            Ok(Service { flags: flags(Some(&format!("compute_{g}")))?, output: Output::Ptx })
        }
        _ => Err(format!("it does not know devices as old as sm_{number} any more")),
    }
}

/// Why an entry point could not be built.
#[derive(Debug)]
pub(crate) enum BuildError {
    /// The driver rejects the compiler's output.
    Refused(Error),
    Other(Error),
}

impl BuildError {
    /// Classifies the result of loading a module.
    pub(crate) fn of(code: sys::Code, error: Error) -> BuildError {
        if REFUSED.contains(&code) { BuildError::Refused(error) } else { BuildError::Other(error) }
    }

    pub(crate) fn error(self) -> Error {
        let (BuildError::Refused(e) | BuildError::Other(e)) = self;
        e
    }
}

impl From<Error> for BuildError {
    fn from(e: Error) -> BuildError {
        BuildError::Other(e)
    }
}

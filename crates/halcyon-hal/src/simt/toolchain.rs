//! Which run-time compiler makes a device's kernels.
//!
//! A machine may have several: of the toolkit, of Python's packages, newer than the driver or older than the
//! card. So each is asked for one trivial kernel, which the driver has to load, and the next one is tried
//! where it does not.

use super::adapter::Adapter;
use super::program::{Function, Output};
use super::sys::{self, Compiler, Context, REFUSED, Side};
use crate::cache::{self, DiskCache};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// A kernel that every compiler makes and every device runs.
const TRIVIAL: (&str, &str) = (
    "halcyon_loads",
    "extern \"C\" __global__ void __launch_bounds__(1)\nhalcyon_loads(unsigned int* x) {\n  x[0] = 1u;\n}\n",
);

/// A run-time compiler and how it is asked for kernels of one device.
#[derive(Debug)]
pub struct Toolchain {
    pub compiler: &'static Compiler,
    flags: Vec<String>,
    output: Output,
    /// What the text of a kernel does not say and its binary depends on, beside the flags.
    device: [String; 2],
    /// Compilers that are not used, and why.
    pub passed: Vec<String>,
}

/// How a compiler serves a device.
struct Service {
    flags: Vec<String>,
    output: Output,
}

/// What a compiler was found to be good for.
enum Verdict {
    Loads,
    /// Why another compiler may do better.
    No(String),
}

impl Toolchain {
    /// The first of these compilers whose kernels the device loads, as `family`'s order and the driver's
    /// version have them; those that make PTX alone, since they do not know the device yet, and those of a
    /// newer major version than the driver come last.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is none, with a reason for each; errors of a device that fails
    /// otherwise.
    pub fn choose(
        adapter: &Adapter,
        context: &Arc<Context>,
        names: &[String],
        disk: Option<&DiskCache>,
    ) -> Result<Toolchain> {
        let family = adapter.api.family;
        let info = adapter.info();
        let architecture = adapter.architecture();
        // Said of the device, so it is no reason to look at compilers.
        (family.flags)(architecture.as_deref()).ok_or_else(|| {
            Error::unsupported(
                format!("{}: the driver does not tell its architecture", info.id),
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
            let compiler = match family.compiler(std::slice::from_ref(name)) {
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
                // Of those the newest knows most.
                let rank = (newer, std::cmp::Reverse(compiler.version));
                later.push((rank, made(compiler, service)));
                continue;
            }
            let toolchain = made(compiler, service);
            match toolchain.proven(context, disk)? {
                Verdict::Loads => return Ok(Toolchain { passed, ..toolchain }),
                Verdict::No(why) => passed.push(format!("{}: {why}", compiler.describe())),
            }
        }
        later.sort_by_key(|l| l.0);
        for (_, toolchain) in later {
            match toolchain.proven(context, disk)? {
                Verdict::Loads => return Ok(Toolchain { passed, ..toolchain }),
                Verdict::No(why) => passed.push(format!("{}: {why}", toolchain.compiler.describe())),
            }
        }
        let reason = match passed.is_empty() {
            true => {
                reason.unwrap_or_else(|| format!("no run-time compiler of {} is looked for", family.title))
            }
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

    /// `libnvrtc.so.12 12.9`, and what it makes where that is not the device's own code.
    pub fn describe(&self) -> String {
        let what = match self.output {
            Output::Binary => String::new(),
            Output::Ptx => format!(
                ", which does not know this device yet: PTX ({}), compiled by the driver",
                self.flags.first().map_or("", |f| f.trim_start_matches("--gpu-architecture="))
            ),
        };
        format!("{}{what}", self.compiler.describe())
    }

    /// Whether the device loads a kernel of it. What was found is kept for the process.
    fn proven(&self, context: &Arc<Context>, disk: Option<&DiskCache>) -> Result<Verdict> {
        static GOOD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let key = format!("{} {} {:?}", context.id, self.compiler.library, self.flags);
        let mut good = GOOD.lock().unwrap_or_else(|e| e.into_inner());
        if good.contains(&key) {
            return Ok(Verdict::Loads);
        }
        // One that cannot compile is not excused by what another one of its version left on the disk.
        let (name, text) = (TRIVIAL.0, format!("// {}\n{}", self.compiler.library, TRIVIAL.1));
        match self.build(context, disk, name, &text, name, 1) {
            Ok(_) => {
                good.insert(key);
                Ok(Verdict::Loads)
            }
            Err(Failed::Refused(e)) => Ok(Verdict::No(e.to_string())),
            Err(Failed::Other(e @ Error::Compile { .. })) => Ok(Verdict::No(e.to_string())),
            Err(Failed::Other(e)) => Err(e),
        }
    }

    /// An entry point of source text, and whether its binary came from the disk.
    pub fn build(
        &self,
        context: &Arc<Context>,
        disk: Option<&DiskCache>,
        name: &str,
        text: &str,
        entry: &str,
        items: u32,
    ) -> Result<(Function, bool), Failed> {
        // The text stands for the kernel's key: it also changes when a renderer does. The flags tell what is
        // made of it.
        let version = format!("{:?}", self.compiler.version);
        let mut parts = vec![text.as_bytes(), version.as_bytes(), env!("CARGO_PKG_VERSION").as_bytes()];
        parts.extend(self.device.iter().map(|d| d.as_bytes()));
        parts.extend(self.flags.iter().map(|f| f.as_bytes()));
        let key = cache::digest(&parts);
        if let Some(disk) = disk
            && let Some(binary) = disk.get(key)
        {
            let loaded = match self.output.is_whole(&binary) {
                true => Function::load(context, &binary, entry, items).map_err(|f| f.error()),
                false => Err(Error::internal("its end is missing")),
            };
            match loaded {
                Ok(f) => return Ok((f, true)),
                Err(e) => {
                    tracing::warn!(
                        kernel = name,
                        "the driver refuses a cached program, it is built again: {e}"
                    );
                    disk.remove(key);
                }
            }
        }
        // hipRTC may ask which device is meant.
        context.enter().map_err(Failed::Other)?;
        let binary = self
            .compiler
            .compile(&context.id, name, text, &self.flags, self.output)
            .map_err(Failed::Other)?;
        let function = Function::load(context, &binary, entry, items)?;
        if let Some(disk) = disk {
            disk.put(key, &binary);
        }
        Ok((function, false))
    }
}

/// How a compiler makes kernels for an architecture, or why it cannot.
fn serve(compiler: &Compiler, architecture: Option<&str>) -> Result<Service, String> {
    let family = compiler.family;
    let flags =
        |a: Option<&str>| (family.flags)(a).ok_or_else(|| "the architecture is not known".to_string());
    let own = || Ok(Service { flags: flags(architecture)?, output: Output::Binary });
    // AMD's compilers say what they know by refusing.
    let Some(number) = architecture.and_then(|a| a.strip_prefix("sm_")?.parse::<u32>().ok()) else {
        return own();
    };
    if compiler.generations.is_empty() || compiler.generations.contains(&number) {
        return own();
    }
    // Code for one generation runs on later ones when the driver compiles it.
    match compiler.generations.iter().filter(|g| **g < number).max() {
        Some(g) if compiler.ptx.is_some() => {
            Ok(Service { flags: flags(Some(&format!("compute_{g}")))?, output: Output::Ptx })
        }
        _ => Err(format!("it does not know devices as old as sm_{number} any more")),
    }
}

/// Why there is no entry point.
#[derive(Debug)]
pub enum Failed {
    /// The driver does not take what the compiler made.
    Refused(Error),
    Other(Error),
}

impl Failed {
    /// By what loading a module gave.
    pub fn of(code: sys::Code, error: Error) -> Failed {
        if REFUSED.contains(&code) { Failed::Refused(error) } else { Failed::Other(error) }
    }

    pub fn error(self) -> Error {
        let (Failed::Refused(e) | Failed::Other(e)) = self;
        e
    }
}

impl From<Error> for Failed {
    fn from(e: Error) -> Failed {
        Failed::Other(e)
    }
}

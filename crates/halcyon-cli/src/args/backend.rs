//! Arguments that select and configure a device.

use crate::report;
use clap::Args;
use halcyon::hal::DeviceName;
use halcyon::ir::passes;
use halcyon::{
    AmpPolicy, Backend, BackendBuilder, BackendType, Error, Fallback, Level, MatmulPrecision,
    MemoryPoolConfig, Policy, Result, TuningMode, hal,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Mutex;

/// The device, and how it is used.
#[derive(Args, Debug, Clone)]
pub(crate) struct BackendArgs {
    /// Backend that runs the model: a name, or auto (the best one that is available). NAME:N is its device N
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Number of the backend's device (see `halcyon devices`)
    #[arg(long, value_name = "N", value_parser = device_number)]
    pub device: Option<usize>,
    /// Order in which auto tries backends: names with commas between (cuda,cpu), or priority, torchbridge,
    /// torch, inference or vendors. Default: HALCYON_BACKENDS, else `backends` of the configuration
    /// file (HALCYON_CONFIG, or halcyon/config.toml), then the priorities
    #[arg(long, value_name = "ORDER")]
    pub backends: Option<String>,
    /// What happens if the backend is not available or has too little memory: never (an error; default for a
    /// named backend), next (the next in the order; default for auto) or cpu
    #[arg(long, value_name = "WHAT")]
    pub fallback: Option<String>,
    /// Optimisation level: O0 (none, debug), O1 (conservative), O2 (balanced) or O3 (aggressive)
    ///
    /// At O3 products and convolutions are quantised within a bound of the error (see `halcyon run --help`).
    /// Only `run` and `optimize` accept O3.
    #[arg(long, value_name = "LEVEL", default_value = "O2")]
    pub level: String,
    /// Type of products and convolutions, from O2 on: f32, bf16 or f16
    ///
    /// f32 keeps the model's types. bf16 and f16 are for the parts of an f32 model that tolerate them (mixed
    /// precision; inputs and outputs keep their types). With f16, operations whose values exceed 16376 in the
    /// first run stay in f32.
    #[arg(long, value_name = "TYPE")]
    pub precision: Option<String>,
    /// Computes in the type of --precision even where that is slower. Without this option the CPU measures
    /// f32 and this type once and keeps f32, with a warning, for work that this type does not make faster
    #[arg(long)]
    pub force_precision: bool,
    /// How exact products of f32 must be, from O2 on: highest (the default), high (TF32 or better) or medium
    /// (bf16 or better). If lower precision is not faster on the device, products stay exact
    #[arg(long, value_name = "HOW")]
    pub matmul_precision: Option<String>,
    /// Threads of the CPU device
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Limit of the device memory, as 512M or 2G. Live buffers and freed memory that is kept for reuse both
    /// count; K, M and G are powers of 1024
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<String>,
    /// How buffers get their memory. POOL is exclusive (an allocation for each buffer, the default),
    /// best-fit, first-fit or buddy (ranges of large chunks), with a limit (best-fit:512MiB) or a first size
    /// and a limit (buddy:64MiB..2GiB). With ",defragment" at the end of POOL, buffers are moved together
    /// when a request would fail. Default: `memory_pool` of the configuration file
    #[arg(long, value_name = "POOL")]
    pub memory_pool: Option<String>,
    /// Switches a transformation off, by its name in the receipt; repeatable
    #[arg(long, value_name = "NAME")]
    pub without: Vec<String>,
    /// When kernels are tuned, from O2 on: off (results in the cache are not used either), cached (nothing is
    /// tuned, but results in the cache are used), background, exhaustive (all kernels, before the first run),
    /// or a budget in seconds. Default: HALCYON_TUNING, else `tuning` of the configuration file, else
    /// exhaustive at O3 and cached at O2
    #[arg(long, value_name = "MODE")]
    pub tuning: Option<String>,
    /// File for the results of tuning. Default: HALCYON_TUNING_CACHE (off for none), else
    /// `tuning_cache` of the configuration file, else tuning.json in the cache directory
    #[arg(long, alias = "cache", value_name = "FILE")]
    pub tuning_cache: Option<PathBuf>,
}

impl BackendArgs {
    pub(crate) fn kind(&self) -> Result<BackendType> {
        Ok(self.parse_device()?.backend)
    }

    /// The backend, and the number of its device if it is given.
    #[cfg(feature = "ort")]
    pub(crate) fn named(&self) -> Result<(BackendType, Option<usize>)> {
        self.parse_device().map(|d| (d.backend, d.index))
    }

    fn parse_device(&self) -> Result<DeviceName> {
        parse_device(&self.backend, self.device)
    }

    pub(crate) fn level(&self) -> Result<Level> {
        self.level.parse()
    }

    fn precision(&self) -> Result<Option<AmpPolicy>> {
        self.precision.as_deref().map(str::parse).transpose()
    }

    fn matmul_precision(&self) -> Result<Option<MatmulPrecision>> {
        self.matmul_precision.as_deref().map(str::parse).transpose()
    }

    fn tuning(&self) -> Result<Option<TuningMode>> {
        self.tuning.as_deref().map(str::parse).transpose()
    }

    /// Opens the device.
    pub(crate) fn open(&self, profile: bool) -> Result<Backend> {
        self.open_at(self.level()?, None, profile)
    }

    /// Like [`BackendArgs::open`], at `level` and with the transformation `without` switched off too.
    pub(crate) fn open_at(&self, level: Level, without: Option<&str>, profile: bool) -> Result<Backend> {
        let backend = self.builder(level, without, profile)?.build()?;
        report::tuning_warnings(&backend);
        print_warnings(&backend);
        Ok(backend)
    }

    /// The builder with these settings; opens no device.
    pub(crate) fn builder(
        &self,
        level: Level,
        without: Option<&str>,
        profile: bool,
    ) -> Result<BackendBuilder> {
        let DeviceName { backend, index } = self.parse_device()?;
        let mut b = Backend::builder().backend_type(backend).level(level).profile(profile);
        if let Some(n) = index {
            b = b.device(n);
        }
        if let Some(p) = &self.backends {
            b = b.policy(p.parse()?);
        }
        if let Some(f) = &self.fallback {
            b = b.fallback(f.parse()?);
        }
        if let Some(n) = self.threads {
            b = b.num_threads(n);
        }
        if let Some(p) = self.precision()? {
            b = b.amp(p);
        }
        b = b.force_amp(self.force_precision);
        if let Some(p) = self.matmul_precision()? {
            b = b.precision(p);
        }
        if let Some(s) = &self.memory_limit {
            b = b.memory_limit(bytes(s)?);
        }
        if let Some(m) = self.tuning()? {
            b = b.tuning(m);
        }
        if let Some(f) = &self.tuning_cache {
            b = b.autotuning_cache_file(f);
        }
        if let Some(p) = &self.memory_pool {
            b = b.memory_pool(p.parse()?);
        }
        for name in self.without.iter().map(String::as_str).chain(without) {
            b = b.without(transformation(name)?);
        }
        Ok(b)
    }

    /// Checks the arguments as [`BackendArgs::open`] does, without opening a device. Refuses level O3, for
    /// commands that do not quantise a model.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_with_o3()?;
        match self.level()? {
            Level::O3 => Err(Error::unsupported(
                "level O3 in this command",
                "Use `halcyon run --level O3`, or `halcyon optimize` and this command on the written model",
            )),
            _ => Ok(()),
        }
    }

    /// Like [`BackendArgs::check`], for commands that quantise a model at level O3.
    pub(crate) fn check_with_o3(&self) -> Result<()> {
        self.kind()?;
        self.level()?;
        self.precision()?;
        self.matmul_precision()?;
        self.tuning()?;
        self.backends.as_deref().map(str::parse::<Policy>).transpose()?;
        self.fallback.as_deref().map(str::parse::<Fallback>).transpose()?;
        self.memory_limit.as_deref().map(bytes).transpose()?;
        self.memory_pool.as_deref().map(str::parse::<MemoryPoolConfig>).transpose()?;
        self.without.iter().try_for_each(|n| transformation(n).map(drop))
    }
}

/// Parses a device number. If a name was given by mistake, the error says which option takes it.
pub(crate) fn device_number(s: &str) -> std::result::Result<usize, String> {
    s.parse().map_err(|_| match s.parse::<DeviceName>() {
        Ok(_) => format!("--device takes a number; for a backend's name use --backend {s}"),
        Err(_) => "--device takes a number that `halcyon devices` lists; names go to --backend".into(),
    })
}

/// Prints which backend options have no effect; plans warn about mixed precision. Each line is printed once,
/// although a command may open a device several times.
pub(crate) fn print_warnings(b: &Backend) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(|e| e.into_inner());
    for w in b.warnings().iter().filter(|w| !w.starts_with(passes::MIXED)) {
        if said.insert(w.clone()) {
            report::warn(w);
        }
    }
}

/// Parses the name of a device or backend. `device` is the number of the device if it was given separately.
pub(crate) fn parse_device(backend: &str, device: Option<usize>) -> Result<DeviceName> {
    let d: DeviceName = backend.parse()?;
    match (d.index, device) {
        (Some(i), Some(n)) if i != n => Err(Error::argument(
            "--device",
            format!("{n} differs from the device {i} of --backend {backend}; give one of them"),
        )),
        (i, n) => Ok(DeviceName { index: i.or(n), ..d }),
    }
}

fn transformation(name: &str) -> Result<&'static str> {
    passes::ALL.iter().find(|t| **t == name).copied().ok_or_else(|| {
        Error::argument(
            "--without",
            format!("\"{name}\" is not a transformation; the transformations are {}", passes::ALL.join(", ")),
        )
    })
}

/// Parses `4096`, `512M`, `2G`.
fn bytes(s: &str) -> Result<u64> {
    hal::pool::size(s).ok_or_else(|| {
        Error::argument("--memory-limit", format!("\"{s}\" is not a size; write 4096, 512M or 2G"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes("4096").ok(), Some(4096));
        assert_eq!(bytes("512M").ok(), Some(512 << 20));
        for bad in ["", "G", "-1", "1.5G", "99999999999G"] {
            assert_eq!(bytes(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }

    #[test]
    fn transformations_are_known_by_name() {
        assert!(transformation("fusion").is_ok());
        assert!(transformation("luck").unwrap_err().to_string().contains("constant folding"));
    }
}

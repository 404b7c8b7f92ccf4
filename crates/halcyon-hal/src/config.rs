//! The user's configuration file, TOML:
//!
//! ```toml
//! backends = "torchbridge"     # or ["cuda", "cpu"]
//! fallback = "never"           # or "next", "cpu"
//! tuning = "background"        # or "off", "cached", "exhaustive", a budget in seconds ("30")
//! tuning_cache = "/home/me/tuning.json"
//! memory_pool = "best-fit:2GiB,defragment"    # or a table: strategy, initial_size, max_size, defragment
//! ```
//!
//! It is the file named by `HALCYON_CONFIG` (`off` for none), else `halcyon/config.toml` in the user's
//! configuration directory.

use crate::policy::{Fallback, Policy};
use crate::pool::MemoryPoolConfig;
use crate::tune::TuningMode;
use crate::{Error, Result};
use halcyon_host::input::{self, InputError};
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Names the configuration file; `off` for none.
pub const VARIABLE: &str = "HALCYON_CONFIG";

/// The settings of the file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub backends: Option<Policy>,
    pub fallback: Option<Fallback>,
    pub tuning: Option<TuningMode>,
    pub tuning_cache: Option<PathBuf>,
    pub memory_pool: Option<MemoryPoolConfig>,
}

/// The path of the file, and whether the user named it.
fn path() -> Option<(PathBuf, bool)> {
    match std::env::var_os(VARIABLE) {
        Some(v) if v.is_empty() || v.eq_ignore_ascii_case("off") => return None,
        Some(v) => return Some((v.into(), true)),
        None => {}
    }
    let var = |n: &str| std::env::var_os(n).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = if cfg!(target_os = "windows") {
        var("APPDATA")
    } else if cfg!(target_os = "macos") {
        var("HOME").map(|h| h.join("Library/Application Support"))
    } else {
        var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|h| h.join(".config")))
    };
    base.map(|b| (b.join("halcyon").join("config.toml"), false))
}

/// The file's path and settings; `None` if there is no file.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read, and for a file that `HALCYON_CONFIG` names but that does not
/// exist (a file in the default place to which access is denied is ignored, with a warning);
/// [`Error::Format`] for invalid TOML or unknown settings.
pub fn load() -> Result<Option<(PathBuf, Config)>> {
    let Some((path, named)) = path() else { return Ok(None) };
    let text = match input::text_of(&path, input::TEXT) {
        Ok(t) => t,
        Err(InputError::Io(e)) if !named && is_absent(e.kind()) => {
            if e.kind() == ErrorKind::PermissionDenied {
                tracing::warn!(path = %path.display(), "the configuration file cannot be read and is ignored");
            }
            return Ok(None);
        }
        Err(InputError::Io(e)) if named => {
            let what = format!("{e}; {VARIABLE} names this file");
            return Err(Error::Io { path: path.display().to_string(), what });
        }
        Err(e) => return Err(e.error(&path)),
    };
    match parse(&text) {
        Ok(c) => {
            tracing::info!(path = %path.display(), "configuration read");
            Ok(Some((path, c)))
        }
        Err(what) => Err(Error::Format { file: path.display().to_string(), what }),
    }
}

/// Whether the error means that the user has no such file: no file, a home directory that is not a directory
/// or belongs to another user, a system without files.
fn is_absent(kind: ErrorKind) -> bool {
    use ErrorKind::*;
    matches!(kind, NotFound | NotADirectory | PermissionDenied | Unsupported)
}

fn parse(text: &str) -> std::result::Result<Config, String> {
    toml::from_str(text).map_err(|e: toml::de::Error| {
        let line = e.span().and_then(|s| Some(text.get(..s.start)?.matches('\n').count() + 1));
        match line {
            Some(n) => format!("line {n}: {}", e.message()),
            None => e.message().to_string(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackendType;

    #[test]
    fn files_set_orders_as_text_or_list() {
        let c = parse("backends = \"torchbridge\"\nfallback = \"never\"\n").unwrap();
        assert_eq!(c.backends.map(|p| p.name().to_string()).as_deref(), Some("torchbridge"));
        assert_eq!(c.fallback, Some(Fallback::Never));
        let c = parse("backends = [\"amd\", \"cpu\"]").unwrap();
        assert_eq!(c.backends.unwrap().backends(), [BackendType::Rocm, BackendType::Cpu]);
        let c = parse("tuning = \"30\"\ntuning_cache = \"/tmp/t.json\"").unwrap();
        assert_eq!(c.tuning, Some(TuningMode::Budget(std::time::Duration::from_secs(30))));
        assert_eq!(c.tuning_cache, Some("/tmp/t.json".into()));
        assert_eq!(parse("").unwrap(), Config::default());
        let text = parse("memory_pool = \"buddy:64MiB..1GiB\"").unwrap().memory_pool;
        let table = "[memory_pool]\nstrategy = \"buddy\"\ninitial_size = \"64M\"\nmax_size = 1073741824";
        assert_eq!(parse(table).unwrap().memory_pool, text);
        assert_eq!(text.map(|c| (c.initial_size, c.max_size)), Some((64 << 20, Some(1 << 30))));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("backend = \"cpu\"", "backend"),
            ("backends = [\"cpu\", \"cpu\"]", "twice"),
            ("backends = \"cpux\"", "cpux"),
            ("fallback = \"maybe\"", "maybe"),
            ("tuning = \"often\"", "often"),
            ("memory_pool = \"slab\"", "memory pool"),
            ("backends =", "line 1"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        }
    }
}

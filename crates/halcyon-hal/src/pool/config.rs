//! Settings of a pool: the type, its text form and its form in the configuration file.

use crate::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a pool obtains the memory of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllocationStrategy {
    /// Each buffer is an allocation of the driver. Freed allocations are kept and reused.
    #[default]
    Exclusive,
    /// Ranges of large chunks: the smallest free range that fits.
    BestFit,
    /// Ranges of large chunks: the first free range that fits.
    FirstFit,
    /// Ranges of large chunks, in powers of two that are split and merged (buddy allocator).
    Buddy,
}

/// The strategies and their names.
const STRATEGIES: [(AllocationStrategy, &str); 4] = [
    (AllocationStrategy::Exclusive, "exclusive"),
    (AllocationStrategy::BestFit, "best-fit"),
    (AllocationStrategy::FirstFit, "first-fit"),
    (AllocationStrategy::Buddy, "buddy"),
];

impl fmt::Display for AllocationStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STRATEGIES.iter().find(|(s, _)| s == self).map_or("", |(_, n)| n))
    }
}

impl FromStr for AllocationStrategy {
    type Err = Error;
    /// Case does not matter, and the words of a name may be joined by `-`, `_` or nothing.
    fn from_str(s: &str) -> Result<Self> {
        let plain = |s: &str| s.trim().to_ascii_lowercase().replace(['-', '_'], "");
        STRATEGIES.iter().find(|(_, n)| plain(n) == plain(s)).map(|(s, _)| *s).ok_or_else(|| {
            let names = STRATEGIES.map(|(_, n)| n).join(", ");
            Error::argument("memory pool", format!("\"{s}\" is not a strategy; there are {names}"))
        })
    }
}

/// Settings of a device's memory pool. Text forms: `best-fit`, `best-fit:512MiB` (maximum size),
/// `buddy:64MiB..2GiB` (initial and maximum size), `buddy:64MiB..` (initial size), each optionally followed
/// by `,defragment`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct MemoryPoolConfig {
    /// Bytes obtained from the driver when the device is opened; must be 0 for `Exclusive`.
    pub initial_size: u64,
    /// Maximum bytes obtained from the driver: live buffers, kept allocations and unused parts of chunks. If
    /// [`crate::Options::memory_limit`] is set too, the smaller value counts. If neither is set, the device's
    /// memory is the limit.
    pub max_size: Option<u64>,
    pub strategy: AllocationStrategy,
    /// Moves buffers together when no free range fits a request, but the free memory would suffice in total.
    pub defragment: bool,
}

impl MemoryPoolConfig {
    pub fn new(strategy: AllocationStrategy) -> MemoryPoolConfig {
        MemoryPoolConfig { strategy, ..MemoryPoolConfig::default() }
    }

    /// Rejects contradictory settings.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::argument("memory pool", what));
        let exclusive = self.strategy == AllocationStrategy::Exclusive;
        match self.max_size {
            Some(0) => return wrong("the limit of a pool must be above 0 bytes".into()),
            Some(max) if self.initial_size > max => {
                return wrong(format!(
                    "the initial size, {} bytes, is above the maximum, {max}",
                    self.initial_size
                ));
            }
            _ => {}
        }
        if exclusive && self.initial_size > 0 {
            return wrong(
                "the strategy exclusive does not allocate in advance; choose another, or no initial size"
                    .into(),
            );
        }
        if exclusive && self.defragment {
            return wrong("the strategy exclusive has no ranges that could be moved; choose another".into());
        }
        Ok(())
    }
}

/// Suffixes of sizes, each also accepted with `iB` or `B`.
const UNITS: [(&str, u32); 4] = [("k", 10), ("m", 20), ("g", 30), ("t", 40)];

/// Parses a size in bytes: `4096`, `512M`, `512MiB`, `2G` (powers of 1024).
pub fn size(s: &str) -> Option<u64> {
    let t = s.trim().to_ascii_lowercase();
    let t = t.strip_suffix("ib").or(t.strip_suffix('b')).unwrap_or(&t);
    let unit = UNITS.iter().find_map(|(u, shift)| Some((t.strip_suffix(u)?, *shift)));
    let (digits, shift) = unit.unwrap_or((t, 0));
    digits.trim_end().parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl FromStr for MemoryPoolConfig {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let (rest, defragment) = match s.split_once(',') {
            Some((rest, "defragment" | "defrag")) => (rest, true),
            Some((_, other)) => {
                let what = format!("\"{other}\" in \"{s}\" is not a setting; the only one is defragment");
                return Err(Error::argument("memory pool", what));
            }
            None => (s, false),
        };
        let (strategy, sizes) = match rest.split_once(':') {
            Some((a, b)) => (a, Some(b)),
            None => (rest, None),
        };
        let bytes = |t: &str| {
            size(t).ok_or_else(|| {
                Error::argument(
                    "memory pool",
                    format!("\"{t}\" in \"{s}\" is not a size; write 4096, 512MiB or 2G"),
                )
            })
        };
        let mut c = MemoryPoolConfig { defragment, ..MemoryPoolConfig::new(strategy.parse()?) };
        match sizes.map(|t| t.split_once("..").map_or((None, t), |(a, b)| (Some(a), b))) {
            None => {}
            Some((first, most)) => {
                c.initial_size = first.map(bytes).transpose()?.unwrap_or(0);
                c.max_size = (!most.is_empty()).then(|| bytes(most)).transpose()?;
            }
        }
        c.check()?;
        Ok(c)
    }
}

impl fmt::Display for MemoryPoolConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.strategy)?;
        match (self.initial_size, self.max_size) {
            (0, None) => {}
            (0, Some(max)) => write!(f, ":{max}")?,
            (first, max) => {
                write!(f, ":{first}..")?;
                max.iter().try_for_each(|m| write!(f, "{m}"))?;
            }
        }
        f.write_str(if self.defragment { ",defragment" } else { "" })
    }
}

impl<'de> Deserialize<'de> for MemoryPoolConfig {
    /// Accepts a table of the fields, or the text form.
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Bytes {
            Number(u64),
            Text(String),
        }
        #[derive(Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct Table {
            initial_size: Option<Bytes>,
            max_size: Option<Bytes>,
            strategy: AllocationStrategy,
            #[serde(alias = "enable_defrag")]
            defragment: bool,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Text(String),
            Table(Table),
        }
        use serde::de::Error as _;
        let bytes = |b: Option<Bytes>| match b {
            None => Ok(None),
            Some(Bytes::Number(n)) => Ok(Some(n)),
            Some(Bytes::Text(t)) => {
                size(&t).map(Some).ok_or_else(|| D::Error::custom(format!("\"{t}\" is not a size")))
            }
        };
        let c = match Form::deserialize(d)? {
            Form::Text(t) => t.parse().map_err(|e| D::Error::custom(format!("{e}")))?,
            Form::Table(t) => MemoryPoolConfig {
                initial_size: bytes(t.initial_size)?.unwrap_or(0),
                max_size: bytes(t.max_size)?,
                strategy: t.strategy,
                defragment: t.defragment,
            },
        };
        c.check().map_err(D::Error::custom)?;
        Ok(c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_text_and_tables() {
        let c: MemoryPoolConfig = "best-fit:512MiB".parse().unwrap();
        assert_eq!(
            (c.strategy, c.max_size, c.initial_size),
            (AllocationStrategy::BestFit, Some(512 << 20), 0)
        );
        let d: MemoryPoolConfig = "Buddy:64M..2G,defragment".parse().unwrap();
        assert_eq!((d.initial_size, d.max_size, d.defragment), (64 << 20, Some(2 << 30), true));
        assert_eq!("first_fit:1K..".parse::<MemoryPoolConfig>().unwrap().initial_size, 1024);
        for c in [c, d, MemoryPoolConfig::default()] {
            assert_eq!(c.to_string().parse::<MemoryPoolConfig>().unwrap(), c);
            assert_eq!(
                serde_json::from_str::<MemoryPoolConfig>(&serde_json::to_string(&c).unwrap()).unwrap(),
                c
            );
        }
        let t: MemoryPoolConfig =
            toml::from_str("strategy = \"best-fit\"\nmax_size = \"1GiB\"\nenable_defrag = true").unwrap();
        assert_eq!(t, "best-fit:1G,defragment".parse().unwrap());
        assert_eq!([size("7"), size("3 kb"), size("1.5G"), size("")], [Some(7), Some(3072), None, None]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("slab", "exclusive, best-fit"),
            ("best-fit:lots", "lots"),
            ("best-fit:2G..1G", "above the maximum"),
            ("exclusive:1M..2M", "in advance"),
            ("exclusive,defragment", "moved"),
            ("buddy,fast", "fast"),
            ("buddy:0", "0 bytes"),
        ] {
            let e = text.parse::<MemoryPoolConfig>().unwrap_err();
            assert!(e.to_string().contains(part) && e.exit_code() == 2, "{text}: {e}");
        }
    }
}

//! The order in which selection tries backends, and the fallback if the requested backend is not available.

use crate::{BackendType, Error, Result, backend};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// An order of backends: by priority, one of [`POLICIES`], or a list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Spelling", into = "String")]
pub struct Policy {
    name: String,
    backends: Vec<BackendType>,
}

/// An order that has a name.
#[derive(Debug)]
pub struct NamedPolicy {
    pub name: &'static str,
    /// The backends in the order in which they are tried.
    pub backends: &'static [BackendType],
    pub about: &'static str,
}

/// The name of the default order, which follows the priorities of the backends (see [`backend::BUILT_IN`]).
pub const BY_PRIORITY: &str = "priority";

/// The named orders besides [`BY_PRIORITY`].
pub const POLICIES: &[NamedPolicy] = {
    use BackendType::*;
    &[
        NamedPolicy {
            name: "torchbridge",
            backends: &[Cuda, Rocm, Metal, Intel, Tpu, OpenCl, WebGpu, Cpu],
            about: "the order of priorities, but with Intel before TPU",
        },
        NamedPolicy {
            name: "torch",
            backends: &[Cuda, Rocm, Metal, Cpu],
            about: "CUDA, ROCm and Metal, as in PyTorch; then the CPU",
        },
        NamedPolicy {
            name: "inference",
            backends: &[Cuda, Rocm, Metal, OpenCl, WebGpu, Cpu],
            about: "GPUs, ordered by the API that they are programmed with, then the CPU",
        },
        NamedPolicy {
            name: "vendors",
            backends: &[Cuda, Rocm, Tpu, Intel, Cpu],
            about: "by vendor: NVIDIA, AMD, Google, Intel; then the CPU",
        },
    ]
};

impl Default for Policy {
    /// The backends of [`backend::all`] that have a priority, highest first.
    fn default() -> Policy {
        let mut backends = backend::all();
        backends.retain(|b| b.row().priority.is_some());
        backends.sort_by_key(|b| std::cmp::Reverse(b.row().priority));
        Policy { name: BY_PRIORITY.into(), backends }
    }
}

impl Policy {
    /// An order chosen by the caller.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty list, a repeated backend, and `auto`.
    pub fn of(backends: &[BackendType]) -> Result<Policy> {
        let bad = |what: String| Err(Error::argument("backends", what));
        if backends.is_empty() {
            return bad("an order of backends must name at least one backend".into());
        }
        for (i, b) in backends.iter().enumerate() {
            if *b == BackendType::Auto {
                return bad("an order of backends cannot contain \"auto\", which is not a backend".into());
            }
            if backends[..i].contains(b) {
                return bad(format!("\"{b}\" is named twice in the order"));
            }
        }
        let name = backends.iter().map(|b| b.id()).collect::<Vec<_>>().join(",");
        Ok(Policy { name, backends: backends.to_vec() })
    }

    /// The name or the list as text: `priority`, `torchbridge`, `cuda,cpu`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the caller listed the backends one by one. If so, software devices are tried at the place of
    /// their backend in the list, not after all other devices.
    pub fn is_list(&self) -> bool {
        self.name != BY_PRIORITY && POLICIES.iter().all(|p| p.name != self.name)
    }

    /// The backends in the order in which they are tried. Of the other backends, only the CPU can be chosen
    /// ([`Fallback::Cpu`]).
    pub fn backends(&self) -> &[BackendType] {
        &self.backends
    }
}

impl FromStr for Policy {
    type Err = Error;
    /// A name of [`POLICIES`], `priority`, or backends separated by commas.
    fn from_str(s: &str) -> Result<Policy> {
        let name = s.trim().to_ascii_lowercase();
        if name == BY_PRIORITY {
            return Ok(Policy::default());
        }
        if let Some(p) = POLICIES.iter().find(|p| p.name == name) {
            return Ok(Policy { name, backends: p.backends.to_vec() });
        }
        let parts: Vec<&str> = name.split(',').map(str::trim).filter(|p| !p.is_empty()).collect();
        let list = parts.iter().map(|p| p.parse()).collect::<Result<Vec<BackendType>>>().map_err(|e| {
            let names: Vec<&str> = POLICIES.iter().map(|p| p.name).collect();
            Error::argument(
                "backends",
                format!("{e}; the named orders are {BY_PRIORITY}, {}", names.join(", ")),
            )
        })?;
        Policy::of(&list)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The form of an order in a file: a string for [`Policy::from_str`], or a list of backends.
#[derive(Deserialize)]
#[serde(untagged)]
enum Spelling {
    Text(String),
    List(Vec<String>),
}

impl TryFrom<Spelling> for Policy {
    type Error = Error;
    fn try_from(s: Spelling) -> Result<Policy> {
        match s {
            Spelling::Text(t) => t.parse(),
            Spelling::List(l) => Policy::of(&l.iter().map(|b| b.parse()).collect::<Result<Vec<_>>>()?),
        }
    }
}

impl From<Policy> for String {
    fn from(p: Policy) -> String {
        p.name
    }
}

/// What to do if the first choice does not exist, does not open, has too little memory or does not accept the
/// work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fallback {
    /// Return an error. This is the default for a named backend.
    Never,
    /// Try the next backend in the order. This is the default for `auto`.
    Next,
    /// Use the CPU.
    Cpu,
}

impl FromStr for Fallback {
    type Err = Error;
    fn from_str(s: &str) -> Result<Fallback> {
        match s.trim().to_ascii_lowercase().as_str() {
            "never" => Ok(Fallback::Never),
            "next" => Ok(Fallback::Next),
            "cpu" => Ok(Fallback::Cpu),
            _ => {
                Err(Error::argument("fallback", format!("\"{s}\" is not a fallback; use never, next or cpu")))
            }
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fallback::Never => "never",
            Fallback::Next => "next",
            Fallback::Cpu => "cpu",
        })
    }
}

/// The source of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetBy {
    /// Nobody: the setting has its default.
    Default,
    Caller,
    /// An environment variable.
    Environment(String),
    /// The configuration file.
    File(PathBuf),
}

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetBy::Default => f.write_str("the default"),
            SetBy::Caller => f.write_str("the caller's"),
            SetBy::Environment(name) => f.write_str(name),
            SetBy::File(path) => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_parse_and_have_no_backend_twice() {
        for p in POLICIES {
            assert_eq!(Policy::of(p.backends).unwrap().backends(), p.backends);
            assert_eq!(p.name.to_uppercase().parse::<Policy>().unwrap().backends(), p.backends);
            assert_eq!(p.backends.last(), Some(&BackendType::Cpu), "{}", p.name);
        }
        let all = Policy::default();
        assert_eq!(all, "priority".parse().unwrap());
        assert_eq!(all.backends().first(), Some(&BackendType::Cuda));
        let chosen = backend::BUILT_IN.iter().filter(|b| b.row.priority.is_some()).count();
        assert_eq!(all.backends().len(), chosen);
        let p: Policy = " Vulkan, nvidia ,host".parse().unwrap();
        assert_eq!((p.name(), p.backends().len()), ("webgpu,cuda,cpu", 3));
        let lists =
            ["opencl", "opencl,cpu", "priority", "inference"].map(|p| p.parse::<Policy>().unwrap().is_list());
        assert_eq!(lists, [true, true, false, false]);
    }

    #[test]
    fn wrong_orders_say_what_is_wrong() {
        for (text, part) in [
            ("", "at least one"),
            ("cuda,auto", "\"auto\""),
            ("cuda,cpu,nvidia", "\"cuda\" is named twice"),
            ("torchbrige", "torchbridge"),
        ] {
            let e = text.parse::<Policy>().unwrap_err();
            assert!(e.exit_code() == 2 && e.to_string().contains(part), "{text}: {e}");
        }
        assert!("sometimes".parse::<Fallback>().unwrap_err().to_string().contains("never, next or cpu"));
    }

    #[test]
    fn fallbacks_parse() {
        for f in [Fallback::Never, Fallback::Next, Fallback::Cpu] {
            assert_eq!(f.to_string().parse::<Fallback>().unwrap(), f);
        }
    }
}

//! Errors carry facts and the next step.

use crate::dtype::DType;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where a node came from: a caller's file and line, an ONNX node, a module path.
#[derive(Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, Default)]
pub struct Span(pub Option<Arc<str>>);

impl Span {
    pub fn new(s: impl Into<Arc<str>>) -> Span {
        Span(Some(s.into()))
    }

    /// The source location of the caller.
    #[track_caller]
    pub fn caller() -> Span {
        Span::location(std::panic::Location::caller())
    }

    pub fn location(l: &std::panic::Location<'_>) -> Span {
        Span::new(format!("{}:{}", l.file(), l.line()))
    }

    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or("")
    }
}

/// Text from a file (a name in a model, a file's name) as it is shown to people: control characters, which a
/// terminal would obey, line ends, which would begin a line of our own, and marks that turn the direction of
/// writing are written as escapes.
pub fn one_line(text: &str) -> Cow<'_, str> {
    let odd = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(odd) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if odd(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(self.0.as_deref().unwrap_or("an unnamed place")))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({self})")
    }
}

/// ` (at …)`, or nothing where the place is not known.
fn place(at: &Span) -> String {
    at.0.as_ref().map_or_else(String::new, |_| format!(" (at {at})"))
}

/// What an argument's error says. A command's own text may have lines; what quotes a model may not.
fn lines<'a>(what: &'a str, at: &Span) -> Cow<'a, str> {
    if at.0.is_some() { one_line(what) } else { Cow::Borrowed(what) }
}

/// Two devices, or one that was opened twice.
fn apart(a: &str, b: &str) -> String {
    match a == b {
        true => format!(
            "operands belong to two backends over {a}, each opened on its own; clone one Backend instead of opening another, or move \
             an operand with .to(&backend)"
        ),
        false => format!("operands are on {a} and {b}; move one with .to(&backend)"),
    }
}

/// The valid range with what is known of the index.
fn bad_index(range: &str, found: &Option<(usize, i64)>, input: &Option<String>) -> String {
    match (input, found) {
        (Some(input), _) => format!("{}; the valid range is {range}", one_line(input)),
        (None, Some((at, value))) => {
            format!("the valid range is {range}, the value at index {at} is {value}")
        }
        (None, None) => format!("the valid range is {range}"),
    }
}

/// One op that something (an importer, a device) cannot run.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct UnsupportedOp {
    pub op: String,
    /// Domain and version of the operator set it belongs to; empty for our own ops.
    pub domain: String,
    pub opset: i64,
    pub nodes: Vec<String>,
    pub backend: String,
    pub reason: String,
}

/// Nodes that the text of an error names. The value has all.
const NAMED: usize = 8;

impl fmt::Display for UnsupportedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let domain = if self.domain.is_empty() { "ai.onnx" } else { &self.domain };
        let named = self.nodes[..self.nodes.len().min(NAMED)].join(", ");
        let (op, domain) = (one_line(&self.op), one_line(domain));
        write!(f, "{op} ({domain}, opset {}) in {}", self.opset, one_line(&named))?;
        if self.nodes.len() > NAMED {
            write!(f, " and {} more", self.nodes.len() - NAMED)?;
        }
        if !self.backend.is_empty() {
            write!(f, " on {}", self.backend)?;
        }
        write!(f, ": {}", one_line(&self.reason))
    }
}

/// What went wrong, with what the reader needs to act.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not go together.
    #[error("{}: {}{}", one_line(op), one_line(what), place(at))]
    Shape { op: String, what: String, at: Span },
    /// An op asked for an element type it does not take.
    #[error("{}: element type {dtype} is not accepted, {}{}", one_line(op), one_line(want), place(at))]
    DType { op: String, dtype: DType, want: String, at: Span },
    /// An argument out of its range: with a place, of a model or of a program; without one, of the command or
    /// of a call.
    #[error("{}: {}{}", one_line(op), lines(what, at), place(at))]
    Argument { op: String, what: String, at: Span },
    /// Not supported yet; names the thing.
    #[error("not supported yet: {}. {}", one_line(what), one_line(next))]
    Unsupported { what: String, next: String },
    /// Ops of a model that cannot run, all of them.
    #[error("{} unsupported op{}:\n{}", .0.len(), if .0.len() == 1 { "" } else { "s" },
        .0.iter().map(|u| format!("  {u}")).collect::<Vec<_>>().join("\n"))]
    UnsupportedOps(Vec<UnsupportedOp>),
    /// A backend, library or device that is not there.
    #[error("{backend} is not available: {reason}. Tried: {}. {fix}",
        if .tried.is_empty() { "nothing".into() } else { .tried.join("; ") })]
    Unavailable { backend: String, tried: Vec<String>, reason: String, fix: String },
    /// The device has no room.
    #[error(
        "out of memory on {device}: {requested} bytes asked for ({what}), {free} free of {total}. {next}"
    )]
    OutOfMemory { device: String, what: String, requested: u64, free: u64, total: u64, next: String },
    /// A call into a driver failed.
    #[error("{call} failed on {device}: {code}. {next}")]
    Driver { device: String, call: String, code: String, next: String },
    /// A kernel source was refused by its compiler.
    #[error("kernel {kernel} does not compile on {device}:\n{log}")]
    Compile { device: String, kernel: String, log: String },
    /// A handle whose storage was given away.
    #[error("this tensor was donated to {by}; keep a copy or do not donate it")]
    Donated { by: Span },
    /// Two devices in one op.
    #[error("{}: {}{}", one_line(op), apart(a, b), place(at))]
    MixedDevices { op: String, a: String, b: String, at: Span },
    /// A kernel met an index outside its range (and clamped it).
    #[error("index out of range in {}{}: {}", one_line(op), place(at), bad_index(range, found, input))]
    Index {
        op: String,
        range: String,
        at: Span,
        /// Where among the indices (row-major) the first one out of range stands, and its value, where they
        /// can still be read.
        found: Option<(usize, i64)>,
        /// The model's input that holds the index, with the value and its place: `input 'ids' is 40000 at [0,
        /// 3]`.
        input: Option<String>,
    },
    /// A loop that goes on past its bound.
    #[error("{} has not ended after {iterations} iterations. {next}", one_line(node))]
    Endless { node: String, iterations: u64, next: String },
    /// The caller asked for the run to end.
    #[error("interrupted: {}", one_line(what))]
    Interrupted { what: String },
    /// A file that is not what it should be.
    #[error("{}: {}", one_line(file), one_line(what))]
    Format { file: String, what: String },
    #[error("{}: {}", one_line(path), one_line(what))]
    Io { path: String, what: String },
    /// Our own bug, with what to report.
    #[error("internal error: {0}. Please report this with the model and command that led here")]
    Internal(String),
}

impl Error {
    #[track_caller]
    pub fn shape(op: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Shape { op: op.into(), what: what.into(), at: Span::default() }
    }

    pub fn argument(op: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Argument { op: op.into(), what: what.into(), at: Span::default() }
    }

    pub fn unsupported(what: impl Into<String>, next: impl Into<String>) -> Error {
        Error::Unsupported { what: what.into(), next: next.into() }
    }

    pub fn internal(what: impl Into<String>) -> Error {
        Error::Internal(what.into())
    }

    /// Fills in the place, where it is still empty.
    pub fn at(mut self, span: &Span) -> Error {
        match &mut self {
            Error::Shape { at, .. }
            | Error::DType { at, .. }
            | Error::Argument { at, .. }
            | Error::MixedDevices { at, .. }
            | Error::Index { at, .. }
                if at.0.is_none() =>
            {
                *at = span.clone()
            }
            _ => {}
        }
        self
    }

    /// Exit code of the command: 2 usage, 3 unsupported, 4 unavailable, 5 out of memory, 130 interrupted, 1
    /// other. An argument with a place belongs to a node of a model, which no other command line mends.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::Argument { at, .. } if at.0.is_some() => 1,
            Error::Argument { .. } => 2,
            Error::Unsupported { .. } | Error::UnsupportedOps(_) => 3,
            Error::Unavailable { .. } => 4,
            Error::OutOfMemory { .. } => 5,
            Error::Interrupted { .. } => 130,
            _ => 1,
        }
    }
}

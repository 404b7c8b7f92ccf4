//! Errors. Each carries the facts and what the user can do next.

use crate::dtype::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Where a node comes from. It is shown, and serialised, as text: `file:line`, or the name.
#[derive(Clone, Default)]
pub enum Span {
    /// Nothing is known.
    #[default]
    Unknown,
    /// A line of the caller's code.
    Caller(&'static Location<'static>),
    /// An ONNX node, or text from a file. A thin pointer keeps [`Error`] small.
    Named(Arc<String>),
}

impl Span {
    /// A span with a name.
    pub fn new(name: impl Into<String>) -> Span {
        Span::Named(Arc::new(name.into()))
    }

    /// The source location of this function's caller.
    #[track_caller]
    pub fn caller() -> Span {
        Span::Caller(Location::caller())
    }

    /// Whether the origin of the node is known.
    pub fn is_known(&self) -> bool {
        !matches!(self, Span::Unknown)
    }

    /// The span's text; empty if nothing is known.
    pub fn text(&self) -> Cow<'_, str> {
        self.to_text().unwrap_or_default()
    }

    fn to_text(&self) -> Option<Cow<'_, str>> {
        match self {
            Span::Unknown => None,
            Span::Caller(l) => Some(Cow::Owned(format!("{}:{}", l.file(), l.line()))),
            Span::Named(name) => Some(Cow::Borrowed(name.as_str())),
        }
    }
}

/// Spans with equal text are equal, so the span of a line equals the named span that is read back after
/// serialisation.
impl PartialEq for Span {
    fn eq(&self, other: &Span) -> bool {
        match (self, other) {
            (Span::Caller(a), Span::Caller(b)) => (a.line(), a.file()) == (b.line(), b.file()),
            (a, b) => a.to_text() == b.to_text(),
        }
    }
}

impl Eq for Span {}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_text().serialize(s)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Span, D::Error> {
        Ok(Option::<String>::deserialize(d)?.map_or(Span::Unknown, Span::new))
    }
}

/// Text from a file (a name in a model, a file name) made safe to display on one line. Control characters,
/// line ends and marks that change the writing direction are written as escapes, so that the text can neither
/// control the terminal nor start a line of its own.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, &[])
}

/// Like [`one_line`], but leaves the characters of `keep` as they are, because a message may contain line
/// ends and tabs of its own.
pub fn escaped<'a>(text: &'a str, keep: &[char]) -> Cow<'a, str> {
    let odd = |c: char| {
        let harmful = c.is_control()
            || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        harmful && !keep.contains(&c)
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
        f.write_str(&one_line(self.to_text().as_deref().unwrap_or("an unknown location")))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({self})")
    }
}

/// ` (at …)`, or nothing if the span is empty.
fn place(at: &Span) -> String {
    if at.is_known() { format!(" (at {at})") } else { String::new() }
}

/// The text of an argument error. With a span it may quote a model, so it is put on one line. Without a span,
/// the text is Halcyon's own and keeps its line breaks.
fn lines<'a>(what: &'a str, at: &Span) -> Cow<'a, str> {
    if at.is_known() { one_line(what) } else { Cow::Borrowed(what) }
}

/// The message for operands on two devices, or on one device opened twice.
fn different_devices(a: &str, b: &str) -> String {
    match a == b {
        true => format!(
            "operands belong to two Backends that were opened separately on {a}; clone one Backend instead of \
             opening another, or move an operand with .to(&backend)"
        ),
        false => format!("operands are on {a} and {b}; move one with .to(&backend)"),
    }
}

/// The valid range, and the value and position of the bad index if known.
fn bad_index(range: &str, found: &Option<(usize, i64)>, input: &Option<String>) -> String {
    match (input, found) {
        (Some(input), _) => format!("{}; the valid range is {range}", one_line(input)),
        (None, Some((at, value))) => {
            format!("the valid range is {range}, and the value at index {at} is {value}")
        }
        (None, None) => format!("the valid range is {range}"),
    }
}

/// An op that an importer or a device cannot run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnsupportedOp {
    pub op: String,
    /// Operator-set domain; empty for ONNX's default domain, `ai.onnx`.
    pub domain: String,
    pub opset: i64,
    pub nodes: Vec<String>,
    pub backend: String,
    pub reason: String,
}

/// Maximum number of nodes named in the text of an error. [`UnsupportedOp::nodes`] holds all of them.
const MAX_NAMED: usize = 8;

impl fmt::Display for UnsupportedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let domain = if self.domain.is_empty() { "ai.onnx" } else { &self.domain };
        let named = self.nodes[..self.nodes.len().min(MAX_NAMED)].join(", ");
        let (op, domain) = (one_line(&self.op), one_line(domain));
        write!(f, "{op} ({domain}, opset {}) in {}", self.opset, one_line(&named))?;
        if self.nodes.len() > MAX_NAMED {
            write!(f, " and {} more", self.nodes.len() - MAX_NAMED)?;
        }
        if !self.backend.is_empty() {
            write!(f, " on {}", self.backend)?;
        }
        write!(f, ": {}", one_line(&self.reason))
    }
}

/// The failure, with the facts that the user needs to fix it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Incompatible shapes.
    #[error("{}: {}{}", one_line(op), one_line(what), place(at))]
    Shape { op: String, what: String, at: Span },
    /// A dtype that the op does not accept.
    #[error("{}: element type {dtype} is not accepted, {}{}", one_line(op), one_line(want), place(at))]
    DType { op: String, dtype: DType, want: String, at: Span },
    /// An invalid argument. With a span, it belongs to a node of a graph; without a span, to the command line
    /// or an API call.
    #[error("{}: {}{}", one_line(op), lines(what, at), place(at))]
    Argument { op: String, what: String, at: Span },
    /// Something that is not supported yet. `what` names it.
    #[error("not supported yet: {}. {}", one_line(what), one_line(next))]
    Unsupported { what: String, next: String },
    /// The ops of a model that the importer or the device cannot run.
    #[error("{} unsupported op{}:\n{}", .0.len(), if .0.len() == 1 { "" } else { "s" },
        .0.iter().map(|u| format!("  {u}")).collect::<Vec<_>>().join("\n"))]
    UnsupportedOps(Vec<UnsupportedOp>),
    /// A backend, library or device that is missing.
    #[error("{backend} is not available: {reason}. Tried: {}. {fix}",
        if .tried.is_empty() { "nothing".into() } else { .tried.join("; ") })]
    Unavailable { backend: String, tried: Vec<String>, reason: String, fix: String },
    /// The device does not have enough free memory.
    #[error(
        "out of memory on {device}: {requested} bytes requested ({what}), {free} free of {total}. {next}"
    )]
    OutOfMemory { device: String, what: String, requested: u64, free: u64, total: u64, next: String },
    /// A call into a driver failed.
    #[error("{call} failed on {device}: {code}. {next}")]
    Driver { device: String, call: String, code: String, next: String },
    /// A kernel source that the device's compiler rejected.
    #[error("kernel {kernel} does not compile on {device}:\n{log}")]
    Compile { device: String, kernel: String, log: String },
    /// A tensor whose storage was donated.
    #[error("this tensor was donated to {by}; keep a copy or do not donate it")]
    Donated { by: Span },
    /// Operands of one op on two devices.
    #[error("{}: {}{}", one_line(op), different_devices(a, b), place(at))]
    MixedDevices { op: String, a: String, b: String, at: Span },
    /// A kernel read an index that was out of range. It used the nearest valid index instead; for a class
    /// label it used 0.
    #[error("index out of range in {}{}: {}", one_line(op), place(at), bad_index(range, found, input))]
    Index {
        op: String,
        range: String,
        at: Span,
        /// Row-major position and value of the first bad index, if the indices can still be read.
        found: Option<(usize, i64)>,
        /// The model input that holds the index, with the value and its position: `input 'ids' is 40000 at
        /// [0, 3]`.
        input: Option<String>,
    },
    /// A loop that exceeded its maximum number of iterations.
    #[error("{} has not ended after {iterations} iterations. {next}", one_line(node))]
    Endless { node: String, iterations: u64, next: String },
    /// The caller cancelled the run.
    #[error("interrupted: {}", one_line(what))]
    Interrupted { what: String },
    /// A malformed file.
    #[error("{}: {}", one_line(file), one_line(what))]
    Format { file: String, what: String },
    #[error("{}: {}", one_line(path), one_line(what))]
    Io { path: String, what: String },
    /// A bug in Halcyon. The message asks the user to report it.
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

    /// Sets the span if the error has one and it is not known yet.
    pub fn at(mut self, span: &Span) -> Error {
        match &mut self {
            Error::Shape { at, .. }
            | Error::DType { at, .. }
            | Error::Argument { at, .. }
            | Error::MixedDevices { at, .. }
            | Error::Index { at, .. }
                if !at.is_known() =>
            {
                *at = span.clone()
            }
            _ => {}
        }
        self
    }

    /// Exit code of the command: 2 usage, 3 unsupported, 4 unavailable, 5 out of memory, 130 interrupted, 1
    /// other. An argument error with a span belongs to a node of a model. The user cannot fix it on the
    /// command line, so its code is 1, not 2.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::Argument { at, .. } if at.is_known() => 1,
            Error::Argument { .. } => 2,
            Error::Unsupported { .. } | Error::UnsupportedOps(_) => 3,
            Error::Unavailable { .. } => 4,
            Error::OutOfMemory { .. } => 5,
            Error::Interrupted { .. } => 130,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_of_the_caller_is_its_file_and_line_also_after_serialisation() {
        let (here, line) = (Span::caller(), line!());
        assert_eq!(here.text(), format!("{}:{line}", file!()));
        assert_eq!(here.to_string(), here.text());
        let json = serde_json::to_string(&here).unwrap();
        assert_eq!(json, format!("\"{}:{line}\"", file!()));
        let back: Span = serde_json::from_str(&json).unwrap();
        assert!(matches!(back, Span::Named(_)) && back == here && here != Span::caller());
        assert_eq!(serde_json::to_string(&Span::Unknown).unwrap(), "null");
        assert_eq!(serde_json::from_str::<Span>("null").unwrap(), Span::Unknown);
        assert_eq!(Span::Unknown.text(), "");
    }

    #[test]
    fn errors_take_the_first_span_that_is_known() {
        let e =
            Error::shape("add", "2 and 3").at(&Span::Unknown).at(&Span::new("fc")).at(&Span::new("other"));
        assert_eq!(e.to_string(), "add: 2 and 3 (at fc)");
    }
}

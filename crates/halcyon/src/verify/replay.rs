//! Replay files: a recorded wrong result or failure, with everything needed to run it again.
//!
//! Format: the 8 bytes `HALCRPL1`; the length of a JSON header as 8 bytes, little-endian; the header; the
//! graph as written by [`Graph::to_bytes`]; and the tensors' bytes, in the header's order and with the sizes
//! it gives. Files are not trusted: the header's sizes are checked against the file's size before the graph
//! and the tensors are parsed, and the graph is checked against its type rules.

use super::bound;
use crate::backend::{Backend, BackendBuilder};
use crate::optable::check::{Errors, Wrong};
use halcyon_hal::BackendType;
use halcyon_host::input;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::autocast::KeptInF32;
use halcyon_ir::passes::{AmpPolicy, Level};
use halcyon_ir::shape::TensorType;
use halcyon_ir::target::MatmulPrecision;
use halcyon_ir::{ConstData, DType, Graph};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// The first bytes of a file, with the format version.
const MAGIC: &[u8; 8] = b"HALCRPL1";
/// Maximum bytes of a header.
const MAX_HEADER: u64 = 16 << 20;
/// Maximum bytes of a file.
const MAX_FILE: u64 = 16 << 30;
/// Maximum number of tensors in a file.
const MAX_TENSORS: usize = 1 << 16;

/// Where the recorded work ran, and what went wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplayOrigin {
    /// Version of Halcyon that wrote the file.
    pub halcyon: String,
    pub backend: BackendType,
    /// Index of the device in its backend; `device` is its name.
    pub index: usize,
    pub device: String,
    /// Version of the device's driver.
    pub driver: Option<String>,
    pub level: Level,
    pub precision: MatmulPrecision,
    /// The mixed-precision policy; `None` for a step, whose graph already contains the casts.
    pub amp: AmpPolicy,
    /// The work that stayed in f32 under the policy.
    #[serde(default)]
    pub kept: KeptInF32,
    /// Transformations that were disabled.
    pub without: BTreeSet<String>,
    /// Number of the plan's step; `None` for a whole graph.
    pub step: Option<usize>,
    /// Name of the op in the plan.
    pub op: String,
    /// Names of the kernels that ran.
    pub kernel: String,
    /// Origin of the op: an ONNX node, or a file and line.
    pub span: String,
    /// The backend that computed the expected results.
    pub reference: Option<String>,
    /// Seed of the random sample that found the problem.
    pub seed: Option<u64>,
    /// Description of the difference.
    pub wrong: Option<String>,
    /// The largest differences found.
    pub errors: Option<Errors>,
    /// The error, if the work failed.
    pub failure: Option<String>,
}

impl ReplayOrigin {
    /// Describes work on a backend; the caller adds what went wrong.
    pub(super) fn of(b: &Backend) -> ReplayOrigin {
        let (info, o) = (b.info(), b.lower_options());
        ReplayOrigin {
            halcyon: env!("CARGO_PKG_VERSION").into(),
            backend: info.backend,
            index: info.index,
            device: info.name.clone(),
            driver: info.driver_version.clone(),
            level: b.level(),
            precision: o.precision,
            amp: AmpPolicy::None,
            kept: o.passes.kept,
            without: o.passes.without,
            step: None,
            op: String::new(),
            kernel: String::new(),
            span: String::new(),
            reference: None,
            seed: None,
            wrong: None,
            errors: None,
            failure: None,
        }
    }

    /// The settings of the backend that the work ran on; opens nothing.
    pub fn backend(&self) -> BackendBuilder {
        let b = Backend::builder()
            .backend_type(self.backend)
            .device(self.index)
            .level(self.level)
            .precision(self.precision)
            .amp(self.amp)
            .amp_kept(self.kept);
        self.without.iter().fold(b, |b, t| b.without(t))
    }
}

/// A recorded wrong result or failure.
#[derive(Clone, Debug)]
pub struct Replay {
    pub about: ReplayOrigin,
    /// The graph, without symbols and run-time arguments.
    pub graph: Graph,
    /// Values of the graph's inputs.
    pub inputs: Vec<ConstData>,
    /// The device's results; empty if the work failed.
    pub got: Vec<ConstData>,
    /// The reference's results; empty if the reference was not run.
    pub expected: Vec<ConstData>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    about: ReplayOrigin,
    graph_bytes: u64,
    tensors: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    role: Role,
    dtype: DType,
    dims: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    Input,
    Got,
    Expected,
}

impl Entry {
    /// Size in bytes; `None` on overflow.
    fn bytes(&self) -> Option<u64> {
        let n = self.dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let bits = (n as u64).checked_mul(self.dtype.bits() as u64)?;
        Some(bits.div_ceil(8))
    }
}

impl Replay {
    /// Serialises the file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the file would exceed its maximum size.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let graph = self.graph.to_bytes()?;
        let roles = [(Role::Input, &self.inputs), (Role::Got, &self.got), (Role::Expected, &self.expected)];
        let all: Vec<(Role, &ConstData)> =
            roles.into_iter().flat_map(|(r, v)| v.iter().map(move |c| (r, c))).collect();
        let header = Header {
            about: self.about.clone(),
            graph_bytes: graph.len() as u64,
            tensors: all
                .iter()
                .map(|(role, c)| Entry { role: *role, dtype: c.dtype, dims: c.dims.to_vec() })
                .collect(),
        };
        let header = serde_json::to_vec(&header)
            .map_err(|e| Error::internal(format!("a replay does not serialise: {e}")))?;
        let data: u64 = all.iter().map(|(_, c)| c.bytes().len() as u64).sum();
        let total = (graph.len() as u64).saturating_add(data).saturating_add(16 + header.len() as u64);
        if header.len() as u64 > MAX_HEADER || total > MAX_FILE || all.len() > MAX_TENSORS {
            return Err(Error::unsupported(
                format!("a replay file of {total} bytes with {} tensors", all.len()),
                format!(
                    "At most {MAX_FILE} bytes and {MAX_TENSORS} tensors are allowed; run the model on smaller inputs"
                ),
            ));
        }
        let mut out = Vec::with_capacity(total as usize);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(header.len() as u64).to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(&graph);
        all.iter().for_each(|(_, c)| out.extend_from_slice(c.bytes()));
        Ok(out)
    }

    /// Parses a file. `name` is used in error messages.
    ///
    /// # Errors
    /// [`Error::Format`] if this is not a replay file of this version, or it is damaged.
    pub fn from_bytes(b: &[u8], name: &str) -> Result<Replay> {
        let bad = |what: String| Error::Format { file: name.into(), what };
        if b.get(..8) != Some(MAGIC) {
            return Err(bad("not a replay file of this version (it does not begin with HALCRPL1)".into()));
        }
        let size: [u8; 8] = b
            .get(8..16)
            .and_then(|s| s.try_into().ok())
            .ok_or_else(|| bad("it ends within the header's length".into()))?;
        let rest = &b[16..];
        let length = u64::from_le_bytes(size);
        if length > MAX_HEADER || length > rest.len() as u64 {
            return Err(bad(format!(
                "its header should have {length} bytes; {} bytes follow, and at most {MAX_HEADER} are allowed",
                rest.len()
            )));
        }
        let (header, data) = rest.split_at(length as usize);
        let header: Header = serde_json::from_slice(header).map_err(|e| bad(format!("header: {e}")))?;
        if header.tensors.len() > MAX_TENSORS {
            return Err(bad(format!(
                "it has {} tensors, but at most {MAX_TENSORS} are allowed",
                header.tensors.len()
            )));
        }
        // Check all sizes before reading any data.
        let mut total = header.graph_bytes;
        for e in &header.tensors {
            let n = e
                .bytes()
                .ok_or_else(|| bad(format!("the size of a tensor of shape {:?} overflows", e.dims)))?;
            total = total.checked_add(n).ok_or_else(|| bad("the sum of its sizes overflows".into()))?;
        }
        if total != data.len() as u64 {
            return Err(bad(format!("it has {} bytes of data, but its header says {total}", data.len())));
        }
        let (graph, mut data) = data.split_at(header.graph_bytes as usize);
        let graph = Graph::from_bytes(graph).map_err(|e| bad(format!("its graph: {e}")))?;
        let mut replay = Replay { about: header.about, graph, inputs: vec![], got: vec![], expected: vec![] };
        for e in &header.tensors {
            let n = e.bytes().unwrap_or(0) as usize;
            let (own, rest) = data.split_at(n);
            data = rest;
            let c = ConstData::new(e.dtype, &e.dims, Arc::new(own.to_vec()))
                .map_err(|e| bad(format!("a tensor: {e}")))?;
            match e.role {
                Role::Input => replay.inputs.push(c),
                Role::Got => replay.got.push(c),
                Role::Expected => replay.expected.push(c),
            }
        }
        replay.check().map_err(bad)?;
        Ok(replay)
    }

    /// Checks that graph and tensors match; the error names what does not match.
    fn check(&self) -> std::result::Result<(), String> {
        let g = &self.graph;
        if !g.args().is_empty() || !g.symbols().is_empty() {
            return Err("its graph has symbols or run-time arguments".into());
        }
        let fits = |what: &str, nodes: Vec<&TensorType>, data: &[ConstData]| {
            let same = nodes.len() == data.len()
                && nodes.iter().zip(data).all(|(t, c)| **t == TensorType::new(c.dtype, &c.dims));
            if same { Ok(()) } else { Err(format!("the types of its {what} are not those of the graph")) }
        };
        let outputs = || g.outputs().iter().map(|o| g.ty(o.node)).collect::<Vec<_>>();
        fits("inputs", g.inputs().iter().map(|i| g.ty(i.node)).collect(), &self.inputs)?;
        for (what, data) in [("results", &self.got), ("expected results", &self.expected)] {
            if !data.is_empty() {
                fits(what, outputs(), data)?;
            }
        }
        if g.outputs().is_empty() { Err("its graph has no output".into()) } else { Ok(()) }
    }

    /// Writes a file, replacing an existing one. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::Io`], and the errors of [`Replay::to_bytes`].
    pub fn write(&self, path: &Path) -> Result<u64> {
        let b = self.to_bytes()?;
        halcyon_host::output::write(path, &b)?;
        Ok(b.len() as u64)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] as for [`Replay::from_bytes`].
    pub fn read(path: &Path) -> Result<Replay> {
        let name = path.display().to_string();
        // The size limit is large, so reject unbounded files such as pipes first.
        match std::fs::metadata(path) {
            Ok(m) if !m.is_file() => return Err(Error::Io { path: name, what: "not a regular file".into() }),
            _ => {}
        }
        let bytes = input::bytes(path, MAX_FILE).map_err(|e| e.error(path))?;
        Replay::from_bytes(&bytes, &name)
    }

    /// Runs the work again on a backend and on the reference (at level O0), and compares the results.
    ///
    /// # Errors
    /// [`Error::Argument`] if the reference is not at level O0; errors of computing the tolerance. If the
    /// work fails on the backend or the reference, the result is [`Outcome::Fails`], not an error.
    pub fn run(&self, backend: &Backend, reference: &Backend) -> Result<Replayed> {
        if reference.level() != Level::O0 {
            return Err(Error::argument(
                "replay",
                format!("the reference is at level {}; build it with level O0", reference.level()),
            ));
        }
        let name = |b: &Backend| (b.id().to_string(), b.info().name.clone(), b.level());
        let mut out = Replayed {
            backend: name(backend),
            reference: reference.id().into(),
            outcome: Outcome::Agrees,
            errors: Errors::default(),
            tolerance: 0.0,
            recorded: Recorded::None,
        };
        let got = match bound::once(backend, &self.graph, &self.inputs) {
            Ok(y) => y,
            Err(e) => {
                out.outcome = Outcome::Fails(e);
                return Ok(out);
            }
        };
        if !self.got.is_empty() {
            out.recorded = if got == self.got { Recorded::Same } else { Recorded::Differs };
        }
        let want = match bound::once(reference, &self.graph, &self.inputs) {
            Ok(y) => y,
            Err(e) => {
                out.outcome = Outcome::Fails(e);
                return Ok(out);
            }
        };
        for (g, want) in got.iter().zip(bound::expected(&self.graph, &self.inputs, want, reference)?) {
            out.tolerance = out.tolerance.max(want.tolerance());
            let (errors, wrong) = match want.judge(g) {
                Ok(e) => (e, None),
                Err(Wrong { what, errors }) => (errors, Some(what)),
            };
            out.errors = out.errors.max(errors);
            if let (Some(what), Outcome::Agrees) = (wrong, &out.outcome) {
                out.outcome = Outcome::Diverges(what);
            }
        }
        Ok(out)
    }
}

/// The result of running a file's work again.
#[derive(Debug)]
pub struct Replayed {
    /// Id and name of the device, and the level.
    pub backend: (String, String, Level),
    pub reference: String,
    pub outcome: Outcome,
    /// The largest differences from the reference's results.
    pub errors: Errors,
    /// The largest difference allowed for any element.
    pub tolerance: f64,
    /// Whether the results equal the recorded ones.
    pub recorded: Recorded,
}

/// Whether the problem still occurs.
#[derive(Debug)]
pub enum Outcome {
    /// The results match the reference within the tolerance.
    Agrees,
    /// The results differ from the reference by more than the tolerance. The text gives the number of wrong
    /// elements, and the first.
    Diverges(String),
    /// The work fails on the backend or on the reference.
    Fails(Error),
}

/// Whether the results equal those in the file, bit by bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recorded {
    /// The file has no results.
    None,
    Same,
    Differs,
}

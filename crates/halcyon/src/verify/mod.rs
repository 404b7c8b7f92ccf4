//! Checks a run against a reference: [`Session::verify`], and the [`Replay`] file written at a divergence.
//!
//! A check compares one piece: the part of the graph that one step of the plan (rarely several) computes.
//! Intermediate values inside a fused kernel are never in memory, so a step is checked as a whole. Its part
//! of the graph is run again on the reference backend at level O0, on the values that were in the device's
//! memory before the step, and the step's output is compared with the result. So an error is found in the
//! step that makes it, and differences do not accumulate over the plan. Only the sampled pieces cost time in
//! addition to the run.

mod bound;
mod replay;

pub use replay::{Outcome, Recorded, Replay, ReplayOrigin, Replayed};

use crate::backend::Backend;
use crate::executable::{Executable, Lease};
use crate::optable::Rng;
use crate::optable::check::{Errors, Expected, Wrong};
use crate::session::Session;
use halcyon_hal::{BackendType, BufferRef};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::lower::{self, Piece};
use halcyon_ir::passes::Level;
use halcyon_ir::{ConstData, DType};
use serde::Serialize;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

/// The backend to check against, and the fraction of the pieces to check: `cpu:1%`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// The reference backend.
    pub backend: BackendType,
    /// The fraction of the pieces to check: above 0 and at most 1.
    pub share: f64,
}

impl FromStr for Spec {
    type Err = Error;
    /// Parses `BACKEND[:SHARE[%]]`. The default share is 100 %. A share without `%` is a fraction of 1.
    fn from_str(s: &str) -> Result<Spec> {
        let (name, share) = s.split_once(':').unwrap_or((s, "100%"));
        let bad = || {
            Error::argument(
                "verify",
                format!(
                    "\"{share}\" is not a share of the steps; write 1%, 100% or 0.25 (above 0, at most 1)"
                ),
            )
        };
        let (digits, of) = match share.trim().strip_suffix('%') {
            Some(d) => (d.trim(), 100.0),
            None => (share.trim(), 1.0),
        };
        let share = digits.parse::<f64>().map_err(|_| bad())? / of;
        if !(share > 0.0 && share <= 1.0) {
            return Err(bad());
        }
        Ok(Spec { backend: name.parse()?, share })
    }
}

/// Options of [`Session::verify`].
#[derive(Clone, Debug)]
pub struct VerifyOptions {
    /// The reference backend, at level O0.
    pub reference: Backend,
    /// Fraction of the pieces to check, above 0 and at most 1; at least one piece is checked.
    pub share: f64,
    /// Seed of the sample: the same seed picks the same pieces.
    pub seed: u64,
}

impl VerifyOptions {
    /// Checks every piece; draws a fresh seed.
    pub fn new(reference: &Backend) -> VerifyOptions {
        VerifyOptions { reference: reference.clone(), share: 1.0, seed: Rng::fresh_seed() }
    }

    /// Sets the fraction of the pieces to check.
    pub fn share(mut self, share: f64) -> Self {
        self.share = share;
        self
    }

    /// Sets the seed of the sample.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    fn check(&self) -> Result<()> {
        if !(self.share > 0.0 && self.share <= 1.0) {
            return Err(Error::argument(
                "verify",
                format!("the share is {}; it must be above 0 and at most 1", self.share),
            ));
        }
        if self.reference.level() != Level::O0 {
            return Err(Error::argument(
                "verify",
                format!("the reference is at level {}; build it with level O0", self.reference.level()),
            ));
        }
        Ok(())
    }

    /// Picks the pieces to check, out of `of` pieces. The result says for each piece whether it was picked.
    fn draw(&self, of: usize) -> Vec<bool> {
        let wanted = ((self.share * of as f64).ceil() as usize).clamp(1.min(of), of);
        let mut order: Vec<usize> = (0..of).collect();
        let mut rng = Rng::new(self.seed);
        let mut picked = vec![false; of];
        for k in 0..wanted {
            order.swap(k, k + rng.below(of - k));
            picked[order[k]] = true;
        }
        picked
    }
}

/// The check of one piece.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Number of its first step in the plan.
    pub step: usize,
    /// Number of its steps, usually 1.
    pub steps: usize,
    /// Name in the plan: `matmul+add+2` is a product with an epilogue of three ops.
    pub op: String,
    /// Names of the kernels that compute the piece.
    pub kernel: String,
    /// Origin of the op: an ONNX node, or a file and line.
    pub span: String,
    /// Number of elements of the result.
    pub elements: usize,
    /// The largest difference allowed for any element; 0 if values must be equal.
    pub tolerance: f64,
    /// The largest differences from the reference's result.
    pub errors: Errors,
    /// A description of the difference, if the difference exceeds the tolerance.
    pub wrong: Option<String>,
}

/// The result of verifying a run.
#[derive(Debug)]
pub struct VerifyReport {
    /// The backend that was checked, and its level.
    pub backend: String,
    pub level: Level,
    /// The reference backend.
    pub reference: String,
    /// Seed of the sample.
    pub seed: u64,
    /// Fraction of the pieces that was to be checked.
    pub share: f64,
    /// Number of pieces of the plan, of which [`VerifyReport::checks`] are a sample.
    pub pieces: usize,
    /// Number of steps of the plan.
    pub steps: usize,
    /// In the plan's order. After a divergence nothing more is checked, so the divergence is the last entry.
    pub checks: Vec<Check>,
    /// The first piece whose result is wrong.
    pub divergence: Option<Box<Replay>>,
    /// Outputs of the run; empty after a divergence, because the run was not finished.
    pub outputs: Vec<ConstData>,
}

impl VerifyReport {
    /// Whether all checked pieces are within tolerance.
    pub fn agrees(&self) -> bool {
        self.divergence.is_none()
    }

    /// For each op, the number of checks and the largest errors.
    pub fn by_op(&self) -> BTreeMap<&str, (usize, Errors)> {
        let mut all: BTreeMap<&str, (usize, Errors)> = BTreeMap::new();
        for c in &self.checks {
            let e = all.entry(&c.op).or_default();
            *e = (e.0 + 1, e.1.max(c.errors));
        }
        all
    }
}

/// A run of a plan, piece by piece.
struct PieceRunner<'a> {
    session: &'a Session,
    exe: Executable,
    pieces: Vec<Piece>,
    lease: Lease,
    outputs: Vec<BufferRef>,
    at: usize,
}

impl<'a> PieceRunner<'a> {
    fn new(session: &'a Session, inputs: &[ConstData]) -> Result<PieceRunner<'a>> {
        let b = session.backend();
        let graph = session.bind_graph(inputs)?;
        if !graph.args().is_empty() {
            return Err(Error::unsupported(
                "verifying a graph with run-time arguments",
                "Make the arguments inputs of the graph",
            ));
        }
        let (plan, trace) = lower::traced(&graph, b.device().as_target(), &b.lower_options())?;
        let pieces = trace.pieces(&plan)?;
        let exe = b.executable(plan)?;
        let (lease, outputs) = exe.begin(&session.upload(inputs)?, None)?;
        Ok(PieceRunner { session, exe, pieces, lease, outputs, at: 0 })
    }

    /// Submits the steps before a piece.
    fn run_until(&mut self, piece: usize) -> Result<()> {
        self.to(self.pieces[piece].steps.start)
    }

    fn run(&mut self, piece: usize) -> Result<()> {
        self.to(self.pieces[piece].steps.end)
    }

    fn to(&mut self, step: usize) -> Result<()> {
        let from = std::mem::replace(&mut self.at, step);
        self.exe.submit_steps(&self.lease, &[], from..step, None)
    }

    /// Reads the values in the memory that a piece reads.
    fn inputs(&self, piece: usize) -> Result<Vec<ConstData>> {
        let u = &self.pieces[piece];
        let all = u.graph.inputs().iter().zip(&u.inputs);
        all.map(|(i, at)| self.read(*at, u.graph.dtype(i.node), &u.graph.shape(i.node).dims()?)).collect()
    }

    /// Reads the values in the memory that a piece wrote.
    fn outputs(&self, piece: usize) -> Result<Vec<ConstData>> {
        let u = &self.pieces[piece];
        let all = u.graph.outputs().iter().zip(&u.outputs);
        all.map(|(o, at)| self.read(*at, u.graph.dtype(o.node), &u.graph.shape(o.node).dims()?)).collect()
    }

    fn read(&self, (step, place): (usize, usize), dtype: DType, dims: &[usize]) -> Result<ConstData> {
        let mut bytes = host::zeros(dtype.bytes(dims.iter().product()), "a value to verify")?;
        self.session.backend().device().read(self.lease.buffer(step, place), 0, &mut bytes)?;
        ConstData::new(dtype, dims, Arc::new(bytes))
    }

    fn finish(mut self) -> Result<Vec<ConstData>> {
        self.to(self.exe.plan().steps.len())?;
        self.session.download(&self.exe, &self.outputs)
    }

    /// Op, kernels and span of a piece.
    fn names(&self, piece: usize) -> (String, String, String) {
        let steps = &self.exe.plan().steps[self.pieces[piece].steps.clone()];
        let kernels: Vec<String> = steps.iter().map(|s| s.work.kernel_name()).collect();
        let last = steps.last();
        let op = last.map_or(String::new(), |s| s.op.clone());
        (op, kernels.join(", "), last.map_or(String::new(), |s| s.span.text().into()))
    }

    fn origin(&self, piece: usize) -> ReplayOrigin {
        let (op, kernel, span) = self.names(piece);
        let about = ReplayOrigin::of(self.session.backend());
        ReplayOrigin { step: Some(self.pieces[piece].steps.start), op, kernel, span, ..about }
    }
}

/// The largest errors of all results, or the first result that is wrong.
fn judge(expected: &[Expected], got: &[ConstData]) -> std::result::Result<Errors, Wrong> {
    let mut each = expected.iter().zip(got).map(|(e, g)| e.judge(g));
    each.try_fold(Errors::default(), |all, e| Ok(all.max(e?)))
}

impl Session {
    /// Runs the graph once, and checks a sample of the plan's pieces against a reference, on the values that
    /// the pieces actually read.
    ///
    /// # Errors
    /// The errors of [`Session::run`], and errors of running a step on the reference; [`Error::Argument`] for
    /// a share outside of (0, 1] or a reference that is not at level O0; [`Error::Unsupported`] for a graph
    /// with run-time arguments. A wrong result is not an error; it is reported in
    /// [`VerifyReport::divergence`].
    pub fn verify(&self, inputs: &[ConstData], options: &VerifyOptions) -> Result<VerifyReport> {
        options.check()?;
        let mut run = PieceRunner::new(self, inputs)?;
        let picked = options.draw(run.pieces.len());
        let mut report = VerifyReport {
            backend: self.backend().id().into(),
            level: self.backend().level(),
            reference: options.reference.id().into(),
            seed: options.seed,
            share: options.share,
            pieces: picked.len(),
            steps: run.exe.plan().steps.len(),
            checks: vec![],
            divergence: None,
            outputs: vec![],
        };
        for u in (0..picked.len()).filter(|u| picked[*u]) {
            run.run_until(u)?;
            let read = run.inputs(u)?;
            run.run(u)?;
            let got = run.outputs(u)?;
            // A fault comes from this piece or an earlier one; the error names its op.
            self.backend().check_faults()?;
            let part = &run.pieces[u].graph;
            let want = bound::once(&options.reference, part, &read)?;
            let expected = bound::expected(part, &read, want, &options.reference)?;
            let verdict = judge(&expected, &got);
            let (op, kernel, span) = run.names(u);
            report.checks.push(Check {
                step: run.pieces[u].steps.start,
                steps: run.pieces[u].steps.len(),
                op,
                kernel,
                span,
                elements: got.iter().map(ConstData::numel).sum(),
                tolerance: expected.iter().map(Expected::tolerance).fold(0.0, f64::max),
                errors: verdict.as_ref().map_or_else(|w| w.errors, |e| *e),
                wrong: verdict.as_ref().err().map(|w| w.what.clone()),
            });
            if let Err(wrong) = verdict {
                let about = ReplayOrigin {
                    reference: Some(options.reference.id().into()),
                    seed: Some(options.seed),
                    wrong: Some(wrong.what),
                    errors: Some(wrong.errors),
                    ..run.origin(u)
                };
                report.divergence = Some(Box::new(Replay {
                    about,
                    graph: part.clone(),
                    inputs: read,
                    got,
                    expected: expected.iter().map(|e| e.value().clone()).collect(),
                }));
                return Ok(report);
            }
        }
        report.outputs = run.finish()?;
        Ok(report)
    }

    /// A replay of a run that failed. Runs the graph again piece by piece. If that fails too, the replay
    /// contains only the failing piece; otherwise it contains the whole graph with its inputs.
    ///
    /// # Errors
    /// [`Error::Shape`] or another error if the inputs do not match the graph, so that there is nothing to
    /// replay.
    pub fn replay_of(&self, inputs: &[ConstData], failure: &Error) -> Result<Replay> {
        if let Ok(mut run) = PieceRunner::new(self, inputs) {
            for u in 0..run.pieces.len() {
                let Ok(read) = run.inputs(u) else { break };
                let done = run
                    .run(u)
                    .and_then(|()| self.backend().device().synchronize())
                    .and_then(|()| self.backend().check_faults());
                if let Err(e) = done {
                    let about = ReplayOrigin { failure: Some(e.to_string()), ..run.origin(u) };
                    let graph = run.pieces[u].graph.clone();
                    return Ok(Replay { about, graph, inputs: read, got: vec![], expected: vec![] });
                }
            }
        }
        let about = ReplayOrigin { failure: Some(failure.to_string()), ..ReplayOrigin::of(self.backend()) };
        let passes = self.backend().lower_options().passes;
        Ok(Replay {
            about: ReplayOrigin { amp: passes.amp, ..about },
            graph: self.bind_graph(inputs)?,
            inputs: inputs.to_vec(),
            got: vec![],
            expected: vec![],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_name_a_backend_and_a_share() {
        let spec = |s: &str| s.parse::<Spec>();
        let is = |s: &str, share: f64| {
            let got = spec(s).unwrap();
            assert!(got.backend == BackendType::Cpu && (got.share - share).abs() < 1e-12, "{s}: {got:?}");
        };
        is("cpu", 1.0);
        is("cpu:1%", 0.01);
        is("cpu:100 %", 1.0);
        is("cpu:0.25", 0.25);
        for bad in ["cpu:0%", "cpu:101%", "cpu:2", "cpu:-1%", "cpu:", "cpu:nan", "cpu:inf%", "quantum:1%"] {
            assert_eq!(spec(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }

    #[test]
    fn samples_have_their_size_and_follow_the_seed() {
        let b = Backend::builder().backend_type(BackendType::Noop).level(Level::O0).build().unwrap();
        let drawn =
            |share: f64, seed: u64, of: usize| VerifyOptions::new(&b).share(share).seed(seed).draw(of);
        let count = |v: &[bool]| v.iter().filter(|x| **x).count();
        for of in [1, 7, 100, 1000] {
            assert_eq!(count(&drawn(1.0, 3, of)), of);
            assert_eq!(count(&drawn(0.01, 3, of)), of.div_ceil(100));
        }
        assert!(drawn(0.5, 3, 0).is_empty());
        assert_eq!(drawn(0.1, 9, 200), drawn(0.1, 9, 200));
        assert_ne!(drawn(0.1, 9, 200), drawn(0.1, 11, 200));
    }
}

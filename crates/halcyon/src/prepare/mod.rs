//! Prepares a model for a device: chooses the level and the precision, measures the effect, and reports it.
//!
//! [`prepare_model`] returns a model at a level. [`optimize_for_inference`] also sets the mixed precision and
//! makes the plan. [`ModelOptimizer::optimize`] returns the model with an [`OptimizationResult`]: which
//! transformations changed the executable, which did not and why, and the measured times, memory and
//! differences. The functions take graphs ([`Session`]) and imported ONNX models (`OnnxSession`); the crate
//! `halcyon-nn` has the same functions for modules.
//!
//! ```
//! use halcyon::ir::{Graph, TensorType};
//! use halcyon::prepare::get_optimizer;
//! use halcyon::{ConstData, Session, prelude::*};
//! # fn main() -> halcyon::Result<()> {
//! let backend = Backend::cpu()?;
//! let mut g = Graph::new();
//! let x = g.input("x", TensorType::new(DType::F32, [8, 16]));
//! let (e, s) = (g.exp(x)?, g.sqrt(x)?);
//! let y = g.add(e, s)?;
//! g.output("y", y);
//! let sample = [ConstData::from_slice(&[8, 16], &[0.5f32; 128])?];
//! let model = Session::new(&backend, g);
//! let (model, result) = get_optimizer(Some("cpu"))?.optimize(&model, Level::O2, &sample)?;
//! assert!(result.success && result.optimizations_applied.contains(&"fusion".to_string()));
//! assert_eq!(model.run(&sample)?.len(), 1);
//! # Ok(())
//! # }
//! ```

mod html;
mod measure;
mod networks;
mod reasons;
mod result;
mod scope;
mod strategies;

pub use html::report_html;
pub use result::{MemoryPart, Metrics, OpTime, OptimizationReport, OptimizationResult, OutputError};
pub use scope::Scope;
pub use strategies::Strategy;

use crate::backend::Backend;
#[cfg(feature = "onnx")]
use crate::onnx::{Datum, OnnxSession, Outcome, export};
use crate::quantize::{QuantizeOptions, Quantized, quantize};
use crate::receipts::{self, Effort};
use crate::session::Session;
use halcyon_hal::BackendType;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::{self, AmpPolicy, Level};
use halcyon_ir::plan::Receipt;
use halcyon_ir::{ConstData, DType, Graph};
use std::time::Duration;

/// The result of level O3 for a model: the quantised graph, or the reason why no layer can be quantised.
pub type Rewrite = std::result::Result<Quantized, String>;

/// Quantises a graph. If no layer of the graph can be quantised, this is not an error: the result has the
/// reason.
///
/// # Errors
/// Those of [`quantize()`].
pub fn quantized_graph(
    backend: &Backend,
    graph: &Graph,
    sample: &[ConstData],
    options: &QuantizeOptions,
) -> Result<Rewrite> {
    match quantize(backend, graph, &[], &[sample.to_vec()], options) {
        Ok(q) => Ok(Ok(q)),
        Err(Error::Argument { op, what, .. }) if op == passes::QUANTIZED => Ok(Err(what)),
        Err(e) => Err(e),
    }
}

/// A model that can be prepared: a graph, or an imported ONNX model.
pub trait Preparable: Sized {
    /// The backend that the model runs on.
    fn backend(&self) -> &Backend;

    /// The same model on another backend, or on another handle of the same device.
    ///
    /// # Errors
    /// [`Error::UnsupportedOps`] if that backend does not support the model.
    fn on(&self, backend: &Backend) -> Result<Self>;

    /// The model as one graph for inputs of these types, in the model's order.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model runs in stages for inputs of these types; errors about the inputs.
    fn session(&self, sample: &[ConstData]) -> Result<Session>;

    /// The model quantised for its backend (level O3). The error is measured on the sample. The scales of
    /// activations are computed in each run. [`crate::quantize`] can calibrate the scales with more samples.
    ///
    /// # Errors
    /// Those of [`Preparable::session`] and [`quantize()`]: [`Error::Unsupported`] with the measured error if
    /// the bound cannot be met.
    fn quantized(&self, sample: &[ConstData], options: &QuantizeOptions) -> Result<(Self, Rewrite)>;

    /// Runs the model once, so that later runs with inputs of these types plan and compile nothing.
    ///
    /// # Errors
    /// Errors about the inputs, of planning and of running.
    fn warm_up(&self, sample: &[ConstData]) -> Result<()>;
}

impl Preparable for Session {
    fn backend(&self) -> &Backend {
        Session::backend(self)
    }

    fn on(&self, backend: &Backend) -> Result<Session> {
        Ok(Session::new(backend, self.graph().clone()))
    }

    fn session(&self, _: &[ConstData]) -> Result<Session> {
        self.on(Session::backend(self))
    }

    fn quantized(&self, sample: &[ConstData], options: &QuantizeOptions) -> Result<(Session, Rewrite)> {
        let b = Session::backend(self);
        let q = quantized_graph(b, self.graph(), sample, options)?;
        let graph = q.as_ref().map_or_else(|_| self.graph().clone(), |q| q.graph.clone());
        Ok((Session::new(b, graph), q))
    }

    fn warm_up(&self, sample: &[ConstData]) -> Result<()> {
        self.run(sample).map(drop)
    }
}

#[cfg(feature = "onnx")]
impl Preparable for OnnxSession {
    fn backend(&self) -> &Backend {
        OnnxSession::backend(self)
    }

    fn on(&self, backend: &Backend) -> Result<OnnxSession> {
        OnnxSession::on(self, backend)
    }

    fn session(&self, sample: &[ConstData]) -> Result<Session> {
        let data: Vec<Datum> = sample.iter().cloned().map(Datum::Tensor).collect();
        match self.graph(&data)? {
            Outcome::Graph(g) => Ok(Session::new(OnnxSession::backend(self), g.graph)),
            Outcome::Staged(why) => Err(Error::unsupported(
                format!("measuring a model that is not a single graph: {why}"),
                "prepare_model prepares it without measuring",
            )),
        }
    }

    /// The quantised model only takes inputs of the sample's types.
    fn quantized(&self, sample: &[ConstData], options: &QuantizeOptions) -> Result<(OnnxSession, Rewrite)> {
        let b = OnnxSession::backend(self);
        let q = match quantized_graph(b, self.session(sample)?.graph(), sample, options)? {
            Ok(q) => q,
            Err(why) => return Ok((self.on(b)?, Err(why))),
        };
        let to = export::ExportOptions { opset: halcyon_formats::onnx::ops::LATEST, external_data: false };
        let none = halcyon_formats::onnx::tensor::External::none();
        let model =
            halcyon_formats::onnx::Model::new(export::export(&q.graph, &to)?, none, "quantised model")?;
        Ok((OnnxSession::new(b, model)?.with_options(self.options().clone()), Ok(q)))
    }

    fn warm_up(&self, sample: &[ConstData]) -> Result<()> {
        let data: Vec<Datum> = sample.iter().cloned().map(Datum::Tensor).collect();
        self.run_data(&data).map(drop)
    }
}

/// All levels, in order.
pub fn levels() -> Vec<Level> {
    ["O0", "O1", "O2", "O3"].iter().filter_map(|name| name.parse().ok()).collect()
}

/// The model at a level. A level changes how a graph is planned, so it is enough to use a handle on the
/// device that has this level. O3 also changes the graph; [`Preparable::quantized`] does this, because it
/// needs a sample.
fn at_level<M: Preparable>(backend: &Backend, model: &M, level: Level) -> Result<M> {
    model.on(&backend.with_level(level)?)
}

/// The model on `backend`, at a level. The given model is not changed; both models share their weights in
/// host memory. At O3 this function does not quantise, because it has no sample. [`optimize_for_inference`]
/// quantises.
///
/// # Errors
/// Those of [`Preparable::on`] and [`Backend::with_level`].
pub fn prepare_model<M: Preparable>(backend: &Backend, model: &M, level: Level) -> Result<M> {
    at_level(backend, model, level)
}

/// The policy of mixed precision that computes in `dtype`.
///
/// # Errors
/// [`Error::Argument`] if there is no such policy, and for bf16 and f16 if the level is below O2.
pub fn policy(dtype: DType, level: Level) -> Result<AmpPolicy> {
    let policy = match dtype {
        DType::F32 => AmpPolicy::None,
        DType::F16 => AmpPolicy::F16,
        DType::BF16 => AmpPolicy::Bf16,
        d => {
            let what = format!("a model cannot be optimised for {d}; use f32, bf16 or f16");
            return Err(Error::argument("dtype", what));
        }
    };
    if policy != AmpPolicy::None && level < Level::O2 {
        let what = format!("mixed precision in {dtype} needs level O2, and the model is at {level}");
        return Err(Error::argument("dtype", what));
    }
    Ok(policy)
}

/// Prepares a model for inference, on its backend and at its level. If the `dtype` bf16 or f16 is given, the
/// model computes in mixed precision with that dtype ([`crate::BackendBuilder::amp`]); with f32, it uses no
/// mixed precision. Inputs and outputs keep their dtypes.
/// If a sample is given, the function makes the plan, compiles its kernels, copies the weights to the device
/// and runs the plan once. A later run with inputs of the same types then does none of this work. At level O3
/// the model is quantised within the default bound of [`QuantizeOptions`], measured on the sample.
///
/// # Errors
/// [`Error::Unsupported`] with the measured error if level O3 cannot meet the bound; [`Error::Argument`] for
/// a dtype other than f32, bf16 and f16, for bf16 and f16 below level O2, and at level O3 without a sample;
/// [`Error::Unsupported`] for a dtype that the device does not support; errors of planning and running.
pub fn optimize_for_inference<M: Preparable>(
    model: &M,
    sample: Option<&[ConstData]>,
    dtype: Option<DType>,
) -> Result<M> {
    let backend = model.backend();
    let model = match dtype {
        None => model.on(backend)?,
        Some(d) => model.on(&backend.with_amp(policy(d, backend.level())?)?)?,
    };
    let model = match (backend.level(), sample) {
        (Level::O3, Some(sample)) => {
            let (model, rewrite) = model.quantized(sample, &QuantizeOptions::default())?;
            note(&rewrite);
            model
        }
        (Level::O3, None) => return Err(needs_sample()),
        _ => model,
    };
    if let Some(sample) = sample {
        model.warm_up(sample)?;
    }
    Ok(model)
}

/// Logs the reason if level O3 quantised nothing.
pub fn note(rewrite: &Rewrite) {
    if let Err(why) = rewrite {
        tracing::warn!("level O3 quantises nothing: {why}");
    }
}

/// The error of level O3 without a sample.
pub fn needs_sample() -> Error {
    Error::argument("sample", "level O3 measures its error on a sample: give one")
}

/// The options of [`ModelOptimizer::report`].
#[derive(Clone, Debug)]
pub struct ReportOptions {
    /// The model's name in the report.
    pub name: String,
    /// How many measurements are taken, and how long each lasts.
    pub effort: Effort,
    /// Whether the gain of each transformation is measured. This compares the plan with a plan without the
    /// transformation.
    pub gains: bool,
    /// Whether the time of each op is measured. This opens the device a second time.
    pub ops: bool,
    /// Options of level O3.
    pub quantize: QuantizeOptions,
}

impl Default for ReportOptions {
    fn default() -> ReportOptions {
        ReportOptions {
            name: "model".into(),
            effort: Effort::default(),
            gains: true,
            ops: true,
            quantize: QuantizeOptions::default(),
        }
    }
}

/// The effort of the measurements of [`ModelOptimizer::optimize`]. The effort is small, because only the
/// whole plan is compared.
const BRIEF: Effort = Effort { pairs: 5, interval: 0.1, burst: Duration::from_millis(5) };

/// Optimises models for one backend, and measures the effect.
#[derive(Clone, Debug)]
pub struct ModelOptimizer {
    backend: Backend,
}

/// The optimizer of a backend by name, such as `cpu` or `opencl:1`; `None` for the best device of the
/// machine.
///
/// # Errors
/// The errors of [`Backend::open`].
pub fn get_optimizer(name: Option<&str>) -> Result<ModelOptimizer> {
    let backend = match name {
        Some(name) => Backend::open(name)?,
        None => Backend::new(BackendType::Auto)?,
    };
    Ok(ModelOptimizer::new(&backend))
}

impl ModelOptimizer {
    /// The optimizer of an open backend.
    pub fn new(backend: &Backend) -> ModelOptimizer {
        ModelOptimizer { backend: backend.clone() }
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the model at a level, and what the level changed. The sample holds the model's inputs, in
    /// order. The model runs on the sample several times at O0 and several times at the level.
    ///
    /// If the results at the level have another shape than those at O0, or differ in which values are finite,
    /// then `success` is false, a warning names the output, and the returned model is the one at O0.
    ///
    /// # Errors
    /// Those of [`Preparable::session`], and at O3 of [`Preparable::quantized`]; errors of planning and
    /// running.
    pub fn optimize<M: Preparable>(
        &self,
        model: &M,
        level: Level,
        sample: &[ConstData],
    ) -> Result<(M, OptimizationResult)> {
        let options = ReportOptions { effort: BRIEF, gains: false, ops: false, ..ReportOptions::default() };
        let (model, report) = self.report(model, level, sample, &options)?;
        Ok((model, report.result))
    }

    /// Like [`ModelOptimizer::optimize`], with more measurements: the gain of each transformation and the
    /// time of each op. [`report_html`] writes the report as a page.
    ///
    /// # Errors
    /// Those of [`ModelOptimizer::optimize`].
    pub fn report<M: Preparable>(
        &self,
        model: &M,
        level: Level,
        sample: &[ConstData],
        options: &ReportOptions,
    ) -> Result<(M, OptimizationReport)> {
        let mut optimized = at_level(&self.backend, model, level)?;
        let quantized = match level {
            Level::O3 => {
                let (model, rewrite) = optimized.quantized(sample, &options.quantize)?;
                optimized = model;
                Some(rewrite)
            }
            _ => None,
        };
        let plain = at_level(&self.backend, model, Level::O0)?;
        let (before, after) = (plain.session(sample)?, optimized.session(sample)?);
        let compared = measure::compare(&before, &after, sample, options.effort)?;
        let (old, new) = (before.prepare(sample)?, after.prepare(sample)?);
        let bad: Vec<&OutputError> = compared.outputs.iter().filter(|o| o.relative.is_none()).collect();
        let success = bad.is_empty();
        let mut warnings = optimized.backend().warnings().to_vec();
        warnings.extend(new.plan().warnings.iter().cloned());
        warnings.extend(reasons::unapplied(&after, &new, sample)?);
        for o in bad {
            warnings.push(format!(
                "output \"{}\" at {level} differs from O0 in its shape, or in which values are finite: the model stays at O0",
                o.name
            ));
        }
        let mut receipts = self.receipts(&after, sample, &new.plan().receipts, options)?;
        match quantized {
            Some(Ok(q)) if q.changed() => receipts.push(match options.gains {
                true => q.receipt(optimized.backend(), sample, options.effort.pairs)?,
                false => q.plain_receipt(),
            }),
            Some(Ok(_)) => warnings.push(format!("{}: switched off", passes::QUANTIZED)),
            Some(Err(why)) => warnings.push(format!("{}: {why}", passes::QUANTIZED)),
            _ => {}
        }
        let applied = if success { &receipts[..] } else { &[] };
        let mut report = OptimizationReport {
            model: options.name.clone(),
            device: self.backend.id().into(),
            device_name: self.backend.info().name.clone(),
            result: OptimizationResult {
                success,
                level,
                optimizations_applied: applied.iter().map(|r| r.transformation.clone()).collect(),
                warnings,
                metrics: compared.metrics(&old, &new, self.backend.device().as_ref(), sample),
            },
            receipts,
            memory: measure::memory(self.backend.device().as_ref(), [old.plan(), new.plan()], sample),
            ops_before: None,
            ops_after: None,
            no_ops: None,
        };
        if options.ops {
            match measure::ops([&before, &after], sample, options.effort)? {
                Ok([old, new]) => (report.ops_before, report.ops_after) = (Some(old), Some(new)),
                Err(why) => report.no_ops = Some(why),
            }
        }
        Ok((if success { optimized } else { plain }, report))
    }

    /// The receipts of a plan, with gains if `options` requests them.
    fn receipts(
        &self,
        session: &Session,
        sample: &[ConstData],
        plain: &[Receipt],
        options: &ReportOptions,
    ) -> Result<Vec<Receipt>> {
        if !options.gains || plain.is_empty() {
            return Ok(plain.to_vec());
        }
        let b = session.backend();
        let measured = receipts::measure(session, sample, options.effort, |without| match without {
            None => b.with_level(Level::O0),
            Some(name) => b.with_transformation_off(name),
        })?;
        let gain = |name: &str| measured.gains.iter().find(|g| g.transformation == name);
        let one = |r: &Receipt| match gain(&r.transformation) {
            None => r.clone(),
            Some(g) => Receipt {
                gain: Some(receipts::median(&g.ratios)),
                error: Some(measured.error).filter(|e| e.is_finite()),
                ..r.clone()
            },
        };
        Ok(plain.iter().map(one).collect())
    }

    /// All transformations, with the speed-up of each on this device. The first call on a device measures the
    /// speed-ups on small networks, which takes seconds. The result is cached in the process, and on disk
    /// next to the compiled programs. The speed-up is `None` for a transformation that changed none of these
    /// networks on this device.
    pub fn strategies(&self) -> Vec<Strategy> {
        strategies::of(&self.backend)
    }
}

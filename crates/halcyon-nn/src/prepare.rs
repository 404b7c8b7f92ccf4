//! Prepares modules for a device: sets the level and the precision, and compiles modules for inference or
//! prepares them for training. These are the functions of [`halcyon::prepare`], for modules.
//!
//! ```
//! use halcyon::prelude::*;
//! use halcyon_nn::{Activation, Linear, Sequential, prepare};
//! # fn main() -> halcyon::Result<()> {
//! let b = Backend::cpu()?;
//! let net = Sequential::new().then(Linear::new(&b, 8, 16)?).then(Activation::Relu);
//! let net = prepare::prepare_model(&b, net, Level::O2)?;
//! let x = net.to_device(&Tensor::ones(&b, [4, 8], DType::F32))?;
//! let want = net.forward(&x).to_vec::<f32>()?;
//! let inference = prepare::optimize_for_inference(net, Some(&x), None)?;
//! assert_eq!(inference.forward(&x)?.dims()?.as_slice(), [4, 16]);
//! # let got = inference.forward(&x)?.to_vec::<f32>()?;
//! # assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5));
//! # Ok(())
//! # }
//! ```

use crate::layers::Forward;
use crate::module::{Module, ModuleExt, Visit};
use crate::optim::Optimizer;
use crate::scope::{Scope, Writes, within};
use crate::slot::SlotId;
use halcyon::ir::NodeId;
use halcyon::ir::error::{Error, Result};
use halcyon::ir::shape::TensorType;
use halcyon::prepare::{
    ModelOptimizer, OptimizationReport, OptimizationResult, ReportOptions, Rewrite, needs_sample, note,
    policy, quantized_graph,
};
use halcyon::quantize::QuantizeOptions;
use halcyon::receipts::Effort;
use halcyon::{AmpPolicy, Backend, Compiled, ConstData, DType, Level, Session, Tensor};
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// A module whose parameters and buffers are on a backend, and which runs at a level. The type derefs to the
/// module.
///
/// The level is a property of the module's handle on the device. The level only applies if the inputs belong
/// to this handle: make inputs on [`Prepared::backend`], or convert them with [`Prepared::to_device`].
/// [`Prepared::forward`] and training steps convert their inputs.
#[derive(Clone, Debug)]
pub struct Prepared<M> {
    module: M,
    backend: Backend,
}

impl<M> Deref for Prepared<M> {
    type Target = M;
    fn deref(&self) -> &M {
        &self.module
    }
}

impl<M: Module> Module for Prepared<M> {
    fn visit(&self, visit: &mut Visit<'_>) {
        self.module.visit(visit);
    }
    fn kind(&self) -> &'static str {
        self.module.kind()
    }
}

impl<M> Prepared<M> {
    /// The module's handle on the device.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The level at which the module runs.
    pub fn level(&self) -> Level {
        self.backend.level()
    }

    /// The policy of the module's mixed precision; see [`Backend::amp`].
    pub fn amp(&self) -> AmpPolicy {
        self.backend.amp()
    }

    /// The tensor `t` on the module's handle. The data is copied only if `t` is on another device.
    ///
    /// # Errors
    /// Errors of evaluating and copying the tensor.
    pub fn to_device(&self, t: &Tensor) -> Result<Tensor> {
        t.to(&self.backend)
    }

    /// The module.
    pub fn into_inner(self) -> M {
        self.module
    }
}

impl<M: Forward> Prepared<M> {
    /// The module's result for `x`, at the module's level. `x` may be on any handle of the device.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        match self.to_device(x) {
            Ok(x) => self.module.forward(&x),
            // The result carries the error to the first call that can fail.
            Err(e) => Tensor::build(&[x], |_, _| Err(e)),
        }
    }
}

/// Moves a module to a backend, at a level. Parameters and buffers that are already on that device keep their
/// memory.
///
/// # Errors
/// Errors of the copies. After an error nothing has moved.
pub fn prepare_model<M: Module>(backend: &Backend, module: M, level: Level) -> Result<Prepared<M>> {
    let backend = backend.with_level(level)?;
    module.to_device(&backend)?;
    Ok(Prepared { module, backend })
}

/// The optimizer that is passed to [`optimize_for_training`], or `()` for none.
pub trait TrainingOptimizer: Sized {
    /// The result: the module, or the module and the optimizer.
    type With<M>;

    /// Moves the optimizer's state to a backend, and joins it with the module.
    ///
    /// # Errors
    /// Errors of the copies.
    fn join<M>(self, module: Prepared<M>) -> Result<Self::With<M>>;
}

impl TrainingOptimizer for () {
    type With<M> = Prepared<M>;
    fn join<M>(self, module: Prepared<M>) -> Result<Prepared<M>> {
        Ok(module)
    }
}

impl TrainingOptimizer for Optimizer {
    type With<M> = (Prepared<M>, Optimizer);
    fn join<M>(mut self, module: Prepared<M>) -> Result<(Prepared<M>, Optimizer)> {
        let state = self.state().into_iter();
        let moved = state.map(|(name, t)| Ok((name, t.to(&module.backend)?))).collect::<Result<Vec<_>>>()?;
        moved.into_iter().try_for_each(|(name, t)| self.set_state(&name, t))?;
        Ok((module, self))
    }
}

/// Prepares a module for training, on its backend and at its level. If an optimizer is given, its state moves
/// to that backend, and the optimizer is returned with the module. If the `dtype` bf16 or f16 is given,
/// training steps compute in mixed precision with that dtype; with f32, they use no mixed precision.
/// Parameters keep their dtypes. Gradients in f16 need a [`crate::LossScaler`], which
/// [`crate::TrainStep::new`] adds.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Adam, Linear, Optimizer, TrainStep, prepare};
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 2, 1)?;
/// let optimizer = Optimizer::new(&layer, Adam::new().rate(0.1))?;
/// let layer = prepare::prepare_model(&b, layer, Level::O2)?;
/// let (layer, optimizer) = prepare::optimize_for_training(layer, optimizer, None)?;
/// let x = Tensor::ones(layer.backend(), [3, 2], DType::F32);
/// let mut step = TrainStep::new(&*layer, optimizer, |m: &&Linear, x: &[Tensor]| {
///     Ok(vec![m.forward(&x[0]).sqr().mean(..)])
/// })?;
/// step.run(&[&x])?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Error::Argument` for a dtype other than f32, bf16 and f16, and for bf16 or f16 below level O2;
/// `Error::Unsupported` for a dtype that the device does not support; errors of the copies.
pub fn optimize_for_training<M: Module, O: TrainingOptimizer>(
    module: Prepared<M>,
    optimizer: O,
    dtype: Option<DType>,
) -> Result<O::With<M>> {
    let backend = with_dtype(module.backend(), dtype)?;
    let module = module.into_inner();
    module.to_device(&backend)?;
    optimizer.join(Prepared { module, backend })
}

/// A handle whose mixed precision is `dtype`. If `dtype` is `None`, the backend itself.
fn with_dtype(backend: &Backend, dtype: Option<DType>) -> Result<Backend> {
    match dtype {
        None => Ok(backend.clone()),
        Some(d) => backend.with_amp(policy(d, backend.level())?),
    }
}

/// A forward. The first argument is the handle that plans the forward.
type Traced<'a> = Arc<dyn Fn(&Backend, &[Tensor]) -> Result<Vec<Tensor>> + 'a>;
type Shared<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;

/// A module's forward with the weights as constants, so that the weights are packed and folded. The forward
/// is planned once per set of input types. Later runs with inputs of these types run only the plan.
///
/// The weights are copied when the inference is made. Later changes of the module have no effect on the
/// inference.
pub struct Inference<'a> {
    backend: Backend,
    traced: Traced<'a>,
    compiled: Compiled<Shared<'a>>,
}

impl fmt::Debug for Inference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inference({:?}, {} plans)", self.backend, self.compiled.plans())
    }
}

/// The weights of a module on the host, by slot. Sessions of one module share them.
fn weights<M: Module>(module: &M) -> Result<Vec<(SlotId, ConstData)>> {
    module.slots().into_iter().map(|(_, s)| Ok((s.id(), s.stored().to_data()?))).collect()
}

/// Constants as tensors of a backend.
fn constants(backend: &Backend, weights: &[(SlotId, ConstData)]) -> HashMap<SlotId, Tensor> {
    // `Tensor::build` needs an operand, because the operand determines the backend.
    let any = Tensor::placeholder(backend, DType::F32, [1usize]);
    let one =
        |(id, data): &(SlotId, ConstData)| (*id, Tensor::build(&[&any], |g, _| Ok(g.constant(data.clone()))));
    weights.iter().map(one).collect()
}

impl<'a> Inference<'a> {
    /// Compiles the forward `f` of a module for a backend, at the level of the backend. `module` may be a
    /// reference. Inside of `f`, modules behave as in evaluation.
    ///
    /// # Errors
    /// Errors of reading the weights.
    pub fn new<M: Module + 'a>(
        backend: &Backend,
        module: M,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<Inference<'a>> {
        let weights = weights(&module)?;
        let traced = move |backend: &Backend, inputs: &[Tensor]| {
            let values = constants(backend, &weights);
            let scope = Scope { values, writes: Writes::Refused, ..Scope::default() };
            within(scope, || f(&module, inputs)).0
        };
        Ok(Inference::over(backend, Arc::new(traced)))
    }

    fn over(backend: &Backend, traced: Traced<'a>) -> Inference<'a> {
        let (of, on) = (traced.clone(), backend.clone());
        let compiled = backend.compile(Box::new(move |x: &[Tensor]| of(&on, x)) as Shared<'a>);
        Inference { backend: backend.clone(), traced, compiled }
    }

    /// The same forward on another handle or device.
    pub fn on(&self, backend: &Backend) -> Inference<'a> {
        Inference::over(backend, self.traced.clone())
    }

    /// The forward quantised for its device (level O3). The result only takes inputs of the sample's types.
    /// The error of quantisation is measured on the sample ([`halcyon::quantize`]). If no layer can be
    /// quantised, the result is the unchanged forward, and the [`Rewrite`] has the reason.
    ///
    /// # Errors
    /// Those of [`halcyon::quantize::quantize`]; errors of the forward and of the device.
    pub fn quantized(
        &self,
        sample: &[&Tensor],
        options: &QuantizeOptions,
    ) -> Result<(Inference<'a>, Rewrite)> {
        let types = types_of(sample)?;
        let data = sample.iter().map(|t| t.to_data()).collect::<Result<Vec<_>>>()?;
        let q = match quantized_graph(&self.backend, self.session(&types)?.graph(), &data, options)? {
            Ok(q) => q,
            Err(why) => return Ok((self.on(&self.backend), Err(why))),
        };
        let graph = q.graph.clone();
        let traced = move |_: &Backend, inputs: &[Tensor]| {
            let given = types_of(&inputs.iter().collect::<Vec<_>>())?;
            if given != types {
                let what = format!("the model was quantised for inputs {types:?}, not {given:?}");
                return Err(Error::shape("Inference::run", what));
            }
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            let one = |root: NodeId| {
                Tensor::build(&inputs, |g, x| {
                    let roots = g.inline(&graph, x, &[root])?;
                    roots.first().copied().ok_or_else(|| Error::internal("an output without a node"))
                })
            };
            Ok(graph.outputs().iter().map(|o| one(o.node)).collect())
        };
        Ok((Inference::over(&self.backend, Arc::new(traced)), Ok(q)))
    }

    /// The handle on the device.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// The number of plans: one per set of input types, and further ones for inputs marked with
    /// [`Tensor::donate`].
    pub fn plans(&self) -> usize {
        self.compiled.plans()
    }

    /// Runs the forward. Inputs may be on any handle of the device.
    ///
    /// # Errors
    /// Errors of the forward, of planning and of the device; `Error::MixedDevices` for an input on another
    /// device; `Error::Unsupported` for a forward that writes buffers.
    #[track_caller]
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        self.compiled.call(inputs)
    }

    /// Runs a forward with one input and one output.
    ///
    /// # Errors
    /// Those of [`Inference::run`]; `Error::Argument` if the forward has no output.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let none = || Error::argument("Inference::forward", "the forward has no output");
        self.run(&[x])?.into_iter().next().ok_or_else(none)
    }

    /// A session of the forward's graph for inputs of these types. Use the session for receipts, for ONNX
    /// export, or for inputs on the host. Inputs are named `input0`, `input1`, …, outputs `output0`,
    /// `output1`, ….
    ///
    /// # Errors
    /// Errors of the forward.
    pub fn session(&self, inputs: &[TensorType]) -> Result<Session> {
        let places: Vec<Tensor> =
            inputs.iter().map(|t| Tensor::placeholder(&self.backend, t.dtype, t.shape.clone())).collect();
        let outputs = (self.traced)(&self.backend, &places)?;
        let named = |what: &str, n: usize| (0..n).map(|i| format!("{what}{i}")).collect::<Vec<_>>();
        let (ins, outs) = (named("input", places.len()), named("output", outputs.len()));
        let ins: Vec<(&str, &Tensor)> = ins.iter().map(String::as_str).zip(&places).collect();
        let outs: Vec<(&str, &Tensor)> = outs.iter().map(String::as_str).zip(&outputs).collect();
        Ok(Session::new(&self.backend, Tensor::trace(&ins, &outs)?))
    }
}

/// Compiles the inference of a prepared module with one input and one output, at the module's level. For
/// other numbers of inputs or outputs use [`Inference::new`]. If the `dtype` bf16 or f16 is given, the
/// forward computes in mixed precision with that dtype; with f32, it uses no mixed precision. Inputs and
/// outputs keep their dtypes. If a sample is given, the function makes the plan and runs it once. At level O3
/// the forward is quantised within the default bound of [`QuantizeOptions`], for inputs of the sample's type.
///
/// # Errors
/// `Error::Argument` for a dtype other than f32, bf16 and f16, for bf16 or f16 below level O2, and at level
/// O3 without a sample; `Error::Unsupported` for a dtype that the device does not support, and at level O3 if
/// the bound cannot be met; errors of the forward and the device.
pub fn optimize_for_inference<'a, M: Forward + 'a>(
    module: Prepared<M>,
    sample: Option<&Tensor>,
    dtype: Option<DType>,
) -> Result<Inference<'a>> {
    let backend = with_dtype(module.backend(), dtype)?;
    let mut inference = Inference::new(&backend, module.into_inner(), one_to_one)?;
    if backend.level() == Level::O3 {
        let x = sample.ok_or_else(needs_sample)?;
        let (quantized, rewrite) = inference.quantized(&[x], &QuantizeOptions::default())?;
        note(&rewrite);
        inference = quantized;
    }
    if let Some(x) = sample {
        inference.forward(x)?.eval()?;
    }
    Ok(inference)
}

fn one_to_one<M: Forward>(module: &M, x: &[Tensor]) -> Result<Vec<Tensor>> {
    let x = x.first().ok_or_else(|| Error::argument("forward", "there is no input"))?;
    Ok(vec![module.forward(x)])
}

/// The effort of the measurements of [`optimize`]. The effort is small, because only the whole plan is
/// compared.
const BRIEF: Effort = Effort { pairs: 5, interval: 0.1, burst: Duration::from_millis(5) };

/// Compiles a module's forward at a level, and measures what the level changed; see
/// [`ModelOptimizer::optimize`]. If the level does not pass the checks, the returned inference is the
/// inference at O0.
///
/// # Errors
/// Errors of the forward, of planning and of the device.
pub fn optimize<'a, M: Module + 'a>(
    backend: &Backend,
    module: M,
    level: Level,
    sample: &[&Tensor],
    f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
) -> Result<(Inference<'a>, OptimizationResult)> {
    let options = ReportOptions { effort: BRIEF, gains: false, ops: false, ..ReportOptions::default() };
    let inference = Inference::new(backend, module, f)?;
    let (inference, report) = report(&inference, level, sample, &options)?;
    Ok((inference, report.result))
}

/// Like [`optimize`], for a compiled forward, with more measurements; see [`ModelOptimizer::report`].
///
/// # Errors
/// Those of [`optimize`].
pub fn report<'a>(
    inference: &Inference<'a>,
    level: Level,
    sample: &[&Tensor],
    options: &ReportOptions,
) -> Result<(Inference<'a>, OptimizationReport)> {
    let types = types_of(sample)?;
    let data = sample.iter().map(|t| t.to_data()).collect::<Result<Vec<_>>>()?;
    let session = inference.session(&types)?;
    let optimizer = ModelOptimizer::new(inference.backend());
    let (session, report) = optimizer.report(&session, level, &data, options)?;
    let optimized = inference.on(session.backend());
    if session.backend().level() == Level::O3 {
        return Ok((optimized.quantized(sample, &options.quantize)?.0, report));
    }
    Ok((optimized, report))
}

fn types_of(tensors: &[&Tensor]) -> Result<Vec<TensorType>> {
    tensors.iter().map(|t| Ok(TensorType::new(t.dtype()?, t.shape()?))).collect()
}

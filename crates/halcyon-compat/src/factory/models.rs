//! The traits by which one method takes models of every kind: modules, graphs, imported ONNX models.

use super::vendors;
#[cfg(feature = "onnx")]
use halcyon::OnnxSession;
use halcyon::hal::DeviceName;
use halcyon::prepare::{self, ModelOptimizer, OptimizationResult, Preparable, Strategy};
use halcyon::{Backend, BackendType, ConstData, DType, Error, Level, Result, Session, Tensor};
use halcyon_nn::{Forward, Inference, Module, ModuleExt, Prepared};
use serde::Serialize;

/// A level: a [`Level`], its name or alias (`"O2"`, `"balanced"`), or `None` for a default.
pub trait LevelName {
    /// The level, or `default` if none is named.
    ///
    /// # Errors
    /// [`Error::Argument`] for an unknown name; [`Error::Unsupported`] for a level that is not supported.
    fn or(&self, default: Level) -> Result<Level>;

    /// The level, or the backend's own if none is named.
    ///
    /// # Errors
    /// The errors of [`LevelName::or`].
    fn level(&self, backend: &Backend) -> Result<Level> {
        self.or(backend.level())
    }
}

impl LevelName for Level {
    fn or(&self, _: Level) -> Result<Level> {
        Ok(*self)
    }
}

impl LevelName for &str {
    fn or(&self, _: Level) -> Result<Level> {
        self.parse()
    }
}

impl LevelName for String {
    fn or(&self, _: Level) -> Result<Level> {
        self.parse()
    }
}

impl LevelName for Option<Level> {
    fn or(&self, default: Level) -> Result<Level> {
        Ok(self.unwrap_or(default))
    }
}

/// Marks implementations for modules of `halcyon-nn`.
#[derive(Clone, Copy, Debug)]
pub enum OfModule {}

/// Marks implementations for modules that [`Prepared`] holds.
#[derive(Clone, Copy, Debug)]
pub enum OfPrepared {}

/// Marks implementations for graphs and ONNX models.
#[derive(Clone, Copy, Debug)]
pub enum OfSession {}

/// Marks implementations for tensors.
#[derive(Clone, Copy, Debug)]
pub enum OfTensor {}

/// A value that can move to a device. The type parameter keeps the implementations for modules and tensors
/// apart; the compiler infers it.
pub trait Movable<Kind> {
    /// The type of the result: a tensor for a tensor, `()` for a module, which moves in place.
    type Moved;

    /// Moves the value.
    ///
    /// # Errors
    /// Errors of evaluating and copying.
    fn moved(&self, backend: &Backend) -> Result<Self::Moved>;
}

impl Movable<OfTensor> for Tensor {
    type Moved = Tensor;
    fn moved(&self, backend: &Backend) -> Result<Tensor> {
        self.to(backend)
    }
}

impl<M: Module + ?Sized> Movable<OfModule> for M {
    type Moved = ();
    fn moved(&self, backend: &Backend) -> Result<()> {
        ModuleExt::to_device(self, backend)
    }
}

/// A model that [`BaseBackend::prepare_model`](super::BaseBackend::prepare_model) takes.
pub trait PrepareModel<Kind> {
    /// A module gives [`Prepared`]; others give a model of the same kind.
    type Prepared;

    /// Prepares the model for a backend at a level.
    ///
    /// # Errors
    /// Errors of moving the model.
    fn prepared(self, backend: &Backend, level: Level) -> Result<Self::Prepared>;
}

impl<M: Module> PrepareModel<OfModule> for M {
    type Prepared = Prepared<M>;
    fn prepared(self, backend: &Backend, level: Level) -> Result<Prepared<M>> {
        halcyon_nn::prepare::prepare_model(backend, self, level)
    }
}

/// A module that [`BaseBackend::optimize_for_training`](super::BaseBackend::optimize_for_training) takes.
pub trait ForTraining<Kind> {
    /// The module.
    type Module: Module;

    /// Prepares the module for training on a backend.
    ///
    /// # Errors
    /// Errors of moving the module.
    fn for_training(self, backend: &Backend) -> Result<Prepared<Self::Module>>;
}

impl<M: Module> ForTraining<OfPrepared> for Prepared<M> {
    type Module = M;
    fn for_training(self, backend: &Backend) -> Result<Prepared<M>> {
        let level = self.level();
        halcyon_nn::prepare::prepare_model(backend, self.into_inner(), level)
    }
}

impl<M: Forward> ForTraining<OfModule> for M {
    type Module = M;
    fn for_training(self, backend: &Backend) -> Result<Prepared<M>> {
        halcyon_nn::prepare::prepare_model(backend, self, backend.level())
    }
}

/// A model that [`BaseBackend::optimize_for_inference`](super::BaseBackend::optimize_for_inference) takes.
pub trait ForInference<Kind> {
    /// A module takes a tensor; others take their inputs on the host, in order.
    type Sample: ?Sized;
    /// A module gives [`Inference`]; others give a model of the same kind.
    type Optimized;

    /// Compiles the model for inference.
    ///
    /// # Errors
    /// Errors of the dtype, the model and the device.
    fn for_inference(
        self,
        backend: &Backend,
        sample: Option<&Self::Sample>,
        dtype: Option<DType>,
    ) -> Result<Self::Optimized>;
}

impl<M: Forward + 'static> ForInference<OfPrepared> for Prepared<M> {
    type Sample = Tensor;
    type Optimized = Inference<'static>;
    fn for_inference(
        self,
        backend: &Backend,
        sample: Option<&Tensor>,
        dtype: Option<DType>,
    ) -> Result<Inference<'static>> {
        let level = self.level();
        inference(backend, self.into_inner(), level, sample, dtype)
    }
}

impl<M: Forward + 'static> ForInference<OfModule> for M {
    type Sample = Tensor;
    type Optimized = Inference<'static>;
    fn for_inference(
        self,
        backend: &Backend,
        sample: Option<&Tensor>,
        dtype: Option<DType>,
    ) -> Result<Inference<'static>> {
        inference(backend, self, backend.level(), sample, dtype)
    }
}

fn inference<M: Forward + 'static>(
    backend: &Backend,
    module: M,
    level: Level,
    sample: Option<&Tensor>,
    dtype: Option<DType>,
) -> Result<Inference<'static>> {
    let module = halcyon_nn::prepare::prepare_model(backend, module, level)?;
    let sample = sample.map(|x| x.to(backend)).transpose()?;
    halcyon_nn::prepare::optimize_for_inference(module, sample.as_ref(), dtype)
}

macro_rules! sessions {
    ($($(#[$when:meta])* $ty:ty;)*) => {
        $(
            $(#[$when])*
            impl PrepareModel<OfSession> for $ty {
                type Prepared = $ty;
                fn prepared(self, backend: &Backend, level: Level) -> Result<$ty> {
                    prepare::prepare_model(backend, &self, level)
                }
            }

            $(#[$when])*
            impl ForInference<OfSession> for $ty {
                type Sample = [ConstData];
                type Optimized = $ty;
                fn for_inference(
                    self,
                    backend: &Backend,
                    sample: Option<&[ConstData]>,
                    dtype: Option<DType>,
                ) -> Result<$ty> {
                    let level = Preparable::backend(&self).level();
                    let model = prepare::prepare_model(backend, &self, level)?;
                    prepare::optimize_for_inference(&model, sample, dtype)
                }
            }
        )*
    };
}

sessions! {
    Session;
    #[cfg(feature = "onnx")]
    OnnxSession;
}

/// Optimises models for one backend. Made by [`get_optimizer`].
///
/// ```
/// use halcyon_compat::factory::{OptimizationLevel, get_optimizer};
/// # use halcyon::{ConstData, DType, Session, ir::{Graph, TensorType}};
/// # fn main() -> halcyon::Result<()> {
/// let optimizer = get_optimizer(Some("cpu"))?;
/// # let mut g = Graph::new();
/// # let x = g.input("x", TensorType::new(DType::F32, [4]));
/// # let y = g.exp(x)?;
/// # g.output("y", y);
/// # let sample = [ConstData::from_slice(&[4], &[0.5f32; 4])?];
/// # let model = Session::new(optimizer.backend(), g);
/// let (model, result) = optimizer.optimize(model, OptimizationLevel::O2, &sample)?;
/// println!("applied: {:?}, success: {}", result.optimizations_applied, result.success);
/// # let _ = model;
/// # Ok(())
/// # }
/// ```
///
/// The names of earlier versions are marked as deprecated, so the compiler reports their use:
///
/// ```compile_fail
/// #![deny(deprecated)]
/// use halcyon_compat::factory::{BaseBackend, get_backend};
/// # fn main() -> halcyon::Result<()> {
/// get_backend(Some("cpu"), None)?.get_device_info_dict(None)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer(ModelOptimizer);

/// The optimizer of a backend (`cuda`) or a device (`cuda:1`) by name; `auto` or `None` for the best one, in
/// the order NVIDIA, AMD, TPU, Intel, CPU.
///
/// # Errors
/// The errors of [`BackendFactory::create`](super::BackendFactory::create).
pub fn get_optimizer(name: Option<&str>) -> Result<Optimizer> {
    let asked: DeviceName = name.unwrap_or("auto").parse()?;
    let backend = match (name, asked.backend) {
        // This module's order of `auto` is its own.
        (Some(name), kind) if kind != BackendType::Auto => Backend::open(name)?,
        _ => Backend::builder().backend_type(BackendType::Auto).policy(vendors()?).build()?,
    };
    Ok(Optimizer(ModelOptimizer::new(&backend)))
}

impl Optimizer {
    /// The backend.
    pub fn backend(&self) -> &Backend {
        self.0.backend()
    }

    /// Optimises a graph or ONNX model at a level. Also returns what the level changed
    /// ([`ModelOptimizer::optimize`]). For modules there is [`Optimizer::optimize_module`].
    ///
    /// # Errors
    /// The errors of [`ModelOptimizer::optimize`] and [`LevelName::or`].
    pub fn optimize<M: Preparable>(
        &self,
        model: M,
        level: impl LevelName,
        sample_input: &[ConstData],
    ) -> Result<(M, OptimizationResult)> {
        self.0.optimize(&model, level.level(self.backend())?, sample_input)
    }

    /// Compiles a module for inference at a level. Also returns what the level changed.
    ///
    /// # Errors
    /// The errors of [`halcyon_nn::prepare::optimize`] and [`LevelName::or`].
    pub fn optimize_module<M: Forward + 'static>(
        &self,
        model: M,
        level: impl LevelName,
        sample_input: &Tensor,
    ) -> Result<(Inference<'static>, OptimizationResult)> {
        let backend = self.backend();
        let level = level.level(backend)?;
        ModuleExt::to_device(&model, backend)?;
        let forward = |m: &M, x: &[Tensor]| {
            let x = x.first().ok_or_else(|| Error::argument("optimize", "there is no input"))?;
            Ok(vec![m.forward(x)])
        };
        let sample = sample_input.to(backend)?;
        halcyon_nn::prepare::optimize(backend, model, level, &[&sample], forward)
    }

    /// Like [`Optimizer::optimize`], but returns only the model, as earlier versions of this interface did.
    ///
    /// # Errors
    /// The errors of [`Optimizer::optimize`].
    #[deprecated(note = "use `optimize`, which also returns the result")]
    pub fn optimize_legacy<M: Preparable>(
        &self,
        model: M,
        level: impl LevelName,
        sample_input: &[ConstData],
    ) -> Result<M> {
        Ok(self.optimize(model, level, sample_input)?.0)
    }

    /// The transformations, with the speed-ups measured on this device ([`ModelOptimizer::strategies`]).
    pub fn get_available_strategies(&self) -> Vec<Strategy> {
        self.0.strategies()
    }
}

/// Data as a dictionary.
pub trait Dictionary: Serialize {
    /// All fields by name.
    ///
    /// # Errors
    /// [`Error::Internal`] if it cannot be converted to JSON.
    fn to_dict(&self) -> Result<serde_json::Value> {
        serde_json::to_value(self).map_err(|e| Error::internal(e.to_string()))
    }
}

impl Dictionary for OptimizationResult {}
impl Dictionary for Strategy {}

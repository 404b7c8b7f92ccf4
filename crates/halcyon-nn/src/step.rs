//! Training steps. One plan computes the forward, the gradients, and the update of parameters and buffers.

mod state;
mod trace;

use crate::ema::Ema;
use crate::module::{Module, ModuleExt};
use crate::optim::Optimizer;
use crate::scaler::{LossScaler, Scaling};
use crate::slot::{Slot, SlotKind};
use halcyon::ir::DType;
use halcyon::ir::dtype::Scalar;
use halcyon::ir::error::{Error, Result, Span};
use halcyon::ir::passes::AmpPolicy;
use halcyon::{Backend, Compiled, Fit, MixedPrecision, State, Tensor};
pub use state::StepGraph;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use trace::Parts;

type Forward<'a> = Rc<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;
type Traced<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;

/// A training step that is planned once per set of input types. The plan computes the loss, the gradients,
/// and the new parameters, optimizer state and buffers. A new value overwrites the memory of the old value,
/// unless the caller still holds a handle on the old value. A later call with inputs of the same types only
/// runs the plan.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Linear, Optimizer, Sgd, TrainStep};
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 1, 1)?;
/// let optimizer = Optimizer::new(&layer, Sgd::new().rate(0.1))?;
/// let mut step = TrainStep::new(&layer, optimizer, |m: &&Linear, batch: &[Tensor]| {
///     Ok(vec![(m.forward(&batch[0]) - &batch[1]).sqr().mean(..)])
/// })?;
/// let x = Tensor::from_slice(&b, [4, 1], &[0.0f32, 1.0, 2.0, 3.0])?;
/// let y = &x * 2.0 + 1.0;
/// let mut loss = f32::INFINITY;
/// for _ in 0..200 {
///     loss = step.run(&[&x, &y])?[0].item()?;
/// }
/// assert!(loss < 1e-3);
/// # Ok(())
/// # }
/// ```
pub struct TrainStep<'a> {
    forward: Forward<'a>,
    optimizer: Arc<Mutex<Optimizer>>,
    /// Parameters that the optimizer does not update.
    frozen: Vec<Slot>,
    /// The module's buffers. The forward may write them.
    buffers: Vec<Slot>,
    backend: Backend,
    scaler: Option<LossScaler>,
    scaling: Option<Scaling>,
    mixed: Option<MixedPrecision>,
    own: Own,
    budget: Option<MemoryBudget>,
    sums: Option<Sums>,
    ema: Option<Arc<Ema>>,
    seed: u64,
    /// The function that ends with an update, and the function that only adds gradients to the sums. Each is
    /// made when it is first needed, because options may change until then.
    compiled: [Option<Compiled<Traced<'a>>>; 2],
    /// The number of parts into which the last trace for a memory budget divided the forward.
    parts: Arc<AtomicUsize>,
}

/// The largest scratch memory of a step, in bytes: the sum of [`Fit::activations`] and [`Fit::workspace`]. If
/// the plain step needs more, the forward is divided into parts that are computed again for the gradients.
/// The step tries several numbers of parts, up to 64, and uses the smallest number that keeps the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryBudget(pub u64);

/// Whether the user chose each setting. The mixed precision follows the backend if the user did not choose
/// it. The scaler follows the backend if the user chose neither setting.
#[derive(Clone, Copy, Default)]
struct Own {
    mixed: bool,
    scaler: bool,
}

/// The summed gradients of the micro-batches of one update.
struct Sums {
    /// Number of micro-batches per update.
    n: u64,
    /// Number of micro-batches since the last update.
    done: u64,
    /// The sums of gradients, one for each parameter of the optimizer.
    states: Vec<Arc<State>>,
}

/// How a compiled function uses the gradients of its batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// The function updates the parameters.
    Update,
    /// The function adds the gradients to the sums.
    Add,
}

impl fmt::Debug for TrainStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrainStep({} plans)", self.plans())
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl<'a> TrainStep<'a> {
    /// A training step of `module`, which may be a reference to a module. `f(module, batch)` returns the
    /// loss, a scalar, followed by any further results.
    ///
    /// If the mixed precision of the backend is f16, the step scales its loss. If the backend was built with
    /// [`halcyon::BackendBuilder::loss_scale`], the step scales its loss by that scale, whatever the mixed
    /// precision is.
    ///
    /// # Errors
    /// `Error::Argument` if the optimizer updates parameters of another module.
    pub fn new<M: Module + 'a>(
        module: M,
        optimizer: Optimizer,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<TrainStep<'a>> {
        let slots: Vec<Slot> = module.slots().into_iter().map(|(_, s)| s).collect();
        let of_module = |p: &Slot| slots.iter().any(|s| s.id() == p.id());
        let Some(first) = optimizer.slots().next().filter(|_| optimizer.slots().all(of_module)) else {
            let what = "the optimizer updates parameters of another module; build it with this one";
            return Err(Error::argument("TrainStep", what));
        };
        let backend = crate::slot::backend_of(first);
        let updated = |s: &Slot| optimizer.slots().any(|p| p.id() == s.id());
        let others: Vec<Slot> = slots.iter().filter(|s| !updated(s)).cloned().collect();
        let (buffers, frozen): (Vec<Slot>, Vec<Slot>) =
            others.into_iter().partition(|s| s.kind() == SlotKind::Buffer);
        let step = TrainStep {
            forward: Rc::new(move |batch: &[Tensor]| f(&module, batch)),
            optimizer: Arc::new(Mutex::new(optimizer)),
            frozen,
            buffers,
            scaler: None,
            scaling: None,
            mixed: None,
            own: Own::default(),
            budget: None,
            sums: None,
            ema: None,
            seed: backend.next_seed(),
            compiled: [None, None],
            parts: Arc::new(AtomicUsize::new(1)),
            backend,
        };
        step.like_the_backend()
    }

    /// Takes the settings of mixed precision and of loss scaling from the backend.
    fn like_the_backend(self) -> Result<TrainStep<'a>> {
        match (of_backend(&self.backend), scaler_of(&self.backend)) {
            (Some(mixed), _) => self.mixed_and_scaler(mixed),
            (None, Some(scaler)) => self.scaler(Some(scaler)),
            (None, None) => Ok(self),
        }
    }

    /// A training step with loss scaling, for modules in f16. The returned loss is not scaled.
    ///
    /// # Errors
    /// Those of [`TrainStep::new`], and `Error::Argument` for settings out of range.
    pub fn with_scaler<M: Module + 'a>(
        module: M,
        optimizer: Optimizer,
        scaler: LossScaler,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<TrainStep<'a>> {
        TrainStep::new(module, optimizer, f)?.loss_scaler(Some(scaler))
    }

    /// Sets or removes the loss scaler. The state of a new scaler starts from its initial scale.
    ///
    /// # Errors
    /// `Error::Argument` for settings out of range, and for a call between the batches of one update, because
    /// the gradients of these batches would have different scales.
    pub fn loss_scaler(mut self, scaler: Option<LossScaler>) -> Result<Self> {
        self.own.scaler = true;
        self.scaler(scaler)
    }

    fn scaler(mut self, scaler: Option<LossScaler>) -> Result<Self> {
        if self.sums.as_ref().is_some_and(|s| s.done > 0) {
            let what = "a new scale between the batches of one update; finish the update first";
            return Err(Error::argument("loss_scaler", what));
        }
        self.scaling = scaler.map(|s| Scaling::new(&self.backend, s)).transpose()?;
        self.scaler = scaler;
        Ok(self.replanned())
    }

    /// Sets the mixed precision of this step, in place of the backend's: an [`AmpPolicy`], or a
    /// [`MixedPrecision`] with the ops that it applies to. Parameters and the optimizer's state keep their
    /// dtypes. With f16, or if the backend has a [`halcyon::BackendBuilder::loss_scale`], a step without a
    /// loss scaler gets one. Its first scale is that of the backend, or 65536 by default. To train without
    /// the scaler, call [`TrainStep::loss_scaler`] after this method.
    ///
    /// # Errors
    /// `Error::Unsupported` if the device does not store the dtype; `Error::Argument` if a scaler would be
    /// added between the batches of one update.
    pub fn amp(mut self, policy: impl Into<MixedPrecision>) -> Result<Self> {
        self.own.mixed = true;
        self.mixed_and_scaler(MixedPrecision { guarded: true, ..policy.into() })
    }

    fn mixed_and_scaler(mut self, mixed: MixedPrecision) -> Result<Self> {
        let caps = self.backend.device().as_target().caps();
        halcyon::ir::passes::autocast::check(mixed.policy, caps, self.backend.id())?;
        let default = (mixed.policy == AmpPolicy::F16).then(LossScaler::default);
        self.mixed = Some(mixed);
        match scaler_of(&self.backend).or(default).filter(|_| self.scaler.is_none()) {
            Some(scaler) => self.scaler(Some(scaler)),
            None => Ok(self.replanned()),
        }
    }

    /// Makes one update for every `n` calls of [`TrainStep::run`], with the mean of the gradients of the
    /// calls. If all batches have the same size and the loss is a mean over the batch, this is the gradient
    /// of all batches together.
    ///
    /// # Errors
    /// `Error::Argument` if `n` is 0; errors of the device.
    pub fn accumulate(mut self, n: u64) -> Result<Self> {
        if n == 0 {
            return Err(Error::argument("accumulate", "an update needs at least one batch"));
        }
        let zeros = |s: &Slot| {
            let p = s.stored();
            let wide = if p.dtype()? == DType::F64 { DType::F64 } else { DType::F32 };
            let zeros = Tensor::zeros(&self.backend, p.shape()?, wide);
            zeros.eval()?;
            Ok(Arc::new(State::new(zeros)))
        };
        self.sums = match n {
            1 => None,
            _ => {
                let states = lock(&self.optimizer).slots().map(zeros).collect::<Result<_>>()?;
                Some(Sums { n, done: 0, states })
            }
        };
        Ok(self.replanned())
    }

    /// Keeps moving averages of the parameters; see [`TrainStep::averages`].
    ///
    /// # Errors
    /// `Error::Argument` if the decay is outside of 0..1; errors of the device.
    pub fn ema(mut self, decay: f64) -> Result<Self> {
        self.ema = Some(Arc::new(Ema::new(&lock(&self.optimizer), decay)?));
        Ok(self.replanned())
    }

    /// Bounds the scratch memory of the step. Without a budget, only the parts of the forward that use
    /// [`crate::checkpoint`] are computed twice.
    pub fn memory_budget(mut self, budget: MemoryBudget) -> Self {
        self.budget = Some(budget);
        self.replanned()
    }

    fn replanned(mut self) -> Self {
        self.compiled = [None, None];
        self
    }

    /// Sets the seed of random numbers. The key of each step follows from this seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Like [`TrainStep::seed`], but changes an existing step.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    /// Calls `f` with the optimizer.
    pub fn with_optimizer<R>(&self, f: impl FnOnce(&mut Optimizer) -> R) -> R {
        f(&mut lock(&self.optimizer))
    }

    /// The scale of the loss in the next step, and the number of steps skipped so far; `None` without a
    /// scaler. This call waits for the device.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn scale(&self) -> Result<Option<(f64, u64)>> {
        let Some(s) = &self.scaling else { return Ok(None) };
        let [scale, _, skipped] = s.states().map(|s| s.value());
        Ok(Some((scale.item::<f64>()?, skipped.item::<i64>()? as u64)))
    }

    /// The moving averages of the parameters, if [`TrainStep::ema`] keeps them.
    pub fn averages(&self) -> Option<&Ema> {
        self.ema.as_deref()
    }

    /// The number of calls since the last update; 0 if gradients are not accumulated.
    pub fn accumulated(&self) -> u64 {
        self.sums.as_ref().map_or(0, |s| s.done)
    }

    /// The mixed precision that the user set, or else a copy of the backend's if that is f16. Otherwise
    /// `None`: the step uses the backend's mixed precision.
    pub fn mixed_precision(&self) -> Option<&MixedPrecision> {
        self.mixed.as_ref()
    }

    /// The number of parts into which [`TrainStep::run`] or [`TrainStep::fit`] last divided the forward for
    /// the [`MemoryBudget`]; 1 if there is no budget, or if the plain step keeps it.
    pub fn recomputed_parts(&self) -> usize {
        self.parts.load(Ordering::Relaxed)
    }

    /// The number of plans. There is at least one per set of input types. A step that accumulates gradients
    /// has another plan for the calls without an update, and a step needs another plan while the caller holds
    /// a handle on an old value of a state.
    pub fn plans(&self) -> usize {
        self.compiled.iter().flatten().map(Compiled::plans).sum()
    }

    /// The memory that a step with a batch of these types needs, in addition to parameters, states and the
    /// batch. This call runs nothing and allocates no device memory.
    ///
    /// # Errors
    /// Errors of the forward and of planning, such as a [`MemoryBudget`] that cannot be kept.
    #[track_caller]
    pub fn fit(&self, batch: &[&Tensor]) -> Result<Fit> {
        let parts = self.parts_of(Kind::Update, Span::caller())?;
        let states = self.states(Kind::Update);
        let values = states.iter().map(|s| s.value());
        let frozen = self.frozen.iter().map(Slot::stored);
        let given = batch.iter().map(|t| (*t).clone()).chain(frozen).chain(values);
        let given = given.map(|t| Ok(Tensor::placeholder(&self.backend, t.dtype()?, t.shape()?)));
        let given = given.collect::<Result<Vec<Tensor>>>()?;
        let results = parts.planned(&lock(&self.optimizer), &given)?;
        let fixed = given.len() - states.len();
        let donated: Vec<bool> = (0..given.len()).map(|i| i >= fixed).collect();
        self.backend.fit_of(&given, &donated, &results, self.mixed.as_ref())
    }

    /// Runs one step. Returns the results of the forward; the first result is the loss. An update replaces
    /// parameters, states and buffers. A call that only accumulates gradients replaces buffers and the sums
    /// of gradients. If the step fails before it starts to run, all values stay the same.
    ///
    /// # Errors
    /// Errors of the forward, of planning, and of the device. If the device fails during the run, the
    /// parameters may be lost; restore them from a file.
    #[track_caller]
    pub fn run(&mut self, batch: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (n, done) = self.sums.as_ref().map_or((1, 0), |s| (s.n, s.done));
        let kind = if done + 1 < n { Kind::Add } else { Kind::Update };
        let args = self.arguments(kind)?;
        let states = self.states(kind);
        let states: Vec<&State> = states.iter().map(|s| &**s).collect();
        let mut fixed: Vec<Tensor> = self.frozen.iter().map(Slot::stored).collect();
        if kind == Kind::Add {
            fixed.extend(lock(&self.optimizer).slots().map(Slot::stored));
            fixed.extend(self.scaling.iter().map(|s| s.states()[0].value()));
        }
        let inputs: Vec<&Tensor> = batch.iter().copied().chain(&fixed).collect();
        let place = usize::from(kind == Kind::Add);
        if self.compiled[place].is_none() {
            self.compiled[place] = Some(self.compile(kind, Span::caller())?);
        }
        let Some(compiled) = &self.compiled[place] else {
            return Err(Error::internal("a step was not compiled"));
        };
        let results = compiled.call_updating(&inputs, &states, &args)?;
        if let Some(s) = &mut self.sums {
            s.done = (s.done + 1) % s.n;
        }
        if kind == Kind::Update {
            self.with_optimizer(|o| o.set_steps(o.steps() + 1));
        }
        Ok(results)
    }

    /// The run-time arguments of the next run.
    fn arguments(&self, kind: Kind) -> Result<Vec<Scalar>> {
        let (n, done) = self.sums.as_ref().map_or((1, 0), |s| (s.n, s.done));
        let optimizer = lock(&self.optimizer);
        let steps = optimizer.steps();
        let numbers = match (kind, &self.scaling) {
            (Kind::Add, _) => vec![],
            (_, None) => optimizer.host_scalars()?.concat(),
            // The host passes the number of the step and the rates. The device computes the scalars from
            // them, because the scalars depend on the number of skipped steps, which is on the device.
            (_, Some(_)) => std::iter::once((steps + 1) as f64).chain(optimizer.rates()).collect(),
        };
        let key = mixed(self.seed, steps.wrapping_mul(n).wrapping_add(done));
        let mut args = vec![Scalar::U(key & 0xffff_ffff), Scalar::U(key >> 32)];
        args.extend(numbers.into_iter().map(Scalar::F));
        Ok(args)
    }

    /// The states that a function replaces, in the order of its inputs.
    fn states(&self, kind: Kind) -> Vec<Arc<State>> {
        let mut all: Vec<Arc<State>> = vec![];
        if kind == Kind::Update {
            all.extend(lock(&self.optimizer).states().concat());
            all.extend(self.ema.iter().flat_map(|e| e.states()).cloned());
        }
        all.extend(self.buffers.iter().map(Slot::state));
        all.extend(self.sums.iter().flat_map(|s| s.states.iter().cloned()));
        if kind == Kind::Update {
            all.extend(self.scaling.iter().flat_map(|s| s.states().map(Arc::clone)));
        }
        all
    }

    fn compile(&self, kind: Kind, at: Span) -> Result<Compiled<Traced<'a>>> {
        let parts = self.parts_of(kind, at)?;
        let optimizer = self.optimizer.clone();
        let traced: Traced<'a> = Box::new(move |inputs| parts.planned(&lock(&optimizer), inputs));
        match &self.mixed {
            Some(m) => self.backend.compile_mixed(traced, m),
            None => Ok(self.backend.compile(traced)),
        }
    }

    fn parts_of(&self, kind: Kind, at: Span) -> Result<Parts<'a>> {
        let optimizer = lock(&self.optimizer);
        Ok(Parts {
            forward: self.forward.clone(),
            kind,
            counts: optimizer.states().iter().map(Vec::len).collect(),
            scalars: optimizer.host_scalars()?.iter().map(Vec::len).collect(),
            params: optimizer.slots().cloned().collect(),
            frozen: self.frozen.clone(),
            buffers: self.buffers.clone(),
            scaler: self.scaler,
            micro_batches: self.sums.as_ref().map(|s| s.n),
            ema: self.ema.clone(),
            budget: self.budget,
            mixed: self.mixed.clone(),
            at,
            chosen: self.parts.clone(),
        })
    }

    /// The backend of the parameters.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }
}

/// The backend's mixed precision if it is f16, otherwise `None`. A step copies only f16 from the backend,
/// because only f16 needs a loss scaler. With `None`, the step uses the backend's own setting.
fn of_backend(backend: &Backend) -> Option<MixedPrecision> {
    let passes = backend.lower_options().passes;
    if passes.amp != AmpPolicy::F16 {
        return None;
    }
    let force = passes.kept == Default::default();
    let only = passes.mixed.only.map(|o| o.into_iter().collect());
    let f32 = passes.mixed.f32.into_iter().collect();
    Some(MixedPrecision { policy: AmpPolicy::F16, only, f32, force, guarded: true })
}

/// The loss scaler with the backend's [`halcyon::BackendBuilder::loss_scale`]; `None` if the backend has no
/// scale.
fn scaler_of(backend: &Backend) -> Option<LossScaler> {
    backend.loss_scale().map(|initial| LossScaler { initial, ..LossScaler::default() })
}

/// A key of random numbers for a step, by the finaliser of SplitMix64 (Steele et al. 2014).
fn mixed(seed: u64, step: u64) -> u64 {
    let mut z = seed.wrapping_add(step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

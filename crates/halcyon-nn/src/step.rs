//! Training steps: forward, gradient, update of parameters and buffers as one plan.

use crate::module::{Module, ModuleExt};
use crate::optim::Optimizer;
use crate::scaler::{LossScaler, Scaling, next, overflowed};
use crate::scope::{Scope, Writes, within};
use crate::slot::{Slot, SlotKind};
use halcyon::ir::DType;
use halcyon::ir::dtype::Scalar;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Compiled, State, Tensor};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

type Traced<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;

/// A training step that is planned once per set of input types. The plan computes the loss, the gradients,
/// and the new parameters, optimizer state and buffers, which take over the memory of the old ones. A later
/// call with inputs of the same types runs only that plan.
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
    compiled: Compiled<Traced<'a>>,
    /// The function that `compiled` traces, to compile it for another backend.
    traced: Rc<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>,
    optimizer: Arc<Mutex<Optimizer>>,
    /// Parameters that the optimizer does not update.
    frozen: Vec<Slot>,
    /// Buffers, which the forward may write.
    buffers: Vec<Slot>,
    backend: Backend,
    scaling: Option<Scaling>,
    seed: u64,
}

impl fmt::Debug for TrainStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrainStep({} plans)", self.compiled.plans())
    }
}

/// What a trace of the step needs to know of the module and optimizer. Its inputs are the batch and the
/// frozen parameters, then the states: those of the optimizer, the buffers, and those of the scaler if there
/// is one.
struct Parts {
    /// The slots of the optimizer, in its order.
    params: Vec<Slot>,
    /// The number of states that the optimizer has for each parameter, the parameter included.
    counts: Vec<usize>,
    frozen: Vec<Slot>,
    buffers: Vec<Slot>,
    /// The number of scalars of each group.
    scalars: Vec<usize>,
    scaler: Option<LossScaler>,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl<'a> TrainStep<'a> {
    /// A step of `module`, which may be a reference to one. `f(module, batch)` returns the loss, a scalar,
    /// and after it any further results.
    ///
    /// # Errors
    /// `Error::Argument` if the optimizer updates parameters of another module.
    pub fn new<M: Module + 'a>(
        module: M,
        optimizer: Optimizer,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<TrainStep<'a>> {
        TrainStep::build(module, optimizer, None, f)
    }

    /// A step with loss scaling, for modules in f16. The loss is returned without the scale.
    ///
    /// # Errors
    /// Those of [`TrainStep::new`], and `Error::Argument` for settings out of range.
    pub fn with_scaler<M: Module + 'a>(
        module: M,
        optimizer: Optimizer,
        scaler: LossScaler,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<TrainStep<'a>> {
        TrainStep::build(module, optimizer, Some(scaler), f)
    }

    fn build<M: Module + 'a>(
        module: M,
        optimizer: Optimizer,
        scaler: Option<LossScaler>,
        f: impl Fn(&M, &[Tensor]) -> Result<Vec<Tensor>> + 'a,
    ) -> Result<TrainStep<'a>> {
        let params: Vec<Slot> = optimizer.slots().cloned().collect();
        let slots: Vec<Slot> = module.slots().into_iter().map(|(_, s)| s).collect();
        let of_module = |p: &Slot| slots.iter().any(|s| s.id() == p.id());
        let Some(first) = params.first().filter(|_| params.iter().all(of_module)) else {
            let what = "the optimizer updates parameters of another module; build it with this one";
            return Err(Error::argument("TrainStep", what));
        };
        let backend = crate::slot::backend_of(first);
        let updated = |s: &Slot| params.iter().any(|p| p.id() == s.id());
        let others = slots.into_iter().filter(|s| !updated(s));
        let (buffers, frozen): (Vec<Slot>, Vec<Slot>) = others.partition(|s| s.kind() == SlotKind::Buffer);
        let parts = Parts {
            counts: optimizer.states().iter().map(Vec::len).collect(),
            scalars: optimizer.host_scalars()?.iter().map(Vec::len).collect(),
            frozen: frozen.clone(),
            buffers: buffers.clone(),
            params,
            scaler,
        };
        let scaling = scaler.map(|s| Scaling::new(&backend, s)).transpose()?;
        let optimizer = Arc::new(Mutex::new(optimizer));
        let of_trace = optimizer.clone();
        let traced: Rc<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a> =
            Rc::new(move |inputs: &[Tensor]| {
                parts.trace(&lock(&of_trace), inputs, |batch| f(&module, batch))
            });
        let (seed, compiled) = (backend.next_seed(), compile(&backend, &traced));
        Ok(TrainStep { compiled, traced, optimizer, frozen, buffers, backend, scaling, seed })
    }

    /// Sets the seed from which the keys of random numbers follow, one key per step.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Like [`TrainStep::seed`], for a step that exists.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    /// Runs `f` with the optimizer.
    pub fn with_optimizer<R>(&self, f: impl FnOnce(&mut Optimizer) -> R) -> R {
        f(&mut lock(&self.optimizer))
    }

    /// The factor of the loss in the next step, and the number of steps skipped so far; `None` without a
    /// scaler. Waits for the device.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn scale(&self) -> Result<Option<(f64, u64)>> {
        let Some(s) = &self.scaling else { return Ok(None) };
        let [scale, _, skipped] = s.states().map(|s| s.value());
        Ok(Some((scale.item::<f64>()?, skipped.item::<i64>()? as u64)))
    }

    /// The number of plans, one per set of input types.
    pub fn plans(&self) -> usize {
        self.compiled.plans()
    }

    /// One step. Returns what the forward returned, the loss first. Parameters, state and buffers are
    /// replaced; if the step fails before it has started to run, they keep their values.
    ///
    /// # Errors
    /// Errors of the forward, of planning, and of the device. After an error of the device during the run the
    /// parameters may be lost; restore them from a file.
    #[track_caller]
    pub fn run(&mut self, batch: &[&Tensor]) -> Result<Vec<Tensor>> {
        let (states, args) = (self.states(), self.arguments()?);
        let states: Vec<&State> = states.iter().map(|s| &**s).collect();
        let frozen: Vec<Tensor> = self.frozen.iter().map(Slot::stored).collect();
        let inputs: Vec<&Tensor> = batch.iter().copied().chain(&frozen).collect();
        let results = self.compiled.call_updating(&inputs, &states, &args)?;
        self.with_optimizer(|o| o.set_steps(o.steps() + 1));
        Ok(results)
    }

    /// The states that a step replaces: those of the optimizer, the buffers, those of the scaler.
    fn states(&self) -> Vec<Arc<State>> {
        let mut states: Vec<Arc<State>> = lock(&self.optimizer).states().concat();
        states.extend(self.buffers.iter().map(Slot::state));
        states.extend(self.scaling.iter().flat_map(|s| s.states().map(Arc::clone)));
        states
    }

    /// The arguments of the next step's plan.
    fn arguments(&self) -> Result<Vec<Scalar>> {
        let optimizer = lock(&self.optimizer);
        let steps = optimizer.steps();
        let numbers = match self.scaling {
            None => optimizer.host_scalars()?.concat(),
            // The other numbers depend on the number of skipped steps, which the device knows.
            Some(_) => std::iter::once((steps + 1) as f64).chain(optimizer.rates()).collect(),
        };
        let key = mixed(self.seed, steps);
        let mut args = vec![Scalar::U(key & 0xffff_ffff), Scalar::U(key >> 32)];
        args.extend(numbers.into_iter().map(Scalar::F));
        Ok(args)
    }

    /// The seed of random numbers; see [`TrainStep::seed`].
    pub fn current_seed(&self) -> u64 {
        self.seed
    }

    /// What a step keeps beside parameters and buffers, by name: the optimizer's state (see
    /// [`Optimizer::state`]), and `scaler.scale`, `scaler.good` and `scaler.skipped` with a scaler.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut out = lock(&self.optimizer).state();
        if let Some(s) = &self.scaling {
            let names = SCALER.iter().zip(s.states());
            out.extend(names.map(|(n, s)| ((*n).to_string(), s.value())));
        }
        out
    }

    /// Replaces tensors that [`TrainStep::state`] lists, all or none. Tensors that are not given keep their
    /// values.
    ///
    /// # Errors
    /// `Error::Argument` if there is no tensor of a name; `Error::Shape` if a dtype or shape differs.
    pub fn load_state(&mut self, new: Vec<(String, Tensor)>) -> Result<()> {
        let old: HashMap<String, Tensor> = self.state().into_iter().collect();
        for (name, t) in &new {
            let have = old.get(name).ok_or_else(|| {
                Error::argument("load_state", format!("the training step keeps no `{name}`"))
            })?;
            let types = |t: &Tensor| Ok::<_, Error>((t.dtype()?, t.shape()?));
            let ((have, shape), (dtype, given)) = (types(have)?, types(t)?);
            if (have, &shape) != (dtype, &given) {
                let what = format!("`{name}` is {have}{shape}, the new value {dtype}{given}");
                return Err(Error::shape("load_state", what));
            }
        }
        for (name, t) in new {
            let scaler = SCALER.iter().position(|n| *n == name);
            match (scaler, &self.scaling) {
                (Some(i), Some(s)) => s.states()[i].write(t)?,
                _ => self.with_optimizer(|o| o.set_state(&name, t))?,
            }
        }
        Ok(())
    }

    /// Moves parameters, buffers, the optimizer's state and the scaler's to another backend. Later steps are
    /// planned there. Tensors that the forward captures stay where they are: pass data as the batch.
    ///
    /// # Errors
    /// Errors of the copies; then nothing has moved.
    pub fn to_device(&mut self, backend: &Backend) -> Result<()> {
        let moved = |s: &Arc<State>| s.value().to(backend);
        let slots: Vec<Slot> = {
            let optimizer = lock(&self.optimizer);
            optimizer.slots().chain(&self.frozen).chain(&self.buffers).cloned().collect()
        };
        let values = slots.iter().map(|s| s.stored().to(backend)).collect::<Result<Vec<_>>>()?;
        let scaling = self.scaling.as_ref().map(|s| s.states().map(moved));
        let scaling = match scaling {
            None => None,
            Some([a, b, c]) => Some(Scaling::holding([a?, b?, c?])),
        };
        lock(&self.optimizer).move_state(moved)?;
        slots.iter().zip(values).try_for_each(|(s, t)| s.replace(t))?;
        self.scaling = scaling;
        self.compiled = compile(backend, &self.traced);
        self.backend = backend.clone();
        Ok(())
    }

    /// The next step for a batch as a graph, for inspection: nothing runs. Its inputs are named `batch.N` and
    /// by the paths of parameters, state and buffers.
    ///
    /// # Errors
    /// Errors of the forward, and of copying the inputs to the host.
    pub fn graph(&self, batch: &[&Tensor]) -> Result<StepGraph> {
        let path = |s: &Slot| s.path();
        let mut inputs: Vec<(String, Tensor)> =
            batch.iter().enumerate().map(|(i, t)| (format!("batch.{i}"), (*t).clone())).collect();
        inputs.extend(self.frozen.iter().map(|s| (path(s), s.stored())));
        let names = lock(&self.optimizer).state_names();
        let names = names.into_iter().chain(self.buffers.iter().map(path));
        let names = names.chain(SCALER.iter().map(|n| (*n).to_string()));
        inputs.extend(names.zip(self.states().iter().map(|s| s.value())));
        let given =
            |(_, t): &(String, Tensor)| Ok(Tensor::placeholder(&self.backend, t.dtype()?, t.shape()?));
        let given = inputs.iter().map(given).collect::<Result<Vec<_>>>()?;
        let outputs = (self.traced)(&given)?;
        let named: Vec<(&str, &Tensor)> =
            inputs.iter().zip(&given).map(|((n, _), t)| (n.as_str(), t)).collect();
        let (graph, captured, numbers) = Tensor::trace_compiled(&named, &outputs)?;
        let arguments = self.arguments()?;
        let args = numbers.iter().map(|k| arguments.get(*k as usize).copied());
        let args = args.collect::<Option<Vec<_>>>();
        let args = args.ok_or_else(|| Error::internal("an argument of the step has no value"))?;
        inputs.extend(captured.into_iter().enumerate().map(|(i, t)| (format!("captured.{i}"), t)));
        Ok(StepGraph { graph, inputs, args })
    }

    /// The backend of the parameters.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }
}

/// A training step as a graph, with the values of its inputs; see [`TrainStep::graph`].
#[derive(Debug)]
pub struct StepGraph {
    pub graph: halcyon::ir::Graph,
    /// The inputs with their names, in the order of the graph's inputs.
    pub inputs: Vec<(String, Tensor)>,
    /// The values of the graph's arguments.
    pub args: Vec<Scalar>,
}

/// Names of the scaler's states.
const SCALER: [&str; 3] = ["scaler.scale", "scaler.good", "scaler.skipped"];

/// Compiles a shared function.
fn compile<'a>(
    backend: &Backend,
    traced: &Rc<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>,
) -> Compiled<Traced<'a>> {
    let traced = traced.clone();
    backend.compile(Box::new(move |x: &[Tensor]| traced(x)))
}

/// A key of random numbers for a step, by the finaliser of SplitMix64 (Steele et al. 2014).
fn mixed(seed: u64, step: u64) -> u64 {
    let mut z = seed.wrapping_add(step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Parts {
    /// The results of the step for placeholders: what the forward returns, then the new values of the states.
    fn trace(
        &self,
        optimizer: &Optimizer,
        inputs: &[Tensor],
        f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let of_scale = if self.scaler.is_some() { 3 } else { 0 };
        let (inputs, scale) = inputs.split_at(inputs.len() - of_scale);
        let (inputs, buffers) = inputs.split_at(inputs.len() - self.buffers.len());
        let (inputs, mut own) = inputs.split_at(inputs.len() - self.counts.iter().sum::<usize>());
        let (batch, frozen) = inputs.split_at(inputs.len() - self.frozen.len());
        let mut old: Vec<Vec<Tensor>> = vec![];
        for n in &self.counts {
            let (mine, after) = own.split_at(*n);
            old.push(mine.to_vec());
            own = after;
        }
        let backend = old[0][0].backend().clone();
        let params: Vec<Tensor> = old.iter().map(|t| t[0].clone()).collect();
        let of_params = self.params.iter().zip(&params);
        let all = of_params.chain(self.frozen.iter().zip(frozen)).chain(self.buffers.iter().zip(buffers));
        let values = all.map(|(s, t)| (s.id(), t.clone())).collect();
        let key = [0, 1].map(|k| Tensor::argument(&backend, k, DType::U32));
        let scope = Scope { values, training: true, key: Some(key), writes: Writes::Kept, draws: 0 };
        let mut results = vec![];
        let (graded, scope) = within(scope, || {
            halcyon::value_and_grad(&params, |_| {
                results = f(batch)?;
                let loss = results.first().cloned();
                let loss = loss.ok_or_else(|| Error::argument("TrainStep", "the forward returns no loss"))?;
                // In f32, whose range has room for the scale.
                Ok(match scale.first() {
                    Some(s) => loss.cast(DType::F32) * s,
                    None => loss,
                })
            })
        });
        let (loss, grads) = graded?;
        let (loss, new, scale) = match (&self.scaler, scale) {
            (Some(scaler), [factor, good, skipped]) => {
                let (new, scale) = self.scaled(optimizer, scaler, &old, &grads, [factor, good, skipped])?;
                (loss / factor, new, scale)
            }
            _ => {
                let mut number = 1;
                let mut argument = |dtype: DType| {
                    number += 1;
                    Tensor::argument(&backend, number, dtype)
                };
                let counts = self.scalars.iter().zip(optimizer.scalar_dtypes());
                let scalars: Vec<Vec<Tensor>> =
                    counts.map(|(n, d)| (0..*n).map(|_| argument(d)).collect()).collect();
                (loss, optimizer.updated(&old, &grads, &scalars), vec![])
            }
        };
        let buffers = self.buffers.iter().filter_map(|s| scope.values.get(&s.id()).cloned());
        let mut out = vec![loss];
        out.extend(results.into_iter().skip(1));
        out.extend(new.into_iter().flatten());
        out.extend(buffers);
        out.extend(scale);
        Ok(out)
    }

    /// The new tensors of the optimizer and of the scaler. `grads` are those of the scaled loss. After an
    /// overflow the optimizer's tensors are the old ones.
    fn scaled(
        &self,
        optimizer: &Optimizer,
        scaler: &LossScaler,
        old: &[Vec<Tensor>],
        grads: &[Tensor],
        [factor, good, skipped]: [&Tensor; 3],
    ) -> Result<(Vec<Vec<Tensor>>, Vec<Tensor>)> {
        let inverse = 1.0 / factor;
        let grads: Vec<Tensor> = grads.iter().map(|g| g.cast(DType::F32) * &inverse).collect();
        let overflow = overflowed(&grads).ok_or_else(|| Error::internal("a step without gradients"))?;
        let backend = factor.backend();
        let step = Tensor::argument(backend, 2, DType::F32) - skipped.cast(DType::F32);
        let rates: Vec<Tensor> =
            (0..self.scalars.len()).map(|k| Tensor::argument(backend, 3 + k as u32, DType::F32)).collect();
        let new = optimizer.updated(old, &grads, &optimizer.device_scalars(&step, &rates));
        let choose = |(old, new): (&Vec<Tensor>, Vec<Tensor>)| -> Vec<Tensor> {
            old.iter().zip(new).map(|(o, n)| overflow.select(o, &n)).collect()
        };
        let new = old.iter().zip(new).map(choose).collect();
        Ok((new, next(scaler, [factor, good, skipped], &overflow).into()))
    }
}

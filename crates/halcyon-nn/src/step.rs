//! Training steps: forward, gradient, update of parameters and buffers as one plan.

use crate::module::{Module, ModuleExt};
use crate::optim::Optimizer;
use crate::scaler::{LossScaler, Scaling, next, overflowed};
use crate::scope::{Scope, within};
use crate::slot::Slot;
use halcyon::ir::DType;
use halcyon::ir::dtype::Scalar;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Compiled, Tensor};
use std::fmt;
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
    optimizer: Arc<Mutex<Optimizer>>,
    /// Slots that the step reads and the optimizer does not update.
    others: Vec<Slot>,
    /// Which of `others` the forward writes, found by a trace before the first plan.
    written: Arc<Mutex<Option<Vec<Slot>>>>,
    backend: Backend,
    scaling: Option<Arc<Scaling>>,
    seed: u64,
}

impl fmt::Debug for TrainStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrainStep({} plans)", self.compiled.plans())
    }
}

/// What a trace of the step needs to know of the module and optimizer.
struct Parts {
    /// The slots of the optimizer, in its order.
    params: Vec<Slot>,
    /// The number of tensors that the optimizer keeps for each parameter, the parameter included.
    counts: Vec<usize>,
    others: Vec<Slot>,
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
    /// `Error::Argument` if the optimizer updates no parameter of the module.
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
        let first = params.first().ok_or_else(|| Error::argument("TrainStep", "there are no parameters"))?;
        let backend = crate::slot::backend_of(first);
        let updated = |s: &Slot| params.iter().any(|p| p.id() == s.id());
        let others: Vec<Slot> = module.slots().into_iter().map(|(_, s)| s).filter(|s| !updated(s)).collect();
        let counts: Vec<usize> = optimizer.tensors().iter().map(Vec::len).collect();
        let scalars = optimizer.host_scalars().iter().map(Vec::len).collect();
        let scaling = scaler.map(|s| Scaling::new(&backend, s)).transpose()?.map(Arc::new);
        let parts = Parts { params, counts, others: others.clone(), scalars, scaler };
        let (optimizer, written) = (Arc::new(Mutex::new(optimizer)), Arc::new(Mutex::new(None)));
        let (of_trace, writes) = (optimizer.clone(), written.clone());
        let traced: Traced<'a> = Box::new(move |inputs: &[Tensor]| {
            let (made, wrote) = parts.trace(&lock(&of_trace), inputs, |batch| f(&module, batch))?;
            let ids = |v: &[Slot]| v.iter().map(Slot::id).collect::<Vec<_>>();
            match lock(&writes).get_or_insert_with(|| wrote.clone()) {
                known if ids(known) == ids(&wrote) => Ok(made),
                _ => Err(Error::unsupported(
                    "a forward that writes other buffers for inputs of other types",
                    "Write the same buffers in the same order in every step",
                )),
            }
        });
        let seed = backend.next_seed();
        Ok(TrainStep {
            compiled: backend.compile(traced),
            optimizer,
            others,
            written,
            backend,
            scaling,
            seed,
        })
    }

    /// Sets the seed from which the keys of random numbers follow, one key per step.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
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
        let [scale, _, skipped] = s.tensors();
        Ok(Some((scale.item::<f64>()?, skipped.item::<i64>()? as u64)))
    }

    /// The number of plans, one per set of input types.
    pub fn plans(&self) -> usize {
        self.compiled.plans()
    }

    /// One step. Returns what the forward returned, the loss first; parameters, state and buffers are
    /// replaced.
    ///
    /// # Errors
    /// Errors of the forward, of planning, and of the device. After an error of the device during the run the
    /// parameters may be lost; restore them from a checkpoint.
    #[track_caller]
    pub fn run(&mut self, batch: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut optimizer = lock(&self.optimizer);
        let (old, steps) = (optimizer.tensors(), optimizer.steps());
        let host_scalars = match self.scaling {
            None => optimizer.host_scalars().concat(),
            // The other numbers depend on the number of skipped steps, which the device knows.
            Some(_) => std::iter::once((steps + 1) as f64).chain(optimizer.rates()).collect(),
        };
        let scale: Vec<Tensor> = self.scaling.iter().flat_map(|s| s.tensors()).collect();
        // A trace locks the optimizer.
        drop(optimizer);
        let others: Vec<Tensor> = self.others.iter().map(Slot::stored).collect();
        let kept = old.iter().flatten().chain(&others).chain(&scale);
        let inputs: Vec<&Tensor> = batch.iter().copied().chain(kept).collect();
        let written = self.written_buffers(&inputs)?;
        for t in old.iter().flatten().chain(&scale) {
            t.donate();
        }
        for (slot, t) in self.others.iter().zip(&others) {
            if written.iter().any(|w| w.id() == slot.id()) {
                t.donate();
            }
        }
        let key = mixed(self.seed, steps);
        let mut args = vec![Scalar::U(key & 0xffff_ffff), Scalar::U(key >> 32)];
        args.extend(host_scalars.into_iter().map(Scalar::F));
        let mut made = self.compiled.call_with(&inputs, &args)?;
        optimizer = lock(&self.optimizer);
        let count: usize = old.iter().map(Vec::len).sum();
        let results = made.len() - count - written.len() - scale.len();
        if let Some(s) = &self.scaling {
            s.write(&made.split_off(made.len() - scale.len()))?;
        }
        let mut rest = made.split_off(results).into_iter();
        let new: Vec<Vec<Tensor>> = old.iter().map(|o| rest.by_ref().take(o.len()).collect()).collect();
        optimizer.write(&new)?;
        written.iter().zip(rest).try_for_each(|(s, t)| s.set(t))?;
        Ok(made)
    }

    /// The buffers that the step writes. Before the first step, a trace finds them: the plan overwrites their
    /// memory, so they must be known when it is made.
    fn written_buffers(&self, inputs: &[&Tensor]) -> Result<Vec<Slot>> {
        if let Some(w) = &*lock(&self.written) {
            return Ok(w.clone());
        }
        let stand_in = |t: &&Tensor| Ok(Tensor::placeholder(&self.backend, t.dtype()?, t.shape()?));
        let given = inputs.iter().map(stand_in).collect::<Result<Vec<_>>>()?;
        self.compiled.function()(&given)?;
        Ok(lock(&self.written).clone().unwrap_or_default())
    }

    /// The backend of the parameters.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }
}

/// A key of random numbers for a step, by the finaliser of SplitMix64 (Steele et al. 2014).
fn mixed(seed: u64, step: u64) -> u64 {
    let mut z = seed.wrapping_add(step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Parts {
    /// The results of the step for placeholders: what the forward returns, then the new tensors of the
    /// optimizer, then the written buffers.
    fn trace(
        &self,
        optimizer: &Optimizer,
        inputs: &[Tensor],
        f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<(Vec<Tensor>, Vec<Slot>)> {
        let kept: usize = self.counts.iter().sum();
        let of_scale = if self.scaler.is_some() { 3 } else { 0 };
        let (inputs, scale) = inputs.split_at(inputs.len() - of_scale);
        let batch = inputs.len() - kept - self.others.len();
        let (batch, rest) = inputs.split_at(batch);
        let (mut own, others) = rest.split_at(kept);
        let mut old: Vec<Vec<Tensor>> = vec![];
        for n in &self.counts {
            let (mine, after) = own.split_at(*n);
            old.push(mine.to_vec());
            own = after;
        }
        let backend = old[0][0].backend().clone();
        let params: Vec<Tensor> = old.iter().map(|t| t[0].clone()).collect();
        let mut values: std::collections::HashMap<_, _> =
            self.params.iter().zip(&params).map(|(s, t)| (s.id(), t.clone())).collect();
        values.extend(self.others.iter().zip(others).map(|(s, t)| (s.id(), t.clone())));
        let key = [0, 1].map(|k| Tensor::argument(&backend, k, DType::U32));
        let scope = Scope { values, training: true, key: Some(key), keeps_writes: true, ..Scope::default() };
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
                let mut argument = || {
                    number += 1;
                    Tensor::argument(&backend, number, DType::F32)
                };
                let scalars: Vec<Vec<Tensor>> =
                    self.scalars.iter().map(|n| (0..*n).map(|_| argument()).collect()).collect();
                (loss, optimizer.updated(&old, &grads, &scalars), vec![])
            }
        };
        let written = scope.written;
        let buffers = written.iter().filter_map(|s| scope.values.get(&s.id()).cloned());
        let mut out = vec![loss];
        out.extend(results.drain(..).skip(1));
        out.extend(new.into_iter().flatten());
        out.extend(buffers);
        out.extend(scale);
        Ok((out, written))
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

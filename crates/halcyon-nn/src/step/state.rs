//! The state that a training step keeps: saving, restoring, moving to another device, and inspection.

use super::{Kind, Own, TrainStep, lock, of_backend, scaler_of};
use crate::scaler::{LossScaler, Scaling};
use crate::slot::Slot;
use halcyon::ir::dtype::Scalar;
use halcyon::ir::error::{Error, Result, Span};
use halcyon::ir::passes::AmpPolicy;
use halcyon::ir::{DType, Graph};
use halcyon::{Backend, State, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// A training step as a graph, with the values of its inputs; see [`TrainStep::graph`].
#[derive(Debug)]
pub struct StepGraph {
    pub graph: Graph,
    /// The inputs with their names, in the order of the graph's inputs.
    pub inputs: Vec<(String, Tensor)>,
    /// The values of the graph's arguments.
    pub args: Vec<Scalar>,
}

/// Names of the scaler's states.
const SCALER: [&str; 3] = ["scaler.scale", "scaler.good", "scaler.skipped"];
/// The number of batches since the last update.
const ACCUMULATED: &str = "accumulated";

impl TrainStep<'_> {
    /// The seed of random numbers; see [`TrainStep::seed`].
    pub fn current_seed(&self) -> u64 {
        self.seed
    }

    /// Moving averages and sums of gradients, by name.
    fn averages_and_sums(&self) -> (Vec<(String, Arc<State>)>, Vec<(String, Arc<State>)>) {
        let optimizer = lock(&self.optimizer);
        let named = |prefix: &str, states: Vec<Arc<State>>| -> Vec<(String, Arc<State>)> {
            let paths = optimizer.named_slots().map(|(path, _)| format!("{prefix}.{path}"));
            paths.zip(states).collect()
        };
        let averages = self.ema.iter().flat_map(|e| e.states()).cloned().collect();
        let sums = self.sums.iter().flat_map(|s| s.states.iter().cloned()).collect();
        (named("average", averages), named("sum", sums))
    }

    /// The state that a step keeps in addition to parameters and buffers, by name: the optimizer's state (see
    /// [`crate::Optimizer::state`]), `scaler.scale`, `scaler.good` and `scaler.skipped` with a scaler,
    /// `average.PATH` with moving averages, and `sum.PATH` and `accumulated` if gradients of several batches
    /// are accumulated.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut out = lock(&self.optimizer).state();
        if let Some(s) = &self.scaling {
            let names = SCALER.iter().zip(s.states());
            out.extend(names.map(|(n, s)| ((*n).to_string(), s.value())));
        }
        let (averages, sums) = self.averages_and_sums();
        out.extend(averages.into_iter().chain(sums).map(|(n, s)| (n, s.value())));
        if let Some(s) = &self.sums {
            out.push((ACCUMULATED.into(), Tensor::scalar(&self.backend, s.done as i64, DType::I32)));
        }
        out
    }

    /// Replaces tensors that [`TrainStep::state`] lists. Tensors that are not given keep their values. If
    /// there is an error, no tensor is replaced.
    ///
    /// # Errors
    /// `Error::Argument` if there is no tensor with a given name, or `accumulated` is not less than the
    /// number of batches per update; `Error::Shape` if a dtype or shape differs.
    pub fn load_state(&mut self, new: Vec<(String, Tensor)>) -> Result<()> {
        let old: HashMap<String, Tensor> = self.state().into_iter().collect();
        let mut done = None;
        for (name, t) in &new {
            let have = old.get(name).ok_or_else(|| {
                Error::argument("load_state", format!("the training step keeps no `{name}`"))
            })?;
            let types = |t: &Tensor| Ok::<_, Error>((t.dtype()?, t.shape()?));
            let ((have, shape), (dtype, given)) = (types(have)?, types(t)?);
            if (have, &shape) != (dtype, &given) {
                let what = format!("`{name}` is {have}{shape}, but the new value is {dtype}{given}");
                return Err(Error::shape("load_state", what));
            }
            if name == ACCUMULATED {
                let n = t.item::<i64>()?;
                let most = self.sums.as_ref().map_or(1, |s| s.n) - 1;
                if !u64::try_from(n).is_ok_and(|n| n <= most) {
                    let what = format!("the state has {n} accumulated batches, expected 0 to {most}");
                    return Err(Error::argument("load_state", what));
                }
                done = Some(n as u64);
            }
        }
        let (averages, sums) = self.averages_and_sums();
        let others: HashMap<String, Arc<State>> = averages.into_iter().chain(sums).collect();
        for (name, t) in new.into_iter().filter(|(n, _)| n != ACCUMULATED) {
            let scaler = SCALER.iter().position(|n| *n == name);
            match (scaler, &self.scaling, others.get(&name)) {
                (Some(i), Some(s), _) => s.states()[i].write(t)?,
                (_, _, Some(s)) => s.write(t)?,
                _ => self.with_optimizer(|o| o.set_state(&name, t))?,
            }
        }
        if let (Some(s), Some(done)) = (&mut self.sums, done) {
            s.done = done;
        }
        Ok(())
    }

    /// Makes the moving averages the values of the parameters and of their f32 copies.
    ///
    /// # Errors
    /// `Error::Argument` if the step keeps no averages; errors of the device.
    pub fn apply_averages(&self) -> Result<()> {
        let none = || Error::argument("apply_averages", "the step keeps no averages: set TrainStep::ema");
        let ema = self.ema.as_ref().ok_or_else(none)?;
        ema.apply()?;
        let kept = lock(&self.optimizer).state();
        for (path, v) in ema.state() {
            let name = format!("{path}.master");
            if kept.iter().any(|(n, _)| *n == name) {
                // This makes a copy, because the next step overwrites the average's memory.
                let copy = &v + Tensor::scalar(v.backend(), 0.0, v.dtype()?);
                copy.eval()?;
                self.with_optimizer(|o| o.set_state(&name, copy))?;
            }
        }
        Ok(())
    }

    /// Moves parameters, buffers and all other state of the step to another backend. Later steps are planned
    /// for that backend. Tensors that the forward captures are not moved, so pass data as the batch.
    ///
    /// Mixed precision and a loss scaler that the user set stay. If the user did not set mixed precision, the
    /// step takes that of the new backend. If the user set neither, the step also adds or removes the scaler
    /// as the new backend requires. A scaler that stays keeps its settings and its scale.
    ///
    /// # Errors
    /// `Error::Unsupported` if the device does not store the type of the step's mixed precision;
    /// `Error::Argument` if the move adds or removes a loss scaler between the batches of one update, because
    /// the gradients of these batches would have different scales; errors of the copies. After an error
    /// nothing has moved.
    pub fn to_device(&mut self, backend: &Backend) -> Result<()> {
        let mixed = if self.own.mixed { self.mixed.clone() } else { of_backend(backend) };
        if let Some(m) = &mixed {
            halcyon::ir::passes::autocast::check(
                m.policy,
                backend.device().as_target().caps(),
                backend.id(),
            )?;
        }
        let default = mixed.as_ref().filter(|m| m.policy == AmpPolicy::F16).map(|_| LossScaler::default());
        let scaler = match self.own {
            // If the user chose either setting, the step keeps its scaler, or stays without one.
            Own { mixed: false, scaler: false } => {
                scaler_of(backend).or(default).map(|new| self.scaler.unwrap_or(new))
            }
            _ => self.scaler,
        };
        let begun = self.sums.as_ref().is_some_and(|s| s.done > 0);
        if begun && scaler.is_some() != self.scaler.is_some() {
            let what = "the move would change the scale of the loss between the batches of one update; finish the \
                        update first";
            return Err(Error::argument("to_device", what));
        }
        let moved = |s: &Arc<State>| s.value().to(backend);
        let slots: Vec<Slot> = {
            let optimizer = lock(&self.optimizer);
            optimizer.slots().chain(&self.frozen).chain(&self.buffers).cloned().collect()
        };
        let values = slots.iter().map(|s| s.stored().to(backend)).collect::<Result<Vec<_>>>()?;
        let scaling = match (&self.scaling, scaler) {
            (_, None) => None,
            (None, Some(s)) => Some(Scaling::new(backend, s)?),
            (Some(old), Some(_)) => {
                let [a, b, c] = old.states().map(moved);
                Some(Scaling::holding([a?, b?, c?]))
            }
        };
        let ema = self.ema.as_ref().map(|e| e.moved(moved)).transpose()?;
        let held = |s: &Arc<State>| Ok(Arc::new(State::new(moved(s)?)));
        let sums = match &self.sums {
            None => None,
            Some(s) => Some(s.states.iter().map(held).collect::<Result<Vec<_>>>()?),
        };
        lock(&self.optimizer).move_state(moved)?;
        slots.iter().zip(values).try_for_each(|(s, t)| s.replace(t))?;
        (self.mixed, self.scaler, self.scaling) = (mixed, scaler, scaling);
        self.ema = ema.map(Arc::new);
        if let (Some(s), Some(states)) = (&mut self.sums, sums) {
            s.states = states;
        }
        self.compiled = [None, None];
        self.backend = backend.clone();
        Ok(())
    }

    /// The graph of the next update for a batch, for inspection. Nothing runs. The inputs are named
    /// `batch.N`, `captured.N` for a tensor that the forward captures, or like the parameter, buffer or state
    /// that they hold (see [`TrainStep::state`]).
    ///
    /// # Errors
    /// Errors of the forward, and of planning, such as a [`crate::MemoryBudget`] that cannot be kept.
    #[track_caller]
    pub fn graph(&self, batch: &[&Tensor]) -> Result<StepGraph> {
        let path = |s: &Slot| s.path();
        let mut inputs: Vec<(String, Tensor)> =
            batch.iter().enumerate().map(|(i, t)| (format!("batch.{i}"), (*t).clone())).collect();
        inputs.extend(self.frozen.iter().map(|s| (path(s), s.stored())));
        let (averages, sums) = self.averages_and_sums();
        let name = |(n, _): (String, Arc<State>)| n;
        let names = lock(&self.optimizer).state_names();
        let names =
            names.into_iter().chain(averages.into_iter().map(name)).chain(self.buffers.iter().map(path));
        let names = names.chain(sums.into_iter().map(name)).chain(SCALER.iter().map(|n| (*n).to_string()));
        inputs.extend(names.zip(self.states(Kind::Update).iter().map(|s| s.value())));
        let mut given = vec![];
        // This is a loop, because inside of a closure `track_caller` would report a line of this file as the
        // caller.
        for (_, t) in &inputs {
            given.push(Tensor::placeholder(&self.backend, t.dtype()?, t.shape()?));
        }
        let outputs = self.parts_of(Kind::Update, Span::caller())?.planned(&lock(&self.optimizer), &given)?;
        let named: Vec<(&str, &Tensor)> =
            inputs.iter().zip(&given).map(|((n, _), t)| (n.as_str(), t)).collect();
        let (graph, captured, numbers) = Tensor::trace_compiled(&named, &outputs)?;
        let arguments = self.arguments(Kind::Update)?;
        let args = numbers.iter().map(|k| arguments.get(*k as usize).copied());
        let args = args.collect::<Option<Vec<_>>>();
        let args = args.ok_or_else(|| Error::internal("an argument of the step has no value"))?;
        inputs.extend(captured.into_iter().enumerate().map(|(i, t)| (format!("captured.{i}"), t)));
        Ok(StepGraph { graph, inputs, args })
    }
}

//! Optimizers: update rules, groups of parameters, schedules, clipping.

mod num;
mod rules;
mod schedule;

pub use num::Num;
pub use rules::{AdaGrad, Adafactor, Adam, Lion, Muon, RmsProp, Sgd, StateSpec, StepNumbers, UpdateRule};
pub use schedule::Schedule;

use crate::grad::ModuleGrads;
use crate::init::Init;
use crate::module::{Module, ModuleExt, Pattern};
use crate::slot::{Slot, backend_of, dtype_of};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, State, Tensor};
use std::fmt;
use std::sync::Arc;

/// How gradients are clipped before the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// The gradients of the group are scaled so that their total norm is at most this number.
    Norm(f64),
    /// Each element is clamped to `-c..=c`, where `c` is this number.
    Value(f64),
}

/// The settings of a group of parameters. A field that is `None` takes the optimizer's setting. However, in a
/// group with its own rule, a `rate` or `weight_decay` of `None` takes the default of that rule.
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    pub rule: Option<Arc<dyn UpdateRule>>,
    pub rate: Option<f64>,
    pub weight_decay: Option<f64>,
    pub clip: Option<Clip>,
    pub schedule: Option<Schedule>,
}

/// A group of parameters with its settings.
#[derive(Clone, Debug)]
struct Group {
    rule: Arc<dyn UpdateRule>,
    rate: f64,
    weight_decay: f64,
    clip: Option<Clip>,
    schedule: Schedule,
}

/// A parameter with its state.
struct Entry {
    path: String,
    slot: Slot,
    group: usize,
    /// An f32 copy of a parameter in f16 or bf16. The rule updates the copy.
    master: Option<Arc<State>>,
    /// The tensors that the rule keeps, with their names.
    state: Vec<(&'static str, Arc<State>)>,
}

/// Updates the trainable parameters of a module by their gradients.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Adam, Linear, Optimizer, loss_and_grads};
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 1, 1)?;
/// let x = Tensor::from_slice(&b, [4, 1], &[0.0f32, 1.0, 2.0, 3.0])?;
/// let y = &x * 2.0 + 1.0;
/// let mut optimizer = Optimizer::new(&layer, Adam::new().rate(0.1))?;
/// for _ in 0..300 {
///     let (_, grads) = loss_and_grads(&layer, |m| Ok((m.forward(&x) - &y).sqr().mean(..)))?;
///     optimizer.step(&grads)?;
/// }
/// assert!((layer.weight.value().item::<f32>()? - 2.0).abs() < 0.05);
/// # Ok(())
/// # }
/// ```
pub struct Optimizer {
    groups: Vec<Group>,
    entries: Vec<Entry>,
    steps: u64,
}

impl fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.groups.iter().map(|g| g.rule.name()).collect();
        write!(f, "Optimizer({}, {} parameters, {} steps)", names.join(", "), self.entries.len(), self.steps)
    }
}

/// Builds an [`Optimizer`] with groups, clipping and schedules.
pub struct OptimizerBuilder {
    default: Group,
    groups: Vec<(Box<dyn Fn(&str) -> bool>, String, GroupOptions)>,
    error: Option<Error>,
}

impl fmt::Debug for OptimizerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OptimizerBuilder({}, {} groups)", self.default.rule.name(), self.groups.len() + 1)
    }
}

impl OptimizerBuilder {
    /// Clips the gradients of the parameters that no added group contains, and of each added group that has
    /// no `clip`. Each group has its own total norm.
    pub fn clip(mut self, clip: Clip) -> Self {
        self.default.clip = Some(clip);
        self
    }

    /// Sets the schedule of the parameters that no added group contains, and of each added group that has no
    /// `schedule`.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.default.schedule = schedule;
        self
    }

    /// Adds a group of the parameters whose paths match a pattern; see [`Pattern`]. A parameter belongs to
    /// the first group that it matches.
    pub fn group(mut self, pattern: &str, options: GroupOptions) -> Self {
        match Pattern::new(pattern) {
            Ok(p) => self.groups.push((Box::new(move |path| p.matches(path)), pattern.to_string(), options)),
            Err(e) => self.error = self.error.or(Some(e)),
        }
        self
    }

    /// Adds a group of the parameters for which `which(path)` is true.
    pub fn group_where(mut self, which: impl Fn(&str) -> bool + 'static, options: GroupOptions) -> Self {
        self.groups.push((Box::new(which), "a predicate".into(), options));
        self
    }

    /// The optimizer of the module's trainable parameters.
    ///
    /// # Errors
    /// `Error::Argument` if the module or an added group has no trainable parameter, a pattern is invalid, a
    /// setting is out of range, or a rule cannot update a parameter; errors of the device.
    pub fn build<M: Module + ?Sized>(self, module: &M) -> Result<Optimizer> {
        if let Some(e) = self.error {
            return Err(e);
        }
        let d = &self.default;
        let mut groups = vec![];
        for (_, _, o) in &self.groups {
            let rule = o.rule.clone().unwrap_or_else(|| d.rule.clone());
            let own = rule.defaults();
            let (rate, decay) = if o.rule.is_some() { own } else { (d.rate, d.weight_decay) };
            groups.push(Group {
                rule,
                rate: o.rate.unwrap_or(rate),
                weight_decay: o.weight_decay.unwrap_or(decay),
                clip: o.clip.or(d.clip),
                schedule: o.schedule.clone().unwrap_or_else(|| d.schedule.clone()),
            });
        }
        groups.push(d.clone());
        groups.iter().try_for_each(checked)?;
        let params = module.trainable();
        if params.is_empty() {
            return Err(Error::argument("Optimizer", "the module has no trainable parameter"));
        }
        let mut used = vec![0usize; groups.len()];
        let mut entries = vec![];
        for (path, slot) in params {
            let group = self.groups.iter().position(|(which, _, _)| which(&path)).unwrap_or(groups.len() - 1);
            used[group] += 1;
            entries.push(Entry::new(path, slot, group, &groups[group])?);
        }
        if let Some(i) = (0..self.groups.len()).find(|i| used[*i] == 0) {
            let what = format!("no trainable parameter belongs to the group of `{}`", self.groups[i].1);
            return Err(Error::argument("Optimizer", what));
        }
        Ok(Optimizer { groups, entries, steps: 0 })
    }
}

fn checked(g: &Group) -> Result<()> {
    let positive = |what: &str, x: f64| match x.is_finite() && x >= 0.0 {
        true => Ok(()),
        false => Err(Error::argument("Optimizer", format!("the {what} {x} is negative or not finite"))),
    };
    positive("learning rate", g.rate)?;
    positive("weight decay", g.weight_decay)?;
    match g.clip {
        Some(Clip::Norm(c) | Clip::Value(c)) => positive("bound of gradients", c),
        None => Ok(()),
    }
}

/// The dtype in which a rule computes for a parameter.
fn compute_dtype(d: DType) -> DType {
    if d == DType::F64 { DType::F64 } else { DType::F32 }
}

impl Entry {
    fn new(path: String, slot: Slot, group: usize, of: &Group) -> Result<Entry> {
        let (b, dims, dtype) = (backend_of(&slot), slot.stored().dims()?, dtype_of(&slot)?);
        let compute = compute_dtype(dtype);
        let specs = of.rule.state(&dims).map_err(|e| crate::slot::in_module(e, &path))?;
        let state = specs.into_iter().map(|s| {
            let initial = Init::Constant(s.initial).tensor(&b, &s.dims, compute)?;
            Ok((s.name, Arc::new(State::new(initial))))
        });
        let state = state.collect::<Result<_>>()?;
        let master = (dtype != compute).then(|| Arc::new(State::new(slot.stored().cast(compute))));
        Ok(Entry { path, slot, group, master, state })
    }

    /// The states that a step replaces: the parameter, its f32 copy if there is one, and the tensors that the
    /// rule keeps.
    fn states(&self) -> Vec<Arc<State>> {
        let own = self.master.iter().chain(self.state.iter().map(|(_, s)| s)).cloned();
        std::iter::once(self.slot.state()).chain(own).collect()
    }
}

impl Optimizer {
    /// An optimizer with one group, which has all trainable parameters. The learning rate and the weight
    /// decay are the rule's defaults.
    ///
    /// # Errors
    /// Those of [`OptimizerBuilder::build`].
    pub fn new<M: Module + ?Sized>(module: &M, rule: impl UpdateRule + 'static) -> Result<Optimizer> {
        Optimizer::builder(rule).build(module)
    }

    /// Starts an optimizer with groups, clipping or schedules.
    pub fn builder(rule: impl UpdateRule + 'static) -> OptimizerBuilder {
        let (rate, weight_decay) = rule.defaults();
        let schedule = Schedule::Constant;
        let default = Group { rule: Arc::new(rule), rate, weight_decay, clip: None, schedule };
        OptimizerBuilder { default, groups: vec![], error: None }
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The learning rate that the next step uses for a parameter.
    ///
    /// # Errors
    /// `Error::Argument` if the optimizer does not update the parameter.
    pub fn rate(&self, path: &str) -> Result<f64> {
        let e = self.entries.iter().find(|e| e.path == path);
        let e =
            e.ok_or_else(|| Error::argument("rate", format!("the optimizer has no parameter `{path}`")))?;
        Ok(self.groups[e.group].schedule.rate(self.groups[e.group].rate, self.steps))
    }

    /// The state tensors by name. For example, the `exp_avg` of `fc1.weight` is named `fc1.weight.exp_avg`,
    /// and the f32 copy of a parameter in f16 or bf16 is named `fc1.weight.master`.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let of = |e: &Entry| {
            let master = e.master.iter().map(|s| ("master", s));
            let named = master.chain(e.state.iter().map(|(n, s)| (*n, s)));
            named.map(|(n, s)| (format!("{}.{n}", e.path), s.value())).collect::<Vec<_>>()
        };
        self.entries.iter().flat_map(of).collect()
    }

    /// Replaces a state tensor that [`Optimizer::state`] lists.
    ///
    /// # Errors
    /// `Error::Argument` if there is no such tensor; `Error::Shape` if the dtype or shape differs.
    pub fn set_state(&mut self, name: &str, value: Tensor) -> Result<()> {
        for e in &self.entries {
            let Some(own) = name.strip_prefix(e.path.as_str()).and_then(|n| n.strip_prefix('.')) else {
                continue;
            };
            let named = e.state.iter().find(|(n, _)| *n == own).map(|(_, s)| s);
            if let Some(s) = named.or(e.master.as_ref().filter(|_| own == "master")) {
                return s.write(value);
            }
        }
        Err(Error::argument("set_state", format!("the optimizer keeps no `{name}`")))
    }

    /// Replaces each state by the result of `f`, which may be on another backend. If there is an error, no
    /// state is replaced.
    pub(crate) fn move_state(&mut self, f: impl Fn(&Arc<State>) -> Result<Tensor>) -> Result<()> {
        let of = |e: &Entry| {
            let master = e.master.as_ref().map(&f).transpose()?;
            Ok((master, e.state.iter().map(|(_, s)| f(s)).collect::<Result<Vec<_>>>()?))
        };
        let new = self.entries.iter().map(of).collect::<Result<Vec<_>>>()?;
        for (e, (master, state)) in self.entries.iter_mut().zip(new) {
            e.master = master.map(|t| Arc::new(State::new(t)));
            e.state.iter_mut().zip(state).for_each(|((_, s), t)| *s = Arc::new(State::new(t)));
        }
        Ok(())
    }

    /// The names of [`Optimizer::states`], in the same order: for each parameter its path, then the names of
    /// its tensors in [`Optimizer::state`].
    pub(crate) fn state_names(&self) -> Vec<String> {
        let of = |e: &Entry| {
            let own = e.master.iter().map(|_| "master").chain(e.state.iter().map(|(n, _)| *n));
            let own = own.map(|n| format!("{}.{n}", e.path)).collect::<Vec<_>>();
            std::iter::once(e.path.clone()).chain(own)
        };
        self.entries.iter().flat_map(of).collect()
    }

    /// The groups' rules, rates, weight decays and schedules, for checkpoints. The last group has all
    /// parameters that are in no other group.
    pub fn groups(&self) -> impl Iterator<Item = (&'static str, f64, f64, &Schedule)> {
        self.groups.iter().map(|g| (g.rule.name(), g.rate, g.weight_decay, &g.schedule))
    }

    /// Sets the number of steps taken, for example when a checkpoint is loaded.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Runs one step: one plan computes the new parameters, the new states, and the buffers that the forward
    /// wrote. The old values stay in memory until the plan has run. A [`crate::TrainStep`] needs less memory,
    /// because it overwrites the old values.
    ///
    /// # Errors
    /// `Error::Argument` if `grads` has no gradient for a parameter of this optimizer; errors of the device.
    pub fn step(&mut self, grads: &ModuleGrads) -> Result<()> {
        let g = self.entries.iter().map(|e| {
            let found = grads.of.iter().find(|(_, s, _)| s.id() == e.slot.id());
            found.map(|(_, _, g)| g.clone()).ok_or_else(|| {
                Error::argument("Optimizer::step", format!("there is no gradient of `{}`", e.path))
            })
        });
        let g = g.collect::<Result<Vec<_>>>()?;
        let states = self.states();
        let old: Vec<Vec<Tensor>> = states.iter().map(|of| of.iter().map(|s| s.value()).collect()).collect();
        let b = old[0][0].backend().clone();
        let numbers = self.host_scalars()?;
        let scalars: Vec<Vec<Tensor>> =
            numbers.iter().zip(self.scalar_dtypes()).map(|(s, d)| literals(&b, s, d)).collect();
        let new = self.updated(&old, &g, &scalars);
        let mut all: Vec<Tensor> = new.iter().flatten().cloned().collect();
        all.extend(grads.written.iter().map(Slot::stored));
        halcyon::eval(&all)?;
        let both = states.into_iter().flatten().zip(new.into_iter().flatten());
        both.into_iter().try_for_each(|(s, t)| s.write(t))?;
        self.steps += 1;
        Ok(())
    }

    /// The scalars of the next step for each group, on the host.
    pub(crate) fn host_scalars(&self) -> Result<Vec<Vec<f64>>> {
        let of = |g: &Group| {
            let n = StepNumbers {
                step: Num::Host((self.steps + 1) as f64),
                rate: Num::Host(g.schedule.rate(g.rate, self.steps)),
                weight_decay: g.weight_decay,
            };
            let host = |n: Num| match n {
                Num::Host(x) => Ok(x),
                Num::Device(_) => {
                    let what = format!("the rule {} returns tensors for numbers on the host", g.rule.name());
                    Err(Error::argument("UpdateRule::scalars", what))
                }
            };
            g.rule.scalars(&n).into_iter().map(host).collect()
        };
        self.groups.iter().map(of).collect()
    }

    /// The dtype of each group's scalars: f64 if the group has a parameter in f64, otherwise f32.
    pub(crate) fn scalar_dtypes(&self) -> Vec<DType> {
        let mut dtypes = vec![DType::F32; self.groups.len()];
        for e in self.entries.iter().filter(|e| matches!(dtype_of(&e.slot), Ok(DType::F64))) {
            dtypes[e.group] = DType::F64;
        }
        dtypes
    }

    /// The learning rates of the groups in the next step.
    pub(crate) fn rates(&self) -> Vec<f64> {
        self.groups.iter().map(|g| g.schedule.rate(g.rate, self.steps)).collect()
    }

    /// The scalars of a step for each group, computed on the device from the number of the step and the
    /// groups' learning rates.
    pub(crate) fn device_scalars(&self, step: &Tensor, rates: &[Tensor]) -> Vec<Vec<Tensor>> {
        let of = |(g, rate): (&Group, &Tensor)| {
            let n = StepNumbers {
                step: Num::Device(step.clone()),
                rate: Num::Device(rate.clone()),
                weight_decay: g.weight_decay,
            };
            let b = step.backend();
            let tensor = |n: Num| match n {
                Num::Host(x) => Tensor::full(b, [1usize], x, DType::F32),
                Num::Device(t) => t.reshape([1usize]),
            };
            let all: Vec<Tensor> = g.rule.scalars(&n).into_iter().map(tensor).collect();
            // The scalars are computed once, as one vector. Without the vector, fusion would compute the
            // scalar expressions again for every element of every parameter.
            let vector = Tensor::cat(&all, 0);
            (0..all.len()).map(|i| vector.narrow(0, i, 1usize).squeeze(0)).collect()
        };
        self.groups.iter().zip(rates).map(of).collect()
    }

    /// The states that a step replaces. Each inner list has one parameter, its f32 copy if there is one, and
    /// the tensors that the rule keeps.
    pub(crate) fn states(&self) -> Vec<Vec<Arc<State>>> {
        self.entries.iter().map(Entry::states).collect()
    }

    /// The paths and slots of the parameters.
    pub(crate) fn named_slots(&self) -> impl Iterator<Item = (&str, &Slot)> {
        self.entries.iter().map(|e| (e.path.as_str(), &e.slot))
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.entries.iter().map(|e| &e.slot)
    }

    /// The values that replace `old`. `old` holds the values of [`Optimizer::states`].
    pub(crate) fn updated(
        &self,
        old: &[Vec<Tensor>],
        g: &[Tensor],
        scalars: &[Vec<Tensor>],
    ) -> Vec<Vec<Tensor>> {
        let factors: Vec<Option<Tensor>> = (0..self.groups.len()).map(|k| self.norm_factor(k, g)).collect();
        let one = |(i, e): (usize, &Entry)| {
            let group = &self.groups[e.group];
            let own = usize::from(e.master.is_some());
            let compute = old[i][own].clone();
            let like = |t: &Tensor| compute.dtype().map_or_else(|_| t.clone(), |d| t.cast(d));
            let mut g = like(&g[i]);
            if let Some(f) = &factors[e.group] {
                g = g * like(f);
            }
            if let Some(Clip::Value(c)) = group.clip {
                g = g.clamp(-c, c);
            }
            let scalars: Vec<Tensor> = scalars[e.group].iter().map(like).collect();
            let (p, state) = group.rule.update(&compute, &g, &old[i][own + 1..], &scalars);
            let mut new = vec![];
            if let (true, Ok(d)) = (own == 1, old[i][0].dtype()) {
                new.push(p.cast(d));
            }
            new.push(p);
            new.extend(state);
            new
        };
        self.entries.iter().enumerate().map(one).collect()
    }

    /// The factor that clips the norm of a group's gradients. As in PyTorch, 1e-6 is added to the divisor.
    fn norm_factor(&self, group: usize, g: &[Tensor]) -> Option<Tensor> {
        let Some(Clip::Norm(most)) = self.groups[group].clip else { return None };
        let of_group = self.entries.iter().zip(g).filter(|(e, _)| e.group == group);
        let squares = of_group.map(|(_, g)| g.cast(DType::F32).sqr().sum(..));
        let total = squares.reduce(|a, b| a + b)?;
        Some((most / (total.sqrt() + 1e-6)).minimum(1.0))
    }
}

/// The scalars as literals. Literals become run-time arguments, so all steps share one plan.
fn literals(b: &Backend, scalars: &[f64], dtype: DType) -> Vec<Tensor> {
    scalars.iter().map(|s| Tensor::scalar(b, *s, dtype)).collect()
}

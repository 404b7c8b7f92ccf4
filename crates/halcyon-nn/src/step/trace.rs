//! Traces a training step: builds the step's results from placeholders for its inputs.

use super::{Forward, Kind, MemoryBudget};
use crate::ema::Ema;
use crate::optim::Optimizer;
use crate::scaler::{LossScaler, next, overflowed};
use crate::scope::{Scope, Writes, within};
use crate::slot::Slot;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result, Span};
use halcyon::{MixedPrecision, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The numbers of parts that are tried for a memory budget.
const PARTS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// The facts about the module and the optimizer that a trace of the step needs.
///
/// The inputs of an update are the batch and the frozen parameters, then the states: the states of the
/// optimizer, the moving averages, the buffers, the sums of gradients, and the states of the scaler. The
/// inputs of a function that only adds gradients are the batch, the frozen parameters, the parameters and the
/// scale, then the states: the buffers and the sums.
pub(super) struct Parts<'a> {
    pub(super) forward: Forward<'a>,
    pub(super) kind: Kind,
    /// The slots of the optimizer, in its order.
    pub(super) params: Vec<Slot>,
    /// The number of states that the optimizer has for each parameter, the parameter included.
    pub(super) counts: Vec<usize>,
    pub(super) frozen: Vec<Slot>,
    pub(super) buffers: Vec<Slot>,
    /// The number of scalars of each group.
    pub(super) scalars: Vec<usize>,
    pub(super) scaler: Option<LossScaler>,
    /// The number of batches per update, if it is not 1.
    pub(super) micro_batches: Option<u64>,
    pub(super) ema: Option<Arc<Ema>>,
    pub(super) budget: Option<MemoryBudget>,
    pub(super) mixed: Option<MixedPrecision>,
    /// The line of the user's code that runs the step. The ops that sum gradients have this span.
    pub(super) at: Span,
    /// The trace stores the number of parts that the budget needs here.
    pub(super) chosen: Arc<AtomicUsize>,
}

/// The inputs of a function, by purpose.
struct Inputs<'t> {
    batch: &'t [Tensor],
    frozen: &'t [Tensor],
    /// For each parameter of the optimizer, the parameter, and in an update also its states.
    own: Vec<Vec<Tensor>>,
    averages: &'t [Tensor],
    buffers: &'t [Tensor],
    sums: &'t [Tensor],
    /// Empty without a scaler. Otherwise all states of the scaler in an update, and the scale alone in a
    /// function that only adds gradients.
    scaler: &'t [Tensor],
}

/// The gradients of one batch, and the results of the forward.
struct Graded {
    loss: Tensor,
    /// The gradients of the loss, or of the scaled loss if there is a scaler.
    grads: Vec<Tensor>,
    /// The results of the forward that follow the loss.
    others: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

fn last<'t>(inputs: &mut &'t [Tensor], n: usize) -> &'t [Tensor] {
    let (rest, last) = inputs.split_at(inputs.len().saturating_sub(n));
    *inputs = rest;
    last
}

impl Parts<'_> {
    fn split<'t>(&self, mut inputs: &'t [Tensor]) -> Inputs<'t> {
        let n = self.params.len();
        let sums_of = if self.micro_batches.is_some() { n } else { 0 };
        match self.kind {
            Kind::Update => {
                let scaler = last(&mut inputs, if self.scaler.is_some() { 3 } else { 0 });
                let sums = last(&mut inputs, sums_of);
                let buffers = last(&mut inputs, self.buffers.len());
                let averages = last(&mut inputs, if self.ema.is_some() { n } else { 0 });
                let mut flat = last(&mut inputs, self.counts.iter().sum());
                let mut own = vec![];
                for n in &self.counts {
                    let (mine, after) = flat.split_at(*n);
                    own.push(mine.to_vec());
                    flat = after;
                }
                let frozen = last(&mut inputs, self.frozen.len());
                Inputs { batch: inputs, frozen, own, averages, buffers, sums, scaler }
            }
            Kind::Add => {
                let sums = last(&mut inputs, sums_of);
                let buffers = last(&mut inputs, self.buffers.len());
                let scaler = last(&mut inputs, usize::from(self.scaler.is_some()));
                let own = last(&mut inputs, n).iter().map(|p| vec![p.clone()]).collect();
                let frozen = last(&mut inputs, self.frozen.len());
                Inputs { batch: inputs, frozen, own, averages: &[], buffers, sums, scaler }
            }
        }
    }

    /// The results of the function for placeholders: the results of the forward, then the new values of the
    /// states. If there is a memory budget, the forward is divided into parts. Their number is the smallest
    /// number in `PARTS` for which the step keeps the budget.
    pub(super) fn planned(&self, optimizer: &Optimizer, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(MemoryBudget(budget)) = self.budget else {
            return self.trace(optimizer, inputs, 1);
        };
        let Some(first) = inputs.first() else { return self.trace(optimizer, inputs, 1) };
        let backend = first.backend();
        let mut least = (u64::MAX, 1);
        for parts in PARTS {
            let results = self.trace(optimizer, inputs, parts)?;
            let fit = backend.fit_of(inputs, &[], &results, self.mixed.as_ref())?;
            let need = fit.activations.saturating_add(fit.workspace);
            if need <= budget {
                self.chosen.store(parts, Ordering::Relaxed);
                return Ok(results);
            }
            least = least.min((need, parts));
        }
        Err(Error::OutOfMemory {
            device: backend.id().into(),
            what: format!("a training step whose forward is computed again in {} parts", least.1),
            requested: least.0,
            free: budget,
            total: budget,
            next: "Raise the memory budget of the step, or use a smaller batch".into(),
        })
    }

    fn trace(&self, optimizer: &Optimizer, inputs: &[Tensor], parts: usize) -> Result<Vec<Tensor>> {
        let x = self.split(inputs);
        let graded = self.graded(&x, parts)?;
        let mut out = vec![match x.scaler.first() {
            Some(factor) => graded.loss / factor,
            None => graded.loss,
        }];
        out.extend(graded.others);
        let mut sums: Vec<Tensor> = vec![];
        let add = |(sum, g): (&Tensor, &Tensor)| {
            let g = sum.dtype().map_or_else(|_| g.clone(), |d| g.cast(d));
            Tensor::build(&[sum, &g], |graph, x| {
                graph.span = self.at.clone();
                graph.add(x[0], x[1])
            })
        };
        if self.kind == Kind::Add {
            sums.extend(x.sums.iter().zip(&graded.grads).map(add));
            out.extend(graded.buffers);
            out.extend(sums);
            return Ok(out);
        }
        let mut grads = graded.grads;
        if let Some(n) = self.micro_batches {
            grads = x.sums.iter().zip(&grads).map(|g| add(g) * (1.0 / n as f64)).collect();
            sums.extend(
                x.sums
                    .iter()
                    .map(|s| s.shape().and_then(|shape| Ok(Tensor::zeros(s.backend(), shape, s.dtype()?))))
                    .collect::<Result<Vec<_>>>()?,
            );
        }
        let (new, averages, scale) = match (&self.scaler, x.scaler) {
            (Some(scaler), [factor, good, skipped]) => {
                self.scaled(optimizer, scaler, &x, &grads, [factor, good, skipped])?
            }
            _ => {
                let new = optimizer.updated(&x.own, &grads, &self.arguments(optimizer, &x));
                let averages = self.averaged(&x, &new);
                (new, averages, vec![])
            }
        };
        out.extend(new.into_iter().flatten());
        out.extend(averages);
        out.extend(graded.buffers);
        out.extend(sums);
        out.extend(scale);
        Ok(out)
    }

    /// The results of the forward, and the gradients of the loss, or of the scaled loss if there is a scaler.
    fn graded(&self, x: &Inputs<'_>, parts: usize) -> Result<Graded> {
        let Some(first) = x.own.first().and_then(|o| o.first()) else {
            return Err(Error::internal("a step without parameters"));
        };
        let backend = first.backend().clone();
        let params: Vec<Tensor> = x.own.iter().filter_map(|t| t.first().cloned()).collect();
        let all = self.params.iter().zip(&params).chain(self.frozen.iter().zip(x.frozen));
        let all = all.chain(self.buffers.iter().zip(x.buffers));
        let values = all.map(|(s, t)| (s.id(), t.clone())).collect();
        let key = [0, 1].map(|k| Tensor::argument(&backend, k, DType::U32));
        let scope = Scope { values, training: true, key: Some(key), writes: Writes::Kept, draws: 0 };
        let mut others = vec![];
        let (graded, scope) = within(scope, || {
            halcyon::value_and_grad_in_parts(&params, parts, |_| {
                let mut results = (self.forward)(x.batch)?.into_iter();
                let loss = results.next();
                others.extend(results);
                let loss = loss.ok_or_else(|| Error::argument("TrainStep", "the forward returns no loss"))?;
                // The loss is scaled in f32, because the scaled loss can exceed the range of f16.
                Ok(match x.scaler.first() {
                    Some(s) => loss.cast(DType::F32) * s,
                    None => loss,
                })
            })
        });
        let (loss, grads) = graded?;
        let buffers = self.buffers.iter().filter_map(|s| scope.values.get(&s.id()).cloned()).collect();
        Ok(Graded { loss, grads, others, buffers })
    }

    /// The scalars of each group, which are arguments of the plan.
    fn arguments(&self, optimizer: &Optimizer, x: &Inputs<'_>) -> Vec<Vec<Tensor>> {
        let backend = x.own[0][0].backend();
        let mut number = 1;
        let mut argument = |dtype: DType| {
            number += 1;
            Tensor::argument(backend, number, dtype)
        };
        let counts = self.scalars.iter().zip(optimizer.scalar_dtypes());
        counts.map(|(n, d)| (0..*n).map(|_| argument(d)).collect()).collect()
    }

    /// The moving averages after an update.
    fn averaged(&self, x: &Inputs<'_>, new: &[Vec<Tensor>]) -> Vec<Tensor> {
        let Some(ema) = &self.ema else { return vec![] };
        // The f32 copy of a parameter in f16 or bf16, if there is one; otherwise the parameter.
        let precise = |(p, t): (&Slot, &Vec<Tensor>)| {
            let small = p.stored().dtype().is_ok_and(|d| d != DType::F32 && d != DType::F64);
            t[usize::from(small && t.len() > 1)].clone()
        };
        let params: Vec<Tensor> = self.params.iter().zip(new).map(precise).collect();
        ema.next(x.averages, &params)
    }

    /// The new tensors of the optimizer, of the moving averages and of the scaler. `grads` are the gradients
    /// of the scaled loss. After an overflow, the tensors of the optimizer and of the moving averages keep
    /// their old values.
    #[allow(clippy::type_complexity)]
    fn scaled(
        &self,
        optimizer: &Optimizer,
        scaler: &LossScaler,
        x: &Inputs<'_>,
        grads: &[Tensor],
        [factor, good, skipped]: [&Tensor; 3],
    ) -> Result<(Vec<Vec<Tensor>>, Vec<Tensor>, Vec<Tensor>)> {
        let inverse = 1.0 / factor;
        let grads: Vec<Tensor> = grads.iter().map(|g| g.cast(DType::F32) * &inverse).collect();
        let overflow = overflowed(&grads).ok_or_else(|| Error::internal("a step without gradients"))?;
        let backend = factor.backend();
        let step = Tensor::argument(backend, 2, DType::F32) - skipped.cast(DType::F32);
        let rates: Vec<Tensor> =
            (0..self.scalars.len()).map(|k| Tensor::argument(backend, 3 + k as u32, DType::F32)).collect();
        let new = optimizer.updated(&x.own, &grads, &optimizer.device_scalars(&step, &rates));
        let averages = self.averaged(x, &new);
        let choose = |old: &[Tensor], new: Vec<Tensor>| -> Vec<Tensor> {
            old.iter().zip(new).map(|(o, n)| overflow.select(o, &n)).collect()
        };
        let new = x.own.iter().zip(new).map(|(old, new)| choose(old, new)).collect();
        let averages = choose(x.averages, averages);
        Ok((new, averages, next(scaler, [factor, good, skipped], &overflow).into()))
    }
}

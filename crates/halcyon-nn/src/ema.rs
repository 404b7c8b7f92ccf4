//! Exponential moving averages of parameters.

use crate::optim::Optimizer;
use crate::scope::{Scope, within};
use crate::slot::Slot;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{State, Tensor};
use std::fmt;
use std::sync::Arc;

/// Moving averages of the parameters that an optimizer updates: `average + (1 - decay) (parameter - average)`
/// after each step, in f32, or f64 for parameters in f64. Each average starts as the value of its parameter.
/// Steps that a loss scaler skips do not change the averages.
pub struct Ema {
    decay: f64,
    /// Path, parameter, average.
    of: Vec<(String, Slot, Arc<State>)>,
}

impl fmt::Debug for Ema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ema({}, {} parameters)", self.decay, self.of.len())
    }
}

impl Ema {
    pub(crate) fn new(optimizer: &Optimizer, decay: f64) -> Result<Ema> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::argument("ema", format!("the decay {decay} is outside of 0..1")));
        }
        let of = |(path, slot): (&str, &Slot)| {
            let value = slot.stored();
            let wide = if value.dtype()? == DType::F64 { DType::F64 } else { DType::F32 };
            // This makes a copy, because the next step overwrites the parameter's memory.
            let copy = value.cast(wide) + Tensor::scalar(value.backend(), 0.0, wide);
            copy.eval()?;
            Ok((path.to_string(), slot.clone(), Arc::new(State::new(copy))))
        };
        Ok(Ema { decay, of: optimizer.named_slots().map(of).collect::<Result<_>>()? })
    }

    pub(crate) fn states(&self) -> impl Iterator<Item = &Arc<State>> {
        self.of.iter().map(|(_, _, s)| s)
    }

    /// The same averages with other values.
    pub(crate) fn moved(&self, f: impl Fn(&Arc<State>) -> Result<Tensor>) -> Result<Ema> {
        let of = |(path, slot, s): &(String, Slot, Arc<State>)| {
            Ok((path.clone(), slot.clone(), Arc::new(State::new(f(s)?))))
        };
        Ok(Ema { decay: self.decay, of: self.of.iter().map(of).collect::<Result<_>>()? })
    }

    /// The averages after a step whose new parameters are `new`.
    #[track_caller]
    pub(crate) fn next(&self, old: &[Tensor], new: &[Tensor]) -> Vec<Tensor> {
        let one = |(a, p): (&Tensor, &Tensor)| {
            let p = a.dtype().map_or_else(|_| p.clone(), |d| p.cast(d));
            a + (p - a) * (1.0 - self.decay)
        };
        old.iter().zip(new).map(one).collect()
    }

    /// The averages by path.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        self.of.iter().map(|(path, _, s)| (path.clone(), s.value())).collect()
    }

    /// Replaces an average that [`Ema::state`] lists, for example when a checkpoint is loaded.
    ///
    /// # Errors
    /// `Error::Argument` if there is no such parameter; `Error::Shape` if the dtype or shape differs.
    pub fn set_state(&self, path: &str, value: Tensor) -> Result<()> {
        match self.of.iter().find(|(p, _, _)| p == path) {
            Some((_, _, s)) => s.write(value),
            None => Err(Error::argument("set_state", format!("there is no average of `{path}`"))),
        }
    }

    /// Runs `f` with the averages in place of the parameters. Modules behave as in evaluation.
    pub fn evaluate<R>(&self, f: impl FnOnce() -> R) -> R {
        let value = |(_, slot, s): &(String, Slot, Arc<State>)| {
            let (v, own) = (s.value(), slot.stored().dtype());
            (slot.id(), own.map_or_else(|_| v.clone(), |d| v.cast(d)))
        };
        let values = self.of.iter().map(value).collect();
        within(Scope { values, ..Scope::default() }, f).0
    }

    /// Makes the averages the values of the parameters. For a parameter in f16 or bf16, the optimizer keeps
    /// an f32 copy, which this method does not change and from which the next step continues. To continue
    /// training from the averages, use [`crate::TrainStep::apply_averages`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn apply(&self) -> Result<()> {
        for (_, slot, s) in &self.of {
            let v = s.value();
            let new =
                v.cast(slot.stored().dtype()?) + Tensor::scalar(v.backend(), 0.0, slot.stored().dtype()?);
            new.eval()?;
            slot.set(new)?;
        }
        Ok(())
    }
}

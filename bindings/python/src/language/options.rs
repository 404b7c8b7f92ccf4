//! Options from Python's keyword arguments.

use crate::errors::OrRaise;
use halcyon_models::{GenerateOptions, Sampling, StepName};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Reads options from a dictionary and removes them.
pub(crate) struct Take<'a, 'py>(pub &'a Bound<'py, PyDict>);

impl Take<'_, '_> {
    /// An option; `None` if it is absent or None.
    pub(crate) fn get<T: for<'a> FromPyObject<'a, 'a>>(&self, name: &str) -> PyResult<Option<T>> {
        let Some(value) = self.0.get_item(name)? else { return Ok(None) };
        self.0.del_item(name)?;
        if value.is_none() {
            return Ok(None);
        }
        let wrong = || {
            let (kind, value) = (value.get_type().name(), value.repr());
            let text =
                |t: PyResult<Bound<'_, pyo3::types::PyString>>| t.map(|t| t.to_string()).unwrap_or_default();
            PyTypeError::new_err(format!("{name}: {} of type {} has no valid value", text(value), text(kind)))
        };
        value.extract::<T>().map(Some).map_err(|_| wrong())
    }

    pub(crate) fn or<T: for<'a> FromPyObject<'a, 'a>>(&self, name: &str, default: T) -> PyResult<T> {
        Ok(self.get(name)?.unwrap_or(default))
    }

    /// Refuses what is left.
    pub(crate) fn end(&self) -> PyResult<()> {
        match self.0.keys().iter().next() {
            None => Ok(()),
            Some(name) => Err(PyTypeError::new_err(format!("there is no option {name}"))),
        }
    }
}

/// What the text must match.
pub(super) enum Demand {
    Grammar(String),
    Schema(String),
}

/// The options of a generation. `seed` gives the seed if none is given.
pub(super) fn generate(
    options: &Bound<'_, PyDict>,
    seed: impl FnOnce() -> u64,
) -> PyResult<(GenerateOptions, Option<Demand>)> {
    let o = Take(options);
    let d = Sampling::default();
    let steps: Option<Vec<String>> = o.get("samplers")?;
    let steps = match steps {
        None => d.steps,
        Some(names) => {
            let named = names.iter().map(|n| n.parse::<StepName>());
            named.collect::<halcyon::Result<Vec<_>>>().or_raise()?
        }
    };
    let sampling = Sampling {
        temperature: o.or("temperature", d.temperature)?,
        top_k: o.or("top_k", d.top_k)?,
        typical_p: o.or("typical_p", d.typical_p)?,
        top_p: o.or("top_p", d.top_p)?,
        min_p: o.or("min_p", d.min_p)?,
        repeat_penalty: o.or("repeat_penalty", d.repeat_penalty)?,
        presence_penalty: o.or("presence_penalty", d.presence_penalty)?,
        frequency_penalty: o.or("frequency_penalty", d.frequency_penalty)?,
        repeat_last: o.or("repeat_last", d.repeat_last)?,
        seed: o.get("seed")?.unwrap_or_else(seed),
        steps,
    };
    let made = GenerateOptions {
        max_tokens: o.get("max_tokens")?,
        sampling,
        stop: o.or("stop", vec![])?,
        ignore_eos: o.or("ignore_eos", false)?,
        past: vec![],
        mask: None,
    };
    let demand = match (o.get("grammar")?, o.get("json_schema")?) {
        (Some(_), Some(_)) => {
            return Err(PyTypeError::new_err("grammar and json_schema exclude each other: give one"));
        }
        (Some(text), None) => Some(Demand::Grammar(text)),
        (None, Some(text)) => Some(Demand::Schema(text)),
        (None, None) => None,
    };
    o.end()?;
    Ok((made, demand))
}

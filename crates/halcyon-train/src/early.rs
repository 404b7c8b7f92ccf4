//! Ends a training that no longer improves.

use crate::callback::{Callback, EpochReport, Flow};
use crate::checkpoint::Goal;
use halcyon::ir::error::{Error, Result};
use serde_json::{Value, json};

/// Stops after `patience` epochs in a row in which a metric has not improved by more than `least`.
#[derive(Clone, Debug)]
pub struct EarlyStopping {
    metric: String,
    goal: Goal,
    patience: u64,
    least: f64,
    best: f64,
    waited: u64,
}

impl EarlyStopping {
    /// Watches `loss`, which is the mean loss of training, or a metric of the evaluation.
    pub fn new(metric: impl Into<String>, goal: Goal, patience: u64) -> EarlyStopping {
        EarlyStopping { metric: metric.into(), goal, patience, least: 0.0, best: f64::NAN, waited: 0 }
    }

    /// Sets by how much the metric must improve. Default: 0.
    pub fn least(mut self, least: f64) -> EarlyStopping {
        self.least = least;
        self
    }
}

impl Callback for EarlyStopping {
    fn state(&self) -> Value {
        // Text, because JSON readers round numbers.
        json!({ "best": format!("{:?}", self.best), "waited": self.waited })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let best = state["best"].as_str().and_then(|b| b.parse().ok());
        let (Some(best), Some(waited)) = (best, state["waited"].as_u64()) else {
            let what = "the state of early stopping is malformed".to_string();
            return Err(Error::Format { file: "checkpoint.json".into(), what });
        };
        (self.best, self.waited) = (best, waited);
        Ok(())
    }

    fn on_epoch(&mut self, report: &EpochReport) -> Result<Flow> {
        let value = match self.metric.as_str() {
            "loss" => Some(report.loss),
            name => report.metrics.get(name).copied(),
        };
        let value = value.ok_or_else(|| {
            let names: Vec<&str> = report.metrics.keys().map(String::as_str).collect();
            let what = format!("the evaluation has no `{}`; it has loss, {}", self.metric, names.join(", "));
            Error::argument("EarlyStopping", what)
        })?;
        let needed = match self.goal {
            Goal::Largest => self.best + self.least,
            Goal::Smallest => self.best - self.least,
        };
        if self.goal.better(value, needed) {
            (self.best, self.waited) = (value, 0);
            return Ok(Flow::Continue);
        }
        self.waited += 1;
        Ok(if self.waited >= self.patience { Flow::Stop } else { Flow::Continue })
    }
}

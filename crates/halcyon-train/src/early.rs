//! Ends a training whose metric no longer improves.

use crate::callback::{Callback, EpochReport, Flow};
use crate::checkpoint::Goal;
use halcyon::ir::error::{Error, Result};
use serde_json::{Value, json};

/// Stops the training if a metric does not improve by more than `least` in `patience` consecutive epochs.
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
    /// Watches a metric of the evaluation, or `loss`, the mean loss of training.
    pub fn new(metric: impl Into<String>, goal: Goal, patience: u64) -> EarlyStopping {
        EarlyStopping { metric: metric.into(), goal, patience, least: 0.0, best: f64::NAN, waited: 0 }
    }

    /// An epoch counts as an improvement only if the metric changes by more than `least`. Default: 0.
    pub fn least(mut self, least: f64) -> EarlyStopping {
        self.least = least;
        self
    }
}

impl Callback for EarlyStopping {
    fn state(&self) -> Value {
        // The number is stored as text, because JSON readers may round numbers.
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
            let names: Vec<&str> =
                ["loss"].into_iter().chain(report.metrics.keys().map(String::as_str)).collect();
            let what = format!("no metric `{}`; there are: {}", self.metric, names.join(", "));
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

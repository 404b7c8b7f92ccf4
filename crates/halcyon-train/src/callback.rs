//! What a trainer tells while it runs, and what it can be told.

use halcyon::Backend;
use halcyon::ir::error::Result;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What happens after a callback.
#[derive(Clone, Debug, Default)]
pub enum Flow {
    #[default]
    Continue,
    /// Training ends: from `on_epoch` after the epoch's checkpoint, from `on_step` after that step, with a
    /// checkpoint.
    Stop,
    /// The model and everything of the training step move to another backend before the next step.
    MoveTo(Backend),
}

/// A step that was taken.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// The number of the epoch, from 0.
    pub epoch: u64,
    pub loss: f64,
    /// Samples per second since the last report.
    pub samples_per_s: f64,
    /// Number of batches of the epoch so far, and in all.
    pub batches: (u64, u64),
}

/// An epoch that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct EpochReport {
    /// The number of the epoch, from 0.
    pub epoch: u64,
    /// Number of steps taken so far.
    pub step: u64,
    /// The mean loss of the epoch's samples.
    pub loss: f64,
    pub samples: u64,
    /// Samples per second in training, without evaluation and checkpoints. After a resumption it is of the
    /// part since then.
    pub samples_per_s: f64,
    /// What the evaluation returned.
    pub metrics: BTreeMap<String, f64>,
}

/// Hooks of a [`crate::Trainer`]. All do nothing unless they are written. An error ends the training.
pub trait Callback {
    /// Before the first step. `step` is the number of steps taken before, more than 0 after a resumption.
    ///
    /// # Errors
    /// As the implementation says.
    fn on_start(&mut self, step: u64) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// After a step. Losses are read from the device every few steps, so the calls for these steps follow
    /// each other; see [`crate::TrainerOptions::read_every`].
    ///
    /// # Errors
    /// As the implementation says.
    fn on_step(&mut self, report: &StepReport) -> Result<Flow> {
        let _ = report;
        Ok(Flow::Continue)
    }

    /// After an epoch and its evaluation.
    ///
    /// # Errors
    /// As the implementation says.
    fn on_epoch(&mut self, report: &EpochReport) -> Result<Flow> {
        let _ = report;
        Ok(Flow::Continue)
    }

    /// After a checkpoint was written.
    ///
    /// # Errors
    /// As the implementation says.
    fn on_checkpoint(&mut self, folder: &Path) -> Result<()> {
        let _ = folder;
        Ok(())
    }

    /// What a resumed training needs of this callback. Checkpoints hold it.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Takes the state of [`Callback::state`] of the checkpoint from which the training is resumed.
    ///
    /// # Errors
    /// `Error::Format` if it is malformed.
    fn restore(&mut self, state: &Value) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// After the last step, also if the training was interrupted.
    ///
    /// # Errors
    /// As the implementation says.
    fn on_end(&mut self) -> Result<()> {
        Ok(())
    }
}

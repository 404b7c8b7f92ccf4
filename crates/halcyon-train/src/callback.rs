//! Callbacks: they get reports from a trainer while it runs, and return requests to the trainer.

use halcyon::Backend;
use halcyon::ir::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Makes the folder of a file that a callback writes.
///
/// # Errors
/// `Error::Io`.
pub(crate) fn make_folder_of(file: &Path) -> Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder)
        .map_err(|e| Error::Io { path: folder.display().to_string(), what: e.to_string() })
}

/// What the trainer does after a callback.
#[derive(Clone, Debug, Default)]
pub enum Flow {
    #[default]
    Continue,
    /// Ends the training. If `on_epoch` returns this, the training ends after the checkpoint of the epoch. If
    /// `on_step` returns this, no further step runs, and a checkpoint is written. If the epoch is complete by
    /// then, its evaluation and `on_epoch` still follow.
    Stop,
    /// Moves the model and all state of the training step to another backend before the next step.
    MoveTo(Backend),
}

/// The report of a step that has run.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The number of the step, from 1.
    pub step: u64,
    /// The number of the epoch, from 0.
    pub epoch: u64,
    pub loss: f64,
    /// Samples per second since losses were last read from the device.
    pub samples_per_s: f64,
    /// The number of batches of the epoch so far, and the number of all batches of the epoch.
    pub batches: (u64, u64),
}

/// The report of an epoch that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct EpochReport {
    /// The number of the epoch, from 0.
    pub epoch: u64,
    /// Number of steps taken so far.
    pub step: u64,
    /// The mean loss of the epoch's samples.
    pub loss: f64,
    pub samples: u64,
    /// Samples per second in training. Evaluation and checkpoints are not counted. If the training was
    /// resumed within the epoch, only the part after the resumption is counted.
    pub samples_per_s: f64,
    /// The metrics that the evaluation returned.
    pub metrics: BTreeMap<String, f64>,
}

/// Callbacks of a [`crate::Trainer`]. By default each method does nothing. An error of a method ends the
/// training.
pub trait Callback {
    /// Called before the first step. `step` is the number of steps already taken: it is more than 0 if the
    /// training was resumed.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn on_start(&mut self, step: u64) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// Called after a step. Losses are read from the device only every few steps, and the calls for these
    /// steps are then made one after another; see [`crate::TrainerOptions::read_every`].
    ///
    /// # Errors
    /// Errors of the implementation.
    fn on_step(&mut self, report: &StepReport) -> Result<Flow> {
        let _ = report;
        Ok(Flow::Continue)
    }

    /// Called after an epoch and its evaluation.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn on_epoch(&mut self, report: &EpochReport) -> Result<Flow> {
        let _ = report;
        Ok(Flow::Continue)
    }

    /// Called after a checkpoint was written.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn on_checkpoint(&mut self, folder: &Path) -> Result<()> {
        let _ = folder;
        Ok(())
    }

    /// The state of this callback that a resumed training needs. Checkpoints store it.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Restores the state that [`Callback::state`] returned. Called when a training is resumed from a
    /// checkpoint.
    ///
    /// # Errors
    /// `Error::Format` if the state is malformed.
    fn restore(&mut self, state: &Value) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// Called after the last step, also if the training was interrupted or failed.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn on_end(&mut self) -> Result<()> {
        Ok(())
    }
}

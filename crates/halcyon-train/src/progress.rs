//! A progress bar.

use crate::callback::{Callback, EpochReport, Flow, StepReport};
use halcyon::ir::error::{Error, Result};
use indicatif::{ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// Draws a progress bar for each epoch on standard error, with the loss and the samples per second. Draws
/// nothing if standard error is not a terminal.
#[derive(Debug)]
pub struct ProgressBar {
    bar: indicatif::ProgressBar,
    epochs: u64,
    epoch: Option<u64>,
}

impl ProgressBar {
    /// A progress bar for a training of `epochs` epochs.
    ///
    /// # Errors
    /// `Error::Internal` if the bar's template is invalid.
    pub fn new(epochs: u64) -> Result<ProgressBar> {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} {eta}");
        let style = style.map_err(|e| Error::internal(e.to_string()))?;
        let bar = indicatif::ProgressBar::with_draw_target(None, target).with_style(style);
        Ok(ProgressBar { bar, epochs, epoch: None })
    }
}

impl Callback for ProgressBar {
    fn on_step(&mut self, r: &StepReport) -> Result<Flow> {
        if self.epoch != Some(r.epoch) {
            self.epoch = Some(r.epoch);
            self.bar.reset();
            self.bar.set_prefix(format!("epoch {}/{}", r.epoch + 1, self.epochs.max(r.epoch + 1)));
        }
        self.bar.set_length(r.batches.1);
        self.bar.set_position(r.batches.0);
        self.bar.set_message(format!("loss {:.4}, {:.0} samples/s", r.loss, r.samples_per_s));
        Ok(Flow::Continue)
    }

    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        self.bar.set_message(format!("loss {:.4}, {:.0} samples/s", r.loss, r.samples_per_s));
        Ok(Flow::Continue)
    }

    fn on_end(&mut self) -> Result<()> {
        self.bar.finish_and_clear();
        Ok(())
    }
}

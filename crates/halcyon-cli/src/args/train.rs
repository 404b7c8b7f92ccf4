//! Arguments of the command that trains.

use super::BackendArgs;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Debug)]
#[command(after_help = TRAIN)]
pub(crate) struct TrainArgs {
    /// Configuration: a TOML file with model, data, optimizer and length of the training (docs/training.md)
    pub config: PathBuf,
    /// Continues from the newest checkpoint of the run's folder
    #[arg(long)]
    pub resume: bool,
    /// Replaces a value of the configuration, as optimizer.rate=0.01 or data=DIR; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Names the op that makes a NaN or an infinity, with its module and line. Steps take longer
    #[arg(long)]
    pub detect_anomaly: bool,
    #[command(flatten)]
    pub backend: BackendArgs,
    /// Prints one JSON object per epoch: epoch, loss, samples_per_s and the metrics
    #[arg(long)]
    pub json: bool,
}

const TRAIN: &str = "\
The run's folder (`output`, by default runs/NAME) gets the checkpoints, log.jsonl with the loss of every \
step, and loss.png. Ctrl-C ends the training after the current step with a checkpoint; --resume continues the training. \
On the same backend, the results are then bit for bit those of a training without a break.

Examples:
  halcyon train examples/train/digits.toml --set epochs=1
  halcyon train examples/train/digits.toml --set epochs=2 --resume";

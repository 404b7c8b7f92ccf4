//! Training: a trainer with callbacks, metrics, logs, and checkpoints. A checkpoint is complete even if the
//! process is killed, and can be loaded on another device. The crate also runs the trainings of configuration
//! files for `halcyon train`.
//!
//! ```
//! use halcyon::prelude::*;
//! use halcyon_data::{Arrays, ConstData, DataLoader, LoaderOptions};
//! use halcyon_nn::{Adam, Linear, Optimizer, TrainStep};
//! use halcyon_train::{Trainer, TrainerOptions};
//! # fn main() -> halcyon::Result<()> {
//! let b = Backend::cpu()?;
//! let x = ConstData::from_slice(&[8, 1], &[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])?;
//! let y = ConstData::from_slice(&[8, 1], &[1.0f32, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0])?;
//! let mut data = DataLoader::new(Arrays::new([("x", x), ("y", y)])?, LoaderOptions::new(4).shuffle(1))?;
//! let layer = Linear::new(&b, 1, 1)?;
//! let optimizer = Optimizer::new(&layer, Adam::new().rate(0.1))?;
//! let step = TrainStep::new(&layer, optimizer, |m: &&Linear, batch: &[Tensor]| {
//!     Ok(vec![(m.forward(&batch[0]) - &batch[1]).sqr().mean(..)])
//! })?;
//! let mut trainer = Trainer::new(&layer, step, TrainerOptions { epochs: 100, ..TrainerOptions::default() });
//! let report = trainer.fit(&mut data)?;
//! assert_eq!((report.epoch, report.step), (100, 200));
//! assert!(report.loss < 0.5, "{}", report.loss);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod anomaly;
mod callback;
mod chart;
mod checkpoint;
mod early;
mod json_log;
mod metrics;
mod onnx;
mod progress;
pub mod run;
mod tensorboard;
mod trainer;

pub use anomaly::find_anomaly;
pub use callback::{Callback, EpochReport, Flow, StepReport};
pub use chart::LossChart;
pub use checkpoint::{
    Checkpoint, CheckpointOptions, Checkpoints, FileRecord, Goal, GroupRecord, Manifest, OptimizerRecord,
    Progress, ScalerRecord, VERSION,
};
pub use early::EarlyStopping;
pub use json_log::JsonLog;
pub use metrics::{Classification, MeanLoss};
pub use onnx::write_onnx;
pub use progress::ProgressBar;
pub use tensorboard::TensorBoard;
pub use trainer::{Batches, Report, StepBatch, Stopped, Trainer, TrainerOptions};

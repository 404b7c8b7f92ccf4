//! Trainings from a configuration file, for `halcyon train`.
//!
//! [`Config::read`] reads a TOML file; [`train`] trains. A run has a folder with its checkpoints, its log
//! (`log.jsonl`), a chart of the loss (`loss.png`) and, if configured, TensorBoard's files.

mod config;
mod data;
mod export;
mod models;
mod settings;

pub use config::{Config, DTypeName, GoalName, ModelConfig, OptimizerConfig, OptimizerKind, Watch};
pub use models::{Chars, Cnn, Mlp, Model};

use crate::LossChart;
use crate::callback::{Callback, EpochReport, Flow};
use crate::checkpoint::{CheckpointOptions, Checkpoints};
use crate::early::EarlyStopping;
use crate::json_log::JsonLog;
use crate::metrics::{Classification, MeanLoss};
use crate::progress::ProgressBar;
use crate::tensorboard::TensorBoard;
use crate::trainer::{Report, Trainer, TrainerOptions};
use data::{Data, Target};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Tensor};
use halcyon_data::{DataLoader, Dataset, LoaderOptions};
use halcyon_nn::{CrossEntropyOptions, LossScaler, ModuleExt, Reduction, TrainStep, cross_entropy, mse_loss};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Options of a training that are not part of its configuration.
pub struct RunOptions<'a> {
    pub backend: Backend,
    /// Whether the training continues from the newest checkpoint of the run's folder, if there is one.
    pub resume: bool,
    /// A flag. When it is set, the training ends after the current step.
    pub interrupt: Arc<AtomicBool>,
    /// Whether a progress bar is shown on a terminal.
    pub progress: bool,
    /// Called after each epoch.
    pub on_epoch: Box<dyn FnMut(&EpochReport) -> Result<()> + 'a>,
}

impl std::fmt::Debug for RunOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RunOptions(on {}, resume {})", self.backend.id(), self.resume)
    }
}

/// The result of [`train`].
#[derive(Debug)]
pub struct Outcome {
    pub report: Report,
    /// Number of parameters of the model.
    pub parameters: usize,
    /// The step from which the run was resumed.
    pub resumed: Option<u64>,
    /// The ONNX model that was written, with its size in bytes.
    pub exported: Option<(PathBuf, u64)>,
}

struct OnEpoch<'a>(Box<dyn FnMut(&EpochReport) -> Result<()> + 'a>);

impl Callback for OnEpoch<'_> {
    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        (self.0)(r).map(|()| Flow::Continue)
    }
}

/// Runs the training of a configuration.
///
/// # Errors
/// `Error::Argument` for a configuration whose model and data do not fit; errors of the data, the device and
/// the run's folder.
pub fn train(config: &Config, options: RunOptions<'_>) -> Result<Outcome> {
    let RunOptions { backend, resume, interrupt, progress, on_epoch } = options;
    let data = Data::open(config)?;
    backend.manual_seed(config.seed);
    let model = Model::new(&backend, &config.model, &data)?;
    if config.dtype != DTypeName::F32 {
        model.to_dtype(config.dtype.dtype())?;
    }
    let loader = LoaderOptions::new(config.batch).shuffle(config.seed).drop_last(true);
    let mut loader = DataLoader::new(data.train.clone(), loader.workers(config.workers))?;
    let steps = config.steps.unwrap_or(loader.batches().saturating_mul(config.epochs));
    let step = training_step(config, &model, &data, steps)?;
    check_metrics(config, &model, &data)?;
    let io = |e: std::io::Error| Error::Io { path: config.output.display().to_string(), what: e.to_string() };
    std::fs::create_dir_all(&config.output).map_err(io)?;
    let best = config.best.as_ref().map(|w| (w.metric.clone(), w.goal.into()));
    let kept = CheckpointOptions { keep: config.keep, best, ..CheckpointOptions::default() };
    let checkpoints = Checkpoints::new(config.output.join("checkpoints"), kept);
    let latest = checkpoints.latest()?;
    if let (Some(path), false) = (&latest, resume) {
        let what = format!(
            "{} has checkpoints of an earlier run, the newest {}. Give --resume to continue it, or another \
             folder with --set output=DIR",
            config.output.display(),
            path.file_name().unwrap_or_default().to_string_lossy()
        );
        return Err(Error::argument("train", what));
    }
    let train_options = TrainerOptions {
        epochs: if config.steps.is_some() { u64::MAX } else { config.epochs },
        steps: config.steps,
        read_every: config.read_every,
        checkpoint_every: config.checkpoint_every,
        detect_anomaly: config.detect_anomaly,
    };
    let mut trainer = Trainer::new(&model, step, train_options)
        .checkpoints(checkpoints)
        .interrupted_by(interrupt)
        .callback(JsonLog::new(config.output.join("log.jsonl")))
        .callback(LossChart::new(config.output.join("loss.png")).history(config.output.join("log.jsonl")))
        .callback(OnEpoch(on_epoch));
    if let Some(test) = &data.test {
        trainer = trainer.evaluate(evaluation(config, &model, test.clone(), &data)?);
    }
    if progress {
        trainer = trainer.callback(ProgressBar::new(config.epochs)?);
    }
    if config.tensorboard {
        trainer = trainer.callback(TensorBoard::new(config.output.join("tensorboard")));
    }
    if let Some(w) = &config.early_stopping {
        let stop = EarlyStopping::new(w.metric.clone(), w.goal.into(), w.patience).least(w.least);
        trainer = trainer.callback(stop);
    }
    let mut resumed = None;
    if let Some(path) = &latest {
        trainer.resume(path, &mut loader)?;
        resumed = Some(trainer.steps());
    }
    let report = trainer.fit(&mut loader)?;
    drop(trainer);
    let exported = match &config.export {
        Some(path) => Some((path.clone(), export::write(&model, &data, path)?)),
        None => None,
    };
    Ok(Outcome { report, parameters: model.parameter_count()?, resumed, exported })
}

fn training_step<'m>(config: &Config, model: &'m Model, data: &Data, steps: u64) -> Result<TrainStep<'m>> {
    let optimizer = config.optimizer.build(model, steps)?;
    let (dtype, target) = (config.dtype.dtype(), data.target);
    let f = move |model: &&Model, batch: &[Tensor]| Ok(vec![loss(model, dtype, target, batch)]);
    let step = match config.dtype {
        DTypeName::F16 => TrainStep::with_scaler(model, optimizer, LossScaler::default(), f)?,
        _ => TrainStep::new(model, optimizer, f)?,
    };
    Ok(step.seed(config.seed))
}

/// The model's results for the input of a batch, in f32.
fn answers(model: &Model, dtype: DType, x: &Tensor) -> Tensor {
    let x = if x.dtype().is_ok_and(|d| d.is_float()) { x.cast(dtype) } else { x.clone() };
    model.forward(&x).cast(DType::F32)
}

/// The mean loss of a batch. The batch has an input and a target.
fn loss(model: &Model, dtype: DType, target: Target, batch: &[Tensor]) -> Tensor {
    let y = answers(model, dtype, &batch[0]);
    of_answers(&y, target, &batch[1])
}

fn of_answers(y: &Tensor, target: Target, t: &Tensor) -> Tensor {
    match (target, y.dims(), t.dims()) {
        (Target::Values, _, Ok(dims)) => {
            mse_loss(&y.reshape(dims.to_vec()), &t.cast(DType::F32), Reduction::Mean)
        }
        // A sequence has one target per position.
        (Target::Classes(n), Ok(dims), _) if dims.len() == 3 => {
            let rows = dims[0] * dims[1];
            cross_entropy(&y.reshape([rows, n]), &t.reshape([rows]), CrossEntropyOptions::default())
        }
        _ => cross_entropy(y, t, CrossEntropyOptions::default()),
    }
}

/// Returns an error if the configuration names a metric that this training does not have.
fn check_metrics(config: &Config, model: &Model, data: &Data) -> Result<()> {
    let mut known = vec!["loss"];
    if data.test.is_some() {
        known.push("test_loss");
        if matches!(model, Model::Chars(_)) {
            known.push("perplexity");
        }
        if matches!(data.target, Target::Classes(_)) {
            known.push("accuracy");
        }
    }
    let best = config.best.as_ref().map(|w| &w.metric);
    let stop = config.early_stopping.as_ref().map(|w| &w.metric);
    match best.into_iter().chain(stop).find(|m| !known.contains(&m.as_str())) {
        None => Ok(()),
        Some(m) => {
            let what = format!("there is no metric `{m}`; this training has {}", known.join(", "));
            Err(Error::argument("train", what))
        }
    }
}

/// Evaluates the model on the rows of `test`. The metrics are `test_loss`; for classes also `accuracy`; for
/// text also `perplexity`.
fn evaluation<'m>(
    config: &Config,
    model: &'m Model,
    test: Arc<dyn Dataset>,
    data: &Data,
) -> Result<impl FnMut() -> Result<BTreeMap<String, f64>> + 'm> {
    let loader = LoaderOptions::new(config.batch.max(64)).workers(config.workers);
    let mut loader = DataLoader::new(test, loader)?;
    let (target, dtype) = (data.target, config.dtype.dtype());
    Ok(move || {
        let backend = model.backend();
        let mut mean = MeanLoss::default();
        let mut counts = match target {
            Target::Classes(n) => Some(Classification::new(n)),
            Target::Values => None,
        };
        loader.set_epoch(0);
        for batch in loader.epoch() {
            let batch = batch?;
            let tensors = batch.to(&backend)?;
            let y = answers(model, dtype, &tensors[0]);
            let loss = of_answers(&y, target, &tensors[1]);
            halcyon::eval(&[y.clone(), loss.clone()])?;
            mean.add(loss.item::<f64>()?, batch.rows.len() as u64);
            if let Some(c) = &mut counts {
                c.add(&y, &tensors[1])?;
            }
        }
        let mut out = BTreeMap::from([("test_loss".to_string(), mean.mean())]);
        if let Some(c) = counts {
            out.insert("accuracy".into(), c.accuracy());
        }
        if let Model::Chars(_) = model {
            out.insert("perplexity".into(), mean.perplexity());
        }
        Ok(out)
    })
}

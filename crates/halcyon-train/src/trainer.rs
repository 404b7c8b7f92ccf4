//! The loop over epochs and steps.

use crate::anomaly::find_anomaly;
use crate::callback::{Callback, EpochReport, Flow, StepReport};
use crate::checkpoint::{Checkpoint, Checkpoints, Progress};
use crate::metrics::MeanLoss;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, Tensor};
use halcyon_data::{DataLoader, LoaderState};
use halcyon_nn::{Module, ModuleExt, StepGraph, TrainStep};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A batch on the host.
#[derive(Clone, Debug)]
pub struct StepBatch {
    /// The arrays that the step gets, in order.
    pub arrays: Vec<ConstData>,
    pub samples: u64,
    /// The index of the batch in its epoch, from 0. `batches` is the number of batches of the epoch.
    pub index: u64,
    pub batches: u64,
    /// The position after this batch, for [`Batches::restore`].
    pub position: Value,
}

/// A source of a trainer's batches, epoch after epoch.
pub trait Batches {
    /// The next batch.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn next(&mut self) -> Result<StepBatch>;

    /// Goes to a position that [`StepBatch::position`] gave.
    ///
    /// # Errors
    /// `Error::Argument` if the position belongs to other data.
    fn restore(&mut self, position: &Value) -> Result<()>;
}

impl Batches for DataLoader {
    fn next(&mut self) -> Result<StepBatch> {
        let (batches, b) = (self.batches(), self.next_batch()?);
        let position = serde_json::to_value(&b.after).map_err(|e| Error::internal(e.to_string()))?;
        Ok(StepBatch { arrays: b.arrays, samples: b.rows.len() as u64, index: b.index, batches, position })
    }

    fn restore(&mut self, position: &Value) -> Result<()> {
        let state = LoaderState::deserialize(position).map_err(|e| {
            Error::argument("restore", format!("the checkpoint's position in the data is malformed: {e}"))
        })?;
        DataLoader::restore(self, &state)
    }
}

/// The options of a [`Trainer`].
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerOptions {
    /// Number of epochs. Default: 1.
    pub epochs: u64,
    /// The training ends after this number of steps, even if not all epochs are complete. Default: none.
    pub steps: Option<u64>,
    /// The number of steps after which losses are read from the device. Between two reads, the host does not
    /// wait for the device. Default: 10.
    pub read_every: u64,
    /// If set, a checkpoint is also written after every `checkpoint_every` steps, in addition to the
    /// checkpoint after each epoch.
    pub checkpoint_every: Option<u64>,
    /// Whether the results of every step are checked for NaN and infinity. If a step made one, the step is
    /// undone, and the error names the op that made the value, if the same ops make it on the host too. Each
    /// step takes longer, and needs memory for the old values of all parameters.
    pub detect_anomaly: bool,
}

impl Default for TrainerOptions {
    fn default() -> TrainerOptions {
        TrainerOptions {
            epochs: 1,
            steps: None,
            read_every: 10,
            checkpoint_every: None,
            detect_anomaly: false,
        }
    }
}

/// Why a training ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// All epochs or steps are complete.
    Done,
    /// A callback returned [`Flow::Stop`].
    Callback,
    /// The flag of [`Trainer::interrupt`] was set.
    Interrupted,
}

/// The result of [`Trainer::fit`].
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The number of completed epochs, including those before a resumption; `step` is the number of steps.
    pub epoch: u64,
    pub step: u64,
    /// The mean loss of the last epoch, which may be incomplete.
    pub loss: f64,
    /// The metrics of the last evaluation.
    pub metrics: BTreeMap<String, f64>,
    pub stopped: Stopped,
    /// The checkpoint that was written last.
    pub checkpoint: Option<PathBuf>,
}

/// The trainer's state in a checkpoint. The sum of losses is stored as text, because JSON readers may round
/// numbers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    loss_sum: String,
    samples: u64,
    /// The states of the callbacks, in order.
    callbacks: Vec<Value>,
}

type Evaluate<'a> = Box<dyn FnMut() -> Result<BTreeMap<String, f64>> + 'a>;

/// Trains a model; see the [crate's example](crate).
pub struct Trainer<'a> {
    model: &'a dyn Module,
    step: TrainStep<'a>,
    options: TrainerOptions,
    callbacks: Vec<Box<dyn Callback + 'a>>,
    evaluate: Option<Evaluate<'a>>,
    checkpoints: Option<Checkpoints>,
    stop: Arc<AtomicBool>,
    epoch: u64,
    taken: u64,
    /// The loss of the current epoch.
    loss: MeanLoss,
    metrics: BTreeMap<String, f64>,
    position: Value,
    saved: Option<PathBuf>,
    /// Whether a callback stops the training after this epoch.
    stopping: bool,
    /// The mean loss of the last epoch.
    last: f64,
}

impl fmt::Debug for Trainer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trainer(epoch {}, {} steps, {:?})", self.epoch, self.taken, self.options)
    }
}

/// The losses that were not read yet, and the time spent in training.
struct Pending {
    losses: Vec<(u64, Tensor, u64, (u64, u64))>,
    since: Instant,
    /// The number of samples and the training time of the epoch, without evaluation and checkpoints.
    samples: u64,
    busy: Duration,
}

impl<'a> Trainer<'a> {
    /// A trainer of `model`. `step` must be a training step of this model.
    pub fn new(model: &'a dyn Module, step: TrainStep<'a>, options: TrainerOptions) -> Trainer<'a> {
        Trainer {
            model,
            step,
            options,
            callbacks: vec![],
            evaluate: None,
            checkpoints: None,
            stop: Arc::default(),
            epoch: 0,
            taken: 0,
            loss: MeanLoss::default(),
            metrics: BTreeMap::new(),
            position: Value::Null,
            saved: None,
            stopping: false,
            last: f64::NAN,
        }
    }

    /// Adds a callback. Callbacks are called in the order in which they were added.
    pub fn callback(mut self, callback: impl Callback + 'a) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Sets the evaluation that runs after each epoch, for example the accuracy on data that is not used for
    /// training. `f` returns metrics by name.
    pub fn evaluate(mut self, f: impl FnMut() -> Result<BTreeMap<String, f64>> + 'a) -> Self {
        self.evaluate = Some(Box::new(f));
        self
    }

    /// Sets where checkpoints are written. Without this, the trainer writes none.
    pub fn checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.checkpoints = Some(checkpoints);
        self
    }

    /// A flag that ends the training after the current step, with a checkpoint if
    /// [`Trainer::checkpoints`] is set. The flag may be set from another thread, or by a signal.
    pub fn interrupt(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Uses `flag` as the flag of [`Trainer::interrupt`].
    pub fn interrupted_by(mut self, flag: Arc<AtomicBool>) -> Self {
        self.stop = flag;
        self
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.taken
    }

    /// The training step.
    pub fn step(&self) -> &TrainStep<'a> {
        &self.step
    }

    /// Moves the model and the training step to another backend. Later batches are copied to that backend. An
    /// evaluation must use the backend of the model's parameters.
    ///
    /// # Errors
    /// Those of [`TrainStep::to_device`].
    pub fn to_device(&mut self, backend: &Backend) -> Result<()> {
        self.step.to_device(backend)
    }

    /// Continues from a checkpoint: restores the model, the optimizer, the loss scaler and the position in
    /// the data. The following steps are the same as without the interruption; on the same backend they give
    /// the same bits. Add all callbacks before this call.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`], [`Checkpoint::load`], [`Batches::restore`] and [`Callback::restore`];
    /// `Error::Format` if the trainer's state in the checkpoint is malformed.
    pub fn resume(&mut self, folder: &Path, data: &mut dyn Batches) -> Result<()> {
        let checkpoint = Checkpoint::open(folder)?;
        let m = checkpoint.manifest();
        let malformed = |what: String| Error::Format {
            file: folder.join("checkpoint.json").display().to_string(),
            what: format!("trainer: {what}"),
        };
        let kept = Kept::deserialize(&m.trainer).map_err(|e| malformed(e.to_string()))?;
        let sum: f64 =
            kept.loss_sum.parse().map_err(|_| malformed("the sum of losses is not a number".into()))?;
        if !m.data.is_null() {
            data.restore(&m.data)?;
        }
        checkpoint.load(self.model, &mut self.step)?;
        // If the number of callbacks has changed, no callback state is restored.
        if kept.callbacks.len() == self.callbacks.len() {
            let both = self.callbacks.iter_mut().zip(&kept.callbacks).filter(|(_, s)| !s.is_null());
            both.into_iter().try_for_each(|(c, s)| c.restore(s))?;
        }
        (self.epoch, self.taken) = (m.epoch, m.step);
        self.loss = MeanLoss::restored(sum, kept.samples);
        (self.metrics, self.position) = (m.metrics.clone(), m.data.clone());
        self.last = self.metrics.remove("loss").unwrap_or(f64::NAN);
        Ok(())
    }

    /// Trains until all epochs or steps are complete, a callback stops the training, or the flag of
    /// [`Trainer::interrupt`] is set.
    ///
    /// # Errors
    /// Errors of steps, data, callbacks, the evaluation and checkpoints; with `detect_anomaly`,
    /// `Error::Argument` with the op that made a NaN or an infinity.
    #[track_caller]
    pub fn fit(&mut self, data: &mut dyn Batches) -> Result<Report> {
        let taken = self.taken;
        self.callbacks.iter_mut().try_for_each(|c| c.on_start(taken))?;
        let ended = self.epochs(data);
        // The callbacks also end after an error, so that logs are complete.
        let closed = self.callbacks.iter_mut().map(|c| c.on_end()).collect::<Vec<_>>();
        let stopped = ended?;
        closed.into_iter().collect::<Result<()>>()?;
        Ok(Report {
            epoch: self.epoch,
            step: self.taken,
            loss: self.last,
            metrics: self.metrics.clone(),
            stopped,
            checkpoint: self.saved.clone(),
        })
    }

    #[track_caller]
    fn epochs(&mut self, data: &mut dyn Batches) -> Result<Stopped> {
        self.stopping = false;
        while self.epoch < self.options.epochs {
            if self.options.steps.is_some_and(|most| self.taken >= most) {
                return Ok(Stopped::Done);
            }
            let mut pending =
                Pending { losses: vec![], since: Instant::now(), samples: 0, busy: Duration::ZERO };
            let ended = self.rest_of_epoch(data, &mut pending)?;
            self.last = self.loss.mean();
            if let Some(stopped) = ended {
                return Ok(stopped);
            }
            self.stopping |= self.end_epoch(&pending)?;
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Stopped::Interrupted);
            }
            if self.stopping {
                return Ok(Stopped::Callback);
            }
        }
        Ok(Stopped::Done)
    }

    /// Runs the rest of an epoch. Returns `None` if the epoch is complete, otherwise why the training ends.
    #[track_caller]
    fn rest_of_epoch(&mut self, data: &mut dyn Batches, pending: &mut Pending) -> Result<Option<Stopped>> {
        loop {
            let batch = data.next()?;
            let tensors = batch.arrays.iter().map(|x| Tensor::from_data(self.step.backend(), x));
            let tensors = tensors.collect::<Result<Vec<_>>>()?;
            let refs: Vec<&Tensor> = tensors.iter().collect();
            let loss = match self.options.detect_anomaly {
                true => self.checked(&refs)?,
                false => self.step.run(&refs)?,
            };
            let loss = loss.into_iter().next().ok_or_else(|| Error::internal("a step without a loss"))?;
            self.taken += 1;
            self.position = batch.position;
            let place = (batch.index + 1, batch.batches);
            pending.losses.push((self.taken, loss, batch.samples, place));
            let last = place.0 >= place.1;
            let every = |n: Option<u64>| n.is_some_and(|n| n > 0 && self.taken.is_multiple_of(n));
            let save = every(self.options.checkpoint_every);
            let enough = self.options.steps.is_some_and(|most| self.taken >= most);
            let stop = self.stop.load(Ordering::Relaxed);
            let due = pending.losses.len() as u64 >= self.options.read_every.max(1);
            let flow =
                if due || save || last || enough || stop { self.read(pending)? } else { Flow::Continue };
            if let Flow::MoveTo(b) = &flow {
                self.to_device(b)?;
            }
            if last {
                self.stopping |= matches!(flow, Flow::Stop);
                return Ok(None);
            }
            let stopped = match flow {
                Flow::Stop => Some(Stopped::Callback),
                _ if stop => Some(Stopped::Interrupted),
                _ if enough => Some(Stopped::Done),
                _ => None,
            };
            if save || stopped.is_some() {
                self.save()?;
                pending.since = Instant::now();
            }
            if stopped.is_some() {
                return Ok(stopped);
            }
        }
    }

    /// Reads the losses of the last steps and reports them.
    fn read(&mut self, pending: &mut Pending) -> Result<Flow> {
        let losses = std::mem::take(&mut pending.losses);
        let values = losses.iter().map(|(_, t, _, _)| t.item::<f64>()).collect::<Result<Vec<_>>>()?;
        let time = pending.since.elapsed();
        let samples: u64 = losses.iter().map(|(_, _, n, _)| n).sum();
        pending.samples += samples;
        pending.busy += time;
        let mut flow = Flow::Continue;
        for ((step, _, n, batches), loss) in losses.into_iter().zip(values) {
            self.loss.add(loss, n);
            let report =
                StepReport { step, epoch: self.epoch, loss, samples_per_s: rate(samples, time), batches };
            for c in &mut self.callbacks {
                match c.on_step(&report)? {
                    Flow::Continue => {}
                    // A stop is kept, whatever later callbacks return.
                    other if !matches!(flow, Flow::Stop) => flow = other,
                    _ => {}
                }
            }
        }
        pending.since = Instant::now();
        Ok(flow)
    }

    /// Evaluates, reports and saves. Returns whether a callback stops the training.
    fn end_epoch(&mut self, pending: &Pending) -> Result<bool> {
        if let Some(f) = &mut self.evaluate {
            self.metrics = halcyon_nn::evaluation(f)?;
            if self.metrics.contains_key("loss") {
                let what = "`loss` is the loss of training; give this metric another name";
                return Err(Error::argument("evaluate", what));
            }
        }
        let report = EpochReport {
            epoch: self.epoch,
            step: self.taken,
            loss: self.loss.mean(),
            samples: self.loss.samples(),
            samples_per_s: rate(pending.samples, pending.busy),
            metrics: self.metrics.clone(),
        };
        self.epoch += 1;
        self.loss = MeanLoss::default();
        let mut stop = false;
        for i in 0..self.callbacks.len() {
            match self.callbacks[i].on_epoch(&report)? {
                Flow::Continue => {}
                Flow::Stop => stop = true,
                Flow::MoveTo(b) => self.step.to_device(&b)?,
            }
        }
        self.metrics.insert("loss".into(), report.loss);
        let saved = self.save();
        self.metrics.remove("loss");
        saved.map(|()| stop)
    }

    fn save(&mut self) -> Result<()> {
        let Some(checkpoints) = &self.checkpoints else { return Ok(()) };
        let callbacks = self.callbacks.iter().map(|c| c.state()).collect();
        let loss_sum = format!("{:?}", self.loss.sum());
        let kept = Kept { loss_sum, samples: self.loss.samples(), callbacks };
        let progress = Progress {
            step: self.taken,
            epoch: self.epoch,
            metrics: self.metrics.clone(),
            data: self.position.clone(),
            trainer: serde_json::to_value(&kept).map_err(|e| Error::internal(e.to_string()))?,
        };
        let path = checkpoints.save(self.model, &self.step, &progress)?;
        self.callbacks.iter_mut().try_for_each(|c| c.on_checkpoint(&path))?;
        self.saved = Some(path);
        Ok(())
    }

    /// Runs a step and checks its results. If the step made a NaN or an infinity, restores the old values of
    /// the parameters, buffers and states, and returns an error.
    #[track_caller]
    fn checked(&mut self, batch: &[&Tensor]) -> Result<Vec<Tensor>> {
        let before = self.step.graph(batch)?;
        let counted = (self.step.with_optimizer(|o| o.steps()), self.step.accumulated());
        let results = self.step.run(batch)?;
        let slots = self.model.slots().into_iter().map(|(n, s)| ([n, s.path()], s.value()));
        // With a loss scaler, sums of gradients may overflow. The step then skips the update.
        let scaled = self.step.scale()?.is_some();
        let state = self.step.state().into_iter().filter(|(n, _)| !scaled || !n.starts_with("sum."));
        let state = state.map(|(n, t)| ([n.clone(), n], t));
        let kept: Vec<([String; 2], Tensor)> = slots.chain(state).collect();
        let all = || results.iter().take(1).chain(kept.iter().map(|(_, t)| t));
        if all_finite(all())?
            || (all_finite(results.iter().take(1))? && !any_became_infinite(&before, &kept)?)
        {
            return Ok(results);
        }
        let found = find_anomaly(&before)?;
        self.restore(&before, counted)?;
        let step = self.taken + 1;
        Err(found.unwrap_or_else(|| {
            let device = self.step.backend().id();
            let what = format!(
                "step {step} made a NaN or an infinity on {device}, but the same ops on the host do not; \
                 compare them with Session::verify"
            );
            Error::argument("detect_anomaly", what)
        }))
    }

    /// Restores parameters, buffers and states to their values before a step. Before the step, the optimizer
    /// had taken `steps` steps and `done` batches were accumulated.
    fn restore(&mut self, before: &StepGraph, (steps, done): (u64, u64)) -> Result<()> {
        let names: BTreeMap<String, Tensor> = self.step.state().into_iter().collect();
        let (mut state, rest): (Vec<_>, Vec<_>) =
            before.inputs.iter().cloned().partition(|(n, _)| names.contains_key(n));
        let slots = self.model.slots();
        for (name, value) in rest {
            if let Some((_, slot)) = slots.iter().find(|(n, s)| *n == name || s.path() == name) {
                slot.set(value)?;
            }
        }
        if names.contains_key("accumulated") {
            state.push(("accumulated".into(), Tensor::scalar(self.step.backend(), done as i64, DType::I32)));
        }
        self.step.load_state(state)?;
        self.step.with_optimizer(|o| o.set_steps(steps));
        Ok(())
    }
}

fn rate(samples: u64, time: Duration) -> f64 {
    samples as f64 / time.as_secs_f64().max(1e-9)
}

/// Whether all elements of all float tensors are finite, computed on the device.
fn all_finite<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<bool> {
    let mut sum: Option<Tensor> = None;
    for t in tensors {
        if t.dtype()?.is_float() {
            // Zero times an infinity or NaN is NaN, and a sum with NaN is NaN.
            let zero = (t.cast(DType::F32) * 0.0).sum(..);
            sum = Some(sum.map_or_else(|| zero.clone(), |s| s + &zero));
        }
    }
    sum.map_or(Ok(true), |s| Ok(!s.item::<f64>()?.is_nan()))
}

/// Whether an element of a parameter, buffer or state became NaN or infinite in a step. An element that was
/// infinite before, as in masks, counts only if it is NaN now. An element that was NaN before does not count.
/// `kept` holds the new values, each with the names under which [`StepGraph::inputs`] may list the old value.
fn any_became_infinite(before: &StepGraph, kept: &[([String; 2], Tensor)]) -> Result<bool> {
    for (names, new) in kept {
        if all_finite([new])? {
            continue;
        }
        let old = before.inputs.iter().find(|(n, _)| names.contains(n));
        let old = old.map(|(_, t)| t.to_vec::<f64>()).transpose()?;
        let became = |(i, v): (usize, f64)| match old.as_ref().and_then(|o| o.get(i)) {
            Some(was) => (!v.is_finite() && was.is_finite()) || (v.is_nan() && !was.is_nan()),
            None => !v.is_finite(),
        };
        if new.to_vec::<f64>()?.into_iter().enumerate().any(became) {
            return Ok(true);
        }
    }
    Ok(false)
}

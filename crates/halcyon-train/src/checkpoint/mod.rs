//! Checkpoints. Each checkpoint is a folder with the weights, the optimizer's state and `checkpoint.json`.
//!
//! A checkpoint is first written to a hidden folder in the same parent folder. Every file is flushed to the
//! disk, and then the folder is renamed. So a checkpoint with a visible name is always complete, even if the
//! process is killed. If the disk is full, the older checkpoints are unchanged.

mod load;
mod manifest;
mod tensors;

pub use load::Checkpoint;
pub use manifest::{FileRecord, GroupRecord, Manifest, OptimizerRecord, ScalerRecord, VERSION};

use halcyon::Tensor;
use halcyon::ir::error::{Error, Result};
use halcyon_nn::{Module, ModuleExt, TrainStep};
use manifest::{FORMAT, NAME};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Which value of a metric is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The largest value, for example of an accuracy.
    Largest,
    /// The smallest value, for example of a loss.
    Smallest,
}

impl Goal {
    /// Whether `a` is better than `b`. A NaN is never better, and every other value is better than a NaN.
    pub fn better(self, a: f64, b: f64) -> bool {
        match self {
            Goal::Largest => a > b || (b.is_nan() && !a.is_nan()),
            Goal::Smallest => a < b || (b.is_nan() && !a.is_nan()),
        }
    }
}

/// Which checkpoints are kept, and how large their files are.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointOptions {
    /// The number of newest checkpoints to keep; 0 keeps all. If a step is saved again, only its newest
    /// checkpoint is kept. Default: 3.
    pub keep: usize,
    /// The metric by which the best checkpoint is kept, in addition to the newest checkpoints. Default: none.
    pub best: Option<(String, Goal)>,
    /// Tensors are divided into files of at most this number of bytes. A larger tensor has its own file.
    /// Default: 2 GiB.
    pub shard_bytes: u64,
}

impl Default for CheckpointOptions {
    fn default() -> CheckpointOptions {
        CheckpointOptions { keep: 3, best: None, shard_bytes: 2 << 30 }
    }
}

/// The facts about a run that a checkpoint stores in addition to the model and the training step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    pub step: u64,
    /// Number of epochs completed.
    pub epoch: u64,
    pub metrics: BTreeMap<String, f64>,
    /// The position in the data; see [`Manifest::data`].
    pub data: Value,
    /// The trainer's own state.
    pub trainer: Value,
}

/// A folder of checkpoints.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Adam, Linear, Optimizer, TrainStep};
/// use halcyon_train::{Checkpoint, CheckpointOptions, Checkpoints, Progress};
/// # fn main() -> halcyon::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let folder = dir.path().join("run");
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 3, 1)?;
/// let optimizer = Optimizer::new(&layer, Adam::new())?;
/// let mut step = TrainStep::new(&layer, optimizer, |m: &&Linear, x: &[Tensor]| {
///     Ok(vec![m.forward(&x[0]).sqr().mean(..)])
/// })?;
/// let checkpoints = Checkpoints::new(&folder, CheckpointOptions::default());
/// step.run(&[&Tensor::ones(&b, [2, 3], DType::F32)])?;
/// let path = checkpoints.save(&layer, &step, &Progress { step: 1, ..Progress::default() })?;
/// assert!(path.ends_with("step-000001"));
///
/// let latest = checkpoints.latest()?.expect("there is one");
/// Checkpoint::open(&latest)?.load(&layer, &mut step)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    options: CheckpointOptions,
}

/// The position of a checkpoint in the order of checkpoints: its step, and the number in its name that tells
/// checkpoints of one step apart, counted from 0.
type Order = (u64, u64);

fn io_error(path: &Path, e: &io::Error) -> Error {
    Error::Io { path: path.display().to_string(), what: e.to_string() }
}

impl Checkpoints {
    /// The checkpoints below `folder`, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>, options: CheckpointOptions) -> Checkpoints {
        Checkpoints { folder: folder.into(), options }
    }

    /// The folder that holds the checkpoints.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folders of complete checkpoints, oldest first.
    ///
    /// # Errors
    /// `Error::Io` if the folder exists and cannot be read.
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        Ok(self.ordered()?.into_iter().map(|(_, path)| path).collect())
    }

    /// The newest checkpoint; `None` if there is none.
    ///
    /// # Errors
    /// Those of [`Checkpoints::list`].
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.list()?.pop())
    }

    /// The best checkpoint by the metric of the options. If several are equal, the oldest of them. `None` if
    /// no checkpoint has the metric, or the options name no metric.
    ///
    /// # Errors
    /// Those of [`Checkpoints::list`] and [`Checkpoint::open`].
    pub fn best(&self) -> Result<Option<PathBuf>> {
        let Some((metric, goal)) = &self.options.best else { return Ok(None) };
        let mut best: Option<(f64, PathBuf)> = None;
        for path in self.list()? {
            let value = Checkpoint::open(&path)?.manifest().metrics.get(metric).copied();
            let better = |v: &f64| best.as_ref().is_none_or(|(b, _)| goal.better(*v, *b));
            if let Some(v) = value.filter(better) {
                best = Some((v, path));
            }
        }
        Ok(best.map(|(_, path)| path))
    }

    fn ordered(&self) -> Result<Vec<(Order, PathBuf)>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            e => e.map_err(|e| io_error(&self.folder, &e))?,
        };
        let mut found = vec![];
        for e in entries {
            let e = e.map_err(|e| io_error(&self.folder, &e))?;
            if let Some(order) = e.file_name().to_str().and_then(order_of).filter(|_| e.path().is_dir()) {
                found.push((order, e.path()));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Writes a checkpoint, then removes the checkpoints that the options do not keep. Returns the folder of
    /// the new checkpoint.
    ///
    /// # Errors
    /// `Error::Io`, for example for a full disk; errors of the device. After an error the older checkpoints
    /// are unchanged.
    pub fn save(&self, model: &dyn Module, step: &TrainStep<'_>, progress: &Progress) -> Result<PathBuf> {
        fs::create_dir_all(&self.folder).map_err(|e| io_error(&self.folder, &e))?;
        let part = Part::create(&self.folder)?;
        let (mut tensors, mut dtypes) = (vec![], BTreeMap::new());
        let mut slots = vec![];
        model.each_slot(|path, slot| {
            if slot.is_saved() {
                slots.push((path.to_string(), slot.value()));
            }
        });
        for (name, t) in slots {
            *dtypes.entry(t.dtype()?.to_string()).or_insert(0) += 1;
            tensors.push((name, t));
        }
        let limit = self.options.shard_bytes.max(1);
        let mut files = tensors::write(&part.0, "model", &tensors, limit)?;
        drop(tensors);
        files.extend(tensors::write(&part.0, "optimizer", &step.state(), limit)?);
        let manifest = manifest_of(step, progress, dtypes, files.into_iter().collect())?;
        let text = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::internal(e.to_string()))?;
        halcyon_host::output::write(&part.0.join(NAME), &text)?;
        sync_folder(&part.0)?;
        // The name sorts after those of older checkpoints of the step, of which some may be gone.
        let same_step = |((step, times), _): (Order, PathBuf)| (step == progress.step).then_some(times + 1);
        let first = self.ordered()?.into_iter().filter_map(same_step).max().unwrap_or(0);
        let path = part.publish(&self.folder, (progress.step, first))?;
        sync_folder(&self.folder)?;
        if let Err(e) = self.prune(&path) {
            // The new checkpoint is complete, so training continues.
            tracing::warn!(folder = %self.folder.display(), error = %e, "old checkpoints were not removed");
        }
        Ok(path)
    }

    /// Removes the checkpoints that the options do not keep, and the hidden folders of killed processes.
    /// `new` is always kept, because its step is not the largest if the training was resumed from an older
    /// checkpoint.
    fn prune(&self, new: &Path) -> Result<()> {
        let all = self.ordered()?;
        let newest_of_step = |i: usize| all.get(i + 1).is_none_or(|(next, _)| next.0 != all[i].0.0);
        let first_kept = match self.options.keep {
            0 => 0,
            n => {
                let steps: Vec<usize> = (0..all.len()).filter(|i| newest_of_step(*i)).collect();
                steps.len().checked_sub(n).map_or(0, |k| steps[k])
            }
        };
        let best = if first_kept > 0 { self.best()? } else { None };
        for (i, (_, path)) in all.iter().enumerate() {
            let kept = i >= first_kept || path == new || best.as_ref() == Some(path);
            if !kept || !newest_of_step(i) {
                // The folder is renamed before it is removed, so that a checkpoint with a visible name always
                // has all its files.
                let gone = Part::name(&self.folder);
                fs::rename(path, &gone).map_err(|e| io_error(path, &e))?;
                fs::remove_dir_all(&gone).map_err(|e| io_error(&gone, &e))?;
            }
        }
        self.sweep();
        Ok(())
    }

    /// Removes hidden folders that have not changed for an hour.
    fn sweep(&self) {
        const AGE: Duration = Duration::from_secs(3600);
        let old = |e: &fs::DirEntry| -> bool {
            let changed = e.metadata().and_then(|m| m.modified()).ok();
            changed.and_then(|t| SystemTime::now().duration_since(t).ok()).is_some_and(|age| age > AGE)
        };
        let left = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let left = left.filter(|e| e.file_name().to_string_lossy().starts_with(HIDDEN));
        for e in left.filter(old) {
            if let Err(error) = fs::remove_dir_all(e.path()) {
                tracing::warn!(folder = %e.path().display(), %error, "a folder was not removed");
            }
        }
    }
}

fn manifest_of(
    step: &TrainStep<'_>,
    progress: &Progress,
    dtypes: BTreeMap<String, usize>,
    files: BTreeMap<String, FileRecord>,
) -> Result<Manifest> {
    let optimizer = step.with_optimizer(|o| {
        let group = |(rule, rate, weight_decay, schedule): (&str, f64, f64, &halcyon_nn::Schedule)| {
            GroupRecord { rule: rule.into(), rate, weight_decay, schedule: schedule.clone() }
        };
        OptimizerRecord { steps: o.steps(), groups: o.groups().map(group).collect() }
    });
    let mut metrics = progress.metrics.clone();
    metrics.retain(|_, v| v.is_finite());
    Ok(Manifest {
        format: FORMAT.into(),
        version: VERSION,
        halcyon: env!("CARGO_PKG_VERSION").into(),
        backend: step.backend().id().into(),
        step: progress.step,
        epoch: progress.epoch,
        seed: step.current_seed(),
        metrics,
        optimizer,
        scaler: step.scale()?.map(|(scale, skipped)| ScalerRecord { scale, skipped }),
        dtypes,
        data: progress.data.clone(),
        trainer: progress.trainer.clone(),
        files,
    })
}

/// `step-000123`, and `step-000123-2` if that step was saved before.
fn name_of((step, times): Order) -> String {
    match times {
        0 => format!("step-{step:06}"),
        n => format!("step-{step:06}-{}", n + 1),
    }
}

fn order_of(name: &str) -> Option<Order> {
    let rest = name.strip_prefix("step-")?;
    let (step, times) = match rest.split_once('-') {
        None => (rest.parse().ok()?, 0),
        Some((step, n)) => (step.parse().ok()?, n.parse::<u64>().ok()?.checked_sub(1)?),
    };
    // A name with another spelling of the numbers is not the name of a checkpoint.
    (name_of((step, times)) == name).then_some((step, times))
}

fn sync_folder(path: &Path) -> Result<()> {
    // Folders cannot be opened as files on Windows.
    #[cfg(unix)]
    fs::File::open(path).and_then(|f| f.sync_all()).map_err(|e| io_error(path, &e))?;
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

/// The names of folders that are being written or removed begin with this.
const HIDDEN: &str = ".halcyon-checkpoint-";

/// A folder that is being written. Dropping this value removes the folder.
#[derive(Debug)]
struct Part(PathBuf);

impl Part {
    /// A new name.
    fn name(folder: &Path) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        folder.join(format!("{HIDDEN}{}-{n}", std::process::id()))
    }

    fn create(folder: &Path) -> Result<Part> {
        loop {
            let path = Part::name(folder);
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Part(path)),
                // An earlier process with the same process id left this folder.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(io_error(&path, &e)),
            }
        }
    }

    /// Gives the folder its visible name: the first free one of the step, from `first` on. An older
    /// checkpoint of the same step is removed only after this checkpoint has its name.
    fn publish(self, folder: &Path, (step, first): Order) -> Result<PathBuf> {
        for times in first.. {
            let path = folder.join(name_of((step, times)));
            if path.symlink_metadata().is_ok() {
                continue;
            }
            fs::rename(&self.0, &path).map_err(|e| io_error(&path, &e))?;
            return Ok(path);
        }
        Err(Error::internal("every name of a checkpoint is taken"))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After `publish` there is no folder to remove.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor with the data `data`, converted to the dtype of `old`, on the device of `old`.
fn like(name: &str, data: &halcyon::ConstData, old: &Tensor) -> Result<Tensor> {
    let want = old.dims()?;
    if data.dims[..] != want[..] {
        let what =
            format!("the file's tensor is {:?}, but the run's is {:?}", &data.dims[..], want.as_slice());
        return Err(Error::shape(format!("load `{name}`"), what));
    }
    Ok(Tensor::from_data(old.backend(), data)?.cast(old.dtype()?))
}

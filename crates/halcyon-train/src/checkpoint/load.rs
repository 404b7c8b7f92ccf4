//! Reading a checkpoint.

use super::like;
use super::manifest::Manifest;
use super::tensors::{Tensors, record};
use halcyon::ir::error::{Error, Result};
use halcyon::{ConstData, DType, Tensor};
use halcyon_nn::{LoadWeights, Module, ModuleExt, SlotId, SlotKind, Strictness, TrainStep, Unmatched};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// An opened checkpoint: its `checkpoint.json` was read.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens the checkpoint of a folder.
    ///
    /// # Errors
    /// `Error::Io`; `Error::Format` for a malformed `checkpoint.json`; `Error::Unsupported` for a newer
    /// version of the format.
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        Ok(Checkpoint { folder: folder.into(), manifest: Manifest::read(folder)? })
    }

    /// The content of `checkpoint.json`.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder of the checkpoint.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Compares the sizes and checksums of all files with those in `checkpoint.json`.
    ///
    /// # Errors
    /// `Error::Io`; `Error::Format` for a file that differs.
    pub fn verify(&self) -> Result<()> {
        for (name, want) in &self.manifest.files {
            let path = self.folder.join(name);
            let have = record(&path)?;
            if have != *want {
                let what = format!(
                    "it is damaged: {} bytes with the checksum {:08x}, but checkpoint.json says {} bytes \
                     with {:08x}",
                    have.bytes, have.crc32, want.bytes, want.crc32
                );
                return Err(Error::Format { file: path.display().to_string(), what });
            }
        }
        Ok(())
    }

    fn tensors(&self, stem: &str) -> Result<Tensors> {
        let prefix = |n: &String| n.starts_with(stem);
        if !self.manifest.files.keys().any(prefix) {
            let what = format!("checkpoint.json lists no file of the {stem}");
            return Err(Error::Format { file: self.folder.display().to_string(), what });
        }
        Tensors::open(&self.folder, stem)
    }

    /// Replaces only the model's parameters and buffers. Values are converted to the model's dtypes and
    /// copied to its device. If there is an error, nothing is replaced.
    ///
    /// # Errors
    /// Those of [`Checkpoint::verify`] and [`LoadWeights::load_state_dict`].
    pub fn load_model(&self, model: &dyn Module, strictness: Strictness) -> Result<Unmatched> {
        self.verify()?;
        let tensors = self.tensors("model")?;
        let names: Vec<String> = tensors.names().map(str::to_string).collect();
        model.load_state_dict(&|n| tensors.get(n), &names, strictness)
    }

    /// Replaces the model's parameters and buffers, and the step's state ([`TrainStep::state`]), number of
    /// steps and seed. Values are copied to the device of the run, and converted if the dtypes differ. If the
    /// dtypes are equal, every bit is kept. If there is an error, nothing is replaced.
    ///
    /// A run in f32 that loads a checkpoint of a run in f16 or bf16 takes the f32 copies of the parameters
    /// from the optimizer's state. A run without a loss scaler ignores the scaler's state.
    ///
    /// # Errors
    /// `Error::Argument` for a tensor that is missing or has no counterpart, and for another optimizer;
    /// `Error::Shape` for a tensor of another shape, with its name; `Error::Format` for damaged files; errors
    /// of the device.
    pub fn load(&self, model: &dyn Module, step: &mut TrainStep<'_>) -> Result<()> {
        self.verify()?;
        self.same_optimizer(step)?;
        let (weights, state) = (self.tensors("model")?, self.tensors("optimizer")?);
        let (new, used) = optimizer_state(step, &weights, &state)?;
        let masters = masters(model, &state)?;
        let extra = |n: &&str| !used.contains(*n) && !masters.contains_key(*n) && !n.starts_with("scaler.");
        let extra: Vec<&str> = state.names().filter(extra).collect();
        if !extra.is_empty() {
            let unexpected = extra.iter().map(|n| (*n).to_string()).collect();
            let unmatched = Unmatched { missing: vec![], unexpected };
            let what = format!("the optimizer's state in the checkpoint differs from the run's: {unmatched}");
            return Err(Error::argument("load", what));
        }
        let names: Vec<String> = weights.names().map(str::to_string).collect();
        let get = |n: &str| match masters.get(&format!("{n}.master")) {
            Some(data) => Some(Ok(data.clone())),
            None => weights.get(n),
        };
        halcyon::eval(&new.iter().map(|(_, t)| t.clone()).collect::<Vec<_>>())?;
        let old = step.state();
        step.load_state(new)?;
        if let Err(e) = model.load_state_dict(&get, &names, Strictness::Strict) {
            step.load_state(old)?;
            return Err(e);
        }
        let skipped = match (&self.manifest.scaler, step.scale()?) {
            // Without a scaler, the optimizer's number of steps must not include skipped steps.
            (Some(s), None) => s.skipped,
            _ => 0,
        };
        step.with_optimizer(|o| o.set_steps(self.manifest.optimizer.steps.saturating_sub(skipped)));
        step.set_seed(self.manifest.seed);
        Ok(())
    }

    fn same_optimizer(&self, step: &TrainStep<'_>) -> Result<()> {
        let have: Vec<String> = step.with_optimizer(|o| o.groups().map(|g| g.0.to_string()).collect());
        let want: Vec<&str> = self.manifest.optimizer.groups.iter().map(|g| g.rule.as_str()).collect();
        match have == want {
            true => Ok(()),
            false => {
                let (want, have) = (want.join(", "), have.join(", "));
                let what = format!("the checkpoint's optimizer is {want}, but the run's optimizer is {have}");
                Err(Error::argument("load", what))
            }
        }
    }
}

/// The new tensors for [`TrainStep::load_state`], and the names of all tensors of the step's state.
fn optimizer_state(
    step: &TrainStep<'_>,
    weights: &Tensors,
    state: &Tensors,
) -> Result<(Vec<(String, Tensor)>, HashSet<String>)> {
    let (mut new, mut used, mut missing) = (vec![], HashSet::new(), vec![]);
    for (name, old) in step.state() {
        // A checkpoint of a run in f32 has no f32 copies, because its parameters are in f32.
        let data = state.get(&name).or_else(|| weights.get(name.strip_suffix(".master")?));
        match data {
            Some(data) => new.push((name.clone(), like(&name, &data?, &old)?)),
            // A checkpoint of a run without a loss scaler has no scaler state. The scaler then keeps its own
            // state.
            None if name.starts_with("scaler.") => {}
            None => missing.push(name.clone()),
        }
        used.insert(name);
    }
    match missing.is_empty() {
        true => Ok((new, used)),
        false => {
            let unmatched = Unmatched { missing, unexpected: vec![] };
            Err(Error::argument("load", format!("the optimizer's state: {unmatched}")))
        }
    }
}

/// The f32 copies of parameters in the file, by name, for parameters that the run has in f32 or f64. The file
/// has one copy of a parameter that several fields share; each of its names gets it, because the weights are
/// read under each name.
fn masters(model: &dyn Module, state: &Tensors) -> Result<HashMap<String, ConstData>> {
    let (mut names, mut order) = (HashMap::<SlotId, Vec<String>>::new(), vec![]);
    model.each_slot(|path, slot| {
        let own = names.entry(slot.id()).or_default();
        if own.is_empty() {
            order.push(slot.clone());
        }
        own.push(format!("{path}.master"));
    });
    let mut out = HashMap::new();
    for slot in order {
        if slot.kind() != SlotKind::Param || !matches!(slot.value().dtype()?, DType::F32 | DType::F64) {
            continue;
        }
        let names = names.remove(&slot.id()).unwrap_or_default();
        if let Some(data) = names.iter().find_map(|n| state.get(n)) {
            let data = data?;
            out.extend(names.into_iter().map(|n| (n, data.clone())));
        }
    }
    Ok(out)
}

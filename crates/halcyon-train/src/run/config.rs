//! The configuration file.

use super::settings;
use crate::checkpoint::Goal;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon_nn::{
    AdaGrad, Adafactor, Adam, Clip, Lion, Module, Optimizer, OptimizerBuilder, RmsProp, Schedule, Sgd,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue, Deserializer};
use toml::{Spanned, Table, Value};

/// The configuration of a training, which `halcyon train` reads from a TOML file.
///
/// Paths in the file are relative to the folder of the file. Exceptions are `output`, `export` and all paths
/// that are given with `--set`: these are relative to the current folder.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub model: ModelConfig,
    /// The `path` of [`Config::train`] and [`Config::test`], if these have no `path`.
    #[serde(default)]
    pub data: Option<PathBuf>,
    /// The training data: a [`halcyon_data::DataSpec`], or `kind = "mnist"` for a folder with MNIST's files.
    pub train: Table,
    /// The data to evaluate on after each epoch.
    #[serde(default)]
    pub test: Option<Table>,
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Default: 10.
    #[serde(default = "epochs")]
    pub epochs: u64,
    /// Number of steps. If given, it replaces `epochs`.
    #[serde(default)]
    pub steps: Option<u64>,
    /// Number of samples per batch. A smaller last batch of an epoch is left out. Default: 64.
    #[serde(default = "batch")]
    pub batch: usize,
    /// The seed of initial values, order and dropout. Default: 1.
    #[serde(default = "seed")]
    pub seed: u64,
    /// Type of the parameters. f16 trains with loss scaling. Default: f32.
    #[serde(default)]
    pub dtype: DTypeName,
    /// Number of threads that prepare batches. With 0, the trainer prepares each batch when the batch is
    /// needed. Default: 1.
    #[serde(default = "workers")]
    pub workers: usize,
    /// The run's folder. Default: `runs/NAME`, where NAME is the name of the configuration file without its
    /// extension.
    #[serde(default)]
    pub output: PathBuf,
    /// The number of steps after which losses are read from the device. Default: 10.
    #[serde(default = "read_every")]
    pub read_every: u64,
    /// If set, a checkpoint is also written after every `checkpoint_every` steps, in addition to the
    /// checkpoint after each epoch.
    #[serde(default)]
    pub checkpoint_every: Option<u64>,
    /// Number of newest checkpoints that are kept; 0 keeps all. Default: 3.
    #[serde(default = "keep")]
    pub keep: usize,
    /// Also keeps the checkpoint with the best value of this metric.
    #[serde(default)]
    pub best: Option<Watch>,
    /// Ends the training when a metric no longer improves.
    #[serde(default)]
    pub early_stopping: Option<Watch>,
    /// Whether TensorBoard's files are written.
    #[serde(default)]
    pub tensorboard: bool,
    /// Whether the training ends with an error if a step makes a NaN or an infinity. The error names the op
    /// that made the value. With this check, steps take longer.
    #[serde(default)]
    pub detect_anomaly: bool,
    /// If set, the trained model is written to this file as ONNX.
    #[serde(default)]
    pub export: Option<PathBuf>,
}

fn epochs() -> u64 {
    10
}
fn batch() -> usize {
    64
}
fn seed() -> u64 {
    1
}
fn workers() -> usize {
    1
}
fn read_every() -> u64 {
    10
}
fn keep() -> usize {
    3
}

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum ModelConfig {
    /// Fully connected layers with ReLU between them.
    Mlp {
        /// Sizes of the hidden layers.
        hidden: Vec<usize>,
        #[serde(default)]
        dropout: f64,
    },
    /// For each number of channels: a 3×3 convolution, batch normalisation, ReLU and 2×2 max pooling. At the
    /// end, a fully connected layer.
    Cnn {
        channels: Vec<usize>,
        #[serde(default)]
        dropout: f64,
    },
    /// A character model with the structure of GPT-2 (Radford et al. 2019): embeddings of characters and
    /// positions, then blocks. A block has causal attention and fully connected layers, each after a layer
    /// normalisation. The last layer uses the weights of the character embedding.
    Chars {
        layers: usize,
        /// Elements of an embedding.
        size: usize,
        heads: usize,
        #[serde(default)]
        dropout: f64,
    },
}

/// Type of parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    #[default]
    F32,
    BF16,
    F16,
}

impl DTypeName {
    pub(crate) fn dtype(self) -> DType {
        match self {
            DTypeName::F32 => DType::F32,
            DTypeName::BF16 => DType::BF16,
            DTypeName::F16 => DType::F16,
        }
    }
}

/// A metric that is watched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    /// `loss`, `test_loss`, `accuracy` or `perplexity`.
    pub metric: String,
    pub goal: GoalName,
    /// For early stopping: the number of epochs without an improvement after which the training ends.
    /// Default: 5.
    #[serde(default = "patience")]
    pub patience: u64,
    /// For early stopping: only a change of more than this counts as an improvement. Default: 0.
    #[serde(default)]
    pub least: f64,
}

fn patience() -> u64 {
    5
}

/// Which value is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GoalName {
    Largest,
    Smallest,
}

impl From<GoalName> for Goal {
    fn from(g: GoalName) -> Goal {
        match g {
            GoalName::Largest => Goal::Largest,
            GoalName::Smallest => Goal::Smallest,
        }
    }
}

/// The optimizer. A setting that is not given has the default of the update rule.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    #[serde(default)]
    pub kind: OptimizerKind,
    #[serde(default)]
    pub rate: Option<f64>,
    #[serde(default)]
    pub weight_decay: Option<f64>,
    /// The momentum. Only for `sgd` and `rmsprop`.
    #[serde(default)]
    pub momentum: Option<f64>,
    /// Clips the norm of all gradients together to this number.
    #[serde(default)]
    pub clip_norm: Option<f64>,
    /// A [`Schedule`]. In a `one_cycle`, `cosine` or `linear` schedule, the default of `steps` is the number
    /// of steps of the training. In a `one_cycle` schedule, the default of `most` is `rate`, if `rate` is
    /// given.
    #[serde(default)]
    pub schedule: Option<Table>,
}

/// An update rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    Sgd,
    Adam,
    #[default]
    AdamW,
    AdaGrad,
    RmsProp,
    Adafactor,
    Lion,
}

impl OptimizerConfig {
    /// The optimizer of a model for a training of `steps` steps.
    ///
    /// # Errors
    /// `Error::Argument` for a setting that is out of range, or for a momentum if the rule has no momentum.
    pub(crate) fn build<M: Module>(&self, model: &M, steps: u64) -> Result<Optimizer> {
        let mut b = self.rule()?;
        if let Some(c) = self.clip_norm {
            b = b.clip(Clip::Norm(c));
        }
        if let Some(s) = self.schedule(steps)? {
            b = b.schedule(s);
        }
        b.build(model)
    }

    fn rule(&self) -> Result<OptimizerBuilder> {
        let (rate, decay) = (self.rate, self.weight_decay);
        if self.momentum.is_some() && !matches!(self.kind, OptimizerKind::Sgd | OptimizerKind::RmsProp) {
            let what = format!("momentum is for sgd and rmsprop, not for {:?}", self.kind).to_lowercase();
            return Err(Error::argument("optimizer", what));
        }
        let momentum = self.momentum.unwrap_or(0.0);
        macro_rules! rule {
            ($r:expr) => {{
                let mut r = $r;
                r.rate = rate.unwrap_or(r.rate);
                r.weight_decay = decay.unwrap_or(r.weight_decay);
                Optimizer::builder(r)
            }};
        }
        Ok(match self.kind {
            OptimizerKind::Sgd => rule!(Sgd { momentum, ..Sgd::default() }),
            OptimizerKind::Adam => rule!(Adam::new()),
            OptimizerKind::AdamW => rule!(Adam::w()),
            OptimizerKind::AdaGrad => rule!(AdaGrad::default()),
            OptimizerKind::RmsProp => rule!(RmsProp { momentum, ..RmsProp::default() }),
            OptimizerKind::Adafactor => rule!(Adafactor::default()),
            OptimizerKind::Lion => rule!(Lion::default()),
        })
    }

    fn schedule(&self, steps: u64) -> Result<Option<Schedule>> {
        let Some(mut table) = self.schedule.clone() else { return Ok(None) };
        let kind = table.get("kind").and_then(Value::as_str).unwrap_or_default().to_string();
        if matches!(kind.as_str(), "one_cycle" | "cosine" | "linear") && !table.contains_key("steps") {
            table.insert("steps".into(), Value::Integer(i64::try_from(steps).unwrap_or(i64::MAX)));
        }
        if let (true, Some(rate)) = (kind == "one_cycle" && !table.contains_key("most"), self.rate) {
            table.insert("most".into(), Value::Float(rate));
        }
        let schedule = table.try_into().map_err(|e: toml::de::Error| {
            Error::argument("optimizer", format!("schedule: {}", e.message()))
        })?;
        Ok(Some(schedule))
    }
}

impl Config {
    /// Reads a file and then applies settings of the form `key=value`. `key` may have dots, as in
    /// `optimizer.rate=0.1`. `value` is TOML; text needs no quotes.
    ///
    /// # Errors
    /// `Error::Io`; `Error::Format` for a file that is not TOML or has unknown keys or wrong types, with the
    /// line; `Error::Argument` for a setting that is not `key=value` or has a wrong key or value, with the
    /// setting; `Error::Argument` for a batch of 0 samples or a training of 0 steps.
    pub fn read(path: &Path, settings: &[String]) -> Result<Config> {
        let text = halcyon_host::input::text(path)?;
        let malformed =
            |e: toml::de::Error| Error::Format { file: path.display().to_string(), what: located(&e, &text) };
        let settings = settings::parse(settings, text.len() + 1)?;
        let mut table = DeTable::parse(&text).map_err(malformed)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        for key in
            [&["data"][..], &["train", "path"], &["train", "labels"], &["test", "path"], &["test", "labels"]]
        {
            if let Some(DeValue::String(p)) = at(table.get_mut(), key) {
                *p = folder.join(&**p).display().to_string().into();
            }
        }
        let typed = |t: &Spanned<DeTable<'_>>| Config::deserialize(Deserializer::from(t.clone()));
        let (mut read, mut last) = (typed(&table), None);
        for s in &settings {
            s.apply(table.get_mut())?;
            let next = typed(&table);
            // `last` is the last setting that turned a valid configuration into an invalid one.
            if next.is_ok() || read.is_ok() {
                last = next.is_err().then_some(s);
            }
            read = next;
        }
        let mut config = read.map_err(|e| {
            let named = e.span().and_then(|span| settings.iter().find(|s| s.has(&span)));
            match named.or(last) {
                Some(s) => Error::argument("--set", format!("`{}`: {}", s.text(), e.message())),
                None => malformed(e),
            }
        })?;
        if config.output.as_os_str().is_empty() {
            config.output = Path::new("runs").join(path.file_stem().unwrap_or_default());
        }
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::argument("train", what));
        match (self.batch, self.epochs, self.steps) {
            (0, _, _) => bad("`batch` is 0; a batch has at least 1 sample"),
            (_, 0, None) | (_, _, Some(0)) => bad("the training has 0 steps; it needs at least 1"),
            _ => Ok(()),
        }
    }
}

/// The message of a TOML error with its line.
fn located(e: &toml::de::Error, text: &str) -> String {
    match e.span() {
        Some(span) => {
            let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
            format!("line {line}: {}", e.message())
        }
        None => e.message().to_string(),
    }
}

fn at<'t, 'i>(table: &'t mut DeTable<'i>, path: &[&str]) -> Option<&'t mut DeValue<'i>> {
    let (key, rest) = path.split_first()?;
    match (table.get_mut(*key)?.get_mut(), rest) {
        (value, []) => Some(value),
        (DeValue::Table(t), rest) => at(t, rest),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MLP: &str =
        "epochs = 2\n[model]\nkind = \"mlp\"\nhidden = [8]\n[train]\nkind = \"npz\"\npath = \"a.npz\"\n";

    fn read(text: &str, settings: &[&str]) -> Result<Config> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small.toml");
        std::fs::write(&path, text).unwrap();
        let settings: Vec<String> = settings.iter().map(|s| (*s).to_string()).collect();
        let c = Config::read(&path, &settings);
        if let Ok(c) = &c {
            let own = c.train.get("path").and_then(Value::as_str).unwrap_or_default();
            assert!(own == "b.npz" || Path::new(own) == dir.path().join("a.npz"), "{own}");
        }
        c
    }

    #[test]
    fn settings_replace_keys_of_the_file() {
        let c =
            read(MLP, &["optimizer.rate=0.5", "epochs=7", "train.path=b.npz", "optimizer.kind=sgd"]).unwrap();
        assert_eq!((c.epochs, c.optimizer.rate, c.optimizer.kind), (7, Some(0.5), OptimizerKind::Sgd));
        assert_eq!((c.batch, c.output.as_path()), (64, Path::new("runs/small")));
        for (setting, part) in [
            ("epochs", "key=value"),
            ("=3", "key=value"),
            ("epochs=many", "invalid type"),
            ("epochs.x=1", "not a table"),
            ("epoch=3", "epoch"),
            ("batch=0", "at least 1 sample"),
            ("optimizer.kind=adan", "adan"),
        ] {
            let e = read(MLP, &[setting]).unwrap_err().to_string();
            assert!(e.contains(part), "{setting}: {e}");
        }
    }

    #[test]
    fn errors_of_a_file_name_the_line() {
        for (text, line, part) in [
            (format!("{MLP}shuffle = true\n[other]\n"), 9, "other"),
            (MLP.replace("epochs = 2", "epochs = \"two\""), 1, "invalid type"),
            (MLP.replace("mlp", "mpl"), 3, "mpl"),
            (MLP.replace("epochs = 2", "epochs = "), 1, ""),
        ] {
            let e = read(&text, &[]).unwrap_err().to_string();
            let want = format!("line {line}");
            assert!(e.contains(&want) && e.contains(part) && e.contains("small.toml"), "{e}");
        }
    }

    /// An error in the file names its line, also if there are settings. An error in a setting names the
    /// setting.
    #[test]
    fn errors_name_the_line_or_the_setting() {
        for (text, settings, line, part) in [
            (format!("{MLP}shuffle = true\n[other]\n"), &["epochs=3"][..], 9, "other"),
            (MLP.replace("epochs = 2", "epochs = \"two\""), &["batch=8"], 1, "invalid type"),
            (MLP.replace("mlp", "mpl"), &["epochs=3", "optimizer.rate=0.1"], 3, "mpl"),
        ] {
            let e = read(&text, settings).unwrap_err().to_string();
            let want = format!("line {line}");
            assert!(e.contains(&want) && e.contains(part) && e.contains("small.toml"), "{e}");
        }
        for (settings, setting) in [
            (&["batch=8", "epochs=many"][..], "epochs=many"),
            (&["optimizer.rate=fast", "epochs=3"], "optimizer.rate=fast"),
            (&["optimizer.speed=1"], "optimizer.speed=1"),
            (&["batch=8", "model.hidden=8"], "model.hidden=8"),
            (&["best.metric=loss", "batch=8"], "best.metric=loss"),
            (&["optimizer={ kind = \"sgd\", rat = 1 }"], "optimizer={ kind = \"sgd\", rat = 1 }"),
        ] {
            let e = read(MLP, settings).unwrap_err().to_string();
            assert!(e.contains("--set") && e.contains(&format!("`{setting}`")), "{settings:?}: {e}");
            assert!(!e.contains("line"), "{settings:?}: {e}");
        }
        // Settings may give what the file lacks, and replace what is wrong there.
        let c = read("[train]\nkind = \"npz\"\npath = \"a.npz\"\n", &["model.kind=mlp", "model.hidden=[4]"]);
        assert!(c.is_ok(), "{c:?}");
        assert_eq!(read(&MLP.replace("epochs = 2", "epochs = \"two\""), &["epochs=3"]).unwrap().epochs, 3);
    }

    #[test]
    fn schedules_get_the_length_of_the_training() {
        let with = |s: &str| {
            let text = format!("kind = \"adamw\"\nrate = 0.1\n{s}");
            toml::from_str::<OptimizerConfig>(&text).unwrap().schedule(50)
        };
        assert_eq!(with("schedule = { kind = \"one_cycle\" }").unwrap(), Some(Schedule::one_cycle(0.1, 50)));
        let cosine = Schedule::Cosine { steps: 9, least: 0.0 };
        assert_eq!(with("schedule = { kind = \"cosine\", steps = 9, least = 0.0 }").unwrap(), Some(cosine));
        assert!(with("schedule = { kind = \"cosine\" }").is_err());
        assert!(with("schedule = { kind = \"sine\" }").unwrap_err().to_string().contains("sine"));
    }
}

//! `checkpoint.json`: the content of a checkpoint other than tensors.

use halcyon::ir::error::{Error, Result};
use halcyon_nn::Schedule;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the file.
pub(super) const NAME: &str = "checkpoint.json";
/// The value of [`Manifest::format`].
pub(super) const FORMAT: &str = "halcyon-checkpoint";
/// The version of the format that this release writes. It is also the newest version that this release reads.
pub const VERSION: u32 = 1;
/// The largest accepted size of a `checkpoint.json` in bytes.
const MOST: u64 = 64 << 20;

/// The content of `checkpoint.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// `halcyon-checkpoint`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// The release of Halcyon that wrote the checkpoint.
    pub halcyon: String,
    /// The device on which the checkpoint was made.
    pub backend: String,
    /// Number of steps taken.
    pub step: u64,
    /// Number of epochs completed.
    pub epoch: u64,
    /// The seed of the step's random numbers. The key of each step follows from the seed and the number of
    /// the step.
    pub seed: u64,
    /// Metrics of the model, such as `accuracy`. Metrics that are not finite are left out.
    pub metrics: BTreeMap<String, f64>,
    pub optimizer: OptimizerRecord,
    /// The loss scaler's state, if there is one.
    pub scaler: Option<ScalerRecord>,
    /// Number of the model's tensors by dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// The position in the data, in the format of the data source.
    pub data: Value,
    /// The trainer's own state.
    pub trainer: Value,
    /// Sizes and checksums of the other files.
    pub files: BTreeMap<String, FileRecord>,
}

/// The optimizer of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerRecord {
    /// Number of steps taken, including those that the loss scaler skipped.
    pub steps: u64,
    pub groups: Vec<GroupRecord>,
}

/// A group of parameters of the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRecord {
    /// Name of the update rule.
    pub rule: String,
    pub rate: f64,
    pub weight_decay: f64,
    pub schedule: Schedule,
}

/// The state of a loss scaler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerRecord {
    pub scale: f64,
    /// Number of steps skipped so far.
    pub skipped: u64,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    pub bytes: u64,
    /// CRC-32 (IEEE 802.3) of the content.
    pub crc32: u32,
}

impl Manifest {
    /// Reads the file of a folder.
    pub(super) fn read(folder: &Path) -> Result<Manifest> {
        let path = folder.join(NAME);
        let text = halcyon_host::input::text_of(&path, MOST).map_err(|e| e.error(&path))?;
        let bad = |what: String| Error::Format { file: path.display().to_string(), what };
        // The version is read first, because it determines the fields.
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let head: Head = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if head.format != FORMAT {
            return Err(bad(format!("its format is '{}', not '{FORMAT}'", head.format)));
        }
        if head.version == 0 || head.version > VERSION {
            let what = format!("{}: version {} of the format", path.display(), head.version);
            return Err(Error::unsupported(what, "Load it with the release that wrote it, or a newer one"));
        }
        let m: Manifest = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        let plain = |n: &String| !n.is_empty() && !n.contains(['/', '\\']) && n != "." && n != "..";
        match m.files.keys().find(|n| !plain(n)) {
            Some(n) => Err(bad(format!("'{n}' is not a file name"))),
            None => Ok(m),
        }
    }
}

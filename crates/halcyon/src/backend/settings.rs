//! The settings of a [`BackendBuilder`](super::BackendBuilder): plain data.

use halcyon_hal::policy::{Fallback, Policy};
use halcyon_hal::tune::TuningMode;
use halcyon_hal::{BackendType, Options};
use halcyon_ir::passes::autocast::{KeptInF32, MixedOps};
use halcyon_ir::passes::{AmpPolicy, Level};
use halcyon_ir::target::MatmulPrecision;
use std::path::PathBuf;

/// The requested settings. If a setting is `None`, an environment variable, the configuration file or a
/// default decides.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    pub(super) backend: Option<BackendType>,
    pub(super) device: Option<usize>,
    pub(super) policy: Option<Policy>,
    pub(super) fallback: Option<Fallback>,
    pub(super) memory: u64,
    pub(super) level: Level,
    pub(super) precision: Option<MatmulPrecision>,
    pub(super) tensor_cores: Option<bool>,
    pub(super) amp: Option<AmpPolicy>,
    pub(super) force_amp: bool,
    /// The work that stays in f32 under `amp`, if it has been measured already.
    pub(super) amp_kept: Option<KeptInF32>,
    /// The ops that `amp` applies to.
    pub(super) mixed: MixedOps,
    /// The initial loss scale in training.
    pub(super) loss_scale: Option<f64>,
    pub(super) without: std::collections::BTreeSet<String>,
    pub(super) options: Options,
    pub(super) keep_packed: Option<bool>,
    pub(super) algorithm_search: Option<bool>,
    pub(super) tuning: Option<TuningMode>,
    pub(super) tuning_file: Option<PathBuf>,
}

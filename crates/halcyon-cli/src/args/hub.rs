//! Arguments about models that are given by name.

use clap::Args;

#[derive(Args, Debug, Clone, Default)]
pub(crate) struct HubArgs {
    /// Uses only files that are on this machine: a model by name (hf:ORG/REPO) is not downloaded
    #[arg(long, hide_short_help = true)]
    pub offline: bool,
}

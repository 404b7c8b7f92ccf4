//! Arguments about the cache of a language model, and numbers of its commands.

use clap::Args;
use halcyon::{Error, Result};
use halcyon_models::SpeculationOptions;
use std::num::NonZero;

/// A whole number that is not negative. `-1`, which other programs take for "no limit", is refused with the
/// way to say so here.
pub(crate) fn whole<T: std::str::FromStr>(s: &str) -> std::result::Result<T, String> {
    let what = match s {
        "-1" => "expected a whole number that is not negative; leave the option out for its default",
        _ => "expected a whole number that is not negative, and not too large",
    };
    s.parse().map_err(|_| what.to_string())
}

/// A whole number of at least 1.
pub(crate) fn positive(s: &str) -> std::result::Result<NonZero<usize>, String> {
    s.parse().map_err(|_| "expected a whole number of at least 1".to_string())
}

/// The most tokens that are proposed at once.
pub(crate) fn proposals(s: &str) -> std::result::Result<usize, String> {
    let (n, most) = (whole(s)?, SpeculationOptions::MOST);
    if (1..=most).contains(&n) { Ok(n) } else { Err(format!("expected a whole number from 1 to {most}")) }
}

/// The seed of draws; `None` for a new one, which llama.cpp writes as `-1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(pub Option<u64>);

pub(crate) fn seed(s: &str) -> std::result::Result<Seed, String> {
    match s {
        "-1" => Ok(Seed(None)),
        _ => whole(s).map(|n| Seed(Some(n))),
    }
}

/// The cache of keys and values, and how it is filled.
#[derive(Args, Debug)]
pub(crate) struct CacheArgs {
    /// Positions of a sequence for which the cache has room; 0: as many as the model was made for. Default:
    /// 4096, or fewer if the model was made for fewer; `perplexity` 512; `logits` and `bench llm` as many as
    /// they need
    #[arg(
        short = 'c',
        long,
        visible_aliases = ["ctx-size", "num-ctx"],
        value_name = "N",
        value_parser = whole::<usize>
    )]
    pub context: Option<usize>,
    /// Type of the cached keys and values: f32, f16, bf16 or q8_0. Default: f16, for `logits` f32
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// Type of the cached keys, as in llama.cpp (also -ctk). Default: that of --kv-dtype. With latent
    /// attention, keys serve as values, so their type counts for both
    #[arg(long, value_name = "TYPE")]
    pub cache_type_k: Option<String>,
    /// Type of the cached values, as in llama.cpp (also -ctv). Default: that of --kv-dtype
    #[arg(long, value_name = "TYPE")]
    pub cache_type_v: Option<String>,
    /// The most tokens of a prompt that are computed at once. Default: 512
    #[arg(long, visible_aliases = ["batch-size"], value_name = "N", value_parser = whole::<usize>)]
    pub chunk: Option<usize>,
}

impl CacheArgs {
    /// The most tokens of a step.
    ///
    /// # Errors
    /// `Error::Argument` for 0.
    pub(crate) fn chunk(&self) -> Result<usize> {
        match self.chunk.unwrap_or(512) {
            0 => Err(Error::argument("--chunk", "must be at least 1")),
            n => Ok(n),
        }
    }
}

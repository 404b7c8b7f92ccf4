//! Arguments that name adapters.

use clap::Args;
use halcyon::{Error, Result};
use std::path::PathBuf;

/// Low-rank adapters, each with a factor.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct LoraArgs {
    /// Low-rank adapters: a folder in PEFT's format, a GGUF file as llama.cpp has it, or a name
    /// (hf:ORG/REPO[:FILE]); repeatable
    #[arg(long, value_name = "PATH")]
    pub lora: Vec<PathBuf>,
    /// The same, with a factor for what the adapters add; repeatable
    #[arg(long, value_name = "PATH:SCALE")]
    pub lora_scaled: Vec<String>,
}

impl LoraArgs {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.lora.is_empty() && self.lora_scaled.is_empty()
    }

    /// The places and their factors.
    pub(crate) fn places(&self) -> Result<Vec<(PathBuf, f32)>> {
        let mut all: Vec<(PathBuf, f32)> = self.lora.iter().map(|p| (p.clone(), 1.0)).collect();
        for text in &self.lora_scaled {
            let parts = text.rsplit_once(':').filter(|(path, _)| !path.is_empty());
            let scale = parts.and_then(|(_, s)| s.parse::<f32>().ok()).filter(|s| s.is_finite());
            let (Some((path, _)), Some(scale)) = (parts, scale) else {
                let what = format!("'{text}': expected PATH:SCALE, such as adapter.gguf:0.5");
                return Err(Error::argument("--lora-scaled", what));
            };
            all.push((path.into(), scale));
        }
        Ok(all)
    }
}

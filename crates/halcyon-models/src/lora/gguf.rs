//! Adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf` writes them.

use super::Lora;
use super::files::{adapters_of, bad};
use super::order::FileOrder;
use super::parts::Part;
use crate::model::ModelFile;
use crate::source::Source;
use halcyon::Backend;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Gguf, Metadata};
use std::collections::BTreeSet;
use std::path::Path;

/// The architecture that a GGUF file of this model has.
fn architecture(file: &ModelFile) -> String {
    match &file.source {
        Source::Gguf(g) => g.metadata().str("general.architecture").map(String::from).unwrap_or_default(),
        Source::Folder(_) if file.spec.family == "mixtral" => "llama".into(),
        Source::Folder(_) => file.spec.family.into(),
    }
}

/// Reads a GGUF file with adapters for this model.
pub(super) fn load(path: &Path, file: &ModelFile, backend: &Backend) -> Result<Lora> {
    let source = Source::Gguf(Gguf::open(path)?);
    let Source::Gguf(g) = &source else { return Err(Error::internal("a GGUF file is a folder")) };
    let m = g.metadata();
    let text = |key: &str| m.maybe(key, |m, k| m.str(k).map(String::from));
    if text("general.type")?.as_deref() != Some("adapter") {
        let what = "it is no adapter: general.type is not 'adapter'. Give the model as MODEL";
        return Err(bad(path, what));
    }
    if text("adapter.type")?.as_deref() != Some("lora") {
        let kind = text("adapter.type")?.unwrap_or_default();
        return Err(Error::unsupported(format!("adapters of the type '{kind}'"), "Use a LoRA"));
    }
    let (own, want) = (text("general.architecture")?.unwrap_or_default(), architecture(file));
    if own != want {
        return Err(bad(
            path,
            format!("it belongs to a model of the architecture {own}, and this is {want}"),
        ));
    }
    let alpha = m.maybe("adapter.lora.alpha", Metadata::f64)?.unwrap_or(0.0);
    if !alpha.is_finite() {
        return Err(bad(path, "adapter.lora.alpha is not a number"));
    }
    // llama.cpp takes an alpha of 0 for one that is not given.
    let scale = |rank: usize| if alpha == 0.0 { 1.0 } else { (alpha / rank as f64) as f32 };
    let mut rest: BTreeSet<String> = g.tensors().iter().map(|t| t.name().to_string()).collect();
    let mut take = |stem: &str, _: &str, _: Option<&Part>, which: &str| {
        let name = format!("{stem}.weight.lora_{}", which.to_lowercase());
        if !rest.remove(&name) {
            return Ok(None);
        }
        let found = source.find(&file.spec, &name)?;
        found.map(|w| Ok((w.dims(), w.floats()?))).transpose()
    };
    let lora = adapters_of(path, file, backend, FileOrder::Gguf, &scale, &mut take)?;
    match rest.first() {
        Some(name) => {
            let what = format!("the adapter tensor '{name}' with this {} model", file.spec.family);
            Err(Error::unsupported(what, "Merge the adapter with llama.cpp's llama-export-lora"))
        }
        None => lora.ok_or_else(|| bad(path, "it has no adapters")),
    }
}

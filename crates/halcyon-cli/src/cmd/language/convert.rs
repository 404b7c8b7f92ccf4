//! `halcyon convert`: a folder as a GGUF file, a GGUF file as a folder, or a GGUF file in floats.

use super::hub;
use super::quantize::{Plan, Writing};
use crate::args::ConvertArgs;
use crate::cmd::train::watched;
use crate::report::{self, size};
use halcyon::{DType, Error, Result};
use halcyon_models::Source;
use halcyon_models::export::{Content, write_folder};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::Ordering;

pub(crate) fn main(a: &ConvertArgs) -> Result<u8> {
    let dtype = match a.dtype.as_deref() {
        None => None,
        Some("f32") => Some(DType::F32),
        Some("f16") => Some(DType::F16),
        Some("bf16") => Some(DType::BF16),
        Some(other) => {
            return Err(Error::argument("--dtype", format!("'{other}': expected f32, f16 or bf16")));
        }
    };
    let source = Source::open(&hub::local(&a.model, &a.hub)?)?;
    let is_file = a.output == Path::new("-")
        || a.output.is_file()
        || a.output.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    match (&source, is_file) {
        (_, true) => to_gguf(a, &source, dtype),
        (Source::Gguf(_), false) => to_folder(a, &source, dtype.unwrap_or(DType::F32)),
        (Source::Folder(_), false) => {
            Err(Error::argument("OUT", "a folder becomes a GGUF file; give OUT a name that ends in .gguf"))
        }
    }
}

fn to_gguf(a: &ConvertArgs, source: &Source, dtype: Option<DType>) -> Result<u8> {
    let mut content = Content::of(source)?;
    content.warnings.iter().for_each(|w| report::warn(w));
    let (types, file) = match dtype {
        Some(d) => (content.expand(d)?, d.name()),
        None if matches!(source, Source::Folder(_)) => {
            (content.tensors.iter().map(|t| t.info.ty).collect(), "types of the folder")
        }
        None => {
            let what = "IN and OUT are GGUF files, so choose the type: f32, f16 or bf16. `halcyon quantize` \
                        writes blocks";
            return Err(Error::argument("--dtype", what));
        }
    };
    // Decoding blocks is what the user asked for.
    let how = Writing { source, threads: a.threads, requantise: true, json: a.json };
    Plan { content: &content, types: &types, file }.write(&a.output, &how)
}

fn to_folder(a: &ConvertArgs, source: &Source, dtype: DType) -> Result<u8> {
    let interrupt = watched()?;
    let mut bar: Option<report::Progress> = None;
    let mut step = |total| bar.get_or_insert_with(|| report::Progress::bar("tensors", total)).step();
    let stop = || interrupt.load(Ordering::Relaxed);
    let w = write_folder(source, &a.output, dtype, &stop, &mut step)?;
    bar.into_iter().for_each(report::Progress::finish);
    w.warnings.iter().for_each(|w| report::warn(w));
    match a.json {
        true => report::print_json(&json!({
            "output": report::path(&a.output), "type": dtype.name(), "tensors": w.tensors,
            "bytes": w.bytes, "warnings": w.warnings,
        }))?,
        false => report::print(&format!(
            "{} ({}): {}, {} tensors\n",
            report::path_text(&a.output),
            size(w.bytes),
            dtype.name(),
            w.tensors
        ))?,
    }
    Ok(0)
}

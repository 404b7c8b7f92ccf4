//! `halcyon convert`: a folder as a GGUF file, a GGUF file as a folder, or a GGUF file in floats.

use super::hub;
use super::merge::Input;
use super::quantize::{Plan, Writing};
use crate::args::ConvertArgs;
use crate::cmd::train::watched;
use crate::report::{self, size};
use halcyon::{DType, Error, Result};
use halcyon_models::Source;
use halcyon_models::export::{FolderWritten, write_folder, write_merged_folder};
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
    let mut input = Input::open(&hub::local(&a.model, &a.hub)?, &hub::adapters(&a.lora, &a.hub)?)?;
    let is_file = a.output == Path::new("-")
        || a.output.is_file()
        || a.output.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    match (input.source(), is_file) {
        (_, true) => to_gguf(a, &mut input, dtype),
        (Source::Gguf(_), false) if a.lora.is_empty() => {
            let dtype = dtype.unwrap_or(DType::F32);
            to_folder(a, dtype.name(), |stop, step| {
                write_folder(input.source(), &a.output, dtype, stop, step)
            })
        }
        (Source::Folder(_), false) if a.lora.is_empty() => {
            Err(Error::argument("OUT", "a folder becomes a GGUF file; give OUT a name that ends in .gguf"))
        }
        _ => {
            let Input::Merged(mut m) = input else { return Err(Error::internal("no adapters")) };
            to_folder(a, dtype.map_or("types of the folder", |d| d.name()), |stop, step| {
                write_merged_folder(&mut m.0, &m.1, (&a.output, dtype), stop, step)
            })
        }
    }
}

fn to_gguf(a: &ConvertArgs, input: &mut Input, dtype: Option<DType>) -> Result<u8> {
    let (is_folder, inputs) = (matches!(input.source(), Source::Folder(_)), input.files());
    let (mut content, kept) = input.content()?;
    content.warnings.iter().for_each(|w| report::warn(w));
    let (types, file) = match dtype {
        Some(d) => (content.expand(d)?, d.name()),
        None if is_folder => (kept, "types of the folder"),
        None if !a.lora.is_empty() => (kept, "types of the model"),
        None => {
            let what = "IN and OUT are GGUF files, so choose the type: f32, f16 or bf16. `halcyon quantize` \
                        writes blocks";
            return Err(Error::argument("--dtype", what));
        }
    };
    // Decoding blocks is what the user asked for.
    let how = Writing {
        inputs: &inputs,
        overwrite: a.overwrite,
        threads: a.threads,
        requantise: true,
        json: a.json,
    };
    Plan { content: &content, types: &types, file }.write(&a.output, &how)
}

/// Writes a folder with `write`, which gets what asks whether to stop and what is called after each tensor.
fn to_folder(
    a: &ConvertArgs,
    dtype: &str,
    write: impl FnOnce(&dyn Fn() -> bool, &mut dyn FnMut(u64)) -> Result<FolderWritten>,
) -> Result<u8> {
    let interrupt = watched()?;
    let mut bar: Option<report::Progress> = None;
    let mut step = |total| bar.get_or_insert_with(|| report::Progress::bar("tensors", total)).step();
    let stop = || interrupt.load(Ordering::Relaxed);
    let w = write(&stop, &mut step)?;
    bar.into_iter().for_each(report::Progress::finish);
    w.warnings.iter().for_each(|w| report::warn(w));
    match a.json {
        true => report::print_json(&json!({
            "output": report::path(&a.output), "type": dtype, "tensors": w.tensors,
            "bytes": w.bytes, "warnings": w.warnings,
        }))?,
        false => report::print(&format!(
            "{} ({}): {}, {} tensors\n",
            report::path_text(&a.output),
            size(w.bytes),
            dtype,
            w.tensors
        ))?,
    }
    Ok(0)
}

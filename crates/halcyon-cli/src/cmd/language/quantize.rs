//! `halcyon quantize`: writes a language model with weights in blocks.

use super::hub;
use super::merge::Input;
use super::outfile::{refuse_existing, refuse_inputs};
use crate::args::QuantizeModelArgs;
use crate::cmd::train::watched;
use crate::report::{self, size};
use halcyon::{Error, Result};
use halcyon_formats::gguf::{GgmlType, TensorInfo};
use halcyon_formats::output;
use halcyon_models::export::{Content, FileType, MixtureOptions, TypeRule, WriteOptions, Written, write};
use serde_json::{Value, json};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

pub(crate) fn main(a: &QuantizeModelArgs) -> Result<u8> {
    let options = options(a)?;
    let mut input = Input::open(&hub::local(&a.model, &a.hub)?, &hub::adapters(&a.lora, &a.hub)?)?;
    let inputs = input.files();
    let (mut content, _) = input.content()?;
    content.warnings.iter().for_each(|w| report::warn(w));
    let types = content.quantise(&options)?;
    let plan = Plan { content: &content, types: &types, file: options.file.name };
    let Some(path) = a.output.as_ref().filter(|_| !a.dry_run) else {
        return match a.json {
            true => report::print_json(&plan.json(true)).map(|()| 0),
            false => report::print(&plan.list()).map(|()| 0),
        };
    };
    let how = Writing {
        inputs: &inputs,
        overwrite: a.overwrite,
        threads: a.threads,
        requantise: a.allow_requantize,
        json: a.json,
    };
    plan.write(path, &how)
}

fn ty(option: &str, name: &str) -> Result<GgmlType> {
    let known = |t: &GgmlType| {
        matches!(t, GgmlType::Block(_)) || [GgmlType::F32, GgmlType::F16, GgmlType::BF16].contains(t)
    };
    GgmlType::from_name(name).filter(known).ok_or_else(|| {
        let names: Vec<&str> = GgmlType::all().filter(known).map(GgmlType::name).collect();
        Error::argument(option, format!("'{name}': expected one of {}", names.join(", ")))
    })
}

fn options(a: &QuantizeModelArgs) -> Result<MixtureOptions> {
    let one = |option: &str, name: &Option<String>| name.as_deref().map(|n| ty(option, n)).transpose();
    let rule = |text: &String| {
        let (pattern, name) = text
            .split_once('=')
            .filter(|(p, _)| !p.is_empty())
            .ok_or_else(|| Error::argument("--tensor-type", format!("'{text}': expected NAME=TYPE")))?;
        Ok(TypeRule { pattern: pattern.into(), ty: ty("--tensor-type", name)? })
    };
    let file = FileType::from_name(&a.file_type)?;
    if !matches!(file.base, GgmlType::Block(_)) && (a.pure || !a.tensor_type.is_empty()) {
        let name = if a.pure { "--pure" } else { "--tensor-type" };
        return Err(Error::argument(
            name,
            format!("it has no effect with --type {}; leave it out", file.name),
        ));
    }
    Ok(MixtureOptions {
        output: one("--output-type", &a.output_type)?,
        embedding: one("--token-embedding-type", &a.token_embedding_type)?,
        rules: a.tensor_type.iter().map(rule).collect::<Result<_>>()?,
        pure: a.pure,
        ..MixtureOptions::new(file)
    })
}

/// What is going to be written.
pub(super) struct Plan<'a> {
    pub content: &'a Content<'a>,
    pub types: &'a [GgmlType],
    /// The name of the file's type.
    pub file: &'a str,
}

/// How it is written.
pub(super) struct Writing<'a> {
    /// The files that are read.
    pub inputs: &'a [PathBuf],
    pub overwrite: bool,
    pub threads: Option<NonZero<usize>>,
    pub requantise: bool,
    pub json: bool,
}

fn bytes_of(t: &TensorInfo, ty: GgmlType) -> u64 {
    ty.row_bytes(t.elements()).unwrap_or(0) as u64
}

impl Plan<'_> {
    fn tensors(&self) -> impl Iterator<Item = (&TensorInfo, GgmlType)> {
        self.content.tensors.iter().map(|t| &t.info).zip(self.types.iter().copied())
    }

    /// The bytes of all tensors, before and after.
    fn bytes(&self) -> (u64, u64) {
        self.tensors().fold((0, 0), |(a, b), (t, ty)| (a + bytes_of(t, t.ty), b + bytes_of(t, ty)))
    }

    /// Size before and after, and bits per weight.
    fn sizes(&self) -> String {
        let (before, after) = self.bytes();
        let elements: u64 = self.tensors().map(|(t, _)| t.elements() as u64).sum();
        let bits = after as f64 * 8.0 / elements.max(1) as f64;
        format!("{} → {} ({bits:.2} bits per weight)", size(before), size(after))
    }

    fn list(&self) -> String {
        let head = ["tensor", "shape", "type", "new type", "size", "new size"].map(String::from).to_vec();
        let one = |(t, ty): (&TensorInfo, GgmlType)| {
            vec![
                report::name(&t.name).into_owned(),
                format!("{:?}", t.shape.as_slice()),
                t.ty.to_string(),
                ty.to_string(),
                size(bytes_of(t, t.ty)),
                size(bytes_of(t, ty)),
            ]
        };
        let rows = std::iter::once(head).chain(self.tensors().map(one)).collect();
        format!("{}{}: {}\n", report::figures(rows, &[4, 5]), self.file, self.sizes())
    }

    fn json(&self, list: bool) -> Value {
        let (before, after) = self.bytes();
        let mut v = json!({ "type": self.file, "bytes": before, "new_bytes": after });
        if list {
            let one = |(t, ty): (&TensorInfo, GgmlType)| {
                json!({
                    "name": t.name, "shape": t.shape.as_slice(), "type": t.ty.name(), "new_type": ty.name(),
                    "bytes": bytes_of(t, t.ty), "new_bytes": bytes_of(t, ty),
                })
            };
            v["tensors"] = self.tensors().map(one).collect();
        }
        v
    }

    /// Writes the file and reports it.
    pub(super) fn write(&self, path: &Path, how: &Writing<'_>) -> Result<u8> {
        let piped = output::is_stdout(path);
        if piped && how.json {
            return Err(Error::argument("--json", "the model goes to standard output; choose one"));
        }
        refuse_inputs(how.inputs, path, "OUT")?;
        refuse_existing(path, how.overwrite)?;
        let (start, interrupt) = (Instant::now(), watched()?);
        let mut bar = report::Progress::bar("tensors", self.types.len() as u64);
        let mut options = WriteOptions {
            threads: how.threads,
            requantise: how.requantise,
            interrupted: &|| interrupt.load(Ordering::Relaxed),
            progress: &mut || bar.step(),
        };
        let Written { bytes, changed } = write(self.content, self.types, path, &mut options)?;
        bar.finish();
        if how.json {
            let mut v = self.json(false);
            v["output"] = report::path(path);
            v["file_bytes"] = json!(bytes);
            v["changed"] = json!(changed);
            report::print_json(&v)?;
            return Ok(0);
        }
        let text = format!(
            "{} ({}): {}, {changed} of {} tensors changed, {}, {}",
            report::path_text(path),
            size(bytes),
            self.file,
            self.types.len(),
            self.sizes(),
            report::time(start.elapsed()),
        );
        match piped {
            true => report::note(&text),
            false => report::print(&(text + "\n"))?,
        }
        Ok(0)
    }
}

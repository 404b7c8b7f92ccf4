//! `halcyon embed`: a vector for each text.

use super::outfile::{files_with, refuse_inputs};
use super::{hub, text_or_stdin};
use crate::args::EmbedArgs;
use crate::report;
use halcyon::{ConstData, Error, Result};
use halcyon_formats::npy;
use halcyon_models::{EmbedOptions, Embedder, Pooling};
use serde_json::json;
use std::path::Path;

/// The most bytes of a file with texts.
const MAX_FILE: u64 = 256 << 20;

/// The texts of a file or of standard input, one per line. Lines without text are left out, as `generate
/// --prompts` does.
fn lines(file: &Path) -> Result<Vec<String>> {
    let io = |e: std::io::Error| Error::Io { path: file.display().to_string(), what: e.to_string() };
    let text = match file.as_os_str() == "-" {
        true => text_or_stdin("-")?,
        false => {
            let size = std::fs::metadata(file).map_err(io)?.len();
            if size > MAX_FILE {
                let what = format!("it has {size} bytes; at most {MAX_FILE} are read");
                return Err(Error::Format { file: file.display().to_string(), what });
            }
            String::from_utf8(std::fs::read(file).map_err(io)?).map_err(|_| {
                let what = "this is not text (not valid UTF-8)".into();
                Error::Format { file: file.display().to_string(), what }
            })?
        }
    };
    Ok(text.lines().filter(|l| !l.trim().is_empty()).map(String::from).collect())
}

/// The texts of an .npy file of integers: its rows, or all of its numbers if it has one dimension.
fn rows(file: &Path) -> Result<Vec<Vec<u32>>> {
    let data = npy::read(file)?;
    let bad = |what: String| Error::Format { file: file.display().to_string(), what };
    if !data.dtype.is_int() || !matches!(data.dims.len(), 1 | 2) {
        let what = format!("{} {:?}: expected one or two dimensions of integers", data.dtype, &data.dims[..]);
        return Err(bad(what));
    }
    let id = |v: i64| u32::try_from(v).map_err(|_| bad(format!("{v} is not a token")));
    let all = data.to_vec::<i64>().into_iter().map(id).collect::<Result<Vec<u32>>>()?;
    let width = data.dims.last().copied().unwrap_or(0);
    match width {
        0 => Err(bad("it has no tokens".into())),
        n => Ok(all.chunks_exact(n).map(<[u32]>::to_vec).collect()),
    }
}

pub(crate) fn main(a: &EmbedArgs) -> Result<u8> {
    a.backend.check()?;
    let normalize = if a.no_normalize { Some(false) } else { a.normalize.then_some(true) };
    let options = EmbedOptions {
        pooling: a.pooling.as_deref().map(Pooling::by_name).transpose()?,
        normalize,
        prompt: a.prompt_name.clone(),
        max_tokens: a.max_tokens,
        adapters: hub::adapters(&a.lora, &a.hub)?,
    };
    if let Some(out) = &a.output {
        let mut inputs = files_with(&hub::local(&a.model, &a.hub)?, &options.adapters);
        inputs.extend(a.file.iter().chain(&a.tokens).cloned());
        refuse_inputs(&inputs, out, "--output")?;
    }
    let texts = match &a.file {
        Some(file) => lines(file)?,
        None => a.texts.clone(),
    };
    let given = a.tokens.as_deref().map(rows).transpose()?;
    if texts.is_empty() && given.is_none() {
        return Err(Error::argument("embed", "there are no texts; give TEXT, --file or --tokens"));
    }
    let mut model = Embedder::open(&a.backend.open(false)?, &hub::local(&a.model, &a.hub)?, &options)?;
    for w in model.warnings() {
        report::warn(w);
    }
    let ids = match given {
        Some(ids) => ids,
        None => {
            let mut all = Vec::with_capacity(texts.len());
            for (i, text) in texts.iter().enumerate() {
                let t = model.tokens(text)?;
                if t.cut > 0 {
                    let (cut, most) = (t.cut, model.max_tokens());
                    report::warn(&format!(
                        "text {i} is too long: {cut} tokens after the first {most} are cut"
                    ));
                }
                all.push(t.ids);
            }
            all
        }
    };
    let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
    model.check_memory(&ids)?;
    let made = model.embed_tokens(&ids)?;
    if let Some(file) = &a.output {
        npy::write(file, &ConstData::from_slice(&[made.len(), model.size()], &made.concat())?)?;
    }
    if a.json {
        report::print_json(&json!({ "embeddings": made }))?;
    } else if a.output.is_none() {
        let line = |v: &Vec<f32>| v.iter().map(f32::to_string).collect::<Vec<_>>().join(" ") + "\n";
        report::print(&made.iter().map(line).collect::<String>())?;
    }
    let (count, size) = (made.len(), model.size());
    report::note(&format!("{count} embeddings of {size} elements from {}", model.backend().id()));
    Ok(0)
}

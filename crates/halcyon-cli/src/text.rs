//! Text as input of an encoder: token ids, attention mask and type ids from a tokenizer.

use crate::source::Input;
use crate::suggest;
use halcyon::{ConstData, Error, Result, Scalar};
use halcyon_formats::data;
use halcyon_formats::onnx::{Port, PortType};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Usual names of the inputs that a tokenizer provides.
const IDS: &[&str] = &["input_ids", "ids", "token_ids", "tokens"];
const MASK: &[&str] = &["attention_mask", "mask", "input_mask"];
const TYPES: &[&str] = &["token_type_ids", "type_ids", "segment_ids"];
/// Name of the tokenizer's file.
pub(crate) const FILE: &str = "tokenizer.json";
/// Largest accepted file of lines in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// A token limit of at least this value means that there is no limit.
const NO_LIMIT: f64 = 1e9;

/// The lines of a text file; `-` is standard input.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for content that is not UTF-8.
pub(crate) fn lines(path: &Path) -> Result<Vec<String>> {
    let file = path.display().to_string();
    let io = |e: std::io::Error| Error::Io { path: file.clone(), what: e.to_string() };
    let mut bytes = vec![];
    let read = match path.to_str() {
        Some("-") => std::io::stdin().lock().take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes),
        _ => std::fs::File::open(path).and_then(|f| f.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)),
    };
    read.map_err(|e| suggest::missing(path, io(e)))?;
    let bad = |what: &str| Error::Format { file: file.clone(), what: what.into() };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(bad("a file of lines may have at most 1 GiB; split it"));
    }
    let text = String::from_utf8(bytes).map_err(|_| bad("not UTF-8 text, which a file of lines must be"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines: Vec<String> = text.lines().map(String::from).collect();
    if lines.is_empty() {
        return Err(bad("the file has no lines"));
    }
    Ok(lines)
}

/// The tokenizer file of a model: beside it, or in the folder above (as for `onnx/model.onnx`).
pub(crate) fn find_tokenizer(model: &Path) -> Option<PathBuf> {
    let dir = model.parent()?;
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let above = dir.canonicalize().ok().and_then(|d| Some(d.parent()?.join(FILE)));
    [Some(dir.join(FILE)), above].into_iter().flatten().find(|p| p.is_file())
}

/// The tokens of a line.
#[derive(Debug)]
#[cfg_attr(not(feature = "text"), allow(dead_code))]
pub(crate) struct TokenizedLine {
    ids: Vec<u32>,
    types: Vec<u32>,
}

/// A tokenizer and the inputs that receive its results.
#[derive(Debug)]
pub(crate) struct Encoder {
    tokenizer: tokenizer::Tokenizer,
    ids: usize,
    mask: Option<usize>,
    types: Option<usize>,
    /// The token limit, and the file or input shape that declares it.
    most: Option<(usize, String)>,
    /// The number of tokens if the model fixes it.
    exact: Option<usize>,
}

impl Encoder {
    /// `named` is the input that the text was given for, `file` the tokenizer's file.
    ///
    /// # Errors
    /// [`Error::Argument`] if the model has no input for token ids or there is no tokenizer;
    /// [`Error::Format`] for an invalid tokenizer.
    pub(crate) fn open(ports: &[Port], named: Option<usize>, file: Option<&Path>) -> Result<Encoder> {
        let find = |names: &[&str]| {
            let at = |n: &&str| ports.iter().position(|p| p.name == **n);
            names.iter().find_map(at)
        };
        let takes = || {
            let all: Vec<String> = ports.iter().map(|p| format!("{} {}", p.name, p.ty)).collect();
            format!("the model takes {}", all.join(", "))
        };
        let bad = |what: String| Error::argument("--input", what);
        let integers = |p: &Port| matches!(&p.ty, PortType::Tensor { dtype, .. } if dtype.is_int());
        if !ports.iter().any(integers) {
            return Err(bad(format!("the model has no input for text (an input of token ids): {}", takes())));
        }
        let ids = named.or_else(|| find(IDS)).ok_or_else(|| {
            bad(format!(
                "no input has a usual name of token ids ({} or {}): {}. Name the input: --input NAME=text:\"…\"",
                IDS[..IDS.len() - 1].join(", "),
                IDS[IDS.len() - 1],
                takes()
            ))
        })?;
        let p = &ports[ids];
        let rank = p.shape().map_or(2, |s| s.rank());
        if !integers(p) || !(1..=2).contains(&rank) {
            let what = format!("'{}' is {}, which takes no token ids: {}", p.name, p.ty, takes());
            return Err(bad(what));
        }
        let file = file.ok_or_else(|| {
            bad(format!(
                "text needs a tokenizer: put the model's {FILE} beside it, name it by --tokenizer, or give token ids as --input {}='[1,2,3]'; {}",
                p.name,
                takes()
            ))
        })?;
        let exact = p.shape().and_then(|s| s.last()).and_then(|d| d.known());
        let (tokenizer, own) = tokenizer::open(file)?;
        let mut most: Vec<(usize, String)> = own.map(|n| (n, FILE.to_string())).into_iter().collect();
        most.extend(declared_limits(file));
        most.extend(exact.map(|n| (n, format!("the shape of '{}'", p.name))));
        let most = most.into_iter().min_by_key(|(n, _)| *n);
        Ok(Encoder { tokenizer, ids, mask: find(MASK), types: find(TYPES), most, exact })
    }

    /// Index of the input for the token ids.
    pub(crate) fn ids(&self) -> usize {
        self.ids
    }

    /// Indices of all inputs that the encoder fills.
    pub(crate) fn filled_inputs(&self) -> impl Iterator<Item = usize> {
        [Some(self.ids), self.mask, self.types].into_iter().flatten()
    }

    /// Tokenizes each line. Prints a warning about truncated lines.
    pub(crate) fn encode(&self, lines: &[String]) -> Result<Vec<TokenizedLine>> {
        let most = self.most.as_ref();
        let (out, cut) = self.tokenizer.encode(lines, most.map(|(n, _)| *n))?;
        if let (Some(first), Some((n, who))) = (cut.first(), most) {
            let what = match cut.len() {
                1 => format!("line {} is", first + 1),
                more => format!("{more} lines are (the first is line {})", first + 1),
            };
            crate::report::warn(&format!("{what} cut to the {n} tokens that {who} allows"));
        }
        Ok(out)
    }

    /// Number of tokens that lines are padded to.
    pub(crate) fn width(&self, lines: &[TokenizedLine]) -> usize {
        let longest = lines.iter().map(|l| l.ids.len()).max().unwrap_or(0);
        self.exact.unwrap_or(longest)
    }

    /// The input tensors for these lines, each padded to `width` tokens.
    pub(crate) fn inputs(
        &self,
        ports: &[Port],
        lines: &[&TokenizedLine],
        width: usize,
    ) -> Result<Vec<(usize, Input)>> {
        let (pad, pad_type, left) = self.tokenizer.padding();
        let of =
            |i: usize, value: &dyn Fn(&TokenizedLine, usize) -> u32, empty: u32| -> Result<(usize, Input)> {
                let p = &ports[i];
                let row = |l: &&TokenizedLine| -> Vec<Scalar> {
                    let fill = width.saturating_sub(l.ids.len());
                    let at = |k: usize| {
                        let k = if left { k.checked_sub(fill) } else { Some(k) };
                        k.filter(|k| *k < l.ids.len()).map_or(empty, |k| value(l, k))
                    };
                    (0..width).map(|k| Scalar::U(at(k).into())).collect()
                };
                let flat = p.shape().is_some_and(|s| s.rank() == 1);
                let dims = match (flat, lines.len()) {
                    (true, 1) => vec![width],
                    (true, n) => {
                        let what = format!("'{}' is {}: it takes one line at a time, not {n}", p.name, p.ty);
                        return Err(Error::argument("--input", what));
                    }
                    (false, n) => vec![n, width],
                };
                let x: ConstData = data::from_scalars(p.dtype()?, &dims, lines.iter().flat_map(row))?;
                let source = format!(
                    "{} of text",
                    if lines.len() == 1 { "1 line".into() } else { format!("{} lines", lines.len()) }
                );
                Ok((i, Input { name: p.name.clone(), source, data: x.into() }))
            };
        let mut all = vec![of(self.ids, &|l, k| l.ids[k], pad)?];
        if let Some(i) = self.mask {
            all.push(of(i, &|_, _| 1, 0)?);
        }
        if let Some(i) = self.types {
            all.push(of(i, &|l, k| l.types.get(k).copied().unwrap_or(0), pad_type)?);
        }
        Ok(all)
    }
}

/// The token limits declared in the files beside a tokenizer.
fn declared_limits(tokenizer: &Path) -> Vec<(usize, String)> {
    let read = |name: &str| -> Option<Value> {
        let file = std::fs::File::open(tokenizer.with_file_name(name)).ok()?;
        let mut text = vec![];
        file.take(1 << 20).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    };
    let count = |v: &Value| v.as_f64().filter(|n| (1.0..NO_LIMIT).contains(n)).map(|n| n as usize);
    let mut all = vec![];
    let name = "tokenizer_config.json";
    if let Some(n) = read(name).and_then(|v| count(&v["model_max_length"])) {
        all.push((n, name.into()));
    }
    let name = "config.json";
    if let Some(v) = read(name)
        && let Some(n) = count(&v["max_position_embeddings"])
    {
        // RoBERTa models number positions from the padding id + 1.
        let kept = match v["model_type"].as_str() {
            Some(t) if t.contains("roberta") => v["pad_token_id"].as_u64().unwrap_or(1) as usize + 1,
            _ => 0,
        };
        all.push((n.saturating_sub(kept).max(1), name.into()));
    }
    all
}

#[cfg(feature = "text")]
mod tokenizer {
    use super::TokenizedLine;
    use halcyon::{Error, Result};
    use std::path::Path;
    use tokenizers::{TruncationParams, TruncationStrategy};

    #[derive(Debug)]
    pub(super) struct Tokenizer(Box<tokenizers::Tokenizer>, String);

    /// Reads a tokenizer. Also returns the length at which it truncates.
    pub(super) fn open(path: &Path) -> Result<(Tokenizer, Option<usize>)> {
        let file = path.display().to_string();
        let bytes = halcyon_formats::mmap::open(path).map_err(|e| crate::suggest::missing(path, e))?;
        let t = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| Error::Format { file: file.clone(), what: format!("not a tokenizer: {e}") })?;
        let most = t.get_truncation().map(|t| t.max_length);
        Ok((Tokenizer(Box::new(t), file), most))
    }

    impl Tokenizer {
        fn bad(&self, what: impl std::fmt::Display) -> Error {
            Error::Format { file: self.1.clone(), what: what.to_string() }
        }

        /// The tokens of each line, and the indices of the lines longer than `most`.
        pub(super) fn encode(
            &self,
            lines: &[String],
            most: Option<usize>,
        ) -> Result<(Vec<TokenizedLine>, Vec<usize>)> {
            let mut t = self.0.clone();
            // The caller pads the lines.
            t.with_padding(None);
            let special = t.encode("", true).map_err(|e| self.bad(e))?.len();
            if let Some(most) = most.filter(|m| *m <= special) {
                return Err(
                    self.bad(format!("{special} special tokens leave no room in lines of {most} tokens"))
                );
            }
            let cut = most.map(|max_length| TruncationParams {
                max_length,
                strategy: TruncationStrategy::LongestFirst,
                stride: 0,
                direction: self.0.get_truncation().map(|t| t.direction).unwrap_or_default(),
            });
            t.with_truncation(cut).map_err(|e| self.bad(e))?;
            let (mut out, mut long) = (Vec::with_capacity(lines.len()), vec![]);
            for (i, line) in lines.iter().enumerate() {
                let e =
                    t.encode(line.as_str(), true).map_err(|e| self.bad(format!("line {}: {e}", i + 1)))?;
                if !e.get_overflowing().is_empty() {
                    long.push(i);
                }
                out.push(TokenizedLine { ids: e.get_ids().to_vec(), types: e.get_type_ids().to_vec() });
            }
            Ok((out, long))
        }

        /// Id and type id of padding, and whether it precedes the text.
        pub(super) fn padding(&self) -> (u32, u32, bool) {
            match self.0.get_padding() {
                Some(p) => {
                    (p.pad_id, p.pad_type_id, matches!(p.direction, tokenizers::PaddingDirection::Left))
                }
                None => {
                    let id = ["[PAD]", "<pad>", "<|endoftext|>"].iter().find_map(|t| self.0.token_to_id(t));
                    (id.unwrap_or(0), 0, false)
                }
            }
        }
    }
}

#[cfg(not(feature = "text"))]
mod tokenizer {
    use super::TokenizedLine;
    use halcyon::{Error, Result};
    use std::path::Path;

    /// This build has no tokenizer.
    #[derive(Debug)]
    pub(crate) enum Tokenizer {}

    pub(crate) fn open(_: &Path) -> Result<(Tokenizer, Option<usize>)> {
        Err(Error::unsupported(
            "text as an input, in this build",
            "Build with --features text, or give token ids",
        ))
    }

    impl Tokenizer {
        pub(super) fn encode(
            &self,
            _: &[String],
            _: Option<usize>,
        ) -> Result<(Vec<TokenizedLine>, Vec<usize>)> {
            match *self {}
        }

        pub(super) fn padding(&self) -> (u32, u32, bool) {
            match *self {}
        }
    }
}

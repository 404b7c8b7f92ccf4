//! A language model with its text parts: decoder, tokenizer and chat template.

use crate::decoder::{Decoder, LoadOptions};
use crate::encoder::EncoderSpec;
use crate::placement::Placement;
use crate::source::{Folder, Source};
use crate::spec::Spec;
use halcyon::Backend;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::{Gguf, Metadata, Value};
use halcyon_text::{ChatTemplate, GgufTokenizer, Tokenizer};
use std::path::{Path, PathBuf};

/// The most bytes of a tokenizer file.
const MAX_TOKENIZER: u64 = 256 << 20;

/// An open model whose weights have not been read.
#[derive(Debug)]
pub struct ModelFile {
    pub path: PathBuf,
    pub source: Source,
    pub spec: Spec,
}

impl ModelFile {
    /// Opens a GGUF file or a folder and reads its configuration.
    ///
    /// # Errors
    /// Errors of reading; `Error::Unsupported` for an architecture that is not known.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let source = Source::open(path)?;
        let spec = crate::family::spec(&source)?;
        Ok(ModelFile { path: path.into(), source, spec })
    }

    /// Opens a decoder as [`ModelFile::open`] does, or an encoder. An encoder's `spec` is that of its layers:
    /// it is for adapters, and for writing files ([`crate::export`]), and [`ModelFile::load`] fails.
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`EncoderSpec::of`].
    pub fn open_any(path: &Path) -> Result<ModelFile> {
        let source = Source::open(path)?;
        let spec = match EncoderSpec::of(&source)? {
            Some(encoder) => encoder.body,
            None => crate::family::spec(&source)?,
        };
        Ok(ModelFile { path: path.into(), source, spec })
    }

    /// What the user should know before the model is loaded.
    ///
    /// # Errors
    /// Errors of reading the scales of quantised weights.
    pub fn warnings(&self) -> Result<Vec<String>> {
        self.source.warnings()
    }

    /// The model's tokenizer; `None` if it has none.
    ///
    /// # Errors
    /// Errors of a tokenizer that is malformed or not supported.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        tokenizer(&self.source)
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// `Error::Unsupported` if it has none; `Error::Format` for a malformed one.
    pub fn template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        if let Source::Folder(folder) = &self.source {
            let path = folder.path().join("chat_template.jinja");
            if path.is_file() {
                let text = read(&path)?;
                return ChatTemplate::new(&String::from_utf8_lossy(&text));
            }
        }
        ChatTemplate::of(tokenizer)
    }

    /// Loads the weights on a backend.
    ///
    /// # Errors
    /// The errors of [`Decoder::load`].
    pub fn load<'a>(&self, backend: &Backend, options: impl Into<LoadOptions<'a>>) -> Result<Decoder> {
        Decoder::load(backend, &self.source, self.spec.clone(), options)
    }

    /// Loads each part of the weights on its device.
    ///
    /// # Errors
    /// The errors of [`Decoder::load_on`].
    pub fn load_on<'a>(&self, placement: Placement, options: impl Into<LoadOptions<'a>>) -> Result<Decoder> {
        Decoder::load_on(placement, &self.source, self.spec.clone(), options)
    }

    /// Loads the first layer that predicts further tokens, for a decoder of this model with these options;
    /// `None` if the model has none. See [`crate::Speculation::ahead`].
    ///
    /// # Errors
    /// The errors of [`Decoder::load`].
    pub fn load_ahead<'a>(
        &self,
        decoder: &Decoder,
        options: impl Into<LoadOptions<'a>>,
    ) -> Result<Option<Decoder>> {
        decoder.load_ahead(&self.source, options)
    }
}

/// The tokenizer of a model; `None` if it has none.
pub(crate) fn tokenizer(source: &Source) -> Result<Option<Tokenizer>> {
    match source {
        Source::Gguf(file) => from_gguf(file),
        Source::Folder(folder) => from_folder(folder),
    }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let io = |e: std::io::Error| Error::Io { path: path.display().to_string(), what: e.to_string() };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_TOKENIZER {
        let what = format!("it has {size} bytes; at most {MAX_TOKENIZER} are read");
        return Err(Error::Format { file: path.display().to_string(), what });
    }
    std::fs::read(path).map_err(io)
}

pub(crate) fn from_folder(folder: &Folder) -> Result<Option<Tokenizer>> {
    let path = folder.path().join("tokenizer.json");
    if !path.is_file() {
        return Ok(None);
    }
    let config = folder.path().join("tokenizer_config.json");
    let config = config.is_file().then(|| read(&config)).transpose()?;
    Tokenizer::from_json(&read(&path)?, config.as_deref()).map(Some)
}

fn from_gguf(file: &Gguf) -> Result<Option<Tokenizer>> {
    gguf_tokenizer(file.metadata())?.map(Tokenizer::from_gguf).transpose()
}

/// The metadata of a GGUF file's tokenizer; `None` if it has none.
pub(crate) fn gguf_tokenizer(m: &Metadata) -> Result<Option<GgufTokenizer>> {
    let key = |k: &str| format!("tokenizer.ggml.{k}");
    let Some(model) = m.maybe(&key("model"), |m, k| m.str(k))? else { return Ok(None) };
    // llama.cpp's names for a file without a vocabulary.
    if ["none", "no_vocab"].contains(&model) {
        return Ok(None);
    }
    let text = |k: &str| Ok::<_, Error>(m.maybe(k, |m, k| m.str(k))?.map(str::to_string));
    let id = |k: &str| -> Result<Option<u32>> {
        let v = m.maybe(&key(k), Metadata::i64)?;
        // Some files store -1 for tokens that do not exist.
        Ok(v.and_then(|v| u32::try_from(v).ok()))
    };
    let flag = |k: &str| m.maybe(&key(k), Metadata::bool);
    Ok(Some(GgufTokenizer {
        model: model.into(),
        pre: text(&key("pre"))?,
        tokens: strings(m, &key("tokens"))?,
        scores: m.maybe(&key("scores"), Metadata::floats)?.unwrap_or_default(),
        types: m
            .maybe(&key("token_type"), Metadata::ints)?
            .unwrap_or_default()
            .into_iter()
            .map(|t| t as i32)
            .collect(),
        merges: strings(m, &key("merges"))?,
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        sep: id("seperator_token_id")?,
        pad: id("padding_token_id")?,
        mask: id("mask_token_id")?,
        fim_pad: id("fim_pad_token_id")?,
        fim_rep: id("fim_rep_token_id")?,
        fim_sep: id("fim_sep_token_id")?,
        add_bos: flag("add_bos_token")?,
        add_eos: flag("add_eos_token")?,
        add_space_prefix: flag("add_space_prefix")?,
        remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
        lowercase: m.maybe("tokenizer.ggml.normalizer.lowercase", Metadata::bool)?,
        strip_accents: m.maybe("tokenizer.ggml.normalizer.strip_accents", Metadata::bool)?,
        chat_template: text("tokenizer.chat_template")?,
        name: text("general.name")?,
        architecture: text("general.architecture")?,
        charsmap: m
            .maybe(&key("precompiled_charsmap"), Metadata::ints)?
            .unwrap_or_default()
            .into_iter()
            .map(|n| n as u8)
            .collect(),
    }))
}

/// An array of strings; empty if the key is absent. Bytes that are not UTF-8 become U+FFFD.
fn strings(m: &Metadata, key: &str) -> Result<Vec<String>> {
    use halcyon_formats::gguf::Array;
    match m.get(key) {
        None => Ok(vec![]),
        Some(Value::Array(Array::Bytes(v))) => {
            Ok(v.iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect())
        }
        Some(_) => Ok(m.strings(key)?.to_vec()),
    }
}

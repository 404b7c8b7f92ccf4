//! Tokenizers from a `tokenizer.json`, which the `tokenizers` crate runs.

use crate::bad;
use crate::bpe::chars_to_bytes;
use crate::special::Specials;
use crate::spm::SPACE;
use crate::tokenizer::{Engine, Tokenizer, byte_of};
use crate::vocab::{SpecialIds, Vocab, kind};
use halcyon_ir::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

/// How far ids may be beyond the number of tokens. Real vocabularies have small holes.
const MAX_HOLES: usize = 1 << 20;

/// How the vocabulary writes bytes that are not plain text.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Style {
    /// Printable characters stand for bytes.
    ByteLevel,
    /// ▁ stands for a space, and tokens such as `<0x0A>` for bytes.
    SentencePiece {
        strips_first_space: bool,
    },
    /// `##` continues a word, and all other tokens begin one.
    WordPiece,
    Plain,
}

pub(crate) struct JsonModel {
    /// Special tokens in the text become their ids.
    parsing: tokenizers::Tokenizer,
    /// They are plain text.
    plain: tokenizers::Tokenizer,
    style: Style,
}

impl std::fmt::Debug for JsonModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JsonModel({:?})", self.style)
    }
}

/// The part of a `tokenizer.json` that says how its tokens become text.
#[derive(Deserialize)]
struct Shape {
    #[serde(default)]
    decoder: Value,
}

/// The part of a `tokenizer_config.json` that is used here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    bos_token: Value,
    eos_token: Value,
    unk_token: Value,
    sep_token: Value,
    pad_token: Value,
    mask_token: Value,
    chat_template: Value,
}

impl JsonModel {
    pub(crate) fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let t = if parse_special { &self.parsing } else { &self.plain };
        let fail =
            |what: String| Error::argument("tokenizer.json", format!("a text cannot be encoded: {what}"));
        match guarded(|| t.encode_fast(text, add_special)) {
            Some(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Some(Err(e)) => Err(fail(e.to_string())),
            None => Err(fail("its rules are broken".into())),
        }
    }

    pub(crate) fn token_bytes(&self, text: &str) -> Vec<u8> {
        let own = || text.as_bytes().to_vec();
        match self.style {
            Style::ByteLevel => chars_to_bytes(text).unwrap_or_else(own),
            Style::SentencePiece { .. } => {
                byte_of(text).map_or_else(|| text.replace(SPACE, " ").into_bytes(), |b| vec![b])
            }
            Style::WordPiece => match text.strip_prefix("##") {
                Some(rest) => rest.as_bytes().to_vec(),
                None => format!(" {text}").into_bytes(),
            },
            Style::Plain => own(),
        }
    }

    pub(crate) fn strips_first_space(&self) -> bool {
        matches!(self.style, Style::WordPiece | Style::SentencePiece { strips_first_space: true })
    }
}

thread_local! {
    /// Whether this thread runs code whose panics are errors of a file.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of the `tokenizers` crate, which panics on some malformed files. `None` stands for a panic, of
/// which nothing is printed.
fn guarded<T>(f: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    // The hook must not be changed while a panic is under way.
    if !std::thread::panicking() {
        QUIET.call_once(|| {
            let hook = take_hook();
            set_hook(Box::new(move |p| {
                if !GUARDED.get() {
                    hook(p);
                }
            }));
        });
    }
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f)).ok();
    GUARDED.set(outer);
    result
}

impl Tokenizer {
    /// The tokenizer of a `tokenizer.json`, with the content of the `tokenizer_config.json` beside it.
    /// Without the latter, it is not known which tokens begin and end a text; tokens that end a generation
    /// are still known by their text.
    ///
    /// # Errors
    /// [`Error::Format`] if one of the two is malformed.
    pub fn from_json(json: &[u8], config: Option<&[u8]>) -> Result<Tokenizer> {
        let place = "tokenizer.json";
        // First, because this names the place of a mistake in the JSON.
        let shape: Shape = serde_json::from_slice(json).map_err(|e| bad(place, e))?;
        let mut parsing = match guarded(|| tokenizers::Tokenizer::from_bytes(json)) {
            Some(result) => result.map_err(|e| bad(place, e))?,
            None => return Err(bad(place, "its content contradicts itself")),
        };
        let config: Config = match config {
            Some(c) => serde_json::from_slice(c).map_err(|e| bad("tokenizer_config.json", e))?,
            None => Config::default(),
        };
        // Limits and fillers of batches are the caller's choice.
        parsing.with_truncation(None).map_err(|e| bad(place, e))?;
        parsing.with_padding(None);
        parsing.set_encode_special_tokens(false);
        let mut plain = parsing.clone();
        plain.set_encode_special_tokens(true);

        let mut vocab = vocab(&parsing)?;
        let id = |v: &Value| vocab.id(v.as_str().or_else(|| v.get("content")?.as_str())?);
        let mut ids = SpecialIds {
            bos: id(&config.bos_token),
            eos: id(&config.eos_token),
            unk: id(&config.unk_token),
            sep: id(&config.sep_token),
            pad: id(&config.pad_token),
            mask: id(&config.mask_token),
            ..SpecialIds::default()
        };
        vocab.find_ends(&mut ids, [None; 3]);
        let model = JsonModel { parsing, plain, style: style(&shape.decoder) };
        let mut t = Tokenizer::new(Engine::Json(Box::new(model)), vocab, Specials::default(), ids);
        t.chat_template = template(&config.chat_template);
        Ok(t)
    }
}

fn vocab(t: &tokenizers::Tokenizer) -> Result<Vocab> {
    let all = t.get_vocab(true);
    let size = all.values().max().map_or(0, |&m| m as usize + 1);
    if size > all.len() + MAX_HOLES {
        return Err(bad("tokenizer.json", format!("the largest id of {} tokens is {}", all.len(), size - 1)));
    }
    let mut tokens = vec![String::new(); size];
    for (text, id) in all {
        tokens[id as usize] = text;
    }
    let mut vocab = Vocab::new(tokens, &[])?;
    for (id, added) in t.get_added_tokens_decoder() {
        if let Some(k) = vocab.kind.get_mut(id as usize) {
            *k = if added.special { kind::CONTROL } else { kind::USER_DEFINED };
        }
    }
    Ok(vocab)
}

/// The chat template: a text, or a list of named ones of which `default` is the one for chats.
fn template(v: &Value) -> Option<String> {
    let named = |list: &Vec<Value>| {
        let default = list.iter().find(|t| t.get("name").is_some_and(|n| n == "default"));
        Some(default.or(list.first())?.get("template")?.as_str()?.to_string())
    };
    v.as_str().map(String::from).or_else(|| v.as_array().and_then(named))
}

fn style(decoder: &Value) -> Style {
    let mut kinds = vec![];
    collect(decoder, &mut kinds);
    let has = |kind: &str| kinds.contains(&kind);
    if has("ByteLevel") {
        Style::ByteLevel
    } else if has("WordPiece") {
        Style::WordPiece
    } else if has("ByteFallback") || has("Metaspace") || has("Replace") {
        Style::SentencePiece { strips_first_space: has("Strip") || has("Metaspace") }
    } else {
        Style::Plain
    }
}

fn collect<'a>(decoder: &'a Value, kinds: &mut Vec<&'a str>) {
    kinds.extend(decoder.get("type").and_then(Value::as_str));
    for d in decoder.get("decoders").and_then(Value::as_array).into_iter().flatten() {
        collect(d, kinds);
    }
}

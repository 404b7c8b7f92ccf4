//! `tokenizer.json` of the tokenizer of a GGUF file.

use crate::bad;
use crate::gguf::GgufTokenizer;
use crate::pre::Pre;
use crate::spm::SPACE;
use halcyon_ir::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Numbers of kinds of tokens in GGUF.
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

impl GgufTokenizer {
    /// The content of a `tokenizer.json` that cuts texts in the same way. It has no chat template.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model or a pre-tokenizer that is not known or cannot be written so;
    /// [`Error::Format`] for metadata that contradict each other.
    pub fn to_json(&self) -> Result<String> {
        let model = self.model.as_str();
        let parts = match model {
            "llama" => self.sentence_piece()?,
            "gpt2" | "gemma4" => self.pairs()?,
            "bert" => self.word_piece(),
            "t5" => self.unigram()?,
            other => {
                return Err(Error::unsupported(
                    format!("tokenizer '{other}' (tokenizer.ggml.model) as a tokenizer.json"),
                    "Take the tokenizer.json of the model's own folder",
                ));
            }
        };
        let whole = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": parts.normalizer,
            "pre_tokenizer": parts.pre,
            "post_processor": self.around()?,
            "decoder": parts.decoder,
            "model": parts.model,
        });
        serde_json::to_string(&whole).map_err(|e| Error::internal(e.to_string()))
    }

    fn kind(&self, id: usize) -> i32 {
        self.types.get(id).copied().unwrap_or(1)
    }

    /// Whether a place of the vocabulary has no token.
    fn is_hole(&self, id: usize) -> bool {
        self.kind(id) == UNUSED && self.tokens.get(id).is_some_and(|t| *t == format!("[PAD{id}]"))
    }

    /// The tokens that are found in a text before it is cut.
    fn added(&self) -> Vec<Value> {
        let one = |(id, text): (usize, &String)| {
            let unknown = Some(id) == self.unk.map(|n| n as usize);
            let kind = self.kind(id);
            (unknown || kind == CONTROL || kind == USER_DEFINED).then(|| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": kind != USER_DEFINED,
                })
            })
        };
        self.tokens.iter().enumerate().filter_map(one).collect()
    }

    fn token(&self, id: Option<u32>, key: &str) -> Result<(u32, &str)> {
        let found = id.and_then(|id| Some((id, self.tokens.get(id as usize)?.as_str())));
        found.ok_or_else(|| bad(&format!("tokenizer.ggml.{key}"), "texts need this token"))
    }

    /// The tokens around a text.
    fn around(&self) -> Result<Value> {
        let word_piece = self.model == "bert";
        let (add_bos, bos) = self.start()?;
        let add = (add_bos || word_piece, self.add_eos.unwrap_or(false) || word_piece);
        let first = add.0.then(|| self.token(bos, "bos_token_id")).transpose()?;
        let last = if word_piece { self.sep.or(Some(102)) } else { self.eos };
        let last = add.1.then(|| self.token(last, "eos_token_id")).transpose()?;
        if first.is_none() && last.is_none() {
            return Ok(Value::Null);
        }
        let special = |t: Option<(u32, &str)>, of: u32| {
            t.map(|(_, text)| json!({ "SpecialToken": { "id": text, "type_id": of } }))
        };
        let text = |id: &str, of: u32| Some(json!({ "Sequence": { "id": id, "type_id": of } }));
        let list = |all: Vec<Option<Value>>| all.into_iter().flatten().collect::<Vec<_>>();
        let single = list(vec![special(first, 0), text("A", 0), special(last, 0)]);
        let pair = list(vec![
            special(first, 0),
            text("A", 0),
            special(last, 0),
            if word_piece { None } else { special(first, 1) },
            text("B", 1),
            special(last, 1),
        ]);
        let known: Map<String, Value> = [first, last]
            .into_iter()
            .flatten()
            .map(|(id, t)| (t.to_string(), json!({ "id": t, "ids": [id], "tokens": [t] })))
            .collect();
        Ok(json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known }))
    }

    /// The tokens with their numbers.
    fn vocabulary(&self, text: impl Fn(usize, &str) -> String) -> Map<String, Value> {
        let all = self.tokens.iter().enumerate().filter(|(id, _)| !self.is_hole(*id));
        all.map(|(id, t)| (text(id, t), json!(id))).collect()
    }

    fn unknown(&self) -> Option<&str> {
        let id = self.unk.or_else(|| (self.model == "llama").then_some(0))?;
        self.tokens.get(id as usize).map(String::as_str)
    }

    /// Byte-pair encoding in the order of the scores.
    fn sentence_piece(&self) -> Result<Parts> {
        let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
        let prefix = self.add_space_prefix.unwrap_or(true);
        let normalizer = match prefix {
            true => {
                json!({ "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": SPACE }, space] })
            }
            false => space,
        };
        Ok(Parts {
            normalizer,
            pre: Value::Null,
            decoder: spaces(prefix),
            model: pair_model(
                self.vocabulary(|_, t| t.to_string()),
                self.merges_of_scores(),
                self.unknown(),
                true,
                false,
            ),
        })
    }

    /// Every way to make a token of two others, those of tokens with high scores first.
    fn merges_of_scores(&self) -> Vec<Value> {
        let ids: HashMap<&str, usize> =
            self.tokens.iter().enumerate().map(|(i, t)| (t.as_str(), i)).collect();
        let score = |id: usize| self.scores.get(id).copied().unwrap_or(0.0);
        let mut all: Vec<(usize, usize, usize)> = vec![];
        for (id, text) in self.tokens.iter().enumerate().filter(|(id, _)| self.kind(*id) == 1) {
            let mut own: Vec<(usize, usize)> = text
                .char_indices()
                .skip(1)
                .filter_map(|(at, _)| Some((*ids.get(&text[..at])?, *ids.get(&text[at..])?)))
                .collect();
            own.sort_unstable();
            all.extend(own.into_iter().map(|(l, r)| (id, l, r)));
        }
        all.sort_by(|a, b| score(b.0).total_cmp(&score(a.0)));
        all.into_iter().map(|(_, l, r)| json!([self.tokens[l], self.tokens[r]])).collect()
    }

    /// Byte-pair encoding with a list of merges.
    fn pairs(&self) -> Result<Parts> {
        let name = if self.model == "gemma4" { "gemma4" } else { self.pre.as_deref().unwrap_or("default") };
        let pre = Pre::named(name)?;
        let Some(patterns) = Pre::patterns(name)? else {
            return Err(Error::unsupported(
                format!("the pre-tokenizer '{name}' in a tokenizer.json"),
                "Take the tokenizer.json of the model's own folder",
            ));
        };
        let pair = |m: &String| m.split_once(' ').map(|(l, r)| json!([l, r]));
        // A merge of line ends or spaces has its space where it divides both.
        let merges: Option<Vec<Value>> = self.merges.iter().map(pair).collect();
        let merges = merges.ok_or_else(|| bad("tokenizer.ggml.merges", "a merge has no space"))?;
        let mut cuts: Vec<Value> = patterns
            .iter()
            .map(|p| json!({ "type": "Split", "pattern": { "Regex": p }, "behavior": "Isolated", "invert": false }))
            .collect();
        let bytes = |of: &str| json!({ "type": of, "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
        if pre.byte_level {
            cuts.push(bytes("ByteLevel"));
        }
        let vocabulary = self.vocabulary(|_, t| t.to_string());
        let (normalizer, decoder) = match pre.escape_space {
            true => {
                (json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE }), spaces(false))
            }
            false => (Value::Null, bytes("ByteLevel")),
        };
        let unknown = self.unknown().filter(|_| !pre.byte_level);
        Ok(Parts {
            normalizer,
            pre: json!({ "type": "Sequence", "pretokenizers": cuts }),
            decoder,
            model: pair_model(vocabulary, merges, unknown, !pre.byte_level, pre.ignore_merges),
        })
    }

    /// The longest tokens from the beginning of each word.
    fn word_piece(&self) -> Parts {
        // GGUF marks the beginning of a word, and tokenizer.json the other parts.
        let text = |id: usize, t: &str| match t.strip_prefix(SPACE) {
            Some(rest) => rest.to_string(),
            None if self.kind(id) == CONTROL || Some(id) == self.unk.map(|n| n as usize) => t.to_string(),
            None => format!("##{t}"),
        };
        let lower = self.lowercase.unwrap_or(true);
        Parts {
            normalizer: json!({
                "type": "BertNormalizer",
                "clean_text": true,
                "handle_chinese_chars": true,
                "strip_accents": self.strip_accents,
                "lowercase": lower,
            }),
            pre: json!({ "type": "BertPreTokenizer" }),
            decoder: json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
            model: json!({
                "type": "WordPiece",
                "unk_token": self.unknown().unwrap_or("[UNK]"),
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": self.vocabulary(text),
            }),
        }
    }

    /// The division with the largest sum of scores.
    fn unigram(&self) -> Result<Parts> {
        let vocab: Vec<Value> = self
            .tokens
            .iter()
            .enumerate()
            .map(|(i, t)| json!([t, self.scores.get(i).copied().unwrap_or(0.0)]))
            .collect();
        let mut steps: Vec<Value> = vec![];
        if !self.charsmap.is_empty() {
            steps.push(json!({ "type": "Precompiled", "precompiled_charsmap": base64(&self.charsmap) }));
        }
        if self.remove_extra_whitespaces.unwrap_or(false) {
            steps.push(json!({ "type": "Strip", "strip_left": true, "strip_right": true }));
            steps.push(json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " }));
        }
        let scheme = if self.add_space_prefix.unwrap_or(true) { "always" } else { "never" };
        let spaces = json!({
            "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": true,
        });
        Ok(Parts {
            normalizer: json!({ "type": "Sequence", "normalizers": steps }),
            pre: spaces.clone(),
            decoder: spaces,
            model: json!({
                "type": "Unigram", "unk_id": self.unk, "vocab": vocab, "byte_fallback": false,
            }),
        })
    }
}

/// The parts of a `tokenizer.json` that follow from the algorithm.
struct Parts {
    normalizer: Value,
    pre: Value,
    decoder: Value,
    model: Value,
}

/// Turns ▁ into spaces and byte tokens into bytes; the first space goes if the tokenizer put it there.
fn spaces(prefix: bool) -> Value {
    let mut all = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        all.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    json!({ "type": "Sequence", "decoders": all })
}

fn pair_model(
    vocab: Map<String, Value>,
    merges: Vec<Value>,
    unknown: Option<&str>,
    byte_fallback: bool,
    ignore_merges: bool,
) -> Value {
    json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unknown,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    })
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let n = three.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let digit = char::from(DIGITS[(n >> (18 - 6 * i) & 63) as usize]);
            out.push(if i <= three.len() { digit } else { '=' });
        }
    }
    out
}

/// The bytes of a text in base 64.
///
/// # Errors
/// [`Error::Format`] for another character.
pub fn from_base64(text: &str) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut n, mut bits) = (0u32, 0);
    for c in text.trim_end_matches('=').bytes() {
        let digit = DIGITS.iter().position(|d| *d == c);
        let digit = digit.ok_or_else(|| bad("precompiled_charsmap", "it is not in base 64"))?;
        (n, bits) = (n << 6 | digit as u32, bits + 6);
        if bits >= 8 {
            bits -= 8;
            out.push((n >> bits) as u8);
            n &= (1 << bits) - 1;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_64_returns() {
        for n in 0..20u8 {
            let bytes: Vec<u8> = (0..n).map(|i| i.wrapping_mul(83).wrapping_add(n)).collect();
            assert_eq!(from_base64(&base64(&bytes)).unwrap(), bytes);
        }
        assert_eq!(base64(b"Man"), "TWFu");
        assert_eq!(base64(b"M"), "TQ==");
        assert!(from_base64("a b").is_err());
    }
}

//! The tokenizer of a folder as metadata of a GGUF file.
//!
//! GGUF names an algorithm and, for byte-pair encoding, a way to cut texts into words; `tokenizer.json`
//! describes both. So each name is tried: the one with which a list of texts gets the same tokens is written.

use crate::model;
use crate::source::Folder;
use crate::spec::Spec;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::Value;
use halcyon_text::{GgufTokenizer, Tokenizer};
use serde_json::Value as Json;
use std::collections::HashMap;

/// Names of pre-tokenizers, those of common models first. One name for each behaviour.
const PRE: &[&str] = &[
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "smollm",
    "gpt-4o",
    "tekken",
    "dbrx",
    "qwen35",
    "default",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "falcon",
    "poro-chat",
    "viking",
    "chameleon",
    "bailingmoe",
    "seed-coder",
    "exaone-moe",
];

/// Texts whose tokens differ between ways to cut them.
const TEXTS: &[&str] = &[
    "Hello, world! It's 12345 o'clock; we'Ve 3.14 apples.",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n x",
    "  leading spaces, trailing spaces  ",
    "fn main() {\n\tprintln!(\"{}\", 1_000u64);\r\n}\n\n\nCamelCaseHTTPServer snake_case ABCdef",
    "3 33 333 3333 33333 333333 3333333 ۱۲۳ ٣٤٥",
    "Café naïve Ünïcödé нещо на Български 我想在apple工作1314151天～ កាន់តែ 日本語のテキスト 한국어",
    "🚀 (normal) 😶\u{200d}🌫️ ✅ ------======= ''''''```````\"\"\"\"......!!!!!!??????",
    "'s 't 're 've 'm 'll 'd 'S 'RE I'LL they'd /path/to//file?x=1&y=2#z",
];

/// What is known of the tokenizer.
struct Parts {
    tokens: Vec<String>,
    types: Vec<i32>,
    /// `left right`, in order.
    merges: Vec<String>,
    /// The ranks of the merges' results.
    scores: Vec<f32>,
}

/// The keys of the tokenizer. A folder without one, and one whose tokenizer GGUF cannot describe, gives a
/// file without vocabulary; the second result says why.
pub(super) fn of_folder(folder: &Folder, spec: &Spec) -> Result<(Vec<(String, Value)>, Option<String>)> {
    let none = || vec![("tokenizer.ggml.model".to_string(), Value::from("none"))];
    let (Some(json), Some(tokenizer)) = (folder.json("tokenizer.json")?, model::from_folder(folder)?) else {
        return Ok((none(), Some("the folder has no tokenizer.json, so the file has no tokenizer".into())));
    };
    let config = folder.json("tokenizer_config.json")?.unwrap_or(Json::Null);
    let kind = json["model"]["type"].as_str().unwrap_or("");
    let Some(parts) = parts(&json, spec.vocabulary) else {
        let why = format!("GGUF has no tokenizer of the type '{kind}', so the file has no tokenizer");
        return Ok((none(), Some(why)));
    };
    let base = common(&parts, &json, &config, &tokenizer, spec);
    for g in candidates(&json, &base, kind) {
        let Ok(own) = Tokenizer::from_gguf(g.clone()) else { continue };
        match compare(&tokenizer, &own, &g.model) {
            Tokens::Same => return Ok((keys(g, folder, &config)?, None)),
            Tokens::ButHangul => return Ok((keys(g, folder, &config)?, Some(HANGUL.into()))),
            Tokens::Differ(_) => {}
        }
    }
    let why = "no tokenizer of GGUF gives the same tokens as tokenizer.json, so the file has no tokenizer";
    Ok((none(), Some(why.into())))
}

/// The tokens by id, and the merges. `None` for a model without a vocabulary of this form.
fn parts(json: &Json, size: usize) -> Option<Parts> {
    let model = &json["model"];
    if let Some(pieces) = model["vocab"].as_array() {
        return unigram(json, pieces, size);
    }
    let vocabulary = model["vocab"].as_object()?;
    let id = |v: &Json| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < size);
    let mut tokens: Vec<String> = (0..size).map(|i| format!("[PAD{i}]")).collect();
    let mut types = vec![5; size];
    for (text, i) in vocabulary {
        let i = id(i)?;
        tokens[i].clone_from(text);
        let byte = text.len() == 6 && text.starts_with("<0x") && model["byte_fallback"] == true;
        types[i] = if byte { 6 } else { 1 };
        if model["unk_token"].as_str() == Some(text) {
            types[i] = 2;
        }
    }
    add_tokens(json, &mut tokens, &mut types)?;
    let pair = |m: &Json| match m {
        Json::String(s) => Some(s.clone()),
        Json::Array(v) => Some(format!("{} {}", v.first()?.as_str()?, v.get(1)?.as_str()?)),
        _ => None,
    };
    let merges: Vec<String> = match model["merges"].as_array() {
        Some(all) => all.iter().map(pair).collect::<Option<_>>()?,
        None => vec![],
    };
    let mut rank: HashMap<String, f32> = HashMap::new();
    for (i, m) in merges.iter().enumerate() {
        rank.entry(m.replacen(' ', "", 1)).or_insert(-(i as f32));
    }
    let worst = -(merges.len() as f32);
    let scores = tokens.iter().map(|t| rank.get(t).copied().unwrap_or(worst)).collect();
    Some(Parts { tokens, types, merges, scores })
}

/// Puts the tokens that are found before a text is cut in their places.
fn add_tokens(json: &Json, tokens: &mut [String], types: &mut [i32]) -> Option<()> {
    for t in json["added_tokens"].as_array().map_or(&[][..], |v| v) {
        let i = t["id"].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < tokens.len())?;
        tokens[i] = t["content"].as_str()?.into();
        types[i] = match (types[i], t["special"] == true) {
            (2, _) => 2,
            (_, true) => 3,
            (_, false) => 4,
        };
    }
    Some(())
}

/// The pieces of a unigram model with their scores.
fn unigram(json: &Json, pieces: &[Json], size: usize) -> Option<Parts> {
    if pieces.len() > size {
        return None;
    }
    let mut tokens: Vec<String> = (0..size).map(|i| format!("[PAD{i}]")).collect();
    let (mut types, mut scores) = (vec![5; size], vec![-10_000f32; size]);
    for (i, p) in pieces.iter().enumerate() {
        tokens[i] = p[0].as_str()?.into();
        scores[i] = p[1].as_f64()? as f32;
        let byte =
            json["model"]["byte_fallback"] == true && tokens[i].len() == 6 && tokens[i].starts_with("<0x");
        types[i] = if byte { 6 } else { 1 };
    }
    if let Some(t) = json["model"]["unk_id"].as_u64().and_then(|n| types.get_mut(n as usize)) {
        *t = 2;
    }
    add_tokens(json, &mut tokens, &mut types)?;
    Some(Parts { tokens, types, merges: vec![], scores })
}

/// The characters' map of a normaliser, wherever it is in the list.
fn charsmap(normalizer: &Json) -> Vec<u8> {
    let own = normalizer["precompiled_charsmap"].as_str().and_then(|t| halcyon_text::from_base64(t).ok());
    let inner = || normalizer["normalizers"].as_array()?.iter().map(charsmap).find(|c| !c.is_empty());
    own.or_else(inner).unwrap_or_default()
}

/// The text of a special token of `tokenizer_config.json`.
fn special(config: &Json, key: &str) -> Option<String> {
    let v = &config[key];
    v.as_str().or_else(|| v["content"].as_str()).map(String::from)
}

fn common(parts: &Parts, json: &Json, config: &Json, tokenizer: &Tokenizer, spec: &Spec) -> GgufTokenizer {
    let id = |key: &str| {
        let text = special(config, key)?;
        parts.tokens.iter().position(|t| *t == text).map(|i| i as u32)
    };
    let known = tokenizer.special_ids();
    // The tokens around a text are those that the tokenizer adds.
    let around = tokenizer.encode("a", true, false).unwrap_or_default();
    let bare = tokenizer.encode("a", false, false).unwrap_or_default();
    let before = around.windows(bare.len().max(1)).position(|w| w == bare).unwrap_or(0);
    let after = around.len().saturating_sub(before + bare.len());
    let first = around.first().copied().filter(|_| before == 1);
    let last = around.last().copied().filter(|_| after == 1);
    let bos = first.or(id("bos_token")).or(known.bos);
    let eos = last.or(id("eos_token")).or(known.eos);
    let unk = json["model"]["unk_id"].as_u64().and_then(|n| u32::try_from(n).ok());
    let text = json["model"]["unk_token"].as_str();
    let unk = unk.or(text.and_then(|t| parts.tokens.iter().position(|own| own == t)).map(|i| i as u32));
    GgufTokenizer {
        tokens: parts.tokens.clone(),
        types: parts.types.clone(),
        bos,
        eos,
        unk: id("unk_token").or(unk),
        sep: id("sep_token").or(last.filter(|_| json["model"]["type"] == "WordPiece")),
        pad: id("pad_token"),
        mask: id("mask_token"),
        add_bos: Some(first.is_some()),
        add_eos: Some(last.is_some()),
        architecture: Some(spec.family.into()),
        ..GgufTokenizer::default()
    }
}

/// The tokenizers of GGUF that may be meant.
fn candidates(json: &Json, base: &GgufTokenizer, kind: &str) -> Vec<GgufTokenizer> {
    let parts = parts(json, base.tokens.len());
    let (merges, scores) = parts.map(|p| (p.merges, p.scores)).unwrap_or_default();
    let of = |model: &str| GgufTokenizer { model: model.into(), ..base.clone() };
    match kind {
        "BPE" if json["model"]["byte_fallback"] == true => {
            let one = |space| GgufTokenizer {
                scores: scores.clone(),
                add_space_prefix: Some(space),
                ..of("llama")
            };
            let merged = || GgufTokenizer { merges: merges.clone(), ..of("gemma4") };
            vec![one(true), one(false), merged()]
        }
        "Unigram" => {
            let one = |model: &str, space: bool, trim: bool| GgufTokenizer {
                scores: scores.clone(),
                add_space_prefix: Some(space),
                remove_extra_whitespaces: Some(trim),
                charsmap: if model == "t5" { charsmap(&json["normalizer"]) } else { vec![] },
                ..of(model)
            };
            let ways = [(true, true), (true, false), (false, true), (false, false)];
            ["llama", "t5"].iter().flat_map(|m| ways.map(|(space, trim)| one(m, space, trim))).collect()
        }
        "BPE" => {
            let one = |pre: &&str| GgufTokenizer {
                merges: merges.clone(),
                pre: Some(pre.to_string()),
                ..of("gpt2")
            };
            PRE.iter().map(one).collect()
        }
        "WordPiece" => {
            // GGUF marks the beginning of a word, and tokenizer.json the other parts.
            let marked = |(t, kind): (&String, &i32)| match (t.strip_prefix("##"), kind) {
                (Some(rest), _) => rest.to_string(),
                (None, 1) => format!("▁{t}"),
                (None, _) => t.clone(),
            };
            let tokens = base.tokens.iter().zip(&base.types).map(marked).collect();
            let lower = json["normalizer"]["lowercase"].as_bool();
            let strip = json["normalizer"]["strip_accents"].as_bool();
            let (cls, sep) = (base.bos, base.sep.or(base.eos));
            vec![GgufTokenizer {
                tokens,
                lowercase: lower,
                strip_accents: strip,
                bos: cls,
                sep,
                ..of("bert")
            }]
        }
        _ => vec![],
    }
}

/// How the tokens of a `tokenizer.json` and of a GGUF file compare.
#[derive(Debug, PartialEq)]
pub(super) enum Tokens {
    Same,
    /// Those of Hangul differ: files of WordPiece are read as llama.cpp reads them, which keeps only the
    /// first letter of each syllable.
    ButHangul,
    /// Those of this text differ.
    Differ(String),
}

/// What a user should know about [`Tokens::ButHangul`].
pub(super) const HANGUL: &str = "Korean texts get other tokens from the GGUF file than from tokenizer.json: with accents \
     stripped, WordPiece in GGUF keeps only the first letter of each Hangul syllable, as in llama.cpp";

/// Compares the tokens of [`TEXTS`]. `model` is the algorithm that the file names.
pub(super) fn compare(json: &Tokenizer, file: &Tokenizer, model: &str) -> Tokens {
    let differ = |text: &String| {
        [true, false].iter().any(|add| match (json.encode(text, *add, true), file.encode(text, *add, true)) {
            (Ok(a), Ok(b)) => a != b,
            _ => true,
        })
    };
    let Some(text) = TEXTS.iter().map(|t| t.to_string()).find(differ) else { return Tokens::Same };
    let hangul = |c: &char| matches!(c, '\u{ac00}'..='\u{d7a3}');
    let mut rest = TEXTS.iter().map(|t| t.chars().filter(|c| !hangul(c)).collect());
    match model == "bert" && !rest.any(|t| differ(&t)) {
        true => Tokens::ButHangul,
        false => Tokens::Differ(text),
    }
}

fn keys(g: GgufTokenizer, folder: &Folder, config: &Json) -> Result<Vec<(String, Value)>> {
    let mut all: Vec<(String, Value)> = vec![];
    let mut add = |key: &str, v: Option<Value>| all.extend(v.map(|v| (format!("tokenizer.ggml.{key}"), v)));
    let number = |v: Option<u32>| v.map(Value::from);
    add("model", Some(g.model.clone().into()));
    add("pre", g.pre.map(Value::from));
    add("tokens", Some(g.tokens.into()));
    add("scores", Some(g.scores).filter(|s| !s.is_empty()).map(Value::from));
    add("token_type", Some(g.types.into()));
    add("merges", Some(g.merges).filter(|m| !m.is_empty()).map(Value::from));
    add("bos_token_id", number(g.bos));
    add("eos_token_id", number(g.eos));
    add("unknown_token_id", number(g.unk));
    add("seperator_token_id", number(g.sep));
    add("padding_token_id", number(g.pad));
    add("mask_token_id", number(g.mask));
    add("add_bos_token", g.add_bos.map(Value::from));
    add("add_eos_token", g.add_eos.map(Value::from));
    add("add_space_prefix", g.add_space_prefix.map(Value::from));
    add("remove_extra_whitespaces", g.remove_extra_whitespaces.filter(|_| g.model == "t5").map(Value::from));
    add("precompiled_charsmap", Some(g.charsmap).filter(|c| !c.is_empty()).map(Value::from));
    add("normalizer.lowercase", g.lowercase.map(Value::from));
    add("normalizer.strip_accents", g.strip_accents.map(Value::from));
    if let Some(t) = template(folder, config)? {
        all.push(("tokenizer.chat_template".into(), t.into()));
    }
    Ok(all)
}

/// The chat template of the folder.
fn template(folder: &Folder, config: &Json) -> Result<Option<String>> {
    let path = folder.path().join("chat_template.jinja");
    if path.is_file() {
        let text = model::read(&path)?;
        let bad = |_| Error::Format { file: path.display().to_string(), what: "it is not UTF-8".into() };
        return String::from_utf8(text).map(Some).map_err(bad);
    }
    let v = &config["chat_template"];
    // Several templates are a list with names.
    let named = v.as_array().and_then(|all| all.iter().find(|t| t["name"] == "default"));
    let text = v.as_str().or_else(|| named?["template"].as_str());
    Ok(text.map(String::from))
}

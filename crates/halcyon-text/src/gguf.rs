//! Tokenizers from the metadata of a GGUF file.

use crate::bad;
use crate::bpe::Bpe;
use crate::pre::Pre;
use crate::special::{Specials, Strip};
use crate::spm::Spm;
use crate::tokenizer::{Engine, Tokenizer};
use crate::vocab::{SpecialIds, Vocab, kind};
use crate::wordpiece::{Normalizer, WordPiece};
use halcyon_ir::{Error, Result};
use std::collections::HashMap;

/// The metadata of a GGUF file that describe its tokenizer. Each field is a key below `tokenizer.ggml.`,
/// unless it says otherwise. A key that the file lacks is empty or `None`.
#[derive(Clone, Debug, Default)]
pub struct GgufTokenizer {
    /// `model`: `llama`, `gpt2`, `gemma4`, `bert` or `t5`.
    pub model: String,
    /// `pre`: how a text is cut into words, for `gpt2`.
    pub pre: Option<String>,
    /// `tokens`.
    pub tokens: Vec<String>,
    /// `scores`, for `llama` and `t5`.
    pub scores: Vec<f32>,
    /// `token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub types: Vec<i32>,
    /// `merges`, for `gpt2` and `gemma4`: two texts with a space between them.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `eot_token_id`.
    pub eot: Option<u32>,
    /// `eom_token_id`.
    pub eom: Option<u32>,
    /// `unknown_token_id`.
    pub unk: Option<u32>,
    /// `seperator_token_id`, as the format spells it.
    pub sep: Option<u32>,
    /// `padding_token_id`.
    pub pad: Option<u32>,
    /// `mask_token_id`.
    pub mask: Option<u32>,
    /// `fim_pad_token_id`.
    pub fim_pad: Option<u32>,
    /// `fim_rep_token_id`.
    pub fim_rep: Option<u32>,
    /// `fim_sep_token_id`.
    pub fim_sep: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `remove_extra_whitespaces`, for `t5`.
    pub remove_extra_whitespaces: Option<bool>,
    /// `precompiled_charsmap`, for `t5`: how characters are normalised, in SentencePiece's format.
    pub charsmap: Vec<u8>,
    /// `normalizer.lowercase`, for `bert`.
    pub lowercase: Option<bool>,
    /// `normalizer.strip_accents`, for `bert`.
    pub strip_accents: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// `general.name`. The special tokens of some models, known by their name, swallow white space.
    pub name: Option<String>,
    /// `general.architecture`, for the same reason.
    pub architecture: Option<String>,
}

/// What the kind of a model implies where the metadata say nothing.
struct Defaults {
    ids: SpecialIds,
    add_bos: bool,
    add_space_prefix: bool,
}

/// The algorithm that the metadata name.
enum Model {
    Spm,
    Bpe(Pre),
    WordPiece,
    Unigram,
}

impl Model {
    fn of(g: &GgufTokenizer) -> Result<Model> {
        match g.model.as_str() {
            "llama" => Ok(Model::Spm),
            "bert" => Ok(Model::WordPiece),
            "t5" => Ok(Model::Unigram),
            "gpt2" => Ok(Model::Bpe(Pre::named(g.pre.as_deref().unwrap_or("default"))?)),
            "gemma4" => Ok(Model::Bpe(Pre::named("gemma4")?)),
            other => Err(Error::unsupported(
                format!("tokenizer '{other}' (tokenizer.ggml.model)"),
                "Known are llama, gpt2, gemma4, bert and t5. Use a model with one of them, or its \
                 tokenizer.json",
            )),
        }
    }

    fn defaults(&self, g: &GgufTokenizer) -> Defaults {
        let none = SpecialIds::default();
        match self {
            Model::Spm => Defaults {
                ids: SpecialIds { bos: Some(1), eos: Some(2), unk: Some(0), ..none },
                add_bos: true,
                add_space_prefix: true,
            },
            Model::WordPiece => Defaults {
                ids: SpecialIds {
                    bos: Some(101),
                    unk: Some(100),
                    sep: Some(102),
                    pad: Some(0),
                    mask: Some(103),
                    ..none
                },
                add_bos: true,
                add_space_prefix: false,
            },
            Model::Unigram => Defaults {
                ids: SpecialIds { eos: Some(1), unk: Some(2), ..none },
                add_bos: false,
                add_space_prefix: true,
            },
            Model::Bpe(pre) => {
                let usual = (g.model == "gpt2").then_some(11);
                let ids = SpecialIds { bos: usual.filter(|_| !pre.no_bos), eos: usual, ..none };
                Defaults { ids, add_bos: pre.add_bos, add_space_prefix: false }
            }
        }
    }
}

impl Tokenizer {
    /// The tokenizer of a GGUF file. Its ids are those of llama.cpp.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model or a pre-tokenizer that is not known, [`Error::Format`] for
    /// metadata that contradict each other. The error names the key.
    pub fn from_gguf(g: GgufTokenizer) -> Result<Tokenizer> {
        let model = Model::of(&g)?;
        if matches!(model, Model::Unigram) {
            return unigram(&g);
        }
        let defaults = model.defaults(&g);
        let mut vocab = Vocab::new(g.tokens, &g.types)?;
        let valid = |id: Option<u32>| id.filter(|&id| (id as usize) < vocab.len());
        let pick = |given: Option<u32>, default: Option<u32>| valid(given).or(valid(default));
        let mut ids = SpecialIds {
            bos: pick(g.bos, defaults.ids.bos),
            eos: pick(g.eos, defaults.ids.eos),
            eot: valid(g.eot),
            eom: valid(g.eom),
            unk: pick(g.unk, defaults.ids.unk),
            sep: pick(g.sep, defaults.ids.sep),
            pad: pick(g.pad, defaults.ids.pad),
            mask: pick(g.mask, defaults.ids.mask),
        };
        let fill = [valid(g.fim_pad), valid(g.fim_rep), valid(g.fim_sep)];
        vocab.find_ends(&mut ids, fill);
        // Conversions of Gemma 4 deny the token at the beginning, but the model needs it.
        let needs_bos = matches!(&model, Model::Bpe(pre) if pre.whole_newlines);
        let add_bos = needs_bos || g.add_bos.unwrap_or(defaults.add_bos);
        let add_eos = g.add_eos.unwrap_or(false);
        let word_piece = matches!(model, Model::WordPiece);
        let required = [
            (add_bos || word_piece, ids.bos, "bos_token_id"),
            (add_eos && !word_piece, ids.eos, "eos_token_id"),
            (word_piece, ids.sep, "seperator_token_id"),
        ];
        for (needed, id, key) in required {
            if needed && id.is_none() {
                let place = format!("tokenizer.ggml.{key}");
                return Err(bad(&place, "texts need this token, but the vocabulary has no token of this id"));
            }
        }
        let strip = strip(&vocab, &g.name, &g.architecture, g.pre.as_deref());
        let engine = match model {
            Model::Spm => Engine::Spm(Spm::new(&vocab, &g.scores, ids.unk)?),
            Model::Bpe(pre) => {
                if g.merges.is_empty() {
                    return Err(bad(
                        "tokenizer.ggml.merges",
                        "the file has no merges; convert the model again",
                    ));
                }
                Engine::Bpe(Box::new(Bpe::new(&vocab, pre, &g.merges)?))
            }
            Model::Unigram => return Err(Error::internal("a unigram model is made above")),
            Model::WordPiece => {
                let lowercase = g.lowercase.unwrap_or(true);
                let n = Normalizer { lowercase, strip_accents: g.strip_accents.unwrap_or(lowercase) };
                Engine::WordPiece(WordPiece::new(&vocab, n, ids.unk))
            }
        };
        let specials = Specials::new(&vocab, strip);
        let mut t = Tokenizer::new(engine, vocab, specials, ids);
        (t.add_bos, t.add_eos) = (add_bos, add_eos);
        t.space_prefix = g.add_space_prefix.unwrap_or(defaults.add_space_prefix);
        t.chat_template = g.chat_template;
        Ok(t)
    }
}

/// The tokenizer of SentencePiece's unigram models: the same as that of the `tokenizer.json` that it means.
fn unigram(g: &GgufTokenizer) -> Result<Tokenizer> {
    let text = |id: Option<u32>| id.and_then(|id| g.tokens.get(id as usize));
    let config = serde_json::json!({
        "bos_token": text(g.bos), "eos_token": text(g.eos), "unk_token": text(g.unk),
        "sep_token": text(g.sep), "pad_token": text(g.pad), "mask_token": text(g.mask),
        "chat_template": g.chat_template,
    });
    Tokenizer::from_json(g.to_json()?.as_bytes(), Some(config.to_string().as_bytes()))
}

impl GgufTokenizer {
    /// Whether texts begin with a token, and that token.
    pub(crate) fn start(&self) -> Result<(bool, Option<u32>)> {
        let model = Model::of(self)?;
        let defaults = model.defaults(self);
        let needs = matches!(&model, Model::Bpe(pre) if pre.whole_newlines);
        let add = needs || self.add_bos.unwrap_or(defaults.add_bos);
        Ok((add, self.bos.or(defaults.ids.bos)))
    }
}

/// Tokens that swallow white space beside them. GGUF does not say which, so llama.cpp knows them by the name
/// of the model.
fn strip(
    vocab: &Vocab,
    name: &Option<String>,
    architecture: &Option<String>,
    pre: Option<&str>,
) -> HashMap<u32, Strip> {
    let name = name.as_deref().unwrap_or("").to_lowercase();
    let architecture = architecture.as_deref().unwrap_or("");
    let left = Strip { left: true, right: false };
    let one = |text: &str| vocab.id(text).map(|id| (id, left)).into_iter().collect();
    let jina = ["jina-v2-de", "jina-v2-es", "jina-v2-code"];
    if pre.is_some_and(|p| jina.iter().any(|j| p.contains(j)))
        || ["nomic-bert-moe", "jina-bert-v3"].iter().any(|a| architecture.contains(a))
    {
        one("<mask>")
    } else if name.contains("phi-3") || name.contains("phi3") {
        let bits = kind::CONTROL | kind::USER_DEFINED | kind::UNKNOWN;
        let kept = ["<unk>", "<s>", "<|endoftext|>"];
        let swallows = |&id: &u32| vocab.is(id, bits) && !kept.contains(&vocab.text[id as usize].as_str());
        let right = Strip { left: false, right: true };
        (0..vocab.len() as u32).filter(swallows).map(|id| (id, right)).collect()
    } else if name.contains("modern-bert") {
        one("[MASK]")
    } else {
        HashMap::new()
    }
}

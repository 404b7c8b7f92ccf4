//! Tokens with their kinds, and the tokens that end a generation.

use crate::bad;
use halcyon_ir::Result;
use hashbrown::DefaultHashBuilder;
use hashbrown::hash_table::{Entry, HashTable};
use std::collections::BTreeSet;
use std::hash::BuildHasher;

/// Kinds of a token, as bits. A token may have several.
pub(crate) mod kind {
    pub(crate) const NORMAL: u8 = 1;
    pub(crate) const UNKNOWN: u8 = 2;
    pub(crate) const CONTROL: u8 = 4;
    pub(crate) const USER_DEFINED: u8 = 8;
    pub(crate) const BYTE: u8 = 16;

    /// The kind that GGUF stores as a number. Unused and undefined tokens have none.
    pub(crate) fn from_gguf(n: i32) -> u8 {
        match n {
            1 => NORMAL,
            2 => UNKNOWN,
            3 => CONTROL,
            4 => USER_DEFINED,
            6 => BYTE,
            _ => 0,
        }
    }
}

/// The tokens with a role. A role that a model lacks is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Ends a turn of a chat.
    pub eot: Option<u32>,
    /// Ends a message that is not the end of the turn.
    pub eom: Option<u32>,
    /// Stands for text that the vocabulary cannot express.
    pub unk: Option<u32>,
    /// Separates two texts.
    pub sep: Option<u32>,
    /// Fills a batch.
    pub pad: Option<u32>,
    /// Hides a token.
    pub mask: Option<u32>,
}

/// Texts of tokens that end a turn, most usual first (llama.cpp: end-of-turn tokens found by text).
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Texts of tokens that end a generation (llama.cpp: end-of-generation tokens found by text).
const END: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Texts of tokens for code completion. The padding, the repository and the file separator also end a
/// generation; the others are only control tokens.
const FILL_END: &[&[&str]] = &[
    &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    &["<|file_sep|>"],
];
const FILL: &[&[&str]] = &[
    &[
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ],
    &[
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ],
    &[
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ],
];

/// Tokens of the Harmony format that are shown even where control tokens are not.
const SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The tokens of a model.
#[derive(Debug, Default)]
pub(crate) struct Vocab {
    pub(crate) text: Vec<String>,
    pub(crate) kind: Vec<u8>,
    /// The tokens by their text.
    ids: HashTable<u32>,
    hash: DefaultHashBuilder,
    ends: BTreeSet<u32>,
}

impl Vocab {
    /// # Errors
    /// [`halcyon_ir::Error::Format`] if there are no tokens or too many, if two have the same text, or if
    /// there are fewer kinds than tokens.
    pub(crate) fn new(tokens: Vec<String>, types: &[i32]) -> Result<Vocab> {
        let place = "tokenizer.ggml.tokens";
        if tokens.is_empty() || tokens.len() > i32::MAX as usize {
            return Err(bad(place, format!("a vocabulary needs 1 to 2^31 - 1 tokens, not {}", tokens.len())));
        }
        if !types.is_empty() && types.len() < tokens.len() {
            return Err(bad("tokenizer.ggml.token_type", few(types.len(), tokens.len())));
        }
        let mut v = Vocab { ids: HashTable::with_capacity(tokens.len()), ..Vocab::default() };
        v.text.reserve(tokens.len());
        for (i, mut text) in tokens.into_iter().enumerate() {
            // Text is never equal to an empty token. It gets a name, so that several can be told apart.
            if text.is_empty() {
                text = format!("[EMPTY_{i}]");
            }
            let Vocab { text: texts, ids, hash, .. } = &mut v;
            let same = |&id: &u32| texts[id as usize] == text;
            let rehash = |&id: &u32| hash.hash_one(texts[id as usize].as_str());
            match ids.entry(hash.hash_one(text.as_str()), same, rehash) {
                Entry::Vacant(e) => _ = e.insert(i as u32),
                Entry::Occupied(e) => {
                    let first = *e.get();
                    let what = format!("'{text}' is token {first} and token {i}; remove one of them");
                    return Err(bad(place, what));
                }
            }
            v.text.push(text);
            v.kind.push(types.get(i).map_or(kind::NORMAL, |&t| kind::from_gguf(t)));
        }
        Ok(v)
    }

    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        let same = |&id: &u32| self.text[id as usize] == text;
        self.ids.find(self.hash.hash_one(text), same).copied()
    }

    pub(crate) fn is(&self, id: u32, bits: u8) -> bool {
        self.kind.get(id as usize).is_some_and(|k| k & bits != 0)
    }

    /// Length in bytes of the longest token.
    pub(crate) fn max_len(&self) -> usize {
        self.text.iter().map(String::len).max().unwrap_or(0)
    }

    /// The token `<0x0A>` for byte 10, or the token whose text is the byte.
    pub(crate) fn byte_token(&self, byte: u8) -> Option<u32> {
        let ascii = || byte.is_ascii().then(|| self.id((byte as char).encode_utf8(&mut [0; 4])))?;
        self.id(&format!("<0x{byte:02X}>")).or_else(ascii)
    }

    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// All tokens that end a generation.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u32> {
        self.ends.iter().copied()
    }

    /// Finds the tokens that end a generation: those with that role, and those known by their text. Models
    /// often mark these tokens as normal text; they become control tokens here, as in llama.cpp. `fill` are
    /// the tokens that the model itself names as padding, repository and file separator for code completion.
    pub(crate) fn find_ends(&mut self, ids: &mut SpecialIds, fill: [Option<u32>; 3]) {
        if ids.eot.is_none() {
            ids.eot = self.control_by_text(END_OF_TURN);
        }
        if ids.eom.is_none() {
            ids.eom = self.control_by_text(&["<|eom_id|>"]);
        }
        for texts in FILL {
            self.control_by_text(texts);
        }
        for (texts, named) in FILL_END.iter().zip(fill) {
            let id = named.or_else(|| self.control_by_text(texts));
            self.ends.extend(id);
        }
        for text in END {
            let id = self.control_by_text(&[text]);
            self.ends.extend(id);
        }
        for text in SHOWN {
            if let Some(id) = self.id(text) {
                self.kind[id as usize] = kind::USER_DEFINED;
            }
        }
        self.ends.extend([ids.eos, ids.eot, ids.eom].into_iter().flatten());
        self.drop_false_ends();
    }

    /// Where a model has other tokens for the end, `<|end|>` and `</s>` are only parts of the text.
    fn drop_false_ends(&mut self) {
        let ends = |v: &Vocab, text: &str| v.id(text).is_some_and(|id| v.is_end(id));
        let calls = ends(self, "<|call|>") || ends(self, "<|calls|>");
        let harmony = calls && (ends(self, "<|return|>") || ends(self, "<|flush|>"));
        if let Some(id) = self.id("<|end|>").filter(|&id| self.is_end(id) && harmony) {
            self.ends.remove(&id);
            self.kind[id as usize] = kind::USER_DEFINED;
        }
        let tools = ends(self, "<|tool_response>");
        if let Some(id) = self.id("</s>").filter(|&id| self.is_end(id) && tools) {
            self.ends.remove(&id);
            self.kind[id as usize] = kind::NORMAL;
        }
    }

    /// The first of these tokens that exists, made a control token.
    fn control_by_text(&mut self, texts: &[&str]) -> Option<u32> {
        let id = texts.iter().find_map(|t| self.id(t))?;
        self.kind[id as usize] |= kind::CONTROL;
        Some(id)
    }
}

/// What is wrong with a list that is shorter than the list of tokens.
pub(crate) fn few(found: usize, tokens: usize) -> String {
    format!("{found} entries for {tokens} tokens; convert the model again")
}

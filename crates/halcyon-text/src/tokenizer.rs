//! From text to token ids and back.

use crate::bpe::{Bpe, chars_to_bytes};
use crate::json::JsonModel;
use crate::special::{Part, Specials};
use crate::spm::{SPACE, Spm, escape_space};
use crate::vocab::{SpecialIds, Vocab, kind};
use crate::wordpiece::WordPiece;
use halcyon_ir::{Error, Result};
use std::ops::Deref;

/// Longest text in bytes. Positions in it are counted in 32 bits, and ▁ takes three times the space it stands
/// for.
const MAX_TEXT: usize = 1 << 30;

#[derive(Debug)]
pub(crate) enum Engine {
    Spm(Spm),
    Bpe(Box<Bpe>),
    WordPiece(WordPiece),
    Json(Box<JsonModel>),
}

/// Turns text into token ids and token ids into text. It can be shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    engine: Engine,
    vocab: Vocab,
    specials: Specials,
    ids: SpecialIds,
    pub(crate) add_bos: bool,
    pub(crate) add_eos: bool,
    /// A space is put before a text that does not follow other text.
    pub(crate) space_prefix: bool,
    pub(crate) chat_template: Option<String>,
}

impl Tokenizer {
    pub(crate) fn new(engine: Engine, vocab: Vocab, specials: Specials, ids: SpecialIds) -> Tokenizer {
        Tokenizer {
            engine,
            vocab,
            specials,
            ids,
            add_bos: false,
            add_eos: false,
            space_prefix: false,
            chat_template: None,
        }
    }

    /// The token ids of a text. `add_special` adds the tokens that the model expects around a text.
    /// `parse_special` makes the ids of special tokens from their text, as for a rendered chat template; do
    /// not set it for text from a user, who could then forge a turn of the chat.
    ///
    /// # Errors
    /// [`Error::Argument`] for a text of more than 1 GiB, or if a `tokenizer.json` fails on the text.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        if text.len() > MAX_TEXT {
            let what = format!("the text has {} bytes, but at most {MAX_TEXT} are allowed", text.len());
            return Err(Error::argument("tokenizer", what));
        }
        if let Engine::Json(model) = &self.engine {
            return model.encode(text, add_special, parse_special);
        }
        let word_piece = matches!(self.engine, Engine::WordPiece(_));
        let mut out = Vec::with_capacity(text.len() / 4 + 2);
        if add_special && (self.add_bos || word_piece) {
            out.extend(self.ids.bos);
        }
        let mut after_token = true;
        for part in self.specials.split(text, parse_special) {
            match part {
                Part::Token(id) => out.push(id),
                Part::Text(text) => self.encode_text(text, after_token, &mut out),
            }
            after_token = matches!(part, Part::Token(_));
        }
        if add_special && word_piece {
            out.extend(self.ids.sep);
        } else if add_special && self.add_eos {
            out.extend(self.ids.eos);
        }
        Ok(out)
    }

    fn encode_text(&self, text: &str, after_token: bool, out: &mut Vec<u32>) {
        match &self.engine {
            Engine::Bpe(bpe) => bpe.encode(text, out),
            Engine::WordPiece(wp) => wp.encode(text, out),
            Engine::Spm(spm) => {
                let mut escaped = escape_space(text);
                if self.space_prefix && after_token {
                    escaped.insert_str(0, SPACE);
                }
                spm.encode(&self.vocab, &escaped, out);
            }
            Engine::Json(_) => {}
        }
    }

    /// The text of token ids. Bytes that are not UTF-8 become U+FFFD. With `skip_special`, control tokens and
    /// the unknown token give no text. A space that the tokenizer put before the text is removed.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = vec![];
        let mut at_start = match &self.engine {
            Engine::Json(model) => model.strips_first_space(),
            Engine::WordPiece(_) => true,
            _ => self.space_prefix,
        };
        for &id in ids {
            if skip_special && self.is_special(id) {
                continue;
            }
            let piece = self.token_bytes(id);
            let text = match at_start {
                true => piece.strip_prefix(b" ").unwrap_or(&piece),
                false => &piece,
            };
            at_start = false;
            bytes.extend_from_slice(text);
        }
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }

    /// The bytes that a token stands for. They need not be whole characters. A token that the vocabulary
    /// lacks, or that is not used, stands for none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(text) = self.vocab.text.get(id as usize) else { return vec![] };
        if self.vocab.is(id, kind::UNKNOWN | kind::CONTROL | kind::USER_DEFINED) {
            return text.clone().into_bytes();
        }
        if let Engine::Json(model) = &self.engine {
            return model.token_bytes(text);
        }
        if self.vocab.is(id, kind::BYTE) {
            return byte_of(text).map_or_else(|| text.clone().into_bytes(), |b| vec![b]);
        }
        if !self.vocab.is(id, kind::NORMAL) {
            return vec![];
        }
        match &self.engine {
            Engine::Bpe(bpe) if !bpe.pre.escape_space => {
                chars_to_bytes(text).unwrap_or_else(|| text.clone().into_bytes())
            }
            _ => text.replace(SPACE, " ").into_bytes(),
        }
    }

    /// Starts decoding token by token, as for text that is being generated.
    pub fn stream(&self, skip_special: bool) -> Stream<&Tokenizer> {
        Stream::new(self, skip_special)
    }

    /// The text of a token as the vocabulary writes it.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text.get(id as usize).map(String::as_str)
    }

    /// The token with this text in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }

    /// The tokens that have a role.
    pub fn special_ids(&self) -> SpecialIds {
        self.ids
    }

    /// Whether a token is a control token or the unknown token.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.is(id, kind::CONTROL | kind::UNKNOWN)
    }

    /// Whether a token ends a generation: the end of the text, of a turn or of a message, or a token that is
    /// known to do so by its text.
    pub fn is_end(&self, id: u32) -> bool {
        self.vocab.is_end(id)
    }

    /// All tokens that end a generation, in order.
    pub fn end_ids(&self) -> Vec<u32> {
        self.vocab.ends().collect()
    }

    /// Number of tokens. Ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The chat template of the file that the tokenizer was read from.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}

/// The byte of a token such as `<0x0A>`.
pub(crate) fn byte_of(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Decodes token by token. It holds bytes back until they are a whole character. `T` is a reference to the
/// tokenizer, or an `Arc` of it.
#[derive(Debug)]
pub struct Stream<T> {
    tokenizer: T,
    skip_special: bool,
    pending: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> Stream<T> {
    /// Starts decoding. `skip_special`: control tokens have no text.
    pub fn new(tokenizer: T, skip_special: bool) -> Stream<T> {
        Stream { tokenizer, skip_special, pending: vec![] }
    }

    /// The whole characters that are known after this token. Bytes that can never become a character give
    /// U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        if !(self.skip_special && self.tokenizer.is_special(id)) {
            self.pending.extend(self.tokenizer.token_bytes(id));
        }
        let mut out = String::new();
        let mut at = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            at += chunk.valid().len();
            let invalid = chunk.invalid();
            // The beginning of a character at the end may be completed by the next token.
            let incomplete = std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if incomplete && at + invalid.len() == self.pending.len() {
                break;
            }
            if !invalid.is_empty() {
                out.push('\u{fffd}');
                at += invalid.len();
            }
        }
        self.pending.drain(..at);
        out
    }

    /// What is left at the end of the text: nothing, or U+FFFD for an incomplete character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

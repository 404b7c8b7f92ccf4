//! `halcyon perplexity`: how well a model predicts a text.

use super::{MEASURE, start};
use crate::args::PerplexityArgs;
use crate::report;
use halcyon::{Error, Result};
use halcyon_models::Feed;
use halcyon_text::Tokenizer;
use serde_json::json;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Positions of a window unless the user chooses them.
const WINDOW: usize = 512;
/// The most bytes of a text whose tokens are made at once, which takes many times their memory.
const PIECE: usize = 16 << 20;

pub(crate) fn main(a: &PerplexityArgs) -> Result<u8> {
    let file = open(&a.text)?;
    let window = a.language.cache.context.filter(|n| *n > 0).unwrap_or(WINDOW);
    if window < 2 {
        return Err(Error::argument("--context", "a window has at least 2 positions"));
    }
    let mut m = start(&a.language, Some(window), MEASURE)?;
    let tokenizer = m.take_tokenizer()?;
    let ids = tokens_of((&a.text, file), &tokenizer, PIECE)?;
    if ids.len() < 3 {
        return Err(Error::argument("perplexity", "the text is too short; give a longer one (--file)"));
    }
    if ids.len() < window {
        let what =
            format!("the text has {} tokens, and a window {window}; choose a smaller --context", ids.len());
        return Err(Error::argument("perplexity", what));
    }
    let vocabulary = m.engine.decoder().spec.vocabulary;
    let bos = tokenizer.special_ids().bos.filter(|b| ids.first() == Some(b));
    let (mut sum, mut count) = (0f64, 0usize);
    let windows = ids.len() / window;
    let mut progress = report::Progress::bar("windows", windows as u64);
    for part in ids.chunks_exact(window) {
        // Each window begins as a text does.
        let mut fed = part.to_vec();
        if let Some(b) = bos {
            fed[0] = b;
        }
        m.engine.truncate(0, 0);
        let z = m.engine.feed(&[Feed { sequence: 0, tokens: &fed, all: true }])?.pop().unwrap_or_default();
        for at in window / 2..window - 1 {
            sum -= log_probability(&z[at * vocabulary..(at + 1) * vocabulary], part[at + 1] as usize);
            count += 1;
        }
        progress.step();
    }
    progress.finish();
    let perplexity = (sum / count.max(1) as f64).exp();
    if a.json {
        let backend = m.devices();
        report::print_json(&json!({
            "perplexity": perplexity, "tokens": count, "windows": windows, "window": window, "backend": backend,
            "placement": m.placement,
        }))?;
    } else {
        report::print(&format!("{perplexity:.4}\n"))?;
        report::note(&format!("{count} tokens predicted in {windows} windows of {window}"));
    }
    Ok(0)
}

fn io(path: &Path, e: std::io::Error) -> Error {
    Error::Io { path: path.display().to_string(), what: e.to_string() }
}

fn open(path: &Path) -> Result<File> {
    let file = File::open(path).map_err(|e| io(path, e))?;
    match file.metadata().map_err(|e| io(path, e))?.is_dir() {
        true => Err(io(path, std::io::Error::new(ErrorKind::IsADirectory, "this is a folder"))),
        false => Ok(file),
    }
}

/// The tokens of a text file. Pieces of at most `most` bytes become tokens one after the other.
fn tokens_of((path, mut file): (&Path, File), tokenizer: &Tokenizer, most: usize) -> Result<Vec<u32>> {
    let (mut ids, mut text, mut begun, mut before) = (vec![], vec![], false, 0u64);
    loop {
        let room = (most - text.len()) as u64;
        let read = file.by_ref().take(room).read_to_end(&mut text).map_err(|e| io(path, e))?;
        let last = (read as u64) < room;
        let end = if last { text.len() } else { end_of_piece(&text) };
        let piece = std::str::from_utf8(&text[..end]).map_err(|e| Error::Format {
            file: path.display().to_string(),
            what: format!("byte {} is not part of a text (not valid UTF-8)", before + e.valid_up_to() as u64),
        })?;
        let mut new = tokenizer.encode(piece, !begun, false)?;
        // The text goes on.
        if !last && !begun && new.last().is_some_and(|t| tokenizer.special_ids().eos == Some(*t)) {
            new.pop();
        }
        ids.extend(new);
        if last {
            return Ok(ids);
        }
        (begun, before) = (true, before + end as u64);
        text.drain(..end);
    }
}

/// Where a piece of a longer text ends: after the last line end before a line that begins with no space,
/// because tokens reach over spaces; else before the last whole character.
fn end_of_piece(text: &[u8]) -> usize {
    let begins = |i: &usize| text[i - 1] == b'\n' && !text[*i].is_ascii_whitespace();
    let whole = || (1..text.len()).rev().find(|i| text[*i] & 0xc0 != 0x80);
    (1..text.len()).rev().find(begins).or_else(whole).unwrap_or(text.len())
}

/// The logarithm of the softmax's element `at`.
fn log_probability(z: &[f32], at: usize) -> f64 {
    let top = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = z.iter().map(|v| f64::from(v - top).exp()).sum();
    f64::from(z[at] - top) - sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_lines_and_never_in_characters() {
        assert_eq!(end_of_piece(b"ab\ncd\n  ef\n"), 3);
        assert_eq!(end_of_piece(b"ab\n\ncd"), 4);
        assert_eq!(end_of_piece("abé".as_bytes()), 2);
        assert_eq!(end_of_piece(b"\x80\x80"), 2);
    }

    #[test]
    fn a_text_has_the_same_tokens_in_pieces() {
        let json = br#"{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
            "pre_tokenizer": {"type": "Whitespace"}, "decoder": null, "model": {"type": "WordLevel",
            "vocab": {"[UNK]": 0, "the": 1, "fox": 2, "sang": 3}, "unk_token": "[UNK]"}}"#;
        let t = Tokenizer::from_json(json, None).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text.txt");
        let tokens = |most| tokens_of((&path, open(&path).unwrap()), &t, most);
        let text = "the fox sang\n the fox\n\nsang the é fox\n".repeat(9);
        std::fs::write(&path, &text).unwrap();
        let want = tokens(PIECE).unwrap();
        assert_eq!(want, t.encode(&text, true, false).unwrap());
        assert_eq!(want.len(), 9 * 9);
        for most in [40, 64, 100, text.len(), text.len() + 1] {
            assert_eq!(tokens(most).unwrap(), want, "{most}");
        }
        // The place of a byte counts from the beginning of the file.
        std::fs::write(&path, [text.as_bytes(), b"\xff"].concat()).unwrap();
        let e = tokens(40).unwrap_err().to_string();
        assert!(e.contains(&format!("byte {}", text.len())), "{e}");
        assert!(open(dir.path()).is_err());
    }
}

//! The bodies of the fuzz targets for language models. `halcyon-models` runs them on mutated inputs, too.

use halcyon_models::{Constraint, Source, TokenMask, family};
use halcyon_text::{ChatTemplate, Error, GgufTokenizer, Message, RenderOptions, Result, Tokenizer};
use std::path::Path;
use std::sync::LazyLock;

/// Checks an error: the file is at fault, not Halcyon.
fn allowed<T>(r: Result<T>) -> Option<T> {
    match r {
        Ok(v) => Some(v),
        Err(e) => {
            assert!(!matches!(e, Error::Internal(_)), "{e}");
            assert!((1..=5).contains(&e.exit_code()) && !e.to_string().is_empty());
            None
        }
    }
}

/// A token for each byte, and some of several bytes.
static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| {
    let mut tokens: Vec<String> = vec!["<unk>".into(), "</s>".into()];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["{\"", "\":", "true", "ab", "日本"].map(String::from));
    let kind = |i: usize| match i {
        0 => 2,
        1 => 3,
        2..258 => 6,
        _ => 1,
    };
    let g = GgufTokenizer {
        model: "llama".into(),
        types: (0..tokens.len()).map(kind).collect(),
        scores: vec![0.0; tokens.len()],
        tokens,
        eos: Some(1),
        unk: Some(0),
        ..GgufTokenizer::default()
    };
    Tokenizer::from_gguf(g).expect("a valid vocabulary")
});

/// Generates some tokens, which depend on the input. Returns the text if the constraint lets it end.
fn follow(mut c: Constraint, data: &[u8]) -> Option<String> {
    let mut tokens = vec![];
    let start = std::time::Instant::now();
    // The work for one token is bounded, not that for a text, so a slow text is not followed to its end.
    for k in (0..24usize).take_while(|_| start.elapsed().as_secs() < 2) {
        let mask = allowed(c.allowed())?;
        let may = |t: &u32| mask[*t as usize / 32] >> (t % 32) & 1 == 1;
        let all: Vec<u32> = (2..mask.len() as u32 * 32).filter(may).collect();
        // Nothing but the end may follow.
        if all.is_empty() {
            break;
        }
        let choice = usize::from(data[(k * 7) % data.len()]) + k;
        let token = all[choice % all.len()];
        assert!(allowed(c.push(token))?, "an allowed token is refused");
        tokens.push(token);
    }
    c.may_end().then(|| BYTES.decode(&tokens, false))
}

/// A grammar in GBNF or Lark.
pub fn grammar(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(c) = allowed(Constraint::grammar(text, &BYTES)) {
        follow(c, data);
    }
}

/// A JSON schema. What satisfies it must be JSON.
pub fn json_schema(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(c) = allowed(Constraint::json_schema(text, &BYTES))
        && let Some(text) = follow(c, data)
    {
        let _: serde_json::Value = serde_json::from_str(&text).expect("a complete text is JSON");
    }
}

/// A chat template.
pub fn template(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(t) = allowed(ChatTemplate::new(text)) {
        let messages = [Message::new("system", "be brief"), Message::new("user", "hé")];
        let options = RenderOptions { add_generation_prompt: true, now: Some(0), ..RenderOptions::default() };
        allowed(t.render(&messages, &options));
    }
}

/// A `tokenizer.json`.
pub fn tokenizer(data: &[u8]) {
    if let Some(t) = allowed(Tokenizer::from_json(data, None)) {
        let ids = allowed(t.encode("Ab é 12\n", true, true)).unwrap_or_default();
        t.decode(&ids, true);
        ids.iter().for_each(|id| drop(t.token_bytes(*id)));
    }
}

/// The index of a folder's safetensors files, and its configuration, with a zero byte between. `folder` is an
/// existing folder for them.
pub fn folder(folder: &Path, data: &[u8]) {
    let cut = data.iter().position(|b| *b == 0).unwrap_or(data.len());
    let config = data.get(cut + 1..).unwrap_or(b"{}");
    let written = std::fs::write(folder.join("model.safetensors.index.json"), &data[..cut])
        .and_then(|()| std::fs::write(folder.join("config.json"), config));
    written.expect("the folder can be written");
    if let Some(source) = allowed(Source::open(folder)) {
        allowed(family::spec(&source));
    }
}

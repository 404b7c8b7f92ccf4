//! The files of a folder's tokenizer, from the metadata of a GGUF file.

use super::vocabulary::{HANGUL, Tokens, compare};
use crate::model;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::gguf::Metadata;
use halcyon_text::{GgufTokenizer, Tokenizer};
use serde_json::{Value as Json, json};

/// The files with their names, and what is missing. They are written only if they give the same tokens as the
/// GGUF file.
pub(super) fn of_metadata(m: &Metadata) -> Result<(Vec<(&'static str, Json)>, Option<String>)> {
    let Some(g) = model::gguf_tokenizer(m)? else { return Ok((vec![], None)) };
    let without = |why: String| {
        let next = "take its tokenizer.json from the model's own folder";
        Ok((vec![], Some(format!("the folder has no tokenizer: {why}; {next}"))))
    };
    let text = match g.to_json() {
        Ok(text) => text,
        Err(e @ Error::Unsupported { .. }) => return without(e.to_string()),
        Err(e) => return Err(e),
    };
    let config = config(&g);
    let bytes = serde_json::to_vec(&config).map_err(|e| Error::internal(e.to_string()))?;
    let (model, made) = (g.model.clone(), Tokenizer::from_json(text.as_bytes(), Some(&bytes))?);
    let warning = match compare(&made, &Tokenizer::from_gguf(g)?, &model) {
        Tokens::Same => None,
        Tokens::ButHangul => Some(HANGUL.into()),
        Tokens::Differ(t) => {
            return without(format!("no tokenizer.json gives the same tokens for '{}'", t.escape_debug()));
        }
    };
    let json: Json = serde_json::from_str(&text).map_err(|e| Error::internal(e.to_string()))?;
    Ok((vec![("tokenizer.json", json), ("tokenizer_config.json", config)], warning))
}

/// `tokenizer_config.json`.
fn config(g: &GgufTokenizer) -> Json {
    let text = |id: Option<u32>| id.and_then(|id| g.tokens.get(id as usize));
    let roles = [
        ("bos_token", g.bos),
        ("eos_token", g.eos),
        ("unk_token", g.unk),
        ("sep_token", g.sep),
        ("pad_token", g.pad),
        ("mask_token", g.mask),
    ];
    let mut c =
        json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
    for (role, id) in roles {
        if let Some(t) = text(id) {
            c[role] = json!(t);
        }
    }
    if g.model == "bert" {
        // The tokens around a text have other names there.
        c["cls_token"] = json!(text(g.bos.or(Some(101))));
        c["sep_token"] = json!(text(g.sep.or(Some(102))));
    }
    c
}

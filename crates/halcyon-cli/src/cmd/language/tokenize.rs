//! `halcyon tokenize`: the tokens of a text.

use super::{hub, text_or_stdin, tokenizer};
use crate::args::TokenizeArgs;
use crate::report;
use halcyon::Result;
use halcyon_models::ModelFile;
use serde_json::json;

pub(crate) fn main(a: &TokenizeArgs) -> Result<u8> {
    let t = tokenizer(&ModelFile::open(&hub::local(&a.model, &a.hub)?)?)?;
    let ids = t.encode(&text_or_stdin(&a.text)?, a.add_special, a.parse_special)?;
    let piece = |id: u32| String::from_utf8_lossy(&t.token_bytes(id)).into_owned();
    if a.json {
        let pieces: Vec<String> = ids.iter().map(|i| piece(*i)).collect();
        report::print_json(&json!({ "tokens": ids, "pieces": pieces }))?;
    } else {
        let lines: Vec<String> = ids.iter().map(|i| format!("{i:>7}  {:?}\n", piece(*i))).collect();
        report::print(&lines.concat())?;
    }
    Ok(0)
}

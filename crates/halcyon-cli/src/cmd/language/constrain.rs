//! `--grammar` and `--json-schema`.

use crate::args::SamplingArgs;
use halcyon::{Error, Result};
use halcyon_formats::input;
use halcyon_models::{Constraint, TokenMask, constrain};
use halcyon_text::Tokenizer;
use std::path::Path;

/// What the user demands of the text.
pub(super) enum Demand {
    Grammar(String),
    Schema(String),
}

/// The demand of the options. It is checked before the model is loaded.
pub(super) fn demand(a: &SamplingArgs) -> Result<Option<Demand>> {
    if let Some(arg) = &a.grammar {
        let text = file_or_text("--grammar", arg, arg.contains(':'))?;
        constrain::check_grammar(&text)?;
        return Ok(Some(Demand::Grammar(text)));
    }
    let Some(arg) = &a.json_schema else { return Ok(None) };
    let text = arg.trim();
    let is_text = text.starts_with('{') || ["true", "false"].contains(&text);
    let text = file_or_text("--json-schema", arg, is_text)?;
    constrain::check_json_schema(&text)?;
    Ok(Some(Demand::Schema(text)))
}

fn file_or_text(option: &str, arg: &str, is_text: bool) -> Result<String> {
    match (Path::new(arg).is_file(), is_text) {
        (false, true) => Ok(arg.into()),
        (true, _) => input::text(Path::new(arg)),
        (false, false) => {
            let what = format!("'{arg}' is neither a file nor a text of the right form");
            Err(Error::argument(option, what))
        }
    }
}

impl Demand {
    /// The mask of a generation with a model of this tokenizer.
    pub(super) fn mask(&self, tokenizer: Option<&Tokenizer>) -> Result<Box<dyn TokenMask>> {
        let Some(t) = tokenizer else {
            let next = "Put tokenizer.json into the folder.";
            return Err(Error::unsupported("a grammar or a schema with a model without a tokenizer", next));
        };
        Ok(Box::new(match self {
            Demand::Grammar(text) => Constraint::grammar(text, t)?,
            Demand::Schema(text) => Constraint::json_schema(text, t)?,
        }))
    }
}

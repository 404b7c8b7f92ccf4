//! Editing of messages on a terminal, and their history.

use super::{Typed, complete, typed};
use crate::args::ChatArgs;
use crate::report;
use halcyon::{Error, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};
use std::path::PathBuf;

/// Messages that the history keeps.
const KEPT: usize = 1000;

/// An editor of messages with their history.
pub(super) struct Editing {
    editor: Editor<Lines, FileHistory>,
    /// The file of the history.
    history: Option<PathBuf>,
}

/// Tells the editor when a message is complete.
struct Lines;

impl Completer for Lines {
    type Candidate = String;
}
impl Hinter for Lines {
    type Hint = String;
}
impl Highlighter for Lines {}
impl Helper for Lines {}

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

/// The file of the history; `None` for no history.
fn history_file(a: &ChatArgs) -> Option<PathBuf> {
    let set = std::env::var_os("HALCYON_CHAT_HISTORY").filter(|v| !v.is_empty());
    match set {
        _ if a.no_history => None,
        Some(off) if off == "off" => None,
        Some(file) => Some(file.into()),
        None => Some(halcyon::hal::cache::user_dir()?.join("chats").join("history")),
    }
}

impl Editing {
    /// Opens the history. One that cannot be read is a warning, as is a terminal that cannot be used.
    pub(super) fn open(a: &ChatArgs) -> Option<Editing> {
        let config = Config::builder().history_ignore_space(true).max_history_size(KEPT);
        let mut editor = match config.and_then(|c| Editor::with_config(c.build())) {
            Ok(e) => e,
            Err(e) => {
                report::warn(&format!("messages cannot be edited: {e}"));
                return None;
            }
        };
        editor.set_helper(Some(Lines));
        let mut history = history_file(a);
        if let Some(file) = history.as_ref().filter(|f| f.exists())
            && let Err(e) = editor.load_history(file)
        {
            report::warn(&format!("the history {} cannot be read: {e}", report::path_text(file)));
            history = None;
        }
        Some(Editing { editor, history })
    }

    /// The next message; `None` at the end of the input.
    pub(super) fn next(&mut self) -> Result<Option<Typed>> {
        loop {
            match self.editor.readline("> ") {
                Ok(text) => {
                    // A message that begins with a space is not kept, nor one that is repeated.
                    if let Ok(true) = self.editor.add_history_entry(text.as_str()) {
                        self.keep();
                    }
                    return Ok(Some(typed(&text)));
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) => report::note("Ctrl-D or /quit ends the chat"),
                Err(ReadlineError::Signal(_)) => {}
                Err(e) => return Err(Error::Io { path: "standard input".into(), what: e.to_string() }),
            }
        }
    }

    /// Writes new messages to the history, at once, so that no end of the program loses them.
    fn keep(&mut self) {
        let Some(file) = &self.history else { return };
        let made = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        let kept = made.map_err(ReadlineError::Io).and_then(|()| self.editor.append_history(file));
        if let Err(e) = kept {
            report::warn(&format!("the history {} cannot be written: {e}", report::path_text(file)));
            self.history = None;
        }
    }
}

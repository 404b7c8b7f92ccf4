//! The messages that a user types: with the feature `edit` and on a terminal with editing and a history, else
//! line by line.

#[cfg(feature = "edit")]
mod edit;

use super::write_piece;
use crate::args::ChatArgs;
use halcyon::{Error, Result};
use std::io::{BufRead, IsTerminal};

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// A message, or a command of the chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Typed {
    pub text: String,
    /// Whether it stood between quotes, and so is no command.
    pub quoted: bool,
}

/// Whether a message needs no further line.
fn complete(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => rest.trim_end().ends_with(QUOTES),
        None => !text.ends_with('\\'),
    }
}

/// The message of a complete text: without the quotes around it, or the \ before ends of lines.
fn typed(text: &str) -> Typed {
    let quoted = text.trim().strip_prefix(QUOTES).and_then(|t| t.strip_suffix(QUOTES));
    let inner = quoted.map(|t| t.strip_prefix('\n').unwrap_or(t).trim_end_matches('\n').to_string());
    Typed { quoted: inner.is_some(), text: inner.unwrap_or_else(|| text.replace("\\\n", "\n")) }
}

/// Where messages come from.
pub(super) struct Input {
    #[cfg(feature = "edit")]
    editing: Option<edit::Editing>,
    /// Whether a user types the messages.
    pub terminal: bool,
}

impl Input {
    #[cfg(feature = "edit")]
    pub(super) fn open(a: &ChatArgs) -> Input {
        let terminal = std::io::stdin().is_terminal();
        // The editor writes to standard output.
        let both = terminal && std::io::stdout().is_terminal();
        Input { editing: both.then(|| edit::Editing::open(a)).flatten(), terminal }
    }

    #[cfg(not(feature = "edit"))]
    pub(super) fn open(_: &ChatArgs) -> Input {
        Input { terminal: std::io::stdin().is_terminal() }
    }

    /// The next message; `None` at the end of the input.
    ///
    /// # Errors
    /// `Error::Io` if the input cannot be read.
    pub(super) fn next(&mut self) -> Result<Option<Typed>> {
        #[cfg(feature = "edit")]
        if let Some(editing) = &mut self.editing {
            return editing.next();
        }
        plain(self.terminal)
    }
}

/// The next message without an editor. Standard input may be a terminal, whose user is prompted.
fn plain(terminal: bool) -> Result<Option<Typed>> {
    let mut text = String::new();
    loop {
        if terminal {
            write_piece(if text.is_empty() { "> " } else { "… " });
        }
        let mut line = String::new();
        let n = std::io::stdin().lock().read_line(&mut line);
        let n = n.map_err(|e| Error::Io { path: "standard input".into(), what: e.to_string() })?;
        if n == 0 {
            // The end of the input ends the message, too.
            return Ok((!text.is_empty()).then(|| typed(text.trim_end_matches('\n'))));
        }
        text += line.trim_end_matches(['\n', '\r']);
        if complete(&text) {
            return Ok(Some(typed(&text)));
        }
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_several_lines_with_quotes_or_a_backslash() {
        for (text, message, quoted) in [
            ("hello", "hello", false),
            ("a\\\nb", "a\nb", false),
            ("\"\"\"a\nb\"\"\"", "a\nb", true),
            (" \"\"\"\na\n\nb\\\n\"\"\" ", "a\n\nb\\", true),
            ("\"\"\"/one\"\"\"", "/one", true),
            ("say \"\"\"", "say \"\"\"", false),
            ("", "", false),
        ] {
            assert!(complete(text), "{text}");
            assert_eq!(typed(text), Typed { text: message.into(), quoted }, "{text}");
        }
        for open in ["a\\", "\"\"\"", "\"\"\"a\nb", "\"\"\"a\"\" "] {
            assert!(!complete(open), "{open}");
        }
    }
}

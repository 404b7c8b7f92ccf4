//! The messages that a user types: with the feature `edit` and on a terminal with editing and a history, else
//! line by line.

#[cfg(feature = "edit")]
mod edit;

use super::write_piece;
use crate::args::ChatArgs;
use halcyon::{Error, Result};
use std::io::{BufRead, IsTerminal};

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
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        #[cfg(feature = "edit")]
        if let Some(editing) = &mut self.editing {
            return editing.next();
        }
        plain(self.terminal)
    }
}

/// The next message without an editor. Standard input may be a terminal, whose user is prompted.
fn plain(terminal: bool) -> Result<Option<String>> {
    let mut text = String::new();
    loop {
        if terminal {
            write_piece(if text.is_empty() { "> " } else { "… " });
        }
        let mut line = String::new();
        let n = std::io::stdin().lock().read_line(&mut line);
        let n = n.map_err(|e| Error::Io { path: "standard input".into(), what: e.to_string() })?;
        if n == 0 {
            return Ok((!text.is_empty()).then_some(text));
        }
        let line = line.trim_end_matches(['\n', '\r']);
        match line.strip_suffix('\\') {
            Some(begun) => text += &format!("{begun}\n"),
            None => return Ok(Some(text + line)),
        }
    }
}

//! Settings of the command line, which are added to the table of a configuration file.

use halcyon::ir::error::{Error, Result};
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One `key=value`.
#[derive(Debug)]
pub(super) struct Setting<'a> {
    text: &'a str,
    key: &'a str,
    value: &'a str,
    /// The TOML span of all keys and values of this setting. No other setting and no part of the file has
    /// this span, so that the span of an error tells whether the error is in this setting.
    span: Range<usize>,
}

fn bad<T>(what: String) -> Result<T> {
    Err(Error::argument("--set", what))
}

/// Splits settings into keys and values. Setting `i` gets the span from `first + i` to `first + i + 1`;
/// `first` must be past the end of the file.
pub(super) fn parse<'a>(settings: &'a [String], first: usize) -> Result<Vec<Setting<'a>>> {
    let one = |(i, text): (usize, &'a String)| match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok(Setting { text, key: key.trim(), value, span: first + i..first + i + 1 })
        }
        _ => bad(format!("`{text}` is not of the form key=value, as in optimizer.rate=0.01")),
    };
    settings.iter().enumerate().map(one).collect()
}

impl<'a> Setting<'a> {
    /// The setting as it was given.
    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    /// Whether the span of an error is the span of this setting.
    pub(super) fn has(&self, span: &Range<usize>) -> bool {
        *span == self.span
    }

    /// The value: TOML, or text without quotes.
    fn value(&self) -> DeValue<'a> {
        match DeValue::parse(self.value.trim()) {
            Ok(v) => self.placed(v.into_inner()),
            Err(_) => DeValue::String(self.value.into()),
        }
    }

    /// A value with the setting's span in all its parts.
    fn placed(&self, v: DeValue<'a>) -> DeValue<'a> {
        let place = |v: Spanned<DeValue<'a>>| Spanned::new(self.span.clone(), self.placed(v.into_inner()));
        match v {
            DeValue::Array(a) => DeValue::Array(a.into_iter().map(place).collect()),
            DeValue::Table(t) => {
                let key = |k: Spanned<_>| Spanned::new(self.span.clone(), k.into_inner());
                DeValue::Table(t.into_iter().map(|(k, v)| (key(k), place(v))).collect())
            }
            other => other,
        }
    }

    /// Adds the setting to a table. The setting replaces the value that the key already has.
    pub(super) fn apply(&self, table: &mut DeTable<'a>) -> Result<()> {
        let key = |part: &'a str| Spanned::new(self.span.clone(), part.into());
        let (mut table, mut parts) = (table, self.key.split('.').peekable());
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.remove(part);
                table.insert(key(part), Spanned::new(self.span.clone(), self.value()));
                return Ok(());
            }
            let empty = || Spanned::new(self.span.clone(), DeValue::Table(DeTable::new()));
            table = match table.entry(key(part)).or_insert_with(empty).get_mut() {
                DeValue::Table(t) => t,
                _ => return bad(format!("`{part}` of `{}` is a value, not a table", self.key)),
            };
        }
        Ok(())
    }
}

//! What the readers of both grammar notations share: a place in a text, and rules with names.

use super::grammar::{Expr, Grammar};
use halcyon::ir::error::{Error, Result};
use std::collections::HashMap;

/// The most nested groups.
pub(super) const MAX_DEPTH: usize = 100;

/// The longest text of a grammar.
const MAX_TEXT: usize = 4 << 20;

/// A place in a text.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str) -> Result<Cursor<'a>> {
        if text.len() > MAX_TEXT {
            let what = format!("it has {} bytes, but at most {MAX_TEXT} are allowed", text.len());
            return Err(Error::argument("grammar", what));
        }
        Ok(Cursor { text, at: 0 })
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(super) fn bump(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    /// Passes this text if it comes next.
    pub(super) fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    pub(super) fn need(&mut self, text: &str) -> Result<()> {
        if self.eat(text) { Ok(()) } else { Err(self.expected(&format!("'{text}'"))) }
    }

    /// The characters from here on for which `f` holds.
    pub(super) fn take(&mut self, f: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !f(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// A number, if digits come next.
    pub(super) fn number(&mut self) -> Result<Option<usize>> {
        let start = *self;
        match self.take(|c| c.is_ascii_digit()) {
            "" => Ok(None),
            d => d.parse().map(Some).map_err(|_| start.wrong(format!("{d} is too large"))),
        }
    }

    pub(super) fn expected(&self, what: &str) -> Error {
        let found = match self.peek() {
            Some(c) => format!("{c:?}"),
            None => "the end".into(),
        };
        self.wrong(format!("expected {what}, found {found}"))
    }

    pub(super) fn wrong(&self, what: impl std::fmt::Display) -> Error {
        let before = &self.text[..self.at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
        Error::Format { file: "grammar".into(), what: format!("line {line}, column {column}: {what}") }
    }

    /// The character after a backslash, for the escapes that both notations have.
    pub(super) fn escape(&mut self) -> Result<char> {
        let start = *self;
        match self.bump() {
            Some('n') => Ok('\n'),
            Some('r') => Ok('\r'),
            Some('t') => Ok('\t'),
            Some('x') => self.hex(2),
            Some('u') => self.hex(4),
            Some('U') => self.hex(8),
            Some(c) if c.is_ascii_punctuation() => Ok(c),
            _ => Err(start.expected("an escape such as n, t, \\, x41 or u00e9")),
        }
    }

    fn hex(&mut self, digits: usize) -> Result<char> {
        let start = *self;
        let text = self.rest().get(..digits).filter(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
        let value = text.and_then(|t| u32::from_str_radix(t, 16).ok()).and_then(char::from_u32);
        self.at += if value.is_some() { digits } else { 0 };
        value.ok_or_else(|| start.wrong(format!("expected {digits} hexadecimal digits of a character")))
    }
}

/// Rules by name. A rule may be used before it is defined.
#[derive(Default)]
pub(super) struct Rules<'a> {
    ids: HashMap<&'a str, usize>,
    /// The rule, and where it was first used.
    rules: Vec<(Option<Expr>, Cursor<'a>, &'a str)>,
}

impl<'a> Rules<'a> {
    /// The number of a rule.
    pub(super) fn id(&mut self, name: &'a str, place: Cursor<'a>) -> usize {
        let next = self.rules.len();
        let id = *self.ids.entry(name).or_insert(next);
        if id == next {
            self.rules.push((None, place, name));
        }
        id
    }

    pub(super) fn define(&mut self, name: &'a str, place: Cursor<'a>, rule: Expr) -> Result<()> {
        let id = self.id(name, place);
        match self.rules[id].0.replace(rule) {
            None => Ok(()),
            Some(_) => Err(place.wrong(format!("'{name}' is defined twice"))),
        }
    }

    pub(super) fn is_defined(&self, name: &str) -> bool {
        self.ids.get(name).is_some_and(|id| self.rules[*id].0.is_some())
    }

    /// The grammar that begins with a rule.
    pub(super) fn grammar(self, start: &str) -> Result<Grammar> {
        let Some(first) = self.ids.get(start).copied().filter(|id| self.rules[*id].0.is_some()) else {
            let what = format!("it has no rule '{start}', with which the text begins");
            return Err(Error::Format { file: "grammar".into(), what });
        };
        let mut rules = vec![];
        for (rule, place, name) in self.rules {
            rules.push(rule.ok_or_else(|| place.wrong(format!("'{name}' is not defined")))?);
        }
        Grammar::new(&rules, first)
    }
}

/// Alternatives of one expression are the expression itself.
pub(super) fn any(mut list: Vec<Expr>) -> Expr {
    match (list.len(), list.pop()) {
        (1, Some(one)) => one,
        (_, last) => {
            list.extend(last);
            Expr::Any(list)
        }
    }
}

/// A sequence of one expression is the expression itself.
pub(super) fn seq(mut list: Vec<Expr>) -> Expr {
    match (list.len(), list.pop()) {
        (1, Some(one)) => one,
        (_, last) => {
            list.extend(last);
            Expr::Seq(list)
        }
    }
}

//! Regular expressions as expressions of a grammar.

use super::grammar::{Expr, negated};
use regex_syntax::hir::{Class, Hir, HirKind, Look};

/// How a character is written, for example as in a string of JSON.
pub(super) type Write = dyn Fn(&[(char, char)]) -> Expr;

/// Writes a character as itself.
pub(super) fn plain(ranges: &[(char, char)]) -> Expr {
    Expr::Chars(ranges.to_vec())
}

/// What a regular expression matches. With `search`, text before and after it is allowed, unless `^` and `$`
/// forbid this, as for a pattern of a JSON schema; else the whole text must match.
///
/// # Errors
/// A sentence that says what is wrong or cannot be expressed.
pub(super) fn parse(pattern: &str, flags: &str, search: bool, write: &Write) -> Result<Expr, String> {
    let mut builder = regex_syntax::ParserBuilder::new();
    builder.nest_limit(80);
    for f in flags.chars() {
        match f {
            'i' => builder.case_insensitive(true),
            'm' => builder.multi_line(true),
            's' => builder.dot_matches_new_line(true),
            'x' => builder.ignore_whitespace(true),
            'u' => &mut builder,
            _ => return Err(format!("the flag {f:?} is not known")),
        };
    }
    let hir = builder.build().parse(&ascii_classes(pattern)).map_err(|e| match e {
        regex_syntax::Error::Parse(e) => format!("{} at character {}", e.kind(), e.span().start.column),
        e => e.to_string(),
    })?;
    if !search {
        return expr(&hir, write);
    }
    let HirKind::Alternation(list) = hir.kind() else { return searched(&hir, write) };
    // Anchors may differ between the outermost alternatives.
    Ok(Expr::Any(list.iter().map(|h| searched(h, write)).collect::<Result<_, _>>()?))
}

/// `\d`, `\w` and `\s` mean ASCII characters, as in JavaScript.
fn ascii_classes(pattern: &str) -> String {
    let mut out = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('d') => out.push_str("[0-9]"),
            Some('D') => out.push_str("[^0-9]"),
            Some('w') => out.push_str("[0-9A-Za-z_]"),
            Some('W') => out.push_str("[^0-9A-Za-z_]"),
            Some('s') => out.push_str("[\\t\\n\\x0b\\x0c\\r\\x20]"),
            Some('S') => out.push_str("[^\\t\\n\\x0b\\x0c\\r\\x20]"),
            Some(other) => out.extend(['\\', other]),
            None => out.push('\\'),
        }
    }
    out
}

/// A part of a text that contains a match.
fn searched(hir: &Hir, write: &Write) -> Result<Expr, String> {
    let parts: &[Hir] = match hir.kind() {
        HirKind::Concat(list) => list,
        _ => std::slice::from_ref(hir),
    };
    let is = |h: Option<&Hir>, look: Look| h.is_some_and(|h| *h.kind() == HirKind::Look(look));
    let (begins, ends) = (is(parts.first(), Look::Start), is(parts.last(), Look::End));
    let inner = parts.get(usize::from(begins)..parts.len().max(1) - usize::from(ends)).unwrap_or(&[]);
    let anything = || write(&negated(vec![])).repeat(0, None);
    let mut out = vec![];
    if !begins {
        out.push(anything());
    }
    for h in inner {
        out.push(expr(h, write)?);
    }
    if !ends {
        out.push(anything());
    }
    Ok(Expr::Seq(out))
}

fn expr(hir: &Hir, write: &Write) -> Result<Expr, String> {
    let many = |list: &[Hir]| list.iter().map(|h| expr(h, write)).collect::<Result<Vec<_>, _>>();
    Ok(match hir.kind() {
        HirKind::Empty => Expr::empty(),
        HirKind::Literal(l) => match std::str::from_utf8(&l.0) {
            Ok(text) => Expr::Seq(text.chars().map(|c| write(&[(c, c)])).collect()),
            Err(_) => return Err("it matches bytes that are not UTF-8".into()),
        },
        HirKind::Class(Class::Unicode(c)) => {
            write(&c.ranges().iter().map(|r| (r.start(), r.end())).collect::<Vec<_>>())
        }
        HirKind::Class(Class::Bytes(c)) => {
            let ascii = |r: &regex_syntax::hir::ClassBytesRange| {
                (r.end() < 128).then_some((char::from(r.start()), char::from(r.end())))
            };
            let ranges = c.ranges().iter().map(ascii).collect::<Option<Vec<_>>>();
            write(&ranges.ok_or("it matches bytes that are not UTF-8")?)
        }
        HirKind::Look(l) => {
            let name = match l {
                Look::Start => "^ after the beginning",
                Look::End => "$ before the end",
                _ => "a condition on neighbouring characters",
            };
            return Err(format!("{name} is not supported"));
        }
        HirKind::Repetition(r) => expr(&r.sub, write)?.repeat(r.min as usize, r.max.map(|m| m as usize)),
        HirKind::Capture(c) => expr(&c.sub, write)?,
        HirKind::Concat(list) => Expr::Seq(many(list)?),
        HirKind::Alternation(list) => Expr::Any(many(list)?),
    })
}

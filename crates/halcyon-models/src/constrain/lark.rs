//! Reads grammars in the notation of Lark. Terminals are not longest matches, as in Lark's Earley parser with
//! its dynamic lexer: any way to divide the text counts.

use super::grammar::{Expr, Grammar};
use super::regex;
use super::text::{Cursor, MAX_DEPTH, Rules, any, seq};
use halcyon::ir::error::{Error, Result};

/// Names that no rule can have.
const IGNORED: &str = " ignored";
const START: &str = " start";

/// The terminals of Lark's module `common`, as regular expressions.
const COMMON: &[(&str, &str)] = &[
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", "[0-9]+\\.[0-9]*|\\.[0-9]+"),
    ("FLOAT", "[0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_FLOAT", "[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\\.[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?)"),
    ("NUMBER", "([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", "[+-]?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", "\"([^\"\\\\\\n]|\\\\[^\\n])*\""),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("WS_INLINE", "[ \\t]+"),
    ("WS", "[ \\t\\f\\r\\n]+"),
    ("CR", "\\r"),
    ("LF", "\\n"),
    ("NEWLINE", "(\\r?\\n)+"),
];

/// The grammar of a text. It begins with the rule `start`.
///
/// # Errors
/// `Error::Format` with line and column of a mistake; `Error::Unsupported` for templates and for directives
/// other than `%ignore` and `%import common`.
pub(super) fn parse(text: &str) -> Result<Grammar> {
    let ignores = text.lines().any(|l| l.trim_start().starts_with("%ignore"));
    let mut p = Parser { at: Cursor::new(text)?, rules: Rules::default(), ignored: vec![], ignores };
    loop {
        p.space(true);
        match p.at.peek() {
            None => break,
            Some('%') => p.directive()?,
            Some(_) => p.rule()?,
        }
        p.space(false);
        if !matches!(p.at.peek(), None | Some('\n' | '\r')) {
            return Err(p.at.expected("a symbol or the end of the line"));
        }
    }
    let place = Cursor::default();
    let ignored = Expr::Any(p.ignored).repeat(0, None);
    p.rules.define(IGNORED, place, ignored)?;
    if !p.rules.is_defined("start") {
        let what = "it has no rule 'start' (Lark) and no '::=' (GBNF)";
        return Err(Error::Format { file: "grammar".into(), what: what.into() });
    }
    let (before, start) = (p.rules.id(IGNORED, place), p.rules.id("start", place));
    p.rules.define(START, place, Expr::Seq(vec![Expr::Rule(before), Expr::Rule(start)]))?;
    p.rules.grammar(START)
}

struct Parser<'a> {
    at: Cursor<'a>,
    rules: Rules<'a>,
    ignored: Vec<Expr>,
    ignores: bool,
}

/// Whether something is part of a terminal or of a rule.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Rule,
    Terminal,
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_terminal(name: &str) -> bool {
    name.chars().find(|c| *c != '_').is_some_and(|c| c.is_ascii_uppercase())
}

impl<'a> Parser<'a> {
    fn space(&mut self, newlines: bool) {
        loop {
            self.at.take(|c| matches!(c, ' ' | '\t') || newlines && matches!(c, '\n' | '\r'));
            if !self.at.rest().starts_with("//") && self.at.peek() != Some('#') {
                return;
            }
            self.at.take(|c| c != '\n' && c != '\r');
        }
    }

    fn name(&mut self) -> Result<&'a str> {
        let start = self.at;
        match self.at.take(is_name) {
            "" => Err(start.expected("a name")),
            name => Ok(name),
        }
    }

    fn directive(&mut self) -> Result<()> {
        let start = self.at;
        self.at.bump();
        let name = self.name()?;
        self.space(false);
        match name {
            "ignore" => {
                let e = self.alternatives(Place::Terminal, 0)?;
                self.ignored.push(e);
                Ok(())
            }
            "import" => self.import(),
            _ => {
                let what = start.wrong(format!("%{name}")).to_string();
                Err(Error::unsupported(what, "Only %ignore and %import common are supported."))
            }
        }
    }

    /// `common.NAME`, `common.NAME -> OTHER` or `common (NAME, NAME)`.
    fn import(&mut self) -> Result<()> {
        let start = self.at;
        if self.name()? != "common" {
            let what = start.wrong("an import from elsewhere than 'common'").to_string();
            return Err(Error::unsupported(what, "Write the terminals into the grammar."));
        }
        if self.at.eat(".") {
            let place = self.at;
            let name = self.name()?;
            self.space(false);
            let mut own = name;
            if self.at.eat("->") {
                self.space(false);
                own = self.name()?;
            }
            return self.common(name, own, place);
        }
        self.space(false);
        self.at.need("(")?;
        loop {
            self.space(true);
            let place = self.at;
            let name = self.name()?;
            self.common(name, name, place)?;
            self.space(true);
            if self.at.eat(")") {
                return Ok(());
            }
            self.at.need(",")?;
        }
    }

    fn common(&mut self, name: &str, own: &'a str, place: Cursor<'a>) -> Result<()> {
        let Some((_, pattern)) = COMMON.iter().find(|c| c.0 == name) else {
            let all: Vec<&str> = COMMON.iter().map(|c| c.0).collect();
            return Err(place.wrong(format!("'common' has {}, but not '{name}'", all.join(", "))));
        };
        let e = regex::parse(pattern, "", false, &regex::plain).map_err(|e| place.wrong(e))?;
        self.rules.define(own, place, e)
    }

    fn rule(&mut self) -> Result<()> {
        // Marks that only shape Lark's tree.
        self.at.take(|c| matches!(c, '?' | '!'));
        let start = self.at;
        let name = self.name()?;
        if self.at.eat(".") {
            self.at.eat("-");
            self.at.number()?;
        }
        if self.at.peek() == Some('{') {
            let what = start.wrong("a template").to_string();
            return Err(Error::unsupported(what, "Write a rule for each use."));
        }
        self.space(false);
        self.at.need(":")?;
        self.space(true);
        let place = if is_terminal(name) { Place::Terminal } else { Place::Rule };
        let e = self.alternatives(place, 0)?;
        self.rules.define(name, start, e)
    }

    fn alternatives(&mut self, place: Place, depth: usize) -> Result<Expr> {
        if depth > MAX_DEPTH {
            return Err(self.at.wrong(format!("more than {MAX_DEPTH} nested groups")));
        }
        let mut list = vec![self.sequence(place, depth)?];
        loop {
            let before = self.at;
            self.space(true);
            if self.at.eat("->") {
                self.space(false);
                self.name()?;
                continue;
            }
            if !self.at.eat("|") {
                if depth == 0 {
                    self.at = before;
                }
                return Ok(any(list));
            }
            self.space(false);
            list.push(self.sequence(place, depth)?);
        }
    }

    fn sequence(&mut self, place: Place, depth: usize) -> Result<Expr> {
        let mut list = vec![];
        loop {
            self.space(depth > 0);
            match self.atom(place, depth)? {
                Some(e) => list.push(self.repeated(e)?),
                None => return Ok(seq(list)),
            }
        }
    }

    fn atom(&mut self, place: Place, depth: usize) -> Result<Option<Expr>> {
        let start = self.at;
        Ok(Some(match self.at.peek() {
            Some('"') => {
                let e = self.literal()?;
                self.token(e, place)
            }
            Some('/') => {
                let e = self.pattern()?;
                self.token(e, place)
            }
            Some(open @ ('(' | '[')) => {
                self.at.bump();
                self.space(true);
                let group = self.alternatives(place, depth + 1)?;
                self.space(true);
                self.at.need(if open == '(' { ")" } else { "]" })?;
                if open == '(' { group } else { group.optional() }
            }
            Some('<') => {
                let what = start.wrong("a token in a grammar").to_string();
                return Err(Error::unsupported(what, "Write the text that the token stands for."));
            }
            Some(c) if is_name(c) => {
                let name = self.name()?;
                if self.at.peek() == Some('{') {
                    let what = start.wrong("a template").to_string();
                    return Err(Error::unsupported(what, "Write a rule for each use."));
                }
                let rule = Expr::Rule(self.rules.id(name, start));
                match (is_terminal(name), place) {
                    (false, Place::Terminal) => {
                        return Err(start.wrong(format!("the rule '{name}' cannot be part of a terminal")));
                    }
                    (true, _) => self.token(rule, place),
                    (false, _) => rule,
                }
            }
            _ => return Ok(None),
        }))
    }

    /// A terminal: in a rule, ignored text may follow it.
    fn token(&mut self, e: Expr, place: Place) -> Expr {
        match place == Place::Rule && self.ignores {
            true => Expr::Seq(vec![e, Expr::Rule(self.rules.id(IGNORED, self.at))]),
            false => e,
        }
    }

    fn repeated(&mut self, mut e: Expr) -> Result<Expr> {
        for _ in 0..MAX_DEPTH {
            let before = self.at;
            self.space(false);
            let start = self.at;
            let (least, most) = match self.at.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('~') => {
                    self.at.bump();
                    self.space(false);
                    let Some(least) = self.at.number()? else { return Err(self.at.expected("a number")) };
                    let mut most = least;
                    if self.at.eat("..") {
                        let Some(n) = self.at.number()? else { return Err(self.at.expected("a number")) };
                        most = n;
                    }
                    if most < least {
                        return Err(start.wrong("the upper bound is below the lower one"));
                    }
                    e = e.repeat(least, Some(most));
                    continue;
                }
                _ => {
                    self.at = before;
                    return Ok(e);
                }
            };
            self.at.bump();
            e = e.repeat(least, most);
        }
        Err(self.at.wrong(format!("more than {MAX_DEPTH} repetitions of one symbol")))
    }

    /// `"text"`, `"text"i` or `"a".."z"`.
    fn literal(&mut self) -> Result<Expr> {
        let start = self.at;
        let text = self.quoted()?;
        if self.at.rest().starts_with("..") && self.at.rest()[2..].starts_with('"') {
            self.at.eat("..");
            let end = self.quoted()?;
            let one = |s: &str| s.chars().next().filter(|c| c.len_utf8() == s.len());
            return match (one(&text), one(&end)) {
                (Some(a), Some(b)) if a <= b => Ok(Expr::Chars(vec![(a, b)])),
                _ => Err(start.wrong("a range needs two characters in order")),
            };
        }
        let rest = self.at.rest().strip_prefix('i');
        if rest.is_none_or(|r| r.starts_with(is_name)) {
            return Ok(Expr::text(&text));
        }
        self.at.bump();
        let mut escaped = String::new();
        for c in text.chars() {
            // Every character that may have a meaning, and no letter.
            if c.is_ascii_punctuation() {
                escaped.push('\\');
            }
            escaped.push(c);
        }
        regex::parse(&escaped, "i", false, &regex::plain).map_err(|e| start.wrong(e))
    }

    fn quoted(&mut self) -> Result<String> {
        let start = self.at;
        self.at.bump();
        let mut text = String::new();
        loop {
            match self.at.bump() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.at.escape()?),
                Some('\n') | None => return Err(start.wrong("the text has no closing '\"'")),
                Some(c) => text.push(c),
            }
        }
    }

    fn pattern(&mut self) -> Result<Expr> {
        let start = self.at;
        self.at.bump();
        let mut text = String::new();
        loop {
            match self.at.bump() {
                Some('/') => break,
                Some('\\') => match self.at.bump() {
                    Some('/') => text.push('/'),
                    Some(c) => text.extend(['\\', c]),
                    None => return Err(start.wrong("the pattern has no closing '/'")),
                },
                Some('\n') | None => return Err(start.wrong("the pattern has no closing '/'")),
                Some(c) => text.push(c),
            }
        }
        let flags = self.at.take(|c| "imslux".contains(c)).replace('l', "");
        regex::parse(&text, &flags, false, &regex::plain).map_err(|e| start.wrong(e))
    }
}

#[cfg(test)]
mod tests {
    use super::super::parser::Parser as Rows;
    use super::*;
    use std::sync::Arc;

    fn matches(grammar: &str, text: &str) -> bool {
        let mut p = Rows::new(Arc::new(parse(grammar).unwrap())).unwrap();
        let end = text.bytes().try_fold(0, |row, b| p.advance(row, b).unwrap());
        end.is_some_and(|r| p.accepting(r))
    }

    #[test]
    fn every_form_is_read() {
        let sum = "// sums\n%import common.INT\n%import common (WS_INLINE, CNAME)\n%ignore WS_INLINE\n\
            ?start: sum -> top\n?sum: product\n    | sum \"+\" product -> add\n!product.2: atom (\"*\" atom)*\n\
            atom: INT | CNAME | \"(\" sum \")\" # last\n";
        let cases: &[(&str, &[&str], &[&str])] = &[
            (sum, &["1", " 1 + x_1*( 2+ 3 ) "], &["", "1+", "1 2", "(1"]),
            (
                "start: A~2 B~1..3 [\"c\"]\nA: \"a\"\nB: \"x\"..\"z\"",
                &["aax", "aazyxc"],
                &["ax", "aa", "aaxxxx"],
            ),
            ("start: /[ab]+\\/\\d/i \"End\"i", &["aB/7eND"], &["ab/End", "c/1end"]),
            ("start: \"if\" cond\n\ncond: \"x\" | \"y\"", &["ifx"], &["if", "if x"]),
            ("start: (\"a\" |\n  \"b\")+", &["abba"], &["", "c"]),
            ("start: \"a\" | \"b\" \"c\"? |", &["a", "b", "bc", ""], &["ab"]),
            ("start: \"\\n\\x41\\u00e9\\\"\"", &["\nAé\""], &["n"]),
        ];
        for (grammar, good, bad) in cases {
            good.iter().for_each(|t| assert!(matches(grammar, t), "{grammar}: {t:?}"));
            bad.iter().for_each(|t| assert!(!matches(grammar, t), "{grammar}: {t:?}"));
        }
    }

    #[test]
    fn the_common_terminals_are_valid() {
        for (name, _) in COMMON {
            let g = format!("%import common.{name} -> X\nstart: X");
            assert!(parse(&g).is_ok(), "{name}");
        }
        let g = "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING";
        assert!(matches(g, "\"a\\\"b\"") && !matches(g, "\"a\"b\""));
    }

    #[test]
    fn mistakes_name_their_place() {
        let deep = format!("start: {}", "(".repeat(5000));
        let cases: &[(&str, &str)] = &[
            ("", "no rule 'start'"),
            ("a: \"b\"", "no rule 'start'"),
            ("start: x", "line 1, column 8: 'x' is not defined"),
            ("start: \"a\nb: \"c\"", "line 1, column 8: the text has no closing"),
            ("start: /a", "the pattern has no closing"),
            ("start: /(/", "line 1, column 8: "),
            ("start: /a(?=b)/", "line 1, column 8: "),
            ("start: /^a/", "^ after the beginning is not supported"),
            ("start: (\"a\"", "expected ')', found the end"),
            ("start: \"a\" ) ", "expected a symbol or the end of the line"),
            ("start: \"a\"~", "expected a number"),
            ("start: \"z\"..\"a\"", "two characters in order"),
            ("start: A\nA: b\nb: \"c\"", "cannot be part of a terminal"),
            ("start: start", "no finite text"),
            ("%declare A", "%declare"),
            ("%import other.A", "elsewhere than 'common'"),
            ("%import common.NIX", "not 'NIX'"),
            ("start: x{\"a\"}", "template"),
            (&deep, "nested groups"),
        ];
        for (grammar, part) in cases {
            let e = parse(grammar).expect_err(grammar).to_string();
            assert!(e.contains(part), "{grammar}: {e}");
        }
    }
}

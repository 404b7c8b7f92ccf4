//! Reads grammars in GBNF, the notation of llama.cpp.

use super::grammar::{Expr, Grammar, negated};
use super::text::{Cursor, MAX_DEPTH, Rules, any, seq};
use halcyon::ir::error::{Error, Result};

/// Whether a grammar is written in GBNF: its rules contain `::=`.
pub(super) fn is_gbnf(text: &str) -> bool {
    text.lines().any(|l| match l.split_once("::=") {
        Some((name, _)) => !name.trim().is_empty() && name.trim().chars().all(is_name),
        None => false,
    })
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// The grammar of a text. It begins with the rule `root`.
///
/// # Errors
/// `Error::Format` with line and column of a mistake; `Error::Unsupported` for rules about tokens.
pub(super) fn parse(text: &str) -> Result<Grammar> {
    let mut p = Parser { at: Cursor::new(text)?, rules: Rules::default() };
    p.space(true);
    while p.at.peek().is_some() {
        p.rule()?;
        p.space(true);
    }
    p.rules.grammar("root")
}

struct Parser<'a> {
    at: Cursor<'a>,
    rules: Rules<'a>,
}

impl<'a> Parser<'a> {
    /// Passes white space and comments.
    fn space(&mut self, newlines: bool) {
        loop {
            self.at.take(|c| matches!(c, ' ' | '\t') || newlines && matches!(c, '\n' | '\r'));
            if self.at.peek() != Some('#') {
                return;
            }
            self.at.take(|c| c != '\n' && c != '\r');
        }
    }

    fn name(&mut self) -> &'a str {
        self.at.take(is_name)
    }

    fn rule(&mut self) -> Result<()> {
        let start = self.at;
        let name = self.name();
        if name.is_empty() {
            return Err(start.expected("the name of a rule"));
        }
        self.space(false);
        self.at.need("::=")?;
        self.space(true);
        let rule = self.alternatives(0)?;
        match self.at.peek() {
            None | Some('\n' | '\r') => self.rules.define(name, start, rule),
            _ => Err(self.at.expected("a symbol or the end of the line")),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<Expr> {
        if depth > MAX_DEPTH {
            return Err(self.at.wrong(format!("more than {MAX_DEPTH} nested groups")));
        }
        let mut list = vec![self.sequence(depth)?];
        loop {
            // An alternative may stand on a line of its own.
            let before = self.at;
            self.space(true);
            if !self.at.eat("|") {
                self.at = before;
                return Ok(any(list));
            }
            self.space(true);
            list.push(self.sequence(depth)?);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Expr> {
        let mut list = vec![];
        loop {
            let start = self.at;
            let symbol = match self.at.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at.bump();
                    Expr::Chars(negated(vec![]))
                }
                Some('(') => {
                    self.at.bump();
                    self.space(true);
                    let group = self.alternatives(depth + 1)?;
                    self.space(true);
                    self.at.need(")")?;
                    group
                }
                Some('<' | '!') => {
                    let what = start.wrong("a token in a grammar").to_string();
                    return Err(Error::unsupported(what, "Write the text that the token stands for."));
                }
                Some(c) if is_name(c) => {
                    let name = self.name();
                    Expr::Rule(self.rules.id(name, start))
                }
                _ => return Ok(seq(list)),
            };
            self.space(depth > 0);
            list.push(self.repeated(symbol, depth)?);
            self.space(depth > 0);
        }
    }

    fn repeated(&mut self, mut e: Expr, depth: usize) -> Result<Expr> {
        // Each sign nests the expression once more.
        for _ in 0..MAX_DEPTH {
            let start = self.at;
            let (least, most) = match self.at.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(e),
            };
            if self.at.peek().is_some_and(|c| "*+?}".contains(c)) {
                self.at.bump();
            }
            if most.is_some_and(|m| m < least) {
                return Err(start.wrong("the upper bound is below the lower one"));
            }
            e = e.repeat(least, most);
            self.space(depth > 0);
        }
        Err(self.at.wrong(format!("more than {MAX_DEPTH} repetitions of one symbol")))
    }

    /// `{m}`, `{m,}` or `{m,n}`, up to the closing brace.
    fn counts(&mut self) -> Result<(usize, Option<usize>)> {
        self.at.bump();
        self.space(false);
        let Some(least) = self.at.number()? else { return Err(self.at.expected("a number")) };
        self.space(false);
        let mut most = Some(least);
        if self.at.eat(",") {
            self.space(false);
            most = self.at.number()?;
            self.space(false);
        }
        match self.at.peek() {
            Some('}') => Ok((least, most)),
            _ => Err(self.at.expected("'}'")),
        }
    }

    fn character(&mut self) -> Result<char> {
        let start = self.at;
        match self.at.bump() {
            Some('\\') => self.at.escape(),
            Some(c) => Ok(c),
            None => Err(start.expected("a character")),
        }
    }

    fn literal(&mut self) -> Result<Expr> {
        let start = self.at;
        self.at.bump();
        let mut text = String::new();
        while !self.at.eat("\"") {
            if self.at.peek().is_none() {
                return Err(start.wrong("the text has no closing '\"'"));
            }
            text.push(self.character()?);
        }
        Ok(Expr::text(&text))
    }

    fn class(&mut self) -> Result<Expr> {
        let start = self.at;
        self.at.bump();
        let negative = self.at.eat("^");
        let mut ranges = vec![];
        while !self.at.eat("]") {
            if self.at.peek().is_none() {
                return Err(start.wrong("the characters have no closing ']'"));
            }
            let low = self.character()?;
            // A minus before the end stands for itself.
            let is_range = self.at.rest().starts_with('-') && !self.at.rest().starts_with("-]");
            let high = match is_range {
                true => {
                    self.at.bump();
                    self.character()?
                }
                false => low,
            };
            if high < low {
                return Err(start.wrong(format!("the range {low:?} to {high:?} is empty")));
            }
            ranges.push((low, high));
        }
        Ok(Expr::Chars(if negative { negated(ranges) } else { ranges }))
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
        let cases: &[(&str, &[&str], &[&str])] = &[
            ("root ::= \"a\" | \"bc\" # comment", &["a", "bc"], &["b", "", "abc"]),
            ("root ::= [a-c]+ [^x\\n\\]]", &["az", "abcé"], &["a", "ax", "a]", "a\n"]),
            ("root ::= (\"x\" |\n  \"y\")* tail\n\ntail ::= \"!\"?", &["", "xyx!", "!"], &["!x", "z"]),
            ("root ::= \"a\"{2} \"b\"{1,} \"c\"{0,2}", &["aab", "aabbbcc"], &["ab", "aac", "aabccc"]),
            ("root ::= a-b | c_d\na-b ::= \"1\"\n# c\nc_d ::= \"2\"\n", &["1", "2"], &["12"]),
            ("root ::= \"\\x41\\u00e9\\U0001F600\\\"\\\\\\t\"", &["Aé😀\"\\\t"], &["A"]),
            ("root ::= . .", &["aé", "日\n"], &["a", "abc"]),
            ("root ::= [-a] [a-]", &["--", "aa", "-a"], &["ab"]),
            ("root ::=\n  \"a\"\n  | \"b\"\n", &["a", "b"], &["ab"]),
            ("root ::= \"\"", &[""], &["a"]),
            // Words that begin alike: the reader may not decide too early.
            ("root ::= \"a\" \"b\" | \"abc\" | [a-z]+ \"bd\"", &["ab", "abc", "abd", "abcbd"], &["abcd"]),
            ("root ::= e\ne ::= e \"+\" t | t\nt ::= [0-9]+ | \"(\" e \")\"", &["1+(2+34)"], &["1+", "()"]),
        ];
        for (grammar, good, bad) in cases {
            good.iter().for_each(|t| assert!(matches(grammar, t), "{grammar}: {t:?}"));
            bad.iter().for_each(|t| assert!(!matches(grammar, t), "{grammar}: {t:?}"));
        }
    }

    #[test]
    fn mistakes_name_their_place() {
        let deep = format!("root ::= {}", "(".repeat(5000));
        let cases: &[(&str, &str)] = &[
            ("", "no rule 'root'"),
            ("a ::= \"b\"", "no rule 'root'"),
            ("root ::= x", "line 1, column 10: 'x' is not defined"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: 'root' is defined twice"),
            ("root ::= \"a", "line 1, column 10: the text has no closing"),
            ("root ::= [a", "line 1, column 10: the characters have no closing"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= (\"a\"", "expected ')', found the end"),
            ("root ::= \"a\")", "expected a symbol or the end of the line, found ')'"),
            ("root ::= \"a\"{2", "expected '}'"),
            ("root ::= \"a\"{,2}", "expected a number"),
            ("root ::= \"a\"{3,2}", "below the lower"),
            ("root ::= \"a\"{99999999999999999999}", "too large"),
            ("root ::= \"a\"{999999999}", "symbols"),
            ("root ::= \"\\q\"", "expected an escape"),
            ("root ::= \"\\ud800\"", "4 hexadecimal digits"),
            ("root = \"a\"", "expected '::='"),
            ("root ::= root", "no finite text"),
            ("root ::= <think>", "token in a grammar"),
            (&deep, "nested groups"),
        ];
        for (grammar, part) in cases {
            let e = parse(grammar).expect_err(grammar).to_string();
            assert!(e.contains(part), "{grammar}: {e}");
        }
    }

    #[test]
    fn the_notation_is_recognised() {
        assert!(is_gbnf("# x\nroot ::= \"a\""));
        assert!(!is_gbnf("start: \"::=\"\n"));
    }
}

//! Context-free grammars over bytes.

use halcyon::ir::error::{Error, Result};
use regex_syntax::utf8::Utf8Sequences;
use std::collections::HashMap;

/// The most symbols of a grammar after repetitions are written out.
const MAX_SYMBOLS: usize = 1 << 20;

/// Optional repetitions above this number are divided into blocks.
const LONG: usize = 32;

/// What a rule matches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expr {
    /// These bytes.
    Bytes(Vec<u8>),
    /// One character of these ranges.
    Chars(Vec<(char, char)>),
    /// The rule with this number.
    Rule(usize),
    /// One after the other.
    Seq(Vec<Expr>),
    /// One of them; of none, nothing matches.
    Any(Vec<Expr>),
    /// From so many to so many times; `None`: any number.
    Repeat(Box<Expr>, usize, Option<usize>),
}

impl Expr {
    pub(crate) fn text(s: &str) -> Expr {
        Expr::Bytes(s.as_bytes().to_vec())
    }

    pub(crate) fn empty() -> Expr {
        Expr::Seq(vec![])
    }

    pub(crate) fn never() -> Expr {
        Expr::Any(vec![])
    }

    pub(crate) fn repeat(self, least: usize, most: Option<usize>) -> Expr {
        Expr::Repeat(Box::new(self), least, most)
    }

    pub(crate) fn optional(self) -> Expr {
        self.repeat(0, Some(1))
    }
}

/// The characters that are in none of the ranges.
pub(crate) fn negated(mut ranges: Vec<(char, char)>) -> Vec<(char, char)> {
    ranges.sort_unstable();
    let next = |c: char| char::from_u32(c as u32 + 1).or((c < '\u{e000}').then_some('\u{e000}'));
    let before = |c: char| match c {
        '\0' => None,
        '\u{e000}' => Some('\u{d7ff}'),
        _ => char::from_u32(c as u32 - 1),
    };
    let mut out = vec![];
    let mut from = Some('\0');
    for (low, high) in ranges {
        let Some(f) = from else { break };
        if let Some(b) = before(low).filter(|b| *b >= f) {
            out.push((f, b));
        }
        if high >= f {
            from = if high == char::MAX { None } else { next(high) };
        }
    }
    out.extend(from.map(|f| (f, char::MAX)));
    out
}

/// A set of bytes.
pub(crate) type ByteSet = [u64; 4];

pub(crate) fn has(set: &ByteSet, byte: u8) -> bool {
    set[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Symbol {
    /// A byte of the set with this number.
    Byte(u32),
    Nonterminal(u32),
    /// The end of an alternative of this nonterminal.
    End(u32),
}

/// A grammar whose nonterminals can all be completed.
#[derive(Debug)]
pub(crate) struct Grammar {
    /// The alternatives of all nonterminals, one after the other.
    pub(crate) symbols: Vec<Symbol>,
    /// Where the alternatives of each nonterminal begin.
    pub(crate) alternatives: Vec<Vec<u32>>,
    /// Nonterminals that match the empty text.
    pub(crate) nullable: Vec<bool>,
    pub(crate) sets: Vec<ByteSet>,
    pub(crate) start: u32,
}

impl Grammar {
    /// The grammar of these rules.
    ///
    /// # Errors
    /// `Error::Argument` if no text matches the start, or if the grammar is too large.
    pub(crate) fn new(rules: &[Expr], start: usize) -> Result<Grammar> {
        let mut l = Lower { alternatives: vec![vec![]; rules.len()], ..Lower::default() };
        for (i, rule) in rules.iter().enumerate() {
            let options = match rule {
                Expr::Any(list) => list.as_slice(),
                one => std::slice::from_ref(one),
            };
            for o in options {
                let a = l.symbols(o)?;
                l.push(i as u32, a)?;
            }
        }
        l.finish(start as u32)
    }
}

/// Writes expressions as alternatives of nonterminals.
#[derive(Default)]
struct Lower {
    alternatives: Vec<Vec<Vec<Symbol>>>,
    sets: Vec<ByteSet>,
    set_ids: HashMap<ByteSet, u32>,
    chars: HashMap<Vec<(char, char)>, Symbol>,
    size: usize,
}

impl Lower {
    fn nonterminal(&mut self) -> u32 {
        self.alternatives.push(vec![]);
        self.alternatives.len() as u32 - 1
    }

    fn push(&mut self, of: u32, symbols: Vec<Symbol>) -> Result<()> {
        self.grow(symbols.len() + 1)?;
        self.alternatives[of as usize].push(symbols);
        Ok(())
    }

    fn grow(&mut self, by: usize) -> Result<()> {
        self.size = self.size.saturating_add(by);
        match self.size <= MAX_SYMBOLS {
            true => Ok(()),
            false => Err(Error::argument(
                "grammar",
                format!("it has more than {MAX_SYMBOLS} symbols; use smaller repetitions"),
            )),
        }
    }

    fn set(&mut self, set: ByteSet) -> Symbol {
        let next = self.sets.len() as u32;
        let id = *self.set_ids.entry(set).or_insert(next);
        if id == next {
            self.sets.push(set);
        }
        Symbol::Byte(id)
    }

    fn range(&mut self, low: u8, high: u8) -> Symbol {
        let mut set = [0; 4];
        (low..=high).for_each(|b| set[usize::from(b >> 6)] |= 1 << (b & 63));
        self.set(set)
    }

    fn symbols(&mut self, e: &Expr) -> Result<Vec<Symbol>> {
        match e {
            Expr::Bytes(b) => {
                self.grow(b.len())?;
                Ok(b.iter().map(|b| self.range(*b, *b)).collect())
            }
            Expr::Chars(ranges) => Ok(vec![self.class(ranges)?]),
            Expr::Rule(n) => Ok(vec![Symbol::Nonterminal(*n as u32)]),
            Expr::Seq(list) => {
                let mut out = vec![];
                for e in list {
                    out.extend(self.symbols(e)?);
                }
                Ok(out)
            }
            Expr::Any(list) => {
                let n = self.nonterminal();
                for e in list {
                    let a = self.symbols(e)?;
                    self.push(n, a)?;
                }
                Ok(vec![Symbol::Nonterminal(n)])
            }
            Expr::Repeat(e, least, most) => self.repeat(e, *least, *most),
        }
    }

    /// A character: the encodings of one byte are one set, the others alternatives of several bytes.
    fn class(&mut self, ranges: &[(char, char)]) -> Result<Symbol> {
        if let Some(s) = self.chars.get(ranges) {
            return Ok(*s);
        }
        let mut single = [0; 4];
        let mut long = vec![];
        for &(low, high) in ranges {
            for seq in Utf8Sequences::new(low, high) {
                match seq.as_slice() {
                    [r] => (r.start..=r.end).for_each(|b| single[usize::from(b >> 6)] |= 1 << (b & 63)),
                    many => long.push(many.iter().map(|r| self.range(r.start, r.end)).collect::<Vec<_>>()),
                }
            }
        }
        let one = self.set(single);
        let symbol = match long.is_empty() {
            true => one,
            false => {
                let n = self.nonterminal();
                if single != [0; 4] {
                    self.push(n, vec![one])?;
                }
                for a in long {
                    self.push(n, a)?;
                }
                Symbol::Nonterminal(n)
            }
        };
        self.chars.insert(ranges.to_vec(), symbol);
        Ok(symbol)
    }

    fn repeat(&mut self, e: &Expr, least: usize, most: Option<usize>) -> Result<Vec<Symbol>> {
        let mut symbols = self.symbols(e)?;
        if symbols.len() != 1 {
            let n = self.nonterminal();
            self.push(n, symbols)?;
            symbols = vec![Symbol::Nonterminal(n)];
        }
        let x = symbols[0];
        self.grow(least)?;
        let mut out = vec![x; least];
        match most {
            None => {
                // Left recursion: after each repetition the parser is in the same state.
                let n = self.nonterminal();
                self.push(n, vec![])?;
                self.push(n, vec![Symbol::Nonterminal(n), x])?;
                out.push(Symbol::Nonterminal(n));
            }
            Some(most) => out.extend(self.up_to(x, most.saturating_sub(least))?),
        }
        Ok(out)
    }

    /// At most `most` times. A chain completes as many nonterminals as it has links, so a long one is
    /// divided into blocks: a chain of blocks, then a chain shorter than a block.
    fn up_to(&mut self, x: Symbol, most: usize) -> Result<Vec<Symbol>> {
        if most <= LONG {
            return self.chain(x, most);
        }
        let size = (most + 1).isqrt();
        let count = (most + 1) / size;
        let block = self.nonterminal();
        self.grow(size)?;
        self.push(block, vec![x; size])?;
        let rest = most + 1 - size * count;
        let mut out = self.chain(Symbol::Nonterminal(block), count - 1)?;
        out.extend(self.chain(x, size - 1)?);
        out.extend(self.up_to(x, rest)?);
        Ok(out)
    }

    fn chain(&mut self, x: Symbol, most: usize) -> Result<Vec<Symbol>> {
        let mut tail = vec![];
        for _ in 0..most {
            let n = self.nonterminal();
            self.push(n, vec![])?;
            self.push(n, [vec![x], tail].concat())?;
            tail = vec![Symbol::Nonterminal(n)];
        }
        Ok(tail)
    }

    /// Drops alternatives that can never be completed.
    fn finish(mut self, start: u32) -> Result<Grammar> {
        let empty: Vec<bool> = self.sets.iter().map(|s| *s == [0; 4]).collect();
        let able = self.fixpoint(|s| matches!(s, Symbol::Byte(b) if !empty[b as usize]));
        if !able[start as usize] {
            return Err(Error::argument("grammar", "no finite text matches it"));
        }
        let keep = |s: &Symbol| match *s {
            Symbol::Byte(b) => !empty[b as usize],
            Symbol::Nonterminal(n) => able[n as usize],
            Symbol::End(_) => true,
        };
        for a in &mut self.alternatives {
            a.retain(|symbols| symbols.iter().all(keep));
        }
        let nullable = self.fixpoint(|_| false);
        let mut symbols = vec![];
        let mut alternatives = vec![];
        for (n, list) in self.alternatives.into_iter().enumerate() {
            let mut starts = vec![];
            for a in list {
                starts.push(symbols.len() as u32);
                symbols.extend(a);
                symbols.push(Symbol::End(n as u32));
            }
            alternatives.push(starts);
        }
        Ok(Grammar { symbols, alternatives, nullable, sets: self.sets, start })
    }

    /// The nonterminals of which an alternative consists of good bytes and such nonterminals only.
    fn fixpoint(&self, good: impl Fn(Symbol) -> bool) -> Vec<bool> {
        // For each alternative, the symbols that are not known to be good; and who uses a nonterminal.
        let mut missing = vec![];
        let mut users: Vec<Vec<usize>> = vec![vec![]; self.alternatives.len()];
        for (n, list) in self.alternatives.iter().enumerate() {
            for a in list {
                let id = missing.len();
                let mut count = 0;
                for s in a {
                    if let Symbol::Nonterminal(m) = s {
                        users[*m as usize].push(id);
                        count += 1;
                    } else if !good(*s) {
                        count = usize::MAX / 2;
                        break;
                    }
                }
                missing.push((n, count));
            }
        }
        let mut known = vec![false; self.alternatives.len()];
        let mut work: Vec<usize> = missing.iter().filter(|m| m.1 == 0).map(|m| m.0).collect();
        while let Some(n) = work.pop() {
            if std::mem::replace(&mut known[n], true) {
                continue;
            }
            for id in std::mem::take(&mut users[n]) {
                missing[id].1 -= 1;
                if missing[id].1 == 0 {
                    work.push(missing[id].0);
                }
            }
        }
        known
    }
}

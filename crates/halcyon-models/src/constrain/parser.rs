//! Earley's algorithm over bytes, as an automaton that is built while it is used.
//!
//! A row is the set of items after a text. An item is a place in an alternative and the row in which the
//! alternative began. Two texts whose rows have the same items continue in the same way, so equal rows get
//! one number, and the row after a byte is looked up once it is known. The repetitions of [`super::grammar`]
//! recurse to the left, so that a loop leads back to the same row.

use super::grammar::{Grammar, Symbol, has};
use halcyon::ir::error::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Bytes that the rows may take. Above it, rows that the current state does not need are dropped.
const MAX_BYTES: usize = 64 << 20;

/// The most items of a row.
const MAX_ITEMS: usize = 1 << 16;

/// The most items that are computed for one token, which takes about half a second. Real grammars need a
/// tenth of it.
const MAX_WORK: usize = 5_000_000;

/// The origin of items that began in their own row.
const HERE: u32 = u32::MAX;

const UNKNOWN: u32 = u32::MAX;
const DEAD: u32 = u32::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Item {
    /// The place in the grammar's symbols.
    at: u32,
    /// The row in which the alternative began.
    origin: u32,
}

#[derive(Debug)]
struct Row {
    /// All items before a symbol, and the completed start, in order.
    items: Arc<[Item]>,
    /// Nonterminals with the items that wait for them, in order.
    waiting: Box<[(u32, Item)]>,
    /// The rows after each byte.
    next: Option<Box<[u32; 256]>>,
    accepting: bool,
}

impl Row {
    fn bytes(&self) -> usize {
        // Items are stored here and in the table of known rows; the rest is overhead of both.
        self.items.len() * size_of::<Item>()
            + self.waiting.len() * size_of::<(u32, Item)>()
            + if self.next.is_some() { 1024 } else { 0 }
            + 128
    }
}

/// The rows that are known so far. Row 0 is that of the empty text.
#[derive(Debug)]
pub(crate) struct Parser {
    grammar: Arc<Grammar>,
    rows: Vec<Row>,
    known: HashMap<Arc<[Item]>, u32>,
    bytes: usize,
    /// Counts items that were computed since [`Parser::rest`].
    work: usize,
}

impl Parser {
    /// # Errors
    /// `Error::Argument` for a grammar with too many rules at one place.
    pub(crate) fn new(grammar: Arc<Grammar>) -> Result<Parser> {
        let mut p = Parser { grammar, rows: vec![], known: HashMap::new(), bytes: 0, work: 0 };
        let start = p.grammar.alternatives[p.grammar.start as usize].clone();
        let kernel = start.into_iter().map(|at| Item { at, origin: HERE }).collect();
        p.close(kernel)?;
        p.rows[0].accepting = p.grammar.nullable[p.grammar.start as usize];
        Ok(p)
    }

    /// Whether the text of a row matches.
    pub(crate) fn accepting(&self, row: u32) -> bool {
        self.rows[row as usize].accepting
    }

    /// Whether a byte can follow.
    pub(crate) fn continues(&self, row: u32) -> bool {
        let byte = |i: &Item| matches!(self.grammar.symbols[i.at as usize], Symbol::Byte(_));
        self.rows[row as usize].items.iter().any(byte)
    }

    /// Begins a new token: work is bounded for each.
    pub(crate) fn rest(&mut self) {
        self.work = 0;
    }

    /// Whether there is too much to keep: [`Parser::compacted`] should be called.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes > MAX_BYTES
    }

    /// The row after a byte; `None` if the byte cannot follow.
    ///
    /// # Errors
    /// `Error::Argument` for a row with too many items.
    pub(crate) fn advance(&mut self, row: u32, byte: u8) -> Result<Option<u32>> {
        if let Some(next) = &self.rows[row as usize].next {
            match next[usize::from(byte)] {
                UNKNOWN => {}
                DEAD => return Ok(None),
                known => return Ok(Some(known)),
            }
        }
        let g = self.grammar.clone();
        let scanned = |i: &Item| match g.symbols[i.at as usize] {
            Symbol::Byte(set) if has(&g.sets[set as usize], byte) => {
                Some(Item { at: i.at + 1, origin: if i.origin == HERE { row } else { i.origin } })
            }
            _ => None,
        };
        let items = self.rows[row as usize].items.clone();
        self.work += items.len();
        let kernel: Vec<Item> = items.iter().filter_map(scanned).collect();
        let next = if kernel.is_empty() { DEAD } else { self.close(kernel)? };
        let from = &mut self.rows[row as usize];
        if from.next.is_none() {
            self.bytes += 1024;
        }
        from.next.get_or_insert_with(|| Box::new([UNKNOWN; 256]))[usize::from(byte)] = next;
        Ok((next != DEAD).then_some(next))
    }

    /// The row of these items and all that follow from them.
    fn close(&mut self, kernel: Vec<Item>) -> Result<u32> {
        let g = self.grammar.clone();
        let mut seen: HashSet<Item> = kernel.iter().copied().collect();
        let mut work: Vec<Item> = seen.iter().copied().collect();
        let mut predicted = HashSet::new();
        let (mut items, mut waiting, mut accepting) = (vec![], vec![], false);
        while let Some(i) = work.pop() {
            let mut add = |item: Item| {
                if seen.insert(item) {
                    work.push(item);
                }
            };
            match g.symbols[i.at as usize] {
                Symbol::Byte(_) => items.push(i),
                Symbol::Nonterminal(n) => {
                    items.push(i);
                    waiting.push((n, i));
                    if predicted.insert(n) {
                        let alternatives = g.alternatives[n as usize].iter();
                        alternatives.for_each(|at| add(Item { at: *at, origin: HERE }));
                    }
                    if g.nullable[n as usize] {
                        add(Item { at: i.at + 1, origin: i.origin });
                    }
                }
                // What began here matches nothing, which `nullable` covers.
                Symbol::End(_) if i.origin == HERE => {}
                Symbol::End(n) => {
                    if n == g.start && i.origin == 0 {
                        accepting = true;
                        items.push(Item { at: i.at, origin: 0 });
                    }
                    let before = &self.rows[i.origin as usize].waiting;
                    let from = before.partition_point(|w| w.0 < n);
                    let all = before[from..].iter().take_while(|w| w.0 == n);
                    self.work += 1;
                    for (_, w) in all {
                        self.work += 1;
                        let origin = if w.origin == HERE { i.origin } else { w.origin };
                        add(Item { at: w.at + 1, origin });
                    }
                }
            }
            if seen.len() > MAX_ITEMS || self.work > MAX_WORK {
                let what = "it is too ambiguous to be followed here; make it simpler";
                return Err(Error::argument("grammar", what));
            }
        }
        self.work += seen.len();
        items.sort_unstable();
        if let Some(known) = self.known.get(&items[..]) {
            return Ok(*known);
        }
        waiting.sort_unstable();
        let row = Row { items: items.into(), waiting: waiting.into(), next: None, accepting };
        let id = self.rows.len() as u32;
        self.bytes += row.bytes();
        self.known.insert(row.items.clone(), id);
        self.rows.push(row);
        Ok(id)
    }

    /// A parser that has only the rows which these need, and the numbers of these in it.
    ///
    /// # Errors
    /// `Error::Argument` if what must stay is still too much.
    pub(crate) fn compacted(&self, roots: &mut [u32]) -> Result<Parser> {
        let mut keep = vec![false; self.rows.len()];
        let mut work: Vec<u32> = roots.to_vec();
        work.push(0);
        while let Some(r) = work.pop() {
            if !std::mem::replace(&mut keep[r as usize], true) {
                work.extend(self.rows[r as usize].items.iter().map(|i| i.origin).filter(|o| *o != HERE));
            }
        }
        let mut number = vec![0u32; keep.len()];
        let kept = keep.iter().enumerate().filter(|(_, k)| **k).map(|(i, _)| i);
        kept.enumerate().for_each(|(new, old)| number[old] = new as u32);
        let mut out = Parser {
            grammar: self.grammar.clone(),
            rows: vec![],
            known: HashMap::new(),
            bytes: 0,
            work: self.work,
        };
        let new = |i: &Item| Item {
            at: i.at,
            origin: if i.origin == HERE { HERE } else { number[i.origin as usize] },
        };
        for (row, _) in self.rows.iter().zip(&keep).filter(|(_, k)| **k) {
            // New numbers have the order of the old ones, so the items stay sorted.
            let items: Arc<[Item]> = row.items.iter().map(new).collect();
            let waiting = row.waiting.iter().map(|(n, i)| (*n, new(i))).collect();
            let row = Row { items, waiting, next: None, accepting: row.accepting };
            out.bytes += row.bytes();
            out.known.insert(row.items.clone(), out.rows.len() as u32);
            out.rows.push(row);
        }
        roots.iter_mut().for_each(|r| *r = number[*r as usize]);
        match out.bytes <= MAX_BYTES / 2 {
            true => Ok(out),
            false => {
                Err(Error::argument("grammar", "the text so far needs too much memory; make it less nested"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::grammar::{Expr, negated};
    use super::*;

    fn parser(rules: &[Expr]) -> Parser {
        Parser::new(Arc::new(Grammar::new(rules, 0).unwrap())).unwrap()
    }

    fn run(p: &mut Parser, text: &str) -> Option<u32> {
        text.bytes().try_fold(0, |row, b| p.advance(row, b).unwrap())
    }

    fn matches(p: &mut Parser, text: &str) -> bool {
        run(p, text).is_some_and(|r| p.accepting(r))
    }

    #[test]
    fn a_loop_has_one_row() {
        // Characters of several bytes too.
        let any = Expr::Chars(negated(vec![('"', '"')])).repeat(0, None);
        let mut p = parser(&[Expr::Seq(vec![Expr::text("\""), any, Expr::text("\"")])]);
        let a = run(&mut p, "\"a").unwrap();
        for text in ["\"ab", "\"abc", "\"aé", "\"a日本"] {
            assert_eq!(run(&mut p, text), Some(a), "{text}");
        }
        assert!(matches(&mut p, "\"aé\""));
        assert_eq!(run(&mut p, "\"a\"x"), None);
    }

    #[test]
    fn recursion_of_any_kind() {
        let (a, b, s) = (Expr::text("a"), Expr::text("b"), Expr::Rule(0));
        let mut left = parser(&[Expr::Any(vec![Expr::Seq(vec![s.clone(), a.clone()]), b.clone()])]);
        assert!(matches(&mut left, "baaa") && !matches(&mut left, "ab"));
        let mut ambiguous =
            parser(&[Expr::Any(vec![Expr::Seq(vec![s.clone(), s.clone()]), a.clone(), Expr::empty()])]);
        assert!(matches(&mut ambiguous, "") && matches(&mut ambiguous, &"a".repeat(40)));
        let nested = Expr::Any(vec![Expr::Seq(vec![a, s, b]), Expr::empty()]);
        let mut nested = parser(&[nested]);
        assert!(matches(&mut nested, &format!("{}{}", "a".repeat(500), "b".repeat(500))));
        assert!(!matches(&mut nested, "aab"));
    }

    #[test]
    fn repetitions_count() {
        for (least, most) in [(0, 0), (0, 1), (2, 2), (1, 5), (0, 33), (3, 70), (0, 99), (7, 1000)] {
            let mut p = parser(&[Expr::text("a").repeat(least, Some(most))]);
            for n in [0, 1, 2, 3, 5, 6, 7, 32, 33, 34, 70, 71, 99, 100, 1000, 1001] {
                assert_eq!(
                    matches(&mut p, &"a".repeat(n)),
                    (least..=most).contains(&n),
                    "{n} {least} {most}"
                );
            }
        }
    }

    #[test]
    fn what_cannot_end_is_refused() {
        assert!(Grammar::new(&[Expr::Seq(vec![Expr::text("a"), Expr::Rule(0)])], 0).is_err());
        assert!(Grammar::new(&[Expr::never()], 0).is_err());
        let huge = Expr::text("ab").repeat(1 << 30, None);
        assert!(Grammar::new(&[huge], 0).is_err());
        // The dead alternative is not entered.
        let dead = Expr::Seq(vec![Expr::text("b"), Expr::never()]);
        let mut p = parser(&[Expr::Any(vec![Expr::text("a"), dead])]);
        assert_eq!(run(&mut p, "b"), None);
    }

    #[test]
    fn compaction_keeps_the_state() {
        let s = Expr::Rule(0);
        let list = Expr::Seq(vec![Expr::text("["), s.repeat(0, None), Expr::text("]")]);
        let mut p = parser(&[list]);
        let mut rows = [run(&mut p, "[[[][").unwrap()];
        let before = p.rows.len();
        p = p.compacted(&mut rows).unwrap();
        assert!(p.rows.len() <= before);
        let end = b"]]]".iter().try_fold(rows[0], |row, b| p.advance(row, *b).unwrap()).unwrap();
        assert!(p.accepting(end) && !p.continues(end));
    }

    #[test]
    fn negation_leaves_the_rest() {
        assert_eq!(negated(vec![]), [('\0', char::MAX)]);
        assert_eq!(negated(vec![('\0', char::MAX)]), []);
        assert_eq!(
            negated(vec![('b', 'd'), ('c', 'x'), ('\u{e000}', '\u{e000}')]),
            [('\0', 'a'), ('y', '\u{d7ff}'), ('\u{e001}', char::MAX)]
        );
    }
}

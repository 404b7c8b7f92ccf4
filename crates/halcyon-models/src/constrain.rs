//! Structured output: only texts that match a grammar or a JSON schema.
//!
//! A [`Constraint`] knows which tokens may follow the text so far. As the mask of a generation it removes the
//! others before penalties and limits choose among them, and allows tokens that end a text only where the
//! grammar may end. Grammars are context-free, over bytes; `constrain/parser.rs` says how they are followed,
//! in bounded time and memory.

mod gbnf;
mod grammar;
mod keywords;
mod lark;
mod number;
mod parser;
mod regex;
mod schema;
mod text;
mod vocabulary;

use crate::chain::TokenMask;
use grammar::Grammar;
use halcyon::ir::error::{Error, Result};
use halcyon_text::Tokenizer;
use parser::Parser;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vocabulary::Vocabulary;

/// Bytes that remembered masks may take.
const MAX_MASKS: usize = 32 << 20;

/// A mark to which a constraint can go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(usize);

/// What a text must match, and the text so far. Clones share what they learn about the grammar, so they are
/// cheap.
#[derive(Clone)]
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    known: Arc<Mutex<Known>>,
    /// The rows of the marks, and last that of the text so far.
    rows: Vec<u32>,
}

/// What is known about a grammar so far.
struct Known {
    parser: Parser,
    /// For each row whether each token may follow, as bits.
    masks: HashMap<u32, Arc<[u32]>>,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Constraint({:?})", self.vocabulary)
    }
}

impl Constraint {
    /// Texts that match a grammar in GBNF (llama.cpp) or Lark. GBNF is recognised by `::=`.
    ///
    /// # Errors
    /// `Error::Format` with line and column of a mistake; `Error::Unsupported` for parts of the notations
    /// that cannot be followed; `Error::Argument` if no text matches, or if the grammar is too large.
    pub fn grammar(text: &str, tokenizer: &Tokenizer) -> Result<Constraint> {
        Constraint::new(read(text)?, Vocabulary::of(tokenizer))
    }

    /// Values of JSON that satisfy a schema.
    ///
    /// # Errors
    /// `Error::Format` for a malformed schema or one that no value satisfies, and `Error::Unsupported` for a
    /// keyword that cannot be followed, both with the place as a JSON pointer.
    pub fn json_schema(text: &str, tokenizer: &Tokenizer) -> Result<Constraint> {
        Constraint::new(schema::grammar(text)?, Vocabulary::of(tokenizer))
    }

    fn new(grammar: Grammar, vocabulary: Vocabulary) -> Result<Constraint> {
        let parser = Parser::new(Arc::new(grammar))?;
        let known = Known { parser, masks: HashMap::new() };
        Ok(Constraint { vocabulary: Arc::new(vocabulary), known: Arc::new(Mutex::new(known)), rows: vec![0] })
    }

    /// A thread that panicked leaves rows that are whole, so a poisoned lock does no harm.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the text so far, and all marks.
    pub fn restart(&mut self) {
        self.rows = vec![0];
    }

    fn row(&self) -> u32 {
        self.rows.last().copied().unwrap_or(0)
    }

    /// Whether the text so far matches.
    pub fn may_end(&self) -> bool {
        self.known().parser.accepting(self.row())
    }

    /// Whether the text so far matches and nothing can follow.
    pub fn is_complete(&self) -> bool {
        self.may_end() && !self.known().parser.continues(self.row())
    }

    /// Whether a token may follow.
    ///
    /// # Errors
    /// `Error::Argument` if the grammar is too ambiguous to be followed in bounded time and memory.
    pub fn allows(&mut self, token: u32) -> Result<bool> {
        let (mask, i) = (self.mask()?, token as usize);
        Ok(mask.get(i / 32).is_some_and(|m| m >> (i % 32) & 1 == 1))
    }

    /// Adds a token to the text. Returns whether it may follow; if not, the text stays as it was. A token
    /// that ends a text adds nothing.
    ///
    /// # Errors
    /// Those of [`Constraint::allows`].
    pub fn push(&mut self, token: u32) -> Result<bool> {
        if self.vocabulary.ends.contains(&token) {
            return Ok(self.may_end());
        }
        let vocabulary = self.vocabulary.clone();
        let bytes = vocabulary.bytes.get(token as usize).map_or(&[][..], Vec::as_slice);
        let mut row = self.row();
        let full = {
            let mut known = self.known();
            known.parser.rest();
            for b in bytes {
                match known.parser.advance(row, *b)? {
                    Some(next) => row = next,
                    None => return Ok(false),
                }
            }
            known.parser.is_full()
        };
        if let Some(last) = self.rows.last_mut() {
            *last = row;
        }
        if full {
            self.compact(&mut [])?;
        }
        Ok(!bytes.is_empty())
    }

    /// Remembers the text so far.
    pub fn mark(&mut self) -> Mark {
        self.rows.push(self.row());
        Mark(self.rows.len() - 1)
    }

    /// Goes back to the text of a mark, and forgets the mark and those that were made after it.
    pub fn rewind(&mut self, mark: Mark) {
        self.rows.truncate(mark.0.max(1));
    }

    fn mask(&mut self) -> Result<Arc<[u32]>> {
        if let Some(mask) = self.known().masks.get(&self.row()) {
            return Ok(mask.clone());
        }
        let v = self.vocabulary.clone();
        let mut mask = vec![0u32; v.bytes.len().div_ceil(32)];
        let mut allow = |id: u32| mask[id as usize / 32] |= 1 << (id % 32);
        // The rows after each byte of the path to a node.
        let mut path = vec![0u32; v.longest + 1];
        path[0] = self.row();
        self.known().parser.rest();
        let mut at = 0;
        while let Some(node) = v.nodes.get(at) {
            let depth = usize::from(node.depth);
            if self.known().parser.is_full() {
                self.compact(&mut path[..=depth])?;
            }
            let next = self.known().parser.advance(path[depth], node.byte)?;
            let Some(row) = next else {
                at = node.end as usize;
                continue;
            };
            path[depth + 1] = row;
            let (from, to) = node.tokens;
            v.tokens[from as usize..to as usize].iter().for_each(|id| allow(*id));
            at += 1;
        }
        if self.may_end() {
            v.ends.iter().filter(|id| (**id as usize) < v.bytes.len()).for_each(|id| allow(*id));
        }
        let mask: Arc<[u32]> = mask.into();
        let mut known = self.known();
        if (known.masks.len() + 1) * mask.len() * 4 > MAX_MASKS {
            known.masks.clear();
        }
        known.masks.insert(self.row(), mask.clone());
        Ok(mask)
    }

    /// Goes on with the rows that are needed only. Clones keep the old ones.
    fn compact(&mut self, path: &mut [u32]) -> Result<()> {
        let mut roots = [&self.rows[..], path].concat();
        let parser = self.known().parser.compacted(&mut roots)?;
        let (rows, rest) = roots.split_at(self.rows.len());
        path.copy_from_slice(rest);
        self.rows = rows.to_vec();
        self.known = Arc::new(Mutex::new(Known { parser, masks: HashMap::new() }));
        Ok(())
    }
}

impl TokenMask for Constraint {
    fn allowed(&mut self) -> Result<Vec<u32>> {
        let mask = self.mask()?;
        match mask.iter().any(|m| *m != 0) {
            true => Ok(mask.to_vec()),
            false => {
                Err(Error::argument("grammar", "no token of the model's vocabulary can continue the text"))
            }
        }
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        match self.push(token)? {
            true => Ok(()),
            false => Err(Error::argument("grammar", format!("token {token} cannot follow"))),
        }
    }

    fn is_complete(&self) -> bool {
        Constraint::is_complete(self)
    }

    fn fork(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

fn read(text: &str) -> Result<Grammar> {
    match gbnf::is_gbnf(text) {
        true => gbnf::parse(text),
        false => lark::parse(text),
    }
}

/// Reads a grammar in GBNF or Lark, and throws it away: what fuzzing needs.
#[doc(hidden)]
pub fn check_grammar(text: &str) -> Result<()> {
    Parser::new(Arc::new(read(text)?)).map(|_| ())
}

/// Reads a JSON schema, and throws it away: what fuzzing needs.
#[doc(hidden)]
pub fn check_json_schema(text: &str) -> Result<()> {
    Parser::new(Arc::new(schema::grammar(text)?)).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_test::Rng;

    /// Two tokens that end a text, each byte, and some pieces.
    fn vocabulary() -> Vocabulary {
        let pieces = [
            "\":", "\": \"", "{\"", "\"}", "true", "null", "12", "-1", ", ", "é", "日本", "name", "\\n", "}]",
        ];
        let mut bytes = vec![vec![], vec![]];
        bytes.extend((0..=255).map(|b| vec![b]));
        bytes.extend(pieces.map(|p| p.as_bytes().to_vec()));
        Vocabulary::new(bytes, vec![0, 1])
    }

    fn of(grammar: Grammar) -> Constraint {
        Constraint::new(grammar, vocabulary()).unwrap()
    }

    /// Random tokens among those that may follow, up to `most`, and then any that let the text end. Returns
    /// the text, and whether it ended.
    fn noise(c: &mut Constraint, rng: &mut Rng, most: usize) -> (Vec<u8>, bool) {
        let mut out = vec![];
        c.restart();
        for _ in 0..most {
            if c.is_complete() {
                return (out, true);
            }
            let mask = c.allowed().unwrap();
            let may: Vec<u32> =
                (0..mask.len() as u32 * 32).filter(|t| mask[*t as usize / 32] >> (t % 32) & 1 == 1).collect();
            let token = may[rng.below(may.len())];
            if token < 2 {
                assert!(c.may_end());
                return (out, true);
            }
            assert!(c.push(token).unwrap());
            out.extend(&c.vocabulary.bytes[token as usize]);
        }
        (out, false)
    }

    #[test]
    fn masks_are_what_the_parser_accepts() {
        let mut rng = Rng::new(1);
        for text in ["root ::= \"é\" [a-c日]+ | \"{\" root \"}\"", "start: (\"name\" | \"12\" /[^x]/)+"] {
            let mut c = of(read(text).unwrap());
            for _ in 0..30 {
                noise(&mut c, &mut rng, 6);
                let mask = c.allowed();
                for t in 0..c.vocabulary.bytes.len() as u32 {
                    let want = mask.as_ref().is_ok_and(|m| m[t as usize / 32] >> (t % 32) & 1 == 1);
                    let mark = c.mark();
                    assert_eq!(c.push(t).unwrap(), want, "{text}: token {t}");
                    c.rewind(mark);
                }
                c.restart();
            }
        }
    }

    #[test]
    fn noise_satisfies_the_schema() {
        let person = r##"{"type": "object", "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b\"c", 3, null]}, "minItems": 1, "maxItems": 3},
            "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["name", "age"], "additionalProperties": false}"##;
        let mut c = of(schema::grammar(person).unwrap());
        let mut rng = Rng::new(2);
        let mut ended = 0;
        for _ in 0..200 {
            let (text, end) = noise(&mut c, &mut rng, 150);
            if end {
                ended += 1;
                let v: serde_json::Value = serde_json::from_slice(&text).expect("valid JSON");
                check_person(&v);
            }
        }
        assert!(ended > 100, "{ended}");
    }

    fn check_person(v: &serde_json::Value) {
        let o = v.as_object().expect("an object");
        let name = o["name"].as_str().expect("a name").chars().count();
        assert!((1..=8).contains(&name), "{v}");
        assert!((0..=150).contains(&o["age"].as_i64().expect("an integer")), "{v}");
        assert!(o.keys().all(|k| ["name", "age", "tags", "boss"].contains(&k.as_str())), "{v}");
        if let Some(tags) = o.get("tags") {
            let tags = tags.as_array().expect("a list");
            let known = [serde_json::json!("a"), "b\"c".into(), 3.into(), serde_json::Value::Null];
            assert!((1..=3).contains(&tags.len()) && tags.iter().all(|t| known.contains(t)), "{v}");
        }
        if let Some(boss) = o.get("boss").filter(|b| !b.is_null()) {
            check_person(boss);
        }
    }

    #[test]
    fn bombs_end_with_an_error_or_an_answer() {
        // Every text has exponentially many derivations.
        let mut c = of(read("root ::= root root root | root root | \"a\" | \"\"").unwrap());
        let a = 2 + u32::from(b'a');
        for _ in 0..30 {
            assert!(c.allows(a).unwrap() && c.push(a).unwrap());
        }
        assert!(c.may_end());
        // Nested repetitions, and a loop of empty rules.
        for text in [
            "root ::= (((((\"a\"*)*)*)*)* \"b\"?){100}",
            "root ::= x \"a\"\nx ::= y*\ny ::= x | \"\"",
            "start: /((a{0,60}){0,60}){0,60}/",
        ] {
            let mut c = of(read(text).unwrap());
            for _ in 0..5 {
                if !c.allows(a).unwrap() {
                    break;
                }
                c.push(a).unwrap();
            }
        }
        for text in ["root ::= ((\"a\"{9999}){9999}){9999}", "start: /((a{900}){900}){900}/"] {
            // Either is fine: blocks are shared, so the grammar is small.
            let _ = read(text).map(of);
        }
        let mut nested = String::from("{}");
        for _ in 0..200 {
            nested = format!("{{\"items\": {nested}}}");
        }
        assert!(check_json_schema(&nested).is_err());
        // Each definition is used twice by the next one: 2^40 copies.
        let twice = |i: usize| {
            format!(
                "\"d{i}\": {{\"allOf\": [{{\"$ref\": \"#/$defs/d{n}\"}}, {{\"$ref\": \"#/$defs/d{n}\"}}]}}",
                n = i + 1
            )
        };
        let defs: Vec<String> = (0..40).map(twice).collect();
        let bomb = format!("{{\"$ref\": \"#/$defs/d0\", \"$defs\": {{{}, \"d40\": true}}}}", defs.join(", "));
        assert!(check_json_schema(&bomb).unwrap_err().to_string().contains("merged schemas"));
    }

    #[test]
    fn deep_texts_are_followed() {
        let mut c = of(read("root ::= \"[\" root \"]\" | \"\"").unwrap());
        let token = |b: u8| 2 + u32::from(b);
        (0..5000).for_each(|_| assert!(c.push(token(b'[')).unwrap()));
        (0..5000).for_each(|_| assert!(c.push(token(b']')).unwrap()));
        assert!(c.is_complete());
    }
}

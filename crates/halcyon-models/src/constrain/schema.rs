//! JSON schemas as grammars. Every text of the grammar is a value that satisfies the schema; some values that
//! would satisfy it are left out (see `docs/language-models.md`).

use super::grammar::{Expr, Grammar, negated};
use super::keywords::{self, Keys};
use super::number::{self, Bound};
use super::regex;
use halcyon::ir::error::{Error, Result};
use halcyon_text::Json;
use std::collections::HashMap;

/// The most schemas that are looked at, counting each use of a definition that must be merged.
const MAX_WORK: usize = 20_000;

/// The longest text or list that a schema may demand, and the most characters or elements that it may count.
const MAX_COUNT: usize = 100_000;

/// Rule numbers.
const VALUE: usize = 0;
const SPACE: usize = 1;
const CHAR: usize = 2;

/// The grammar of the values that satisfy a schema.
///
/// # Errors
/// `Error::Format` for a malformed schema, or one that no value satisfies; `Error::Unsupported` for a keyword
/// that cannot be expressed. Both name the place as a JSON pointer.
pub(super) fn grammar(text: &str) -> Result<Grammar> {
    let bad = |what: String| Error::Format { file: "JSON schema".into(), what };
    let root = Json::parse(text).map_err(|e| match e {
        Error::Format { what, .. } => bad(what),
        e => bad(e.to_string()),
    })?;
    let mut c = Compiler {
        root: &root,
        rules: vec![Some(value()), Some(space()), Some(json_char(&negated(vec![])))],
        references: HashMap::new(),
        work: 0,
        impossible: None,
    };
    let start = c.schema(&root, "")?;
    let first = c.rules.len();
    c.rules.push(Some(start));
    let rules: Vec<Expr> = c.rules.into_iter().map(|r| r.unwrap_or_else(Expr::never)).collect();
    Grammar::new(&rules, first).map_err(|e| {
        let place = c.impossible.map_or(String::new(), |p| format!("; see {}", shown(&p)));
        bad(format!("no value satisfies it{place}. ({e})"))
    })
}

pub(super) fn shown(path: &str) -> &str {
    if path.is_empty() { "its root" } else { path }
}

pub(super) fn bad(path: &str, what: impl std::fmt::Display) -> Error {
    Error::Format { file: "JSON schema".into(), what: format!("{}: {what}", shown(path)) }
}

pub(super) fn unsupported(path: &str, what: impl std::fmt::Display) -> Error {
    let what = format!("{what} in a JSON schema, at {}", shown(path));
    Error::unsupported(what, "Write the schema without it, or use a grammar.")
}

fn space() -> Expr {
    let indent =
        Expr::Seq(vec![Expr::text("\n"), Expr::Chars(vec![('\t', '\t'), (' ', ' ')]).repeat(0, Some(20))]);
    Expr::Any(vec![Expr::empty(), Expr::text(" "), indent])
}

/// Any value.
fn value() -> Expr {
    let member = || Expr::Seq(vec![string(0, None), colon(), Expr::Rule(VALUE)]);
    Expr::Any(vec![
        Expr::text("null"),
        Expr::text("true"),
        Expr::text("false"),
        number::number(None, None),
        string(0, None),
        enclosed("[", list(|| Expr::Rule(VALUE)).optional(), "]"),
        enclosed("{", list(member).optional(), "}"),
    ])
}

fn colon() -> Expr {
    Expr::Seq(vec![Expr::text(":"), Expr::Rule(SPACE)])
}

fn comma() -> Expr {
    Expr::Seq(vec![Expr::text(","), Expr::Rule(SPACE)])
}

fn enclosed(open: &str, inner: Expr, close: &str) -> Expr {
    Expr::Seq(vec![Expr::text(open), Expr::Rule(SPACE), inner, Expr::Rule(SPACE), Expr::text(close)])
}

/// At least one, with commas between.
fn list(one: impl Fn() -> Expr) -> Expr {
    Expr::Seq(vec![one(), Expr::Seq(vec![comma(), one()]).repeat(0, None)])
}

fn quoted(inner: Expr) -> Expr {
    Expr::Seq(vec![Expr::text("\""), inner, Expr::text("\"")])
}

fn string(least: usize, most: Option<usize>) -> Expr {
    quoted(Expr::Rule(CHAR).repeat(least, most))
}

/// A character inside of a string. Each character is written in one way only.
fn json_char(ranges: &[(char, char)]) -> Expr {
    let within = |c: &char| ranges.iter().any(|(l, h)| (*l..=*h).contains(c));
    let mut plain = negated(ranges.to_vec());
    plain.extend([('\0', '\u{1f}'), ('"', '"'), ('\\', '\\')]);
    let mut out = vec![Expr::Chars(negated(plain))];
    for c in ('\0'..' ').chain(['"', '\\']).filter(within) {
        let text = json_text(&c.to_string());
        out.push(Expr::text(&text[1..text.len() - 1]));
    }
    Expr::Any(out)
}

fn json_text(s: &str) -> String {
    serde_json::Value::from(s).to_string()
}

struct Compiler<'a> {
    root: &'a Json,
    rules: Vec<Option<Expr>>,
    /// The rule of each definition.
    references: HashMap<String, usize>,
    work: usize,
    /// The first place that no value satisfies.
    impossible: Option<String>,
}

impl Compiler<'_> {
    fn rule(&mut self, e: Expr) -> Expr {
        self.rules.push(Some(e));
        Expr::Rule(self.rules.len() - 1)
    }

    fn never(&mut self, path: &str) -> Expr {
        self.impossible.get_or_insert_with(|| path.to_string());
        Expr::never()
    }

    fn schema(&mut self, s: &Json, path: &str) -> Result<Expr> {
        self.step(path)?;
        match s {
            Json::Bool(true) => Ok(Expr::Rule(VALUE)),
            Json::Bool(false) => Ok(self.never(path)),
            Json::Object(_) => {
                let keys = Keys::new(s, path)?;
                self.flattened(keys, path)
            }
            _ => Err(bad(path, "a schema is an object, true or false")),
        }
    }

    /// A reference alone becomes a rule, so that it may lead to itself; what stands beside others is merged.
    fn flattened(&mut self, keys: Keys, path: &str) -> Result<Expr> {
        match keys.only_reference() {
            Some(target) => self.reference(target, path),
            None => {
                let keys = keywords::flat(self.root, keys, path, &mut self.work)?;
                self.keys(keys, path)
            }
        }
    }

    fn step(&mut self, path: &str) -> Result<()> {
        self.work += 1;
        match self.work > MAX_WORK {
            true => {
                Err(bad(path, format!("the schema has more than {MAX_WORK} parts, counting repeated uses")))
            }
            false => Ok(()),
        }
    }

    fn reference(&mut self, target: &str, path: &str) -> Result<Expr> {
        if let Some(rule) = self.references.get(target) {
            return Ok(Expr::Rule(*rule));
        }
        let rule = self.rules.len();
        self.rules.push(None);
        self.references.insert(target.into(), rule);
        let found = keywords::resolve(self.root, target, path)?;
        let place = target.strip_prefix('#').unwrap_or(target);
        let e = self.schema(found, place)?;
        self.rules[rule] = Some(e);
        Ok(Expr::Rule(rule))
    }

    fn keys(&mut self, mut k: Keys, path: &str) -> Result<Expr> {
        self.step(path)?;
        for name in ["anyOf", "oneOf"] {
            let Some(list) = k.remove(name) else { continue };
            let Json::Array(list) = list else { return Err(bad(path, format!("'{name}' is not a list"))) };
            let mut all = vec![];
            for (i, s) in list.iter().enumerate() {
                let place = format!("{path}/{name}/{i}");
                let mut part = Keys::of(s, &place)?;
                if !k.is_empty() {
                    part = keywords::flat(self.root, part, &place, &mut self.work)?;
                    part = k.clone().merged(part, &place)?;
                }
                all.push((part, place));
            }
            for (i, (a, place)) in all.iter().enumerate().filter(|_| name == "oneOf") {
                if all[..i].iter().any(|(b, _)| !keywords::disjoint(self.root, a, b)) {
                    let what = "'oneOf' whose schemas may hold for one value (use 'anyOf')";
                    return Err(unsupported(place, what));
                }
            }
            let mut out = vec![];
            for (part, place) in all {
                out.push(self.flattened(part, &place)?);
            }
            return Ok(Expr::Any(out));
        }
        if let Some(values) = k.values(path)? {
            let list: Vec<Expr> = values.iter().map(|v| literal(v, path)).collect::<Result<_>>()?;
            return Ok(if list.is_empty() { self.never(path) } else { Expr::Any(list) });
        }
        let mut out = vec![];
        for t in k.types(path)? {
            out.push(match t {
                "null" => Expr::text("null"),
                "boolean" => Expr::Any(vec![Expr::text("true"), Expr::text("false")]),
                "integer" => integer(&k, path)?,
                "number" => real(&k, path)?,
                "string" => self.string(&k, path)?,
                "array" => self.array(&k, path)?,
                _ => self.object(&k, path)?,
            });
        }
        Ok(if out.is_empty() { self.never(path) } else { Expr::Any(out) })
    }

    fn string(&mut self, k: &Keys, path: &str) -> Result<Expr> {
        let (least, most) = counts(k, "minLength", "maxLength", path)?;
        let pattern = k.text("pattern", path)?;
        let format = k.text("format", path)?.and_then(keywords::format);
        let place = |key: &str| format!("{path}/{key}");
        let written = |e: std::result::Result<Expr, String>, key: &str| {
            e.map(quoted).map_err(|what| bad(&place(key), what))
        };
        match (pattern, format) {
            (None, None) if most.is_some_and(|m| m < least) => Ok(self.never(path)),
            (None, None) => Ok(string(least, most)),
            (Some(p), None) if least == 0 && most.is_none() => {
                written(regex::parse(p, "", true, &json_char), "pattern")
            }
            (None, Some(f)) if least == 0 && most.is_none() => {
                written(regex::parse(f, "", false, &json_char), "format")
            }
            _ => Err(unsupported(path, "two of pattern, format and a limit of length for one string")),
        }
    }

    fn array(&mut self, k: &Keys, path: &str) -> Result<Expr> {
        let (least, most) = counts(k, "minItems", "maxItems", path)?;
        let (first, rest) = match (k.get("prefixItems"), k.get("items")) {
            (None, Some(Json::Array(list))) => (list.as_slice(), k.get("additionalItems")),
            (Some(Json::Array(list)), rest) => (list.as_slice(), rest),
            (Some(_), _) => return Err(bad(path, "'prefixItems' is not a list")),
            (None, rest) => (&[][..], rest),
        };
        if most.is_some_and(|m| m < least) {
            return Ok(self.never(path));
        }
        let count = first.len();
        let other = self.schema(rest.unwrap_or(&Json::Bool(true)), &format!("{path}/items"))?;
        let other = self.rule(other);
        let more = most.map(|m| m.saturating_sub(count));
        // What follows each number of elements, from the last one to the first.
        let after = Expr::Seq(vec![comma(), other.clone()]);
        let mut tail = after.clone().repeat(
            least.saturating_sub(count.max(1)),
            match count {
                0 => more.map(|m| m.saturating_sub(1)),
                _ => more,
            },
        );
        if count == 0 {
            tail = Expr::Seq(vec![other, tail]);
            let none = most == Some(0);
            let inner = if none {
                Expr::empty()
            } else if least == 0 {
                tail.optional()
            } else {
                tail
            };
            return Ok(enclosed("[", inner, "]"));
        }
        for (i, s) in first.iter().enumerate().rev() {
            let element = self.schema(s, &format!("{path}/prefixItems/{i}"))?;
            let mut parts = vec![element, tail];
            if i > 0 {
                parts.insert(0, comma());
            }
            tail = match Expr::Seq(parts) {
                _ if most.is_some_and(|m| m <= i) => Expr::empty(),
                e if i < least => e,
                e => e.optional(),
            };
            tail = self.rule(tail);
        }
        Ok(enclosed("[", tail, "]"))
    }

    fn object(&mut self, k: &Keys, path: &str) -> Result<Expr> {
        let empty = vec![];
        let properties = match k.get("properties") {
            None => &empty,
            Some(Json::Object(p)) => p,
            Some(_) => return Err(bad(path, "'properties' is not an object")),
        };
        let required = k.names("required", path)?;
        let additional = match k.get("additionalProperties") {
            // Values with members that the schema does not name are left out.
            None if k.get("properties").is_some() => &Json::Bool(false),
            None => &Json::Bool(true),
            Some(s) => s,
        };
        let unnamed = Json::Bool(true);
        let open = k.get("additionalProperties").unwrap_or(&unnamed);
        let mut members: Vec<(&str, &Json, String)> = vec![];
        for (name, s) in properties {
            members.retain(|m| m.0 != name.as_str());
            members.push((name, s, format!("{path}/properties/{}", keywords::pointer(name))));
        }
        for name in &required {
            if !members.iter().any(|m| m.0 == *name) {
                members.push((name, open, format!("{path}/additionalProperties")));
            }
        }
        let (least, most) = counts(k, "minProperties", "maxProperties", path)?;
        let closed = *additional == Json::Bool(false);
        if least > required.len() || most.is_some_and(|m| !closed || m < members.len()) {
            return Err(unsupported(path, "'minProperties' or 'maxProperties' that is not met by all forms"));
        }
        let names: Vec<&str> = members.iter().map(|m| m.0).collect();
        let extra = match closed {
            true => None,
            false => {
                let of = self.schema(additional, &format!("{path}/additionalProperties"))?;
                let key = quoted(self.other_name(&names));
                Some(self.rule(Expr::Seq(vec![key, colon(), of])))
            }
        };
        // What follows a member, if one was written before and if not: from the last one to the first.
        let more = |m: &Expr| Expr::Seq(vec![comma(), m.clone()]).repeat(0, None);
        let mut tails = match &extra {
            None => [Expr::empty(), Expr::empty()],
            Some(m) => [Expr::Seq(vec![m.clone(), more(m)]).optional(), more(m)],
        };
        for (name, s, place) in members.iter().rev() {
            let of = self.schema(s, place)?;
            let pair = self.rule(Expr::Seq(vec![Expr::text(&json_text(name)), colon(), of]));
            let optional = !required.contains(name);
            let after = tails[1].clone();
            let written =
                [Expr::Seq(vec![pair.clone(), after.clone()]), Expr::Seq(vec![comma(), pair, after])];
            let mut next = vec![];
            for (with, without) in written.into_iter().zip(tails) {
                let e = if optional { Expr::Any(vec![with, without]) } else { with };
                next.push(self.rule(e));
            }
            tails = [next.remove(0), next.remove(0)];
        }
        let [first, _] = tails;
        Ok(enclosed("{", first, "}"))
    }

    /// The text of a name other than these. It has no escapes, so that it cannot spell one of them.
    fn other_name(&mut self, names: &[&str]) -> Expr {
        let plain = vec![('\0', '\u{1f}'), ('"', '"'), ('\\', '\\')];
        let any = self.rule(Expr::Chars(negated(plain.clone())).repeat(0, None));
        // Names by their common beginnings, longest first, so that each is made before those that use it.
        let mut beginnings: Vec<&str> =
            names.iter().flat_map(|n| n.char_indices().map(|(i, _)| &n[..i]).chain([*n])).collect();
        beginnings.sort_unstable_by_key(|b| (std::cmp::Reverse(b.len()), *b));
        beginnings.dedup();
        let mut rules: HashMap<&str, Expr> = HashMap::new();
        let mut next: HashMap<&str, Vec<(char, Expr)>> = HashMap::new();
        for b in beginnings {
            let children = next.remove(b).unwrap_or_default();
            let mut taken = plain.clone();
            let mut out = if names.contains(&b) { vec![] } else { vec![Expr::empty()] };
            for (c, rest) in children {
                taken.push((c, c));
                out.push(Expr::Seq(vec![Expr::Chars(vec![(c, c)]), rest]));
            }
            out.push(Expr::Seq(vec![Expr::Chars(negated(taken)), any.clone()]));
            let rule = self.rule(Expr::Any(out));
            if let Some(c) = b.chars().next_back() {
                next.entry(&b[..b.len() - c.len_utf8()]).or_default().push((c, rule.clone()));
            }
            rules.insert(b, rule);
        }
        rules.remove("").unwrap_or(any)
    }
}

fn literal(v: &Json, path: &str) -> Result<Expr> {
    let text = serde_json::to_string(v).map_err(|e| bad(path, e))?;
    Ok(Expr::text(&text))
}

fn counts(k: &Keys, low: &str, high: &str, path: &str) -> Result<(usize, Option<usize>)> {
    let count = |key: &str| -> Result<Option<usize>> {
        let Some(v) = k.number(key, path)? else { return Ok(None) };
        match v >= 0.0 && v.fract() == 0.0 {
            true => Ok(Some(v as usize)),
            false => Err(bad(path, format!("'{key}' is not a count"))),
        }
    };
    let (least, most) = (count(low)?.unwrap_or(0), count(high)?);
    match least > MAX_COUNT || most.is_some_and(|m| m > MAX_COUNT) {
        true => Err(bad(path, format!("'{low}' and '{high}' may be at most {MAX_COUNT}"))),
        false => Ok((least, most)),
    }
}

/// The bounds of a number, each with whether it is included.
fn bounds(k: &Keys, path: &str) -> Result<[Option<(f64, bool)>; 2]> {
    let mut out = [None; 2];
    let sides = [("minimum", "exclusiveMinimum", 1.0), ("maximum", "exclusiveMaximum", -1.0)];
    for (slot, (plain, exclusive, sign)) in out.iter_mut().zip(sides) {
        let bound = k.number(plain, path)?;
        let (strict, other) = match k.get(exclusive) {
            // The form of draft 4.
            Some(Json::Bool(b)) => (*b, None),
            _ => (false, k.number(exclusive, path)?),
        };
        let bound = bound.map(|v| (v, !strict));
        *slot = match (bound, other) {
            (Some((v, _)), Some(e)) if v * sign > e * sign => bound,
            (_, Some(e)) => Some((e, false)),
            _ => bound,
        };
    }
    Ok(out)
}

fn integer(k: &Keys, path: &str) -> Result<Expr> {
    let [low, high] = bounds(k, path)?;
    let large = |v: f64| v.abs() > 1e18;
    if [low, high].iter().flatten().any(|(v, _)| large(*v)) {
        return Err(unsupported(path, "a bound of an integer beyond 1e18"));
    }
    let low = low.map(|(v, inc)| v.ceil() as i128 + i128::from(!inc && v.fract() == 0.0));
    let high = high.map(|(v, inc)| v.floor() as i128 - i128::from(!inc && v.fract() == 0.0));
    Ok(number::integer(low, high))
}

fn real(k: &Keys, path: &str) -> Result<Expr> {
    let [low, high] = bounds(k, path)?;
    let bound = |b: Option<(f64, bool)>| {
        let made = b.map(|(v, inc)| Bound::new(v, inc).ok_or(()));
        made.transpose().map_err(|()| unsupported(path, "a bound of a number beyond 1e18"))
    };
    Ok(number::number(bound(low)?.as_ref(), bound(high)?.as_ref()))
}

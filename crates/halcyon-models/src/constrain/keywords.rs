//! The keywords of a schema: which are known, how references are resolved, and how two schemas that must both
//! hold become one.

use super::schema::{bad, unsupported};
use halcyon::ir::error::Result;
use halcyon_text::Json;

/// The most schemas that are merged.
const MAX_MERGES: usize = 20_000;

/// Keywords that say nothing about a value.
const NOTES: &[&str] = &[
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
];

/// Keywords that are followed. Others that the standard does not name are ignored, as it demands.
const KNOWN: &[&str] = &[
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
];

const REFUSED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "multipleOf",
    "divisibleBy",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
];

const TYPES: &[&str] = &["null", "boolean", "integer", "number", "string", "array", "object"];

/// Keywords that only concern one type. Without `type`, they say which type is meant.
const OF_TYPE: &[(&str, &[&str])] = &[
    ("object", &["properties", "required", "additionalProperties", "minProperties", "maxProperties"]),
    ("array", &["items", "prefixItems", "additionalItems", "minItems", "maxItems"]),
    ("string", &["minLength", "maxLength", "pattern", "format"]),
    ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
];

/// The regular expression of a format; `None` for those that are not enforced.
pub(super) fn format(name: &str) -> Option<&'static str> {
    // Days are at most 28, so that each month has them.
    macro_rules! date {
        () => {
            "[0-9]{3}[1-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
        };
    }
    macro_rules! time {
        () => {
            "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
        };
    }
    Some(match name {
        "date" => date!(),
        "time" => time!(),
        "date-time" => concat!(date!(), "T", time!()),
        "duration" => "P([1-9][0-9]{0,3}W|[1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}H)?|T[1-9][0-9]{0,3}[HMS])",
        "uuid" => "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        "ipv4" => {
            "((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        }
        "ipv6" => "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
        "hostname" => "([a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\\.){1,4}[a-z]{2,12}",
        "email" => {
            "[A-Za-z0-9_+-]{1,30}(\\.[A-Za-z0-9_+-]{1,30}){0,2}@([a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\\.){1,4}[a-z]{2,12}"
        }
        "uri" => {
            "https?://([a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?\\.){1,4}[a-z]{2,12}(/[A-Za-z0-9._~-]{0,40}){0,8}"
        }
        _ => return None,
    })
}

/// A name as a part of a JSON pointer.
pub(super) fn pointer(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// The schema that a reference means.
pub(super) fn resolve<'a>(root: &'a Json, target: &str, path: &str) -> Result<&'a Json> {
    let missing = || bad(path, format!("'$ref' names '{target}', which the schema does not have"));
    let Some(rest) = target.strip_prefix('#') else {
        return Err(unsupported(path, format!("'$ref' to another file ('{target}')")));
    };
    if !rest.is_empty() && !rest.starts_with('/') {
        return Err(unsupported(path, format!("'$ref' to an anchor ('{target}')")));
    }
    rest.split('/').skip(1).try_fold(root, |at, part| {
        let name = part.replace("~1", "/").replace("~0", "~").replace("%25", "%").replace("%20", " ");
        match at {
            Json::Array(list) => name.parse::<usize>().ok().and_then(|i| list.get(i)).ok_or_else(missing),
            other => other.get(&name).ok_or_else(missing),
        }
    })
}

/// The keywords of one schema that matter, each once.
#[derive(Clone, Debug)]
pub(super) struct Keys(Vec<(String, Json)>);

impl Keys {
    /// # Errors
    /// `Error::Unsupported` for a keyword that cannot be followed; `Error::Format` for what is no schema.
    pub(super) fn new(s: &Json, path: &str) -> Result<Keys> {
        let Json::Object(fields) = s else { return Err(bad(path, "a schema is an object, true or false")) };
        let mut out: Vec<(String, Json)> = vec![];
        for (key, v) in fields {
            let allowed = matches!(v, Json::Bool(true)) && key.starts_with("unevaluated")
                || matches!(v, Json::Array(a) if a.is_empty())
                || matches!(v, Json::Object(o) if o.is_empty() && !matches!(key.as_str(), "not" | "contains"));
            if REFUSED.contains(&key.as_str()) && !allowed || key == "uniqueItems" && *v != Json::Bool(false)
            {
                return Err(unsupported(path, format!("'{key}'")));
            }
            if KNOWN.contains(&key.as_str()) && !NOTES.contains(&key.as_str()) {
                // Of a repeated key, the last value counts.
                out.retain(|f| f.0 != *key);
                out.push((key.clone(), v.clone()));
            }
        }
        Ok(Keys(out))
    }

    /// Those of any schema, `true` and `false` included.
    pub(super) fn of(s: &Json, path: &str) -> Result<Keys> {
        match s {
            Json::Bool(true) => Ok(Keys(vec![])),
            Json::Bool(false) => Ok(Keys(vec![("enum".into(), Json::Array(vec![]))])),
            _ => Keys::new(s, path),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        self.0.iter().find(|f| f.0 == key).map(|f| &f.1)
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<Json> {
        self.0.iter().position(|f| f.0 == key).map(|i| self.0.remove(i).1)
    }

    /// The target, if the schema is a reference and nothing else.
    pub(super) fn only_reference(&self) -> Option<&str> {
        match &self.0[..] {
            [(key, v)] if key == "$ref" => v.as_str(),
            _ => None,
        }
    }

    pub(super) fn number(&self, key: &str, path: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => number(v).map(Some).ok_or_else(|| bad(path, format!("'{key}' is not a number"))),
        }
    }

    pub(super) fn text(&self, key: &str, path: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| bad(path, format!("'{key}' is not a text"))),
        }
    }

    /// A list of texts, each once; empty without the key.
    pub(super) fn names(&self, key: &str, path: &str) -> Result<Vec<&str>> {
        let wrong = || bad(path, format!("'{key}' is not a list of texts"));
        let Some(v) = self.get(key) else { return Ok(vec![]) };
        let Json::Array(list) = v else { return Err(wrong()) };
        let mut out = vec![];
        for v in list {
            let name = v.as_str().ok_or_else(wrong)?;
            if !out.contains(&name) {
                out.push(name);
            }
        }
        Ok(out)
    }

    /// The types that a value may have.
    pub(super) fn types(&self, path: &str) -> Result<Vec<&'static str>> {
        let known = |name: &str| TYPES.iter().find(|t| **t == name).copied();
        let given = match self.get("type") {
            None => {
                let concerns = |keys: &&[&str]| keys.iter().any(|k| self.get(k).is_some());
                let meant: Vec<&'static str> =
                    OF_TYPE.iter().filter(|(_, keys)| concerns(keys)).map(|(t, _)| *t).collect();
                let all = TYPES.iter().filter(|t| **t != "integer").copied().collect();
                return Ok(if meant.is_empty() { all } else { meant });
            }
            Some(Json::String(s)) => vec![s.as_str()],
            Some(_) => self.names("type", path)?,
        };
        let mut out = vec![];
        for name in given {
            let t = known(name).ok_or_else(|| {
                bad(path, format!("'{name}' is not a type; the types are {}", TYPES.join(", ")))
            })?;
            out.push(t);
        }
        if out.contains(&"number") {
            out.retain(|t| *t != "integer");
        }
        Ok(out)
    }

    /// The values of `enum` or `const` that satisfy the other keywords; `None` without these keys.
    pub(super) fn values(&self, path: &str) -> Result<Option<Vec<Json>>> {
        let mut list = match self.get("enum") {
            Some(Json::Array(list)) => list.clone(),
            Some(_) => return Err(bad(path, "'enum' is not a list")),
            None => match self.get("const") {
                Some(c) => vec![c.clone()],
                None => return Ok(None),
            },
        };
        if let Some(c) = self.get("const") {
            list.retain(|v| same(v, c));
        }
        let mut out: Vec<Json> = vec![];
        for v in list {
            if self.holds(&v, path)? && !out.iter().any(|o| same(o, &v)) {
                out.push(v);
            }
        }
        Ok(Some(out))
    }

    /// Whether a listed value satisfies the other keywords.
    fn holds(&self, v: &Json, path: &str) -> Result<bool> {
        let is = type_of(v);
        if self.get("type").is_some() {
            let types = self.types(path)?;
            let fits = types.contains(&is) || is == "integer" && types.contains(&"number");
            if !fits {
                return Ok(false);
            }
        }
        let of = OF_TYPE.iter().find(|(t, _)| *t == if is == "integer" { "number" } else { is });
        let concern = of.into_iter().flat_map(|(_, keys)| keys.iter()).filter(|k| self.get(k).is_some());
        for key in concern {
            let limit = self.get(key).and_then(number);
            let length = v.as_str().map(|s| s.chars().count() as f64);
            let holds = match (*key, number(v), limit) {
                ("minimum", Some(v), Some(l)) => v >= l,
                ("maximum", Some(v), Some(l)) => v <= l,
                ("exclusiveMinimum", Some(v), Some(l)) => v > l,
                ("exclusiveMaximum", Some(v), Some(l)) => v < l,
                ("minLength", _, Some(l)) => length.is_some_and(|n| n >= l),
                ("maxLength", _, Some(l)) => length.is_some_and(|n| n <= l),
                ("format", ..) => true,
                _ => return Err(unsupported(path, format!("'{key}' beside 'enum' or 'const'"))),
            };
            if !holds {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The schema that holds where both hold.
    pub(super) fn merged(mut self, other: Keys, path: &str) -> Result<Keys> {
        let closes = |k: &Keys| k.get("additionalProperties").is_some_and(|v| *v != Json::Bool(true));
        let names = |k: &Keys| match k.get("properties") {
            Some(Json::Object(p)) => p.iter().map(|f| f.0.clone()).collect(),
            _ => vec![],
        };
        let foreign = |a: &Keys, b: &Keys| closes(a) && names(b).iter().any(|n| !names(a).contains(n));
        if foreign(&self, &other) || foreign(&other, &self) {
            let what = "'additionalProperties' beside a schema with further properties";
            return Err(unsupported(path, what));
        }
        for (key, v) in other.0 {
            match self.0.iter_mut().find(|f| f.0 == key) {
                None => self.0.push((key, v)),
                Some((_, mine)) => *mine = both(&key, mine, &v, path)?,
            }
        }
        Ok(self)
    }
}

fn number(v: &Json) -> Option<f64> {
    match v {
        Json::Int(i) => Some(*i as f64),
        Json::UInt(u) => Some(*u as f64),
        Json::Float(f) => Some(*f),
        _ => None,
    }
}

fn type_of(v: &Json) -> &'static str {
    match v {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Int(_) | Json::UInt(_) => "integer",
        Json::Float(f) if f.fract() == 0.0 => "integer",
        Json::Float(_) => "number",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

/// Whether two values are equal: numbers by value, objects in any order.
fn same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Object(x), Json::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(k, v)| b.get(k).is_some_and(|w| same(v, w)))
        }
        _ => match (number(a), number(b)) {
            (Some(a), Some(b)) => a == b,
            _ => a == b,
        },
    }
}

/// The value of a keyword where two schemas must hold.
fn both(key: &str, a: &Json, b: &Json, path: &str) -> Result<Json> {
    if same(a, b) {
        return Ok(a.clone());
    }
    let list = |v: &Json| match v {
        Json::Array(l) => l.clone(),
        one => vec![one.clone()],
    };
    let object = |v: Vec<(&str, Json)>| Json::Object(v.into_iter().map(|(k, v)| (k.into(), v)).collect());
    let all = |a: &Json, b: &Json| object(vec![("allOf", Json::Array(vec![a.clone(), b.clone()]))]);
    let up = ["minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"].contains(&key);
    let down = ["maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"].contains(&key);
    if let (Some(x), Some(y), true) = (number(a), number(b), up || down) {
        return Ok(if (x > y) == up { a.clone() } else { b.clone() });
    }
    Ok(match (key, a, b) {
        ("type", ..) => {
            let (x, y) = (list(a), list(b));
            let has = |l: &[Json], t: &str| l.iter().any(|v| v.as_str() == Some(t));
            let fits = |t: &&Json| has(&y, t.as_str().unwrap_or(""));
            let mut out: Vec<Json> = x.iter().filter(fits).cloned().collect();
            let whole = |p: &[Json], q: &[Json]| has(p, "number") && has(q, "integer") && !has(p, "integer");
            if whole(&x, &y) || whole(&y, &x) {
                out.push(Json::String("integer".into()));
            }
            Json::Array(out)
        }
        ("required", Json::Array(x), Json::Array(y)) => Json::Array([&x[..], y].concat()),
        ("enum", Json::Array(x), Json::Array(y)) => {
            Json::Array(x.iter().filter(|v| y.iter().any(|w| same(v, w))).cloned().collect())
        }
        ("properties", Json::Object(x), Json::Object(y)) => {
            let mut out = x.clone();
            for (name, s) in y {
                match out.iter_mut().find(|f| f.0 == *name) {
                    None => out.push((name.clone(), s.clone())),
                    Some((_, mine)) => *mine = all(mine, s),
                }
            }
            Json::Object(out)
        }
        ("items" | "additionalProperties", ..)
            if !matches!((a, b), (Json::Array(_), _) | (_, Json::Array(_))) =>
        {
            all(a, b)
        }
        ("const", ..) => return Err(bad(path, "two values of 'const' cannot both hold")),
        _ => return Err(unsupported(path, format!("'{key}' twice for one value, with different content,"))),
    })
}

/// Resolves `$ref` and `allOf` of a schema until neither is left.
pub(super) fn flat(root: &Json, mut k: Keys, path: &str, work: &mut usize) -> Result<Keys> {
    let mut first = true;
    loop {
        let parts = match (k.remove("$ref"), k.remove("allOf")) {
            (None, None) => return Ok(k),
            (Some(r), rest) => {
                // The other part follows in the next round.
                if let Some(rest) = rest {
                    k.0.push(("allOf".into(), rest));
                }
                let target = r.as_str().ok_or_else(|| bad(path, "'$ref' is not a text"))?;
                vec![resolve(root, target, path)?.clone()]
            }
            (None, Some(Json::Array(list))) => list,
            (None, Some(_)) => return Err(bad(path, "'allOf' is not a list")),
        };
        for (i, s) in parts.iter().enumerate() {
            *work += 1;
            if *work > MAX_MERGES {
                let what = format!("more than {MAX_MERGES} merged schemas; does a reference lead to itself?");
                return Err(bad(path, what));
            }
            let mut part = Keys::of(s, path)?;
            // Two of them cannot be kept under one key, so each is resolved before it is merged.
            if i > 0 || !first {
                let (reference, all) = (part.remove("$ref"), part.remove("allOf"));
                for (key, v) in [("$ref", reference), ("allOf", all)] {
                    let Some(v) = v else { continue };
                    let wrapped = Json::Object(vec![(key.into(), v)]);
                    push_all(&mut k, wrapped);
                }
            }
            k = k.merged(part, path)?;
        }
        first = false;
    }
}

/// Adds a schema to those that must hold.
fn push_all(k: &mut Keys, s: Json) {
    match k.0.iter_mut().find(|f| f.0 == "allOf") {
        Some((_, Json::Array(list))) => list.push(s),
        _ => k.0.push(("allOf".into(), Json::Array(vec![s]))),
    }
}

/// Whether no value that is generated for one schema satisfies the other.
pub(super) fn disjoint(root: &Json, a: &Keys, b: &Keys) -> bool {
    apart(root, a, b, 0)
}

fn apart(root: &Json, a: &Keys, b: &Keys, depth: usize) -> bool {
    let plain = |k: &Keys| flat(root, k.clone(), "", &mut 0).ok();
    let (Some(a), Some(b)) = (plain(a), plain(b)) else { return false };
    if depth > 8 {
        return false;
    }
    let values = |k: &Keys| k.values("").ok().flatten();
    match (values(&a), values(&b)) {
        (Some(x), Some(y)) => return !x.iter().any(|v| y.iter().any(|w| same(v, w))),
        (Some(x), None) | (None, Some(x)) => {
            let other = if values(&a).is_some() { &b } else { &a };
            return x.iter().all(|v| matches!(other.holds(v, ""), Ok(false)));
        }
        (None, None) => {}
    }
    // What is generated has the types that a schema means, but the other may allow more.
    let meant = |k: &Keys| k.types("").unwrap_or_default();
    let allowed = |k: &Keys| if k.get("type").is_some() { meant(k) } else { TYPES.to_vec() };
    let overlap = |x: &[&str], y: &[&str]| {
        x.iter().any(|t| {
            y.contains(t)
                || (*t == "integer" && y.contains(&"number"))
                || (*t == "number" && y.contains(&"integer"))
        })
    };
    if !overlap(&meant(&a), &allowed(&b)) && !overlap(&meant(&b), &allowed(&a)) {
        return true;
    }
    if meant(&a) != ["object"] || meant(&b) != ["object"] {
        return false;
    }
    let property = |k: &Keys, name: &str| k.get("properties").and_then(|p| p.get(name).cloned());
    let required = |k: &Keys| -> Vec<String> {
        k.names("required", "").unwrap_or_default().into_iter().map(String::from).collect()
    };
    let differs = required(&a).iter().filter(|n| required(&b).contains(n)).any(|n| {
        match (property(&a, n), property(&b, n)) {
            (Some(x), Some(y)) => match (Keys::of(&x, ""), Keys::of(&y, "")) {
                (Ok(x), Ok(y)) => apart(root, &x, &y, depth + 1),
                _ => false,
            },
            _ => false,
        }
    });
    // What is generated for a schema with properties has no others.
    let lacks = |a: &Keys, b: &Keys| {
        let open = a.get("additionalProperties").is_some_and(|v| *v != Json::Bool(false));
        let named = |n: &str| property(a, n).is_some() || required(a).iter().any(|r| r == n);
        !open && a.get("properties").is_some() && required(b).iter().any(|n| !named(n))
    };
    differs || (lacks(&a, &b) && lacks(&b, &a))
}

//! Functions and filters that templates expect beyond Jinja's own.

use super::invalid;
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Output, State, Value};

/// Depth of nested values that are printed. An object can contain itself, so there must be a limit.
const MAX_DEPTH: usize = 100;

/// Most digits of a width in a format. Larger ones would fill the memory.
const MAX_WIDTH_DIGITS: usize = 3;

/// Methods of Python's texts, lists and dictionaries.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (name, value.as_str()) {
        ("title", Some(text)) => Ok(title(text).into()),
        ("format", Some(text)) => {
            check_widths(text)?;
            minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Python's `title`: letters after anything but a letter are capitals.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_letter = false;
    for c in text.chars() {
        match after_letter {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        after_letter = c.is_alphabetic();
    }
    out
}

fn check_widths(text: &str) -> Result<(), Error> {
    let digits = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if digits > MAX_WIDTH_DIGITS || text.contains('*') {
        return Err(invalid("a format may have no width above 999 and none that is an argument"));
    }
    Ok(())
}

/// The filter `format`.
pub(super) fn format(text: &str, args: Rest<Value>) -> Result<String, Error> {
    check_widths(text)?;
    minijinja::formatting::format(FormatStyle::Printf, text, &args)
}

/// The filter `indent`.
pub(super) fn indent(
    text: &str,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let width = width.or(kwargs.get("width")?).unwrap_or(4);
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    if width >= 1000 {
        return Err(invalid("indent: the width must be below 1000"));
    }
    let pad = " ".repeat(width);
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 || first) && (blank || !line.is_empty()) {
            out += &pad;
        }
        out += line;
    }
    Ok(out)
}

/// A value that is to be put into a namespace. It must not contain a namespace itself, so that there are no
/// cycles, and must not be nested too deep to be destroyed.
pub(super) fn without_namespaces(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    check(state, &value, 0)?;
    Ok(value)
}

fn check(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<(), Error> {
    let Some(object) = value.as_object() else { return Ok(()) };
    if object.type_name().contains("Namespace") {
        return Err(invalid("a namespace cannot be stored in a namespace"));
    }
    if depth > MAX_DEPTH {
        return Err(invalid(format!("a value is nested more than {MAX_DEPTH} deep")));
    }
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        for item in value.try_iter()? {
            state.consume_fuel(1)?;
            check(state, &item, depth + 1)?;
            if value.kind() == ValueKind::Map {
                check(state, &value.get_item(&item)?, depth + 1)?;
            }
        }
    }
    Ok(())
}

/// Prints a value as Python does. Only numbers differ from the interpreter's own way.
pub(super) fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.kind() == ValueKind::Number
        && !value.is_integer()
        && let Ok(f) = f64::try_from(value.clone())
        && f.is_finite()
    {
        return out.write_str(&float(f)).map_err(Error::from);
    }
    minijinja::escape_formatter(out, state, value)
}

/// The template's way to reject its messages.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(invalid(message.to_string()))
}

/// JSON as Python's `json.dumps` writes it, with characters outside ASCII as they are.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(v) => Some(v),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        Some(v) if !v.is_none() => Some(usize::try_from(v)?.min(64)),
        _ => None,
    };
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    kwargs.assert_all_used()?;
    let mut item = if indent.is_some() { "," } else { ", " }.to_string();
    let mut key = ": ".to_string();
    match separators.as_deref() {
        None => {}
        Some([i, k]) => (item, key) = (i.clone(), k.clone()),
        Some(_) => return Err(invalid("tojson: separators must be two texts")),
    }
    let mut w = Writer { state, out: String::new(), paid: 0, indent, item, key, ensure_ascii, sort };
    w.value(value, 0)?;
    Ok(w.out)
}

struct Writer<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    out: String,
    /// Length of the output for which the interpreter's steps were counted.
    paid: usize,
    indent: Option<usize>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort: bool,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, v: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson: values are nested more than {MAX_DEPTH} deep")));
        }
        // A value can contain another one many times, so the text is paid for while it grows.
        self.state.consume_fuel(1 + (self.out.len() - self.paid) as u64 / 64)?;
        self.paid = self.out.len();
        match v.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if v.is_true() { "true" } else { "false" }),
            ValueKind::Number if v.is_integer() => self.out += &v.to_string(),
            ValueKind::Number => self.out += &float(f64::try_from(v.clone())?),
            ValueKind::String => self.string(v.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = v.try_iter()?.collect();
                self.list(('[', ']'), &items, depth, |w, v| w.value(v, depth + 1))?;
            }
            ValueKind::Map => {
                let mut items: Vec<(Value, Value)> = vec![];
                for k in v.try_iter()? {
                    let value = v.get_item(&k)?;
                    items.push((k, value));
                }
                if self.sort {
                    items.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(('{', '}'), &items, depth, |w, (k, v)| {
                    match (k.as_str(), k.kind()) {
                        (Some(text), _) => w.string(text),
                        (_, ValueKind::Number | ValueKind::Bool | ValueKind::None) => {
                            let text = tojson(w.state, k, None, Kwargs::from_iter([] as [(&str, Value); 0]))?;
                            w.string(&text);
                        }
                        _ => return Err(invalid("tojson: the key of an object must be a text")),
                    }
                    w.out.push_str(&w.key);
                    w.value(v, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: a value of kind {kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn list<T>(
        &mut self,
        (open, close): (char, char),
        items: &[T],
        depth: usize,
        mut write: impl FnMut(&mut Self, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item);
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(n) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', n * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out += &format!("\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's text of a float: an exponent below 1e-4 and from 1e16 on, of at least two digits.
fn float(f: f64) -> String {
    if f.is_nan() {
        return "NaN".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let short = format!("{f:e}");
    let (digits, exponent) = short.split_once('e').unwrap_or((&short, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    match exponent {
        -4..16 => format!("{f:?}"),
        _ => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases: [(f64, &str); 9] = [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5e-3, "-0.0025"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e300, "1.25e+300"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (f, text) in cases {
            assert_eq!(float(f), text);
        }
    }
}

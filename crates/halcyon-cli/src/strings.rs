//! Reads inputs that are strings from JSON, text files or NumPy arrays of strings, and inputs that are maps
//! from JSON.

use crate::numbers;
use halcyon::{Error, Result};
use halcyon_formats::npy;
use halcyon_formats::onnx::{Datum, Keys, Port, PortType, Text};
use halcyon_formats::sniff::Kind;
use serde_json::Value;
use std::path::Path;

/// Converts a JSON document to the value of an input of strings or a map.
pub(crate) fn json(p: &Port, v: &Value) -> std::result::Result<Datum, String> {
    match &p.ty {
        PortType::Map(of) => map(v, of),
        _ => strings(v).map(Datum::Text),
    }
}

/// Reads the value of an input of strings or a map. `None` for other inputs, and for files of another known
/// kind, such as an ONNX value.
///
/// Strings in JSON are an array, nested like the tensor, or the form that `run` saves: `{"shape": […],
/// "values": […]}`. A map is an object, or `{"keys": […], "values": […]}`, which integer keys require. A text
/// file has one string per line.
///
/// # Errors
/// [`Error::Format`] for files with other content.
pub(crate) fn read(p: &Port, path: &Path, bytes: &[u8], kind: Option<Kind>) -> Result<Option<Datum>> {
    let file = path.display().to_string();
    let bad = |what: String| Error::Format { file: file.clone(), what };
    if !matches!(p.ty, PortType::Text { .. } | PortType::Map(_)) {
        return Ok(None);
    }
    let ending = |e: &str| path.extension().is_some_and(|x| x.eq_ignore_ascii_case(e));
    // The ending of the file's name decides first, because a short text may look like any format.
    let (is_json, is_lines) = match kind {
        _ if ending("json") => (true, false),
        _ if ending("txt") => (false, true),
        Some(Kind::Npy) if matches!(p.ty, PortType::Text { .. }) => {
            let (dims, vals) = npy::parse_text(bytes.to_vec().into(), &file)?;
            return Ok(Some(Datum::Text(Text::new(&dims, vals)?)));
        }
        Some(_) => return Ok(None),
        None => {
            let start = bytes.iter().find(|b| !b.is_ascii_whitespace());
            let json = start.is_some_and(|b| matches!(b, b'[' | b'{' | b'"'));
            (json, !json)
        }
    };
    let text = std::str::from_utf8(bytes).map_err(|_| bad("not UTF-8 text".into()))?;
    if is_json {
        let v: Value = serde_json::from_str(text).map_err(|e| bad(format!("not JSON: {e}")))?;
        return json(p, &v).map(Some).map_err(bad);
    }
    if !is_lines || !matches!(p.ty, PortType::Text { .. }) {
        return Err(bad(format!("{} must be given as JSON", p.ty.kind())));
    }
    lines(p, text.lines().map(String::from).collect()).map(|t| Some(Datum::Text(t)))
}

/// Makes a tensor with one string per line, in the shape that the model declares.
///
/// # Errors
/// The errors of [`Text::new`].
pub(crate) fn lines(p: &Port, vals: Vec<String>) -> Result<Text> {
    // One row or one column if the model declares such a matrix.
    let n = vals.len();
    let dims = match p.shape().map(|s| s.as_ref()) {
        Some([]) if n == 1 => vec![],
        Some([_, last]) if last.is(1) => vec![n, 1],
        Some([first, _]) if first.is(1) => vec![1, n],
        _ => vec![n],
    };
    Text::new(&dims, vals)
}

/// A tensor of strings.
pub(crate) fn strings(v: &Value) -> std::result::Result<Text, String> {
    let (dims, vals) = flatten(v)?;
    let vals = vals.into_iter().map(word).collect::<std::result::Result<_, _>>()?;
    Text::new(&dims, vals).map_err(|e| e.to_string())
}

/// Sizes and elements of nested arrays, or of an object with `shape` and `values`.
pub(crate) fn flatten(v: &Value) -> std::result::Result<(Vec<usize>, Vec<&Value>), String> {
    if let Value::Object(o) = v {
        let (Some(shape), Some(Value::Array(vals))) =
            (o.get("shape").and_then(Value::as_array), o.get("values"))
        else {
            return Err("a JSON object of values must have \"shape\" and \"values\"".into());
        };
        let size = |d: &Value| d.as_u64().and_then(|d| usize::try_from(d).ok());
        let dims =
            shape.iter().map(size).collect::<Option<Vec<_>>>().ok_or("\"shape\" must contain only sizes")?;
        return Ok((dims, vals.iter().collect()));
    }
    // The first array at each depth gives the size; the other arrays at this depth must have the same size.
    let (mut dims, mut first) = (vec![], v);
    while let Value::Array(a) = first {
        dims.push(a.len());
        match a.first() {
            Some(f) => first = f,
            None => break,
        }
    }
    let mut level: Vec<&Value> = vec![v];
    for d in &dims {
        let mut next = Vec::with_capacity(level.len());
        for v in level {
            match v {
                Value::Array(a) if a.len() == *d => next.extend(a),
                _ => return Err(format!("the arrays do not all have the sizes {dims:?}")),
            }
        }
        level = next;
    }
    Ok((dims, level))
}

fn word(v: &Value) -> std::result::Result<String, String> {
    v.as_str().map(String::from).ok_or_else(|| format!("{v} is not a string"))
}

/// A map whose values have the type `of`.
fn map(v: &Value, of: &PortType) -> std::result::Result<Datum, String> {
    let Value::Object(o) = v else {
        return Err("a map must be a JSON object".into());
    };
    let pair = (o.get("keys").and_then(Value::as_array), o.get("values").and_then(Value::as_array));
    let (keys, vals): (Keys, Vec<&Value>) = match pair {
        (Some(k), Some(v)) if o.len() == 2 && k.len() == v.len() => {
            let ints = k.iter().map(Value::as_i64).collect::<Option<Vec<_>>>();
            let keys = match ints {
                Some(k) if !k.is_empty() => Keys::Ints(k),
                _ => Keys::Texts(k.iter().map(word).collect::<std::result::Result<_, _>>()?),
            };
            (keys, v.iter().collect())
        }
        _ => (Keys::Texts(o.keys().cloned().collect()), o.values().collect()),
    };
    let n = vals.len();
    let value = match of {
        PortType::Tensor { dtype, .. } => numbers::tensor(*dtype, &[vals.len()], &vals)?.into(),
        PortType::Text { .. } => {
            let vals = vals.into_iter().map(word).collect::<std::result::Result<_, _>>()?;
            Datum::Text(Text::new(&[n], vals).map_err(|e| e.to_string())?)
        }
        other => return Err(format!("a map to {} must be given as an ONNX .pb file", other.kind())),
    };
    Ok(Datum::Map(keys, Box::new(value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::DType;

    fn port(ty: PortType) -> Port {
        Port { name: "x".into(), ty }
    }

    fn text(declared: Option<&[usize]>, name: &str, content: &[u8]) -> Result<Text> {
        let p = port(PortType::Text { shape: declared.map(Into::into) });
        match read(&p, Path::new(name), content, halcyon_formats::sniff::kind(content))? {
            Some(Datum::Text(t)) => Ok(t),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn json_and_lines() {
        let t = |d: &[usize], v: &[&str]| Text::new(d, v.iter().map(|s| s.to_string()).collect()).unwrap();
        let same = |name: &str, content: &str, want: Text| {
            assert_eq!(text(None, name, content.as_bytes()).unwrap(), want, "{content}");
        };
        same("a.json", r#"[["a", "é"], ["", "b"]]"#, t(&[2, 2], &["a", "é", "", "b"]));
        same("a", r#" {"shape": [1, 2], "values": ["a", "b"]}"#, t(&[1, 2], &["a", "b"]));
        same("a.json", r#""one""#, t(&[], &["one"]));
        same("a.json", "[]", t(&[0], &[]));
        same("a.json", "[[], []]", t(&[2, 0], &[]));
        same("a.txt", "[a\nb c\n", t(&[2], &["[a", "b c"]));
        assert_eq!(text(Some(&[1, 9]), "a.txt", b"a\nb").unwrap(), t(&[1, 2], &["a", "b"]));
        assert_eq!(text(Some(&[9, 1]), "a.txt", b"a\nb").unwrap(), t(&[2, 1], &["a", "b"]));
        for bad in [
            r#"[["a"], "b"]"#,
            r#"[["a"], ["b", "c"]]"#,
            "[1]",
            r#"{"shape": [3], "values": []}"#,
            "{}",
            "[\"a\"",
        ] {
            let e = text(None, "a.json", bad.as_bytes()).unwrap_err();
            assert!(matches!(e, Error::Format { .. }), "{bad}: {e}");
        }
        assert!(text(None, "a.txt", b"\xff").is_err());
    }

    #[test]
    fn maps() {
        let of = |dtype| port(PortType::Map(Box::new(PortType::Tensor { dtype, shape: None })));
        let get = |dtype, s: &str| read(&of(dtype), Path::new("m.json"), s.as_bytes(), None);
        let Ok(Some(Datum::Map(k, v))) = get(DType::F32, r#"{"keys": [7, -1], "values": [1.5, 2]}"#) else {
            panic!("no map")
        };
        assert_eq!(k, Keys::Ints(vec![7, -1]));
        assert_eq!(v.tensor().unwrap().to_vec::<f32>(), [1.5, 2.0]);
        let Ok(Some(Datum::Map(k, _))) = get(DType::I64, r#"{"b": 1, "a": 2}"#) else { panic!("no map") };
        assert!(matches!(k, Keys::Texts(k) if k.len() == 2));
        assert!(get(DType::I64, r#"{"a": 1.5}"#).is_err());
        assert!(get(DType::F32, "[1]").is_err());
    }
}

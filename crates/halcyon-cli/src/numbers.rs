//! Numbers given as JSON: `--input '[[1, 2], [3, 4]]'`, and `.json` files.

use crate::strings;
use halcyon::{ConstData, DType, Error, Result, Scalar};
use halcyon_formats::data;
use halcyon_formats::onnx::{Datum, Port, PortType};
use serde_json::Value;
use std::path::Path;

/// Parses a source that is JSON: an array, an object, a number, a string, true or false. `None` for the name
/// of an existing file and for other text.
///
/// # Errors
/// [`Error::Argument`] for text that begins like an array or object but is not valid JSON. Text that ends
/// with a letter is no error, because it may be a file pattern.
pub(crate) fn parse(text: &str) -> Result<Option<Value>> {
    let start = text.trim_start();
    let nested = start.starts_with(['[', '{']);
    let scalar = start.starts_with(|c: char| c.is_ascii_digit() || "-\"tf".contains(c));
    // A file pattern may begin with a bracket too.
    if !nested && !scalar || Path::new(text).exists() {
        return Ok(None);
    }
    match serde_json::from_str(text) {
        Ok(v) => Ok(Some(v)),
        Err(e) if nested && !text.ends_with(|c: char| c.is_alphabetic()) => {
            Err(Error::argument("--input", format!("{text} begins like JSON but does not parse: {e}")))
        }
        Err(_) => Ok(None),
    }
}

/// Converts JSON to the value of an input.
pub(crate) fn datum(p: &Port, v: &Value) -> std::result::Result<Datum, String> {
    let dtype = match &p.ty {
        PortType::Tensor { dtype, .. } => *dtype,
        PortType::Text { .. } | PortType::Map(_) => return strings::json(p, v),
        other => return Err(format!("{} must be given as an ONNX .pb file", other.kind())),
    };
    let (mut dims, vals) = strings::flatten(v)?;
    // A single row is accepted for a batch of one.
    if let Some(s) = p.shape()
        && s.rank() > dims.len()
    {
        let missing = s.rank() - dims.len();
        if s.iter().take(missing).all(|d| d.known().is_none_or(|n| n == 1)) {
            dims.splice(0..0, std::iter::repeat_n(1, missing));
        }
    }
    tensor(dtype, &dims, &vals).map(Datum::Tensor)
}

/// A tensor of these elements. An integer or bool that the dtype cannot represent is an error; floats are
/// rounded to the dtype.
pub(crate) fn tensor(
    dtype: DType,
    dims: &[usize],
    vals: &[&Value],
) -> std::result::Result<ConstData, String> {
    if dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) != Some(vals.len()) {
        return Err(format!("{} values do not fill {dims:?}", vals.len()));
    }
    let scalars = vals.iter().map(|v| scalar(dtype, v)).collect::<std::result::Result<Vec<_>, _>>()?;
    let x = data::from_scalars(dtype, dims, scalars.iter().copied()).map_err(|e| e.to_string())?;
    if dtype.is_float() {
        return Ok(x);
    }
    let other = x.scalars().zip(&scalars).position(|(a, b)| int(a) != int(*b));
    match other {
        Some(i) => Err(format!("{} (value {i}) does not fit {dtype}", vals[i])),
        None => Ok(x),
    }
}

fn int(s: Scalar) -> i128 {
    match s {
        Scalar::Bool(b) => b.into(),
        Scalar::I(i) => i.into(),
        Scalar::U(u) => u.into(),
        Scalar::F(f) => f as i128,
    }
}

fn scalar(dtype: DType, v: &Value) -> std::result::Result<Scalar, String> {
    let n = match (v, dtype) {
        (Value::Bool(b), DType::Bool) => Some(Scalar::Bool(*b)),
        // JSON has no such numbers, so `--json` writes them as strings.
        (Value::String(s), d) if d.is_float() => match s.as_str() {
            "NaN" => Some(Scalar::F(f64::NAN)),
            "Infinity" => Some(Scalar::F(f64::INFINITY)),
            "-Infinity" => Some(Scalar::F(f64::NEG_INFINITY)),
            _ => None,
        },
        (_, d) if d.is_float() => v.as_f64().map(Scalar::F),
        _ => v.as_i64().map(Scalar::I).or_else(|| v.as_u64().map(Scalar::U)),
    };
    n.ok_or_else(|| format!("{v} is not a value of type {dtype}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::Shape;

    fn read(dtype: DType, shape: Option<Shape>, text: &str) -> std::result::Result<ConstData, String> {
        let p = Port { name: "x".into(), ty: PortType::Tensor { dtype, shape } };
        let v = parse(text).map_err(|e| e.to_string())?.ok_or("no JSON")?;
        datum(&p, &v)?.tensor().cloned().ok_or("no tensor".into())
    }

    #[test]
    fn arrays_take_the_rank_of_the_input() {
        let x = read(DType::I64, Some(["b", "s"].into()), "[1, 2, 3]").unwrap();
        assert_eq!((x.dims.as_slice(), x.to_vec::<i64>()), (&[1, 3][..], vec![1, 2, 3]));
        let x = read(DType::F32, None, "[[1, -2.5], [\"NaN\", \"Infinity\"]]").unwrap();
        assert_eq!(x.dims.as_slice(), [2, 2]);
        assert!(x.to_vec::<f32>()[2].is_nan() && x.to_vec::<f32>()[3] == f32::INFINITY);
        assert!(read(DType::F32, Some(Shape::from([0usize; 0])), "3").unwrap().dims.is_empty());
        assert_eq!(read(DType::Bool, None, "[true, 0]").unwrap().to_vec::<bool>(), [true, false]);
        let x = read(DType::U64, None, "[18446744073709551615]").unwrap();
        assert_eq!(x.to_vec::<u64>(), [u64::MAX]);
        // A leading size is not added if the model fixes it and it is not 1.
        assert_eq!(read(DType::I64, Some([4usize, 3].into()), "[1, 2, 3]").unwrap().dims.as_slice(), [3]);
        let x = read(DType::I32, None, r#"{"shape": [1, 2], "values": [5, 6]}"#).unwrap();
        assert_eq!((x.dims.as_slice(), x.to_vec::<i32>()), (&[1, 2][..], vec![5, 6]));
    }

    #[test]
    fn values_that_do_not_fit_are_named() {
        for (dtype, text, part) in [
            (DType::U8, "[1, 300]", "300 (value 1) does not fit u8"),
            (DType::I64, "[1.5]", "1.5 is not a value of type i64"),
            (DType::I64, "[\"a\"]", "not a value of type i64"),
            (DType::F32, "[[1, 2], [3]]", "do not all have the sizes"),
            (DType::F32, "[1, 2", "does not parse"),
            (DType::F32, r#"{"shape": [3], "values": [1]}"#, "do not fill"),
        ] {
            let e = read(dtype, None, text).unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        }
        assert!(parse("[a-z]*.png").unwrap().is_none());
        assert!(parse("digit.png").unwrap().is_none());
        assert!(parse("7.png").unwrap().is_none());
    }
}

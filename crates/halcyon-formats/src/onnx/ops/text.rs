//! Tensor operators that move or compare strings, and conversion between strings and numbers.
//!
//! An operator that only moves or compares elements runs on numbers instead of strings: each string is
//! replaced by its index in the sorted list of all distinct strings. Equal strings have equal numbers, their
//! order is preserved, and the empty string, which fills gaps, is 0.

use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Item, Text};
use crate::onnx::node::Call;
use crate::{data, onnx::tensor};
use halcyon_ir::{ConstData, DType, Error, Result, Scalar};
use std::collections::BTreeSet;

/// The results of an operator that contain elements of its string operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MovedResults {
    All,
    First,
    /// None: the results are numbers.
    None,
}

/// Operators that only move or compare elements.
const MOVE_OPERATORS: &[(&str, MovedResults)] = &[
    ("CenterCropPad", MovedResults::All),
    ("Compress", MovedResults::All),
    ("Concat", MovedResults::All),
    ("DepthToSpace", MovedResults::All),
    ("Equal", MovedResults::None),
    ("Expand", MovedResults::All),
    ("Flatten", MovedResults::All),
    ("Gather", MovedResults::All),
    ("GatherElements", MovedResults::All),
    ("GatherND", MovedResults::All),
    ("NonZero", MovedResults::None),
    ("OneHot", MovedResults::All),
    ("Pad", MovedResults::All),
    ("Reshape", MovedResults::All),
    ("ReverseSequence", MovedResults::All),
    ("Scatter", MovedResults::All),
    ("ScatterElements", MovedResults::All),
    ("ScatterND", MovedResults::All),
    ("Shape", MovedResults::None),
    ("Size", MovedResults::None),
    ("Slice", MovedResults::All),
    ("SpaceToDepth", MovedResults::All),
    ("Split", MovedResults::All),
    ("Squeeze", MovedResults::All),
    ("TensorScatter", MovedResults::All),
    ("Tile", MovedResults::All),
    ("Transpose", MovedResults::All),
    ("Trilu", MovedResults::All),
    ("Unique", MovedResults::First),
    ("Unsqueeze", MovedResults::All),
    ("Where", MovedResults::All),
];

/// Whether an operator of the default domain accepts strings in place of tensors.
#[cfg(test)]
pub(crate) fn moves(op: &str) -> bool {
    MOVE_OPERATORS.iter().any(|(m, _)| *m == op)
}

/// Runs a tensor operator, some of whose operands are strings. `None` if the operator does more than move or
/// compare elements, or an operand is neither a tensor nor a string tensor.
pub(crate) fn run(
    b: &mut Builder,
    c: &Call<'_>,
    build: fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>,
) -> Result<Option<Vec<Item>>> {
    let plain = matches!(c.node.domain.as_str(), "" | "ai.onnx");
    let found = MOVE_OPERATORS.iter().find(|(op, _)| plain && *op == c.node.op_type);
    let Some((_, moved)) = found else {
        return Ok(None);
    };
    // With a reduction, the operator computes with elements.
    if !matches!(c.string("reduction", "none"), Ok("none")) {
        return Ok(None);
    }
    if c.inputs.iter().flatten().any(|i| i.tensor().is_none() && i.text().is_none()) {
        return Ok(None);
    }
    let words = StringTable::of(c.inputs.iter().flatten().filter_map(Item::text));
    let coded = |i: &Item| -> Result<Item> {
        Ok(match i.text() {
            Some(t) => words.coded(t)?.into(),
            None => i.clone(),
        })
    };
    let inputs = c.inputs.iter().map(|i| i.as_ref().map(coded).transpose()).collect::<Result<Vec<_>>>()?;
    let out = build(b, &Call { inputs: &inputs, ..*c })?;
    let mut items = Vec::with_capacity(out.len());
    for (k, v) in out.into_iter().enumerate() {
        let text = *moved == MovedResults::All || (*moved == MovedResults::First && k == 0);
        items.push(if text && c.is_result_used(k) { words.read(b, &v)?.into() } else { v.into() });
    }
    Ok(Some(items))
}

/// Limits on the number of strings that an operator may create, and on their total bytes.
pub(crate) const MAX_STRINGS: usize = 1 << 22;
const MAX_BYTES: usize = 256 << 20;

/// A tensor with copies of strings. Limited, because there may be far more copies than originals.
///
/// # Errors
/// [`Error::Unsupported`] for more than [`MAX_STRINGS`] strings or too many bytes; errors of the iterator.
pub(crate) fn copies<S: Into<String> + AsRef<str>>(
    dims: &[usize],
    from: impl IntoIterator<Item = Result<S>>,
) -> Result<Text> {
    let (mut vals, mut bytes) = (vec![], 0usize);
    for s in from {
        let s = s?;
        bytes = bytes.saturating_add(s.as_ref().len());
        if vals.len() == MAX_STRINGS || bytes > MAX_BYTES {
            return Err(Error::unsupported(
                "an operator whose result has so many strings",
                format!("A result may have {MAX_STRINGS} strings with {MAX_BYTES} bytes in total"),
            ));
        }
        vals.push(s.into());
    }
    Text::new(dims, vals)
}

/// The distinct strings of some tensors in sorted order. A string's index is its number.
#[derive(Debug)]
pub(crate) struct StringTable {
    list: Vec<String>,
}

impl StringTable {
    pub(crate) fn of<'a>(texts: impl Iterator<Item = &'a Text>) -> StringTable {
        let all: BTreeSet<&str> = texts.flat_map(|t| t.vals.iter().map(String::as_str)).chain([""]).collect();
        StringTable { list: all.into_iter().map(String::from).collect() }
    }

    /// Replaces the strings of a tensor by their numbers. All strings must be in the table.
    pub(crate) fn coded(&self, t: &Text) -> Result<Value> {
        let code = |s: &String| match self.list.binary_search(s) {
            Ok(i) => Ok(i as i64),
            Err(_) => Err(Error::internal("a string that is not in the table")),
        };
        let codes = t.vals.iter().map(code).collect::<Result<Vec<_>>>()?;
        Ok(Value::table(ConstData::from_slice(&t.dims, &codes)?))
    }

    /// Converts a tensor of numbers back to strings. Computes it on the device first if necessary.
    pub(crate) fn read(&self, b: &mut Builder, v: &Value) -> Result<Text> {
        let v = b.fetch(v, "the indices of strings")?;
        let word = |s: Scalar| {
            let w = usize::try_from(s.as_i64()).ok().and_then(|i| self.list.get(i));
            w.map(String::as_str).ok_or_else(|| {
                Error::unsupported(
                    "an operator that computes new strings",
                    "Strings can only be moved and compared",
                )
            })
        };
        copies(&v.dims, v.scalars().map(word))
    }
}

/// Formats a number as Python prints it: with the fewest digits that read back as the same number of its
/// dtype, and with an exponent from 1e16 on and below 1e-4.
pub(crate) fn spell(v: Scalar, dtype: DType) -> String {
    let f = match v {
        Scalar::F(f) => f,
        v if dtype == DType::Bool => return if v.as_bool() { "True" } else { "False" }.into(),
        Scalar::I(i) => return i.to_string(),
        v => return (v.as_i64() as u64).to_string(),
    };
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.into();
    }
    // Rust prints `d.ddde-x` with the fewest digits for f32 and f64.
    let scientific = match dtype {
        DType::F64 => format!("{f:e}"),
        DType::F32 => format!("{:e}", f as f32),
        d => {
            let same = |s: &str| s.parse::<f64>().is_ok_and(|r| Scalar::F(r).cast(d) == Scalar::F(f));
            (0..17).map(|n| format!("{f:.n$e}")).find(|s| same(s)).unwrap_or_else(|| format!("{f:e}"))
        }
    };
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(m) => ("-", m),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let zeros = |n: i32| "0".repeat(n.max(0) as usize);
    if f != 0.0 && !(-4..16).contains(&exponent) {
        let sign_of = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{mantissa}e{sign_of}{:02}", exponent.abs());
    }
    let point = exponent + 1;
    let len = digits.len() as i32;
    if point <= 0 {
        format!("{sign}0.{}{digits}", zeros(-point))
    } else if point >= len {
        format!("{sign}{digits}{}.0", zeros(point - len))
    } else {
        let (whole, rest) = digits.split_at(point as usize);
        format!("{sign}{whole}.{rest}")
    }
}

/// Parses a string as a number. For an integer dtype, integers that fit 64 bits are exact; other strings are
/// parsed as finite floats and truncated. A float dtype also accepts `inf` and `NaN`, in upper or lower case.
/// For bool, `True` and `False` (or `true` and `false`) and numbers are accepted.
pub(crate) fn number(c: &Call<'_>, s: &str, dtype: DType) -> Result<Scalar> {
    let t = s.trim();
    let not = || c.invalid(format!("'{s}' is not a number of type {dtype}"));
    if dtype == DType::Bool {
        let truth = match t {
            "True" | "true" => true,
            "False" | "false" => false,
            t => t.parse::<f64>().map_err(|_| not())? != 0.0,
        };
        return Ok(Scalar::Bool(truth));
    }
    if dtype.is_float() {
        return Ok(Scalar::F(match dtype {
            DType::F32 => t.parse::<f32>().map_err(|_| not())?.into(),
            _ => t.parse::<f64>().map_err(|_| not())?,
        }));
    }
    if let Ok(i) = t.parse::<i64>() {
        return Ok(Scalar::I(i).cast(dtype));
    }
    if let Ok(u) = t.parse::<u64>() {
        return Ok(Scalar::U(u).cast(dtype));
    }
    let f = t.parse::<f64>().ok().filter(|f| f.is_finite()).ok_or_else(not)?;
    Ok(Scalar::F(f.trunc()).cast(dtype))
}

/// Cast and CastLike if strings are involved; `numbers` builds the other cases. `to` is the dtype of the
/// result, `None` for strings.
pub(crate) fn cast(
    b: &mut Builder,
    c: &Call<'_>,
    to: Option<DType>,
    numbers: fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>,
) -> Result<Vec<Item>> {
    let item = match (c.item(0)?, to) {
        (Item::Text(t), None) => Item::Text(t.clone()),
        (Item::Text(t), Some(d)) => {
            let vals = t.vals.iter().map(|s| number(c, s, d)).collect::<Result<Vec<_>>>()?;
            b.feed(data::from_scalars(d, &t.dims, vals)?).into()
        }
        (Item::Tensor(x), None) => {
            let x: ConstData = b.fetch(x, "the numbers of a cast to strings")?;
            copies(&x.dims, x.scalars().map(|s| Ok(spell(s, x.dtype))))?.into()
        }
        (Item::Tensor(_), Some(_)) => return Ok(numbers(b, c)?.into_iter().map(Item::from).collect()),
        (other, _) => return Err(c.invalid(format!("the operand is {}, not a tensor", other.kind()))),
    };
    Ok(vec![item])
}

/// Whether the attribute `to` of Cast is the string type.
pub(crate) fn to_strings(c: &Call<'_>) -> Result<bool> {
    Ok(c.opt_int("to")? == Some(tensor::STRING.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spelled_as_python_does() {
        let f = |v: f64, d| spell(Scalar::F(v).cast(d), d);
        for (v, want) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (100.5, "100.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(f(v, DType::F64), want);
        }
        assert_eq!(f(0.1, DType::F32), "0.1");
        assert_eq!(f(1.0 / 3.0, DType::F32), "0.33333334");
        assert_eq!(f(0.1, DType::F16), "0.1");
        assert_eq!(f(1.0 / 3.0, DType::F16), "0.3333");
        assert_eq!(f(65504.0, DType::F16), "65500.0");
        assert_eq!(f(3.3, DType::BF16), "3.3");
        assert_eq!(spell(Scalar::Bool(true), DType::Bool), "True");
        assert_eq!(spell(Scalar::I(-5), DType::I8), "-5");
        assert_eq!(spell(Scalar::U(u64::MAX), DType::U64), "18446744073709551615");
    }
}

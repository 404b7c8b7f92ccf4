//! Strings where operators of numbers meet them: moving them about, comparing them, and turning them into numbers and back.
//!
//! An operator that only moves or compares elements runs on strings as on numbers: each distinct string stands for its place in
//! the sorted list of all of them (so equal strings are equal numbers, their order is kept, and the empty string, which fills
//! gaps, is 0).

use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Item, Text};
use crate::onnx::node::Call;
use crate::{data, onnx::tensor};
use halcyon_ir::{ConstData, DType, Error, Result, Scalar};
use std::collections::{BTreeMap, BTreeSet};

/// Which results of an operator hold elements of its string operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    All,
    First,
    /// The results are numbers.
    None,
}

/// The operators that move or compare elements without computing with them.
const MOVERS: &[(&str, Moved)] = &[
    ("CenterCropPad", Moved::All),
    ("Compress", Moved::All),
    ("Concat", Moved::All),
    ("DepthToSpace", Moved::All),
    ("Equal", Moved::None),
    ("Expand", Moved::All),
    ("Flatten", Moved::All),
    ("Gather", Moved::All),
    ("GatherElements", Moved::All),
    ("GatherND", Moved::All),
    ("NonZero", Moved::None),
    ("OneHot", Moved::All),
    ("Pad", Moved::All),
    ("Reshape", Moved::All),
    ("ReverseSequence", Moved::All),
    ("Scatter", Moved::All),
    ("ScatterElements", Moved::All),
    ("ScatterND", Moved::All),
    ("Shape", Moved::None),
    ("Size", Moved::None),
    ("Slice", Moved::All),
    ("SpaceToDepth", Moved::All),
    ("Split", Moved::All),
    ("Squeeze", Moved::All),
    ("TensorScatter", Moved::All),
    ("Tile", Moved::All),
    ("Transpose", Moved::All),
    ("Trilu", Moved::All),
    ("Unique", Moved::First),
    ("Unsqueeze", Moved::All),
    ("Where", Moved::All),
];

/// Runs an operator of tensors on operands of which some are strings. `None` if it would compute with them.
pub fn run(
    b: &mut Builder,
    c: &Call<'_>,
    build: fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>,
) -> Result<Option<Vec<Item>>> {
    let plain = matches!(c.node.domain.as_str(), "" | "ai.onnx");
    let found = MOVERS.iter().find(|(op, _)| plain && *op == c.node.op_type);
    let Some((_, moved)) = found else {
        return Ok(None);
    };
    // A sum of updates is arithmetic.
    if !matches!(c.string("reduction", "none"), Ok("none")) {
        return Ok(None);
    }
    if c.inputs.iter().flatten().any(|i| i.tensor().is_none() && i.text().is_none()) {
        return Ok(None);
    }
    let words =
        c.inputs.iter().flatten().filter_map(Item::text).flat_map(|t| t.vals.iter().map(String::as_str));
    let words: BTreeSet<&str> = words.chain([""]).collect();
    let code: BTreeMap<&str, i64> = words.iter().enumerate().map(|(i, w)| (*w, i as i64)).collect();
    let words: Vec<&str> = words.into_iter().collect();
    let coded = |i: &Item| -> Result<Item> {
        let Some(t) = i.text() else { return Ok(i.clone()) };
        let codes = t.vals.iter().map(|s| Scalar::I(code.get(s.as_str()).copied().unwrap_or(0)));
        Ok(Value::weight(data::from_scalars(DType::I64, &t.dims, codes)?, c.name).into())
    };
    let inputs = c.inputs.iter().map(|i| i.as_ref().map(coded).transpose()).collect::<Result<Vec<_>>>()?;
    let out = build(b, &Call { inputs: &inputs, ..*c })?;
    let mut items = Vec::with_capacity(out.len());
    for (k, v) in out.into_iter().enumerate() {
        let text = *moved == Moved::All || (*moved == Moved::First && k == 0);
        if !text || !c.wants(k) {
            items.push(v.into());
            continue;
        }
        let v = b.fetch(&v, "the places of strings")?;
        let word = |s: Scalar| {
            let w = usize::try_from(s.as_i64()).ok().and_then(|i| words.get(i));
            w.map(|w| w.to_string()).ok_or_else(|| Error::internal("a string that was not there before"))
        };
        items.push(Text::new(&v.dims, v.scalars().map(word).collect::<Result<_>>()?)?.into());
    }
    Ok(Some(items))
}

/// A number as NumPy prints it: the fewest digits that read back as the same number of its type, with an exponent from 1e16 on
/// and below 1e-4.
pub fn spell(v: Scalar, dtype: DType) -> String {
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
    // `d.ddde-x`, which Rust gives with the fewest digits for f32 and f64.
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

/// A string as a number: integers exactly where they fit 64 bits, else what stands there as a decimal number, `INF` or `NaN` in
/// any case. A decimal number becomes an integer by cutting off its fraction.
pub fn number(c: &Call<'_>, s: &str, dtype: DType) -> Result<Scalar> {
    let t = s.trim();
    let not = || c.invalid(format!("'{s}' is no number of type {dtype}"));
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

/// Cast and CastLike where strings are involved, `numbers` for the rest. `to` is the type of the result; `None` for strings.
pub fn cast(
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
            Text::new(&x.dims, x.scalars().map(|s| spell(s, x.dtype)).collect())?.into()
        }
        (Item::Tensor(_), Some(_)) => return Ok(numbers(b, c)?.into_iter().map(Item::from).collect()),
        (other, _) => return Err(c.invalid(format!("the operand is {}, not a tensor", other.kind()))),
    };
    Ok(vec![item])
}

/// Whether the attribute `to` of Cast names strings.
pub fn to_strings(c: &Call<'_>) -> Result<bool> {
    Ok(c.opt_int("to")? == Some(tensor::STRING.into()))
}

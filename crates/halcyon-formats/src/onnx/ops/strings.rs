//! Operators on strings. They run on the host, because the graph cannot hold strings.

use super::text::{MAX_STRINGS, copies};
use super::{Row, item_row, re2};
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Item, Text};
use crate::onnx::node::Call;
use halcyon_ir::{ConstData, Result};
use std::collections::HashSet;

pub(super) const ROWS: &[Row] = &[
    item_row("RegexFullMatch", 20, &["pattern"], regex_full_match),
    item_row("StringConcat", 20, &[], concat),
    item_row(
        "StringNormalizer",
        10,
        &["case_change_action", "is_case_sensitive", "locale", "stopwords"],
        normalize,
    ),
    item_row("StringSplit", 20, &["delimiter", "maxsplit"], split),
];

/// A bool tensor: true for strings that match as a whole.
fn regex_full_match(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let pattern = c.string("pattern", "")?;
    let re = re2::compile(pattern).map_err(|e| match e {
        re2::PatternError::Unsupported(what) => {
            c.unsupported(&format!("{what} in the pattern '{pattern}'"), "Write the pattern without it")
        }
        re2::PatternError::Invalid(what) => c.invalid(format!("the pattern '{pattern}': {what}")),
    })?;
    let x = c.text(0)?;
    let hits: Vec<bool> = x.vals.iter().map(|s| re.is_match(s)).collect();
    let y: Value = b.feed(ConstData::from_slice(&x.dims, &hits)?);
    Ok(vec![y.into()])
}

/// Concatenates the strings of X with those of Y, with NumPy broadcasting.
fn concat(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let (x, y) = (c.text(0)?, c.text(1)?);
    let rank = x.dims.len().max(y.dims.len());
    let size = |t: &Text, k: usize| (k + t.dims.len()).checked_sub(rank).map_or(1, |k| t.dims[k]);
    let mut dims = Vec::with_capacity(rank);
    for k in 0..rank {
        dims.push(match (size(x, k), size(y, k)) {
            (a, b) if a == b || b == 1 => a,
            (1, b) => b,
            _ => return Err(c.invalid(format!("{:?} and {:?} do not broadcast", x.dims, y.dims))),
        });
    }
    let n = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    let n = n.ok_or_else(|| c.invalid(format!("{dims:?} is too large to address")))?;
    let pick = |t: &Text, at: &[usize]| {
        let skip = rank - t.dims.len();
        at[skip..].iter().zip(&t.dims).fold(0, |s, (i, n)| s * n + if *n == 1 { 0 } else { *i })
    };
    let mut at = vec![0; rank];
    let joined = (0..n).map(|_| {
        let s = format!("{}{}", x.vals[pick(x, &at)], y.vals[pick(y, &at)]);
        for k in (0..rank).rev() {
            at[k] += 1;
            if at[k] < dims[k] {
                break;
            }
            at[k] = 0;
        }
        Ok(s)
    });
    Ok(vec![copies(&dims, joined)?.into()])
}

/// Removes stop words, then changes the case. If nothing is left, the result is one empty string. Case
/// conversion follows Unicode, as in all locales except Turkish, Azeri and Lithuanian, which are errors.
fn normalize(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let x = c.text(0)?;
    if !matches!(x.dims[..], [_] | [1, _]) {
        return Err(c.invalid(format!("takes [C] or [1, C], not {:?}", x.dims)));
    }
    let sensitive = c.flag("is_case_sensitive", false)?;
    let change: fn(&str) -> String = match c.string("case_change_action", "NONE")? {
        "NONE" => str::to_string,
        "LOWER" => str::to_lowercase,
        "UPPER" => str::to_uppercase,
        other => return Err(c.invalid(format!("there is no case_change_action '{other}'"))),
    };
    let stop = c.strings("stopwords")?.unwrap_or_default();
    let locale = c.string("locale", "en_US")?;
    let cases = !sensitive && !stop.is_empty() || c.string("case_change_action", "NONE")? != "NONE";
    let language: String = locale.chars().take_while(char::is_ascii_alphabetic).collect();
    if cases && ["tr", "az", "lt"].contains(&language.to_ascii_lowercase().as_str()) {
        return Err(
            c.unsupported(&format!("locale '{locale}'"), "Its case conversion is not supported; use en_US")
        );
    }
    let key = |s: &str| if sensitive { s.to_string() } else { s.to_lowercase() };
    let stop: HashSet<String> = stop.iter().map(|s| key(s)).collect();
    let mut vals: Vec<String> =
        x.vals.iter().filter(|s| stop.is_empty() || !stop.contains(&key(s))).map(|s| change(s)).collect();
    if vals.is_empty() {
        vals.push(String::new());
    }
    let dims = if x.dims.len() == 1 { vec![vals.len()] } else { vec![1, vals.len()] };
    Ok(vec![Text::new(&dims, vals)?.into()])
}

/// Splits each string along a new last axis, padded with empty strings; also returns the number of parts.
/// Without a delimiter, strings are split at runs of white space.
fn split(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let x = c.text(0)?;
    let delimiter = c.string("delimiter", "")?;
    let most = c.opt_int("maxsplit")?.and_then(|n| usize::try_from(n).ok());
    let parts: Vec<Vec<&str>> = x.vals.iter().map(|s| split_parts(s, delimiter, most)).collect();
    let width = parts.iter().map(Vec::len).max().unwrap_or(0);
    if width.checked_mul(parts.len()).is_none_or(|n| n > MAX_STRINGS) {
        return Err(c.unsupported("so many parts", &format!("At most {MAX_STRINGS} strings are allowed")));
    }
    let counts: Vec<i64> = parts.iter().map(|p| p.len() as i64).collect();
    let row = |p: &Vec<&str>| -> Vec<String> {
        (0..width).map(|i| p.get(i).copied().unwrap_or("").to_string()).collect()
    };
    let vals = parts.iter().flat_map(row).collect();
    let dims: Vec<usize> = x.dims.iter().copied().chain([width]).collect();
    let counts = b.feed(ConstData::from_slice(&x.dims, &counts)?);
    Ok(vec![Text::new(&dims, vals)?.into(), counts.into()])
}

/// Splits at most `most` times; the last part is the rest of the string.
fn split_parts<'a>(s: &'a str, delimiter: &str, most: Option<usize>) -> Vec<&'a str> {
    let most = most.unwrap_or(usize::MAX);
    if !delimiter.is_empty() {
        return s.splitn(most.saturating_add(1), delimiter).collect();
    }
    let mut out = vec![];
    let mut rest = s.trim_start();
    while !rest.is_empty() {
        match rest.find(char::is_whitespace) {
            Some(end) if out.len() < most => {
                out.push(&rest[..end]);
                rest = rest[end..].trim_start();
            }
            Some(_) => {
                out.push(rest);
                break;
            }
            None => {
                out.push(rest);
                break;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_cut_as_in_python() {
        assert_eq!(split_parts(" a b  c ", "", None), ["a", "b", "c"]);
        assert_eq!(split_parts(" a b  c ", "", Some(1)), ["a", "b  c "]);
        assert_eq!(split_parts("  a b ", "", Some(0)), ["a b "]);
        assert_eq!(split_parts("", "", None), [""; 0]);
        assert_eq!(split_parts("", ",", None), [""]);
        assert_eq!(split_parts("a,,b,", ",", None), ["a", "", "b", ""]);
        assert_eq!(split_parts("a,,b,", ",", Some(1)), ["a", ",b,"]);
        assert_eq!(split_parts("a--b-c", "--", None), ["a", "b-c"]);
    }
}

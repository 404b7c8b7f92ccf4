//! TfIdfVectorizer: counts n-grams of tokens, which are numbers in the graph.

use super::{Row, item_row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{ReduceKind as R, ScatterKind};
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar};
use std::collections::{BTreeMap, HashMap};

const ATTRS: &[&str] = &[
    "max_gram_length",
    "max_skip_count",
    "min_gram_length",
    "mode",
    "ngram_counts",
    "ngram_indexes",
    "pool_int64s",
    "pool_strings",
    "weights",
];

pub(super) const ROWS: &[Row] = &[item_row("TfIdfVectorizer", 9, ATTRS, |b, c| {
    if let Some(pool) = c.strings("pool_strings")?.filter(|p| !p.is_empty()) {
        return words(b, c, &pool);
    }
    let x = c.arg(0)?;
    if !x.dtype().is_int() {
        return Err(c.invalid(format!("with pool_int64s, tokens must be integers, found {}", x.ty)));
    }
    let pool = c.ints("pool_int64s")?.ok_or_else(|| c.invalid("attribute 'pool_int64s' is missing"))?;
    let x = b.cast(x, DType::I64)?;
    Ok(vec![vectorize(b, c, &x, pool)?.into()])
})];

/// Replaces each string by the index of its first occurrence in the pool, and counts n-grams of these
/// numbers. A string that is not in the pool matches nothing.
fn words(b: &mut Builder, c: &Call<'_>, pool: &[String]) -> Result<Vec<Item>> {
    let mut place: HashMap<&str, i64> = HashMap::with_capacity(pool.len());
    for (i, w) in pool.iter().enumerate() {
        place.entry(w).or_insert(i as i64);
    }
    let tokens = |w: &String| place.get(w.as_str()).copied().unwrap_or(-1);
    let x = c.text(0)?;
    let codes: Vec<i64> = x.vals.iter().map(tokens).collect();
    let x = b.feed(ConstData::from_slice(&x.dims, &codes)?);
    let pool: Vec<i64> = pool.iter().map(tokens).collect();
    Ok(vec![vectorize(b, c, &x, &pool)?.into()])
}

/// Limit on the comparisons, each of which adds a few nodes. All n-grams of length `l` together take `l`
/// comparisons for each distance.
const PASSES: usize = 1024;

/// Counts the n-grams of `pool` in `[length]` or `[batch, length]` tokens and applies the weights of the
/// attributes. Tokens are numbers; a number that is not in the pool matches nothing.
///
/// An n-gram of length `l` occurs at distance `s` if the tokens `i, i + s, … i + (l - 1) s` equal the tokens
/// of the n-gram. All distances from 1 to `max_skip_count + 1` count; for single tokens only the first.
pub(super) fn vectorize(b: &mut Builder, c: &Call<'_>, x: &Value, pool: &[i64]) -> Result<Value> {
    let need = |name: &str| c.ints(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")));
    let (indexes, starts) = (need("ngram_indexes")?, need("ngram_counts")?);
    let length = |name: &str| {
        let v = c.opt_int(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))?;
        usize::try_from(v).map_err(|_| c.invalid(format!("attribute '{name}' is {v}, expected 0 or more")))
    };
    let (shortest, longest) = (length("min_gram_length")?, length("max_gram_length")?);
    let skips = length("max_skip_count")?;
    if shortest == 0 || longest < shortest {
        return Err(c.invalid(format!(
            "n-grams have {shortest} to {longest} tokens, expected a range from at least 1"
        )));
    }
    let mut width = 0;
    for &i in indexes {
        let i = usize::try_from(i).ok().filter(|i| *i < i32::MAX as usize);
        width = width.max(i.ok_or_else(|| c.invalid("an index of ngram_indexes is out of range"))? + 1);
    }
    let (batch, tokens) = match x.shape()[..] {
        [n] => (Dim::from(1), n),
        [m, n] => (m, n),
        _ => return Err(c.invalid(format!("the tokens are {}, expected [n] or [batch, n]", x.ty))),
    };
    let tokens = tokens
        .known()
        .ok_or_else(|| c.unsupported("a symbolic number of tokens", "Give concrete input shapes"))?;
    let vector = x.rank() == 1;
    let x = b.reshape(x, [batch, Dim::from(tokens)])?;

    let mut counts = b.full(DType::F32, &[batch, Dim::from(width)].into(), Scalar::F(0.0));
    let mut passes = 0;
    for (gram, columns) in grams(c, pool, starts, indexes)? {
        if !(shortest..=longest).contains(&gram) {
            continue;
        }
        let (all, at): (Vec<&[i64]>, Vec<i64>) = columns.into_iter().unzip();
        let at = Value::table(ConstData::from_slice(&[at.len()], &at)?);
        let farthest = if gram == 1 { 1 } else { skips.saturating_add(1) };
        for by in (1..=farthest).take_while(|s| s.saturating_mul(gram - 1) < tokens) {
            passes += gram;
            if passes > PASSES {
                return Err(
                    c.unsupported("so many skips", &format!("At most {PASSES} comparisons are built"))
                );
            }
            let found = occurrences(b, &x, tokens, &all, gram, by)?;
            let ids = b.ids(&[&counts, &at, &found])?;
            let n = b.g.scatter_rows(ids[0], ids[1], ids[2], 1, ScatterKind::Add)?;
            counts = b.value(n);
        }
    }
    let y = weighted(b, c, &counts, width)?;
    let dims = if vector { vec![Dim::from(width)] } else { vec![batch, Dim::from(width)] };
    b.reshape(&y, dims)
}

/// The n-grams of a pool with their result columns.
type Grams<'p> = BTreeMap<&'p [i64], i64>;

/// The pool's n-grams with their result columns, by length. If an n-gram is in the pool twice, its last
/// column counts.
fn grams<'p>(
    c: &Call<'_>,
    pool: &'p [i64],
    starts: &[i64],
    indexes: &[i64],
) -> Result<BTreeMap<usize, Grams<'p>>> {
    let mut out: BTreeMap<usize, Grams<'p>> = BTreeMap::new();
    let mut number = 0;
    for (k, &from) in starts.iter().enumerate() {
        let to = starts.get(k + 1).copied().unwrap_or(pool.len() as i64);
        let range = usize::try_from(from).ok().zip(usize::try_from(to).ok());
        let part = range.and_then(|(f, t)| pool.get(f..t.max(f)));
        let part = part.ok_or_else(|| {
            c.invalid(format!("ngram_counts names the elements {from} to {to} of a pool of {}", pool.len()))
        })?;
        for gram in part.chunks_exact(k + 1) {
            let column = indexes.get(number).copied();
            let column = column.ok_or_else(|| c.invalid("ngram_indexes is shorter than the pool"))?;
            out.entry(k + 1).or_default().insert(gram, column);
            number += 1;
        }
    }
    Ok(out)
}

/// How often each of `all` n-grams of length `gram` occurs with tokens `by` apart: f32 `[batch, all.len()]`.
fn occurrences(
    b: &mut Builder,
    x: &Value,
    tokens: usize,
    all: &[&[i64]],
    gram: usize,
    by: usize,
) -> Result<Value> {
    let places = tokens - by * (gram - 1);
    let (batch, unit) = (x.shape()[0], Dim::from(1));
    let mut hit: Option<Value> = None;
    for k in 0..gram {
        let token = b.narrow(x, 1, Dim::from(k * by), Dim::from(places))?;
        let token = b.reshape(&token, [batch, Dim::from(places), unit])?;
        let want: Vec<i64> = all.iter().map(|g| g[k]).collect();
        let want = Value::table(ConstData::from_slice(&[want.len()], &want)?);
        let same = b.scalar(S::Eq, &[&token, &want])?;
        hit = Some(match hit {
            Some(h) => b.scalar(S::And, &[&h, &same])?,
            None => same,
        });
    }
    let hit = hit.map_or_else(
        || {
            Ok(b.full(
                DType::Bool,
                &[batch, Dim::from(places), Dim::from(all.len())].into(),
                Scalar::Bool(false),
            ))
        },
        Ok,
    )?;
    let hit = b.cast(&hit, DType::F32)?;
    b.reduce(R::Sum, &hit, &[1], false)
}

/// The mode TF gives the counts. IDF gives the weight of each n-gram that occurs, and TFIDF its count times
/// its weight. Without weights, each weight is 1.
fn weighted(b: &mut Builder, c: &Call<'_>, counts: &Value, width: usize) -> Result<Value> {
    let mode = c.string("mode", "")?;
    let y = match mode {
        "TF" => return Ok(counts.clone()),
        "TFIDF" => counts.clone(),
        "IDF" => {
            let top = b.lit(counts, 1.0);
            b.scalar(S::Min, &[counts, &top])?
        }
        other => return Err(c.invalid(format!("mode '{other}' is not TF, IDF or TFIDF"))),
    };
    let Some(w) = c.floats("weights")?.filter(|w| !w.is_empty()) else {
        return Ok(y);
    };
    let w = w.get(..width).ok_or_else(|| c.invalid(format!("{} weights for {width} columns", w.len())))?;
    let w = Value::table(ConstData::from_slice(&[width], w)?);
    b.scalar(S::Mul, &[&y, &w])
}

#[cfg(test)]
mod tests {
    use crate::onnx::proto::{NodeProto, attribute};
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Error};

    /// The unigrams 2, 3, 5, 4 and the bigrams 5 6, 7 8, 6 7.
    fn op(mode: &'static str, lengths: [i64; 2], skips: i64) -> NodeProto {
        node("TfIdfVectorizer", &["x"], &["y"])
            .text("mode", mode)
            .int("min_gram_length", lengths[0])
            .int("max_gram_length", lengths[1])
            .int("max_skip_count", skips)
            .ints("ngram_counts", &[0, 4])
            .ints("ngram_indexes", &[0, 1, 2, 3, 4, 5, 7])
            .ints("pool_int64s", &[2, 3, 5, 4, 5, 6, 7, 8, 6, 7])
    }

    #[test]
    fn counts_skips_and_weights() {
        let x = t(&[12], &[1i32, 1, 3, 3, 3, 7, 8, 6, 7, 5, 6, 8]);
        check(9, op("TF", [1, 1], 3), &x, &[], &[8], &[0.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        check(9, op("TF", [2, 2], 0), &x, &[], &[8], &[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
        check(9, op("TF", [1, 2], 5), &x, &[], &[8], &[0.0, 3.0, 1.0, 0.0, 1.0, 3.0, 0.0, 1.0]);
        let w = |n: NodeProto| {
            n.attr("weights", attribute::FLOATS, |a| a.floats = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        };
        check(9, w(op("TFIDF", [1, 2], 5)), &x, &[], &[8], &[0.0, 6.0, 3.0, 0.0, 5.0, 18.0, 0.0, 8.0]);
        check(9, w(op("IDF", [1, 2], 5)), &x, &[], &[8], &[0.0, 2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 8.0]);
        check(9, op("IDF", [1, 2], 5), &x, &[], &[8], &[0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
        let rows = t(&[3, 2], &[5i64, 6, 6, 5, 2, 2]);
        let mut want = [0.0; 24];
        (want[4], want[2], want[10], want[16]) = (1.0, 1.0, 1.0, 2.0);
        check(9, op("TF", [1, 2], i64::MAX), &rows, &[], &[3, 8], &want);
        check(9, op("TF", [1, 2], 1), &t(&[0], &[0i64; 0]), &[], &[8], &[0.0; 8]);
    }

    #[test]
    fn hostile_attributes() {
        let e = |n: NodeProto, tokens: &'static str| {
            import(model(9, port("x", DType::I64, &[tokens]), vec![n], &[])).unwrap_err()
        };
        let with = |name: &str, v: &[i64]| {
            let mut n = op("TF", [1, 2], 0);
            n.attribute.retain(|a| a.name != name);
            n.ints(name, v)
        };
        for n in [
            op("COUNT", [1, 2], 0),
            op("TF", [0, 2], 0),
            op("TF", [2, 1], 0),
            op("TF", [1, 2], -1),
            with("ngram_indexes", &[0, 1]),
            with("ngram_indexes", &[0, 1, 2, 3, 4, 5, -1]),
            with("ngram_indexes", &[0, 1, 2, 3, 4, 5, i64::MAX]),
            with("ngram_counts", &[0, 99]),
            with("ngram_counts", &[-1, 4]),
            with("pool_int64s", &[]),
        ] {
            assert!(matches!(e(n.clone(), "8"), Error::Argument { .. }), "{n:?}");
        }
        assert!(matches!(e(op("TF", [1, 2], i64::MAX), "1000000"), Error::Unsupported { .. }));
        assert!(matches!(e(op("TF", [1, 2], 0), "n"), Error::Unsupported { .. }));
    }
}

//! LinearRegressor and LinearClassifier.

use super::label::{Classes, LABELS_INTS, labels};
use super::post::{Post, pair, shift, single};
use super::{DOMAIN, best, floats, matrix, product};
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use crate::onnx::ops::{Row, item_row_in, one, row_in};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Result, Shape};

pub(crate) const ROWS: &[Row] = &[
    row_in(
        DOMAIN,
        "LinearRegressor",
        1,
        &["coefficients", "intercepts", "post_transform", "targets"],
        regressor,
    ),
    item_row_in(
        DOMAIN,
        "LinearClassifier",
        1,
        &[
            "classlabels_ints",
            "classlabels_strings",
            "coefficients",
            "intercepts",
            "multi_class",
            "post_transform",
        ],
        classifier,
    ),
];

/// Returns `x wᵀ + intercepts`, where `w` are `rows` rows of coefficients.
fn scores(b: &mut Builder, c: &Call<'_>, rows: usize) -> Result<Value> {
    let x = matrix(b, c, c.arg(0)?)?;
    let w = c.floats("coefficients")?.ok_or_else(|| c.invalid("attribute 'coefficients' is missing"))?;
    if rows == 0 || w.is_empty() || !w.len().is_multiple_of(rows) {
        return Err(c.invalid(format!("{} coefficients are not {rows} equal rows", w.len())));
    }
    let n = w.len() / rows;
    if x.shape()[1].known().is_some_and(|f| f != n) {
        return Err(c.invalid(format!("{n} coefficients per row for {} features", x.shape()[1])));
    }
    let w = floats(x.dtype(), &[rows, n], w)?;
    let y = product(b, &x, &w)?;
    match c.floats("intercepts")? {
        None | Some([]) => Ok(y),
        Some(v) if v.len() == rows => {
            let v = floats(x.dtype(), &[rows], v)?;
            shift(b, &y, &v)
        }
        Some(v) => Err(c.invalid(format!("{} intercepts for {rows} rows of coefficients", v.len()))),
    }
}

fn regressor(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let post = Post::of(c)?;
    let targets = usize::try_from(c.int("targets", 1)?).unwrap_or(0);
    let y = scores(b, c, targets)?;
    let y = post.apply(b, &y)?;
    one(single(b, &y)?)
}

/// Results: the labels `[N]` and the scores `[N, classes]`. With two classes, a single row of coefficients
/// gives the score of the second class. `multi_class` states how the model was trained. It is ignored,
/// because `post_transform` accounts for it.
fn classifier(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let (post, classes) = (Post::of(c)?, Classes::of(c, LABELS_INTS)?);
    let rows = match c.floats("intercepts")? {
        None | Some([]) => classes.len(),
        Some(v) => v.len(),
    };
    let s = scores(b, c, rows)?;
    if rows == 1 && classes.len() == 2 {
        let column = b.reshape(&s, Shape::from_iter([s.shape()[0]]))?;
        let zero = b.lit(&column, 0.0);
        let positive = b.scalar(S::Gt, &[&column, &zero])?;
        let place = b.cast(&positive, DType::I64)?;
        let y = pair(b, c, post, &column, true)?;
        return Ok(vec![labels(b, c, &classes, &place)?, single(b, &y)?.into()]);
    }
    if rows != classes.len() || rows == 1 {
        return Err(c.unsupported(
            &format!("{rows} rows of coefficients for {} classes", classes.len()),
            "Export one row for each of at least two classes",
        ));
    }
    let place = best(b, &s)?;
    let y = post.apply(b, &s)?;
    Ok(vec![labels(b, c, &classes, &place)?, single(b, &y)?.into()])
}

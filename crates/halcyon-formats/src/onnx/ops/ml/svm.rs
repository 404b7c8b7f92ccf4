//! SVMRegressor and SVMClassifier.

use super::label::{Classes, LABELS_INTS, labels};
use super::post::{Post, pair, shift, single};
use super::{DOMAIN, best, floats, integers, matrix, product};
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use crate::onnx::ops::{Row, item_row_in, one, row_in};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Dim, Result, Shape};

pub(crate) const ROWS: &[Row] = &[
    row_in(
        DOMAIN,
        "SVMRegressor",
        1,
        &[
            "coefficients",
            "kernel_params",
            "kernel_type",
            "n_supports",
            "one_class",
            "post_transform",
            "rho",
            "support_vectors",
        ],
        regressor,
    ),
    item_row_in(
        DOMAIN,
        "SVMClassifier",
        1,
        &[
            "classlabels_ints",
            "classlabels_strings",
            "coefficients",
            "kernel_params",
            "kernel_type",
            "post_transform",
            "prob_a",
            "prob_b",
            "rho",
            "support_vectors",
            "vectors_per_class",
        ],
        classifier,
    ),
];

/// Maximum number of classes for which probabilities are computed. The iteration that finds them would take
/// too many graph nodes for more classes.
const MAX_CLASSES: usize = 64;

/// A non-empty list of numbers.
fn need<'a>(c: &Call<'a>, name: &str) -> Result<&'a [f32]> {
    match c.floats(name)? {
        None | Some([]) => Err(c.invalid(format!("attribute '{name}' is missing"))),
        Some(v) => Ok(v),
    }
}

/// Kernel values between the rows of `x` `[N, F]` and `n` support vectors: `[N, n]`.
fn kernel(b: &mut Builder, c: &Call<'_>, x: &Value, n: usize) -> Result<Value> {
    let v = need(c, "support_vectors")?;
    if n == 0 || !v.len().is_multiple_of(n) {
        return Err(c.invalid(format!("{} numbers cannot be divided into {n} support vectors", v.len())));
    }
    let f = v.len() / n;
    if x.shape()[1].known().is_some_and(|k| k != f) {
        return Err(
            c.invalid(format!("support vectors have {f} numbers, but there are {} features", x.shape()[1]))
        );
    }
    let v = floats(x.dtype(), &[n, f], v)?;
    let params = match c.floats("kernel_params")? {
        None | Some([]) => [0.0; 3],
        Some(&[g, k, d]) => [g, k, d],
        Some(v) => return Err(c.invalid(format!("{} kernel_params, expected 3", v.len()))),
    };
    let [gamma, coef0, degree] = params.map(|p| b.lit(x, p));
    let line = |b: &mut Builder| -> Result<Value> {
        let y = product(b, x, &v)?;
        let y = b.scalar(S::Mul, &[&y, &gamma])?;
        b.scalar(S::Add, &[&y, &coef0])
    };
    match c.string("kernel_type", "LINEAR")? {
        "LINEAR" => product(b, x, &v),
        "POLY" => {
            let y = line(b)?;
            b.scalar(S::Pow, &[&y, &degree])
        }
        "SIGMOID" => {
            let y = line(b)?;
            b.scalar(S::Tanh, &[&y])
        }
        "RBF" => {
            let (rows, f) = (x.shape()[0], Dim::from(f));
            let x = b.reshape(x, Shape::from_iter([rows, 1.into(), f]))?;
            let v = b.reshape(&v, Shape::from_iter([1.into(), n.into(), f]))?;
            let d = b.scalar(S::Sub, &[&x, &v])?;
            let d = b.scalar(S::Mul, &[&d, &d])?;
            let d = b.reduce(ReduceKind::Sum, &d, &[2], false)?;
            let d = b.scalar(S::Mul, &[&d, &gamma])?;
            let d = b.scalar(S::Neg, &[&d])?;
            b.scalar(S::Exp, &[&d])
        }
        other => Err(c.invalid(format!("there is no kernel_type '{other}'"))),
    }
}

/// `[N, 1]`: the sum of kernel values times coefficients, plus rho. Without support vectors the coefficients
/// apply to the features. With `one_class`, the result is 1 if that sum is positive, else -1.
fn regressor(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let post = Post::of(c)?;
    let x = matrix(b, c, c.arg(0)?)?;
    let n = usize::try_from(c.int("n_supports", 0)?).map_err(|_| c.invalid("n_supports is negative"))?;
    let w = need(c, "coefficients")?;
    let k = if n > 0 { kernel(b, c, &x, n)? } else { x };
    if k.shape()[1].known().is_some_and(|f| f != w.len()) {
        return Err(c.invalid(format!("{} coefficients, expected {}", w.len(), k.shape()[1])));
    }
    let w = floats(k.dtype(), &[1, w.len()], w)?;
    let y = product(b, &k, &w)?;
    let rho = b.lit(&y, need(c, "rho")?[0]);
    let y = b.scalar(S::Add, &[&y, &rho])?;
    if !c.flag("one_class", false)? {
        let y = post.apply(b, &y)?;
        return one(single(b, &y)?);
    }
    let (zero, inside, outside) = (b.lit(&y, 0.0), b.lit(&y, 1.0), b.lit(&y, -1.0));
    let positive = b.scalar(S::Gt, &[&y, &zero])?;
    let y = b.scalar(S::Select, &[&positive, &inside, &outside])?;
    one(single(b, &y)?)
}

/// Results: the labels `[N]` and the scores. Scores are per class if the model has probabilities or no
/// support vectors, else per pair of classes (two columns for two classes).
fn classifier(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let (post, classes) = (Post::of(c)?, Classes::of(c, LABELS_INTS)?);
    let x = matrix(b, c, c.arg(0)?)?;
    let counts = c.ints("vectors_per_class")?.unwrap_or(&[]);
    let counts = counts
        .iter()
        .map(|v| usize::try_from(*v).ok().filter(|v| *v < i32::MAX as usize))
        .collect::<Option<Vec<usize>>>()
        .ok_or_else(|| c.invalid("'vectors_per_class' holds a number that is not a size"))?;
    let n: usize = counts.iter().sum();
    if n == 0 {
        return linear(b, c, post, &classes, &x);
    }
    let k = classes.len();
    if counts.len() != k || k < 2 {
        return Err(c.invalid(format!(
            "'vectors_per_class' has {} entries for {k} labels; expected one for each of at least 2",
            counts.len()
        )));
    }
    let values = kernel(b, c, &x, n)?;
    let s = decisions(b, c, &values, &counts)?;
    let wins = wins(b, &s, k)?;
    let votes = b.reduce(ReduceKind::Sum, &wins, &[2], false)?;
    let place = best(b, &votes)?;
    let label = labels(b, c, &classes, &place)?;
    let (pa, pb) = (c.floats("prob_a")?.unwrap_or(&[]), c.floats("prob_b")?.unwrap_or(&[]));
    if pa.len() != pb.len() {
        return Err(c.invalid(format!(
            "'prob_a' has {} numbers and 'prob_b' has {}; they must have as many",
            pa.len(),
            pb.len()
        )));
    }
    let y = if !pa.is_empty() {
        let p = probabilities(b, c, &s, k, pa, pb)?;
        post.apply(b, &p)?
    } else if k == 2 {
        let s = b.reshape(&s, Shape::from_iter([s.shape()[0]]))?;
        pair(b, c, post, &s, post != Post::None)?
    } else {
        post.apply(b, &s)?
    };
    Ok(vec![label, single(b, &y)?.into()])
}

/// The classifier without support vectors: one row of coefficients for each class, and a common rho.
fn linear(b: &mut Builder, c: &Call<'_>, post: Post, classes: &Classes, x: &Value) -> Result<Vec<Item>> {
    let w = need(c, "coefficients")?;
    let k = classes.len();
    if !w.len().is_multiple_of(k) {
        return Err(c.invalid(format!("{} coefficients cannot be divided into {k} equal rows", w.len())));
    }
    let f = w.len() / k;
    if x.shape()[1].known().is_some_and(|n| n != f) {
        return Err(c.invalid(format!("{f} coefficients per class, but there are {} features", x.shape()[1])));
    }
    let positive = w.iter().all(|w| *w >= 0.0);
    let w = floats(x.dtype(), &[k, f], w)?;
    let s = product(b, x, &w)?;
    let rho = b.lit(&s, need(c, "rho")?[0]);
    let s = b.scalar(S::Add, &[&s, &rho])?;
    let mut place = best(b, &s)?;
    // With two classes the label is the second if the largest score is above 0 (or, without negative
    // coefficients, at least 0.5).
    if k == 2 {
        let top = b.reduce(ReduceKind::Max, &s, &[1], false)?;
        let limit = b.lit(&s, if positive { 0.5 } else { 0.0 });
        let speaks = b.scalar(if positive { S::Ge } else { S::Gt }, &[&top, &limit])?;
        let second = b.lit(&place, 1i64);
        place = b.scalar(S::Select, &[&speaks, &second, &place])?;
    }
    let y = post.apply(b, &s)?;
    Ok(vec![labels(b, c, classes, &place)?, single(b, &y)?.into()])
}

/// Pairs of classes in the order of their scores.
fn pairs(k: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..k).flat_map(move |i| (i + 1..k).map(move |j| (i, j)))
}

/// The scores of the pairs of classes i < j, `[N, pairs]`: the kernel values of the support vectors of i
/// times row j - 1 of the coefficients, plus the kernel values of those of j times row i, plus rho.
/// Coefficients are `[classes - 1, vectors]`.
fn decisions(b: &mut Builder, c: &Call<'_>, values: &Value, counts: &[usize]) -> Result<Value> {
    let (k, n) = (counts.len(), counts.iter().sum::<usize>());
    let (w, rho) = (need(c, "coefficients")?, need(c, "rho")?);
    let all = k * (k - 1) / 2;
    if (k - 1).checked_mul(n) != Some(w.len()) || rho.len() < all {
        return Err(c.invalid(format!(
            "{} coefficients and {} numbers in 'rho' do not fit {k} classes with {n} support vectors",
            w.len(),
            rho.len()
        )));
    }
    let w = floats(values.dtype(), &[k - 1, n], w)?;
    let rows = values.shape()[0];
    let mut parts = Vec::with_capacity(k);
    let mut start = 0;
    for &len in counts {
        if len == 0 {
            parts.push(b.full(values.dtype(), &Shape::from_iter([rows, Dim::from(k - 1)]), 0.0.into()));
            continue;
        }
        let v = b.narrow(values, 1, Dim::from(start), Dim::from(len))?;
        let w = b.narrow(&w, 1, Dim::from(start), Dim::from(len))?;
        parts.push(product(b, &v, &w)?);
        start += len;
    }
    // Column `i * (k - 1) + r`: kernel values of the support vectors of class i times row r.
    let parts = b.concat(&parts.iter().collect::<Vec<_>>(), 1)?;
    let place = |f: &dyn Fn(usize, usize) -> usize| {
        integers(DType::I32, &[all], pairs(k).map(|(i, j)| f(i, j) as i64))
    };
    let (of_i, of_j) = (place(&|i, j| i * (k - 1) + j - 1)?, place(&|i, j| j * (k - 1) + i)?);
    let (l, r) = (b.gather(&parts, &of_i, 1)?, b.gather(&parts, &of_j, 1)?);
    let s = b.scalar(S::Add, &[&l, &r])?;
    let s = b.reshape(&s, Shape::from_iter([rows, all.into()]))?;
    let rho = floats(s.dtype(), &[all], &rho[..all])?;
    shift(b, &s, &rho)
}

/// `[N, k, k]` in the dtype of `s`: 1 where the row's class wins against the column's.
fn wins(b: &mut Builder, s: &Value, k: usize) -> Result<Value> {
    let zero = b.lit(s, 0.0);
    let first = b.scalar(S::Gt, &[s, &zero])?;
    let first = b.cast(&first, s.dtype())?;
    mirrored(b, &first, k)
}

/// Expands values `v` of the pairs i < j, `[N, pairs]`, to matrices `[N, k, k]` with `v` above the diagonal,
/// `1 - v` below it and 0 on it.
fn mirrored(b: &mut Builder, v: &Value, k: usize) -> Result<Value> {
    let mut at = vec![0i64; k * k];
    let mut below = vec![0i64; k * k];
    let mut off = vec![1i64; k * k];
    for (p, (i, j)) in pairs(k).enumerate() {
        (at[i * k + j], at[j * k + i]) = (p as i64, p as i64);
        below[j * k + i] = 1;
    }
    (0..k).for_each(|i| off[i * k + i] = 0);
    let at = integers(DType::I32, &[k, k], at)?;
    let m = b.gather(v, &at, 1)?;
    let (below, off) = (integers(DType::Bool, &[k, k], below)?, integers(DType::Bool, &[k, k], off)?);
    let (one, zero) = (b.lit(&m, 1.0), b.lit(&m, 0.0));
    let rest = b.scalar(S::Sub, &[&one, &m])?;
    let m = b.scalar(S::Select, &[&below, &rest, &m])?;
    b.scalar(S::Select, &[&off, &m, &zero])
}

/// Class probabilities from those of the pairs: the second approach of Wu, Lin and Weng (Probability
/// estimates for multi-class classification by pairwise coupling, JMLR 5, 2004). The iteration is that of the
/// paper, and the stopping rule is LIBSVM's: a row that has converged no longer changes.
fn probabilities(
    b: &mut Builder,
    c: &Call<'_>,
    s: &Value,
    k: usize,
    pa: &[f32],
    pb: &[f32],
) -> Result<Value> {
    let all = k * (k - 1) / 2;
    if pa.len() < all {
        return Err(
            c.invalid(format!("'prob_a' has {} numbers, but there are {all} pairs of classes", pa.len()))
        );
    }
    if k > MAX_CLASSES {
        return Err(c.unsupported(
            &format!("probabilities of {k} classes"),
            &format!("Up to {MAX_CLASSES} are supported; leave 'prob_a' and 'prob_b' out"),
        ));
    }
    let (pa, pb) = (floats(s.dtype(), &[all], &pa[..all])?, floats(s.dtype(), &[all], &pb[..all])?);
    // Platt's sigmoid: 1 / (1 + exp(a s + b)).
    let v = b.scalar(S::Mul, &[s, &pa])?;
    let v = b.scalar(S::Add, &[&v, &pb])?;
    let v = b.scalar(S::Neg, &[&v])?;
    let v = b.scalar(S::Sigmoid, &[&v])?;
    let (lo, hi) = (b.lit(&v, 1e-7), b.lit(&v, 1.0 - 1e-7));
    let v = b.scalar(S::Max, &[&v, &lo])?;
    let v = b.scalar(S::Min, &[&v, &hi])?;
    let r = mirrored(b, &v, k)?;

    // Q[i][j] = -r[j][i] r[i][j] for i ≠ j. Q[i][i] is the sum of r[j][i]² over all j ≠ i.
    let rt = b.permute(&r, &[0, 2, 1])?;
    let q = b.scalar(S::Mul, &[&r, &rt])?;
    let q = b.scalar(S::Neg, &[&q])?;
    let d = b.scalar(S::Mul, &[&rt, &rt])?;
    let d = b.reduce(ReduceKind::Sum, &d, &[2], true)?;
    let diagonal = integers(DType::Bool, &[k, k], (0..k * k).map(|i| i64::from(i % (k + 1) == 0)))?;
    let q = b.scalar(S::Select, &[&diagonal, &d, &q])?;
    let rows = s.shape()[0];
    let mut row = Vec::with_capacity(k);
    for t in 0..k {
        let v = b.narrow(&q, 1, Dim::from(t), Dim::from(1))?;
        let v = b.reshape(&v, Shape::from_iter([rows, Dim::from(k)]))?;
        let own = b.narrow(&v, 1, Dim::from(t), Dim::from(1))?;
        let unit = integers(DType::Bool, &[k], (0..k).map(|i| i64::from(i == t)))?;
        row.push((v, own, unit));
    }

    let (one, two, zero) = (b.lit(&q, 1.0), b.lit(&q, 2.0), b.lit(&q, 0.0));
    let near = b.lit(&q, 0.005 / k as f64);
    let start = b.lit(&q, 1.0 / k as f64);
    let mut p = b.expand(&start, &Shape::from_iter([rows, Dim::from(k)]))?;
    for _ in 0..ROUNDS.max(k) {
        let wide = b.reshape(&p, Shape::from_iter([rows, 1.into(), k.into()]))?;
        let qp = b.scalar(S::Mul, &[&q, &wide])?;
        let mut qp = b.reduce(ReduceKind::Sum, &qp, &[2], false)?;
        let pqp = b.scalar(S::Mul, &[&p, &qp])?;
        let mut pqp = b.reduce(ReduceKind::Sum, &pqp, &[1], true)?;
        let miss = b.scalar(S::Sub, &[&qp, &pqp])?;
        let miss = b.scalar(S::Abs, &[&miss])?;
        let miss = b.reduce(ReduceKind::Max, &miss, &[1], true)?;
        let done = b.scalar(S::Lt, &[&miss, &near])?;
        let mut next = p.clone();
        for (t, (line, own, unit)) in row.iter().enumerate() {
            let at = b.narrow(&qp, 1, Dim::from(t), Dim::from(1))?;
            let step = b.scalar(S::Sub, &[&pqp, &at])?;
            let step = b.scalar(S::Div, &[&step, own])?;
            let grown = b.scalar(S::Add, &[&one, &step])?;
            // pQp, after p[t] has grown by the step and p has been divided by 1 + step, is
            // (pQp + step (step Q[t][t] + 2 Qp[t])) / (1 + step)².
            let gain = b.scalar(S::Mul, &[&step, own])?;
            let twice = b.scalar(S::Mul, &[&two, &at])?;
            let gain = b.scalar(S::Add, &[&gain, &twice])?;
            let gain = b.scalar(S::Mul, &[&step, &gain])?;
            pqp = b.scalar(S::Add, &[&pqp, &gain])?;
            pqp = b.scalar(S::Div, &[&pqp, &grown])?;
            pqp = b.scalar(S::Div, &[&pqp, &grown])?;
            let more = b.scalar(S::Mul, &[&step, line])?;
            qp = b.scalar(S::Add, &[&qp, &more])?;
            qp = b.scalar(S::Div, &[&qp, &grown])?;
            let own = b.scalar(S::Select, &[unit, &step, &zero])?;
            next = b.scalar(S::Add, &[&next, &own])?;
            next = b.scalar(S::Div, &[&next, &grown])?;
        }
        p = b.scalar(S::Select, &[&done, &p, &next])?;
    }
    Ok(p)
}

/// Maximum number of iterations, as in LIBSVM.
const ROUNDS: usize = 100;

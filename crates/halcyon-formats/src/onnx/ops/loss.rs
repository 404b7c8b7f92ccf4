//! Classification losses.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const ATTRS: &[&str] = &["ignore_index", "reduction"];

pub(super) const ROWS: &[Row] = &[
    row("NegativeLogLikelihoodLoss", 12, ATTRS, |b, c| {
        let x = c.arg(0)?;
        let v = b.cast(x, x.dtype().compute())?;
        let y = negative_log_likelihood(b, c, &v)?;
        one(b.cast(&y, x.dtype())?)
    }),
    row("SoftmaxCrossEntropyLoss", 12, ATTRS, |b, c| {
        let x = c.arg(0)?;
        if x.rank() < 2 {
            return Err(c.invalid(format!("the scores are {}, expected [n, classes, …]", x.ty)));
        }
        let v = b.cast(x, x.dtype().compute())?;
        let id = b.id(&v)?;
        let id = b.g.log_softmax(id, 1)?;
        let p = b.value(id);
        let y = negative_log_likelihood(b, c, &p)?;
        Ok(vec![b.cast(&y, x.dtype())?, b.cast(&p, x.dtype())?])
    }),
];

/// `-x[n, target[n, d…], d…] * weight[target[n, d…]]`, where `x [n, classes, d…]` are log-probabilities in
/// the type used for sums. The loss and the weight of an ignored target are zero. The mean is the sum of the
/// losses divided by the sum of the weights.
fn negative_log_likelihood(b: &mut Builder, c: &Call<'_>, x: &Value) -> Result<Value> {
    let target = c.arg(1)?;
    if !x.dtype().is_float() || !target.dtype().is_int() {
        return Err(
            c.invalid(format!("expected floats and integer targets, found {} and {}", x.ty, target.ty))
        );
    }
    let fits = x.rank() >= 2
        && target.rank() + 1 == x.rank()
        && target.shape()[0] == x.shape()[0]
        && target.shape()[1..] == x.shape()[2..];
    if !fits {
        return Err(
            c.invalid(format!("targets {} do not match [n, classes, …], which is {}", target.ty, x.ty))
        );
    }
    // `ignore_index` may be out of range of the classes, and even of the targets' dtype.
    let ignore = c.opt_int("ignore_index")?;
    let ignored = match ignore {
        Some(i) => {
            let wide = b.cast(target, DType::I64)?;
            let i = b.lit(&wide, i);
            Some(b.scalar(S::Eq, &[&wide, &i])?)
        }
        None => None,
    };
    let class = {
        let id = b.id(target)?;
        let id = b.g.class_index(id, x.shape()[1], ignore)?;
        b.value(id)
    };
    let mut at: Vec<Dim> = target.shape().to_vec();
    at.insert(1, Dim::from(1));
    let index = b.reshape(&class, at)?;
    let ids = b.ids(&[x, &index])?;
    let picked = b.g.gather_elements(ids[0], ids[1], 1)?;
    let picked = b.value(picked);
    let picked = b.reshape(&picked, target.shape())?;
    let mut loss = b.scalar(S::Neg, &[&picked])?;

    let mut weight = match c.opt(2) {
        Some(w) => {
            if w.rank() != 1 || w.shape()[0] != x.shape()[1] {
                return Err(
                    c.invalid(format!("weights {} are not a vector with the classes of {}", w.ty, x.ty))
                );
            }
            let w = b.cast(w, x.dtype())?;
            Some(b.gather(&w, &class, 0)?)
        }
        None => None,
    };
    if let Some(w) = &weight {
        loss = b.scalar(S::Mul, &[&loss, w])?;
    }
    if let Some(m) = &ignored {
        let zero = b.lit(&loss, 0.0);
        loss = b.scalar(S::Select, &[m, &zero, &loss])?;
        let w = match weight {
            Some(w) => w,
            None => b.full(loss.dtype(), target.shape(), Scalar::F(1.0)),
        };
        weight = Some(b.scalar(S::Select, &[m, &zero, &w])?);
    }

    let axes: Vec<usize> = (0..loss.rank()).collect();
    match c.string("reduction", "mean")? {
        "none" => Ok(loss),
        "sum" => b.reduce(R::Sum, &loss, &axes, false),
        "mean" => {
            let weight = match weight {
                Some(w) => w,
                None => b.full(loss.dtype(), target.shape(), Scalar::F(1.0)),
            };
            let (total, by) =
                (b.reduce(R::Sum, &loss, &axes, false)?, b.reduce(R::Sum, &weight, &axes, false)?);
            let mean = b.scalar(S::Div, &[&total, &by])?;
            b.reshape(&mean, Shape::scalar())
        }
        other => Err(c.invalid(format!("reduction '{other}' is not 'none', 'sum' or 'mean'"))),
    }
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType, Error};

    #[test]
    fn reductions_weights_and_ignored_targets() {
        let x = t(&[2, 3], &[1f32, 2.0, 4.0, 8.0, 16.0, 32.0]);
        let op = |inputs: &[&str], r| node("NegativeLogLikelihoodLoss", inputs, &["y"]).text("reduction", r);
        let w = [t(&[2], &[2i64, 0]), t(&[3], &[0.5f32, 9.0, 2.0])];
        check(13, op(&["x", "w0"], "none"), &x, &w, &[2], &[-4.0, -8.0]);
        check(13, op(&["x", "w0", "w1"], "none"), &x, &w, &[2], &[-8.0, -4.0]);
        check(13, op(&["x", "w0", "w1"], "sum"), &x, &w, &[], &[-12.0]);
        check(13, op(&["x", "w0", "w1"], "mean"), &x, &w, &[], &[-12.0 / 2.5]);
        check(13, op(&["x", "w0"], "mean"), &x, &w, &[], &[-6.0]);
        let w = [t(&[2], &[-7i32, 0]), w[1].clone()];
        let ignore = |inputs: &[&str], r| op(inputs, r).int("ignore_index", -7);
        check(22, ignore(&["x", "w0"], "mean"), &x, &w, &[], &[-8.0]);
        check(22, ignore(&["x", "w0", "w1"], "none"), &x, &w, &[2], &[0.0, -4.0]);
        check(22, ignore(&["x", "w0", "w1"], "mean"), &x, &w, &[], &[-8.0]);
    }

    #[test]
    fn cross_entropy_and_its_logarithms() {
        let x = t(&[1, 2, 2], &[0f32, 1.0, 0.0, 1.0]);
        let w = [t(&[1, 2], &[0i64, 1])];
        let op = |outputs: &[&str]| node("SoftmaxCrossEntropyLoss", &["x", "w0"], outputs);
        let l = std::f64::consts::LN_2;
        check(13, op(&["y"]), &x, &w, &[], &[l]);
        check(13, op(&["y"]).text("reduction", "none"), &x, &w, &[1, 2], &[l; 2]);
        check(13, op(&["a", "y"]), &x, &w, &[1, 2, 2], &[-l; 4]);
    }

    #[test]
    fn half_types_are_summed_wide() {
        // The sum, 128,000, exceeds the range of f16.
        let nodes = vec![
            node("Cast", &["x"], &["h"]).int("to", 10),
            node("NegativeLogLikelihoodLoss", &["h", "w0"], &["y"]),
        ];
        let w = [("w0", t(&[2000], &[0i64; 2000]))];
        let g = import(model(22, port("x", DType::F32, &["2000", "1"]), nodes, &w)).unwrap().graph;
        let y = crate::onnx::reference::run(&g, &[t(&[2000, 1], &vec![-64f32; 2000])]).remove(0);
        assert_eq!((y.dtype, y.to_vec::<f64>()), (DType::F16, vec![64.0]));
    }

    #[test]
    fn shapes_that_do_not_fit() {
        let fails = |dims: &[&str], w: &[ConstData], r| {
            let names = ["x", "w0", "w1"];
            let n = node("NegativeLogLikelihoodLoss", &names[..w.len() + 1], &["y"]).text("reduction", r);
            let w: Vec<(&str, ConstData)> = names[1..].iter().copied().zip(w.iter().cloned()).collect();
            matches!(import(model(13, port("x", DType::F32, dims), vec![n], &w)), Err(Error::Argument { .. }))
        };
        let two = t(&[2], &[0i64, 0]);
        assert!(fails(&["2", "3"], std::slice::from_ref(&two), "median"));
        assert!(fails(&["2"], std::slice::from_ref(&two), "mean"));
        assert!(fails(&["3", "3"], std::slice::from_ref(&two), "mean"));
        assert!(fails(&["2", "3", "1"], std::slice::from_ref(&two), "mean"));
        assert!(fails(&["2", "3"], &[two.clone(), t(&[2], &[0f32; 2])], "mean"));
        assert!(fails(&["2", "3"], &[t(&[2], &[0f32; 2])], "mean"));
    }
}

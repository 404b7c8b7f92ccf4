//! The final transform of scores in classifiers and regressors (`post_transform`).

use super::columns;
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Result, Shape};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Post {
    None,
    Softmax,
    Logistic,
    SoftmaxZero,
    Probit,
}

impl Post {
    pub(super) fn of(c: &Call<'_>) -> Result<Post> {
        Ok(match c.string("post_transform", "NONE")? {
            "NONE" => Post::None,
            "SOFTMAX" => Post::Softmax,
            "LOGISTIC" => Post::Logistic,
            "SOFTMAX_ZERO" => Post::SoftmaxZero,
            "PROBIT" => Post::Probit,
            other => return Err(c.invalid(format!("there is no post_transform '{other}'"))),
        })
    }

    /// The transform by TreeEnsemble's numeric code.
    pub(super) fn of_number(c: &Call<'_>) -> Result<Post> {
        Ok(match c.int("post_transform", 0)? {
            0 => Post::None,
            1 => Post::Softmax,
            2 => Post::Logistic,
            3 => Post::SoftmaxZero,
            4 => Post::Probit,
            other => return Err(c.invalid(format!("there is no post_transform {other}"))),
        })
    }

    /// Applies the transform to scores `[N, K]`, row by row.
    pub(super) fn apply(self, b: &mut Builder, x: &Value) -> Result<Value> {
        match self {
            Post::None => Ok(x.clone()),
            Post::Logistic => b.scalar(S::Sigmoid, &[x]),
            Post::Softmax => {
                let id = b.id(x)?;
                let n = b.g.softmax(id, 1)?;
                Ok(b.value(n))
            }
            Post::SoftmaxZero => softmax_zero(b, x),
            Post::Probit => probit(b, x),
        }
    }
}

/// Softmax over the non-zero scores; zeros stay zero. Magnitudes of up to 1e-7 count as zero.
fn softmax_zero(b: &mut Builder, x: &Value) -> Result<Value> {
    let (zero, one, tiny) = (b.lit(x, 0.0), b.lit(x, 1.0), b.lit(x, 1e-7));
    let top = b.reduce(ReduceKind::Max, x, &[1], true)?;
    let size = b.scalar(S::Abs, &[x])?;
    let counts = b.scalar(S::Gt, &[&size, &tiny])?;
    let e = b.scalar(S::Sub, &[x, &top])?;
    let e = b.scalar(S::Exp, &[&e])?;
    let e = b.scalar(S::Select, &[&counts, &e, &zero])?;
    let sum = b.reduce(ReduceKind::Sum, &e, &[1], true)?;
    let none = b.scalar(S::Eq, &[&sum, &zero])?;
    let sum = b.scalar(S::Select, &[&none, &one, &sum])?;
    b.scalar(S::Div, &[&e, &sum])
}

/// The inverse of the normal distribution function, `sqrt(2) * erfinv(2x - 1)`, by the approximation of S.
/// Winitzki (A handy approximation for the error function and its inverse, 2008) with a = 0.147, whose
/// relative error is below 0.002.
fn probit(b: &mut Builder, x: &Value) -> Result<Value> {
    let a = 0.147f64;
    let lit = |b: &mut Builder, v: f64| b.lit(x, v);
    let (zero, half, two, one) = (lit(b, 0.0), lit(b, 0.5), lit(b, 2.0), lit(b, 1.0));
    let (lead, inverse) = (lit(b, 2.0 / (std::f64::consts::PI * a)), lit(b, 1.0 / a));
    let root2 = lit(b, std::f64::consts::SQRT_2);
    let z = b.scalar(S::Mul, &[x, &two])?;
    let z = b.scalar(S::Sub, &[&z, &one])?;
    let sign = b.scalar(S::Sign, &[&z])?;
    let square = b.scalar(S::Mul, &[&z, &z])?;
    let square = b.scalar(S::Neg, &[&square])?;
    let log = b.scalar(S::Log1p, &[&square])?;
    let u = b.scalar(S::Mul, &[&half, &log])?;
    let u = b.scalar(S::Add, &[&lead, &u])?;
    // sqrt(u² + w) - u, with w >= 0. If u is positive, this is w / (sqrt(u² + w) + u), which does not cancel.
    let w = b.scalar(S::Mul, &[&log, &inverse])?;
    let w = b.scalar(S::Neg, &[&w])?;
    let r = b.scalar(S::Mul, &[&u, &u])?;
    let r = b.scalar(S::Add, &[&r, &w])?;
    let r = b.scalar(S::Sqrt, &[&r])?;
    let sum = b.scalar(S::Add, &[&r, &u])?;
    let near = b.scalar(S::Div, &[&w, &sum])?;
    let far = b.scalar(S::Sub, &[&r, &u])?;
    let positive = b.scalar(S::Gt, &[&u, &zero])?;
    let v = b.scalar(S::Select, &[&positive, &near, &far])?;
    let v = b.scalar(S::Sqrt, &[&v])?;
    let v = b.scalar(S::Mul, &[&v, &sign])?;
    b.scalar(S::Mul, &[&v, &root2])
}

/// The two columns for a single score `[N]` of two classes. With `share` the score is a fraction of 1, else
/// it is centred on 0.
pub(super) fn pair(b: &mut Builder, c: &Call<'_>, post: Post, s: &Value, share: bool) -> Result<Value> {
    let neg = b.scalar(S::Neg, &[s])?;
    match post {
        Post::Probit => Err(c.unsupported(
            "PROBIT of one score for two classes",
            "ONNX does not define the score of the other class; export one score per class",
        )),
        Post::Logistic => {
            let (l, r) = (b.scalar(S::Sigmoid, &[&neg])?, b.scalar(S::Sigmoid, &[s])?);
            columns(b, &[&l, &r])
        }
        _ if share => {
            let one = b.lit(s, 1.0);
            let rest = b.scalar(S::Sub, &[&one, s])?;
            columns(b, &[&rest, s])
        }
        _ => columns(b, &[&neg, s]),
    }
}

/// Casts scores to f32, the result dtype of every classifier and regressor.
pub(super) fn single(b: &mut Builder, x: &Value) -> Result<Value> {
    b.cast(x, DType::F32)
}

/// `x + v` for a vector `v` with one element per column of `x`.
pub(super) fn shift(b: &mut Builder, x: &Value, v: &Value) -> Result<Value> {
    let v = b.reshape(v, Shape::from_iter([v.shape().numel()]))?;
    b.scalar(S::Add, &[x, &v])
}

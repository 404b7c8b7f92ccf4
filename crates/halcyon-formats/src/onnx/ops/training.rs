//! The optimizers of `ai.onnx.preview.training`.

use super::{Row, row_in};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{Result, Shape};

pub(super) const DOMAIN: &str = "ai.onnx.preview.training";

pub(super) const ROWS: &[Row] = &[
    row_in(DOMAIN, "Adagrad", 1, &["decay_factor", "epsilon", "norm_coefficient"], adagrad),
    row_in(
        DOMAIN,
        "Adam",
        1,
        &["alpha", "beta", "epsilon", "norm_coefficient", "norm_coefficient_post"],
        adam,
    ),
    row_in(DOMAIN, "Momentum", 1, &["alpha", "beta", "mode", "norm_coefficient"], momentum),
];

/// `k * x`.
fn mul(b: &mut Builder, x: &Value, k: f64) -> Result<Value> {
    let k = b.lit(x, k);
    b.scalar(S::Mul, &[x, &k])
}

/// A scalar operand, cast to the dtype of `like`.
fn scalar(b: &mut Builder, c: &Call<'_>, i: usize, like: &Value) -> Result<Value> {
    let v = c.arg(i)?;
    let v = b
        .reshape(v, Shape::scalar())
        .map_err(|_| c.invalid(format!("operand {i} must be a scalar, found {}", v.ty)))?;
    b.cast(&v, like.dtype())
}

/// The operands after rate and count are `groups` lists of equal length: the tensors, their gradients, and
/// lists of optimizer state. Returns for each tensor its elements of these lists.
fn tensors<'a>(c: &Call<'a>, groups: usize) -> Result<Vec<Vec<&'a Value>>> {
    let all = c.args()?;
    let rest = all.get(2..).unwrap_or(&[]);
    if rest.is_empty() || rest.len() % groups != 0 {
        return Err(c.invalid(format!(
            "the {} operands after the first two are not {groups} lists of equal length",
            rest.len()
        )));
    }
    let n = rest.len() / groups;
    for (i, v) in rest.iter().enumerate() {
        if v.ty != rest[i % n].ty || !v.dtype().is_float() {
            return Err(c.invalid(format!("operand {} is {}, but must be {}", i + 2, v.ty, rest[i % n].ty)));
        }
    }
    Ok((0..n).map(|i| (0..groups).map(|g| rest[g * n + i]).collect()).collect())
}

/// `k * x + g`.
fn regularized(b: &mut Builder, k: f32, x: &Value, g: &Value) -> Result<Value> {
    if k == 0.0 {
        return Ok(g.clone());
    }
    let x = mul(b, x, k.into())?;
    b.scalar(S::Add, &[&x, g])
}

/// Converts the results of each tensor to the operator's lists: first the first results of all tensors, then
/// their second results, and so on.
fn listed(v: Vec<Vec<Value>>) -> Vec<Value> {
    let groups = v.first().map_or(0, Vec::len);
    (0..groups).flat_map(|g| v.iter().filter_map(move |r| r.get(g)).cloned()).collect()
}

/// `h' = h + g²; x' = x - r / (1 + t * decay) * g / (sqrt(h') + epsilon)`, for the tensor `x`, its
/// regularized gradient `g`, the sum of squares `h`, the rate `r` and the count `t`.
fn adagrad(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (norm, decay) = (c.float("norm_coefficient", 0.0)?, c.float("decay_factor", 0.0)?);
    let epsilon = c.float("epsilon", 1e-6)?;
    let mut out = vec![];
    for v in tensors(c, 3)? {
        let (x, g, h) = (v[0], v[1], v[2]);
        let (rate, count) = (scalar(b, c, 0, x)?, scalar(b, c, 1, x)?);
        let d = mul(b, &count, decay.into())?;
        let one = b.lit(&d, 1.0);
        let d = b.scalar(S::Add, &[&d, &one])?;
        let rate = b.scalar(S::Div, &[&rate, &d])?;
        let g = regularized(b, norm, x, g)?;
        let sq = b.scalar(S::Mul, &[&g, &g])?;
        let h = b.scalar(S::Add, &[h, &sq])?;
        let root = root(b, &h, epsilon)?;
        let step = b.scalar(S::Mul, &[&rate, &g])?;
        let step = b.scalar(S::Div, &[&step, &root])?;
        out.push(vec![b.scalar(S::Sub, &[x, &step])?, h]);
    }
    Ok(listed(out))
}

/// `sqrt(h) + epsilon`.
fn root(b: &mut Builder, h: &Value, epsilon: f32) -> Result<Value> {
    let r = b.scalar(S::Sqrt, &[h])?;
    let e = b.lit(&r, epsilon);
    b.scalar(S::Add, &[&r, &e])
}

/// `1 - k^t`.
fn bias(b: &mut Builder, k: f32, t: &Value) -> Result<Value> {
    let (k, one) = (b.lit(t, k), b.lit(t, 1.0));
    let p = b.scalar(S::Pow, &[&k, t])?;
    b.scalar(S::Sub, &[&one, &p])
}

/// `k * x + (1 - k) * y`.
fn average(b: &mut Builder, k: f32, x: &Value, y: &Value) -> Result<Value> {
    let (x, y) = (mul(b, x, k.into())?, mul(b, y, 1.0 - f64::from(k))?);
    b.scalar(S::Add, &[&x, &y])
}

/// Kingma and Ba, "Adam: a method for stochastic optimization" (2015), with the operator's two
/// regularizations. If the count is 0, the rate is used without bias correction.
fn adam(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (alpha, beta) = (c.float("alpha", 0.9)?, c.float("beta", 0.999)?);
    let (norm, post) = (c.float("norm_coefficient", 0.0)?, c.float("norm_coefficient_post", 0.0)?);
    let epsilon = c.float("epsilon", 1e-6)?;
    let mut out = vec![];
    for v in tensors(c, 4)? {
        let (x, g, v, h) = (v[0], v[1], v[2], v[3]);
        let (rate, count) = (scalar(b, c, 0, x)?, scalar(b, c, 1, x)?);
        let g = regularized(b, norm, x, g)?;
        let v = average(b, alpha, v, &g)?;
        let sq = b.scalar(S::Mul, &[&g, &g])?;
        let h = average(b, beta, h, &sq)?;
        let (low, high) = (bias(b, alpha, &count)?, bias(b, beta, &count)?);
        let high = b.scalar(S::Sqrt, &[&high])?;
        let corrected = b.scalar(S::Mul, &[&rate, &high])?;
        let corrected = b.scalar(S::Div, &[&corrected, &low])?;
        let zero = b.lit(&count, 0.0);
        let begun = b.scalar(S::Gt, &[&count, &zero])?;
        let rate = b.scalar(S::Select, &[&begun, &corrected, &rate])?;
        let root = root(b, &h, epsilon)?;
        let step = b.scalar(S::Mul, &[&rate, &v])?;
        let step = b.scalar(S::Div, &[&step, &root])?;
        let mut x = b.scalar(S::Sub, &[x, &step])?;
        if post != 0.0 {
            x = mul(b, &x, 1.0 - f64::from(post))?;
        }
        out.push(vec![x, v, h]);
    }
    Ok(listed(out))
}

/// `v' = alpha * v + beta * g; x' = x - r * v'`, for the tensor `x`, its regularized gradient `g`, the
/// momentum `v` and the rate `r`. In the first step (the count is 0), `beta` is 1. With Nesterov's method,
/// `x' = x - r * (g + alpha * v')`.
fn momentum(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let need =
        |name: &str| c.opt_float(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")));
    let (alpha, beta, norm) = (need("alpha")?, need("beta")?, need("norm_coefficient")?);
    let nesterov = match c.string("mode", "")? {
        "standard" => false,
        "nesterov" => true,
        other => return Err(c.invalid(format!("mode '{other}' is neither standard nor nesterov"))),
    };
    let mut out = vec![];
    for v in tensors(c, 3)? {
        let (x, g, v) = (v[0], v[1], v[2]);
        let (rate, count) = (scalar(b, c, 0, x)?, scalar(b, c, 1, x)?);
        let zero = b.lit(&count, 0.0);
        let begun = b.scalar(S::Gt, &[&count, &zero])?;
        let (beta, first) = (b.lit(x, beta), b.lit(x, 1.0));
        let beta = b.scalar(S::Select, &[&begun, &beta, &first])?;
        let g = regularized(b, norm, x, g)?;
        let v = mul(b, v, alpha.into())?;
        let new = b.scalar(S::Mul, &[&beta, &g])?;
        let v = b.scalar(S::Add, &[&v, &new])?;
        let mut way = v.clone();
        if nesterov {
            let ahead = mul(b, &v, alpha.into())?;
            way = b.scalar(S::Add, &[&g, &ahead])?;
        }
        let step = b.scalar(S::Mul, &[&rate, &way])?;
        out.push(vec![b.scalar(S::Sub, &[x, &step])?, v]);
    }
    Ok(listed(out))
}

#[cfg(test)]
mod tests {
    use crate::onnx::proto::{ModelProto, NodeProto, OperatorSetIdProto};
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType, Error};

    fn of(
        op: &str,
        w: &[(&str, ConstData)],
        attrs: impl Fn(NodeProto) -> NodeProto,
        lists: usize,
    ) -> ModelProto {
        let names: Vec<&str> = ["x"].into_iter().chain(w.iter().map(|w| w.0)).collect();
        let outputs = ["y", "o1", "o2", "o3", "o4", "o5"];
        let mut n = attrs(node(op, &names, &outputs[..lists]));
        n.domain = super::DOMAIN.into();
        let mut m = model(22, port("x", DType::F32, &[]), vec![n], w);
        m.opset_import.push(OperatorSetIdProto { domain: super::DOMAIN.into(), version: 1 });
        let g = m.graph.as_mut().unwrap();
        g.output = outputs[..lists].iter().map(|o| port(o, DType::F32, &[])).collect();
        m
    }

    /// The results as vectors, for a rate of 0.5.
    fn run(m: ModelProto) -> Vec<Vec<f64>> {
        let y = crate::onnx::reference::run(&import(m).unwrap().graph, &[t(&[], &[0.5f32])]);
        y.iter().map(|y| y.to_vec()).collect()
    }

    fn near(got: &[Vec<f64>], want: &[f64]) {
        let got: Vec<f64> = got.concat();
        assert!(
            got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6),
            "{got:?}"
        );
    }

    #[test]
    fn first_and_later_steps() {
        let v = |x: f32| t(&[1], &[x]);
        let momentum = |count: i64, mode| {
            let w = [("t", t(&[], &[count])), ("a", v(1.0)), ("g", v(2.0)), ("v", v(4.0))];
            let attrs = |n: NodeProto| {
                n.float("alpha", 0.5).float("beta", 0.25).float("norm_coefficient", 1.0).text("mode", mode)
            };
            run(of("Momentum", &w, attrs, 2))
        };
        // The regularized gradient is 3.
        near(&momentum(0, "standard"), &[1.0 - 0.5 * 5.0, 5.0]);
        near(&momentum(3, "standard"), &[1.0 - 0.5 * 2.75, 2.75]);
        near(&momentum(3, "nesterov"), &[1.0 - 0.5 * (3.0 + 0.5 * 2.75), 2.75]);

        let adam = |count: i64| {
            let w = [("t", t(&[], &[count])), ("a", v(1.0)), ("g", v(2.0)), ("v", v(4.0)), ("h", v(8.0))];
            let attrs = |n: NodeProto| {
                n.float("alpha", 0.5)
                    .float("beta", 0.75)
                    .float("epsilon", 0.0)
                    .float("norm_coefficient_post", 0.5)
            };
            run(of("Adam", &w, attrs, 3))
        };
        let (v1, h1) = (3.0, 7.0f64);
        near(&adam(0), &[0.5 * (1.0 - 0.5 * v1 / h1.sqrt()), v1, h1]);
        let rate = 0.5 * (1.0 - 0.75f64.powi(2)).sqrt() / (1.0 - 0.25);
        near(&adam(2), &[0.5 * (1.0 - rate * v1 / h1.sqrt()), v1, h1]);

        let w = [
            ("t", t(&[1], &[2i64])),
            ("a", v(1.0)),
            ("b", v(2.0)),
            ("ga", v(3.0)),
            ("gb", v(0.0)),
            ("ha", v(7.0)),
            ("hb", v(9.0)),
        ];
        let attrs = |n: NodeProto| n.float("decay_factor", 0.5).float("epsilon", 1.0);
        // Two tensors: first their new values, then their new sums.
        near(&run(of("Adagrad", &w, attrs, 4)), &[1.0 - 0.25 * 3.0 / 5.0, 2.0, 16.0, 9.0]);
    }

    #[test]
    fn operands_that_do_not_fit() {
        let v = |n: usize| t(&[n], &vec![1f32; n]);
        let count = ("t", t(&[], &[1i64]));
        let fails = |w: &[(&str, ConstData)]| {
            matches!(import(of("Adagrad", w, |n| n, 1)), Err(Error::Argument { .. }))
        };
        assert!(fails(std::slice::from_ref(&count)));
        assert!(fails(&[count.clone(), ("a", v(1)), ("b", v(1))]));
        assert!(fails(&[count.clone(), ("a", v(1)), ("b", v(2)), ("c", v(1))]));
        assert!(fails(&[("t", t(&[2], &[1i64; 2])), ("a", v(1)), ("b", v(1)), ("c", v(1))]));
        assert!(import(of("Adagrad", &[count, ("a", v(1)), ("b", v(1)), ("c", v(1))], |n| n, 1)).is_ok());
    }
}

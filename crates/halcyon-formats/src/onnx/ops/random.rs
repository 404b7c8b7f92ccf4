//! Random operators. `crate::onnx::random` documents the generator.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::{Host, Num};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{DType, Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[
    row("Bernoulli", 15, &["dtype", "seed"], bernoulli),
    row("Multinomial", 7, &["dtype", "sample_size", "seed"], multinomial),
    row("RandomNormal", 1, &["dtype", "mean", "scale", "seed", "shape"], |b, c| {
        let (d, s) = (dtype(c)?, shape(c)?);
        normal(b, c, d, &s)
    }),
    row("RandomNormalLike", 1, &["dtype", "mean", "scale", "seed"], |b, c| {
        let d = like(c)?;
        normal(b, c, d, c.arg(0)?.shape())
    }),
    row("RandomUniform", 1, &["dtype", "high", "low", "seed", "shape"], |b, c| {
        let (d, s) = (dtype(c)?, shape(c)?);
        uniform(b, c, d, &s)
    }),
    row("RandomUniformLike", 1, &["dtype", "high", "low", "seed"], |b, c| {
        let d = like(c)?;
        uniform(b, c, d, c.arg(0)?.shape())
    }),
];

fn shape(c: &Call<'_>) -> Result<Shape> {
    let dims = c.ints("shape")?.ok_or_else(|| c.invalid("attribute 'shape' is missing"))?;
    dims.iter()
        .map(|&d| usize::try_from(d).map(Dim::from).map_err(|_| c.invalid(format!("{d} is not a size"))))
        .collect()
}

fn float(c: &Call<'_>, d: DType) -> Result<DType> {
    if d.is_float() { Ok(d) } else { Err(c.invalid(format!("expected a float type, found {d}"))) }
}

fn dtype(c: &Call<'_>) -> Result<DType> {
    float(c, c.dtype("dtype")?.unwrap_or(DType::F32))
}

fn like(c: &Call<'_>) -> Result<DType> {
    float(c, c.dtype("dtype")?.unwrap_or(c.arg(0)?.dtype()))
}

fn uniform(b: &mut Builder, c: &Call<'_>, d: DType, shape: &Shape) -> Result<Vec<Value>> {
    let bounds = (c.float("low", 0.0)?.into(), c.float("high", 1.0)?.into());
    let seed = b.float_seed(c)?;
    one(b.random_uniform(d, shape, bounds, seed, 0)?)
}

fn normal(b: &mut Builder, c: &Call<'_>, d: DType, shape: &Shape) -> Result<Vec<Value>> {
    let moments = (c.float("mean", 0.0)?.into(), c.float("scale", 1.0)?.into());
    let seed = b.float_seed(c)?;
    one(b.random_normal(d, shape, moments, seed, 0)?)
}

/// The dtype in which probabilities are compared.
fn wide(c: &Call<'_>, p: &Value) -> Result<DType> {
    Ok(if float(c, p.dtype())? == DType::F64 { DType::F64 } else { DType::F32 })
}

/// 1 where a uniform number is below the probability, else 0.
fn bernoulli(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let p = c.arg(0)?;
    let to = c.dtype("dtype")?.unwrap_or(p.dtype());
    let seed = b.float_seed(c)?;
    let p = b.cast(p, wide(c, p)?)?;
    let u = b.random_uniform(p.dtype(), p.shape(), (0.0, 1.0), seed, 0)?;
    let hit = b.scalar(S::Lt, &[&u, &p])?;
    one(b.cast(&hit, to)?)
}

/// Draws `[batch, sample_size]` classes from `[batch, classes]` unnormalised log-probabilities. A draw is the
/// number of cumulative probabilities that are at most a uniform number.
fn multinomial(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let to = c.dtype("dtype")?.unwrap_or(DType::I32);
    if !matches!(to, DType::I32 | DType::I64) {
        return Err(c.invalid(format!("the result's type must be i32 or i64, found {to}")));
    }
    if x.rank() != 2 || x.shape()[1].is(0) {
        return Err(c.invalid(format!("expected [batch, classes] with at least 1 class, found {}", x.ty)));
    }
    let samples = c.int("sample_size", 1)?;
    let samples = usize::try_from(samples).ok().filter(|n| *n <= i32::MAX as usize);
    let samples = Dim::from(samples.ok_or_else(|| c.invalid("sample_size must be in 0..2^31"))?);
    let seed = b.float_seed(c)?;
    let (batch, classes) = (x.shape()[0], x.shape()[1]);

    let x = b.cast(x, wide(c, x)?)?;
    let id = b.id(&x)?;
    let p = b.g.softmax(id, 1)?;
    let sums = b.g.scan(R::Sum, p, 1, false, false)?;
    let sums = b.value(sums);
    let one_ = Dim::from(1);
    let total = b.narrow(&sums, 1, classes.offset(-1), one_)?;
    let u = b.random_uniform(x.dtype(), &[batch, samples].into(), (0.0, 1.0), seed, 0)?;
    let u = b.scalar(S::Mul, &[&u, &total])?;
    let (u, sums) = (b.reshape(&u, [batch, samples, one_])?, b.reshape(&sums, [batch, one_, classes])?);
    let below = b.scalar(S::Le, &[&sums, &u])?;
    let below = b.cast(&below, DType::I32)?;
    let class = b.reduce(R::Sum, &below, &[2], false)?;
    // The last cumulative probability exceeds every uniform number, unless the probabilities are NaN.
    let last = Host::ints(vec![Num::size(classes.offset(-1))]).into();
    let last = b.cast(&last, DType::I32)?;
    let class = b.scalar(S::Min, &[&class, &last])?;
    one(b.cast(&class, to)?)
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Error};

    const N: usize = 4000;

    /// Sum of (counted - expected)² / expected.
    fn chi_square(counts: &[usize], p: &[f64]) -> f64 {
        let n = counts.iter().sum::<usize>() as f64;
        counts.iter().zip(p).map(|(&c, p)| (c as f64 - n * p).powi(2) / (n * p)).sum()
    }

    #[test]
    fn bernoulli_has_the_given_probabilities() {
        let p: Vec<f32> = (0..N).map(|i| [0.0, 0.1, 0.5, 1.0][i % 4]).collect();
        let op = |seed| node("Bernoulli", &["x"], &["y"]).float("seed", seed).int("dtype", 9);
        let y = run_one(15, op(3.0), &t(&[N], &p), &[]).to_vec::<bool>();
        let ones = |k: usize| y.iter().skip(k).step_by(4).filter(|v| **v).count();
        // Within four standard errors.
        assert_eq!((ones(0), ones(3)), (0, N / 4));
        assert!((ones(1) as f64 - 100.0).abs() < 38.0, "{}", ones(1));
        assert!((ones(2) as f64 - 500.0).abs() < 64.0, "{}", ones(2));
        assert_ne!(y, run_one(15, op(4.0), &t(&[N], &p), &[]).to_vec::<bool>());
        let same = run_one(15, node("Bernoulli", &["x"], &["y"]), &t(&[2], &[0f64, 1.0]), &[]);
        assert_eq!((same.dtype, same.to_vec::<f64>()), (DType::F64, vec![0.0, 1.0]));
    }

    #[test]
    fn multinomial_has_the_given_frequencies() {
        // Unnormalised, with one class excluded and several likely ones.
        let p = [0.5, 0.25, 0.125, 0.125];
        let x: Vec<f32> = [0.5, 0.25, 0.0, 0.125, 0.125].iter().map(|p: &f32| p.ln() + 3.0).collect();
        for to in [6, 7] {
            let op = node("Multinomial", &["x"], &["y"]).float("seed", 1.0).int("sample_size", N as i64);
            let y = run_one(7, op.int("dtype", to), &t(&[1, 5], &x), &[]);
            assert_eq!(y.dims[..], [1, N]);
            let y = y.to_vec::<i64>();
            let count = |k| y.iter().filter(|v| **v == k).count();
            assert_eq!(count(2), 0);
            let far = chi_square(&[count(0), count(1), count(3), count(4)], &p);
            // Three degrees of freedom: a value above 16.3 has a probability of one in a thousand.
            assert!(far < 16.3, "{far}");
        }
        let rows = [0f32, f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0];
        let y =
            run_one(7, node("Multinomial", &["x"], &["y"]).int("sample_size", 2), &t(&[2, 2], &rows), &[]);
        assert_eq!((y.dtype, y.to_vec::<i32>()), (DType::I32, vec![0, 0, 1, 1]));
    }

    #[test]
    fn shapes_types_and_seeds_of_the_generators() {
        let x = t(&[2, 3], &[0f32; 6]);
        let y = run_one(
            1,
            node("RandomUniformLike", &["x"], &["y"]).float("low", 2.0).float("high", 3.0),
            &x,
            &[],
        );
        assert_eq!((y.dtype, &y.dims[..]), (DType::F32, &[2usize, 3][..]));
        assert!(y.to_vec::<f32>().iter().all(|v| (2.0..3.0).contains(v)));
        let op = |name| node("RandomNormal", &[], &[name]).ints("shape", &[3, 1]).int("dtype", 11);
        let draw = |nodes| {
            let i = import(model(22, port("x", DType::F32, &["1"]), nodes, &[])).unwrap();
            crate::onnx::reference::run(&i.graph, &[t(&[1], &[0f32])]).remove(0).to_vec::<f64>()
        };
        assert_eq!(draw(vec![op("y")]).len(), 3);
        // The seed determines the draw if given, else the node's name does.
        let named = |n: &str, seed: Option<f32>| {
            let mut node = op("y");
            node.name = n.into();
            draw(vec![if let Some(s) = seed { node.float("seed", s) } else { node }])
        };
        assert_ne!(named("a", None), named("b", None));
        assert_eq!(named("a", Some(1.0)), named("b", Some(1.0)));
        assert_ne!(named("a", Some(1.0)), named("a", Some(2.0)));
        // Two nodes with the same name draw different numbers.
        let mut twice = vec![op("a"), op("b"), node("Sub", &["a", "b"], &["y"])];
        twice[..2].iter_mut().for_each(|n| n.name = "same".into());
        assert!(draw(twice).iter().all(|d| *d != 0.0));
    }

    #[test]
    fn hostile_attributes() {
        let refused = |n| import(model(22, port("x", DType::F32, &["2", "0"]), vec![n], &[])).unwrap_err();
        let u = || node("RandomUniform", &[], &["y"]);
        assert!(matches!(refused(u()), Error::Argument { .. }));
        assert!(matches!(refused(u().ints("shape", &[-1])), Error::Argument { .. }));
        assert!(matches!(refused(u().ints("shape", &[2]).int("dtype", 7)), Error::Argument { .. }));
        assert!(matches!(refused(u().ints("shape", &[i64::MAX, i64::MAX])), Error::Unsupported { .. }));
        assert!(matches!(
            refused(u().ints("shape", &[2]).float("high", f32::INFINITY)),
            Error::Argument { .. }
        ));
        let m = || node("Multinomial", &["x"], &["y"]);
        assert!(matches!(refused(m()), Error::Argument { .. }));
        assert!(matches!(refused(m().int("sample_size", -1)), Error::Argument { .. }));
    }
}

//! Checks that the measured work computes correct results. [`product`] and [`attention`] compare a random
//! sample with sums in f64 on the host, [`compare_epilogue`] compares every element with such sums, [`rows`]
//! compares random rows with the CPU backend, and [`same`] compares two runs on the device.

use super::FigureError;
use halcyon::Error;
use halcyon::optable::Rng;
use halcyon::prelude::*;

/// Precision of products: relative rounding errors of the factors, of the steps of a sum, and of the result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exactness {
    pub factors: f64,
    pub sums: f64,
    pub result: f64,
}

/// 2^-n.
const fn bits(n: u32) -> f64 {
    1.0 / (1u64 << n) as f64
}

impl Exactness {
    /// Unrounded factors, sums in f32.
    pub(crate) const F32: Exactness = Exactness { factors: 0.0, sums: bits(23), result: bits(23) };
    /// Factors with ten fraction bits. Some devices truncate instead of rounding.
    pub(crate) const TF32: Exactness = Exactness { factors: bits(10), ..Exactness::F32 };
    pub(crate) const F16: Exactness = Exactness { result: bits(10), ..Exactness::F32 };
    pub(crate) const BF16: Exactness = Exactness { result: bits(7), ..Exactness::F32 };
    /// Matrix units add products of 8-bit floats with fewer bits than f32 has.
    pub(crate) const F8: Exactness = Exactness { sums: bits(16), result: bits(7), factors: 0.0 };
    pub(crate) const INTEGERS: Exactness = Exactness { factors: 0.0, sums: 0.0, result: 0.0 };

    /// The precision of products whose results have this type.
    pub(crate) fn of(d: DType) -> Exactness {
        match d {
            DType::F16 => Exactness::F16,
            DType::BF16 => Exactness::BF16,
            _ => Exactness::F32,
        }
    }

    /// Allowed error of a sum of `k` products; `want` is the sum, and `root` the square root of the sum of
    /// the products' squares. Rounding errors are random, so their squares add up; truncation errors are
    /// proportional to the result. A tile of products that is missing, added twice or from other rows causes
    /// a far larger error.
    fn slack(self, k: usize, want: f64, root: f64) -> f64 {
        let want = want.abs();
        self.factors * (2.0 * want + 4.0 * root)
            + self.sums * 8.0 * (k as f64).sqrt() * root
            + self.result * want
    }
}

/// Up to `count` of `n` indexes: the first, the last, and random ones in between.
pub(crate) fn places(n: usize, count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut at: Vec<usize> = match n <= count {
        true => (0..n).collect(),
        false => [0, n - 1].into_iter().chain((2..count).map(|_| rng.below(n))).collect(),
    };
    at.sort_unstable();
    at.dedup();
    at
}

/// The slices of `t` at the indices `at` along an axis.
fn taken(t: &Tensor, axis: i64, at: &[usize]) -> Result<Tensor> {
    let index: Vec<i32> = at.iter().map(|i| *i as i32).collect();
    Ok(t.gather(&Tensor::from_slice(t.backend(), [at.len()], &index)?, axis))
}

/// How the description of a wrong result ends.
pub(crate) fn expected(want: f64, slack: f64) -> String {
    format!("expected {want} ± {slack:.1e}")
}

/// Counts differences and describes the first.
#[derive(Debug, Default)]
struct Mismatches {
    compared: usize,
    bad: usize,
    first: Option<String>,
}

impl Mismatches {
    fn compare(&mut self, at: &dyn Fn() -> String, got: f64, want: f64, slack: f64) {
        self.compared += 1;
        // With the negation, a difference of NaN counts as wrong.
        if !((got - want).abs() <= slack || got.is_nan() && want.is_nan()) {
            self.bad += 1;
            self.first.get_or_insert_with(|| format!("{} is {got}, {}", at(), expected(want, slack)));
        }
    }

    /// The number of compared results; if some are wrong, their number and the first of them.
    fn verdict(self) -> Result<String, FigureError> {
        match self.first {
            None if self.compared == 0 => Err(Error::internal("no result was compared").into()),
            None => Ok(format!("{} results as expected", self.compared)),
            Some(first) => {
                Err(FigureError::Wrong(format!("{} of {} results: {first}", self.bad, self.compared)))
            }
        }
    }
}

/// Compares the elements in some rows and columns of `y` with the product of `x` `[m, k]` and `w` `[k, n]`
/// (`[n, k]` if `turned`).
pub(crate) fn product(
    x: &Tensor,
    w: &Tensor,
    turned: bool,
    y: &Tensor,
    e: Exactness,
) -> Result<String, FigureError> {
    let mut rng = Rng::new(Rng::fresh_seed());
    let dims = [x.dims()?, y.dims()?];
    let (m, k, n) = (dims[0][0], dims[0][1], dims[1][1]);
    let (rows, columns) = (places(m, 16, &mut rng), places(n, 64, &mut rng));
    let x = taken(x, 0, &rows)?.to_vec::<f64>()?;
    let w = taken(w, i64::from(!turned), &columns)?.to_vec::<f64>()?;
    let got = taken(&taken(y, 0, &rows)?, 1, &columns)?.to_vec::<f64>()?;
    let mut wrong = Mismatches::default();
    for (i, row) in rows.iter().enumerate() {
        for (j, column) in columns.iter().enumerate() {
            let (mut want, mut squares) = (0.0, 0.0);
            for l in 0..k {
                let p = x[i * k + l] * if turned { w[j * k + l] } else { w[l * columns.len() + j] };
                want += p;
                squares += p * p;
            }
            let at = || format!("[{row}, {column}]");
            wrong.compare(&at, got[i * columns.len() + j], want, e.slack(k, want, squares.sqrt()));
        }
    }
    wrong.verdict()
}

/// Compares some heads and queries of `y` with attention computed in f64. With `causal`, the last query
/// attends to all keys, and each earlier query to one key less than the next.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
    y: &Tensor,
) -> Result<String, FigureError> {
    let mut rng = Rng::new(Rng::fresh_seed());
    let (dq, dk) = (q.dims()?, k.dims()?);
    let (n, h, sq, d) = (dq[0], dq[1], dq[2], dq[3]);
    let (hk, sk) = (dk[1], dk[2]);
    let e = Exactness::of(q.dtype()?);
    let mut wrong = Mismatches::default();
    let mut heads = places(n * h, 3, &mut rng);
    heads.truncate(3);
    for head in heads {
        let of =
            |t: &Tensor, at: usize, rows: usize| t.narrow(0, head / h, 1).narrow(1, at, 1).reshape([rows, d]);
        let shared = head % h / (h / hk);
        let queries = places(sq, 6, &mut rng);
        let q = taken(&of(q, head % h, sq), 0, &queries)?.to_vec::<f64>()?;
        let got = taken(&of(y, head % h, sq), 0, &queries)?.to_vec::<f64>()?;
        let (k, v) = (of(k, shared, sk).to_vec::<f64>()?, of(v, shared, sk).to_vec::<f64>()?);
        for (i, query) in queries.iter().enumerate() {
            let seen = if causal { (query + 1 + sk).saturating_sub(sq).min(sk) } else { sk };
            let q = &q[i * d..(i + 1) * d];
            let dot = |row: &[f64]| row.iter().zip(q).map(|(a, b)| a * b).sum::<f64>();
            let mut p: Vec<f64> =
                k.chunks_exact(d).take(seen).map(|row| dot(row) / (d as f64).sqrt()).collect();
            let most = p.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            p.iter_mut().for_each(|p| *p = (*p - most).exp());
            let sum: f64 = p.iter().sum();
            let (mut want, mut squares) = (vec![0.0; d], vec![0.0; d]);
            for (p, row) in p.iter().zip(v.chunks_exact(d)) {
                for (j, v) in row.iter().enumerate() {
                    let term = p / sum * v;
                    want[j] += term;
                    squares[j] += term * term;
                }
            }
            for (j, want) in want.into_iter().enumerate() {
                let root = squares[j].sqrt();
                // The weights may be rounded to the type of the results. Scores and sums are in f32.
                let rounded = e.result * (want.abs() + 4.0 * root);
                let sums = e.sums * (64.0 + 4.0 * (sk as f64).sqrt()) * (want.abs() + root);
                let at = || format!("[{}, {}, {query}, {j}]", head / h, head % h);
                wrong.compare(&at, got[i * d + j], want, rounded + sums + 1e-7);
            }
        }
    }
    wrong.verdict()
}

/// Compares every element of `y`, which is `f(x · w + bias)`, with the same expression computed in f64. `e`
/// is the precision of the product, and `more` the error that the activation may add.
pub(crate) fn compare_epilogue(
    [x, w, bias, y]: [&Tensor; 4],
    f: fn(f64) -> f64,
    e: Exactness,
    more: f64,
) -> Result<String, FigureError> {
    let (m, k, n) = (x.dims()?[0], x.dims()?[1], y.dims()?[1]);
    let [x, w, bias, got] = [x.to_vec::<f64>()?, w.to_vec()?, bias.to_vec()?, y.to_vec()?];
    let mut wrong = Mismatches::default();
    for i in 0..m {
        for j in 0..n {
            let products = (0..k).map(|l| x[i * k + l] * w[l * n + j]);
            let (want, squares) = products.fold((bias[j], 0.0), |(s, q), p| (s + p, q + p * p));
            // The product may be rounded before the bias is added.
            let rounded = e.result * (want - bias[j]).abs();
            let slack = 1.2 * (e.slack(k, want, squares.sqrt()) + rounded) + more;
            // With a NaN slack, only a pair of NaNs would pass, so equal values would count as wrong.
            let slack = if slack.is_nan() { 0.0 } else { slack };
            wrong.compare(&|| format!("[{i}, {j}]"), got[i * n + j], f(want), slack);
        }
    }
    wrong.verdict()
}

/// Compares some rows of `y`, the result of `make` for the operands `x`, with the results of the CPU backend
/// in the same types. `make` computes each row independently. An operand is a matrix with one row per row of
/// the result, or a vector.
pub(crate) fn rows(x: &[Tensor], make: fn(&[Tensor]) -> Tensor, y: &Tensor) -> Result<String, FigureError> {
    let dims = y.dims()?;
    let at = places(dims[0], 8, &mut Rng::new(Rng::fresh_seed()));
    let cpu = Backend::cpu()?;
    let mut host = vec![];
    for t in x {
        let t = if t.dims()?.len() == 2 { taken(t, 0, &at)? } else { t.clone() };
        host.push(Tensor::from_slice(&cpu, t.shape()?, &t.to_vec::<f32>()?)?.cast(t.dtype()?));
    }
    let (want, got) = (make(&host).to_vec::<f64>()?, taken(y, 0, &at)?.to_vec::<f64>()?);
    let most = want.iter().fold(0f64, |m, v| m.max(v.abs()));
    let e = Exactness::of(y.dtype()?);
    let mut wrong = Mismatches::default();
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let place = || format!("[{}, {}]", at[i / dims[1]], i % dims[1]);
        // Intermediate results are rounded to the type too, and not at the same points on both sides.
        let slack = e.result * (4.0 * want.abs() + 0.5 * most) + bits(17) * most;
        wrong.compare(&place, *got, *want, slack);
    }
    wrong.verdict()
}

/// Checks that a captured run and a run without a capture gave equal values in a random sample of rows. NaN
/// equals NaN; an infinity counts as wrong.
pub(crate) fn same(captured: &Tensor, submitted: &Tensor) -> Result<(), FigureError> {
    let dims = captured.dims()?;
    let last = dims.last().copied().unwrap_or(1);
    let rows = dims.iter().product::<usize>() / last.max(1);
    let at = places(rows, 64, &mut Rng::new(Rng::fresh_seed()));
    let of = |t: &Tensor| taken(&t.reshape([rows, last]), 0, &at)?.to_vec::<f64>();
    let (a, b) = (of(captured)?, of(submitted)?);
    let mut wrong = Mismatches::default();
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        wrong.compare(&|| format!("[{}, {}] of the captured run", at[i / last], i % last), *a, *b, 0.0);
    }
    wrong.verdict().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::Attention;

    fn is_wrong(r: Result<String, FigureError>) -> bool {
        matches!(r, Err(FigureError::Wrong(_)))
    }

    /// `t` with one element changed.
    fn changed(t: &Tensor, at: usize, by: f32) -> Tensor {
        let mut v = t.to_vec::<f32>().unwrap();
        v[at] += by;
        Tensor::from_slice(t.backend(), t.shape().unwrap(), &v).unwrap().cast(t.dtype().unwrap())
    }

    #[test]
    fn places_have_both_ends() {
        let mut rng = Rng::new(1);
        assert_eq!(places(5, 8, &mut rng), [0, 1, 2, 3, 4]);
        let at = places(1000, 8, &mut rng);
        assert!(at.len() > 2 && at[0] == 0 && at[at.len() - 1] == 999 && at.is_sorted(), "{at:?}");
    }

    #[test]
    fn wrong_products_are_found() {
        let b = Backend::cpu().unwrap();
        let (x, w) = (Tensor::randn(&b, [12, 40], DType::F32, 1), Tensor::randn(&b, [40, 20], DType::F32, 2));
        let y = x.matmul(&w);
        assert_eq!(product(&x, &w, false, &y, Exactness::F32).ok().unwrap(), "240 results as expected");
        assert!(product(&x, &w.transpose(0, 1), true, &y, Exactness::F32).is_ok());
        assert!(is_wrong(product(&x, &w, false, &changed(&y, 239, 1e-3), Exactness::F32)));
        assert!(is_wrong(product(&x, &w, false, &(&y * f64::NAN), Exactness::BF16)));
        // Factors truncated to ten fraction bits are acceptable for TF32 but not for f32.
        let cut = |t: &Tensor| {
            let v: Vec<f32> =
                t.to_vec::<f32>().unwrap().iter().map(|v| f32::from_bits(v.to_bits() & !0x1FFF)).collect();
            Tensor::from_slice(&b, t.shape().unwrap(), &v).unwrap()
        };
        let tf32 = cut(&x).matmul(&cut(&w));
        assert!(product(&x, &w, false, &tf32, Exactness::TF32).is_ok());
        assert!(is_wrong(product(&x, &w, false, &tf32, Exactness::F32)));
        // A sum with some of its products missing.
        let part = x.narrow(1, 0, 36).matmul(&w.narrow(0, 0, 36));
        for e in [Exactness::TF32, Exactness::F16, Exactness::BF16, Exactness::F8, Exactness::INTEGERS] {
            assert!(is_wrong(product(&x, &w, false, &part, e)), "{e:?}");
        }
    }

    #[test]
    fn wrong_attention_is_found() {
        let b = Backend::cpu().unwrap();
        let of = |h: usize, s: usize, seed| Tensor::randn(&b, [2, h, s, 16], DType::F32, seed);
        let (q, k, v) = (of(4, 5, 1), of(2, 9, 2), of(2, 9, 3));
        let y = |causal| q.attention(&k, &v, Attention { causal, scale: Some(0.25), ..Attention::default() });
        for causal in [false, true] {
            assert!(attention(&q, &k, &v, causal, &y(causal)).is_ok());
            assert!(is_wrong(attention(&q, &k, &v, causal, &y(!causal))));
            assert!(is_wrong(attention(&q, &k, &v, causal, &changed(&y(causal), 3, 1e-4))));
        }
        let f16 = [&q, &k, &v].map(|t| t.cast(DType::F16));
        let y = f16[0].attention(
            &f16[1],
            &f16[2],
            Attention { causal: true, scale: Some(0.25), ..Attention::default() },
        );
        assert!(attention(&f16[0], &f16[1], &f16[2], true, &y).is_ok());
        assert!(is_wrong(attention(&f16[0], &f16[1], &f16[2], true, &changed(&y.cast(DType::F32), 3, 0.02))));
    }

    #[test]
    fn epilogues_and_captures_are_compared() {
        let b = Backend::cpu().unwrap();
        let of = |dims: [usize; 2], seed| Tensor::randn(&b, dims, DType::F32, seed);
        let (x, w) = (of([6, 8], 1), of([8, 10], 2));
        let bias = Tensor::randn(&b, [10], DType::F32, 3);
        let x = changed(&x, 9, f32::NAN);
        let z = x.matmul(&w) + &bias;
        let relu = |v: f64| if v.is_nan() { v } else { v.max(0.0) };
        assert!(compare_epilogue([&x, &w, &bias, &z.relu()], relu, Exactness::F32, 0.0).is_ok());
        // A relu that drops NaN.
        assert!(is_wrong(compare_epilogue([&x, &w, &bias, &z.relu()], |v| v.max(0.0), Exactness::F32, 0.0)));
        assert!(is_wrong(compare_epilogue([&x, &w, &bias, &z], relu, Exactness::F32, 0.0)));
        let twice = |x: &[Tensor]| &x[0] * 2.0 + &x[1];
        let v = [w, bias];
        let y = twice(&v);
        assert!(rows(&v, twice, &y).is_ok() && is_wrong(rows(&v, twice, &changed(&y, 3, 1e-3))));
        let w = &v[0];
        assert!(same(&z, &z).is_ok() && same(w, &changed(w, 79, 1e-6)).is_err());
    }
}

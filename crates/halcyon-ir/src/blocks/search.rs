//! Searches for scales and minima that reconstruct a few elements with a small weighted squared error.
//!
//! Each tries a fixed list of inverse scales. It rounds the elements with each one, and then takes the scale
//! that is best for these codes by least squares. The lists and the weights are those of ggml's reference
//! quantiser without an importance matrix, so that the errors are the same.
//!
//! Where one element is much larger than the others, which of the tries is best can depend on rounding. Then
//! only the order of the operations of ggml gives the same error for each row: sums run from the first
//! element to the last.

/// `x` rounded to a whole number, halves to even ones. Exact up to 2^22; larger numbers stay large.
pub(super) fn nearest(x: f32) -> f32 {
    // From 1.5 * 2^23 on, floats are whole numbers, so the sum is rounded. A call of `round_ties_even` would
    // be a call of a function on processors without SSE 4.1.
    const WHOLE: f32 = 12_582_912.0;
    (x + WHOLE) - WHOLE
}

/// `1 / x`, or 0 for 0.
pub(super) fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The first element with the largest magnitude, with its sign.
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |m, &v| if v.abs() > m.abs() { v } else { m })
}

/// The sums of `K` terms over all elements, in their order.
fn sums<const N: usize, const K: usize>(term: impl Fn(usize) -> [f32; K]) -> [f32; K] {
    let mut sums = [0.0; K];
    for i in 0..N {
        let t = term(i);
        for k in 0..K {
            sums[k] += t[k];
        }
    }
    sums
}

/// How well one list of codes fits: the sums of `w x q` and `w q q`.
struct Fit {
    xq: f32,
    qq: f32,
}

impl Fit {
    /// The scale with the least squares for these codes.
    fn scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }

    /// Whether the best scale for these codes lowers the squared error, from that of zeros, by more than the
    /// one for the other codes. The product avoids a quotient, whose rounding would decide between similar
    /// fits.
    fn is_better_than(&self, other: &Fit) -> bool {
        self.xq * self.xq > other.scale() * other.xq * self.qq
    }
}

/// The scale of the best fit among the codes that `inverses` yields. `terms` gives `w x q` and `w q q` of an
/// element and an inverse scale.
pub(super) fn best_scale<const N: usize>(
    x: &[f32; N],
    inverses: impl Iterator<Item = f32>,
    terms: impl Fn(f32, f32) -> [f32; 2],
) -> f32 {
    let mut best: Option<Fit> = None;
    for inverse in inverses {
        let [xq, qq] = sums::<N, 2>(|i| terms(x[i], inverse));
        let fit = Fit { xq, qq };
        if best.as_ref().is_none_or(|b| fit.is_better_than(b)) {
            best = Some(fit);
        }
    }
    best.map_or(0.0, |b| b.scale())
}

/// The scale for whole codes from `-n` to `n - 1`: 19 tries around the one that maps the extreme to `-n`.
pub(super) fn symmetric<const N: usize>(x: &[f32; N], n: f32) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < 1e-15 {
        return 0.0;
    }
    let steps = std::iter::once(0).chain((-9..=9).filter(|&s| s != 0));
    best_scale(x, steps.map(|s| -(n + 0.1 * s as f32) / extreme), |x, inverse| {
        let (q, w) = (nearest(inverse * x).clamp(-n, n - 1.0), x * x);
        [w * x * q, w * q * q]
    })
}

/// The scale for whole codes from `-n` to `n - 1`: one try, and then up to five rounds that move single codes
/// to where the other ones want them. For few codes this is better than other scales.
pub(super) fn symmetric_by_codes<const N: usize>(x: &[f32; N], n: f32) -> f32 {
    let extreme = extreme(x);
    if extreme.abs() < 1e-15 {
        return 0.0;
    }
    let round = |v: f32| nearest(v).clamp(-n, n - 1.0);
    let mut q = x.map(|v| round(-n / extreme * v));
    let mut fit = Fit { xq: 0.0, qq: 0.0 };
    for (x, q) in x.iter().zip(&q) {
        fit.xq += x * x * x * q;
        fit.qq += x * x * q * q;
    }
    for _ in 0..5 {
        let mut moved = false;
        for i in 0..N {
            let w = x[i] * x[i];
            let others = Fit { xq: fit.xq - w * x[i] * q[i], qq: fit.qq - w * q[i] * q[i] };
            if others.xq <= 0.0 || others.qq <= 0.0 {
                continue;
            }
            let code = round(x[i] * others.qq / others.xq);
            let new = Fit { xq: others.xq + w * x[i] * code, qq: others.qq + w * code * code };
            if code != q[i] && new.is_better_than(&fit) {
                (q[i], fit, moved) = (code, new, true);
            }
        }
        if !moved {
            break;
        }
    }
    fit.scale()
}

/// How a search for a scale and a minimum runs.
pub(super) struct Range {
    /// The largest code.
    pub(super) top: f32,
    /// Where the tries begin: the first one spreads the elements over `top + first` steps.
    pub(super) first: f32,
    /// The number of tries, each with 0.1 steps more.
    pub(super) tries: usize,
    /// The tries are compared by the sum of absolute errors, not of squares.
    pub(super) absolute: bool,
}

/// The scale `d` and the minimum `m >= 0` of `x ~ d * q - m` with whole `q` from 0 to `range.top`.
pub(super) fn scale_and_min<const N: usize>(x: &[f32; N], w: &[f32; N], range: &Range) -> (f32, f32) {
    let low = x.iter().fold(f32::INFINITY, |m, &v| m.min(v)).min(0.0);
    let high = x.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    if high <= low {
        return (0.0, -low);
    }
    let codes = |min: f32, steps: f32| -> [f32; N] {
        let inverse = steps / (high - min);
        std::array::from_fn(|i| nearest(inverse * (x[i] - min)).clamp(0.0, range.top))
    };
    let error = |q: &[f32; N], scale: f32, min: f32| {
        let [e] = sums::<N, 1>(|i| {
            let e = scale * q[i] + min - x[i];
            [w[i] * if range.absolute { e.abs() } else { e * e }]
        });
        e
    };
    let [sum_w, sum_x] = sums::<N, 2>(|i| [w[i], w[i] * x[i]]);
    let (mut scale, mut min) = ((high - low) / range.top, low);
    let mut least = error(&codes(min, range.top), scale, min);
    for step in 0..=range.tries {
        // Each try starts at the best minimum so far.
        let q = codes(min, range.first + 0.1 * step as f32 + range.top);
        let [sum_q, sum_qq, sum_xq] = sums::<N, 3>(|i| [w[i] * q[i], w[i] * q[i] * q[i], w[i] * q[i] * x[i]]);
        let determinant = sum_w * sum_qq - sum_q * sum_q;
        if determinant <= 0.0 {
            continue;
        }
        let mut new_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant;
        let mut new_min = (sum_qq * sum_x - sum_q * sum_xq) / determinant;
        if new_min > 0.0 {
            (new_scale, new_min) = (sum_xq / sum_qq, 0.0);
        }
        let e = error(&q, new_scale, new_min);
        if e < least {
            (scale, min, least) = (new_scale, new_min, e);
        }
    }
    (scale, -min)
}

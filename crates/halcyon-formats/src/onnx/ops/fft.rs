//! Discrete Fourier transforms as matrix products.
//!
//! A transform of up to [`LEAF`] points is one product with a matrix of cosines and sines. A longer transform
//! of composite length `n = n1 * n2` is `n2` transforms of length `n1`, a multiplication by twiddle factors,
//! and `n1` transforms of length `n2` (Cooley and Tukey, "An algorithm for the machine calculation of complex
//! Fourier series", 1965), so it costs `n * (n1 + n2)`. A transform of long prime length is a convolution
//! with a chirp (Bluestein, "A linear filtering approach to the computation of discrete Fourier transform",
//! 1970), which is computed by transforms whose length is a power of two. A complex signal of even length and
//! at most [`LEAF`] points is split into halves before the product, which halves the work. Tables are
//! computed in f64 and rounded once.
//!
//! Signals have the shape `[m, n, c]`: `m` signals of `n` real (`c = 1`) or complex (`c = 2`) elements.

use crate::onnx::build::{Builder, Range, Value};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Error, Result, Scalar};
use std::f64::consts::{FRAC_PI_2, PI};

/// Longest transform computed as one matrix product.
const LEAF: usize = 256;

/// Longest supported transform. Its tables are computed during import, so their size must be limited.
pub(super) const MAX_LENGTH: usize = 1 << 20;

/// Direction of a transform: the sign of the exponent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Sign {
    /// `e^(-2πi jk/n)`.
    Forward,
    /// `e^(2πi jk/n) / n`.
    Inverse,
}

impl Sign {
    fn value(self) -> f64 {
        if self == Sign::Forward { -1.0 } else { 1.0 }
    }
}

type Complex = (f64, f64);

/// `e^(2πi r/n)`, exact at multiples of a quarter turn.
fn root(r: u64, n: u64) -> Complex {
    let turn = 4 * u128::from(r % n);
    let n = u128::from(n);
    let (quarter, rest) = (turn / n, turn % n);
    let a = FRAC_PI_2 * (rest as f64 / n as f64);
    let (c, s) = if rest == 0 { (1.0, 0.0) } else { (a.cos(), a.sin()) };
    match quarter {
        0 => (c, s),
        1 => (-s, c),
        2 => (-c, -s),
        _ => (s, -c),
    }
}

fn times(a: Complex, b: Complex) -> Complex {
    (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0)
}

fn conj(a: Complex, sign: f64) -> Complex {
    (a.0, sign * a.1)
}

/// A constant computed during import.
fn table(dtype: DType, dims: &[usize], v: impl IntoIterator<Item = f64>) -> Result<Value> {
    Ok(Value::table(crate::data::from_scalars(dtype, dims, v.into_iter().map(Scalar::F))?))
}

/// Rejects lengths whose tables would be too large. `what` names the operator.
fn length(what: &str, n: usize) -> Result<()> {
    match n {
        0 => Err(Error::argument(what, "a Fourier transform needs at least 1 point, found 0")),
        n if n > MAX_LENGTH => Err(Error::unsupported(
            format!("a Fourier transform of {n} points"),
            format!("At most {MAX_LENGTH} points are supported"),
        )),
        _ => Ok(()),
    }
}

/// The first `keep` of the `n` points of the transform of `x`. `x` has the shape `[m, n, 1 or 2]`, the result
/// `[m, keep, 2]`.
///
/// # Errors
/// [`Error::Argument`] if `n` is 0, [`Error::Unsupported`] if `n` exceeds [`MAX_LENGTH`].
pub(super) fn transform(b: &mut Builder, x: &Value, n: usize, keep: usize, sign: Sign) -> Result<Value> {
    length("DFT", n)?;
    let scale = if sign == Sign::Inverse { 1.0 / n as f64 } else { 1.0 };
    let halve = channels(x) == 2 && n > 2 && n.is_multiple_of(2);
    if n <= LEAF && !halve {
        return leaf(b, x, n, keep, sign.value(), scale);
    }
    let y = if n <= LEAF { halves(b, x, n / 2, sign.value())? } else { any(b, x, n, sign.value())? };
    let y = b.narrow(&y, 1, Dim::from(0), Dim::from(keep))?;
    if scale == 1.0 {
        return Ok(y);
    }
    let k = b.lit(&y, scale);
    b.scalar(S::Mul, &[&y, &k])
}

/// The inverse transform to `n` real points, `[m, n, 1]`. `x` has the shape `[m, n / 2 + 1, 1 or 2]`. `x` is
/// the first half of a conjugate-symmetric spectrum.
///
/// # Errors
/// The errors of [`transform`].
pub(super) fn inverse_real(b: &mut Builder, x: &Value, n: usize) -> Result<Value> {
    length("DFT", n)?;
    let (m, c, half) = (x.shape()[0], channels(x), n / 2 + 1);
    if n <= LEAF {
        let mut w = Vec::with_capacity(half * c * n);
        for k in 0..half {
            // Every point except the first and the middle also stands for its mirror image.
            let twice = if k == 0 || 2 * k == n { 1.0 } else { 2.0 };
            for part in 0..c {
                w.extend((0..n).map(|j| {
                    let r = root((j * k) as u64, n as u64);
                    twice / n as f64 * if part == 0 { r.0 } else { -r.1 }
                }));
            }
        }
        let w = table(x.dtype(), &[half * c, n], w)?;
        let x = b.reshape(x, [m, Dim::from(half * c)])?;
        let y = product(b, &x, &w)?;
        return b.reshape(&y, [m, Dim::from(n), Dim::from(1)]);
    }
    // The rest of the spectrum is the conjugate mirror image.
    let rest = n - half;
    let from = |start: usize, step: i64, len: Dim| Range { start: Dim::from(start), step, len };
    let whole = |len: Dim| from(0, 1, len);
    let tail = b.slice(x, &[whole(m), from(rest, -1, Dim::from(rest)), whole(Dim::from(c))])?;
    let tail = if c == 2 {
        let flip = table(x.dtype(), &[2], [1.0, -1.0])?;
        b.scalar(S::Mul, &[&tail, &flip])?
    } else {
        tail
    };
    let all = b.concat(&[x, &tail], 1)?;
    let y = transform(b, &all, n, n, Sign::Inverse)?;
    b.narrow(&y, 2, Dim::from(0), Dim::from(1))
}

/// 1 for real signals, 2 for complex ones.
fn channels(x: &Value) -> usize {
    if x.shape().last().is_some_and(|d| d.is(1)) { 1 } else { 2 }
}

fn product(b: &mut Builder, x: &Value, w: &Value) -> Result<Value> {
    let ids = b.ids(&[x, w])?;
    let n = b.g.matmul(ids[0], ids[1])?;
    Ok(b.value(n))
}

fn leaf(b: &mut Builder, x: &Value, n: usize, keep: usize, sign: f64, scale: f64) -> Result<Value> {
    let (m, c) = (x.shape()[0], channels(x));
    let mut w = Vec::with_capacity(n * c * keep * 2);
    for j in 0..n {
        for part in 0..c {
            for k in 0..keep {
                let (re, im) = conj(root((j * k) as u64, n as u64), sign);
                w.extend(if part == 0 { [re * scale, im * scale] } else { [-im * scale, re * scale] });
            }
        }
    }
    let w = table(x.dtype(), &[n * c, keep * 2], w)?;
    let x = b.reshape(x, [m, Dim::from(n * c)])?;
    let y = product(b, &x, &w)?;
    b.reshape(&y, [m, Dim::from(keep), Dim::from(2)])
}

/// Transforms `2 * half` complex points. The even points of the result are the transform of `x[j] + x[j +
/// half]`, the odd points are the transform of `x[j] - x[j + half]` times twiddle factors.
fn halves(b: &mut Builder, x: &Value, half: usize, sign: f64) -> Result<Value> {
    let (m, h, two) = (x.shape()[0], Dim::from(half), Dim::from(2));
    let (lo, hi) = (b.narrow(x, 1, Dim::from(0), h)?, b.narrow(x, 1, h, h)?);
    let (even, odd) = (b.scalar(S::Add, &[&lo, &hi])?, b.scalar(S::Sub, &[&lo, &hi])?);
    let twist: Vec<Complex> = (0..half).map(|j| conj(root(j as u64, 2 * half as u64), sign)).collect();
    let odd = multiply(b, &odd, &[half], &twist)?;
    let y = b.concat(&[&even, &odd], 1)?;
    let y = b.reshape(&y, [m.mul(two), h, two])?;
    let z = leaf(b, &y, half, half, sign, 1.0)?;
    let z = b.reshape(&z, [m, two, h, two])?;
    let z = b.permute(&z, &[0, 2, 1, 3])?;
    b.reshape(&z, [m, Dim::from(2 * half), two])
}

/// The largest divisor that is at most the square root.
fn divisor(n: usize) -> usize {
    (1..=n.isqrt()).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}

/// Computes all `n` points, without the factor `1 / n` of the inverse.
fn any(b: &mut Builder, x: &Value, n: usize, sign: f64) -> Result<Value> {
    if n <= LEAF {
        return leaf(b, x, n, n, sign, 1.0);
    }
    match divisor(n) {
        1 => chirp(b, x, n, sign),
        n1 => split(b, x, n1, n / n1, sign),
    }
}

/// Transforms `n = n1 * n2` points. With `e(t) = exp(±2πi t)`, `j = n2 * j1 + j2` and `k = k1 + n1 * k2`:
/// `X[k] = Σ_j2 e(j2 k2 / n2) e(j2 k1 / n) Σ_j1 e(j1 k1 / n1) x[j]`.
fn split(b: &mut Builder, x: &Value, n1: usize, n2: usize, sign: f64) -> Result<Value> {
    let (m, c, n) = (x.shape()[0], channels(x), n1 * n2);
    let (d1, d2, two) = (Dim::from(n1), Dim::from(n2), Dim::from(2));
    let x = b.reshape(x, [m, d1, d2, Dim::from(c)])?;
    let x = b.permute(&x, &[0, 2, 1, 3])?;
    let x = b.reshape(&x, [m.mul(d2), d1, Dim::from(c)])?;
    let y = any(b, &x, n1, sign)?;
    let y = b.reshape(&y, [m, d2, d1, two])?;
    let twist = (0..n2).flat_map(|j2| (0..n1).map(move |k1| (j2 * k1) as u64));
    let twist: Vec<Complex> = twist.map(|r| conj(root(r, n as u64), sign)).collect();
    let y = multiply(b, &y, &[n2, n1], &twist)?;
    let y = b.permute(&y, &[0, 2, 1, 3])?;
    let y = b.reshape(&y, [m.mul(d1), d2, two])?;
    let z = any(b, &y, n2, sign)?;
    let z = b.reshape(&z, [m, d1, d2, two])?;
    let z = b.permute(&z, &[0, 2, 1, 3])?;
    b.reshape(&z, [m, Dim::from(n), two])
}

/// Complex product `x * t`. `dims` are the sizes of `t`, which is broadcast to `x` without its last axis. The
/// product is `x * re(t)`, plus `x` with its two parts swapped times `(-im(t), im(t))`. A real `x` becomes
/// complex.
fn multiply(b: &mut Builder, x: &Value, dims: &[usize], t: &[Complex]) -> Result<Value> {
    let full = [dims, &[2]].concat();
    if channels(x) == 1 {
        let t = table(x.dtype(), &full, t.iter().flat_map(|t| [t.0, t.1]))?;
        return b.scalar(S::Mul, &[x, &t]);
    }
    let mut r: Vec<Range> =
        x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
    if let Some(last) = r.last_mut() {
        (last.start, last.step) = (Dim::from(1), -1);
    }
    let swapped = b.slice(x, &r)?;
    let re = table(x.dtype(), &full, t.iter().flat_map(|t| [t.0, t.0]))?;
    let im = table(x.dtype(), &full, t.iter().flat_map(|t| [-t.1, t.1]))?;
    let (p, q) = (b.scalar(S::Mul, &[x, &re])?, b.scalar(S::Mul, &[&swapped, &im])?);
    b.scalar(S::Add, &[&p, &q])
}

/// Transforms `n` points. With `e(t) = exp(±2πi t)` and `w[j] = e(j² / 2n)`: `X[k] = w[k] Σ_j (x[j] w[j]) /
/// w[k - j]`.
fn chirp(b: &mut Builder, x: &Value, n: usize, sign: f64) -> Result<Value> {
    let len = (2 * n - 1).next_power_of_two();
    let w: Vec<Complex> =
        (0..n as u64).map(|j| conj(root(j * j % (2 * n as u64), 2 * n as u64), sign)).collect();
    let mut filter = vec![(0.0, 0.0); len];
    for (j, &w) in w.iter().enumerate() {
        filter[j] = conj(w, -1.0);
        filter[(len - j) % len] = conj(w, -1.0);
    }
    radix2(&mut filter);
    filter.iter_mut().for_each(|f| *f = (f.0 / len as f64, f.1 / len as f64));

    let a = multiply(b, x, &[n], &w)?;
    let id = b.id(&a)?;
    let id = b.g.pad(id, &[0; 3], &[0, len - n, 0], 0.0)?;
    let a = b.value(id);
    let a = any(b, &a, len, -1.0)?;
    let a = multiply(b, &a, &[len], &filter)?;
    let a = any(b, &a, len, 1.0)?;
    let a = b.narrow(&a, 1, Dim::from(0), Dim::from(n))?;
    multiply(b, &a, &[n], &w)
}

/// In-place forward transform of a power-of-two length, for computing tables.
fn radix2(v: &mut [Complex]) {
    let n = v.len();
    if n < 2 {
        return;
    }
    let bits = n.trailing_zeros();
    for i in 0..n {
        let j = i.reverse_bits() >> (usize::BITS - bits);
        if i < j {
            v.swap(i, j);
        }
    }
    let mut size = 2;
    while size <= n {
        let w: Vec<Complex> = (0..size / 2).map(|k| conj(root(k as u64, size as u64), -1.0)).collect();
        for part in v.chunks_exact_mut(size) {
            let (lo, hi) = part.split_at_mut(size / 2);
            for ((a, b), w) in lo.iter_mut().zip(hi).zip(&w) {
                let t = times(*b, *w);
                (*a, *b) = ((a.0 + t.0, a.1 + t.1), (a.0 - t.0, a.1 - t.1));
            }
        }
        size *= 2;
    }
}

/// The angle of point `i` of a window of `n` points, `2π i / n`.
pub(super) fn angle(i: usize, n: usize) -> f64 {
    2.0 * PI * i as f64 / n as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::reference;
    use halcyon_ir::ConstData;

    fn signal(n: usize) -> Vec<f64> {
        (0..n as u64).map(|i| (i.wrapping_mul(2_654_435_761) % 1000) as f64 / 500.0 - 1.0).collect()
    }

    fn run(x: ConstData, f: impl FnOnce(&mut Builder, &Value) -> Result<Value>) -> Vec<f64> {
        let mut b = Builder::default();
        let ty = halcyon_ir::TensorType::new(x.dtype, &x.dims);
        let id = b.g.input("x", ty);
        let v = b.value(id);
        let y = f(&mut b, &v).unwrap();
        let y = b.id(&y).unwrap();
        b.g.output("y", y);
        b.g.check().unwrap();
        reference::run(&b.g, &[x]).remove(0).to_vec()
    }

    /// The transform by its definition.
    fn plain(x: &[Complex], sign: f64) -> Vec<Complex> {
        let n = x.len() as u64;
        let at = |k: u64| {
            x.iter().enumerate().fold((0.0, 0.0), |s: Complex, (j, &x)| {
                let t = times(x, conj(root(j as u64 * k, n), sign));
                (s.0 + t.0, s.1 + t.1)
            })
        };
        (0..n).map(at).collect()
    }

    fn close(got: &[f64], want: &[f64], eps: f64, what: &str) {
        assert_eq!(got.len(), want.len(), "{what}");
        let size = want.iter().map(|v| v * v).sum::<f64>().sqrt().max(1.0);
        let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(off <= eps * size, "{what}: off by {off} of {size}");
    }

    #[test]
    fn lengths_of_every_kind() {
        // Lengths that are direct (with halves, if complex and even), split once, prime, and a multiple of a
        // long prime.
        for n in [1, 2, 3, 10, 16, 255, 258, 263, 300, 526] {
            for c in [1, 2] {
                let v = signal(n * c);
                let x: Vec<Complex> = v.chunks(c).map(|p| (p[0], p.get(1).copied().unwrap_or(0.0))).collect();
                let data = ConstData::from_slice(&[1, n, c], &v).unwrap();
                let got = run(data.clone(), |b, x| transform(b, x, n, n, Sign::Forward));
                let want: Vec<f64> = plain(&x, -1.0).iter().flat_map(|p| [p.0, p.1]).collect();
                close(&got, &want, 1e-12, &format!("{n} of {c}"));
                let keep = n / 2 + 1;
                let got = run(data.clone(), |b, x| transform(b, x, n, keep, Sign::Forward));
                close(&got, &want[..2 * keep], 1e-12, &format!("half of {n}"));
                let got = run(data, |b, x| transform(b, x, n, n, Sign::Inverse));
                let want: Vec<f64> =
                    plain(&x, 1.0).iter().flat_map(|p| [p.0 / n as f64, p.1 / n as f64]).collect();
                close(&got, &want, 1e-12, &format!("inverse of {n}"));
            }
        }
    }

    #[test]
    fn real_signals_come_back() {
        for n in [1, 2, 3, 10, 255, 300, 301] {
            let v = signal(n);
            let data = ConstData::from_slice(&[1, n, 1], &v).unwrap();
            let back = run(data, |b, x| {
                let y = transform(b, x, n, n / 2 + 1, Sign::Forward)?;
                inverse_real(b, &y, n)
            });
            close(&back, &v, 1e-12, &n.to_string());
        }
    }

    #[test]
    fn narrow_types_lose_little() {
        for n in [256, 768, 263] {
            let v = signal(n);
            let x: Vec<Complex> = v.iter().map(|&v| (v as f32 as f64, 0.0)).collect();
            let v: Vec<f32> = v.iter().map(|&v| v as f32).collect();
            let data = ConstData::from_slice(&[1, n, 1], &v).unwrap();
            let got = run(data, |b, x| transform(b, x, n, n, Sign::Forward));
            let want: Vec<f64> = plain(&x, -1.0).iter().flat_map(|p| [p.0, p.1]).collect();
            close(&got, &want, 5e-7, &n.to_string());
        }
    }

    #[test]
    fn batches_stay_apart_and_costs_stay_low() {
        let n = 4096;
        let v: Vec<f32> = (0..2 * n).map(|i| (i >= n) as u8 as f32).collect();
        let data = ConstData::from_slice(&[2, n, 1], &v).unwrap();
        let y = run(data, |b, x| {
            let y = transform(b, x, n, 2, Sign::Forward)?;
            let held: usize =
                b.g.nodes()
                    .iter()
                    .filter_map(|n| match &n.op {
                        halcyon_ir::Op::Const(c) => Some(c.numel()),
                        _ => None,
                    })
                    .sum();
            assert!(held < 16 * n, "{held} table entries");
            Ok(y)
        });
        close(&y, &[0.0, 0.0, 0.0, 0.0, n as f64, 0.0, 0.0, 0.0], 1e-6, "batch");
    }

    #[test]
    fn impossible_lengths() {
        let mut b = Builder::default();
        let x = b.full(DType::F32, &[1usize, 1, 1].into(), Scalar::F(0.0));
        assert!(matches!(transform(&mut b, &x, 0, 0, Sign::Forward), Err(Error::Argument { .. })));
        let far = MAX_LENGTH + 1;
        assert!(matches!(transform(&mut b, &x, far, 1, Sign::Forward), Err(Error::Unsupported { .. })));
        assert!(matches!(inverse_real(&mut b, &x, usize::MAX), Err(Error::Unsupported { .. })));
    }
}

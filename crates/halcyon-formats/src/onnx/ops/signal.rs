//! Fourier transforms, windows and the mel filter bank.

use super::fft::{self, MAX_LENGTH, Sign, angle};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

const WINDOW: &[&str] = &["output_datatype", "periodic"];

pub(super) const ROWS: &[Row] = &[
    row("BlackmanWindow", 17, WINDOW, |b, c| window(b, c, &[0.42, -0.5, 0.08])),
    row("DFT", 17, &["axis", "inverse", "onesided"], dft),
    row("HammingWindow", 17, WINDOW, |b, c| window(b, c, &[25.0 / 46.0, -21.0 / 46.0])),
    row("HannWindow", 17, WINDOW, |b, c| window(b, c, &[0.5, -0.5])),
    row("MelWeightMatrix", 17, &["output_datatype"], mel_weight_matrix),
    row("STFT", 17, &["onesided"], stft),
];

fn size(c: &Call<'_>, v: i64, what: &str) -> Result<usize> {
    usize::try_from(v).map_err(|_| c.invalid(format!("{what} is {v}, but must not be negative")))
}

fn known(c: &Call<'_>, d: Dim) -> Result<usize> {
    d.known().ok_or_else(|| c.unsupported(&format!("the symbolic length {d}"), "Give concrete input shapes"))
}

/// Number of channels of a signal: 1 if real, 2 if complex.
fn channels(c: &Call<'_>, x: &Value) -> Result<usize> {
    match x.shape().last().and_then(|d| d.known()) {
        Some(n @ (1 | 2)) if x.rank() >= 2 && x.dtype().is_float() => Ok(n),
        _ => Err(c.invalid(format!("the signal is {}, expected floats with a last axis of 1 or 2", x.ty))),
    }
}

/// The discrete Fourier transform. The axis is an attribute before opset version 20, and an operand from then
/// on. `dft_length` crops the signal or pads it with zeros.
fn dft(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let parts = channels(c, x)?;
    let axis = match (c.opset >= 20, c.opt(2)) {
        (true, Some(v)) => b.known_scalar(v, "the axis of DFT")?.as_i64(),
        (true, None) => -2,
        (false, _) => c.int("axis", 1)?,
    };
    let axis = c.axis(axis, x.rank())?;
    let last = x.rank() - 1;
    if axis == last {
        return Err(c.invalid("the axis must not be the last, which has the real and imaginary parts"));
    }
    let (inverse, onesided) = (c.flag("inverse", false)?, c.flag("onesided", false)?);
    let have = known(c, x.shape()[axis])?;
    let n = match c.opt(1) {
        Some(v) => size(c, b.known_scalar(v, "dft_length")?.as_i64(), "dft_length")?,
        None if inverse && onesided => 2 * have.saturating_sub(1),
        None => have,
    };
    if n == 0 {
        return Err(c.invalid("the transform has 0 points, expected at least 1"));
    }
    if n > MAX_LENGTH {
        return Err(c.unsupported(
            &format!("a transform of {n} points"),
            &format!("At most {MAX_LENGTH} points are transformed"),
        ));
    }
    let need = if inverse && onesided { n / 2 + 1 } else { n };

    // Permutes to [m, n, parts].
    let mut perm: Vec<usize> = (0..last).filter(|&k| k != axis).collect();
    perm.extend([axis, last]);
    let moved = b.permute(x, &perm)?;
    let lead = Shape::from(&moved.shape()[..last - 1]);
    let y = b.reshape(&moved, [lead.numel(), Dim::from(have), Dim::from(parts)])?;
    let y = fit(b, &y, have, need)?;
    let to = y.dtype();
    let y = b.cast(&y, to.compute())?;
    let y = match (inverse, onesided) {
        (true, true) => fft::inverse_real(b, &y, n)?,
        (true, false) => fft::transform(b, &y, n, n, Sign::Inverse)?,
        (false, half) => fft::transform(b, &y, n, if half { n / 2 + 1 } else { n }, Sign::Forward)?,
    };
    let y = b.cast(&y, to)?;
    let full: Shape = lead.iter().chain(&y.shape()[1..]).copied().collect();
    let y = b.reshape(&y, full)?;
    let mut back = vec![0; perm.len()];
    perm.iter().enumerate().for_each(|(i, &p)| back[p] = i);
    one(b.permute(&y, &back)?)
}

/// Crops axis 1 of `[m, have, parts]` or pads it with zeros to `n`.
fn fit(b: &mut Builder, x: &Value, have: usize, n: usize) -> Result<Value> {
    if n <= have {
        return b.narrow(x, 1, Dim::from(0), Dim::from(n));
    }
    let id = b.id(x)?;
    let id = b.g.pad(id, &[0; 3], &[0, n - have, 0], 0.0)?;
    Ok(b.value(id))
}

/// The short-time Fourier transform. Splits the signal `[batch, length, parts]` into frames, multiplies each
/// frame by the window and transforms it. The result is `[batch, frames, bins, 2]`.
fn stft(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let parts = channels(c, x)?;
    if x.rank() != 3 {
        return Err(c.invalid(format!("the signal is {}, expected [batch, length, 1 or 2]", x.ty)));
    }
    let total = known(c, x.shape()[1])?;
    let step = size(c, b.known_scalar(c.arg(1)?, "frame_step of STFT")?.as_i64(), "frame_step")?;
    let window = c.opt(2);
    let given = match window {
        Some(w) if w.rank() == 1 && w.dtype() == x.dtype() => Some(known(c, w.shape()[0])?),
        Some(w) => {
            return Err(c.invalid(format!("the window is {}, expected a vector of the signal's dtype", w.ty)));
        }
        None => None,
    };
    let n = match c.opt(3) {
        Some(v) => size(c, b.known_scalar(v, "frame_length of STFT")?.as_i64(), "frame_length")?,
        None => given.unwrap_or(total),
    };
    if given.is_some_and(|w| w != n) {
        return Err(c.invalid(format!("the window has {} elements, a frame has {n}", given.unwrap_or(0))));
    }
    if n == 0 || n > total || step == 0 {
        return Err(c.invalid(format!(
            "frame_length is {n}, expected 1 to {total} (the length of the signal); frame_step is {step}, \
             expected at least 1"
        )));
    }
    let frames = (total - n) / step + 1;
    let (batch, dims) = (x.shape()[0], |d: usize| Dim::from(d));

    let to = x.dtype();
    let x = b.cast(x, to.compute())?;
    let start = b.iota(DType::I64, dims(frames))?;
    let by = b.lit(&start, step);
    let start = b.scalar(S::Mul, &[&start, &by])?;
    let start = b.reshape(&start, [frames, 1])?;
    let within = b.iota(DType::I64, dims(n))?;
    let index = b.scalar(S::Add, &[&start, &within])?;
    let mut y = b.gather(&x, &index, 1)?;
    if let Some(w) = window {
        let w = b.cast(w, y.dtype())?;
        let w = b.reshape(&w, [n, 1])?;
        y = b.scalar(S::Mul, &[&y, &w])?;
    }
    let y = b.reshape(&y, [batch.mul(dims(frames)), dims(n), dims(parts)])?;
    let bins = if c.flag("onesided", true)? { n / 2 + 1 } else { n };
    let y = fft::transform(b, &y, n, bins, Sign::Forward)?;
    let y = b.reshape(&y, [batch, dims(frames), dims(bins), dims(2)])?;
    one(b.cast(&y, to)?)
}

/// Limits the number of elements of a table, because tables are computed during import.
fn countable(c: &Call<'_>, n: Option<usize>) -> Result<usize> {
    n.filter(|n| *n <= 4 * MAX_LENGTH).ok_or_else(|| {
        c.unsupported("a table of this size", &format!("A table has at most {} elements", 4 * MAX_LENGTH))
    })
}

fn output(c: &Call<'_>, dims: &[usize], v: Vec<f64>) -> Result<Vec<Value>> {
    let to = c.dtype("output_datatype")?.unwrap_or(DType::F32);
    one(Value::table(crate::data::from_scalars(to, dims, v.into_iter().map(Scalar::F))?))
}

/// A window of the form `sum over k of coefficients[k] * cos(k * angle)`.
fn window(b: &mut Builder, c: &Call<'_>, coefficients: &[f64]) -> Result<Vec<Value>> {
    let n = size(c, b.known_scalar(c.arg(0)?, "the size of a window")?.as_i64(), "the size")?;
    let n = countable(c, Some(n))?;
    let period = if c.flag("periodic", true)? { n } else { n.saturating_sub(1) };
    let at = |i: usize| {
        // The only point of a symmetric window of size 1 is its middle, which has the angle pi.
        let a = if period == 0 { angle(1, 2) } else { angle(i, period) };
        coefficients.iter().enumerate().map(|(k, w)| w * (k as f64 * a).cos()).sum()
    };
    output(c, &[n], (0..n).map(at).collect())
}

fn mel_weight_matrix(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let mut int =
        |i: usize, what: &str| -> Result<usize> { size(c, b.known_scalar(c.arg(i)?, what)?.as_i64(), what) };
    let (bins, length) = (int(0, "num_mel_bins")?, int(1, "dft_length")?);
    let rate = int(2, "sample_rate")?;
    let mut edge = |i: usize, what: &str| Ok(b.known_scalar(c.arg(i)?, what)?.as_f64());
    let (low, high) = (edge(3, "lower_edge_hertz")?, edge(4, "upper_edge_hertz")?);
    let rows = length / 2 + 1;
    let n = countable(c, rows.checked_mul(bins))?;
    let bad = || c.invalid(format!("bands of {low} to {high} Hz are not in the spectrum at rate {rate}"));
    if !(low > -700.0 && high >= low && high.is_finite()) || rate == 0 {
        return Err(bad());
    }
    // mel(f) = 2595 log10(1 + f / 700). The band edges divide the range from mel(low) to mel(high) into
    // bins + 2 equal parts. Band k starts at edge k, has its peak at edge k + 1 and ends at edge k + 2, so
    // the last band ends one part below `high`.
    let mel = |f: f64| 2595.0 * (f / 700.0).ln_1p() / std::f64::consts::LN_10;
    let hertz = |m: f64| 700.0 * (m / 2595.0 * std::f64::consts::LN_10).exp_m1();
    let step = (mel(high) - mel(low)) / (bins as f64 + 2.0);
    let place = |k: usize| -> Result<usize> {
        let p = ((length + 1) as f64 * hertz(mel(low) + step * k as f64) / rate as f64).floor();
        if (0.0..rows as f64).contains(&p) { Ok(p as usize) } else { Err(bad()) }
    };
    let mut out = vec![0.0; n];
    for k in 0..bins {
        let (left, middle, right) = (place(k)?, place(k + 1)?, place(k + 2)?);
        let (rise, fall) = ((middle - left) as f64, (right - middle) as f64);
        for j in left..middle {
            out[j * bins + k] = (j - left) as f64 / rise;
        }
        for j in middle + 1..right {
            out[j * bins + k] = (right - j) as f64 / fall;
        }
        out[middle * bins + k] = 1.0;
    }
    output(c, &[rows, bins], out)
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType, Error};

    #[test]
    fn dft_by_version_axis_and_length() {
        let x = t(&[1, 2, 4, 1], &[1f32, 2.0, 3.0, 4.0, 0.0, 1.0, 0.0, 0.0]);
        let rows = [10.0, 0.0, -2.0, 2.0, -2.0, 0.0, -2.0, -2.0, 1.0, 0.0, 0.0, -1.0, -1.0, 0.0, 0.0, 1.0];
        let op = || node("DFT", &["x"], &["y"]);
        check(17, op().int("axis", 2), &x, &[], &[1, 2, 4, 2], &rows);
        check(20, op(), &x, &[], &[1, 2, 4, 2], &rows);
        let columns = [1.0, 0.0, 3.0, 0.0, 3.0, 0.0, 4.0, 0.0, 1.0, 0.0, 1.0, 0.0, 3.0, 0.0, 4.0, 0.0];
        check(17, op(), &x, &[], &[1, 2, 4, 2], &columns);
        let w = [ints(&[4]), t(&[], &[-3i64])];
        check(20, node("DFT", &["x", "", "w1"], &["y"]), &x, &w, &[1, 2, 4, 2], &columns);
        // Cropped to two points; then padded to three points with half of the spectrum as the result.
        let w = [t(&[], &[2i32])];
        let cropped = [3.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0, 0.0];
        check(20, node("DFT", &["x", "w0"], &["y"]), &x, &w, &[1, 2, 2, 2], &cropped);
        let one = t(&[1, 1, 1], &[2f32]);
        let w = [t(&[], &[3i64])];
        let padded = [2.0, 0.0, 2.0, 0.0];
        let half = node("DFT", &["x", "w0"], &["y"]).int("onesided", 1);
        check(20, half, &one, &w, &[1, 2, 2], &padded);
        let spectrum = t(&[3, 2], &[10f32, 0.0, -2.0, 2.0, -2.0, 0.0]);
        let back = op().int("onesided", 1).int("inverse", 1);
        check(20, back, &spectrum, &[], &[4, 1], &[1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn dft_rejects_wrong_operands() {
        let fails = |n, dims: &[&str], w: &[ConstData]| {
            let w: Vec<(&str, ConstData)> = ["w0", "w1"].into_iter().zip(w.iter().cloned()).collect();
            import(model(20, port("x", DType::F32, dims), vec![n], &w)).unwrap_err()
        };
        let op = |inputs: &[&str]| node("DFT", inputs, &["y"]);
        let axis = [ints(&[1]), t(&[], &[-1i64])];
        assert!(matches!(fails(op(&["x", "", "w1"]), &["2", "4", "1"], &axis), Error::Argument { .. }));
        assert!(matches!(fails(op(&["x"]), &["2", "4", "3"], &[]), Error::Argument { .. }));
        assert!(matches!(fails(op(&["x"]), &["2"], &[]), Error::Argument { .. }));
        assert!(matches!(fails(op(&["x"]), &["0", "1"], &[]), Error::Argument { .. }));
        assert!(matches!(fails(op(&["x"]), &["n", "1"], &[]), Error::Unsupported { .. }));
        for n in [0, -1, i64::MAX] {
            let e = fails(op(&["x", "w0"]), &["4", "1"], &[t(&[], &[n])]);
            assert_eq!(matches!(e, Error::Unsupported { .. }), n > 0, "{n}");
        }
    }

    #[test]
    fn stft_of_a_tone() {
        // A cosine of period 4 in frames of 4 with step 2 has all of its energy in bin 1.
        let v: Vec<f32> = (0..8).map(|i| [1.0, 0.0, -1.0, 0.0][i % 4]).collect();
        let x = t(&[1, 8, 1], &v);
        let want =
            [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0];
        let w = [t(&[], &[2i64]), t(&[4], &[1f32; 4]), t(&[], &[4i64])];
        let op = |inputs: &[&str]| node("STFT", inputs, &["y"]);
        check(17, op(&["x", "w0", "w1"]), &x, &w, &[1, 3, 3, 2], &want);
        check(17, op(&["x", "w0", "", "w2"]), &x, &w, &[1, 3, 3, 2], &want);
        let all = run_one(17, op(&["x", "w0", "w1", "w2"]).int("onesided", 0), &x, &w);
        assert_eq!(all.dims[..], [1, 3, 4, 2]);
        for (step, n) in [(0i64, 4i64), (2, 9), (2, -1), (2, 0)] {
            let w = [("w0", t(&[], &[step])), ("w1", t(&[], &[n]))];
            let m = model(17, port("x", DType::F32, &["1", "8", "1"]), vec![op(&["x", "w0", "", "w1"])], &w);
            assert!(matches!(import(m), Err(Error::Argument { .. })), "{step} {n}");
        }
    }

    #[test]
    fn windows_and_bands() {
        let n = t(&[], &[4i64]);
        // The value of the size must be known during import, so the test gives it as a weight.
        let run = |name: &str, periodic: i64, n: &ConstData| {
            let op = node(name, &["w0"], &["y"]).int("periodic", periodic).int("output_datatype", 11);
            run_one(17, op, &t(&[1], &[0f32]), std::slice::from_ref(n)).to_vec::<f64>()
        };
        let near = |a: &[f64], b: &[f64]| {
            assert!(a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-15), "{a:?} {b:?}")
        };
        near(&run("HannWindow", 1, &n), &[0.0, 0.5, 1.0, 0.5]);
        near(&run("HannWindow", 0, &n), &[0.0, 0.75, 0.75, 0.0]);
        near(&run("BlackmanWindow", 1, &n), &[0.0, 0.34, 1.0, 0.34]);
        near(&run("HammingWindow", 1, &n), &[4.0 / 46.0, 25.0 / 46.0, 1.0, 25.0 / 46.0]);
        near(&run("HannWindow", 0, &t(&[1], &[1i32])), &[1.0]);
        near(&run("HannWindow", 1, &t(&[1], &[0i32])), &[]);
        let huge = [("w0", t(&[], &[i64::MAX]))];
        let op = || node("HannWindow", &["w0"], &["y"]);
        let m = model(17, port("x", DType::F32, &["1"]), vec![op()], &huge);
        assert!(matches!(import(m), Err(Error::Unsupported { .. })));

        let mel = |v: [i64; 3], edges: [f32; 2]| {
            let names = ["w0", "w1", "w2", "w3", "w4"];
            let mut w: Vec<(&str, ConstData)> = names.into_iter().zip(v.map(|v| t(&[], &[v]))).collect();
            w.extend(names[3..].iter().copied().zip(edges.map(|e| t(&[], &[e]))));
            import(model(
                17,
                port("x", DType::F32, &["1"]),
                vec![node("MelWeightMatrix", &names, &["y"])],
                &w,
            ))
        };
        assert!(mel([8, 16, 8192], [0.0, 4096.0]).is_ok());
        for (v, e) in [
            ([8, 16, 0], [0.0, 4096.0]),
            ([8, 16, 8192], [0.0, 40960.0]),
            ([8, 16, 8192], [-10.0, 4096.0]),
            ([8, 16, 8192], [f32::NAN, 4096.0]),
            ([-1, 16, 8192], [0.0, 4096.0]),
        ] {
            assert!(matches!(mel(v, e), Err(Error::Argument { .. })), "{v:?} {e:?}");
        }
        assert!(matches!(mel([1 << 40, 1 << 40, 8192], [0.0, 1.0]), Err(Error::Unsupported { .. })));
    }
}

//! Tensor values as text.

use super::Tensor;
use halcyon_ir::{ConstData, DType, Scalar};
use std::fmt;

/// Above this number of elements, only the ends of each long axis are shown.
const MAX_FULL: usize = 1000;
/// Number of elements shown at each end of an axis.
const EDGE_ELEMENTS: usize = 3;
/// Maximum line width in columns.
const WIDTH: usize = 80;

/// The format of the elements of a tensor. All elements have the same format, so that columns are aligned.
struct Style {
    dtype: DType,
    digits: usize,
    /// Every finite element is a whole number, and no precision was given.
    whole: bool,
    /// Elements are written with an exponent.
    scientific: bool,
}

impl Style {
    fn of(dtype: DType, shown: &[Scalar], digits: Option<usize>) -> Style {
        let finite: Vec<f64> = shown.iter().map(|v| v.as_f64().abs()).filter(|v| v.is_finite()).collect();
        let whole = digits.is_none() && finite.iter().all(|v| v.fract() == 0.0);
        let most = finite.iter().copied().fold(0f64, f64::max);
        let least = finite.iter().copied().filter(|v| *v > 0.0).fold(f64::INFINITY, f64::min);
        let scientific = most >= 1e8 || least < 1e-4 || most / least > 1e3 && !whole;
        Style { dtype, digits: digits.unwrap_or(4), whole, scientific: scientific && most > 0.0 }
    }

    fn text(&self, v: Scalar) -> String {
        if !self.dtype.is_float() {
            return match v {
                Scalar::Bool(b) => b.to_string(),
                Scalar::I(i) => i.to_string(),
                Scalar::U(u) => u.to_string(),
                Scalar::F(f) => f.to_string(),
            };
        }
        let v = v.as_f64();
        let digits = self.digits;
        match v {
            v if v.is_nan() => "nan".into(),
            v if v.is_infinite() => if v > 0.0 { "inf" } else { "-inf" }.into(),
            v if self.scientific => format!("{v:.digits$e}"),
            v if self.whole => format!("{v:.0}."),
            v => format!("{v:.digits$}"),
        }
    }
}

/// The positions along an axis that are shown; `None` marks the gap.
fn places(n: usize, all: bool) -> Vec<Option<usize>> {
    if all || n <= 2 * EDGE_ELEMENTS {
        return (0..n).map(Some).collect();
    }
    (0..EDGE_ELEMENTS).map(Some).chain([None]).chain((n - EDGE_ELEMENTS..n).map(Some)).collect()
}

struct Writer<'a> {
    dims: &'a [usize],
    all: bool,
    /// Texts of the shown elements, in row-major order.
    texts: std::vec::IntoIter<String>,
    width: usize,
}

impl Writer<'_> {
    fn write(&mut self, f: &mut fmt::Formatter<'_>, axis: usize) -> fmt::Result {
        if axis == self.dims.len() {
            return write!(f, "{}", self.texts.next().unwrap_or_default().trim_start());
        }
        let last = axis + 1 == self.dims.len();
        f.write_str("[")?;
        let mut column = axis + 1;
        for (k, place) in places(self.dims[axis], self.all).into_iter().enumerate() {
            if k > 0 {
                if last && column + 2 + self.width <= WIDTH {
                    f.write_str(", ")?;
                    column += 2;
                } else {
                    let empty = if last { 1 } else { self.dims.len() - axis - 1 };
                    write!(f, ",{}{}", "\n".repeat(empty), " ".repeat(axis + 1))?;
                    column = axis + 1;
                }
            }
            match (place, last) {
                (None, _) => f.write_str("...")?,
                (Some(_), true) => {
                    let text = self.texts.next().unwrap_or_default();
                    write!(f, "{text:>width$}", width = self.width)?;
                }
                (Some(_), false) => self.write(f, axis + 1)?,
            }
            column += self.width;
        }
        f.write_str("]")
    }
}

/// The elements to show, in row-major order.
fn shown(data: &ConstData, all: bool) -> Vec<Scalar> {
    let mut at = vec![0usize];
    for n in &data.dims {
        let kept: Vec<usize> = places(*n, all).into_iter().flatten().collect();
        at = at.iter().flat_map(|base| kept.iter().map(move |k| base * n + k)).collect();
    }
    at.into_iter().filter_map(|i| data.get(i)).collect()
}

/// Writes the values as NumPy and PyTorch do, with dtype, sizes and device on the line below. Evaluates the
/// tensor if needed. Above 1,000 elements, only the first three and the last three of each axis are shown. A
/// precision (`{:.2}`) sets the number of digits after the decimal point of floats. If the tensor has no
/// value, the error is written instead of the values.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let data = match self.to_data() {
            Ok(d) => d,
            Err(e) => return write!(f, "<no value: {e}>"),
        };
        let all = data.numel() <= MAX_FULL;
        let elements = shown(&data, all);
        let style = Style::of(data.dtype, &elements, f.precision());
        let texts: Vec<String> = elements.into_iter().map(|v| style.text(v)).collect();
        let width = texts.iter().map(String::len).max().unwrap_or(0);
        Writer { dims: &data.dims, all, texts: texts.into_iter(), width }.write(f, 0)?;
        let sizes: Vec<String> = data.dims.iter().map(usize::to_string).collect();
        write!(f, "\n{}[{}] on {}", data.dtype, sizes.join(", "), self.backend().id())
    }
}

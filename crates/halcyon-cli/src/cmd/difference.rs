//! How two values of a model differ, and whether they agree within tolerances.

use crate::report::number;
use halcyon::{ConstData, DType};
use halcyon_formats::onnx::{Datum, Keys};
use serde_json::{Value, json};

/// Floats agree if `|got - want| <= atol + rtol * |want|`. NaN and infinities agree with themselves. Other
/// types must be equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tolerance {
    pub rtol: f64,
    pub atol: f64,
    /// Smallest relative tolerance for f16.
    pub rtol_f16: f64,
}

/// Smallest relative tolerance for bf16, two units in the last place, as in the ONNX project's own test
/// runner. The expected values of the ONNX suite come from NumPy, which rounds to bf16 after every addition
/// of a sum.
const RTOL_BF16: f64 = 1.0 / 64.0;

impl Tolerance {
    fn relative(&self, d: DType) -> f64 {
        match d {
            DType::BF16 => self.rtol.max(RTOL_BF16),
            DType::F16 => self.rtol.max(self.rtol_f16),
            _ => self.rtol,
        }
    }
}

/// The figures of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Difference {
    /// Set if the values cannot be compared one by one, because their types or shapes differ.
    pub kind: Option<String>,
    pub values: usize,
    /// Values outside of the tolerance.
    pub outside: usize,
    pub max_abs: f64,
    /// The largest difference relative to an expected value other than 0.
    pub max_rel: f64,
    /// The largest difference as a share of what the tolerance allows.
    pub of_tolerance: f64,
    /// The value that is farthest outside of the tolerance.
    worst: Option<Worst>,
}

#[derive(Clone, Debug, PartialEq)]
struct Worst {
    /// The part of a sequence or map, with a colon.
    part: String,
    at: usize,
    share: f64,
    got: String,
    want: String,
}

impl Difference {
    pub(super) fn between(got: &Datum, want: &Datum, t: &Tolerance) -> Difference {
        let mut d = Difference::default();
        d.add("", got, want, t);
        d
    }

    /// The difference of values of which only types and shapes are comparable.
    pub(super) fn of_types(got: &Datum, want: &Datum) -> Difference {
        let (got, want) = (got.describe(), want.describe());
        Difference { kind: (got != want).then(|| format!("{got}, expected {want}")), ..Difference::default() }
    }

    pub(super) fn agrees(&self) -> bool {
        self.kind.is_none() && self.outside == 0
    }

    /// What differs; `None` if nothing is outside of the tolerance.
    pub(super) fn text(&self) -> Option<String> {
        if let Some(k) = &self.kind {
            return Some(k.clone());
        }
        let w = self.worst.as_ref()?;
        Some(format!(
            "{} of {} values differ, the most at {}[{}]: {}, expected {}",
            self.outside, self.values, w.part, w.at, w.got, w.want
        ))
    }

    /// JSON has no infinities, so they are strings.
    pub(super) fn json(&self) -> Value {
        let finite = |v: f64| if v.is_finite() { json!(v) } else { json!("Infinity") };
        json!({
            "agrees": self.agrees(),
            "values": self.values,
            "outside": self.outside,
            "max_abs": finite(self.max_abs),
            "max_rel": finite(self.max_rel),
            "of_tolerance": finite(self.of_tolerance),
            "what": self.text(),
        })
    }

    fn add(&mut self, part: &str, got: &Datum, want: &Datum, t: &Tolerance) {
        match (got, want) {
            // ONNX Runtime returns an optional that has a value as the value.
            (Datum::Optional(Some(g)), w) => self.add(part, g, w, t),
            (g, Datum::Optional(Some(w))) => self.add(part, g, w, t),
            (Datum::Optional(None), Datum::Optional(None)) => {}
            (Datum::Tensor(g), Datum::Tensor(w)) if g.dtype == w.dtype && g.dims == w.dims => {
                self.tensor(part, g, w, t)
            }
            (Datum::Sequence(g), Datum::Sequence(w)) if g.len() == w.len() => {
                for (i, (g, w)) in g.iter().zip(w).enumerate() {
                    self.add(&format!("{part}element {i}: "), g, w, t);
                }
            }
            (Datum::Map(a, g), Datum::Map(b, w)) => match same_keys(a, b) {
                Some(order) => match reordered(w, &order) {
                    Some(w) => self.add(part, g, &w, t),
                    None => self.mismatch(part, got, want),
                },
                None => self.mismatch(part, got, want),
            },
            (Datum::Text(g), Datum::Text(w)) if g.dims == w.dims => {
                self.values += w.vals.len();
                for (i, (g, w)) in g.vals.iter().zip(&w.vals).enumerate().filter(|(_, (g, w))| g != w) {
                    self.outside(part, i, f64::INFINITY, || (format!("{g:?}"), format!("{w:?}")));
                }
            }
            _ => self.mismatch(part, got, want),
        }
    }

    fn mismatch(&mut self, part: &str, got: &Datum, want: &Datum) {
        let text = || format!("{part}{}, expected {}", got.describe(), want.describe());
        self.kind.get_or_insert_with(text);
    }

    fn tensor(&mut self, part: &str, got: &ConstData, want: &ConstData, t: &Tolerance) {
        self.values += want.numel();
        let (float, rtol) = (got.dtype.is_float(), t.relative(got.dtype));
        for (i, (g, w)) in got.scalars().zip(want.scalars()).enumerate() {
            // Integers are compared exactly, because f64 cannot represent all 64-bit integers.
            if g == w {
                continue;
            }
            let (a, b) = (g.as_f64(), w.as_f64());
            if float && (a == b || a.is_nan() && b.is_nan()) {
                continue;
            }
            let by = match (a - b).abs() {
                by if by.is_nan() => f64::INFINITY,
                by => by,
            };
            let share = match float && b.is_finite() {
                true => by / (t.atol + rtol * b.abs()),
                false => f64::INFINITY,
            };
            // 0 / 0 cannot be: equal values were left out above.
            self.max_abs = self.max_abs.max(by);
            if b != 0.0 && b.is_finite() {
                self.max_rel = self.max_rel.max(by / b.abs());
            }
            self.of_tolerance = self.of_tolerance.max(share);
            if share > 1.0 {
                self.outside(part, i, share, || (number(a), number(b)));
            }
        }
    }

    fn outside(&mut self, part: &str, at: usize, share: f64, shown: impl FnOnce() -> (String, String)) {
        self.outside += 1;
        self.of_tolerance = self.of_tolerance.max(share);
        if self.worst.as_ref().is_none_or(|w| share > w.share) {
            let (got, want) = shown();
            self.worst = Some(Worst { part: part.into(), at, share, got, want });
        }
    }
}

/// The positions in `b` of the keys of `a`, if both have the same keys. The order of a map has no meaning.
fn same_keys(a: &Keys, b: &Keys) -> Option<Vec<usize>> {
    fn find<K: PartialEq>(a: &[K], b: &[K]) -> Option<Vec<usize>> {
        let all = a.iter().map(|k| b.iter().position(|x| x == k)).collect::<Option<Vec<_>>>()?;
        (a.len() == b.len()).then_some(all)
    }
    match (a, b) {
        (Keys::Ints(a), Keys::Ints(b)) => find(a, b),
        (Keys::Texts(a), Keys::Texts(b)) => find(a, b),
        _ => None,
    }
}

/// The values of a map in another order.
fn reordered(values: &Datum, order: &[usize]) -> Option<Datum> {
    let t = values.tensor()?;
    let values = order.iter().map(|i| t.get(*i)).collect::<Option<Vec<_>>>()?;
    ConstData::from_scalars(t.dtype, &[order.len()], values).ok().map(Datum::Tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Tolerance = Tolerance { rtol: 1e-3, atol: 1e-7, rtol_f16: 0.0 };

    fn of(got: ConstData, want: ConstData) -> Difference {
        Difference::between(&got.into(), &want.into(), &T)
    }

    fn f(v: &[f32]) -> ConstData {
        ConstData::from_slice(&[v.len()], v).unwrap()
    }

    #[test]
    fn comparison_is_exact_where_it_must_be() {
        let i = |v: &[i64]| ConstData::from_slice(&[v.len()], v).unwrap();
        assert!(of(f(&[1.0, f32::NAN, f32::INFINITY]), f(&[1.0009, f32::NAN, f32::INFINITY])).agrees());
        assert!(!of(f(&[1.0]), f(&[1.0021])).agrees());
        assert!(!of(f(&[1e30]), f(&[f32::INFINITY])).agrees());
        assert!(!of(f(&[f32::NAN]), f(&[1.0])).agrees());
        assert!(!of(f(&[1.0]), f(&[f32::NAN])).agrees());
        // These differ by one but are equal as f64.
        let big = (1i64 << 60) + 1;
        assert!(!of(i(&[big]), i(&[big - 1])).agrees());
        assert!(of(i(&[1]), f(&[1.0])).text().unwrap().contains("expected f32[1]"));
        assert!(!of(f(&[1.0]), f(&[])).agrees());
        // bf16 numbers near 1 are 1/128 apart.
        let h = |v: f64| ConstData::splat(DType::BF16, &[1], v.into()).unwrap();
        assert!(of(h(1.0 + 2.0 / 128.0), h(1.0)).agrees());
        assert!(!of(h(1.0 + 3.0 / 128.0), h(1.0)).agrees());
    }

    #[test]
    fn the_figures_are_the_largest() {
        let d = of(f(&[1.0, 2.0, 0.5, 8.0]), f(&[1.0, 2.001, 0.0, 8.0]));
        assert_eq!((d.values, d.outside), (4, 1));
        assert!((d.max_abs - 0.5).abs() < 1e-9 && (d.max_rel - 0.001 / 2.001).abs() < 1e-6, "{d:?}");
        assert!(d.of_tolerance > 1e6, "{d:?}");
        assert_eq!(d.text().unwrap(), "1 of 4 values differ, the most at [2]: 0.5, expected 0");
        let same = of(f(&[1.0]), f(&[1.0]));
        assert_eq!((same.of_tolerance, same.text()), (0.0, None));
    }

    #[test]
    fn maps_are_compared_by_key_and_optionals_by_value() {
        let map = |keys: &[i64], v: &[f32]| Datum::Map(Keys::Ints(keys.into()), Box::new(f(v).into()));
        let between = |a: &Datum, b: &Datum| Difference::between(a, b, &T);
        assert!(between(&map(&[1, 2], &[0.25, 0.75]), &map(&[2, 1], &[0.75, 0.25])).agrees());
        assert!(!between(&map(&[1, 2], &[0.25, 0.75]), &map(&[2, 1], &[0.25, 0.75])).agrees());
        assert!(!between(&map(&[1, 2], &[0.25, 0.75]), &map(&[1, 3], &[0.25, 0.75])).agrees());
        let some = Datum::Optional(Some(Box::new(f(&[1.0]).into())));
        assert!(between(&some, &f(&[1.0]).into()).agrees());
        assert!(!between(&Datum::Optional(None), &f(&[1.0]).into()).agrees());
        let two = |a: f32, b: f32| Datum::Sequence(vec![f(&[a]).into(), f(&[b]).into()]);
        let d = between(&two(1.0, 2.0), &two(1.0, 3.0));
        assert!(d.text().unwrap().contains("at element 1: [0]: 2, expected 3"), "{d:?}");
    }
}

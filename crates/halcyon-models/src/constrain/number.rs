//! Numbers of JSON between two bounds.

use super::grammar::Expr;

/// Digits before the point unless a bound has more: all such integers are exact in f64.
const DIGITS: u32 = 15;

/// Digits after the last one that a bound determines.
const MORE: usize = 6;

/// The largest integer without bounds.
const LARGE: i128 = 10i128.pow(DIGITS) - 1;

fn digits(low: u8, high: u8) -> Expr {
    match low <= high {
        true => Expr::Chars(vec![((b'0' + low).into(), (b'0' + high).into())]),
        false => Expr::never(),
    }
}

fn any_digits(least: usize, most: usize) -> Expr {
    digits(0, 9).repeat(least, Some(most))
}

fn number_of(text: &[u8]) -> Vec<u8> {
    text.iter().map(|d| d - b'0').collect()
}

/// Integers from `low` to `high`, both included; `None` is no bound.
pub(super) fn integer(low: Option<i128>, high: Option<i128>) -> Expr {
    let wide = |v: i128| v.unsigned_abs().saturating_mul(10).min(i128::MAX as u128) as i128;
    let low = low.unwrap_or_else(|| -high.map_or(LARGE, |h| wide(h).max(LARGE)));
    let high = high.unwrap_or_else(|| wide(low).max(LARGE));
    let mut out = vec![];
    if low < 0 && low <= high {
        let from = high.min(-1).saturating_neg();
        out.push(Expr::Seq(vec![Expr::text("-"), natural(from, low.saturating_neg())]));
    }
    if high >= 0 {
        out.push(natural(low.max(0), high));
    }
    Expr::Any(out)
}

/// Integers from `low` to `high`, without sign.
fn natural(low: i128, high: i128) -> Expr {
    if low > high {
        return Expr::never();
    }
    let (short, long) = (low.to_string(), high.to_string());
    let mut out = vec![];
    for length in short.len()..=long.len() {
        let a = if length == short.len() { short.clone() } else { format!("1{}", "0".repeat(length - 1)) };
        let b = if length == long.len() { long.clone() } else { "9".repeat(length) };
        out.push(same_length(&number_of(a.as_bytes()), &number_of(b.as_bytes())));
    }
    Expr::Any(out)
}

fn same_length(low: &[u8], high: &[u8]) -> Expr {
    if low.iter().all(|d| *d == 0) && high.iter().all(|d| *d == 9) {
        return any_digits(low.len(), low.len());
    }
    let ([l, low @ ..], [h, high @ ..]) = (low, high) else { return Expr::empty() };
    if l == h {
        return Expr::Seq(vec![digits(*l, *l), same_length(low, high)]);
    }
    let any = || any_digits(low.len(), low.len());
    let nines = vec![9; low.len()];
    let zeros = vec![0; low.len()];
    Expr::Any(vec![
        Expr::Seq(vec![digits(*l, *l), same_length(low, &nines)]),
        Expr::Seq(vec![digits(l + 1, h - 1), any()]),
        Expr::Seq(vec![digits(*h, *h), same_length(&zeros, high)]),
    ])
}

/// An end of a range.
#[derive(Clone, Debug)]
pub(super) struct Bound {
    negative: bool,
    whole: i128,
    /// Digits after the point, without zeros at the end.
    fraction: Vec<u8>,
    included: bool,
}

impl Bound {
    /// `None` for a number that is too large for a bound.
    pub(super) fn new(v: f64, included: bool) -> Option<Bound> {
        let text = format!("{}", v.abs());
        let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
        let whole = whole.parse().ok().filter(|w| *w <= 10i128.pow(18))?;
        Some(Bound { negative: v < 0.0, whole, fraction: number_of(fraction.as_bytes()), included })
    }

    fn zero(included: bool) -> Bound {
        Bound { negative: false, whole: 0, fraction: vec![], included }
    }

    fn rest(&self) -> Bound {
        Bound { fraction: self.fraction.get(1..).unwrap_or(&[]).to_vec(), ..self.clone() }
    }
}

/// Numbers between two bounds; `None` is no bound. Without bounds there may be an exponent.
pub(super) fn number(low: Option<&Bound>, high: Option<&Bound>) -> Expr {
    if low.is_none() && high.is_none() {
        let whole = natural(0, LARGE);
        let exponent = Expr::Seq(vec![
            Expr::Chars(vec![('E', 'E'), ('e', 'e')]),
            Expr::Chars(vec![('+', '+'), ('-', '-')]).optional(),
            any_digits(1, 2),
        ]);
        return Expr::Seq(vec![Expr::text("-").optional(), whole, any_fraction(), exponent.optional()]);
    }
    let mut out = vec![];
    let end = |b: Option<&Bound>, negative: bool| b.filter(|b| b.negative == negative).cloned();
    let below = |b: Option<&Bound>| b.is_some_and(|b| b.negative);
    // Negative numbers: the bounds of their size change places, and zero is not one of them.
    if low.is_none() || below(low) {
        let smallest = end(high, true).unwrap_or_else(|| Bound::zero(false));
        out.push(Expr::Seq(vec![Expr::text("-"), positive(&smallest, end(low, true).as_ref())]));
    }
    if !below(high) {
        let smallest = end(low, false).unwrap_or_else(|| Bound::zero(true));
        out.push(positive(&smallest, end(high, false).as_ref()));
    }
    Expr::Any(out)
}

fn positive(low: &Bound, high: Option<&Bound>) -> Expr {
    let Some(high) = high else {
        let last = (low.whole * 10).max(LARGE);
        return Expr::Any(vec![
            Expr::Seq(vec![Expr::text(&low.whole.to_string()), at_least(low)]),
            Expr::Seq(vec![natural(low.whole + 1, last), any_fraction()]),
        ]);
    };
    if low.whole == high.whole {
        let mut ends = vec![Expr::Seq(vec![Expr::text("."), between(low, high, true)])];
        if low.fraction.is_empty() && low.included && (!high.fraction.is_empty() || high.included) {
            ends.push(Expr::empty());
        }
        return Expr::Seq(vec![Expr::text(&low.whole.to_string()), Expr::Any(ends)]);
    }
    if low.whole > high.whole {
        return Expr::never();
    }
    Expr::Any(vec![
        Expr::Seq(vec![Expr::text(&low.whole.to_string()), at_least(low)]),
        Expr::Seq(vec![natural(low.whole + 1, high.whole - 1), any_fraction()]),
        Expr::Seq(vec![Expr::text(&high.whole.to_string()), at_most(high)]),
    ])
}

/// No fraction, or any.
fn any_fraction() -> Expr {
    Expr::Seq(vec![Expr::text("."), any_digits(1, DIGITS as usize)]).optional()
}

/// No fraction or one of at least that of the bound.
fn at_least(b: &Bound) -> Expr {
    match b.fraction.is_empty() && b.included {
        true => any_fraction(),
        false => Expr::Seq(vec![Expr::text("."), digits_from(b)]),
    }
}

/// The digits of a fraction of at least the bound's.
fn digits_from(b: &Bound) -> Expr {
    match b.fraction.first() {
        None if b.included => any_digits(0, MORE),
        None => Expr::Seq(vec![Expr::text("0").repeat(0, Some(MORE)), digits(1, 9), any_digits(0, MORE)]),
        Some(d) => Expr::Any(vec![
            if *d < 9 { Expr::Seq(vec![digits(d + 1, 9), any_digits(0, MORE)]) } else { Expr::never() },
            Expr::Seq(vec![digits(*d, *d), digits_from(&b.rest())]),
        ]),
    }
}

/// No fraction or one of at most that of the bound.
fn at_most(b: &Bound) -> Expr {
    match b.fraction.is_empty() {
        true if b.included => Expr::text(".0").optional(),
        true => Expr::never(),
        false => Expr::Seq(vec![Expr::text("."), digits_to(b)]).optional(),
    }
}

/// The digits of a fraction of at most the bound's, which has digits left.
fn digits_to(b: &Bound) -> Expr {
    let d = b.fraction.first().copied().unwrap_or(0);
    let rest = b.rest();
    let end = match rest.fraction.is_empty() {
        true if b.included => Expr::text("0").repeat(0, Some(MORE)),
        true => Expr::never(),
        // A fraction that ends here is smaller than the bound.
        false => digits_to(&rest).optional(),
    };
    let less = if d > 0 { Expr::Seq(vec![digits(0, d - 1), any_digits(0, MORE)]) } else { Expr::never() };
    Expr::Any(vec![less, Expr::Seq(vec![digits(d, d), end])])
}

/// The digits of a fraction between both bounds. The first digit must be there.
fn between(low: &Bound, high: &Bound, first: bool) -> Expr {
    let mut out = vec![];
    let open = low.fraction.is_empty() && low.included;
    let Some(h) = high.fraction.first().copied() else {
        return match open && high.included {
            true => Expr::text("0").repeat(usize::from(first), Some(MORE)),
            false => Expr::never(),
        };
    };
    if open && !first {
        out.push(Expr::empty());
    }
    let l = low.fraction.first().copied().unwrap_or(0);
    let digit = |d: u8, rest: Expr| Expr::Seq(vec![digits(d, d), rest]);
    if l == h {
        out.push(digit(l, between(&low.rest(), &high.rest(), false)));
    } else if l < h {
        out.push(digit(l, digits_from(&low.rest())));
        if l + 1 < h {
            out.push(Expr::Seq(vec![digits(l + 1, h - 1), any_digits(0, MORE)]));
        }
        let rest = high.rest();
        out.push(digit(
            h,
            match rest.fraction.is_empty() {
                true if high.included => Expr::text("0").repeat(0, Some(MORE)),
                true => Expr::never(),
                false => digits_to(&rest).optional(),
            },
        ));
    }
    Expr::Any(out)
}

#[cfg(test)]
mod tests {
    use super::super::grammar::Grammar;
    use super::super::parser::Parser;
    use super::*;
    use halcyon_test::Rng;
    use std::sync::Arc;

    fn matches(p: &mut Parser, text: &str) -> bool {
        let end = text.bytes().try_fold(0, |row, b| p.advance(row, b).unwrap());
        end.is_some_and(|r| p.accepting(r))
    }

    fn parser(e: Expr) -> Option<Parser> {
        Grammar::new(&[e], 0).ok().map(|g| Parser::new(Arc::new(g)).unwrap())
    }

    #[test]
    fn integers_are_within_their_bounds() {
        let bounds = [None, Some(-1234), Some(-10), Some(-1), Some(0), Some(7), Some(99), Some(1005)];
        for low in bounds {
            for high in bounds {
                let mut p = parser(integer(low, high));
                for v in (-1300..1300)
                    .step_by(13)
                    .chain([-1235, -1234, -11, -10, -9, -1, 0, 1, 6, 7, 99, 1005, 1006, 100_000])
                {
                    let want = low.is_none_or(|l| v >= l) && high.is_none_or(|h| v <= h);
                    let got = p.as_mut().is_some_and(|p| matches(p, &v.to_string()));
                    assert_eq!(got, want, "{v} in {low:?} {high:?}");
                }
                for bad in ["-0", "00", "01", "-", "", "1.0", "+1"] {
                    assert!(!p.as_mut().is_some_and(|p| matches(p, bad)), "{bad}");
                }
            }
        }
        let large = i128::from(i64::MAX);
        assert!(matches(&mut parser(integer(Some(large), None)).unwrap(), &large.to_string()));
    }

    #[test]
    fn numbers_are_within_their_bounds() {
        let values = [-2.5, -1.0, 0.0, 0.3, 0.35, 1.0, 99.999];
        let mut rng = Rng::new(3);
        for low in values.map(Some).into_iter().chain([None]) {
            for high in values.map(Some).into_iter().chain([None]) {
                for (left, right) in [(true, true), (false, true), (true, false), (false, false)] {
                    let bound = |v: Option<f64>, inc| v.and_then(|v| Bound::new(v, inc));
                    let mut p = parser(number(bound(low, left).as_ref(), bound(high, right).as_ref()));
                    let random = (0..8).map(|_| f64::from(rng.f32s(1)[0] * 4.0));
                    let random: Vec<f64> = random.map(|v| (v * 1000.0).round() / 1000.0).collect();
                    for v in values.iter().copied().chain(random) {
                        let v = if v == 0.0 { 0.0 } else { v };
                        let want = low.is_none_or(|l| if left { v >= l } else { v > l })
                            && high.is_none_or(|h| if right { v <= h } else { v < h });
                        let got = p.as_mut().is_some_and(|p| matches(p, &v.to_string()));
                        assert_eq!(got, want, "{v} in {low:?} {left} {high:?} {right}");
                    }
                    for bad in ["0.", ".5", "-", "", "01", "-.5", "1e", "--1"] {
                        assert!(!p.as_mut().is_some_and(|p| matches(p, bad)), "{bad}");
                    }
                }
            }
        }
        let mut any = parser(number(None, None)).unwrap();
        assert!(["0", "-1.5e-7", "12E+3"].iter().all(|t| matches(&mut any, t)));
    }
}

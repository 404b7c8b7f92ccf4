//! Elementary functions with AVX-512's scaling instruction (`scalef`), for ops where it halves the work of
//! the forms in [`super::vmath`].

use halcyon_ir::{ScalarOp, polynomials};
use std::arch::x86_64::*;

/// Writes `op` of each element of `a` to `d`, over the shorter length. Returns false and writes nothing if
/// this module has no form of the op.
///
/// # Safety
/// The processor has AVX-512F.
pub(super) unsafe fn apply(op: ScalarOp, d: &mut [f32], a: &[f32]) -> bool {
    let n = d.len().min(a.len());
    let (a, d) = (a.as_ptr(), d.as_mut_ptr());
    // SAFETY: `apply` requires AVX-512F; both slices have at least `n` elements.
    unsafe {
        match op {
            ScalarOp::Silu => logistic::<true>(n, a, d),
            ScalarOp::Sigmoid => logistic::<false>(n, a, d),
            ScalarOp::Gelu => gelu(n, a, d),
            ScalarOp::Exp => exp_minus(n, a, 0.0, d),
            _ => return false,
        }
    }
    true
}

/// `x / (1 + e^-x)`, or `1 / (1 + e^-x)`. Computed as `x 2^k / (2^k + e^-r)` with `x = k ln 2 + r`, so that
/// nothing overflows and results just above the denormal range keep their precision. The error is below 3
/// ulp.
///
/// # Safety
/// The processor has AVX-512F; `a` and `d` are valid for `n` floats.
#[target_feature(enable = "avx512f")]
unsafe fn logistic<const TIMES_X: bool>(n: usize, a: *const f32, d: *mut f32) {
    // Whole vectors are stored without a mask, because the results are soon read again and the processor does
    // not forward masked stores to loads.
    let whole = n / 16 * 16;
    let mut i = 0;
    while i < whole {
        // SAFETY: accesses elements `i..i + 16`, which lie below `whole <= n`.
        unsafe { _mm512_storeu_ps(d.add(i), logistic_16::<TIMES_X>(_mm512_loadu_ps(a.add(i)))) };
        i += 16;
    }
    if i < n {
        let m: __mmask16 = (1 << (n - i)) - 1;
        // SAFETY: the mask limits both accesses to the `n - i` elements below `n`.
        unsafe {
            let x = _mm512_maskz_loadu_ps(m, a.add(i));
            _mm512_mask_storeu_ps(d.add(i), m, logistic_16::<TIMES_X>(x));
        }
    }
}

/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn logistic_16<const TIMES_X: bool>(x: __m512) -> __m512 {
    let v = |f: f32| _mm512_set1_ps(f);
    // Above 20.8, e^-x is less than half an ulp of 1; below -150 every result is 0. In this operand order,
    // min and max return NaN if x is NaN.
    let c = _mm512_max_ps(v(-150.0), _mm512_min_ps(v(20.8), x));
    let k = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(c, v(std::f32::consts::LOG2_E)));
    // ln 2 in two parts. The first has so few bits that its product with k is exact (Cody and Waite).
    let r = _mm512_fnmadd_ps(k, v(0.693_359_4), c);
    let r = _mm512_fnmadd_ps(k, v(-2.121_944_4e-4), r);
    // e^-r for |r| <= ln 2 / 2: its series up to the seventh power.
    let mut p = v(-1.0 / 5040.0);
    for q in [1.0 / 720.0, -1.0 / 120.0, 1.0 / 24.0, -1.0 / 6.0, 0.5, -1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, v(q));
    }
    let one = v(1.0);
    // 1 / (2^k + e^-r) to about 1 ulp: an estimate and one Newton step. The divisor is a normal number.
    let den = _mm512_add_ps(_mm512_scalef_ps(one, k), p);
    let y = _mm512_rcp14_ps(den);
    let y = _mm512_fmadd_ps(y, _mm512_fnmadd_ps(den, y, one), y);
    if TIMES_X {
        let y = _mm512_scalef_ps(_mm512_mul_ps(x, y), k);
        // For x = -inf the result is NaN: x is infinite and sigmoid(x) is 0.
        let low = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, v(f32::NEG_INFINITY));
        _mm512_mask_mov_ps(y, low, v(f32::NAN))
    } else {
        _mm512_scalef_ps(y, k)
    }
}

/// ln 2 in two parts. The first has so few bits that its product with k is exact (Cody and Waite).
const LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// Evaluates the polynomial with coefficients `c`, lowest first, by Horner's rule.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn poly<const N: usize>(x: __m512, c: [f32; N]) -> __m512 {
    let mut r = _mm512_set1_ps(c[N - 1]);
    for i in (0..N - 1).rev() {
        r = _mm512_fmadd_ps(r, x, _mm512_set1_ps(c[i]));
    }
    r
}

/// e^(x + d) as `(k, m)` with the value `m 2^k`, for small `d`.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp_parts(x: __m512, d: __m512) -> (__m512, __m512) {
    let v = |f: f32| _mm512_set1_ps(f);
    let k = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(x, v(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(k, v(LN2[1]), _mm512_fnmadd_ps(k, v(LN2[0]), x));
    let r = _mm512_add_ps(r, d);
    let e = _mm512_fmadd_ps(_mm512_mul_ps(r, r), poly(r, polynomials::EXP), r);
    (k, _mm512_add_ps(e, v(1.0)))
}

/// e^x. The error is below 1.5 ulp.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp_16(x: __m512) -> __m512 {
    // In this operand order, min and max return NaN if x is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(-150.0), _mm512_min_ps(_mm512_set1_ps(150.0), x));
    let (k, m) = exp_parts(x, _mm512_setzero_ps());
    _mm512_scalef_ps(m, k)
}

/// `d = e^(a - m)`. The difference is rounded first. Compared with the exponential of this rounded
/// difference, the error is below 1.5 ulp.
///
/// # Safety
/// The processor has AVX-512F; `a` and `d` are valid for `n` floats.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn exp_minus(n: usize, a: *const f32, m: f32, d: *mut f32) {
    let (m, whole) = (_mm512_set1_ps(m), n / 16 * 16);
    let mut i = 0;
    while i < whole {
        // SAFETY: accesses elements `i..i + 16`, which lie below `whole <= n`.
        unsafe { _mm512_storeu_ps(d.add(i), exp_16(_mm512_sub_ps(_mm512_loadu_ps(a.add(i)), m))) };
        i += 16;
    }
    if i < n {
        let part: __mmask16 = (1 << (n - i)) - 1;
        // SAFETY: the mask limits both accesses to the `n - i` elements below `n`.
        unsafe {
            let x = _mm512_maskz_loadu_ps(part, a.add(i));
            _mm512_mask_storeu_ps(d.add(i), part, exp_16(_mm512_sub_ps(x, m)));
        }
    }
}

/// `x Phi(x)` over a slice, where Phi is the distribution function of the normal distribution. The error is
/// below 12 ulp for normal results.
///
/// # Safety
/// The processor has AVX-512F; `a` and `d` are valid for `n` floats.
#[target_feature(enable = "avx512f")]
unsafe fn gelu(n: usize, a: *const f32, d: *mut f32) {
    let whole = n / 16 * 16;
    let mut i = 0;
    while i < whole {
        // SAFETY: accesses elements `i..i + 16`, which lie below `whole <= n`.
        unsafe { _mm512_storeu_ps(d.add(i), gelu_16(_mm512_loadu_ps(a.add(i)))) };
        i += 16;
    }
    if i < n {
        let m: __mmask16 = (1 << (n - i)) - 1;
        // SAFETY: the mask limits both accesses to the `n - i` elements below `n`.
        unsafe { _mm512_mask_storeu_ps(d.add(i), m, gelu_16(_mm512_maskz_loadu_ps(m, a.add(i)))) };
    }
}

/// The formula of [`super::vmath::gelu`]: `erfc(a)` is `exp(-a²) / (1 + 2 a)` times a polynomial in
/// `(a - 2) / (a + 2)`.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn gelu_16(x: __m512) -> __m512 {
    let v = |f: f32| _mm512_set1_ps(f);
    let one = v(1.0);
    // For |x| above 16 the tail Phi(-|x|) is zero. In this operand order, min returns NaN if x is NaN.
    let b = _mm512_min_ps(v(16.0), _mm512_abs_ps(x));
    let a = _mm512_mul_ps(b, v(std::f32::consts::FRAC_1_SQRT_2));
    // Reciprocal of a normal number: an estimate and one Newton step.
    let over = |y: __m512| {
        let r = _mm512_rcp14_ps(y);
        _mm512_fmadd_ps(r, _mm512_fnmadd_ps(y, r, one), r)
    };
    // 1 / (a + 2) and 1 / (1 + 2 a) from the reciprocal of their product.
    let (far, near) = (_mm512_add_ps(a, v(2.0)), _mm512_fmadd_ps(v(2.0), a, one));
    let r = over(_mm512_mul_ps(far, near));
    let t = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(a, v(2.0)), near), r);
    let p = poly(t, polynomials::ERFC);
    // exp(-b²/2) from the rounded square and its rounding error.
    let c = _mm512_mul_ps(b, v(-0.5));
    let s = _mm512_mul_ps(c, b);
    let (k, m) = exp_parts(s, _mm512_fmsub_ps(c, b, s));
    let half = _mm512_mul_ps(_mm512_mul_ps(v(0.5), p), _mm512_mul_ps(far, r));
    // |x| times the tail. The scaling by 2^k is last, because it may make the product denormal.
    let y = beyond(x, _mm512_scalef_ps(_mm512_mul_ps(b, _mm512_mul_ps(half, m)), k));
    // For x = -inf the result is NaN: x is infinite and Phi(x) is 0.
    let low = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, v(f32::NEG_INFINITY));
    _mm512_mask_mov_ps(y, low, v(f32::NAN))
}

/// `max(x, 0) - tail`, which equals `x Phi(x)` if `tail` is `|x| Phi(-|x|)`. The result for -0 is -0.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn beyond(x: __m512, tail: __m512) -> __m512 {
    _mm512_sub_ps(_mm512_max_ps(_mm512_setzero_ps(), x), tail)
}

/// [`gelu`] to about 12 bits, for results that are rounded to bf16. The relative error is below 2e-4; results
/// nearer to zero than 1e-37 may become -0.
///
/// # Safety
/// The processor has AVX-512F; `a` and `d` are valid for `n` floats.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn gelu_low(n: usize, a: *const f32, d: *mut f32) {
    let whole = n / 16 * 16;
    let mut i = 0;
    while i < whole {
        // SAFETY: accesses elements `i..i + 16`, which lie below `whole <= n`.
        unsafe { _mm512_storeu_ps(d.add(i), gelu_low_16(_mm512_loadu_ps(a.add(i)))) };
        i += 16;
    }
    if i < n {
        let m: __mmask16 = (1 << (n - i)) - 1;
        // SAFETY: the mask limits both accesses to the `n - i` elements below `n`.
        unsafe { _mm512_mask_storeu_ps(d.add(i), m, gelu_low_16(_mm512_maskz_loadu_ps(m, a.add(i)))) };
    }
}

/// The form of [`gelu_16`] with shorter polynomials (least-squares fits of the relative error) and without
/// the Newton step.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
fn gelu_low_16(x: __m512) -> __m512 {
    let v = |f: f32| _mm512_set1_ps(f);
    let b = _mm512_min_ps(v(16.0), _mm512_abs_ps(x));
    let a = _mm512_mul_ps(b, v(std::f32::consts::FRAC_1_SQRT_2));
    let (far, near) = (_mm512_add_ps(a, v(2.0)), _mm512_fmadd_ps(v(2.0), a, v(1.0)));
    let r = _mm512_rcp14_ps(_mm512_mul_ps(far, near));
    let t = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(a, v(2.0)), near), r);
    let p =
        poly(t, [1.277_027, -9.314_76e-2, -1.673_391_5e-1, 1.670_464_9e-1, -4.799_187e-2, -1.214_674_7e-2]);
    // 2^y with y = -b²/2 log2 e.
    let y = _mm512_mul_ps(_mm512_mul_ps(b, v(-0.5 * std::f32::consts::LOG2_E)), b);
    let k = _mm512_roundscale_ps::<0x08>(y);
    let m = poly(_mm512_sub_ps(y, k), [9.9992806e-01, 6.9326096e-01, 2.4261113e-01, 5.5171611e-02]);
    let half = _mm512_mul_ps(_mm512_mul_ps(v(0.5), p), _mm512_mul_ps(far, r));
    let y = beyond(x, _mm512_scalef_ps(_mm512_mul_ps(b, _mm512_mul_ps(half, m)), k));
    let low = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, v(f32::NEG_INFINITY));
    _mm512_mask_mov_ps(y, low, v(f32::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vmath::tests::gelu_ref;

    /// Largest error over normal results, in units of the last place of the f32 result.
    fn worst(op: ScalarOp, xs: &[f32]) -> f64 {
        worst_of(op, xs, |x| op.row().float.unwrap()(x, 0.0, 0.0))
    }

    /// [`apply`], for tests that have detected AVX-512F.
    fn applied(op: ScalarOp, d: &mut [f32], a: &[f32]) -> bool {
        assert!(is_x86_feature_detected!("avx512f"));
        // SAFETY: AVX-512F was detected above.
        unsafe { apply(op, d, a) }
    }

    fn worst_of(op: ScalarOp, xs: &[f32], f: impl Fn(f64) -> f64) -> f64 {
        let mut y = vec![f32::NAN; xs.len()];
        assert!(applied(op, &mut y, xs));
        xs.iter()
            .zip(&y)
            .map(|(x, y)| {
                let want = f(*x as f64);
                let w = want as f32;
                if !w.is_normal() {
                    return if (*y as f64 - want).abs() <= f32::MIN_POSITIVE as f64 {
                        0.0
                    } else {
                        f64::INFINITY
                    };
                }
                let ulp = (f32::from_bits(w.to_bits() + 1) - w).abs() as f64;
                (*y as f64 - want).abs() / ulp
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn logistic_forms_hold_their_bounds_everywhere() {
        if !is_x86_feature_detected!("avx512f") {
            println!("skipped: no AVX-512");
            return;
        }
        let xs: Vec<f32> = (-1_600_003..1_600_003).map(|i| i as f32 * 6.25e-5).collect();
        let e = worst(ScalarOp::Silu, &xs);
        assert!(e < 3.0, "silu: {e} ulp");
        let e = worst(ScalarOp::Sigmoid, &xs);
        assert!(e < 3.0, "sigmoid: {e} ulp");
        for n in [0, 1, 15, 16, 17, 33] {
            let mut y = vec![7.0; n + 1];
            assert!(applied(ScalarOp::Silu, &mut y[..n], &vec![1.0; n]));
            assert!(y[..n].iter().all(|v| (v - 0.731_058_6).abs() < 1e-6) && y[n] == 7.0);
        }
        let mut y = [0.0; 4];
        applied(ScalarOp::Silu, &mut y, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0]);
        assert!(
            y[0] == f32::INFINITY && y[1].is_nan() && y[2].is_nan() && y[3].to_bits() == (-0f32).to_bits(),
            "{y:?}"
        );
        let mut y = [0.0; 4];
        applied(ScalarOp::Sigmoid, &mut y, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0]);
        assert!(y[0] == 1.0 && y[1] == 0.0 && y[2].is_nan() && y[3] == 0.5, "{y:?}");
    }

    #[test]
    fn exponential_and_gelu_hold_their_bounds_everywhere() {
        if !is_x86_feature_detected!("avx512f") {
            println!("skipped: no AVX-512");
            return;
        }
        let xs: Vec<f32> = (-1_600_003..1_600_003).map(|i| i as f32 * 6.25e-5).collect();
        let e = worst(ScalarOp::Exp, &xs[..xs.len() - 190_000]);
        assert!(e < 1.5, "exp: {e} ulp");
        let xs: Vec<f32> = (-400_003..400_003).map(|i| i as f32 * 3.25e-5).collect();
        let e = worst_of(ScalarOp::Gelu, &xs, gelu_ref);
        assert!(e < 12.0, "gelu: {e} ulp");
        let mut y = vec![f32::NAN; xs.len()];
        // SAFETY: AVX-512F was detected above; both vectors have `xs.len()` floats.
        unsafe { gelu_low(xs.len(), xs.as_ptr(), y.as_mut_ptr()) };
        for (x, y) in xs.iter().zip(&y) {
            let want = gelu_ref(f64::from(*x));
            assert!((f64::from(*y) - want).abs() <= 2e-4 * want.abs() + 1e-37, "gelu of {x}: {y}, {want}");
        }
        let mut y = [0.0; 5];
        let edges = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0, 1e30];
        // SAFETY: AVX-512F was detected above; both arrays have 5 floats.
        unsafe { gelu_low(5, edges.as_ptr(), y.as_mut_ptr()) };
        assert!(y[0] == f32::INFINITY && y[1].is_nan() && y[2].is_nan() && y[4] == 1e30, "{y:?}");
        assert_eq!(y[3].to_bits(), (-0f32).to_bits());
        for n in [0, 1, 15, 16, 17, 33] {
            for (op, want) in [(ScalarOp::Exp, std::f32::consts::E), (ScalarOp::Gelu, 0.841_344_8)] {
                let mut y = vec![7.0; n + 1];
                assert!(applied(op, &mut y[..n], &vec![1.0; n]));
                assert!(y[..n].iter().all(|v| (v - want).abs() < 1e-6) && y[n] == 7.0);
            }
        }
        let special = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0, 89.0, -104.0, 1e30, -1e30];
        let mut y = [0.0; 8];
        applied(ScalarOp::Exp, &mut y, &special);
        assert!(y[0] == f32::INFINITY && y[1] == 0.0 && y[2].is_nan() && y[3] == 1.0, "{y:?}");
        assert!(y[4] == f32::INFINITY && y[5] == 0.0 && y[6] == f32::INFINITY && y[7] == 0.0, "{y:?}");
        applied(ScalarOp::Gelu, &mut y, &special);
        assert!(y[0] == f32::INFINITY && y[1].is_nan() && y[2].is_nan(), "{y:?}");
        assert!(y[3].to_bits() == (-0f32).to_bits() && y[4] == 89.0 && y[5] == 0.0, "{y:?}");
        assert!(y[6] == 1e30 && y[7] == 0.0, "{y:?}");
    }
}

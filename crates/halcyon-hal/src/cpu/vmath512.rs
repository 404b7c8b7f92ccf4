//! Elementary functions with AVX-512's own scaling instruction, where it saves half of the work of [`super::vmath`]'s forms.

use halcyon_ir::ScalarOp;
use std::arch::x86_64::*;

/// `op` over a slice, where there is a form of it here; says whether there was.
pub(super) fn apply(op: ScalarOp, d: &mut [f32], a: &[f32]) -> bool {
    let n = d.len().min(a.len());
    match op {
        // SAFETY: the caller chose AVX-512 because the processor has it; both slices hold `n` elements.
        ScalarOp::Silu => unsafe { logistic::<true>(n, a.as_ptr(), d.as_mut_ptr()) },
        // SAFETY: as above.
        ScalarOp::Sigmoid => unsafe { logistic::<false>(n, a.as_ptr(), d.as_mut_ptr()) },
        _ => return false,
    }
    true
}

/// `x / (1 + e^-x)`, or `1 / (1 + e^-x)`. Written as `x / (2^k + e^-r) 2^k` with `x = k ln 2 + r`, so that nothing overflows and
/// a result only just above the denormals keeps its precision. Under 3 ulp.
///
/// # Safety
/// The processor has AVX-512F, and both pointers are good for `n` floats.
#[target_feature(enable = "avx512f")]
unsafe fn logistic<const TIMES_X: bool>(n: usize, a: *const f32, d: *mut f32) {
    // Whole vectors without a mask: what is stored is read again at once, and a masked store is not forwarded.
    let whole = n / 16 * 16;
    let mut i = 0;
    while i < whole {
        // SAFETY: elements below `n`.
        unsafe { _mm512_storeu_ps(d.add(i), logistic_16::<TIMES_X>(_mm512_loadu_ps(a.add(i)))) };
        i += 16;
    }
    if i < n {
        let m: __mmask16 = (1 << (n - i)) - 1;
        // SAFETY: masked to elements below `n`.
        unsafe {
            let x = _mm512_maskz_loadu_ps(m, a.add(i));
            _mm512_mask_storeu_ps(d.add(i), m, logistic_16::<TIMES_X>(x));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn logistic_16<const TIMES_X: bool>(x: __m512) -> __m512 {
    let v = |f: f32| _mm512_set1_ps(f);
    // Above 20.8, e^-x is under half an ulp of 1. Below -150 every result is 0. The operand order lets NaN through.
    let c = _mm512_max_ps(v(-150.0), _mm512_min_ps(v(20.8), x));
    let k = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(c, v(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first with few enough bits for an exact product (Cody and Waite).
    let r = _mm512_fnmadd_ps(k, v(0.693_359_4), c);
    let r = _mm512_fnmadd_ps(k, v(-2.121_944_4e-4), r);
    // e^-r on |r| <= ln 2 / 2: its series to the seventh power.
    let mut p = v(-1.0 / 5040.0);
    for q in [1.0 / 720.0, -1.0 / 120.0, 1.0 / 24.0, -1.0 / 6.0, 0.5, -1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, v(q));
    }
    let one = v(1.0);
    // 1 / (2^k + e^-r) to the last place or so: the estimate and one step of Newton's. The divisor is a normal number.
    let den = _mm512_add_ps(_mm512_scalef_ps(one, k), p);
    let y = _mm512_rcp14_ps(den);
    let y = _mm512_fmadd_ps(y, _mm512_fnmadd_ps(den, y, one), y);
    if TIMES_X {
        let y = _mm512_scalef_ps(_mm512_mul_ps(x, y), k);
        // -inf times sigmoid(-inf) = -inf times 0.
        let low = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, v(f32::NEG_INFINITY));
        _mm512_mask_mov_ps(y, low, v(f32::NAN))
    } else {
        _mm512_scalef_ps(y, k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error in units of the last place of the f32 result, over normal results.
    fn worst(op: ScalarOp, xs: &[f32]) -> f64 {
        let mut y = vec![f32::NAN; xs.len()];
        assert!(apply(op, &mut y, xs));
        let f = op.row().float.unwrap();
        xs.iter()
            .zip(&y)
            .map(|(x, y)| {
                let want = f(*x as f64, 0.0, 0.0);
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
            assert!(apply(ScalarOp::Silu, &mut y[..n], &vec![1.0; n]));
            assert!(y[..n].iter().all(|v| (v - 0.731_058_6).abs() < 1e-6) && y[n] == 7.0);
        }
        let mut y = [0.0; 4];
        apply(ScalarOp::Silu, &mut y, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0]);
        assert!(
            y[0] == f32::INFINITY && y[1].is_nan() && y[2].is_nan() && y[3].to_bits() == (-0f32).to_bits(),
            "{y:?}"
        );
        let mut y = [0.0; 4];
        apply(ScalarOp::Sigmoid, &mut y, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0]);
        assert!(y[0] == 1.0 && y[1] == 0.0 && y[2].is_nan() && y[3] == 0.5, "{y:?}");
    }
}

//! Compares the elementary functions with f64, over the whole range of inputs.

use super::*;
use crate::cpu::sys::Isa;

/// Distance from the f64 result in units of the last place of the nearest f32.
fn ulps(got: f32, want: f64) -> f64 {
    if want.is_nan() || got.is_nan() {
        return if want.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    let w = want as f32;
    if w.is_infinite() || got.is_infinite() {
        // Near the overflow threshold, both infinity and a finite result are accepted.
        let max_ok = |v: f64| v.abs() > f32::MAX as f64 * (1.0 - 1e-6);
        return if got == w || (max_ok(want) && max_ok(got as f64)) { 0.0 } else { f64::INFINITY };
    }
    let a = w.abs().max(f32::MIN_POSITIVE);
    let ulp = f32::from_bits(a.to_bits() + 1) as f64 - a as f64;
    (got as f64 - want).abs() / ulp
}

/// Inputs: bit patterns over the whole range, a dense sweep of `lo..hi`, and edge cases.
fn inputs(lo: f32, hi: f32) -> Vec<f32> {
    let mut v: Vec<f32> = (0..1u32 << 14).map(|i| f32::from_bits(i.wrapping_mul(0x0004_0000 + 77))).collect();
    v.extend((0..40_000).map(|i| lo + (hi - lo) * (i as f32 + 0.37) / 40_000.0));
    v.extend([
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::MIN_POSITIVE,
        1e-45,
        -1e-45,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        88.7228,
        -87.3365,
        -103.97,
        127.99,
        -149.0,
    ]);
    v
}

#[test]
fn unary_functions_follow_f64() {
    use ScalarOp as S;
    // Op, range of the dense sweep, allowed error in ulp.
    let rows: &[(S, f32, f32, f64)] = &[
        (S::Exp, -104.0, 89.0, 1.5),
        (S::Exp2, -150.0, 128.0, 1.5),
        (S::Expm1, -3.0, 3.0, 3.0),
        (S::Log, 0.0, 3.0, 1.5),
        (S::Log2, 0.0, 3.0, 3.0),
        (S::Log1p, -1.0, 3.0, 3.0),
        (S::Sin, -20.0, 20.0, 2.0),
        (S::Cos, -20.0, 20.0, 2.0),
        (S::Tan, -20.0, 20.0, 4.0),
        (S::Asin, -1.0, 1.0, 3.0),
        (S::Acos, -1.0, 1.0, 3.0),
        (S::Atan, -4.0, 4.0, 3.0),
        (S::Sinh, -3.0, 3.0, 4.0),
        (S::Cosh, -3.0, 3.0, 4.0),
        (S::Tanh, -10.0, 10.0, 3.0),
        (S::Asinh, -3.0, 3.0, 4.0),
        (S::Acosh, 1.0, 4.0, 4.0),
        (S::Atanh, -1.0, 1.0, 4.0),
        (S::Erf, -5.0, 5.0, 4.0),
        (S::Sigmoid, -90.0, 90.0, 4.0),
        (S::Silu, -90.0, 90.0, 5.0),
        (S::Gelu, -8.0, 8.0, 12.0),
        (S::GeluTanh, -5.0, 5.0, 64.0),
        (S::Sqrt, 0.0, 4.0, 1.0),
        (S::Rsqrt, 0.0, 4.0, 2.0),
        (S::Recip, -4.0, 4.0, 1.0),
    ];
    for isa in Isa::available() {
        for &(op, lo, hi, tol) in rows {
            let x = inputs(lo, hi);
            let mut y = x.clone();
            assert!(apply(isa, op, &mut y));
            let f = op.row().float.unwrap();
            let mut worst = (0.0, 0.0, 0.0);
            for (&x, &y) in x.iter().zip(&y) {
                // The definition of gelu in the table of scalar ops is inaccurate where 1 + erf cancels. The
                // bound of gelu_tanh holds only from -3 on.
                let want = match op {
                    S::Gelu => gelu_ref(x as f64),
                    S::GeluTanh if x < -3.0 => continue,
                    _ => f(x as f64, 0.0, 0.0),
                };
                let u = ulps(y, want);
                if u > worst.0 {
                    worst = (u, x, y);
                }
            }
            println!("{isa:?} {op:?}: {:.2} ulp at {:e}", worst.0, worst.1);
            assert!(worst.0 <= tol, "{isa:?} {op:?}: {worst:?}");
        }
    }
}

/// `x * Phi(x)`, where Phi is the normal distribution function. In the left tail, Phi comes from the
/// continued fraction of erfc.
pub(crate) fn gelu_ref(x: f64) -> f64 {
    let t = x * std::f64::consts::FRAC_1_SQRT_2;
    if x.is_infinite() && x < 0.0 {
        return f64::NAN;
    }
    if t > -2.0 || x.is_nan() {
        return 0.5 * x * (1.0 + halcyon_ir::ops::element_wise::erf(t));
    }
    let a = -t;
    let mut f = 0.0;
    for k in (1..=200).rev() {
        f = k as f64 / 2.0 / (a + f);
    }
    0.5 * x * (-a * a).exp() / std::f64::consts::PI.sqrt() / (a + f)
}

#[test]
fn pow_and_atan2_follow_f64_and_c99() {
    let v: Vec<f32> = inputs(-5.0, 5.0)
        .into_iter()
        .step_by(97)
        .chain(inputs(0.0, 1.0).into_iter().rev().take(17))
        .collect();
    for isa in Isa::available() {
        for op in [ScalarOp::Pow, ScalarOp::Atan2] {
            let mut worst = (0.0, 0.0, 0.0, 0.0);
            for &y in v.iter().chain(&[2.0, 3.0, -3.0, 0.5, 1e9, 16_777_217.0, 8_388_609.0]) {
                let mut z = v.clone();
                assert!(apply2(isa, op, &mut z, &vec![y; v.len()]));
                for (&x, &z) in v.iter().zip(&z) {
                    let want = match op {
                        ScalarOp::Pow => (x as f64).powf(y as f64),
                        _ => (x as f64).atan2(y as f64),
                    };
                    let u = ulps(z, want);
                    if u > worst.0 {
                        worst = (u, x, y, z);
                    }
                }
            }
            println!("{isa:?} {op:?}: {worst:?}");
            assert!(worst.0 <= if op == ScalarOp::Pow { 1.5 } else { 4.0 }, "{isa:?} {op:?}: {worst:?}");
        }
    }
}

#[test]
fn signs_of_zero_survive() {
    use ScalarOp as S;
    for op in
        [S::Expm1, S::Log1p, S::Sin, S::Tan, S::Asin, S::Atan, S::Sinh, S::Tanh, S::Asinh, S::Atanh, S::Erf]
    {
        let mut x = [-0.0f32, 0.0];
        assert!(apply(Isa::best(), op, &mut x));
        assert!(x[0] == 0.0 && x[0].is_sign_negative() && x[1].is_sign_positive(), "{op:?} {x:?}");
    }
}

#[test]
fn other_ops_are_refused() {
    let mut x = [1.0f32, 2.0];
    assert!(!apply(Isa::best(), ScalarOp::Add, &mut x));
    assert_eq!(x, [1.0, 2.0]);
}

//! Polynomial approximations of mathematical functions in f32. Each array begins with the coefficient of the
//! lowest power. The variable of a polynomial is `r` or `f`, unless its comment names another. All
//! polynomials are Chebyshev fits made for this project. The CPU kernels and the renderers of languages
//! without accurate built-in functions evaluate them, each with its own range reduction and error bound.

// Nine significant digits identify an f32; the coefficients have ten.
#![allow(clippy::excessive_precision)]

/// `(e^r - 1 - r) / r^2` on `|r| <= ln 2 / 2`.
pub const EXP: [f32; 6] =
    [5.000000000e-01, 1.666666716e-01, 4.166646302e-02, 8.333310485e-03, 1.393390005e-03, 1.989126904e-04];
/// `(2^r - 1) / r` on `|r| <= 1/2`.
pub const EXP2: [f32; 7] = [
    6.931471825e-01,
    2.402265072e-01,
    5.550410971e-02,
    9.618056938e-03,
    1.333350199e-03,
    1.546146814e-04,
    1.529734072e-05,
];
/// `(log(1 + f) - f + f^2 / 2) / f^3` on `sqrt(1/2) - 1 <= f <= sqrt(2) - 1`.
pub const LOG: [f32; 9] = [
    3.333333135e-01,
    -2.499999702e-01,
    2.000071704e-01,
    -1.666780710e-01,
    1.424900740e-01,
    -1.242552325e-01,
    1.168578491e-01,
    -1.148121208e-01,
    6.972518563e-02,
];
/// `(sin r - r) / r^3` as a polynomial of `r^2`, on `|r| <= pi / 4`.
pub const SIN: [f32; 4] = [-1.666666716e-01, 8.333331905e-03, -1.984008268e-04, 2.724942988e-06];
/// `(cos r - 1 + r^2 / 2) / r^4` as a polynomial of `r^2`, on `|r| <= pi / 4`.
pub const COS: [f32; 4] = [4.166666791e-02, -1.388888806e-03, 2.480059629e-05, -2.730054689e-07];
/// `(atan t - t) / t^3` as a polynomial of `t^2`, on `0 <= t <= 1`.
pub const ATAN: [f32; 10] = [
    -3.333333433e-01,
    1.999994963e-01,
    -1.428400427e-01,
    1.108826175e-01,
    -8.931826800e-02,
    7.031914592e-02,
    -4.896051437e-02,
    2.630500123e-02,
    -9.144629352e-03,
    1.488691894e-03,
];
/// `(asin t - t) / t^3` as a polynomial of `t^2`, on `0 <= t <= 1/2`.
pub const ASIN: [f32; 6] =
    [1.666666567e-01, 7.500094175e-02, 4.459940270e-02, 3.110066243e-02, 1.714923792e-02, 3.369084746e-02];
/// `e^(a^2) (1 + 2 a) erfc(a)` as a polynomial of `(a - 2) / (a + 2)`, for `a >= 0`.
pub const ERFC: [f32; 12] = [
    1.276978374e+00,
    -9.276381135e-02,
    -1.660304815e-01,
    1.640508473e-01,
    -5.421856418e-02,
    -8.029536344e-03,
    8.713559248e-03,
    1.250119880e-03,
    -1.432145480e-03,
    -4.019996850e-04,
    1.796295983e-04,
    8.477312076e-05,
];
/// `erf(a) / a` as a polynomial of `a^2`, on `|a| < 1`.
pub const ERF: [f32; 8] = [
    1.128379226e+00,
    -3.761263788e-01,
    1.128378212e-01,
    -2.686543018e-02,
    5.221031606e-03,
    -8.484080317e-04,
    1.126595889e-04,
    -9.667044651e-06,
];

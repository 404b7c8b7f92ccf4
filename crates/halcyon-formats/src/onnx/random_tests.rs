use super::*;
use crate::onnx::reference;
use halcyon_ir::ConstData;
use halcyon_ir::ops::element_wise::erf;

/// Both words of Threefry-2x32 with 20 rounds, as defined in the paper.
fn threefry(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let ks = [key[0], key[1], 0x1BD1_1BDA ^ key[0] ^ key[1]];
    let (mut a, mut b) = (counter[0].wrapping_add(ks[0]), counter[1].wrapping_add(ks[1]));
    for r in 0..20 {
        a = a.wrapping_add(b);
        b = b.rotate_left([13, 15, 26, 6, 17, 29, 16, 24][r % 8]) ^ a;
        if r % 4 == 3 {
            let s = r / 4 + 1;
            a = a.wrapping_add(ks[s % 3]);
            b = b.wrapping_add(ks[(s + 1) % 3]).wrapping_add(s as u32);
        }
    }
    [a, b]
}

/// Checks `threefry` against the known answers of its authors' library (Random123, `kat_vectors`), and the
/// scalar op against `threefry`.
#[test]
fn known_answers_of_the_generator() {
    assert_eq!(threefry([0; 2], [0; 2]), [0x6b20_0159, 0x99ba_4efe]);
    assert_eq!(threefry([u32::MAX; 2], [u32::MAX; 2]), [0x1cb9_96fc, 0xbb00_2be7]);
    assert_eq!(threefry([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]), [0xc492_3a9c, 0x483d_f7a0]);
    for (k0, k1, at) in [(0, 0, 0), (1, 2, 3), (u32::MAX, 0x0370_7344, u32::MAX)] {
        let x = [k0, k1, at].map(|v| Scalar::U(v.into()));
        assert_eq!(S::Threefry.eval(DType::U32, &x), Scalar::U(threefry([k0, k1], [at, 0])[0].into()));
    }
    // The graph draws the generator's numbers with the documented key.
    let bits = run(|b| b.random_bits(&[70usize, 100].into(), 9, 1)).to_vec::<u32>();
    let key = mix(9 ^ mix(1 << 32));
    for at in [0u32, 1, 6999] {
        assert_eq!(bits[at as usize], threefry([key as u32, (key >> 32) as u32], [at, 0])[0]);
    }
}

fn run(f: impl FnOnce(&mut Builder) -> Result<Value>) -> ConstData {
    let mut b = Builder::default();
    let v = f(&mut b).unwrap();
    let id = b.id(&v).unwrap();
    b.g.output("y", id);
    b.g.check().unwrap();
    reference::run(&b.g, &[]).remove(0)
}

const N: usize = 20_000;

fn shape() -> Shape {
    [N].into()
}

/// The Kolmogorov-Smirnov statistic: the largest distance between the samples' distribution and `cdf`, times
/// the square root of the number of samples. If the samples follow `cdf`, a value above 1.95 has a
/// probability of one in a thousand.
fn distance(mut v: Vec<f64>, cdf: impl Fn(f64) -> f64) -> f64 {
    v.sort_by(f64::total_cmp);
    let n = v.len() as f64;
    let far = v.iter().enumerate().map(|(i, &x)| {
        let p = cdf(x);
        (p - i as f64 / n).abs().max(((i + 1) as f64 / n - p).abs())
    });
    far.fold(0.0, f64::max) * n.sqrt()
}

fn moments(v: &[f64]) -> (f64, f64) {
    let n = v.len() as f64;
    let m = v.iter().sum::<f64>() / n;
    (m, v.iter().map(|x| (x - m) * (x - m)).sum::<f64>() / n)
}

#[test]
fn uniform_numbers() {
    for (d, seed) in [(DType::F32, 1), (DType::F64, 2), (DType::F16, 3), (DType::BF16, 4)] {
        let v = run(|b| b.random_uniform(d, &shape(), (-2.0, 6.0), seed, 0)).to_vec::<f64>();
        let (m, var) = moments(&v);
        // The bounds are four standard errors: 8 / sqrt(12 n) for the mean, 64 / sqrt(180 n) for the
        // variance.
        assert!((m - 2.0).abs() < 0.066 && (var - 64.0 / 12.0).abs() < 0.135, "{d}: {m} {var}");
        assert!(v.iter().all(|x| (-2.0..=6.0).contains(x)));
        if d.bits() >= 32 {
            let far = distance(v, |x| (x + 2.0) / 8.0);
            assert!(far < 1.95, "{d}: {far}");
        }
    }
    let unit = run(|b| b.random_uniform(DType::F64, &shape(), (0.0, 1.0), 5, 0)).to_vec::<f64>();
    assert!(unit.iter().all(|x| (0.0..1.0).contains(x)));
    // The lowest of the 53 bits is used.
    assert!(unit.iter().any(|x| (x * 2f64.powi(53)) % 2.0 == 1.0));
}

#[test]
fn normal_numbers() {
    for (d, seed) in [(DType::F32, 1), (DType::F64, 2), (DType::F16, 3), (DType::BF16, 4)] {
        let v = run(|b| b.random_normal(d, &shape(), (1.0, 3.0), seed, 0)).to_vec::<f64>();
        let (m, var) = moments(&v);
        // The bounds are four standard errors: 3 / sqrt(n) for the mean, 9 sqrt(2 / n) for the variance.
        assert!((m - 1.0).abs() < 0.085 && (var - 9.0).abs() < 0.36, "{d}: {m} {var}");
        if d.bits() >= 32 {
            let phi = |x: f64| 0.5 * (1.0 + erf((x - 1.0) / 3.0 / 2f64.sqrt()));
            let far = distance(v.clone(), phi);
            assert!(far < 1.95, "{d}: {far}");
        }
        // Neighbours are uncorrelated.
        let r = v.windows(2).map(|w| (w[0] - 1.0) * (w[1] - 1.0)).sum::<f64>() / 9.0 / N as f64;
        assert!(r.abs() < 0.03, "{d}: {r}");
    }
}

#[test]
fn bits_are_balanced_and_draws_differ() {
    let v = run(|b| b.random_bits(&shape(), 7, 0)).to_vec::<u32>();
    for k in 0..32 {
        let ones = v.iter().filter(|x| *x >> k & 1 == 1).count() as f64;
        // The bound is four and a half standard errors. A standard error is sqrt(n) / 2.
        assert!((ones - N as f64 / 2.0).abs() < 320.0, "bit {k}: {ones}");
    }
    let same = |seed, salt| run(|b| b.random_bits(&shape(), seed, salt)).to_vec::<u32>() == v;
    assert!(same(7, 0) && !same(8, 0) && !same(7, 1));
    assert!(!same(1 << 32 | 7, 0), "the upper half of the seed counts");
}

#[test]
fn invalid_operands_are_errors() {
    let mut b = Builder::default();
    let huge: Shape = [1usize << 20, 1 << 20].into();
    assert!(matches!(b.random_bits(&huge, 0, 0), Err(Error::Unsupported { .. })));
    let over: Shape = [usize::MAX >> 1, 4].into();
    assert!(matches!(b.random_bits(&over, 0, 0), Err(Error::Unsupported { .. })));
    let s: Shape = [2usize].into();
    assert!(matches!(b.random_uniform(DType::I32, &s, (0.0, 1.0), 0, 0), Err(Error::DType { .. })));
    let wide = (-3e38, 3e38);
    assert!(matches!(b.random_uniform(DType::F32, &s, wide, 0, 0), Err(Error::Argument { .. })));
    assert!(b.random_uniform(DType::F64, &s, wide, 0, 0).is_ok());
}

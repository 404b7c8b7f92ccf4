//! Tests byte products in every supported form against the original graph, and forms that must not be
//! rewritten.

use super::*;
use crate::passes::{Level, PassOptions, RECOGNITION, optimize};
use crate::reference::eval;
use std::hash::BuildHasher;

const F8: [DType; 4] = [DType::F8E4M3FN, DType::F8E4M3FNUZ, DType::F8E5M2, DType::F8E5M2FNUZ];

struct Case {
    g: Graph,
    inputs: Vec<ConstData>,
    state: u64,
    /// The largest magnitude of a right factor of f32 products.
    right: f64,
}

impl Case {
    fn new() -> Case {
        let state = std::hash::RandomState::new().hash_one(0);
        println!("seed {state}");
        Case { g: Graph::new(), inputs: vec![], state, right: 3.0 }
    }

    fn data(&mut self, d: DType, dims: &[usize]) -> ConstData {
        let n: usize = dims.iter().product();
        let mut next = || {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        let one = |r: f64| match d {
            DType::I8 => r * 128.0,
            DType::U8 => r.abs() * 256.0,
            _ => r * 3.0,
        };
        let v: Vec<_> = (0..n).map(|_| crate::Scalar::F(one(next())).cast(d)).collect();
        ConstData::from_scalars(d, dims, v).unwrap()
    }

    fn input(&mut self, d: DType, dims: &[usize]) -> NodeId {
        let data = self.data(d, dims);
        self.inputs.push(data);
        let name = format!("x{}", self.inputs.len());
        self.g.input(&name, TensorType::new(d, dims))
    }

    fn wide(&mut self, d: DType, dims: &[usize]) -> NodeId {
        let x = self.input(d, dims);
        self.g.cast(x, DType::F32).unwrap()
    }

    /// Checks that O2 keeps the values of the graph. Returns the result dtype and operand count of every byte
    /// product left, and the number that the pass created.
    fn check(self, y: NodeId) -> (Vec<(DType, usize)>, usize) {
        self.check_for(y, |_| true)
    }

    /// Like [`Case::check`], for a device that supports only some dtypes.
    fn check_for(mut self, y: NodeId, has: impl Fn([DType; 2]) -> bool) -> (Vec<(DType, usize)>, usize) {
        self.g.output("y", y);
        let claims = |c: &Composite| formats(c).is_some_and(&has);
        let (h, receipts) = optimize(&self.g, &PassOptions::at(Level::O2), &claims).unwrap();
        let (want, got) =
            (eval(&self.g, &self.inputs, &[]).unwrap(), eval(&h, &codes(&self.inputs), &[]).unwrap());
        let d = want[0].dtype;
        // About one unit in the last place, because a sum between two representable values may be rounded
        // either way.
        let within = match d {
            DType::F32 => 2e-6,
            DType::I32 => 0.0,
            d if is_f8(d) => 0.26,
            _ => 8e-3,
        };
        let got =
            if is_f8(d) { ConstData::new(d, &got[0].dims, got[0].owner()).unwrap() } else { got[0].clone() };
        assert_eq!(want[0].dims, got.dims);
        // The sum of the terms' magnitudes, because the terms may cancel: 24 terms, whose left factors are at
        // most 3. It is estimated for bytes, whose terms have magnitudes up to 255^2, times two scales of up
        // to 3, and for results of 16 bits, whose own rounding is larger.
        let terms = match self.inputs.iter().any(|c| is_int8(c.dtype)) {
            true => 24.0 * 65025.0 * 9.0 / 10.0,
            false if d == DType::F32 => 24.0 * 3.0 * self.right,
            false => 0.1,
        };
        for (a, b) in want[0].to_vec::<f64>().iter().zip(got.to_vec::<f64>()) {
            let near = (a - b).abs() <= within * (a.abs() + terms);
            assert!(a.is_nan() && b.is_nan() || near, "{a} {b}\n{}\n{h}", self.g);
        }
        let kept = h.nodes().iter().filter(|n| matches!(n.op, Op::Composite(_)));
        let made = receipts.iter().filter(|r| r.transformation == RECOGNITION).map(|r| r.count).sum();
        (kept.map(|n| (n.ty.dtype, n.inputs.len())).collect(), made)
    }
}

/// Inputs as the rewritten graph reads them: 8-bit floats as bytes.
fn codes(inputs: &[ConstData]) -> Vec<ConstData> {
    let one = |c: &ConstData| match is_f8(c.dtype) {
        true => ConstData::new(DType::U8, &c.dims, c.owner()).unwrap(),
        false => c.clone(),
    };
    inputs.iter().map(one).collect()
}

#[test]
fn widened_factors_of_all_types_in_all_layouts_are_taken() {
    for (i, left) in F8.into_iter().enumerate() {
        let right = F8[(i + 1) % 4];
        for form in 0..7 {
            let mut c = Case::new();
            let (m, k, n) = (4, 24, 6);
            let y = match form {
                0 => {
                    let (a, b) = (c.wide(left, &[m, k]), c.wide(right, &[k, n]));
                    c.g.matmul(a, b)
                }
                // The right operand is stored transposed, as weights usually are.
                1 => {
                    let (a, b) = (c.wide(left, &[m, k]), c.wide(right, &[n, k]));
                    let b = c.g.transpose(b, 0, 1).unwrap();
                    c.g.matmul(a, b)
                }
                // A constant shared by a batch.
                2 => {
                    let (a, w) = (c.wide(left, &[3, m, k]), c.data(right, &[k, n]));
                    let w = c.g.constant(w);
                    let w = c.g.cast(w, DType::F32).unwrap();
                    c.g.matmul(a, w)
                }
                3 => {
                    let (a, w) = (c.wide(left, &[m, k]), c.data(right, &[n, k]));
                    let w = c.g.constant(w);
                    let w = c.g.transpose(w, 0, 1).unwrap();
                    let w = c.g.cast(w, DType::F32).unwrap();
                    c.g.matmul(a, w)
                }
                // Heads interleaved with the rows.
                4 => {
                    let (a, b) = (c.wide(left, &[m, 2 * k]), c.wide(right, &[2, k, n]));
                    let a = c.g.reshape(a, [m, 2, k]).unwrap();
                    let a = c.g.permute(a, &[1, 0, 2]).unwrap();
                    c.g.matmul(a, b)
                }
                // Some rows of a longer operand.
                5 => {
                    let (a, b) = (c.wide(left, &[m + 3, k]), c.wide(right, &[k, n]));
                    let a = c.g.narrow(a, 0, 2, m).unwrap();
                    c.g.matmul(a, b)
                }
                _ => {
                    let (a, b) = (c.input(left, &[m, k]), c.input(left, &[k, n]));
                    c.g.matmul(a, b)
                }
            };
            let (kept, made) = c.check(y.unwrap());
            assert_eq!((kept, made), (vec![(DType::F32, 2)], 1), "{left} {right} {form}");
        }
    }
}

#[test]
fn half_results_are_rounded_once() {
    for half in [DType::F16, DType::BF16] {
        // Half types represent the factors exactly.
        let mut c = Case::new();
        let (a, b) = (c.input(DType::F8E4M3FN, &[4, 24]), c.input(DType::F8E5M2, &[24, 6]));
        let (a, b) = (c.g.cast(a, half).unwrap(), c.g.cast(b, half).unwrap());
        let y = c.g.matmul(a, b).unwrap();
        assert_eq!(c.check(y), (vec![(half, 2)], 1));
        // A cast of the sums becomes the result type, unless something else reads the sums.
        for shared in [false, true] {
            let mut c = Case::new();
            let (a, b) = (c.wide(DType::F8E4M3FN, &[4, 24]), c.wide(DType::F8E5M2, &[24, 6]));
            let s = c.g.matmul(a, b).unwrap();
            let y = c.g.cast(s, half).unwrap();
            if shared {
                c.g.output("sums", s);
            }
            assert_eq!(c.check(y), (vec![(if shared { DType::F32 } else { half }, 2)], 1));
        }
    }
}

/// Multiplies a widened operand by a scale with these dimensions.
fn scaled(c: &mut Case, x: NodeId, dims: &[usize]) -> NodeId {
    let s = c.input(DType::F32, dims);
    c.g.mul(x, s).unwrap()
}

#[test]
fn scales_are_applied_after_the_sums() {
    let (m, k, n) = (4, 24, 6);
    let factors = |c: &mut Case| (c.wide(DType::F8E4M3FN, &[m, k]), c.wide(DType::F8E4M3FN, &[k, n]));
    // One number per operand: becomes an operand of the composite.
    let mut c = Case::new();
    let (a, b) = factors(&mut c);
    let (a, b) = (scaled(&mut c, a, &[1]), scaled(&mut c, b, &[1, 1]));
    let y = c.g.matmul(a, b).unwrap();
    let y = c.g.cast(y, DType::BF16).unwrap();
    assert_eq!(c.check(y), (vec![(DType::BF16, 3)], 1));
    // One number per row or column: applied after the composite.
    for (rows, columns) in [(true, false), (false, true), (true, true)] {
        let mut c = Case::new();
        let (mut a, mut b) = factors(&mut c);
        if rows {
            a = scaled(&mut c, a, &[m, 1]);
        }
        if columns {
            b = scaled(&mut c, b, &[n]);
        }
        b = scaled(&mut c, b, &[1]);
        let y = c.g.matmul(a, b).unwrap();
        assert_eq!(c.check(y), (vec![(DType::F32, 3)], 1));
    }
    // Weights that are transposed after scaling.
    let mut c = Case::new();
    let (a, w) = (c.wide(DType::F8E4M3FN, &[m, k]), c.wide(DType::F8E4M3FN, &[n, k]));
    let w = scaled(&mut c, w, &[n, 1]);
    let w = c.g.transpose(w, 0, 1).unwrap();
    let y = c.g.matmul(a, w).unwrap();
    assert_eq!(c.check(y), (vec![(DType::F32, 2)], 1));
    // ONNX's zero point, with value zero.
    let mut c = Case::new();
    let (a, b) = factors(&mut c);
    let zero = c.g.full(DType::F8E4M3FN, [1usize], 0.0);
    let zero = c.g.cast(zero, DType::F32).unwrap();
    let a = c.g.sub(a, zero).unwrap();
    let a = scaled(&mut c, a, &[1]);
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), (vec![(DType::F32, 3)], 1));
}

#[test]
fn other_products_are_unchanged() {
    let (m, k, n) = (4, 24, 6);
    let none = (vec![], 0);
    // A scale for each term of the sum.
    let mut c = Case::new();
    let (a, b) = (c.wide(DType::F8E4M3FN, &[m, k]), c.wide(DType::F8E4M3FN, &[k, n]));
    let a = scaled(&mut c, a, &[k]);
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), none);
    // A zero point that is not zero.
    let mut c = Case::new();
    let (a, b) = (c.wide(DType::F8E4M3FN, &[m, k]), c.wide(DType::F8E4M3FN, &[k, n]));
    let one = c.g.lit(a, 1.0);
    let a = c.g.sub(a, one).unwrap();
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), none);
    // Scaling in a half type, which rounds; one factor in f32.
    let mut c = Case::new();
    let (a, b) = (c.input(DType::F8E4M3FN, &[m, k]), c.input(DType::F8E4M3FN, &[k, n]));
    let (a, b) = (c.g.cast(a, DType::BF16).unwrap(), c.g.cast(b, DType::BF16).unwrap());
    let s = c.input(DType::BF16, &[1]);
    let a = c.g.mul(a, s).unwrap();
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), none);
    let mut c = Case::new();
    let (a, b) = (c.input(DType::F32, &[m, k]), c.wide(DType::F8E4M3FN, &[k, n]));
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), none);
    // Below O2, and for a device without such kernels.
    for (level, claims) in [(Level::O1, true), (Level::O2, false)] {
        let mut c = Case::new();
        let (a, b) = (c.wide(DType::F8E4M3FN, &[m, k]), c.wide(DType::F8E4M3FN, &[k, n]));
        let y = c.g.matmul(a, b).unwrap();
        c.g.output("y", y);
        let (h, _) = optimize(&c.g, &PassOptions::at(level), &|_| claims).unwrap();
        assert!(!h.nodes().iter().any(|n| matches!(n.op, Op::Composite(_))), "{level}");
    }
}

/// An operand as an importer writes it: widened, minus its zero point, times its scale. `zero` and `scale`
/// are their dimensions; `None` omits them.
fn quantised(
    c: &mut Case,
    d: DType,
    dims: &[usize],
    zero: Option<&[usize]>,
    scale: Option<&[usize]>,
) -> NodeId {
    let mut x = c.wide(d, dims);
    if let Some(zero) = zero {
        let z = c.wide(d, zero);
        x = c.g.sub(x, z).unwrap();
    }
    match scale {
        Some(s) => scaled(c, x, s),
        None => x,
    }
}

#[test]
fn integers_are_summed_exactly_with_zero_points_and_scales() {
    let (m, k, n) = (4, 24, 6);
    for left in [DType::U8, DType::I8] {
        for right in [DType::U8, DType::I8] {
            for zeros in
                [[None, None], [Some(&[1][..]), None], [None, Some(&[1][..])], [Some(&[m, 1]), Some(&[n])]]
            {
                for scales in [[None, None], [Some(&[1][..]), Some(&[n][..])], [Some(&[m, 1]), Some(&[1])]] {
                    // On a device with all kernels, and on one with i8 kernels only.
                    for all in [true, false] {
                        let mut c = Case::new();
                        let a = quantised(&mut c, left, &[m, k], zeros[0], scales[0]);
                        let b = quantised(&mut c, right, &[k, n], zeros[1], scales[1]);
                        let y = c.g.matmul(a, b).unwrap();
                        let found = c.check_for(y, |t| all || t == [DType::I8; 2]);
                        assert_eq!(
                            found,
                            (vec![(DType::I32, 2)], 1),
                            "{left} {right} {zeros:?} {scales:?} {all}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn sums_over_parts_are_one_product() {
    // MatMulInteger of a batch by a constant, in parts that f32 sums exactly.
    let (m, k, n) = (3, 40, 6);
    for cuts in [vec![40], vec![16, 40], vec![7, 8, 40]] {
        for constant in [false, true] {
            let mut c = Case::new();
            let (x, zero) = (c.wide(DType::U8, &[2, m, k]), c.wide(DType::U8, &[]));
            let x = c.g.sub(x, zero).unwrap();
            let w = if constant {
                let data = c.data(DType::I8, &[k, n]);
                let w = c.g.constant(data);
                c.g.cast(w, DType::F32).unwrap()
            } else {
                c.wide(DType::I8, &[k, n])
            };
            let (mut start, mut sum) = (0, None);
            for end in &cuts {
                let (a, b) = match cuts.len() {
                    1 => (x, w),
                    _ => (
                        c.g.narrow(x, 2, start, end - start).unwrap(),
                        c.g.narrow(w, 0, start, end - start).unwrap(),
                    ),
                };
                let p = c.g.matmul(a, b).unwrap();
                let p = c.g.cast(p, DType::I32).unwrap();
                sum = Some(sum.map_or(p, |s| c.g.add(s, p).unwrap()));
                start = *end;
            }
            assert_eq!(c.check(sum.unwrap()), (vec![(DType::I32, 2)], 1), "{cuts:?}");
        }
    }
    // If a part is missing or has another reader, the products stay separate.
    let mut c = Case::new();
    let (x, w) = (c.wide(DType::U8, &[m, k]), c.wide(DType::I8, &[k, n]));
    let mut parts = vec![];
    for (start, len) in [(0, 8), (10, 30)] {
        let (a, b) = (c.g.narrow(x, 1, start, len).unwrap(), c.g.narrow(w, 0, start, len).unwrap());
        let p = c.g.matmul(a, b).unwrap();
        parts.push(c.g.cast(p, DType::I32).unwrap());
    }
    let y = c.g.add(parts[0], parts[1]).unwrap();
    assert_eq!(c.check(y), (vec![(DType::I32, 2); 2], 2));
}

/// A sum of two products over parts of the operands, each in f32 and cast to i32. `view` is applied to each
/// part.
fn two_parts(
    c: &mut Case,
    cuts: [usize; 2],
    [a, b]: [NodeId; 2],
    view: impl Fn(&mut Graph, NodeId, bool, usize) -> NodeId,
) -> NodeId {
    let (mut start, mut parts) = (0, vec![]);
    for len in cuts {
        let (x, w) = (c.g.shape(a).rank() - 1, c.g.shape(b).rank() - 2);
        let (x, w) = (c.g.narrow(a, x, start, len).unwrap(), c.g.narrow(b, w, start, len).unwrap());
        let (x, w) = (view(&mut c.g, x, false, len), view(&mut c.g, w, true, len));
        let p = c.g.matmul(x, w).unwrap();
        parts.push(c.g.cast(p, DType::I32).unwrap());
        start += len;
    }
    c.g.add(parts[0], parts[1]).unwrap()
}

#[test]
fn parts_of_different_products_stay_separate() {
    let two = (vec![(DType::I32, 2); 2], 2);
    // Parts that are repeated along the summed axis, along the rows, or from a value with one axis stay
    // separate. Parts that are repeated along the batch become one product.
    let mut c = Case::new();
    let ab = [c.wide(DType::U8, &[4, 2]), c.wide(DType::I8, &[2, 6])];
    let y = two_parts(&mut c, [1, 1], ab, |g, x, right, _| {
        g.expand(x, &Shape::from(if right { [8usize, 6] } else { [4, 8] })).unwrap()
    });
    assert_eq!(c.check(y), two);
    for rows in [&[1, 40][..], &[40]] {
        let mut c = Case::new();
        let ab = [c.wide(DType::U8, rows), c.wide(DType::I8, &[40, 6])];
        let y = two_parts(&mut c, [16, 24], ab, |g, x, right, len| match right {
            true => x,
            false => g.expand(x, &Shape::from([3, len])).unwrap(),
        });
        assert_eq!(c.check(y), two, "{rows:?}");
    }
    let mut c = Case::new();
    let ab = [c.wide(DType::U8, &[5, 40]), c.wide(DType::I8, &[3, 40, 6])];
    let y = two_parts(&mut c, [16, 24], ab, |g, x, right, len| {
        if right { x } else { g.expand(x, &Shape::from([3, 5, len])).unwrap() }
    });
    assert_eq!(c.check(y), (vec![(DType::I32, 2)], 1));
    // A right operand that continues after the last part.
    let mut c = Case::new();
    let ab = [c.wide(DType::U8, &[4, 40]), c.wide(DType::I8, &[50, 6])];
    let y = two_parts(&mut c, [16, 24], ab, |_, x, _, _| x);
    assert_eq!(c.check(y), two);
    // Each part is truncated to an integer; the sum as a whole is not.
    let mut c = Case::new();
    let ab = [c.wide(DType::F8E4M3FN, &[4, 40]), c.wide(DType::F8E4M3FN, &[40, 6])];
    let y = two_parts(&mut c, [16, 24], ab, |_, x, _, _| x);
    c.g.output("y", y);
    let (h, made) = run(&c.g, &|_| true).unwrap();
    assert_eq!(made, 2, "{h}");
    // A chain of additions far longer than any sum of products must not be slow. `busy` is the CPU time of
    // this thread in nanoseconds; systems that do not report it skip the check.
    let busy = || -> Option<u64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let time = |additions: usize| {
        let mut c = Case::new();
        let (a, b) = (c.wide(DType::U8, &[1, 4]), c.wide(DType::I8, &[4, 6]));
        let p = c.g.matmul(a, b).unwrap();
        let mut y = c.g.cast(p, DType::I32).unwrap();
        for _ in 0..additions {
            let one = c.g.full(DType::I32, [1usize, 6], 1);
            y = c.g.add(y, one).unwrap();
        }
        c.g.output("y", y);
        let before = busy();
        assert_eq!(run(&c.g, &|_| true).unwrap().1, 1);
        busy().zip(before).map(|(after, before)| after - before)
    };
    // If each addition searched all additions below it, eight times as many would take 64 times as long, a
    // minute in all.
    if let (Some(short), Some(long)) = (time(2500), time(20_000)) {
        assert!(long < 24 * short + 2_000_000_000, "{short} ns, eight times as many {long} ns");
    }
}

/// Constant rows or columns that are expanded to a matrix, with and without the need for their sums.
#[test]
fn repeated_constants_are_not_matrices() {
    let (m, k, n) = (4, 24, 6);
    for d in [DType::I8, DType::U8, DType::F8E4M3FN] {
        for (dims, turns) in
            [([k, 1], false), ([1, n], false), ([n, 1], true), ([1, k], true), ([k, n], false)]
        {
            for zero in [None, Some(&[1][..])] {
                if is_f8(d) && zero.is_some() {
                    continue;
                }
                let mut c = Case::new();
                let left = if is_f8(d) { d } else { DType::U8 };
                let a = quantised(&mut c, left, &[m, k], zero, None);
                let w = c.data(d, &dims);
                let w = c.g.constant(w);
                let mut w = c.g.cast(w, DType::F32).unwrap();
                if turns {
                    w = c.g.transpose(w, 0, 1).unwrap();
                }
                let w = c.g.expand(w, &Shape::from([k, n])).unwrap();
                let y = c.g.matmul(a, w).unwrap();
                let result = if is_f8(d) { DType::F32 } else { DType::I32 };
                assert_eq!(c.check(y), (vec![(result, 2)], 1), "{d} {dims:?} {turns} {zero:?}");
            }
        }
    }
}

#[test]
fn scales_may_be_large_and_small_together() {
    for s in [1e20, 1e-20] {
        let mut c = Case::new();
        let (a, b) = (c.wide(DType::U8, &[4, 24]), c.wide(DType::I8, &[24, 6]));
        let (t, u) = (c.g.full(DType::F32, [1usize], s), c.g.full(DType::F32, [1usize], s));
        let (a, b) = (c.g.mul(a, t).unwrap(), c.g.mul(b, u).unwrap());
        let y = c.g.matmul(a, b).unwrap();
        c.g.output("y", y);
        let (h, made) = run(&c.g, &|_| true).unwrap();
        assert_eq!(made, 1);
        // Zeros must not become NaN, and 1e-36 must keep all its digits.
        let zeros = [(DType::U8, &[4, 24][..]), (DType::I8, &[24, 6])];
        for v in [0.0, 100.0] {
            let x = zeros.map(|(d, dims)| {
                let n = dims.iter().product();
                ConstData::from_scalars(d, dims, vec![crate::Scalar::F(v).cast(d); n]).unwrap()
            });
            let got = eval(&h, &x, &[]).unwrap()[0].to_vec::<f64>();
            let want = 24.0 * (v * s) * (v * s);
            let near = |g: f64| if want > 1e38 { g.is_infinite() } else { (g - want).abs() <= 1e-6 * want };
            assert!(got.iter().all(|g| near(*g)), "{got:?} for {want}");
        }
    }
}

#[test]
fn sums_that_exceed_i32_stay_in_floats() {
    let none = (vec![], 0);
    // i32 sums wrap, f32 sums do not.
    for (d, want) in [(DType::F32, none.clone()), (DType::I32, (vec![(DType::I32, 2)], 1))] {
        let mut c = Case::new();
        let (a, b) = (c.input(DType::U8, &[1, 40_000]), c.input(DType::U8, &[40_000, 2]));
        let (a, b) = (c.g.cast(a, d).unwrap(), c.g.cast(b, d).unwrap());
        let y = c.g.matmul(a, b).unwrap();
        assert_eq!(c.check(y), want);
    }
    // A zero point of the other type turns 8-bit values into 9-bit ones.
    for (zero, want) in [(DType::U8, (vec![(DType::I32, 2)], 1)), (DType::I8, none.clone())] {
        let mut c = Case::new();
        let (a, z) = (c.wide(DType::U8, &[1, 30_000]), c.wide(zero, &[1]));
        let a = c.g.sub(a, z).unwrap();
        let b = c.wide(DType::U8, &[30_000, 2]);
        let y = c.g.matmul(a, b).unwrap();
        c.g.output("y", y);
        let (h, made) = run(&c.g, &|_| true).unwrap();
        let kept = h.nodes().iter().filter(|n| matches!(n.op, Op::Composite(_)));
        assert_eq!((kept.map(|n| (n.ty.dtype, n.inputs.len())).collect::<Vec<_>>(), made), want, "{zero}");
    }
    // A fractional zero point, a scaled value with a zero point, and floats truncated to integers.
    let mut c = Case::new();
    let (a, b) = (c.wide(DType::U8, &[4, 24]), c.wide(DType::I8, &[24, 6]));
    let half = c.g.lit(a, 0.5);
    let y = c.g.sub(a, half).unwrap();
    let y = c.g.matmul(y, b).unwrap();
    assert_eq!(c.check(y), none);
    let mut c = Case::new();
    let (a, b) = (c.wide(DType::U8, &[4, 24]), c.wide(DType::I8, &[24, 6]));
    let (a, z) = (scaled(&mut c, a, &[1]), c.wide(DType::U8, &[1]));
    let y = c.g.sub(a, z).unwrap();
    let y = c.g.matmul(y, b).unwrap();
    assert_eq!(c.check(y), none);
    let mut c = Case::new();
    let (a, b) = (c.input(DType::F8E4M3FN, &[4, 24]), c.input(DType::F8E4M3FN, &[24, 6]));
    let (a, b) = (c.g.cast(a, DType::I32).unwrap(), c.g.cast(b, DType::I32).unwrap());
    let y = c.g.matmul(a, b).unwrap();
    assert_eq!(c.check(y), none);
}

/// Constant weights, plain and transposed. The left operand has a zero point, so the column sums of the
/// weights are needed.
#[test]
fn sums_of_constants_are_known() {
    let (m, k, n) = (4, 24, 6);
    for (d, turns, batch) in [
        (DType::I8, false, false),
        (DType::I8, true, false),
        (DType::U8, false, true),
        (DType::U8, true, true),
    ] {
        for all in [true, false] {
            let mut c = Case::new();
            let dims = if batch { vec![2, m, k] } else { vec![m, k] };
            let a = quantised(&mut c, DType::U8, &dims, Some(&[1]), None);
            let w = c.data(d, &if turns { [n, k] } else { [k, n] });
            let w = c.g.constant(w);
            let mut w = c.g.cast(w, DType::F32).unwrap();
            if turns {
                w = c.g.transpose(w, 0, 1).unwrap();
            }
            let y = c.g.matmul(a, w).unwrap();
            let y = c.g.cast(y, DType::I32).unwrap();
            let (h, _) = run(
                &{
                    let mut g = c.g.clone();
                    g.output("y", y);
                    g
                },
                &|c| all || formats(c) == Some([DType::I8; 2]),
            )
            .unwrap();
            // If the right operand is shifted, the row sums of the left operand are needed.
            let sums = h.nodes().iter().filter(|n| matches!(n.op, Op::Reduce { .. })).count();
            assert_eq!(sums, usize::from(d == DType::U8 && !all), "{h}");
            assert_eq!(c.check_for(y, |t| all || t == [DType::I8; 2]), (vec![(DType::I32, 2)], 1));
        }
    }
}

/// The pass replaces products of 16-bit integers only if no sum can wrap. So the weights must be a constant;
/// here the codes are also clamped.
#[test]
fn products_of_16_bits_are_taken_if_their_sums_fit() {
    // Sums of 24 products of weights up to `most` and codes up to `limit`. 24 * 2730 * 32,767 fits i32, and
    // 24 * 2731 * 32,767 does not.
    for (most, limit, taken) in
        [(200i64, 300, true), (3000, 300, true), (2730, 32767, true), (2731, 32767, false)]
    {
        for turns in [false, true] {
            let mut c = Case::new();
            c.right = most as f64;
            let x = c.input(DType::F32, &[4, 24]);
            let s = c.g.full(DType::F32, [1usize], 0.01);
            let s = c.g.reshape(s, Shape::scalar()).unwrap();
            let q = c.g.quantize_within(x, s, limit).unwrap();
            let a = c.g.dequantize(q, s, None, None).unwrap();
            let codes = (0..24 * 6).map(|i| crate::Scalar::I(if i % 2 == 0 { most } else { -most }));
            let dims = if turns { [6, 24] } else { [24, 6] };
            let w = c.g.constant(ConstData::from_scalars(DType::I16, &dims, codes).unwrap());
            let mut w = c.g.cast(w, DType::F32).unwrap();
            if turns {
                w = c.g.transpose(w, 0, 1).unwrap();
            }
            let y = c.g.matmul(a, w).unwrap();
            let want = if taken { (vec![(DType::I32, 2)], 1) } else { (vec![], 0) };
            assert_eq!(c.check_for(y, |t| t == [DType::I16; 2]), want, "{most} {limit} {turns}");
        }
    }
}

/// If limits exceed i16, the cast to i16 wraps, and codes of any magnitude are assumed.
#[test]
fn limits_of_integers_that_wrap_do_not_count() {
    for (limit, taken) in [(30_000i64, true), (40_000, false)] {
        let mut c = Case::new();
        let x = c.input(DType::F32, &[4, 3]);
        let x = c.g.cast(x, DType::I32).unwrap();
        let (low, high) = (c.g.lit(x, 0.0), c.g.lit(x, limit as f64));
        let q = c.g.max(x, low).unwrap();
        let q = c.g.min(q, high).unwrap();
        let q = c.g.cast(q, DType::I16).unwrap();
        let a = c.g.cast(q, DType::F32).unwrap();
        // The sum of the magnitudes is 65,538. Times 32,767 it fits i32; times 32,768 it does not.
        let codes = [32767, 32767, 4].map(|v| [crate::Scalar::I(v); 6]).concat();
        let w = c.g.constant(ConstData::from_scalars(DType::I16, &[3, 6], codes).unwrap());
        let w = c.g.cast(w, DType::F32).unwrap();
        let y = c.g.matmul(a, w).unwrap();
        let want = if taken { (vec![(DType::I32, 2)], 1) } else { (vec![], 0) };
        assert_eq!(c.check_for(y, |t| t == [DType::I16; 2]), want, "{limit}");
    }
}

/// A zero point of zeros is left out, however long it is.
#[test]
fn long_zero_points_of_zero_are_left_out() {
    let n = MAX_EXAMINED + 3;
    let mut c = Case::new();
    let x = c.input(DType::F32, &[1, 2]);
    let s = c.g.full(DType::F32, [1usize], 0.01);
    let s = c.g.reshape(s, Shape::scalar()).unwrap();
    let q = c.g.quantize_within(x, s, 100).unwrap();
    let a = c.g.dequantize(q, s, None, None).unwrap();
    let codes = (0..2 * n).map(|i| crate::Scalar::I(i as i64 % 13 - 6));
    let w = c.g.constant(ConstData::from_scalars(DType::I16, &[2, n], codes).unwrap());
    let scales = c.g.full(DType::F32, [n], 0.5);
    let zero = c.g.constant(ConstData::splat(DType::I16, &[n], crate::Scalar::I(0)).unwrap());
    let w = c.g.dequantize(w, scales, Some(zero), Some(1)).unwrap();
    let y = c.g.matmul(a, w).unwrap();
    assert_eq!(c.check_for(y, |t| t == [DType::I16; 2]), (vec![(DType::I32, 2)], 1));
}

#[test]
fn transposed_constants_are_made_once() {
    let mut c = Case::new();
    let (a, w) = (c.wide(DType::U8, &[4, 24]), c.data(DType::I8, &[24, 6]));
    let w = c.g.constant(w);
    let w = c.g.cast(w, DType::F32).unwrap();
    let y = c.g.matmul(a, w).unwrap();
    c.g.output("y", y);
    let constant = || {
        let (h, _) = run(&c.g, &|_| true).unwrap();
        let found = h.nodes().iter().find_map(|n| match &n.op {
            Op::Const(c) => Some(c.clone()),
            _ => None,
        });
        found.unwrap()
    };
    let (first, second) = (constant(), constant());
    assert_eq!((first.key(), &first.dims[..]), (second.key(), &[6, 24][..]));
}

//! The tensor API as users write it. Expected values are from NumPy or PyTorch.
// Axes are passed in every accepted form, and some ranges are reversed on purpose.
#![allow(clippy::needless_borrows_for_generic_args, clippy::reversed_empty_ranges)]

use halcyon::ir::ops::{Conv, Pool};
use halcyon::prelude::*;
use halcyon::{Attention, CrossEntropy, Ellipsis, Error, NewAxis, Order, Scan, Variance, step};

fn cpu() -> Backend {
    Backend::cpu().unwrap()
}

fn t<const N: usize>(b: &Backend, shape: impl Into<Shape>, v: [f32; N]) -> Tensor {
    Tensor::from_slice(b, shape, &v).unwrap()
}

fn v(t: &Tensor) -> Vec<f64> {
    t.to_vec().unwrap_or_else(|e| panic!("{e}"))
}

fn near(t: &Tensor, want: &[f64]) {
    let got = v(t);
    assert_eq!(got.len(), want.len(), "{got:?} {want:?}");
    for (a, b) in got.iter().zip(want) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0) || a.is_nan() && b.is_nan(), "{got:?} {want:?}");
    }
}

fn fails(t: &Tensor, parts: &[&str]) {
    let e = t.check().unwrap_err().to_string();
    for p in parts {
        assert!(e.contains(p), "{e} does not say {p}");
    }
    assert!(e.contains("shared/api.rs"), "{e}");
}

/// Compares the gradient of the sum of `f(x)·weights` with central differences.
fn differentiates(b: &Backend, dims: &[usize], f: impl Fn(&Tensor) -> Tensor) {
    let n: usize = dims.iter().product();
    let at: Vec<f64> = (0..n).map(|i| ((i * 37 % 23) as f64 - 11.0) / 7.0 + 0.013).collect();
    let of = |v: &[f64]| {
        let x = Tensor::from_slice(b, dims, v).unwrap().requires_grad().unwrap();
        let y = f(&x);
        let m: usize = y.dims().unwrap().iter().product();
        let w: Vec<f64> = (0..m).map(|i| 0.3 + (i % 5) as f64).collect();
        let w = Tensor::from_slice(b, y.dims().unwrap().as_slice(), &w).unwrap();
        (x, (y * w).sum(..))
    };
    let (x, loss) = of(&at);
    let grads = loss.backward().unwrap();
    let got = v(grads.get(&x).unwrap());
    for i in 0..n {
        let moved = |by: f64| {
            let mut p = at.clone();
            p[i] += by;
            of(&p).1.item::<f64>().unwrap()
        };
        let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((got[i] - want).abs() < 1e-5 * want.abs().max(1.0), "element {i}: {} {want}", got[i]);
    }
}

#[test]
fn numbers_of_every_kind_stand_beside_tensors() {
    let b = cpu();
    let x = t(&b, [3], [1.0, -2.0, 3.0]);
    assert_eq!(v(&(&x + 1)), [2.0, -1.0, 4.0]);
    assert_eq!(v(&(x.clone() + 1)), [2.0, -1.0, 4.0]);
    assert_eq!(v(&(&x * 2.0f32)), [2.0, -4.0, 6.0]);
    assert_eq!(v(&(x.clone() / 2i64)), [0.5, -1.0, 1.5]);
    assert_eq!(v(&(&x - 1i32)), [0.0, -3.0, 2.0]);
    assert_eq!(v(&(2.0 * &x)), [2.0, -4.0, 6.0]);
    assert_eq!(v(&(1.0 - x.clone())), [0.0, 3.0, -2.0]);
    assert_eq!(v(&(1 - &x)), [0.0, 3.0, -2.0]);
    assert_eq!(v(&(6 / &x)), [6.0, -3.0, 2.0]);
    // Rust infers the result's type in the middle of a chain of method calls.
    assert_eq!(v(&((2.0 * &x).relu() + 1).sum(..)), [11.0]);
    assert_eq!(v(&(&x % 2)), [1.0, 0.0, 1.0]);
    assert_eq!(v(&x.pow(2)), [1.0, 4.0, 9.0]);
    assert_eq!(x.gt(0).to_vec::<bool>().unwrap(), [true, false, true]);
    assert_eq!(v(&x.maximum(0.5)), [1.0, 0.5, 3.0]);
    assert_eq!(v(&x.add(&x).mul(x.clone())), [2.0, 8.0, 18.0]);
    // A number takes the tensor's dtype.
    for d in [DType::F16, DType::BF16, DType::F64, DType::I32, DType::U8] {
        let y = x.abs().cast(d);
        assert_eq!((&y + 1).dtype().unwrap(), d);
        assert_eq!((2 * &y).to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    }
    let i = x.cast(DType::I32);
    assert_eq!((&i + 2.0).to_vec::<i32>().unwrap(), [3, 0, 5]);
    fails(&(&i + 1.5), &["i32", "does not hold 1.5", "cast"]);
    fails(&(x.abs().cast(DType::U8) * 300), &["u8", "300"]);
    fails(&(x.abs().cast(DType::U8) - -1), &["u8", "-1"]);
    fails(&(x.gt(0) + 1), &["bool"]);
    // The same op with another number needs no new plan.
    let _ = v(&(&x * 3.5));
    let plans = b.cache_stats().plans_built;
    for k in 0..5 {
        assert_eq!(v(&(&x * k)), [k as f64, -2.0 * k as f64, 3.0 * k as f64]);
    }
    assert_eq!(b.cache_stats().plans_built, plans);
}

#[test]
fn reductions_take_axes_from_both_ends() {
    let b = cpu();
    let x = Tensor::arange(&b, 24, DType::F32).reshape([2, 3, -1]);
    assert_eq!(x.dims().unwrap().as_slice(), [2, 3, 4]);
    assert_eq!(v(&x.sum(..)), [276.0]);
    assert_eq!(v(&x.sum(&[])), [276.0]);
    assert_eq!(v(&x.sum([0, -1])), [60.0, 92.0, 124.0]);
    assert_eq!(v(&x.sum(-1)), [6.0, 22.0, 38.0, 54.0, 70.0, 86.0]);
    assert_eq!(x.sum_keepdim(1).dims().unwrap().as_slice(), [2, 1, 4]);
    assert_eq!(v(&x.sum_keepdim(1)), v(&x.sum(1)));
    assert_eq!(x.mean_keepdim([1, 2]).dims().unwrap().as_slice(), [2, 1, 1]);
    assert_eq!(v(&x.mean([1, 2])), [5.5, 17.5]);
    assert_eq!(v(&x.max(vec![0i64, 2])), [15.0, 19.0, 23.0]);
    assert_eq!(v(&x.min(&vec![0i64, 2])), [0.0, 4.0, 8.0]);
    assert_eq!(x.max_keepdim(..).dims().unwrap().as_slice(), [1, 1, 1]);
    assert_eq!(v(&(&x + 1).index((0, 0)).prod(..)), [24.0]);
    assert_eq!(x.prod_keepdim(0).dims().unwrap().as_slice(), [1, 3, 4]);
    assert_eq!(x.min_keepdim(-1).dims().unwrap().as_slice(), [2, 3, 1]);
    assert_eq!(x.argmax(-1).to_vec::<i64>().unwrap(), [3; 6]);
    assert_eq!(x.argmin_keepdim(-2).dims().unwrap().as_slice(), [2, 1, 4]);
    assert_eq!(x.argmax_keepdim(0).to_vec::<i64>().unwrap(), [1; 12]);
    fails(&x.sum(3), &["3"]);
    fails(&x.sum([1, -2]), &["sum", "twice"]);
    fails(&x.mean(-4), &["-4"]);
    let y = t(&b, [2, 2], [3.0, 1.0, 2.0, 4.0]);
    assert_eq!(y.argsort(-1, Order::Descending).to_vec::<i64>().unwrap(), [0, 1, 1, 0]);
    assert_eq!(v(&y.cumsum(0)), [3.0, 1.0, 5.0, 5.0]);
    let back = Scan { exclusive: true, reverse: true };
    assert_eq!(v(&y.scan(halcyon::ReduceKind::Sum, -1, back)), [1.0, 0.0, 4.0, 0.0]);
}

#[test]
fn variances_are_those_of_torch() {
    let b = cpu();
    let x = t(&b, [2, 4], [1.0, 2.0, 4.0, 9.0, -1.0, 0.5, 0.5, 2.0]);
    // torch: x.var(1), x.var(1, correction=0), x.std(), x.var(0)
    near(&x.var(1), &[12.666667, 1.5]);
    near(&x.var_with(1, Variance { correction: 0, keepdim: false }), &[9.5, 1.125]);
    near(&x.std(..), &[3.0937725]);
    near(&x.var_keepdim(0), &[2.0, 1.125, 6.125, 24.5]);
    assert_eq!(x.std_keepdim(-1).dims().unwrap().as_slice(), [2, 1]);
    near(&x.std_with(-1, Variance { correction: 0, keepdim: true }), &[3.0822070, 1.0606602]);
    // The variance of one element cannot be estimated.
    near(&x.narrow(1, 0, 1).var(1), &[f64::NAN, f64::NAN]);
    // A large mean loses no digits.
    near(&(&x + 4096).var(1), &[12.666667, 1.5]);
    fails(&x.cast(DType::I32).var(0), &["i32"]);
    differentiates(&b, &[2, 5], |x| x.var(1));
    differentiates(&b, &[2, 5], |x| x.std_with(.., Variance { correction: 0, keepdim: false }));
}

#[test]
fn shapes_change() {
    let b = cpu();
    let x = Tensor::arange(&b, 24, DType::I64).reshape([2, 3, 4]);
    let dims = |t: &Tensor| t.dims().unwrap().to_vec();
    assert_eq!(dims(&x.reshape([-1, 4])), [6, 4]);
    assert_eq!(dims(&x.reshape([4i64, -1, 2])), [4, 3, 2]);
    assert_eq!(dims(&x.reshape(vec![24usize])), [24]);
    assert_eq!(dims(&x.reshape([-1])), [24]);
    fails(&x.reshape([-1, 5]), &["reshape", "24", "5"]);
    fails(&x.reshape([-1, -1]), &["reshape", "one"]);
    fails(&x.reshape([-2, 12]), &["-2"]);
    fails(&x.reshape([5, 5]), &["24", "25"]);
    assert_eq!(dims(&Tensor::zeros(&b, [0, 3], DType::F32).reshape([-1, 3])), [0, 3]);
    fails(&Tensor::zeros(&b, [0, 3], DType::F32).reshape([-1, 0]), &["0"]);
    assert_eq!(dims(&x.flatten(1, -1)), [2, 12]);
    assert_eq!(dims(&x.flatten(-3, 1)), [6, 4]);
    assert_eq!(dims(&x.flatten_all()), [24]);
    assert_eq!(dims(&Tensor::scalar(&b, 1, DType::F32).flatten_all()), [1]);
    fails(&x.flatten(2, 0), &["flatten"]);
    assert_eq!(dims(&x.permute(&[-1, 0, 1])), [4, 2, 3]);
    assert_eq!(dims(&x.unsqueeze(-1)), [2, 3, 4, 1]);
    assert_eq!(dims(&x.unsqueeze(0)), [1, 2, 3, 4]);
    assert_eq!(dims(&x.unsqueeze(-4).squeeze(-4)), [2, 3, 4]);
    fails(&x.unsqueeze(4), &["unsqueeze", "4"]);
    fails(&x.squeeze(-1), &["squeeze"]);
    let m = x.index(0);
    assert_eq!(m.t().to_vec::<i64>().unwrap(), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]);
    assert_eq!(dims(&m.index(0).t()), [4]);
    fails(&x.t(), &["transpose(-1, -2)"]);
    assert_eq!(x.sqr().index((1, 2, 3)).item::<i64>().unwrap(), 529);
    assert_eq!(v(&t(&b, [4], [-2.0, 0.5, 3.0, f32::NAN]).clamp(0, 1.0))[..3], [0.0, 0.5, 1.0]);
    assert!(v(&t(&b, [1], [f32::NAN]).clamp(0, 1))[0].is_nan());
    let low = t(&b, [2, 1], [0.0, 5.0]);
    assert_eq!(v(&t(&b, [2, 2], [-1.0, 2.0, 3.0, 9.0]).clamp(&low, 8)), [0.0, 2.0, 5.0, 8.0]);
    differentiates(&b, &[6], |x| x.clamp(-0.5, 0.8).sqr());
}

#[test]
fn tensors_are_joined_and_cut() {
    let b = cpu();
    let x = t(&b, [2, 2], [1.0, 2.0, 3.0, 4.0]);
    let y = t(&b, [2, 2], [5.0, 6.0, 7.0, 8.0]);
    assert_eq!(v(&Tensor::cat(&[&x, &y], 0)), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    assert_eq!(v(&Tensor::cat(&[x.clone(), y.clone()], -1)), [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
    let s = Tensor::stack(&[&x, &y], -1);
    assert_eq!(
        (s.dims().unwrap().to_vec(), v(&s)),
        (vec![2, 2, 2], vec![1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0])
    );
    assert_eq!(Tensor::stack(&[&x, &y, &x], 0).dims().unwrap().as_slice(), [3, 2, 2]);
    fails(&Tensor::stack(&[&x, &x.narrow(0, 0, 1)], 0), &["stack", "[2, 2]", "[1, 2]"]);
    fails(&Tensor::stack(&[&x, &y], 3), &["stack", "3"]);
    assert!(Tensor::stack::<Tensor>(&[], 0).check().is_err());
    let z = Tensor::arange(&b, 10, DType::F32).reshape([5, 2]);
    let sizes = |p: Vec<Tensor>| p.iter().map(|t| t.dims().unwrap()[0]).collect::<Vec<_>>();
    assert_eq!(sizes(z.chunk(2, 0).unwrap()), [3, 2]);
    assert_eq!(sizes(z.chunk(4, -2).unwrap()), [2, 2, 1]);
    assert_eq!(sizes(z.split(2, 0).unwrap()), [2, 2, 1]);
    let parts = z.split([1, 4], 0).unwrap();
    assert_eq!((v(&parts[0]), v(&parts[1])), (vec![0.0, 1.0], (2..10).map(f64::from).collect()));
    for (e, what) in [
        (z.split([1, 3], 0).unwrap_err(), "add up"),
        (z.split(0, 0).unwrap_err(), "0"),
        (z.chunk(0, 0).unwrap_err(), "chunk"),
        (z.chunk(2, 2).unwrap_err(), "2"),
    ] {
        assert!(e.to_string().contains(what) && e.to_string().contains("shared/api.rs"), "{e}");
    }
    differentiates(&b, &[5, 2], |x| {
        let p = x.split([2, 3], 0).unwrap();
        Tensor::cat(&[p[1].sqr(), p[0].clone()], 0)
    });
    differentiates(&b, &[4], |x| Tensor::stack(&[&x.sqr(), x], 1));
}

#[test]
fn indexing_is_numpys() {
    let b = cpu();
    let x = Tensor::arange(&b, 24, DType::I64).reshape([2, 3, 4]).eval().unwrap().clone();
    let is = |t: Tensor, dims: &[usize], want: &[i64]| {
        assert_eq!(t.to_vec::<i64>().unwrap_or_else(|e| panic!("{e}")), want);
        assert_eq!(t.dims().unwrap().as_slice(), dims);
    };
    is(x.index((0, 1..3, ..)), &[2, 4], &[4, 5, 6, 7, 8, 9, 10, 11]);
    is(x.index((1, -1)), &[4], &[20, 21, 22, 23]);
    is(x.index((.., .., -1)), &[2, 3], &[3, 7, 11, 15, 19, 23]);
    is(x.index((Ellipsis, 0)), &[2, 3], &[0, 4, 8, 12, 16, 20]);
    is(x.index((1, Ellipsis, 0)), &[3], &[12, 16, 20]);
    is(x.index((0, 0, 1..=2)), &[2], &[1, 2]);
    is(x.index((0, 0, -2..)), &[2], &[2, 3]);
    is(x.index((0, 0, ..-1)), &[3], &[0, 1, 2]);
    is(x.index((0, 0, 2..2)), &[0], &[]);
    is(x.index((0, 0, step(.., 3))), &[2], &[0, 3]);
    is(x.index((0, 0, step(1..4, 2))), &[2], &[1, 3]);
    is(x.index((0, 0, step(.., -1))), &[4], &[3, 2, 1, 0]);
    is(x.index((0, NewAxis, 2)), &[1, 4], &[8, 9, 10, 11]);
    let i = Tensor::from_slice(&b, [2, 2], &[2i64, 0, -1, 1]).unwrap();
    is(x.index((1, &i, 0)), &[2, 2], &[20, 12, 20, 16]);
    is(x.index(1usize..2usize).index((0, 0)), &[4], &[12, 13, 14, 15]);
    fails(&x.index(2), &["index", "2", "axis 0"]);
    fails(&x.index((0, -4)), &["-4", "axis 1"]);
    fails(&x.index((.., 1..9)), &["9", "axis 1"]);
    fails(&x.index((0, 0, 0, 0)), &["4 indices", "3 axes"]);
    fails(&x.index((Ellipsis, Ellipsis)), &["Ellipsis", "2 times"]);
    fails(&x.index((0, 0, 3..1)), &["3..1"]);
    fails(&x.index((0, 0, step(.., 0))), &["step"]);
    assert!(matches!(x.index((&i, &i)).check().unwrap_err(), Error::Unsupported { .. }));
    differentiates(&b, &[3, 4], |x| x.index((1.., step(.., -2))).sqr());
    differentiates(&b, &[3, 4], |x| x.index((-1, 1..3)).sqr());
}

#[test]
fn text_is_that_of_numpy() {
    let b = cpu();
    let x = t(&b, [2, 3], [1.0, -2.5, 3.0, 0.25, 10.0, 0.0]);
    assert_eq!(
        x.to_string(),
        "[[ 1.0000, -2.5000,  3.0000],\n [ 0.2500, 10.0000,  0.0000]]\nf32[2, 3] on cpu:0"
    );
    assert_eq!(format!("{x:.1}").lines().next(), Some("[[ 1.0, -2.5,  3.0],"));
    assert_eq!(t(&b, [2], [1.0, 20.0]).to_string(), "[ 1., 20.]\nf32[2] on cpu:0");
    assert_eq!(Tensor::scalar(&b, 7, DType::I32).to_string(), "7\ni32[] on cpu:0");
    assert_eq!(
        t(&b, [3], [f32::NAN, f32::INFINITY, 1.5]).to_string(),
        "[   nan,    inf, 1.5000]\nf32[3] on cpu:0"
    );
    assert_eq!(t(&b, [2], [1e-7, 1.0]).to_string(), "[1.0000e-7,  1.0000e0]\nf32[2] on cpu:0");
    assert_eq!(x.gt(0).index(1).to_string(), "[ true,  true, false]\nbool[3] on cpu:0");
    assert_eq!(Tensor::zeros(&b, [0, 2], DType::F32).to_string(), "[]\nf32[0, 2] on cpu:0");
    let big = Tensor::arange(&b, 10_000, DType::I64).reshape([100, 100]).to_string();
    assert!(big.starts_with("[[   0,    1,    2, ...,   97,   98,   99],\n"), "{big}");
    assert!(big.contains("...") && big.lines().count() == 8, "{big}");
    let cube = Tensor::arange(&b, 8, DType::I64).reshape([2, 2, 2]).to_string();
    assert_eq!(cube, "[[[0, 1],\n  [2, 3]],\n\n [[4, 5],\n  [6, 7]]]\ni64[2, 2, 2] on cpu:0");
    // An error is displayed as text, too.
    let wrong = x.matmul(&x).to_string();
    assert!(wrong.contains("no value") && wrong.contains("matmul"), "{wrong}");
}

#[test]
fn options_and_builders() {
    let b = cpu();
    let f = Tensor::full(&b, [2], 2.5, DType::F32);
    assert_eq!((v(&f), f.dtype().unwrap()), (vec![2.5, 2.5], DType::F32));
    let x = Tensor::arange(&b, 25, DType::F32).reshape([1, 1, 5, 5]);
    let w = Tensor::ones(&b, [1, 1, 3, 3], DType::F32);
    let y = x.conv(&w, Conv::new(2).stride([2, 2]).padding([1, 1]));
    // torch.nn.functional.conv2d(x, w, stride=2, padding=1)
    assert_eq!(v(&y), [12.0, 27.0, 24.0, 63.0, 108.0, 81.0, 72.0, 117.0, 84.0]);
    let two =
        Tensor::cat(&[&x, &x], 1).conv(&Tensor::cat(&[&w, &w], 0), Conv::new(2).groups(2).dilation([2, 2]));
    assert_eq!(v(&two), [108.0, 108.0]);
    assert_eq!(v(&x.pool(Pool::max([2, 2]))), [6.0, 8.0, 16.0, 18.0]);
    assert_eq!(v(&x.pool(Pool::avg([3, 3]).stride([2, 2]))), [6.0, 8.0, 16.0, 18.0]);
    let q = t(&b, [1, 1, 2, 4], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    let a = q.attention(&q, &q, Attention { causal: true, ..Attention::default() });
    assert_eq!(v(&a)[..4], [1.0, 0.0, 0.0, 0.0]);
    let e = 1.0 / (1.0 + 0.5f64.exp());
    near(&q.attention(&q, &q, Attention::default()).index((0, 0, 0)), &[1.0 - e, e, 0.0, 0.0]);
}

#[test]
fn labels_outside_of_the_classes_are_errors() {
    let b = cpu();
    let x = t(&b, [3, 4], [0.1, 0.9, -0.3, 0.2, 1.0, 0.0, 0.0, 2.0, -1.0, 0.5, 0.25, 0.0]);
    let labels = |v: [i64; 3]| Tensor::from_slice(&b, [3], &v).unwrap();
    // torch.nn.functional.cross_entropy
    near(&x.cross_entropy(&labels([1, 3, 0])), &[1.2540722]);
    near(&x.cross_entropy(&labels([1, -100, 0])), &[1.6342024]);
    near(&x.cross_entropy(&labels([-100; 3])), &[f64::NAN]);
    let none = CrossEntropy { ignore_index: None };
    let zero = CrossEntropy { ignore_index: Some(0) };
    near(&x.cross_entropy_with(&labels([1, 3, 0]), zero), &[0.6517280]);
    for (l, options, at, value) in [
        ([1, -1, 0], CrossEntropy::default(), 1, -1),
        ([0, 1, 4], CrossEntropy::default(), 2, 4),
        ([-100, 1, 4], none, 0, -100),
        ([7, -1, 4], CrossEntropy::default(), 0, 7),
    ] {
        let labels = labels(l);
        let loss = x.cross_entropy_with(&labels, options);
        let e = loss.item::<f32>().unwrap_err();
        assert!(
            matches!(&e, Error::Index { op, found: Some(f), range, .. } if op == "cross_entropy" && *f == (at, value) && range == "0..4"),
            "{e}"
        );
        assert!(e.to_string().contains("shared/api.rs"), "{e}");
        // The error is reported once.
        assert_eq!(v(&x.sum(..)).len(), 1);
    }
    // Labels of any integer dtype, computed in the same plan, and dropped before the loss is read.
    let some = Tensor::from_slice(&b, [6], &[1u8, 2, 3, 9, 1, 0]).unwrap();
    let loss = x.cross_entropy(&some.narrow(0, 2, 3));
    drop(some);
    let e = loss.item::<f32>().unwrap_err();
    assert!(matches!(&e, Error::Index { found: Some((1, 9)), .. }), "{e}");
    // The error is reported when reading a gradient, too.
    let w = x.requires_grad().unwrap();
    let bad = labels([0, 1, -1]);
    let g = w.cross_entropy(&bad).backward().unwrap();
    let e = g.get(&w).unwrap().to_vec::<f32>().unwrap_err();
    assert!(matches!(&e, Error::Index { op, found: Some((2, -1)), .. } if op == "cross_entropy"), "{e}");
    let g = w.cross_entropy(&labels([2, -100, -100])).backward().unwrap();
    let g = v(g.get(&w).unwrap());
    assert!(g[4..].iter().all(|x| *x == 0.0) && g[2] < 0.0, "{g:?}");
    let l = labels([2, -100, 1]);
    differentiates(&b, &[3, 4], |x| x.cross_entropy(&l));
    fails(&x.cross_entropy(&labels([0; 3]).cast(DType::F32)), &["cross_entropy", "f32"]);
    fails(&x.cross_entropy(&labels([0; 3]).narrow(0, 0, 2)), &["cross_entropy", "[3, 4]", "[2]"]);
    // [n, classes, d]
    let y = x.reshape([1, 4, 3]);
    near(&y.cross_entropy(&labels([3, 0, 1]).reshape([1, 3])), &[1.3223478]);
}

#[test]
fn terminal_calls_name_the_callers_line() {
    let b = cpu();
    let x = t(&b, [2], [1.0, 2.0]);
    let line = line!() + 1;
    let e = x.item::<f32>().unwrap_err().to_string();
    assert!(e.contains(&format!("shared/api.rs:{line}")) && e.contains("2 elements"), "{e}");
    let other = cpu();
    let y = t(&other, [2], [1.0, 2.0]);
    let e = (&x + &y).check().unwrap_err().to_string();
    assert!(e.contains("clone") && e.contains(".to(&backend)"), "{e}");
    assert_eq!(v(&(&x + y.to(&b).unwrap())), [2.0, 4.0]);
    let line = line!() + 1;
    let e = halcyon::eval(&[&x + 1, &y + 1]).unwrap_err().to_string();
    assert!(e.contains(&format!("shared/api.rs:{line}")), "{e}");
}

#[test]
fn devices_open_by_name() {
    assert_eq!(Backend::open("cpu").unwrap().id(), "cpu:0");
    assert_eq!(Backend::open("CPU:0").unwrap().id(), "cpu:0");
    assert!(!Backend::open("auto").unwrap().id().is_empty());
    assert!(matches!(Backend::open("gpux").unwrap_err(), Error::Argument { .. }));
    assert!(Backend::open("cpu:99").is_err());
}

/// Number of plans that `f` makes.
fn plans(b: &Backend, f: impl FnOnce()) -> u64 {
    let before = b.cache_stats().plans_built;
    f();
    b.cache_stats().plans_built - before
}

#[test]
fn an_epoch_of_batches_is_one_plan() {
    for level in [Level::O0, Level::O2] {
        let b = Backend::builder().backend_type(BackendType::Cpu).level(level).build().unwrap();
        let n = 100;
        let x: Vec<f32> = (0..n * 6).map(|i| (i * 7 % 31) as f32 / 9.0).collect();
        let labels: Vec<i64> = (0..n).map(|i| (i * 5 % 3) as i64).collect();
        let data = Tensor::from_slice(&b, [n, 6], &x).unwrap();
        let classes = Tensor::from_slice(&b, [n], &labels).unwrap();
        let w: Vec<f32> = (0..18).map(|i| (i as f32 - 9.0) / 20.0).collect();
        let w = Tensor::from_slice(&b, [6, 3], &w).unwrap().requires_grad().unwrap();
        // Reshaped and scaled first, as images are.
        let scaled = (data.reshape([n, 2, 3]) / 2.0).reshape([-1, 6]);
        let size = 8;
        let mut got = vec![];
        let mut epoch = || {
            for i in 0..n / size {
                let (x, y) = (scaled.narrow(0, i * size, size), classes.narrow(0, i * size, size));
                let loss = x.matmul(&w).cross_entropy(&y);
                let grads = loss.backward().unwrap();
                let g = grads.get(&w).unwrap().clone();
                halcyon::eval(&[loss.clone(), g.clone()]).unwrap();
                got.push((loss.item::<f64>().unwrap(), v(&g)));
            }
        };
        assert_eq!(plans(&b, &mut epoch), 1, "{level}");
        // Batches that are separate tensors give the same numbers.
        for (i, (loss, grad)) in got.iter().enumerate() {
            let rows = &x[i * size * 6..(i + 1) * size * 6];
            let own = Tensor::from_slice(&b, [size, 6], rows).unwrap() / 2.0;
            let y = Tensor::from_slice(&b, [size], &labels[i * size..(i + 1) * size]).unwrap();
            let want = own.matmul(&w).cross_entropy(&y);
            near(&want, &[*loss]);
            near(want.backward().unwrap().get(&w).unwrap(), grad);
        }
        // Shorter batches need a plan of their own.
        let last = || {
            for at in [0, n - 4, 50] {
                let x = scaled.narrow(0, at, 4).sum(1);
                let want: f64 = x_sum(&data, at);
                assert!((v(&x)[0] - want).abs() < 1e-4, "{} {want}", v(&x)[0]);
            }
        };
        assert!(plans(&b, last) <= 2, "one for the parts, one for what they are compared with");
    }
}

fn x_sum(data: &Tensor, row: usize) -> f64 {
    data.index(row).sum(..).item::<f64>().unwrap() / 2.0
}

#[test]
fn starts_are_run_time_arguments_along_every_axis() {
    let b = cpu();
    let x = Tensor::arange(&b, 3 * 20 * 4, DType::F32).eval().unwrap().reshape([3, 20, 4]);
    let made = plans(&b, || {
        for i in 0..20 {
            let y = x.narrow(1, i, 1).sum(..).item::<f64>().unwrap();
            let want: f64 = (0..3).flat_map(|a| (0..4).map(move |c| (a * 80 + i * 4 + c) as f64)).sum();
            assert_eq!(y, want);
        }
    });
    assert_eq!(made, 1);
    let made = plans(&b, || {
        for i in 0..15 {
            let y = x.index((1, i..i + 5)).to_vec::<f32>().unwrap();
            assert_eq!(y, (0..20).map(|k| (80 + i * 4 + k) as f32).collect::<Vec<_>>());
        }
    });
    assert_eq!(made, 1);
    // Bounds are checked when `narrow` is called.
    fails(&x.narrow(1, 18, 3), &["20"]);
    fails(&x.narrow(-4, 0, 1), &["-4"]);
    // The gradient with respect to narrowed data.
    let w = x.requires_grad().unwrap();
    let made = plans(&b, || {
        for i in 0..18 {
            let g = w.narrow(-2, i, 2).sqr().sum(..).backward().unwrap();
            let g = v(g.get(&w).unwrap());
            for (k, g) in g.iter().enumerate() {
                let row = k / 4 % 20;
                let inside = (i..i + 2).contains(&row);
                assert_eq!(*g, if inside { 2.0 * k as f64 } else { 0.0 }, "{i} {k}");
            }
        }
    });
    assert_eq!(made, 1);
    // A position computed on the device.
    let at = Tensor::scalar(&b, 2, DType::I32) + 1;
    assert_eq!(v(&x.narrow_at(1, &at, 2).index((0, 0))), [12.0, 13.0, 14.0, 15.0]);
    let far = x.narrow_at(1, &(at + 40), 2);
    assert!(matches!(far.to_vec::<f32>().unwrap_err(), Error::Index { .. }));
    // A traced graph keeps the literal start.
    let g = Tensor::trace(&[("x", &x)], &[("y", &x.narrow(1, 3, 2))]).unwrap();
    assert!(g.nodes().iter().all(|n| n.op.name() != "slice_at"), "{g}");
}

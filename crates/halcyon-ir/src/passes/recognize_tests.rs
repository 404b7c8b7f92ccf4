//! Tests that every written-out form becomes its composite and keeps its values, and that other graphs are
//! unchanged.

use super::*;
use crate::composite::CompositeKind;
use crate::data::ConstData;
use crate::passes::{COMPOSITES, Level, PassOptions, RECOGNITION, optimize};
use crate::reference::eval;
use crate::shape::TensorType;
use std::hash::BuildHasher;

struct Case {
    g: Graph,
    inputs: Vec<ConstData>,
    state: u64,
}

impl Case {
    fn new() -> Case {
        let state = std::hash::RandomState::new().hash_one(0);
        println!("seed {state}");
        Case { g: Graph::new(), inputs: vec![], state }
    }

    fn data(&mut self, dims: &[usize]) -> ConstData {
        let n: usize = dims.iter().product();
        let mut next = || {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2.0
        };
        let v: Vec<f32> = (0..n).map(|_| next()).collect();
        ConstData::from_slice(dims, &v).unwrap()
    }

    fn input(&mut self, dims: &[usize]) -> NodeId {
        let d = self.data(dims);
        self.inputs.push(d);
        let name = format!("x{}", self.inputs.len());
        self.g.input(&name, TensorType::new(DType::F32, dims))
    }

    /// Runs the passes of O2 for a device that claims what `claims` accepts, and checks the values. Returns
    /// the names of the composites and activations left, and the number that the pass created.
    fn check(
        mut self,
        y: NodeId,
        claims: impl Fn(&Composite) -> bool,
        without: &str,
    ) -> (Vec<String>, usize) {
        if self.g.outputs().is_empty() {
            self.g.output("y", y);
        }
        let mut options = PassOptions::at(Level::O2);
        options.without.insert(without.into());
        let (h, receipts) = optimize(&self.g, &options, &claims).unwrap();
        let (want, got) = (eval(&self.g, &self.inputs, &[]).unwrap(), eval(&h, &self.inputs, &[]).unwrap());
        for (a, b) in want.iter().zip(&got) {
            assert_eq!(a.dims, b.dims);
            for (a, b) in a.to_vec::<f32>().iter().zip(b.to_vec::<f32>()) {
                assert!((a - b).abs() <= 2e-5 * a.abs().max(1.0), "{a} {b}\n{}\n{h}", self.g);
            }
        }
        let name = |n: &crate::graph::Node| match &n.op {
            Op::Composite(c) => Some(c.name().to_string()),
            Op::Scalar(ScalarOp::Gelu | ScalarOp::GeluTanh | ScalarOp::Silu) => Some(n.op.name()),
            _ => None,
        };
        let made = receipts.iter().filter(|r| r.transformation == RECOGNITION).map(|r| r.count).sum();
        (h.nodes().iter().filter_map(name).collect(), made)
    }

    fn whole(self, y: NodeId) -> (Vec<String>, usize) {
        self.check(y, |_| true, "")
    }
}

fn one(name: &str) -> (Vec<String>, usize) {
    (vec![name.to_string()], 1)
}

/// `softmax(q kᵀ scale + mask) v` on `[b, h, s, d]` or fewer axes. `form` varies the position of the scale.
fn attention(c: &mut Case, head: &[usize], form: usize, mask: Option<&[usize]>) -> NodeId {
    let (sq, sk, d, dv) = (5, 7, 4, 3);
    let dims = |a: usize, b: usize| [head, &[a, b]].concat();
    let (q, k, v) = (c.input(&dims(sq, d)), c.input(&dims(sk, d)), c.input(&dims(sk, dv)));
    let mask = mask.map(|m| c.input(m));
    let (mut q, mut k, last) = (q, k, head.len() + 1);
    let g = &mut c.g;
    if form == 2 {
        let r = g.lit(q, 0.6);
        q = g.mul(q, r).unwrap();
        k = g.mul(r, k).unwrap();
    }
    let mut kt = g.transpose(k, last - 1, last).unwrap();
    if form == 3 {
        let r = g.lit(kt, 0.4);
        kt = g.mul(kt, r).unwrap();
    }
    let mut s = g.matmul(q, kt).unwrap();
    if form < 2 {
        let c = g.lit(s, if form == 0 { 2.0 } else { 0.5 });
        s = if form == 0 { g.div(s, c).unwrap() } else { g.mul(c, s).unwrap() };
    }
    if let Some(m) = mask {
        s = if form.is_multiple_of(2) { g.add(s, m).unwrap() } else { g.add(m, s).unwrap() };
    }
    let p = g.softmax(s, last).unwrap();
    g.matmul(p, v).unwrap()
}

#[test]
fn attention_is_found_in_every_form() {
    for head in [&[2, 3][..], &[2], &[]] {
        for form in 0..5 {
            let mut c = Case::new();
            let y = attention(&mut c, head, form, None);
            assert_eq!(c.whole(y), one("attention"), "{head:?} {form}");
        }
    }
    for mask in [&[2, 3, 5, 7][..], &[2, 1, 1, 7], &[1, 1, 5, 7], &[5, 7], &[7]] {
        for form in 0..5 {
            let mut c = Case::new();
            let y = attention(&mut c, &[2, 3], form, Some(mask));
            assert_eq!(c.whole(y), one("attention"), "{mask:?} {form}");
        }
    }
}

#[test]
fn a_mask_is_computed_before_it_is_repeated() {
    let mut c = Case::new();
    let (q, k, v) = (c.input(&[2, 3, 5, 4]), c.input(&[2, 3, 7, 4]), c.input(&[2, 3, 7, 4]));
    let m = c.input(&[2, 1, 1, 7]);
    let g = &mut c.g;
    let zero = g.lit(m, 0.0);
    let b = g.scalar(ScalarOp::Gt, &[m, zero]).unwrap();
    let b = g.expand(b, &[2, 1, 5, 7].into()).unwrap();
    let (yes, no) = (g.full(DType::F32, [1usize], 0.0), g.full(DType::F32, [1usize], f64::from(f32::MIN)));
    let m = g.select(b, yes, no).unwrap();
    let kt = g.transpose(k, 2, 3).unwrap();
    let s = g.matmul(q, kt).unwrap();
    let s = g.add(s, m).unwrap();
    let p = g.softmax(s, 3).unwrap();
    let y = g.matmul(p, v).unwrap();
    g.output("y", y);
    let (h, n) = optimize(&c.g, &PassOptions::at(Level::O2), &|_| true).unwrap();
    assert!(n.iter().any(|r| r.transformation == RECOGNITION && r.count == 1), "{n:?}");
    let attention =
        h.nodes().iter().find(|n| matches!(&n.op, Op::Composite(c) if c.kind == CompositeKind::Attention));
    let mask = attention.unwrap().inputs[3];
    assert_eq!(h.shape(mask).known().unwrap()[..], [2, 1, 1, 7], "{h}");
    assert_eq!(c.whole(y), one("attention"));
}

#[test]
fn other_patterns_and_shared_nodes_are_not_attention() {
    // The weights are also an output.
    let mut c = Case::new();
    let y = attention(&mut c, &[2, 3], 0, None);
    let p = c.g.node(y).inputs[0];
    c.g.output("p", p);
    c.g.output("y", y);
    assert_eq!(c.whole(y), one_left("softmax"));
    // The scores are also an output.
    let mut c = Case::new();
    let y = attention(&mut c, &[2, 3], 1, None);
    let s = c.g.node(c.g.node(y).inputs[0]).inputs[0];
    c.g.output("s", s);
    c.g.output("y", y);
    assert_eq!(c.whole(y), one_left("softmax"));
    // The softmax is over queries.
    let mut c = Case::new();
    let (q, k, v) = (c.input(&[2, 3, 5, 4]), c.input(&[2, 3, 4, 7]), c.input(&[2, 3, 7, 3]));
    let s = c.g.matmul(q, k).unwrap();
    let p = c.g.softmax(s, 2).unwrap();
    let y = c.g.matmul(p, v).unwrap();
    assert_eq!(c.whole(y), one_left("softmax"));
    // The scale is a tensor.
    let mut c = Case::new();
    let (q, k, v, t) =
        (c.input(&[2, 3, 5, 4]), c.input(&[2, 3, 4, 7]), c.input(&[2, 3, 7, 3]), c.input(&[7]));
    let s = c.g.matmul(q, k).unwrap();
    let s = c.g.mul(s, t).unwrap();
    let p = c.g.softmax(s, 3).unwrap();
    let y = c.g.matmul(p, v).unwrap();
    assert_eq!(c.whole(y), one_left("softmax"));
}

fn one_left(name: &str) -> (Vec<String>, usize) {
    (vec![name.to_string()], 0)
}

#[test]
fn declined_and_disabled_patterns_are_unchanged() {
    let build = || {
        let mut c = Case::new();
        let y = attention(&mut c, &[2, 3], 0, None);
        (c, y)
    };
    let (c, y) = build();
    assert_eq!(c.check(y, |c| c.kind == CompositeKind::Softmax, ""), one_left("softmax"));
    let (c, y) = build();
    assert_eq!(c.check(y, |_| true, RECOGNITION), one_left("softmax"));
    let (c, y) = build();
    assert_eq!(c.check(y, |_| true, COMPOSITES), (vec![], 0));
    let mut c = Case::new();
    let y = norm(&mut c, 0, 1, true, Some(&[6]), Some(&[6]));
    assert_eq!(c.check(y, |_| false, ""), (vec![], 0));
}

/// A written-out norm over the last `axes` of `[3, 4, 6]`.
fn norm(
    c: &mut Case,
    form: usize,
    axes: usize,
    centred: bool,
    scale: Option<&[usize]>,
    bias: Option<&[usize]>,
) -> NodeId {
    let x = c.input(&[3, 4, 6]);
    let (scale, bias) = (scale.map(|s| c.input(s)), bias.map(|b| c.input(b)));
    let g = &mut c.g;
    let axes: Vec<usize> = (3 - axes..3).collect();
    let d = if centred {
        let m = g.mean(x, &axes, true).unwrap();
        g.sub(x, m).unwrap()
    } else {
        x
    };
    let two = g.lit(d, 2.0);
    let sq = if form.is_multiple_of(2) {
        g.scalar(ScalarOp::Pow, &[d, two]).unwrap()
    } else {
        g.mul(d, d).unwrap()
    };
    let v = g.mean(sq, &axes, true).unwrap();
    let eps = g.lit(v, 1e-5);
    let v = if form.is_multiple_of(2) { g.add(v, eps).unwrap() } else { g.add(eps, v).unwrap() };
    let root = g.scalar(ScalarOp::Sqrt, &[v]).unwrap();
    let mut y = match form {
        0 | 1 => g.div(d, root).unwrap(),
        2 => {
            let r = g.scalar(ScalarOp::Recip, &[root]).unwrap();
            g.mul(d, r).unwrap()
        }
        3 => {
            let one = g.lit(root, 1.0);
            let r = g.div(one, root).unwrap();
            g.mul(r, d).unwrap()
        }
        _ => {
            let r = g.scalar(ScalarOp::Rsqrt, &[v]).unwrap();
            g.mul(d, r).unwrap()
        }
    };
    if let Some(s) = scale {
        y = if form.is_multiple_of(2) { g.mul(y, s).unwrap() } else { g.mul(s, y).unwrap() };
    }
    if let Some(b) = bias {
        y = g.add(y, b).unwrap();
    }
    y
}

#[test]
fn norms_are_found_in_every_form() {
    for form in 0..5 {
        for (axes, row) in [(1, &[6][..]), (2, &[4, 6]), (3, &[3, 4, 6])] {
            let mut c = Case::new();
            let y = norm(&mut c, form, axes, true, Some(row), Some(row));
            assert_eq!(c.whole(y), one("layer_norm"), "{form} {axes}");
            let mut c = Case::new();
            let y = norm(&mut c, form, axes, true, Some(row), None);
            assert_eq!(c.whole(y), one("layer_norm"), "{form} {axes}");
        }
        let mut c = Case::new();
        let y = norm(&mut c, form, 1, false, Some(&[6]), None);
        assert_eq!(c.whole(y), one("rms_norm"), "{form}");
        // RMS norm has no bias, so a bias after it stays an addition.
        let mut c = Case::new();
        let y = norm(&mut c, form, 1, false, Some(&[6]), Some(&[6]));
        assert_eq!(c.whole(y), one("rms_norm"), "{form}");
    }
}

#[test]
fn other_patterns_are_not_norms() {
    let none = (vec![], 0);
    // A scale per row, and no scale.
    let mut c = Case::new();
    let y = norm(&mut c, 0, 1, true, Some(&[4, 1]), None);
    assert_eq!(c.whole(y), none);
    let mut c = Case::new();
    let y = norm(&mut c, 0, 1, true, None, Some(&[6]));
    assert_eq!(c.whole(y), none);
    // RMS norm is over one axis only.
    let mut c = Case::new();
    let y = norm(&mut c, 0, 2, false, Some(&[4, 6]), None);
    assert_eq!(c.whole(y), none);
    // The variance is also an output.
    let mut c = Case::new();
    let y = norm(&mut c, 4, 1, true, Some(&[6]), None);
    let v = c.g.nodes().iter().position(|n| n.op == Op::Scalar(ScalarOp::Rsqrt)).unwrap();
    c.g.output("v", NodeId(v as u32));
    c.g.output("y", y);
    assert_eq!(c.whole(y), none);
    // The mean is over another axis than the variance: this is RMS norm of a difference.
    let mut c = Case::new();
    let (x, s) = (c.input(&[3, 4, 6]), c.input(&[6]));
    let g = &mut c.g;
    let m = g.mean(x, &[1], true).unwrap();
    let d = g.sub(x, m).unwrap();
    let sq = g.mul(d, d).unwrap();
    let v = g.mean(sq, &[2], true).unwrap();
    let eps = g.lit(v, 1e-5);
    let v = g.add(v, eps).unwrap();
    let r = g.scalar(ScalarOp::Rsqrt, &[v]).unwrap();
    let y = g.mul(d, r).unwrap();
    let y = g.mul(y, s).unwrap();
    assert_eq!(c.whole(y), one("rms_norm"));
}

/// GELU by erf or tanh. `form` varies the position of the halves and the order of the products.
fn gelu(c: &mut Case, tanh: bool, form: usize, half: f64) -> NodeId {
    let x = c.input(&[5, 9]);
    let g = &mut c.g;
    let u = if tanh {
        let three = g.lit(x, 3.0);
        let cube = if form.is_multiple_of(2) {
            g.scalar(ScalarOp::Pow, &[x, three]).unwrap()
        } else {
            let s = g.mul(x, x).unwrap();
            g.mul(x, s).unwrap()
        };
        let k = g.lit(x, 0.044715);
        let t = g.mul(cube, k).unwrap();
        let s = g.add(x, t).unwrap();
        let k = g.lit(x, FRAC_2_PI.sqrt());
        g.mul(k, s).unwrap()
    } else if form.is_multiple_of(2) {
        let r = g.lit(x, std::f64::consts::SQRT_2);
        g.div(x, r).unwrap()
    } else {
        let r = g.lit(x, FRAC_1_SQRT_2);
        g.mul(x, r).unwrap()
    };
    let e = g.scalar(if tanh { ScalarOp::Tanh } else { ScalarOp::Erf }, &[u]).unwrap();
    let (one, h) = (g.lit(e, 1.0), g.lit(e, half));
    let e = if form == 1 { g.add(one, e).unwrap() } else { g.add(e, one).unwrap() };
    match form {
        0 => {
            let y = g.mul(x, e).unwrap();
            g.mul(y, h).unwrap()
        }
        1 => {
            let a = g.mul(h, x).unwrap();
            g.mul(a, e).unwrap()
        }
        _ => {
            let a = g.mul(e, h).unwrap();
            g.mul(x, a).unwrap()
        }
    }
}

#[test]
fn activations_are_found_in_every_form() {
    for form in 0..3 {
        for (tanh, name) in [(false, "gelu"), (true, "gelu_tanh")] {
            let mut c = Case::new();
            let y = gelu(&mut c, tanh, form, 0.5);
            assert_eq!(c.whole(y), one(name), "{form}");
            // Activations are recognised even if the device claims nothing.
            let mut c = Case::new();
            let y = gelu(&mut c, tanh, form, 0.5);
            assert_eq!(c.check(y, |_| false, ""), one(name), "{form}");
            // With another factor it is not GELU.
            let mut c = Case::new();
            let y = gelu(&mut c, tanh, form, 0.51);
            assert_eq!(c.whole(y), (vec![], 0), "{form}");
        }
    }
    let mut c = Case::new();
    let x = c.input(&[5, 9]);
    let s = c.g.scalar(ScalarOp::Sigmoid, &[x]).unwrap();
    let y = c.g.mul(s, x).unwrap();
    assert_eq!(c.whole(y), one("silu"));
    // The gate is computed from another value.
    let mut c = Case::new();
    let (x, z) = (c.input(&[5, 9]), c.input(&[5, 9]));
    let s = c.g.scalar(ScalarOp::Sigmoid, &[z]).unwrap();
    let y = c.g.mul(s, x).unwrap();
    assert_eq!(c.whole(y), (vec![], 0));
    // Half types would round at other places.
    let mut c = Case::new();
    let x = c.input(&[5, 9]);
    let x = c.g.cast(x, DType::F16).unwrap();
    let s = c.g.scalar(ScalarOp::Sigmoid, &[x]).unwrap();
    let y = c.g.mul(s, x).unwrap();
    let y = c.g.cast(y, DType::F32).unwrap();
    assert_eq!(c.whole(y), (vec![], 0));
}

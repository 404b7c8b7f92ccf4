//! Composites with the names of built-in ones, but with operands, results or attributes that those do not
//! have: the body decides what they compute. No kernel or gradient of the built-in ones may take them for its
//! own.

use halcyon::ir::composite::{Attr, Attrs};
use halcyon::prelude::*;
use halcyon::{Scalar, composite};
use halcyon_test::Rng;
use halcyon_test::devices::devices;

type Body = fn(&[Tensor]) -> Tensor;

/// Name, attributes, shapes of the operands, body.
fn cases() -> Vec<(&'static str, Attrs, Vec<Vec<usize>>, Body)> {
    let of = |all: &[&(&str, Attr)]| all.iter().map(|a| (a.0.to_string(), a.1.clone())).collect::<Attrs>();
    let (axis, eps) = (&("axis", Attr::Int(1)), &("eps", Attr::Float(Scalar::F(1e-5))));
    let scale = &("scale", Attr::Float(Scalar::F(0.5)));
    let heads = vec![vec![1, 2, 4, 8], vec![1, 2, 6, 8], vec![1, 2, 6, 8]];
    vec![
        ("softmax", of(&[axis]), vec![vec![64, 96]], |x| x[0].narrow(1, 0, 1)),
        ("softmax", of(&[axis]), vec![vec![64, 96]], |x| x[0].cast(DType::F16).exp()),
        ("softmax", of(&[&("axis", Attr::Int(9))]), vec![vec![8, 96]], |x| x[0].sqr()),
        ("log_softmax", of(&[axis]), vec![vec![64, 96]], |x| x[0].sum(1)),
        ("rms_norm", of(&[eps]), vec![vec![64, 96], vec![96]], |x| x[0].narrow(1, 3, 2)),
        ("rms_norm", of(&[eps]), vec![vec![4, 6], vec![6], vec![6]], |x| &x[0] * &x[2]),
        ("layer_norm", of(&[axis, eps]), vec![vec![8, 6]], |x| x[0].sqr()),
        ("layer_norm", of(&[axis, eps]), vec![vec![64, 96], vec![96]], |x| x[0].sum(0)),
        ("attention", of(&[scale]), heads, |x| x[0].narrow(3, 0, 1)),
        ("attention", of(&[scale]), vec![vec![12]], |x| x[0].tanh()),
        ("attention", of(&[scale]), vec![vec![4, 5], vec![4, 5], vec![5]], |x| &x[0] * &x[2]),
    ]
}

#[test]
fn the_body_decides() {
    if halcyon_test::left_out("the_body_decides") {
        return;
    }
    let mut rng = Rng::fresh("named composites");
    for level in [Level::O0, Level::O2] {
        for b in devices("named composites", level) {
            for (name, attrs, shapes, body) in cases() {
                let who = format!("{name} {attrs:?} on {}", b.id());
                let x: Vec<Tensor> = shapes
                    .iter()
                    .map(|s| Tensor::from_slice(&b, &s[..], &rng.f32s(s.iter().product())).unwrap())
                    .map(|t| t.requires_grad().unwrap())
                    .collect();
                let run = |p: &[Tensor]| {
                    composite(name, attrs.clone(), &p.iter().collect::<Vec<_>>(), |x| Ok(body(x)))
                };
                let close = |a: &Tensor, b: &Tensor| {
                    assert_eq!(a.dims().unwrap(), b.dims().unwrap(), "{who}");
                    for (a, b) in a.to_vec::<f64>().unwrap().iter().zip(b.to_vec::<f64>().unwrap()) {
                        assert!((a - b).abs() <= 1e-3 * b.abs().max(0.1), "{who}: {a} {b}");
                    }
                };
                close(&run(&x).unwrap(), &body(&x));
                let sum = |y: Tensor| Ok((&y * &y).sum(..));
                let (_, got) = value_and_grad(&x, |p| sum(run(p)?)).unwrap();
                let (_, want) = value_and_grad(&x, |p| sum(body(p))).unwrap();
                got.iter().zip(&want).for_each(|(a, b)| close(a, b));
            }
        }
    }
}

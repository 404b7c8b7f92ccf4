use super::harness::*;
use halcyon_ir::kernel::templates::softmax::lower;
use halcyon_ir::layout::View;
use halcyon_ir::target::Caps;
use halcyon_ir::{DType, Graph};

fn both(make: impl Fn() -> Input, axis: usize) {
    // 16-bit types are rounded after every op: up to three times before the last rounding.
    let steps = match make().operand.dtype {
        DType::F16 => 3.0 * 2f64.powi(12),
        DType::BF16 => 3.0 * 2f64.powi(15),
        _ => 0.0,
    };
    check(lower, &[make()], 16.0 + steps, |g, v| g.softmax(v[0], axis));
    check(lower, &[make()], 32.0 + steps, |g, v| g.log_softmax(v[0], axis));
}

#[test]
fn every_axis_and_float_dtype() {
    for (shape, axis) in [
        (vec![7], 0),
        (vec![3, 70], 1),
        (vec![70, 3], 0),
        (vec![2, 65, 5], 1),
        (vec![2, 1, 3], 1),
        (vec![2, 1100], 1),
    ] {
        for d in DType::native().filter(|d| d.is_float()) {
            both(|| Input::dense(&mut Rng::new(31), d, &shape), axis);
        }
    }
}

#[test]
fn masked_rows_large_values_and_nan() {
    for n in [5, 80] {
        let make = || {
            let mut x = Input::dense(&mut Rng::new(32), DType::F32, &[6, n]);
            for i in 0..n {
                x.set(i, f64::NEG_INFINITY);
                x.set(n + i, if i % 3 == 0 { 1e4 + i as f64 } else { f64::NEG_INFINITY });
                x.set(2 * n + i, -1e30);
            }
            x.set(3 * n + 2, f64::NAN);
            x.set(4 * n + 1, f64::INFINITY);
            x
        };
        both(make, 1);
        both(
            || {
                let mut x = make();
                x.operand.view = View::dense(&[2, 3, n]);
                x
            },
            1,
        );
    }
}

#[test]
fn many_interleaved_rows_take_an_item_each() {
    let mut r = Rng::new(33);
    let gpu = &devices()[..1];
    let x = [Input::dense(&mut r, DType::F32, &[64, 260])];
    check_on(gpu, lower, &x, 16.0, |g, v| g.softmax(v[0], 0));
    // On the same device with more compute units, each row gets a workgroup.
    let wide = Caps { compute_units: Some(100), ..gpu[0].clone() };
    check_on(&[wide], lower, &x, 16.0, |g, v| g.softmax(v[0], 0));
}

#[test]
fn an_offset_is_taken_and_a_transpose_declined() {
    let mut r = Rng::new(34);
    let v = View::dense(&[4, 66]).slice(&[2, 0], &[1, 1], &[2, 66]);
    let x = Input::random(&mut r, DType::F32, v);
    check(lower, &[x], 16.0, |g: &mut Graph, v| g.softmax(v[0], 1));
    let x = Input::random(&mut r, DType::F32, View::dense(&[4, 6]).permute(&[1, 0]));
    let mut g = Graph::new();
    let i = g.input("x", halcyon_ir::TensorType::new(DType::F32, [6, 4]));
    let y = g.softmax(i, 1).unwrap();
    let out = Input::dense(&mut r, DType::F32, &[6, 4]).operand;
    let e = lower(&g.node(y).op, &[x.operand], &[out], &devices()[0]).unwrap_err();
    assert_eq!(e.dense, [0]);
}

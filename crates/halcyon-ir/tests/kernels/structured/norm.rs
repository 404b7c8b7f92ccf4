use super::harness::*;
use halcyon_ir::kernel::templates::norm::lower;
use halcyon_ir::{DType, Graph, TensorType};

fn layer_norm(r: &mut Rng, d: DType, w: DType, shape: &[usize], axis: usize, bias: bool) {
    let mut x = vec![Input::dense(r, d, shape), Input::dense(r, w, &shape[axis..])];
    if bias {
        x.push(Input::dense(r, w, &shape[axis..]));
    }
    check(lower, &x, 32.0, |g, v| g.layer_norm(v[0], v[1], v.get(2).copied(), axis, 1e-5));
}

#[test]
fn layer_norm_over_axes_and_dtypes() {
    let mut r = Rng::new(41);
    for (shape, axis) in
        [(vec![5, 9], 1), (vec![3, 130], 1), (vec![2, 3, 5, 7], 2), (vec![2, 1030], 1), (vec![6], 0)]
    {
        for d in DType::native().filter(|d| d.is_float()) {
            layer_norm(&mut r, d, d, &shape, axis, true);
        }
        layer_norm(&mut r, DType::F32, DType::F32, &shape, axis, false);
        // 16-bit activations with f32 weights.
        layer_norm(&mut r, DType::F16, DType::F32, &shape, axis, true);
    }
}

#[test]
fn rms_norm_over_dtypes() {
    let mut r = Rng::new(42);
    for shape in [[4, 9], [3, 200], [2, 1025]] {
        for d in DType::native().filter(|d| d.is_float()) {
            let x = [Input::dense(&mut r, d, &shape), Input::dense(&mut r, d, &shape[1..])];
            check(lower, &x, 32.0, |g, v| g.rms_norm(v[0], v[1], 1e-6));
        }
    }
}

#[test]
fn a_mean_far_from_zero_loses_nothing() {
    let mut r = Rng::new(43);
    for n in [40, 300] {
        let mut x = Input::dense(&mut r, DType::F32, &[2, n]);
        for i in 0..2 * n {
            x.set(i, 1000.0 + (i * 5 % 7) as f64);
        }
        let w = Input::dense(&mut r, DType::F32, &[n]);
        // The inputs are whole numbers; f32 represents their sums and deviations nearly exactly.
        check(lower, &[x, w], 200.0, |g, v| g.layer_norm(v[0], v[1], None, 1, 1e-5));
    }
}

#[test]
fn scales_of_other_shapes_are_declined() {
    let mut r = Rng::new(44);
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [4, 5, 6]));
    let s = g.input("s", TensorType::new(DType::F32, [6]));
    let y = g.layer_norm(x, s, None, 1, 1e-5).unwrap();
    let ins = [[4, 5, 6].as_slice(), &[6]].map(|s| Input::dense(&mut r, DType::F32, s).operand);
    let out = ins[0].clone();
    let e = lower(&g.node(y).op, &ins, &[out], &devices()[0]).unwrap_err();
    assert!(e.dense.is_empty() && e.reason.contains("[6]"), "{}", e.reason);
}

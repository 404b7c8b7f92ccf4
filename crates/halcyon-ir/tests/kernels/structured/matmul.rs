use super::harness::*;
use halcyon_ir::kernel::templates::matmul::lower;
use halcyon_ir::layout::View;
use halcyon_ir::{DType, Op};

fn product(a: Input, b: Input) -> Vec<String> {
    let k = a.operand.view.shape[a.operand.view.rank() - 1];
    check(lower, &[a, b], 4.0 + k as f64, |g, x| g.matmul(x[0], x[1]))
}

#[test]
fn every_dtype() {
    let mut r = Rng::new(1);
    for d in DType::native().filter(|d| *d != DType::Bool) {
        for (m, k, n) in [(3, 5, 9), (33, 19, 37)] {
            product(Input::dense(&mut r, d, &[2, m, k]), Input::dense(&mut r, d, &[2, k, n]));
        }
    }
}

#[test]
fn sizes_choose_the_kernel() {
    let mut r = Rng::new(2);
    let d = DType::F32;
    for (m, k, n, gpu, cpu) in [
        (1, 1, 1, "matmul_simple", "matmul_simple"),
        (1, 200, 67, "matmul_split", "matmul_block"),
        (5, 130, 70, "matmul_split", "matmul_block"),
        (8, 64, 172, "matmul_split", "matmul_block"),
        (70, 130, 1, "matmul_split", "matmul_dot"),
        (70, 65, 5, "matmul_split", "matmul_simple"),
        (65, 17, 66, "matmul_tiled", "matmul_block"),
        (130, 40, 131, "matmul_tiled", "matmul_block"),
        (7, 0, 9, "matmul_simple", "matmul_block"),
    ] {
        let names = product(Input::dense(&mut r, d, &[m, k]), Input::dense(&mut r, d, &[k, n]));
        assert_eq!(names[..2], [gpu, cpu], "{m} {k} {n}");
        assert_eq!(names[2], "matmul_simple");
    }
}

#[test]
fn strides_and_broadcasts() {
    let mut r = Rng::new(3);
    let d = DType::F32;
    for (m, k, n) in [(1, 80, 40), (34, 20, 40), (3, 70, 5)] {
        // Both factors are transposed; then only the right one.
        let a = View::dense(&[k, m]).permute(&[1, 0]);
        let b = View::dense(&[n, k]).permute(&[1, 0]);
        product(Input::random(&mut r, d, a), Input::random(&mut r, d, b.clone()));
        product(Input::dense(&mut r, d, &[m, k]), Input::random(&mut r, d, b));
        // The left factor is a slice with a negative step along the rows.
        let a = View::dense(&[2 * m + 1, k + 3]).slice(&[2 * m - 1, 2], &[-2, 1], &[m, k]);
        product(Input::random(&mut r, d, a), Input::dense(&mut r, d, &[k, n]));
        // One right factor for the whole batch; one left factor for the whole batch; a zero stride inside the
        // matrix.
        let b = View::dense(&[1, k, n]).expand(&[3, k, n]);
        product(Input::dense(&mut r, d, &[3, m, k]), Input::random(&mut r, d, b));
        let a = View::dense(&[1, m, k]).expand(&[3, m, k]);
        product(Input::random(&mut r, d, a), Input::dense(&mut r, d, &[3, k, n]));
        let a = View::dense(&[m, 1]).expand(&[m, k]);
        product(Input::random(&mut r, d, a), Input::dense(&mut r, d, &[k, n]));
        // Batch dimensions that cannot be merged, because the axis of heads is between two others in memory.
        let a = View::dense(&[2, m, 3, k]).permute(&[0, 2, 1, 3]);
        let b = View::dense(&[2, 1, k, n]).expand(&[2, 3, k, n]);
        product(Input::random(&mut r, d, a), Input::random(&mut r, d, b));
    }
}

#[test]
fn what_it_declines() {
    let mut r = Rng::new(4);
    let caps = &devices()[0];
    let out = Input::dense(&mut r, DType::F32, &[3, 3]).operand;
    let masked = View::dense(&[2, 3]).pad(&[1, 0], &[0, 0]);
    let a = Input::random(&mut r, DType::F32, masked).operand;
    let b = Input::dense(&mut r, DType::F32, &[3, 3]).operand;
    let e = lower(&Op::Matmul, &[a, b], &[out], caps).unwrap_err();
    assert_eq!(e.dense, [0]);
    // Five batch dimensions, in an order that prevents merging.
    let v = View::dense(&[4, 5, 2, 2, 2, 2, 2]).permute(&[6, 5, 4, 3, 2, 0, 1]);
    let a = Input::random(&mut r, DType::F32, v).operand;
    let b = Input::dense(&mut r, DType::F32, &[2, 2, 2, 2, 2, 5, 4]).operand;
    let out = Input::dense(&mut r, DType::F32, &[2, 2, 2, 2, 2, 4, 4]).operand;
    let e = lower(&Op::Matmul, &[a, b], &[out], caps).unwrap_err();
    assert_eq!(e.dense, [0]);
}

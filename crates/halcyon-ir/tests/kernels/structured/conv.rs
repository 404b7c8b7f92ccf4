use super::harness::*;
use halcyon_ir::DType;
use halcyon_ir::kernel::templates::conv::lower;
use halcyon_ir::layout::View;
use halcyon_ir::ops::{Conv, Op};

fn conv(x: Input, w: Input, c: &Conv) -> Vec<String> {
    let taps: usize = w.operand.view.shape[1..].iter().product();
    check(lower, &[x, w], 4.0 + taps as f64, |g, v| g.conv(v[0], v[1], c.clone()))
}

#[test]
fn every_float_dtype() {
    let mut r = Rng::new(11);
    let mut c = Conv::new(2);
    c.pad = [(1, 1), (1, 1)].as_slice().into();
    for d in DType::native().filter(|d| d.is_float()) {
        let names = conv(Input::dense(&mut r, d, &[2, 3, 6, 11]), Input::dense(&mut r, d, &[5, 3, 3, 3]), &c);
        assert_eq!(names, ["conv_direct"; 3]);
    }
}

#[test]
fn one_two_and_three_axes() {
    let mut r = Rng::new(12);
    let d = DType::F32;
    for (n, image, kernel) in
        [(1, vec![19], vec![4]), (2, vec![7, 9], vec![2, 3]), (3, vec![4, 5, 10], vec![3, 1, 2])]
    {
        for case in 0..5 {
            let mut c = Conv::new(n);
            for k in 0..n {
                match case {
                    0 => {}
                    1 => (c.stride[k], c.pad[k]) = (2, (1, 2)),
                    2 => (c.dilation[k], c.pad[k]) = (2, (2, 1)),
                    // A transposed convolution, cropped on one side.
                    3 => (c.input_dilation[k], c.pad[k]) = (2, (2, -1)),
                    _ => (c.input_dilation[k], c.stride[k], c.pad[k]) = (3, 2, (-1, 3)),
                }
            }
            let xs: Vec<usize> = [2, 3].iter().chain(&image).copied().collect();
            let ws: Vec<usize> = [6, 3].iter().chain(&kernel).copied().collect();
            conv(Input::dense(&mut r, d, &xs), Input::dense(&mut r, d, &ws), &c);
        }
    }
}

#[test]
fn groups_and_depthwise() {
    let mut r = Rng::new(13);
    for (channels, groups, out) in [(6, 3, 9), (5, 5, 5), (4, 4, 8), (4, 2, 12)] {
        let mut c = Conv::new(2);
        c.groups = groups;
        c.pad = [(1, 0), (1, 1)].as_slice().into();
        conv(
            Input::dense(&mut r, DType::F32, &[2, channels, 5, 17]),
            Input::dense(&mut r, DType::F32, &[out, channels / groups, 3, 3]),
            &c,
        );
    }
}

#[test]
fn pointwise_is_a_product() {
    let mut r = Rng::new(14);
    // The input lies at an offset in a larger buffer.
    let x = View::dense(&[3, 7, 5, 6]).slice(&[1, 0, 0, 0], &[1; 4], &[2, 7, 5, 6]);
    let names = conv(
        Input::random(&mut r, DType::F32, x),
        Input::dense(&mut r, DType::F32, &[4, 7, 1, 1]),
        &Conv::new(2),
    );
    assert!(names.iter().all(|n| n.starts_with("matmul")), "{names:?}");
}

#[test]
fn strided_operands_are_copied() {
    let mut r = Rng::new(15);
    let x = View::dense(&[5, 6, 2, 3]).permute(&[3, 2, 0, 1]);
    let x = Input::random(&mut r, DType::F32, x).operand;
    let w = Input::dense(&mut r, DType::F32, &[4, 2, 3, 3]).operand;
    let y = Input::dense(&mut r, DType::F32, &[3, 4, 3, 4]).operand;
    let e = lower(&Op::Conv(Conv::new(2)), &[x, w], &[y], &devices()[0]).unwrap_err();
    assert_eq!(e.dense, [0]);
}

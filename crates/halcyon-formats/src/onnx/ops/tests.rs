//! Operators whose attributes or meaning changed between versions, and those with rules of their own.

use crate::onnx::test_models::*;
use halcyon_ir::{DType, Error};

#[test]
fn softmax_and_its_axis_by_version() {
    let x = t(&[1, 2, 2], &[0f32; 4]);
    // As a matrix of one row from axis 1 on; along the last axis later.
    check(12, node("Softmax", &["x"], &["y"]), &x, &[], &[1, 2, 2], &[0.25; 4]);
    check(13, node("Softmax", &["x"], &["y"]), &x, &[], &[1, 2, 2], &[0.5; 4]);
    check(
        12,
        node("LogSoftmax", &["x"], &["y"]).int("axis", 2),
        &x,
        &[],
        &[1, 2, 2],
        &[-std::f64::consts::LN_2; 4],
    );
}

#[test]
fn operands_that_were_attributes() {
    let x = t(&[2, 3], &[1f32, -2.0, 3.0, 4.0, 5.0, -6.0]);
    let clip = [1.0, -1.0, 3.0, 3.0, 3.0, -1.0];
    check(6, node("Clip", &["x"], &["y"]).float("min", -1.0).float("max", 3.0), &x, &[], &[2, 3], &clip);
    let w = [t(&[], &[-1f32]), t(&[], &[3f32])];
    check(13, node("Clip", &["x", "w0", "w1"], &["y"]), &x, &w, &[2, 3], &clip);
    check(13, node("Clip", &["x", "", "w1"], &["y"]), &x, &w, &[2, 3], &[1.0, -2.0, 3.0, 3.0, 3.0, -6.0]);

    let sum = [5.0, 3.0, -3.0];
    check(11, node("ReduceSum", &["x"], &["y"]).ints("axes", &[0]).int("keepdims", 0), &x, &[], &[3], &sum);
    check(13, node("ReduceSum", &["x", "w0"], &["y"]).int("keepdims", 0), &x, &[ints(&[-2])], &[3], &sum);
    check(13, node("ReduceSum", &["x"], &["y"]), &x, &[], &[1, 1], &[5.0]);
    let noop = node("ReduceSum", &["x"], &["y"]).int("noop_with_empty_axes", 1);
    check(13, noop, &x, &[], &[2, 3], &[1.0, -2.0, 3.0, 4.0, 5.0, -6.0]);
    check(17, node("ReduceMax", &["x"], &["y"]).ints("axes", &[1]), &x, &[], &[2, 1], &[3.0, 5.0]);
    check(18, node("ReduceMax", &["x", "w0"], &["y"]), &x, &[ints(&[1])], &[2, 1], &[3.0, 5.0]);

    let cut = [-2.0, 3.0];
    let old = node("Slice", &["x"], &["y"]).ints("starts", &[0, 1]).ints("ends", &[1, 9]);
    check(9, old, &x, &[], &[1, 2], &cut);
    let w = [ints(&[0, 1]), ints(&[1, i64::MAX])];
    check(10, node("Slice", &["x", "w0", "w1"], &["y"]), &x, &w, &[1, 2], &cut);
    let w = [ints(&[-1]), ints(&[i64::MIN]), ints(&[1]), ints(&[-2])];
    check(13, node("Slice", &["x", "w0", "w1", "w2", "w3"], &["y"]), &x, &w, &[2, 2], &[3.0, 1.0, -6.0, 4.0]);

    let y = t(&[1, 3, 1], &[1f32, 2.0, 3.0]);
    check(12, node("Squeeze", &["x"], &["y"]).ints("axes", &[2]), &y, &[], &[1, 3], &[1.0, 2.0, 3.0]);
    check(13, node("Squeeze", &["x"], &["y"]), &y, &[], &[3], &[1.0, 2.0, 3.0]);
    check(13, node("Unsqueeze", &["x", "w0"], &["y"]), &x, &[ints(&[-1, 0])], &[1, 2, 3, 1], &[1.0]);
    check(11, node("Unsqueeze", &["x"], &["y"]).ints("axes", &[1]), &x, &[], &[2, 1, 3], &[1.0]);
}

#[test]
fn padding_modes() {
    let x = t(&[4], &[1f32, 2.0, 3.0, 4.0]);
    let w = [ints(&[2, 1])];
    let mode = |m| node("Pad", &["x", "w0"], &["y"]).text("mode", m);
    check(18, mode("constant"), &x, &w, &[7], &[0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0]);
    check(18, mode("edge"), &x, &w, &[7], &[1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 4.0]);
    check(18, mode("reflect"), &x, &w, &[7], &[3.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0]);
    check(19, mode("wrap"), &x, &w, &[7], &[3.0, 4.0, 1.0, 2.0, 3.0, 4.0, 1.0]);
    check(
        2,
        node("Pad", &["x"], &["y"]).ints("pads", &[-1, 1]).float("value", 9.0),
        &x,
        &[],
        &[4],
        &[2.0, 3.0, 4.0, 9.0],
    );
    let x2 = t(&[1, 2], &[1f32, 2.0]);
    let w = [ints(&[1, 0]), t(&[], &[5f32]), ints(&[-1])];
    check(18, node("Pad", &["x", "w0", "w1", "w2"], &["y"]), &x2, &w, &[1, 3], &[5.0, 1.0, 2.0]);
    let m = model(18, port("x", DType::F32, &["4"]), vec![mode("constant")], &[("w0", ints(&[-3, -2]))]);
    assert!(import(m).is_err());
}

#[test]
fn split_by_version() {
    let x = t(&[5], &[1f32, 2.0, 3.0, 4.0, 5.0]);
    let n = |outputs: &[&str]| node("Split", &["x"], outputs);
    check(18, n(&["a", "y"]).int("num_outputs", 2), &x, &[], &[2], &[4.0, 5.0]);
    check(12, n(&["a", "y"]).ints("split", &[1, 4]), &x, &[], &[4], &[2.0, 3.0, 4.0, 5.0]);
    check(13, node("Split", &["x", "w0"], &["y", "a"]), &x, &[ints(&[3, 2])], &[3], &[1.0, 2.0, 3.0]);
    for bad in [n(&["a", "y"]), n(&["a", "y"]).ints("split", &[1, 5])] {
        assert!(matches!(
            import(model(12, port("x", DType::F32, &["5"]), vec![bad], &[])),
            Err(Error::Argument { .. })
        ));
    }
}

#[test]
fn pooling_windows() {
    let x = t(&[1, 1, 5], &[1f32, 2.0, 3.0, 4.0, 5.0]);
    let max = |s| node("MaxPool", &["x"], &["y"]).ints("kernel_shape", &[3]).ints("strides", &[s]);
    check(12, max(2), &x, &[], &[1, 1, 2], &[3.0, 5.0]);
    check(12, max(3).int("ceil_mode", 1), &x, &[], &[1, 1, 2], &[3.0, 5.0]);
    check(12, max(1).text("auto_pad", "SAME_UPPER"), &x, &[], &[1, 1, 5], &[2.0, 3.0, 4.0, 5.0, 5.0]);
    // A window that would start in the end padding does not count.
    check(12, max(3).int("ceil_mode", 1).ints("pads", &[1, 1]), &x, &[], &[1, 1, 2], &[2.0, 5.0]);
    let avg = || {
        node("AveragePool", &["x"], &["y"])
            .ints("kernel_shape", &[3])
            .ints("strides", &[2])
            .ints("pads", &[1, 0])
    };
    check(19, avg(), &x, &[], &[1, 1, 2], &[1.5, 3.0]);
    check(19, avg().int("count_include_pad", 1), &x, &[], &[1, 1, 2], &[1.0, 3.0]);
    let both = avg().int("count_include_pad", 1).int("ceil_mode", 1);
    check(19, both, &x, &[], &[1, 1, 3], &[1.0, 3.0, 4.5]);
}

#[test]
fn convolution_normalisation_and_types() {
    let x = t(&[1, 2, 3], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let w = [t(&[2, 1, 2], &[1f32, 1.0, 1.0, -1.0]), t(&[2], &[10f32, 20.0])];
    let conv = node("Conv", &["x", "w0", "w1"], &["y"]).int("group", 2);
    check(11, conv, &x, &w, &[1, 2, 2], &[13.0, 15.0, 19.0, 19.0]);
    let bn = [t(&[2], &[1f32, 2.0]), t(&[2], &[0f32, 1.0]), t(&[2], &[2f32, 5.0]), t(&[2], &[1f32, 4.0])];
    let n = node("BatchNormalization", &["x", "w0", "w1", "w2", "w3"], &["y"]).float("epsilon", 0.0);
    check(15, n, &x, &bn, &[1, 2, 3], &[-1.0, 0.0, 1.0, 0.0, 1.0, 2.0]);
    let ln = [t(&[3], &[1f32; 3]), t(&[3], &[0f32; 3])];
    let n = node("LayerNormalization", &["x", "w0", "w1"], &["y"]).float("epsilon", 0.0);
    let r = 1.5f64.sqrt();
    check(17, n, &x, &ln, &[1, 2, 3], &[-r, 0.0, r, -r, 0.0, r]);
    let i = t(&[3], &[-7i32, 7, 9]);
    check(13, node("Mod", &["x", "w0"], &["y"]), &i, &[t(&[], &[4i32])], &[3], &[1.0, 3.0, 1.0]);
    check(
        13,
        node("Mod", &["x", "w0"], &["y"]).int("fmod", 1),
        &i,
        &[t(&[], &[4i32])],
        &[3],
        &[-3.0, 3.0, 1.0],
    );
    check(15, node("Pow", &["x", "w0"], &["y"]), &i, &[t(&[], &[0.5f32])], &[3], &[0.0, 2.0, 3.0]);
    let c = node("Cast", &["x"], &["y"]).int("to", 8);
    assert!(
        matches!(import(model(13, port("x", DType::F32, &["3"]), vec![c], &[])), Err(Error::Unsupported { what, .. }) if what.contains("string"))
    );
}

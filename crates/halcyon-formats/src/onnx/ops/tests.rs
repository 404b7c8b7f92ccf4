//! Tests of operators whose attributes or meaning changed between versions, and of those with special rules.

use crate::onnx::test_models::*;
use halcyon_ir::{DType, Error};

#[test]
fn softmax_and_its_axis_by_version() {
    let x = t(&[1, 2, 2], &[0f32; 4]);
    // Before opset version 13, the axes from axis 1 on form one row. Later, a row is along the last axis.
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
    // A window that would start in the padding at the end is left out.
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

#[test]
fn operators_before_broadcasting() {
    let x = t(&[2, 2, 2], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let add = || node("Add", &["x", "w0"], &["y"]);
    let w = [t(&[2], &[10f32, 20.0])];
    let middle = [11.0, 12.0, 23.0, 24.0, 15.0, 16.0, 27.0, 28.0];
    check(6, add().int("broadcast", 1).int("axis", 1), &x, &w, &[2, 2, 2], &middle);
    let last = [11.0, 22.0, 13.0, 24.0, 15.0, 26.0, 17.0, 28.0];
    check(6, add().int("broadcast", 1), &x, &w, &[2, 2, 2], &last);
    check(7, add(), &x, &w, &[2, 2, 2], &last);
    let refused = [
        (6, add()),
        (7, add().int("broadcast", 1)),
        (6, add().int("broadcast", 1).int("axis", 3)),
        (6, add().int("broadcast", 1).int("axis", i64::MIN)),
    ];
    for (opset, n) in refused {
        let r =
            import(model(opset, port("x", DType::F32, &["2", "2", "2"]), vec![n], &[("w0", w[0].clone())]));
        assert!(matches!(r, Err(Error::Argument { .. })), "{r:?}");
    }
    let slope = [t(&[2], &[0.5f32, -1.0])];
    let x = t(&[1, 2, 2], &[-2f32, 2.0, -3.0, 3.0]);
    check(6, node("PRelu", &["x", "w0"], &["y"]), &x, &slope, &[1, 2, 2], &[-1.0, 2.0, 3.0, 3.0]);
    check(9, node("PRelu", &["x", "w0"], &["y"]), &x, &slope, &[1, 2, 2], &[-1.0, 2.0, -1.5, 3.0]);
}

#[test]
fn activations() {
    let x = t(&[4], &[-2f32, -0.5, 0.5, 2.0]);
    let one = |n: &str| node(n, &["x"], &["y"]);
    let e = |v: f64| v.exp_m1();
    check(
        1,
        one("Selu"),
        &x,
        &[],
        &[4],
        &[1.0507 * 1.6732 * e(-2.0), 1.0507 * 1.6732 * e(-0.5), 0.52535, 2.1014],
    );
    check(12, one("Celu").float("alpha", 2.0), &x, &[], &[4], &[2.0 * e(-1.0), 2.0 * e(-0.25), 0.5, 2.0]);
    check(10, one("ThresholdedRelu"), &x, &[], &[4], &[0.0, 0.0, 0.0, 2.0]);
    check(9, one("Shrink").float("bias", 1.0), &x, &[], &[4], &[-1.0, 0.0, 0.0, 1.0]);
    let i = t(&[3], &[-2i32, 1, 3]);
    check(9, one("Shrink").float("bias", 0.5).float("lambd", 1.5), &i, &[], &[3], &[-1.0, 0.0, 2.0]);
    let s = |v: f64| v / (1.0 + (-v).exp());
    check(24, one("Swish").float("alpha", 2.0), &x, &[], &[4], &[-4.0, -1.0, 1.0, 4.0].map(|v| s(v) / 2.0));
    let gated = node("SwiGLU", &["x", "w0"], &["y"]);
    check(
        28,
        gated,
        &x,
        &[t(&[4], &[1f32, 2.0, 3.0, 4.0])],
        &[4],
        &[s(-2.0), 2.0 * s(-0.5), 3.0 * s(0.5), 4.0 * s(2.0)],
    );
    // The first of equal maxima counts. Before opset version 13, the axes from axis 1 on form one row.
    let m = t(&[1, 2, 2], &[3f32, 3.0, 1.0, 4.0]);
    check(13, one("Hardmax"), &m, &[], &[1, 2, 2], &[1.0, 0.0, 0.0, 1.0]);
    check(11, one("Hardmax"), &m, &[], &[1, 2, 2], &[0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn norms_by_version() {
    let x = t(&[2, 2, 2], &[0f32, 2.0, 10.0, 10.0, 4.0, 6.0, 10.0, 30.0]);
    let w = |v: [f32; 2]| t(&[2], &v);
    let five = ["x", "w0", "w1", "w2", "w3"];
    let bn = |y: &[&str]| node("BatchNormalization", &five, y).float("epsilon", 0.0).float("momentum", 0.5);
    let stats = [w([1.0, 2.0]), w([0.0, 1.0]), w([7.0, 5.0]), w([9.0, 4.0])];
    // The means are 3 and 15, the variances 5 and 75.
    let (a, b) = (5f64.sqrt(), 75f64.sqrt());
    let y = [
        -3.0 / a,
        -1.0 / a,
        1.0 - 10.0 / b,
        1.0 - 10.0 / b,
        1.0 / a,
        3.0 / a,
        1.0 - 10.0 / b,
        1.0 + 30.0 / b,
    ];
    check(15, bn(&["y"]).int("training_mode", 1), &x, &stats, &[2, 2, 2], &y);
    check(15, bn(&["a", "y"]).int("training_mode", 1), &x, &stats, &[2], &[5.0, 10.0]);
    check(9, bn(&["a", "", "y"]), &x, &stats, &[2], &[7.0, 39.5]);
    check(9, bn(&["a", "", "", "", "y"]), &x, &stats, &[2], &[5.0, 75.0]);
    check(6, bn(&["y"]), &x, &stats, &[2, 2, 2], &y);
    let tested = bn(&["y"]).int("is_test", 1);
    check(
        6,
        tested,
        &x,
        &stats,
        &[2, 2, 2],
        &[-7.0 / 3.0, -5.0 / 3.0, 6.0, 6.0, -1.0, -1.0 / 3.0, 6.0, 26.0],
    );
    let each = |v: f32, last: f32| t(&[2, 2], &[v, v, v, last]);
    let stats = [each(1.0, 2.0), each(0.0, 1.0), each(2.0, 4.0), each(4.0, 16.0)];
    let apart = bn(&["y"]).int("spatial", 0);
    let y = [-1.0, 0.0, 4.0, 4.0, 1.0, 2.0, 4.0, 14.0];
    check(7, apart.clone(), &x, &stats, &[2, 2, 2], &y);
    let shape = ["2", "2", "2"];
    let names = || ["w0", "w1", "w2", "w3"].into_iter().zip(stats.clone()).collect::<Vec<_>>();
    for (opset, n) in [(9, apart), (15, bn(&["a", "y"]))] {
        let r = import(model(opset, port("x", DType::F32, &shape), vec![n], &names()));
        assert!(matches!(r, Err(Error::Argument { .. })), "{r:?}");
    }

    // Scale and bias are per group in opset version 18, and per channel in version 21.
    let x = t(&[1, 4, 1], &[1f32, 3.0, 10.0, 20.0]);
    let gn =
        || node("GroupNormalization", &["x", "w0", "w1"], &["y"]).int("num_groups", 2).float("epsilon", 0.0);
    let group = [w([1.0, 2.0]), w([0.0, 10.0])];
    check(18, gn(), &x, &group, &[1, 4, 1], &[-1.0, 1.0, 8.0, 12.0]);
    let channel = [t(&[4], &[1f32, 2.0, 3.0, 4.0]), t(&[4], &[0f32; 4])];
    check(21, gn(), &x, &channel, &[1, 4, 1], &[-1.0, 2.0, -3.0, 4.0]);

    let lrn = |n| {
        node("LRN", &["x"], &["y"]).int("size", n).float("alpha", 1.0).float("beta", 1.0).float("bias", 0.0)
    };
    let x = t(&[1, 3, 1], &[1f32, 2.0, 3.0]);
    // The window has two channels: the element's own and the next.
    check(13, lrn(2), &x, &[], &[1, 3, 1], &[2.0 / 5.0, 4.0 / 13.0, 6.0 / 9.0]);
    let n = 1i64 << 40;
    let mut whole = lrn(n);
    whole.attribute.retain(|a| a.name != "alpha");
    let whole = whole.float("alpha", n as f32);
    check(13, whole, &x, &[], &[1, 3, 1], &[1.0, 2.0, 3.0].map(|v| v / 14.0));

    let x = t(&[2, 2], &[3f32, -4.0, 0.0, 0.0]);
    let lp = |p| node("LpNormalization", &["x"], &["y"]).int("p", p);
    check(22, lp(2), &x, &[], &[2, 2], &[0.6, -0.8, 0.0, 0.0]);
    check(22, lp(1).int("axis", 0), &x, &[], &[2, 2], &[1.0, -1.0, 0.0, 0.0]);
    let mvn = node("MeanVarianceNormalization", &["x"], &["y"]).ints("axes", &[1]);
    check(13, mvn, &x, &[], &[2, 2], &[1.0, -1.0, 0.0, 0.0]);
    let rms = node("RMSNormalization", &["x", "w0"], &["y"]).float("epsilon", 0.0).int("axis", 0);
    check(23, rms, &x, &[w([1.0, 2.0])], &[2, 2], &[1.2, -3.2, 0.0, 0.0]);
    // The statistics are results too, in the dtype in which they are computed.
    let ln =
        node("LayerNormalization", &["x", "w0"], &["a", "", "y"]).float("epsilon", 1.0).int("stash_type", 11);
    let y = run_one(17, ln, &x, &[w([1.0, 2.0])]);
    assert_eq!((y.dtype, y.to_vec::<f64>()), (DType::F64, vec![1.0 / 13.25f64.sqrt(), 1.0]));
}

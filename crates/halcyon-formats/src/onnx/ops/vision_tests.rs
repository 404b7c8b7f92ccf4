//! Tests of resizing, sampling, pooling and detection: versions, dtypes, edge cases and rejected cases.
//! Expected values follow from the definitions, or come from onnxruntime if the calculation is long.

use crate::onnx::proto::*;
use crate::onnx::test_models::*;
use halcyon_ir::{ConstData, DType, Error, Result};

fn floats(n: NodeProto, name: &str, v: &[f32]) -> NodeProto {
    n.attr(name, attribute::FLOATS, |a| a.floats = v.to_vec())
}

fn of(n: &str, inputs: &[&str]) -> NodeProto {
    node(n, inputs, &["y"])
}

/// The error of importing one node with an f32 operand.
fn refused(opset: i64, n: NodeProto, dims: &[&str], weights: &[ConstData]) -> Error {
    let names: Vec<String> = (0..weights.len()).map(|i| format!("w{i}")).collect();
    let w: Vec<(&str, ConstData)> = names.iter().map(String::as_str).zip(weights.iter().cloned()).collect();
    let what = format!("{n:?}");
    let m: Result<_> = import(model(opset, port("x", DType::F32, dims), vec![n], &w));
    m.map(|_| ()).expect_err(&what)
}

fn invalid(opset: i64, n: NodeProto, dims: &[&str], weights: &[ConstData]) {
    let e = refused(opset, n, dims, weights);
    assert!(matches!(e, Error::Argument { .. } | Error::Shape { .. } | Error::DType { .. }), "{e}");
}

fn unsupported(opset: i64, n: NodeProto, dims: &[&str], weights: &[ConstData]) {
    let e = refused(opset, n, dims, weights);
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
}

fn f(v: &[f32]) -> ConstData {
    t(&[v.len()], v)
}

#[test]
fn resize_by_version() {
    let x = t(&[1, 1, 2, 4], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    // Before version 11, positions are multiples of 1 / scale. The mode nearest rounds them up if the axis
    // shrinks, and down otherwise.
    check(10, of("Resize", &["x", "w0"]), &x, &[f(&[1.0, 1.0, 0.6, 0.6])], &[1, 1, 1, 2], &[1.0, 3.0]);
    let y = t(&[1, 3], &[1f32, 2.0, 3.0]);
    check(10, of("Resize", &["x", "w0"]), &y, &[f(&[1.0, 1.5])], &[1, 4], &[1.0, 1.0, 2.0, 3.0]);
    let y = t(&[1, 2], &[1f32, 2.0]);
    let linear = |inputs: &[&str]| of("Resize", inputs).text("mode", "linear");
    check(10, linear(&["x", "w0"]), &y, &[f(&[1.0, 2.0])], &[1, 4], &[1.0, 1.5, 2.0, 2.0]);
    let half = [1.0, 1.25, 1.75, 2.0];
    check(11, linear(&["x", "", "w0"]), &y, &[f(&[1.0, 2.0])], &[1, 4], &half);
    check(11, linear(&["x", "w0", "w0", "w1"]), &y, &[f(&[]), ints(&[1, 4])], &[1, 4], &half);
    check(13, linear(&["x", "", "", "w0"]), &y, &[ints(&[1, 4])], &[1, 4], &half);
    check(18, linear(&["x", "", "", "w0"]).ints("axes", &[-1]), &y, &[ints(&[4])], &[1, 4], &half);
    let up = floats(of("Upsample", &["x"]), "scales", &[1.0, 2.0]);
    check(7, up, &y, &[], &[1, 4], &[1.0, 1.0, 2.0, 2.0]);
    let up = of("Upsample", &["x", "w0"]).text("mode", "linear");
    check(9, up, &y, &[f(&[1.0, 2.0])], &[1, 4], &[1.0, 1.5, 2.0, 2.0]);
}

#[test]
fn resize_with_many_taps_and_a_region() {
    let v: Vec<f32> = (0..12).map(|i| (i as f32).powf(1.5)).collect();
    let x = t(&[1, 12], &v);
    let n = |mode| of("Resize", &["x", "", "", "w0"]).text("mode", mode).int("antialias", 1);
    let near = |n: NodeProto, want: [f64; 3]| {
        let y = run_one(18, n, &x, &[ints(&[1, 3])]).to_vec::<f64>();
        assert!(y.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{y:?}");
    };
    near(n("linear"), [2.748753, 13.345043, 28.815628]);
    near(n("cubic").float("cubic_coeff_a", -0.5), [2.0911033, 12.92536, 29.487638]);
    // The region starts in the middle of the axis and ends past it.
    let x = t(&[1, 5], &[0f32, 1.0, 2.0, 3.0, 4.0]);
    let crop = of("Resize", &["x", "w0", "", "w1"])
        .text("mode", "linear")
        .text("coordinate_transformation_mode", "tf_crop_and_resize")
        .float("extrapolation_value", 9.0);
    let w = [f(&[0.0, 0.5, 1.0, 1.25]), ints(&[1, 3])];
    check(13, crop.clone(), &x, &w, &[1, 3], &[2.0, 3.5, 9.0]);
    invalid(13, crop.clone(), &["1", "5"], &[f(&[0.0, 0.5]), ints(&[1, 3])]);
    // The scale applies to the region.
    let scaled = NodeProto { input: ["x", "w0", "w1"].map(String::from).to_vec(), ..crop };
    check(13, scaled, &x, &[f(&[0.0, 0.0, 1.0, 0.5]), f(&[1.0, 2.0])], &[1, 5], &[0.0, 0.5, 1.0, 1.5, 2.0]);
}

#[test]
fn resize_of_other_types() {
    let n = |mode| of("Resize", &["x", "", "", "w0"]).text("mode", mode);
    let x = t(&[1, 4], &[0u8, 255, 250, 3]);
    let want = [0.0, 58.0, 198.0, 255.0, 255.0, 194.0, 59.0, 0.0];
    check(13, n("cubic"), &x, &[ints(&[1, 8])], &[1, 8], &want);
    let big = 1i64 << 40;
    let x = t(&[2], &[big + 1, big + 3]);
    let corners = n("linear").text("coordinate_transformation_mode", "align_corners");
    check(13, corners, &x, &[ints(&[3])], &[3], &[big as f64 + 1.0, big as f64 + 2.0, big as f64 + 3.0]);
    let x = t(&[2], &[true, false]);
    check(13, n("nearest"), &x, &[ints(&[4])], &[4], &[1.0, 1.0, 0.0, 0.0]);
    let m = model(13, port("x", DType::Bool, &["2"]), vec![n("linear")], &[("w0", ints(&[4]))]);
    assert!(import(m).is_err());
    // Taps with zero weight have no influence.
    let x = t(&[6], &[1f32, f32::NAN, 2.0, f32::INFINITY, 3.0, f32::NAN]);
    let half = of("Resize", &["x", "", "w0"])
        .text("mode", "linear")
        .text("coordinate_transformation_mode", "asymmetric");
    check(13, half, &x, &[f(&[0.5])], &[3], &[1.0, 2.0, 3.0]);
    let x = t(&[0, 2], &[0f32; 0]);
    check(13, n("nearest"), &x, &[ints(&[0, 4])], &[0, 4], &[]);
}

#[test]
fn resize_of_symbolic_sizes() {
    let n = |mode| {
        of("Resize", &["x", "", "w0"])
            .text("mode", mode)
            .text("coordinate_transformation_mode", "asymmetric")
            .text("nearest_mode", "floor")
    };
    let w = [("w0", f(&[1.0, 2.0]))];
    let m = |mode| model(13, port("x", DType::F32, &["b", "w"]), vec![n(mode)], &w);
    let i = import(m("nearest")).unwrap();
    assert_eq!(i.graph.shape(i.graph.outputs()[0].node).to_string(), "[b, 2*w]");
    assert!(matches!(import(m("linear")), Err(Error::Unsupported { .. })));
}

#[test]
fn resize_refuses() {
    let n = || of("Resize", &["x", "", "w0"]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e30] {
        invalid(13, n(), &["1", "4"], &[f(&[1.0, bad])]);
    }
    invalid(13, n(), &["1", "4"], &[f(&[1.0])]);
    let sized = || of("Resize", &["x", "", "", "w0"]);
    for bad in [-1, 1 << 40, i64::MIN] {
        invalid(13, sized(), &["1", "4"], &[ints(&[1, bad])]);
    }
    // More taps than the importer lists.
    unsupported(13, sized().text("mode", "linear"), &["1", "4"], &[ints(&[1, 1 << 30])]);
    invalid(13, of("Resize", &["x", "", "w0", "w1"]), &["4"], &[f(&[2.0]), ints(&[8])]);
    invalid(13, of("Resize", &["x"]), &["4"], &[]);
    invalid(13, n().text("mode", "quintic"), &["4"], &[f(&[2.0])]);
    invalid(13, n().text("coordinate_transformation_mode", "none"), &["4"], &[f(&[2.0])]);
    invalid(18, sized().ints("axes", &[0, 0]), &["4"], &[ints(&[8, 8])]);
    invalid(18, sized().ints("axes", &[1]), &["4"], &[ints(&[8])]);
    invalid(13, sized(), &["0", "4"], &[ints(&[2, 8])]);
}

#[test]
fn sampling() {
    let x = t(&[1, 1, 3], &[1f32, 2.0, 4.0]);
    let grid = t(&[1, 3, 1], &[-1f32, 0.5, 1.4]);
    let n = || of("GridSample", &["x", "w0"]).int("align_corners", 1).text("padding_mode", "reflection");
    check(20, n(), &x, std::slice::from_ref(&grid), &[1, 1, 3], &[1.0, 3.0, 3.2]);
    let near = n().text("mode", "nearest");
    check(20, near, &t(&[1, 1, 3], &[true, false, true]), &[grid], &[1, 1, 3], &[1.0, 1.0, 1.0]);
    let x = t(&[1, 1, 2, 2], &[1i32, 2, 3, 4]);
    let grid = t(&[1, 1, 2, 2], &[0f32, 0.0, f32::NAN, 1e30]);
    let two = of("GridSample", &["x", "w0"]).text("mode", "bilinear");
    // The mean 2.5 is rounded toward zero. A NaN position reads nothing, which gives 0.
    check(16, two, &x, &[grid], &[1, 1, 1, 2], &[2.0, 0.0]);
    let one = t(&[1, 1, 1], &[5f32]);
    let n = n().text("mode", "cubic");
    check(20, n, &one, &[t(&[1, 2, 1], &[-3f32, 0.7])], &[1, 1, 2], &[5.0, 5.0]);
    invalid(16, of("GridSample", &["x", "w0"]), &["1", "1", "2", "2"], &[t(&[2, 1, 1, 2], &[0f32; 4])]);
    invalid(16, of("GridSample", &["x", "w0"]), &["1", "1", "2", "2"], &[t(&[1, 1, 1, 3], &[0f32; 3])]);
    invalid(16, of("GridSample", &["x", "w0"]), &["1", "1", "0", "2"], &[t(&[1, 1, 1, 2], &[0f32; 2])]);

    let theta = t(&[1, 2, 3], &[1f32, 0.0, 0.5, 0.0, 2.0, 0.0]);
    let n = || of("AffineGrid", &["x", "w0"]);
    let w = [ints(&[1, 1, 1, 2])];
    check(20, n(), &theta, &w, &[1, 1, 2, 2], &[0.0, 0.0, 1.0, 0.0]);
    check(20, n().int("align_corners", 1), &theta, &w, &[1, 1, 2, 2], &[-0.5, -2.0, 1.5, -2.0]);
    invalid(20, n(), &["1", "2", "3"], &[ints(&[2, 1, 1, 2])]);
    unsupported(20, n(), &["1", "2", "3"], &[ints(&[1, 1, 1, 1 << 40])]);
}

#[test]
fn regions() {
    let v: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let x = t(&[1, 1, 4, 4], &v);
    let rois = t(&[2, 4], &[0f32, 0.0, 3.0, 3.0, 0.5, 1.0, 2.5, 5.0]);
    let n = || of("RoiAlign", &["x", "w0", "w1"]).int("output_height", 1).int("output_width", 2);
    let w = [rois, ints(&[0, 0])];
    check(10, n(), &x, &w, &[2, 1, 1, 2], &[6.75, 8.25, 7.75, 8.5]);
    check(16, n(), &x, &w, &[2, 1, 1, 2], &[4.3125, 5.75, 9.5, 10.5]);
    // An empty region has no samples.
    let none = [t(&[1, 4], &[3f32, 3.0, 1.0, 1.0]), ints(&[0])];
    for mode in ["avg", "max"] {
        check(16, n().text("mode", mode), &x, &none, &[1, 1, 1, 2], &[0.0, 0.0]);
    }
    let huge = [t(&[1, 4], &[0f32, 0.0, 1e9, 1e9]), ints(&[0])];
    invalid(16, n(), &["1", "1", "4", "4"], &huge);
    invalid(16, n().int("sampling_ratio", -1), &["1", "1", "4", "4"], &w);
    invalid(16, n(), &["1", "1", "4", "4"], &[w[0].clone(), ints(&[0])]);

    let rois = [0f32, 0.0, 0.0, 3.0, 3.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0, -9.0, -9.0, -5.0, -5.0];
    let n = of("MaxRoiPool", &["x", "w0"]).ints("pooled_shape", &[2, 2]);
    let want = [5.0, 7.0, 13.0, 15.0, 5.0, 5.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0];
    check(7, n, &x, &[t(&[3, 5], &rois)], &[3, 1, 2, 2], &want);
}

#[test]
fn transposed_convolution_by_version() {
    let x = t(&[1, 1, 2], &[1f32, 2.0]);
    let w = [t(&[1, 1, 3], &[1f32; 3])];
    let n = || of("ConvTranspose", &["x", "w0"]);
    check(11, n(), &x, &w, &[1, 1, 4], &[1.0, 3.0, 3.0, 2.0]);
    // From version 11 on, the odd element of the padding is at the start, or at the end with SAME_UPPER.
    // Before, it is the other way round.
    let three = || n().ints("output_shape", &[3]);
    check(11, three(), &x, &w, &[1, 1, 3], &[3.0, 3.0, 2.0]);
    check(11, three().text("auto_pad", "SAME_UPPER"), &x, &w, &[1, 1, 3], &[1.0, 3.0, 3.0]);
    check(10, three(), &x, &w, &[1, 1, 3], &[1.0, 3.0, 3.0]);
    check(10, three().text("auto_pad", "SAME_UPPER"), &x, &w, &[1, 1, 3], &[3.0, 3.0, 2.0]);
    check(11, n().ints("output_shape", &[1, 1, 5]), &x, &w, &[1, 1, 5], &[1.0, 3.0, 3.0, 2.0, 0.0]);
    check(11, n().text("auto_pad", "SAME_UPPER"), &x, &w, &[1, 1, 2], &[3.0, 3.0]);
    let wide = n().ints("strides", &[3]).ints("output_padding", &[1]).ints("dilations", &[2]);
    check(11, wide, &x, &w, &[1, 1, 9], &[1.0, 0.0, 1.0, 2.0, 1.0, 2.0, 0.0, 2.0, 0.0]);
    let dims = ["1", "1", "2"];
    invalid(11, n().int("group", 2), &dims, &w);
    invalid(11, n().int("group", 0), &dims, &w);
    invalid(11, n().ints("strides", &[0]), &dims, &w);
    invalid(11, n().ints("output_shape", &[-1]), &dims, &w);
    invalid(11, n().ints("output_shape", &[1, 2, 3, 4]), &dims, &w);
    invalid(11, n().ints("dilations", &[i32::MAX as i64]), &dims, &w);
    invalid(11, n().ints("pads", &[9, 9]), &dims, &w);
    unsupported(11, three(), &["1", "1", "n"], &w);
}

#[test]
fn deformable_convolution_is_a_convolution_without_offsets() {
    let v: Vec<f32> = (0..27).map(|i| ((i * 7) % 11) as f32).collect();
    let x = t(&[1, 1, 3, 3, 3], &v);
    let w = t(&[1, 1, 2, 1, 2], &[1f32, -2.0, 0.5, 3.0]);
    let conv =
        run_one(22, of("Conv", &["x", "w0"]).ints("pads", &[1, 0, 0, 0, 0, 1]), &x, std::slice::from_ref(&w));
    assert_eq!(&conv.dims[..], [1, 1, 3, 3, 3]);
    let n = of("DeformConv", &["x", "w0", "w1"]).ints("pads", &[1, 0, 0, 0, 0, 1]);
    let still = t(&[1, 12, 3, 3, 3], &[0f32; 324]);
    check(19, n.clone(), &x, &[w.clone(), still], &[1, 1, 3, 3, 3], &conv.to_vec::<f64>());
    let dims = ["1", "1", "3", "3", "3"];
    invalid(19, n.clone(), &dims, &[w.clone(), t(&[1, 12, 3, 3, 2], &[0f32; 216])]);
    invalid(19, n.int("offset_group", 2), &dims, &[w, t(&[1, 24, 3, 3, 3], &[0f32; 648])]);
}

#[test]
fn blocks_of_columns() {
    let n = || of("Col2Im", &["x", "w0", "w1"]);
    // Four blocks of 2 × 1 in an image of 3 × 2. Each element of the middle row is the sum of elements of two
    // blocks.
    let x = t(&[1, 2, 4], &[1i32, 2, 3, 4, 10, 20, 30, 40]);
    check(18, n(), &x, &[ints(&[3, 2]), ints(&[2, 1])], &[1, 1, 3, 2], &[1.0, 2.0, 13.0, 24.0, 30.0, 40.0]);
    let dims = ["1", "2", "4"];
    invalid(18, n(), &dims, &[ints(&[3, 3]), ints(&[2, 1])]);
    invalid(18, n(), &dims, &[ints(&[3, 2]), ints(&[3, 1])]);
    invalid(18, n(), &dims, &[ints(&[1, 2]), ints(&[2, 1])]);
    invalid(18, n(), &dims, &[ints(&[3, -2]), ints(&[2, 1])]);
    invalid(18, n(), &dims, &[ints(&[]), ints(&[])]);
}

#[test]
fn places_of_maxima() {
    let n = || node("MaxPool", &["x"], &["v", "y"]).ints("kernel_shape", &[2, 2]);
    let x = t(&[1, 2, 2, 3], &[1f32, 5.0, 5.0, 5.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0]);
    check(12, n(), &x, &[], &[1, 2, 1, 2], &[1.0, 1.0, 6.0, 11.0]);
    check(12, n().int("storage_order", 1), &x, &[], &[1, 2, 1, 2], &[2.0, 2.0, 6.0, 11.0]);
    // Padding is never the maximum, not even against the lowest value.
    let low = t(&[1, 1, 2], &[f32::NEG_INFINITY; 2]);
    let padded =
        |k: i64| node("MaxPool", &["x"], &["v", "y"]).ints("kernel_shape", &[k]).ints("pads", &[1, 1]);
    check(12, padded(2), &low, &[], &[1, 1, 3], &[0.0, 0.0, 1.0]);
    let nan = t(&[1, 1, 5], &[1f32, f32::NAN, 3.0, f32::NAN, 9.0]);
    check(12, padded(5), &nan, &[], &[1, 1, 3], &[1.0, 1.0, 1.0]);
    // With SAME_UPPER, a stride that is longer than the kernel crops the input.
    let v: Vec<i8> = (0..9).collect();
    let same = |outputs: &[&str]| {
        node("MaxPool", &["x"], outputs)
            .ints("kernel_shape", &[1])
            .ints("strides", &[3])
            .text("auto_pad", "SAME_UPPER")
    };
    check(12, same(&["y"]), &t(&[1, 1, 9], &v), &[], &[1, 1, 3], &[1.0, 4.0, 7.0]);
    check(12, same(&["v", "y"]), &t(&[1, 1, 9], &v), &[], &[1, 1, 3], &[1.0, 4.0, 7.0]);
    let gap = node("MaxPool", &["x"], &["v", "y"]).ints("kernel_shape", &[3]).ints("dilations", &[3]);
    check(12, gap.ints("strides", &[2]), &t(&[1, 1, 9], &v), &[], &[1, 1, 2], &[6.0, 8.0]);
}

#[test]
fn max_unpool_inverts_max_pool() {
    let n = || of("MaxUnpool", &["x", "w0"]).ints("kernel_shape", &[2]).ints("strides", &[2]);
    let x = t(&[1, 1, 2], &[5f32, 6.0]);
    check(9, n(), &x, &[t(&[1, 1, 2], &[1i64, 2])], &[1, 1, 4], &[0.0, 5.0, 6.0, 0.0]);
    let mut sized = n();
    sized.input.push("w1".into());
    let w = [t(&[1, 1, 2], &[1i64, 2]), ints(&[1, 1, 5])];
    check(9, sized.clone(), &x, &w, &[1, 1, 5], &[0.0, 5.0, 6.0, 0.0, 0.0]);
    let at = || t(&[1, 1, 2], &[0i64, 1]);
    let dims = ["1", "1", "2"];
    invalid(9, sized.clone(), &dims, &[at(), ints(&[1, 1, 3])]);
    invalid(9, sized, &dims, &[at(), ints(&[1, 1, i64::MAX])]);
    invalid(9, n().ints("pads", &[4, 4]), &dims, &[at()]);
    invalid(9, n(), &dims, &[t(&[1, 2, 1], &[0i64, 1])]);
}

#[test]
fn norms_and_means_of_old_versions() {
    let x = t(&[1, 1, 3], &[3f32, -4.0, 0.0]);
    let n = |op| of(op, &["x"]);
    check(1, n("GlobalLpPool").float("p", 2.0), &x, &[], &[1, 1, 1], &[5.0]);
    check(2, n("GlobalLpPool").int("p", 1), &x, &[], &[1, 1, 1], &[7.0]);
    check(1, n("LpPool").float("p", 2.0).ints("kernel_shape", &[2]), &x, &[], &[1, 1, 2], &[5.0, 4.0]);
    let three = n("LpPool").int("p", 3).ints("kernel_shape", &[2]).ints("pads", &[1, 0]);
    check(18, three, &x, &[], &[1, 1, 3], &[3.0, 91f64.cbrt(), 4.0]);
    invalid(18, n("LpPool").int("p", 0).ints("kernel_shape", &[2]), &["1", "1", "3"], &[]);
    invalid(18, n("GlobalLpPool"), &["1", "1"], &[]);
    let average = n("AveragePool").ints("kernel_shape", &[2]).ints("pads", &[1, 0]);
    check(1, average, &x, &[], &[1, 1, 3], &[3.0, -0.5, -2.0]);
}

#[test]
fn padding_and_blocks() {
    let x = t(&[1, 2], &[1f32, 2.0]);
    check(1, of("Pad", &["x"]).ints("paddings", &[0, 1, 0, 0]), &x, &[], &[1, 3], &[0.0, 1.0, 2.0]);
    let x = t(&[1, 4, 1, 1], &[1i64, 2, 3, 4]);
    let d2s = || of("DepthToSpace", &["x"]);
    check(1, d2s().int("blocksize", 2), &x, &[], &[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let dims = ["1", "6", "1", "1"];
    invalid(13, d2s().int("blocksize", 2), &dims, &[]);
    invalid(13, d2s().int("blocksize", 0), &dims, &[]);
    invalid(13, d2s(), &dims, &[]);
    invalid(13, d2s().int("blocksize", 1).text("mode", "RDC"), &dims, &[]);
    invalid(13, of("SpaceToDepth", &["x"]).int("blocksize", 2), &["1", "1", "3", "2"], &[]);
    let crop = || of("CenterCropPad", &["x", "w0"]);
    let x = t(&[5], &[1i32, 2, 3, 4, 5]);
    check(18, crop(), &x, &[ints(&[2])], &[2], &[2.0, 3.0]);
    check(18, crop(), &x, &[ints(&[8])], &[8], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]);
    invalid(18, crop(), &["5"], &[ints(&[2, 2])]);
    invalid(18, crop(), &["5"], &[ints(&[-2])]);
    invalid(18, crop(), &["5"], &[ints(&[1 << 40])]);
}

#[test]
fn selection_of_boxes() {
    // A model needs an input, so x exists; all relevant values are constant.
    let x = t(&[1], &[0f32]);
    let boxes = [0f32, 0.0, 1.0, 1.0, 0.0, 0.1, 1.0, 1.1, 1.0, 11.0, 0.0, 10.0];
    let w = |scores: &[f32; 3], most: i64, overlap: f32| {
        vec![t(&[1, 3, 4], &boxes), t(&[1, 1, 3], scores), ints(&[most]), t(&[], &[overlap]), f(&[0.25])]
    };
    let n = || of("NonMaxSuppression", &["w0", "w1", "w2", "w3", "w4"]);
    let pick = |w: &[ConstData], want: &[i64]| {
        let y = run_one(11, n(), &x, w);
        assert_eq!(&y.dims[..], [want.len(), 3]);
        assert_eq!(y.to_vec::<i64>().chunks(3).map(|c| c[2]).collect::<Vec<_>>(), want);
    };
    pick(&w(&[0.5, 0.9, 0.5], 3, 0.5), &[1, 2]);
    // Of equal scores the first box comes first.
    pick(&w(&[0.5, 0.9, 0.5], 3, 0.9), &[1, 0, 2]);
    pick(&w(&[0.0, 0.9, -0.0], 3, 0.5), &[1]);
    pick(&w(&[0.5, f32::NAN, 0.5], 1, 0.5), &[0]);
    pick(&w(&[0.5, 0.9, 0.5], 0, 0.5), &[]);
    pick(&w(&[0.5, 0.9, 0.5], i64::MIN, 0.5), &[]);
    pick(&w(&[0.25, 0.25, 0.25], 3, 0.5), &[]);
    let short = of("NonMaxSuppression", &["w0", "w1"]);
    assert_eq!(run_one(10, short, &x, &w(&[0.5; 3], 1, 0.5)).numel(), 0);
    let mut bad = w(&[0.5; 3], 1, 0.5);
    bad[1] = t(&[1, 1, 2], &[0f32; 2]);
    invalid(11, n(), &["1"], &bad);
    invalid(11, n().int("center_point_box", 2), &["1"], &w(&[0.5; 3], 1, 0.5));
    // Building one graph requires constant boxes.
    unsupported(11, of("NonMaxSuppression", &["x", "w1", "w2"]), &["1", "3", "4"], &w(&[0.5; 3], 1, 0.5));
}

#[test]
fn decoding() {
    let x = t(&[1], &[0f32]);
    let grey: &[u8] = include_bytes!("../../../tests/images/grey.jpg");
    let n = |format| of("ImageDecoder", &["w0"]).text("pixel_format", format);
    let one = run_one(20, n("Grayscale"), &x, &[t(&[grey.len()], grey)]);
    assert_eq!(&one.dims[..], [11, 17, 1]);
    let three = run_one(20, n("RGB"), &x, &[t(&[grey.len()], grey)]);
    let spread: Vec<u8> = one.bytes().iter().flat_map(|&v| [v; 3]).collect();
    assert_eq!((&three.dims[..], three.bytes()), (&[11, 17, 3][..], &spread[..]));
    let rgb: &[u8] = include_bytes!("../../../tests/images/444.jpg");
    let a = run_one(20, n("RGB"), &x, &[t(&[rgb.len()], rgb)]);
    let b = run_one(20, n("BGR"), &x, &[t(&[rgb.len()], rgb)]);
    assert!(a.bytes().chunks(3).zip(b.bytes().chunks(3)).all(|(a, b)| [a[2], a[1], a[0]] == b));
    // Data that is not an image, or a truncated image, gives an empty matrix.
    for bad in [&b"no image"[..], &rgb[..rgb.len() / 2], &[]] {
        assert_eq!(&run_one(20, n("RGB"), &x, &[t(&[bad.len()], bad)]).dims[..], [0, 0, 3]);
    }
    // Four components: a JPEG, but of an unsupported kind.
    let mut four = b"\xff\xd8\xff\xc0\x00\x14\x08\x00\x08\x00\x08\x04".to_vec();
    (1..=4).for_each(|i| four.extend([i, 0x11, 0]));
    unsupported(20, n("RGB"), &["1"], &[t(&[four.len()], &four)]);
    invalid(20, n("YUV"), &["1"], &[t(&[1], &[0u8])]);
    invalid(20, n("RGB"), &["1"], &[t(&[1], &[0f32])]);
}

//! Tests of quantised operators: exact sums, rounding, granularity, rejected cases.

use super::qlinear::{equal_runs, runs};
use crate::onnx::proto::NodeProto;
use crate::onnx::test_models::*;
use halcyon_ir::{ConstData, DType, Element, Error};

fn refused(opset: i64, n: NodeProto, x: &ConstData, w: &[ConstData]) -> Error {
    let names: Vec<String> = (0..w.len()).map(|i| format!("w{i}")).collect();
    let w: Vec<(&str, ConstData)> = names.iter().map(String::as_str).zip(w.iter().cloned()).collect();
    let dims: Vec<String> = x.dims.iter().map(|d| d.to_string()).collect();
    let dims: Vec<&str> = dims.iter().map(String::as_str).collect();
    import(model(opset, port("x", x.dtype, &dims), vec![n], &w)).unwrap_err()
}

fn s<T: Element>(v: T) -> ConstData {
    t(&[], &[v])
}

#[test]
fn parts_of_sums_stay_within_the_limit() {
    let cost = |i: usize, o: usize| [[5, 1], [5, 1], [1, 9], [1, 1]][i][o];
    assert_eq!(runs(4, 2, 10, cost).unwrap(), [(0, 2), (2, 2)]);
    assert_eq!(runs(4, 2, 11, cost).unwrap(), [(0, 3), (3, 1)]);
    assert_eq!(runs(4, 2, 100, cost).unwrap(), [(0, 4)]);
    assert_eq!(runs(4, 2, 8, cost), None);
    assert_eq!(runs(0, 2, 8, cost).unwrap(), [(0, 0)]);
    assert_eq!(equal_runs(5, 10, 4).unwrap(), [(0, 2), (2, 2), (4, 1)]);
    assert_eq!(equal_runs(0, 10, 4).unwrap(), [(0, 0)]);
    assert_eq!(equal_runs(5, 3, 4), None);
    assert_eq!(equal_runs(usize::MAX, 10, 4), None);
}

/// 601 products of 255 and 255 sum to an odd number above 2^24, which f32 cannot represent.
#[test]
fn products_are_exact_past_the_integers_of_f32() {
    const K: usize = 601;
    let want = (K * 255 * 255) as f64;
    let (x, w) = (t(&[1, K], &[255u8; K]), t(&[K, 1], &[255u8; K]));
    check(10, node("MatMulInteger", &["x", "w0"], &["y"]), &x, std::slice::from_ref(&w), &[1, 1], &[want]);
    // The weight is not a constant here.
    let wt = node("MatMulInteger", &["w0", "x"], &["y"]);
    check(10, wt, &w, std::slice::from_ref(&x), &[1, 1], &[want]);
    let v = node("MatMulInteger", &["x", "w0"], &["y"]);
    check(10, v, &t(&[K], &[255u8; K]), &[t(&[K], &[255u8; K])], &[], &[want]);

    // Signed weights in two groups, with zero points of the operand and of each group's weights.
    let x = t(&[1, 2 * K, 1], &[255u8; 2 * K]);
    let w = [t(&[2, K, 1], &[127i8; 2 * K]), s(0u8), t(&[2], &[-128i8, 126])];
    let n = node("ConvInteger", &["x", "w0", "w1", "w2"], &["y"]).int("group", 2);
    check(10, n, &x, &w, &[1, 2, 1], &[want, (K * 255) as f64]);
    // The product at one position of the window is within the limit, but the sum over all positions is not,
    // so this runs in f64.
    let x = t(&[1, 1, K], &[255u8; K]);
    let n = node("ConvInteger", &["x", "w0"], &["y"]);
    check(10, n, &x, &[t(&[1, 1, K], &[255u8; K])], &[1, 1, 1], &[want]);
}

#[test]
fn zero_points_pad_and_may_be_per_row() {
    let x = t(&[1, 1, 3], &[5u8, 6, 7]);
    let n = node("ConvInteger", &["x", "w0", "w1"], &["y"]).ints("pads", &[1, 1]);
    // Padding counts as the zero point.
    check(10, n, &x, &[t(&[1, 1, 2], &[1i8, 10]), s(5u8)], &[1, 1, 4], &[0.0, 10.0, 21.0, 2.0]);
    let x = t(&[2, 2], &[1u8, 2, 3, 4]);
    let w = [t(&[2, 2], &[1i8, 2, 3, 4]), t(&[2], &[1u8, 2]), t(&[2], &[1i8, 0])];
    let n = node("MatMulInteger", &["x", "w0", "w1", "w2"], &["y"]);
    check(10, n, &x, &w, &[2, 2], &[2.0, 4.0, 4.0, 10.0]);

    let n = || node("MatMulInteger", &["x", "w0", "w1"], &["y"]);
    let w = |z| [t(&[2, 2], &[1i8; 4]), z];
    for z in [s(0i8), t(&[3], &[0u8; 3])] {
        assert!(matches!(refused(10, n(), &x, &w(z)), Error::Argument { .. }));
    }
    let n = node("MatMulInteger", &["x", "w0"], &["y"]);
    for (x, w) in [
        (t(&[2, 2], &[1i16; 4]), t(&[2, 2], &[1i8; 4])),
        (t(&[2, 3], &[1u8; 6]), t(&[2, 2], &[1i8; 4])),
        (s(1u8), t(&[2, 2], &[1i8; 4])),
    ] {
        assert!(matches!(refused(10, n.clone(), &x, &[w]), Error::Argument { .. }));
    }
}

#[test]
fn sizes_without_elements_cost_nothing() {
    let far = 1 << 40;
    let x = t::<u8>(&[2, 0], &[]);
    let n = node("MatMulInteger", &["x", "w0"], &["y"]);
    let w = t::<i8>(&[0, far], &[]);
    // Nothing is allocated for the columns; whether the result is addressable is not checked here.
    let m = model(10, port("x", DType::U8, &["2", "0"]), vec![n], &[("w0", w)]);
    assert!(import(m).is_ok_and(|i| i.graph.nodes().len() < 20));
    let n = node("MatMulInteger", &["x", "w0"], &["y"]);
    check(10, n, &x, &[t::<i8>(&[0, 3], &[])], &[2, 3], &[0.0; 6]);
}

#[test]
fn requantised_results() {
    let x = t(&[1, 2], &[3u8, 5]);
    // (1 * 2 + 3 * 4) * 0.25 * 1 / 1 = 3.5, which is rounded to 4 (ties to even). The zero point is -1.
    let w = [s(0.25f32), s(2u8), t(&[2, 1], &[2i8, 4]), s(1f32), s(0i8), s(1f32), s(-1i8)];
    let n = node("QLinearMatMul", &["x", "w0", "w1", "w2", "w3", "w4", "w5", "w6"], &["y"]);
    check(10, n.clone(), &x, &w, &[1, 1], &[3.0]);
    let mut high = w.clone();
    high[5] = s(0.001f32);
    check(21, n.clone(), &x, &high, &[1, 1], &[127.0]);
    let mut rows = w.clone();
    rows[0] = t(&[3], &[0.25f32; 3]);
    assert!(matches!(refused(10, n, &x, &rows), Error::Argument { .. }));

    let x = t(&[1, 1, 2], &[3u8, 5]);
    let w = [
        s(0.5f32),
        s(1u8),
        t(&[2, 1, 1], &[1i8, 2]),
        t(&[2], &[1f32, 0.5]),
        t(&[2], &[0i8, 1]),
        s(0.5f32),
        s(10u8),
        t(&[2], &[100i32, -1000]),
    ];
    let names = ["x", "w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"];
    check(10, node("QLinearConv", &names, &["y"]), &x, &w, &[1, 2, 2], &[112.0, 114.0, 0.0, 0.0]);
}

#[test]
fn quantisation_rounds_saturates_and_scales_by_part() {
    let x = t(&[6], &[0.5f32, 1.5, 2.5, -3.5, 1e9, -1e9]);
    let q = |inputs: &[&str]| node("QuantizeLinear", inputs, &["y"]);
    let w = [s(1f32), s(1i8)];
    check(13, q(&["x", "w0", "w1"]), &x, &w, &[6], &[1.0, 3.0, 3.0, -3.0, 127.0, -128.0]);
    check(10, q(&["x", "w0"]), &x, &w[..1], &[6], &[0.0, 2.0, 2.0, 0.0, 255.0, 0.0]);
    let to = q(&["x", "w0"]).int("output_dtype", DType::U16.row().onnx.into());
    check(21, to, &x, &w[..1], &[6], &[0.0, 2.0, 2.0, 0.0, 65535.0, 0.0]);
    // The quotient is first rounded to the type `precision`: in f16, 3.4995 is 3.5, which is rounded to 4.
    let x = t(&[1], &[2.4995f32]);
    check(23, q(&["x", "w0"]), &x, &w[..1], &[1], &[2.0]);
    let half = q(&["x", "w0"]).int("precision", DType::F16.row().onnx.into());
    check(23, half.clone(), &t(&[1], &[3.4995f32]), &w[..1], &[1], &[4.0]);
    // Integer operands are divided exactly, with ties to even.
    let x = t(&[3], &[16_777_221i32, 5, 7]);
    let zero = [s(16_777_216i32), s(0u8)];
    check(19, q(&["x", "w0", "w1"]), &x, &zero, &[3], &[1.0, 0.0, 0.0]);
    check(19, q(&["x", "w0", "w1"]), &x, &[s(2i32), s(0u8)], &[3], &[255.0, 2.0, 4.0]);

    let x = t(&[2, 3], &[2f32, 4.0, 6.0, 8.0, 10.0, 12.0]);
    let by = [t(&[2], &[1f32, 2.0]), t(&[2], &[0u8, 1])];
    let want = [2.0, 4.0, 6.0, 5.0, 6.0, 7.0];
    check(13, q(&["x", "w0", "w1"]).int("axis", -2), &x, &by, &[2, 3], &want);
    // Blocks of two, and a partial block of one.
    let by = [t(&[2, 2], &[1f32, 2.0, 4.0, 6.0]), t(&[2, 2], &[0u8, 0, 1, 1])];
    let n = q(&["x", "w0", "w1"]).int("axis", 1).int("block_size", 2);
    check(21, n.clone(), &x, &by, &[2, 3], &[2.0, 4.0, 3.0, 3.0, 3.0, 3.0]);
    for (n, w) in [
        (n.clone(), [by[0].clone(), t(&[2, 2], &[0i32; 4])]),
        (q(&["x", "w0", "w1"]).int("block_size", 3), by.clone()),
        (q(&["x", "w0", "w1"]).int("block_size", -1), by.clone()),
        (q(&["x", "w0", "w1"]), by.clone()),
        (n.clone(), [by[0].clone(), s(0u8)]),
        (q(&["x", "w0", "w1"]).int("axis", 2), [t(&[2], &[1f32; 2]), t(&[2], &[0u8; 2])]),
        (q(&["x", "w0", "w1"]).int("output_dtype", 3), [s(1f32), s(0u8)]),
    ] {
        assert!(matches!(refused(21, n, &x, &w), Error::Argument { .. } | Error::DType { .. }));
    }
}

#[test]
fn dequantisation_differs_before_it_scales() {
    let d = |inputs: &[&str]| node("DequantizeLinear", inputs, &["y"]);
    let x = t(&[2], &[0u16, 65535]);
    check(21, d(&["x", "w0", "w1"]), &x, &[s(2f32), s(65535u16)], &[2], &[-131_070.0, 0.0]);
    let x = t(&[2], &[-128i8, 127]);
    let out = d(&["x", "w0", "w1"]).int("output_dtype", DType::F16.row().onnx.into());
    check(23, out, &x, &[s(0.5f32), s(127i8)], &[2], &[-127.5, 0.0]);
    check(10, d(&["x", "w0"]), &t(&[1], &[1 << 20]), &[s(0.5f32)], &[1], &[524_288.0]);
    let by = [t(&[1, 2], &[1f32, 10.0]), t(&[1, 2], &[0u8, 1])];
    let n = d(&["x", "w0", "w1"]).int("block_size", 2);
    check(21, n, &t(&[1, 3], &[1u8, 2, 3]), &by, &[1, 3], &[1.0, 2.0, 20.0]);
    assert!(matches!(refused(13, d(&["x", "w0", "w1"]), &x, &[s(1f32), s(0u8)]), Error::Argument { .. }));
}

#[test]
fn dynamic_ranges_include_zero() {
    let n = |y: &[&str]| node("DynamicQuantizeLinear", &["x"], y);
    let x = t(&[3], &[255f32, 510.0, 1.0]);
    check(11, n(&["y", "s", "z"]), &x, &[], &[3], &[128.0, 255.0, 0.0]);
    check(11, n(&["q", "y", "z"]), &x, &[], &[], &[2.0]);
    let x = t(&[2], &[-510f32, -2.0]);
    check(11, n(&["q", "s", "y"]), &x, &[], &[], &[255.0]);
    check(11, n(&["y", "s", "z"]), &x, &[], &[2], &[0.0, 254.0]);
    check(11, n(&["q", "y", "z"]), &t(&[2], &[0f32; 2]), &[], &[], &[1.0]);
}

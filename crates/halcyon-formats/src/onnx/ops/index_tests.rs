//! Tests of operators that use indices, carry a state or select elements.

use crate::onnx::proto::NodeProto;
use crate::onnx::test_models::*;
use halcyon_ir::{ConstData, DType, Error};

fn refused(opset: i64, n: NodeProto, x: &[&str], w: &[ConstData]) -> Error {
    let names: Vec<String> = (0..w.len()).map(|i| format!("w{i}")).collect();
    let w: Vec<(&str, ConstData)> = names.iter().map(String::as_str).zip(w.iter().cloned()).collect();
    import(model(opset, port("x", DType::F32, x), vec![n], &w)).unwrap_err()
}

#[test]
fn matrices_with_a_diagonal() {
    let x = t(&[2, 3], &[0f32; 6]);
    let n = |k| node("EyeLike", &["x"], &["y"]).int("k", k).int("dtype", DType::Bool.row().onnx.into());
    check(9, n(0), &x, &[], &[2, 3], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    check(22, n(-1), &x, &[], &[2, 3], &[0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    for far in [3, -2, i64::MAX, i64::MIN] {
        check(9, n(far), &x, &[], &[2, 3], &[0.0; 6]);
    }
    assert!(matches!(refused(9, n(0), &["2"], &[]), Error::Argument { .. }));
}

#[test]
fn one_hot_classes() {
    let n = node("OneHot", &["x", "w0", "w1"], &["y"]);
    let w = [ints(&[3]), t(&[2], &[7i32, 9])];
    let x = t(&[4], &[1f32, -1.0, 3.0, -4.0]);
    let want = [7.0, 9.0, 7.0, 7.0, 7.0, 9.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0];
    check(11, n.clone(), &x, &w, &[4, 3], &want);
    let first = [7.0, 7.0, 7.0, 7.0, 9.0, 7.0, 7.0, 7.0, 7.0, 9.0, 7.0, 7.0];
    check(9, n.clone().int("axis", 0), &x, &w, &[3, 4], &first);
    // 2^64 - 1 matches no class, and must not be read as -1.
    check(11, n.clone(), &t(&[1], &[u64::MAX]), &w, &[1, 3], &[7.0; 3]);
    for w in [[ints(&[-1]), t(&[2], &[7i32, 9])], [ints(&[3]), t(&[3], &[7i32; 3])]] {
        assert!(matches!(refused(11, n.clone(), &["4"], &w), Error::Argument { .. }));
    }
}

#[test]
fn tuples_of_indices() {
    let x = t(&[2, 2, 2], &[0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let g = node("GatherND", &["x", "w0"], &["y"]);
    check(11, g.clone(), &x, &[t(&[2, 3], &[0i64, 1, -1, -1, 0, 0])], &[2], &[3.0, 4.0]);
    check(13, g.clone(), &x, &[t(&[1, 2], &[1i64, -1])], &[1, 2], &[6.0, 7.0]);
    let batch = g.clone().int("batch_dims", 1);
    check(13, batch.clone(), &x, &[t(&[2, 1], &[1i64, -2])], &[2, 2], &[2.0, 3.0, 4.0, 5.0]);
    check(
        13,
        g.clone().int("batch_dims", 2),
        &x,
        &[t(&[2, 2, 1], &[0i64, 1, -1, 0])],
        &[2, 2],
        &[0.0, 3.0, 5.0, 6.0],
    );
    let shape = ["2", "2", "2"];
    for (n, w) in [
        (g.clone(), t(&[1, 4], &[0i64; 4])),
        (g.clone(), t::<i64>(&[1, 0], &[])),
        (batch.clone(), t(&[3, 1], &[0i64; 3])),
        (g.clone().int("batch_dims", 2), t(&[2, 2], &[0i64; 4])),
        (g.clone().int("batch_dims", -1), t(&[2, 2], &[0i64; 4])),
    ] {
        assert!(matches!(refused(13, n, &shape, &[w]), Error::Argument { .. }));
    }

    let s = |r| node("ScatterND", &["x", "w0", "w1"], &["y"]).text("reduction", r);
    let x = t(&[2, 2], &[1f32, 2.0, 3.0, 4.0]);
    let w = [t(&[3, 2], &[0i64, 1, -2, -1, 1, 0]), t(&[3], &[10f32, 20.0, 30.0])];
    check(16, s("add"), &x, &w, &[2, 2], &[1.0, 32.0, 33.0, 4.0]);
    check(18, s("max"), &x, &w, &[2, 2], &[1.0, 20.0, 30.0, 4.0]);
    let w = [t(&[1, 1], &[-1i64]), t(&[1, 2], &[8f32, 9.0])];
    check(11, s("none"), &x, &w, &[2, 2], &[1.0, 2.0, 8.0, 9.0]);
    assert!(matches!(refused(16, s("mean"), &["2", "2"], &w), Error::Argument { .. }));
    let w = [t(&[1, 1], &[0i64]), t(&[1], &[8f32])];
    assert!(matches!(refused(16, s("none"), &["2", "2"], &w), Error::Argument { .. }));
}

#[test]
fn scattered_bools_are_any_and_all() {
    let x = t(&[3], &[true, false, false]);
    let w = [ints(&[0, 1, 1]), t(&[3], &[false, false, true])];
    let s = |r| node("ScatterElements", &["x", "w0", "w1"], &["y"]).text("reduction", r);
    check(18, s("add"), &x, &w, &[3], &[1.0, 1.0, 0.0]);
    check(18, s("mul"), &x, &w, &[3], &[0.0, 0.0, 0.0]);
    check(18, s("none"), &x, &w, &[3], &[0.0, 1.0, 0.0]);
    check(9, node("Scatter", &["x", "w0", "w1"], &["y"]), &x, &w, &[3], &[0.0, 1.0, 0.0]);
}

#[test]
fn largest_and_smallest_by_version() {
    let x = t(&[5], &[3i32, 9, 1, 9, -4]);
    let f = t(&[5], &[3f32, 9.0, 1.0, 9.0, -4.0]);
    check(1, node("TopK", &["x"], &["y", "i"]).int("k", 2), &f, &[], &[2], &[9.0, 9.0]);
    check(10, node("TopK", &["x", "w0"], &["v", "y"]), &f, &[ints(&[3])], &[3], &[1.0, 3.0, 0.0]);
    let n = node("TopK", &["x", "w0"], &["y", "i"]).int("largest", 0).int("sorted", 0);
    check(11, n, &x, &[ints(&[2])], &[2], &[-4.0, 1.0]);
    let n = node("TopK", &["x", "w0"], &["y", "i"]);
    for k in [6, -1] {
        assert!(matches!(refused(11, n.clone(), &["5"], &[ints(&[k])]), Error::Argument { .. }));
    }
    assert!(matches!(refused(1, node("TopK", &["x"], &["y", "i"]), &["5"], &[]), Error::Argument { .. }));
}

#[test]
fn sequences_backwards() {
    let n = node("ReverseSequence", &["x", "w0"], &["y"]);
    let x = t(&[3, 2], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    check(10, n.clone(), &x, &[ints(&[2, 3])], &[3, 2], &[3.0, 6.0, 1.0, 4.0, 5.0, 2.0]);
    let n2 = n.clone().int("batch_axis", 0).int("time_axis", 1);
    check(10, n2, &x, &[ints(&[0, 2, 1])], &[3, 2], &[1.0, 2.0, 4.0, 3.0, 5.0, 6.0]);
    let same = n.clone().int("batch_axis", 0);
    assert!(matches!(refused(10, same, &["3", "2"], &[ints(&[2, 3])]), Error::Argument { .. }));
    assert!(matches!(refused(10, n, &["3", "2"], &[ints(&[2, 3, 1])]), Error::Argument { .. }));
}

#[test]
fn caches_and_states() {
    let x = t(&[2, 3, 1], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let w = [t(&[2, 2, 1], &[10f32, 20.0, 30.0, 40.0]), ints(&[1, 2])];
    let n = |m| node("TensorScatter", &["x", "w0", "w1"], &["y"]).text("mode", m);
    let want = [1.0, 10.0, 20.0, 40.0, 5.0, 30.0];
    check(24, n("circular"), &x, &w, &[2, 3, 1], &want);
    let w = [w[0].clone(), ints(&[1, 0])];
    check(24, n("linear"), &x, &w, &[2, 3, 1], &[1.0, 10.0, 20.0, 30.0, 40.0, 6.0]);
    check(
        24,
        node("TensorScatter", &["x", "w0"], &["y"]),
        &x,
        &w[..1],
        &[2, 3, 1],
        &[10.0, 20.0, 3.0, 30.0, 40.0, 6.0],
    );
    for bad in [n("linear").int("axis", 0), n("ring"), n("linear").int("axis", 2)] {
        assert!(matches!(refused(24, bad, &["2", "3", "1"], &w), Error::Argument { .. }));
    }
    assert!(matches!(refused(24, n("linear"), &["2", "1", "1"], &w), Error::Argument { .. }));

    let x = t(&[1, 1, 2], &[3f32, 4.0]);
    let w = [t(&[1, 1, 3], &[1f32, 10.0, 100.0]), t(&[1], &[0.5f32]), t(&[1, 1, 2], &[1f32, 2.0])];
    let n = |o: &[&str]| node("CausalConvWithState", &["x", "w0", "w1", "w2"], o);
    check(27, n(&["y", "s"]), &x, &w, &[1, 1, 2], &[321.5, 432.5]);
    check(27, n(&["o", "y"]), &x, &w, &[1, 1, 2], &[3.0, 4.0]);
    check(27, node("CausalConvWithState", &["x", "w0"], &["y"]), &x, &w, &[1, 1, 2], &[300.0, 430.0]);
    // Long kernels become convolutions with the same result.
    let mut long = [0f32; 20];
    (long[18], long[19]) = (10.0, 100.0);
    let w = [t(&[1, 1, 20], &long)];
    check(27, node("CausalConvWithState", &["x", "w0"], &["y"]), &x, &w, &[1, 1, 2], &[300.0, 430.0]);
    let n = node("CausalConvWithState", &["x", "w0"], &["y"]).text("activation", "relu");
    assert!(matches!(refused(27, n, &["1", "1", "2"], &w), Error::Argument { .. }));
}

#[test]
fn chosen_elements() {
    let x = t(&[2, 2], &[1f32, 2.0, 3.0, 4.0]);
    let c = node("Compress", &["x", "w0"], &["y"]);
    check(9, c.clone(), &x, &[t(&[3], &[false, true, true])], &[2], &[2.0, 3.0]);
    check(11, c.clone().int("axis", -1), &x, &[t(&[2], &[false, true])], &[2, 1], &[2.0, 4.0]);
    check(11, c.clone().int("axis", 0), &x, &[t(&[1], &[false])], &[0, 2], &[]);
    let long = t(&[3], &[false, false, true]);
    assert!(matches!(refused(11, c.clone().int("axis", 0), &["2", "2"], &[long]), Error::Argument { .. }));
    // A graph cannot have a shape that only a run determines.
    let e = refused(11, node("NonZero", &["x"], &["y"]), &["2"], &[]);
    assert!(matches!(&e, Error::Unsupported { what, .. } if what.contains("NonZero")), "{e}");

    let n = node("NonZero", &["w0"], &["y"]);
    check(9, n.clone(), &x, &[t(&[2, 2], &[0f32, 2.0, 0.0, -1.0])], &[2, 2], &[0.0, 1.0, 1.0, 1.0]);
    check(13, n.clone(), &x, &[t(&[], &[3i8])], &[0, 1], &[]);
    check(13, n, &x, &[t::<f32>(&[0, 3], &[])], &[2, 0], &[]);
}

#[test]
fn unique_slices() {
    let x = t(&[1], &[0f32]);
    let u = |o: &[&str], sorted| node("Unique", &["w0"], o).int("sorted", sorted);
    let w = [t(&[6], &[2f32, 1.0, f32::NAN, 2.0, f32::NAN, 3.0])];
    check(11, u(&["v", "y"], 1), &x, &w, &[4], &[1.0, 0.0, 5.0, 2.0]);
    check(11, u(&["v", "i", "y"], 1), &x, &w, &[6], &[1.0, 0.0, 3.0, 1.0, 3.0, 2.0]);
    check(11, u(&["v", "i", "n", "y"], 0), &x, &w, &[4], &[2.0, 1.0, 2.0, 1.0]);
    check(11, u(&["v", "i", "y"], 0), &x, &w, &[6], &[0.0, 1.0, 2.0, 0.0, 2.0, 3.0]);
    let w = [t(&[2, 3], &[5i64, 4, 5, 1, 9, 1])];
    check(11, u(&["y"], 1).int("axis", 1), &x, &w, &[2, 2], &[4.0, 5.0, 9.0, 1.0]);
    check(11, u(&["y"], 0).int("axis", -1), &x, &w, &[2, 2], &[5.0, 4.0, 1.0, 9.0]);
    check(11, u(&["y"], 1).int("axis", 0), &x, &w, &[2, 3], &[1.0, 9.0, 1.0, 5.0, 4.0, 5.0]);
    check(11, u(&["y"], 1), &x, &[t::<u8>(&[0], &[])], &[0], &[]);
    // Slices without elements are all equal.
    let none = |n| t::<u8>(&[n, 0], &[]);
    check(11, u(&["v", "i", "n", "y"], 1).int("axis", 0), &x, &[none(3)], &[1], &[3.0]);
    let e = refused(11, u(&["y"], 1).int("axis", 0), &["1"], &[none(1 << 40)]);
    assert!(matches!(e, Error::Unsupported { .. }));
    // Integers that f64 cannot represent.
    let w = [t(&[3], &[i64::MAX, i64::MAX - 1, i64::MAX])];
    check(11, u(&["v", "y"], 1), &x, &w, &[2], &[1.0, 0.0]);
}

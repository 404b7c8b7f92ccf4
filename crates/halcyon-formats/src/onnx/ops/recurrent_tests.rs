//! Tests of recurrent layers, with activations that keep the expected numbers simple.

use crate::onnx::proto::{NodeProto, attribute};
use crate::onnx::test_models::*;
use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Error};

fn acts(n: NodeProto, names: &[&'static str], alpha: &[f32], beta: &[f32]) -> NodeProto {
    let names = names.iter().map(|s| Bytes::from_static(s.as_bytes())).collect();
    n.attr("activations", attribute::STRINGS, |a| a.strings = names)
        .attr("activation_alpha", attribute::FLOATS, |a| a.floats = alpha.to_vec())
        .attr("activation_beta", attribute::FLOATS, |a| a.floats = beta.to_vec())
}

/// A layer that computes `h' = x + 2 h` with the weights of [`wr`].
fn rnn(inputs: &[&str], outputs: &[&str]) -> NodeProto {
    acts(node("RNN", inputs, outputs), &["Affine"], &[], &[])
}

fn x() -> ConstData {
    t(&[3, 1, 1], &[1f32, 2.0, 3.0])
}

fn wr() -> Vec<ConstData> {
    vec![t(&[1, 1, 1], &[1f32]), t(&[1, 1, 1], &[2f32])]
}

#[test]
fn directions_lengths_and_states() {
    let dir = |n: NodeProto, d| n.text("direction", d);
    let io = ["x", "w0", "w1"];
    check(7, rnn(&io, &["y"]), &x(), &wr(), &[3, 1, 1, 1], &[1.0, 4.0, 11.0]);
    check(7, dir(rnn(&io, &["y"]), "reverse"), &x(), &wr(), &[3, 1, 1, 1], &[17.0, 8.0, 3.0]);
    check(7, dir(rnn(&io, &["", "y"]), "reverse"), &x(), &wr(), &[1, 1, 1], &[17.0]);

    // Two sequences of lengths 2 and 3 from initial states 1 and 10.
    let x2 = t(&[3, 2, 1], &[1f32, 1.0, 2.0, 2.0, 3.0, 3.0]);
    let mut w = wr();
    w.extend([t(&[2], &[2i32, 3]), t(&[1, 2, 1], &[1f32, 10.0])]);
    let io = ["x", "w0", "w1", "", "w2", "w3"];
    let y = [3.0, 21.0, 8.0, 44.0, 0.0, 91.0];
    check(14, rnn(&io, &["y", "h"]), &x2, &w, &[3, 1, 2, 1], &y);
    check(14, rnn(&io, &["", "y"]), &x2, &w, &[1, 2, 1], &[8.0, 91.0]);
    let y = [9.0, 97.0, 4.0, 48.0, 0.0, 23.0];
    check(14, dir(rnn(&io, &["y"]), "reverse"), &x2, &w, &[3, 1, 2, 1], &y);
    check(14, dir(rnn(&io, &["", "y"]), "reverse"), &x2, &w, &[1, 2, 1], &[9.0, 97.0]);

    // Layout with the batch first.
    let xb = t(&[2, 2, 1], &[1f32, 2.0, 3.0, 4.0]);
    let mut w = wr();
    w.push(t(&[2, 1, 1], &[1f32, 10.0]));
    let io = ["x", "w0", "w1", "", "", "w2"];
    let y = [3.0, 8.0, 23.0, 50.0];
    check(14, rnn(&io, &["y"]).int("layout", 1), &xb, &w, &[2, 2, 1, 1], &y);
    check(14, rnn(&io, &["", "y"]).int("layout", 1), &xb, &w, &[2, 1, 1], &[8.0, 50.0]);
    // Without time steps, the initial hidden state is returned.
    let none = t::<f32>(&[0, 1, 1], &[]);
    check(14, rnn(&["x", "w0", "w1"], &["y"]), &none, &wr(), &[0, 1, 1, 1], &[]);
    check(14, rnn(&["x", "w0", "w1"], &["", "y"]), &none, &wr(), &[1, 1, 1], &[0.0]);
}

#[test]
fn both_directions_with_equal_and_different_weights() {
    let w = [t(&[2, 1, 1], &[1f32, 1.0]), t(&[2, 1, 1], &[2f32, 3.0]), t(&[2, 2], &[0f32, 0.0, 1.0, -1.0])];
    let io = ["x", "w0", "w1", "w2"];
    let n = |second, alpha: &[f32]| {
        acts(node("RNN", &io, &["y", "h"]), &["Affine", second], alpha, &[])
            .text("direction", "bidirectional")
    };
    check(7, n("Affine", &[]), &x(), &w, &[3, 2, 1, 1], &[1.0, 34.0, 4.0, 11.0, 11.0, 3.0]);
    let other = n("LeakyRelu", &[1.0, 0.5]);
    check(7, other, &x(), &w, &[3, 2, 1, 1], &[1.0, 34.0, 4.0, 11.0, 11.0, 3.0]);
    // Values of alpha go to the activations that have that parameter, in order.
    let neg = t(&[3, 1, 1], &[-1f32, -2.0, -3.0]);
    let y = [-2.0, -5.375, -12.0, -3.25, -54.0, -1.5];
    check(7, n("LeakyRelu", &[2.0, 0.5]), &neg, &w, &[3, 2, 1, 1], &y);
}

#[test]
fn activations_and_clip() {
    let v = t(&[1, 3, 1], &[-2f32, 0.5, 3.0]);
    let run = |name, alpha: &[f32], beta: &[f32], want: [f64; 3]| {
        let n = acts(node("RNN", &["x", "w0", "w1"], &["y"]), &[name], alpha, beta);
        check(14, n, &v, &wr(), &[1, 1, 3, 1], &want);
    };
    run("relu", &[], &[], [0.0, 0.5, 3.0]);
    run("Affine", &[2.0], &[1.0], [-3.0, 2.0, 7.0]);
    run("LeakyRelu", &[], &[], [-0.02, 0.5, 3.0]);
    run("ThresholdedRelu", &[0.5], &[], [0.0, 0.5, 3.0]);
    run("ThresholdedRelu", &[], &[], [0.0, 0.0, 3.0]);
    run("ScaledTanh", &[2.0], &[0.5], [-2.0 * 1f64.tanh(), 2.0 * 0.25f64.tanh(), 2.0 * 1.5f64.tanh()]);
    run("HardSigmoid", &[], &[], [0.1, 0.6, 1.0]);
    run("HardSigmoid", &[0.1], &[0.2], [0.0, 0.25, 0.5]);
    run("Elu", &[2.0], &[], [2.0 * (-2f64).exp_m1(), 0.5, 3.0]);
    run("Softsign", &[], &[], [-2.0 / 3.0, 0.5 / 1.5, 0.75]);
    run("Softplus", &[], &[], [(-2f64).exp().ln_1p(), 0.5f64.exp().ln_1p(), 3f64.exp().ln_1p()]);
    run("Tanh", &[], &[], [(-2f64).tanh(), 0.5f64.tanh(), 3f64.tanh()]);
    let n = rnn(&["x", "w0", "w1"], &["y"]).float("clip", 1.0);
    check(14, n, &v, &wr(), &[1, 1, 3, 1], &[-1.0, 0.5, 1.0]);
}

/// In the first cases, the gates are 1, so that coupled gates change the results. In the last cases, each
/// gate equals the sum that enters it, so that peepholes change the results.
#[test]
fn lstm_cells() {
    let each = |n: NodeProto, alpha: &[f32], beta: &[f32]| acts(n, &["Affine"; 3], alpha, beta);
    let w = [t(&[1, 4, 1], &[0f32, 0.0, 0.0, 1.0]), t(&[1, 4, 1], &[0f32; 4])];
    let io = ["x", "w0", "w1"];
    let n = |o: &[&str]| each(node("LSTM", &io, o), &[0.0, 1.0, 1.0], &[1.0, 0.0, 0.0]);
    check(7, n(&["y"]), &x(), &w, &[3, 1, 1, 1], &[1.0, 3.0, 6.0]);
    check(7, n(&["", "", "y"]), &x(), &w, &[1, 1, 1], &[6.0]);
    check(7, n(&["y"]).int("input_forget", 1), &x(), &w, &[3, 1, 1, 1], &[1.0, 2.0, 3.0]);

    // i = 0.5 * 2, f = 0.25 * 2, c = f * 2 + i * 3, o = c.
    let x1 = t(&[1, 1, 1], &[3f32]);
    let mut w = w.to_vec();
    w.extend([t(&[1, 1, 1], &[2f32]), t(&[1, 3], &[0.5f32, 1.0, 0.25])]);
    let io = ["x", "w0", "w1", "", "", "", "w2", "w3"];
    let n = |o: &[&str]| each(node("LSTM", &io, o), &[], &[]);
    check(7, n(&["y", "h", "c"]), &x1, &w, &[1, 1, 1, 1], &[16.0]);
    check(7, n(&["", "", "y"]), &x1, &w, &[1, 1, 1], &[4.0]);
}

/// Both gates are 1/2. The reset gate applies to the recurrent bias or does not.
#[test]
fn gru_resets_before_and_after_the_product() {
    let w = [
        t(&[1, 3, 1], &[0f32, 0.0, 1.0]),
        t(&[1, 3, 1], &[0f32, 0.0, 1.0]),
        t(&[1, 6], &[0f32, 0.0, 0.0, 0.0, 0.0, 1.0]),
        t(&[1, 1, 1], &[2f32]),
    ];
    let n = || {
        let n = node("GRU", &["x", "w0", "w1", "w2", "", "w3"], &["y"]);
        acts(n, &["Affine", "Affine"], &[0.0, 1.0], &[0.5, 0.0])
    };
    let x1 = t(&[1, 1, 1], &[1f32]);
    check(7, n(), &x1, &w, &[1, 1, 1, 1], &[2.5]);
    check(7, n().int("linear_before_reset", 1), &x1, &w, &[1, 1, 1, 1], &[2.25]);
}

#[test]
fn invalid_operands_are_errors() {
    let fails = |n: NodeProto, steps: &str, w: &[ConstData]| {
        let w = [("w0", w[0].clone()), ("w1", w[1].clone())];
        import(model(14, port("x", DType::F32, &[steps, "1", "1"]), vec![n], &w)).unwrap_err()
    };
    let n = || node("RNN", &["x", "w0", "w1"], &["y"]);
    let wide = vec![t(&[1, 2, 1], &[1f32; 2]), t(&[1, 1, 1], &[2f32])];
    assert!(matches!(fails(n(), "3", &wide), Error::Argument { .. }));
    for bad in [
        n().text("direction", "up"),
        n().float("clip", -1.0),
        n().int("hidden_size", 2),
        acts(n(), &["Cosh"], &[], &[]),
        acts(n(), &["Tanh", "Tanh"], &[], &[]),
    ] {
        assert!(matches!(fails(bad, "3", &wr()), Error::Argument { .. }));
    }
    // ONNX specifies no default factors for this activation.
    let n1 = acts(n(), &["ScaledTanh"], &[1.0], &[]);
    assert!(matches!(fails(n1, "3", &wr()), Error::Unsupported { .. }));
    // The graph would have billions of nodes.
    assert!(matches!(fails(n(), "4000000000", &wr()), Error::Unsupported { .. }));
}

//! Tests attention and linear attention against plain loops.

use crate::onnx::proto::{GraphProto, OperatorSetIdProto, attribute};
use crate::onnx::test_models::*;
use halcyon_ir::{ConstData, DType, Error};

/// Pseudo-random numbers between -1 and 1, so that index errors change the result.
fn noise(dims: &[usize], seed: u32) -> ConstData {
    let mut s = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let v: Vec<f32> = (0..dims.iter().product())
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    t(dims, &v)
}

fn four(x: &ConstData) -> [usize; 4] {
    x.dims[..].try_into().unwrap()
}

/// Attention over `q [b, h, s, d]`, `k [b, hk, t, d]` and `v [b, hk, t, dv]`. The softmax runs over `score(b,
/// h, i, j, x)`, where `x` is the scaled product. Rows with every key masked are zero.
fn plain(
    q: &ConstData,
    k: &ConstData,
    v: &ConstData,
    scale: f64,
    score: impl Fn([usize; 4], f64) -> f64,
) -> Vec<f64> {
    let ([batch, heads, s, d], [_, hk, t, dv]) = (four(q), four(v));
    let (q, k, v) = (q.to_vec::<f64>(), k.to_vec::<f64>(), v.to_vec::<f64>());
    let mut y = vec![];
    for n in 0..batch * heads * s {
        let (b, h, i) = (n / (heads * s), n / s % heads, n % s);
        let kv = b * hk + h / (heads / hk);
        let dot = |j: usize| (0..d).map(|c| q[n * d + c] * k[(kv * t + j) * d + c]).sum::<f64>();
        let w: Vec<f64> = (0..t).map(|j| score([b, h, i, j], dot(j) * scale)).collect();
        let top = w.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = w.iter().map(|x| if top.is_finite() { (x - top).exp() } else { 0.0 }).collect();
        let sum = e.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        y.extend((0..dv).map(|c| (0..t).map(|j| e[j] / sum * v[(kv * t + j) * dv + c]).sum::<f64>()));
    }
    y
}

const LOW: f64 = f64::NEG_INFINITY;

#[test]
fn shared_heads_and_packed_operands() {
    let (q, k, v) = (noise(&[2, 4, 3, 8], 1), noise(&[2, 2, 5, 8], 2), noise(&[2, 2, 5, 6], 3));
    let root = 1.0 / 8f64.sqrt();
    let n = || node("Attention", &["x", "w0", "w1"], &["y"]);
    let want = plain(&q, &k, &v, root, |_, x| x);
    check(23, n(), &q, &[k.clone(), v.clone()], &[2, 4, 3, 6], &want);
    let capped = plain(&q, &k, &v, 0.5, |_, x| 0.3 * (x / 0.3).tanh());
    check(23, n().float("scale", 0.5).float("softcap", 0.3), &q, &[k, v], &[2, 4, 3, 6], &capped);

    // [b, s, h * d]: the same numbers in the packed layout.
    let inside = |x: &ConstData| {
        let ([b, h, s, d], v) = (four(x), x.to_vec::<f32>());
        let at = |n: usize| {
            let (b, s_, h_, c) = (n / (s * h * d), n / (h * d) % s, n / d % h, n % d);
            v[((b * h + h_) * s + s_) * d + c]
        };
        t(&[b, s, h * d], &(0..v.len()).map(at).collect::<Vec<_>>())
    };
    let (q, k, v) = (noise(&[2, 4, 3, 8], 1), noise(&[2, 2, 5, 8], 2), noise(&[2, 2, 5, 6], 3));
    let y = t(&[2, 4, 3, 6], &want.iter().map(|v| *v as f32).collect::<Vec<_>>());
    let packed = n().int("q_num_heads", 4).int("kv_num_heads", 2);
    check(23, packed, &inside(&q), &[inside(&k), inside(&v)], &[2, 3, 24], &inside(&y).to_vec::<f64>());
}

#[test]
fn causal_with_a_cache_inside_and_outside() {
    let (q, k, v) = (noise(&[1, 1, 2, 4], 1), noise(&[1, 1, 2, 4], 2), noise(&[1, 1, 2, 4], 3));
    let (pk, pv) = (noise(&[1, 1, 3, 4], 4), noise(&[1, 1, 3, 4], 5));
    let join = |a: &ConstData, b: &ConstData| t(&[1, 1, 5, 4], &[a.to_vec::<f32>(), b.to_vec()].concat());
    let (ak, av) = (join(&pk, &k), join(&pv, &v));
    let n = node("Attention", &["x", "w0", "w1", "", "w2", "w3"], &["y"]).int("is_causal", 1);
    let want = plain(&q, &ak, &av, 0.5, |[_, _, i, j], x| if j <= i + 3 { x } else { LOW });
    check(24, n, &q, &[k.clone(), v.clone(), pk.clone(), pv.clone()], &[1, 1, 2, 4], &want);
    // The concatenated keys are a result.
    let n = node("Attention", &["x", "w0", "w1", "", "w2", "w3"], &["a", "y"]);
    check(24, n, &q, &[k, v, pk, pv], &[1, 1, 5, 4], &ak.to_vec::<f64>());

    // Key lengths per batch; the first query of the second batch has every key masked.
    let (q, k, v) = (noise(&[2, 1, 2, 4], 1), noise(&[2, 1, 4, 4], 2), noise(&[2, 1, 4, 4], 3));
    let n = || node("Attention", &["x", "w0", "w1", "", "", "", "w2"], &["y"]);
    let w = [k.clone(), v.clone(), ints(&[3, 1])];
    let far = |b: usize, i: usize| if b == 0 { i + 1 } else { i.wrapping_sub(1) };
    let want = plain(&q, &k, &v, 0.5, |[b, _, i, j], x| {
        let seen = far(b, i);
        if seen != usize::MAX && j <= seen && j < [3, 1][b] { x } else { LOW }
    });
    assert_eq!(want[8..12], [0.0; 4]);
    check(24, n().int("is_causal", 1), &q, &w, &[2, 1, 2, 4], &want);
    let open = plain(&q, &k, &v, 0.5, |[b, _, _, j], x| if j < [3, 1][b] { x } else { LOW });
    check(24, n(), &q, &w, &[2, 1, 2, 4], &open);
}

#[test]
fn windows_and_masks() {
    let (q, k, v) = (noise(&[1, 2, 4, 4], 1), noise(&[1, 2, 6, 4], 2), noise(&[1, 2, 6, 4], 3));
    let n = || node("Attention", &["x", "w0", "w1", "w2"], &["y"]);
    let bare = node("Attention", &["x", "w0", "w1"], &["y"]);
    let kv = [k.clone(), v.clone()];
    let want = plain(&q, &k, &v, 0.5, |[_, _, i, j], x| if j + 2 >= i && j <= i + 1 { x } else { LOW });
    let window = bare.int("left_window_size", 2).int("right_window_size", 1);
    check(25, window.clone(), &q, &kv, &[1, 2, 4, 4], &want);
    let want = plain(&q, &k, &v, 0.5, |[_, _, i, j], x| if j + 2 >= i && j <= i { x } else { LOW });
    check(25, window.int("is_causal", 1), &q, &kv, &[1, 2, 4, 4], &want);

    // A bool mask for the first keys only; every key of the third query is masked.
    let seen = [[true, false, true], [true; 3], [false; 3], [false, true, true]];
    let mask = t(&[4, 3], &seen.concat());
    let want = plain(&q, &k, &v, 0.5, |[_, _, i, j], x| if j < 3 && seen[i][j] { x } else { LOW });
    assert_eq!(want[8..12], [0.0; 4]);
    check(24, n(), &q, &[k.clone(), v.clone(), mask], &[1, 2, 4, 4], &want);
    // A float mask per head, with a window.
    let mask = noise(&[2, 4, 6], 9);
    let m = mask.to_vec::<f64>();
    let want =
        plain(&q, &k, &v, 0.5, |[_, h, i, j], x| if j <= i { x + m[(h * 4 + i) * 6 + j] } else { LOW });
    check(25, n().int("right_window_size", 0), &q, &[k, v, mask], &[1, 2, 4, 4], &want);
}

#[test]
fn attention_returns_its_optional_results() {
    let (q, k, v) = (noise(&[1, 1, 2, 4], 1), noise(&[1, 1, 2, 4], 2), noise(&[1, 1, 2, 4], 3));
    let mask = t(&[2, 2], &[true, false, false, false]);
    let dot = |i: usize, j: usize| {
        let (q, k) = (q.to_vec::<f64>(), k.to_vec::<f64>());
        (0..4).map(|c| q[i * 4 + c] * k[j * 4 + c]).sum::<f64>() * 0.5
    };
    let cap = |x: f64| 2.0 * (x / 2.0).tanh();
    let raw: Vec<f64> = (0..4).map(|n| dot(n / 2, n % 2)).collect();
    let capped: Vec<f64> = raw.iter().map(|x| cap(*x)).collect();
    for (mode, want) in
        [raw, capped.clone(), vec![capped[0], LOW, LOW, LOW], vec![1.0, 0.0, 0.0, 0.0]].iter().enumerate()
    {
        let n = node("Attention", &["x", "w0", "w1", "w2"], &["a", "", "", "y"])
            .float("softcap", 2.0)
            .int("qk_matmul_output_mode", mode as i64);
        check(23, n, &q, &[k.clone(), v.clone(), mask.clone()], &[1, 1, 2, 2], want);
    }
}

fn refused(opset: i64, n: crate::onnx::proto::NodeProto, w: &[ConstData]) {
    let names = ["w0", "w1", "w2", "w3"];
    let w: Vec<(&str, ConstData)> = names.into_iter().zip(w.iter().cloned()).collect();
    let r = import(model(opset, port("x", DType::F32, &["1", "2", "2", "4"]), vec![n], &w));
    assert!(matches!(r, Err(Error::Argument { .. } | Error::Shape { .. })), "{r:?}");
}

#[test]
fn operands_that_do_not_go_together() {
    let x = noise(&[1, 2, 2, 4], 1);
    let kv = [x.clone(), x.clone()];
    let n = |inputs: &[&str]| node("Attention", inputs, &["y"]);
    let three = ["x", "w0", "w1"];
    refused(23, n(&three), &[noise(&[1, 3, 2, 4], 2), noise(&[1, 3, 2, 4], 3)]);
    refused(23, n(&three), &[noise(&[1, 2, 3, 4], 2), x.clone()]);
    refused(23, n(&three), &[noise(&[1, 2, 2], 2), noise(&[1, 2, 2], 2)]);
    refused(23, n(&three).int("qk_matmul_output_mode", 4), &kv);
    refused(23, n(&three).int("softmax_precision", 7), &kv);
    refused(25, n(&three).int("left_window_size", -2), &kv);
    refused(23, n(&["x", "w0", "w1", "", "w0"]), &kv);
    refused(23, n(&["x", "w0", "w1", "w2"]), &[x.clone(), x.clone(), noise(&[3, 2], 1)]);
    refused(24, n(&["x", "w0", "w1", "", "", "", "w2"]), &[x.clone(), x.clone(), ints(&[1, 1])]);
}

#[test]
fn a_graph_that_changes_scores_must_keep_their_type() {
    let x = noise(&[1, 2, 2, 4], 1);
    let flex = |op: &str| {
        let mut g = GraphProto { node: vec![node(op, &["s"], &["m"])], ..Default::default() };
        g.input = vec![port("s", DType::F32, &["1", "2", "2", "2"])];
        g.output = vec![port("m", DType::F32, &[])];
        let mut n =
            node("FlexAttention", &["x", "w0", "w1"], &["y"])
                .attr("score_mod", attribute::GRAPH, |a| a.g = Some(Box::new(g)));
        n.domain = "ai.onnx.preview".into();
        let mut m = model(
            26,
            port("x", DType::F32, &["1", "2", "2", "4"]),
            vec![n],
            &[("w0", x.clone()), ("w1", x.clone())],
        );
        m.opset_import.push(OperatorSetIdProto { domain: "ai.onnx.preview".into(), version: 1 });
        import(m)
    };
    assert!(flex("Neg").is_ok());
    for op in ["Shape", "Not", "Size"] {
        assert!(matches!(flex(op), Err(Error::Argument { .. } | Error::DType { .. })), "{op}");
    }
}

/// The recurrence as the operator's specification defines it, for a batch of one. The operands are
/// `[1, t, h * d]`. `decay` is a function of token, head and feature, and `beta` of token and head.
fn recurrence(
    [q, k, v]: [&ConstData; 3],
    group: usize,
    [hk, dk, dv]: [usize; 3],
    decay: impl Fn(usize, usize, usize) -> f64,
    beta: Option<&dyn Fn(usize, usize) -> f64>,
) -> (Vec<f64>, Vec<f64>) {
    let tokens = k.dims[1];
    let (q, k, v) = (q.to_vec::<f64>(), k.to_vec::<f64>(), v.to_vec::<f64>());
    let mut state = vec![0.0; hk * dk * dv];
    let mut y = vec![];
    for n in 0..tokens {
        for h in 0..hk {
            let s = &mut state[h * dk * dv..][..dk * dv];
            let k = &k[(n * hk + h) * dk..][..dk];
            (0..dk * dv).for_each(|i| s[i] *= decay(n, h, i / dv).exp());
            for c in 0..dv {
                let mut x = v[(n * hk + h) * dv + c];
                if let Some(beta) = beta {
                    x = beta(n, h) * (x - (0..dk).map(|i| s[i * dv + c] * k[i]).sum::<f64>());
                }
                (0..dk).for_each(|i| s[i * dv + c] += k[i] * x);
            }
        }
        for h in 0..hk * group {
            let (s, q) = (&state[h / group * dk * dv..], &q[(n * hk * group + h) * dk..]);
            y.extend(
                (0..dv).map(|c| (0..dk).map(|i| q[i] * s[i * dv + c]).sum::<f64>() / (dk as f64).sqrt()),
            );
        }
    }
    (y, state)
}

fn close(n: crate::onnx::proto::NodeProto, x: &ConstData, w: &[ConstData], want: &[f64]) {
    let y = run_one(27, n, x, w).to_vec::<f64>();
    assert_eq!(y.len(), want.len());
    for (a, b) in y.iter().zip(want) {
        assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a} instead of {b}");
    }
}

#[test]
fn linear_attention_in_parts_equals_the_recurrence() {
    let [hk, dk, dv] = [2, 3, 2];
    let n = |rule, y: &[&str]| {
        node("LinearAttention", &["x", "w0", "w1", "", "w2", "w3"], y)
            .int("q_num_heads", 4)
            .int("kv_num_heads", 2)
            .text("update_rule", rule)
    };
    let drop = |mut n: crate::onnx::proto::NodeProto, keep: usize| {
        n.input.truncate(keep);
        n
    };
    // Lengths that take one part, and lengths that take several parts with a shorter last one.
    for tokens in [1, 17, 70] {
        let (q, k, v) = (noise(&[1, tokens, 12], 1), noise(&[1, tokens, 6], 2), noise(&[1, tokens, 4], 3));
        let g = noise(&[1, tokens, 2], 4);
        let head = t(&[1, tokens, 2], &g.to_vec::<f32>().iter().map(|v| v - 1.0).collect::<Vec<_>>());
        let gates = noise(&[1, tokens, 6], 5).to_vec::<f32>();
        // Some tokens reset a feature.
        let gates: Vec<f32> = gates
            .iter()
            .enumerate()
            .map(|(i, v)| if i % 13 == 5 { f32::NEG_INFINITY } else { v - 1.0 })
            .collect();
        let feature = t(&[1, tokens, 6], &gates);
        let beta = t(&[1, tokens, 2], &vec![0.4f32; tokens * 2]);
        let (h, f) = (head.to_vec::<f64>(), feature.to_vec::<f64>());
        let by_head = |n: usize, g: usize, _: usize| h[n * 2 + g];
        let by_feature = |n: usize, g: usize, i: usize| f[n * 6 + g * 3 + i];
        let kv = [k.clone(), v.clone()];
        let run = |rule, keep: usize, gates: &[&ConstData], (y, state): (Vec<f64>, Vec<f64>)| {
            let w: Vec<ConstData> = kv.iter().chain(gates.iter().copied()).cloned().collect();
            let mut node = n(rule, &["y"]);
            if rule == "delta" {
                node.input = ["x", "w0", "w1", "", "", "w2"].map(String::from).to_vec();
            }
            close(drop(node.clone(), keep), &q, &w, &y);
            let mut second = node;
            second.output = vec!["a".into(), "y".into()];
            close(drop(second, keep), &q, &w, &state);
        };
        let size = [hk, dk, dv];
        let ops = [&q, &k, &v];
        run("linear", 3, &[], recurrence(ops, 2, size, |_, _, _| 0.0, None));
        run("gated", 5, &[&head], recurrence(ops, 2, size, by_head, None));
        run("gated", 5, &[&feature], recurrence(ops, 2, size, by_feature, None));
        run("delta", 6, &[&beta], recurrence(ops, 2, size, |_, _, _| 0.0, Some(&|_, _| 0.4)));
        run("gated_delta", 6, &[&feature, &beta], recurrence(ops, 2, size, by_feature, Some(&|_, _| 0.4)));
    }
}

#[test]
fn linear_attention_requires_the_operands_of_its_rule() {
    let (kv, g) = (noise(&[1, 2, 4], 2), noise(&[1, 2, 2], 3));
    let n = |rule, inputs: &[&str]| {
        node("LinearAttention", inputs, &["y"])
            .int("q_num_heads", 2)
            .int("kv_num_heads", 2)
            .text("update_rule", rule)
    };
    let w = [("w0", kv.clone()), ("w1", kv), ("w2", g), ("w3", noise(&[1, 2, 3], 4))];
    let refuse = |n| {
        let r = import(model(27, port("x", DType::F32, &["1", "2", "4"]), vec![n], &w));
        assert!(matches!(r, Err(Error::Argument { .. })), "{r:?}");
    };
    refuse(n("gated", &["x", "w0", "w1"]));
    refuse(n("linear", &["x", "w0", "w1", "", "w2"]));
    refuse(n("gated", &["x", "w0", "w1", "", "w3"]));
    refuse(n("delta", &["x", "w0", "w1", "w2", "", "w2"]));
    refuse(n("other", &["x", "w0", "w1"]));
    let mut odd = n("linear", &["x", "w0", "w1"]);
    odd.attribute.retain(|a| a.name != "q_num_heads");
    refuse(odd.clone());
    refuse(odd.int("q_num_heads", 3));
}

#[test]
fn rotary_embedding_of_some_features() {
    // Angles of 90 degrees at position 1.
    let (cos, sin) = (t(&[2, 1], &[1f32, 0.0]), t(&[2, 1], &[0f32, 1.0]));
    let x = t(&[1, 1, 2, 4], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let at = t(&[1, 2], &[0i64, 1]);
    let w = [cos, sin, at];
    let n = || node("RotaryEmbedding", &["x", "w0", "w1", "w2"], &["y"]).int("rotary_embedding_dim", 2);
    check(23, n(), &x, &w, &[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, -6.0, 5.0, 7.0, 8.0]);
    let (cos, sin) = (t(&[2, 2], &[1f32, 1.0, 0.0, 1.0]), t(&[2, 2], &[0f32, 0.0, 1.0, 0.0]));
    let w = [cos, sin, w[2].clone()];
    let n = |k| node("RotaryEmbedding", &["x", "w0", "w1", "w2"], &["y"]).int("interleaved", k);
    check(23, n(0), &x, &w, &[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, -7.0, 6.0, 5.0, 8.0]);
    check(23, n(1), &x, &w, &[1, 1, 2, 4], &[1.0, 2.0, 3.0, 4.0, -6.0, 5.0, 7.0, 8.0]);
    let odd = model(
        23,
        port("x", DType::F32, &["1", "1", "2", "3"]),
        vec![n(0)],
        &[("w0", w[0].clone()), ("w1", w[1].clone()), ("w2", w[2].clone())],
    );
    assert!(matches!(import(odd), Err(Error::Argument { .. })));
}

//! Tests of what the generated cases do not cover: cases in which onnxruntime differs from the specification
//! or lacks support, and invalid models.

use crate::onnx::proto::*;
use crate::onnx::stage_tests::Plain;
use crate::onnx::test_models::*;
use crate::onnx::{Datum, Keys, Text, tensor};
use bytes::Bytes;
use halcyon_ir::{ConstData, DType, Error, Result};

fn ml(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto { domain: "ai.onnx.ml".into(), ..node(op, inputs, outputs) }
}

impl NodeProto {
    fn floats(self, name: &str, v: &[f32]) -> NodeProto {
        self.attr(name, attribute::FLOATS, |a| a.floats = v.to_vec())
    }
    fn texts(self, name: &str, v: &[&str]) -> NodeProto {
        let v = v.iter().map(|s| Bytes::copy_from_slice(s.as_bytes())).collect();
        self.attr(name, attribute::STRINGS, |a| a.strings = v)
    }
    fn table(self, name: &str, v: &ConstData) -> NodeProto {
        self.attr(name, attribute::TENSOR, |a| a.t = Some(tensor::encode(v, name)))
    }
}

fn whole(version: i64, inputs: &[Datum], nodes: Vec<NodeProto>, outputs: &[&str]) -> ModelProto {
    let input = |(i, d): (usize, &Datum)| {
        let name = format!("x{i}");
        match d {
            Datum::Tensor(t) => {
                let dims: Vec<String> = t.dims.iter().map(|d| d.to_string()).collect();
                port(&name, t.dtype, &dims.iter().map(String::as_str).collect::<Vec<_>>())
            }
            Datum::Text(_) => {
                let t = TensorType { elem_type: tensor::STRING, shape: None };
                ValueInfoProto { name, r#type: Some(TypeProto { value: Some(TypeValue::Tensor(t)) }) }
            }
            Datum::Map(_, v) => {
                let code = v.tensor().map_or(tensor::STRING, |t| t.dtype.row().onnx);
                let t =
                    TypeProto { value: Some(TypeValue::Tensor(TensorType { elem_type: code, shape: None })) };
                let m = MapType { key_type: 7, value_type: Some(Box::new(t)) };
                ValueInfoProto { name, r#type: Some(TypeProto { value: Some(TypeValue::Map(Box::new(m))) }) }
            }
            other => panic!("{other:?}"),
        }
    };
    let set = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
    ModelProto {
        ir_version: 8,
        opset_import: vec![set("", 20), set("ai.onnx.ml", version)],
        graph: Some(GraphProto {
            node: nodes,
            input: inputs.iter().enumerate().map(input).collect(),
            output: outputs.iter().map(|o| port(o, DType::F32, &[])).collect(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn all(version: i64, n: NodeProto, inputs: &[Datum], outputs: &[&str]) -> Result<Vec<Datum>> {
    let m = open(whole(version, inputs, vec![n], outputs));
    m.check("")?;
    Ok(m.run_staged(inputs, Box::new(Plain))?.0)
}

/// The result `y` of one node with the operands `x0`, `x1`…
fn run(version: i64, n: NodeProto, inputs: &[Datum]) -> Result<Datum> {
    Ok(all(version, n, inputs, &["y"])?.remove(0))
}

fn numbers(d: Datum) -> Vec<f64> {
    d.tensor().unwrap_or_else(|| panic!("{d:?}")).to_vec()
}

fn x<T: halcyon_ir::Element>(dims: &[usize], v: &[T]) -> Datum {
    t(dims, v).into()
}

fn words(dims: &[usize], v: &[&str]) -> Datum {
    Datum::Text(Text::new(dims, v.iter().map(|s| s.to_string()).collect()).unwrap())
}

/// A tree of version 5: a root `x[0] MODE 1` with the leaves 10 (true) and 20 (false).
fn stump(mode: u8) -> NodeProto {
    ml("TreeEnsemble", &["x0"], &["y"])
        .int("n_targets", 1)
        .ints("tree_roots", &[0])
        .table("nodes_modes", &t(&[1], &[mode]))
        .ints("nodes_featureids", &[0])
        .table("nodes_splits", &t(&[1], &[1f32]))
        .ints("nodes_truenodeids", &[0])
        .ints("nodes_falsenodeids", &[1])
        .ints("nodes_trueleafs", &[1])
        .ints("nodes_falseleafs", &[1])
        .ints("leaf_targetids", &[0, 0])
        .table("leaf_weights", &t(&[2], &[10f32, 20.0]))
}

/// Appends an attribute with `f`, and removes an earlier attribute of the same name.
fn with(n: NodeProto, f: impl FnOnce(NodeProto) -> NodeProto) -> NodeProto {
    let mut n = f(n);
    if let Some(last) = n.attribute.last().map(|a| a.name.clone()) {
        let first = n.attribute.iter().position(|a| a.name == last).unwrap();
        if first + 1 < n.attribute.len() {
            n.attribute.remove(first);
        }
    }
    n
}

fn refused(version: i64, n: NodeProto, inputs: &[Datum], part: &str) {
    let e = run(version, n, inputs).unwrap_err();
    assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains(part), "{part}: {e}");
}

#[test]
fn modes_and_missing_values() {
    let v = x(&[4, 1], &[0f32, 1.0, 2.0, f32::NAN]);
    let run = |n| numbers(run(5, n, std::slice::from_ref(&v)).unwrap());
    for (mode, want) in [[10, 10, 20], [10, 20, 20], [20, 10, 10], [20, 20, 10], [20, 10, 20], [10, 20, 10]]
        .iter()
        .enumerate()
    {
        let want = want.map(f64::from);
        assert_eq!(run(stump(mode as u8)), [&want[..], &[20.0]].concat(), "{mode}");
        let tracked = stump(mode as u8).ints("nodes_missing_value_tracks_true", &[1]);
        assert_eq!(run(tracked), [&want[..], &[10.0]].concat(), "{mode}");
    }
    // With a NaN threshold only "not equal" is true.
    for (mode, want) in [(0, 20.0), (4, 20.0), (5, 10.0)] {
        let n = with(stump(mode), |n| n.table("nodes_splits", &t(&[1], &[f32::NAN])));
        assert_eq!(run(n), [want, want, want, 20.0], "{mode}");
    }
    // Half floats keep their dtype.
    let half = halcyon_ir::dtype::f16_of(2.0);
    let y = super::tests::run(5, stump(0), &[x(&[1, 1], &[half])]).unwrap();
    assert_eq!((y.tensor().unwrap().dtype, numbers(y)), (DType::F16, vec![20.0]));
}

#[test]
fn membership_is_a_search() {
    let v: Vec<f32> = (-2..12).map(|i| i as f32 / 2.0).chain([f32::NAN, f32::INFINITY]).collect();
    for n in 0..7usize {
        let set: Vec<f32> = [3.0f32, -1.0, 0.5, 5.0, 0.0, 3.0, f32::INFINITY][..n].to_vec();
        let listed: Vec<f32> = set.iter().copied().chain([f32::NAN]).collect();
        let node = stump(6).table("membership_values", &t(&[n + 1], &listed));
        let want: Vec<f64> = v.iter().map(|v| if set.contains(v) { 10.0 } else { 20.0 }).collect();
        assert_eq!(numbers(run(5, node, &[x(&[v.len(), 1], &v)]).unwrap()), want, "{set:?}");
    }
    let v = [x(&[1, 1], &[0f32])];
    refused(5, stump(6), &v, "fewer sets");
    let two = t(&[4], &[1f32, f32::NAN, 2.0, f32::NAN]);
    refused(5, stump(6).table("membership_values", &two), &v, "more sets");
    refused(5, stump(0).table("membership_values", &two), &v, "more sets");
}

#[test]
fn transforms_by_number() {
    // ONNX numbers softmax 1 and logistic 2; onnxruntime swaps them.
    let two = || with(stump(0), |n| n.int("n_targets", 2));
    let v = [x(&[1, 1], &[0f32])];
    let y = numbers(run(5, two().int("post_transform", 1), &v).unwrap());
    assert!((y[0] - 1.0 / (1.0 + (-10f64).exp())).abs() < 1e-6 && (y[0] + y[1] - 1.0).abs() < 1e-6, "{y:?}");
    let y = numbers(run(5, two().int("post_transform", 2), &v).unwrap());
    assert!(y[0] > 0.9999 && y[1] == 0.5, "{y:?}");
    assert_eq!(numbers(run(5, two().int("post_transform", 3), &v).unwrap()), [1.0, 0.0]);
    let zero = with(two(), |n| n.table("leaf_weights", &t(&[2], &[0f32, 0.0])));
    assert_eq!(numbers(run(5, zero.int("post_transform", 3), &v).unwrap()), [0.0, 0.0]);
    refused(5, two().int("post_transform", 5), &v, "post_transform 5");
}

/// A regressor before version 5 with trees of one leaf each; votes are `(tree, target, weight)`.
fn leaves(trees: i64, votes: &[(i64, i64, f32)]) -> NodeProto {
    let n = trees as usize;
    let of = |f: fn(&(i64, i64, f32)) -> i64| votes.iter().map(f).collect::<Vec<_>>();
    ml("TreeEnsembleRegressor", &["x0"], &["y"])
        .ints("nodes_treeids", &(0..trees).collect::<Vec<_>>())
        .ints("nodes_nodeids", &vec![0; n])
        .ints("nodes_featureids", &vec![0; n])
        .texts("nodes_modes", &vec!["LEAF"; n])
        .floats("nodes_values", &vec![0.0; n])
        .ints("nodes_truenodeids", &vec![0; n])
        .ints("nodes_falsenodeids", &vec![0; n])
        .ints("target_treeids", &of(|v| v.0))
        .ints("target_nodeids", &vec![0; votes.len()])
        .ints("target_ids", &of(|v| v.1))
        .floats("target_weights", &votes.iter().map(|v| v.2).collect::<Vec<_>>())
}

#[test]
fn votes_of_any_form_are_joined() {
    let v = [x(&[2, 1], &[0f32, 1.0])];
    // With few targets, the votes are in a table of leaves and targets. With many, they are scattered.
    for targets in [4i64, 30_000] {
        let votes = [(0, 0, 1.0), (0, 3, 5.0), (1, 3, -2.0), (2, 3, 0.5), (2, 1, 4.0), (2, 1, 2.0)];
        for (how, want) in
            [("SUM", [1.0, 6.0, 0.0, 3.5]), ("MIN", [1.0, 2.0, 0.0, -2.0]), ("MAX", [1.0, 4.0, 0.0, 5.0])]
        {
            let n = leaves(3, &votes).int("n_targets", targets).text("aggregate_function", how);
            let y = numbers(run(3, n, &v).unwrap());
            assert_eq!(y.len() as i64, 2 * targets);
            assert_eq!((&y[..4], &y[targets as usize..][..4]), (&want[..], &want[..]), "{how} {targets}");
        }
    }
    // One target per tree, different numbers of trees per target, and a tree without votes.
    let votes = [(0, 2, 1.0), (1, 0, 2.0), (2, 2, 4.0)];
    for (how, want) in [("SUM", [2.0, 0.0, 5.0]), ("AVERAGE", [0.5, 0.0, 1.25]), ("MAX", [2.0, 0.0, 4.0])] {
        let n = leaves(4, &votes).int("n_targets", 3).text("aggregate_function", how);
        assert_eq!(numbers(run(3, n, &v).unwrap())[..3], want, "{how}");
    }
    // The transform is applied to a single score too; onnxruntime does not apply it.
    let n = leaves(1, &[(0, 0, 0.0)]).int("n_targets", 1).text("post_transform", "LOGISTIC");
    assert_eq!(numbers(run(3, n, &v).unwrap()), [0.5, 0.5]);
}

#[test]
fn broken_trees_are_refused() {
    let v = [x(&[1, 1], &[0f32])];
    let bad = |part: &str, f: fn(NodeProto) -> NodeProto| refused(5, with(stump(0), f), &v, part);
    bad("cycle", |n| n.ints("nodes_trueleafs", &[0]));
    bad("no leaf 7", |n| n.ints("nodes_truenodeids", &[7]));
    bad("contains -1, which is not a valid index", |n| n.ints("nodes_truenodeids", &[-1]));
    bad("no node 3", |n| n.ints("tree_roots", &[3]));
    bad("no tree", |n| n.ints("tree_roots", &[]));
    bad("a node tests feature 9, but there are only 1", |n| n.ints("nodes_featureids", &[9]));
    bad("contains 9223372036854775807", |n| n.ints("nodes_featureids", &[i64::MAX]));
    bad("has 2 entries, expected 1", |n| n.ints("nodes_featureids", &[0, 0]));
    bad("no node mode 9", |n| n.table("nodes_modes", &t(&[1], &[9u8])));
    bad("target 1, but the number of targets is 1", |n| n.ints("leaf_targetids", &[0, 1]));
    bad("0 targets", |n| n.int("n_targets", 0));
    bad("targets for 2 votes", |n| n.int("n_targets", 1 << 30));
    bad("aggregate_function 4", |n| n.int("aggregate_function", 4));
    bad("is f32[1, 1]", |n| n.table("nodes_splits", &t(&[1, 1], &[1f32])));

    let n = || leaves(2, &[(0, 0, 1.0)]).int("n_targets", 1);
    let bad = |part: &str, n: NodeProto| refused(3, n, &v, part);
    bad("tree 5 has no node 0", with(n(), |n| n.ints("target_treeids", &[5])));
    bad("node 0 twice", with(n(), |n| n.ints("nodes_treeids", &[0, 0])));
    bad("no node mode 'TWIG'", with(n(), |n| n.texts("nodes_modes", &["LEAF", "TWIG"])));
    let ring = with(n(), |n| n.texts("nodes_modes", &["LEAF", "BRANCH_LT"]));
    bad("cycle", ring);
    bad("both set", n().table("nodes_values_as_tensor", &t(&[2], &[0f64; 2])));

    // A tree deeper than the limit: each node is a child of the node before it.
    let deep = 2000usize;
    let ids: Vec<i64> = (0..deep as i64).collect();
    let chain = ml("TreeEnsemble", &["x0"], &["y"])
        .int("n_targets", 1)
        .ints("tree_roots", &[0])
        .table("nodes_modes", &t(&[deep], &vec![0u8; deep]))
        .ints("nodes_featureids", &vec![0; deep])
        .table("nodes_splits", &t(&[deep], &vec![0f32; deep]))
        .ints("nodes_truenodeids", &ids.iter().map(|i| (i + 1) % deep as i64).collect::<Vec<_>>())
        .ints("nodes_trueleafs", &ids.iter().map(|i| i64::from(*i + 1 == deep as i64)).collect::<Vec<_>>())
        .ints("nodes_falsenodeids", &vec![0; deep])
        .ints("nodes_falseleafs", &vec![1; deep])
        .ints("leaf_targetids", &[0])
        .table("leaf_weights", &t(&[1], &[1f32]));
    assert!(matches!(run(5, chain, &v), Err(Error::Unsupported { .. })));
}

#[test]
fn classifiers_follow_the_specification_where_onnxruntime_does_not() {
    let v = [x(&[1, 1], &[0f32])];
    let classes = |votes: &[(i64, i64, f32)]| {
        let mut n = leaves(1, votes);
        n.op_type = "TreeEnsembleClassifier".into();
        n.output = vec!["l".into(), "y".into()];
        for a in &mut n.attribute {
            a.name = a.name.replace("target_", "class_");
        }
        n
    };
    let get = |n| {
        let out = all(3, n, &v, &["l", "y"]).unwrap();
        let mut out = out.into_iter().map(numbers);
        (out.next().unwrap(), out.next().unwrap())
    };
    // Two classes that both have votes: the label is that of the higher score.
    let n = classes(&[(0, 0, 0.5), (0, 1, 0.25)]).ints("classlabels_int64s", &[10, 20]);
    assert_eq!(get(n), (vec![10.0], vec![0.5, 0.25]));
    // With base values, votes for the second class keep their own score.
    let n = classes(&[(0, 1, 0.5)]).ints("classlabels_int64s", &[10, 20]).floats("base_values", &[0.25, 1.0]);
    assert_eq!(get(n), (vec![20.0], vec![0.25, 1.5]));
    let n = classes(&[(0, 0, 1.0)]).ints("classlabels_int64s", &[1]);
    assert_eq!(get(n), (vec![1.0], vec![1.0]));
    let n = || classes(&[(0, 0, 1.0)]).ints("classlabels_int64s", &[10, 20]);
    let e = all(3, n().text("post_transform", "PROBIT"), &v, &["l", "y"]).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
    for bad in [
        n().floats("base_values", &[1.0; 3]),
        n().texts("classlabels_strings", &["a"]),
        with(n(), |n| n.ints("class_ids", &[2])),
    ] {
        assert!(matches!(all(3, bad, &v, &["l", "y"]), Err(Error::Argument { .. })));
    }
}

#[test]
fn labels_by_version_and_type() {
    let twice = |n: NodeProto| n.ints("keys_int64s", &[1, 1, 2]).floats("values_floats", &[0.5, 1.5, 2.5]);
    let n = || twice(ml("LabelEncoder", &["x0"], &["y"])).float("default_float", -1.0);
    let v = [x(&[2, 2], &[1i64, 2, 3, -1])];
    assert_eq!(numbers(run(2, n(), &v).unwrap()), [0.5, 2.5, -1.0, -1.0]);
    assert_eq!(numbers(run(4, n(), &v).unwrap()), [1.5, 2.5, -1.0, -1.0]);
    // All NaNs are one key, also in version 2, and so are both zeros.
    let odd = ml("LabelEncoder", &["x0"], &["y"])
        .floats("keys_floats", &[f32::NAN, 0.0])
        .ints("values_int64s", &[7, 8]);
    let v = [x(&[4], &[f32::NAN, -0.0, 1.0, -f32::NAN])];
    assert_eq!(numbers(run(2, odd, &v).unwrap()), [7.0, 8.0, -1.0, 7.0]);
    let small = ml("LabelEncoder", &["x0"], &["y"])
        .table("keys_tensor", &t(&[2], &[-3i16, 4]))
        .table("values_tensor", &t(&[2], &[0.5f64, 0.25]))
        .table("default_tensor", &t(&[1], &[9f64]));
    assert_eq!(numbers(run(4, small, &[x(&[3], &[4i16, 0, -3])]).unwrap()), [0.25, 9.0, 0.5]);
    let none = ml("LabelEncoder", &["x0"], &["y"]).ints("keys_int64s", &[]).floats("values_floats", &[]);
    assert_eq!(numbers(run(2, none, &[x(&[1], &[4i64])]).unwrap()), [0.0]);

    let v = [x(&[1], &[1i64])];
    refused(2, ml("LabelEncoder", &["x0"], &["y"]).ints("keys_int64s", &[1]), &v, "'values_…'");
    refused(2, n().texts("values_strings", &["a"]), &v, "'values_…'");
    refused(2, n(), &[x(&[1], &[1f32])], "keys of type i64");
    refused(2, n(), &[words(&[1], &["a"])], "do not have the type");
    let short = ml("LabelEncoder", &["x0"], &["y"]).ints("keys_int64s", &[1]).floats("values_floats", &[]);
    refused(2, short, &v, "1 keys for 0 values");
}

#[test]
fn features_of_odd_types_and_sizes() {
    let v = [x(&[4], &[i64::MIN, -1, 0, i64::MAX])];
    let n = |t| ml("Binarizer", &["x0"], &["y"]).float("threshold", t);
    assert_eq!(numbers(run(1, n(-0.5), &v).unwrap()), [0.0, 0.0, 1.0, 1.0]);
    assert_eq!(numbers(run(1, n(f32::INFINITY), &v).unwrap()), [0.0; 4]);
    let n = |v: i64| {
        ml("Imputer", &["x0"], &["y"]).ints("imputed_value_int64s", &[5]).int("replaced_value_int64", v)
    };
    let v = [x(&[2], &[-1i32, 0])];
    assert_eq!(numbers(run(1, n(-1), &v).unwrap()), [5.0, 0.0]);
    // A value that the dtype cannot represent matches no element.
    assert_eq!(numbers(run(1, n((1 << 32) - 1), &v).unwrap()), [-1.0, 0.0]);
    refused(1, ml("Imputer", &["x0"], &["y"]), &v, "no imputed value");
    let three = ml("Scaler", &["x0"], &["y"]).floats("offset", &[1.0; 3]);
    refused(1, three, &v, "3 entries for 2 features");
    let n = ml("OneHotEncoder", &["x0"], &["y"]).ints("cats_int64s", &[3, 1, 3]);
    assert_eq!(numbers(run(1, n, &[x(&[2], &[3f32, 1.5])]).unwrap()), [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    let n = ml("OneHotEncoder", &["x0"], &["y"]).texts("cats_strings", &["a"]).int("zeros", 0);
    refused(1, n, &[words(&[1], &["b"])], "'b' is not a category");
    let n = ml("ArrayFeatureExtractor", &["x0", "x1"], &["y"]);
    refused(1, n.clone(), &[words(&[2], &["a", "b"]), x(&[1], &[2i64])], "outside of 0..2");
    refused(1, n, &[x(&[], &[1f32]), x(&[1], &[0i64])], "a scalar");
    refused(1, ml("FeatureVectorizer", &[], &["y"]), &[], "no operand");
}

#[test]
fn models_that_do_not_fit_their_operands_are_refused() {
    let v = [x(&[1, 2], &[1f32, 2.0])];
    let n = |w: &[f32]| ml("LinearRegressor", &["x0"], &["y"]).floats("coefficients", w);
    refused(1, n(&[1.0; 3]), &v, "3 coefficients per row for 2 features");
    refused(1, n(&[1.0; 3]).int("targets", 2), &v, "not 2 equal rows");
    refused(1, n(&[1.0; 2]).int("targets", -1), &v, "not 0 equal rows");
    refused(1, n(&[1.0; 2]).floats("intercepts", &[1.0; 2]), &v, "2 intercepts");
    refused(1, n(&[1.0; 2]).text("post_transform", "LOG"), &v, "post_transform 'LOG'");
    refused(1, n(&[1.0; 2]), &[x(&[1, 1, 2], &[1f32; 2])], "have rank 3");
    let n = |n: i64| {
        ml("SVMRegressor", &["x0"], &["y"])
            .floats("coefficients", &[1.0; 2])
            .floats("rho", &[0.0])
            .int("n_supports", n)
    };
    refused(1, n(-1), &v, "negative");
    refused(1, n(2), &v, "'support_vectors' is missing");
    refused(1, n(3).floats("support_vectors", &[1.0; 4]), &v, "into 3 support vectors");
    refused(1, n(2).floats("support_vectors", &[1.0; 4]).text("kernel_type", "X"), &v, "kernel_type 'X'");
    refused(1, n(2).floats("support_vectors", &[1.0; 4]).floats("kernel_params", &[1.0]), &v, "expected 3");
    let n = || {
        let n = ml("SVMClassifier", &["x0"], &["l", "y"]).ints("classlabels_ints", &[1, 2]);
        n.floats("support_vectors", &[1.0; 4]).floats("rho", &[0.0]).floats("coefficients", &[1.0; 2])
    };
    refused(1, n().ints("vectors_per_class", &[1]), &v, "1 entries for 2 labels");
    refused(1, n().ints("vectors_per_class", &[1, -1]), &v, "not a size");
    let few = with(n(), |n| n.floats("support_vectors", &[1.0; 8]));
    refused(1, few.ints("vectors_per_class", &[2, 2]), &v, "2 coefficients and 1 numbers in 'rho'");
    refused(1, n().ints("vectors_per_class", &[1, 1]).floats("prob_a", &[1.0]), &v, "'prob_b'");
}

#[test]
fn maps_to_tensors() {
    let of = |k: Keys, v: Datum| [Datum::Map(k, Box::new(v))];
    let ints = || Keys::Ints(vec![7, 2]);
    let n = ml("DictVectorizer", &["x0"], &["y"]).ints("int64_vocabulary", &[1, 2, 7]);
    let y = run(1, n.clone(), &of(ints(), x(&[2], &[1.5f32, 2.5]))).unwrap();
    assert_eq!((y.describe(), numbers(y)), ("f32[1, 3]".into(), vec![0.0, 2.5, 1.5]));
    refused(1, n.clone(), &of(Keys::Ints(vec![9]), x(&[1], &[1f32])), "9 is not in the vocabulary");
    refused(1, n, &of(Keys::Texts(vec!["a".into()]), x(&[1], &[1f32])), "type of the vocabulary");
    let cast = |form: &'static str, to: &'static str| {
        ml("CastMap", &["x0"], &["y"]).text("map_form", form).text("cast_to", to).int("max_map", 8)
    };
    let y = run(1, cast("DENSE", "TO_INT64"), &of(ints(), words(&[2], &["5", "-6"]))).unwrap();
    assert_eq!(numbers(y), [-6.0, 5.0]);
    let y = run(1, cast("SPARSE", "TO_FLOAT"), &of(ints(), x(&[2], &[1.5f32, 2.5]))).unwrap();
    assert_eq!(numbers(y), [0.0, 0.0, 2.5, 0.0, 0.0, 0.0, 0.0, 1.5]);
    let y = run(1, cast("SPARSE", "TO_STRING"), &of(ints(), x(&[2], &[1.5f32, 2.0]))).unwrap();
    assert_eq!(y, words(&[1, 8], &["", "", "2.0", "", "", "", "", "1.5"]));
    refused(1, cast("SPARSE", "TO_FLOAT"), &of(Keys::Ints(vec![8]), x(&[1], &[1f32])), "not below max_map 8");
    refused(1, cast("DENSE", "TO_FLOAT"), &of(ints(), words(&[2], &["x", "1"])), "'x' is not a number");
}

#[test]
fn strings_go_through_operators_that_move_them() {
    let plain = |op: &str, inputs: &[&str]| node(op, inputs, &["y"]);
    let v = || words(&[2, 2], &["b", "a", "é", "a"]);
    let y = run(1, plain("Pad", &["x0", "x1"]), &[v(), x(&[4], &[0i64, 1, 0, 0])]).unwrap();
    assert_eq!(y, words(&[2, 3], &["", "b", "a", "", "é", "a"]));
    let y = run(1, plain("Pad", &["x0", "x1", "x2"]), &[v(), x(&[4], &[0i64, 0, 0, 1]), words(&[], &["z"])]);
    assert_eq!(y.unwrap(), words(&[2, 3], &["b", "a", "z", "é", "a", "z"]));
    let y = run(1, plain("Equal", &["x0", "x1"]), &[v(), words(&[1], &["a"])]).unwrap();
    assert_eq!(numbers(y), [0.0, 1.0, 0.0, 1.0]);
    let y = all(1, node("Unique", &["x0"], &["y", "i"]), &[v()], &["y", "i"]).unwrap();
    assert_eq!((&y[0], numbers(y[1].clone())), (&words(&[3], &["a", "b", "é"]), vec![1.0, 0.0, 2.0]));
    let y = run(1, plain("Compress", &["x0", "x1"]).int("axis", 0), &[v(), x(&[2], &[false, true])]).unwrap();
    assert_eq!(y, words(&[1, 2], &["é", "a"]));
    let y = run(
        1,
        plain("ScatterElements", &["x0", "x1", "x2"]),
        &[v(), x(&[1, 2], &[1i64, 0]), words(&[1, 2], &["p", "q"])],
    );
    assert_eq!(y.unwrap(), words(&[2, 2], &["b", "q", "p", "a"]));
    // Operators that compute with strings are rejected.
    for n in
        [plain("Add", &["x0", "x0"]), plain("ScatterElements", &["x0", "x0", "x0"]).text("reduction", "add")]
    {
        assert!(matches!(run(1, n, &[v()]), Err(Error::Unsupported { .. })));
    }
    let parts = [
        node("SequenceConstruct", &["x0", "x0"], &["s"]),
        node("ConcatFromSequence", &["s"], &["y"]).int("axis", 0),
    ];
    let y = open(whole(1, &[v()], parts.to_vec(), &["y"])).run_staged(&[v()], Box::new(Plain)).unwrap().0;
    assert_eq!(y[0].describe(), "string[4, 2]");
    let y = run(1, plain("Cast", &["x0"]).int("to", 8), &[x(&[3], &[0.1f32, 3.0, 1e20])]).unwrap();
    assert_eq!(y, words(&[3], &["0.1", "3.0", "1e+20"]));
    let y =
        run(1, plain("CastLike", &["x0", "x1"]), &[words(&[2], &["2.9", "-inf"]), x(&[], &[0f64])]).unwrap();
    assert_eq!(numbers(y), [2.9, f64::NEG_INFINITY]);
    refused(1, plain("Cast", &["x0"]).int("to", 7), &[words(&[1], &["inf"])], "'inf' is not a number");
    let c = node("Constant", &[], &["y"]).texts("value_strings", &["a", ""]);
    assert_eq!(run(1, c, &[]).unwrap(), words(&[2], &["a", ""]));
    let c = node("Constant", &[], &["y"]).text("value_string", "é");
    assert_eq!(run(1, c, &[]).unwrap(), words(&[], &["é"]));
}

#[test]
fn operators_of_strings_check_their_operands() {
    let v = [words(&[2, 2], &["b", "a", "é", "a"])];
    let n = |op: &str| node(op, &["x0"], &["y"]);
    refused(1, n("StringNormalizer"), &v, "takes [C] or [1, C]");
    refused(1, n("StringNormalizer").text("case_change_action", "SWAP"), &[words(&[1], &["a"])], "'SWAP'");
    let turkish = n("StringNormalizer").text("locale", "tr_TR").text("case_change_action", "UPPER");
    assert!(matches!(run(1, turkish, &[words(&[1], &["i"])]), Err(Error::Unsupported { .. })));
    refused(
        1,
        node("StringConcat", &["x0", "x1"], &["y"]),
        &[v[0].clone(), words(&[3], &["a"; 3])],
        "do not broadcast",
    );
    refused(1, n("RegexFullMatch").text("pattern", "("), &v, "the pattern '('");
    refused(1, n("StringSplit"), &[x(&[1], &[1f32])], "not strings");
    let long = words(&[1, 5000], &["a"; 5000]);
    let tall = words(&[5000, 1], &["a"; 5000]);
    let many = node("StringConcat", &["x0", "x1"], &["y"]);
    assert!(matches!(run(1, many, &[long, tall]), Err(Error::Unsupported { .. })));
}

//! Tests of names, symbols, states, options and files. The op table in `halcyon` tests that every op
//! round-trips.

use super::*;
use crate::onnx::proto::{DimValue, NodeProto, TypeValue};
use crate::onnx::tensor::External;
use crate::onnx::{Imported, Model};
use halcyon_ir::ops::element_wise::ROWS;
use halcyon_ir::ops::{ReduceKind, ScatterKind};
use halcyon_ir::{ConstData, DType, Dim, NodeId, Op, ScalarOp, Shape, Span, TensorType, reference};

fn f32s(dims: &[usize], v: &[f32]) -> ConstData {
    ConstData::from_slice(dims, v).unwrap()
}

fn ty(dims: &[Dim]) -> TensorType {
    TensorType::new(DType::F32, dims)
}

fn at(opset: i64) -> ExportOptions {
    ExportOptions { opset, ..Default::default() }
}

fn nodes(m: &ModelProto) -> &[NodeProto] {
    &m.graph.as_ref().unwrap().node
}

fn names(m: &ModelProto) -> Vec<&str> {
    nodes(m).iter().map(|n| n.op_type.as_str()).collect()
}

fn again(m: ModelProto) -> Imported {
    Model::new(m, External::none(), "again").unwrap().import(&[]).unwrap()
}

/// Exports `f(x)` with `x` of symbolic sizes, and checks that the re-imported graph gives the same result for
/// `sizes`.
fn symbolic(dims: &[Dim], sizes: &[usize], f: impl Fn(&mut Graph, NodeId) -> Result<NodeId>) -> ModelProto {
    let mut g = Graph::new();
    let x = g.input("x", ty(dims));
    let y = f(&mut g, x).unwrap();
    g.output("y", y);
    let n: usize = sizes.iter().product();
    let v: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let data = [f32s(sizes, &v)];
    let want = reference::eval(&g, &data, &[]).unwrap();
    let m = export(&g, &ExportOptions::default()).unwrap();
    // Imports once with the sizes and once with the symbols.
    let i = Model::new(m.clone(), External::none(), "m").unwrap();
    let bound = i.import(&[("x", Shape::from(sizes))]).unwrap();
    assert_eq!(reference::eval(&bound.graph, &data, &[]).unwrap(), want, "{}", bound.graph);
    // Some computed sizes need the sizes of the inputs to be known.
    match i.import(&[]) {
        Ok(open) => assert_eq!(reference::eval(&open.graph, &data, &[]).unwrap(), want, "{}", open.graph),
        Err(e) => assert!(matches!(e, halcyon_ir::Error::Unsupported { .. }), "{e}"),
    }
    m
}

#[test]
fn every_scalar_op_has_an_onnx_form_for_every_class() {
    for r in ROWS {
        for c in r.on.chars() {
            assert!(spellings().any(|(op, on, _)| op == r.op && on.contains(c)), "{} on {c}", r.name);
        }
    }
    // Every row of the table is reachable.
    for (i, (op, on, text)) in spellings().enumerate() {
        let before: String = spellings()
            .take(i)
            .filter(|s| s.0 == op && !s.2.contains("from operator set"))
            .map(|s| s.1)
            .collect();
        assert!(!on.chars().any(|c| before.contains(c)), "{} {on}: {text}", op.name());
    }
}

#[test]
fn names_weights_and_broadcasts_read_like_the_graph() {
    let mut g = Graph::new();
    let x = g.input("x", ty(&[Dim::sym("n"), 3.into()]));
    g.span = Span::new("fc.weight");
    let w = g.constant(f32s(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    g.span = Span::new("fc");
    let y = g.matmul(x, w).unwrap();
    g.span = Span::new("act");
    let half = g.lit(y, 0.5);
    let z = g.mul(y, half).unwrap();
    let z = g.add(z, half).unwrap();
    g.output("y", z);
    g.output("again", z);
    g.output("x too", x);
    let m = export(&g, &ExportOptions::default()).unwrap();
    // The literal is one scalar that broadcasts; an output that is also an input is copied.
    assert_eq!(names(&m), ["MatMul", "Mul", "Add", "Identity", "Identity"]);
    assert_eq!((&*nodes(&m)[0].name, &*nodes(&m)[0].input[1]), ("fc", "fc.weight"));
    assert_eq!((&*nodes(&m)[1].name, &*nodes(&m)[2].name), ("act", "act/Add"));
    let graph = m.graph.as_ref().unwrap();
    assert_eq!(graph.initializer.len(), 2);
    assert_eq!(nodes(&m)[2].output, ["y"]);
    assert_eq!(nodes(&m)[3].input, ["y"]);
    let dim =
        |v: &crate::onnx::proto::ValueInfoProto| match v.r#type.as_ref().unwrap().value.as_ref().unwrap() {
            TypeValue::Tensor(t) => t.shape.as_ref().unwrap().dim[0].value.clone().unwrap(),
            _ => panic!(),
        };
    assert_eq!(dim(&graph.output[0]), DimValue::Param("n".into()));
    assert_eq!(graph.value_info.len(), 2);
    let i = again(m);
    assert_eq!(i.outputs, ["y", "again", "x too"]);
    let data = [f32s(&[1, 3], &[1.0, 0.0, -1.0])];
    assert_eq!(reference::eval(&i.graph, &data, &[]).unwrap(), reference::eval(&g, &data, &[]).unwrap());
}

#[test]
fn an_output_may_be_an_input_of_its_name() {
    let mut g = Graph::new();
    let x = g.input("x", ty(&[3.into()]));
    g.output("x", x);
    let m = export(&g, &ExportOptions::default()).unwrap();
    assert!(nodes(&m).is_empty());
    let y = g.neg(x).unwrap();
    let mut other = g.clone();
    other.set_outputs(vec![]);
    other.output("x", y);
    assert!(matches!(export(&other, &ExportOptions::default()), Err(Error::Argument { .. })));
    g.output("x", y);
    assert!(matches!(export(&g, &ExportOptions::default()), Err(Error::Argument { .. })));
}

#[test]
fn symbolic_sizes_are_computed_from_the_inputs() {
    let (b, s) = (Dim::sym("b"), Dim::sym("s"));
    // Reshape takes -1 for the one size that is not known, and 0 for sizes that do not change.
    let m = symbolic(&[b, 6.into()], &[2, 6], |g, x| g.reshape(x, [b.mul(2.into()), 3.into()]));
    assert_eq!(names(&m), ["Reshape"]);
    let m = symbolic(&[b, s, 6.into()], &[2, 5, 6], |g, x| {
        let y = g.reshape(x, [b, s, 2.into(), 3.into()])?;
        let y = g.permute(y, &[0, 2, 1, 3])?;
        g.reshape(y, [b.mul(2.into()), s.mul(3.into())])
    });
    assert_eq!(names(&m), ["Reshape", "Transpose", "Shape", "Mul", "Shape", "Mul", "Concat", "Reshape"]);
    // Sizes that are computed by division and subtraction.
    symbolic(&[s, 2.into()], &[7, 2], |g, x| {
        let half = s.div(2.into())?;
        let a = g.narrow(x, 0, 0usize, half)?;
        let c = g.narrow(x, 0, half, s.sub(half))?;
        g.concat(&[c, a], 0)
    });
    symbolic(&[s], &[5], |g, x| {
        let f = g.flip(x, &[0])?;
        let cut = g.narrow(f, 0, 1usize, s.offset(-1))?;
        g.sum(cut, &[0], true)
    });
    symbolic(&[s, 2.into()], &[6, 2], |g, x| {
        let every = g.slice(x, &[1.into(), 0.into()], &[2, 1], &[s.div(2.into())?, 2.into()])?;
        let wide = g.expand(every, &[s, s.div(2.into())?, 2.into()].into())?;
        let i = g.iota(DType::F32, [s, s.div(2.into())?, 2.into()], 0)?;
        g.add(wide, i)
    });
    symbolic(&[s], &[4], |g, x| g.argsort(x, 0, true).and_then(|o| g.cast(o, DType::F32)));
    symbolic(&[b, s], &[3, 4], |g, x| {
        let f = g.full(DType::F32, [b, s.max(2.into())], 2.0);
        let r = g.reduce(ReduceKind::Sum, f, &[1], true)?;
        g.add(x, r)
    });
    // Errors: a downward slice from a symbolic start, and a size that no input has.
    let mut g = Graph::new();
    let x = g.input("x", ty(&[s]));
    let y = g.slice(x, &[s.offset(-2)], &[-1], &[s.offset(-1)]).unwrap();
    g.output("y", y);
    assert!(matches!(export(&g, &ExportOptions::default()), Err(Error::Unsupported { .. })));
    let mut g = Graph::new();
    let y = g.full(DType::F32, [Dim::sym("nowhere")], 1.0);
    g.output("y", y);
    assert!(
        matches!(export(&g, &ExportOptions::default()), Err(Error::Unsupported { what, .. }) if what.contains("nowhere"))
    );
}

#[test]
fn composites_are_exported_as_operators_if_the_set_has_them() {
    let mut g = Graph::new();
    let x = g.input("x", ty(&[2.into(), 4.into(), 3.into(), 8.into()]));
    let s = g.input("s", ty(&[8.into()]));
    let n = g.rms_norm(x, s, 1e-5).unwrap();
    let a = g.attention(n, x, x, None, true, 0.5).unwrap();
    let y = g.layer_norm(a, s, Some(s), 3, 1e-5).unwrap();
    let y = g.softmax(y, 1).unwrap();
    g.output("y", y);
    let data = [
        f32s(&[2, 4, 3, 8], &(0..192).map(|i| (i as f32 * 0.7).cos()).collect::<Vec<_>>()),
        f32s(&[8], &[1.0, 2.0, 0.5, 1.5, -1.0, 1.0, 0.25, 3.0]),
    ];
    let newest = export(&g, &at(LATEST)).unwrap();
    assert_eq!(names(&newest), ["RMSNormalization", "Attention", "LayerNormalization", "Softmax"]);
    let m = export(&g, &ExportOptions::default()).unwrap();
    assert!(names(&m).contains(&"MatMul") && !names(&m).contains(&"Attention"));
    let (got, want) = (
        reference::eval(&again(m).graph, &data, &[]).unwrap().remove(0).to_vec::<f64>(),
        reference::eval(&g, &data, &[]).unwrap().remove(0).to_vec::<f64>(),
    );
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6));
    // If the numbers of queries and keys differ, the operator's causal mask is not Halcyon's, so the body is
    // written. The body of a norm in f64 is written too, because the operator's statistics would lose
    // precision.
    let mut g = Graph::new();
    let q = g.input("q", ty(&[1.into(), 1.into(), 2.into(), 4.into()]));
    let k = g.input("k", ty(&[1.into(), 1.into(), 5.into(), 4.into()]));
    let y = g.attention(q, k, k, None, true, 0.5).unwrap();
    g.output("y", y);
    let w = g.input("w", TensorType::new(DType::F64, [3usize, 4]));
    let one = g.full(DType::F64, [4usize], 1.0);
    let z = g.layer_norm(w, one, None, 1, 1e-5).unwrap();
    g.output("z", z);
    let m = export(&g, &at(LATEST)).unwrap();
    assert!(!names(&m).iter().any(|n| ["Attention", "LayerNormalization"].contains(n)), "{:?}", names(&m));
}

#[test]
fn states_and_arguments_are_inputs_and_outputs() {
    let mut g = Graph::new();
    let x = g.input("new", ty(&[1.into(), 4.into()]));
    let c = g.input("cache", ty(&[8.into(), 4.into()]));
    let at = g.arg(DType::I32);
    let k = g.arg(DType::F32);
    let y = g.update_slice(c, x, at, 0).unwrap();
    let z = g.mul(y, k).unwrap();
    let o = g.output("cache_next", y);
    g.output("z", z);
    g.state(1, o).unwrap();
    let m = export(&g, &ExportOptions::default()).unwrap();
    let p = &m.metadata_props[0];
    assert_eq!((&*p.key, &*p.value), (STATES, r#"[["cache","cache_next"]]"#));
    let inputs: Vec<&str> = m.graph.as_ref().unwrap().input.iter().map(|i| &*i.name).collect();
    assert_eq!(inputs, ["new", "cache", "arg0", "arg1"]);
}

#[test]
fn operators_newer_than_the_set_are_errors_that_name_the_set() {
    for opset in [OLDEST - 1, LATEST + 1] {
        assert!(matches!(export(&Graph::new(), &at(opset)), Err(Error::Argument { .. })));
    }
    let mut g = Graph::new();
    let x = g.input("x", ty(&[3.into()]));
    let y = g.bitcast(x, DType::I32).unwrap();
    g.output("y", y);
    let e = export(&g, &ExportOptions::default()).unwrap_err();
    assert!(e.to_string().contains("26") && e.exit_code() == 3, "{e}");
    assert_eq!(names(&export(&g, &at(26)).unwrap()), ["BitCast"]);
    let mut g = Graph::new();
    let x = g.input("x", ty(&[Dim::sym("n")]));
    let y = g.scan(ReduceKind::Max, x, 0, false, false).unwrap();
    g.output("y", y);
    assert!(matches!(export(&g, &at(LATEST)), Err(Error::Unsupported { .. })));
    let y = g.scan(ReduceKind::Prod, x, 0, false, false).unwrap();
    let mut h = g.clone();
    h.set_outputs(vec![]);
    h.output("y", y);
    assert_eq!(names(&export(&h, &at(26)).unwrap()), ["CumProd"]);
}

#[test]
fn large_weights_go_to_a_file_on_page_boundaries() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let mut g = Graph::new();
    let x = g.input("x", ty(&[1.into(), 300.into()]));
    let v: Vec<f32> = (0..300 * 1000).map(|i| i as f32).collect();
    let large = g.constant(f32s(&[300, 1000], &v));
    let small = g.constant(f32s(&[1000], &v[..1000]));
    let tiny = g.constant(f32s(&[2], &v[1..3]));
    let y = g.matmul(x, large).unwrap();
    let y = g.add(y, small).unwrap();
    let z = g.neg(tiny).unwrap();
    g.output("y", y);
    g.output("z", z);
    let plain = write(&g, &path, &ExportOptions::default()).unwrap();
    assert!(plain.data.is_none() && plain.model_bytes > 1_200_000);
    let w = write(&g, &path, &ExportOptions { external_data: true, ..Default::default() }).unwrap();
    let (data, bytes) = w.data.unwrap();
    assert_eq!(data, dir.path().join("m.onnx.data"));
    assert!(w.model_bytes < 2000 && bytes == std::fs::metadata(&data).unwrap().len());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    let m = Model::open(&path).unwrap();
    let i = m.import(&[]).unwrap();
    let input = [f32s(&[1, 300], &v[..300])];
    assert_eq!(reference::eval(&i.graph, &input, &[]).unwrap(), reference::eval(&g, &input, &[]).unwrap());
    let proto = export(&g, &ExportOptions { external_data: true, ..Default::default() }).unwrap();
    assert!(proto.graph.unwrap().initializer.iter().all(|t| t.external_data.is_empty()));
    // Overwrites the file that the weights are mapped from.
    let w = write(&i.graph, &path, &ExportOptions { external_data: true, ..Default::default() }).unwrap();
    assert_eq!(w.data.unwrap().1, bytes);
    let j = Model::open(&path).unwrap().import(&[]).unwrap();
    assert_eq!(reference::eval(&j.graph, &input, &[]).unwrap(), reference::eval(&g, &input, &[]).unwrap());
    let offsets: Vec<u64> = m_offsets(&path);
    assert!(offsets.iter().all(|o| o % 4096 == 0) && offsets.iter().any(|o| o % 65536 == 0), "{offsets:?}");
    assert!(matches!(
        write(&g, std::path::Path::new("/nowhere/at/all.onnx"), &ExportOptions::default()),
        Err(Error::Io { .. })
    ));
}

fn m_offsets(path: &std::path::Path) -> Vec<u64> {
    let m = <ModelProto as prost::Message>::decode(&std::fs::read(path).unwrap()[..]).unwrap();
    let all = m.graph.unwrap().initializer;
    let entries = all.iter().flat_map(|t| &t.external_data).filter(|e| e.key == "offset");
    entries.map(|e| e.value.parse().unwrap()).collect()
}

#[test]
fn scatters_and_gradients_keep_their_meaning() {
    // Adds rows along the second axis, at indices that are a matrix. ONNX needs several operators for this.
    let mut g = Graph::new();
    let x = g.input("x", ty(&[2.into(), 3.into(), 2.into()]));
    let i = g.constant(ConstData::from_slice(&[1, 2], &[2i64, 0]).unwrap());
    let u = g.input("u", ty(&[2.into(), 1.into(), 2.into(), 2.into()]));
    let y = g.scatter_rows(x, i, u, 1, ScatterKind::Add).unwrap();
    g.output("y", y);
    let m = export(&g, &ExportOptions::default()).unwrap();
    assert_eq!(names(&m), ["Transpose", "Transpose", "Unsqueeze", "ScatterND", "Transpose"]);
    assert!(g.nodes().iter().any(|n| matches!(n.op, Op::ScatterRows { .. })));
    assert!(ScalarOp::from_name("atan2").is_some());
}

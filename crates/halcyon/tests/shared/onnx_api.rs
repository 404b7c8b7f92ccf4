//! ONNX models from Rust: inputs and outputs by name.

use halcyon::formats::npz::Npz;
use halcyon::formats::onnx::proto::{
    DimValue, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TensorType,
    TypeProto, TypeValue, ValueInfoProto,
};
use halcyon::onnx::{Cancel, Datum, Model, Results, RunOptions};
use halcyon::prelude::*;
use halcyon::{ConstData, Error, OnnxSession};
use halcyon_test::root;
use std::path::PathBuf;

fn shipped(name: &str) -> PathBuf {
    root().join("models").join(name)
}

fn digits(b: &Backend) -> OnnxSession {
    OnnxSession::open(b, shipped("digits.onnx")).unwrap()
}

/// Test images with values in 0..1, and their labels.
fn images(n: usize) -> (Vec<f32>, Vec<i64>) {
    let data = Npz::open(&shipped("digits.npz")).unwrap();
    let pixels = data.get("test_images").unwrap().to_vec::<f32>();
    let labels = data.get("test_labels").unwrap().to_vec::<i64>();
    (pixels[..n * 64].iter().map(|p| p / 16.0).collect(), labels[..n].to_vec())
}

#[test]
fn tensors_stay_on_the_device() {
    let b = Backend::cpu().unwrap();
    let session = digits(&b);
    let (pixels, labels) = images(60);
    let x = Tensor::from_slice(&b, [60, 1, 8, 8], &pixels).unwrap();
    let outputs = session.run([("image", &x)]).unwrap();
    // A second run of these sizes copies nothing to or from the device until the result is read.
    let (before, plans) = (b.counters(), b.cache_stats().plans_built);
    let again = session.run([("image", &x)]).unwrap();
    let after = b.counters();
    assert_eq!((after.uploads, after.downloads), (before.uploads, before.downloads));
    assert_eq!(b.cache_stats().plans_built, plans);
    let y = &outputs["probabilities"];
    assert_eq!(y.dims().unwrap().as_slice(), [60, 10]);
    assert_eq!(y.to_vec::<f32>().unwrap(), again[0].to_vec::<f32>().unwrap());
    let named = y.argmax(-1).to_vec::<i64>().unwrap();
    let right = named.iter().zip(&labels).filter(|(a, b)| a == b).count();
    assert!(right >= 55, "{right} of 60");

    // Host data (a shape and values, in several forms) and a pending tensor give the same result.
    let want = y.to_vec::<f32>().unwrap();
    let same = |o: halcyon::onnx::Outputs| assert_eq!(o["probabilities"].to_vec::<f32>().unwrap(), want);
    same(session.run([("image", ([60, 1, 8, 8], &pixels[..]))]).unwrap());
    same(session.run([("image", ([60, 1, 8, 8], &pixels))]).unwrap());
    same(session.run([("image".to_string(), ([60, 1, 8, 8], pixels.clone()))]).unwrap());
    same(session.run([("image", ConstData::from_slice(&[60, 1, 8, 8], &pixels).unwrap())]).unwrap());
    same(session.run(vec![("image", &(&x * 16) / 16)]).unwrap());
    #[cfg(feature = "ndarray")]
    {
        let a = ndarray::Array4::from_shape_vec((60, 1, 8, 8), pixels.clone()).unwrap();
        same(session.run([("image", &a)]).unwrap());
    }
    // `run_data`, which takes inputs by position, gives the same result.
    let data = Datum::Tensor(ConstData::from_slice(&[60, 1, 8, 8], &pixels).unwrap());
    assert_eq!(session.run_data(&[data]).unwrap().outputs[0].tensor().unwrap().to_vec::<f32>(), want);

    assert_eq!((outputs.len(), outputs.names().collect::<Vec<_>>()), (1, vec!["probabilities"]));
    assert!(outputs.iter().all(|(n, t)| n == "probabilities" && t.is_ready()) && outputs.staged().is_none());
    assert!(outputs.get("scores").unwrap_err().to_string().contains("\"probabilities\""));
    assert!(outputs.clone().into_map().contains_key("probabilities"));
    assert_eq!(outputs.into_iter().next().unwrap().0, "probabilities");
}

#[test]
fn wrong_names_and_values_are_errors_that_list_the_inputs() {
    let b = Backend::cpu().unwrap();
    let session = digits(&b);
    let x = Tensor::zeros(&b, [1, 1, 8, 8], DType::F32);
    let says = |e: Error, parts: &[&str]| {
        let e = e.to_string();
        parts.iter().for_each(|p| assert!(e.contains(p), "{e} does not say {p}"));
        assert!(e.contains("shared/onnx_api.rs"), "{e}");
    };
    let inputs = "\"image\" (f32[batch, 1, 8, 8])";
    says(session.run([("picture", &x)]).unwrap_err(), &["no input \"picture\"", inputs]);
    says(session.run([("image", &x), ("image", &x)]).unwrap_err(), &["\"image\" is given twice", inputs]);
    says(session.run::<&str, &Tensor>([]).unwrap_err(), &["\"image\" is missing", inputs]);
    says(session.run([("image", &x.cast(DType::F64))]).unwrap_err(), &["image", "f64", "f32"]);
    says(session.run([("image", &x.reshape([1, 64]))]).unwrap_err(), &["image"]);
    says(session.run([("image", ([1, 1, 8, 8], vec![0f32; 63]))]).unwrap_err(), &["image", "256"]);
    let other = Backend::cpu().unwrap();
    let y = Tensor::zeros(&other, [1, 1, 8, 8], DType::F32);
    says(session.run([("image", &y)]).unwrap_err(), &["image", ".to(&backend)"]);
    assert!(matches!(OnnxSession::open(&b, "no/such.onnx").unwrap_err(), Error::Io { .. }));
}

fn port(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = |d: &&str| Dimension {
        value: Some(match d.parse() {
            Ok(n) => DimValue::Value(n),
            Err(_) => DimValue::Param(d.to_string()),
        }),
    };
    let t = TensorType {
        elem_type: dtype.row().onnx,
        shape: Some(TensorShapeProto { dim: dims.iter().map(dim).collect() }),
    };
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { value: Some(TypeValue::Tensor(t)) }) }
}

#[test]
fn a_cancelled_run_ends_between_two_steps_of_its_graph() {
    let b = Backend::cpu().unwrap();
    let session = digits(&b);
    let data = ConstData::from_slice(&[4, 1, 8, 8], &images(4).0).unwrap();
    let run = |options: &RunOptions| session.run_with([("image", &data)], options);
    let options = RunOptions::default();
    let Results::Device(outputs) = run(&options).unwrap() else { panic!("the model is one graph") };
    let want = outputs["probabilities"].to_vec::<f32>().unwrap();
    // The value is read into memory of the caller, which has its size.
    let mut bytes = vec![0; want.len() * 4];
    outputs[0].read_into(&mut bytes).unwrap();
    assert_eq!(bytes, want.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    assert!(outputs[0].read_into(&mut bytes[1..]).unwrap_err().to_string().contains("160"));

    options.cancel.cancel();
    let e = run(&options).unwrap_err();
    assert!(matches!(&e, Error::Interrupted { what } if what.contains("step")), "{e}");
    // The flag belongs to these options alone, and ends no other run.
    let Results::Device(outputs) = run(&RunOptions::default()).unwrap() else { panic!("one graph") };
    assert_eq!(outputs[0].to_vec::<f32>().unwrap(), want);
    options.cancel.reset();
    run(&options).unwrap();

    // The session's own flag ends runs on host data too.
    let cancel = Cancel::default();
    let own = RunOptions { cancel: cancel.clone(), ..RunOptions::default() };
    let session = digits(&b).with_options(own);
    session.run_data(&[Datum::Tensor(data.clone())]).unwrap();
    cancel.cancel();
    let e = session.run_data(&[Datum::Tensor(data)]).unwrap_err();
    assert!(matches!(e, Error::Interrupted { .. }), "{e}");
}

#[test]
fn models_in_stages_and_values_that_decide_shapes() {
    let b = Backend::cpu().unwrap();
    let node = |op: &str, inputs: &[&str]| NodeProto {
        op_type: op.into(),
        name: op.into(),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: vec!["y".into()],
        ..Default::default()
    };
    let model = |node: NodeProto, input: Vec<ValueInfoProto>, y: ValueInfoProto| {
        let graph = GraphProto { node: vec![node], input, output: vec![y], ..Default::default() };
        let set = OperatorSetIdProto { version: 17, ..Default::default() };
        let proto =
            ModelProto { ir_version: 8, opset_import: vec![set], graph: Some(graph), ..Default::default() };
        let none = halcyon::formats::onnx::tensor::External::none();
        OnnxSession::new(&b, Model::new(proto, none, "m.onnx").unwrap()).unwrap()
    };
    let x = Tensor::from_slice(&b, [4], &[0f32, 2.0, 0.0, 3.0]).unwrap();
    // The number of results is known only at run time.
    let staged = model(
        node("NonZero", &["x"]),
        vec![port("x", DType::F32, &["n"])],
        port("y", DType::I64, &["1", "m"]),
    );
    let out = staged.run([("x", &x)]).unwrap();
    assert_eq!(out["y"].to_vec::<i64>().unwrap(), [1, 3]);
    assert!(out.staged().is_some());
    // `run_with` leaves the results on the host.
    let Results::Host(run) = staged.run_with([("x", &x)], &RunOptions::default()).unwrap() else {
        panic!("the model runs in stages")
    };
    assert_eq!(run.outputs[0].tensor().unwrap().to_vec::<i64>(), [1, 3]);
    assert_eq!(run.staged.as_deref(), out.staged());
    // `shape` is a device tensor whose values are the new shape.
    let reshape = model(
        node("Reshape", &["x", "shape"]),
        vec![port("x", DType::F32, &["n"]), port("shape", DType::I64, &["2"])],
        port("y", DType::F32, &["a", "b"]),
    );
    for (shape, dims) in [([2i64, 2], [2, 2]), ([4, 1], [4, 1]), ([-1, 4], [1, 4])] {
        let s = Tensor::from_slice(&b, [2], &shape).unwrap();
        let out = reshape.run([("shape", &s), ("x", &x)]).unwrap();
        assert_eq!(out["y"].dims().unwrap().as_slice(), dims);
        assert_eq!(out["y"].to_vec::<f32>().unwrap(), [0.0, 2.0, 0.0, 3.0]);
    }
}

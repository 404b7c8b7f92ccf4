//! Models in ONNX Runtime. The tests need its library, which `cargo xtask test` installs as a package of its
//! Python environment.

use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::{Datum, Keys, Text};
use halcyon_ir::{ConstData, DType, Error};
use halcyon_ort::{FoundBy, Inputs, OLDEST, Runtime, Session, SessionOptions};
use halcyon_test::seed_models as small;
use prost::Message;
use std::path::Path;
use std::sync::Arc;

/// The library; `None` if it is missing and the test is skipped.
fn library(test: &str) -> Option<Arc<Runtime>> {
    match Runtime::open(None) {
        Ok(r) => Some(r),
        Err(e) => {
            assert!(!halcyon_test::required(), "{e}");
            halcyon_test::skip(test, &e.to_string());
            None
        }
    }
}

/// `N` of the version `1.N.P`.
fn minor(r: &Runtime) -> u32 {
    r.version().split('.').nth(1).and_then(|n| n.parse().ok()).expect("a version")
}

fn tensor_type(elem_type: i32) -> TypeProto {
    TypeProto { value: Some(TypeValue::Tensor(TensorType { elem_type, shape: None })) }
}

fn value(name: &str, t: TypeProto) -> ValueInfoProto {
    ValueInfoProto { name: name.into(), r#type: Some(t) }
}

fn model(opset: i64, nodes: Vec<NodeProto>, input: ValueInfoProto, output: ValueInfoProto) -> ModelProto {
    let set = |domain: &str, version| OperatorSetIdProto { domain: domain.into(), version };
    let graph = GraphProto {
        node: nodes,
        name: "g".into(),
        input: vec![input],
        output: vec![output],
        ..Default::default()
    };
    ModelProto {
        ir_version: 10,
        opset_import: vec![set("", opset), set("ai.onnx.ml", 3)],
        graph: Some(graph),
        ..Default::default()
    }
}

fn load(r: &Arc<Runtime>, m: &ModelProto) -> Result<Session, Error> {
    Session::from_bytes(r, &m.encode_to_vec(), Path::new(""), "test", &SessionOptions::default())
}

fn run(r: &Arc<Runtime>, m: &ModelProto, x: &Datum) -> Result<Datum, Error> {
    let mut s = load(r, m)?;
    let inputs = Inputs::new(r, [("x", x)])?;
    Ok(s.run(&inputs)?.remove(0))
}

#[test]
fn the_library_has_a_version_a_file_and_the_provider_of_the_cpu() {
    let Some(r) = library("the_library_has_a_version_a_file_and_the_provider_of_the_cpu") else { return };
    assert!(minor(&r) >= OLDEST, "{}", r.version());
    assert!(r.path().to_string_lossy().contains("onnxruntime"), "{:?}", r.path());
    assert!(r.providers().expect("a list").iter().any(|p| p == "CPUExecutionProvider"));
    assert_ne!(r.found_by(), FoundBy::Caller);
    // A process can load one library.
    let e = Runtime::open(Some(Path::new("/another.so"))).unwrap_err();
    assert!(e.to_string().contains("loaded already"), "{e}");
}

/// Every element type comes back with the same bits, in a shape with an odd number of elements.
#[test]
fn every_element_type_keeps_its_bits() {
    let Some(r) = library("every_element_type_keeps_its_bits") else { return };
    let mut refused = vec![];
    for dtype in DType::all().filter(|d| d.row().onnx != 0) {
        let n = 15;
        let bytes: Vec<u8> = match dtype {
            DType::Bool => (0..n).map(|i| (i % 2) as u8).collect(),
            d => (0..d.bytes(n)).map(|i| (i * 37 + 11) as u8).collect(),
        };
        let x = ConstData::new(dtype, &[3, 5], Arc::new(bytes)).expect("fits");
        let t = || tensor_type(dtype.row().onnx);
        let opset = if dtype.bits() == 2 { 25 } else { 23 };
        // ONNX Runtime has no operator for some types, so the input is the output.
        let m = model(opset, vec![], value("x", t()), value("x", t()));
        match run(&r, &m, &Datum::Tensor(x.clone())) {
            // The last byte of a small type has unused bits.
            Ok(Datum::Tensor(y)) => {
                assert_eq!((y.dtype, y.dims.as_slice()), (dtype, &[3, 5][..]));
                let same = x.scalars().zip(y.scalars()).all(|(a, b)| a.to_bytes(dtype) == b.to_bytes(dtype));
                assert!(same, "{dtype}: {:?} became {:?}", x.bytes(), y.bytes());
            }
            Ok(other) => panic!("{dtype}: {other:?}"),
            // A library that lacks the type or the operator set says so.
            Err(e) => refused.push(format!("{dtype}: {e}")),
        }
    }
    let native = |d: &&String| DType::native().any(|n| d.starts_with(&format!("{n}: ")));
    assert!(!refused.iter().any(|d| native(&d)), "{refused:?}");
    // Older libraries lack types.
    assert!(refused.is_empty() || minor(&r) < 31, "{refused:#?}");
}

/// A file may hold a boolean whose byte is neither 0 nor 1.
#[test]
fn odd_booleans_are_read_as_bytes() {
    let Some(r) = library("odd_booleans_are_read_as_bytes") else { return };
    let t = || tensor_type(DType::Bool.row().onnx);
    let m = model(17, vec![small::node("Not", &["x"], &["y"])], value("x", t()), value("y", t()));
    let x = ConstData::new(DType::Bool, &[3], Arc::new(vec![0u8, 2, 255])).expect("fits");
    let y = run(&r, &m, &Datum::Tensor(x)).expect("runs");
    assert_eq!(y.tensor().expect("a tensor").bytes(), [1, 0, 0]);
}

#[test]
fn strings_sequences_and_maps_are_read() {
    let Some(r) = library("strings_sequences_and_maps_are_read") else { return };
    let string = || tensor_type(8);
    let m =
        model(17, vec![small::node("Identity", &["x"], &["y"])], value("x", string()), value("y", string()));
    let text = Datum::Text(Text::new(&[2], vec!["a".into(), "ü ∑".into()]).expect("fits"));
    assert_eq!(run(&r, &m, &text).expect("runs"), text);

    let f32s = || tensor_type(1);
    let sequence = |t: TypeProto| TypeProto {
        value: Some(TypeValue::Sequence(Box::new(ElementType { elem_type: Some(Box::new(t)) }))),
    };
    let nodes = vec![small::node("SequenceConstruct", &["x", "x"], &["y"])];
    let m = model(17, nodes, value("x", f32s()), value("y", sequence(f32s())));
    let x = Datum::Tensor(ConstData::from_slice(&[2], &[1f32, 2.0]).expect("fits"));
    assert_eq!(run(&r, &m, &x).expect("runs"), Datum::Sequence(vec![x.clone(), x.clone()]));
    let nodes = vec![small::int(small::node("ConcatFromSequence", &["x"], &["y"]), "axis", 0)];
    let m = model(17, nodes, value("x", sequence(f32s())), value("y", f32s()));
    let joined = run(&r, &m, &Datum::Sequence(vec![x.clone(), x])).expect("runs");
    assert_eq!(joined.tensor().expect("a tensor").to_vec::<f32>(), [1.0, 2.0, 1.0, 2.0]);

    let map = TypeProto {
        value: Some(TypeValue::Map(Box::new(MapType { key_type: 7, value_type: Some(Box::new(f32s())) }))),
    };
    let mut zip = small::list(small::node("ZipMap", &["x"], &["y"]), "classlabels_int64s", &[4, 9]);
    zip.domain = "ai.onnx.ml".into();
    let m = model(17, vec![zip], value("x", f32s()), value("y", sequence(map)));
    let x = Datum::Tensor(ConstData::from_slice(&[1, 2], &[0.25f32, 0.75]).expect("fits"));
    let want = Datum::Map(
        Keys::Ints(vec![4, 9]),
        Box::new(ConstData::from_slice(&[2], &[0.25f32, 0.75]).expect("fits").into()),
    );
    assert_eq!(run(&r, &m, &x).expect("runs"), Datum::Sequence(vec![want]));
}

#[test]
fn errors_have_a_kind() {
    let Some(r) = library("errors_have_a_kind") else { return };
    let t = || tensor_type(1);
    let one = |op: &str| model(17, vec![small::node(op, &["x"], &["y"])], value("x", t()), value("y", t()));
    let e = load(&r, &one("NoSuchOperator")).unwrap_err();
    assert!(e.to_string().contains("NoSuchOperator"), "{e}");
    let options = SessionOptions::default();
    let e = Session::from_bytes(&r, b"not a model", Path::new(""), "odd.onnx", &options).unwrap_err();
    assert!(matches!(e, Error::Format { .. }) && e.to_string().starts_with("odd.onnx: "), "{e}");
    // The input has another type than the model's.
    let x = Datum::Tensor(ConstData::from_slice(&[1], &[1i64]).expect("fits"));
    let e = run(&r, &one("Relu"), &x).unwrap_err();
    assert!(matches!(e, Error::Driver { .. }), "{e}");
    let nothing = Datum::Optional(None);
    let e = run(&r, &one("Relu"), &nothing).unwrap_err();
    assert_eq!(e.exit_code(), 3, "{e}");
    let cuda = SessionOptions { providers: vec!["TensorrtExecutionProvider".into()], ..options };
    let e = Session::from_bytes(&r, &one("Relu").encode_to_vec(), Path::new(""), "m", &cuda).unwrap_err();
    assert!(e.to_string().contains("TensorrtExecutionProvider"), "{e}");
    let second = SessionOptions {
        providers: vec!["CPUExecutionProvider".into()],
        device: Some(1),
        ..SessionOptions::default()
    };
    let e = Session::from_bytes(&r, &one("Relu").encode_to_vec(), Path::new(""), "m", &second).unwrap_err();
    assert_eq!(e.exit_code(), 2, "{e}");
}

/// The check says which provider cannot be used and why, before a model of the user is loaded.
#[test]
fn providers_are_checked_without_a_model() {
    let Some(r) = library("providers_are_checked_without_a_model") else { return };
    let of = |providers: &[&str], device| SessionOptions {
        providers: providers.iter().map(|p| p.to_string()).collect(),
        device,
        ..SessionOptions::default()
    };
    Session::check_providers(&r, &SessionOptions::default()).expect("the CPU's provider works");
    Session::check_providers(&r, &of(&["CPUExecutionProvider"], Some(0))).expect("the CPU's provider works");
    // A library for the CPU has no provider of CUDA; others lack the device.
    if !r.providers().expect("a list").iter().any(|p| p == "CUDAExecutionProvider") {
        let e =
            Session::check_providers(&r, &of(&["CUDAExecutionProvider", "CPUExecutionProvider"], Some(1)));
        match e.expect_err("a provider that the library lacks") {
            Error::Unavailable { backend, reason, .. } => {
                assert!(backend == "CUDAExecutionProvider" && !reason.is_empty(), "{backend}: {reason}");
            }
            e => panic!("{e:?}"),
        }
    }
}

/// Reading an optional would panic in the crate `ort`, so it is not requested.
#[test]
fn optional_outputs_are_left_out() {
    let Some(r) = library("optional_outputs_are_left_out") else { return };
    let t = || tensor_type(1);
    let optional = TypeProto {
        value: Some(TypeValue::Optional(Box::new(ElementType { elem_type: Some(Box::new(t())) }))),
    };
    let nodes = vec![small::node("Optional", &["x"], &["o"]), small::node("Neg", &["x"], &["y"])];
    let mut m = model(17, nodes, value("x", t()), value("o", optional));
    m.graph.as_mut().expect("a graph").output.push(value("y", t()));
    let mut s = load(&r, &m).expect("loads");
    assert_eq!(s.outputs(), ["y"]);
    assert_eq!(s.left_out()[0].0, "o");
    let x = Datum::Tensor(ConstData::from_slice(&[1], &[2f32]).expect("fits"));
    let out = s.run(&Inputs::new(&r, [("x", &x)]).expect("fits")).expect("runs");
    assert_eq!((out.len(), out[0].tensor().expect("a tensor").to_vec::<f32>()), (1, vec![-2.0]));
}

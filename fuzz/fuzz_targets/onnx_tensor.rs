//! Fuzz target: a stored ONNX value (a tensor, sparse tensor, sequence, optional or map).
#![no_main]

use bytes::Bytes;
use halcyon_formats::onnx::proto::SparseTensorProto;
use halcyon_formats::onnx::tensor::{self, External};
use halcyon_formats::onnx::{Datum, PortType, sparse, wire};
use halcyon_fuzz::judge;
use halcyon_ir::DType;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|data: &[u8]| {
    let none = External::none();
    let data = Bytes::copy_from_slice(data);
    let _ = halcyon_formats::sniff::kind(&data);
    if let Some((name, t)) = judge(tensor::parse_pb(data.clone(), &none, "t")) {
        // A parsed tensor is written and read again.
        let again = tensor::encode(&t, &name).encode_to_vec();
        let (n, u) = tensor::parse_pb(again.into(), &none, "t").expect("a tensor that was written");
        assert!(n == name && u == t);
    }
    let tensor = || Box::new(PortType::Tensor { dtype: DType::F32, shape: None });
    for ty in [
        PortType::Text { shape: None },
        PortType::Sequence(tensor()),
        PortType::Optional(tensor()),
        PortType::Optional(Box::new(PortType::Sequence(tensor()))),
        PortType::Map(tensor()),
    ] {
        judge(Datum::parse_pb(data.clone(), &none, "t", &ty));
    }
    if wire::check(&data, wire::Kind::Sparse, "t").is_ok()
        && let Ok(s) = SparseTensorProto::decode(data)
        && let Some(s) = judge(sparse::decode(&s, &none, "t"))
        && s.is_small()
    {
        judge(s.dense());
    }
});

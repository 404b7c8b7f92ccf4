//! Quantised graphs are written as quantisation operators, and read back as the same function.

use super::super::{ExportOptions, export};
use crate::onnx::proto::ModelProto;
use crate::onnx::tensor::External;
use crate::onnx::{Imported, Model};
use halcyon_ir::{ConstData, DType, Error, Graph, TensorType, reference};
use prost::Message;
use std::path::Path;
use std::sync::Arc;

fn f32s(dims: &[usize], by: f32) -> ConstData {
    let n: usize = dims.iter().product();
    let v: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * by).collect();
    ConstData::from_slice(dims, &v).unwrap()
}

fn bytes(d: DType, dims: &[usize]) -> ConstData {
    let n: usize = dims.iter().product();
    ConstData::new(d, dims, Arc::new((0..n).map(|i| (i * 91 % 251) as u8).collect::<Vec<u8>>())).unwrap()
}

fn again(m: &ModelProto) -> Imported {
    let data = m.encode_to_vec().into();
    Model::parse(data, External::in_folder_of(Path::new("m.onnx")), "m.onnx").unwrap().import(&[]).unwrap()
}

fn operators(m: &ModelProto) -> Vec<(String, String)> {
    let nodes = &m.graph.as_ref().unwrap().node;
    nodes.iter().map(|n| (n.domain.clone(), n.op_type.clone())).collect()
}

#[test]
fn layers_of_bytes_are_quantize_and_dequantize_operators() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3, 8]));
    let s = g.constant(ConstData::from_slice(&[], &[0.02f32]).unwrap());
    let z = g.constant(ConstData::from_slice(&[], &[120u8]).unwrap());
    let q = g.quantize(x, s, Some(z), DType::U8, None).unwrap();
    let x1 = g.dequantize(q, s, Some(z), None).unwrap();
    let w = g.constant(bytes(DType::I8, &[8, 5]));
    let scales = g.constant(f32s(&[5], 0.1));
    let w = g.dequantize(w, scales, None, Some(1)).unwrap();
    let y = g.matmul(x1, w).unwrap();
    g.output("y", y);
    let m = export(&g, &ExportOptions::default()).unwrap();
    let names: Vec<String> = operators(&m).into_iter().map(|o| o.1).collect();
    assert_eq!(names, ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul"]);
    assert!(m.graph.as_ref().unwrap().node[..3].iter().all(|n| n.input.len() == 3), "no zero point");
    let data = [f32s(&[3, 8], 2.0)];
    let back = again(&m);
    assert_eq!(reference::eval(&back.graph, &data, &[]).unwrap(), reference::eval(&g, &data, &[]).unwrap());
}

#[test]
fn a_scale_for_each_row_is_written_as_its_operations() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3, 8]));
    let s = g.input("s", TensorType::new(DType::F32, [3, 1]));
    let q = g.quantize(x, s, None, DType::I8, None).unwrap();
    g.output("y", q);
    let m = export(&g, &ExportOptions::default()).unwrap();
    assert!(operators(&m).iter().all(|o| o.1 != "QuantizeLinear"));
    let data = [f32s(&[3, 8], 200.0), ConstData::from_slice(&[3, 1], &[1.0f32, 2.0, 0.5]).unwrap()];
    let back = again(&m);
    assert_eq!(reference::eval(&back.graph, &data, &[]).unwrap(), reference::eval(&g, &data, &[]).unwrap());
}

fn four_bits(minima: Option<ConstData>) -> Graph {
    scaled_four_bits(0.125, minima)
}

fn scaled_four_bits(scale: f64, minima: Option<ConstData>) -> Graph {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [2, 96]));
    let codes = g.constant(bytes(DType::U8, &[7, 48]));
    let scales = g.constant(ConstData::splat(DType::F32, &[7, 3], halcyon_ir::Scalar::F(scale)).unwrap());
    let minima = minima.map(|m| g.constant(m));
    let y = g.quantized_matmul(x, codes, scales, minima).unwrap();
    g.output("y", y);
    g
}

#[test]
fn a_minimum_without_a_scale_has_no_form() {
    let g = scaled_four_bits(0.0, Some(f32s(&[7, 3], 1.0)));
    let e = export(&g, &ExportOptions::default()).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }) && e.to_string().contains("scale 0"), "{e}");
    let zeros = ConstData::splat(DType::F32, &[7, 3], halcyon_ir::Scalar::F(0.0)).unwrap();
    export(&scaled_four_bits(0.0, Some(zeros)), &ExportOptions::default()).unwrap();
}

#[test]
fn weights_of_4_bits_are_matmul_nbits_and_come_back() {
    // No minima, minima that are whole multiples of the scale, and other minima.
    let whole: Vec<f32> = (0..21).map(|i| -((i % 16) as f32) * 0.125).collect();
    let whole = ConstData::from_slice(&[7, 3], &whole).unwrap();
    let cases = [
        (None, None),
        (Some(whole), Some((DType::U8, 14))),
        (Some(f32s(&[7, 3], 1.0)), Some((DType::F32, 21))),
    ];
    for (minima, want) in cases {
        let g = four_bits(minima);
        let m = export(&g, &ExportOptions::default()).unwrap();
        assert_eq!(operators(&m), [("com.microsoft".to_string(), "MatMulNBits".to_string())]);
        assert!(m.opset_import.iter().any(|o| o.domain == "com.microsoft" && o.version == 1));
        let graph = m.graph.as_ref().unwrap();
        let zero = graph.node[0].input.get(3);
        assert_eq!(zero.is_some(), want.is_some());
        if let (Some(zero), Some((d, n))) = (zero, want) {
            let t = graph.initializer.iter().find(|t| t.name == *zero).unwrap();
            assert_eq!((t.data_type, &t.dims[..]), (d.row().onnx, &[n][..]));
        }
        let data = [f32s(&[2, 96], 1.0)];
        let [got, want] =
            [&again(&m).graph, &g].map(|g| reference::eval(g, &data, &[]).unwrap()[0].to_vec::<f32>());
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() <= 1e-4 * b.abs().max(1.0), "{a} for {b}");
        }
    }
}

#[test]
fn other_forms_of_matmul_nbits_are_refused() {
    let base = export(&four_bits(None), &ExportOptions::default()).unwrap();
    let refused = |name: &str, v: i64| {
        let mut m = base.clone();
        let node = &mut m.graph.as_mut().unwrap().node[0];
        node.attribute.iter_mut().find(|a| a.name == name).unwrap().i = v;
        let data = m.encode_to_vec().into();
        let m = Model::parse(data, External::in_folder_of(Path::new("m.onnx")), "m.onnx").unwrap();
        m.import(&[]).unwrap_err()
    };
    assert!(matches!(refused("bits", 2), Error::Unsupported { .. }));
    assert!(matches!(refused("block_size", 16), Error::Unsupported { .. }));
    for (name, v) in [("K", 0), ("N", -1), ("N", 8)] {
        let e = refused(name, v);
        assert!(!matches!(e, Error::Internal(_)), "{name} {v}: {e}");
    }
}

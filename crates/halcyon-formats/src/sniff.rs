//! Detects the kind of a file from its content.

use std::fmt;

/// Kinds of files that are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An ONNX model (`ModelProto`).
    Onnx,
    /// An ONNX tensor (`TensorProto`), as in the backend tests.
    OnnxTensor,
    SafeTensors,
    Npy,
    /// A zip archive. NumPy's `.npz` files are such archives, and PyTorch's `.pt` files too.
    Npz,
    Gguf,
    Png,
    Jpeg,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Onnx => "ONNX model",
            Kind::OnnxTensor => "ONNX tensor",
            Kind::SafeTensors => "safetensors",
            Kind::Npy => "npy",
            Kind::Npz => "npz",
            Kind::Gguf => "GGUF",
            Kind::Png => "PNG image",
            Kind::Jpeg => "JPEG image",
        })
    }
}

const MAGIC: &[(&[u8], Kind)] = &[
    (b"\x93NUMPY", Kind::Npy),
    (b"PK\x03\x04", Kind::Npz),
    (b"PK\x05\x06", Kind::Npz),
    (b"GGUF", Kind::Gguf),
    (b"\x89PNG\r\n\x1a\n", Kind::Png),
    (b"\xff\xd8\xff", Kind::Jpeg),
];

/// The kind of a file with this content, or `None` if it is not recognised.
///
/// Protobuf has no magic bytes, so ONNX files are recognised by the numbers and wire types of their top-level
/// fields.
pub fn kind(data: &[u8]) -> Option<Kind> {
    if let Some((_, k)) = MAGIC.iter().find(|(m, _)| data.starts_with(m)) {
        return Some(*k);
    }
    if let (Some(len), Some(b'{')) = (data.first_chunk::<8>(), data.get(8))
        && u64::from_le_bytes(*len) <= data.len() as u64 - 8
    {
        return Some(Kind::SafeTensors);
    }
    protobuf(data)
}

fn protobuf(data: &[u8]) -> Option<Kind> {
    const VARINT: u64 = 0;
    const BYTES: u64 = 2;
    let (mut data_type, mut graph, mut first) = (false, false, false);
    let mut rest = data;
    // Enough fields to get past the unpacked sizes of a tensor; a model has a few dozen.
    for _ in 0..4096 {
        if rest.is_empty() {
            break;
        }
        let key = varint(&mut rest)?;
        let (field, wire) = (key >> 3, key & 7);
        let skip = match wire {
            VARINT => {
                varint(&mut rest)?;
                0
            }
            1 => 8,
            BYTES => varint(&mut rest)?,
            5 => 4,
            _ => return None,
        };
        rest = rest.get(usize::try_from(skip).ok()?..)?;
        match (field, wire) {
            // ir_version of a model, or an unpacked size of a tensor.
            (1, VARINT) => first = true,
            // data_type of a tensor; in a model, field 2 is a string.
            (2, VARINT) => data_type = true,
            (7, BYTES) => graph = true,
            (0, _) => return None,
            _ => {}
        }
    }
    match (data_type, first && graph) {
        (true, _) => Some(Kind::OnnxTensor),
        (_, true) => Some(Kind::Onnx),
        _ => None,
    }
}

fn varint(b: &mut &[u8]) -> Option<u64> {
    let mut v = 0;
    for i in 0..10 {
        let (&x, rest) = b.split_first()?;
        *b = rest;
        v |= u64::from(x & 0x7f) << (7 * i);
        if x & 0x80 == 0 {
            return Some(v);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::{GraphProto, ModelProto, TensorProto};
    use crate::{ConstData, npy, npz, onnx};
    use prost::Message;

    #[test]
    fn kinds_by_content() {
        let t = ConstData::from_slice(&[2, 2], &[1f32, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(kind(&npy::encode(&t).unwrap()), Some(Kind::Npy));
        assert_eq!(kind(&npz::encode(&[("a", &t)]).unwrap()), Some(Kind::Npz));
        let pb = onnx::tensor::encode(&t, "x");
        assert_eq!(kind(&pb.encode_to_vec()), Some(Kind::OnnxTensor));
        let scalar = TensorProto { dims: vec![], int64_data: vec![5], data_type: 7, ..Default::default() };
        assert_eq!(kind(&scalar.encode_to_vec()), Some(Kind::OnnxTensor));
        let m = ModelProto {
            ir_version: 8,
            producer_name: "p".into(),
            graph: Some(GraphProto::default()),
            ..Default::default()
        };
        assert_eq!(kind(&m.encode_to_vec()), Some(Kind::Onnx));
        assert_eq!(kind(b"\x02\0\0\0\0\0\0\0{}"), Some(Kind::SafeTensors));
        assert_eq!(kind(b"\x89PNG\r\n\x1a\n..."), Some(Kind::Png));
        assert_eq!(kind(b"hello world, this is text"), None);
        assert_eq!(kind(b""), None);
        assert_eq!(kind(&[0xff; 64]), None);
    }

    proptest::proptest! {
        #[test]
        fn random_bytes_never_panic(v in proptest::collection::vec(0u8.., 0..300)) {
            let _ = kind(&v);
        }
    }
}

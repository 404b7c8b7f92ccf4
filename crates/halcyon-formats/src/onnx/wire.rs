//! Checks an encoded message before it is decoded: its nesting depth and the memory that its decoded
//! structure would need.
//!
//! Two encoded bytes may decode to a struct of hundreds of bytes, so decoding a file of some megabytes could
//! take gigabytes. The fields are therefore counted in the encoded form first. The contents of byte strings
//! (weights in `raw_data`) are not counted, because decoding leaves them in the file.

use super::proto::*;
use crate::bad;
use bytes::Bytes;
use halcyon_ir::Result;

/// Limit on the nesting of messages, equal to the decoder's own.
const MAX_DEPTH: usize = 100;
/// Bytes of memory that a file of any size may use.
const BASE: usize = 16 << 20;
/// Bytes of memory allowed in addition per encoded byte of structure. Large models need 10 to 27. Models of
/// one node need up to 48, but for these `BASE` is enough.
const RATIO: usize = 32;

/// The message types whose structure is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    Segment,
    Sparse,
    ValueInfo,
    Type,
    TensorType,
    Element,
    Map,
    Shape,
    Dimension,
    Opset,
    Entry,
    Function,
    SequenceValue,
    MapValue,
    OptionalValue,
}

/// How a field is decoded.
#[derive(Clone, Copy, Debug)]
enum Field {
    Message(Kind),
    /// A string.
    Text,
    /// A byte string, decoded as a slice of the file.
    Slice,
    /// Numbers that take this many bytes when decoded. In the file each is a varint of at least one byte, or,
    /// for `Fixed`, has this size.
    Varints(usize),
    Fixed(usize),
}
use Field::{Fixed, Message as M, Slice, Text, Varints};

impl Kind {
    /// Size of the decoded struct in bytes.
    fn size(self) -> usize {
        match self {
            Kind::Model => size_of::<ModelProto>(),
            Kind::Graph => size_of::<GraphProto>(),
            Kind::Node => size_of::<NodeProto>(),
            Kind::Attribute => size_of::<AttributeProto>(),
            Kind::Tensor => size_of::<TensorProto>(),
            Kind::Segment => size_of::<super::proto::Segment>(),
            Kind::Sparse => size_of::<SparseTensorProto>(),
            Kind::ValueInfo => size_of::<ValueInfoProto>(),
            Kind::Type => size_of::<TypeProto>(),
            Kind::TensorType => size_of::<super::proto::TensorType>(),
            Kind::Element => size_of::<ElementType>(),
            Kind::Map => size_of::<MapType>(),
            Kind::Shape => size_of::<TensorShapeProto>(),
            Kind::Dimension => size_of::<super::proto::Dimension>(),
            Kind::Opset => size_of::<OperatorSetIdProto>(),
            Kind::Entry => size_of::<StringStringEntryProto>(),
            Kind::Function => size_of::<FunctionProto>(),
            Kind::SequenceValue => size_of::<SequenceProto>(),
            Kind::MapValue => size_of::<MapProto>(),
            Kind::OptionalValue => size_of::<OptionalProto>(),
        }
    }

    /// The fields that allocate memory in addition to the struct, by number.
    fn fields(self) -> &'static [(u64, Field)] {
        match self {
            Kind::Model => &[
                (2, Text),
                (3, Text),
                (4, Text),
                (6, Text),
                (7, M(Kind::Graph)),
                (8, M(Kind::Opset)),
                (14, M(Kind::Entry)),
                (25, M(Kind::Function)),
            ],
            Kind::Graph => &[
                (1, M(Kind::Node)),
                (2, Text),
                (5, M(Kind::Tensor)),
                (10, Text),
                (11, M(Kind::ValueInfo)),
                (12, M(Kind::ValueInfo)),
                (13, M(Kind::ValueInfo)),
                (15, M(Kind::Sparse)),
            ],
            Kind::Node => {
                &[(1, Text), (2, Text), (3, Text), (4, Text), (5, M(Kind::Attribute)), (7, Text), (8, Text)]
            }
            Kind::Attribute => &[
                (1, Text),
                (5, M(Kind::Tensor)),
                (6, M(Kind::Graph)),
                (7, Fixed(4)),
                (8, Varints(8)),
                (9, Slice),
                (10, M(Kind::Tensor)),
                (11, M(Kind::Graph)),
                (14, M(Kind::Type)),
                (15, M(Kind::Type)),
                (21, Text),
                (22, M(Kind::Sparse)),
                (23, M(Kind::Sparse)),
            ],
            Kind::Tensor => &[
                (1, Varints(8)),
                (3, M(Kind::Segment)),
                (4, Fixed(4)),
                (5, Varints(4)),
                (6, Slice),
                (7, Varints(8)),
                (8, Text),
                (10, Fixed(8)),
                (11, Varints(8)),
                (13, M(Kind::Entry)),
            ],
            Kind::Sparse => &[(1, M(Kind::Tensor)), (2, M(Kind::Tensor)), (3, Varints(8))],
            Kind::ValueInfo => &[(1, Text), (2, M(Kind::Type))],
            Kind::Type => &[
                (1, M(Kind::TensorType)),
                (4, M(Kind::Element)),
                (5, M(Kind::Map)),
                (8, M(Kind::TensorType)),
                (9, M(Kind::Element)),
            ],
            Kind::TensorType => &[(2, M(Kind::Shape))],
            Kind::Element => &[(1, M(Kind::Type))],
            Kind::Map => &[(2, M(Kind::Type))],
            Kind::Shape => &[(1, M(Kind::Dimension))],
            Kind::Dimension => &[(2, Text)],
            Kind::Opset => &[(1, Text)],
            Kind::Entry => &[(1, Text), (2, Text)],
            Kind::Function => &[
                (1, Text),
                (4, Text),
                (5, Text),
                (6, Text),
                (7, M(Kind::Node)),
                (9, M(Kind::Opset)),
                (10, Text),
                (11, M(Kind::Attribute)),
                (12, M(Kind::ValueInfo)),
                (13, Text),
            ],
            Kind::Segment => &[],
            Kind::SequenceValue => &[
                (1, Text),
                (3, M(Kind::Tensor)),
                (5, M(Kind::SequenceValue)),
                (6, M(Kind::MapValue)),
                (7, M(Kind::OptionalValue)),
            ],
            Kind::MapValue => &[(1, Text), (3, Varints(8)), (4, Slice), (5, M(Kind::SequenceValue))],
            Kind::OptionalValue => &[
                (1, Text),
                (3, M(Kind::Tensor)),
                (5, M(Kind::SequenceValue)),
                (6, M(Kind::MapValue)),
                (7, M(Kind::OptionalValue)),
            ],
        }
    }
}

/// The cost of a message's structure.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes once decoded, including the spare capacity of growing vectors.
    pub memory: usize,
    /// Encoded bytes, without the contents of byte strings and of fields that are not decoded.
    pub file: usize,
}

/// Checks an encoded message of this kind. `file` names it in errors.
///
/// # Errors
/// [`halcyon_ir::Error::Format`] if it is truncated, nested too deeply, or would take more memory than its
/// size allows.
pub fn check(data: &Bytes, kind: Kind, file: &str) -> Result<()> {
    let what = match kind {
        Kind::Tensor => "tensor",
        Kind::SequenceValue | Kind::MapValue | Kind::OptionalValue => "value",
        _ => "model",
    };
    let fail = |why: String| bad(file, format!("not an ONNX {what}: {why}"));
    let cost = cost(data, kind).map_err(fail)?;
    let most = cost.file.saturating_mul(RATIO).saturating_add(BASE);
    if cost.memory > most {
        return Err(fail(format!(
            "its messages would take {} bytes of memory, too much for a file of {} bytes",
            cost.memory, cost.file
        )));
    }
    Ok(())
}

/// The cost of an encoded message, or the defect found in it.
pub fn cost(data: &[u8], kind: Kind) -> Result<Cost, String> {
    let mut c = Cost { memory: kind.size(), file: 0 };
    walk(data, 0, kind, 0, &mut c)?;
    Ok(c)
}

/// Adds the cost of the fields of an encoded message to `c`. `at` is the offset of `data` in the file, for
/// error messages.
fn walk(data: &[u8], at: usize, kind: Kind, depth: usize, c: &mut Cost) -> Result<(), String> {
    if depth >= MAX_DEPTH {
        return Err(format!("messages are nested deeper than {MAX_DEPTH} at byte {at}"));
    }
    let fields = kind.fields();
    let mut rest = data;
    while !rest.is_empty() {
        let place = at + data.len() - rest.len();
        let short = || format!("it is cut short or damaged at byte {place}");
        let key = varint(&mut rest).ok_or_else(short)?;
        let number = key >> 3;
        let field = fields.iter().find(|f| f.0 == number).map(|f| f.1);
        let skip = |rest: &mut &[u8], n: u64| -> Result<(), String> {
            *rest = usize::try_from(n).ok().and_then(|n| rest.get(n..)).ok_or_else(short)?;
            Ok(())
        };
        let fixed = |field: Option<Field>| match field {
            Some(Fixed(n) | Varints(n)) => 2 * n,
            _ => 0,
        };
        match key & 7 {
            0 => {
                varint(&mut rest).ok_or_else(short)?;
                c.memory += fixed(field);
            }
            1 => {
                skip(&mut rest, 8)?;
                c.memory += fixed(field);
            }
            5 => {
                skip(&mut rest, 4)?;
                c.memory += fixed(field);
            }
            2 => {
                let len = varint(&mut rest).ok_or_else(short)?;
                let body = rest;
                skip(&mut rest, len)?;
                let body = &body[..body.len() - rest.len()];
                let start = at + data.len() - rest.len() - body.len();
                match field {
                    Some(M(k)) => {
                        // The capacity of a growing vector is up to twice its length.
                        c.memory += 2 * k.size();
                        walk(body, start, k, depth + 1, c)?;
                    }
                    Some(Text) => {
                        c.memory += 2 * size_of::<String>() + body.len();
                        c.file += body.len();
                    }
                    Some(Slice) => c.memory += 2 * size_of::<Bytes>(),
                    Some(Varints(n)) => {
                        // Every varint ends in a byte without the continuation bit.
                        let count = body.iter().filter(|b| **b < 0x80).count();
                        c.memory += 2 * n * count;
                        c.file += body.len();
                    }
                    Some(Fixed(_)) => {
                        c.memory += 2 * body.len();
                        c.file += body.len();
                    }
                    None => {}
                }
                c.file += start - place;
                continue;
            }
            w => return Err(format!("wire type {w} at byte {place}")),
        }
        c.file += at + data.len() - rest.len() - place;
    }
    Ok(())
}

fn varint(b: &mut &[u8]) -> Option<u64> {
    let mut v = 0u64;
    for i in 0..10 {
        let (&x, rest) = b.split_first()?;
        *b = rest;
        v |= u64::from(x & 0x7f).checked_shl(7 * i).unwrap_or(0);
        if x & 0x80 == 0 {
            return Some(v);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    /// Encodes a field of bytes.
    fn field(number: u8, body: &[u8]) -> Vec<u8> {
        let mut v = vec![];
        prost::encoding::encode_varint(u64::from(number) << 3 | 2, &mut v);
        prost::encoding::encode_varint(body.len() as u64, &mut v);
        v.extend(body);
        v
    }

    fn fails(data: Vec<u8>, part: &str) {
        let e = check(&data.into(), Kind::Model, "t").unwrap_err();
        assert!(e.to_string().contains(part), "{e}");
        assert!(matches!(e, halcyon_ir::Error::Format { .. }), "{e}");
    }

    #[test]
    fn many_empty_messages_are_rejected_before_decoding() {
        // A million attributes of two bytes each.
        let node = field(5, &[]).repeat(1_000_000);
        let m = field(7, &field(1, &node));
        assert!(m.len() < 2_100_000);
        fails(m, "too much for a file");
        fails(field(7, &field(5, &[]).repeat(1_000_000)), "too much for a file");
        // Weights do not count as structure.
        let mut m = field(7, &field(5, &field(9, &vec![0; 64 << 20])));
        m.extend(field(7, &field(1, &node[..200_000])));
        fails(m, "too much for a file");
    }

    #[test]
    fn numbers_and_strings_are_justified_by_their_bytes() {
        let t = TensorProto {
            dims: vec![1 << 20],
            data_type: 7,
            int64_data: vec![1; 1 << 20],
            ..Default::default()
        };
        let b = Bytes::from(t.encode_to_vec());
        check(&b, Kind::Tensor, "t").unwrap();
        let c = cost(&b, Kind::Tensor).unwrap();
        assert!(c.memory >= 8 << 20 && c.file.abs_diff(b.len()) < 8, "{c:?} {}", b.len());
        let t = TensorProto { raw_data: Some(vec![0u8; 1 << 20].into()), ..Default::default() };
        let c = cost(&t.encode_to_vec(), Kind::Tensor).unwrap();
        assert!(c.memory < 1000 && c.file < 16, "{c:?}");
        let names = vec!["a".to_string(); 1 << 20];
        let n = NodeProto { input: names, ..Default::default() };
        let m = field(7, &field(1, &n.encode_to_vec()));
        check(&m.into(), Kind::Model, "t").unwrap();
    }

    #[test]
    fn depth_and_damage_are_named() {
        let mut graph = vec![];
        for _ in 0..10_000 {
            graph = field(1, &field(5, &field(6, &graph)));
            if graph.len() > 1 << 20 {
                break;
            }
        }
        fails(field(7, &graph), "nested deeper than 100");
        fails(field(7, &[1, 2, 3])[..4].to_vec(), "cut short or damaged at byte 0");
        fails(vec![0x3a, 0x02, 0x0a, 0x05], "cut short or damaged at byte 2");
        fails(vec![0xff; 20], "damaged at byte 0");
        fails(vec![0x3b], "wire type 3");
        check(&Bytes::new(), Kind::Model, "t").unwrap();
    }

    proptest::proptest! {
        #[test]
        fn random_bytes_never_panic(v in proptest::collection::vec(0u8.., 0..300)) {
            let _ = cost(&v, Kind::Model);
            let _ = cost(&v, Kind::Tensor);
        }
    }
}

//! The element types of GGUF tensors.

use halcyon_ir::DType;
use halcyon_ir::blocks::BlockType;
use std::fmt;
use std::hash::{Hash, Hasher};

/// The facts about a block format of which a runtime keeps no tensors: its weights are decoded when they are
/// loaded.
#[derive(Debug)]
pub struct WideRow {
    /// The name in messages, in lower case: `iq2_xs`.
    pub name: &'static str,
    /// The number of the type in GGUF files.
    pub ggml: u32,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
}

/// Rows are equal if they are of the same type.
impl PartialEq for WideRow {
    fn eq(&self, other: &WideRow) -> bool {
        self.ggml == other.ggml
    }
}
impl Eq for WideRow {}
impl Hash for WideRow {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.ggml.hash(h)
    }
}

const fn wide(name: &'static str, ggml: u32, elements: usize, bytes: usize) -> WideRow {
    WideRow { name, ggml, elements, bytes }
}

/// The formats of [`GgmlType::Wide`].
pub static WIDE: [WideRow; 13] = [
    // Two halves and 32 codes. Files of 2023 had floats instead of halves, but nobody stores this type.
    wide("q8_1", 9, 32, 36),
    wide("q8_k", 15, 256, 292),
    wide("iq2_xxs", 16, 256, 66),
    wide("iq2_xs", 17, 256, 74),
    wide("iq3_xxs", 18, 256, 98),
    wide("iq1_s", 19, 256, 50),
    wide("iq3_s", 21, 256, 110),
    wide("iq2_s", 22, 256, 82),
    wide("iq1_m", 29, 256, 56),
    wide("tq1_0", 34, 256, 54),
    wide("tq2_0", 35, 256, 66),
    wide("nvfp4", 40, 64, 36),
    wide("q1_0", 41, 128, 18),
];

/// The types whose elements are stored one by one, with their numbers in GGUF files.
const PLAIN: [(u32, DType); 8] = [
    (0, DType::F32),
    (1, DType::F16),
    (24, DType::I8),
    (25, DType::I16),
    (26, DType::I32),
    (27, DType::I64),
    (28, DType::F64),
    (30, DType::BF16),
];

/// The element type of a tensor in a GGUF file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GgmlType {
    /// Elements that are stored one by one: `f32`, `f16`, `bf16`, `f64`, `i8`, `i16`, `i32` or `i64`. GGUF
    /// has no other dtype.
    Plain(DType),
    /// A block format whose weights stay as they are in memory.
    Block(BlockType),
    /// A block format that is only decoded.
    Wide(&'static WideRow),
}

impl GgmlType {
    pub const F32: GgmlType = GgmlType::Plain(DType::F32);
    pub const F16: GgmlType = GgmlType::Plain(DType::F16);
    pub const BF16: GgmlType = GgmlType::Plain(DType::BF16);

    /// Every type.
    pub fn all() -> impl Iterator<Item = GgmlType> {
        let plain = PLAIN.iter().map(|(_, d)| GgmlType::Plain(*d));
        let blocks = BlockType::ALL.iter().map(|b| GgmlType::Block(*b));
        plain.chain(blocks).chain(WIDE.iter().map(GgmlType::Wide))
    }

    /// The type with this number in GGUF files.
    pub fn from_number(number: u32) -> Option<GgmlType> {
        GgmlType::all().find(|t| t.number() == Some(number))
    }

    /// The type with this name, in any case.
    pub fn from_name(name: &str) -> Option<GgmlType> {
        GgmlType::all().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// The number in GGUF files. `None` for a dtype that GGUF lacks.
    pub fn number(self) -> Option<u32> {
        match self {
            GgmlType::Plain(d) => PLAIN.iter().find(|(_, p)| *p == d).map(|(n, _)| *n),
            GgmlType::Block(b) => Some(b.row().ggml),
            GgmlType::Wide(w) => Some(w.ggml),
        }
    }

    /// The name, in lower case: `f32`, `q4_k`.
    pub fn name(self) -> &'static str {
        match self {
            GgmlType::Plain(d) => d.name(),
            GgmlType::Block(b) => b.name(),
            GgmlType::Wide(w) => w.name,
        }
    }

    /// Elements of a block; 1 for plain types.
    pub fn elements(self) -> usize {
        match self {
            GgmlType::Plain(_) => 1,
            GgmlType::Block(b) => b.row().elements,
            GgmlType::Wide(w) => w.elements,
        }
    }

    /// Bytes of a block; of one element for plain types.
    pub fn bytes(self) -> usize {
        match self {
            GgmlType::Plain(d) => d.size(),
            GgmlType::Block(b) => b.row().bytes,
            GgmlType::Wide(w) => w.bytes,
        }
    }

    /// Bytes of a row of `elements` elements. `None` if they do not fill whole blocks, or on overflow.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        let per = self.elements();
        elements.is_multiple_of(per).then(|| (elements / per).checked_mul(self.bytes())).flatten()
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

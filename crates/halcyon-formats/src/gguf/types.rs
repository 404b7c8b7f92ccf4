//! The element types of GGUF tensors.

use halcyon_ir::DType;
use halcyon_ir::blocks::{BlockType, LoadOnly};
use std::fmt;
use std::hash::{Hash, Hasher};

/// The facts about a block format that is only listed: no model is computed with it.
#[derive(Debug)]
pub struct ListedRow {
    /// The name in messages, in lower case: `q8_k`.
    pub name: &'static str,
    /// The number of the type in GGUF files.
    pub ggml: u32,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
}

/// Rows are equal if they are of the same type.
impl PartialEq for ListedRow {
    fn eq(&self, other: &ListedRow) -> bool {
        self.ggml == other.ggml
    }
}
impl Eq for ListedRow {}
impl Hash for ListedRow {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.ggml.hash(h)
    }
}

const fn listed(name: &'static str, ggml: u32, elements: usize, bytes: usize) -> ListedRow {
    ListedRow { name, ggml, elements, bytes }
}

/// The formats of [`GgmlType::Listed`].
pub static LISTED: [ListedRow; 4] = [
    // Two halves and 32 codes. Files of 2023 had floats instead of halves, but nobody stores this type.
    listed("q8_1", 9, 32, 36),
    listed("q8_k", 15, 256, 292),
    listed("nvfp4", 40, 64, 36),
    listed("q1_0", 41, 128, 18),
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
    /// A block format that is decoded when a model is loaded.
    LoadOnly(LoadOnly),
    /// A block format that is only listed.
    Listed(&'static ListedRow),
}

impl GgmlType {
    pub const F32: GgmlType = GgmlType::Plain(DType::F32);
    pub const F16: GgmlType = GgmlType::Plain(DType::F16);
    pub const BF16: GgmlType = GgmlType::Plain(DType::BF16);

    /// Every type.
    pub fn all() -> impl Iterator<Item = GgmlType> {
        let plain = PLAIN.iter().map(|(_, d)| GgmlType::Plain(*d));
        let blocks = BlockType::ALL.iter().map(|b| GgmlType::Block(*b));
        let load_only = LoadOnly::ALL.iter().map(|b| GgmlType::LoadOnly(*b));
        plain.chain(blocks).chain(load_only).chain(LISTED.iter().map(GgmlType::Listed))
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
            GgmlType::LoadOnly(b) => Some(b.row().ggml),
            GgmlType::Listed(r) => Some(r.ggml),
        }
    }

    /// The name, in lower case: `f32`, `q4_k`.
    pub fn name(self) -> &'static str {
        match self {
            GgmlType::Plain(d) => d.name(),
            GgmlType::Block(b) => b.name(),
            GgmlType::LoadOnly(b) => b.name(),
            GgmlType::Listed(r) => r.name,
        }
    }

    /// Elements of a block; 1 for plain types.
    pub fn elements(self) -> usize {
        match self {
            GgmlType::Plain(_) => 1,
            GgmlType::Block(b) => b.row().elements,
            GgmlType::LoadOnly(b) => b.row().elements,
            GgmlType::Listed(r) => r.elements,
        }
    }

    /// Bytes of a block; of one element for plain types.
    pub fn bytes(self) -> usize {
        match self {
            GgmlType::Plain(d) => d.size(),
            GgmlType::Block(b) => b.row().bytes,
            GgmlType::LoadOnly(b) => b.row().bytes,
            GgmlType::Listed(r) => r.bytes,
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

//! The element types of block registers.

use halcyon_ir::DType;

/// Machine type of a block register's elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    F32,
    F64,
    I32,
    U32,
    I64,
    U64,
    /// A bool as 0 or 1, or any byte that is only copied.
    B8,
    /// Two bytes that are only copied.
    H16,
}

impl Lane {
    /// The machine type in which values of this dtype are computed.
    pub(crate) fn of(d: DType) -> Lane {
        match d.compute() {
            DType::Bool => Lane::B8,
            DType::I32 | DType::I8 | DType::I16 => Lane::I32,
            DType::U32 | DType::U8 | DType::U16 => Lane::U32,
            DType::I64 => Lane::I64,
            DType::U64 => Lane::U64,
            DType::F64 => Lane::F64,
            // All other dtypes are computed in f32.
            _ => Lane::F32,
        }
    }

    /// The machine type that moves values of this dtype unchanged.
    pub(crate) fn raw(d: DType) -> Lane {
        match d.size() {
            1 => Lane::B8,
            2 => Lane::H16,
            4 => Lane::U32,
            _ => Lane::U64,
        }
    }

    /// Size in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Lane::B8 => 1,
            Lane::H16 => 2,
            Lane::F32 | Lane::I32 | Lane::U32 => 4,
            Lane::F64 | Lane::I64 | Lane::U64 => 8,
        }
    }
}

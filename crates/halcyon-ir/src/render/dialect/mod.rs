//! Dialects of C-like languages. Each is a table of strings, with the few helpers that differ from the common
//! ones.

pub mod cuda;
pub mod hip;
mod matrix;
pub mod metal;
pub mod opencl;

pub use matrix::{CUDA as MATRIX_CUDA, HIP as MATRIX_HIP};

use super::Language;
use crate::dtype::DType;
use crate::kernel::ir::{MatrixOp, Ty};

/// The spellings of one language that the C writer needs.
#[derive(Debug)]
pub struct Dialect {
    pub language: Language,
    /// First lines of every source.
    pub header: &'static str,
    /// First lines of a source that uses f64.
    pub header_f64: &'static str,
    /// Definitions of vector arithmetic, if the language has none.
    pub vector_ops: &'static str,
    /// Qualifier before a helper's return type.
    pub function: &'static str,
    /// Entry point up to its parameter list: `$name`, `$x $y $z` (workgroup), `$n` (work-items).
    pub entry: &'static str,
    /// Address spaces of global and workgroup memory, each with a trailing space.
    pub global: &'static str,
    pub local: &'static str,
    /// Qualifier of pointers without aliases.
    pub restrict: &'static str,
    /// A buffer argument: `$p` (pointer type and qualifiers), `$n` (name), `$i` (position).
    pub buffer_arg: &'static str,
    /// A scalar argument: `$t`, `$n`, `$i`.
    pub param_arg: &'static str,
    /// The parameter for the argument buffer `g`, in words of eight bytes. Empty if the drivers of the
    /// language use no argument buffers.
    pub arguments: &'static str,
    /// Further arguments, after the parameters.
    pub extra_args: &'static str,
    /// Local index, group index and group count, each per dimension.
    pub local_id: [&'static str; 3],
    pub group_id: [&'static str; 3],
    pub groups: [&'static str; 3],
    /// Lane in the subgroup and subgroup size. Empty if the language has no subgroups.
    pub lane: &'static str,
    pub subgroup_size: &'static str,
    /// Shuffles in a subgroup: `$0` is the value, `$1` the mask or lane.
    pub shuffle_xor: &'static str,
    pub shuffle: &'static str,
    pub barrier_local: &'static str,
    pub barrier_global: &'static str,
    /// Expression that atomically adds `$v` at `&$p`; `$t` is the element type.
    pub atomic_add: &'static str,
    /// Statement that sets word `$p` to `$v` unless it is already set. (In Metal, the larger code stays.)
    pub set_error: &'static str,
    /// Compute types in the order of [`Ty`]. An entry is empty if the language lacks the type.
    pub types: [&'static str; 10],
    /// Element types of buffers, in the order of [`DType`].
    pub storage: [&'static str; 13],
    /// Reads (`$p[$i]`) and writes (`$v`) of f16 elements. bf16 is handled as bits everywhere.
    pub load_f16: &'static str,
    pub store_f16: &'static str,
    /// Suffixes of 64-bit integer constants.
    pub i64_suffix: &'static str,
    pub u64_suffix: &'static str,
    /// Suffix of the C99 math functions on f32, and the functions that the language lacks, for which there
    /// are helpers.
    pub math_f32: &'static str,
    pub math_missing: &'static [&'static str],
    /// A vector constructor: `$t` is the type, `$0` the lanes.
    pub vector: &'static str,
    pub bitcast: fn(Ty, Ty) -> &'static str,
    /// The supported matrix ops, and the declarations of their types.
    pub matrix: &'static [MatrixOp],
    pub header_matrix: &'static str,
    /// Helpers that replace the common ones.
    pub helpers: &'static [(&'static str, &'static str)],
    /// Helpers for matrix products.
    pub matrix_helpers: &'static [(&'static str, &'static str)],
}

impl Dialect {
    /// The table of a language; `None` if it is not a C-like language.
    pub fn of(l: Language) -> Option<&'static Dialect> {
        match l {
            Language::OpenCl => Some(&opencl::DIALECT),
            Language::Cuda => Some(&cuda::DIALECT),
            Language::Hip => Some(&hip::DIALECT),
            Language::Metal => Some(&metal::DIALECT),
            Language::Wgsl => None,
        }
    }

    pub fn ty(&self, t: Ty) -> &'static str {
        self.types[t as usize]
    }

    pub fn element(&self, d: DType) -> &'static str {
        self.storage[d as usize]
    }

    pub fn has_subgroups(&self) -> bool {
        !self.lane.is_empty()
    }
}

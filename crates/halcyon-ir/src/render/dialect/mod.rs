//! Dialects of the C family: a table of strings each, and the few helpers that differ.

pub mod cuda;
pub mod hip;
mod matrix;
pub mod metal;
pub mod opencl;

pub use matrix::{CUDA as MATRIX_CUDA, HIP as MATRIX_HIP};

use super::Language;
use crate::dtype::DType;
use crate::kernel::ir::{MatrixOp, Ty};

/// How one language spells what the C writer needs.
#[derive(Debug)]
pub struct Dialect {
    pub language: Language,
    /// First lines of every source.
    pub header: &'static str,
    /// First lines of a source that uses f64.
    pub header_f64: &'static str,
    /// Lines that define arithmetic on vectors, where the language has none.
    pub vector_ops: &'static str,
    /// Before a helper's return type.
    pub function: &'static str,
    /// Entry up to its parameter list: `$name`, `$x $y $z` (workgroup), `$n` (work-items).
    pub entry: &'static str,
    /// Address space of global and workgroup memory, with a trailing space.
    pub global: &'static str,
    pub local: &'static str,
    /// Qualifier of pointers that alias no other.
    pub restrict: &'static str,
    /// A buffer argument: `$p` (pointer type and qualifiers), `$n` (name), `$i` (position).
    pub buffer_arg: &'static str,
    /// A scalar argument: `$t`, `$n`, `$i`.
    pub param_arg: &'static str,
    /// The buffer of arguments `g`, in words of eight bytes; empty where kernels cannot take addresses from
    /// it.
    pub arguments: &'static str,
    /// Arguments after these.
    pub extra_args: &'static str,
    /// Local index, group index and group count, each per dimension, and the linear local index.
    pub local_id: [&'static str; 3],
    pub group_id: [&'static str; 3],
    pub groups: [&'static str; 3],
    /// Lane in the subgroup and its size; empty where the language has no subgroups.
    pub lane: &'static str,
    pub subgroup_size: &'static str,
    /// `$0` value, `$1` mask or lane.
    pub shuffle_xor: &'static str,
    pub shuffle: &'static str,
    pub barrier_local: &'static str,
    pub barrier_global: &'static str,
    /// Atomic add of `$v` at `&$p`, as an expression; `$t` is the element type.
    pub atomic_add: &'static str,
    /// Statement that sets word `$p` to `$v` unless it is set.
    pub set_error: &'static str,
    /// Types, in the order of [`Ty`]; empty if the language lacks one.
    pub types: [&'static str; 10],
    /// Element types of buffers, in the order of [`DType`].
    pub storage: [&'static str; 13],
    /// f16 and bf16 element reads (`$p[$i]`) and writes (`$v`); bf16 is bits everywhere.
    pub load_f16: &'static str,
    pub store_f16: &'static str,
    /// Suffixes of 64-bit integer constants.
    pub i64_suffix: &'static str,
    pub u64_suffix: &'static str,
    /// Suffix of the C99 math functions on f32, and functions that the language lacks (a helper stands in).
    pub math_f32: &'static str,
    pub math_missing: &'static [&'static str],
    /// Vector of all lanes: `$t` type, `$0` lanes.
    pub vector: &'static str,
    pub bitcast: fn(Ty, Ty) -> &'static str,
    /// Products of matrices that the language can say, and the lines that declare their types.
    pub matrix: &'static [MatrixOp],
    pub header_matrix: &'static str,
    /// Helpers that replace the common ones.
    pub helpers: &'static [(&'static str, &'static str)],
    /// Helpers of products of matrices.
    pub matrix_helpers: &'static [(&'static str, &'static str)],
}

impl Dialect {
    /// The table of a language; `None` for one that is no C.
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

//! The operations of a graph: one file per family, with everything that the rest of the system needs to know
//! about the family's ops.
//!
//! [`Op`] is the op that a node computes, with its attributes. `Rules` are the things that an op must define:
//! its type rule, its reference, its gradient, its cost, its rounding, its kernels and its role in the
//! passes. A new op is a variant of [`Op`], a row of `kinds!` and a file with its rules; the compiler names
//! every rule that is missing.
//!
//! Every op has one output. Operands of [`Op::Scalar`] have equal shapes; the graph's builder inserts
//! [`Op::Expand`] to broadcast. Norms, softmax, attention and similar functions are composites
//! (`crate::composite`). Their rows are in the files of this folder too.

use crate::blocks::BlockType;
use crate::composite::Composite;
use crate::custom::Custom;
use crate::data::ConstData;
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered, Template};
use crate::layout::Restride;
use crate::ops::element_wise::ScalarOp;
use crate::reference::{Eval, Tensor};
use crate::shape::{Bindings, Dim, Shape, TensorType};
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// The template for a whole op in `crate::kernel::templates`, with its variants.
macro_rules! tuned_template {
    ($module:ident) => {
        Template {
            lower: templates::$module::lower,
            tuning: Some(crate::kernel::lower::Tuning {
                choices: templates::$module::choices,
                lower: templates::$module::lower_as,
            }),
        }
    };
}

mod attention;
mod blocked;
mod byte_matmul;
mod cached_attention;
mod checkpoint;
mod chunk_scan;
mod class_index;
pub(crate) mod composite;
mod concat;
mod conv;
mod custom;
mod decode_blocks;
pub mod element_wise;
mod gather;
mod leaf;
mod linear;
mod matmul;
mod norm;
mod pool;
pub mod quantize;
mod reduce;
mod scan;
mod scatter;
mod slice_at;
mod softmax;
mod sort;
mod view;

pub use cached_attention::{CacheOperands, CachedAttention, CachedAttentionSizes};
pub use chunk_scan::{ChunkScan, ChunkScanSizes};
pub use conv::Conv;
pub use linear::{RowMatmul, RowMatmulSizes};
pub use pool::{Pool, PoolKind};
pub use reduce::{ReduceKind, reduced};
pub use scatter::ScatterKind;
pub use view::SliceAxis;

/// Axis indices.
pub type Axes = SmallVec<[usize; 4]>;

/// The op name in errors about labels.
pub const CROSS_ENTROPY: &str = "cross_entropy";

/// The op that a node computes. [`Op::infer`] is its type rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Op {
    /// Run-time tensor. The number is its index among the graph's inputs.
    Input(u32),
    /// Run-time scalar argument (rank 0). The number is its index among the graph's arguments. A new value
    /// never causes recompilation.
    Arg(u32),
    /// Constant data such as weights, read lazily.
    Const(ConstData),
    /// A tensor of the node's type filled with one value. Kernels receive the value as an argument.
    Full(Scalar),
    /// The index along `axis`, as an integer or float type.
    Iota {
        axis: usize,
    },
    Scalar(ScalarOp),
    /// Converts to the node's dtype by the rules of [`Scalar::cast`].
    Cast,
    /// Reinterprets the bits as a dtype of equal size.
    Bitcast,
    /// Reduces over `axes` (sorted). `keep` keeps them as axes of size 1.
    Reduce {
        kind: ReduceKind,
        axes: Axes,
        keep: bool,
    },
    /// Index (i64) of the largest or smallest element. Among equal elements the first wins, or the last if
    /// `last`. A NaN wins over every number.
    ArgReduce {
        max: bool,
        axis: usize,
        keep: bool,
        last: bool,
    },
    /// `[b…, m, k] × [b…, k, n] → [b…, m, n]` with equal batch dimensions. Sums are accumulated in
    /// `DType::accum`.
    Matmul,
    /// Operands: input, weight.
    Conv(Conv),
    Pool(Pool),
    /// Gradient of a pool. Operands: x, y, dy. The result has the type of x. If several elements of a window
    /// equal its maximum, the first receives the gradient.
    PoolGrad(Pool),
    /// `out[a…, i…, b…] = x[a…, index[i…], b…]`. Here and in the next three ops, a negative index counts from
    /// the end, and an index out of range is clamped and reported as a fault.
    Gather {
        axis: usize,
    },
    /// `out[i…] = x[i… with i_axis = index[i…]]`.
    GatherElements {
        axis: usize,
    },
    /// Operands: base, index, updates (index and updates have the same shape). The result has the type of
    /// base.
    ScatterElements {
        axis: usize,
        kind: ScatterKind,
    },
    /// Operands: base, index `[i…]`, updates with the shape of [`Op::Gather`]'s result. The result has the
    /// type of base.
    ScatterRows {
        axis: usize,
        kind: ScatterKind,
    },
    /// Operands: base, update, position (rank-0 integer). The result is base with `update` written at
    /// `position` along `axis`. A position that is negative, or at which the update would reach past the end,
    /// is clamped and reported as a fault.
    UpdateSlice {
        axis: usize,
    },
    /// Class labels (integers of any type) as i64 class indices. A label equal to `ignore` becomes 0. Any
    /// other label outside `[0, classes)` becomes 0 and is reported as a fault. Negative labels do not count
    /// from the end.
    ClassIndex {
        classes: Dim,
        ignore: Option<i64>,
    },
    /// Bytes of block-quantised weights, as f32. The last axis holds whole blocks.
    DecodeBlocks(BlockType),
    /// Indices (i64) that stably sort the elements along an axis. NaN sorts as the largest value.
    ArgSort {
        axis: usize,
        descending: bool,
    },
    /// Running reduction along an axis.
    Scan {
        kind: ReduceKind,
        axis: usize,
        exclusive: bool,
        reverse: bool,
    },
    /// The view ops are `Reshape`, `Permute`, `Expand`, `Slice`, `Pad` and `Recompute`.
    Reshape,
    Permute(Axes),
    Expand,
    Slice(SmallVec<[SliceAxis; 4]>),
    /// Adds `lo` elements before and `hi` after along each axis, filled with `value`.
    Pad {
        lo: SmallVec<[usize; 4]>,
        hi: SmallVec<[usize; 4]>,
        value: Scalar,
    },
    Concat {
        axis: usize,
    },
    /// The result equals the operand, but passes treat the two as different values. So passes do not merge
    /// nodes that read the result with nodes that read the operand. Checkpointing puts this op before values
    /// that are computed again ([`crate::Graph::checkpoint`]).
    Recompute,
    /// A named function of primitive ops, which a target may run whole.
    Composite(Arc<Composite>),
    /// An op registered by the user.
    Custom(Custom),
}

/// How lowering turns an op into steps of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lowering {
    /// The value is in memory before the plan runs.
    Stored,
    /// The kernels that read the value compute it themselves: a literal, a run-time argument, an iota.
    Literal,
    /// Only strides change.
    View,
    /// Becomes part of a fused kernel.
    ElementWise,
    /// Ends a fused kernel, by reducing it or by writing it into a part of the result.
    Fused,
    /// A step of its own: a library kernel, a template, or a custom op on the host.
    Step,
}

/// The operands whose elements appear in an op's result, moved or selected but not changed. If an op has such
/// operands, its other operands are indices, positions and conditions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moves {
    Nothing,
    Operands(&'static [usize]),
    All,
    /// Elements of these operands are compared, and the largest or the smallest appears in the result.
    Compared(&'static [usize]),
}

impl Moves {
    /// Whether elements of operand `k` appear in the result.
    pub fn operand(self, k: usize) -> bool {
        match self {
            Moves::Nothing => false,
            Moves::Operands(which) | Moves::Compared(which) => which.contains(&k),
            Moves::All => true,
        }
    }
}

/// A kind of work whose rates in f32 and in a half type are measured per device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RatedWork {
    /// Matrix products and attention.
    Products,
    Convolutions,
}

/// The role of an op in mixed precision (`passes::autocast`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MixedRole {
    /// Computes in f32.
    Wide,
    /// Computes in f32 and needs operands that were not rounded to a half type.
    Exact,
    /// A product or convolution: its operands and its result have the half type.
    Product(RatedWork),
    /// Passes on the half type of the operands that it moves ([`Facts::moves`]), or of all operands if it
    /// moves none. With `tables`, a constant operand stays in f32, because only few of its rows are read.
    Moves { tables: bool },
    /// The gradient of an op that selects elements: it moves elements of its last operand. It takes bf16 if
    /// its first operand is stored in bf16 only; the last operand is then rounded.
    Follows,
    /// A composite that the target may run with operands of the half type.
    Whole(HalfForm),
}

/// The form in which a composite is offered to a target under mixed precision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HalfForm {
    /// The number of operands, counted from the first, that are rounded. The others stay in f32.
    pub rounded: usize,
    pub when: HalfWhen,
    /// The measured rate that decides whether the half type is used; `None` if no measurement decides.
    pub rate: Option<RatedWork>,
}

/// When a composite is used in the half type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HalfWhen {
    Always,
    /// If a reader takes the result in the half type.
    Read,
    /// If a reader takes the result in the half type, and the operand already has the half type.
    Follows,
}

/// Facts about an op that need no operands. There are no defaults: every op states each of them.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub lowering: Lowering,
    pub moves: Moves,
    /// If an element of the result may combine no elements (an empty axis, a window of padding only), its
    /// value is the identity of this reduction. `None` if there are no such elements.
    pub identity: Option<ReduceKind>,
    /// Whether kernels of the op may read a packed constant and have an epilogue. The target decides for each
    /// call.
    pub packs: bool,
    /// Whether the result may take the memory of operand 0.
    pub in_place: bool,
    /// Operand and axis (counted from the end, 0 is the last) over which the op sums products. If that axis
    /// is empty, the result is zero.
    pub summed: Option<(usize, usize)>,
    /// The template that builds the op's kernels, if `Rules::kernels` does not.
    pub template: Option<&'static Template>,
}

/// The work of one execution of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// Operations of floats or integers; a multiply-add counts as two.
    pub flops: u64,
    /// The least number of bytes moved.
    pub bytes: u64,
}

/// The valid range of the indices that an op reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexRange {
    /// The operand that holds the indices.
    pub operand: usize,
    pub low: i64,
    /// One past the largest valid index.
    pub end: i64,
    /// An index value that is skipped, whether or not it is in range.
    pub ignore: Option<i64>,
    /// Whether the memory of the indices is kept until the end of the plan, so that an error message can show
    /// them.
    pub kept: bool,
}

/// How an op rounds, and how errors of its operands reach its result (`verify`).
#[derive(Clone, PartialEq, Debug)]
pub enum Rounding {
    /// A value that is given: an input.
    Given,
    /// The result is exact. Errors of operands cannot be followed through the op.
    Exact,
    /// The op only moves elements. The result's errors are those of the operands that [`Facts::moves`] names,
    /// moved by the op `with`. If `clamp` is set, errors that `with` makes negative count as zero.
    Moves { with: Op, clamp: bool },
    /// Linear in each operand, with sums of this many products.
    Linear { terms: usize },
    /// Rounds by this many units in the last place of the largest value. Errors of operands cannot be
    /// followed.
    OfLargest { units: f64 },
    /// Rounds as the row of the scalar op states.
    Scalar(ScalarOp),
    /// Rounds to the result's type.
    Cast,
    /// Rounds as the ops in the body of the composite do.
    Body,
    /// Exact if its operands are exact, but their errors cannot be followed. An example is the bits of a
    /// float.
    Bits,
    /// Nothing is known before a run. `exact`: the op does not round.
    Unknown { exact: bool },
}

/// What every op defines. [`Op::rules`] gives the rules of an op. No method has a default: an op states
/// explicitly that it has no gradient, kernel or other part.
pub(crate) trait Rules {
    /// The op's name in messages, traces and receipts.
    fn name(&self) -> String;
    /// The attributes that a printed graph shows after the name; empty if there are none.
    fn attributes(&self) -> String;
    fn facts(&self) -> Facts;
    /// The result type for the operand types.
    fn infer(&self, t: &Types<'_>) -> Result<TensorType>;
    /// The op with its attributes rewritten.
    fn rewrite(&self, r: &Rewrite<'_>) -> Result<Op>;
    /// The definition, in plain loops on the host.
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor>;
    /// Adds nodes for the gradients of the operands.
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient>;
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost;
    /// The number of terms from which the reference computes an element of the result, for operands of these
    /// sizes: the products of a sum, the elements of a window. It is 1 for an op that reads each element of
    /// its operands once. `None`: too many to count.
    fn terms(&self, x: &[&[usize]]) -> Option<usize>;
    /// The range of the indices that the op reads; `None` if it reads none.
    fn index_range(&self, inputs: &[Operand]) -> Option<IndexRange>;
    /// How the op rounds, for operands of types `x` and a result of type `y`, without symbols.
    fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding;
    /// The role under mixed precision with half type `low`, for operands of types `x` and result dtype `y`.
    fn mixed(&self, low: DType, x: &[DType], y: DType) -> MixedRole;
    /// How a view ([`Lowering::View`]) with a result of sizes `out` changes the strides of its operand;
    /// `None` for other ops.
    fn restride(&self, out: &[usize]) -> Option<Restride>;
    /// The kernels that compute the op on any device, unless [`Facts::template`] does.
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined>;
}

/// The operand types of a node, for [`Rules::infer`].
pub(crate) struct Types<'a> {
    rules: &'a dyn Rules,
    pub(crate) x: &'a [&'a TensorType],
    /// The requested type.
    want: Option<&'a TensorType>,
}

impl Types<'_> {
    fn arity(&self, n: usize) -> Result<()> {
        match self.x.len() == n {
            true => Ok(()),
            false => Err(self.argument(format!("takes {n} operands, got {}", self.x.len()))),
        }
    }

    /// The requested type. The op needs it because the result type does not follow from the operands.
    fn requested(&self) -> Result<TensorType> {
        let none = || Error::internal(format!("{}: no result type given", self.rules.name()));
        self.want.cloned().ok_or_else(none)
    }

    fn argument(&self, what: impl Into<String>) -> Error {
        Error::argument(self.rules.name(), what)
    }

    fn shape(&self, what: impl Into<String>) -> Error {
        Error::shape(self.rules.name(), what)
    }

    fn dtype(&self, dtype: DType, want: impl Into<String>) -> Error {
        Error::DType { op: self.rules.name(), dtype, want: want.into(), at: Default::default() }
    }

    fn need_int(&self, d: DType) -> Result<()> {
        if d.is_int() { Ok(()) } else { Err(self.dtype(d, "an integer type is needed for indices")) }
    }

    fn axis(&self, a: usize, s: &Shape) -> Result<()> {
        if a < s.rank() { Ok(()) } else { Err(self.shape(format!("axis {a} is outside shape {s}"))) }
    }

    fn amount(&self, n: usize) -> Result<i64> {
        i64::try_from(n).map_err(|_| self.shape(format!("padding of {n} elements is too large")))
    }
}

/// How [`Rules::rewrite`] changes the attributes of an op.
pub(crate) struct Rewrite<'a> {
    /// Applied to every dimension.
    pub(crate) dim: &'a dyn Fn(Dim) -> Result<Dim>,
    /// Applied to every value with which the op fills elements of its result.
    pub(crate) fill: &'a dyn Fn(Scalar) -> Scalar,
    /// The sizes of the symbols, for the body of a composite.
    pub(crate) symbols: Option<&'a Bindings>,
}

fn distinct(o: &Operand) -> u64 {
    let v = &o.view;
    let n = (0..v.rank()).filter(|&k| v.strides[k] != 0).map(|k| v.shape[k]).product();
    o.dtype.bytes(n) as u64
}

impl Cost {
    /// `flops`, and the bytes of every distinct element of the operands and of the result.
    fn reading_all(flops: u64, inputs: &[Operand], output: &Operand) -> Cost {
        let read: u64 = inputs.iter().map(distinct).fold(0, u64::saturating_add);
        Cost { flops, bytes: read.saturating_add(size(output)) }
    }
}

/// The number of elements. It saturates, because it is used for counts of operations, which can be very
/// large.
fn count(d: &[usize]) -> u64 {
    d.iter().fold(1u64, |a, n| a.saturating_mul(*n as u64))
}

/// The number of elements; `None` if it overflows.
fn checked_count(d: &[usize]) -> Option<usize> {
    d.iter().try_fold(1usize, |a, n| a.checked_mul(*n))
}

/// The bytes of a dense operand.
fn size(o: &Operand) -> u64 {
    o.dtype.bytes(o.view.numel()) as u64
}

/// The sizes of a type; empty if the type has symbols.
fn sizes(t: Option<&&TensorType>) -> crate::shape::Dims {
    t.and_then(|t| t.shape.known()).unwrap_or_default()
}

/// The list of all ops: a pattern, the name of the kind, and the rules.
macro_rules! kinds {
    ($($op:pat => $kind:literal, $rules:expr;)*) => {
        /// The name of every kind of op, in the order of [`Op`]'s variants.
        pub const KINDS: &[&str] = &[$($kind),*];

        impl Op {
            /// The name of the op's kind, one of [`KINDS`]. [`Op::name`] also distinguishes scalar ops,
            /// reductions and composites.
            #[allow(unused_variables)]
            pub fn kind(&self) -> &'static str {
                match self {
                    $($op => $kind,)*
                }
            }

            /// Calls `f` with the op's rules.
            pub(crate) fn rules<R>(&self, f: impl FnOnce(&dyn Rules) -> R) -> R {
                match self {
                    $($op => f($rules),)*
                }
            }
        }
    };
}

// A new op does not compile until it has a row.
kinds! {
    Op::Input(k) => "input", &leaf::Input(*k);
    Op::Arg(k) => "arg", &leaf::Arg(*k);
    Op::Const(c) => "const", &leaf::Const(c);
    Op::Full(v) => "full", &leaf::Full(*v);
    Op::Iota { axis } => "iota", &leaf::Iota { axis: *axis };
    Op::Scalar(s) => "scalar", &element_wise::FromRow(*s);
    Op::Cast => "cast", &element_wise::Cast;
    Op::Bitcast => "bitcast", &element_wise::Bitcast;
    Op::Reduce { kind, axes, keep } => "reduce", &reduce::Reduce { kind: *kind, axes, keep: *keep };
    Op::ArgReduce { max, axis, keep, last } => "arg_reduce",
        &reduce::ArgReduce { max: *max, axis: *axis, keep: *keep, last: *last };
    Op::Matmul => "matmul", &matmul::Matmul;
    Op::Conv(c) => "conv", c;
    Op::Pool(p) => "pool", p;
    Op::PoolGrad(p) => "pool_grad", &pool::PoolGrad(p);
    Op::Gather { axis } => "gather", &gather::Rows { axis: *axis };
    Op::GatherElements { axis } => "gather_elements", &gather::Elements { axis: *axis };
    Op::ScatterElements { axis, kind } => "scatter_elements",
        &scatter::Scatter { axis: *axis, kind: *kind, rows: false };
    Op::ScatterRows { axis, kind } => "scatter_rows",
        &scatter::Scatter { axis: *axis, kind: *kind, rows: true };
    Op::UpdateSlice { axis } => "update_slice", &scatter::UpdateSlice { axis: *axis };
    Op::ClassIndex { classes, ignore } => "class_index",
        &class_index::ClassIndex { classes: *classes, ignore: *ignore };
    Op::DecodeBlocks(t) => "decode_blocks", &decode_blocks::DecodeBlocks(*t);
    Op::ArgSort { axis, descending } => "argsort", &sort::ArgSort { axis: *axis, descending: *descending };
    Op::Scan { kind, axis, exclusive, reverse } => "scan",
        &scan::Scan { kind: *kind, axis: *axis, exclusive: *exclusive, reverse: *reverse };
    Op::Reshape => "reshape", &view::Reshape;
    Op::Permute(p) => "permute", &view::Permute(p);
    Op::Expand => "expand", &view::Expand;
    Op::Slice(axes) => "slice", &view::Slice(axes);
    Op::Pad { lo, hi, value } => "pad", &view::Pad { lo, hi, value: *value };
    Op::Concat { axis } => "concat", &concat::Concat { axis: *axis };
    Op::Recompute => "recompute", &view::Recompute;
    Op::Composite(c) => "composite", &**c;
    Op::Custom(c) => "custom", c;
}

impl Op {
    /// The op's name in messages, traces and receipts.
    pub fn name(&self) -> String {
        self.rules(|r| r.name())
    }

    /// The attributes that a printed graph shows after the name; empty if there are none.
    pub fn attributes(&self) -> String {
        self.rules(|r| r.attributes())
    }

    /// The work of the reference for operands of sizes `x` and a result of size `out`: the elements it reads,
    /// plus the terms of each element that it computes. `None` if it overflows.
    pub fn reference_work(&self, x: &[&[usize]], out: &[usize]) -> Option<usize> {
        let computed = checked_count(out)?.checked_mul(self.rules(|r| r.terms(x))?)?;
        x.iter().map(|d| checked_count(d)).try_fold(computed, |sum, n| sum.checked_add(n?))
    }

    /// The facts about the op that need no operands.
    pub fn facts(&self) -> Facts {
        self.rules(|r| r.facts())
    }

    /// Whether the op is a view: it only maps the indices of its operand.
    pub fn is_view(&self) -> bool {
        self.facts().lowering == Lowering::View
    }

    /// Whether the op has no operands.
    pub fn is_leaf(&self) -> bool {
        matches!(self.facts().lowering, Lowering::Stored | Lowering::Literal)
    }

    /// The result type for operands of types `x`. `want` is the requested type. Inputs, arguments, literals,
    /// iotas, casts, bitcasts, reshapes, expansions and slices need it, because their type does not follow
    /// from their operands. The other ops ignore it.
    pub fn infer(&self, x: &[&TensorType], want: Option<&TensorType>) -> Result<TensorType> {
        self.rules(|rules| rules.infer(&Types { rules, x, want }))
    }

    /// Replaces the symbols in attributes by their sizes.
    pub fn bind(&self, b: &Bindings) -> Result<Op> {
        let dim = |d: Dim| d.bind(b);
        self.rules(|r| r.rewrite(&Rewrite { dim: &dim, fill: &|v| v, symbols: Some(b) }))
    }

    /// Replaces the values with which the op fills elements of its result (the value of a pad).
    pub fn with_fill(&self, fill: impl Fn(Scalar) -> Scalar) -> Result<Op> {
        self.rules(|r| r.rewrite(&Rewrite { dim: &Ok, fill: &fill, symbols: None }))
    }

    /// The role under mixed precision with half type `low`, for operands of types `x` and result dtype `y`.
    pub fn mixed(&self, low: DType, x: &[DType], y: DType) -> MixedRole {
        self.rules(|r| r.mixed(low, x, y))
    }

    /// The kind of work whose measured rates decide whether the op takes a half type.
    pub fn rated(&self) -> Option<RatedWork> {
        match self.mixed(DType::BF16, &[], DType::F32) {
            MixedRole::Product(work) => Some(work),
            MixedRole::Whole(form) => form.rate,
            _ => None,
        }
    }

    /// Operations and bytes of one execution with these operands.
    pub fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        self.rules(|r| r.cost(inputs, output))
    }

    /// The range of the indices that the op reads; `None` if it reads none.
    pub fn index_range(&self, inputs: &[Operand]) -> Option<IndexRange> {
        self.rules(|r| r.index_range(inputs))
    }

    /// How a view with a result of sizes `out` changes the strides of its operand; `None` for other ops.
    pub fn restride(&self, out: &[usize]) -> Option<Restride> {
        self.rules(|r| r.restride(out))
    }

    /// How the op rounds, for operands of types `x` and a result of type `y`, without symbols.
    pub fn rounding(&self, x: &[&TensorType], y: &TensorType) -> Rounding {
        self.rules(|r| r.rounding(x, y))
    }
}

#[cfg(test)]
mod tests;

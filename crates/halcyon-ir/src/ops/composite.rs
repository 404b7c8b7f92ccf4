//! The built-in composites: a table with one row each, and the functions that read it.

use super::{
    Cost, Facts, HalfForm, IndexRange, Lowering, MixedRole, Moves, Op, Rewrite, Rounding, Rules, Types,
    attention, blocked, byte_matmul, cached_attention, checked_count, checkpoint, chunk_scan, linear, norm,
    quantize, slice_at, softmax,
};
use crate::composite::Composite;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::grad::{Backward, Gradient};
use crate::kernel::lower::{KernelCall, Lowered, Template};
use crate::layout::Restride;
use crate::reference::{Eval, Tensor, run_graph};
use crate::shape::TensorType;
use crate::target::{Declined, Operand};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The facts about a composite that the rest of the system uses. The type has no default, so a row states
/// every field or starts from another row.
#[derive(Debug)]
pub struct CompositeRow {
    /// The name in messages, traces, receipts and files.
    pub name: &'static str,
    /// Whether `Graph` has a function of this name that adds it. If not, only passes or other crates add it.
    pub has_builder: bool,
    /// Whether a device may have kernels for the whole composite. If not, its body always replaces it.
    pub has_kernels: bool,
    /// See [`Facts::packs`].
    pub packs: bool,
    /// See [`Facts::summed`].
    pub summed: Option<(usize, usize)>,
    /// The form under mixed precision; `None`: the composite computes in f32.
    pub half: Option<HalfForm>,
    /// See [`Facts::template`].
    pub template: Option<&'static Template>,
    pub(crate) flops: fn(&Composite, &[Operand], &Operand) -> u64,
    pub(crate) gradient: CompositeGradient,
}

/// How a composite is differentiated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CompositeGradient {
    /// Through a copy of the composite's body. If the composite itself is replaced by its body, passes merge
    /// the copy with this body. The copy of a [`CompositeKind::Checkpoint`] is not merged, because it reads
    /// its operands through [`Op::Recompute`].
    Body,
    /// In closed form. The rule returns [`Gradient::Body`] if the body is not the built-in one.
    Closed(fn(&Composite, &mut Backward<'_>) -> Result<Gradient>),
}

/// The number of operations of a composite that performs a few operations for each element of its result.
pub(super) fn some_per_element(_: &Composite, _: &[Operand], output: &Operand) -> u64 {
    8 * output.view.numel() as u64
}

/// A row for a composite for which nothing but the body is known.
const fn unknown(name: &'static str) -> CompositeRow {
    CompositeRow {
        name,
        has_builder: false,
        has_kernels: true,
        packs: false,
        summed: None,
        half: None,
        template: None,
        flops: some_per_element,
        gradient: CompositeGradient::Body,
    }
}

/// The row of every composite that another crate defines.
static OTHER: CompositeRow = unknown("");

/// Declares [`CompositeKind`] from one line per built-in composite: the variant and its row.
macro_rules! built_in {
    ($($(#[$doc:meta])* $variant:ident => $row:expr,)*) => {
        /// The function that a composite computes.
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[serde(into = "String", from = "String")]
        pub enum CompositeKind {
            $($(#[$doc])* $variant,)*
            /// A composite of another crate, by its name.
            Other(Arc<str>),
        }

        impl CompositeKind {
            /// Every built-in composite.
            pub const BUILT_IN: &'static [CompositeKind] = &[$(CompositeKind::$variant),*];

            /// The facts about the composite that the rest of the system uses.
            pub fn row(&self) -> &'static CompositeRow {
                match self {
                    $(CompositeKind::$variant => &$row,)*
                    CompositeKind::Other(_) => &OTHER,
                }
            }
        }
    };
}

built_in! {
    Softmax => softmax::SOFTMAX,
    LogSoftmax => softmax::LOG_SOFTMAX,
    LayerNorm => norm::LAYER_NORM,
    /// The gradients of operand, scale and bias ([`crate::Graph::layer_norm_grad`]).
    LayerNormGrad => norm::LAYER_NORM_GRAD,
    RmsNorm => norm::RMS_NORM,
    BatchNorm => norm::BATCH_NORM,
    Attention => attention::ATTENTION,
    /// The gradients of queries, keys and values ([`crate::Graph::attention_grad`]).
    AttentionGrad => attention::ATTENTION_GRAD,
    /// A slice at a run-time position ([`crate::Graph::slice_at`]).
    SliceAt => slice_at::SLICE_AT,
    /// Operands: a blocked image (or a plain one `[N, C, H, W]`), weights `[O, C / groups, KH, KW]`. Result:
    /// a blocked image (`crate::passes::blocked`).
    BlockedConv => blocked::BLOCKED_CONV,
    /// A pool, or the gradient of a pool. Operands (one image, or x, y and dy) and result: blocked images.
    BlockedPool => blocked::BLOCKED_POOL,
    /// `a bᵀ` of 8-bit floats, or of integers of 8 or 16 bits (`crate::passes::bytes`).
    ByteMatmul => byte_matmul::BYTE_MATMUL,
    /// A part of a graph that the gradient pass computes again ([`crate::Graph::checkpoint`]).
    Checkpoint => checkpoint::CHECKPOINT,
    /// f32 to integers of 8 or 16 bits ([`crate::Graph::quantize`]).
    Quantize => quantize::QUANTIZE,
    /// Integers of 8 or 16 bits to f32 ([`crate::Graph::dequantize`]).
    Dequantize => quantize::DEQUANTIZE,
    /// Convolution of 8-bit integers with sums in f32 (`crate::passes::byte_conv`).
    ByteConv => quantize::BYTE_CONV,
    /// Product with weights of 4 bits ([`crate::Graph::quantized_matmul`]).
    QuantizedMatmul => quantize::QUANTIZED_MATMUL,
    /// A batch-invariant product with weights that are stored by rows ([`crate::Graph::row_matmul`]).
    RowMatmul => linear::ROW_MATMUL,
    /// Attention over a paged cache ([`crate::Graph::cached_attention`]).
    CachedAttention => cached_attention::CACHED_ATTENTION,
    /// The recurrent part of a layer, by chunks of positions ([`super::ChunkScan`]).
    ChunkScan => chunk_scan::CHUNK_SCAN,
}

/// `for_each_composite_method!(m)` calls the macro `m` with the composites whose tensor method is derived
/// from the function on [`crate::Graph`]. An entry has the description, the name, the operands after the
/// first, the axis if there is one, and the attributes.
#[macro_export]
macro_rules! for_each_composite_method {
    ($m:ident) => {
        $m! {
            "Softmax, `exp(x - max) / Σ exp(x - max)`, along `axis`."
            softmax() [axis] ();
            "The logarithm of [`Tensor::softmax`]."
            log_softmax() [axis] ();
            "Root-mean-square normalisation over the last axis; see [`halcyon_ir::Graph::rms_norm`]."
            rms_norm(scale) [] (eps: f64);
            "Batch normalisation over axis 1 with given statistics; see [`halcyon_ir::Graph::batch_norm`]."
            batch_norm(scale, bias, mean, var) [] (eps: f64);
        }
    };
}

impl CompositeKind {
    /// The name in messages, traces, receipts and files.
    pub fn name(&self) -> &str {
        match self {
            CompositeKind::Other(name) => name,
            built_in => built_in.row().name,
        }
    }
}

impl fmt::Display for CompositeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The built-in composite with this name, or a composite of another crate.
impl From<&str> for CompositeKind {
    fn from(name: &str) -> CompositeKind {
        let known = CompositeKind::BUILT_IN.iter().find(|k| k.name() == name);
        known.cloned().unwrap_or_else(|| CompositeKind::Other(name.into()))
    }
}

impl From<String> for CompositeKind {
    fn from(name: String) -> CompositeKind {
        CompositeKind::from(&*name)
    }
}

impl From<CompositeKind> for String {
    fn from(kind: CompositeKind) -> String {
        kind.name().into()
    }
}

impl Rules for Composite {
    fn name(&self) -> String {
        self.kind.name().into()
    }
    fn attributes(&self) -> String {
        String::new()
    }
    fn facts(&self) -> Facts {
        let row = self.kind.row();
        Facts {
            lowering: Lowering::Step,
            moves: Moves::Nothing,
            identity: None,
            packs: row.packs,
            in_place: false,
            summed: row.summed,
            template: row.template,
        }
    }
    fn infer(&self, t: &Types<'_>) -> Result<TensorType> {
        self.infer(t.x)
    }
    fn rewrite(&self, r: &Rewrite<'_>) -> Result<Op> {
        let c = match r.symbols {
            Some(b) => self.bind(b)?,
            None => self.clone(),
        };
        Ok(Op::Composite(Arc::new(c)))
    }
    fn reference(&self, e: &Eval<'_>) -> Result<Tensor> {
        let v = run_graph(&self.body, e.x.iter().map(|t| (*t).clone()).collect(), &[])?;
        v.into_iter().next().ok_or_else(|| Error::internal("a composite has no result"))
    }
    fn gradient(&self, b: &mut Backward<'_>) -> Result<Gradient> {
        match self.kind.row().gradient {
            CompositeGradient::Body => Ok(Gradient::Body),
            CompositeGradient::Closed(rule) => rule(self, b),
        }
    }
    fn cost(&self, inputs: &[Operand], output: &Operand) -> Cost {
        Cost::reading_all((self.kind.row().flops)(self, inputs, output), inputs, output)
    }
    fn terms(&self, x: &[&[usize]]) -> Option<usize> {
        // This function does not examine the body. The size of the largest operand is a bound for attention,
        // the most expensive of the common composites.
        x.iter().filter_map(|d| checked_count(d)).max()
    }
    fn index_range(&self, _: &[Operand]) -> Option<IndexRange> {
        None
    }
    fn rounding(&self, _: &[&TensorType], _: &TensorType) -> Rounding {
        Rounding::Body
    }
    fn mixed(&self, _: DType, _: &[DType], _: DType) -> MixedRole {
        self.kind.row().half.map_or(MixedRole::Wide, MixedRole::Whole)
    }
    fn restride(&self, _: &[usize]) -> Option<Restride> {
        None
    }
    fn kernels(&self, call: &KernelCall<'_>) -> Result<Lowered, Declined> {
        Err(call.no_template())
    }
}

#[cfg(test)]
mod tests {
    use super::CompositeKind;

    #[test]
    fn names_are_unique_and_read_back() {
        for k in CompositeKind::BUILT_IN {
            assert_eq!(CompositeKind::from(k.name()), *k);
            let text = serde_json::to_string(k).unwrap();
            assert_eq!(text, format!("\"{k}\""));
            assert_eq!(serde_json::from_str::<CompositeKind>(&text).unwrap(), *k);
        }
        let other = CompositeKind::from("mine.swirl");
        assert_eq!((other.name(), other.row().half), ("mine.swirl", None));
        assert!(!CompositeKind::BUILT_IN.contains(&other));
    }
}

//! Attention in one loop over the keys with a running maximum and sum, so that no score matrix is stored
//! (Milakov and Gimelshein 2018; Dao et al. 2022).
//!
//! There are five kernels, each in a file of its own. CPUs use one work-item per query. GPUs use the split
//! kernel for few queries. If the device cannot run it, up to two queries use one workgroup each, with one
//! key per work-item. For more queries, GPUs use the matrix-unit kernel if the device has matrix units, else
//! the kernel with tiles of queries and keys in workgroup memory. A GPU that can run none of these uses the
//! CPU's kernel. The queries of all heads that share a key head are rows of the same tiles. A query whose
//! keys are all masked gives NaN, as the definition does. A tile does not read keys that lie past the causal
//! limit of all its queries.

mod item;
mod key;
mod matrix;
mod problem;
mod running;
mod split;
mod tiled;

use super::common::*;
use crate::composite::CompositeKind;
use crate::dtype::{DType, Scalar};
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::ops::Op;
use crate::target::{Caps, Declined, Operand};
use matrix::Tile as MatrixTile;
use problem::Problem;
use split::Split;
use tiled::Tile;

const NEG_INF: f64 = f64::NEG_INFINITY;

/// Kernels for the composite `attention` (attributes `causal`, `scale`): q `[b, h, sq, d]`, k and v `[b, hk,
/// sk, d]` of one float type, with `d` up to 256, and optionally an additive mask that broadcasts to `[b, h,
/// sq, sk]` and has the same compute type. Rows of q, k and v must be contiguous; the other strides may have
/// any value.
///
/// # Errors
/// Declines rows of more than 256 elements, and values that are not as wide as the keys. Declines with
/// `needs_dense` if rows are not contiguous or the view of an operand has a mask.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let cx = context(op, inputs, outputs, caps)?;
    cx.build(cx.default(), inputs, outputs)
}

/// Like [`lower`], for one of the variants in [`choices`].
///
/// # Errors
/// The errors of [`lower`], and an error for a variant of another template.
pub fn lower_as(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    context(op, inputs, outputs, caps)?.build(KernelVariant::of(v)?, inputs, outputs)
}

/// The kernels that the device can run.
///
/// # Errors
/// The errors of [`lower`].
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let cx = context(op, inputs, outputs, caps)?;
    let forms = cx.forms().into_iter().filter(|f| cx.legal(*f)).map(KernelVariant::variant);
    let all = Choices::new(cx.key(), cx.default().variant(), forms, Tolerance::Sums(cx.p.sk + cx.p.d));
    Ok(all.on_matrix_units(matrix::unit_of(&cx)))
}

fn context<'c>(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &'c Caps) -> Result<Cx<'c>, Declined> {
    let c = match op {
        Op::Composite(c) if c.kind == CompositeKind::Attention => c,
        _ => return Err(Declined::because(format!("attention: got {}", op.name()))),
    };
    arity(&op.name(), inputs, outputs, 3..=4)?;
    like(&op.name(), &inputs[0], outputs)?;
    unmasked(inputs)?;
    let Some(scale) = c.float("scale") else {
        return Err(Declined::because("attention: no scale"));
    };
    // The definition multiplies by a literal of its compute type, which under mixed precision is not the
    // operands' type.
    let computed = c.body.nodes().iter().find(|n| n.op == Op::Matmul).map(|n| n.ty.dtype);
    let scale = Scalar::F(scale).cast(computed.unwrap_or(inputs[0].dtype)).as_f64();
    let p = Problem::new(inputs, c.flag("causal"), scale)?;
    let (dtype, ix) = (inputs[0].dtype, index_type(inputs, outputs, caps)?);
    Ok(Cx { p, dtype, ty: Ty::of(dtype), ix, caps })
}

/// A kernel and its parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
enum KernelVariant {
    /// One query per work-item; `items` work-items per workgroup, `keys` keys at a time.
    Item {
        items: u32,
        keys: u32,
    },
    Key,
    Split(Split),
    Tiled(Tile),
    Matrix(MatrixTile),
}

impl KernelVariant {
    fn variant(self) -> Variant {
        match self {
            KernelVariant::Item { items, keys } => Variant::new("item", &[("items", items), ("keys", keys)]),
            KernelVariant::Key => Variant::new("key", &[]),
            KernelVariant::Split(s) => s.variant(),
            KernelVariant::Tiled(t) => Variant::new("tiled", &[("queries", t.queries), ("keys", t.keys)]),
            KernelVariant::Matrix(t) => t.variant(),
        }
    }

    fn of(v: &Variant) -> Result<KernelVariant, Declined> {
        Ok(match &*v.kernel {
            "item" => KernelVariant::Item { items: v.number("items")?, keys: v.number("keys")? },
            "key" => KernelVariant::Key,
            "split" => KernelVariant::Split(Split::of(v)?),
            "tiled" => KernelVariant::Tiled(Tile { queries: v.number("queries")?, keys: v.number("keys")? }),
            "matrix" => KernelVariant::Matrix(MatrixTile::of(v)?),
            _ => return Err(v.unknown(CompositeKind::Attention.name())),
        })
    }
}

struct Cx<'c> {
    p: Problem,
    dtype: DType,
    ty: Ty,
    ix: Ty,
    caps: &'c Caps,
}

impl Cx<'_> {
    pub(super) fn fits(&self, words: u32) -> bool {
        words as usize * self.ty.size() <= self.caps.workgroup_memory as usize
    }

    pub(super) fn queries(&self) -> usize {
        self.p.b * self.p.hk * self.p.shared * self.p.sq
    }

    fn default(&self) -> KernelVariant {
        let item =
            KernelVariant::Item { items: items(if self.caps.is_cpu { 4 } else { 64 }, self.caps), keys: 16 };
        if self.caps.is_cpu {
            return item;
        }
        if let Some(s) = self.split_default().filter(|_| self.few()) {
            return KernelVariant::Split(s);
        }
        if self.p.shared * self.p.sq <= 2 && self.legal(KernelVariant::Key) {
            return KernelVariant::Key;
        }
        if let Some(t) = matrix::choose(self) {
            return KernelVariant::Matrix(t);
        }
        Tile::choose(self).map_or(item, KernelVariant::Tiled)
    }

    /// Candidates for measurement. Some may not be legal on the device.
    fn forms(&self) -> Vec<KernelVariant> {
        if self.caps.is_cpu {
            let blocks = [8, 16, 32].map(|keys| [1, 4, 16].map(|items| KernelVariant::Item { items, keys }));
            return blocks.concat();
        }
        let tiles = [(4, 32), (8, 16), (8, 32), (16, 16), (16, 32), (32, 32)];
        let mut all: Vec<KernelVariant> =
            tiles.map(|(queries, keys)| KernelVariant::Tiled(Tile { queries, keys })).to_vec();
        all.push(KernelVariant::Key);
        if self.few() {
            all.extend(self.splits().into_iter().map(KernelVariant::Split));
        }
        all.extend([32, 64, 128].map(|items| KernelVariant::Item { items, keys: 16 }));
        all.extend(matrix::tiles().map(KernelVariant::Matrix));
        all
    }

    fn legal(&self, f: KernelVariant) -> bool {
        match f {
            KernelVariant::Item { items, .. } => items <= self.caps.max_workgroup,
            KernelVariant::Key => self.p.width <= self.caps.max_workgroup && self.fits(3 * self.p.width),
            KernelVariant::Split(s) => self.few() && self.split_legal(s),
            KernelVariant::Tiled(t) => t.legal(self),
            KernelVariant::Matrix(t) => matrix::legal(self, t),
        }
    }

    fn key(&self) -> String {
        let p = &self.p;
        format!(
            "attention {} {} heads{} queries{} keys{} width{} d{}{}{}{}{}",
            self.dtype,
            self.ix.name(),
            class(p.b * p.hk),
            class(p.shared * p.sq),
            class(p.sk),
            p.width,
            class(p.d),
            if p.causal { " causal" } else { "" },
            p.mask.as_ref().map_or(String::new(), |m| format!(" mask {}", m.dtype)),
            // The key contains the properties that change the kernel's text, so that a measurement is valid
            // for all calls with this key.
            match p.runs {
                [q, true] if self.few() =>
                    format!(" runs{}{}", u8::from(q), if p.sk >= 2 * split::MIN_KEYS { " long" } else { "" }),
                _ if self.few() && p.sk >= 2 * split::MIN_KEYS => " long".into(),
                _ => String::new(),
            },
            matrix::text(self),
        )
    }

    fn build(&self, f: KernelVariant, inputs: &[Operand], outputs: &[Operand]) -> Result<Lowered, Declined> {
        let mut args = Args::of(inputs, outputs);
        self.p.fill(&mut args);
        match f {
            KernelVariant::Item { items, keys } => self.by_item(args, items, keys),
            KernelVariant::Key => self.by_key(args),
            KernelVariant::Split(s) => self.split(inputs, outputs, s),
            KernelVariant::Tiled(t) => self.tiled(args, t),
            KernelVariant::Matrix(t) => self.matrix(args, &outputs[0], t),
        }
    }
}

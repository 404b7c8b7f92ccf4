//! Matrix product of strided operands: `y[b…, i, j] = Σ a[b…, i, k] * w[b…, k, j]`.
//!
//! Large products use the matrix-unit kernel if the device has matrix units. There are five other kernels.
//! For GPUs: a tiled kernel through workgroup memory, and a split kernel for few rows or columns, where a
//! workgroup splits the sum. For CPUs: a block of rows and columns per work-item, and a kernel for long dot
//! products. For tiny products, and if no other kernel can run: one output per work-item. Each kernel has a
//! file of its own.

mod block;
mod dot;
mod matrix;
mod problem;
mod simple;
mod split;
mod tiled;

use super::common::*;
use crate::dtype::DType;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::kernel::{Buf, Builder};
use crate::ops::Op;
use crate::target::{Caps, Declined, Operand};
use matrix::Tile as MatrixTile;
use problem::Problem;
use tiled::Tile;

/// Kernels for [`Op::Matmul`]: operands `[b…, m, k]` and `[b…, k, n]` of one number type, with any strides.
///
/// # Errors
/// Declines with `needs_dense` if an operand is masked or has more than four batch dimensions that do not
/// merge.
pub fn lower(_: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let (p, cx) = problem(inputs, outputs, caps)?;
    cx.build(&p, inputs, outputs, cx.default(&p))
}

/// Like [`lower`], for one of the variants in [`choices`].
///
/// # Errors
/// The errors of [`lower`], and an error for a variant of another template.
pub fn lower_as(
    _: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    let (p, cx) = problem(inputs, outputs, caps)?;
    cx.build(&p, inputs, outputs, KernelVariant::of(v)?)
}

/// The kernels that the device can run for a product.
///
/// # Errors
/// The errors of [`lower`].
pub fn choices(_: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let (p, cx) = problem(inputs, outputs, caps)?;
    let forms = cx.forms(&p).into_iter().filter(|f| cx.legal(&p, *f)).map(KernelVariant::variant);
    let all = Choices::new(cx.key(&p), cx.default(&p).variant(), forms, Tolerance::Products(p.k));
    Ok(all.on_matrix_units(matrix_unit(cx.dtype, caps)))
}

fn problem<'c>(
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &'c Caps,
) -> Result<(Problem, Cx<'c>), Declined> {
    arity("matmul", inputs, outputs, 2..=2)?;
    unmasked(inputs)?;
    let (a, w) = (&inputs[0].view, &inputs[1].view);
    if a.rank() < 2 || a.rank() != w.rank() {
        return Err(Declined::because("matmul: the operands must have equal ranks of 2 or more"));
    }
    let p = Problem::new(a, w);
    if p.batch.len() > 4 {
        let strided = (0..2).filter(|&i| !inputs[i].view.is_dense());
        return Err(Declined::needs_dense(strided));
    }
    let ix = index_type(inputs, outputs, caps)?;
    let offsets = [a.offset, w.offset];
    Ok((p, Cx { dtype: inputs[0].dtype, out: outputs[0].dtype, offsets, ix, caps }))
}

/// A kernel and its parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
enum KernelVariant {
    /// One output per work-item. `items` is the size of the workgroup, here and in the other variants.
    Simple {
        items: u32,
    },
    /// A workgroup computes `columns` columns; its work-items split the sum of each column.
    Split {
        items: u32,
        columns: u32,
    },
    Tiled(Tile),
    Matrix(MatrixTile),
    /// `rows` by `columns` outputs per work-item.
    Block {
        rows: u32,
        columns: u32,
        items: u32,
    },
    /// One output per work-item, accumulated in `lanes` partial sums.
    Dot {
        lanes: u32,
        items: u32,
    },
}

impl KernelVariant {
    fn variant(self) -> Variant {
        match self {
            KernelVariant::Simple { items } => Variant::new("simple", &[("items", items)]),
            KernelVariant::Split { items, columns } => {
                Variant::new("split", &[("items", items), ("columns", columns)])
            }
            KernelVariant::Tiled(t) => {
                Variant::new("tiled", &[("side", t.side), ("each", t.each), ("depth", t.depth)])
            }
            KernelVariant::Matrix(t) => t.variant(),
            KernelVariant::Block { rows, columns, items } => {
                Variant::new("block", &[("rows", rows), ("columns", columns), ("items", items)])
            }
            KernelVariant::Dot { lanes, items } => Variant::new("dot", &[("lanes", lanes), ("items", items)]),
        }
    }

    fn of(v: &Variant) -> Result<KernelVariant, Declined> {
        let n = |name| v.number(name);
        Ok(match &*v.kernel {
            "simple" => KernelVariant::Simple { items: n("items")? },
            "split" => KernelVariant::Split { items: n("items")?, columns: n("columns")? },
            "tiled" => KernelVariant::Tiled(Tile { side: n("side")?, each: n("each")?, depth: n("depth")? }),
            "matrix" => KernelVariant::Matrix(MatrixTile::of(v)?),
            "block" => KernelVariant::Block { rows: n("rows")?, columns: n("columns")?, items: n("items")? },
            "dot" => KernelVariant::Dot { lanes: n("lanes")?, items: n("items")? },
            _ => return Err(v.unknown("matmul")),
        })
    }
}

#[derive(Clone, Copy)]
struct Cx<'c> {
    dtype: DType,
    out: DType,
    /// Offsets of the two operands, in elements.
    offsets: [isize; 2],
    ix: Ty,
    caps: &'c Caps,
}

impl Cx<'_> {
    fn ty(&self) -> Ty {
        Ty::of(self.dtype)
    }

    fn default(&self, p: &Problem) -> KernelVariant {
        let caps = self.caps;
        let simple = KernelVariant::Simple { items: items(64, caps) };
        if caps.is_cpu {
            return match () {
                _ if p.bn == 1 && p.n >= 8 => KernelVariant::Block {
                    rows: if p.m == 1 { 1 } else { 4 },
                    columns: 32,
                    items: items(8, caps),
                },
                _ if p.bk == 1 && p.ak == 1 && p.k >= 16 => {
                    KernelVariant::Dot { lanes: 16, items: items(16, caps) }
                }
                _ => simple,
            };
        }
        if self.few(p) {
            let items: u32 = if caps.max_workgroup >= 256 { 256 } else { 64 };
            let columns = match (Self::split_along_k(p), self.transposed(p)) {
                (true, _) => items / 64,
                // A work-item reads 16 bytes of a row, so four work-items read 64 bytes, which are whole
                // sectors of the cache. Use more work-items per row if enough workgroups remain for all
                // units.
                (false, (t, offset)) if self.run(&t, offset) > 1 => {
                    let each = self.run(&t, offset) as usize;
                    let groups = |c: u32| t.n.div_ceil(c as usize * each) * t.m.div_ceil(4) * t.batches();
                    let enough = |c: &u32| groups(*c) >= 2 * caps.units();
                    [32, 16, 8].into_iter().find(enough).unwrap_or(4)
                }
                _ => 32,
            };
            return KernelVariant::Split { items, columns };
        }
        let large = p.m.min(p.n) >= 8 && p.k >= 8 && p.batches() * p.m * p.n >= 1024;
        if let Some(op) = matrix_unit(self.dtype, caps).filter(|_| large) {
            let form = KernelVariant::Matrix(matrix::choose(p, op, caps));
            if self.legal(p, form) {
                return form;
            }
        }
        match Tile::choose(p, caps, self.ty()) {
            Some(t) if large => KernelVariant::Tiled(t),
            _ => simple,
        }
    }

    /// Candidates for measurement, not all legal on the device.
    fn forms(&self, p: &Problem) -> Vec<KernelVariant> {
        let mut all = vec![];
        if self.caps.is_cpu {
            if p.bn == 1 {
                let rows: &[u32] = if p.m == 1 { &[1] } else { &[1, 2, 4, 6, 8] };
                for &rows in rows {
                    all.extend([16, 32, 64].map(|columns| KernelVariant::Block { rows, columns, items: 8 }));
                }
                let rows = if p.m == 1 { 1 } else { 4 };
                all.extend([1, 2, 16].map(|items| KernelVariant::Block { rows, columns: 32, items }));
            }
            if p.bk == 1 && p.ak == 1 {
                all.extend([8, 16, 32, 64].map(|lanes| KernelVariant::Dot { lanes, items: 16 }));
                all.extend([1, 4].map(|items| KernelVariant::Dot { lanes: 16, items }));
            }
        } else if self.few(p) {
            for items in [64, 128, 256, 512] {
                let columns: &[u32] =
                    if Self::split_along_k(p) { &[1, 2, 4, 8] } else { &[4, 8, 16, 32, 64] };
                all.extend(columns.iter().map(|&columns| KernelVariant::Split { items, columns }));
            }
        } else {
            let tiles = matrix_unit(self.dtype, self.caps).map(matrix::tiles);
            all.extend(tiles.into_iter().flatten().map(KernelVariant::Matrix));
            for (side, each) in [(8, 2), (8, 4), (8, 8), (16, 2), (16, 4), (16, 8)] {
                all.extend([8, 16, 32].map(|depth| KernelVariant::Tiled(Tile { side, each, depth })));
            }
        }
        // On CPUs the other kernels are always faster if they apply.
        if !self.caps.is_cpu || all.is_empty() {
            all.extend([32, 64, 128, 256].map(|items| KernelVariant::Simple { items }));
        }
        all
    }

    fn legal(&self, p: &Problem, f: KernelVariant) -> bool {
        let fits = |words: u32| words as usize * self.ty().size() <= self.caps.workgroup_memory as usize;
        let group = |n: u32| n <= self.caps.max_workgroup;
        match f {
            KernelVariant::Simple { items }
            | KernelVariant::Dot { items, .. }
            | KernelVariant::Block { items, .. } => group(items),
            // The tree that adds the partial sums needs two or more work-items per column.
            KernelVariant::Split { items, columns } => {
                let rows = if p.m.min(p.n) == 1 { 1 } else { 4 };
                let (t, offset) = self.transposed(p);
                let each = if Self::split_along_k(p) { 1 } else { self.run(&t, offset) };
                group(items) && items >= 2 * columns && fits(rows * items * each)
            }
            KernelVariant::Matrix(t) => matrix_unit(self.dtype, self.caps)
                .is_some_and(|op| matrix::legal(p, self.out, op, t, self.caps)),
            // Every work-item must load the same number of elements of each operand.
            KernelVariant::Tiled(t) => {
                group(t.side * t.side) && (t.each * t.depth).is_multiple_of(t.side) && fits(t.words())
            }
        }
    }

    fn key(&self, p: &Problem) -> String {
        // Which strides are 1, and along which axis the tiled kernel reads.
        let strides = |k: isize, other: isize| match (k, other) {
            (1, _) => "k",
            (_, 1) => "o",
            _ if k.abs() <= other.abs() => "sk",
            _ => "so",
        };
        let unit = matrix_unit(self.dtype, self.caps);
        format!(
            "matmul{}{}{} {} {} rank{} b{} m{} n{} k{} {} {}",
            if unit.is_some() { " matrix" } else { "" },
            // The kernel's text depends on whether each operand is read in 16-byte loads.
            unit.map_or("", |op| matrix::vectors(p, self.out, op, self.offsets)),
            match self.transposed(p) {
                (t, offset) if self.few(p) && self.run(&t, offset) > 1 => " runs",
                _ => "",
            },
            self.dtype,
            self.ix.name(),
            p.rank_class(),
            class(p.batches()),
            class(p.m),
            class(p.n),
            class(p.k),
            strides(p.ak, p.am),
            strides(p.bk, p.bn),
        )
    }

    fn build(
        &self,
        p: &Problem,
        inputs: &[Operand],
        outputs: &[Operand],
        f: KernelVariant,
    ) -> Result<Lowered, Declined> {
        let args = Args::of(inputs, outputs);
        match f {
            KernelVariant::Matrix(t) => self.matrix(p, args, inputs, &outputs[0], t),
            _ if self.out != self.dtype => Err(Declined::because(format!(
                "matmul: operands of {} with a result of {} need matrix units",
                self.dtype, self.out
            ))),
            KernelVariant::Simple { items } => self.simple(p, args, items),
            KernelVariant::Split { items, columns } if p.m > p.n => {
                self.split(&p.transposed(), args, true, items, columns)
            }
            KernelVariant::Split { items, columns } => self.split(p, args, false, items, columns),
            KernelVariant::Tiled(t) => self.tiled(p, args, t),
            KernelVariant::Block { rows, columns, items } => self.block(p, args, rows, columns, items),
            KernelVariant::Dot { lanes, items } => self.dot(p, args, lanes, items),
        }
    }

    fn buffers(&self, b: &Builder) -> (Buf, Buf, Buf) {
        (b.input(self.dtype), b.input(self.dtype), b.output(self.dtype))
    }
}

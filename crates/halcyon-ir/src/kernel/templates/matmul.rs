//! Matrix product of strided operands: `y[b…, i, j] = Σ a[b…, i, k] * w[b…, k, j]`.
//!
//! Large products use `matmul_matrix.rs` if the device has matrix units. There are five other kernels. For
//! GPUs: a tiled kernel through workgroup memory, and a split kernel for few rows or columns, where a
//! workgroup splits the sum. For CPUs: a block of rows and columns per work-item, and a kernel for long dot
//! products. For tiny products on any device: one output per work-item.

use super::common::*;
use super::matmul_matrix::{self as matrix, Tile as MatrixTile};
use crate::dtype::DType;
use crate::kernel::ir::Ty;
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::kernel::{Buf, Builder, E};
use crate::layout::{View, collapse};
use crate::op::Op;
use crate::target::{Caps, Declined, Operand};

/// A product as the kernels see it: strides of up to four batch dimensions, then two strides per operand.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub batch: Vec<usize>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Strides of the left operand (batch, row, K), then of the right operand (batch, K, column).
    pub ab: Vec<isize>,
    pub am: isize,
    pub ak: isize,
    pub bb: Vec<isize>,
    pub bk: isize,
    pub bn: isize,
    pub ym: isize,
    pub yn: isize,
}

impl Problem {
    fn new(a: &View, w: &View) -> Problem {
        let r = a.rank();
        let (m, k, n) = (a.shape[r - 2], a.shape[r - 1], w.shape[r - 1]);
        let batch = |v: &View| View {
            shape: v.shape[..r - 2].into(),
            strides: v.strides[..r - 2].into(),
            offset: 0,
            mask: None,
        };
        let (mut va, mut vb) = (batch(a), batch(w));
        collapse(&mut [&mut va, &mut vb], r - 2);
        let mut p = Problem {
            batch: va.shape.to_vec(),
            m,
            n,
            k,
            ab: va.strides.to_vec(),
            am: a.strides[r - 2],
            ak: a.strides[r - 1],
            bb: vb.strides.to_vec(),
            bk: w.strides[r - 2],
            bn: w.strides[r - 1],
            ym: n as isize,
            yn: 1,
        };
        // One right operand for the whole batch: fold the batch into the rows.
        if let ([d], [sa], [0]) = (&p.batch[..], &p.ab[..], &p.bb[..])
            && (m == 1 || *sa == m as isize * p.am)
        {
            if m == 1 {
                p.am = *sa;
            }
            p.m = m * d;
            (p.batch, p.ab, p.bb) = (vec![], vec![], vec![]);
        }
        p
    }

    pub fn batches(&self) -> usize {
        self.batch.iter().product()
    }

    /// The product of the transposes, `wᵀ aᵀ`, which writes the transposed result.
    fn transposed(&self) -> Problem {
        Problem {
            batch: self.batch.clone(),
            m: self.n,
            n: self.m,
            k: self.k,
            ab: self.bb.clone(),
            am: self.bn,
            ak: self.bk,
            bb: self.ab.clone(),
            bk: self.ak,
            bn: self.am,
            ym: self.yn,
            yn: self.ym,
        }
    }

    /// Number of batch dimensions that the kernel is built for: one or four.
    pub fn rank_class(&self) -> usize {
        if self.batch.len() <= 1 { 1 } else { 4 }
    }
}

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
/// As [`lower`], and for a variant of another template.
pub fn lower_as(
    _: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    let (p, cx) = problem(inputs, outputs, caps)?;
    cx.build(&p, inputs, outputs, Form::of(v)?)
}

/// The kernels that the device can run for a product.
///
/// # Errors
/// As [`lower`].
pub fn choices(_: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let (p, cx) = problem(inputs, outputs, caps)?;
    let forms = cx.forms(&p).into_iter().filter(|f| cx.legal(&p, *f)).map(Form::variant);
    let all = Choices::new(cx.key(&p), cx.default(&p).variant(), forms, Tolerance::Products(p.k));
    Ok(all.on_matrix_units(matrix::unit(cx.dtype, caps)))
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
        return Err(Declined::because("matmul: operands of rank 2 or more, and of equal rank"));
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
enum Form {
    /// One output per work-item. `items` is the size of the workgroup, here and in the other forms.
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

impl Form {
    fn variant(self) -> Variant {
        match self {
            Form::Simple { items } => Variant::new("simple", &[("items", items)]),
            Form::Split { items, columns } => {
                Variant::new("split", &[("items", items), ("columns", columns)])
            }
            Form::Tiled(t) => {
                Variant::new("tiled", &[("side", t.side), ("each", t.each), ("depth", t.depth)])
            }
            Form::Matrix(t) => t.variant(),
            Form::Block { rows, columns, items } => {
                Variant::new("block", &[("rows", rows), ("columns", columns), ("items", items)])
            }
            Form::Dot { lanes, items } => Variant::new("dot", &[("lanes", lanes), ("items", items)]),
        }
    }

    fn of(v: &Variant) -> Result<Form, Declined> {
        let n = |name| v.number(name);
        Ok(match &*v.kernel {
            "simple" => Form::Simple { items: n("items")? },
            "split" => Form::Split { items: n("items")?, columns: n("columns")? },
            "tiled" => Form::Tiled(Tile { side: n("side")?, each: n("each")?, depth: n("depth")? }),
            "matrix" => Form::Matrix(MatrixTile::of(v)?),
            "block" => Form::Block { rows: n("rows")?, columns: n("columns")?, items: n("items")? },
            "dot" => Form::Dot { lanes: n("lanes")?, items: n("items")? },
            _ => return Err(v.unknown("matmul")),
        })
    }
}

/// Parameters of the tiled kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tile {
    /// The workgroup has `side * side` work-items.
    side: u32,
    /// Each work-item computes `each * each` outputs.
    each: u32,
    /// Size of a step along K.
    depth: u32,
}

impl Tile {
    fn choose(p: &Problem, caps: &Caps, ty: Ty) -> Option<Tile> {
        let side = match caps.max_workgroup {
            256.. => 16,
            64.. => 8,
            _ => return None,
        };
        let groups = |edge: u32| p.m.div_ceil(edge as usize) * p.n.div_ceil(edge as usize) * p.batches();
        // Use smaller tiles if large ones would leave compute units idle.
        let each = if groups(side * 4) >= 2 * caps.units() { 4 } else { 2 };
        let t = Tile { side, each, depth: 16 };
        (t.words() as usize * ty.size() <= caps.workgroup_memory as usize).then_some(t)
    }

    fn edge(self) -> u32 {
        self.side * self.each
    }

    fn words(self) -> u32 {
        2 * self.depth * (self.edge() + 1)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Cx<'c> {
    pub dtype: DType,
    out: DType,
    /// Offsets of the two operands, in elements.
    pub offsets: [isize; 2],
    pub ix: Ty,
    pub caps: &'c Caps,
}

/// The parameters that all kernels have.
pub(super) struct Shape<'a> {
    pub m: E<'a>,
    pub n: E<'a>,
    pub k: E<'a>,
    pub batch: Vec<E<'a>>,
    pub ab: Vec<E<'a>>,
    pub bb: Vec<E<'a>>,
    pub am: E<'a>,
    pub ak: E<'a>,
    pub bk: E<'a>,
    pub bn: E<'a>,
}

impl<'a> Shape<'a> {
    pub fn declare(b: &'a Builder, class: usize) -> Shape<'a> {
        Shape {
            m: b.size("m"),
            n: b.size("n"),
            k: b.size("k"),
            batch: sizes(b, "d", class),
            ab: sizes(b, "ab", class),
            bb: sizes(b, "bb", class),
            am: b.size("am"),
            ak: b.size("ak"),
            bk: b.size("bk"),
            bn: b.size("bn"),
        }
    }

    /// Number of batches.
    pub fn batches(&self) -> E<'a> {
        self.batch[1..].iter().fold(self.batch[0], |p, d| p * *d)
    }

    /// Offsets of batch `i` in both operands.
    pub fn starts(&self, b: &'a Builder, i: E<'a>) -> (E<'a>, E<'a>) {
        let (mut rest, mut x, mut w) = (i, b.index(0), b.index(0));
        for d in (0..self.batch.len()).rev() {
            let at = if d == 0 { rest } else { b.let_(rest.imod(self.batch[d])) };
            x = x + at * self.ab[d];
            w = w + at * self.bb[d];
            if d > 0 {
                rest = b.let_(rest.idiv(self.batch[d]));
            }
        }
        (b.let_(x), b.let_(w))
    }
}

pub(super) fn fill(args: &mut Args, p: &Problem, class: usize) {
    let pad = |v: &[isize]| {
        let mut v = v.to_vec();
        v.resize(class, 0);
        v
    };
    let mut d = p.batch.clone();
    d.resize(class, 1);
    args.int("m", p.m as i64).int("n", p.n as i64).int("k", p.k as i64);
    args.ints("d", d.iter().map(|&d| d as i64));
    args.ints("ab", pad(&p.ab).iter().map(|&s| s as i64));
    args.ints("bb", pad(&p.bb).iter().map(|&s| s as i64));
    args.int("am", p.am as i64).int("ak", p.ak as i64);
    args.int("bk", p.bk as i64).int("bn", p.bn as i64);
}

impl Cx<'_> {
    fn ty(&self) -> Ty {
        Ty::of(self.dtype)
    }

    /// Few rows or columns: the product is computed by the split kernel.
    fn narrow(&self, p: &Problem) -> bool {
        p.m.min(p.n) <= 8 && p.k >= 64 && self.caps.max_workgroup >= 64
    }

    /// Whether the split kernel reads its right operand contiguously along K, after `turned`.
    fn split_along_k(p: &Problem) -> bool {
        if p.m > p.n { p.ak.abs() <= p.am.abs() } else { p.bk.abs() <= p.bn.abs() }
    }

    /// A product with few rows or columns as the split kernel sees it, with few rows and many columns, and
    /// the offset of its right operand.
    fn turned(&self, p: &Problem) -> (Problem, isize) {
        if p.m > p.n { (p.transposed(), self.offsets[0]) } else { (p.clone(), self.offsets[1]) }
    }

    /// Consecutive elements of the right operand that a work-item of the split kernel reads at a time: 16
    /// bytes, or one element.
    fn run(&self, p: &Problem, offset: isize) -> u32 {
        let along_k = p.bk.abs() <= p.bn.abs();
        let (fast, slow, extent) = if along_k { (p.bk, p.bn, p.k) } else { (p.bn, p.bk, p.n) };
        let each = self.runs(fast, slow, extent, &p.bb, offset);
        // The partial sums of several columns need workgroup memory.
        let words = if p.m == 1 { 256 } else { 1024 } * each as usize;
        let fits = along_k || words * self.ty().size() <= self.caps.workgroup_memory as usize;
        if fits { each } else { 1 }
    }

    /// Elements in 16 bytes if an operand with these strides can be read 16 bytes at a time, else 1.
    fn runs(&self, fast: isize, slow: isize, extent: usize, batch: &[isize], offset: isize) -> u32 {
        let each = (16 / self.dtype.size()) as isize;
        let whole = |n: isize| n % each == 0;
        let placed =
            whole(slow) && whole(offset) && whole(extent as isize) && batch.iter().all(|s| whole(*s));
        if self.dtype.size() <= 4 && fast == 1 && placed { each as u32 } else { 1 }
    }

    fn default(&self, p: &Problem) -> Form {
        let caps = self.caps;
        let simple = Form::Simple { items: items(64, caps) };
        if caps.is_cpu {
            return match () {
                _ if p.bn == 1 && p.n >= 8 => {
                    Form::Block { rows: if p.m == 1 { 1 } else { 4 }, columns: 32, items: items(8, caps) }
                }
                _ if p.bk == 1 && p.ak == 1 && p.k >= 16 => Form::Dot { lanes: 16, items: items(16, caps) },
                _ => simple,
            };
        }
        if self.narrow(p) {
            let items: u32 = if caps.max_workgroup >= 256 { 256 } else { 64 };
            let columns = match (Self::split_along_k(p), self.turned(p)) {
                (true, _) => items / 64,
                // A work-item's columns are 16 bytes, and four work-items fill whole cache-line sectors. Use
                // more columns if enough workgroups remain for all units.
                (false, (t, offset)) if self.run(&t, offset) > 1 => {
                    let each = self.run(&t, offset) as usize;
                    let groups = |c: u32| t.n.div_ceil(c as usize * each) * t.m.div_ceil(4) * t.batches();
                    let enough = |c: &u32| groups(*c) >= 2 * caps.units();
                    [32, 16, 8].into_iter().find(enough).unwrap_or(4)
                }
                _ => 32,
            };
            return Form::Split { items, columns };
        }
        let large = p.m.min(p.n) >= 8 && p.k >= 8 && p.batches() * p.m * p.n >= 1024;
        if let Some(op) = matrix::unit(self.dtype, caps).filter(|_| large) {
            let form = Form::Matrix(matrix::choose(p, op, caps));
            if self.legal(p, form) {
                return form;
            }
        }
        match Tile::choose(p, caps, self.ty()) {
            Some(t) if large => Form::Tiled(t),
            _ => simple,
        }
    }

    /// Candidates for measurement, not all legal on the device.
    fn forms(&self, p: &Problem) -> Vec<Form> {
        let mut all = vec![];
        if self.caps.is_cpu {
            if p.bn == 1 {
                let rows: &[u32] = if p.m == 1 { &[1] } else { &[1, 2, 4, 6, 8] };
                for &rows in rows {
                    all.extend([16, 32, 64].map(|columns| Form::Block { rows, columns, items: 8 }));
                }
                let rows = if p.m == 1 { 1 } else { 4 };
                all.extend([1, 2, 16].map(|items| Form::Block { rows, columns: 32, items }));
            }
            if p.bk == 1 && p.ak == 1 {
                all.extend([8, 16, 32, 64].map(|lanes| Form::Dot { lanes, items: 16 }));
                all.extend([1, 4].map(|items| Form::Dot { lanes: 16, items }));
            }
        } else if self.narrow(p) {
            for items in [64, 128, 256, 512] {
                let columns: &[u32] =
                    if Self::split_along_k(p) { &[1, 2, 4, 8] } else { &[4, 8, 16, 32, 64] };
                all.extend(columns.iter().map(|&columns| Form::Split { items, columns }));
            }
        } else {
            let tiles = matrix::unit(self.dtype, self.caps).map(matrix::tiles);
            all.extend(tiles.into_iter().flatten().map(Form::Matrix));
            for (side, each) in [(8, 2), (8, 4), (8, 8), (16, 2), (16, 4), (16, 8)] {
                all.extend([8, 16, 32].map(|depth| Form::Tiled(Tile { side, each, depth })));
            }
        }
        // On CPUs the other kernels are always faster where they apply.
        if !self.caps.is_cpu || all.is_empty() {
            all.extend([32, 64, 128, 256].map(|items| Form::Simple { items }));
        }
        all
    }

    fn legal(&self, p: &Problem, f: Form) -> bool {
        let fits = |words: u32| words as usize * self.ty().size() <= self.caps.workgroup_memory as usize;
        let group = |n: u32| n <= self.caps.max_workgroup;
        match f {
            Form::Simple { items } | Form::Dot { items, .. } | Form::Block { items, .. } => group(items),
            // The partial sums are added by a tree.
            Form::Split { items, columns } => {
                let rows = if p.m.min(p.n) == 1 { 1 } else { 4 };
                let (t, offset) = self.turned(p);
                let each = if Self::split_along_k(p) { 1 } else { self.run(&t, offset) };
                group(items) && items >= 2 * columns && fits(rows * items * each)
            }
            Form::Matrix(t) => matrix::unit(self.dtype, self.caps)
                .is_some_and(|op| matrix::legal(p, self.out, op, t, self.caps)),
            // Every work-item must load the same number of elements of each operand.
            Form::Tiled(t) => {
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
        let unit = matrix::unit(self.dtype, self.caps);
        format!(
            "matmul{}{}{} {} {} rank{} b{} m{} n{} k{} {} {}",
            if unit.is_some() { " matrix" } else { "" },
            // Whether each operand is read in 16-byte loads changes the program's text.
            unit.map_or("", |op| matrix::vectors(p, self.out, op, self.offsets)),
            match self.turned(p) {
                (t, offset) if self.narrow(p) && self.run(&t, offset) > 1 => " runs",
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
        f: Form,
    ) -> Result<Lowered, Declined> {
        let args = Args::of(inputs, outputs);
        match f {
            Form::Matrix(t) => self.matrix(p, args, inputs, &outputs[0], t),
            _ if self.out != self.dtype => Err(Declined::because(format!(
                "matmul: operands of {} into {} without matrix units",
                self.dtype, self.out
            ))),
            Form::Simple { items } => self.simple(p, args, items),
            Form::Split { items, columns } if p.m > p.n => {
                self.split(&p.transposed(), args, true, items, columns)
            }
            Form::Split { items, columns } => self.split(p, args, false, items, columns),
            Form::Tiled(t) => self.tiled(p, args, t),
            Form::Block { rows, columns, items } => self.block(p, args, rows, columns, items),
            Form::Dot { lanes, items } => self.dot(p, args, lanes, items),
        }
    }

    fn buffers(&self, b: &Builder) -> (Buf, Buf, Buf) {
        (b.input(self.dtype), b.input(self.dtype), b.output(self.dtype))
    }

    /// One output per work-item.
    fn simple(&self, p: &Problem, mut args: Args, wg: u32) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_simple", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let at = b.linear_id();
        b.if_(at.lt(s.batches() * s.m * s.n), || {
            let (row, j) = (b.let_(at.idiv(s.n)), b.let_(at.imod(s.n)));
            let (x0, w0) = s.starts(&b, row.idiv(s.m));
            let (x0, w0) = (b.let_(x0 + row.imod(s.m) * s.am), b.let_(w0 + j * s.bn));
            let acc = b.var_of(self.ty(), 0);
            b.for_(0, s.k, 1, |k| {
                let (x, v) = (b.load(a, x0 + k * s.ak), b.load(w, w0 + k * s.bk));
                acc.set(x.mul_add(v, acc.get()));
            });
            b.store(y, at, acc.get());
        });
        fill(&mut args, p, class);
        single(b, &args, (p.batches() * p.m * p.n).div_ceil(wg as usize), self.caps)
    }

    /// Tiles of both operands in workgroup memory, `each * each` outputs per work-item. Consecutive
    /// work-items read along the axis that is contiguous in memory.
    fn tiled(&self, p: &Problem, mut args: Args, t: Tile) -> Result<Lowered, Declined> {
        let (class, edge, n_items) = (p.rank_class(), t.edge(), t.side * t.side);
        let along_k = (p.ak.abs() <= p.am.abs(), p.bk.abs() <= p.bn.abs());
        let b = Builder::with_index("matmul_tiled", [n_items, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        // One word of padding per row avoids bank conflicts between writes down a column.
        let pitch = edge + 1;
        let (ta, tb) = (b.local(self.ty(), t.depth * pitch), b.local(self.ty(), t.depth * pitch));
        let (gm, gn) = (b.let_(s.m.div_ceil(edge)), b.let_(s.n.div_ceil(edge)));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(gm * gn * s.batches()), || {
            let lid = b.local_id(0);
            let (tx, ty) = (b.let_(lid.imod(t.side)), b.let_(lid.idiv(t.side)));
            let bt = b.let_(g.idiv(gm * gn));
            let tile = b.let_(g.imod(gm * gn));
            let (i0, j0) = (b.let_(tile.idiv(gn) * edge), b.let_(tile.imod(gn) * edge));
            let (x0, w0) = s.starts(&b, bt);
            let acc: Vec<_> = (0..t.each * t.each).map(|_| b.var_of(self.ty(), 0)).collect();
            b.for_(0, s.k, t.depth, |k0| {
                for step in 0..(edge * t.depth).div_ceil(n_items) {
                    let e = lid + step * n_items;
                    let place = |fast_k: bool| match fast_k {
                        true => (e.idiv(t.depth), e.imod(t.depth)),
                        false => (e.imod(edge), e.idiv(edge)),
                    };
                    let (r, c) = place(along_k.0);
                    let (i, k) = (i0 + r, k0 + c);
                    let v = b.load_if(a, x0 + i * s.am + k * s.ak, i.lt(s.m).and(k.lt(s.k)));
                    ta.store(c * pitch + r, v);
                    let (r, c) = place(along_k.1);
                    let (j, k) = (j0 + r, k0 + c);
                    let v = b.load_if(w, w0 + j * s.bn + k * s.bk, j.lt(s.n).and(k.lt(s.k)));
                    tb.store(c * pitch + r, v);
                }
                b.barrier();
                b.for_(0, t.depth, 1, |k| {
                    let at = b.let_(k * pitch);
                    let x: Vec<_> = (0..t.each).map(|i| ta.load(at + ty + i * t.side)).collect();
                    let v: Vec<_> = (0..t.each).map(|j| tb.load(at + tx + j * t.side)).collect();
                    for (q, acc) in acc.iter().enumerate() {
                        let (i, j) = (q / t.each as usize, q % t.each as usize);
                        acc.set(x[i].mul_add(v[j], acc.get()));
                    }
                });
                b.barrier();
            });
            for (q, acc) in acc.iter().enumerate() {
                let (i, j) = (q as u32 / t.each, q as u32 % t.each);
                let (i, j) = (i0 + ty + i * t.side, j0 + tx + j * t.side);
                b.if_(i.lt(s.m).and(j.lt(s.n)), || {
                    b.store(y, (bt * s.m + i) * s.n + j, acc.get());
                });
            }
        });
        fill(&mut args, p, class);
        let edge = edge as usize;
        let groups = p.m.div_ceil(edge) * p.n.div_ceil(edge) * p.batches();
        single(b, &args, groups, self.caps)
    }

    /// For few rows: a workgroup computes some columns of up to four rows and splits the sum over its
    /// work-items. `flipped`: `p` is the transpose of the op's product, so the operand buffers are swapped.
    fn split(
        &self,
        p: &Problem,
        mut args: Args,
        flipped: bool,
        n_items: u32,
        columns: u32,
    ) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let along_k = p.bk.abs() <= p.bn.abs();
        let (slices, rows) = (n_items / columns, if p.m == 1 { 1u32 } else { 4 });
        let [x_offset, w_offset] = if flipped { [1, 0] } else { [0, 1] }.map(|i: usize| self.offsets[i]);
        let run = self.run(p, w_offset);
        // Columns per work-item.
        let each = if along_k { 1 } else { run };
        let x_runs = along_k && run > 1 && self.runs(p.ak, p.am, p.k, &p.ab, x_offset) > 1;
        let b = Builder::with_index("matmul_split", [n_items, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let (a, w) = if flipped { (w, a) } else { (a, w) };
        let s = Shape::declare(&b, class);
        let (ym, yn) = (b.size("ym"), b.size("yn"));
        let scratch = b.local(self.ty(), rows * each * n_items);
        let (gm, gn) = (b.let_(s.m.div_ceil(rows)), b.let_(s.n.div_ceil(columns * each)));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(gm * gn * s.batches()), || {
            let lid = b.local_id(0);
            // Consecutive work-items read along the contiguous axis of the right operand.
            let (c, slice) = match along_k {
                true => (b.let_(lid.idiv(slices)), b.let_(lid.imod(slices))),
                false => (b.let_(lid.imod(columns)), b.let_(lid.idiv(columns))),
            };
            let bt = b.let_(g.idiv(gm * gn));
            let tile = b.let_(g.imod(gm * gn));
            let (i0, j) = (b.let_(tile.idiv(gn) * rows), b.let_((tile.imod(gn) * columns + c) * each));
            let (x0, w0) = s.starts(&b, bt);
            let w0 = b.let_(w0 + j * s.bn);
            let acc: Vec<_> = (0..rows * each).map(|_| b.var_of(self.ty(), 0)).collect();
            // Rows past the end recompute the last row; their stores are skipped.
            let row = |r: u32| if rows == 1 { x0 } else { x0 + (i0 + r).min(s.m - 1) * s.am };
            b.if_(j.lt(s.n), || {
                if run > 1 && along_k {
                    b.for_(slice * run, s.k, slices * run, |k| {
                        let v = b.load_run(w, w0 + k, run);
                        for (r, acc) in acc.iter().enumerate() {
                            let at = row(r as u32);
                            let x = match x_runs {
                                true => b.load_run(a, at + k, run),
                                false => (0..run).map(|e| b.load(a, at + (k + e) * s.ak)).collect(),
                            };
                            acc.set(x.iter().zip(&v).fold(acc.get(), |sum, (x, v)| x.mul_add(*v, sum)));
                        }
                    });
                    return;
                }
                if run > 1 {
                    b.for_(slice, s.k, slices, |k| {
                        let v = b.load_run(w, w0 + k * s.bk, run);
                        for (r, acc) in acc.chunks(run as usize).enumerate() {
                            let x = b.load(a, row(r as u32) + k * s.ak);
                            acc.iter().zip(&v).for_each(|(acc, v)| acc.set(x.mul_add(*v, acc.get())));
                        }
                    });
                    return;
                }
                b.for_(slice, s.k, slices, |k| {
                    let v = b.load(w, w0 + k * s.bk);
                    for (r, acc) in acc.iter().enumerate() {
                        let i = i0 + r;
                        let x = b.load_if(a, x0 + i * s.am + k * s.ak, i.lt(s.m));
                        acc.set(x.mul_add(v, acc.get()));
                    }
                });
            });
            for (r, acc) in acc.iter().enumerate() {
                scratch.store(slice * columns + c + r as u32 * n_items, acc.get());
            }
            b.barrier();
            let mut half = slices / 2;
            while half > 0 {
                b.if_(slice.lt(half), || {
                    for q in 0..rows * each {
                        let at = slice * columns + c + q * n_items;
                        let other = at + half * columns;
                        let sum = scratch.load(at) + scratch.load(other);
                        scratch.store(at, sum);
                    }
                });
                b.barrier();
                half /= 2;
            }
            b.if_(slice.equals(0).and(j.lt(s.n)), || {
                for r in 0..rows {
                    let i = i0 + r;
                    b.if_(i.lt(s.m), || {
                        for e in 0..each {
                            let v = scratch.load(c + (r * each + e) * n_items);
                            b.store(y, bt * (s.m * s.n) + i * ym + (j + e) * yn, v);
                        }
                    });
                }
            });
        });
        fill(&mut args, p, class);
        args.int("ym", p.ym as i64).int("yn", p.yn as i64);
        let groups = p.m.div_ceil(rows as usize) * p.n.div_ceil((columns * each) as usize) * p.batches();
        single(b, &args, groups, self.caps)
    }

    /// For CPUs, if rows of the right operand are contiguous: a block of rows and columns per work-item.
    /// Inner loops run over consecutive columns, so compilers vectorise them.
    fn block(
        &self,
        p: &Problem,
        mut args: Args,
        rows: u32,
        columns: u32,
        wg: u32,
    ) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_block", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let acc = b.private(self.ty(), rows * columns);
        let (gm, gn) = (b.let_(s.m.div_ceil(rows)), b.let_(s.n.div_ceil(columns)));
        let at = b.linear_id();
        b.if_(at.lt(gm * gn * s.batches()), || {
            let (bt, tile) = (b.let_(at.idiv(gm * gn)), b.let_(at.imod(gm * gn)));
            let (i0, j0) = (b.let_(tile.idiv(gn) * rows), b.let_(tile.imod(gn) * columns));
            let (x0, w0) = s.starts(&b, bt);
            let w0 = b.let_(w0 + j0);
            // Rows past the end recompute the last row; their stores are skipped.
            let row: Vec<_> = (0..rows).map(|r| b.let_(x0 + (i0 + r).min(s.m - 1) * s.am)).collect();
            let body = |end: E<'_>| {
                b.for_(0, rows * columns, 1, |q| acc.store(q, 0));
                b.for_(0, s.k, 1, |k| {
                    let from = b.let_(w0 + k * s.bk);
                    let x: Vec<_> = row.iter().map(|r| b.load(a, *r + k * s.ak)).collect();
                    b.for_(0, end, 1, |j| {
                        let v = b.load(w, from + j);
                        for (r, x) in x.iter().enumerate() {
                            let at = j + r as u32 * columns;
                            acc.store(at, x.mul_add(v, acc.load(at)));
                        }
                    });
                });
                for r in 0..rows {
                    b.if_((i0 + r).lt(s.m), || {
                        let to = b.let_((bt * s.m + i0 + r) * s.n + j0);
                        b.for_(0, end, 1, |j| b.store(y, to + j, acc.load(j + r * columns)));
                    });
                }
            };
            let left = b.let_(s.n - j0);
            b.if_else(left.ge(columns), || body(b.index(columns as i64)), || body(left));
        });
        fill(&mut args, p, class);
        let blocks = p.m.div_ceil(rows as usize) * p.n.div_ceil(columns as usize) * p.batches();
        single(b, &args, blocks.div_ceil(wg as usize), self.caps)
    }

    /// For CPUs, if both operands are contiguous along K: one output per work-item, accumulated in `width`
    /// partial sums, which compilers map to vector lanes.
    fn dot(&self, p: &Problem, mut args: Args, width: u32, wg: u32) -> Result<Lowered, Declined> {
        let class = p.rank_class();
        let b = Builder::with_index("matmul_dot", [wg, 1, 1], self.ix);
        let (a, w, y) = self.buffers(&b);
        let s = Shape::declare(&b, class);
        let lanes = b.private(self.ty(), width);
        let at = b.linear_id();
        b.if_(at.lt(s.batches() * s.m * s.n), || {
            let (row, j) = (b.let_(at.idiv(s.n)), b.let_(at.imod(s.n)));
            let (x0, w0) = s.starts(&b, row.idiv(s.m));
            let (x0, w0) = (b.let_(x0 + row.imod(s.m) * s.am), b.let_(w0 + j * s.bn));
            b.for_(0, width, 1, |l| lanes.store(l, 0));
            let whole = b.let_(s.k.idiv(width) * width);
            b.for_(0, whole, width, |k| {
                let (x1, w1) = (b.let_(x0 + k), b.let_(w0 + k));
                b.for_(0, width, 1, |l| {
                    let (x, v) = (b.load(a, x1 + l), b.load(w, w1 + l));
                    lanes.store(l, x.mul_add(v, lanes.load(l)));
                });
            });
            let acc = b.var_of(self.ty(), 0);
            b.for_(whole, s.k, 1, |k| {
                let (x, v) = (b.load(a, x0 + k), b.load(w, w0 + k));
                acc.set(x.mul_add(v, acc.get()));
            });
            b.for_(0, width, 1, |l| acc.set(acc.get() + lanes.load(l)));
            b.store(y, at, acc.get());
        });
        fill(&mut args, p, class);
        single(b, &args, (p.batches() * p.m * p.n).div_ceil(wg as usize), self.caps)
    }
}

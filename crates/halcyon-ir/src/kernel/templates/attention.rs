//! Attention in one pass over the keys with a running maximum and sum, so that no score matrix is stored
//! (Milakov and Gimelshein 2018; Dao et al. 2022).
//!
//! There are five kernels. CPUs use one work-item per query. On GPUs, few queries use `attention_split.rs`,
//! or, if the device cannot run that, up to two queries use a workgroup each with one key per work-item.
//! Longer prompts use `attention_matrix.rs` if the device has matrix units, else tiles of queries and keys in
//! workgroup memory. The query heads that share a key head are rows of one tile. A query whose keys are all
//! masked gives NaN, as the definition does. A tile does not read keys that lie past the causal limit of all
//! its queries.

use super::attention_matrix::{self as matrix, Tile as MatrixTile};
use super::attention_split::{self as split, Split};
use super::common::*;
use crate::dtype::{DType, Scalar};
use crate::kernel::ir::{Reduce, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::kernel::{Buf, Builder, E, Var};
use crate::op::Op;
use crate::target::{Caps, Declined, Operand};

const NEG_INF: f64 = f64::NEG_INFINITY;

/// Kernels for the composite `attention` (attributes `causal`, `scale`): q `[b, h, sq, d]`, k and v `[b, hk,
/// sk, d]` of one float type, with `d` up to 256, and optionally an additive mask that broadcasts to `[b, h,
/// sq, sk]` and has the same compute type. Rows of q, k and v must be contiguous; their other strides are
/// free.
///
/// # Errors
/// Declines longer rows and values whose width differs from the keys'. Declines with `needs_dense` if rows
/// are not contiguous.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let cx = context(op, inputs, outputs, caps)?;
    cx.build(cx.default(), inputs, outputs)
}

/// Like [`lower`], for one of the variants in [`choices`].
///
/// # Errors
/// As [`lower`], and for a variant of another template.
pub fn lower_as(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    context(op, inputs, outputs, caps)?.build(Form::of(v)?, inputs, outputs)
}

/// The kernels that the device can run.
///
/// # Errors
/// As [`lower`].
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let cx = context(op, inputs, outputs, caps)?;
    let forms = cx.forms().into_iter().filter(|f| cx.legal(*f)).map(Form::variant);
    let all = Choices::new(cx.key(), cx.default().variant(), forms, Tolerance::Sums(cx.p.sk + cx.p.d));
    Ok(all.on_matrix_units(matrix::unit_of(&cx)))
}

fn context<'c>(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &'c Caps) -> Result<Cx<'c>, Declined> {
    let c = match op {
        Op::Composite(c) if &*c.name == "attention" => c,
        _ => return Err(Declined::because(format!("attention: got {}", op.name()))),
    };
    arity("attention", inputs, outputs, 3..=4)?;
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
enum Form {
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

impl Form {
    fn variant(self) -> Variant {
        match self {
            Form::Item { items, keys } => Variant::new("item", &[("items", items), ("keys", keys)]),
            Form::Key => Variant::new("key", &[]),
            Form::Split(s) => s.variant(),
            Form::Tiled(t) => Variant::new("tiled", &[("queries", t.queries), ("keys", t.keys)]),
            Form::Matrix(t) => t.variant(),
        }
    }

    fn of(v: &Variant) -> Result<Form, Declined> {
        Ok(match &*v.kernel {
            "item" => Form::Item { items: v.number("items")?, keys: v.number("keys")? },
            "key" => Form::Key,
            "split" => Form::Split(Split::of(v)?),
            "tiled" => Form::Tiled(Tile { queries: v.number("queries")?, keys: v.number("keys")? }),
            "matrix" => Form::Matrix(MatrixTile::of(v)?),
            _ => return Err(v.unknown("attention")),
        })
    }
}

/// An additive mask: its type, and its strides over batch, head, query and key.
pub(super) struct Mask {
    pub dtype: DType,
    pub strides: [isize; 4],
}

pub(super) struct Problem {
    pub b: usize,
    pub hk: usize,
    /// Query heads per key head.
    pub shared: usize,
    pub sq: usize,
    pub sk: usize,
    pub d: usize,
    /// Row length that the kernel is built for.
    pub width: u32,
    pub causal: bool,
    pub scale: f64,
    /// Strides over batch, head and position, of q, k and v.
    pub strides: [[isize; 3]; 3],
    /// Offsets of q, k and v.
    pub offsets: [isize; 3],
    pub mask: Option<Mask>,
    /// Whether rows of q, and rows of k and v, can be read 16 bytes at a time.
    pub runs: [bool; 2],
}

impl Problem {
    fn new(inputs: &[Operand], causal: bool, scale: f64) -> Result<Problem, Declined> {
        let [q, k, v] = [0, 1, 2].map(|i| &inputs[i].view);
        let ty = Ty::of(inputs[0].dtype);
        let types = inputs[..3].iter().all(|i| i.dtype == inputs[0].dtype)
            && inputs.iter().all(|i| Ty::of(i.dtype) == ty);
        if [q, k, v].iter().any(|v| v.rank() != 4) || !types {
            return Err(Declined::because("attention: operands of rank 4 and of one type"));
        }
        let (b, h, sq, d) = (q.shape[0], q.shape[1], q.shape[2], q.shape[3]);
        let (hk, sk) = (k.shape[1], k.shape[2]);
        if v.shape != k.shape || k.shape[0] != b || k.shape[3] != d || hk == 0 || h % hk != 0 {
            return Err(Declined::because(format!(
                "attention: q {:?}, k {:?}, v {:?}",
                q.shape, k.shape, v.shape
            )));
        }
        let width = match d {
            0..=64 => 64,
            65..=128 => 128,
            129..=256 => 256,
            _ => {
                return Err(Declined::because(format!("attention: rows of {d}, at most 256 are taken")));
            }
        };
        let scattered: Vec<usize> = (0..3).filter(|&i| d > 1 && inputs[i].view.strides[3] != 1).collect();
        if !scattered.is_empty() {
            return Err(Declined::needs_dense(scattered));
        }
        let mask = match inputs.get(3).map(|m| (m.dtype, &m.view)) {
            None => None,
            Some((dtype, m)) => {
                let full = [b, h, sq, sk];
                let lead = 4usize.checked_sub(m.rank());
                let fits =
                    lead.is_some_and(|l| (0..m.rank()).all(|i| m.shape[i] == 1 || m.shape[i] == full[l + i]));
                if !fits {
                    return Err(Declined::because(format!("attention: a mask of {:?}", m.shape)));
                }
                let s = m.expand(&full).strides;
                Some(Mask { dtype, strides: [s[0], s[1], s[2], s[3]] })
            }
        };
        Ok(Problem {
            b,
            hk,
            shared: h / hk,
            sq,
            sk,
            d,
            width,
            causal,
            scale,
            strides: [q, k, v].map(|v| [v.strides[0], v.strides[1], v.strides[2]]),
            offsets: [q, k, v].map(|v| v.offset),
            mask,
            runs: split::runs(inputs),
        })
    }

    /// Whether the matrix-unit kernel applies the scale to the distances from the maximum instead of to the
    /// scores. This requires no mask and a positive scale, which keeps the order.
    pub fn late(&self) -> bool {
        self.mask.is_none() && self.scale > 0.0
    }

    pub fn fill(&self, args: &mut Args) {
        args.int("bh", (self.b * self.hk) as i64).int("hk", self.hk as i64);
        args.int("shared", self.shared as i64).int("sq", self.sq as i64);
        args.int("sk", self.sk as i64).int("d", self.d as i64);
        for (name, s) in ["q", "k", "v"].into_iter().zip(&self.strides) {
            args.ints(name, s.map(|s| s as i64));
        }
        if let Some(m) = &self.mask {
            args.ints("m", m.strides.map(|s| s as i64));
        }
        args.float("scale", self.scale);
    }
}

/// Queries and keys of a tile. A workgroup of 128 work-items computes it.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tile {
    queries: u32,
    keys: u32,
}

const TILE_ITEMS: u32 = 128;

impl Tile {
    fn choose(cx: &Cx<'_>) -> Option<Tile> {
        [(16, 32), (8, 16)].map(|(queries, keys)| Tile { queries, keys }).into_iter().find(|t| t.legal(cx))
    }

    fn legal(self, cx: &Cx<'_>) -> bool {
        let words = (self.queries + self.keys) * (cx.p.width + 1) + 2 * self.queries * (self.keys + 1);
        // Each work-item keeps its columns in variables; more than sixteen would spill.
        let columns = cx.p.width * self.queries / TILE_ITEMS;
        // The work-items of one query share its keys and columns evenly.
        let team = TILE_ITEMS / self.queries;
        let even = self.keys.is_multiple_of(team) && cx.p.width.is_multiple_of(team);
        even && columns <= 16 && cx.caps.max_workgroup >= TILE_ITEMS && cx.fits(words)
    }
}

pub(super) struct Cx<'c> {
    pub p: Problem,
    pub dtype: DType,
    pub ty: Ty,
    pub ix: Ty,
    pub caps: &'c Caps,
}

/// Buffers and parameters common to all kernels.
pub(super) struct Io<'a> {
    pub b: &'a Builder,
    pub q: Buf,
    pub k: Buf,
    pub v: Buf,
    pub mask: Option<Buf>,
    pub y: Buf,
    pub bh: E<'a>,
    pub hk: E<'a>,
    pub shared: E<'a>,
    pub sq: E<'a>,
    pub sk: E<'a>,
    pub d: E<'a>,
    pub qs: Vec<E<'a>>,
    pub ks: Vec<E<'a>>,
    pub vs: Vec<E<'a>>,
    pub ms: Vec<E<'a>>,
    pub scale: E<'a>,
    pub causal: bool,
}

/// The position of one query's row.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    /// Start of the row in q, in the mask and in the result.
    pub q: E<'a>,
    pub mask: E<'a>,
    pub y: E<'a>,
    /// Number of keys that the query sees; may be negative.
    pub keys: E<'a>,
}

impl<'a> Io<'a> {
    fn declare(b: &'a Builder, cx: &Cx<'_>) -> Io<'a> {
        Io::declare_into(b, cx, cx.dtype)
    }

    /// Like `declare`, with a result of type `out`.
    pub fn declare_into(b: &'a Builder, cx: &Cx<'_>, out: DType) -> Io<'a> {
        let d = cx.dtype;
        let (q, k, v) = (b.input(d), b.input(d), b.input(d));
        let mask = cx.p.mask.as_ref().map(|m| b.input(m.dtype));
        let y = b.output(out);
        Io {
            b,
            q,
            k,
            v,
            mask,
            y,
            bh: b.size("bh"),
            hk: b.size("hk"),
            shared: b.size("shared"),
            sq: b.size("sq"),
            sk: b.size("sk"),
            d: b.size("d"),
            qs: sizes(b, "q", 3),
            ks: sizes(b, "k", 3),
            vs: sizes(b, "v", 3),
            ms: sizes(b, "m", if mask.is_some() { 4 } else { 0 }),
            scale: b.param("scale", cx.ty),
            causal: cx.p.causal,
        }
    }

    /// Offsets of the keys and values of key head `bk`, counted over the batch.
    pub fn heads(&self, bk: E<'a>) -> (E<'a>, E<'a>) {
        let (n, h) = (self.b.let_(bk.idiv(self.hk)), self.b.let_(bk.imod(self.hk)));
        let at = |s: &[E<'a>]| self.b.let_(n * s[0] + h * s[1]);
        (at(&self.ks), at(&self.vs))
    }

    /// Row `r` of the queries of key head `bk`, ordered by head, then position.
    pub fn query(&self, bk: E<'a>, r: E<'a>) -> Query<'a> {
        let b = self.b;
        let (n, i) = (b.let_(bk.idiv(self.hk)), b.let_(r.imod(self.sq)));
        let h = b.let_(bk.imod(self.hk) * self.shared + r.idiv(self.sq));
        let mask = match &self.ms[..] {
            [m0, m1, m2, _] => b.let_(n * *m0 + h * *m1 + i * *m2),
            _ => b.index(0),
        };
        let seen = if self.causal { (i + 1 + self.sk - self.sq).min(self.sk) } else { self.sk };
        Query {
            q: b.let_(n * self.qs[0] + h * self.qs[1] + i * self.qs[2]),
            mask,
            y: b.let_(((n * self.hk * self.shared + h) * self.sq + i) * self.d),
            keys: b.let_(seen),
        }
    }

    /// The score of a key from its product with the query; -inf for keys that the query does not see.
    pub fn score(&self, q: &Query<'a>, key: E<'a>, dot: E<'a>) -> E<'a> {
        let seen = key.lt(q.keys);
        let mut s = dot * self.scale;
        if let (Some(m), Some(step)) = (self.mask, self.ms.get(3)) {
            s = s + self.b.load_if(m, q.mask + key * *step, seen);
        }
        self.b.let_(seen.select(s, NEG_INF))
    }
}

/// The running maximum and sum of a softmax.
#[derive(Clone, Copy)]
struct Running<'a> {
    b: &'a Builder,
    top: Var<'a>,
    sum: Var<'a>,
}

impl<'a> Running<'a> {
    fn new(b: &'a Builder, ty: Ty) -> Running<'a> {
        Running { b, top: b.var_of(ty, NEG_INF), sum: b.var_of(ty, 0) }
    }

    /// Updates the maximum with that of further scores and rescales the sum. Returns the shift to subtract
    /// from scores and the factor for earlier sums.
    fn raise(self, top: E<'a>) -> (E<'a>, E<'a>) {
        let old = self.top.get();
        let new = self.b.let_(old.max(top));
        // If all scores so far are -inf, a finite shift gives weights of 0; -inf minus -inf would give NaN.
        let shift = self.b.let_(new.equals(NEG_INF).select(self.b.constant(new.ty(), 0), new));
        let decay = self.b.let_((old - shift).exp());
        self.top.set(new);
        self.sum.set(self.sum.get() * decay);
        (shift, decay)
    }

    fn add(self, weight: E<'a>) {
        self.sum.set(self.sum.get() + weight);
    }
}

impl Cx<'_> {
    pub(super) fn fits(&self, words: u32) -> bool {
        words as usize * self.ty.size() <= self.caps.workgroup_memory as usize
    }

    pub(super) fn queries(&self) -> usize {
        self.p.b * self.p.hk * self.p.shared * self.p.sq
    }

    fn default(&self) -> Form {
        let item = Form::Item { items: items(if self.caps.is_cpu { 4 } else { 64 }, self.caps), keys: 16 };
        if self.caps.is_cpu {
            return item;
        }
        if let Some(s) = self.split_default().filter(|_| self.few()) {
            return Form::Split(s);
        }
        if self.p.shared * self.p.sq <= 2 && self.legal(Form::Key) {
            return Form::Key;
        }
        if let Some(t) = matrix::choose(self) {
            return Form::Matrix(t);
        }
        Tile::choose(self).map_or(item, Form::Tiled)
    }

    /// Candidates for measurement, not all legal on the device.
    fn forms(&self) -> Vec<Form> {
        if self.caps.is_cpu {
            let blocks = [8, 16, 32].map(|keys| [1, 4, 16].map(|items| Form::Item { items, keys }));
            return blocks.concat();
        }
        let tiles = [(4, 32), (8, 16), (8, 32), (16, 16), (16, 32), (32, 32)];
        let mut all: Vec<Form> = tiles.map(|(queries, keys)| Form::Tiled(Tile { queries, keys })).to_vec();
        all.push(Form::Key);
        if self.few() {
            all.extend(self.splits().into_iter().map(Form::Split));
        }
        all.extend([32, 64, 128].map(|items| Form::Item { items, keys: 16 }));
        all.extend(matrix::tiles().map(Form::Matrix));
        all
    }

    fn legal(&self, f: Form) -> bool {
        match f {
            Form::Item { items, .. } => items <= self.caps.max_workgroup,
            Form::Key => self.p.width <= self.caps.max_workgroup && self.fits(3 * self.p.width),
            Form::Split(s) => self.few() && self.split_legal(s),
            Form::Tiled(t) => t.legal(self),
            Form::Matrix(t) => matrix::legal(self, t),
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
            // Properties that change the program's text, so that a measurement is valid for all calls of the
            // key.
            match p.runs {
                [q, true] if self.few() =>
                    format!(" runs{}{}", u8::from(q), if p.sk >= 2 * split::LEAST { " long" } else { "" }),
                _ if self.few() && p.sk >= 2 * split::LEAST => " long".into(),
                _ => String::new(),
            },
            matrix::text(self),
        )
    }

    fn build(&self, f: Form, inputs: &[Operand], outputs: &[Operand]) -> Result<Lowered, Declined> {
        let mut args = Args::of(inputs, outputs);
        self.p.fill(&mut args);
        match f {
            Form::Item { items, keys } => self.by_item(args, items, keys),
            Form::Key => self.by_key(args),
            Form::Split(s) => self.split(inputs, outputs, s),
            Form::Tiled(t) => self.tiled(args, t),
            Form::Matrix(t) => self.matrix(args, &outputs[0], t),
        }
    }

    /// One query per work-item, keys in blocks of `block`. Each product with the query is accumulated in
    /// `block` partial sums.
    fn by_item(&self, args: Args, wg: u32, block: u32) -> Result<Lowered, Declined> {
        let b = Builder::with_index("attention_item", [wg, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let (acc, weight) = (b.private(self.ty, self.p.width), b.private(self.ty, block));
        let lanes = b.private(self.ty, block);
        let at = b.linear_id();
        let rows = b.let_(io.shared * io.sq);
        b.if_(at.lt(io.bh * rows), || {
            let bk = b.let_(at.idiv(rows));
            let q = io.query(bk, b.let_(at.imod(rows)));
            let (k0, v0) = io.heads(bk);
            let run = Running::new(&b, self.ty);
            b.for_(0, io.d, 1, |j| acc.store(j, 0));
            let whole = b.let_(io.d.idiv(block) * block);
            b.for_(0, q.keys, block, |first| {
                let count = b.let_((q.keys - first).min(block));
                let top = b.var_of(self.ty, NEG_INF);
                b.for_(0, count, 1, |c| {
                    let row = b.let_(k0 + (first + c) * io.ks[2]);
                    let dot = b.var_of(self.ty, 0);
                    b.for_(0, block, 1, |l| lanes.store(l, 0));
                    b.for_(0, whole, block, |j| {
                        b.for_(0, block, 1, |l| {
                            let (x, y) = (b.load(io.q, q.q + j + l), b.load(io.k, row + j + l));
                            lanes.store(l, x.mul_add(y, lanes.load(l)));
                        });
                    });
                    b.for_(whole, io.d, 1, |j| {
                        let (x, y) = (b.load(io.q, q.q + j), b.load(io.k, row + j));
                        dot.set(x.mul_add(y, dot.get()));
                    });
                    b.for_(0, block, 1, |l| dot.set(dot.get() + lanes.load(l)));
                    let s = io.score(&q, first + c, dot.get());
                    weight.store(c, s);
                    top.set(top.get().max(s));
                });
                let (shift, decay) = run.raise(top.get());
                b.for_(0, io.d, 1, |j| acc.store(j, acc.load(j) * decay));
                b.for_(0, count, 1, |c| {
                    let w = b.let_((weight.load(c) - shift).exp());
                    run.add(w);
                    let row = b.let_(v0 + (first + c) * io.vs[2]);
                    b.for_(0, io.d, 1, |j| {
                        let v = b.load(io.v, row + j);
                        acc.store(j, w.mul_add(v, acc.load(j)));
                    });
                });
            });
            let sum = b.let_(run.sum.get());
            b.for_(0, io.d, 1, |j| b.store(io.y, q.y + j, acc.load(j) / sum));
        });
        single(b, &args, self.queries().div_ceil(wg as usize), self.caps)
    }

    /// One query per workgroup: one key per work-item for the scores, one column per work-item for the sums.
    fn by_key(&self, args: Args) -> Result<Lowered, Declined> {
        let n = self.p.width;
        let b = Builder::with_index("attention_key", [n, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let (query, weight) = (b.local(self.ty, n), b.local(self.ty, n));
        let scratch = b.local(self.ty, n);
        let g = b.let_(b.linear_group());
        let rows = b.let_(io.shared * io.sq);
        b.if_(g.lt(io.bh * rows), || {
            let me = b.local_id(0);
            let bk = b.let_(g.idiv(rows));
            let q = io.query(bk, b.let_(g.imod(rows)));
            let (k0, v0) = io.heads(bk);
            query.store(me, b.load_if(io.q, q.q + me, me.lt(io.d)));
            b.barrier();
            let run = Running::new(&b, self.ty);
            let acc = b.var_of(self.ty, 0);
            b.for_(0, q.keys, n, |first| {
                let key = b.let_(first + me);
                let dot = b.var_of(self.ty, 0);
                b.if_(key.lt(q.keys), || {
                    let row = b.let_(k0 + key * io.ks[2]);
                    b.for_(0, io.d, 1, |j| {
                        dot.set(query.load(j).mul_add(b.load(io.k, row + j), dot.get()));
                    });
                });
                let s = io.score(&q, key, dot.get());
                let (shift, decay) = run.raise(b.group_reduce(Reduce::Max, s, scratch));
                let w = b.let_((s - shift).exp());
                weight.store(me, w);
                // The barriers of the reduction also order the weights.
                run.add(b.group_reduce(Reduce::Add, w, scratch));
                acc.set(acc.get() * decay);
                b.if_(me.lt(io.d), || {
                    b.for_(0, (q.keys - first).min(n), 1, |c| {
                        let v = b.load(io.v, v0 + (first + c) * io.vs[2] + me);
                        acc.set(weight.load(c).mul_add(v, acc.get()));
                    });
                });
                b.barrier();
            });
            b.if_(me.lt(io.d), || b.store(io.y, q.y + me, acc.get() / run.sum.get()));
        });
        single(b, &args, self.queries(), self.caps)
    }

    /// A tile of queries per workgroup. Keys, then values, pass through workgroup memory.
    fn tiled(&self, args: Args, t: Tile) -> Result<Lowered, Declined> {
        let (n, pitch, row_pitch) = (TILE_ITEMS, self.p.width + 1, t.keys + 1);
        // Work-items per query, and columns of each work-item.
        let team = n / t.queries;
        let columns = self.p.width / team;
        let b = Builder::with_index("attention_tiled", [n, 1, 1], self.ix);
        let io = Io::declare(&b, self);
        let queries = b.local(self.ty, t.queries * pitch);
        let tile = b.local(self.ty, t.keys * pitch);
        let (scores, weights) =
            (b.local(self.ty, t.queries * row_pitch), b.local(self.ty, t.queries * row_pitch));
        let rows = b.let_(io.shared * io.sq);
        let tiles = b.let_(rows.div_ceil(t.queries));
        let g = b.let_(b.linear_group());
        b.if_(g.lt(io.bh * tiles), || {
            let lid = b.local_id(0);
            let (bk, r0) = (b.let_(g.idiv(tiles)), b.let_(g.imod(tiles) * t.queries));
            let (k0, v0) = io.heads(bk);
            let (r, m) = (b.let_(lid.idiv(team)), b.let_(lid.imod(team)));
            // Rows past the end repeat the last row; their stores are skipped.
            let mine = io.query(bk, b.let_((r0 + r).min(rows - 1)));
            for step in 0..columns {
                let j = m + step * team;
                queries.store(r * pitch + j, b.load_if(io.q, mine.q + j, j.lt(io.d)));
            }
            // Number of keys that any query of the tile sees.
            let end = if io.causal {
                let last = b.let_((r0 + (t.queries - 1)).min(rows - 1));
                let one_head = r0.idiv(io.sq).equals(last.idiv(io.sq));
                let i = one_head.select(last.imod(io.sq), io.sq - 1);
                b.let_((i + 1 + io.sk - io.sq).min(io.sk))
            } else {
                io.sk
            };
            let fill = |buf: Buf, start: E<'_>, stride: E<'_>, first: E<'_>| {
                for step in 0..(t.keys * self.p.width / n) {
                    let e = lid + step * n;
                    let (c, j) = (e.idiv(self.p.width), e.imod(self.p.width));
                    let key = first + c;
                    let v = b.load_if(buf, start + key * stride + j, key.lt(io.sk).and(j.lt(io.d)));
                    tile.store(c * pitch + j, v);
                }
            };
            let run = Running::new(&b, self.ty);
            let acc: Vec<_> = (0..columns).map(|_| b.var_of(self.ty, 0)).collect();
            b.for_(0, end, t.keys, |first| {
                b.barrier();
                fill(io.k, k0, io.ks[2], first);
                b.barrier();
                let dots: Vec<_> = (0..t.keys / team).map(|_| b.var_of(self.ty, 0)).collect();
                b.for_(0, io.d, 1, |j| {
                    let x = queries.load(r * pitch + j);
                    for (s, dot) in dots.iter().enumerate() {
                        let c = m + s as u32 * team;
                        dot.set(x.mul_add(tile.load(c * pitch + j), dot.get()));
                    }
                });
                let mut own = vec![];
                for (s, dot) in dots.iter().enumerate() {
                    let c = m + s as u32 * team;
                    let v = io.score(&mine, first + c, dot.get());
                    scores.store(r * row_pitch + c, v);
                    own.push((c, v));
                }
                b.barrier();
                let top = b.var_of(self.ty, NEG_INF);
                b.for_(0, t.keys, 1, |c| top.set(top.get().max(scores.load(r * row_pitch + c))));
                let (shift, decay) = run.raise(top.get());
                for (c, v) in own {
                    weights.store(r * row_pitch + c, (v - shift).exp());
                }
                fill(io.v, v0, io.vs[2], first);
                b.barrier();
                for a in &acc {
                    a.set(a.get() * decay);
                }
                b.for_(0, t.keys, 1, |c| {
                    let w = weights.load(r * row_pitch + c);
                    run.add(w);
                    for (s, a) in acc.iter().enumerate() {
                        let v = tile.load(c * pitch + m + s as u32 * team);
                        a.set(w.mul_add(v, a.get()));
                    }
                });
            });
            b.if_((r0 + r).lt(rows), || {
                for (s, a) in acc.iter().enumerate() {
                    let j = m + s as u32 * team;
                    b.if_(j.lt(io.d), || b.store(io.y, mine.y + j, a.get() / run.sum.get()));
                }
            });
        });
        let tiles = (self.p.shared * self.p.sq).div_ceil(t.queries as usize);
        single(b, &args, self.p.b * self.p.hk * tiles, self.caps)
    }
}

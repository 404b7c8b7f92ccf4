//! Attention over a paged cache of keys and values, in one loop over the positions with a running maximum and
//! sum.
//!
//! The kernels are batch-invariant: positions are taken in parts that are counted from position 0, and the
//! size of a part follows from the device and the sizes of the cache's rows. Positions that a row does not
//! see are not read. GPUs use one workgroup for a row and a few query heads that share a key head
//! (`group.rs`). For few rows, the parts are divided among workgroups, and a second kernel joins their
//! results with the arithmetic that one workgroup would use. CPUs, and devices with too little workgroup
//! memory, use one work-item per row and head (`item.rs`).

mod group;
mod item;

use super::blocks::Rows;
use super::common::{arity, unmasked};
use super::gather::checked;
use crate::DType;
use crate::blocks::BlockType;
use crate::composite::CompositeKind;
use crate::kernel::access::{Access, Template as Kernel};
use crate::kernel::ir::Ty;
use crate::kernel::lower::{Lowered, Template};
use crate::kernel::{Buf, Builder, E, Fault, Var};
use crate::ops::element_wise::ScalarOp;
use crate::ops::{CachedAttention, CachedAttentionSizes, Op};
use crate::target::{Caps, Declined, Operand};

/// Kernels for the composite `cached_attention`.
pub(crate) static TEMPLATE: Template = Template { lower, tuning: None };

const NEG_INF: f64 = f64::NEG_INFINITY;
/// The format of keys and values in u8, and the elements of its blocks that are read at a time.
const BLOCKS: BlockType = BlockType::Q8_0;
const RUN: usize = 8;

/// Lowers the composite `cached_attention`.
///
/// # Errors
/// Declines with `needs_dense` if rows of keys or values are not contiguous.
fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let c = match op {
        Op::Composite(c) if c.kind == CompositeKind::CachedAttention => c,
        _ => return Err(Declined::because(format!("cached_attention: got {}", op.name()))),
    };
    arity(&op.name(), inputs, outputs, 6..=7)?;
    unmasked(inputs)?;
    let (Some(options), Some(sizes)) = (c.cached_attention(), c.cached_attention_sizes(inputs, outputs))
    else {
        return Err(Declined::because("cached_attention: the operands have other types or shapes"));
    };
    let contiguous = |i: &usize| inputs[*i].view.shape[3] <= 1 || inputs[*i].view.strides[3] == 1;
    let bad: Vec<usize> = (1..3).filter(|i| !contiguous(i)).collect();
    if !bad.is_empty() {
        return Err(Declined::needs_dense(bad));
    }
    let p = Problem::new(inputs, &outputs[0], options, sizes);
    if p.reach == 0 || p.sequences == 0 || inputs[1].view.shape[0] == 0 {
        return Err(Declined::because("cached_attention: the cache is empty"));
    }
    match group::Layout::choose(&p, caps) {
        Some(l) => group::lower(&p, l, caps),
        None => item::lower(&p, caps),
    }
}

/// Sizes and operands of a call.
struct Problem<'o> {
    inputs: &'o [Operand],
    out: &'o Operand,
    options: CachedAttention,
    rows: usize,
    heads: usize,
    /// Query heads that share a key head.
    shared: usize,
    /// Sizes of a key and of a value.
    key: usize,
    value: usize,
    sequences: usize,
    /// Positions that a row of the table can address.
    reach: usize,
    /// Elements of a key, and of a value, that are read at a time.
    runs: [u32; 2],
    /// Whether keys, and values, can be read 16 bytes at a time.
    vectors: [bool; 2],
}

impl<'o> Problem<'o> {
    fn new(
        inputs: &'o [Operand],
        out: &'o Operand,
        options: CachedAttention,
        s: CachedAttentionSizes,
    ) -> Problem<'o> {
        let runs = [1, 2].map(|i| match inputs[i].dtype {
            DType::U8 => RUN,
            other => 16 / other.size(),
        });
        let vectors = [1, 2].map(|i| {
            let (v, run) = (&inputs[i].view, runs[i - 1]);
            let placed = |k: usize| v.shape[k] == 1 || v.strides[k] % run as isize == 0;
            v.shape[3].is_multiple_of(run) && v.offset % run as isize == 0 && (0..3).all(placed)
        });
        Problem {
            inputs,
            out,
            options,
            rows: s.rows,
            heads: s.heads,
            shared: s.heads / s.key_heads,
            key: s.key,
            value: s.value,
            sequences: s.sequences,
            reach: s.columns * s.page,
            runs: runs.map(|n| n as u32),
            vectors,
        }
    }

    fn operands(&self) -> Vec<&'o Operand> {
        self.inputs.iter().chain([self.out]).collect()
    }

    /// Vectors of four elements of a key and of a value, both padded to whole reads.
    fn quads(&self) -> [u32; 2] {
        let [k, v] = self.runs;
        [(self.key, k), (self.value, v)].map(|(n, run)| (n as u32).next_multiple_of(run) / 4)
    }

    /// Largest divisor of `shared` that is at most `most`.
    fn together(&self, most: usize) -> usize {
        (1..=most).rev().find(|n| self.shared.is_multiple_of(*n)).unwrap_or(1)
    }
}

/// Keys or values.
struct Cache<'a> {
    place: Place<'a>,
    size: E<'a>,
    run: u32,
}

/// Where keys or values are.
enum Place<'a> {
    Floats {
        buf: Buf,
        /// Strides of pages, heads and positions.
        strides: [E<'a>; 3],
        vectors: bool,
    },
    Blocks(Rows<'a>),
}

impl<'a> Cache<'a> {
    fn declare(t: &'a Kernel, o: &Operand, name: &str, run: u32, vectors: bool) -> Cache<'a> {
        if o.dtype == DType::U8 {
            let rows = Rows::declare(t, name, BLOCKS, o);
            let size = BLOCKS.elements_of(o.view.shape[3]).unwrap_or(0);
            return Cache { place: Place::Blocks(rows), size: t.size(&format!("{name}_size"), size), run };
        }
        let buf = t.b.buffer(o.dtype, false);
        t.value(&format!("o{}", buf.id.0), o.view.offset as i64);
        let strides = [0, 1, 2].map(|k| t.size(&format!("{name}s{k}"), o.view.strides[k] as i64));
        let place = Place::Floats { buf, strides, vectors };
        Cache { place, size: t.size(&format!("{name}_size"), o.view.shape[3]), run }
    }

    /// Where a row starts, in elements or in bytes.
    fn at(&self, b: &'a Builder, page: E<'a>, head: E<'a>, slot: E<'a>) -> E<'a> {
        match &self.place {
            Place::Floats { strides: [p, h, s], .. } => b.let_(page * *p + head * *h + slot * *s),
            Place::Blocks(rows) => rows.row(&[page, head, slot]),
        }
    }

    /// One read: the elements from `first` on of the row at `row`, as vectors of four. Elements past the
    /// row's end are zero.
    fn load(&self, b: &'a Builder, row: E<'a>, first: E<'a>) -> Vec<E<'a>> {
        let x: Vec<E<'a>> = match &self.place {
            Place::Floats { buf, vectors: true, .. } => b.load_run(*buf, row + first, self.run),
            Place::Floats { buf, .. } => {
                (0..self.run).map(|e| b.load_if(*buf, row + first + e, (first + e).lt(self.size))).collect()
            }
            // A row has whole blocks.
            Place::Blocks(rows) => {
                let elements = BLOCKS.row().elements as i64;
                let block = rows.block(row, b.let_(first.idiv(elements)));
                let strip = block.bytes(b.let_(first.imod(elements)), self.run as usize / 4);
                let scale = b.let_(strip.scale.to(Ty::F32x4));
                return (0..strip.words.len()).map(|i| b.let_(strip.codes(b, i) * scale)).collect();
            }
        };
        x.chunks(4).map(|x| b.let_(b.vector(x))).collect()
    }
}

/// The operands in a kernel.
struct Io<'a> {
    b: &'a Builder,
    q: Access<'a>,
    keys: Cache<'a>,
    values: Cache<'a>,
    table: Access<'a>,
    sequence: Access<'a>,
    position: Access<'a>,
    fault: Fault<'a>,
    /// Numbers of sequences, of pages, of positions of a page, and of positions that a row can address.
    sequences: E<'a>,
    pages: E<'a>,
    page: E<'a>,
    reach: E<'a>,
    window: Option<E<'a>>,
    scale: E<'a>,
    softcap: Option<E<'a>>,
}

/// A row of the queries.
struct Row<'a> {
    /// Whether the row is used.
    used: E<'a>,
    sequence: E<'a>,
    /// The positions that the row sees: from `first` to before `end`.
    first: E<'a>,
    end: E<'a>,
}

/// The operands, with the sinks and the buffer for the results: the temporary if the parts are divided among
/// workgroups.
fn declare<'a>(
    t: &'a Kernel,
    p: &Problem<'_>,
    parts: bool,
) -> (Io<'a>, Option<Access<'a>>, Option<Access<'a>>, Option<Buf>) {
    let (b, x) = (&t.b, p.inputs);
    let q = t.input(&x[0]);
    let keys = Cache::declare(t, &x[1], "k", p.runs[0], p.vectors[0]);
    let values = Cache::declare(t, &x[2], "v", p.runs[1], p.vectors[1]);
    let (table, sequence, position) = (t.input(&x[3]), t.input(&x[4]), t.input(&x[5]));
    let sinks = x.get(6).filter(|_| !parts).map(|o| t.input(o));
    let y = (!parts).then(|| t.output(p.out));
    let temp = parts.then(|| b.raw_buffer(crate::DType::F32, true));
    let fault = b.fault();
    let number = |name: &str, v: f64| {
        t.value(name, v);
        b.param(name, Ty::F32)
    };
    let io = Io {
        b,
        q,
        keys,
        values,
        table,
        sequence,
        position,
        fault,
        sequences: t.size("sequences", p.sequences),
        pages: t.size("pages", x[1].view.shape[0]),
        page: t.size("page", x[1].view.shape[2]),
        reach: t.size("reach", p.reach),
        window: p.options.window.map(|w| t.size("window", w.min(p.reach))),
        scale: number("scale", p.options.scale),
        softcap: p.options.softcap.map(|c| number("softcap", c)),
    };
    (io, sinks, y, temp)
}

impl<'a> Io<'a> {
    fn row(&self, row: E<'a>) -> Row<'a> {
        let b = self.b;
        let raw = self.position.load(b, &[row]).to(b.ix());
        let used = b.let_(raw.ge(0));
        b.if_(raw.ge(self.reach), || self.fault.set());
        let end = b.let_(used.select(raw.min(self.reach - 1) + 1, 0));
        let first = self.window.map_or(b.index(0), |w| b.let_((end - w).max(0)));
        // The sequence of an unused row is not checked.
        let sequence = used.select(self.sequence.load(b, &[row]), 0);
        let sequence = b.let_(checked(b, b.let_(sequence), self.sequences, self.fault));
        Row { used, sequence, first, end }
    }

    /// Where the key and the value of a position start, for a key head.
    fn place(&self, row: &Row<'a>, head: E<'a>, position: E<'a>) -> (E<'a>, E<'a>) {
        let b = self.b;
        let (n, slot) = (b.let_(position.idiv(self.page)), b.let_(position.imod(self.page)));
        let page = self.table.load(b, &[row.sequence, n]);
        let page = b.let_(checked(b, page, self.pages, self.fault));
        (self.keys.at(b, page, head, slot), self.values.at(b, page, head, slot))
    }

    /// A score, from the four partial sums of the product of query and key. The product with the last factor
    /// is a multiply-add: a compiler may contract a plain product with a later subtraction, in one kernel and
    /// not in another.
    fn score(&self, dot: E<'a>) -> E<'a> {
        let dot = (dot.lane(0) + dot.lane(1)) + (dot.lane(2) + dot.lane(3));
        self.b.let_(match self.softcap {
            Some(c) => self.b.op(ScalarOp::Tanh, &[dot * self.scale / c]).fma(c, 0.0),
            None => dot.fma(self.scale, 0.0),
        })
    }
}

/// The maximum, the sum and the weighted values of scores are kept relative to a shift: the maximum, or 0 if
/// all scores are -inf, since -inf minus -inf would be NaN.
fn shift<'a>(b: &'a Builder, top: E<'a>) -> E<'a> {
    b.let_(top.equals(NEG_INF).select(b.constant(Ty::F32, 0.0), top))
}

/// The running maximum and sum of a softmax whose scores arrive in parts.
#[derive(Clone, Copy)]
struct Running<'a> {
    b: &'a Builder,
    top: Var<'a>,
    sum: Var<'a>,
}

impl<'a> Running<'a> {
    fn new(b: &'a Builder) -> Running<'a> {
        Running { b, top: b.var_of(Ty::F32, NEG_INF), sum: b.var_of(Ty::F32, 0.0) }
    }

    /// Adds a part whose maximum is `top` and whose weights, relative to it, add up to `sum`. Returns the
    /// factors of the weighted values so far and of those of the part.
    fn join(self, top: E<'a>, sum: E<'a>) -> (E<'a>, E<'a>) {
        let b = self.b;
        let (old, new) = (self.top.get(), b.let_(self.top.get().max(top)));
        let shift = shift(b, new);
        let (before, after) = (b.let_((old - shift).exp()), b.let_((top - shift).exp()));
        self.top.set(new);
        self.sum.set(sum.fma(after, self.sum.get() * before));
        (before, after)
    }

    /// The factor and the divisor that turn the weighted values into the result. `sink` is a score without
    /// value.
    fn finish(self, sink: Option<E<'a>>) -> (E<'a>, E<'a>) {
        let b = self.b;
        let (top, sum) = (self.top.get(), self.sum.get());
        let Some(sink) = sink else { return (b.constant(Ty::F32, 1.0), sum) };
        let shift = shift(b, b.let_(top.max(sink)));
        let before = b.let_((top - shift).exp());
        (before, b.let_(sum.fma(before, (sink - shift).exp())))
    }
}

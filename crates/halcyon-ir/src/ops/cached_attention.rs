//! Attention over a paged cache of keys and values.

use super::composite::{CompositeGradient, CompositeKind, CompositeRow};
use super::count;
use crate::blocks::BlockType;
use crate::composite::{Attr, Composite, attrs, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::kernel::templates::cached::TEMPLATE;
use crate::shape::Dim;
use crate::target::Operand;

const NAME: &str = "cached_attention";

/// The format of keys and values in u8.
const BLOCKS: BlockType = BlockType::Q8_0;

pub(super) static CACHED_ATTENTION: CompositeRow = CompositeRow {
    name: NAME,
    has_builder: true,
    has_kernels: true,
    packs: false,
    summed: None,
    half: None,
    template: Some(&TEMPLATE),
    flops,
    gradient: CompositeGradient::Body,
};

/// Two products and a softmax over all positions that a table can address. Fewer are computed for rows at
/// earlier positions, which are known only in a run.
fn flops(c: &Composite, inputs: &[Operand], output: &Operand) -> u64 {
    let Some(s) = c.cached_attention_sizes(inputs, std::slice::from_ref(output)) else { return 0 };
    let keys = count(&[s.columns, s.page]);
    let each = (s.key as u64).saturating_mul(4).saturating_add(12);
    count(&[s.rows, s.heads]).saturating_mul(keys).saturating_mul(each)
}

/// What [`Graph::cached_attention`] computes beyond its operands.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CachedAttention {
    /// Factor of the scores.
    pub scale: f64,
    /// With `c`, a score `s` becomes `c tanh(s / c)`.
    pub softcap: Option<f64>,
    /// Number of positions that a row sees: its own and those before it. `None`: all.
    pub window: Option<usize>,
}

/// The operands of [`Graph::cached_attention`].
#[derive(Clone, Copy, Debug)]
pub struct CacheOperands {
    /// Keys `[pages, key heads, page, size]`: f32, f16, bf16, or u8 with the bytes of blocks of
    /// [`BlockType::Q8_0`] in place of the size.
    pub keys: NodeId,
    /// Values `[pages, key heads, page, value size]`, of one of the types of keys.
    pub values: NodeId,
    /// i32 `[sequences, n]`: the pages of each sequence, in the order of positions.
    pub table: NodeId,
    /// i32 `[rows]`: the sequence of each row of the queries.
    pub sequence: NodeId,
    /// i32 `[rows]`: the position of each row in its sequence. A negative position marks an unused row, whose
    /// result is 0.
    pub position: NodeId,
    /// f32 `[heads]`: a score per head that takes part in the softmax but has no value.
    pub sinks: Option<NodeId>,
}

/// The sizes of a call of the composite `cached_attention`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedAttentionSizes {
    /// Rows and heads of the queries.
    pub rows: usize,
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`.
    pub key_heads: usize,
    /// Elements of a key, and of a value.
    pub key: usize,
    pub value: usize,
    /// Number of pages, and positions per page.
    pub pages: usize,
    pub page: usize,
    /// Rows and columns of the table.
    pub sequences: usize,
    pub columns: usize,
}

impl Composite {
    /// The sizes of a call of `cached_attention`. `None` if the operands do not have the types and shapes of
    /// [`Graph::cached_attention`]: a composite of this name can be built with any body, so kernels check
    /// them here.
    pub fn cached_attention_sizes(
        &self,
        inputs: &[Operand],
        outputs: &[Operand],
    ) -> Option<CachedAttentionSizes> {
        let ([q, keys, values, table, sequence, position, sinks @ ..], [y]) = (inputs, outputs) else {
            return None;
        };
        // The elements in the last axis of keys or values.
        let elements = |o: &Operand, n: usize| match o.dtype {
            DType::U8 => BLOCKS.elements_of(n),
            DType::F32 | DType::F16 | DType::BF16 => Some(n),
            _ => None,
        };
        let is = |o: &Operand, dtype: DType, shape: &[usize]| o.dtype == dtype && o.view.shape[..] == *shape;
        let shapes = [q, keys, values, table].map(|o| &o.view.shape[..]);
        let [&[rows, heads, d], &[pages, key_heads, page, size], &[.., width], &[sequences, columns]] =
            shapes
        else {
            return None;
        };
        let (key, value) = (elements(keys, size)?, elements(values, width)?);
        let fits = key == d
            && values.view.shape[..] == [pages, key_heads, page, width]
            && key_heads > 0
            && heads.is_multiple_of(key_heads)
            && is(q, DType::F32, &[rows, heads, d])
            && is(table, DType::I32, &[sequences, columns])
            && [sequence, position].iter().all(|o| is(o, DType::I32, &[rows]))
            && sinks.len() <= 1
            && sinks.iter().all(|s| is(s, DType::F32, &[heads]))
            && is(y, DType::F32, &[rows, heads, value]);
        fits.then_some(CachedAttentionSizes {
            rows,
            heads,
            key_heads,
            key,
            value,
            pages,
            page,
            sequences,
            columns,
        })
    }

    /// The options of a composite `cached_attention`.
    pub fn cached_attention(&self) -> Option<CachedAttention> {
        let window = self.int("window").and_then(|w| usize::try_from(w).ok());
        Some(CachedAttention { scale: self.float("scale")?, softcap: self.float("softcap"), window })
    }
}

impl Graph {
    /// Attention of `q`, f32 `[rows, heads, size]`, over the cached positions of each row's sequence:
    /// `softmax(scores) values`, f32 `[rows, heads, value size]`. Row `i` sees the positions up to its own,
    /// at most [`CachedAttention::window`] of them. Consecutive query heads share a key head.
    ///
    /// Kernels of this composite are batch-invariant: the bits of a row depend only on its query and on the
    /// cached positions that it sees.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes do not match or are not known; [`Error::DType`] for other types.
    pub fn cached_attention(
        &mut self,
        q: NodeId,
        cache: CacheOperands,
        options: CachedAttention,
    ) -> Result<NodeId> {
        let CacheOperands { keys, values, table, sequence, position, sinks } = cache;
        let dtype_error = |dtype: DType, want: &str| Error::DType {
            op: NAME.into(),
            dtype,
            want: want.into(),
            at: Default::default(),
        };
        if self.dtype(q) != DType::F32 {
            return Err(dtype_error(self.dtype(q), "queries are f32").at(&self.span));
        }
        let kept = |d: DType| matches!(d, DType::F32 | DType::F16 | DType::BF16 | DType::U8);
        if let Some(d) = [keys, values].map(|x| self.dtype(x)).into_iter().find(|d| !kept(*d)) {
            let want = "keys and values are f32, f16, bf16, or u8 for blocks of q8_0";
            return Err(dtype_error(d, want).at(&self.span));
        }
        if let Some(i) = [table, sequence, position].into_iter().find(|i| self.dtype(*i) != DType::I32) {
            return Err(dtype_error(self.dtype(i), "tables and positions are i32").at(&self.span));
        }
        let known = |x: NodeId| self.shape(x).known();
        // The shape of keys or values, with elements in place of bytes.
        let cached = |x: NodeId| {
            let mut shape = known(x)?;
            if self.dtype(x) == DType::U8 {
                let last = shape.last_mut()?;
                *last = BLOCKS.elements_of(*last)?;
            }
            Some(shape)
        };
        let all = (known(q), cached(keys), cached(values), known(table), known(sequence), known(position));
        let fits = match &all {
            (Some(q), Some(k), Some(v), Some(t), Some(s), Some(p)) => {
                let ranks = q.len() == 3 && k.len() == 4 && v.len() == 4 && t.len() == 2;
                ranks
                    && k[..3] == v[..3]
                    && k[3] == q[2]
                    && k[1] > 0
                    && q[1] % k[1] == 0
                    && s[..] == [q[0]]
                    && p[..] == [q[0]]
                    && sinks.is_none_or(|s| self.shape(s).known().is_some_and(|s| s[..] == [q[1]]))
            }
            _ => false,
        };
        let (true, Some(qs), Some(ks), Some(vs), Some(ts)) = (fits, all.0.clone(), all.1, all.2, all.3)
        else {
            let s = |x: NodeId| self.shape(x).to_string();
            let what = format!(
                "queries {}, keys {}, values {}, table {}, sequences {}, positions {}: expected [rows, heads, d], \
                 [pages, key heads, page, d], [pages, key heads, page, dv], [sequences, n], [rows], [rows], where \
                 u8 has the bytes of whole blocks of {BLOCKS} in place of d or dv",
                s(q),
                s(keys),
                s(values),
                s(table),
                s(sequence),
                s(position)
            );
            return Err(Error::shape(NAME, what).at(&self.span));
        };
        let mut own = attrs([("scale", float(options.scale))]);
        if let Some(c) = options.softcap {
            own.insert("softcap".into(), float(c));
        }
        if let Some(w) = options.window {
            own.insert("window".into(), Attr::Int(w as i64));
        }
        let mut ins = vec![q, keys, values, table, sequence, position];
        ins.extend(sinks);
        let sizes = Sizes {
            rows: qs[0],
            heads: qs[1],
            shared: ks[1],
            key: qs[2],
            value: vs[3],
            sequences: ts[0],
            reach: ts[1] * ks[2],
        };
        self.composite(CompositeKind::CachedAttention, own, &ins, |g, x| body(g, x, &sizes, &options))
    }
}

/// The sizes of the operands.
struct Sizes {
    rows: usize,
    heads: usize,
    /// Key heads.
    shared: usize,
    key: usize,
    value: usize,
    sequences: usize,
    /// Positions that a row of the table can address.
    reach: usize,
}

fn body(g: &mut Graph, x: &[NodeId], s: &Sizes, o: &CachedAttention) -> Result<NodeId> {
    let (q, table, sequence, position) = (x[0], x[3], x[4], x[5]);
    // The cached rows of each query: [rows, key heads, reach, size].
    let gathered = |g: &mut Graph, cache: NodeId, size: usize| -> Result<NodeId> {
        let mut pages = g.gather(cache, table, 0)?;
        if g.dtype(pages) == DType::U8 {
            pages = g.decode_blocks(pages, BLOCKS)?;
        }
        let by_head = g.permute(pages, &[0, 2, 1, 3, 4])?;
        let joined = g.reshape(by_head, [s.sequences, s.shared, s.reach, size])?;
        let rows = g.gather(joined, sequence, 0)?;
        g.cast(rows, DType::F32)
    };
    let (keys, values) = (gathered(g, x[1], s.key)?, gathered(g, x[2], s.value)?);
    let group = s.heads / s.shared;
    let q = g.reshape(q, [s.rows, s.shared, group, s.key])?;
    let kt = g.transpose(keys, 2, 3)?;
    let mut scores = g.matmul(q, kt)?;
    let scale = g.lit(scores, o.scale);
    scores = g.mul(scores, scale)?;
    if let Some(c) = o.softcap {
        let c = g.lit(scores, c);
        let t = g.div(scores, c)?;
        let t = g.tanh(t)?;
        scores = g.mul(t, c)?;
    }
    // Positions after the row's own, and those before its window, are hidden.
    let at = g.iota(DType::I32, [s.reach], 0)?;
    let own = g.reshape(position, [s.rows, 1])?;
    let mut seen = g.le(at, own)?;
    if let Some(w) = o.window {
        let w = g.lit(own, w as i64);
        let first = g.sub(own, w)?;
        let near = g.gt(at, first)?;
        seen = g.and(seen, near)?;
    }
    let seen = g.reshape(seen, [s.rows, 1, 1, s.reach])?;
    let hidden = g.lit(scores, f64::NEG_INFINITY);
    scores = g.select(seen, scores, hidden)?;
    if let Some(sinks) = x.get(6) {
        let sinks = g.reshape(*sinks, [1, s.shared, group, 1])?;
        let sinks = g.expand(sinks, &[s.rows, s.shared, group, 1].map(Dim::from).into())?;
        scores = g.concat(&[scores, sinks], 3)?;
    }
    let mut weights = g.softmax(scores, 3)?;
    if x.len() > 6 {
        weights = g.narrow(weights, 3, 0, s.reach)?;
    }
    let y = g.matmul(weights, values)?;
    let y = g.reshape(y, [s.rows, s.heads, s.value])?;
    let zero = g.lit(position, 0);
    let used = g.ge(position, zero)?;
    let used = g.reshape(used, [s.rows, 1, 1])?;
    let none = g.lit(y, 0.0);
    g.select(used, y, none)
}

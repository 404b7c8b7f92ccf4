//! The sizes and strides of a call of attention, the buffers and parameters of its kernels, and the scores.

use super::super::common::*;
use super::{Cx, NEG_INF, split};
use crate::dtype::DType;
use crate::kernel::ir::Ty;
use crate::kernel::{Buf, Builder, E};
use crate::target::{Declined, Operand};

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
    pub(super) fn new(inputs: &[Operand], causal: bool, scale: f64) -> Result<Problem, Declined> {
        let [q, k, v] = [0, 1, 2].map(|i| &inputs[i].view);
        let ty = Ty::of(inputs[0].dtype);
        let types = inputs[..3].iter().all(|i| i.dtype == inputs[0].dtype)
            && inputs.iter().all(|i| Ty::of(i.dtype) == ty);
        if [q, k, v].iter().any(|v| v.rank() != 4) || !types {
            return Err(Declined::because("attention: the operands must have rank 4 and the same type"));
        }
        let (b, h, sq, d) = (q.shape[0], q.shape[1], q.shape[2], q.shape[3]);
        let (hk, sk) = (k.shape[1], k.shape[2]);
        if v.shape != k.shape || k.shape[0] != b || k.shape[3] != d || hk == 0 || h % hk != 0 {
            return Err(Declined::because(format!(
                "attention: the shapes of q {:?}, k {:?} and v {:?} do not match",
                q.shape, k.shape, v.shape
            )));
        }
        let width = match d {
            0..=64 => 64,
            65..=128 => 128,
            129..=256 => 256,
            _ => {
                return Err(Declined::because(format!("attention: a row has {d} elements, more than 256")));
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
                    return Err(Declined::because(format!(
                        "attention: a mask of shape {:?} does not broadcast to the scores",
                        m.shape
                    )));
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

    /// Whether the matrix-unit kernel applies the scale to the differences from the maximum instead of to the
    /// scores. This is possible only without a mask and with a positive scale, because the order of the
    /// scores must not change.
    pub(super) fn late(&self) -> bool {
        self.mask.is_none() && self.scale > 0.0
    }

    pub(super) fn fill(&self, args: &mut Args) {
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
    /// Number of keys that the query attends to, from the first on; may be negative.
    pub keys: E<'a>,
}

impl<'a> Io<'a> {
    pub(super) fn declare(b: &'a Builder, cx: &Cx<'_>) -> Io<'a> {
        Io::declare_into(b, cx, cx.dtype)
    }

    /// Like `declare`, with a result of type `out`.
    pub(super) fn declare_into(b: &'a Builder, cx: &Cx<'_>, out: DType) -> Io<'a> {
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

    /// Offsets of the keys and of the values of key head `bk`. Key heads are counted over the whole batch.
    pub(super) fn heads(&self, bk: E<'a>) -> (E<'a>, E<'a>) {
        let (n, h) = (self.b.let_(bk.idiv(self.hk)), self.b.let_(bk.imod(self.hk)));
        let at = |s: &[E<'a>]| self.b.let_(n * s[0] + h * s[1]);
        (at(&self.ks), at(&self.vs))
    }

    /// Row `r` of the queries that use key head `bk`. These rows are ordered by head, then by position.
    pub(super) fn query(&self, bk: E<'a>, r: E<'a>) -> Query<'a> {
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

    /// The score of a key from its product with the query; -inf for keys that the query does not attend to.
    pub(super) fn score(&self, q: &Query<'a>, key: E<'a>, dot: E<'a>) -> E<'a> {
        let seen = key.lt(q.keys);
        let mut s = dot * self.scale;
        if let (Some(m), Some(step)) = (self.mask, self.ms.get(3)) {
            s = s + self.b.load_if(m, q.mask + key * *step, seen);
        }
        self.b.let_(seen.select(s, NEG_INF))
    }
}

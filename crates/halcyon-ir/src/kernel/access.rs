//! Helpers of the templates: parameters that are declared together with their values, operands with strides,
//! and loops over the points of an output.
//!
//! The launch passes the values. They are not part of the kernel, so one kernel serves many shapes. A kernel
//! depends only on types (also that of indexes) and ranks and, for each operand, on which strides are 0 and
//! whether the innermost stride is 1.

use super::{Buf, Builder, E, Kernel, Launch, Reduce, Ty};
use crate::dtype::{DType, Scalar};
use crate::error::Result;
use crate::layout::View;
use crate::ops::ReduceKind;
use crate::ops::element_wise::ScalarOp;
use crate::target::Operand;
use std::cell::RefCell;

/// Default workgroup size of templates.
pub(crate) const GROUP: u32 = 64;

/// A kernel being built, with the parameter values of its launch.
#[derive(Debug)]
pub(crate) struct Template {
    pub b: Builder,
    values: RefCell<Vec<(String, Scalar)>>,
}

/// An operand with run-time strides.
#[derive(Debug)]
pub(crate) struct Access<'a> {
    pub buf: Buf,
    /// `None` for a stride of zero.
    strides: Vec<Option<E<'a>>>,
}

/// The index type for these operands: i64 if i32 is too small.
pub(crate) fn index_type<'a>(views: impl IntoIterator<Item = &'a View>) -> Ty {
    let fits = |v: &View| {
        let reach: u128 =
            v.strides.iter().zip(&v.shape).map(|(s, n)| s.unsigned_abs() as u128 * *n as u128).sum();
        // Half the i32 range leaves room for the padding of the grid and for tiles that extend past the end.
        reach + (v.offset.unsigned_abs() as u128) < 1 << 30 && v.numel() < 1 << 30
    };
    if views.into_iter().all(fits) { Ty::I32 } else { Ty::I64 }
}

impl Template {
    /// A kernel over operands, with a one-dimensional workgroup of `n` work-items.
    pub(crate) fn new(name: &str, n: u32, operands: &[&Operand]) -> Template {
        Template::with_index(name, n, index_type(operands.iter().map(|o| &o.view)))
    }

    pub(crate) fn with_index(name: &str, n: u32, ix: Ty) -> Template {
        Template { b: Builder::with_index(name, [n, 1, 1], ix), values: RefCell::default() }
    }

    pub(crate) fn value(&self, name: &str, v: impl Into<Scalar>) {
        self.values.borrow_mut().push((name.to_string(), v.into()))
    }

    /// Declares an index parameter (a size, stride or padding) with its value.
    pub(crate) fn size(&self, name: &str, v: impl Into<Scalar>) -> E<'_> {
        self.value(name, v);
        self.b.size(name)
    }

    pub(crate) fn sizes(&self, name: &str, v: &[usize]) -> Vec<E<'_>> {
        v.iter().enumerate().map(|(i, &v)| self.size(&format!("{name}{i}"), v)).collect()
    }

    pub(crate) fn input(&self, o: &Operand) -> Access<'_> {
        self.operand(o, false)
    }

    pub(crate) fn output(&self, o: &Operand) -> Access<'_> {
        self.operand(o, true)
    }

    fn operand(&self, o: &Operand, write: bool) -> Access<'_> {
        let buf = self.b.buffer(o.dtype, write);
        let n = buf.id.0;
        self.value(&format!("o{n}"), o.view.offset as i64);
        let last = o.view.rank().wrapping_sub(1);
        let strides = (0..o.view.rank()).map(|k| {
            let (s, one) = (o.view.strides[k] as i64, o.view.shape[k] == 1);
            if k == last && (s == 1 || one) {
                Some(self.b.index(1))
            } else if s == 0 && !one {
                None
            } else {
                Some(self.size(&format!("s{n}_{k}"), if one { 0 } else { s }))
            }
        });
        Access { buf, strides: strides.collect() }
    }

    /// Returns `work` in the first `count` workgroups, and 0 in the workgroups that folding the grid added.
    /// Kernels with barriers use the result as a loop bound instead of an enclosing `if`, because PoCL 3.1
    /// miscompiles loops between barriers inside conditions.
    pub(crate) fn work<'a>(&'a self, count: E<'a>, work: E<'a>) -> E<'a> {
        let b = &self.b;
        b.let_(b.linear_group().lt(count).select(work, 0))
    }

    /// Splits a linear index over `dims` into one index per axis. The last axis varies fastest.
    pub(crate) fn split<'a>(&'a self, linear: E<'a>, dims: &[E<'a>]) -> Vec<E<'a>> {
        let mut rest = linear;
        let mut idx = vec![rest; dims.len()];
        for k in (0..dims.len()).rev() {
            if k == 0 {
                idx[0] = rest;
            } else {
                idx[k] = rest.imod(dims[k]);
                rest = rest.idiv(dims[k]);
            }
        }
        idx
    }

    /// Runs `f` with the linear index and the index along each axis of each point of a space of shape
    /// `shape`, one work-item per point. Returns the number of workgroups of [`GROUP`] work-items.
    pub(crate) fn points<'a>(&'a self, shape: &[usize], f: impl FnOnce(E<'a>, &[E<'a>])) -> u64 {
        let n: usize = shape.iter().product();
        let count = self.size("n", n);
        let dims: Vec<E<'a>> = (0..shape.len())
            .map(|k| if k == 0 { count } else { self.size(&format!("d{k}"), shape[k]) })
            .collect();
        let i = self.b.linear_id();
        self.b.if_(i.lt(count), || {
            let i = self.b.let_(i);
            f(i, &self.split(i, &dims))
        });
        (n as u64).div_ceil(GROUP as u64)
    }

    /// Verifies the kernel and binds its launch with `groups` workgroups.
    pub(crate) fn finish(self, groups: u64, max_groups: u32) -> Result<(Kernel, Launch)> {
        let values = self.values.into_inner();
        let k = self.b.finish()?;
        let v: Vec<(&str, Scalar)> = values.iter().map(|(n, v)| (n.as_str(), *v)).collect();
        let l = Launch::bind(&k, Launch::fold(groups, max_groups), &v)?;
        Ok((k, l))
    }
}

impl<'a> Access<'a> {
    /// Element index of a multi-index, without the offset.
    pub(crate) fn at(&self, b: &'a Builder, idx: &[E<'a>]) -> E<'a> {
        let terms = idx.iter().zip(&self.strides).filter_map(|(i, s)| s.map(|s| *i * s));
        terms.reduce(|a, t| a + t).unwrap_or_else(|| b.index(0))
    }

    pub(crate) fn load(&self, b: &'a Builder, idx: &[E<'a>]) -> E<'a> {
        b.load(self.buf, self.at(b, idx))
    }

    pub(crate) fn store(&self, b: &'a Builder, idx: &[E<'a>], v: E<'a>) {
        b.store(self.buf, self.at(b, idx), v)
    }
}

/// Applies a scalar op. Integer results wrap, as the element type `d` requires. Signed overflow is undefined
/// in C, so signed sums, differences, products and negations use the unsigned type. Integers below 32 bits
/// wrap after every op.
pub(crate) fn typed<'a>(b: &'a Builder, op: ScalarOp, d: DType, x: &[E<'a>]) -> E<'a> {
    let unsigned = match Ty::of(d) {
        Ty::I32 => Some((Ty::U32, Ty::I32)),
        Ty::I64 => Some((Ty::U64, Ty::I64)),
        _ => None,
    };
    let wraps = matches!(op, ScalarOp::Add | ScalarOp::Sub | ScalarOp::Mul | ScalarOp::Neg);
    let v = match unsigned {
        Some((u, s)) if wraps => {
            let x: Vec<E<'a>> = x.iter().map(|x| x.bitcast(u)).collect();
            b.op(op, &x).bitcast(s)
        }
        _ => b.op(op, x),
    };
    if d.is_int() && d.bits() < 32 && op.result(d) == d { v.cast(d) } else { v }
}

pub(crate) fn reduction(kind: ReduceKind) -> Reduce {
    match kind {
        ReduceKind::Sum => Reduce::Add,
        ReduceKind::Prod => Reduce::Mul,
        ReduceKind::Max => Reduce::Max,
        ReduceKind::Min => Reduce::Min,
    }
}

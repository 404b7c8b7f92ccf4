//! Kernels that reduce and rewrite rows, with a workgroup per row or with a work-item per row. A work-item
//! that reduces a whole row accumulates several partial sums.

use super::common::*;
use crate::dtype::Scalar;
use crate::kernel::ir::{Reduce, Ty};
use crate::kernel::tune::{Choices, Tolerance, Variant, class};
use crate::kernel::{Buf, Builder, E, Local, Private};
use crate::target::{Caps, Declined, Operand};

/// Partial results of a work-item that reduces a whole row. Compilers map them to vector lanes, and short
/// partial sums have smaller rounding errors.
const LANES: u32 = 16;

/// How a row is assigned to work-items.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RowMapping {
    /// One work-item per row; the number is the workgroup size.
    Item(u32),
    /// One workgroup per row; the number is the workgroup size, a power of two.
    Group(u32),
}

impl RowMapping {
    /// Chooses the mapping for `rows` rows of `n` elements. `gap` is the distance between consecutive
    /// elements of a row; `gap` rows are interleaved.
    pub(super) fn choose(rows: usize, n: usize, gap: usize, ty: Ty, caps: &Caps) -> RowMapping {
        let enough_rows = rows >= 256 * caps.units();
        let want: u32 = if n >= 1024 { 256 } else { 64 };
        let largest = caps.max_workgroup.max(1);
        let n_items = want.min(1 << largest.ilog2());
        let fits = n_items as usize * ty.size() <= caps.workgroup_memory as usize;
        // Interleaved rows give contiguous reads if each row has its own work-item.
        if caps.is_cpu || n < 64 || (gap > 1 && enough_rows) || n_items < 16 || !fits {
            RowMapping::Item(items(if caps.is_cpu { 8 } else { 64 }, caps))
        } else {
            RowMapping::Group(n_items)
        }
    }

    fn variant(self) -> Variant {
        match self {
            RowMapping::Item(n) => Variant::new("item", &[("items", n)]),
            RowMapping::Group(n) => Variant::new("group", &[("items", n)]),
        }
    }

    pub(super) fn of(v: &Variant) -> Result<RowMapping, Declined> {
        match &*v.kernel {
            "item" => Ok(RowMapping::Item(v.number("items")?)),
            "group" => Ok(RowMapping::Group(v.number("items")?)),
            _ => Err(v.unknown("rows")),
        }
    }

    /// The variants for `rows` rows of `n` elements. `name` contains everything else the kernel depends on.
    pub(super) fn choices(name: &str, rows: usize, n: usize, gap: usize, ty: Ty, caps: &Caps) -> Choices {
        let items: &[u32] = if caps.is_cpu { &[1, 2, 4, 8, 16, 32] } else { &[32, 64, 128, 256] };
        // CPUs run the work-items of a workgroup one after another (PoCL), so a workgroup per row is offered
        // only on other devices.
        let groups: &[u32] = if caps.is_cpu { &[] } else { &[16, 32, 64, 128, 256, 512] };
        let fits = |n: u32| n as usize * ty.size() <= caps.workgroup_memory as usize;
        let all = items.iter().map(|n| RowMapping::Item(*n));
        let all = all.chain(groups.iter().filter(|n| fits(**n)).map(|n| RowMapping::Group(*n)));
        let legal = all.filter(|by| by.workgroup()[0] <= caps.max_workgroup).map(RowMapping::variant);
        let key = format!(
            "{name} rows{} n{} gap{} by{}",
            class(rows),
            class(n),
            class(gap),
            1 << n.trailing_zeros().min(3)
        );
        Choices::new(key, RowMapping::choose(rows, n, gap, ty, caps).variant(), legal, Tolerance::Sums(n))
    }

    pub(super) fn workgroup(self) -> [u32; 3] {
        match self {
            RowMapping::Item(n) | RowMapping::Group(n) => [n, 1, 1],
        }
    }

    pub(super) fn groups(self, rows: usize) -> usize {
        match self {
            RowMapping::Item(n) => rows.div_ceil(n as usize),
            RowMapping::Group(_) => rows,
        }
    }
}

/// How many consecutive elements a work-item of a workgroup takes at a time, for contiguous rows of `n`
/// elements. The result is the number of elements of the first operand that fill 16 bytes. It is 1 if `n` or
/// the offset of an operand is not a multiple of that number, or if an operand's type is wider than 4 bytes.
pub(super) fn run(n: usize, operands: &[Operand]) -> u32 {
    let Some(first) = operands.first().filter(|o| o.dtype.size() <= 4) else { return 1 };
    let run = 16 / first.dtype.size();
    let placed = |o: &Operand| o.view.offset % run as isize == 0 && o.dtype.size() <= 4;
    if n.is_multiple_of(run) && operands.iter().all(placed) { run as u32 } else { 1 }
}

/// Position of a row's elements.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    pub buf: Buf,
    pub start: E<'a>,
    /// Distance between consecutive elements.
    pub gap: E<'a>,
}

impl<'a> Line<'a> {
    fn at(&self, i: E<'a>) -> E<'a> {
        self.start + i * self.gap
    }
}

/// A row being processed in a kernel.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    b: &'a Builder,
    by: RowMapping,
    ty: Ty,
    /// Workgroup array, if a workgroup processes the row.
    shared: Option<Local<'a>>,
    lanes: Option<Private<'a>>,
}

impl<'a> Row<'a> {
    pub(super) fn new(b: &'a Builder, by: RowMapping, ty: Ty) -> Row<'a> {
        Row {
            b,
            by,
            ty,
            shared: match by {
                RowMapping::Group(n) => Some(b.local(ty, n)),
                RowMapping::Item(_) => None,
            },
            lanes: match by {
                RowMapping::Group(_) => None,
                RowMapping::Item(_) => Some(b.private(ty, LANES)),
            },
        }
    }

    /// Runs `f` with the row number of this work-item or workgroup, if that row exists.
    pub(super) fn each(self, rows: E<'a>, f: impl FnOnce(E<'a>)) {
        let at = match self.by {
            RowMapping::Item(_) => self.b.let_(self.b.linear_id()),
            RowMapping::Group(_) => self.b.let_(self.b.linear_group()),
        };
        self.b.if_(at.lt(rows), || f(at));
    }

    /// Reduces `f(i)` over `0 <= i < n`. All work-items of the row get the result.
    pub(super) fn reduce(self, op: Reduce, n: E<'a>, f: impl Fn(E<'a>) -> E<'a>) -> E<'a> {
        let b = self.b;
        let none: Scalar = op.identity(self.ty.dtype());
        let join = |x: E<'a>, y: E<'a>| b.op(op.op(), &[x, y]);
        let acc = b.var_of(self.ty, none);
        match (self.by, self.shared, self.lanes) {
            (RowMapping::Group(items), Some(shared), _) => {
                b.for_(b.local_id(0), n, items, |i| acc.set(join(acc.get(), f(i))));
                b.group_reduce(op, acc.get(), shared)
            }
            (_, _, Some(lanes)) => {
                let whole = b.let_(n.idiv(LANES) * LANES);
                b.if_(whole.gt(0), || {
                    b.for_(0, LANES, 1, |l| lanes.store(l, b.constant(self.ty, none)));
                    b.for_(0, whole, LANES, |i| {
                        b.for_(0, LANES, 1, |l| lanes.store(l, join(lanes.load(l), f(i + l))));
                    });
                    b.for_(0, LANES, 1, |l| acc.set(join(acc.get(), lanes.load(l))));
                });
                b.for_(whole, n, 1, |i| acc.set(join(acc.get(), f(i))));
                b.let_(acc.get())
            }
            _ => acc.get(),
        }
    }

    /// Like [`Row::reduce`] over the elements of a line. Workgroups read runs of `run` contiguous elements.
    pub(super) fn reduce_runs(
        self,
        op: Reduce,
        n: E<'a>,
        x: Line<'a>,
        run: u32,
        f: impl Fn(E<'a>) -> E<'a>,
    ) -> E<'a> {
        let b = self.b;
        let (RowMapping::Group(items), Some(shared), 2..) = (self.by, self.shared, run) else {
            return self.reduce(op, n, |i| f(b.load(x.buf, x.at(i))));
        };
        let acc = b.var_of(self.ty, op.identity(self.ty.dtype()));
        b.for_(b.local_id(0) * run, n, items * run, |i| {
            let v = b.load_run(x.buf, x.start + i, run).into_iter().map(&f);
            if let Some(v) = v.reduce(|x, y| b.op(op.op(), &[x, y])) {
                acc.set(b.op(op.op(), &[acc.get(), v]));
            }
        });
        b.group_reduce(op, acc.get(), shared)
    }

    /// Applies `f` to the elements of all input lines and stores the results in `y`, in runs of `run`
    /// elements as in `reduce_runs`.
    pub(super) fn rewrite_runs(
        self,
        n: E<'a>,
        inputs: &[Line<'a>],
        y: Line<'a>,
        run: u32,
        f: impl Fn(&[E<'a>]) -> E<'a>,
    ) {
        let b = self.b;
        let (RowMapping::Group(items), 2..) = (self.by, run) else {
            self.rewrite(n, |i| {
                let x: Vec<E<'a>> = inputs.iter().map(|x| b.load(x.buf, x.at(i))).collect();
                b.store(y.buf, y.at(i), f(&x));
            });
            return;
        };
        b.for_(b.local_id(0) * run, n, items * run, |i| {
            let x: Vec<Vec<E<'a>>> = inputs.iter().map(|x| b.load_run(x.buf, x.start + i, run)).collect();
            let v: Vec<E<'a>> =
                (0..run as usize).map(|e| f(&x.iter().map(|x| x[e]).collect::<Vec<_>>())).collect();
            b.store_run(y.buf, y.start + i, &v);
        });
    }

    /// Runs `f(i)` once for every `0 <= i < n`.
    pub(super) fn rewrite(self, n: E<'a>, f: impl FnOnce(E<'a>)) {
        match self.by {
            RowMapping::Item(_) => self.b.for_(0, n, 1, f),
            RowMapping::Group(items) => self.b.for_(self.b.local_id(0), n, items, f),
        }
    }
}

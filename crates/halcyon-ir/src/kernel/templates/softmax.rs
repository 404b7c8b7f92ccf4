//! Softmax and log-softmax along one axis. A kernel computes the maximum of a row, then the sum of the
//! exponentials of the differences from it, then the values. A row whose maximum is infinite or NaN becomes
//! NaN, as in the definition.

use super::common::*;
use super::rows::{Line, Row, RowMapping, run};
use crate::composite::CompositeKind;
use crate::dtype::DType;
use crate::kernel::ir::{Reduce, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Variant};
use crate::kernel::{Builder, E};
use crate::ops::Op;
use crate::target::{Caps, Declined, Operand};

/// Kernels for the composites `softmax` and `log_softmax` (attribute `axis`) on any float type. They round
/// where the composites' bodies round.
///
/// # Errors
/// Declines with `needs_dense` unless the operand is row-major.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let p = problem(op, inputs, outputs)?;
    build(&p, RowMapping::choose(p.rows, p.n, p.inner, p.ty(), caps), inputs, outputs, caps)
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
    build(&problem(op, inputs, outputs)?, RowMapping::of(v)?, inputs, outputs, caps)
}

/// The kernels that the device can run.
///
/// # Errors
/// The errors of [`lower`].
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Choices, Declined> {
    let p = problem(op, inputs, outputs)?;
    let name = format!("{} {} {}", p.name, p.dtype, index_type(inputs, outputs, caps)?.name());
    Ok(RowMapping::choices(&name, p.rows, p.n, p.inner, p.ty(), caps))
}

struct Problem {
    name: String,
    /// Whether the result is the logarithm of the softmax.
    log: bool,
    dtype: DType,
    rows: usize,
    n: usize,
    /// Distance between consecutive elements of a row.
    inner: usize,
}

impl Problem {
    fn ty(&self) -> Ty {
        Ty::of(self.dtype)
    }
}

fn problem(op: &Op, inputs: &[Operand], outputs: &[Operand]) -> Result<Problem, Declined> {
    let name = op.name();
    let (axis, log) = match op {
        Op::Composite(c) if c.kind == CompositeKind::Softmax => (c.int("axis"), false),
        Op::Composite(c) if c.kind == CompositeKind::LogSoftmax => (c.int("axis"), true),
        _ => return Err(Declined::because(format!("softmax: {name} is another op"))),
    };
    arity(&name, inputs, outputs, 1..=1)?;
    like(&name, &inputs[0], outputs)?;
    let shape = &inputs[0].view.shape;
    let Some(axis) = axis.and_then(|a| usize::try_from(a).ok()).filter(|a| *a < shape.len()) else {
        return Err(Declined::because(format!("{name}: the axis is missing or does not exist")));
    };
    row_major(inputs, 0..1)?;
    let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let rows = shape[..axis].iter().product::<usize>() * inner;
    Ok(Problem { name, log, dtype: inputs[0].dtype, rows, n, inner })
}

fn build(
    p: &Problem,
    by: RowMapping,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
) -> Result<Lowered, Declined> {
    let Problem { ref name, log, dtype, rows, n, inner } = *p;
    let ty = p.ty();

    // The common case of contiguous rows needs no strides.
    let last = inner == 1;
    let b = Builder::with_index(name, by.workgroup(), index_type(inputs, outputs, caps)?);
    let (x, y) = (b.input(dtype), b.output(dtype));
    let (count, len) = (b.size("rows"), b.size("n"));
    let gap = if last { b.index(1) } else { b.size("inner") };
    let row = Row::new(&b, by, ty);
    let run = if last { run(n, &[inputs, outputs].concat()) } else { 1 };
    row.each(count, |r| {
        let start = b.let_(if last { r * len } else { r.idiv(gap) * (len * gap) + r.imod(gap) });
        let line = |buf| Line { buf, start, gap };
        // 16-bit types are rounded after every op, as in the composite's body.
        let top = row.reduce_runs(Reduce::Max, len, line(x), run, |v| v);
        let below = |v| round(dtype, v - top);
        let exps = row.reduce_runs(Reduce::Add, len, line(x), run, |v| round(dtype, below(v).exp()));
        let sum = round(dtype, exps);
        let total = b.let_(if log { round(dtype, sum.log()) } else { sum });
        row.rewrite_runs(len, &[line(x)], line(y), run, |v| {
            let d = below(v[0]);
            if log { d - total } else { round(dtype, d.exp()) / total }
        });
    });
    let mut args = Args::of(inputs, outputs);
    args.int("rows", rows as i64).int("n", n as i64);
    if !last {
        args.int("inner", inner as i64);
    }
    single(b, &args, by.groups(rows), caps)
}

fn round(dtype: DType, v: E<'_>) -> E<'_> {
    if dtype.widens() { v.cast(dtype) } else { v }
}

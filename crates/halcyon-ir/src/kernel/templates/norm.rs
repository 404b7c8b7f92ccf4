//! Layer norm and RMS norm over trailing axes. A kernel computes the statistics of a row, then its values.

use super::common::*;
use super::rows::{Line, Row, RowMapping, run};
use crate::composite::CompositeKind;
use crate::kernel::Builder;
use crate::kernel::ir::{Reduce, Ty};
use crate::kernel::lower::Lowered;
use crate::kernel::tune::{Choices, Variant};
use crate::ops::Op;
use crate::target::{Caps, Declined, Operand};

/// Kernels for the composites `layer_norm` (operands x, scale and optionally bias; attributes `axis`, `eps`)
/// and `rms_norm` (operands x and scale; attribute `eps`) on float types. For layer norm, the variance is
/// computed from the deviations from the mean, so the row is read once more.
///
/// # Errors
/// Declines a scale or bias whose shape differs from the normalised axes. Declines with `needs_dense` if an
/// operand is not row-major.
pub fn lower(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Result<Lowered, Declined> {
    let p = problem(op, inputs, outputs)?;
    build(&p, RowMapping::choose(p.rows, p.n, 1, Ty::of(inputs[0].dtype), caps), inputs, outputs, caps)
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
    let types: Vec<String> = inputs.iter().map(|i| i.dtype.to_string()).collect();
    let name = format!("{} {} {}", p.name, types.join(" "), index_type(inputs, outputs, caps)?.name());
    Ok(RowMapping::choices(&name, p.rows, p.n, 1, Ty::of(inputs[0].dtype), caps))
}

struct Problem {
    name: String,
    /// Whether the mean is subtracted first.
    centred: bool,
    rows: usize,
    n: usize,
    eps: f64,
}

fn problem(op: &Op, inputs: &[Operand], outputs: &[Operand]) -> Result<Problem, Declined> {
    let name = op.name();
    let Op::Composite(c) = op else {
        return Err(Declined::because(format!("norm: {name} is another op")));
    };
    let centred = match c.kind {
        CompositeKind::LayerNorm => true,
        CompositeKind::RmsNorm => false,
        _ => return Err(Declined::because(format!("norm: {name} is another op"))),
    };
    arity(&name, inputs, outputs, if centred { 2..=3 } else { 2..=2 })?;
    like(&name, &inputs[0], outputs)?;
    let shape = &inputs[0].view.shape;
    let last = shape.len().checked_sub(1);
    let axis = if centred { c.int("axis").and_then(|a| usize::try_from(a).ok()) } else { last };
    let (Some(axis), Some(eps)) = (axis.filter(|a| *a < shape.len()), c.float("eps")) else {
        return Err(Declined::because(format!("{name}: the axis does not exist, or eps is missing")));
    };
    for w in &inputs[1..] {
        // Leading axes of size one do not matter.
        let real = |s: &[usize]| s.iter().skip_while(|n| **n == 1).copied().collect::<Vec<_>>();
        if real(&w.view.shape) != real(&shape[axis..]) {
            return Err(Declined::because(format!(
                "{name}: the scale or bias has shape {:?}, expected {:?}",
                w.view.shape,
                &shape[axis..]
            )));
        }
    }
    row_major(inputs, 0..inputs.len())?;
    let (rows, n) = (shape[..axis].iter().product::<usize>(), shape[axis..].iter().product::<usize>());
    Ok(Problem { name, centred, rows, n, eps })
}

fn build(
    p: &Problem,
    by: RowMapping,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
) -> Result<Lowered, Declined> {
    let Problem { ref name, centred, rows, n, eps } = *p;
    let dtype = inputs[0].dtype;
    let ty = Ty::of(dtype);

    let b = Builder::with_index(name, by.workgroup(), index_type(inputs, outputs, caps)?);
    let x = b.input(dtype);
    let weights: Vec<_> = inputs[1..].iter().map(|w| b.input(w.dtype)).collect();
    let y = b.output(dtype);
    let (count, len) = (b.size("rows"), b.size("n"));
    let eps_value = b.param("eps", ty);
    let row = Row::new(&b, by, ty);
    let run = run(n, &[inputs, outputs].concat());
    let line = |buf, start| Line { buf, start, gap: b.index(1) };
    row.each(count, |r| {
        let start = b.let_(r * len);
        let divisor = b.let_(len.to(ty));
        let mean = if centred {
            b.let_(row.reduce_runs(Reduce::Add, len, line(x, start), run, |v| v) / divisor)
        } else {
            b.constant(ty, 0)
        };
        let deviation = |v| if centred { v - mean } else { v };
        let squares = row.reduce_runs(Reduce::Add, len, line(x, start), run, |v| {
            let d = deviation(v);
            d * d
        });
        let factor = b.let_((squares / divisor + eps_value).rsqrt());
        let read: Vec<_> =
            [line(x, start)].into_iter().chain(weights.iter().map(|w| line(*w, b.index(0)))).collect();
        row.rewrite_runs(len, &read, line(y, start), run, |v| {
            let scaled = deviation(v[0]) * factor * v[1].to(ty);
            v.get(2).map_or(scaled, |bias| scaled + bias.to(ty))
        });
    });
    let mut args = Args::of(inputs, outputs);
    args.int("rows", rows as i64).int("n", n as i64).float("eps", eps);
    single(b, &args, by.groups(rows), caps)
}

//! From fused kernels and structured ops to kernel IR. The signatures here are what `crate::lower` calls.

pub use super::chain::{fused_param, lower_fused};
use super::{Kernel, Launch, attention, conv, gather, matmul, pool, rows, scan, templates, verify_for};
use crate::composite::Composite;
use crate::dtype::{Class, DType};
use crate::error::Result;
use crate::op::Op;
use crate::target::{Caps, Declined, Operand};

/// Kernels that together do one op.
#[derive(Debug, Default)]
pub struct Lowered {
    /// Kernel, launch, and for each of its buffers (read ones declared before written ones; without the fault word, which the
    /// device binds) a number: inputs first, then the output, then temporaries.
    pub steps: Vec<(Kernel, Launch, Vec<usize>)>,
    /// Bytes of each temporary.
    pub temps: Vec<usize>,
}

/// Kernels for a structured op or a composite. `inputs` may be strided (a template that cannot take that declines with
/// [`Declined::needs_dense`]); the output is dense. `in_place`: the output's buffer is input 0's ([`Op::UpdateSlice`]).
///
/// # Errors
/// [`Declined`] with the reason where there is no template, a type has none, or an operand is masked.
pub fn lower_op(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    in_place: bool,
    caps: &Caps,
) -> Result<Lowered, Declined> {
    let masked: Vec<usize> = (0..inputs.len())
        .filter(|&i| inputs[i].view.mask.is_some())
        .collect();
    if !masked.is_empty() {
        return Err(Declined::needs_dense(masked));
    }
    let (Some(out), n) = (outputs.first(), inputs.len()) else {
        return Err(Declined::because(format!("{} without a result", op.name())));
    };
    let built = |k: Result<(Kernel, Launch)>, binding: Vec<usize>| -> Result<Lowered, Declined> {
        let (k, l) = k.map_err(|e| Declined::because(e.to_string()))?;
        verify_for(&k, caps).map_err(|e| Declined::because(e.to_string()))?;
        Ok(Lowered {
            steps: vec![(k, l, binding)],
            temps: vec![],
        })
    };
    // Inputs in order, then the output.
    let all = || (0..=n).collect::<Vec<_>>();
    let float = |what: &str| {
        if out.dtype.class() == Class::Float {
            Ok(())
        } else {
            Err(Declined::because(format!("{what} on {}", out.dtype)))
        }
    };
    // The templates are for dense operands and the usual ranks; a copy for them costs less than the general kernels do, which
    // take the rest.
    match tuned(op, inputs, outputs, caps) {
        Some(Ok(low)) => return Ok(low),
        Some(Err(d)) if !d.dense.is_empty() => return Err(d),
        _ => {}
    }
    match op {
        Op::Matmul => built(matmul::build(&inputs[0], &inputs[1], out, caps), all()),
        Op::Conv(c) => {
            float("conv")?;
            built(conv::build(c, &inputs[0], &inputs[1], out, caps), all())
        }
        Op::Pool(p) => built(pool::build(p, &inputs[0], out, caps), all()),
        Op::PoolGrad(p) => {
            float("the gradient of a pool")?;
            built(
                pool::gradient(p, &inputs[0], &inputs[1], &inputs[2], out, caps),
                all(),
            )
        }
        Op::Gather { axis } => built(gather::gather(*axis, &inputs[0], &inputs[1], out, caps), all()),
        Op::GatherElements { axis } => built(
            gather::gather_elements(*axis, &inputs[0], &inputs[1], out, caps),
            all(),
        ),
        Op::ScatterElements { axis, kind } => {
            let (x, i, u) = (&inputs[0], &inputs[1], &inputs[2]);
            built(gather::scatter(*axis, *kind, false, x, i, u, out, caps), all())
        }
        Op::ScatterRows { axis, kind } => {
            let (x, i, u) = (&inputs[0], &inputs[1], &inputs[2]);
            built(gather::scatter(*axis, *kind, true, x, i, u, out, caps), all())
        }
        Op::UpdateSlice { axis } => {
            let mut low = Lowered::default();
            if !in_place {
                low = built(gather::copy(usize::MAX, 0, &inputs[0], out, caps), vec![0, n])?;
            }
            let update = gather::update_slice(*axis, &inputs[1], &inputs[2], out, caps);
            low.steps.extend(built(update, vec![1, 2, n])?.steps);
            Ok(low)
        }
        Op::Concat { axis } => {
            let mut low = Lowered::default();
            let mut start = 0;
            for (i, x) in inputs.iter().enumerate() {
                if x.view.numel() > 0 {
                    low.steps
                        .extend(built(gather::copy(*axis, start, x, out, caps), vec![i, n])?.steps);
                }
                start += x.view.shape[*axis];
            }
            Ok(low)
        }
        Op::ArgSort { axis, descending } => {
            built(scan::arg_sort(*axis, *descending, &inputs[0], out, caps), all())
        }
        Op::ArgReduce { max, axis, last, .. } => {
            built(scan::arg_reduce(*max, *axis, *last, &inputs[0], out, caps), all())
        }
        Op::Scan {
            kind,
            axis,
            exclusive,
            reverse,
        } => built(
            scan::scan(*kind, *axis, *exclusive, *reverse, &inputs[0], out, caps),
            all(),
        ),
        Op::Composite(c) => built(composite(c, inputs, out, caps)?, all()),
        op => Err(Declined::because(format!("no template for {}", op.name()))),
    }
}

/// What the templates of [`templates`] make of an op they are for.
fn tuned(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Option<Result<Lowered, Declined>> {
    let lower = match op {
        Op::Matmul => templates::matmul::lower,
        Op::Conv(_) => templates::conv::lower,
        Op::Pool(_) | Op::PoolGrad(_) => templates::pool::lower,
        Op::Composite(c) => match &*c.name {
            "softmax" | "log_softmax" => templates::softmax::lower,
            "layer_norm" | "rms_norm" => templates::norm::lower,
            "attention" => templates::attention::lower,
            _ => return None,
        },
        _ => return None,
    };
    Some(lower(op, inputs, outputs, caps))
}

/// Composites that a template claims whole.
fn composite(
    c: &Composite,
    x: &[Operand],
    out: &Operand,
    caps: &Caps,
) -> Result<Result<(Kernel, Launch)>, Declined> {
    if out.dtype == DType::F64 && !caps.f64 {
        return Err(Declined::because("f64 on a device without it"));
    }
    if caps.max_workgroup < 128 {
        return Err(Declined::because("the device's groups are too small"));
    }
    let axis = c.int("axis").and_then(|a| usize::try_from(a).ok());
    let missing = || Declined::because(format!("{} lacks an attribute", c.name));
    Ok(match &*c.name {
        "softmax" => rows::softmax(axis.ok_or_else(missing)?, false, &x[0], out, caps),
        "log_softmax" => rows::softmax(axis.ok_or_else(missing)?, true, &x[0], out, caps),
        "layer_norm" => {
            let (axis, eps) = (axis.ok_or_else(missing)?, c.float("eps").ok_or_else(missing)?);
            rows::norm(axis, false, eps, &x[0], &x[1], x.get(2), out, caps)
        }
        "rms_norm" => {
            let axis = x[0].view.rank().checked_sub(1).ok_or_else(missing)?;
            rows::norm(
                axis,
                true,
                c.float("eps").ok_or_else(missing)?,
                &x[0],
                &x[1],
                None,
                out,
                caps,
            )
        }
        "attention" => {
            if x[0].view.shape[3].max(x[2].view.shape[3]) > attention::MAX_HEAD {
                return Err(Declined::because(format!(
                    "heads wider than {}",
                    attention::MAX_HEAD
                )));
            }
            let scale = c.float("scale").ok_or_else(missing)?;
            attention::build(c.flag("causal"), scale, x, out, caps)
        }
        name => return Err(Declined::because(format!("no template for {name}"))),
    })
}

//! From fused kernels and structured ops to kernel IR. The signatures here are what `crate::lower` calls.

pub use super::chain::{fused_param, lower_fused};
use super::templates::{self, gather, scan};
use super::{Kernel, Launch, verify_for};
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
    let masked: Vec<usize> = (0..inputs.len()).filter(|&i| inputs[i].view.mask.is_some()).collect();
    if !masked.is_empty() {
        return Err(Declined::needs_dense(masked));
    }
    let (Some(out), n) = (outputs.first(), inputs.len()) else {
        return Err(Declined::because(format!("{} without a result", op.name())));
    };
    let built = |k: Result<(Kernel, Launch)>, binding: Vec<usize>| -> Result<Lowered, Declined> {
        let (k, l) = k.map_err(|e| Declined::because(e.to_string()))?;
        verify_for(&k, caps).map_err(|e| Declined::because(e.to_string()))?;
        Ok(Lowered { steps: vec![(k, l, binding)], temps: vec![] })
    };
    // Inputs in order, then the output.
    let all = || (0..=n).collect::<Vec<_>>();
    let template = match op {
        Op::Matmul => Some(templates::matmul::lower as Template),
        Op::Conv(_) => Some(templates::conv::lower as Template),
        Op::Pool(_) | Op::PoolGrad(_) => Some(templates::pool::lower as Template),
        Op::Composite(c) => match &*c.name {
            "softmax" | "log_softmax" => Some(templates::softmax::lower as Template),
            "layer_norm" | "rms_norm" => Some(templates::norm::lower as Template),
            "attention" => Some(templates::attention::lower as Template),
            _ => None,
        },
        _ => None,
    };
    if let Some(lower) = template {
        let low = lower(op, inputs, outputs, caps)?;
        for (k, _, _) in &low.steps {
            verify_for(k, caps).map_err(|e| Declined::because(e.to_string()))?;
        }
        return Ok(low);
    }
    match op {
        Op::Gather { axis } => built(gather::gather(*axis, &inputs[0], &inputs[1], out, caps), all()),
        Op::GatherElements { axis } => {
            built(gather::gather_elements(*axis, &inputs[0], &inputs[1], out, caps), all())
        }
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
                    low.steps.extend(built(gather::copy(*axis, start, x, out, caps), vec![i, n])?.steps);
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
        Op::Scan { kind, axis, exclusive, reverse } => {
            built(scan::scan(*kind, *axis, *exclusive, *reverse, &inputs[0], out, caps), all())
        }
        op => Err(Declined::because(format!("no template for {}", op.name()))),
    }
}

/// A template that takes the whole op.
type Template = fn(&Op, &[Operand], &[Operand], &Caps) -> Result<Lowered, Declined>;

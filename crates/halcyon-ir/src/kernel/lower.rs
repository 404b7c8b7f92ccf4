//! Lowers fused kernels and structured ops to kernel IR. `crate::lower` calls these functions.

pub use super::chain::{fused_choices, fused_param, lower_fused, lower_fused_as};
pub use super::parts::reduction_in_parts;
use super::templates::{self, gather, scan};
use super::tune::{Choices, Variant};
use super::{Kernel, Launch, verify_for};
use crate::error::Result;
use crate::op::Op;
use crate::target::{Caps, Declined, Operand};

/// The kernels that together compute one op.
#[derive(Debug, Default)]
pub struct Lowered {
    /// Kernel, launch, and the number of each of its buffers: inputs first, then the output, then
    /// temporaries. Read buffers are declared before written ones. The fault word is not included; the device
    /// binds it.
    pub steps: Vec<(Kernel, Launch, Vec<usize>)>,
    /// Bytes of each temporary.
    pub temps: Vec<usize>,
}

/// Kernels for a structured op or a composite. `inputs` may be strided; a template that needs dense operands
/// declines with [`Declined::needs_dense`]. The output is dense. `in_place`: the output's buffer is that of
/// input 0 ([`Op::UpdateSlice`]).
///
/// # Errors
/// [`Declined`] with the reason if there is no template for the op or its types, or if an operand is masked.
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
    if let Some(t) = template(op) {
        let low = (t.lower)(op, inputs, outputs, caps)?;
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
            built(gather::scatter(*axis, *kind, false, [x, i, u], out, caps), all())
        }
        Op::ScatterRows { axis, kind } => {
            let (x, i, u) = (&inputs[0], &inputs[1], &inputs[2]);
            built(gather::scatter(*axis, *kind, true, [x, i, u], out, caps), all())
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
        Op::ClassIndex { classes, ignore } => {
            let n = classes.known().ok_or_else(|| Declined::because("the number of classes is not known"))?;
            built(gather::class_index(n, *ignore, &inputs[0], out, caps), all())
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

/// A template for a whole op.
type Lower = fn(&Op, &[Operand], &[Operand], &Caps) -> Result<Lowered, Declined>;

/// A template, with its tuning functions if it has variants.
struct Template {
    takes: fn(&Op) -> bool,
    lower: Lower,
    tuning: Option<Tuning>,
}

struct Tuning {
    choices: fn(&Op, &[Operand], &[Operand], &Caps) -> Result<Choices, Declined>,
    lower: fn(&Op, &[Operand], &[Operand], &Caps, &Variant) -> Result<Lowered, Declined>,
}

/// A row of [`TEMPLATES`] for a template with variants.
macro_rules! tuned {
    ($module:ident, $takes:expr) => {
        Template {
            takes: $takes,
            lower: templates::$module::lower,
            tuning: Some(Tuning {
                choices: templates::$module::choices,
                lower: templates::$module::lower_as,
            }),
        }
    };
}

fn named(op: &Op, names: &[&str]) -> bool {
    matches!(op, Op::Composite(c) if names.contains(&&*c.name))
}

/// One row per template for a whole op.
const TEMPLATES: &[Template] = &[
    tuned!(matmul, |op| *op == Op::Matmul),
    tuned!(conv, |op| matches!(op, Op::Conv(_))),
    tuned!(softmax, |op| named(op, &["softmax", "log_softmax"])),
    tuned!(norm, |op| named(op, &["layer_norm", "rms_norm"])),
    tuned!(attention, |op| named(op, &["attention"])),
    Template {
        takes: |op| matches!(op, Op::Pool(_) | Op::PoolGrad(_)),
        lower: templates::pool::lower,
        tuning: None,
    },
];

fn template(op: &Op) -> Option<&'static Template> {
    TEMPLATES.iter().find(|t| (t.takes)(op))
}

/// The variants of an op's kernel. `None` if there is at most one.
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Option<Choices> {
    let t = template(op)?.tuning.as_ref()?;
    (t.choices)(op, inputs, outputs, caps).ok().filter(|c| !c.others.is_empty())
}

/// Like [`lower_op`], for one of the op's [`choices`].
///
/// # Errors
/// As [`lower_op`]. Also fails if the template does not have the variant.
pub fn lower_op_as(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    let t = template(op).and_then(|t| t.tuning.as_ref());
    let t = t.ok_or_else(|| Declined::because(format!("{} has no variants", op.name())))?;
    if !(t.choices)(op, inputs, outputs, caps)?.has(v) {
        return Err(v.unknown(&op.name()));
    }
    (t.lower)(op, inputs, outputs, caps, v)
}

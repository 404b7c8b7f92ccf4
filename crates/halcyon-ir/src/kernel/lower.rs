//! Lowers fused kernels and structured ops to kernel IR. `crate::lower` calls these functions.

pub(crate) use super::chain::lower_any_length;
pub use super::chain::{fused_choices, fused_param, lower_fused, lower_fused_as};
pub use super::parts::reduction_in_parts;
use super::templates::gather;
use super::tune::{Choices, Variant};
use super::{Kernel, Launch, verify_for};
use crate::error::Result;
use crate::ops::Op;
use crate::target::{Caps, Declined, Operand};

/// The kernels that together compute one op.
#[derive(Debug, Default)]
pub struct Lowered {
    /// The kernels in order, each with its launch and its binding: the numbers of the buffers that the kernel
    /// declares. The inputs have the first numbers, then the output, then the temporaries. A kernel declares
    /// the buffers that it reads before those that it writes. The binding does not contain the fault word,
    /// which the device binds.
    pub steps: Vec<(Kernel, Launch, Vec<usize>)>,
    /// Size of each temporary in bytes.
    pub temps: Vec<usize>,
}

/// A request for the kernels of an op.
#[derive(Debug)]
pub struct KernelCall<'a> {
    pub op: &'a Op,
    /// The operands. They may be strided, but not masked.
    pub inputs: &'a [Operand],
    /// The result, which is dense.
    pub out: &'a Operand,
    /// Whether the result is written to the buffer of input 0 ([`crate::ops::Facts::in_place`]).
    pub in_place: bool,
    pub caps: &'a Caps,
}

impl KernelCall<'_> {
    /// A result with only this kernel, whose buffers are the inputs in order, then the output.
    pub(crate) fn single_kernel(&self, k: Result<(Kernel, Launch)>) -> Result<Lowered, Declined> {
        self.kernel_with_binding(k, (0..=self.inputs.len()).collect())
    }

    /// A result with only this kernel, whose buffers have the numbers `binding`.
    pub(crate) fn kernel_with_binding(
        &self,
        k: Result<(Kernel, Launch)>,
        binding: Vec<usize>,
    ) -> Result<Lowered, Declined> {
        let (k, l) = k.map_err(|e| Declined::because(e.to_string()))?;
        verify_for(&k, self.caps).map_err(|e| Declined::because(e.to_string()))?;
        Ok(Lowered { steps: vec![(k, l, binding)], temps: vec![] })
    }

    /// A copy of input 0 to the output, unless the call is in place, and then this kernel, which writes over
    /// part of the output.
    pub(crate) fn over_base(
        &self,
        k: Result<(Kernel, Launch)>,
        binding: Vec<usize>,
    ) -> Result<Lowered, Declined> {
        let mut low = Lowered::default();
        if !self.in_place {
            let copy = gather::copy(usize::MAX, 0, &self.inputs[0], self.out, self.caps);
            low = self.kernel_with_binding(copy, vec![0, self.inputs.len()])?;
        }
        low.steps.extend(self.kernel_with_binding(k, binding)?.steps);
        Ok(low)
    }

    pub(crate) fn no_template(&self) -> Declined {
        Declined::because(format!("no template for {}", self.op.name()))
    }
}

/// Kernels for a structured op or a composite. `inputs` may be strided. A template that needs dense operands
/// declines others with [`Declined::needs_dense`]. The output is dense. `in_place` says that the output is
/// written to the buffer of input 0 ([`crate::ops::Facts::in_place`]).
///
/// # Errors
/// [`Declined`] with the reason if there is no template for the op or its types, if an operand is masked, or
/// if a kernel exceeds a limit of the device.
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
    let Some(out) = outputs.first() else {
        return Err(Declined::because(format!("{} has no result", op.name())));
    };
    if let Some(t) = op.facts().template {
        let low = (t.lower)(op, inputs, outputs, caps)?;
        for (k, _, _) in &low.steps {
            verify_for(k, caps).map_err(|e| Declined::because(e.to_string()))?;
        }
        return Ok(low);
    }
    let call = KernelCall { op, inputs, out, in_place, caps };
    op.rules(|r| r.kernels(&call))
}

type Lower = fn(&Op, &[Operand], &[Operand], &Caps) -> Result<Lowered, Declined>;

/// A template for a whole op, with its tuning functions if it has variants.
#[derive(Clone, Copy, Debug)]
pub struct Template {
    pub(crate) lower: Lower,
    pub(crate) tuning: Option<Tuning>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Tuning {
    pub(crate) choices: fn(&Op, &[Operand], &[Operand], &Caps) -> Result<Choices, Declined>,
    pub(crate) lower: fn(&Op, &[Operand], &[Operand], &Caps, &Variant) -> Result<Lowered, Declined>,
}

fn tuning(op: &Op) -> Option<Tuning> {
    op.facts().template?.tuning
}

/// The variants of an op's kernel. `None` if there is at most one.
pub fn choices(op: &Op, inputs: &[Operand], outputs: &[Operand], caps: &Caps) -> Option<Choices> {
    (tuning(op)?.choices)(op, inputs, outputs, caps).ok().filter(|c| !c.others.is_empty())
}

/// Like [`lower_op`], for one of the op's [`choices`].
///
/// # Errors
/// The errors of [`lower_op`]. Also fails if the template does not have the variant.
pub fn lower_op_as(
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    caps: &Caps,
    v: &Variant,
) -> Result<Lowered, Declined> {
    let t = tuning(op).ok_or_else(|| Declined::because(format!("{} has no variants", op.name())))?;
    if !(t.choices)(op, inputs, outputs, caps)?.has(v) {
        return Err(v.unknown(&op.name()));
    }
    (t.lower)(op, inputs, outputs, caps, v)
}

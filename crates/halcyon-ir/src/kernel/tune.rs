//! Tuning: the kernels that a template can build for a call, besides the kernel that its heuristic chooses.
//!
//! A template's heuristic needs only [`Caps`], so a kernel is available without measuring. [`Choices`] lists
//! the other variants that are legal on the device; the caller measures them. Variants differ in tiles,
//! workgroups and how a sum is split, never in what is computed. A split changes the rounding of a sum, so
//! plans use tuned variants only from level O2 on.

use super::ir::{Fnv, MatrixOp, MatrixType};
use super::lower::{self, Lowered};
use crate::dtype::DType;
use crate::fused::Fused;
use crate::ops::Op;
use crate::plan::StepWork;
use crate::target::{Caps, Declined, Operand};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Maximum number of variants that a template lists for one call.
pub const MAX_VARIANTS: usize = 32;

/// One way to build a kernel: the name of one of the template's kernels, and its parameters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Variant {
    pub kernel: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, u32>,
}

impl Variant {
    pub fn new(kernel: &str, values: &[(&str, u32)]) -> Variant {
        Variant { kernel: kernel.into(), values: values.iter().map(|(n, v)| (n.to_string(), *v)).collect() }
    }

    /// The parameter called `name`.
    pub(crate) fn number(&self, name: &str) -> Result<u32, Declined> {
        let v = self.values.get(name).copied();
        v.ok_or_else(|| Declined::because(format!("the tuning variant \"{self}\" has no value for {name}")))
    }

    pub(crate) fn unknown(&self, template: &str) -> Declined {
        Declined::because(format!("the template {template} has no kernel \"{}\"", self.kernel))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kernel)?;
        self.values.iter().try_for_each(|(n, v)| write!(f, " {n}={v}"))
    }
}

/// How much the results of two variants may differ.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tolerance {
    /// Sums of this many products that are linear in each operand. The bound is relative to the sums of the
    /// products' magnitudes.
    Products(usize),
    /// Other floating-point work with sums of this many terms. The bound is relative to the largest result.
    Sums(usize),
}

/// The variants of a kernel for a call.
#[derive(Clone, PartialEq, Debug)]
pub struct Choices {
    /// Template, types, layout and size classes. The best variant for one call with this key is used for all
    /// calls with this key.
    pub key: String,
    /// The heuristic's choice.
    pub default: Variant,
    /// Other variants that are legal on the device.
    pub others: Vec<Variant>,
    pub tolerance: Tolerance,
    /// Unit roundoff to which some variants round the factors before multiplying (TF32: 2⁻¹¹); 0 if none
    /// does.
    pub rounding: f64,
}

impl Choices {
    pub(crate) fn new(
        key: String,
        default: Variant,
        all: impl IntoIterator<Item = Variant>,
        tolerance: Tolerance,
    ) -> Choices {
        let mut others: Vec<Variant> = vec![];
        for v in all {
            if v != default && !others.contains(&v) && others.len() < MAX_VARIANTS {
                others.push(v);
            }
        }
        Choices { key, default, others, tolerance, rounding: 0.0 }
    }

    /// Sets the rounding for work whose factors may be rounded to a matrix unit's operand type.
    pub(crate) fn on_matrix_units(mut self, unit: Option<MatrixOp>) -> Choices {
        if unit.is_some_and(|o| o.operand == MatrixType::Tf32) {
            self.rounding = 2f64.powi(-11);
        }
        self
    }

    /// How much the results of two variants may differ in an output of type `out`, relative to the quantity
    /// named by [`Tolerance`]. Rounding errors are assumed independent, so the error of a sum grows with the
    /// square root of its number of terms.
    pub fn share(&self, out: DType) -> f64 {
        let eps = if out == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let stored = match out {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => eps,
        };
        match self.tolerance {
            // Both variants round the terms of the sum, and the result.
            Tolerance::Products(k) => {
                let root = (k.max(1) as f64).sqrt();
                2.0 * eps * (4.0 + 2.0 * root) + 2.0 * stored + 8.0 * self.rounding / root
            }
            Tolerance::Sums(k) => eps * (16.0 + 4.0 * (k as f64).sqrt()) + 4.0 * stored + 8.0 * self.rounding,
        }
    }

    /// Whether `v` is one of the variants. A variant that was read from a file is used only if it is one of
    /// them.
    pub fn has(&self, v: &Variant) -> bool {
        *v == self.default || self.others.contains(v)
    }
}

/// Size class for tuning. Numbers up to 16 are their own class; larger ones are rounded up to the next power
/// of two.
pub(crate) fn class(n: usize) -> usize {
    if n <= 16 { n } else { n.checked_next_power_of_two().unwrap_or(usize::MAX) }
}

/// The computation of a step.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Work {
    Op(Op),
    Fused(Arc<Fused>),
}

/// A step whose kernel has variants.
#[derive(Clone, Debug)]
pub struct Tunable {
    pub work: Work,
    /// For an op, the operands as the step reads them; for a fused chain, its buffers.
    pub inputs: Vec<Operand>,
    pub output: Operand,
    pub choices: Choices,
    /// The variant the step's kernel was built with.
    pub variant: Variant,
    /// Whether tuning chose that variant. It may be equal to the heuristic's choice.
    pub tuned: bool,
}

impl Tunable {
    /// Builds the kernels of a variant.
    ///
    /// # Errors
    /// [`Declined`] with the reason if the device cannot run the variant.
    pub fn build(&self, v: &Variant, caps: &Caps) -> Result<Lowered, Declined> {
        match &self.work {
            Work::Op(op) => lower::lower_op_as(op, &self.inputs, std::slice::from_ref(&self.output), caps, v),
            Work::Fused(f) => {
                let (kernel, launch) =
                    lower::lower_fused_as(f, caps, v).map_err(|e| Declined::because(e.to_string()))?;
                let buffers = (0..=self.inputs.len()).collect();
                Ok(Lowered { steps: vec![(kernel, launch, buffers)], temps: vec![] })
            }
        }
    }

    /// The op's name; for a chain, its number of instructions.
    pub fn op(&self) -> String {
        match &self.work {
            Work::Op(op) => op.name(),
            Work::Fused(f) => format!("chain of {}", f.body.len()),
        }
    }
}

/// A digest of a variant's kernels. If it differs from the digest recorded for the same key and variant, the
/// template has changed.
pub fn digest(steps: &Lowered) -> u128 {
    let mut h = Fnv::new();
    steps.steps.iter().for_each(|(k, _, _)| k.hash(&mut h));
    h.0
}

/// Like [`digest`], for a step of a plan.
pub fn digest_step(work: &StepWork) -> Option<u128> {
    let StepWork::Kernel { kernel, .. } = work else { return None };
    let mut h = Fnv::new();
    kernel.hash(&mut h);
    Some(h.0)
}

/// A digest of a chain without its run-time parameters.
pub(crate) fn digest_chain(f: &Fused) -> u128 {
    let mut h = Fnv::new();
    f.template().hash(&mut h);
    h.write_usize(0);
    h.0
}

/// The tuning results of a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TunedVariants {
    best: HashMap<String, (Variant, u128)>,
}

impl TunedVariants {
    /// Records the best variant of a key, with the [`digest`] of its kernels.
    pub fn insert(&mut self, key: impl Into<String>, best: Variant, digest: u128) {
        self.best.insert(key.into(), (best, digest));
    }

    pub fn len(&self) -> usize {
        self.best.len()
    }

    pub fn is_empty(&self) -> bool {
        self.best.is_empty()
    }

    /// The best variant and its kernels, if the record is still valid: the device can run the variant and the
    /// template still builds the kernels that were measured.
    pub fn find(
        &self,
        choices: &Choices,
        build: impl FnOnce(&Variant) -> Option<Lowered>,
    ) -> Option<(Variant, Lowered)> {
        let (best, measured) = self.best.get(&choices.key)?;
        let low = choices.has(best).then(|| build(best)).flatten()?;
        (digest(&low) == *measured).then(|| (best.clone(), low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::kernel::verify_for;
    use crate::layout::View;
    use crate::ops::Conv;

    fn operand(shape: &[usize]) -> Operand {
        Operand { dtype: DType::F32, view: View::dense(shape) }
    }

    #[test]
    fn small_sizes_are_classes_of_their_own() {
        assert_eq!([1, 9, 16, 17, 32, 33, 1000].map(class), [1, 9, 16, 32, 32, 64, 1024]);
        assert_eq!(class(usize::MAX), usize::MAX);
    }

    /// Every listed variant must build a kernel that the device accepts, and be listed once. The
    /// interpreter's tests check that all variants compute the same results.
    #[test]
    fn every_listed_variant_is_legal() {
        let gpu = Caps { max_workgroup: 1024, ..Caps::generous() };
        let cpu = Caps { is_cpu: true, ..gpu.clone() };
        let small = Caps { max_workgroup: 64, workgroup_memory: 4096, ..Caps::generous() };
        let mut conv = Conv::new(2);
        conv.pad.iter_mut().for_each(|p| *p = (1, 1));
        let calls: Vec<(Op, Vec<Operand>, Operand)> = vec![
            (Op::Matmul, vec![operand(&[200, 300]), operand(&[300, 100])], operand(&[200, 100])),
            (Op::Matmul, vec![operand(&[1, 512]), operand(&[512, 640])], operand(&[1, 640])),
            (
                Op::Conv(conv),
                vec![operand(&[2, 24, 20, 20]), operand(&[8, 24, 3, 3])],
                operand(&[2, 8, 20, 20]),
            ),
        ];
        for caps in [&gpu, &cpu, &small] {
            for (op, inputs, output) in &calls {
                let outputs = std::slice::from_ref(output);
                let c = lower::choices(op, inputs, outputs, caps).unwrap();
                assert!(c.others.len() <= MAX_VARIANTS && !c.others.contains(&c.default), "{c:?}");
                assert!(!c.others.is_empty(), "{} on {caps:?}", c.key);
                let plain = lower::lower_op(op, inputs, outputs, false, caps).unwrap();
                let mut seen = vec![];
                for v in c.others.iter().chain([&c.default]) {
                    let low = lower::lower_op_as(op, inputs, outputs, caps, v)
                        .unwrap_or_else(|d| panic!("{}: {v}: {}", c.key, d.reason));
                    low.steps.iter().for_each(|(k, _, _)| verify_for(k, caps).unwrap());
                    assert_eq!(digest(&low) == digest(&plain), *v == c.default, "{}: {v}", c.key);
                    assert!(!seen.contains(&digest(&low)), "{}: {v} is another's kernel", c.key);
                    seen.push(digest(&low));
                }
                let none = Variant::new("none", &[]);
                assert!(!c.has(&none) && lower::lower_op_as(op, inputs, outputs, caps, &none).is_err());
            }
        }
    }

    #[test]
    fn tuned_variants_are_valid_while_the_kernels_are_unchanged() {
        let (op, caps) = (Op::Matmul, Caps::generous());
        let (inputs, outputs) = ([operand(&[64, 64]), operand(&[64, 64])], [operand(&[64, 64])]);
        let c = lower::choices(&op, &inputs, &outputs, &caps).unwrap();
        let build = |v: &Variant| lower::lower_op_as(&op, &inputs, &outputs, &caps, v).ok();
        let best = c.others[0].clone();
        let d = digest(&build(&best).unwrap());
        let mut known = TunedVariants::default();
        assert!(known.find(&c, build).is_none());
        known.insert(c.key.clone(), best.clone(), d);
        assert_eq!(known.find(&c, build).map(|(v, _)| v), Some(best.clone()));
        // A record is not valid if the template builds a different kernel, or if its variant is not listed.
        known.insert(c.key.clone(), best, d ^ 1);
        assert!(known.find(&c, build).is_none());
        known.insert(c.key.clone(), Variant::new("tiled", &[("side", 3)]), d);
        assert!(known.find(&c, build).is_none());
    }
}

//! Epilogues that the libraries support: a bias, then an activation.

use crate::Declined;
use crate::library_call::CallForm;
use halcyon_ir::fused::AffineActivation;
use halcyon_ir::{DType, ScalarOp};

/// The epilogue of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct VendorEpilogue {
    pub bias: Option<Bias>,
    pub activation: Option<ScalarOp>,
}

/// One value per element of an axis of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bias {
    /// Index among the call's inputs.
    pub input: usize,
    /// Offset of its first element in bytes.
    pub offset: isize,
}

impl VendorEpilogue {
    /// The epilogue of a call whose result has this shape, with the bias along `axis`.
    pub(super) fn of(call: &CallForm<'_>, shape: &[usize], axis: usize) -> Result<VendorEpilogue, Declined> {
        let Some(e) = call.epilogue else { return Ok(VendorEpilogue::default()) };
        let no = |why: &str| Err(Declined::because(format!("the epilogue {why}")));
        let a = match e.fused.as_affine(e.product, shape, &[axis]) {
            Ok(a) => a,
            Err(why) => return no(why),
        };
        // The library rounds the result once, after the epilogue.
        if [a.product, a.compute] != [a.out; 2] {
            return no("computes in several types");
        }
        if a.scale.is_some() || a.residual.is_some() {
            return no("has a scale or a residual");
        }
        let activation = match a.activation {
            None => None,
            Some(AffineActivation::Function(op)) => Some(op),
            Some(AffineActivation::Clamp { lo: 0.0, hi: f64::INFINITY }) => Some(ScalarOp::Relu),
            Some(AffineActivation::Clamp { .. }) => return no("clamps between other bounds than relu"),
        };
        let Some(k) = a.bias else { return Ok(VendorEpilogue { bias: None, activation }) };
        let l = &e.fused.loads[k];
        // The chain's other inputs follow the op's own ones, in order.
        let input = call.own + l.input as usize - usize::from(l.input > e.product);
        let size = call.inputs.get(input).map_or(0, |o| o.view.numel() as isize);
        if l.view.offset < 0 || l.view.offset + shape[axis] as isize > size {
            return no("reads outside of its bias");
        }
        let bias = Some(Bias { input, offset: l.view.offset * l.dtype.size() as isize });
        Ok(VendorEpilogue { bias, activation })
    }

    /// Whether there is no epilogue or the result has one of these types.
    pub(super) fn of_type(&self, call: &CallForm<'_>, types: &[DType]) -> bool {
        *self == VendorEpilogue::default() || types.contains(&call.outputs[0].dtype)
    }
}

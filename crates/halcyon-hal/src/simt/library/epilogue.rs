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
        // The library rounds once, after the epilogue. If the chain has several types, it rounds in between.
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
        let input = call.epilogue_input(&e, l);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LibraryCall, Operand};
    use halcyon_ir::fused::{Fused, Instr, InstrKind, Load, Out};
    use halcyon_ir::layout::View;
    use halcyon_ir::ops::Op;
    use halcyon_ir::target::{Epilogue, Work};

    const SHAPE: [usize; 2] = [4, 6];

    /// `activation(product op other)`, where `other` is read with these strides from this offset.
    fn chain(op: ScalarOp, other: (&[isize], isize), activation: Option<ScalarOp>) -> Fused {
        let view = View { strides: other.0.into(), offset: other.1, ..View::dense(&SHAPE) };
        let load = |input, view| Load { input, dtype: DType::F32, view, fill: None };
        let instr = |kind, args: &[u32]| Instr { kind, dtype: DType::F32, args: args.into() };
        let mut body = vec![instr(InstrKind::Load(0), &[]), instr(InstrKind::Load(1), &[])];
        body.push(instr(InstrKind::Op(op), &[0, 1]));
        body.extend(activation.map(|a| instr(InstrKind::Op(a), &[2])));
        let value = body.len() as u32 - 1;
        Fused {
            space: SHAPE.as_slice().into(),
            reduced: 0,
            loads: vec![load(0, View::dense(&SHAPE)), load(1, view)],
            params: vec![],
            body,
            outs: vec![Out { value, dtype: DType::F32, reduce: None, view: View::dense(&SHAPE) }],
        }
    }

    /// The epilogue of a product, with another operand of `len` elements.
    fn read(fused: &Fused, len: usize) -> Result<VendorEpilogue, String> {
        let dense = |dims: &[usize]| Operand { dtype: DType::F32, view: View::dense(dims) };
        let (own, other, y) = ([dense(&[4, 8]), dense(&[8, 6])], [dense(&[len])], dense(&SHAPE));
        let call = LibraryCall {
            epilogue: Some(Epilogue { fused, product: 0, inputs: &other, output: &y }),
            ..LibraryCall::new(Work::Op(&Op::Matmul), &own, std::slice::from_ref(&y))
        };
        // Accepts the first form, which has the epilogue.
        let read = |form: &CallForm<'_>| Ok(VendorEpilogue::of(form, &SHAPE, 1).map_err(|d| d.reason));
        CallForm::first(&call, false, read).unwrap()
    }

    #[test]
    fn a_bias_and_an_activation_are_read() {
        let got = read(&chain(ScalarOp::Add, (&[0, 1], 2), Some(ScalarOp::Relu)), 8).unwrap();
        let bias = Some(Bias { input: 2, offset: 8 });
        assert_eq!(got, VendorEpilogue { bias, activation: Some(ScalarOp::Relu) });
    }

    #[test]
    fn what_the_libraries_lack_is_refused_with_the_reason() {
        let refused = |f: &Fused, len: usize, why: &str| {
            let e = read(f, len).unwrap_err();
            assert!(e.contains(why), "{e}");
        };
        let bias = |offset| chain(ScalarOp::Add, (&[0, 1], offset), None);
        refused(&bias(2), 7, "outside of its bias");
        refused(&bias(-1), 8, "outside of its bias");
        refused(&chain(ScalarOp::Add, (&[1, 0], 0), None), 4, "something other than a bias");
        refused(&chain(ScalarOp::Add, (&[6, 1], 0), None), 24, "a scale or a residual");
        refused(&chain(ScalarOp::Mul, (&[0, 1], 0), None), 6, "a scale or a residual");
        refused(&chain(ScalarOp::Add, (&[0, 1], 0), Some(ScalarOp::Exp)), 6, "more than");
    }
}

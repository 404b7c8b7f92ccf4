//! Epilogues that the libraries support: a bias, then an activation.

use crate::{Declined, LibraryCall};
use halcyon_ir::fused::{InstrKind, Param};
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::Work;
use halcyon_ir::{DType, Scalar, ScalarOp};

/// The epilogue of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VendorEpilogue {
    pub bias: Option<Bias>,
    pub activation: Option<ScalarOp>,
}

/// One value per element of an axis of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// Index among the call's inputs.
    pub input: usize,
    /// Offset of its first element in bytes.
    pub offset: isize,
}

impl VendorEpilogue {
    /// The epilogue of a call whose result has this shape, with the bias along `axis`.
    pub fn of(call: &LibraryCall<'_>, shape: &[usize], axis: usize) -> Result<VendorEpilogue, Declined> {
        let Some(e) = call.epilogue else { return Ok(VendorEpilogue::default()) };
        let no = |why: &str| Err(Declined::because(format!("the chain on top {why}")));
        let f = e.fused;
        let [out] = &f.outs[..] else { return no("has several results") };
        if f.reduced > 0 || out.reduce.is_some() {
            return no("reduces");
        }
        let seen = |v: &View| View { shape: f.space.clone(), ..v.clone() };
        if !seen(&out.view).is_dense() {
            return no("writes elsewhere");
        }
        let mut epilogue = VendorEpilogue::default();
        let mut at = out.value as usize;
        // Walk the chain from its result back to the product.
        for _ in 0..f.body.len() {
            let i = &f.body[at];
            let of = |k: usize| i.args[k] as usize;
            if i.dtype != out.dtype {
                return no("computes in several types");
            }
            let literal = |k: usize| match f.body[of(k)].kind {
                InstrKind::Param(p) => match f.params[p as usize].1 {
                    Param::Literal(Scalar::F(v)) => Some(v),
                    _ => None,
                },
                _ => None,
            };
            let fresh = epilogue == VendorEpilogue::default();
            match &i.kind {
                // The library rounds the result once, after the epilogue.
                InstrKind::Cast if f.body[of(0)].dtype == i.dtype => at = of(0),
                InstrKind::Op(a @ (ScalarOp::Relu | ScalarOp::Gelu | ScalarOp::GeluTanh)) if fresh => {
                    epilogue.activation = Some(*a);
                    at = of(0);
                }
                InstrKind::Op(ScalarOp::Max) if fresh && [0, 1].iter().any(|k| literal(*k) == Some(0.0)) => {
                    epilogue.activation = Some(ScalarOp::Relu);
                    at = of(usize::from(literal(0) == Some(0.0)));
                }
                InstrKind::Op(ScalarOp::Add) if epilogue.bias.is_none() => {
                    let load = |k: usize| match f.body[of(k)].kind {
                        InstrKind::Load(l) => Some(&f.loads[l as usize]).filter(|l| l.input != e.product),
                        _ => None,
                    };
                    let Some((k, l)) = [0, 1].iter().find_map(|k| Some((*k, load(*k)?))) else {
                        return no("adds something else than a bias");
                    };
                    let along = seen(&l.view).reshape(shape).filter(|_| l.view.mask.is_none());
                    let step = |(x, s): (usize, &isize)| shape[x] == 1 || *s == isize::from(x == axis);
                    if l.dtype != out.dtype || !along.is_some_and(|v| v.strides.iter().enumerate().all(step))
                    {
                        return no("adds something else than a bias of its type");
                    }
                    // The chain's other inputs follow the op's own ones, in order.
                    let own = match call.work {
                        Work::Op(Op::Composite(c)) => c.body.inputs().len(),
                        _ => 2,
                    };
                    let input = own + l.input as usize - usize::from(l.input > e.product);
                    let size = call.inputs.get(input).map_or(0, |o| o.view.numel() as isize);
                    if l.view.offset < 0 || l.view.offset + shape[axis] as isize > size {
                        return no("reads outside of its bias");
                    }
                    epilogue.bias = Some(Bias { input, offset: l.view.offset * l.dtype.size() as isize });
                    at = of(1 - k);
                }
                InstrKind::Load(l) => {
                    let l = &f.loads[*l as usize];
                    if l.input != e.product || !seen(&l.view).is_dense() || l.dtype != out.dtype {
                        return no("reads the result in another order");
                    }
                    return Ok(epilogue);
                }
                _ => return no("is more than a bias and one of relu and gelu"),
            }
        }
        no("does not read the result")
    }

    /// Whether there is no epilogue or the result has one of these types.
    pub fn of_type(&self, call: &LibraryCall<'_>, types: &[DType]) -> bool {
        *self == VendorEpilogue::default() || types.contains(&call.outputs[0].dtype)
    }
}

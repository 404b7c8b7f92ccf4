//! Affine epilogues: epilogues of a common form, which kernels apply while they store a result.

use super::{Fused, Instr, InstrKind, Load, Out, Param, Reg};
use crate::dtype::DType;
use crate::layout::{View, dense_strides};
use crate::ops::element_wise::ScalarOp;

/// An epilogue `activation(result * scale + bias + residual)`. Every part is optional. Scale, bias and
/// residual are indices into [`Fused::loads`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    /// One factor per channel.
    pub scale: Option<usize>,
    /// One value per channel. If all axes except the channels have size 1, an added operand could be the bias
    /// or the residual; it is read as the bias.
    pub bias: Option<usize>,
    /// A value per element of the result.
    pub residual: Option<usize>,
    pub activation: Option<AffineActivation>,
    /// The type of the result before the epilogue.
    pub product: DType,
    /// The type in which the parts are computed.
    pub compute: DType,
    /// The type of the stored result. If it is not `compute`, the result is rounded once, at the end.
    pub out: DType,
}

/// The last part of an [`Affine`] epilogue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AffineActivation {
    /// Relu, gelu, or gelu by tanh.
    Function(ScalarOp),
    /// `min(max(v, lo), hi)`; NaN stays NaN. The bounds are never NaN.
    Clamp { lo: f64, hi: f64 },
}

impl Affine {
    /// Whether the epilogue only converts the type, or does nothing.
    pub fn is_plain(&self) -> bool {
        self.scale.is_none() && self.bias.is_none() && self.residual.is_none() && self.activation.is_none()
    }
}

/// The error for a chain of another form. The text continues a sentence that begins with "the epilogue".
const MORE: &str = "is more than a scale, a bias, a residual and an activation";

/// The parts of an affine epilogue, in the only order in which they may occur.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Part {
    Nothing,
    Scale,
    Bias,
    Residual,
    Activation,
}

/// A chain that is being read from its first instruction to its last.
struct Reader<'a> {
    f: &'a Fused,
    product: u32,
    /// The result's shape, its strides, and the strides of an operand with one value per channel.
    shape: &'a [usize],
    dense: Vec<isize>,
    channels: Vec<isize>,
    /// The register of the value so far; `None` before the chain has loaded the result.
    value: Option<Reg>,
    /// The last part that was read.
    done: Part,
    /// The type of the arithmetic so far.
    compute: Option<DType>,
    rounded: bool,
    found: Affine,
}

impl Fused {
    /// Reads the kernel as an affine epilogue of the result that input `product` holds. `shape` is the
    /// result's shape in the kernel that stores it. `channels` are the axes of `shape` that together form the
    /// channels, outermost first (a blocked layout has two).
    ///
    /// # Errors
    /// The kernel has another form: for example, another order of the parts, a part twice, operands with
    /// other strides, or arithmetic in several types. The error is the reason, as a text that continues a
    /// sentence that begins with "the epilogue".
    pub fn as_affine(
        &self,
        product: u32,
        shape: &[usize],
        channels: &[usize],
    ) -> Result<Affine, &'static str> {
        let [out] = &self.outs[..] else { return Err("has several results") };
        if self.reduced > 0 || out.reduce.is_some() {
            return Err("reduces");
        }
        if self.space.iter().product::<usize>() != shape.iter().product::<usize>() {
            return Err("computes another number of elements");
        }
        let mut along = vec![0; shape.len()];
        channels.iter().rev().fold(1, |step, &axis| {
            along[axis] = step;
            step * shape[axis] as isize
        });
        let found = Affine {
            scale: None,
            bias: None,
            residual: None,
            activation: None,
            product: out.dtype,
            compute: out.dtype,
            out: out.dtype,
        };
        let mut r = Reader {
            f: self,
            product,
            shape,
            dense: dense_strides(shape).to_vec(),
            channels: along,
            value: None,
            done: Part::Nothing,
            compute: None,
            rounded: false,
            found,
        };
        if out.view.offset != 0 || !r.like(&out.view, &r.dense) {
            return Err("writes elsewhere");
        }
        for (i, instr) in self.body.iter().enumerate() {
            r.read(i as Reg, instr)?;
        }
        r.end(out)
    }
}

impl<'a> Reader<'a> {
    /// Whether the view has these strides over the result's shape, and no mask. The strides of axes of size 1
    /// are ignored.
    fn like(&self, v: &View, want: &[isize]) -> bool {
        let seen = View { shape: self.f.space.clone(), ..v.clone() };
        let strides = seen.reshape(self.shape).filter(|_| v.mask.is_none()).map(|v| v.strides);
        strides
            .is_some_and(|s| self.shape.iter().zip(s.iter().zip(want)).all(|(d, (s, w))| *d == 1 || s == w))
    }

    fn read(&mut self, i: Reg, instr: &Instr) -> Result<(), &'static str> {
        match instr.kind {
            InstrKind::Load(k) => {
                let l = &self.f.loads[k as usize];
                if l.input == self.product {
                    if self.value.is_some() || l.view.offset != 0 || !self.like(&l.view, &self.dense) {
                        return Err("reads the result in another order");
                    }
                    (self.value, self.found.product) = (Some(i), l.dtype);
                }
                Ok(())
            }
            InstrKind::Param(_) => Ok(()),
            InstrKind::Cast if Some(instr.args[0]) == self.value => self.cast(i, instr),
            // A cast of an operand is part of reading it.
            InstrKind::Cast => Ok(()),
            InstrKind::Op(op) => self.part(i, instr, op),
            InstrKind::Iota(_) | InstrKind::Bitcast => Err(MORE),
        }
    }

    fn cast(&mut self, i: Reg, instr: &Instr) -> Result<(), &'static str> {
        let from = self.f.body[instr.args[0] as usize].dtype;
        if from != instr.dtype {
            let widens = self.found.product == from && instr.dtype.size() > from.size();
            if self.rounded {
                return Err("rounds more than once");
            }
            self.rounded = !(self.done == Part::Nothing && widens);
        }
        // Half types are computed in f32, and a cast from a half type to itself rounds the f32 value. Such a
        // cast is ignored here, because kernels round the result once, at the end.
        self.value = Some(i);
        Ok(())
    }

    fn part(&mut self, i: Reg, instr: &Instr, op: ScalarOp) -> Result<(), &'static str> {
        if self.rounded || self.compute.is_some_and(|d| d != instr.dtype) {
            return Err("computes in several types");
        }
        self.compute = Some(instr.dtype);
        // Every op must have the value so far as an operand.
        let at = instr.args.iter().position(|a| Some(*a) == self.value).ok_or(MORE)?;
        let other = instr.args.get(1 - at.min(1)).map(|r| self.source(*r, instr.dtype));
        let load = match other {
            Some(InstrKind::Load(k)) => Some(*k as usize).filter(|k| self.f.loads[*k].input != self.product),
            _ => None,
        };
        let along = load.filter(|&k| self.per_channel(&self.f.loads[k], instr.dtype));
        let full = load.filter(|&k| self.like(&self.f.loads[k].view, &self.dense));
        let bound = self.literal(other).ok_or(MORE);
        let found = &mut self.found;
        self.done = match op {
            ScalarOp::Mul if self.done < Part::Scale => {
                found.scale = Some(along.ok_or("multiplies by something other than a factor per channel")?);
                Part::Scale
            }
            ScalarOp::Add if self.done < Part::Bias && along.is_some() => {
                found.bias = along;
                Part::Bias
            }
            ScalarOp::Add if self.done < Part::Residual => {
                found.residual = Some(full.ok_or("adds something other than a bias or a residual")?);
                Part::Residual
            }
            ScalarOp::Relu | ScalarOp::Gelu | ScalarOp::GeluTanh if self.done < Part::Activation => {
                found.activation = Some(AffineActivation::Function(op));
                Part::Activation
            }
            ScalarOp::Max if self.done < Part::Activation => {
                found.activation = Some(AffineActivation::Clamp { lo: bound?, hi: f64::INFINITY });
                Part::Activation
            }
            ScalarOp::Min => {
                let hi = bound?;
                let lo = match found.activation {
                    None => f64::NEG_INFINITY,
                    Some(AffineActivation::Function(ScalarOp::Relu)) => 0.0,
                    Some(AffineActivation::Clamp { lo, hi: f64::INFINITY }) if lo <= hi => lo,
                    _ => return Err(MORE),
                };
                found.activation = Some(AffineActivation::Clamp { lo, hi });
                Part::Activation
            }
            _ => return Err(MORE),
        };
        self.value = Some(i);
        Ok(())
    }

    /// The instruction that computes an operand. A cast to the type of the arithmetic is skipped.
    fn source(&self, r: Reg, compute: DType) -> &'a InstrKind {
        let i = &self.f.body[r as usize];
        match i.kind {
            InstrKind::Cast if i.dtype == compute => &self.f.body[i.args[0] as usize].kind,
            _ => &i.kind,
        }
    }

    /// Whether the operand has one value per channel, in the type of the arithmetic. Kernels read an operand
    /// of another type only as a residual.
    fn per_channel(&self, l: &Load, compute: DType) -> bool {
        l.dtype == compute && self.like(&l.view, &self.channels)
    }

    /// A literal bound of a clamp. A NaN bound is not accepted: the result would have to be NaN, but the
    /// clamps of kernels would keep the value.
    fn literal(&self, other: Option<&InstrKind>) -> Option<f64> {
        let Some(InstrKind::Param(k)) = other else { return None };
        match self.f.params[*k as usize] {
            (d, Param::Literal(v)) if d.is_float() => Some(v.as_f64()).filter(|v| !v.is_nan()),
            _ => None,
        }
    }

    fn end(self, out: &Out) -> Result<Affine, &'static str> {
        let Some(value) = self.value else { return Err("does not read the result") };
        let last = &self.f.body[value as usize];
        if value != out.value || last.dtype != out.dtype {
            return Err(MORE);
        }
        let compute = match (self.compute, self.rounded) {
            (Some(d), _) => d,
            (None, true) => self.f.body[last.args[0] as usize].dtype,
            (None, false) => last.dtype,
        };
        Ok(Affine { compute, ..self.found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Scalar;

    const SHAPE: [usize; 2] = [6, 5];

    /// A chain on a product of type `dtype`, which is load 0; loads 1, 2, … have the given types and strides.
    /// The body follows the loads.
    fn chain(dtype: DType, loads: &[(DType, [isize; 2])], body: &[(InstrKind, DType, &[Reg])]) -> Fused {
        let load = |(i, (dtype, strides)): (usize, &(DType, [isize; 2]))| Load {
            input: i as u32,
            dtype: *dtype,
            view: View {
                shape: SHAPE.as_slice().into(),
                strides: strides.as_slice().into(),
                offset: 0,
                mask: None,
            },
            fill: None,
        };
        let all: Vec<(DType, [isize; 2])> = [(dtype, [5, 1])].iter().chain(loads).copied().collect();
        let mut instrs: Vec<Instr> = all
            .iter()
            .enumerate()
            .map(|(k, l)| Instr { kind: InstrKind::Load(k as u32), dtype: l.0, args: [].as_slice().into() })
            .collect();
        instrs.extend(body.iter().map(|(kind, dtype, args)| Instr {
            kind: kind.clone(),
            dtype: *dtype,
            args: (*args).into(),
        }));
        let last = instrs.last().unwrap().dtype;
        let out =
            Out { value: instrs.len() as Reg - 1, dtype: last, reduce: None, view: View::dense(&SHAPE) };
        Fused {
            space: SHAPE.as_slice().into(),
            reduced: 0,
            loads: all.iter().enumerate().map(load).collect(),
            params: vec![
                (DType::F32, Param::Literal(Scalar::F(0.0))),
                (DType::F32, Param::Literal(Scalar::F(6.0))),
            ],
            body: instrs,
            outs: vec![out],
        }
    }

    fn read(f: &Fused) -> Result<Affine, &'static str> {
        f.as_affine(0, &SHAPE, &[1])
    }

    const PER_COLUMN: (DType, [isize; 2]) = (DType::F32, [0, 1]);
    const FULL: (DType, [isize; 2]) = (DType::F32, [5, 1]);
    use DType::{BF16, F32};
    use InstrKind::{Cast, Op};
    use ScalarOp::{Add, Gelu, Max, Min, Mul, Relu};

    #[test]
    fn every_part_in_order_is_found() {
        let loads = [PER_COLUMN, PER_COLUMN, FULL];
        let body: &[(InstrKind, DType, &[Reg])] = &[
            (Op(Mul), F32, &[1, 0]),
            (Op(Add), F32, &[4, 2]),
            (Op(Add), F32, &[3, 5]),
            (Op(Relu), F32, &[6]),
            (Cast, BF16, &[7]),
        ];
        let a = read(&chain(F32, &loads, body)).unwrap();
        assert_eq!((a.scale, a.bias, a.residual), (Some(1), Some(2), Some(3)));
        assert_eq!(a.activation, Some(AffineActivation::Function(Relu)));
        assert_eq!((a.product, a.compute, a.out), (F32, F32, BF16));
    }

    #[test]
    fn other_orders_and_types_are_refused() {
        let two = [PER_COLUMN, FULL];
        let refused = |loads: &[(DType, [isize; 2])], body: &[(InstrKind, DType, &[Reg])], why: &str| {
            let e = read(&chain(F32, loads, body)).unwrap_err();
            assert!(e.contains(why), "{e}");
        };
        refused(&two, &[(Op(Relu), F32, &[0]), (Op(Add), F32, &[3, 1])], "more than");
        refused(&two, &[(Op(Mul), F32, &[0, 2])], "multiplies");
        refused(&two, &[(Op(Add), F32, &[0, 0])], "adds");
        refused(&two, &[(Op(Add), F32, &[0, 1]), (Op(Mul), F32, &[3, 1])], "more than");
        refused(&two, &[(Op(ScalarOp::Exp), F32, &[0])], "more than");
        refused(&[(F32, [1, 0])], &[(Op(Add), F32, &[0, 1])], "adds");
        refused(&two, &[(Cast, BF16, &[0]), (Cast, F32, &[3])], "more than once");
        refused(&two, &[(Cast, BF16, &[0]), (Op(Relu), BF16, &[3])], "several types");
        let mut f = chain(F32, &[], &[(Op(Gelu), F32, &[0])]);
        f.loads[0].view = View::dense(&[5, 6]).permute(&[1, 0]);
        assert!(read(&f).unwrap_err().contains("another order"));
        f.outs.push(f.outs[0].clone());
        assert!(read(&f).unwrap_err().contains("several results"));
    }

    #[test]
    fn clamps_are_merged_and_nan_bounds_refused() {
        let params = |f: &mut Fused, at: usize| {
            for k in 0..2u32 {
                f.body.insert(
                    at,
                    Instr { kind: InstrKind::Param(1 - k), dtype: F32, args: [].as_slice().into() },
                );
            }
            f.outs[0].value = f.body.len() as Reg - 1;
        };
        // Registers: 0 the result, 1 the literal 0, 2 the literal 6, then the ops.
        let mut f = chain(F32, &[], &[(Op(Max), F32, &[0, 1]), (Op(Min), F32, &[3, 2])]);
        params(&mut f, 1);
        assert_eq!(read(&f).unwrap().activation, Some(AffineActivation::Clamp { lo: 0.0, hi: 6.0 }));
        f.params[1].1 = Param::Literal(Scalar::F(f64::NAN));
        assert!(read(&f).is_err());
        f.params[1].1 = Param::Literal(Scalar::F(-1.0));
        assert!(read(&f).is_err(), "the lower bound is above the upper one");
        f.params[1].1 = Param::Arg(0);
        assert!(read(&f).is_err(), "an argument is not known before the run");
        let mut f = chain(F32, &[], &[(Op(Relu), F32, &[0]), (Op(Min), F32, &[3, 2])]);
        params(&mut f, 1);
        assert_eq!(read(&f).unwrap().activation, Some(AffineActivation::Clamp { lo: 0.0, hi: 6.0 }));
    }

    #[test]
    fn half_operands_are_residuals() {
        // A bf16 product is widened, and a bf16 residual is widened when it is read.
        let body: &[(InstrKind, DType, &[Reg])] =
            &[(Cast, F32, &[0]), (Cast, F32, &[1]), (Op(Add), F32, &[2, 3]), (Cast, BF16, &[4])];
        let a = read(&chain(BF16, &[(BF16, [5, 1])], body)).unwrap();
        assert_eq!((a.residual, a.product, a.compute, a.out), (Some(1), BF16, F32, BF16));
        // A bf16 operand with one value per channel is neither a bias nor a residual of arithmetic in f32.
        assert!(read(&chain(BF16, &[(BF16, [0, 1])], body)).is_err());
        // If the arithmetic is in bf16, as in a graph of half types, it is a bias.
        let a =
            read(&chain(BF16, &[(BF16, [0, 1])], &[(Op(Add), BF16, &[0, 1]), (Cast, BF16, &[2])])).unwrap();
        assert_eq!((a.bias, a.compute, a.out), (Some(1), BF16, BF16));
    }

    #[test]
    fn channels_may_be_two_axes() {
        // Blocks of 4 channels: [N, C / 4, pixels, 4].
        let shape = [2, 3, 5, 4];
        let mut f = chain(F32, &[PER_COLUMN], &[(Op(Add), F32, &[0, 1])]);
        f.space = shape.as_slice().into();
        f.loads[0].view = View::dense(&shape);
        f.outs[0].view = View::dense(&shape);
        f.loads[1].view = View {
            shape: shape.as_slice().into(),
            strides: [0, 4, 0, 1].as_slice().into(),
            offset: 0,
            mask: None,
        };
        assert_eq!(f.as_affine(0, &shape, &[1, 3]).unwrap().bias, Some(1));
        assert!(f.as_affine(0, &shape, &[1]).is_err());
    }
}

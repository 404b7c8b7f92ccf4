//! Scalars in 64-bit registers. Signed integers are sign-extended. Unsigned integers and the bits of floats
//! are zero-extended.

use crate::dtype::{DType, Scalar};
use crate::kernel::ir::Ty;
use crate::ops::element_wise::ScalarOp;

pub(super) type F1 = fn(u64) -> u64;
pub(super) type F2 = fn(u64, u64) -> u64;
pub(super) type F3 = fn(u64, u64, u64) -> u64;

pub(super) fn to_reg(ty: Ty, v: Scalar) -> u64 {
    match v {
        Scalar::Bool(b) => b as u64,
        Scalar::I(i) => i as u64,
        Scalar::U(u) => u,
        Scalar::F(f) if ty == Ty::F64 => f.to_bits(),
        Scalar::F(f) => (f as f32).to_bits() as u64,
    }
}

pub(super) fn from_reg(ty: Ty, r: u64) -> Scalar {
    match ty {
        Ty::Bool => Scalar::Bool(r != 0),
        Ty::I32 | Ty::I64 => Scalar::I(r as i64),
        Ty::U32 | Ty::U64 => Scalar::U(r),
        Ty::F64 => Scalar::F(f64::from_bits(r)),
        _ => Scalar::F(f32::from_bits(r as u32) as f64),
    }
}

/// Converts raw bits of type `d` to a register of its compute type.
pub(super) fn load(d: DType, raw: u64) -> u64 {
    match d {
        DType::F32 | DType::F64 | DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::I64 => raw,
        DType::BF16 => raw << 16 & 0xffff_ffff,
        DType::I32 => raw as i32 as i64 as u64,
        d => to_reg(Ty::of(d), Scalar::from_bytes(d, &raw.to_le_bytes())),
    }
}

/// Converts a register of `d`'s compute type to raw bits of `d`.
pub(super) fn store(d: DType, r: u64) -> u64 {
    match d {
        DType::F16 | DType::BF16 => u64::from_le_bytes(from_reg(Ty::F32, r).to_bytes(d)),
        // Smaller integers keep their low bytes.
        _ => r,
    }
}

/// Evaluates any scalar op on any type, by its definition in `crate::ops::element_wise`.
pub(super) fn eval(op: ScalarOp, ty: Ty, x: [u64; 3]) -> u64 {
    let d = ty.dtype();
    let v = if op == ScalarOp::Select {
        return if x[0] != 0 { x[1] } else { x[2] };
    } else {
        op.eval(d, &[from_reg(ty, x[0]), from_reg(ty, x[1]), from_reg(ty, x[2])][..op.arity()])
    };
    to_reg(Ty::of(op.result(d)), v)
}

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}
fn g(x: f32) -> u64 {
    x.to_bits() as u64
}
fn i(x: u64) -> i32 {
    x as i32
}
fn j(x: i32) -> u64 {
    x as i64 as u64
}

/// Fast paths for unary ops that are common in kernels.
pub(super) fn unary(op: ScalarOp, ty: Ty) -> Option<F1> {
    Some(match (op, ty) {
        (ScalarOp::Neg, Ty::F32) => |a| g(-f(a)),
        (ScalarOp::Abs, Ty::F32) => |a| g(f(a).abs()),
        (ScalarOp::Sqrt, Ty::F32) => |a| g(f(a).sqrt()),
        (ScalarOp::Not, Ty::Bool) => |a| a ^ 1,
        _ => return None,
    })
}

pub(super) fn binary(op: ScalarOp, ty: Ty) -> Option<F2> {
    use ScalarOp::*;
    Some(match (op, ty) {
        (Add, Ty::F32) => |a, b| g(f(a) + f(b)),
        (Sub, Ty::F32) => |a, b| g(f(a) - f(b)),
        (Mul, Ty::F32) => |a, b| g(f(a) * f(b)),
        (Div, Ty::F32) => |a, b| g(f(a) / f(b)),
        (Lt, Ty::F32) => |a, b| (f(a) < f(b)) as u64,
        (Gt, Ty::F32) => |a, b| (f(a) > f(b)) as u64,
        (Eq, Ty::F32) => |a, b| (f(a) == f(b)) as u64,
        (Add, Ty::I32) => |a, b| j(i(a).wrapping_add(i(b))),
        (Sub, Ty::I32) => |a, b| j(i(a).wrapping_sub(i(b))),
        (Mul, Ty::I32) => |a, b| j(i(a).wrapping_mul(i(b))),
        (Add, Ty::I64 | Ty::U64) => |a, b| a.wrapping_add(b),
        (Sub, Ty::I64 | Ty::U64) => |a, b| a.wrapping_sub(b),
        (Mul, Ty::I64 | Ty::U64) => |a, b| a.wrapping_mul(b),
        (Add, Ty::U32) => |a, b| (a as u32).wrapping_add(b as u32) as u64,
        (Sub, Ty::U32) => |a, b| (a as u32).wrapping_sub(b as u32) as u64,
        (Mul, Ty::U32) => |a, b| (a as u32).wrapping_mul(b as u32) as u64,
        (Lt, Ty::I32 | Ty::I64) => |a, b| ((a as i64) < b as i64) as u64,
        (Le, Ty::I32 | Ty::I64) => |a, b| (a as i64 <= b as i64) as u64,
        (Gt, Ty::I32 | Ty::I64) => |a, b| (a as i64 > b as i64) as u64,
        (Ge, Ty::I32 | Ty::I64) => |a, b| (a as i64 >= b as i64) as u64,
        (Min, Ty::I32 | Ty::I64) => |a, b| (a as i64).min(b as i64) as u64,
        (Max, Ty::I32 | Ty::I64) => |a, b| (a as i64).max(b as i64) as u64,
        (Eq, Ty::I32 | Ty::I64 | Ty::U32 | Ty::U64 | Ty::Bool) => |a, b| (a == b) as u64,
        (Ne, Ty::I32 | Ty::I64 | Ty::U32 | Ty::U64 | Ty::Bool) => |a, b| (a != b) as u64,
        (And, _) => |a, b| a & b,
        (Or, _) => |a, b| a | b,
        (Xor, _) => |a, b| a ^ b,
        _ => return None,
    })
}

pub(super) fn ternary(op: ScalarOp, ty: Ty) -> Option<F3> {
    Some(match (op, ty) {
        (ScalarOp::Fma, Ty::F32) => |a, b, c| g(f(a).mul_add(f(b), f(c))),
        (ScalarOp::Select, _) => |a, b, c| if a != 0 { b } else { c },
        _ => return None,
    })
}

/// `acc` plus the products of the signed bytes of two words.
pub(super) fn dot4(a: u64, b: u64, acc: u64) -> u64 {
    let (x, y) = ((a as u32).to_le_bytes(), (b as u32).to_le_bytes());
    let sum = (0..4).fold(i(acc), |s, k| s.wrapping_add(x[k] as i8 as i32 * (y[k] as i8 as i32)));
    j(sum)
}

/// Reinterprets the bits as another type of the same width.
pub(super) fn bitcast(from: Ty, to: Ty) -> F1 {
    match (from, to) {
        (_, Ty::I32) => |a| j(a as i32),
        (_, Ty::F32 | Ty::U32) => |a| a & 0xffff_ffff,
        _ => |a| a,
    }
}

/// Fast paths for casts that are common in index arithmetic and loads.
pub(super) fn cast(to: DType, from: Ty) -> Option<F1> {
    Some(match (to, from) {
        (DType::I64, Ty::I32 | Ty::U32 | Ty::Bool) => |a| a,
        (DType::I32, Ty::I64 | Ty::U64 | Ty::U32 | Ty::Bool) => |a| j(a as i32),
        (DType::U32, Ty::I32 | Ty::I64 | Ty::U64) => |a| a & 0xffff_ffff,
        (DType::F32, Ty::I32) => |a| g(i(a) as f32),
        (DType::F64, Ty::F32) => |a| (f(a) as f64).to_bits(),
        (DType::F32, Ty::F64) => |a| g(f64::from_bits(a) as f32),
        _ => return None,
    })
}

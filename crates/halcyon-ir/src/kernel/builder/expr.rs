//! Methods and operators of expression handles, variables and arrays.

use super::{E, Local, Operand, Private, Var};
use crate::dtype::DType;
use crate::kernel::ir::*;
use crate::ops::element_wise::ScalarOp;

impl<'a> E<'a> {
    pub fn ty(self) -> Ty {
        self.b.inner.borrow().types[self.id.ix()]
    }

    fn two(self, op: ScalarOp, x: impl Operand<'a>) -> E<'a> {
        let x = x.operand(self.b, self.ty());
        self.b.op(op, &[self, x])
    }

    /// Converts to another numeric compute type. If the type is already `ty`, nothing is emitted. If `ty` is
    /// a vector, the value is in all its lanes.
    pub fn to(self, ty: Ty) -> E<'a> {
        if self.ty() == ty {
            return self;
        }
        if ty.lanes() > 1 {
            return self.b.add(Expr::Splat(ty, self.id));
        }
        self.cast(ty.dtype())
    }

    /// Converts to a storage type with [`crate::Scalar::cast`], then to its compute type.
    pub fn cast(self, d: DType) -> E<'a> {
        if let Some((_, v)) = self.b.konst(self.id) {
            return self.b.constant(Ty::of(d), v.cast(d));
        }
        if self.ty().dtype() == d {
            return self;
        }
        self.b.add(Expr::Cast(d, self.id))
    }

    pub fn bitcast(self, ty: Ty) -> E<'a> {
        if self.ty() == ty { self } else { self.b.add(Expr::Bitcast(ty, self.id)) }
    }

    /// One lane of a vector.
    pub fn lane(self, i: u8) -> E<'a> {
        self.b.add(Expr::Lane(self.id, i))
    }

    /// Extracts element `i` of a word of 8- or 16-bit elements, in its compute type.
    pub fn unpack(self, d: DType, i: u8) -> E<'a> {
        self.b.add(Expr::Unpack(d, self.id, i))
    }

    /// Quotient for index arithmetic: the dividend must not be negative, the divisor must be positive.
    pub fn idiv(self, x: impl Operand<'a>) -> E<'a> {
        let x = x.operand(self.b, self.ty());
        match (self.b.konst(self.id), self.b.konst(x.id)) {
            (_, Some((_, s))) if s.as_i64() == 1 => self,
            (Some((t, a)), Some((_, s))) if s.as_i64() > 0 => self.b.constant(t, a.as_i64() / s.as_i64()),
            _ => self.b.add(Expr::IDiv(self.id, x.id)),
        }
    }

    /// Remainder for index arithmetic. The operands must be as for [`E::idiv`].
    pub fn imod(self, x: impl Operand<'a>) -> E<'a> {
        let x = x.operand(self.b, self.ty());
        match (self.b.konst(self.id), self.b.konst(x.id)) {
            (_, Some((t, s))) if s.as_i64() == 1 => self.b.constant(t, 0),
            (Some((t, a)), Some((_, s))) if s.as_i64() > 0 => self.b.constant(t, a.as_i64() % s.as_i64()),
            _ => self.b.add(Expr::IRem(self.id, x.id)),
        }
    }

    /// Integer quotient rounded up. The operands must be as for [`E::idiv`].
    pub fn div_ceil(self, x: impl Operand<'a>) -> E<'a> {
        let x = x.operand(self.b, self.ty());
        (self + x - 1).idiv(x)
    }

    /// `yes` if this bool is true, else `no`. Both have the same type.
    pub fn select(self, yes: E<'a>, no: impl Operand<'a>) -> E<'a> {
        let no = no.operand(self.b, yes.ty());
        self.b.op(ScalarOp::Select, &[self, yes, no])
    }

    pub fn fma(self, x: impl Operand<'a>, y: impl Operand<'a>) -> E<'a> {
        let (x, y) = (x.operand(self.b, self.ty()), y.operand(self.b, self.ty()));
        self.b.op(ScalarOp::Fma, &[self, x, y])
    }

    /// `self * x + y`; for floats it is [`ScalarOp::Fma`].
    pub fn mul_add(self, x: E<'a>, y: E<'a>) -> E<'a> {
        if self.ty().is_float() { self.fma(x, y) } else { self * x + y }
    }

    pub fn exp(self) -> E<'a> {
        self.b.op(ScalarOp::Exp, &[self])
    }

    pub fn log(self) -> E<'a> {
        self.b.op(ScalarOp::Log, &[self])
    }

    pub fn rsqrt(self) -> E<'a> {
        self.b.op(ScalarOp::Rsqrt, &[self])
    }

    pub fn is_nan(self) -> E<'a> {
        self.b.op(ScalarOp::IsNan, &[self])
    }
}

macro_rules! methods {
    ($($f:ident $op:ident),*) => {
        impl<'a> E<'a> {$(
            pub fn $f(self, x: impl Operand<'a>) -> E<'a> {
                self.two(ScalarOp::$op, x)
            }
        )*}
    };
}
methods!(lt Lt, le Le, gt Gt, ge Ge, equals Eq, differs Ne, and And, or Or, xor Xor, min Min, max Max, shl Shl, shr Shr);

macro_rules! operators {
    ($($tr:ident $f:ident $op:ident),*) => {$(
        impl<'a, R: Operand<'a>> std::ops::$tr<R> for E<'a> {
            type Output = E<'a>;
            fn $f(self, x: R) -> E<'a> {
                self.two(ScalarOp::$op, x)
            }
        }
    )*};
}
operators!(Add add Add, Sub sub Sub, Mul mul Mul, Div div Div, Rem rem Rem);

impl<'a> std::ops::Neg for E<'a> {
    type Output = E<'a>;
    fn neg(self) -> E<'a> {
        self.b.op(ScalarOp::Neg, &[self])
    }
}

impl<'a> std::ops::Not for E<'a> {
    type Output = E<'a>;
    fn not(self) -> E<'a> {
        self.b.op(ScalarOp::Not, &[self])
    }
}

impl<'a> Var<'a> {
    /// The current value.
    pub fn get(self) -> E<'a> {
        let ty = self.b.inner.borrow().k.vars[self.id.ix()];
        self.b.read(ty, Read::Var(self.id))
    }

    pub fn set(self, v: impl Operand<'a>) {
        let ty = self.b.inner.borrow().k.vars[self.id.ix()];
        let value = v.operand(self.b, ty).id;
        self.b.emit(Stmt::Set { var: self.id, value })
    }
}

macro_rules! array {
    ($t:ident, $list:ident, $read:ident, $store:ident) => {
        impl<'a> $t<'a> {
            fn ty(self) -> Ty {
                self.b.inner.borrow().k.$list[self.id.ix()].ty
            }

            pub fn load(self, index: impl Operand<'a>) -> E<'a> {
                let index = index.operand(self.b, self.b.ix).id;
                self.b.read(self.ty(), Read::$read { arr: self.id, index })
            }

            pub fn store(self, index: impl Operand<'a>, value: impl Operand<'a>) {
                let index = index.operand(self.b, self.b.ix).id;
                let value = value.operand(self.b, self.ty()).id;
                self.b.emit(Stmt::$store { arr: self.id, index, value })
            }
        }
    };
}
array!(Local, locals, Local, StoreLocal);
array!(Private, privates, Private, StorePrivate);

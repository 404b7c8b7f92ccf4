//! The running maximum and sum of a softmax whose scores arrive in parts.

use super::NEG_INF;
use crate::kernel::ir::Ty;
use crate::kernel::{Builder, E, Var};

/// The running maximum and sum of a softmax.
#[derive(Clone, Copy)]
pub(super) struct Running<'a> {
    b: &'a Builder,
    top: Var<'a>,
    pub sum: Var<'a>,
}

impl<'a> Running<'a> {
    pub(super) fn new(b: &'a Builder, ty: Ty) -> Running<'a> {
        Running { b, top: b.var_of(ty, NEG_INF), sum: b.var_of(ty, 0) }
    }

    /// Updates the maximum for further scores, whose maximum is `top`, and rescales the sum. Returns the
    /// shift to subtract from the further scores, and the factor by which other earlier sums must be
    /// multiplied.
    pub(super) fn raise(self, top: E<'a>) -> (E<'a>, E<'a>) {
        let old = self.top.get();
        let new = self.b.let_(old.max(top));
        // If all scores so far are -inf, a finite shift gives weights of 0; -inf minus -inf would give NaN.
        let shift = self.b.let_(new.equals(NEG_INF).select(self.b.constant(new.ty(), 0), new));
        let decay = self.b.let_((old - shift).exp());
        self.top.set(new);
        self.sum.set(self.sum.get() * decay);
        (shift, decay)
    }

    pub(super) fn add(self, weight: E<'a>) {
        self.sum.set(self.sum.get() + weight);
    }
}

//! Gradients of linear algebra. The formulas for factors divide by the distances of eigenvalues or singular
//! values, and by singular values. Where such a number is 0, the vectors are not determined, and their
//! gradient leaves out the part that it divides. The gradient of a function of the values alone is right.

use crate::linalg::{Decomposition, Kind, matrix_dims};
use halcyon::{Error, Result};
use halcyon_ir::{Graph, NodeId};

type Id = NodeId;

/// A matrix, or a batch of them, under construction in a graph.
struct Maker<'g>(&'g mut Graph);

impl Maker<'_> {
    fn rank(&self, x: Id) -> usize {
        self.0.shape(x).rank()
    }

    /// The transposed matrices.
    fn t(&mut self, x: Id) -> Result<Id> {
        let n = self.rank(x);
        self.0.transpose(x, n - 2, n - 1)
    }

    fn dot(&mut self, a: Id, b: Id) -> Result<Id> {
        self.0.matmul(a, b)
    }

    fn neg(&mut self, x: Id) -> Result<Id> {
        self.0.neg(x)
    }

    fn op(&mut self, kind: Kind, x: &[Id]) -> Result<Id> {
        self.0.custom(Decomposition::shared(kind), x)
    }

    /// Numbers as a column or row of size 1 that scales the rows or columns of matrices.
    fn scale(&mut self, values: Id, rows: bool) -> Result<Id> {
        let n = self.rank(values);
        self.0.unsqueeze(values, if rows { n } else { n - 1 })
    }

    /// A number for each matrix, as a matrix of one element.
    fn number(&mut self, values: Id) -> Result<Id> {
        let n = self.rank(values);
        let row = self.0.unsqueeze(values, n)?;
        self.0.unsqueeze(row, n + 1)
    }

    /// 1 or 0 for each place of an n by n matrix, by how the row compares to the column.
    fn mask(&mut self, like: Id, n: usize, keep: fn(&mut Graph, Id, Id) -> Result<Id>) -> Result<Id> {
        let g = &mut *self.0;
        let dtype = g.dtype(like);
        let i = g.iota(halcyon_ir::DType::I64, [n, n], 0)?;
        let j = g.iota(halcyon_ir::DType::I64, [n, n], 1)?;
        let kept = keep(g, i, j)?;
        g.cast(kept, dtype)
    }

    /// A part of the last axis, with another shape at the end: a factor of a joined result.
    fn part(&mut self, x: Id, start: usize, shape: &[usize]) -> Result<Id> {
        let mut dims = self.0.shape(x).dims()?;
        let last = dims.len() - 1;
        let part = self.0.narrow(x, last, start, shape.iter().product::<usize>())?;
        dims.truncate(last);
        dims.extend(shape.iter().copied());
        self.0.reshape(part, &dims)
    }

    /// `a` less its transpose.
    fn skew(&mut self, a: Id) -> Result<Id> {
        let t = self.t(a)?;
        self.0.sub(a, t)
    }

    /// Half the sum of `a` and its transpose.
    fn symmetric(&mut self, a: Id) -> Result<Id> {
        let t = self.t(a)?;
        let sum = self.0.add(a, t)?;
        let half = self.0.lit(sum, 0.5);
        self.0.mul(sum, half)
    }

    /// 1 / (v_j - v_i) at row i and column j, and 0 on the diagonal and for equal values.
    fn gaps(&mut self, v: Id) -> Result<Id> {
        let (column, row) = (self.scale(v, true)?, self.scale(v, false)?);
        let gap = self.0.sub(row, column)?;
        self.recip(gap)
    }

    /// 1 / x, and 0 for 0.
    fn recip(&mut self, x: Id) -> Result<Id> {
        let g = &mut *self.0;
        let (zero, one) = (g.lit(x, 0.0), g.lit(x, 1.0));
        let is_zero = g.eq(x, zero)?;
        // Nothing is divided by 0, so that gradients of this one are finite too.
        let divisor = g.select(is_zero, one, x)?;
        let inverse = g.recip(divisor)?;
        g.select(is_zero, zero, inverse)
    }
}

/// The gradients of the operands of a decomposition.
pub(crate) fn gradient(kind: Kind, g: &mut Graph, x: &[Id], out: Id, dy: Id) -> Result<Vec<Option<Id>>> {
    let (_, rows, columns) = matrix_dims(g.ty(x[0]))?;
    let size = (rows, columns);
    let m = &mut Maker(g);
    if kind == Kind::Solve {
        let transposed = m.t(x[0])?;
        let db = m.op(Kind::Solve, &[transposed, dy])?;
        let right = m.t(out)?;
        let da = m.dot(db, right)?;
        return Ok(vec![Some(m.neg(da)?), Some(db)]);
    }
    if kind == Kind::Pinv {
        return Ok(vec![Some(of_pseudo_inverse(m, x[0], out, dy)?), None]);
    }
    let dx = match kind {
        Kind::Inv => {
            let t = m.t(out)?;
            let left = m.dot(t, dy)?;
            let both = m.dot(left, t)?;
            m.neg(both)?
        }
        Kind::Det => {
            let cofactors = m.op(Kind::Cofactors, &[x[0]])?;
            let dy = m.number(dy)?;
            m.0.mul(cofactors, dy)?
        }
        Kind::Cofactors => of_cofactors(m, x[0], out, dy)?,
        Kind::SlogDet => {
            let by = m.part(dy, 1, &[])?;
            let by = m.number(by)?;
            let inverse = m.op(Kind::Inv, &[x[0]])?;
            let t = m.t(inverse)?;
            m.0.mul(t, by)?
        }
        Kind::Cholesky => of_cholesky(m, out, dy, rows)?,
        Kind::Eigh => {
            let values = m.part(out, 0, &[rows])?;
            let vectors = m.part(out, rows, &[rows, rows])?;
            of_eigen(m, (values, vectors), dy, rows)?
        }
        Kind::Eigvalsh => {
            let all = m.op(Kind::Eigh, &[x[0]])?;
            let vectors = m.part(all, rows, &[rows, rows])?;
            scaled_product(m, vectors, dy, vectors)?
        }
        Kind::Qr { complete: false } if rows >= columns => of_qr(m, out, dy, size)?,
        Kind::Svd { full: false } => of_svd(m, out, dy, size)?,
        Kind::Svd { full: true } if rows == columns => of_svd(m, out, dy, size)?,
        Kind::SvdVals => {
            let k = rows.min(columns);
            let all = m.op(Kind::Svd { full: false }, &[x[0]])?;
            let u = m.part(all, 0, &[rows, k])?;
            let vt = m.part(all, rows * k + k, &[k, columns])?;
            let v = m.t(vt)?;
            scaled_product(m, u, dy, v)?
        }
        _ => {
            let what = format!("the gradient of {kind:?} of {rows} by {columns} matrices");
            return Err(Error::unsupported(
                what,
                "Use the reduced decomposition of matrices with no more columns than rows",
            ));
        }
    };
    Ok(vec![Some(dx)])
}

/// `u diag(s) vᵀ`.
fn scaled_product(m: &mut Maker<'_>, u: Id, s: Id, v: Id) -> Result<Id> {
    let s = m.scale(s, false)?;
    let us = m.0.mul(u, s)?;
    let vt = m.t(v)?;
    m.dot(us, vt)
}

/// `(dC · A⁻ᵀ) C - C dCᵀ A⁻ᵀ` for the cofactors `C = det(A) A⁻ᵀ`. The matrix must not be singular.
fn of_cofactors(m: &mut Maker<'_>, x: Id, c: Id, dc: Id) -> Result<Id> {
    let inverse = m.op(Kind::Inv, &[x])?;
    let t = m.t(inverse)?;
    let n = m.rank(x);
    let both = m.0.mul(dc, t)?;
    let dot = m.0.sum(both, &[n - 2, n - 1], true)?;
    let first = m.0.mul(c, dot)?;
    let dct = m.t(dc)?;
    let turned = m.dot(c, dct)?;
    let second = m.dot(turned, t)?;
    m.0.sub(first, second)
}

/// `-Pᵀ dP Pᵀ + (I - A P) dPᵀ P Pᵀ + Pᵀ P dPᵀ (I - P A)` for the pseudo-inverse `P` of `A` (Golub and
/// Pereyra, "The differentiation of pseudo-inverses", 1973). It needs no vectors, which equal singular values
/// leave undetermined.
fn of_pseudo_inverse(m: &mut Maker<'_>, a: Id, p: Id, dp: Id) -> Result<Id> {
    let (pt, dpt) = (m.t(p)?, m.t(dp)?);
    let left = m.dot(pt, dp)?;
    let first = m.dot(left, pt)?;
    // dPᵀ P Pᵀ, less its part in the space of the columns of A.
    let by_p = m.dot(dpt, p)?;
    let second = m.dot(by_p, pt)?;
    let inside = m.dot(p, second)?;
    let inside = m.dot(a, inside)?;
    let second = m.0.sub(second, inside)?;
    // Pᵀ P dPᵀ, less its part in the space of the rows of A.
    let by_p = m.dot(p, dpt)?;
    let third = m.dot(pt, by_p)?;
    let inside = m.dot(third, p)?;
    let inside = m.dot(inside, a)?;
    let third = m.0.sub(third, inside)?;
    let sum = m.0.add(second, third)?;
    m.0.sub(sum, first)
}

/// `½ (S + Sᵀ)` with `S = L⁻ᵀ Φ(Lᵀ dL) L⁻¹`; `Φ` keeps the lower triangle and halves the diagonal.
fn of_cholesky(m: &mut Maker<'_>, l: Id, dl: Id, n: usize) -> Result<Id> {
    let lt = m.t(l)?;
    let p = m.dot(lt, dl)?;
    let (lower, eye) = (m.mask(l, n, Graph::ge)?, m.mask(l, n, Graph::eq)?);
    let half = m.0.lit(eye, 0.5);
    let eye = m.0.mul(eye, half)?;
    let keep = m.0.sub(lower, eye)?;
    let p = m.0.mul(p, keep)?;
    let left = m.op(Kind::Solve, &[lt, p])?;
    let left = m.t(left)?;
    let s = m.op(Kind::Solve, &[lt, left])?;
    m.symmetric(s)
}

/// `V (diag(dw) + F ∘ (Vᵀ dV)) Vᵀ`, made symmetric.
fn of_eigen(m: &mut Maker<'_>, (w, v): (Id, Id), dy: Id, n: usize) -> Result<Id> {
    let dw = m.part(dy, 0, &[n])?;
    let dv = m.part(dy, n, &[n, n])?;
    let vt = m.t(v)?;
    let inner = m.dot(vt, dv)?;
    let f = m.gaps(w)?;
    let inner = m.0.mul(inner, f)?;
    let eye = m.mask(w, n, Graph::eq)?;
    let dw = m.scale(dw, true)?;
    let diagonal = m.0.mul(eye, dw)?;
    let inner = m.0.add(inner, diagonal)?;
    let left = m.dot(v, inner)?;
    let dx = m.dot(left, vt)?;
    m.symmetric(dx)
}

/// `(dQ + Q copyltu(M)) R⁻ᵀ` with `M = R dRᵀ - dQᵀ Q`; `copyltu` copies the lower triangle to the upper one
/// (Walter and Lehmann, "Algorithmic differentiation of linear algebra functions", 2018).
fn of_qr(m: &mut Maker<'_>, out: Id, dy: Id, (rows, n): (usize, usize)) -> Result<Id> {
    let (q, r) = (m.part(out, 0, &[rows, n])?, m.part(out, rows * n, &[n, n])?);
    let (dq, dr) = (m.part(dy, 0, &[rows, n])?, m.part(dy, rows * n, &[n, n])?);
    let (drt, dqt) = (m.t(dr)?, m.t(dq)?);
    let (a, b) = (m.dot(r, drt)?, m.dot(dqt, q)?);
    let both = m.0.sub(a, b)?;
    let (lower, strict) = (m.mask(r, n, Graph::ge)?, m.mask(r, n, Graph::gt)?);
    let (low, below) = (m.0.mul(both, lower)?, m.0.mul(both, strict)?);
    let above = m.t(below)?;
    let copied = m.0.add(low, above)?;
    let turned = m.dot(q, copied)?;
    let sum = m.0.add(dq, turned)?;
    // Times the inverse of Rᵀ from the right.
    let sum = m.t(sum)?;
    let dx = m.op(Kind::Solve, &[r, sum])?;
    m.t(dx)
}

/// The gradient of a reduced singular value decomposition (Townsend, "Differentiating the singular value
/// decomposition", 2016).
fn of_svd(m: &mut Maker<'_>, out: Id, dy: Id, (rows, columns): (usize, usize)) -> Result<Id> {
    let k = rows.min(columns);
    let (at_s, at_v) = (rows * k, rows * k + k);
    let (u, s, vt) =
        (m.part(out, 0, &[rows, k])?, m.part(out, at_s, &[k])?, m.part(out, at_v, &[k, columns])?);
    let (du, ds, dvt) =
        (m.part(dy, 0, &[rows, k])?, m.part(dy, at_s, &[k])?, m.part(dy, at_v, &[k, columns])?);
    let (v, dv) = (m.t(vt)?, m.t(dvt)?);
    let squares = m.0.mul(s, s)?;
    let f = m.gaps(squares)?;
    let (row, column) = (m.scale(s, false)?, m.scale(s, true)?);
    let inverse = m.recip(row)?;

    let ut = m.t(u)?;
    let turn = m.dot(ut, du)?;
    let turn_u = m.skew(turn)?;
    let turn_u = m.0.mul(turn_u, f)?;
    let turn_u = m.0.mul(turn_u, row)?;
    let turn = m.dot(vt, dv)?;
    let turn_v = m.skew(turn)?;
    let turn_v = m.0.mul(turn_v, f)?;
    let turn_v = m.0.mul(turn_v, column)?;
    let eye = m.mask(s, k, Graph::eq)?;
    let ds = m.scale(ds, true)?;
    let diagonal = m.0.mul(eye, ds)?;
    let inner = m.0.add(turn_u, turn_v)?;
    let inner = m.0.add(inner, diagonal)?;
    let left = m.dot(u, inner)?;
    let mut dx = m.dot(left, vt)?;
    if rows > k {
        // (I - U Uᵀ) dU S⁻¹ Vᵀ
        let rest = outside(m, u, du)?;
        let rest = m.0.mul(rest, inverse)?;
        let rest = m.dot(rest, vt)?;
        dx = m.0.add(dx, rest)?;
    }
    if columns > k {
        // U S⁻¹ dVᵀ (I - V Vᵀ)
        let rest = outside(m, v, dv)?;
        let rest = m.0.mul(rest, inverse)?;
        let rest = m.t(rest)?;
        let rest = m.dot(u, rest)?;
        dx = m.0.add(dx, rest)?;
    }
    Ok(dx)
}

/// The part of `d` outside of the space of the columns of `q`.
fn outside(m: &mut Maker<'_>, q: Id, d: Id) -> Result<Id> {
    let qt = m.t(q)?;
    let inside = m.dot(qt, d)?;
    let inside = m.dot(q, inside)?;
    m.0.sub(d, inside)
}

//! Linear algebra, computed on the host in f64: custom ops with a reference and no kernel. So they are lazy
//! like other operations, run inside compiled functions, and have gradients.
//!
//! An op has one result. A decomposition with several factors returns them joined: for each matrix of the
//! batch, the elements of the factors one after another. The Python side cuts them apart.

use crate::errors::argument;
use crate::linalg_grad;
use crate::tensor::Tensor;
use halcyon::{ConstData, Error, Result, Tensor as Inner};
use halcyon_ir::custom::CustomOp;
use halcyon_ir::{DType, Graph, NodeId, TensorType};
use nalgebra::DMatrix;
use nalgebra::linalg::{SVD, SymmetricEigen};
use pyo3::prelude::*;
use std::sync::Arc;

type Matrix = DMatrix<f64>;

/// What is computed of each matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The lower triangular factor.
    Cholesky,
    Inv,
    /// The pseudo-inverse. The second operand is one number per matrix: singular values up to the largest one
    /// times this number count as zero.
    Pinv,
    Det,
    /// The gradient of the determinant. For a matrix that is not singular, it is the determinant times the
    /// transposed inverse.
    Cofactors,
    /// The sign and the logarithm of the magnitude of the determinant.
    SlogDet,
    /// Of two operands: the solution of a linear system.
    Solve,
    /// Eigenvalues in ascending order, then eigenvectors as columns. Reads the lower triangle.
    Eigh,
    Eigvalsh,
    /// Q, then R.
    Qr {
        complete: bool,
    },
    /// U, then singular values in descending order, then V transposed.
    Svd {
        full: bool,
    },
    SvdVals,
}

/// The names of the kinds, as Python gives them.
const NAMES: &[(&str, Kind)] = &[
    ("cholesky", Kind::Cholesky),
    ("inv", Kind::Inv),
    ("pinv", Kind::Pinv),
    ("det", Kind::Det),
    ("cofactors", Kind::Cofactors),
    ("slogdet", Kind::SlogDet),
    ("solve", Kind::Solve),
    ("eigh", Kind::Eigh),
    ("eigvalsh", Kind::Eigvalsh),
    ("qr", Kind::Qr { complete: false }),
    ("qr_complete", Kind::Qr { complete: true }),
    ("svd", Kind::Svd { full: false }),
    ("svd_full", Kind::Svd { full: true }),
    ("svdvals", Kind::SvdVals),
];

/// A custom op that computes a kind.
#[derive(Debug)]
pub(crate) struct Decomposition {
    pub(crate) kind: Kind,
    /// `linalg.` and the name of the kind. The prefix makes an argument error a `LinAlgError` in Python.
    name: String,
}

impl Decomposition {
    pub(crate) fn shared(kind: Kind) -> Arc<dyn CustomOp> {
        let name = NAMES.iter().find(|(_, k)| *k == kind).map_or("", |(n, _)| n);
        Arc::new(Decomposition { kind, name: format!("linalg.{name}") })
    }

    fn wrong(&self, what: impl Into<String>) -> Error {
        Error::argument(&self.name, what)
    }
}

/// The batch axes, rows and columns of a type.
pub(crate) fn matrix_dims(t: &TensorType) -> Result<(Vec<usize>, usize, usize)> {
    let dims = t.shape.dims()?;
    match dims[..] {
        [ref batch @ .., m, n] => Ok((batch.to_vec(), m, n)),
        _ => Err(Error::shape("linalg", format!("{} is not a matrix", t.shape))),
    }
}

impl CustomOp for Decomposition {
    fn name(&self) -> &str {
        &self.name
    }

    fn infer(&self, x: &[TensorType]) -> Result<TensorType> {
        let count = if matches!(self.kind, Kind::Solve | Kind::Pinv) { 2 } else { 1 };
        if x.len() != count {
            return Err(self.wrong(format!("it takes {count} operands, not {}", x.len())));
        }
        let dtype = x[0].dtype;
        if !matches!(dtype, DType::F32 | DType::F64) {
            return Err(self.wrong(format!("it takes f32 or f64, not {dtype}")));
        }
        let (mut dims, m, n) = matrix_dims(&x[0])?;
        let square = !matches!(self.kind, Kind::Qr { .. } | Kind::Svd { .. } | Kind::SvdVals | Kind::Pinv);
        if square && m != n {
            return Err(self.wrong(format!("the matrix of {m} rows and {n} columns is not square")));
        }
        let k = m.min(n);
        match self.kind {
            Kind::Cholesky | Kind::Inv | Kind::Cofactors => dims.extend([n, n]),
            Kind::Det => {}
            Kind::SlogDet => dims.push(2),
            Kind::Eigh => dims.push(n + n * n),
            Kind::Eigvalsh => dims.push(n),
            Kind::Qr { complete } => {
                let k = if complete { m } else { k };
                dims.push(m * k + k * n);
            }
            Kind::Svd { full: true } => dims.push(m * m + k + n * n),
            Kind::Svd { full: false } => dims.push(m * k + k + k * n),
            Kind::SvdVals => dims.push(k),
            Kind::Solve | Kind::Pinv => {
                let (batch, rows, columns) = matrix_dims(&x[1])?;
                let fits = if self.kind == Kind::Solve { rows == n } else { (rows, columns) == (1, 1) };
                if batch != dims || !fits || x[1].dtype != dtype {
                    let what = format!("{} and {} do not fit", x[0], x[1]);
                    return Err(self.wrong(what));
                }
                dims.extend(if self.kind == Kind::Solve { [n, columns] } else { [n, m] });
            }
        }
        Ok(TensorType::new(dtype, &dims[..]))
    }

    fn reference(&self, x: &[ConstData]) -> Result<ConstData> {
        let types: Vec<TensorType> = x.iter().map(|d| TensorType::new(d.dtype, &d.dims)).collect();
        let to = self.infer(&types)?;
        let (batch, m, n) = matrix_dims(&types[0])?;
        let count: usize = batch.iter().product();
        let from = x[0].to_vec::<f64>();
        let (rows, columns) = types.get(1).map(matrix_dims).transpose()?.map_or((0, 0), |(_, r, c)| (r, c));
        let right = x.get(1).map(|d| d.to_vec::<f64>()).unwrap_or_default();
        let mut out = vec![];
        for i in 0..count {
            let a = Matrix::from_row_slice(m, n, &from[i * m * n..(i + 1) * m * n]);
            let size = rows * columns;
            let b = right.get(i * size..(i + 1) * size).unwrap_or_default();
            let b = Matrix::from_row_slice(rows, columns, b);
            self.compute(a, b, &mut out)?;
        }
        let dims = to.shape.dims()?;
        match to.dtype {
            DType::F32 => {
                ConstData::from_slice(&dims, &out.into_iter().map(|v| v as f32).collect::<Vec<f32>>())
            }
            _ => ConstData::from_slice(&dims, &out),
        }
    }

    fn gradient(&self, g: &mut Graph, x: &[NodeId], out: NodeId, dy: NodeId) -> Result<Vec<Option<NodeId>>> {
        linalg_grad::gradient(self.kind, g, x, out, dy)
    }
}

/// Appends a matrix in row-major order.
fn put(out: &mut Vec<f64>, a: &Matrix) {
    a.row_iter().for_each(|r| out.extend(r.iter()));
}

impl Decomposition {
    fn singular(&self) -> Error {
        self.wrong("a matrix is singular; its linear system has no unique solution")
    }

    fn solve(&self, a: Matrix, b: Matrix) -> Result<Matrix> {
        if a.is_empty() {
            return Ok(b);
        }
        let lu = a.lu();
        if lu.u().diagonal().iter().any(|v| *v == 0.0) {
            return Err(self.singular());
        }
        lu.solve(&b).ok_or_else(|| self.singular())
    }

    /// Iterations do not end for numbers that are not finite.
    fn finite(&self, a: &Matrix) -> Result<()> {
        match a.iter().all(|v| v.is_finite()) {
            true => Ok(()),
            false => Err(self.wrong("a matrix has an element that is infinite or NaN")),
        }
    }

    /// Appends the result for one matrix. `b` is the second operand.
    fn compute(&self, a: Matrix, b: Matrix, out: &mut Vec<f64>) -> Result<()> {
        let (m, n) = a.shape();
        match self.kind {
            Kind::Cholesky => {
                if n > 0 {
                    let factor = a.cholesky().filter(|c| c.l_dirty().diagonal().iter().all(|v| !v.is_nan()));
                    let factor =
                        factor.ok_or_else(|| self.wrong("a matrix is not symmetric positive definite"))?;
                    put(out, &factor.l());
                }
            }
            Kind::Inv => put(out, &self.solve(a, Matrix::identity(n, n))?),
            Kind::Solve => put(out, &self.solve(a, b)?),
            Kind::Pinv => put(out, &self.pseudo_inverse(a, b.iter().copied().next().unwrap_or(0.0))?),
            Kind::Cofactors => put(out, &self.cofactors(a)?),
            Kind::Det => {
                let (sign, pivots) = pivots(a);
                out.push(pivots.iter().fold(sign, |p, v| p * v));
            }
            Kind::SlogDet => {
                let (sign, pivots) = pivots(a);
                let signs = pivots.iter().fold(sign, |p, v| p * if *v == 0.0 { 0.0 } else { v.signum() });
                out.extend([signs, pivots.iter().map(|v| v.abs().ln()).sum()]);
            }
            Kind::Eigh => {
                let (values, vectors) = self.eigen(a)?;
                out.extend(values);
                put(out, &vectors);
            }
            Kind::Eigvalsh => out.extend(self.eigen(a)?.0),
            Kind::Qr { complete } => qr(a, complete, out),
            Kind::Svd { full } => {
                let (u, s, vt) = self.svd(a)?;
                put(out, &if full { completed(u, m) } else { u });
                out.extend(s);
                put(out, &if full { completed(vt.transpose(), n).transpose() } else { vt });
            }
            Kind::SvdVals => out.extend(self.svd(a)?.1),
        }
        Ok(())
    }
}

impl Decomposition {
    /// Eigenvalues in ascending order, and eigenvectors as columns.
    fn eigen(&self, mut a: Matrix) -> Result<(Vec<f64>, Matrix)> {
        let n = a.nrows();
        if n == 0 {
            return Ok((vec![], a));
        }
        a.fill_upper_triangle_with_lower_triangle();
        self.finite(&a)?;
        let e = SymmetricEigen::try_new(a, f64::EPSILON, steps(n));
        let e = e.ok_or_else(|| self.wrong("the eigenvalues of a matrix did not converge"))?;
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|i, j| e.eigenvalues[*i].total_cmp(&e.eigenvalues[*j]));
        let values = order.iter().map(|i| e.eigenvalues[*i]).collect();
        Ok((values, e.eigenvectors.select_columns(&order)))
    }

    /// U, the singular values in descending order, and V transposed, for the smaller side of the matrix.
    fn svd(&self, a: Matrix) -> Result<(Matrix, Vec<f64>, Matrix)> {
        let (m, n) = a.shape();
        if a.is_empty() {
            return Ok((Matrix::zeros(m, 0), vec![], Matrix::zeros(0, n)));
        }
        self.finite(&a)?;
        let vectors = self.kind != Kind::SvdVals;
        let found = SVD::try_new(a, vectors, vectors, f64::EPSILON, steps(m.max(n)));
        let found = found.ok_or_else(|| self.wrong("the singular values of a matrix did not converge"))?;
        let values = found.singular_values.iter().copied().collect();
        let empty = || Matrix::zeros(0, 0);
        Ok((found.u.unwrap_or_else(empty), values, found.v_t.unwrap_or_else(empty)))
    }
}

impl Decomposition {
    fn pseudo_inverse(&self, a: Matrix, rtol: f64) -> Result<Matrix> {
        let (u, s, mut vt) = self.svd(a)?;
        let least = s.iter().copied().fold(0.0, f64::max) * rtol;
        for (i, v) in s.iter().enumerate() {
            vt.row_mut(i).scale_mut(if *v > least { 1.0 / v } else { 0.0 });
        }
        Ok(vt.transpose() * u.transpose())
    }

    fn cofactors(&self, a: Matrix) -> Result<Matrix> {
        /// A smallest pivot below this part of the largest one means that the inverse has few right digits.
        const SMALL: f64 = 1e-6;
        let n = a.nrows();
        if a.is_empty() {
            return Ok(a);
        }
        if a.iter().any(|v| !v.is_finite()) {
            return Ok(Matrix::from_element(n, n, f64::NAN));
        }
        let lu = a.clone().lu();
        let pivots = lu.u().diagonal().abs();
        if pivots.min() > SMALL * pivots.max()
            && let Some(inverse) = lu.try_inverse()
        {
            return Ok(inverse.transpose() * lu.determinant());
        }
        // The cofactors of a product are the product of the cofactors, and those of an orthogonal matrix are
        // the matrix times its determinant.
        let (mut u, s, vt) = self.svd(a)?;
        let sign = u.determinant() * vt.determinant();
        for i in 0..n {
            let others: f64 = s.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, v)| v).product();
            u.column_mut(i).scale_mut(sign * others);
        }
        Ok(u * vt)
    }
}

/// The number of steps after which an iteration counts as endless. It needs two or three for each value.
fn steps(n: usize) -> usize {
    100 * n.max(10)
}

/// The sign of the row exchanges, and the pivots, of Gaussian elimination.
fn pivots(a: Matrix) -> (f64, Vec<f64>) {
    if a.is_empty() {
        return (1.0, vec![]);
    }
    let lu = a.lu();
    (lu.p().determinant(), lu.u().diagonal().iter().copied().collect())
}

/// Appends Q and R. R has only zeros below the diagonal.
fn qr(a: Matrix, complete: bool, out: &mut Vec<f64>) {
    let (m, n) = a.shape();
    let k = if complete { m } else { m.min(n) };
    if a.is_empty() {
        put(out, &Matrix::identity(m, k));
        put(out, &Matrix::zeros(k, n));
        return;
    }
    let qr = a.qr();
    let mut transposed = Matrix::identity(m, m);
    qr.q_tr_mul(&mut transposed);
    put(out, &transposed.rows(0, k).transpose());
    put(out, &qr.r().resize_vertically(k, 0.0));
}

/// The columns, which are orthonormal, with further ones up to a basis of all `m` dimensions.
fn completed(u: Matrix, m: usize) -> Matrix {
    let k = u.ncols();
    if k == 0 {
        return Matrix::identity(m, m);
    }
    let mut all = u.clone().resize_horizontally(m, 0.0);
    let mut transposed = Matrix::identity(m, m);
    u.qr().q_tr_mul(&mut transposed);
    for i in k..m {
        all.set_column(i, &transposed.row(i).transpose());
    }
    all
}

/// Linear algebra of the last two axes; see the kinds. The factors of a decomposition are joined.
#[pyfunction]
fn linalg(name: &str, operands: Vec<PyRef<'_, Tensor>>) -> PyResult<Tensor> {
    let kind = NAMES.iter().find(|(n, _)| *n == name).map(|(_, k)| *k);
    let kind = kind.ok_or_else(|| argument("linalg", format!("\"{name}\" is not a decomposition")))?;
    let all: Vec<&Inner> = operands.iter().map(|t| &t.0).collect();
    Tensor::made(Inner::custom(Decomposition::shared(kind), &all))
}

/// Adds the function to the submodule `ops`.
pub(crate) fn register(ops: &Bound<'_, PyModule>) -> PyResult<()> {
    ops.add_function(wrap_pyfunction!(linalg, ops)?)
}

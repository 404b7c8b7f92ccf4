//! Small tensors whose values are known during import: constants and shape arithmetic.

use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{ConstData, DType, Dim, Error, Result, Scalar, ScalarOp};

/// One known element: a value, or a size that depends on symbolic dimensions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Num {
    Is(Scalar),
    Size(Dim),
}

impl Num {
    pub fn int(v: i64) -> Num {
        Num::Is(Scalar::I(v))
    }

    pub fn size(d: Dim) -> Num {
        match d.known() {
            Some(n) => Num::int(n as i64),
            None => Num::Size(d),
        }
    }

    /// The value, or `None` if it depends on a symbol.
    pub fn known(self) -> Option<Scalar> {
        match self {
            Num::Is(s) => Some(s),
            Num::Size(_) => None,
        }
    }

    /// The element as a dimension; `None` for negative values.
    pub fn dim(self) -> Option<Dim> {
        match self {
            Num::Is(s) => usize::try_from(s.as_i64()).ok().map(Dim::from),
            Num::Size(d) => Some(d),
        }
    }
}

/// A dense tensor of known elements in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub dtype: DType,
    pub dims: Vec<usize>,
    pub vals: Vec<Num>,
}

/// Whether a constant of this type and size is folded during import. Larger ones, such as weights, are not
/// copied.
pub(super) fn small(dtype: DType, dims: &[usize]) -> bool {
    let n = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    n.is_some_and(|n| n <= if dtype.is_float() { 64 } else { 4096 })
}

impl Host {
    pub fn scalar(dtype: DType, v: impl Into<Scalar>) -> Host {
        Host { dtype, dims: vec![], vals: vec![Num::Is(v.into().cast(dtype))] }
    }

    /// A vector of i64.
    pub fn ints(vals: Vec<Num>) -> Host {
        Host { dtype: DType::I64, dims: vec![vals.len()], vals }
    }

    /// The elements of a constant; `None` if it is not [`small`].
    pub fn of(c: &ConstData) -> Option<Host> {
        small(c.dtype, &c.dims).then(|| Host {
            dtype: c.dtype,
            dims: c.dims.to_vec(),
            vals: c.scalars().map(Num::Is).collect(),
        })
    }

    /// The tensor as a constant.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if an element depends on a symbolic dimension.
    pub fn data(&self) -> Result<ConstData> {
        let mut vals = Vec::with_capacity(self.vals.len());
        for v in &self.vals {
            match v {
                Num::Is(s) => vals.push(*s),
                Num::Size(d) => return Err(symbolic(*d)),
            }
        }
        crate::data::from_scalars(self.dtype, &self.dims, vals)
    }

    /// The value of every element, if all are known and equal and there is at least one.
    pub fn uniform(&self) -> Option<Scalar> {
        let first = self.vals.first()?.known()?;
        self.vals.iter().all(|v| *v == Num::Is(first)).then_some(first)
    }

    /// A tensor of shape `dims`. `index` maps each of its positions to the index of an element in
    /// `self.vals`. `None` if `index` returns none or one that is out of range.
    pub fn map(&self, dims: Vec<usize>, mut index: impl FnMut(&[usize]) -> Option<usize>) -> Option<Host> {
        let n: usize = dims.iter().product();
        let mut at = vec![0; dims.len()];
        let mut vals = Vec::with_capacity(n);
        for _ in 0..n {
            vals.push(*self.vals.get(index(&at)?)?);
            step(&mut at, &dims);
        }
        Some(Host { dtype: self.dtype, dims, vals })
    }

    /// Broadcasts to `dims` by NumPy's rules. `None` if the shapes are incompatible.
    pub fn expand(&self, dims: &[usize]) -> Option<Host> {
        let lead = dims.len().checked_sub(self.dims.len())?;
        let ok = self.dims.iter().zip(&dims[lead..]).all(|(a, b)| a == b || *a == 1);
        ok.then(|| {
            self.map(dims.to_vec(), |at| {
                Some(flat(
                    &self.dims,
                    at[lead..].iter().zip(&self.dims).map(|(&i, &n)| if n == 1 { 0 } else { i }),
                ))
            })
        })?
    }

    /// Casts to another type. `None` if that needs the value of a symbol.
    pub fn cast(&self, dtype: DType) -> Option<Host> {
        let one = |v: &Num| match v {
            Num::Is(s) => Some(Num::Is(s.cast(dtype))),
            // Sizes fit every integer type of at least 32 bits.
            Num::Size(d) if dtype.is_int() && dtype.bits() >= 32 => Some(Num::Size(*d)),
            Num::Size(_) => None,
        };
        let vals = self.vals.iter().map(one).collect::<Option<_>>()?;
        Some(Host { dtype, dims: self.dims.clone(), vals })
    }

    /// Reduces over `axes`, which must be in range. `None` if that needs the value of a symbol.
    pub fn reduce(&self, kind: ReduceKind, axes: &[usize], keep: bool) -> Option<Host> {
        let op = kind.op(self.dtype);
        let part: Vec<usize> =
            self.dims.iter().enumerate().map(|(k, &n)| if axes.contains(&k) { 1 } else { n }).collect();
        let mut vals = vec![Num::Is(kind.identity(self.dtype)); part.iter().product()];
        let mut at = vec![0; self.dims.len()];
        for v in &self.vals {
            let to = flat(&part, at.iter().zip(&part).map(|(&i, &n)| if n == 1 { 0 } else { i }));
            vals[to] = eval(op, self.dtype, &[vals[to], *v])?;
            step(&mut at, &self.dims);
        }
        let dims = match keep {
            true => part,
            false => part.iter().enumerate().filter(|(k, _)| !axes.contains(k)).map(|(_, n)| *n).collect(),
        };
        Some(Host { dtype: self.dtype, dims, vals })
    }
}

/// Moves `at` to the next position in row-major order.
fn step(at: &mut [usize], dims: &[usize]) {
    for d in (0..dims.len()).rev() {
        at[d] += 1;
        if at[d] < dims[d] {
            return;
        }
        at[d] = 0;
    }
}

/// Row-major offset of a position.
pub(super) fn flat(dims: &[usize], at: impl Iterator<Item = usize>) -> usize {
    dims.iter().zip(at).fold(0, |s, (n, i)| s * n + i)
}

/// Evaluates a scalar op on operands of type `d`. `None` if the result depends on the value of a symbol.
pub(super) fn eval(op: ScalarOp, d: DType, x: &[Num]) -> Option<Num> {
    if let Some(s) = x.iter().map(|n| n.known()).collect::<Option<Vec<Scalar>>>() {
        return Some(Num::Is(op.eval(d, &s)));
    }
    // Symbolic sizes are computed in 64 bits; constants large enough to overflow them are not folded.
    if x.iter().any(|n| n.known().is_some_and(|s| s.as_i64().unsigned_abs() > 1 << 40)) {
        return None;
    }
    let truth = |b: bool| Some(Num::Is(Scalar::Bool(b)));
    match (op, x) {
        (ScalarOp::Select, [c, a, b]) => Some(if c.known()?.as_bool() { *a } else { *b }),
        (ScalarOp::Add, [Num::Size(a), Num::Is(b)] | [Num::Is(b), Num::Size(a)]) => {
            Some(Num::size(a.offset(b.as_i64())))
        }
        (ScalarOp::Sub, [Num::Size(a), Num::Is(b)]) => Some(Num::size(a.offset(-b.as_i64()))),
        (ScalarOp::Eq, [a, b]) => truth(equal(*a, *b)?),
        (ScalarOp::Ne, [a, b]) => truth(!equal(*a, *b)?),
        // A size is never negative.
        (ScalarOp::Gt | ScalarOp::Ge, [Num::Size(_), Num::Is(b)]) if b.as_i64() < 0 => truth(true),
        (ScalarOp::Lt | ScalarOp::Le, [Num::Size(_), Num::Is(b)]) if b.as_i64() < 0 => truth(false),
        (_, [a, b]) => {
            let (a, b) = (a.dim()?, b.dim()?);
            Some(Num::size(match op {
                ScalarOp::Add => a.add(b),
                ScalarOp::Sub => a.sub(b),
                ScalarOp::Mul => a.mul(b),
                ScalarOp::Div => a.div(b).ok()?,
                ScalarOp::Max => a.max(b),
                _ => return None,
            }))
        }
        _ => None,
    }
}

fn equal(a: Num, b: Num) -> Option<bool> {
    match (a, b) {
        (Num::Size(a), Num::Size(b)) if a == b => Some(true),
        (Num::Size(_), Num::Is(s)) | (Num::Is(s), Num::Size(_)) if s.as_i64() < 0 => Some(false),
        _ => None,
    }
}

/// The error for a value that depends on a symbolic dimension where a number is needed.
pub(super) fn symbolic(d: Dim) -> Error {
    Error::unsupported(format!("a value that depends on the symbolic size {d}"), "Give concrete input shapes")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nums(v: &[i64]) -> Vec<Num> {
        v.iter().map(|&v| Num::int(v)).collect()
    }

    #[test]
    fn views_and_reductions() {
        let h = Host { dtype: DType::I64, dims: vec![2, 3], vals: nums(&[1, 2, 3, 4, 5, 6]) };
        assert_eq!(h.reduce(ReduceKind::Sum, &[1], false).unwrap().vals, nums(&[6, 15]));
        assert_eq!(h.reduce(ReduceKind::Prod, &[0], true).unwrap().dims, [1, 3]);
        assert_eq!(h.reduce(ReduceKind::Max, &[0, 1], false).unwrap().vals, nums(&[6]));
        let row = Host { dtype: DType::I64, dims: vec![1, 2], vals: nums(&[7, 8]) };
        assert_eq!(row.expand(&[2, 2]).unwrap().vals, nums(&[7, 8, 7, 8]));
        assert!(row.expand(&[2, 3]).is_none());
        assert!(row.expand(&[2]).is_none());
        assert!(row.map(vec![1], |_| Some(9)).is_none());
    }

    #[test]
    fn symbolic_sizes_fold_if_the_result_is_certain() {
        let b = Num::Size(Dim::sym("b"));
        let op = |o, x: &[Num]| eval(o, DType::I64, x);
        assert_eq!(op(ScalarOp::Add, &[b, Num::int(-1)]), Some(Num::Size(Dim::sym("b").offset(-1))));
        assert_eq!(op(ScalarOp::Mul, &[b, Num::int(0)]), Some(Num::int(0)));
        assert_eq!(op(ScalarOp::Sub, &[b, b]), Some(Num::int(0)));
        assert_eq!(op(ScalarOp::Eq, &[b, Num::int(-1)]), Some(Num::Is(Scalar::Bool(false))));
        assert_eq!(op(ScalarOp::Eq, &[b, Num::int(4)]), None);
        assert_eq!(op(ScalarOp::Lt, &[b, Num::int(4)]), None);
        assert_eq!(op(ScalarOp::Mul, &[b, Num::int(-1)]), None);
        assert!(matches!(Host::ints(vec![b]).data(), Err(Error::Unsupported { .. })));
        assert!(Host::ints(vec![b]).cast(DType::I32).is_some());
        assert!(Host::ints(vec![b]).cast(DType::F32).is_none());
    }
}

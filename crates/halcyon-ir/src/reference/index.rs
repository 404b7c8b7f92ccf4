//! Positions of elements, for the ops that move elements or read them by index.

use super::Tensor;
use crate::error::{Error, Result};
use crate::ops::Op;

/// Row-major strides.
pub(crate) fn strides(dims: &[usize]) -> Vec<i64> {
    let mut s = vec![1i64; dims.len()];
    for k in (1..dims.len()).rev() {
        s[k - 1] = s[k] * dims[k] as i64;
    }
    s
}

/// `base + Σ index·stride` for every index of `dims`, in row-major order.
pub(crate) fn walk(dims: &[usize], strides: &[i64], base: i64) -> Vec<usize> {
    let n: usize = dims.iter().product();
    let mut out = Vec::with_capacity(n);
    let Some(last) = dims.len().checked_sub(1) else {
        return vec![base as usize];
    };
    if n == 0 {
        return out;
    }
    let (mut idx, mut at) = (vec![0usize; dims.len()], base);
    loop {
        out.extend((0..dims[last] as i64).map(|j| (at + j * strides[last]) as usize));
        let mut k = last;
        loop {
            if k == 0 {
                return out;
            }
            k -= 1;
            idx[k] += 1;
            at += strides[k];
            if idx[k] < dims[k] {
                break;
            }
            at -= strides[k] * dims[k] as i64;
            idx[k] = 0;
        }
    }
}

/// Calls `f(start, step, len)` for every line along `axis`, in row-major order of the other axes.
pub(crate) fn lines(dims: &[usize], axis: usize, mut f: impl FnMut(usize, usize, usize)) {
    let inner: usize = dims[axis + 1..].iter().product();
    let outer: usize = dims[..axis].iter().product();
    for a in 0..outer {
        for b in 0..inner {
            f(a * dims[axis] * inner + b, inner, dims[axis]);
        }
    }
}

/// Converts `index` to a position in `0..n`. Negative indices count from the end.
fn place(op: &Op, at: usize, index: i64, n: usize) -> Result<usize> {
    let i = if index < 0 { index.saturating_add(n as i64) } else { index };
    usize::try_from(i).ok().filter(|i| *i < n).ok_or_else(|| Error::Index {
        op: op.name(),
        range: format!("-{n}..{n}"),
        at: Default::default(),
        found: Some((at, index)),
        input: None,
    })
}

/// Checks that labels are class indices in `0..classes`. Labels equal to `ignore` become 0.
pub(crate) fn classes(op: &Op, labels: &Tensor, classes: usize, ignore: Option<i64>) -> Result<Vec<i64>> {
    let one = |(at, l): (usize, &i64)| match *l {
        l if Some(l) == ignore => Ok(0),
        l if (0..classes as i64).contains(&l) => Ok(l),
        l => Err(Error::Index {
            op: op.name(),
            range: format!("0..{classes}"),
            at: Default::default(),
            found: Some((at, l)),
            input: None,
        }),
    };
    labels.ints()?.iter().enumerate().map(one).collect()
}

/// For every element of the result of an [`Op::Gather`], the position in `x` from which it is read. The
/// updates of an [`Op::ScatterRows`] go to the same positions.
pub(crate) fn rows(op: &Op, x: &[usize], index: &Tensor, axis: usize) -> Result<Vec<usize>> {
    let inner: usize = x[axis + 1..].iter().product();
    let outer: usize = x[..axis].iter().product();
    let idx: Vec<usize> =
        index.ints()?.iter().enumerate().map(|(k, i)| place(op, k, *i, x[axis])).collect::<Result<_>>()?;
    let mut out = Vec::with_capacity(outer * idx.len() * inner);
    for a in 0..outer {
        for i in &idx {
            let at = (a * x[axis] + i) * inner;
            out.extend(at..at + inner);
        }
    }
    Ok(out)
}

/// For every element of the result of an [`Op::GatherElements`], the position in `x` from which it is read.
/// The updates of an [`Op::ScatterElements`] go to the same positions.
pub(crate) fn elements(op: &Op, x: &[usize], index: &Tensor, axis: usize) -> Result<Vec<usize>> {
    let mut st = strides(x);
    let along = st[axis] as usize;
    st[axis] = 0;
    let mut at = walk(&index.dims, &st, 0);
    for (k, (p, i)) in at.iter_mut().zip(index.ints()?).enumerate() {
        *p += place(op, k, *i, x[axis])? * along;
    }
    Ok(at)
}

/// For every element of an [`Op::UpdateSlice`]'s update, the position in the base to which it is written.
pub(crate) fn update(op: &Op, base: &[usize], upd: &Tensor, pos: &Tensor, axis: usize) -> Result<Vec<usize>> {
    let at = pos.ints()?.first().copied().unwrap_or(0);
    let room = (base[axis] - upd.dims[axis]) as i64;
    if !(0..=room).contains(&at) {
        return Err(Error::Index {
            op: op.name(),
            range: format!("0..={room}"),
            at: Default::default(),
            found: Some((0, at)),
            input: None,
        });
    }
    let st = strides(base);
    Ok(walk(&upd.dims, &st, at * st[axis]))
}

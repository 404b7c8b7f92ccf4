//! Strided views of a buffer. Kernels fold the index expression of a view into their loads.

use crate::dtype::Scalar;
use crate::shape::Dims;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Element `i0, i1, …` lies at `offset + Σ i_k * strides[k]`, counted in elements. If `mask` is set and the
/// index along an axis is outside the axis's `[lo, hi)`, the element is the reader's fill value and memory is
/// not accessed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct View {
    pub shape: Dims,
    pub strides: SmallVec<[isize; 6]>,
    pub offset: isize,
    pub mask: Option<SmallVec<[(usize, usize); 4]>>,
}

/// How a view op makes the view of its result from the view of its operand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Restride {
    Permute(SmallVec<[usize; 4]>),
    Expand(Dims),
    Slice {
        start: Dims,
        step: SmallVec<[isize; 6]>,
        len: Dims,
    },
    Pad {
        lo: SmallVec<[usize; 4]>,
        hi: SmallVec<[usize; 4]>,
        /// The value of the elements outside the operand.
        value: Scalar,
    },
    Reshape(Dims),
}

impl Restride {
    /// The view of the result for a view of the operand; `None` if strides cannot express it.
    pub fn apply(&self, v: &View) -> Option<View> {
        Some(match self {
            Restride::Permute(p) => v.permute(p),
            Restride::Expand(s) => v.expand(s),
            Restride::Slice { start, step, len } => v.slice(start, step, len),
            Restride::Pad { lo, hi, .. } => v.pad(lo, hi),
            Restride::Reshape(s) => v.reshape(s)?,
        })
    }

    /// The value of elements that the operand does not have.
    pub fn fill(&self) -> Option<Scalar> {
        match self {
            Restride::Pad { value, .. } => Some(*value),
            Restride::Permute(_) | Restride::Expand(_) | Restride::Slice { .. } | Restride::Reshape(_) => {
                None
            }
        }
    }

    /// Whether [`Restride::apply`] may return `None`, because one stride may not be enough for an axis of the
    /// result.
    pub fn reshapes(&self) -> bool {
        match self {
            Restride::Reshape(_) => true,
            Restride::Permute(_) | Restride::Expand(_) | Restride::Slice { .. } | Restride::Pad { .. } => {
                false
            }
        }
    }
}

/// The range of the indices `i` below `len` whose positions `start + i * step` are inside `[lo, hi)`.
fn inside((lo, hi): (usize, usize), start: isize, step: isize, len: usize) -> (usize, usize) {
    let (lo, hi, len) = (lo as isize, hi as isize, len as isize);
    // The first index whose position is at or past a bound, in the direction of the step: the quotient
    // rounded up. For negative steps Euclidean division already rounds up.
    let past = |bound: isize| {
        let (q, r) = ((bound - start).div_euclid(step), (bound - start).rem_euclid(step));
        q + isize::from(step > 0 && r != 0)
    };
    let (a, b) = match step > 0 {
        true => (past(lo), past(hi)),
        false => (past(hi - 1), past(lo - 1)),
    };
    let (a, b) = (a.clamp(0, len), b.clamp(0, len));
    if a < b { (a as usize, b as usize) } else { (0, 0) }
}

/// Row-major strides of a dense tensor.
pub fn dense_strides(shape: &[usize]) -> SmallVec<[isize; 6]> {
    let mut s: SmallVec<[isize; 6]> = SmallVec::from_elem(1, shape.len());
    for i in (0..shape.len().saturating_sub(1)).rev() {
        s[i] = s[i + 1] * shape[i + 1].max(1) as isize;
    }
    s
}

impl View {
    /// The row-major view of a whole buffer.
    pub fn dense(shape: &[usize]) -> View {
        View { shape: shape.into(), strides: dense_strides(shape), offset: 0, mask: None }
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the view is row-major without gaps, at offset 0 and without a mask. Strides of dimensions of
    /// size 1, and of views without elements, are ignored.
    pub fn is_dense(&self) -> bool {
        self.offset == 0 && self.has_dense_strides()
    }

    /// Like [`View::is_dense`], but at any offset.
    pub fn has_dense_strides(&self) -> bool {
        self.mask.is_none()
            && (self.numel() == 0
                || dense_strides(&self.shape)
                    .iter()
                    .zip(&self.strides)
                    .zip(&self.shape)
                    .all(|((d, s), n)| *n == 1 || d == s))
    }

    pub fn permute(&self, perm: &[usize]) -> View {
        View {
            shape: perm.iter().map(|&p| self.shape[p]).collect(),
            strides: perm.iter().map(|&p| self.strides[p]).collect(),
            offset: self.offset,
            mask: self.mask.as_ref().map(|m| perm.iter().map(|&p| m[p]).collect()),
        }
    }

    /// Broadcasts to `shape` by NumPy's rules. The view must be broadcastable to `shape`.
    pub fn expand(&self, shape: &[usize]) -> View {
        let lead = shape.len() - self.rank();
        let mut v = View { shape: shape.into(), strides: SmallVec::new(), offset: self.offset, mask: None };
        for (i, &n) in shape.iter().enumerate() {
            let same = i >= lead && self.shape[i - lead] == n;
            v.strides.push(if same { self.strides[i - lead] } else { 0 });
        }
        if let Some(m) = &self.mask {
            // Expanding a masked dimension of size 1 makes all its elements unmasked or all masked.
            v.mask = Some(
                (0..shape.len())
                    .map(|i| match i.checked_sub(lead) {
                        Some(j) if self.shape[j] == shape[i] => m[j],
                        Some(j) if m[j] != (0, 1) => (0, 0),
                        _ => (0, shape[i]),
                    })
                    .collect(),
            );
        }
        v
    }

    /// Along each axis `k`: `len[k]` elements from `start[k]` in steps of `step[k]`, which may be negative.
    pub fn slice(&self, start: &[usize], step: &[isize], len: &[usize]) -> View {
        let mut v = self.clone();
        for k in 0..self.rank() {
            // With at most one element the step is not used and may be any value.
            let step = if len[k] > 1 { step[k] } else { 1 };
            v.offset += start[k] as isize * self.strides[k];
            v.strides[k] = self.strides[k] * step;
            v.shape[k] = len[k];
            if let Some(m) = &mut v.mask {
                m[k] = inside(m[k], start[k] as isize, step, len[k]);
            }
        }
        if v.numel() == 0 {
            v.offset = 0;
        }
        v
    }

    /// Adds `lo[k]` elements before and `hi[k]` after along each axis; they read as the fill value.
    pub fn pad(&self, lo: &[usize], hi: &[usize]) -> View {
        let mut v = self.clone();
        let mut mask: SmallVec<[(usize, usize); 4]> =
            v.mask.take().unwrap_or_else(|| self.shape.iter().map(|&n| (0, n)).collect());
        for k in 0..self.rank() {
            v.offset -= lo[k] as isize * self.strides[k];
            v.shape[k] += lo[k] + hi[k];
            mask[k] = (mask[k].0 + lo[k], mask[k].1 + lo[k]);
        }
        if mask.iter().zip(&v.shape).any(|(m, n)| *m != (0, *n)) {
            v.mask = Some(mask);
        }
        v
    }

    /// The same elements in another shape, or `None` if strides cannot express it. A view with a mask can
    /// only gain or lose dimensions of size 1.
    pub fn reshape(&self, shape: &[usize]) -> Option<View> {
        if self.numel() == 0 {
            return Some(View::dense(shape));
        }
        if self.mask.is_some() {
            return self.reshape_masked(shape);
        }
        // Merge neighbouring axes that are dense relative to each other, then split the merged axes.
        let mut runs: SmallVec<[(usize, isize); 6]> = SmallVec::new();
        for (&n, &s) in self.shape.iter().zip(&self.strides) {
            if n == 1 {
                continue;
            }
            match runs.last_mut() {
                Some((rn, rs)) if *rs == s * n as isize => {
                    *rn *= n;
                    *rs = s;
                }
                _ => runs.push((n, s)),
            }
        }
        let mut strides: SmallVec<[isize; 6]> = SmallVec::from_elem(0, shape.len());
        let mut i = shape.len();
        for &(n, s) in runs.iter().rev() {
            let (mut left, mut stride) = (n, s);
            while left > 1 {
                if i == 0 {
                    return None;
                }
                i -= 1;
                let d = shape[i];
                if left % d != 0 {
                    return None;
                }
                strides[i] = stride;
                stride *= d as isize;
                left /= d;
            }
        }
        if shape[..i].iter().any(|&d| d != 1) {
            return None;
        }
        Some(View { shape: shape.into(), strides, offset: self.offset, mask: None })
    }

    /// Reshapes a view with a mask, if dimensions of size 1 are inserted or removed and nothing else changes.
    fn reshape_masked(&self, shape: &[usize]) -> Option<View> {
        let real = |s: &[usize]| s.iter().copied().filter(|&n| n != 1).collect::<Dims>();
        let m = self.mask.as_ref()?;
        let unit_out = self.shape.iter().zip(m).any(|(&n, m)| n == 1 && *m != (0, 1));
        if real(&self.shape) != real(shape) || unit_out {
            return None;
        }
        let mut src = (0..self.rank()).filter(|&i| self.shape[i] != 1);
        let mut v = View { shape: shape.into(), strides: SmallVec::new(), offset: self.offset, mask: None };
        let mut mask = SmallVec::new();
        for &n in shape {
            match if n == 1 { None } else { src.next() } {
                Some(k) => {
                    v.strides.push(self.strides[k]);
                    mask.push(m[k]);
                }
                None => {
                    v.strides.push(0);
                    mask.push((0, 1));
                }
            }
        }
        v.mask = Some(mask);
        Some(v)
    }

    /// Smallest and largest element index that unmasked reads access; `None` if nothing is read.
    pub fn range(&self) -> Option<(isize, isize)> {
        let (mut lo, mut hi) = (self.offset, self.offset);
        for k in 0..self.rank() {
            let (a, b) = self.mask.as_ref().map_or((0, self.shape[k]), |m| m[k]);
            if b <= a {
                return None;
            }
            let (x, y) = (a as isize * self.strides[k], (b as isize - 1) * self.strides[k]);
            lo += x.min(y);
            hi += x.max(y);
        }
        Some((lo, hi))
    }

    /// Element index of a multi-index, or `None` if it is masked.
    pub fn at(&self, idx: &[usize]) -> Option<isize> {
        if let Some(m) = &self.mask
            && idx.iter().zip(m).any(|(i, (lo, hi))| i < lo || i >= hi)
        {
            return None;
        }
        Some(self.offset + idx.iter().zip(&self.strides).map(|(i, s)| *i as isize * s).sum::<isize>())
    }
}

/// Drops dimensions of size 1 (unless a mask excludes their element), and merges neighbouring dimensions
/// wherever every view permits it. Never merges across `border`, the boundary between outer and reduced
/// dimensions. Returns the new boundary.
pub fn collapse(views: &mut [&mut View], border: usize) -> usize {
    let Some(first) = views.first() else { return border };
    let shape = first.shape.clone();
    let mut groups: Vec<Vec<usize>> = vec![];
    let mut new_border = 0;
    for k in 0..shape.len() {
        if k == border {
            new_border = groups.len();
        }
        if shape[k] == 1 && views.iter().all(|v| v.mask.as_ref().is_none_or(|m| m[k] == (0, 1))) {
            continue;
        }
        let mergeable = k != border
            && groups.last().is_some_and(|g| {
                let p = g[g.len() - 1];
                !(k > border && p < border)
                    && views.iter().all(|v| {
                        v.strides[p] == v.strides[k] * shape[k] as isize
                            && v.mask.as_ref().is_none_or(|m| m[p] == (0, shape[p]) && m[k] == (0, shape[k]))
                    })
            });
        match groups.last_mut() {
            Some(g) if mergeable => g.push(k),
            _ => groups.push(vec![k]),
        }
    }
    if border >= shape.len() {
        new_border = groups.len();
    }
    for v in views {
        let old = v.clone();
        v.shape = groups.iter().map(|g| g.iter().map(|&k| shape[k]).product()).collect();
        v.strides = groups.iter().map(|g| old.strides[g[g.len() - 1]]).collect();
        v.mask = old
            .mask
            .as_ref()
            .map(|m| {
                groups
                    .iter()
                    .map(|g| if g.len() == 1 { m[g[0]] } else { (0, g.iter().map(|&k| shape[k]).product()) })
                    .collect()
            })
            .filter(|m: &SmallVec<[(usize, usize); 4]>| m.iter().zip(&v.shape).any(|(m, n)| *m != (0, *n)));
    }
    new_border
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(v: &View) -> Vec<Option<isize>> {
        let mut out = vec![];
        let n = v.numel();
        for i in 0..n {
            let (mut r, mut idx) = (i, vec![0; v.rank()]);
            for k in (0..v.rank()).rev() {
                idx[k] = r % v.shape[k];
                r /= v.shape[k];
            }
            out.push(v.at(&idx));
        }
        out
    }

    #[test]
    fn reshape_keeps_elements_or_declines() {
        let v = View::dense(&[4, 6]).permute(&[1, 0]);
        assert!(v.reshape(&[24]).is_none());
        let s = v.reshape(&[2, 3, 4]).unwrap();
        assert_eq!(elements(&s), elements(&v));
        let w = View::dense(&[2, 3, 4]).slice(&[0, 1, 0], &[1, 1, 1], &[2, 2, 4]);
        assert_eq!(elements(&w.reshape(&[2, 8]).unwrap()), elements(&w));
        assert!(w.reshape(&[4, 4]).is_none());
        assert!(w.reshape(&[16]).is_none());
        let e = View::dense(&[3, 1]).expand(&[3, 4]);
        assert_eq!(elements(&e.reshape(&[3, 2, 2]).unwrap()), elements(&e));
        assert!(e.reshape(&[12]).is_none());
    }

    #[test]
    fn pad_slice_and_flip() {
        let v = View::dense(&[3]).pad(&[1], &[2]);
        assert_eq!(elements(&v), [None, Some(0), Some(1), Some(2), None, None]);
        let f = v.slice(&[5], &[-1], &[6]);
        assert_eq!(elements(&f), [None, None, Some(2), Some(1), Some(0), None]);
        assert_eq!(elements(&v.slice(&[0], &[2], &[3])), [None, Some(1), None]);
        assert_eq!(v.range(), Some((0, 2)));
    }

    #[test]
    fn sliced_masks_are_found_without_walking() {
        for (lo, hi) in [(0, 0), (0, 1), (2, 5), (3, 9), (0, 9)] {
            for step in [-4isize, -3, -2, -1, 1, 2, 3, 4] {
                for start in 0..9isize {
                    for len in 0..9usize {
                        let at = |i: usize| start + i as isize * step;
                        let all: Vec<usize> =
                            (0..len).filter(|&i| at(i) >= lo as isize && at(i) < hi as isize).collect();
                        let want = all.first().map_or((0, 0), |a| (*a, a + all.len()));
                        assert_eq!(
                            inside((lo, hi), start, step, len),
                            want,
                            "{lo}..{hi} {start} {step} {len}"
                        );
                    }
                }
            }
        }
        let long = View::dense(&[1]).pad(&[0], &[1 << 40]).slice(&[1 << 40], &[-1], &[1 << 40]);
        assert_eq!(long.mask.unwrap()[0], (0, 0));
        // With one element the step may be any value.
        let v = View::dense(&[8]).slice(&[3], &[isize::MIN], &[1]);
        assert_eq!((v.offset, v.shape[0]), (3, 1));
    }

    #[test]
    fn collapse_merges_what_every_view_allows() {
        let mut a = View::dense(&[2, 3, 4]);
        let mut b = View::dense(&[3, 4]).expand(&[2, 3, 4]);
        let border = collapse(&mut [&mut a, &mut b], 3);
        assert_eq!(
            (a.shape.as_slice(), b.strides.as_slice(), border),
            (&[2usize, 12][..], &[0isize, 1][..], 2)
        );
        let mut c = View::dense(&[2, 3, 4]);
        assert_eq!(collapse(&mut [&mut c], 1), 1);
        assert_eq!(c.shape.as_slice(), &[2, 12]);
    }
}

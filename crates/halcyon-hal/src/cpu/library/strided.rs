//! How the kernels that index, scan and sort find the elements of strided operands and read indices of any
//! integer type.

use halcyon_ir::DType;
use halcyon_ir::layout::View;
use smallvec::SmallVec;

/// Maps an element's row-major number to its position in a strided operand. Axes of size 1 are dropped, and
/// neighbouring axes are merged where possible.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    axes: SmallVec<[(usize, isize); 6]>,
    offset: isize,
    pub numel: usize,
}

impl Walk {
    pub(crate) fn new(v: &View) -> Walk {
        Walk::of(&v.shape, &v.strides, v.offset)
    }

    pub(crate) fn of(shape: &[usize], strides: &[isize], offset: isize) -> Walk {
        let mut axes: SmallVec<[(usize, isize); 6]> = SmallVec::new();
        for (&n, &s) in shape.iter().zip(strides).filter(|(n, _)| **n != 1) {
            match axes.last_mut() {
                Some((m, t)) if *t == s.wrapping_mul(n as isize) => (*m, *t) = (*m * n, s),
                _ => axes.push((n, s)),
            }
        }
        Walk { axes, offset, numel: shape.iter().product() }
    }

    /// Position of element `i` in the buffer, in elements.
    #[inline]
    pub(crate) fn at(&self, i: usize) -> isize {
        match self.axes.as_slice() {
            [] => self.offset,
            [(_, s)] => self.offset + i as isize * s,
            axes => {
                let (mut i, mut at) = (i, self.offset);
                for &(n, s) in axes.iter().rev() {
                    at += (i % n) as isize * s;
                    i /= n;
                }
                at
            }
        }
    }

    /// Whether the elements are contiguous.
    pub(crate) fn is_contiguous(&self) -> bool {
        matches!(self.axes.as_slice(), [] | [(_, 1)])
    }

    /// Length of the contiguous runs of elements. The length divides `numel`.
    pub(crate) fn run(&self) -> usize {
        match self.axes.last() {
            Some((n, 1)) => *n,
            None => self.numel,
            _ => 1,
        }
    }
}

/// An index operand of any integer type.
#[derive(Clone, Debug)]
pub(crate) struct Indices {
    pub walk: Walk,
    dtype: DType,
}

impl Indices {
    pub(crate) fn new(dtype: DType, view: &View) -> Indices {
        Indices { walk: Walk::new(view), dtype }
    }

    /// Index number `i`. A `u64` that does not fit i64 becomes `i64::MAX`, which is out of range as well,
    /// because it is larger than every axis.
    ///
    /// # Safety
    /// `p` points to the operand's buffer, which contains the whole view, and `i` is less than the number of
    /// elements of the view.
    #[inline]
    pub(crate) unsafe fn get(&self, p: *const u8, i: usize) -> i64 {
        let at = self.walk.at(i);
        macro_rules! read {
            ($t:ty) => {
                // SAFETY: `i` is less than the number of elements, so `at` is a position in the view, and the
                // buffer at `p` contains the view.
                unsafe { *(p as *const $t).offset(at) }
            };
        }
        match self.dtype {
            DType::I64 => read!(i64),
            DType::I32 => read!(i32) as i64,
            DType::U64 => i64::try_from(read!(u64)).unwrap_or(i64::MAX),
            DType::U32 => read!(u32) as i64,
            DType::I16 => read!(i16) as i64,
            DType::U16 => read!(u16) as i64,
            DType::I8 => read!(i8) as i64,
            _ => read!(u8) as i64,
        }
    }
}

/// Converts an index into `n > 0` elements to a position. Negative indices count from the end; an index out
/// of range is clamped and reported as a fault.
#[inline]
pub(crate) fn place(i: i64, n: usize, fault: super::Fault<'_>) -> usize {
    let j = if i < 0 { i.saturating_add(n as i64) } else { i };
    if j >= 0 && (j as usize) < n {
        return j as usize;
    }
    fault.set();
    if j < 0 { 0 } else { n - 1 }
}

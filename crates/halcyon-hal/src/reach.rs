//! How far an operand reaches into its buffer. Library kernels rely on these checks, because an operand's
//! shape, strides and offset may hold any numbers.

use crate::{Declined, Operand};
use halcyon_ir::fused::{Fused, Load};
use halcyon_ir::layout::View;

/// An operand must have fewer elements than this, counting repetitions by strides of 0, so that products of
/// its sizes, and its size in bytes, fit a `usize`.
const MAX_ELEMENTS: u128 = if usize::BITS >= 64 { 1 << 47 } else { 1 << 28 };

/// Whether a space of these sizes has fewer than `MAX_ELEMENTS` points. Sizes of 0 count as 1, so that the
/// product of any of the sizes is below the limit too.
pub(crate) fn is_countable(shape: &[usize]) -> bool {
    shape.iter().try_fold(1u128, |n, d| Some(n * (*d).max(1) as u128).filter(|n| *n < MAX_ELEMENTS)).is_some()
}

/// The smallest and the largest index of the buffer's elements that the view reads; `None` if it reads
/// nothing.
///
/// # Errors
/// [`Declined`] if the view has fewer strides or mask ranges than axes, begins before its buffer, or is too
/// large.
fn range(v: &View) -> Result<Option<(usize, usize)>, Declined> {
    let rank = v.shape.len();
    if v.strides.len() < rank || v.mask.as_ref().is_some_and(|m| m.len() < rank) || !is_countable(&v.shape) {
        return Err(Declined::because("a view has too few strides or mask ranges, or too many elements"));
    }
    let (mut lo, mut hi) = (v.offset as i128, v.offset as i128);
    for k in 0..rank {
        let (from, end) = v.mask.as_ref().map_or((0, v.shape[k]), |m| m[k]);
        if end <= from {
            return Ok(None);
        }
        let (a, b) = (from as i128 * v.strides[k] as i128, (end as i128 - 1) * v.strides[k] as i128);
        (lo, hi) = (lo.saturating_add(a.min(b)), hi.saturating_add(a.max(b)));
    }
    if lo < 0 {
        return Err(Declined::because("a view begins before its buffer"));
    }
    if hi >= MAX_ELEMENTS as i128 {
        return Err(Declined::because("a view reaches further than any buffer"));
    }
    Ok(Some((lo as usize, hi as usize)))
}

/// The number of elements that the operand's buffer must have.
///
/// # Errors
/// [`Declined`] for a view that no buffer can contain.
pub(crate) fn elements(o: &Operand) -> Result<usize, Declined> {
    Ok(range(&o.view)?.map_or(0, |(_, hi)| hi + 1))
}

/// The size in bytes of a buffer that contains every element of the operand.
///
/// # Errors
/// The errors of [`elements`].
pub(crate) fn bytes(o: &Operand) -> Result<usize, Declined> {
    Ok(o.dtype.bytes(elements(o)?))
}

/// Whether the view accesses only the first `elements` elements of its buffer.
pub(crate) fn is_within(v: &View, elements: usize) -> bool {
    range(v).is_ok_and(|r| r.is_none_or(|(_, hi)| hi < elements))
}

/// Whether the load `l`, at every point of the space of `f`, stays within the part of the buffer that the
/// operand `o` covers. Kernels check that the buffer has this part.
pub(crate) fn load_fits(f: &Fused, l: &Load, o: &Operand) -> bool {
    l.view.shape == f.space && l.dtype == o.dtype && elements(o).is_ok_and(|n| is_within(&l.view, n))
}

/// Whether different indices of the view are different elements, so that threads may write them concurrently.
/// The check is sufficient, not necessary: every stride must be larger than the range that the smaller
/// strides cover.
pub(crate) fn is_injective(v: &View) -> bool {
    let axes = v.shape.iter().zip(&v.strides);
    let mut axes: Vec<(u128, u128)> =
        axes.filter(|(n, _)| **n > 1).map(|(n, s)| (s.unsigned_abs() as u128, *n as u128 - 1)).collect();
    axes.sort_unstable();
    let mut reach = 0u128;
    v.shape.contains(&0)
        || axes.iter().all(|(stride, steps)| {
            let free = *stride > reach;
            reach = reach.saturating_add(stride.saturating_mul(*steps));
            free
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon_ir::DType;

    fn view(shape: &[usize], strides: &[isize], offset: isize) -> View {
        View { shape: shape.into(), strides: strides.into(), offset, mask: None }
    }

    fn operand(shape: &[usize], strides: &[isize], offset: isize) -> Operand {
        Operand { dtype: DType::F32, view: view(shape, strides, offset) }
    }

    #[test]
    fn a_buffer_must_reach_as_far_as_the_view() {
        assert_eq!(bytes(&operand(&[2, 3], &[10, 2], 1)).unwrap(), 4 * 16);
        assert_eq!(bytes(&operand(&[4], &[-3], 9)).unwrap(), 4 * 10);
        assert_eq!(bytes(&operand(&[1000], &[0], 0)).unwrap(), 4);
        assert_eq!(bytes(&operand(&[0, 5], &[5, 1], 7)).unwrap(), 0);
        assert!(is_within(&view(&[4], &[2], 1), 8) && !is_within(&view(&[4], &[2], 1), 7));
    }

    /// Sums or products of these numbers overflow a machine word, or the view begins before its buffer or has
    /// too few strides. The last view has too few mask ranges.
    #[test]
    fn numbers_that_wrap_around_are_declined() {
        let half = 1usize << (usize::BITS / 2);
        for (shape, strides, offset) in [
            (&[half, half][..], &[half as isize, 1][..], 0),
            (&[3], &[isize::MIN], 0),
            (&[3], &[isize::MAX], 0),
            (&[2, 3], &[1 << 20, isize::MAX], 5),
            (&[2], &[1], isize::MAX),
            (&[usize::MAX], &[0], 0),
            (&[0, usize::MAX], &[1, 1], 0),
            (&[4], &[-1], 2),
            (&[2, 2], &[1], 0),
        ] {
            assert!(bytes(&operand(shape, strides, offset)).is_err(), "{shape:?} {strides:?} {offset}");
        }
        let mask = Some([(0, 2), (0, 2)].into_iter().take(1).collect());
        let short = Operand { dtype: DType::F32, view: View { mask, ..view(&[2, 2], &[2, 1], 0) } };
        assert!(bytes(&short).is_err());
    }

    #[test]
    fn elements_that_two_indices_name_are_found() {
        assert!(is_injective(&View::dense(&[3, 4, 5])));
        assert!(is_injective(&view(&[5, 3], &[-1, 7], 4)));
        assert!(is_injective(&view(&[1, 3], &[0, 1], 0)));
        assert!(is_injective(&view(&[0, 3], &[0, 0], 0)));
        assert!(!is_injective(&view(&[3, 2], &[1, 0], 0)));
        assert!(!is_injective(&view(&[4, 4], &[3, 1], 0)));
    }
}

//! The geometry that convolution and pooling share: a window that slides over one to three spatial axes.

use halcyon_ir::{Error, Result};

/// Spatial geometry, always as three axes (depth, height, width). Axes that an op lacks come first and have
/// size 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    pub input: [usize; 3],
    pub output: [usize; 3],
    pub kernel: [usize; 3],
    pub stride: [usize; 3],
    pub dilation: [usize; 3],
    /// Padding before and after each axis; negative values crop.
    pub pad_lo: [isize; 3],
    pub pad_hi: [isize; 3],
    /// Input dilation: elements of the input are this far apart, with zeros in between (the stride of a
    /// transposed convolution).
    pub input_dilation: [usize; 3],
}

impl Window {
    /// Geometry over `input.len()` (1 to 3) axes, with output sizes rounded down. `pads` holds `(low, high)`
    /// per axis.
    ///
    /// # Errors
    /// `Unsupported` for other numbers of axes; `Shape` if the lists differ in length or sizes overflow;
    /// `Argument` if a stride or dilation is zero.
    pub fn new(
        input: &[usize],
        kernel: &[usize],
        stride: &[usize],
        dilation: &[usize],
        pads: &[(isize, isize)],
        input_dilation: &[usize],
    ) -> Result<Window> {
        let d = input.len();
        if d == 0 || d > 3 {
            return Err(Error::unsupported(
                format!("a sliding window over {d} spatial axes"),
                "1, 2 and 3 axes are supported",
            ));
        }
        if [kernel.len(), stride.len(), dilation.len(), pads.len(), input_dilation.len()] != [d; 5] {
            return Err(Error::shape(
                "window",
                format!(
                    "{d} spatial axes, but {} kernel sizes, {} strides, {} dilations, {} paddings, {} input dilations",
                    kernel.len(),
                    stride.len(),
                    dilation.len(),
                    pads.len(),
                    input_dilation.len()
                ),
            ));
        }
        if stride.iter().chain(dilation).chain(input_dilation).any(|&v| v == 0) {
            return Err(Error::argument("window", "strides and dilations must be at least 1"));
        }
        let three =
            |v: &[usize]| -> [usize; 3] { std::array::from_fn(|i| if i + d < 3 { 1 } else { v[i + d - 3] }) };
        let pad = |f: fn(&(isize, isize)) -> isize| -> [isize; 3] {
            std::array::from_fn(|i| if i + d < 3 { 0 } else { f(&pads[i + d - 3]) })
        };
        let mut w = Window {
            input: three(input),
            output: [0; 3],
            kernel: three(kernel),
            stride: three(stride),
            dilation: three(dilation),
            pad_lo: pad(|p| p.0),
            pad_hi: pad(|p| p.1),
            input_dilation: three(input_dilation),
        };
        for i in 0..3 {
            let big = || Error::shape("window", format!("axis {i} is too large"));
            if w.input[i] == 0 || w.kernel[i] == 0 {
                continue;
            }
            let int = |v: usize| i64::try_from(v).ok().filter(|v| *v < 1 << 40).ok_or_else(big);
            let spread = int(w.input[i] - 1)?.checked_mul(int(w.input_dilation[i])?).ok_or_else(big)? + 1;
            let reach = int(w.kernel[i] - 1)?.checked_mul(int(w.dilation[i])?).ok_or_else(big)? + 1;
            let pad = |v: isize| int(v.unsigned_abs()).map(|n| if v < 0 { -n } else { n });
            let room = spread + pad(w.pad_lo[i])? + pad(w.pad_hi[i])? - reach;
            w.output[i] = if room < 0 { 0 } else { (room / int(w.stride[i])? + 1) as usize };
        }
        Ok(w)
    }

    /// Number of elements of one channel of the input. The next two functions give the number of elements of
    /// one channel of the output and of the kernel.
    pub fn in_size(&self) -> usize {
        self.input.iter().product()
    }
    pub fn out_size(&self) -> usize {
        self.output.iter().product()
    }
    pub fn kernel_size(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Whether every output element depends only on the input element at the same position.
    pub(crate) fn is_pointwise(&self) -> bool {
        self.kernel == [1; 3] && self.input == self.output && self.pad_lo == [0; 3] && self.stride == [1; 3]
    }

    /// Position in the dilated input that tap `t` of output `o` reads on `axis`. Position 0 is the first
    /// element; positions in the padding are negative or past the last element.
    #[inline(always)]
    pub(crate) fn at(&self, axis: usize, o: usize, t: usize) -> isize {
        (o * self.stride[axis]) as isize - self.pad_lo[axis] + (t * self.dilation[axis]) as isize
    }

    /// Index of the input element that tap `t` of output `o` reads on `axis`; `None` for padding and inserted
    /// zeros.
    #[inline(always)]
    pub(crate) fn read(&self, axis: usize, o: usize, t: usize) -> Option<usize> {
        let p = self.at(axis, o, t);
        // The common case avoids the slow divisions below.
        if self.input_dilation[axis] == 1 {
            return (p >= 0 && p < self.input[axis] as isize).then_some(p as usize);
        }
        let s = self.input_dilation[axis] as isize;
        (p >= 0 && p % s == 0 && p / s < self.input[axis] as isize).then_some((p / s) as usize)
    }

    /// Outputs `lo..hi` on `axis` for which tap `t` stays inside the dilated input (at an element or an
    /// inserted zero).
    #[inline(always)]
    pub(crate) fn span(&self, axis: usize, t: usize) -> (usize, usize) {
        let s = self.stride[axis] as isize;
        let off = self.at(axis, 0, t);
        let end = (self.input[axis] as isize - 1) * self.input_dilation[axis] as isize + 1;
        let up = |v: isize| if s == 1 { v } else { (v + s - 1) / s };
        let lo = if off >= 0 { 0 } else { up(-off) };
        let hi = if end <= off { 0 } else { up(end - off) };
        let out = self.output[axis] as isize;
        (lo.min(out) as usize, hi.clamp(lo.min(out), out) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_agree_with_reads() {
        for input in 1..8usize {
            for (k, s, d, lo, hi, spread) in [
                (3, 1, 1, 1, 1, 1),
                (3, 2, 2, 2, 0, 1),
                (1, 3, 1, 0, 0, 1),
                (4, 1, 1, 3, 3, 2),
                (2, 1, 3, -1, 4, 1),
            ] {
                let w = Window::new(&[input], &[k], &[s], &[d], &[(lo, hi)], &[spread]).unwrap();
                for t in 0..k {
                    let (a, b) = w.span(2, t);
                    for o in 0..w.output[2] {
                        let p = w.at(2, o, t);
                        let inside = p >= 0 && p <= ((input - 1) * spread) as isize;
                        assert_eq!((a..b).contains(&o), inside, "{w:?} {t} {o}");
                        assert!(w.read(2, o, t).is_none() || inside);
                    }
                }
            }
        }
    }

    #[test]
    fn bad_geometry_is_an_error() {
        assert!(Window::new(&[], &[], &[], &[], &[], &[]).is_err());
        assert!(Window::new(&[4], &[3], &[0], &[1], &[(0, 0)], &[1]).is_err());
        assert!(Window::new(&[4], &[3, 3], &[1], &[1], &[(0, 0)], &[1]).is_err());
        assert!(Window::new(&[usize::MAX], &[3], &[1], &[1], &[(0, 0)], &[1]).is_err());
        assert!(Window::new(&[4], &[3], &[1], &[1], &[(isize::MAX, 0)], &[1]).is_err());
        assert!(Window::new(&[4], &[3], &[1], &[1], &[(0, isize::MIN)], &[1]).is_err());
        assert_eq!(Window::new(&[2], &[5], &[1], &[1], &[(0, 0)], &[1]).unwrap().output, [1, 1, 0]);
    }
}

//! The elements that the windows of a convolution or pool read.

/// The input elements that the windows read. Every kernel element has a row with an entry for each output
/// element. An entry is `None` if its position is in the padding, or between elements that an input dilation
/// separates.
pub(crate) struct Taps {
    pub(crate) out: usize,
    at: Vec<Option<usize>>,
}

/// One spatial axis: sizes of input, kernel and output, then stride, dilation, input dilation and low
/// padding.
pub(crate) struct Axis {
    pub(crate) i: usize,
    pub(crate) k: usize,
    pub(crate) y: usize,
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    pub(crate) input_dilation: usize,
    pub(crate) lo: i64,
}

impl Taps {
    pub(crate) fn new(axes: &[Axis]) -> Taps {
        let mut t = Taps { out: 1, at: vec![Some(0)] };
        for a in axes {
            let kernels = t.at.len() / t.out.max(1);
            let mut at = Vec::with_capacity(t.at.len() * a.k * a.y);
            for kk in 0..kernels {
                for k in 0..a.k {
                    for o in 0..t.out {
                        let outer = t.at[kk * t.out + o];
                        for y in 0..a.y {
                            let p = (y * a.stride + k * a.dilation) as i64 - a.lo;
                            let inside = p >= 0
                                && p % a.input_dilation as i64 == 0
                                && p / (a.input_dilation as i64) < a.i as i64;
                            let q = p / a.input_dilation as i64;
                            at.push(outer.filter(|_| inside).map(|b| b * a.i + q as usize));
                        }
                    }
                }
            }
            t = Taps { out: t.out * a.y, at };
        }
        t
    }

    pub(crate) fn kernel(&self, k: usize) -> &[Option<usize>] {
        &self.at[k * self.out..(k + 1) * self.out]
    }

    pub(crate) fn kernels(&self) -> usize {
        self.at.len() / self.out.max(1)
    }
}

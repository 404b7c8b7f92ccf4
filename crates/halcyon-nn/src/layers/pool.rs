use super::invalid;
use crate::module::{Module, Visit};
use halcyon::Tensor;
use halcyon::ir::error::{Error, Result};
use halcyon::ir::ops::{Pool, PoolKind};

/// Options of a pooling over `N` axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions<const N: usize> {
    pub kernel: [usize; N],
    /// Default: the kernel, so that windows do not overlap.
    pub stride: [usize; N],
    /// The number of elements added on both sides of each axis. A maximum ignores these elements.
    pub padding: [usize; N],
    pub dilation: [usize; N],
    /// Only for averages: whether padding counts as elements of the window. Default: true.
    pub count_include_pad: bool,
}

impl<const N: usize> PoolOptions<N> {
    /// Windows of `kernel` elements along every axis.
    pub fn new(kernel: usize) -> Self {
        PoolOptions {
            kernel: [kernel; N],
            stride: [kernel; N],
            padding: [0; N],
            dilation: [1; N],
            count_include_pad: true,
        }
    }

    fn pool(&self, layer: &str, max: bool) -> Result<Pool> {
        let zero = |v: &[usize]| v.contains(&0);
        if zero(&self.kernel) || zero(&self.stride) || zero(&self.dilation) {
            let what = format!(
                "kernel {:?}, stride {:?} and dilation {:?} must be at least 1",
                self.kernel, self.stride, self.dilation
            );
            return Err(invalid(layer, what));
        }
        if (0..N).any(|i| 2 * self.padding[i] > self.kernel[i]) {
            let what = format!("the padding {:?} exceeds half the kernel {:?}", self.padding, self.kernel);
            return Err(invalid(layer, what));
        }
        let mut p = if max { Pool::max(self.kernel) } else { Pool::avg(self.kernel) };
        if !max {
            p.kind = PoolKind::Avg { count_include_pad: self.count_include_pad };
        }
        Ok(p.stride(self.stride).padding(self.padding).dilation(self.dilation))
    }
}

macro_rules! pools {
    ($($name:ident $max:literal $what:literal $torch:literal;)*) => {
        $(
            #[doc = concat!("The ", $what, " of every window of `[batch, channels, …]`, over `N` axes.")]
            #[derive(Clone, Debug)]
            pub struct $name<const N: usize>(Pool);

            impl<const N: usize> Module for $name<N> {
                fn visit(&self, _: &mut Visit<'_>) {}
                fn kind(&self) -> &'static str {
                    $torch
                }
            }

            impl<const N: usize> $name<N> {
                /// # Errors
                /// `Error::Argument` for sizes of 0, or padding of more than half the kernel.
                pub fn new(options: PoolOptions<N>) -> Result<Self> {
                    Ok($name(options.pool(stringify!($name), $max)?))
                }

                /// The layer's result for `x` of shape `[batch, channels, …]`.
                #[track_caller]
                pub fn forward(&self, x: &Tensor) -> Tensor {
                    x.pool(self.0.clone())
                }
            }
        )*
    };
}
pools! {
    MaxPool true "maximum" "MaxPool";
    AvgPool false "average" "AvgPool";
}

/// Averages over windows of `N` axes. The number of windows along an axis does not depend on the input's
/// size. Window `i` of `n` over an axis of `s` elements reaches from `floor(i s / n)` to `ceil((i + 1) s /
/// n)`, as in PyTorch.
#[derive(Clone, Debug)]
pub struct AdaptiveAvgPool<const N: usize>(pub [usize; N]);

impl<const N: usize> Module for AdaptiveAvgPool<N> {
    fn visit(&self, _: &mut Visit<'_>) {}
    fn kind(&self) -> &'static str {
        "AdaptiveAvgPool"
    }
}

impl<const N: usize> AdaptiveAvgPool<N> {
    /// The layer's result for `x` of shape `[batch, channels, …]`. The sizes after the channels must be
    /// known.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let Ok(shape) = x.shape() else { return x.clone() };
        let dims: Option<Vec<usize>> = shape.iter().skip(2).map(|d| d.known()).collect();
        let Some(dims) = dims.filter(|_| shape.rank() == N + 2 && !self.0.contains(&0)) else {
            let what = format!("windows {:?} over a tensor of shape {shape}", self.0);
            return Tensor::build(&[x], |_, _| Err(Error::shape("adaptive average", what)));
        };
        let mut y = x.clone();
        for (i, n) in self.0.iter().enumerate() {
            y = averaged(&y, 2 + i, dims[i], *n);
        }
        y
    }
}

#[track_caller]
fn averaged(x: &Tensor, axis: usize, size: usize, n: usize) -> Tensor {
    let axis = axis as i64;
    if n == 1 {
        return x.mean_keepdim(axis);
    }
    let window = |i: usize| {
        let (from, to) = (i * size / n, ((i + 1) * size).div_ceil(n));
        x.narrow(axis, from, to - from).mean_keepdim(axis)
    };
    Tensor::cat(&(0..n).map(window).collect::<Vec<_>>(), axis)
}

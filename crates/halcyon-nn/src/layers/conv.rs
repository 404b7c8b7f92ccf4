use super::linear::DEFAULT_WEIGHT;
use super::{invalid, located};
use crate::init::Init;
use crate::module::{Module, Visit};
use crate::slot::Param;
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::ir::ops::Conv;
use halcyon::{Backend, Tensor};

/// Options of a convolution over `N` axes.
#[derive(Clone, Copy, Debug)]
pub struct ConvOptions<const N: usize> {
    pub stride: [usize; N],
    /// Zeros added on both sides of each axis. For a transposed convolution: the number of elements that are
    /// cut from both sides of each axis of the full result.
    pub padding: [usize; N],
    pub dilation: [usize; N],
    pub groups: usize,
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    /// Only for transposed convolutions: the number of elements added at the end of each axis of the result.
    pub output_padding: [usize; N],
    pub dtype: DType,
    /// Initial values of the weight. Default: uniform within `1 / sqrt(fan-in)`.
    pub weight: Init,
}

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> ConvOptions<N> {
        ConvOptions {
            stride: [1; N],
            padding: [0; N],
            dilation: [1; N],
            groups: 1,
            bias: true,
            output_padding: [0; N],
            dtype: DType::F32,
            weight: DEFAULT_WEIGHT,
        }
    }
}

impl<const N: usize> ConvOptions<N> {
    /// Sets the padding of every axis.
    pub fn padding(mut self, padding: usize) -> Self {
        self.padding = [padding; N];
        self
    }

    /// Sets the stride of every axis.
    pub fn stride(mut self, stride: usize) -> Self {
        self.stride = [stride; N];
        self
    }

    /// Sets the number of groups.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Leaves the bias out.
    pub fn without_bias(mut self) -> Self {
        self.bias = false;
        self
    }

    fn check(&self, layer: &str, inputs: usize, outputs: usize, kernel: [usize; N]) -> Result<()> {
        let g = self.groups;
        if g == 0 || inputs == 0 || outputs == 0 || !inputs.is_multiple_of(g) || !outputs.is_multiple_of(g) {
            let what = format!("{inputs} input and {outputs} output channels do not divide into {g} groups");
            return Err(invalid(layer, what));
        }
        let zero = |v: &[usize]| v.contains(&0);
        if zero(&kernel) || zero(&self.stride) || zero(&self.dilation) {
            let what = format!(
                "kernel {kernel:?}, stride {:?} and dilation {:?} must be at least 1",
                self.stride, self.dilation
            );
            return Err(invalid(layer, what));
        }
        let too_much = |i: usize| self.output_padding[i] >= self.stride[i].max(self.dilation[i]);
        if self.output_padding != [0; N] && (0..N).any(too_much) {
            let what = format!(
                "the output padding {:?} must be less than the stride or the dilation",
                self.output_padding
            );
            return Err(invalid(layer, what));
        }
        Ok(())
    }

    /// Makes a weight of shape `dims`, and a bias of `outputs` elements. The bias is uniform within PyTorch's
    /// bound `1 / sqrt(fan-in)`.
    fn params(&self, backend: &Backend, dims: &[usize], outputs: usize) -> Result<(Param, Option<Param>)> {
        let weight = Param::new(self.weight.tensor(backend, dims, self.dtype)?);
        if !self.bias {
            return Ok((weight, None));
        }
        let bound = 1.0 / (dims[1..].iter().product::<usize>() as f64).sqrt();
        let bias = Init::Uniform { low: -bound, high: bound }.tensor(backend, &[outputs], self.dtype)?;
        Ok((weight, Some(Param::new(bias))))
    }

    fn with_bias(&self, y: Tensor, bias: &Option<Param>) -> Tensor {
        match bias {
            Some(b) => {
                let mut shape = vec![1i64; N + 1];
                shape[0] = -1;
                y + b.value().reshape(shape)
            }
            None => y,
        }
    }
}

/// Convolution over `N` axes: maps `[batch, inputs, …]` to `[batch, outputs, …]`. As in other libraries, the
/// layer computes a cross-correlation: the kernel is not flipped. A transposed convolution computes the
/// gradient of a convolution with respect to its input.
///
/// `weight` is `[outputs, inputs / groups, kernel…]`; for a transposed convolution it is `[inputs, outputs /
/// groups, kernel…]`. `bias` is `[outputs]`.
#[derive(Clone, Debug)]
pub struct ConvLayer<const N: usize, const TRANSPOSED: bool> {
    pub weight: Param,
    pub bias: Option<Param>,
    options: ConvOptions<N>,
}

/// Convolution over one axis.
pub type Conv1d = ConvLayer<1, false>;
/// Convolution over two axes.
pub type Conv2d = ConvLayer<2, false>;
/// Convolution over three axes.
pub type Conv3d = ConvLayer<3, false>;
/// Transposed convolution over one axis.
pub type ConvTranspose1d = ConvLayer<1, true>;
/// Transposed convolution over two axes.
pub type ConvTranspose2d = ConvLayer<2, true>;
/// Transposed convolution over three axes.
pub type ConvTranspose3d = ConvLayer<3, true>;

impl<const N: usize, const TRANSPOSED: bool> Module for ConvLayer<N, TRANSPOSED> {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("weight", &self.weight);
        visit.child("bias", &self.bias);
    }
    fn kind(&self) -> &'static str {
        kind(N, TRANSPOSED)
    }
}

fn kind(axes: usize, transposed: bool) -> &'static str {
    match (axes, transposed) {
        (1, false) => "Conv1d",
        (2, false) => "Conv2d",
        (3, false) => "Conv3d",
        (1, true) => "ConvTranspose1d",
        (2, true) => "ConvTranspose2d",
        (3, true) => "ConvTranspose3d",
        (_, false) => "Conv",
        (_, true) => "ConvTranspose",
    }
}

impl<const N: usize, const TRANSPOSED: bool> ConvLayer<N, TRANSPOSED> {
    /// A layer with `kernel` elements along each axis, stride 1 and no padding.
    ///
    /// # Errors
    /// Those of [`ConvLayer::with`].
    pub fn new(backend: &Backend, inputs: usize, outputs: usize, kernel: usize) -> Result<Self> {
        Self::with(backend, inputs, outputs, [kernel; N], ConvOptions::default())
    }

    /// A layer with options.
    ///
    /// # Errors
    /// `Error::Argument` if the number of groups does not divide the channels, a size is 0, the output
    /// padding is too large, or a layer that is not transposed has an output padding; errors of the device.
    pub fn with(
        backend: &Backend,
        inputs: usize,
        outputs: usize,
        kernel: [usize; N],
        options: ConvOptions<N>,
    ) -> Result<Self> {
        let name = kind(N, TRANSPOSED);
        options.check(name, inputs, outputs, kernel)?;
        if !TRANSPOSED && options.output_padding != [0; N] {
            return Err(invalid(name, "only transposed convolutions have an output padding; set it to 0"));
        }
        let (first, second) = if TRANSPOSED { (inputs, outputs) } else { (outputs, inputs) };
        let mut dims = vec![first, second / options.groups];
        dims.extend(kernel);
        let (weight, bias) = options.params(backend, &dims, outputs)?;
        Ok(ConvLayer { weight, bias, options })
    }

    /// The layer's result for `x` of shape `[batch, inputs, …]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (o, weight) = (&self.options, self.weight.value());
        let y = match TRANSPOSED {
            true => transposed(x, &weight, o),
            false => {
                let c = Conv::new(N).stride(o.stride).padding(o.padding).dilation(o.dilation);
                x.conv(&weight, c.groups(o.groups))
            }
        };
        located(o.with_bias(y, &self.bias), &self.weight, x)
    }
}

/// Computes a transposed convolution as a convolution: zeros are inserted between the elements of `x`, the
/// kernel is flipped, and its input and output channels are exchanged.
#[track_caller]
fn transposed<const N: usize>(x: &Tensor, w: &Tensor, o: &ConvOptions<N>) -> Tensor {
    Tensor::build(&[x, w], |g, v| {
        let dims = g.shape(v[1]).dims()?;
        let ([inputs, per_group], kernel) = match dims.as_slice() {
            [i, p, kernel @ ..] if kernel.len() == N => ([*i, *p], kernel.to_vec()),
            d => return Err(Error::shape("transposed convolution", format!("the weight's shape is {d:?}"))),
        };
        let groups = o.groups;
        let mut split = vec![groups, inputs / groups, per_group];
        split.extend(&kernel);
        let w = g.reshape(v[1], split)?;
        let w = g.transpose(w, 1, 2)?;
        let mut joined = vec![groups * per_group, inputs / groups];
        joined.extend(&kernel);
        let w = g.reshape(w, joined)?;
        let w = g.flip(w, &(2..2 + N).collect::<Vec<_>>())?;
        let mut c = Conv::new(N).dilation(o.dilation).groups(groups);
        for i in 0..N {
            let full = (o.dilation[i] * (kernel[i] - 1)) as i64 - o.padding[i] as i64;
            c.pad[i] = (full, full + o.output_padding[i] as i64);
            c.input_dilation[i] = o.stride[i];
        }
        g.conv(v[0], w, c)
    })
}

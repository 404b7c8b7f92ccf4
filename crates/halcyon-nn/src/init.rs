//! Initial values of parameters, under PyTorch's names and formulas (`torch.nn.init`).

use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, Tensor};

/// How a parameter is filled. Random values are drawn in f32 from the backend's next seed; see
/// [`Backend::manual_seed`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    Constant(f64),
    Uniform {
        low: f64,
        high: f64,
    },
    Normal {
        mean: f64,
        std: f64,
    },
    /// A normal distribution truncated to `low..high`.
    TruncNormal {
        mean: f64,
        std: f64,
        low: f64,
        high: f64,
    },
    /// Uniform with the bound `gain * sqrt(6 / (fan_in + fan_out))` (Glorot and Bengio 2010).
    XavierUniform {
        gain: f64,
    },
    /// Normal with the standard deviation `gain * sqrt(2 / (fan_in + fan_out))` (Glorot and Bengio 2010).
    XavierNormal {
        gain: f64,
    },
    /// Uniform with the bound `gain * sqrt(3 / fan)` (He et al. 2015). For ReLU the gain is `sqrt(2)`.
    KaimingUniform {
        gain: f64,
        fan: Fan,
    },
    /// Normal with the standard deviation `gain / sqrt(fan)` (He et al. 2015).
    KaimingNormal {
        gain: f64,
        fan: Fan,
    },
    /// A matrix with orthonormal rows (if there are at most as many rows as columns) or columns, times `gain`
    /// (Saxe et al. 2013). The axes after the first count as one axis.
    Orthogonal {
        gain: f64,
    },
    /// The identity matrix. The shape must have two axes.
    Eye,
}

/// Whether the fan-in or the fan-out scales a Kaiming initialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fan {
    In,
    Out,
}

/// The fan-in and the fan-out of a weight `[out, in, kernel…]`.
fn fans(dims: &[usize]) -> Result<(f64, f64)> {
    let [out, inputs, kernel @ ..] = dims else {
        let what = format!("the shape {dims:?} has fewer than two axes, so it has no fan-in");
        return Err(Error::argument("init", what));
    };
    let kernel: usize = kernel.iter().product();
    Ok(((inputs * kernel) as f64, (out * kernel) as f64))
}

/// `x` scaled, then shifted, in f32.
fn affine(x: Tensor, scale: f64, shift: f64) -> Tensor {
    x * scale + shift
}

impl Init {
    /// A tensor of shape `dims` with initial values, cast to `dtype`.
    ///
    /// # Errors
    /// `Error::Argument` if the initialisation is not defined for the shape, or if `low` exceeds `high`;
    /// errors of the device.
    pub fn tensor(self, backend: &Backend, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let uniform = |bound: f64| affine(backend.rand(dims, DType::F32), 2.0 * bound, -bound);
        let normal = |mean: f64, std: f64| affine(backend.randn(dims, DType::F32), std, mean);
        let t = match self {
            Init::Zeros => Tensor::zeros(backend, dims, dtype),
            Init::Ones => Tensor::ones(backend, dims, dtype),
            Init::Constant(v) => Tensor::full(backend, dims, v, dtype),
            Init::Uniform { low, high } => {
                ordered(low, high)?;
                affine(backend.rand(dims, DType::F32), high - low, low)
            }
            Init::Normal { mean, std } => normal(mean, std),
            Init::TruncNormal { mean, std, low, high } => truncated(backend, dims, [mean, std, low, high])?,
            Init::XavierUniform { gain } => {
                let (i, o) = fans(dims)?;
                uniform(gain * (6.0 / (i + o).max(1.0)).sqrt())
            }
            Init::XavierNormal { gain } => {
                let (i, o) = fans(dims)?;
                normal(0.0, gain * (2.0 / (i + o).max(1.0)).sqrt())
            }
            Init::KaimingUniform { gain, fan } => uniform(gain * (3.0 / fan_of(dims, fan)?).sqrt()),
            Init::KaimingNormal { gain, fan } => normal(0.0, gain / fan_of(dims, fan)?.sqrt()),
            Init::Orthogonal { gain } => orthogonal(backend, dims, gain)?,
            Init::Eye => {
                let [rows, cols] = *dims else {
                    return Err(Error::argument(
                        "init",
                        format!("the shape {dims:?} has no identity; `Eye` needs two axes"),
                    ));
                };
                let index = |n: usize| Tensor::arange(backend, n, DType::I32);
                index(rows).unsqueeze(1).eq(index(cols).unsqueeze(0))
            }
        };
        let t = t.cast(dtype);
        t.check()?;
        Ok(t)
    }
}

fn fan_of(dims: &[usize], fan: Fan) -> Result<f64> {
    let (i, o) = fans(dims)?;
    Ok(if fan == Fan::In { i } else { o }.max(1.0))
}

fn ordered(low: f64, high: f64) -> Result<()> {
    match low <= high {
        true => Ok(()),
        false => Err(Error::argument("init", format!("the bounds {low} and {high} are in the wrong order"))),
    }
}

/// A truncated normal distribution by the inverse of the distribution function: `mean + std * quantile(p)`,
/// where `p` is uniform between the probabilities of the two bounds.
fn truncated(backend: &Backend, dims: &[usize], [mean, std, low, high]: [f64; 4]) -> Result<Tensor> {
    ordered(low, high)?;
    let n = dims.iter().product::<usize>();
    let u = backend.rand([n], DType::F32).to_vec::<f32>()?;
    let cdf = |x: f64| 0.5 * erfc(-(x - mean) / std / std::f64::consts::SQRT_2);
    let (from, to) = (cdf(low), cdf(high));
    let value = |u: f32| {
        let p = from + (to - from) * f64::from(u);
        (mean + std * quantile(p)).clamp(low, high) as f32
    };
    Tensor::from_slice(backend, dims, &u.into_iter().map(value).collect::<Vec<_>>())
}

/// The complementary error function, by the Chebyshev fit of Numerical Recipes (`erfcc`). Its relative error
/// is below 1.2e-7.
fn erfc(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.5 * x.abs());
    const C: [f64; 10] = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let poly = C.iter().rev().fold(0.0, |sum, c| sum * t + c);
    let y = t * (-x * x + poly).exp();
    if x >= 0.0 { y } else { 2.0 - y }
}

/// The standard normal quantile, by bisection of the distribution function: 60 halvings of the interval from
/// -10 to 10.
fn quantile(p: f64) -> f64 {
    let (mut low, mut high) = (-10.0, 10.0);
    for _ in 0..60 {
        let mid = 0.5 * (low + high);
        if 0.5 * erfc(-mid / std::f64::consts::SQRT_2) < p { low = mid } else { high = mid }
    }
    0.5 * (low + high)
}

/// The orthogonal factor of a matrix of normal random numbers, by modified Gram-Schmidt in f64. The
/// orthogonalisation runs twice for accuracy.
fn orthogonal(backend: &Backend, dims: &[usize], gain: f64) -> Result<Tensor> {
    let [rows, rest @ ..] = dims else {
        return Err(Error::argument("init", "an orthogonal matrix needs two axes"));
    };
    if rest.is_empty() {
        return Err(Error::argument("init", "an orthogonal matrix needs two axes"));
    }
    let (rows, cols) = (*rows, rest.iter().product::<usize>());
    let (count, len) = (rows.min(cols), rows.max(cols));
    let drawn = backend.randn([count, len], DType::F32).to_vec::<f32>()?;
    let mut q: Vec<Vec<f64>> =
        drawn.chunks(len.max(1)).map(|r| r.iter().map(|v| f64::from(*v)).collect()).collect();
    for _ in 0..2 {
        for i in 0..q.len() {
            let (done, rest) = q.split_at_mut(i);
            let row = &mut rest[0];
            for other in done {
                let dot: f64 = row.iter().zip(&*other).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(&*other).for_each(|(a, b)| *a -= dot * b);
            }
            let norm = row.iter().map(|a| a * a).sum::<f64>().sqrt();
            row.iter_mut().for_each(|a| *a /= norm);
        }
    }
    let at = |r: usize, c: usize| if rows <= cols { q[r][c] } else { q[c][r] };
    let values: Vec<f32> = (0..rows * cols).map(|i| (gain * at(i / cols, i % cols)) as f32).collect();
    Tensor::from_slice(backend, dims, &values)
}

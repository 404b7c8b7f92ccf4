//! BLAS operations and layers under their usual names. They are lazy, like all operations: a shape error is
//! carried by the resulting tensor.

use crate::state::State;
use crate::tensor::Tensor;
use halcyon_ir::DType;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::ops::Conv;
use halcyon_ir::{NodeId, Scalar};

/// Options of a 2-D convolution, in the order height, width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvConfig {
    /// Distance between windows.
    pub stride: [usize; 2],
    /// Zeros added on both sides of each axis.
    pub padding: [usize; 2],
    /// Distance between the elements of a window.
    pub dilation: [usize; 2],
    /// Number of groups of channels that are convolved separately.
    pub groups: usize,
}

impl Default for ConvConfig {
    fn default() -> ConvConfig {
        ConvConfig { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 }
    }
}

impl From<ConvConfig> for Conv {
    fn from(c: ConvConfig) -> Conv {
        let mut conv = Conv::new(2);
        conv.stride = c.stride.into_iter().collect();
        conv.pad = c.padding.into_iter().map(|p| (p as i64, p as i64)).collect();
        conv.dilation = c.dilation.into_iter().collect();
        conv.groups = c.groups;
        conv
    }
}

/// Default weight of the batch in running statistics.
pub const MOMENTUM: f64 = 0.1;
/// Default value added to a variance before its square root is taken.
pub const EPSILON: f64 = 1e-5;

/// Options of [`Tensor::batch_norm_running`]. By default, the running statistics are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    /// Use the statistics of the batch, and update the running statistics.
    pub training: bool,
    /// Weight of the batch in the running statistics.
    pub momentum: f64,
    /// Added to a variance before its square root is taken.
    pub eps: f64,
}

impl Default for BatchNorm {
    fn default() -> BatchNorm {
        BatchNorm { training: false, momentum: MOMENTUM, eps: EPSILON }
    }
}

impl BatchNorm {
    /// Training mode with the default momentum and epsilon.
    pub fn training() -> BatchNorm {
        BatchNorm { training: true, ..BatchNorm::default() }
    }
}

fn rank(g: &Graph, op: &str, name: &str, x: NodeId, want: usize) -> Result<()> {
    match g.shape(x).rank() {
        r if r == want => Ok(()),
        _ => Err(Error::shape(op, format!("{name} is {}, expected {want} axes", g.shape(x)))),
    }
}

/// `alpha · product + beta · other`. As in BLAS, `other` is not read if `beta` is 0.
fn combine(g: &mut Graph, product: NodeId, alpha: f64, other: NodeId, beta: f64) -> Result<NodeId> {
    if g.shape(product) != g.shape(other) {
        let what = format!("the product is {}, the added tensor is {}", g.shape(product), g.shape(other));
        return Err(Error::shape("gemm", what));
    }
    let scaled = |g: &mut Graph, x, by: f64| -> Result<NodeId> {
        if by == 1.0 {
            return Ok(x);
        }
        let k = g.lit(x, Scalar::F(by));
        g.mul(x, k)
    };
    let product = scaled(g, product, alpha)?;
    if beta == 0.0 {
        return Ok(product);
    }
    let other = scaled(g, other, beta)?;
    g.add(product, other)
}

impl Tensor {
    /// `alpha · A·B + beta · C` for matrices `A` (this tensor, `[m, k]`), `B` (`[k, n]`) and `C` (`[m, n]`).
    /// `C` is not read if `beta` is 0.
    #[track_caller]
    pub fn gemm(&self, b: &Tensor, alpha: f64, c: &Tensor, beta: f64) -> Tensor {
        Tensor::build(&[self, b, c], |g, x| {
            for (x, name) in x.iter().zip(["A", "B", "C"]) {
                rank(g, "gemm", name, *x, 2)?;
            }
            let p = g.matmul(x[0], x[1])?;
            combine(g, p, alpha, x[2], beta)
        })
    }

    /// `alpha · A·x + beta · y` for a matrix `A` (this tensor, `[m, n]`) and vectors `x` (`[n]`) and `y`
    /// (`[m]`). `y` is not read if `beta` is 0.
    #[track_caller]
    pub fn gemv(&self, x: &Tensor, alpha: f64, y: &Tensor, beta: f64) -> Tensor {
        Tensor::build(&[self, x, y], |g, v| {
            rank(g, "gemv", "A", v[0], 2)?;
            rank(g, "gemv", "x", v[1], 1)?;
            rank(g, "gemv", "y", v[2], 1)?;
            let column = g.unsqueeze(v[1], 1)?;
            let p = g.matmul(v[0], column)?;
            let p = g.squeeze(p, 1)?;
            combine(g, p, alpha, v[2], beta)
        })
    }

    /// 2-D convolution of images `[n, c, h, w]` with a weight `[out, c / groups, kh, kw]`.
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, config: ConvConfig) -> Tensor {
        self.conv(weight, config)
    }

    /// Batch normalisation over axis 1 without scale and bias. In training mode it uses the statistics of
    /// this batch and mixes them into the running statistics (with the unbiased variance); otherwise it uses
    /// the running statistics. `mean` and `var` have shape `[channels]`.
    ///
    /// # Errors
    /// The errors of [`State::write`]; `Error::Shape` in training mode if the batch has no channel axis or
    /// fewer than two values per channel; errors that the tensors carry.
    #[track_caller]
    pub fn batch_norm_running(&self, mean: &State, var: &State, options: BatchNorm) -> Result<Tensor> {
        let BatchNorm { training, momentum, eps } = options;
        let (old_mean, old_var) = (mean.value(), var.value());
        let (one, zero) = (old_mean.clone() * 0.0 + 1.0, old_mean.clone() * 0.0);
        if !training {
            return Ok(self.batch_norm(&one, &zero, &old_mean, &old_var, eps));
        }
        let shape = self.dims()?;
        if shape.len() < 2 {
            let what = format!("the input is {shape:?}: it needs a batch and a channel axis");
            return Err(Error::shape(CompositeKind::BatchNorm, what));
        }
        let n: usize = shape.iter().product::<usize>() / shape[1].max(1);
        if n < 2 {
            let what =
                format!("the batch {shape:?} has {n} values per channel: a variance needs at least two");
            return Err(Error::shape(CompositeKind::BatchNorm, what));
        }
        let axes: Vec<i64> = (0..shape.len() as i64).filter(|a| *a != 1).collect();
        // If the running statistics have another dtype than the input, the batch's statistics are computed in
        // f32.
        let x = if old_mean.dtype()? == self.dtype()? { self.clone() } else { self.cast(DType::F32) };
        let m = x.mean_keepdim(&axes);
        let centred = &x - &m;
        let v = (&centred * &centred).mean(&axes);
        let m = m.reshape([shape[1]]);
        let mixed = |old: &Tensor, new: &Tensor| old * (1.0 - momentum) + new * momentum;
        mean.write(mixed(&old_mean, &m))?;
        var.write(mixed(&old_var, &(&v * (n as f64 / (n - 1) as f64))))?;
        Ok(self.batch_norm(&one, &zero, &m, &v, eps))
    }
}

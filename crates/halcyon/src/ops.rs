//! Operations as methods and operators. Each forwards to the graph's builder of the same name; there is nothing to keep in
//! step with it but the name.

use crate::tensor::Tensor;
use halcyon_ir::dtype::{DType, Scalar};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::Graph;
use halcyon_ir::op::{Conv, Pool, ReduceKind, ScatterKind};
use halcyon_ir::shape::{Dim, Shape};
use halcyon_ir::{NodeId, ScalarOp};

macro_rules! unary {
    ($($(#[$m:meta])* $n:ident),* $(,)?) => {
        impl Tensor {
            $($(#[$m])* #[track_caller] pub fn $n(&self) -> Tensor { Tensor::build(&[self], |g, x| g.$n(x[0])) })*
        }
    };
}
macro_rules! binary {
    ($($(#[$m:meta])* $n:ident),* $(,)?) => {
        impl Tensor {
            $($(#[$m])* #[track_caller] pub fn $n(&self, other: &Tensor) -> Tensor {
                Tensor::build(&[self, other], |g, x| g.$n(x[0], x[1]))
            })*
        }
    };
}

unary! {
    neg, abs, sign, not, floor, ceil,
    /// To the nearest integer, ties to even.
    round,
    trunc, sqrt, rsqrt, recip, exp, exp2, expm1, log, log2, log1p, sin, cos, tan, tanh, erf, sigmoid, silu,
    /// `x·Φ(x)`, exact.
    gelu,
    /// The tanh approximation of [`Tensor::gelu`].
    gelu_tanh,
    relu, isnan, isinf,
}
binary! {
    add, sub, mul, div,
    /// C remainder: the sign of the dividend.
    rem,
    /// Floored modulus: the sign of the divisor.
    modulo,
    pow,
    /// NaN-propagating.
    min,
    /// NaN-propagating.
    max,
    and, or, xor, eq, ne, lt, le, gt, ge,
    /// NumPy's matrix product: batch dimensions broadcast.
    matmul,
    /// Mean negative log-likelihood of integer labels `[n]` under these logits `[n, classes]`.
    cross_entropy,
}

/// Turns axes that may be negative into indices.
fn axes_of(g: &Graph, x: NodeId, axes: &[i64]) -> Result<Vec<usize>> {
    axes.iter().map(|a| g.shape(x).axis(*a)).collect()
}

impl Tensor {
    /// Any scalar op of the table.
    #[track_caller]
    pub fn scalar_op(op: ScalarOp, x: &[&Tensor]) -> Tensor {
        Tensor::build(x, |g, x| g.scalar(op, x))
    }

    /// Where this (bool) is true `a`, else `b`.
    #[track_caller]
    pub fn select(&self, a: &Tensor, b: &Tensor) -> Tensor {
        Tensor::build(&[self, a, b], |g, x| g.select(x[0], x[1], x[2]))
    }

    #[track_caller]
    pub fn cast(&self, dtype: DType) -> Tensor {
        Tensor::build(&[self], |g, x| g.cast(x[0], dtype))
    }

    #[track_caller]
    pub fn bitcast(&self, dtype: DType) -> Tensor {
        Tensor::build(&[self], |g, x| g.bitcast(x[0], dtype))
    }

    #[track_caller]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Tensor {
        let s = shape.into();
        Tensor::build(&[self], |g, x| g.reshape(x[0], s))
    }

    #[track_caller]
    pub fn permute(&self, perm: &[usize]) -> Tensor {
        Tensor::build(&[self], |g, x| g.permute(x[0], perm))
    }

    /// Swaps two axes, which may count from the end.
    #[track_caller]
    pub fn transpose(&self, a: i64, b: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let k = axes_of(g, x[0], &[a, b])?;
            g.transpose(x[0], k[0], k[1])
        })
    }

    #[track_caller]
    pub fn expand(&self, shape: impl Into<Shape>) -> Tensor {
        let s = shape.into();
        Tensor::build(&[self], |g, x| g.expand(x[0], &s))
    }

    /// `len` elements from `start` along an axis.
    #[track_caller]
    pub fn narrow(&self, axis: i64, start: impl Into<Dim>, len: impl Into<Dim>) -> Tensor {
        let (s, l) = (start.into(), len.into());
        Tensor::build(&[self], |g, x| {
            let k = g.shape(x[0]).axis(axis)?;
            g.narrow(x[0], k, s, l)
        })
    }

    /// `len[k]` elements from `start[k]` by `step[k]` on every axis.
    #[track_caller]
    pub fn slice(&self, start: &[usize], step: &[i64], len: &[usize]) -> Tensor {
        let d = |v: &[usize]| v.iter().map(|n| Dim::from(*n)).collect::<Vec<_>>();
        let (s, l) = (d(start), d(len));
        Tensor::build(&[self], |g, x| g.slice(x[0], &s, step, &l))
    }

    #[track_caller]
    pub fn flip(&self, axes: &[i64]) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = axes_of(g, x[0], axes)?;
            g.flip(x[0], &a)
        })
    }

    /// `lo[k]` elements of `value` before and `hi[k]` after, on every axis.
    #[track_caller]
    pub fn pad(&self, lo: &[usize], hi: &[usize], value: impl Into<Scalar>) -> Tensor {
        let v = value.into();
        Tensor::build(&[self], |g, x| g.pad(x[0], lo, hi, v))
    }

    #[track_caller]
    pub fn unsqueeze(&self, axis: usize) -> Tensor {
        Tensor::build(&[self], |g, x| g.unsqueeze(x[0], axis))
    }

    #[track_caller]
    pub fn squeeze(&self, axis: usize) -> Tensor {
        Tensor::build(&[self], |g, x| g.squeeze(x[0], axis))
    }

    #[track_caller]
    pub fn concat(x: &[&Tensor], axis: usize) -> Tensor {
        Tensor::build(x, |g, x| g.concat(x, axis))
    }

    /// A reduction over `axes` (all of them if empty); `keep` leaves them with size 1.
    #[track_caller]
    pub fn reduce(&self, kind: ReduceKind, axes: &[i64], keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a =
                if axes.is_empty() { (0..g.shape(x[0]).rank()).collect() } else { axes_of(g, x[0], axes)? };
            g.reduce(kind, x[0], &a, keep)
        })
    }

    #[track_caller]
    pub fn sum(&self, axes: &[i64], keep: bool) -> Tensor {
        self.reduce(ReduceKind::Sum, axes, keep)
    }

    #[track_caller]
    pub fn amax(&self, axes: &[i64], keep: bool) -> Tensor {
        self.reduce(ReduceKind::Max, axes, keep)
    }

    #[track_caller]
    pub fn amin(&self, axes: &[i64], keep: bool) -> Tensor {
        self.reduce(ReduceKind::Min, axes, keep)
    }

    #[track_caller]
    pub fn prod(&self, axes: &[i64], keep: bool) -> Tensor {
        self.reduce(ReduceKind::Prod, axes, keep)
    }

    /// Mean over `axes` (all of them if empty).
    #[track_caller]
    pub fn mean(&self, axes: &[i64], keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a =
                if axes.is_empty() { (0..g.shape(x[0]).rank()).collect() } else { axes_of(g, x[0], axes)? };
            g.mean(x[0], &a, keep)
        })
    }

    /// Index (i64) of the first largest element along an axis.
    #[track_caller]
    pub fn argmax(&self, axis: i64, keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.argreduce(true, x[0], a, keep, false)
        })
    }

    #[track_caller]
    pub fn argmin(&self, axis: i64, keep: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.argreduce(false, x[0], a, keep, false)
        })
    }

    /// Stable order of the elements along an axis.
    #[track_caller]
    pub fn argsort(&self, axis: i64, descending: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.argsort(x[0], a, descending)
        })
    }

    /// Running reduction along an axis.
    #[track_caller]
    pub fn scan(&self, kind: ReduceKind, axis: i64, exclusive: bool, reverse: bool) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.scan(kind, x[0], a, exclusive, reverse)
        })
    }

    /// Rows `index` along `axis`.
    #[track_caller]
    pub fn gather(&self, index: &Tensor, axis: usize) -> Tensor {
        Tensor::build(&[self, index], |g, x| g.gather(x[0], x[1], axis))
    }

    #[track_caller]
    pub fn gather_elements(&self, index: &Tensor, axis: usize) -> Tensor {
        Tensor::build(&[self, index], |g, x| g.gather_elements(x[0], x[1], axis))
    }

    #[track_caller]
    pub fn scatter_elements(
        &self,
        index: &Tensor,
        updates: &Tensor,
        axis: usize,
        kind: ScatterKind,
    ) -> Tensor {
        Tensor::build(&[self, index, updates], |g, x| g.scatter_elements(x[0], x[1], x[2], axis, kind))
    }

    #[track_caller]
    pub fn scatter_rows(&self, index: &Tensor, updates: &Tensor, axis: usize, kind: ScatterKind) -> Tensor {
        Tensor::build(&[self, index, updates], |g, x| g.scatter_rows(x[0], x[1], x[2], axis, kind))
    }

    /// This tensor with `update` written at the run-time `position` along `axis`.
    #[track_caller]
    pub fn update_slice(&self, update: &Tensor, position: &Tensor, axis: usize) -> Tensor {
        Tensor::build(&[self, update, position], |g, x| g.update_slice(x[0], x[1], x[2], axis))
    }

    #[track_caller]
    pub fn conv(&self, weight: &Tensor, attrs: Conv) -> Tensor {
        Tensor::build(&[self, weight], |g, x| g.conv(x[0], x[1], attrs))
    }

    #[track_caller]
    pub fn pool(&self, attrs: Pool) -> Tensor {
        Tensor::build(&[self], |g, x| g.pool(x[0], attrs))
    }

    #[track_caller]
    pub fn softmax(&self, axis: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.softmax(x[0], a)
        })
    }

    #[track_caller]
    pub fn log_softmax(&self, axis: i64) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.log_softmax(x[0], a)
        })
    }

    /// Over the axes from `axis` on; see [`Graph::layer_norm`].
    #[track_caller]
    pub fn layer_norm(&self, scale: &Tensor, bias: Option<&Tensor>, axis: i64, eps: f64) -> Tensor {
        let mut ins = vec![self, scale];
        ins.extend(bias);
        Tensor::build(&ins, |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.layer_norm(x[0], x[1], x.get(2).copied(), a, eps)
        })
    }

    #[track_caller]
    pub fn rms_norm(&self, scale: &Tensor, eps: f64) -> Tensor {
        Tensor::build(&[self, scale], |g, x| g.rms_norm(x[0], x[1], eps))
    }

    /// With given statistics; see [`Graph::batch_norm`].
    #[track_caller]
    pub fn batch_norm(&self, scale: &Tensor, bias: &Tensor, mean: &Tensor, var: &Tensor, eps: f64) -> Tensor {
        Tensor::build(&[self, scale, bias, mean, var], |g, x| g.batch_norm(x[0], x[1], x[2], x[3], x[4], eps))
    }

    /// Scaled dot-product attention of this query; see [`Graph::attention`].
    #[track_caller]
    pub fn attention(
        &self,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        scale: f64,
    ) -> Tensor {
        let mut ins = vec![self, k, v];
        ins.extend(mask);
        Tensor::build(&ins, |g, x| g.attention(x[0], x[1], x[2], x.get(3).copied(), causal, scale))
    }

    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Tensor {
        Tensor::build(&[self], |g, x| g.leaky_relu(x[0], slope))
    }

    /// An op of the user's.
    #[track_caller]
    pub fn custom(op: std::sync::Arc<dyn halcyon_ir::custom::CustomOp>, x: &[&Tensor]) -> Tensor {
        Tensor::build(x, |g, x| g.custom(op, x))
    }

    /// This and a number of this tensor's type. The number is a run-time argument.
    #[track_caller]
    fn with_number(&self, v: Scalar, f: impl FnOnce(&mut Graph, NodeId, NodeId) -> Result<NodeId>) -> Tensor {
        Tensor::build(&[self], |g, x| {
            let d = g.dtype(x[0]);
            if !d.is_float() && v.as_f64().fract() != 0.0 {
                return Err(Error::DType {
                    op: "operator".into(),
                    dtype: d,
                    want: format!("cast the tensor to a float type to combine it with {}", v.as_f64()),
                    at: Default::default(),
                });
            }
            let c = g.lit(x[0], v);
            f(g, x[0], c)
        })
    }
}

macro_rules! operators {
    ($($tr:ident $f:ident),*) => {$(
        impl std::ops::$tr<&Tensor> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: &Tensor) -> Tensor { Tensor::$f(self, o) }
        }
        impl std::ops::$tr<Tensor> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: Tensor) -> Tensor { Tensor::$f(self, &o) }
        }
        impl std::ops::$tr<&Tensor> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: &Tensor) -> Tensor { Tensor::$f(&self, o) }
        }
        impl std::ops::$tr<Tensor> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: Tensor) -> Tensor { Tensor::$f(&self, &o) }
        }
        impl std::ops::$tr<f64> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: f64) -> Tensor { self.with_number(Scalar::F(o), |g, a, b| g.$f(a, b)) }
        }
        impl std::ops::$tr<f64> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: f64) -> Tensor { self.with_number(Scalar::F(o), |g, a, b| g.$f(a, b)) }
        }
        impl std::ops::$tr<&Tensor> for f64 {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: &Tensor) -> Tensor { o.with_number(Scalar::F(self), |g, a, b| g.$f(b, a)) }
        }
        impl std::ops::$tr<Tensor> for f64 {
            type Output = Tensor;
            #[track_caller]
            fn $f(self, o: Tensor) -> Tensor { o.with_number(Scalar::F(self), |g, a, b| g.$f(b, a)) }
        }
    )*};
}
operators!(Add add, Sub sub, Mul mul, Div div);

impl std::ops::Neg for &Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        Tensor::neg(self)
    }
}
impl std::ops::Neg for Tensor {
    type Output = Tensor;
    #[track_caller]
    fn neg(self) -> Tensor {
        Tensor::neg(&self)
    }
}

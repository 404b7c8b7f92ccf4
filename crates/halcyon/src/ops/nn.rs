//! Neural-network layers.

use crate::tensor::Tensor;
use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::Error;
use halcyon_ir::ops::{Conv, Pool};

/// Options of [`Tensor::cross_entropy_with`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropy {
    /// Labels of this value count neither in the sum nor in the divisor of the mean. -100 by default, as in
    /// PyTorch; `None` excludes none.
    pub ignore_index: Option<i64>,
}

impl Default for CrossEntropy {
    fn default() -> CrossEntropy {
        CrossEntropy { ignore_index: Some(-100) }
    }
}

/// Options of [`Tensor::attention`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Attention<'a> {
    /// Added to the scores; it broadcasts to `[batch, heads, queries, keys]`.
    pub mask: Option<&'a Tensor>,
    /// Whether attention is causal: the last query attends to all keys, and each earlier query attends to one
    /// key fewer than the query after it.
    pub causal: bool,
    /// Factor of the scores. `None` means `1 / sqrt(size)`, where `size` is the size of a head.
    pub scale: Option<f64>,
}

macro_rules! methods {
    ($($doc:literal $name:ident($($operand:ident),*) [$($axis:ident)?] ($($attr:ident: $ty:ty),*);)*) => {
        impl Tensor {
            $(#[doc = $doc]
            #[track_caller]
            pub fn $name(&self $(, $operand: &Tensor)* $(, $axis: i64)? $(, $attr: $ty)*) -> Tensor {
                Tensor::build(&[self $(, $operand)*], |g, x| {
                    let &[x $(, $operand)*] = x else {
                        return Err(Error::internal("a composite was built of other operands"));
                    };
                    $(let $axis = g.shape(x).axis($axis)?;)?
                    g.$name(x $(, $operand)* $(, $axis)? $(, $attr)*)
                })
            })*
        }
    };
}

halcyon_ir::for_each_composite_method!(methods);

impl Tensor {
    /// Mean negative log-likelihood of the integer `labels` `[n, d…]` under these logits `[n, classes, d…]`.
    /// Labels of -100 are excluded. If all labels are excluded, the mean is NaN.
    ///
    /// # Errors
    /// [`Error::Index`], when a result is read, for a label that is outside `[0, classes)` and not excluded.
    /// The error has the index and value of the first such label.
    #[track_caller]
    pub fn cross_entropy(&self, labels: &Tensor) -> Tensor {
        self.cross_entropy_with(labels, CrossEntropy::default())
    }

    /// [`Tensor::cross_entropy`] with options.
    #[track_caller]
    pub fn cross_entropy_with(&self, labels: &Tensor, options: CrossEntropy) -> Tensor {
        Tensor::build(&[self, labels], |g, x| g.cross_entropy(x[0], x[1], options.ignore_index))
    }

    /// Convolution of `[n, channels, …]` with a weight of `[out, channels / groups, …]`; see [`Conv`].
    #[track_caller]
    pub fn conv(&self, weight: &Tensor, options: impl Into<Conv>) -> Tensor {
        let c = options.into();
        Tensor::build(&[self, weight], |g, x| g.conv(x[0], x[1], c))
    }

    /// Pooling of `[n, channels, …]`; see [`Pool`].
    #[track_caller]
    pub fn pool(&self, options: Pool) -> Tensor {
        Tensor::build(&[self], |g, x| g.pool(x[0], options))
    }

    /// Layer normalisation over the axes from `axis` on; see [`halcyon_ir::Graph::layer_norm`].
    #[track_caller]
    pub fn layer_norm(&self, scale: &Tensor, bias: Option<&Tensor>, axis: i64, eps: f64) -> Tensor {
        let mut ins = vec![self, scale];
        ins.extend(bias);
        Tensor::build(&ins, |g, x| {
            let a = g.shape(x[0]).axis(axis)?;
            g.layer_norm(x[0], x[1], x.get(2).copied(), a, eps)
        })
    }

    /// Scaled dot-product attention of this query `[batch, heads, queries, size]` over keys and values
    /// `[batch, key heads, keys, size]`; see [`halcyon_ir::Graph::attention`].
    #[track_caller]
    pub fn attention(&self, k: &Tensor, v: &Tensor, options: Attention<'_>) -> Tensor {
        let mut ins = vec![self, k, v];
        ins.extend(options.mask);
        Tensor::build(&ins, |g, x| {
            let scale = match options.scale {
                Some(s) => s,
                None => {
                    let size = g.shape(x[0]).last().and_then(|d| d.known()).filter(|d| *d > 0);
                    let size = size.ok_or_else(|| {
                        let what = "the head's size is not known: give a scale";
                        Error::argument(CompositeKind::Attention, what)
                    })?;
                    1.0 / (size as f64).sqrt()
                }
            };
            g.attention(x[0], x[1], x[2], x.get(3).copied(), options.causal, scale)
        })
    }
}

use super::linear::linear;
use super::{Dropout, Linear, LinearOptions, invalid, located};
use crate::init::Init;
use crate::module::{Module, Visit};
use crate::scope::is_training;
use crate::slot::Param;
use halcyon::ir::DType;
use halcyon::ir::error::Result;
use halcyon::ops::Attention;
use halcyon::{Backend, Tensor};

/// Options of [`MultiHeadAttention::with`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MultiHeadAttentionOptions {
    /// Whether there are biases. Default: true.
    pub bias: bool,
    /// Probability with which attention weights are dropped in training. Default: 0.
    pub dropout: f64,
    /// Whether the batch is the first axis: `[batch, sequence, size]`. Default: false, which is `[sequence,
    /// batch, size]`.
    pub batch_first: bool,
    pub dtype: DType,
}

impl Default for MultiHeadAttentionOptions {
    fn default() -> MultiHeadAttentionOptions {
        MultiHeadAttentionOptions { bias: true, dropout: 0.0, batch_first: false, dtype: DType::F32 }
    }
}

/// Attention with several heads and projections of query, key, value and result (Vaswani et al. 2017).
/// `in_proj_weight` is `[3 size, size]`: first the rows that project the query, then those of the key, then
/// those of the value.
#[derive(Clone, Debug)]
pub struct MultiHeadAttention {
    pub in_proj_weight: Param,
    pub in_proj_bias: Option<Param>,
    pub out_proj: Linear,
    dropout: Dropout,
    heads: usize,
    size: usize,
    batch_first: bool,
}

impl Module for MultiHeadAttention {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("in_proj_weight", &self.in_proj_weight);
        visit.child("in_proj_bias", &self.in_proj_bias);
        visit.child("out_proj", &self.out_proj);
    }
    fn kind(&self) -> &'static str {
        "MultiheadAttention"
    }
}

impl MultiHeadAttention {
    /// A layer for vectors of `size` elements, with `heads` heads of `size / heads` elements each.
    ///
    /// # Errors
    /// Those of [`MultiHeadAttention::with`].
    pub fn new(backend: &Backend, size: usize, heads: usize) -> Result<MultiHeadAttention> {
        MultiHeadAttention::with(backend, size, heads, MultiHeadAttentionOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// `Error::Argument` if `size` is not a multiple of `heads`, or the dropout is not in `0..=1`; errors of
    /// the device.
    pub fn with(
        backend: &Backend,
        size: usize,
        heads: usize,
        o: MultiHeadAttentionOptions,
    ) -> Result<MultiHeadAttention> {
        if heads == 0 || size == 0 || !size.is_multiple_of(heads) {
            return Err(invalid(
                "MultiHeadAttention",
                format!("{size} elements do not divide into {heads} heads"),
            ));
        }
        let weight = Init::XavierUniform { gain: 1.0 }.tensor(backend, &[3 * size, size], o.dtype)?;
        let in_proj_bias = match o.bias {
            true => Some(Param::new(Init::Zeros.tensor(backend, &[3 * size], o.dtype)?)),
            false => None,
        };
        let out = LinearOptions {
            bias: o.bias,
            dtype: o.dtype,
            bias_init: Some(Init::Zeros),
            ..LinearOptions::default()
        };
        Ok(MultiHeadAttention {
            in_proj_weight: Param::new(weight),
            in_proj_bias,
            out_proj: Linear::with(backend, size, size, out)?,
            dropout: Dropout::new(o.dropout)?,
            heads,
            size,
            batch_first: o.batch_first,
        })
    }

    /// Attention of `query` to `key` and `value`. The sequences of key and value have the same length. A mask
    /// is added to the scores; it broadcasts to `[batch, heads, queries, keys]`. With `causal`, the last
    /// query attends to all keys, and each earlier query attends to one key fewer than the query after it.
    #[track_caller]
    pub fn forward(&self, query: &Tensor, key: &Tensor, value: &Tensor, o: Attention<'_>) -> Tensor {
        let weight = self.in_proj_weight.value();
        let bias = self.in_proj_bias.as_ref().map(Param::value);
        let project = |x: &Tensor, i: usize| {
            let rows = |t: &Tensor| t.narrow(0, i * self.size, self.size);
            let y = linear(x, &rows(&weight), bias.as_ref().map(rows).as_ref());
            self.split(&y)
        };
        let (q, k, v) = (project(query, 0), project(key, 1), project(value, 2));
        let y = match is_training() && self.dropout.forward_drops() {
            false => q.attention(&k, &v, o),
            true => self.dropped(&q, &k, &v, o),
        };
        let y = self.join(&y);
        self.out_proj.forward(&located(y, &self.in_proj_weight, query))
    }

    /// Splits `x` into heads: `[batch, heads, sequence, size of a head]`.
    #[track_caller]
    fn split(&self, x: &Tensor) -> Tensor {
        // The sizes may be symbols.
        let Ok(d) = x.shape() else { return x.clone() };
        if d.rank() != 3 {
            let what = format!("the input must have three axes, but it is {d}");
            let e = halcyon::ir::error::Error::shape("multi_head_attention", what);
            return Tensor::build(&[x], |_, _| Err(e));
        }
        let y = x.reshape([d[0], d[1], self.heads.into(), (self.size / self.heads).into()]);
        y.permute(if self.batch_first { &[0, 2, 1, 3] } else { &[1, 2, 0, 3] })
    }

    #[track_caller]
    fn join(&self, y: &Tensor) -> Tensor {
        let y = y.permute(if self.batch_first { &[0, 2, 1, 3] } else { &[2, 0, 1, 3] });
        match y.shape() {
            Ok(d) if d.rank() == 4 => y.reshape([d[0], d[1], self.size.into()]),
            _ => y,
        }
    }

    /// Attention with dropout of the attention weights, for training. With `causal`, the lengths of the
    /// sequences must be known.
    #[track_caller]
    fn dropped(&self, q: &Tensor, k: &Tensor, v: &Tensor, o: Attention<'_>) -> Tensor {
        let scale = o.scale.unwrap_or(1.0 / ((self.size / self.heads) as f64).sqrt());
        let mut scores = q.matmul(&k.transpose(-2, -1)) * scale;
        if let Some(mask) = o.mask {
            scores = scores + mask;
        }
        if o.causal {
            let (queries, keys) = match (q.dims(), k.dims()) {
                (Ok(q), Ok(k)) => (q[2], k[2]),
                // A sequence of unknown length, or an error of an earlier op.
                (Err(e), _) | (_, Err(e)) => return Tensor::build(&[q, k], |_, _| Err(e)),
            };
            let index = |n: usize| Tensor::arange(q.backend(), n, DType::I32);
            let last = index(queries).unsqueeze(1) + (keys as i64 - queries as i64);
            let hidden = index(keys).unsqueeze(0).gt(&last);
            let dtype = scores.dtype().unwrap_or(DType::F32);
            let never = Tensor::full(q.backend(), [1usize], f64::NEG_INFINITY, dtype);
            scores = hidden.select(&never, &scores);
        }
        self.dropout.forward(&scores.softmax(-1)).matmul(v)
    }
}

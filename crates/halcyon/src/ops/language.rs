//! Ops of language models.

use crate::tensor::Tensor;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::error::Error;
use halcyon_ir::ops::{CacheOperands, CachedAttention, RowMatmul};

/// A paged cache of keys and values, and which positions each row sees: the operands of
/// [`Tensor::cached_attention`].
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// `[pages, key heads, page, size]`: f32, f16, bf16, or u8 with the bytes of blocks of
    /// [`BlockType::Q8_0`] in place of the size.
    pub keys: &'a Tensor,
    /// `[pages, key heads, page, value size]`, of one of the types of keys.
    pub values: &'a Tensor,
    /// i32 `[sequences, n]`: the pages of each sequence, in the order of positions.
    pub table: &'a Tensor,
    /// i32 `[rows]`: the sequence of each row of the queries.
    pub sequence: &'a Tensor,
    /// i32 `[rows]`: the position of each row in its sequence; negative for unused rows, whose result is 0.
    pub position: &'a Tensor,
    /// f32 `[heads]`: a score per head that takes part in the softmax but has no value.
    pub sinks: Option<&'a Tensor>,
}

impl Tensor {
    /// Decodes block-quantised weights, u8 `[…, bytes]`, to f32; see [`halcyon_ir::Graph::decode_blocks`].
    #[track_caller]
    pub fn decode_blocks(&self, format: BlockType) -> Tensor {
        Tensor::build(&[self], |g, x| g.decode_blocks(x[0], format))
    }

    /// These activations, f32 `[m, k]`, times weights that are stored by rows, `[n, k]` or bytes of blocks:
    /// f32 `[m, n]`. The bits of a row of the result do not depend on the other rows. With `which`, integers
    /// `[m]`, each row has its own matrix of the weights `[matrices, n, k]`. See
    /// [`halcyon_ir::Graph::row_matmul`].
    #[track_caller]
    pub fn row_matmul(
        &self,
        weights: &Tensor,
        options: impl Into<RowMatmul>,
        which: Option<&Tensor>,
    ) -> Tensor {
        let options = options.into();
        let mut ins = vec![self, weights];
        ins.extend(which);
        Tensor::build(&ins, |g, x| g.row_matmul(x[0], x[1], options, x.get(2).copied()))
    }

    /// Attention of these queries, f32 `[rows, heads, size]`, over the cached positions of each row's
    /// sequence; see [`halcyon_ir::Graph::cached_attention`].
    #[track_caller]
    pub fn cached_attention(&self, cache: Cache<'_>, options: CachedAttention) -> Tensor {
        let Cache { keys, values, table, sequence, position, sinks } = cache;
        let mut ins = vec![self, keys, values, table, sequence, position];
        ins.extend(sinks);
        Tensor::build(&ins, |g, x| {
            let &[q, keys, values, table, sequence, position, ref sinks @ ..] = x else {
                return Err(Error::internal("cached_attention was built of other operands"));
            };
            let sinks = sinks.first().copied();
            let cache = CacheOperands { keys, values, table, sequence, position, sinks };
            g.cached_attention(q, cache, options)
        })
    }
}

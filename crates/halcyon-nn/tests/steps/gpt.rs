//! A small language model with the structure of GPT-2.

use halcyon::ops::Attention;
use halcyon::prelude::*;
use halcyon_nn::*;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) context: usize,
    pub(crate) vocabulary: usize,
    pub(crate) dropout: f64,
}

#[derive(Module)]
pub(crate) struct Block {
    ln1: LayerNorm,
    attention: MultiHeadAttention,
    ln2: LayerNorm,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(b: &Backend, s: Sizes) -> Result<Block> {
        let o = MultiHeadAttentionOptions { batch_first: true, ..MultiHeadAttentionOptions::default() };
        Ok(Block {
            ln1: LayerNorm::new(b, [s.width])?,
            attention: MultiHeadAttention::with(b, s.width, s.heads, o)?,
            ln2: LayerNorm::new(b, [s.width])?,
            up: Linear::new(b, s.width, 4 * s.width)?,
            down: Linear::new(b, 4 * s.width, s.width)?,
            dropout: Dropout::new(s.dropout)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let h = self.ln1.forward(x);
        let causal = Attention { causal: true, ..Attention::default() };
        let x = x + self.dropout.forward(&self.attention.forward(&h, &h, &h, causal));
        let h = self.up.forward(&self.ln2.forward(&x)).gelu();
        &x + self.dropout.forward(&self.down.forward(&h))
    }
}

#[derive(Module)]
pub(crate) struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    #[module(skip)]
    checkpointed: bool,
}

impl Gpt {
    pub(crate) fn new(b: &Backend, s: Sizes, checkpointed: bool) -> Result<Gpt> {
        Ok(Gpt {
            tokens: Embedding::new(b, s.vocabulary, s.width)?,
            positions: Embedding::new(b, s.context, s.width)?,
            blocks: (0..s.layers).map(|_| Block::new(b, s)).collect::<Result<_>>()?,
            norm: LayerNorm::new(b, [s.width])?,
            head: Linear::new(b, s.width, s.vocabulary)?,
            checkpointed,
        })
    }

    pub(crate) fn loss(&self, tokens: &Tensor, next: &Tensor) -> Result<Tensor> {
        let d = tokens.dims()?;
        let at = Tensor::arange(tokens.backend(), d[1], DType::I64);
        let x = self.tokens.forward(tokens) + self.positions.forward(&at);
        let x = self.blocks.iter().fold(x, |x, block| match self.checkpointed {
            true => checkpoint(&x, |x| block.forward(x)),
            false => block.forward(&x),
        });
        let logits = self.head.forward(&self.norm.forward(&x));
        let v = logits.dims()?[2];
        let rows = d[0] * d[1];
        let (logits, next) = (logits.reshape([rows, v]), next.reshape([rows]));
        Ok(cross_entropy(&logits, &next, CrossEntropyOptions::default()))
    }
}

/// A batch of tokens, and the tokens that follow them.
pub(crate) fn batch(b: &Backend, s: Sizes, rows: usize, seed: u64) -> Result<[Tensor; 2]> {
    // Text of period 7 with some noise, so that there is something to learn.
    let mut state = seed | 1;
    let mut token = |i: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let noise = state.is_multiple_of(10);
        (if noise { state as usize / 16 } else { i % 7 * 5 }) % s.vocabulary
    };
    let text: Vec<i64> = (0..rows * s.context + 1).map(|i| token(i) as i64).collect();
    let n = rows * s.context;
    let of = |from: usize| Tensor::from_slice(b, [rows, s.context], &text[from..from + n]);
    Ok([of(0)?, of(1)?])
}

//! The models of a configuration.

use super::config::ModelConfig;
use super::data::{Data, Target};
use halcyon::ir::DType;
use halcyon::ir::error::{Error, Result};
use halcyon::ops::Attention;
use halcyon::{Backend, Tensor};
use halcyon_nn::{
    BatchNorm, Conv2d, ConvOptions, Dropout, Embedding, EmbeddingOptions, Init, LayerNorm, Linear,
    LinearOptions, MaxPool, Module, ModuleExt, MultiHeadAttention, MultiHeadAttentionOptions, Param,
    PoolOptions, Visit,
};

/// A model of a configuration.
#[derive(Debug)]
pub enum Model {
    Mlp(Mlp),
    Cnn(Cnn),
    Chars(Chars),
}

impl Module for Model {
    fn visit(&self, visit: &mut Visit<'_>) {
        match self {
            Model::Mlp(m) => m.visit(visit),
            Model::Cnn(m) => m.visit(visit),
            Model::Chars(m) => m.visit(visit),
        }
    }
    fn kind(&self) -> &'static str {
        match self {
            Model::Mlp(m) => m.kind(),
            Model::Cnn(m) => m.kind(),
            Model::Chars(m) => m.kind(),
        }
    }
}

impl Model {
    /// The model of a configuration for data of given shapes.
    pub(super) fn new(b: &Backend, config: &ModelConfig, data: &Data) -> Result<Model> {
        let outputs = match data.target {
            Target::Classes(n) => n,
            Target::Values => data.output.dims.iter().product(),
        };
        let dims = &data.input.dims[..];
        Ok(match config {
            ModelConfig::Mlp { hidden, dropout } => {
                Model::Mlp(Mlp::new(b, dims.iter().product(), hidden, outputs, *dropout)?)
            }
            ModelConfig::Cnn { channels, dropout } => {
                let [c, h, w] = dims else {
                    let what = format!(
                        "a cnn needs images [channels, height, width], but the data has {dims:?}; give their \
                         shape, as in train.shape = [1, 8, 8]"
                    );
                    return Err(Error::argument("train", what));
                };
                Model::Cnn(Cnn::new(b, [*c, *h, *w], channels, outputs, *dropout)?)
            }
            ModelConfig::Chars { layers, size, heads, dropout } => {
                let [context] = dims else {
                    let what = format!("a chars model needs text, but the data has rows of {dims:?}");
                    return Err(Error::argument("train", what));
                };
                if data.input.dtype.is_float() || data.input.dims != data.output.dims {
                    return Err(Error::argument("train", "a chars model needs data of the kind text"));
                }
                Model::Chars(Chars::new(b, [outputs, *context], [*layers, *size, *heads], *dropout)?)
            }
        })
    }

    /// The model's scores of classes, or its values: `[batch, outputs]`, or `[batch, context, characters]`
    /// for a character model.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        match self {
            Model::Mlp(m) => m.forward(x),
            Model::Cnn(m) => m.forward(x),
            Model::Chars(m) => m.forward(x),
        }
    }

    fn some_parameter(&self) -> Tensor {
        match self {
            Model::Mlp(m) => m.last.weight.value(),
            Model::Cnn(m) => m.last.weight.value(),
            Model::Chars(m) => m.token.weight.value(),
        }
    }

    /// The backend of the parameters.
    pub(super) fn backend(&self) -> Backend {
        self.some_parameter().backend().clone()
    }

    /// The dtype of the parameters.
    pub(super) fn dtype(&self) -> Result<DType> {
        self.some_parameter().dtype()
    }
}

/// Fully connected layers.
#[derive(Debug, Module)]
pub struct Mlp {
    hidden: Vec<Linear>,
    last: Linear,
    dropout: Dropout,
}

impl Mlp {
    fn new(b: &Backend, inputs: usize, hidden: &[usize], outputs: usize, dropout: f64) -> Result<Mlp> {
        let sizes: Vec<usize> = std::iter::once(inputs).chain(hidden.iter().copied()).collect();
        let layers = sizes.windows(2).map(|w| Linear::new(b, w[0], w[1])).collect::<Result<Vec<_>>>()?;
        let last = Linear::new(b, sizes[sizes.len() - 1], outputs)?;
        Ok(Mlp { hidden: layers, last, dropout: Dropout::new(dropout)? })
    }

    /// Takes rows of any shape.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let flat = x.shape().map_or(1, |s| s.len());
        let x = if flat > 2 { x.flatten(1, -1) } else { x.clone() };
        let x = self.hidden.iter().fold(x, |x, l| self.dropout.forward(&l.forward(&x).relu()));
        self.last.forward(&x)
    }
}

/// A convolution with batch normalisation.
#[derive(Debug, Module)]
struct ConvBlock {
    conv: Conv2d,
    norm: BatchNorm,
}

/// A convolutional network.
#[derive(Debug, Module)]
pub struct Cnn {
    blocks: Vec<ConvBlock>,
    last: Linear,
    pool: MaxPool<2>,
    dropout: Dropout,
}

impl Cnn {
    fn new(
        b: &Backend,
        [c, h, w]: [usize; 3],
        channels: &[usize],
        outputs: usize,
        dropout: f64,
    ) -> Result<Cnn> {
        let (halves, most) = (channels.len(), h.min(w).checked_ilog2().unwrap_or(0) as usize);
        if halves == 0 || halves > most {
            let what = format!(
                "{halves} convolutions: each halves the image of {h}×{w}, which allows 1 to {most} \
                 convolutions"
            );
            return Err(Error::argument("train", what));
        }
        let sizes: Vec<usize> = std::iter::once(c).chain(channels.iter().copied()).collect();
        let block = |s: &[usize]| {
            let padded = ConvOptions::default().padding(1);
            let conv = Conv2d::with(b, s[0], s[1], [3, 3], padded)?;
            Ok(ConvBlock { conv, norm: BatchNorm::new(b, s[1])? })
        };
        let blocks = sizes.windows(2).map(block).collect::<Result<Vec<_>>>()?;
        let last = Linear::new(b, sizes[halves] * (h >> halves) * (w >> halves), outputs)?;
        Ok(Cnn { blocks, last, pool: MaxPool::new(PoolOptions::new(2))?, dropout: Dropout::new(dropout)? })
    }

    /// Takes images `[batch, channels, height, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let block = |x: Tensor, b: &ConvBlock| self.pool.forward(&b.norm.forward(&b.conv.forward(&x)).relu());
        let x = self.blocks.iter().fold(x.clone(), block);
        self.last.forward(&self.dropout.forward(&x.flatten(1, -1)))
    }
}

/// A block of a character model.
#[derive(Debug, Module)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(b: &Backend, size: usize, heads: usize, layers: usize, dropout: f64) -> Result<Block> {
        let o = MultiHeadAttentionOptions { dropout, batch_first: true, ..Default::default() };
        let normal = |std: f64| LinearOptions {
            weight: Init::Normal { mean: 0.0, std },
            bias_init: Some(Init::Zeros),
            ..LinearOptions::default()
        };
        // `fc2`, whose result is added to the residual, starts with smaller weights: they are divided by the
        // root of the number of such additions in the model (Radford et al. 2019).
        let small = 0.02 / (2.0 * layers as f64).sqrt();
        Ok(Block {
            norm1: LayerNorm::new(b, [size])?,
            attention: MultiHeadAttention::with(b, size, heads, o)?,
            norm2: LayerNorm::new(b, [size])?,
            fc1: Linear::with(b, size, 4 * size, normal(0.02))?,
            fc2: Linear::with(b, 4 * size, size, normal(small))?,
            dropout: Dropout::new(dropout)?,
        })
    }

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Tensor {
        let h = self.norm1.forward(x);
        let causal = Attention { causal: true, ..Attention::default() };
        let x = x + self.dropout.forward(&self.attention.forward(&h, &h, &h, causal));
        let h = self.fc2.forward(&self.fc1.forward(&self.norm2.forward(&x)).gelu());
        x + self.dropout.forward(&h)
    }
}

/// A character model.
#[derive(Debug, Module)]
pub struct Chars {
    token: Embedding,
    position: Param,
    blocks: Vec<Block>,
    norm: LayerNorm,
    dropout: Dropout,
}

impl Chars {
    fn new(
        b: &Backend,
        [characters, context]: [usize; 2],
        [layers, size, heads]: [usize; 3],
        dropout: f64,
    ) -> Result<Chars> {
        let small = Init::Normal { mean: 0.0, std: 0.02 };
        let token =
            Embedding::with(b, characters, size, EmbeddingOptions { weight: small, ..Default::default() })?;
        let position = Param::new(small.tensor(b, &[context, size], DType::F32)?);
        let blocks = (0..layers).map(|_| Block::new(b, size, heads, layers, dropout));
        Ok(Chars {
            token,
            position,
            blocks: blocks.collect::<Result<_>>()?,
            norm: LayerNorm::new(b, [size])?,
            dropout: Dropout::new(dropout)?,
        })
    }

    /// Takes characters `[batch, length]`, where the length is at most the context. Returns the scores of the
    /// next character at each position.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let Ok(length) = x.dims().map(|d| d.last().copied().unwrap_or(0)) else { return x.clone() };
        let h = self.token.forward(x) + self.position.value().narrow(0, 0usize, length);
        let h = self.blocks.iter().fold(self.dropout.forward(&h), |h, b| b.forward(&h));
        // The last layer uses the weights of the character embedding.
        self.norm.forward(&h).matmul(&self.token.weight.value().transpose(0, 1))
    }
}

impl Model {
    /// A table of the modules.
    ///
    /// # Errors
    /// An error that a parameter's value carries.
    pub fn table(&self) -> Result<String> {
        self.summary()
    }
}

//! Layers. Their names, defaults and weight layouts are those of PyTorch; PyTorch has no [`Lora`].

mod activation;
mod attention;
mod conv;
mod dropout;
mod embedding;
mod linear;
mod lora;
mod norm;
mod pool;
mod recurrent;
mod sequential;

pub(crate) use activation::softplus;
pub use activation::{Activation, Gelu};
pub use attention::{MultiHeadAttention, MultiHeadAttentionOptions};
pub use conv::{
    Conv1d, Conv2d, Conv3d, ConvLayer, ConvOptions, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d,
};
pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingOptions};
pub use linear::{Linear, LinearOptions};
pub use lora::{Lora, LoraOptions};
pub use norm::{BatchNorm, BatchNormOptions, GroupNorm, LayerNorm, NormOptions, RmsNorm};
pub use pool::{AdaptiveAvgPool, AvgPool, MaxPool, PoolOptions};
pub use recurrent::{Gru, Lstm, LstmState, RecurrentOptions};
pub use sequential::{Forward, Sequential};

use crate::slot::{Param, in_module};
use halcyon::Tensor;
use halcyon::ir::error::Error;

/// If `y`, the module's result, carries an error, adds the path of the module that owns `param` to the error.
/// If the module's input `x` already carries an error, the error is left unchanged.
#[track_caller]
pub(crate) fn located(y: Tensor, param: &Param, x: &Tensor) -> Tensor {
    match x.check() {
        Ok(()) => y.map_error(|e| in_module(e, &param.module_path())),
        Err(_) => y,
    }
}

/// Zero in the dtype of `x`, of rank 0.
#[track_caller]
pub(crate) fn zero_of(x: &Tensor) -> Tensor {
    match x.dtype() {
        Ok(d) => Tensor::scalar(x.backend(), 0i64, d),
        Err(_) => x.clone(),
    }
}

/// The error of a layer's constructor.
pub(crate) fn invalid(layer: &str, what: impl Into<String>) -> Error {
    Error::argument(layer, what)
}

use super::{
    Activation, AdaptiveAvgPool, AvgPool, BatchNorm, Conv1d, Conv2d, Conv3d, ConvTranspose1d,
    ConvTranspose2d, ConvTranspose3d, Dropout, Embedding, GroupNorm, LayerNorm, Linear, MaxPool, RmsNorm,
};
use crate::module::{Module, Visit};
use halcyon::Tensor;
use std::fmt;
use std::sync::Arc;

/// A module that maps one tensor to one tensor. All layers whose forward has one input and one result
/// implement this trait, except [`super::Lora`].
pub trait Forward: Module + Send + Sync {
    /// The module's result for `x`.
    fn forward(&self, x: &Tensor) -> Tensor;
}

macro_rules! forwards {
    ($($ty:ty)*) => {
        $(impl Forward for $ty {
            #[track_caller]
            fn forward(&self, x: &Tensor) -> Tensor {
                <$ty>::forward(self, x)
            }
        })*
    };
}
forwards! {
    Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
    MaxPool<1> MaxPool<2> MaxPool<3> AvgPool<1> AvgPool<2> AvgPool<3>
    AdaptiveAvgPool<1> AdaptiveAvgPool<2> AdaptiveAvgPool<3>
    LayerNorm RmsNorm GroupNorm BatchNorm Dropout Embedding Activation Sequential
}

/// A function as a step of [`Sequential`], such as a reshape. It owns no parameters.
struct Function<F>(F);

impl<F> Module for Function<F> {
    fn visit(&self, _: &mut Visit<'_>) {}
    fn kind(&self) -> &'static str {
        "Function"
    }
}

impl<F: Fn(&Tensor) -> Tensor + Send + Sync> Forward for Function<F> {
    fn forward(&self, x: &Tensor) -> Tensor {
        (self.0)(x)
    }
}

/// Runs modules one after another: each module gets the result of the module before it. The path of a module
/// is its number, as in `0.weight`.
///
/// ```
/// use halcyon::prelude::*;
/// use halcyon_nn::{Activation, Linear, ModuleExt, Sequential};
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let model = Sequential::new()
///     .then(Linear::new(&b, 4, 8)?)
///     .then(Activation::Relu)
///     .then(Linear::new(&b, 8, 2)?);
/// let y = model.forward(&Tensor::ones(&b, [3, 4], DType::F32));
/// assert_eq!(y.dims()?.as_slice(), [3, 2]);
/// assert_eq!(model.parameters()[2].0, "2.weight");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct Sequential(Vec<Arc<dyn Forward>>);

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|m| m.kind())).finish()
    }
}

impl Module for Sequential {
    fn visit(&self, visit: &mut Visit<'_>) {
        for (i, m) in self.0.iter().enumerate() {
            visit.child(&i.to_string(), &**m);
        }
    }
    fn kind(&self) -> &'static str {
        "Sequential"
    }
}

impl Sequential {
    /// An empty sequence. Its forward returns its input.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Adds a module at the end.
    pub fn then(mut self, module: impl Forward + 'static) -> Sequential {
        self.0.push(Arc::new(module));
        self
    }

    /// Adds a function at the end.
    pub fn then_fn(self, f: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static) -> Sequential {
        self.then(Function(f))
    }

    /// The number of modules.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no modules.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The result of the last module, where `x` is the input of the first.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        self.0.iter().fold(x.clone(), |x, m| m.forward(&x))
    }
}

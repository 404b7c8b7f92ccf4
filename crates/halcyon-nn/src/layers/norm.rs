use super::{invalid, located};
use crate::init::Init;
use crate::module::{Module, Visit};
use crate::scope::is_training;
use crate::slot::{Buffer, Param};
use halcyon::ir::DType;
use halcyon::ir::composite::CompositeKind;
use halcyon::ir::error::Result;
use halcyon::ir::shape::Dim;
use halcyon::{Backend, Tensor};

/// Options of layer, group and root-mean-square normalisation.
#[derive(Clone, Copy, Debug)]
pub struct NormOptions {
    /// Added to the variance, or in RMS normalisation to the mean of the squares. Default: 1e-5.
    pub eps: f64,
    /// Whether the result is scaled by a parameter. Default: true.
    pub affine: bool,
    /// Whether a bias is added to the result. It has no effect without `affine`. Default: true.
    pub bias: bool,
    pub dtype: DType,
}

impl Default for NormOptions {
    fn default() -> NormOptions {
        NormOptions { eps: 1e-5, affine: true, bias: true, dtype: DType::F32 }
    }
}

fn scale_and_bias(
    backend: &Backend,
    dims: &[usize],
    affine: bool,
    bias: bool,
    dtype: DType,
) -> Result<(Option<Param>, Option<Param>)> {
    let param = |on: bool, init: Init| match on {
        true => Ok(Some(Param::new(init.tensor(backend, dims, dtype)?))),
        false => Ok(None),
    };
    Ok((param(affine, Init::Ones)?, param(affine && bias, Init::Zeros)?))
}

fn visit_both(weight: &Option<Param>, bias: &Option<Param>, visit: &mut Visit<'_>) {
    visit.child("weight", weight);
    visit.child("bias", bias);
}

/// Adds the module's path to errors, if the module has a parameter.
#[track_caller]
fn placed(y: Tensor, weight: &Option<Param>, x: &Tensor) -> Tensor {
    match weight {
        Some(w) => located(y, w, x),
        None => y,
    }
}

/// Normalisation over the last axes: `(x - mean) / sqrt(var + eps) * weight + bias` (Ba et al. 2016).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    pub weight: Option<Param>,
    pub bias: Option<Param>,
    dims: Vec<usize>,
    eps: f64,
}

impl Module for LayerNorm {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit_both(&self.weight, &self.bias, visit);
    }
    fn kind(&self) -> &'static str {
        "LayerNorm"
    }
}

impl LayerNorm {
    /// Normalises over the last axes, which have the sizes `dims`.
    ///
    /// # Errors
    /// `Error::Argument` if `dims` is empty; errors of the device.
    pub fn new(backend: &Backend, dims: impl AsRef<[usize]>) -> Result<LayerNorm> {
        LayerNorm::with(backend, dims, NormOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// Those of [`LayerNorm::new`].
    pub fn with(backend: &Backend, dims: impl AsRef<[usize]>, o: NormOptions) -> Result<LayerNorm> {
        let dims = dims.as_ref().to_vec();
        if dims.is_empty() {
            return Err(invalid("LayerNorm", "no axes to normalise over"));
        }
        let (weight, bias) = scale_and_bias(backend, &dims, o.affine, o.bias, o.dtype)?;
        Ok(LayerNorm { weight, bias, dims, eps: o.eps })
    }

    /// The layer's result for `x` of shape `[…, dims…]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let scale = match (&self.weight, x.dtype()) {
            (Some(w), _) => w.value(),
            (None, Ok(d)) => Tensor::ones(x.backend(), self.dims.clone(), d),
            (None, Err(_)) => return x.clone(),
        };
        let bias = self.bias.as_ref().map(Param::value);
        placed(x.layer_norm(&scale, bias.as_ref(), -(self.dims.len() as i64), self.eps), &self.weight, x)
    }
}

/// Root-mean-square normalisation over the last axis: `x / sqrt(mean(x²) + eps) * weight` (Zhang and Sennrich
/// 2019).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub weight: Option<Param>,
    size: usize,
    eps: f64,
}

impl Module for RmsNorm {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("weight", &self.weight);
    }
    fn kind(&self) -> &'static str {
        "RMSNorm"
    }
}

impl RmsNorm {
    /// Normalises over a last axis of `size` elements. `eps` is the machine epsilon of f32, 2⁻²³.
    ///
    /// # Errors
    /// Those of [`RmsNorm::with`].
    pub fn new(backend: &Backend, size: usize) -> Result<RmsNorm> {
        RmsNorm::with(backend, size, NormOptions { eps: f32::EPSILON.into(), ..NormOptions::default() })
    }

    /// Like `new`, with options. The layer has no bias, whatever `o.bias` is.
    ///
    /// # Errors
    /// `Error::Argument` if `size` is 0; errors of the device.
    pub fn with(backend: &Backend, size: usize, o: NormOptions) -> Result<RmsNorm> {
        if size == 0 {
            return Err(invalid("RmsNorm", "no elements to normalise over"));
        }
        let (weight, _) = scale_and_bias(backend, &[size], o.affine, false, o.dtype)?;
        Ok(RmsNorm { weight, size, eps: o.eps })
    }

    /// The layer's result for `x` of shape `[…, size]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let scale = match (&self.weight, x.dtype()) {
            (Some(w), _) => w.value(),
            (None, Ok(d)) => Tensor::ones(x.backend(), [self.size], d),
            (None, Err(_)) => return x.clone(),
        };
        placed(x.rms_norm(&scale, self.eps), &self.weight, x)
    }
}

/// Normalisation of groups of channels of `[batch, channels, …]` (Wu and He 2018).
#[derive(Clone, Debug)]
pub struct GroupNorm {
    pub weight: Option<Param>,
    pub bias: Option<Param>,
    groups: usize,
    channels: usize,
    eps: f64,
}

impl Module for GroupNorm {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit_both(&self.weight, &self.bias, visit);
    }
    fn kind(&self) -> &'static str {
        "GroupNorm"
    }
}

impl GroupNorm {
    /// A layer for `channels` channels, divided into `groups` groups of equal size.
    ///
    /// # Errors
    /// `Error::Argument` if `channels` is not a multiple of `groups`; errors of the device.
    pub fn new(backend: &Backend, groups: usize, channels: usize) -> Result<GroupNorm> {
        GroupNorm::with(backend, groups, channels, NormOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// Those of [`GroupNorm::new`].
    pub fn with(backend: &Backend, groups: usize, channels: usize, o: NormOptions) -> Result<GroupNorm> {
        if groups == 0 || channels == 0 || !channels.is_multiple_of(groups) {
            return Err(invalid(
                "GroupNorm",
                format!("{channels} channels do not divide into {groups} groups"),
            ));
        }
        let (weight, bias) = scale_and_bias(backend, &[channels], o.affine, o.bias, o.dtype)?;
        Ok(GroupNorm { weight, bias, groups, channels, eps: o.eps })
    }

    /// The layer's result for `x` of shape `[batch, channels, …]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        // The sizes may be symbols.
        let Ok(shape) = x.shape() else { return x.clone() };
        let dims: Vec<Dim> = shape.iter().copied().collect();
        if dims.get(1) != Some(&Dim::from(self.channels)) {
            let what = format!("{} channels are expected, but the input is {shape}", self.channels);
            let e = halcyon::ir::error::Error::shape("group_norm", what);
            return placed(Tensor::build(&[x], |_, _| Err(e)), &self.weight, x);
        }
        let each = Dim::from(self.channels / self.groups);
        let rest = dims[2..].iter().fold(each, |n, d| n.mul(*d));
        let y = x.reshape([dims[0], Dim::from(self.groups), rest]);
        let mean = y.mean_keepdim(2);
        let centred = &y - &mean;
        let var = centred.sqr().mean_keepdim(2);
        let y = (centred * (var + self.eps).rsqrt()).reshape(dims.clone());
        let mut per_channel = vec![1usize; dims.len() - 1];
        per_channel[0] = self.channels;
        let y = match &self.weight {
            Some(w) => y * w.value().reshape(per_channel.clone()),
            None => y,
        };
        let y = match &self.bias {
            Some(b) => y + b.value().reshape(per_channel),
            None => y,
        };
        placed(y, &self.weight, x)
    }
}

/// Options of [`BatchNorm::with`].
#[derive(Clone, Copy, Debug)]
pub struct BatchNormOptions {
    /// Added to the variance. Default: 1e-5.
    pub eps: f64,
    /// The weight of the batch's statistics in the new running statistics. Default: 0.1.
    pub momentum: f64,
    /// Whether the result is scaled and shifted by parameters. Default: true.
    pub affine: bool,
    pub dtype: DType,
}

impl Default for BatchNormOptions {
    fn default() -> BatchNormOptions {
        BatchNormOptions { eps: 1e-5, momentum: 0.1, affine: true, dtype: DType::F32 }
    }
}

/// Normalisation of the channels of `[batch, channels, …]` (Ioffe and Szegedy 2015). In training, the layer
/// uses the statistics of the batch and updates the running statistics with them. In evaluation, it uses the
/// running statistics. The layer accepts two or more axes.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    pub weight: Option<Param>,
    pub bias: Option<Param>,
    pub running_mean: Buffer,
    pub running_var: Buffer,
    /// Number of batches seen in training, i32.
    pub num_batches_tracked: Buffer,
    channels: usize,
    options: BatchNormOptions,
}

impl Module for BatchNorm {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit_both(&self.weight, &self.bias, visit);
        visit.child("running_mean", &self.running_mean);
        visit.child("running_var", &self.running_var);
        visit.child("num_batches_tracked", &self.num_batches_tracked);
    }
    fn kind(&self) -> &'static str {
        "BatchNorm"
    }
}

impl BatchNorm {
    /// A layer for `channels` channels.
    ///
    /// # Errors
    /// `Error::Argument` if `channels` is 0; errors of the device.
    pub fn new(backend: &Backend, channels: usize) -> Result<BatchNorm> {
        BatchNorm::with(backend, channels, BatchNormOptions::default())
    }

    /// Like `new`, with options.
    ///
    /// # Errors
    /// Those of [`BatchNorm::new`].
    pub fn with(backend: &Backend, channels: usize, o: BatchNormOptions) -> Result<BatchNorm> {
        if channels == 0 {
            return Err(invalid("BatchNorm", "no channels"));
        }
        let (weight, bias) = scale_and_bias(backend, &[channels], o.affine, true, o.dtype)?;
        let buffer = |init: Init| Ok(Buffer::new(init.tensor(backend, &[channels], DType::F32)?));
        Ok(BatchNorm {
            weight,
            bias,
            running_mean: buffer(Init::Zeros)?,
            running_var: buffer(Init::Ones)?,
            num_batches_tracked: Buffer::new(Init::Zeros.tensor(backend, &[], DType::I32)?),
            channels,
            options: o,
        })
    }

    /// The layer's result for `x` of shape `[batch, channels, …]`. In training, the layer updates the running
    /// statistics. It updates the running variance with the unbiased variance of the batch.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        // In evaluation the batch size may be a symbol.
        let (Ok(shape), Ok(dtype)) = (x.shape(), x.dtype()) else { return x.clone() };
        if shape.len() < 2 || shape[1].known() != Some(self.channels) {
            let what = format!("{} channels are expected, but the input is {shape}", self.channels);
            let e = halcyon::ir::error::Error::shape(CompositeKind::BatchNorm, what);
            return placed(Tensor::build(&[x], |_, _| Err(e)), &self.weight, x);
        }
        let (mean, var) = match is_training() {
            false => (self.running_mean.value(), self.running_var.value()),
            true => match x.dims().and_then(|dims| self.of_batch(x, &dims)) {
                Ok(both) => both,
                Err(e) => return placed(Tensor::build(&[x], |_, _| Err(e)), &self.weight, x),
            },
        };
        let constant = |v: f64| Tensor::full(x.backend(), [self.channels], v, dtype);
        let scale = self.weight.as_ref().map_or_else(|| constant(1.0), Param::value);
        let bias = self.bias.as_ref().map_or_else(|| constant(0.0), Param::value);
        let y = x.batch_norm(&scale, &bias, &mean.cast(dtype), &var.cast(dtype), self.options.eps);
        placed(y, &self.weight, x)
    }

    /// Updates the running statistics, and returns the mean and variance of the batch: in f64 for an input in
    /// f64, otherwise in f32.
    fn of_batch(&self, x: &Tensor, dims: &[usize]) -> Result<(Tensor, Tensor)> {
        let n: usize = dims[0] * dims[2..].iter().product::<usize>();
        if n < 2 {
            let what = format!("training needs more than one value per channel, but the input is {dims:?}");
            return Err(invalid("BatchNorm", what));
        }
        let axes: Vec<i64> = (0..dims.len() as i64).filter(|a| *a != 1).collect();
        let wide = if x.dtype()? == DType::F64 { DType::F64 } else { DType::F32 };
        let x = x.cast(wide);
        let mean = x.mean_keepdim(axes.as_slice());
        let var = (&x - &mean).sqr().mean(axes.as_slice());
        let mean = mean.reshape([dims[1]]);
        let m = self.options.momentum;
        // If the model was cast to f16 or bf16, its running statistics have that dtype too.
        let blend = |old: &Buffer, new: &Tensor, factor: f64| {
            let (old_value, dtype) = (old.value().cast(wide), old.value().dtype()?);
            old.write((old_value * (1.0 - m) + new * (m * factor)).cast(dtype))
        };
        blend(&self.running_mean, &mean, 1.0)?;
        blend(&self.running_var, &var, n as f64 / (n - 1) as f64)?;
        self.num_batches_tracked.write(self.num_batches_tracked.value() + 1)?;
        Ok((mean, var))
    }
}

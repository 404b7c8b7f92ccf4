//! A backend built with options, whose operations are called as methods of the backend.
//!
//! ```
//! use halcyon_compat::unified::*;
//! # fn main() -> halcyon::Result<()> {
//! let backend = cpu().num_threads(1).enable_simd(true).build()?;
//! let a = backend.randn([4, 8], DType::F32);
//! let b = backend.randn([8, 2], DType::F32);
//! let c = backend.relu(&backend.matmul(&a, &b));
//! assert_eq!(c.dims()?[..], [4, 2]);
//! # Ok(())
//! # }
//! ```

use halcyon::hal::registry;
use halcyon::{AmpPolicy, BatchNorm, Compiled, ConstData, Element, Error, Fallback, HostBuffer, Level};
use halcyon::{Backend as Core, BackendBuilder as CoreBuilder};
use halcyon::{Scalar, State};
use std::sync::Arc;

pub use halcyon::{Backend, BackendType, ConvConfig, DType, Result, Tensor};

/// All items of this module in one import.
pub mod prelude {
    pub use super::{BackendBuilder, MixedPrecisionConfig, Operations, Pinned, cpu, cuda, metal};
    pub use halcyon::ConvConfig;
    pub use halcyon::prelude::*;
}

/// Settings for opening a backend.
#[derive(Clone, Debug, Default)]
pub struct BackendBuilder {
    core: CoreBuilder,
    kind: Option<BackendType>,
}

impl BackendBuilder {
    pub fn new() -> BackendBuilder {
        BackendBuilder::default()
    }

    /// The backend to open; `Auto` if not set.
    pub fn backend_type(mut self, b: BackendType) -> Self {
        self.kind = Some(b);
        self
    }

    fn with(self, f: impl FnOnce(CoreBuilder) -> CoreBuilder) -> Self {
        BackendBuilder { core: f(self.core), ..self }
    }

    /// The index of the device among the backend's devices.
    pub fn device_id(self, n: usize) -> Self {
        self.with(|b| b.device(n))
    }

    /// Hard cap on the bytes taken from the driver ([`halcyon::BackendBuilder::memory_limit`]).
    pub fn memory_pool_size(self, bytes: u64) -> Self {
        self.with(|b| b.memory_limit(bytes))
    }

    /// [`halcyon::BackendBuilder::enable_tensor_cores`].
    pub fn enable_tensor_cores(self, on: bool) -> Self {
        self.with(|b| b.enable_tensor_cores(on))
    }

    /// Sets mixed precision ([`halcyon::BackendBuilder::amp`]), which takes effect from level O2 on, and the
    /// scale of the loss in training steps ([`halcyon::BackendBuilder::loss_scale`]). The first step uses
    /// this scale; later the scale changes with the gradients. With a `scale_factor` of 1.0, training steps
    /// in bf16 and f32 do not scale the loss.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if `accum_dtype` is not f32, or `compute_dtype` is none of f32, f16 and bf16;
    /// [`Error::Argument`] if `scale_factor` is not a positive number. [`BackendBuilder::build`] reports a
    /// dtype that the device does not support.
    pub fn enable_mixed_precision(self, config: MixedPrecisionConfig) -> Result<Self> {
        let MixedPrecisionConfig { compute_dtype, accum_dtype, scale_factor } = config;
        if accum_dtype != DType::F32 {
            return Err(Error::unsupported(format!("sums in {accum_dtype}"), "Use accum_dtype F32"));
        }
        let policies = [AmpPolicy::None, AmpPolicy::F16, AmpPolicy::Bf16];
        let policy = match compute_dtype {
            DType::F32 => Some(AmpPolicy::None),
            t => policies.into_iter().find(|p| p.dtype() == Some(t)),
        };
        let policy = policy.ok_or_else(|| {
            Error::unsupported(format!("mixed precision in {compute_dtype}"), "Use BF16, F16 or F32")
        })?;
        if !(scale_factor.is_finite() && scale_factor > 0.0) {
            let what = format!("scale_factor is {scale_factor}, and a positive number is needed");
            return Err(Error::argument("enable_mixed_precision", what));
        }
        let scales = policy == AmpPolicy::F16 || scale_factor != 1.0;
        Ok(self.with(|b| {
            let b = b.amp(policy);
            if scales { b.loss_scale(scale_factor) } else { b }
        }))
    }

    /// [`halcyon::BackendBuilder::force_amp`].
    pub fn force_amp(self, on: bool) -> Self {
        self.with(|b| b.force_amp(on))
    }

    /// The optimisation level.
    pub fn level(self, level: Level) -> Self {
        self.with(|b| b.level(level))
    }

    /// # Errors
    /// The errors of [`halcyon::BackendBuilder::build`].
    pub fn build(self) -> Result<Core> {
        self.core.backend_type(self.kind.unwrap_or(BackendType::Auto)).build()
    }
}

/// Options of mixed precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixedPrecisionConfig {
    /// Dtype of the factors of products.
    pub compute_dtype: DType,
    /// Dtype of the sums of products.
    pub accum_dtype: DType,
    /// The first training step multiplies the loss by this factor before it computes gradients. 65536 is
    /// usual for f16.
    pub scale_factor: f64,
}

type Adam = Compiled<fn(&[Tensor]) -> Vec<Tensor>>;

/// The moments and the number of steps that [`fused_adam_step`] keeps.
#[derive(Debug, Default)]
pub struct AdamState {
    /// The first and the second moment of each parameter in turn.
    moments: Vec<State>,
    steps: u64,
    update: Option<Adam>,
}

impl AdamState {
    /// No steps yet.
    pub fn new() -> AdamState {
        AdamState::default()
    }

    /// The number of steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The first and the second moment of parameter `i`.
    pub fn moments(&self, i: usize) -> Option<[Tensor; 2]> {
        Some([self.moments.get(2 * i)?.value(), self.moments.get(2 * i + 1)?.value()])
    }
}

/// The new parameters and moments. `x` are the gradients, the parameters, and the moments in turn.
fn adam(x: &[Tensor]) -> Vec<Tensor> {
    let n = x.len() / 4;
    let (mut params, mut moments) = (vec![], vec![]);
    for i in 0..n {
        let (g, p, m, v) = (&x[i], &x[n + i], &x[2 * n + 2 * i], &x[2 * n + 2 * i + 1]);
        let number = |k: u32| Tensor::argument(g.backend(), k, DType::F32);
        let m = m + (g - m) * number(0);
        let v = v * number(1) + g.sqr() * number(2);
        params.push(p - &m / (v.sqrt() * number(3) + 1e-8) * number(4));
        moments.extend([m, v]);
    }
    params.into_iter().chain(moments).collect()
}

/// Updates all parameters, which must be f32, by one step of Adam (Kingma and Ba 2014, eps 1e-8). The step is
/// submitted as one plan. New values are written over the old ones, except where the program holds a handle
/// on an old value.
///
/// ```
/// use halcyon::State;
/// use halcyon_compat::unified::*;
/// # fn main() -> halcyon::Result<()> {
/// let backend = cpu().build()?;
/// let w = State::new(Tensor::ones(&backend, [3], DType::F32));
/// let mut state = AdamState::new();
/// let g = Tensor::full(&backend, [3], 0.5, DType::F32);
/// fused_adam_step(&[&w], &[&g], &mut state, 0.1, (0.9, 0.999))?;
/// assert!((w.value().to_vec::<f32>()?[0] - 0.9).abs() < 1e-5);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Argument`] if the numbers of parameters and gradients differ, there are none, or `state` is for
/// another number of parameters; [`Error::Shape`] if the type of a gradient differs from the type of its
/// parameter, or is not f32; errors of the device.
pub fn fused_adam_step(
    params: &[&State],
    grads: &[&Tensor],
    state: &mut AdamState,
    lr: f64,
    betas: (f64, f64),
) -> Result<()> {
    let op = "fused_adam_step";
    if params.is_empty() || params.len() != grads.len() {
        let what = format!("{} parameters and {} gradients", params.len(), grads.len());
        return Err(Error::argument(op, what));
    }
    for (p, g) in params.iter().zip(grads) {
        let (p, own) = (p.value(), (g.dtype()?, g.shape()?));
        if own != (p.dtype()?, p.shape()?) || own.0 != DType::F32 {
            let what =
                format!("the gradient is {} {}, the parameter {} {}", own.0, own.1, p.dtype()?, p.shape()?);
            return Err(Error::shape(op, what));
        }
    }
    let backend = grads[0].backend().clone();
    if state.moments.is_empty() {
        for p in params {
            let shape = p.value().shape()?;
            let zeros = || State::new(Tensor::zeros(&backend, shape.clone(), DType::F32));
            state.moments.extend([zeros(), zeros()]);
        }
        state.update = Some(backend.compile(adam as fn(&[Tensor]) -> Vec<Tensor>));
    }
    let Some(update) = state.update.as_ref().filter(|_| state.moments.len() == 2 * params.len()) else {
        let what = format!("{} parameters, but the state is for {}", params.len(), state.moments.len() / 2);
        return Err(Error::argument(op, what));
    };
    let t = (state.steps + 1) as f64;
    let (first, second) = (1.0 - betas.0.powf(t), 1.0 - betas.1.powf(t));
    let args = [1.0 - betas.0, betas.1, 1.0 - betas.1, 1.0 / second.sqrt(), lr / first].map(Scalar::F);
    let grads: Vec<Tensor> = grads.iter().map(|g| g.detach()).collect::<Result<_>>()?;
    let states: Vec<&State> = params.iter().copied().chain(&state.moments).collect();
    update.call_updating(&grads.iter().collect::<Vec<_>>(), &states, &args)?;
    state.steps += 1;
    Ok(())
}

/// Builds the CPU backend with options.
pub fn cpu() -> CpuBuilder {
    CpuBuilder(Core::builder().backend_type(BackendType::Cpu))
}

/// Builds the CUDA backend with options.
pub fn cuda() -> CudaBuilder {
    CudaBuilder(Core::builder().backend_type(BackendType::Cuda))
}

/// Builds the Metal backend with options.
pub fn metal() -> MetalBuilder {
    MetalBuilder { builder: Core::builder().backend_type(BackendType::Metal), mps: None }
}

/// Options of the CPU backend, see [`cpu`].
#[derive(Clone, Debug)]
pub struct CpuBuilder(CoreBuilder);

impl CpuBuilder {
    /// Number of threads, including the calling thread.
    pub fn num_threads(self, n: usize) -> Self {
        CpuBuilder(self.0.num_threads(n))
    }

    /// Whether to use instruction sets beyond the portable one (SSE2 or NEON); on by default.
    pub fn enable_simd(self, on: bool) -> Self {
        CpuBuilder(self.0.enable_simd(on))
    }

    /// # Errors
    /// The errors of [`halcyon::BackendBuilder::build`].
    pub fn build(self) -> Result<Core> {
        self.0.build()
    }
}

/// The error for an option that the driver does not support yet, on an available device.
fn not_yet(option: &str, backend: BackendType) -> Error {
    Error::unsupported(
        format!("{option} on {}", backend.title()),
        format!("Leave it out, and see `halcyon doctor --backend {backend}` for what the driver uses"),
    )
}

/// Options of the CUDA backend, see [`cuda`].
#[derive(Clone, Debug)]
pub struct CudaBuilder(CoreBuilder);

impl CudaBuilder {
    pub fn device(self, n: usize) -> Self {
        CudaBuilder(self.0.device(n))
    }

    pub fn enable_cudnn(self, on: bool) -> Self {
        CudaBuilder(self.0.enable_cudnn(on))
    }

    /// [`halcyon::BackendBuilder::enable_tensor_cores`].
    pub fn enable_tensor_cores(self, on: bool) -> Self {
        CudaBuilder(self.0.enable_tensor_cores(on))
    }

    /// # Errors
    /// [`Error::Unavailable`] if there is no CUDA; [`Error::Unsupported`] if cuDNN is enabled but missing;
    /// the errors of [`halcyon::BackendBuilder::build`].
    pub fn build(self) -> Result<Core> {
        self.0.fallback(Fallback::Never).build()
    }
}

/// Options of the Metal backend, see [`metal`].
#[derive(Clone, Debug)]
pub struct MetalBuilder {
    builder: CoreBuilder,
    mps: Option<bool>,
}

impl MetalBuilder {
    pub fn device(mut self, n: usize) -> Self {
        self.builder = self.builder.device(n);
        self
    }

    /// Whether to use Metal Performance Shaders.
    pub fn enable_mps(mut self, on: bool) -> Self {
        self.mps = Some(on);
        self
    }

    /// # Errors
    /// [`Error::Unavailable`] if there is no Metal; [`Error::Unsupported`] if MPS is enabled, which the
    /// driver does not support yet; the errors of [`halcyon::BackendBuilder::build`].
    pub fn build(self) -> Result<Core> {
        registry::driver(BackendType::Metal)?.list()?;
        if self.mps == Some(true) {
            return Err(not_yet("Metal Performance Shaders", BackendType::Metal));
        }
        self.builder.fallback(Fallback::Never).build()
    }
}

/// A dense array of host memory that the device copies from directly, page-locked where the driver supports
/// that. It begins with zeros. [`Pinned::into_data`] makes it the source of copies to the device.
///
/// ```
/// use halcyon_compat::unified::*;
/// # fn main() -> halcyon::Result<()> {
/// let backend = cpu().build()?;
/// let mut host = backend.alloc_pinned([2, 2], DType::F32)?;
/// host.write(&[1f32, 2.0, 3.0, 4.0])?;
/// let copied = pollster::block_on(backend.copy_host_to_device_async(&host.into_data()?))?;
/// assert_eq!(copied.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pinned {
    dtype: DType,
    dims: Vec<usize>,
    memory: HostBuffer,
}

impl Pinned {
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Whether the pages are page-locked.
    pub fn is_locked(&self) -> bool {
        self.memory.is_locked()
    }

    /// The elements as little-endian bytes in row-major order.
    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Writes all elements.
    ///
    /// # Errors
    /// [`Error::Argument`] if `T` is not the dtype of the array; [`Error::Shape`] if the number of values is
    /// not that of its elements.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        if T::DTYPE != self.dtype {
            return Err(Error::argument(
                "alloc_pinned",
                format!("{} values for {} elements", T::DTYPE, self.dtype),
            ));
        }
        let bytes = T::write_all(values);
        if bytes.len() != self.memory.len() {
            let what = format!("{} values for the shape {:?}", values.len(), self.dims);
            return Err(Error::shape("alloc_pinned", what));
        }
        self.memory.copy_from_slice(&bytes);
        Ok(())
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Argument`] if `T` is not the dtype of the array.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        match T::DTYPE == self.dtype {
            true => Ok(T::read_all(&self.memory)),
            false => {
                Err(Error::argument("alloc_pinned", format!("{} elements read as {}", self.dtype, T::DTYPE)))
            }
        }
    }

    /// Host data in the same memory, for [`halcyon::Backend::copy_host_to_device_async`].
    ///
    /// # Errors
    /// None in practice: the memory has the size of the array.
    pub fn into_data(self) -> Result<ConstData> {
        ConstData::new(self.dtype, &self.dims, Arc::new(self.memory))
    }
}

/// Operations called on a backend: other spellings of the tensor's methods. The tensors must be on this
/// backend; otherwise the result carries an error.
pub trait Operations {
    fn matmul(&self, a: &Tensor, b: &Tensor) -> Tensor;
    fn relu(&self, x: &Tensor) -> Tensor;
    /// [`Tensor::gemm`].
    fn gemm(&self, a: &Tensor, b: &Tensor, alpha: f64, c: &Tensor, beta: f64) -> Tensor;
    /// [`Tensor::gemv`].
    fn gemv(&self, a: &Tensor, x: &Tensor, alpha: f64, y: &Tensor, beta: f64) -> Tensor;
    /// [`Tensor::conv2d`].
    fn conv2d(&self, input: &Tensor, weight: &Tensor, config: ConvConfig) -> Tensor;
    /// Allocates an array of host memory for copies to this device ([`halcyon::Backend::alloc_host`]).
    ///
    /// # Errors
    /// [`Error::Shape`] if its size overflows; [`Error::Unsupported`] if the device has no such memory;
    /// [`Error::OutOfMemory`].
    fn alloc_pinned(&self, shape: impl AsRef<[usize]>, dtype: DType) -> Result<Pinned>;
    /// [`Tensor::batch_norm_running`].
    ///
    /// # Errors
    /// The errors of [`Tensor::batch_norm_running`].
    fn batch_norm(&self, input: &Tensor, mean: &State, var: &State, training: bool) -> Result<Tensor>;
}

impl Operations for Core {
    #[track_caller]
    fn matmul(&self, a: &Tensor, b: &Tensor) -> Tensor {
        a.must_be_on(self).matmul(b)
    }

    #[track_caller]
    fn relu(&self, x: &Tensor) -> Tensor {
        x.must_be_on(self).relu()
    }

    #[track_caller]
    fn gemm(&self, a: &Tensor, b: &Tensor, alpha: f64, c: &Tensor, beta: f64) -> Tensor {
        a.must_be_on(self).gemm(b, alpha, c, beta)
    }

    #[track_caller]
    fn gemv(&self, a: &Tensor, x: &Tensor, alpha: f64, y: &Tensor, beta: f64) -> Tensor {
        a.must_be_on(self).gemv(x, alpha, y, beta)
    }

    #[track_caller]
    fn conv2d(&self, input: &Tensor, weight: &Tensor, config: ConvConfig) -> Tensor {
        input.must_be_on(self).conv2d(weight, config)
    }

    fn alloc_pinned(&self, shape: impl AsRef<[usize]>, dtype: DType) -> Result<Pinned> {
        let dims = shape.as_ref().to_vec();
        let elements = dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bits = elements.and_then(|n| n.checked_mul(dtype.bits() as usize));
        let bits = bits.filter(|n| *n <= isize::MAX as usize).ok_or_else(|| {
            Error::shape("alloc_pinned", format!("{dtype} {dims:?} does not fit into the address space"))
        })?;
        Ok(Pinned { dtype, dims, memory: self.alloc_host(bits.div_ceil(8))? })
    }

    #[track_caller]
    fn batch_norm(&self, input: &Tensor, mean: &State, var: &State, training: bool) -> Result<Tensor> {
        input.must_be_on(self).batch_norm_running(mean, var, BatchNorm { training, ..Default::default() })
    }
}

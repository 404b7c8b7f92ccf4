//! Kernels on `ndarray` arrays, on every backend. Each kernel copies its arrays to the device, computes, and
//! copies the result back. This is for programs that call individual kernels; a model is faster as a graph of
//! [`Tensor`]s.
//!
//! ```
//! use halcyon_compat::kernels::{CpuBackend, KernelBackend};
//! use ndarray::{Array1, Array2};
//! # fn main() -> halcyon::Result<()> {
//! let cpu = CpuBackend::with_options(true, false)?;
//! let w = Array2::from_shape_fn((2, 3), |(i, j)| (i * 3 + j) as f32);
//! assert_eq!(cpu.matmul_vec(&w, &Array1::ones(3))?.to_vec(), [3.0, 12.0]);
//! # Ok(())
//! # }
//! ```

use halcyon::hal::registry;
use halcyon::ir::composite::CompositeKind;
use halcyon::{Backend, BackendType, Error, Fallback, Result, Tensor};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut1};
use std::fmt::Debug;
use std::marker::PhantomData;

/// Kernels of a language model on f32 arrays. Incompatible shapes are reported as [`Error::Shape`].
pub trait KernelBackend: Send + Sync + Debug {
    /// A vector on the device.
    type Tensor1: Clone;
    /// A matrix on the device.
    type Tensor2: Clone;

    /// The backend's id: `cpu`, `cuda`.
    fn name(&self) -> &'static str;
    /// Whether this machine has a device of this backend.
    fn is_available() -> bool
    where
        Self: Sized;

    fn upload1(&self, x: ArrayView1<'_, f32>) -> Result<Self::Tensor1>;
    fn upload2(&self, x: ArrayView2<'_, f32>) -> Result<Self::Tensor2>;

    /// `w · x`
    fn matmul_vec(&self, w: &Array2<f32>, x: &Array1<f32>) -> Result<Array1<f32>>;
    /// `out = w · x`
    fn matmul_vec_into(&self, w: &Array2<f32>, x: &Array1<f32>, out: &mut Array1<f32>) -> Result<()>;
    /// `a · b`
    fn matmul(&self, a: &Array2<f32>, b: &Array2<f32>) -> Result<Array2<f32>>;

    /// `x = x / sqrt(mean(x²) + eps) · weight`
    fn rmsnorm(&self, x: &mut Array1<f32>, weight: &Array1<f32>, eps: f32) -> Result<()>;
    /// `x = softmax(x)`
    fn softmax(&self, x: &mut Array1<f32>) -> Result<()>;
    /// [`KernelBackend::softmax`] on a view of an array, in place.
    fn softmax_view(&self, x: &mut ArrayViewMut1<'_, f32>) -> Result<()>;

    /// `x · sigmoid(x)`
    fn silu(&self, x: &Array1<f32>) -> Result<Array1<f32>>;

    /// Rotary position embedding on every row of `x` `[heads, d]`, in place: each pair of elements `i` and `i
    /// + d/2` is rotated by an angle. `cos` and `sin` have one value per pair (length `d/2`) or per element
    /// (length `d`).
    fn apply_rope(&self, x: &mut Array2<f32>, cos: &Array1<f32>, sin: &Array1<f32>) -> Result<()>;

    /// `scores[i] = keys[i] · query · scale`
    fn compute_attention_scores(
        &self,
        query: ArrayView1<'_, f32>,
        keys: ArrayView2<'_, f32>,
        scores: &mut ArrayViewMut1<'_, f32>,
        scale: f32,
    ) -> Result<()>;
    /// `out = Σ weights[i] · matrix[i]`
    fn weighted_sum_rows(
        &self,
        weights: ArrayView1<'_, f32>,
        matrix: ArrayView2<'_, f32>,
        out: &mut ArrayViewMut1<'_, f32>,
    ) -> Result<()>;
}

/// Marker for the kind of backend that a [`BackendKernels`] uses.
pub trait Kind: Send + Sync + Debug {
    const TYPE: BackendType;
}

/// Kernels on a device of one kind of backend.
#[derive(Clone, Debug)]
pub struct BackendKernels<K>(Backend, PhantomData<K>);

macro_rules! kinds {
    ($($alias:ident $kind:ident),*) => {$(
        #[derive(Clone, Copy, Debug)]
        pub struct $kind;
        impl Kind for $kind {
            const TYPE: BackendType = BackendType::$kind;
        }
        pub type $alias = BackendKernels<$kind>;
    )*};
}
kinds!(CpuBackend Cpu, CudaBackend Cuda, RocmBackend Rocm, MetalBackend Metal, OpenClBackend OpenCl, WebGpuBackend WebGpu);

impl<K: Kind> BackendKernels<K> {
    /// Opens the first device of this kind.
    ///
    /// # Errors
    /// The errors of [`halcyon::BackendBuilder::build`].
    pub fn new() -> Result<BackendKernels<K>> {
        BackendKernels::over(Backend::builder().backend_type(K::TYPE).fallback(Fallback::Never).build()?)
    }

    /// Uses an open backend.
    ///
    /// # Errors
    /// [`Error::Argument`] if the backend is of another kind.
    pub fn over(backend: Backend) -> Result<BackendKernels<K>> {
        match backend.info().backend {
            b if b == K::TYPE => Ok(BackendKernels(backend, PhantomData)),
            b => Err(Error::argument("backend", format!("expected a device of {}, got one of {b}", K::TYPE))),
        }
    }

    /// The backend that the kernels run on.
    pub fn backend(&self) -> &Backend {
        &self.0
    }

    fn vector(&self, x: ArrayView1<'_, f32>) -> Result<Tensor> {
        let v: Vec<f32> = x.iter().copied().collect();
        Tensor::from_slice(&self.0, [v.len()], &v)
    }

    fn matrix(&self, x: ArrayView2<'_, f32>) -> Result<Tensor> {
        let v: Vec<f32> = x.iter().copied().collect();
        Tensor::from_slice(&self.0, [x.nrows(), x.ncols()], &v)
    }
}

impl CpuBackend {
    /// Opens the CPU, with or without instruction sets beyond the portable one (SSE2 or NEON), and with all
    /// threads or one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for `use_simd` in a build without the `simd` feature.
    pub fn with_options(use_simd: bool, use_parallel: bool) -> Result<CpuBackend> {
        let b = Backend::builder().backend_type(BackendType::Cpu).enable_simd(use_simd);
        BackendKernels::over(if use_parallel { b } else { b.num_threads(1) }.build()?)
    }
}

/// Copies a tensor's values into an array.
fn put(op: &str, t: &Tensor, out: &mut ArrayViewMut1<'_, f32>) -> Result<()> {
    let v = t.to_vec::<f32>()?;
    if v.len() != out.len() {
        let what = format!("the result has {} elements, but the array for it has {}", v.len(), out.len());
        return Err(Error::shape(op, what));
    }
    out.iter_mut().zip(v).for_each(|(o, v)| *o = v);
    Ok(())
}

impl<K: Kind> KernelBackend for BackendKernels<K> {
    type Tensor1 = Tensor;
    type Tensor2 = Tensor;

    fn name(&self) -> &'static str {
        K::TYPE.id()
    }

    fn is_available() -> bool {
        registry::driver(K::TYPE).and_then(|d| d.list()).is_ok_and(|d| !d.is_empty())
    }

    fn upload1(&self, x: ArrayView1<'_, f32>) -> Result<Tensor> {
        self.vector(x)
    }

    fn upload2(&self, x: ArrayView2<'_, f32>) -> Result<Tensor> {
        self.matrix(x)
    }

    fn matmul_vec(&self, w: &Array2<f32>, x: &Array1<f32>) -> Result<Array1<f32>> {
        let y = self.matrix(w.view())?.matmul(&self.vector(x.view())?.unsqueeze(1));
        Ok(y.to_vec::<f32>()?.into())
    }

    fn matmul_vec_into(&self, w: &Array2<f32>, x: &Array1<f32>, out: &mut Array1<f32>) -> Result<()> {
        let y = self.matrix(w.view())?.matmul(&self.vector(x.view())?.unsqueeze(1));
        put("matmul_vec_into", &y, &mut out.view_mut())
    }

    fn matmul(&self, a: &Array2<f32>, b: &Array2<f32>) -> Result<Array2<f32>> {
        let y = self.matrix(a.view())?.matmul(&self.matrix(b.view())?);
        Array2::from_shape_vec((a.nrows(), b.ncols()), y.to_vec()?)
            .map_err(|e| Error::internal(format!("matmul: {e}")))
    }

    fn rmsnorm(&self, x: &mut Array1<f32>, weight: &Array1<f32>, eps: f32) -> Result<()> {
        let y = self.vector(x.view())?.unsqueeze(0).rms_norm(&self.vector(weight.view())?, eps as f64);
        put("rmsnorm", &y, &mut x.view_mut())
    }

    fn softmax(&self, x: &mut Array1<f32>) -> Result<()> {
        self.softmax_view(&mut x.view_mut())
    }

    fn softmax_view(&self, x: &mut ArrayViewMut1<'_, f32>) -> Result<()> {
        let y = self.vector(x.view())?.softmax(0);
        put(CompositeKind::Softmax.name(), &y, x)
    }

    fn silu(&self, x: &Array1<f32>) -> Result<Array1<f32>> {
        Ok(self.vector(x.view())?.silu().to_vec::<f32>()?.into())
    }

    fn apply_rope(&self, x: &mut Array2<f32>, cos: &Array1<f32>, sin: &Array1<f32>) -> Result<()> {
        let d = x.ncols();
        if !d.is_multiple_of(2) || cos.len() != sin.len() || (cos.len() != d && cos.len() != d / 2) {
            let what = format!(
                "rows have {d} elements, with {} cosines and {} sines; expected an even number, and a cosine and a sine per pair or per element",
                cos.len(),
                sin.len()
            );
            return Err(Error::shape("apply_rope", what));
        }
        let both = |a: &Array1<f32>| -> Result<Tensor> {
            let t = self.vector(a.view())?;
            Ok(if a.len() == d { t } else { Tensor::cat(&[&t, &t], 0) })
        };
        let t = self.matrix(x.view())?;
        let (low, high) = (t.narrow(1, 0usize, d / 2), t.narrow(1, d / 2, d / 2));
        let turned = Tensor::cat(&[&high.neg(), &low], 1);
        let y = t * both(cos)? + turned * both(sin)?;
        x.iter_mut().zip(y.to_vec::<f32>()?).for_each(|(o, v)| *o = v);
        Ok(())
    }

    fn compute_attention_scores(
        &self,
        query: ArrayView1<'_, f32>,
        keys: ArrayView2<'_, f32>,
        scores: &mut ArrayViewMut1<'_, f32>,
        scale: f32,
    ) -> Result<()> {
        let y = self.matrix(keys)?.matmul(&self.vector(query)?.unsqueeze(1)) * scale as f64;
        put("compute_attention_scores", &y, scores)
    }

    fn weighted_sum_rows(
        &self,
        weights: ArrayView1<'_, f32>,
        matrix: ArrayView2<'_, f32>,
        out: &mut ArrayViewMut1<'_, f32>,
    ) -> Result<()> {
        let y = self.vector(weights)?.unsqueeze(0).matmul(&self.matrix(matrix)?);
        put("weighted_sum_rows", &y, out)
    }
}

//! Embeddings of texts.

use super::options::Take;
use crate::backend::Backend;
use crate::calls::Work;
use crate::errors::OrRaise;
use halcyon::Backend as RawBackend;
use halcyon_models::embed::{EmbedOptions, Embedder as Inner, Pooling};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Texts that are computed between two looks for Ctrl-C.
const TEXTS: usize = 16;

/// A model that turns texts into vectors. Threads may use it at the same time; one after another computes.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct Embedder {
    inner: Mutex<Inner>,
    backend: RawBackend,
    path: PathBuf,
    size: usize,
    max_tokens: usize,
    warnings: Vec<String>,
}

impl Embedder {
    fn compute(&self, texts: &[String], out: &mut Vec<u8>) -> halcyon::Result<()> {
        // A model whose step failed computes the next one as before.
        let mut model = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for vector in model.embed(texts)? {
            out.extend(vector.iter().flat_map(|x| x.to_le_bytes()));
        }
        Ok(())
    }
}

#[pymethods]
impl Embedder {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        backend: &Backend,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Embedder> {
        let o = Take(options);
        let pooling: Option<String> = o.get("pooling")?;
        let options = EmbedOptions {
            pooling: pooling.map(|name| Pooling::by_name(&name)).transpose().or_raise()?,
            normalize: o.get("normalize")?,
            prompt: o.get("prompt")?,
            max_tokens: o.get("max_tokens")?,
            adapters: o.or("adapters", vec![])?,
        };
        o.end()?;
        let backend = backend.0.clone();
        py.work(|| {
            let inner = Inner::open(&backend, &path, &options)?;
            Ok(Embedder {
                size: inner.size(),
                max_tokens: inner.max_tokens(),
                warnings: inner.warnings().to_vec(),
                inner: Mutex::new(inner),
                backend,
                path,
            })
        })
    }

    /// The vectors of the texts, one after another, as little-endian f32.
    fn embed<'py>(&self, py: Python<'py>, texts: Vec<String>) -> PyResult<Bound<'py, PyByteArray>> {
        let mut out = Vec::new();
        for some in texts.chunks(TEXTS) {
            py.check_signals()?;
            py.work(|| self.compute(some, &mut out))?;
        }
        Ok(PyByteArray::new(py, &out))
    }

    /// Elements of a vector.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// The most tokens of a text; longer texts are cut.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// What the user should know about the model.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    /// The backend of the weights.
    #[getter]
    fn backend(&self) -> Backend {
        Backend(self.backend.clone())
    }

    fn __repr__(&self) -> String {
        format!("Embedder({}, {} elements, {})", self.path.display(), self.size, self.backend.id())
    }
}

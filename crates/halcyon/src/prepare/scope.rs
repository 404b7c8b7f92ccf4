//! A guard that empties a backend's caches.

use crate::backend::Backend;
use std::ops::Deref;

impl Backend {
    /// A guard that derefs to the backend. When the guard is dropped, also after an error or a panic, it
    /// empties the backend's caches ([`Backend::empty_cache`]).
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let backend = Backend::cpu()?;
    /// {
    ///     let scope = backend.scope();
    ///     Tensor::ones(&scope, [64, 64], DType::F32).eval()?;
    /// }
    /// assert_eq!(backend.memory().cached, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn scope(&self) -> Scope<'_> {
        Scope(self)
    }
}

/// A guard made by [`Backend::scope`].
#[derive(Debug)]
pub struct Scope<'a>(&'a Backend);

impl Deref for Scope<'_> {
    type Target = Backend;
    fn deref(&self) -> &Backend {
        self.0
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.0.empty_cache();
    }
}

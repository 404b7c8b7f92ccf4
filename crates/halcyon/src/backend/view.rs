//! Other handles on an open device, whose plans are made differently.

use super::{Backend, BackendBuilder, Inner};
use crate::planner::Planner;
use halcyon_hal::policy::Fallback;
#[cfg(doc)]
use halcyon_ir::error::Error;
use halcyon_ir::error::Result;
use halcyon_ir::passes::{AmpPolicy, Level};
use std::path::PathBuf;
use std::sync::Arc;

impl Backend {
    /// A handle on the same open device whose plans use another level. The handles share memory, weights on
    /// the device, programs and counters. One operation can combine tensors of both handles: the handle of
    /// the first operand plans the operation. [`crate::Tensor::to`] changes the handle of a tensor without a
    /// copy.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let backend = Backend::cpu()?;
    /// let exact = backend.with_level(Level::O0)?;
    /// let x = Tensor::ones(&backend, [2, 2], DType::F32);
    /// assert_eq!(x.to(&exact)?.backend().level(), Level::O0);
    /// assert_eq!((x.to(&exact)? + &x).to_vec::<f32>()?, [2.0; 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`BackendBuilder::build`] about settings. A backend that was built with these settings
    /// has passed the same checks.
    pub fn with_level(&self, level: Level) -> Result<Backend> {
        self.view(self.settings().level(level), self.0.planner.lowering.amp)
    }

    /// Like [`Backend::with_level`], with another policy of mixed precision.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not support the policy.
    pub fn with_amp(&self, policy: AmpPolicy) -> Result<Backend> {
        let mut settings = self.settings().amp(policy).amp_unmeasured();
        if policy == AmpPolicy::None {
            settings = settings.force_amp(false);
        }
        self.view(settings, policy)
    }

    /// Like [`Backend::with_level`], with a transformation switched off.
    ///
    /// # Errors
    /// [`Error::Argument`], with the names, if there is no such transformation.
    pub fn with_transformation_off(&self, name: &str) -> Result<Backend> {
        self.view(self.settings().without(name), self.0.planner.lowering.amp)
    }

    /// Opens this device a second time, with the same settings and with the time of every command measured.
    ///
    /// # Errors
    /// Errors of opening the device.
    pub(crate) fn profiled(&self) -> Result<Backend> {
        let amp = self.0.planner.lowering.amp;
        let b = self.settings().amp(amp).backend_type(self.info().backend).device(self.info().index);
        b.fallback(Fallback::Never).profile(true).build()
    }

    /// The directory in which this backend caches programs and measurements; `None` if nothing is cached.
    pub(crate) fn cache_dir(&self) -> Option<PathBuf> {
        let own = self.0.built.as_ref().and_then(BackendBuilder::own_cache_dir);
        #[cfg(not(target_arch = "wasm32"))]
        return own.or_else(halcyon_hal::cache::user_dir);
        #[cfg(target_arch = "wasm32")]
        own
    }

    fn settings(&self) -> BackendBuilder {
        self.0.built.clone().unwrap_or_else(|| BackendBuilder::of(&self.0.planner.lowering))
    }

    fn view(&self, settings: BackendBuilder, amp: AmpPolicy) -> Result<Backend> {
        let (lowering, warnings) = settings.lowering_for(&**self.device(), amp)?;
        let of = &self.0;
        Ok(Backend(Arc::new(Inner {
            planner: Planner::new(of.runtime.clone(), lowering, of.planner.tuning.clone()),
            runtime: of.runtime.clone(),
            selection: of.selection.clone(),
            warnings,
            built: Some(settings.amp(amp)),
            seed: of.seed.clone(),
            running: of.running.clone(),
        })))
    }
}

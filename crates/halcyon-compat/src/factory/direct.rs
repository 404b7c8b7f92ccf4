//! Backends constructed directly, by their vendor's name and with a level.

use super::{BackendConfig, LevelName, builder};
use halcyon::{Backend, BackendType, Fallback, Level, Result};
use std::ops::{Deref, DerefMut};

macro_rules! direct {
    ($($(#[$about:meta])* $name:ident => $kind:ident;)*) => {
        $(
            $(#[$about])*
            #[doc = ""]
            #[doc = "It derefs to [`Backend`]."]
            #[derive(Clone, Debug)]
            pub struct $name(Backend);

            impl $name {
                /// Opens the first device of this backend at a level, such as `"O2"`.
                ///
                /// # Errors
                /// The errors of [`BackendFactory::create`](super::BackendFactory::create); an error for an
                /// unknown or unsupported level.
                pub fn new(optimization_level: impl LevelName) -> Result<$name> {
                    let level = optimization_level.or(Level::default())?;
                    $name::with_config(BackendConfig { level, ..BackendConfig::default() })
                }

                /// Opens a device of this backend with options. It is never a device of another backend,
                /// whatever the configuration file says about a fallback.
                ///
                /// # Errors
                /// The errors of [`BackendFactory::create`](super::BackendFactory::create).
                pub fn with_config(config: BackendConfig) -> Result<$name> {
                    let builder = builder(BackendType::$kind, config)?;
                    builder.fallback(Fallback::Never).build().map($name)
                }
            }

            impl Deref for $name {
                type Target = Backend;
                fn deref(&self) -> &Backend {
                    &self.0
                }
            }

            impl DerefMut for $name {
                fn deref_mut(&mut self) -> &mut Backend {
                    &mut self.0
                }
            }
        )*
    };
}

direct! {
    /// A CUDA device.
    NvidiaBackend => Cuda;
    /// A ROCm device.
    AmdBackend => Rocm;
    /// An Intel GPU or accelerator, through the OpenCL driver.
    IntelBackend => Intel;
    /// A TPU. This version finds its library, but cannot run on it.
    TpuBackend => Tpu;
    /// The CPU.
    CpuBackend => Cpu;
}

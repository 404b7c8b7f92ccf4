//! Backend interfaces under the names of other libraries, as thin aliases of this crate's API.
//!
//! Each module is for programs written against one such interface; `docs/compat.md` lists every name and what
//! it maps to. New programs should use the core API: [`Backend`](crate::Backend), [`Tensor`](crate::Tensor),
//! [`hal::select`](crate::hal::select).
//!
//! | module | for programs that | core |
//! |---|---|---|
//! | [`training`] | choose and tune a device by name before they train | [`BackendBuilder`](crate::BackendBuilder), [`MatmulPrecision`](crate::MatmulPrecision), [`AmpPolicy`](crate::AmpPolicy) |
//! | [`inference`] | prefer a backend, check memory, print what is there | [`Policy`](crate::Policy), [`Fallback`](crate::Fallback), [`summary`](mod@crate::summary) |
//! | [`factory`] | make backends by vendor and ask them about devices and memory | [`Backend`](crate::Backend), [`DeviceInfo`](crate::DeviceInfo), [`MemoryStats`](crate::MemoryStats) |
//! | [`unified`] | build a backend with options and call operations on it | [`BackendBuilder`](crate::BackendBuilder), [`Tensor`](crate::Tensor) |
//! | `kernels` (feature `ndarray`) | call kernels on `ndarray` arrays | [`Tensor`](crate::Tensor) |

pub mod factory;
pub mod inference;
#[cfg(feature = "ndarray")]
pub mod kernels;
pub mod training;
pub mod unified;

use crate::Error;
use halcyon_hal::BackendType;

/// The kind of a [`BackendError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BackendErrorKind {
    /// An unknown name or invalid setting.
    UnknownValue,
    /// The name of one GPU stack on a machine that has the other.
    Mismatch,
    /// The library, driver or device is missing.
    MissingRuntime,
    /// The device has too little memory.
    OutOfMemory,
    /// Not supported yet.
    Unsupported,
    /// Any other error, such as a driver's.
    Other,
}

/// An [`Error`] with a kind, for programs that distinguish errors by kind. Its text says what to do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{source}")]
pub struct BackendError {
    kind: BackendErrorKind,
    source: Error,
}

impl BackendError {
    /// The kind of the error.
    pub fn kind(&self) -> BackendErrorKind {
        self.kind
    }

    /// The underlying [`Error`].
    pub fn error(&self) -> &Error {
        &self.source
    }

    /// The error for asking for backend `asked` when only `there` is available.
    pub(crate) fn mismatch(asked: BackendType, there: BackendType, reason: String) -> BackendError {
        let source = Error::Unavailable {
            backend: asked.id().into(),
            tried: vec![],
            reason,
            fix: format!("Use \"{there}\" (or \"auto\")"),
        };
        BackendError { kind: BackendErrorKind::Mismatch, source }
    }
}

impl From<Error> for BackendError {
    fn from(source: Error) -> BackendError {
        use BackendErrorKind::*;
        let kind = match &source {
            Error::Argument { .. } => UnknownValue,
            Error::Unavailable { .. } => MissingRuntime,
            Error::OutOfMemory { .. } => OutOfMemory,
            Error::Unsupported { .. } | Error::UnsupportedOps(_) => Unsupported,
            _ => Other,
        };
        BackendError { kind, source }
    }
}

impl From<BackendError> for Error {
    fn from(e: BackendError) -> Error {
        e.source
    }
}

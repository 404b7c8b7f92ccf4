//! Backend interfaces under the names of other libraries, as thin aliases of the API of [`halcyon`].
//!
//! Each module is for programs written against one such interface; `docs/compat.md` lists every name and what
//! it maps to. New programs should use the core API: [`Backend`](halcyon::Backend),
//! [`Tensor`](halcyon::Tensor), [`hal::select`](halcyon::hal::select).
//!
//! | module | for programs that | core |
//! |---|---|---|
//! | [`training`] | choose and tune a device by name before they train |
//! [`BackendBuilder`](halcyon::BackendBuilder), [`MatmulPrecision`](halcyon::MatmulPrecision),
//! [`AmpPolicy`](halcyon::AmpPolicy) |
//! | [`inference`] | prefer a backend, check memory, print what is there | [`Policy`](halcyon::Policy),
//! [`Fallback`](halcyon::Fallback), [`summary`](mod@halcyon::summary) |
//! | [`factory`] | make backends by vendor and query their devices and memory |
//! [`Backend`](halcyon::Backend), [`DeviceInfo`](halcyon::DeviceInfo), [`MemoryStats`](halcyon::MemoryStats)
//! |
//! | [`unified`] | build a backend with options and call operations on it |
//! [`BackendBuilder`](halcyon::BackendBuilder), [`Tensor`](halcyon::Tensor) |
//! | `kernels` (feature `ndarray`) | call kernels on `ndarray` arrays | [`Tensor`](halcyon::Tensor) |
#![forbid(unsafe_code)]

pub mod factory;
pub mod inference;
#[cfg(feature = "ndarray")]
pub mod kernels;
pub mod training;
pub mod unified;

use halcyon::{BackendType, Error};

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

/// An [`Error`] with a kind, for programs that distinguish errors by kind. Its text contains advice for the
/// user.
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

    /// The error for a request of backend `asked` if only `there` is available.
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

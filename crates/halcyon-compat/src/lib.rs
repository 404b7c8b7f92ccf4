//! Functions and types for choosing and using a backend, with the names of other libraries. They only call
//! the APIs of [`halcyon`] and `halcyon-nn`.
//!
//! Each module is for programs that were written for one such interface. `docs/compat.md` lists all names and
//! what each of them does. New programs should use the core API: [`Backend`](halcyon::Backend),
//! [`Tensor`](halcyon::Tensor), [`hal::select`](halcyon::hal::select).
//!
//! - [`training`] is for programs that choose and tune a device by name before they train. In the core API:
//!   [`BackendBuilder`](halcyon::BackendBuilder), [`MatmulPrecision`](halcyon::MatmulPrecision) and
//!   [`AmpPolicy`](halcyon::AmpPolicy).
//! - [`inference`] is for programs that prefer a backend, check memory and print the available devices. In
//!   the core API: [`Policy`](halcyon::Policy), [`Fallback`](halcyon::Fallback) and
//!   [`summary`](mod@halcyon::summary).
//! - [`factory`] is for programs that open a backend by vendor and query its devices and memory. In the core
//!   API: [`Backend`](halcyon::Backend), [`DeviceInfo`](halcyon::DeviceInfo) and
//!   [`MemoryStats`](halcyon::MemoryStats).
//! - [`unified`] is for programs that open a backend with options and call operations on it. In the core API:
//!   [`BackendBuilder`](halcyon::BackendBuilder) and [`Tensor`](halcyon::Tensor).
//! - `kernels` (feature `ndarray`) is for programs that call kernels on `ndarray` arrays. In the core API:
//!   [`Tensor`](halcyon::Tensor).
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
    /// The name `cuda` on a machine that has only ROCm, or `rocm` on a machine that has only CUDA; or the
    /// name of another backend than the given device's.
    Mismatch,
    /// The library, driver or device is missing.
    MissingRuntime,
    /// ONNX Runtime lacks the backend's execution provider.
    UnavailableProvider,
    /// The device has too little memory.
    OutOfMemory,
    /// Not supported yet.
    Unsupported,
    /// Any other error, such as an error of a driver.
    Other,
}

/// An [`Error`] with a kind, for programs that distinguish errors by kind. The text of the error tells the
/// user what to do.
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

    /// The error for a request of backend `asked` where `there` is the backend to use.
    pub(crate) fn mismatch(asked: BackendType, there: BackendType, reason: String) -> BackendError {
        let source = Error::Unavailable {
            backend: asked.id().into(),
            tried: vec![],
            reason,
            fix: format!("Use \"{there}\" (or \"auto\")"),
        };
        BackendError { kind: BackendErrorKind::Mismatch, source }
    }

    /// The error for a build of ONNX Runtime that has none of `names`, the providers of backend `asked`.
    pub(crate) fn no_provider(
        asked: BackendType,
        names: &[&str],
        available: &[impl AsRef<str>],
    ) -> BackendError {
        let there: Vec<&str> = available.iter().map(AsRef::as_ref).collect();
        let source = Error::Unavailable {
            backend: asked.id().into(),
            tried: names.iter().map(|n| n.to_string()).collect(),
            reason: match there.is_empty() {
                true => "no provider of ONNX Runtime was given as available".into(),
                false => format!("ONNX Runtime has only {}", there.join(", ")),
            },
            fix: format!("Install a build of ONNX Runtime for {}, or use \"auto\" or \"cpu\"", asked.title()),
        };
        BackendError { kind: BackendErrorKind::UnavailableProvider, source }
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

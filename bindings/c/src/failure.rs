//! Halcyon's errors as statuses.

use crate::guard::{Failure, HalcyonStatus};
use halcyon::Error;

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        let status = match &e {
            Error::Argument { .. } | Error::MixedDevices { .. } => HalcyonStatus::Argument,
            Error::Shape { .. } => HalcyonStatus::Shape,
            Error::DType { .. } => HalcyonStatus::Dtype,
            Error::Unsupported { .. } | Error::UnsupportedOps(_) => HalcyonStatus::Unsupported,
            Error::Unavailable { .. } => HalcyonStatus::Unavailable,
            Error::OutOfMemory { .. } => HalcyonStatus::OutOfMemory,
            Error::Driver { .. } | Error::Compile { .. } => HalcyonStatus::Driver,
            Error::Index { .. } => HalcyonStatus::Index,
            Error::Format { .. } => HalcyonStatus::Format,
            Error::Io { .. } => HalcyonStatus::Io,
            Error::Endless { .. } => HalcyonStatus::Endless,
            // No function of this library donates tensors or interrupts a run.
            _ => HalcyonStatus::Internal,
        };
        Failure { status, text: e.to_string() }
    }
}

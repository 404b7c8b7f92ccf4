//! The CPU backend's native kernels.
pub mod sys;
pub mod vmath;

//! The CPU backend's native kernels.
pub mod library;
pub mod peak;
pub mod sys;
pub mod team;
pub mod vmath;

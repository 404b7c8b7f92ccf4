//! Helpers that the tests of several crates share. A crate switches on the features whose helpers it uses, so
//! that its tests build no more than they need. The helpers of `halcyon-test-host`, which do not need
//! Halcyon's types, are here under the same names.

#[cfg(feature = "devices")]
pub mod devices;
#[cfg(feature = "end_to_end")]
pub mod end_to_end;
#[cfg(feature = "devices")]
pub mod faulty;
#[cfg(feature = "models")]
pub mod mutate;
#[cfg(feature = "devices")]
pub mod optable;
#[cfg(feature = "devices")]
mod rng;
#[cfg(feature = "models")]
pub mod seed_models;
#[cfg(feature = "standins")]
pub mod standins;
#[cfg(feature = "devices")]
pub mod works;

pub use halcyon_test_host::*;
#[cfg(feature = "devices")]
pub use rng::Rng;

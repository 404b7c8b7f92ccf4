//! The contract of `halcyon_hal` on this backend, checked by the suite that Halcyon's own drivers run.

use halcyon_hal::conformance::DeviceUnderTest;
use halcyon_interpreter::InterpreterDriver;
use std::sync::Arc;

halcyon_hal::conformance_tests!([DeviceUnderTest::new(Arc::new(InterpreterDriver)).unwrap()]);

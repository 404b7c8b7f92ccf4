//! The contract of this crate as a suite that every driver runs, also one from outside.
//!
//! In a test file of the driver's crate:
//! ```no_run
//! # struct MyDriver;
//! # impl MyDriver { fn new() -> std::sync::Arc<dyn halcyon_hal::Driver> { unimplemented!() } }
//! halcyon_hal::conformance_tests!([halcyon_hal::conformance::Lane::new(MyDriver::new()).unwrap()]);
//! ```
//! That is one `#[test]` per case. A case panics where the driver breaks the contract, as tests do: this module is for tests
//! alone, and nothing else in the crate uses it.

pub mod cases;
pub mod kernels;

use crate::{BackendType, Device, Driver, Options, Result, registry};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// One driver under test.
#[derive(Debug)]
pub struct Lane {
    pub driver: Arc<dyn Driver>,
    /// Two threads, and a directory for compiled programs that goes with the lane.
    pub options: Options,
    /// False for the device whose launches leave poison.
    pub computes: bool,
    scratch: PathBuf,
}

impl Lane {
    /// Registers a driver from outside, so that its names parse.
    ///
    /// # Errors
    /// The driver's reason why it has no device; those of [`registry::register`].
    pub fn new(driver: Arc<dyn Driver>) -> Result<Lane> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        driver.probe()?;
        if matches!(driver.kind(), BackendType::Other(_)) {
            registry::register(driver.clone())?;
        }
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let scratch = std::env::temp_dir().join(format!("halcyon-conformance-{}-{n}", std::process::id()));
        let options = Options { threads: Some(2), cache_dir: Some(scratch.clone()), ..Default::default() };
        let computes = driver.kind() != BackendType::Noop;
        Ok(Lane { driver, options, computes, scratch })
    }

    /// The driver's first device, opened anew.
    pub fn open(&self) -> Arc<dyn Device> {
        self.open_with(|_| ())
    }

    /// As [`Lane::open`], with other options.
    pub fn open_with(&self, f: impl FnOnce(&mut Options)) -> Arc<dyn Device> {
        let mut o = self.options.clone();
        f(&mut o);
        self.driver.open(0, &o).unwrap_or_else(|e| panic!("{}: {e}", self.driver.kind()))
    }

    /// The backend's id.
    pub fn name(&self) -> &'static str {
        self.driver.kind().id()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Only the cache is in it, and only where the driver keeps one.
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// Makes a `#[test]` of every case, which runs on each [`Lane`] that the expression gives.
#[macro_export]
macro_rules! conformance_tests {
    // The one list of them.
    (@each $how:tt $lanes:expr) => {
        $crate::conformance_tests! {
            $how $lanes;
                info_and_caps_are_sane
                bytes_come_back_at_every_offset
                empty_buffers_are_buffers
                ranges_outside_a_buffer_are_errors
                copies_move_the_range_and_nothing_else
                a_part_of_a_buffer_is_a_buffer_over_its_bytes
                a_request_takes_what_its_footprint_says
                freed_memory_is_used_again_and_given_back_on_request
                over_the_limit_is_out_of_memory
                a_kernel_computes_in_every_type
                parameters_of_every_type_arrive
                grids_have_three_dimensions_and_every_item_runs_once
                workgroup_memory_and_barriers_work
                commands_act_in_order
                a_bad_index_is_reported_once
                counters_count_what_happened
                what_the_verifier_refuses_does_not_compile
                two_openings_live_side_by_side
                one_device_serves_two_threads
                any_order_of_drops_is_fine
                profiling_times_every_command_in_order
                a_program_serves_again_from_memory_or_disk
        }
    };
    ([table] $lanes:expr; $($case:ident)*) => {
        $lanes(&[$((stringify!($case), $crate::conformance::cases::$case)),*])
    };
    ([tests] $lanes:expr; $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                for lane in $lanes {
                    println!("lane {}", lane.name());
                    $crate::conformance::cases::$case(&lane);
                }
            }
        )*
    };
    ($lanes:expr) => {
        $crate::conformance_tests! { @each [tests] $lanes }
    };
}

/// Every case by its name, for programs that check a driver. A case panics where the driver breaks the contract.
pub const CASES: &[(&str, fn(&Lane))] = {
    const fn table(all: &'static [(&'static str, fn(&Lane))]) -> &'static [(&'static str, fn(&Lane))] {
        all
    }
    crate::conformance_tests!(@each [table] table)
};

#[cfg(test)]
mod tests {
    #[test]
    fn every_case_is_in_the_list() {
        let list = include_str!("mod.rs");
        let cases =
            include_str!("cases.rs").lines().filter_map(|l| l.strip_prefix("pub fn ")?.split('(').next());
        let mut n = 0;
        for case in cases {
            assert!(list.lines().any(|l| l.trim() == case), "{case} is not in conformance_tests!");
            n += 1;
        }
        assert!(n > 20, "{n}");
    }
}

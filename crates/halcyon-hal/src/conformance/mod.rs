//! The driver contract as a test suite, for built-in and external drivers.
//!
//! In a test file of the driver's crate:
//! ```no_run
//! # struct MyDriver;
//! # impl MyDriver { fn new() -> std::sync::Arc<dyn halcyon_hal::Driver> { unimplemented!() } }
//! halcyon_hal::conformance_tests!([halcyon_hal::conformance::DeviceUnderTest::new(MyDriver::new()).unwrap()]);
//! ```
//! This expands to one `#[test]` per case. A case panics if the driver breaks the contract. The module is
//! meant for tests; nothing else in the crate uses it.

pub mod captures;
pub mod cases;
pub mod kernels;
pub mod pools;
pub mod streams;

use crate::{BackendType, Device, Driver, Options, Result, registry};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long a case waits for an event that a broken driver may never deliver.
const HANGS: Duration = Duration::from_secs(600);

/// A driver under test, and the options with which its first device is opened.
#[derive(Debug)]
pub struct DeviceUnderTest {
    pub driver: Arc<dyn Driver>,
    /// Two threads, and a directory for compiled programs that is deleted with this value.
    pub options: Options,
    /// Whether the device computes. False only for the noop device, whose outputs are `noop::POISON`.
    pub computes: bool,
    scratch: PathBuf,
}

impl DeviceUnderTest {
    /// Prepares tests of the driver's first device. Registers an external driver, because some cases parse
    /// the name of its backend.
    ///
    /// # Errors
    /// The driver's reason for having no device; errors of [`registry::register`].
    pub fn new(driver: Arc<dyn Driver>) -> Result<DeviceUnderTest> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        driver.probe()?;
        if matches!(driver.kind(), BackendType::Other(_)) {
            registry::register(driver.clone())?;
        }
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let scratch = std::env::temp_dir().join(format!("halcyon-conformance-{}-{n}", std::process::id()));
        let options = Options { threads: Some(2), cache_dir: Some(scratch.clone()), ..Default::default() };
        let computes = driver.kind() != BackendType::Noop;
        Ok(DeviceUnderTest { driver, options, computes, scratch })
    }

    /// Opens the driver's first device once more.
    pub fn open(&self) -> Arc<dyn Device> {
        self.open_with(|_| ())
    }

    /// Like [`DeviceUnderTest::open`], with other options.
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

impl Drop for DeviceUnderTest {
    fn drop(&mut self) {
        // The directory contains only the cache, and exists only if the driver has one.
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// Expands to a `#[test]` for every case. Each runs on every [`DeviceUnderTest`] in the given expression.
#[macro_export]
macro_rules! conformance_tests {
    // The only list of the cases.
    (@each $how:tt $devices:expr) => {
        $crate::conformance_tests! {
            $how $devices;
                cases::info_and_caps_are_sane
                cases::bytes_come_back_at_every_offset
                cases::empty_buffers_are_buffers
                cases::ranges_outside_a_buffer_are_errors
                cases::copies_move_the_range_and_nothing_else
                cases::a_part_of_a_buffer_is_a_buffer_over_its_bytes
                cases::a_request_takes_what_its_footprint_says
                cases::zeroed_memory_is_zero_and_keeps_what_is_written
                cases::freed_memory_is_used_again_and_given_back_on_request
                cases::over_the_limit_is_out_of_memory
                cases::a_kernel_computes_in_every_type
                cases::parameters_of_every_type_arrive
                cases::grids_have_three_dimensions_and_every_item_runs_once
                cases::workgroup_memory_and_barriers_work
                cases::commands_act_in_order
                cases::a_bad_index_is_reported_once
                cases::counters_count_what_happened
                cases::what_the_verifier_refuses_does_not_compile
                cases::library_kernels_take_no_smaller_buffers
                cases::launches_take_the_kernels_buffers_and_parameters
                cases::two_openings_live_side_by_side
                cases::one_device_serves_two_threads
                cases::any_order_of_drops_is_fine
                cases::profiling_times_every_command_in_order
                cases::a_program_serves_again_from_memory_or_disk
                pools::buffers_of_one_chunk_keep_to_themselves
                pools::a_scattered_pool_holds_a_large_buffer_after_it_moved
                pools::parts_go_with_their_whole
                pools::work_goes_on_while_another_thread_moves_buffers
                pools::settings_that_contradict_each_other_open_nothing
                pools::host_buffers_are_counted_and_copied_from_and_to
                streams::queues_that_share_memory_act_in_the_order_of_the_calls
                streams::a_stream_alone_is_in_order_and_its_copies_own_their_data
                streams::events_tell_faults_once_and_errors_are_values
                streams::callbacks_and_futures_come_without_anyone_waiting
                streams::what_is_dropped_early_lives_as_long_as_the_work
                streams::two_streams_overlap_where_the_device_can
                streams::many_streams_come_and_go
                streams::an_event_of_one_device_orders_another
                captures::captured_commands_act_like_submitted_ones
                captures::captures_are_launched_in_every_queue
                captures::a_capture_refuses_what_it_was_not_made_for
                captures::a_capture_follows_its_memory
        }
    };
    ([table] $devices:expr; $($file:ident::$case:ident)*) => {
        $devices(&[$((stringify!($case), $crate::conformance::$file::$case)),*])
    };
    ([tests] $devices:expr; $($file:ident::$case:ident)*) => {
        $(
            #[test]
            fn $case() {
                for device in $devices {
                    println!("device {}", device.name());
                    $crate::conformance::$file::$case(&device);
                }
            }
        )*
    };
    ($devices:expr) => {
        $crate::conformance_tests! { @each [tests] $devices }
    };
}

/// Every case with its name, for programs that check a driver. A case panics if the driver breaks the
/// contract.
pub const CASES: &[(&str, fn(&DeviceUnderTest))] = {
    const fn table(
        all: &'static [(&'static str, fn(&DeviceUnderTest))],
    ) -> &'static [(&'static str, fn(&DeviceUnderTest))] {
        all
    }
    crate::conformance_tests!(@each [table] table)
};

#[cfg(test)]
mod tests {
    #[test]
    fn every_case_is_in_the_list() {
        let list = include_str!("mod.rs");
        let files = [
            ("captures", include_str!("captures.rs")),
            ("cases", include_str!("cases.rs")),
            ("pools", include_str!("pools.rs")),
            ("streams", include_str!("streams.rs")),
        ];
        let mut n = 0;
        for (file, text) in files {
            let cases = text
                .lines()
                .filter_map(|l| l.strip_prefix("pub fn ")?.strip_suffix("(l: &DeviceUnderTest) {"));
            for case in cases {
                let row = format!("{file}::{case}");
                assert!(list.lines().any(|l| l.trim() == row), "{row} is not in conformance_tests!");
                n += 1;
            }
        }
        assert!(n > 35, "{n}");
    }
}

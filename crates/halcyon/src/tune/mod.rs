//! Tuning: finds which of the kernels that a template can build is fastest on this device.
//!
//! A backend first uses the kernels that the templates' heuristics choose (the default). Tuning builds the
//! other variants that are legal on the device ([`halcyon_ir::kernel::tune`]), compares their results with
//! the default's, times each in alternation with the default, and records the best in a cache on disk
//! ([`halcyon_hal::tune`]). A variant that gives wrong results, does not compile, does not fit, fails, is far
//! too slow or crashes is also recorded (quarantined), and never tried again on that device with that driver.
//! Plans use tuned kernels from level O2 on; the plan's receipts and steps show which kernels are tuned.
//!
//! [`Backend::tune`](crate::Backend::tune) tunes the kernels of a graph on request; [`TuningMode`] controls
//! automatic tuning.

mod measure;
mod options;
mod report;
mod standard;
mod state;

pub use halcyon_hal::tune::{
    ALGORITHM, Best, Entry, FILE_VARIABLE, Guard, RejectReason, Rejection, Table, TuningCache, TuningMode,
    VARIABLE, device_key,
};
pub use halcyon_ir::kernel::tune::{Choices, Tolerance, Tunable, TunedVariants, Variant};
pub use options::{Space, Templates, TuneOptions};
pub use report::{Event, Progress, TunedKernel, TuningReport, Untuned};
pub use standard::standard;
pub(crate) use state::{Job, Tuning, jobs};

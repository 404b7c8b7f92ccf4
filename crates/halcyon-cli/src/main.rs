//! The `halcyon` command, with the backends of this build.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[global_allocator]
static HEAP: halcyon_hal::heap::RecordingAllocator = halcyon_hal::heap::RecordingAllocator;

fn main() -> ExitCode {
    halcyon_cli::main()
}

//! Fuzz target: chat templates, which are rendered.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| halcyon_fuzz::language::template(data));

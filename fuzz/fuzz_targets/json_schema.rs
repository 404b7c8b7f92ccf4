//! Fuzz target: JSON schemas; a text that satisfies one must be JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| halcyon_fuzz::language::json_schema(data));

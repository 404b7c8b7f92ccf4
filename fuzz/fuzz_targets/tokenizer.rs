//! Fuzz target: files `tokenizer.json`, which encode and decode a text.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| halcyon_fuzz::language::tokenizer(data));

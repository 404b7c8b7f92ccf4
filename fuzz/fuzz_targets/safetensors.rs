//! Fuzz target: safetensors files.
#![no_main]

use bytes::Bytes;
use halcyon_formats::safetensors::SafeTensors;
use halcyon_fuzz::judge;
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

fuzz_target!(|data: &[u8]| {
    if let Some(s) = judge(SafeTensors::parse(Bytes::copy_from_slice(data), "t")) {
        for name in s.names() {
            judge(s.get(name));
        }
    }
});

// A header with a wrong length is rejected immediately, so the length is set to match the header.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, _seed: u32| {
    let size = fuzzer_mutate(data, size, max_size);
    if let Some(end) = data[..size].iter().rposition(|b| *b == b'}')
        && let Some(len) = (end + 1).checked_sub(8)
    {
        data[..8].copy_from_slice(&(len as u64).to_le_bytes());
    }
    size
});

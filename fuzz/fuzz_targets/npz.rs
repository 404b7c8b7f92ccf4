//! Fuzz target: the reader of NumPy's `.npz` files.
#![no_main]

use bytes::Bytes;
use halcyon_formats::npz::Npz;
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Some(z) = judge(Npz::parse(Bytes::copy_from_slice(data), "t")) {
        for name in z.names() {
            judge(z.get(name));
        }
    }
});

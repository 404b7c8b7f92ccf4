//! Fuzz target: NumPy's `.npy` files. An array is read, written and read again.
#![no_main]

use bytes::Bytes;
use halcyon_formats::npy;
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = halcyon_formats::sniff::kind(data);
    if let Some(t) = judge(npy::parse(Bytes::copy_from_slice(data), "t"))
        && let Some(again) = judge(npy::encode(&t))
    {
        assert!(npy::parse(again.into(), "t").expect("an array that was written") == t);
    }
});

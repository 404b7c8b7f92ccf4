//! Fuzz target: the reader of PyTorch's files of weights.
#![no_main]

use bytes::Bytes;
use halcyon_formats::torch::TorchFile;
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Some(f) = judge(TorchFile::parse(Bytes::copy_from_slice(data), "t")) {
        for name in f.names() {
            judge(f.get(name));
        }
    }
});

//! Fuzz target: an encoded image in any format that a model may decode.
#![no_main]

use halcyon_formats::picture;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(p) = picture::decode(data) {
        assert_eq!(p.pixels.len(), p.width * p.height * p.channels);
    }
});

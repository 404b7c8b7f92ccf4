//! Fuzz target: GGUF files. What was read is written, and must give the same bytes when it is read again.
#![no_main]

use bytes::Bytes;
use halcyon_formats::gguf::{Gguf, TensorInfo, encode};
use halcyon_fuzz::judge;
use libfuzzer_sys::fuzz_target;

fn written(f: &Gguf) -> Vec<u8> {
    let tensors: Vec<(TensorInfo, &[u8])> =
        f.tensors().iter().map(|t| (t.info.clone(), &t.data[..])).collect();
    encode(f.metadata().entries(), &tensors).expect("what was read can be written")
}

fuzz_target!(|data: &[u8]| {
    let Some(f) = judge(Gguf::parse(Bytes::copy_from_slice(data), "t")) else { return };
    let m = f.metadata();
    for (key, _) in m.entries() {
        judge(m.str(key));
        judge(m.u64(key));
        judge(m.f64(key));
        judge(m.strings(key));
        judge(m.floats(key));
        judge(m.ints(key));
    }
    for t in f.tensors() {
        assert_eq!(t.to_const().expect("an open file is valid").bytes(), &t.data[..]);
    }
    let once = written(&f);
    let again = Gguf::parse(Bytes::from(once.clone()), "t").expect("what was written can be read");
    assert!(written(&again) == once, "the second writing differs");
});

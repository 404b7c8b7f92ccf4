//! A malformed file is an error, and nothing is printed about a panic of the crate that reads it. The test
//! has a process of its own, because it counts the panics of the process.

use halcyon_text::{Error, Tokenizer};
use std::panic::{catch_unwind, set_hook};
use std::sync::atomic::{AtomicUsize, Ordering};

static SHOWN: AtomicUsize = AtomicUsize::new(0);

#[test]
fn panics_of_a_malformed_file_are_not_shown() {
    set_hook(Box::new(|_| {
        SHOWN.fetch_add(1, Ordering::Relaxed);
    }));
    let file = r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"decoder":5,
        "model":{"type":"BPE","vocab":{"A":0},"merges":[]}}"#;
    let e = Tokenizer::from_json(file.as_bytes(), None).expect_err("a decoder is an object");
    assert!(matches!(e, Error::Format { .. }), "{e}");
    // A mistake in the JSON is named with its place.
    let e = Tokenizer::from_json(file.replace("5", "tru").as_bytes(), None).expect_err("not JSON");
    assert!(e.to_string().contains("line 1"), "{e}");
    assert_eq!(SHOWN.load(Ordering::Relaxed), 0);
    // Other panics are shown.
    let other = catch_unwind(|| panic!("on purpose"));
    assert!(other.is_err());
    assert_eq!(SHOWN.load(Ordering::Relaxed), 1);
}

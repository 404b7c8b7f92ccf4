//! Panics and errors at the boundary, without the library around it.

#[path = "../../src/guard.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod guard;

use guard::{Failure, HalcyonStatus, guard as guarded};
use std::ffi::CStr;

fn last_error() -> String {
    // SAFETY: the pointer is a string of this thread, which has no failure meanwhile.
    unsafe { CStr::from_ptr(guard::last_error()) }.to_str().expect("UTF-8").to_string()
}

/// A payload whose destructor panics too.
struct Worse;

impl Drop for Worse {
    fn drop(&mut self) {
        panic!("in the destructor");
    }
}

#[test]
fn panics_become_a_status_with_their_text() {
    let n = 3;
    assert_eq!(guarded(|| panic!("element {n}")), HalcyonStatus::Internal);
    assert!(last_error().starts_with("internal error: element 3. Please report this"), "{}", last_error());
    assert_eq!(guarded(|| panic!("plain")), HalcyonStatus::Internal);
    assert!(last_error().contains("plain"));
    assert_eq!(guarded(|| std::panic::panic_any(7u8)), HalcyonStatus::Internal);
    assert!(last_error().contains("a panic without text"));
    assert_eq!(guarded(|| std::panic::panic_any(Worse)), HalcyonStatus::Internal);
    assert_eq!(guard::value(7, || panic!("no value")), 7);
    assert!(last_error().contains("no value"));
}

#[test]
fn failures_keep_their_text_until_the_next_one() {
    assert_eq!(last_error(), "");
    let fails = |text: &str| guarded(|| Err(Failure::argument(text)));
    assert_eq!(fails("a\0b"), HalcyonStatus::Argument);
    assert_eq!(last_error(), "a\\0b");
    assert_eq!(guarded(|| Ok(())), HalcyonStatus::Ok);
    assert_eq!(last_error(), "a\\0b");
    assert_eq!(guard::value(1, || Err(Failure::argument("second"))), 1);
    assert_eq!(last_error(), "second");
    std::thread::spawn(|| assert_eq!(last_error(), "")).join().expect("another thread has its own text");
}

#[test]
fn a_failure_while_a_thread_ends_has_no_text() {
    /// Fails when its thread ends.
    struct Late;
    impl Drop for Late {
        fn drop(&mut self) {
            assert_eq!(guarded(|| Err(Failure::argument("late"))), HalcyonStatus::Argument);
            assert!(["", "late"].contains(&last_error().as_str()));
        }
    }
    thread_local! { static LATE: Late = const { Late }; }
    let thread = std::thread::spawn(|| {
        LATE.with(|_| {});
        guarded(|| Err(Failure::argument("early")))
    });
    assert_eq!(thread.join().expect("the thread ends without a panic"), HalcyonStatus::Argument);
}

//! `halcyon conformance`: results against what they should be.

mod onnx;
mod ops;

use crate::args::{ConformanceArgs, Suite};
use crate::report;
use halcyon::{Error, Result};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};

pub fn main(a: &ConformanceArgs) -> Result<u8> {
    match &a.suite {
        Suite::Onnx(a) => onnx::main(a),
        Suite::Ops(a) => ops::main(a),
    }
}

thread_local! {
    /// Place of the last panic of this thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// While it lives, panics are noted and not printed.
struct Quiet(Option<Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>>);

impl Quiet {
    fn start() -> Quiet {
        let hook = take_hook();
        set_hook(Box::new(|p| PANIC.set(p.location().map(|l| format!(" at {}:{}", l.file(), l.line())))));
        Quiet(Some(hook))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(hook) = self.0.take() {
            set_hook(hook);
        }
    }
}

/// Why a case gave no result.
enum Failed {
    Error(Error),
    Panic(String),
}

/// A bug in one case must not hide the others; the backend's locks survive a panic.
fn caught<T>(f: impl FnOnce() -> Result<T>) -> std::result::Result<T, Failed> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(r) => r.map_err(Failed::Error),
        Err(p) => {
            let at = PANIC.take().unwrap_or_default();
            Err(Failed::Panic(format!("panic{at}: {}", report::panic_text(p.as_ref()))))
        }
    }
}

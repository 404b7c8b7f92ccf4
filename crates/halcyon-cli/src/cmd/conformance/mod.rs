//! `halcyon conformance`: compares results with the expected results.

mod onnx;
mod ops;

use crate::args::{ConformanceArgs, Suite};
use crate::report;
use halcyon::hal::{Device, Tag};
use halcyon::{Error, Result};
use serde::Serialize;
use serde_json::json;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};

pub(crate) fn main(a: &ConformanceArgs) -> Result<u8> {
    match &a.suite {
        Suite::Onnx(a) => onnx::main(a),
        Suite::Ops(a) => ops::main(a),
    }
}

/// Checks that a device still works by writing bytes and reading them back. After an unrecoverable error
/// (such as an illegal address) every call in this process fails.
///
/// # Errors
/// The device's error, or [`Error::Driver`] if other bytes come back.
pub fn check_alive(d: &dyn Device) -> Result<()> {
    let sent: Vec<u8> = (0..64u8).map(|i| i ^ 0xA5).collect();
    d.synchronize()?;
    let buffer = d.alloc(sent.len(), Tag::Io)?;
    d.write(&buffer, 0, &sent)?;
    let mut back = vec![0; sent.len()];
    d.read(&buffer, 0, &mut back)?;
    if back == sent {
        return Ok(());
    }
    Err(Error::Driver {
        device: d.info().id.clone(),
        call: "a copy to the device and back".into(),
        code: "the bytes read back differ from those written".into(),
        next: "The driver loses data: update it, or choose another backend".into(),
    })
}

/// If `--json-lines` is given, prints what runs next, and each result as soon as it is known. If the process
/// crashes, the reader has all earlier results.
struct Lines(bool);

impl Lines {
    fn emit(&self, what: &str, v: impl Serialize) -> Result<()> {
        if self.0 { report::print(&format!("{}\n", json!({ what: v }))) } else { Ok(()) }
    }
}

thread_local! {
    /// Location of the last panic of this thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Until dropped, panics are not printed. Only their location is recorded.
struct PanicRecorder(Option<Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>>);

impl PanicRecorder {
    fn start() -> PanicRecorder {
        let hook = take_hook();
        set_hook(Box::new(|p| PANIC.set(p.location().map(|l| format!(" at {}:{}", l.file(), l.line())))));
        PanicRecorder(Some(hook))
    }
}

impl Drop for PanicRecorder {
    fn drop(&mut self) {
        if let Some(hook) = self.0.take() {
            set_hook(hook);
        }
    }
}

/// Why a case has no result.
enum CaseError {
    Error(Error),
    Panic(String),
}

/// Catches panics, so that a bug in one case does not hide the others. The backend stays usable after a
/// panic, because a lock that was held during a panic can be taken again.
fn catch_panics<T>(f: impl FnOnce() -> Result<T>) -> std::result::Result<T, CaseError> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(r) => r.map_err(CaseError::Error),
        Err(p) => {
            let at = PANIC.take().unwrap_or_default();
            Err(CaseError::Panic(format!("panic{at}: {}", report::panic_text(p.as_ref()))))
        }
    }
}

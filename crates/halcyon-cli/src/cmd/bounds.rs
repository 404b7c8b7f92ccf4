//! Limits on how long a model runs: the limit on loop iterations, and Ctrl-C.

use halcyon::onnx::{Cancel, RunOptions};
use halcyon::{Backend, OnnxSession, Result};
use halcyon_formats::onnx::Model;
use std::sync::OnceLock;
use std::time::Duration;

/// Exit code after Ctrl-C: the code that a shell reports for a program ended by SIGINT.
const INTERRUPTED: i32 = 130;
/// Time between the cancellation and the exit of the process. A cancelled loop ends after its current
/// iteration.
const GRACE: Duration = Duration::from_millis(500);

static OPTIONS: OnceLock<RunOptions> = OnceLock::new();

/// Limits the loops of all models in this process, and cancels them on Ctrl-C. Outputs are written after the
/// last run and replaced as a whole, so an interrupted command leaves no truncated file.
pub(super) fn set(max_iterations: u64) {
    let cancel = Cancel::default();
    let options = RunOptions { max_iterations, cancel: cancel.clone() };
    if OPTIONS.set(options).is_err() {
        return;
    }
    let watched = ctrlc::set_handler(move || {
        cancel.cancel();
        std::thread::sleep(GRACE);
        std::process::exit(INTERRUPTED);
    });
    if let Err(e) = watched {
        // In this case the system's default handling of Ctrl-C remains.
        tracing::warn!("the handler of Ctrl-C cannot be installed: {e}");
    }
}

/// Opens a session of a model on a device, with the limits that `set` has stored.
pub(super) fn session(backend: &Backend, model: Model) -> Result<OnnxSession> {
    let options = OPTIONS.get().cloned().unwrap_or_default();
    Ok(OnnxSession::new(backend, model)?.with_options(options))
}

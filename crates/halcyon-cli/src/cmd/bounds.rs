//! How long a model may run: the bound of its loops, and Ctrl-C.

use halcyon::onnx::{Cancel, RunOptions};
use halcyon::{Backend, OnnxSession, Result};
use halcyon_formats::onnx::Model;
use std::sync::OnceLock;
use std::time::Duration;

/// Exit code after Ctrl-C: that of a program which the signal ends, in a shell.
const INTERRUPTED: i32 = 130;
/// A loop ends within an iteration. What takes longer is left as it is.
const GRACE: Duration = Duration::from_millis(500);

static OPTIONS: OnceLock<RunOptions> = OnceLock::new();

/// Bounds the loops of the models that this process runs, and ends them at Ctrl-C. Outputs are written behind
/// the last run and replaced as a whole, so an interrupted command leaves none that is cut short.
pub fn set(max_iterations: u64) {
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
        // The system's own way of ending a process is left then.
        tracing::warn!("Ctrl-C cannot be watched: {e}");
    }
}

/// A model on a device, within these bounds.
pub fn session(backend: &Backend, model: Model) -> Result<OnnxSession> {
    let options = OPTIONS.get().cloned().unwrap_or_default();
    Ok(OnnxSession::new(backend, model)?.with_options(options))
}

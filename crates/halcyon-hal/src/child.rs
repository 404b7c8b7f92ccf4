//! Work in a child process, for what may take the process down that does it.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in a child, so that it does not start another.
pub const VARIABLE: &str = "HALCYON_PROBE_CHILD";

/// What a child wrote, and how it ended where it did not end well: `ended with signal: 11 (SIGSEGV)`.
#[derive(Debug)]
pub struct Output {
    pub out: String,
    pub end: Result<(), String>,
}

/// Runs a command with nothing to read, for at most `limit`. What it wrote until then is kept.
///
/// # Errors
/// Those of starting it.
pub fn output(command: &mut Command, limit: Duration) -> std::io::Result<Output> {
    command.env(VARIABLE, "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let pipe = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut out = vec![];
        if let Some(mut p) = pipe {
            // What was read before an error stays.
            let _ = p.read_to_end(&mut out);
        }
        String::from_utf8_lossy(&out).into_owned()
    });
    let start = Instant::now();
    let end = loop {
        match child.try_wait() {
            Ok(Some(s)) if s.success() => break Ok(()),
            Ok(Some(s)) => break Err(format!("ended with {s}")),
            Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                break Err(format!("did not end within {limit:?}"));
            }
            Err(e) => break Err(format!("could not be waited for ({e})")),
        }
    };
    Ok(Output { out: reader.join().unwrap_or_default(), end })
}

//! PyTorch in its own process. Requests and answers are lines of JSON (`peer.py`).

use halcyon::BackendType;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Python code that exits when its standard input closes, which happens when the process that started Python
/// ends.
pub(crate) const EXIT_WITH_PARENT: &str = "import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()
";

const SCRIPT: &str = include_str!("peer.py");

/// The Python interpreter used by the check.
pub(crate) fn python() -> String {
    std::env::var("HALCYON_PYTHON").unwrap_or_else(|_| "python3".into())
}

pub(crate) struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// The versions of PyTorch and of its libraries, and the device.
    pub name: String,
    /// `PyTorch 2.9`.
    pub short: String,
}

impl Peer {
    /// # Errors
    /// Returns the reason why PyTorch cannot be used for this backend.
    pub(crate) fn start(kind: BackendType) -> Result<Peer, String> {
        // PyTorch has no device for OpenCL and WebGPU. It uses the same GPU as `cuda`.
        let device = kind.torch_name().unwrap_or("cuda");
        let python = python();
        let mut command = Command::new(&python);
        command
            .args(["-c", SCRIPT, device])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(|e| format!("{python}: {e}"))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("{python}: its standard streams are not open"));
        };
        let mut p = Peer { child, to, from: BufReader::new(from), name: String::new(), short: String::new() };
        let hello = p.answer()?;
        let text = |k: &str| hello[k].as_str().unwrap_or("?").to_string();
        p.short = format!("PyTorch {}", text("torch"));
        p.name = format!("{} on {} ({})", p.short, text("device"), text("libraries"));
        Ok(p)
    }

    fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => Err("the Python process ended".into()),
            Err(e) => Err(format!("the Python process: {e}")),
            Ok(_) => {
                let v: Value = serde_json::from_str(&line)
                    .map_err(|e| format!("the Python process answered with a line that is not JSON: {e}"))?;
                match v["error"].as_str() {
                    Some(e) => Err(e.to_string()),
                    None => Ok(v),
                }
            }
        }
    }

    fn ask(&mut self, v: &Value) -> Result<Value, String> {
        writeln!(self.to, "{v}")
            .and_then(|()| self.to.flush())
            .map_err(|e| format!("the Python process: {e}"))?;
        self.answer()
    }

    /// Prepares a workload and runs it once.
    pub(crate) fn make(&mut self, what: &Value) -> Result<(), String> {
        self.ask(&json!({ "make": what })).map(|_| ())
    }

    /// Seconds per run of the workload prepared last, measured over about `seconds`.
    pub(crate) fn time(&mut self, seconds: f64) -> Result<f64, String> {
        let v = self.ask(&json!({ "time": seconds }))?;
        v["seconds"]
            .as_f64()
            .filter(|t| *t > 0.0)
            .ok_or_else(|| format!("the Python process answered {v}, without a positive number in `seconds`"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // End the Python process at once. Waiting for it to end by itself, after its input closes, could take
        // longer.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

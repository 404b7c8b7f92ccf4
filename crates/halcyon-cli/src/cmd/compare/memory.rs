//! The memory of each program, measured in a process that runs only this program.

use super::{inputs, sides};
use crate::args::CompareArgs;
use crate::cmd::bounds;
use crate::cmd::compare::side::Side;
use crate::report::{self, print_json};
use halcyon::hal::child::{LinkedChild, VARIABLE};
use halcyon::host::{MemorySampler, anonymous};
use halcyon::onnx::MAX_ITERATIONS;
use halcyon::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Interval for sampling the memory.
const INTERVAL: Duration = Duration::from_millis(2);

/// What a process measured, in bytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Memory {
    /// Anonymous memory before the program and its model were loaded.
    pub before: u64,
    /// The largest reading of the anonymous memory until the end of the first run, and the number of
    /// readings.
    pub peak: u64,
    pub readings: u64,
    /// The largest resident memory, with the pages of files.
    pub with_file_pages: Option<u64>,
    /// The largest sum of the device's buffers, if Halcyon is the program.
    pub device: Option<u64>,
}

/// `halcyon __compare --side N`: loads and runs the model with one program.
pub(crate) fn child(a: &CompareArgs) -> Result<u8> {
    let all = sides(a)?;
    let number = a.side.filter(|n| *n < all.len());
    let number = number.ok_or_else(|| Error::argument("--side", "0 or 1 is needed"))?;
    let (runtime, path) = all[number];
    bounds::set(MAX_ITERATIONS);
    let inputs = inputs(a, &crate::cmd::open(&a.model)?, None)?;
    let before = anonymous();
    let watch = MemorySampler::start(INTERVAL);
    let mut side = Side::open(a, runtime, path, &inputs, None)?;
    side.run()?;
    let peak = watch.as_ref().map(|w| {
        w.read();
        w.peak()
    });
    let (Some(before), Some(peak)) = (before, peak) else {
        return Err(Error::unsupported("memory figures of this system", "Measure on Linux"));
    };
    let m = Memory {
        before,
        peak: peak.bytes,
        readings: peak.readings,
        with_file_pages: report::peak_memory(),
        device: side.device_peak(),
    };
    print_json(&serde_json::to_value(m).map_err(|e| Error::internal(e.to_string()))?)?;
    Ok(0)
}

/// Measures the memory of a side in a process of its own. `Err` says why it was not measured.
pub(super) fn measure(a: &CompareArgs, side: usize) -> std::result::Result<Memory, String> {
    if anonymous().is_none() {
        return Err("this system does not report it".into());
    }
    if a.input.inputs.iter().any(|i| reads_standard_input(i)) {
        return Err("standard input can be read only once".into());
    }
    let exe = std::env::current_exe().map_err(|e| format!("this executable is not known: {e}"))?;
    // Global flags may precede the command's name. `--json` makes an error readable.
    let mut words = std::env::args_os().skip(1);
    let before: Vec<OsString> = words.by_ref().take_while(|w| w != "compare").collect();
    let rest: Vec<OsString> = words.filter(|w| w != "--json").collect();
    let mut command = Command::new(exe);
    command.arg("__compare").arg("--side").arg(side.to_string()).arg("--json");
    command.args(before).args(rest).env(VARIABLE, "1").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut tied = LinkedChild::spawn(&mut command).map_err(|e| e.to_string())?;
    let mut out = String::new();
    if let Some(mut pipe) = tied.process().stdout.take() {
        pipe.read_to_string(&mut out).map_err(|e| e.to_string())?;
    }
    let status = tied.process().wait().map_err(|e| e.to_string())?;
    let v: serde_json::Value = serde_json::from_str(&out).unwrap_or_default();
    match serde_json::from_value(v.clone()) {
        Ok(m) if status.success() => Ok(m),
        _ => Err(match v["error"]["message"].as_str() {
            Some(text) => format!("its process failed: {text}"),
            None => format!("its process ended with {status}"),
        }),
    }
}

/// Whether an `--input` reads standard input: `@-`, `NAME=text:@-`, `/dev/stdin`.
fn reads_standard_input(input: &str) -> bool {
    let source = input.rsplit_once('=').map_or(input, |(_, s)| s);
    source.ends_with("@-") || source == "-" || source.ends_with("/dev/stdin") || source.contains("/dev/fd/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_input_is_recognised() {
        for yes in ["@-", "ids=@-", "-", "x=/dev/stdin", "@/dev/stdin", "/dev/fd/0"] {
            assert!(reads_standard_input(yes), "{yes}");
        }
        for no in ["x.npy", "[-1]", "x=[1, -2]", "random", "text:a-b", "@lines.txt"] {
            assert!(!reads_standard_input(no), "{no}");
        }
    }
}

//! Helpers that run the C compiler, and helpers that wait for what other processes do.

use crate::required;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Compiles a shared library from C source, which it writes to a file beside the library. Returns false if
/// there is no C compiler, and panics instead if `HALCYON_REQUIRE_ALL=1`. Also panics if the source does not
/// compile.
pub fn library(to: &Path, source: &str, more: &[&str]) -> bool {
    let from = to.with_extension("c");
    std::fs::write(&from, source).expect("the source is written");
    compile(to, &from, &[&["-w"], more].concat())
}

/// Like [`library`], with the source in the file `from`.
pub(crate) fn compile(to: &Path, from: &Path, more: &[&str]) -> bool {
    let cc = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut c = Command::new(cc);
    match c.args(["-shared", "-fPIC", "-o"]).arg(to).arg(from).args(more).arg("-ldl").output() {
        Ok(made) => {
            let text = String::from_utf8_lossy(&made.stderr);
            assert!(made.status.success(), "{} does not compile:\n{text}", from.display());
            true
        }
        Err(e) => {
            assert!(!required(), "no C compiler: {e}");
            false
        }
    }
}

/// Whether a process has ended, according to `/proc`. On a system without `/proc`, always true.
pub fn gone(pid: &str) -> bool {
    // A process that has ended but has not been waited for is a zombie.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.is_empty() || state.contains(") Z ")
}

/// Whether a condition becomes true within about a minute.
pub fn soon(mut what: impl FnMut() -> bool) -> bool {
    (0..3000).any(|_| {
        what() || {
            std::thread::sleep(Duration::from_millis(20));
            false
        }
    })
}

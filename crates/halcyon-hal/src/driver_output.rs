//! Capture of what drivers print.
//!
//! Vendor libraries write to the standard streams when they are loaded, list devices or compile: banners,
//! warnings about the environment, debug lines. A program whose standard output is parsed must keep these
//! lines out of its output, and apart from its own messages. Such a program calls [`separate`] once, before
//! it loads any library, and from then on writes to [`out`] and [`err`]:
//!
//! - File descriptor 1 is redirected to standard error, so that nothing a library prints reaches the
//!   program's output.
//! - If the program chose [`DriverOutput::Captured`], both streams are redirected to a pipe while a library
//!   is loaded, lists devices, opens one or compiles ([`capture`]). The lines go to the log (level debug,
//!   target `halcyon_hal::driver_output`) and to the program ([`set_listener`]), with the driver's name.
//!
//! A program that does not call [`separate`] keeps its streams unchanged, and so does every program on
//! systems other than Unix.

use std::io::Write;

/// Receives a line printed by a driver, with the driver's name. If several drivers may have printed the line,
/// `driver` lists them: `cuda or opencl`.
pub type Listener = fn(driver: &str, line: &str);

/// Sets the function that receives the lines. It receives a line once per driver, however often the driver
/// prints that line, and at most 1000 lines in all. Only the first call of `set_listener` has an effect.
pub fn set_listener(f: Listener) {
    let _ = lines::SHOW.set(f);
}

/// Reports text that a driver printed in another process.
pub fn report_output(driver: &str, text: &str) {
    lines::tell(driver, text);
}

mod lines {
    use std::collections::BTreeSet;
    use std::sync::{Mutex, OnceLock};

    pub(super) static SHOW: OnceLock<super::Listener> = OnceLock::new();
    /// Maximum number of lines reported.
    const MAX_LINES: usize = 1000;

    pub(super) fn tell(driver: &str, text: &str) {
        static TOLD: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());
        for line in text.lines().map(str::trim_end).filter(|l| !l.is_empty()) {
            let new = {
                let mut told = TOLD.lock().unwrap_or_else(|e| e.into_inner());
                told.len() < MAX_LINES && told.insert((driver.into(), line.into()))
            };
            if new {
                tracing::debug!(driver, line, "a driver printed this");
                if let Some(f) = SHOW.get() {
                    f(driver, line);
                }
            }
        }
    }
}

/// The program's standard output, even if file descriptor 1 is redirected.
pub fn out() -> Stream {
    Stream(StreamKind::Out)
}

/// The program's standard error, even if file descriptor 2 is redirected.
pub fn err() -> Stream {
    Stream(StreamKind::Err)
}

/// The file descriptor of the program's standard output or error. Does not allocate, so signal handlers may
/// call it.
#[cfg(unix)]
pub(crate) fn descriptor(err: bool) -> i32 {
    use std::os::fd::AsRawFd;
    match (unix::STREAMS.get(), err) {
        (Some(s), false) => s.out.as_raw_fd(),
        (Some(s), true) => s.err.as_raw_fd(),
        (None, false) => 1,
        (None, true) => 2,
    }
}

/// One of the program's own streams.
#[derive(Debug)]
pub struct Stream(StreamKind);

#[derive(Clone, Copy, Debug)]
enum StreamKind {
    Out,
    Err,
}

impl Stream {
    /// Whether the program's stream is a terminal. (File descriptors 1 and 2 may be redirected.)
    pub fn is_terminal(&self) -> bool {
        use std::io::IsTerminal;
        #[cfg(unix)]
        if let Some(s) = unix::STREAMS.get() {
            return match self.0 {
                StreamKind::Out => s.out.is_terminal(),
                StreamKind::Err => s.err.is_terminal(),
            };
        }
        match self.0 {
            StreamKind::Out => std::io::stdout().is_terminal(),
            StreamKind::Err => std::io::stderr().is_terminal(),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        #[cfg(unix)]
        if let Some(s) = unix::STREAMS.get() {
            let mut file = match self.0 {
                StreamKind::Out => &s.out,
                StreamKind::Err => &s.err,
            };
            return file.write(bytes);
        }
        match self.0 {
            StreamKind::Out => std::io::stdout().write(bytes),
            StreamKind::Err => std::io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        #[cfg(unix)]
        if unix::STREAMS.get().is_some() {
            return Ok(());
        }
        match self.0 {
            StreamKind::Out => std::io::stdout().flush(),
            StreamKind::Err => std::io::stderr().flush(),
        }
    }
}

/// What to do with drivers' output after [`separate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverOutput {
    /// Send it to the log and to the function of [`set_listener`].
    Captured,
    /// Send it to standard error. This is for a child process whose parent reads the child's standard error.
    ToStderr,
}

/// Keeps drivers' output out of this program's standard output, as the module's documentation describes.
/// Later calls have no effect. If it fails (no free file descriptors), the streams stay unchanged.
pub fn separate(driver_output: DriverOutput) {
    #[cfg(unix)]
    unix::separate(driver_output);
    #[cfg(not(unix))]
    let _ = driver_output;
}

/// While this value lives, output to the standard streams is attributed to its driver.
#[must_use]
#[derive(Debug)]
pub struct Capture {
    #[cfg(unix)]
    driver: Option<&'static str>,
}

/// Captures what a driver prints, if [`separate`] was called with `DriverOutput::Captured`. Captures may
/// overlap, in one or several threads. The streams belong to the process, so when a capture ends, everything
/// printed since the previous end of a capture is attributed to all drivers that are being captured.
pub fn capture(driver: &'static str) -> Capture {
    #[cfg(unix)]
    return Capture { driver: unix::begin(driver).then_some(driver) };
    #[cfg(not(unix))]
    {
        let _ = driver;
        Capture {}
    }
}

#[cfg(unix)]
impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(driver) = self.driver {
            unix::end(driver);
        }
    }
}

#[cfg(unix)]
mod unix {
    use super::DriverOutput;
    use std::fs::File;
    use std::io::{PipeReader, PipeWriter, Read, Write};
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
    use std::sync::{Arc, Condvar, Mutex, OnceLock};
    use std::time::Duration;

    /// The program's own output streams.
    #[derive(Debug)]
    pub(super) struct Streams {
        pub out: File,
        pub err: File,
        driver_output: DriverOutput,
    }

    pub(super) static STREAMS: OnceLock<Streams> = OnceLock::new();

    /// Maximum bytes kept of one capture.
    const MAX_BYTES: usize = 1 << 16;
    /// Time limit for reading the rest of the pipe.
    const READ_TIMEOUT: Duration = Duration::from_secs(1);

    /// Redirects standard output (1) or standard error (2) to the target of the file descriptor `to`.
    fn redirect(to: BorrowedFd<'_>, number: i32) -> bool {
        // SAFETY: `to` is an open descriptor. `number` is checked to be 1 or 2. Rust's runtime opens these
        // descriptors at start if they are closed. No Rust object owns them, so closing their old targets
        // invalidates nothing.
        matches!(number, 1 | 2) && unsafe { libc::dup2(to.as_raw_fd(), number) >= 0 }
    }

    /// Flushes the C library's standard output.
    fn flush_c() {
        unsafe extern "C" {
            #[cfg_attr(target_vendor = "apple", link_name = "__stdoutp")]
            static stdout: *mut libc::FILE;
        }
        // SAFETY: `stdout` is initialised by the C library and lives as long as the process.
        unsafe { libc::fflush(stdout) };
    }

    pub(super) fn separate(driver_output: DriverOutput) {
        if STREAMS.get().is_some() {
            return;
        }
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let _ = std::io::Write::flush(&mut std::io::stdout());
        if let (Ok(out), Ok(err)) = (own(out.as_fd()), own(err.as_fd()))
            && redirect(err.as_fd(), 1)
        {
            let _ = STREAMS.set(Streams { out, err, driver_output });
            // Files named `-` and `/dev/stdout` must go to the same stream as `out`.
            halcyon_host::output::set_standard(|which| match which {
                halcyon_host::output::Standard::Out => Box::new(super::out()),
                halcyon_host::output::Standard::Err => Box::new(super::err()),
            });
        }
    }

    /// What the reading thread has received: the bytes before the last mark that [`end`] has not taken yet,
    /// and the number of marks.
    #[derive(Debug, Default)]
    struct PipeState {
        bytes: Mutex<(Vec<u8>, u64)>,
        more: Condvar,
    }

    #[derive(Debug)]
    struct Pipe {
        to: PipeWriter,
        heard: Arc<PipeState>,
        /// The drivers being captured.
        drivers: Vec<&'static str>,
        marks: u64,
    }

    static PIPE: Mutex<Option<Pipe>> = Mutex::new(None);

    /// Marks the end of a capture in the pipe. No driver prints it.
    const END_MARK: &[u8] = b"\0halcyon: the capture ends here\0";

    fn listen(mut from: PipeReader, heard: &PipeState) {
        let mut piece = [0u8; 1 << 12];
        let mut kept: Vec<u8> = vec![];
        loop {
            let n = match from.read(&mut piece) {
                Ok(0) => return,
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            kept.extend_from_slice(&piece[..n]);
            let mark = kept.windows(END_MARK.len()).position(|w| w == END_MARK);
            if let Some(at) = mark {
                let rest = kept.split_off(at + END_MARK.len());
                kept.truncate(at);
                let mut h = heard.bytes.lock().unwrap_or_else(|e| e.into_inner());
                h.0.append(&mut kept);
                kept = rest;
                h.0.truncate(MAX_BYTES);
                h.1 += 1;
                heard.more.notify_all();
            } else if kept.len() > 2 * MAX_BYTES {
                // Keep the beginning. Keep the end too, because it may contain the start of a mark.
                let end = kept.split_off(kept.len() - END_MARK.len());
                kept.truncate(MAX_BYTES);
                kept.extend(end);
            }
        }
    }

    fn open() -> Option<Pipe> {
        let (from, to) = std::io::pipe().ok()?;
        let heard = Arc::new(PipeState::default());
        let h = heard.clone();
        std::thread::Builder::new().name("driver_output".into()).spawn(move || listen(from, &h)).ok()?;
        Some(Pipe { to, heard, drivers: vec![], marks: 0 })
    }

    /// Returns whether the capture has begun.
    pub(super) fn begin(driver: &'static str) -> bool {
        if STREAMS.get().is_none_or(|s| s.driver_output != DriverOutput::Captured) {
            return false;
        }
        let mut pipe = PIPE.lock().unwrap_or_else(|e| e.into_inner());
        if pipe.is_none() {
            *pipe = open();
        }
        let Some(p) = &mut *pipe else { return false };
        if p.drivers.is_empty() && !(redirect(p.to.as_fd(), 1) && redirect(p.to.as_fd(), 2)) {
            restore();
            return false;
        }
        p.drivers.push(driver);
        true
    }

    fn restore() {
        if let Some(s) = STREAMS.get() {
            redirect(s.err.as_fd(), 1);
            redirect(s.err.as_fd(), 2);
        }
    }

    pub(super) fn end(driver: &'static str) {
        let mut pipe = PIPE.lock().unwrap_or_else(|e| e.into_inner());
        let Some(p) = &mut *pipe else { return };
        flush_c();
        let mut names = p.drivers.clone();
        if let Some(i) = p.drivers.iter().position(|d| *d == driver) {
            p.drivers.remove(i);
        }
        if p.drivers.is_empty() {
            restore();
        }
        // The mark follows everything printed so far.
        if p.to.write_all(END_MARK).is_err() {
            return;
        }
        p.marks += 1;
        let want = p.marks;
        let heard = p.heard.clone();
        let waiting = heard.bytes.lock().unwrap_or_else(|e| e.into_inner());
        let done = heard.more.wait_timeout_while(waiting, READ_TIMEOUT, |h| h.1 < want);
        let (mut h, _) = done.unwrap_or_else(|e| e.into_inner());
        let text = String::from_utf8_lossy(&std::mem::take(&mut h.0)).into_owned();
        drop(h);
        drop(pipe);
        names.sort_unstable();
        names.dedup();
        super::report_output(&names.join(" or "), &text);
    }
}

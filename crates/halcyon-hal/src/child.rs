//! Runs work that may crash the process in a child process.
//!
//! Children end with their parent, however it ends. The parent holds the write end of a pipe that is the
//! child's standard input ([`LinkedChild`]). The operating system closes this end when the parent ends. A
//! thread of the child waits for that ([`end_with_parent`]) and terminates the child at once, even while
//! another thread hangs in a driver. This needs only pipes, so it works on Linux, macOS and Windows.

use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Set in a child, so that it does not start children itself.
pub const VARIABLE: &str = "HALCYON_PROBE_CHILD";

/// Set in a child whose standard input is the parent's pipe.
pub const LINKED: &str = "HALCYON_LINKED_CHILD";

/// Maximum bytes kept of each output stream of a child. Further output is read and discarded.
const MAX_OUTPUT: usize = 16 << 20;

/// How children of this program are started: an executable, and the arguments that come before those of the
/// child. A program that an interpreter runs has such arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub executable: PathBuf,
    pub arguments: Vec<OsString>,
}

impl Program {
    /// A command that starts a child. The caller adds the child's arguments.
    pub fn command(&self) -> Command {
        let mut c = Command::new(&self.executable);
        c.args(&self.arguments);
        c
    }
}

impl From<PathBuf> for Program {
    /// An executable without leading arguments.
    fn from(executable: PathBuf) -> Program {
        Program { executable, arguments: vec![] }
    }
}

/// A child that ends with this process or when this value is dropped, provided that it calls
/// [`end_with_parent`].
#[derive(Debug)]
pub struct LinkedChild {
    process: Child,
    /// The write end of the pipe. It is moved out of `process`, because `Child::wait` would close it.
    _line: Option<ChildStdin>,
}

impl LinkedChild {
    /// Starts a command. Its standard input is replaced by the pipe.
    ///
    /// # Errors
    /// Errors of `Command::spawn`.
    pub fn spawn(command: &mut Command) -> std::io::Result<LinkedChild> {
        let mut process = command.env(LINKED, "1").stdin(Stdio::piped()).spawn()?;
        let line = process.stdin.take();
        Ok(LinkedChild { process, _line: line })
    }

    pub fn process(&mut self) -> &mut Child {
        &mut self.process
    }
}

/// In a child of [`LinkedChild::spawn`], terminates this process when its parent ends. In other processes it
/// has no effect. A program that is started as such a child must call this first, before it loads a library.
pub fn end_with_parent() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if std::env::var_os(LINKED).is_none() || WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    let Some(mut line) = own_input() else { return };
    let (ready, is_ready) = channel();
    let watch = move || {
        // The thread has started, so it needs no more loader locks, which a hanging driver may hold.
        let _ = ready.send(());
        let mut piece = [0u8; 64];
        loop {
            match line.read(&mut piece) {
                Ok(0) => end_now(),
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => end_now(),
                Err(e) if e.kind() != std::io::ErrorKind::Interrupted => return,
                _ => {}
            }
        }
    };
    if std::thread::Builder::new().name("parent".into()).spawn(watch).is_ok() {
        let _ = is_ready.recv();
    }
}

/// Duplicates standard input and replaces it by `/dev/null`, so that libraries cannot read from the pipe.
#[cfg(unix)]
fn own_input() -> Option<std::fs::File> {
    use std::os::fd::{AsFd, AsRawFd};
    let line = std::io::stdin().as_fd().try_clone_to_owned().ok()?;
    if let Ok(null) = std::fs::File::open("/dev/null") {
        // SAFETY: `null` is an open descriptor, and descriptor 0 is open because `try_clone_to_owned`
        // duplicated it. `dup2` replaces descriptor 0 atomically, so it stays open.
        unsafe { libc::dup2(null.as_raw_fd(), 0) };
    }
    Some(line.into())
}

#[cfg(windows)]
fn own_input() -> Option<std::fs::File> {
    use std::os::windows::io::AsHandle;
    std::io::stdin().as_handle().try_clone_to_owned().ok().map(Into::into)
}

#[cfg(not(any(unix, windows)))]
fn own_input() -> Option<std::fs::File> {
    None
}

/// Ends the process without running exit handlers of libraries, which may wait for a hanging driver.
fn end_now() -> ! {
    #[cfg(unix)]
    // SAFETY: `_exit` has no preconditions; it ends the process without running handlers or taking locks.
    unsafe {
        libc::_exit(1)
    }
    #[cfg(windows)]
    {
        #[link(name = "kernel32")]
        unsafe extern "system" {
            fn GetCurrentProcess() -> isize;
            fn TerminateProcess(process: isize, code: u32) -> i32;
        }
        // SAFETY: `GetCurrentProcess` returns a pseudo-handle that is always valid and has the right to
        // terminate.
        unsafe { TerminateProcess(GetCurrentProcess(), 1) };
    }
    #[cfg(not(unix))]
    std::process::abort()
}

/// A child's output and, if it failed, how it ended: `ended with signal: 11 (SIGSEGV)`.
#[derive(Debug)]
pub struct Output {
    pub out: String,
    pub err: String,
    pub end: Result<(), String>,
    /// Whether the time limit ended the child.
    pub hung: bool,
}

/// Reads a pipe in a thread, which signals the receiver at the end of the pipe.
fn follow(pipe: Option<impl Read + Send + 'static>) -> (Arc<Mutex<Vec<u8>>>, Receiver<()>) {
    let kept: Arc<Mutex<Vec<u8>>> = Arc::default();
    let (done, is_done) = channel();
    if let Some(mut pipe) = pipe {
        let kept = kept.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 1 << 13];
            // Data read before an error is kept.
            while let Ok(n @ 1..) = pipe.read(&mut piece) {
                let mut kept = kept.lock().unwrap_or_else(|e| e.into_inner());
                let room = MAX_OUTPUT.saturating_sub(kept.len()).min(n);
                kept.extend_from_slice(&piece[..room]);
            }
            let _ = done.send(());
        });
    }
    (kept, is_done)
}

/// Runs a command without input for at most `limit`. Returns the output up to then.
///
/// # Errors
/// Errors of starting the command.
pub fn output(command: &mut Command, limit: Duration) -> std::io::Result<Output> {
    output_patient(command, limit, limit, &mut || {})
}

/// Like [`output`]; calls `slow` once if the command has not ended after `patience`.
///
/// # Errors
/// The errors of [`output`].
pub fn output_patient(
    command: &mut Command,
    limit: Duration,
    patience: Duration,
    slow: &mut dyn FnMut(),
) -> std::io::Result<Output> {
    command.env(VARIABLE, "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = LinkedChild::spawn(command)?;
    let process = child.process();
    let (out, err) = (follow(process.stdout.take()), follow(process.stderr.take()));
    let (mut told, mut hung) = (false, false);
    let end = loop {
        match process.try_wait() {
            Ok(Some(s)) if s.success() => break Ok(()),
            Ok(Some(s)) => break Err(format!("ended with {s}")),
            Ok(None) if start.elapsed() < limit => {
                if !told && start.elapsed() >= patience {
                    told = true;
                    slow();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(None) => {
                let _ = process.kill();
                let _ = process.wait();
                hung = true;
                break Err(format!("did not end within {limit:?}"));
            }
            Err(e) => break Err(format!("could not be waited for ({e})")),
        }
    };
    let text = |(kept, is_done): (Arc<Mutex<Vec<u8>>>, Receiver<()>)| {
        // A grandchild may hold the pipe open after the child has ended.
        let _ = is_done.recv_timeout(Duration::from_secs(1));
        let kept = kept.lock().unwrap_or_else(|e| e.into_inner());
        String::from_utf8_lossy(&kept).into_owned()
    };
    Ok(Output { out: text(out), err: text(err), end, hung })
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn both_streams_are_kept_and_a_slow_child_is_reported() {
        let sh = |text: &str| {
            let mut c = Command::new("/bin/sh");
            c.args(["-c", text]);
            c
        };
        let minute = Duration::from_secs(60);
        let mut slow = 0;
        let none = Duration::ZERO;
        let o =
            output_patient(&mut sh("echo a; echo b >&2; sleep 0.1; exit 3"), minute, none, &mut || slow += 1);
        let o = o.unwrap();
        assert_eq!((o.out.as_str(), o.err.as_str(), o.hung, slow), ("a\n", "b\n", false, 1));
        assert_eq!(o.end, Err("ended with exit status: 3".into()));
        // The call returns although a grandchild holds the pipes open.
        let o = output(&mut sh("echo a; sleep 30 & exit 0"), minute).unwrap();
        assert!(o.out == "a\n" && o.end.is_ok());
        let o = output(&mut sh("echo a; exec sleep 100"), Duration::from_millis(200)).unwrap();
        assert!(o.hung && o.out == "a\n" && o.end.unwrap_err().contains("did not end"));
    }

    #[test]
    fn the_input_is_open_until_the_child_is_dropped() {
        let mut c = Command::new("/bin/sh");
        let mut child = LinkedChild::spawn(c.args(["-c", "read x; exit 7"])).unwrap();
        assert!(child.process().try_wait().unwrap().is_none());
        let LinkedChild { mut process, _line } = child;
        drop(_line);
        assert_eq!(process.wait().unwrap().code(), Some(7));
    }
}

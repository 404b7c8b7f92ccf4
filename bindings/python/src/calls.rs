//! Calls into Halcyon: without the interpreter's lock, at forks and at the end of the process.
//!
//! A forked child has only the thread that forked. If another thread was inside of Halcyon at that time, its
//! locks stay locked in the child. So a fork waits until no other thread is, and calls that would begin
//! meanwhile wait for the fork. A child that was forked nevertheless refuses to work. [`halcyon_hal::fork`]
//! has the rest.
//!
//! At the end of a process, daemon threads go on. A driver crashes when its library is unloaded while a
//! thread is in it. And before version 3.14, Python ends a thread that asks for the interpreter's lock at
//! that time by unwinding its stack, which aborts the process if Python was called from Rust. So the end
//! waits too, and calls that would begin afterwards wait for it. This time is limited, because their threads
//! may hold a lock that an exit handler needs.

use crate::errors::OrRaise;
use halcyon::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a fork waits for other threads.
const FORK_PATIENCE: Duration = Duration::from_secs(10);
/// How long the end of the process waits for other threads. A longer computation ends with the process.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// How long a call that begins after that waits, counted from the end of [`at_end`]. Other exit handlers and
/// the end of the interpreter usually take a fraction of it.
const END_HOLD: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_micros(200);

/// Calls of all threads, counted before they release the interpreter's lock.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// Functions of this module that call Python, in all threads.
static CALLBACKS: AtomicUsize = AtomicUsize::new(0);
/// Threads that are about to fork.
static FORKS: AtomicUsize = AtomicUsize::new(0);
/// Set by a fork that did not wait any longer.
static IN_VAIN: AtomicBool = AtomicBool::new(false);
/// Set in a child of such a fork.
static TORN: AtomicBool = AtomicBool::new(false);
/// Set when the process begins to end.
static ENDS: AtomicBool = AtomicBool::new(false);
/// When [`at_end`] returned.
static ENDED: OnceLock<Instant> = OnceLock::new();

thread_local! {
    /// Calls of this thread: a call may call Python, and Python may call Halcyon again.
    static OWN: Cell<usize> = const { Cell::new(0) };
    /// This thread's part of [`CALLBACKS`].
    static OWN_CALLBACKS: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread ends the process. Its calls work until the end, for exit handlers.
    static ENDING: Cell<bool> = const { Cell::new(false) };
}

/// Waits in a thread that would begin something at the end of the process.
fn wait_at_the_end(py: Python<'_>) {
    let is_held = || ENDED.get().is_none_or(|at| at.elapsed() < END_HOLD);
    if ENDS.load(Ordering::SeqCst) && !ENDING.get() && OWN.get() + OWN_CALLBACKS.get() == 0 {
        py.detach(|| {
            while is_held() {
                std::thread::sleep(POLL);
            }
        });
    }
}

/// A call, as long as it lives.
pub(crate) struct Call;

impl Call {
    /// The caller holds the interpreter's lock.
    fn begin(py: Python<'_>) -> Result<Call> {
        // A call inside of a call must go on, because the fork waits for its end.
        while FORKS.load(Ordering::SeqCst) > 0 && OWN.get() == 0 {
            py.detach(|| std::thread::sleep(POLL));
        }
        wait_at_the_end(py);
        if TORN.load(Ordering::Relaxed) {
            return Err(Error::Unsupported {
                what: "Halcyon in a process that was forked while another thread computed".into(),
                next: "Fork when no other thread computes, or start the process without a fork: \
                       multiprocessing.get_context(\"spawn\")"
                    .into(),
            });
        }
        INSIDE.fetch_add(1, Ordering::SeqCst);
        OWN.set(OWN.get() + 1);
        Ok(Call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        OWN.set(OWN.get() - 1);
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Makes this thread one that works for calls of other threads: what it begins always goes on, because those
/// calls wait for it.
pub(crate) fn work_for_others() {
    OWN.set(OWN.get() + 1);
}

/// A function that calls Python, as long as it lives. A fork does not wait for it, because Python's code may
/// wait for the thread that forks.
pub(crate) struct Callback;

impl Callback {
    /// The caller holds the interpreter's lock.
    pub(crate) fn begin(py: Python<'_>) -> Callback {
        wait_at_the_end(py);
        CALLBACKS.fetch_add(1, Ordering::SeqCst);
        OWN_CALLBACKS.set(OWN_CALLBACKS.get() + 1);
        Callback
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        OWN_CALLBACKS.set(OWN_CALLBACKS.get() - 1);
        CALLBACKS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Begins a call of code that releases the interpreter's lock itself.
pub(crate) fn call(py: Python<'_>) -> PyResult<Call> {
    Call::begin(py).or_raise()
}

/// Calls into Halcyon without the interpreter's lock.
pub(crate) trait Work {
    /// Runs `f`, which computes, waits or reads files, while other threads run Python.
    fn work<T: Send>(self, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T>;
}

impl Work for Python<'_> {
    fn work<T: Send>(self, f: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
        let _call = call(self)?;
        self.detach(f).or_raise()
    }
}

/// Waits until no other thread is in a call. None begins between the return and the fork, because the caller
/// holds the interpreter's lock.
#[pyfunction]
fn before_fork(py: Python<'_>) {
    let start = Instant::now();
    FORKS.fetch_add(1, Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) > OWN.get() {
        if start.elapsed() > FORK_PATIENCE {
            IN_VAIN.store(true, Ordering::SeqCst);
            return;
        }
        py.detach(|| std::thread::sleep(POLL));
    }
}

/// Python calls this also if the fork failed.
#[pyfunction]
fn after_fork_in_parent() {
    IN_VAIN.store(false, Ordering::SeqCst);
    FORKS.fetch_sub(1, Ordering::SeqCst);
}

#[pyfunction]
fn after_fork_in_child() {
    TORN.fetch_or(IN_VAIN.load(Ordering::SeqCst), Ordering::SeqCst);
    FORKS.store(0, Ordering::SeqCst);
    // The child does not end with its parent.
    ENDS.store(false, Ordering::SeqCst);
    INSIDE.store(OWN.get(), Ordering::SeqCst);
    CALLBACKS.store(OWN_CALLBACKS.get(), Ordering::SeqCst);
    halcyon_hal::fork::in_child();
}

/// Waits until no other thread is in Halcyon, for a limited time. Later calls of other threads wait.
#[pyfunction]
fn at_end(py: Python<'_>) {
    ENDING.set(true);
    ENDS.store(true, Ordering::SeqCst);
    let others = || {
        INSIDE.load(Ordering::SeqCst) > OWN.get() || CALLBACKS.load(Ordering::SeqCst) > OWN_CALLBACKS.get()
    };
    let start = Instant::now();
    while others() && start.elapsed() < END_PATIENCE {
        py.detach(|| std::thread::sleep(POLL));
    }
    ENDED.get_or_init(Instant::now);
}

/// Makes Python call these functions at forks and at the end.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = m.py();
    // Handlers that are registered later run before this one.
    py.import("atexit")?.call_method1("register", (wrap_pyfunction!(at_end, m)?,))?;
    // Windows has no fork.
    let Some(at_fork) = py.import("os")?.getattr_opt("register_at_fork")? else { return Ok(()) };
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, m)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(after_fork_in_parent, m)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(after_fork_in_child, m)?)?;
    at_fork.call((), Some(&hooks)).map(drop)
}

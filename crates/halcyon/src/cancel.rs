//! Cancelling a run between its steps. The check of a run that may be cancelled belongs to the thread that
//! submits its steps, as the current stream does.

use halcyon_hal::BackendType;
use halcyon_ir::error::{Error, Result};
use std::cell::RefCell;
use std::sync::Arc;

/// Whether the caller asked to cancel the run.
type Check = Arc<dyn Fn() -> bool>;

thread_local! {
    /// The checks of the runs that this thread is executing, innermost last.
    static CHECKS: RefCell<Vec<Check>> = const { RefCell::new(Vec::new()) };
}

/// Ends the scope of a check, also if the run panics.
struct Scope;

impl Drop for Scope {
    fn drop(&mut self) {
        CHECKS.with_borrow_mut(|c| c.pop());
    }
}

/// Runs `f`. What it submits on this thread ends with [`Error::Interrupted`] once `is_cancelled` returns
/// true.
#[cfg_attr(not(feature = "onnx"), allow(dead_code))]
pub(crate) fn scope<T>(is_cancelled: impl Fn() -> bool + 'static, f: impl FnOnce() -> T) -> T {
    CHECKS.with_borrow_mut(|c| c.push(Arc::new(is_cancelled)));
    let _scope = Scope;
    f()
}

/// The number of commands to submit at a time, at most `most`. The CPU runs a command during its submission,
/// so a run that may be cancelled submits one at a time.
pub(crate) fn batch(device: BackendType, most: usize) -> usize {
    match device == BackendType::Cpu && CHECKS.with_borrow(|c| !c.is_empty()) {
        true => 1,
        false => most,
    }
}

/// Fails if a run that this thread is executing was cancelled. `what` names the next step.
///
/// # Errors
/// [`Error::Interrupted`]
pub(crate) fn check(what: impl FnOnce() -> String) -> Result<()> {
    match CHECKS.with_borrow(|c| c.iter().any(|f| f())) {
        true => Err(Error::Interrupted { what: what() }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_scope_ends_with_its_function_even_if_that_panics() {
        let flag = Arc::new(AtomicBool::new(false));
        let step = || check(|| "step 3".into());
        step().unwrap();
        assert_eq!(batch(BackendType::Cpu, 32), 32);
        let seen = flag.clone();
        scope(
            move || seen.load(Ordering::Relaxed),
            || {
                step().unwrap();
                assert_eq!((batch(BackendType::Cpu, 32), batch(BackendType::Cuda, 32)), (1, 32));
                flag.store(true, Ordering::Relaxed);
                // The outer run was cancelled, so the inner one ends too.
                let e = scope(|| false, step).unwrap_err();
                assert!(matches!(&e, Error::Interrupted { what } if what == "step 3"), "{e}");
            },
        );
        let _ = std::panic::catch_unwind(|| scope(|| true, || panic!("a run that panics")));
        step().unwrap();
    }
}

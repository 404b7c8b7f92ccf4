//! Limits of a run: loop iterations and cancellation.

use halcyon_ir::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Default of [`RunOptions::max_iterations`].
pub const MAX_ITERATIONS: u64 = 10_000_000;
/// All loops of a run together may take this many times the iterations allowed for one loop.
const MAX_ALL_LOOPS: u64 = 64;

/// Cancels runs from another thread. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Cancels every run that uses this flag. Each run ends with [`Error::Interrupted`] before its next
    /// iteration, stage or step.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Clears the flag, so that later runs are not cancelled.
    pub fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Options and limits of a run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// A loop that exceeds this number of iterations is an error. A smaller trip count in the model ends the
    /// loop first.
    pub max_iterations: u64,
    pub cancel: Cancel,
}

impl Default for RunOptions {
    fn default() -> RunOptions {
        RunOptions { max_iterations: MAX_ITERATIONS, cancel: Cancel::default() }
    }
}

/// The limits during one import or run.
#[derive(Clone, Debug, Default)]
pub(super) struct Limits {
    pub(super) options: RunOptions,
    /// Whether the model must become one graph. If so, loops are unrolled, up to the size limits of a graph.
    pub(super) whole: bool,
    /// Iterations of all loops so far.
    taken: Rc<Cell<u64>>,
}

impl Limits {
    pub(super) fn new(options: RunOptions) -> Limits {
        Limits { options, ..Limits::default() }
    }

    pub(super) fn whole() -> Limits {
        Limits { whole: true, ..Limits::default() }
    }

    /// Fails if the run has been cancelled.
    ///
    /// # Errors
    /// [`Error::Interrupted`]
    pub(super) fn go_on(&self, node: &str) -> Result<()> {
        match self.options.cancel.is_cancelled() {
            false => Ok(()),
            true => Err(Error::Interrupted { what: node.into() }),
        }
    }

    /// Call before iteration `i` of a loop.
    ///
    /// # Errors
    /// [`Error::Endless`] if a limit is exceeded; [`Error::Interrupted`] if the run has been cancelled.
    pub(super) fn iteration(&self, node: &str, i: u64) -> Result<()> {
        if self.options.cancel.is_cancelled() {
            return Err(Error::Interrupted { what: format!("{node}, after {i} iterations") });
        }
        let most = self.options.max_iterations;
        let endless =
            |iterations, next: &str| Err(Error::Endless { node: node.into(), iterations, next: next.into() });
        if i >= most {
            return endless(
                i,
                "Check its condition, or raise the bound (--max-iterations, RunOptions::max_iterations)",
            );
        }
        let taken = self.taken.get() + 1;
        self.taken.set(taken);
        if taken > most.saturating_mul(MAX_ALL_LOOPS) {
            return endless(
                i,
                "All loops of the run together reached their bound, 64 times --max-iterations; raise it or check the conditions",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_loop_and_all_loops_are_bounded() {
        let l = Limits::new(RunOptions { max_iterations: 3, ..RunOptions::default() });
        assert!((0..3).all(|i| l.iteration("Loop#0", i).is_ok()));
        let e = l.iteration("Loop#0", 3).unwrap_err();
        assert!(e.to_string().starts_with("Loop#0 has not ended after 3 iterations"), "{e}");
        // Three iterations are done; 189 more reach the limit of 64 times 3.
        assert!((0..189).all(|_| l.iteration("inner", 0).is_ok()));
        assert!(matches!(l.iteration("inner", 0), Err(Error::Endless { iterations: 0, .. })));
    }

    #[test]
    fn a_flag_ends_the_run() {
        let o = RunOptions::default();
        let l = Limits::new(o.clone());
        l.go_on("Loop#0").unwrap();
        o.cancel.cancel();
        assert!(matches!(l.go_on("Loop#0"), Err(Error::Interrupted { .. })));
        assert_eq!(l.iteration("Loop#0", 7).unwrap_err().exit_code(), 130);
        o.cancel.reset();
        l.iteration("Loop#0", 7).unwrap();
    }
}

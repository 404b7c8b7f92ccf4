//! Ctrl-C while a text is generated: the first one ends the text, the second one the program.

use crate::report;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Exit code of a program that Ctrl-C ended.
pub(super) const CODE: u8 = 130;

static STOPPED: AtomicBool = AtomicBool::new(false);
static DOING: AtomicU8 = AtomicU8::new(LOADING);

const LOADING: u8 = 0;
const ANSWERING: u8 = 1;
const WAITING: u8 = 2;

/// What Ctrl-C interrupts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Doing {
    /// Work that can only be ended with the program.
    Loading,
    /// A text, which ends at the next token.
    Answering,
    /// Nothing: the chat waits for a message.
    Waiting,
}

/// Handles Ctrl-C from now on. If that is not possible, Ctrl-C ends the program, as usual.
pub(super) fn handle() {
    let _ = ctrlc::set_handler(|| match DOING.load(Ordering::SeqCst) {
        ANSWERING if !STOPPED.swap(true, Ordering::SeqCst) => {}
        WAITING => report::note("Ctrl-D or /quit ends the chat"),
        _ => std::process::exit(i32::from(CODE)),
    });
}

/// Says what a Ctrl-C will interrupt. An earlier one is forgotten.
pub(super) fn doing(what: Doing) {
    STOPPED.store(false, Ordering::SeqCst);
    let code = match what {
        Doing::Loading => LOADING,
        Doing::Answering => ANSWERING,
        Doing::Waiting => WAITING,
    };
    DOING.store(code, Ordering::SeqCst);
}

/// Whether Ctrl-C was pressed since the text began.
pub(super) fn stopped() -> bool {
    STOPPED.load(Ordering::SeqCst)
}

//! Rules for what a test may leave out: parts that need a missing device, library or data, and cases beyond a
//! sample.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::sync::LazyLock;

/// Reports that a test is skipped, on the terminal and in the list that `cargo xtask test` collects.
pub fn skip(test: &str, reason: &str) {
    println!("skipped {test}: {reason}");
    if let Ok(path) = std::env::var("HALCYON_SKIPS")
        && let Ok(mut f) = std::fs::OpenOptions::new().append(true).create(true).open(path)
    {
        let _ = writeln!(f, "{test}: {reason}");
    }
}

/// Whether a test must fail, and not be skipped, if a device, library or data is missing.
pub fn required() -> bool {
    std::env::var("HALCYON_REQUIRE_ALL").is_ok_and(|v| v == "1")
}

/// The seed in `HALCYON_SEED`, which repeats a run.
pub fn given_seed() -> Option<u64> {
    std::env::var("HALCYON_SEED").ok().and_then(|s| s.parse().ok())
}

/// The seed of this process: the given one, or one that differs from run to run.
pub fn any_seed() -> u64 {
    // The standard library's hash keys come from the system's randomness. The seed is shortened to be easy to
    // type.
    static SEED: LazyLock<u64> =
        LazyLock::new(|| given_seed().unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 24));
    *SEED
}

/// A seed derived from [`any_seed`]. The seed of the process is printed, so that a failure can be repeated.
/// Each further call of a thread for the same test returns another seed, so a test that calls this function
/// in a loop draws different cases.
pub fn seed(test: &str) -> u64 {
    thread_local! {
        static ASKED: RefCell<HashMap<String, u64>> = RefCell::default();
    }
    let seed = any_seed();
    println!("{test}: HALCYON_SEED={seed}");
    ASKED.with_borrow_mut(|asked| {
        let n = asked.entry(test.to_string()).or_default();
        *n += 1;
        // A large odd factor makes the seeds of successive calls differ much. The factor must not be the
        // increment of a generator that uses these seeds: the generator's sequences would then be shifted
        // copies of each other.
        seed.wrapping_add((*n - 1).wrapping_mul(0xd134_2543_de82_ef95))
    })
}

/// The number `N` if tests run one case in `N`. It is the value of `HALCYON_CASES` (`all` means 1), or
/// `usual` if the variable is not set.
pub fn one_in(usual: usize) -> usize {
    match std::env::var("HALCYON_CASES").as_deref() {
        Err(_) | Ok("") => usual,
        Ok("all") => 1,
        Ok(n) => match n.parse() {
            Ok(n) if n > 0 => n,
            _ => panic!("HALCYON_CASES is \"{n}\", expected `all`, or a number N to run one case in N"),
        },
    }
}

/// Whether a long test is left out of this run, and says so. One in three of them runs, drawn by the seed,
/// and all with `HALCYON_CASES=all`.
pub fn left_out(test: &str) -> bool {
    let is_out = drawn(test, 3).is_some_and(|i| i != 0);
    if is_out {
        skip(test, "one in three long tests runs, drawn by HALCYON_SEED; HALCYON_CASES=all runs all");
    }
    is_out
}

/// The part of `all` that is run: the one that the seed draws, or all of them with `HALCYON_CASES=all`.
pub fn drawn_of<'a, T>(what: &str, all: &'a [T]) -> &'a [T] {
    match drawn(what, all.len()) {
        Some(k) => all.get(k..=k).unwrap_or_default(),
        None => all,
    }
}

/// The index of the one case that is run among `n` cases. `None` if all are run, because `HALCYON_CASES` is
/// `all` or 1.
pub fn drawn(what: &str, n: usize) -> Option<usize> {
    if one_in(n.max(2)) == 1 {
        return None;
    }
    // The seed is not from `seed`, because calls with the same name must draw the same case.
    let seed = any_seed();
    println!("{what}: HALCYON_SEED={seed}");
    // FNV-1a of the name, so that the draws of one run differ.
    let bytes = seed.to_le_bytes().into_iter().chain(what.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let at = ((hash >> 32) % n.max(1) as u64) as usize;
    println!("{what}: {at} of {n} is drawn");
    Some(at)
}

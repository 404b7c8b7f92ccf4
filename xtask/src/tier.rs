//! How much a run of the tests covers, and the random draws of the run.

use std::time::UNIX_EPOCH;

/// The variable with the seed of all draws and random inputs.
pub(crate) const SEED: &str = "HALCYON_SEED";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    /// Formatting, comments, clippy, the number of crates, and the tests.
    Fast,
    /// The tests before a merge: samples of the long steps, and no nightly steps.
    Merge,
    /// Everything in full.
    Nightly,
}

impl Tier {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tier::Fast => "fast",
            Tier::Merge => "merge",
            Tier::Nightly => "nightly",
        }
    }
}

/// The random draws of a run. Equal seeds give equal draws.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draw {
    pub seed: u64,
}

impl Draw {
    /// Uses the seed in [`SEED`], or a new one.
    ///
    /// # Errors
    /// The variable's value is not a number.
    pub(crate) fn new() -> Result<Draw, String> {
        match std::env::var(SEED) {
            Ok(s) if !s.trim().is_empty() => match s.trim().parse() {
                Ok(seed) => Ok(Draw { seed }),
                Err(_) => {
                    Err(format!("{SEED} is \"{s}\"; expected a whole number, as an earlier run printed it"))
                }
            },
            _ => {
                let now = UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos() as u64);
                // Short enough to be typed.
                Ok(Draw { seed: mix(now) >> 32 })
            }
        }
    }

    /// Chooses `n` elements of `all` at random and keeps their order. Draws for different purposes are
    /// independent.
    pub(crate) fn sample<T: Copy>(self, purpose: &str, n: usize, all: &[T]) -> Vec<T> {
        let salt = purpose.bytes().fold(self.seed, |h, b| mix(h ^ u64::from(b)));
        let mut places: Vec<usize> = (0..all.len()).collect();
        places.sort_by_key(|i| mix(salt ^ (*i as u64 + 1)));
        places.truncate(n);
        places.sort_unstable();
        places.into_iter().map(|i| all[i]).collect()
    }
}

/// SplitMix64's finaliser.
fn mix(v: u64) -> u64 {
    let v = v.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let v = (v ^ v >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let v = (v ^ v >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ v >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_seed_and_reach_everything() {
        let all = ["a", "b", "c", "d", "e"];
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let d = Draw { seed };
            let some = d.sample("letters", 2, &all);
            assert_eq!(some, d.sample("letters", 2, &all));
            assert!(some.len() == 2 && some[0] < some[1], "{some:?}");
            seen.extend(some);
        }
        assert_eq!(seen.len(), all.len());
        assert_eq!(Draw { seed: 1 }.sample("letters", 9, &all), all);
        let purposes = (0..50).filter(|s| {
            let d = Draw { seed: *s };
            d.sample("one", 1, &all) != d.sample("other", 1, &all)
        });
        assert!(purposes.count() > 20);
    }
}

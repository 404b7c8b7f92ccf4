//! The order of rows in an epoch: a permutation that depends only on the number of rows, the seed and the
//! number of the epoch.

/// The increment of SplitMix64: 2^64 divided by the golden ratio, made odd.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014). It is a bijection.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random number `counter` of the sequence with this key. There is no state, so a sequence can start at any
/// number.
fn draw(key: u64, counter: u64) -> u64 {
    mix(key.wrapping_add(STEP.wrapping_mul(counter.wrapping_add(1))))
}

/// The key of an epoch. The epoch passes through `mix` before it is combined with the seed, so that close
/// seeds and epochs do not give shifted copies of one sequence.
fn key(seed: u64, epoch: u64) -> u64 {
    mix(mix(seed.wrapping_add(STEP)) ^ mix(epoch.wrapping_mul(STEP)))
}

/// The numbers `0..n` in the order of an epoch: a Fisher-Yates shuffle with numbers from SplitMix64
/// (Durstenfeld, "Algorithm 235: Random permutation", 1964). The result is the same on every platform.
pub fn permutation(n: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    let key = key(seed, epoch);
    for last in (1..n).rev() {
        // The high half of the product is a random number below last + 1. The probabilities of its values
        // differ by at most 2^-64.
        let product = u128::from(draw(key, last as u64)) * (last as u128 + 1);
        order.swap(last, (product >> 64) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program of the authors of SplitMix64 prints this sequence for the seed 1234567.
    #[test]
    fn draws_are_those_of_splitmix64() {
        let want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431u64];
        assert_eq!([0, 1, 2, 3].map(|k| draw(1_234_567, k)), want);
    }

    #[test]
    fn an_order_is_a_permutation_and_depends_on_seed_and_epoch() {
        for n in [0, 1, 2, 3, 100, 1009] {
            let mut p = permutation(n, 5, 9);
            p.sort_unstable();
            assert_eq!(p, (0..n).collect::<Vec<_>>());
        }
        let p = permutation(100, 5, 9);
        assert_eq!(p, permutation(100, 5, 9));
        for (seed, epoch) in [(5, 10), (6, 9), (9, 5), (5, 8), (4, 9)] {
            assert_ne!(p, permutation(100, seed, epoch), "{seed} {epoch}");
        }
    }

    /// The order must never change between versions, because saved positions depend on it.
    #[test]
    fn orders_are_the_same_in_every_version_and_on_every_platform() {
        assert_eq!(permutation(10, 0, 0), [3, 8, 6, 7, 5, 9, 0, 1, 4, 2]);
        assert_eq!(permutation(10, 18, 3), [6, 4, 8, 1, 2, 9, 5, 3, 7, 0]);
    }

    /// Each of the 6 orders of 3 rows is equally likely: over 6000 epochs, the statistic of the chi-squared
    /// test with 5 degrees of freedom stays below the value that equally likely orders exceed with a
    /// probability of 10^-6.
    #[test]
    fn orders_are_uniform() {
        let mut count = std::collections::BTreeMap::<Vec<usize>, f64>::new();
        (0..6000).for_each(|epoch| *count.entry(permutation(3, 77, epoch)).or_default() += 1.0);
        let chi: f64 = count.values().map(|c| (c - 1000.0).powi(2) / 1000.0).sum();
        assert!(count.len() == 6 && chi < 35.9, "{chi}: {count:?}");
    }
}

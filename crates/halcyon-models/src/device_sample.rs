//! The part of sampling that runs on the device: finding the largest logits, so that few numbers cross to the
//! host instead of all logits.
//!
//! The device only selects, and selecting does not round. The host draws among the selected logits as
//! [`crate::Sampler`] always does, so the tokens are those that it would choose from all logits.

use crate::chain::StepName;
use crate::sample::Sampling;
use halcyon::{DType, Order, Tensor};

/// The most logits that are selected on the device.
const MOST: usize = 256;

/// Groups of the logits of which the largest one is found.
const GROUPS: usize = 256;

/// How many of the largest logits a sampler needs; `None`: all.
///
/// Penalties change the logits of at most [`Sampling::repeat_last`] tokens. If they only lower them, no token
/// moves before another one that has no penalty. So the `k` largest after the penalties are among as many
/// more of the largest before them.
pub fn needed(o: &Sampling) -> Option<usize> {
    let none = o.repeat_penalty == 1.0 && o.presence_penalty == 0.0 && o.frequency_penalty == 0.0;
    let lower = o.repeat_penalty >= 1.0 && o.presence_penalty >= 0.0 && o.frequency_penalty >= 0.0;
    let mut more = 0;
    let mut count = |s: &StepName| match s {
        StepName::Penalties if none => Some(0),
        StepName::Penalties if !lower => None,
        StepName::Penalties => {
            more += o.repeat_last.min(MOST);
            Some(more)
        }
        _ => Some(more),
    };
    let few = |k: usize| Some(k).filter(|k| *k <= MOST);
    if o.temperature == 0.0 {
        let all: Option<Vec<usize>> = o.steps.iter().map(count).collect();
        return few(1 + all?.last().copied().unwrap_or(0));
    }
    for step in &o.steps {
        let more = count(step)?;
        match step {
            StepName::TopK if o.top_k > 0 => return few(o.top_k.saturating_add(more)),
            StepName::Penalties | StepName::TopK => {}
            // Steps that change nothing.
            StepName::Typical if o.typical_p >= 1.0 => {}
            StepName::TopP if o.top_p >= 1.0 => {}
            StepName::MinP if o.min_p == 0.0 => {}
            _ => return None,
        }
    }
    None
}

/// The largest logits of a row with their tokens, the largest first; of equal ones, the smaller token first.
pub type Largest = Vec<(u32, f32)>;

/// What a step gives for each of its rows.
#[derive(Debug)]
pub(crate) enum Scores {
    /// All logits, one row after the other.
    All(Vec<f32>),
    Selected(Vec<Largest>),
}

/// The `k` largest of each of `rows` rows of logits `[rows, n]`: their numbers (i32) and values (f32), both
/// `[rows, k]`, the largest first; of equal ones, the smaller number first. NaN counts as negative infinity.
/// `k` is at least 1 and at most `n`.
pub(crate) fn largest(z: &Tensor, [rows, n]: [usize; 2], k: usize) -> [Tensor; 2] {
    let low = Tensor::scalar(z.backend(), f64::NEG_INFINITY, DType::F32);
    let z = z.ne(z).select(&low, z);
    if k == 1 {
        // The first group with the largest value, and the first place in it.
        let length = n.div_ceil(GROUPS.min(n));
        let groups = n.div_ceil(length);
        let g = grouped(&z, [rows, n], groups, length);
        let best = g.max(-1);
        let group = best.argmax_keepdim(-1);
        let place = g.argmax(-1).gather_elements(&group, 1);
        return [numbers(&group, length, &place), best.gather_elements(&group, 1)];
    }
    // The `k` largest are in the `k` groups whose largest values are the largest. So sorting compares
    // few pairs, where a sort of all would compare each with each.
    let length = (n / k).isqrt().max(1);
    let groups = n.div_ceil(length);
    if groups <= 2 * k {
        let order = z.reshape([rows, n]).argsort(-1, Order::Descending).narrow(-1, 0, k);
        return [order.cast(DType::I32), z.reshape([rows, n]).gather_elements(&order, 1)];
    }
    let g = grouped(&z, [rows, n], groups, length);
    let chosen = g.max(-1).argsort(-1, Order::Descending).narrow(-1, 0, k);
    // In the order of their numbers, so that a stable sort leaves equal logits in that order.
    let chosen = chosen.gather_elements(&chosen.argsort(-1, Order::Ascending), 1).cast(DType::I32);
    let first = Tensor::arange(z.backend(), rows, DType::I32).reshape([rows, 1]);
    let at = numbers(&first, groups, &chosen).reshape([rows * k]);
    let values = g.reshape([rows * groups, length]).gather(&at, 0).reshape([rows, k * length]);
    let place = Tensor::arange(z.backend(), length, DType::I32).reshape([1, 1, length]);
    let all = numbers(&chosen.reshape([rows, k, 1]), length, &place).reshape([rows, k * length]);
    let order = values.argsort(-1, Order::Descending).narrow(-1, 0, k);
    [all.gather_elements(&order, 1), values.gather_elements(&order, 1)]
}

/// Logits `[rows, n]` as `[rows, groups, length]`, filled up with negative infinity.
fn grouped(z: &Tensor, [rows, n]: [usize; 2], groups: usize, length: usize) -> Tensor {
    z.pad(&[0, 0], &[0, groups * length - n], f64::NEG_INFINITY).reshape([rows, groups, length])
}

/// The numbers of logits, by group and place in it.
fn numbers(group: &Tensor, length: usize, place: &Tensor) -> Tensor {
    let length = Tensor::scalar(group.backend(), length as i64, DType::I32);
    group.cast(DType::I32) * length + place.cast(DType::I32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::Candidates;
    use crate::sample::Sampler;
    use halcyon::{Backend, BackendType, Level};
    use halcyon_test::{Rng, devices};

    fn same_as_the_host(b: &Backend, sizes: &[usize]) {
        let mut rng = Rng::new(4);
        for &n in sizes {
            // Few values, so that many are equal.
            let mut z: Vec<f32> = (0..3 * n).map(|_| rng.below(n / 3 + 2) as f32 * 0.5 - 3.0).collect();
            if n > 8 {
                (z[1], z[7]) = (f32::NAN, f32::NEG_INFINITY);
            }
            let t = Tensor::from_slice(b, [3, n], &z).unwrap();
            for k in [1, 2, 5, 40].into_iter().filter(|k| *k <= n.saturating_sub(2).max(1)) {
                let [ids, values] = largest(&t, [3, n], k);
                let (ids, values) = (ids.to_vec::<i32>().unwrap(), values.to_vec::<f32>().unwrap());
                let got: Vec<(u32, f32)> = ids.iter().map(|i| *i as u32).zip(values).collect();
                for (row, (got, z)) in got.chunks(k).zip(z.chunks(n)).enumerate() {
                    let mut host = Candidates::new(z);
                    host.sort();
                    assert_eq!(got, &host.list()[..k], "row {row} of {n}, {k} on {}", b.id());
                }
            }
        }
    }

    #[test]
    fn the_device_selects_what_the_host_does() {
        same_as_the_host(&Backend::new(BackendType::Cpu).unwrap(), &[1, 2, 9, 300, 5003]);
        if devices::test_backends().contains(&BackendType::OpenCl)
            && let Some(b) = devices::open("the_device_selects", BackendType::OpenCl, Level::O2)
        {
            same_as_the_host(&b, &[1, 9, 300, 2003]);
        }
    }

    /// The largest logits before penalties are enough for every choice after them.
    #[test]
    fn penalties_need_as_many_logits_more() {
        let mut rng = Rng::new(6);
        for case in 0..300 {
            let o = Sampling {
                temperature: if case % 3 == 0 { 0.0 } else { 1.5 },
                top_k: 1 + case % 5,
                repeat_penalty: 1.0 + (case % 4) as f32 * 0.3,
                presence_penalty: (case % 3) as f32 * 0.4,
                frequency_penalty: (case % 2) as f32 * 0.5,
                repeat_last: 1 + case % 7,
                seed: case as u64,
                ..Sampling::default()
            };
            let z: Vec<f32> = (0..60).map(|_| rng.below(20) as f32 * 0.5 - 4.0).collect();
            let past: Vec<u32> = (0..20).map(|_| rng.below(60) as u32).collect();
            let mut sampler = Sampler::new(&o).unwrap();
            let want = sampler.distribution(&z, &past).unwrap();
            let mut host = Candidates::new(&z);
            host.sort();
            let few = host.list()[..needed(&o).unwrap()].to_vec();
            assert_eq!(sampler.distribution_of(Candidates::of(few), &past).unwrap(), want, "{o:?}");
        }
    }

    #[test]
    fn samplers_that_need_all_logits_get_them() {
        let o = Sampling::default();
        assert_eq!(needed(&o), Some(40));
        assert_eq!(needed(&Sampling::greedy()), Some(1));
        assert_eq!(needed(&Sampling { top_k: 0, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { top_k: 1000, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { repeat_penalty: 1.1, ..Sampling::greedy() }), Some(65));
        assert_eq!(needed(&Sampling { presence_penalty: 0.5, ..o.clone() }), Some(104));
        // Penalties that raise logits.
        assert_eq!(needed(&Sampling { repeat_penalty: 0.9, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { frequency_penalty: -0.1, ..Sampling::greedy() }), None);
        assert_eq!(needed(&Sampling { presence_penalty: 0.5, repeat_last: 1000, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { typical_p: 0.5, ..o.clone() }), Some(40));
        let first = |s: StepName| Sampling { steps: vec![s, StepName::TopK], ..o.clone() };
        assert_eq!(needed(&first(StepName::TopP)), None);
        assert_eq!(needed(&first(StepName::Penalties)), Some(40));
        assert_eq!(needed(&first(StepName::Temperature)), None);
        let steps = vec![StepName::TopK, StepName::Penalties];
        assert_eq!(needed(&Sampling { presence_penalty: 0.5, steps, ..o.clone() }), Some(40));
    }
}

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

/// How many of the largest logits a sampler needs, if this does not depend on earlier tokens. `None`: all.
pub fn needed(o: &Sampling) -> Option<usize> {
    let penalties = o.repeat_penalty != 1.0 || o.presence_penalty != 0.0 || o.frequency_penalty != 0.0;
    if penalties && o.steps.contains(&StepName::Penalties) {
        return None;
    }
    if o.temperature == 0.0 {
        return Some(1);
    }
    for step in &o.steps {
        match step {
            StepName::TopK if o.top_k > 0 => return Some(o.top_k).filter(|k| *k <= MOST),
            // Steps that change nothing.
            StepName::Penalties | StepName::TopK => {}
            StepName::Typical if o.typical_p >= 1.0 => {}
            StepName::TopP if o.top_p >= 1.0 => {}
            StepName::MinP if o.min_p == 0.0 => {}
            _ => return None,
        }
    }
    None
}

/// The `k` largest of the logits `[1, n]`: their numbers (i32) and values (f32), both `[k]`, the largest
/// first; of equal ones, the smaller number first. NaN counts as negative infinity. `k` is at least 1 and at
/// most `n`.
pub(crate) fn largest(z: &Tensor, n: usize, k: usize) -> [Tensor; 2] {
    let low = Tensor::scalar(z.backend(), f64::NEG_INFINITY, DType::F32);
    let z = z.ne(z).select(&low, z);
    if k == 1 {
        // The first group with the largest value, and the first place in it.
        let length = n.div_ceil(GROUPS.min(n));
        let groups = n.div_ceil(length);
        let g = grouped(&z, n, groups, length);
        let best = g.max(-1);
        let group = best.argmax_keepdim(-1);
        let place = g.argmax(-1).gather_elements(&group, 0);
        return [numbers(&group, length, &place), best.gather_elements(&group, 0)];
    }
    // The `k` largest are in the `k` groups whose largest values are the largest. So sorting compares
    // few pairs, where a sort of all would compare each with each.
    let length = (n / k).isqrt().max(1);
    let groups = n.div_ceil(length);
    if groups <= 2 * k {
        let order = z.reshape([n]).argsort(-1, Order::Descending).narrow(-1, 0, k);
        return [order.cast(DType::I32), z.reshape([n]).gather_elements(&order, 0)];
    }
    let g = grouped(&z, n, groups, length);
    let chosen = g.max(-1).argsort(-1, Order::Descending).narrow(-1, 0, k);
    // In the order of their numbers, so that a stable sort leaves equal logits in that order.
    let chosen = chosen.gather_elements(&chosen.argsort(-1, Order::Ascending), 0);
    let values = g.gather(&chosen, 0).reshape([k * length]);
    let place = Tensor::arange(z.backend(), length, DType::I32).reshape([1, length]);
    let all = numbers(&chosen.reshape([k, 1]), length, &place).reshape([k * length]);
    let order = values.argsort(-1, Order::Descending).narrow(-1, 0, k);
    [all.gather_elements(&order, 0), values.gather_elements(&order, 0)]
}

/// Logits `[1, n]` as `[groups, length]`, filled up with negative infinity.
fn grouped(z: &Tensor, n: usize, groups: usize, length: usize) -> Tensor {
    z.pad(&[0, 0], &[0, groups * length - n], f64::NEG_INFINITY).reshape([groups, length])
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
    use halcyon::{Backend, BackendType, Level};
    use halcyon_test::{Rng, devices};

    fn same_as_the_host(b: &Backend, sizes: &[usize]) {
        let mut rng = Rng::new(4);
        for &n in sizes {
            // Few values, so that many are equal.
            let mut z: Vec<f32> = (0..n).map(|_| rng.below(n / 3 + 2) as f32 * 0.5 - 3.0).collect();
            if n > 8 {
                (z[1], z[7]) = (f32::NAN, f32::NEG_INFINITY);
            }
            let t = Tensor::from_slice(b, [1, n], &z).unwrap();
            let mut host = Candidates::new(&z);
            host.sort();
            for k in [1, 2, 5, 40].into_iter().filter(|k| *k <= n.saturating_sub(2).max(1)) {
                let [ids, values] = largest(&t, n, k);
                let (ids, values) = (ids.to_vec::<i32>().unwrap(), values.to_vec::<f32>().unwrap());
                let got: Vec<(u32, f32)> = ids.iter().map(|i| *i as u32).zip(values).collect();
                assert_eq!(got, host.list()[..k], "{n} {k} on {}", b.id());
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

    #[test]
    fn samplers_that_need_all_logits_get_them() {
        let o = Sampling::default();
        assert_eq!(needed(&o), Some(40));
        assert_eq!(needed(&Sampling::greedy()), Some(1));
        assert_eq!(needed(&Sampling { top_k: 0, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { top_k: 1000, ..o.clone() }), None);
        assert_eq!(needed(&Sampling { repeat_penalty: 1.1, ..Sampling::greedy() }), None);
        assert_eq!(needed(&Sampling { typical_p: 0.5, ..o.clone() }), Some(40));
        let first = |s: StepName| Sampling { steps: vec![s, StepName::TopK], ..o.clone() };
        assert_eq!(needed(&first(StepName::TopP)), None);
        assert_eq!(needed(&first(StepName::Penalties)), Some(40));
        assert_eq!(needed(&first(StepName::Temperature)), None);
    }
}

//! Scratch memory layout. Buffers whose lifetimes do not overlap share memory.
//!
//! If the target can use a part of an allocation as a buffer, scratch memory is one allocation, and every
//! buffer gets an offset in it, by the greedy offset calculation of Pisarchyk and Lee, "Efficient Memory
//! Management for Deep Neural Net Inference" (2020). The calculation runs in three orders: by size and by
//! breadth, as in the paper, and in the order of the steps. Each order is retried with the topmost buffers
//! moved to the front of the order. The smallest layout is used. On other targets there are several
//! allocations, and each is used by one buffer after another.

use super::*;
use crate::plan::Slot;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Maximum number of buffers for the calculation of offsets, whose cost grows with the square of this number.
/// In larger plans, buffers share memory only by taking turns ([`turns`]).
const MAX_PLACED: usize = 4096;

/// Maximum number of attempts per order. There is at least one attempt, and more only as long as the number
/// of attempts times the square of the number of buffers does not exceed `MAX_WORK`.
const ROUNDS: usize = 64;
const MAX_WORK: usize = 1 << 23;

/// A buffer to be placed: its bytes, and the first and last step (inclusive) during which its memory is in
/// use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Item {
    bytes: usize,
    first: usize,
    last: usize,
}

impl Item {
    fn meets(&self, o: &Item) -> bool {
        self.first <= o.last && o.first <= self.last
    }
}

impl Lowerer<'_> {
    /// Assigns slots to scratch buffers. Buffers whose lifetimes do not overlap may share memory.
    pub(super) fn assign_slots(&mut self) {
        let plan = &mut self.plan;
        let life = plan.lifetimes();
        let scratch: Vec<usize> =
            (0..life.len()).filter(|&k| matches!(plan.buffers[k].storage, Storage::Slot(_))).collect();
        // A workspace is in use during one step, so it can share memory with buffers that are not live during
        // that step.
        let mut wanted: Vec<(u32, usize)> = vec![];
        if self.target.part_alignment().is_some() {
            let all = plan.steps.iter().enumerate().map(|(t, s)| (t as u32, s.work.workspace()));
            wanted.extend(all.filter(|(_, bytes)| *bytes > 0));
            plan.workspace = 0;
        }
        if scratch.is_empty() && wanted.is_empty() {
            return;
        }
        // A buffer without a lifetime belongs to an empty tensor, which no step uses.
        let item = |k: &usize| {
            let (first, last) = life[*k].unwrap_or((0, 0));
            Item { bytes: plan.buffers[*k].bytes, first, last }
        };
        let mut items: Vec<Item> = scratch.iter().map(item).collect();
        let of_step = |&(t, bytes): &(u32, usize)| Item { bytes, first: t as usize, last: t as usize };
        items.extend(wanted.iter().map(of_step));
        let (blocks, places) = match self.target.part_alignment() {
            Some(align) => {
                let (total, offsets) = match items.len() <= MAX_PLACED {
                    true => offsets(&items, align.max(1), plan.needed()),
                    false => {
                        let (blocks, of) = turns(&items);
                        let mut end = 0usize;
                        let starts: Vec<usize> = blocks
                            .iter()
                            .map(|b| {
                                let start = end;
                                end = end.saturating_add(aligned(*b, align.max(1)));
                                start
                            })
                            .collect();
                        (end, of.into_iter().map(|b| starts[b as usize]).collect())
                    }
                };
                let places = offsets.into_iter().zip(&items);
                (vec![total], places.map(|(offset, i)| Slot { block: 0, offset, bytes: i.bytes }).collect())
            }
            None => {
                let (blocks, of) = shared(&items);
                let place = |b: u32| Slot { block: b, offset: 0, bytes: blocks[b as usize] };
                let places: Vec<Slot> = of.into_iter().map(place).collect();
                (blocks, places)
            }
        };
        plan.blocks = blocks;
        let mut number: HashMap<Slot, u32> = HashMap::new();
        let slots = &mut plan.slots;
        let mut numbers = places.into_iter().map(|place| {
            *number.entry(place).or_insert_with(|| {
                slots.push(place);
                slots.len() as u32 - 1
            })
        });
        for (k, n) in scratch.into_iter().zip(numbers.by_ref()) {
            plan.buffers[k].storage = Storage::Slot(n);
        }
        plan.workspaces = wanted.iter().map(|(t, _)| *t).zip(numbers).collect();
        debug_assert!(items.len() > 1024 || apart(plan), "two live buffers share memory");
    }
}

/// Whether no two buffers that are live at the same time overlap, and whether all buffers lie inside their
/// allocations.
fn apart(plan: &Plan) -> bool {
    let life = plan.lifetimes();
    let mut all: Vec<(Slot, Item)> = plan
        .buffers
        .iter()
        .zip(life)
        .filter_map(|(b, life)| {
            let (Storage::Slot(s), Some((first, last))) = (b.storage, life) else { return None };
            Some((plan.slots[s as usize], Item { bytes: b.bytes, first, last }))
        })
        .collect();
    all.extend(plan.workspaces.iter().map(|&(t, s)| {
        let (bytes, t) = (plan.steps[t as usize].work.workspace(), t as usize);
        (plan.slots[s as usize], Item { bytes, first: t, last: t })
    }));
    all.iter().enumerate().all(|(k, (s, i))| {
        i.bytes <= s.bytes
            && s.offset + s.bytes <= plan.blocks[s.block as usize]
            && all[..k].iter().all(|(t, j)| {
                let overlap = s.offset < t.offset + j.bytes && t.offset < s.offset + i.bytes;
                !(overlap && s.block == t.block && i.meets(j))
            })
    })
}

fn aligned(bytes: usize, align: usize) -> usize {
    bytes.div_ceil(align).saturating_mul(align)
}

/// Returns the size of the allocation, and the offset of every buffer, which is a multiple of `align`.
/// `least` is a lower bound of the size.
fn offsets(items: &[Item], align: usize, least: usize) -> (usize, Vec<usize>) {
    let items: Vec<Item> = items.iter().map(|i| Item { bytes: aligned(i.bytes, align), ..*i }).collect();
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&k| (Reverse(items[k].bytes), Reverse(items[k].last - items[k].first), k));
    let by_size = place(&items, &order);
    if by_size.0 <= aligned(least, align) {
        return by_size;
    }
    let by_breadth = breadth(&items, &order);
    let mut by_step = order.clone();
    by_step.sort_by_key(|&k| (items[k].first, Reverse(items[k].bytes), k));
    let mut best = by_size;
    for mut order in [order, by_breadth, by_step] {
        for _ in 0..ROUNDS.min(MAX_WORK / items.len().pow(2).max(1)).max(1) {
            let r = place(&items, &order);
            let top = |k: usize| r.1[k] + items[k].bytes == r.0;
            // The topmost buffers had the worst placement, so they go first next time. (The sort is stable.)
            order.sort_by_key(|&k| !top(k));
            if r.0 < best.0 {
                best = r;
            }
            if best.0 <= aligned(least, align) {
                return best;
            }
        }
    }
    best
}

/// The order by breadth: first the buffers of the step with the most live bytes, the largest buffer first;
/// then the buffers of the step with the second most; and so on. `by_size` lists the items by size.
fn breadth(items: &[Item], by_size: &[usize]) -> Vec<usize> {
    let steps = items.iter().map(|i| i.last + 1).max().unwrap_or(0);
    let mut at: Vec<Vec<usize>> = vec![vec![]; steps];
    let mut load = vec![0usize; steps];
    for &k in by_size {
        for t in items[k].first..=items[k].last {
            at[t].push(k);
            load[t] = load[t].saturating_add(items[k].bytes);
        }
    }
    let mut order: Vec<usize> = (0..steps).collect();
    order.sort_by_key(|&t| Reverse(load[t]));
    let mut taken = vec![false; items.len()];
    let mut out = Vec::with_capacity(items.len());
    for t in order {
        out.extend(at[t].iter().copied().filter(|&k| !std::mem::replace(&mut taken[k], true)));
    }
    out
}

/// Places buffers one by one, each in the smallest sufficient gap between the placed buffers that are live at
/// the same time. If there is no such gap, places it after all of them.
fn place(items: &[Item], order: &[usize]) -> (usize, Vec<usize>) {
    let mut offsets = vec![0usize; items.len()];
    // Sorted by offset.
    let mut placed: Vec<usize> = Vec::with_capacity(items.len());
    let mut total = 0;
    for &k in order {
        let item = &items[k];
        let (mut end, mut best) = (0usize, None::<(usize, usize)>);
        for &o in placed.iter().filter(|&&o| items[o].meets(item)) {
            let gap = offsets[o].saturating_sub(end);
            if gap >= item.bytes && best.is_none_or(|(size, _)| gap < size) {
                best = Some((gap, end));
            }
            end = end.max(offsets[o].saturating_add(items[o].bytes));
        }
        let at = best.map_or(end, |(_, at)| at);
        offsets[k] = at;
        total = total.max(at.saturating_add(item.bytes));
        placed.insert(placed.partition_point(|&o| offsets[o] <= at), k);
    }
    (total, offsets)
}

/// Returns the bytes of each allocation and the allocation of every buffer: the smaller result of [`turns`]
/// and [`from_the_largest`], or that of [`turns`] for more than `MAX_PLACED` buffers.
fn shared(items: &[Item]) -> (Vec<usize>, Vec<u32>) {
    let a = turns(items);
    if items.len() > MAX_PLACED {
        return a;
    }
    let b = from_the_largest(items);
    let total =
        |(blocks, _): &(Vec<usize>, Vec<u32>)| blocks.iter().fold(0usize, |n, b| n.saturating_add(*b));
    if total(&b) < total(&a) { b } else { a }
}

/// Like [`turns`], but in the order from the largest buffer to the smallest. Each buffer gets the smallest
/// allocation that no other buffer uses at the same time, or a new one ("greedy by size" for shared objects,
/// Pisarchyk and Lee 2020).
fn from_the_largest(items: &[Item]) -> (Vec<usize>, Vec<u32>) {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&k| (Reverse(items[k].bytes), items[k].first, k));
    let (mut blocks, mut users): (Vec<usize>, Vec<Vec<usize>>) = (vec![], vec![]);
    let mut of = vec![0u32; items.len()];
    for k in order {
        // Later allocations are not larger, so the last free one is the smallest.
        let free = (0..blocks.len()).rev().find(|b| users[*b].iter().all(|u| !items[*u].meets(&items[k])));
        let b = free.unwrap_or_else(|| {
            blocks.push(items[k].bytes);
            users.push(vec![]);
            blocks.len() - 1
        });
        users[b].push(k);
        of[k] = b as u32;
    }
    (blocks, of)
}

/// Returns the bytes of each allocation and the allocation of every buffer. In the order of the steps, each
/// buffer gets the smallest sufficient free allocation. If none suffices, the largest free one grows. If none
/// is free, the buffer gets a new one.
fn turns(items: &[Item]) -> (Vec<usize>, Vec<u32>) {
    let mut starts: Vec<usize> = (0..items.len()).collect();
    starts.sort_by_key(|&k| items[k].first);
    let mut ends = starts.clone();
    ends.sort_by_key(|&k| items[k].last);
    let mut ends = ends.into_iter().peekable();
    let (mut blocks, mut of) = (vec![], vec![0u32; items.len()]);
    // Sorted by size, then index.
    let mut free: BTreeSet<(usize, u32)> = BTreeSet::new();
    for k in starts {
        while let Some(done) = ends.next_if(|&e| items[e].last < items[k].first) {
            free.insert((blocks[of[done] as usize], of[done]));
        }
        let want = items[k].bytes;
        of[k] = match free.range((want, 0)..).next().or_else(|| free.last()).copied() {
            Some(at) => {
                free.remove(&at);
                at.1
            }
            None => {
                blocks.push(0);
                blocks.len() as u32 - 1
            }
        };
        let size = &mut blocks[of[k] as usize];
        *size = want.max(*size);
    }
    (blocks, of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALIGN: usize = 64;

    fn items() -> impl Strategy<Value = Vec<Item>> {
        let item = (0usize..5000, 0usize..40, 0usize..12);
        let item = item.prop_map(|(bytes, first, more)| Item { bytes, first, last: first + more });
        proptest::collection::vec(item, 0..60)
    }

    fn least(items: &[Item], align: usize) -> usize {
        let live = |t: usize| items.iter().filter(move |i| (i.first..=i.last).contains(&t));
        (0..64).map(|t| live(t).map(|i| aligned(i.bytes, align)).sum()).max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn buffers_that_are_live_together_do_not_overlap(items in items()) {
            let least = least(&items, ALIGN);
            let (total, at) = offsets(&items, ALIGN, least);
            prop_assert!(total >= least && total <= items.iter().map(|i| aligned(i.bytes, ALIGN)).sum());
            for (k, i) in items.iter().enumerate() {
                prop_assert!(at[k] % ALIGN == 0 && at[k] + i.bytes <= total);
                for (o, j) in items.iter().enumerate().take(k) {
                    let overlap = at[k] < at[o] + j.bytes && at[o] < at[k] + i.bytes;
                    prop_assert!(!(overlap && i.meets(j)), "{i:?} at {} and {j:?} at {}", at[k], at[o]);
                }
            }
        }

        #[test]
        fn an_allocation_has_one_live_buffer_at_a_time(items in items()) {
            let (blocks, of) = shared(&items);
            prop_assert!(blocks.iter().sum::<usize>() <= turns(&items).0.iter().sum());
            for (k, i) in items.iter().enumerate() {
                prop_assert!(i.bytes <= blocks[of[k] as usize]);
                for (o, j) in items.iter().enumerate().take(k) {
                    prop_assert!(of[o] != of[k] || !i.meets(j), "{i:?} and {j:?} in {}", of[k]);
                }
            }
            prop_assert!(blocks.iter().sum::<usize>() >= least(&items, 1));
        }
    }

    #[test]
    fn a_chain_and_a_branch_take_no_more_than_what_is_live() {
        let item = |bytes, first, last| Item { bytes, first, last };
        // A chain in which two neighbours are live at a time.
        let chain: Vec<Item> = (0..20).map(|t| item(1000 * (20 - t), t, t + 1)).collect();
        assert_eq!(offsets(&chain, 1, least(&chain, 1)).0, least(&chain, 1));
        // Two buffers fit where one was. With separate allocations, one of the small allocations would have
        // to grow.
        let branch = [item(1000, 0, 1), item(10, 1, 2), item(10, 1, 2), item(500, 3, 4), item(500, 3, 4)];
        let (total, at) = offsets(&branch, 1, least(&branch, 1));
        assert_eq!(total, least(&branch, 1), "{at:?}");
        assert!(turns(&branch).0.iter().sum::<usize>() > total);
        assert_eq!(offsets(&[], 64, 0), (0, vec![]));
    }
}

//! Merges launches: steps that run the same element-wise kernel on different buffers, and do not depend on
//! each other, become one launch ([`crate::kernel::Parts`]). A GPU needs a few microseconds for each
//! launch, which is longer than the update of a small parameter takes.

use super::join::{Memory, uses};
use super::*;
use crate::kernel::merged::{self, PlanParams};

/// Steps that move more bytes than this are not merged. They take much longer than a launch, and a merged
/// step keeps the operands of all of its parts in memory until it runs.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum total of the bytes that the parts of a merged step move.
const MAX_HELD: u64 = 256 << 20;

/// Steps that may become one launch, in order. They run at the place of the last.
struct Group {
    kernel: Arc<Kernel>,
    parts: Vec<Part>,
    bytes: u64,
    closed: bool,
}

/// A step that runs the kernel of its group.
struct Part {
    step: usize,
    groups: [u32; 3],
    params: PlanParams,
}

/// The chain as a chain over one axis, if possible. In a chain with a single point, strides have no effect.
/// Such a chain gets the strides of a longer chain with the same body, inputs and number of outputs.
fn over_one_axis(f: &Fused, longer: &[&Fused]) -> Option<Fused> {
    if is_long(f) {
        return Some(f.clone());
    }
    let same = |g: &&Fused| {
        let types = |f: &Fused| f.loads.iter().map(|l| (l.input, l.dtype)).collect::<Vec<_>>();
        g.body == f.body && types(g) == types(f) && g.outs.len() == f.outs.len()
    };
    let like = longer.iter().copied().find(same)?;
    if f.space.iter().any(|d| *d != 1) || f.loads.iter().any(|l| l.fill.is_some() || l.view.mask.is_some()) {
        return None;
    }
    let one = |v: &View, g: &View| View {
        shape: smallvec![1],
        strides: g.strides.clone(),
        offset: v.offset,
        mask: None,
    };
    let mut new = Fused { space: smallvec![1], ..f.clone() };
    new.loads.iter_mut().zip(&like.loads).for_each(|(l, g)| l.view = one(&l.view, &g.view));
    new.outs.iter_mut().zip(&like.outs).for_each(|(o, g)| o.view = one(&o.view, &g.view));
    Some(new)
}

/// The open groups that use a piece of memory.
#[derive(Default)]
struct Users {
    readers: Vec<usize>,
    writers: Vec<usize>,
}

/// Whether the chain has one axis with more than one point.
fn is_long(f: &Fused) -> bool {
    f.space.len() == 1 && f.space[0] > 1
}

impl Lowerer<'_> {
    /// Merges steps of the finished list. Returns by how many steps the list became shorter.
    pub(super) fn merge_launches(&mut self) -> usize {
        if self.target.caps().max_argument_bytes == 0 || !self.options.passes.does(LAUNCHES) {
            return 0;
        }
        let groups = self.groups();
        let mut steps: Vec<Option<PlacedStep>> =
            std::mem::take(&mut self.steps).into_iter().map(Some).collect();
        let before = steps.len();
        for g in groups.iter().filter(|g| g.parts.len() > 1) {
            // Each launch gets as many of the remaining parts as it can take.
            let mut rest = &g.parts[..];
            while rest.len() > 1 {
                let merged = |n: usize| self.merged(&steps, &g.kernel, &rest[..n]);
                // `low` parts fit, `high` do not.
                let (mut low, mut high) = (1, rest.len() + 1);
                while high - low > 1 {
                    // The whole list fits most of the time.
                    let n = if high > rest.len() { rest.len() } else { (low + high) / 2 };
                    if merged(n).is_some() { low = n } else { high = n }
                }
                let n = low;
                let Some(step) = merged(n) else { break };
                // The launch runs at the place of its last part, because no part may run earlier than its own
                // step.
                let at = rest[n - 1].step;
                rest[..n].iter().for_each(|p| steps[p.step] = None);
                steps[at] = Some(step);
                rest = &rest[n..];
            }
        }
        self.steps = steps.into_iter().flatten().collect();
        before - self.steps.len()
    }

    /// Groups of steps that could each run as one launch, in order of their first steps. Between two steps of
    /// a group, no step uses what the earlier of the two writes, and no step writes what the earlier one
    /// uses.
    fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = vec![];
        let mut open: HashMap<u128, usize> = HashMap::new();
        let chains = self.steps.iter().filter(|s| s.chain.is_some()).filter_map(|s| s.step.fused.as_deref());
        let longer: Vec<&Fused> = chains.filter(|f| is_long(f)).collect();
        let mut users: HashMap<Memory, Users> = HashMap::new();
        for (t, s) in self.steps.iter().enumerate() {
            let (reads, writes) = uses(&self.plan, &s.step);
            for m in &reads {
                users.get(m).into_iter().flat_map(|u| &u.writers).for_each(|g| groups[*g].closed = true);
            }
            for m in &writes {
                users.get(m).into_iter().flat_map(|u| &u.readers).for_each(|g| groups[*g].closed = true);
            }
            if s.chain.is_none() || s.step.bytes > MAX_BYTES {
                continue;
            }
            let Some((kernel, part)) = self.part(t, &s.step, &longer) else { continue };
            let key = kernel.key();
            let known = open.get(&key).copied();
            let known = known.filter(|g| !groups[*g].closed && groups[*g].bytes + s.step.bytes <= MAX_HELD);
            let g = known.unwrap_or_else(|| {
                groups.push(Group { kernel, parts: vec![], bytes: 0, closed: false });
                open.insert(key, groups.len() - 1);
                groups.len() - 1
            });
            groups[g].parts.push(part);
            groups[g].bytes += s.step.bytes;
            reads.iter().for_each(|m| users.entry(*m).or_default().readers.push(g));
            writes.iter().for_each(|m| users.entry(*m).or_default().writers.push(g));
        }
        groups
    }

    /// The kernel with which a step can share a launch with other steps: a kernel for any length of the
    /// step's axis if there is one, else the step's own kernel.
    fn part(&self, step: usize, s: &Step, longer: &[&Fused]) -> Option<(Arc<Kernel>, Part)> {
        let StepWork::Kernel { kernel, groups, params } = &s.work else { return None };
        let own = || {
            let part = Part { step, groups: *groups, params: params.clone() };
            Some((kernel.clone(), part))
        };
        let Some(f) = s.fused.as_ref().and_then(|f| over_one_axis(f, longer)) else { return own() };
        match kernel_lower::lower_any_length(&f, self.target.caps()) {
            Ok(Some((kernel, launch))) => {
                let StepWork::Kernel { kernel, groups, params } = kernel_work(kernel, launch, Some(&f))
                else {
                    return None;
                };
                Some((kernel, Part { step, groups, params }))
            }
            _ => own(),
        }
    }

    /// One step that runs `kernel` for all of these parts. `None` if the kernel cannot be a part of a launch,
    /// or if the device does not accept so many arguments or workgroups.
    fn merged(&self, steps: &[Option<PlacedStep>], kernel: &Kernel, which: &[Part]) -> Option<PlacedStep> {
        let parts: Vec<&PlacedStep> = which.iter().map(|p| steps[p.step].as_ref()).collect::<Option<_>>()?;
        let launches: Vec<([u32; 3], &PlanParams)> = which.iter().map(|p| (p.groups, &p.params)).collect();
        let (kernel, groups, params) = merged::merge(kernel, &launches, self.target.caps())?;
        let read = |p: &PlacedStep| p.step.reads().len();
        let mut buffers = vec![];
        let mut values = Values::new();
        for written in [false, true] {
            for p in &parts {
                let range = if written { read(p)..p.step.buffers.len() } else { 0..read(p) };
                buffers.extend_from_slice(&p.step.buffers[range.clone()]);
                values.extend(p.values[range].iter().copied());
            }
        }
        let last = parts.last()?;
        let sum = |of: fn(&Step) -> u64| parts.iter().fold(0u64, |n, p| n.saturating_add(of(&p.step)));
        let step = Step {
            work: StepWork::Kernel { kernel: Arc::new(kernel), groups, params },
            buffers,
            outputs: parts.iter().map(|p| p.step.outputs).sum(),
            op: format!("{} ×{}", last.step.op, parts.len()),
            span: last.step.span.clone(),
            bounds: None,
            flops: sum(|s| s.flops),
            bytes: sum(|s| s.bytes),
            nodes: parts.iter().map(|p| p.step.nodes).sum(),
            fused: None,
            tunable: None,
        };
        Some(PlacedStep { place: last.place, step, values, chain: None })
    }
}

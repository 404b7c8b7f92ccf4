//! Joins element-wise steps: a chain that stores its result for later steps moves to the chain that reads the
//! result next, and one step computes both. The value stays in a register, and operands of both chains are
//! read once. An optimizer's step becomes one kernel for each parameter.

use super::fuse::kernel_work;
use super::*;
use crate::passes::JOINED;

/// Maximum distance, in steps, of two chains that are joined. It bounds the time of the search.
const REACH: usize = 64;
/// Maximum number of instructions of a joined chain.
const MAX_BODY: usize = 96;
/// Maximum number of outputs of a joined chain. `MAX_BODY` does not bound them, because a copy of a result
/// adds an output and no instruction.
const MAX_OUTPUTS: usize = 16;

/// What lowering knows about the step of an element-wise chain.
#[derive(Clone, Debug)]
pub(super) struct ChainCall {
    /// The operands of the step's input and output buffers.
    pub(super) inputs: Vec<Operand>,
    pub(super) outputs: Vec<Operand>,
    /// Number of outputs that overwrite the input with the same index.
    pub(super) in_place: usize,
}

/// The memory of a buffer. Two buffers may have the memory of one input.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Memory {
    Input(u32),
    Own(BufId),
}

impl Memory {
    pub(super) fn of(plan: &Plan, b: BufId) -> Memory {
        match plan.buffers[b.0 as usize].storage {
            Storage::Input(k) => Memory::Input(k),
            _ => Memory::Own(b),
        }
    }
}

/// The memory that a step reads and that it writes.
pub(super) fn uses(plan: &Plan, s: &Step) -> (SmallVec<[Memory; 8]>, SmallVec<[Memory; 4]>) {
    let of = |b: &BufId| Memory::of(plan, *b);
    // Kernels may also read what they write.
    (s.buffers.iter().map(of).collect(), s.writes().iter().map(of).collect())
}

/// The inputs and outputs of a joined step under construction.
#[derive(Default)]
struct Joined {
    inputs: Vec<(BufId, Operand, Option<NodeId>)>,
    outputs: Vec<(BufId, Operand, Option<NodeId>)>,
    loads: Vec<Load>,
    params: Vec<(DType, Param)>,
    body: Vec<Instr>,
    outs: Vec<Out>,
    /// The register with the element of each load.
    loaded: Vec<Option<Reg>>,
}

impl Joined {
    fn input(&mut self, b: BufId, operand: &Operand, value: Option<NodeId>) -> u32 {
        if let Some(k) = self.inputs.iter().position(|i| i.0 == b) {
            return k as u32;
        }
        self.inputs.push((b, operand.clone(), value));
        self.inputs.len() as u32 - 1
    }

    fn param(&mut self, p: (DType, Param)) -> u32 {
        // Equal arguments share a parameter; see `Body::param`.
        if let (Param::Arg(_), Some(k)) = (p.1, self.params.iter().position(|q| *q == p)) {
            return k as u32;
        }
        self.params.push(p);
        self.params.len() as u32 - 1
    }

    fn push(&mut self, kind: InstrKind, dtype: DType, args: SmallVec<[Reg; 3]>) -> Reg {
        self.body.push(Instr { kind, dtype, args });
        self.body.len() as Reg - 1
    }

    /// Adds the body of a chain. `inputs` has the number of each of its inputs; `known` has the register of
    /// an input whose elements an earlier chain computes. Returns the register of each instruction.
    fn add(&mut self, f: &Fused, inputs: &[u32], known: &dyn Fn(u32) -> Option<Reg>) -> Vec<Reg> {
        let params: Vec<u32> = f.params.iter().map(|p| self.param(*p)).collect();
        let mut map: Vec<Reg> = Vec::with_capacity(f.body.len());
        for i in &f.body {
            let args = i.args.iter().map(|a| map[*a as usize]).collect();
            let r = match &i.kind {
                InstrKind::Load(l) => {
                    let load = &f.loads[*l as usize];
                    match known(load.input) {
                        Some(r) => r,
                        None => self.load(load, inputs[load.input as usize], &params),
                    }
                }
                InstrKind::Param(p) => self.push(InstrKind::Param(params[*p as usize]), i.dtype, args),
                kind => self.push(kind.clone(), i.dtype, args),
            };
            map.push(r);
        }
        map
    }

    fn load(&mut self, load: &Load, input: u32, params: &[u32]) -> Reg {
        let new = Load { input, fill: load.fill.map(|p| params[p as usize]), ..load.clone() };
        if let Some(k) = self.loads.iter().position(|l| *l == new)
            && let Some(r) = self.loaded[k]
        {
            return r;
        }
        self.loads.push(new);
        let r = self.push(InstrKind::Load(self.loads.len() as u32 - 1), load.dtype, smallvec![]);
        self.loaded.push(Some(r));
        r
    }
}

impl Lowerer<'_> {
    /// Excludes steps that write a part of a buffer, such as the steps of a concatenation, from joined chains
    /// and merged launches. Verification checks a value after the last step that writes to it. If a step
    /// wrote a part and also a whole value, verification would take the part for a whole value.
    pub(super) fn exclude_parts(&mut self) {
        let mut once = HashSet::new();
        let written = self.steps.iter().flat_map(|s| s.step.writes());
        let twice: HashSet<BufId> = written.copied().filter(|b| !once.insert(*b)).collect();
        for s in self.steps.iter_mut().filter(|s| s.step.writes().iter().any(|b| twice.contains(b))) {
            s.chain = None;
        }
    }

    /// Joins chains of the finished list of steps. Returns how many chains were joined to a later one.
    pub(super) fn join_chains(&mut self) -> usize {
        if !self.options.passes.does(JOINED) || !self.options.passes.does(FUSION) {
            return 0;
        }
        let mut steps: Vec<Option<PlacedStep>> =
            std::mem::take(&mut self.steps).into_iter().map(Some).collect();
        // The step that writes each buffer of a chain, and the last step that uses each buffer.
        let mut writer: HashMap<BufId, usize> = HashMap::new();
        let mut last: HashMap<BufId, usize> = HashMap::new();
        for (t, s) in steps.iter().enumerate() {
            let Some(s) = s else { continue };
            for b in &s.step.buffers {
                last.insert(*b, t);
            }
            if s.chain.is_some() {
                writer.extend(s.step.writes().iter().map(|b| (*b, t)));
            }
        }
        let mut joined = 0;
        for t in 0..steps.len() {
            // Each join may make further chains the direct predecessors of the step.
            while let Some(first) = self.joinable(&steps, &writer, &last, t) {
                let (Some(a), Some(b)) = (&steps[first], &steps[t]) else { break };
                let Some(new) = self.join(a, b) else {
                    // Not tried again: the step no longer counts as a chain that can move.
                    for b in a.step.writes() {
                        writer.remove(b);
                    }
                    continue;
                };
                for b in &a.step.buffers {
                    last.entry(*b).and_modify(|l| *l = (*l).max(t));
                }
                for b in new.step.writes() {
                    writer.insert(*b, t);
                }
                steps[first] = None;
                steps[t] = Some(new);
                joined += 1;
            }
        }
        self.steps = steps.into_iter().flatten().collect();
        joined
    }

    /// A chain before step `t` whose result the chain of step `t` reads, and that can run at the place of
    /// step `t` instead of its own.
    fn joinable(
        &self,
        steps: &[Option<PlacedStep>],
        writer: &HashMap<BufId, usize>,
        last: &HashMap<BufId, usize>,
        t: usize,
    ) -> Option<usize> {
        let b = steps[t].as_ref().filter(|s| s.chain.is_some())?;
        let mut from: Vec<usize> = b.step.reads().iter().filter_map(|x| writer.get(x).copied()).collect();
        // The nearest chain first, so that chains that depend on each other stay in order.
        from.sort_unstable();
        from.dedup();
        from.into_iter().rev().filter(|a| *a < t && t - a <= REACH).find(|a| {
            let Some(first) = &steps[*a] else { return false };
            let (reads, writes) = uses(&self.plan, &first.step);
            let mut between = steps[a + 1..t].iter().flatten().peekable();
            let alone = between.peek().is_none();
            let free = between.all(|s| {
                let (r, w) = uses(&self.plan, &s.step);
                !r.iter().any(|m| writes.contains(m)) && !w.iter().any(|m| reads.contains(m))
            });
            // The later place must not keep operands in memory for longer.
            let held = |x: &BufId| {
                let scratch = matches!(self.plan.buffers[x.0 as usize].storage, Storage::Slot(_));
                scratch && last.get(x).is_some_and(|l| *l < t)
            };
            free && (alone || !first.step.buffers.iter().any(held))
        })
    }

    /// The step that computes chain `a` and then chain `b`, which reads the result of `a`. `None` if one
    /// kernel cannot compute both.
    fn join(&self, a: &PlacedStep, b: &PlacedStep) -> Option<PlacedStep> {
        let (ca, cb) = (a.chain.as_ref()?, b.chain.as_ref()?);
        let (fa, fb) = (a.step.fused.as_ref()?, b.step.fused.as_ref()?);
        let dense = |f: &Fused| f.outs.iter().all(|o| o.view.is_dense() && o.reduce.is_none());
        if fa.space != fb.space || fa.reduced + fb.reduced > 0 || !dense(fa) || !dense(fb) {
            return None;
        }
        if fa.body.len() + fb.body.len() > MAX_BODY || fa.outs.len() + fb.outs.len() > MAX_OUTPUTS {
            return None;
        }
        let parts = |s: &PlacedStep| -> (Vec<(BufId, Option<NodeId>)>, Vec<(BufId, Option<NodeId>)>) {
            let all: Vec<_> = s.step.buffers.iter().copied().zip(s.values.iter().copied()).collect();
            let (i, o) = all.split_at(s.step.reads().len());
            (i.to_vec(), o.to_vec())
        };
        let ((ia, oa), (ib, ob)) = (parts(a), parts(b));
        // The output of `a` that input `k` of `b` reads, if there is one.
        let given = |k: u32| oa.iter().position(|o| ib.get(k as usize).is_some_and(|i| i.0 == o.0));
        let reads_it = |l: &Load| match given(l.input) {
            None => true,
            Some(o) => {
                let out = &fa.outs[o];
                l.view == out.view && l.dtype == out.dtype && l.fill.is_none()
            }
        };
        if !fb.loads.iter().all(reads_it) || !self.shares_no_memory(a, b, &given) {
            return None;
        }
        let mut new = Joined::default();
        // The inputs that are overwritten come first, in the order of the outputs.
        for (inputs, call, n) in [(&ib, cb, cb.in_place), (&ia, ca, ca.in_place)] {
            for k in 0..n {
                new.input(inputs[k].0, &call.inputs[k], inputs[k].1);
            }
        }
        let in_place = cb.in_place + ca.in_place;
        if new.inputs.len() != in_place {
            return None;
        }
        let mut number =
            |inputs: &[(BufId, Option<NodeId>)], call: &ChainCall, skip: &dyn Fn(u32) -> bool| {
                let of = |(k, i): (usize, &(BufId, Option<NodeId>))| match skip(k as u32) {
                    true => u32::MAX,
                    false => new.input(i.0, &call.inputs[k], i.1),
                };
                inputs.iter().enumerate().map(of).collect::<Vec<u32>>()
            };
        let na = number(&ia, ca, &|_| false);
        let nb = number(&ib, cb, &|k| given(k).is_some());
        let ra = new.add(fa, &na, &|_| None);
        // A stored value of a half type is rounded, so the second chain gets the rounded value.
        let results: Vec<Reg> = fa
            .outs
            .iter()
            .map(|o| {
                let r = ra[o.value as usize];
                let widens = o.dtype.widens() || fa.body[o.value as usize].dtype != o.dtype;
                if widens { new.push(InstrKind::Cast, o.dtype, smallvec![r]) } else { r }
            })
            .collect();
        let rb = new.add(fb, &nb, &|k| given(k).map(|o| results[o]));
        let out = |o: &Out, r: Reg| Out { value: r, ..o.clone() };
        let outs_a: Vec<Out> = fa.outs.iter().zip(&results).map(|(o, r)| out(o, *r)).collect();
        let outs_b: Vec<Out> = fb.outs.iter().map(|o| out(o, rb[o.value as usize])).collect();
        for range in [true, false] {
            for (outs, buffers, call) in [(&outs_b, &ob, cb), (&outs_a, &oa, ca)] {
                let some = if range { 0..call.in_place } else { call.in_place..outs.len() };
                for k in some {
                    new.outs.push(outs[k].clone());
                    new.outputs.push((buffers[k].0, call.outputs[k].clone(), buffers[k].1));
                }
            }
        }
        let most = (self.target.caps().max_bindings as usize).saturating_sub(3).clamp(2, 24);
        // A launch takes a limited number of arguments, and each load adds some.
        if new.inputs.len() > most
            || new.loads.len() > most
            || new.inputs.len() + new.outs.len() > self.target.caps().max_bindings as usize
        {
            return None;
        }
        self.joined_step(new, in_place, [a, b])
    }

    /// Whether one kernel may compute both chains although they share memory: `b` reads what `a` writes only
    /// as the result of `a`, the outputs of the two chains are separate, and `a` reads what `b` overwrites
    /// only at the element that is being written. `given` tells which inputs of `b` are results of `a`.
    fn shares_no_memory(&self, a: &PlacedStep, b: &PlacedStep, given: &dyn Fn(u32) -> Option<usize>) -> bool {
        let at = |s: &PlacedStep, k: usize| Memory::of(&self.plan, s.step.buffers[k]);
        let (na, nb) = (a.step.reads().len(), b.step.reads().len());
        let (Some(fa), Some(fb)) = (&a.step.fused, &b.step.fused) else { return false };
        // `b` may read the memory that `a` writes only as the result of `a`.
        let of_a: Vec<Memory> = (na..a.step.buffers.len()).map(|k| at(a, k)).collect();
        if (0..nb).any(|k| given(k as u32).is_none() && of_a.contains(&at(b, k))) {
            return false;
        }
        // The outputs must be separate. `a` may read what `b` overwrites, but only element by element.
        for (o, out) in fb.outs.iter().enumerate() {
            let memory = at(b, nb + o);
            if of_a.contains(&memory) {
                return false;
            }
            let same = |l: &&Load| at(a, l.input as usize) == memory;
            if fa
                .loads
                .iter()
                .filter(same)
                .any(|l| l.view != out.view || l.dtype != out.dtype || l.fill.is_some())
            {
                return false;
            }
        }
        true
    }

    fn joined_step(&self, new: Joined, in_place: usize, [a, b]: [&PlacedStep; 2]) -> Option<PlacedStep> {
        let fb = b.step.fused.as_ref()?;
        let f = Arc::new(Fused {
            space: fb.space.clone(),
            reduced: 0,
            loads: new.loads,
            params: new.params,
            body: new.body,
            outs: new.outs,
        });
        let inputs: Vec<Operand> = new.inputs.iter().map(|i| i.1.clone()).collect();
        let outputs: Vec<Operand> = new.outputs.iter().map(|o| o.1.clone()).collect();
        let call = LibraryCall {
            precision: self.options.precision,
            in_place,
            ..LibraryCall::new(Work::Fused(&f), &inputs, &outputs)
        };
        let work = match (&a.step.work, &b.step.work) {
            // A special kernel for one of the chains is faster than the general kernel for both.
            (StepWork::Library(ka), StepWork::Library(kb)) => {
                let k = self.cache.library(&call).ok()?;
                let general = [ka, kb].iter().all(|one| one.name() == k.name()) && k.workspace() == 0;
                StepWork::Library(general.then_some(k)?)
            }
            (StepWork::Kernel { .. }, StepWork::Kernel { .. }) => {
                let (kernel, launch) = kernel_lower::lower_fused(&f, self.target.caps()).ok()?;
                kernel_work(kernel, launch, Some(&f))
            }
            _ => return None,
        };
        let nodes = a.step.nodes + b.step.nodes;
        let name = b.step.op.split('+').next().unwrap_or_default();
        let all = || new.inputs.iter().chain(&new.outputs);
        let step = Step {
            work,
            buffers: all().map(|x| x.0).collect(),
            outputs: new.outputs.len(),
            op: format!("{name}+{}", nodes - 1),
            span: b.step.span.clone(),
            bounds: None,
            flops: f.flops(),
            bytes: f.bytes(),
            nodes,
            fused: Some(f.clone()),
            tunable: None,
        };
        let values = all().map(|x| x.2).collect();
        Some(PlacedStep {
            place: b.place,
            step,
            values,
            chain: Some(ChainCall { inputs, outputs, in_place }),
        })
    }
}

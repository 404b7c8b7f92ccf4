//! `Executable`: a plan with its programs compiled and its constants on the device, ready to run many
//! times.

mod captures;

use crate::cancel;
use crate::faults::FaultContext;
use crate::fit::Fit;
use crate::queue::Queue;
use crate::runtime::Runtime;
use crate::sync::lock;
pub use captures::Captures;
use captures::{Bound, CaptureState};
use halcyon_hal::{Buffer, BufferRef, Command, Device, Event, Program, Tag, heap};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::passes::Level;
use halcyon_ir::plan::{BufId, HostWork, Plan, PlanOutput, Step, StepWork, Storage};
use halcyon_ir::{ConstData, Scalar};
use smallvec::SmallVec;
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Placeholder for an input or output that is not bound. Devices reject it, because it is not one of their
/// buffers.
#[derive(Debug)]
struct Unbound;

impl Buffer for Unbound {
    fn bytes(&self) -> usize {
        0
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Positions in a plan's steps: (step, number of the buffer or parameter in the step).
type Positions = Vec<(u32, u32)>;

/// The positions in a plan that change from run to run.
#[derive(Debug, Default)]
struct VariablePositions {
    inputs: Vec<Positions>,
    outputs: Vec<Positions>,
    /// For each parameter (step, number) that takes a run-time argument, the number of the argument.
    args: Vec<((u32, u32), u32)>,
}

impl VariablePositions {
    fn of(plan: &Plan) -> VariablePositions {
        let mut u =
            VariablePositions { outputs: vec![vec![]; plan.outputs.len()], ..VariablePositions::default() };
        for (i, s) in plan.steps.iter().enumerate() {
            for (k, b) in s.buffers.iter().enumerate() {
                let place = (i as u32, k as u32);
                match plan.buffers[b.0 as usize].storage {
                    Storage::Input(n) => {
                        if u.inputs.len() <= n as usize {
                            u.inputs.resize(n as usize + 1, vec![]);
                        }
                        u.inputs[n as usize].push(place);
                    }
                    Storage::Output(n) => u.outputs[n as usize].push(place),
                    _ => {}
                }
            }
            if let StepWork::Kernel { params, .. } = &s.work {
                let bound = params.iter().enumerate().filter_map(|(k, (_, a))| Some((k as u32, (*a)?)));
                u.args.extend(bound.map(|(k, a)| ((i as u32, k), a)));
            }
        }
        u
    }
}

/// The bindings and the scratch of one run. A lease is made once and reused: a run changes only the positions
/// in [`VariablePositions`] and submits the commands.
#[derive(Debug)]
pub(crate) struct Lease {
    /// The buffers of each step, in the step's order, with the workspace last. They keep the scratch alive.
    buffers: Vec<Vec<BufferRef>>,
    params: Vec<Vec<Scalar>>,
    /// The stream in which these bindings were used last, and the event of that run's completion; `None` for
    /// the device's own queue.
    last: Option<(u64, Event)>,
    /// Captures of runs with these bindings.
    captured: Bound,
}

/// Number of commands submitted at a time; small enough for the stack.
const BATCH: usize = 32;

/// A plan with its programs compiled and its constants on the device of its backend.
#[derive(Debug)]
pub struct Executable {
    runtime: Arc<Runtime>,
    plan: Plan,
    programs: Vec<Option<Arc<dyn Program>>>,
    consts: Vec<BufferRef>,
    packed: Vec<BufferRef>,
    uses: VariablePositions,
    unbound: BufferRef,
    /// Leases not in use by the host. A queue runs its commands in order, so a later run in the same queue
    /// can take a lease as soon as the earlier run is submitted. A lease that a stream used last is free for
    /// other queues when the run is complete. A lease that the device's own queue used last is free for every
    /// queue; if two runs then use the same memory, the device makes the later run wait.
    leases: Mutex<Vec<Lease>>,
    fault_base: u32,
    watched: Arc<FaultContext>,
    captures: CaptureState,
}

/// Rejects a plan that needs more memory than the device has left, before allocating any of it. Counts
/// scratch, outputs, and the constants that are copied to the device.
fn fits(device: &dyn Device, plan: &Plan) -> Result<()> {
    // Querying the free memory costs more than running a small plan. The pool checks its limit in any case.
    const SMALL: u64 = 16 << 20;
    let outputs = plan.buffers.iter().filter(|b| matches!(b.storage, Storage::Output(_))).map(|b| b.bytes);
    let bytes = [plan.scratch(), plan.const_bytes(), plan.packed_bytes()].into_iter().chain(outputs);
    // Allocations are rounded up to less than twice their size, or to a few hundred bytes.
    if bytes.fold(0, usize::saturating_add) as u64 <= SMALL / 2 {
        return Ok(());
    }
    // Inputs are already allocated, or are allocated later.
    let fit = Fit::of(device, plan, &[]);
    if fit.device() < SMALL {
        return Ok(());
    }
    heap::trim();
    fit.check(device, plan)
}

impl Executable {
    /// Compiles the programs of a plan and puts its constants on the device. `level` is the level that the
    /// plan was made at: from O2 on, runs may be captured.
    pub(crate) fn new(runtime: &Arc<Runtime>, level: Level, plan: Plan) -> Result<Executable> {
        fits(&*runtime.device, &plan)?;
        let programs = plan
            .steps
            .iter()
            .map(|s| match &s.work {
                StepWork::Kernel { kernel, .. } => runtime.program(kernel).map(Some),
                _ => Ok(None),
            })
            .collect::<Result<_>>()?;
        let consts = plan.consts.iter().map(|c| runtime.constant(c)).collect::<Result<_>>()?;
        let packed = if plan.packed.is_empty() { vec![] } else { runtime.packed(&plan)? };
        let watched = Arc::new(FaultContext::of(&plan));
        let fault_base = runtime.faults.register(watched.clone());
        Ok(Executable {
            runtime: runtime.clone(),
            uses: VariablePositions::of(&plan),
            captures: CaptureState::of(&*runtime.device, &plan, level),
            plan,
            programs,
            consts,
            packed,
            unbound: Arc::new(Unbound),
            leases: Mutex::default(),
            fault_base,
            watched,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The source of every generated kernel, each once: (name, source).
    pub fn sources(&self) -> Vec<(String, String)> {
        let mut seen = vec![];
        for p in self.programs.iter().flatten() {
            if let Some(s) = p.source()
                && !seen.iter().any(|(_, t)| t == s)
            {
                seen.push((p.name().to_string(), s.to_string()));
            }
        }
        seen
    }

    /// Takes bindings that a run in the queue `on` may use now, or makes new ones. Runs in different streams
    /// get separate scratch memory, so that they need not wait for each other.
    pub(crate) fn lease(&self, on: Option<&Queue>) -> Result<Lease> {
        let mut leases = lock(&self.leases);
        let free = |l: &Lease| match (&l.last, on) {
            (None, _) => true,
            (Some((id, e)), on) => on.is_some_and(|o| o.id == *id) || e.is_done(),
        };
        if let Some(i) = leases.iter().rposition(free) {
            return Ok(leases.swap_remove(i));
        }
        drop(leases);
        let d = &self.runtime.device;
        let blocks: Vec<BufferRef> =
            self.plan.blocks.iter().map(|b| d.alloc(*b, Tag::Activations)).collect::<Result<_>>()?;
        let slots: Vec<BufferRef> = self
            .plan
            .slots
            .iter()
            .map(|s| {
                let block = &blocks[s.block as usize];
                if s.offset == 0 && s.bytes == block.bytes() {
                    return Ok(block.clone());
                }
                d.part(block, s.offset, s.bytes)
            })
            .collect::<Result<_>>()?;
        let workspace = match self.plan.workspace {
            0 => None,
            n => Some(d.alloc(n, Tag::Workspace)?),
        };
        let buffer = |b: &BufId| match self.plan.buffers[b.0 as usize].storage {
            Storage::Input(_) | Storage::Output(_) => self.unbound.clone(),
            Storage::Const(i) => self.consts[i as usize].clone(),
            Storage::Packed(i) => self.packed[i as usize].clone(),
            Storage::Slot(i) => slots[i as usize].clone(),
        };
        let steps = &self.plan.steps;
        let mut buffers: Vec<Vec<BufferRef>> = steps
            .iter()
            .map(|s| {
                let own = workspace.clone().filter(|_| s.work.workspace() > 0);
                s.buffers.iter().map(buffer).chain(own).collect()
            })
            .collect();
        for (step, slot) in &self.plan.workspaces {
            buffers[*step as usize].push(slots[*slot as usize].clone());
        }
        let params = steps
            .iter()
            .map(|s| match &s.work {
                StepWork::Kernel { params, .. } => params.iter().map(|(v, _)| *v).collect(),
                _ => vec![],
            })
            .collect();
        Ok(Lease { buffers, params, last: None, captured: Bound::default() })
    }

    /// Takes bindings back and releases the buffers bound as inputs and outputs.
    pub(crate) fn give_back(&self, mut lease: Lease) {
        for places in self.uses.inputs.iter().chain(&self.uses.outputs) {
            lease.bind(places, &self.unbound);
        }
        lock(&self.leases).push(lease);
    }

    /// Binds a buffer as an input; it stays bound until another replaces it. Allocates nothing.
    pub(crate) fn bind_input(&self, lease: &mut Lease, i: usize, buffer: &BufferRef) -> Result<()> {
        if buffer.bytes() < self.input_bytes(i) {
            return Err(Error::internal(format!(
                "input {i} holds {} bytes, but the plan reads {}",
                buffer.bytes(),
                self.input_bytes(i)
            )));
        }
        if let Some(places) = self.uses.inputs.get(i) {
            lease.bind(places, buffer);
        }
        Ok(())
    }

    pub(crate) fn unbind_input(&self, lease: &mut Lease, i: usize) {
        if let Some(places) = self.uses.inputs.get(i) {
            lease.bind(places, &self.unbound);
        }
    }

    /// Bytes of an input that the plan reads; 0 if no step reads it.
    fn input_bytes(&self, i: usize) -> usize {
        let at = self.uses.inputs.get(i).and_then(|p| p.first());
        at.map_or(0, |(s, k)| {
            let b = self.plan.steps[*s as usize].buffers[*k as usize];
            self.plan.buffers[b.0 as usize].bytes
        })
    }

    pub(crate) fn bind_output(&self, lease: &mut Lease, k: usize, buffer: &BufferRef) {
        lease.bind(&self.uses.outputs[k], buffer);
    }

    /// The number of references that the bindings of output `k` hold on its buffer.
    pub(crate) fn output_references(&self, k: usize) -> usize {
        self.uses.outputs[k].len()
    }

    /// The donated input whose memory output `k` reuses, if any.
    pub(crate) fn output_is_input(&self, k: usize) -> Option<usize> {
        match self.plan.buffers[self.plan.outputs[k].buffer.0 as usize].storage {
            Storage::Input(i) => Some(i as usize),
            _ => None,
        }
    }

    /// The donated input whose memory output `k` reuses, or newly allocated memory.
    pub(crate) fn output_memory(&self, k: usize) -> Result<OutputMemory> {
        let spec = &self.plan.buffers[self.plan.outputs[k].buffer.0 as usize];
        match spec.storage {
            Storage::Input(i) => Ok(OutputMemory::Input(i as usize)),
            _ => self.runtime.device.alloc(spec.bytes, Tag::Io).map(OutputMemory::Own),
        }
    }

    /// Submits the plan. If this thread is inside of a [`crate::Stream::run`], the plan goes to that stream,
    /// otherwise to the device's own queue. `inputs` are in the graph's order, `args` are the values of
    /// run-time arguments. Inputs declared as donated when the plan was made may be overwritten, even if the
    /// run fails. Returns the outputs' buffers, which the caller owns.
    pub fn run(&self, inputs: &[BufferRef], args: &[Scalar]) -> Result<Vec<BufferRef>> {
        self.run_on(inputs, args, self.runtime.queues.current().as_deref())
            .map(|(out, _)| out)
            .map_err(|f| f.error)
    }

    /// Like [`Executable::run`], in the stream `on`, or in the device's own queue if `on` is `None`. In a
    /// stream, also returns the event of the run's completion. The error says whether donated inputs may have
    /// been overwritten.
    pub(crate) fn run_on(
        &self,
        inputs: &[BufferRef],
        args: &[Scalar],
        on: Option<&Queue>,
    ) -> Result<(Vec<BufferRef>, Option<Event>), RunError> {
        let (mut lease, outputs) = self.begin(inputs, on)?;
        let event = self.submit(&mut lease, args, on).map_err(|error| RunError { error, started: true })?;
        self.give_back(lease);
        Ok((outputs, event))
    }

    /// Copies outputs of a run to the host; waits for them. A fault of a kernel is reported as an error here.
    pub(crate) fn download(&self, outputs: &[BufferRef]) -> Result<Vec<ConstData>> {
        let one = |(o, b): (&PlanOutput, &BufferRef)| {
            let mut bytes = host::zeros(o.dtype.bytes(o.dims.iter().product()), "an output")?;
            self.runtime.device.read(b, 0, &mut bytes)?;
            ConstData::new(o.dtype, &o.dims, Arc::new(bytes))
        };
        let all = self.plan.outputs.iter().zip(outputs).map(one).collect::<Result<_>>()?;
        self.runtime.check_faults()?;
        Ok(all)
    }

    /// Binds the inputs and allocates the outputs of a run; submits nothing.
    pub(crate) fn begin(&self, inputs: &[BufferRef], on: Option<&Queue>) -> Result<(Lease, Vec<BufferRef>)> {
        if inputs.len() < self.uses.inputs.len() {
            return Err(Error::internal(format!("input {} is missing", inputs.len())));
        }
        let mut lease = self.lease(on)?;
        for (i, b) in inputs.iter().enumerate() {
            self.bind_input(&mut lease, i, b)?;
        }
        let mut outputs = Vec::with_capacity(self.plan.outputs.len());
        for k in 0..self.plan.outputs.len() {
            let b = match self.output_memory(k)? {
                OutputMemory::Input(i) => inputs[i].clone(),
                OutputMemory::Own(b) => b,
            };
            self.bind_output(&mut lease, k, &b);
            outputs.push(b);
        }
        Ok((lease, outputs))
    }

    /// Submits the plan with the current bindings. Allocates nothing, except for host steps, in streams, and
    /// when it captures the commands. Returns the event of the run's completion if it is in a stream.
    pub(crate) fn submit(
        &self,
        lease: &mut Lease,
        args: &[Scalar],
        on: Option<&Queue>,
    ) -> Result<Option<Event>> {
        self.set_args(lease, args);
        if self.watched.reads_indices() {
            self.watched.note(&lease.buffers);
        }
        // Once captures are given up, or if the plan has none, every command is submitted.
        let launched = match self.captures.off.load(Ordering::Relaxed) {
            true => Ok(false),
            false => self.launch_captured(lease, args, on),
        };
        if !matches!(launched, Ok(true)) {
            self.captures.submitted.fetch_add(1, Ordering::Relaxed);
        }
        if !launched? {
            self.submit_steps(lease, args, 0..self.plan.steps.len(), on)?;
        }
        let s = &self.runtime.stats;
        s.runs.fetch_add(1, Ordering::Relaxed);
        s.steps.fetch_add(self.plan.steps.len() as u64, Ordering::Relaxed);
        let Some(queue) = on else {
            lease.last = None;
            return Ok(None);
        };
        let event = queue.raw.record()?;
        self.runtime.unreported.track(queue.id, &event);
        lease.last = Some((queue.id, event.clone()));
        Ok(Some(event))
    }

    /// Sets the kernel parameters that take run-time arguments.
    fn set_args(&self, lease: &mut Lease, args: &[Scalar]) {
        for ((step, param), arg) in &self.uses.args {
            let StepWork::Kernel { params, .. } = &self.plan.steps[*step as usize].work else { continue };
            let value = args.get(*arg as usize).copied().unwrap_or(params[*param as usize].0);
            lease.params[*step as usize][*param as usize] = value;
        }
    }

    /// Submits a range of the plan's steps, in order.
    pub(crate) fn submit_steps(
        &self,
        lease: &Lease,
        args: &[Scalar],
        steps: Range<usize>,
        on: Option<&Queue>,
    ) -> Result<()> {
        let d = &*self.runtime.device;
        let batch = cancel::batch(d.info().backend, BATCH);
        let mut commands: SmallVec<[Command<'_>; BATCH]> = SmallVec::new();
        for (i, s) in self.plan.steps.iter().enumerate().take(steps.end).skip(steps.start) {
            if commands.len() >= batch {
                submit(d, on, &commands)?;
                commands.clear();
                cancel::check(|| format!("a run, before step {i} of {}", self.plan.steps.len()))?;
            }
            if let Some(c) = self.command(lease, i, args)? {
                commands.push(c);
            } else if let StepWork::Host(h) = &s.work {
                submit(d, on, &commands)?;
                commands.clear();
                // The device orders the host's reads and writes of buffers with the commands of the stream.
                on_host(d, s, h, &lease.buffers[i])?;
            }
        }
        submit(d, on, &commands)
    }

    /// The command of a step; `None` if it runs on the host.
    pub(crate) fn command<'a>(
        &'a self,
        lease: &'a Lease,
        step: usize,
        args: &'a [Scalar],
    ) -> Result<Option<Command<'a>>> {
        let fault = self.fault_base + step as u32;
        let buffers = &lease.buffers[step][..];
        Ok(match &self.plan.steps[step].work {
            StepWork::Library(kernel) => Some(Command::Library { kernel, buffers, args, fault }),
            StepWork::Kernel { groups, .. } => {
                let program = self.programs[step]
                    .as_ref()
                    .ok_or_else(|| Error::internal("a kernel without a program"))?;
                let params = &lease.params[step];
                Some(Command::Launch { program, groups: *groups, buffers, params, fault })
            }
            StepWork::Host(_) => None,
        })
    }

    /// The kernel parameters that take run-time arguments, as (step, number), with their current values.
    pub(crate) fn arguments(&self, lease: &Lease) -> impl Iterator<Item = ((usize, usize), Scalar)> {
        self.uses.args.iter().map(|((step, k), _)| {
            let at = (*step as usize, *k as usize);
            (at, lease.params[at.0][at.1])
        })
    }
}

/// The error of a run.
#[derive(Debug)]
pub(crate) struct RunError {
    pub(crate) error: Error,
    /// Commands were submitted and some may have run: donated inputs may have been overwritten.
    pub(crate) started: bool,
}

impl From<Error> for RunError {
    fn from(error: Error) -> RunError {
        RunError { error, started: false }
    }
}

/// The memory of an output.
pub(crate) enum OutputMemory {
    Input(usize),
    Own(BufferRef),
}

impl Lease {
    /// Lets the first run capture its commands, because these bindings are kept. (If the plan has library
    /// kernels, the second run with the same buffers captures them.)
    pub(crate) fn capture_at_once(&mut self) {
        self.captured.at_once = true;
    }

    /// The buffer bound to a step at a position among its buffers.
    pub(crate) fn buffer(&self, step: usize, place: usize) -> &BufferRef {
        &self.buffers[step][place]
    }

    fn bind(&mut self, places: &[(u32, u32)], buffer: &BufferRef) {
        for (step, k) in places {
            self.buffers[*step as usize][*k as usize].clone_from(buffer);
        }
    }
}

/// Runs a custom op's reference on the host, with inputs read back from the device.
fn on_host(d: &dyn Device, s: &Step, h: &HostWork, buffers: &[BufferRef]) -> Result<()> {
    let ins = h
        .inputs
        .iter()
        .zip(buffers)
        .map(|(o, b)| {
            let mut bytes = host::zeros(o.dtype.bytes(o.view.numel()), &s.op)?;
            d.read(b, 0, &mut bytes)?;
            ConstData::new(o.dtype, &o.view.shape, Arc::new(bytes))
        })
        .collect::<Result<Vec<_>>>()?;
    let out = h.op.op().reference(&ins).map_err(|e| e.at(&s.span))?;
    if out.dtype != h.output.dtype || out.dims != h.output.view.shape {
        let what = format!(
            "the reference returned {out:?}, but the type rule says {}{:?}",
            h.output.dtype, h.output.view.shape
        );
        return Err(Error::shape(s.op.clone(), what).at(&s.span));
    }
    d.write(&buffers[h.inputs.len()], 0, out.bytes())
}

/// Submits commands to a queue, or to the device's own.
pub(crate) fn submit(device: &dyn Device, on: Option<&Queue>, commands: &[Command<'_>]) -> Result<()> {
    match on {
        Some(q) => q.raw.submit(commands),
        None => device.submit(commands),
    }
}

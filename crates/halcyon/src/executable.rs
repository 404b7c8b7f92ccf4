//! A plan with its programs and constants, ready to run any number of times.

use crate::backend::Backend;
use crate::fit::Fit;
use halcyon_hal::{BufferRef, Command, Program, Tag, heap};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::host;
use halcyon_ir::plan::{Plan, StepWork, Storage};
use halcyon_ir::{ConstData, Scalar};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Where fault ids come from: a range of ids per plan.
#[derive(Debug)]
pub(crate) struct FaultTable {
    next: AtomicU32,
    plans: Mutex<BTreeMap<u32, Arc<Vec<(String, Span, String)>>>>,
}

impl Default for FaultTable {
    fn default() -> Self {
        FaultTable { next: AtomicU32::new(1), plans: Mutex::default() }
    }
}

impl FaultTable {
    fn register(&self, steps: Vec<(String, Span, String)>) -> u32 {
        let base = self.next.fetch_add(steps.len().max(1) as u32, Ordering::Relaxed);
        let mut m = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        m.insert(base, Arc::new(steps));
        // Faults are collected soon after their run; old plans' entries are of no use.
        while m.len() > 4096 {
            m.pop_first();
        }
        base
    }

    pub(crate) fn explain(&self, id: u32) -> Error {
        let m = self.plans.lock().unwrap_or_else(|e| e.into_inner());
        match m.range(..=id).next_back().and_then(|(base, v)| v.get((id - base) as usize)) {
            Some((op, at, range)) => Error::Index { op: op.clone(), range: range.clone(), at: at.clone() },
            None => Error::internal(format!("a kernel reported the unknown fault {id}")),
        }
    }
}

/// Scratch of one run in flight.
#[derive(Debug)]
struct Arena {
    /// The plan's slots: blocks, or parts of them, which keep the blocks alive.
    slots: Vec<BufferRef>,
    workspace: Option<BufferRef>,
}

/// A plan, compiled for its backend.
#[derive(Debug)]
pub struct Executable {
    plan: Plan,
    programs: Vec<Option<Arc<dyn Program>>>,
    consts: Vec<BufferRef>,
    packed: Vec<BufferRef>,
    /// Scratch that no run holds. A device runs its commands in order, so scratch is free again once a run is submitted.
    arenas: Mutex<Vec<Arena>>,
    fault_base: u32,
}

/// Refuses a plan that needs more memory than the device has left, before anything of it is allocated: scratch, outputs, and
/// the constants that are copied to the device.
fn fits(backend: &Backend, plan: &Plan) -> Result<()> {
    // Inputs are there already, or come later.
    let fit = Fit::of(backend, plan, &[]);
    let need = fit.device();
    // Finding out what is free costs more than a small plan. The pool checks its limit in any case.
    if need < 16 << 20 {
        return Ok(());
    }
    heap::trim();
    match backend.device().available() {
        Some(free) if need > free => Err(fit.refusal(backend, plan, need, free)),
        _ => Ok(()),
    }
}

impl Executable {
    pub(crate) fn new(backend: &Backend, plan: Plan) -> Result<Executable> {
        fits(backend, &plan)?;
        let programs = plan
            .steps
            .iter()
            .map(|s| match &s.work {
                StepWork::Kernel { kernel, .. } => backend.program(kernel).map(Some),
                _ => Ok(None),
            })
            .collect::<Result<_>>()?;
        let consts = plan.consts.iter().map(|c| backend.constant(c)).collect::<Result<_>>()?;
        let packed = plan.packed.iter().map(|p| backend.packed(p)).collect::<Result<_>>()?;
        let faults = plan.steps.iter().map(|s| (s.op.clone(), s.span.clone(), s.range.clone())).collect();
        let fault_base = backend.0.faults.register(faults);
        Ok(Executable { plan, programs, consts, packed, arenas: Mutex::default(), fault_base })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Source of every generated kernel, once each: (name, source).
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

    fn lease(&self, backend: &Backend) -> Result<Arena> {
        if let Some(a) = self.arenas.lock().unwrap_or_else(|e| e.into_inner()).pop() {
            return Ok(a);
        }
        let d = backend.device();
        let blocks: Vec<BufferRef> =
            self.plan.blocks.iter().map(|b| d.alloc(*b, Tag::Activations)).collect::<Result<_>>()?;
        let slots = self
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
        Ok(Arena { slots, workspace })
    }

    /// Submits the plan. `inputs` in the graph's order; those the plan was told are donated may be overwritten. Returns the
    /// outputs' buffers, which the caller owns.
    pub fn run(&self, backend: &Backend, inputs: &[BufferRef], args: &[Scalar]) -> Result<Vec<BufferRef>> {
        let d = backend.device();
        let arena = self.lease(backend)?;
        let mut outputs: Vec<Option<BufferRef>> = vec![None; self.plan.outputs.len()];
        let mut buffers: Vec<BufferRef> = Vec::with_capacity(self.plan.buffers.len());
        for spec in &self.plan.buffers {
            buffers.push(match spec.storage {
                Storage::Input(i) => {
                    let b = inputs
                        .get(i as usize)
                        .ok_or_else(|| Error::internal(format!("input {i} is missing")))?;
                    if b.bytes() < spec.bytes {
                        return Err(Error::internal(format!(
                            "input {i} holds {} bytes, the plan reads {}",
                            b.bytes(),
                            spec.bytes
                        )));
                    }
                    b.clone()
                }
                Storage::Const(i) => self.consts[i as usize].clone(),
                Storage::Packed(i) => self.packed[i as usize].clone(),
                Storage::Slot(i) => arena.slots[i as usize].clone(),
                Storage::Output(i) => {
                    let b = d.alloc(spec.bytes, Tag::Io)?;
                    outputs[i as usize] = Some(b.clone());
                    b
                }
            });
        }
        let step_buffers: Vec<Vec<BufferRef>> = self
            .plan
            .steps
            .iter()
            .map(|s| {
                let mut v: Vec<BufferRef> = s.buffers.iter().map(|b| buffers[b.0 as usize].clone()).collect();
                if let (StepWork::Library(k), Some(w)) = (&s.work, &arena.workspace)
                    && k.workspace() > 0
                {
                    v.push(w.clone());
                }
                v
            })
            .collect();
        let params: Vec<Vec<Scalar>> = self
            .plan
            .steps
            .iter()
            .map(|s| match &s.work {
                StepWork::Kernel { params, .. } => params
                    .iter()
                    .map(|(v, arg)| arg.and_then(|a| args.get(a as usize).copied()).unwrap_or(*v))
                    .collect(),
                _ => vec![],
            })
            .collect();
        let mut commands: Vec<Command<'_>> = Vec::with_capacity(self.plan.steps.len());
        for (i, s) in self.plan.steps.iter().enumerate() {
            let fault = self.fault_base + i as u32;
            match &s.work {
                StepWork::Library(kernel) => {
                    commands.push(Command::Library { kernel, buffers: &step_buffers[i], args, fault });
                }
                StepWork::Kernel { groups, .. } => {
                    let program = self.programs[i]
                        .as_ref()
                        .ok_or_else(|| Error::internal("a kernel without a program"))?;
                    commands.push(Command::Launch {
                        program,
                        groups: *groups,
                        buffers: &step_buffers[i],
                        params: &params[i],
                        fault,
                    });
                }
                StepWork::Host(h) => {
                    d.submit(&commands)?;
                    commands.clear();
                    let ins = h
                        .inputs
                        .iter()
                        .zip(&step_buffers[i])
                        .map(|(o, b)| {
                            let mut bytes = host::zeros(o.dtype.bytes(o.view.numel()), &s.op)?;
                            d.read(b, 0, &mut bytes)?;
                            ConstData::new(o.dtype, &o.view.shape, Arc::new(bytes))
                        })
                        .collect::<Result<Vec<_>>>()?;
                    let out = h.op.op().reference(&ins).map_err(|e| e.at(&s.span))?;
                    if out.dtype != h.output.dtype || out.dims != h.output.view.shape {
                        return Err(Error::shape(
                            s.op.clone(),
                            format!(
                                "the reference gave {out:?}, its type rule {}{:?}",
                                h.output.dtype, h.output.view.shape
                            ),
                        )
                        .at(&s.span));
                    }
                    d.write(&step_buffers[i][h.inputs.len()], 0, out.bytes())?;
                }
            }
        }
        d.submit(&commands)?;
        drop(commands);
        let s = &backend.0.stats;
        s.runs.fetch_add(1, Ordering::Relaxed);
        s.steps.fetch_add(self.plan.steps.len() as u64, Ordering::Relaxed);
        self.arenas.lock().unwrap_or_else(|e| e.into_inner()).push(arena);
        self.plan
            .outputs
            .iter()
            .zip(outputs)
            .map(|(o, fresh)| Ok(fresh.unwrap_or_else(|| buffers[o.buffer.0 as usize].clone())))
            .collect()
    }
}

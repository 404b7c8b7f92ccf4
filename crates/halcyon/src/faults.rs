//! Turns the outcome of work into errors: finds the step that a fault belongs to, and the index that was out
//! of range. Also keeps the runs whose outcome has not been reported yet.

use crate::runtime::Runtime;
use crate::sync::lock;
use halcyon_hal::{Buffer, BufferRef, Device, Event};
use halcyon_host as host;
use halcyon_ir::ConstData;
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::plan::{Bounds, BufId, Plan, Storage};
use halcyon_ir::target::Operand;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Allocates fault ids: each plan gets a range, one id per step.
#[derive(Debug)]
pub(crate) struct FaultTable {
    next: AtomicU32,
    plans: Mutex<BTreeMap<u32, Arc<FaultContext>>>,
}

/// The facts about a plan's steps that error messages contain: their ops, and the buffers of indices in the
/// last run.
#[derive(Debug)]
pub(crate) struct FaultContext {
    /// Op, span and index bounds of each step.
    steps: Vec<(String, Span, Option<Bounds>)>,
    /// Steps whose indices are still in memory when a fault is read, and the position of the buffer of
    /// indices among the step's buffers.
    read: Vec<(u32, u32)>,
    /// The buffers of those indices in the last run. An error looks for the bad index there.
    last: Mutex<Vec<Option<Weak<dyn Buffer>>>>,
}

impl FaultContext {
    pub(crate) fn of(plan: &Plan) -> FaultContext {
        let steps = plan.steps.iter().map(|s| (s.op.clone(), s.span.clone(), s.bounds.clone())).collect();
        let mut read = vec![];
        for (i, s) in plan.steps.iter().enumerate() {
            let Some(b) = &s.bounds else { continue };
            let lasts = |id: &BufId| match plan.buffers[id.0 as usize].storage {
                Storage::Slot(_) => b.kept,
                Storage::Packed(_) => false,
                _ => true,
            };
            if s.buffers.get(b.place).is_some_and(lasts) {
                read.push((i as u32, b.place as u32));
            }
        }
        let last = Mutex::new(vec![None; read.len()]);
        FaultContext { steps, read, last }
    }

    /// Whether [`FaultContext::note`] has any buffers to remember.
    pub(crate) fn reads_indices(&self) -> bool {
        !self.read.is_empty()
    }

    /// Remembers the buffers of a run's indices; `bound` are the buffers of each step. Allocates nothing.
    pub(crate) fn note(&self, bound: &[Vec<BufferRef>]) {
        let mut last = lock(&self.last);
        for ((step, place), seen) in self.read.iter().zip(last.iter_mut()) {
            let buffer = &bound[*step as usize][*place as usize];
            // If the buffer is the same as in the last run, avoid the cost of a new weak reference.
            if !seen.as_ref().is_some_and(|w| std::ptr::addr_eq(w.as_ptr(), Arc::as_ptr(buffer))) {
                *seen = Some(Arc::downgrade(buffer));
            }
        }
    }

    /// Position and value of the first out-of-range index of a step, if the indices can still be read.
    fn find(&self, step: usize, device: &dyn Device) -> Option<(usize, i64)> {
        let bounds = self.steps.get(step)?.2.as_ref()?;
        let k = self.read.iter().position(|(s, _)| *s as usize == step)?;
        let buffer = {
            let last = lock(&self.last);
            last.get(k)?.as_ref()?.upgrade()?
        };
        let Operand { dtype, view } = &bounds.indices;
        let mut bytes = host::zeros(buffer.bytes(), "the indices of an error").ok()?;
        device.read(&buffer, 0, &mut bytes).ok()?;
        let all = ConstData::new(*dtype, &[bytes.len() / dtype.size().max(1)], Arc::new(bytes)).ok()?;
        let all = all.to_vec::<i64>();
        let mut at: Vec<usize> = vec![0; view.rank()];
        for n in 0..view.numel() {
            let place = at.iter().zip(&view.strides).fold(view.offset, |p, (i, s)| p + *i as isize * s);
            let value = *all.get(usize::try_from(place).ok()?)?;
            if !bounds.allows(value) {
                return Some((n, value));
            }
            for k in (0..at.len()).rev() {
                at[k] += 1;
                if at[k] < view.shape[k] {
                    break;
                }
                at[k] = 0;
            }
        }
        None
    }
}

impl Default for FaultTable {
    fn default() -> Self {
        FaultTable { next: AtomicU32::new(1), plans: Mutex::default() }
    }
}

impl FaultTable {
    pub(crate) fn register(&self, plan: Arc<FaultContext>) -> u32 {
        let base = self.next.fetch_add(plan.steps.len().max(1) as u32, Ordering::Relaxed);
        let mut m = lock(&self.plans);
        m.insert(base, plan);
        // Faults are read soon after their run, so entries of old plans are not needed.
        while m.len() > 4096 {
            m.pop_first();
        }
        base
    }

    pub(crate) fn explain(&self, id: u32, device: &dyn Device) -> Error {
        let found = {
            let m = lock(&self.plans);
            m.range(..=id).next_back().map(|(base, w)| ((id - base) as usize, w.clone()))
        };
        match found.as_ref().and_then(|(step, w)| Some((w.steps.get(*step)?, w.find(*step, device)))) {
            Some(((op, at, bounds), found)) => Error::Index {
                op: op.clone(),
                range: bounds.as_ref().map(|b| b.to_string()).unwrap_or_default(),
                at: at.clone(),
                found,
                input: None,
            },
            None => Error::internal(format!("a kernel reported the unknown fault {id}")),
        }
    }
}

/// The runs in streams whose outcome has not been reported: the number of the queue, and the event after the
/// run.
#[derive(Debug, Default)]
pub(crate) struct Unreported(Mutex<Vec<(u64, Event)>>);

impl Unreported {
    /// Keeps the event of a run until its outcome is reported.
    pub(crate) fn track(&self, queue: u64, event: &Event) {
        let mut all = lock(&self.0);
        all.retain(|(_, e)| !e.is_done() || !matches!(e.known_outcome(), Ok(None)));
        all.push((queue, event.clone()));
    }

    /// Marks the outcome of a run as reported.
    pub(crate) fn reported(&self, event: &Event) {
        lock(&self.0).retain(|(_, e)| !e.is_same(event));
    }

    /// The first fault found so far by work whose outcome has not been reported.
    pub(crate) fn fault(&self) -> Option<u32> {
        let mut all = lock(&self.0);
        let at = all.iter().position(|(_, e)| matches!(e.known_outcome(), Ok(Some(_))))?;
        all.remove(at).1.known_outcome().ok().flatten()
    }

    /// Takes the events of the runs of one queue, or of all, whose outcome has not been reported.
    pub(crate) fn take(&self, queue: Option<u64>) -> Vec<Event> {
        let mut taken = vec![];
        lock(&self.0).retain(|(id, e)| {
            let is = queue.is_none_or(|q| q == *id);
            if is {
                taken.push(e.clone());
            }
            !is
        });
        taken
    }
}

impl Runtime {
    /// Turns the outcome of work into a result. A number is a fault's id; the error names the op.
    pub(crate) fn explain(&self, outcome: Result<Option<u32>>) -> Result<()> {
        match outcome? {
            None => Ok(()),
            Some(id) => Err(self.faults.explain(id, &*self.device)),
        }
    }

    /// Waits for the device, and turns the first fault of a kernel into an error that names the op.
    pub(crate) fn check_faults(&self) -> Result<()> {
        match self.device.take_fault()? {
            None => self.check_queues(),
            fault => self.explain(Ok(fault)),
        }
    }

    /// Returns the error for the first fault that finished work found and that has not been reported yet.
    pub(crate) fn check_queues(&self) -> Result<()> {
        self.explain(Ok(self.unreported.fault()))
    }

    /// Waits for the runs of one queue, or of all; returns the first error not yet reported.
    pub(crate) fn wait_for_runs(&self, queue: Option<u64>) -> Result<()> {
        let events = self.unreported.take(queue);
        let outcomes: Vec<Result<()>> = events.iter().map(|e| self.explain(e.wait())).collect();
        outcomes.into_iter().collect()
    }
}

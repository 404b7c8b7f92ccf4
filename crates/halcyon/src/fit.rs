//! `Fit`: the memory need of a plan, computed from the plan and the device's properties, without uploading or
//! allocating anything.

use halcyon_hal::{Device, Tag};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::plan::{Live, Plan, Storage};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

/// Places ranges of these sizes one after the other, each aligned to `align` bytes. Returns their offsets and
/// the total size.
pub(crate) fn offsets(sizes: &[usize], align: usize) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let mut at = |n: &usize| {
        let start = end.checked_next_multiple_of(align).unwrap_or(usize::MAX);
        end = start.saturating_add(*n);
        start
    };
    let starts = sizes.iter().map(&mut at).collect();
    (starts, end)
}

/// The memory, in bytes, that one run of a plan needs. Device memory is counted as the device counts it
/// ([`halcyon_hal::MemoryStats`]), with each allocation rounded up. Other plans and tensors are not included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Bytes of constants that the device reads in place from host memory; not part of [`Fit::device`].
    pub weights_in_place: u64,
    /// Bytes of constants that are copied to the device.
    pub weights: u64,
    /// Bytes of packed constants.
    pub packed: u64,
    /// Host memory in bytes that packing needs temporarily, before a run; not part of [`Fit::device`].
    pub packing: u64,
    /// Scratch memory, which buffers with different lifetimes share. It includes the workspace of kernels if
    /// workspace can be placed in scratch.
    pub activations: u64,
    /// A lower bound on scratch for any placement, and the step that needs it. Not rounded.
    #[serde(skip)]
    pub live: Live,
    /// The largest workspace of a kernel, if workspace is a separate buffer.
    pub workspace: u64,
    /// The inputs, as device buffers.
    pub inputs: u64,
    /// The outputs, as device buffers.
    pub outputs: u64,
}

impl Fit {
    /// Computes the need of a plan. Queries the device for the size of each allocation, and for the constants
    /// that it reads in place. `inputs` are the sizes in bytes of all inputs uploaded for a run, including
    /// those the plan does not read.
    pub fn of(device: &dyn Device, plan: &Plan, inputs: &[usize]) -> Fit {
        Fit::of_all(device, &[plan], inputs)
    }

    /// Like [`Fit::of`], for plans that run one after the other and keep their memory: constants count once;
    /// scratch, workspace and outputs are summed; [`Fit::packing`] and [`Fit::live`] are the largest of all
    /// plans.
    pub fn of_all(device: &dyn Device, plans: &[&Plan], inputs: &[usize]) -> Fit {
        let takes = |bytes: usize, tag: Tag| device.footprint(bytes, tag) as u64;
        let add = |to: &mut u64, n: u64| *to = to.saturating_add(n);
        let mut f = Fit::default();
        inputs.iter().for_each(|b| add(&mut f.inputs, takes(*b, Tag::Io)));
        // A constant is stored once, however many plans read it.
        let (mut seen, mut packed) = (HashSet::new(), HashSet::new());
        for plan in plans {
            for c in plan.consts.iter().filter(|c| seen.insert(c.key())) {
                match device.import(c.owner()) {
                    Some(_) => add(&mut f.weights_in_place, c.bytes().len() as u64),
                    None => add(&mut f.weights, takes(c.bytes().len(), Tag::Weights)),
                }
            }
            let constants: Vec<&[u8]> = plan.packed.iter().map(|p| p.data.bytes()).collect();
            f.packing = f.packing.max(device.pack_room(&constants) as u64);
            let new = plan.packed.iter().filter_map(|p| {
                let packing = p.kernel.packing()?;
                packed.insert((p.data.key(), packing)).then_some(packing.bytes)
            });
            let sizes: Vec<usize> = new.collect();
            match device.as_target().part_alignment() {
                Some(align) if !sizes.is_empty() => {
                    add(&mut f.packed, takes(offsets(&sizes, align).1, Tag::Weights))
                }
                _ => sizes.iter().for_each(|n| add(&mut f.packed, takes(*n, Tag::Weights))),
            }
            plan.blocks
                .iter()
                .filter(|b| **b > 0)
                .for_each(|b| add(&mut f.activations, takes(*b, Tag::Activations)));
            if plan.workspace > 0 {
                add(&mut f.workspace, takes(plan.workspace, Tag::Workspace));
            }
            for b in plan.buffers.iter().filter(|b| matches!(b.storage, Storage::Output(_))) {
                add(&mut f.outputs, takes(b.bytes, Tag::Io));
            }
            let live = plan.live();
            if live.bytes > f.live.bytes {
                f.live = live;
            }
        }
        f
    }

    /// Bytes of device memory in use while the plan runs: the peak if the device does nothing else.
    pub fn device(&self) -> u64 {
        [self.weights, self.packed, self.activations, self.workspace, self.inputs, self.outputs]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// The memory that the plan needs while it runs, by kind, in bytes. Weights read in place are in host
    /// memory.
    pub fn parts(&self) -> [(&'static str, u64); 7] {
        [
            ("weights read in place", self.weights_in_place),
            ("weights", self.weights),
            ("packed weights", self.packed),
            ("activations", self.activations),
            ("workspace", self.workspace),
            ("inputs", self.inputs),
            ("outputs", self.outputs),
        ]
    }

    /// The sum of [`Fit::parts`]: [`Fit::device`] plus the weights read in place.
    pub fn total(&self) -> u64 {
        self.parts().iter().fold(0, |sum, (_, n)| sum.saturating_add(*n))
    }

    /// [`Fit::device`] by purpose, without zero entries.
    pub fn by_tag(&self) -> BTreeMap<Tag, u64> {
        let io = self.inputs.saturating_add(self.outputs);
        let all = [
            (Tag::Weights, self.weights.saturating_add(self.packed)),
            (Tag::Activations, self.activations),
            (Tag::Workspace, self.workspace),
            (Tag::Io, io),
        ];
        all.into_iter().filter(|(_, n)| *n > 0).collect()
    }

    /// Rejects a plan that needs more memory than its device has left.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the need and the free memory.
    pub fn check(&self, device: &dyn Device, plan: &Plan) -> Result<()> {
        let need = self.device();
        match device.available() {
            Some(free) if need > free => Err(self.refusal(device, plan, need, free)),
            _ => Ok(()),
        }
    }

    /// The error for a plan that needs `need` bytes when `free` bytes are left.
    pub fn refusal(&self, device: &dyn Device, plan: &Plan, need: u64, free: u64) -> Error {
        // Name the step with the largest output.
        let largest = plan.steps.iter().max_by_key(|s| {
            let written = s.buffers.iter().rev().take(s.outputs);
            written.map(|b| plan.buffers[b.0 as usize].bytes).max().unwrap_or(0)
        });
        let at = largest.map_or(String::new(), |s| match s.span.is_known() {
            true => format!(", the most for {} at {}", s.op, s.span.text()),
            false => format!(", the most for {}", s.op),
        });
        Error::OutOfMemory {
            device: device.info().id.clone(),
            what: format!(
                "the plan: scratch {}, outputs {}, constants {}, packed constants {}{at}{}",
                self.activations.saturating_add(self.workspace),
                self.outputs,
                self.weights,
                self.packed,
                device.unknown_free()
            ),
            requested: need,
            free,
            total: device.memory().limit.or(device.info().total_memory).unwrap_or(free),
            next: "Use smaller inputs, or raise the memory limit".into(),
        }
    }
}

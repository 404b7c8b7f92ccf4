//! Plans: the executable form of a graph for one device, with concrete sizes.

use crate::custom::Custom;
use crate::data::ConstData;
use crate::dtype::{DType, Scalar};
use crate::error::Span;
use crate::fused::Fused;
use crate::kernel::Kernel;
use crate::kernel::tune::Tunable;
use crate::shape::Dims;
use crate::target::{LibraryKernel, Operand};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Index of a buffer in its plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BufId(pub u32);

/// Where a buffer's memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Storage {
    /// The run's input with this index. It is written only if it was donated.
    Input(u32),
    /// The entry of `Plan::consts` with this index, uploaded once.
    Const(u32),
    /// The entry of `Plan::packed` with this index, packed once.
    Packed(u32),
    /// Scratch memory: the entry of `Plan::slots` with this index. Buffers whose lifetimes do not overlap may
    /// share memory.
    Slot(u32),
    /// The run's output with this index. It is allocated for each run and outlives the run.
    Output(u32),
}

/// Size and storage of a buffer.
#[derive(Clone, Debug)]
pub struct BufferSpec {
    pub bytes: usize,
    pub storage: Storage,
}

/// A place in a plan's scratch memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// Index into `Plan::blocks`.
    pub block: u32,
    /// Offset from the start of the block in bytes. 0 if the target does not support parts of buffers.
    pub offset: usize,
    pub bytes: usize,
}

/// The largest set of scratch buffers that are live at the same time. Its size is a lower bound for any
/// layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Live {
    /// Total bytes of these buffers. The first use of each is at `step` or before it, and its last use is at
    /// `step` or after it.
    pub bytes: usize,
    /// The first step at which the total is largest.
    pub step: usize,
    /// Number of these buffers.
    pub buffers: usize,
}

/// How a step runs.
#[derive(Clone, Debug)]
pub enum StepWork {
    /// A library kernel. It gets the step's buffers, then the workspace if it needs one.
    Library(Arc<dyn LibraryKernel>),
    /// A generated kernel. A parameter with an argument index takes the value of that run-time argument.
    Kernel { kernel: Arc<Kernel>, groups: [u32; 3], params: Vec<(Scalar, Option<u32>)> },
    /// The reference of a custom op, run on the host: operands are read back and the result is uploaded.
    Host(Box<HostWork>),
}

/// A custom op's reference with the types of its operands.
#[derive(Clone, Debug)]
pub struct HostWork {
    pub op: Custom,
    pub inputs: Vec<Operand>,
    pub output: Operand,
}

/// The indices that a step reads and their valid range, for the error when an index is outside of the range.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounds {
    /// Position of the index buffer in the step's buffers.
    pub place: usize,
    pub indices: Operand,
    pub low: i64,
    /// One past the largest valid index.
    pub end: i64,
    /// An index value that is skipped, whether or not it is in range.
    pub ignore: Option<i64>,
    /// Whether the indices' memory is kept unchanged until the end of the plan, so that the error of a bad
    /// index can quote its value and position.
    pub kept: bool,
}

impl Bounds {
    /// Whether `index` is in range or equal to `ignore`.
    pub fn allows(&self, index: i64) -> bool {
        (self.low..self.end).contains(&index) || self.ignore == Some(index)
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.low, self.end)
    }
}

/// One entry of a plan: the work, its buffers, and what it computes.
#[derive(Clone, Debug)]
pub struct Step {
    pub work: StepWork,
    /// Inputs, then outputs.
    pub buffers: Vec<BufId>,
    /// Number of trailing entries of `buffers` that are written.
    pub outputs: usize,
    pub op: String,
    pub span: Span,
    /// For a step that reads by index: the valid indices.
    pub bounds: Option<Bounds>,
    pub flops: u64,
    pub bytes: u64,
    /// Number of graph nodes that this step computes.
    pub nodes: usize,
    /// The fused kernel that this step runs, or the chain that its kernel applies as an epilogue.
    pub fused: Option<Arc<Fused>>,
    /// The variants of the step's kernel. Set only for generated kernels, and only if kernels are tuned.
    pub tunable: Option<Arc<Tunable>>,
}

impl Step {
    /// The buffers that the step reads.
    pub fn reads(&self) -> &[BufId] {
        &self.buffers[..self.buffers.len() - self.outputs]
    }

    /// The buffers that the step writes.
    pub fn writes(&self) -> &[BufId] {
        &self.buffers[self.buffers.len() - self.outputs..]
    }
}

/// An output of a plan: its buffer, dtype and shape.
#[derive(Clone, Debug)]
pub struct PlanOutput {
    pub buffer: BufId,
    pub dtype: DType,
    pub dims: Dims,
}

/// A transformation that changed the executable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    pub transformation: String,
    /// Number of times it was applied.
    pub count: usize,
    /// Bytes by which constants shrank, for transformations with that purpose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Speedup: time without it divided by time with it, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gain: Option<f64>,
    /// Largest difference from O0 relative to the largest O0 value, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

impl Receipt {
    pub fn new(transformation: &str, count: usize) -> Receipt {
        Receipt { transformation: transformation.into(), count, bytes: None, gain: None, error: None }
    }
}

/// A packed constant, shared by all kernels that read it in the same layout.
#[derive(Clone, Debug)]
pub struct PackedConst {
    pub data: ConstData,
    /// Its [`LibraryKernel::packing`] describes the layout.
    pub kernel: Arc<dyn LibraryKernel>,
}

/// The steps, buffers and memory slots of one graph at one set of sizes, for one target.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub buffers: Vec<BufferSpec>,
    pub consts: Vec<ConstData>,
    pub packed: Vec<PackedConst>,
    /// Size of each scratch block in bytes. A run allocates the blocks. There is only one if the target
    /// supports parts of buffers.
    pub blocks: Vec<usize>,
    /// The places in the blocks that scratch buffers and workspaces use.
    pub slots: Vec<Slot>,
    /// The largest workspace of any step in bytes, if the workspace is a separate buffer; 0 if workspaces are
    /// slots in the scratch memory.
    pub workspace: usize,
    /// `(step, slot)` for each step whose kernel needs a workspace. Empty if the workspace is a separate
    /// buffer.
    pub workspaces: Vec<(u32, u32)>,
    pub steps: Vec<Step>,
    pub outputs: Vec<PlanOutput>,
    pub args: Vec<DType>,
    pub receipts: Vec<Receipt>,
    /// Messages for the user: transformations of the level that were not applied, with the reason; products
    /// that are computed in parts; custom ops that run on the host.
    pub warnings: Vec<String>,
}

impl Plan {
    /// Total FLOPs of all steps.
    pub fn flops(&self) -> u64 {
        self.steps.iter().fold(0, |n, s| n.saturating_add(s.flops))
    }

    /// Total bytes moved by all steps.
    pub fn bytes(&self) -> u64 {
        self.steps.iter().fold(0, |n, s| n.saturating_add(s.bytes))
    }

    /// Bytes of scratch memory, including workspaces.
    pub fn scratch(&self) -> usize {
        self.blocks.iter().fold(self.workspace, |n, s| n.saturating_add(*s))
    }

    /// The first and last step that use each buffer; `None` for buffers that no step uses.
    pub fn lifetimes(&self) -> Vec<Option<(usize, usize)>> {
        let mut life: Vec<Option<(usize, usize)>> = vec![None; self.buffers.len()];
        for (t, s) in self.steps.iter().enumerate() {
            for b in &s.buffers {
                let l = life[b.0 as usize].get_or_insert((t, t));
                l.1 = t;
            }
        }
        // Kept indices are read after the run for error reports, so no later step may overwrite them.
        for s in &self.steps {
            if let Some(b) = s.bounds.as_ref().filter(|b| b.kept)
                && let Some(l) = s.buffers.get(b.place).and_then(|b| life[b.0 as usize].as_mut())
            {
                l.1 = self.steps.len() - 1;
            }
        }
        life
    }

    /// The largest set of scratch buffers that are live at the same time, without workspaces.
    /// [`Plan::needed`] includes workspaces.
    pub fn live(&self) -> Live {
        // `(bytes, buffers)` that become live and that die at each step.
        let mut starts = vec![(0usize, 0usize); self.steps.len()];
        let mut ends = starts.clone();
        for (spec, life) in self.buffers.iter().zip(self.lifetimes()) {
            if let (Storage::Slot(_), Some((first, last))) = (spec.storage, life) {
                for at in [&mut starts[first], &mut ends[last]] {
                    *at = (at.0.saturating_add(spec.bytes), at.1 + 1);
                }
            }
        }
        let (mut now, mut most) = ((0usize, 0usize), Live::default());
        for (step, (start, end)) in starts.into_iter().zip(ends).enumerate() {
            now = (now.0.saturating_add(start.0), now.1 + start.1);
            if now.0 > most.bytes {
                most = Live { bytes: now.0, step, buffers: now.1 };
            }
            now = (now.0.saturating_sub(end.0), now.1 - end.1);
        }
        most
    }

    /// The largest total of live scratch buffers and workspace at any step, in bytes. No layout needs less.
    pub fn needed(&self) -> usize {
        let mut load = vec![0usize; self.steps.len()];
        for (spec, life) in self.buffers.iter().zip(self.lifetimes()) {
            if let (Storage::Slot(_), Some((first, last))) = (spec.storage, life) {
                load[first..=last].iter_mut().for_each(|n| *n = n.saturating_add(spec.bytes));
            }
        }
        let all = self.steps.iter().zip(load).map(|(s, n)| n.saturating_add(s.work.workspace()));
        all.max().unwrap_or(0)
    }

    /// Bytes of the constants, unpacked.
    pub fn const_bytes(&self) -> usize {
        self.consts.iter().map(|c| c.bytes().len()).sum()
    }

    /// Bytes of packed constants.
    pub fn packed_bytes(&self) -> usize {
        let packings = self.packed.iter().filter_map(|p| p.kernel.packing());
        packings.fold(0, |n, p| n.saturating_add(p.bytes))
    }
}

impl StepWork {
    /// Workspace that the kernel needs, in bytes.
    pub fn workspace(&self) -> usize {
        match self {
            StepWork::Library(k) => k.workspace(),
            _ => 0,
        }
    }

    /// Name of the kernel that runs the step.
    pub fn kernel_name(&self) -> String {
        match self {
            StepWork::Library(k) => k.name().to_string(),
            StepWork::Kernel { kernel, .. } => format!("ir.{}", kernel.name),
            StepWork::Host(h) => format!("host.{}", h.op.op().name()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, s) in self.steps.iter().enumerate() {
            let places = |b: &[BufId]| b.iter().map(|b| self.place(*b)).collect::<Vec<_>>().join(" ");
            write!(
                f,
                "{i:4} {:<24} {:<28} {} -> {}",
                s.op,
                s.work.kernel_name(),
                places(s.reads()),
                places(s.writes())
            )?;
            if let Some(t) = s.tunable.as_ref().filter(|t| t.tuned) {
                write!(f, " (tuned: {})", t.variant)?;
            }
            writeln!(
                f,
                "  {} flop, {} B{}",
                s.flops,
                s.bytes,
                if s.span.is_known() { format!("  # {}", s.span) } else { String::new() }
            )?;
        }
        write!(
            f,
            "scratch {} B in {} slots (at least {} B live at once), constants {} B",
            self.scratch(),
            self.slots.len(),
            self.live().bytes,
            self.const_bytes()
        )?;
        match self.packed.len() {
            0 => Ok(()),
            n => write!(f, ", {} B in {n} packed constants", self.packed_bytes()),
        }
    }
}

impl Plan {
    fn place(&self, b: BufId) -> String {
        match self.buffers[b.0 as usize].storage {
            Storage::Input(i) => format!("in{i}"),
            Storage::Const(i) => format!("const{i}"),
            Storage::Packed(i) => format!("packed{i}"),
            Storage::Slot(i) => format!("slot{i}"),
            Storage::Output(i) => format!("out{i}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::any::Any;

    #[derive(Debug)]
    struct Nothing;

    impl LibraryKernel for Nothing {
        fn name(&self) -> &str {
            "nothing"
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn the_live_set_is_that_of_the_fullest_step() {
        let spec = |bytes, storage| BufferSpec { bytes, storage };
        let step = |buffers: &[u32]| Step {
            work: StepWork::Library(Arc::new(Nothing)),
            buffers: buffers.iter().map(|b| BufId(*b)).collect(),
            outputs: 1,
            op: String::new(),
            span: Span::default(),
            bounds: None,
            flops: 0,
            bytes: 0,
            nodes: 1,
            fused: None,
            tunable: None,
        };
        let plan = Plan {
            buffers: vec![
                spec(1 << 20, Storage::Input(0)),
                spec(100, Storage::Slot(0)),
                spec(50, Storage::Slot(1)),
                spec(70, Storage::Slot(0)),
                spec(1 << 20, Storage::Output(0)),
                spec(10, Storage::Slot(2)),
            ],
            steps: vec![step(&[0, 1]), step(&[1, 2]), step(&[2, 3]), step(&[3, 4])],
            ..Plan::default()
        };
        assert_eq!(plan.lifetimes()[2], Some((1, 2)));
        assert_eq!(plan.lifetimes()[5], None);
        assert_eq!(plan.live(), Live { bytes: 150, step: 1, buffers: 2 });
        assert_eq!(plan.needed(), 150);
        assert_eq!(Plan::default().live(), Live::default());
    }
}

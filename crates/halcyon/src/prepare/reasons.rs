//! The reasons why transformations of a level changed nothing.

use crate::executable::Executable;
use crate::session::Session;
use halcyon_ir::error::Result;
use halcyon_ir::passes::{self, AmpPolicy, PassOptions};
use halcyon_ir::{ConstData, DType, Graph, Op};

/// One line for each transformation of the level that did not change the plan. Reasons that the plan itself
/// gives ([`halcyon_ir::plan::Plan::warnings`]) are not repeated.
pub(super) fn unapplied(session: &Session, exe: &Executable, sample: &[ConstData]) -> Result<Vec<String>> {
    let graph = session.bind_graph(sample)?;
    let b = session.backend();
    let options = b.lower_options().passes;
    let all = PassOptions { without: Default::default(), ..options.clone() };
    let plan = exe.plan();
    let changed = |name: &str| plan.receipts.iter().any(|r| r.transformation == name);
    let told = |name: &str| {
        let own = format!("{name}:");
        plan.warnings.iter().chain(b.warnings()).any(|w| w.starts_with(&own))
    };
    let blocks = [DType::F32, DType::BF16].iter().any(|d| b.device().as_target().channel_block(*d).is_some());
    let merges = b.device().as_target().caps().max_argument_bytes > 0;
    let facts = Facts { graph: &graph, amp: b.amp(), blocks, merges };
    // Quantisation is skipped here, because it happens before the passes and has its own report.
    let wanted = passes::ALL.iter().filter(|n| all.does(n) && !changed(n) && **n != passes::QUANTIZED);
    let line = |name: &&str| match options.without.contains::<str>(name) {
        true => Some(format!("{name}: switched off")),
        false if told(name) => None,
        false => Some(format!("{name}: {}", facts.reason(name))),
    };
    Ok(wanted.filter_map(line).collect())
}

struct Facts<'a> {
    graph: &'a Graph,
    amp: AmpPolicy,
    /// Whether the device computes images in blocks of channels.
    blocks: bool,
    /// Whether the device runs several kernels in one launch.
    merges: bool,
}

impl Facts<'_> {
    fn has(&self, is: impl Fn(&Op) -> bool) -> bool {
        self.graph.nodes().iter().any(|n| is(&n.op))
    }

    /// The reason why a transformation of the level changed nothing.
    fn reason(&self, name: &str) -> &'static str {
        let product = |op: &Op| matches!(op, Op::Matmul | Op::Conv(_));
        let constants = self.has(|op| matches!(op, Op::Const(_) | Op::Full(_)));
        let products = self.has(product);
        match name {
            passes::FOLD if !constants => "the graph has no constants",
            passes::FOLD => "no op has only constant operands",
            passes::SIMPLIFY => "no identity applies to an op of the graph",
            passes::CSE => "no two ops compute the same value",
            passes::FUSION => "no element-wise op has a result with a single reader that could compute it",
            passes::COMPOSITES if !self.has(|op| matches!(op, Op::Composite(_))) => {
                "the graph has no composites"
            }
            passes::COMPOSITES => "the device has no kernel for a composite of the graph",
            passes::IN_PLACE if !self.has(|op| op.facts().in_place) => "the graph updates no slices or rows",
            passes::IN_PLACE => "every updated tensor is an input or is read again",
            passes::JOINED => "no element-wise kernel stores a result that the next one reads",
            passes::LAUNCHES if !self.merges => "the device does not run several kernels in one launch",
            passes::LAUNCHES => "no two independent steps run the same element-wise kernel",
            passes::PACKED if !constants => "the graph has no constants",
            passes::PACKED => "no kernel of the plan reads a packed constant",
            passes::EPILOGUES if !products => "the graph has no products or convolutions",
            passes::EPILOGUES => "no kernel of a product or convolution applies the ops after it",
            passes::AFFINE if !products => "the graph has no products or convolutions",
            passes::AFFINE => {
                "no product or convolution is followed by additions or multiplications by constants"
            }
            passes::BLOCKED if !self.has(|op| matches!(op, Op::Conv(_))) => "the graph has no convolutions",
            passes::BLOCKED if !self.blocks => "the device does not compute images in blocks of channels",
            passes::BLOCKED => "no convolution fills blocks of channels",
            passes::RECOGNITION => "no group of ops has the pattern of a composite",
            passes::MIXED if self.amp == AmpPolicy::None => "not requested; give a dtype, such as bf16",
            passes::MIXED if !products => "the graph has no products or convolutions",
            passes::MIXED => "no op of the graph has a kernel in that type",
            passes::TUNED => "the tuning cache has no result for a kernel of the plan",
            _ => "it found nothing to change",
        }
    }
}

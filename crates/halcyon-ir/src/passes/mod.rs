//! Graph passes, selected by level.

pub mod affine;
pub mod autocast;
pub mod blocked;
pub mod byte_conv;
pub mod bytes;
pub mod cse;
mod derived;
pub mod divide;
pub mod fold;
pub mod inline;
pub mod rebuild;
pub mod recognize;
pub mod simplify;
pub mod small_types;

use crate::composite::{Composite, CompositeKind};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::element_wise::ScalarOp;
use crate::ops::{Op, ReduceKind};
use crate::plan::Receipt;
pub use autocast::AmpPolicy;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The optimisation level.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub enum Level {
    /// No optimisation: each op separately, in program order.
    O0,
    /// Folding, simplification, common subexpressions, fusion, whole composites and in-place updates, within
    /// the tolerances of the ops.
    O1,
    /// O1 plus the layouts, packed constants and epilogues with which the device's kernels are fastest. Sums
    /// may be rounded differently.
    #[default]
    O2,
    /// O2 for a model whose products and convolutions were quantised to 4, 8 or 16 bits. The passes are those
    /// of O2. The quantisation, which may need sample inputs of the model, precedes them.
    O3,
}

impl Level {
    pub fn name(self) -> &'static str {
        ["O0", "O1", "O2", "O3"][self as usize]
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Level {
    type Err = Error;
    fn from_str(s: &str) -> Result<Level> {
        match s.trim().to_ascii_lowercase().as_str() {
            "o0" | "0" | "none" | "debug" => Ok(Level::O0),
            "o1" | "1" | "conservative" => Ok(Level::O1),
            "o2" | "2" | "balanced" => Ok(Level::O2),
            "o3" | "3" | "aggressive" => Ok(Level::O3),
            _ => Err(Error::argument(
                "level",
                format!(
                    "\"{s}\" is not a level; use O0 (none, debug), O1 (conservative), O2 (balanced), O3 (aggressive)"
                ),
            )),
        }
    }
}

/// Names of the transformations, for receipts and for switching them off.
pub const FOLD: &str = "constant folding";
pub const SIMPLIFY: &str = "simplification";
pub const CSE: &str = "common subexpressions";
pub const FUSION: &str = "fusion";
pub const COMPOSITES: &str = "whole composites";
pub const IN_PLACE: &str = "in-place updates";
pub const JOINED: &str = "joined chains";
pub const LAUNCHES: &str = "merged launches";
pub const PACKED: &str = "packed constants";
pub const EPILOGUES: &str = "epilogues";
pub const AFFINE: &str = "affine chains";
pub const BLOCKED: &str = "blocked layouts";
pub const RECOGNITION: &str = "composite recognition";
pub const MIXED: &str = "mixed precision";
pub const TUNED: &str = "tuned kernels";
/// This transformation comes before the passes: `halcyon::quantize` does it.
pub const QUANTIZED: &str = "quantisation";

/// All transformations that have a receipt and can be switched off.
pub const ALL: &[&str] = &[
    FOLD,
    SIMPLIFY,
    CSE,
    FUSION,
    COMPOSITES,
    IN_PLACE,
    JOINED,
    LAUNCHES,
    PACKED,
    EPILOGUES,
    AFFINE,
    BLOCKED,
    RECOGNITION,
    MIXED,
    TUNED,
    QUANTIZED,
];

/// Transformations that O2 adds.
const FROM_O2: &[&str] = &[JOINED, LAUNCHES, PACKED, EPILOGUES, AFFINE, BLOCKED, RECOGNITION, MIXED, TUNED];

/// Options of [`optimize`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct PassOptions {
    pub level: Level,
    /// Names of the transformations that are switched off.
    pub without: BTreeSet<String>,
    /// Mixed precision: the dtype of the factors of products. Takes effect from O2 on.
    #[serde(default)]
    pub amp: AmpPolicy,
    /// Kinds of work that stay in f32 under mixed precision.
    #[serde(default)]
    pub kept: autocast::KeptInF32,
    /// The ops that mixed precision applies to.
    #[serde(default)]
    pub mixed: autocast::MixedOps,
}

impl PassOptions {
    pub fn at(level: Level) -> PassOptions {
        PassOptions { level, ..PassOptions::default() }
    }

    /// Whether the level includes the transformation `name` and it is not switched off.
    pub fn does(&self, name: &str) -> bool {
        let from = match name {
            QUANTIZED => Level::O3,
            _ if FROM_O2.contains(&name) => Level::O2,
            _ => Level::O1,
        };
        self.level >= from && !self.without.contains(name)
    }
}

/// Runs the passes of the level, except [`block_layouts`], which follows them. `claims` returns whether the
/// target claims a composite.
pub fn optimize(
    g: &Graph,
    options: &PassOptions,
    claims: &dyn Fn(&Composite) -> bool,
) -> Result<(Graph, Vec<Receipt>)> {
    let mut receipts = vec![];
    let whole = options.does(COMPOSITES);
    let kept = std::cell::Cell::new(0usize);
    let keep = |c: &Composite| {
        // Library kernels do not support small types.
        let keep = whole && !has_small_types(&c.body) && claims(c);
        kept.set(kept.get() + keep as usize);
        keep
    };
    let mut g = match inlining_changes(g) {
        true => inline::inline_composites(g, &keep)?.0,
        false => g.clone(),
    };
    if kept.get() > 0 {
        receipts.push(Receipt::new(COMPOSITES, kept.get()));
    }
    let mut recognized = 0;
    if whole && options.does(RECOGNITION) && has_byte_products(&g) {
        // Must run before 8-bit floats are rewritten to native types.
        (g, recognized) = bytes::run(&g, claims)?;
    }
    // Kernels for convolutions of bytes exist only in the blocked layout.
    if whole && options.does(RECOGNITION) && options.does(BLOCKED) && has_byte_convs(&g) {
        let (h, n) = byte_conv::run(&g, claims)?;
        (g, recognized) = (h, recognized + n);
    }
    if has_small_types(&g) {
        g = small_types::run(&g)?;
    }
    type Pass = fn(&Graph) -> Result<(Graph, usize)>;
    let passes: [(&str, bool, Pass); 3] =
        [(FOLD, folds(&g), fold::run), (SIMPLIFY, true, simplify::run), (CSE, true, cse::run)];
    for (name, applies, pass) in passes {
        if applies && options.does(name) {
            let (h, n) = pass(&g)?;
            g = h;
            if n > 0 {
                receipts.push(Receipt::new(name, n));
            }
        }
    }
    let mut note = |name, n| {
        if n > 0 {
            receipts.push(Receipt::new(name, n));
        }
    };
    if options.does(RECOGNITION) && has_patterns(&g) {
        let claims = |c: &Composite| !has_small_types(&c.body) && claims(c);
        let (h, n) = recognize::run(&g, whole.then_some(&claims as &dyn Fn(&Composite) -> bool))?;
        g = h;
        recognized += n;
    }
    note(RECOGNITION, recognized);
    if options.does(AFFINE) && folds(&g) {
        let (h, n) = affine::run(&g)?;
        // Folding computes the merged constants.
        g = if n > 0 { cse::run(&fold::run(&h)?.0)?.0 } else { h };
        note(AFFINE, n);
    }
    // Mixed precision comes after the passes that match f32 patterns. It rounds constants itself, so no
    // folding is needed after it.
    let in_range = options.amp != AmpPolicy::F16 || options.mixed.in_range;
    if let Some(low) = options.amp.dtype().filter(|_| in_range && options.does(MIXED)) {
        let claims = |c: &Composite| whole && claims(c);
        let (h, n, bytes) = autocast::run(&g, low, options.kept, &options.mixed, &claims)?;
        if n > 0 {
            g = h;
            receipts.push(Receipt { bytes: Some(bytes), ..Receipt::new(MIXED, n) });
        }
    }
    Ok((g, receipts))
}

/// Whether [`inline`] may change the graph. That pass replaces composites, drops the nodes that no output
/// needs, and puts the inputs and then the arguments before all other nodes.
fn inlining_changes(g: &Graph) -> bool {
    let inputs = g.inputs().len();
    let leaves = inputs + g.args().len();
    let roots: Vec<NodeId> = g.outputs().iter().map(|o| o.node).collect();
    let live = g.live(&roots);
    let stays = |(i, n): (usize, &Node)| match n.op {
        Op::Input(k) => i == k as usize,
        Op::Arg(k) => i == inputs + k as usize,
        Op::Composite(_) => false,
        _ => i >= leaves && live[i],
    };
    g.nodes().len() < leaves || !g.nodes().iter().enumerate().all(stays)
}

/// Whether the graph may contain a pattern of [`recognize`]: attention has a softmax, a norm has a sum, and
/// an activation has one of three functions.
fn has_patterns(g: &Graph) -> bool {
    g.nodes().iter().any(|n| match &n.op {
        Op::Composite(c) => c.kind == CompositeKind::Softmax,
        Op::Reduce { kind, .. } => *kind == ReduceKind::Sum,
        Op::Scalar(s) => matches!(s, ScalarOp::Sigmoid | ScalarOp::Erf | ScalarOp::Tanh),
        _ => false,
    })
}

/// Whether any value of the graph, or of a composite in it, has a small type.
pub fn has_small_types(g: &Graph) -> bool {
    let small = |d: DType| !d.is_native();
    g.args().iter().any(|d| small(*d))
        || g.nodes()
            .iter()
            .any(|n| small(n.ty.dtype) || matches!(&n.op, Op::Composite(c) if has_small_types(&c.body)))
}

/// Whether the graph may contain products of bytes or of 16-bit integers.
pub fn has_byte_products(g: &Graph) -> bool {
    let any = |is: &dyn Fn(&Node) -> bool| g.nodes().iter().any(is);
    any(&|n| n.op == Op::Matmul) && any(&|n| bytes::is_f8(n.ty.dtype) || bytes::is_code(n.ty.dtype))
}

/// Whether the graph may contain convolutions of bytes.
fn has_byte_convs(g: &Graph) -> bool {
    let any = |is: &dyn Fn(&Node) -> bool| g.nodes().iter().any(is);
    any(&|n| matches!(n.op, Op::Conv(_))) && any(&|n| bytes::is_int8(n.ty.dtype))
}

fn convolves_bytes(n: &Node) -> bool {
    matches!(&n.op, Op::Composite(c) if c.kind == CompositeKind::ByteConv)
}

/// Whether a graph has constants, literals or other values from which folding can start. If not, [`fold`] and
/// [`affine`] have no constants to work on, and are skipped. Graphs of evaluated tensors often have no such
/// values, because their leaves are inputs and arguments.
fn folds(g: &Graph) -> bool {
    let known =
        |n: &Node| matches!(n.op, Op::Const(_) | Op::Full(_)) || !n.op.is_leaf() && n.inputs.is_empty();
    g.nodes().iter().any(known)
}

/// Runs [`blocked`] if the level has it. This pass follows those of [`optimize`]. `blocks` is
/// [`crate::target::Target::channel_block`].
pub fn block_layouts<'g>(
    g: &'g Graph,
    options: &PassOptions,
    blocks: blocked::Blocks<'_>,
    claims: &dyn Fn(&Composite) -> bool,
) -> Result<(Cow<'g, Graph>, Option<Receipt>)> {
    // The pass starts from convolutions; a graph without them stays as it is.
    let bytes = options.does(BLOCKED) && g.nodes().iter().any(convolves_bytes);
    let convolves = || g.nodes().iter().any(|n| matches!(n.op, Op::Conv(_)));
    let has_blocks = || [DType::F32, DType::BF16].iter().any(|d| blocks(*d).is_some());
    if bytes || options.does(BLOCKED) && convolves() && has_blocks() {
        let (h, n) = blocked::run(g, blocks, claims)?;
        if n > 0 || bytes {
            let receipt = (n > 0).then(|| Receipt::new(BLOCKED, n));
            return Ok((Cow::Owned(h), receipt));
        }
    }
    Ok((Cow::Borrowed(g), None))
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod level_tests {
    use super::*;

    #[test]
    fn levels_parse_in_any_case_and_unknown_ones_are_errors() {
        assert_eq!("Conservative".parse::<Level>().unwrap(), Level::O1);
        assert_eq!("DEBUG".parse::<Level>().unwrap(), Level::O0);
        assert_eq!("balanced".parse::<Level>().unwrap(), Level::O2);
        assert_eq!("o3".parse::<Level>().unwrap(), Level::O3);
        assert_eq!("Aggressive".parse::<Level>().unwrap().to_string(), "O3");
        assert_eq!("fast".parse::<Level>().unwrap_err().exit_code(), 2);
    }
}

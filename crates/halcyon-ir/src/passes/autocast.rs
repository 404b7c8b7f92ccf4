//! Mixed precision. Products and convolutions take operands of a half type, and so do attention, layer and
//! RMS norms and softmax if the target runs them whole. Everything that would lose accuracy stays in f32.
//!
//! A value read by such an op is rounded and stored once in the half type; its other readers widen it again,
//! so memory holds only one form. (An output is stored in f32 as well.) Ops that only move elements (views,
//! concatenation, gathers, maximum pools) pass the half type on, and so do average pools, which sum in f32.
//! In bf16, a pool also takes the half type if it reads the result of a product, possibly after element-wise
//! ops. The gradient of a max pool takes bf16 if its image is stored only in bf16, its windows do not
//! overlap, and the channels of its image fill blocks. Element-wise arithmetic, sums, and composites that the
//! target does not run in the half type compute in f32. Constants that are read in the half type are rounded
//! here; biases, scales of norms and attention masks stay in f32. Values of other dtypes are not changed, and
//! inputs, outputs and states keep their dtypes. Gradients are ordinary nodes, so the same rules hold for
//! training: parameters are stored in f32 and the graph rounds them where they are read.
//!
//! Products stay in f32 if an op needs all digits of their result: the sine, cosine or tangent of a phase,
//! rounding to an integer, a remainder, or a cast to an integer. Such products occur in rotary embeddings and
//! integer models. A product or composite that reads a constant outside of the half type's range also stays
//! in f32. For f16, an op whose values come near the end of f16's range on a sample stays in f32, too
//! ([`MixedOps::too_large`]).

use super::MIXED;
use super::derived::{Derived, derived_bytes};
use super::rebuild::{DROPPED, Rebuild, prune};
use crate::composite::Composite;
use crate::data::ConstData;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, NodeId, Operands};
use crate::ops::{HalfForm, HalfWhen, MixedRole, Moves, Op, RatedWork};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Automatic mixed precision: the dtype of the operands of products, convolutions and similar ops.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AmpPolicy {
    /// All computations in the dtypes of the model.
    #[default]
    #[serde(rename = "f32")]
    None,
    /// IEEE half precision, largest value 65,504. Ops whose values come near this limit on a sample stay in
    /// f32 ([`RANGE_MARGIN`]). The sample is the first run.
    F16,
    /// bfloat16: 8 bits of precision, with the range of f32.
    Bf16,
}

impl AmpPolicy {
    /// The dtype to which f32 operands are rounded; `None` for no rounding.
    pub fn dtype(self) -> Option<DType> {
        match self {
            AmpPolicy::None => None,
            AmpPolicy::F16 => Some(DType::F16),
            AmpPolicy::Bf16 => Some(DType::BF16),
        }
    }

    /// The dtype in which products are computed: `f32`, `f16`, `bf16`.
    pub fn name(self) -> &'static str {
        ["f32", "f16", "bf16"][self as usize]
    }
}

impl fmt::Display for AmpPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AmpPolicy {
    type Err = Error;
    fn from_str(s: &str) -> Result<AmpPolicy> {
        match s.trim().to_ascii_lowercase().as_str() {
            "f32" | "fp32" | "float32" | "none" => Ok(AmpPolicy::None),
            "f16" | "fp16" | "float16" | "half" => Ok(AmpPolicy::F16),
            "bf16" | "bfloat16" => Ok(AmpPolicy::Bf16),
            _ => {
                Err(Error::argument("precision", format!("\"{s}\" is not a precision; use f32, bf16 or f16")))
            }
        }
    }
}

/// Measured rates of one kind of work on one device in MFLOP/s, in f32 and in a half type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Rates {
    pub full: u64,
    pub half: u64,
}

impl Rates {
    /// Whether the half type is faster by more than a tenth. The margin keeps measurement noise from deciding
    /// between equal rates.
    pub fn is_faster(self) -> bool {
        self.half > self.full.saturating_add(self.full / 10)
    }
}

/// Kinds of work that stay in f32 under mixed precision because the device is not faster in the half type,
/// each with the measured rates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct KeptInF32 {
    /// Matrix products and attention.
    pub products: Option<Rates>,
    pub convolutions: Option<Rates>,
}

impl KeptInF32 {
    /// Whether both kinds stay in f32.
    pub fn is_everything(&self) -> bool {
        self.products.is_some() && self.convolutions.is_some()
    }

    /// The measured rates, if the kind of work stays in f32.
    fn rates(&self, work: RatedWork) -> Option<Rates> {
        match work {
            RatedWork::Products => self.products,
            RatedWork::Convolutions => self.convolutions,
        }
    }

    /// One line for each kind of work in the graph that stays in f32, with the rates.
    pub fn warnings(&self, g: &Graph, low: DType) -> Vec<String> {
        let f32_op = |n: &Node, is: &dyn Fn(&Op) -> bool| n.ty.dtype == DType::F32 && is(&n.op);
        let rated = |work| move |op: &Op| op.rated() == Some(work);
        let (product, conv) = (rated(RatedWork::Products), rated(RatedWork::Convolutions));
        let kinds: [(&str, Option<Rates>, &dyn Fn(&Op) -> bool); 2] =
            [("products", self.products, &product), ("convolutions", self.convolutions, &conv)];
        let there =
            kinds.into_iter().filter(|(_, r, is)| r.is_some() && g.nodes().iter().any(|n| f32_op(n, *is)));
        there.filter_map(|(what, rates, _)| rates.map(|r| kept_text(what, low, r))).collect()
    }

    /// Like [`KeptInF32::warnings`], but for the device, independent of a graph.
    pub fn describe(&self, low: DType) -> Vec<String> {
        let kinds = [("products", self.products), ("convolutions", self.convolutions)];
        kinds.into_iter().filter_map(|(what, rates)| rates.map(|r| kept_text(what, low, r))).collect()
    }
}

/// The largest finite value of f16.
pub const F16_MAX: f64 = 65504.0;

/// How far below the largest value of f16 the values of a sample must stay: an op whose operands or result
/// exceed `F16_MAX / RANGE_MARGIN` on the sample stays in f32.
pub const RANGE_MARGIN: f64 = 4.0;

/// Which ops mixed precision applies to.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct MixedOps {
    /// The names of the ops that take the half type, such as `matmul`, `conv` and `attention`. `None`: all
    /// that can.
    pub only: Option<BTreeSet<String>>,
    /// Ops that stay in f32: names of ops, and places in the program or model such as `model.rs:42`. A place
    /// also keeps the gradients of its ops in f32.
    pub f32: BTreeSet<String>,
    /// Whether f16 may be used: the values of a sample were checked, or a loss scaler skips steps that
    /// overflow. Policies other than f16 ignore this field.
    pub in_range: bool,
    /// Ops whose values were too large on the sample, by their number in the graph that the pass gets, with
    /// a description.
    pub too_large: BTreeMap<u32, String>,
}

impl MixedOps {
    /// Whether the op stays in f32.
    fn keeps(&self, id: NodeId, n: &Node) -> bool {
        let name = n.op.name();
        let listed = |all: &BTreeSet<String>| {
            let at = || n.span.text().to_string();
            all.contains(&name) || all.iter().any(|p| p.contains(':') && at().ends_with(p.as_str()))
        };
        self.only.as_ref().is_some_and(|o| !o.contains(&name))
            || !self.f32.is_empty() && listed(&self.f32)
            || self.too_large.contains_key(&id.0)
    }

    /// One line for each op that the sample keeps in f32. If the policy is f16 and [`MixedOps::in_range`] is
    /// not set, returns only one line, which says that there was no sample.
    pub fn warnings(&self, amp: AmpPolicy) -> Vec<String> {
        if amp == AmpPolicy::F16 && !self.in_range {
            let why = "f16 needs a sample run to find the range of the values, and there was none";
            return vec![format!("{MIXED}: {why}; run the graph once with values, or use bf16")];
        }
        let kept = |what: &String| {
            format!(
                "{MIXED}: {what} stays in f32: only values below {} are computed in f16",
                F16_MAX / RANGE_MARGIN
            )
        };
        self.too_large.values().map(kept).collect()
    }
}

/// For each op that the pass would compute in f16: the op, its f32 operands and its result. The range of
/// these values decides whether f16 is allowed.
pub fn ranged_ops(g: &Graph, claims: &dyn Fn(&Composite) -> bool) -> Result<Vec<(NodeId, Vec<NodeId>)>> {
    let live = Rebuild::live(g);
    let mut p = Pass::new(g, DType::F16, KeptInF32::default(), MixedOps::default());
    p.choose(&live, claims)?;
    let of = |id: NodeId| {
        let operands = g.node(id).inputs.iter().copied().filter(|x| p.is_f32(*x));
        (id, operands.chain([id]).collect())
    };
    Ok(p.products(&live).map(of).collect())
}

fn kept_text(what: &str, low: DType, r: Rates) -> String {
    let gflops = |mflops: u64| format!("{:.1}", mflops as f64 / 1e3);
    format!(
        "{MIXED}: {what} were kept as f32: measured {} GFLOP/s in {low} and {} in f32 on one core of this processor; --force-precision \
         (BackendBuilder::force_amp) overrides this",
        gflops(r.half),
        gflops(r.full)
    )
}

/// Rewrites the f32 part of a graph for half type `low`, except the kinds of work in `keep`. Returns the
/// graph, the number of products, convolutions and composites that now have operands of that type, and the
/// bytes saved in constants.
pub fn run(
    g: &Graph,
    low: DType,
    keep: KeptInF32,
    ops: &MixedOps,
    claims: &dyn Fn(&Composite) -> bool,
) -> Result<(Graph, usize, u64)> {
    let live = Rebuild::live(g);
    let mut p = Pass::new(g, low, keep, ops.clone());
    p.choose(&live, claims)?;
    if p.products(&live).next().is_none() {
        return Ok((g.clone(), 0, 0));
    }
    for id in g.ids().filter(|i| live[i.index()]) {
        p.node(id)?;
    }
    for o in g.outputs() {
        p.output(o.node)?;
    }
    let ops = p.ops;
    let h = prune(&p.r.finish()?.0)?;
    let saved = constants(g, &live).saturating_sub(constants(&h, &Rebuild::live(&h)));
    Ok((h, ops, saved))
}

/// Total bytes of the constants of a graph, with shared constants counted once.
fn constants(g: &Graph, live: &[bool]) -> u64 {
    let mut seen = std::collections::HashSet::new();
    let held = |id: NodeId| match &g.node(id).op {
        Op::Const(c) => Some(c),
        _ => None,
    };
    let of = g.ids().filter(|i| live[i.index()]).filter_map(held);
    of.filter(|c| seen.insert(c.key())).map(|c| c.bytes().len() as u64).sum()
}

/// How an op uses the half type.
enum Kind {
    /// A product or convolution: its operands and result have the half type.
    Product,
    /// A composite that the target runs in the half type.
    Whole,
    /// Passes on the half type of its operands: it moves their elements, or averages them.
    Moves,
    /// Takes the half type if its first operand is stored in that type only.
    Follows,
    Other,
}

/// A composite with operands and a result of the half type.
#[derive(Clone)]
struct Whole {
    composite: Arc<Composite>,
    /// For each operand, whether it is rounded.
    rounds: Vec<bool>,
    when: HalfWhen,
}

struct Pass<'a> {
    g: &'a Graph,
    r: Rebuild<'a>,
    low_type: DType,
    keep: KeptInF32,
    mixed: MixedOps,
    whole: Vec<Option<Whole>>,
    /// Values that are stored in the half type because an op reads them in that type.
    asked: Vec<bool>,
    /// Products that stay in f32.
    kept: Vec<bool>,
    /// For each old node: its new node of the half type, or `DROPPED`.
    low: Vec<NodeId>,
    /// Rounded constants; `None` for constants outside the range of the half type.
    constants: HashMap<NodeId, Option<ConstData>>,
    outputs: Vec<bool>,
    ops: usize,
}

impl<'a> Pass<'a> {
    fn new(g: &'a Graph, low_type: DType, keep: KeptInF32, mixed: MixedOps) -> Pass<'a> {
        let n = g.nodes().len();
        let mut p = Pass {
            g,
            r: Rebuild::new(g),
            low_type,
            keep,
            mixed,
            whole: vec![None; n],
            asked: vec![false; n],
            kept: vec![false; n],
            low: vec![DROPPED; n],
            constants: HashMap::new(),
            outputs: vec![false; n],
            ops: 0,
        };
        g.outputs().iter().for_each(|o| p.outputs[o.node.index()] = true);
        p
    }

    fn is_f32(&self, id: NodeId) -> bool {
        self.g.dtype(id) == DType::F32
    }

    fn products<'b>(&'b self, live: &'b [bool]) -> impl Iterator<Item = NodeId> + 'b {
        let takes = |id: &NodeId| matches!(self.kind(*id), Kind::Product | Kind::Whole);
        self.g.ids().filter(|i| live[i.index()]).filter(takes)
    }

    fn kind(&self, id: NodeId) -> Kind {
        if !self.is_f32(id) {
            return Kind::Other;
        }
        let n = self.g.node(id);
        match self.role(id) {
            MixedRole::Product(_) if !self.kept[id.index()] => Kind::Product,
            MixedRole::Whole(_) if self.whole[id.index()].is_some() => Kind::Whole,
            // A table stays in f32, because only few of its rows are read.
            MixedRole::Moves { tables: true } if matches!(self.g.node(n.inputs[0]).op, Op::Const(_)) => {
                Kind::Other
            }
            MixedRole::Moves { .. } => Kind::Moves,
            MixedRole::Follows if self.follows(id, n) => Kind::Follows,
            _ => Kind::Other,
        }
    }

    fn role(&self, id: NodeId) -> MixedRole {
        let n = self.g.node(id);
        let x: SmallVec<[DType; 4]> = n.inputs.iter().map(|i| self.g.dtype(*i)).collect();
        n.op.mixed(self.low_type, &x, n.ty.dtype)
    }

    /// The operands of an op whose elements it moves (not its indices).
    fn moved_operands(n: &Node) -> Operands {
        let moved = |(k, x): (usize, &NodeId)| takes_half(&n.op, k).then_some(*x);
        n.inputs.iter().enumerate().filter_map(moved).collect()
    }

    /// Decides which ops take the half type and which values are stored in it.
    fn choose(&mut self, live: &[bool], claims: &dyn Fn(&Composite) -> bool) -> Result<()> {
        let g = self.g;
        let mut exact = vec![false; g.nodes().len()];
        for id in g.ids().rev().filter(|i| live[i.index()]) {
            let n = g.node(id);
            let role = self.role(id);
            match (role, &n.op) {
                (MixedRole::Whole(_), _) if self.mixed.keeps(id, n) => {}
                (MixedRole::Whole(h), _) if h.rate.and_then(|w| self.keep.rates(w)).is_some() => {}
                (MixedRole::Whole(h), Op::Composite(c)) if self.is_f32(id) => {
                    self.whole[id.index()] =
                        half_composite(c, h, self.low_type)?.filter(|w| claims(&w.composite));
                }
                (MixedRole::Product(work), _) => {
                    let f32 = self.keep.rates(work).is_some() || self.mixed.keeps(id, n);
                    self.kept[id.index()] = exact[id.index()] || !self.is_f32(id) || f32;
                    // The operands are not marked: the reader needs a product that is not rounded, but the
                    // values that the product reads may come from rounded products.
                    continue;
                }
                _ => {}
            }
            if exact[id.index()] && self.is_f32(id) || role == MixedRole::Exact {
                n.inputs.iter().for_each(|i| exact[i.index()] = true);
            }
        }
        self.find_half_readers(live);
        // Ops that read constants outside the half type's range stay in f32.
        let mut too_large = vec![false; g.nodes().len()];
        let mut any = false;
        for id in g.ids().filter(|i| live[i.index()] && self.asked[i.index()]) {
            let n = g.node(id);
            too_large[id.index()] = match &n.op {
                Op::Const(c) => {
                    let c = rounded(c, self.low_type)?;
                    let too_large = c.is_none();
                    self.constants.insert(id, c);
                    too_large
                }
                Op::Full(v) => v.cast(self.low_type).as_f64().is_infinite() && v.as_f64().is_finite(),
                _ if matches!(self.kind(id), Kind::Moves) => {
                    Self::moved_operands(n).iter().any(|i| too_large[i.index()])
                }
                _ => false,
            };
            any |= too_large[id.index()];
        }
        if any {
            for id in self.products(live).collect::<Vec<_>>() {
                let bad = g.node(id).inputs.iter().any(|i| too_large[i.index()]);
                self.kept[id.index()] |= bad;
                if bad {
                    self.whole[id.index()] = None;
                }
            }
            self.find_half_readers(live);
        }
        Ok(())
    }

    /// Finds the values that are read in the half type.
    fn find_half_readers(&mut self, live: &[bool]) {
        self.asked.fill(false);
        for id in self.g.ids().rev().filter(|i| live[i.index()]) {
            let n = self.g.node(id);
            let reads: Vec<NodeId> = match self.kind(id) {
                Kind::Product => n.inputs.to_vec(),
                Kind::Whole => match &self.whole[id.index()] {
                    Some(w) if w.when != HalfWhen::Follows && self.takes(id, w) => {
                        n.inputs.iter().zip(&w.rounds).filter(|(_, r)| **r).map(|(i, _)| *i).collect()
                    }
                    _ => continue,
                },
                Kind::Moves if self.asked[id.index()] || self.pools_a_product(id, n) => {
                    self.asked[id.index()] = true;
                    Self::moved_operands(n).into_vec()
                }
                _ => continue,
            };
            reads.iter().for_each(|i| self.asked[i.index()] = true);
        }
    }

    /// Whether the gradient of a max pool may take bf16. Devices keep images of four axes and whole blocks of
    /// channels in blocks; for other images, their kernels are faster in f32.
    fn follows(&self, id: NodeId, n: &Node) -> bool {
        let blocks = |d: &[usize]| d.len() == 4 && d[1].is_multiple_of(32);
        let constant = |x: &NodeId| matches!(self.g.node(*x).op, Op::Const(_) | Op::Full(_));
        self.low_type == DType::BF16
            && self.g.shape(id).known().is_some_and(|d| blocks(&d[..]))
            && !n.inputs.iter().any(constant)
            && !self.mixed.keeps(id, n)
    }

    /// Whether the op pools a product's result in bf16, possibly after element-wise ops. The image is then
    /// stored in bf16, because it is larger than the pooled one and its product has been rounded anyway. In
    /// f16 it is not, because its range has not been checked on a sample.
    fn pools_a_product(&self, id: NodeId, n: &Node) -> bool {
        /// Element-wise ops between the product and the pool.
        const BETWEEN: usize = 6;
        let output = self.outputs[id.index()] || n.inputs.iter().any(|x| self.outputs[x.index()]);
        if self.low_type != DType::BF16 || !matches!(n.op, Op::Pool(_)) || output || self.mixed.keeps(id, n) {
            return false;
        }
        let mut at = vec![n.inputs[0]];
        for _ in 0..=BETWEEN {
            if at.iter().any(|x| matches!(self.kind(*x), Kind::Product)) {
                return true;
            }
            let ops = at.iter().map(|x| self.g.node(*x)).filter(|n| matches!(n.op, Op::Scalar(_)));
            at = ops.flat_map(|n| n.inputs.iter().copied()).collect();
        }
        false
    }

    /// Whether a composite has a result of the half type: always, or if the result is read in that type and
    /// is not an output.
    fn takes(&self, id: NodeId, w: &Whole) -> bool {
        w.when == HalfWhen::Always || self.asked[id.index()] && !self.outputs[id.index()]
    }

    fn is_low(&self, old: NodeId) -> bool {
        self.low[old.index()] != DROPPED
    }

    /// The value in its own dtype. If only the half form is stored, every reader widens it separately, so
    /// that the wide form is not stored as well.
    fn own_form(&mut self, old: NodeId) -> Result<NodeId> {
        match self.r.get(old) {
            Ok(x) => Ok(x),
            Err(e) if !self.is_low(old) => Err(e),
            Err(_) => self.r.new.cast(self.low[old.index()], DType::F32),
        }
    }

    /// The value in the half type.
    fn half_form(&mut self, old: NodeId) -> Result<NodeId> {
        if !self.is_low(old) {
            let n = self.g.node(old);
            let span = std::mem::replace(&mut self.r.new.span, n.span.clone());
            self.low[old.index()] = match &n.op {
                Op::Full(v) => self.r.new.full(self.low_type, n.ty.shape.clone(), *v),
                Op::Const(c) => {
                    let known = match self.constants.get(&old) {
                        Some(c) => c.clone(),
                        None => rounded(c, self.low_type)?,
                    };
                    match known {
                        Some(c) => self.r.new.constant(c),
                        None => {
                            return Err(Error::internal(
                                "a constant that does not fit is read in a half type",
                            ));
                        }
                    }
                }
                _ => {
                    let x = self.r.get(old)?;
                    self.r.new.cast(x, self.low_type)?
                }
            };
            self.r.new.span = span;
        }
        Ok(self.low[old.index()])
    }

    fn node(&mut self, id: NodeId) -> Result<()> {
        let n = self.g.node(id);
        self.r.new.span = n.span.clone();
        let asked = self.asked[id.index()];
        let kind = self.kind(id);
        let carries = match kind {
            Kind::Product => true,
            Kind::Whole => self.whole[id.index()].as_ref().is_some_and(|w| {
                self.takes(id, w) && (w.when != HalfWhen::Follows || self.is_low(n.inputs[0]))
            }),
            Kind::Moves => {
                asked || Self::moved_operands(n).iter().all(|i| self.is_low(*i) && self.r.get(*i).is_err())
            }
            Kind::Follows => self.is_low(n.inputs[0]) && self.r.get(n.inputs[0]).is_err(),
            Kind::Other => false,
        };
        if carries {
            self.low[id.index()] = self.in_half(id, n, &kind)?;
            return Ok(());
        }
        // A half value that the model itself widened: use the original.
        if n.op == Op::Cast && self.is_f32(id) && self.g.dtype(n.inputs[0]) == self.low_type {
            self.low[id.index()] = self.r.get(n.inputs[0])?;
            return Ok(());
        }
        if n.op.is_leaf() {
            self.r.copy(id)?;
            return Ok(());
        }
        let mut inputs: Operands = n.inputs.iter().map(|i| self.own_form(*i)).collect::<Result<_>>()?;
        // Kernels compare the image with the pooled image, so if one is rounded, both must be.
        if let (Op::PoolGrad(_), [x, pooled, _]) = (&n.op, &n.inputs[..])
            && self.is_low(*pooled)
            && self.is_low(*x)
        {
            inputs[0] = self.r.new.cast(self.low[x.index()], DType::F32)?;
        }
        let y = self.r.new.push_unchecked(Node { inputs, ..n.clone() });
        if asked && self.is_f32(id) {
            self.low[id.index()] = self.r.new.cast(y, self.low_type)?;
            // Outputs of the graph are not rounded.
            if !self.outputs[id.index()] {
                return Ok(());
            }
        }
        self.r.set(id, y);
        Ok(())
    }

    /// The op with operands and a result of the half type.
    fn in_half(&mut self, id: NodeId, n: &Node, kind: &Kind) -> Result<NodeId> {
        let whole = match kind {
            Kind::Whole => self.whole[id.index()].clone(),
            _ => None,
        };
        let rounds = |k: usize| match (&whole, kind) {
            (Some(w), _) => w.rounds[k],
            (None, Kind::Moves) => takes_half(&n.op, k),
            _ => true,
        };
        let mut inputs = Operands::new();
        for (k, i) in n.inputs.iter().enumerate() {
            inputs.push(if rounds(k) { self.half_form(*i)? } else { self.own_form(*i)? });
        }
        self.ops += usize::from(!matches!(kind, Kind::Moves | Kind::Follows));
        let op = match (&n.op, whole) {
            (_, Some(w)) => Op::Composite(w.composite),
            (op, _) => op.with_fill(|v| v.cast(self.low_type))?,
        };
        let ty = crate::shape::TensorType { dtype: self.low_type, shape: n.ty.shape.clone() };
        Ok(self.r.new.push_unchecked(Node { op, inputs, ty, span: n.span.clone() }))
    }

    /// Outputs keep the dtype of the model.
    fn output(&mut self, id: NodeId) -> Result<()> {
        if self.r.get(id).is_err() {
            self.r.new.span = self.g.node(id).span.clone();
            let y = self.own_form(id)?;
            self.r.set(id, y);
        }
        Ok(())
    }
}

/// Whether operand `k` of an op that moves elements takes the half type. It does if its elements are moved.
/// An average moves no elements, and all its operands take the half type.
fn takes_half(op: &Op, k: usize) -> bool {
    match op.facts().moves {
        Moves::Operands(_) | Moves::Compared(_) => op.facts().moves.operand(k),
        Moves::Nothing | Moves::All => true,
    }
}

/// The composite in the half type as offered to the target: its first `form.rounded` operands and its result
/// have that type, and it is computed in f32. `None` if an operand is not f32.
fn half_composite(c: &Composite, form: HalfForm, low: DType) -> Result<Option<Whole>> {
    let inputs = c.body.inputs();
    let rounds: Vec<bool> = (0..inputs.len()).map(|k| k < form.rounded).collect();
    if inputs.iter().any(|i| c.body.dtype(i.node) != DType::F32) {
        return Ok(None);
    }
    let mut body = Graph::new();
    let mut operands = vec![];
    for (i, r) in inputs.iter().zip(&rounds) {
        let mut ty = c.body.ty(i.node).clone();
        if *r {
            ty.dtype = low;
        }
        operands.push(body.input(&i.name, ty));
    }
    let wide: Vec<NodeId> = operands.iter().map(|x| body.cast(*x, DType::F32)).collect::<Result<_>>()?;
    let y = super::inline::append(&mut body, c, &wide)?;
    let y = body.cast(y, low)?;
    body.output("y", y);
    let composite = Arc::new(Composite { kind: c.kind.clone(), attrs: c.attrs.clone(), body });
    Ok(Some(Whole { composite, rounds, when: form.when }))
}

/// The f32 composite from which [`half_composite`] made `c`; `None` for other composites.
pub(crate) fn wide_form(c: &Composite) -> Option<Composite> {
    let (body, result) = (&c.body, c.result().ok()?);
    let half = |n: NodeId| matches!(body.dtype(n), DType::F16 | DType::BF16);
    let f32_result = |n: NodeId| body.dtype(n) == DType::F32;
    let rounded = body.node(result).op == Op::Cast && body.node(result).inputs.iter().all(|n| f32_result(*n));
    if !rounded || !body.inputs().iter().any(|i| half(i.node)) {
        return None;
    }
    let mut wide = Graph::new();
    let mut new: Vec<Option<NodeId>> = vec![None; body.nodes().len()];
    for i in body.inputs() {
        let ty = crate::shape::TensorType {
            dtype: body.dtype(i.node).compute(),
            shape: body.shape(i.node).clone(),
        };
        new[i.node.index()] = Some(wide.input(&i.name, ty));
    }
    for id in body.ids().filter(|id| *id != result) {
        if new[id.index()].is_some() {
            continue;
        }
        let n = body.node(id);
        let inputs = n.inputs.iter().map(|i| new[i.index()]).collect::<Option<Operands>>()?;
        let widens = n.op == Op::Cast && n.ty.dtype == DType::F32 && wide.dtype(inputs[0]) == DType::F32;
        new[id.index()] =
            Some(if widens { inputs[0] } else { wide.push_unchecked(Node { inputs, ..n.clone() }) });
    }
    let y = new[body.node(result).inputs.first()?.index()]?;
    wide.output("y", y);
    Some(Composite { kind: c.kind.clone(), attrs: c.attrs.clone(), body: wide })
}

/// An f32 constant rounded to the half type; `None` if a finite element overflows to infinity.
fn rounded(c: &ConstData, low: DType) -> Result<Option<ConstData>> {
    derived_bytes(c, Derived::Rounded(low), |b| round(b, low))
        .map(|b| ConstData::new(low, &c.dims, b))
        .transpose()
}

/// Rounds little-endian f32 to the half type, to nearest even; `None` if a finite element overflows to
/// infinity.
fn round(f32s: &[u8], low: DType) -> Option<Vec<u8>> {
    let value = |b: &[u8; 4]| f32::from_le_bytes(*b);
    let (words, _) = f32s.as_chunks::<4>();
    let mut overflow = false;
    let half = |b: &[u8; 4]| match low {
        DType::BF16 => half::bf16::from_f32(value(b)).to_bits(),
        _ => half::f16::from_f32(value(b)).to_bits(),
    };
    let infinite: u16 = if low == DType::BF16 { 0x7f80 } else { 0x7c00 };
    let mut out = Vec::with_capacity(f32s.len() / 2);
    for b in words {
        let h = half(b);
        overflow |= h & 0x7fff == infinite && value(b).is_finite();
        out.extend_from_slice(&h.to_le_bytes());
    }
    (!overflow).then_some(out)
}

/// Checks that mixed-precision policy `amp` can be used on a device with these abilities. A device without
/// arithmetic in the type computes in f32 and stores the type.
///
/// # Errors
/// [`Error::Unsupported`] if the device does not store the type.
pub fn check(amp: AmpPolicy, caps: &crate::target::Caps, device: &str) -> Result<()> {
    match amp.dtype() {
        Some(d) if !caps.storage.contains(&d) => {
            let what = format!("mixed precision in {amp} on {device}");
            Err(Error::unsupported(what, "The device does not store the type; use f32"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "autocast_tests.rs"]
mod tests;

//! Decides which nodes get buffers, which are fused into their reader's kernel, and which views become
//! strides.

use super::*;

/// Maximum number of element-wise nodes in one fused kernel. It bounds the depth of recursion, the compile
/// time and the number of registers.
pub(super) const MAX_MEMBERS: usize = 64;
/// Maximum number of views between a fused value and the member that reads it. It bounds the depth of
/// recursion.
const MAX_VIEWS: u32 = 16;
/// Maximum number of uses tracked through views. A view with more uses gets a buffer if one of them reads it
/// through more than `MAX_VIEWS` further views.
const MAX_USES: usize = 64;

/// A use of a node's value by a group of fused nodes, or by a node that needs the value in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Use {
    /// The fusion group of the reader; `None` if the reader needs a buffer.
    pub(super) group: Option<u32>,
    /// Number of views between the value and the reader.
    pub(super) views: u32,
    /// Whether a reshape lies between the value and the reader. Expressions cannot be computed through a
    /// reshape.
    pub(super) reshaped: bool,
    /// Whether a pad lies between the value and the reader. The elements of the padding have the pad's fill
    /// value, which the expression does not compute.
    pub(super) padded: bool,
    pub(super) expands: bool,
}

#[derive(Default)]
pub(super) struct Group {
    pub(super) members: usize,
    pub(super) loads: usize,
}

/// A value in a buffer: the node whose value the buffer holds, the view that reads the buffer, and the value
/// of masked elements.
#[derive(Clone)]
pub(super) struct BufferView {
    pub(super) base: NodeId,
    pub(super) view: View,
    pub(super) fill: Option<Scalar>,
}

impl Lowerer<'_> {
    /// Decides which nodes get buffers. Visits readers before their operands.
    pub(super) fn decide(&mut self) {
        let n = self.g.nodes().len();
        let mut uses: Vec<SmallVec<[Use; 2]>> = vec![smallvec![]; n];
        let mut groups: Vec<Group> = vec![];
        let max_loads = (self.target.caps().max_bindings as usize).saturating_sub(3).clamp(2, 24);
        let fuse = self.options.passes.does(FUSION);
        let need = Use { group: None, views: 0, reshaped: false, padded: false, expands: false };
        let cut = self.cuts();
        let mut is_output = vec![false; n];
        for o in self.g.outputs() {
            uses[o.node.index()].push(need);
            is_output[o.node.index()] = true;
        }
        for i in (0..n).rev() {
            if !self.live[i] {
                continue;
            }
            let id = NodeId(i as u32);
            let node = self.g.node(id);
            let mine = std::mem::take(&mut uses[i]);
            let new_group = |groups: &mut Vec<Group>, loads: usize| {
                groups.push(Group { members: 1, loads });
                Some(groups.len() as u32 - 1)
            };
            match self.facts(id).lowering {
                Lowering::Stored => {}
                Lowering::Literal => {
                    let iota = matches!(node.op, Op::Iota { .. });
                    // Other readers compute the literal themselves.
                    self.root[i] = mine.iter().any(|u| u.group.is_none() || u.padded || u.reshaped && iota);
                }
                Lowering::View => {
                    let x = node.inputs[0];
                    let Some(change) = self.restride(id) else { continue };
                    let grows = self.dims[i].iter().product::<usize>()
                        > self.dims[x.index()].iter().product::<usize>();
                    let (reshapes, pads) = (change.reshapes(), change.fill().is_some());
                    // A view that is an output is copied. A view is also copied if it has many uses and one
                    // of them reads it through many further views.
                    let wanted = is_output[i] && mine.iter().any(|u| u.group.is_none());
                    if wanted || mine.len() > MAX_USES && mine.iter().any(|u| u.views > MAX_VIEWS) {
                        self.root[i] = true;
                        let group = new_group(&mut groups, 1);
                        uses[x.index()].push(Use {
                            group,
                            views: 1,
                            reshaped: reshapes,
                            padded: pads,
                            expands: grows,
                        });
                    } else {
                        for u in mine {
                            uses[x.index()].push(Use {
                                group: u.group,
                                views: u.views.saturating_add(1),
                                reshaped: u.reshaped || reshapes,
                                padded: u.padded || pads,
                                expands: u.expands || grows,
                            });
                        }
                    }
                }
                Lowering::ElementWise => {
                    let group = mine.first().and_then(|u| u.group);
                    let one = mine.len() == 1;
                    let joins = fuse
                        && !cut[i]
                        && group.is_some_and(|gr| {
                            let gr = &groups[gr as usize];
                            gr.members < MAX_MEMBERS && gr.loads + node.inputs.len() <= max_loads
                        })
                        && mine.iter().all(|u| {
                            u.group == group
                                && !(u.reshaped || u.padded || u.expands)
                                && u.views <= if one { MAX_VIEWS } else { 0 }
                        });
                    let group = if joins {
                        self.inlined += 1;
                        if let Some(gr) = group.and_then(|g| groups.get_mut(g as usize)) {
                            gr.members += 1;
                            gr.loads += node
                                .inputs
                                .iter()
                                .filter(|x| !self.is_literal(**x))
                                .count()
                                .saturating_sub(1);
                        }
                        group
                    } else {
                        self.root[i] = true;
                        new_group(&mut groups, node.inputs.len())
                    };
                    for x in &node.inputs {
                        uses[x.index()].push(Use { group, ..need });
                    }
                }
                Lowering::Fused => {
                    self.root[i] = true;
                    for x in &node.inputs {
                        let group = new_group(&mut groups, 1);
                        uses[x.index()].push(Use { group, ..need });
                    }
                }
                Lowering::Step => {
                    self.root[i] = true;
                    for x in &node.inputs {
                        uses[x.index()].push(need);
                    }
                }
            }
        }
    }

    /// Expressions that must not be fused into their reader, so that they can become the epilogue of a
    /// product. A kernel computes only one product. So if a node reads values that come from several
    /// products, the chains on all but the last product are cut. A chain on a product is also cut if a
    /// reduction or concatenation reads it, except for one node on an operand that is stored anyway.
    fn cuts(&self) -> Vec<bool> {
        let n = self.g.nodes().len();
        let mut cut = vec![false; n];
        // `has_epilogues` may make the device load a library, so it is called only if the graph has products.
        let products = || self.g.ids().any(|i| self.live[i.index()] && self.facts(i).packs);
        if !self.options.passes.does(EPILOGUES) || !products() || !self.target.has_epilogues() {
            return cut;
        }
        // Values that an op reads from memory are stored anyway. Other readers of such values can load them,
        // so these readers need not be computed in the epilogue of the product.
        let mut stored = vec![false; n];
        for id in self.g.ids().rev().filter(|i| self.live[i.index()]) {
            let node = self.g.node(id);
            let fuses = matches!(self.facts(id).lowering, Lowering::ElementWise | Lowering::Fused);
            // A view stores nothing. If its value is read from memory, the operand is stored instead.
            if !fuses && (!node.op.is_view() || stored[id.index()]) {
                node.inputs.iter().for_each(|x| stored[x.index()] = true);
            }
        }
        let mut readers = vec![0usize; n];
        for id in self.g.ids().filter(|i| self.live[i.index()]) {
            self.g.node(id).inputs.iter().for_each(|x| readers[x.index()] += 1);
        }
        self.g.outputs().iter().for_each(|o| readers[o.node.index()] += 1);
        // Whether a node has one operand, which other nodes read too, and one reader. The operand then gets a
        // buffer anyway, and the node can be fused into its reader. Example: `abs(x)` in the largest
        // magnitude of a row `x` that is also quantised.
        let reads_stored = |id: NodeId| match self.g.node(id).inputs[..] {
            [x] => readers[id.index()] == 1 && readers[x.index()] > 1,
            _ => false,
        };
        // The last product from which a node's value is computed by expressions alone.
        let mut last: Vec<Option<NodeId>> = vec![None; n];
        for id in self.g.ids().filter(|i| self.live[i.index()]) {
            let node = self.g.node(id);
            if self.facts(id).packs {
                last[id.index()] = Some(id);
            } else if self.is_expr(id) {
                let most = node.inputs.iter().filter_map(|x| last[x.index()]).max();
                for x in &node.inputs {
                    cut[x.index()] |=
                        last[x.index()].is_some() && last[x.index()] != most && self.is_expr(*x);
                }
                last[id.index()] = most.filter(|_| !stored[id.index()]);
            } else if self.facts(id).lowering == Lowering::Fused {
                // Kernels of reductions and concatenations cannot be epilogues.
                for x in &node.inputs {
                    cut[x.index()] |= last[x.index()].is_some() && self.is_expr(*x) && !reads_stored(*x);
                }
            }
        }
        cut
    }

    /// The change that a view makes to the strides of its operand; `None` if the node is not a view.
    pub(super) fn restride(&self, id: NodeId) -> Option<Restride> {
        self.g.node(id).op.restride(&self.dims[id.index()])
    }

    /// Resolves views to strides of buffers. The operand of a view is copied if strides cannot express the
    /// view, or if the view and its operand pad with different values.
    pub(super) fn place_views(&mut self) {
        for id in self.g.ids() {
            let i = id.index();
            let node = self.g.node(id);
            let Some(change) = self.restride(id).filter(|_| self.live[i]) else { continue };
            let x = node.inputs[0];
            let Some(from) = self.placement(x) else { continue };
            let fill = change.fill().or(from.fill);
            let clash = from.view.mask.is_some() && fill != from.fill;
            match change.apply(&from.view).filter(|_| !clash) {
                Some(view) => self.placed[i] = Some(BufferView { base: from.base, view, fill }),
                None => {
                    self.root[x.index()] = true;
                    if let Some(view) = change.apply(&View::dense(&self.dims[x.index()])) {
                        self.placed[i] = Some(BufferView { base: x, view, fill });
                    }
                }
            }
        }
    }

    /// Where a node's value can be read in memory; `None` for fused expressions.
    pub(super) fn placement(&self, id: NodeId) -> Option<BufferView> {
        if self.has_buffer(id) {
            return Some(BufferView { base: id, view: View::dense(&self.dims[id.index()]), fill: None });
        }
        self.placed[id.index()].clone()
    }

    /// For every base, finds the first and the last root (in node order) whose step reads it.
    pub(super) fn find_last_reads(&mut self) {
        // A fused node reads its operands when the step of its root runs. So the root is passed on from
        // readers to operands.
        let n = self.g.nodes().len();
        let mut reader: Vec<u32> = vec![0; n];
        let mut first: Vec<u32> = vec![u32::MAX; n];
        for o in self.g.outputs() {
            reader[o.node.index()] = u32::MAX;
        }
        for i in (0..n).rev().filter(|&i| self.live[i]) {
            let id = NodeId(i as u32);
            let at = if self.root[i] { i as u32 } else { reader[i] };
            let early = if self.root[i] { i as u32 } else { first[i] };
            self.last_read[i] = reader[i];
            self.first_read[i] = first[i];
            for x in self.g.node(id).inputs.iter() {
                reader[x.index()] = reader[x.index()].max(at);
                first[x.index()] = first[x.index()].min(early);
            }
        }
        // A read of a view is a read of its base.
        for i in (0..n).rev() {
            if let Some(p) = &self.placed[i]
                && !self.root[i]
            {
                let b = p.base.index();
                self.last_read[b] = self.last_read[b].max(self.last_read[i]);
                self.first_read[b] = self.first_read[b].min(self.first_read[i]);
            }
        }
    }
}

//! Lowers structured ops: finds buffers for their operands, then chooses a library kernel or a template.

use super::*;
use crate::composite::CompositeKind;
use crate::custom::Custom;
use crate::data::ConstData;
use crate::graph::Node;
use crate::ops::Cost;

/// The operands of a structured op.
struct Operands {
    nodes: SmallVec<[NodeId; 3]>,
    placed: Vec<BufferView>,
    /// The dense copy of each operand that is copied.
    copies: Vec<Option<BufId>>,
    /// The operands as the kernel reads them.
    seen: Vec<Operand>,
}

/// The data of a structured op's steps, besides their kernels.
struct Made {
    id: NodeId,
    cost: Cost,
    bounds: Option<Bounds>,
    /// The operands' buffers, and the nodes whose values they hold.
    buffers: Vec<BufId>,
    values: Values,
}

/// The data of a step whose kernel computes a product and applies the chain that reads it, without the data
/// of the chain.
pub(super) struct Product {
    pub(super) kernel: Arc<dyn LibraryKernel>,
    pub(super) buffers: Vec<BufId>,
    pub(super) values: Values,
    pub(super) cost: Cost,
    /// Size of the op's result in bytes. The step neither stores nor loads this result.
    pub(super) bytes: u64,
}

/// The valid range of the indices that a step reads.
fn bounds(op: &Op, x: &[Operand]) -> Option<Bounds> {
    let r = op.index_range(x)?;
    let indices = x.get(r.operand)?.clone();
    Some(Bounds { place: r.operand, indices, low: r.low, end: r.end, ignore: r.ignore, kept: r.kept })
}

impl Lowerer<'_> {
    pub(super) fn structured(&mut self, id: NodeId) -> Result<()> {
        let i = id.index();
        let node = self.g.node(id).clone();
        let out_dims = self.dims[i].clone();
        let empty = out_dims.iter().product::<usize>() == 0;
        let none =
            |k: usize, back: usize| self.dims[node.inputs[k].index()].iter().rev().nth(back) == Some(&0);
        let sums_nothing = node.op.facts().summed.is_some_and(|(operand, axis)| none(operand, axis));
        if empty {
            self.buffer[i] = Some(self.new_buffer(node.ty.dtype, &out_dims));
            return Ok(());
        }
        if sums_nothing {
            // A sum over an empty axis is zero.
            let b = self.new_buffer(node.ty.dtype, &out_dims);
            self.buffer[i] = Some(b);
            let mut body = Body::new();
            let p = body.param(node.ty.dtype, Param::Literal(Scalar::I(0).cast(node.ty.dtype)));
            let r = body.instr(InstrKind::Param(p), node.ty.dtype, &[]);
            return self.finish(id, body, r, Store::dense(out_dims, b), node.op.name());
        }
        if self.waits(id) {
            self.waiting.insert(id);
            return Ok(());
        }
        self.compute(id, None).map(|_| ())
    }

    /// Whether computing an op is postponed until the chain that is its only reader is known, because the
    /// op's kernel may apply this chain.
    fn waits(&self, id: NodeId) -> bool {
        let i = id.index();
        let root = NodeId(self.last_read[i]);
        if !self.facts(id).packs
            || !self.options.passes.does(EPILOGUES)
            || self.first_read[i] != root.0
            || !self.root.get(root.index()).is_some_and(|r| *r)
            || !self.target.has_epilogues()
            || self.holds_operands(id, root)
        {
            return false;
        }
        let reads = |x: &&NodeId| self.placement(**x).is_some_and(|p| p.base == id);
        match (&self.g.node(root).op, self.facts(root).lowering) {
            (_, Lowering::ElementWise | Lowering::View) => true,
            // Each operand of a concatenation is stored by a chain of its own.
            (Op::Concat { .. }, _) => self.g.node(root).inputs.iter().filter(reads).count() == 1,
            _ => false,
        }
    }

    /// Whether postponing an op to `root` would keep more scratch memory than computing it now: more than
    /// `NEAR` nodes are computed in between, and operands that nothing reads later take more memory than the
    /// result. An example is a product of a gradient whose only reader updates a parameter at the end of a
    /// training step.
    fn holds_operands(&self, id: NodeId, root: NodeId) -> bool {
        const NEAR: usize = 16;
        let between = id.index() + 1..root.index().min(self.root.len());
        if between.filter(|i| self.root[*i] && self.live[*i]).nth(NEAR).is_none() {
            return false;
        }
        let bytes = |x: NodeId| {
            let n: usize = self.dims[x.index()].iter().product();
            self.g.dtype(x).bytes(n)
        };
        let mut bases: SmallVec<[NodeId; 4]> = SmallVec::new();
        for x in &self.g.node(id).inputs {
            if let Some(p) = self.placement(*x)
                && !bases.contains(&p.base)
            {
                bases.push(p.base);
            }
        }
        let dies = |b: &&NodeId| !self.g.node(**b).op.is_leaf() && self.last_read[b.index()] <= id.0;
        bases.iter().filter(dies).map(|b| bytes(*b)).sum::<usize>() > bytes(id)
    }

    /// Computes the postponed products that read this buffer, because it is about to be overwritten.
    pub(super) fn compute_readers(&mut self, buffer: BufId) -> Result<()> {
        let in_buffer = |p: BufferView| self.buffer[p.base.index()] == Some(buffer);
        let reads =
            |id: &NodeId| self.g.node(*id).inputs.iter().any(|x| self.placement(*x).is_some_and(in_buffer));
        let readers: Vec<NodeId> = self.waiting.iter().copied().filter(reads).collect();
        for id in readers {
            self.waiting.remove(&id);
            self.compute(id, None)?;
        }
        Ok(())
    }

    /// Adds the steps of a structured op at the op's position in the graph's order. If the op's kernel
    /// applies the epilogue, the caller adds the last step, and the [`Product`] that this step needs is
    /// returned.
    pub(super) fn compute(&mut self, id: NodeId, epilogue: Option<Epilogue<'_>>) -> Result<Option<Product>> {
        let place = std::mem::replace(&mut self.place, id);
        let made = self.compute_here(id, epilogue);
        self.place = place;
        made
    }

    fn compute_here(&mut self, id: NodeId, epilogue: Option<Epilogue<'_>>) -> Result<Option<Product>> {
        let node = self.g.node(id).clone();
        let dims = self.dims[id.index()].clone();
        let output = Operand { dtype: node.ty.dtype, view: View::dense(&dims) };
        let mut x = self.operands(&node)?;
        if let Op::Custom(c) = &node.op {
            return self.custom(id, c.clone(), x, output).map(|()| None);
        }
        let in_place = self.may_overwrite(id, &node.op, &node.inputs, &x.seen);
        let chosen = loop {
            let call = LibraryCall {
                precision: precision(self.options, &x.seen),
                in_place: usize::from(in_place),
                constants: &self.constants(&node.op, &x),
                epilogue,
                ..LibraryCall::new(Work::Op(&node.op), &x.seen, std::slice::from_ref(&output))
            };
            match select(self.cache, self.options, &node.op, &call) {
                // Repeat, because a target may report one operand at a time that must be dense.
                Err(d) if self.make_dense(&mut x, &d.dense)? => {}
                chosen => break chosen,
            }
        };
        let chosen = match chosen {
            Ok(chosen) => chosen,
            Err(_) if self.set_aside(&node.op) => {
                self.buffer[id.index()] = Some(self.new_buffer(node.ty.dtype, &dims));
                return Ok(None);
            }
            Err(d) => {
                let types: Vec<String> =
                    x.seen.iter().map(|o| format!("{}{:?}", o.dtype, o.view.shape.as_slice())).collect();
                let what =
                    format!("{} on {} (at {}): {}", node.op.name(), types.join(" × "), node.span, d.reason);
                let next = "Run it on another backend (cpu supports most ops), or write it as other ops";
                return Err(Error::unsupported(what, next));
            }
        };
        let (bufs, values) = self.bind(&x, &chosen)?;
        let cost = node.op.cost(&x.seen, &output);
        if let KernelChoice::Library(k) = &chosen
            && epilogue.is_some()
            && k.applies_epilogue()
        {
            let bytes = output.dtype.bytes(output.view.numel()) as u64;
            return Ok(Some(Product { kernel: k.clone(), buffers: bufs, values, cost, bytes }));
        }
        let b = if in_place {
            self.in_place += 1;
            self.compute_readers(bufs[0])?;
            bufs[0]
        } else {
            self.new_buffer(node.ty.dtype, &dims)
        };
        self.buffer[id.index()] = Some(b);
        let made = Made { id, cost, bounds: bounds(&node.op, &x.seen), buffers: bufs, values };
        self.add_steps(chosen, made, b)?;
        Ok(None)
    }

    /// Adds the steps of the chosen kernels, which write buffer `b`.
    fn add_steps(&mut self, chosen: KernelChoice, made: Made, b: BufId) -> Result<()> {
        let Made { id, cost, bounds, buffers: mut bufs, mut values } = made;
        let node = self.g.node(id);
        let step = |work, buffers, outputs| Step {
            work,
            buffers,
            outputs,
            op: node.op.name(),
            span: node.span.clone(),
            bounds: bounds.clone(),
            flops: cost.flops,
            bytes: cost.bytes,
            nodes: 1,
            fused: None,
            tunable: None,
        };
        bufs.push(b);
        values.push(Some(id));
        let (low, mut tunable) = match chosen {
            KernelChoice::Library(k) => {
                self.plan.workspace = self.plan.workspace.max(k.workspace());
                self.push(step(StepWork::Library(k), bufs, 1), values);
                return Ok(());
            }
            KernelChoice::Kernels(low, tunable) => (low, tunable),
        };
        values.resize(bufs.len() + low.temps.len(), None);
        for t in &low.temps {
            self.plan.buffers.push(BufferSpec { bytes: *t, storage: Storage::Slot(u32::MAX) });
            bufs.push(BufId(self.plan.buffers.len() as u32 - 1));
        }
        let n = low.steps.len().max(1) as u64;
        for (kernel, launch, binds) in low.steps {
            let written = kernel.buffers.iter().zip(&binds).filter(|(d, _)| d.write).count();
            let mut order: Vec<usize> = (0..binds.len()).collect();
            // `Step` lists read operands before written ones, for liveness. The kernel's own order can be
            // kept because templates declare written buffers last.
            order.sort_by_key(|&k| kernel.buffers[k].write);
            if order.iter().enumerate().any(|(a, b)| a != *b) {
                return Err(Error::internal(format!(
                    "kernel {} declares a written buffer before a read one",
                    kernel.name
                )));
            }
            let mut s =
                step(kernel_work(kernel, launch, None), binds.iter().map(|k| bufs[*k]).collect(), written);
            // Translate the operand number into a position among this kernel's buffers.
            s.bounds = s.bounds.and_then(|b| {
                let place = binds.iter().position(|k| *k == b.place)?;
                Some(Bounds { place, ..b })
            });
            s.flops /= n;
            s.bytes /= n;
            s.tunable = tunable.take();
            self.push(s, binds.iter().map(|k| values[*k]).collect());
        }
        Ok(())
    }

    /// Finds the operands of a structured op in memory. Masked views are copied.
    fn operands(&mut self, node: &Node) -> Result<Operands> {
        let mut x = Operands { nodes: node.inputs.clone(), placed: vec![], copies: vec![], seen: vec![] };
        for id in &node.inputs {
            let p = self
                .placement(*id)
                .ok_or_else(|| Error::internal(format!("operand of {} has no buffer", node.op.name())))?;
            x.seen.push(Operand { dtype: self.g.dtype(*id), view: p.view.clone() });
            x.placed.push(p);
            x.copies.push(None);
        }
        let masked: Vec<usize> = (0..x.placed.len()).filter(|k| x.placed[*k].view.mask.is_some()).collect();
        self.copy_operands(&mut x, masked)?;
        Ok(x)
    }

    /// Replaces operands by dense copies.
    fn copy_operands(&mut self, x: &mut Operands, which: Vec<usize>) -> Result<()> {
        for k in which {
            x.copies[k] = Some(self.copy(x.nodes[k], &x.placed[k])?);
            x.seen[k].view = View::dense(&x.seen[k].view.shape.clone());
        }
        Ok(())
    }

    /// Copies those operands of the list `which` that are not dense. Returns whether there were any.
    fn make_dense(&mut self, x: &mut Operands, which: &[usize]) -> Result<bool> {
        let spread = |k: &usize| x.seen.get(*k).is_some_and(|o| !o.view.is_dense());
        let spread: Vec<usize> = which.iter().copied().filter(spread).collect();
        let any = !spread.is_empty();
        self.copy_operands(x, spread)?;
        Ok(any)
    }

    /// The operands that are constants, if the op's kernels may read a packed constant.
    fn constants(&self, op: &Op, x: &Operands) -> Vec<usize> {
        if !op.facts().packs || !self.options.passes.does(PACKED) {
            return vec![];
        }
        (0..x.placed.len()).filter(|k| self.constant(x, *k).is_some()).collect()
    }

    fn constant(&self, x: &Operands, k: usize) -> Option<&'_ ConstData> {
        match &self.g.node(x.placed.get(k)?.base).op {
            Op::Const(c) if x.copies[k].is_none() => Some(c),
            _ => None,
        }
    }

    /// The buffers of the operands for the chosen kernels, and the nodes whose values they hold.
    fn bind(&mut self, x: &Operands, chosen: &KernelChoice) -> Result<(Vec<BufId>, Values)> {
        let (mut bufs, mut values) = (vec![], Values::new());
        let kernel = match chosen {
            KernelChoice::Library(k) => Some(k),
            KernelChoice::Kernels(..) => None,
        };
        let packing = kernel.and_then(|k| k.packing());
        for (k, p) in x.placed.iter().enumerate() {
            let (b, value) = match (x.copies[k], kernel, packing.filter(|p| p.input == k)) {
                (Some(copy), ..) => (copy, x.nodes[k]),
                (None, Some(kernel), Some(packing)) => {
                    let c = self.constant(x, k).cloned();
                    let c = c.ok_or_else(|| {
                        Error::internal(format!("{} packs an operand that is not a constant", kernel.name()))
                    })?;
                    (self.packed_buffer(kernel, &c, packing.bytes), p.base)
                }
                _ => (self.buffer_of(p.base)?, p.base),
            };
            bufs.push(b);
            values.push(Some(value));
        }
        Ok((bufs, values))
    }

    /// If `op` is a blocked convolution that is not yet known to be declined, records that the target
    /// declined it, and returns true. The graph is then made again with this convolution in the plain layout,
    /// because the passes choose the blocked layout before the target is queried.
    fn set_aside(&mut self, op: &Op) -> bool {
        match op {
            Op::Composite(c)
                if c.kind == CompositeKind::BlockedConv && !self.known_declined.contains(&**c) =>
            {
                self.declined.push(c.clone());
                true
            }
            _ => false,
        }
    }

    /// The buffer of a packed constant. Kernels with equal packings of the same constant share it.
    fn packed_buffer(&mut self, kernel: &Arc<dyn LibraryKernel>, c: &ConstData, bytes: usize) -> BufId {
        let same = |p: &PackedConst| p.data.key() == c.key() && p.kernel.packing() == kernel.packing();
        let i = match self.plan.packed.iter().position(same) {
            Some(i) => i,
            None => {
                self.plan.packed.push(PackedConst { data: c.clone(), kernel: kernel.clone() });
                self.plan.packed.len() - 1
            }
        } as u32;
        if let Some(b) = self.plan.buffers.iter().position(|b| b.storage == Storage::Packed(i)) {
            return BufId(b as u32);
        }
        self.plan.buffers.push(BufferSpec { bytes, storage: Storage::Packed(i) });
        BufId(self.plan.buffers.len() as u32 - 1)
    }

    fn custom(&mut self, id: NodeId, c: Custom, mut x: Operands, output: Operand) -> Result<()> {
        let node = self.g.node(id).clone();
        let all: Vec<usize> = (0..x.seen.len()).collect();
        self.make_dense(&mut x, &all)?;
        let mut bufs = vec![];
        let mut values = Values::new();
        for (k, p) in x.placed.iter().enumerate() {
            bufs.push(match x.copies[k] {
                Some(copy) => copy,
                None => self.buffer_of(p.base)?,
            });
            values.push(Some(if x.copies[k].is_some() { x.nodes[k] } else { p.base }));
        }
        let ops = x.seen;
        let b = self.new_buffer(node.ty.dtype, &self.dims[id.index()].clone());
        self.buffer[id.index()] = Some(b);
        bufs.push(b);
        values.push(Some(id));
        let views: Vec<View> = ops.iter().map(|o| o.view.clone()).collect();
        let cost = node.op.cost(&ops, &output);
        let work = match c.op().kernel(&views, &output.view, self.target.caps())? {
            Some((kernel, launch)) => kernel_work(kernel, launch, None),
            None => {
                self.plan.warnings.push(format!("{} runs on the host: it has no kernel", c.op().name()));
                StepWork::Host(Box::new(HostWork { op: c, inputs: ops, output }))
            }
        };
        let step = Step {
            work,
            buffers: bufs,
            outputs: 1,
            op: node.op.name(),
            span: node.span,
            bounds: None,
            flops: cost.flops,
            bytes: cost.bytes,
            nodes: 1,
            fused: None,
            tunable: None,
        };
        self.push(step, values);
        Ok(())
    }

    /// Whether an update may write into its base. The base must be a whole, dense buffer, and it must be
    /// scratch memory of this plan or donated. No other operand of the update may read the base, and nothing
    /// may read it later.
    pub(super) fn may_overwrite(&mut self, id: NodeId, op: &Op, inputs: &[NodeId], ops: &[Operand]) -> bool {
        let wanted = self.options.passes.does(IN_PLACE);
        if !wanted || !op.facts().in_place || !ops[0].view.is_dense() {
            return false;
        }
        let Some(p) = self.placement(inputs[0]) else {
            return false;
        };
        // The result takes over the buffer, so the buffer must not be larger than the result.
        let whole = self.dims[p.base.index()].iter().product::<usize>() == ops[0].view.numel();
        let free = match &self.g.node(p.base).op {
            Op::Input(k) => self.options.donated.get(*k as usize).copied().unwrap_or(false),
            Op::Const(_) => false,
            _ => true,
        };
        let reads_twice = inputs[1..].iter().any(|x| self.placement(*x).is_some_and(|q| q.base == p.base));
        whole && free && !reads_twice && self.last_read[p.base.index()] <= id.0
    }
}

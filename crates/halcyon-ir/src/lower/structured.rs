//! Structured ops: puts their operands into buffers, then chooses a library kernel or a template.

use super::*;
use crate::data::ConstData;

/// A library kernel that reads a packed constant.
struct PackedCall {
    kernel: Arc<dyn LibraryKernel>,
    constant: ConstData,
    /// Inputs that must be dense.
    dense: Vec<usize>,
}

fn reads_packed(kernel: &Arc<dyn LibraryKernel>, input: usize) -> bool {
    kernel.packing().is_some_and(|p| p.input == input)
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
        let facts = node.op.facts();
        let sums_nothing = facts.summed.is_some_and(|(operand, axis)| none(operand, axis));
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
        let mut bufs: Vec<BufId> = vec![];
        let mut values = Values::new();
        let mut ops: Vec<Operand> = vec![];
        let packed = self.packed(&node.op, &node.inputs, id)?;
        for (k, x) in node.inputs.iter().enumerate() {
            let p = self
                .placement(*x)
                .ok_or_else(|| Error::internal(format!("operand of {} has no buffer", node.op.name())))?;
            let dtype = self.g.dtype(*x);
            let must_copy = !p.view.is_dense() && packed.as_ref().is_some_and(|c| c.dense.contains(&k));
            if let Some(chosen) = packed.as_ref().filter(|p| reads_packed(&p.kernel, k)) {
                let bytes = chosen.kernel.packing().map_or(0, |p| p.bytes);
                bufs.push(self.packed_buffer(&chosen.kernel, &chosen.constant, bytes));
                values.push(Some(p.base));
                ops.push(Operand { dtype, view: p.view });
            } else if p.view.mask.is_some() || must_copy {
                bufs.push(self.copy(*x, &p)?);
                values.push(Some(*x));
                ops.push(Operand { dtype, view: View::dense(&p.view.shape) });
            } else {
                bufs.push(self.buffer_of(p.base)?);
                values.push(Some(p.base));
                ops.push(Operand { dtype, view: p.view });
            }
        }
        let output = Operand { dtype: node.ty.dtype, view: View::dense(&out_dims) };
        let in_place = self.may_overwrite(id, &node.op, &node.inputs, &ops);
        let precision = precision(self.options, &ops);
        if let Op::Custom(c) = &node.op {
            return self.custom(id, c.clone(), bufs, values, ops, output);
        }
        let mut chosen = match packed {
            Some(p) => Ok(Chosen::Library(p.kernel)),
            None => self.select(&node.op, &ops, &output, precision, in_place),
        };
        // A target may ask for dense operands one at a time.
        while let Err(d) = &chosen {
            let spread = |k: &usize| ops.get(*k).is_some_and(|o| !o.view.is_dense());
            let copied: Vec<usize> = d.dense.iter().copied().filter(spread).collect();
            if copied.is_empty() {
                break;
            }
            for k in copied {
                let p = self
                    .placement(node.inputs[k])
                    .ok_or_else(|| Error::internal("operand without placement"))?;
                bufs[k] = self.copy(node.inputs[k], &p)?;
                values[k] = Some(node.inputs[k]);
                ops[k].view = View::dense(&ops[k].view.shape.clone());
            }
            chosen = self.select(&node.op, &ops, &output, precision, in_place);
        }
        let chosen = chosen.map_err(|d| {
            let types: Vec<String> =
                ops.iter().map(|o| format!("{}{:?}", o.dtype, o.view.shape.as_slice())).collect();
            let what =
                format!("{} on {} (at {}): {}", node.op.name(), types.join(" × "), node.span, d.reason);
            Error::unsupported(what, "Run it on another backend (cpu has most), or write it as other ops")
        })?;
        let b = if in_place {
            self.in_place += 1;
            bufs[0]
        } else {
            self.new_buffer(node.ty.dtype, &out_dims)
        };
        self.buffer[i] = Some(b);
        let cost = node.op.cost(&ops, &output);
        let bounds = bounds(&node.op, &ops);
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
        match chosen {
            Chosen::Library(k) => {
                self.plan.workspace = self.plan.workspace.max(k.workspace());
                if facts.packs && self.options.passes.does(EPILOGUES) {
                    let call = PlainCall {
                        step: self.plan.steps.len(),
                        op: node.op.clone(),
                        operands: ops,
                        buffers: bufs.clone(),
                        values: values.clone(),
                        packed: k.packing().map(|p| p.input),
                    };
                    self.calls.insert(id, call);
                }
                bufs.push(b);
                values.push(Some(id));
                self.values.push(values);
                self.plan.steps.push(step(StepWork::Library(k), bufs, 1));
            }
            Chosen::Kernels(low, mut tunable) => {
                bufs.push(b);
                values.push(Some(id));
                values.resize(bufs.len() + low.temps.len(), None);
                for t in &low.temps {
                    let bytes = *t;
                    self.plan.buffers.push(BufferSpec { bytes, storage: Storage::Slot(u32::MAX) });
                    bufs.push(BufId(self.plan.buffers.len() as u32 - 1));
                }
                let n = low.steps.len().max(1) as u64;
                for (kernel, launch, binds) in low.steps {
                    let written = kernel.buffers.iter().zip(&binds).filter(|(d, _)| d.write).count();
                    let mut order: Vec<usize> = (0..binds.len()).collect();
                    // `Step` lists read operands before written ones, for liveness. The kernel's own order
                    // can be kept because templates declare written buffers last.
                    order.sort_by_key(|&k| kernel.buffers[k].write);
                    if order.iter().enumerate().any(|(a, b)| a != *b) {
                        return Err(Error::internal(format!(
                            "kernel {} declares a written buffer before a read one",
                            kernel.name
                        )));
                    }
                    let mut s = step(
                        kernel_work(kernel, launch, None),
                        binds.iter().map(|k| bufs[*k]).collect(),
                        written,
                    );
                    // Translate the operand number into a position among this kernel's buffers.
                    s.bounds = s.bounds.and_then(|b| {
                        let place = binds.iter().position(|k| *k == b.place)?;
                        Some(Bounds { place, ..b })
                    });
                    s.flops /= n;
                    s.bytes /= n;
                    self.values.push(binds.iter().map(|k| values[*k]).collect());
                    s.tunable = tunable.take();
                    self.plan.steps.push(s);
                }
            }
        }
        Ok(())
    }

    fn select(
        &self,
        op: &Op,
        inputs: &[Operand],
        output: &Operand,
        precision: MatmulPrecision,
        in_place: bool,
    ) -> Result<Chosen, Declined> {
        let outputs = std::slice::from_ref(output);
        let call = LibraryCall { precision, in_place, ..LibraryCall::new(Work::Op(op), inputs, outputs) };
        select(self.answers, self.options, op, &call)
    }

    /// The library kernel of an op with a constant operand that it reads packed, and the constant. `None` if
    /// the target has no such kernel.
    fn packed(&self, op: &Op, inputs: &[NodeId], id: NodeId) -> Result<Option<PackedCall>> {
        if !op.facts().packs || !self.options.passes.does(PACKED) {
            return Ok(None);
        }
        let places: Option<Vec<Placed>> = inputs.iter().map(|x| self.placement(*x)).collect();
        let Some(places) = places.filter(|p| p.iter().all(|p| p.view.mask.is_none())) else {
            return Ok(None);
        };
        let operands: Vec<Operand> = inputs
            .iter()
            .zip(&places)
            .map(|(x, p)| Operand { dtype: self.g.dtype(*x), view: p.view.clone() })
            .collect();
        let output = [Operand { dtype: self.g.dtype(id), view: View::dense(&self.dims[id.index()]) }];
        for (k, p) in places.iter().enumerate() {
            let Op::Const(c) = &self.g.node(p.base).op else { continue };
            let call = LibraryCall {
                precision: precision(self.options, &operands),
                packed: Some(k),
                ..LibraryCall::new(Work::Op(op), &operands, &output)
            };
            let mut dense = vec![];
            let mut found = self.target.library(&call);
            if let Err(d) = &found
                && !d.dense.is_empty()
                && d.dense.iter().all(|i| *i != k && *i < operands.len())
            {
                // The other operands that must be dense are copied first, as without packing.
                dense = d.dense.clone();
                let mut operands = operands.clone();
                dense.iter().for_each(|i| operands[*i].view = View::dense(&operands[*i].view.shape.clone()));
                found = self.target.library(&LibraryCall { inputs: &operands, ..call });
            }
            if let Ok(kernel) = found
                && reads_packed(&kernel, k)
            {
                return Ok(Some(PackedCall { kernel, constant: c.clone(), dense }));
            }
        }
        Ok(None)
    }

    /// The buffer of a packed constant. Kernels with equal packings share it.
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

    pub(super) fn custom(
        &mut self,
        id: NodeId,
        c: crate::custom::Custom,
        bufs: Vec<BufId>,
        values: Values,
        ops: Vec<Operand>,
        output: Operand,
    ) -> Result<()> {
        let node = self.g.node(id).clone();
        let mut bufs = bufs;
        let mut values = values;
        let mut ops = ops;
        for k in 0..ops.len() {
            if !ops[k].view.is_dense() {
                let p = self
                    .placement(node.inputs[k])
                    .ok_or_else(|| Error::internal("operand without placement"))?;
                bufs[k] = self.copy(node.inputs[k], &p)?;
                values[k] = Some(node.inputs[k]);
                ops[k].view = View::dense(&ops[k].view.shape.clone());
            }
        }
        let b = self.new_buffer(node.ty.dtype, &self.dims[id.index()].clone());
        self.buffer[id.index()] = Some(b);
        bufs.push(b);
        values.push(Some(id));
        self.values.push(values);
        let views: Vec<View> = ops.iter().map(|o| o.view.clone()).collect();
        let cost = node.op.cost(&ops, &output);
        let work = match c.op().kernel(&views, &output.view, self.target.caps())? {
            Some((kernel, launch)) => kernel_work(kernel, launch, None),
            None => {
                self.plan.warnings.push(format!("{} runs on the host: it has no kernel", c.op().name()));
                StepWork::Host(Box::new(HostWork { op: c, inputs: ops, output }))
            }
        };
        self.plan.steps.push(Step {
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
        });
        Ok(())
    }

    /// Whether an update may write into its base: the base must be whole, scratch of this plan or donated,
    /// and not read later.
    pub(super) fn may_overwrite(&mut self, id: NodeId, op: &Op, inputs: &[NodeId], ops: &[Operand]) -> bool {
        let wanted = self.options.passes.does(IN_PLACE);
        if !wanted || !op.facts().in_place || !ops[0].view.is_dense() {
            return false;
        }
        let Some(p) = self.placement(inputs[0]) else {
            return false;
        };
        let free = match &self.g.node(p.base).op {
            Op::Input(k) => self.options.donated.get(*k as usize).copied().unwrap_or(false),
            Op::Const(_) => false,
            _ => true,
        };
        let reads_twice = inputs[1..].iter().any(|x| self.placement(*x).is_some_and(|q| q.base == p.base));
        free && !reads_twice && self.last_read[p.base.index()] <= id.0
    }
}

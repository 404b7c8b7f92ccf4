//! Builds fused kernels.

use super::*;
use crate::layout::collapse;
use crate::ops::element_wise::ScalarOp;

/// The space that a fused kernel iterates over, and the place of its result.
pub(super) struct Store {
    pub(super) space: Dims,
    /// Number of reduced axes. They are the last axes of `space`.
    pub(super) reduced: usize,
    pub(super) reduce: Option<ReduceKind>,
    /// The view of the result in `buffer`, over the axes that are not reduced.
    pub(super) view: View,
    pub(super) buffer: BufId,
}

impl Store {
    /// Stores an element for every point of `space` in a dense buffer, without a reduction.
    pub(super) fn dense(space: Dims, buffer: BufId) -> Store {
        let view = View::dense(&space);
        Store { space, reduced: 0, reduce: None, view, buffer }
    }
}

/// A fused kernel under construction.
pub(super) struct Body {
    pub(super) loads: Vec<Load>,
    pub(super) sources: Vec<NodeId>,
    pub(super) params: Vec<(DType, Param)>,
    pub(super) instrs: Vec<Instr>,
    pub(super) memo: HashMap<(NodeId, usize), Reg>,
    /// Lists of view ops between a node and the result. A list begins with the op that reads the node.
    pub(super) paths: Vec<Vec<Restride>>,
    pub(super) nodes: usize,
}

impl Lowerer<'_> {
    /// Copies a view into a new dense buffer. Adds no step if the view has no elements.
    pub(super) fn copy(&mut self, id: NodeId, from: &BufferView) -> Result<BufId> {
        let dims: Dims = from.view.shape.clone();
        let dtype = self.g.dtype(id);
        let b = self.new_buffer(dtype, &dims);
        if dims.iter().product::<usize>() == 0 {
            return Ok(b);
        }
        let mut body = Body::new();
        let r = self.load(&mut body, from.clone(), dtype, &[]);
        self.finish(id, body, r, Store::dense(dims, b), "copy".into())?;
        Ok(b)
    }

    /// Adds a step that computes node `value`, applies the view op `path` if there is one, and stores the
    /// value or its reduction as the result of node `root`. If `root` is a reduction or a concatenation,
    /// `value` is an operand of `root`; otherwise the two are the same node.
    pub(super) fn fused(
        &mut self,
        root: NodeId,
        value: NodeId,
        path: Option<Restride>,
        store: Store,
    ) -> Result<()> {
        let mut body = Body::new();
        body.paths.push(path.into_iter().collect());
        let mut r = self.emit(&mut body, value, 0, value == root)?;
        let name = self.g.node(root).op.name();
        // Without a reduction, the store itself rounds to a half type, so drop a final cast that only rounds.
        if let (None, Some(Instr { kind: InstrKind::Cast, dtype, args })) = (store.reduce, body.instrs.last())
            && r as usize + 1 == body.instrs.len()
            && body.instrs[args[0] as usize].dtype == *dtype
        {
            r = args[0];
            body.instrs.pop();
        }
        self.finish(root, body, r, store, name)
    }

    /// Adds the instructions that compute `id`, with the view ops `body.paths[path]` applied. If the value is
    /// in a buffer, the instructions load it instead, unless `own` is set: `own` means that this kernel fills
    /// the buffer. Literals, arguments and iotas are always computed.
    pub(super) fn emit(&self, body: &mut Body, id: NodeId, path: usize, own: bool) -> Result<Reg> {
        if let Some(r) = body.memo.get(&(id, path)) {
            return Ok(*r);
        }
        let node = self.g.node(id);
        let dtype = node.ty.dtype;
        let through = body.paths[path].clone();
        let r = match &node.op {
            Op::Full(v) => {
                let p = body.param(dtype, Param::Literal(*v));
                body.instr(InstrKind::Param(p), dtype, &[])
            }
            Op::Arg(k) => {
                let p = body.param(dtype, Param::Arg(*k));
                body.instr(InstrKind::Param(p), dtype, &[])
            }
            Op::Iota { axis } => self.iota(body, id, *axis, dtype, &through)?,
            _ if !own && self.placement(id).is_some() => {
                let p = self.placement(id).ok_or_else(|| Error::internal("placement vanished"))?;
                self.load(body, p, dtype, &through)
            }
            Op::Scalar(s) => {
                body.nodes += 1;
                let a: SmallVec<[Reg; 3]> =
                    node.inputs.iter().map(|x| self.emit(body, *x, path, false)).collect::<Result<_>>()?;
                let r = body.instr(InstrKind::Op(*s), dtype, &a);
                // Round to the half type even if the value is not stored, so that fusion does not change
                // results.
                if dtype.widens() && !s.exact() { body.instr(InstrKind::Cast, dtype, &[r]) } else { r }
            }
            Op::Cast | Op::Bitcast => {
                body.nodes += 1;
                let a = self.emit(body, node.inputs[0], path, false)?;
                body.instr(
                    if node.op == Op::Cast { InstrKind::Cast } else { InstrKind::Bitcast },
                    dtype,
                    &[a],
                )
            }
            op => {
                let Some(change) = self.restride(id) else {
                    return Err(Error::internal(format!("{} cannot be fused", op.name())));
                };
                match self.placed[id.index()].clone() {
                    Some(p) => self.load(body, p, dtype, &through),
                    None => {
                        let mut longer = vec![change];
                        longer.extend(through);
                        body.paths.push(longer);
                        let k = body.paths.len() - 1;
                        self.emit(body, node.inputs[0], k, false)?
                    }
                }
            }
        };
        body.memo.insert((id, path), r);
        Ok(r)
    }

    pub(super) fn load(&self, body: &mut Body, p: BufferView, dtype: DType, through: &[Restride]) -> Reg {
        let mut view = p.view;
        for step in through {
            if let Some(v) = step.apply(&view) {
                view = v;
            }
        }
        let fill = view
            .mask
            .is_some()
            .then(|| body.param(dtype, Param::Literal(p.fill.unwrap_or(Scalar::I(0).cast(dtype)))));
        let input = match body.sources.iter().position(|s| *s == p.base) {
            Some(k) => k,
            None => {
                body.sources.push(p.base);
                body.sources.len() - 1
            }
        } as u32;
        let load = Load { input, dtype, view, fill };
        let k = match body.loads.iter().position(|l| *l == load) {
            Some(k) => k,
            None => {
                body.loads.push(load);
                body.loads.len() - 1
            }
        };
        // Two views of one operand may result in the same read.
        let kind = InstrKind::Load(k as u32);
        match body.instrs.iter().position(|i| i.kind == kind) {
            Some(r) => r as Reg,
            None => body.instr(kind, dtype, &[]),
        }
    }

    /// Adds the instructions that compute an iota: the index along `axis`, with the view ops `through`
    /// applied. The index is an affine function of the position in the kernel's space. To find this function,
    /// `through` is applied to a view with stride 1 along `axis` and stride 0 along the other axes. Its
    /// coefficients are the strides of the resulting view, and its constant term is the offset of that view.
    pub(super) fn iota(
        &self,
        body: &mut Body,
        id: NodeId,
        axis: usize,
        dtype: DType,
        through: &[Restride],
    ) -> Result<Reg> {
        let dims = &self.dims[id.index()];
        let mut v = View { shape: dims.clone(), strides: smallvec![0; dims.len()], offset: 0, mask: None };
        v.strides[axis] = 1;
        for p in through {
            v = p.apply(&v).ok_or_else(|| Error::internal("strides cannot express a reshape of an iota"))?;
        }
        let mut sum = None;
        for (k, s) in v.strides.iter().enumerate().filter(|(_, s)| **s != 0) {
            let mut t = body.instr(InstrKind::Iota(k as u32), dtype, &[]);
            if *s != 1 {
                let p = body.param(dtype, Param::Literal(Scalar::I(*s as i64).cast(dtype)));
                let c = body.instr(InstrKind::Param(p), dtype, &[]);
                t = body.instr(InstrKind::Op(ScalarOp::Mul), dtype, &[t, c]);
            }
            sum = Some(match sum {
                None => t,
                Some(u) => body.instr(InstrKind::Op(ScalarOp::Add), dtype, &[u, t]),
            });
        }
        if v.offset != 0 || sum.is_none() {
            let p = body.param(dtype, Param::Literal(Scalar::I(v.offset as i64).cast(dtype)));
            let c = body.instr(InstrKind::Param(p), dtype, &[]);
            sum = Some(match sum {
                None => c,
                Some(u) => body.instr(InstrKind::Op(ScalarOp::Add), dtype, &[u, c]),
            });
        }
        sum.ok_or_else(|| Error::internal("an index without terms"))
    }

    /// Adds the chain `body`, which stores `value`, to the plan: as the epilogue of a product, as a library
    /// kernel, or as one or two generated kernels.
    pub(super) fn finish(
        &mut self,
        root: NodeId,
        body: Body,
        value: Reg,
        store: Store,
        name: String,
    ) -> Result<()> {
        let Store { space, reduced, reduce, view, buffer } = store;
        let whole = space.clone();
        let mut f = Fused {
            reduced,
            loads: body.loads,
            params: body.params,
            body: body.instrs,
            outs: vec![Out { value, dtype: self.g.dtype(root), reduce, view }],
            space,
        };
        collapse_fused(&mut f);
        if f.space.len() > MAX_RANK {
            let what = format!(
                "an element-wise kernel over {} axes that do not merge ({name} at {})",
                f.space.len(),
                self.g.node(root).span
            );
            return Err(Error::unsupported(what, format!("Reshape so that at most {MAX_RANK} axes remain")));
        }
        let chain = Chain {
            fused: Arc::new(f),
            inputs: body
                .sources
                .iter()
                .map(|s| Operand { dtype: self.g.dtype(*s), view: View::dense(&self.dims[s.index()]) })
                .collect(),
            sources: body.sources,
            output: Operand { dtype: self.g.dtype(root), view: View::dense(&whole) },
            buffer,
            nodes: body.nodes,
            name,
        };
        if reduced == 0 && self.as_epilogue(root, &chain)? {
            return Ok(());
        }
        let in_place = self.overwritten(root, &chain);
        let chain = match in_place {
            Some(k) => chain.reading_first(k),
            None => chain,
        };
        let Chain { fused: f, sources, inputs, nodes, name, .. } = chain;
        let bytes = self.plan.buffers[buffer.0 as usize].bytes;
        let dtype = self.g.dtype(root);
        let outputs = [Operand { dtype, view: View::dense(&[bytes / dtype.size().max(1)]) }];
        let mut buffers: Vec<BufId> = sources.iter().map(|s| self.buffer_of(*s)).collect::<Result<_>>()?;
        buffers.push(buffer);
        let call = LibraryCall {
            precision: self.options.precision,
            in_place: usize::from(in_place.is_some()),
            ..LibraryCall::new(Work::Fused(&f), &inputs, &outputs)
        };
        let first = in_place.and_then(|_| sources.first()).map(|s| &self.g.node(*s).op);
        if let Some(Op::Input(k)) = first {
            self.compute_readers(buffers[0])?;
            self.plan.buffers[buffer.0 as usize].storage = Storage::Input(*k);
            self.overwriting.insert(buffer);
            self.in_place += 1;
        }
        let (work, tunable) = match self.cache.library(&call) {
            Ok(k) => (StepWork::Library(k), None),
            Err(_) => {
                if let Some(two) = kernel_lower::reduction_in_parts(&f, self.target.caps()) {
                    let parts = Parts { sources, inputs, buffers, nodes, name };
                    return self.in_parts(root, two, parts, &outputs[0]);
                }
                let (kernel, launch, tunable) =
                    self.chain(&f, inputs.clone(), &outputs[0]).map_err(|e| e.at(&self.g.node(root).span))?;
                (kernel_work(kernel, launch, Some(&f)), tunable)
            }
        };
        let (flops, moved) = (f.flops(), f.bytes());
        let values = sources.iter().chain([&root]).map(|n| Some(*n)).collect();
        let op = if nodes > 1 { format!("{name}+{}", nodes - 1) } else { name };
        let step = Step {
            work,
            buffers,
            outputs: 1,
            op,
            span: self.g.node(root).span.clone(),
            bounds: None,
            flops,
            bytes: moved,
            nodes: nodes.max(1),
            fused: Some(f),
            tunable,
        };
        let in_place = usize::from(in_place.is_some());
        let chain = (reduced == 0).then(|| ChainCall { inputs, outputs: outputs.to_vec(), in_place });
        self.steps.push(PlacedStep { place: self.place, step, values, chain });
        Ok(())
    }
}

/// What the two steps of a reduction share (`in_parts`).
struct Parts {
    sources: Vec<NodeId>,
    inputs: Vec<Operand>,
    /// The buffers of the inputs, then that of the result.
    buffers: Vec<BufId>,
    /// Number of graph nodes that the steps compute.
    nodes: usize,
    name: String,
}

impl Lowerer<'_> {
    /// Runs a reduction as two steps with a temporary between them.
    fn in_parts(
        &mut self,
        root: NodeId,
        [first, last]: [Fused; 2],
        parts: Parts,
        output: &Operand,
    ) -> Result<()> {
        let Parts { sources, inputs, mut buffers, nodes, name } = parts;
        let Some(between) = first.outs.first().map(|o| Operand { dtype: o.dtype, view: o.view.clone() })
        else {
            return Err(Error::internal("a reduction without a result"));
        };
        let temp = self.new_buffer(between.dtype, &between.view.shape);
        let result = buffers.pop().ok_or_else(|| Error::internal("a reduction without a buffer"))?;
        buffers.push(temp);
        let read: Values = sources.into_iter().map(Some).chain([None]).collect();
        let written: Values = [None, Some(root)].into_iter().collect();
        let halves = [
            (first, inputs, &between, buffers, read, nodes),
            (last, vec![between.clone()], output, vec![temp, result], written, 1),
        ];
        for (f, inputs, output, buffers, values, nodes) in halves {
            let f = Arc::new(f);
            let (kernel, launch, tunable) =
                self.chain(&f, inputs, output).map_err(|e| e.at(&self.g.node(root).span))?;
            let step = Step {
                work: kernel_work(kernel, launch, Some(&f)),
                buffers,
                outputs: 1,
                op: if nodes > 1 { format!("{name}+{}", nodes - 1) } else { name.clone() },
                span: self.g.node(root).span.clone(),
                bounds: None,
                flops: f.flops(),
                bytes: f.bytes(),
                nodes: nodes.max(1),
                fused: Some(f),
                tunable,
            };
            self.push(step, values);
        }
        Ok(())
    }

    /// The kernel of `f`: the tuned variant if tuning has chosen one, else the default.
    fn chain(
        &self,
        f: &Arc<Fused>,
        inputs: Vec<Operand>,
        output: &Operand,
    ) -> Result<(Kernel, Launch, Option<Arc<Tunable>>)> {
        let caps = self.target.caps();
        if !self.options.tunes() {
            let (kernel, launch) = kernel_lower::lower_fused(f, caps)?;
            return Ok((kernel, launch, None));
        }
        let choices = kernel_lower::fused_choices(f, caps);
        let mut t = Tunable {
            work: tune::Work::Fused(f.clone()),
            inputs,
            output: output.clone(),
            variant: choices.default.clone(),
            choices,
            tuned: false,
        };
        let known = self.options.tuned.as_ref().and_then(|k| k.find(&t.choices, |v| t.build(v, caps).ok()));
        let (kernel, launch) = match known {
            Some((v, mut low)) if low.steps.len() == 1 => {
                (t.variant, t.tuned) = (v, true);
                let (kernel, launch, _) = low.steps.remove(0);
                (kernel, launch)
            }
            _ => kernel_lower::lower_fused(f, caps)?,
        };
        Ok((kernel, launch, Some(Arc::new(t))))
    }
}

/// A fused kernel that has no step in the plan yet.
struct Chain {
    fused: Arc<Fused>,
    sources: Vec<NodeId>,
    /// The sources as operands.
    inputs: Vec<Operand>,
    /// The result as an operand.
    output: Operand,
    /// The buffer of the result.
    buffer: BufId,
    /// Number of graph nodes that the chain computes.
    nodes: usize,
    name: String,
}

impl Chain {
    /// The chain with source `k` as its first source.
    fn reading_first(mut self, k: usize) -> Chain {
        self.sources.swap(0, k);
        self.inputs.swap(0, k);
        let mut f = (*self.fused).clone();
        for l in &mut f.loads {
            l.input = match l.input as usize {
                n if n == k => 0,
                0 => k as u32,
                n => n as u32,
            };
        }
        self.fused = Arc::new(f);
        self
    }
}

impl Lowerer<'_> {
    /// The source whose memory the chain may overwrite with its result, if there is one. The source must be a
    /// donated input of the result's type. To compute an element, the chain must read the source at the
    /// position of that element only, and nothing may read the source later. The result must be an output of
    /// the graph. In this way an optimizer's step writes parameters and moments in place.
    fn overwritten(&self, root: NodeId, chain: &Chain) -> Option<usize> {
        let f = &chain.fused;
        let [out] = f.outs.as_slice() else { return None };
        let output = self.g.outputs().iter().any(|o| o.node == root);
        if !self.options.passes.does(IN_PLACE) || !self.is_expr(root) || f.reduced > 0 || !output {
            return None;
        }
        let free = |s: NodeId| {
            let Op::Input(k) = self.g.node(s).op else { return false };
            let donated = self.options.donated.get(k as usize).copied().unwrap_or(false);
            let taken = |b: &BufId| self.plan.buffers[b.0 as usize].storage == Storage::Input(k);
            donated
                && self.g.ty(s) == self.g.ty(root)
                && self.last_read[s.index()] <= root.0
                && !self.overwriting.iter().any(taken)
        };
        let same = |k: usize| {
            let mut loads = f.loads.iter().filter(|l| l.input as usize == k);
            loads.all(|l| l.view == out.view && l.dtype == out.dtype && l.fill.is_none())
        };
        (0..chain.sources.len()).find(|k| free(chain.sources[*k]) && same(*k))
    }

    /// Computes the products in `waiting`, which were postponed until the chain that reads them was known. If
    /// the kernel of one of them applies the chain, one step at the chain's place in the plan computes both.
    /// Every other product gets a step at its own place. The products are tried from the last in the graph to
    /// the first.
    fn as_epilogue(&mut self, root: NodeId, chain: &Chain) -> Result<bool> {
        let mut waiting: Vec<usize> =
            (0..chain.sources.len()).filter(|k| self.waiting.remove(&chain.sources[*k])).collect();
        waiting.sort_by_key(|k| chain.sources[*k]);
        while let Some(k) = waiting.pop() {
            let others = (0..chain.sources.len()).filter(|j| *j != k);
            let inputs: Vec<Operand> = others.clone().map(|j| chain.inputs[j].clone()).collect();
            let f = &chain.fused;
            let epilogue = Epilogue { fused: f, product: k as u32, inputs: &inputs, output: &chain.output };
            let id = chain.sources[k];
            let Some(Product { kernel, mut buffers, mut values, cost, bytes }) =
                self.compute(id, Some(epilogue))?
            else {
                continue;
            };
            for j in waiting {
                self.compute(chain.sources[j], None)?;
            }
            for j in others {
                buffers.push(self.buffer_of(chain.sources[j])?);
                values.push(Some(chain.sources[j]));
            }
            buffers.push(chain.buffer);
            values.push(Some(root));
            self.plan.workspace = self.plan.workspace.max(kernel.workspace());
            let product = self.g.node(id);
            let (name, more) = (&chain.name, chain.nodes.saturating_sub(1));
            let step = Step {
                work: StepWork::Library(kernel),
                buffers,
                outputs: 1,
                op: format!(
                    "{}+{name}{}",
                    product.op.name(),
                    if more > 0 { format!("+{more}") } else { String::new() }
                ),
                span: product.span.clone(),
                bounds: None,
                flops: cost.flops.saturating_add(f.flops()),
                // The product is neither stored nor loaded.
                bytes: cost.bytes.saturating_add(f.bytes()).saturating_sub(2 * bytes),
                nodes: 1 + chain.nodes.max(1),
                fused: Some(f.clone()),
                tunable: None,
            };
            self.push(step, values);
            self.epilogues += 1;
            return Ok(true);
        }
        Ok(false)
    }
}

impl Body {
    pub(super) fn new() -> Body {
        Body {
            loads: vec![],
            sources: vec![],
            params: vec![],
            instrs: vec![],
            memo: HashMap::new(),
            paths: vec![],
            nodes: 0,
        }
    }

    pub(super) fn param(&mut self, dtype: DType, p: Param) -> u32 {
        // Equal arguments share a parameter. Literals do not, because the program would then depend on which
        // literals happen to be equal.
        if let (Param::Arg(_), Some(k)) = (p, self.params.iter().position(|q| *q == (dtype, p))) {
            return k as u32;
        }
        self.params.push((dtype, p));
        self.params.len() as u32 - 1
    }

    pub(super) fn instr(&mut self, kind: InstrKind, dtype: DType, args: &[Reg]) -> Reg {
        self.instrs.push(Instr { kind, dtype, args: args.into() });
        self.instrs.len() as Reg - 1
    }
}

pub(super) fn kernel_work(kernel: Kernel, launch: Launch, fused: Option<&Fused>) -> StepWork {
    let arg = |k: usize| match fused
        .and_then(|f| kernel_lower::fused_param(&kernel, k).and_then(|p| f.params.get(p)))
    {
        Some((_, Param::Arg(a))) => Some(*a),
        _ => None,
    };
    let params = launch.params.iter().enumerate().map(|(k, v)| (*v, arg(k))).collect();
    StepWork::Kernel { kernel: Arc::new(kernel), groups: launch.groups, params }
}

/// Drops axes of size 1, and merges adjacent axes wherever every view of the kernel permits it.
pub(super) fn collapse_fused(f: &mut Fused) {
    let outer = f.space.len() - f.reduced;
    let axis_view = |k: usize, f: &Fused| {
        let mut v =
            View { shape: f.space.clone(), strides: smallvec![0; f.space.len()], offset: 0, mask: None };
        v.strides[k] = 1;
        v
    };
    let used: Vec<u32> =
        f.body.iter().filter_map(|i| if let InstrKind::Iota(k) = i.kind { Some(k) } else { None }).collect();
    let mut pseudo: Vec<View> = used.iter().map(|k| axis_view(*k as usize, f)).collect();
    let mut outs: Vec<View> = f
        .outs
        .iter()
        .map(|o| {
            let mut v = View {
                shape: f.space.clone(),
                strides: o.view.strides.clone(),
                offset: o.view.offset,
                mask: None,
            };
            v.strides.resize(f.space.len(), 0);
            v
        })
        .collect();
    let mut views: Vec<&mut View> =
        f.loads.iter_mut().map(|l| &mut l.view).chain(&mut outs).chain(&mut pseudo).collect();
    let border = collapse(&mut views, outer);
    let space = outs[0].shape.clone();
    f.reduced = space.len() - border;
    for (o, v) in f.outs.iter_mut().zip(outs) {
        o.view = View {
            shape: v.shape[..border].into(),
            strides: v.strides[..border].into(),
            offset: v.offset,
            mask: None,
        };
    }
    // If all reduced axes have size 1, merging removes them. The kernel must remain a reduction, so add one
    // reduced axis of size 1.
    if f.reduced == 0 && f.outs.iter().any(|o| o.reduce.is_some()) {
        f.loads.iter_mut().for_each(|l| {
            l.view.shape.push(1);
            l.view.strides.push(0);
            if let Some(m) = &mut l.view.mask {
                m.push((0, 1));
            }
        });
        f.space = space;
        f.space.push(1);
        f.reduced = 1;
    } else {
        f.space = space;
    }
    let map: HashMap<u32, Option<u32>> = used
        .iter()
        .zip(&pseudo)
        .map(|(k, v)| (*k, v.strides.iter().position(|s| *s == 1).map(|p| p as u32)))
        .collect();
    let mut zeros = vec![];
    for i in &mut f.body {
        if let InstrKind::Iota(k) = i.kind {
            i.kind = match map.get(&k).copied().flatten() {
                Some(n) => InstrKind::Iota(n),
                None => {
                    // The axis had size 1, so the index is 0.
                    zeros.push((i.dtype, Param::Literal(Scalar::I(0).cast(i.dtype))));
                    InstrKind::Param((f.params.len() + zeros.len() - 1) as u32)
                }
            };
        }
    }
    f.params.extend(zeros);
}

//! Bodies of control flow that are compiled once and run many times.
//!
//! A body is traced into a graph whose inputs are the values that change from run to run ([`super::trace`]).
//! An If or Loop that is decided at run time is not a node of that graph: its operands are results of one
//! part of the graph, and its results are inputs of the next part. A body is therefore a list of sections. A
//! section is a graph, which the engine prepares once, or an If or Loop with bodies of its own. Values stay
//! on the engine's device; the host reads only conditions and trip counts.

use super::limits::Limits;
use super::stage::{Engine, Handle, subgraph, value_of};
use halcyon_ir::{ConstData, DType, Error, Graph, NodeId, Result, Scalar, TensorType};
use std::collections::HashMap;

/// The first allocation for the rows of a scanned result has at most this many bytes, or the size of one row
/// if that is larger. When the memory is full, its size is doubled.
const FIRST_CAPACITY: usize = 32 << 20;

/// The context in which bodies run.
pub(super) struct RunContext<'e> {
    pub(super) engine: &'e mut dyn Engine,
    pub(super) limits: &'e Limits,
}

/// An If or Loop whose operands are nodes of a traced graph.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) work: ControlKind,
    /// The inputs of the traced graph that receive the results.
    pub(super) outputs: Vec<NodeId>,
}

#[derive(Debug)]
pub(super) enum ControlKind {
    /// The condition, and the bodies for false and true with their operands.
    If(NodeId, [(CompiledBody, Vec<NodeId>); 2]),
    Loop {
        body: Box<Repeat>,
        limit: Result<NodeId, i64>,
        on: Option<NodeId>,
        state: Vec<NodeId>,
        captured: Vec<NodeId>,
    },
}

impl ControlKind {
    pub(super) fn inputs(&self) -> Vec<NodeId> {
        match self {
            ControlKind::If(cond, branches) => {
                branches.iter().flat_map(|b| &b.1).chain([cond]).copied().collect()
            }
            ControlKind::Loop { limit, on, state, captured, .. } => {
                state.iter().chain(captured).chain(limit.as_ref().ok()).chain(on).copied().collect()
            }
        }
    }
}

/// A body that is ready to run. Values are numbered, inputs first.
#[derive(Debug)]
pub(super) struct CompiledBody {
    values: Vec<Option<Handle>>,
    sections: Vec<Section>,
    outputs: Vec<usize>,
}

#[derive(Debug)]
enum Section {
    Run {
        graph: SectionGraph,
        inputs: Vec<usize>,
        outputs: Vec<usize>,
    },
    If {
        cond: usize,
        branches: [(CompiledBody, Vec<usize>); 2],
        outputs: Vec<usize>,
    },
    Loop {
        body: Box<Repeat>,
        limit: Result<usize, i64>,
        on: Option<usize>,
        state: Vec<usize>,
        captured: Vec<usize>,
        outputs: Vec<usize>,
    },
}

#[derive(Debug)]
enum SectionGraph {
    Unprepared(Graph),
    Prepared(Handle),
}

impl CompiledBody {
    /// Makes the body that computes `outputs` from the first `inputs` inputs of graph `g`. `controls` lists
    /// the Ifs and Loops of the graph in the order in which they run.
    pub(super) fn new(
        g: &Graph,
        controls: Vec<Control>,
        inputs: usize,
        outputs: &[NodeId],
    ) -> Result<CompiledBody> {
        let mut numbers: HashMap<NodeId, usize> =
            g.inputs().iter().take(inputs).enumerate().map(|(k, i)| (i.node, k)).collect();
        let mut sections = vec![];
        let mut needs: Vec<Vec<NodeId>> = controls.iter().map(|c| c.work.inputs()).collect();
        needs.push(outputs.to_vec());
        let mut controls = controls.into_iter();
        let mut next = inputs;
        for k in 0..needs.len() {
            let done = |n: NodeId| numbers.contains_key(&n);
            let wanted: Vec<NodeId> = needs[k].iter().copied().filter(|n| !done(*n)).collect();
            if !wanted.is_empty() {
                let later: Vec<NodeId> = needs[k + 1..].iter().flatten().copied().collect();
                let p = subgraph(g, &wanted, &later, &done)?;
                let of = |n: &NodeId| numbers[n];
                let from = p.inputs.iter().map(of).collect();
                let to = number(&mut numbers, &mut next, &p.outputs);
                sections.push(Section::Run {
                    graph: SectionGraph::Unprepared(p.graph),
                    inputs: from,
                    outputs: to,
                });
            }
            if let Some(c) = controls.next() {
                let outputs = number(&mut numbers, &mut next, &c.outputs);
                sections.push(Section::of(c.work, &numbers, outputs));
            }
        }
        let outputs = outputs.iter().map(|n| numbers[n]).collect();
        Ok(CompiledBody { values: vec![None; next], sections, outputs })
    }

    /// Sets input `i`. The input keeps its value over several runs, until it is set again or `clear` is
    /// called.
    pub(super) fn set_input(&mut self, i: usize, value: Handle) {
        self.values[i] = Some(value);
    }

    pub(super) fn result(&self, k: usize) -> Result<&Handle> {
        value_of(&self.values[self.outputs[k]])
    }

    /// Drops every value.
    fn clear(&mut self) {
        self.values.iter_mut().for_each(|v| *v = None);
    }

    pub(super) fn run(&mut self, m: &mut RunContext<'_>) -> Result<()> {
        let values = &mut self.values;
        for section in &mut self.sections {
            match section {
                Section::Run { graph, inputs, outputs } => {
                    if let SectionGraph::Unprepared(g) = graph {
                        *graph = SectionGraph::Prepared(m.engine.prepare(std::mem::take(g))?);
                    }
                    if let SectionGraph::Prepared(h) = graph {
                        m.engine.launch(h, values, inputs, outputs)?;
                    }
                }
                Section::If { cond, branches, outputs } => {
                    let taken = m.engine.flag(value_of(&values[*cond])?)?;
                    let (body, inputs) = &mut branches[usize::from(taken)];
                    for (k, i) in inputs.iter().enumerate() {
                        body.set_input(k, value_of(&values[*i])?.clone());
                    }
                    body.run(m)?;
                    for (k, o) in outputs.iter().enumerate() {
                        values[*o] = Some(body.result(k)?.clone());
                    }
                    body.clear();
                }
                Section::Loop { body, limit, on, state, captured, outputs } => {
                    let get = |i: &usize| value_of(&values[*i]).cloned();
                    let limit = match limit {
                        Ok(n) => integer(&m.engine.read(&get(n)?)?)?,
                        Err(n) => *n,
                    };
                    let on = on.as_ref().map(|n| m.engine.flag(&get(n)?)).transpose()?.unwrap_or(true);
                    let state = state.iter().map(get).collect::<Result<Vec<_>>>()?;
                    let captured = captured.iter().map(get).collect::<Result<Vec<_>>>()?;
                    let mut ran = LoopState { state, i: 0, on, rows: vec![] };
                    body.run(m, &captured, limit, &mut ran)?;
                    let rows = ran.rows.into_iter().map(|r| r.finish(m));
                    let all = ran.state.into_iter().map(Ok).chain(rows).collect::<Result<Vec<_>>>()?;
                    outputs.iter().zip(all).for_each(|(o, h)| values[*o] = Some(h));
                }
            }
        }
        Ok(())
    }
}

/// Assigns numbers to the nodes that have none yet.
fn number(numbers: &mut HashMap<NodeId, usize>, next: &mut usize, nodes: &[NodeId]) -> Vec<usize> {
    let mut one = |n: &NodeId| {
        *numbers.entry(*n).or_insert_with(|| {
            *next += 1;
            *next - 1
        })
    };
    nodes.iter().map(&mut one).collect()
}

impl Section {
    fn of(work: ControlKind, numbers: &HashMap<NodeId, usize>, outputs: Vec<usize>) -> Section {
        let of = |n: &NodeId| numbers[n];
        let all = |v: &[NodeId]| v.iter().map(of).collect::<Vec<_>>();
        match work {
            ControlKind::If(cond, branches) => Section::If {
                cond: of(&cond),
                branches: branches.map(|(p, inputs)| (p, all(&inputs))),
                outputs,
            },
            ControlKind::Loop { body, limit, on, state, captured } => Section::Loop {
                body,
                limit: limit.map(|n| of(&n)),
                on: on.as_ref().map(of),
                state: all(&state),
                captured: all(&captured),
                outputs,
            },
        }
    }
}

fn integer(d: &ConstData) -> Result<i64> {
    d.get(0).map(|s| s.as_i64()).ok_or_else(|| Error::internal("a trip count has no element"))
}

/// The compiled body of a loop.
#[derive(Debug)]
pub(super) struct Repeat {
    pub(super) name: String,
    /// The first inputs are the state. The results are the new state, a row of each scanned result, the
    /// number of the next iteration if `counter` is set, and the condition if `on` is `None`.
    pub(super) body: CompiledBody,
    pub(super) carried: usize,
    /// The inputs of the body for values that it captures from outside.
    pub(super) captured: Vec<usize>,
    /// The input that receives the iteration number, if the body reads it.
    pub(super) counter: Option<usize>,
    /// Type of one row of each scanned result.
    pub(super) rows: Vec<TensorType>,
    /// The loop condition if it is constant.
    pub(super) on: Option<bool>,
    /// Types of the state after an iteration.
    pub(super) after: Vec<TensorType>,
    /// Whether an iteration leaves the types of the state unchanged.
    pub(super) stable: bool,
}

/// The progress of a loop.
pub(super) struct LoopState {
    pub(super) state: Vec<Handle>,
    /// Iterations done.
    pub(super) i: i64,
    /// The current value of the loop condition.
    pub(super) on: bool,
    pub(super) rows: Vec<Rows>,
}

impl Repeat {
    /// Runs iterations until the loop ends. If an iteration changes the types of the state (`stable` is
    /// false), runs only one iteration.
    pub(super) fn run(
        &mut self,
        m: &mut RunContext<'_>,
        captured: &[Handle],
        limit: i64,
        ran: &mut LoopState,
    ) -> Result<()> {
        let first = ran.i;
        let expected = if self.stable && self.on == Some(true) { limit - first } else { 1 };
        if ran.rows.is_empty() {
            ran.rows = self.rows.iter().map(|t| Rows::new(t, expected)).collect();
        }
        if let Some((old, new)) = ran.rows.iter().map(|r| &r.row).zip(&self.rows).find(|(a, b)| a != b) {
            let what = format!("a scanned result is {old} in one iteration, but {new} in another");
            return Err(Error::argument(&self.name, what));
        }
        for (i, h) in self.captured.iter().zip(captured) {
            self.body.set_input(*i, h.clone());
        }
        if let Some(c) = self.counter {
            let i = ConstData::splat(DType::I64, &[], Scalar::I(first))?;
            self.body.set_input(c, m.engine.upload(&i)?);
        }
        while ran.on && ran.i < limit && (self.stable || ran.i == first) {
            if self.is_idle() {
                // The iterations do nothing, so they are not run. Only their number is checked against the
                // limit.
                let last = (limit as u64 - 1).min(m.limits.options.max_iterations);
                m.limits.iteration(&self.name, last)?;
                ran.i = limit;
                break;
            }
            m.limits.iteration(&self.name, ran.i as u64)?;
            for (k, h) in ran.state.drain(..).enumerate() {
                self.body.set_input(k, h);
            }
            self.body.run(m)?;
            for k in 0..self.carried {
                ran.state.push(self.body.result(k)?.clone());
            }
            for (k, r) in ran.rows.iter_mut().enumerate() {
                r.push(m, self.body.result(self.carried + k)?)?;
            }
            let mut next = self.carried + self.rows.len();
            if let Some(c) = self.counter {
                let i = self.body.result(next)?.clone();
                self.body.set_input(c, i);
                next += 1;
            }
            ran.i += 1;
            // The condition after the last iteration is not needed, so it is not read from the device.
            if ran.i < limit {
                ran.on = match self.on {
                    Some(on) => on,
                    None => m.engine.flag(self.body.result(next)?)?,
                };
            }
        }
        self.body.clear();
        Ok(())
    }

    /// Whether an iteration computes nothing and changes nothing.
    fn is_idle(&self) -> bool {
        let kept = self.body.outputs.iter().take(self.carried).enumerate().all(|(k, o)| k == *o);
        self.body.sections.is_empty() && kept && self.rows.is_empty() && self.on == Some(true)
    }
}

/// Collects the rows of a scanned result in one tensor.
#[derive(Debug)]
pub(super) struct Rows {
    row: TensorType,
    dims: Vec<usize>,
    bytes: usize,
    /// Number of rows that are stored (`n`), that fit the memory (`room`), and for which the first allocation
    /// is made (`expected`).
    pub(super) n: usize,
    room: usize,
    expected: usize,
    all: Option<Handle>,
}

impl Rows {
    /// `row` must have no symbols.
    fn new(row: &TensorType, expected: i64) -> Rows {
        let dims = row.shape.known().map(|d| d.to_vec()).unwrap_or_default();
        let bytes = row.dtype.bytes(dims.iter().product());
        let expected = usize::try_from(expected).unwrap_or(1).max(1);
        let most = (FIRST_CAPACITY / bytes.max(1)).max(1);
        Rows { row: row.clone(), dims, bytes, n: 0, room: 0, expected: expected.min(most), all: None }
    }

    fn sized(&self, n: usize) -> Vec<usize> {
        [&[n], &self.dims[..]].concat()
    }

    fn push(&mut self, m: &mut RunContext<'_>, row: &Handle) -> Result<()> {
        if self.n == self.room || self.all.is_none() {
            let room = self.expected.max(self.room.saturating_mul(2)).max(self.n + 1);
            let old = self.all.take();
            self.all = Some(m.engine.resize(old.as_ref(), self.row.dtype, &self.sized(room))?);
            self.room = room;
        }
        if let Some(all) = self.all.as_mut().filter(|_| self.bytes > 0) {
            m.engine.put(all, self.n * self.bytes, row)?;
        }
        self.n += 1;
        Ok(())
    }

    /// All rows, stacked along a new first axis.
    pub(super) fn finish(mut self, m: &mut RunContext<'_>) -> Result<Handle> {
        let all = self.all.take();
        match all {
            Some(all) if self.n == self.room => Ok(all),
            all => m.engine.resize(all.as_ref(), self.row.dtype, &self.sized(self.n)),
        }
    }

    pub(super) fn ty(&self) -> TensorType {
        TensorType::new(self.row.dtype, &self.sized(self.n)[..])
    }
}

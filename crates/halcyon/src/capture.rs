//! `Compiled` and `CapturedGraph`: plans kept by the user. A `Compiled` is a function that is compiled once
//! per set of input types. A `CapturedGraph` is one plan with its bindings.
//!
//! An evaluation finds its plan by hashing the graph of the pending operations. [`Backend::compile`] and
//! [`Backend::capture_graph`] build that graph once; later calls compare only the types of their inputs, or
//! nothing at all.

mod outputs;

pub use outputs::Outputs;

use crate::backend::{Backend, MixedPrecision};
use crate::executable::{Executable, Lease, OutputMemory, submit};
use crate::fit::Fit;
use crate::planner::{Mixed, Wanted};
use crate::state::State;
use crate::sync::lock;
use crate::tensor::{Collector, Mode, Tensor};
use halcyon_hal::{BufferRef, Command, Event, Tag};
use halcyon_ir::dtype::DType;
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::shape::TensorType;
use halcyon_ir::{NodeId, Op, Scalar};
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// Maximum number of plans that a compiled function keeps. If there are more, the least recently used plan is
/// dropped.
const TYPES: usize = 64;

type Buffers = SmallVec<[BufferRef; 8]>;

const NOT_RUN: &str = "the graph has not run, or its last run failed";

/// The graph of `outputs`. Its inputs are `given`, then the evaluated tensors that `outputs` depends on.
fn collect(outputs: &[Tensor], given: &[Tensor], mode: Mode) -> Result<Collector> {
    let mut c = Collector { mode, ..Collector::default() };
    for t in given {
        c.declare("", t);
    }
    match mode {
        Mode::Compile => c.visit_in_order(outputs)?,
        _ => outputs.iter().try_for_each(|t| c.visit(t))?,
    }
    for t in outputs {
        let id = c.ids[&Arc::as_ptr(&t.0)];
        c.graph.output("", id);
    }
    Ok(c)
}

fn of_another(backend: &Backend, t: &Tensor, op: &str) -> Result<()> {
    if t.backend().is_same(backend) {
        return Ok(());
    }
    Err(Error::MixedDevices {
        op: op.into(),
        a: backend.id().into(),
        b: t.backend().id().into(),
        at: t.0.span.clone(),
    })
}

/// Returns an error if the type of `got` is not `want`.
fn expect(op: &str, i: usize, got: &Tensor, want: &TensorType) -> Result<()> {
    let ty = &got.0.ty;
    if ty.dtype != want.dtype {
        return Err(Error::DType {
            op: format!("{op}, input {i}"),
            dtype: ty.dtype,
            want: format!("it was captured with {}", want.dtype),
            at: got.0.span.clone(),
        });
    }
    if ty.shape != want.shape {
        let what = format!("input {i} is {}, but it was captured with {}", ty.shape, want.shape);
        return Err(Error::shape(op, what).at(&got.0.span));
    }
    Ok(())
}

/// A function of tensors that is traced once per set of input types. See [`Backend::compile`].
pub struct Compiled<F> {
    backend: Backend,
    f: F,
    /// Mixed precision, if it is not the backend's.
    mixed: Option<Arc<Mixed>>,
    /// Most recently used first.
    plans: Mutex<Vec<Arc<Entry>>>,
}

struct Entry {
    inputs: Vec<(TensorType, bool)>,
    exe: Arc<Executable>,
    /// Evaluated tensors that the closure captured: further inputs of the plan.
    captured: Vec<Tensor>,
    outputs: Vec<TensorType>,
    /// For each run-time argument of the plan, the number of the caller's argument and its dtype.
    args: Vec<(u32, DType)>,
}

impl Entry {
    fn is_for(&self, inputs: &[&Tensor], donated: &[bool]) -> bool {
        let same = |(((ty, d), t), now): (((&TensorType, &bool), &&Tensor), &bool)| *ty == t.0.ty && d == now;
        let types = self.inputs.iter().map(|(ty, d)| (ty, d));
        self.inputs.len() == inputs.len() && types.zip(inputs).zip(donated).all(same)
    }
}

impl Entry {
    /// Returns an error if the last outputs cannot replace `values`, because there are too few or their types
    /// differ.
    fn can_replace(&self, values: &[Tensor]) -> Result<()> {
        let op = "compiled function";
        let Some(first) = self.outputs.len().checked_sub(values.len()) else {
            let what = format!("it has {} results for {} states", self.outputs.len(), values.len());
            return Err(Error::argument(op, what));
        };
        for (i, (new, old)) in self.outputs[first..].iter().zip(values).enumerate() {
            if *new != old.0.ty {
                return Err(Error::shape(
                    op,
                    format!("state {i} is {}, but its new value is {new}", old.0.ty),
                ));
            }
        }
        Ok(())
    }
}

impl<F> fmt::Debug for Compiled<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Compiled({}, {} plans)", self.backend.id(), self.plans())
    }
}

impl Backend {
    /// Compiles a function of tensors. The first call with inputs of given types traces `f` and makes a plan;
    /// later calls with the same types run only that plan: they do not call `f`, build a graph or hash
    /// anything.
    ///
    /// `f` is called with placeholders: it cannot read their values, and decisions that it makes by their
    /// sizes are fixed in the plan for those sizes. Literals become constants of the plan. The values of
    /// evaluated tensors that `f` captures are read at each call. These are always the tensors that the first
    /// call captured, even if `f` would now use other tensors (such as a newer version of a
    /// [`crate::State`]). Results have no gradient history; [`crate::value_and_grad`] works inside `f`.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let f = b.compile(|x: &[Tensor]| (x[0].matmul(&x[1]) + 1.0).relu());
    /// let a = Tensor::from_slice(&b, [2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
    /// assert_eq!(f.call(&[&a, &a])?[0].to_vec::<f32>()?, [8.0, 11.0, 16.0, 23.0]);
    /// assert_eq!(f.plans(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn compile<F, R>(&self, f: F) -> Compiled<F>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        Compiled { backend: self.clone(), f, mixed: None, plans: Mutex::default() }
    }

    /// Like [`Backend::compile`], with its own mixed precision in place of the backend's.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device does not store the policy's dtype.
    pub fn compile_mixed<F, R>(&self, f: F, mixed: &MixedPrecision) -> Result<Compiled<F>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        let mixed = Some(Arc::new(self.mixed(mixed)?));
        Ok(Compiled { backend: self.clone(), f, mixed, plans: Mutex::default() })
    }

    /// The memory that a compiled function with these placeholders and results takes, apart from its inputs.
    /// `donated` says for each placeholder whether the function may overwrite it. Nothing is allocated or
    /// compiled.
    ///
    /// # Errors
    /// Errors that the tensors carry, errors of planning, and the errors of [`Backend::compile_mixed`].
    pub fn fit_of(
        &self,
        placeholders: &[Tensor],
        donated: &[bool],
        results: &[Tensor],
        mixed: Option<&MixedPrecision>,
    ) -> Result<Fit> {
        let c = collect(results, placeholders, Mode::Compile)?;
        let mut donated = donated.to_vec();
        donated.resize(placeholders.len() + c.leaves.len(), false);
        let mixed = mixed.map(|m| self.mixed(m)).transpose()?.map(Arc::new);
        self.planner().fit(&c.graph, donated, mixed.as_ref())
    }
}

impl<F> Compiled<F> {
    /// The number of plans that the function keeps, at most 64. There is one for each set of input types and
    /// of inputs that the plan may overwrite.
    pub fn plans(&self) -> usize {
        lock(&self.plans).len()
    }

    /// Runs the function. If an input is marked with [`Tensor::donate`], its memory is reused if nothing else
    /// reads it. Otherwise the input is copied.
    ///
    /// # Errors
    /// Errors that the function's tensors carry; [`Error::Donated`] for an input or a captured tensor whose
    /// memory was donated; [`Error::Argument`] for a donated input that the function also captures;
    /// [`Error::MixedDevices`]; [`Error::Unsupported`] for inputs with a gradient history, which would be
    /// lost; errors of planning and of the device.
    #[track_caller]
    pub fn call<R>(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        self.call_with(inputs, &[])
    }

    /// Like [`Compiled::call`], with the values of the scalars that the function reads by
    /// [`Tensor::argument`]. Each value is cast to the dtype that [`Tensor::argument`] requests. New values
    /// need neither a new plan nor a copy to the device.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let step = b.compile(|x: &[Tensor]| &x[0] - &x[1] * &Tensor::argument(x[0].backend(), 0, DType::F32));
    /// let (w, g) = (Tensor::ones(&b, [2], DType::F32), Tensor::ones(&b, [2], DType::F32));
    /// assert_eq!(step.call_with(&[&w, &g], &[0.25.into()])?[0].to_vec::<f32>()?, [0.75; 2]);
    /// assert_eq!(step.call_with(&[&w, &g], &[0.5.into()])?[0].to_vec::<f32>()?, [0.5; 2]);
    /// assert_eq!(step.plans(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Compiled::call`]; [`Error::Argument`] if the function reads an argument that `args`
    /// lacks.
    #[track_caller]
    pub fn call_with<R>(&self, inputs: &[&Tensor], args: &[Scalar]) -> Result<Vec<Tensor>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        let asked: SmallVec<[bool; 8]> = inputs.iter().map(|t| t.is_donated()).collect();
        self.run(inputs, &asked, args, &[])
    }

    /// Like [`Compiled::call_with`], for a function that replaces states. The function gets `inputs`, then
    /// the values of `states`. Its last results, one for each state, become the states' values. A new value
    /// takes over the memory of the old value, unless the caller still holds a handle on the old value.
    /// Returns the other results.
    ///
    /// If the call fails before it has started to run, the states keep their values.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let count = State::new(Tensor::scalar(&b, 1.0, DType::F32));
    /// let step = b.compile(|x: &[Tensor]| [&x[0] * &x[1], &x[1] + 1.0]);
    /// let x = Tensor::from_slice(&b, [2], &[3.0f32, 4.0])?;
    /// assert_eq!(step.call_updating(&[&x], &[&count], &[])?[0].to_vec::<f32>()?, [3.0, 4.0]);
    /// assert_eq!(step.call_updating(&[&x], &[&count], &[])?[0].to_vec::<f32>()?, [6.0, 8.0]);
    /// assert_eq!(count.value().item::<f32>()?, 3.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Compiled::call_with`]; [`Error::Argument`] if the function has fewer results than
    /// there are states; [`Error::Shape`] if the type of a new value is not that of its state. If the device
    /// fails during the run, states whose memory was taken over have lost their values: reading them gives
    /// [`Error::Donated`].
    #[track_caller]
    pub fn call_updating<R>(
        &self,
        inputs: &[&Tensor],
        states: &[&State],
        args: &[Scalar],
    ) -> Result<Vec<Tensor>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        let values: Vec<Tensor> = states.iter().map(|s| s.value()).collect();
        values.iter().try_for_each(|v| v.eval().map(drop))?;
        // The state holds one handle, and `values` holds the other.
        let sole = values.iter().map(|v| Arc::strong_count(&v.0) == 2);
        let asked: SmallVec<[bool; 8]> = inputs.iter().map(|t| t.is_donated()).chain(sole).collect();
        let all: Vec<&Tensor> = inputs.iter().copied().chain(&values).collect();
        let mut made = self.run(&all, &asked, args, &values)?;
        let new = made.split_off(made.len() - states.len());
        states.iter().zip(new).try_for_each(|(s, t)| s.write(t))?;
        Ok(made)
    }

    /// Runs the function. If the entry of an input in `asked` is true and nothing else reads the input, its
    /// memory may be overwritten. The last outputs must have the types of `replaced`.
    #[track_caller]
    fn run<R>(
        &self,
        inputs: &[&Tensor],
        asked: &[bool],
        args: &[Scalar],
        replaced: &[Tensor],
    ) -> Result<Vec<Tensor>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        let by = Span::caller();
        for t in inputs {
            of_another(&self.backend, t, "compiled function")?;
            t.check()?;
            if t.0.tracked {
                return Err(Error::unsupported(
                    "gradients through a compiled function",
                    "Call value_and_grad inside of the function, or detach() the input",
                ));
            }
            t.eval()?;
        }
        // Tracing calls the user's code, which may evaluate tensors, so no lock is held during tracing.
        // Afterwards, decide again under the lock which inputs may be overwritten. If the decision has
        // changed, start over.
        let (entry, donated, mut buffers, _running) = loop {
            let (_, donated) = self.gather(inputs, asked)?;
            let entry = match self.find(inputs, &donated) {
                Some(e) => e,
                None => self.trace(inputs, &donated, args, &by)?,
            };
            let running = self.backend.running();
            let (buffers, now) = self.gather(inputs, asked)?;
            if now == donated {
                break (entry, donated, buffers, running);
            }
        };
        entry.can_replace(replaced).map_err(|e| e.at(&by))?;
        for t in &entry.captured {
            buffers.push(t.ready()?);
        }
        if (0..inputs.len()).any(|i| donated[i] && Arc::strong_count(&buffers[i]) > 2) {
            let what = "a tensor that the function also captures cannot be donated";
            return Err(Error::argument("compiled function", what).at(&by));
        }
        let value = |(k, dtype): &(u32, DType)| match args.get(*k as usize) {
            Some(v) => Ok(v.cast(*dtype)),
            None => {
                let what = format!("it reads argument {k}, but {} arguments were given", args.len());
                Err(Error::argument("compiled function", what).at(&by))
            }
        };
        let args: SmallVec<[Scalar; 8]> = entry.args.iter().map(value).collect::<Result<_>>()?;
        let on = self.backend.runtime().queues.current();
        let ran = entry.exe.run_on(&buffers, &args, on.as_deref());
        let (made, event) = ran.map_err(|f| {
            // A run that failed part-way leaves donated memory in an unknown state.
            if f.started {
                inputs.iter().zip(&donated).filter(|(_, d)| **d).for_each(|(t, _)| t.taken(&by));
            }
            f.error
        })?;
        for ((t, d), asked) in inputs.iter().zip(&donated).zip(asked) {
            if *d {
                t.taken(&by);
            } else if *asked {
                // Something else reads the input, so the plan made a copy.
                self.backend.runtime().stats.state_copies.fetch_add(1, Ordering::Relaxed);
            }
        }
        let tensor = |(b, ty): (BufferRef, &TensorType)| {
            let t = Tensor::at(&self.backend, ty.clone(), b, by.clone());
            if event.is_some() {
                t.set_completion(event.clone());
            }
            t
        };
        Ok(made.into_iter().zip(&entry.outputs).map(tensor).collect())
    }

    /// The inputs' buffers, and for each buffer whether the run may overwrite it. The run may do so if the
    /// caller allows it in `asked`, and nothing else reads the buffer.
    fn gather(&self, inputs: &[&Tensor], asked: &[bool]) -> Result<(Buffers, SmallVec<[bool; 8]>)> {
        let buffers: Buffers = inputs.iter().map(|t| t.ready()).collect::<Result<_>>()?;
        // The tensor holds one reference, and `buffers` holds the other.
        let sole = |((t, b), asked): ((&&Tensor, &BufferRef), &bool)| {
            *asked && t.0.readers() == 0 && Arc::strong_count(b) == 2
        };
        let donated = inputs.iter().zip(&buffers).zip(asked).map(sole).collect();
        Ok((buffers, donated))
    }

    fn find(&self, inputs: &[&Tensor], donated: &[bool]) -> Option<Arc<Entry>> {
        let mut plans = lock(&self.plans);
        let i = plans.iter().position(|e| e.is_for(inputs, donated))?;
        plans[..=i].rotate_right(1);
        Some(plans[0].clone())
    }

    /// Makes the plan for inputs of these types. `by` is the line of the call.
    fn trace<R>(&self, inputs: &[&Tensor], donated: &[bool], args: &[Scalar], by: &Span) -> Result<Arc<Entry>>
    where
        F: Fn(&[Tensor]) -> R,
        R: Outputs,
    {
        let stand_in = |t: &&Tensor| Tensor::stand_in(&self.backend, t.0.ty.clone(), by.clone());
        let given: Vec<Tensor> = inputs.iter().map(stand_in).collect();
        let outputs = (self.f)(&given).tensors()?;
        for t in &outputs {
            of_another(&self.backend, t, "compiled function")?;
        }
        let c = collect(&outputs, &given, Mode::Compile)?;
        let donated_inputs = donated;
        let mut donated = donated.to_vec();
        donated.resize(inputs.len() + c.leaves.len(), false);
        let Collector { graph, leaves, numbers, .. } = c;
        let given = args;
        let args: Vec<(u32, DType)> = numbers.into_iter().zip(graph.args().iter().copied()).collect();
        let all = inputs.iter().copied().chain(&leaves);
        let sample = all.map(|t| t.ready()).collect::<Result<Vec<BufferRef>>>()?;
        let values: Option<Vec<Scalar>> =
            args.iter().map(|(k, d)| given.get(*k as usize).map(|v| v.cast(*d))).collect();
        let sample = values.as_ref().map(|v| (&sample[..], &v[..]));
        let wanted = Wanted { mixed: self.mixed.as_ref(), sample };
        let exe = self.backend.planner().plan_for(graph, donated.clone(), wanted)?;
        let entry = Arc::new(Entry {
            inputs: inputs.iter().zip(donated).map(|(t, d)| (t.0.ty.clone(), d)).collect(),
            exe,
            captured: leaves,
            args,
            outputs: outputs.iter().map(|t| t.0.ty.clone()).collect(),
        });
        let mut plans = lock(&self.plans);
        if let Some(e) = plans.iter().find(|e| e.is_for(inputs, donated_inputs)) {
            // Another thread has made the same plan in the meantime.
            return Ok(e.clone());
        }
        plans.insert(0, entry.clone());
        plans.truncate(TYPES);
        Ok(entry)
    }
}

/// A plan with its bindings: a launch only submits it. See [`Backend::capture_graph`].
pub struct CapturedGraph {
    backend: Backend,
    exe: Arc<Executable>,
    inputs: Vec<TensorType>,
    donated: Vec<bool>,
    outputs: Vec<TensorType>,
    /// Each literal, with the number of its run-time argument.
    literals: Vec<(Tensor, usize)>,
    bound: Mutex<BoundGraph>,
    span: Span,
}

struct BoundGraph {
    lease: Lease,
    inputs: Vec<Tensor>,
    /// Outputs of the last run. The next run overwrites the outputs that nothing else holds.
    outputs: Vec<Option<BufferRef>>,
    args: Vec<Scalar>,
    /// The event of the last run's completion, if it ran in a stream.
    completion: Option<Event>,
}

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CapturedGraph({}, {} inputs, {} steps",
            self.backend.id(),
            self.inputs.len(),
            self.exe.plan().steps.len()
        )?;
        let c = self.exe.captures();
        write!(f, "; runs of the plan: {} launched as captures, {} submitted", c.launched, c.submitted)?;
        match c.reason {
            Some(why) => write!(f, ": {why})"),
            None => write!(f, ")"),
        }
    }
}

impl Backend {
    /// Captures the computation of `f`'s result as a plan with fixed bindings; nothing runs yet. Evaluated
    /// tensors that the result depends on become the graph's inputs, in the order in which the result reads
    /// them (operands from left to right), and stay bound until replaced. Inputs marked with
    /// [`Tensor::donate`] before the capture give their memory to the launch that reads them. Literals are
    /// run-time arguments, see [`CapturedGraph::set_argument`]. The graph has its own scratch.
    ///
    /// ```
    /// use halcyon::prelude::*;
    /// # fn main() -> halcyon::Result<()> {
    /// let b = Backend::cpu()?;
    /// let x = Tensor::from_slice(&b, [3], &[1.0f32, -2.0, 3.0])?;
    /// let graph = b.capture_graph(|| x.relu() * 2.0)?;
    /// assert_eq!(b.launch_graph(&graph, &[])?[0].to_vec::<f32>()?, [2.0, 0.0, 6.0]);
    /// let y = Tensor::from_slice(&b, [3], &[-1.0f32, 5.0, 0.0])?;
    /// assert_eq!(b.launch_graph(&graph, &[&y])?[0].to_vec::<f32>()?, [0.0, 10.0, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Errors that the tensors carry, and errors of planning.
    #[track_caller]
    pub fn capture_graph<R: Outputs>(&self, f: impl FnOnce() -> R) -> Result<CapturedGraph> {
        let span = Span::caller();
        let outputs = f().tensors()?;
        for t in &outputs {
            of_another(self, t, "capture_graph")?;
        }
        let c = collect(&outputs, &[], Mode::Run)?;
        let literals = c.literals();
        let Collector { graph, leaves, args, .. } = c;
        let donated: Vec<bool> = leaves.iter().map(Tensor::is_donated).collect();
        let sample = leaves.iter().map(Tensor::ready).collect::<Result<Vec<BufferRef>>>()?;
        let wanted = Wanted { sample: Some((&sample, &args)), mixed: None };
        let exe = self.planner().plan_for(graph, donated.clone(), wanted)?;
        drop(sample);
        let mut g = CapturedGraph::new(self, exe, leaves, donated, span)?;
        g.literals = literals;
        lock(&g.bound).args = args;
        Ok(g)
    }

    /// Runs a captured graph. `inputs`, in the order of the graph's inputs, replace the bound inputs and stay
    /// bound; if `inputs` is empty, the bound inputs are used.
    ///
    /// # Errors
    /// The errors of [`CapturedGraph::bind`] and [`CapturedGraph::launch`]; [`Error::MixedDevices`] for a
    /// graph of another backend.
    pub fn launch_graph(&self, graph: &CapturedGraph, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        if !graph.backend.is_same(self) {
            return Err(Error::MixedDevices {
                op: "launch_graph".into(),
                a: self.id().into(),
                b: graph.backend.id().into(),
                at: graph.span.clone(),
            });
        }
        if !inputs.is_empty() {
            graph.check(inputs)?;
        }
        // Two launches must not interleave between binding inputs and reading results.
        let _running = self.running();
        let mut bound = lock(&graph.bound);
        if !inputs.is_empty() {
            graph.bind_to(&mut bound, inputs)?;
        }
        graph.run(&mut bound)?;
        graph.results(&bound)
    }
}

impl CapturedGraph {
    /// A plan without run-time arguments, bound to `inputs`.
    pub(crate) fn new(
        backend: &Backend,
        exe: Arc<Executable>,
        inputs: Vec<Tensor>,
        donated: Vec<bool>,
        span: Span,
    ) -> Result<CapturedGraph> {
        let mut lease = exe.lease(None)?;
        lease.capture_at_once();
        for (i, t) in inputs.iter().enumerate().filter(|(i, _)| !donated[*i]) {
            exe.bind_input(&mut lease, i, &t.ready()?)?;
        }
        let outputs: Vec<TensorType> =
            exe.plan().outputs.iter().map(|o| TensorType::new(o.dtype, &o.dims)).collect();
        Ok(CapturedGraph {
            backend: backend.clone(),
            inputs: inputs.iter().map(|t| t.0.ty.clone()).collect(),
            donated,
            literals: vec![],
            bound: Mutex::new(BoundGraph {
                lease,
                inputs,
                outputs: vec![None; outputs.len()],
                args: vec![],
                completion: None,
            }),
            outputs,
            exe,
            span,
        })
    }

    /// Dtypes and shapes of the inputs, in order.
    pub fn inputs(&self) -> &[TensorType] {
        &self.inputs
    }

    /// The plan that a launch runs.
    pub fn executable(&self) -> &Executable {
        &self.exe
    }

    /// Binds tensors as the inputs of the following launches. The tensors are kept alive, not copied. Pending
    /// tensors are evaluated.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong number of inputs; [`Error::DType`] and [`Error::Shape`] for a type
    /// other than the captured one; [`Error::Donated`] for a tensor whose memory was donated;
    /// [`Error::MixedDevices`] for a tensor of another backend; errors of evaluating pending tensors. On an
    /// error the bindings stay unchanged.
    pub fn bind(&self, inputs: &[&Tensor]) -> Result<()> {
        self.check(inputs)?;
        self.bind_to(&mut lock(&self.bound), inputs)
    }

    /// Checks the number and types of inputs; evaluates pending ones.
    fn check(&self, inputs: &[&Tensor]) -> Result<()> {
        const OP: &str = "launch_graph";
        if inputs.len() != self.inputs.len() {
            let what = format!("the graph has {} inputs, but {} were given", self.inputs.len(), inputs.len());
            return Err(Error::argument("inputs", what).at(&self.span));
        }
        for (i, (t, ty)) in inputs.iter().zip(&self.inputs).enumerate() {
            of_another(&self.backend, t, OP)?;
            t.check()?;
            expect(OP, i, t, ty)?;
            t.eval()?;
        }
        Ok(())
    }

    fn bind_to(&self, bound: &mut BoundGraph, inputs: &[&Tensor]) -> Result<()> {
        let buffers: Buffers = inputs.iter().map(|t| t.ready()).collect::<Result<_>>()?;
        for (i, (t, b)) in inputs.iter().zip(&buffers).enumerate() {
            if !self.donated[i] {
                self.exe.bind_input(&mut bound.lease, i, b)?;
            }
            bound.inputs[i] = (*t).clone();
        }
        Ok(())
    }

    /// Sets the value of a literal for the following launches. `literal` must be a tensor made by
    /// [`Tensor::scalar`] or [`Tensor::full`] that the captured function read; `value` is cast to its dtype.
    ///
    /// # Errors
    /// [`Error::Argument`] for any other tensor.
    pub fn set_argument(&self, literal: &Tensor, value: impl Into<Scalar>) -> Result<()> {
        let same = |l: &&(Tensor, usize)| Arc::ptr_eq(&l.0.0, &literal.0);
        let Some((t, k)) = self.literals.iter().find(same) else {
            return Err(
                Error::argument("set_argument", "the tensor is not a literal of this graph").at(&self.span)
            );
        };
        lock(&self.bound).args[*k] = value.into().cast(t.0.ty.dtype);
        Ok(())
    }

    /// Runs the plan with the current bindings. Outputs reuse the memory of the previous run's outputs.
    /// After the first launch, memory is allocated only for outputs that something still holds, and for
    /// donated inputs that something else reads.
    ///
    /// # Errors
    /// [`Error::Donated`] if the memory of an input was donated, to an earlier launch or elsewhere; errors of
    /// the device.
    pub fn launch(&self) -> Result<()> {
        let _running = self.backend.running();
        self.run(&mut lock(&self.bound))
    }

    fn run(&self, bound: &mut BoundGraph) -> Result<()> {
        let ran = self.submit(bound);
        // The memory of donated inputs now belongs to the outputs.
        for i in (0..bound.inputs.len()).filter(|i| self.donated[*i]) {
            self.exe.unbind_input(&mut bound.lease, i);
        }
        if ran.is_err() {
            // The output buffers hold no valid result: they may be of the previous run, or partly written.
            bound.outputs.iter_mut().for_each(|o| *o = None);
        }
        ran
    }

    fn submit(&self, bound: &mut BoundGraph) -> Result<()> {
        let on = self.backend.runtime().queues.current();
        let BoundGraph { lease, inputs, outputs, args, completion } = bound;
        // An input may have been donated since it was bound.
        for t in &*inputs {
            t.check_alive()?;
        }
        // Outputs that reuse an input's memory belong to the caller alone.
        for (k, out) in outputs.iter_mut().enumerate() {
            if self.output_is_input(k).is_some() {
                *out = None;
            }
        }
        let mut taken: SmallVec<[&Tensor; 8]> = SmallVec::new();
        for (i, t) in inputs.iter().enumerate().filter(|(i, _)| self.donated[*i]) {
            let mut b = t.ready()?;
            if t.0.readers() > 0 || Arc::strong_count(&b) > 2 {
                // Something else reads the value, so the plan gets a copy to overwrite.
                self.backend.runtime().stats.state_copies.fetch_add(1, Ordering::Relaxed);
                let d = self.backend.device();
                let dst = d.alloc(b.bytes(), Tag::Io)?;
                let (src, bytes) = (&b, b.bytes());
                let copy = Command::Copy { src, src_offset: 0, dst: &dst, dst_offset: 0, bytes };
                submit(&**d, on.as_deref(), &[copy])?;
                b = dst;
            } else {
                taken.push(t);
            }
            self.exe.bind_input(lease, i, &b)?;
            for (k, out) in outputs.iter_mut().enumerate() {
                if self.output_is_input(k) == Some(i) {
                    *out = Some(b.clone());
                }
            }
        }
        for (k, out) in outputs.iter_mut().enumerate() {
            if self.output_is_input(k).is_some() {
                continue;
            }
            let ours = 1 + self.exe.output_references(k);
            if out.as_ref().is_none_or(|b| Arc::strong_count(b) > ours)
                && let OutputMemory::Own(b) = self.exe.output_memory(k)?
            {
                self.exe.bind_output(lease, k, &b);
                *out = Some(b);
            }
        }
        // No later step can fail for lack of memory. From here on the memory of donated inputs belongs to the
        // run, even if the run fails.
        taken.iter().for_each(|t| t.taken(&self.span));
        *completion = self.exe.submit(lease, args, on.as_deref())?;
        Ok(())
    }

    fn output_is_input(&self, k: usize) -> Option<usize> {
        self.exe.output_is_input(k)
    }

    /// The results of the last run. While the caller holds a result, later runs write to other memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if the graph has not run, or its last run failed.
    pub fn outputs(&self) -> Result<Vec<Tensor>> {
        self.results(&lock(&self.bound))
    }

    fn results(&self, bound: &BoundGraph) -> Result<Vec<Tensor>> {
        let one = |(b, ty): (&Option<BufferRef>, &TensorType)| {
            let b = b.clone().ok_or_else(|| Error::argument("outputs", NOT_RUN).at(&self.span))?;
            let t = Tensor::at(&self.backend, ty.clone(), b, self.span.clone());
            t.set_completion(bound.completion.clone());
            Ok(t)
        };
        bound.outputs.iter().zip(&self.outputs).map(one).collect()
    }

    /// Waits for an output and copies its bytes to `to`: dense, row-major, little-endian. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such output, the graph has not run, or its last run failed;
    /// [`Error::Index`] if a kernel of the run found an index out of range.
    pub fn read(&self, output: usize, to: &mut [u8]) -> Result<()> {
        let bound = lock(&self.bound);
        let b = bound.outputs.get(output).and_then(|b| b.as_ref());
        let b = b.ok_or_else(|| {
            Error::argument("read", format!("there is no output {output}, or {NOT_RUN}")).at(&self.span)
        })?;
        self.backend.device().read(b, 0, to)?;
        self.backend.check_faults()
    }
}

impl Collector {
    /// The literals, with the numbers of their run-time arguments.
    fn literals(&self) -> Vec<(Tensor, usize)> {
        let number = |id: NodeId| match self.graph.node(id).op {
            Op::Arg(k) => Some(k as usize),
            _ => None,
        };
        let of = |(i, t): (usize, &Tensor)| {
            let id = self.ids.get(&Arc::as_ptr(&t.0)).copied().filter(|id| id.index() == i)?;
            if !matches!(t.0.op, Op::Full(_)) {
                return None;
            }
            let arg = number(id).or_else(|| number(*self.graph.node(id).inputs.first()?))?;
            Some((t.clone(), arg))
        };
        self.order.iter().enumerate().filter_map(of).collect()
    }
}

//! Training steps of Python functions.
//!
//! A training step belongs to one thread of its own, because it holds values that do not leave their thread.
//! A call sends it a job and waits for the answer without the interpreter's lock.

use crate::backend::{Backend, object};
use crate::calls::{self, Work};
use crate::errors::{OrRaise, argument, exception};
use crate::language::Take;
use crate::tensor::Tensor;
use halcyon::{Error, Result, Tensor as Raw};
use halcyon_formats::safetensors::{self, SafeTensors};
use halcyon_nn::{
    AdaGrad, Adafactor, Adam, Clip, Lion, Module, ModuleExt, Muon, Optimizer, OptimizerBuilder, Param,
    RmsProp, Schedule, Sgd, TrainStep as Inner, Visit,
};
use halcyon_train::{Checkpoint, CheckpointOptions, Checkpoints, Goal, Progress};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

/// How often a waiting thread looks for signals.
const POLL: Duration = Duration::from_millis(50);

/// Named parameters.
struct Params(Vec<(String, Param)>);

impl Module for Params {
    fn visit(&self, visit: &mut Visit<'_>) {
        for (name, p) in &self.0 {
            visit.child(name, p);
        }
    }
}

/// What the step's thread owns.
struct Host {
    params: Arc<Params>,
    step: Inner<'static>,
}

type Job = Box<dyn FnOnce(&mut Host) + Send>;
/// Makes an optimizer's builder, which does not leave its thread.
type Builder = Box<dyn FnOnce() -> OptimizerBuilder + Send>;

/// What the Python object and the step's thread share.
struct Shared {
    /// The loss function. Only this place refers to it, and [`TrainStep::__traverse__`] shows it to Python's
    /// garbage collector: otherwise a loss that refers to its own step would never be freed.
    function: Mutex<Option<Py<PyAny>>>,
    /// The exception that the loss function raised in the job that runs.
    raised: Mutex<Option<PyErr>>,
}

/// A training step: the loss, the gradients and the new parameters as one plan.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct TrainStep {
    jobs: Mutex<Sender<Job>>,
    shared: Arc<Shared>,
    thread: ThreadId,
    process: u32,
}

/// What a training step is made of, apart from its function and parameters.
struct Recipe {
    builder: Builder,
    schedule: Option<Schedule>,
    clip: Option<Clip>,
    accumulate: u64,
    ema: Option<f64>,
    seed: u64,
}

/// Makes an optimizer's builder from a rule's name and options.
fn builder(kind: &str, options: &Bound<'_, PyDict>) -> PyResult<Builder> {
    let o = Take(options);
    macro_rules! rule {
        ($rule:expr, $($name:literal => $field:ident),*) => {{
            let mut r = $rule;
            $(if let Some(v) = o.get($name)? {
                r.$field = v;
            })*
            Box::new(move || Optimizer::builder(r))
        }};
    }
    let made: Builder = match kind {
        "sgd" => rule!(Sgd::new(), "lr" => rate, "weight_decay" => weight_decay, "momentum" => momentum,
            "dampening" => dampening, "nesterov" => nesterov),
        "adam" | "adamw" => rule!(if kind == "adam" { Adam::new() } else { Adam::w() }, "lr" => rate,
            "weight_decay" => weight_decay, "beta1" => beta1, "beta2" => beta2, "eps" => eps,
            "amsgrad" => amsgrad),
        "adagrad" => rule!(AdaGrad::default(), "lr" => rate, "weight_decay" => weight_decay,
            "lr_decay" => rate_decay, "initial" => initial, "eps" => eps),
        "rmsprop" => rule!(RmsProp::default(), "lr" => rate, "weight_decay" => weight_decay,
            "alpha" => alpha, "momentum" => momentum, "centered" => centered, "eps" => eps),
        "adafactor" => rule!(Adafactor::default(), "lr" => rate, "weight_decay" => weight_decay,
            "beta2_decay" => beta2_decay, "eps1" => eps1, "eps2" => eps2, "clip" => clip),
        "lion" => rule!(Lion::default(), "lr" => rate, "weight_decay" => weight_decay, "beta1" => beta1,
            "beta2" => beta2),
        "muon" => {
            rule!(Muon::default(), "lr" => rate, "weight_decay" => weight_decay, "momentum" => momentum,
            "nesterov" => nesterov, "iterations" => iterations, "eps" => eps)
        }
        other => {
            let all = "sgd, adam, adamw, adagrad, rmsprop, adafactor, lion or muon";
            return Err(argument("optimizer", format!("'{other}': expected {all}")));
        }
    };
    o.end()?;
    Ok(made)
}

/// Calls the loss function, which takes lists of parameters and of batch tensors and returns tensors, the
/// loss first.
fn call(shared: &Shared, params: &Params, batch: &[Raw]) -> Result<Vec<Raw>> {
    Python::attach(|py| {
        let function = lock(&shared.function).as_ref().map(|f| f.clone_ref(py));
        let function = function.ok_or_else(|| Error::internal("a training step has no loss function"))?;
        let wrap = |t: Raw| Tensor(t);
        let values: Vec<Tensor> = params.0.iter().map(|(_, p)| wrap(p.value())).collect();
        let batch: Vec<Tensor> = batch.iter().cloned().map(wrap).collect();
        let made = function.bind(py).call1((values, batch)).and_then(|out| {
            let out: Vec<PyRef<'_, Tensor>> = out.extract()?;
            Ok(out.iter().map(|t| t.0.clone()).collect())
        });
        made.map_err(|e| {
            *lock(&shared.raised) = Some(e);
            Error::argument("training step", "the loss function raised an exception")
        })
    })
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

fn host(params: Vec<(String, Raw)>, r: Recipe, shared: Arc<Shared>) -> Result<Host> {
    let params = Arc::new(Params(params.into_iter().map(|(n, t)| (n, Param::new(t))).collect()));
    let mut builder = (r.builder)();
    if let Some(s) = r.schedule {
        builder = builder.schedule(s);
    }
    if let Some(c) = r.clip {
        builder = builder.clip(c);
    }
    let optimizer = builder.build(&*params)?;
    let loss = move |p: &Arc<Params>, batch: &[Raw]| call(&shared, p, batch);
    let mut step = Inner::new(params.clone(), optimizer, loss)?.seed(r.seed);
    if r.accumulate != 1 {
        step = step.accumulate(r.accumulate)?;
    }
    if let Some(decay) = r.ema {
        step = step.ema(decay)?;
    }
    Ok(Host { params, step })
}

/// Checks that a parameter may get this value.
fn fits(name: &str, old: &Raw, new: &Raw) -> Result<()> {
    let (have, want) = (new.dims()?, old.dims()?);
    if have != want {
        return Err(Error::shape("params", format!("{name} is {want:?}, and {have:?} is given")));
    }
    let (have, want) = (new.dtype()?, old.dtype()?);
    if have != want {
        let (op, want) = ("params".into(), format!("{want} for {name}"));
        return Err(Error::DType { op, dtype: have, want, at: Default::default() });
    }
    if !new.backend().is_same(old.backend()) {
        let what =
            format!("{name} is on {}, and a value on {} is given", old.backend().id(), new.backend().id());
        return Err(Error::argument("params", what));
    }
    Ok(())
}

impl TrainStep {
    /// Runs `job` on the step's thread. Ctrl-C is raised after its end.
    fn ask<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut Host) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        if std::process::id() != self.process {
            return Err(exception(Error::unsupported(
                "a training step in a process that was forked after the step was made",
                "Make the step in this process",
            )));
        }
        if std::thread::current().id() == self.thread {
            let what = "the loss function uses the training step that calls it, which waits for the loss. \
                        Pass what it needs as an array of the batch";
            return Err(argument("training step", what));
        }
        let _call = calls::call(py)?;
        let gone = || exception(Error::internal("the thread of a training step has ended"));
        let (send, mut receive) = mpsc::channel();
        // The receiver waits for this value, so sending cannot fail.
        let shared = self.shared.clone();
        let job = Box::new(move |h: &mut Host| {
            let made = job(h);
            let raised = lock(&shared.raised).take();
            drop(send.send((made, raised)));
        });
        lock(&self.jobs).send(job).map_err(|_| gone())?;
        let mut signal = Ok(());
        let (made, raised) = loop {
            let receive = &mut receive;
            match py.detach(move || receive.recv_timeout(POLL)) {
                Ok(made) => break made,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => {
                    if signal.is_ok() {
                        signal = py.check_signals();
                    }
                }
            }
        };
        signal?;
        match (made, raised) {
            (Err(_), Some(e)) => Err(e),
            (made, _) => made.or_raise(),
        }
    }
}

fn named(tensors: Vec<(String, Raw)>) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|(name, t)| (name, Tensor(t))).collect()
}

#[pymethods]
impl TrainStep {
    /// `function` takes a list of parameters and a list of batch tensors, and returns a list of tensors, the
    /// loss first. It is called with placeholders. `settings` has `optimizer`, the rule's name; `options`
    /// those of the rule.
    #[new]
    fn new(
        py: Python<'_>,
        function: Py<PyAny>,
        params: Vec<(String, PyRef<'_, Tensor>)>,
        settings: &Bound<'_, PyDict>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<TrainStep> {
        let o = Take(settings);
        let kind: String = o.or("optimizer", "adamw".into())?;
        let schedule: Option<String> = o.get("schedule")?;
        let schedule = schedule.map(|json| serde_json::from_str(&json)).transpose();
        let recipe = Recipe {
            builder: builder(&kind, options)?,
            schedule: schedule.map_err(|e| argument("schedule", e.to_string()))?,
            clip: match (o.get("clip_norm")?, o.get("clip_value")?) {
                (Some(_), Some(_)) => {
                    return Err(argument(
                        "clip_norm",
                        "clip_norm and clip_value exclude each other: give one",
                    ));
                }
                (norm, value) => norm.map(Clip::Norm).or(value.map(Clip::Value)),
            },
            accumulate: o.or("accumulate", 1)?,
            ema: o.get("ema")?,
            seed: o.or("seed", 0)?,
        };
        o.end()?;
        let params: Vec<(String, Raw)> = params.into_iter().map(|(n, t)| (n, t.0.clone())).collect();
        let shared = Arc::new(Shared { function: Mutex::new(Some(function)), raised: Mutex::new(None) });
        let (jobs, work) = mpsc::channel::<Job>();
        let (ready, is_ready) = mpsc::channel();
        let of_thread = shared.clone();
        let serve = move || {
            calls::work_for_others();
            match host(params, recipe, of_thread) {
                Err(e) => drop(ready.send(Err(e))),
                Ok(mut h) => {
                    // The receiver waits for this value, so sending cannot fail.
                    drop(ready.send(Ok(())));
                    while let Ok(job) = work.recv() {
                        job(&mut h);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("halcyon-training".into()).spawn(serve);
        let thread = thread.map_err(|e| {
            exception(Error::Io { path: "the thread of a training step".into(), what: e.to_string() })
        })?;
        let thread = thread.thread().id();
        let _call = calls::call(py)?;
        let made = py.detach(move || is_ready.recv());
        made.unwrap_or_else(|_| Err(Error::internal("the thread of a training step has ended")))
            .or_raise()?;
        Ok(TrainStep { jobs: Mutex::new(jobs), shared, thread, process: std::process::id() })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> std::result::Result<(), PyTraverseError> {
        // A lock that another thread holds means that the object is in use.
        match self.shared.function.try_lock() {
            Ok(function) => function.iter().try_for_each(|f| visit.call(f)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        // The lock is free before the function is, whose end may run Python.
        let function = lock(&self.shared.function).take();
        drop(function);
    }

    /// Runs a step. Returns what the function returned, the loss first.
    fn run(&self, py: Python<'_>, batch: Vec<PyRef<'_, Tensor>>) -> PyResult<Vec<Tensor>> {
        let batch: Vec<Raw> = batch.iter().map(|t| t.0.clone()).collect();
        let made = self.ask(py, move |h| {
            let batch: Vec<&Raw> = batch.iter().collect();
            h.step.run(&batch)
        })?;
        Ok(made.into_iter().map(Tensor).collect())
    }

    /// The present values of the parameters.
    fn params(&self, py: Python<'_>) -> PyResult<Vec<(String, Tensor)>> {
        let values = |h: &mut Host| Ok(h.params.0.iter().map(|(n, p)| (n.clone(), p.value())).collect());
        self.ask(py, values).map(named)
    }

    /// The moving averages of the parameters.
    fn averages(&self, py: Python<'_>) -> PyResult<Vec<(String, Tensor)>> {
        let found = self.ask(py, |h| match h.step.averages() {
            Some(ema) => Ok(ema.state()),
            None => Err(Error::argument("averages", "the step keeps none: give ema, such as ema=0.999")),
        })?;
        Ok(named(found))
    }

    /// Replaces parameters.
    fn set_params(&self, py: Python<'_>, values: Vec<(String, PyRef<'_, Tensor>)>) -> PyResult<()> {
        let values: Vec<(String, Raw)> = values.into_iter().map(|(n, t)| (n, t.0.clone())).collect();
        self.ask(py, move |h| {
            let slots = values.iter().map(|(n, _)| h.params.slot(n)).collect::<Result<Vec<_>>>()?;
            // All are checked before one is replaced.
            for (slot, (name, new)) in slots.iter().zip(&values) {
                fits(name, &slot.value(), new)?;
            }
            slots.iter().zip(values).try_for_each(|(slot, (_, value))| slot.set(value))
        })
    }

    /// What the step keeps in addition to the parameters, such as moments.
    fn state(&self, py: Python<'_>) -> PyResult<Vec<(String, Tensor)>> {
        self.ask(py, |h| Ok(h.step.state())).map(named)
    }

    /// The number of updates.
    fn steps(&self, py: Python<'_>) -> PyResult<u64> {
        self.ask(py, |h| Ok(h.step.with_optimizer(|o| o.steps())))
    }

    /// The number of plans that the step keeps.
    fn plans(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, |h| Ok(h.step.plans()))
    }

    /// The learning rate of the next update.
    fn rate(&self, py: Python<'_>, parameter: String) -> PyResult<f64> {
        self.ask(py, move |h| h.step.with_optimizer(|o| o.rate(&parameter)))
    }

    /// Writes a checkpoint below a folder, and removes old ones. Returns its folder.
    #[pyo3(signature = (folder, keep, best, epoch, metrics))]
    fn save(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        keep: usize,
        best: Option<(String, bool)>,
        epoch: u64,
        metrics: BTreeMap<String, f64>,
    ) -> PyResult<PathBuf> {
        let goal = |largest: bool| if largest { Goal::Largest } else { Goal::Smallest };
        let best = best.map(|(metric, largest)| (metric, goal(largest)));
        let all = Checkpoints::new(folder, CheckpointOptions { keep, best, ..CheckpointOptions::default() });
        self.ask(py, move |h| {
            let step = h.step.with_optimizer(|o| o.steps());
            all.save(&*h.params, &h.step, &Progress { step, epoch, metrics, ..Progress::default() })
        })
    }

    /// Continues from a checkpoint. Returns its record.
    fn load<'py>(&self, py: Python<'py>, folder: PathBuf) -> PyResult<Bound<'py, PyAny>> {
        let made = self.ask(py, move |h| {
            let c = Checkpoint::open(&folder)?;
            c.load(&*h.params, &mut h.step)?;
            Ok(c.manifest().clone())
        })?;
        object(py, &made)
    }
}

/// The checkpoints below a folder, oldest first.
#[pyfunction]
pub(crate) fn checkpoints(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<PathBuf>> {
    py.work(|| Checkpoints::new(folder, CheckpointOptions::default()).list())
}

/// Writes a safetensors file.
#[pyfunction]
pub(crate) fn save_tensors(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<(String, PyRef<'_, Tensor>)>,
    metadata: BTreeMap<String, String>,
) -> PyResult<u64> {
    let (names, tensors): (Vec<String>, Vec<Raw>) =
        tensors.into_iter().map(|(n, t)| (n, t.0.clone())).unzip();
    py.work(|| {
        halcyon::eval(&tensors)?;
        let data = tensors.iter().map(Raw::to_data).collect::<Result<Vec<_>>>()?;
        let named: Vec<(&str, &halcyon::ConstData)> = names.iter().map(String::as_str).zip(&data).collect();
        safetensors::write(&path, &named, &metadata)
    })
}

/// Tensors by name, and the metadata of their file.
type Loaded = (Vec<(String, Tensor)>, BTreeMap<String, String>);

/// Reads a safetensors file: its tensors on a backend, and its metadata.
#[pyfunction]
pub(crate) fn load_tensors(py: Python<'_>, path: PathBuf, backend: &Backend) -> PyResult<Loaded> {
    let backend = backend.0.clone();
    let (tensors, metadata) = py.work(|| {
        let file = SafeTensors::open(&path)?;
        let names: Vec<String> = file.names().map(String::from).collect();
        let read = |n: String| Raw::from_data(&backend, &file.get(&n)?).map(|t| (n, t));
        Ok((names.into_iter().map(read).collect::<Result<Vec<_>>>()?, file.metadata().clone()))
    })?;
    Ok((named(tensors), metadata))
}

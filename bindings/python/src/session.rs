//! ONNX models and sessions: the native part of `halcyon/session/`.

mod fit;
mod model;
mod ports;
mod profile;
mod values;

pub(crate) use fit::fit_onnx;
pub(crate) use model::OnnxModel;
pub(crate) use values::to_numpy;

use crate::backend::Backend;
use crate::calls::{self, Callback, Work};
use crate::errors::{OrRaise, argument, exception, named};
use halcyon::onnx::{self, Results, RunOptions};
use halcyon::{Error, Level};
use ports::InputPort;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};
use values::{Fetched, Given};

/// A run that takes less time than this need not be interruptible. Longer ones run on a thread of their own,
/// while this thread looks for signals.
const QUICK: Duration = Duration::from_millis(50);
/// How often the main thread looks for signals while a run is under way.
const POLL: Duration = Duration::from_millis(20);
/// Sets of input sizes that are known to run quickly.
const SIZES: usize = 1024;

/// Cancels runs from another thread.
#[pyclass(frozen, module = "halcyon._native")]
#[derive(Default)]
pub(crate) struct Cancel(onnx::Cancel);

#[pymethods]
impl Cancel {
    #[new]
    fn new() -> Cancel {
        Cancel::default()
    }

    /// Ends every run that uses this flag before its next step.
    fn cancel(&self) {
        self.0.cancel();
    }

    /// Clears the flag.
    fn reset(&self) {
        self.0.reset();
    }

    /// Whether the flag is set.
    #[getter]
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// An ONNX model on a backend.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct OnnxSession {
    session: halcyon::OnnxSession,
    inputs: Vec<InputPort>,
    max_iterations: u64,
    /// Whether the model has loops, so that values may decide how long a run takes.
    has_loops: bool,
    /// Hashes of input sizes whose last run was quick, if the sizes decide how long a run takes.
    quick: Mutex<HashSet<u64>>,
    /// Held by profiled runs, because the device has one list of timings.
    profiled: Mutex<()>,
}

/// What a run needs besides its inputs.
struct Request<'a> {
    /// Numbers of the outputs, in the order of the results.
    outputs: &'a [usize],
    /// Whether tensors stay on the device.
    keep: bool,
}

#[pymethods]
impl OnnxSession {
    /// A session of a model. Nothing is compiled before the first run.
    #[new]
    #[pyo3(signature = (model, backend, level = None, max_iterations = None))]
    fn new(
        py: Python<'_>,
        model: &OnnxModel,
        backend: &Backend,
        level: Option<&str>,
        max_iterations: Option<u64>,
    ) -> PyResult<OnnxSession> {
        let mut backend = backend.0.clone();
        if let Some(l) = level {
            backend = backend.with_level(l.parse::<Level>().or_raise()?).or_raise()?;
        }
        let max_iterations = max_iterations.unwrap_or(onnx::MAX_ITERATIONS);
        let options = RunOptions { max_iterations, ..RunOptions::default() };
        let (file, has_loops) = (model.file.clone(), model.has_loops());
        let session = py.work(|| halcyon::OnnxSession::new(&backend, file))?;
        let session = session.with_options(options);
        let inputs = session.ports().iter().map(|p| InputPort::new(py, p)).collect();
        Ok(OnnxSession {
            session,
            inputs,
            max_iterations,
            has_loops,
            quick: Mutex::default(),
            profiled: Mutex::default(),
        })
    }

    /// The backend that the model runs on.
    #[getter]
    fn backend(&self) -> Backend {
        Backend(self.session.backend().clone())
    }

    /// The names of the outputs.
    #[getter]
    fn output_names(&self) -> Vec<&str> {
        self.session.output_names().iter().map(String::as_str).collect()
    }

    /// Runs the model on inputs by name: arrays, tensors, strings, lists, dicts, None. Returns the outputs
    /// with these names (all, if there are none): arrays, or with `keep` tensors on the device where the
    /// model ran as one graph. On Python's main thread Ctrl-C ends the run.
    #[pyo3(signature = (names, feed, cancel = None, keep = false))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        names: Option<Vec<String>>,
        feed: &Bound<'py, PyDict>,
        cancel: Option<&Cancel>,
        keep: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let _callback = Callback::begin(py);
        let given = self.given(py, feed)?;
        let outputs = self.wanted(names)?;
        let made = self.execute(py, given, Request { outputs: &outputs, keep }, cancel)?;
        values::list(py, made)
    }

    /// Like `run`, for a backend that measures its steps. Returns the outputs, and the events of the run:
    /// name, category, start and duration in nanoseconds from the start of the run, and properties.
    #[pyo3(signature = (names, feed, cancel = None, keep = false))]
    fn run_profiled<'py>(
        &self,
        py: Python<'py>,
        names: Option<Vec<String>>,
        feed: &Bound<'py, PyDict>,
        cancel: Option<&Cancel>,
        keep: bool,
    ) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyAny>)> {
        let _callback = Callback::begin(py);
        let given = self.given(py, feed)?;
        let outputs = self.wanted(names)?;
        let (made, events) = self.profile(py, given, Request { outputs: &outputs, keep }, cancel)?;
        Ok((values::list(py, made)?, crate::backend::object(py, &events)?))
    }

    fn __repr__(&self) -> String {
        let inputs: Vec<&str> = self.session.ports().iter().map(|p| p.name.as_str()).collect();
        format!("OnnxSession({} on {})", inputs.join(", "), self.session.backend().id())
    }
}

impl OnnxSession {
    /// The inputs in the model's order.
    fn given(&self, py: Python<'_>, feed: &Bound<'_, PyDict>) -> PyResult<Vec<Given>> {
        let mut all = Vec::with_capacity(self.inputs.len());
        let mut missing = vec![];
        let mut used = 0;
        for port in &self.inputs {
            match feed.get_item(port.key.bind(py))? {
                Some(value) => {
                    used += 1;
                    all.push(port.value(py, self.session.backend(), &value)?);
                }
                None if port.is_optional() => all.push(Given::Host(onnx::Datum::Optional(None))),
                None => missing.push(port.name.as_str()),
            }
        }
        if !missing.is_empty() {
            let what = format!("the inputs {missing:?} are missing; {}", self.listed());
            return Err(argument("run", what));
        }
        if used != feed.len() {
            let known = |n: &str| self.inputs.iter().any(|p| p.name == n);
            for name in feed.keys() {
                let name: String = name.extract()?;
                if !known(&name) {
                    let what = format!("the model has no input \"{name}\"; {}", self.listed());
                    return Err(argument("run", what));
                }
            }
        }
        Ok(all)
    }

    fn listed(&self) -> String {
        let all: Vec<String> =
            self.session.ports().iter().map(|p| format!("\"{}\" ({})", p.name, p.ty)).collect();
        match all.is_empty() {
            true => "the model has no inputs".into(),
            false => format!("its inputs are {}", all.join(", ")),
        }
    }

    /// The numbers of the outputs with these names.
    fn wanted(&self, names: Option<Vec<String>>) -> PyResult<Vec<usize>> {
        let all = self.session.output_names();
        let Some(names) = names.filter(|n| !n.is_empty()) else { return Ok((0..all.len()).collect()) };
        let one = |name: &String| {
            all.iter().position(|n| n == name).ok_or_else(|| {
                let what = format!("the model has no output \"{name}\"; its outputs are {}", all.join(", "));
                argument("run", what)
            })
        };
        names.iter().map(one).collect()
    }

    fn options(&self, cancel: onnx::Cancel) -> RunOptions {
        RunOptions { max_iterations: self.max_iterations, cancel }
    }

    /// Runs the model. The interpreter's lock is released.
    fn execute(
        &self,
        py: Python<'_>,
        given: Vec<Given>,
        request: Request<'_>,
        cancel: Option<&Cancel>,
    ) -> PyResult<Vec<Fetched>> {
        let sizes = sizes(&given);
        let inputs: Vec<(&str, onnx::Input)> =
            self.inputs.iter().map(|p| p.name.as_str()).zip(given.into_iter().map(Given::input)).collect();
        let is_quick = lock(&self.quick).contains(&sizes);
        // Also for a run on another thread.
        let _call = calls::call(py)?;
        let job = |options: RunOptions| -> halcyon::Result<(Vec<Fetched>, bool)> {
            let start = Instant::now();
            refuse_cancelled(&options)?;
            let results = self.session.run_with(inputs, &options)?;
            let is_steady = matches!(results, Results::Device(_)) || !self.has_loops;
            let made = values::fetch(results, request.outputs, request.keep)?;
            Ok((made, is_steady && start.elapsed() < QUICK))
        };
        let done = match is_quick || !is_main_thread(py)? {
            true => {
                let options = self.options(cancel.map(|c| c.0.clone()).unwrap_or_default());
                py.detach(|| job(options))
            }
            false => self.interruptible(py, cancel, job)?,
        };
        let (made, was_quick) = done.map_err(cancelled)?;
        if was_quick != is_quick {
            let mut quick = lock(&self.quick);
            if quick.len() >= SIZES {
                quick.clear();
            }
            match was_quick {
                true => quick.insert(sizes),
                false => quick.remove(&sizes),
            };
        }
        Ok(made)
    }

    /// Runs `job` on another thread, while this one, the main thread, looks for signals. A signal whose
    /// handler raises ends the run.
    fn interruptible<T: Send>(
        &self,
        py: Python<'_>,
        cancel: Option<&Cancel>,
        job: impl FnOnce(RunOptions) -> halcyon::Result<T> + Send,
    ) -> PyResult<halcyon::Result<T>> {
        // A flag of this run alone: a signal must not end other runs with the caller's flag.
        let own = onnx::Cancel::default();
        let pass_on = || {
            if cancel.is_some_and(|c| c.0.is_cancelled()) {
                own.cancel();
            }
        };
        pass_on();
        let options = self.options(own.clone());
        let mut raised = None;
        let done = std::thread::scope(|scope| {
            let (send, mut receive) = mpsc::channel();
            let worker =
                std::thread::Builder::new().name("halcyon-run".into()).spawn_scoped(scope, move || {
                    // The receiver waits for this value, so sending cannot fail.
                    let _ = send.send(job(options));
                });
            let worker = worker.map_err(|e| {
                let (path, what) = ("the thread of a run".into(), e.to_string());
                exception(Error::Io { path, what })
            })?;
            let done = loop {
                let receive = &mut receive;
                match py.detach(move || receive.recv_timeout(POLL)) {
                    Ok(done) => break Some(done),
                    Err(mpsc::RecvTimeoutError::Disconnected) => break None,
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                }
                pass_on();
                if raised.is_none()
                    && let Err(e) = py.check_signals()
                {
                    own.cancel();
                    raised = Some(e);
                }
            };
            match (py.detach(|| worker.join()), done) {
                (Ok(()), Some(done)) => Ok(done),
                (Err(panic), _) => std::panic::resume_unwind(panic),
                (Ok(()), None) => Err(exception(Error::internal("a run ended without a result"))),
            }
        })?;
        match raised {
            Some(e) => Err(e),
            None => Ok(done),
        }
    }
}

/// A hash of the inputs' types and sizes.
fn sizes(given: &[Given]) -> u64 {
    let mut h = DefaultHasher::new();
    for g in given {
        g.hash_sizes(&mut h);
    }
    h.finish()
}

/// Whether this is Python's main thread, the only one that handles signals.
fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import(pyo3::intern!(py, "threading"))?;
    let main = threading.call_method0(pyo3::intern!(py, "main_thread"))?;
    let main = main.getattr(pyo3::intern!(py, "ident"))?;
    threading.call_method0(pyo3::intern!(py, "get_ident"))?.eq(main)
}

/// A flag that is set before the run ends it.
fn refuse_cancelled(options: &RunOptions) -> halcyon::Result<()> {
    match options.cancel.is_cancelled() {
        true => Err(Error::Interrupted { what: "a run, before its start".into() }),
        false => Ok(()),
    }
}

/// The exception of a run. A run that its flag cancelled is no `KeyboardInterrupt`, which signals raise.
fn cancelled(e: Error) -> PyErr {
    match e {
        Error::Interrupted { what } => named("CancelledError", format!("the run was cancelled: {what}")),
        e => exception(e),
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

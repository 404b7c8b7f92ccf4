//! Generations that share the steps of one model.
//!
//! The model has no thread of its own. A thread that waits for its text computes the next step for all
//! generations, and what the step brings for others waits until they ask for it. So no generation waits for a
//! reader of another one.

use crate::calls::Work;
use halcyon::ir::error::{Error, Result};
use halcyon_models::{
    Batch, Event, Finish, GenerateOptions, Generation as Made, Generator, Piece as Part, Request,
    SpeculationStats,
};
use pyo3::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A model and its generations.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Generations that nobody reads any more. A lock of its own, because a destructor must not wait for a
    /// step.
    left: Mutex<Vec<usize>>,
}

struct State {
    generator: Generator,
    batch: Batch,
    lines: HashMap<usize, Line>,
}

/// What a generation brought and nobody has read.
#[derive(Default)]
struct Line {
    pieces: VecDeque<Part>,
    end: Option<Result<Box<Made>>>,
}

/// What is new for a generation.
enum News {
    Piece(Part),
    End(Box<Made>),
    /// The end was read before, or the generation was cancelled.
    Nothing,
    /// Nothing yet: a step was computed.
    Step,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whatever holds these locks leaves whole values if it panics.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(mut generator: Generator) -> Arc<Shared> {
        let mut batch = generator.new_batch();
        batch.speculate(generator.speculate(None));
        let state = State { generator, batch, lines: HashMap::new() };
        Arc::new(Shared { state: Mutex::new(state), left: Mutex::default() })
    }

    /// Calls `f` between two steps.
    pub(super) fn with<T>(&self, f: impl FnOnce(&Generator) -> Result<T>) -> Result<T> {
        f(&self.lock().generator)
    }

    pub(super) fn speculation(&self) -> Option<SpeculationStats> {
        self.lock().batch.speculation().map(|s| s.stats())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        for id in lock(&self.left).drain(..) {
            state.cancel(id);
        }
        state
    }

    /// Adds a generation and returns its number.
    pub(super) fn begin(&self, prompt: Vec<u32>, options: GenerateOptions) -> Result<usize> {
        let mut state = self.lock();
        let State { generator, batch, lines } = &mut *state;
        let id = batch.push(generator.engine(), Request { prompt, options })?;
        lines.insert(id, Line::default());
        Ok(id)
    }

    fn news(&self, id: usize) -> Result<News> {
        let mut state = self.lock();
        let Some(line) = state.lines.get_mut(&id) else { return Ok(News::Nothing) };
        if let Some(piece) = line.pieces.pop_front() {
            return Ok(News::Piece(piece));
        }
        if let Some(end) = line.end.take() {
            state.lines.remove(&id);
            return end.map(News::End);
        }
        state.step();
        Ok(News::Step)
    }

    fn cancel(&self, id: usize) {
        self.lock().cancel(id);
    }
}

impl State {
    fn cancel(&mut self, id: usize) {
        if self.lines.remove(&id).is_some() {
            self.batch.cancel(self.generator.engine(), id);
        }
    }

    /// Computes a step of all generations.
    fn step(&mut self) {
        match self.batch.step(self.generator.engine()) {
            Ok(events) => {
                for (id, event) in events {
                    let Some(line) = self.lines.get_mut(&id) else { continue };
                    match event {
                        Event::Piece(p) => line.pieces.push_back(p),
                        Event::Done(made) => line.end = Some(Ok(made)),
                        Event::Failed(e) => line.end = Some(Err(e)),
                    }
                }
            }
            Err(e) => self.fail(e),
        }
    }

    /// Ends all generations: the running ones are lost, and those that wait would fail as well.
    fn fail(&mut self, e: Error) {
        let open: Vec<usize> =
            self.lines.iter().filter(|(_, l)| l.end.is_none()).map(|(id, _)| *id).collect();
        for id in open {
            self.batch.cancel(self.generator.engine(), id);
            if let Some(line) = self.lines.get_mut(&id) {
                line.end = Some(Err(e.clone()));
            }
        }
    }
}

/// What one token adds to a text. `str()` gives the text.
#[pyclass(frozen, get_all, module = "halcyon._native")]
pub(crate) struct Piece {
    /// The token; None if the text ended without one.
    token: Option<u32>,
    /// The text that is final with it; often empty.
    text: String,
    /// `stop` or `length` in the last piece, else None.
    finish_reason: Option<String>,
}

#[pymethods]
impl Piece {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("Piece({:?})", self.text)
    }
}

/// A text that a model generated. `str()` gives the text.
#[pyclass(frozen, get_all, module = "halcyon._native")]
pub(crate) struct Generation {
    text: String,
    /// The tokens, without one that ended the text.
    tokens: Vec<u32>,
    /// `stop` if the model or a stop string ended the text; `length` at the limit or the end of the context.
    finish_reason: String,
    prompt_tokens: usize,
    /// The time of the prompt in seconds.
    prompt_seconds: f64,
    /// The time of the tokens in seconds.
    seconds: f64,
    /// The seed of the draws.
    seed: u64,
}

#[pymethods]
impl Generation {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("Generation({:?}, {} tokens, {})", self.text, self.tokens.len(), self.finish_reason)
    }
}

/// An iterator of the pieces of a text. Each `next` computes until a token is chosen.
#[pyclass(frozen, module = "halcyon._native")]
pub(crate) struct TextStream {
    shared: Arc<Shared>,
    id: usize,
    seed: u64,
    made: Mutex<Option<Py<Generation>>>,
}

impl TextStream {
    pub(super) fn new(shared: Arc<Shared>, id: usize, seed: u64) -> TextStream {
        TextStream { shared, id, seed, made: Mutex::new(None) }
    }

    /// The next piece; `None` at the end.
    fn advance(&self, py: Python<'_>) -> PyResult<Option<Part>> {
        loop {
            // Ctrl-C ends this generation; the model and the others stay as they are.
            py.check_signals().inspect_err(|_| lock(&self.shared.left).push(self.id))?;
            match py.work(|| self.shared.news(self.id))? {
                News::Piece(p) => return Ok(Some(p)),
                News::Step => {}
                News::Nothing => return Ok(None),
                News::End(made) => {
                    *lock(&self.made) = Some(Py::new(py, self.generation(*made))?);
                    return Ok(None);
                }
            }
        }
    }

    fn generation(&self, made: Made) -> Generation {
        Generation {
            text: made.text,
            tokens: made.tokens,
            finish_reason: name(made.finish),
            prompt_tokens: made.prompt_tokens,
            prompt_seconds: made.prompt_time.as_secs_f64(),
            seconds: made.time.as_secs_f64(),
            seed: self.seed,
        }
    }
}

fn name(f: Finish) -> String {
    f.to_string()
}

#[pymethods]
impl TextStream {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        let piece = self.advance(py)?;
        Ok(piece.map(|p| Piece { token: p.token, text: p.text, finish_reason: p.finish.map(name) }))
    }

    /// Computes the rest. Returns all that was generated; None after `close`.
    fn finish(&self, py: Python<'_>) -> PyResult<Option<Py<Generation>>> {
        while self.advance(py)?.is_some() {}
        Ok(self.generated(py))
    }

    /// What was generated, after the end of the text; before it, None.
    #[getter]
    fn generated(&self, py: Python<'_>) -> Option<Py<Generation>> {
        lock(&self.made).as_ref().map(|g| g.clone_ref(py))
    }

    /// The seed of the draws.
    #[getter]
    fn seed(&self) -> u64 {
        self.seed
    }

    /// Ends the generation.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.work(|| {
            self.shared.cancel(self.id);
            Ok(())
        })
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

impl Drop for TextStream {
    fn drop(&mut self) {
        lock(&self.shared.left).push(self.id);
    }
}

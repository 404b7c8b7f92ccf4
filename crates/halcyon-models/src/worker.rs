//! A generator on a thread of its own, for asynchronous programs.

use crate::batch::{Batch, Event, Request};
use crate::generate::{GenerateOptions, Piece};
use crate::generator::{Generator, Prompt};
use halcyon::ir::error::{Error, Result};
use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

/// A thread that computes the requests of all its streams together. Dropping it lets the requests end first.
#[derive(Debug)]
pub struct Worker {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<Generator>>,
}

#[derive(Debug)]
struct Job {
    prompt: Prompt,
    options: GenerateOptions,
    line: Arc<Line>,
}

/// What a stream and the thread share.
#[derive(Debug, Default)]
struct Line {
    state: Mutex<LineState>,
}

#[derive(Debug, Default)]
struct LineState {
    pieces: VecDeque<Result<Piece>>,
    ended: bool,
    /// The stream was dropped.
    left: bool,
    waker: Option<Waker>,
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, LineState> {
        // The state is valid between any two statements that hold the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, piece: Option<Result<Piece>>, ended: bool) {
        let mut s = self.lock();
        s.pieces.extend(piece);
        s.ended |= ended;
        let waker = s.waker.take();
        drop(s);
        if let Some(w) = waker {
            w.wake();
        }
    }
}

impl Generator {
    /// Moves the generator to a thread, which serves any number of streams. They share the engine's
    /// sequences.
    ///
    /// # Errors
    /// `Error::Io` if no thread can be started.
    pub fn into_worker(self) -> Result<Worker> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("halcyon-generate".into());
        let thread = thread.spawn(move || work(self, &receiver));
        let thread =
            thread.map_err(|e| Error::Io { path: "a thread that generates".into(), what: e.to_string() })?;
        Ok(Worker { jobs: Some(sender), thread: Some(thread) })
    }
}

impl Worker {
    /// Continues a prompt. The stream is a `futures_core::Stream` and needs no particular runtime. Dropping
    /// it ends the generation. Errors come as the stream's last item.
    pub fn stream(&self, prompt: impl Into<Prompt>, options: &GenerateOptions) -> AsyncPieces {
        let line = Arc::new(Line::default());
        let job = Job { prompt: prompt.into(), options: options.clone(), line: line.clone() };
        if self.jobs.as_ref().is_none_or(|j| j.send(job).is_err()) {
            line.put(Some(Err(Error::internal("the thread that generates has ended"))), true);
        }
        AsyncPieces { line }
    }

    /// Waits for the end of all requests and gives the generator back.
    ///
    /// # Errors
    /// `Error::Internal` if the thread panicked.
    pub fn join(mut self) -> Result<Generator> {
        self.jobs = None;
        let ended = self.thread.take().map(JoinHandle::join);
        ended.and_then(|r| r.ok()).ok_or_else(|| Error::internal("the thread that generates panicked"))
    }
}

/// The pieces of a generation of a [`Worker`].
#[derive(Debug)]
pub struct AsyncPieces {
    line: Arc<Line>,
}

impl futures_core::Stream for AsyncPieces {
    type Item = Result<Piece>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Piece>>> {
        let mut s = self.line.lock();
        match s.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(piece)),
            None if s.ended => Poll::Ready(None),
            None => {
                s.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for AsyncPieces {
    fn drop(&mut self) {
        self.line.lock().left = true;
    }
}

fn work(mut g: Generator, jobs: &Receiver<Job>) -> Generator {
    let mut batch = g.new_batch();
    batch.speculate(g.speculate(None));
    let mut lines: HashMap<usize, Arc<Line>> = HashMap::new();
    loop {
        // Without requests, the thread waits for one.
        if batch.is_idle() {
            match jobs.recv() {
                Ok(job) => add(&mut g, &mut batch, &mut lines, job),
                Err(_) => {
                    g.speculate(batch.speculate(None));
                    return g;
                }
            }
        }
        while let Ok(job) = jobs.try_recv() {
            add(&mut g, &mut batch, &mut lines, job);
        }
        lines.retain(|id, line| {
            let stays = !line.lock().left;
            if !stays {
                batch.cancel(g.engine(), *id);
            }
            stays
        });
        match batch.step(g.engine()) {
            Ok(events) => {
                for (id, event) in events {
                    deliver(&mut lines, id, event);
                }
            }
            Err(e) => {
                // The running requests are lost, and those that wait would fail as well.
                lines.drain().for_each(|(_, line)| line.put(Some(Err(e.clone())), true));
                let speculation = batch.speculate(None);
                batch = g.new_batch();
                batch.speculate(speculation);
            }
        }
    }
}

fn add(g: &mut Generator, batch: &mut Batch, lines: &mut HashMap<usize, Arc<Line>>, job: Job) {
    let Job { prompt, options, line } = job;
    let pushed = g.tokens(prompt).and_then(|prompt| batch.push(g.engine(), Request { prompt, options }));
    match pushed {
        Ok(id) => drop(lines.insert(id, line)),
        Err(e) => line.put(Some(Err(e)), true),
    }
}

fn deliver(lines: &mut HashMap<usize, Arc<Line>>, id: usize, event: Event) {
    match event {
        Event::Piece(piece) => {
            if let Some(line) = lines.get(&id) {
                line.put(Some(Ok(piece)), false);
            }
        }
        Event::Done(_) => {
            if let Some(line) = lines.remove(&id) {
                line.put(None, true);
            }
        }
        Event::Failed(e) => {
            if let Some(line) = lines.remove(&id) {
                line.put(Some(Err(e)), true);
            }
        }
    }
}

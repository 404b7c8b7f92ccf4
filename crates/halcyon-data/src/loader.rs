//! Batches of a dataset. Threads make the batches ahead of their use. The order does not depend on the
//! threads.

use crate::dataset::{Column, Dataset};
use crate::order;
use halcyon::{Backend, Tensor};
use halcyon_ir::{ConstData, Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// The largest number of threads of a loader.
const MAX_WORKERS: usize = 256;
/// The number of epochs whose row orders are kept. Two are needed at the end of an epoch, when some threads
/// already work on the next epoch.
const ORDERS: usize = 2;

/// How a [`DataLoader`] makes batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    batch_size: usize,
    seed: Option<u64>,
    drop_last: bool,
    workers: usize,
    prefetch: Option<usize>,
}

impl LoaderOptions {
    /// Batches of `batch_size` rows in the order of the dataset. One thread makes batches ahead.
    pub fn new(batch_size: usize) -> LoaderOptions {
        LoaderOptions { batch_size, seed: None, drop_last: false, workers: 1, prefetch: None }
    }

    /// Shuffles the rows. Each epoch has another order, which depends only on the seed, the number of the
    /// epoch and the number of rows ([`permutation`](crate::permutation)).
    pub fn shuffle(mut self, seed: u64) -> LoaderOptions {
        self.seed = Some(seed);
        self
    }

    /// Leaves out the last batch of an epoch if it has fewer rows than the others.
    pub fn drop_last(mut self, drop: bool) -> LoaderOptions {
        self.drop_last = drop;
        self
    }

    /// Sets the number of threads. With 0, the caller's thread makes each batch when it is requested.
    pub fn workers(mut self, workers: usize) -> LoaderOptions {
        self.workers = workers;
        self
    }

    /// Sets the number of batches that are made ahead, at least 1. The default is two per thread. This number
    /// also bounds the number of threads, because each thread works on one batch.
    pub fn prefetch(mut self, batches: usize) -> LoaderOptions {
        self.prefetch = Some(batches);
        self
    }
}

/// The position of a loader: which batch comes next. It is stored in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    pub epoch: u64,
    /// The number of the next batch in the epoch.
    pub next_batch: u64,
    /// The seed of the order; `None` if rows are not shuffled.
    pub seed: Option<u64>,
    /// The number of rows of the dataset. The order and the batches depend on this number.
    pub rows: u64,
    pub batch_size: u64,
    pub drop_last: bool,
}

/// A batch of rows.
#[derive(Clone, Debug)]
pub struct Batch {
    /// For each column of the dataset, an array `[rows, ..dims]`.
    pub arrays: Vec<ConstData>,
    /// The number of the epoch, from 0.
    pub epoch: u64,
    /// The number of the batch in the epoch, from 0.
    pub index: u64,
    /// Whether this batch is the last of its epoch.
    pub last: bool,
    /// The numbers of the dataset's rows that this batch holds.
    pub rows: Vec<usize>,
    /// The position after this batch. A loader that is restored to this position continues with the next
    /// batch.
    pub after: LoaderState,
    columns: Arc<[Column]>,
}

impl Batch {
    /// The columns of [`Batch::arrays`].
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The array of the column with this name.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such column.
    pub fn array(&self, column: &str) -> Result<&ConstData> {
        Ok(&self.arrays[crate::dataset::find(&self.columns, column)?])
    }

    /// Copies the arrays to a device.
    ///
    /// # Errors
    /// Those of [`Tensor::from_data`].
    pub fn to(&self, backend: &Backend) -> Result<Vec<Tensor>> {
        self.arrays.iter().map(|x| Tensor::from_data(backend, x)).collect()
    }
}

/// The number of an epoch and of a batch in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    epoch: u64,
    batch: u64,
}

impl Place {
    /// The place `by` batches later. Each epoch has `batches` batches.
    fn advance(self, by: u64, batches: u64) -> Place {
        let batch = self.batch.saturating_add(by);
        Place { epoch: self.epoch.saturating_add(batch / batches), batch: batch % batches }
    }
}

/// The data that the threads of a loader share.
struct Shared {
    data: Arc<dyn Dataset>,
    columns: Arc<[Column]>,
    options: LoaderOptions,
    seed: Option<u64>,
    batches: u64,
    /// The row orders that were computed last, at most [`ORDERS`], each with the number of its epoch.
    orders: Mutex<Vec<(u64, Arc<[usize]>)>>,
}

impl Shared {
    fn order(&self, seed: u64, epoch: u64) -> Arc<[usize]> {
        // Each order is stored in one operation, so the list is valid even if a thread panicked.
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(e, _)| *e == epoch) {
            return order.clone();
        }
        let order: Arc<[usize]> = order::permutation(self.data.len(), seed, epoch).into();
        if orders.len() == ORDERS {
            orders.remove(0);
        }
        orders.push((epoch, order.clone()));
        order
    }

    fn make(&self, at: Place) -> Result<Batch> {
        let size = self.options.batch_size;
        let start = at.batch as usize * size;
        let end = start.saturating_add(size).min(self.data.len());
        let rows = match self.seed {
            Some(seed) => self.order(seed, at.epoch)[start..end].to_vec(),
            None => (start..end).collect(),
        };
        let arrays = self.data.batch(&rows)?;
        if arrays.len() != self.columns.len() {
            let what = format!("a batch has {} arrays for {} columns", arrays.len(), self.columns.len());
            return Err(Error::shape("dataset", what));
        }
        let last = at.batch + 1 == self.batches;
        let after = self.state(at.advance(1, self.batches));
        let columns = self.columns.clone();
        Ok(Batch { arrays, epoch: at.epoch, index: at.batch, last, rows, after, columns })
    }

    fn state(&self, at: Place) -> LoaderState {
        LoaderState {
            epoch: at.epoch,
            next_batch: at.batch,
            seed: self.seed,
            rows: self.data.len() as u64,
            batch_size: self.options.batch_size as u64,
            drop_last: self.options.drop_last,
        }
    }
}

/// Makes the batches of a dataset, epoch after epoch, without end.
///
/// Threads make batches ahead, including batches of the next epoch. The batches and their order do not depend
/// on the number of threads. Dropping the loader ends its threads; a thread that is making a batch finishes
/// that batch first.
///
/// If the dataset returns an error, the loader returns the error instead of the batch. The position then
/// stays before that batch.
pub struct DataLoader {
    shared: Arc<Shared>,
    at: Place,
    pipeline: Option<Pipeline>,
}

impl fmt::Debug for DataLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { data, options, batches, .. } = &*self.shared;
        write!(f, "DataLoader({data:?}; {options:?}; {batches} batches, next {:?})", self.at)
    }
}

impl DataLoader {
    /// # Errors
    /// [`Error::Argument`] for a batch size of 0, for a prefetch of 0 with threads, for more than 256
    /// threads, and for a dataset with too few rows for a batch.
    pub fn new(data: impl Dataset + 'static, options: LoaderOptions) -> Result<DataLoader> {
        let bad = |what: String| Err(Error::argument("DataLoader", what));
        let (rows, size) = (data.len(), options.batch_size);
        if size == 0 {
            return bad("the batch size is 0; it is at least 1".into());
        }
        if options.workers > MAX_WORKERS {
            return bad(format!("{} workers; at most {MAX_WORKERS} are allowed", options.workers));
        }
        if options.prefetch == Some(0) && options.workers > 0 {
            return bad("prefetch is 0, but there are workers; set workers to 0 instead".into());
        }
        let batches = if options.drop_last { rows / size } else { rows.div_ceil(size) } as u64;
        if batches == 0 {
            return bad(format!(
                "{rows} rows give no batch of {size}{}",
                if rows > 0 { " (drop_last)" } else { "" }
            ));
        }
        let (columns, seed) = (data.columns().into(), options.seed);
        let data: Arc<dyn Dataset> = Arc::new(data);
        let shared = Shared { data, columns, options, seed, batches, orders: Mutex::default() };
        Ok(DataLoader { shared: Arc::new(shared), at: Place { epoch: 0, batch: 0 }, pipeline: None })
    }

    /// The number of batches of an epoch.
    pub fn batches(&self) -> u64 {
        self.shared.batches
    }

    /// The dataset.
    pub fn dataset(&self) -> &Arc<dyn Dataset> {
        &self.shared.data
    }

    /// Returns the next batch. The last batch of an epoch is followed by the first batch of the next epoch.
    ///
    /// # Errors
    /// Errors of the dataset; [`Error::Argument`] if the dataset panicked in a thread; [`Error::Io`] if the
    /// system cannot start a thread.
    pub fn next_batch(&mut self) -> Result<Batch> {
        let batch = match self.shared.options.workers {
            0 => self.shared.make(self.at),
            _ => self.receive(),
        };
        match &batch {
            Ok(_) => self.at = self.at.advance(1, self.shared.batches),
            // The thread of the failed batch has ended, and the others may be past that batch. The next call
            // starts new threads at the failed batch.
            Err(_) => self.pipeline = None,
        }
        batch
    }

    fn receive(&mut self) -> Result<Batch> {
        if self.pipeline.is_none() {
            self.pipeline = Some(Pipeline::start(&self.shared, self.at)?);
        }
        match &mut self.pipeline {
            Some(pipeline) => pipeline.receive(),
            None => Err(Error::internal("a loader without threads")),
        }
    }

    /// Iterates over the remaining batches of the current epoch. These are all batches, unless the epoch was
    /// interrupted or a position was restored. The iterator ends after an error.
    pub fn epoch(&mut self) -> Epoch<'_> {
        Epoch { loader: self, ended: false }
    }

    /// The position: the epoch and the index of the next batch.
    pub fn state(&self) -> LoaderState {
        self.shared.state(self.at)
    }

    /// Goes to a position that [`DataLoader::state`] or [`Batch::after`] returned. The batches that follow
    /// are the same as they were when the position was taken, even with another number of threads. The seed
    /// of the position replaces the seed of the loader.
    ///
    /// # Errors
    /// [`Error::Argument`] if the position does not fit this loader: the number of rows, the batch size or
    /// `drop_last` differs, or the position is past the end of its epoch.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let own = self.state();
        let bad = |what: String| Err(Error::argument("DataLoader", what));
        let kind = |s: &LoaderState| {
            let last = if s.drop_last { ", without a smaller last batch" } else { "" };
            format!("{} rows in batches of {}{last}", s.rows, s.batch_size)
        };
        if (own.rows, own.batch_size, own.drop_last) != (state.rows, state.batch_size, state.drop_last) {
            return bad(format!(
                "the saved position is for {}, but the loader has {}",
                kind(state),
                kind(&own)
            ));
        }
        let batches = self.shared.batches;
        if state.next_batch > batches {
            return bad(format!(
                "the saved position is batch {}, but an epoch has {batches} batches",
                state.next_batch
            ));
        }
        self.pipeline = None;
        if state.seed != self.shared.seed {
            let Shared { data, columns, options, batches, .. } = &*self.shared;
            self.shared = Arc::new(Shared {
                data: data.clone(),
                columns: columns.clone(),
                options: options.clone(),
                seed: state.seed,
                batches: *batches,
                orders: Mutex::default(),
            });
        }
        self.at = Place { epoch: state.epoch, batch: 0 }.advance(state.next_batch, batches);
        Ok(())
    }

    /// Goes to the first batch of an epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        let at = Place { epoch, batch: 0 };
        if self.at != at {
            (self.at, self.pipeline) = (at, None);
        }
    }
}

/// The batches of one epoch: see [`DataLoader::epoch`].
#[derive(Debug)]
pub struct Epoch<'a> {
    loader: &'a mut DataLoader,
    ended: bool,
}

impl Iterator for Epoch<'_> {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        if self.ended {
            return None;
        }
        let batch = self.loader.next_batch();
        self.ended = batch.as_ref().map_or(true, |b| b.last);
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.loader.shared.batches - self.loader.at.batch };
        // An error ends the epoch early.
        (usize::from(!self.ended), usize::try_from(left).ok())
    }
}

/// The threads of a loader. Thread `k` of `n` makes every `n`-th batch, starting `k` batches after the
/// loader's position, and has its own channel. Reading the channels in turn gives the batches in order.
struct Pipeline {
    receivers: Vec<Receiver<Result<Batch>>>,
    threads: Vec<Option<JoinHandle<()>>>,
    turn: usize,
}

impl Pipeline {
    fn start(shared: &Arc<Shared>, at: Place) -> Result<Pipeline> {
        let workers = shared.options.workers;
        let prefetch = shared.options.prefetch.unwrap_or(2 * workers);
        let workers = workers.min(prefetch).max(1);
        let mut pipeline = Pipeline { receivers: vec![], threads: vec![], turn: 0 };
        for k in 0..workers {
            // A thread that waits for room in its channel already holds one finished batch.
            let ahead = prefetch / workers + usize::from(k < prefetch % workers);
            let (sender, receiver) = sync_channel(ahead.saturating_sub(1));
            let shared = shared.clone();
            let first = at.advance(k as u64, shared.batches);
            let spawned = thread::Builder::new()
                .name(format!("halcyon-data-{k}"))
                .spawn(move || work(&shared, first, workers as u64, &sender));
            let thread = spawned.map_err(|e| Error::Io {
                path: "a thread of the data loader".into(),
                what: format!("{e}; set workers to 0 to read without threads"),
            })?;
            pipeline.receivers.push(receiver);
            pipeline.threads.push(Some(thread));
        }
        Ok(pipeline)
    }

    fn receive(&mut self) -> Result<Batch> {
        let turn = self.turn;
        self.turn = (turn + 1) % self.receivers.len();
        if let Ok(batch) = self.receivers[turn].recv() {
            return batch;
        }
        let panic = self.threads[turn].take().and_then(|t| t.join().err());
        let what = panic.as_ref().and_then(|p| {
            p.downcast_ref::<String>().map(String::as_str).or(p.downcast_ref::<&str>().copied())
        });
        let what = format!("the dataset panicked in a thread: {}", what.unwrap_or("without a message"));
        Err(Error::argument("DataLoader", what))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // From here on sending fails, so the threads end.
        self.receivers.clear();
        self.threads.iter_mut().filter_map(Option::take).for_each(|t| drop(t.join()));
    }
}

/// The function of a thread: makes every `step`-th batch from `at` on, until the loader is dropped or a batch
/// fails.
fn work(shared: &Shared, mut at: Place, step: u64, sender: &SyncSender<Result<Batch>>) {
    loop {
        let batch = shared.make(at);
        let failed = batch.is_err();
        if sender.send(batch).is_err() || failed {
            return;
        }
        at = at.advance(step, shared.batches);
    }
}

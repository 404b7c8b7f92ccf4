//! Results of tuning on disk: a JSON file that several processes may read and write concurrently.
//!
//! An entry holds the best variant for one key of a template on one device and driver, and the variants
//! rejected there with the reasons. Merging tables is commutative. Every write merges with the file's content
//! under a lock and replaces the whole file, so that concurrent processes lose no results. The file is
//! bounded; the least recently used entries are dropped first. A corrupt file counts as empty, with a
//! warning, and is renamed (`NAME.bad`, `NAME.bad.1`) before a new one is written. Any other file, or a cache
//! of another version, is never modified: [`check`] and every attempt to write it return an error.
//!
//! While a candidate runs, a file beside the cache names the candidate ([`Guard`]), and the process holds a
//! lock on this file. If the process crashes, the file remains without a lock, and [`TuningCache::recover`]
//! rejects the candidate.

mod file;

use crate::{Caps, DeviceInfo, Error, Result};
use file::{FileLock, FileState, with_suffix};
use halcyon_host::output;
use halcyon_ir::kernel::tune::{TunedVariants, Variant};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

/// Version of the file's format.
pub const FORMAT: u32 = 1;
/// Maximum entries of a file.
pub const MAX_ENTRIES: usize = 4096;
/// Maximum bytes of a file.
pub const MAX_BYTES: usize = 8 << 20;
/// Maximum rejections of an entry.
const MAX_REJECTIONS: usize = 64;
const DAY: u64 = 24 * 3600;

/// Environment variable with the tuning mode ([`TuningMode`]'s text form).
pub const VARIABLE: &str = "HALCYON_TUNING";
/// Environment variable with the path of the tuning cache; `off` for none.
pub const FILE_VARIABLE: &str = "HALCYON_TUNING_CACHE";

/// When kernels are tuned. Tuned kernels are used from level O2 on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TuningMode {
    /// Never tune, and ignore existing results.
    Off,
    /// Tune only on request; use existing results.
    #[default]
    Cached,
    /// A thread tunes the kernels of plans while they run untuned; later plans use the results.
    Background,
    /// Tune a new plan's kernels before its first run. All plans together may use this much time.
    Budget(Duration),
    /// Tune all kernels of a new plan before its first run. Level O3 does this unless a mode is set.
    Exhaustive,
}

impl fmt::Display for TuningMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TuningMode::Off => f.write_str("off"),
            TuningMode::Cached => f.write_str("cached"),
            TuningMode::Background => f.write_str("background"),
            TuningMode::Exhaustive => f.write_str("exhaustive"),
            TuningMode::Budget(d) => write!(f, "{}", d.as_secs_f64()),
        }
    }
}

impl From<TuningMode> for String {
    fn from(m: TuningMode) -> String {
        m.to_string()
    }
}

impl TryFrom<String> for TuningMode {
    type Error = Error;
    fn try_from(s: String) -> Result<TuningMode> {
        s.parse()
    }
}

impl FromStr for TuningMode {
    type Err = Error;
    fn from_str(s: &str) -> Result<TuningMode> {
        let bad = || {
            let what = format!(
                "\"{s}\" is not a tuning mode; use off, cached, background, exhaustive, or a budget in seconds"
            );
            Error::argument("tuning", what)
        };
        Ok(match s.trim().to_ascii_lowercase().as_str() {
            "off" => TuningMode::Off,
            "cached" => TuningMode::Cached,
            "background" => TuningMode::Background,
            "exhaustive" => TuningMode::Exhaustive,
            t => {
                let seconds: f64 = t.parse().map_err(|_| bad())?;
                TuningMode::Budget(Duration::try_from_secs_f64(seconds).map_err(|_| bad())?)
            }
        })
    }
}

/// Why a variant is not tried again on the same device with the same driver, unless the rejections of the
/// device are cleared.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RejectReason {
    /// Its results differ from the default's.
    Wrong,
    /// The device's compiler rejects it.
    DoesNotCompile,
    /// The device lacks a feature or resource that it needs.
    DoesNotFit,
    /// The driver reported an error.
    DeviceError,
    /// The process crashed while it ran.
    Crashed,
    /// It did not finish.
    Hung,
    /// It took many times as long as the default.
    TooSlow,
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RejectReason::Wrong => "wrong results",
            RejectReason::DoesNotCompile => "does not compile",
            RejectReason::DoesNotFit => "does not fit",
            RejectReason::DeviceError => "device error",
            RejectReason::Crashed => "the process ended while it ran",
            RejectReason::Hung => "did not end",
            RejectReason::TooSlow => "too slow",
        })
    }
}

/// A rejected variant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Rejection {
    pub variant: Variant,
    pub why: RejectReason,
    /// What was observed.
    pub detail: String,
}

/// The outcome of tuning a key.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Best {
    pub variant: Variant,
    /// Digest of its kernels, hexadecimal. The result is valid while the template builds these kernels.
    pub program: String,
    /// The variant that the heuristic chose.
    pub default: Variant,
    /// The default's time divided by the variant's: the median over pairs of measurements, and (in
    /// `interval`) its 95 % confidence interval.
    pub gain: f64,
    pub interval: (f64, f64),
    /// Seconds per run.
    pub seconds: f64,
    pub default_seconds: f64,
    /// Largest difference from the default's result, relative to the tolerance. 0 for an algorithm of a
    /// library ([`AlgorithmSearch`]), whose result is not compared.
    pub error: f64,
    /// Number of variants that ran, including the default.
    pub tried: usize,
    /// Unix time of the measurement, in seconds.
    pub measured: u64,
}

/// The results for one key on one device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// As returned by [`device_key`].
    pub device: String,
    /// [`halcyon_ir::kernel::tune::Choices::key`].
    pub key: String,
    /// `None` if tuning has not finished.
    pub best: Option<Best>,
    /// Sorted by variant.
    pub rejected: Vec<Rejection>,
    /// Unix time at which a plan last used it, in seconds.
    pub used: u64,
}

impl Entry {
    pub fn new(device: &str, key: &str) -> Entry {
        Entry { device: device.into(), key: key.into(), best: None, rejected: vec![], used: now() }
    }

    /// Merging is commutative, associative and idempotent.
    fn merge(&mut self, other: &Entry) {
        let rank = |b: &Option<Best>| b.as_ref().map(|b| (b.measured, text(b)));
        if rank(&other.best) > rank(&self.best) {
            self.best.clone_from(&other.best);
        }
        self.rejected.extend(other.rejected.iter().cloned());
        self.rejected.sort();
        self.rejected.dedup_by(|a, b| a.variant == b.variant);
        self.rejected.truncate(MAX_REJECTIONS);
        self.used = self.used.max(other.used);
    }

    /// The best variant, unless it has been rejected since.
    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref().filter(|b| self.rejected.iter().all(|r| r.variant != b.variant))
    }
}

fn text<T: Serialize>(v: &T) -> String {
    serde_json::to_string(v).unwrap_or_default()
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Identifies everything besides the kernel that tuning results depend on: the device, its driver and its
/// limits.
pub fn device_key(info: &DeviceInfo, caps: &Caps) -> String {
    let driver = info.driver_version.as_deref().unwrap_or("unknown");
    let platform = info.properties.get("platform_version").map_or("", |s| s.as_str());
    format!(
        "{}: {} ({}), driver {driver} {platform}, {} units, groups of {}, {} B{}",
        info.backend.id(),
        info.name,
        info.vendor,
        caps.compute_units.map_or("unknown".into(), |n| n.to_string()),
        caps.max_workgroup,
        caps.workgroup_memory,
        if caps.is_cpu { ", a processor" } else { "" },
    )
}

/// Where an algorithm search keeps its results ([`crate::Options::algorithm_search`]). Two are equal if they
/// are one cache.
#[derive(Clone, Debug)]
pub struct AlgorithmSearch(pub Arc<TuningCache>);

impl PartialEq for AlgorithmSearch {
    fn eq(&self, o: &AlgorithmSearch) -> bool {
        Arc::ptr_eq(&self.0, &o.0)
    }
}

/// How the keys of an algorithm search begin. The keys of generated kernels begin with the name of a
/// template.
pub const ALGORITHM: &str = "algorithm of ";

/// Entries by device and key.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Table(BTreeMap<(String, String), Entry>);

#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    entries: Vec<Entry>,
}

impl Table {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.0.values()
    }

    pub fn get(&self, device: &str, key: &str) -> Option<&Entry> {
        self.0.get(&(device.to_string(), key.to_string()))
    }

    /// Adds an entry. The order of additions does not matter.
    pub fn add(&mut self, e: &Entry) {
        match self.0.get_mut(&(e.device.clone(), e.key.clone())) {
            Some(old) => old.merge(e),
            None => {
                let mut new = Entry { best: None, rejected: vec![], ..e.clone() };
                // Merging also sorts and bounds the entries of a file.
                new.merge(e);
                self.0.insert((e.device.clone(), e.key.clone()), new);
            }
        }
    }

    pub fn merge(&mut self, other: &Table) {
        other.entries().for_each(|e| self.add(e));
    }

    /// Keeps the `most` most recently used entries.
    fn trim(&mut self, most: usize) {
        if self.0.len() <= most {
            return;
        }
        let mut by_use: Vec<_> = self.0.iter().map(|(k, e)| (e.used, k.clone())).collect();
        by_use.sort();
        let gone = by_use.len() - most;
        for (_, k) in by_use.into_iter().take(gone) {
            self.0.remove(&k);
        }
    }

    /// The file's text. Drops the least recently used entries until it has at most `most_bytes` bytes.
    fn render(&mut self, most_bytes: usize) -> String {
        loop {
            let document = Document { format: FORMAT, entries: self.0.values().cloned().collect() };
            // Serialising these types cannot fail.
            let text = serde_json::to_string_pretty(&document).unwrap_or_default() + "\n";
            if text.len() <= most_bytes || self.0.is_empty() {
                return text;
            }
            let share = most_bytes as f64 / text.len() as f64;
            self.trim(((self.0.len() as f64 * share * 0.95) as usize).min(self.0.len() - 1));
        }
    }

    fn of(d: &Document) -> Table {
        let mut t = Table::default();
        d.entries.iter().for_each(|e| t.add(e));
        t.trim(MAX_ENTRIES);
        t
    }

    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read; [`Error::Format`] for one that is not a tuning cache, is
    /// corrupt, or has another version.
    pub fn read(path: &Path) -> Result<Option<Table>> {
        match file::classify(path)? {
            FileState::Nothing => Ok(None),
            FileState::Empty => Ok(Some(Table::default())),
            FileState::Table(t) => Ok(Some(t)),
            FileState::Damaged(e) | FileState::NotOurs(e) => Err(e),
        }
    }
}

/// Rejects a file that the user names as tuning cache if it is another kind of file. Called before the file
/// is used.
///
/// # Errors
/// [`Error::Format`] for another kind of file; [`Error::Io`] if the file cannot be read.
pub fn check(path: &Path) -> Result<()> {
    match file::classify(path)? {
        FileState::NotOurs(e) => Err(e),
        _ => Ok(()),
    }
}

fn io(path: &Path, e: impl fmt::Display) -> Error {
    Error::Io { path: path.display().to_string(), what: e.to_string() }
}

/// A table, optionally backed by a file.
#[derive(Debug, Default)]
pub struct TuningCache {
    path: Option<PathBuf>,
    table: Mutex<Table>,
    loaded: AtomicBool,
    complained: AtomicBool,
    touched: AtomicBool,
    /// Messages for the user about the file.
    said: Mutex<Vec<String>>,
}

impl TuningCache {
    /// A cache with a file, which is read on first use and created by the first write.
    pub fn at(path: impl Into<PathBuf>) -> TuningCache {
        TuningCache { path: Some(path.into()), ..TuningCache::default() }
    }

    /// A cache of this process only.
    pub fn memory() -> TuningCache {
        TuningCache::default()
    }

    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Entries are added whole, so a poisoned lock is safe to use.
        let mut t = self.table.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(path) = self.path.as_deref().filter(|_| !self.loaded.swap(true, Ordering::Relaxed)) {
            match file::classify(path) {
                Ok(FileState::Nothing) => {}
                Ok(FileState::Table(there)) => {
                    tracing::info!(path = %path.display(), entries = there.len(), "tuned kernels read");
                    t.merge(&there);
                }
                Ok(FileState::Empty) => {
                    self.warn(format!("{}: an empty file, used as a new tuning cache", path.display()))
                }
                Ok(FileState::Damaged(e) | FileState::NotOurs(e)) | Err(e) => {
                    self.warn(format!("{e}; its content is not used"))
                }
            }
        }
        t
    }

    fn warn(&self, what: String) {
        tracing::warn!("{what}");
        self.said.lock().unwrap_or_else(|e| e.into_inner()).push(what);
    }

    /// Returns and clears the warnings about the file, for example that it is corrupt, and its new name.
    /// Reads the file if that has not happened yet.
    pub fn warnings(&self) -> Vec<String> {
        drop(self.lock());
        std::mem::take(&mut *self.said.lock().unwrap_or_else(|e| e.into_inner()))
    }

    pub fn table(&self) -> Table {
        self.lock().clone()
    }

    pub fn get(&self, device: &str, key: &str) -> Option<Entry> {
        self.lock().get(device, key).cloned()
    }

    /// The tuned variants for plans on a device.
    pub fn tuned_variants(&self, device: &str) -> TunedVariants {
        let mut known = TunedVariants::default();
        let own = |e: &&Entry| e.device == device && !e.key.starts_with(ALGORITHM);
        for e in self.lock().entries().filter(own) {
            if let Some(b) = e.best()
                && let Ok(digest) = u128::from_str_radix(&b.program, 16)
            {
                known.insert(&*e.key, b.variant.clone(), digest);
            }
        }
        known
    }

    /// Adds an entry in memory.
    pub fn add(&self, e: &Entry) {
        self.lock().add(e);
    }

    /// Marks those of these keys as used now whose time stamp is at least a day old, so that they are kept
    /// longer. Writes the file if there are any. Does nothing after the first such write of this cache.
    pub fn touch(&self, device: &str, keys: &[&str]) {
        if keys.is_empty() || self.path.is_none() || self.touched.load(Ordering::Relaxed) {
            return;
        }
        let (mut t, now, mut news) = (self.lock(), now(), false);
        for k in keys {
            if let Some(e) = t.0.get_mut(&(device.to_string(), k.to_string()))
                && e.used + DAY <= now
            {
                (e.used, news) = (now, true);
            }
        }
        drop(t);
        if news && !self.touched.swap(true, Ordering::Relaxed) {
            self.save_or_warn();
        }
    }

    /// Merges with the file and replaces it. Afterwards this table also contains the results of other
    /// processes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file or its directory cannot be written, or another process holds the lock for
    /// more than ten seconds; [`Error::Format`] for another kind of file. The results stay in memory.
    pub fn save(&self) -> Result<()> {
        self.edit(|_| ())
    }

    /// Like [`TuningCache::save`]; the first failure is logged as a warning.
    pub fn save_or_warn(&self) {
        if let Err(e) = self.save()
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%e, "the results of tuning were not saved");
        }
    }

    /// Clears the rejections of a device.
    ///
    /// # Errors
    /// The errors of [`TuningCache::save`].
    pub fn clear_rejections(&self, device: &str) -> Result<()> {
        self.edit(|t| t.0.values_mut().filter(|e| e.device == device).for_each(|e| e.rejected.clear()))
    }

    /// Adds the entries of another file. Returns their number.
    ///
    /// # Errors
    /// The errors of [`Table::read`]; [`Error::Io`] if the file does not exist; the errors of
    /// [`TuningCache::save`].
    pub fn import(&self, from: &Path) -> Result<usize> {
        let there = Table::read(from)?.ok_or_else(|| io(from, "there is no such file"))?;
        self.lock().merge(&there);
        self.save()?;
        Ok(there.len())
    }

    /// Merges this table into another file. Returns the number of this table's entries.
    ///
    /// # Errors
    /// The errors of [`TuningCache::save`].
    pub fn export(&self, to: &Path) -> Result<usize> {
        let other = TuningCache::at(to);
        let ours = self.table();
        other.lock().merge(&ours);
        other.save()?;
        other.warnings().into_iter().for_each(|w| self.warn(w));
        Ok(ours.len())
    }

    /// Merges with the file, applies `change` and writes the table, under the file's lock.
    fn edit(&self, change: impl FnOnce(&mut Table)) -> Result<()> {
        let mut t = self.lock();
        let Some(path) = &self.path else {
            change(&mut t);
            return Ok(());
        };
        let path = &file::resolve(path)?;
        let _held = FileLock::new(path)?;
        match file::classify(path)? {
            FileState::Nothing | FileState::Empty => {}
            FileState::Table(there) => t.merge(&there),
            FileState::NotOurs(e) => return Err(e),
            FileState::Damaged(e) => {
                let to = file::rename_corrupt(path)?;
                self.warn(format!("{e}; it is kept as {}", to.display()));
            }
        }
        change(&mut t);
        t.trim(MAX_ENTRIES);
        let text = t.render(MAX_BYTES);
        output::write(path, text.as_bytes())
    }

    /// Creates a file that will name the running candidate; `None` for a cache without a file.
    ///
    /// # Errors
    /// The errors of [`TuningCache::save`].
    pub fn guard(&self) -> Result<Option<Guard>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(path) = &self.path else { return Ok(None) };
        let path = &file::resolve(path)?;
        let _held = FileLock::new(path)?;
        let (path, file) = loop {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = with_suffix(path, &format!("{RUNNING}{}-{n}", std::process::id()));
            match File::options().create_new(true).read(true).write(true).open(&path) {
                Ok(f) => break (path, f),
                // A crashed process with the same id left this file, and it has not been recovered yet.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(io(&path, e)),
            }
        };
        // No other process uses the file yet, so this does not block.
        file.lock().map_err(|e| io(&path, e))?;
        Ok(Some(Guard { path, file }))
    }

    /// Rejects the candidates that were running when their processes crashed; these may be child processes.
    /// `why` and `detail` give the reason. Returns each rejection with the candidate's key.
    ///
    /// # Errors
    /// The errors of [`TuningCache::save`].
    pub fn recover(&self, why: RejectReason, detail: &str) -> Result<Vec<(String, Rejection)>> {
        let Some(path) = &self.path else { return Ok(vec![]) };
        let path = &file::resolve(path)?;
        let (Some(folder), Some(name)) = (path.parent(), path.file_name().map(|n| n.to_string_lossy()))
        else {
            return Ok(vec![]);
        };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let Ok(files) = fs::read_dir(folder) else { return Ok(vec![]) };
        let start = format!("{name}{RUNNING}");
        let left: Vec<PathBuf> = files
            .flatten()
            .filter(|f| f.file_name().to_string_lossy().starts_with(&start))
            .map(|f| f.path())
            .collect();
        if left.is_empty() {
            return Ok(vec![]);
        }
        let mut found = vec![];
        {
            let _held = FileLock::new(path)?;
            for p in &left {
                let Ok(mut file) = File::options().read(true).write(true).open(p) else { continue };
                // The file is locked, so its process still runs.
                if file.try_lock().is_err() {
                    continue;
                }
                let mut text = String::new();
                if file.read_to_string(&mut text).is_ok()
                    && let Ok(r) = serde_json::from_str::<RunningCandidate>(&text)
                {
                    found.push(r);
                }
                let _ = fs::remove_file(p);
            }
        }
        let mut out = vec![];
        for r in found {
            let rejection = Rejection { variant: r.variant, why, detail: detail.into() };
            let rejected = vec![rejection.clone()];
            self.add(&Entry { rejected, ..Entry::new(&r.device, &r.key) });
            out.push((r.key, rejection));
        }
        if !out.is_empty() {
            self.save()?;
        }
        Ok(out)
    }
}

/// Part of the names of files that name running candidates.
const RUNNING: &str = ".running-";

#[derive(Serialize, Deserialize)]
struct RunningCandidate {
    device: String,
    key: String,
    variant: Variant,
}

/// Records the candidate that this process runs, in case the process crashes.
#[derive(Debug)]
pub struct Guard {
    path: PathBuf,
    file: File,
}

impl Guard {
    /// Records a candidate before it runs.
    ///
    /// # Errors
    /// [`Error::Io`] if the record cannot be written.
    pub fn begin(&mut self, device: &str, key: &str, variant: &Variant) -> Result<()> {
        let r = RunningCandidate { device: device.into(), key: key.into(), variant: variant.clone() };
        self.write(&text(&r))
    }

    /// Clears the record after the candidate has run.
    ///
    /// # Errors
    /// [`Error::Io`] if the record cannot be written.
    pub fn end(&mut self) -> Result<()> {
        self.write("")
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let all = |f: &mut File| {
            f.set_len(0)?;
            f.rewind()?;
            f.write_all(text.as_bytes())
        };
        all(&mut self.file).map_err(|e| io(&self.path, e))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests;

//! Safe and fast probing of devices, for backends with third-party libraries.
//!
//! A broken driver can crash or hang the probing process, and even a working one (PoCL and lavapipe include a
//! compiler) takes tens of milliseconds to load. The first probe therefore runs in a child process if the
//! program says how to start one ([`set_program`]), and so does the first opening of each device.
//! The result is stored on disk under a digest of what the devices depend on, together with the state of
//! every library that was loaded ([`files`]). While all of this is unchanged, the record is used as follows:
//! - If devices were found, no child is started. If all of them are software devices (which automatic
//!   selection tries last), or if the backend's probe is never repeated in this process
//!   ([`ProbeSpec::repeat`]), the drivers are not loaded either: the record has the list. Otherwise the
//!   drivers list the devices in this process.
//! - If no device was found, the record is the answer, provided that no library was loaded or that the
//!   machine has no device nodes of drivers. Otherwise another child is started.
//! - If a driver crashed or hung, the record is the answer for a day.

pub mod files;

use crate::cache::{self, DiskCache};
use crate::child::{self, Program};
use crate::{BackendType, DeviceInfo, Error, Options, Result, backend, driver_output, fork, registry};
use files::{Key, Seen};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time limit of a child that probes or opens a device, unless [`LIMIT_VARIABLE`] is set.
const PROBE_TIME: Duration = Duration::from_secs(30);

/// Environment variable: the time limit of a child in seconds, for slow drivers.
pub const LIMIT_VARIABLE: &str = "HALCYON_PROBE_TIMEOUT";

/// After this time a message names the driver that the process is waiting for.
const NOTICE_AFTER: Duration = Duration::from_secs(2);

/// A driver that crashed or hung is not tried again for this long, unless one of its dependencies changes.
const FAILURE_LIFETIME: Duration = Duration::from_secs(24 * 3600);

static PROGRAM: OnceLock<Program> = OnceLock::new();
/// Set if an interpreter was named that cannot run the program.
static UNUSABLE: AtomicBool = AtomicBool::new(false);
static NOTICE: OnceLock<fn(&str)> = OnceLock::new();

/// Sets the program that answers `__probe BACKEND` with [`report`] on its standard output, and `__probe
/// BACKEND --open N` with [`report_open`]. With `--version` it must succeed and load no driver. Later calls
/// have no effect.
pub fn set_program(program: Program) {
    let _ = PROGRAM.set(program);
}

/// [`set_program`] for an executable without leading arguments.
pub fn set_executable(exe: PathBuf) {
    set_program(exe.into());
}

/// The program for children; `None` if none was set, or if it is an interpreter that cannot run it.
fn program() -> Option<&'static Program> {
    PROGRAM.get().filter(|_| !UNUSABLE.load(Ordering::Relaxed))
}

/// Whether an error means that an interpreter cannot run the program. From then on, probes run in this
/// process, as without a program: whether an interpreter can be started depends on what embeds it.
fn cannot_run(program: &Program, e: &Error) -> bool {
    let unusable = !program.arguments.is_empty() && matches!(e, Error::Io { .. });
    if unusable && !UNUSABLE.swap(true, Ordering::Relaxed) {
        tracing::warn!("drivers are loaded without a probe in a child process: {e}");
    }
    unusable
}

/// Sets the function that receives a message when a driver is slow to answer. Later calls have no effect.
pub fn set_notice(f: fn(&str)) {
    let _ = NOTICE.set(f);
}

/// How to probe the devices of one library.
#[derive(Debug)]
pub struct ProbeSpec {
    pub backend: BackendType,
    /// Probes in this process.
    pub list: fn() -> Result<Vec<DeviceInfo>>,
    /// Whether a probe that succeeded in a child is repeated in this process. If not, the child's answer is
    /// used.
    pub repeat: bool,
    /// The dependencies of the answer, below a root directory (`/` except in tests).
    pub depends: fn(&Path) -> ProbeDependencies,
    /// What the user can do if a driver crashes the probing process.
    pub fix: &'static str,
    pub state: Mutex<State>,
}

/// The results of probes in this process.
#[derive(Debug)]
pub struct State {
    known: CachedProbe,
    /// Result of the first opening of each device, by device id. [`Error::Unavailable`] if it crashed the
    /// child.
    opened: BTreeMap<String, Result<()>>,
    /// The answer of a child that `prepare` started ahead of the first request, with the key at that time.
    asked: Option<(Key, Result<ProbeReply>)>,
}

impl State {
    pub const fn new() -> State {
        State { known: CachedProbe::Nothing, opened: BTreeMap::new(), asked: None }
    }
}

impl Default for State {
    fn default() -> State {
        State::new()
    }
}

#[derive(Debug)]
enum CachedProbe {
    Nothing,
    /// Later probes run in this process, because the probe did not crash the child or no executable for a
    /// child was set.
    Safe,
    /// The final answer: the probe is not repeated in this process.
    Answer(Result<Vec<DeviceInfo>>),
}

/// What a list of devices depends on, besides the boot of the machine, device nodes and kernel modules.
#[derive(Debug, Default)]
pub struct ProbeDependencies {
    /// Names or paths of libraries. The list also depends on the state of the files that the loader may find
    /// for these names.
    pub libraries: Vec<String>,
    /// Libraries that are loaded only when a device is opened.
    pub later: Vec<String>,
    /// Files that register drivers, each with the driver's library if the file names one.
    pub manifests: Vec<(PathBuf, Option<PathBuf>)>,
    /// Prefixes of environment variables that affect the libraries.
    pub variables: &'static [&'static str],
}

/// A probing child's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Answer {
    Devices(Vec<DeviceInfo>),
    Unavailable { tried: Vec<String>, reason: String, fix: String },
    Failed(String),
}

/// The output of a child: one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ProbeReply {
    /// `None` from a child that opened a device.
    answer: Option<Answer>,
    /// The libraries that the child loaded; `None` if the system does not report them.
    loaded: Option<Vec<Seen>>,
}

/// The record of a probe on disk.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    outcome: Outcome,
    /// The libraries that were loaded.
    loaded: Vec<Seen>,
    /// The devices that were opened, by id. If opening a device crashed the child, the value says how the
    /// child ended.
    opened: BTreeMap<String, Option<String>>,
    /// Unix time in seconds.
    at: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Answered(Answer),
    /// How the child terminated.
    Fatal(String),
}

impl Record {
    fn of(outcome: Outcome, loaded: Vec<Seen>) -> Record {
        Record { outcome, loaded, opened: BTreeMap::new(), at: now() }
    }

    /// Whether the libraries are unchanged. If a crash is recorded, the record must also be younger than a
    /// day.
    fn holds(&self) -> bool {
        let harm = matches!(self.outcome, Outcome::Fatal(_)) || self.opened.values().any(Option::is_some);
        let young = (self.at..=self.at + FAILURE_LIFETIME.as_secs()).contains(&now());
        self.loaded.iter().all(Seen::holds) && (young || !harm)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

/// The cache of probe records.
fn memory() -> Option<DiskCache> {
    cache::user_dir().map(|d| DiskCache::new(d.join("probe"), 1 << 20))
}

/// Deletes the results of earlier probes, on disk and in this process. The next probes run in children if an
/// executable was set.
pub fn forget() {
    if let Some(dir) = cache::user_dir() {
        for file in
            entries(&dir.join("probe")).into_iter().filter(|f| f.extension().is_some_and(|e| e == "bin"))
        {
            // A file that cannot be removed is validated as before.
            let _ = std::fs::remove_file(file);
        }
    }
    for spec in probes() {
        *spec.lock() = State::new();
    }
}

/// Starts a child for each driver without a valid record, in parallel. The probes that follow use the answers
/// of these children.
pub fn prepare() {
    let (Some(program), false) = (program(), in_child()) else { return };
    std::thread::scope(|s| {
        for spec in probes() {
            // If no thread can be started, the probe runs when it is needed.
            let _ = std::thread::Builder::new().spawn_scoped(s, move || {
                let mut state = spec.lock();
                let key = spec.key(Path::new("/"));
                let open = matches!(state.known, CachedProbe::Nothing) && state.asked.is_none();
                if open && spec.recall(memory().as_ref(), key).is_none() {
                    state.asked = Some((key, spec.via_child(program)));
                }
            });
        }
    });
}

/// The time limit of a child: [`LIMIT_VARIABLE`], else 30 seconds.
///
/// # Errors
/// [`Error::Argument`] if the variable is not a number of seconds from 1 to 3600.
pub fn limit() -> Result<Duration> {
    let Some(text) = std::env::var_os(LIMIT_VARIABLE).filter(|v| !v.is_empty()) else {
        return Ok(PROBE_TIME);
    };
    let seconds = text.to_str().and_then(|t| t.trim().parse().ok()).filter(|s| (1..=3600).contains(s));
    let wrong =
        || Error::argument(LIMIT_VARIABLE, format!("{text:?} is not a number of seconds from 1 to 3600"));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

/// Whether this process is a probing child.
fn in_child() -> bool {
    std::env::var_os(child::VARIABLE).is_some()
}

impl ProbeSpec {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn probe_here(&self) -> Result<Vec<DeviceInfo>> {
        fork::may_load(self.backend)?;
        let _driver = driver_output::capture(self.backend.id());
        (self.list)()
    }

    fn key(&self, root: &Path) -> Key {
        files::key(self.backend.id(), &(self.depends)(root), root)
    }

    /// The devices, by the cheapest method that is safe.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what was tried, or with how the child ended if a driver crashed it.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        if in_child() {
            return self.probe_here();
        }
        let mut state = self.lock();
        match &state.known {
            CachedProbe::Safe => return self.probe_here(),
            CachedProbe::Answer(a) => return a.clone(),
            CachedProbe::Nothing => {}
        }
        let (found, known) = match program() {
            None => self.without_child(),
            Some(program) => match self.find(memory().as_ref(), Path::new("/"), program, &mut state.asked) {
                (Err(e), _) if cannot_run(program, &e) => self.without_child(),
                found => found,
            },
        };
        state.known = known;
        found
    }

    /// The answer of a program that starts no children, and the resulting state.
    fn without_child(&self) -> (Result<Vec<DeviceInfo>>, CachedProbe) {
        if self.repeat {
            return (self.probe_here(), CachedProbe::Safe);
        }
        let e = self.unavailable(
            (self.depends)(Path::new("/")).libraries,
            "the library is loaded only in a child process, and this program has not set a program for the child"
                .into(),
            "Set one with halcyon_hal::probe::set_program, or run `halcyon devices`".into(),
        );
        (Err(e.clone()), CachedProbe::Answer(Err(e)))
    }

    /// The stored record, if it is still valid.
    fn recall(&self, memory: Option<&DiskCache>, key: Key) -> Option<Record> {
        let record: Record = serde_json::from_slice(&memory?.get(key.digest)?).ok()?;
        let harm = matches!(record.outcome, Outcome::Fatal(_));
        (record.holds() && (key.whole || harm)).then_some(record)
    }

    fn remember(&self, memory: Option<&DiskCache>, key: Key, record: &Record) {
        if let Some(m) = memory
            && let Ok(text) = serde_json::to_vec(record)
        {
            m.put(key.digest, &text);
        }
    }

    /// The answer and the resulting state, from the stored record or a child.
    fn find(
        &self,
        memory: Option<&DiskCache>,
        root: &Path,
        program: &Program,
        asked: &mut Option<(Key, Result<ProbeReply>)>,
    ) -> (Result<Vec<DeviceInfo>>, CachedProbe) {
        let key = self.key(root);
        if let Some(record) = self.recall(memory, key) {
            match record.outcome {
                Outcome::Fatal(how) => {
                    let e = self.fatal(&how, true);
                    return (Err(e.clone()), CachedProbe::Answer(Err(e)));
                }
                Outcome::Answered(a) if self.is_final(&a, &record.loaded, root) => {
                    return (self.result(a), CachedProbe::Nothing);
                }
                Outcome::Answered(Answer::Devices(_)) if self.repeat => {
                    return (self.probe_here(), CachedProbe::Safe);
                }
                Outcome::Answered(_) => {}
            }
        }
        let before = asked.take().filter(|(k, _)| *k == key).map(|(_, answer)| answer);
        let ProbeReply { answer, loaded } = match before.unwrap_or_else(|| self.via_child(program)) {
            Ok(asked) => asked,
            Err(e) => {
                let e = match e {
                    Error::Unavailable { reason, .. } => {
                        self.remember(memory, key, &Record::of(Outcome::Fatal(reason.clone()), vec![]));
                        self.fatal(&reason, memory.is_some())
                    }
                    e => e,
                };
                return (Err(e.clone()), CachedProbe::Answer(Err(e)));
            }
        };
        let Some(answer) = answer else {
            let e = self.fatal(&format!("{PROBE_FAILED} gave no answer"), false);
            return (Err(e.clone()), CachedProbe::Answer(Err(e)));
        };
        // Do not store the answer if the dependencies changed while the child ran.
        if let Some(loaded) = loaded
            && key.whole
            && self.key(root) == key
        {
            self.remember(memory, key, &Record::of(Outcome::Answered(answer.clone()), loaded));
        }
        let found = self.result(answer);
        let known = if self.repeat { CachedProbe::Safe } else { CachedProbe::Answer(found.clone()) };
        (found, known)
    }

    /// Whether an earlier answer can be used without loading the drivers again.
    fn is_final(&self, a: &Answer, loaded: &[Seen], root: &Path) -> bool {
        match a {
            Answer::Devices(d) => !d.is_empty() && (!self.repeat || d.iter().all(|d| d.software)),
            // If the machine has device nodes, a loaded driver may find a device later.
            Answer::Unavailable { .. } => loaded.is_empty() || files::device_nodes(root).is_empty(),
            Answer::Failed(_) => false,
        }
    }

    fn result(&self, a: Answer) -> Result<Vec<DeviceInfo>> {
        match a {
            Answer::Devices(d) => Ok(d),
            Answer::Unavailable { tried, reason, fix } => Err(self.unavailable(tried, reason, fix)),
            Answer::Failed(text) => Err(self.fatal(&format!("{PROBE_FAILED} said: {text}"), false)),
        }
    }

    /// Opens a device in a child before this process opens it for the first time, because the driver may
    /// crash, hang or load more libraries then. Starts no child if no program was set. `kind` is the backend
    /// that lists the device.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with how the child ended if the driver crashed it, and in a forked child whose
    /// parent loaded the library. Errors returned by the driver are ignored: opening the device in this
    /// process reports them.
    pub fn may_open(&self, kind: BackendType, index: usize) -> Result<()> {
        if let Some(program) = program().filter(|_| !in_child()) {
            let (memory, root) = (memory(), Path::new("/"));
            match self.try_open(kind, index, memory.as_ref(), root, program) {
                Err(e) if !cannot_run(program, &e) => return Err(e),
                _ => {}
            }
        }
        fork::may_load(self.backend)
    }

    fn try_open(
        &self,
        kind: BackendType,
        index: usize,
        memory: Option<&DiskCache>,
        root: &Path,
        program: &Program,
    ) -> Result<()> {
        let id = format!("{kind}:{index}");
        let mut state = self.lock();
        if let Some(before) = state.opened.get(&id) {
            return before.clone();
        }
        let key = self.key(root);
        let mut record = self.recall(memory, key);
        let result = match record.as_ref().and_then(|r| r.opened.get(&id)) {
            Some(None) => Ok(()),
            Some(Some(how)) => Err(self.fatal(how, true)),
            None => {
                let arguments = ["__probe", kind.id(), "--open", &index.to_string()];
                let what = format!("opening {id}: ");
                let found = limit().and_then(|l| self.run_child(program, &arguments, l, &what));
                if let Some(r) = record.as_mut() {
                    let how = match &found {
                        Ok(ProbeReply { loaded: Some(loaded), .. }) => {
                            r.loaded.extend(loaded.iter().cloned());
                            r.loaded.sort();
                            r.loaded.dedup();
                            Some(None)
                        }
                        Ok(_) => None,
                        Err(Error::Unavailable { reason, .. }) => {
                            r.at = now();
                            Some(Some(reason.clone()))
                        }
                        Err(_) => None,
                    };
                    if let Some(how) = how.filter(|_| self.key(root) == key) {
                        r.opened.insert(id.clone(), how);
                        self.remember(memory, key, r);
                    }
                }
                found.map(drop)
            }
        };
        state.opened.insert(id, result.clone());
        result
    }

    /// The libraries and registered drivers that may have crashed a child.
    fn suspects(&self) -> Vec<String> {
        let depends = (self.depends)(Path::new("/"));
        let registered = |(file, driver): (PathBuf, Option<PathBuf>)| match driver {
            Some(d) => format!("{}: {}", file.display(), d.display()),
            None => file.display().to_string(),
        };
        depends.libraries.into_iter().chain(depends.manifests.into_iter().map(registered)).collect()
    }

    fn unavailable(&self, tried: Vec<String>, reason: String, fix: String) -> Error {
        Error::Unavailable { backend: self.backend.id().into(), tried, reason, fix }
    }

    /// The error for a driver that crashed a child. `how` is the recorded reason.
    fn fatal(&self, how: &str, remembered: bool) -> Error {
        let reason = match remembered {
            true => format!("{how} (from an earlier probe; `halcyon devices --refresh` probes again)"),
            false => how.to_string(),
        };
        self.unavailable(self.suspects(), reason, self.fix.into())
    }

    /// Probes in a child process: runs `__probe BACKEND`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with how the child ended if a driver crashed it; [`Error::Io`] if the child
    /// could not be started, or if the program does not work; the errors of [`limit`].
    fn via_child(&self, program: &Program) -> Result<ProbeReply> {
        self.run_child(program, &["__probe", self.backend.id()], limit()?, "")
    }

    fn run_child(
        &self,
        program: &Program,
        arguments: &[&str],
        limit: Duration,
        what: &str,
    ) -> Result<ProbeReply> {
        let harm = |how: String| self.fatal(&format!("{what}{PROBE_FAILED} {how}"), false);
        let mut slow = || {
            let text = format!(
                "waiting for the driver of {} ({what}no answer for {} s; after {} s it counts as failed, which \
                 is remembered; `halcyon doctor --backend {}` examines it)",
                self.backend,
                NOTICE_AFTER.as_secs(),
                limit.as_secs(),
                self.backend
            );
            tracing::warn!(backend = %self.backend, "{text}");
            if let Some(tell) = NOTICE.get() {
                tell(&text);
            }
        };
        let not_started = |why: String| Error::Io {
            path: program.executable.to_string_lossy().into_owned(),
            what: format!("the process that looks for {} devices did not start: {why}", self.backend),
        };
        let mut command = program.command();
        let done = child::output_patient(command.args(arguments), limit, NOTICE_AFTER, &mut slow)
            .map_err(|e| not_started(e.to_string()))?;
        // If an interpreter cannot run the program at all, the driver is not the cause.
        if let Err(how) = &done.end
            && !program.arguments.is_empty()
            && !done.hung
            && let Err(why) = works(program, limit)
        {
            return Err(not_started(format!("it {how}, and with --version {why}")));
        }
        driver_output::report_output(self.backend.id(), &done.err);
        done.end.map_err(harm)?;
        let asked: Option<ProbeReply> = done.out.lines().rev().find_map(|l| serde_json::from_str(l).ok());
        match asked {
            Some(ProbeReply { answer: Some(Answer::Failed(e)), .. }) => Err(harm(format!("said: {e}"))),
            Some(asked) => Ok(asked),
            None => Err(harm("gave no answer".into())),
        }
    }
}

/// Whether a program succeeds without a driver; the error says how it ended.
fn works(program: &Program, limit: Duration) -> Result<(), String> {
    child::output(program.command().arg("--version"), limit).map_err(|e| e.to_string())?.end
}

/// Start of the message if a driver crashed a child.
const PROBE_FAILED: &str = "a driver failed during the probe: the probing process";

/// The files of a directory, sorted by name.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut v: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    v.sort();
    v
}

/// The probes of this build.
fn probes() -> impl Iterator<Item = &'static ProbeSpec> {
    backend::BUILT_IN.iter().filter_map(|b| (b.probe)())
}

/// The answer of a probing child, as one line; `None` for backends that are not probed in children.
pub fn report(kind: BackendType) -> Option<String> {
    let spec = (kind.built_in()?.probe)()?;
    let before = files::mapped();
    let answer = match spec.probe_here() {
        Ok(d) => Answer::Devices(d),
        Err(Error::Unavailable { tried, reason, fix, .. }) => Answer::Unavailable { tried, reason, fix },
        Err(e) => Answer::Failed(e.to_string()),
    };
    Some(line(Some(answer), &before))
}

/// The answer of a child that opens a device, as one line. Errors of the driver are ignored: the parent gets
/// them when it opens the device itself.
///
/// # Errors
/// [`Error::Unavailable`] if this build has no such driver.
pub fn report_open(kind: BackendType, index: usize) -> Result<String> {
    let before = files::mapped();
    // The parent opens the device too, and reports the driver's error.
    let opened = registry::driver(kind)?.open(index, &Options::default()).ok();
    let text = line(None, &before);
    drop(opened);
    Ok(text)
}

fn line(answer: Option<Answer>, before: &Option<std::collections::BTreeSet<PathBuf>>) -> String {
    let asked = ProbeReply { answer, loaded: files::loaded_since(before) };
    serde_json::to_string(&asked).unwrap_or_else(|e| format!("{e}"))
}

#[cfg(all(test, unix))]
#[path = "probe/tests.rs"]
mod tests;

//! Looking for devices safely and quickly, for backends whose libraries are other people's.
//!
//! A driver that is broken can end the process that looks, or keep it for ever, and a healthy one (PoCL and
//! lavapipe bring a whole compiler) takes tens of milliseconds to load. So the first look is made in a child
//! process where the program offers an executable for it ([`set_executable`]), and so is the first opening of
//! each device. What came of it is remembered on disk, under a digest of what the devices depend on, with the
//! state of every library that was loaded ([`files`]). While that holds no child is needed; where all devices
//! were software ones, which are only used when named, or nothing was loaded, the drivers need not be loaded
//! to list them.

pub mod files;

use crate::cache::{self, DiskCache};
use crate::{BackendType, DeviceInfo, Error, Options, Result, chatter, child, registry};
use files::{Key, Seen};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a child may look for devices, or open one, where [`LIMIT_VARIABLE`] does not say.
const PROBE_TIME: Duration = Duration::from_secs(30);

/// Seconds that a child may take, for drivers that need longer.
pub const LIMIT_VARIABLE: &str = "HALCYON_PROBE_TIMEOUT";

/// After so long, what is waited for is told.
const PATIENCE: Duration = Duration::from_secs(2);

/// For so long a driver that crashed or hung is not looked at again while nothing has changed.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

static EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();
static NOTICE: OnceLock<fn(&str)> = OnceLock::new();

/// Names the executable that answers `__probe BACKEND` with [`report`] on its standard output, and `__probe
/// BACKEND --open N` with [`report_open`]. The first call counts.
pub fn set_executable(exe: PathBuf) {
    let _ = EXECUTABLE.set(exe);
}

/// Names the function that is told what is waited for, where a driver takes long to answer. The first call
/// counts.
pub fn set_notice(f: fn(&str)) {
    let _ = NOTICE.set(f);
}

/// How the devices of one library are looked for.
#[derive(Debug)]
pub struct Look {
    pub backend: BackendType,
    /// Looks in this process.
    pub here: fn() -> Result<Vec<DeviceInfo>>,
    /// Whether a look that did no harm may be repeated in this process. Else the child's answer is the
    /// answer.
    pub repeat: bool,
    /// What the answer depends on, below a root directory (`/` outside of tests).
    pub depends: fn(&Path) -> Depends,
    /// What to do where a driver ends the process that looks.
    pub fix: &'static str,
    pub state: Mutex<State>,
}

/// What this process has found out by a look.
#[derive(Debug)]
pub struct State {
    known: Known,
    /// What came of the first opening of a device, by its id. [`Error::Unavailable`] where it ended the
    /// child.
    opened: BTreeMap<String, Result<()>>,
    /// What a child answered that was asked before somebody wanted to know, and the key then.
    asked: Option<(Key, Result<Asked>)>,
}

impl State {
    pub const fn new() -> State {
        State { known: Known::Nothing, opened: BTreeMap::new(), asked: None }
    }
}

impl Default for State {
    fn default() -> State {
        State::new()
    }
}

#[derive(Debug)]
enum Known {
    Nothing,
    /// It did not end the process that made it: later ones are made here.
    Safe,
    /// It is not repeated in this process.
    Answer(Result<Vec<DeviceInfo>>),
}

/// What a list of devices depends on besides the start of the machine, its device nodes and its kernel
/// modules.
#[derive(Debug, Default)]
pub struct Depends {
    /// Libraries: the names count, and the state of the files that they may lead to.
    pub libraries: Vec<String>,
    /// Libraries that are loaded when a device is opened.
    pub later: Vec<String>,
    /// Files that register drivers, each with the driver's library where the file names one.
    pub manifests: Vec<(PathBuf, Option<PathBuf>)>,
    /// Beginnings of the names of variables that steer the libraries.
    pub variables: &'static [&'static str],
}

/// What a probing child says of the devices.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Answer {
    Devices(Vec<DeviceInfo>),
    Unavailable { tried: Vec<String>, reason: String, fix: String },
    Failed(String),
}

/// What a child prints: one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Asked {
    /// Of a child that opened a device: nothing.
    answer: Option<Answer>,
    /// The libraries that it has loaded; `None` where the system does not tell.
    loaded: Option<Vec<Seen>>,
}

/// What is kept on disk of a look.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    outcome: Outcome,
    /// What was loaded.
    loaded: Vec<Seen>,
    /// Ids of devices that were opened, and how that ended the child where it did.
    opened: BTreeMap<String, Option<String>>,
    /// Seconds since 1970.
    at: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Answered(Answer),
    /// How the child ended.
    Fatal(String),
}

impl Record {
    fn of(outcome: Outcome, loaded: Vec<Seen>) -> Record {
        Record { outcome, loaded, opened: BTreeMap::new(), at: now() }
    }

    /// Whether it is of the same files, and of harm not too long ago.
    fn holds(&self) -> bool {
        let harm = matches!(self.outcome, Outcome::Fatal(_)) || self.opened.values().any(Option::is_some);
        let young = (self.at..=self.at + REMEMBERED.as_secs()).contains(&now());
        self.loaded.iter().all(Seen::holds) && (young || !harm)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs())
}

/// Where looks are remembered.
fn memory() -> Option<DiskCache> {
    cache::user_dir().map(|d| DiskCache::new(d.join("probe"), 1 << 20))
}

/// Forgets what earlier looks found, on disk and in this process: the next ones are made anew, by children.
pub fn forget() {
    if let Some(dir) = cache::user_dir() {
        for file in
            entries(&dir.join("probe")).into_iter().filter(|f| f.extension().is_some_and(|e| e == "bin"))
        {
            // What cannot be removed is looked at, and its files compared, as before.
            let _ = std::fs::remove_file(file);
        }
    }
    for look in looks() {
        *look.lock() = State::new();
    }
}

/// Lets children look at all drivers of which nothing is known, at the same time. The looks that follow take
/// their answers.
pub fn prepare() {
    let (Some(exe), false) = (EXECUTABLE.get(), in_child()) else { return };
    std::thread::scope(|s| {
        for look in looks() {
            // Where no thread can be started, the look is made when it is wanted.
            let _ = std::thread::Builder::new().spawn_scoped(s, move || {
                let mut state = look.lock();
                let key = look.key(Path::new("/"));
                let open = matches!(state.known, Known::Nothing) && state.asked.is_none();
                if open && look.recall(memory().as_ref(), key).is_none() {
                    state.asked = Some((key, look.via_child(exe)));
                }
            });
        }
    });
}

/// How long a child may take: what [`LIMIT_VARIABLE`] says, else 30 seconds.
///
/// # Errors
/// [`Error::Argument`] where the variable is no number of seconds.
pub fn limit() -> Result<Duration> {
    let Some(text) = std::env::var_os(LIMIT_VARIABLE).filter(|v| !v.is_empty()) else {
        return Ok(PROBE_TIME);
    };
    let seconds = text.to_str().and_then(|t| t.trim().parse().ok()).filter(|s| (1..=3600).contains(s));
    let wrong =
        || Error::argument(LIMIT_VARIABLE, format!("{text:?} is no number of seconds from 1 to 3600"));
    seconds.map(Duration::from_secs).ok_or_else(wrong)
}

/// Whether this process is a child that looks for another one.
fn in_child() -> bool {
    std::env::var_os(child::VARIABLE).is_some()
}

impl Look {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn look_here(&self) -> Result<Vec<DeviceInfo>> {
        let _driver = chatter::capture(self.backend.id());
        (self.here)()
    }

    fn key(&self, root: &Path) -> Key {
        files::key(self.backend.id(), &(self.depends)(root), root)
    }

    /// Devices, by the cheapest way that is safe.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what was tried, or with the way the child ended where a driver took it
    /// down.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        if in_child() {
            return self.look_here();
        }
        let mut state = self.lock();
        match &state.known {
            Known::Safe => return self.look_here(),
            Known::Answer(a) => return a.clone(),
            Known::Nothing => {}
        }
        let (found, known) = match EXECUTABLE.get() {
            Some(exe) => self.find(memory().as_ref(), Path::new("/"), exe, &mut state.asked),
            None if self.repeat => (self.look_here(), Known::Safe),
            None => {
                let e = self.unavailable(
                    (self.depends)(Path::new("/")).libraries,
                    "its library is loaded in a process of its own alone, and this program has named none"
                        .into(),
                    "Name one with halcyon_hal::probe::set_executable, or ask `halcyon devices`".into(),
                );
                (Err(e.clone()), Known::Answer(Err(e)))
            }
        };
        state.known = known;
        found
    }

    /// What is remembered and still holds.
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

    /// The answer and what is known then, from memory or from a child.
    fn find(
        &self,
        memory: Option<&DiskCache>,
        root: &Path,
        exe: &Path,
        asked: &mut Option<(Key, Result<Asked>)>,
    ) -> (Result<Vec<DeviceInfo>>, Known) {
        let key = self.key(root);
        if let Some(record) = self.recall(memory, key) {
            match record.outcome {
                Outcome::Fatal(how) => {
                    let e = self.fatal(&how, true);
                    return (Err(e.clone()), Known::Answer(Err(e)));
                }
                Outcome::Answered(a) if self.is_final(&a, &record.loaded, root) => {
                    return (self.result(a), Known::Nothing);
                }
                Outcome::Answered(Answer::Devices(_)) if self.repeat => {
                    return (self.look_here(), Known::Safe);
                }
                Outcome::Answered(_) => {}
            }
        }
        let before = asked.take().filter(|(k, _)| *k == key).map(|(_, answer)| answer);
        let Asked { answer, loaded } = match before.unwrap_or_else(|| self.via_child(exe)) {
            Ok(asked) => asked,
            Err(e) => {
                let e = match e {
                    Error::Unavailable { reason, .. } => {
                        self.remember(memory, key, &Record::of(Outcome::Fatal(reason.clone()), vec![]));
                        self.fatal(&reason, memory.is_some())
                    }
                    e => e,
                };
                return (Err(e.clone()), Known::Answer(Err(e)));
            }
        };
        let Some(answer) = answer else {
            let e = self.fatal(&format!("{HARM} gave no answer"), false);
            return (Err(e.clone()), Known::Answer(Err(e)));
        };
        // What changed meanwhile may not be what the child has seen.
        if let Some(loaded) = loaded
            && key.whole
            && self.key(root) == key
        {
            self.remember(memory, key, &Record::of(Outcome::Answered(answer.clone()), loaded));
        }
        let found = self.result(answer);
        let known = if self.repeat { Known::Safe } else { Known::Answer(found.clone()) };
        (found, known)
    }

    /// Whether an answer of an earlier look is the answer, so that no driver is loaded to find the same
    /// again.
    fn is_final(&self, a: &Answer, loaded: &[Seen], root: &Path) -> bool {
        match a {
            Answer::Devices(d) => !d.is_empty() && (!self.repeat || d.iter().all(|d| d.software)),
            // A driver may find a device later that it does not find now, where the system has one.
            Answer::Unavailable { .. } => loaded.is_empty() || files::device_nodes(root).is_empty(),
            Answer::Failed(_) => false,
        }
    }

    fn result(&self, a: Answer) -> Result<Vec<DeviceInfo>> {
        match a {
            Answer::Devices(d) => Ok(d),
            Answer::Unavailable { tried, reason, fix } => Err(self.unavailable(tried, reason, fix)),
            Answer::Failed(text) => Err(self.fatal(&format!("{HARM} said: {text}"), false)),
        }
    }

    /// Lets a child open a device before this process opens it for the first time: a driver may crash or hang
    /// at that too, or load more libraries. Nothing is done without an executable for it. `kind` is the name
    /// under which the device is listed.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the way the child ended where the driver took it down. An error of the
    /// driver's own is none here: it comes again where the device is opened.
    pub fn may_open(&self, kind: BackendType, index: usize) -> Result<()> {
        match EXECUTABLE.get() {
            Some(exe) if !in_child() => self.try_open(kind, index, memory().as_ref(), Path::new("/"), exe),
            _ => Ok(()),
        }
    }

    fn try_open(
        &self,
        kind: BackendType,
        index: usize,
        memory: Option<&DiskCache>,
        root: &Path,
        exe: &Path,
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
                let mut command = Command::new(exe);
                command.args(["__probe", kind.id(), "--open", &index.to_string()]);
                let found = limit().and_then(|l| self.ask(&mut command, l, &format!("opening {id}: ")));
                if let Some(r) = record.as_mut() {
                    let how = match &found {
                        Ok(Asked { loaded: Some(loaded), .. }) => {
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

    /// The libraries and what is registered with them, each of which may be what ended a child.
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

    /// A driver that ended a child. `how` is the reason as it was told then.
    fn fatal(&self, how: &str, remembered: bool) -> Error {
        let reason = match remembered {
            true => format!("{how} (this is remembered; `halcyon devices --refresh` looks again)"),
            false => how.to_string(),
        };
        self.unavailable(self.suspects(), reason, self.fix.into())
    }

    /// What a child process finds: runs `exe __probe BACKEND`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the way it ended where a driver took it down; [`Error::Io`] where it did
    /// not start.
    fn via_child(&self, exe: &Path) -> Result<Asked> {
        self.ask(Command::new(exe).args(["__probe", self.backend.id()]), limit()?, "")
    }

    fn ask(&self, command: &mut Command, limit: Duration, what: &str) -> Result<Asked> {
        let harm = |how: String| self.fatal(&format!("{what}{HARM} {how}"), false);
        let mut slow = || {
            let text = format!(
                "waiting for the driver of {} ({what}no answer for {} s; given up after {} s, and remembered; `halcyon doctor --backend {}` \
                 examines it)",
                self.backend,
                PATIENCE.as_secs(),
                limit.as_secs(),
                self.backend
            );
            tracing::warn!(backend = %self.backend, "{text}");
            if let Some(tell) = NOTICE.get() {
                tell(&text);
            }
        };
        let done = child::output_patient(command, limit, PATIENCE, &mut slow).map_err(|e| Error::Io {
            path: command.get_program().to_string_lossy().into_owned(),
            what: format!("the process that looks for {} devices did not start: {e}", self.backend),
        })?;
        chatter::said(self.backend.id(), &done.err);
        done.end.map_err(harm)?;
        let asked: Option<Asked> = done.out.lines().rev().find_map(|l| serde_json::from_str(l).ok());
        match asked {
            Some(Asked { answer: Some(Answer::Failed(e)), .. }) => Err(harm(format!("said: {e}"))),
            Some(asked) => Ok(asked),
            None => Err(harm("gave no answer".into())),
        }
    }
}

/// How the reason begins where a driver took a child down.
const HARM: &str = "a driver failed while it was looked at: the probing process";

/// Files of a directory, in order of name.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut v: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    v.sort();
    v
}

/// The answer of a probing child, as one line; `None` for backends that are not looked at in children.
pub fn report(kind: BackendType) -> Option<String> {
    let look = looks().into_iter().find(|l| l.backend == kind)?;
    let before = files::mapped();
    let answer = match look.look_here() {
        Ok(d) => Answer::Devices(d),
        Err(Error::Unavailable { tried, reason, fix, .. }) => Answer::Unavailable { tried, reason, fix },
        Err(e) => Answer::Failed(e.to_string()),
    };
    Some(line(Some(answer), &before))
}

/// The answer of a child that opens a device, as one line. An error of the driver's is none: it comes again
/// in the parent.
///
/// # Errors
/// Where this build has no such driver.
pub fn report_open(kind: BackendType, index: usize) -> Result<String> {
    let before = files::mapped();
    // What the driver says is not asked for.
    let opened = registry::driver(kind)?.open(index, &Options::default()).ok();
    let text = line(None, &before);
    drop(opened);
    Ok(text)
}

fn line(answer: Option<Answer>, before: &Option<std::collections::BTreeSet<PathBuf>>) -> String {
    let asked = Asked { answer, loaded: files::loaded_since(before) };
    serde_json::to_string(&asked).unwrap_or_else(|e| format!("{e}"))
}

fn looks() -> Vec<&'static Look> {
    vec![
        #[cfg(feature = "opencl")]
        &crate::opencl::LOOK,
        #[cfg(feature = "webgpu")]
        &crate::webgpu::LOOK,
        #[cfg(feature = "cuda")]
        &crate::cuda::LOOK,
        #[cfg(feature = "rocm")]
        &crate::rocm::LOOK,
        #[cfg(feature = "tpu")]
        &crate::tpu::LOOK,
    ]
}

#[cfg(all(test, unix))]
#[path = "probe/tests.rs"]
mod tests;

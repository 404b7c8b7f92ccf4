//! Selection of a device, with a report of the reasons.
//!
//! If the request names a backend, only that backend is tried. If its device is missing, does not open, has
//! too little memory or does not accept the work, that is an error, unless the request or the configuration
//! file sets another [`Fallback`]. `Auto` goes through an order of backends ([`Policy`]): the caller's, else
//! the environment's (`HALCYON_BACKENDS`), else the configuration file's ([`crate::config`]), else by
//! priority. It takes the first device that exists, opens, has the required memory and accepts the work.
//! After a device is rejected, later backends are tried only if the fallback is `Next`, which is the default.
//! Software devices, whose drivers run on the CPU, come after all others, including the CPU backend. If an
//! order lists backends one by one, software devices stay at the place of their backend.

use crate::config;
use crate::policy::{Fallback, Policy, SetBy};
use crate::pool::MemoryPoolConfig;
use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result, backend, fork, registry};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The environment variable with the order of backends: a policy's name, or names of backends separated by
/// commas.
pub const VARIABLE: &str = "HALCYON_BACKENDS";

/// The end of the reason why a software device was not tried.
pub const TRIED_LAST: &str = "a software device is tried last unless named";

/// A backend or device that was considered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    pub backend: BackendType,
    /// `None` if the entry is about the backend as a whole: it has no devices, it was not tried, or it was
    /// requested and a fallback was used instead.
    pub device: Option<String>,
    pub name: Option<String>,
    pub priority: Option<u32>,
    /// Why it was rejected; `None` for the chosen one.
    pub rejected: Option<String>,
    /// A short form of `rejected`.
    #[serde(default)]
    pub brief: Option<String>,
    /// Bytes that the work needs on the device. This field and the next two are set only if the device was
    /// rejected for lack of memory.
    pub required: Option<u64>,
    /// Bytes that were free at the check.
    pub free: Option<u64>,
    /// Bytes by which `free` falls short.
    pub missing: Option<u64>,
}

/// The report of a selection: the chosen device, the rule that chose it, and why each other candidate was
/// rejected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    pub requested: BackendType,
    pub device: DeviceInfo,
    pub rule: String,
    /// The order of backends that was used.
    pub policy: Policy,
    /// The source of the policy.
    pub policy_by: SetBy,
    pub fallback: Fallback,
    /// The backends and devices of the search, in order, including those that were not tried. Empty if the
    /// requested backend was used.
    pub candidates: Vec<Candidate>,
}

impl Selection {
    /// The report for a device that the caller provided.
    pub fn given(device: DeviceInfo) -> Selection {
        Selection {
            requested: device.backend,
            rule: format!("the caller provided {}", device.id),
            device,
            policy: Policy::default(),
            policy_by: SetBy::Default,
            fallback: Fallback::Never,
            candidates: vec![],
        }
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.device.id, self.device.name, self.rule)?;
        for c in self.candidates.iter().filter(|c| c.rejected.is_some()) {
            write!(
                f,
                "\n  not {}: {}",
                c.device.as_deref().unwrap_or(c.backend.id()),
                c.rejected.as_deref().unwrap_or("")
            )?;
        }
        Ok(())
    }
}

/// The availability of one backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackendReport {
    pub id: BackendType,
    pub available: bool,
    /// Why it has no device, in full.
    pub reason: Option<String>,
    /// A short form of `reason`.
    #[serde(default)]
    pub brief: Option<String>,
    /// What was tried, one line per library or driver.
    #[serde(default)]
    pub tried: Vec<String>,
    /// What the user can do.
    #[serde(default)]
    pub fix: Option<String>,
    pub devices: Vec<DeviceInfo>,
}

impl BackendReport {
    /// The report of a probe's result.
    pub fn of(id: BackendType, found: Result<Vec<DeviceInfo>>) -> BackendReport {
        let none = |reason: String| BackendReport {
            id,
            available: false,
            brief: Some(reason.clone()),
            reason: Some(reason),
            tried: vec![],
            fix: None,
            devices: vec![],
        };
        match found {
            Ok(devices) if devices.is_empty() => none("the driver lists no device".into()),
            Ok(devices) => BackendReport {
                id,
                available: true,
                reason: None,
                brief: None,
                tried: vec![],
                fix: None,
                devices,
            },
            Err(e) => {
                let (tried, fix) = match &e {
                    Error::Unavailable { tried, fix, .. } => (tried.clone(), Some(fix.clone())),
                    Error::Driver { next, .. } => (vec![], Some(next.clone())),
                    _ => (vec![], None),
                };
                BackendReport { brief: Some(brief(&e)), tried, fix, ..none(e.to_string()) }
            }
        }
    }
}

/// A short description of an error for a list of devices: the cause, without what was tried and what to do.
pub fn brief(e: &Error) -> String {
    match e {
        Error::Unavailable { reason, .. } => reason.clone(),
        Error::Unsupported { what, .. } => format!("{what} is not supported"),
        Error::OutOfMemory { requested, free, .. } => {
            format!("too little memory: {requested} bytes are needed, {free} are free")
        }
        Error::Driver { call, code, .. } => format!("{call} failed: {code}"),
        e => e.to_string().lines().next().unwrap_or("").to_string(),
    }
}

/// Every backend with its devices, or the reason it has none.
pub fn discover() -> Vec<BackendReport> {
    #[cfg(not(target_arch = "wasm32"))]
    crate::probe::prepare();
    let look = |id| BackendReport::of(id, registry::driver(id).and_then(|d| d.probe()));
    backend::all().into_iter().map(look).collect()
}

/// A request for a device. If `policy` is `None`, the environment or the configuration file may set it; if
/// `fallback` is `None`, the configuration file may.
#[derive(Clone, Debug)]
pub struct Request {
    pub backend: BackendType,
    /// The device index within a named backend; `None`: the first.
    pub index: Option<usize>,
    pub policy: Option<Policy>,
    /// Default: `Never` for a named backend, `Next` for `Auto`.
    pub fallback: Option<Fallback>,
    /// Bytes that must be free on the device.
    pub memory: u64,
}

impl Default for Request {
    fn default() -> Request {
        Request::of(BackendType::Auto)
    }
}

impl Request {
    /// A request for a backend with no other settings.
    pub fn of(backend: BackendType) -> Request {
        Request { backend, index: None, policy: None, fallback: None, memory: 0 }
    }
}

/// Checks whether an open device accepts the work. An error rejects the device; [`Error::OutOfMemory`] also
/// reports by how much the memory falls short.
pub type AcceptCheck<'a> = &'a mut dyn FnMut(&Arc<dyn Device>) -> Result<()>;

/// Selects and opens a device.
///
/// # Errors
/// [`Error::Unavailable`] if no device exists. If one device was tried, its error. If several were tried:
/// [`Error::OutOfMemory`] if any of them has too little memory (with the shortfall of each such device), else
/// the error of the first. [`Error::Argument`] for an invalid order; errors of [`config::load`].
pub fn open(request: &Request, options: &Options) -> Result<(Arc<dyn Device>, Selection)> {
    open_for(request, options, &mut |_| Ok(()))
}

/// Like [`open`], for work that a device may decline.
///
/// # Errors
/// The errors of [`open`], where an error of `admit` counts as the device's error.
pub fn open_for(
    request: &Request,
    options: &Options,
    admit: AcceptCheck<'_>,
) -> Result<(Arc<dyn Device>, Selection)> {
    let auto = request.backend == BackendType::Auto;
    if auto && request.index.is_some() {
        return Err(Error::argument("device", "a device number needs a backend; give --backend too"));
    }
    let s = Settings::of(request)?;
    let options = &Options { memory_pool: options.memory_pool.or(s.memory_pool), ..options.clone() };
    let mut search = Search { request, options, admit, candidates: vec![], errors: vec![] };
    if !auto {
        let requested = request.backend;
        let first = match search.open_named() {
            Ok(found) => return Ok(search.done(found, format!("{requested} was requested"), s)),
            Err(e) if s.fallback == Fallback::Never => return Err(e),
            Err(e) => e,
        };
        tracing::warn!(%requested, fallback = %s.fallback, error = %first, "the requested backend is not used");
        search.reject(requested, None, &first);
        let order: Vec<BackendType> = match s.fallback {
            Fallback::Cpu => vec![BackendType::Cpu],
            _ => s.policy.backends().iter().copied().filter(|b| *b != requested).collect(),
        };
        let named = s.fallback != Fallback::Cpu && s.policy.is_list();
        return match search.first_of(&order, false, named) {
            Some(found) => {
                let rule = match s.fallback {
                    Fallback::Cpu => format!("{requested} was requested; the CPU is the fallback"),
                    _ => format!("{requested} was requested; this is the next one in {}", s.order()),
                };
                Ok(search.done(found, rule, s))
            }
            None => Err(search.nothing()),
        };
    }
    let only = s.fallback != Fallback::Next;
    if let Some(found) = search.first_of(s.policy.backends(), only, s.policy.is_list()) {
        search.record_left_out(s.policy.backends());
        let rule = match (s.policy == Policy::default(), found.1.backend.row().priority) {
            (true, Some(p)) => format!("highest priority ({p}) of the backends that are present"),
            _ => format!("first of the backends that are present in {}", s.order()),
        };
        return Ok(search.done(found, rule, s));
    }
    if s.fallback == Fallback::Cpu && search.errors.iter().all(|(b, _)| *b != BackendType::Cpu) {
        search.candidates.retain(|c| c.backend != BackendType::Cpu);
        if let Some(found) = search.first_of(&[BackendType::Cpu], false, false) {
            return Ok(search.done(found, "the CPU is the fallback".into(), s));
        }
    }
    Err(search.nothing())
}

/// The effective settings of one request.
struct Settings {
    policy: Policy,
    policy_by: SetBy,
    fallback: Fallback,
    memory_pool: Option<MemoryPoolConfig>,
}

impl Settings {
    fn of(r: &Request) -> Result<Settings> {
        // An invalid instruction-set limit is an error whichever device is chosen, like an invalid
        // `HALCYON_BACKENDS`.
        #[cfg(feature = "cpu")]
        crate::cpu::isa::limit()?;
        let file = config::load()?;
        let variable = std::env::var(VARIABLE).ok().filter(|v| !v.trim().is_empty());
        let set = file.as_ref().and_then(|(path, c)| Some((path.clone(), c.backends.clone()?)));
        let (policy, policy_by) = match (&r.policy, variable, set) {
            (Some(p), _, _) => (p.clone(), SetBy::Caller),
            (None, Some(v), _) => {
                let p = v.parse().map_err(|e| Error::argument(VARIABLE, format!("{e}")))?;
                (p, SetBy::Environment(VARIABLE.into()))
            }
            (None, None, Some((path, p))) => (p, SetBy::File(path)),
            (None, None, None) => (Policy::default(), SetBy::Default),
        };
        let usual = match r.backend {
            BackendType::Auto => Fallback::Next,
            _ => Fallback::Never,
        };
        let file = file.map(|(_, c)| c).unwrap_or_default();
        let fallback = r.fallback.or(file.fallback).unwrap_or(usual);
        Ok(Settings { policy, policy_by, fallback, memory_pool: file.memory_pool })
    }

    /// For messages: `the order torchbridge (HALCYON_BACKENDS)`.
    fn order(&self) -> String {
        format!("the order {} ({})", self.policy, self.policy_by)
    }
}

type OpenedDevice = (Arc<dyn Device>, DeviceInfo);

struct Search<'a, 'b> {
    request: &'a Request,
    options: &'a Options,
    admit: AcceptCheck<'b>,
    candidates: Vec<Candidate>,
    /// Errors of devices that exist, and the error of a requested backend if it is not
    /// [`Error::Unavailable`].
    errors: Vec<(BackendType, Error)>,
}

/// Rejects a device with less than `need` bytes free.
fn check_memory(d: &Arc<dyn Device>, need: u64) -> Result<()> {
    if need == 0 {
        return Ok(());
    }
    match d.available() {
        Some(free) if free < need => Err(Error::OutOfMemory {
            device: d.info().id.clone(),
            what: format!("what the caller needs{}", d.unknown_free()),
            requested: need,
            free,
            total: d.memory().limit.or(d.info().total_memory).unwrap_or(free),
            next: "Choose a device with more memory, or raise the memory limit".into(),
        }),
        _ => Ok(()),
    }
}

impl Search<'_, '_> {
    fn note(&mut self, backend: BackendType, device: Option<&DeviceInfo>, rejected: Option<String>) {
        self.candidates.push(Candidate {
            backend,
            device: device.map(|d| d.id.clone()),
            name: device.map(|d| d.name.clone()),
            priority: backend.row().priority,
            brief: rejected.clone(),
            rejected,
            required: None,
            free: None,
            missing: None,
        });
    }

    fn reject(&mut self, backend: BackendType, device: Option<&DeviceInfo>, e: &Error) {
        self.note(backend, device, Some(e.to_string()));
        if let Some(c) = self.candidates.last_mut() {
            c.brief = Some(brief(e));
        }
        if let (Error::OutOfMemory { requested, free, .. }, Some(c)) = (e, self.candidates.last_mut()) {
            c.required = Some(*requested);
            c.free = Some(*free);
            c.missing = Some(requested.saturating_sub(*free));
        }
        if device.is_some() || !matches!(e, Error::Unavailable { .. }) {
            self.errors.push((backend, e.clone()));
        }
    }

    /// Opens a device and checks that it accepts the work.
    fn try_one(&mut self, driver: &dyn Driver, index: usize) -> Result<Arc<dyn Device>> {
        let d = driver.open(index, self.options)?;
        fork::opened(&d);
        check_memory(&d, self.request.memory)?;
        (self.admit)(&d)?;
        Ok(d)
    }

    /// Opens the device that the request names.
    fn open_named(&mut self) -> Result<OpenedDevice> {
        let backend = self.request.backend;
        let driver = registry::driver(backend)?;
        let infos = driver.list()?;
        let i = self.request.index.unwrap_or(0);
        let info = infos.get(i).cloned();
        let info = info.ok_or_else(|| crate::no_device(backend, i, infos.iter().cloned()))?;
        let d = self.try_one(&*driver, i)?;
        let info = DeviceInfo { free_memory: d.info().free_memory, ..info };
        Ok((d, info))
    }

    /// The first device in an order that accepts the work. Software devices come last overall or, if the
    /// order names each backend (`named`), last within their backend. With `only`, once an existing device is
    /// rejected, the search tries no later backend and none of the software devices that come last overall.
    fn first_of(&mut self, order: &[BackendType], only: bool, named: bool) -> Option<OpenedDevice> {
        let by_priority = Policy::default().backends() == order;
        let (mut chosen, mut software) = (None, vec![]);
        for &b in order {
            let priority = |b: BackendType| b.row().priority.unwrap_or(0);
            if let Some((_, d)) = &chosen {
                let d: &DeviceInfo = d;
                let why = match by_priority {
                    true => format!("priority {} is below {}'s {}", priority(b), d.id, priority(d.backend)),
                    false => format!("{} comes before it in the order", d.id),
                };
                self.note(b, None, Some(why));
                continue;
            }
            if only && !self.errors.is_empty() {
                let why = "an earlier backend of the order has a device, and the fallback is not \"next\"";
                self.note(b, None, Some(why.into()));
                continue;
            }
            let found = registry::driver(b).and_then(|d| d.list().map(|infos| (d, infos)));
            let (driver, infos) = match found {
                Ok(x) => x,
                Err(e) => {
                    self.note(b, None, Some(e.to_string()));
                    if let Some(c) = self.candidates.last_mut() {
                        c.brief = Some(brief(&e));
                    }
                    continue;
                }
            };
            if infos.is_empty() {
                self.note(b, None, Some("the driver lists no device".into()));
            }
            let (soft, hard): (Vec<_>, Vec<_>) = infos.into_iter().partition(|i| i.software);
            for info in hard.into_iter().chain(soft) {
                if chosen.is_some() {
                    self.note(b, Some(&info), Some("an earlier device of this backend was chosen".into()));
                } else if info.software && !named {
                    software.push((driver.clone(), info));
                } else {
                    chosen = self.consider(&*driver, info);
                }
            }
        }
        for (driver, info) in software {
            if chosen.is_some() || (only && !self.errors.is_empty()) {
                let why = format!("{} runs on the CPU; {TRIED_LAST}", info.name);
                self.note(info.backend, Some(&info), Some(why));
            } else {
                chosen = self.consider(&*driver, info);
            }
        }
        chosen
    }

    /// Tries an existing device and records the result.
    fn consider(&mut self, driver: &dyn Driver, info: DeviceInfo) -> Option<OpenedDevice> {
        match self.try_one(driver, info.index) {
            Ok(d) => {
                self.note(info.backend, Some(&info), None);
                // A driver's list may lack the free memory, so take it from the open device.
                let info = DeviceInfo { free_memory: d.info().free_memory, ..info };
                Some((d, info))
            }
            Err(e) => {
                self.reject(info.backend, Some(&info), &e);
                None
            }
        }
    }

    /// Records the backends that an order leaves out.
    fn record_left_out(&mut self, order: &[BackendType]) {
        for b in backend::all().into_iter().filter(|b| !order.contains(b)) {
            let why = match b.row().priority {
                Some(_) => "the order does not contain it",
                None => "it is used only when named",
            };
            self.note(b, None, Some(why.into()));
        }
    }

    fn done(self, (device, info): OpenedDevice, rule: String, s: Settings) -> (Arc<dyn Device>, Selection) {
        tracing::info!(device = info.id, name = info.name, rule, "device chosen");
        let selection = Selection {
            requested: self.request.backend,
            device: info,
            rule,
            policy: s.policy,
            policy_by: s.policy_by,
            fallback: s.fallback,
            candidates: self.candidates,
        };
        (device, selection)
    }

    /// The error if nothing was chosen.
    fn nothing(self) -> Error {
        let short: Vec<(&String, u64, u64, u64)> = self
            .errors
            .iter()
            .filter_map(|(_, e)| match e {
                Error::OutOfMemory { device, requested, free, total, .. } => {
                    Some((device, *requested, *free, *total))
                }
                _ => None,
            })
            .collect();
        match (&self.errors[..], &short[..]) {
            ([(_, one)], _) => one.clone(),
            // Report the figures of the device with the smallest shortfall; the message lists all devices.
            (_, [_, ..]) => {
                let least = short.iter().min_by_key(|(_, need, free, _)| need.saturating_sub(*free));
                let (_, requested, free, total) = least.copied().unwrap_or((short[0].0, 0, 0, 0));
                let each = short
                    .iter()
                    .map(|(d, need, free, _)| {
                        format!("{d} needs {need}, has {free}, lacks {}", need.saturating_sub(*free))
                    })
                    .collect::<Vec<_>>()
                    .join("; ");
                Error::OutOfMemory {
                    device: "every device".into(),
                    what: each,
                    requested,
                    free,
                    total,
                    next:
                        "Use smaller inputs, split the model over devices, or use a device with more memory"
                            .into(),
                }
            }
            ([(_, first), ..], []) => first.clone(),
            ([], _) => Error::Unavailable {
                backend: self.request.backend.id().into(),
                tried: self
                    .candidates
                    .iter()
                    .map(|c| format!("{}: {}", c.backend, c.rejected.as_deref().unwrap_or("")))
                    .collect(),
                reason: "no backend has a device".into(),
                fix: "Build with the feature \"cpu\", which needs nothing else".into(),
            },
        }
    }
}

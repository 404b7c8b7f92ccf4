//! Runs the whole check: reads the options, finds the devices, runs the sections in order and within their
//! time limits, and writes the report.

use crate::bench;
use crate::child;
use crate::data;
use crate::event::{Check, Event, Status};
use crate::report::{Machine, Report, SectionResult};
use crate::sections::{Context, SECTIONS, Section};
use halcyon::{BackendType, DeviceInfo};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The total minutes for which `Section::seconds` is chosen.
const NOMINAL_MINUTES: f64 = 9.0;
/// Minimum time left for starting a section.
const MIN_SECTION_TIME: Duration = Duration::from_secs(3);
/// Time reserved for the report.
const REPORT_TIME: Duration = Duration::from_secs(5);
/// Maximum number of parallel children. Each has its own device context and needs memory for it.
const PARALLEL: usize = 14;

#[derive(Debug)]
struct Options {
    backends: Vec<String>,
    minutes: f64,
    out: PathBuf,
    data: Option<PathBuf>,
    only: Vec<String>,
    torch: bool,
    tiny: bool,
}

fn parse(args: &[String]) -> Result<Option<Options>, String> {
    let mut o = Options {
        backends: vec![],
        minutes: NOMINAL_MINUTES,
        out: ".".into(),
        data: None,
        only: vec![],
        torch: true,
        tiny: false,
    };
    let mut args = args.iter();
    while let Some(a) = args.next() {
        let mut value = || args.next().cloned().ok_or_else(|| format!("{a} needs a value; see --help"));
        match a.as_str() {
            "--backend" => {
                let kind: BackendType = value()?.parse().map_err(|e: halcyon::Error| e.to_string())?;
                o.backends.push(kind.id().into());
            }
            "--minutes" => {
                let v = value()?;
                o.minutes = v
                    .parse()
                    .ok()
                    .filter(|m| (0.1..=600.0).contains(m))
                    .ok_or(format!("--minutes takes 0.1 to 600, not \"{v}\""))?;
            }
            "--out" => o.out = value()?.into(),
            "--data" => o.data = Some(value()?.into()),
            "--only" => {
                let v = value()?;
                if !SECTIONS.iter().any(|s| s.name == v) {
                    return Err(format!("no section \"{v}\"; --list shows them"));
                }
                o.only.push(v);
            }
            "--list" => {
                SECTIONS.iter().for_each(|s| println!("{:<16} {}", s.name, s.what));
                return Ok(None);
            }
            "--no-torch" => o.torch = false,
            "--rehearsal" => o.tiny = true,
            other => return Err(format!("no option {other}; --help lists them")),
        }
    }
    Ok(Some(o))
}

/// Temporary folder of this run, removed at the end.
struct TempFolder(PathBuf);

impl Drop for TempFolder {
    fn drop(&mut self) {
        // If the removal fails, the folder remains in the system's temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// # Errors
/// Errors that stop the check before it begins, and errors of writing the report.
pub(crate) fn main(args: &[String]) -> Result<u8, String> {
    let Some(o) = parse(args)? else { return Ok(0) };
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(o.minutes * 60.0) - REPORT_TIME;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let exe = std::env::current_exe().map_err(|e| format!("this executable: {e}"))?;
    std::fs::create_dir_all(&o.out).map_err(|e| format!("{}: {e}", o.out.display()))?;
    let work = TempFolder(std::env::temp_dir().join(format!("halcyon-check-{}", std::process::id())));
    let data = work.0.join("data");
    std::fs::create_dir_all(&data).map_err(|e| format!("{}: {e}", data.display()))?;
    let mut notes = vec![];
    let file = o.data.clone().unwrap_or_else(|| exe.with_file_name("halcyon-check.dat"));
    match data::unpack(&file, &data) {
        Ok(n) => notes.push(format!("{n} data files")),
        Err(why) if o.data.is_some() => return Err(why),
        Err(why) => notes.push(format!("no data: {why}")),
    }
    let prefix = python_prefix(&mut notes);
    if o.torch && !o.tiny {
        warm_torch();
    }
    if let Ok(text) = std::fs::read_to_string("/proc/driver/nvidia/version") {
        notes.extend(text.lines().next().map(String::from));
    }
    let child = |command: &mut Command| own_environment(command, &work.0, prefix.as_deref());

    let devices = devices(&exe, &child, start + Duration::from_secs(60));
    let backends =
        if o.backends.is_empty() { accelerators(&devices, &mut notes)? } else { o.backends.clone() };
    // Unless backends are named, the backends of the card's vendor come first, with all the time they need.
    // Other backends for the same card get the remaining time.
    let first = backends.iter().filter(|b| native(b)).count();
    let turns =
        if o.backends.is_empty() && first > 0 { backends.split_at(first) } else { (&backends[..], &[][..]) };
    let mut report = Report::new(Machine::new(now.as_secs()), o.tiny, o.minutes, notes);
    report.devices = devices.into_iter().filter(|d| backends.iter().any(|b| b == d.backend.id())).collect();

    let wanted = |s: &&Section| o.only.is_empty() || o.only.iter().any(|n| n == s.name);
    let todo: Vec<(&str, &Section)> =
        [turns.0, turns.1].iter().flat_map(|b| order(b, SECTIONS.iter().filter(wanted))).collect();
    let ends = todo.iter().position(|(b, _)| turns.1.iter().any(|o| o == b)).unwrap_or(todo.len());
    for i in 0..todo.len() {
        let (backend, section) = todo[i];
        let left = end.saturating_duration_since(Instant::now());
        let turn = if i < ends { &todo[i..ends] } else { &todo[i..] };
        let rest: u64 = turn.iter().map(|(_, s)| s.seconds).sum();
        let time = allowed(section.seconds, rest, left, o.minutes);
        let context = Context {
            backend: backend.into(),
            data: data.clone(),
            tiny: o.tiny,
            torch: o.torch,
            exe: exe.clone(),
            seed: now.as_nanos() as u64 % 1_000_000_007,
        };
        eprint!("{backend} {}: ", section.name);
        let ran = run(section, &context, time, &child);
        eprintln!("{}", ran.line(o.tiny));
        report.sections.push(ran);
        report.seconds = start.elapsed().as_secs_f64();
        // The report is written after every section, so that it exists even if the run is ended early.
        report.write(&o.out)?;
    }
    let paths = report.write(&o.out)?;
    print!("{}", report.summary());
    for p in paths {
        println!("{}", p.display());
    }
    Ok(report.code())
}

/// All checking sections on every backend, then all measuring sections.
fn order(
    backends: &[String],
    sections: impl Iterator<Item = &'static Section> + Clone,
) -> Vec<(&str, &'static Section)> {
    let of = |measures: bool| {
        let these = sections.clone().filter(move |s| s.measures == measures);
        backends.iter().flat_map(move |b| these.clone().map(|s| (b.as_str(), s)))
    };
    of(false).chain(of(true)).collect()
}

/// A section's time limit: its own (longer if the check may take more than nine minutes), but not much more
/// than its share of the remaining time.
fn allowed(seconds: u64, rest: u64, left: Duration, minutes: f64) -> Duration {
    let own = seconds as f64 * (minutes / NOMINAL_MINUTES).max(1.0);
    let share = left.as_secs_f64() * seconds as f64 / rest.max(1) as f64;
    // A section may take 1.5 times its share, because later sections may finish early.
    Duration::from_secs_f64(own.min(1.5 * share)).min(left)
}

fn run(section: &Section, c: &Context, time: Duration, child: &dyn Fn(&mut Command)) -> SectionResult {
    let mut ran = SectionResult::new(&c.backend, section);
    let start = Instant::now();
    if time < MIN_SECTION_TIME {
        ran.skipped = Some("no time was left for it; --minutes gives more".into());
        return ran;
    }
    let jobs = match (section.jobs)(c) {
        Ok(jobs) => jobs,
        Err(why) => {
            ran.skipped = Some(why);
            return ran;
        }
    };
    let commands = jobs.iter().map(|j| {
        let mut command = j.command(c);
        child(&mut command);
        command
    });
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let parallel = if section.parallel { cores.clamp(1, PARALLEL) } else { 1 };
    let ended = child::run_all(commands.collect(), parallel, start + time);
    for (job, ended) in jobs.iter().zip(&ended) {
        for e in job.events(ended, section.measures) {
            ran.take(e);
        }
    }
    ran.seconds = start.elapsed().as_secs_f64();
    ran
}

/// The folder of the Python installation, or `None` if `VIRTUAL_ENV` is already set or Python does not run.
/// This folder often has the vendors' libraries, which are installed with PyTorch. If the virtual environment
/// was not activated, no variable names the folder.
fn python_prefix(notes: &mut Vec<String>) -> Option<String> {
    let python = bench::python();
    let mut command = Command::new(&python);
    command.arg("-c").arg(format!("{}print(sys.prefix)", bench::EXIT_WITH_PARENT));
    let ended = child::run(&mut command, Instant::now() + Duration::from_secs(20));
    let prefix = ended.out.trim().to_string();
    if ended.code != Some(0) || prefix.is_empty() {
        notes.push(format!("no Python: {python} did not print its location"));
        return None;
    }
    let set = std::env::var("VIRTUAL_ENV").ok().filter(|v| !v.is_empty());
    notes.push(match &set {
        Some(v) => format!("Python is {python}, installed in {prefix}; VIRTUAL_ENV is {v}"),
        None => format!(
            "Python is {python}, installed in {prefix}; the checks run with this folder as VIRTUAL_ENV"
        ),
    });
    set.is_none().then_some(prefix)
}

/// Reads PyTorch's files while the checks run, so that the first measurement does not wait for a cold disk.
fn warm_torch() {
    std::thread::spawn(|| {
        let mut command = Command::new(bench::python());
        // The measurements report a missing PyTorch.
        let script = format!("{}import torch", bench::EXIT_WITH_PARENT);
        child::run(command.arg("-c").arg(script), Instant::now() + Duration::from_secs(180));
    });
}

/// Makes the command use the cache folder of this run, ignore the user's configuration file, and not see the
/// variables below. `prefix` is the folder of Python, if no variable names it.
fn own_environment(command: &mut Command, work: &Path, prefix: Option<&str>) {
    let cache = work.join("cache");
    command.env("XDG_CACHE_HOME", &cache).env("LOCALAPPDATA", &cache).env("HALCYON_CONFIG", "off");
    command.envs(prefix.map(|p| ("VIRTUAL_ENV", p)));
    for name in ["HALCYON_CACHE", "HALCYON_BACKENDS", "HALCYON_PRECISION", "HALCYON_LOG"] {
        command.env_remove(name);
    }
}

/// The devices that all drivers find. A child looks for them, because a driver may crash.
fn devices(exe: &Path, child: &dyn Fn(&mut Command), until: Instant) -> Vec<DeviceInfo> {
    let mut command = Command::new(exe);
    child(command.args(["__section", "devices"]));
    let ended = child::run(&mut command, until);
    let note = |l: &str| match serde_json::from_str(l) {
        Ok(Event::Note { text }) => serde_json::from_str(&text).ok(),
        _ => None,
    };
    ended.out.lines().filter_map(note).collect()
}

/// Whether this is a backend for the cards of a vendor that has kernel libraries (cuda and rocm).
fn native(backend: &str) -> bool {
    let row = backend.parse::<BackendType>().ok().and_then(BackendType::built_in);
    row.is_some_and(|row| !row.libraries.is_empty())
}

/// The backends that have a device other than the CPU and software devices; [`native`] ones come first.
fn accelerators(devices: &[DeviceInfo], notes: &mut Vec<String>) -> Result<Vec<String>, String> {
    let mut found: Vec<String> = vec![];
    for d in
        devices.iter().filter(|d| !d.software && !matches!(d.backend, BackendType::Cpu | BackendType::Noop))
    {
        let id = d.backend.id().to_string();
        if !found.contains(&id) {
            found.push(id);
        }
    }
    if found.iter().any(|b| native(b)) {
        // OpenCL is left out, because it lists the same card again.
        let (before, again) = (found.len(), BackendType::OpenCl.id());
        found.retain(|b| b != again);
        if found.len() < before {
            notes.push(format!("{again} on the same card was left out; --backend {again} checks it"));
        }
    }
    found.sort_by_key(|b| !native(b));
    match found.is_empty() {
        false => Ok(found),
        true => Err("no accelerator was found; `halcyon-check devices` says why, and --backend names one (cpu, opencl, webgpu)".into()),
    }
}

impl SectionResult {
    /// Records an event of a section.
    pub(crate) fn take(&mut self, e: Event) {
        match e {
            Event::Begin { .. } => {}
            Event::Figure(f) => self.figures.push(f),
            Event::Note { text } => self.notes.push(text),
            Event::Check(c) => self.check(c),
        }
    }

    fn check(&mut self, c: Check) {
        match c.status {
            Status::Passed => self.passed += 1,
            Status::Wrong => self.wrong += 1,
            Status::Unsupported => self.unsupported += 1,
            Status::Error => self.errors += 1,
            Status::NotRun => self.not_run += 1,
        }
        if c.status != Status::Passed || c.note.contains("warning: ") {
            self.failures.push(c);
        } else if !c.note.is_empty() {
            self.remarks.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_share_what_is_left() {
        let s = Duration::from_secs;
        assert_eq!(allowed(60, 600, s(900), 9.0), s(60));
        assert_eq!(allowed(60, 600, s(200), 9.0), s(30));
        assert_eq!(allowed(60, 60, s(20), 9.0), s(20));
        assert_eq!(allowed(60, 600, s(1800), 30.0), s(200));
        assert_eq!(allowed(60, 600, s(0), 9.0), s(0));
    }

    #[test]
    fn checks_come_before_measurements_on_each_backend() {
        let backends = ["a".to_string(), "b".to_string()];
        let all = order(&backends, SECTIONS.iter());
        assert_eq!(all.len(), 2 * SECTIONS.len());
        let first = all.iter().position(|(_, s)| s.measures).unwrap();
        assert!(all[first..].iter().all(|(_, s)| s.measures));
        assert_eq!((all[0].0, all[first].0, all[all.len() - 1].1.name), ("a", "a", "bench-models"));
    }

    #[test]
    fn options_are_checked() {
        let of = |t: &str| parse(&t.split_whitespace().map(String::from).collect::<Vec<_>>());
        let o = of("--backend CUDA --minutes 3 --only hal --no-torch --rehearsal").unwrap().unwrap();
        assert_eq!(
            (o.backends, o.minutes, o.only, o.torch, o.tiny),
            (vec!["cuda".into()], 3.0, vec!["hal".into()], false, true)
        );
        for (bad, why) in [
            ("--backend abacus", "not a backend"),
            ("--minutes 0", "minutes"),
            ("--only x", "no section"),
            ("--wat", "no option"),
            ("--out", "needs a value"),
        ] {
            assert!(of(bad).unwrap_err().contains(why), "{bad}");
        }
    }

    #[test]
    fn software_devices_are_not_accelerators() {
        let d = |backend: BackendType, software: bool| DeviceInfo {
            backend,
            id: format!("{backend}:0"),
            index: 0,
            name: "x".into(),
            vendor: "x".into(),
            driver_version: None,
            total_memory: None,
            free_memory: None,
            compute_capability: None,
            compute_units: None,
            unified_memory: false,
            software,
            properties: Default::default(),
        };
        use BackendType::*;
        let of = |all: &[DeviceInfo]| accelerators(all, &mut vec![]);
        let all = [
            d(Cpu, false),
            d(OpenCl, false),
            d(WebGpu, false),
            d(Cuda, false),
            d(Cuda, false),
            d(Noop, true),
        ];
        assert_eq!(of(&all).unwrap(), ["cuda", "webgpu"]);
        assert_eq!(of(&[d(OpenCl, false), d(WebGpu, true)]).unwrap(), ["opencl"]);
        assert!(of(&[d(Cpu, false), d(WebGpu, true), d(Noop, true)]).unwrap_err().contains("no accelerator"));
    }
}

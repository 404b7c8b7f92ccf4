//! The table of sections: what each runs and how long it may take. A new section is a new row.

use crate::child::ChildResult;
use crate::event::{Check, Event, Status};
use halcyon::BackendType;
use halcyon::DType;
use halcyon::ir::composite::CompositeKind;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The settings with which sections are run.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    /// Id of the backend.
    pub backend: String,
    /// The folder of unpacked data.
    pub data: PathBuf,
    /// Whether to use tiny sizes and only a sample of the cases.
    pub tiny: bool,
    pub torch: bool,
    pub exe: PathBuf,
    /// Seed of the operands of the op table, and of the choice of cases in a tiny run.
    pub seed: u64,
}

/// The format of a child's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputFormat {
    /// Lines of events.
    Events,
    /// `doctor --json`.
    Doctor,
    /// `conformance … --json-lines`.
    Cases,
}

/// One child process.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub label: String,
    pub args: Vec<String>,
    pub form: OutputFormat,
    /// Text that is appended to the names of the job's checks.
    pub suffix: String,
    /// Environment variables that name vendor libraries. They are set to `NO_LIBRARY`, which switches the
    /// libraries off.
    pub without: &'static [&'static str],
}

/// A section of the check.
#[derive(Debug)]
pub(crate) struct Section {
    pub name: &'static str,
    pub what: &'static str,
    /// Maximum number of seconds, if the whole check may take at most nine minutes.
    pub seconds: u64,
    /// The section's children, or the reason why there is nothing to run.
    pub jobs: fn(&Context) -> Result<Vec<Job>, String>,
    /// Whether children run in parallel. Not set if times are measured.
    pub parallel: bool,
    /// Whether the section measures. Measuring sections run after the checking ones.
    pub measures: bool,
    /// Minimum share of cases that must pass, if some may be unsupported.
    pub least: f64,
    /// Whether the Markdown shows the notes of passed checks.
    pub shown: bool,
}

type MakeJobs = fn(&Context) -> Result<Vec<Job>, String>;

impl Section {
    const fn new(name: &'static str, what: &'static str, seconds: u64, jobs: MakeJobs) -> Section {
        Section { name, what, seconds, jobs, parallel: false, measures: false, least: 0.0, shown: false }
    }

    const fn parallel(self) -> Section {
        Section { parallel: true, ..self }
    }

    const fn measures(self) -> Section {
        Section { measures: true, ..self }
    }

    const fn least(self, least: f64) -> Section {
        Section { least, ..self }
    }

    const fn shown(self) -> Section {
        Section { shown: true, ..self }
    }
}

/// The sections in the order in which they run. `bench-models` comes last, because PyTorch takes long to
/// compile the models.
pub(crate) const SECTIONS: &[Section] = &[
    Section::new("doctor", "each step from loading the library to a matrix product", 45, doctor).shown(),
    Section::new("hal", "the conformance suite", 60, |c| Ok(vec![own_section(c, "hal")])),
    Section::new("ops", "the op table", 110, ops).parallel(),
    Section::new(
        "products",
        "products, convolutions and attention at O2, with library kernels and generated ones",
        60,
        products,
    )
    .parallel(),
    Section::new("end-to-end", "decoding a Llama model with states, training a network", 45, end_to_end)
        .shown(),
    Section::new("mnist", "a model on ten digits", 20, mnist),
    Section::new("models", "MiniLM, ResNet-50, the light models", 90, models).parallel(),
    Section::new("suite", "the ONNX backend test suite", 110, suite).parallel().least(0.9),
    Section::new("bench-gemm", "products of matrices", 75, |c| Ok(with_and_without(c, "bench-gemm")))
        .measures()
        .shown(),
    Section::new("bench-attention", "attention for prompts and for one token", 60, |c| {
        Ok(with_and_without(c, "bench-attention"))
    })
    .measures(),
    Section::new("bench-capture", "launches of a captured graph", 20, |c| {
        Ok(vec![own_section(c, "bench-capture")])
    })
    .measures()
    .shown(),
    Section::new(
        "bench-memory",
        "bandwidth: element-wise ops, norms, GEMV, attention of one token",
        50,
        |c| Ok(vec![own_section(c, "bench-memory")]),
    )
    .measures(),
    Section::new("bench-copies", "copies between page-locked memory and the device", 25, |c| {
        Ok(vec![own_section(c, "bench-copies")])
    })
    .measures(),
    Section::new("bench-models", "ResNet-50 and MiniLM", 120, bench_models).measures(),
];

/// A vendor library is switched off if its environment variable has this value. The variable names the
/// library's file, and no file is called `off`.
const NO_LIBRARY: &str = "off";
/// Text that is appended to the names of runs without vendor libraries.
const WITHOUT: &str = ", libraries off";

/// A child that does not measure and passes its deadline counts as hung if it had no output for this long.
/// Otherwise it only ran out of time.
const HANG_TIME: Duration = Duration::from_secs(45);

fn job(label: &str, form: OutputFormat, args: &[&str]) -> Job {
    Job {
        label: label.into(),
        args: args.iter().map(|a| a.to_string()).collect(),
        form,
        suffix: String::new(),
        without: &[],
    }
}

/// A section that this program runs itself.
fn own_section(c: &Context, name: &str) -> Job {
    let data = c.data.display().to_string();
    let mut args = vec!["__section", name, c.backend.as_str(), data.as_str()];
    args.extend(c.tiny.then_some("--tiny"));
    args.extend(c.torch.then_some("--torch"));
    job(name, OutputFormat::Events, &args)
}

/// The environment variables that name the backend's kernel libraries.
fn libraries(c: &Context) -> &'static [&'static str] {
    let kind = c.backend.parse::<BackendType>().ok();
    kind.and_then(BackendType::built_in).map_or(&[], |row| row.libraries)
}

impl Job {
    /// The same job with the vendors' libraries switched off, so that generated kernels run. `None` if the
    /// backend has no libraries.
    fn without(&self, c: &Context) -> Option<Job> {
        let without = libraries(c);
        (!without.is_empty()).then(|| Job {
            label: format!("{}{WITHOUT}", self.label),
            suffix: format!("{}{WITHOUT}", self.suffix),
            without,
            ..self.clone()
        })
    }
}

fn with_and_without(c: &Context, name: &str) -> Vec<Job> {
    let with = own_section(c, name);
    let without = with.without(c).map(|mut j| {
        // Measuring PyTorch again would give the same figures.
        j.args.retain(|a| a != "--torch");
        j.args.push("--generated".into());
        j
    });
    std::iter::once(with).chain(without).collect()
}

fn doctor(c: &Context) -> Result<Vec<Job>, String> {
    Ok(vec![job("doctor", OutputFormat::Doctor, &["doctor", "--backend", &c.backend, "--json"])])
}

/// The ops for tiny runs: element-wise ops, and one op of each of some other kinds.
fn few() -> [&'static str; 7] {
    ["add", "exp", "matmul", CompositeKind::Softmax.row().name, "reduce_sum", "gather", "conv"]
}

/// The op table with these dtypes.
fn table(c: &Context, types: &[&str], more: &[&str]) -> Job {
    let label = types.join(",");
    let seed = c.seed.to_string();
    let base = ["conformance", "ops", "--backend", &c.backend, "--no-speed", "--json-lines", "--seed", &seed];
    job(&label, OutputFormat::Cases, &[&base[..], &["--dtype", &label], more].concat())
}

/// One child per native dtype, and one for all small types. The dtypes with the most work come first. (A tiny
/// run has only f32 and i32.)
fn ops(c: &Context) -> Result<Vec<Job>, String> {
    if c.tiny {
        let mut more = vec!["--cases", "1"];
        more.extend(few().into_iter().flat_map(|op| ["--op", op]));
        return Ok(["f32", "i32"].map(|d| table(c, &[d], &more)).into());
    }
    let long = [DType::F32, DType::F16, DType::BF16, DType::F64];
    let native = DType::all().filter(|d| d.is_native() && !long.contains(d));
    let mut jobs: Vec<Job> = long.into_iter().chain(native).map(|d| table(c, &[d.name()], &[])).collect();
    let small: Vec<&str> = DType::all().filter(|d| !d.is_native()).map(DType::name).collect();
    jobs.push(table(c, &small, &[]));
    Ok(jobs)
}

/// The ops for which vendors may have library kernels. They run once with the libraries; if the backend has
/// any, they run again without them, which tests the generated kernels on matrix units.
fn products(c: &Context) -> Result<Vec<Job>, String> {
    let (types, cases): (&[&str], &str) =
        if c.tiny { (&["f16"], "21") } else { (&["f32", "f16", "bf16", "f64", "i8"], "64") };
    let mut more = vec!["--level", "O2", "--cases", cases, "--op", "matmul"];
    if !c.tiny {
        more.extend(["--op", "conv", "--op", CompositeKind::Attention.row().name]);
    }
    let with = types.iter().map(|d| Job { suffix: " at O2".into(), ..table(c, &[d], &more) });
    Ok(with.flat_map(|j| [Some(j.clone()), j.without(c)]).flatten().collect())
}

/// The folder `name` of the data, or an error that names it.
fn data_folder(c: &Context, name: &str) -> Result<PathBuf, String> {
    let dir = c.data.join(name);
    if dir.exists() { Ok(dir) } else { Err(format!("the data folder has no {name}")) }
}

fn end_to_end(c: &Context) -> Result<Vec<Job>, String> {
    data_folder(c, "stories260k")?;
    data_folder(c, "mlp").map(|_| vec![own_section(c, "end-to-end")])
}

fn mnist(c: &Context) -> Result<Vec<Job>, String> {
    data_folder(c, "mnist").map(|_| vec![own_section(c, "mnist")])
}

fn bench_models(c: &Context) -> Result<Vec<Job>, String> {
    let least = if c.tiny && c.backend != "cpu" { "mnist" } else { "seeded" };
    data_folder(c, least).map(|_| vec![own_section(c, "bench-models")])
}

fn folders(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    all.sort();
    Ok(all)
}

fn cases(c: &Context, dir: &Path, more: &[&str]) -> Job {
    let label = dir.strip_prefix(&c.data).unwrap_or(dir).display().to_string();
    let path = dir.display().to_string();
    let args = ["conformance", "onnx", path.as_str(), "--backend", &c.backend, "--json-lines"];
    job(&label, OutputFormat::Cases, &[&args[..], more].concat())
}

fn models(c: &Context) -> Result<Vec<Job>, String> {
    let mut all = folders(&data_folder(c, "light")?)?;
    all.extend(folders(&c.data.join("seeded")).unwrap_or_default());
    all.extend(folders(&c.data.join("shapes")).unwrap_or_default());
    // The large models take too long on a stand-in.
    let small = |p: &PathBuf| ["light_squeezenet", "minilm"].iter().any(|n| p.ends_with(n));
    all.retain(|p| !c.tiny || small(p));
    Ok(all.iter().map(|p| cases(c, p, &[])).collect())
}

fn suite(c: &Context) -> Result<Vec<Job>, String> {
    let mut parts = folders(&data_folder(c, "suite")?)?;
    if parts.is_empty() {
        return Err("the data folder's suite is empty".into());
    }
    if c.tiny {
        let one = parts.swap_remove(c.seed as usize % parts.len());
        return Ok(vec![cases(c, &one, &["--limit", "30"])]);
    }
    Ok(parts.iter().map(|p| cases(c, p, &[])).collect())
}

impl Job {
    pub(crate) fn command(&self, c: &Context) -> Command {
        let mut command = Command::new(&c.exe);
        command.args(&self.args).envs(self.without.iter().map(|v| (v, NO_LIBRARY)));
        command
    }

    /// The events of a child, plus an error if it ended badly or reported nothing. Running out of time is not
    /// an error, with one exception: a child that does not measure and had no recent output is reported as
    /// hung.
    pub(crate) fn events(&self, ended: &ChildResult, measures: bool) -> Vec<Event> {
        let mut out = match self.form {
            OutputFormat::Events => lines(&ended.out),
            OutputFormat::Cases => {
                ended.out.lines().filter_map(|l| self.case(&serde_json::from_str(l).ok()?)).collect()
            }
            OutputFormat::Doctor => serde_json::from_str(&ended.out).map(|v| doctors(&v)).unwrap_or_default(),
        };
        for e in &mut out {
            match e {
                Event::Check(c) => c.name += &self.suffix,
                Event::Figure(f) => f.name += &self.suffix,
                Event::Begin { .. } | Event::Note { .. } => {}
            }
        }
        // The check that the child began last, if it has no result.
        let at = match out.iter().rev().find(|e| !matches!(e, Event::Note { .. })) {
            Some(Event::Begin { what }) => format!(" at \"{what}\""),
            _ => String::new(),
        };
        let done = out.iter().filter(|e| matches!(e, Event::Check(_) | Event::Figure(_))).count();
        let (status, note) = match (&ended.broken, ended.late, ended.code) {
            (_, Some(None), _) => (Status::NotRun, "no time was left for it".into()),
            (_, Some(Some(silent)), _) if !measures && silent > HANG_TIME => {
                (Status::Error, format!("it hangs{at}: no output for {:.0} s", silent.as_secs_f64()))
            }
            (_, Some(Some(_)), _) => (Status::NotRun, format!("out of time{at}; what follows was not run")),
            (Some(how), ..) => (Status::Error, format!("the process {how}{at}{}", self.why(ended))),
            // The exit code adds nothing to the reported events.
            (.., Some(0)) if done > 0 => return out,
            (.., Some(_)) if self.form != OutputFormat::Events && done > 0 && at.is_empty() => return out,
            (.., Some(0)) => (Status::Error, "it ended with exit code 0 and reported nothing".into()),
            (.., Some(n)) => {
                (Status::Error, format!("the process ended with exit code {n}{at}{}", self.why(ended)))
            }
            (.., None) => (Status::Error, format!("the process ended in an unknown way{at}")),
        };
        out.push(check(self.label.clone(), status, note));
        out
    }

    /// Why the child ended. With `--json` the command reports the reason in its output.
    fn why(&self, ended: &ChildResult) -> String {
        let said = serde_json::from_str::<Value>(&ended.out).ok();
        let said = said.and_then(|v| v["error"]["message"].as_str().map(String::from));
        let why = said.unwrap_or_else(|| ended.err.clone());
        if why.is_empty() { why } else { format!(": {why}") }
    }

    /// Parses a line of `conformance … --json-lines`.
    fn case(&self, v: &Value) -> Option<Event> {
        if let Some(what) = v["begin"].as_str() {
            return Some(Event::Begin { what: what.into() });
        }
        let status = |c: &Value| match c["status"].as_str() {
            Some("passed") => Status::Passed,
            Some("unsupported") => Status::Unsupported,
            Some("wrong" | "failed") => Status::Wrong,
            Some("not_run") => Status::NotRun,
            _ => Status::Error,
        };
        if let Some(c) = v.get("case") {
            // If the folder itself is a case, the case has the folder's name.
            let name = text(&c["name"]);
            let whole = self.label.ends_with(&name);
            let name = if whole { self.label.clone() } else { format!("{}/{name}", self.label) };
            return Some(check(name, status(c), text(&c["reason"])));
        }
        let c = v.get("cell")?;
        let name = format!("{} {}", text(&c["op"]), text(&c["dtype"]));
        let calls = c["library_calls"].as_u64().unwrap_or(0);
        Some(match status(c) {
            Status::Passed if calls > 0 && !self.without.is_empty() => {
                let note = format!("{calls} runs of library kernels, although they are switched off");
                check(name, Status::Wrong, note)
            }
            Status::Passed => {
                let used = c["errors"]["of_tolerance"].as_f64().unwrap_or(f64::NAN);
                let note = format!("{} cases, {calls} by libraries, {used:.2} of the tolerance", c["cases"]);
                check(name, Status::Passed, note)
            }
            s => check(name, s, text(&c["reason"])),
        })
    }
}

fn check(name: String, status: Status, note: String) -> Event {
    Event::Check(Check { name, status, note })
}

fn text(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_string()
}

/// Parses the output of `doctor --json`.
fn doctors(v: &Value) -> Vec<Event> {
    let array = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let sections = array(&v["sections"]);
    let all = sections.iter().flat_map(|s| array(&s["lines"]).into_iter().map(|l| (text(&s["id"]), l)));
    all.map(|(id, l)| {
        let (warn, status) = match l["status"].as_str() {
            Some("pass") => ("", Status::Passed),
            Some("warn") => ("warning: ", Status::Passed),
            Some("absent") => ("", Status::Unsupported),
            _ => ("", Status::Error),
        };
        let name = format!("{} {}", l["device"].as_str().unwrap_or(&id), text(&l["check"]));
        let fix = l["fix"].as_str().map_or(String::new(), |f| format!(". {f}"));
        check(name, status, format!("{warn}{}{fix}", text(&l["text"])))
    })
    .collect()
}

/// Parses the events of an output. Lines that are not events, such as a truncated one, are ignored.
fn lines(out: &str) -> Vec<Event> {
    out.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ended(out: String, code: i32) -> ChildResult {
        ChildResult { out, code: Some(code), ..ChildResult::default() }
    }

    fn statuses(events: &[Event]) -> Vec<Status> {
        events.iter().filter_map(|e| if let Event::Check(c) = e { Some(c.status) } else { None }).collect()
    }

    fn last(events: &[Event]) -> &Check {
        match events.last() {
            Some(Event::Check(c)) => c,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_child_that_dies_is_an_error_at_its_place() {
        let told = [
            r#"{"event":"begin","what":"first"}"#,
            r#"{"event":"check","name":"first","status":"passed","note":""}"#,
            r#"{"event":"begin","what":"second"}"#,
            r#"{"event":"note","text":"x"}"#,
            r#"{"event":"che"#,
        ];
        let j = job("hal", OutputFormat::Events, &[]);
        let mut e = ended(told.join("\n"), 0);
        (e.code, e.broken, e.err) = (None, Some("was ended by signal: 11".into()), "boom".into());
        let got = j.events(&e, false);
        assert_eq!(statuses(&got), [Status::Passed, Status::Error]);
        assert!(last(&got).note.contains("signal: 11 at \"second\": boom"));
        // No events mean that nothing was tested.
        assert_eq!(statuses(&j.events(&ended(String::new(), 0), false)), [Status::Error]);
        let o = job("suite/1", OutputFormat::Cases, &[]);
        assert_eq!(statuses(&o.events(&ended("no JSON".into(), 4), false)), [Status::Error]);
        // Running out of time is not an error. Hanging is an error, except in sections that measure, in which
        // a compiler may be silent for long.
        e.broken = None;
        for (silent, measures, status, note) in [
            (Some(1), false, Status::NotRun, "out of time at \"second\""),
            (Some(60), false, Status::Error, "hangs at \"second\""),
            (Some(60), true, Status::NotRun, "out of time at \"second\""),
            (None, false, Status::NotRun, "no time was left"),
        ] {
            e.late = Some(silent.map(Duration::from_secs));
            let got = j.events(&e, measures);
            assert_eq!(statuses(&got), [Status::Passed, status]);
            assert!(last(&got).note.contains(note), "{got:?}");
        }
    }

    #[test]
    fn the_commands_forms_are_understood() {
        let all = [
            ("a", "passed", ""),
            ("b", "wrong", "by 2"),
            ("c", "unsupported", "x"),
            ("d", "error", "y"),
            ("e", "not_run", "z"),
        ];
        let case = |(n, s, r): &(&str, &str, &str)| {
            format!(
                "{}\n{}\n",
                json!({ "begin": n }),
                json!({ "case": { "name": n, "status": s, "reason": r } })
            )
        };
        let told: String = all.iter().map(case).collect();
        let j = job("light", OutputFormat::Cases, &[]);
        let got = j.events(&ended(told.clone() + "{\"end\": {}}\n", 1), false);
        use Status::*;
        assert_eq!(statuses(&got), [Passed, Wrong, Unsupported, Error, NotRun]);
        assert!(got.iter().any(|e| matches!(e, Event::Check(c) if c.name == "light/b" && c.note == "by 2")));
        // Results from before a crash count, and the first case that did not complete is named.
        let mut e = ended(told + "{\"begin\":\"f\"}\n{\"case\":{\"na", 0);
        (e.code, e.broken) = (None, Some("was ended by signal: 6".into()));
        let got = j.events(&e, false);
        assert_eq!(statuses(&got), [Passed, Wrong, Unsupported, Error, NotRun, Error]);
        assert!(last(&got).note.contains("signal: 6 at \"f\""));

        let cell = |status: &str, calls: u64| {
            let errors = json!({ "of_tolerance": 0.25 });
            let c = json!({ "op": "add", "dtype": "f32", "status": status, "reason": "no", "cases": 3, "library_calls": calls, "errors": errors });
            json!({ "cell": c }).to_string()
        };
        let told = format!("{}\n{}", cell("passed", 2), cell("failed", 0));
        let with = Job { suffix: " at O2".into(), ..job("x", OutputFormat::Cases, &[]) };
        let got = with.events(&ended(told.clone(), 1), false);
        assert_eq!(statuses(&got), [Passed, Wrong]);
        assert!(
            matches!(&got[0], Event::Check(c) if c.name == "add f32 at O2" && c.note.contains("2 by libraries, 0.25 of"))
        );
        // A library that runs although it is switched off.
        let without = Job { without: &["X"], ..with };
        assert_eq!(statuses(&without.events(&ended(told, 1), false)), [Wrong, Wrong]);
        let v = json!({ "sections": [{ "id": "cuda", "lines": [
            { "check": "library", "device": null, "status": "warn", "text": "old", "fix": "Update" },
            { "check": "kernel", "device": "cuda:0", "status": "fail", "text": "bad" },
        ]}]});
        let got = job("x", OutputFormat::Doctor, &[]).events(&ended(v.to_string(), 2), false);
        assert_eq!(statuses(&got), [Passed, Error]);
        assert!(matches!(&got[0], Event::Check(c) if c.note == "warning: old. Update"));
        assert!(matches!(&got[1], Event::Check(c) if c.name == "cuda:0 kernel"));
    }

    #[test]
    fn libraries_are_switched_off_in_separate_jobs() {
        let c = |backend: &str, tiny| Context {
            backend: backend.into(),
            data: "x".into(),
            tiny,
            torch: true,
            exe: "x".into(),
            seed: 1,
        };
        let off = |j: &Job| {
            let c = j.command(&c("cuda", false));
            c.get_envs().filter(|(_, v)| v.is_some_and(|v| v == NO_LIBRARY)).count()
        };
        let jobs = products(&c("cuda", false)).unwrap();
        assert_eq!((jobs.len(), jobs.iter().filter(|j| off(j) == 2).count()), (10, 5));
        assert_eq!(products(&c("webgpu", false)).unwrap().len(), 5);
        let jobs = with_and_without(&c("rocm", false), "bench-gemm");
        assert!(
            matches!(&jobs[..], [a, b] if off(a) == 0 && off(b) == 2 && !b.args.contains(&"--torch".into()))
        );
        let names: Vec<String> = ops(&c("cuda", false)).unwrap().into_iter().map(|j| j.label).collect();
        let native = DType::all().filter(|d| d.is_native()).count();
        assert!(names.len() == native + 1 && names[0] == "f32", "{names:?}");
    }

    #[test]
    fn section_names_are_unique() {
        let mut names: Vec<&str> = SECTIONS.iter().map(|s| s.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), SECTIONS.len());
        assert!(
            SECTIONS
                .iter()
                .all(|s| s.measures == s.name.starts_with("bench-") && !(s.measures && s.parallel))
        );
    }
}

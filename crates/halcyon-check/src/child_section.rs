//! The sections that this program runs itself, in a child process: `__section NAME BACKEND DATA [--tiny]
//! [--torch] [--generated]`.

use crate::bench;
use crate::event::{Check, Event, Status};
use halcyon::prelude::*;
use halcyon::{ConstData, Error, OnnxSession};
use halcyon_formats::npy;
use halcyon_formats::onnx::{Datum, Model};
use halcyon_hal::conformance::{CASES, DeviceUnderTest};
use halcyon_hal::{Options, driver_output, probe, registry};
use halcyon_test::end_to_end;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::path::PathBuf;

/// The arguments of a section.
#[derive(Clone, Debug)]
pub(crate) struct SectionArgs {
    pub kind: BackendType,
    pub data: PathBuf,
    pub tiny: bool,
    pub torch: bool,
    /// Whether the vendors' libraries are switched off, so that generated kernels are measured.
    pub generated: bool,
}

type SectionFn = fn(&SectionArgs) -> Result<()>;

const SECTION_FNS: &[(&str, SectionFn)] = &[
    ("hal", hal),
    ("end-to-end", stories_and_mlp),
    ("mnist", mnist),
    ("bench-memory", bench::memory::main),
    ("bench-gemm", bench::gemm::main),
    ("bench-attention", bench::attention::main),
    ("bench-models", bench::models::main),
    ("bench-capture", bench::launches::main),
    ("bench-copies", bench::copies::main),
];

/// # Errors
/// Invalid arguments. All other failures are events.
pub(crate) fn main(args: &[String]) -> std::result::Result<(), String> {
    // Events are read from standard output; the parent keeps the end of standard error.
    driver_output::separate(driver_output::DriverOutput::ToStderr);
    if let Ok(exe) = std::env::current_exe() {
        probe::set_executable(exe);
    }
    if args.first().is_some_and(|a| a == "devices") {
        devices();
        return Ok(());
    }
    let [name, backend, data, more @ ..] = args else {
        return Err("__section takes a section's name, a backend and a folder".into());
    };
    let has = |flag: &str| more.iter().any(|a| a == flag);
    let kind = backend.parse().map_err(|e: Error| e.to_string())?;
    let own = SectionArgs {
        kind,
        data: data.into(),
        tiny: has("--tiny"),
        torch: has("--torch"),
        generated: has("--generated"),
    };
    let (_, work) =
        SECTION_FNS.iter().find(|(n, _)| n == name).ok_or_else(|| format!("there is no section {name}"))?;
    if let Err(e) = work(&own) {
        emit(name, status_of(&e), e.to_string());
        own.stop_if_lost();
    }
    Ok(())
}

pub(crate) fn emit(name: &str, status: Status, note: String) {
    Event::Check(Check { name: name.into(), status, note }).emit();
}

pub(crate) fn begin(what: &str) {
    Event::Begin { what: what.into() }.emit();
}

pub(crate) fn status_of(e: &Error) -> Status {
    match e {
        Error::Unsupported { .. } | Error::UnsupportedOps(_) => Status::Unsupported,
        _ => Status::Error,
    }
}

/// Writes a note for each device of each backend. It holds the driver's [`halcyon::DeviceInfo`] in JSON.
fn devices() {
    for driver in registry::drivers() {
        begin(driver.kind().id());
        for info in driver.probe().unwrap_or_default() {
            if let Ok(text) = serde_json::to_string(&info) {
                Event::Note { text }.emit();
            }
        }
    }
}

impl SectionArgs {
    /// Called after a failure. If the device no longer answers, all further work of this process would fail
    /// too, so this process ends instead.
    pub(crate) fn stop_if_lost(&self) {
        let device = registry::driver(self.kind).and_then(|d| d.open(0, &Options::default()));
        if let Err(e) = device.and_then(|d| halcyon_cli::check_alive(&*d)) {
            emit("what follows", Status::NotRun, format!("the device is lost: {e}"));
            std::process::exit(0);
        }
    }

    pub(crate) fn open(&self, level: Level) -> Result<Backend> {
        Backend::builder().backend_type(self.kind).level(level).build()
    }
}

/// The conformance suite. Its cases report failures by panics.
fn hal(o: &SectionArgs) -> Result<()> {
    thread_local! {
        static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
    }
    set_hook(Box::new(|p| PANIC.set(p.to_string())));
    for (name, case) in CASES {
        begin(name);
        // Each case has its own folder for compiled programs.
        let under_test = DeviceUnderTest::new(registry::driver(o.kind)?)?;
        match catch_unwind(AssertUnwindSafe(|| case(&under_test))) {
            Ok(()) => emit(name, Status::Passed, String::new()),
            Err(_) => {
                emit(name, Status::Wrong, PANIC.take().replace('\n', " "));
                o.stop_if_lost();
            }
        }
    }
    Ok(())
}

fn stories_and_mlp(o: &SectionArgs) -> Result<()> {
    // A rehearsal computes few tokens, because on a stand-in each takes a tenth of a second.
    let few = |all| if o.tiny { 4 } else { all };
    let found = |name: &str, r: end_to_end::Found| match r {
        Ok(note) => emit(name, Status::Passed, note),
        Err(why) => {
            emit(name, Status::Wrong, why);
            o.stop_if_lost();
        }
    };
    begin("stories");
    found(
        "stories",
        end_to_end::stories(&o.open(Level::O1)?, &o.data.join("stories260k"), few(end_to_end::ALL)),
    );
    begin("mlp");
    let data = o.data.join("digits.npz");
    found("mlp", end_to_end::mlp(&o.open(Level::O1)?, &o.data.join("mlp"), &data, few(end_to_end::ALL)));
    Ok(())
}

/// Runs ten digits at O1 and O2. The classes must be right, and the logits must be as expected.
fn mnist(o: &SectionArgs) -> Result<()> {
    let dir = o.data.join("mnist");
    let io = |e: String| Error::Io { path: dir.join("expected.json").display().to_string(), what: e };
    let text = std::fs::read(dir.join("expected.json")).map_err(|e| io(e.to_string()))?;
    let expected: BTreeMap<String, Vec<f64>> =
        serde_json::from_slice(&text).map_err(|e| io(e.to_string()))?;
    for level in [Level::O1, Level::O2] {
        begin(&format!("{level}"));
        let s = OnnxSession::new(&o.open(level)?, Model::open(&dir.join("mnist.onnx"))?)?;
        for (i, (file, want)) in expected.iter().enumerate() {
            let name = format!("{file} at {level}");
            let out = s.run_data(&[Datum::Tensor(npy::read(&dir.join(file))?)])?.outputs;
            let got = out.first().and_then(Datum::tensor).map(ConstData::to_vec::<f64>).unwrap_or_default();
            let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let best = (0..got.len()).max_by(|a, b| got[*a].total_cmp(&got[*b]));
            match got.len() == want.len() && off <= 1e-4 && best == Some(i) {
                true => emit(&name, Status::Passed, String::new()),
                false => {
                    emit(&name, Status::Wrong, format!("the class is {best:?}, the logits are off by {off}"));
                    o.stop_if_lost();
                }
            }
        }
    }
    Ok(())
}

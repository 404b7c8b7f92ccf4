//! `halcyon replay`: runs a recorded wrong result or failure again.

use super::verify::{EXIT_DIFFERS, reference};
use crate::args::{ReplayArgs, parse_device};
use crate::report::{self, number};
use halcyon::verify::{Outcome, Recorded, Replay, Replayed};
use halcyon::{Backend, BackendType, Level, Result};
use serde_json::json;
use std::fmt::Write;

pub(crate) fn main(a: &ReplayArgs) -> Result<u8> {
    let device = a.backend.as_deref().map(|b| parse_device(b, a.device)).transpose()?;
    let level = a.level.as_deref().map(str::parse::<Level>).transpose()?;
    let right: BackendType = a.reference.parse()?;
    let replay = Replay::read(&a.file)?;
    let about = &replay.about;
    let mut b = about.backend();
    b = match (device, a.device) {
        (Some(d), _) => b.backend_type(d.backend).device(d.index.unwrap_or(0)),
        (None, Some(n)) => b.device(n),
        (None, None) => b,
    };
    let backend = b.level(level.unwrap_or(about.level)).build()?;
    let done = replay.run(&backend, &reference(Backend::builder().backend_type(right))?)?;
    let again = !matches!(done.outcome, Outcome::Agrees);
    if a.json {
        let (verdict, what) = match &done.outcome {
            Outcome::Agrees => ("agrees", json!(null)),
            Outcome::Diverges(what) => ("differs", json!(what)),
            Outcome::Fails(e) => ("fails", report::error_json(e)),
        };
        report::print_json(&json!({
            "file": report::path(&a.file),
            "about": about,
            "backend": { "id": done.backend.0, "name": done.backend.1, "level": done.backend.2 },
            "reference": done.reference,
            "verdict": verdict,
            "what": what,
            "errors": done.errors,
            "tolerance": done.tolerance,
            "recorded_results": done.recorded,
        }))?;
    } else {
        report::print(&text(&replay, &done))?;
    }
    Ok(if again { EXIT_DIFFERS } else { 0 })
}

fn text(replay: &Replay, done: &Replayed) -> String {
    let about = &replay.about;
    let mut out = String::new();
    let place = if about.span.is_empty() { String::new() } else { format!(" (at {})", about.span) };
    let what = match about.step {
        Some(step) => format!("step {step}, {} by {}{place}", about.op, about.kernel),
        None => "a whole graph".into(),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(out, "recorded {what}");
    let _ = writeln!(
        out,
        "         on {}:{} ({}{}) at {}, Halcyon {}",
        about.backend,
        about.index,
        about.device,
        about.driver.as_ref().map_or(String::new(), |d| format!(", driver {d}")),
        about.level,
        about.halcyon
    );
    for (name, text) in [("differed", &about.wrong), ("failed", &about.failure)] {
        if let Some(text) = text {
            let _ = writeln!(out, "         {name}: {text}");
        }
    }
    let e = &done.errors;
    let figures = format!(
        "largest error {} ({} ulp), {} of the tolerance",
        number(e.abs),
        number(e.ulp),
        number(e.of_tolerance)
    );
    let (id, name, level) = &done.backend;
    let verdict = match &done.outcome {
        Outcome::Agrees => format!("agrees with {} at O0: {figures}", done.reference),
        Outcome::Diverges(what) => {
            format!("still differs from {} at O0: {figures}\n         {what}", done.reference)
        }
        Outcome::Fails(e) => format!("still fails: {}", report::message(e)),
    };
    let _ = writeln!(out, "now      {id} ({name}) at {level} {verdict}");
    match done.recorded {
        Recorded::Same => out += "         the results are those in the file, bit by bit\n",
        Recorded::Differs => out += "         the results are not those in the file\n",
        Recorded::None => {}
    }
    out
}

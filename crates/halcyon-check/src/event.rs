//! The events of a section, one line of JSON each, written as soon as they are known, so that results from
//! before a crash are kept.

use serde::{Deserialize, Serialize};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    Passed,
    /// It ran, but the result is not the expected one.
    Wrong,
    /// It failed with a typed error that names an unsupported feature.
    Unsupported,
    /// It failed with another error, crashed or hung.
    Error,
    /// It was left out or not completed, because no time was left or an earlier failure made the device
    /// unusable.
    #[serde(rename = "not_run")]
    NotRun,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    pub name: String,
    pub status: Status,
    pub note: String,
}

/// The value that a figure is compared with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reference {
    /// `PyTorch 2.9 eager`, `device copy`, `10 µs`.
    pub what: String,
    /// In the unit of the figure.
    pub value: f64,
}

/// A measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub name: String,
    pub unit: String,
    pub value: f64,
    /// Whether larger values are better.
    pub more: bool,
    pub reference: Option<Reference>,
    /// The minimum ratio to the reference, if there is a target.
    pub target: Option<f64>,
    pub note: String,
}

impl Figure {
    /// Ratio to the reference; above 1 is better.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let r = self.reference.as_ref()?.value;
        let ratio = if self.more { self.value / r } else { r / self.value };
        ratio.is_finite().then_some(ratio)
    }

    /// Whether the target was met. `None` without a target or reference.
    pub(crate) fn met(&self) -> Option<bool> {
        Some(self.ratio()? >= self.target?)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum Event {
    /// Announces the work that runs next. If no check or figure follows, the process ended during this work.
    Begin {
        what: String,
    },
    Check(Check),
    Figure(Figure),
    /// A note: a part of the check that was left out, with the reason, or a fact about the machine.
    Note {
        text: String,
    },
}

impl Event {
    /// Writes the event as one line to standard output and flushes it. If that fails, because the parent no
    /// longer reads, ends this process.
    pub(crate) fn emit(&self) {
        use std::io::Write;
        if let Ok(line) = serde_json::to_string(self) {
            let mut out = halcyon_hal::driver_output::out();
            if out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush()).is_err() {
                std::process::exit(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, more: bool, reference: Option<f64>, target: Option<f64>) -> Figure {
        let reference = reference.map(|value| Reference { what: "x".into(), value });
        Figure { name: "f".into(), unit: "u".into(), value, more, reference, target, note: String::new() }
    }

    #[test]
    fn ratios_are_better_above_one() {
        assert_eq!(figure(9.0, true, Some(10.0), Some(0.9)).met(), Some(true));
        assert_eq!(figure(8.9, true, Some(10.0), Some(0.9)).met(), Some(false));
        assert_eq!(figure(8.0, false, Some(10.0), Some(1.0)).ratio(), Some(1.25));
        assert_eq!(figure(12.0, false, Some(10.0), Some(1.0)).met(), Some(false));
        assert_eq!(figure(12.0, false, Some(10.0), None).met(), None);
        assert_eq!(figure(12.0, false, None, Some(1.0)).met(), None);
        assert_eq!(figure(0.0, false, Some(1.0), Some(1.0)).ratio(), None);
    }

    #[test]
    fn events_are_lines() {
        let e = Event::Check(Check { name: "a".into(), status: Status::Wrong, note: "1\n2".into() });
        let text = serde_json::to_string(&e).unwrap();
        assert!(text.starts_with(r#"{"event":"check""#) && !text.contains('\n'), "{text}");
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), e);
        let f = Event::Figure(figure(1.5, true, None, None));
        assert_eq!(serde_json::from_str::<Event>(&serde_json::to_string(&f).unwrap()).unwrap(), f);
    }
}

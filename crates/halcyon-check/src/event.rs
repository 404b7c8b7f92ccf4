//! What a section tells: a line of JSON for each thing that is known, so that what came before a crash is
//! kept.

use serde::{Deserialize, Serialize};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Passed,
    /// It ran, and the result is not the expected one.
    Wrong,
    /// A typed error that names what is not supported.
    Unsupported,
    /// It did not run to its end.
    Error,
    /// It was left out: no time was left, or what came before took the device down.
    #[serde(rename = "not_run")]
    NotRun,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    pub note: String,
}

/// What a figure is held against.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// `PyTorch 2.9 eager`, `device copy`, `10 µs`.
    pub what: String,
    /// In the figure's unit.
    pub value: f64,
}

/// A measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub unit: String,
    pub value: f64,
    /// More is better; else less is.
    pub more: bool,
    pub reference: Option<Reference>,
    /// The least ratio to the reference that is asked for, where something is.
    pub target: Option<f64>,
    pub note: String,
}

impl Figure {
    /// How good it is beside its reference: above 1 is better.
    pub fn ratio(&self) -> Option<f64> {
        let r = self.reference.as_ref()?.value;
        let ratio = if self.more { self.value / r } else { r / self.value };
        ratio.is_finite().then_some(ratio)
    }

    /// Whether the target was met; `None` where there is none or nothing to hold it against.
    pub fn met(&self) -> Option<bool> {
        Some(self.ratio()? >= self.target?)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// What is done next: if nothing follows, it ended the process.
    Begin {
        what: String,
    },
    Check(Check),
    Figure(Figure),
    /// What was left out and why, or a fact about the machine.
    Note {
        text: String,
    },
}

impl Event {
    /// One line on the standard output, at once. Where nobody is left to be told, this process ends.
    pub fn tell(&self) {
        use std::io::Write;
        if let Ok(line) = serde_json::to_string(self) {
            let mut out = halcyon_hal::chatter::out();
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

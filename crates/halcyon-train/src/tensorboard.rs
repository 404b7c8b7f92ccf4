//! TensorBoard's event files: TFRecord files (tensorflow/core/lib/io/record_writer.cc) of Event messages
//! (tensorflow/core/util/event.proto). Only scalars are written.

use crate::callback::{Callback, EpochReport, Flow, StepReport};
use halcyon::ir::error::{Error, Result};
use prost::Message;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(crate) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(crate) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(crate) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(crate) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(crate) session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(crate) value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(crate) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(crate) simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SessionLog {
    /// 1 means that a session starts. TensorBoard then discards the data that it has of later steps.
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

/// CRC-32C (Castagnoli), computed bit by bit, which is fast enough for short events.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for b in bytes {
        crc ^= u32::from(*b);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

/// Masks a checksum as TFRecord does, because the data itself may contain checksums.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn record(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &masked(&len), &data, &masked(&data)].concat()
}

/// Writes scalars to an event file in a folder: `train/loss` and `train/samples_per_s` for each step,
/// `epoch/loss` and the metrics of the evaluation (`eval/NAME`) for each epoch.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl TensorBoard {
    /// A new event file in `folder`. The file is made when training starts.
    pub fn new(folder: impl Into<PathBuf>) -> TensorBoard {
        TensorBoard { folder: folder.into(), path: PathBuf::new(), file: None }
    }

    fn failed(&self, e: &std::io::Error) -> Error {
        Error::Io { path: self.path.display().to_string(), what: e.to_string() }
    }

    fn write(&mut self, event: &Event, flush: bool) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let done = file.write_all(&record(event)).and_then(|()| if flush { file.flush() } else { Ok(()) });
        done.map_err(|e| self.failed(&e))
    }

    fn scalars(&mut self, step: u64, values: &[(&str, f64)], flush: bool) -> Result<()> {
        let value = values
            .iter()
            .map(|(tag, v)| SummaryValue { tag: (*tag).to_string(), simple_value: Some(*v as f32) });
        let summary = Some(Summary { value: value.collect() });
        self.write(&Event { wall_time: now(), step: step as i64, summary, ..Event::default() }, flush)
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

impl Callback for TensorBoard {
    fn on_start(&mut self, step: u64) -> Result<()> {
        let io = |path: &PathBuf, e: &std::io::Error| Error::Io {
            path: path.display().to_string(),
            what: e.to_string(),
        };
        std::fs::create_dir_all(&self.folder).map_err(|e| io(&self.folder, &e))?;
        // Two runs that start in the same second get different names.
        let mut n = 0;
        let file = loop {
            let name = format!("events.out.tfevents.{:010}.halcyon.{}.{n}", now() as u64, std::process::id());
            self.path = self.folder.join(name);
            match File::create_new(&self.path) {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => n += 1,
                made => break made.map_err(|e| io(&self.path, &e))?,
            }
        };
        self.file = Some(BufWriter::new(file));
        let version = Some("brain.Event:2".to_string());
        self.write(&Event { wall_time: now(), file_version: version, ..Event::default() }, false)?;
        let session_log = Some(SessionLog { status: 1 });
        self.write(&Event { wall_time: now(), step: step as i64, session_log, ..Event::default() }, true)
    }

    fn on_step(&mut self, r: &StepReport) -> Result<Flow> {
        self.scalars(r.step, &[("train/loss", r.loss), ("train/samples_per_s", r.samples_per_s)], false)?;
        Ok(Flow::Continue)
    }

    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        let named: Vec<(String, f64)> = r.metrics.iter().map(|(k, v)| (format!("eval/{k}"), *v)).collect();
        let mut values: Vec<(&str, f64)> = named.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        values.push(("epoch/loss", r.loss));
        self.scalars(r.step, &values, true)?;
        Ok(Flow::Continue)
    }

    fn on_end(&mut self) -> Result<()> {
        match self.file.as_mut().map(Write::flush) {
            Some(Err(e)) => Err(self.failed(&e)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Check values of RFC 3720, appendix B.4.
    #[test]
    fn checksums_are_those_of_the_standard() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn events_are_records_with_scalars() {
        let dir = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::new(dir.path().join("runs"));
        board.on_start(7).unwrap();
        let report = StepReport { step: 8, epoch: 0, loss: 0.5, samples_per_s: 10.0, batches: (1, 2) };
        board.on_step(&report).unwrap();
        board.on_end().unwrap();
        let bytes = std::fs::read(&board.path).unwrap();
        let (mut rest, mut events) = (&bytes[..], vec![]);
        while !rest.is_empty() {
            let n = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked(&rest[..8]));
            let data = &rest[12..12 + n];
            assert_eq!(rest[12 + n..16 + n], masked(data));
            events.push(Event::decode(data).unwrap());
            rest = &rest[16 + n..];
        }
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        assert_eq!((events[1].step, events[1].session_log.as_ref().unwrap().status), (7, 1));
        let value = &events[2].summary.as_ref().unwrap().value[0];
        assert_eq!((events[2].step, value.tag.as_str(), value.simple_value), (8, "train/loss", Some(0.5)));
    }
}

//! Builds without the feature `ort`: [`Ort::open`] is an error, and there are no values of these types.

use crate::args::{BackendArgs, OrtArgs};
use crate::source::Input;
use halcyon::{Error, Result};
use halcyon_formats::onnx::{Datum, Model};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Never {}

#[derive(Clone, Debug)]
pub(in crate::cmd) struct Ort(Never);

#[derive(Debug)]
pub(in crate::cmd) struct OrtModel(Never);

impl Ort {
    pub(in crate::cmd) fn open(_: &OrtArgs, _: &BackendArgs, _: bool) -> Result<Ort> {
        Err(Error::unsupported("ONNX Runtime in this build", "Build the command with the Cargo feature ort"))
    }

    pub(in crate::cmd) fn name(&self) -> String {
        match self.0 {}
    }

    pub(in crate::cmd) fn providers(&self) -> String {
        match self.0 {}
    }

    pub(in crate::cmd) fn text(&self) -> String {
        match self.0 {}
    }

    pub(in crate::cmd) fn json(&self) -> Value {
        match self.0 {}
    }

    pub(in crate::cmd) fn messages(&self) -> Vec<String> {
        match self.0 {}
    }

    pub(in crate::cmd) fn load(&self, _: &Path) -> Result<OrtModel> {
        match self.0 {}
    }

    pub(in crate::cmd) fn load_exposing(&self, _: &Path, _: &Model, _: &[String]) -> Result<OrtModel> {
        match self.0 {}
    }
}

impl OrtModel {
    pub(in crate::cmd) fn outputs(&self) -> &[String] {
        match self.0 {}
    }

    pub(in crate::cmd) fn left_out(&self) -> &[(String, String)] {
        match self.0 {}
    }

    pub(in crate::cmd) fn feed(&mut self, _: &[Input]) -> Result<()> {
        match self.0 {}
    }

    pub(in crate::cmd) fn run(&mut self) -> Result<(Vec<Datum>, Duration)> {
        match self.0 {}
    }
}

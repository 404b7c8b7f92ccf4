//! ONNX Runtime through the crate `halcyon-ort`.

use crate::args::{BackendArgs, OrtArgs};
use crate::report;
use crate::source::Input;
use halcyon::{BackendType, Error, Result};
use halcyon_compat::training::resolve_ort_providers;
use halcyon_formats::onnx::{Datum, Model};
use halcyon_ort::{Inputs, Runtime, Session, SessionOptions};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The loaded library, and how it runs models.
#[derive(Clone, Debug)]
pub(in crate::cmd) struct Ort {
    runtime: Arc<Runtime>,
    options: SessionOptions,
    /// The execution providers that the library has.
    available: Vec<String>,
}

/// A model that ONNX Runtime has loaded, with its inputs.
#[derive(Debug)]
pub(in crate::cmd) struct OrtModel {
    session: Session,
    inputs: Option<Inputs>,
}

impl Ort {
    /// Loads the library and chooses execution providers for `--backend`. With `beside`, Halcyon runs the
    /// model too: then a backend for which ONNX Runtime has no kind of provider is not an error, and its CPU
    /// provider is used, with a warning.
    pub(in crate::cmd) fn open(a: &OrtArgs, b: &BackendArgs, beside: bool) -> Result<Ort> {
        let runtime = Runtime::open(a.ort_library.as_deref())?;
        let available = runtime.providers()?;
        let (backend, device) = b.named()?;
        let (providers, device) = match resolve_ort_providers(backend.id(), &available) {
            Ok(all) => (all, device),
            Err(e) if beside && matches!(e.error(), Error::Unsupported { .. }) => {
                report::warn(&format!(
                    "ONNX Runtime has no execution provider for {}; it runs the model on the CPU",
                    backend.id()
                ));
                (resolve_ort_providers(BackendType::Cpu.id(), &available)?, None)
            }
            Err(e) => return Err(e.into()),
        };
        let options = SessionOptions {
            providers: providers.into_iter().map(String::from).collect(),
            device,
            threads: b.threads,
        };
        Ok(Ort { runtime, options, available })
    }

    /// `ONNX Runtime 1.31.1`.
    pub(in crate::cmd) fn name(&self) -> String {
        format!("ONNX Runtime {}", self.runtime.version())
    }

    /// The execution providers in use, in the order of preference.
    pub(in crate::cmd) fn providers(&self) -> String {
        self.options.providers.join(", ")
    }

    /// Lines for `-v`.
    pub(in crate::cmd) fn text(&self) -> String {
        let threads = self.options.threads.map_or(String::new(), |n| format!(", {n} threads"));
        format!(
            "runtime  {}: {} ({})\n         execution providers {} of {}{threads}\n",
            self.name(),
            report::path_text(self.runtime.path()),
            self.runtime.found_by(),
            self.providers(),
            self.available.join(", "),
        )
    }

    pub(in crate::cmd) fn json(&self) -> Value {
        json!({
            "name": "ort",
            "version": self.runtime.version(),
            "library": report::path(self.runtime.path()),
            "found_by": self.runtime.found_by().to_string(),
            "providers": self.options.providers,
            "available_providers": self.available,
            "device": self.options.device,
            "threads": self.options.threads,
        })
    }

    /// Warnings and errors that the library has reported so far.
    pub(in crate::cmd) fn messages(&self) -> Vec<String> {
        self.runtime.messages().iter().map(|m| format!("ONNX Runtime: {m}")).collect()
    }

    /// Loads a model.
    pub(in crate::cmd) fn load(&self, path: &Path) -> Result<OrtModel> {
        let session = Session::from_file(&self.runtime, path, &self.options)?;
        Ok(OrtModel { session, inputs: None })
    }

    /// Loads a model with further outputs. `model` is the one in the file.
    pub(in crate::cmd) fn load_exposing(
        &self,
        path: &Path,
        model: &Model,
        names: &[String],
    ) -> Result<OrtModel> {
        let folder = std::path::absolute(path)
            .map_err(|e| Error::Io { path: path.display().to_string(), what: e.to_string() })?;
        let folder = folder.parent().unwrap_or(Path::new(""));
        let (bytes, name) = (model.file_exposing(names)?, path.display().to_string());
        let session = Session::from_bytes(&self.runtime, &bytes, folder, &name, &self.options)?;
        Ok(OrtModel { session, inputs: None })
    }
}

impl OrtModel {
    /// Names of the results of a run.
    pub(in crate::cmd) fn outputs(&self) -> &[String] {
        self.session.outputs()
    }

    /// Outputs that a run does not return, with the reason.
    pub(in crate::cmd) fn left_out(&self) -> &[(String, String)] {
        self.session.left_out()
    }

    /// Copies the inputs to ONNX Runtime's memory.
    pub(in crate::cmd) fn feed(&mut self, inputs: &[Input]) -> Result<()> {
        let values = inputs.iter().map(|i| (i.name.as_str(), &i.data));
        self.inputs = Some(Inputs::new(self.session.runtime(), values)?);
        Ok(())
    }

    /// Runs the model. The time is that of the run, without copies to and from ONNX Runtime's memory.
    pub(in crate::cmd) fn run(&mut self) -> Result<(Vec<Datum>, Duration)> {
        let inputs = self.inputs.as_ref().ok_or_else(|| Error::internal("a run without inputs"))?;
        self.session.run_timed(inputs)
    }
}

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

/// The execution providers for a backend.
#[derive(Debug)]
struct Choice {
    /// In the order of preference.
    providers: Vec<&'static str>,
    /// Number of the first one's device.
    device: Option<usize>,
    /// Why providers are not used.
    warnings: Vec<String>,
}

/// Chooses execution providers; `check` tells whether they can be used. A provider that cannot be used gives
/// way to the next one, with a warning, for `auto` without a number of a device, and if Halcyon runs the
/// model too (`beside`). Otherwise it is an error, which loading the model finds.
fn choose(
    backend: BackendType,
    device: Option<usize>,
    beside: bool,
    available: &[String],
    check: impl Fn(&[&str]) -> Result<()>,
) -> Result<Choice> {
    let gives_way = beside || backend == BackendType::Auto && device.is_none();
    let (mut left, mut warnings) = (available.to_vec(), vec![]);
    loop {
        let providers = match resolve_ort_providers(backend.id(), &left) {
            Ok(all) => all,
            Err(e)
                if beside && matches!(e.error(), Error::Unsupported { .. } | Error::Unavailable { .. }) =>
            {
                // If providers were left out, the warnings about them say it.
                if warnings.is_empty() {
                    let backend = backend.id();
                    warnings.push(format!(
                        "ONNX Runtime has no execution provider for {backend}; it runs the model on the CPU"
                    ));
                }
                let providers = resolve_ort_providers(BackendType::Cpu.id(), available)?;
                return Ok(Choice { providers, device: None, warnings });
            }
            Err(e) => return Err(e.into()),
        };
        // The last provider is the CPU's, which every build can use.
        let first = providers[0];
        if !gives_way || providers.len() == 1 {
            // A number was meant for a provider that is left out.
            let device = device.filter(|_| warnings.is_empty());
            return Ok(Choice { providers, device, warnings });
        }
        match check(&providers) {
            Ok(()) => return Ok(Choice { providers, device, warnings }),
            Err(Error::Unavailable { reason, .. }) => {
                warnings.push(format!("ONNX Runtime cannot use {first}, so it is left out: {reason}"));
                left.retain(|p| p != first);
            }
            Err(e) => return Err(e),
        }
    }
}

impl Ort {
    /// Loads the library and chooses execution providers for `--backend`. With `beside`, Halcyon runs the
    /// model too: then a backend that ONNX Runtime cannot use is not an error, and its CPU provider is used,
    /// with a warning.
    pub(in crate::cmd) fn open(a: &OrtArgs, b: &BackendArgs, beside: bool) -> Result<Ort> {
        let runtime = Runtime::open(a.ort_library.as_deref())?;
        let available = runtime.providers()?;
        let (backend, device) = b.named()?;
        let options = |providers: &[&str], device| SessionOptions {
            providers: providers.iter().map(|p| p.to_string()).collect(),
            device,
            threads: b.threads,
        };
        let check = |all: &[&str]| Session::check_providers(&runtime, &options(all, device));
        let choice = choose(backend, device, beside, &available, check)?;
        choice.warnings.iter().for_each(|w| report::warn(w));
        let options = options(&choice.providers, choice.device);
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

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &str = "CPUExecutionProvider";
    const CUDA: &str = "CUDAExecutionProvider";

    /// A build of ONNX Runtime with these providers, of which `broken` cannot be used.
    fn choice(
        name: &str,
        device: Option<usize>,
        beside: bool,
        providers: &[&str],
        broken: &[&str],
    ) -> Result<Choice> {
        let available: Vec<String> = providers.iter().map(|p| p.to_string()).collect();
        choose(name.parse()?, device, beside, &available, |all| match broken.contains(&all[0]) {
            false => Ok(()),
            true => Err(Error::Unavailable {
                backend: all[0].into(),
                tried: vec![],
                reason: "no libcublas".into(),
                fix: "install it".into(),
            }),
        })
    }

    #[test]
    fn a_backend_without_a_provider_falls_to_the_cpu_only_beside_halcyon() {
        for (name, code) in [("cuda", 4), ("cuda:1", 4), ("opencl", 3)] {
            let (name, device) = name.split_once(':').map_or((name, None), |(n, _)| (n, Some(1)));
            let c = choice(name, device, true, &[CPU], &[]).unwrap();
            assert_eq!((&c.providers[..], c.device, c.warnings.len()), (&[CPU][..], None, 1), "{name}");
            assert!(c.warnings[0].contains(&format!("no execution provider for {name}")), "{:?}", c.warnings);
            assert_eq!(choice(name, device, false, &[CPU], &[]).unwrap_err().exit_code(), code, "{name}");
        }
        // A build for another kind of GPU.
        let c = choice("cuda", None, true, &["ROCMExecutionProvider", CPU], &[]).unwrap();
        assert_eq!((&c.providers[..], c.warnings.len()), (&[CPU][..], 1));
    }

    #[test]
    fn auto_leaves_out_providers_that_cannot_be_used() {
        let c = choice("auto", None, false, &[CUDA, CPU], &[]).unwrap();
        assert_eq!((&c.providers[..], c.warnings.len()), (&[CUDA, CPU][..], 0));
        let c = choice("auto", None, false, &[CUDA, CPU], &[CUDA]).unwrap();
        assert_eq!(c.providers, [CPU]);
        assert!(c.warnings.len() == 1 && c.warnings[0].contains(CUDA), "{:?}", c.warnings);
        assert!(c.warnings[0].contains("no libcublas"), "{:?}", c.warnings);
        let two = [CUDA, "MIGraphXExecutionProvider", CPU];
        assert_eq!(choice("auto", None, false, &two, &[CUDA]).unwrap().providers, two[1..]);
        assert_eq!(choice("auto", None, false, &two, &two[..2]).unwrap().warnings.len(), 2);
        // A named backend and a numbered device are no wish for another: loading the model has the error.
        for (name, device) in [("cuda", None), ("cuda", Some(1)), ("auto", Some(1))] {
            let c = choice(name, device, false, &[CUDA, CPU], &[CUDA]).unwrap();
            assert_eq!((&c.providers[..], c.device, c.warnings.len()), (&[CUDA, CPU][..], device, 0));
        }
        for name in ["cuda", "auto"] {
            let c = choice(name, Some(1), true, &[CUDA, CPU], &[CUDA]).unwrap();
            assert_eq!((&c.providers[..], c.device, c.warnings.len()), (&[CPU][..], None, 1), "{name}");
        }
    }
}

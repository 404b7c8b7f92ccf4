//! Models by name: `hf:ORG/REPO`.

use crate::args::{HubArgs, LoraArgs};
use crate::report;
use halcyon::hal::driver_output;
use halcyon::{Error, Result};
use halcyon_models::hub::{self, Hub, Progress};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};

/// Whether this is the name of a model, and not of a file.
pub(crate) fn is_name(model: &Path) -> bool {
    !matches!(hub::name_of(model), Ok(None))
}

/// The path of a model on this machine. Shows what is downloaded.
pub(crate) fn local(model: &Path, a: &HubArgs) -> Result<PathBuf> {
    let Some(name) = hub::name_of(model)? else { return Ok(model.into()) };
    let mut hub = Hub::from_env()?;
    hub.offline |= a.offline;
    let mut shown = Shown::default();
    let path = hub.find(&name, &mut |p| shown.set(p));
    shown.end();
    path
}

/// The places of adapters on this machine, and their factors.
pub(crate) fn adapters(lora: &LoraArgs, a: &HubArgs) -> Result<Vec<(PathBuf, f32)>> {
    lora.places()?.into_iter().map(|(place, factor)| Ok((local(&place, a)?, factor))).collect()
}

/// As [`local`], but a folder with one file of weights is that file.
///
/// # Errors
/// Those of [`local`]; `Error::Unsupported` for weights in several files.
pub(crate) fn local_file(model: &Path, a: &HubArgs) -> Result<PathBuf> {
    let path = local(model, a)?;
    let file = path.join("model.safetensors");
    match (path.is_dir(), file.is_file()) {
        (false, _) => Ok(path),
        (true, true) => Ok(file),
        (true, false) => Err(Error::unsupported(
            "a model in several files at once",
            format!("Give one of the files in {}", path.display()),
        )),
    }
}

/// The progress of a download: a bar on a terminal, else a line for each file.
#[derive(Default)]
struct Shown {
    file: String,
    bar: Option<ProgressBar>,
}

impl Shown {
    fn set(&mut self, p: Progress<'_>) {
        if self.file != p.file {
            self.end();
            self.file = p.file.into();
            if report::quiet() {
                return;
            }
            if !driver_output::err().is_terminal() {
                report::note(&format!("downloading {}, {}", report::name(p.file), report::size(p.size)));
                return;
            }
            let style = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            let bar = ProgressBar::new(p.size).with_message(report::name(p.file).into_owned());
            // What an earlier download brought does not count for the rate.
            let bar = bar.with_position(p.done);
            bar.reset_eta();
            self.bar = Some(match ProgressStyle::with_template(style) {
                Ok(s) => bar.with_style(s.progress_chars("=> ")),
                Err(_) => bar,
            });
        }
        if let Some(bar) = &self.bar {
            bar.set_position(p.done);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

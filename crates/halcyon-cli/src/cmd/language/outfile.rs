//! What the commands may write over: never a file that they read, and a model only on request.

use halcyon::{Error, Result};
use halcyon_formats::gguf::Gguf;
use halcyon_formats::output::{Place, place};
use std::path::{Path, PathBuf};

/// The files of an input: all parts of a GGUF file, and all files in a folder and the folders in it.
pub(super) fn files_of(input: &Path) -> Vec<PathBuf> {
    let inside = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect()
    };
    if !input.is_dir() {
        return Gguf::open(input).map_or_else(|_| vec![input.into()], |f| f.paths().to_vec());
    }
    // Parts of sentence-transformers' models have folders of their own.
    let (folders, mut files): (Vec<_>, Vec<_>) = inside(input).into_iter().partition(|p| p.is_dir());
    files.extend(folders.iter().flat_map(|f| inside(f)));
    files
}

/// The files of a model and of its adapters.
pub(super) fn files_with(model: &Path, adapters: &[(PathBuf, f32)]) -> Vec<PathBuf> {
    std::iter::once(model).chain(adapters.iter().map(|(p, _)| p.as_path())).flat_map(files_of).collect()
}

/// Refuses to replace a file that is being read. `option` names the output.
///
/// # Errors
/// `Error::Argument`.
pub(super) fn refuse_inputs(inputs: &[PathBuf], path: &Path, option: &str) -> Result<()> {
    let real = |p: &Path| p.canonicalize().ok();
    let target = real(path).filter(|t| t.is_file());
    if target.is_some() && inputs.iter().any(|p| real(p) == target) {
        let what = format!("{} is the model itself, or another input; name another file", path.display());
        return Err(Error::argument(option, what));
    }
    Ok(())
}

/// Refuses to replace a file unless the user allows it. One that is read-only is never replaced.
///
/// # Errors
/// `Error::Argument` with what to do.
pub(super) fn refuse_existing(path: &Path, overwrite: bool) -> Result<()> {
    let Ok(Place::File(file)) = place(path) else { return Ok(()) };
    let name = path.display();
    if std::fs::metadata(&file).is_ok_and(|m| m.permissions().readonly()) {
        let what = format!("{name} exists and is read-only; remove it first, or name another file");
        return Err(Error::argument("OUT", what));
    }
    match overwrite {
        true => Ok(()),
        false => {
            let what = format!("{name} exists; give --overwrite to replace it, or name another file");
            Err(Error::argument("OUT", what))
        }
    }
}

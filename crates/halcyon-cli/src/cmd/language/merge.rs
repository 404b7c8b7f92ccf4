//! Adapters in the commands that write models.

use super::outfile::files_of;
use crate::report;
use halcyon::{Backend, Result};
use halcyon_formats::gguf::GgmlType;
use halcyon_models::export::{Content, merged_content};
use halcyon_models::{Lora, ModelFile, Source};
use std::path::{Path, PathBuf};

/// A model, perhaps with adapters.
pub(super) enum Input {
    Plain(Box<Source>),
    Merged(Box<(ModelFile, Lora, Vec<PathBuf>)>),
}

impl Input {
    /// Opens a model, with the adapters in these places and their factors.
    pub(super) fn open(path: &Path, places: &[(PathBuf, f32)]) -> Result<Input> {
        if places.is_empty() {
            return Ok(Input::Plain(Box::new(Source::open(path)?)));
        }
        let (file, cpu) = (ModelFile::open_any(path)?, Backend::cpu()?);
        match Lora::load_all(places, &file, &cpu)? {
            Some(lora) => {
                let files = places.iter().flat_map(|(p, _)| files_of(p)).collect();
                Ok(Input::Merged(Box::new((file, lora, files))))
            }
            None => Ok(Input::Plain(Box::new(file.source))),
        }
    }

    pub(super) fn source(&self) -> &Source {
        match self {
            Input::Plain(s) => s,
            Input::Merged(m) => &m.0.source,
        }
    }

    /// The files that are read: those of the model and of the adapters.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let mut all = match self.source() {
            Source::Gguf(file) => file.paths().to_vec(),
            Source::Folder(folder) => files_of(folder.path()),
        };
        if let Input::Merged(m) = self {
            all.extend(m.2.iter().cloned());
        }
        all
    }

    /// The content, and the types that its tensors have without adapters.
    pub(super) fn content(&mut self) -> Result<(Content<'_>, Vec<GgmlType>)> {
        match self {
            Input::Plain(source) => {
                let content = Content::of(source)?;
                let types = content.tensors.iter().map(|t| t.info.ty).collect();
                Ok((content, types))
            }
            Input::Merged(m) => {
                let (content, types) = merged_content(&mut m.0, &m.1)?;
                let again = content.tensors.iter().zip(&types);
                let blocks = |t: &GgmlType| !matches!(t, GgmlType::Plain(_));
                let count = again.filter(|(t, ty)| blocks(ty) && t.info.ty == GgmlType::F32).count();
                if count > 0 {
                    report::warn(&format!(
                        "{count} merged matrices come from blocks; in blocks again they are rounded twice"
                    ));
                }
                Ok((content, types))
            }
        }
    }
}

//! Modules of folders that have several of the model's matrices, such as `qkv_proj`: their adapters have one
//! `A` for all, and the rows of `B` are those of the matrices.

use super::files::modules;
use super::{Difference, Lora, matrix};
use crate::model::ModelFile;
use crate::source::Source;
use halcyon::ir::error::{Error, Result};
use std::collections::BTreeMap;

/// Where a matrix is in its module.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The rows of the matrix; `None` for all of them.
    pub(super) rows: Option<Vec<usize>>,
    /// The rows of the module.
    pub(super) of: usize,
    /// Whether folders store the transpose of the module.
    pub(super) turned: bool,
}

impl Part {
    /// The rows of the matrix among those of the module's `B`, `[of, rank]`.
    pub(super) fn pick(&self, b: &[f32], rank: usize) -> Vec<f32> {
        match &self.rows {
            None => b.to_vec(),
            Some(rows) => rows.iter().flat_map(|r| b[r * rank..(r + 1) * rank].iter().copied()).collect(),
        }
    }
}

/// The places of all matrices that are not a whole module, stored as it is used.
pub(super) fn of(file: &ModelFile) -> Result<BTreeMap<String, Part>> {
    let all = modules(file);
    let odd = || all.iter().filter(|(_, m)| !m.is_plain());
    // The rows of a module are those of its matrices together.
    let mut sizes = BTreeMap::<&str, usize>::new();
    for (stem, m) in odd() {
        let rows = matrix(file, stem)?.and_then(|w| w.dims().first().copied());
        *sizes.entry(&m.name).or_default() += rows.unwrap_or(0);
    }
    let mut parts = BTreeMap::new();
    // Quantised matrices of folders are stored by rows.
    let by_rows = matches!(&file.source, Source::Folder(f) if f.is_quantised());
    for (stem, m) in odd() {
        let of = sizes.get(m.name.as_str()).copied().unwrap_or(0);
        let (rows, turned) = (m.rows(of)?, m.is_turned() && !by_rows);
        if rows.is_some() || turned {
            parts.insert(stem.clone(), Part { rows, of, turned });
        }
    }
    Ok(parts)
}

/// `A` and `B` of a whole module.
pub(super) struct Whole {
    pub(super) rank: usize,
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
}

impl Whole {
    /// Adds the adapter of one of the module's matrices.
    ///
    /// # Errors
    /// `Error::Unsupported` if the matrices have different `A`.
    pub(super) fn add(&mut self, name: &str, a: Vec<f32>, b: &[f32], part: &Part) -> Result<()> {
        if self.b.is_empty() {
            self.b = vec![0.0; part.of * self.rank];
            self.a = a;
        } else if self.a != a {
            return Err(Error::unsupported(
                format!("a file for the adapters of '{name}', whose matrices have adapters of their own"),
                "Merge them into the model",
            ));
        }
        let rows = part.rows.clone().unwrap_or_else(|| (0..part.of).collect());
        for (row, values) in rows.into_iter().zip(b.chunks_exact(self.rank)) {
            self.b[row * self.rank..(row + 1) * self.rank].copy_from_slice(values);
        }
        Ok(())
    }
}

impl Lora {
    /// What adapters add to the tensors of folders, by the names of the modules; `{}` as in these.
    pub(crate) fn of_modules(&self) -> Result<BTreeMap<String, Difference>> {
        let (mut all, mut joined) = (BTreeMap::new(), BTreeMap::<String, (Vec<_>, &Part)>::new());
        for (stem, d) in self.differences()? {
            let name = self.names.get(&stem).cloned().unwrap_or_default();
            match self.parts.get(&stem) {
                None => drop(all.insert(name, d)),
                Some(p) => joined.entry(name).or_insert((vec![], p)).0.push((d, p.rows.clone())),
            }
        }
        for (name, (parts, p)) in joined {
            let d = Difference::joined(parts, p.of);
            all.insert(name, if p.turned { d.turned() } else { d });
        }
        Ok(all)
    }
}

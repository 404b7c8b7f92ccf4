//! The order of rows and columns in files.
//!
//! llama.cpp's files of some families have the rows of queries and keys in the order of the other layout of
//! the rotation, or the value heads of a scan in another order, and folders have not. Adapters are stored in
//! the order of the files they belong to.

use crate::export::{Pick, Turn, tiled_pick};
use crate::model::ModelFile;
use crate::rope::Layout;
use crate::source::Source;
use crate::spec::{Mixer, ScanKind};

/// Families whose GGUF files have another order of queries and keys than their folders.
const TURNED: &[&str] = &["llama", "mixtral", "granite", "granitehybrid", "smollm3"];
/// Families whose GGUF files have another order of value heads than their folders.
const TILED: &[&str] = &["qwen35", "qwen35moe"];

/// Whose order an adapter has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileOrder {
    Folder,
    Gguf,
}

impl FileOrder {
    fn of(file: &ModelFile) -> FileOrder {
        match file.source {
            Source::Gguf(_) => FileOrder::Gguf,
            Source::Folder(_) => FileOrder::Folder,
        }
    }
}

/// Another order of a matrix: where its rows, or its columns, come from.
#[derive(Clone, Debug)]
pub(super) enum Moved {
    Rows(Vec<usize>),
    Columns(Vec<usize>),
}

impl Moved {
    /// Puts the factors `A` `[rank, inputs]` and `B` `[outputs, rank]` into this order. Factors of another
    /// size stay; they do not fit the matrix.
    pub(super) fn apply(&self, rank: usize, a: &mut Vec<f32>, b: &mut Vec<f32>) {
        match self {
            Moved::Rows(from) if b.len() == from.len() * rank => {
                *b = from.iter().flat_map(|r| b[r * rank..(r + 1) * rank].iter().copied()).collect();
            }
            Moved::Columns(from) if a.len() == from.len() * rank => {
                *a = a.chunks_exact(from.len()).flat_map(|row| from.iter().map(|c| row[*c])).collect();
            }
            _ => {}
        }
    }

    /// Back to the order before.
    fn back(self) -> Moved {
        let inverse = |from: Vec<usize>| {
            let mut to = vec![0; from.len()];
            from.into_iter().enumerate().for_each(|(i, f)| to[f] = i);
            to
        };
        match self {
            Moved::Rows(from) => Moved::Rows(inverse(from)),
            Moved::Columns(from) => Moved::Columns(inverse(from)),
        }
    }
}

/// How the matrix `stem` changes from one order to another; `None` if it stays.
fn moved(file: &ModelFile, stem: &str, from: FileOrder, to: FileOrder) -> Option<Moved> {
    let (i, own) = stem.strip_prefix("blk.")?.split_once('.')?;
    if from == to {
        return None;
    }
    let back = to == FileOrder::Folder;
    match &file.spec.layers.get(i.parse::<usize>().ok()?)?.mixer {
        Mixer::Attention(a) => {
            let heads = match own {
                "attn_q" => a.heads,
                "attn_k" => a.shared,
                _ => return None,
            };
            let rope = a.rope.as_ref().filter(|_| TURNED.contains(&file.spec.family))?;
            let here = if FileOrder::of(file) == FileOrder::Gguf { Layout::Pairs } else { Layout::Half };
            let turn = Turn { key: a.key, first: 0, size: rope.size, back };
            (rope.layout == here).then(|| Moved::Rows(turn.rows(heads * a.key)))
        }
        Mixer::Recurrent(r) => {
            let s = r.scan.filter(|s| s.kind == ScanKind::Delta && TILED.contains(&file.spec.family))?;
            let moved = match tiled_pick(&s, own) {
                Pick::Rows(rows) => Moved::Rows(rows),
                Pick::Columns { unit, order } => {
                    Moved::Columns(order.iter().flat_map(|h| h * unit..(h + 1) * unit).collect())
                }
                _ => return None,
            };
            Some(if back { moved.back() } else { moved })
        }
    }
}

/// How an adapter in the order `from` gets the model's own order.
pub(super) fn to_model(file: &ModelFile, stem: &str, from: FileOrder) -> Option<Moved> {
    moved(file, stem, from, FileOrder::of(file))
}

/// How an adapter in the model's own order gets that of folders.
pub(super) fn for_folders(file: &ModelFile, stem: &str) -> Option<Moved> {
    moved(file, stem, FileOrder::of(file), FileOrder::Folder)
}

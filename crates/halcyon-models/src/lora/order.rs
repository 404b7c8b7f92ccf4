//! The order of the rows of queries and keys.
//!
//! llama.cpp's files of some families have the rows of a head in the order of the other layout of the
//! rotation, and folders have not. Adapters are stored in the order of the files they belong to.

use crate::export::Turn;
use crate::model::ModelFile;
use crate::rope::Layout;
use crate::source::Source;
use crate::spec::Mixer;

/// Families whose GGUF files have another order than their folders.
const TURNED: &[&str] = &["llama", "mixtral", "granite", "granitehybrid", "smollm3"];

/// Whose order the rows of an adapter have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    Folder,
    Gguf,
}

impl RowOrder {
    fn of(file: &ModelFile) -> RowOrder {
        match file.source {
            Source::Gguf(_) => RowOrder::Gguf,
            Source::Folder(_) => RowOrder::Folder,
        }
    }
}

/// How the rows of the matrix `stem` change from one order to another; `None` if they stay.
fn turn(file: &ModelFile, stem: &str, from: RowOrder, to: RowOrder) -> Option<Turn> {
    let (i, own) = stem.strip_prefix("blk.")?.split_once('.')?;
    if from == to || !matches!(own, "attn_q" | "attn_k") || !TURNED.contains(&file.spec.family) {
        return None;
    }
    let Mixer::Attention(a) = &file.spec.layers.get(i.parse::<usize>().ok()?)?.mixer else { return None };
    let rope = a.rope.as_ref()?;
    let here = if RowOrder::of(file) == RowOrder::Gguf { Layout::Pairs } else { Layout::Half };
    (rope.layout == here).then(|| Turn {
        key: a.key,
        first: 0,
        size: rope.size,
        back: to == RowOrder::Folder,
    })
}

/// `B` `[outputs, rank]`, read in the order `from`, in the model's own order.
pub(super) fn to_model(file: &ModelFile, stem: &str, from: RowOrder, b: Vec<f32>, rows: usize) -> Vec<f32> {
    match turn(file, stem, from, RowOrder::of(file)) {
        Some(t) if rows.is_multiple_of(t.key) => turned(&b, rows, &t),
        _ => b,
    }
}

/// `B` `[outputs, rank]` in the model's own order, as folders have it.
pub(super) fn to_folder(turn: Option<&Turn>, b: Vec<f32>, rows: usize) -> Vec<f32> {
    match turn {
        Some(t) if rows.is_multiple_of(t.key) => turned(&b, rows, t),
        _ => b,
    }
}

/// How rows in the model's own order become those of folders.
pub(super) fn for_folders(file: &ModelFile, stem: &str) -> Option<Turn> {
    turn(file, stem, RowOrder::of(file), RowOrder::Folder)
}

/// The rows of a matrix in the other order.
fn turned(v: &[f32], rows: usize, turn: &Turn) -> Vec<f32> {
    let width = v.len() / rows.max(1);
    turn.rows(rows).into_iter().flat_map(|r| v[r * width..(r + 1) * width].iter().copied()).collect()
}

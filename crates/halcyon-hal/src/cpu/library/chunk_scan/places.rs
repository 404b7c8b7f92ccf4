//! Which places of the chunks are computed.

use super::Operands;
use crate::cpu::library::Fault;
use halcyon_ir::ops::ChunkScanSizes;

/// `i` if it is less than `n > 0`; otherwise the nearest index that is, and a fault is reported. Negative
/// indices count from the end, as in a gather.
pub(super) fn clamped(i: i32, n: usize, fault: Fault<'_>) -> usize {
    crate::cpu::library::strided::place(i64::from(i), n, fault)
}

/// The places of a call.
#[derive(Debug)]
pub(super) struct Places {
    /// For each place, the row that wants it.
    rows: Vec<Option<u32>>,
    /// For each chunk, the number of places to compute, from its first place on.
    pub tops: Vec<usize>,
    /// Whether each chunk changes the matrices.
    pub full: Vec<bool>,
    /// For each kept matrix, its chunk.
    pub kept: Vec<usize>,
    /// Rows that want the place of an earlier row, as `(earlier, row)`.
    pub repeated: Vec<(usize, usize)>,
    chunk: usize,
}

impl Places {
    /// # Safety
    /// The operands have the shapes of `s` and are readable. If there are rows or kept matrices, there are
    /// chunks.
    pub(super) unsafe fn new(s: &ChunkScanSizes, o: &Operands, fault: Fault<'_>) -> Places {
        let chunks = s.depth * s.width;
        let mut rows: Vec<Option<u32>> = vec![None; chunks * s.chunk];
        let mut repeated = vec![];
        // SAFETY: by contract the operands have `chunks`, `kept` and `rows` elements.
        let (full, kept, back) = unsafe {
            (
                std::slice::from_raw_parts(o.full.get(), chunks),
                std::slice::from_raw_parts(o.kept.get(), s.kept),
                std::slice::from_raw_parts(o.back.get(), s.rows),
            )
        };
        let full: Vec<bool> = full.iter().map(|f| *f > 0.5).collect();
        let mut tops: Vec<usize> = full.iter().map(|f| if *f { s.chunk } else { 0 }).collect();
        for (row, place) in back.iter().enumerate() {
            let place = clamped(*place, rows.len(), fault);
            match rows[place] {
                Some(earlier) => repeated.push((earlier as usize, row)),
                None => {
                    rows[place] = Some(row as u32);
                    let top = &mut tops[place / s.chunk];
                    *top = (*top).max(place % s.chunk + 1);
                }
            }
        }
        let kept = kept.iter().map(|c| clamped(*c, chunks, fault)).collect();
        Places { rows, tops, full, kept, repeated, chunk: s.chunk }
    }

    /// The row that wants a place.
    pub(super) fn row(&self, chunk: usize, place: usize) -> Option<usize> {
        self.rows[chunk * self.chunk + place].map(|r| r as usize)
    }

    /// Places that a row wants.
    pub(super) fn wanted(&self) -> usize {
        self.rows.iter().flatten().count()
    }
}

//! How the rows of a step are arranged for recurrent layers.
//!
//! Positions of a sequence form chunks of 16: chunk 0 has the positions 0 to 15. A step touches some
//! chunks of some sequences, and computes them from their first positions on. Earlier rows of a chunk come
//! from a ring of inputs that each sequence keeps, later rows are empty. So the bits of a row depend on the
//! positions of its sequence only, not on how a prompt was cut into steps, nor on other sequences. The price
//! is that on devices without a kernel for `chunk_scan`, a step of one token computes the recurrent part of
//! 16 rows. It computes the matrices after the chunk only if its token is the chunk's last one.
//!
//! A layer keeps the matrices at the beginning of the last two chunks. So a sequence can go back by at least
//! 16 positions.

use crate::engine::Feed;
use halcyon::ir::error::Result;
use halcyon::{Backend, Tensor};

/// Positions of a chunk.
pub(crate) const CHUNK: usize = 16;

/// The most chunks of one sequence in a step. A step's graph has the scan of each.
const MOST: usize = 16;
/// The most rows of one sequence in a step.
pub(crate) const MOST_ROWS: usize = MOST * CHUNK;

/// Rows of inputs that a sequence keeps: two chunks, and what the convolution of the first one sees.
pub(crate) fn ring(kernel: usize) -> usize {
    2 * CHUNK + kernel - 1
}

/// The shortest length to which a sequence of `length` positions can be cut, apart from 0.
pub(crate) fn floor(length: usize) -> usize {
    (length / CHUNK).saturating_sub(1) * CHUNK
}

/// The rows of a step, for recurrent layers. With `d` chunks of each of `w` sequences, a grid has the places
/// `[d, w, CHUNK]`. Tensors are i32 unless their description has another type.
#[derive(Clone, Copy, Debug)]
pub struct Grid<'a> {
    /// `[rows]`: where the row's input is written: `sequence * ring + place`. Row `sequences * ring` and
    /// those after it belong to no sequence.
    pub ring: &'a Tensor,
    /// `[w]`: the sequences.
    pub sequences: &'a Tensor,
    /// `[d * w * (CHUNK + kernel - 1)]`: the input at each place of a chunk and at those before it which the
    /// convolution sees. A number is a row of: the rings of the `w` sequences, the rows of the step, a row of
    /// zeros.
    pub window: &'a Tensor,
    /// f32 `[d * w, CHUNK]`: 1 for places that have a row, else 0.
    pub valid: &'a Tensor,
    /// f32 `[d, w]`: 1 for chunks that are complete after the step, else 0.
    pub full: &'a Tensor,
    /// `[w]`: where the matrices at the beginning of the first chunk are, `2 * sequence + chunk % 2`. If the
    /// chunk begins the sequence, they are 0, as in the last row of the state, which no step writes.
    pub start: &'a Tensor,
    /// `[kept]`: the chunks, as `chunk * w + sequence`, after which matrices are kept: the last two complete
    /// ones of each sequence. `[0]` if no chunk is complete after the step, so that it need not compute them.
    pub kept: &'a Tensor,
    /// `[kept]`: where these matrices are written.
    pub write: &'a Tensor,
    /// `[rows]`: the place of each row.
    pub back: &'a Tensor,
}

impl<'a> Grid<'a> {
    /// Tensors of a grid.
    pub(crate) const COUNT: usize = 9;

    /// The grid of the tensors that [`inputs`] makes.
    pub(crate) fn of(x: &'a [Tensor]) -> Option<Grid<'a>> {
        let [ring, sequences, window, valid, full, start, kept, write, back] = x else { return None };
        Some(Grid { ring, sequences, window, valid, full, start, kept, write, back })
    }
}

/// Rows of one sequence that follow each other.
struct Run {
    sequence: usize,
    /// The number of the first row in the step.
    row: usize,
    /// Its position.
    position: usize,
    count: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.position + self.count
    }

    fn first_chunk(&self) -> usize {
        self.position / CHUNK
    }

    fn chunks(&self) -> usize {
        (self.end() - 1) / CHUNK - self.first_chunk() + 1
    }
}

/// The tensors of a [`Grid`] for rows `(sequence, position)` of a step that is filled up to `padded` rows.
/// Rows of a sequence follow each other. `slots` is the number of sequences of the engine.
pub(crate) fn inputs(
    backend: &Backend,
    rows: &[(usize, usize)],
    padded: usize,
    slots: usize,
    kernel: usize,
) -> Result<Vec<Tensor>> {
    let mut runs: Vec<Run> = vec![];
    for (row, &(sequence, position)) in rows.iter().enumerate() {
        match runs.last_mut() {
            Some(r) if r.sequence == sequence => r.count += 1,
            _ => runs.push(Run { sequence, row, position, count: 1 }),
        }
    }
    let depth = runs.iter().map(Run::chunks).max().unwrap_or(1).next_power_of_two();
    let width = runs.len().max(1).next_power_of_two();
    let (size, lead) = (ring(kernel), kernel - 1);
    let zero = (width * size + padded) as i32;
    let mut to_ring = vec![(slots * size) as i32; padded];
    let mut sequences = vec![slots as i32; width];
    let mut window = vec![zero; depth * width * (CHUNK + lead)];
    let mut valid = vec![0f32; depth * width * CHUNK];
    let mut full = vec![0f32; depth * width];
    let (none, zeros) = (2 * slots as i32, 2 * slots as i32 + 1);
    let mut start = vec![zeros; width];
    let some = depth.min(2) * width;
    let (mut kept, mut write) = (vec![0i32; some], vec![none; some]);
    let mut back = vec![0i32; padded];
    for (w, run) in runs.iter().enumerate() {
        let first = run.first_chunk();
        sequences[w] = run.sequence as i32;
        if first > 0 {
            start[w] = (2 * run.sequence + first % 2) as i32;
        }
        let complete = run.end() / CHUNK - first;
        for d in 0..run.chunks() {
            let (at, begin) = (d * width + w, (first + d) * CHUNK);
            for j in 0..CHUNK + lead {
                // Places before the first position and after the last one have no input.
                let Some(p) = (begin + j).checked_sub(lead).filter(|p| *p < run.end()) else { continue };
                let from = match p.checked_sub(run.position) {
                    Some(i) => width * size + run.row + i,
                    None => w * size + p % size,
                };
                window[at * (CHUNK + lead) + j] = from as i32;
                if j >= lead {
                    valid[at * CHUNK + j - lead] = 1.0;
                }
            }
            if d < complete {
                full[at] = 1.0;
                if d + 2 >= complete {
                    let place = (complete - 1 - d) * width + w;
                    kept[place] = at as i32;
                    write[place] = (2 * run.sequence + (first + d + 1) % 2) as i32;
                }
            }
        }
        for i in 0..run.count {
            let p = run.position + i;
            let chunk = p / CHUNK - first;
            back[run.row + i] = ((chunk * width + w) * CHUNK + p % CHUNK) as i32;
            // Earlier rows would be overwritten by later ones of the step.
            if i + size >= run.count {
                to_ring[run.row + i] = (run.sequence * size + p % size) as i32;
            }
        }
    }
    if full.iter().all(|f| *f == 0.0) {
        kept.clear();
        write.clear();
    }
    let ints = |dims: &[usize], v: &[i32]| Tensor::from_slice(backend, dims, v);
    let floats = |dims: &[usize], v: &[f32]| Tensor::from_slice(backend, dims, v);
    Ok(vec![
        ints(&[padded], &to_ring)?,
        ints(&[width], &sequences)?,
        ints(&[window.len()], &window)?,
        floats(&[depth * width, CHUNK], &valid)?,
        floats(&[depth, width], &full)?,
        ints(&[width], &start)?,
        ints(&[kept.len()], &kept)?,
        ints(&[write.len()], &write)?,
        ints(&[padded], &back)?,
    ])
}

/// The steps `(feed, token of the feed)` in which a model with recurrent layers computes feeds. `lengths` are
/// those of the sequences before. A step has either rows of one sequence, or rows of several sequences of
/// which none goes beyond its chunk: with both, most of a grid would be empty.
pub(crate) fn steps(feeds: &[Feed<'_>], lengths: &[usize], chunk: usize) -> Vec<Vec<(usize, usize)>> {
    let (mut steps, mut short) = (vec![], vec![]);
    for (f, (feed, length)) in feeds.iter().zip(lengths).enumerate() {
        let n = feed.tokens.len();
        if length % CHUNK + n <= CHUNK && n <= chunk {
            short.push((f, n));
            continue;
        }
        let mut at = 0;
        while at < n {
            let room = MOST * CHUNK - (length + at) % CHUNK;
            let count = room.min(chunk).min(n - at);
            steps.push((at..at + count).map(|i| (f, i)).collect());
            at += count;
        }
    }
    let mut step: Vec<(usize, usize)> = vec![];
    for (f, n) in short {
        if step.len() + n > chunk {
            steps.push(std::mem::take(&mut step));
        }
        step.extend((0..n).map(|i| (f, i)));
    }
    if !step.is_empty() {
        steps.push(step);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::BackendType;

    /// After which chunks a step writes matrices, where, and where it reads them.
    fn rows_of(rows: &[(usize, usize)]) -> [Vec<i32>; 3] {
        let b = Backend::new(BackendType::Cpu).unwrap();
        let made = inputs(&b, rows, rows.len().next_power_of_two(), 3, 4).unwrap();
        let grid = Grid::of(&made).unwrap();
        [grid.kept, grid.write, grid.start].map(|t| t.to_vec().unwrap())
    }

    #[test]
    fn only_complete_chunks_write_matrices() {
        // The second chunk of sequence 1, and the first one of sequence 2.
        let rows = [(1, 20), (2, 3)];
        assert_eq!(rows_of(&rows), [vec![], vec![], vec![3, 7]]);
        let rows = [(1, 20), (2, 15)];
        assert_eq!(rows_of(&rows), [vec![0, 1], vec![6, 5], vec![3, 7]]);
        let rows: Vec<(usize, usize)> = (0..40).map(|p| (0, p)).collect();
        assert_eq!(rows_of(&rows), [vec![1, 0], vec![0, 1], vec![7]]);
    }
}

//! Whole sequences without states, as training needs them: the same scan from empty matrices, in longer
//! chunks.
//!
//! Sequences end within a chunk. The places after the end come last, so no row reads them, and what they hold
//! needs only be finite: their inputs are zeros.

use super::{Masks, RecurrentWeights, last};
use crate::spec::Recurrent;
use halcyon::ir::error::Result;
use halcyon::{DType, Tensor};

/// The most positions of a chunk. The graph has a part for each chunk, and a chunk has squares of its size.
const LONGEST: usize = 64;

impl RecurrentWeights {
    /// The results `[rows, hidden]` for the rows of whole sequences of `length` positions, one sequence after
    /// the other. Gradients flow through them.
    ///
    /// # Errors
    /// `Error::Shape` if the rows are not whole sequences.
    pub(in crate::decoder) fn whole(&self, r: &Recurrent, x: &Tensor, length: usize) -> Result<Tensor> {
        let rows = x.dims()?[0];
        let batch = rows / length.max(1);
        let (input, gate) = self.project(r, x);
        // Before a sequence, the convolution sees zeros.
        let input = input.reshape([batch, length, last(&input)]);
        let window = input.pad(&[0, r.kernel - 1, 0], &[0, 0, 0], 0.0);
        let Some((s, w)) = r.scan.as_ref().zip(self.scan.as_ref()) else {
            let hidden = last(&input);
            let y = self.convolution.apply(&window, hidden).reshape([rows, hidden]);
            return Ok(self.output.apply(&(gate * y)));
        };
        let size = length.next_power_of_two().min(LONGEST);
        let (count, inner) = (length.div_ceil(size), s.heads * s.value);
        // `[batch, length, channels]` as `[count * batch, size, channels]`, chunk by chunk.
        let chunks = |t: &Tensor| {
            let channels = last(t);
            let filled = t.pad(&[0, 0, 0], &[0, count * size - length, 0], 0.0);
            let by_chunk = filled.reshape([batch, count, size, channels]).permute(&[1, 0, 2, 3]);
            by_chunk.reshape([count * batch, size, channels])
        };
        let mixed = self.convolution.apply(&window, s.channels()).silu();
        let extras = input.narrow(2, s.channels(), s.extras());
        let inputs = w.values.inputs(s, &chunks(&mixed), &chunks(&extras), None);
        let ([a, b], _) = s.axes();
        let start = Tensor::zeros(x.backend(), [batch, a, b, s.key, s.value], DType::F32);
        let (y, _) = inputs.scan(s, &Masks::new(x.backend(), size)?, None, start);
        let y = y.reshape([count, batch, s.heads, size, s.value]).permute(&[1, 0, 3, 2, 4]);
        let y = y.reshape([batch, count * size, inner]).narrow(1, 0, length).reshape([rows, inner]);
        let y = w.values.skipped(s, y, &mixed);
        Ok(self.output.apply(&w.normed(s, y, gate)))
    }
}

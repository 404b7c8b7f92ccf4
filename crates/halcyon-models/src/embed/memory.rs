//! The memory that embeddings take.

use super::{Embedder, Model, SEQUENCES, engine_options};
use crate::decoder::Decoder;
use crate::engine::stages::{Kind, Want};
use crate::fit::{MemoryNeed, generation};
use halcyon::ir::error::{Error, Result};

impl Embedder {
    /// Refuses texts whose embeddings take more memory than the device has free, if the model has computed
    /// nothing yet. Weights are not read, and nothing stays allocated.
    ///
    /// # Errors
    /// `Error::OutOfMemory` with what to change; errors of planning.
    pub fn check_memory(&self, texts: &[&[u32]]) -> Result<()> {
        let device = self.backend().device();
        let Some(free) = device.available() else { return Ok(()) };
        let longest = texts.iter().map(|t| t.len()).max().unwrap_or(0);
        let (weights, rest) = match &self.model {
            Model::Encoder(e) => e.need(texts)?,
            Model::Decoder(d, _) => of_decoder(d, longest)?,
        };
        let requested = weights.saturating_add(rest);
        if requested <= free {
            return Ok(());
        }
        Err(Error::OutOfMemory {
            device: self.backend().id().to_string(),
            what: format!("the model: weights {weights}, buffers for texts of up to {longest} tokens {rest}"),
            requested,
            free,
            total: device.memory().limit.or(device.info().total_memory).unwrap_or(free),
            next: match weights < free {
                true => "Give a smaller --max-tokens, or use weights in a smaller type".into(),
                false => "Use weights in a smaller type (halcyon quantize), or another device".into(),
            },
        })
    }
}

/// Bytes of the weights, and of everything else.
fn of_decoder(decoder: &Decoder, longest: usize) -> Result<(u64, u64)> {
    let options = engine_options(longest);
    // The first kind of steps has a chunk of rows, of which all may be wanted.
    let mut steps = generation(decoder, options);
    steps.truncate(1);
    for s in &mut steps {
        (s.logits, s.sequences) = (s.rows, SEQUENCES.min(s.rows));
    }
    let need = MemoryNeed::of_results(
        decoder,
        decoder.placement().head,
        options,
        &steps,
        Want::only(Kind::Activations),
    )?;
    let weights = need.copied.saturating_add(need.packed);
    Ok((weights, need.device().saturating_sub(weights)))
}

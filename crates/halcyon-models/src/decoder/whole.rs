//! Whole sequences without a cache, as training needs them: ordinary attention, with gradients.

use super::attention::AttentionStep;
use super::run::StageStates;
use super::{CacheLayout, Decoder, Rows};
use halcyon::ir::error::{Error, Result};
use halcyon::{ConstData, DType, Tensor};

impl Decoder {
    /// The logits after each token of whole sequences, f32 `[batch * length, vocabulary]`. `tokens` is i32
    /// `[batch, length]`. Nothing is cached, and gradients flow to the adapters (see [`crate::lora`]).
    ///
    /// # Errors
    /// `Error::Shape` if `tokens` has other axes; `Error::Argument` for sequences longer than the context;
    /// `Error::Unsupported` for models on several devices.
    pub fn sequence_logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let dims = tokens.dims()?;
        let [batch, length] = dims[..] else {
            return Err(Error::shape("sequence_logits", format!("{dims:?}: expected [batch, length]")));
        };
        if length == 0 || length > self.context() {
            let what = format!("{length} tokens, but the context has {}", self.context());
            return Err(Error::argument("sequence_logits", what));
        }
        if self.stages.len() > 1 {
            let what = format!("training on {} devices", self.placement.devices.len());
            return Err(Error::unsupported(what, "Load the model on one device"));
        }
        let b = tokens.backend();
        let constant = |dims: &[usize], v: &[f32]| -> Result<Tensor> {
            Ok(Tensor::constant(b, &ConstData::from_slice(dims, v)?))
        };
        let positions: Vec<i32> = (0..batch).flat_map(|_| 0..length as i32).collect();
        let position = Tensor::constant(b, &ConstData::from_slice(&[batch * length], &positions)?);
        let lengths = vec![length; batch * length];
        let mut rotations = vec![];
        for rope in self.ropes() {
            let (cos, sin) = rope.rotations(&positions, &lengths);
            for v in [cos, sin] {
                rotations.push(constant(&[batch * length, rope.size / 2], &v)?);
            }
        }
        let tokens = &tokens.reshape([batch * length]);
        // Without a cache, only tokens, positions and rotations matter.
        let (none, position) = (&position, &position);
        let rows = Rows {
            tokens,
            position,
            sequence: none,
            slot: none,
            table: none,
            wanted: none,
            rotations: &rotations,
            grid: None,
            before: None,
        };
        let layout = CacheLayout { pages: 0, page: length, types: DType::F32.into(), sequences: batch };
        let states = vec![none.clone(); self.cache_shapes(layout).len()];
        let (handed, _) = self.run(0, None, rows, StageStates { own: &states, shared: &[], layout });
        Ok(self.logits(&self.finished(&handed.x)))
    }
}

impl AttentionStep<'_> {
    /// Whether the rows are whole sequences.
    pub(super) fn is_whole(&self) -> bool {
        self.layout.pages == 0
    }

    /// Attention of the queries `[rows, heads, size]` over the keys `[rows * shared, size]` and values of
    /// their own sequence, up to their own position. f32 `[rows, heads, value size]`.
    pub(super) fn attend_whole(
        &self,
        q: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        sinks: Option<&Tensor>,
    ) -> Tensor {
        let (a, length, n) = (self.a, self.layout.page, self.count());
        let (batch, shared, group) = (n / length, a.shared, a.heads / a.shared);
        let size = values.dims().map_or(a.value, |d| d[1]);
        let by_head =
            |t: &Tensor, size: usize| t.reshape([batch, length, shared, size]).permute(&[0, 2, 1, 3]);
        let q = q.reshape([batch, length, shared, group, a.key]).permute(&[0, 2, 3, 1, 4]);
        let q = q.reshape([batch, shared, group * length, a.key]);
        let scores = q.matmul(&by_head(keys, a.key).transpose(-1, -2)) * a.scale;
        let scores = match a.softcap {
            Some(cap) => (scores / cap).tanh() * cap,
            None => scores,
        };
        let scores = scores.reshape([batch, shared, group, length, length]) + self.mask(&scores, length);
        let p = match sinks {
            None => scores.softmax(-1),
            // The sink takes part in the softmax and has no value.
            Some(s) => {
                let s = s.reshape([1, shared, group, 1, 1]).expand([batch, shared, group, length, 1]);
                Tensor::cat(&[&scores, &s], 4).softmax(-1).narrow(-1, 0, length)
            }
        };
        let y = p.reshape([batch, shared, group * length, length]).matmul(&by_head(values, size));
        let y = y.reshape([batch, shared, group, length, size]).permute(&[0, 3, 1, 2, 4]);
        y.reshape([n, a.heads, size])
    }

    /// Added to scores: 0 for positions that a row sees, and a number that leaves no weight for others.
    fn mask(&self, scores: &Tensor, length: usize) -> Tensor {
        let window = self.a.window.unwrap_or(length);
        let sees = |row: usize, at: usize| at <= row && row - at < window;
        let values = (0..length * length).map(|i| if sees(i / length, i % length) { 0.0 } else { -1e30f32 });
        let values: Vec<f32> = values.collect();
        let shape = [1, 1, 1, length, length];
        match ConstData::from_slice(&shape, &values) {
            Ok(c) => Tensor::constant(scores.backend(), &c),
            Err(_) => Tensor::zeros(scores.backend(), shape, DType::F32),
        }
    }
}

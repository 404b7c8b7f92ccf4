//! What an adapter adds to its matrix, on the host.

use super::{Adapter, Lora};
use halcyon::ir::error::Result;
use halcyon::{ConstData, DType};
use halcyon_nn::Param;
use std::collections::BTreeMap;

/// `scale B A` as its two factors.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    rank: usize,
    /// `[rank, inputs]`.
    a: Vec<f32>,
    /// `scale B`, `[outputs, rank]`.
    b: Vec<f32>,
}

impl Difference {
    pub(super) fn of(adapter: &Adapter) -> Result<Difference> {
        let values = |p: &Param| p.value().cast(DType::F32).to_vec::<f32>();
        let mut b = values(&adapter.b)?;
        b.iter_mut().for_each(|v| *v *= adapter.scale);
        Ok(Difference { rank: adapter.rank()?, a: values(&adapter.a)?, b })
    }

    /// Adds the product to a matrix `[outputs, inputs]`, row after row.
    pub(crate) fn add_to(&self, matrix: &mut [f32]) {
        let inputs = self.a.len() / self.rank;
        let mut sums = vec![0f64; inputs];
        for (row, b) in matrix.chunks_exact_mut(inputs).zip(self.b.chunks_exact(self.rank)) {
            sums.fill(0.0);
            for (b, a) in b.iter().zip(self.a.chunks_exact(inputs)) {
                sums.iter_mut().zip(a).for_each(|(s, a)| *s += f64::from(*b) * f64::from(*a));
            }
            row.iter_mut().zip(&sums).for_each(|(v, s)| *v = (f64::from(*v) + s) as f32);
        }
    }

    /// A matrix of floats with the product added, in f32.
    pub(crate) fn added(&self, dims: &[usize], mut values: Vec<f32>) -> Result<ConstData> {
        self.add_to(&mut values);
        ConstData::from_slice(dims, &values)
    }
}

impl Lora {
    /// What each adapter adds, by the canonical name of its matrix.
    pub(crate) fn differences(&self) -> Result<BTreeMap<String, Difference>> {
        let one = |(stem, a): (&String, &Adapter)| Ok((stem.clone(), Difference::of(a)?));
        self.adapters.iter().map(one).collect()
    }

    /// The name in Hugging Face's layout of each matrix with an adapter, by its canonical name.
    pub(crate) fn modules(&self) -> &BTreeMap<String, String> {
        &self.names
    }
}

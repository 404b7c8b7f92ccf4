//! What an adapter adds to its matrix, on the host.

use super::{Adapter, Lora};
use halcyon::ir::error::Result;
use halcyon::{ConstData, DType};
use halcyon_nn::Param;
use std::collections::BTreeMap;

/// `scale B A` as its two factors, perhaps for each of several experts.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    experts: usize,
    rank: usize,
    /// `[experts, rank, inputs]`.
    a: Vec<f32>,
    /// `scale B`, `[experts, outputs, rank]`.
    b: Vec<f32>,
}

impl Difference {
    pub(super) fn of(adapter: &Adapter) -> Result<Difference> {
        let values = |p: &Param| p.value().cast(DType::F32).to_vec::<f32>();
        let mut b = values(&adapter.b)?;
        b.iter_mut().for_each(|v| *v *= adapter.scale);
        let dims = adapter.a.value().dims()?;
        let experts = if dims.len() > 2 { dims[0] } else { 1 };
        Ok(Difference { experts, rank: adapter.rank()?, a: values(&adapter.a)?, b })
    }

    /// That of a matrix of `all` rows, of which each part has some, or all of them. The products of rows that
    /// several parts have are added.
    pub(crate) fn joined(parts: Vec<(Difference, Option<Vec<usize>>)>, all: usize) -> Difference {
        let rank: usize = parts.iter().map(|(d, _)| d.rank).sum();
        let (mut a, mut b, mut first) = (vec![], vec![0.0; all * rank], 0);
        for (d, rows) in parts {
            let rows = rows.unwrap_or_else(|| (0..all).collect());
            for (row, values) in rows.into_iter().zip(d.b.chunks_exact(d.rank)) {
                b[row * rank + first..][..d.rank].copy_from_slice(values);
            }
            a.extend(d.a);
            first += d.rank;
        }
        Difference { experts: 1, rank, a, b }
    }

    /// That of the transposed matrix, of one without experts.
    pub(crate) fn turned(&self) -> Difference {
        let turn = |x: &[f32], columns: usize| -> Vec<f32> {
            (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
        };
        let (a, b) = (turn(&self.b, self.rank), turn(&self.a, self.a.len() / self.rank));
        Difference { a, b, ..*self }
    }

    /// That of each expert.
    pub(crate) fn of_experts(&self) -> impl Iterator<Item = Difference> {
        let (a, b) = (self.a.len() / self.experts, self.b.len() / self.experts);
        self.a.chunks_exact(a.max(1)).zip(self.b.chunks_exact(b.max(1))).map(|(a, b)| Difference {
            experts: 1,
            rank: self.rank,
            a: a.to_vec(),
            b: b.to_vec(),
        })
    }

    /// Adds the products to matrices `[experts, outputs, inputs]`, row after row.
    pub(crate) fn add_to(&self, matrix: &mut [f32]) {
        let one = self.a.len() / self.experts;
        let inputs = one / self.rank;
        let outputs = self.b.len() / self.experts / self.rank;
        let mut sums = vec![0f64; inputs];
        for (i, (row, b)) in matrix.chunks_exact_mut(inputs).zip(self.b.chunks_exact(self.rank)).enumerate() {
            sums.fill(0.0);
            let first = i / outputs.max(1) * one;
            for (b, a) in b.iter().zip(self.a[first..first + one].chunks_exact(inputs)) {
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
}

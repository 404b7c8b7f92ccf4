//! Several adapters of one model, each with a factor.

use super::{Adapter, Lora};
use crate::model::ModelFile;
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, DType, Tensor};
use halcyon_nn::Param;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The factors `A` and `B` of a sum of products, side by side, for each expert or for one matrix.
struct Sum {
    rank: usize,
    /// Axes before the last two: none, or the experts.
    lead: Vec<usize>,
    inputs: usize,
    outputs: usize,
    /// The rank of each product, `A` `[experts, rank, inputs]` and `B` `[experts, outputs, rank]`.
    parts: Vec<(usize, Vec<f32>, Vec<f32>)>,
}

impl Sum {
    fn add(&mut self, adapter: &Adapter, factor: f32) -> Result<()> {
        let values = |p: &Param| p.value().cast(DType::F32).to_vec::<f32>();
        let mut b = values(&adapter.b)?;
        b.iter_mut().for_each(|v| *v *= adapter.scale * factor);
        let rank = adapter.rank()?;
        self.parts.push((rank, values(&adapter.a)?, b));
        self.rank += rank;
        Ok(())
    }

    /// One adapter of `rank`, which is at least the sum of all ranks. The rest is zeros.
    fn adapter(self, backend: &Backend, rank: usize) -> Result<Adapter> {
        let experts: usize = self.lead.iter().product();
        let (mut a, mut b) = (vec![], vec![]);
        for e in 0..experts {
            for (n, v, _) in &self.parts {
                a.extend_from_slice(&v[e * n * self.inputs..(e + 1) * n * self.inputs]);
            }
            a.resize((e + 1) * rank * self.inputs, 0.0);
        }
        for row in 0..experts * self.outputs {
            self.parts.iter().for_each(|(n, _, v)| b.extend_from_slice(&v[row * n..(row + 1) * n]));
            b.resize((row + 1) * rank, 0.0);
        }
        let dims = |last: [usize; 2]| [&self.lead[..], &last[..]].concat();
        Ok(Adapter {
            a: Param::new(Tensor::from_slice(backend, dims([rank, self.inputs]), &a)?),
            b: Param::new(Tensor::from_slice(backend, dims([self.outputs, rank]), &b)?),
            scale: 1.0,
        })
    }
}

impl Lora {
    /// The adapters that add `factor` times what each of `parts` adds. `None` if there are no parts. A part
    /// alone with the factor 1 stays as it is, and the others get one rank.
    ///
    /// # Errors
    /// `Error::Argument` for a factor that is not finite; `Error::Shape` for adapters of different models;
    /// the error of a failed value.
    pub fn sum(mut parts: Vec<(Lora, f32)>, backend: &Backend) -> Result<Option<Lora>> {
        if let Some((_, f)) = parts.iter().find(|(_, f)| !f.is_finite()) {
            return Err(Error::argument("lora", format!("the scale {f}: expected a finite number")));
        }
        if parts.len() == 1 && parts[0].1 == 1.0 {
            return Ok(parts.pop().map(|(l, _)| l));
        }
        let (mut sums, mut names) = (BTreeMap::<String, Sum>::new(), BTreeMap::new());
        for (lora, factor) in &parts {
            for (stem, adapter) in &lora.adapters {
                let (down, up) = (adapter.a.value().dims()?, adapter.b.value().dims()?);
                let ([lead @ .., _, inputs], [.., outputs, _]) = (&down[..], &up[..]) else { continue };
                let (inputs, outputs) = (*inputs, *outputs);
                let new = || Sum { rank: 0, lead: lead.to_vec(), inputs, outputs, parts: vec![] };
                let sum = sums.entry(stem.clone()).or_insert_with(new);
                if (sum.inputs, sum.outputs, &sum.lead[..]) != (inputs, outputs, lead) {
                    let what = format!("the adapters of '{stem}' belong to matrices of different sizes");
                    return Err(Error::shape("lora", what));
                }
                sum.add(adapter, *factor)?;
            }
            names.extend(lora.names.clone());
        }
        let rank = sums.values().map(|s| s.rank).max().unwrap_or(0);
        let places = parts.iter().flat_map(|(l, _)| l.parts.clone()).collect();
        let turns = parts.into_iter().flat_map(|(l, _)| l.turns).collect();
        let one = |(stem, s): (String, Sum)| Ok((stem, s.adapter(backend, rank)?));
        let adapters = sums.into_iter().map(one).collect::<Result<BTreeMap<_, _>>>()?;
        Ok((rank > 0).then_some(Lora { adapters, names, turns, parts: places, rank, alpha: rank as f32 }))
    }

    /// Reads adapters from several places, each with a factor, as one. `None` if there are no places. With
    /// [`LoadOptions::fixed`](crate::LoadOptions::fixed), `backend` may be the CPU whatever the model's is.
    ///
    /// # Errors
    /// Those of [`Lora::load`] and [`Lora::sum`].
    pub fn load_all(places: &[(PathBuf, f32)], file: &ModelFile, backend: &Backend) -> Result<Option<Lora>> {
        let read = |(path, f): &(PathBuf, f32)| Ok((Lora::load(path, file, backend)?, *f));
        Lora::sum(places.iter().map(read).collect::<Result<_>>()?, backend)
    }
}

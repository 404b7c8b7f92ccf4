//! Low-rank adapters (LoRA, Hu et al. 2021): each adapted matrix `W` computes `W x + scale B A x`, and only
//! `A` and `B` are trained. Files have the format of PEFT (`adapter_model.safetensors` and
//! `adapter_config.json`) or are GGUF files as llama.cpp has them.

mod difference;
mod files;
mod gguf;
mod order;
mod parts;
mod several;

pub(crate) use difference::Difference;

use crate::model::ModelFile;
use crate::sample::uniform;
use crate::source::{Weights, gguf as gguf_source};
use halcyon::ir::error::{Error, Result};
use halcyon::{Backend, ConstData, DType, Tensor};
use halcyon_nn::{Module, Param};
use order::Moved;
use parts::Part;
use std::collections::BTreeMap;

/// Matrices that can have an adapter, by their names in a layer.
const STEMS: [&str; 26] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_a",
    "attn_q_b",
    "attn_kv_a_mqa",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ffn_gate_inp",
    "attn_kv_b",
    "attn_qkv",
    "attn_gate",
    "ssm_beta",
    "ssm_alpha",
    "ssm_in",
    "ssm_out",
    "shortconv.in_proj",
    "shortconv.out_proj",
    "ffn_gate_shexp",
    "ffn_up_shexp",
    "ffn_down_shexp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
];

/// The matrix with this canonical name.
fn matrix(file: &ModelFile, stem: &str) -> Result<Option<Weights>> {
    let found = file.source.find(&file.spec, &format!("{stem}.weight"))?;
    let layer = stem.strip_suffix(".ffn_up").and_then(|s| s.strip_prefix("blk.")?.parse::<usize>().ok());
    // Phi-3's files have gate and up projection in one tensor.
    match (found, layer.and_then(|i| file.spec.layers.get(i))) {
        (Some(w), Some(l)) => gguf_source::up_of_joined(w, l.inner).map(Some),
        (found, _) => Ok(found),
    }
}

/// How adapters are made.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    /// Rows of `A`.
    pub rank: usize,
    /// The products are multiplied by `alpha / rank`.
    pub alpha: f32,
    /// Patterns (globs) of the matrices that get an adapter: the last part of their names in Hugging Face's
    /// layout, such as `q_proj` or `*_proj`.
    pub targets: Vec<String>,
    /// Seed of the first values of `A`; `B` begins with zeros.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> LoraOptions {
        LoraOptions { rank: 8, alpha: 16.0, targets: vec!["q_proj".into(), "v_proj".into()], seed: 0 }
    }
}

/// The adapter of one matrix, or of the matrices of all experts of a layer.
#[derive(Clone, Debug, Module)]
pub struct Adapter {
    /// f32 `[rank, inputs]`, or `[experts, rank, inputs]`.
    pub a: Param,
    /// f32 `[outputs, rank]`, or `[experts, outputs, rank]`.
    pub b: Param,
    #[module(skip)]
    scale: f32,
}

impl Adapter {
    /// The adapter's product for rows `[n, inputs]`.
    pub(crate) fn apply(&self, x: &Tensor) -> Tensor {
        x.row_matmul(&self.a.value(), None, None).row_matmul(&self.b.value(), None, None) * self.scale
    }

    /// The product for rows of which each has its own expert.
    pub(crate) fn apply_which(&self, x: &Tensor, which: &Tensor) -> Tensor {
        let inner = x.row_matmul(&self.a.value(), None, Some(which));
        inner.row_matmul(&self.b.value(), None, Some(which)) * self.scale
    }

    /// A copy as constants of any backend, which does not follow the training of this one. The device's
    /// memory is taken when the first plan is made.
    pub(crate) fn fixed_on(&self, backend: &Backend) -> Result<Adapter> {
        let copy = |p: &Param| Ok::<_, Error>(Param::new(Tensor::constant(backend, &p.value().to_data()?)));
        Ok(Adapter { a: copy(&self.a)?, b: copy(&self.b)?, scale: self.scale })
    }

    /// The rank.
    ///
    /// # Errors
    /// The error of a failed value.
    pub fn rank(&self) -> Result<usize> {
        let dims = self.a.value().dims()?;
        Ok(dims[dims.len() - 2])
    }

    /// Fails unless the adapter fits a matrix of `dims`.
    pub(crate) fn check(&self, stem: &str, dims: &[usize]) -> Result<()> {
        let (a, b) = (self.a.value().dims()?, self.b.value().dims()?);
        let fits = match (dims, &a[..], &b[..]) {
            (&[n, k], &[r, inputs], &[outputs, s]) => (n, k, r) == (outputs, inputs, s),
            (&[e, n, k], &[f, r, inputs], &[g, outputs, s]) => (e, e, n, k, r) == (f, g, outputs, inputs, s),
            _ => false,
        };
        match fits {
            true => Ok(()),
            false => {
                let what =
                    format!("the adapter of '{stem}' is {b:?} times {a:?}, but the matrix is {dims:?}");
                Err(Error::shape("lora", what))
            }
        }
    }
}

/// The adapters of a model. As a module, it has the adapters' parameters only, so optimizers leave the
/// model's own weights as they are.
#[derive(Clone, Debug, Module)]
pub struct Lora {
    /// By the canonical name of the matrix, such as `blk.0.attn_q`.
    adapters: BTreeMap<String, Adapter>,
    /// The names in Hugging Face's layout, by canonical name.
    #[module(skip)]
    names: BTreeMap<String, String>,
    /// How adapters get the order of folders, where the model's file has another one.
    #[module(skip)]
    turns: BTreeMap<String, Moved>,
    /// Where matrices are in modules that have several, or that folders store transposed.
    #[module(skip)]
    parts: BTreeMap<String, Part>,
    #[module(skip)]
    rank: usize,
    #[module(skip)]
    alpha: f32,
}

impl Lora {
    /// New adapters for the matrices of a model that match the options' patterns. They do not change the
    /// model's results before they are trained.
    ///
    /// # Errors
    /// `Error::Argument` for a rank of 0, a malformed pattern, or patterns that no matrix matches;
    /// `Error::Unsupported` for a matrix that the model's files store together with another one.
    pub fn new(file: &ModelFile, backend: &Backend, options: &LoraOptions) -> Result<Lora> {
        if options.rank == 0 || !options.alpha.is_finite() {
            return Err(Error::argument("lora", format!("{options:?}: expected a rank of at least 1")));
        }
        let pattern = |t: &String| {
            glob::Pattern::new(t).map_err(|e| Error::argument("lora", format!("pattern '{t}': {e}")))
        };
        let patterns = options.targets.iter().map(pattern).collect::<Result<Vec<_>>>()?;
        let mut lora = Lora {
            adapters: BTreeMap::new(),
            names: BTreeMap::new(),
            turns: BTreeMap::new(),
            parts: BTreeMap::new(),
            rank: options.rank,
            alpha: options.alpha,
        };
        let mut seen = vec![];
        let (modules, mut places) = (files::modules(file), parts::of(file)?);
        for (stem, module) in modules {
            // A module that has several matrices would have one adapter for all of them.
            let place = places.remove(&stem);
            if place.as_ref().is_some_and(|p| p.rows.is_some()) {
                continue;
            }
            let name = module.name;
            let last = name.rsplit('.').next().unwrap_or_default();
            seen.push(last.to_string());
            if !patterns.iter().any(|p| p.matches(last)) {
                continue;
            }
            let Some(w) = matrix(file, &stem)? else { continue };
            let dims = w.dims();
            let [lead @ .., outputs, inputs] = &dims[..] else { continue };
            let (outputs, inputs) = (*outputs, *inputs);
            let bound = 1.0 / (inputs as f64).sqrt();
            // Each matrix has draws of its own, whatever else has an adapter.
            let seed = stem.bytes().fold(options.seed, |s, b| s.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
            let draw = |i: usize| ((2.0 * uniform(seed, i as u64) - 1.0) * bound) as f32;
            let (down, up) =
                ([lead, &[options.rank, inputs]].concat(), [lead, &[outputs, options.rank]].concat());
            let a: Vec<f32> = (0..down.iter().product()).map(draw).collect();
            let adapter = Adapter {
                a: Param::new(Tensor::from_slice(backend, &down[..], &a)?),
                b: Param::new(Tensor::zeros(backend, &up[..], DType::F32)),
                scale: options.alpha / options.rank as f32,
            };
            lora.names.insert(stem.clone(), name);
            lora.turns.extend(order::for_folders(file, &stem).map(|t| (stem.clone(), t)));
            lora.parts.extend(place.map(|p| (stem.clone(), p)));
            lora.adapters.insert(stem, adapter);
        }
        if lora.adapters.is_empty() {
            seen.sort();
            seen.dedup();
            let what = format!("no matrix matches {:?}; the model has {seen:?}", options.targets);
            return Err(Error::argument("lora", what));
        }
        Ok(lora)
    }

    /// Bytes of the adapters' values.
    ///
    /// # Errors
    /// The error of a failed value.
    pub fn bytes(&self) -> Result<u64> {
        let size = |p: &Param| Ok::<_, Error>(DType::F32.bytes(p.value().dims()?.iter().product()) as u64);
        self.adapters.values().try_fold(0u64, |sum, a| Ok(sum.saturating_add(size(&a.a)? + size(&a.b)?)))
    }

    /// The adapter of the matrix with this canonical name.
    pub fn adapter(&self, stem: &str) -> Option<&Adapter> {
        self.adapters.get(stem)
    }

    /// The canonical names of the matrices with an adapter.
    pub fn matrices(&self) -> impl Iterator<Item = &str> {
        self.adapters.keys().map(String::as_str)
    }

    /// The matrix `stem` with the adapter's product added, in f32; `None` if it has no adapter.
    ///
    /// # Errors
    /// `Error::Shape` if the adapter does not fit; errors of reading.
    pub fn merged(&self, file: &ModelFile, stem: &str) -> Result<Option<ConstData>> {
        let Some(adapter) = self.adapters.get(stem) else { return Ok(None) };
        let w = matrix(file, stem)?
            .ok_or_else(|| Error::argument("lora", format!("the model has no matrix '{stem}'")))?;
        let dims = w.dims();
        adapter.check(stem, &dims)?;
        Difference::of(adapter)?.added(&dims, w.floats()?).map(Some)
    }
}

//! Where a new folder stores the tensors: the inverse of [`super::names`].

use super::folder::Recipe;
use super::names::recipes;
use crate::spec::{Order, Spec};

/// A tensor of a folder, and how the elements of a canonical tensor are arranged in it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The tensor's name.
    pub(crate) name: String,
    /// The number of the expert whose matrix this is, if each has a tensor of its own.
    pub(crate) expert: Option<usize>,
    /// The sizes that the tensor has at least. Another part of it may need more.
    pub(crate) dims: Vec<usize>,
    arrange: Arrange,
}

#[derive(Clone, Debug)]
enum Arrange {
    /// All elements, in their order.
    Whole,
    /// `v` as the logarithm of `-v`.
    MinusLog,
    /// From this row on.
    Rows(usize),
    /// The transpose, from this column on.
    Columns(usize),
    /// Of each expert from this row on.
    ExpertRows(usize),
    /// Of each expert the transpose: every `step`-th column from `first` on.
    ExpertColumns { first: usize, step: usize },
    /// Of each expert every `step`-th element from `first` on.
    ExpertElements { first: usize, step: usize },
    /// Groups of rows, part by part: `take` rows after `before` rows of each group of `all` rows.
    Groups { parts: Vec<(usize, usize)>, all: usize },
}

/// Parts of names that folders of a family have. With `-` in front: that they do not have.
fn habits(spec: &Spec) -> &'static [&'static str] {
    match spec.family {
        // Llama's files with experts are Mixtral's.
        "llama" if spec.layers.iter().all(|l| l.experts().is_none()) => &[],
        "mixtral" | "llama" => &["block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w2", "w3"],
        "phi3" => &["self_attn.qkv_proj", "mlp.gate_up_proj"],
        "starcoder2" => &["mlp.c_fc", "mlp.c_proj"],
        "qwen3next" => &["in_proj_qkvz", "in_proj_ba", "shared_expert."],
        "qwen35moe" => &["shared_expert."],
        "gpt-oss" => &["mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "gemma4" => &["router.proj", "experts.gate_up_proj", "experts.down_proj", "-mlp.experts"],
        "granitehybrid" => {
            &["shared_mlp", "router.layer", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear"]
        }
        "lfm2" => &[
            "operator_norm",
            "ffn_norm",
            "out_proj",
            "q_layernorm",
            "k_layernorm",
            "feed_forward",
            "embedding_norm",
        ],
        "gpt2" => &[
            "h.",
            "wte",
            "wpe",
            "ln_1",
            "ln_2",
            "ln_f",
            "attn.c_attn",
            "attn.c_proj",
            "mlp.c_fc",
            "mlp.c_proj",
        ],
        "falcon" => match spec.layers.first().map(|l| l.order) {
            Some(Order::ParallelTwo) => &[
                "h.",
                "word_embeddings",
                "self_attention",
                "dense_h_to_4h",
                "dense_4h_to_h",
                "ln_f",
                "ln_attn",
                "ln_mlp",
            ],
            _ => &["h.", "word_embeddings", "self_attention", "dense_h_to_4h", "dense_4h_to_h", "ln_f"],
        },
        _ => &[],
    }
}

/// How many of the family's habits a name has.
fn suits(name: &str, habits: &[&str]) -> i32 {
    let has = |part: &str| name.starts_with(part) || name.contains(&format!(".{part}"));
    habits.iter().map(|h| h.strip_prefix('-').map_or(i32::from(has(h)), |h| -i32::from(has(h)))).sum()
}

/// How folders of the family store the tensor with a canonical name, among the ways that `fits` allows.
pub(super) fn preferred(spec: &Spec, name: &str, fits: impl Fn(&Recipe) -> bool) -> Option<Recipe> {
    let habits = habits(spec);
    let mut best: Option<(i32, Recipe)> = None;
    for r in recipes(spec, name).into_iter().filter(fits) {
        let score = suits(&r.name(), habits);
        if best.as_ref().is_none_or(|(b, _)| score > *b) {
            best = Some((score, r));
        }
    }
    best.map(|(_, r)| r)
}

/// Where a folder of the family stores the tensor with a canonical name and these sizes. Empty if folders
/// have no such tensor.
pub(crate) fn places(spec: &Spec, name: &str, dims: &[usize]) -> Vec<Place> {
    let Some(recipe) = preferred(spec, name, |_| true) else { return vec![] };
    of_recipe(&recipe, prefix(spec, name, &recipe), dims)
}

/// What stands before the names of a recipe's tensors.
pub(super) fn prefix(spec: &Spec, name: &str, recipe: &Recipe) -> &'static str {
    match spec.family {
        // The output matrix belongs to no part of the model.
        _ if name.starts_with("output.") || recipe.name().starts_with("mtp.") => "",
        "gpt2" | "falcon" => "transformer.",
        // Encoders are trained without a head.
        "bert" | "xlm-roberta" | "modernbert" => "",
        _ => "model.",
    }
}

fn of_recipe(recipe: &Recipe, prefix: &str, dims: &[usize]) -> Vec<Place> {
    let place = |name: &str, dims: Vec<usize>, arrange| Place {
        name: format!("{prefix}{name}"),
        expert: None,
        dims,
        arrange,
    };
    let with = |axis: usize, n: usize| {
        let mut d = dims.to_vec();
        if let Some(v) = d.get_mut(axis) {
            *v = n;
        }
        d
    };
    let axis = |i: usize| dims.get(i).copied().unwrap_or(1);
    let one = match recipe {
        Recipe::Plain(n) => place(n, dims.to_vec(), Arrange::Whole),
        Recipe::MinusExp(n) => place(n, dims.to_vec(), Arrange::MinusLog),
        Recipe::Rows(n, first, count) => place(n, with(0, first + count), Arrange::Rows(*first)),
        Recipe::TransposedRows(n, first, count) => {
            place(n, vec![axis(1), first + count], Arrange::Columns(*first))
        }
        Recipe::Stack(n, count) => {
            let expert = |e: usize| Place {
                expert: Some(e),
                ..place(
                    &n.replace("{}", &e.to_string()),
                    dims.iter().skip(1).copied().collect(),
                    Arrange::Whole,
                )
            };
            return (0..*count).map(expert).collect();
        }
        Recipe::ExpertRows { name, first, count } => {
            place(name, with(1, first + count), Arrange::ExpertRows(*first))
        }
        Recipe::Experts { name, first, step, count } => {
            let n = first + count.saturating_sub(1) * step + 1;
            place(name, vec![axis(0), axis(2), n], Arrange::ExpertColumns { first: *first, step: *step })
        }
        Recipe::ExpertVector { name, first, step } => {
            let n = first + axis(1).saturating_sub(1) * step + 1;
            place(name, with(1, n), Arrange::ExpertElements { first: *first, step: *step })
        }
        Recipe::Grouped { .. } => return groups(std::slice::from_ref(recipe), &place, dims),
        Recipe::Joined(parts) => return groups(parts, &place, dims),
    };
    vec![one]
}

fn groups(
    parts: &[Recipe],
    place: &dyn Fn(&str, Vec<usize>, Arrange) -> Place,
    dims: &[usize],
) -> Vec<Place> {
    let mut found: Option<(&str, usize)> = None;
    let mut takes = vec![];
    for p in parts {
        let Recipe::Grouped { name, before, take, after } = p else { return vec![] };
        takes.push((*before, *take));
        found = Some((name, before + take + after));
    }
    let Some((name, all)) = found else { return vec![] };
    let taken: usize = takes.iter().map(|(_, t)| t).sum();
    let mut d = dims.to_vec();
    if let Some(rows) = d.first_mut() {
        *rows = *rows / taken.max(1) * all;
    }
    vec![place(name, d, Arrange::Groups { parts: takes, all })]
}

impl Place {
    /// Puts the values of a canonical tensor of `dims` into `out`, a tensor of `full`.
    pub(crate) fn put(&self, values: &[f32], dims: &[usize], out: &mut [f32], full: &[usize]) {
        let last = |d: &[usize]| d.last().copied().unwrap_or(1).max(1);
        let k = last(dims);
        match &self.arrange {
            Arrange::Whole => out.iter_mut().zip(values).for_each(|(o, v)| *o = *v),
            Arrange::MinusLog => out.iter_mut().zip(values).for_each(|(o, v)| *o = (-v).ln()),
            Arrange::Rows(first) => {
                let width: usize = full.iter().skip(1).product();
                out.iter_mut().skip(first * width).zip(values).for_each(|(o, v)| *o = *v);
            }
            Arrange::Columns(first) => each(values, out, &|i| i % k * last(full) + first + i / k),
            Arrange::ExpertRows(first) => {
                let (one, all) = (values.len() / dims[0].max(1), full[1] * k);
                each(values, out, &|i| i / one * all + first * k + i % one);
            }
            Arrange::ExpertColumns { first, step } => {
                let (one, n) = (values.len() / dims[0].max(1), last(full));
                each(values, out, &|i| (i / one * k + i % one % k) * n + first + i % one / k * step);
            }
            Arrange::ExpertElements { first, step } => {
                each(values, out, &|i| i / k * last(full) + first + i % k * step);
            }
            Arrange::Groups { parts, all } => {
                let width: usize = dims.iter().skip(1).product();
                let groups = full[0] / (*all).max(1);
                let mut rows = values.chunks_exact(width.max(1));
                for (before, take) in parts {
                    for g in 0..groups {
                        for r in 0..*take {
                            let at = (g * all + before + r) * width;
                            if let (Some(row), Some(o)) = (rows.next(), out.get_mut(at..at + width)) {
                                o.copy_from_slice(row);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Puts each value where `at` says.
fn each(values: &[f32], out: &mut [f32], at: &dyn Fn(usize) -> usize) {
    for (i, v) in values.iter().enumerate() {
        if let Some(o) = out.get_mut(at(i)) {
            *o = *v;
        }
    }
}

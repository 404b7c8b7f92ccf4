//! The operators TreeEnsemble, TreeEnsembleRegressor and TreeEnsembleClassifier. Their attributes become a
//! [`Forest`], and the scores of the forest become their results.

use super::forest::{Aggregate, Branch, Forest, Mode, Place, Test};
use super::label::{Classes, LABELS_INT64S, labels};
use super::post::{Post, pair, shift, single};
use super::{DOMAIN, best, columns, matrix};
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use crate::onnx::ops::{Row, item_row_in, one, row_in};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};
use std::collections::{HashMap, HashSet};

pub(crate) const ROWS: &[Row] = &[
    row_in(
        DOMAIN,
        "TreeEnsemble",
        5,
        &[
            "aggregate_function",
            "leaf_targetids",
            "leaf_weights",
            "membership_values",
            "n_targets",
            "nodes_falseleafs",
            "nodes_falsenodeids",
            "nodes_featureids",
            "nodes_hitrates",
            "nodes_missing_value_tracks_true",
            "nodes_modes",
            "nodes_splits",
            "nodes_trueleafs",
            "nodes_truenodeids",
            "post_transform",
            "tree_roots",
        ],
        ensemble,
    ),
    row_in(
        DOMAIN,
        "TreeEnsembleRegressor",
        1,
        &[
            "aggregate_function",
            "base_values",
            "base_values_as_tensor",
            "n_targets",
            "nodes_falsenodeids",
            "nodes_featureids",
            "nodes_hitrates",
            "nodes_hitrates_as_tensor",
            "nodes_missing_value_tracks_true",
            "nodes_modes",
            "nodes_nodeids",
            "nodes_treeids",
            "nodes_truenodeids",
            "nodes_values",
            "nodes_values_as_tensor",
            "post_transform",
            "target_ids",
            "target_nodeids",
            "target_treeids",
            "target_weights",
            "target_weights_as_tensor",
        ],
        regressor,
    ),
    item_row_in(
        DOMAIN,
        "TreeEnsembleClassifier",
        1,
        &[
            "base_values",
            "base_values_as_tensor",
            "class_ids",
            "class_nodeids",
            "class_treeids",
            "class_weights",
            "class_weights_as_tensor",
            "classlabels_int64s",
            "classlabels_strings",
            "nodes_falsenodeids",
            "nodes_featureids",
            "nodes_hitrates",
            "nodes_hitrates_as_tensor",
            "nodes_missing_value_tracks_true",
            "nodes_modes",
            "nodes_nodeids",
            "nodes_treeids",
            "nodes_truenodeids",
            "nodes_values",
            "nodes_values_as_tensor",
            "post_transform",
        ],
        classifier,
    ),
];

/// A list attribute that must have `n` elements.
fn list<'a>(c: &Call<'a>, name: &str, n: usize) -> Result<&'a [i64]> {
    match c.ints(name)? {
        Some(v) if v.len() == n => Ok(v),
        Some(v) => Err(c.invalid(format!("attribute '{name}' has {} entries, expected {n}", v.len()))),
        None => Err(c.invalid(format!("attribute '{name}' is missing"))),
    }
}

/// The numbers of an attribute.
struct Numbers {
    /// Whether they are stored in f64, which is possible only in attributes that are tensors.
    wide: bool,
    vals: Vec<f64>,
}

impl Numbers {
    fn tensor(c: &Call<'_>, name: &str) -> Result<Option<Numbers>> {
        let Some(t) = c.tensor(name)? else {
            return Ok(None);
        };
        if !t.dtype.is_float() || t.dims.len() != 1 {
            return Err(c.invalid(format!(
                "attribute '{name}' is {}{:?}, expected a vector of floats",
                t.dtype,
                t.dims.as_slice()
            )));
        }
        Ok(Some(Numbers { wide: t.dtype == DType::F64, vals: t.scalars().map(|s| s.as_f64()).collect() }))
    }

    /// The attribute `name`, or its `…_as_tensor` form.
    fn of(c: &Call<'_>, name: &str) -> Result<Option<Numbers>> {
        let list = c.floats(name)?.filter(|v| !v.is_empty());
        let tensor = Numbers::tensor(c, &format!("{name}_as_tensor"))?.filter(|n| !n.vals.is_empty());
        Ok(match (list, tensor) {
            (Some(_), Some(_)) => {
                return Err(c.invalid(format!("attributes '{name}' and '{name}_as_tensor' are both set")));
            }
            (Some(v), None) => Some(Numbers { wide: false, vals: v.iter().map(|v| f64::from(*v)).collect() }),
            (None, t) => t,
        })
    }

    fn sized(self, c: &Call<'_>, name: &str, n: usize) -> Result<Numbers> {
        if self.vals.len() == n {
            return Ok(self);
        }
        Err(c.invalid(format!("attribute '{name}' has {} entries, expected {n}", self.vals.len())))
    }
}

fn missing(c: &Call<'_>, name: &str) -> halcyon_ir::Error {
    c.invalid(format!("attribute '{name}' is missing"))
}

fn index(c: &Call<'_>, name: &str, v: i64) -> Result<usize> {
    // A file cannot contain a list so long that a larger index would be valid.
    usize::try_from(v)
        .ok()
        .filter(|v| *v < i32::MAX as usize)
        .ok_or_else(|| c.invalid(format!("attribute '{name}' contains {v}, which is not a valid index")))
}

/// For each node, whether NaN takes the true branch.
fn tracks(c: &Call<'_>, n: usize) -> Result<Vec<bool>> {
    match c.ints("nodes_missing_value_tracks_true")? {
        None | Some([]) => Ok(vec![false; n]),
        Some(_) => Ok(list(c, "nodes_missing_value_tracks_true", n)?.iter().map(|v| *v != 0).collect()),
    }
}

/// TreeEnsemble (opset version 5). Branches and leaves are in separate lists, and each leaf has one vote.
fn ensemble(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let post = Post::of_number(c)?;
    let aggregate = match c.int("aggregate_function", 1)? {
        0 => Aggregate::Average,
        1 => Aggregate::Sum,
        2 => Aggregate::Min,
        3 => Aggregate::Max,
        v => return Err(c.invalid(format!("there is no aggregate_function {v}"))),
    };
    let splits = Numbers::tensor(c, "nodes_splits")?.ok_or_else(|| missing(c, "nodes_splits"))?;
    let n = splits.vals.len();
    let modes = c.tensor("nodes_modes")?.ok_or_else(|| missing(c, "nodes_modes"))?;
    if !modes.dtype.is_int() || modes.numel() != n {
        return Err(c.invalid(format!(
            "attribute 'nodes_modes' has {} entries of dtype {}, expected {n} integers",
            modes.numel(),
            modes.dtype
        )));
    }
    let feature = list(c, "nodes_featureids", n)?;
    let tracks = tracks(c, n)?;
    let side = |ids: &str, leaf: &str| -> Result<Vec<Place>> {
        let leaf = list(c, leaf, n)?;
        let of = |(id, leaf): (&i64, &i64)| {
            let i = index(c, ids, *id)?;
            Ok(if *leaf != 0 { Place::Leaf(i) } else { Place::Branch(i) })
        };
        list(c, ids, n)?.iter().zip(leaf).map(of).collect()
    };
    let (yes, no) =
        (side("nodes_truenodeids", "nodes_trueleafs")?, side("nodes_falsenodeids", "nodes_falseleafs")?);
    let members = Numbers::tensor(c, "membership_values")?.map_or(vec![], |m| m.vals);
    let mut members = members.as_slice();
    let mut branches = Vec::with_capacity(n);
    for (i, mode) in modes.scalars().enumerate() {
        let mode = match mode.as_i64() {
            0 => Some(Mode::Leq),
            1 => Some(Mode::Lt),
            2 => Some(Mode::Gte),
            3 => Some(Mode::Gt),
            4 => Some(Mode::Eq),
            5 => Some(Mode::Neq),
            6 => None,
            v => return Err(c.invalid(format!("there is no node mode {v}"))),
        };
        let test = match mode {
            Some(m) => Test::Compare(m, splits.vals[i]),
            None => {
                // Sets are separated by NaN.
                if members.is_empty() {
                    return Err(
                        c.invalid("'membership_values' has fewer sets than nodes of mode BRANCH_MEMBER")
                    );
                }
                let end = members.iter().position(|v| v.is_nan()).unwrap_or(members.len());
                let set = members[..end].to_vec();
                members = members.get(end + 1..).unwrap_or(&[]);
                Test::Member(set)
            }
        };
        let feature = index(c, "nodes_featureids", feature[i])?;
        branches.push(Branch { feature, test, missing: tracks[i], yes: yes[i], no: no[i] });
    }
    if !members.is_empty() {
        return Err(c.invalid("'membership_values' has more sets than nodes of mode BRANCH_MEMBER"));
    }
    let weights = Numbers::tensor(c, "leaf_weights")?.ok_or_else(|| missing(c, "leaf_weights"))?;
    let targets = list(c, "leaf_targetids", weights.vals.len())?;
    let votes = targets
        .iter()
        .zip(&weights.vals)
        .map(|(t, w)| Ok(vec![(index(c, "leaf_targetids", *t)?, *w)]))
        .collect::<Result<Vec<_>>>()?;
    let roots = c.ints("tree_roots")?.unwrap_or(&[]);
    let roots =
        roots.iter().map(|r| Ok(Place::Branch(index(c, "tree_roots", *r)?))).collect::<Result<Vec<_>>>()?;
    let x = c.arg(0)?;
    let m = matrix(b, c, x)?;
    let m = if splits.wide { b.cast(&m, DType::F64)? } else { m };
    let targets = index(c, "n_targets", c.opt_int("n_targets")?.unwrap_or(1))?;
    let forest = Forest::new(c, m.dtype(), &branches, votes, &roots, targets, aggregate)?;
    let y = forest.run(b, c, &m)?;
    let y = post.apply(b, &y)?;
    one(b.cast(&y, x.dtype())?)
}

/// The attributes of TreeEnsembleRegressor and TreeEnsembleClassifier, which have branches and leaves in one
/// list, and any number of votes per leaf.
struct Parsed {
    dtype: DType,
    branches: Vec<Branch>,
    votes: Vec<Vec<(usize, f64)>>,
    roots: Vec<Place>,
    x: Value,
}

/// Reads the attributes. `kind` is `target` or `class`, the prefix of the attributes that describe votes.
fn parse(b: &mut Builder, c: &Call<'_>, kind: &str) -> Result<Parsed> {
    let ids = c.ints("nodes_nodeids")?.ok_or_else(|| missing(c, "nodes_nodeids"))?;
    let n = ids.len();
    let trees = list(c, "nodes_treeids", n)?;
    let feature = list(c, "nodes_featureids", n)?;
    let (yes, no) = (list(c, "nodes_truenodeids", n)?, list(c, "nodes_falsenodeids", n)?);
    let tracks = tracks(c, n)?;
    let modes = c.strings("nodes_modes")?.ok_or_else(|| missing(c, "nodes_modes"))?;
    if modes.len() != n {
        return Err(c.invalid(format!("attribute 'nodes_modes' has {} entries, expected {n}", modes.len())));
    }
    let splits = Numbers::of(c, "nodes_values")?.ok_or_else(|| missing(c, "nodes_values"))?;
    let splits = splits.sized(c, "nodes_values", n)?;

    let mut place: HashMap<(i64, i64), Place> = HashMap::with_capacity(n);
    let (mut leaves, mut inner) = (0, 0);
    let mut roots = vec![];
    let mut seen = HashSet::new();
    for i in 0..n {
        let p = if modes[i] == "LEAF" { Place::Leaf(leaves) } else { Place::Branch(inner) };
        match p {
            Place::Leaf(_) => leaves += 1,
            Place::Branch(_) => inner += 1,
        }
        if place.insert((trees[i], ids[i]), p).is_some() {
            return Err(c.invalid(format!("tree {} has node {} twice", trees[i], ids[i])));
        }
        // The first node of a tree is its root.
        if seen.insert(trees[i]) {
            roots.push(p);
        }
    }
    let find = |tree: i64, id: i64| {
        place.get(&(tree, id)).copied().ok_or_else(|| c.invalid(format!("tree {tree} has no node {id}")))
    };
    let mut branches = Vec::with_capacity(inner);
    for i in 0..n {
        let mode = match modes[i].as_str() {
            "LEAF" => continue,
            "BRANCH_LEQ" => Mode::Leq,
            "BRANCH_LT" => Mode::Lt,
            "BRANCH_GTE" => Mode::Gte,
            "BRANCH_GT" => Mode::Gt,
            "BRANCH_EQ" => Mode::Eq,
            "BRANCH_NEQ" => Mode::Neq,
            other => return Err(c.invalid(format!("there is no node mode '{other}'"))),
        };
        branches.push(Branch {
            feature: index(c, "nodes_featureids", feature[i])?,
            test: Test::Compare(mode, splits.vals[i]),
            missing: tracks[i],
            yes: find(trees[i], yes[i])?,
            no: find(trees[i], no[i])?,
        });
    }

    let name = |s: &str| format!("{kind}_{s}");
    let weights = Numbers::of(c, &name("weights"))?.ok_or_else(|| missing(c, &name("weights")))?;
    let k = weights.vals.len();
    let (vote_trees, vote_nodes) = (list(c, &name("treeids"), k)?, list(c, &name("nodeids"), k)?);
    let vote_targets = list(c, &name("ids"), k)?;
    let mut votes = vec![vec![]; leaves];
    for i in 0..k {
        // Some converters also write votes of branches. They are ignored.
        if let Place::Leaf(leaf) = find(vote_trees[i], vote_nodes[i])? {
            votes[leaf].push((index(c, &name("ids"), vote_targets[i])?, weights.vals[i]));
        }
    }
    let x = matrix(b, c, c.arg(0)?)?;
    let x = if splits.wide || weights.wide { b.cast(&x, DType::F64)? } else { x };
    Ok(Parsed { dtype: x.dtype(), branches, votes, roots, x })
}

impl Parsed {
    fn run(self, b: &mut Builder, c: &Call<'_>, targets: usize, aggregate: Aggregate) -> Result<Value> {
        let forest = Forest::new(c, self.dtype, &self.branches, self.votes, &self.roots, targets, aggregate)?;
        forest.run(b, c, &self.x)
    }
}

fn regressor(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let post = Post::of(c)?;
    let aggregate = match c.string("aggregate_function", "SUM")? {
        "AVERAGE" => Aggregate::Average,
        "SUM" => Aggregate::Sum,
        "MIN" => Aggregate::Min,
        "MAX" => Aggregate::Max,
        other => return Err(c.invalid(format!("there is no aggregate_function '{other}'"))),
    };
    let targets = index(c, "n_targets", c.opt_int("n_targets")?.unwrap_or(1))?;
    let p = parse(b, c, "target")?;
    let base = Numbers::of(c, "base_values")?;
    let mut y = p.run(b, c, targets, aggregate)?;
    if let Some(base) = base {
        y = add_base(b, &y, &base.sized(c, "base_values", targets)?.vals)?;
    }
    let y = post.apply(b, &y)?;
    one(single(b, &y)?)
}

fn add_base(b: &mut Builder, y: &Value, base: &[f64]) -> Result<Value> {
    let v = data::from_scalars(y.dtype(), &[base.len()], base.iter().map(|v| Scalar::F(*v)))?;
    shift(b, y, &Value::table(v))
}

/// The results are the label `[N]` and the scores `[N, classes]`.
///
/// If the votes name at most one of two classes, the score of that class determines the label: the second
/// class if the score is above 1/2 (no weight is negative) or above 0 (a weight is negative), even if the
/// votes name the first class. If they do not name the second class and there are fewer than two base values,
/// the score is by convention that of the second class, and the score of the first class follows from it.
fn classifier(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let (post, classes) = (Post::of(c)?, Classes::of(c, LABELS_INT64S)?);
    let n = classes.len();
    let p = parse(b, c, "class")?;
    let named: HashSet<usize> = p.votes.iter().flatten().map(|v| v.0).collect();
    let positive = p.votes.iter().flatten().all(|v| v.1 >= 0.0);
    let base = Numbers::of(c, "base_values")?.map_or(vec![], |v| v.vals);
    if !base.is_empty() && base.len() != n && !(base.len() == 1 && n == 2) {
        return Err(c.invalid(format!("attribute 'base_values' has {} entries, expected {n}", base.len())));
    }
    if n == 1 && !matches!(&classes, Classes::Ints(v) if v[..] == [1]) {
        return Err(c.unsupported("a single class other than 1", "Export a model of two classes"));
    }
    let mut s = p.run(b, c, n, Aggregate::Sum)?;
    let rows = s.shape()[0];
    let column = |b: &mut Builder, s: &Value, k: usize| -> Result<Value> {
        let v = b.narrow(s, 1, Dim::from(k), Dim::from(1))?;
        b.reshape(&v, Shape::from_iter([rows]))
    };
    let above = |b: &mut Builder, s: &Value, limit: f64| -> Result<Value> {
        let limit = b.lit(s, limit);
        let yes = b.scalar(S::Gt, &[s, &limit])?;
        b.cast(&yes, DType::I64)
    };
    // With a single class, the label is 1 if the score is above 0, and 0 otherwise.
    if n == 1 {
        if !base.is_empty() {
            s = add_base(b, &s, &base)?;
        }
        let flat = column(b, &s, 0)?;
        let label = above(b, &flat, 0.0)?;
        let y = post.apply(b, &s)?;
        return Ok(vec![label.into(), single(b, &y)?.into()]);
    }
    if n == 2 && named.len() <= 1 {
        let limit = if positive { 0.5 } else { 0.0 };
        let first = !named.contains(&1);
        if first && base.len() < 2 {
            let mut score = column(b, &s, 0)?;
            if let [v] = base[..] {
                let v = b.lit(&score, v);
                score = b.scalar(S::Add, &[&score, &v])?;
            }
            let place = above(b, &score, limit)?;
            let y = pair(b, c, post, &score, positive)?;
            return Ok(vec![labels(b, c, &classes, &place)?, single(b, &y)?.into()]);
        }
        if base.len() == 1 {
            return Err(
                c.unsupported("one base value with votes for the second class only", "Give two base values")
            );
        }
        if !base.is_empty() {
            s = add_base(b, &s, &base)?;
        }
        let score = column(b, &s, usize::from(!first))?;
        let place = above(b, &score, limit)?;
        let y = post.apply(b, &s)?;
        return Ok(vec![labels(b, c, &classes, &place)?, single(b, &y)?.into()]);
    }
    match base[..] {
        [] => {}
        // A single base value is added to the score of the first class.
        [v] => {
            let (first, second) = (column(b, &s, 0)?, column(b, &s, 1)?);
            let v = b.lit(&first, v);
            let first = b.scalar(S::Add, &[&first, &v])?;
            s = columns(b, &[&first, &second])?;
        }
        _ => s = add_base(b, &s, &base)?,
    }
    let place = best(b, &s)?;
    let y = post.apply(b, &s)?;
    Ok(vec![labels(b, c, &classes, &place)?, single(b, &y)?.into()])
}

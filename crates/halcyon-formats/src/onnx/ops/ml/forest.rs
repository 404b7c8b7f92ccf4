//! Decision trees as graph ops. The nodes of all trees are in one table. A walk leads one row of the input
//! from the root of one tree to a leaf. All walks are computed together: a tensor `[N, trees]` holds the
//! current node of each. One iteration looks up the nodes' features and thresholds, and the nodes' successors
//! for the outcome of the comparison (less, equal, greater, or neither for NaN). One successor table
//! therefore covers every mode and both treatments of missing values. A leaf is its own successor, so walks
//! of different lengths need no special case.

use super::integers;
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::{ReduceKind, ScatterKind};
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

/// Limit on the depth of trees. Each level adds several nodes to the graph.
const MAX_DEPTH: usize = 1024;
/// A table may have this many elements in addition to twice the number of votes (or of trees) in the model.
const EXTRA_ENTRIES: usize = 1 << 16;

/// How a node compares a feature with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Leq,
    Lt,
    Gte,
    Gt,
    Eq,
    Neq,
}

impl Mode {
    /// The result of the comparison if the feature is less, equal, or greater.
    fn outcomes(self) -> [bool; 3] {
        match self {
            Mode::Leq => [true, true, false],
            Mode::Lt => [true, false, false],
            Mode::Gte => [false, true, true],
            Mode::Gt => [false, false, true],
            Mode::Eq => [false, true, false],
            Mode::Neq => [true, false, true],
        }
    }
}

/// A child, or the root of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Leaf(usize),
    Branch(usize),
}

/// The test at a branch.
#[derive(Clone, Debug)]
pub(super) enum Test {
    Compare(Mode, f64),
    Member(Vec<f64>),
}

#[derive(Clone, Debug)]
pub(super) struct Branch {
    pub feature: usize,
    pub test: Test,
    /// Whether NaN leads to `yes`; else it leads to `no`.
    pub missing: bool,
    pub yes: Place,
    pub no: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aggregate {
    Average,
    Sum,
    Min,
    Max,
}

impl Aggregate {
    fn kind(self) -> ReduceKind {
        match self {
            Aggregate::Average | Aggregate::Sum => ReduceKind::Sum,
            Aggregate::Min => ReduceKind::Min,
            Aggregate::Max => ReduceKind::Max,
        }
    }

    fn scatter(self) -> ScatterKind {
        match self {
            Aggregate::Average | Aggregate::Sum => ScatterKind::Add,
            Aggregate::Min => ScatterKind::Min,
            Aggregate::Max => ScatterKind::Max,
        }
    }

    /// The neutral element of the aggregation.
    fn neutral(self) -> f64 {
        match self {
            Aggregate::Average | Aggregate::Sum => 0.0,
            Aggregate::Min => f64::INFINITY,
            Aggregate::Max => f64::NEG_INFINITY,
        }
    }

    fn join(self, a: f64, b: f64) -> f64 {
        match self {
            Aggregate::Average | Aggregate::Sum => a + b,
            Aggregate::Min => a.min(b),
            Aggregate::Max => a.max(b),
        }
    }
}

/// The targets that the leaves below a node vote for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Below {
    None,
    One(usize),
    Many,
}

impl Below {
    fn join(self, o: Below) -> Below {
        match (self, o) {
            (Below::None, x) | (x, Below::None) => x,
            (Below::One(a), Below::One(b)) if a == b => self,
            _ => Below::Many,
        }
    }
}

/// All trees of an ensemble in one table: leaves first, then branches.
#[derive(Debug)]
pub(super) struct Forest {
    /// Dtype of features, thresholds and votes.
    dtype: DType,
    feature: Vec<i64>,
    split: Vec<f64>,
    /// Successors by outcome: less, equal, greater, neither.
    next: Vec<[usize; 4]>,
    roots: Vec<usize>,
    depth: usize,
    features: usize,
    /// Votes of each leaf: targets and weights.
    votes: Vec<Vec<(usize, f64)>>,
    targets: usize,
    aggregate: Aggregate,
    /// The target of each tree, if every tree votes for at most one.
    single: Option<Vec<Option<usize>>>,
}

impl Forest {
    /// Checks that every referenced node exists and that the nodes form no cycle.
    pub(super) fn new(
        c: &Call<'_>,
        dtype: DType,
        branches: &[Branch],
        votes: Vec<Vec<(usize, f64)>>,
        roots: &[Place],
        targets: usize,
        aggregate: Aggregate,
    ) -> Result<Forest> {
        let leaves = votes.len();
        if roots.is_empty() {
            return Err(c.invalid("there is no tree"));
        }
        let total: usize = votes.iter().map(Vec::len).sum();
        if targets == 0 || targets > total.saturating_mul(2) + EXTRA_ENTRIES {
            return Err(
                c.invalid(format!("{targets} targets for {total} votes: there are none, or too many"))
            );
        }
        if let Some((t, _)) = votes.iter().flatten().find(|(t, _)| *t >= targets) {
            return Err(
                c.invalid(format!("a vote is for target {t}, but the number of targets is {targets}"))
            );
        }
        // A set membership test becomes a search tree over its sorted members.
        let mut sets = vec![None; branches.len()];
        let mut at = Vec::with_capacity(branches.len());
        let mut size = leaves;
        for (set, n) in sets.iter_mut().zip(branches) {
            at.push(size);
            size += match &n.test {
                Test::Compare(..) => 1,
                Test::Member(v) => {
                    let mut v: Vec<f64> = v.iter().copied().filter(|v| !v.is_nan()).collect();
                    v.sort_by(f64::total_cmp);
                    v.dedup();
                    let len = v.len().max(1);
                    *set = Some(v);
                    len
                }
            };
        }
        if size > (i32::MAX / 4) as usize {
            return Err(c.unsupported(&format!("{size} nodes"), "Split the ensemble"));
        }
        let place = |p: Place| match p {
            Place::Leaf(i) if i < leaves => Ok(i),
            Place::Branch(i) if i < at.len() => Ok(at[i]),
            Place::Leaf(i) => Err(c.invalid(format!("there is no leaf {i}"))),
            Place::Branch(i) => Err(c.invalid(format!("there is no node {i}"))),
        };
        let mut f = Forest {
            dtype,
            feature: vec![0; leaves],
            split: vec![0.0; leaves],
            next: (0..leaves).map(|i| [i; 4]).collect(),
            roots: roots.iter().map(|r| place(*r)).collect::<Result<_>>()?,
            depth: 0,
            features: 0,
            votes,
            targets,
            aggregate,
            single: None,
        };
        for (n, set) in branches.iter().zip(sets) {
            let (yes, no) = (place(n.yes)?, place(n.no)?);
            let nan = if n.missing { yes } else { no };
            let first = f.next.len();
            match (&n.test, set) {
                (Test::Compare(mode, split), _) => {
                    let outcome = |holds: bool| if holds { yes } else { no };
                    let [l, e, g] = if split.is_nan() {
                        // Of the comparisons with NaN, only "not equal" is true.
                        f.split.push(0.0);
                        [outcome(*mode == Mode::Neq); 3]
                    } else {
                        f.split.push(*split);
                        mode.outcomes().map(outcome)
                    };
                    f.next.push([l, e, g, nan]);
                }
                (Test::Member(_), Some(v)) if !v.is_empty() => {
                    for (i, [lo, hi]) in search_tree(v.len()).into_iter().enumerate() {
                        let side = |k: Option<usize>| k.map_or(no, |k| first + k);
                        f.split.push(v[i]);
                        f.next.push([side(lo), yes, side(hi), nan]);
                    }
                    // Moves the root of the search tree to index `first`, to which the parent refers.
                    let root = v.len() / 2;
                    f.swap_root(first, root);
                }
                (Test::Member(_), _) => {
                    f.split.push(0.0);
                    f.next.push([no, no, no, nan]);
                }
            }
            f.feature.resize(f.next.len(), n.feature as i64);
            f.features = f.features.max(n.feature + 1);
        }
        f.analyse(c)?;
        Ok(f)
    }

    /// Swaps the nodes `first` and `first + k`, and the references to them in the nodes from `first` on.
    /// Earlier nodes may refer to `first`; these references stay, because they mean the root, which is now at
    /// `first`.
    fn swap_root(&mut self, first: usize, k: usize) {
        let other = first + k;
        self.split.swap(first, other);
        self.next.swap(first, other);
        for n in self.next[first..].iter_mut().flatten() {
            if *n == first {
                *n = other;
            } else if *n == other {
                *n = first;
            }
        }
    }

    /// Finds the depth, and the trees that vote for a single target.
    fn analyse(&mut self, c: &Call<'_>) -> Result<()> {
        let leaves = self.votes.len();
        let n = self.next.len();
        let mut below: Vec<Below> = self
            .votes
            .iter()
            .map(|v| v.iter().fold(Below::None, |s, (t, _)| s.join(Below::One(*t))))
            .collect();
        below.resize(n, Below::None);
        // `height` is the number of levels below a node, `NEW` before the node is visited, and `OPEN` during
        // the visit of its subtree.
        const NEW: usize = usize::MAX;
        const OPEN: usize = usize::MAX - 1;
        let mut height = vec![0usize; leaves];
        height.resize(n, NEW);
        let mut todo: Vec<(usize, usize)> = Vec::new();
        for start in leaves..n {
            if height[start] != NEW {
                continue;
            }
            height[start] = OPEN;
            todo.push((start, 0));
            while let Some(&mut (i, ref mut k)) = todo.last_mut() {
                if *k == 4 {
                    let kids = self.next[i];
                    height[i] = 1 + kids.iter().map(|k| height[*k]).max().unwrap_or(0);
                    below[i] = kids.iter().fold(Below::None, |s, k| s.join(below[*k]));
                    todo.pop();
                    continue;
                }
                let kid = self.next[i][*k];
                *k += 1;
                match height[kid] {
                    NEW => {
                        height[kid] = OPEN;
                        todo.push((kid, 0));
                    }
                    OPEN => return Err(c.invalid("the nodes of a tree form a cycle")),
                    _ => {}
                }
            }
        }
        self.depth = self.roots.iter().map(|r| height[*r]).max().unwrap_or(0);
        if self.depth > MAX_DEPTH {
            return Err(c.unsupported(
                &format!("a tree of {} levels", self.depth),
                &format!("Up to {MAX_DEPTH} are supported; limit the depth when training"),
            ));
        }
        self.single = self
            .roots
            .iter()
            .map(|r| match below[*r] {
                Below::None => Some(None),
                Below::One(t) => Some(Some(t)),
                Below::Many => None,
            })
            .collect();
        Ok(())
    }

    /// The aggregated votes of the trees for the rows of `x` `[N, F]`: `[N, targets]`.
    pub(super) fn run(mut self, b: &mut Builder, c: &Call<'_>, x: &Value) -> Result<Value> {
        if self.depth > 0
            && let Some(f) = x.shape()[1].known()
            && f < self.features
        {
            return Err(
                c.invalid(format!("a node tests feature {}, but there are only {f}", self.features - 1))
            );
        }
        let trees = self.roots.len();
        let y = match self.groups() {
            Some((roots, size)) => {
                self.roots = roots;
                let at = self.walk(b, x)?;
                let w: Vec<f64> = self
                    .votes
                    .iter()
                    .map(|v| v.iter().fold(self.aggregate.neutral(), |s, (_, w)| self.aggregate.join(s, *w)))
                    .collect();
                let table = self.table(&[w.len()], w)?;
                let y = b.gather(&table, &at, 0)?;
                let y = b.reshape(&y, Shape::from_iter([x.shape()[0], self.targets.into(), size.into()]))?;
                b.reduce(self.aggregate.kind(), &y, &[2], false)?
            }
            None => {
                let at = self.walk(b, x)?;
                self.reduce_votes(b, c, x.shape()[0], &at)?
            }
        };
        match self.aggregate {
            Aggregate::Sum => Ok(y),
            Aggregate::Average => {
                let n = b.lit(&y, trees);
                b.scalar(S::Div, &[&y, &n])
            }
            // The result for a target without votes is 0.
            Aggregate::Min | Aggregate::Max => {
                let (none, zero) = (b.lit(&y, self.aggregate.neutral()), b.lit(&y, 0.0));
                let none = b.scalar(S::Eq, &[&y, &none])?;
                b.scalar(S::Select, &[&none, &zero, &y])
            }
        }
    }

    /// If every tree votes for at most one target, returns the roots ordered by target, and their number per
    /// target. This number is the same for all targets: a leaf without votes takes the place of missing
    /// roots. `None` if a tree votes for several targets, or if too many roots are missing.
    fn groups(&mut self) -> Option<(Vec<usize>, usize)> {
        let single = self.single.take()?;
        let mut count = vec![0usize; self.targets];
        single.iter().flatten().for_each(|t| count[*t] += 1);
        let size = count.iter().copied().max().unwrap_or(0).max(1);
        let all = self.targets.checked_mul(size)?;
        if all > 2 * self.roots.len() + EXTRA_ENTRIES {
            return None;
        }
        // The blank leaf is made before roots are copied, because a new leaf shifts the indices of branches.
        let blank = if count.iter().any(|n| *n < size) { self.blank_leaf() } else { 0 };
        let mut roots = vec![blank; all];
        let mut filled = vec![0usize; self.targets];
        for (t, r) in single.iter().zip(&self.roots).filter_map(|(t, r)| Some(((*t)?, *r))) {
            roots[t * size + filled[t]] = r;
            filled[t] += 1;
        }
        Some((roots, size))
    }

    /// A leaf without votes: an existing one, or a new one.
    fn blank_leaf(&mut self) -> usize {
        if let Some(i) = self.votes.iter().position(Vec::is_empty) {
            return i;
        }
        // The indices of branches grow by one.
        let leaves = self.votes.len();
        let moved = |i: usize| if i < leaves { i } else { i + 1 };
        self.next.iter_mut().flatten().for_each(|n| *n = moved(*n));
        self.roots.iter_mut().for_each(|n| *n = moved(*n));
        self.next.insert(leaves, [leaves; 4]);
        self.feature.insert(leaves, 0);
        self.split.insert(leaves, 0.0);
        self.votes.push(vec![]);
        leaves
    }

    /// The leaf that each of the N rows reaches in each tree: i32 `[N, trees]`.
    fn walk(&self, b: &mut Builder, x: &Value) -> Result<Value> {
        let n = self.next.len();
        let ints = |v: &mut dyn Iterator<Item = i64>, n: usize| integers(DType::I32, &[n], v);
        let feature = ints(&mut self.feature.iter().copied(), n)?;
        let split = self.table(&[n], self.split.iter().copied())?;
        let next = ints(&mut self.next.iter().flatten().map(|n| *n as i64), 4 * n)?;
        let roots = ints(&mut self.roots.iter().map(|n| *n as i64), self.roots.len())?;
        let mut at = b.expand(&roots, &Shape::from_iter([x.shape()[0], Dim::from(self.roots.len())]))?;
        let code = |b: &Builder, v: i64| b.lit(&at, v);
        let (less, same, more, neither, four) = (code(b, 0), code(b, 1), code(b, 2), code(b, 3), code(b, 4));
        for _ in 0..self.depth {
            let f = b.gather(&feature, &at, 0)?;
            let ids = b.ids(&[x, &f])?;
            let v = b.g.gather_elements(ids[0], ids[1], 1)?;
            let v = b.value(v);
            let t = b.gather(&split, &at, 0)?;
            let (lt, eq, gt) =
                (b.scalar(S::Lt, &[&v, &t])?, b.scalar(S::Eq, &[&v, &t])?, b.scalar(S::Gt, &[&v, &t])?);
            let o = b.scalar(S::Select, &[&gt, &more, &neither])?;
            let o = b.scalar(S::Select, &[&eq, &same, &o])?;
            let o = b.scalar(S::Select, &[&lt, &less, &o])?;
            let i = b.scalar(S::Mul, &[&at, &four])?;
            let i = b.scalar(S::Add, &[&i, &o])?;
            at = b.gather(&next, &i, 0)?;
        }
        Ok(at)
    }

    fn table(&self, dims: &[usize], v: impl IntoIterator<Item = f64>) -> Result<Value> {
        let v = v.into_iter().map(Scalar::F);
        Ok(Value::table(data::from_scalars(self.dtype, dims, v)?))
    }

    /// Aggregates the votes of trees that [`Forest::groups`] cannot order by target.
    fn reduce_votes(&self, b: &mut Builder, c: &Call<'_>, rows: Dim, at: &Value) -> Result<Value> {
        let (leaves, k, none) = (self.votes.len(), self.targets, self.aggregate.neutral());
        let total: usize = self.votes.iter().map(Vec::len).sum();
        let budget = 2 * total + EXTRA_ENTRIES;
        // Uses a table with a row for each leaf and a column for each target, if its size is within the
        // budget.
        if leaves.checked_mul(k).is_some_and(|n| n <= budget) {
            let mut w = vec![none; leaves * k];
            for (i, v) in self.votes.iter().enumerate() {
                for (t, v) in v {
                    w[i * k + t] = self.aggregate.join(w[i * k + t], *v);
                }
            }
            let table = self.table(&[leaves, k], w)?;
            let y = b.gather(&table, at, 0)?;
            return b.reduce(self.aggregate.kind(), &y, &[1], false);
        }
        let most = self.votes.iter().map(Vec::len).max().unwrap_or(0);
        if leaves.checked_mul(most).is_none_or(|n| n > budget) {
            return Err(c.unsupported(
                &format!("{leaves} leaves of which one has {most} votes"),
                "Export leaves with equally many votes",
            ));
        }
        let padded = |f: &dyn Fn(Option<&(usize, f64)>) -> f64| -> Vec<f64> {
            self.votes.iter().flat_map(|v| (0..most).map(|i| f(v.get(i)))).collect()
        };
        let targets = padded(&|v| v.map_or(0.0, |v| v.0 as f64));
        let targets = integers(DType::I32, &[leaves, most], targets.into_iter().map(|v| v as i64))?;
        let weights = self.table(&[leaves, most], padded(&|v| v.map_or(none, |v| v.1)))?;
        let flat = Shape::from_iter([rows, Dim::from(self.roots.len()).mul(most.into())]);
        let to = b.gather(&targets, at, 0)?;
        let to = b.reshape(&to, flat.clone())?;
        let w = b.gather(&weights, at, 0)?;
        let w = b.reshape(&w, flat)?;
        let base = b.full(self.dtype, &Shape::from_iter([rows, Dim::from(k)]), Scalar::F(none));
        let ids = b.ids(&[&base, &to, &w])?;
        let n = b.g.scatter_elements(ids[0], ids[1], ids[2], 1, self.aggregate.scatter())?;
        Ok(b.value(n))
    }
}

/// A balanced search tree over `0..n`: the children of each node. The root is `n / 2`.
fn search_tree(n: usize) -> Vec<[Option<usize>; 2]> {
    let mut out = vec![[None; 2]; n];
    let mut todo = vec![(0, n)];
    let middle = |lo: usize, hi: usize| (lo < hi).then(|| lo + (hi - lo) / 2);
    while let Some((lo, hi)) = todo.pop() {
        if let Some(m) = middle(lo, hi) {
            out[m] = [middle(lo, m), middle(m + 1, hi)];
            todo.push((lo, m));
            todo.push((m + 1, hi));
        }
    }
    out
}

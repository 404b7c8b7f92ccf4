//! The operators the importer knows. Adding one is a row in the table of its file and, where the row needs more than a
//! line, a function there. A function builds every version of its operator that the row claims.

mod control;
mod elementwise;
mod fft;
mod nn;
mod pool;
mod random;
mod reduce;
mod sequence;
mod shape;
mod signal;
#[cfg(test)]
#[path = "tests.rs"]
mod version_tests;
mod view;

use super::build::{Builder, Value};
use super::item::Item;
use super::node::Call;
use halcyon_ir::Result;

/// Newest version of the default operator set that the rows were read against.
pub const LATEST: i64 = 28;

/// As [`LATEST`], of any domain; 0 for a domain without rows.
pub fn latest(domain: &str) -> i64 {
    match plain(domain) {
        "" => LATEST,
        "ai.onnx.ml" => 5,
        "ai.onnx.preview.training" => 1,
        _ => 0,
    }
}

/// The default domain has two spellings.
fn plain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Builds the results of a node, at least as many as the model reads.
pub type BuildTensors = fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>;
/// As [`BuildTensors`], of operators that take or give strings, sequences, optionals or maps.
pub type BuildItems = fn(&mut Builder, &Call<'_>) -> Result<Vec<Item>>;

#[derive(Clone, Copy, Debug)]
pub enum Build {
    Tensors(BuildTensors),
    Items(BuildItems),
}

/// One operator.
#[derive(Debug)]
pub struct Row {
    /// Empty for the default domain.
    pub domain: &'static str,
    pub op: &'static str,
    /// First version of the operator set that has it in a form we take.
    pub since: i64,
    /// Attributes that `build` reads. Any other is reported as unsupported.
    pub attrs: &'static [&'static str],
    pub build: Build,
}

const fn row(op: &'static str, since: i64, attrs: &'static [&'static str], build: BuildTensors) -> Row {
    row_in("", op, since, attrs, build)
}

/// A row of another domain than the default one, which [`latest`] must name.
const fn row_in(
    domain: &'static str,
    op: &'static str,
    since: i64,
    attrs: &'static [&'static str],
    build: BuildTensors,
) -> Row {
    Row { domain, op, since, attrs, build: Build::Tensors(build) }
}

const fn item_row(op: &'static str, since: i64, attrs: &'static [&'static str], build: BuildItems) -> Row {
    item_row_in("", op, since, attrs, build)
}

const fn item_row_in(
    domain: &'static str,
    op: &'static str,
    since: i64,
    attrs: &'static [&'static str],
    build: BuildItems,
) -> Row {
    Row { domain, op, since, attrs, build: Build::Items(build) }
}

const TABLES: &[&[Row]] = &[
    control::ROWS,
    elementwise::ROWS,
    nn::ROWS,
    pool::ROWS,
    random::ROWS,
    reduce::ROWS,
    sequence::ROWS,
    shape::ROWS,
    signal::ROWS,
    view::ROWS,
];

/// All rows.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    TABLES.iter().flat_map(|t| t.iter())
}

/// The row of an operator. `domain` is as the model writes it.
pub fn find(domain: &str, op: &str) -> Option<&'static Row> {
    rows().find(|r| r.domain == plain(domain) && r.op == op)
}

/// A single result.
fn one(v: Value) -> Result<Vec<Value>> {
    Ok(vec![v])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_has_one_row() {
        for r in rows() {
            assert!((1..=latest(r.domain)).contains(&r.since), "{}", r.op);
            assert_eq!(rows().filter(|s| (s.domain, s.op) == (r.domain, r.op)).count(), 1, "{}", r.op);
        }
    }

    #[test]
    fn domains_are_apart() {
        assert!(find("", "Add").is_some());
        assert!(find("ai.onnx", "Add").is_some());
        assert!(find("ai.onnx.ml", "Add").is_none());
        assert_eq!((latest("ai.onnx"), latest("com.example")), (LATEST, 0));
    }
}

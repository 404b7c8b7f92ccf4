//! The operators the importer knows. Adding one is a row in the table of its file and, where the row needs more than a
//! line, a function there. A function builds every version of its operator that the row claims.

mod control;
mod elementwise;
mod nn;
mod pool;
mod reduce;
mod sequence;
mod shape;
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

/// Builds the results of a node, at least as many as the model reads.
#[derive(Clone, Copy, Debug)]
pub enum Build {
    /// Of an operator whose operands and results are tensors.
    Tensors(fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>),
    /// Of one that takes or gives strings, sequences, optionals or maps.
    Items(fn(&mut Builder, &Call<'_>) -> Result<Vec<Item>>),
}

/// One operator of the default domain.
#[derive(Debug)]
pub struct Row {
    pub op: &'static str,
    /// First version of the operator set that has it in a form we take.
    pub since: i64,
    /// Attributes that `build` reads. Any other is reported as unsupported.
    pub attrs: &'static [&'static str],
    pub build: Build,
}

const fn row(
    op: &'static str,
    since: i64,
    attrs: &'static [&'static str],
    build: fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>,
) -> Row {
    Row { op, since, attrs, build: Build::Tensors(build) }
}

const fn item_row(
    op: &'static str,
    since: i64,
    attrs: &'static [&'static str],
    build: fn(&mut Builder, &Call<'_>) -> Result<Vec<Item>>,
) -> Row {
    Row { op, since, attrs, build: Build::Items(build) }
}

const TABLES: &[&[Row]] = &[
    control::ROWS,
    elementwise::ROWS,
    nn::ROWS,
    pool::ROWS,
    reduce::ROWS,
    sequence::ROWS,
    shape::ROWS,
    view::ROWS,
];

/// All rows.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    TABLES.iter().flat_map(|t| t.iter())
}

/// The row of an operator. `domain` is as the model writes it.
pub fn find(domain: &str, op: &str) -> Option<&'static Row> {
    rows().find(|r| matches!(domain, "" | "ai.onnx") && r.op == op)
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
            assert!((1..=LATEST).contains(&r.since), "{}", r.op);
            assert_eq!(rows().filter(|s| s.op == r.op).count(), 1, "{}", r.op);
        }
    }
}

//! The operators the importer knows. Adding one is a row in the table of its file and, where the row needs more than a
//! line, a function there. A function builds every version of its operator that the row claims.

mod calc;
mod deform;
mod elementwise;
mod nn;
mod pad;
mod pool;
mod reduce;
mod resize;
mod roi;
mod sample;
mod shape;
mod unpool;
#[cfg(test)]
#[path = "tests.rs"]
mod version_tests;
mod view;

use super::build::{Builder, Value};
use super::node::Call;
use halcyon_ir::Result;

/// Newest version of the default operator set that the rows were read against.
pub const LATEST: i64 = 28;

/// Builds the results of a node, at least as many as the model reads.
pub type Build = fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>;

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

const fn row(op: &'static str, since: i64, attrs: &'static [&'static str], build: Build) -> Row {
    Row { op, since, attrs, build }
}

const TABLES: &[&[Row]] = &[
    deform::ROWS,
    elementwise::ROWS,
    nn::ROWS,
    pad::ROWS,
    pool::ROWS,
    reduce::ROWS,
    resize::ROWS,
    roi::ROWS,
    sample::ROWS,
    shape::ROWS,
    unpool::ROWS,
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

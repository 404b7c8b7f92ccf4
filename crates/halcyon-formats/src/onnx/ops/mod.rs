//! The operators that the importer supports. To add one, add a row to the table of a file in this folder and,
//! if it needs more than a line, a function. The function must build every version of the operator from the
//! row's `since` on.

mod activation;
mod attention;
mod bits;
mod calc;
mod cast;
mod control;
mod deform;
mod detect;
mod dropout;
mod einsum;
mod elementwise;
mod fft;
pub(super) mod gradient;
mod index;
#[cfg(test)]
mod index_tests;
mod linear_attention;
mod loss;
mod matrix;
mod ml;
mod nbits;
mod nn;
mod norm;
mod pad;
mod pool;
mod qlinear;
mod quantize;
#[cfg(test)]
mod quantize_tests;
mod random;
mod re2;
mod recurrent;
#[cfg(test)]
mod recurrent_tests;
mod reduce;
mod resize;
mod roi;
mod sample;
mod select;
mod sequence;
mod shape;
mod signal;
mod state;
mod strings;
pub(super) mod text;
mod tfidf;
mod training;
mod unpool;
#[cfg(test)]
#[path = "tests.rs"]
mod version_tests;
mod view;
#[cfg(test)]
mod vision_tests;

use super::build::{Builder, Value};
use super::item::Item;
use super::node::Call;
use halcyon_ir::Result;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Newest version of the default operator set that the rows have been checked against.
pub const LATEST: i64 = 28;

/// Operators that draw random numbers in every case. (Dropout draws them only in training mode.)
pub const RANDOM: &[&str] =
    &["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/// Like [`LATEST`], for any domain; 0 for a domain without rows.
pub fn latest(domain: &str) -> i64 {
    match plain(domain) {
        "" => LATEST,
        "ai.onnx.ml" => 5,
        "ai.onnx.preview" | "ai.onnx.preview.training" | "com.microsoft" => 1,
        _ => 0,
    }
}

/// A domain as rows spell it. Models spell the default domain in two ways.
fn plain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Builds the results of a node: at least as many as the model reads.
pub type BuildTensors = fn(&mut Builder, &Call<'_>) -> Result<Vec<Value>>;
/// Like [`BuildTensors`], for operators with operands or results that are strings, sequences, optionals or
/// maps.
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
    /// First version of the operator set whose form of the operator is supported.
    pub since: i64,
    /// Attributes that `build` accepts, including those that it ignores. Others are reported as unsupported.
    pub attrs: &'static [&'static str],
    pub build: Build,
}

const fn row(op: &'static str, since: i64, attrs: &'static [&'static str], build: BuildTensors) -> Row {
    row_in("", op, since, attrs, build)
}

/// A row of a non-default domain, which [`latest`] must list.
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
    activation::ROWS,
    attention::ROWS,
    bits::ROWS,
    cast::ROWS,
    control::ROWS,
    deform::ROWS,
    detect::ROWS,
    dropout::ROWS,
    einsum::ROWS,
    elementwise::ROWS,
    gradient::ROWS,
    index::ROWS,
    linear_attention::ROWS,
    loss::ROWS,
    matrix::ROWS,
    ml::feature::ROWS,
    ml::label::ROWS,
    ml::linear::ROWS,
    ml::map::ROWS,
    ml::svm::ROWS,
    ml::tree::ROWS,
    nbits::ROWS,
    nn::ROWS,
    norm::ROWS,
    pad::ROWS,
    pool::ROWS,
    qlinear::ROWS,
    quantize::ROWS,
    random::ROWS,
    recurrent::ROWS,
    reduce::ROWS,
    resize::ROWS,
    roi::ROWS,
    sample::ROWS,
    select::ROWS,
    sequence::ROWS,
    shape::ROWS,
    signal::ROWS,
    state::ROWS,
    strings::ROWS,
    tfidf::ROWS,
    training::ROWS,
    unpool::ROWS,
    view::ROWS,
];

/// All rows.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    TABLES.iter().flat_map(|t| t.iter())
}

/// The row of an operator. `domain` is spelled as in the model.
pub fn find(domain: &str, op: &str) -> Option<&'static Row> {
    // A map, because every visited node looks up its row, and the nodes of a loop body do so in each
    // iteration.
    static ROWS: LazyLock<HashMap<(&str, &str), &Row>> =
        LazyLock::new(|| rows().map(|r| ((r.domain, r.op), r)).collect());
    ROWS.get(&(plain(domain), op)).copied()
}

/// Whether an operator on tensors also accepts strings.
#[cfg(test)]
pub(super) fn on_strings(op: &str) -> bool {
    text::moves(op)
}

/// The results of a node that has one result.
fn one(v: Value) -> Result<Vec<Value>> {
    Ok(vec![v])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_has_one_row() {
        for r in rows() {
            assert!(
                (1..=latest(r.domain)).contains(&r.since),
                "{} since {} is not within latest()",
                r.op,
                r.since
            );
            assert_eq!(rows().filter(|s| (s.domain, s.op) == (r.domain, r.op)).count(), 1, "{}", r.op);
        }
    }

    #[test]
    fn operators_of_other_domains_are_not_confused() {
        assert!(find("", "Add").is_some());
        assert!(find("ai.onnx", "Add").is_some());
        assert!(find("ai.onnx.ml", "Add").is_none());
        assert_eq!((latest("ai.onnx"), latest("com.example")), (LATEST, 0));
    }
}

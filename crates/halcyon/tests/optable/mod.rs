//! The op table: what every op must give on every device.
//!
//! A [`Row`] is one op with the types it takes, its tolerance and cases (operand shapes and a graph of that one op). The rows
//! are used four times: forward against the reference, gradients against finite differences, under the sanitizer, and to
//! check that nothing is missing.
#![allow(dead_code)]

pub mod case;
pub mod check;
pub mod elementwise;
pub mod grads;
pub mod random;
pub mod sanitizer;
pub mod small;
pub mod structured;
pub mod user;
pub mod views;
pub mod windows;

use case::Row;

/// Every row.
pub fn rows() -> Vec<Row> {
    let mut r = elementwise::rows();
    r.extend(small::rows());
    r.extend(views::rows());
    r.extend(structured::rows());
    r.extend(windows::rows());
    r
}

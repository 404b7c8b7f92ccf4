//! The op table: the required results of every op on every device.
//!
//! A [`Row`] is one op with its dtypes, its tolerance and its cases (operand shapes and a graph of that op).
//! `halcyon conformance ops` runs the table on the user's machine. The library's tests compare the results
//! with the reference and the gradients with finite differences, run the table under the sanitizer, and check
//! that no op is missing.
//!
//! ```
//! use halcyon::optable::{self, Rng, check};
//! # fn main() -> halcyon::Result<()> {
//! let backend = halcyon::Backend::cpu()?;
//! let rows = optable::rows();
//! let row = rows.iter().find(|r| r.name == "tanh").ok_or_else(|| halcyon::Error::internal("no row"))?;
//! let sample = row.cases[0].sample(row.tol, halcyon::DType::F32, &mut Rng::new(1))?;
//! let verdict = check::judge(&backend, &sample)?;
//! assert!(verdict.is_ok_and(|errors| errors.of_tolerance <= 1.0));
//! # Ok(())
//! # }
//! ```

pub mod case;
pub mod check;
pub mod elementwise;
pub mod language;
pub mod quantized;
mod rng;
pub mod small;
pub mod structured;
pub mod user;
pub mod views;
pub mod windows;

pub use case::{Case, Row, Tol};
pub use check::{Errors, Expected, Sample};
pub use rng::Rng;

/// Every row.
pub fn rows() -> Vec<Row> {
    let mut r = elementwise::rows();
    r.extend(small::rows());
    r.extend(views::rows());
    r.extend(structured::rows());
    r.extend(windows::rows());
    r.extend(quantized::rows());
    r.extend(language::rows());
    r
}

//! Graph passes. Each takes a graph and returns a new one with the same inputs, arguments, outputs and states.

pub mod cse;
pub mod fold;
pub mod inline;
pub mod rebuild;
pub mod simplify;

#[cfg(test)]
mod tests;

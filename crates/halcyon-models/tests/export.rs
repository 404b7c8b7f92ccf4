//! Writing models: types of tensors, errors of quantisation, round trips.

#[path = "export/types.rs"]
mod types;

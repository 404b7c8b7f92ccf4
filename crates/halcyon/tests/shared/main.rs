//! Tests that can share a process are in this one binary, so that a change of the library takes one link for
//! all of them. Tests with a binary of their own replace drivers (`verify`, `standins`), measure times
//! (`tuning`), count the process's allocations (`warm`), change its folder (`readme`), or run alone under
//! each instruction set (`ops`, `mixed`).

mod api;
mod capture;
mod compile;
mod custom;
mod end_to_end;
mod epilogue;
#[cfg(feature = "onnx")]
mod export;
mod faults;
mod in_place;
mod launches;
mod layouts;
mod levels;
mod named;
#[cfg(feature = "onnx")]
mod onnx_api;
mod packed;
mod prepare;
mod quantize;
mod queries;
mod random;
mod receipts;
mod rules;
mod split;

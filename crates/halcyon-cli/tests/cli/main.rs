//! Tests of the command. Each test runs the command in a process of its own. The tests are in one binary, so
//! that only one binary is linked again after a change of the library.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod bench;
#[cfg(feature = "ort")]
mod compare;
#[cfg(feature = "language")]
mod convert;
mod corruption;
mod doctor;
#[cfg(all(target_os = "linux", feature = "cuda", feature = "rocm", feature = "tpu"))]
mod drivers;
mod embed;
mod fit;
mod help;
#[cfg(feature = "language")]
mod hub;
mod inspect;
#[cfg(feature = "language")]
mod language;
#[cfg(feature = "language")]
mod language_files;
#[cfg(feature = "language")]
mod language_fit;
#[cfg(feature = "language")]
mod language_flags;
#[cfg(feature = "language")]
mod language_mtp;
#[cfg(feature = "language")]
mod language_split;
mod loops;
mod mistakes;
mod names;
#[cfg(feature = "ort")]
mod ort;
#[cfg(unix)]
mod outputs;
mod prepare;
#[cfg(feature = "language")]
mod quantize;
mod run;
mod select;
mod start;
mod text;
mod train;
mod tune;

//! Tests of the command, which each runs as a process of its own. They are one binary, so that a change of
//! the library links once for all of them.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod bench;
mod corruption;
mod doctor;
#[cfg(all(target_os = "linux", feature = "cuda", feature = "rocm", feature = "tpu"))]
mod drivers;
mod fit;
mod help;
mod inspect;
mod loops;
mod mistakes;
mod names;
#[cfg(unix)]
mod outputs;
mod run;
mod select;
mod start;
mod text;
mod tune;

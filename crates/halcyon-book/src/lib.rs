//! Runs the Rust code of the pages in `docs/` as documentation tests. `build.rs` makes a module of each
//! block, whose name has the page and the line.
#![forbid(unsafe_code)]

include!(concat!(env!("OUT_DIR"), "/pages.rs"));

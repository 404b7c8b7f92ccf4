//! Runs the Rust example of the README.
#![cfg(feature = "onnx")]

include!("snippet.rs");

#[test]
fn readmes_lines_run() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::env::set_current_dir(root).expect("the repository");
    main().expect("the model runs");
}

#[test]
fn readme_shows_these_lines() {
    let readme = include_str!("../../../../README.md").replace("\r\n", "\n");
    let block = format!("```rust\n{}```\n", include_str!("snippet.rs").replace("\r\n", "\n"));
    assert!(readme.contains(&block), "the snippet in README.md differs from tests/readme/snippet.rs");
}

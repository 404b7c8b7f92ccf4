//! Fuzz target: the index of safetensors files and the configuration of a folder in Hugging Face's layout.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static FOLDER: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("a folder for temporary files"));

fuzz_target!(|data: &[u8]| halcyon_fuzz::language::folder(FOLDER.path(), data));

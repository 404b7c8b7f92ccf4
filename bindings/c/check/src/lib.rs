//! The header of the C library.

use std::path::{Path, PathBuf};

/// The beginning of the header.
const INTRODUCTION: &str = "\
/* The C library of Halcyon: docs/c-api.md explains it.
 *
 * Written by bindings/c/check from the library's sources; do not edit.
 *
 * Strings are UTF-8 and end with NUL; a \"Safety\" section calls such a string \"a string\". Pointers must be
 * valid as these sections say. NULL where it is not allowed is an error, not undefined behaviour.
 */";

/// The folder of the library.
pub fn library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("")
}

/// The header's file.
pub fn file() -> PathBuf {
    library().join("include/halcyon.h")
}

/// The header that the library's sources give.
///
/// # Errors
/// The sources cannot be read or have types that C lacks.
pub fn header() -> Result<String, String> {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(INTRODUCTION.into()),
        include_guard: Some("HALCYON_H".into()),
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"].map(String::from).to_vec(),
        cpp_compat: true,
        usize_is_size_t: true,
        documentation_style: cbindgen::DocumentationStyle::Doxy,
        style: cbindgen::Style::Type,
        line_length: 110,
        tab_width: 4,
        ..cbindgen::Config::default()
    };
    config.enumeration.rename_variants = cbindgen::RenameRule::QualifiedScreamingSnakeCase;
    // No function has it in its type, because callers may pass any number.
    config.export.include = vec!["HalcyonDtype".into()];
    config.function.args = cbindgen::Layout::Auto;
    // By file: reading it as a package would ask cargo for all of its dependencies.
    let source = library().join("src/lib.rs");
    let builder = cbindgen::Builder::new().with_config(config).with_src(&source);
    let bindings = builder.generate().map_err(|e| format!("{}: {e}", source.display()))?;
    let mut text = vec![];
    bindings.write(&mut text);
    String::from_utf8(text).map_err(|e| e.to_string())
}

//! The handshake with a PJRT plugin, tested with small libraries.
#![cfg(feature = "tpu")]

use halcyon_hal::tpu::sys::{Version, version};
use std::path::{Path, PathBuf};

/// Compiles a library from C source; `None` without a C compiler.
fn library(dir: &Path, name: &str, source: &str) -> Option<PathBuf> {
    let to = dir.join(format!("{name}.so"));
    halcyon_test_host::library(&to, source, &[]).then_some(to)
}

const TABLE: &str = "#include <stddef.h>
struct version { size_t size; void *more; int major, minor; };
struct api { size_t size; void *more; struct version v; void *functions[4]; };
static struct api it = { SIZE, 0, { VSIZE, 0, 0, 77 } };
const struct api *GetPjrtApi(void) { return TABLE; }\n";

#[test]
fn a_plugin_reports_its_version_and_errors_name_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str, size: &str, vsize: &str, table: &str| {
        let defines = format!("#define SIZE {size}\n#define VSIZE {vsize}\n#define TABLE {table}\n");
        library(dir.path(), name, &(defines + TABLE))
    };
    let Some(good) = with("good", "sizeof(struct api)", "sizeof(struct version)", "&it") else {
        return halcyon_test_host::skip(
            "a_plugin_reports_its_version_and_errors_name_the_cause",
            "no C compiler for the plugin",
        );
    };
    // SAFETY: every library that can be loaded is compiled from a source in this test, and its `GetPjrtApi`,
    // if it has one, has the type of PJRT.
    let ask = |p: &Path| unsafe { version(p.to_str().unwrap()) };
    assert_eq!(ask(&good), Ok(Version { major: 0, minor: 77 }));
    assert_eq!(ask(&good), Ok(Version { major: 0, minor: 77 }), "again");
    let bad = [
        (with("small", "8", "sizeof(struct version)", "&it"), "8 bytes"),
        (with("old", "sizeof(struct api)", "4", "&it"), "its version has 4 bytes"),
        (with("null", "1", "1", "0"), "no table"),
        (library(dir.path(), "other", "int x;\n"), "no function GetPjrtApi"),
    ];
    for (lib, part) in bad {
        let e = ask(&lib.unwrap()).unwrap_err();
        assert!(e.contains(part), "{part}: {e}");
    }
    let text = dir.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    assert!(
        ask(&text).is_err() && ask(Path::new("/nowhere/libtpu.so")).unwrap_err().contains("No such file")
    );
}

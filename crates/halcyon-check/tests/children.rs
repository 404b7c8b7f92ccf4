//! The child processes of a check end with it, even if they are stuck in a driver.
#![cfg(target_os = "linux")]

use halcyon_test::{gone, library, skip, soon};
use std::process::{Command, Stdio};

/// A library whose loading never ends. It writes the ids of the loading process and of its parent to a file.
const HANG: &str = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>
__attribute__((constructor)) static void at_load(void) {
    FILE *f = fopen(getenv(\"DRIVER_PID\"), \"w\");
    fprintf(f, \"%d %d\\n\", getpid(), getppid());
    fclose(f);
    for (;;) pause();
}\n";

#[test]
fn a_check_that_is_ended_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("a folder");
    let lib = dir.path().join("libhang.so");
    if !library(&lib, HANG, &[]) {
        return skip("a_check_that_is_ended_leaves_nothing_behind", "no C compiler for the driver");
    }
    for signal in ["-TERM", "-KILL"] {
        let told = dir.path().join("pids");
        let mut parent = Command::new(env!("CARGO_BIN_EXE_halcyon-check"))
            .args(["--backend", "cpu", "--no-torch", "--rehearsal", "--only", "hal", "--out"])
            .arg(dir.path())
            .env("HALCYON_CUDA_LIBRARY", &lib)
            .env("DRIVER_PID", &told)
            .env("TMPDIR", dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        // A child looks for devices. It starts a child of its own, which loads the driver.
        let mut text = String::new();
        let loaded = soon(|| {
            text = std::fs::read_to_string(&told).unwrap_or_default();
            text.ends_with('\n')
        });
        assert!(loaded, "the driver was not loaded");
        let pids: Vec<&str> = text.split_whitespace().collect();
        assert!(pids.len() == 2 && !pids.contains(&parent.id().to_string().as_str()), "{text}");
        assert!(
            Command::new("kill").args([signal, &parent.id().to_string()]).status().expect("kill").success()
        );
        parent.wait().expect("it ends");
        for pid in pids {
            assert!(soon(|| gone(pid)), "after {signal} process {pid} lives on");
        }
        std::fs::remove_file(&told).expect("removed");
    }
}

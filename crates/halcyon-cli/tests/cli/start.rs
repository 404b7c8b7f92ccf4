//! Tests of the cache of packed weights across starts. `cargo xtask bench start` measures how long a start
//! takes.

use crate::common::*;

#[test]
fn packed_weights_of_one_start_serve_the_next_with_the_same_answer() {
    let test = "packed_weights_of_one_start_serve_the_next_with_the_same_answer";
    let Some(dir) = prepared(test, "HALCYON_TESTDATA", "models/random/light_resnet50") else { return };
    let cache = tempfile::tempdir().expect("a folder");
    let model = dir.join("model.onnx");
    let run = |mode: &str| {
        let mut c = command(&["run", text(&model), "--input", "random", "--level", "O2", "--json"]);
        c.env("HALCYON_CACHE", mode).env("XDG_CACHE_HOME", cache.path()).env("LOCALAPPDATA", cache.path());
        finish(&mut c).ok().json()
    };
    let (plain, first, second) = (run("programs"), run("packed"), run("packed"));
    assert_eq!(plain["caches"]["packed_loads"], 0);
    assert_eq!(first["caches"]["packed_loads"], 0);
    assert!(second["caches"]["packed_loads"].as_u64() > Some(0), "{second:#}");
    assert_eq!(plain["outputs"], first["outputs"]);
    assert_eq!(plain["outputs"], second["outputs"]);
}

/// Weights packed for one instruction set are not used with another, because the cache key includes it.
#[test]
fn packed_weights_belong_to_their_instruction_set() {
    let test = "packed_weights_belong_to_their_instruction_set";
    if halcyon_test::left_out(test) {
        return;
    }
    let Some(dir) = prepared(test, "HALCYON_TESTDATA", "models/random/light_resnet50") else { return };
    let cache = tempfile::tempdir().expect("a folder");
    let model = dir.join("model.onnx");
    let run = |isa: Option<&str>| {
        let mut c = command(&[
            "run",
            text(&model),
            "--input",
            "random",
            "--backend",
            "cpu",
            "--level",
            "O2",
            "--json",
        ]);
        c.env("HALCYON_CACHE", "packed")
            .env("XDG_CACHE_HOME", cache.path())
            .env("LOCALAPPDATA", cache.path());
        match isa {
            Some(name) => c.env("HALCYON_CPU_ISA", name),
            None => c.env_remove("HALCYON_CPU_ISA"),
        };
        finish(&mut c).ok().json()
    };
    let best = run(None);
    assert_eq!(best["caches"]["packed_loads"], 0);
    let used =
        best["backend"]["device"]["properties"]["instruction_set"].as_str().expect("a name").to_string();
    let low = run(Some("portable"));
    assert_eq!(low["backend"]["device"]["properties"]["instruction_set"], "portable");
    // On a machine that has only the portable set, both runs use this set.
    assert_eq!(low["caches"]["packed_loads"].as_u64() > Some(0), used == "portable", "{low:#}");
    assert!(run(Some("portable"))["caches"]["packed_loads"].as_u64() > Some(0));
}

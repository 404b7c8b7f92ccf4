//! Tests with drivers that crash, hang, print, or change after they were probed. None of them may crash the
//! command, delay it more than once or write into its output, and no probing process may be left behind.

use crate::common::*;
use halcyon_test::{gone, library, soon, standin};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const SEVEN: [&str; 4] = ["run", "models/digits.onnx", "--input", "models/digit-7.png"];
const CRASH: &str =
    "#include <stdlib.h>\n__attribute__((constructor)) static void at_load(void) { abort(); }\n";
const EMPTY: &str = "int x;\n";
/// A library that never returns when it is loaded. It writes the id of the loading process to a file.
const HANG: &str = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>
__attribute__((constructor)) static void at_load(void) {
    const char *path = getenv(\"DRIVER_PID\");
    if (path) { FILE *f = fopen(path, \"w\"); fprintf(f, \"%d\\n\", getpid()); fclose(f); }
    for (;;) pause();
}\n";
/// A library that prints when it is loaded, when a kernel is loaded, and when the process ends. Some of the
/// output does not end with a newline.
const TALK: &str = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>
__attribute__((constructor)) static void at_load(void) {
    printf(\"hello from the driver\\n\");
    fprintf(stderr, \"the driver warns\\n\");
}
__attribute__((destructor)) static void at_end(void) { printf(\"the driver says bye\"); }
int cuModuleLoadData(void **module, const void *image) {
    printf(\"the driver compiles\");
    int (*next)(void **, const void *) = dlsym(RTLD_NEXT, \"cuModuleLoadData\");
    return next(module, image);
}\n";
const CRASH_AT_OPEN: &str =
    "#include <stdlib.h>\nint cuDevicePrimaryCtxRetain(void **c, int d) { abort(); }\n";

/// A folder for libraries, and the command with its own cache of probe results.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("l")).expect("a folder");
        World { dir }
    }

    fn lib(&self, name: &str) -> PathBuf {
        self.dir.path().join("l").join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut c = command(args);
        c.env("HALCYON_CONFIG", "off").env_remove("HALCYON_BACKENDS").env_remove("HALCYON_LOG");
        for name in ["HALCYON_CUDA_LIBRARY", "HALCYON_HIP_LIBRARY", "HALCYON_TPU_LIBRARY", "TPU_LIBRARY_PATH"]
        {
            c.env_remove(name);
        }
        c.env("HALCYON_CACHE", "programs").env("XDG_CACHE_HOME", self.dir.path().join("cache"));
        c.env("LD_LIBRARY_PATH", self.dir.path().join("l"));
        c
    }

    fn run(&self, args: &[&str]) -> Done {
        finish(&mut self.command(args))
    }

    fn reason(&self, backend: &str) -> String {
        reason(&self.run(&["devices", "--json"]), backend)
    }
}

fn reason(d: &Done, backend: &str) -> String {
    assert_eq!(d.code, 0, "{d:?}");
    let v = d.json();
    let row = v.as_array().and_then(|a| a.iter().find(|r| r["id"] == backend)).expect("a row");
    row["reason"].as_str().unwrap_or_default().into()
}

/// After the list of devices is cached, a library appears that crashes the process loading it. The command
/// must notice the library and not use the cached result.
#[test]
fn a_library_that_comes_later_is_looked_at_by_a_child() {
    let test = "a_library_that_comes_later_is_looked_at_by_a_child";
    for (backend, name) in [("cuda", "libcuda.so.1"), ("tpu", "libtpu.so"), ("rocm", "libamdhip64.so.5")] {
        let w = World::new();
        w.run(&["devices"]).ok();
        w.run(&["devices"]).ok();
        if !library(&w.lib(name), CRASH, &[]) {
            return skip(test, "no C compiler for the libraries");
        }
        for _ in 0..2 {
            let why = w.reason(backend);
            assert!(why.contains("signal") && why.contains(name), "{backend}: {why}");
            let v = w.run(&[&SEVEN[..], &["--json"]].concat()).ok().json();
            assert_eq!(v["backend"]["id"], "cpu:0");
        }
        w.run(&[&SEVEN[..], &["--backend", backend]].concat())
            .fails(4, &["signal", "halcyon devices --refresh"]);
        // The library is replaced by a harmless one, then by the crashing one. Each change is noticed at
        // once.
        library(&w.lib(name), EMPTY, &[]);
        assert!(w.reason(backend).contains("it has no function"), "{backend}");
        w.run(&SEVEN).ok();
        let other = w.dir.path().join("other.so");
        library(&other, CRASH, &[]);
        // Overwrites the same file.
        std::fs::write(w.lib(name), std::fs::read(&other).expect("read")).expect("written");
        assert!(w.reason(backend).contains("signal"), "{backend}");
    }
}

/// Tests the paths that the loader searches: relative and empty entries, a folder that is created later, and
/// a library that another one needs.
#[test]
fn every_way_to_a_library_counts() {
    let test = "every_way_to_a_library_counts";
    let w = World::new();
    let crash = w.dir.path().join("crash.so");
    if !library(&crash, CRASH, &[]) {
        return skip(test, "no C compiler for the libraries");
    }
    let elsewhere = w.dir.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).expect("a folder");
    let model = root().join("models/digits.onnx").canonicalize().expect("the model");
    let picture = root().join("models/digit-7.png").canonicalize().expect("the picture");
    let ways =
        [("rel", "rel/libcuda.so.1"), (":/nowhere", "libcuda.so.1"), ("new/:/nowhere", "new/libcuda.so.1")];
    for (path, place) in ways {
        let at = |args: &[&str]| finish(w.command(args).current_dir(&elsewhere).env("LD_LIBRARY_PATH", path));
        if path == "rel" {
            std::fs::create_dir(elsewhere.join("rel")).expect("a folder");
        }
        at(&["devices"]).ok();
        let place = elsewhere.join(place);
        std::fs::create_dir_all(place.parent().expect("a folder")).expect("a folder");
        std::fs::copy(&crash, &place).expect("copied");
        let why = reason(&at(&["devices", "--json"]), "cuda");
        assert!(why.contains("signal"), "{path}: {why}");
        at(&["run", text(&model), "--input", text(&picture)]).ok();
        std::fs::remove_file(place).expect("removed");
    }
    // A working library needs another library, which changes.
    let helper = w.lib("libhelper.so");
    library(&helper, "int help(void) { return 1; }\n", &[]);
    let needs = "int help(void);\nint y(void) { return help(); }\n";
    library(&w.lib("libcuda.so.1"), needs, &[text(&helper)]);
    assert!(w.reason("cuda").contains("it has no function"));
    std::fs::copy(&crash, &helper).expect("copied");
    let why = w.reason("cuda");
    assert!(why.contains("signal"), "{why}");
    w.run(&SEVEN).ok();
}

/// The command itself never loads a plugin.
#[test]
fn a_tpu_plugin_is_loaded_in_children_alone() {
    let test = "a_tpu_plugin_is_loaded_in_children_alone";
    let w = World::new();
    let source = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>
__attribute__((constructor)) static void at_load(void) {
    FILE *f = fopen(getenv(\"DRIVER_PID\"), \"a\"); fprintf(f, \"%d\\n\", getpid()); fclose(f);
}\n";
    if !library(&w.lib("libtpu.so"), source, &[]) {
        return skip(test, "no C compiler for the plugin");
    }
    let (told, mut own) = (w.dir.path().join("pids"), vec![]);
    for cache in ["programs", "programs", "off", "off"] {
        let mut c = w.command(&["devices", "--json"]);
        c.env("DRIVER_PID", &told).env("HALCYON_CACHE", cache).stdout(Stdio::null());
        let mut child = c.spawn().expect("the command starts");
        own.push(child.id().to_string());
        assert!(child.wait().expect("it ends").success());
    }
    let told = std::fs::read_to_string(&told).expect("it was loaded");
    let by: Vec<&str> = told.lines().collect();
    assert!(by.len() == 3 && !by.iter().any(|p| own.iter().any(|o| o == p)), "{by:?} {own:?}");
}

/// The command prints what it is waiting for, except with `--json`. It waits only once.
#[test]
fn a_driver_that_hangs_is_reported_and_cached() {
    let test = "a_driver_that_hangs_is_reported_and_cached";
    let w = World::new();
    if !library(&w.lib("libcuda.so.1"), HANG, &[]) {
        return skip(test, "no C compiler for the driver");
    }
    let run = |args: &[&str]| finish(w.command(args).env("HALCYON_PROBE_TIMEOUT", "4"));
    let first = run(&SEVEN).ok();
    assert!(first.err.contains("waiting for the driver of cuda") && first.err.contains("4 s"), "{first:?}");
    let v = run(&[&SEVEN[..], &["--json"]].concat()).ok();
    assert!(v.err.is_empty(), "it was waited for again: {v:?}");
    let v = v.json();
    let all = v["backend"]["candidates"].as_array().expect("candidates");
    let it = all.iter().find(|c| c["backend"] == "cuda").expect("it was looked at");
    let why = it["rejected"].as_str().unwrap_or_default();
    assert!(why.contains("did not end within 4s") && why.contains("halcyon devices --refresh"), "{why}");
    assert!(run(&["devices"]).ok().err.is_empty());
    // `--refresh` probes again.
    let again = run(&["devices", "--refresh"]).ok();
    assert!(again.err.contains("waiting for the driver of cuda"), "{again:?}");
    let json = run(&["devices", "--refresh", "--json"]);
    assert!(json.err.is_empty() && reason(&json, "cuda").contains("did not end"), "{json:?}");
    finish(w.command(&["devices"]).env("HALCYON_PROBE_TIMEOUT", "soon")).fails(2, &["HALCYON_PROBE_TIMEOUT"]);
}

/// Builds a library that replaces some functions of the stand-in for CUDA. Returns its path and the
/// stand-in's.
fn over_standin(w: &World, source: &str) -> Option<(PathBuf, String)> {
    let paths = standin::paths();
    let (_, standin) = paths.into_iter().find(|(id, _)| *id == "cuda")?;
    let lib = w.lib("libover.so");
    library(&lib, source, &["-Wl,--no-as-needed", &standin]).then_some((lib, standin))
}

#[test]
fn what_drivers_print_is_kept_apart() {
    let test = "what_drivers_print_is_kept_apart";
    let w = World::new();
    let Some((lib, standin)) = over_standin(&w, TALK) else {
        return skip(test, "no compiler for the driver");
    };
    let with = |args: &[&str], log: Option<&str>| {
        let mut c = w.command(args);
        c.env("HALCYON_CUDA_LIBRARY", &lib).env("HALCYON_NVRTC_LIBRARY", &standin);
        log.map(|l| c.env("HALCYON_LOG", l));
        finish(&mut c)
    };
    let quiet = |d: &Done| {
        for part in ["hello from", "driver warns", "driver compiles"] {
            assert!(!d.out.contains(part) && !d.err.contains(part), "{part}: {d:?}");
        }
        assert!(!d.out.contains("bye"), "{d:?}");
    };
    // In the first round the driver is probed by a child and then loaded by the command. In the second round
    // the probe is cached.
    for _ in 0..2 {
        let d = with(&["devices", "--json"], None);
        let v = d.json();
        let cuda = v.as_array().and_then(|a| a.iter().find(|r| r["id"] == "cuda")).expect("a row");
        assert_eq!(cuda["available"], true, "{v:#}");
        quiet(&d);
        let d = with(&[&SEVEN[..], &["--backend", "cuda", "--json"]].concat(), None).ok();
        assert_eq!(d.json()["backend"]["id"], "cuda:0");
        quiet(&d);
    }
    let d = with(&[&SEVEN[..], &["--backend", "cuda"]].concat(), None).ok();
    quiet(&d);
    // The log contains the output with the driver's name.
    let d = with(&["devices", "--json"], Some("halcyon_hal=debug"));
    d.json();
    for part in ["hello from the driver", "the driver warns"] {
        let line = d.err.lines().find(|l| l.contains(part)).unwrap_or_else(|| panic!("{part}: {d:?}"));
        assert!(line.contains("cuda"), "{line}");
    }
    let d = with(&["devices", "-v"], None).ok();
    for line in ["cuda driver: hello from the driver", "cuda driver: the driver warns"] {
        assert!(d.err.lines().any(|l| l == line) && !d.out.contains("hello"), "{line}: {d:?}");
    }
    let d = with(&["doctor", "--backend", "cuda", "--json"], None);
    let v = d.json();
    let sections = v["sections"].as_array().expect("sections");
    let printed: Vec<&Value> =
        sections.iter().flat_map(|s| s["printed"].as_array().expect("lines")).collect();
    assert!(printed.iter().any(|l| l.as_str() == Some("hello from the driver")), "{v:#}");
}

/// `-` and `/dev/stdout` mean the command's own output, even if its file descriptors are redirected.
#[test]
fn a_file_that_is_standard_output_gets_there() {
    let w = World::new();
    for to in ["-", "/dev/stdout"] {
        let o = w.command(&["export", "models/digits.onnx", "-o", to]).output().expect("the command starts");
        assert!(o.status.success(), "{to}: {}", String::from_utf8_lossy(&o.stderr));
        let model = w.dir.path().join("model.onnx");
        std::fs::write(&model, &o.stdout).expect("written");
        w.run(&["inspect", text(&model)]).ok();
    }
}

/// Listing the devices works, but opening one crashes. Automatic selection continues, and a user who names
/// the device gets an error.
#[test]
fn a_driver_that_crashes_when_it_is_opened_takes_nothing_down() {
    let test = "a_driver_that_crashes_when_it_is_opened_takes_nothing_down";
    let w = World::new();
    let Some((lib, standin)) = over_standin(&w, CRASH_AT_OPEN) else {
        return skip(test, "no compiler for the driver");
    };
    for cache in ["programs", "programs", "off"] {
        let with = |args: &[&str]| {
            let mut c = w.command(args);
            c.env("HALCYON_CUDA_LIBRARY", &lib).env("HALCYON_NVRTC_LIBRARY", &standin);
            finish(c.env("HALCYON_CACHE", cache))
        };
        let v = with(&["devices", "--json"]).ok().json();
        let cuda = v.as_array().and_then(|a| a.iter().find(|r| r["id"] == "cuda")).expect("a row");
        assert_eq!(cuda["available"], true, "{v:#}");
        let v = with(&[&SEVEN[..], &["--json"]].concat()).ok().json();
        assert_eq!(v["backend"]["id"], "cpu:0", "{v:#}");
        let all = v["backend"]["candidates"].as_array().expect("candidates");
        let it = all.iter().find(|c| c["device"] == "cuda:0").expect("it was tried");
        assert!(it["rejected"].as_str().is_some_and(|r| r.contains("opening cuda:0")), "{it}");
        with(&[&SEVEN[..], &["--backend", "cuda"]].concat()).fails(4, &["opening cuda:0", "signal"]);
    }
}

/// Kills the parent by a signal while its child hangs in a driver, and checks that the child ends.
fn ends_with(mut parent: Child, pids: &Path, signal: &str, what: &str) {
    let mut child = String::new();
    let started = soon(|| {
        child = std::fs::read_to_string(pids).unwrap_or_default();
        child.ends_with('\n')
    });
    assert!(started, "{what}: no driver was loaded");
    let child = child.trim();
    assert!(child != parent.id().to_string() && !gone(child), "{what}");
    let kill = Command::new("kill").args([signal, &parent.id().to_string()]).status();
    assert!(kill.expect("kill starts").success());
    parent.wait().expect("it ends");
    assert!(soon(|| gone(child)), "{what}: after {signal} its child lives on");
    std::fs::remove_file(pids).expect("removed");
}

#[test]
fn children_end_with_their_parent() {
    let test = "children_end_with_their_parent";
    let w = World::new();
    let lib = w.dir.path().join("libhang.so");
    if !library(&lib, HANG, &[]) {
        return skip(test, "no C compiler for the driver");
    }
    let pids = w.dir.path().join("pid");
    let commands: [&[&str]; 3] = [
        &["devices"],
        &["doctor", "--backend", "cuda"],
        &["tune", "models/digits.onnx", "--backend", "cuda"],
    ];
    for args in commands {
        for signal in ["-TERM", "-KILL"] {
            let mut c = w.command(args);
            c.env("HALCYON_CUDA_LIBRARY", &lib).env("DRIVER_PID", &pids).env("HALCYON_CACHE", "off");
            let parent = c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            ends_with(parent.expect("it starts"), &pids, signal, args[0]);
        }
    }
}

/// The advice for an absent device names something that exists.
#[test]
fn absent_devices_have_true_advice() {
    let w = World::new();
    let metal = w.run(&[&SEVEN[..], &["--backend", "metal"]].concat()).fails(4, &["Apple", "auto"]);
    assert!(!metal.err.contains("webgpu"), "{metal:?}");
    let standins = standin::paths();
    let Some((_, cuda)) = standins.iter().find(|(id, _)| *id == "cuda") else { return };
    let mut c = w.command(&[&SEVEN[..], &["--backend", "cuda:7"]].concat());
    finish(c.env("HALCYON_CUDA_LIBRARY", cuda)).fails(4, &["there is no device 7", "Choose device 0 or 1"]);
}

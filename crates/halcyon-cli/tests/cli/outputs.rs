//! Tests of the files that commands write: commands replace only files that the user named, and write each
//! file completely or not at all.

use crate::common::*;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

const DIGITS: &str = "models/digits.onnx";

fn export(to: &Path, more: &[&str]) -> Done {
    halcyon(&[&["export", DIGITS, "-o", text(to)], more].concat())
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn names(dir: &Path) -> Vec<String> {
    let all = fs::read_dir(dir).expect("the folder is there").flatten();
    let mut all: Vec<String> = all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

/// Runs a script in a shell, for redirections.
fn shell(script: &str, dir: &Path) -> Done {
    let mut c = Command::new("bash");
    c.args(["-c", script]).current_dir(dir).env("H", env!("CARGO_BIN_EXE_halcyon"));
    c.env("M", root().join(DIGITS)).env("P", root().join("models/digit-7.png"));
    finish(&mut c)
}

fn model(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).expect("the model is there");
    assert_eq!(halcyon_formats::sniff::kind(&bytes), Some(halcyon_formats::sniff::Kind::Onnx));
    bytes
}

#[test]
fn links_are_followed_and_permissions_kept() {
    let dir = folder();
    let at = |n: &str| dir.path().join(n);
    fs::create_dir(at("real")).expect("a folder");
    fs::write(at("real/m.onnx"), b"old").expect("a file");
    fs::set_permissions(at("real/m.onnx"), fs::Permissions::from_mode(0o600)).expect("its mode");
    symlink("real/m.onnx", at("link.onnx")).expect("a link");
    export(&at("link.onnx"), &[]).ok();
    model(&at("real/m.onnx"));
    assert!(fs::symlink_metadata(at("link.onnx")).expect("the link").is_symlink());
    assert_eq!(fs::metadata(at("real/m.onnx")).expect("the model").mode() & 0o777, 0o600);
    assert_eq!(names(&at("real")), ["m.onnx"]);
    // Overwrites the model itself through a symbolic link.
    let done = halcyon(&["export", text(&at("link.onnx")), "-o", text(&at("link.onnx"))]);
    done.ok();
    model(&at("real/m.onnx"));
}

#[test]
fn devices_and_pipes_are_written_in_place() {
    let dir = folder();
    let want = dir.path().join("want.onnx");
    export(&want, &[]).ok();
    let bytes = model(&want).len();
    export(Path::new("/dev/null"), &[]).ok();
    assert!(fs::metadata("/dev/null").expect("the device").file_type().is_char_device());
    if Path::new("/dev/full").exists() {
        export(Path::new("/dev/full"), &[]).fails(1, &["/dev/full", "space"]);
        assert!(fs::metadata("/dev/full").expect("the device").file_type().is_char_device());
        // A symbolic link to a device is followed and kept.
        let link = dir.path().join("full");
        symlink("/dev/full", &link).expect("a link");
        export(&link, &[]).fails(1, &["space"]);
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
    }
    // If the model goes to standard output, the report goes to stderr.
    for to in ["-", "/dev/stdout", "/proc/self/fd/1"].iter().filter(|t| **t == "-" || Path::new(t).exists()) {
        let done =
            shell(&format!("\"$H\" export \"$M\" -o {to} 2>report | cat > got.onnx; cat report"), dir.path());
        assert!(done.code == 0 && done.out.contains("opset"), "{done:?}");
        assert_eq!(model(&dir.path().join("got.onnx")), model(&want), "{to}");
    }
    for to in [">(wc -c > count)", "/dev/fd/3"] {
        let redirect = if to.starts_with('/') { "3> three" } else { "" };
        let done = shell(&format!("\"$H\" export \"$M\" -o {to} {redirect}; sleep 1; cat count"), dir.path());
        match to.starts_with('/') {
            true => assert_eq!(model(&dir.path().join("three")).len(), bytes),
            false => assert!(done.out.contains(&bytes.to_string()), "{done:?}"),
        }
    }
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reader = Command::new("wc").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    drop(reader);
    let done = shell("wc -c < pipe > n & \"$H\" export \"$M\" -o pipe && wait && cat n", dir.path());
    assert!(done.out.trim().ends_with(&bytes.to_string()), "{done:?}");
    assert!(fs::metadata(&pipe).expect("the pipe").file_type().is_fifo());
    // External data cannot be written beside a stream, and only one document goes to stdout.
    halcyon(&["export", DIGITS, "-o", "-", "--external-data"]).fails(2, &["a second file"]);
    let both = halcyon(&["export", DIGITS, "-o", "-", "--json"]);
    assert!(both.code == 2 && both.out.contains("standard output"), "{both:?}");
}

#[test]
fn what_fails_changes_nothing() {
    let dir = folder();
    let to = dir.path().join("m.onnx");
    // A limit on file sizes simulates a full disk.
    let full = "trap '' XFSZ; ulimit -f 1; \"$H\" export \"$M\" -o m.onnx";
    let done = shell(full, dir.path());
    assert!(done.code == 1 && done.err.contains("m.onnx"), "{done:?}");
    assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    fs::write(&to, b"old").expect("a file");
    assert_eq!(shell(full, dir.path()).code, 1);
    assert_eq!(
        (fs::read(&to).expect("the old file"), names(dir.path())),
        (b"old".to_vec(), vec!["m.onnx".into()])
    );
    let model = "trap '' XFSZ; ulimit -f 0; \"$H\" run \"$M\" -i \"$P\" --backend cpu --output-dir out";
    let done = shell(model, dir.path());
    assert_ne!(done.code, 0, "{done:?}");
    let left = names(&dir.path().join("out"));
    assert!(left.is_empty(), "{left:?}");
    // The output is an existing folder, ends with a slash, or lies in a missing folder.
    export(dir.path(), &[]).fails(1, &["folder"]);
    export(&dir.path().join("new/"), &[]).fails(1, &["folder"]);
    export(&dir.path().join("none/m.onnx"), &[]).fails(1, &["make the folder first"]);
    let locked = dir.path().join("locked");
    fs::create_dir(&locked).expect("a folder");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o500)).expect("its mode");
    if fs::File::create(locked.join("probe")).is_err() {
        export(&locked.join("m.onnx"), &[]).fails(1, &["no file can be created"]);
    }
}

#[test]
fn a_file_of_weights_that_is_none_of_ours_stays() {
    let dir = folder();
    let (to, data) = (dir.path().join("m.onnx"), dir.path().join("m.onnx.data"));
    fs::write(&data, b"my thesis").expect("a file");
    export(&to, &["--external-data"]).fails(2, &["m.onnx.data exists", "move it away"]);
    assert_eq!(names(dir.path()), ["m.onnx.data"]);
    assert_eq!(fs::read(&data).expect("the file"), b"my thesis");
    fs::remove_file(&data).expect("removed");
    export(&to, &["--external-data"]).ok();
    let bytes = fs::read(&data).expect("the weights");
    // The file is now the data of this model, so a second export replaces it.
    export(&to, &["--external-data"]).ok();
    assert_eq!(fs::read(&data).expect("the weights"), bytes);
}

#[test]
fn a_tuning_cache_replaces_no_other_file() {
    let dir = folder();
    let mine = dir.path().join("mine.txt");
    for content in [b"dear diary".as_slice(), b"\x00\xff\x01", b"{\"a\": 1}"] {
        fs::write(&mine, content).expect("a file");
        for args in [
            vec!["tune", "--tuning-cache", text(&mine), "--list"],
            vec!["tune", "--tuning-cache", text(&mine), "--backend", "cpu", DIGITS, "--budget", "0"],
            vec!["tune", "--tuning-cache", "/dev/null", "--backend", "cpu", DIGITS, "--budget", "0"],
            vec!["run", DIGITS, "-i", "ones", "--backend", "cpu", "--tuning-cache", text(&mine)],
        ] {
            halcyon(&args).fails(1, &["not a tuning cache", "it is left as it is"]);
        }
        let good = dir.path().join("good.json");
        let to_mine = halcyon(&["tune", "--tuning-cache", text(&good), "--export", text(&mine)]);
        to_mine.fails(1, &["not a tuning cache"]);
        assert_eq!(fs::read(&mine).expect("the file"), content);
        let left: Vec<String> = names(dir.path()).into_iter().filter(|n| !n.starts_with("good")).collect();
        assert_eq!(left, ["mine.txt"]);
    }
    assert!(fs::metadata("/dev/null").expect("the device").file_type().is_char_device());
    // The path may also come from the environment or the configuration.
    let mut c = command(&["run", DIGITS, "-i", "ones", "--backend", "cpu"]);
    finish(c.env("HALCYON_TUNING_CACHE", &mine)).fails(1, &["not a tuning cache"]);
    // A damaged cache file is reported and kept.
    let cache = dir.path().join("cache.json");
    let damaged = b"{\n  \"format\": 1,\n  \"entries\": [\n    {\n      \"dev";
    fs::write(&cache, damaged).expect("a file");
    let done =
        halcyon(&["run", DIGITS, "-i", "ones", "--backend", "cpu", "--tuning-cache", text(&cache)]).ok();
    assert!(done.err.contains("damaged tuning cache"), "{done:?}");
    let other = dir.path().join("other.json");
    fs::write(&other, "{\"format\": 1, \"entries\": []}").expect("a file");
    for n in ["cache.json.bad", "cache.json.bad.1"] {
        fs::write(&cache, damaged).expect("a file");
        let done = halcyon(&["tune", "--tuning-cache", text(&cache), "--import", text(&other)]).ok();
        assert!(done.err.contains(n), "{done:?}");
        assert_eq!(fs::read(dir.path().join(n)).expect("the damaged one"), damaged);
    }
}

//! Tests of the disk cache of packed constants.

use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_ir::Graph;
use halcyon_test::Rng;
use std::path::{Path, PathBuf};

fn backend(dir: &Path, keep: Option<bool>) -> Backend {
    let b = Backend::builder().backend_type(BackendType::Cpu).level(Level::O2).cache_dir(dir);
    match keep {
        Some(on) => b.keep_packed(on),
        None => b,
    }
    .build()
    .unwrap()
}

/// Consecutive products whose right factors are constants. Level O2 packs these constants.
fn graph(w: &[Vec<f32>]) -> Graph {
    let mut g = Graph::new();
    let mut x = g.input("x", halcyon_ir::shape::TensorType::new(DType::F32, [64, 256]));
    for w in w {
        let c = g.constant(ConstData::from_slice(&[256, 256], w).unwrap());
        x = g.matmul(x, c).unwrap();
    }
    g.output("y", x);
    g
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir.join("packed")).into_iter().flatten().map(|e| e.unwrap().path()).collect()
}

/// A cache directory that the caller sets is used even if HALCYON_CACHE=off disables the user's cache
/// directory.
#[test]
fn a_named_directory_is_used_without_the_users_cache() {
    let user = tempfile::tempdir().unwrap();
    let mut c = std::process::Command::new(std::env::current_exe().unwrap());
    c.args(["packed::a_second_start_reads_what_the_first_packed", "--exact"]);
    c.env("HALCYON_CACHE", "off");
    for name in halcyon::hal::cache::variables() {
        c.env(name, user.path());
    }
    let o = c.output().unwrap();
    let text = String::from_utf8_lossy(&o.stdout);
    assert!(o.status.success() && text.contains("1 passed"), "{text}");
    assert_eq!(std::fs::read_dir(user.path()).unwrap().count(), 0, "the user's cache is not used");
}

#[test]
fn a_second_start_reads_what_the_first_packed() {
    let mut rng = Rng::fresh("a_second_start_reads_what_the_first_packed");
    let dir = tempfile::tempdir().unwrap();
    let w: Vec<Vec<f32>> = (0..3).map(|_| rng.f32s(256 * 256)).collect();
    let x = ConstData::from_slice(&[64, 256], &rng.f32s(64 * 256)).unwrap();
    // Each backend plays the role of a new process: it shares only the directory with the others.
    let run = |b: &Backend, w: &[Vec<f32>]| {
        let y = Session::new(b, graph(w)).run(std::slice::from_ref(&x)).unwrap();
        (y, b.cache_stats().packed_loads)
    };
    let first = run(&backend(dir.path(), Some(true)), &w);
    assert_eq!((first.1, entries(dir.path()).len()), (0, 1), "one file has all three constants");
    let second = run(&backend(dir.path(), Some(true)), &w);
    assert_eq!((second.1, &second.0), (3, &first.0));
    // Cached files are also read if `keep_packed` is not called, but not after `keep_packed(false)`.
    assert_eq!(run(&backend(dir.path(), None), &w).1, 3);
    assert_eq!(run(&backend(dir.path(), Some(false)), &w).1, 0);

    // The key of an entry does not depend on the element that is changed here. The entry is found to be
    // stale, and is replaced.
    let mut other = w.clone();
    other[1][5000] += 1.0;
    let plain = run(&backend(dir.path(), Some(false)), &other);
    let stale = run(&backend(dir.path(), Some(true)), &other);
    assert_eq!((stale.1, &stale.0), (0, &plain.0));
    assert_ne!(stale.0, first.0);
    assert_eq!(run(&backend(dir.path(), Some(true)), &other).1, 3);

    // Damage at any position is detected.
    let file = entries(dir.path()).remove(0);
    let whole = std::fs::read(&file).unwrap();
    for at in [3, 60 << 10, whole.len() - 5] {
        let mut bad = whole.clone();
        bad[at] ^= 0x40;
        std::fs::write(&file, &bad).unwrap();
        let got = run(&backend(dir.path(), Some(true)), &other);
        assert_eq!((got.1, &got.0), (0, &plain.0), "byte {at}");
        assert_eq!(std::fs::read(&file).unwrap(), whole, "the file is written again");
    }
    // A truncated file is detected, too. A directory that cannot be written is not an error.
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(run(&backend(dir.path(), Some(true)), &other), plain);
    let blocked = dir.path().join("file");
    std::fs::write(&blocked, b"").unwrap();
    assert_eq!(run(&backend(&blocked, Some(true)), &other), plain);
}

#[test]
fn starts_at_the_same_time_do_not_disturb_each_other() {
    let mut rng = Rng::fresh("starts_at_the_same_time_do_not_disturb_each_other");
    let dir = tempfile::tempdir().unwrap();
    let w: Vec<Vec<f32>> = (0..2).map(|_| rng.f32s(256 * 256)).collect();
    let x = ConstData::from_slice(&[64, 256], &rng.f32s(64 * 256)).unwrap();
    let want =
        Session::new(&backend(dir.path(), Some(false)), graph(&w)).run(std::slice::from_ref(&x)).unwrap();
    std::thread::scope(|s| {
        for _ in 0..6 {
            s.spawn(|| {
                for _ in 0..5 {
                    let b = backend(dir.path(), Some(true));
                    let got = Session::new(&b, graph(&w)).run(std::slice::from_ref(&x)).unwrap();
                    assert_eq!(got, want);
                }
            });
        }
    });
    assert_eq!(entries(dir.path()).len(), 1);
}

#[test]
fn cheap_packing_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let b = backend(dir.path(), None);
    let w = vec![vec![1f32; 256 * 256]];
    let x = ConstData::from_slice(&[64, 256], &vec![1f32; 64 * 256]).unwrap();
    Session::new(&b, graph(&w)).run(&[x]).unwrap();
    assert!(entries(dir.path()).is_empty());
}

//! Failures at every device call in turn, and caches that are damaged or cannot be written. Each must give a
//! typed error or a clean recovery, leak nothing, and give the right result afterwards.

use halcyon::prelude::*;
use halcyon::{BackendBuilder, ConstData, Error, Session};
use halcyon_ir::Graph;
use halcyon_ir::shape::TensorType;
use halcyon_test::Rng;
use halcyon_test::devices::open;
use halcyon_test::faulty::{self, After, Call, Faults};
use halcyon_test::works::{Mlp, WORK, Work, bits, captured};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Whether an error has the type that such a call fails with.
fn is_typed(e: &Error, call: Call, after: After) -> bool {
    match (after, call) {
        (After::Lost, _) => matches!(e, Error::Driver { code, .. } if code.contains("lost")),
        (_, Call::Alloc) => matches!(e, Error::OutOfMemory { .. }),
        (_, Call::Compile) => matches!(e, Error::Compile { .. }),
        _ => matches!(e, Error::Driver { code, .. } if code == "injected"),
    }
}

/// Fails the first, second, … call of a kind, until the work makes no more such calls. Each time uses a fresh
/// device, which then completes the work. Returns the number of calls.
fn at_every_call(inner: BackendType, level: Level, call: Call, after: After, name: &str, work: Work) -> u64 {
    let with = |b: BackendBuilder| b.level(level).num_threads(1);
    let what = |n: u64| format!("{name} on {inner} at {level}, {call:?} {n}, {after:?}");
    let want = work(&faulty::open(inner, with).0).unwrap();
    for n in 0.. {
        let (b, faults) = faulty::open(inner, with);
        faults.arm(call, n, after);
        match work(&b) {
            // Out of memory may be handled by a smaller plan, which is counted and may round differently.
            Ok(got) if faults.disarm() => {
                let smaller = b.cache_stats().smaller_plans;
                assert!(call == Call::Alloc && smaller > 0, "{}: the error was ignored", what(n));
                let close = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-5 * b.abs().max(1.0);
                let same = got
                    .iter()
                    .zip(&want)
                    .all(|(g, w)| g == w || close(f32::from_bits(*g), f32::from_bits(*w)));
                assert!(
                    same && got.len() == want.len(),
                    "{}: a smaller plan gives {got:?}, not {want:?}",
                    what(n)
                );
                continue;
            }
            Ok(got) => {
                assert_eq!(got, want, "{}", what(n));
                return n;
            }
            Err(e) => assert!(is_typed(&e, call, after), "{}: {e}", what(n)),
        }
        if after == After::Lost {
            // Later calls fail too, at once and with the same reason.
            let e = work(&b).unwrap_err();
            assert!(is_typed(&e, call, after), "{}, then: {e}", what(n));
            let e = b.synchronize().unwrap_err();
            assert!(is_typed(&e, call, after), "{}, then: {e}", what(n));
        }
        assert!(faults.disarm(), "{}: not the injected error", what(n));
        b.empty_cache();
        assert_eq!(b.memory().allocated, 0, "{}: memory is left", what(n));
        assert_eq!(work(&b).unwrap(), want, "{}: the run after it", what(n));
    }
    unreachable!("the work ends")
}

/// Runs every workload on the CPU at O2, where most kernels are library kernels, and on the noop device at
/// O1, where every kernel is compiled. Each must make at least `least` calls, except for compilations on the
/// CPU.
fn everywhere(call: Call, after: After, least: u64) {
    for (name, work) in WORK {
        for (inner, level) in [(BackendType::Cpu, Level::O2), (BackendType::Noop, Level::O1)] {
            let n = at_every_call(inner, level, call, after, name, *work);
            println!("{name} on {inner} at {level}: {n} times {call:?}");
            let least = if inner == BackendType::Cpu && call == Call::Compile { 0 } else { least };
            assert!(n >= least, "{name} on {inner}: {n}");
        }
    }
}

#[test]
fn out_of_memory_at_every_allocation_leaves_nothing_behind() {
    everywhere(Call::Alloc, After::Works, 3);
}

#[test]
fn a_kernel_that_does_not_compile_is_an_error_at_every_kernel() {
    everywhere(Call::Compile, After::Works, 2);
    let test = "a_kernel_that_does_not_compile_is_an_error_at_every_kernel";
    if open(test, BackendType::OpenCl, Level::O1).is_some() {
        let n =
            at_every_call(BackendType::OpenCl, Level::O1, Call::Compile, After::Works, "captured", captured);
        assert!(n >= 2, "{n}");
    }
}

#[test]
fn a_device_that_is_lost_at_any_submission_says_so() {
    everywhere(Call::Submit, After::Lost, 2);
}

#[test]
fn a_submission_that_fails_once_is_an_error_once() {
    everywhere(Call::Submit, After::Works, 2);
}

#[test]
fn reads_and_writes_that_fail_are_errors() {
    for call in [Call::Write, Call::Read] {
        everywhere(call, After::Works, 1);
        everywhere(call, After::Lost, 1);
    }
}

/// Evaluates with call 0, 1, … failing, until nothing fails. Returns how often it failed.
fn until_it_runs(faults: &Faults, call: Call, wanted: &[Tensor]) -> u64 {
    for n in 0.. {
        faults.arm(call, n, After::Works);
        let r = eval(wanted);
        let fired = faults.disarm();
        match r {
            Ok(()) => {
                assert!(!fired);
                return n;
            }
            Err(e) => assert!(is_typed(&e, call, After::Works), "{e}"),
        }
    }
    unreachable!("the work ends")
}

#[test]
fn failed_values_are_computed_at_the_next_request() {
    let work = |faults: Option<Call>| {
        let (b, f) = faulty::open(BackendType::Cpu, |b| b.num_threads(1));
        let mlp = Mlp::new(&b).unwrap();
        let (mut out, mut failed) = (vec![], 0);
        for _ in 0..3 {
            let wanted = mlp.step().unwrap();
            match faults {
                Some(call) => failed += until_it_runs(&f, call, &wanted),
                None => eval(&wanted).unwrap(),
            }
            out.extend(bits(&wanted[0].to_data().unwrap()));
        }
        out.extend(bits(&mlp.params[3].value().to_data().unwrap()));
        (out, failed)
    };
    let (want, _) = work(None);
    for call in [Call::Alloc, Call::Submit] {
        let (got, failed) = work(Some(call));
        assert_eq!(got, want, "the state is not the failed step's");
        assert!(failed >= 3, "{failed}");
    }
}

#[test]
fn memory_that_a_broken_run_may_have_overwritten_is_not_read_again() {
    let (b, faults) = faulty::open(BackendType::Cpu, |b| b.num_threads(1));
    let three = || Tensor::from_slice(&b, [3], &[1.0f32, 2.0, 3.0]).unwrap();
    let fail = |call| faults.arm(call, 0, After::Works);
    let gone = |t: &Tensor| matches!(t.to_vec::<f32>(), Err(Error::Donated { .. }));
    let twice = |x: &[Tensor]| &x[0] * 2.0;

    // Out of memory before anything ran: the donated value is unchanged.
    let x = three();
    x.donate();
    let y = twice(std::slice::from_ref(&x));
    let z = y.reshape([1, 3]).matmul(&Tensor::from_slice(&b, [3, 1], &[1.0f32; 3]).unwrap());
    fail(Call::Alloc);
    assert_eq!(eval(&[y.clone(), z.clone()]).unwrap_err().exit_code(), 5);
    assert!(faults.disarm());
    assert_eq!(z.to_vec::<f32>().unwrap(), [12.0]);
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);

    // A failed submission may have overwritten the donated tensor, so the tensor is gone.
    let x = three();
    x.donate();
    let y = twice(std::slice::from_ref(&x));
    fail(Call::Submit);
    assert!(matches!(y.eval(), Err(Error::Driver { .. })));
    assert!(faults.disarm() && gone(&x) && gone(&y), "{y:?}");

    // A compiled function treats a donated input in the same way.
    let f = b.compile(twice);
    assert_eq!(f.call(&[three().donate()]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    let x = three();
    x.donate();
    fail(Call::Submit);
    assert!(matches!(f.call(&[&x]), Err(Error::Driver { .. })));
    assert!(faults.disarm() && gone(&x));

    // The same holds for a captured graph. After a failed launch it does not return results of earlier ones.
    let x = three();
    x.donate();
    let g = b.capture_graph(|| [twice(std::slice::from_ref(&x)), x.sum(..)]).unwrap();
    fail(Call::Alloc);
    assert_eq!(g.launch().unwrap_err().exit_code(), 5);
    assert!(faults.disarm());
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0], "nothing ran");
    assert!(g.outputs().is_err());
    g.launch().unwrap();
    assert_eq!(g.outputs().unwrap()[1].to_vec::<f32>().unwrap(), [6.0]);
    let x = three();
    x.donate();
    fail(Call::Submit);
    assert!(matches!(b.launch_graph(&g, &[&x]), Err(Error::Driver { .. })));
    assert!(faults.disarm() && gone(&x) && g.outputs().is_err());
    assert!(g.read(0, &mut [0; 12]).is_err());
}

/// Ways to damage a file.
const DAMAGE: &[(&str, fn(&Path))] = &[
    ("cut in half", |p| {
        let bytes = std::fs::read(p).unwrap();
        std::fs::write(p, &bytes[..bytes.len() / 2]).unwrap();
    }),
    ("emptied", |p| std::fs::write(p, []).unwrap()),
    ("one bit of its last byte changed", |p| {
        let mut bytes = std::fs::read(p).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(p, bytes).unwrap();
    }),
    ("other bytes of its length", |p| {
        let n = std::fs::metadata(p).unwrap().len() as usize;
        std::fs::write(p, vec![0x5A; n]).unwrap();
    }),
    ("a folder in its place", |p| {
        std::fs::remove_file(p).unwrap();
        std::fs::create_dir(p).unwrap();
    }),
];

/// All files below a folder.
fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return vec![] };
    let each = |e: std::io::Result<std::fs::DirEntry>| {
        let p = e.unwrap().path();
        if p.is_dir() { files(&p) } else { vec![p] }
    };
    entries.flat_map(each).collect()
}

/// Runs a product with constants that level O2 packs, with packed constants and programs cached in `dir`.
fn products(kind: BackendType, dir: &Path) -> Result<(Vec<u32>, Backend)> {
    let mut r = Rng::new(3);
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [64, 256]));
    let w = g.constant(ConstData::from_slice(&[256, 256], &r.f32s(256 * 256))?);
    let y = g.matmul(x, w)?;
    let y = g.softmax(y, 1)?;
    g.output("y", y);
    let b =
        Backend::builder().backend_type(kind).level(Level::O2).cache_dir(dir).keep_packed(true).build()?;
    let x = ConstData::from_slice(&[64, 256], &r.f32s(64 * 256))?;
    let y = Session::new(&b, g).run(&[x])?;
    Ok((bits(&y[0]), b))
}

/// Numbers of entries loaded from the cache, and of those made anew.
fn kept_and_made(b: &Backend) -> (u64, u64) {
    let c = b.counters();
    match b.info().backend {
        BackendType::Cpu => (b.cache_stats().packed_loads, 1 - b.cache_stats().packed_loads),
        _ => (c.compile_cache_hits, c.compiles),
    }
}

fn kinds(test: &str) -> Vec<BackendType> {
    let there = |k: &BackendType| open(test, *k, Level::O1).is_some();
    [BackendType::Cpu, BackendType::OpenCl].into_iter().filter(there).collect()
}

#[test]
fn damaged_cache_files_are_made_again() {
    for kind in kinds("damaged_cache_files_are_made_again") {
        let dir = tempfile::tempdir().unwrap();
        let (want, cold) = products(kind, dir.path()).unwrap();
        let n = kept_and_made(&cold).1;
        assert!(n > 0 && kept_and_made(&cold).0 == 0);
        assert_eq!(kept_and_made(&products(kind, dir.path()).unwrap().1), (n, 0), "{kind}");
        for (how, damage) in DAMAGE {
            let all = files(dir.path());
            assert!(!all.is_empty());
            all.iter().for_each(|p| damage(p));
            let (got, b) = products(kind, dir.path()).unwrap();
            assert_eq!(got, want, "{kind}, {how}");
            assert_eq!(kept_and_made(&b), (0, n), "{kind}, {how}: none of it may be used");
            let (got, b) = products(kind, dir.path()).unwrap();
            assert_eq!(got, want, "{kind}, {how}, mended");
            assert_eq!(kept_and_made(&b), (n, 0), "{kind}, {how}: written anew");
        }
    }
}

#[test]
fn caches_that_cannot_be_written_cost_nothing_but_time() {
    for kind in kinds("caches_that_cannot_be_written_cost_nothing_but_time") {
        let dir = tempfile::tempdir().unwrap();
        let want = products(kind, &dir.path().join("good")).unwrap().0;
        let file = dir.path().join("file");
        std::fs::write(&file, "not a folder").unwrap();
        let locked = dir.path().join("locked");
        std::fs::create_dir(&locked).unwrap();
        let mut p = std::fs::metadata(&locked).unwrap().permissions();
        p.set_readonly(true);
        std::fs::set_permissions(&locked, p).unwrap();
        // The root user can write everywhere. For that user, `locked` is an ordinary folder.
        for at in [file.clone(), file.join("below"), locked] {
            for _ in 0..2 {
                assert_eq!(products(kind, &at).unwrap().0, want, "{kind} in {}", at.display());
            }
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "not a folder");
    }
}

/// A nearly full disk is imitated by a limit on the size of files that the process may write. The process
/// ignores the signal for a write past the limit, so that the write fails instead of ending the process.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_costs_nothing_but_time() {
    let dir = tempfile::tempdir().unwrap();
    let (want, _) = products(BackendType::Cpu, &dir.path().join("good")).unwrap();
    let full = dir.path().join("full");
    let out = std::process::Command::new("sh")
        .args(["-c", "trap '' 25; ulimit -f 8; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "faults::child_computes_on_a_full_disk",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("HALCYON_TEST_DIR", &full)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    let digest = |v: &[u32]| v.iter().fold(0u64, |h, b| (h ^ *b as u64).wrapping_mul(0x100_0000_01B3));
    assert!(text.contains(&format!("ANSWER {:016x} 0", digest(&want))), "{text}");
    assert!(full.join("packed").is_dir(), "it was tried");
    assert_eq!(files(&full), Vec::<PathBuf>::new(), "half a file is left");
}

#[test]
#[ignore = "run by the test above in a process of its own"]
fn child_computes_on_a_full_disk() {
    let Some(dir) = std::env::var_os("HALCYON_TEST_DIR") else { return };
    let mut got = (vec![], 0);
    for _ in 0..2 {
        let (v, b) = products(BackendType::Cpu, Path::new(&dir)).unwrap();
        got = (v, b.cache_stats().packed_loads);
    }
    let digest = got.0.iter().fold(0u64, |h, b| (h ^ *b as u64).wrapping_mul(0x100_0000_01B3));
    println!("ANSWER {digest:016x} {}", got.1);
}

#[test]
fn a_device_that_fails_counts_as_any_other() {
    // The tests above rely on this: the wrapper counts calls, forwards them, and is a backend with a name of
    // its own.
    let (b, faults) = faulty::open(BackendType::Cpu, |b| b);
    assert!(b.id().starts_with("faulty-cpu-"), "{}", b.id());
    assert!(b.selection().rule.contains("was requested"));
    let before = faults.calls();
    assert_eq!(Tensor::from_slice(&b, [2], &[1.0f32, 2.0]).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert!(faults.calls() >= before + 3, "an allocation, a write and a read");
    let shared: Arc<Faults> = faults.clone();
    shared.arm(Call::Read, 0, After::Lost);
    let x = Tensor::from_slice(&b, [1], &[1.0f32]).unwrap();
    assert!(x.to_vec::<f32>().is_err() && x.to_vec::<f32>().is_err(), "a lost device stays lost");
    assert!(shared.disarm());
    assert_eq!(x.to_vec::<f32>().unwrap(), [1.0]);
}

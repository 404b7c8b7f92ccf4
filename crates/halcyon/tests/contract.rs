//! The promises of the contract, each by its row's name. Rows without a test are not kept yet.

mod common;
#[path = "common/faulty.rs"]
mod faulty;
#[path = "contract/machine.rs"]
mod machine;
#[path = "contract/s0.rs"]
mod s0;
#[path = "contract/s1.rs"]
mod s1;
#[path = "contract/s3.rs"]
mod s3;
#[path = "contract/s4.rs"]
mod s4;

use halcyon::prelude::*;
use halcyon::{BackendType as B, Error, Fallback, Policy};

/// The order by priority, of these backends alone.
fn by_priority(of: &[B]) -> Vec<B> {
    Policy::default().backends().iter().copied().filter(|b| of.contains(b)).collect()
}

#[test]
fn s1_04_auto_order() {
    let order = [B::Cuda, B::Rocm, B::Metal, B::OpenCl, B::WebGpu, B::Cpu];
    assert_eq!("inference".parse::<Policy>().unwrap().backends(), order);
    assert_eq!(by_priority(&order), order);
}

#[test]
fn s2_02_detection_order_puts_intel_before_tpu() {
    let order: Policy = "torchbridge".parse().unwrap();
    let of = [B::Cuda, B::Rocm, B::Intel, B::Tpu, B::Cpu];
    let got: Vec<B> = order.backends().iter().copied().filter(|b| of.contains(b)).collect();
    assert_eq!(got, of);
}

/// What a process with a tuning cache does: kernels tuned and candidates tried, and whether its plan has tuned kernels.
fn tunes(kind: B, file: &str) -> (u64, u64, bool) {
    let b = Backend::builder().backend_type(kind).enable_autotuning(true).autotuning_cache_file(file);
    let b = b.build().unwrap();
    let mut g = halcyon::ir::Graph::new();
    let x = g.input("x", halcyon::ir::TensorType::new(DType::F32, [48, 64]));
    let w = g.input("w", halcyon::ir::TensorType::new(DType::F32, [64, 40]));
    let y = g.matmul(x, w).unwrap();
    let y = g.softmax(y, 1).unwrap();
    g.output("y", y);
    let data = |n: usize, m: usize| {
        let v: Vec<f32> = (0..n * m).map(|i| (i % 7) as f32 / 7.0).collect();
        halcyon::ConstData::from_slice(&[n, m], &v).unwrap()
    };
    let session = halcyon::Session::new(&b, g);
    let inputs = [data(48, 64), data(64, 40)];
    // The default runs at once; what was found counts from then on.
    let first = session.run(&inputs).unwrap();
    assert!(b.wait_for_tuning(std::time::Duration::from_secs(120)));
    assert!(halcyon::session::difference(&session.run(&inputs).unwrap(), &first) < 1e-5);
    let plan = session.prepare(&inputs).unwrap();
    let tuned = plan.plan().steps.iter().any(|s| s.tunable.as_ref().is_some_and(|t| t.tuned));
    let s = b.cache_stats();
    (s.kernels_tuned, s.candidates_tried, tuned)
}

#[test]
fn s3_11_autotuning_cache() {
    let test = "s3_11_autotuning_cache";
    // The second process: this test again.
    if let (Ok(file), Ok(kind)) = (std::env::var("HALCYON_S3_11_FILE"), std::env::var("HALCYON_S3_11")) {
        println!("\nS3.11 {:?}", tunes(kind.parse().unwrap(), &file));
        return;
    }
    for b in common::devices(test, Level::O2) {
        let kind = b.info().backend;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tuning_cache.json");
        let file = file.to_str().unwrap();
        let process = || {
            let mut c = std::process::Command::new(std::env::current_exe().unwrap());
            c.args([test, "--exact", "--nocapture"]).env("HALCYON_S3_11_FILE", file);
            let o = c.env("HALCYON_S3_11", kind.id()).output().unwrap();
            let out = String::from_utf8(o.stdout).unwrap();
            let said = out.lines().find_map(|l| l.strip_prefix("S3.11 ")).map(String::from);
            said.unwrap_or_else(|| panic!("{out}{}", String::from_utf8_lossy(&o.stderr)))
        };
        let first = process();
        println!("{kind}: {first}");
        if kind == B::Cpu {
            // Its library has no variants: there is nothing to tune, in either process.
            assert_eq!(first, format!("{:?}", (0, 0, false)));
        } else {
            assert!(!first.starts_with("(0,"), "{kind} tuned nothing: {first}");
        }
        let second = process();
        assert_eq!(second, format!("{:?}", (0, 0, kind != B::Cpu)), "{kind}: the second process tunes");
    }
}

#[test]
fn s4_02_auto_order() {
    let order = [B::Cuda, B::Rocm, B::Tpu, B::Intel, B::Cpu];
    assert_eq!("vendors".parse::<Policy>().unwrap().backends(), order);
    assert_eq!(by_priority(&order), order);
}

#[test]
fn s1_08_memory_check_says_how_much_is_missing() {
    let test = "s1_08_memory_check_says_how_much_is_missing";
    for b in common::devices(test, Level::O1) {
        let kind = b.info().backend;
        let with = |need: u64| {
            let all = Backend::builder().backend_type(kind).memory_limit(64 << 20);
            all.fallback(Fallback::Never).memory_needed(need).build()
        };
        assert_eq!(with(1 << 20).unwrap().info().backend, kind);
        let e = with(100 << 20).unwrap_err();
        let Error::OutOfMemory { requested, free, .. } = &e else { panic!("{e}") };
        assert_eq!((*requested, *free), (100 << 20, 64 << 20));
    }
    // Under `auto` too, where it names each device.
    let order: Policy = "cpu,opencl".parse().unwrap();
    let e =
        Backend::builder().policy(order).memory_limit(1 << 20).memory_needed(2 << 20).build().unwrap_err();
    assert!(e.exit_code() == 5 && e.to_string().contains("cpu:0"), "{e}");
}

#[test]
fn s1_10_the_choice_decides_where_the_model_runs() {
    let test = "s1_10_the_choice_decides_where_the_model_runs";
    let devices = common::devices(test, Level::O1);
    let work = |b: &Backend| {
        let c = b.counters();
        c.launches + c.library_calls
    };
    for chosen in &devices {
        let before: Vec<u64> = devices.iter().map(work).collect();
        let x = Tensor::from_slice(chosen, [2, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!((x.matmul(&x) + 1.0).relu().to_vec::<f32>().unwrap(), [8.0, 11.0, 16.0, 23.0]);
        for (b, was) in devices.iter().zip(before) {
            assert_eq!(work(b) > was, b.id() == chosen.id(), "{} while {} was chosen", b.id(), chosen.id());
        }
    }
}

//! The orders of `auto`: the choice on a machine that has every backend, then on one without the first
//! choice, and so on. The expected orders are written out from the contract. Each test has its own process,
//! so it may replace every driver.

use crate::machine;
use halcyon::BackendType as B;
use halcyon::prelude::*;
use halcyon_compat::{factory, inference};

/// Every backend that can be removed from a machine; the CPU always stays.
const ALL: [B; 7] = [B::Cuda, B::Rocm, B::Metal, B::Tpu, B::Intel, B::OpenCl, B::WebGpu];

/// The answers of `choose` on a machine with all of these backends, then without the backend that it chose,
/// and so on until it chooses the CPU.
fn one_after_the_other<T: Clone>(choose: impl Fn() -> (B, T)) -> Vec<T> {
    let (mut there, mut answers) = (ALL.to_vec(), vec![]);
    loop {
        let _m = machine::exactly(&there);
        let (kind, answer) = choose();
        answers.push(answer);
        if kind == B::Cpu {
            return answers;
        }
        let before = there.len();
        there.retain(|k| *k != kind);
        assert_eq!(there.len() + 1, before, "{kind} was chosen, but has no device");
    }
}

fn by_policy(name: &str) -> Vec<B> {
    one_after_the_other(|| {
        let b = Backend::builder().policy(name.parse().unwrap()).build().unwrap();
        (b.selection().device.backend, b.selection().device.backend)
    })
}

#[test]
fn settled_priorities_and_the_default_order() {
    machine::alone("orders::settled_priorities_and_the_default_order", || {
        let chosen = one_after_the_other(|| {
            let s = Backend::auto().unwrap().selection().clone();
            let of = s.candidates.iter().find(|c| c.rejected.is_none()).unwrap();
            (s.device.backend, (s.device.backend, of.priority))
        });
        let settled = [
            (B::Cuda, 100),
            (B::Rocm, 90),
            (B::Metal, 88),
            (B::Tpu, 85),
            (B::Intel, 80),
            (B::OpenCl, 60),
            (B::WebGpu, 50),
            (B::Cpu, 0),
        ];
        assert_eq!(chosen, settled.map(|(b, p)| (b, Some(p))));
    });
}

#[test]
fn s1_04_auto_order() {
    machine::alone("orders::s1_04_auto_order", || {
        let order = [B::Cuda, B::Rocm, B::Metal, B::OpenCl, B::WebGpu, B::Cpu];
        assert_eq!(by_policy("inference"), order, "the named policy");
        // The priorities give the same order, plus two backends in between that this row does not name.
        let best = one_after_the_other(|| {
            let b = inference::best_available_backend().unwrap();
            (b, b)
        });
        let of_the_row: Vec<B> = best.into_iter().filter(|b| !matches!(b, B::Tpu | B::Intel)).collect();
        assert_eq!(of_the_row, order, "the order by priority");
    });
}

#[test]
fn s2_02_detection_order_puts_intel_before_tpu() {
    machine::alone("orders::s2_02_detection_order_puts_intel_before_tpu", || {
        let order = [B::Cuda, B::Rocm, B::Metal, B::Intel, B::Tpu, B::OpenCl, B::WebGpu, B::Cpu];
        assert_eq!(by_policy("torchbridge"), order);
        let runtimes = one_after_the_other(|| {
            let name = factory::detect_best_runtime().unwrap();
            (name.parse().unwrap(), name)
        });
        assert_eq!(runtimes, ["cuda", "rocm", "xpu", "tpu", "cpu"]);
    });
}

#[test]
fn s4_02_auto_order() {
    machine::alone("orders::s4_02_auto_order", || {
        assert_eq!(by_policy("vendors"), [B::Cuda, B::Rocm, B::Tpu, B::Intel, B::Cpu]);
        let vendors = one_after_the_other(|| {
            let name = factory::detect_best_backend().unwrap();
            (name.parse().unwrap(), name)
        });
        assert_eq!(vendors, ["nvidia", "amd", "tpu", "intel", "cpu"]);
        // The optimizer's order is the same, by its name too.
        for name in [None, Some("auto"), Some("AUTO")] {
            let optimizers = one_after_the_other(|| {
                let kind = factory::get_optimizer(name).unwrap().backend().selection().device.backend;
                (kind, kind)
            });
            assert_eq!(optimizers, [B::Cuda, B::Rocm, B::Tpu, B::Intel, B::Cpu], "{name:?}");
        }
        let _m = machine::exactly(&ALL);
        let named = factory::get_optimizer(Some("metal:0")).unwrap();
        assert_eq!(named.backend().selection().device.backend, B::Metal);
    });
}

/// A fallback of the configuration file is for names; a type of this module is the backend that it names.
#[test]
fn s2_03_types_of_a_vendor_have_no_fallback() {
    use factory::{AmdBackend, BackendConfig, BackendFactory, CpuBackend, IntelBackend, NvidiaBackend};
    let test = "orders::s2_03_types_of_a_vendor_have_no_fallback";
    if std::env::var_os("CONTRACT_FILE").is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, "fallback = \"next\"\n").unwrap();
        let file = file.to_str().unwrap();
        return machine::alone_with(test, &[("HALCYON_CONFIG", file), ("CONTRACT_FILE", "1")]);
    }
    machine::alone(test, || {
        let _m = machine::exactly(&[]);
        let by_name = BackendFactory::create("cuda", None).unwrap();
        assert_eq!(by_name.selection().device.backend, B::Cpu, "the file is in use");
        let config = BackendConfig::default();
        let errors = [
            NvidiaBackend::new("O2").unwrap_err(),
            NvidiaBackend::with_config(config).unwrap_err(),
            AmdBackend::with_config(config).unwrap_err(),
            IntelBackend::with_config(config).unwrap_err(),
            factory::TpuBackend::with_config(config).unwrap_err(),
        ];
        errors.iter().for_each(|e| assert_eq!(e.exit_code(), 4, "{e}"));
        CpuBackend::with_config(config).unwrap();
    });
}

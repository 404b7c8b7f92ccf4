//! Lowers the op table's cases as for a GPU and compiles the kernels with NVRTC, hipRTC and clang: a
//! sixteenth of the kernels, chosen at random by `HALCYON_SEED`, or all with `HALCYON_CASES=all`.

use halcyon::Level;
use halcyon::ir::kernel::Kernel;
use halcyon::ir::render::{Language, to_batch};
use halcyon_test::optable::{rows, sanitizer};
use halcyon_test::{Rng, one_in, vendors};
use std::sync::LazyLock;

/// The kernels to compile. There are far fewer kernels than cases, because most kernels serve every shape.
static KERNELS: LazyLock<Vec<Kernel>> = LazyLock::new(|| {
    let mut cases = 0;
    let mut all = std::collections::BTreeMap::new();
    for level in [Level::O0, Level::O1] {
        let (b, s) = sanitizer::backend(32, false, 1, level);
        for row in rows() {
            for d in &row.dtypes {
                for case in row.cases.iter().filter(|c| c.takes(*d)) {
                    let plan = case.graph(*d).and_then(|g| b.plan(g, vec![]));
                    assert!(plan.is_ok(), "{} {d} [{}]: {}", row.name, case.label, plan.unwrap_err());
                    cases += 1;
                }
            }
        }
        all.extend(s.kernels().into_iter().map(|k| (k.key(), k)));
    }
    assert!(all.len() > 300, "{} kernels", all.len());
    let (mut rng, every) = (Rng::fresh("kernels to compile"), one_in(16));
    let some: Vec<Kernel> = all.into_values().filter(|_| rng.below(every) == 0).collect();
    println!("{cases} cases, {} kernels compiled", some.len());
    assert!(!some.is_empty());
    some
});

fn compile(test: &str, l: Language, script: &str, archs: &str) {
    let batch = |k: &[Kernel]| to_batch(&k.iter().collect::<Vec<_>>(), l).unwrap().text;
    let texts: Vec<String> = KERNELS.chunks(100).map(batch).collect();
    vendors::compile(test, script, archs, l.extension(), &texts);
}

#[test]
fn op_table_kernels_compile_for_cuda() {
    compile("op_table_kernels_compile_for_cuda", Language::Cuda, "nvrtc_compile.py", "sm_80,sm_90");
}

#[test]
fn op_table_kernels_compile_for_hip() {
    compile("op_table_kernels_compile_for_hip", Language::Hip, "hiprtc_compile.py", "gfx90a");
}

/// Compiles with clang for the architectures on which the hipRTC of Debian 12 crashes.
#[test]
fn op_table_kernels_compile_for_newer_amd() {
    let test = "op_table_kernels_compile_for_newer_amd";
    compile(test, Language::Hip, "clang_compile.py", "gfx942,gfx1100");
}

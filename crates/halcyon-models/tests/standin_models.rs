//! Models on CUDA and ROCm over stand-ins for the vendors' libraries: kernels are rendered as for a GPU, and
//! compiled as C++.
#![cfg(all(unix, feature = "backends"))]

#[path = "decode/common.rs"]
mod common;
#[path = "decode/compare.rs"]
mod compare;
#[path = "decode/story.rs"]
mod story;

use compare::{How, case, folders};
use halcyon::hal::{Driver, registry};
use halcyon::prelude::*;
use halcyon_test::{Rng, models, one_in, standins};
use std::sync::{LazyLock, Mutex};
use story::{FILES, check, expected, run};

/// CUDA and ROCm, or none if the stand-ins cannot be built.
static BACKENDS: LazyLock<Vec<Backend>> = LazyLock::new(|| {
    let open = |s: &std::sync::Arc<standins::StandIn>| {
        registry::register(s.driver.clone()).expect("a driver");
        let kind = s.driver.kind();
        Backend::builder().backend_type(kind).level(Level::O2).build().expect("a stand-in opens")
    };
    standins::all().iter().map(open).collect()
});

/// The stand-ins have global state.
static TURN: Mutex<()> = Mutex::new(());

/// Every case on every backend: one by chance, or all of them in the nightly tier. Compiling the kernels of a
/// case takes many seconds.
fn drawn<'a, T>(name: &str, cases: &'a [T]) -> Vec<(&'static Backend, &'a T)> {
    let all: Vec<_> = BACKENDS.iter().flat_map(|b| cases.iter().map(move |c| (b, c))).collect();
    let step = one_in(all.len().max(1));
    let first = Rng::fresh(name).below(step);
    all.into_iter().skip(first).step_by(step).collect()
}

/// The five files of the model.
#[test]
fn the_stories_over_the_stand_ins() {
    let name = "the_stories_over_the_stand_ins";
    let Some(dir) = models(name, "stories260k") else { return };
    let _turn = TURN.lock();
    let want = expected(&dir);
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let (_, own) = run(&cpu, &dir.join(FILES[4].0), &want.prompt, 4);
    for (b, file) in drawn(name, &FILES) {
        println!("{} on {}", if file.0.is_empty() { "the folder" } else { file.0 }, b.id());
        check(b, &dir, *file, &want, (&own, 4));
    }
}

/// Small models of the families.
#[test]
fn families_compute_the_stored_logits_over_the_stand_ins() {
    let name = "families_compute_the_stored_logits_over_the_stand_ins";
    let _turn = TURN.lock();
    for (b, dir) in drawn(name, &folders()) {
        println!("{} on {}", dir.display(), b.id());
        case(b, dir, &[How::Chunks]);
    }
}

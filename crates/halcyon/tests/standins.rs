//! The op table on CUDA and ROCm, whose drivers run over libraries that stand in for the vendors': kernels as a GPU gets them, with
//! subgroups of 32 and 64, compiled as C++.
#![cfg(all(unix, feature = "cuda", feature = "rocm"))]

mod common;
#[path = "standins/graphs.rs"]
mod graphs;
mod optable;
#[path = "standins/peers.rs"]
mod peers;
#[path = "../../halcyon-hal/tests/common/standin.rs"]
mod standin;

use common::Rng;
use halcyon::hal::registry;
use halcyon::prelude::*;
use optable::check::{Tally, check_rows};
use optable::{random, rows};
use standin::StandIn;
use std::sync::{Arc, Mutex, MutexGuard};

/// The stand-in of a backend, for one test at a time: it counts, and does as it is told. `None` where it could not be built.
fn alone(kind: BackendType) -> Option<(Arc<StandIn>, MutexGuard<'static, ()>)> {
    use halcyon::hal::Driver;
    static BUSY: [Mutex<()>; 2] = [Mutex::new(()), Mutex::new(())];
    let s = standin::all().into_iter().find(|s| s.driver.kind() == kind)?;
    let busy = BUSY[(kind == BackendType::Rocm) as usize].lock().unwrap_or_else(|e| e.into_inner());
    registry::register(s.driver.clone()).unwrap();
    Some((s, busy))
}

fn op_table(kind: BackendType) {
    let what = format!("op table on {kind} over its stand-in");
    let Some((_, _alone)) = alone(kind) else { return };
    let b = Backend::builder().backend_type(kind).level(Level::O1).build().unwrap();
    check_rows(&what, &rows(), std::slice::from_ref(&b), &mut Rng::fresh(&what)).finish(&what);
    let failures = (1..=20).filter_map(|seed| random::check(seed, std::slice::from_ref(&b)).err()).collect();
    Tally { cases: 20, failures, ..Tally::default() }.finish(&what);
}

#[test]
fn op_table_on_cuda() {
    op_table(BackendType::Cuda);
}

#[test]
fn op_table_on_rocm() {
    op_table(BackendType::Rocm);
}

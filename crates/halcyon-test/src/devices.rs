//! The devices to test on.

use crate::{drawn_of, required, skip};
use halcyon::TuningMode;
use halcyon::hal::backend::{BUILT_IN, BuiltIn, TestDevice};
use halcyon::prelude::*;

/// Opens a backend; `None`, with a message, if it is missing. With `HALCYON_REQUIRE_ALL=1` a missing backend
/// panics. Kernels are not tuned, not even at level O3, because tuning takes minutes.
pub fn open(test: &str, kind: BackendType, level: Level) -> Option<Backend> {
    let builder = Backend::builder().backend_type(kind).level(level).tuning(TuningMode::Cached);
    match builder.build() {
        Ok(b) => Some(b),
        Err(e) if required() => panic!("{kind}: {e}"),
        Err(e) => {
            skip(test, &format!("{kind}: {e}"));
            None
        }
    }
}

/// The backends of this build that compute and have a test device on every test machine.
/// `HALCYON_DEVICES=cpu,webgpu` restricts the list.
pub fn test_backends() -> Vec<BackendType> {
    let only = std::env::var("HALCYON_DEVICES").ok();
    let tested = |b: &&BuiltIn| {
        let device = matches!(b.test, TestDevice::Always | TestDevice::Installed(_));
        let wanted = only.as_deref().is_none_or(|o| o.split(',').any(|n| n == b.kind.id()));
        device && wanted && b.kind != BackendType::Noop && (b.driver)().is_some()
    };
    BUILT_IN.iter().filter(tested).map(|b| b.kind).collect()
}

/// The CPU, and one of the other [`test_backends`], which the seed of the run draws for each test. With
/// `HALCYON_CASES=all` or a row of the op table in `HALCYON_ROW` it is all of them.
pub fn drawn_backends(test: &str) -> Vec<BackendType> {
    let (mut kinds, others): (Vec<_>, Vec<_>) =
        test_backends().into_iter().partition(|k| *k == BackendType::Cpu);
    let all = std::env::var_os("HALCYON_ROW").is_some();
    kinds.extend(if all { &others } else { drawn_of(&format!("device of {test}"), &others) });
    kinds
}

/// Opens each of [`drawn_backends`] with [`open`], and leaves out those that are missing. The CPU comes
/// first, because tests compare the other backends with it.
pub fn devices(test: &str, level: Level) -> Vec<Backend> {
    drawn_backends(test).into_iter().filter_map(|k| open(test, k, level)).collect()
}

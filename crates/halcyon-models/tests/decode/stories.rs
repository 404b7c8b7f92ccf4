//! A trained model of 260,000 parameters, in every form in which it is stored.

use crate::common::*;
use crate::story::{FILES, check, expected, run};
use halcyon::prelude::*;
use halcyon_test::{devices, models};

#[test]
fn every_form_tells_the_same_story() {
    let name = "every_form_tells_the_same_story";
    let Some(dir) = models(name, "stories260k") else { return };
    let want = expected(&dir);
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let (_, own) = run(&cpu, &dir.join(FILES[4].0), &want.prompt, want.greedy.len());
    for b in devices::devices(name, Level::O2) {
        // Devices that are emulated are slow.
        let n = if is_cpu(&b) { want.greedy.len() } else { 8 };
        for file in FILES {
            check(&b, &dir, file, &want, (&own, n));
        }
    }
}

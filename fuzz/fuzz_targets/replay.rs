//! Fuzz target: a replay file. It is read, written and read again. If running its graph is little work, the
//! graph is run on the CPU at O0 and O1.
#![no_main]

use halcyon::{Replay, Result};
use halcyon_fuzz::{backends, judge, run};
use libfuzzer_sys::fuzz_target;

fn replay(data: &[u8]) -> Result<()> {
    let r = Replay::from_bytes(data, "input")?;
    let again = Replay::from_bytes(&r.to_bytes()?, "again")?;
    assert!(again.graph == r.graph && again.about == r.about);
    assert!(again.inputs == r.inputs && again.got == r.got && again.expected == r.expected);
    for b in backends() {
        judge(run(b, &r.graph, &r.inputs));
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    judge(replay(data));
});

//! Fuzz target: a serialised graph. It is read, written and read again. If running it is little work, it is
//! run on the CPU at O0 and O1.
//!
//! If an input does not begin with the file's magic number, the magic number and the header's length are put
//! before it. Its header ends with the last brace, and the rest is data.
#![no_main]

use halcyon::{ConstData, Result};
use halcyon_formats::onnx::PortType;
use halcyon_fuzz::{backends, judge, mutate, run, seed, value};
use halcyon_ir::Graph;
use libfuzzer_sys::fuzz_target;

const MAGIC: &[u8] = b"HALCGRF1";

fn file(data: &[u8]) -> Vec<u8> {
    if data.starts_with(MAGIC) {
        return data.to_vec();
    }
    let end = data.iter().rposition(|b| *b == b'}').map_or(0, |k| k + 1);
    [MAGIC, &(end as u64).to_le_bytes(), data].concat()
}

fn graph(data: &[u8]) -> Result<()> {
    let g = Graph::from_bytes(&file(data))?;
    g.check()?;
    let again = Graph::from_bytes(&g.to_bytes()?)?;
    assert!(again == g);
    let mut r = mutate::Rng(seed(data));
    let ports: Vec<PortType> = g
        .inputs()
        .iter()
        .map(|i| PortType::Tensor { dtype: g.dtype(i.node), shape: Some(g.shape(i.node).clone()) })
        .collect();
    let values: Option<Vec<ConstData>> =
        ports.iter().map(|p| value(p, &mut r).and_then(|d| d.tensor().cloned())).collect();
    if let (Some(x), true) = (values, g.args().is_empty()) {
        for b in backends() {
            judge(run(b, &g, &x));
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    judge(graph(data));
});

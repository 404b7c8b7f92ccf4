//! Fuzz target: an ONNX model. It is decoded, checked, and imported with and without sizes. If its inputs are
//! small and running it is little work, it is also run on the CPU at O0 and O1.
#![no_main]

use bytes::Bytes;
use halcyon::ConstData;
use halcyon_formats::onnx::proto::ModelProto;
use halcyon_formats::onnx::tensor::External;
use halcyon_formats::onnx::{Datum, Model, Outcome, RunOptions};
use halcyon_fuzz::{Small, backends, judge, mutate, run, seed, value};
use halcyon_ir::{Result, Shape};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use prost::Message;

fn model(data: &[u8]) -> Result<()> {
    let m = Model::parse(Bytes::copy_from_slice(data), External::none(), "m")?;
    m.check("cpu")?;
    let ports = m.inputs()?;
    m.outputs()?;
    judge(m.import(&[]));
    let mut r = mutate::Rng(seed(data));
    let Some(inputs) = ports.iter().map(|p| value(&p.ty, &mut r)).collect::<Option<Vec<Datum>>>() else {
        return Ok(());
    };
    let tensors: Vec<Option<&ConstData>> = inputs.iter().map(|d| d.tensor()).collect();
    let named = || ports.iter().zip(&tensors).filter_map(|(p, t)| t.map(|t| (p.name.as_str(), t)));
    let shapes: Vec<(&str, Shape)> = named().map(|(n, t)| (n, Shape::from(&t.dims))).collect();
    let values: Vec<(&str, ConstData)> = named().map(|(n, t)| (n, t.clone())).collect();
    match m.outcome(&shapes, &values)? {
        Outcome::Staged(_) => {
            for b in backends() {
                let options = RunOptions { max_iterations: 1000, ..RunOptions::default() };
                judge(m.run_staged_with(&inputs, Box::new(Small::new(b)), &options));
            }
        }
        Outcome::Graph(g) => {
            let x: Vec<ConstData> = tensors.into_iter().flatten().cloned().collect();
            for b in backends() {
                judge(run(b, &g.graph, &x));
            }
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    judge(model(data));
});

// Half of the mutations keep the message valid, so that they reach the code after decoding.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut r = mutate::Rng(seed.into());
    if r.once_in(2)
        && let Ok(mut m) = ModelProto::decode(&data[..size])
    {
        mutate::model(&mut m, &mut r);
        let new = m.encode_to_vec();
        if new.len() <= max_size && new.len() <= data.len() {
            data[..new.len()].copy_from_slice(&new);
            return new.len();
        }
    }
    fuzzer_mutate(data, size, max_size)
});

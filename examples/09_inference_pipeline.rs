//! An inference pipeline: a function from inputs to outputs, prepared once for the best device.
//!
//! `cargo run --release -p halcyon-compat --example 09_inference_pipeline [BACKEND]`

use halcyon::prelude::*;
use halcyon_compat::factory::{BaseBackend, StandardDeviceInfo, get_backend, levels};
use halcyon_nn::{Activation, Forward, Linear, Sequential};

/// Prepares a model at the highest level, and returns a function that runs the model. The function takes
/// inputs on any device and waits for the result.
pub(crate) fn create_inference_pipeline<M: Forward + 'static>(
    name: Option<&str>,
    make: impl FnOnce(&Backend) -> Result<M>,
    sample_input: Option<&Tensor>,
) -> Result<(impl Fn(&Tensor) -> Result<Tensor>, StandardDeviceInfo)> {
    let backend = get_backend(name, None)?;
    let model = backend.prepare_model(make(&backend)?, levels().last().copied())?;
    let model = backend.optimize_for_inference(model, sample_input, None)?;
    let info = backend.get_device_info(None)?;
    let predict = move |inputs: &Tensor| {
        let inputs = backend.to_device(inputs)?;
        let outputs = model.forward(&inputs)?;
        backend.synchronize()?;
        Ok(outputs)
    };
    Ok((predict, info))
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let name = std::env::args().nth(1);
    let make = |b: &Backend| {
        Ok(Sequential::new()
            .then(Linear::new(b, 64, 128)?)
            .then(Activation::Relu)
            .then(Linear::new(b, 128, 10)?))
    };
    let inputs = Tensor::ones(&Backend::cpu()?, [4, 64], DType::F32);
    let (predict, info) = create_inference_pipeline(name.as_deref(), make, Some(&inputs))?;
    println!("Running inference on: {}", info.device_name);
    let answers = predict(&inputs)?.argmax(-1);
    println!("answers: {:?}", answers.to_vec::<i64>()?);
    Ok(())
}

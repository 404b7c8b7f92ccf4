use halcyon::{OnnxSession, prelude::*};

fn main() -> halcyon::Result<()> {
    let backend = Backend::auto()?; // the best available device; backend.selection() says why
    let model = OnnxSession::open(&backend, "models/digits.onnx")?;
    let image = Tensor::ones(&backend, [1, 1, 8, 8], DType::F32);
    let outputs = model.run([("image", &image)])?; // by name; the values stay on the device
    println!("{:?}", outputs["probabilities"].to_vec::<f32>()?);
    Ok(())
}

//! Runs an ONNX model. Inputs and outputs are tensors that are found by name.
//!
//! `cargo run --release -p halcyon --example 04_onnx [MODEL [PICTURE]]`

use halcyon::formats::picture;
use halcyon::{Error, OnnxSession, prelude::*};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let given = |i: usize, default: &str| arguments.get(i).cloned().unwrap_or_else(|| default.into());
    let (model, file) = (given(1, "models/digits.onnx"), given(2, "models/digit-7.png"));

    let backend = Backend::auto()?;
    let session = OnnxSession::open(&backend, &model)?;
    for port in session.ports() {
        println!("{model} takes \"{}\": {}", port.name, port.ty);
    }

    // The image as a tensor with values in 0..1 and shape [batch, channels, height, width].
    let io = |e: String| Error::Io { path: file.clone(), what: e };
    let p = picture::decode(&std::fs::read(&file).map_err(|e| io(e.to_string()))?)
        .map_err(|e| io(format!("{e:?}")))?;
    let pixels: Vec<f32> = p.pixels.iter().map(|s| *s as f32 / 255.0).collect();
    let image = Tensor::from_slice(&backend, [1, p.height, p.width, p.channels], &pixels)?;
    let image = image.permute(&[0, 3, 1, 2]).mean_keepdim(1);

    // The run uses the image on the device. The outputs stay there until they are read.
    let outputs = session.run([("image", &image)])?;
    let probabilities = &outputs["probabilities"];
    let digit: i64 = probabilities.argmax(-1).index(0).item()?;
    println!("{file} is a {digit}, with {:.3}\n{probabilities:.3}", probabilities.max(..).item::<f32>()?);
    Ok(())
}

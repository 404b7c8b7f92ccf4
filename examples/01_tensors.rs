//! Tensors: shapes are checked at once, values are computed when they are needed, and the program is the same
//! on every backend.
//!
//! `cargo run --release -p halcyon --example 01_tensors [BACKEND]`

use halcyon::prelude::*;

fn main() -> Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "auto".into());
    let backend = Backend::new(name.parse()?)?;
    println!("{}", backend.selection());

    let x = Tensor::from_slice(&backend, [2, 3], &[1.0f32, -2.0, 3.0, -4.0, 5.0, -6.0])?;
    let w = Tensor::from_slice(&backend, [3, 2], &[0.5f32, 1.0, -0.5, 0.25, 2.0, -1.0])?;
    // Nothing has run yet, but the shape of `y` is known.
    let y = (x.matmul(&w) * 2.0 + 1.0).silu().softmax(-1);
    println!("y: {:?} = {:?}", y.dims()?, y.to_vec::<f32>()?);

    // The result of a failed operation stores the error, with this file and line, until a value is requested.
    let wrong = x.matmul(&x).relu() + 1.0;
    println!("the error of a mistake: {}", wrong.check().expect_err("shapes do not fit"));
    Ok(())
}

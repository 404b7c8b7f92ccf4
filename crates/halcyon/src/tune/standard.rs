//! A short list of typical ops, for tuning without a model.

use halcyon_ir::composite::CompositeKind;
use halcyon_ir::error::Result;
use halcyon_ir::ops::Conv;
use halcyon_ir::{DType, Graph, ScalarOp, TensorType};

/// Graphs with one op each, and their names: products (square, few rows, batched), a convolution, attention,
/// softmax, a norm, a reduction and an element-wise chain, in f32.
///
/// # Errors
/// Errors of the graph's builders; none occur for these shapes.
pub fn standard() -> Result<Vec<(&'static str, Graph)>> {
    let f32s = |shape: &[usize]| TensorType::new(DType::F32, shape);
    let mut all = vec![];
    for (name, a, b) in [
        ("product 512", &[512, 512][..], &[512, 512][..]),
        ("product 128 by 384", &[128, 384], &[384, 384]),
        ("matrix by vector", &[1, 2048], &[2048, 2048]),
        ("products in a batch", &[12, 128, 64], &[12, 64, 128]),
    ] {
        let mut g = Graph::new();
        let (x, w) = (g.input("x", f32s(a)), g.input("w", f32s(b)));
        let y = g.matmul(x, w)?;
        g.output("y", y);
        all.push((name, g));
    }
    let mut g = Graph::new();
    let (x, w) = (g.input("x", f32s(&[1, 64, 56, 56])), g.input("w", f32s(&[64, 64, 3, 3])));
    let mut c = Conv::new(2);
    c.pad.iter_mut().for_each(|p| *p = (1, 1));
    let y = g.conv(x, w, c)?;
    g.output("y", y);
    all.push(("convolution 3x3", g));

    let mut g = Graph::new();
    let q = ["q", "k", "v"].map(|n| g.input(n, f32s(&[1, 8, 256, 64])));
    let y = g.attention(q[0], q[1], q[2], None, false, 0.125)?;
    g.output("y", y);
    all.push((CompositeKind::Attention.row().name, g));

    let mut g = Graph::new();
    let x = g.input("x", f32s(&[512, 1024]));
    let y = g.softmax(x, 1)?;
    g.output("y", y);
    all.push((CompositeKind::Softmax.row().name, g));

    let mut g = Graph::new();
    let (x, s, b) = (g.input("x", f32s(&[512, 768])), g.input("s", f32s(&[768])), g.input("b", f32s(&[768])));
    let y = g.layer_norm(x, s, Some(b), 1, 1e-5)?;
    g.output("y", y);
    all.push(("layer norm", g));

    let mut g = Graph::new();
    let x = g.input("x", f32s(&[64, 16_384]));
    let y = g.sum(x, &[1], false)?;
    g.output("y", y);
    all.push(("sum of rows", g));

    let mut g = Graph::new();
    let (x, z) = (g.input("x", f32s(&[1 << 21])), g.input("z", f32s(&[1 << 21])));
    let y = g.mul(x, z)?;
    let y = g.scalar(ScalarOp::Tanh, &[y])?;
    let y = g.add(y, x)?;
    g.output("y", y);
    all.push(("chain", g));
    Ok(all)
}

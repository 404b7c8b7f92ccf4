//! Trained models as ONNX.

use halcyon::ir::Op;
use halcyon::ir::error::{Result, Span};
use halcyon::ir::graph::{Graph, Node};
use halcyon::ir::passes::{cse, fold, simplify};
use halcyon::{ConstData, Tensor};
use halcyon_formats::onnx::export::{ExportOptions, export, write};
use halcyon_nn::{LoadWeights, Module};
use std::path::Path;

/// Writes the computation of `outputs` from `inputs` as an ONNX model. The inputs are placeholders
/// ([`Tensor::placeholder`]), whose shapes may have symbols; other values become constants. Parameters and
/// buffers of `model` keep their names, and the nodes that read them have the name of their module. Returns
/// the size of the written files in bytes.
///
/// ```
/// use halcyon::{Dim, prelude::*};
/// use halcyon_nn::Linear;
/// # fn main() -> halcyon::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("layer.onnx");
/// let b = Backend::cpu()?;
/// let layer = Linear::new(&b, 4, 2)?;
/// let x = Tensor::placeholder(&b, DType::F32, [Dim::sym("batch"), Dim::from(4)]);
/// halcyon_train::write_onnx(&layer, &[("x", &x)], &[("y", &layer.forward(&x))], &path)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Errors that the tensors carry, `Error::Unsupported` for an op that ONNX lacks, and `Error::Io`.
pub fn write_onnx(
    model: &dyn Module,
    inputs: &[(&str, &Tensor)],
    outputs: &[(&str, &Tensor)],
    path: &Path,
) -> Result<u64> {
    outputs.iter().try_for_each(|(_, t)| t.check())?;
    let traced = Tensor::trace(inputs, outputs)?;
    let graph = named(&traced, &model.state_dict()?);
    let (graph, _) = fold::run_lean(&graph)?;
    let (graph, _) = simplify::run(&graph)?;
    let (graph, _) = cse::run(&graph)?;
    let options = ExportOptions::default();
    // If the export fails, the traced graph is exported for its error, which names the line of the program.
    // The named graph has names in place of the lines.
    let written = write(&graph, path, &options).map_err(|e| export(&traced, &options).err().unwrap_or(e))?;
    Ok(written.model_bytes + written.data.map_or(0, |(_, n)| n))
}

/// The graph with names in place of lines: constants are named after the weights that they hold, and nodes
/// that read weights after the weights' module.
fn named(graph: &Graph, weights: &[(String, ConstData)]) -> Graph {
    let mut out = Graph::new();
    // For each node that is the constant of a weight, or a view of such a node: the name of the weight.
    let mut holds: Vec<Option<&str>> = vec![];
    // Weights with equal values are used in their order, which is usually the order in which the model reads
    // them.
    let mut used = vec![false; weights.len()];
    let mut weight_of = |data: &ConstData| {
        let equal = || (0..weights.len()).filter(|&i| same(data, &weights[i].1));
        let i = equal().find(|&i| !used[i]).or_else(|| equal().next())?;
        used[i] = true;
        Some(weights[i].0.as_str())
    };
    for id in graph.ids() {
        let n = graph.node(id);
        let of_operands = n.inputs.iter().find_map(|x| holds[x.index()]);
        let weight = match &n.op {
            Op::Const(data) => weight_of(data),
            Op::Permute(_) | Op::Reshape | Op::Expand => of_operands,
            _ => None,
        };
        let module = of_operands.and_then(|w| w.rsplit_once('.')).map(|(module, _)| module);
        let span = weight.or(module).map_or(Span::default(), Span::new);
        // Every node keeps its number. `input` numbers the inputs anew, in the same order, because the input
        // nodes of a trace are in the order of its inputs.
        match &n.op {
            Op::Input(_) => {
                let spec = graph.inputs().iter().find(|i| i.node == id);
                out.input(spec.map_or("", |i| &*i.name), n.ty.clone())
            }
            _ => out.push_unchecked(Node { span, ..n.clone() }),
        };
        holds.push(weight);
    }
    for o in graph.outputs() {
        out.output(&o.name, o.node);
    }
    out
}

fn same(a: &ConstData, b: &ConstData) -> bool {
    (a.dtype, &a.dims) == (b.dtype, &b.dims) && a.bytes() == b.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::ir::TensorType;

    /// Two biases of zeros: each constant has the name of its own weight. A third equal constant has the name
    /// of the first.
    #[test]
    fn equal_weights_keep_their_own_names() {
        let zeros = ConstData::from_slice(&[2], &[0.0f32; 2]).unwrap();
        let weights =
            vec![("first.bias".to_string(), zeros.clone()), ("second.bias".to_string(), zeros.clone())];
        let mut g = Graph::new();
        let mut y = g.input("x", TensorType::new(halcyon::DType::F32, [2usize]));
        let constants: Vec<_> = (0..3).map(|_| g.constant(zeros.clone())).collect();
        for c in &constants {
            y = g.add(y, *c).unwrap();
        }
        g.output("y", y);
        let named = named(&g, &weights);
        let names: Vec<String> = constants.iter().map(|c| named.node(*c).span.to_string()).collect();
        assert_eq!(names, ["first.bias", "second.bias", "first.bias"]);
    }
}

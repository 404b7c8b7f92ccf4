//! Values between the nodes of a model as further results. Programs that run the same model are compared with
//! them, node by node.

use super::import::node_name;
use super::model::Model;
use super::order::order;
use super::proto::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use crate::bad;
use halcyon_ir::{Error, Result};
use prost::Message;
use std::collections::HashSet;

/// A node of a model's main graph.
#[derive(Clone, Debug, PartialEq)]
pub struct MainNode {
    /// Its name, or its operator and number if it has none.
    pub name: String,
    pub op: String,
    /// Names of the values that it reads, without those that only graphs in its attributes read.
    pub inputs: Vec<String>,
    /// Names of its results.
    pub outputs: Vec<String>,
    /// Whether it contains graphs (the branches of an If, the body of a loop). Their values have no names
    /// outside of them.
    pub contains_graphs: bool,
}

impl Model {
    /// The nodes of the main graph that the model's outputs depend on. A node follows the nodes whose results
    /// it reads.
    ///
    /// # Errors
    /// [`Error::Format`] for values that are defined twice or part of a cycle.
    pub fn main_nodes(&self) -> Result<Vec<MainNode>> {
        let g = self.graph()?;
        let named = |names: &[String]| names.iter().filter(|n| !n.is_empty()).cloned().collect();
        let one = |i: &usize| {
            let n: &NodeProto = &g.node[*i];
            MainNode {
                name: node_name(n, *i),
                op: n.op_type.clone(),
                inputs: named(&n.input),
                outputs: named(&n.output),
                contains_graphs: n.attribute.iter().any(|a| a.g.is_some() || !a.graphs.is_empty()),
            }
        };
        Ok(order(g, &self.file)?.nodes.iter().map(one).collect())
    }

    /// Makes values of the main graph further results of the model. A run returns them after the outputs, in
    /// this order. [`Model::outputs`] does not list them, because the file does not declare their types.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name that is not the result of a node, or that is an output already.
    pub fn expose(&mut self, names: &[String]) -> Result<()> {
        let more = results(self.graph()?, names)?;
        self.exposed += more.len();
        let file = &self.file;
        let g = self.proto.graph.as_mut().ok_or_else(|| bad(file, "the model has no graph"))?;
        g.output.extend(more);
        Ok(())
    }

    /// The model's file with values of the main graph as further outputs, for another program. The outputs
    /// have no types: the reader infers them. Nothing else of the file changes, parts that Halcyon does not
    /// read included.
    ///
    /// # Errors
    /// The errors of [`Model::expose`]; [`Error::Unsupported`] for a model that was not opened from a file.
    pub fn file_exposing(&self, names: &[String]) -> Result<Vec<u8>> {
        let map = self.mapped();
        if map.is_empty() {
            let what = format!("further outputs of {}, which is not a file", self.file);
            return Err(Error::unsupported(what, "Write the model to a file and open it"));
        }
        // A message that follows another in a file is merged with it: its outputs are appended to those of
        // the graph. This is part of the definition of protocol buffers.
        let graph = GraphProto { output: results(self.graph()?, names)?, ..Default::default() };
        let more = ModelProto { graph: Some(graph), ..Default::default() }.encode_to_vec();
        let mut all = halcyon_host::reserve(map.len() + more.len(), "the model with more outputs")?;
        all.extend_from_slice(map);
        all.extend_from_slice(&more);
        Ok(all)
    }
}

/// Declarations of results without types.
fn results(g: &GraphProto, names: &[String]) -> Result<Vec<ValueInfoProto>> {
    let made: HashSet<&str> = g.node.iter().flat_map(|n| &n.output).map(String::as_str).collect();
    let mut taken: HashSet<&str> = g.output.iter().map(|o| o.name.as_str()).collect();
    let mut all = vec![];
    for name in names {
        if name.is_empty() || !made.contains(name.as_str()) {
            return Err(Error::argument("expose", format!("no node of the main graph makes '{name}'")));
        }
        if !taken.insert(name) {
            return Err(Error::argument("expose", format!("'{name}' is an output already")));
        }
        all.push(ValueInfoProto { name: name.clone(), r#type: None });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::Outcome;
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Shape};

    /// `y = relu(x + 1) * 2`, with the nodes in an order that is not topological and one node that nothing
    /// needs.
    fn chain() -> ModelProto {
        let nodes = vec![
            node("Mul", &["h", "two"], &["y"]),
            node("Relu", &["s"], &["h"]),
            node("Neg", &["x"], &["unused"]),
            node("Add", &["x", "one"], &["s"]),
        ];
        let weights = [("one", t(&[1], &[1f32])), ("two", t(&[1], &[2f32]))];
        model(17, port("x", DType::F32, &["3"]), nodes, &weights)
    }

    #[test]
    fn nodes_are_in_the_order_of_their_values() {
        let nodes = open(chain()).main_nodes().unwrap();
        let names: Vec<(&str, &str)> = nodes.iter().map(|n| (&*n.op, &*n.outputs[0])).collect();
        assert_eq!(names, [("Add", "s"), ("Relu", "h"), ("Mul", "y")]);
        assert_eq!(nodes[2].inputs, ["h", "two"]);
        assert!(!nodes[2].contains_graphs);
    }

    #[test]
    fn exposed_values_follow_the_outputs_and_are_not_listed() {
        let mut m = open(chain());
        m.expose(&["h".into(), "s".into()]).unwrap();
        let listed: Vec<String> = m.outputs().unwrap().into_iter().map(|p| p.name).collect();
        assert_eq!(listed, ["y"]);
        let Outcome::Graph(g) = m.outcome(&[("x", Shape::from([3usize]))], &[]).unwrap() else {
            panic!("the model is one graph")
        };
        assert_eq!(g.outputs, ["y", "h", "s"]);
        assert_eq!(g.graph.outputs().len(), 3);
    }

    #[test]
    fn only_results_of_nodes_can_be_exposed() {
        for (name, why) in [("x", "no node"), ("one", "no node"), ("", "no node"), ("y", "already")] {
            let e = open(chain()).expose(&[name.into()]).unwrap_err();
            assert!(e.to_string().contains(why), "{name}: {e}");
        }
        assert!(open(chain()).expose(&["h".into(), "h".into()]).is_err());
    }

    #[test]
    fn a_file_gets_outputs_and_keeps_everything_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.onnx");
        // Field 6 of a model, its documentation, is one that Halcyon does not read.
        let bytes = [chain().encode_to_vec(), vec![0x32, 2, b'h', b'i']].concat();
        std::fs::write(&path, &bytes).unwrap();
        let m = Model::open(&path).unwrap();
        let more = m.file_exposing(&["s".into()]).unwrap();
        assert!(more.starts_with(&bytes));
        let read = ModelProto::decode(more.as_slice()).unwrap();
        let g = read.graph.unwrap();
        let outputs: Vec<&str> = g.output.iter().map(|o| o.name.as_str()).collect();
        assert_eq!(outputs, ["y", "s"]);
        assert_eq!((g.node.len(), g.initializer.len()), (4, 2));
        assert!(open(chain()).file_exposing(&["s".into()]).is_err());
    }
}

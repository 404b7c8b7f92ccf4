//! Finds the first node whose result differs.

use crate::cmd::difference::Difference;
use crate::report::Progress;
use halcyon::Result;
use halcyon_formats::onnx::MainNode;
use std::collections::{HashMap, HashSet};

/// Values that one run returns in addition to the outputs. It bounds the memory of the search.
const VALUES: usize = 64;

/// The first node with a result that differs.
#[derive(Debug)]
pub(super) struct First {
    pub node: MainNode,
    /// The result that differs.
    pub value: String,
    pub difference: Difference,
    /// What the node reads.
    pub operands: Vec<(String, Operand)>,
}

/// A value that a node reads.
#[derive(Debug)]
pub(super) enum Operand {
    Compared(Difference),
    /// The result of a node that could not be compared.
    NotCompared,
    /// An input of the model, or a weight.
    Given,
}

#[derive(Debug)]
pub(super) struct Search {
    pub first: Option<First>,
    /// Number of values that were compared, and of all values that the nodes make.
    pub compared: usize,
    pub values: usize,
    /// Values before the first difference that could not be compared, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Nodes before the first difference whose inner values were not compared.
    pub with_graphs: usize,
}

/// Runs both programs with further results, and compares the results that both returned.
pub(super) type Values<'a> = dyn FnMut(&[String]) -> Result<Vec<(String, Difference)>> + 'a;

/// Compares the results of the nodes in their order, and stops at the first that differs. `theirs` are the
/// nodes of the other model, if it is another one. `outputs` are the outputs of the model.
pub(super) fn search(
    nodes: &[MainNode],
    theirs: Option<&[MainNode]>,
    outputs: &[String],
    values: &mut Values<'_>,
) -> Result<Search> {
    let theirs: Option<HashSet<&str>> =
        theirs.map(|all| all.iter().flat_map(|n| &n.outputs).map(String::as_str).collect());
    let all: Vec<&String> = nodes.iter().flat_map(|n| &n.outputs).collect();
    let mut found = Search { first: None, compared: 0, values: all.len(), skipped: vec![], with_graphs: 0 };
    let mut known: HashMap<String, Difference> = HashMap::new();
    let mut progress = Progress::bar("values", all.len() as u64);
    let mut rest = &nodes[..0];
    for (i, node) in nodes.iter().enumerate() {
        if rest.is_empty() {
            // The next nodes with at most `VALUES` results, or one node with more.
            let mut n = 0;
            let fits = |m: &&MainNode| {
                n += m.outputs.len();
                n <= VALUES
            };
            let count = nodes[i..].iter().take_while(fits).count().max(1);
            rest = &nodes[i..i + count];
            let both = |name: &&String| theirs.as_ref().is_none_or(|t| t.contains(name.as_str()));
            let names: Vec<String> = rest.iter().flat_map(|n| &n.outputs).filter(both).cloned().collect();
            known.extend(compared(&names, outputs, values, &mut found.skipped)?);
        }
        rest = &rest[1..];
        node.outputs.iter().for_each(|_| progress.step());
        found.compared += node.outputs.iter().filter(|o| known.contains_key(*o)).count();
        let differs = |o: &&String| known.get(*o).is_some_and(|d| !d.agrees());
        if let Some(value) = node.outputs.iter().find(differs) {
            let operand = |x: &String| match known.get(x) {
                Some(d) => Operand::Compared(d.clone()),
                None if all.contains(&x) => Operand::NotCompared,
                None => Operand::Given,
            };
            let operands = node.inputs.iter().map(|x| (x.clone(), operand(x))).collect();
            let (node, value, difference) = (node.clone(), value.clone(), known[value].clone());
            found.first = Some(First { node, value, difference, operands });
            break;
        }
        found.with_graphs += usize::from(node.contains_graphs);
    }
    progress.finish();
    let before: HashSet<&str> = match &found.first {
        Some(f) => all.iter().take_while(|n| **n != &f.value).map(|n| n.as_str()).collect(),
        None => all.iter().map(|n| n.as_str()).collect(),
    };
    found.skipped.retain(|(n, _)| before.contains(n.as_str()));
    Ok(found)
}

/// The comparisons of values. If the programs fail with these values, asks for fewer at once, so that only
/// those that cannot be returned are left out.
fn compared(
    names: &[String],
    outputs: &[String],
    values: &mut Values<'_>,
    skipped: &mut Vec<(String, String)>,
) -> Result<Vec<(String, Difference)>> {
    if names.is_empty() {
        return Ok(vec![]);
    }
    let more: Vec<String> = names.iter().filter(|n| !outputs.contains(n)).cloned().collect();
    let e = match values(&more) {
        Ok(all) => {
            let has = |n: &String| all.iter().any(|(a, _)| a == n);
            let missing = names.iter().filter(|n| !has(n));
            skipped.extend(missing.map(|n| (n.clone(), "its type cannot be returned".to_string())));
            return Ok(all.into_iter().filter(|(n, _)| names.contains(n)).collect());
        }
        Err(e @ halcyon::Error::Interrupted { .. }) => return Err(e),
        Err(e) => e,
    };
    if more.len() < 2 {
        skipped.extend(names.iter().map(|n| (n.clone(), e.to_string())));
        return Ok(vec![]);
    }
    let (a, b) = names.split_at(names.len() / 2);
    let mut all = compared(a, outputs, values, skipped)?;
    all.extend(compared(b, outputs, values, skipped)?);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::Error;
    use halcyon_formats::onnx::Datum;

    fn chain(n: usize) -> Vec<MainNode> {
        let name = |i: usize| format!("v{i}");
        (0..n)
            .map(|i| MainNode {
                name: format!("n{i}"),
                op: "Relu".into(),
                inputs: vec![name(i)],
                outputs: vec![name(i + 1)],
                contains_graphs: false,
            })
            .collect()
    }

    fn difference(same: bool) -> Difference {
        let x = |v: f32| Datum::from(halcyon::ConstData::from_slice(&[1], &[v]).unwrap());
        let t = crate::cmd::difference::Tolerance { rtol: 0.0, atol: 0.5, rtol_f16: 0.0 };
        Difference::between(&x(1.0), &x(if same { 1.25 } else { 2.0 }), &t)
    }

    /// The search with values that differ from number `from` on. `refused` cannot be returned.
    fn with(n: usize, from: usize, refused: &[&str], asked: &mut Vec<usize>) -> Search {
        let outputs = [format!("v{n}")];
        let mut values = |names: &[String]| {
            asked.push(names.len());
            if names.iter().any(|n| refused.contains(&n.as_str())) {
                return Err(Error::unsupported("a value", "nothing"));
            }
            let number = |s: &str| s[1..].parse::<usize>().unwrap();
            Ok(names.iter().chain(&outputs).map(|n| (n.clone(), difference(number(n) < from))).collect())
        };
        search(&chain(n), None, &outputs, &mut values).unwrap()
    }

    #[test]
    fn the_first_node_is_found_and_no_value_after_it_is_asked_for() {
        for from in [1, 2, VALUES, VALUES + 1, VALUES + 2, 300] {
            let mut asked = vec![];
            let s = with(300, from, &[], &mut asked);
            let first = s.first.expect("a node");
            assert_eq!((first.node.name, first.value), (format!("n{}", from - 1), format!("v{from}")));
            assert_eq!(s.compared, from);
            assert_eq!(asked.len(), from.div_ceil(VALUES), "{from}: {asked:?}");
            assert!(asked.iter().all(|n| *n <= VALUES));
            match &first.operands[0].1 {
                Operand::Compared(d) => assert!(d.agrees() && from > 1, "{from}"),
                other => assert!(matches!(other, Operand::Given) && from == 1, "{from}: {other:?}"),
            }
        }
    }

    #[test]
    fn values_that_cannot_be_returned_are_skipped_one_by_one() {
        let s = with(100, 90, &["v5", "v70"], &mut vec![]);
        assert_eq!(s.first.expect("a node").value, "v90");
        let names: Vec<&str> = s.skipped.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["v5", "v70"]);
        assert!(s.skipped[0].1.contains("not supported"));
        assert_eq!((s.compared, s.values), (88, 100));
        let s = with(100, 6, &["v5"], &mut vec![]);
        assert!(matches!(s.first.expect("a node").operands[0].1, Operand::NotCompared));
        // A value after the first difference is of no interest.
        assert!(with(100, 3, &["v5"], &mut vec![]).skipped.is_empty());
    }

    #[test]
    fn without_a_difference_all_values_are_compared() {
        let s = with(70, 1000, &[], &mut vec![]);
        assert!(s.first.is_none());
        assert_eq!((s.compared, s.values), (70, 70));
        // Values that only one of two models makes are left out.
        let theirs = chain(10);
        let mut values =
            |names: &[String]| Ok(names.iter().map(|n| (n.clone(), difference(true))).collect::<Vec<_>>());
        let s = search(&chain(20), Some(&theirs), &[], &mut values).unwrap();
        assert_eq!((s.compared, s.values), (10, 20));
    }
}

use super::*;

/// Checks facts that depend on each other.
#[test]
fn facts_agree() {
    let ops = [
        Op::Full(Scalar::I(0)),
        Op::Cast,
        Op::Reduce { kind: ReduceKind::Sum, axes: Axes::new(), keep: false },
        Op::Matmul,
        Op::Gather { axis: 0 },
        Op::UpdateSlice { axis: 0 },
        Op::Reshape,
        Op::Permute([0usize][..].into()),
        Op::Expand,
        Op::Slice([SliceAxis { start: 0usize.into(), step: 1 }].into_iter().collect()),
        Op::Pad { lo: [1usize][..].into(), hi: [0usize][..].into(), value: Scalar::I(0) },
        Op::Concat { axis: 0 },
        Op::Scan { kind: ReduceKind::Max, axis: 0, exclusive: false, reverse: false },
    ];
    for op in ops {
        let f = op.facts();
        // Only an op that is lowered to its own step may have a template, pack constants, sum products or run
        // in place.
        let step = f.packs || f.in_place || f.summed.is_some() || f.template.is_some();
        assert!(!step || f.lowering == Lowering::Step, "{}", op.name());
        assert_eq!(op.is_view(), op.restride(&[2]).is_some(), "{}", op.name());
        assert_eq!(op.with_fill(|v| v).unwrap(), op);
    }
}

#[test]
fn the_fill_of_a_pad_is_rewritten() {
    let pad = |value| Op::Pad { lo: [1usize][..].into(), hi: [2usize][..].into(), value };
    assert_eq!(pad(Scalar::I(7)).with_fill(|_| Scalar::I(9)).unwrap(), pad(Scalar::I(9)));
}

#[test]
fn the_references_work_is_what_it_reads_and_the_terms_of_its_sums() {
    assert_eq!(Op::Matmul.reference_work(&[&[2, 3], &[3, 4]], &[2, 4]), Some(6 + 12 + 8 * 3));
    let conv = Op::Conv(Conv::new(1));
    assert_eq!(conv.reference_work(&[&[1, 2, 8], &[5, 2, 3]], &[1, 5, 6]), Some(16 + 30 + 30 * 2 * 3));
    let pool = Op::Pool(Pool::max([2, 2]));
    assert_eq!(pool.reference_work(&[&[1, 1, 4, 4]], &[1, 1, 2, 2]), Some(16 + 4 * 4));
    assert_eq!(Op::Cast.reference_work(&[&[7]], &[7]), Some(14));
    assert_eq!(
        Op::Matmul.reference_work(&[&[1 << 40, 1 << 20], &[1 << 20, 1]], &[1 << 40, 1]),
        Some((1 << 60) + (1 << 20) + (1 << 60))
    );
    assert_eq!(Op::Expand.reference_work(&[&[1]], &[usize::MAX, 2]), None);
}

#[test]
fn a_printed_graph_shows_attributes() {
    let mut g = crate::Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [2usize, 3]));
    let y = g.push(Op::Permute([1usize, 0][..].into()), &[x], None).unwrap();
    let scan = Op::Scan { kind: ReduceKind::Sum, axis: 1, exclusive: false, reverse: true };
    let z = g.push(scan, &[y], None).unwrap();
    g.output("z", z);
    let text = g.to_string();
    for part in ["= input \"x\"", "= permute [1, 0](%0)", "= scan_sum axis 1, reverse(%1)"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

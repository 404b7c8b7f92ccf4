use super::*;

/// Facts that depend on each other.
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
        // Only a step of its own has a template, packs, sums products or runs in place.
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

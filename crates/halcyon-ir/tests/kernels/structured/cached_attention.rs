//! Attention over a paged cache.

use super::harness::*;
use super::linear::blocks;
use halcyon_ir::blocks::BlockType;
use halcyon_ir::kernel::lower::{Lowered, lower_op};
use halcyon_ir::layout::View;
use halcyon_ir::ops::{CacheOperands, CachedAttention};
use halcyon_ir::target::{Caps, Declined, Operand};
use halcyon_ir::{DType, Graph, NodeId, Op, Result, TensorType};

fn lower(op: &Op, x: &[Operand], y: &[Operand], c: &Caps) -> std::result::Result<Lowered, Declined> {
    lower_op(op, x, y, false, c)
}

/// A GPU that divides the parts, one that does not, a CPU, and devices with little memory.
fn all_devices() -> Vec<Caps> {
    let gpu = Caps::generous();
    let wide = Caps { compute_units: Some(1000), ..gpu.clone() };
    let small = Caps { max_workgroup: 64, workgroup_memory: 6000, ..wide.clone() };
    let narrow = Caps { compute_units: Some(0), max_workgroup: 32, ..gpu.clone() };
    let cpu = Caps { is_cpu: true, ..gpu.clone() };
    let tiny = Caps { max_workgroup: 4, workgroup_memory: 64, max_groups: 97, ..gpu.clone() };
    vec![gpu, wide, small, narrow, cpu, tiny]
}

#[derive(Clone, Copy)]
struct Case {
    /// Types of keys and of values; u8 are blocks.
    d: [DType; 2],
    /// Query heads, key heads, size of a key and of a value.
    heads: [usize; 2],
    sizes: [usize; 2],
    /// Pages, positions of a page, and pages of a sequence.
    pages: [usize; 3],
    options: CachedAttention,
    sinks: bool,
}

const PLAIN: CachedAttention = CachedAttention { scale: 0.25, softcap: None, window: None };

impl Case {
    /// Random operands for rows at the given sequences and positions.
    fn inputs(&self, rng: &mut Rng, rows: &[(i32, i32)], spread: bool) -> Vec<Input> {
        let [pages, page, each] = self.pages;
        let mut cache = |d: DType, size: usize| {
            let lead = [pages, self.heads[1], page];
            if d == DType::U8 {
                let (offset, gap) = if spread { (3, 5) } else { (0, 0) };
                return blocks(rng, BlockType::Q8_0, &lead, size, offset, gap);
            }
            let shape = [pages, self.heads[1], page, size];
            let view = match spread {
                // Rows that are not aligned.
                true => {
                    View::dense(&[pages, self.heads[1], page, size + 3]).slice(&[0, 0, 0, 1], &[1; 4], &shape)
                }
                false => View::dense(&shape),
            };
            Input::random(rng, d, view)
        };
        let (keys, values) = (cache(self.d[0], self.sizes[0]), cache(self.d[1], self.sizes[1]));
        let ints = |rng: &mut Rng, shape: &[usize], f: &dyn Fn(usize) -> i32| {
            let mut x = Input::dense(rng, DType::I32, shape);
            (0..shape.iter().product()).for_each(|i| x.set(i, f64::from(f(i))));
            x
        };
        let q = Input::dense(rng, DType::F32, &[rows.len(), self.heads[0], self.sizes[0]]);
        let table = ints(rng, &[3, each], &|i| (i * 7 % pages) as i32);
        let sequence = ints(rng, &[rows.len()], &|i| rows[i].0);
        let position = ints(rng, &[rows.len()], &|i| rows[i].1);
        let mut all = vec![q, keys, values, table, sequence, position];
        if self.sinks {
            all.push(Input::dense(rng, DType::F32, &[self.heads[0]]));
        }
        all
    }

    fn build(&self, g: &mut Graph, x: &[NodeId]) -> Result<NodeId> {
        let cache = CacheOperands {
            keys: x[1],
            values: x[2],
            table: x[3],
            sequence: x[4],
            position: x[5],
            sinks: x.get(6).copied(),
        };
        g.cached_attention(x[0], cache, self.options)
    }

    fn run(&self, inputs: &[Input], caps: &Caps, subgroup: u32) -> (Vec<u8>, bool) {
        let mut g = Graph::new();
        let x: Vec<NodeId> = inputs
            .iter()
            .map(|i| g.input("x", TensorType::new(i.operand.dtype, &i.operand.view.shape)))
            .collect();
        let y = self.build(&mut g, &x).unwrap();
        let out = Operand { dtype: DType::F32, view: View::dense(&g.shape(y).known().unwrap()) };
        let operands: Vec<Operand> = inputs.iter().map(|i| i.operand.clone()).collect();
        let low = lower(&g.node(y).op, &operands, std::slice::from_ref(&out), caps).unwrap();
        run_with_fault(&low, inputs, &out, subgroup, 5)
    }
}

#[test]
fn cached_attention() {
    let mut rng = Rng::new(1);
    let base = Case {
        d: [DType::F32; 2],
        heads: [4, 2],
        sizes: [8, 8],
        pages: [9, 5, 3],
        options: PLAIN,
        sinks: false,
    };
    let capped = CachedAttention { softcap: Some(1.5), ..PLAIN };
    let near = CachedAttention { window: Some(4), ..PLAIN };
    let cases = [
        base,
        Case { heads: [6, 1], sizes: [7, 5], d: [DType::F16; 2], options: capped, ..base },
        Case { heads: [8, 2], sizes: [32, 24], d: [DType::BF16; 2], options: near, sinks: true, ..base },
        Case { heads: [3, 3], sizes: [16, 40], d: [DType::F16; 2], sinks: true, ..base },
        Case { heads: [5, 1], sizes: [1, 1], options: near, ..base },
        // Several parts.
        Case { heads: [2, 1], sizes: [8, 16], pages: [50, 16, 40], sinks: true, ..base },
        Case {
            heads: [2, 1],
            pages: [50, 16, 40],
            d: [DType::F16; 2],
            options: CachedAttention { window: Some(300), ..near },
            ..base
        },
    ];
    let small = CachedAttention { scale: 0.05, ..PLAIN };
    let bytes = Case { d: [DType::U8; 2], sizes: [64, 32], options: small, ..base };
    let blocks = [
        bytes,
        Case { heads: [6, 1], sizes: [32, 96], options: CachedAttention { scale: 0.05, ..capped }, ..bytes },
        Case { heads: [3, 3], sizes: [96, 64], sinks: true, pages: [50, 16, 40], ..bytes },
        // Keys and values of different types.
        Case { d: [DType::U8, DType::F16], sizes: [32, 20], ..bytes },
        Case { d: [DType::F32, DType::U8], options: CachedAttention { scale: 0.05, ..near }, ..bytes },
        Case { d: [DType::F16, DType::F32], sizes: [7, 9], ..base },
    ];
    for (n, c) in cases.iter().chain(&blocks).enumerate() {
        let last = (c.pages[1] * c.pages[2]) as i32 - 1;
        let rows = [(0, last), (2, 0), (1, -1), (1, last / 2)];
        for (rows, spread) in [(&rows[..], false), (&rows[..1], true), (&rows[3..], false)] {
            let x = c.inputs(&mut rng, rows, spread || n == 3);
            check_on(&all_devices(), lower, &x, 40.0, |g, x| c.build(g, x));
        }
    }
}

/// Positions, sequences and pages out of range are clamped and set the fault word.
#[test]
fn bad_positions_set_the_fault_word() {
    let mut rng = Rng::new(2);
    let c = Case {
        d: [DType::F32; 2],
        heads: [2, 1],
        sizes: [8, 8],
        pages: [9, 5, 3],
        options: PLAIN,
        sinks: false,
    };
    for caps in all_devices() {
        for (row, page, bad) in [
            ((0, 14), 0, false),
            ((0, 15), 0, true),
            ((3, 2), 0, true),
            ((3, -1), 0, false),
            ((0, 2), 9, true),
            // The page of a position that the row does not see.
            ((1, 2), 9, false),
        ] {
            let mut x = c.inputs(&mut rng, &[(1, 3), row], false);
            x[3].set(0, f64::from(page));
            assert_eq!(c.run(&x, &caps, 32).1, bad, "{row:?} {page} {caps:?}");
        }
    }
}

/// The bits of a row do not depend on the other rows, on unseen positions, or on how the positions are
/// divided among workgroups.
#[test]
fn cached_attention_is_batch_invariant() {
    let mut rng = Rng::new(3);
    let base = Case {
        d: [DType::F16; 2],
        heads: [4, 1],
        sizes: [16, 16],
        pages: [50, 16, 40],
        options: PLAIN,
        sinks: true,
    };
    let near = Case { d: [DType::F32; 2], options: CachedAttention { window: Some(290), ..PLAIN }, ..base };
    let bytes = Case { d: [DType::U8; 2], sizes: [32, 64], ..base };
    for c in [base, near, bytes, Case { d: [DType::F32, DType::U8], ..bytes }] {
        let rows = [(0, 639), (1, 0), (2, 300), (1, -1), (0, 255), (1, 256), (2, 511), (0, 17)];
        let x = c.inputs(&mut rng, &rows, false);
        let mut gpus: Vec<Vec<u8>> = vec![];
        for (n, caps) in all_devices().iter().enumerate() {
            let (all, fault) = c.run(&x, caps, 32);
            assert!(!fault);
            let bytes = c.heads[0] * c.sizes[1] * 4;
            for i in 0..rows.len() {
                let part: Vec<Input> = x
                    .iter()
                    .enumerate()
                    .map(|(k, o)| {
                        let (mut view, mut data) = (o.operand.view.clone(), o.data.clone());
                        if [0, 4, 5].contains(&k) {
                            view.offset = i as isize * view.strides[0];
                            view.shape[0] = 1;
                        }
                        // Pages that the row does not see are NaN.
                        if [1, 2].contains(&k) {
                            let (sequence, position) = rows[i];
                            let page = |n: i32| (sequence * 40 + n) * 7 % 50;
                            let seen: Vec<i32> = (0..=position.div_euclid(16)).map(page).collect();
                            let bytes = data.len() / 50;
                            for (p, page) in data.chunks_mut(bytes).enumerate() {
                                if !seen.contains(&(p as i32)) {
                                    page.fill(0xFF);
                                }
                            }
                        }
                        Input { operand: Operand { dtype: o.operand.dtype, view }, data }
                    })
                    .collect();
                let alone = c.run(&part, caps, 32).0;
                assert!(alone == all[i * bytes..(i + 1) * bytes], "row {i} on {caps:?}");
            }
            if n < 2 {
                gpus.push(all);
            }
        }
        assert!(gpus[0] == gpus[1], "the division of the parts changes bits");
    }
}

use super::harness::*;
use halcyon_ir::kernel::templates::attention::lower;
use halcyon_ir::layout::View;
use halcyon_ir::target::{Caps, Operand};
use halcyon_ir::{DType, Graph, TensorType};
use halcyon_test_host::drawn;

#[derive(Clone, Copy)]
struct Case {
    b: usize,
    h: usize,
    hk: usize,
    sq: usize,
    sk: usize,
    d: usize,
}

fn run(x: &[Input], causal: bool) -> Vec<String> {
    check(lower, x, 64.0, |g, v| g.attention(v[0], v[1], v[2], v.get(3).copied(), causal, 0.3))
}

fn operands(r: &mut Rng, d: DType, c: Case) -> Vec<Input> {
    vec![
        Input::dense(r, d, &[c.b, c.h, c.sq, c.d]),
        Input::dense(r, d, &[c.b, c.hk, c.sk, c.d]),
        Input::dense(r, d, &[c.b, c.hk, c.sk, c.d]),
    ]
}

const SMALL: Case = Case { b: 2, h: 4, hk: 2, sq: 5, sk: 37, d: 20 };

/// One float type drawn for this run, or all float types, each with its number.
fn one_float(test: &str) -> Vec<(usize, DType)> {
    let all: Vec<_> = DType::native().filter(|d| d.is_float()).enumerate().collect();
    drawn(test, all.len()).map_or(all.clone(), |i| vec![all[i]])
}

#[test]
fn shapes_choose_the_kernel() {
    let mut r = Rng::new(51);
    let (tiled, few) = (&["attention_tiled"][..], &["attention_few"][..]);
    let split = &["attention_split", "attention_join"][..];
    for (c, gpu) in [
        (SMALL, tiled),
        (Case { sq: 19, sk: 19, h: 2, ..SMALL }, tiled),
        (Case { sq: 1, ..SMALL }, few),
        (Case { sq: 1, sk: 150, d: 64, ..SMALL }, few),
        (Case { b: 1, d: 100, ..SMALL }, tiled),
        (Case { b: 1, d: 200, sk: 20, ..SMALL }, tiled),
        (Case { b: 1, h: 1, hk: 1, sq: 1, sk: 300, d: 129 }, split),
        (Case { b: 1, h: 1, hk: 1, sq: 1, sk: 1, d: 1 }, few),
    ] {
        for causal in [false, true] {
            let names = run(&operands(&mut r, DType::F32, c), causal);
            assert_eq!(names, [gpu, &["attention_item"; 2]].concat());
        }
    }
}

/// A GPU that a single workgroup would leave mostly idle.
fn wide() -> Vec<Caps> {
    vec![Caps { compute_units: Some(64), ..Caps::generous() }]
}

fn run_wide(x: &[Input], causal: bool) -> Vec<String> {
    check_on(&wide(), lower, x, 64.0, |g, v| g.attention(v[0], v[1], v[2], v.get(3).copied(), causal, 0.3))
}

const SPLIT: [&str; 2] = ["attention_split", "attention_join"];

#[test]
fn few_queries_split_the_keys() {
    let mut r = Rng::new(58);
    let c = Case { b: 1, h: 4, hk: 2, sq: 1, sk: 300, d: 64 };
    for (n, d) in one_float("few_queries_split_the_keys") {
        for (i, c) in [
            c,
            // Rows that fill one workgroup, two workgroups, and part of a second one.
            Case { h: 8, hk: 1, ..c },
            Case { h: 2, sq: 16, d: 16, ..c },
            Case { h: 3, hk: 1, sq: 3, d: 96, ..c },
            // A row length that is not a multiple of 16 bytes (except in f64), a short one, and the longest
            // one.
            Case { sk: 257, d: 50, ..c },
            Case { sk: 900, d: 3, ..c },
            Case { sk: 256, d: 256, ..c },
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(run_wide(&operands(&mut r, d, c), (n + i) % 2 == 0), SPLIT);
        }
    }
}

#[test]
fn parts_without_a_key_that_is_seen_count_for_nothing() {
    let mut r = Rng::new(59);
    let c = Case { b: 2, h: 4, hk: 2, sq: 2, sk: 400, d: 24 };
    for shape in [vec![c.sk], vec![c.b, c.h, c.sq, c.sk], vec![c.b, 1, c.sq, 1]] {
        for large in [0.0, 30.0] {
            let mut x = operands(&mut r, DType::F32, c);
            let mut m = Input::dense(&mut r, DType::F32, &shape);
            let (n, last) = (shape.iter().product::<usize>(), *shape.last().unwrap());
            for i in 0..n {
                let key = i % last;
                // The mask hides all keys from every fifth row, and the keys of the first and the last part
                // from the other rows.
                let none = (i / last) % 5 == 1 || (last > 1 && !(150..280).contains(&key));
                m.set(i, if none { f64::NEG_INFINITY } else { large * (key % 3) as f64 });
            }
            x.push(m);
            assert_eq!(run_wide(&x, large == 0.0), SPLIT);
        }
    }
}

/// Each part in turn has the largest score, so the sums of the other parts are scaled down.
#[test]
fn every_part_may_have_the_largest_score() {
    let mut r = Rng::new(60);
    let c = Case { b: 1, h: 2, hk: 1, sq: 1, sk: 520, d: 32 };
    for at in [3, 200, 390, 519] {
        let mut x = operands(&mut r, DType::F16, c);
        let mut m = Input::dense(&mut r, DType::F16, &[c.sk]);
        (0..c.sk).for_each(|i| m.set(i, if i == at { 4.0 } else { -((i / 130) as f64) }));
        x.push(m);
        assert_eq!(run_wide(&x, false), SPLIT);
    }
}

#[test]
fn a_cache_that_grows_keeps_the_programs() {
    let mut r = Rng::new(61);
    let programs = |r: &mut Rng, b: usize, sk: usize| -> Vec<u128> {
        let q = Input::dense(r, DType::BF16, &[b, 8, 1, 64]);
        let kv = || View::dense(&[b, 2, 4096, 64]).slice(&[0; 4], &[1; 4], &[b, 2, sk, 64]);
        let x = [q.operand.view.clone(), kv(), kv()];
        let ins = x.map(|view| Operand { dtype: DType::BF16, view });
        let mut g = Graph::new();
        let ids: Vec<_> = ins.iter().map(|i| g.input("x", TensorType::new(i.dtype, &i.view.shape))).collect();
        let y = g.attention(ids[0], ids[1], ids[2], None, true, 0.125).unwrap();
        let low = lower(&g.node(y).op, &ins, &[q.operand], &wide()[0]).unwrap();
        // For each query of each head, the temporary between the two kernels has one row per part. A part has
        // at least 128 keys.
        let rows = low.temps.iter().map(|n| n / ((64 + 4) * 4 * 8 * b)).collect::<Vec<_>>();
        assert!(rows.iter().all(|n| (2..=sk / 128).contains(n)), "{rows:?} parts of {sk}");
        low.steps.iter().map(|(k, ..)| k.key()).collect()
    };
    let first = programs(&mut r, 1, 256);
    assert_eq!(first.len(), 2);
    for sk in [257, 300, 1023, 1024, 4096] {
        assert_eq!(programs(&mut r, 1, sk), first, "{sk} keys");
    }
    // One part is enough for few keys, or if the heads keep all compute units busy. Then nothing is joined.
    let whole = programs(&mut r, 1, 255);
    assert_eq!(whole.len(), 1);
    assert_eq!(programs(&mut r, 1, 1), whole);
    assert_eq!(programs(&mut r, 64, 4096), whole);
}

#[test]
fn every_float_dtype() {
    let mut r = Rng::new(52);
    for (_, d) in one_float("every_float_dtype") {
        for c in [SMALL, Case { sq: 1, ..SMALL }, Case { b: 1, d: 130, ..SMALL }] {
            let x = operands(&mut r, d, c);
            if c.d == 130 && d == DType::F64 {
                // The tile does not fit, so one work-item computes each query.
                assert_eq!(run(&x, true)[0], "attention_item");
            } else {
                run(&x, true);
            }
        }
    }
}

#[test]
fn masks_broadcast_and_may_hide_all_keys() {
    let mut r = Rng::new(53);
    for c in [SMALL, Case { sq: 1, ..SMALL }] {
        for shape in [vec![c.b, c.h, c.sq, c.sk], vec![c.b, 1, 1, c.sk], vec![c.sq, c.sk], vec![1, 1]] {
            let mut x = operands(&mut r, DType::F32, c);
            let mut m = Input::dense(&mut r, DType::F32, &shape);
            let n: usize = shape.iter().product();
            for i in 0..n {
                if n > 1 && (i < c.sk || i % 3 == 0) {
                    m.set(i, f64::NEG_INFINITY);
                }
            }
            x.push(m);
            run(&x, false);
            run(&x, true);
        }
    }
}

#[test]
fn a_long_masked_prefix_and_large_scores() {
    let mut r = Rng::new(54);
    for c in [Case { sk: 90, ..SMALL }, Case { sk: 200, sq: 1, ..SMALL }] {
        let mut x = operands(&mut r, DType::F32, c);
        let mut m = Input::dense(&mut r, DType::F32, &[c.sk]);
        for i in 0..c.sk {
            m.set(i, if i < 70 { f64::NEG_INFINITY } else { 200.0 * (i % 2) as f64 });
        }
        x.push(m);
        run(&x, false);
    }
}

#[test]
fn queries_before_the_first_key_see_nothing() {
    let mut r = Rng::new(55);
    // There are more queries than keys, so the causal mask hides all keys from the first queries, which give
    // NaN.
    for sq in [6, 40] {
        let c = Case { sq, sk: 4, ..SMALL };
        run(&operands(&mut r, DType::F32, c), true);
    }
}

#[test]
fn heads_in_the_middle_and_a_cache_longer_than_its_keys() {
    let mut r = Rng::new(56);
    let q = View::dense(&[2, 5, 4, 20]).permute(&[0, 2, 1, 3]);
    let kv = View::dense(&[2, 2, 64, 20]).slice(&[0, 0, 3, 0], &[1; 4], &[2, 2, 37, 20]);
    let x = [q, kv.clone(), kv].map(|v| Input::random(&mut r, DType::F32, v));
    run(&x, true);
}

#[test]
fn long_rows_and_scattered_rows_are_declined() {
    let mut r = Rng::new(57);
    let caps = &devices()[0];
    let try_it = |r: &mut Rng, d: usize, views: [View; 3]| {
        let ins = views.map(|v| Input::random(r, DType::F32, v).operand);
        let mut g = Graph::new();
        let ids: Vec<_> =
            ins.iter().map(|i| g.input("x", TensorType::new(DType::F32, &i.view.shape))).collect();
        let y = g.attention(ids[0], ids[1], ids[2], None, false, 1.0).unwrap();
        let out = Input::dense(r, DType::F32, &[1, 1, 3, d]).operand;
        lower(&g.node(y).op, &ins, &[out], caps).unwrap_err()
    };
    let long = || View::dense(&[1, 1, 3, 257]);
    let e = try_it(&mut r, 257, [long(), long(), long()]);
    assert!(e.dense.is_empty() && e.reason.contains("257"));
    let rows = || View::dense(&[1, 1, 3, 3]);
    let e = try_it(&mut r, 3, [rows(), rows().permute(&[0, 1, 3, 2]), rows()]);
    assert_eq!(e.dense, [1]);
}

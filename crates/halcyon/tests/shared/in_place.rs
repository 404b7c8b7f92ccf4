//! Updates that overwrite the memory of the operand that they update, and steps that overwrite a state.

use halcyon::ir::passes::IN_PLACE;
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, Session, State};
use halcyon_test::Rng;
use halcyon_test::devices::test_backends;

fn backend(kind: BackendType, level: Level) -> Backend {
    Backend::builder().backend_type(kind).level(level).num_threads(2).build().unwrap()
}

/// Takes the first `rows` rows of a value with eight rows and updates a slice of them. The result is the
/// graph's output.
fn update(rows: usize) -> Graph {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [8usize, 4]));
    let new = g.input("new", TensorType::new(DType::F32, [2usize, 4]));
    let at = g.input("at", TensorType::new(DType::I32, [0usize; 0]));
    let stored = g.softmax(x, 1).unwrap();
    let first = g.narrow(stored, 0, 0usize, rows).unwrap();
    let y = g.update_slice(first, new, at, 0).unwrap();
    g.output("y", y);
    g
}

/// An update runs in place only if the buffer has the size of the result. Leading rows are dense, but their
/// buffer is larger, so this update gets a buffer of its own.
#[test]
fn an_update_of_leading_rows_gets_a_buffer_of_its_size() {
    let mut rng = Rng::fresh("an_update_of_leading_rows_gets_a_buffer_of_its_size");
    let inputs = [
        ConstData::from_slice(&[8, 4], &rng.f32s(32)).unwrap(),
        ConstData::from_slice(&[2, 4], &rng.f32s(8)).unwrap(),
        ConstData::from_slice(&[], &[1i32]).unwrap(),
    ];
    let reference = backend(BackendType::Cpu, Level::O0);
    for kind in test_backends() {
        for (rows, in_place) in [(8, 1), (5, 0)] {
            let want = Session::new(&reference, update(rows)).run(&inputs).unwrap();
            let s = Session::new(&backend(kind, Level::O2), update(rows));
            let got = s.run(&inputs).unwrap();
            assert_eq!(got[0].dims, want[0].dims, "{kind} {rows}");
            assert!(halcyon::session::difference(&got, &want) < 1e-6, "{kind} {rows}");
            let plan = s.prepare(&inputs).unwrap();
            let receipts = plan.plan().receipts.iter();
            let count: usize = receipts.filter(|r| r.transformation == IN_PLACE).map(|r| r.count).sum();
            assert_eq!(count, in_place, "{kind} {rows}");
        }
    }
}

/// The leading rows of a donated tensor are updated. The tensor's memory is larger than the result.
#[test]
fn the_leading_rows_of_a_donated_tensor_keep_their_numbers() {
    for kind in test_backends() {
        let b = backend(kind, Level::O2);
        let rows: Vec<f32> = (0..32).map(|i| i as f32).collect();
        let step = b.compile(|x: &[Tensor]| [x[0].narrow(0, 0, 5).update_slice(&x[1], &x[2], 0)]);
        let x = Tensor::from_slice(&b, [8, 4], &rows).unwrap();
        let new = Tensor::from_slice(&b, [1, 4], &[-1.0f32; 4]).unwrap();
        let at = Tensor::scalar(&b, 2.0, DType::I32);
        x.eval().unwrap();
        let y = step.call(&[x.donate(), &new, &at]).unwrap().remove(0);
        let mut want = rows[..20].to_vec();
        want[8..12].fill(-1.0);
        assert_eq!(y.to_vec::<f32>().unwrap(), want, "{kind}");
        // Later steps read the result with its own shape.
        assert_eq!((&y + 1.0).sum(..).item::<f32>().unwrap(), want.iter().sum::<f32>() + 20.0, "{kind}");
    }
}

/// One step, joined from two chains, overwrites a state and also returns the state's old elements.
#[test]
fn the_old_value_of_an_overwritten_state_may_be_a_result() {
    for kind in test_backends() {
        let b = backend(kind, Level::O2);
        for n in [1usize, 5000] {
            let mut rng = Rng::fresh("the_old_value_of_an_overwritten_state_may_be_a_result");
            let old = rng.f32s(2 * n);
            let state = State::new(Tensor::from_slice(&b, [2, n], &old).unwrap());
            state.value().eval().unwrap();
            let step = b.compile(move |x: &[Tensor]| {
                let y = x[0].reshape([2 * n]);
                [y.clone(), &x[0] + y.tanh().reshape([2, n])]
            });
            let got = step.call_updating(&[], &[&state], &[]).unwrap();
            assert_eq!(got[0].to_vec::<f32>().unwrap(), old, "{kind} {n}");
            let new = state.value().to_vec::<f32>().unwrap();
            let right = new.iter().zip(&old).all(|(a, o)| (a - (o + o.tanh())).abs() < 1e-5);
            assert!(right, "{kind} {n}");
        }
    }
}

/// The second state of a size gets the memory that the first one filled. Memory that the system supplies
/// later has the same values, and steps still overwrite the states.
#[test]
fn states_of_zeros_are_zero_and_are_overwritten() {
    for kind in test_backends() {
        let b = backend(kind, Level::O2);
        let step = b.compile(|x: &[Tensor]| [x[2].update_slice(&x[0], &x[1], 0)]);
        for rows in [3, 200_001] {
            let at = Tensor::scalar(&b, rows as f64 - 2.0, DType::I32);
            let new = Tensor::from_slice(&b, [1, 2], &[5.0f32, 6.0]).unwrap();
            for round in 0..3 {
                let states = [(); 2].map(|()| State::zeros(&b, [rows, 2], DType::F32).unwrap());
                let before = b.cache_stats().copies;
                let supply = State::supply(&states);
                step.call_updating(&[&new, &at], &[&states[0]], &[]).unwrap();
                drop(supply);
                assert_eq!(b.cache_stats().copies, before, "{kind} {rows} {round}");
                let mut want = vec![0.0f32; 2 * rows];
                assert_eq!(states[1].value().to_vec::<f32>().unwrap(), want, "{kind} {rows} {round}");
                want[2 * rows - 4..2 * rows - 2].copy_from_slice(&[5.0, 6.0]);
                assert_eq!(states[0].value().to_vec::<f32>().unwrap(), want, "{kind} {rows} {round}");
                for s in &states {
                    let filled = Tensor::full(&b, [rows, 2], 7.0, DType::F32);
                    step.call_updating(&[&filled, &Tensor::scalar(&b, 0.0, DType::I32)], &[s], &[]).unwrap();
                    assert_eq!(s.value().to_vec::<f32>().unwrap(), vec![7.0; 2 * rows], "{kind} {rows}");
                }
            }
        }
    }
}

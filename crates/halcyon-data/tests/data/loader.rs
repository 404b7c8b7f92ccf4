//! Order, positions, errors and threads of the loader.

use halcyon_data::{
    Arrays, Batch, Column, ConstData, DType, DataLoader, Dataset, DatasetExt, Error, LoaderOptions,
    LoaderState, Result, permutation,
};
use halcyon_test_host::seed;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Row `k` is `[k, 2 k]` and `k`.
fn numbers(n: usize) -> Arrays {
    let x: Vec<i64> = (0..n as i64).flat_map(|k| [k, 2 * k]).collect();
    let y: Vec<i32> = (0..n as i32).collect();
    let x = ConstData::from_slice(&[n, 2], &x).expect("an array");
    Arrays::new([("x", x), ("y", ConstData::from_slice(&[n], &y).expect("an array"))]).expect("a dataset")
}

fn take(loader: &mut DataLoader, n: usize) -> Vec<Batch> {
    (0..n).map(|_| loader.next_batch().expect("a batch")).collect()
}

/// The content of a batch: place, rows and values.
fn content(b: &Batch) -> (u64, u64, bool, Vec<usize>, Vec<ConstData>) {
    (b.epoch, b.index, b.last, b.rows.clone(), b.arrays.clone())
}

/// Random options for `n` rows. `r(m)` draws a random number below `m`.
fn options(r: &mut impl FnMut(usize) -> usize, n: usize) -> LoaderOptions {
    let mut o = LoaderOptions::new(1 + r(n.min(40)));
    if r(3) > 0 {
        o = o.shuffle(r(1000) as u64);
    }
    if r(2) > 0 {
        o = o.prefetch(1 + r(6));
    }
    o.drop_last(r(2) > 0)
}

/// Returns a generator of random numbers below a bound.
fn numbers_below(test: &str) -> impl FnMut(usize) -> usize {
    let (seed, mut epoch) = (seed(test), 0);
    move |n| {
        epoch += 1;
        permutation(n, seed, epoch)[0]
    }
}

#[test]
fn batches_do_not_depend_on_the_number_of_threads() {
    let mut draw = numbers_below("batches_do_not_depend_on_the_number_of_threads");
    for _ in 0..20 {
        let n = 1 + draw(200);
        let o = options(&mut draw, n);
        let want: Vec<_> = {
            let mut loader = DataLoader::new(numbers(n), o.clone().workers(0)).expect("a loader");
            let count = (2 * loader.batches() + 3) as usize;
            take(&mut loader, count).iter().map(content).collect()
        };
        for (_, _, _, rows, arrays) in &want {
            let y: Vec<usize> = arrays[1].to_vec::<i64>().iter().map(|k| *k as usize).collect();
            let x: Vec<usize> = arrays[0].to_vec::<i64>().iter().map(|k| *k as usize).collect();
            assert_eq!((&y, x), (rows, rows.iter().flat_map(|k| [*k, 2 * k]).collect()));
        }
        for workers in [1, 4] {
            let mut loader = DataLoader::new(numbers(n), o.clone().workers(workers)).expect("a loader");
            let got: Vec<_> = take(&mut loader, want.len()).iter().map(content).collect();
            assert!(got == want, "{workers} threads, {n} rows, {o:?}");
        }
    }
}

#[test]
fn an_epoch_has_every_row_once_and_each_its_own_order() {
    let o = LoaderOptions::new(7).shuffle(3).workers(2);
    let mut loader = DataLoader::new(numbers(100), o.clone()).expect("a loader");
    let mut orders = vec![];
    for epoch in 0..4 {
        let batches: Vec<Batch> = loader.epoch().collect::<Result<_>>().expect("an epoch");
        assert_eq!(batches.len(), 15);
        assert!(batches.iter().all(|b| b.epoch == epoch && b.last == (b.index == 14)));
        assert_eq!(batches[14].rows.len(), 2);
        orders.push(batches.iter().flat_map(|b| b.rows.clone()).collect::<Vec<_>>());
    }
    for (k, order) in orders.iter().enumerate() {
        assert_eq!(*order, permutation(100, 3, k as u64));
        assert!(orders[..k].iter().all(|o| o != order));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
    let mut short = DataLoader::new(numbers(100), o.drop_last(true)).expect("a loader");
    assert_eq!(short.batches(), 14);
    assert!(short.epoch().all(|b| b.is_ok_and(|b| b.rows.len() == 7)));
    let mut plain = DataLoader::new(numbers(5), LoaderOptions::new(2)).expect("a loader");
    let rows: Vec<usize> = plain.epoch().flat_map(|b| b.expect("a batch").rows).collect();
    assert_eq!(rows, [0, 1, 2, 3, 4]);
}

#[test]
fn a_restored_loader_goes_on_with_exactly_the_same_batches() {
    let o = LoaderOptions::new(8).shuffle(11);
    let all = |workers| DataLoader::new(numbers(50), o.clone().workers(workers)).expect("a loader");
    let want = take(&mut all(0), 25);
    for k in 0..20 {
        for workers in [0, 3] {
            // Restores the position of a loader, and the position after a batch. Both pass through JSON.
            let mut first = all(2);
            take(&mut first, k);
            let mut states = vec![first.state()];
            states.extend(k.checked_sub(1).map(|k| want[k].after.clone()));
            for state in states {
                let text = serde_json::to_string(&state).expect("JSON");
                let state: LoaderState = serde_json::from_str(&text).expect("a position");
                let mut second = all(workers);
                take(&mut second, 3);
                second.restore(&state).expect("a position");
                assert_eq!(second.state(), state);
                let got = take(&mut second, 5);
                for (got, want) in got.iter().zip(&want[k..]) {
                    assert!(content(got) == content(want), "batch {k}, {workers} threads");
                }
            }
        }
    }
    // The loader finishes the epoch of the position, and then goes to another epoch.
    let mut loader = all(1);
    loader.restore(&want[2].after).expect("a position");
    assert_eq!(loader.epoch().count(), 4);
    loader.set_epoch(2);
    assert!(content(&take(&mut loader, 1)[0]) == content(&want[14]));
    // Restoring a position also restores its seed.
    let other = LoaderOptions::new(8).shuffle(12);
    let mut loader = DataLoader::new(numbers(50), other).expect("a loader");
    take(&mut loader, 1);
    loader.restore(&want[0].after).expect("a position");
    assert!(content(&take(&mut loader, 1)[0]) == content(&want[1]));
}

#[test]
fn positions_and_options_that_do_not_fit_are_refused() {
    let new = |n: usize, o: LoaderOptions| DataLoader::new(numbers(n), o);
    let mut loader = new(50, LoaderOptions::new(8)).expect("a loader");
    let good = loader.state();
    let wrong = [
        LoaderState { rows: 51, ..good.clone() },
        LoaderState { batch_size: 9, ..good.clone() },
        LoaderState { drop_last: true, ..good.clone() },
        LoaderState { next_batch: 8, ..good.clone() },
        LoaderState { next_batch: u64::MAX, ..good.clone() },
    ];
    for state in wrong {
        let e = loader.restore(&state).expect_err("a wrong position");
        assert!(matches!(e, Error::Argument { .. }), "{e}");
        assert_eq!(loader.state(), good);
    }
    // The end of an epoch is the start of the next epoch. The epoch with the largest number has no next
    // epoch.
    loader.restore(&LoaderState { next_batch: 7, ..good.clone() }).expect("the end of an epoch");
    assert_eq!(loader.state(), LoaderState { epoch: 1, ..good.clone() });
    loader.restore(&LoaderState { epoch: u64::MAX, next_batch: 6, ..good }).expect("the last epoch");
    assert!(take(&mut loader, 3).iter().all(|b| b.epoch == u64::MAX));
    for o in [
        LoaderOptions::new(0),
        LoaderOptions::new(9).drop_last(true),
        LoaderOptions::new(1).workers(257),
        LoaderOptions::new(1).prefetch(0),
    ] {
        assert!(matches!(new(8, o.clone()), Err(Error::Argument { .. })), "{o:?}");
    }
    assert!(matches!(new(0, LoaderOptions::new(1)), Err(Error::Argument { .. })));
    assert!(new(8, LoaderOptions::new(1).workers(0).prefetch(0)).is_ok());
}

/// A dataset that counts the rows it makes. At row `at` it fails while `broken` is 1, and panics while
/// `broken` is 2.
struct Counted {
    columns: Vec<Column>,
    made: AtomicUsize,
    broken: AtomicUsize,
    at: usize,
}

impl Counted {
    fn new(at: usize, broken: usize) -> Arc<Counted> {
        let columns = vec![Column::new("x", DType::U8, &[])];
        Arc::new(Counted { columns, made: AtomicUsize::new(0), broken: AtomicUsize::new(broken), at })
    }
}

impl Dataset for Counted {
    fn len(&self) -> usize {
        100
    }
    fn columns(&self) -> &[Column] {
        &self.columns
    }
    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        match self.broken.load(Ordering::Relaxed) {
            1 if row == self.at => return Err(Error::argument("row", format!("row {row} is broken"))),
            2 if row == self.at => panic!("row {row} panics"),
            _ => {}
        }
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(vec![ConstData::from_slice(&[], &[row as u8])?])
    }
}

#[test]
fn threads_make_as_many_batches_ahead_as_allowed_and_end_with_the_loader() {
    for (workers, prefetch) in [(1, 1), (1, 5), (3, 3), (3, 7), (8, 2)] {
        let data = Counted::new(1000, 0);
        let o = LoaderOptions::new(1).workers(workers).prefetch(prefetch);
        let mut loader = DataLoader::new(data.clone(), o).expect("a loader");
        assert_eq!(data.made.load(Ordering::Relaxed), 0, "threads start with the first batch");
        for taken in 1..=4 {
            take(&mut loader, 1);
            let made = || data.made.load(Ordering::Relaxed);
            assert!(
                halcyon_test_host::soon(|| made() == taken + prefetch),
                "{made:?} of {taken} + {prefetch}",
                made = made()
            );
            std::thread::sleep(Duration::from_millis(5));
            assert_eq!(made(), taken + prefetch, "{workers} threads");
        }
        drop(loader);
        assert_eq!(Arc::strong_count(&data), 1, "a thread is left");
    }
}

#[test]
fn errors_arrive_in_the_place_of_their_batch() {
    for workers in [0, 1, 4] {
        let data = Counted::new(7, 1);
        let o = LoaderOptions::new(2).workers(workers);
        let mut loader = DataLoader::new(data.clone(), o).expect("a loader");
        let all: Vec<Result<Batch>> = loader.epoch().collect();
        assert_eq!(all.len(), 4, "three batches and an error");
        assert!(all[..3].iter().all(Result::is_ok));
        let e = all[3].as_ref().expect_err("row 7").to_string();
        assert!(e.contains("row 7 is broken"), "{e}");
        // The position is before the failed batch, so the batch can be tried again.
        assert_eq!(loader.state().next_batch, 3);
        assert!(loader.next_batch().is_err());
        data.broken.store(0, Ordering::Relaxed);
        let rest: Vec<usize> = loader.epoch().flat_map(|b| b.expect("a batch").rows).collect();
        assert_eq!(rest, (6..100).collect::<Vec<_>>());
    }
}

#[test]
fn a_panic_of_the_dataset_is_an_error() {
    let data = Counted::new(4, 2);
    let mut loader = DataLoader::new(data.clone(), LoaderOptions::new(2).workers(2)).expect("a loader");
    take(&mut loader, 2);
    let e = loader.next_batch().expect_err("row 4").to_string();
    assert!(e.contains("panicked") && e.contains("row 4 panics"), "{e}");
    data.broken.store(0, Ordering::Relaxed);
    assert_eq!(take(&mut loader, 1)[0].rows, [4, 5]);
}

#[test]
fn transforms_run_in_the_loader() {
    let data = numbers(10).scale("x", 2.0).expect("a column").select(&["y", "x"]).expect("columns");
    let mut loader = DataLoader::new(data, LoaderOptions::new(4).workers(2)).expect("a loader");
    let batch = loader.epoch().last().expect("a batch").expect("a batch");
    assert_eq!(batch.array("x").expect("x").to_vec::<f32>(), [4.0, 8.0, 4.5, 9.0]);
    assert_eq!(batch.columns()[0].name, "y");
    assert!(batch.array("z").is_err());
}

//! Tests of the trainer: resumption with equal bits, callbacks, evaluation, anomalies, and moves between
//! backends.

use halcyon::prelude::*;
use halcyon::{ConstData, Error};
use halcyon_data::{Arrays, DataLoader, LoaderOptions};
use halcyon_nn::*;
use halcyon_train::*;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Module)]
struct Net {
    fc1: Linear,
    dropout: Dropout,
    fc2: Linear,
}

fn net(b: &Backend) -> Net {
    b.manual_seed(5);
    Net {
        fc1: Linear::new(b, 3, 8).unwrap(),
        dropout: Dropout::new(0.3).unwrap(),
        fc2: Linear::new(b, 8, 2).unwrap(),
    }
}

impl Net {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.fc2.forward(&self.dropout.forward(&self.fc1.forward(x).relu()))
    }
}

fn train_step<'n>(net: &'n Net) -> TrainStep<'n> {
    let optimizer = Optimizer::builder(Adam::w().rate(0.02)).schedule(Schedule::one_cycle(0.02, 60));
    TrainStep::new(net, optimizer.build(net).unwrap(), |net: &&Net, x: &[Tensor]| {
        Ok(vec![cross_entropy(&net.forward(&x[0]), &x[1], CrossEntropyOptions::default())])
    })
    .unwrap()
    .seed(9)
}

/// 50 points in two classes. The batches have 8 points, so an epoch has 7 batches.
fn data() -> DataLoader {
    let x: Vec<f32> = (0..150).map(|i| (i as f32 * 1.7).sin()).collect();
    let y: Vec<i32> = x.chunks(3).map(|p| i32::from(p[0] + p[1] > 0.0)).collect();
    let x = ConstData::from_slice(&[50, 3], &x).unwrap();
    let y = ConstData::from_slice(&[50], &y).unwrap();
    let data = Arrays::new([("x", x), ("y", y)]).unwrap();
    DataLoader::new(data, LoaderOptions::new(8).shuffle(3)).unwrap()
}

/// Records every loss and every epoch.
#[derive(Clone, Default)]
struct Record {
    losses: Rc<RefCell<Vec<(u64, u64)>>>,
    epochs: Rc<RefCell<Vec<(u64, u64)>>>,
    /// Sets the flag after the step with this number.
    stop: Option<(u64, Arc<AtomicBool>)>,
    /// Moves to a backend after the step with this number.
    moves: Vec<(u64, Backend)>,
}

impl Callback for Record {
    fn on_step(&mut self, r: &StepReport) -> Result<Flow> {
        self.losses.borrow_mut().push((r.step, r.loss.to_bits()));
        if let Some((step, flag)) = &self.stop
            && *step == r.step
        {
            flag.store(true, Ordering::Relaxed);
        }
        let moved = self.moves.iter().find(|(s, _)| *s == r.step);
        Ok(moved.map_or(Flow::Continue, |(_, b)| Flow::MoveTo(b.clone())))
    }
    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        self.epochs.borrow_mut().push((r.epoch, r.loss.to_bits()));
        Ok(Flow::Continue)
    }
}

fn options(read_every: u64) -> TrainerOptions {
    TrainerOptions { epochs: 3, read_every, ..TrainerOptions::default() }
}

/// A run that is interrupted after `stop` steps and resumed has the same losses and weights as an
/// uninterrupted run.
#[test]
fn a_resumed_run_has_the_same_bits_wherever_it_stopped() {
    let b = Backend::cpu().unwrap();
    let model = net(&b);
    let whole = Record::default();
    let mut t = Trainer::new(&model, train_step(&model), options(4)).callback(whole.clone());
    let report = t.fit(&mut data()).unwrap();
    assert_eq!((report.epoch, report.step, report.stopped), (3, 21, Stopped::Done));
    let weights = model.fc1.weight.value().to_vec::<f32>().unwrap();
    for stop in 1..=20 {
        let dir = tempfile::tempdir().unwrap();
        let store = || Checkpoints::new(dir.path(), CheckpointOptions::default());
        let first = net(&b);
        let flag = Arc::new(AtomicBool::new(false));
        let record = Record { stop: Some((stop, flag.clone())), ..Record::default() };
        let mut t = Trainer::new(&first, train_step(&first), options(1))
            .callback(record.clone())
            .checkpoints(store())
            .interrupted_by(flag);
        let report = t.fit(&mut data()).unwrap();
        assert_eq!(report.stopped, Stopped::Interrupted, "{stop}");
        assert!(report.step >= stop && report.step <= stop + 1, "{stop}: {}", report.step);
        // The resumed run has a new model with other values and a new loader, as it has in another process.
        let second = net(&b);
        second.fc1.weight.set(Tensor::zeros(&b, [8, 3], DType::F32)).unwrap();
        let mut loader = data();
        let mut t = Trainer::new(&second, train_step(&second).seed(1), options(4))
            .callback(record.clone())
            .checkpoints(store());
        t.resume(&store().latest().unwrap().unwrap(), &mut loader).unwrap();
        t.fit(&mut loader).unwrap();
        assert_eq!(*record.losses.borrow(), *whole.losses.borrow(), "{stop}");
        assert_eq!(*record.epochs.borrow(), *whole.epochs.borrow(), "{stop}");
        assert_eq!(second.fc1.weight.value().to_vec::<f32>().unwrap(), weights, "{stop}");
    }
}

#[test]
fn a_running_trainer_moves_between_devices() {
    let devices = halcyon_test::devices::devices("a_running_trainer_moves_between_devices", Level::O2);
    let cpu = Backend::cpu().unwrap();
    let reference = Record::default();
    let model = net(&cpu);
    Trainer::new(&model, train_step(&model), options(1))
        .callback(reference.clone())
        .fit(&mut data())
        .unwrap();
    let model = net(&cpu);
    let moves: Vec<(u64, Backend)> = (1..).map(|k| k * 3).zip(devices.into_iter().chain([cpu])).collect();
    let last = moves.last().unwrap().1.id().to_string();
    let record = Record { moves, ..Record::default() };
    let mut t = Trainer::new(&model, train_step(&model), options(1)).callback(record.clone());
    t.fit(&mut data()).unwrap();
    assert_eq!(t.step().backend().id(), last);
    for ((s, a), (_, b)) in record.losses.borrow().iter().zip(reference.losses.borrow().iter()) {
        let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
        assert!((a - b).abs() <= 1e-4 * b.abs(), "step {s}: {a} {b}");
    }
}

#[test]
fn logs_evaluation_and_early_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let model = net(&b);
    // The callbacks make the folders.
    let folder = dir.path().join("runs/first");
    let log = folder.join("log.jsonl");
    let mut calls = 0;
    let evaluate = || {
        calls += 1;
        // The metric improves at the second call, then never again.
        Ok([("accuracy".to_string(), if calls < 3 { 0.5 + calls as f64 / 10.0 } else { 0.6 })].into())
    };
    let many = TrainerOptions { epochs: 50, ..TrainerOptions::default() };
    let mut t = Trainer::new(&model, train_step(&model), many)
        .evaluate(evaluate)
        .callback(JsonLog::new(&log))
        .callback(LossChart::new(folder.join("chart/loss.png")))
        .callback(TensorBoard::new(folder.join("board")))
        .callback(EarlyStopping::new("accuracy", Goal::Largest, 3));
    let report = t.fit(&mut data()).unwrap();
    assert_eq!((report.stopped, report.epoch), (Stopped::Callback, 5));
    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 35 + 5);
    let epochs: Vec<_> = lines.iter().filter(|l| l["kind"] == "epoch").collect();
    assert_eq!((epochs.len(), epochs[1]["accuracy"].as_f64()), (5, Some(0.7)));
    assert!(folder.join("chart/loss.png").metadata().unwrap().len() > 1000);
    // Early stopping continues with its state: it stops after one more epoch without an improvement.
    let mut stop = EarlyStopping::new("accuracy", Goal::Largest, 2);
    let epoch = |accuracy: f64| EpochReport {
        epoch: 0,
        step: 1,
        loss: 1.0,
        samples: 1,
        samples_per_s: 1.0,
        metrics: [("accuracy".to_string(), accuracy)].into(),
    };
    for accuracy in [0.1, 0.7, 0.6] {
        assert!(matches!(stop.on_epoch(&epoch(accuracy)).unwrap(), Flow::Continue));
    }
    let mut resumed = EarlyStopping::new("accuracy", Goal::Largest, 2);
    resumed.restore(&stop.state()).unwrap();
    assert!(matches!(resumed.on_epoch(&epoch(0.65)).unwrap(), Flow::Stop));
    assert!(resumed.restore(&serde_json::json!({ "best": 1 })).is_err());
    // A resumed run removes the lines after its checkpoint.
    let mut again = JsonLog::new(&log);
    again.on_start(7).unwrap();
    again.on_end().unwrap();
    assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 8);
    let e = Trainer::new(&model, train_step(&model), TrainerOptions::default())
        .callback(EarlyStopping::new("f1", Goal::Largest, 1))
        .fit(&mut data());
    assert!(e.unwrap_err().to_string().contains("`f1`"));
}

#[test]
fn steps_end_a_run_and_old_checkpoints_go() {
    let dir = tempfile::tempdir().unwrap();
    let b = Backend::cpu().unwrap();
    let model = net(&b);
    let o =
        TrainerOptions { epochs: 9, steps: Some(12), checkpoint_every: Some(5), ..TrainerOptions::default() };
    let store = Checkpoints::new(dir.path(), CheckpointOptions { keep: 2, ..CheckpointOptions::default() });
    let mut t = Trainer::new(&model, train_step(&model), o).checkpoints(store.clone());
    let report = t.fit(&mut data()).unwrap();
    assert_eq!((report.step, report.epoch, report.stopped), (12, 1, Stopped::Done));
    let names = ["step-000010", "step-000012"].map(|n| dir.path().join(n));
    assert_eq!(store.list().unwrap(), names);
}

/// The error names the op, its module, the line and the element, and the step has no effect.
#[test]
fn an_anomaly_names_the_op_that_made_it() {
    for b in halcyon_test::devices::devices("an_anomaly_names_the_op_that_made_it", Level::O2) {
        let model = net(&b);
        let optimizer = Optimizer::new(&model, Adam::new()).unwrap();
        let line = line!() + 3;
        let step = TrainStep::new(&model, optimizer, |net: &&Net, x: &[Tensor]| {
            let h = net.fc1.forward(&x[0]).relu();
            let h = h.log();
            Ok(vec![net.fc2.forward(&h).sqr().mean(..)])
        })
        .unwrap();
        let o = TrainerOptions { detect_anomaly: true, ..options(1) };
        let before = model.fc1.weight.value().to_vec::<f32>().unwrap();
        let mut t = Trainer::new(&model, step, o);
        let e = t.fit(&mut data()).unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::Argument { .. }), "{text}");
        let place = format!("trainer.rs:{line}");
        assert!(text.contains(&place) && text.contains("fc1"), "{}: {text}", b.id());
        assert_eq!(model.fc1.weight.value().to_vec::<f32>().unwrap(), before, "{}", b.id());
        // Without an anomaly, the check does not change the results.
        let (plain, checked) = (net(&b), net(&b));
        let mut t = Trainer::new(&plain, train_step(&plain), options(1));
        t.fit(&mut data()).unwrap();
        let o = TrainerOptions { detect_anomaly: true, ..options(1) };
        Trainer::new(&checked, train_step(&checked), o).fit(&mut data()).unwrap();
        let weights = |n: &Net| n.fc2.weight.value().to_vec::<f32>().unwrap();
        for (p, c) in weights(&plain).iter().zip(weights(&checked)) {
            assert!((p - c).abs() < 1e-5, "{}: {p} {c}", b.id());
        }
    }
}

#[test]
fn a_batch_with_a_nan_is_named() {
    let b = Backend::cpu().unwrap();
    let model = net(&b);
    let mut x = vec![0.5f32; 24];
    x[7] = f32::NAN;
    let arrays = [
        ("x", ConstData::from_slice(&[8, 3], &x).unwrap()),
        ("y", ConstData::from_slice(&[8], &[0i32; 8]).unwrap()),
    ];
    let mut loader = DataLoader::new(Arrays::new(arrays).unwrap(), LoaderOptions::new(8)).unwrap();
    let o = TrainerOptions { detect_anomaly: true, ..TrainerOptions::default() };
    let e = Trainer::new(&model, train_step(&model), o).fit(&mut loader).unwrap_err().to_string();
    assert!(e.contains("tensor 0 of the batch") && e.contains("[2, 1]"), "{e}");
}

/// A layer whose scores get two masks: one is a buffer, the other is in the batch.
#[derive(Module)]
struct Masked {
    fc: Linear,
    mask: Buffer,
}

#[test]
fn infinities_of_masks_are_no_anomaly() {
    let b = Backend::cpu().unwrap();
    let inf = f32::NEG_INFINITY;
    let mask = Tensor::from_slice(&b, [3], &[0.0, inf, 0.0]).unwrap();
    let model = Masked { fc: Linear::new(&b, 3, 3).unwrap(), mask: Buffer::new(mask) };
    // A loader of one batch. `rows` is the mask of each row: -∞ hides a place, 0 does not.
    let batches = |rows: [[f32; 3]; 2]| {
        let x = ConstData::from_slice(&[2, 3], &[0.5f32, -0.2, 0.1, 0.3, 0.2, 0.4]).unwrap();
        let mask = ConstData::from_slice(&[2, 3], &rows.concat()).unwrap();
        let arrays = Arrays::new([("x", x), ("mask", mask)]).unwrap();
        DataLoader::new(arrays, LoaderOptions::new(2)).unwrap()
    };
    let line = line!() + 4;
    let step = || {
        let f = |m: &&Masked, x: &[Tensor]| {
            let scores = m.fc.forward(&x[0]) + m.mask.value() + &x[1];
            let p = (&scores - scores.max(1).unsqueeze(1)).exp();
            Ok(vec![(&p / p.sum(1).unsqueeze(1)).sqr().sum(..)])
        };
        TrainStep::new(&model, Optimizer::new(&model, Sgd::new()).unwrap(), f).unwrap()
    };
    let o = TrainerOptions { epochs: 2, detect_anomaly: true, ..TrainerOptions::default() };
    let mut good = batches([[0.0, 0.0, inf], [inf, 0.0, 0.0]]);
    Trainer::new(&model, step(), o.clone()).fit(&mut good).unwrap();
    assert_eq!(model.mask.value().to_vec::<f32>().unwrap(), [0.0, inf, 0.0]);
    // Together the two masks hide every place of the second row. The subtraction of the maximum then
    // subtracts two infinities, which gives NaN.
    let mut bad = batches([[0.0, 0.0, inf], [inf, 0.0, inf]]);
    let e = Trainer::new(&model, step(), o).fit(&mut bad).unwrap_err().to_string();
    let place = format!("trainer.rs:{line}");
    assert!(e.contains("sub") && e.contains("NaN at [1, ") && e.contains(&place), "{e}");
    assert!(e.contains("with infinities"), "{e}");
}

/// If an infinity of the batch reaches the loss, the error names this infinity, although no op made it.
#[test]
fn an_infinite_loss_of_an_infinite_batch_names_the_batch() {
    let b = Backend::cpu().unwrap();
    let w = Param::new(Tensor::ones(&b, [2], DType::F32));
    let f = |w: &&Param, x: &[Tensor]| Ok(vec![(w.value() + &x[0]).sum(..)]);
    let step = TrainStep::new(&w, Optimizer::new(&w, Sgd::new()).unwrap(), f).unwrap();
    let x = ConstData::from_slice(&[1, 2], &[1.0f32, f32::INFINITY]).unwrap();
    let mut data = DataLoader::new(Arrays::new([("x", x)]).unwrap(), LoaderOptions::new(1)).unwrap();
    let o = TrainerOptions { detect_anomaly: true, ..TrainerOptions::default() };
    let e = Trainer::new(&w, step, o).fit(&mut data).unwrap_err().to_string();
    assert!(e.contains("tensor 0 of the batch has an infinity at [0, 1]"), "{e}");
}

#[test]
fn metrics_are_those_of_the_definition() {
    let b = Backend::cpu().unwrap();
    let mut rng = halcyon_test::Rng::fresh("metrics_are_those_of_the_definition");
    let (n, classes, k) = (200, 7, 3);
    let scores: Vec<f32> = (0..n * classes).map(|_| (rng.uniform(0.0, 1.0) * 5.0).round() as f32).collect();
    let targets: Vec<i32> = (0..n).map(|_| (rng.uniform(0.0, 1.0) * 8.0) as i32 - 1).collect();
    let mut counts = Classification::new(classes).top_k(k);
    for (s, t) in scores.chunks(50 * classes).zip(targets.chunks(50)) {
        let s = Tensor::from_slice(&b, [50, classes], s).unwrap();
        counts.add(&s, &Tensor::from_slice(&b, [50], t).unwrap()).unwrap();
    }
    let (mut right, mut within, mut total) = (0, 0, 0);
    for (s, t) in scores.chunks(classes).zip(&targets).filter(|(_, t)| **t >= 0) {
        let t = *t as usize;
        total += 1;
        within += usize::from(s.iter().filter(|v| **v > s[t]).count() < k);
        let best = (0..classes).fold(0, |a, c| if s[c] > s[a] { c } else { a });
        right += usize::from(best == t);
    }
    assert_eq!(counts.total(), total);
    assert_eq!(counts.accuracy(), right as f64 / total as f64);
    assert_eq!(counts.top_k_accuracy(), Some(within as f64 / total as f64));
    let rows: u64 = (0..classes).map(|a| counts.confused(2, a)).sum();
    assert_eq!(rows as usize, targets.iter().filter(|t| **t == 2).count());
    let wrong = Tensor::from_slice(&b, [1], &[7i32]).unwrap();
    assert!(counts.add(&Tensor::zeros(&b, [1, classes], DType::F32), &wrong).is_err());
    let mut loss = MeanLoss::default();
    loss.add(1.0, 3);
    loss.add(2.0, 1);
    assert_eq!((loss.mean(), loss.perplexity()), (1.25, 1.25f64.exp()));
}

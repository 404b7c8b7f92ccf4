//! The contract of [`crate::capture`]. Devices that capture nothing pass, if they say so.

use super::DeviceUnderTest;
use super::kernels::*;
use crate::stream::StreamOptions;
use crate::{
    BufferRef, Capture, Command, Counters, Device, Error, MemoryPoolConfig, Options, Program, Recording,
    Result, Tag,
};
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;

/// The fault id of [`Work`]'s second command.
pub const FAULT: u32 = 77;
/// The number of elements of [`Work`]'s buffers.
pub const N: usize = 4;
/// The variables of [`Work`]: `c`, then `a`.
pub const VARIABLES: [(usize, usize); 2] = [(0, 2), (0, 1)];

/// `y = x * a + c` with `a` and `c` as variables, `z = y[index]`, which can fault, and a copy of `z`.
#[derive(Debug)]
pub struct Work {
    pub device: Arc<dyn Device>,
    programs: [Arc<dyn Program>; 2],
    /// x, y, index, z, copy.
    pub buffers: [BufferRef; 5],
}

/// The copy of `z`, for in-range indices.
pub fn want([a, c]: [f64; 2]) -> Vec<f64> {
    [4.0, 3.0, 2.0, 1.0].iter().map(|x| x * a + c).collect()
}

/// The numbers of a buffer of f32.
pub fn f32s(d: &dyn Device, b: &BufferRef) -> Vec<f64> {
    unpack(DType::F32, &download(d, b)).iter().map(|v| v.as_f64()).collect()
}

impl Work {
    pub fn new(d: Arc<dyn Device>) -> Work {
        let programs = [affine(DType::F32), gather()].map(|k| d.compile(&k).unwrap());
        let x = upload(&*d, &pack(DType::F32, &[1.0, 2.0, 3.0, 4.0].map(Scalar::F)));
        let index = upload(&*d, &pack(DType::I32, &[3, 2, 1, 0].map(Scalar::I)));
        let new = || d.alloc(4 * N, Tag::Io).unwrap();
        let buffers = [x, new(), index, new(), new()];
        Work { device: d, programs, buffers }
    }

    /// Calls `f` with the commands for `a` and `c`.
    pub fn with<R>(&self, [a, c]: [f64; 2], f: impl FnOnce(&[Command<'_>]) -> R) -> R {
        let [x, y, index, z, copy] = &self.buffers;
        let (first, second) = ([x.clone(), y.clone()], [y.clone(), index.clone(), z.clone()]);
        let n = Scalar::I(N as i64);
        let (scale, sizes) = ([n, Scalar::F(a), Scalar::F(c)], [n, n, Scalar::U(0)]);
        let launch = |k: usize, buffers, params, fault| Command::Launch {
            program: &self.programs[k],
            groups: [1, 1, 1],
            buffers,
            params,
            fault,
        };
        f(&[
            launch(0, &first, &scale, 0),
            launch(1, &second, &sizes, FAULT),
            Command::Copy { src: z, src_offset: 0, dst: copy, dst_offset: 0, bytes: 4 * N },
        ])
    }

    pub fn submit(&self, values: [f64; 2]) {
        self.with(values, |commands| self.device.submit(commands)).unwrap();
    }

    pub fn refs(&self) -> [&BufferRef; 5] {
        self.buffers.each_ref()
    }

    pub fn capture(&self) -> Result<Arc<dyn Capture>> {
        self.capture_of(&self.refs(), &VARIABLES)
    }

    /// Captures the commands with a list of buffers and of variables.
    pub fn capture_of(
        &self,
        buffers: &[&BufferRef],
        variables: &[(usize, usize)],
    ) -> Result<Arc<dyn Capture>> {
        self.with([0.0; 2], |commands| self.device.capture(&Recording { commands, buffers, variables }))
    }

    /// Launches with values for `a` and `c`.
    pub fn launch(&self, r: &Arc<dyn Capture>, [a, c]: [f64; 2]) -> bool {
        self.device.launch_capture(&**r, &self.refs(), &[c, a].map(Scalar::F)).unwrap()
    }

    pub fn answer(&self) -> Vec<f64> {
        f32s(&*self.device, &self.buffers[4])
    }

    /// Writes the indices.
    pub fn index(&self, index: [i64; N]) {
        self.device.write(&self.buffers[2], 0, &pack(DType::I32, &index.map(Scalar::I))).unwrap();
    }
}

/// The work on a device that captures; `None` if it captures nothing. Then its error says so, and what it is
/// given is submitted.
fn work(l: &DeviceUnderTest, f: impl FnOnce(&mut Options)) -> Option<Work> {
    if !l.computes {
        return None;
    }
    let w = Work::new(l.open_with(f));
    let must = l.driver.kind().built_in().is_some_and(|row| row.captures);
    match w.capture() {
        Ok(_) => {
            assert!(w.device.captures(), "{}: its plans would never be captured", l.name());
            Some(w)
        }
        Err(e @ Error::Unsupported { .. }) => {
            assert!(!must, "{e}");
            println!("{}: {e}", l.name());
            w.submit([2.0, 1.0]);
            assert_eq!(w.answer(), want([2.0, 1.0]));
            None
        }
        Err(e) => panic!("{e}"),
    }
}

pub fn captured_commands_act_like_submitted_ones(l: &DeviceUnderTest) {
    let Some(w) = work(l, |_| ()) else { return };
    let d = &w.device;
    let before = d.counters();
    let r = w.capture().unwrap();
    let ran = |a: &Counters, b: &Counters| (b.launches - a.launches, b.device_copies - a.device_copies);
    assert_eq!((r.commands(), ran(&before, &d.counters())), (3, (0, 0)), "nothing ran");
    for v in [[2.0, 1.0], [-3.0, 0.5], [0.0, 7.0], [0.0, 7.0]] {
        let before = d.counters();
        w.submit(v);
        let (plain, between) = (w.answer(), d.counters());
        assert_eq!(plain, want(v));
        d.write(&w.buffers[4], 0, &[0; 4 * N]).unwrap();
        let start = d.counters();
        // A submission of the same programs with other arguments does not change the capture.
        w.submit([9.0, 9.0]);
        assert!(w.launch(&r, v));
        let after = d.counters();
        assert_eq!(w.answer(), plain);
        assert_eq!((ran(&before, &between), ran(&start, &after)), ((2, 1), (4, 2)));
        assert_eq!(after.capture_launches - start.capture_launches, 1);
    }
    // A launch reads the current content of memory.
    d.write(&w.buffers[0], 0, &pack(DType::F32, &[Scalar::F(10.0); N])).unwrap();
    assert!(w.launch(&r, [2.0, 1.0]));
    assert_eq!(w.answer(), [21.0; N]);
    // A fault is reported once, and the next launch has none.
    w.index([9, 2, 1, 0]);
    assert!(w.launch(&r, [1.0, 0.0]));
    assert_eq!((d.take_fault().unwrap(), d.take_fault().unwrap()), (Some(FAULT), None));
    w.index([3, 2, 1, 0]);
    assert!(w.launch(&r, [1.0, 0.0]));
    assert_eq!(d.take_fault().unwrap(), None);
    // Dropping a capture does not harm its pending launch.
    assert!(w.launch(&r, [0.5, 3.0]));
    drop(r);
    assert_eq!(w.answer(), [8.0; N]);
    // Commands without work.
    let empty = d.alloc(0, Tag::Io).unwrap();
    let none = Command::Copy { src: &empty, src_offset: 0, dst: &w.buffers[4], dst_offset: 0, bytes: 0 };
    let r = d.capture(&Recording { commands: &[none], buffers: &[&empty, &w.buffers[4]], variables: &[] });
    let before = d.counters();
    assert!(d.launch_capture(&*r.unwrap(), &[&empty, &w.buffers[4]], &[]).unwrap());
    assert_eq!((w.answer(), ran(&before, &d.counters())), (vec![8.0; N], (0, 0)));
}

/// Many launches are pending in the device's queue and in streams, each with its own values.
pub fn captures_are_launched_in_every_queue(l: &DeviceUnderTest) {
    let Some(w) = work(l, |_| ()) else { return };
    let d = &w.device;
    let r = w.capture().unwrap();
    let kept: Vec<BufferRef> = (0..60).map(|_| d.alloc(4 * N, Tag::Io).unwrap()).collect();
    for round in 0..3 {
        // The streams of the last round are gone, and their command buffers with them.
        let streams = [0, 1].map(|_| d.create_stream(&StreamOptions::default()).unwrap());
        for (i, to) in kept.iter().enumerate() {
            let v = [i as f64 / 2.0, (i / 2) as f64];
            let src = &w.buffers[4];
            let keep = [Command::Copy { src, src_offset: 0, dst: to, dst_offset: 0, bytes: 4 * N }];
            match (round, i % 3) {
                (1.., k @ 1..) => {
                    let t = &streams[k - 1];
                    assert!(t.launch_capture(&*r, &w.refs(), &[v[1], v[0]].map(Scalar::F)).unwrap());
                    t.submit(&keep).unwrap();
                }
                _ => {
                    assert!(w.launch(&r, v));
                    d.submit(&keep).unwrap();
                }
            }
        }
        for (i, b) in kept.iter().enumerate() {
            assert_eq!(f32s(&**d, b), want([i as f64 / 2.0, (i / 2) as f64]), "{}: {round}, {i}", l.name());
        }
        assert!(d.take_fault().unwrap().is_none());
        // Only the queue of the launch reports its fault.
        w.index([9, 2, 1, 0]);
        assert!(streams[0].launch_capture(&*r, &w.refs(), &[0.0, 1.0].map(Scalar::F)).unwrap());
        let (mine, others) = (streams[0].record().unwrap(), streams[1].record().unwrap());
        assert_eq!((mine.wait().unwrap(), others.wait().unwrap()), (Some(FAULT), None), "{}", l.name());
        assert_eq!(d.take_fault().unwrap(), None, "{}", l.name());
        w.index([3, 2, 1, 0]);
    }
    // A stream that is timed.
    let timed = d.create_stream(&StreamOptions { profile: true, ..StreamOptions::default() }).unwrap();
    assert!(timed.launch_capture(&*r, &w.refs(), &[1.0, 2.0].map(Scalar::F)).unwrap());
    let event = timed.record().unwrap();
    assert_eq!((event.wait().unwrap(), w.answer()), (None, want([2.0, 1.0])));
    assert!(event.elapsed().is_some_and(|t| t.end >= t.begin), "{}: {:?}", l.name(), event.elapsed());
}

pub fn a_capture_refuses_what_it_was_not_made_for(l: &DeviceUnderTest) {
    let Some(w) = work(l, |_| ()) else { return };
    let (d, r, values) = (&w.device, w.capture().unwrap(), [Scalar::F(1.0); 2]);
    let argument = |e: Error, what: &str| {
        assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains(what), "{}: {e}", l.name());
    };
    argument(d.launch_capture(&*r, &w.refs()[..4], &values).unwrap_err(), "4 buffers given, 5 captured");
    argument(d.launch_capture(&*r, &w.refs(), &values[..1]).unwrap_err(), "1 values given, 2 captured");
    let other = Work::new(l.open());
    let foreign = other.device.launch_capture(&*r, &other.refs(), &values).unwrap_err();
    argument(foreign, "was not captured by this opening");
    argument(d.launch_capture(&*r, &other.refs(), &values).unwrap_err(), "does not belong");
    argument(w.capture_of(&w.refs()[..4], &[]).unwrap_err(), "not among those of the recording");
    argument(w.capture_of(&w.refs(), &[(2, 0)]).unwrap_err(), "no parameters");
    argument(w.capture_of(&w.refs(), &[(3, 0)]).unwrap_err(), "no command 3");
    // The fault id belongs to the command; a parameter can be a variable only once.
    argument(w.capture_of(&w.refs(), &[(1, 2)]).unwrap_err(), "cannot vary");
    argument(w.capture_of(&w.refs(), &[(0, 1), (0, 1)]).unwrap_err(), "cannot vary");
    // A different buffer is detected.
    let new = d.alloc(4 * N, Tag::Io).unwrap();
    let mut all = w.refs();
    all[4] = &new;
    assert!(!d.launch_capture(&*r, &all, &values).unwrap(), "{}", l.name());
    assert!(w.launch(&r, [3.0, 1.0]));
    assert_eq!(w.answer(), want([3.0, 1.0]), "{}", l.name());
    // So is a smaller buffer in the memory of a captured one.
    let mut w = w;
    let place = w.buffers[4].place();
    w.buffers[4] = w.device.alloc(0, Tag::Io).unwrap();
    w.buffers[4] = w.device.alloc(4, Tag::Io).unwrap();
    assert_eq!(w.buffers[4].place(), place, "the pool reuses the memory");
    assert!(!w.launch(&r, [2.0, 1.0]), "{}", l.name());
    // A launch of a capture is timed as a whole, so a profiled device captures nothing.
    let e = Work::new(l.open_with(|o| o.profile = true)).capture().unwrap_err();
    let timed = matches!(e, Error::Unsupported { .. }) && e.to_string().contains("profiling is on");
    assert!(timed, "{}: {e}", l.name());
}

/// Moved buffers are detected, and a new capture works. A capture does not keep memory that the pool returns
/// to the driver.
pub fn a_capture_follows_its_memory(l: &DeviceUnderTest) {
    let pool: MemoryPoolConfig = "best-fit:1MiB,defragment".parse().unwrap();
    let Some(mut w) = work(l, |o| o.memory_pool = Some(pool)) else { return };
    let d = w.device.clone();
    let hole = d.alloc(64 << 10, Tag::Io).unwrap();
    w.buffers = w.refs().map(|b| upload(&*d, &download(&*d, b)));
    drop(hole);
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [2.0, 1.0]));
    assert_eq!(w.answer(), want([2.0, 1.0]));
    let generation = d.memory().generation;
    d.defragment().unwrap();
    assert_eq!(d.memory().generation, generation + 1);
    assert!(!w.launch(&r, [3.0, 1.0]), "{}", l.name());
    assert_eq!(w.answer(), want([2.0, 1.0]), "nothing ran");
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [3.0, 1.0]));
    assert_eq!(w.answer(), want([3.0, 1.0]));
    // The capture outlives its buffers, whose memory goes back to the driver while a launch may be pending.
    let w = Work::new(l.open());
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [1.5, 1.0]));
    let Work { device: d, programs, buffers } = w;
    let copy = d.alloc(4 * N, Tag::Io).unwrap();
    d.submit(&[Command::Copy { src: &buffers[4], src_offset: 0, dst: &copy, dst_offset: 0, bytes: 4 * N }])
        .unwrap();
    let places = buffers.each_ref().map(|b| b.place());
    drop(buffers);
    d.empty_cache();
    assert_eq!(f32s(&*d, &copy), want([1.5, 1.0]), "{}", l.name());
    let w = Work { programs, ..Work::new(d) };
    // New memory may be at the old addresses. Then the capture runs on it, as it would on any device with
    // addresses; if it is elsewhere, it does not run.
    let same = w.refs().map(|b| b.place()) == places;
    assert_eq!(w.launch(&r, [4.0, 1.0]), same, "{}", l.name());
    if same {
        assert_eq!(w.answer(), want([4.0, 1.0]), "{}", l.name());
    }
    let r = w.capture().unwrap();
    assert!(w.launch(&r, [5.0, 1.0]));
    assert_eq!(w.answer(), want([5.0, 1.0]), "{}", l.name());
}

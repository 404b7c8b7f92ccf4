//! Memory pools of every strategy: buffers that share an allocation and are moved.

use super::kernels::*;
use super::{DeviceUnderTest, HANGS};
use crate::{BackendType, BufferRef, Command, Device, Error, Tag};
use halcyon_ir::kernel::Launch;
use halcyon_ir::{DType, Scalar};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const ARENAS: [&str; 3] = ["best-fit", "first-fit", "buddy"];

fn open(l: &DeviceUnderTest, pool: &str) -> Arc<dyn Device> {
    l.open_with(|o| o.memory_pool = Some(pool.parse().unwrap()))
}

fn fill(d: &dyn Device, r: &mut Random, bytes: usize) -> (BufferRef, Vec<u8>) {
    let data = r.bytes(bytes);
    (upload(d, &data), data)
}

/// Allocates buffers of `each` bytes until the pool is full.
fn fill_up(d: &dyn Device, r: &mut Random, each: usize) -> Vec<(BufferRef, Vec<u8>)> {
    let mut all = vec![];
    loop {
        match d.alloc(each, Tag::State) {
            Ok(b) => {
                let data = r.bytes(each);
                d.write(&b, 0, &data).unwrap();
                all.push((b, data));
            }
            Err(e) => {
                assert_eq!(e.exit_code(), 5, "{e}");
                return all;
            }
        }
    }
}

pub fn buffers_of_one_chunk_keep_to_themselves(l: &DeviceUnderTest) {
    let mut moved = 0;
    for strategy in ARENAS {
        let d = open(l, &format!("{strategy}:64KiB..2MiB,defragment"));
        assert_eq!(d.memory().reserved, 64 << 10);
        let p = d.compile(&affine(DType::U8)).unwrap();
        let mut r = Random::fresh();
        let mut live: Vec<(BufferRef, Vec<u8>)> = vec![];
        for step in 0..150 {
            match r.below(8) {
                // Even after rounding up, the live buffers fill less than half of the limit. Running out of
                // memory is not tested here.
                0..3 if live.len() < 14 => {
                    let n = 1 + r.below(50_000) as usize;
                    let before = d.memory().allocated;
                    live.push(fill(&*d, &mut r, n));
                    let took = d.memory().allocated - before;
                    assert_eq!(took, d.footprint(n, Tag::Io) as u64, "{strategy} {n}");
                }
                3 if !live.is_empty() => {
                    let gone = r.below(live.len() as u64) as usize;
                    live.swap_remove(gone);
                }
                4 | 5 if live.len() > 1 => {
                    // A copy between two buffers, at any offsets.
                    let (a, b) = (r.below(live.len() as u64) as usize, r.below(live.len() as u64) as usize);
                    if a == b {
                        continue;
                    }
                    let (from, to) = (live[a].clone(), live[b].0.clone());
                    let most = from.1.len().min(to.bytes()) as u64;
                    let n = 1 + r.below(most) as usize;
                    let src_offset = r.below((from.1.len() - n + 1) as u64) as usize;
                    let dst_offset = r.below((to.bytes() - n + 1) as u64) as usize;
                    let (src, dst) = (&from.0, &to);
                    d.submit(&[Command::Copy { src, src_offset, dst, dst_offset, bytes: n }]).unwrap();
                    live[b].1[dst_offset..dst_offset + n]
                        .copy_from_slice(&from.1[src_offset..src_offset + n]);
                }
                6 if live.len() > 1 => {
                    // A launch that reads one buffer and writes another.
                    let (a, b) = (r.below(live.len() as u64) as usize, r.below(live.len() as u64) as usize);
                    if a == b {
                        continue;
                    }
                    let n = live[a].1.len().min(live[b].1.len());
                    let groups = Launch::fold(n.div_ceil(32) as u64, 65_535);
                    let params = [Scalar::I(n as i64), Scalar::I(1), Scalar::I(3)];
                    launch(&*d, &p, groups, &[&live[a].0, &live[b].0], &params).unwrap();
                    let want: Vec<u8> = live[a].1[..n].iter().map(|v| v.wrapping_add(3)).collect();
                    match l.computes {
                        true => live[b].1[..n].copy_from_slice(&want),
                        false => live[b].1.fill(crate::noop::POISON),
                    }
                }
                7 if step % 3 == 0 => {
                    d.defragment().unwrap();
                }
                _ => {}
            }
        }
        // Free every second buffer, so that there are holes.
        let mut i = 0;
        live.retain(|_| {
            i += 1;
            i % 2 == 0
        });
        d.defragment().unwrap();
        for (b, want) in &live {
            assert_eq!(&download(&*d, b), want, "{strategy}");
        }
        let m = d.memory();
        assert!(m.peak_reserved <= 2 << 20 && m.reserved == m.allocated + m.cached, "{m:?}");
        assert_eq!(m.moved_bytes > 0, m.generation > 0, "{m:?}");
        moved += m.moved_bytes;
        drop(live);
        assert_eq!((d.memory().allocated, d.memory().frees), (0, m.allocations));
        d.empty_cache();
        assert_eq!(d.memory().reserved, 0, "{strategy}");
    }
    // Some pools may have no holes by chance, but not all of them.
    assert!(moved > 0);
}

pub fn a_scattered_pool_holds_a_large_buffer_after_it_moved(l: &DeviceUnderTest) {
    for strategy in ARENAS {
        let mut r = Random::fresh();
        // Free every second buffer: half of the memory is free, in small ranges.
        let mut scattered = |pool: &str| {
            let d = open(l, pool);
            let all = fill_up(&*d, &mut r, 30_000);
            assert!(all.len() > 20, "{}", all.len());
            (d, all.into_iter().step_by(2).collect::<Vec<_>>())
        };
        let (d, live) = scattered(&format!("{strategy}:1MiB"));
        let m = d.memory();
        assert!(m.fragmentation() > 0.9 && m.largest_free < 70_000, "{m:?}");
        let e = d.alloc(300_000, Tag::Kv).unwrap_err();
        assert!(e.exit_code() == 5 && e.to_string().contains("scattered"), "{e}");
        // An explicit defragmentation has the same effect as one that an allocation triggers.
        let did = d.defragment().unwrap();
        assert!(did.moved_buffers > 0 && did.moved_bytes >= did.moved_buffers * 30_000, "{did:?}");
        assert!(did.largest_free_before < 70_000 && did.largest_free_after >= 300_000, "{did:?}");
        assert_eq!(d.memory().largest_free, did.largest_free_after);
        d.alloc(300_000, Tag::Kv).unwrap();
        for (b, want) in &live {
            assert_eq!(&download(&*d, b), want, "{strategy}");
        }
        let (d, live) = scattered(&format!("{strategy}:1MiB,defragment"));
        let (big, data) = (d.alloc(300_000, Tag::Kv).unwrap(), vec![7; 300_000]);
        d.write(&big, 0, &data).unwrap();
        assert!(d.memory().defragmentations > 0 && d.memory().peak_reserved <= 1 << 20);
        for (b, want) in live.iter().chain([&(big, data)]) {
            assert_eq!(&download(&*d, b), want, "{strategy}");
        }
    }
    // In the exclusive strategy no buffer is moved; kept memory is released.
    let d = l.open();
    drop(d.alloc(50_000, Tag::Io).unwrap());
    let did = d.defragment().unwrap();
    assert_eq!((did.moved_buffers, did.largest_free_after), (0, 0));
    assert!(did.released_bytes >= 50_000);
}

pub fn parts_go_with_their_whole(l: &DeviceUnderTest) {
    let d = open(l, "best-fit:1MiB");
    let Some(align) = d.part_alignment() else { return };
    let mut r = Random::fresh();
    let hole = d.alloc(100_000, Tag::Io).unwrap();
    let (whole, data) = fill(&*d, &mut r, 50_000);
    let part = d.part(&whole, align, 1000).unwrap();
    let inner = d.part(&part, align, 100).unwrap();
    drop((hole, whole));
    assert_eq!(d.defragment().unwrap().moved_buffers, 1);
    assert_eq!(download(&*d, &part), data[align..align + 1000]);
    assert_eq!(download(&*d, &inner), data[2 * align..2 * align + 100]);
    d.write(&inner, 0, &[1, 2]).unwrap();
    assert_eq!(download(&*d, &part)[align..align + 2], [1, 2]);
}

pub fn work_goes_on_while_another_thread_moves_buffers(l: &DeviceUnderTest) {
    let d = open(l, "first-fit:1MiB");
    let p = d.compile(&affine(DType::I32)).unwrap();
    let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                moved.fetch_add(d.defragment().unwrap().moved_buffers, Ordering::AcqRel);
                std::thread::yield_now();
            }
        });
        // This is dropped even if the work panics, so that the thread ends.
        let _stop = Stop(&stop);
        let mut r = Random::fresh();
        let mut live: VecDeque<(BufferRef, usize)> = VecDeque::new();
        let start = Instant::now();
        while moved.load(Ordering::Acquire) < 20 || live.len() > 2 {
            assert!(start.elapsed() < HANGS, "nothing is moved");
            if moved.load(Ordering::Acquire) < 20 {
                let n = 1 + r.below(3000) as usize;
                let (a, b) = (upload(&*d, &vec![1; n * 4]), upload(&*d, &vec![9; n * 4]));
                let params = [Scalar::I(n as i64), Scalar::I(2), Scalar::I(5)];
                for (x, y) in [(&a, &b), (&b, &a)] {
                    launch(&*d, &p, Launch::fold(n.div_ceil(32) as u64, 65_535), &[x, y], &params).unwrap();
                }
                live.push_back((a, n));
            }
            if live.len() > 8 || moved.load(Ordering::Acquire) >= 20 {
                // The oldest buffer usually lies below others, so dropping it leaves a hole.
                let Some((a, n)) = live.pop_front() else { break };
                let want = match l.computes {
                    true => Scalar::I((0x0101_0101 * 2 + 5) * 2 + 5),
                    false => Scalar::I(-1),
                };
                assert_eq!(unpack(DType::I32, &download(&*d, &a)), vec![want; n]);
            }
        }
    });
}

/// Makes the other thread end when dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

pub fn settings_that_contradict_each_other_open_nothing(l: &DeviceUnderTest) {
    let config = crate::MemoryPoolConfig {
        initial_size: 1 << 20,
        ..crate::MemoryPoolConfig::new(crate::AllocationStrategy::Exclusive)
    };
    let o = crate::Options { memory_pool: Some(config), ..l.options.clone() };
    assert_eq!(l.driver.open(0, &o).unwrap_err().exit_code(), 2);
    // The smaller of the two limits applies.
    let d = l.open_with(|o| {
        o.memory_pool = Some("buddy:1MiB".parse().unwrap());
        o.memory_limit = Some(256 << 10);
    });
    assert_eq!(d.memory().limit, Some(256 << 10));
    assert!(d.alloc(300 << 10, Tag::Io).is_err() && d.alloc(256 << 10, Tag::Io).is_ok());
    assert_eq!(d.memory().peak_reserved, 256 << 10);
}

pub fn host_buffers_are_counted_and_copied_from_and_to(l: &DeviceUnderTest) {
    let d = l.open_with(|o| o.host_limit = Some(1 << 20));
    let mut h = match d.alloc_host(100_001) {
        Ok(h) => h,
        Err(e) => {
            // These drivers must have host buffers; all others may lack them.
            let must = [BackendType::Cpu, BackendType::Cuda, BackendType::Rocm, BackendType::OpenCl];
            assert!(matches!(e, Error::Unsupported { .. }) && !must.contains(&l.driver.kind()), "{e}");
            return;
        }
    };
    assert!(h.len() == 100_001 && h.iter().all(|b| *b == 0), "zeroed");
    assert_eq!((d.memory().pinned, d.memory().allocated), (100_001, 0));
    let data = Random::fresh().bytes(100_001);
    h.copy_from_slice(&data);
    let b = d.alloc(100_001, Tag::Io).unwrap();
    d.write(&b, 0, &h).unwrap();
    h.fill(0);
    d.read(&b, 0, &mut h).unwrap();
    assert_eq!(&h[..], data);
    let e = d.alloc_host(1 << 20).unwrap_err();
    let Error::OutOfMemory { requested, free, total, .. } = e else { panic!("{e}") };
    assert_eq!((requested, free, total), (1 << 20, (1 << 20) - 100_001, 1 << 20));
    assert_eq!(d.alloc_host(0).unwrap().len(), 0);
    // Of the built-in devices, the CPU device always imports host memory as a buffer. OpenCL devices import
    // whole lines only.
    let shared = d.import(Arc::new(h));
    let own = !matches!(l.driver.kind(), BackendType::Other(_));
    assert!(!own || shared.is_some() == (l.driver.kind() == BackendType::Cpu));
    if let Some(s) = shared {
        assert_eq!((download(&*d, &s), d.memory().pinned), (data, 100_001));
    }
    assert_eq!(d.memory().pinned, 0, "given back");
}

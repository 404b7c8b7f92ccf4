//! The cases, each named by the property that must hold.

use super::kernels::*;
use super::{DeviceUnderTest, HANGS};
use crate::{BufferRef, Command, Device, Error, LibraryCall, Operand, Tag};
use halcyon_ir::kernel::{Builder, Launch, Stmt};
use halcyon_ir::layout::View;
use halcyon_ir::ops::Op;
use halcyon_ir::target::Work;
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;
use std::time::Instant;

pub fn info_and_caps_are_sane(l: &DeviceUnderTest) {
    let infos = l.driver.probe().unwrap();
    let d = l.open();
    let (i, c) = (d.info(), d.caps());
    assert_eq!(infos[0].id, i.id);
    assert_eq!((i.backend, i.index, i.id.as_str()), (l.driver.kind(), 0, format!("{}:0", l.name()).as_str()));
    assert!(!i.name.trim().is_empty());
    assert!(i.total_memory.is_none_or(|b| b >= 16 << 20), "{i:?}");
    assert!(i.free_memory.is_none_or(|f| Some(f) <= i.total_memory), "{i:?}");
    assert!(i.compute_units.is_none_or(|n| n > 0));
    assert!(c.units() > 0 && c.compute_units.is_none_or(|n| n > 0));
    // Devices that share host memory must report how much memory is free.
    if l.computes && (i.software || i.unified_memory) && halcyon_host::memory().is_some() {
        assert!(
            i.free_memory.is_some() && d.free_memory().is_some() && infos[0].free_memory.is_some(),
            "{i:?}"
        );
    }
    let known = d.free_memory().zip(i.total_memory);
    assert!(known.is_none_or(|(free, total)| free <= total), "{known:?}");
    let mut exact = halcyon_ir::target::Caps::storage_of(c.f64, c.i64);
    exact.retain(|t| !c.storage.contains(t));
    assert!(
        exact.is_empty() || !l.computes,
        "the device's abilities include {exact:?}, but its storage types do not"
    );
    for t in [DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8, DType::I32, DType::U32, DType::Bool]
    {
        assert!(c.storage.contains(&t), "{t}");
    }
    assert_eq!(c.storage.contains(&DType::F64), c.f64);
    assert_eq!(c.storage.contains(&DType::I64), c.i64);
    assert!(c.max_workgroup >= 64 && c.workgroup_memory >= 1 << 14 && c.max_bindings >= 8, "{c:?}");
    assert!(c.max_binding_bytes >= 16 << 20 && c.max_groups >= 65_535 && c.offset_alignment >= 1);
    if !l.computes {
        assert!(i.name.contains("computes nothing") && i.software);
    }
    assert!(
        l.driver.open(10_000, &l.options).is_err_and(|e| e.exit_code() == 4),
        "opening device 10000 must fail"
    );
    // The device's info survives serialisation.
    let text = serde_json::to_string(i).unwrap();
    assert_eq!(&serde_json::from_str::<crate::DeviceInfo>(&text).unwrap(), i);
}

pub fn bytes_come_back_at_every_offset(l: &DeviceUnderTest) {
    let d = l.open();
    let mut r = Random::fresh();
    let b = d.alloc(10_007, Tag::Io).unwrap();
    assert_eq!(b.bytes(), 10_007);
    let mut want = r.bytes(10_007);
    d.write(&b, 0, &want).unwrap();
    for _ in 0..50 {
        let at = r.below(10_007) as usize;
        let n = r.below((10_007 - at) as u64 + 1) as usize;
        let part = r.bytes(n);
        d.write(&b, at, &part).unwrap();
        want[at..at + n].copy_from_slice(&part);
        let from = r.below(10_007) as usize;
        let mut got = vec![0; r.below((10_007 - from) as u64 + 1) as usize];
        d.read(&b, from, &mut got).unwrap();
        assert_eq!(got, want[from..from + got.len()]);
    }
    assert_eq!(download(&*d, &b), want);
}

pub fn empty_buffers_are_buffers(l: &DeviceUnderTest) {
    let d = l.open();
    let (a, b) = (d.alloc(0, Tag::State).unwrap(), d.alloc(0, Tag::State).unwrap());
    assert_eq!(a.bytes(), 0);
    d.write(&a, 0, &[]).unwrap();
    d.read(&a, 0, &mut []).unwrap();
    d.submit(&[Command::Copy { src: &a, src_offset: 0, dst: &b, dst_offset: 0, bytes: 0 }]).unwrap();
    assert!(d.write(&a, 0, &[1]).is_err());
    assert!(d.read(&a, 1, &mut []).is_err());
    d.submit(&[]).unwrap();
    // A launch may bind an empty buffer if it does not access it.
    let p = d.compile(&affine(DType::F32)).unwrap();
    let params = [Scalar::I(0), Scalar::F(1.0), Scalar::F(1.0)];
    launch(&*d, &p, [1, 1, 1], &[&a, &b], &params).unwrap();
    launch(&*d, &p, [0, 1, 1], &[&a, &b], &params).unwrap();
    d.synchronize().unwrap();
}

pub fn ranges_outside_a_buffer_are_errors(l: &DeviceUnderTest) {
    let d = l.open();
    let (a, b) = (upload(&*d, &[1; 100]), upload(&*d, &[2; 50]));
    let mut out = [0; 51];
    assert!(d.read(&b, 0, &mut out).is_err());
    assert!(d.read(&a, usize::MAX, &mut out).is_err());
    assert!(d.write(&b, 50, &[0]).is_err());
    assert!(d.write(&b, usize::MAX, &[0; 2]).is_err());
    for (so, to, n) in
        [(0, 0, 51), (60, 0, 41), (0, 1, 50), (usize::MAX, 0, 1), (0, usize::MAX, 2), (1, 1, usize::MAX)]
    {
        let c = Command::Copy { src: &a, src_offset: so, dst: &b, dst_offset: to, bytes: n };
        assert!(d.submit(&[c]).is_err(), "{so} {to} {n}");
    }
    assert_eq!(download(&*d, &a), [1; 100]);
    assert_eq!(download(&*d, &b), [2; 50]);
}

pub fn copies_move_the_range_and_nothing_else(l: &DeviceUnderTest) {
    let d = l.open();
    let mut r = Random::fresh();
    let (x, y) = (r.bytes(4096), r.bytes(3000));
    let (a, b) = (upload(&*d, &x), upload(&*d, &y));
    d.submit(&[
        Command::Copy { src: &a, src_offset: 13, dst: &b, dst_offset: 7, bytes: 2001 },
        Command::Copy { src: &b, src_offset: 0, dst: &b, dst_offset: 2500, bytes: 500 },
    ])
    .unwrap();
    let mut want = y.clone();
    want[7..2008].copy_from_slice(&x[13..2014]);
    want.copy_within(0..500, 2500);
    assert_eq!(download(&*d, &b), want);
    assert_eq!(download(&*d, &a), x);
    assert_eq!(d.counters().device_copies, 2);
    // Overlapping ranges of one buffer are rejected, because drivers would differ in their results.
    let c = Command::Copy { src: &a, src_offset: 0, dst: &a, dst_offset: 99, bytes: 100 };
    assert!(d.submit(&[c]).is_err());
    let c = Command::Copy { src: &a, src_offset: 0, dst: &a, dst_offset: 100, bytes: 100 };
    d.submit(&[c]).unwrap();
}

pub fn a_part_of_a_buffer_is_a_buffer_over_its_bytes(l: &DeviceUnderTest) {
    let d = l.open();
    let whole = upload(&*d, &(0..=255).collect::<Vec<u8>>());
    let Some(align) = d.part_alignment() else {
        assert_eq!(d.part(&whole, 0, 1).unwrap_err().exit_code(), 3);
        return;
    };
    assert!(align <= 128, "the buffer of this test is too small for alignment {align}");
    let allocated = d.memory().allocated;
    let part = d.part(&whole, align, 100).unwrap();
    assert_eq!((part.bytes(), d.memory().allocated), (100, allocated));
    assert_eq!(download(&*d, &part)[..3], [align as u8, align as u8 + 1, align as u8 + 2]);
    d.write(&part, 1, &[7, 8]).unwrap();
    let mut got = [0; 4];
    d.read(&whole, align, &mut got).unwrap();
    assert_eq!(got, [align as u8, 7, 8, align as u8 + 3]);
    assert!(
        d.write(&part, 99, &[0; 2]).is_err(),
        "a write past the end of the part, inside of the whole buffer"
    );
    assert!(d.part(&whole, align, 256).is_err() && d.part(&whole, usize::MAX, 2).is_err());
    assert_eq!(d.part(&whole, 256, 0).unwrap().bytes(), 0);
    assert!(
        align == 1 || d.part(&whole, 1, 1).is_err_and(|e| e.exit_code() == 2),
        "an unaligned offset must be an error"
    );
    // The part keeps the whole buffer alive.
    drop(whole);
    assert_eq!(d.memory().allocated, allocated);
    assert_eq!(download(&*d, &part)[1..3], [7, 8]);
    drop(part);
    assert!(d.memory().allocated < allocated);
}

pub fn a_request_takes_what_its_footprint_says(l: &DeviceUnderTest) {
    let d = l.open();
    for (bytes, tag) in [
        (0, Tag::Io),
        (1000, Tag::Activations),
        (3_211_265, Tag::Activations),
        (3_211_265, Tag::Io),
        ((1 << 20) + 1, Tag::Weights),
        ((5 << 20) + 4097, Tag::Workspace),
    ] {
        let before = d.memory().allocated;
        let b = d.alloc(bytes, tag).unwrap();
        assert_eq!(d.memory().allocated - before, d.footprint(bytes, tag) as u64, "{bytes} {tag:?}");
        drop(b);
        d.empty_cache();
    }
}

/// Devices without such memory pass.
pub fn zeroed_memory_is_zero_and_keeps_what_is_written(l: &DeviceUnderTest) {
    let d = l.open();
    let mut r = Random::fresh();
    for bytes in [0, 1000, (1 << 20) - 1, 1 << 20, (9 << 20) + 77] {
        // The second buffer of a size may get the memory of the first one, which is not zero.
        for _ in 0..2 {
            let before = d.memory().allocated;
            let Some(b) = d.alloc_zeroed(bytes, Tag::State).unwrap() else { continue };
            assert_eq!(d.memory().allocated - before, d.footprint(bytes, Tag::State) as u64);
            let at = bytes / 3;
            let part = r.bytes(bytes / 5);
            let supply = d.supply(std::slice::from_ref(&b));
            d.write(&b, at, &part).unwrap();
            drop(supply);
            let mut want = vec![0; bytes];
            want[at..at + part.len()].copy_from_slice(&part);
            assert!(download(&*d, &b)[..bytes] == want, "{bytes} bytes");
            d.write(&b, 0, &r.bytes(bytes)).unwrap();
        }
    }
}

pub fn freed_memory_is_used_again_and_given_back_on_request(l: &DeviceUnderTest) {
    let d = l.open();
    let before = d.memory().allocated;
    let first = d.counters().allocations;
    drop(d.alloc(100_000, Tag::Weights).unwrap());
    assert_eq!(d.counters().allocations, first + 1);
    let again = d.alloc(100_000, Tag::Activations).unwrap();
    assert_eq!(d.counters().allocations, first + 1, "the pool must reuse the freed buffer");
    let m = d.memory();
    assert!(m.allocated >= before + 100_000 && m.peak >= m.allocated);
    assert!(m.by_tag[&Tag::Activations] >= 100_000 && m.by_tag[&Tag::Weights] == 0);
    drop(again);
    assert_eq!(d.memory().allocated, before);
    assert!(d.memory().cached >= 100_000);
    assert!(d.empty_cache() >= 100_000);
    assert_eq!(d.memory().cached, 0);
    let _b = d.alloc(100_000, Tag::Io).unwrap();
    assert_eq!(d.counters().allocations, first + 2, "there is no cached buffer to reuse");
}

pub fn over_the_limit_is_out_of_memory(l: &DeviceUnderTest) {
    let d = l.open_with(|o| o.memory_limit = Some(1 << 20));
    assert_eq!(d.memory().limit, Some(1 << 20));
    let keep = d.alloc(600_000, Tag::Io).unwrap();
    let e = d.alloc(600_000, Tag::Weights).unwrap_err();
    assert_eq!(e.exit_code(), 5, "{e}");
    let Error::OutOfMemory { requested, total, free, .. } = e else { panic!() };
    assert!(requested == 600_000 && total == 1 << 20 && free < 600_000);
    drop(keep);
    d.alloc(600_000, Tag::Weights).unwrap();
    // Without a limit, request more than any machine has.
    let e = l.open().alloc(1 << 60, Tag::Io).unwrap_err();
    assert_eq!(e.exit_code(), 5, "{e}");
}

pub fn a_kernel_computes_in_every_type(l: &DeviceUnderTest) {
    let d = l.open();
    let mut r = Random::fresh();
    for dtype in d.caps().storage.clone().into_iter().filter(|t| *t != DType::Bool) {
        let n = 1 + r.below(200) as usize;
        // Small integers are exact in every type.
        let x: Vec<Scalar> = (0..n).map(|_| Scalar::I(r.below(20) as i64)).collect();
        let (a, c) = (1 + r.below(4) as i64, r.below(10) as i64);
        let p = d.compile(&affine(dtype)).unwrap();
        let src = upload(&*d, &pack(dtype, &x));
        let marker = 77u8;
        let dst = upload(&*d, &vec![marker; (n + 3) * dtype.size()]);
        let groups = Launch::fold(n.div_ceil(32) as u64, 2);
        launch(&*d, &p, groups, &[&src, &dst], &[Scalar::I(n as i64), Scalar::I(a), Scalar::I(c)]).unwrap();
        let got = download(&*d, &dst);
        if l.computes {
            let want: Vec<Scalar> = x.iter().map(|v| Scalar::I(v.as_i64() * a + c)).collect();
            assert_eq!(got[..n * dtype.size()], pack(dtype, &want), "{dtype} {a} {c}");
            assert!(
                got[n * dtype.size()..].iter().all(|b| *b == marker),
                "{dtype}: bytes past the end of the result must not change"
            );
        } else {
            assert!(got.iter().all(|b| *b == crate::noop::POISON), "{dtype}: the result must be poison");
            assert_eq!(download(&*d, &src), pack(dtype, &x), "inputs must not change");
        }
    }
}

pub fn parameters_of_every_type_arrive(l: &DeviceUnderTest) {
    let d = l.open();
    let (k, types) = params_of_every_type(d.caps().f64);
    let p = d.compile(&k).unwrap();
    let values: Vec<Scalar> = [
        Scalar::I(i32::MIN as i64),
        Scalar::I(i64::MIN + 1),
        Scalar::U(u64::MAX - 2),
        Scalar::U(u32::MAX as u64 - 3),
        Scalar::F(-1.5),
        Scalar::I(0x0123_4567_89AB_CDEF),
        Scalar::F(f32::MIN_POSITIVE as f64),
        Scalar::F(std::f64::consts::PI),
        Scalar::I(-1),
        Scalar::F(-1e300),
    ][..types.len()]
        .to_vec();
    let out: Vec<BufferRef> = types.iter().map(|t| upload(&*d, &vec![9; t.dtype().size()])).collect();
    launch(&*d, &p, [1, 1, 1], &out.iter().collect::<Vec<_>>(), &values).unwrap();
    for ((b, t), v) in out.iter().zip(&types).zip(&values) {
        let got = download(&*d, b);
        if l.computes {
            assert_eq!(got, pack(t.dtype(), &[*v]), "{} {v:?}", t.name());
        } else {
            assert!(got.iter().all(|b| *b == crate::noop::POISON));
        }
    }
    let few = launch(&*d, &p, [1, 1, 1], &out.iter().collect::<Vec<_>>(), &values[1..]);
    assert!(few.is_err(), "a missing parameter must be an error");
    let few = launch(&*d, &p, [1, 1, 1], &out[1..].iter().collect::<Vec<_>>(), &values);
    assert!(few.is_err(), "a missing buffer must be an error");
}

pub fn grids_have_three_dimensions_and_every_item_runs_once(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&grid()).unwrap();
    for groups in [[1, 1, 1], [3, 5, 2], [7, 1, 3], [1, 4, 1]] {
        let n = (groups.iter().product::<u32>() * 16) as usize;
        let (count, place) = (upload(&*d, &vec![0; n * 4]), upload(&*d, &vec![0; n * 4]));
        launch(&*d, &p, groups, &[&count, &place], &[]).unwrap();
        if l.computes {
            assert_eq!(unpack(DType::I32, &download(&*d, &count)), vec![Scalar::I(1); n]);
            let want: Vec<Scalar> = (0..n).map(|i| Scalar::I((i / 16 * 100 + i % 16) as i64)).collect();
            assert_eq!(unpack(DType::I32, &download(&*d, &place)), want);
        }
    }
}

pub fn workgroup_memory_and_barriers_work(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&group_sum()).unwrap();
    let mut r = Random::fresh();
    let x: Vec<Scalar> = (0..64 * 9).map(|_| Scalar::F(r.below(1000) as f64)).collect();
    let (a, b) = (upload(&*d, &pack(DType::F32, &x)), upload(&*d, &[0; 36]));
    launch(&*d, &p, [9, 1, 1], &[&a, &b], &[]).unwrap();
    if l.computes {
        let want: Vec<Scalar> =
            x.chunks(64).map(|c| Scalar::F(c.iter().map(|v| v.as_f64()).sum::<f64>())).collect();
        assert_eq!(unpack(DType::F32, &download(&*d, &b)), want);
    }
}

pub fn commands_act_in_order(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&affine(DType::I32)).unwrap();
    let n = 1000;
    let (a, b) = (upload(&*d, &vec![0; n * 4]), upload(&*d, &vec![0; n * 4]));
    let params = [Scalar::I(n as i64), Scalar::I(3), Scalar::I(1)];
    let (there, back) = ([a.clone(), b.clone()], [b.clone(), a.clone()]);
    let go =
        |buffers| Command::Launch { program: &p, groups: [32, 1, 1], buffers, params: &params, fault: 0 };
    let mut want = 0i32;
    for round in 0..20 {
        // x -> 3x + 1 twice, then once more after a copy, in one list.
        d.submit(&[
            go(&there),
            go(&back),
            Command::Copy { src: &a, src_offset: 0, dst: &b, dst_offset: 0, bytes: n * 4 },
            go(&back),
        ])
        .unwrap();
        for _ in 0..3 {
            want = want.wrapping_mul(3).wrapping_add(1);
        }
        if round % 5 == 4 {
            // A write between submissions is in order too.
            if l.computes {
                assert_eq!(unpack(DType::I32, &download(&*d, &a)), vec![Scalar::I(want as i64); n]);
            }
            d.write(&a, 0, &vec![0; n * 4]).unwrap();
            want = 0;
        }
    }
    assert_eq!(d.counters().launches, 60);
}

pub fn a_bad_index_is_reported_once(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&gather()).unwrap();
    let table: Vec<Scalar> = (0..10).map(|i| Scalar::F(i as f64 * 1.5)).collect();
    let table = upload(&*d, &pack(DType::F32, &table));
    let run = |index: &[i64], fault| {
        let idx: Vec<Scalar> = index.iter().map(|i| Scalar::I(*i)).collect();
        let buffers =
            [table.clone(), upload(&*d, &pack(DType::I32, &idx)), upload(&*d, &vec![0; index.len() * 4])];
        // The kernel's parameter for the fault is the last one. Its value is ignored.
        let params = [Scalar::I(10), Scalar::I(index.len() as i64), Scalar::U(999)];
        d.submit(&[Command::Launch {
            program: &p,
            groups: [2, 1, 1],
            buffers: &buffers,
            params: &params,
            fault,
        }])
        .unwrap();
        buffers[2].clone()
    };
    let good = run(&[9, 0, 3], 4);
    assert_eq!(d.take_fault().unwrap(), None);
    if !l.computes {
        return;
    }
    assert_eq!(unpack(DType::F32, &download(&*d, &good)), [13.5, 0.0, 4.5].map(Scalar::F));
    let bad = run(&[1, 10, -3], 41);
    run(&[0, 99], 42);
    assert_eq!(d.take_fault().unwrap(), Some(41), "the first fault must be reported");
    assert_eq!(
        unpack(DType::F32, &download(&*d, &bad)),
        [1.5, 13.5, 0.0].map(Scalar::F),
        "indices must be clamped"
    );
    assert_eq!(d.take_fault().unwrap(), None, "the fault must be cleared");
    run(&[1, 2], 43);
    assert_eq!(d.take_fault().unwrap(), None);
    run(&[-1], 44);
    assert_eq!(d.take_fault().unwrap(), Some(44));
}

pub fn counters_count_what_happened(l: &DeviceUnderTest) {
    let d = l.open();
    let zero = d.counters();
    assert_eq!((zero.compiles, zero.launches, zero.uploads, zero.downloads), (0, 0, 0, 0), "{zero:?}");
    let p = d.compile(&affine(DType::F32)).unwrap();
    let c = d.counters();
    assert_eq!(c.compiles + c.compile_cache_hits, 1);
    let (a, b) = (upload(&*d, &[0; 400]), upload(&*d, &[0; 400]));
    let params = [Scalar::I(100), Scalar::F(1.0), Scalar::F(1.0)];
    for _ in 0..5 {
        launch(&*d, &p, [4, 1, 1], &[&a, &b], &params).unwrap();
    }
    let mut part = [0; 100];
    d.read(&b, 0, &mut part).unwrap();
    let c = d.counters();
    assert_eq!((c.launches, c.uploads, c.uploaded_bytes), (5, 2, 800));
    assert_eq!((c.downloads, c.downloaded_bytes, c.library_calls), (1, 100, 0));
    assert_eq!(c.allocations, 2);
    // A rejected launch is not counted.
    assert!(launch(&*d, &p, [4, 1, 1], &[&a], &params).is_err());
    assert_eq!(d.counters().launches, 5);
}

pub fn what_the_verifier_refuses_does_not_compile(l: &DeviceUnderTest) {
    let d = l.open();
    let mut k = affine(DType::F32);
    // Makes the store refer to a buffer that does not exist.
    fn spoil(b: &mut [Stmt]) {
        for s in b {
            match s {
                Stmt::Store { buf, .. } => buf.0 = 17,
                Stmt::If { then, .. } => spoil(then),
                _ => {}
            }
        }
    }
    spoil(&mut k.body);
    let e = d.compile(&k).unwrap_err();
    assert!(e.to_string().contains("affine_f32"), "{e}");
    // More work-items in a workgroup than the device supports.
    let b = Builder::new("too_wide", [d.caps().max_workgroup, 2, 1]);
    let x = b.raw_buffer(DType::F32, true);
    b.store(x, b.local_id(0), 1.0);
    let e = d.compile(&b.finish().unwrap()).unwrap_err();
    assert!(e.to_string().contains("too_wide"), "{e}");
    assert_eq!(d.counters().compiles, 0);
}

/// A device without library kernels for products has nothing to check here.
pub fn library_kernels_take_no_smaller_buffers(l: &DeviceUnderTest) {
    let d = l.open();
    let n = 256;
    let one = Operand { dtype: DType::F32, view: View::dense(&[n, n]) };
    let (inputs, outputs) = ([one.clone(), one.clone()], [one]);
    let Ok(kernel) = d.library(&LibraryCall::new(Work::Op(&Op::Matmul), &inputs, &outputs)) else { return };
    let kernel = &kernel;
    let mut sizes = vec![4 * n * n; 3];
    sizes.extend(Some(kernel.workspace()).filter(|n| *n > 0));
    // The buffers of a run. Buffer number `short` is one element too short.
    let buffers = |short: usize| -> Vec<BufferRef> {
        let size = |i: usize| if i == short { sizes[i] - 4 } else { sizes[i] };
        (0..sizes.len()).map(|i| upload(&*d, &vec![0; size(i)])).collect()
    };
    let stream = d.create_stream(&crate::StreamOptions::default()).ok();
    let run = |buffers: &[BufferRef]| {
        let command = || Command::Library { kernel, buffers, args: &[], fault: 1 };
        let own = d.submit(&[command()]);
        if let Some(s) = &stream {
            let other = s.submit(&[command()]).and_then(|()| s.synchronize().map(drop));
            assert_eq!(
                own.is_ok(),
                other.is_ok(),
                "on the device's own queue: {own:?}; in a stream: {other:?}"
            );
        }
        own
    };
    for short in 0..sizes.len() {
        let e = run(&buffers(short)).unwrap_err();
        assert!(matches!(e, Error::Argument { .. }), "buffer {short}: {e}");
    }
    let whole = buffers(usize::MAX);
    assert!(run(&whole[..2]).is_err(), "a missing buffer must be an error");
    run(&whole).unwrap();
    assert!(download(&*d, &whole[2]).iter().all(|b| *b == 0));
}

pub fn launches_take_the_kernels_buffers_and_parameters(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&affine(DType::F32)).unwrap();
    let (x, y) = (upload(&*d, &[0; 128]), upload(&*d, &[7; 128]));
    let params = [Scalar::I(32), Scalar::F(1.0), Scalar::F(0.0)];
    assert!(launch(&*d, &p, [1, 1, 1], &[&x], &params).is_err());
    assert!(launch(&*d, &p, [1, 1, 1], &[&x, &y, &y], &params).is_err());
    assert!(launch(&*d, &p, [1, 1, 1], &[&x, &y], &params[..2]).is_err());
    d.synchronize().unwrap();
    assert_eq!(download(&*d, &y), [7; 128], "no command may have run");
}

pub fn two_openings_live_side_by_side(l: &DeviceUnderTest) {
    let (d, e) = (l.open(), l.open());
    let params = [Scalar::I(8), Scalar::I(2), Scalar::I(0)];
    let x = pack(DType::I32, &(0..8).map(Scalar::I).collect::<Vec<_>>());
    let run = |d: &dyn Device| {
        let p = d.compile(&affine(DType::I32)).unwrap();
        let (a, b) = (upload(d, &x), upload(d, &[0; 32]));
        launch(d, &p, [1, 1, 1], &[&a, &b], &params).unwrap();
        (download(d, &b), p, a)
    };
    let ((r, p, a), (s, ..)) = (run(&*d), run(&*e));
    assert_eq!(r, s);
    assert_eq!(d.counters().launches, 1, "each device instance must count its own launches");
    // Buffers and programs of one opening are rejected by another. (Devices that import host memory are not
    // tested here.)
    if d.import(Arc::new(x.clone())).is_none() {
        assert!(e.read(&a, 0, &mut [0; 4]).is_err());
        let own = e.alloc(32, Tag::Io).unwrap();
        assert!(launch(&*e, &p, [1, 1, 1], &[&own, &own], &params).is_err());
    }
    drop(e);
    assert_eq!(download(&*d, &a), x);
}

pub fn one_device_serves_two_threads(l: &DeviceUnderTest) {
    let d = l.open();
    std::thread::scope(|s| {
        for t in 0..2i64 {
            let d = d.clone();
            s.spawn(move || {
                let p = d.compile(&affine(DType::I32)).unwrap();
                for round in 0..40i64 {
                    let n = 100 + (t * 37 + round) as usize;
                    let x = pack(DType::I32, &(0..n as i64).map(Scalar::I).collect::<Vec<_>>());
                    let (a, b) = (upload(&*d, &x), upload(&*d, &vec![0; n * 4]));
                    let params = [Scalar::I(n as i64), Scalar::I(t + 2), Scalar::I(round)];
                    launch(&*d, &p, [n.div_ceil(32) as u32, 1, 1], &[&a, &b], &params).unwrap();
                    if l.computes {
                        let want: Vec<Scalar> =
                            (0..n as i64).map(|i| Scalar::I(i * (t + 2) + round)).collect();
                        assert_eq!(unpack(DType::I32, &download(&*d, &b)), want);
                    }
                }
            });
        }
    });
    assert_eq!(d.counters().launches, 80);
}

pub fn any_order_of_drops_is_fine(l: &DeviceUnderTest) {
    let d = l.open();
    let p = d.compile(&affine(DType::F32)).unwrap();
    let (a, b) = (upload(&*d, &[0; 4000]), upload(&*d, &[0; 4000]));
    let params = [Scalar::I(1000), Scalar::F(1.0), Scalar::F(1.0)];
    // Buffers and programs are dropped while their launch may still run.
    launch(&*d, &p, [32, 1, 1], &[&a, &b], &params).unwrap();
    drop((a, p));
    d.synchronize().unwrap();
    // The device is dropped before the buffers and programs that it created.
    let p = d.compile(&affine(DType::F32)).unwrap();
    let weak = Arc::downgrade(&d);
    drop(d);
    assert!(weak.upgrade().is_none());
    assert_eq!(b.bytes(), 4000);
    assert!(!p.name().is_empty());
    drop((p, b));
}

pub fn profiling_times_every_command_in_order(l: &DeviceUnderTest) {
    let d = l.open_with(|o| o.profile = true);
    let p = d.compile(&affine(DType::F32)).unwrap();
    let (a, b) = (upload(&*d, &vec![0; 400_000]), upload(&*d, &vec![0; 400_000]));
    let params = [Scalar::I(100_000), Scalar::F(1.0), Scalar::F(1.0)];
    let buffers = [a.clone(), b.clone()];
    let go =
        |g| Command::Launch { program: &p, groups: [g, 1, 1], buffers: &buffers, params: &params, fault: 0 };
    d.submit(&[go(3125), Command::Copy { src: &b, src_offset: 0, dst: &a, dst_offset: 0, bytes: 400_000 }])
        .unwrap();
    d.submit(&[go(0), go(3125)]).unwrap();
    let t = d.take_timings().unwrap();
    assert_eq!(t.len(), 4, "there must be one timing per command, also for an empty grid");
    assert!(d.take_timings().unwrap().is_empty());
    let copy = || Command::Copy { src: &b, src_offset: 0, dst: &a, dst_offset: 0, bytes: 400_000 };
    for command in [&|| go(3125), &copy as &dyn Fn() -> _] {
        // Repeat, because one command can be shorter than a tick of the device's clock.
        let start = Instant::now();
        loop {
            d.submit(&[command()]).unwrap();
            let t = d.take_timings().unwrap();
            assert_eq!(t.len(), 1);
            if t[0].nanoseconds > 0 {
                break;
            }
            assert!(start.elapsed() < HANGS, "every timing is 0");
        }
    }
    let plain = l.open();
    let p = plain.compile(&affine(DType::F32)).unwrap();
    let (a, b) = (upload(&*plain, &[0; 4]), upload(&*plain, &[0; 4]));
    launch(&*plain, &p, [1, 1, 1], &[&a, &b], &[Scalar::I(1), Scalar::F(1.0), Scalar::F(1.0)]).unwrap();
    assert!(plain.take_timings().unwrap().is_empty());
}

pub fn a_program_serves_again_from_memory_or_disk(l: &DeviceUnderTest) {
    let d = l.open();
    d.compile(&affine(DType::F32)).unwrap();
    d.compile(&affine(DType::F32)).unwrap();
    d.compile(&affine(DType::I32)).unwrap();
    let c = d.counters();
    // There are two different kernels. A device need not keep programs itself, so the repeated kernel may be
    // compiled twice.
    assert!((2..=3).contains(&c.compiles) && c.compile_cache_hits == 0, "{c:?}");
    let warm = l.open();
    let p = warm.compile(&affine(DType::F32)).unwrap();
    let c = warm.counters();
    assert_eq!(c.compiles + c.compile_cache_hits, 1, "the program must be compiled or read from the cache");
    assert!(p.source().is_none_or(|s| !s.trim().is_empty()));
    let (a, b) = (upload(&*warm, &pack(DType::F32, &[Scalar::F(5.0)])), upload(&*warm, &[0; 4]));
    launch(&*warm, &p, [1, 1, 1], &[&a, &b], &[Scalar::I(1), Scalar::F(2.0), Scalar::F(1.0)]).unwrap();
    if l.computes {
        assert_eq!(unpack(DType::F32, &download(&*warm, &b)), [Scalar::F(11.0)]);
    }
}

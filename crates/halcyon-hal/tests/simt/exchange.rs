//! Memory that is exchanged with other libraries by its address on the device.

use crate::common::standin;
use crate::common::*;
use crate::{ALONE, held};
use halcyon_hal::{BufferRef, Command, Device, DeviceMemory, Driver, Error, Options, Tag};
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

fn read(d: &Arc<dyn Device>, b: &BufferRef) -> Vec<u8> {
    let mut bytes = vec![0; b.bytes()];
    d.read(b, 0, &mut bytes).unwrap();
    bytes
}

/// `2 x + 1` for each element of `x`, in a new buffer.
fn double(d: &Arc<dyn Device>, x: &BufferRef) -> Vec<u8> {
    let p = d.compile(&affine(DType::F32)).unwrap();
    let y = d.alloc(x.bytes(), Tag::Io).unwrap();
    let n = x.bytes() / 4;
    let params = [Scalar::I(n as i64), Scalar::F(2.0), Scalar::F(1.0)];
    let buffers = [x.clone(), y.clone()];
    let groups = [n.div_ceil(32).max(1) as u32, 1, 1];
    d.submit(&[Command::Launch { program: &p, groups, buffers: &buffers, params: &params, fault: 0 }])
        .unwrap();
    read(d, &y)
}

/// Two openings of a device stand for two libraries.
#[test]
fn device_memory_is_exchanged_in_place() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let before = held(&s);
        let kind = s.driver.kind();
        let open = |index| s.driver.open(index, &Options::default()).unwrap();
        let (ours, theirs, far) = (open(0), open(0), open(1));
        let values: Vec<f32> = (0..200).map(|i| i as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let x = theirs.alloc(bytes.len(), Tag::Io).unwrap();
        theirs.write(&x, 0, &bytes).unwrap();
        let memory = theirs.export_device(&x).unwrap().expect("an address");
        assert_eq!((memory.device(), memory.bytes(), memory.is_read_only()), ((kind, 0), bytes.len(), false));
        assert!(format!("{memory:?}").contains(kind.id()), "{memory:?}");
        let address = memory.address();

        // Another device does not take it, and its owner gets it back.
        let other = theirs.export_device(&x).unwrap().unwrap();
        assert!(matches!(far.import_device(other), Err(Error::Argument { .. })));

        let y = ours.import_device(memory).unwrap();
        assert_eq!((y.bytes(), y.is_writable()), (bytes.len(), false));
        drop(x);
        assert_eq!(read(&ours, &y), bytes, "{kind}: the import keeps the memory");
        let want: Vec<u8> = values.iter().flat_map(|v| (2.0 * v + 1.0).to_le_bytes()).collect();
        assert_eq!(double(&ours, &y), want);

        // Nothing writes it.
        let refused = |r: halcyon_hal::Result<()>| assert!(matches!(r, Err(Error::Argument { .. })), "{r:?}");
        refused(ours.write(&y, 0, &[1, 2, 3, 4]));
        let z = ours.alloc(bytes.len(), Tag::Io).unwrap();
        let copy = Command::Copy { src: &z, src_offset: 0, dst: &y, dst_offset: 0, bytes: 4 };
        refused(ours.submit(&[copy]));
        let p = ours.compile(&affine(DType::F32)).unwrap();
        let (params, buffers) = ([Scalar::I(1), Scalar::F(2.0), Scalar::F(1.0)], [z.clone(), y.clone()]);
        let launch =
            Command::Launch { program: &p, groups: [1, 1, 1], buffers: &buffers, params: &params, fault: 0 };
        refused(ours.submit(&[launch]));
        assert_eq!(read(&ours, &y), bytes);

        // What is passed on is the same memory.
        let again = ours.export_device(&y).unwrap().unwrap();
        assert!(again.is_read_only() && again.address() == address);
        drop(y);
        let back = theirs.import_device(again).unwrap();
        assert_eq!(read(&theirs, &back), bytes);

        drop((back, z, p, buffers));
        assert_eq!(theirs.memory().allocated, 0, "{kind}: the last import returned the memory");
        drop((ours, theirs, far));
        assert_eq!(held(&s), before);
    }
}

#[test]
fn unaligned_memory_is_copied_and_its_owner_freed() {
    struct Owner(Arc<AtomicUsize>, #[allow(dead_code)] DeviceMemory);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let d = s.driver.open(0, &Options::default()).unwrap();
        let bytes: Vec<u8> = (0..1024u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let x = d.alloc(bytes.len(), Tag::Io).unwrap();
        d.write(&x, 0, &bytes).unwrap();
        for (offset, copied) in [(0, false), (4, true), (256, false), (1020, true)] {
            let (freed, whole) = (Arc::new(AtomicUsize::new(0)), d.export_device(&x).unwrap().unwrap());
            let (device, at, n) = (whole.device(), whole.address() + offset as u64, bytes.len() - offset);
            let owner = Box::new(Owner(freed.clone(), whole));
            // SAFETY: a part of the buffer, which `owner` keeps and nothing writes.
            let part = unsafe { DeviceMemory::new(device, at, n, owner) };
            let y = d.import_device(part).unwrap();
            assert_eq!((y.is_writable(), freed.load(Ordering::SeqCst)), (copied, copied as usize));
            assert_eq!(read(&d, &y), &bytes[offset..]);
            drop(y);
            assert_eq!(freed.load(Ordering::SeqCst), 1);
        }
    }
}

/// Moves leave exported memory where it is.
#[test]
fn exported_memory_stays_in_place() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let memory_pool = Some("best-fit:1m,defragment".parse().unwrap());
        let d = s.driver.open(0, &Options { memory_pool, ..Options::default() }).unwrap();
        let mut all: Vec<BufferRef> = (0..64).map(|_| d.alloc(10_000, Tag::Io).unwrap()).collect();
        let bytes: Vec<u8> = (0..10_000).map(|i| i as u8).collect();
        let last = all.pop().unwrap();
        d.write(&last, 0, &bytes).unwrap();
        let memory = d.export_device(&last).unwrap().unwrap();
        let mut keep = 0;
        all.retain(|_| {
            keep += 1;
            keep % 2 == 0
        });
        assert!(d.defragment().unwrap().moved_bytes > 0);
        let again = d.export_device(&last).unwrap().unwrap();
        assert_eq!((again.address(), read(&d, &last)), (memory.address(), bytes));
        drop((memory, again));
    }
}

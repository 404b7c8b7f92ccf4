//! The driver must set the device in a thread before it calls CUDA or HIP there. The stand-ins reject a call
//! from a thread that has not set a device. This test calls the driver's functions while the thread has no
//! device set, or while it has last used another one.

use crate::common::standin;
use crate::common::*;
use crate::{ALONE, held};
use halcyon_hal::{Command, Driver, Options, Recording, StreamOptions, Tag};
use halcyon_ir::{DType, Scalar};
use std::sync::Arc;

#[test]
fn any_thread_may_use_and_drop_what_another_made() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for s in standin::all() {
        let kind = s.driver.kind();
        let before = held(&s);
        let options = Options { profile: false, ..Options::default() };
        let d = s.driver.open(0, &options).unwrap();
        let other = s.driver.open(1, &options).unwrap();
        let elsewhere = || other.synchronize().unwrap();
        let nowhere = || s.set("forget", 1);
        for lost in [&elsewhere as &dyn Fn(), &nowhere] {
            let then = || lost();
            then();
            let (x, y) = (d.alloc(64, Tag::Io).unwrap(), d.alloc(64, Tag::Io).unwrap());
            then();
            let host = d.alloc_host(4096).unwrap();
            then();
            let p = d.compile(&affine(DType::F32)).unwrap();
            then();
            d.write(&x, 0, &1f32.to_le_bytes().repeat(16)).unwrap();
            let params = [Scalar::I(16), Scalar::F(2.0), Scalar::F(1.0)];
            let buffers = [x.clone(), y.clone()];
            let launch = [Command::Launch {
                program: &p,
                groups: [1, 1, 1],
                buffers: &buffers,
                params: &params,
                fault: 0,
            }];
            then();
            d.submit(&launch).unwrap();
            let used = [&x, &y];
            let recording = Recording { commands: &launch, buffers: &used, variables: &[(0, 1), (0, 2)] };
            then();
            let r = d.capture(&recording).unwrap();
            let values = [Scalar::F(3.0), Scalar::F(1.0)];
            then();
            assert!(d.launch_capture(&*r, &used, &values).unwrap(), "{kind}");
            then();
            let t = d.create_stream(&StreamOptions { profile: true, ..StreamOptions::default() }).unwrap();
            then();
            t.submit(&launch).unwrap();
            then();
            assert!(t.launch_capture(&*r, &used, &values).unwrap(), "{kind}");
            then();
            t.write(&x, 0, Arc::new(vec![0u8; 4])).unwrap();
            then();
            let (got, untaken) = (t.read(&y, 0, 64).unwrap(), t.read(&y, 0, 64).unwrap());
            then();
            let e = t.record().unwrap();
            then();
            e.wait().unwrap();
            then();
            assert_eq!(got.take().unwrap()[..4], 4f32.to_le_bytes(), "{kind}");
            then();
            let u = d.create_stream(&StreamOptions::default()).unwrap();
            then();
            u.wait(&t.record().unwrap()).unwrap();
            then();
            u.submit(&launch).unwrap();
            then();
            // The device's own queue while streams exist.
            d.submit(&launch).unwrap();
            then();
            d.write(&x, 0, &[0; 4]).unwrap();
            let mut bytes = [0; 4];
            then();
            d.read(&y, 0, &mut bytes).unwrap();
            assert_eq!(bytes, 1f32.to_le_bytes(), "{kind}");
            then();
            assert_eq!(d.take_fault().unwrap(), None);
            then();
            d.defragment().unwrap();
            then();
            d.synchronize().unwrap();
            let z = other.alloc(64, Tag::Io).unwrap();
            then();
            other.copy_from_peer(&*d, &y, 0, &z, 0, 64).unwrap();
            then();
            let b = {
                let mut bytes = [0; 4];
                other.read(&z, 0, &mut bytes).unwrap();
                bytes
            };
            assert_eq!(b, 1f32.to_le_bytes(), "{kind}");
            then();
            let _ = d.memory();
            // Drop everything one by one.
            for gone in [
                Box::new(host) as Box<dyn std::any::Any>,
                Box::new(untaken),
                Box::new(e),
                Box::new(r),
                Box::new(u),
                Box::new(t),
                Box::new((x, y, buffers.clone())),
                Box::new(z),
                Box::new(p.clone()),
            ] {
                then();
                drop(gone);
            }
            then();
            d.empty_cache();
            then();
            other.empty_cache();
        }
        // Drop the rest, including the libraries' handles, in a thread that has not set a device.
        let handles = s.get("handles");
        assert!(!d.kernel_libraries().is_empty() && s.get("handles") > handles, "{kind}");
        std::thread::spawn(move || drop((d, other))).join().unwrap();
        for _ in 0..6000 {
            if held(&s) == before {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!((held(&s), s.get("handles")), (before, handles), "{kind}");
    }
}

//! Creates `wgpu` instances, waits for the futures of `wgpu`, and returns its errors as values.

use crate::{BackendType, Error, Result};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};

/// The graphics APIs on which `wgpu` runs for a backend. OpenGL is left out because it lacks too many
/// features.
pub fn backends(kind: BackendType) -> wgpu::Backends {
    match kind {
        BackendType::Metal => wgpu::Backends::METAL,
        _ => wgpu::Backends::VULKAN | wgpu::Backends::DX12 | wgpu::Backends::METAL,
    }
}

/// The instance of a backend. It is never dropped, because some drivers fail when they are loaded twice.
pub fn instance(kind: BackendType) -> &'static wgpu::Instance {
    static ANY: OnceLock<wgpu::Instance> = OnceLock::new();
    static METAL: OnceLock<wgpu::Instance> = OnceLock::new();
    let cell = if kind == BackendType::Metal { &METAL } else { &ANY };
    cell.get_or_init(|| {
        let mut d = wgpu::InstanceDescriptor::new_without_display_handle();
        d.backends = backends(kind);
        // No validation layers, even in debug builds: kernels are verified before.
        d.flags = wgpu::InstanceFlags::empty();
        wgpu::Instance::new(d)
    })
}

/// Polls a `wgpu` future to completion. Outside of browsers, these futures are ready at once.
pub fn ready<F: Future>(f: F) -> F::Output {
    let mut f = pin!(f);
    loop {
        match f.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(v) => return v,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// The first error that occurred outside of an error scope, and the call it is attributed to.
#[derive(Debug, Default)]
pub struct UnscopedError(Mutex<Option<(String, String)>>);

impl UnscopedError {
    fn put(&self, call: &str, text: String) {
        let mut s = self.0.lock().unwrap_or_else(|e| e.into_inner());
        tracing::error!(call, %text, "an error outside of a call");
        // The loss of the device outlasts any other error.
        if s.is_none() || call == LOST && s.as_ref().is_some_and(|(first, _)| first != LOST) {
            *s = Some((call.into(), text));
        }
    }

    /// Returns the first error since the last call, and clears it. The error of a lost device is not cleared.
    pub fn check(&self, device: &str) -> Result<()> {
        let mut s = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let Some((call, text)) = s.clone() else {
            return Ok(());
        };
        if call != LOST {
            *s = None;
        }
        Err(driver_error(device, &call, text))
    }
}

const LOST: &str = "device lost";

/// Records errors that occur outside of error scopes; `wgpu`'s default handler would panic.
pub fn watch(device: &wgpu::Device) -> Arc<UnscopedError> {
    let stray = Arc::new(UnscopedError::default());
    let s = stray.clone();
    device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| s.put("wgpu", e.to_string())));
    let s = stray.clone();
    device.set_device_lost_callback(move |reason, text| {
        // A device that was dropped is not lost.
        if reason != wgpu::DeviceLostReason::Destroyed {
            s.put(LOST, format!("{reason:?}: {text}"));
        }
    });
    stray
}

/// Runs `f` inside one error scope for each kind of error. Returns the first error that a scope caught.
pub fn scoped<T>(device: &wgpu::Device, f: impl FnOnce() -> T) -> std::result::Result<T, wgpu::Error> {
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let v = f();
    let errors = [ready(validation.pop()), ready(internal.pop()), ready(memory.pop())];
    match errors.into_iter().flatten().next() {
        None => Ok(v),
        Some(e) => Err(e),
    }
}

/// An error with its sources in one line.
pub fn text(e: &dyn std::error::Error) -> String {
    let mut t = e.to_string();
    let mut at = e.source();
    while let Some(e) = at {
        let s = e.to_string();
        if !t.contains(&s) {
            t = format!("{t}: {s}");
        }
        at = e.source();
    }
    t
}

pub fn driver_error(device: &str, call: &str, code: String) -> Error {
    Error::Driver {
        device: device.into(),
        call: call.into(),
        code,
        next: "Choose another backend with --backend, or report this with the output of `halcyon doctor`"
            .into(),
    }
}

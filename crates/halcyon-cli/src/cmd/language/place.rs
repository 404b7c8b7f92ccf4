//! The devices of a model's parts: `--split`, `--gpu-layers`, `--cpu-moe` and `--n-cpu-moe`.

use super::fit::{self, Work};
use crate::args::{BackendArgs, PlaceArgs};
use crate::cmd::split::{self, DeviceShare};
use crate::report::{self, figures, size};
use halcyon::{Backend, BackendType, Error, Fallback, Result};
use halcyon_models::{CacheLayout, Decoder, DevicePart, EngineOptions, LoadOptions, ModelFile, Placement};
use serde_json::{Value, json};
use std::fmt::Write;

/// The open devices of a model, and how its parts are divided.
pub(super) struct Devices {
    args: BackendArgs,
    all: Vec<Backend>,
    how: How,
    /// The first layers whose experts are on the host, and its backend.
    experts: Option<(usize, Backend)>,
    /// Whether experts may be put on the host if the device has too little memory.
    may_move: bool,
    /// Why the parts are where they are.
    why: String,
}

enum How {
    One,
    /// By free memory if there are no shares.
    Shares(Option<Vec<f64>>),
    /// The last layers on the second device.
    Last(usize),
}

/// What `--gpu-layers` asks for.
enum Layers {
    None,
    Some(usize),
    All,
}

fn gpu_layers(a: &PlaceArgs, kind: BackendType, all: usize) -> Result<Layers> {
    let Some(asked) = a.gpu_layers.as_deref() else { return Ok(Layers::All) };
    let name = "--gpu-layers";
    let count = match asked {
        "all" | "auto" => usize::MAX,
        // llama.cpp takes negative numbers for all layers.
        n if n.starts_with('-') && n[1..].parse::<u32>().is_ok() => usize::MAX,
        n => n
            .parse()
            .map_err(|_| Error::argument(name, format!("'{n}': expected a number of layers, all or auto")))?,
    };
    match count {
        0 if !matches!(kind, BackendType::Auto | BackendType::Cpu) => {
            Err(Error::argument(name, format!("0 layers on a GPU, but --backend is {kind}")))
        }
        0 => Ok(Layers::None),
        n if n >= all => Ok(Layers::All),
        n => Ok(Layers::Some(n)),
    }
}

/// The CPU. A limit of the device's memory is not one of the host's.
fn host(a: &BackendArgs) -> Result<Backend> {
    let fallback = Some(Fallback::Never.to_string());
    BackendArgs { backend: "cpu".into(), device: None, fallback, memory_limit: None, ..a.clone() }.open(false)
}

fn is_cpu(b: &Backend) -> bool {
    b.info().backend == BackendType::Cpu
}

impl Devices {
    /// Opens the devices that the options name.
    pub(super) fn open(a: &PlaceArgs, backend: &BackendArgs, file: &ModelFile) -> Result<Devices> {
        let layers = file.spec.layers.len();
        let moves = match a.n_cpu_moe {
            Some(n) if n > layers => {
                let what = format!("{n} layers, but the model has {layers}");
                return Err(Error::argument("--n-cpu-moe", what));
            }
            None if a.cpu_moe => Some(layers),
            n => n,
        };
        if moves.is_some() && file.spec.layers.iter().all(|l| l.experts().is_none()) {
            let name = if a.cpu_moe { "--cpu-moe" } else { "--n-cpu-moe" };
            return Err(Error::argument(name, format!("the {} model has no experts", file.spec.family)));
        }
        let mut d = match &a.split {
            Some(text) => by_shares(&split::parts(text)?, backend)?,
            None => on_layers(a, backend, layers)?,
        };
        if let Some(n) = moves {
            let cpu = d.all.iter().find(|b| is_cpu(b)).cloned();
            let host = cpu.map_or_else(|| host(backend), Ok)?;
            let _ = write!(d.why, "; experts of the first {n} layers on {}", host.id());
            (d.experts, d.may_move) = (Some((n, host)), false);
        }
        Ok(d)
    }

    /// The first device.
    pub(super) fn first(&self) -> &Backend {
        &self.all[0]
    }

    fn decoder(
        &self,
        file: &ModelFile,
        load: LoadOptions<'_>,
        layout: CacheLayout,
        experts: Option<(usize, &Backend)>,
    ) -> Result<Decoder> {
        let (spec, all) = (&file.spec, &self.all);
        let placement = match &self.how {
            How::One => Placement::single(&all[0], spec.layers.len()),
            How::Last(n) => Placement::last_layers(&all[0], &all[1], *n, spec)?,
            How::Shares(shares) => {
                // The sizes of the parts do not depend on the device.
                let probe = file.load(&all[0], LoadOptions { lora: None, ..load })?;
                let shares = match shares {
                    Some(s) => s.clone(),
                    None => all.iter().map(free).collect::<Result<_>>()?,
                };
                Placement::by_shares(all, &shares, &probe, layout)?
            }
        };
        let placement = match experts {
            Some((n, host)) => placement.experts_on(host, n, spec)?,
            None => placement,
        };
        file.load_on(placement, load)
    }

    /// Loads the model, whether or not it fits.
    pub(super) fn unchecked(
        &self,
        file: &ModelFile,
        load: LoadOptions<'_>,
        options: EngineOptions,
    ) -> Result<Decoder> {
        self.decoder(file, load, options.layout(), self.experts.as_ref().map(|(n, b)| (*n, b)))
    }

    /// Loads the model if it fits for this work.
    ///
    /// # Errors
    /// `Error::OutOfMemory` with what to change; errors of loading.
    pub(super) fn load(
        &mut self,
        file: &ModelFile,
        load: LoadOptions<'_>,
        options: EngineOptions,
        work: Work,
    ) -> Result<Decoder> {
        fit::check_host(file)?;
        let decoder = self.unchecked(file, load, options)?;
        let Err(e) = fit::check(file, &decoder, load, (options, work)) else { return Ok(decoder) };
        let mixture = file.spec.layers.iter().any(|l| l.experts().is_some());
        let Error::OutOfMemory { device, what, requested, free, total, next } = e else { return Err(e) };
        let over = requested.saturating_sub(free);
        let found = match &self.how {
            How::One if mixture && self.experts.is_none() && !is_cpu(self.first()) => {
                self.with_experts_on_host(file, (load, options, work), (&decoder, over))?
            }
            _ => None,
        };
        match found {
            Some((n, host, moved)) if self.may_move => {
                self.why = format!(
                    "the experts of the first {n} layers are on {}, because the model needs {} on {device} and {} \
                     are free (--n-cpu-moe {n})",
                    host.id(),
                    size(requested),
                    size(free)
                );
                report::note(&self.why);
                self.experts = Some((n, host));
                Ok(moved)
            }
            found => {
                let way = |n: usize| format!("Give --n-cpu-moe {n} (experts on the CPU). Or: {next}");
                let next = found.map_or_else(|| next.clone(), |(n, ..)| way(n));
                Err(Error::OutOfMemory { device, what, requested, free, total, next })
            }
        }
    }

    /// The smallest number of first layers whose experts must be on the host so that the model fits, and the
    /// decoder. `over` are the bytes that the device lacks with all parts on it.
    fn with_experts_on_host(
        &self,
        file: &ModelFile,
        (load, options, work): (LoadOptions<'_>, EngineOptions, Work),
        (decoder, over): (&Decoder, u64),
    ) -> Result<Option<(usize, Backend, Decoder)>> {
        let host = host(&self.args)?;
        let with: Vec<usize> =
            (0..file.spec.layers.len()).filter(|i| file.spec.layers[*i].experts().is_some()).collect();
        let mut freed = 0u64;
        for i in &with {
            freed = freed.saturating_add(decoder.feed_forward_bytes(*i));
            // Fewer cannot be enough.
            if freed < over && Some(i) != with.last() {
                continue;
            }
            let moved = self.decoder(file, load, options.layout(), Some((i + 1, &host)))?;
            match fit::check(file, &moved, load, (options, work)) {
                Ok(()) => return Ok(Some((i + 1, host, moved))),
                Err(Error::OutOfMemory { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    /// Why the parts are where they are.
    pub(super) fn why(&self) -> &str {
        &self.why
    }
}

/// `--split`.
fn by_shares(parts: &[DeviceShare], backend: &BackendArgs) -> Result<Devices> {
    let shares: Vec<f64> = parts.iter().filter_map(|p| p.share).collect();
    if !shares.is_empty() && shares.len() < parts.len() {
        let what = "some devices have a share and some have none; without shares the free memory counts";
        return Err(Error::argument("--split", what));
    }
    let all = parts.iter().map(|p| split::of_part(backend, p).open(false)).collect::<Result<_>>()?;
    let (shares, why) = match shares.is_empty() {
        true => (None, "--split, by free memory"),
        false => (Some(shares), "--split, by shares"),
    };
    let args = backend.clone();
    Ok(Devices { args, all, how: How::Shares(shares), experts: None, may_move: false, why: why.into() })
}

/// `--gpu-layers`, or all layers on the chosen device.
fn on_layers(a: &PlaceArgs, backend: &BackendArgs, layers: usize) -> Result<Devices> {
    let kind = backend.kind()?;
    let never = match backend.fallback.as_deref() {
        Some(f) => f.parse::<Fallback>()? == Fallback::Never,
        None => kind != BackendType::Auto,
    };
    let one = |all: Vec<Backend>, may_move: bool, why: String| Devices {
        args: backend.clone(),
        all,
        how: How::One,
        experts: None,
        may_move,
        why,
    };
    match gpu_layers(a, kind, layers)? {
        Layers::None => Ok(one(vec![host(backend)?], false, "--gpu-layers 0".into())),
        // Who chose the layers chose where the experts are.
        Layers::All if a.gpu_layers.is_some() => {
            Ok(one(vec![backend.open(false)?], false, "--gpu-layers: all".into()))
        }
        Layers::All => Ok(one(vec![backend.open(false)?], !never, "all on the chosen device".into())),
        Layers::Some(n) => {
            let device = backend.open(false)?;
            let why = format!("--gpu-layers: the last {n} of {layers} layers on {}", device.id());
            if is_cpu(&device) {
                return Ok(one(vec![device], false, why));
            }
            let all = vec![host(backend)?, device];
            Ok(Devices { how: How::Last(n), ..one(all, false, why) })
        }
    }
}

/// The free memory of a device, or what it has if that is not known.
fn free(b: &Backend) -> Result<f64> {
    let d = b.device();
    let known = d.available().or(d.info().total_memory).filter(|n| *n > 0);
    known.map(|n| n as f64).ok_or_else(|| {
        let what = format!("the free memory of {} is not known; give shares, as in cpu=0.3,cuda=0.7", b.id());
        Error::argument("--split", what)
    })
}

/// `layers 0 to 3, 5`, or `layer 5`.
fn ranges(what: [&str; 2], layers: &[usize]) -> Option<String> {
    let mut runs: Vec<(usize, usize)> = vec![];
    for i in layers {
        match runs.last_mut() {
            Some((_, to)) if *to + 1 == *i => *to = *i,
            _ => runs.push((*i, *i)),
        }
    }
    let run = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a} to {b}") };
    let runs: Vec<String> = runs.iter().map(run).collect();
    let what = what[usize::from(layers.len() > 1)];
    (!runs.is_empty()).then(|| format!("{what} {}", runs.join(", ")))
}

fn parts_text(p: &DevicePart) -> String {
    let mut parts = vec![];
    parts.extend(p.embedding.then(|| "embedding".to_string()));
    if p.mixers == p.feed_forward {
        parts.extend(ranges(["layer", "layers"], &p.mixers));
    } else {
        parts.extend(ranges(["mixer of layer", "mixers of layers"], &p.mixers));
        let what = ["feed-forward part of layer", "feed-forward parts of layers"];
        parts.extend(ranges(what, &p.feed_forward));
    }
    parts.extend(p.head.then(|| "head".to_string()));
    parts.join("; ")
}

/// The devices that compute something, in their order.
pub(super) fn devices(decoder: &Decoder) -> String {
    let p = decoder.placement();
    let used = |d: &usize| {
        *d == p.embedding || *d == p.head || p.layers.iter().any(|l| l.mixer == *d || l.feed_forward == *d)
    };
    let ids: Vec<&str> = (0..p.devices.len()).filter(used).map(|d| p.devices[d].id()).collect();
    ids.join(" and ")
}

/// The placement as a table.
pub(super) fn text(decoder: &Decoder, options: EngineOptions, why: &str) -> String {
    let mut rows = vec![["device", "weights", "cache", "parts"].map(String::from).to_vec()];
    for p in decoder.device_parts(options.layout()) {
        let id = decoder.placement().devices[p.device].id().to_string();
        rows.push(vec![id, size(p.weights), size(p.cache), parts_text(&p)]);
    }
    format!("placement: {why}\n{}", figures(rows, &[1, 2]))
}

/// The placement as JSON.
pub(super) fn to_json(decoder: &Decoder, options: EngineOptions, why: &str) -> Value {
    let of = |p: &DevicePart| {
        json!({
            "device": decoder.placement().devices[p.device].id(), "embedding": p.embedding, "mixers": p.mixers,
            "feed_forward": p.feed_forward, "head": p.head, "weights": p.weights, "cache": p.cache,
        })
    };
    let devices: Vec<Value> = decoder.device_parts(options.layout()).iter().map(of).collect();
    json!({ "why": why, "devices": devices })
}

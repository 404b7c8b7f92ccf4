//! Where the parts of a decoder are computed: layers on several devices, and experts on the host.
//!
//! Parts are computed one after the other: the embedding, then of each layer the mixer and the feed-forward
//! part, then the head. Consecutive parts on one device form a stage. Only activations cross from stage to
//! stage.

use crate::decoder::{CacheLayout, Decoder};
use crate::spec::{Mixer, Order, Spec};
use halcyon::Backend;
use halcyon::ir::error::{Error, Result};
use std::ops::Range;

/// The devices of one layer, as indices of [`Placement::devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    /// Of the part that reads other positions, with its cache.
    pub mixer: usize,
    /// Of the feed-forward part, with the router and all experts.
    pub feed_forward: usize,
}

/// The devices of a decoder's parts.
#[derive(Clone, Debug)]
pub struct Placement {
    pub devices: Vec<Backend>,
    /// Index of the device that looks up embeddings.
    pub embedding: usize,
    pub layers: Vec<LayerPlace>,
    /// Index of the device that computes the last norm and the logits.
    pub head: usize,
}

/// Consecutive parts on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) device: usize,
    /// Numbers of parts: 0 is the embedding, then each layer has two, and the last one is the head.
    pub(crate) parts: Range<usize>,
    /// The layers whose mixers the stage computes.
    pub(crate) mixers: Range<usize>,
    /// Layers of earlier stages of the same device whose keys and values this stage reads.
    pub(crate) shared: Vec<usize>,
}

/// The number of the part that is the mixer of layer `i`. The feed-forward part has the next number.
pub(crate) fn mixer(i: usize) -> usize {
    1 + 2 * i
}

impl Stage {
    pub(crate) fn has_embedding(&self) -> bool {
        self.parts.start == 0
    }

    /// Whether the stage computes the feed-forward part of a layer. `layers` are those of the model.
    pub(crate) fn has_feed_forward(&self, layers: usize) -> bool {
        (0..layers).any(|i| self.parts.contains(&(mixer(i) + 1)))
    }
}

/// The layers of a model of `layers` layers whose mixers are in a range of parts.
fn mixers(parts: &Range<usize>, layers: usize) -> Range<usize> {
    let first = |part: usize| part.saturating_sub(1).div_ceil(2).min(layers);
    first(parts.start)..first(parts.end)
}

impl Placement {
    /// All parts on one device.
    pub fn single(backend: &Backend, layers: usize) -> Placement {
        let one = LayerPlace { mixer: 0, feed_forward: 0 };
        Placement { devices: vec![backend.clone()], embedding: 0, layers: vec![one; layers], head: 0 }
    }

    /// The last `count` layers on `device`, all else on `rest`, as llama.cpp's `--gpu-layers` does.
    ///
    /// # Errors
    /// `Error::Argument` for more layers than there are; those of [`Placement::check`].
    pub fn last_layers(rest: &Backend, device: &Backend, count: usize, spec: &Spec) -> Result<Placement> {
        let n = spec.layers.len();
        let Some(first) = n.checked_sub(count) else {
            let what = format!("{count} layers on {}, but the model has {n}", device.id());
            return Err(Error::argument("placement", what));
        };
        let place = |i: usize| {
            let d = usize::from(i >= first);
            LayerPlace { mixer: d, feed_forward: d }
        };
        let layers = (0..n).map(place).collect();
        let p = Placement { devices: vec![rest.clone(), device.clone()], embedding: 0, layers, head: 0 };
        p.check(spec)?;
        Ok(p)
    }

    /// Consecutive layers on each device. The first device has the embedding and the last one the head. The
    /// bytes of weights and cache on the devices are about proportional to `shares`, of which only the ratios
    /// matter. `probe` is the decoder on any one device: it knows the sizes. Layers that read the keys and
    /// values of another one stay on its device, however large they are.
    ///
    /// # Errors
    /// `Error::Argument` for shares that are not positive numbers or not one for each device, and if there
    /// are not enough layers for the devices.
    pub fn by_shares(
        devices: &[Backend],
        shares: &[f64],
        probe: &Decoder,
        layout: CacheLayout,
    ) -> Result<Placement> {
        let bad = |what: String| Err(Error::argument("split", what));
        if shares.len() != devices.len() || shares.iter().any(|s| !s.is_finite() || *s <= 0.0) {
            return bad(format!("{} devices with the shares {shares:?}", devices.len()));
        }
        let (spec, n) = (&probe.spec, probe.spec.layers.len());
        let sizes = probe.part_bytes(layout);
        // Bytes of the embedding and the layers before each one.
        let mut before = vec![sizes[0] as f64];
        for i in 0..n {
            before.push(before[i] + (sizes[mixer(i)] + sizes[mixer(i) + 1]) as f64);
        }
        let head = if probe.is_tied() { probe.embedding_bytes() } else { 0 };
        let all = before[n] + (sizes[mixer(n)] + head) as f64;
        let total: f64 = shares.iter().sum();
        let cuts: Vec<usize> = (1..n).filter(|c| crossing(spec, *c).is_none()).collect();
        if cuts.len() + 1 < devices.len() {
            let what = format!(
                "{} devices, but the layers of the model form only {} groups that can be apart ({n} layers)",
                devices.len(),
                cuts.len() + 1
            );
            return bad(what);
        }
        let (mut layers, mut next, mut share) = (vec![], 0, 0.0);
        for (d, s) in shares.iter().enumerate() {
            share += s / total;
            // Each device that follows needs a cut of its own.
            let open = next..cuts.len() + 2 - devices.len() + d;
            let far = |c: usize| (before[c] - share * all).abs();
            let best = open.min_by(|a, b| match (cuts.get(*a), cuts.get(*b)) {
                (Some(a), Some(b)) => far(*a).total_cmp(&far(*b)),
                _ => std::cmp::Ordering::Equal,
            });
            let last = d + 1 == devices.len();
            let end = best.filter(|_| !last).and_then(|c| cuts.get(c)).copied().unwrap_or(n);
            next = best.map_or(next, |c| c + 1);
            layers.resize(end, LayerPlace { mixer: d, feed_forward: d });
        }
        Ok(Placement { devices: devices.to_vec(), embedding: 0, layers, head: devices.len() - 1 })
    }

    /// The same placement with the feed-forward parts of the first `layers` layers on `host`, where they have
    /// experts, as llama.cpp's `--n-cpu-moe` does.
    ///
    /// # Errors
    /// `Error::Argument` if the model has fewer layers, or no experts.
    pub fn experts_on(mut self, host: &Backend, layers: usize, spec: &Spec) -> Result<Placement> {
        let bad = |what: String| Err(Error::argument("placement", what));
        if layers > spec.layers.len() {
            return bad(format!("experts of {layers} layers, but the model has {}", spec.layers.len()));
        }
        if spec.layers.iter().all(|l| l.experts().is_none()) {
            return bad(format!("the {} model has no experts", spec.family));
        }
        let same = self.devices.iter().position(|d| d.id() == host.id());
        let at = same.unwrap_or(self.devices.len());
        if same.is_none() {
            self.devices.push(host.clone());
        }
        let all = self.layers.iter_mut().zip(&spec.layers).take(layers);
        all.filter(|(_, l)| l.experts().is_some()).for_each(|(p, _)| p.feed_forward = at);
        self.check(spec)?;
        Ok(self)
    }

    /// Fails unless a decoder can be placed so.
    ///
    /// # Errors
    /// `Error::Argument` for a device that is not in the list, another number of layers, a layer that reads
    /// the keys and values of a layer on another device, and a layer with its two parts side by side on two
    /// devices.
    pub fn check(&self, spec: &Spec) -> Result<()> {
        let bad = |what: String| Err(Error::argument("placement", what));
        let (n, count) = (spec.layers.len(), self.devices.len());
        if self.layers.len() != n {
            return bad(format!("{} layers are placed, but the model has {n}", self.layers.len()));
        }
        let parts = self.parts();
        if let Some(d) = parts.iter().find(|d| **d >= count) {
            return bad(format!("there is no device {d}: there are {count}"));
        }
        for (i, (p, l)) in self.layers.iter().zip(&spec.layers).enumerate() {
            if let Some(other) = keys_of(spec, i)
                && self.layers[other].mixer != p.mixer
            {
                return Err(Error::unsupported(
                    format!(
                        "layer {i} on {} and layer {other}, whose keys and values it reads, on {}",
                        self.devices[p.mixer].id(),
                        self.devices[self.layers[other].mixer].id()
                    ),
                    format!("Put both on one device: {}", self.allowed(spec)),
                ));
            }
            if p.mixer != p.feed_forward && matches!(l.order, Order::Parallel | Order::ParallelTwo) {
                return bad(format!("layer {i} has its parts side by side, so both need the same device"));
            }
        }
        Ok(())
    }

    /// The numbers of last layers that can be apart from the others.
    fn allowed(&self, spec: &Spec) -> String {
        let n = spec.layers.len();
        let counts: Vec<String> =
            (1..n).rev().filter(|c| crossing(spec, *c).is_none()).map(|c| (n - c).to_string()).collect();
        match counts.is_empty() {
            true => "no number of last layers can be apart".into(),
            false => format!("of the last layers {} can be apart from the others", counts.join(", ")),
        }
    }

    /// The device of each part.
    fn parts(&self) -> Vec<usize> {
        let layers = self.layers.iter().flat_map(|p| [p.mixer, p.feed_forward]);
        std::iter::once(self.embedding).chain(layers).chain([self.head]).collect()
    }

    /// The stages, in the order in which they are computed.
    pub(crate) fn stages(&self, spec: &Spec) -> Vec<Stage> {
        let parts = self.parts();
        let mut stages: Vec<Stage> = vec![];
        for (i, device) in parts.into_iter().enumerate() {
            match stages.last_mut() {
                Some(s) if s.device == device => s.parts.end = i + 1,
                _ => stages.push(Stage { device, parts: i..i + 1, mixers: 0..0, shared: vec![] }),
            }
        }
        for s in &mut stages {
            s.mixers = mixers(&s.parts, spec.layers.len());
            let others = s.mixers.clone().filter_map(|i| keys_of(spec, i));
            let mut shared: Vec<usize> = others.filter(|k| !s.mixers.contains(k)).collect();
            shared.sort_unstable();
            shared.dedup();
            s.shared = shared;
        }
        stages
    }
}

/// The layer whose keys and values layer `i` reads.
pub(crate) fn keys_of(spec: &Spec, i: usize) -> Option<usize> {
    match &spec.layers[i].mixer {
        Mixer::Attention(a) => a.keys_of,
        Mixer::Recurrent(_) => None,
    }
}

/// A layer from `cut` on that reads the keys and values of one before it.
fn crossing(spec: &Spec, cut: usize) -> Option<usize> {
    (cut..spec.layers.len()).find(|i| keys_of(spec, *i).is_some_and(|k| k < cut))
}

/// What a device has of a decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePart {
    /// Index in [`Placement::devices`].
    pub device: usize,
    pub embedding: bool,
    /// Layers whose mixers it computes.
    pub mixers: Vec<usize>,
    /// Layers whose feed-forward parts it computes.
    pub feed_forward: Vec<usize>,
    pub head: bool,
    /// Bytes of the weights, as they are stored.
    pub weights: u64,
    /// Bytes of the cache.
    pub cache: u64,
}

impl Decoder {
    /// Where the parts are computed.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What each device has. The two uses of a matrix that is both embedding and head count once if they are
    /// on one device.
    pub fn device_parts(&self, layout: CacheLayout) -> Vec<DevicePart> {
        let p = &self.placement;
        let n = p.layers.len();
        let of = |d: usize| {
            let here = |f: &dyn Fn(&LayerPlace) -> usize| (0..n).filter(|i| f(&p.layers[*i]) == d).collect();
            let parts = p.parts();
            let weights = parts.iter().zip(&self.bytes).filter(|(at, _)| **at == d).map(|(_, b)| *b).sum();
            let states = |i: usize| self.layer_shapes(&self.spec.layers[i], layout);
            let mixers: Vec<usize> = here(&|l| l.mixer);
            let cache = mixers.iter().flat_map(|i| states(*i)).map(|s| s.bytes() as u64).sum();
            let feed_forward = here(&|l| l.feed_forward);
            let (embedding, head) = (p.embedding == d, p.head == d);
            DevicePart { device: d, embedding, mixers, feed_forward, head, weights, cache }
        };
        (0..p.devices.len()).map(of).collect()
    }

    /// Bytes of the weights of a layer's feed-forward part; 0 for a layer that does not exist.
    pub fn feed_forward_bytes(&self, layer: usize) -> u64 {
        let n = self.placement.layers.len();
        if layer < n { self.bytes[mixer(layer) + 1] } else { 0 }
    }

    /// Bytes of each part: weights, and the cache of mixers.
    pub(crate) fn part_bytes(&self, layout: CacheLayout) -> Vec<u64> {
        let mut all = self.bytes.clone();
        for (i, l) in self.spec.layers.iter().enumerate() {
            all[mixer(i)] += self.layer_shapes(l, layout).iter().map(|s| s.bytes() as u64).sum::<u64>();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_runs_of_parts() {
        // Of three layers: parts 1, 3 and 5 are mixers, 7 is the head.
        for (parts, want) in
            [(0..8, 0..3), (0..3, 0..1), (0..1, 0..0), (2..3, 1..1), (2..4, 1..2), (3..6, 1..3), (7..8, 3..3)]
        {
            assert_eq!(mixers(&parts, 3), want, "{parts:?}");
        }
        let stage = |parts| Stage { device: 0, parts, mixers: 0..0, shared: vec![] };
        assert!(stage(2..3).has_feed_forward(3) && !stage(3..4).has_feed_forward(3));
        assert!(!stage(7..8).has_feed_forward(3) && stage(0..1).has_embedding());
    }
}

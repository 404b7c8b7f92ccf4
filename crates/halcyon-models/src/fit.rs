//! The memory that a model needs, computed from its plans before anything is allocated.

use crate::decoder::{CacheLayout, CacheShape, Decoder};
use crate::engine::ahead::WAITING;
use crate::engine::stages::{Kind, Want, handed_shapes, own_states, shared_shapes, stage_results};
use crate::engine::{EngineOptions, padded};
use crate::grid;
use crate::model::ModelFile;
use crate::source::Source;
use halcyon::hal::Tag;
use halcyon::ir::error::Result;
use halcyon::{DType, Fit, Tensor};
use halcyon_formats::gguf::GgmlType;

/// The memory, in bytes, that an [`Engine`](crate::Engine) which computes some kinds of steps needs on one
/// device. It is counted as the device counts it, with each allocation rounded up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Index of the device in the decoder's placement.
    pub index: usize,
    /// Weights that the device reads in place from the model's files; not part of [`MemoryNeed::device`].
    pub in_place: u64,
    /// Weights and other constants that are copied to the device as they are stored.
    pub copied: u64,
    /// Weights that are packed for the device's kernels.
    pub packed: u64,
    /// Host memory that packing needs for a while.
    pub packing: u64,
    /// The cache of keys and values.
    pub cache: u64,
    /// The bytes of `cache` without what the device adds when it rounds sizes up.
    pub cache_written: u64,
    /// The part of `cache_written` that one position takes.
    pub position: u64,
    /// Buffers of all plans for values between their kernels.
    pub plans: u64,
    /// Inputs and results of the largest step.
    pub io: u64,
    /// Copies of the logits of one step on the host.
    pub host: u64,
}

/// A kind of step: rows, and rows whose logits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub rows: usize,
    pub logits: usize,
    /// Sequences of the rows.
    pub sequences: usize,
}

impl MemoryNeed {
    /// The need of an engine with these options on the device that computes the logits. `steps` are the kinds
    /// of steps that it will compute, each with a plan of its own. Nothing is allocated.
    ///
    /// # Errors
    /// Errors of [`Decoder::check_cache`] and of planning.
    pub fn of(decoder: &Decoder, options: EngineOptions, steps: &[StepSize]) -> Result<MemoryNeed> {
        MemoryNeed::of_device(decoder, decoder.placement().head, options, steps)
    }

    /// [`MemoryNeed::of`] on the device with this index in the decoder's placement.
    ///
    /// # Errors
    /// Errors of [`Decoder::check_cache`] and of planning.
    pub fn of_device(
        decoder: &Decoder,
        index: usize,
        options: EngineOptions,
        steps: &[StepSize],
    ) -> Result<MemoryNeed> {
        MemoryNeed::of_results(decoder, index, options, steps, Want::only(Kind::Logits))
    }

    /// [`MemoryNeed::of_device`] of an engine that a layer for further tokens follows
    /// ([`crate::Engine::look_ahead`]): its steps give the activations of all rows too. The layer's own need
    /// is that of [`MemoryNeed::of_ahead`].
    ///
    /// # Errors
    /// Errors of [`Decoder::check_cache`] and of planning.
    pub fn of_followed(
        decoder: &Decoder,
        index: usize,
        options: EngineOptions,
        steps: &[StepSize],
    ) -> Result<MemoryNeed> {
        let want = Want { activations: true, ..Want::only(Kind::Logits) };
        MemoryNeed::of_results(decoder, index, options, steps, want)
    }

    /// [`MemoryNeed::of_device`] of an engine whose steps give `want`.
    pub(crate) fn of_results(
        decoder: &Decoder,
        index: usize,
        options: EngineOptions,
        steps: &[StepSize],
        want: Want,
    ) -> Result<MemoryNeed> {
        decoder.check_cache(options.cache)?;
        let mut need = cache(decoder, index, options);
        let stages = || decoder.stages.iter().enumerate().filter(|(_, s)| s.device == index).map(|(n, _)| n);
        for s in steps {
            let (mut in_place, mut copied, mut packed) = (0u64, 0u64, 0u64);
            for n in stages() {
                let (fit, inputs) = plan(decoder, n, options, *s, want)?;
                in_place = in_place.saturating_add(fit.weights_in_place);
                copied = copied.saturating_add(fit.weights);
                packed = packed.saturating_add(fit.packed);
                need.packing = need.packing.max(fit.packing);
                need.plans = need.plans.saturating_add(fit.activations).saturating_add(fit.workspace);
                need.io = need.io.max(fit.outputs.saturating_add(inputs));
                let floats = match n + 1 == decoder.stages.len() {
                    true => s.logits.saturating_mul(decoder.spec.vocabulary),
                    false => s.rows.saturating_mul(decoder.spec.hidden),
                };
                need.host = need.host.max(floats.saturating_mul(8) as u64);
            }
            // Constants are on the device once, however many plans read them. Inputs and results are freed
            // after a step, the other buffers of a plan are not.
            need.in_place = need.in_place.max(in_place);
            need.copied = need.copied.max(copied);
            need.packed = need.packed.max(packed);
        }
        Ok(need)
    }

    /// The need of an engine that proposes tokens with a layer for further tokens
    /// ([`Decoder::load_ahead`]), in addition to `model`, the need of the model's engine on this device
    /// ([`MemoryNeed::of_followed`]) for the same steps. Inputs and results of the two are never there
    /// together.
    ///
    /// # Errors
    /// Errors of [`Decoder::check_cache`] and of planning.
    pub fn of_ahead(
        layer: &Decoder,
        options: EngineOptions,
        steps: &[StepSize],
        model: &MemoryNeed,
    ) -> Result<MemoryNeed> {
        // Each step is one of a sequence, and only the last row's logits are computed.
        let one = |s: &StepSize| StepSize { logits: 1, sequences: 1, ..*s };
        let mut steps: Vec<StepSize> = steps.iter().map(one).collect();
        // While nothing is proposed, tokens are computed in groups.
        let group = padded(WAITING.min(options.chunk));
        steps.extend([1, group].map(|rows| StepSize { rows, logits: 1, sequences: 1 }));
        steps.sort_by_key(|s| s.rows);
        steps.dedup();
        let mut need = MemoryNeed::of_results(layer, 0, options, &steps, Want::only(Kind::Ahead))?;
        let b = &layer.placement().devices[0];
        let hidden = layer.spec.hidden;
        // Matrices that the model has too.
        let inputs =
            [Tensor::placeholder(b, DType::I32, [1]), Tensor::placeholder(b, DType::F32, [1, hidden])];
        let results = layer.shared_results(&inputs[0], &inputs[1]);
        if !results.is_empty() {
            let fit = b.fit_of(&inputs, &[false; 2], &results, None)?;
            need.in_place = need.in_place.saturating_sub(fit.weights_in_place);
            need.copied = need.copied.saturating_sub(fit.weights);
            need.packed = need.packed.saturating_sub(fit.packed);
        }
        need.io = need.io.saturating_sub(model.io);
        // The activations that wait are on the host.
        let rows = steps.iter().map(|s| s.rows).max().unwrap_or(1);
        need.host = need.host.saturating_add(rows.saturating_mul(hidden).saturating_mul(8) as u64);
        Ok(need)
    }

    /// The need of the steps of a generation: chunks of a prompt, and single tokens of all sequences.
    ///
    /// # Errors
    /// Errors of [`Decoder::check_cache`] and of planning.
    pub fn of_generation(decoder: &Decoder, options: EngineOptions) -> Result<MemoryNeed> {
        MemoryNeed::of(decoder, options, &generation(decoder, options))
    }

    /// Device memory in use at the peak.
    pub fn device(&self) -> u64 {
        [self.copied, self.packed, self.cache, self.plans, self.io].into_iter().fold(0, u64::saturating_add)
    }

    /// [`MemoryNeed::device`] without the cache: what does not depend on the context.
    pub fn fixed(&self) -> u64 {
        self.device().saturating_sub(self.cache)
    }

    /// [`MemoryNeed::device`] without what a device adds to the cache when it rounds sizes up, which is never
    /// written.
    pub fn written(&self) -> u64 {
        self.fixed().saturating_add(self.cache_written)
    }

    /// The need with a cache of other sizes.
    pub fn with_cache(&self, decoder: &Decoder, options: EngineOptions) -> MemoryNeed {
        let c = cache(decoder, self.index, options);
        MemoryNeed { cache: c.cache, cache_written: c.cache_written, position: c.position, ..self.clone() }
    }

    /// The most positions of each sequence, in whole pages, whose cache fits into `free` bytes next to the
    /// rest; 0 if not even one page fits, and `usize::MAX` if the device has no cache that grows with them.
    /// Other sizes are those of `options`.
    pub fn largest_context(&self, decoder: &Decoder, options: EngineOptions, free: u64) -> usize {
        let (page, sequences) = (options.page.max(1), options.sequences.max(1));
        if self.position == 0 {
            return if self.device() <= free { usize::MAX } else { 0 };
        }
        let fits = |pages: usize| {
            let positions = pages.saturating_mul(page).saturating_mul(sequences);
            self.with_cache(decoder, EngineOptions { positions, ..options }).device() <= free
        };
        // Twice as many as there would be if sizes were not rounded.
        let room = free.saturating_sub(self.fixed()) / self.position.max(1);
        let most = usize::try_from(room).unwrap_or(usize::MAX) / page / sequences;
        let (mut low, mut high) = (0, most.saturating_mul(2).saturating_add(1));
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) { low = middle } else { high = middle }
        }
        low.saturating_mul(page)
    }
}

/// The kinds of steps of a generation: chunks of prompts, and single tokens of all sequences. As sequences of
/// a batch end, the steps of the others become smaller.
pub fn generation(decoder: &Decoder, options: EngineOptions) -> Vec<StepSize> {
    let most = decoder.kernel().map_or(usize::MAX, |_| grid::MOST_ROWS);
    let chunk = padded(options.chunk.min(options.positions).min(most));
    let sequences = options.sequences;
    let mut rows = padded(sequences);
    let mut steps = vec![StepSize { rows: chunk, logits: rows.min(chunk), sequences: 1 }];
    loop {
        if rows != chunk || sequences != 1 {
            steps.push(StepSize { rows, logits: rows, sequences: sequences.min(rows) });
        }
        if rows == 1 {
            return steps;
        }
        rows = padded(rows / 2);
    }
}

/// The kinds of steps of a chat: as [`generation`], with parts of prompts of every size.
pub fn chat(decoder: &Decoder, options: EngineOptions) -> Vec<StepSize> {
    let mut steps = generation(decoder, options);
    let mut rows = padded(steps[0].rows / 2);
    while rows > 1 && rows < steps[0].rows {
        steps.push(StepSize { rows, logits: 1, sequences: 1 });
        rows = padded(rows / 2);
    }
    steps
}

/// The further kinds of steps of speculative decoding with up to `most` proposed tokens for each sequence:
/// all their logits are computed. The draft itself computes those of [`generation`].
pub fn verification(options: EngineOptions, most: usize) -> Vec<StepSize> {
    let tokens = options.sequences.saturating_mul(most.saturating_add(1));
    let (mut steps, mut rows) = (vec![], padded(tokens.min(options.chunk)));
    while rows > padded(options.sequences) {
        steps.push(StepSize { rows, logits: rows, sequences: options.sequences });
        rows = padded(rows / 2);
    }
    steps
}

fn cache(decoder: &Decoder, index: usize, options: EngineOptions) -> MemoryNeed {
    let device = decoder.placement().devices[index].device();
    let layout = options.layout();
    let shapes = |layout: CacheLayout| -> Vec<CacheShape> {
        let here = decoder.placement().layers.iter().zip(&decoder.spec.layers);
        here.filter(|(p, _)| p.mixer == index).flat_map(|(_, l)| decoder.layer_shapes(l, layout)).collect()
    };
    let sum = |all: &[CacheShape], n: &dyn Fn(&CacheShape) -> u64| {
        all.iter().fold(0u64, |a, s| a.saturating_add(n(s)))
    };
    // States of recurrent layers do not grow with the positions.
    let longer = shapes(CacheLayout { pages: layout.pages.saturating_add(1), ..layout });
    let longer = sum(&longer, &|s| s.bytes() as u64);
    let shapes = shapes(layout);
    let written = sum(&shapes, &|s| s.bytes() as u64);
    MemoryNeed {
        index,
        cache: sum(&shapes, &|s| device.footprint(s.bytes(), Tag::Io) as u64),
        cache_written: written,
        position: longer.saturating_sub(written) / layout.page.max(1) as u64,
        ..MemoryNeed::default()
    }
}

/// The plan of a stage of a step, and the bytes of its inputs on the device.
fn plan(
    decoder: &Decoder,
    stage: usize,
    options: EngineOptions,
    size: StepSize,
    want: Want,
) -> Result<(Fit, u64)> {
    let (b, layout) = (&decoder.placement().devices[decoder.stages[stage].device], options.layout());
    let context = decoder.context().min(options.positions);
    let int = |dims: &[usize]| Tensor::placeholder(b, DType::I32, dims);
    let row = || int(&[size.rows]);
    let handed = handed_shapes(decoder, stage, (size.rows, size.logits.max(1)), want);
    let mut inputs: Vec<Tensor> =
        handed.iter().map(|dims| Tensor::placeholder(b, DType::F32, dims.as_slice())).collect();
    inputs.extend([row(), row(), row(), row()]);
    inputs.push(int(&[options.sequences, context.div_ceil(options.page)]));
    inputs.push(int(&[size.logits.max(1)]));
    for rope in decoder.ropes() {
        let angles = || Tensor::placeholder(b, DType::F32, [size.rows, rope.size / 2]);
        inputs.extend([angles(), angles()]);
    }
    if let Some(kernel) = decoder.kernel() {
        // The last rows of chunks: complete chunks take more memory.
        let tokens = if size.sequences > 1 { size.sequences } else { size.rows };
        let first = size.rows.next_multiple_of(grid::CHUNK) - size.rows;
        let at = |r: usize| if size.sequences > 1 { (r, grid::CHUNK - 1) } else { (0, first + r) };
        let rows: Vec<(usize, usize)> = (0..tokens).map(at).collect();
        for t in grid::inputs(b, &rows, size.rows, options.sequences, kernel)? {
            inputs.push(Tensor::placeholder(b, t.dtype()?, t.dims()?.as_slice()));
        }
    }
    if decoder.is_ahead() {
        inputs.push(Tensor::placeholder(b, DType::F32, [size.rows, decoder.spec.hidden]));
    }
    let takes = |t: &Tensor| -> Result<u64> {
        let bytes = t.dtype()?.bytes(t.dims()?.iter().product());
        Ok(b.device().footprint(bytes, Tag::Io) as u64)
    };
    let mut bytes = 0u64;
    for t in &inputs {
        bytes = bytes.saturating_add(takes(t)?);
    }
    let mut donated = vec![false; inputs.len()];
    let own = &decoder.cache_shapes(layout)[own_states(decoder, stage, layout)];
    let shared = shared_shapes(decoder, stage, layout);
    for (shape, gone) in shared.iter().map(|s| (s, false)).chain(own.iter().map(|s| (s, true))) {
        inputs.push(Tensor::placeholder(b, shape.dtype, shape.dims));
        donated.push(gone);
    }
    let results = stage_results(decoder, stage, layout, want, &inputs);
    Ok((b.fit_of(&inputs, &donated, &results, None)?, bytes))
}

/// The sizes of a model's weights in its files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredWeights {
    /// Bytes in the files.
    pub bytes: u64,
    /// Elements of matrices, which may be quantised.
    pub elements: u64,
    /// Bytes of the matrices in the files.
    pub matrices: u64,
    /// Bytes of tensors that are decoded to f32 when the model is loaded, after decoding.
    pub decoded: u64,
}

impl ModelFile {
    /// The sizes of the weights, from the headers of the files.
    pub fn stored(&self) -> StoredWeights {
        let mut s = StoredWeights::default();
        let mut add = |bytes: usize, elements: usize, rank: usize| {
            s.bytes += bytes as u64;
            if rank > 1 {
                s.elements += elements as u64;
                s.matrices += bytes as u64;
            }
        };
        match &self.source {
            Source::Gguf(file) => {
                for t in file.tensors() {
                    add(t.data.len(), t.shape().iter().product(), t.shape().len());
                }
                let load_only = file.tensors().iter().filter(|t| matches!(t.ty(), GgmlType::LoadOnly(_)));
                s.decoded = load_only.map(|t| 4 * t.shape().iter().product::<usize>() as u64).sum();
            }
            Source::Folder(folder) => {
                folder.sizes().for_each(|(bytes, dims)| add(bytes, dims.iter().product(), dims.len()))
            }
        }
        s
    }
}

//! `halcyon fit` for language models, and the check of the memory before a model is loaded.

use super::place::{self, Devices};
use super::speculate::Draft;
use super::{ONE_WAY, cache_types, context_of, hub, tokenizer};
use crate::args::{FitArgs, Mtp};
use crate::cmd::{backend_json, backend_text};
use crate::report::{self, size, table};
use halcyon::host::{self, MemorySampler};
use halcyon::{Backend, DType, Error, Result};
use halcyon_formats::foreign::{self, Foreign};
use halcyon_formats::sniff::{self, Kind};
use halcyon_models::fit::{self, MemoryNeed, StepSize, StoredWeights, generation, verification};
use halcyon_models::{Decoder, EngineOptions, LoadOptions, Lora, ModelFile, SpeculationOptions, cache_name};
use serde_json::{Value, json};
use std::fmt::Write;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

/// Types of weights that are suggested, and their bits per weight. Those of mixtures are what llama.cpp's
/// choice of types gives for models of common sizes.
const TYPES: [(&str, f64); 5] =
    [("q8_0", 8.5), ("q6_k", 6.57), ("q5_k_m", 5.7), ("q4_k_m", 4.85), ("q4_0", 4.55)];
/// Types of the cache that are suggested.
const CACHES: [DType; 2] = [DType::F32, DType::F16];

/// Whether a path is a language model's: a GGUF file, or a folder. The name counts too, so that an empty file
/// is called what it was meant to be.
pub(crate) fn is_model(path: &Path) -> bool {
    let mut head = [0; 4];
    let named = |e: &std::ffi::OsStr| e.eq_ignore_ascii_case("gguf") || e.eq_ignore_ascii_case("safetensors");
    hub::is_name(path)
        || path.is_dir()
        || path.extension().is_some_and(named)
        || std::fs::File::open(path).and_then(|mut f| f.read_exact(&mut head)).is_ok()
            && sniff::kind(&head) == Some(Kind::Gguf)
}

/// The error `e` of a file that is no ONNX model, if the file cannot have been meant as one either.
pub(crate) fn no_model(path: &Path, e: Error) -> Error {
    let mut head = vec![];
    let read = std::fs::File::open(path).and_then(|f| f.take(1 << 16).read_to_end(&mut head));
    match (&e, read.ok().and_then(|_| foreign::kind(&head))) {
        (Error::Format { .. }, Some(k @ (Foreign::Text | Foreign::Json | Foreign::Empty))) => Error::Format {
            file: path.display().to_string(),
            what: format!(
                "not an ONNX model and not a GGUF file: this is {k}. Give a model's file, or a folder with \
                 config.json and safetensors files"
            ),
        },
        _ => e,
    }
}

/// The free memory of a device and of the host.
#[derive(Clone, Copy)]
struct Room {
    free: Option<u64>,
    total: Option<u64>,
    host: Option<(u64, u64)>,
    /// Whether the device's buffers are in host memory.
    shared: bool,
}

impl Room {
    fn of(b: &Backend) -> Room {
        let d = b.device();
        Room {
            free: d.available(),
            total: d.memory().limit.or(d.info().total_memory),
            host: host::memory(),
            shared: d.info().unified_memory,
        }
    }
}

/// Refuses a model whose decoded weights the host has no memory for.
///
/// # Errors
/// `Error::OutOfMemory` with what to change.
pub(super) fn check_host(file: &ModelFile) -> Result<()> {
    let decoded = file.stored().decoded;
    // Tensors whose type is not computed with are decoded when the model is loaded.
    match host::memory() {
        Some((free, total)) if decoded > free => Err(Error::OutOfMemory {
            device: "the host".into(),
            what: "weights that are decoded to f32 when they are loaded".into(),
            requested: decoded,
            free,
            total,
            next: "Use a file whose weights have types that stay in their blocks, such as q4_k".into(),
        }),
        _ => Ok(()),
    }
}

/// Refuses a model that does not fit on its devices, before its weights are read or anything is allocated.
///
/// # Errors
/// `Error::OutOfMemory` with what to change.
pub(super) fn check(
    file: &ModelFile,
    decoder: &Decoder,
    load: LoadOptions<'_>,
    (options, work): (EngineOptions, Work),
) -> Result<()> {
    let stored = file.stored();
    let rooms: Vec<Room> = decoder.placement().devices.iter().map(Room::of).collect();
    let most = rough(decoder, &stored, options, work).saturating_add(adapters_of(load)?.saturating_mul(2));
    if rooms.iter().all(|r| r.free.is_none_or(|free| most <= free)) {
        return Ok(());
    }
    let needs = needs(decoder, options, &work.steps(decoder, options), false)?;
    match refused(&needs, decoder, &stored, &rooms, options) {
        Some(e) => Err(with_adapters(e, adapters_of(load)?)),
        None => Ok(()),
    }
}

/// Bytes of the adapters.
fn adapters_of(load: LoadOptions<'_>) -> Result<u64> {
    load.lora.map_or(Ok(0), Lora::bytes)
}

/// The error of a model whose weights have `bytes` of adapters.
fn with_adapters(e: Error, bytes: u64) -> Error {
    match e {
        Error::OutOfMemory { device, what, requested, free, total, next } if bytes > 0 => {
            let what = format!("{what}, with adapters of {bytes}");
            let next =
                format!("Leave out --lora, or merge the adapters (halcyon convert --lora). Or: {next}");
            Error::OutOfMemory { device, what, requested, free, total, next }
        }
        other => other,
    }
}

/// Refuses a model that does not fit with the steps that check up to `most` proposed tokens, and with its
/// draft if it has one. Without them it fits.
///
/// # Errors
/// `Error::OutOfMemory` with what to change.
pub(super) fn check_proposals(
    file: &ModelFile,
    (decoder, options): (&Decoder, EngineOptions),
    load: LoadOptions<'_>,
    (work, draft, most): (Work, Option<&Draft>, usize),
) -> Result<()> {
    let stored = file.stored();
    let more = draft.map_or(0, |d| rough(&d.decoder, &d.stored(), d.options, work));
    let more = adapters_of(load)?.saturating_mul(2).saturating_add(more);
    let rough = rough(decoder, &stored, options, work).saturating_add(more);
    let rooms: Vec<Room> = decoder.placement().devices.iter().map(Room::of).collect();
    if rooms.iter().all(|r| r.free.is_none_or(|free| rough <= free)) {
        return Ok(());
    }
    let followed = draft.is_some_and(Draft::is_own);
    let steps = work.with_proposals(decoder, options, most);
    let needs = needs(decoder, options, &steps, followed)?;
    let own = draft.map(|d| d.need(work, &steps, &needs[decoder.placement().head])).transpose()?;
    let own = own.map_or(0, |n| n.device());
    refused_with_draft(&needs, decoder, &stored, &rooms, (options, own)).map_or(Ok(()), Err)
}

/// [`refused`] next to a draft that takes `own` bytes of the device that computes the logits.
fn refused_with_draft(
    needs: &[MemoryNeed],
    decoder: &Decoder,
    stored: &StoredWeights,
    rooms: &[Room],
    (options, own): (EngineOptions, u64),
) -> Option<Error> {
    let mut rooms = rooms.to_vec();
    let room = &mut rooms[decoder.placement().head];
    room.free = room.free.map(|f| f.saturating_sub(own));
    let e = refused(needs, decoder, stored, &rooms, options)?;
    Some(match e {
        Error::OutOfMemory { device, what, requested, free, total, next } => {
            let draft =
                if own > 0 { format!(", next to its draft, which needs {own}") } else { String::new() };
            let (what, next) =
                (what + &draft, format!("Leave out --draft or --lookup, or give --mtp off. Or: {next}"));
            Error::OutOfMemory { device, what, requested, free, total, next }
        }
        other => other,
    })
}

/// The need of each device. `followed`: the model's own layer for further tokens follows it.
fn needs(
    decoder: &Decoder,
    options: EngineOptions,
    steps: &[StepSize],
    followed: bool,
) -> Result<Vec<MemoryNeed>> {
    let of = if followed { MemoryNeed::of_followed } else { MemoryNeed::of_device };
    (0..decoder.placement().devices.len()).map(|d| of(decoder, d, options, steps)).collect()
}

/// The reason why a model does not fit on its devices, or `None` if it fits. Devices whose buffers are in
/// host memory share it.
fn refused(
    needs: &[MemoryNeed],
    decoder: &Decoder,
    stored: &StoredWeights,
    rooms: &[Room],
    options: EngineOptions,
) -> Option<Error> {
    let shared = |but: usize| {
        let others = needs.iter().zip(rooms).enumerate().filter(|(i, (_, r))| *i != but && r.shared);
        others.fold(0u64, |sum, (_, (n, _))| sum.saturating_add(n.device()))
    };
    needs.iter().zip(rooms).enumerate().find_map(|(i, (need, room))| {
        let taken = if room.shared { shared(i) } else { 0 };
        // What a limit leaves may be less than what the host has.
        let host = room.host.map_or(u64::MAX, |h| h.0).saturating_sub(taken);
        let free = room.free.map(|f| if taken > 0 { f.min(host) } else { f });
        refusal(need, decoder, stored, &Room { free, ..*room }, options)
    })
}

/// What a model does, on which the sizes of its steps depend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    Generation,
    /// Parts of prompts have every size.
    Chat,
    /// The logits of all rows are computed.
    All,
}

impl Work {
    /// The steps without proposals.
    pub(super) fn steps(self, decoder: &Decoder, options: EngineOptions) -> Vec<StepSize> {
        match self {
            Work::Generation => generation(decoder, options),
            Work::Chat => fit::chat(decoder, options),
            Work::All => {
                generation(decoder, options).into_iter().map(|s| StepSize { logits: s.rows, ..s }).collect()
            }
        }
    }

    /// The steps with checks of up to `most` proposed tokens.
    pub(super) fn with_proposals(
        self,
        decoder: &Decoder,
        options: EngineOptions,
        most: usize,
    ) -> Vec<StepSize> {
        [self.steps(decoder, options), verification(options, most)].concat()
    }
}

/// More than the model needs, computed from its sizes alone: planning takes a while, and most models are far
/// smaller than the memory.
fn rough(d: &Decoder, stored: &StoredWeights, o: EngineOptions, work: Work) -> u64 {
    let layout = o.layout();
    let cache = d.cache_shapes(layout).iter().fold(0u64, |sum, s| sum.saturating_add(s.bytes() as u64));
    let widest = d.spec.layers.iter().map(|l| l.inner).max().unwrap_or(0).max(d.spec.hidden);
    let rows = o.chunk.max(o.sequences) as u64;
    let logits = if work == Work::All { rows } else { o.sequences as u64 } * d.spec.vocabulary as u64 * 4;
    // The steps of a chat have together twice the rows of the largest.
    let times = if work == Work::Chat { 2 } else { 1 };
    let plans = rows.saturating_mul(widest as u64).saturating_mul(64 * 4 * times);
    let weights = stored.bytes.saturating_add(stored.decoded).saturating_mul(2);
    [weights, cache, cache / 4, plans, logits, logits, logits]
        .into_iter()
        .fold(256 << 20, u64::saturating_add)
}

/// The reason why a model does not fit, or `None` if it fits.
fn refusal(
    need: &MemoryNeed,
    decoder: &Decoder,
    stored: &StoredWeights,
    room: &Room,
    options: EngineOptions,
) -> Option<Error> {
    let (free, asked) = (room.free?, need.device());
    let backend = &decoder.placement().devices[need.index];
    if asked <= free {
        return None;
    }
    Some(Error::OutOfMemory {
        device: backend.id().to_string(),
        what: format!(
            "the model: weights {}, cache for {} positions {}, plans {}{}",
            need.copied.saturating_add(need.packed),
            options.positions,
            need.cache,
            need.plans.saturating_add(need.io),
            backend.device().unknown_free()
        ),
        requested: asked,
        free,
        total: room.total.unwrap_or(free),
        next: advice(need, decoder, stored, free, options),
    })
}

/// What to change so that a model fits into `free` bytes.
fn advice(
    need: &MemoryNeed,
    decoder: &Decoder,
    stored: &StoredWeights,
    free: u64,
    options: EngineOptions,
) -> String {
    let mut ways = vec![];
    let each = need.largest_context(decoder, options, free);
    if each > 0 && need.position > 0 {
        ways.push(format!("give --context {each} (the largest that fits)"));
    }
    if options.cache == DType::F32.into() {
        let f16 = EngineOptions { cache: DType::F16.into(), ..options };
        let most = need.largest_context(decoder, f16, free);
        match most.saturating_mul(options.sequences) >= options.positions {
            true => ways.push("give --kv-dtype f16".into()),
            false if most > each => ways.push(format!("give --kv-dtype f16 --context {most}")),
            false => {}
        }
    }
    let smaller = quantised(need, stored);
    let how = |q: &Quantised| format!("halcyon quantize IN OUT --type {}", q.name);
    if let Some(q) = smaller.iter().find(|q| q.device <= free) {
        let then = size(q.device);
        ways.push(format!("use weights in {}, with which it takes about {then} ({})", q.name, how(q)));
    } else if let Some(q) = smaller.last().filter(|_| each == 0) {
        let saved = need.device().saturating_sub(q.device);
        let less = MemoryNeed { packed: need.packed.saturating_sub(saved), ..need.clone() };
        let most = less.largest_context(decoder, options, free);
        if most > 0 {
            ways.push(format!("use weights in {} with --context {most} ({})", q.name, how(q)));
        }
    }
    // The buffers of the plan of a chunk grow with it.
    if options.chunk > 64 && need.device().saturating_sub(need.plans / 2) <= free {
        ways.push("give --chunk 64".into());
    }
    if ways.is_empty() {
        return "Use a smaller model, or a device with more memory".into();
    }
    let text = ways.join(", or ");
    text[..1].to_uppercase() + &text[1..]
}

/// The need with weights of another type.
struct Quantised {
    name: &'static str,
    weights: u64,
    device: u64,
}

/// The needs with smaller types of weights, largest first. They are estimates from the bits per weight.
fn quantised(need: &MemoryNeed, stored: &StoredWeights) -> Vec<Quantised> {
    if stored.elements == 0 {
        return vec![];
    }
    let now = stored.matrices as f64 * 8.0 / stored.elements as f64;
    let on_device = need.copied.saturating_add(need.packed);
    let smaller = TYPES.iter().filter(|(_, bits)| *bits < 0.95 * now);
    let of = |(name, bits): &(&'static str, f64)| {
        let weights = (stored.elements as f64 * bits / 8.0) as u64;
        // Weights that a device reads in place may be packed when they are quantised.
        let then = if need.in_place > on_device { weights } else { (on_device as f64 * bits / now) as u64 };
        Quantised { name, weights, device: need.device().saturating_sub(on_device).saturating_add(then) }
    };
    smaller.map(of).collect()
}

/// What `fit` found.
struct Report<'a> {
    a: &'a FitArgs,
    file: &'a ModelFile,
    decoder: &'a Decoder,
    options: EngineOptions,
    stored: StoredWeights,
    steps: Vec<StepSize>,
    /// Of each device.
    needs: Vec<MemoryNeed>,
    /// The same for a chat.
    chat: Vec<MemoryNeed>,
    /// Bytes of the adapters, which are part of the weights.
    adapters: u64,
    /// The need of the draft on the device that computes the logits, and the bytes of its files.
    draft: Option<(MemoryNeed, u64)>,
    /// Whether this is the model's own layer for further tokens.
    own: bool,
    rooms: Vec<Room>,
    placement: Value,
    placed: String,
    /// Anonymous memory of the process, and pages of the program's files.
    process: (u64, u64),
    /// The peak of anonymous memory while the plans are made.
    planning: u64,
    refused: Option<Error>,
}

pub(crate) fn main(a: &FitArgs) -> Result<u8> {
    a.backend.check()?;
    if a.train || !a.input.inputs.is_empty() {
        let what = if a.train { "--train" } else { "--input" };
        return Err(Error::argument(what, "a language model has no such option; see --context and --batch"));
    }
    let l = &a.language;
    let chunk = l.cache.chunk()?;
    let file = ModelFile::open(&hub::local(&a.model, &l.hub)?)?;
    let mut devices = Devices::open(&l.place, &a.backend, &file)?;
    let batch = a.batch.unwrap_or(1) as usize;
    let each = context_of(&file, l.cache.context)?;
    let options = EngineOptions {
        sequences: batch,
        positions: each.saturating_mul(batch),
        cache: cache_types(&l.cache, "f16")?,
        chunk,
        ..EngineOptions::default()
    };
    check_host(&file)?;
    let lora = super::adapters(&l.lora, &l.hub, &file)?;
    let adapters = lora.as_ref().map_or(Ok(0), Lora::bytes)?;
    let load = LoadOptions { lora: lora.as_ref(), fixed: true, ..LoadOptions::from(each) };
    let loaded = devices.load(&file, load, options, Work::Generation);
    // A generation has the tokenizer in memory too.
    let tokens = match file.tokenizer()? {
        Some(_) => Some(tokenizer(&file)?),
        None => None,
    };
    let (decoder, refused) = match loaded {
        Ok(decoder) => (decoder, None),
        Err(e @ Error::OutOfMemory { .. }) => (devices.unchecked(&file, load, options)?, Some(e)),
        Err(e) => return Err(e),
    };
    let rooms: Vec<Room> = decoder.placement().devices.iter().map(Room::of).collect();
    let most = SpeculationOptions::default().most;
    let draft = match &l.draft {
        Some(_) if l.mtp.mtp == Mtp::On => return Err(Error::argument("--mtp", ONE_WAY)),
        Some(p) => Some(Draft::open(p, &l.hub, &file, (&decoder, options))?),
        None if l.mtp.mtp == Mtp::On => Draft::own(Mtp::On, &file, (&decoder, options), load)?,
        None => Draft::own_checked(l.mtp.mtp, &file, (&decoder, options), load, (Work::Generation, most))?,
    };
    // The decoder has the adapters' values. What reading them and building the tokenizer takes for a while is
    // free before the first plan is made.
    drop(lora);
    halcyon::hal::heap::trim();
    let watch = MemorySampler::start(Duration::from_millis(1));
    let steps = |work: Work| match &draft {
        Some(_) => work.with_proposals(&decoder, options, most),
        None => work.steps(&decoder, options),
    };
    let (steps, in_chat) = (steps(Work::Generation), steps(Work::Chat));
    let own = draft.as_ref().is_some_and(Draft::is_own);
    let needs = needs(&decoder, options, &steps, own)?;
    let head = decoder.placement().head;
    let of_draft =
        |d: &Draft| Ok::<_, Error>((d.need(Work::Generation, &steps, &needs[head])?, d.stored().bytes));
    // Its description stays in memory, as in a generation.
    let drafts = draft.as_ref().map(of_draft).transpose()?;
    let stored = file.stored();
    let refused = match (refused, &drafts) {
        (None, Some((d, _))) => refused_with_draft(&needs, &decoder, &stored, &rooms, (options, d.device())),
        (refused, _) => refused,
    };
    halcyon::hal::heap::trim();
    let anonymous = host::anonymous().unwrap_or(0);
    let process = (anonymous, report::program_memory().unwrap_or(0));
    drop(tokens);
    let planning = watch.map_or(0, |w| {
        w.stop();
        w.peak().bytes
    });
    // Planned last, because what planning takes is measured.
    let chat = in_a_chat((&decoder, options), &in_chat, draft.as_ref().zip(drafts.as_ref().map(|d| &d.0)))?;
    let r = Report {
        a,
        file: &file,
        decoder: &decoder,
        options,
        stored,
        steps,
        needs,
        chat,
        adapters,
        draft: drafts,
        own,
        rooms,
        placement: place::to_json(&decoder, options, devices.why()),
        placed: place::text(&decoder, options, devices.why()),
        process,
        planning,
        refused,
    };
    if a.json {
        report::print_json(&r.json())?;
        return Ok(r.refused.map_or(0, |e| e.exit_code().clamp(1, 255) as u8));
    }
    report::print(&r.text())?;
    r.refused.map_or(Ok(0), Err)
}

/// The need of each device in a chat. A draft comes with its need in a generation; what it takes more in a
/// chat counts as plans.
fn in_a_chat(
    (decoder, options): (&Decoder, EngineOptions),
    steps: &[StepSize],
    draft: Option<(&Draft, &MemoryNeed)>,
) -> Result<Vec<MemoryNeed>> {
    let mut all = needs(decoder, options, steps, draft.is_some_and(|(d, _)| d.is_own()))?;
    let head = &mut all[decoder.placement().head];
    if let Some((d, usual)) = draft {
        let more = d.need(Work::Chat, steps, head)?.device().saturating_sub(usual.device());
        head.plans = head.plans.saturating_add(more);
    }
    Ok(all)
}

impl Report<'_> {
    /// The devices with their needs and the memory that they have.
    fn devices(&self) -> impl Iterator<Item = (&Backend, &MemoryNeed, &Room)> {
        let all = self.needs.iter().zip(&self.rooms);
        self.decoder.placement().devices.iter().zip(all).map(|(b, (n, r))| (b, n, r))
    }

    fn several(&self) -> bool {
        self.needs.len() > 1
    }

    fn sum(&self, of: impl Fn(&MemoryNeed) -> u64) -> u64 {
        self.needs.iter().fold(0, |sum, n| sum.saturating_add(of(n)))
    }

    /// Bytes that the engine needs on the host.
    fn on_host(&self) -> u64 {
        // Each device packs its weights for itself, one after the other.
        let packing = self.needs.iter().map(|n| n.packing).max().unwrap_or(0);
        let shared = |of: &dyn Fn(&MemoryNeed) -> u64| {
            let here = self.devices().filter(|(_, _, r)| r.shared);
            here.fold(0u64, |sum, (_, n, _)| sum.saturating_add(of(n)))
        };
        let runs = shared(&MemoryNeed::written).saturating_add(self.sum(|n| n.host));
        let packs = shared(&|n| n.copied.saturating_add(n.packed).saturating_add(n.cache_written));
        let here = self.rooms[self.decoder.placement().head].shared;
        let draft = self.draft.as_ref().filter(|_| here).map_or(0, |(d, _)| d.written());
        runs.max(packs.saturating_add(packing)).saturating_add(draft)
    }

    /// Bytes of all devices at the peak.
    fn on_devices(&self) -> u64 {
        let draft = self.draft.as_ref().map_or(0, |(d, _)| d.device());
        self.sum(MemoryNeed::device).saturating_add(draft)
    }

    /// Bytes of all devices that a chat takes beside those of a generation.
    fn more_in_chat(&self) -> u64 {
        let sum = |all: &[MemoryNeed]| all.iter().fold(0u64, |s, n| s.saturating_add(n.device()));
        sum(&self.chat).saturating_sub(sum(&self.needs))
    }

    /// The last plan is made when everything else is there, so the peak has what planning takes for a while.
    fn anonymous(&self) -> u64 {
        self.on_host().saturating_add(self.process.0.max(self.planning))
    }

    /// With the pages of the program's and the weights' files.
    fn resident(&self) -> u64 {
        let files = self.draft.as_ref().map_or(0, |(_, bytes)| *bytes).saturating_add(self.stored.bytes);
        self.anonymous().saturating_add(self.process.1).saturating_add(files)
    }

    /// The largest context of each sequence that fits on all devices, by type of the cache. The cache of a
    /// draft has the chosen context.
    fn largest(&self, cache: DType) -> Option<usize> {
        let options = EngineOptions { cache: cache.into(), ..self.options };
        let head = self.decoder.placement().head;
        let draft = |i: usize| self.draft.as_ref().filter(|_| i == head).map_or(0, |(d, _)| d.device());
        let each = self.devices().enumerate().filter_map(|(i, (_, n, r))| {
            Some(n.largest_context(self.decoder, options, r.free?.saturating_sub(draft(i))))
        });
        each.min().filter(|n| *n < usize::MAX)
    }

    /// What the types of smaller weights would need, if there is one device.
    fn smaller(&self) -> Vec<Quantised> {
        match &self.needs[..] {
            [one] => quantised(one, &self.stored),
            _ => vec![],
        }
    }

    fn text(&self) -> String {
        let o = self.options;
        let parameters = self.stored.elements as f64 / 1e6;
        let mut out = format!(
            "model    {}: {}, {parameters:.1} million weights\n",
            report::path_text(&self.a.model),
            self.file.spec.family
        );
        match self.several() {
            true => out += &self.placed,
            false => out += &backend_text(self.decoder.backend()),
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "sizes    {} of {} positions, cache in {}, steps of up to {} tokens",
            if o.sequences == 1 { "one sequence".into() } else { format!("{} sequences", o.sequences) },
            o.positions / o.sequences,
            o.cache,
            o.chunk
        );
        let row = |what: &str, bytes: u64, note: String| vec![what.to_string(), size(bytes), note];
        let mut rows = vec![row("weights", self.stored.bytes, "in the files, which are mapped".into())];
        for (b, n, _) in self.devices() {
            let id = b.id();
            let parts = [
                (n.in_place, format!("of them read in place by {id}")),
                (n.copied, format!("copied to {id}")),
                (n.packed, format!("packed for the kernels of {id}")),
                (n.packing, "copies on the host while weights are packed".into()),
            ];
            rows.extend(parts.into_iter().filter(|(v, _)| *v > 0).map(|(v, note)| row("", v, note)));
        }
        let steps: Vec<String> = self.steps.iter().map(|s| s.rows.to_string()).collect();
        for (b, n, _) in self.devices() {
            let on = if self.several() { format!(", on {}", b.id()) } else { String::new() };
            rows.push(row("cache", n.cache, format!("{} for each position{on}", size(n.position))));
            let note = format!("buffers of the steps of {} tokens{on}", steps.join(" and of "));
            rows.push(row("plans", n.plans, note));
            rows.push(row("io", n.io, format!("inputs and results of a step{on}")));
        }
        let copies = if self.several() { "copies of logits and activations" } else { "copies of logits" };
        rows.push(row("host", self.sum(|n| n.host), copies.into()));
        if self.adapters > 0 {
            rows.push(row("adapters", self.adapters, "of --lora, part of what is copied or packed".into()));
        }
        let head = self.decoder.placement().head;
        if let Some((d, files)) = &self.draft {
            let on = format!("on {}", self.decoder.backend().id());
            if self.own {
                rows.push(row("mtp", d.device(), format!("the layer for further tokens, {on}")));
            } else {
                rows.push(row("draft", *files, "in its files".into()));
                rows.push(row("", d.device(), on));
            }
        }
        rows.push(row("chat", self.more_in_chat(), "more in a chat, whose prompts have any length".into()));
        rows.push(row("process", self.process.0, "program, tokenizer, descriptions and plans".into()));
        for (i, (b, n, _)) in self.devices().enumerate() {
            let draft = self.draft.as_ref().filter(|_| i == head).map_or(0, |(d, _)| d.device());
            let peak = n.device().saturating_add(draft);
            rows.push(row(if i == 0 { "peak" } else { "" }, peak, format!("on {}", b.id())));
        }
        rows.push(row("", self.anonymous(), "anonymous memory of the process".into()));
        rows.push(row("", self.resident(), "with the pages of mapped files".into()));
        out += &table(&rows);
        let of = |free: Option<u64>, total: Option<u64>| match (free, total) {
            (Some(f), Some(t)) => format!("{} free of {}", size(f), size(t)),
            (Some(f), None) => format!("{} free", size(f)),
            _ => "not known".into(),
        };
        for (b, _, r) in self.devices() {
            let on = if self.several() { format!(" on {}", b.id()) } else { String::new() };
            let _ = writeln!(out, "memory   {}{on}{}", of(r.free, r.total), b.device().unknown_free());
        }
        let _ = writeln!(out, "fits     {}", if self.refused.is_none() { "yes" } else { "no" });
        let largest: Vec<String> = CACHES
            .iter()
            .filter_map(|c| Some(format!("{} with a cache in {c}", self.largest(*c)?)))
            .collect();
        if !largest.is_empty() {
            let made = self.file.spec.context;
            let _ = writeln!(out, "largest context {}; the model was made for {made}", largest.join(", "));
        }
        let id = self.decoder.backend().id();
        for q in self.smaller() {
            let _ = writeln!(
                out,
                "with weights in {}: about {} of weights, {} on {id}",
                q.name,
                size(q.weights),
                size(q.device)
            );
        }
        out
    }

    fn json(&self) -> Value {
        let (o, first) = (self.options, &self.rooms[self.decoder.placement().head]);
        let largest: serde_json::Map<String, Value> =
            CACHES.iter().map(|c| (c.to_string(), json!(self.largest(*c)))).collect();
        let smaller: Vec<Value> = self
            .smaller()
            .iter()
            .map(|q| {
                let fits = first.free.is_none_or(|f| q.device <= f);
                json!({ "type": q.name, "weights": q.weights, "device": q.device, "fits": fits })
            })
            .collect();
        let device = |(b, n, r): (&Backend, &MemoryNeed, &Room)| {
            json!({
                "device": b.id(), "in_place": n.in_place, "copied": n.copied, "packed": n.packed,
                "packing": n.packing, "cache": n.cache, "position": n.position, "plans": n.plans, "io": n.io,
                "peak": n.device(), "free": r.free, "total": r.total, "device_is_host": r.shared,
            })
        };
        // Of several devices together.
        json!({
            "model": report::path(&self.a.model),
            "architecture": self.file.spec.family,
            "backend": backend_json(self.decoder.backend()),
            "placement": self.placement,
            "devices": self.devices().map(device).collect::<Vec<Value>>(),
            "context": o.positions / o.sequences,
            "batch": o.sequences,
            "kv_dtype": (o.cache.keys == o.cache.values).then(|| cache_name(o.cache.keys)),
            "cache_type_k": cache_name(o.cache.keys),
            "cache_type_v": cache_name(o.cache.values),
            "chunk": o.chunk,
            "weights": {
                "stored": self.stored.bytes, "in_place": self.sum(|n| n.in_place),
                "device": self.sum(|n| n.copied), "packed": self.sum(|n| n.packed),
                "packing": self.sum(|n| n.packing),
            },
            "cache": { "bytes": self.sum(|n| n.cache), "position": self.sum(|n| n.position) },
            "plans": self.sum(|n| n.plans),
            "chat": self.more_in_chat(),
            "io": self.sum(|n| n.io),
            "host": self.sum(|n| n.host),
            "adapters": self.adapters,
            "draft": self.draft.as_ref().map(|(d, files)| {
                json!({ "device": d.device(), "stored": files, "own_layer": self.own })
            }),
            "peak": {
                "device": self.on_devices(), "process": self.process.0, "planning": self.planning,
                "anonymous": self.anonymous(), "with_file_pages": self.resident(),
            },
            "memory": {
                "device_free": first.free, "device_total": first.total,
                "host_free": first.host.map(|h| h.0), "host_total": first.host.map(|h| h.1),
                "device_is_host": first.shared,
            },
            "fits": self.refused.is_none(),
            "error": self.refused.as_ref().map(report::error_json),
            "largest_context": largest,
            "quantised": smaller,
        })
    }
}

//! A model, its tokenizer and its cache in one value.

use crate::batch::{Batch, Event, Request};
use crate::decoder::Decoder;
use crate::device_sample::Scores;
use crate::engine::{Engine, EngineOptions, Feed, Pending};
use crate::fit::{MemoryNeed, generation, verification};
use crate::generate::{Finish, GenerateOptions, Generation, Piece, Session, generate};
use crate::model::ModelFile;
use crate::speculate::{Speculation, SpeculationOptions};
use halcyon::Backend;
use halcyon::ir::error::{Error, Result};
use halcyon_text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// What a generation begins with.
#[derive(Clone, Debug)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Prompt {
        Prompt::Text(text.into())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Prompt {
        Prompt::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Prompt {
        Prompt::Tokens(tokens)
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Prompt {
        Prompt::Tokens(tokens.into())
    }
}

/// What [`Generator::open`] makes. Options of an engine become these, with the defaults for the rest.
#[derive(Clone, Copy, Debug)]
pub struct GeneratorOptions {
    pub engine: EngineOptions,
    /// Whether the model's own layer for further tokens (MTP) proposes tokens, which leaves the texts the
    /// same. A model without such a layer has no proposals, and so has one whose layer lacks a tensor, or
    /// does not fit into the device's memory next to the model.
    pub further_tokens: bool,
    /// How many tokens the layer proposes.
    pub speculation: SpeculationOptions,
}

impl Default for GeneratorOptions {
    fn default() -> GeneratorOptions {
        GeneratorOptions::from(EngineOptions::default())
    }
}

impl From<EngineOptions> for GeneratorOptions {
    fn from(engine: EngineOptions) -> GeneratorOptions {
        GeneratorOptions { engine, further_tokens: true, speculation: SpeculationOptions::default() }
    }
}

/// Generates text with a model. It owns the model's weights, its cache, its tokenizer and its chat template.
#[derive(Debug)]
pub struct Generator {
    engine: Engine,
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
    speculation: Option<Speculation>,
}

impl Generator {
    /// Loads a GGUF file or a folder. The longest sequence has as many positions as the cache, but at most as
    /// many as the model was made for. [`Generator::speculation`] tells whether the model's own layer for
    /// further tokens is used.
    ///
    /// # Errors
    /// Errors of reading, of the tokenizer or template, and of the device; `Error::Argument` for a number of
    /// proposed tokens outside of 1 to 15.
    pub fn open(path: &Path, backend: &Backend, options: impl Into<GeneratorOptions>) -> Result<Generator> {
        let GeneratorOptions { engine: options, further_tokens, speculation } = options.into();
        let file = ModelFile::open(path)?;
        let context = options.positions.min(file.spec.context);
        let decoder = file.load(backend, context)?;
        let layer = match further_tokens {
            true => own_layer(&file, &decoder, options, speculation.most),
            false => None,
        };
        let mut engine = Engine::new(Arc::new(decoder), options)?;
        let ahead = layer.map(|l| Speculation::ahead(Arc::new(l), &mut engine, speculation)).transpose()?;
        let tokenizer = file.tokenizer()?;
        let template = match &tokenizer {
            Some(t) => match file.template(t) {
                // Base models have none.
                Err(Error::Unsupported { .. }) => None,
                other => Some(other?),
            },
            None => None,
        };
        Ok(Generator { speculation: ahead, ..Generator::new(engine, tokenizer, template) })
    }

    /// A generator of parts. Without a tokenizer, prompts and answers are token ids only.
    pub fn new(engine: Engine, tokenizer: Option<Tokenizer>, template: Option<ChatTemplate>) -> Generator {
        Generator { engine, tokenizer: tokenizer.map(Arc::new), template, speculation: None }
    }

    /// The engine, whose sequences generations use from 0 on.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Generates with proposals of a draft from now on, or without: the texts stay the same. Returns what was
    /// used until now. For batches, a draft model needs as many sequences as the generator's engine.
    pub fn speculate(&mut self, with: impl Into<Option<Speculation>>) -> Option<Speculation> {
        std::mem::replace(&mut self.speculation, with.into())
    }

    /// The draft in use, with what it brought so far ([`Speculation::stats`]).
    pub fn speculation(&self) -> Option<&Speculation> {
        self.speculation.as_ref()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_deref()
    }

    fn need_tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer().ok_or_else(|| {
            Error::unsupported("text with a model that has no tokenizer", "Give the prompt as token ids")
        })
    }

    /// The tokens of a prompt. The beginning of a text gets the model's special tokens.
    ///
    /// # Errors
    /// `Error::Unsupported` for text if the model has no tokenizer.
    pub fn tokens(&self, prompt: impl Into<Prompt>) -> Result<Vec<u32>> {
        match prompt.into() {
            Prompt::Tokens(t) => Ok(t),
            Prompt::Text(t) => self.need_tokenizer()?.encode(&t, true, true),
        }
    }

    /// The tokens of a chat, with the beginning of an answer.
    ///
    /// # Errors
    /// `Error::Unsupported` if the model has no chat template; errors of the template.
    pub fn chat_tokens(&self, messages: &[Message], thinking: Option<bool>) -> Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or_else(|| {
            Error::unsupported(
                "chats with a model that has no chat template",
                "Continue a text with `generate`",
            )
        })?;
        chat_tokens(self.need_tokenizer()?, template, messages, thinking)
    }

    /// Continues a prompt.
    ///
    /// # Errors
    /// Those of [`generate()`] and [`Generator::tokens`].
    pub fn generate(&mut self, prompt: impl Into<Prompt>, options: &GenerateOptions) -> Result<Generation> {
        let tokens = self.tokens(prompt)?;
        self.engine.truncate(0, 0);
        let (t, on_text) = (self.tokenizer.as_deref(), &mut |_: &str| ControlFlow::Continue(()));
        match &mut self.speculation {
            None => generate(&mut self.engine, 0, t, &tokens, options, on_text),
            Some(s) => s.generate(&mut self.engine, 0, t, &tokens, options, on_text),
        }
    }

    /// Answers the last message of a chat.
    ///
    /// # Errors
    /// Those of [`generate()`] and [`Generator::chat_tokens`].
    pub fn chat(&mut self, messages: &[Message], options: &GenerateOptions) -> Result<Generation> {
        let tokens = self.chat_tokens(messages, None)?;
        self.generate(tokens, options)
    }

    /// Continues a prompt piece by piece: each item has a token and the text that is final with it. Dropping
    /// the iterator ends the generation.
    ///
    /// # Errors
    /// Those of [`generate()`] and [`Generator::tokens`]; errors of a step come as an item.
    pub fn stream(&mut self, prompt: impl Into<Prompt>, options: &GenerateOptions) -> Result<Pieces<'_>> {
        let tokens = self.tokens(prompt)?;
        self.engine.truncate(0, 0);
        let session = Session::new(self.tokenizer.clone(), &tokens, options)?;
        self.engine.check_prompt(&tokens)?;
        let speculation = self.speculation.as_mut();
        let (next, ready) = (tokens, VecDeque::new());
        Ok(Pieces {
            engine: &mut self.engine,
            speculation,
            session,
            next,
            ready,
            pending: None,
            begun: false,
            ended: false,
        })
    }

    /// Continues many prompts with the same options. The engine's sequences compute at the same time; a
    /// finished sequence takes the next prompt. Each result is the same as that of [`Generator::generate`]:
    /// every prompt's draws begin with the options' seed.
    ///
    /// # Errors
    /// Those of [`generate()`] and [`Generator::tokens`].
    pub fn batch<P: Into<Prompt>>(
        &mut self,
        prompts: impl IntoIterator<Item = P>,
        options: &GenerateOptions,
    ) -> Result<Vec<Generation>> {
        let request = |p: P| Ok(Request { prompt: self.tokens(p)?, options: options.clone() });
        let requests = prompts.into_iter().map(request).collect::<Result<Vec<_>>>()?;
        let mut out: Vec<Option<Generation>> = vec![None; requests.len()];
        self.batch_with(requests, &mut |id, event| match event {
            Event::Done(g) => {
                out[id] = Some(*g);
                Ok(())
            }
            Event::Failed(e) => Err(e),
            Event::Piece(_) => Ok(()),
        })?;
        out.into_iter().map(|g| g.ok_or_else(|| Error::internal("a request of a batch has no end"))).collect()
    }

    /// Continues many prompts, each with its own options. `on_event` gets the number of the request and what
    /// a step brought; an error of it ends the batch.
    ///
    /// # Errors
    /// Errors of a request's prompt or options, of the engine, and of `on_event`.
    pub fn batch_with(
        &mut self,
        requests: Vec<Request>,
        on_event: &mut dyn FnMut(usize, Event) -> Result<()>,
    ) -> Result<()> {
        let mut batch = self.new_batch();
        batch.speculate(self.speculation.take());
        let made = run(&mut batch, &mut self.engine, requests, on_event);
        self.speculation = batch.speculate(None);
        made
    }

    /// A batch without requests, for a caller that steps it with [`Generator::engine`].
    pub fn new_batch(&self) -> Batch {
        Batch::new(self.tokenizer.clone())
    }
}

/// The layer for further tokens of a model, if it has one that can be read, and the device has memory for
/// both. Without it, the model works as well.
fn own_layer(file: &ModelFile, decoder: &Decoder, options: EngineOptions, most: usize) -> Option<Decoder> {
    let layer = file.load_ahead(decoder, decoder.context()).ok().flatten()?;
    let fits = || -> Result<bool> {
        let Some(free) = decoder.backend().device().available() else { return Ok(true) };
        let steps = [generation(decoder, options), verification(options, most)].concat();
        let need = MemoryNeed::of_followed(decoder, decoder.placement().head, options, &steps)?;
        let own = MemoryNeed::of_ahead(&layer, options, &steps, &need)?;
        Ok(need.device().saturating_add(own.device()) <= free)
    };
    fits().is_ok_and(|fits| fits).then_some(layer)
}

fn run(
    batch: &mut Batch,
    engine: &mut Engine,
    requests: Vec<Request>,
    on_event: &mut dyn FnMut(usize, Event) -> Result<()>,
) -> Result<()> {
    requests.into_iter().try_for_each(|r| batch.push(engine, r).map(drop))?;
    while !batch.is_idle() {
        for (id, event) in batch.step(engine)? {
            on_event(id, event)?;
        }
    }
    Ok(())
}

/// The tokens of a chat, with the beginning of an answer.
///
/// # Errors
/// Errors of the template and the tokenizer.
pub fn chat_tokens(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    thinking: Option<bool>,
) -> Result<Vec<u32>> {
    let ids = tokenizer.special_ids();
    let token = |id: Option<u32>| id.and_then(|i| tokenizer.token_text(i)).map(str::to_string);
    let options = RenderOptions {
        add_generation_prompt: true,
        bos_token: token(ids.bos),
        eos_token: token(ids.eos),
        enable_thinking: thinking,
        ..RenderOptions::default()
    };
    let mut tokens = tokenizer.encode(&template.render(messages, &options)?, true, true)?;
    // Templates write the first token themselves, and the tokenizer adds it again.
    if let Some(bos) = ids.bos
        && tokens.starts_with(&[bos, bos])
    {
        tokens.remove(0);
    }
    Ok(tokens)
}

/// The pieces of a generation, computed as they are asked for.
#[derive(Debug)]
pub struct Pieces<'a> {
    engine: &'a mut Engine,
    speculation: Option<&'a mut Speculation>,
    session: Session<Arc<Tokenizer>>,
    /// Tokens to feed before the next one is chosen.
    next: Vec<u32>,
    /// Pieces of the last step.
    ready: VecDeque<Result<Piece>>,
    /// The step of the latest token.
    pending: Option<Pending>,
    /// Whether the prompt is computed.
    begun: bool,
    ended: bool,
}

impl Pieces<'_> {
    /// The text so far, without what may become a stop string. With a draft, it may be ahead of the pieces.
    pub fn text(&self) -> &str {
        self.session.text()
    }

    /// Why the text ended, if it did.
    pub fn finish(&self) -> Option<Finish> {
        self.session.finish().filter(|_| self.ready.is_empty())
    }

    fn step(&mut self) -> Result<Piece> {
        if let Some(piece) = self.ready.pop_front() {
            return piece;
        }
        let tokens = std::mem::take(&mut self.next);
        if let (Some(s), true, &[token]) = (&mut self.speculation, self.begun, &tokens[..]) {
            let verified = s.step(self.engine, 0, &mut self.session, token)?;
            self.ready.extend(verified.accepted.into_iter().map(Ok));
            let last = verified.last.transpose().unwrap_or_else(|| Err(Error::internal("a step has no end")));
            self.next.extend(last.as_ref().ok().and_then(|p| p.token));
            self.ready.push_back(last);
            return self.step();
        }
        self.begun = true;
        let select = self.session.needed().filter(|_| self.engine.selects() && self.speculation.is_none());
        if let Some(k) = select {
            let scores = match self.pending.take() {
                Some(p) => Scores::Selected(vec![self.engine.finish_largest(&p)?]),
                None => {
                    let feed = [Feed { sequence: 0, tokens: &tokens, all: false }];
                    Scores::All(self.engine.feed(&feed)?.pop().unwrap_or_default())
                }
            };
            let (piece, pending) = self.session.next_ahead(self.engine, 0, &scores, k)?;
            self.pending = pending;
            return Ok(piece);
        }
        let logits = self.engine.feed(&[Feed { sequence: 0, tokens: &tokens, all: false }])?;
        let full = self.engine.length(0) >= self.engine.context();
        let piece = self.session.next(logits.first().map_or(&[], Vec::as_slice), full)?;
        self.next.extend(piece.token);
        Ok(piece)
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.ended {
            return None;
        }
        let piece = self.step();
        self.ended = !matches!(&piece, Ok(p) if p.finish.is_none());
        Some(piece)
    }
}

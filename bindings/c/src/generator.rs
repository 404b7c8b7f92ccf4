//! Language models: text in, text out.

use crate::backend::HalcyonBackend;
use crate::guard::{Failure, HalcyonStatus, guard};
use crate::pointer::{Out, free, get, slice, text};
use halcyon_models::{EngineOptions, Finish, GenerateOptions, Generator, ModelFile, Sampling};
use halcyon_text::Message;
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::{Mutex, TryLockError};

/// A language model with its cache and its tokenizer. Any thread may use a handle of this type. While a call
/// generates, another call with the same handle fails with `HALCYON_STATUS_BUSY`.
#[derive(Debug)]
pub struct HalcyonGenerator {
    generator: Mutex<Generator>,
}

/// How text is generated. `halcyon_generate_options_init` sets the default values.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HalcyonGenerateOptions {
    /// The most tokens to generate; 0: until the text ends or the context is full.
    pub max_tokens: usize,
    /// Logits are divided by this. 0: always the most probable token, and nothing is drawn.
    pub temperature: f32,
    /// Only so many of the most probable tokens; 0: all.
    pub top_k: usize,
    /// Only the most probable tokens whose probabilities reach this sum; 1: all.
    pub top_p: f32,
    /// Only tokens that are at least this factor as probable as the most probable one; 0: all.
    pub min_p: f32,
    /// Positive logits of tokens that occurred are divided by this, negative ones multiplied; 1: none.
    pub repeat_penalty: f32,
    /// Equal seeds give equal draws.
    pub seed: u64,
    /// Texts at which the generation ends. They are not part of the result. NULL if `stop_count` is 0.
    pub stop: *const *const c_char,
    /// The number of texts in `stop`.
    pub stop_count: usize,
}

/// A message of a chat.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HalcyonMessage {
    /// `system`, `user` or `assistant`. Which ones exist depends on the model.
    pub role: *const c_char,
    /// The text of the message.
    pub content: *const c_char,
}

/// Why a generation ended.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalcyonFinish {
    /// The model ended the text, or a stop text appeared.
    Stop = 0,
    /// The limit of tokens is reached, or the context is full.
    Length = 1,
    /// The function that receives the text ended it.
    Cancelled = 2,
}

/// What a generation did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HalcyonGenerated {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were generated.
    pub tokens: usize,
    /// Why the generation ended.
    pub finish: HalcyonFinish,
}

/// Receives text as soon as it is final. `text` ends with NUL and has `length` bytes, because it may contain
/// NUL; it is valid during the call. `user` is the pointer that the caller of the generation gave. The
/// function returns false to end the generation. It must return normally (no exception, no `longjmp`), and it
/// must not free the generator.
pub type HalcyonTextFunction =
    Option<unsafe extern "C" fn(text: *const c_char, length: usize, user: *mut c_void) -> bool>;

/// Opens a language model: a GGUF file, or a folder in Hugging Face's layout. `context` is the most tokens of
/// a prompt and its continuation together, for which memory is reserved; 0 means 4096. A model that was made
/// for fewer tokens gets no more than that. The caller frees `*out` with `halcyon_generator_free`.
///
/// # Safety
/// `backend` is a backend, `path` is a string, `out` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_generator_open(
    backend: *const HalcyonBackend,
    path: *const c_char,
    context: usize,
    out: *mut *mut HalcyonGenerator,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees memory for a pointer, a backend and a string.
        let (out, backend, path) =
            unsafe { (Out::handle(out)?, get(backend, "backend")?, text(path, "path")?) };
        let mut options = EngineOptions::default();
        if context > 0 {
            options.positions = context;
        }
        let path = Path::new(path);
        // No sequence is longer than what the model was made for, so more memory would not be used.
        options.positions = options.positions.min(ModelFile::open(path)?.spec.context);
        let generator = Generator::open(path, &backend.backend, options)?;
        out.give(HalcyonGenerator { generator: Mutex::new(generator) });
        Ok(())
    })
}

/// Frees a generator. NULL is allowed.
///
/// # Safety
/// `generator` is NULL or a generator that was not freed yet, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_generator_free(generator: *mut HalcyonGenerator) {
    // SAFETY: the caller guarantees that this is the last use of the handle.
    unsafe { free(generator) }
}

/// Sets the default values of options.
///
/// # Safety
/// `options` points to a `HalcyonGenerateOptions`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_generate_options_init(
    options: *mut HalcyonGenerateOptions,
) -> HalcyonStatus {
    guard(|| {
        let s = Sampling::default();
        // SAFETY: the caller guarantees memory for the options.
        unsafe { Out::new(options, "options") }?.set(HalcyonGenerateOptions {
            max_tokens: 0,
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repeat_penalty: s.repeat_penalty,
            seed: s.seed,
            stop: std::ptr::null(),
            stop_count: 0,
        });
        Ok(())
    })
}

/// # Safety
/// `options` is NULL or points to options whose texts are strings.
unsafe fn options(options: *const HalcyonGenerateOptions) -> Result<GenerateOptions, Failure> {
    if options.is_null() {
        return Ok(GenerateOptions::default());
    }
    // SAFETY: the caller guarantees options.
    let o = unsafe { get(options, "options") }?;
    // SAFETY: the caller guarantees `stop_count` pointers.
    let stop = unsafe { slice(o.stop, o.stop_count, "options->stop") }?;
    // SAFETY: the caller guarantees that each pointer is a string.
    let one = |(i, s): (usize, &*const c_char)| unsafe { text(*s, &format!("options->stop[{i}]")) };
    Ok(GenerateOptions {
        max_tokens: (o.max_tokens > 0).then_some(o.max_tokens),
        sampling: Sampling {
            temperature: o.temperature,
            top_k: o.top_k,
            top_p: o.top_p,
            min_p: o.min_p,
            repeat_penalty: o.repeat_penalty,
            seed: o.seed,
            ..Sampling::default()
        },
        stop: stop.iter().enumerate().map(|p| one(p).map(String::from)).collect::<Result<_, _>>()?,
        ..GenerateOptions::default()
    })
}

/// What a call of a generation gets besides its prompt.
struct Call {
    options: *const HalcyonGenerateOptions,
    on_text: HalcyonTextFunction,
    user: *mut c_void,
    result: *mut HalcyonGenerated,
}

impl Call {
    /// Generates from the tokens of a prompt.
    ///
    /// # Safety
    /// `generator` is a generator, the options are NULL or options, the function accepts the pointer of the
    /// user, the result is NULL or memory for one.
    unsafe fn run(
        self,
        generator: *const HalcyonGenerator,
        prompt: impl FnOnce(&Generator) -> Result<Vec<u32>, Failure>,
    ) -> Result<(), Failure> {
        // SAFETY: the caller guarantees a generator, and options or NULL.
        let (generator, options) = unsafe { (get(generator, "generator")?, options(self.options)?) };
        let on_text = self.on_text.ok_or_else(|| Failure::argument("`on_text` is NULL"))?;
        let result = match self.result.is_null() {
            true => None,
            // SAFETY: the caller guarantees memory for the result.
            false => Some(unsafe { Out::new(self.result, "result") }?),
        };
        let mut generator = match generator.generator.try_lock() {
            Ok(g) => g,
            // A generation that panicked leaves a cache that the next one empties.
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let text = "the generator is in use by another call; wait for its end, or open another one";
                return Err(Failure { status: HalcyonStatus::Busy, text: text.into() });
            }
        };
        let prompt = prompt(&generator)?;
        let (prompt_tokens, mut tokens, mut finish) = (prompt.len(), 0, Finish::Cancelled);
        for piece in generator.stream(prompt, &options)? {
            let piece = piece?;
            tokens += usize::from(piece.token.is_some());
            let end = piece.finish;
            let length = piece.text.len();
            let mut bytes = piece.text.into_bytes();
            bytes.push(0);
            // SAFETY: the text ends with NUL and lives until the function returns; the caller guarantees that
            // the function accepts the pointer of the user.
            let go_on = length == 0 || unsafe { on_text(bytes.as_ptr().cast(), length, self.user) };
            match end {
                Some(end) => finish = end,
                None if !go_on => break,
                None => {}
            }
        }
        let finish = match finish {
            Finish::Stop => HalcyonFinish::Stop,
            Finish::Length => HalcyonFinish::Length,
            Finish::Cancelled => HalcyonFinish::Cancelled,
        };
        if let Some(result) = result {
            result.set(HalcyonGenerated { prompt_tokens, tokens, finish });
        }
        Ok(())
    }
}

/// Continues a text. `on_text` receives the continuation piece by piece, with `user`. `options` may be NULL
/// for the default values; `result` may be NULL.
///
/// # Safety
/// `generator` is a generator, `prompt` is a string, `options` is NULL or points to options, `on_text`
/// accepts `user`, `result` is NULL or points to a `HalcyonGenerated`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_generator_generate(
    generator: *const HalcyonGenerator,
    prompt: *const c_char,
    options: *const HalcyonGenerateOptions,
    on_text: HalcyonTextFunction,
    user: *mut c_void,
    result: *mut HalcyonGenerated,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees a string.
        let prompt = unsafe { text(prompt, "prompt") }?;
        let call = Call { options, on_text, user, result };
        // SAFETY: the caller guarantees the other arguments.
        unsafe { call.run(generator, |g| Ok(g.tokens(prompt)?)) }
    })
}

/// Answers the last of `count` messages, with the model's chat template. The other arguments are those of
/// `halcyon_generator_generate`.
///
/// # Safety
/// `generator` is a generator, `messages` points to `count` messages of strings, `options` is NULL or points
/// to options, `on_text` accepts `user`, `result` is NULL or points to a `HalcyonGenerated`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn halcyon_generator_chat(
    generator: *const HalcyonGenerator,
    messages: *const HalcyonMessage,
    count: usize,
    options: *const HalcyonGenerateOptions,
    on_text: HalcyonTextFunction,
    user: *mut c_void,
    result: *mut HalcyonGenerated,
) -> HalcyonStatus {
    guard(|| {
        // SAFETY: the caller guarantees `count` messages.
        let messages = unsafe { slice(messages, count, "messages") }?;
        if messages.is_empty() {
            return Err(Failure::argument("`messages` is empty"));
        }
        let one = |(i, m): (usize, &HalcyonMessage)| -> Result<Message, Failure> {
            let name = |field: &str| format!("messages[{i}].{field}");
            // SAFETY: the caller guarantees strings.
            let (role, content) =
                unsafe { (text(m.role, &name("role"))?, text(m.content, &name("content"))?) };
            Ok(Message::new(role, content))
        };
        let messages = messages.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()?;
        let call = Call { options, on_text, user, result };
        // SAFETY: the caller guarantees the other arguments.
        unsafe { call.run(generator, |g| Ok(g.chat_tokens(&messages, None)?)) }
    })
}

//! Chat templates: they turn messages into the text that a model was trained on.
//!
//! A template is a Jinja program that comes with the model. It is rendered as Hugging Face's `transformers`
//! does it, by an interpreter that can read no files and whose work and output are limited.

mod clock;
mod filters;
mod guard;

use crate::value::Json;
use halcyon_ir::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::Write;

/// Longest template in bytes. Real ones have at most 30 KB.
const MAX_TEMPLATE: usize = 1 << 17;
/// Longest result in bytes beyond the length of what is passed in.
const MAX_OUTPUT: usize = 1 << 24;
/// Steps of the interpreter, one for each instruction and each 64 bytes, for the template itself, for each
/// message, and the number of input bytes for which there is one more.
const FUEL: u64 = 1_000_000;
const FUEL_PER_MESSAGE: u64 = 5_000;
const BYTES_PER_FUEL: u64 = 4;
/// Depth of nested macros.
const MAX_RECURSION: usize = 120;
/// The interpreter and the destructors of its values call themselves for nested ones. This is enough for all
/// that the limits above allow.
const STACK: usize = 1 << 28;
/// Name of the template in errors of the interpreter.
const NAME: &str = "chat template";

/// One message of a chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Json", into = "Json")]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`. Which ones exist depends on the template.
    pub role: String,
    /// A text, or a list of parts.
    pub content: Json,
    /// What the model thought before it answered. Templates call it `reasoning_content`, `reasoning` or
    /// `thinking`; it is passed under these three names.
    pub reasoning: Option<String>,
    /// Calls of tools that the model made.
    pub tool_calls: Option<Json>,
    /// The call that a message of role `tool` answers.
    pub tool_call_id: Option<String>,
    /// Who speaks, or the name of the tool.
    pub name: Option<String>,
    /// Further fields.
    pub extra: Vec<(String, Json)>,
}

impl Message {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: Json::String(content.into()), ..Message::default() }
    }

    fn to_template(&self) -> Value {
        let mut fields: Vec<(&str, Value)> =
            vec![("role", Value::from(self.role.as_str())), ("content", self.content.to_template())];
        if let Some(text) = &self.reasoning {
            fields.extend(THOUGHTS.map(|name| (name, Value::from(text.as_str()))));
        }
        if let Some(calls) = &self.tool_calls {
            fields.push(("tool_calls", parsed_arguments(calls).to_template()));
        }
        for (name, text) in [("tool_call_id", &self.tool_call_id), ("name", &self.name)] {
            fields.extend(text.as_ref().map(|t| (name, Value::from(t.as_str()))));
        }
        fields.extend(self.extra.iter().map(|(k, v)| (k.as_str(), v.to_template())));
        Value::from_pairs(fields)
    }

    fn size(&self) -> usize {
        let texts = [&self.reasoning, &self.tool_call_id, &self.name];
        let extra: usize = self.extra.iter().map(|(k, v)| k.len() + v.size()).sum();
        let calls = self.tool_calls.as_ref().map_or(0, Json::size);
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        self.role.len() + self.content.size() + texts + calls + extra
    }
}

const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl TryFrom<Json> for Message {
    type Error = Error;

    fn try_from(json: Json) -> Result<Message> {
        let Json::Object(fields) = json else {
            return Err(Error::argument("message", "a message is an object with the key 'role'"));
        };
        let mut m = Message::default();
        for (key, value) in fields {
            let text = |v: &Json| {
                let what = || Error::argument("message", format!("the value of '{key}' is not a text"));
                v.as_str().map(String::from).ok_or_else(what)
            };
            match key.as_str() {
                "role" => m.role = text(&value)?,
                "content" => m.content = value,
                _ if value.is_null() => {}
                "reasoning_content" | "reasoning" | "thinking" => m.reasoning = Some(text(&value)?),
                "tool_calls" => m.tool_calls = Some(value),
                "tool_call_id" => m.tool_call_id = Some(text(&value)?),
                "name" => m.name = Some(text(&value)?),
                _ => m.extra.push((key, value)),
            }
        }
        if m.role.is_empty() {
            return Err(Error::argument("message", "a message needs the key 'role', such as 'user'"));
        }
        Ok(m)
    }
}

impl From<Message> for Json {
    fn from(m: Message) -> Json {
        let mut fields = vec![("role".into(), Json::String(m.role)), ("content".into(), m.content)];
        let text = |name: &str, t: Option<String>| t.map(|t| (name.to_string(), Json::String(t)));
        fields.extend(text("reasoning_content", m.reasoning));
        fields.extend(m.tool_calls.map(|c| ("tool_calls".into(), c)));
        fields.extend(text("tool_call_id", m.tool_call_id));
        fields.extend(text("name", m.name));
        fields.extend(m.extra);
        Json::Object(fields)
    }
}

/// Clients send the arguments of a call as a text of JSON, and templates print them as an object.
fn parsed_arguments(calls: &Json) -> Json {
    let call = |c: &Json| match c {
        Json::Object(fields) => Json::Object(
            fields
                .iter()
                .map(|(k, v)| {
                    let v = match (k.as_str(), v) {
                        ("function", f) => parsed_arguments(&Json::Array(vec![f.clone()])).first(),
                        ("arguments", Json::String(s)) => match Json::parse(s) {
                            Ok(object @ Json::Object(_)) => object,
                            _ => v.clone(),
                        },
                        _ => v.clone(),
                    };
                    (k.clone(), v)
                })
                .collect(),
        ),
        other => other.clone(),
    };
    match calls {
        Json::Array(list) => Json::Array(list.iter().map(call).collect()),
        other => other.clone(),
    }
}

impl Json {
    fn first(self) -> Json {
        match self {
            Json::Array(mut list) if !list.is_empty() => list.swap_remove(0),
            other => other,
        }
    }
}

/// What a template is told beside the messages. A value of `None` is not defined in the template, except the
/// tools and documents, which are then `none`.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// The text ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// The text of the token that begins a text.
    pub bos_token: Option<String>,
    /// The text of the token that ends a text.
    pub eos_token: Option<String>,
    /// A list of tools that the model may call.
    pub tools: Option<Json>,
    /// A list of documents that the model may cite.
    pub documents: Option<Json>,
    /// Whether the model thinks before it answers.
    pub enable_thinking: Option<bool>,
    /// How much it thinks, such as `low`.
    pub reasoning_effort: Option<String>,
    /// The date of today as a text.
    pub date_string: Option<String>,
    /// Seconds since 1970 that templates see as the time; otherwise the time of the machine. In UTC.
    pub now: Option<i64>,
    /// Further variables. One with the name of an option replaces it.
    pub extra: Vec<(String, Json)>,
}

impl RenderOptions {
    fn to_template(&self, messages: &[Message]) -> Value {
        let or_none = |v: &Option<Json>| v.as_ref().map_or(Value::from(()), Json::to_template);
        let mut all: Vec<(&str, Value)> = vec![
            ("messages", Value::from(messages.iter().map(Message::to_template).collect::<Vec<_>>())),
            ("add_generation_prompt", Value::from(self.add_generation_prompt)),
            ("tools", or_none(&self.tools)),
            ("documents", or_none(&self.documents)),
        ];
        let texts = [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("reasoning_effort", &self.reasoning_effort),
            ("date_string", &self.date_string),
        ];
        all.extend(texts.iter().filter_map(|(k, v)| Some((*k, Value::from(v.as_deref()?)))));
        all.extend(self.enable_thinking.map(|b| ("enable_thinking", Value::from(b))));
        all.extend(self.extra.iter().map(|(k, v)| (k.as_str(), v.to_template())));
        Value::from_pairs(all)
    }

    fn size(&self) -> usize {
        let extra: usize = self.extra.iter().map(|(k, v)| k.len() + v.size()).sum();
        [&self.tools, &self.documents].into_iter().flatten().map(Json::size).sum::<usize>() + extra
    }
}

/// The template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// [`Error::Format`] with the line of a mistake, or for a template of more than 128 KiB.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        if source.len() > MAX_TEMPLATE {
            let what = format!("it has {} bytes, but at most {MAX_TEMPLATE} are allowed", source.len());
            return Err(Error::Format { file: NAME.into(), what });
        }
        let mut env = environment();
        let text = guard::prepare(&without_generation_tags(source))?;
        let env = on_large_stack(move || {
            let fail = |e: minijinja::Error| Error::Format { file: NAME.into(), what: describe(&e) };
            env.add_template_owned(NAME, text).map_err(fail)?;
            Ok(env)
        })?;
        Ok(ChatTemplate { env, source: source.into() })
    }

    /// The template that came with a tokenizer.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it came with none, and those of [`ChatTemplate::new`].
    pub fn of(tokenizer: &crate::Tokenizer) -> Result<ChatTemplate> {
        match tokenizer.chat_template() {
            Some(source) => ChatTemplate::new(source),
            None => Err(Error::unsupported(
                "chat with a model that has no chat template",
                "It continues text but does not follow a chat. Use `generate`, or give a template file",
            )),
        }
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of the messages.
    ///
    /// # Errors
    /// [`Error::Argument`] if the template rejects the messages or fails on them, [`Error::Endless`] if it
    /// does not come to an end, [`Error::Format`] for a result that is too long.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let size = messages.iter().map(Message::size).sum::<usize>() + options.size();
        let fuel = FUEL + messages.len() as u64 * FUEL_PER_MESSAGE + size as u64 / BYTES_PER_FUEL;
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        let now = options.now.unwrap_or_else(clock::now);
        env.add_function("strftime_now", move |format: &str| clock::format(now, format));
        let context = options.to_template(messages);
        on_large_stack(move || {
            let mut out = Limited { bytes: vec![], max: MAX_OUTPUT + size, full: false };
            let result =
                env.get_template(NAME).and_then(|t| t.render_captured_to(context, &mut out).map(drop));
            match result {
                Ok(()) => Ok(String::from_utf8_lossy(&out.bytes).into_owned()),
                Err(_) if out.full => {
                    let what = format!("the result has more than {} bytes; the template is broken", out.max);
                    Err(Error::Format { file: NAME.into(), what })
                }
                Err(e) if e.kind() == ErrorKind::OutOfFuel => Err(Error::Endless {
                    node: NAME.into(),
                    iterations: fuel,
                    next: "Its loops may be endless. Use the template of the model's authors".into(),
                }),
                Err(e) => Err(Error::argument(NAME, describe(&e))),
            }
        })
    }
}

/// Output that fails when it is full.
struct Limited {
    bytes: Vec<u8>,
    max: usize,
    full: bool,
}

impl Write for Limited {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        if data.len() > self.max - self.bytes.len() {
            self.full = true;
            return Err(std::io::Error::other("the output is full"));
        }
        self.bytes.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    // Each item is right by itself; the syntax has no mistake that could be reported.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(filters::method);
    env.set_recursion_limit(MAX_RECURSION);
    env.set_debug(true);
    env.set_formatter(filters::print);
    env.add_filter("tojson", filters::tojson);
    env.add_filter("format", filters::format);
    env.add_filter("indent", filters::indent);
    env.add_filter("without_namespaces", filters::without_namespaces);
    env.add_function("raise_exception", filters::raise_exception);
    env
}

/// Runs `f` on a thread with a large stack, so that no template can exhaust it.
fn on_large_stack<T: Send>(f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let ended = std::thread::scope(|s| {
        let thread = std::thread::Builder::new().name(NAME.into()).stack_size(STACK).spawn_scoped(s, f);
        thread.map(|t| t.join())
    });
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(Error::internal("the interpreter of chat templates panicked")),
        Err(e) => Err(Error::Io { path: NAME.into(), what: format!("no thread can be started: {e}") }),
    }
}

/// What went wrong, with the line of the template.
fn describe(e: &minijinja::Error) -> String {
    let what = e.detail().map_or_else(|| e.kind().to_string(), String::from);
    let line = e.line().map_or(String::new(), |l| format!(" (line {l} of the template)"));
    let source = std::error::Error::source(e).map_or(String::new(), |s| format!(": {s}"));
    format!("{what}{source}{line}")
}

/// `{% generation %}` marks what the model wrote, for training. Here it is a block without effect.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    use std::sync::OnceLock;
    static TAG: OnceLock<Option<regex::Regex>> = OnceLock::new();
    let tag = TAG.get_or_init(|| regex::Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").ok());
    let Some(tag) = tag else { return source.into() };
    tag.replace_all(source, |c: &regex::Captures<'_>| {
        let inside = if c.get(2).is_some() { "endif" } else { "if true" };
        format!("{}{inside}{}", &c[1], &c[3])
    })
}

/// Shared by the filters: an error of the interpreter.
fn invalid(what: impl Into<Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, what)
}

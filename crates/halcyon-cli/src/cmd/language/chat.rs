//! `halcyon chat`: a conversation.

use super::ask::Input;
use super::constrain::demand;
use super::interrupt::{self, Doing};
use super::speculate::{line, speculation};
use super::thinking::{Shown, Thoughts};
use super::{FINE, Running, options, start_with, times, write_piece};
use crate::args::ChatArgs;
use crate::report;
use halcyon::{Error, Result};
use halcyon_formats::{input, output};
use halcyon_models::{Finish, GenerateOptions, Speculation, chat_tokens, generate};
use halcyon_text::{ChatTemplate, Message, Tokenizer};
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const HELP: &str = "\
/help            this list
/save FILE       writes the messages to a JSON file
/load FILE       replaces the messages by those of a file
/retry           answers the last message again
/context         how full the context is
/system TEXT     replaces the first message, which tells the model how to behave
/thinking on|off lets the model think before it answers, if its template knows this
/thinking hide   does not print what the model thinks; /thinking show prints it
/quit            ends the chat
";

struct Chat {
    model: Running,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    options: GenerateOptions,
    speculation: Option<Speculation>,
    messages: Vec<Message>,
    thinking: Option<bool>,
    /// How thoughts are printed.
    shown: Shown,
    /// Whether nobody reads the answers any more.
    closed: bool,
    /// Tokens that the sequence holds.
    fed: Vec<u32>,
}

pub(crate) fn main(a: &ChatArgs) -> Result<u8> {
    let mut options = options(&a.sampling)?;
    let demand = demand(&a.sampling)?;
    let mut model = start_with(&a.language, None, FINE, Some(&a.speculation))?;
    let tokenizer = model.take_tokenizer()?;
    options.mask = demand.map(|d| d.mask(Some(&tokenizer))).transpose()?;
    let template = match &a.chat_template {
        Some(file) => ChatTemplate::new(&input::text(file)?)?,
        None => model.file.template(&tokenizer)?,
    };
    let speculation = speculation(&a.speculation, &mut model)?;
    interrupt::handle();
    let mut input = Input::open(a);
    let terminal = input.terminal;
    let shown = match (a.hide_thinking, std::io::stdout().is_terminal()) {
        (true, _) => Shown::Hidden,
        (false, true) => Shown::Dimmed,
        (false, false) => Shown::Plain,
    };
    let mut chat = Chat {
        model,
        tokenizer,
        template,
        options,
        speculation,
        messages: vec![],
        thinking: None,
        shown,
        closed: false,
        fed: vec![],
    };
    chat.set_system(a.system.as_deref());
    if terminal {
        report::note("/help lists the commands");
    }
    loop {
        interrupt::doing(if terminal { Doing::Waiting } else { Doing::Loading });
        let Some(typed) = input.next()? else { return Ok(0) };
        let text = typed.text.trim();
        if text.is_empty() {
            continue;
        }
        interrupt::doing(Doing::Answering);
        let done = match text.strip_prefix('/') {
            Some(command) if !typed.quoted => chat.command(command),
            _ => {
                chat.messages.push(Message::new("user", typed.text.as_str()));
                chat.answer().map(|()| false)
            }
        };
        match done {
            Ok(true) => return Ok(0),
            Ok(false) if chat.closed => return Ok(0),
            Ok(false) => {}
            // A mistake in one message does not end an interactive chat.
            Err(e) if terminal => report::fault(&report::message(&e)),
            Err(e) => {
                chat.rescue();
                return Err(e);
            }
        }
    }
}

/// A file for the messages of a chat that ends with an error.
fn rescue_file() -> PathBuf {
    let dir = halcyon::hal::cache::user_dir().unwrap_or_else(std::env::temp_dir);
    dir.join("chats").join(format!("chat-{}.json", std::process::id()))
}

impl Chat {
    fn set_system(&mut self, text: Option<&str>) {
        self.messages.retain(|m| m.role != "system");
        if let Some(t) = text.filter(|t| !t.is_empty()) {
            self.messages.insert(0, Message::new("system", t));
        }
    }

    /// Carries out a command of the chat. Returns whether it ends the chat.
    fn command(&mut self, line: &str) -> Result<bool> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("quit" | "exit" | "bye", _) => return Ok(true),
            ("help" | "?", _) => report::print(HELP)?,
            ("save" | "load", "") => {
                return Err(Error::argument(format!("/{name}"), "name a file"));
            }
            ("save", file) => {
                self.save(Path::new(file))?;
                report::note(&format!("{} messages saved", self.messages.len()));
            }
            ("load", file) => {
                let text = input::text(Path::new(file))?;
                let read: std::result::Result<Vec<Message>, _> = serde_json::from_str(&text);
                self.messages = read.map_err(|e| Error::Format { file: file.into(), what: e.to_string() })?;
                report::note(&format!("{} messages loaded", self.messages.len()));
            }
            ("retry", _) => {
                if self.messages.last().is_some_and(|m| m.role == "assistant") {
                    self.messages.pop();
                }
                if self.messages.last().is_none_or(|m| m.role != "user") {
                    return Err(Error::argument("/retry", "there is no message to answer"));
                }
                // Another draw.
                self.options.sampling.seed = self.options.sampling.seed.wrapping_add(1);
                self.answer()?;
            }
            ("context", _) => {
                let (used, all) = (self.fed.len(), self.model.engine.context());
                report::print(&format!("{used} of {all} positions, {} messages\n", self.messages.len()))?;
            }
            ("system", text) => self.set_system(Some(text)),
            ("thinking", "on") => self.thinking = Some(true),
            ("thinking", "off") => self.thinking = Some(false),
            ("thinking", "hide") => self.shown = Shown::Hidden,
            ("thinking", "show") => {
                self.shown = if std::io::stdout().is_terminal() { Shown::Dimmed } else { Shown::Plain };
            }
            ("thinking", _) => return Err(Error::argument("/thinking", "expected on, off, hide or show")),
            _ => {
                return Err(Error::argument(format!("/{name}"), "no such command; /help lists them"));
            }
        }
        Ok(false)
    }

    fn save(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.messages);
        let text = text.map_err(|e| Error::internal(e.to_string()))?;
        output::write(file, text.as_bytes())
    }

    /// Saves the messages before an error ends the chat.
    fn rescue(&self) {
        if !self.messages.iter().any(|m| m.role == "assistant") {
            return;
        }
        let file = rescue_file();
        let made = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        match made.map_err(|e| e.to_string()).and_then(|()| self.save(&file).map_err(|e| e.to_string())) {
            Ok(()) => {
                report::note(&format!("the messages are in {}; /load reads them", report::path_text(&file)))
            }
            Err(e) => report::warn(&format!("the messages could not be saved: {e}")),
        }
    }

    /// The tokens of all messages, with the beginning of an answer.
    fn prompt(&self) -> Result<Vec<u32>> {
        chat_tokens(&self.tokenizer, &self.template, &self.messages, self.thinking)
    }

    /// Answers the last message and prints the answer.
    fn answer(&mut self) -> Result<()> {
        let prompt = self.fitting_prompt()?;
        // What the sequence has in common with the prompt need not be computed again. At least one token
        // must be fed.
        let common = self.fed.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
        let common = common.min(prompt.len() - 1);
        // A model with recurrent layers cannot always go back, and then begins again.
        let common = self.model.engine.truncate(0, common);
        self.fed.truncate(common);
        self.options.past = prompt[..common].to_vec();
        let tail = self.tokenizer.decode(&prompt[prompt.len().saturating_sub(16)..], false);
        let mut thoughts = Thoughts::new(self.shown, Thoughts::begin_in(&tail));
        let (mut said, mut closed) = (String::new(), false);
        let mut on_text = |piece: &str| {
            said.push_str(piece);
            closed = !write_piece(&thoughts.push(piece));
            match closed || interrupt::stopped() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let tokenizer = Some(&self.tokenizer);
        let engine = &mut self.model.engine;
        let (new, options) = (&prompt[common..], &self.options);
        let made = match &mut self.speculation {
            None => generate(engine, 0, tokenizer, new, options, &mut on_text),
            Some(s) => s.generate(engine, 0, tokenizer, new, options, &mut on_text),
        };
        self.closed = closed || !write_piece(&(thoughts.finish() + "\n"));
        let g = match made {
            Ok(g) => g,
            Err(e) => {
                // What was printed is part of the conversation.
                if !said.is_empty() {
                    self.messages.push(Message::new("assistant", said.as_str()));
                }
                self.fed.clear();
                self.model.restart()?;
                return Err(e);
            }
        };
        self.fed = [&prompt[..], &g.tokens[..]].concat();
        self.fed.truncate(self.model.engine.length(0));
        self.messages.push(Message::new("assistant", g.text.as_str()));
        match g.finish {
            Finish::Length => report::note("the answer was cut off (length)"),
            Finish::Cancelled => report::note("stopped"),
            Finish::Stop => {}
        }
        if report::verbose() {
            report::note(&times(&g));
            if let Some(s) = &self.speculation {
                report::note(&line(s));
            }
        }
        Ok(())
    }

    /// The prompt, after the oldest messages were dropped if it would not leave room for an answer.
    fn fitting_prompt(&mut self) -> Result<Vec<u32>> {
        let room = self.model.engine.context();
        let spare = self.options.max_tokens.unwrap_or(room / 4).min(room / 2).max(1);
        let mut dropped = 0;
        loop {
            let prompt = self.prompt()?;
            if prompt.is_empty() {
                return Err(Error::argument("chat", "the template makes no tokens of these messages"));
            }
            if prompt.len() + spare <= room {
                if dropped > 0 {
                    report::note(&format!("the context is full: the {dropped} oldest messages were dropped"));
                }
                return Ok(prompt);
            }
            let first = self.messages.iter().position(|m| m.role != "system").unwrap_or(0);
            // The last message stays.
            if first + 1 >= self.messages.len() {
                let what = format!(
                    "the message has {} tokens with its template, and the context {room}; use a larger --context",
                    prompt.len()
                );
                self.messages.pop();
                return Err(Error::argument("chat", what));
            }
            // A message and its answer.
            let answered = self.messages.get(first + 1).is_some_and(|m| m.role == "assistant");
            let n = if answered && first + 2 < self.messages.len() { 2 } else { 1 };
            self.messages.drain(first..first + n);
            dropped += n;
        }
    }
}

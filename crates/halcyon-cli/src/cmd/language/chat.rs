//! `halcyon chat`: a conversation.

use super::constrain::demand;
use super::speculate::{line, speculation};
use super::{FINE, Running, options, start, times, write_piece};
use crate::args::ChatArgs;
use crate::report;
use halcyon::{Error, Result};
use halcyon_formats::{input, output};
use halcyon_models::{Finish, GenerateOptions, Speculation, chat_tokens, generate};
use halcyon_text::{ChatTemplate, Message, Tokenizer};
use std::io::{BufRead, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set by Ctrl-C.
static STOPPED: AtomicBool = AtomicBool::new(false);

const HELP: &str = "\
/help            this list
/save FILE       writes the messages to a JSON file
/load FILE       replaces the messages by those of a file
/retry           answers the last message again
/context         how full the context is
/system TEXT     replaces the first message, which tells the model how to behave
/thinking on|off lets the model think before it answers, if its template knows this
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
    /// Tokens that the sequence holds.
    fed: Vec<u32>,
}

pub(crate) fn main(a: &ChatArgs) -> Result<u8> {
    let mut options = options(&a.sampling)?;
    let demand = demand(&a.sampling)?;
    let model = start(&a.language, None, FINE)?;
    let tokenizer = model.tokenizer()?;
    options.mask = demand.map(|d| d.mask(Some(&tokenizer))).transpose()?;
    let template = match &a.chat_template {
        Some(file) => ChatTemplate::new(&input::text(file)?)?,
        None => model.file.template(&tokenizer)?,
    };
    let speculation = speculation(&a.speculation, &a.language, &model)?;
    // If the handler cannot be installed, Ctrl-C ends the program, as usual.
    let _ = ctrlc::set_handler(|| {
        if STOPPED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    });
    let mut chat = Chat {
        model,
        tokenizer,
        template,
        options,
        speculation,
        messages: vec![],
        thinking: None,
        fed: vec![],
    };
    chat.set_system(a.system.as_deref());
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        report::note("/help lists the commands");
    }
    while let Some(line) = read_message(terminal)? {
        STOPPED.store(false, Ordering::SeqCst);
        let text = line.trim();
        if text.is_empty() {
            continue;
        }
        let done = match text.strip_prefix('/') {
            Some(command) => chat.command(command),
            None => {
                chat.messages.push(Message::new("user", line.as_str()));
                chat.answer().map(|()| false)
            }
        };
        match done {
            Ok(true) => break,
            Ok(false) => {}
            // A mistake in one message does not end an interactive chat.
            Err(e) if terminal => report::fault(&report::message(&e)),
            Err(e) => return Err(e),
        }
    }
    Ok(0)
}

/// The next message; `None` at the end of the input.
fn read_message(terminal: bool) -> Result<Option<String>> {
    let mut text = String::new();
    loop {
        if terminal {
            write_piece(if text.is_empty() { "> " } else { "… " });
        }
        let mut line = String::new();
        let n = std::io::stdin().lock().read_line(&mut line);
        let n = n.map_err(|e| Error::Io { path: "standard input".into(), what: e.to_string() })?;
        if n == 0 {
            return Ok((!text.is_empty()).then_some(text));
        }
        let line = line.trim_end_matches(['\n', '\r']);
        match line.strip_suffix('\\') {
            Some(begun) => text += &format!("{begun}\n"),
            None => return Ok(Some(text + line)),
        }
    }
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
                let text = serde_json::to_string_pretty(&self.messages);
                let text = text.map_err(|e| Error::internal(e.to_string()))?;
                output::write(Path::new(file), text.as_bytes())?;
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
            ("thinking", _) => return Err(Error::argument("/thinking", "expected on or off")),
            _ => {
                return Err(Error::argument(format!("/{name}"), "no such command; /help lists them"));
            }
        }
        Ok(false)
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
        let mut on_text = |piece: &str| match write_piece(piece) && !STOPPED.load(Ordering::SeqCst) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        let tokenizer = Some(&self.tokenizer);
        let engine = &mut self.model.engine;
        let (new, options) = (&prompt[common..], &self.options);
        let made = match &mut self.speculation {
            None => generate(engine, 0, tokenizer, new, options, &mut on_text),
            Some(s) => s.generate(engine, 0, tokenizer, new, options, &mut on_text),
        };
        write_piece("\n");
        let g = match made {
            Ok(g) => g,
            Err(e) => {
                // The sequence may hold a part of the prompt.
                self.model.engine.truncate(0, 0);
                self.fed.clear();
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

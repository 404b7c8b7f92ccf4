//! Children that may crash or hang, several at a time, until a deadline. What they told before is kept.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How one ended.
#[derive(Clone, Debug, Default)]
pub struct Ended {
    pub out: String,
    /// The end of what it wrote to its standard error.
    pub err: String,
    /// How it ended where it did not end by itself with an exit code: `was ended by signal: 11 (SIGSEGV)`, `had no time left`.
    pub broken: Option<String>,
    pub code: Option<i32>,
}

type Shared = Arc<Mutex<Vec<u8>>>;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Reads along in a thread that nobody waits for: a grandchild may hold the pipe open.
fn follow(pipe: Option<impl Read + Send + 'static>) -> Shared {
    let to: Shared = Arc::default();
    if let Some(mut pipe) = pipe {
        let to = to.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 1 << 14];
            while let Ok(n @ 1..) = pipe.read(&mut piece) {
                lock(&to).extend_from_slice(&piece[..n]);
            }
        });
    }
    to
}

/// Runs a command with nothing to read until it ends or `until` comes.
pub fn run(command: &mut Command, until: Instant) -> Ended {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(c) => c,
        Err(e) => return Ended { broken: Some(format!("could not be started: {e}")), ..Ended::default() },
    };
    let (out, err) = (follow(child.stdout.take()), follow(child.stderr.take()));
    let (broken, code) = wait(&mut child, until);
    // What is in the pipes is taken out within a moment.
    let mut before = usize::MAX;
    for _ in 0..50 {
        let n = lock(&out).len() + lock(&err).len();
        if n == before && Arc::strong_count(&out) == 1 && Arc::strong_count(&err) == 1 {
            break;
        }
        before = n;
        std::thread::sleep(Duration::from_millis(10));
    }
    let text = |v: &Shared| String::from_utf8_lossy(&lock(v)).into_owned();
    let err = text(&err);
    let tail = err.char_indices().rev().nth(2000).map_or(0, |(i, _)| i);
    Ended { out: text(&out), err: err[tail..].trim().to_string(), broken, code }
}

fn wait(child: &mut Child, until: Instant) -> (Option<String>, Option<i32>) {
    loop {
        match child.try_wait() {
            Ok(Some(s)) => {
                let broken = s.code().is_none().then(|| format!("was ended by {s}"));
                return (broken, s.code());
            }
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return (Some("had no time left".into()), None);
            }
            Err(e) => return (Some(format!("could not be waited for: {e}")), None),
        }
    }
}

/// Runs all of them, so many at a time, in order of their start.
pub fn run_all(commands: Vec<Command>, parallel: usize, until: Instant) -> Vec<Ended> {
    let n = commands.len();
    let commands: Vec<Mutex<Command>> = commands.into_iter().map(Mutex::new).collect();
    let done: Vec<Mutex<Ended>> = (0..n).map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..parallel.clamp(1, n.max(1)) {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(c) = commands.get(i) else { return };
                    let ended = match Instant::now() < until {
                        true => run(&mut lock(c), until),
                        false => Ended { broken: Some("had no time left".into()), ..Ended::default() },
                    };
                    *lock(&done[i]) = ended;
                }
            });
        }
    });
    done.into_iter().map(|d| d.into_inner().unwrap_or_else(|e| e.into_inner())).collect()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn sh(text: &str) -> Command {
        let mut c = Command::new("sh");
        c.args(["-c", text]);
        c
    }

    #[test]
    fn what_was_told_before_the_end_is_kept() {
        let soon = || Instant::now() + Duration::from_secs(20);
        let e = run(&mut sh("echo one; echo two >&2; exit 3"), soon());
        assert_eq!((e.out.as_str(), e.err.as_str(), e.code, e.broken), ("one\n", "two", Some(3), None));
        let e = run(&mut sh("echo one; kill -SEGV $$"), soon());
        assert!(e.out == "one\n" && e.broken.is_some_and(|b| b.contains("signal: 11")));
        let start = Instant::now();
        // The sleeper that the shell started holds the pipe open.
        let e = run(&mut sh("echo one; sleep 60; echo two"), start + Duration::from_millis(300));
        assert!(e.out == "one\n" && e.broken.as_deref() == Some("had no time left"), "{e:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(run(&mut Command::new("/nowhere/x"), soon()).broken.is_some_and(|b| b.contains("started")));
    }

    #[test]
    fn several_run_at_a_time() {
        let start = Instant::now();
        let all = run_all(
            (0..4).map(|i| sh(&format!("sleep 0.3; echo {i}"))).collect(),
            4,
            start + Duration::from_secs(20),
        );
        assert!(start.elapsed() < Duration::from_millis(1100), "{:?}", start.elapsed());
        let out: Vec<&str> = all.iter().map(|e| e.out.trim()).collect();
        assert_eq!(out, ["0", "1", "2", "3"]);
        let late = run_all(vec![sh("echo x")], 1, Instant::now());
        assert!(late[0].broken.is_some() && late[0].out.is_empty());
    }
}

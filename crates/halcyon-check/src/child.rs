//! Runs child processes that may crash or hang, several in parallel, until a deadline. Output that a child
//! wrote before it ended is kept. Processes that a child started are ended with it.

use halcyon_hal::child::LinkedChild;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The result of a child process.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChildResult {
    pub out: String,
    /// The end of the child's standard error.
    pub err: String,
    /// Set if the child could not be started or waited for, or was ended by a signal: what happened, such as
    /// `was ended by signal: 11 (SIGSEGV)`.
    pub broken: Option<String>,
    /// Set if the deadline passed: `Some` with the time since the child last wrote to standard output (or
    /// since its start, if it wrote nothing), or `Some(None)` if the child was not started.
    pub late: Option<Option<Duration>>,
    pub code: Option<i32>,
}

/// The bytes read so far, and the time of the last read.
#[derive(Debug)]
struct PipeState {
    bytes: Vec<u8>,
    last: Instant,
}

type Shared = Arc<Mutex<PipeState>>;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Reads a pipe in a detached thread, because a grandchild may keep the pipe open.
fn follow(pipe: Option<impl Read + Send + 'static>) -> Shared {
    let to: Shared = Arc::new(Mutex::new(PipeState { bytes: vec![], last: Instant::now() }));
    if let Some(mut pipe) = pipe {
        let to = to.clone();
        std::thread::spawn(move || {
            let mut part = [0; 1 << 14];
            while let Ok(n @ 1..) = pipe.read(&mut part) {
                let mut to = lock(&to);
                to.bytes.extend_from_slice(&part[..n]);
                to.last = Instant::now();
            }
        });
    }
    to
}

/// Makes the command start in a new process group. The processes that it starts belong to the same group.
fn own_group(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    // On Windows a process group cannot be killed. There, the processes end when their standard input closes.
    #[cfg(not(unix))]
    let _ = command;
}

/// Kills the remaining processes of a child's group, such as PyTorch's workers or a compiler.
fn end_group(child: &Child) {
    #[cfg(unix)]
    if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
        // The error is ignored: usually the group is already empty.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    #[cfg(not(unix))]
    let _ = child;
}

/// Runs a command without input until it ends or `until` passes. Then ends all processes that the command
/// started.
pub(crate) fn run(command: &mut Command, until: Instant) -> ChildResult {
    own_group(command);
    // If this process ends, in whatever way, the child ends too.
    let mut tied = match LinkedChild::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())) {
        Ok(c) => c,
        Err(e) => {
            return ChildResult {
                broken: Some(format!("could not be started: {e}")),
                ..ChildResult::default()
            };
        }
    };
    let child = tied.process();
    let (out, err) = (follow(child.stdout.take()), follow(child.stderr.take()));
    let mut ended = wait(child, until);
    if ended.late.is_some() {
        let last = lock(&out).last;
        ended.late = Some(Some(last.elapsed()));
    }
    end_group(child);
    // Waits until the reader threads have read what is left in the pipes, but at most half a second.
    let mut before = usize::MAX;
    for _ in 0..50 {
        let n = lock(&out).bytes.len() + lock(&err).bytes.len();
        if n == before && Arc::strong_count(&out) == 1 && Arc::strong_count(&err) == 1 {
            break;
        }
        before = n;
        std::thread::sleep(Duration::from_millis(10));
    }
    let text = |v: &Shared| String::from_utf8_lossy(&lock(v).bytes).into_owned();
    let err = text(&err);
    let tail = err.char_indices().rev().nth(2000).map_or(0, |(i, _)| i);
    ChildResult { out: text(&out), err: err[tail..].trim().to_string(), ..ended }
}

fn wait(child: &mut Child, until: Instant) -> ChildResult {
    let none = ChildResult::default();
    loop {
        match child.try_wait() {
            Ok(Some(s)) => {
                let broken = s.code().is_none().then(|| format!("was ended by {s}"));
                return ChildResult { broken, code: s.code(), ..none };
            }
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                end_group(child);
                let _ = child.kill();
                let _ = child.wait();
                return ChildResult { late: Some(None), ..none };
            }
            Err(e) => return ChildResult { broken: Some(format!("could not be waited for: {e}")), ..none },
        }
    }
}

/// Runs all commands, at most `parallel` at a time. The results are in the order of the commands.
pub(crate) fn run_all(commands: Vec<Command>, parallel: usize, until: Instant) -> Vec<ChildResult> {
    let n = commands.len();
    let commands: Vec<Mutex<Command>> = commands.into_iter().map(Mutex::new).collect();
    let done: Vec<Mutex<ChildResult>> = (0..n).map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..parallel.clamp(1, n.max(1)) {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(c) = commands.get(i) else { return };
                    let ended = match Instant::now() < until {
                        true => run(&mut lock(c), until),
                        false => ChildResult { late: Some(None), ..ChildResult::default() },
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
    fn events_before_a_crash_are_kept() {
        // Long enough for a busy machine; the test does not wait for this deadline.
        let soon = || Instant::now() + Duration::from_secs(600);
        let e = run(&mut sh("echo one; echo two >&2; exit 3"), soon());
        assert_eq!((e.out.as_str(), e.err.as_str(), e.code, e.broken), ("one\n", "two", Some(3), None));
        let e = run(&mut sh("echo one; kill -SEGV $$"), soon());
        assert!(e.out == "one\n" && e.broken.is_some_and(|b| b.contains("signal: 11")));
        let start = Instant::now();
        // Processes that the shell started, also in the background, end with it.
        let sleepers = "sleep 600 & echo $!; sleep 600; echo two";
        let e = run(&mut sh(sleepers), start + Duration::from_secs(3));
        let silent = e.late.flatten().expect("it was late");
        assert!(silent <= start.elapsed() && !e.out.contains("two"), "{silent:?}: {e:?}");
        let gone = |pid: &str| {
            // A process whose parent has not yet waited for it is a zombie.
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !cfg!(target_os = "linux") || state.is_empty() || state.contains(") Z ")
        };
        let wait_for = |pid: &str| {
            (0..6000).any(|_| {
                gone(pid) || {
                    std::thread::sleep(Duration::from_millis(10));
                    false
                }
            })
        };
        assert!(wait_for(e.out.trim()), "the sleeper {} lives", e.out);
        // Processes that a successful child left behind are ended too.
        let e = run(&mut sh("sleep 600 & echo $!"), soon());
        assert!(e.code == Some(0) && wait_for(e.out.trim()), "{e:?}");
        assert!(run(&mut Command::new("/nowhere/x"), soon()).broken.is_some_and(|b| b.contains("started")));
    }

    #[test]
    fn several_run_at_a_time() {
        // Each command waits for all others. If they ran one after the other, they would never end.
        let dir = tempfile::tempdir().expect("a folder");
        let at = dir.path().display();
        let meet = |i| {
            sh(&format!(
                "cd '{at}'; touch here-{i}; while [ $(ls | wc -l) -lt 4 ]; do sleep 0.02; done; echo {i}"
            ))
        };
        let until = Instant::now() + Duration::from_secs(600);
        let all = run_all((0..4).map(meet).collect(), 4, until);
        let out: Vec<&str> = all.iter().map(|e| e.out.trim()).collect();
        assert_eq!(out, ["0", "1", "2", "3"]);
        let late = run_all(vec![sh("echo x")], 1, Instant::now());
        assert!(late[0].late == Some(None) && late[0].out.is_empty());
    }
}

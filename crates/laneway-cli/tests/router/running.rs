//! A real service as a subprocess, for the tests of the verbs: started on a free port, asked through the binary, ended with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Nothing that these tests wait for takes longer on the slowest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The binary in an environment that says nothing about a service.
pub(crate) fn laneway(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_laneway"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("LANEWAY_")) {
        command.env_remove(name);
    }
    command.args(arguments).stdin(Stdio::null());
    command
}

/// What a verb printed and how it ended.
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    pub(crate) fn of(output: Output) -> Answer {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Answer {
            code: output.status.code().expect("it ended by itself"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// What it printed as JSON, one value per line.
    pub(crate) fn json(&self) -> Vec<Value> {
        let value = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        self.stdout.lines().map(value).collect()
    }
}

/// Runs a verb to its end.
pub(crate) fn run(arguments: &[&str]) -> Answer {
    Answer::of(laneway(arguments).output().expect("the binary runs"))
}

/// Lines as they come, each within a deadline.
pub(crate) struct Lines(Receiver<String>);

impl Lines {
    pub(crate) fn of(pipe: impl Read + Send + 'static) -> Lines {
        let (told, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                if told.send(line).is_err() {
                    break;
                }
            }
        });
        Lines(lines)
    }

    /// The next line that is as wanted; fails if the output ends or the time is up before one is.
    pub(crate) fn find(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        loop {
            match self.0.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if wanted(&line) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no {what} in\n{}", seen.join("\n")),
            }
        }
    }

    /// All lines to the end.
    pub(crate) fn rest(&self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Ok(line) = self.0.recv_timeout(PATIENCE) {
            lines.push(line);
        }
        lines
    }
}

/// A service that runs.
pub(crate) struct Running {
    child: Child,
    pub(crate) stdout: Lines,
    pub(crate) stderr: Lines,
    pub(crate) url: String,
    /// Its queue, and whatever else it leaves where it was started.
    pub(crate) folder: TempDir,
}

impl Running {
    /// `laneway serve` on a free port with its queue in a folder of its own.
    pub(crate) fn start(more: &[&str]) -> Running {
        let mut arguments = vec!["serve", "--bind", "127.0.0.1:0", "--json"];
        arguments.extend(more);
        Running::spawn(&arguments)
    }

    /// Any `laneway serve ... --json`.
    pub(crate) fn spawn(arguments: &[&str]) -> Running {
        Running::spawn_in(tempfile::tempdir().expect("a folder"), arguments)
    }

    /// Kills it, as a power cut would, and starts another one where it was.
    pub(crate) fn kill_and_spawn(mut self, arguments: &[&str]) -> Running {
        self.child.kill().expect("killed");
        self.child.wait().expect("it ends");
        let elsewhere = tempfile::tempdir().expect("a folder");
        Running::spawn_in(std::mem::replace(&mut self.folder, elsewhere), arguments)
    }

    fn spawn_in(folder: TempDir, arguments: &[&str]) -> Running {
        let mut command = laneway(arguments);
        command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        let stdout = Lines::of(child.stdout.take().expect("piped"));
        let stderr = Lines::of(child.stderr.take().expect("piped"));
        let line = stdout.find("address", |line| line.contains("\"listening\""));
        let listening: Value = serde_json::from_str(&line).expect("JSON");
        let url = listening["url"].as_str().expect("a URL").to_owned();
        Running { child, stdout, stderr, url, folder }
    }

    /// Asks it through the binary.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Answer {
        run(&[arguments, &["--url", &self.url]].concat())
    }

    /// The same, and it must go well; what it printed as JSON.
    pub(crate) fn tell(&self, arguments: &[&str]) -> Vec<Value> {
        let answer = self.ask(&[arguments, &["--json"]].concat());
        assert_eq!(answer.code, 0, "{arguments:?}: {}", answer.stderr);
        answer.json()
    }

    /// The same with something on its standard input.
    pub(crate) fn ask_with(&self, input: &str, arguments: &[&str]) -> Answer {
        let mut command = laneway(&[arguments, &["--url", &self.url]].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary runs");
        let mut pipe = child.stdin.take().expect("piped");
        let input = input.to_owned();
        // Whoever has seen enough closes the pipe, and that is no failure of the test.
        let writer = thread::spawn(move || drop(pipe.write_all(input.as_bytes())));
        let answer = Answer::of(child.wait_with_output().expect("it ends"));
        writer.join().expect("written");
        answer
    }

    /// Asks until the answer is as wanted. Each question is a process, which is pause enough.
    pub(crate) fn until(&self, arguments: &[&str], wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.tell(arguments);
            if wanted(&answer) {
                return answer;
            }
            assert!(Instant::now() < deadline, "{arguments:?} is still {answer:?}");
        }
    }

    /// How many messages a pool has delivered, once they are so many.
    pub(crate) fn delivered(&self, pool: &str, number: u64) {
        self.until(&["pools"], |pools| {
            pools.iter().any(|one| one["code"] == pool && one["counts"]["succeeded"] == number)
        });
    }

    /// Sends what a terminal sends for ctrl-c.
    pub(crate) fn interrupt(&self) {
        let process = self.child.id().to_string();
        let status = Command::new("kill").args(["-INT", &process]).status().expect("kill is there");
        assert!(status.success());
    }

    /// How it ended.
    pub(crate) fn code(&mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind; one that went well has ended it already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

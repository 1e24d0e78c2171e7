//! What the bench and the agent in the guest say to each other: one JSON object a line.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use program_tests::failure::Failure;
use program_tests::process::Finished;
use serde::{Deserialize, Serialize};

/// Name of the serial port that carries this.
pub const PORT: &str = "ferroce.agent";

/// What the bench asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Run a program to its end.
    Run {
        /// Program and arguments.
        argv: Vec<String>,
        /// After this time it is ended with all its children.
        limit_ms: u64,
    },
    /// End the program that the request of this number runs, with all its children.
    End(u64),
    /// Does anyone listen on this TCP port?
    Listening(u16),
    /// Tell what these files hold; a path that ends with `/*` stands for all files of a folder.
    Read(Vec<String>),
}

/// What the agent answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The first message: the guest is up.
    Hello {
        /// Release of the kernel.
        kernel: String,
        /// What went wrong on the way.
        troubles: Vec<String>,
    },
    /// A program has ended.
    Ran {
        /// As `waitpid` gives it.
        wait_status: i32,
        /// What it printed.
        stdout: String,
        /// What it complained about.
        stderr: String,
        /// From its start to its end.
        took_ms: u64,
    },
    /// Answer to `Listening`.
    Listening(bool),
    /// Answer to `Read`: paths and texts, of long files the beginning. What cannot be read is absent.
    Files(Vec<(String, String)>),
    /// The request was carried out.
    Done,
    /// The request could not be carried out.
    Refused(String),
}

/// A message with the number of the request that it is or answers. `Hello` has number 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Number of the request.
    pub id: u64,
    /// The message.
    pub body: T,
}

impl<T: Serialize> Numbered<T> {
    /// Writes the message in one piece.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(self).expect("plain data");
        line.push(b'\n');
        out.write_all(&line)
    }
}

/// The bench's end of the conversation.
#[derive(Clone)]
pub struct Agent {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    writer: Mutex<UnixStream>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    replies: HashMap<u64, Reply>,
    closed: bool,
}

/// A request that was sent.
pub struct Ticket {
    id: u64,
    agent: Agent,
}

impl Agent {
    /// Talks over `stream`.
    pub fn new(stream: UnixStream) -> std::io::Result<Agent> {
        let reader = BufReader::new(stream.try_clone()?);
        let shared = Arc::new(Shared {
            state: Mutex::new(State { next_id: 1, ..State::default() }),
            changed: Condvar::new(),
            writer: Mutex::new(stream),
        });
        let listener = Arc::clone(&shared);
        std::thread::spawn(move || listen(reader, &listener));
        Ok(Agent { shared })
    }

    /// The ticket of the agent's first message.
    pub fn hello(&self) -> Ticket {
        Ticket { id: 0, agent: self.clone() }
    }

    /// Sends a request.
    pub fn ask(&self, body: Request) -> Result<Ticket, Failure> {
        let id = {
            let mut state = self.shared.state.lock().expect("no holder panics");
            state.next_id += 1;
            state.next_id
        };
        let mut writer = self.shared.writer.lock().expect("no holder panics");
        let lost = |e| Failure::new(format!("the guest no longer listens: {e}"));
        Numbered { id, body }.write(&mut *writer).map_err(lost)?;
        Ok(Ticket { id, agent: self.clone() })
    }

    /// Runs a program and waits for its end.
    pub fn run(&self, argv: &[&str], limit: Duration) -> Result<Finished, Failure> {
        let ticket = self.start(argv, limit)?;
        let reply = ticket.wait(limit + SLACK)?;
        finished(&argv.join(" "), reply)
    }

    /// What files of the guest hold: see [`Request::Read`].
    pub fn read(&self, paths: &[&str], limit: Duration) -> Result<Vec<(String, String)>, Failure> {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        match self.ask(Request::Read(paths))?.wait(limit)? {
            Reply::Files(files) => Ok(files),
            other => Err(Failure::new(format!("the guest's agent was asked for files and answered {other:?}"))),
        }
    }

    /// Starts a program.
    pub fn start(&self, argv: &[&str], limit: Duration) -> Result<Ticket, Failure> {
        let argv = argv.iter().map(|word| (*word).to_owned()).collect();
        self.ask(Request::Run { argv, limit_ms: limit.as_millis() as u64 })
    }
}

/// How much later than a program's limit the agent's answer may come.
pub const SLACK: Duration = Duration::from_secs(20);

impl Ticket {
    /// The answer, if it has come. An error means that the guest is gone.
    pub fn poll(&self) -> Result<Option<Reply>, Failure> {
        let mut state = self.agent.shared.state.lock().expect("no holder panics");
        self.take(&mut state)
    }

    fn take(&self, state: &mut State) -> Result<Option<Reply>, Failure> {
        match state.replies.remove(&self.id) {
            Some(reply) => Ok(Some(reply)),
            None if state.closed => Err(Failure::new("the guest is gone: its agent hung up")),
            None => Ok(None),
        }
    }

    /// Waits for the answer.
    pub fn wait(&self, limit: Duration) -> Result<Reply, Failure> {
        let deadline = Instant::now() + limit;
        let mut state = self.agent.shared.state.lock().expect("no holder panics");
        loop {
            if let Some(reply) = self.take(&mut state)? {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(format!("the guest's agent did not answer within {limit:?}")));
            }
            state = self.agent.shared.changed.wait_timeout(state, left).expect("no holder panics").0;
        }
    }

    /// Ends the program that this request runs.
    pub fn end(&self) {
        // An error means that the guest is gone, and the program with it.
        let _ = self.agent.ask(Request::End(self.id));
    }
}

fn listen(reader: impl BufRead, shared: &Shared) {
    for line in reader.lines() {
        let Ok(line) = line else { break };
        let Ok(message) = serde_json::from_str::<Numbered<Reply>>(&line) else { continue };
        let mut state = shared.state.lock().expect("no holder panics");
        state.replies.insert(message.id, message.body);
        shared.changed.notify_all();
    }
    shared.state.lock().expect("no holder panics").closed = true;
    shared.changed.notify_all();
}

/// A program's end as the rest of the bench knows it.
pub fn finished(name: &str, reply: Reply) -> Result<Finished, Failure> {
    match reply {
        Reply::Ran { wait_status, stdout, stderr, took_ms } => Ok(Finished {
            name: name.to_owned(),
            status: ExitStatus::from_raw(wait_status),
            stdout,
            stderr,
            took: Duration::from_millis(took_ms),
        }),
        Reply::Refused(why) => Err(Failure::new(format!("the guest cannot run {name}: {why}"))),
        other => Err(Failure::new(format!("the guest's agent answered {other:?} to {name}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_find_their_requests_in_any_order_and_the_end_is_told() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let agent = Agent::new(ours).expect("can clone");
        let first = agent.ask(Request::Listening(1)).expect("is open");
        let second = agent.ask(Request::Listening(2)).expect("is open");
        let mut lines = BufReader::new(theirs.try_clone().expect("can clone")).lines();
        let mut next = || {
            let line = lines.next().expect("was sent").expect("is text");
            serde_json::from_str::<Numbered<Request>>(&line).expect("is a request").id
        };
        let (one, two) = (next(), next());
        let mut theirs = theirs;
        Numbered { id: two, body: Reply::Listening(true) }.write(&mut theirs).expect("is open");
        theirs.write_all(b"not json\n").expect("is open");
        Numbered { id: one, body: Reply::Listening(false) }.write(&mut theirs).expect("is open");
        let limit = Duration::from_secs(60);
        assert!(matches!(first.wait(limit), Ok(Reply::Listening(false))));
        assert!(matches!(second.wait(limit), Ok(Reply::Listening(true))));
        let third = agent.ask(Request::Listening(3)).expect("is open");
        assert!(third.poll().expect("is open").is_none());
        drop((lines, theirs));
        let failure = third.wait(limit).expect_err("nobody is there");
        assert!(failure.to_string().contains("gone"), "{failure}");
    }
}

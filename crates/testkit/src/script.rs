//! What both ends of a recording did: the lines of its text file that begin with `#`.

use crate::Malformed;

/// One of the two machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum End {
    A,
    B,
}

impl End {
    /// The other one.
    pub const fn peer(self) -> End {
        match self {
            End::A => End::B,
            End::B => End::A,
        }
    }
}

/// `name=value` words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args(Vec<(String, String)>);

impl Args {
    /// Takes every word of the form `name=value` in `text`; a trailing `;` or `,` is no part of the value.
    pub fn parse(text: &str) -> Args {
        let pair = |word: &str| {
            let (name, value) = word.split_once('=')?;
            Some((name.to_owned(), value.trim_end_matches([';', ',']).to_owned()))
        };
        Args(text.split_whitespace().filter_map(pair).collect())
    }

    /// The first value of that name.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The first value of that name as a number: decimal, negative decimal (two's complement), or hexadecimal after `0x`; what
    /// follows the digits, as in `10(remote access error)`, is left out. `None` if there is no such name.
    ///
    /// # Panics
    /// If the value is no number.
    pub fn number(&self, name: &str) -> Option<u64> {
        let text = self.text(name)?;
        let text = text.split('(').next().unwrap_or(text);
        let number = match (text.strip_prefix("0x"), text.strip_prefix('-')) {
            (Some(hex), _) => u64::from_str_radix(hex, 16).ok(),
            (_, Some(positive)) => positive.parse().ok().map(u64::wrapping_neg),
            _ => text.parse().ok(),
        };
        Some(number.unwrap_or_else(|| panic!("{name}={text} is no number")))
    }
}

/// A pair of queue pairs that know each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The number by which later lines call it (`id=`); they leave it out for 0.
    pub id: u64,
    /// `rc`, `uc` or `ud`.
    pub transport: String,
    /// QPN at A and B.
    pub qpn: [u32; 2],
    /// First PSN sent by A and B.
    pub start_psn: [u32; 2],
    /// Path MTU in bytes.
    pub path_mtu: u32,
    /// Attributes of A and B that differ from the default.
    pub options: [Args; 2],
}

/// A completion as a program saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wc {
    /// The request's identifier.
    pub wr_id: u64,
    /// `enum ibv_wc_status`.
    pub status: u64,
    /// `enum ibv_wc_opcode`.
    pub opcode: u64,
    /// Bytes; absent if the status is not success.
    pub byte_len: Option<u64>,
    /// `enum ibv_wc_flags`; absent if the status is not success.
    pub flags: Option<u64>,
    /// Immediate in host order.
    pub imm: Option<u64>,
    /// The remote queue pair.
    pub src_qp: Option<u64>,
    /// The local queue pair.
    pub qpn: u64,
}

impl Wc {
    /// Reads a line `wc wr_id=1 status=0(success) ...`.
    pub fn parse(line: &str) -> Option<Wc> {
        let args = Args::parse(line.strip_prefix("wc ")?);
        Some(Wc {
            wr_id: args.number("wr_id")?,
            status: args.number("status")?,
            opcode: args.number("opcode")?,
            byte_len: args.number("byte_len"),
            flags: args.number("flags"),
            imm: args.number("imm"),
            src_qp: args.number("src_qp"),
            qpn: args.number("qpn")?,
        })
    }
}

/// Something that one end did, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Act {
    /// Who.
    pub end: End,
    /// `post`, `recv`, `poll`, `dump`, `mr`, `mw`, `state`, `modify`, `arm`, `event`, `async` or `sh`.
    pub verb: String,
    /// Its parameters.
    pub args: Args,
    /// The lines that the end gave back.
    pub replies: Vec<String>,
}

impl Act {
    /// The pair that the act is about.
    pub fn pair(&self) -> u64 {
        self.args.number("id").unwrap_or(0)
    }

    /// The completions among the replies.
    pub fn completions(&self) -> impl Iterator<Item = Wc> {
        self.replies.iter().filter_map(|line| Wc::parse(line))
    }

    /// What the replies say of themselves: `rkey=`, `mwkey=` and the like.
    pub fn results(&self) -> Args {
        Args::parse(&self.replies.join(" "))
    }
}

/// A line of the script.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Line {
    Note(String),
    Pair(Pair),
    Act(Act),
}

/// The head of a recording's text file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// What the recording shows.
    pub title: String,
    /// Rkey of the main region of A and B.
    pub rkey: [u32; 2],
    /// Address of B's main region.
    pub buffer: u64,
    /// The rest, in order.
    pub lines: Vec<Line>,
}

impl Script {
    /// Reads the lines before the first frame, without their `#`.
    pub(crate) fn parse<'a>(name: &str, lines: impl IntoIterator<Item = &'a str>) -> Result<Script, Malformed> {
        let mut script = Script { title: String::new(), rkey: [0; 2], buffer: 0, lines: Vec::new() };
        for (number, line) in lines.into_iter().enumerate() {
            let place = format!("{name}, line {}", number + 1);
            let bad = |what: &str| Malformed::new(&place, what);
            if let Some(reply) = line.strip_prefix("      ") {
                let Some(Line::Act(act)) = script.lines.last_mut() else { return Err(bad("a reply without an act")) };
                act.replies.push(reply.to_owned());
                continue;
            }
            let line = line.strip_prefix(' ').ok_or_else(|| bad("no space after #"))?;
            if number == 0 {
                script.title = line.split_once(" : ").ok_or_else(|| bad("no title"))?.1.to_owned();
            } else if let Some(nodes) = line.strip_prefix("A = node 1 (requester), B = node 2; ") {
                (script.rkey, script.buffer) = nodes_line(nodes).ok_or_else(|| bad("rkeys and buffer"))?;
            } else if let Some(note) = line.strip_prefix("-- ") {
                script.lines.push(Line::Note(note.to_owned()));
            } else if let Some(pair) = line.strip_prefix("QP pair ") {
                script.lines.push(Line::Pair(pair_line(pair).ok_or_else(|| bad("a pair"))?));
            } else {
                script.lines.push(Line::Act(act_line(line).ok_or_else(|| bad("neither act nor note"))?));
            }
        }
        Ok(script)
    }

    /// The pairs, by order of appearance.
    pub fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.lines.iter().filter_map(|line| if let Line::Pair(pair) = line { Some(pair) } else { None })
    }

    /// The acts, in order.
    pub fn acts(&self) -> impl Iterator<Item = &Act> {
        self.lines.iter().filter_map(|line| if let Line::Act(act) = line { Some(act) } else { None })
    }
}

/// `active_mtu=1024 state=4 gids=1024; A rkey=0x5dc2 B rkey=0x5d6a; B buffer 0x7f0a9bbc4000`
fn nodes_line(line: &str) -> Option<([u32; 2], u64)> {
    let (_, line) = line.split_once("; A ")?;
    let (a, line) = line.split_once(" B ")?;
    let (b, buffer) = line.split_once("; B buffer 0x")?;
    let rkey = |text| Args::parse(text).number("rkey")?.try_into().ok();
    Some(([rkey(a)?, rkey(b)?], u64::from_str_radix(buffer, 16).ok()?))
}

/// `0 (rc): A qpn=0x84 start psn=0x001000; B qpn=0x84 start psn=0xa00000; path mtu 1024; A:  ; B: acc=15 ; rtr rc=0 ok ...`
fn pair_line(line: &str) -> Option<Pair> {
    let (id, line) = line.split_once(" (")?;
    let (transport, line) = line.split_once("): A ")?;
    let (a, line) = line.split_once("; B ")?;
    let (b, line) = line.split_once("; path mtu ")?;
    let (path_mtu, line) = line.split_once("; A:")?;
    let (a_options, line) = line.split_once("; B:")?;
    let (b_options, _) = line.split_once(';')?;
    let number = |text, name| Args::parse(text).number(name)?.try_into().ok();
    Some(Pair {
        id: id.parse().ok()?,
        transport: transport.to_owned(),
        qpn: [number(a, "qpn")?, number(b, "qpn")?],
        start_psn: [number(a, "psn")?, number(b, "psn")?],
        path_mtu: path_mtu.parse().ok()?,
        options: [Args::parse(a_options), Args::parse(b_options)],
    })
}

/// `A: post op=send len=8 wid=1 more=1`
fn act_line(line: &str) -> Option<Act> {
    let (end, line) = line.split_once(": ")?;
    let end = match end {
        "A" => End::A,
        "B" => End::B,
        _ => return None,
    };
    let (verb, args) = line.split_once(' ').unwrap_or((line, ""));
    Some(Act { end, verb: verb.to_owned(), args: Args::parse(args), replies: Vec::new() })
}

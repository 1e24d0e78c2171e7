//! `ferroce.toml`: what the service allows, and whether it keeps a log.
//!
//! The system's file is read first, then the user's, whose keys go before the system's; with `FERROCE_CONFIG` only the file that
//! it names. No file need be there. A key that does not exist is an error: a limit with a typing error would be none.

use std::ffi::OsString;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::server::{CLIENTS_MAX, LANES_PER_CLIENT_MAX};
use crate::{LANE_MAX, ServiceError, environment, regular_file};

/// Names the only configuration file.
pub const CONFIG_VARIABLE: &str = "FERROCE_CONFIG";

/// Seconds without users after which the service ends, before what the files say.
pub const IDLE_VARIABLE: &str = "FERROCE_SERVICE_IDLE_S";

/// What [`IDLE_VARIABLE`] says. None: nothing.
///
/// # Errors
/// EINVAL: it is no number of seconds.
pub fn idle_s() -> Result<Option<u64>, ServiceError> {
    environment::text(IDLE_VARIABLE)?.map(|text| seconds(&text)).transpose()
}

fn seconds(text: &str) -> Result<u64, ServiceError> {
    let allowed = "it can be a whole number of seconds (0: the service never ends)";
    text.parse().map_err(|_| environment::wrong(IDLE_VARIABLE, text, allowed))
}

/// The system's file.
pub const SYSTEM_FILE: &str = "/etc/ferroce/ferroce.toml";

/// The user's file, below `XDG_CONFIG_HOME` or `~/.config`.
const USER_FILE: &str = "ferroce/ferroce.toml";

/// Longest file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a file may say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The service ends after so many seconds without users; 0: never. `FERROCE_SERVICE_IDLE_S` goes before it.
    pub idle_s: Option<u64>,
    /// Whose programs the service is for.
    pub serve: Option<Serve>,
    /// Whose services a program uses, besides its own user's and root's.
    pub trust: Trust,
    /// The service's log.
    #[serde(deserialize_with = "table")]
    pub log: Log,
    /// How much programs may have.
    #[serde(deserialize_with = "table")]
    pub limits: Limits,
    /// Faults, for tests.
    #[serde(deserialize_with = "table")]
    pub fault: Fault,
}

/// A table. What is derived takes a list for one, too, in the order of its keys.
fn table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    deserializer.deserialize_map(TableVisitor(PhantomData))
}

struct TableVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for TableVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, keys: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(keys))
    }
}

/// Whose programs a service is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Serve {
    /// Those of the service's own user: the default, if that is not root.
    User,
    /// Those of every user of the network namespace: root's default. Other users' programs get no socket of the port: the service
    /// takes what is sent to them and passes it on.
    Namespace,
}

impl Serve {
    /// What a service of this user does if no file says otherwise.
    pub fn default_of(uid: u32) -> Serve {
        if uid == 0 { Serve::Namespace } else { Serve::User }
    }
}

/// Whose services a program uses, besides its own user's and root's: whoever runs the service reads what is sent to the program, and
/// can send in its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Trust {
    /// `"any"`: everybody's.
    All(TrustAll),
    /// Those of these users. (One who has no number in this user namespace is 65534.)
    Users(Vec<u32>),
}

/// The word for everybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrustAll {
    /// Everybody.
    Any,
}

/// Not derived: that of an untagged enum says of a wrong value only that it fits nowhere.
impl<'de> Deserialize<'de> for Trust {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Trust, D::Error> {
        deserializer.deserialize_any(TrustVisitor)
    }
}

struct TrustVisitor;

impl<'de> Visitor<'de> for TrustVisitor {
    type Value = Trust;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of user ids, such as [1000, 1001], or \"any\"")
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Trust, E> {
        match word {
            "any" => Ok(Trust::All(TrustAll::Any)),
            other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut users: A) -> Result<Trust, A::Error> {
        let mut listed = Vec::new();
        while let Some(user) = users.next_element()? {
            listed.push(user);
        }
        Ok(Trust::Users(listed))
    }
}

impl Default for Trust {
    fn default() -> Trust {
        Trust::Users(Vec::new())
    }
}

impl Trust {
    /// Whether a program of user `own` uses a service of user `uid`.
    pub fn includes(&self, own: u32, uid: u32) -> bool {
        uid == own
            || uid == 0
            || match self {
                Trust::All(TrustAll::Any) => true,
                Trust::Users(users) => users.contains(&uid),
            }
    }
}

/// The table `[log]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Lines are appended to this file; none is written without it.
    pub file: Option<PathBuf>,
    /// The least that is written; `info` tells every lease.
    pub level: Level,
}

/// How much is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // as crate log has them
pub enum Level {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl From<Level> for log::LevelFilter {
    fn from(level: Level) -> log::LevelFilter {
        match level {
            Level::Error => log::LevelFilter::Error,
            Level::Warn => log::LevelFilter::Warn,
            Level::Info => log::LevelFilter::Info,
            Level::Debug => log::LevelFilter::Debug,
            Level::Trace => log::LevelFilter::Trace,
        }
    }
}

/// The table `[fault]`: what happens to the connection manager's packets, to see what programs make of it, and what the kernel lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fault {
    /// So many of 1,000 packets that it sends are lost.
    pub cm_loss_permille: u16,
    /// The service does as on Linux before 6.5, where sockets cannot refuse descriptors and do not tell who is at their other end.
    pub old_kernel: bool,
    /// The first worker panics as a program greets it that is at least the so-manieth one.
    pub panic_at_program: Option<u64>,
}

/// The tables `[limits.process]` and `[limits.user]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Of one program.
    #[serde(deserialize_with = "table")]
    pub process: ProcessLimits,
    /// Of all programs of one user together.
    #[serde(deserialize_with = "table")]
    pub user: UserLimits,
}

/// Ids of the connection manager that programs may have in all. (Those that linger have room of their own.)
pub const IDS_MAX: u32 = ferroce_cm::Limits::USUAL.ids as u32;

/// Event channels that a limit may name; how many there can be is a matter of descriptors.
pub const CHANNELS_MAX: u32 = 65_536;

/// Descriptors that a limit may name; how many there are, the system says (RLIMIT_NOFILE, of which the service takes all that it may).
pub const DESCRIPTORS_MAX: u32 = 1 << 20;

/// Offers of rings that are on their way, of all programs: as long as it is not read, each keeps memory of its sender.
pub const RING_OFFERS_MAX: u32 = 2048;

/// Multicast groups of each IP version that the service's own socket is in at most. (For each the kernel takes some of the socket's memory
/// for options, `net.core.optmem_max`.)
pub const GROUPS_OF_ALL_MAX: u32 = 128;

/// Descriptors that a program with a lane of its own makes the service hold.
const DESCRIPTORS_MIN: u32 = 4;

/// How much one program may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessLimits {
    /// Lanes; each has room for 16,381 queue pairs. Refusals: ENOSPC.
    pub lanes: u32,
    /// Ids (`rdma_cm_id`), with those that listen, connect, or are connected. Refusals: ENOMEM; requests of peers above it are dropped
    /// as behind a full backlog.
    pub ids: u32,
    /// Ids that listen for connections. Refusals: ENOMEM.
    pub listeners: u32,
    /// Connections that are being made, and requests that wait at one listener. Refusals: ENOMEM; requests of peers above it are
    /// dropped as behind a full backlog.
    pub pending_connections: u32,
    /// Event channels (`rdma_event_channel`). Refusals: EMFILE.
    pub event_channels: u32,
    /// Descriptors that the service holds for it: two for its connection, two for a lane (one, if it is another user's), one for an
    /// event channel. Refusals: EMFILE.
    pub descriptors: u32,
    /// Offers of rings that lanes have not read yet. Further ones are dropped: the queue pair uses UDP.
    pub ring_offers: u32,
}

impl Default for ProcessLimits {
    fn default() -> ProcessLimits {
        ProcessLimits {
            lanes: LANES_PER_CLIENT_MAX,
            ids: ferroce_cm::Limits::USUAL.ids_per_owner as u32,
            listeners: ferroce_cm::Limits::USUAL.listeners_per_owner as u32,
            pending_connections: 4096,
            event_channels: 1024,
            descriptors: 2048,
            ring_offers: 128,
        }
    }
}

/// How much the programs of one user may have together. None: the service's own user and root as much as there is; each other user as
/// much as it leaves to further ones, which is at most half of what other users may have ([`ferroce_cm::leaves_room`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UserLimits {
    /// Programs that are connected. Refusals: EUSERS.
    pub programs: Option<u32>,
    /// Lanes. Refusals: ENOSPC.
    pub lanes: Option<u32>,
    /// Ids. Refusals: ENOMEM.
    pub ids: Option<u32>,
    /// Ids that listen for connections. Refusals: ENOMEM.
    pub listeners: u32,
    /// Connections that are being made. Refusals: ENOMEM.
    pub pending_connections: u32,
    /// Event channels. Refusals: EMFILE.
    pub event_channels: Option<u32>,
    /// Descriptors that the service holds for them. Refusals: EMFILE.
    pub descriptors: Option<u32>,
    /// Offers of rings that lanes have not read yet. Further ones are dropped: the queue pair uses UDP.
    pub ring_offers: Option<u32>,
    /// Multicast groups, of each IP version, that the service's own socket is in for lanes without sockets. Refusals: ENOMEM.
    pub groups: Option<u32>,
}

impl Default for UserLimits {
    fn default() -> UserLimits {
        UserLimits {
            programs: None,
            lanes: None,
            ids: None,
            listeners: 16_384,
            pending_connections: 16_384,
            event_channels: None,
            descriptors: None,
            ring_offers: None,
            groups: None,
        }
    }
}

impl Limits {
    /// What is wrong with them: a key, what it is, and what it may be.
    fn check(&self) -> Result<(), String> {
        let Limits { process, user } = self;
        let (lanes, programs) = (LANE_MAX.into(), CLIENTS_MAX as u32);
        let all = [
            ("process.lanes", Some(process.lanes), 1, LANES_PER_CLIENT_MAX),
            ("process.ids", Some(process.ids), 1, IDS_MAX),
            ("process.listeners", Some(process.listeners), 1, IDS_MAX),
            ("process.pending_connections", Some(process.pending_connections), 1, IDS_MAX),
            ("process.event_channels", Some(process.event_channels), 1, CHANNELS_MAX),
            ("process.descriptors", Some(process.descriptors), DESCRIPTORS_MIN, DESCRIPTORS_MAX),
            ("process.ring_offers", Some(process.ring_offers), 1, RING_OFFERS_MAX),
            ("user.programs", user.programs, 1, programs),
            ("user.lanes", user.lanes, 1, lanes),
            ("user.ids", user.ids, 1, IDS_MAX),
            ("user.listeners", Some(user.listeners), 1, IDS_MAX),
            ("user.pending_connections", Some(user.pending_connections), 1, IDS_MAX),
            ("user.event_channels", user.event_channels, 1, CHANNELS_MAX),
            ("user.descriptors", user.descriptors, DESCRIPTORS_MIN, DESCRIPTORS_MAX),
            ("user.ring_offers", user.ring_offers, 1, RING_OFFERS_MAX),
            ("user.groups", user.groups, 1, GROUPS_OF_ALL_MAX),
        ];
        for (key, value, least, most) in all {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                return Err(format!("limits.{key} is {value}, and may be from {least} to {most}"));
            }
        }
        Ok(())
    }
}

impl Config {
    /// What the files of this system and this user say.
    ///
    /// EINVAL: a file says what cannot be; the text names file, line and remedy. Others: a file cannot be read.
    pub fn load() -> Result<Config, ServiceError> {
        let files = files(environment::var_os);
        let mut merged = toml::Table::new();
        for (path, must_exist) in files {
            if let Some(text) = read(&path, must_exist)? {
                merge(&mut merged, parse(&path, &text)?);
            }
        }
        // Each file was right by itself, and so are both together.
        merged.try_into().map_err(|error| ServiceError::new(libc::EINVAL, format!("the configuration: {error}")))
    }
}

/// The files to read, later ones going before earlier ones, and whether they must be there.
fn files(variable: impl Fn(&str) -> Option<OsString>) -> Vec<(PathBuf, bool)> {
    if let Some(path) = variable(CONFIG_VARIABLE) {
        return vec![(path.into(), true)];
    }
    let home = || Some(PathBuf::from(variable("HOME")?).join(".config"));
    let user = variable("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home).filter(|path| path.is_absolute());
    let user = user.map(|folder| (folder.join(USER_FILE), false));
    [Some((SYSTEM_FILE.into(), false)), user].into_iter().flatten().collect()
}

fn read(path: &Path, must_exist: bool) -> Result<Option<String>, ServiceError> {
    let failed = |error: std::io::Error| {
        let (name, errno) = (path.display(), error.raw_os_error().unwrap_or(libc::EINVAL));
        let what = format!(
            "the configuration {name} cannot be read: {error}; correct it, or set {CONFIG_VARIABLE} to another one"
        );
        ServiceError::new(errno, what)
    };
    match regular_file::read(path, FILE_BYTES_MAX) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !must_exist => Ok(None),
        // HOME is another user's, as after `su`.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && is_users(path, must_exist) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Whether a file is that of the user's home.
fn is_users(path: &Path, must_exist: bool) -> bool {
    !must_exist && path != Path::new(SYSTEM_FILE)
}

/// The file's keys, all of which exist and have values that can be.
fn parse(path: &Path, text: &str) -> Result<toml::Table, ServiceError> {
    let wrong = |key: &str, error: &toml::de::Error| {
        let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let (name, why) = (path.display(), error.message());
        ServiceError::new(libc::EINVAL, format!("{name}, line {line}: {key}{why}; correct the line, or take it out"))
    };
    let file = toml::Deserializer::parse(text).map_err(|error| wrong("", &error))?;
    let config: Config = serde_path_to_error::deserialize(file).map_err(|error| {
        let key = error.path().to_string();
        // At the top there is none.
        let key = if key == "." { key.clone() } else { format!("{key}: ") };
        wrong(key.trim_start_matches('.'), error.inner())
    })?;
    config.limits.check().map_err(|what| {
        ServiceError::new(libc::EINVAL, format!("{}: {what}; correct it, or take it out", path.display()))
    })?;
    toml::from_str(text).map_err(|error| wrong("", &error))
}

fn merge(into: &mut toml::Table, from: toml::Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(into)), toml::Value::Table(from)) => merge(into, from),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let error = parse(Path::new("/x/ferroce.toml"), text).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
        error.to_string()
    }

    #[test]
    fn unknown_keys_are_told_with_their_line_and_what_there_is() {
        let text = refusal("# comment\n[limits.process]\nlanes = 3\nlanez = 4\n");
        assert!(text.starts_with("/x/ferroce.toml, line 4: limits.process.lanez: unknown field `lanez`"), "{text}");
        assert!(text.contains("`listeners`") && text.ends_with("correct the line, or take it out"), "{text}");
        assert!(refusal("[limits.user]\nlanes = -1\n").contains("line 2"));
        assert!(refusal("\n\nlanes = \n").contains("line 3"));
        assert!(refusal("[log]\nlevel = \"loud\"\n").contains("`info`"));
    }

    /// 0 was taken, and nobody could do anything any more; so was what no program could ever have.
    #[test]
    fn limits_that_cannot_be_are_told_with_what_can() {
        let told = |table: &str, line: &str| refusal(&format!("[limits.{table}]\n{line}\n"));
        assert_eq!(
            told("process", "lanes = 65"),
            "/x/ferroce.toml: limits.process.lanes is 65, and may be from 1 to 64; correct it, or take it out"
        );
        let process =
            ["lanes", "ids", "listeners", "pending_connections", "event_channels", "descriptors", "ring_offers"];
        let user = ["programs", "groups"].into_iter().chain(process).collect::<Vec<_>>();
        for (table, keys) in [("process", process.to_vec()), ("user", user)] {
            for key in keys {
                for value in ["0", "4294967295"] {
                    let text = told(table, &format!("{key} = {value}"));
                    assert!(text.contains(&format!("limits.{table}.{key} is {value}, and may be from ")), "{text}");
                }
            }
        }
        for most in ["programs = 4096", "lanes = 1023", "ids = 49152"] {
            parse(Path::new("x"), &format!("[limits.user]\n{most}\n")).unwrap();
        }
        assert!(told("user", "programs = 4097").contains("from 1 to 4096"));
        assert_eq!(Limits::default().check(), Ok(()));
    }

    #[test]
    fn who_is_served_and_trusted_is_told() {
        let config = |text: &str| -> Config { parse(Path::new("x"), text).unwrap().try_into().unwrap() };
        let silent = config("");
        assert_eq!((silent.serve, Serve::default_of(0), Serve::default_of(7)), (None, Serve::Namespace, Serve::User));
        assert_eq!([0, 7, 8].map(|uid| silent.trust.includes(7, uid)), [true, true, false]);
        assert_eq!(config("serve = \"namespace\"").serve, Some(Serve::Namespace));
        assert_eq!([7, 8, 9].map(|uid| config("trust = [8]").trust.includes(7, uid)), [true, true, false]);
        assert!(config("trust = \"any\"").trust.includes(7, 65_534));
    }

    /// That it "did not match any variant" was all that was said.
    #[test]
    fn a_wrong_value_is_told_with_its_key_and_what_is_allowed() {
        let remedy = "; correct the line, or take it out";
        let user_ids = r#"expected a list of user ids, such as [1000, 1001], or "any""#;
        for (text, told) in [
            ("\nserve = \"all\"\n", "line 2: serve: unknown variant `all`, expected `user` or `namespace`".to_owned()),
            ("trust = \"all\"\n", format!("line 1: trust: invalid value: string \"all\", {user_ids}")),
            ("\ntrust = 7\n", format!("line 2: trust: invalid type: integer `7`, {user_ids}")),
            ("trust = [1,\n-2]\n", "line 2: trust[1]: invalid value: integer `-2`, expected u32".to_owned()),
            (
                "[limits.user]\nlanes = -1\n",
                "line 2: limits.user.lanes: invalid value: integer `-1`, expected u32".to_owned(),
            ),
        ] {
            assert_eq!(refusal(text), format!("/x/ferroce.toml, {told}{remedy}"));
        }
    }

    /// `log = ["x"]` named the file of the log, and `limits.process = [1, 2]` the lanes and the ids.
    #[test]
    fn a_list_is_no_table() {
        for (text, told) in [
            ("\nlog = [\"x\"]\n", "line 2: log: invalid type: sequence, expected a table"),
            ("limits = [[1], []]\n", "line 1: limits: invalid type: sequence, expected a table"),
            ("[limits]\nprocess = [1, 2]\n", "line 2: limits.process: invalid type: sequence, expected a table"),
            ("[[limits.user]]\nlanes = 1\n", "line 1: limits.user: invalid type: sequence, expected a table"),
            ("fault = 7\n", "line 1: fault: invalid type: integer `7`, expected a table"),
        ] {
            assert_eq!(refusal(text), format!("/x/ferroce.toml, {told}; correct the line, or take it out"));
        }
    }

    #[test]
    fn the_worker_gets_what_was_read() {
        for text in ["trust = [8, 9]", "trust = \"any\"", "[log]\nlevel = \"warn\"\n[limits.user]\nlanes = 3", ""] {
            let config: Config = parse(Path::new("x"), text).unwrap().try_into().unwrap();
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
        }
    }

    #[test]
    fn the_users_keys_go_before_the_systems() {
        let file = |text| parse(Path::new("x"), text).unwrap();
        let mut merged = file("idle_s = 5\n[limits.process]\nlanes = 3\nlisteners = 7\n");
        merge(&mut merged, file("[limits.process]\nlanes = 4\n[limits.user]\nprograms = 9\n"));
        let config: Config = merged.try_into().unwrap();
        assert_eq!(config.idle_s, Some(5));
        assert_eq!((config.limits.process.lanes, config.limits.process.listeners), (4, 7));
        assert_eq!((config.limits.user.programs, config.limits.user.lanes), (Some(9), None));
    }

    #[test]
    fn files_are_looked_for_where_systems_have_them() {
        let with = |set: &[(&str, &str)]| {
            let set: Vec<(String, OsString)> = set.iter().map(|(name, value)| ((*name).into(), value.into())).collect();
            let found = files(|name| Some(set.iter().find(|(known, _)| known == name)?.1.clone()));
            found.into_iter().map(|(path, must)| (path.to_str().unwrap().to_owned(), must)).collect::<Vec<_>>()
        };
        let system = (SYSTEM_FILE.to_owned(), false);
        assert_eq!(with(&[("HOME", "/h")]), [system.clone(), ("/h/.config/ferroce/ferroce.toml".into(), false)]);
        let both = with(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/c")]);
        assert_eq!(both, [system.clone(), ("/c/ferroce/ferroce.toml".into(), false)]);
        assert_eq!(with(&[]), [system]);
        assert_eq!(with(&[("HOME", "/h"), (CONFIG_VARIABLE, "/f.toml")]), [("/f.toml".into(), true)]);
    }

    #[test]
    fn idle_seconds_are_a_number() {
        assert_eq!(seconds("0"), Ok(0));
        for wrong in ["-1", "1.5", "ten"] {
            let text = seconds(wrong).unwrap_err().to_string();
            assert!(text.starts_with(&format!("FERROCE_SERVICE_IDLE_S is {wrong:?}: it can be a whole")), "{text}");
        }
    }

    #[test]
    fn a_named_file_must_be_there() {
        let error = read(Path::new("/nonexistent/f.toml"), true).unwrap_err();
        assert_eq!(error.errno(), libc::ENOENT);
        assert!(error.to_string().contains("/nonexistent/f.toml"), "{error}");
        assert_eq!(read(Path::new("/nonexistent/f.toml"), false).unwrap(), None);
    }

    /// The service read /dev/zero until there was no memory left, and waited for ever for whoever writes into a FIFO.
    #[test]
    fn what_is_no_regular_file_or_too_long_is_refused() {
        let refused = |path: &Path| read(path, true).unwrap_err().to_string();
        for path in ["/dev/zero", "/"] {
            let text = refused(Path::new(path));
            assert!(
                text.starts_with(&format!("the configuration {path} cannot be read: it is no regular file;")),
                "{text}"
            );
        }
        let path = std::env::temp_dir().join(format!("ferroce-long-{}.toml", std::process::id()));
        std::fs::write(&path, "#".repeat(FILE_BYTES_MAX as usize)).unwrap();
        assert_eq!(read(&path, true).unwrap().unwrap().len() as u64, FILE_BYTES_MAX);
        std::fs::write(&path, "#".repeat(FILE_BYTES_MAX as usize + 1)).unwrap();
        let text = refused(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(text.contains("more than 1048576 bytes") && text.contains(CONFIG_VARIABLE), "{text}");
    }
}

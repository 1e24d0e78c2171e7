//! What needs a procedure of its own: programs that sleep, fork, unmap, die, or are used wrongly.
//!
//! Most scenarios are one C program of this folder that runs as two processes and judges itself; the procedures here
//! start it. Others do to stock programs what happens to programs in life.

mod connections;
mod datagram;
mod death;
mod pairs;
mod rsocket;
mod seen;
mod sysfs;
mod users;
mod wrong;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

use crate::failure::Failure;
use crate::launch::{Identity, Launcher};
use crate::place::{Host, Wire};
use crate::process::{Finished, Running, wait_all};

/// Where and with what a scenario runs.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    /// The place.
    pub wire: &'a Wire,
    /// Starts programs.
    pub launcher: &'a Launcher,
}

/// A scenario.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Second part of the ids of its lines.
    pub name: &'static str,
    /// Names of the places it runs in.
    pub places: &'static [&'static str],
    /// Its procedure.
    pub run: fn(&World<'_>) -> Result<(), Failure>,
}

const fn scenario(
    name: &'static str,
    places: &'static [&'static str],
    run: fn(&World<'_>) -> Result<(), Failure>,
) -> Scenario {
    Scenario { name, places, run }
}

/// One host, and two hosts with each MTU and address family.
const USUAL: &[&str] = &["host-v4", "veth1500-v4", "veth9000-v6"];
const HOST: &[&str] = &["host-v4"];
const VETH: &[&str] = &["veth1500-v4"];
const HOST_AND_VETH: &[&str] = &["host-v4", "veth1500-v4"];

/// All scenarios.
pub static SCENARIOS: &[Scenario] = &[
    scenario("target-sleeps", USUAL, pairs::target_sleeps),
    scenario("word-ticks", &["host-v4", "veth1500-v4", "card1500-v4"], pairs::word_ticks),
    scenario("last-byte", USUAL, pairs::last_byte),
    scenario("last-byte-10-million", HOST, pairs::last_byte_long),
    scenario("memory-vanishes", USUAL, pairs::memory_vanishes),
    scenario("regions-come-and-go-remote", HOST_AND_VETH, pairs::churn_remote),
    scenario("regions-come-and-go-local", HOST_AND_VETH, pairs::churn_local),
    scenario("statuses", USUAL, pairs::statuses),
    scenario("four-with-four", &["card1500-v4", "card9000-v4"], pairs::four_with_four),
    scenario("fork", HOST_AND_VETH, pairs::fork),
    scenario("fork-and-exec", HOST_AND_VETH, pairs::fork_and_exec),
    scenario("setuid", VETH, pairs::setuid),
    scenario("two-users", HOST_AND_VETH, users::two_users),
    scenario("two-users-connect-by-root", HOST_AND_VETH, users::connections_by_root),
    scenario("two-users-connect-by-one", HOST_AND_VETH, users::connections_by_one_of_them),
    scenario("frames", VETH, pairs::frames),
    scenario("python-multiprocessing", HOST, pairs::python),
    scenario("mesh-4", HOST, pairs::mesh_4),
    scenario("mesh-64", HOST, pairs::mesh_64),
    scenario("qps-10000", HOST, pairs::many_qps),
    scenario("leak", HOST, pairs::leak),
    // Its command line has no room for IPv6 addresses.
    scenario("rcopy", HOST_AND_VETH, rsocket::copy),
    scenario("iperf3-over-rsockets", USUAL, rsocket::iperf3),
    scenario("fork-over-rsockets", HOST_AND_VETH, rsocket::fork),
    scenario("mckey", &["host-v4", "loop-v4", "veth1500-v4", "veth9000-v6"], datagram::mckey),
    scenario("mckey-kill-service", HOST_AND_VETH, datagram::mckey_kill_service),
    scenario("udpong", USUAL, datagram::udpong),
    scenario("cmtime", HOST_AND_VETH, connections::cmtime),
    scenario("rping-persistent", USUAL, connections::rping_persistent),
    scenario("connections-2000", HOST_AND_VETH, connections::flood),
    scenario("pipe-ends", HOST, death::pipe_ends),
    scenario("kill-server", HOST_AND_VETH, death::kill_server),
    scenario("kill-client", HOST_AND_VETH, death::kill_client),
    scenario("kill-with-child", HOST_AND_VETH, death::kill_with_child),
    scenario("kill-ib_write_bw-server", HOST_AND_VETH, death::kill_perftest_server),
    scenario("kill-ib_write_bw-client", HOST_AND_VETH, death::kill_perftest_client),
    scenario("kill-service", HOST, death::kill_service),
    scenario("kill-service-ten-times", HOST, death::kill_service_ten_times),
    scenario("events", HOST_AND_VETH, seen::events),
    scenario("resources-are-seen", HOST_AND_VETH, seen::resources),
    scenario("stopped-service", HOST, seen::stopped_service),
    scenario("sysfs-paths", HOST_AND_VETH, sysfs::paths),
    scenario("sysfs-ucx_info", HOST, sysfs::ucx_info),
    scenario("sysfs-ucx_perftest", HOST_AND_VETH, sysfs::ucx_perftest),
    scenario("wrong-mtu", VETH, wrong::mtu),
    scenario("wrong-gid", VETH, wrong::gid),
    scenario("wrong-address", VETH, wrong::address),
    scenario("full-queue", HOST, wrong::full),
    scenario("wrong-state", HOST, wrong::state),
    scenario("wrong-limits", HOST, wrong::limits),
    scenario("nobody-there", HOST_AND_VETH, wrong::nobody),
    scenario("absent-host", VETH, wrong::absent),
    scenario("absent-host-for-connections", VETH, wrong::absent_for_connections),
    scenario("no-listener", HOST_AND_VETH, wrong::no_listener),
    scenario("no-rdma-there", VETH, wrong::no_rdma_there),
    scenario("pingpong-without-gid", VETH, wrong::pingpong_without_gid),
    scenario("pingpong-gid-99", VETH, wrong::pingpong_gid_99),
    scenario("pingpong-mtu-4096", VETH, wrong::pingpong_mtu_4096),
    scenario("pingpong-no-server", VETH, wrong::pingpong_no_server),
    scenario("port-held", VETH, wrong::port_held),
    scenario("wrong-counters", HOST, wrong::counters),
    scenario("wrong-variables", HOST, wrong::variables),
    scenario("wrong-config", VETH, wrong::config),
    scenario("service-absent", VETH, wrong::service_absent),
];

impl World<'_> {
    /// Starts a program on a host; `own` programs are those of this folder.
    fn start(
        &self,
        role: &str,
        host: &Host,
        identity: Identity,
        env: &[(&str, &str)],
        program: &str,
        args: &[&str],
    ) -> Result<Running, Failure> {
        let own = self.launcher.programs().join(program);
        let program_path = if own.is_file() { own.as_os_str().to_owned() } else { program.into() };
        let env: Vec<(&str, &str)> = host.env.iter().chain(env).copied().collect();
        let args: Vec<_> = args.iter().map(Into::into).collect();
        let command = self.launcher.command(host.netns(), identity, &env, &program_path, &args);
        Running::start(&format!("{role} {program}"), command, &self.launcher.output())
    }

    /// Starts a server and, once it listens, its client; both with `-p PORT`, and `-g` with the GID index.
    fn start_pair(&self, program: &str, server: &[&str], client: &[&str]) -> Result<(Running, Running), Failure> {
        let identity = Identity::Ordinary;
        self.start_pair_as(&[], program, (identity, server), (identity, client))
    }

    fn start_pair_as(
        &self,
        env: &[(&str, &str)],
        program: &str,
        (server_identity, server): (Identity, &[&str]),
        (client_identity, client): (Identity, &[&str]),
    ) -> Result<(Running, Running), Failure> {
        let port = crate::line::next_port();
        let port_text = port.to_string();
        let wire = self.wire;
        let server_gid = wire.server.gid_index(self.launcher)?.to_string();
        let client_gid = wire.client.gid_index(self.launcher)?.to_string();
        let args = [&["-p", &port_text, "-g", &server_gid], server].concat();
        let mut server = self.start("server", &wire.server, server_identity, env, program, &args)?;
        server.wait_listening(port, crate::line::UNTIL_LISTENING)?;
        let args = [&["-p", &port_text, "-g", &client_gid], client, &[wire.server.address]].concat();
        let client = self.start("client", &wire.client, client_identity, env, program, &args)?;
        Ok((server, client))
    }

    /// Runs a program of this folder as two processes that judge themselves.
    fn pair(&self, program: &str, args: &[&str], limit: Duration) -> Result<(), Failure> {
        let (server, client) = self.start_pair(program, args, args)?;
        all_ok(&wait_all(vec![server, client], limit)?)
    }

    /// Runs pairs at the same time and gives what all their processes counted, added up.
    fn counted(&self, pairs: u32, program: &str, args: &[&str], limit: Duration) -> Result<Counters, Failure> {
        let file = self.launcher.scratch("counters");
        let env = [("FERROCE_COUNTERS", file.to_str().expect("temporary folders have plain names"))];
        let mut running = Vec::new();
        for _ in 0..pairs {
            let end = (Identity::Ordinary, args);
            let (server, client) = self.start_pair_as(&env, program, end, end)?;
            running.extend([server, client]);
        }
        let finished = wait_all(running, limit)?;
        all_ok(&finished)?;
        let text = std::fs::read_to_string(&file)
            .map_err(|e| Failure::new(format!("{program} left no counters ({e}): did it close the device?")))?;
        let counters = Counters::parse(&text);
        if counters.processes != finished.len() {
            let (some, all) = (counters.processes, finished.len());
            return Err(Failure::new(format!("{some} processes of {all} left counters")));
        }
        Ok(counters)
    }

    /// Runs a program of this folder as one process that judges itself; gives what it printed.
    fn alone(&self, env: &[(&str, &str)], program: &str, args: &[&str], limit: Duration) -> Result<Finished, Failure> {
        let gid = self.wire.server.gid_index(self.launcher)?.to_string();
        let args = [&["-g", &gid], args].concat();
        let running = self.start("program", &self.wire.server, Identity::Ordinary, env, program, &args)?;
        let finished = wait_all(vec![running], limit)?.remove(0);
        check_ok(&finished)?;
        Ok(finished)
    }

    /// Makes `ferroce status --json` as a user sees it on a host.
    fn status(&self, host: &Host, identity: Identity, env: &[(&str, &str)]) -> Command {
        let env: Vec<_> = host.env.iter().chain(env).copied().collect();
        let words = ["status".into(), "--json".into()];
        self.launcher.plain(host.netns(), identity, &env, self.launcher.ferroce().as_os_str(), &words)
    }

    /// The output of a command of Ferroce itself on a host, which does well.
    fn ferroce(&self, host: &Host, args: &[&str]) -> Result<Finished, Failure> {
        Ok(wait_all(vec![self.start_ferroce(host, args)?], Duration::from_secs(30))?.remove(0))
    }

    /// Starts a command of Ferroce itself on a host.
    fn start_ferroce(&self, host: &Host, args: &[&str]) -> Result<Running, Failure> {
        let args: Vec<_> = args.iter().map(Into::into).collect();
        let ferroce = self.launcher.ferroce();
        let command = self.launcher.plain(host.netns(), Identity::Ordinary, host.env, OsStr::new(&ferroce), &args);
        Running::start("ferroce", command, &self.launcher.output())
    }
}

/// What processes counted.
#[derive(Debug)]
struct Counters {
    processes: usize,
    values: BTreeMap<String, u64>,
}

impl Counters {
    /// Reads lines of process id, name and value; adds the values of the same name.
    fn parse(text: &str) -> Counters {
        let mut pids = BTreeSet::new();
        let mut values = BTreeMap::new();
        for line in text.lines() {
            let mut fields = line.split('\t');
            let (Some(pid), Some(name), Some(value)) = (fields.next(), fields.next(), fields.next()) else { continue };
            pids.insert(pid);
            *values.entry(name.to_owned()).or_default() += value.parse().unwrap_or(0);
        }
        Counters { processes: pids.len(), values }
    }

    /// An error unless all these counters exist and are 0, while packets were counted at all.
    fn check_zero(&self, names: &[&str]) -> Result<(), Failure> {
        let came = |name: &&str| self.values.get(*name).is_some_and(|&packets| packets > 0);
        if !["rx_packets", "ring_rx_packets"].iter().any(came) {
            return Err(Failure::new("no packets were counted").with(self.report()));
        }
        match names.iter().find(|name| self.values.get(**name).is_none_or(|&value| value != 0)) {
            None => Ok(()),
            Some(name) => Err(Failure::new(format!("{name} is not 0")).with(self.report())),
        }
    }

    fn report(&self) -> String {
        let shown = self.values.iter().filter(|(_, value)| **value != 0);
        shown.map(|(name, value)| format!("{name} {value}\n")).collect()
    }
}

/// An error unless each program ended with `ok` and wrote nothing to stderr.
fn all_ok(finished: &[Finished]) -> Result<(), Failure> {
    finished.iter().try_for_each(|program| {
        check_ok(program)?;
        program.check_stderr(&[])
    })
}

fn check_ok(program: &Finished) -> Result<(), Failure> {
    match program.stdout.lines().last() {
        Some(line) if line == "ok" || line.starts_with("ok ") => Ok(()),
        _ => Err(Failure::new(format!("{} did not end with `ok`", program.name)).with(program.report())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_processes_are_added() {
        let counters = Counters::parse("1\trx_packets\t5\n1\ttimeout\t0\n2\trx_packets\t7\n2\ttimeout\t1\n");
        assert_eq!((counters.processes, counters.values["rx_packets"]), (2, 12));
        let failure = counters.check_zero(&["timeout"]).expect_err("is 1");
        assert!(failure.to_string().contains("timeout is not 0\nrx_packets 12\ntimeout 1"), "{failure}");
        counters.check_zero(&["no_such_counter"]).expect_err("a misspelt name must not pass");
        Counters::parse("1\ttimeout\t0\n").check_zero(&["timeout"]).expect_err("nothing was counted");
    }
}

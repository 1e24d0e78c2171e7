//! Programs of two users in one network namespace, whose service is root's or one user's for all.

use std::time::Duration;

use super::{World, all_ok};
use crate::connection;
use crate::failure::Failure;
use crate::launch::Identity;
use crate::line::{PERFTEST_REMARKS, UNTIL_LISTENING, next_port};
use crate::parse;
use crate::place::{Family, Host};
use crate::process::{Finished, Running, wait_all};

const MINUTE: Duration = Duration::from_secs(60);

/// Programs of rdmacm-utils and their options: each kind of connection once, and rsockets.
const CALLS: &[(&str, &str)] = &[
    ("rping", "-C 10 -v"),
    ("ucmatose", "-c 5 -C 10"),
    ("udaddy", "-c 5 -C 10"),
    ("rdma_client", ""),
    ("rdma_xclient", "-c r"),
    ("rdma_xclient", "-c x"),
    ("rstream", "-T b -T v -S 70000 -I 20 -C 20"),
    ("rstream", "-T a -T v -S 70000 -I 20 -C 20"),
    ("riostream", "-T b -T v -S 100000 -I 5 -C 10"),
];

/// Services of a place's hosts that serve every user. They end by themselves when nobody needs them.
struct Services<'a> {
    world: &'a World<'a>,
    env: Vec<(&'static str, String)>,
    running: Vec<Running>,
}

impl<'a> Services<'a> {
    /// Starts them as `identity`; `config` is what ferroce.toml says, for them and for the programs.
    fn start(world: &'a World<'a>, identity: Identity, config: &str) -> Result<Services<'a>, Failure> {
        let path = world.launcher.scratch("ferroce.toml");
        std::fs::write(&path, config).map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))?;
        let plain = |path: &std::path::Path| path.to_str().expect("temporary folders have plain names").to_owned();
        let env = vec![("FERROCE_CONFIG", plain(&path)), ("FERROCE_SERVICE_IDLE_S", "2".to_owned())];
        let mut services = Services { world, env, running: Vec::new() };
        let ferroced = plain(&world.launcher.ferroce().with_file_name("ferroced"));
        // One service where both hosts are one: whoever comes second ends at once, and well.
        for host in [&world.wire.server, &world.wire.client] {
            let mut service = world.start("service", host, identity, &services.env(), &ferroced, &["--ready"])?;
            service.wait_printed("\n", MINUTE)?;
            services.running.push(service);
        }
        Ok(services)
    }

    fn env(&self) -> Vec<(&str, &str)> {
        self.env.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// Nothing of the users' programs is held: the services end.
    fn end(self) -> Result<(), Failure> {
        wait_all(self.running, MINUTE)?.iter().try_for_each(Finished::check_success)
    }

    fn program(
        &self,
        role: &str,
        host: &Host,
        identity: Identity,
        program: &str,
        args: &[String],
    ) -> Result<Running, Failure> {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.world.start(role, host, identity, &self.env(), program, &args)
    }

    /// Waits for what the status says of a program, as its user sees it.
    fn wait(
        &self,
        program: &mut Running,
        host: &Host,
        identity: Identity,
        until: impl FnOnce(&mut Running, &dyn Fn() -> std::process::Command) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        until(program, &|| self.world.status(host, identity, &self.env()))
    }

    /// All calls, the servers of one user and the clients of another.
    fn connections(&self, server: Identity, client: Identity) -> Result<(), Failure> {
        CALLS.iter().try_for_each(|call| self.connection(*call, server, client))?;
        ["ib_send_bw", "ib_write_bw", "ib_read_lat"]
            .iter()
            .try_for_each(|program| self.perftest(program, server, client))
    }

    /// perftest, whose ends connect by RDMA-CM.
    fn perftest(&self, program: &str, server: Identity, client: Identity) -> Result<(), Failure> {
        let wire = self.world.wire;
        // The server tells the client to connect before it listens. A client that fills a large buffer first does not come early; one
        // that does is rejected, and dies of it.
        let port = next_port().to_string();
        let mut args: Vec<String> = ["-R", "-n", "5", "-s", "4194304", "-p", &port].map(str::to_owned).into();
        let mut serving = self.program("server", &wire.server, server, program, &args)?;
        self.wait(&mut serving, &wire.server, server, |program, status| {
            program.wait_connectable(status, UNTIL_LISTENING)
        })?;
        args.push(wire.server.address.to_owned());
        let asking = self.program("client", &wire.client, client, program, &args)?;
        let finished = wait_all(vec![serving, asking], MINUTE)?;
        finished.iter().try_for_each(|finished| finished.check_stderr(PERFTEST_REMARKS))?;
        match parse::perftest(&finished[1].stdout)?.is_empty() {
            true => Err(Failure::new(format!("{program} tells no result")).with(finished[1].report())),
            false => Ok(()),
        }
    }

    fn connection(
        &self,
        (program, options): (&'static str, &str),
        server: Identity,
        client: Identity,
    ) -> Result<(), Failure> {
        let wire = self.world.wire;
        let port = next_port();
        let args = connection::arguments(program, options, port, wire.server.address, None);
        let mut serving = self.program("server", &wire.server, server, connection::server(program), &args)?;
        self.wait(&mut serving, &wire.server, server, |program, status| {
            program.wait_connectable(status, UNTIL_LISTENING)
        })?;
        let to = Some(wire.server.address);
        let args = connection::arguments(program, options, port, wire.client.address, to);
        let asking = self.program("client", &wire.client, client, program, &args)?;
        let finished = wait_all(vec![serving, asking], MINUTE)?;
        finished.iter().try_for_each(|finished| connection::judge(program, options, finished))
    }

    /// A group with a member of each user, and a sender of the first.
    fn group(&self, first: Identity, second: Identity) -> Result<(), Failure> {
        let wire = self.world.wire;
        let group = if wire.server.family == Family::V4 { "239.255.71.1" } else { "ff0e::7:1" };
        let options = format!("-m {group} -c 2 -C 10");
        let mut running = Vec::new();
        for (role, host, identity) in [("server", &wire.server, first), ("client", &wire.client, second)] {
            let args = connection::arguments("mckey", &options, 0, host.address, None);
            let mut member = self.program(role, host, identity, "mckey", &args)?;
            self.wait(&mut member, host, identity, |program, status| program.wait_member(status, UNTIL_LISTENING))?;
            running.push(member);
        }
        let args = connection::arguments("mckey", &options, 0, wire.client.address, Some(wire.server.address));
        running.push(self.program("sender", &wire.client, first, "mckey", &args)?);
        let finished = wait_all(running, MINUTE)?;
        finished.iter().try_for_each(|finished| connection::judge("mckey", &options, finished))
    }
}

/// In a namespace where no other user's service runs yet.
fn anew(world: &World<'_>, then: impl FnOnce(&World<'_>) -> Result<(), Failure>) -> Result<(), Failure> {
    let wire = world.wire.place.make()?;
    then(&World { wire: &wire, launcher: world.launcher })
}

/// Verified traffic between programs of two users, whom root's services serve.
pub(super) fn two_users(world: &World<'_>) -> Result<(), Failure> {
    anew(world, |world| {
        let services = Services::start(world, Identity::Root, "")?;
        let (first, second) = ((Identity::Ordinary, &["-D", "3"][..]), (Identity::Other, &["-D", "3"][..]));
        let (server, client) = world.start_pair_as(&services.env(), "traffic", first, second)?;
        all_ok(&wait_all(vec![server, client], 2 * MINUTE)?)?;
        services.end()
    })
}

/// rdmacm-utils between two users, whom root's services serve.
pub(super) fn connections_by_root(world: &World<'_>) -> Result<(), Failure> {
    anew(world, |world| {
        let services = Services::start(world, Identity::Root, "")?;
        services.connections(Identity::Ordinary, Identity::Other)?;
        services.group(Identity::Ordinary, Identity::Other)?;
        services.end()
    })
}

/// rdmacm-utils between two users, of whom one has the services of both.
pub(super) fn connections_by_one_of_them(world: &World<'_>) -> Result<(), Failure> {
    anew(world, |world| {
        let config = format!("serve = \"namespace\"\ntrust = [{}]\n", world.launcher.uid());
        let services = Services::start(world, Identity::Ordinary, &config)?;
        services.connections(Identity::Ordinary, Identity::Other)?;
        services.connections(Identity::Other, Identity::Ordinary)?;
        services.group(Identity::Other, Identity::Ordinary)?;
        services.end()
    })
}

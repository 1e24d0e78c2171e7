//! Arguments that say where the two ends are.

use anyhow::{Result, bail};

use super::{Choice, Control, Partner};

/// Port of the side channel if none is given.
const PORT: u16 = 18_516;

/// Options of both ends.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// Start the server here, too
    #[arg(long = "self")]
    own: bool,
    /// TCP port of the side channel (server: 0 takes any free one)
    #[arg(long, default_value_t = PORT)]
    pub(crate) port: u16,
    /// Device or interface [default: the one with the side channel's address, else the first]
    #[arg(long)]
    device: Option<String>,
    /// GID index [default: the side channel's address, else the first of its family]
    #[arg(long)]
    gid_index: Option<u32>,
    /// (server) End after one client; those that are not for this server do not count
    #[arg(long)]
    pub(crate) once: bool,
}

impl Place {
    /// The device and GID wished for.
    pub(crate) fn choice(&self) -> Choice {
        Choice { device: self.device.clone(), gid_index: self.gid_index }
    }

    /// Connects to the server of `command` on `host`, or starts one here. The partner must be kept until the end.
    pub(crate) fn reach(&self, command: &str, host: Option<&str>) -> Result<(Control, Option<Partner>)> {
        match host {
            Some(_) if self.own => bail!("--self starts the server here: leave out the host, or --self"),
            Some(host) => Ok((Control::connect(host, self.port)?, None)),
            None if self.own => {
                let address = self.choice().own_address()?;
                let partner = Partner::start(command, self.device.as_deref(), self.gid_index)?;
                Ok((Control::connect(&address.to_string(), partner.port())?, Some(partner)))
            }
            None => bail!("name the host where `ferroce {command} server` runs, or use --self"),
        }
    }
}

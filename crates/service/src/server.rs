//! The service itself.

use std::time::Duration;

use crate::{DEFAULT_NAME, ROCE_PORT, ServiceError};

/// How the service runs.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Abstract Unix socket name, without the leading zero byte.
    pub name: String,
    /// UDP port of the group; other than 4791 for tests only.
    pub port: u16,
    /// Exit after this time without clients.
    pub idle: Option<Duration>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions { name: DEFAULT_NAME.into(), port: ROCE_PORT, idle: Some(Duration::from_secs(10)) }
    }
}

/// The service, bound to its name.
#[derive(Debug)]
pub struct Service {}

impl Service {
    /// Binds the name. EADDRINUSE: another service runs already.
    pub fn bind(options: ServerOptions) -> Result<Service, ServiceError> {
        let _ = options;
        Err(ServiceError::new(libc::ENOSYS, "the service is not built yet"))
    }

    /// Serves until idle.
    pub fn run(self) -> Result<(), ServiceError> {
        Ok(())
    }

    /// Serves from a thread of this process until the handle is dropped.
    pub fn spawn_in_process(options: ServerOptions) -> Result<Hosted, ServiceError> {
        let _ = options;
        Err(ServiceError::new(libc::ENOSYS, "the service is not built yet"))
    }
}

/// A service in a thread of this process; dropping it ends the service.
#[derive(Debug)]
pub struct Hosted {}

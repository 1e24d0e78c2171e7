//! Registered memory.

use std::sync::Arc;

use ferroce::{Access, Buffer, Mr, Pd, Sge};
use serde::{Deserialize, Serialize};

/// What a peer may do, to memory and through queue pairs.
pub(crate) const PEERS_ACCESS: Access =
    Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC).union(Access::FLUSH_GLOBAL);

/// Zeroed memory, registered for all that a peer may do.
pub(crate) struct Registered {
    mr: Arc<Mr>,
    buffer: Arc<Buffer>,
}

/// What a peer needs to know to reach registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Area {
    /// Address of the first byte.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// Key for remote access.
    pub(crate) rkey: u32,
}

impl Registered {
    /// `len` bytes, starting at a page.
    pub(crate) fn new(pd: &Arc<Pd>, len: usize) -> ferroce::Result<Registered> {
        let buffer = Arc::new(Buffer::new(len));
        let access = PEERS_ACCESS | Access::LOCAL_WRITE | Access::MW_BIND;
        Ok(Registered { mr: pd.reg_buffer(&buffer, access)?, buffer })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.buffer.len()
    }

    /// For the peer.
    pub(crate) fn area(&self) -> Area {
        Area { addr: self.buffer.addr(), len: self.len() as u64, rkey: self.mr.rkey() }
    }

    /// Key for local access, and for windows.
    pub(crate) fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    /// A scatter/gather element of `length` bytes at `offset`.
    pub(crate) fn sge(&self, offset: usize, length: u32) -> Sge {
        assert!(offset + length as usize <= self.len(), "an element reaches beyond its memory");
        Sge { addr: self.buffer.addr() + offset as u64, length, lkey: self.mr.lkey() }
    }

    /// One byte.
    pub(crate) fn byte(&self, offset: usize) -> u8 {
        let mut byte = [0];
        self.buffer.read(offset, &mut byte);
        byte[0]
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.buffer.write(offset, bytes);
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.buffer.read(offset, bytes);
    }

    /// Copies `length` bytes out.
    pub(crate) fn copy(&self, offset: usize, length: usize) -> Box<[u8]> {
        let mut bytes = vec![0; length].into_boxed_slice();
        self.read(offset, &mut bytes);
        bytes
    }
}

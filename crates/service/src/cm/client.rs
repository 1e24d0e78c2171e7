//! What librdmacm calls: requests about connections, and event channels.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::protocol::{CmEvent, CmReply, CmRequest, Detail, EVENT_BYTES_MAX, Kept, QpParameters};
use crate::client::Client;
use crate::{ServiceError, seqpacket};

/// An event channel (`rdma_create_event_channel`). Dropping it gives up its ids.
#[derive(Debug)]
pub struct EventChannel {
    number: u64,
    socket: OwnedFd,
}

impl EventChannel {
    /// Opens a channel.
    pub fn open(client: &Client) -> Result<EventChannel, ServiceError> {
        match client.cm_with_descriptors(CmRequest::OpenChannel)? {
            (CmReply::Channel { channel: number }, mut descriptors) if !descriptors.is_empty() => {
                Ok(EventChannel { number, socket: descriptors.swap_remove(0) })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Its number in requests.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Readable when an event waits (`rdma_event_channel.fd`), and for good when the service has ended. O_NONBLOCK of it counts for
    /// [`EventChannel::next_event`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes the next event; waits for it unless the descriptor has O_NONBLOCK (EAGAIN). EINTR: a signal came. ECONNRESET: the
    /// service has ended.
    pub fn next_event(&self) -> io::Result<CmEvent> {
        let mut buffer = [0; EVENT_BYTES_MAX];
        let received = seqpacket::recv(&self.socket, &mut buffer, RecvFlags::empty())?;
        if received.len == 0 {
            return Err(Errno::CONNRESET.into());
        }
        let event: CmEvent = serde_json::from_slice(&buffer[..received.len])?;
        if let Detail::Request { .. } = event.detail {
            // If there is no room for it, a place in the backlog is free only when the request is answered.
            let _full = seqpacket::send(&self.socket, &[&event.id.to_le_bytes()], &[], SendFlags::DONTWAIT);
        }
        Ok(event)
    }
}

/// Requests about connections. Errors carry the errno of the call of librdmacm.
impl Client {
    fn cm_with_descriptors(&self, request: CmRequest) -> Result<(CmReply, Vec<OwnedFd>), ServiceError> {
        self.cm_exchange(request)
    }

    /// Sends a request whose answer is [`CmReply::Done`].
    pub fn cm(&self, request: CmRequest) -> Result<(), ServiceError> {
        match self.cm_exchange(request)? {
            (CmReply::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// A new id on a channel, by number of its port space (`rdma_create_id`).
    pub fn cm_create_id(&self, channel: &EventChannel, space: u16, datagram: bool) -> Result<u64, ServiceError> {
        match self.cm_exchange(CmRequest::CreateId { channel: channel.number, space, datagram })? {
            (CmReply::Id { id }, _) => Ok(id),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// What is needed to go on with an established connection after a crash of the service ([`Client::cm_adopt`]). Nobody else should
    /// have it: whoever has can end the connection.
    pub fn cm_keep(&self, id: u64) -> Result<Kept, ServiceError> {
        match self.cm_exchange(CmRequest::Keep { id })? {
            (CmReply::Kept(kept), _) => Ok(kept),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Goes on with a connection after a crash of the service, which shows as the end of the event channel (ECONNRESET). Gives its
    /// new id.
    pub fn cm_adopt(&self, channel: &EventChannel, connection: &Kept) -> Result<u64, ServiceError> {
        match self.cm_exchange(CmRequest::Adopt { channel: channel.number, connection: *connection })? {
            (CmReply::Id { id }, _) => Ok(id),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Gives an id an address (`rdma_bind_addr`); gives the address with its port.
    pub fn cm_bind(&self, id: u64, addr: SocketAddr, reuse: bool, v6_only: bool) -> Result<SocketAddr, ServiceError> {
        match self.cm_exchange(CmRequest::Bind { id, addr, reuse, v6_only })? {
            (CmReply::Address { addr }, _) => Ok(addr),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// What the queue pair of an id needs to come to RTR and RTS (`rdma_init_qp_attr`).
    pub fn cm_qp_parameters(&self, id: u64) -> Result<QpParameters, ServiceError> {
        match self.cm_exchange(CmRequest::QpParameters { id })? {
            (CmReply::QpParameters(parameters), _) => Ok(parameters),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

fn unexpected(reply: &CmReply) -> ServiceError {
    ServiceError::new(libc::EPROTO, format!("the service gave an answer to another question: {reply:?}"))
}

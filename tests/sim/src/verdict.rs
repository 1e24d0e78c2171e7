//! When nothing is to come any more: is everything done, and is every byte of memory as it must be?

use ferroce_transport::{QpState, QpType};

use crate::oracle::{Fate, Request};
use crate::world::World;

impl World {
    /// The last checks of a run.
    pub(crate) fn judge(&mut self) {
        if self.complaint.is_some() {
            return;
        }
        for qp in 0..self.qps.len() {
            self.judge_liveness(qp);
        }
        for node in 0..self.nodes.len() {
            self.judge_node(node);
        }
        self.judge_words();
        self.judge_domains();
        if self.plan.fixed_len.is_none() {
            for qp in 0..self.qps.len() {
                self.judge_memory(qp);
            }
        }
    }

    fn judge_liveness(&mut self, qp: usize) {
        let machine = &self.qps[qp].machine;
        let (state, due) = (machine.state(), machine.next_timeout());
        let outstanding = self.oracle.books[qp].stream.outstanding().len();
        let left = self.programs[qp].left;
        if outstanding > 0 {
            let request = &self.oracle.books[qp].stream.outstanding()[0];
            self.complain(format!("QP {qp} in {state:?} stands still with {outstanding} requests; first {request:?}"));
        } else if let Some(due) = due {
            self.complain(format!("QP {qp} is idle, but has a timer for {due}"));
        } else if state == QpState::Rts && left > 0 {
            self.complain(format!("QP {qp} has {left} requests left to post, and nothing is to come"));
        } else if !matches!(state, QpState::Rts | QpState::Err | QpState::Reset) {
            self.complain(format!("QP {qp} is left in {state:?}"));
        }
    }

    fn judge_node(&mut self, node: usize) {
        if let Some((window, bytes)) = self.nodes[node].windows().find_in_flight() {
            self.complain(format!("node {node}: {bytes} bytes are left in flight in window {window}"));
        }
        if self.oracle.charged() > 0 {
            self.complain("window bytes were not given back".to_owned());
        }
        let waiting = self.nodes[node].received();
        if waiting > 0 {
            self.complain(format!("node {node}: {waiting} datagrams were never looked at"));
        }
        if let Some(at) = self.nodes[node].memory.find_stray_write() {
            self.complain(format!("node {node}: the byte at {at:#x} was written, though nobody may"));
        }
    }

    /// What may only be read, or only with a key that nobody's queue pair has, never changes: not even by forgeries.
    fn judge_domains(&mut self) {
        for domain in &self.domains {
            for piece in [domain.library, domain.foreign] {
                let node = self.nodes.iter().find(|node| node.memory.contains(piece.at)).expect("a piece is on a node");
                let found = node.memory.find_difference(piece.at, piece.len, domain.library_pattern, piece.len);
                if let Some(at) = found {
                    self.complaint.get_or_insert(format!("the byte at {at:#x}, which nobody may write, changed"));
                }
            }
        }
    }

    /// Each word holds what the atomics that were executed make of it.
    fn judge_words(&mut self) {
        for (&at, &word) in &self.oracle.words {
            let owner =
                self.nodes.iter().find(|node| node.memory.contains(at)).expect("words are in some node's memory");
            let held = owner.memory.word(at);
            if held != word {
                self.complaint.get_or_insert(format!("the word at {at:#x} holds {held:#x} in the end, not {word:#x}"));
            }
        }
    }

    /// Targets of WRITEs and results of READs hold what arrived, and nothing else.
    fn judge_memory(&mut self, qp: usize) {
        let book = &self.oracle.books[qp];
        if book.exposed {
            return;
        }
        let (node, peer) = (self.qps[qp].node, book.peer);
        let there = self.qps[peer].node;
        let cells: Vec<u64> = self.programs[peer].memory.cells.iter().map(|cell| cell.piece.at).collect();
        let mut wrong = None;
        for request in book.past.iter().chain([&book.stream]).flat_map(|stream| &stream.requests) {
            if request.is_write() && !cells.contains(&request.target) && request.fate != Fate::Fragile {
                let memory = &self.nodes[there].memory;
                let Request { target, len, pattern, stored, .. } = *request;
                let found = match book.qp_type {
                    QpType::Rc | QpType::XrcSend => memory.find_difference(target, len, pattern, stored),
                    // Any of its packets may have come or not.
                    _ => (0..len).step_by(self.plan.conns[self.qps[qp].conn].mtu as usize).find_map(|offset| {
                        let size = self.plan.conns[self.qps[qp].conn].mtu.min(len - offset);
                        let (at, piece) = (target + u64::from(offset), pattern.skip(offset));
                        memory.find_difference(at, size, piece, size).and(memory.find_difference(at, size, piece, 0))
                    }),
                };
                wrong = wrong.or(found.map(|at| (there, at, request.wr_id)));
            }
            if request.is_read() {
                let mut left = request.returned;
                let mut offset = 0;
                for &(at, len) in &request.local {
                    let done = left.min(len);
                    let found = self.nodes[node].memory.find_difference(at, len, request.pattern.skip(offset), done);
                    wrong = wrong.or(found.map(|at| (node, at, request.wr_id)));
                    left -= done;
                    offset += len;
                }
            }
        }
        if let Some((node, at, wr_id)) = wrong {
            self.complain(format!("node {node}: the byte at {at:#x} is wrong in the end (request {wr_id:#x})"));
        }
    }
}

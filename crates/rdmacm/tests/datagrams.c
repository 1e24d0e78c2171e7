// Datagram rsockets over loopback, in one process: everything that a program may ask, and strangers at the UDP port. And multicast.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "check.h"
#define FAILS(call, error) CHECK((errno = 0, (call) == -1) && errno == (error))

enum { LONGEST = 2020 };

static struct sockaddr_in address(int port)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
}

static int bound(struct sockaddr_in *at)
{
	int fd = rsocket(AF_INET, SOCK_DGRAM, 0);
	socklen_t len = sizeof *at;
	*at = address(0);
	CHECK(fd >= 0 && rbind(fd, (struct sockaddr *)at, len) == 0);
	CHECK(rgetsockname(fd, (struct sockaddr *)at, &len) == 0 && len == sizeof *at && at->sin_port);
	return fd;
}

static void receive(int fd, const void *bytes, ssize_t size, struct sockaddr_in *from)
{
	char buffer[LONGEST + 1];
	struct sockaddr_in src;
	socklen_t len = sizeof src;
	CHECK(rrecvfrom(fd, buffer, sizeof buffer, 0, (struct sockaddr *)&src, &len) == size);
	CHECK(len == sizeof src && !memcmp(buffer, bytes, size));
	CHECK(src.sin_family == AF_INET && src.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	if (from)
		*from = src;
}

// The client has no address before it sends. The first datagram goes over UDP, later ones over queue pairs.
static void there_and_back(void)
{
	struct sockaddr_in at, client;
	char bytes[LONGEST + 1];
	int server = bound(&at), fd = rsocket(AF_INET, SOCK_DGRAM, IPPROTO_UDP);
	for (unsigned i = 0; i < sizeof bytes; i++)
		bytes[i] = i * 7 + 1;
	FAILS(rsend(fd, "x", 1, 0), EDESTADDRREQ);
	for (int round = 0; round < 50; round++) {
		size_t size = round == 7 ? LONGEST : round == 8 ? 0 : (size_t)(round * 37 % LONGEST);
		CHECK(rsendto(fd, bytes, size, 0, (struct sockaddr *)&at, sizeof at) == (ssize_t)size);
		receive(server, bytes, size, &client);
		CHECK(rsendto(server, bytes + 1, size, 0, (struct sockaddr *)&client, sizeof client) == (ssize_t)size);
		receive(fd, bytes + 1, size, NULL);
	}
	FAILS(rsendto(fd, bytes, sizeof bytes, 0, (struct sockaddr *)&at, sizeof at), EMSGSIZE);

	// Connected, cut, looked at, in pieces.
	CHECK(rconnect(fd, (struct sockaddr *)&at, sizeof at) == 0);
	struct sockaddr_in peer;
	socklen_t len = sizeof peer;
	CHECK(rgetpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_port == at.sin_port);
	FAILS(rgetpeername(server, (struct sockaddr *)&peer, &len), ENOTCONN);
	struct iovec pieces[] = { { "abc", 3 }, { "", 0 }, { "defgh", 5 } };
	CHECK(rwritev(fd, pieces, 3) == 8);
	char four[5] = { 0 };
	CHECK(rrecv(server, four, 4, MSG_PEEK) == 4 && !strcmp(four, "abcd"));
	struct iovec into = { four, 4 };
	struct msghdr message = { .msg_name = &peer, .msg_namelen = sizeof peer, .msg_iov = &into, .msg_iovlen = 1 };
	CHECK(rrecvmsg(server, &message, 0) == 4 && message.msg_flags == MSG_TRUNC && message.msg_namelen == sizeof peer);
	CHECK(peer.sin_port == client.sin_port);
	FAILS(rrecv(server, four, 4, MSG_DONTWAIT), EAGAIN);

	// Polling.
	struct pollfd polled = { server, POLLIN | POLLOUT, 0 };
	CHECK(rpoll(&polled, 1, 0) == 1 && polled.revents == POLLOUT);
	polled.events = POLLIN;
	CHECK(rpoll(&polled, 1, 1) == 0);
	CHECK(rsend(fd, "x", 1, 0) == 1 && rpoll(&polled, 1, 60000) == 1 && polled.revents == POLLIN);
	receive(server, "x", 1, NULL);
	CHECK(rfcntl(server, F_SETFL, O_NONBLOCK) == 0);
	FAILS(rrecv(server, four, 4, 0), EAGAIN);

	// Options.
	int type = 0, size = 100000;
	len = sizeof type;
	CHECK(rgetsockopt(server, SOL_SOCKET, SO_TYPE, &type, &len) == 0 && type == SOCK_DGRAM);
	CHECK(rsetsockopt(server, SOL_SOCKET, SO_RCVBUF, &size, sizeof size) == 0);
	FAILS(rsetsockopt(server, SOL_SOCKET, -7, &size, sizeof size), ENOPROTOOPT);
	FAILS(rlisten(server, 1), EOPNOTSUPP);
	FAILS(raccept(server, NULL, NULL), EOPNOTSUPP);
	CHECK(rclose(fd) == 0 && rclose(server) == 0);
	FAILS(rclose(fd), EBADF);
}

struct waiting {
	int fd, good;
};

static void *wait_for_one(void *argument)
{
	struct waiting *waiting = argument;
	char byte;
	waiting->good = rrecv(waiting->fd, &byte, 1, 0) == 1;
	return NULL;
}

// Several threads sleep on one socket: each datagram wakes one that takes it.
static void sleepers(void)
{
	struct sockaddr_in at;
	int server = bound(&at), fd = rsocket(AF_INET, SOCK_DGRAM, 0);
	struct waiting waiting[4];
	pthread_t threads[4];
	for (int i = 0; i < 4; i++) {
		waiting[i] = (struct waiting){ server, 0 };
		CHECK(pthread_create(&threads[i], NULL, wait_for_one, &waiting[i]) == 0);
	}
	usleep(20000);
	for (int i = 0; i < 4; i++)
		CHECK(rsendto(fd, "x", 1, 0, (struct sockaddr *)&at, sizeof at) == 1);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0 && waiting[i].good);
	CHECK(rclose(fd) == 0 && rclose(server) == 0);
}

// Whatever strangers send to the UDP port, a peer is served.
static void strangers(void)
{
	struct sockaddr_in at;
	int server = bound(&at), udp = socket(AF_INET, SOCK_DGRAM, 0);
	uint8_t bytes[4000];
	unsigned seed = 71;
	CHECK(udp >= 0 && connect(udp, (struct sockaddr *)&at, sizeof at) == 0);
	char none;
	for (int round = 0; round < 3000; round++) {
		size_t size = rand_r(&seed) % (round % 100 ? 64 : sizeof bytes);
		for (size_t i = 0; i < size; i++)
			bytes[i] = rand_r(&seed) >> 8;
		if (round % 2 && size >= 16) {
			// As an introduction begins; with a purpose, version or length that may be right.
			memset(bytes, 0x55, 4);
			bytes[4] = "\4\6\4\7"[rand_r(&seed) % 4];
			bytes[5] = "\7\7\1\11"[rand_r(&seed) % 4];
			bytes[6] = "\20\34\377\0"[rand_r(&seed) % 4];
		}
		CHECK(send(udp, bytes, size, 0) == (ssize_t)size);
		FAILS(rrecv(server, &none, 1, MSG_DONTWAIT), EAGAIN);
	}
	// One that keeps to the protocol is answered over UDP, and its data is a datagram like others.
	uint8_t hello[] = { 0x55, 0x55, 0x55, 0x55, 4, 0, 16, 0, 0, 1, 2, 3, 127, 0, 0, 1, 'h', 'i' };
	struct sockaddr_in own, from;
	socklen_t len = sizeof own;
	CHECK(getsockname(udp, (struct sockaddr *)&own, &len) == 0 && send(udp, hello, sizeof hello, 0) == sizeof hello);
	receive(server, "hi", 2, &from);
	CHECK(from.sin_port == own.sin_port);
	struct pollfd polled = { udp, POLLIN, 0 };
	ssize_t got = -1;
	// Answers to some of the rubbish may have come before.
	do {
		CHECK(poll(&polled, 1, 60000) == 1);
		got = recv(udp, bytes, sizeof bytes, 0);
	} while (got != 16);
	CHECK(!memcmp(bytes, hello, 4) && bytes[4] == 4 && bytes[5] == 7 && bytes[6] == 16 && !memcmp(bytes + 12, hello + 12, 4));
	int fd = rsocket(AF_INET, SOCK_DGRAM, 0);
	for (int round = 0; round < 3; round++) {
		CHECK(rsendto(fd, "peer", 4, 0, (struct sockaddr *)&at, sizeof at) == 4);
		receive(server, "peer", 4, NULL);
	}
	CHECK(rclose(fd) == 0 && rclose(server) == 0 && close(udp) == 0);
}

// Two members of a group in one process; one leaves.
struct member {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	char buffer[140];
};

static struct member join(struct sockaddr_in *group, struct rdma_ud_param *ud)
{
	struct member member = { 0 };
	struct sockaddr_in at = address(0);
	struct ibv_qp_init_attr init = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_UD, .sq_sig_all = 1 };
	CHECK(rdma_create_id(NULL, &member.id, NULL, RDMA_PS_UDP) == 0);
	FAILS(rdma_join_multicast(member.id, (struct sockaddr *)group, NULL), EINVAL);
	CHECK(rdma_bind_addr(member.id, (struct sockaddr *)&at) == 0 && rdma_create_qp(member.id, NULL, &init) == 0);
	at = address(1);
	FAILS(rdma_join_multicast(member.id, (struct sockaddr *)&at, NULL), EINVAL);
	FAILS(rdma_leave_multicast(member.id, (struct sockaddr *)group), EADDRNOTAVAIL);
	CHECK(rdma_join_multicast(member.id, (struct sockaddr *)group, ud) == 0);
	struct rdma_cm_event *event = member.id->event;
	CHECK(event->event == RDMA_CM_EVENT_MULTICAST_JOIN && event->param.ud.private_data == ud);
	CHECK(event->param.ud.qp_num == 0xffffff && event->param.ud.qkey == RDMA_UDP_QKEY);
	*ud = event->param.ud;
	// As long as it is attached it stays.
	CHECK(ibv_destroy_qp(member.id->qp) == EBUSY);
	return member;
}

static void multicast(void)
{
	struct sockaddr_in group = { .sin_family = AF_INET, .sin_addr = { htonl(0xefff4747) } };
	struct rdma_ud_param ud;
	struct member members[] = { join(&group, &ud), join(&group, &ud) };
	for (int i = 0; i < 2; i++) {
		members[i].mr = ibv_reg_mr(members[i].id->pd, members[i].buffer, 140, IBV_ACCESS_LOCAL_WRITE);
		CHECK(members[i].mr);
		struct ibv_sge piece = { (uintptr_t)members[i].buffer, 140, members[i].mr->lkey };
		struct ibv_recv_wr receive = { .sg_list = &piece, .num_sge = 1 }, *bad;
		CHECK(ibv_post_recv(members[i].id->qp, &receive, &bad) == 0 && ibv_post_recv(members[i].id->qp, &receive, &bad) == 0);
	}
	char text[100] = "to all";
	struct ibv_mr *mr = ibv_reg_mr(members[0].id->pd, text, sizeof text, 0);
	struct ibv_ah *ah = ibv_create_ah(members[0].id->pd, &ud.ah_attr);
	CHECK(mr && ah);
	struct ibv_sge piece = { (uintptr_t)text, sizeof text, mr->lkey };
	struct ibv_send_wr send = { .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = ud.qp_num;
	send.wr.ud.remote_qkey = ud.qkey;
	struct ibv_wc wc;
	// First both get it, the sender too; then only who stayed.
	for (int round = 0; round < 2; round++) {
		CHECK(ibv_post_send(members[0].id->qp, &send, &bad) == 0);
		for (int i = 0; i < (round ? 1 : 2); i++) {
			while (ibv_poll_cq(members[i].id->recv_cq, 1, &wc) == 0)
				;
			CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 140 && wc.src_qp == members[0].id->qp->qp_num);
			CHECK(wc.wc_flags & IBV_WC_GRH && !strcmp(members[i].buffer + 40, "to all"));
			// The GRH area has the group's address.
			CHECK(!memcmp(members[i].buffer + 36, &group.sin_addr, 4));
		}
		if (!round)
			CHECK(rdma_leave_multicast(members[1].id, (struct sockaddr *)&group) == 0);
	}
	CHECK(ibv_poll_cq(members[1].id->recv_cq, 1, &wc) == 0);
	// By verbs: twice is once; what was not attached cannot be detached.
	union ibv_gid gid = ud.ah_attr.grh.dgid;
	struct ibv_qp *qp = members[1].id->qp;
	CHECK(ibv_detach_mcast(qp, &gid, 0) == EINVAL);
	CHECK(ibv_attach_mcast(qp, &gid, 0) == 0 && ibv_attach_mcast(qp, &gid, 0) == 0 && ibv_detach_mcast(qp, &gid, 0) == 0);
	gid.raw[12] = 10;
	CHECK(ibv_attach_mcast(qp, &gid, 0) == EINVAL);
	CHECK(rdma_leave_multicast(members[0].id, (struct sockaddr *)&group) == 0);
	CHECK(ibv_destroy_ah(ah) == 0 && ibv_dereg_mr(mr) == 0);
	for (int i = 0; i < 2; i++) {
		rdma_destroy_qp(members[i].id);
		CHECK(ibv_dereg_mr(members[i].mr) == 0 && rdma_destroy_id(members[i].id) == 0);
	}
}

int main(void)
{
	alarm(240);
	setenv("FERROCE_LOOPBACK", "1", 1);
	there_and_back();
	sleepers();
	strangers();
	multicast();
	puts("good");
	return 0;
}

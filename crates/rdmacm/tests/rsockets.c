// Stream rsockets over loopback, both ends in one process except where an end is killed: everything that a program may ask, and peers
// that do not keep to the protocol.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#define FAILS(call, error) CHECK((errno = 0, (call) == -1) && errno == (error))

static struct sockaddr_in address(int port)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
}

static int listener(struct sockaddr_in *at)
{
	int one = 1, fd = rsocket(AF_INET, SOCK_STREAM, 0);
	socklen_t len = sizeof *at;
	*at = address(0);
	CHECK(fd >= 0 && rsetsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(rbind(fd, (struct sockaddr *)at, len) == 0 && rlisten(fd, 5) == 0);
	CHECK(rgetsockname(fd, (struct sockaddr *)at, &len) == 0 && len == sizeof *at && at->sin_port);
	return fd;
}

struct pair {
	int listener, a, b;
};

// Connected: `a` asked, `b` accepted. Connecting does not need the other end to call anything but rpoll.
static struct pair connected(int iomaps)
{
	struct sockaddr_in at, peer;
	socklen_t len = sizeof peer;
	struct pair pair = { .listener = listener(&at) };
	CHECK(rsetsockopt(pair.listener, SOL_RDMA, RDMA_IOMAPSIZE, &iomaps, sizeof iomaps) == 0);
	pair.a = rsocket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
	CHECK(pair.a >= 0 && rsetsockopt(pair.a, SOL_RDMA, RDMA_IOMAPSIZE, &iomaps, sizeof iomaps) == 0);
	CHECK(rfcntl(pair.a, F_SETFL, O_NONBLOCK) == 0 && rfcntl(pair.a, F_GETFL) == (O_RDWR | O_NONBLOCK));
	FAILS(rconnect(pair.a, (struct sockaddr *)&at, sizeof at), EINPROGRESS);
	struct pollfd polled = { pair.listener, POLLIN, 0 };
	CHECK(rpoll(&polled, 1, 60000) == 1 && polled.revents == POLLIN);
	pair.b = raccept(pair.listener, (struct sockaddr *)&peer, &len);
	CHECK(pair.b >= 0 && len == sizeof peer && peer.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	polled = (struct pollfd){ pair.a, POLLOUT, 0 };
	CHECK(rpoll(&polled, 1, 60000) == 1 && polled.revents == POLLOUT);
	int error = 1;
	len = sizeof error;
	CHECK(rgetsockopt(pair.a, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0 && len == sizeof error);
	CHECK(rconnect(pair.a, (struct sockaddr *)&at, sizeof at) == 0);
	CHECK(rfcntl(pair.a, F_SETFL, 0) == 0 && rfcntl(pair.b, F_GETFL) == O_RDWR);
	return pair;
}

static void close_pair(struct pair pair)
{
	CHECK(rclose(pair.a) == 0 && rclose(pair.b) == 0 && rclose(pair.listener) == 0);
	FAILS(rclose(pair.a), EBADF);
}

static void refused(void)
{
	char byte;
	socklen_t len = 1;
	struct sockaddr_in at = address(9);
	struct iovec piece = { &byte, 1 };
	struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
	FAILS(rsocket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
	FAILS(rsocket(AF_INET, SOCK_RAW, 0), ESOCKTNOSUPPORT);
	FAILS(rsocket(AF_INET, SOCK_STREAM, IPPROTO_UDP), EPROTONOSUPPORT);
	// Numbers that are no rsockets.
	int wrong[] = { -1, 0, 1 << 30 };
	for (int i = 0; i < 3; i++) {
		int fd = wrong[i];
		FAILS(rbind(fd, (struct sockaddr *)&at, sizeof at), EBADF);
		FAILS(rlisten(fd, 1), EBADF);
		FAILS(raccept(fd, NULL, NULL), EBADF);
		FAILS(rconnect(fd, (struct sockaddr *)&at, sizeof at), EBADF);
		FAILS(rshutdown(fd, SHUT_RD), EBADF);
		FAILS(rclose(fd), EBADF);
		FAILS(rrecv(fd, &byte, 1, 0), EBADF);
		FAILS(rrecvfrom(fd, &byte, 1, 0, NULL, NULL), EBADF);
		FAILS(rrecvmsg(fd, &message, 0), EBADF);
		FAILS(rsend(fd, &byte, 1, 0), EBADF);
		FAILS(rsendto(fd, &byte, 1, 0, NULL, 0), EBADF);
		FAILS(rsendmsg(fd, &message, 0), EBADF);
		FAILS(rread(fd, &byte, 1), EBADF);
		FAILS(rreadv(fd, &piece, 1), EBADF);
		FAILS(rwrite(fd, &byte, 1), EBADF);
		FAILS(rwritev(fd, &piece, 1), EBADF);
		FAILS(rgetpeername(fd, (struct sockaddr *)&at, &len), EBADF);
		FAILS(rgetsockname(fd, (struct sockaddr *)&at, &len), EBADF);
		FAILS(rsetsockopt(fd, SOL_SOCKET, SO_ERROR, &byte, 1), EBADF);
		FAILS(rgetsockopt(fd, SOL_SOCKET, SO_ERROR, &byte, &len), EBADF);
		FAILS(rfcntl(fd, F_GETFL), EBADF);
		FAILS(riomap(fd, &byte, 1, PROT_WRITE, 0, 0), EBADF);
		FAILS(riounmap(fd, &byte, 1), EBADF);
		FAILS((ssize_t)riowrite(fd, &byte, 1, 0, 0), EBADF);
	}
	FAILS(rpoll(NULL, 1, 0), EFAULT);
	FAILS(rpoll(NULL, (nfds_t)-1, 0), EINVAL);
	CHECK(rpoll(NULL, 0, 0) == 0);
	FAILS(rselect(-1, NULL, NULL, NULL, NULL), EINVAL);
	struct timeval never = { -1, 0 }, now = { 0, 0 };
	FAILS(rselect(0, NULL, NULL, NULL, &never), EINVAL);
	CHECK(rselect(0, NULL, NULL, NULL, &now) == 0);
	FAILS(rrecvmsg(0, NULL, 0), EINVAL);
	FAILS(rsendmsg(0, NULL, 0), EINVAL);

	// A socket that is not connected.
	int fd = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), value = -5;
	CHECK(fd >= 0 && rfcntl(fd, F_GETFL) == (O_RDWR | O_NONBLOCK) && rfcntl(fd, F_GETFD) == FD_CLOEXEC);
	FAILS(rfcntl(fd, F_DUPFD, 0), EOPNOTSUPP);
	FAILS(rbind(fd, NULL, sizeof at), EINVAL);
	FAILS(rbind(fd, (struct sockaddr *)&at, 3), EINVAL);
	FAILS(rconnect(fd, (struct sockaddr *)&at, 0), EINVAL);
	FAILS(rconnect(fd, NULL, 16), EINVAL);
	struct sockaddr nothing = { .sa_family = AF_UNIX };
	FAILS(rconnect(fd, &nothing, sizeof nothing), EAFNOSUPPORT);
	FAILS(rsend(fd, &byte, 1, 0), ENOTCONN);
	FAILS(rrecv(fd, &byte, 1, 0), ENOTCONN);
	FAILS(rshutdown(fd, SHUT_RDWR), ENOTCONN);
	FAILS(rshutdown(fd, 9), EINVAL);
	FAILS(raccept(fd, NULL, NULL), EINVAL);
	FAILS(riomap(fd, &byte, 1, PROT_WRITE, 0, 0), ENOTCONN);
	FAILS(riomap(fd, NULL, 1, PROT_WRITE, 0, 0), EINVAL);
	FAILS(riomap(fd, &byte, (size_t)1 << 32, PROT_WRITE, 0, 0), EINVAL);
	FAILS(riomap(fd, &byte, 1, PROT_EXEC, 0, 0), EINVAL);
	FAILS(riounmap(fd, &byte, 1), EINVAL);
	FAILS((ssize_t)riowrite(fd, NULL, 1, 0, 0), EFAULT);
	FAILS(rgetpeername(fd, (struct sockaddr *)&at, &len), ENOTCONN);
	FAILS(rgetsockname(fd, NULL, NULL), EINVAL);
	FAILS(rgetsockname(fd, NULL, &len), EFAULT);
	len = 0;
	CHECK(rgetsockname(fd, NULL, &len) == 0 && len == sizeof at);
	FAILS(rsetsockopt(fd, SOL_SOCKET, SO_RCVBUF, NULL, 4), EINVAL);
	FAILS(rsetsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, 3), EINVAL);
	FAILS(rsetsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, 4), EINVAL);
	FAILS(rsetsockopt(fd, SOL_SOCKET, 12345, &value, 4), ENOPROTOOPT);
	FAILS(rsetsockopt(fd, 77, 0, &value, 4), ENOPROTOOPT);
	FAILS(rsetsockopt(fd, SOL_RDMA, RDMA_ROUTE, &value, 4), EOPNOTSUPP);
	FAILS(rgetsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, NULL), EINVAL);
	FAILS(rgetsockopt(fd, SOL_SOCKET, SO_RCVBUF, NULL, &len), EINVAL);
	CHECK(rclose(fd) == 0);

	// Nobody listens.
	fd = rsocket(AF_INET, SOCK_STREAM, 0);
	at = address(9);
	FAILS(rconnect(fd, (struct sockaddr *)&at, sizeof at), ECONNREFUSED);
	CHECK(rclose(fd) == 0);
}

static void options(void)
{
	int fd = rsocket(AF_INET6, SOCK_STREAM, 0), value, wanted;
	socklen_t len = sizeof value;
	const struct { int level, name, set, get; } table[] = {
		{ SOL_SOCKET, SO_RCVBUF, 100000, 200000 }, { SOL_SOCKET, SO_RCVBUF, 0, 4096 },
		{ SOL_SOCKET, SO_SNDBUF, 50000, 100000 },  { SOL_SOCKET, SO_SNDBUF, 2147483647, 1 << 30 },
		{ SOL_SOCKET, SO_KEEPALIVE, 1, 1 },        { SOL_SOCKET, SO_REUSEADDR, 5, 1 },
		{ IPPROTO_TCP, TCP_NODELAY, 1, 1 },        { IPPROTO_IPV6, IPV6_V6ONLY, 1, 1 },
		{ SOL_RDMA, RDMA_SQSIZE, 100, 100 },       { SOL_RDMA, RDMA_RQSIZE, 1 << 20, 0xfffe },
		{ SOL_RDMA, RDMA_INLINE, 32, 32 },         { SOL_RDMA, RDMA_IOMAPSIZE, 129, 128 },
	};
	for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
		wanted = table[i].set;
		CHECK(rsetsockopt(fd, table[i].level, table[i].name, &wanted, sizeof wanted) == 0);
		CHECK(rgetsockopt(fd, table[i].level, table[i].name, &value, &len) == 0 && len == sizeof value);
		CHECK(value == table[i].get);
	}
	struct tcp_info info;
	len = sizeof info;
	CHECK(rgetsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0 && info.tcpi_state == TCP_CLOSE);
	// No more is written than there is room for.
	unsigned char small[2] = { 9, 9 };
	len = 1;
	CHECK(rgetsockopt(fd, SOL_SOCKET, SO_TYPE, small, &len) == 0 && len == 1 && small[1] == 9);
	CHECK(rclose(fd) == 0);
}

static void transfers(void)
{
	struct pair pair = connected(0);
	char text[100];
	// Nothing is there yet.
	FAILS(rrecv(pair.b, text, sizeof text, MSG_DONTWAIT), EAGAIN);
	FAILS(rrecv(pair.b, text, sizeof text, MSG_OOB), EOPNOTSUPP);
	FAILS(rrecv(pair.b, NULL, 1, 0), EFAULT);
	FAILS(rsend(pair.b, NULL, 1, 0), EFAULT);
	FAILS(rsend(pair.b, text, (size_t)-1, 0), EINVAL);
	FAILS(rsendto(pair.a, text, 1, 0, (struct sockaddr *)text, 16), EISCONN);
	FAILS(rreadv(pair.a, NULL, 1), EINVAL);
	FAILS(rreadv(pair.a, NULL, -1), EINVAL);
	FAILS(rwritev(pair.a, NULL, 100000), EMSGSIZE);
	CHECK(rsend(pair.a, NULL, 0, 0) == 0 && rrecv(pair.a, NULL, 0, 0) == 0 && rreadv(pair.a, NULL, 0) == 0);
	struct timeval soon = { 0, 1000 };
	CHECK(rsetsockopt(pair.b, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0);
	FAILS(rrecv(pair.b, text, sizeof text, 0), EAGAIN);
	soon.tv_usec = 0;
	CHECK(rsetsockopt(pair.b, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0);

	// Pieces, one of them empty; looked at, then taken.
	struct iovec out[] = { { "one ", 4 }, { NULL, 0 }, { "two ", 4 }, { "three", 6 } };
	CHECK(rwritev(pair.a, out, 4) == 14);
	CHECK(rrecv(pair.b, text, 14, MSG_WAITALL | MSG_PEEK) > 0);
	char first[3], second[30];
	struct iovec in[] = { { first, 3 }, { second, 30 } };
	struct msghdr message = { .msg_iov = in, .msg_iovlen = 2, .msg_control = text, .msg_controllen = sizeof text };
	CHECK(rrecvmsg(pair.b, &message, MSG_PEEK) == 14 && message.msg_controllen == 0);
	CHECK(!memcmp(first, "one", 3) && !strcmp(second, " two three"));
	CHECK(rread(pair.b, text, 4) == 4 && rreadv(pair.b, in, 2) == 10 && !memcmp(first, "two", 3) && !strcmp(second, " three"));
	message = (struct msghdr){ .msg_iov = out, .msg_iovlen = 1, .msg_control = text, .msg_controllen = 1 };
	FAILS(rsendmsg(pair.a, &message, 0), EOPNOTSUPP);
	message.msg_controllen = 0;
	CHECK(rsendmsg(pair.a, &message, 0) == 4);
	struct sockaddr_in from;
	socklen_t len = sizeof from;
	CHECK(rrecvfrom(pair.b, text, 4, MSG_WAITALL, (struct sockaddr *)&from, &len) == 4 && from.sin_family == AF_INET);

	// More than both buffers hold: what does not fit is refused, and all of it arrives.
	enum { SIZE = 3000000 };
	unsigned char *data = malloc(SIZE), *copy = malloc(SIZE);
	for (int i = 0; i < SIZE; i++)
		data[i] = (unsigned char)(i * 7 + i / 251);
	size_t sent = 0, received = 0;
	int blocked = 0;
	while (received < SIZE) {
		ssize_t n = rsend(pair.a, data + sent, SIZE - sent, MSG_DONTWAIT);
		if (n < 0)
			CHECK(errno == EAGAIN && ++blocked);
		else
			sent += n;
		if (n < 0 || sent == SIZE) {
			struct pollfd polled = { pair.b, POLLIN, 0 };
			CHECK(rpoll(&polled, 1, 60000) == 1);
			n = rrecv(pair.b, copy + received, SIZE - received, 0);
			CHECK(n > 0);
			received += n;
		}
	}
	CHECK(blocked && !memcmp(data, copy, SIZE));

	// One end stops sending, and still receives.
	CHECK(rsend(pair.a, "last", 4, 0) == 4 && rshutdown(pair.a, SHUT_WR) == 0);
	FAILS(rsend(pair.a, "x", 1, 0), EPIPE);
	CHECK(rrecv(pair.b, text, 10, MSG_WAITALL) == 4 && rrecv(pair.b, text, 10, 0) == 0);
	CHECK(rsend(pair.b, "answer", 6, 0) == 6 && rrecv(pair.a, text, 6, MSG_WAITALL) == 6);
	// What was sent before the end is read after it, and only then the end is told.
	CHECK(rsend(pair.b, "bye", 3, 0) == 3 && rclose(pair.b) == 0);
	struct pollfd polled = { pair.a, POLLIN, 0 };
	CHECK(rpoll(&polled, 1, 60000) == 1 && polled.revents == POLLIN);
	CHECK(rrecv(pair.a, text, 10, MSG_WAITALL) == 3 && rrecv(pair.a, text, 10, 0) == 0);
	CHECK(rpoll(&polled, 1, 60000) == 1 && polled.revents & POLLHUP);
	CHECK(rclose(pair.a) == 0 && rclose(pair.listener) == 0);
	free(data);
	free(copy);
}

static void polling(void)
{
	struct pair pair = connected(0);
	int ends[2];
	CHECK(pipe(ends) == 0);
	struct pollfd polled[] = { { ends[0], POLLIN, 0 }, { pair.b, POLLIN, 0 }, { -1, POLLIN, 9 }, { pair.a, POLLOUT, 0 } };
	CHECK(rpoll(polled, 4, 0) == 1 && polled[3].revents == POLLOUT && !polled[2].revents);
	CHECK(rpoll(polled, 3, 1) == 0);
	CHECK(write(ends[1], "x", 1) == 1 && rpoll(polled, 3, 60000) == 1 && polled[0].revents == POLLIN);
	CHECK(rsend(pair.a, "y", 1, 0) == 1);
	polled[0].events = 0;
	CHECK(rpoll(polled, 3, 60000) == 1 && polled[1].revents == POLLIN);

	fd_set read_set, write_set, except_set;
	FD_ZERO(&read_set);
	FD_ZERO(&write_set);
	FD_ZERO(&except_set);
	FD_SET(pair.b, &read_set), FD_SET(ends[0], &read_set), FD_SET(pair.listener, &read_set);
	FD_SET(pair.a, &write_set), FD_SET(pair.a, &except_set);
	CHECK(rselect(FD_SETSIZE, &read_set, &write_set, &except_set, NULL) == 3);
	CHECK(FD_ISSET(pair.b, &read_set) && FD_ISSET(ends[0], &read_set) && !FD_ISSET(pair.listener, &read_set));
	CHECK(FD_ISSET(pair.a, &write_set) && !FD_ISSET(pair.a, &except_set));
	close(ends[0]), close(ends[1]);
	close_pair(pair);
}

static void mappings(void)
{
	struct pair pair = connected(2);
	static char memory[3][50000], data[50000];
	for (int i = 0; i < 50000; i++)
		data[i] = (char)(i * 3);
	CHECK(riomap(pair.b, memory[0], 50000, PROT_WRITE, 0, 1000) == 1000);
	CHECK(riomap(pair.b, memory[1], 50000, PROT_WRITE, 0, -1) == (off_t)(uintptr_t)memory[1]);
	FAILS(riomap(pair.b, memory[2], 50000, PROT_WRITE, 0, 0), ENOMEM);
	CHECK(riomap(pair.b, memory[2], 50000, PROT_NONE, 0, 0) == 0);
	// They are told before whatever is sent next.
	CHECK(rsend(pair.b, "!", 1, 0) == 1);
	char byte;
	CHECK(rrecv(pair.a, &byte, 1, 0) == 1);
	CHECK(riowrite(pair.a, data, 30000, 1000 + 100, 0) == 30000);
	CHECK(riowrite(pair.a, data, 50000, (off_t)(uintptr_t)memory[1], 0) == 50000);
	FAILS((ssize_t)riowrite(pair.a, data, 1, 999, 0), EINVAL);
	FAILS((ssize_t)riowrite(pair.a, data, 1, 51000, 0), EINVAL);
	// As far as the mapping goes.
	CHECK(riowrite(pair.a, data, 50000, 1000 + 49000, 0) == 1000);
	CHECK(rsend(pair.a, "?", 1, 0) == 1 && rrecv(pair.b, &byte, 1, 0) == 1);
	CHECK(!memcmp(memory[0] + 100, data, 30000) && !memcmp(memory[1], data, 50000) && !memcmp(memory[0] + 49000, data, 1000));
	CHECK(!memory[0][99]);
	CHECK(riounmap(pair.b, memory[0], 50000) == 0 && riounmap(pair.b, memory[2], 50000) == 0);
	FAILS(riounmap(pair.b, memory[0], 50000), EINVAL);
	CHECK(riomap(pair.b, memory[2], 50000, PROT_WRITE, 0, 0) == 0);
	close_pair(pair);
}

// Two threads sleep on one socket, each for its own direction, and a third one on both ends by rpoll.
static void *echo(void *fd)
{
	char buffer[5000];
	ssize_t n;
	while ((n = rrecv(*(int *)fd, buffer, sizeof buffer, 0)) > 0)
		CHECK(rsend(*(int *)fd, buffer, n, 0) == n);
	CHECK(n == 0);
	return NULL;
}

static void *pour(void *fd)
{
	static char buffer[4000000];
	CHECK(rsend(*(int *)fd, buffer, sizeof buffer, 0) == sizeof buffer);
	return NULL;
}

static void threads(void)
{
	struct pair pair = connected(0);
	pthread_t echoing, pouring;
	CHECK(!pthread_create(&echoing, NULL, echo, &pair.b) && !pthread_create(&pouring, NULL, pour, &pair.a));
	static char buffer[4000000];
	CHECK(rrecv(pair.a, buffer, sizeof buffer, MSG_WAITALL) == sizeof buffer);
	CHECK(!pthread_join(pouring, NULL) && !rshutdown(pair.a, SHUT_WR) && !pthread_join(echoing, NULL));
	close_pair(pair);
}

// What an rsocket says of itself in the private data.
struct greeting {
	uint8_t version, flags;
	uint16_t credits;
	uint8_t reserved[3], iomaps;
	struct { uint64_t addr; uint32_t key, length; } table, target;
};

// A peer that speaks RDMA-CM, and says and writes what it likes.
static struct rdma_cm_id *stranger(struct sockaddr_in *to, const void *data, size_t len, struct greeting *answer)
{
	struct rdma_cm_id *id;
	struct ibv_qp_init_attr attr = { .cap = { 16, 16, 1, 1, 0 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
	struct rdma_conn_param param = { .private_data = data, .private_data_len = len, .retry_count = 7, .rnr_retry_count = 7 };
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)to, 1000) == 0 && rdma_resolve_route(id, 1000) == 0);
	CHECK(rdma_create_qp(id, NULL, &attr) == 0);
	if (rdma_connect(id, &param)) {
		CHECK(errno == ECONNREFUSED && !answer);
		return id;
	}
	CHECK(answer && id->event->param.conn.private_data_len >= sizeof *answer);
	memcpy(answer, id->event->param.conn.private_data, sizeof *answer);
	return id;
}

static struct greeting greeting(void)
{
	struct greeting said = { .version = 1, .credits = htobe16(64) };
	said.table.length = htobe32(2);
	return said;
}

static void *accept_one(void *fd)
{
	int *ends = fd;
	struct pollfd polled = { ends[0], POLLIN, 0 };
	while (rpoll(&polled, 1, -1) != 1)
		;
	ends[1] = raccept(ends[0], NULL, NULL);
	return NULL;
}

static void write_imm(struct rdma_cm_id *id, uint32_t imm)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htobe32(imm) }, *bad;
	CHECK(ibv_post_send(id->qp, &wr, &bad) == 0);
}

static void hostile(void)
{
	struct sockaddr_in at;
	int fd = listener(&at);
	CHECK(rfcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	struct greeting wrong[4] = { greeting(), greeting(), greeting() }, answer;
	wrong[0].version = 2;
	wrong[1].table.length = 0;
	size_t lengths[] = { sizeof answer, sizeof answer, 0, 8 };
	for (int i = 0; i < 4; i++) {
		// Somebody must look at the listener for a request to be rejected.
		int ends[2] = { fd, -1 };
		pthread_t thread;
		CHECK(!pthread_create(&thread, NULL, accept_one, ends));
		struct rdma_cm_id *id = stranger(&at, &wrong[i], lengths[i], NULL);
		// The thread has not got it; an honest one comes for its sake.
		int honest = rsocket(AF_INET, SOCK_STREAM, 0);
		CHECK(rconnect(honest, (struct sockaddr *)&at, sizeof at) == 0 && !pthread_join(thread, NULL) && ends[1] >= 0);
		CHECK(rclose(honest) == 0 && rclose(ends[1]) == 0);
		rdma_destroy_qp(id);
		CHECK(rdma_destroy_id(id) == 0);
	}

	// More bytes than were granted; an unknown operation; more messages than credits; grants of nonsense.
	const uint32_t immediates[] = { 0x1fffffff, 65537, 1 << 29, 5u << 29, 0xa0000000 };
	for (size_t i = 0; i < 5; i++) {
		int ends[2] = { fd, -1 };
		char text[10];
		struct greeting said = greeting();
		pthread_t thread;
		CHECK(!pthread_create(&thread, NULL, accept_one, ends));
		struct rdma_cm_id *id = stranger(&at, &said, sizeof said, &answer);
		CHECK(!pthread_join(thread, NULL) && ends[1] >= 0 && answer.version == 1 && be32toh(answer.table.length) == 2);
		write_imm(id, immediates[i]);
		FAILS(rrecv(ends[1], text, sizeof text, 0), ECONNRESET);
		FAILS(rsend(ends[1], text, sizeof text, 0), ECONNRESET);
		CHECK(rclose(ends[1]) == 0);
		rdma_destroy_qp(id);
		CHECK(rdma_destroy_id(id) == 0);
	}

	// Targets that do not exist: the sender finds out, and nobody else is harmed.
	int ends[2] = { fd, -1 };
	struct greeting said = greeting();
	said.target.addr = htobe64(4096);
	said.target.length = htobe32(1 << 20);
	said.target.key = htobe32(77);
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, accept_one, ends));
	struct rdma_cm_id *id = stranger(&at, &said, sizeof said, &answer);
	CHECK(!pthread_join(thread, NULL) && ends[1] >= 0);
	char text[10000] = "";
	ssize_t n;
	while ((n = rsend(ends[1], text, sizeof text, 0)) > 0)
		;
	CHECK(n == -1 && errno == ECONNRESET && rclose(ends[1]) == 0);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0 && rclose(fd) == 0);
}

// A peer that is killed: who waits for it is told.
static void killed(void)
{
	int ends[2];
	char text[10];
	CHECK(pipe(ends) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct sockaddr_in at;
		// Else it would wait for itself if the parent failed.
		CHECK(close(ends[1]) == 0);
		CHECK(read(ends[0], &at, sizeof at) == sizeof at);
		int fd = rsocket(AF_INET, SOCK_STREAM, 0);
		CHECK(rconnect(fd, (struct sockaddr *)&at, sizeof at) == 0 && rsend(fd, "hello", 5, 0) == 5);
		rrecv(fd, text, sizeof text, 0);
		_exit(1);
	}
	struct sockaddr_in at;
	int fd = listener(&at);
	CHECK(write(ends[1], &at, sizeof at) == sizeof at);
	int accepted = raccept(fd, NULL, NULL);
	CHECK(accepted >= 0 && rrecv(accepted, text, 5, MSG_WAITALL) == 5);
	CHECK(kill(child, SIGKILL) == 0);
	ssize_t n = rrecv(accepted, text, 5, 0);
	CHECK(n == 0 || (n == -1 && errno == ECONNRESET));
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
	CHECK(rclose(accepted) == 0 && rclose(fd) == 0);
}

// A child has its parent's numbers, but nothing is behind them; closing them there harms nobody.
static void forked(void)
{
	struct pair pair = connected(0);
	char text[10];
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		FAILS(rsend(pair.a, "x", 1, 0), EIO);
		FAILS(rrecv(pair.b, text, 1, 0), EIO);
		CHECK(rclose(pair.a) == 0 && rclose(pair.b) == 0 && rclose(pair.listener) == 0);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(rsend(pair.a, "still", 5, 0) == 5 && rrecv(pair.b, text, 5, MSG_WAITALL) == 5);
	close_pair(pair);
}

int main(void)
{
	setvbuf(stdout, NULL, _IONBF, 0);
	alarm(300);
	// Before there are threads.
	killed();
	refused();
	options();
	transfers();
	polling();
	mappings();
	threads();
	hostile();
	forked();
	printf("good\n");
	return 0;
}

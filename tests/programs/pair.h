/*
 * What the programs of this folder share: two processes, a TCP side channel, a device, queue pairs.
 *
 * Nothing but the C interface of libibverbs is used. A program without a host argument is the server, as with
 * ibv_rc_pingpong. Any fault ends the program with exit code 1 and one line on stderr.
 */
#ifndef PAIR_H
#define PAIR_H


#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Longest wait for anything that must come, in seconds. */
#define PATIENCE_S 60

static const char *me = "?";

__attribute__((noreturn, format(printf, 1, 2), unused)) static void die(const char *format, ...)
{
	va_list args;

	fprintf(stderr, "%s: ", me);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	fflush(stdout);
	_exit(1);
}

/* What the statement says must hold; the message says what did not. */
#define CHECK(condition, ...)                                                                                          \
	do {                                                                                                           \
		if (!(condition))                                                                                      \
			die(__VA_ARGS__);                                                                              \
	} while (0)

__attribute__((unused)) static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

__attribute__((unused)) static void sleep_ms(long ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};

	while (nanosleep(&t, &t) != 0 && errno == EINTR)
		;
}

/* ---- Pseudo-random numbers and patterns ---------------------------------------------------------------------- */

__attribute__((unused)) static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

/* Fills buf with the bytes [offset, offset + length) of the endless pattern that key names. */
__attribute__((unused)) static void pattern(uint8_t *buf, uint64_t key, uint64_t offset, size_t length)
{
	size_t i = 0;

	while (i < length) {
		uint64_t at = offset + i, word = mix(key ^ (at / 8 * 0x2545f4914f6cdd1du));
		size_t skip = at % 8, take = 8 - skip;

		if (take > length - i)
			take = length - i;
		memcpy(buf + i, (uint8_t *)&word + skip, take);
		i += take;
	}
}

/* ---- Options --------------------------------------------------------------------------------------------------- */

struct options {
	const char *host; /* NULL: server */
	const char *port;
	const char *device; /* NULL: the first */
	int gid;
	enum ibv_qp_type type;
	bool events;
	bool srq;
	uint64_t seed;
	uint64_t count;
	uint64_t largest; /* bytes of the longest message; 0: as the program likes */
	double seconds;
	const char *mode;
};

static struct options opt = {.port = "18515", .type = IBV_QPT_RC, .seed = 1, .seconds = 3, .mode = ""};

__attribute__((unused)) static bool is_client(void)
{
	return opt.host != NULL;
}

/* Options of all programs: -p PORT -d DEVICE -g GID -c RC|UC|UD -e --srq -n COUNT -D SECONDS --seed N --largest BYTES --mode WORD
 * [HOST] */
__attribute__((unused)) static void parse_options(int argc, char **argv)
{
	me = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
	for (int i = 1; i < argc; i++) {
		const char *word = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";

		if (strcmp(word, "-e") == 0) {
			opt.events = true;
			continue;
		}
		if (strcmp(word, "--srq") == 0) {
			opt.srq = true;
			continue;
		}
		if (word[0] != '-') {
			opt.host = word;
			continue;
		}
		i++;
		if (strcmp(word, "-p") == 0)
			opt.port = value;
		else if (strcmp(word, "-d") == 0)
			opt.device = value;
		else if (strcmp(word, "-g") == 0)
			opt.gid = atoi(value);
		else if (strcmp(word, "-n") == 0)
			opt.count = strtoull(value, NULL, 0);
		else if (strcmp(word, "-D") == 0)
			opt.seconds = atof(value);
		else if (strcmp(word, "--seed") == 0)
			opt.seed = strtoull(value, NULL, 0);
		else if (strcmp(word, "--largest") == 0)
			opt.largest = strtoull(value, NULL, 0);
		else if (strcmp(word, "--mode") == 0)
			opt.mode = value;
		else if (strcmp(word, "-c") == 0)
			opt.type = strcmp(value, "UC") == 0 ? IBV_QPT_UC : strcmp(value, "UD") == 0 ? IBV_QPT_UD : IBV_QPT_RC;
		else
			die("unknown option %s", word);
	}
}

/* ---- Side channel ----------------------------------------------------------------------------------------------- */

static int side = -1;

__attribute__((unused)) static void side_open(void)
{
	struct addrinfo hints = {.ai_family = opt.host ? AF_UNSPEC : AF_INET6, .ai_socktype = SOCK_STREAM}, *info;
	int one = 1, error;

	hints.ai_flags = opt.host ? 0 : AI_PASSIVE;
	error = getaddrinfo(opt.host, opt.port, &hints, &info);
	CHECK(error == 0, "%s: %s", opt.host ? opt.host : "any address", gai_strerror(error));
	int s = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(s >= 0, "socket: %s", strerror(errno));
	if (opt.host) {
		CHECK(connect(s, info->ai_addr, info->ai_addrlen) == 0, "connect to %s: %s", opt.host, strerror(errno));
		side = s;
	} else {
		setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		CHECK(bind(s, info->ai_addr, info->ai_addrlen) == 0, "bind port %s: %s", opt.port, strerror(errno));
		CHECK(listen(s, 1) == 0, "listen: %s", strerror(errno));
		side = accept(s, NULL, NULL);
		CHECK(side >= 0, "accept: %s", strerror(errno));
		close(s);
	}
	setsockopt(side, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	fcntl(side, F_SETFD, FD_CLOEXEC);
	freeaddrinfo(info);
}

__attribute__((unused)) static void side_send(const void *data, size_t length)
{
	const char *p = data;

	while (length > 0) {
		ssize_t n = send(side, p, length, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		CHECK(n > 0, "the peer is gone (side channel: %s)", strerror(errno));
		p += n;
		length -= (size_t)n;
	}
}

__attribute__((unused)) static void side_recv(void *data, size_t length)
{
	char *p = data;

	while (length > 0) {
		ssize_t n = recv(side, p, length, 0);

		if (n < 0 && errno == EINTR)
			continue;
		CHECK(n > 0, "the peer is gone (side channel: %s)", n == 0 ? "closed" : strerror(errno));
		p += n;
		length -= (size_t)n;
	}
}

/* Gives the peer mine and takes its theirs. */
__attribute__((unused)) static void swap(const void *mine, void *theirs, size_t length)
{
	side_send(mine, length);
	side_recv(theirs, length);
}

/* Returns when both ends have come here; word says where "here" is. */
__attribute__((unused)) static void barrier(uint32_t word)
{
	uint32_t other;

	swap(&word, &other, sizeof(word));
	CHECK(word == other, "the ends are out of step: %u here, %u there", word, other);
}

/* ---- Device ------------------------------------------------------------------------------------------------------ */

struct node {
	struct ibv_context *context;
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	union ibv_gid gid;
	struct ibv_pd *pd;
};

__attribute__((unused)) static struct ibv_context *open_device(void)
{
	int count = 0, i = 0;
	struct ibv_device **list = ibv_get_device_list(&count);

	CHECK(list != NULL, "ibv_get_device_list: %s", strerror(errno));
	CHECK(count > 0, "no RDMA device");
	if (opt.device)
		while (i < count && strcmp(ibv_get_device_name(list[i]), opt.device) != 0)
			i++;
	CHECK(i < count, "no device %s", opt.device);
	struct ibv_context *context = ibv_open_device(list[i]);
	CHECK(context != NULL, "ibv_open_device: %s", strerror(errno));
	ibv_free_device_list(list);
	return context;
}

__attribute__((unused)) static struct node node_open(void)
{
	struct node node = {.context = open_device()};
	int error = ibv_query_device(node.context, &node.device);

	CHECK(error == 0, "ibv_query_device: %s", strerror(error));
	error = ibv_query_port(node.context, 1, &node.port);
	CHECK(error == 0, "ibv_query_port: %s", strerror(error));
	CHECK(node.port.state == IBV_PORT_ACTIVE, "the port is %s", ibv_port_state_str(node.port.state));
	CHECK(ibv_query_gid(node.context, 1, opt.gid, &node.gid) == 0, "no GID of index %d: %s", opt.gid, strerror(errno));
	node.pd = ibv_alloc_pd(node.context);
	CHECK(node.pd != NULL, "ibv_alloc_pd: %s", strerror(errno));
	return node;
}

__attribute__((unused)) static struct ibv_cq *cq_make(struct node *node, int entries, struct ibv_comp_channel *channel)
{
	struct ibv_cq *cq = ibv_create_cq(node->context, entries, NULL, channel, 0);

	CHECK(cq != NULL, "ibv_create_cq: %s", strerror(errno));
	return cq;
}

#define ALL_REMOTE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

__attribute__((unused)) static struct ibv_mr *mr_make(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, addr, length, access);

	CHECK(mr != NULL, "ibv_reg_mr of %zu bytes: %s", length, strerror(errno));
	return mr;
}

__attribute__((unused)) static void *pages(size_t length)
{
	void *p = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED, "mmap of %zu bytes: %s", length, strerror(errno));
	return p;
}

/* ---- Queue pairs -------------------------------------------------------------------------------------------------- */

/* What one end tells the other of a queue pair. */
struct address {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey;
	uint32_t qpn;
	uint32_t psn;
	uint32_t mtu;
	uint32_t rd_atomic;
	uint32_t spare;
};

#define QKEY 0x11111111

struct conduct {
	int timeout; /* 4.096 us * 2^timeout */
	int retry;
	int rnr_retry;
	int min_rnr_timer;
	int access;
};

static const struct conduct usual = {
	.timeout = 14, .retry = 7, .rnr_retry = 7, .min_rnr_timer = 12, .access = ALL_REMOTE & ~IBV_ACCESS_LOCAL_WRITE};

__attribute__((unused)) static bool is_reliable(const struct ibv_qp *qp)
{
	return qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_SEND || qp->qp_type == IBV_QPT_XRC_RECV;
}

__attribute__((unused)) static void qp_init(struct ibv_qp *qp, const struct conduct *conduct)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)conduct->access, .qkey = QKEY};
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	/* UC knows no READ and no atomics. */
	if (qp->qp_type == IBV_QPT_UC)
		attr.qp_access_flags &= IBV_ACCESS_REMOTE_WRITE;
	int error = ibv_modify_qp(qp, &attr, mask | (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
	CHECK(error == 0, "to INIT: %s", strerror(error));
}

__attribute__((unused)) static struct ibv_ah_attr ah_attr_to(const struct address *peer)
{
	struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1};

	attr.grh.dgid = peer->gid;
	attr.grh.sgid_index = (uint8_t)opt.gid;
	attr.grh.hop_limit = 64;
	return attr;
}

__attribute__((unused)) static struct ibv_ah *ah_make(struct ibv_pd *pd, const struct address *peer)
{
	struct ibv_ah_attr attr = ah_attr_to(peer);
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);

	CHECK(ah != NULL, "ibv_create_ah: %s", strerror(errno));
	return ah;
}

__attribute__((unused)) static int qp_try_rtr(struct ibv_qp *qp, const struct address *peer, uint32_t mtu, const struct conduct *conduct)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)mtu, .dest_qp_num = peer->qpn, .rq_psn = peer->psn};
	int mask = IBV_QP_STATE;

	if (qp->qp_type != IBV_QPT_UD) {
		attr.ah_attr = ah_attr_to(peer);
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (is_reliable(qp)) {
		attr.max_dest_rd_atomic = (uint8_t)peer->rd_atomic;
		attr.min_rnr_timer = (uint8_t)conduct->min_rnr_timer;
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	return ibv_modify_qp(qp, &attr, mask);
}

__attribute__((unused)) static void qp_rtr(struct ibv_qp *qp, const struct address *peer, uint32_t mtu, const struct conduct *conduct)
{
	int error = qp_try_rtr(qp, peer, mtu, conduct);

	CHECK(error == 0, "to RTR: %s", strerror(error));
}

__attribute__((unused)) static void qp_rts(struct ibv_qp *qp, const struct address *mine, const struct conduct *conduct)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = mine->psn};
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (is_reliable(qp)) {
		attr.timeout = (uint8_t)conduct->timeout;
		attr.retry_cnt = (uint8_t)conduct->retry;
		attr.rnr_retry = (uint8_t)conduct->rnr_retry;
		attr.max_rd_atomic = (uint8_t)mine->rd_atomic;
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	int error = ibv_modify_qp(qp, &attr, mask);
	CHECK(error == 0, "to RTS: %s", strerror(error));
}

/* A new packet sequence number, random as it should be. */
__attribute__((unused)) static uint32_t new_psn(void)
{
	static uint64_t state;

	if (state == 0)
		state = opt.seed ^ ((uint64_t)getpid() << 32);
	state = mix(state);
	return (uint32_t)state & 0xffffff;
}

/* What this end tells of qp. */
__attribute__((unused)) static struct address address_of(struct node *node, struct ibv_qp *qp, struct ibv_mr *mr)
{
	struct address mine = {.gid = node->gid, .qpn = qp->qp_num, .psn = new_psn(), .mtu = node->port.active_mtu};

	mine.rd_atomic = node->device.max_qp_rd_atom < 16 ? (uint32_t)node->device.max_qp_rd_atom : 16;
	if (mr) {
		mine.addr = (uintptr_t)mr->addr;
		mine.rkey = mr->rkey;
	}
	return mine;
}

/* Connects qp, which is in RESET, with the peer's: both ends call this at the same time. */
__attribute__((unused)) static struct address connect_with(struct node *node, struct ibv_qp *qp, struct ibv_mr *mr, const struct conduct *conduct)
{
	struct address mine = address_of(node, qp, mr), theirs;

	swap(&mine, &theirs, sizeof(mine));
	qp_init(qp, conduct);
	uint32_t mtu = mine.mtu < theirs.mtu ? mine.mtu : theirs.mtu;
	uint32_t rd_atomic = mine.rd_atomic < theirs.rd_atomic ? mine.rd_atomic : theirs.rd_atomic;
	struct address adapted = theirs;
	adapted.rd_atomic = mine.rd_atomic = rd_atomic;
	qp_rtr(qp, &adapted, mtu, conduct);
	qp_rts(qp, &mine, conduct);
	/* Nobody sends before both ends are ready to receive. */
	barrier(1000);
	return theirs;
}

/* Destroys what a simple program has, and closes the device: Ferroce then writes down what it counted (FERROCE_COUNTERS). */
__attribute__((unused)) static void close_all(struct node *node, struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr **mrs, int count)
{
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_cq(cq) == 0, "ibv_destroy_cq failed");
	for (int i = 0; i < count; i++)
		CHECK(ibv_dereg_mr(mrs[i]) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(node->pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node->context) == 0, "ibv_close_device failed");
}

__attribute__((unused)) static struct ibv_qp *qp_make(struct node *node, struct ibv_cq *send_cq, struct ibv_cq *recv_cq, struct ibv_srq *srq, uint32_t depth)
{
	struct ibv_qp_init_attr init = {
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.srq = srq,
		.qp_type = opt.type,
		.cap = {.max_send_wr = depth, .max_recv_wr = srq ? 0 : depth, .max_send_sge = 4, .max_recv_sge = srq ? 0 : 4, .max_inline_data = 200},
	};
	struct ibv_qp *qp = ibv_create_qp(node->pd, &init);

	CHECK(qp != NULL, "ibv_create_qp: %s", strerror(errno));
	return qp;
}

/* Back to RESET, from any state. */
__attribute__((unused)) static void qp_reset(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
	int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE);

	CHECK(error == 0, "to RESET: %s", strerror(error));
}

/* ---- Work -------------------------------------------------------------------------------------------------------- */

/* Polls until a completion is there; dies when none comes. */
__attribute__((unused)) static struct ibv_wc wait_wc(struct ibv_cq *cq, const char *what)
{
	struct ibv_wc wc;
	double end = now_s() + PATIENCE_S;

	for (;;) {
		int n = ibv_poll_cq(cq, 1, &wc);

		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		if (n == 1)
			return wc;
		CHECK(now_s() < end, "no completion of %s within %d s", what, PATIENCE_S);
	}
}

__attribute__((unused)) static void wait_success(struct ibv_cq *cq, const char *what)
{
	struct ibv_wc wc = wait_wc(cq, what);

	CHECK(wc.status == IBV_WC_SUCCESS, "%s: %s", what, ibv_wc_status_str(wc.status));
}

/* Posts one signaled request with one piece of local memory. */
__attribute__((unused)) static int post_one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, void *local, uint32_t lkey, uint32_t length, uint64_t remote, uint32_t rkey)
{
	struct ibv_sge sge = {.addr = (uintptr_t)local, .length = length, .lkey = lkey};
	struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;

	if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = remote;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(qp, &wr, &bad);
}

__attribute__((unused)) static int post_recv_one(struct ibv_qp *qp, void *local, uint32_t lkey, uint32_t length)
{
	struct ibv_sge sge = {.addr = (uintptr_t)local, .length = length, .lkey = lkey};
	struct ibv_recv_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1}, *bad;

	return ibv_post_recv(qp, &wr, &bad);
}

/* Posts one request, waits for it and gives its status. */
__attribute__((unused)) static enum ibv_wc_status do_one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, void *local, uint32_t lkey, uint32_t length, uint64_t remote, uint32_t rkey)
{
	int error = post_one(qp, opcode, local, lkey, length, remote, rkey);

	CHECK(error == 0, "ibv_post_send: %s", strerror(error));
	return wait_wc(qp->send_cq, "a request").status;
}

/* The last line of a program that found nothing wrong. */
__attribute__((unused, format(printf, 1, 2))) static void ok(const char *format, ...)
{
	va_list args;

	printf("ok ");
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
}

#endif

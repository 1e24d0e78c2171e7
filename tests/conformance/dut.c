/*
 * The device under test, made to do what the tester says over a TCP connection: one command a line, one answer a line.
 *
 * Nothing but the C interface of libibverbs is used, so the same program runs on Ferroce and on the kernel's rxe. An answer
 * is "ok" and its words, or "err" and a reason. The program ends with the connection.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define OBJECTS 64
#define LINE_SIZE 65536
#define WORDS 24
/* Bytes beside each region that are ours but not registered. */
#define EDGE 4096u

struct region {
	uint8_t *pages; /* EDGE, size, EDGE */
	size_t size;
	struct ibv_mr *mr;
};

struct queue_pair {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_ah *ah; /* UD */
	uint32_t peer_qpn;
};

static struct ibv_context *context;
static struct ibv_pd *pds[2];
static uint8_t gid_index[2]; /* IPv4, IPv6 */
static struct region regions[OBJECTS];
static struct ibv_mw *windows[OBJECTS]; /* type 2 */
static struct queue_pair pairs[OBJECTS];
static FILE *out;

__attribute__((noreturn)) static void die(const char *what)
{
	fprintf(stderr, "dut: %s: %s\n", what, strerror(errno));
	exit(1);
}

__attribute__((format(printf, 1, 2))) static void answer(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(out, format, args);
	va_end(args);
	fputc('\n', out);
	fflush(out);
}

static void refuse(const char *what)
{
	answer("err %s: %s", what, strerror(errno));
}

static uint64_t number(const char *word)
{
	return strtoull(word, NULL, 0);
}

static long long now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static bool is_v6(const char *address)
{
	return strchr(address, ':') != NULL;
}

/* The GID of an IPv4 or IPv6 address. */
static union ibv_gid gid_of(const char *address)
{
	union ibv_gid gid = {.raw = {0}};

	if (is_v6(address)) {
		if (inet_pton(AF_INET6, address, gid.raw) != 1)
			die("not an IPv6 address");
		return gid;
	}
	gid.raw[10] = gid.raw[11] = 0xff;
	if (inet_pton(AF_INET, address, gid.raw + 12) != 1)
		die("not an IPv4 address");
	return gid;
}

/* The index of an address among a device's GIDs, or -1. */
static int find_gid(struct ibv_context *device, int count, const char *address)
{
	union ibv_gid wanted = gid_of(address), gid;

	for (int index = 0; index < count; index++)
		if (ibv_query_gid(device, 1, index, &gid) == 0 && memcmp(gid.raw, wanted.raw, 16) == 0)
			return index;
	return -1;
}

/* open V4 V6: the device that has these addresses. */
static void do_open(char **words)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	for (int i = 0; list != NULL && list[i] != NULL; i++) {
		struct ibv_context *one = ibv_open_device(list[i]);
		struct ibv_port_attr port;

		if (one == NULL)
			continue;
		if (ibv_query_port(one, 1, &port) == 0) {
			int v4 = find_gid(one, port.gid_tbl_len, words[1]), v6 = find_gid(one, port.gid_tbl_len, words[2]);

			if (v4 >= 0 && v6 >= 0) {
				context = one;
				gid_index[0] = (uint8_t)v4;
				gid_index[1] = (uint8_t)v6;
				pds[0] = ibv_alloc_pd(one);
				pds[1] = ibv_alloc_pd(one);
				if (pds[0] == NULL || pds[1] == NULL) {
					refuse("alloc_pd");
					return;
				}
				answer("ok %s %d %d", ibv_get_device_name(list[i]), v4, 128 << port.active_mtu);
				return;
			}
		}
		ibv_close_device(one);
	}
	answer("err no device has the addresses %s and %s", words[1], words[2]);
}

/* mr ID SIZE ACCESS PD: a fresh region, zero. */
static void do_mr(char **words)
{
	struct region *region = &regions[number(words[1]) % OBJECTS];

	region->size = number(words[2]);
	region->pages = mmap(NULL, region->size + 2 * EDGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (region->pages == MAP_FAILED) {
		region->pages = NULL;
		refuse("mmap");
		return;
	}
	region->mr = ibv_reg_mr(pds[number(words[4]) % 2], region->pages + EDGE, region->size, (int)number(words[3]));
	if (region->mr == NULL) {
		refuse("reg_mr");
		return;
	}
	answer("ok %" PRIu64 " %u %u", (uint64_t)(uintptr_t)(region->pages + EDGE), region->mr->lkey, region->mr->rkey);
}

static void deregister(struct region *region)
{
	if (region->mr != NULL)
		ibv_dereg_mr(region->mr);
	region->mr = NULL;
}

/* The bytes [offset, offset + length) of a region with its edges, or NULL. The offset may be negative. */
static uint8_t *bytes(const struct region *region, const char *offset, size_t length)
{
	long long at = strtoll(offset, NULL, 0) + EDGE;

	if (region->pages == NULL || at < 0 || (size_t)at + length > region->size + 2 * EDGE)
		return NULL;
	return region->pages + at;
}

/* put ID OFFSET HEX */
static void do_put(char **words)
{
	size_t length = strlen(words[3]) / 2;
	uint8_t *to = bytes(&regions[number(words[1]) % OBJECTS], words[2], length);

	if (to == NULL) {
		answer("err outside");
		return;
	}
	for (size_t i = 0; i < length; i++) {
		unsigned int byte = 0;

		sscanf(words[3] + 2 * i, "%2x", &byte);
		to[i] = (uint8_t)byte;
	}
	answer("ok");
}

/* get ID OFFSET LENGTH */
static void do_get(char **words)
{
	size_t length = number(words[3]);
	const uint8_t *from = bytes(&regions[number(words[1]) % OBJECTS], words[2], length);

	if (from == NULL) {
		answer("err outside");
		return;
	}
	fputs("ok ", out);
	for (size_t i = 0; i < length; i++)
		fprintf(out, "%02x", from[i]);
	answer("%s", "");
}

/*
 * qp ID TYPE PEER PEER_QPN MTU SQ_PSN RQ_PSN ACCESS MIN_RNR_TIMER TIMEOUT RETRY_CNT RNR_RETRY RD_ATOMIC DEST_RD_ATOMIC QKEY:
 * a queue pair in RTS.
 */
static void do_qp(char **words)
{
	struct queue_pair *pair = &pairs[number(words[1]) % OBJECTS];
	enum ibv_qp_type type = strcmp(words[2], "ud") == 0 ? IBV_QPT_UD : strcmp(words[2], "uc") == 0 ? IBV_QPT_UC : IBV_QPT_RC;
	struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1};
	struct ibv_qp_attr attr;
	int mask, mtu = IBV_MTU_256;

	ah.grh.dgid = gid_of(words[3]);
	ah.grh.sgid_index = gid_index[is_v6(words[3])];
	ah.grh.hop_limit = 64;
	pair->peer_qpn = (uint32_t)number(words[4]);
	while (128u << mtu < number(words[5]))
		mtu++;
	pair->cq = ibv_create_cq(context, 256, NULL, NULL, 0);
	if (pair->cq == NULL) {
		refuse("create_cq");
		return;
	}
	struct ibv_qp_init_attr init = {
		.send_cq = pair->cq,
		.recv_cq = pair->cq,
		.qp_type = type,
		.cap = {.max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1},
	};
	pair->qp = ibv_create_qp(pds[0], &init);
	if (pair->qp == NULL) {
		refuse("create_qp");
		return;
	}
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT, .port_num = 1};
	mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	if (type == IBV_QPT_UD) {
		attr.qkey = (uint32_t)number(words[15]);
		mask |= IBV_QP_QKEY;
	} else {
		attr.qp_access_flags = (unsigned int)number(words[8]);
		mask |= IBV_QP_ACCESS_FLAGS;
	}
	if (ibv_modify_qp(pair->qp, &attr, mask) != 0) {
		refuse("modify_qp to INIT");
		return;
	}
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR};
	mask = IBV_QP_STATE;
	if (type != IBV_QPT_UD) {
		attr.ah_attr = ah;
		attr.path_mtu = mtu;
		attr.dest_qp_num = pair->peer_qpn;
		attr.rq_psn = (uint32_t)number(words[7]);
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (type == IBV_QPT_RC) {
		attr.max_dest_rd_atomic = (uint8_t)number(words[14]);
		attr.min_rnr_timer = (uint8_t)number(words[9]);
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	}
	if (ibv_modify_qp(pair->qp, &attr, mask) != 0) {
		refuse("modify_qp to RTR");
		return;
	}
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = (uint32_t)number(words[6])};
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (type == IBV_QPT_RC) {
		attr.timeout = (uint8_t)number(words[10]);
		attr.retry_cnt = (uint8_t)number(words[11]);
		attr.rnr_retry = (uint8_t)number(words[12]);
		attr.max_rd_atomic = (uint8_t)number(words[13]);
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	}
	if (ibv_modify_qp(pair->qp, &attr, mask) != 0) {
		refuse("modify_qp to RTS");
		return;
	}
	if (type == IBV_QPT_UD) {
		pair->ah = ibv_create_ah(pds[0], &ah);
		if (pair->ah == NULL) {
			refuse("create_ah");
			return;
		}
	}
	answer("ok %u", pair->qp->qp_num);
}

/* state QP */
static void do_state(char **words)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	if (ibv_query_qp(pairs[number(words[1]) % OBJECTS].qp, &attr, IBV_QP_STATE, &init) != 0)
		refuse("query_qp");
	else
		answer("ok %d", attr.qp_state);
}

/* Fills one scatter/gather element from a region's number, an offset and a length. */
static struct ibv_sge element(char **words)
{
	const struct region *region = &regions[number(words[0]) % OBJECTS];

	return (struct ibv_sge){
		.addr = (uintptr_t)region->pages + EDGE + (uint64_t)strtoll(words[1], NULL, 0),
		.length = (uint32_t)number(words[2]),
		.lkey = region->mr != NULL ? region->mr->lkey : 0,
	};
}

/* recv QP WR_ID REGION OFFSET LENGTH */
static void do_recv(char **words)
{
	struct ibv_sge sge = element(words + 3);
	struct ibv_recv_wr wr = {.wr_id = number(words[2]), .sg_list = &sge, .num_sge = sge.length > 0}, *bad;

	if (ibv_post_recv(pairs[number(words[1]) % OBJECTS].qp, &wr, &bad) != 0)
		refuse("post_recv");
	else
		answer("ok");
}

/* send QP WR_ID OPCODE FLAGS REGION OFFSET LENGTH REMOTE_ADDRESS KEY IMMEDIATE COMPARE_ADD SWAP; KEY: rkey (also one to
   invalidate), or Q_Key for UD */
static void do_send(char **words)
{
	struct queue_pair *pair = &pairs[number(words[1]) % OBJECTS];
	struct ibv_sge sge = element(words + 5);
	struct ibv_send_wr wr = {
		.wr_id = number(words[2]),
		.opcode = (enum ibv_wr_opcode)number(words[3]),
		.send_flags = (unsigned int)number(words[4]),
		.sg_list = &sge,
		.num_sge = sge.length > 0,
		.imm_data = htonl((uint32_t)number(words[10])),
	}, *bad;
	uint64_t address = number(words[8]);
	uint32_t key = (uint32_t)number(words[9]);

	if (wr.opcode == IBV_WR_SEND_WITH_INV || wr.opcode == IBV_WR_LOCAL_INV) {
		wr.invalidate_rkey = key;
	} else if (pair->ah != NULL) {
		wr.wr.ud.ah = pair->ah;
		wr.wr.ud.remote_qpn = pair->peer_qpn;
		wr.wr.ud.remote_qkey = key;
	} else if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = address;
		wr.wr.atomic.rkey = key;
		wr.wr.atomic.compare_add = number(words[11]);
		wr.wr.atomic.swap = number(words[12]);
	} else {
		wr.wr.rdma.remote_addr = address;
		wr.wr.rdma.rkey = key;
	}
	if (ibv_post_send(pair->qp, &wr, &bad) != 0)
		refuse("post_send");
	else
		answer("ok");
}

/* bind QP WR_ID WINDOW REGION OFFSET LENGTH ACCESS: posts the binding of a window, which is made if it is not there yet. */
static void do_bind(char **words)
{
	struct ibv_mw **window = &windows[number(words[3]) % OBJECTS];
	const struct region *region = &regions[number(words[4]) % OBJECTS];
	struct ibv_send_wr wr = {.wr_id = number(words[2]), .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

	if (*window == NULL)
		*window = ibv_alloc_mw(pds[0], IBV_MW_TYPE_2);
	if (*window == NULL) {
		refuse("alloc_mw");
		return;
	}
	wr.bind_mw.mw = *window;
	wr.bind_mw.rkey = ibv_inc_rkey((*window)->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = region->mr,
		.addr = (uintptr_t)region->pages + EDGE + number(words[5]),
		.length = number(words[6]),
		.mw_access_flags = (unsigned int)number(words[7]),
	};
	if (ibv_post_send(pairs[number(words[1]) % OBJECTS].qp, &wr, &bad) != 0) {
		refuse("post_send");
		return;
	}
	/* The key of a type 2 window is the program's to keep; the next binding names it. */
	(*window)->rkey = wr.bind_mw.rkey;
	answer("ok %u", wr.bind_mw.rkey);
}

/* wait QP COUNT MILLISECONDS: up to COUNT completions, fewer if they do not come in time. */
static void do_wait(char **words)
{
	struct ibv_cq *cq = pairs[number(words[1]) % OBJECTS].cq;
	uint64_t left = number(words[2]);
	long long end = now_ms() + (long long)number(words[3]);

	fputs("ok", out);
	for (;;) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(cq, 1, &wc);

		if (n < 0)
			die("poll_cq");
		if (n > 0) {
			uint32_t imm = 0;

			if (wc.status == IBV_WC_SUCCESS && (wc.wc_flags & IBV_WC_WITH_IMM))
				imm = ntohl(wc.imm_data);
			else if (wc.status == IBV_WC_SUCCESS && (wc.wc_flags & IBV_WC_WITH_INV))
				imm = wc.invalidated_rkey;
			fprintf(out, " %" PRIu64 ":%d:%d:%u:%u:%u:%u", wc.wr_id, wc.status, wc.opcode, wc.byte_len, imm,
				(unsigned int)wc.wc_flags, wc.src_qp);
			if (--left == 0)
				break;
		} else {
			if (now_ms() >= end)
				break;
			/* Emulated guests have one processor: it is the kernel's turn. */
			usleep(500);
		}
	}
	answer("%s", "");
}

static void destroy_all(void)
{
	/* First of all: rxe waits long for a queue pair that a window is bound for. */
	for (int i = 0; i < OBJECTS; i++) {
		if (windows[i] != NULL)
			ibv_dealloc_mw(windows[i]);
		windows[i] = NULL;
	}
	for (int i = 0; i < OBJECTS; i++) {
		struct queue_pair *pair = &pairs[i];

		if (pair->qp != NULL)
			ibv_destroy_qp(pair->qp);
		if (pair->ah != NULL)
			ibv_destroy_ah(pair->ah);
		if (pair->cq != NULL)
			ibv_destroy_cq(pair->cq);
		*pair = (struct queue_pair){.qp = NULL};
	}
	for (int i = 0; i < OBJECTS; i++) {
		struct region *region = &regions[i];

		deregister(region);
		if (region->pages != NULL)
			munmap(region->pages, region->size + 2 * EDGE);
		*region = (struct region){.pages = NULL};
	}
}

static const struct {
	const char *name;
	int words; /* with the name */
	void (*run)(char **words);
} commands[] = {
	{"open", 3, do_open},   {"mr", 5, do_mr},     {"put", 4, do_put},   {"get", 4, do_get},    {"qp", 16, do_qp},
	{"state", 2, do_state}, {"recv", 6, do_recv}, {"send", 13, do_send}, {"wait", 4, do_wait},
	{"bind", 8, do_bind},
};

static void obey(char *line)
{
	char *words[WORDS] = {NULL}, *rest = NULL;
	int count = 0;

	for (char *word = strtok_r(line, " \n", &rest); word != NULL && count < WORDS; word = strtok_r(NULL, " \n", &rest))
		words[count++] = word;
	if (count == 0) {
		answer("err empty");
		return;
	}
	if (strcmp(words[0], "reset") == 0) {
		destroy_all();
		answer("ok");
		return;
	}
	if (strcmp(words[0], "dereg") == 0 && count == 2) {
		deregister(&regions[number(words[1]) % OBJECTS]);
		answer("ok");
		return;
	}
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (strcmp(words[0], commands[i].name) == 0 && count == commands[i].words) {
			commands[i].run(words);
			return;
		}
	}
	answer("err unknown command %s with %d words", words[0], count);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t size = sizeof(address);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), connection;
	static char line[LINE_SIZE];

	address.sin_port = htons(argc > 1 ? (uint16_t)number(argv[1]) : 0);
	if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
	    bind(listener, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(listener, 1) != 0 ||
	    getsockname(listener, (struct sockaddr *)&address, &size) != 0)
		die("cannot listen");
	printf("listening on %d\n", ntohs(address.sin_port));
	fflush(stdout);
	connection = accept(listener, NULL, NULL);
	if (connection < 0 || setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0)
		die("cannot accept");
	FILE *in = fdopen(connection, "r");
	out = fdopen(dup(connection), "w");
	if (in == NULL || out == NULL)
		die("cannot talk");
	while (fgets(line, sizeof(line), in) != NULL)
		obey(line);
	destroy_all();
	return 0;
}

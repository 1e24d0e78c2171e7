/*
 * Many processes of one host, each connected to each other one, and what the rings between them take of memory.
 *
 *   mesh -n PROCESSES -g GID
 *
 * The first process forks all others and opens nothing itself. Each sends to each, all at the same time: small messages, then messages of
 * 64 KiB, and READs of as much; all bytes are compared. After each of these parts all rest, and the memory of all rings is counted,
 * each page once. It must come to lie below 1 MiB for each process: 64 MiB for 64 of them.
 */
#include <pthread.h>
#include <sys/resource.h>

#include "pair.h"

#define MOST 64
#define SMALL 64u
#define LARGE (64u << 10)
#define ROUNDS 3
#define DEPTH 16
/* Open files that a process may have: what a login has, as a rule. */
#define FILES 1024

enum part { SMALL_SENDS, LARGE_SENDS, READS, PARTS };

static const char *const part_names[PARTS] = {"small messages", "messages of 64 KiB", "READs of 64 KiB"};

/* 4.096 us * 2^18 = 1 s: with more processes than cores, each waits for its turn. */
static const struct conduct patient = {
	.timeout = 18, .retry = 7, .rnr_retry = 7, .min_rnr_timer = 12, .access = ALL_REMOTE & ~IBV_ACCESS_LOCAL_WRITE};

/* Memory of a process, in KiB. */
struct taken {
	uint64_t rings;   /* its share of the rings' memory: a page that two processes have counts half for each */
	uint64_t private; /* all else that is its own */
	uint32_t mapped;  /* rings */
};

/* What all processes share. */
struct common {
	pthread_barrier_t barrier;
	bool enough;
	struct address addresses[MOST][MOST]; /* of the queue pair of the first for the second */
	struct taken before[MOST], after[PARTS][MOST];
};

/* What the rings of all processes may take, in KiB. */
#define BOUND (count * 1024)

static struct common *common;
static uint32_t count, self;
static struct node node;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qps[MOST];
/* For each process: what goes to it, what comes from it. */
static uint8_t *out, *in;
static struct ibv_mr *out_mr, *in_mr;

static void together(void)
{
	int error = pthread_barrier_wait(&common->barrier);

	CHECK(error == 0 || error == PTHREAD_BARRIER_SERIAL_THREAD, "pthread_barrier_wait: %s", strerror(error));
}

static uint64_t key(uint32_t from, uint32_t to, int part, int round)
{
	return ((uint64_t)from << 48) ^ ((uint64_t)to << 32) ^ ((uint64_t)part << 16) ^ (uint64_t)round;
}

/* ---- Memory -------------------------------------------------------------------------------------------------------- */

static struct taken taken(void)
{
	struct taken t = {0};
	FILE *f = fopen("/proc/self/smaps", "r");
	char line[1024];
	bool is_ring = false;

	CHECK(f != NULL, "/proc/self/smaps: %s", strerror(errno));
	while (fgets(line, sizeof(line), f)) {
		unsigned long start, end, kib;

		if (sscanf(line, "%lx-%lx ", &start, &end) == 2) {
			is_ring = strstr(line, "memfd:ferroce-ring") != NULL;
			t.mapped += is_ring;
		} else if (is_ring && (sscanf(line, "Pss: %lu kB", &kib) == 1 || sscanf(line, "SwapPss: %lu kB", &kib) == 1)) {
			t.rings += kib;
		} else if (!is_ring && sscanf(line, "Private_Dirty: %lu kB", &kib) == 1) {
			t.private += kib;
		}
	}
	fclose(f);
	return t;
}

static struct taken sum(const struct taken *places)
{
	struct taken all = {0};

	for (uint32_t i = 0; i < count; i++) {
		all.rings += places[i].rings;
		all.private += places[i].private;
		all.mapped += places[i].mapped;
	}
	return all;
}

/* All rest, and each counts what it has. A lane that was busy may still be about to give memory back. */
static void count_memory(struct taken *places)
{
	for (double end = now_s() + PATIENCE_S;;) {
		together();
		places[self] = taken();
		together();
		/* All see the same numbers, but not the same time: the first of them says when it is over. */
		if (self == 0)
			common->enough = sum(places).rings <= BOUND || now_s() > end;
		together();
		if (common->enough)
			return;
		sleep_ms(5);
	}
}

/* ---- Traffic ------------------------------------------------------------------------------------------------------- */

static struct ibv_wc next_completion(void)
{
	struct pollfd readable = {.fd = channel->fd, .events = POLLIN};
	double end = now_s() + PATIENCE_S;
	struct ibv_wc wc;

	for (bool asked = false;; asked = !asked) {
		int n = ibv_poll_cq(cq, 1, &wc);

		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		if (n == 1)
			return wc;
		CHECK(now_s() < end, "no completion within %d s", PATIENCE_S);
		if (!asked) {
			CHECK(ibv_req_notify_cq(cq, 0) == 0, "ibv_req_notify_cq failed");
			continue;
		}
		if (poll(&readable, 1, 1000) == 1) {
			struct ibv_cq *which;
			void *context;

			CHECK(ibv_get_cq_event(channel, &which, &context) == 0, "ibv_get_cq_event: %s", strerror(errno));
			ibv_ack_cq_events(which, 1);
		}
	}
}

static void compare(uint32_t from, uint32_t to, int part, int round, uint32_t length)
{
	static uint8_t expected[LARGE];

	pattern(expected, key(from, to, part, round), 0, length);
	CHECK(memcmp(in + from * LARGE, expected, length) == 0, "%s: other bytes came from process %u than it sent", part_names[part], from);
}

static void post(uint32_t to, int part, int round, uint32_t length)
{
	uint8_t *local = (part == READS ? in : out) + to * LARGE;
	uint32_t lkey = part == READS ? in_mr->lkey : out_mr->lkey;
	struct address *theirs = &common->addresses[to][self];

	if (part != READS)
		pattern(local, key(self, to, part, round), 0, length);
	/* What it sent me last. */
	int error = post_one(qps[to], part == READS ? IBV_WR_RDMA_READ : IBV_WR_SEND, local, lkey, length, theirs->addr, theirs->rkey);
	CHECK(error == 0, "ibv_post_send: %s", strerror(error));
}

static void one_round(int part, int round, uint32_t length)
{
	uint32_t left = (count - 1) * (part == READS ? 1 : 2);

	for (uint32_t other = 0; part == READS && other < count; other++)
		memset(in + other * LARGE, 0, length);
	for (uint32_t other = 0; part != READS && other < count; other++) {
		if (other != self)
			CHECK(post_recv_one(qps[other], in + other * LARGE, in_mr->lkey, LARGE) == 0, "ibv_post_recv failed");
	}
	together();
	/* Each begins with another one. */
	for (uint32_t i = 1; i < count; i++)
		post((self + i) % count, part, round, length);
	while (left-- > 0) {
		struct ibv_wc wc = next_completion();

		CHECK(wc.status == IBV_WC_SUCCESS, "%s: %s", part_names[part], ibv_wc_status_str(wc.status));
		CHECK(wc.opcode != IBV_WC_RECV || wc.byte_len == length, "%s: %u bytes came", part_names[part], wc.byte_len);
	}
	for (uint32_t other = 0; other < count; other++) {
		if (other != self)
			compare(other, self, part == READS ? LARGE_SENDS : part, part == READS ? ROUNDS - 1 : round, length);
	}
	/* Nobody writes anew what others still read. */
	together();
}

/* With all others, from any state of the queue pairs. */
static void connect_all(void)
{
	for (uint32_t other = 0; other < count; other++) {
		if (other == self)
			continue;
		struct address *mine = &common->addresses[self][other], *theirs = &common->addresses[other][self];

		qp_reset(qps[other]);
		qp_init(qps[other], &patient);
		qp_rtr(qps[other], theirs, theirs->mtu, &patient);
		qp_rts(qps[other], mine, &patient);
	}
}

static void one_process(void)
{
	int mask = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

	node = node_open();
	channel = ibv_create_comp_channel(node.context);
	CHECK(channel != NULL, "ibv_create_comp_channel: %s", strerror(errno));
	cq = cq_make(&node, MOST * 4, channel);
	out = pages(count * LARGE);
	in = pages(count * LARGE);
	memset(out, 1, count * LARGE);
	memset(in, 1, count * LARGE);
	out_mr = mr_make(node.pd, out, count * LARGE, mask);
	in_mr = mr_make(node.pd, in, count * LARGE, mask);
	count_memory(common->before);
	for (uint32_t other = 0; other < count; other++) {
		if (other == self)
			continue;
		qps[other] = qp_make(&node, cq, cq, NULL, DEPTH);
		common->addresses[self][other] = address_of(&node, qps[other], out_mr);
		common->addresses[self][other].addr += other * LARGE;
	}
	together();
	/* A peer that is too busy to take a ring in time gets the packets of this connection by UDP, but takes it: the second time it is there. */
	connect_all();
	together();
	connect_all();
	for (int part = 0; part < PARTS; part++) {
		int rounds = part == READS ? 1 : ROUNDS;

		for (int round = 0; round < rounds; round++)
			one_round(part, round, part == SMALL_SENDS ? SMALL : LARGE);
		count_memory(common->after[part]);
	}
	for (uint32_t other = 0; other < count; other++)
		CHECK(other == self || ibv_destroy_qp(qps[other]) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_cq(cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_destroy_comp_channel(channel) == 0, "ibv_destroy_comp_channel failed");
	CHECK(ibv_dereg_mr(out_mr) == 0 && ibv_dereg_mr(in_mr) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(node.pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node.context) == 0, "ibv_close_device failed");
}

/* ---- All ----------------------------------------------------------------------------------------------------------- */

/* False, and the others are ended: one of them failed. */
static bool all_end_well(pid_t *pids)
{
	for (uint32_t left = count; left > 0; left--) {
		int status;
		pid_t pid = waitpid(-1, &status, 0);

		CHECK(pid > 0, "waitpid: %s", strerror(errno));
		for (uint32_t i = 0; i < count; i++)
			pids[i] = pids[i] == pid ? 0 : pids[i];
		if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
			continue;
		for (uint32_t i = 0; i < count; i++)
			if (pids[i] > 0)
				kill(pids[i], SIGKILL);
		return false;
	}
	return true;
}

static void judge(void)
{
	struct taken before = sum(common->before), last = {0};

	for (int part = 0; part < PARTS; part++) {
		last = sum(common->after[part]);
		printf("after %s: %" PRIu64 " KiB of %u rings, %" PRId64 " KiB of private memory more\n", part_names[part], last.rings, last.mapped / 2,
		       (int64_t)(last.private - before.private));
		CHECK(last.rings <= BOUND, "%s: the rings of %u processes take %" PRIu64 " KiB", part_names[part], count, last.rings);
	}
	CHECK(last.mapped == count * (count - 1), "%u processes have %u ends of rings, not %u", count, last.mapped, count * (count - 1));
}

int main(int argc, char **argv)
{
	struct rlimit files = {FILES, FILES};
	pthread_barrierattr_t shared;
	pid_t pids[MOST];

	parse_options(argc, argv);
	count = (uint32_t)opt.count;
	CHECK(count >= 2 && count <= MOST, "-n: from 2 to %d processes", MOST);
	CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0, "setrlimit: %s", strerror(errno));
	common = mmap(NULL, sizeof(*common), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(common != MAP_FAILED, "mmap: %s", strerror(errno));
	pthread_barrierattr_init(&shared);
	pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
	pthread_barrier_init(&common->barrier, &shared, count);
	for (self = 0; self < count; self++) {
		pids[self] = fork();
		CHECK(pids[self] >= 0, "fork: %s", strerror(errno));
		if (pids[self] == 0) {
			one_process();
			return 0;
		}
	}
	CHECK(all_end_well(pids), "a process failed");
	judge();
	ok("%u processes", count);
	return 0;
}

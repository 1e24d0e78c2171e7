/*
 * What no stock program measures, between two processes that use nothing but the C interface:
 *
 *   probe -p PORT --mode MODE [-n COUNT] [--largest BYTES] [-D SECONDS] [HOST]
 *
 *   queue-pairs  WRITEs of BYTES on one of COUNT connected queue pairs; the others are idle
 *   regions      WRITEs of BYTES on one queue pair, each from and to another one of COUNT regions of each end
 *   idle         what a process takes of a core that has COUNT connected queue pairs and sleeps
 *   register     how long ibv_reg_mr takes for BYTES of memory in use
 *
 * The client prints lines of a name and a number.
 */
#include "../../tests/programs/pair.h"

/* Requests in flight, and between two signalled ones. */
#define DEPTH 128
#define BATCH 16
/* Registrations that are timed, at most. */
#define MOST 10000

static double cpu_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Regions of both ends; all of an end are the same memory. */
struct regions {
	uint32_t count;
	struct ibv_mr **mine;
	uint32_t *rkeys;
	uint64_t remote;
};

static struct regions regions_make(struct node *node, uint32_t count, size_t length)
{
	struct regions r = {.count = count, .mine = pages(count * sizeof(*r.mine)), .rkeys = pages(count * sizeof(uint32_t))};
	uint32_t *keys = pages(count * sizeof(*keys));
	void *memory = pages(length);
	uint64_t address = (uintptr_t)memory;

	memset(memory, 1, length);
	for (uint32_t i = 0; i < count; i++) {
		r.mine[i] = mr_make(node->pd, memory, length, ALL_REMOTE);
		keys[i] = r.mine[i]->rkey;
	}
	/* One after the other: both at once might fill the channel's buffers, and both would wait. */
	if (is_client()) {
		side_send(keys, count * sizeof(*keys));
		side_recv(r.rkeys, count * sizeof(*keys));
	} else {
		side_recv(r.rkeys, count * sizeof(*keys));
		side_send(keys, count * sizeof(*keys));
	}
	swap(&address, &r.remote, sizeof(address));
	return r;
}

/* Posts a batch of WRITEs, of which the last is signalled. The regions of the i-th request follow from i. */
static void post_batch(struct ibv_qp *qp, const struct regions *r, uint64_t first, uint32_t length)
{
	struct ibv_sge sges[BATCH];
	struct ibv_send_wr wrs[BATCH], *bad;

	for (int i = 0; i < BATCH; i++) {
		/* A step that has no factor in common with usual counts visits all of them, not one after the other. */
		uint32_t at = (uint32_t)((first + (uint64_t)i) * 7919 % r->count);

		sges[i] = (struct ibv_sge){.addr = (uintptr_t)r->mine[at]->addr, .length = length, .lkey = r->mine[at]->lkey};
		wrs[i] = (struct ibv_send_wr){.wr_id = 1, .next = i + 1 < BATCH ? &wrs[i + 1] : NULL, .sg_list = &sges[i], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
		wrs[i].wr.rdma.remote_addr = r->remote;
		wrs[i].wr.rdma.rkey = r->rkeys[at];
	}
	wrs[BATCH - 1].send_flags = IBV_SEND_SIGNALED;
	int error = ibv_post_send(qp, wrs, &bad);
	CHECK(error == 0, "ibv_post_send: %s", strerror(error));
}

static void stream(struct ibv_qp *qp, const struct regions *r, uint32_t length, double seconds)
{
	uint64_t posted = 0, done = 0;
	double begun = now_s(), heard = begun, now = begun;

	while (now - begun < seconds || done < posted) {
		while (now - begun < seconds && posted - done + BATCH <= DEPTH) {
			post_batch(qp, r, posted, length);
			posted += BATCH;
		}
		struct ibv_wc wc[8];
		int n = ibv_poll_cq(qp->send_cq, 8, wc);

		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		for (int i = 0; i < n; i++)
			CHECK(wc[i].status == IBV_WC_SUCCESS, "a WRITE: %s", ibv_wc_status_str(wc[i].status));
		done += (uint64_t)n * BATCH;
		now = now_s();
		heard = n > 0 ? now : heard;
		CHECK(now - heard < PATIENCE_S, "no completion within %d s", PATIENCE_S);
	}
	printf("messages %" PRIu64 "\nseconds %.6f\n", done, now - begun);
}

/* What of a core this process takes while it sleeps, after a moment in which all comes to rest. */
static void idle(void)
{
	sleep_ms(500);
	double wall = now_s(), cpu = cpu_s();

	sleep_ms((long)(opt.seconds * 1000));
	printf("core_percent %.6f\n", (cpu_s() - cpu) / (now_s() - wall) * 100);
}

static void traffic(bool sleeps)
{
	struct node node = node_open();
	uint32_t count = opt.count ? (uint32_t)opt.count : 1;
	bool many_regions = strcmp(opt.mode, "regions") == 0;
	uint32_t length = opt.largest ? (uint32_t)opt.largest : 8, qp_count = many_regions ? 1 : count;
	struct regions r = regions_make(&node, many_regions ? count : 1, length);
	struct ibv_cq *cq = cq_make(&node, 2 * DEPTH, NULL);
	struct ibv_qp **qps = pages(qp_count * sizeof(*qps));

	for (uint32_t i = 0; i < qp_count; i++) {
		qps[i] = qp_make(&node, cq, cq, NULL, DEPTH);
		connect_with(&node, qps[i], r.mine[0], &usual);
	}
	/* All have been used once: an idle queue pair is one that could begin. */
	for (uint32_t i = 0; is_client() && i < qp_count; i++) {
		enum ibv_wc_status status = do_one(qps[i], IBV_WR_RDMA_WRITE, r.mine[0]->addr, r.mine[0]->lkey, length, r.remote, r.rkeys[0]);
		CHECK(status == IBV_WC_SUCCESS, "the first WRITE of queue pair %u: %s", i, ibv_wc_status_str(status));
	}
	barrier(1);
	if (is_client() && sleeps)
		idle();
	else if (is_client())
		stream(qps[0], &r, length, opt.seconds);
	barrier(2);
	/* Ferroce tells what it counted (FERROCE_COUNTERS) when the device is closed. */
	for (uint32_t i = 1; i < qp_count; i++)
		CHECK(ibv_destroy_qp(qps[i]) == 0, "ibv_destroy_qp failed");
	close_all(&node, qps[0], cq, r.mine, (int)r.count);
}

static int by_size(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void registration(void)
{
	static double took[MOST];
	struct node node = node_open();
	size_t length = opt.largest ? opt.largest : 4096, count = 0;
	char *memory = pages(length);
	double begun = now_s();

	memset(memory, 1, length);
	while (count == 0 || (count < MOST && now_s() - begun < opt.seconds)) {
		double before = now_s();
		struct ibv_mr *mr = mr_make(node.pd, memory, length, ALL_REMOTE);

		took[count++] = (now_s() - before) * 1e6;
		CHECK(ibv_dereg_mr(mr) == 0, "ibv_dereg_mr failed");
	}
	qsort(took, count, sizeof(*took), by_size);
	printf("register_us %.3f\n", took[count / 2]);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	if (strcmp(opt.mode, "register") != 0)
		traffic(strcmp(opt.mode, "idle") == 0);
	else if (is_client())
		registration();
	barrier(3);
	return 0;
}

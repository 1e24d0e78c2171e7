/*
 * Many objects in one process. Modes:
 *   many     10,000 (-n) QPs with queues 128 deep at once, connected in pairs; what each costs in memory; some are used
 *   leak     100,000 (-n) objects of all kinds made and destroyed: memory, descriptors and threads do not grow
 */
#include <dirent.h>

#include "self.h"

/* What an idle QP with a queue of 128 may cost, in bytes. */
#define QP_COST (64u << 10)
/* What 90,000 objects may leave behind, in bytes. */
#define SLACK (2u << 20)

static uint64_t resident(void)
{
	unsigned long size = 0, pages_resident = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	CHECK(file && fscanf(file, "%lu %lu", &size, &pages_resident) == 2, "cannot read /proc/self/statm");
	fclose(file);
	return (uint64_t)pages_resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static unsigned entries(const char *path)
{
	unsigned count = 0;
	DIR *dir = opendir(path);

	CHECK(dir != NULL, "%s: %s", path, strerror(errno));
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static void many(void)
{
	struct node node = node_open();
	uint64_t count = (opt.count ? opt.count : 10000) & ~1ull;
	struct ibv_cq *cq = cq_make(&node, 256, NULL);
	struct ibv_qp **qps = pages(count * sizeof(*qps));
	const uint32_t length = 50000;
	uint8_t *from = pages(length), *to = pages(length);
	struct ibv_mr *from_mr = mr_make(node.pd, from, length, IBV_ACCESS_LOCAL_WRITE), *to_mr = mr_make(node.pd, to, length, ALL_REMOTE);

	CHECK((uint64_t)node.device.max_qp >= count, "max_qp is %d", node.device.max_qp);
	self_test(&node);
	memset(qps, 1, count * sizeof(*qps));
	uint64_t before = resident();
	for (uint64_t i = 0; i < count; i++)
		qps[i] = qp_make(&node, cq, cq, NULL, 128);
	for (uint64_t i = 0; i < count; i += 2)
		connect_both(&node, qps[i], qps[i + 1]);
	uint64_t cost = (resident() - before) / count;
	printf("a QP costs %" PRIu64 " bytes\n", cost);
	CHECK(cost < QP_COST, "an idle QP costs %" PRIu64 " bytes", cost);
	for (uint64_t i = 0; i < count; i += 100) {
		pattern(from, i, 0, length);
		enum ibv_wc_status status = do_one(qps[i], IBV_WR_RDMA_WRITE, from, from_mr->lkey, length, (uintptr_t)to, to_mr->rkey);
		CHECK(status == IBV_WC_SUCCESS, "WRITE by QP %" PRIu64 ": %s", i, ibv_wc_status_str(status));
		CHECK(memcmp(from, to, length) == 0, "WRITE by QP %" PRIu64 " moved wrong bytes", i);
	}
	for (uint64_t i = 0; i < count; i++)
		for (uint64_t j = i + 1; j < i + 50 && j < count; j++)
			CHECK(qps[i]->qp_num != qps[j]->qp_num, "two QPs have the number 0x%x", qps[i]->qp_num);
	for (uint64_t i = 0; i < count; i++) {
		int error = ibv_destroy_qp(qps[i]);
		CHECK(error == 0, "ibv_destroy_qp: %s", strerror(error));
	}
	self_test(&node);
	ok("%" PRIu64 " QPs, %" PRIu64 " bytes each", count, cost);
}

/* Makes and destroys one object of each kind; gives how many that were. */
static unsigned one_of_each(struct node *node, uint64_t i)
{
	static uint8_t memory[1 << 16];
	struct ibv_comp_channel *channel = ibv_create_comp_channel(node->context);
	CHECK(channel != NULL, "ibv_create_comp_channel: %s", strerror(errno));
	struct ibv_cq *cq = cq_make(node, 128, channel);
	struct ibv_pd *pd = ibv_alloc_pd(node->context);
	CHECK(pd != NULL, "ibv_alloc_pd: %s", strerror(errno));
	struct ibv_mr *mr = mr_make(pd, memory, 1 + (size_t)(i % sizeof(memory)), ALL_REMOTE);
	struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 64, .max_sge = 2}};
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
	CHECK(srq != NULL, "ibv_create_srq: %s", strerror(errno));
	struct node with_pd = *node;
	with_pd.pd = pd;
	struct ibv_qp *qp = qp_make(&with_pd, cq, cq, srq, 64);
	struct address self = address_of(node, qp, mr);
	struct ibv_ah *ah = ah_make(pd, &self);
	if (i % 2) {
		/* Some of them get work that is never done. */
		qp_init(qp, &usual);
		struct ibv_sge sge = {(uintptr_t)memory, 1, mr->lkey};
		struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
		CHECK(ibv_post_srq_recv(srq, &wr, &bad) == 0, "ibv_post_srq_recv failed");
		qp_rtr(qp, &self, node->port.active_mtu, &usual);
		qp_rts(qp, &self, &usual);
	}
	CHECK(ibv_destroy_ah(ah) == 0, "ibv_destroy_ah failed");
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_srq(srq) == 0, "ibv_destroy_srq failed");
	CHECK(ibv_dereg_mr(mr) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_destroy_cq(cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_destroy_comp_channel(channel) == 0, "ibv_destroy_comp_channel failed");
	return 7;
}

static void leak(void)
{
	struct node node = node_open();
	uint64_t count = opt.count ? opt.count : 100000, made = 0, before = 0;
	unsigned fds = 0, threads = 0;

	for (uint64_t i = 0; made < count; i++) {
		made += one_of_each(&node, i);
		if (i % 100 == 0) {
			self_test_anew();
			made += 10;
		}
		if (before == 0 && made > count / 10) {
			before = resident();
			fds = entries("/proc/self/fd");
			threads = entries("/proc/self/task");
		}
	}
	uint64_t after = resident();
	printf("resident memory %" PRIu64 " bytes after a tenth, %" PRIu64 " at the end\n", before, after);
	CHECK(after < before + SLACK, "resident memory grew from %" PRIu64 " to %" PRIu64 " bytes", before, after);
	CHECK(entries("/proc/self/fd") <= fds, "descriptors grew from %u to %u", fds, entries("/proc/self/fd"));
	CHECK(entries("/proc/self/task") <= threads, "threads grew from %u to %u", threads, entries("/proc/self/task"));
	ok("%" PRIu64 " objects", made);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	if (strcmp(opt.mode, "many") == 0)
		many();
	else if (strcmp(opt.mode, "leak") == 0)
		leak();
	else
		die("--mode many or --mode leak");
	return 0;
}

/*
 * One-sided means one-sided: the target sleeps in pause() and is written, read and counted in all the while.
 *
 * The server makes no call of the library after it is connected. A signal that comes with the first byte on the side
 * channel ends its sleep.
 */
#include "pair.h"

#define SIZE (1u << 20)
#define LARGEST 65536u

static volatile sig_atomic_t woken;

static void wake(int signal)
{
	(void)signal;
	woken = 1;
}

static void sleep_until_signal(void)
{
	struct sigaction action = {.sa_handler = wake};

	sigaction(SIGIO, &action, NULL);
	CHECK(fcntl(side, F_SETOWN, getpid()) == 0, "F_SETOWN: %s", strerror(errno));
	CHECK(fcntl(side, F_SETFL, fcntl(side, F_GETFL) | O_ASYNC) == 0, "O_ASYNC: %s", strerror(errno));
	side_send("s", 1);
	/* The client comes again should its signal arrive before pause() is called. */
	while (!woken)
		pause();
	fcntl(side, F_SETFL, fcntl(side, F_GETFL) & ~O_ASYNC);
}

/* The last bytes that the client wrote: count WRITEs of known places and lengths. */
static void plan(uint64_t i, uint32_t *offset, uint32_t *length)
{
	uint64_t r = mix(opt.seed * 1000003 + i);

	*length = 1 + (uint32_t)(r % LARGEST);
	*offset = 8 + (uint32_t)((r >> 32) % (SIZE - 8 - LARGEST));
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	struct node node = node_open();
	uint64_t count = opt.count ? opt.count : 2000;
	struct ibv_cq *cq = cq_make(&node, 16, NULL);
	struct ibv_qp *qp = qp_make(&node, cq, cq, NULL, 16);
	uint8_t *memory = pages(SIZE), *expected = pages(SIZE), *back = pages(LARGEST);
	struct ibv_mr *mr = mr_make(node.pd, memory, SIZE, ALL_REMOTE), *back_mr = mr_make(node.pd, back, LARGEST, IBV_ACCESS_LOCAL_WRITE);
	struct address peer = connect_with(&node, qp, mr, &usual);
	char byte;

	if (is_client()) {
		side_recv(&byte, 1);
		sleep_ms(100);
		for (uint64_t i = 0; i < count; i++) {
			uint32_t offset, length;

			plan(i, &offset, &length);
			pattern(memory, opt.seed ^ i, 0, length);
			enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, memory, mr->lkey, length, peer.addr + offset, peer.rkey);
			CHECK(status == IBV_WC_SUCCESS, "WRITE %" PRIu64 ": %s", i, ibv_wc_status_str(status));
			memset(back, 0, length);
			status = do_one(qp, IBV_WR_RDMA_READ, back, back_mr->lkey, length, peer.addr + offset, peer.rkey);
			CHECK(status == IBV_WC_SUCCESS, "READ %" PRIu64 ": %s", i, ibv_wc_status_str(status));
			CHECK(memcmp(back, memory, length) == 0, "READ %" PRIu64 " of %u bytes gave other bytes than were written", i, length);
			status = do_one(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, back, back_mr->lkey, 8, peer.addr, peer.rkey);
			CHECK(status == IBV_WC_SUCCESS, "FAA %" PRIu64 ": %s", i, ibv_wc_status_str(status));
			CHECK(*(uint64_t *)back == i, "FAA gave %" PRIu64 " instead of %" PRIu64, *(uint64_t *)back, i);
		}
		struct pollfd fd = {.fd = side, .events = POLLIN};
		do
			side_send("d", 1);
		while (poll(&fd, 1, 100) == 0);
		side_recv(&byte, 1);
	} else {
		sleep_until_signal();
		for (uint64_t i = 0; i < count; i++) {
			uint32_t offset, length;

			plan(i, &offset, &length);
			pattern(expected + offset, opt.seed ^ i, 0, length);
		}
		memcpy(expected, &count, 8);
		CHECK(memcmp(memory, expected, SIZE) == 0, "the memory does not hold what was written");
		side_send("k", 1);
	}
	ok("%" PRIu64 " times", count);
	return 0;
}

/*
 * Regions come and go under traffic: registered, used, deregistered, filled with other bytes, unmapped, again and again.
 * Nothing faults, and no byte moves into memory after its ibv_dereg_mr has returned.
 *
 * Mode remote: the server's regions come and go under the client's WRITEs and READs. Mode local: the client's own under
 * its own. A request that fails costs the queue pair, so both ends connect anew and go on.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "pair.h"

#define SIZE (256u << 10)
#define PLACE ((void *)0x200000000000u)
#define WINDOW 16u

static struct node node;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct address peer;

/* The region of the moment, for the thread that tells the client. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t rkey_now;
static atomic_bool end_churn;
static uint64_t cycles;

static uint8_t *place_map(void)
{
	uint8_t *memory = mmap(PLACE, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

	CHECK(memory == PLACE, "mmap: %s", strerror(errno));
	return memory;
}

/* After deregistration: what is put there now stays as it is. */
static void check_untouched(uint8_t *memory, uint64_t cycle)
{
	uint8_t value = (uint8_t)(0x80 | cycle);

	memset(memory, value, SIZE);
	for (int look = 0; look < 2; look++) {
		for (uint32_t i = 0; i < SIZE; i++)
			CHECK(memory[i] == value, "cycle %" PRIu64 ": byte %u changed to 0x%02x after ibv_dereg_mr had returned", cycle, i, memory[i]);
		if (look == 0)
			usleep(100);
	}
}

static void *churn_remote(void *nothing)
{
	while (!end_churn) {
		uint8_t *memory = place_map();
		struct ibv_mr *mr = mr_make(node.pd, memory, SIZE, ALL_REMOTE);

		pthread_mutex_lock(&lock);
		rkey_now = mr->rkey;
		pthread_mutex_unlock(&lock);
		usleep((useconds_t)(mix(cycles) % 3000));
		int error = ibv_dereg_mr(mr);
		CHECK(error == 0, "ibv_dereg_mr: %s", strerror(error));
		check_untouched(memory, cycles);
		CHECK(munmap(memory, SIZE) == 0, "munmap: %s", strerror(errno));
		cycles++;
	}
	return nothing;
}

static void reconnect(struct ibv_mr *mr)
{
	struct ibv_wc wc;

	qp_reset(qp);
	while (ibv_poll_cq(cq, 1, &wc) == 1)
		;
	peer = connect_with(&node, qp, mr, &usual);
}

/* Connects anew whenever the client asks, until it says that it is done. */
static void serve(struct ibv_mr *fixed)
{
	char byte;

	for (side_recv(&byte, 1); byte == 'r'; side_recv(&byte, 1)) {
		reconnect(fixed);
		pthread_mutex_lock(&lock);
		uint32_t rkey = rkey_now;
		pthread_mutex_unlock(&lock);
		side_send(&rkey, sizeof(rkey));
	}
}

static uint32_t ask_anew(struct ibv_mr *mr)
{
	uint32_t rkey;

	side_send("r", 1);
	reconnect(mr);
	side_recv(&rkey, sizeof(rkey));
	return rkey;
}

static bool expected(enum ibv_wc_status status, bool local)
{
	if (status == IBV_WC_SUCCESS || status == IBV_WC_WR_FLUSH_ERR)
		return true;
	return local ? status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_QP_OP_ERR
		     : status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_OP_ERR;
}

static void client_remote(void)
{
	uint8_t *memory = pages(SIZE);
	struct ibv_mr *mr = mr_make(node.pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	uint64_t done = 0, failures = 0, i = 0;

	for (double end = now_s() + opt.seconds; now_s() < end;) {
		uint32_t rkey = ask_anew(mr);
		bool failed = false;
		unsigned flying = 0;

		while (!failed || flying > 0) {
			struct ibv_wc wc;

			while (!failed && flying < WINDOW) {
				uint32_t length = 1 + (uint32_t)(mix(++i) % (64 << 10)), offset = (uint32_t)(mix(~i) % (SIZE - length));
				int error = post_one(qp, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, memory + offset, mr->lkey, length,
						     (uintptr_t)PLACE + offset, rkey);
				CHECK(error == 0, "ibv_post_send: %s", strerror(error));
				flying++;
			}
			wc = wait_wc(cq, "a request");
			flying--;
			CHECK(expected(wc.status, false), "a request failed: %s", ibv_wc_status_str(wc.status));
			done += wc.status == IBV_WC_SUCCESS;
			failures += wc.status != IBV_WC_SUCCESS && !failed;
			failed |= wc.status != IBV_WC_SUCCESS;
		}
	}
	side_send("d", 1);
	CHECK(done > 0 && failures > 0, "%" PRIu64 " requests done and %" PRIu64 " failures prove nothing", done, failures);
	ok("%" PRIu64 " requests done, %" PRIu64 " failures", done, failures);
}

static void client_local(struct ibv_mr *fixed)
{
	uint64_t done = 0, failures = 0;

	ask_anew(fixed);
	for (double end = now_s() + opt.seconds; now_s() < end; cycles++) {
		uint8_t *memory = place_map();
		struct ibv_mr *mr = mr_make(node.pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
		bool failed = false;

		for (unsigned i = 0; i < WINDOW; i++) {
			uint32_t length = SIZE / 4, offset = i % 4 * length;
			int error = post_one(qp, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, memory + offset, mr->lkey, length,
					     peer.addr + offset, peer.rkey);
			CHECK(error == 0, "ibv_post_send: %s", strerror(error));
		}
		usleep((useconds_t)(mix(cycles) % 200));
		int error = ibv_dereg_mr(mr);
		CHECK(error == 0, "ibv_dereg_mr: %s", strerror(error));
		check_untouched(memory, cycles);
		CHECK(munmap(memory, SIZE) == 0, "munmap: %s", strerror(errno));
		for (unsigned i = 0; i < WINDOW; i++) {
			enum ibv_wc_status status = wait_wc(cq, "a request").status;

			CHECK(expected(status, true), "a request failed: %s", ibv_wc_status_str(status));
			done += status == IBV_WC_SUCCESS;
			failed |= status != IBV_WC_SUCCESS;
		}
		failures += failed;
		if (failed)
			ask_anew(fixed);
	}
	side_send("d", 1);
	CHECK(done > 0 && failures > 0, "%" PRIu64 " requests done and %" PRIu64 " failures prove nothing", done, failures);
	ok("%" PRIu64 " cycles, %" PRIu64 " requests done, %" PRIu64 " failures", cycles, done, failures);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	bool local = strcmp(opt.mode, "local") == 0;

	side_open();
	node = node_open();
	cq = cq_make(&node, 4 * WINDOW, NULL);
	qp = qp_make(&node, cq, cq, NULL, WINDOW);
	uint8_t *memory = pages(SIZE);
	struct ibv_mr *fixed = mr_make(node.pd, memory, SIZE, ALL_REMOTE);
	if (is_client()) {
		if (local)
			client_local(fixed);
		else
			client_remote();
		return 0;
	}
	pthread_t thread;
	if (!local)
		CHECK(pthread_create(&thread, NULL, churn_remote, NULL) == 0, "pthread_create failed");
	serve(fixed);
	end_churn = true;
	if (!local)
		pthread_join(thread, NULL);
	ok("%" PRIu64 " regions came and went", cycles);
	return 0;
}

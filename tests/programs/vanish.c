/*
 * Memory that is registered vanishes under traffic: unmapped, truncated, protected. The peer gets a remote error, the
 * owner lives, and both can go on with a new region.
 *
 * First the server's memory vanishes under the client's WRITE, READ, FAA and SEND, then the client's own under its own.
 */
#include "pair.h"

#define SIZE (1u << 20)
#define PIECE (256u << 10)
/* Where regions lie: far from what the C library and others map, so that nobody else takes the place of what was unmapped. */
#define PLACE ((void *)0x200000000000u)

enum how { UNMAP, TRUNCATE, PROTECT, READ_ONLY, HOWS };
static const char *const how_names[] = {"munmap", "ftruncate", "mprotect(PROT_NONE)", "mprotect(PROT_READ)"};
enum what { WRITE, READ, ADD, SEND, WHATS };
static const char *const what_names[] = {"WRITE", "READ", "FAA", "SEND"};
static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_SEND};

struct region {
	uint8_t *memory;
	struct ibv_mr *mr;
	int fd;
};

static struct node node;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static struct address peer;

static struct region region_make(void)
{
	struct region region = {.fd = memfd_create("vanish", MFD_CLOEXEC)};

	CHECK(region.fd >= 0 && ftruncate(region.fd, SIZE) == 0, "memfd: %s", strerror(errno));
	region.memory = mmap(PLACE, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, region.fd, 0);
	CHECK(region.memory == PLACE, "mmap: %s", strerror(errno));
	memset(region.memory, 0x11, SIZE);
	region.mr = mr_make(node.pd, region.memory, SIZE, ALL_REMOTE);
	return region;
}

static void region_vanish(struct region *region, enum how how)
{
	int result = how == UNMAP ? munmap(region->memory, SIZE) : how == TRUNCATE ? ftruncate(region->fd, 0)
		   : mprotect(region->memory, SIZE, how == PROTECT ? PROT_NONE : PROT_READ);

	CHECK(result == 0, "%s: %s", how_names[how], strerror(errno));
}

static void region_free(struct region *region)
{
	int error = ibv_dereg_mr(region->mr);

	CHECK(error == 0, "ibv_dereg_mr of vanished memory: %s", strerror(error));
	munmap(region->memory, SIZE);
	close(region->fd);
}

static void reconnect(struct ibv_mr *mr)
{
	struct ibv_wc wc;

	qp_reset(qp);
	while (ibv_poll_cq(send_cq, 1, &wc) == 1 || ibv_poll_cq(recv_cq, 1, &wc) == 1)
		;
	peer = connect_with(&node, qp, mr, &usual);
}

/* Requests again and again until one fails; gives its status. */
static enum ibv_wc_status until_failure(enum what what, uint8_t *local, struct ibv_mr *mr)
{
	double end = now_s() + PATIENCE_S;

	for (uint64_t i = 0;; i++) {
		uint32_t length = what == ADD ? 8 : PIECE, offset = (uint32_t)(i % 4) * PIECE;
		enum ibv_wc_status status = do_one(qp, opcodes[what], local, mr->lkey, length, peer.addr + offset, peer.rkey);

		if (status != IBV_WC_SUCCESS)
			return status;
		CHECK(now_s() < end, "%s goes on although the memory is gone", what_names[what]);
	}
}

/* The server's memory vanishes. */
static void remote(enum how how, enum what what)
{
	char byte;

	if (is_client()) {
		uint8_t *local = pages(PIECE);
		struct ibv_mr *mr = mr_make(node.pd, local, PIECE, IBV_ACCESS_LOCAL_WRITE);

		reconnect(mr);
		side_send("g", 1);
		enum ibv_wc_status status = until_failure(what, local, mr);
		CHECK(status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_OP_ERR, "%s of memory after %s: %s", what_names[what],
		      how_names[how], ibv_wc_status_str(status));
		side_send("f", 1);
		/* The peer lives, and has new memory. */
		reconnect(mr);
		status = do_one(qp, IBV_WR_RDMA_WRITE, local, mr->lkey, PIECE, peer.addr, peer.rkey);
		CHECK(status == IBV_WC_SUCCESS, "WRITE to new memory: %s", ibv_wc_status_str(status));
		barrier(2);
		CHECK(ibv_dereg_mr(mr) == 0, "ibv_dereg_mr failed");
		munmap(local, PIECE);
		return;
	}
	struct region region = region_make();
	reconnect(region.mr);
	side_recv(&byte, 1);
	struct pollfd fd = {.fd = side, .events = POLLIN};
	bool vanished = false;
	double begun = now_s();
	uint64_t posted = 0, done = 0;
	/* SENDs need receives all the while. */
	for (;;) {
		struct ibv_wc wc;

		for (; what == SEND && posted < done + 16; posted++)
			if (post_recv_one(qp, region.memory + posted % 4 * PIECE, region.mr->lkey, PIECE) != 0)
				break;
		while (ibv_poll_cq(recv_cq, 1, &wc) == 1) {
			done++;
			CHECK(wc.status == IBV_WC_SUCCESS || vanished, "receive: %s", ibv_wc_status_str(wc.status));
		}
		if (!vanished && now_s() > begun + 0.03) {
			vanished = true;
			region_vanish(&region, how);
		}
		if (poll(&fd, 1, what == SEND ? 0 : 5) == 1)
			break;
		CHECK(now_s() < begun + PATIENCE_S, "the client sees no error");
	}
	side_recv(&byte, 1);
	qp_reset(qp);
	region_free(&region);
	region = region_make();
	reconnect(region.mr);
	barrier(2);
	region_free(&region);
}

/* The client's own memory vanishes. */
static void own(enum how how, enum what what)
{
	static uint8_t *target;
	static struct ibv_mr *target_mr;

	if (!target) {
		target = pages(SIZE);
		target_mr = mr_make(node.pd, target, SIZE, ALL_REMOTE);
	}
	reconnect(target_mr);
	if (!is_client()) {
		barrier(3);
		return;
	}
	struct region region = region_make();
	for (int i = 0; i < 20; i++)
		CHECK(do_one(qp, opcodes[what], region.memory, region.mr->lkey, what == ADD ? 8 : PIECE, peer.addr, peer.rkey) == IBV_WC_SUCCESS,
		      "%s before anything vanished", what_names[what]);
	/* In the middle of some requests. */
	for (int i = 0; i < 8; i++) {
		int error = post_one(qp, opcodes[what], region.memory, region.mr->lkey, what == ADD ? 8 : PIECE, peer.addr, peer.rkey);
		CHECK(error == 0, "ibv_post_send: %s", strerror(error));
	}
	region_vanish(&region, how);
	bool failed = false;
	for (int i = 0; i < 8; i++) {
		enum ibv_wc_status status = wait_wc(send_cq, what_names[what]).status;

		if (failed)
			CHECK(status == IBV_WC_WR_FLUSH_ERR, "%s behind a failed one: %s", what_names[what], ibv_wc_status_str(status));
		else if (status != IBV_WC_SUCCESS) {
			failed = true;
			CHECK(status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_QP_OP_ERR, "%s with own memory after %s: %s", what_names[what],
			      how_names[how], ibv_wc_status_str(status));
		}
	}
	if (!failed) {
		enum ibv_wc_status status = do_one(qp, opcodes[what], region.memory, region.mr->lkey, what == ADD ? 8 : PIECE, peer.addr, peer.rkey);
		CHECK(status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_QP_OP_ERR, "%s with own memory after %s: %s", what_names[what],
		      how_names[how], ibv_wc_status_str(status));
	}
	qp_reset(qp);
	region_free(&region);
	barrier(3);
}

int main(int argc, char **argv)
{
	unsigned count = 0;

	parse_options(argc, argv);
	side_open();
	node = node_open();
	send_cq = cq_make(&node, 64, NULL);
	recv_cq = cq_make(&node, 64, NULL);
	qp = qp_make(&node, send_cq, recv_cq, NULL, 32);
	for (int how = 0; how < HOWS; how++)
		for (int what = 0; what < WHATS; what++) {
			/* Memory that may still be read is not gone for a READ. */
			if (how == READ_ONLY && what == READ)
				continue;
			remote(how, what);
			count++;
		}
	for (int how = 0; how < HOWS; how++)
		for (int what = 0; what < SEND; what++) {
			/* Likewise a source of a WRITE. */
			if (how == READ_ONLY && what == WRITE)
				continue;
			own(how, what);
			count++;
		}
	barrier(9);
	ok("%u times", count);
	return 0;
}

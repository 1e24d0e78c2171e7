/*
 * Every operation over a network that loses, doubles and reorders packets, and every byte checked.
 *
 * Both ends request at once, many requests of one kind, then of the next. Unlike `verify`, which mixes kinds, this leaves out two
 * things that Linux's rxe (6.12) does not survive where packets are lost or overtake each other, whoever the other end is:
 *   - Requests of no bytes. rxe answers a READ that is repeated by the region of its latest request, and that has none if
 *     the latest asked for nothing: its queue pair fails, with a warning in rxe_mr_copy.
 *   - A READ behind a SEND or WRITE. If the acknowledgement of the latter comes between the READ's responses, rxe takes the
 *     next response for the first, completes the READ as if it had succeeded, without its data, and its queue pair fails.
 */
#include "await.h"

#define SLOTS 16u
#define LARGEST 70000u
#define SLOT 73728u
#define SPACE (SLOTS * SLOT)

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, SWAP, ADD, KINDS };
static const char *const names[] = {"SEND", "SEND_IMM", "WRITE", "WRITE_IMM", "READ", "CAS", "FAA"};
static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD};

static struct node node;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static struct address peer;
static uint8_t *local, *target, *expected;
static struct ibv_mr *local_mr, *target_mr;

static bool is_atomic(enum kind kind)
{
	return kind == SWAP || kind == ADD;
}

static bool is_send(enum kind kind)
{
	return kind == SEND || kind == SEND_IMM;
}

static bool has_imm(enum kind kind)
{
	return kind == SEND_IMM || kind == WRITE_IMM;
}

/* A number that both ends know, for each request of each end. */
static uint64_t number(unsigned round, enum kind kind, int end, unsigned slot)
{
	return mix(opt.seed + mix((((uint64_t)round * KINDS + kind) * 2 + (uint64_t)end) * SLOTS + slot));
}

static uint32_t size_of(unsigned round, enum kind kind, int end, unsigned slot)
{
	uint64_t random = number(round, kind, end, slot);

	/* Short ones and long ones alike. */
	return is_atomic(kind) ? 8 : 1 + (uint32_t)((random >> 8) % (random & 1 ? LARGEST : 2000));
}

static uint32_t imm_of(unsigned round, enum kind kind, int end, unsigned slot)
{
	return (uint32_t)(number(round, kind, end, slot) >> 32);
}

static uint64_t key_of(unsigned round, enum kind kind, int end, bool of_target)
{
	return number(round, kind, end, 0) ^ (of_target ? 0x7a46e7 : 0x10ca1);
}

static uint64_t word_of(unsigned round, enum kind kind, int end, unsigned slot)
{
	uint64_t word;

	pattern((uint8_t *)&word, key_of(round, kind, end, true), slot * SLOT, sizeof(word));
	return word;
}

/* Every second CAS finds what it looks for. */
static bool swaps(unsigned slot)
{
	return slot % 2 == 0;
}

static void post(unsigned round, enum kind kind, unsigned slot)
{
	int end = is_client();
	struct ibv_sge sge = {(uintptr_t)local + slot * SLOT, size_of(round, kind, end, slot), local_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = opcodes[kind], .send_flags = IBV_SEND_SIGNALED}, *bad;

	if (has_imm(kind))
		wr.imm_data = htonl(imm_of(round, kind, end, slot));
	if (is_atomic(kind)) {
		uint64_t word = word_of(round, kind, !end, slot);

		wr.wr.atomic.remote_addr = peer.addr + slot * SLOT;
		wr.wr.atomic.rkey = peer.rkey;
		wr.wr.atomic.compare_add = kind == ADD ? imm_of(round, kind, end, slot) : swaps(slot) ? word : ~word;
		wr.wr.atomic.swap = imm_of(round, kind, end, slot);
	} else if (!is_send(kind)) {
		wr.wr.rdma.remote_addr = peer.addr + slot * SLOT;
		wr.wr.rdma.rkey = peer.rkey;
	}
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "posting %s: %s", names[kind], strerror(error));
}

static void post_receive(enum kind kind, unsigned slot)
{
	struct ibv_sge sge = {(uintptr_t)target + slot * SLOT, SLOT, target_mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = is_send(kind), .next = NULL}, *bad;
	int error = ibv_post_recv(qp, &wr, &bad);

	CHECK(error == 0, "posting a receive: %s", strerror(error));
}

static void complete(unsigned round, enum kind kind)
{
	int end = is_client();

	for (unsigned slot = 0; slot < SLOTS; slot++) {
		struct ibv_wc wc = await_wc(send_cq, names[kind]);

		CHECK(wc.status == IBV_WC_SUCCESS, "round %u: %s %u: %s", round, names[kind], slot, ibv_wc_status_str(wc.status));
		CHECK(wc.wr_id == slot, "round %u: %s: completion of %" PRIu64 " instead of %u", round, names[kind], wc.wr_id, slot);
	}
	for (unsigned slot = 0; slot < SLOTS && (is_send(kind) || has_imm(kind)); slot++) {
		struct ibv_wc wc = await_wc(recv_cq, names[kind]);
		uint32_t size = size_of(round, kind, !end, slot), imm = imm_of(round, kind, !end, slot);

		CHECK(wc.status == IBV_WC_SUCCESS, "round %u: receive of %s %u: %s", round, names[kind], slot, ibv_wc_status_str(wc.status));
		CHECK(wc.wr_id == slot, "round %u: receive %" PRIu64 " instead of %u", round, wc.wr_id, slot);
		CHECK(wc.byte_len == size, "round %u: %s %u has %u bytes instead of %u", round, names[kind], slot, wc.byte_len, size);
		CHECK(((wc.wc_flags & IBV_WC_WITH_IMM) != 0) == has_imm(kind), "round %u: %s %u has flags 0x%x", round, names[kind], slot, wc.wc_flags);
		CHECK(!has_imm(kind) || ntohl(wc.imm_data) == imm, "round %u: %s %u has the immediate 0x%x instead of 0x%x", round, names[kind], slot,
		      ntohl(wc.imm_data), imm);
	}
}

/* What the requests of the end `requester` left in its "local" memory, or in "target" of the other. */
static void apply(unsigned round, enum kind kind, int requester, bool of_target)
{
	for (unsigned slot = 0; slot < SLOTS; slot++) {
		uint8_t *at = expected + slot * SLOT;
		uint32_t size = size_of(round, kind, requester, slot);

		if (is_atomic(kind)) {
			uint64_t before = word_of(round, kind, !requester, slot), after = before;
			uint32_t operand = imm_of(round, kind, requester, slot);

			if (kind == ADD)
				after += operand;
			else if (swaps(slot))
				after = operand;
			memcpy(at, of_target ? &after : &before, 8);
		} else if ((kind == READ) != of_target) {
			pattern(at, key_of(round, kind, of_target ? requester : !requester, !of_target), slot * SLOT, size);
		}
	}
}

static void compare(unsigned round, enum kind kind, bool of_target)
{
	const uint8_t *memory = of_target ? target : local;
	int end = is_client();
	uint32_t at = 0;

	pattern(expected, key_of(round, kind, end, of_target), 0, SPACE);
	apply(round, kind, of_target ? !end : end, of_target);
	while (at < SPACE && memory[at] == expected[at])
		at++;
	CHECK(at == SPACE, "round %u: %s: byte %u of slot %u of the %s's %s memory is 0x%02x instead of 0x%02x", round, names[kind], at % SLOT,
	      at / SLOT, end ? "client" : "server", of_target ? "target" : "local", memory[at], expected[at]);
}

static void run(unsigned round, enum kind kind)
{
	int end = is_client();

	pattern(local, key_of(round, kind, end, false), 0, SPACE);
	pattern(target, key_of(round, kind, end, true), 0, SPACE);
	for (unsigned slot = 0; slot < SLOTS && (is_send(kind) || has_imm(kind)); slot++)
		post_receive(kind, slot);
	barrier(1);
	for (unsigned slot = 0; slot < SLOTS; slot++)
		post(round, kind, slot);
	complete(round, kind);
	/* Now the other end's requests have completed, too. */
	barrier(2);
	compare(round, kind, false);
	compare(round, kind, true);
	barrier(3);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	node = node_open();
	send_cq = cq_make(&node, 2 * SLOTS, NULL);
	recv_cq = cq_make(&node, 2 * SLOTS, NULL);
	qp = qp_make(&node, send_cq, recv_cq, NULL, SLOTS);
	local = pages(SPACE);
	target = pages(SPACE);
	expected = pages(SPACE);
	local_mr = mr_make(node.pd, local, SPACE, IBV_ACCESS_LOCAL_WRITE);
	target_mr = mr_make(node.pd, target, SPACE, ALL_REMOTE);
	peer = connect_with(&node, qp, target_mr, &usual);
	unsigned rounds = opt.count ? (unsigned)opt.count : 4;
	for (unsigned round = 0; round < rounds; round++)
		for (int kind = 0; kind < KINDS; kind++)
			run(round, kind);
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_cq(send_cq) == 0 && ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_dereg_mr(local_mr) == 0 && ibv_dereg_mr(target_mr) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(node.pd) == 0 && ibv_close_device(node.context) == 0, "closing the device failed");
	ok("%u rounds", rounds);
	return 0;
}

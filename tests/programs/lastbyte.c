/*
 * Programs wait for a WRITE by polling its last byte: once that has come, every earlier byte must have come.
 *
 * Both ends take turns: one writes a message whose bytes are all the number of the round, the other polls the last byte
 * and then looks at all others. Sizes change from round to round.
 */
#include "pair.h"

#define SIZE 131072u

static uint32_t size_of(uint64_t round)
{
	static const uint32_t sizes[] = {8, 64, 1, 100, 1000, 1024, 1025, 2, 4096, 333, 16, 2048, 5000, 9, 7, 40};

	if (round % 1000 == 999)
		return 100001;
	if (round % 100 == 99)
		return 20000 + (uint32_t)(round % 4096);
	return sizes[mix(round) % 16];
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	struct node node = node_open();
	uint64_t count = opt.count ? opt.count : 100000;
	struct ibv_cq *cq = cq_make(&node, 64, NULL);
	struct ibv_qp *qp = qp_make(&node, cq, cq, NULL, 64);
	uint8_t *in = pages(SIZE), *out = pages(SIZE);
	struct ibv_mr *in_mr = mr_make(node.pd, in, SIZE, ALL_REMOTE), *out_mr = mr_make(node.pd, out, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct address peer = connect_with(&node, qp, in_mr, &usual);

	for (uint64_t round = 0; round < count; round++) {
		/* The other end's WRITE may not come before this end has looked at all bytes of the last: it waits its turn. */
		bool my_turn = (round % 2 == 0) == is_client();
		uint8_t value = (uint8_t)(1 + round / 2 % 255);
		uint32_t size = size_of(round);

		if (my_turn) {
			memset(out, value, size);
			enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, out, out_mr->lkey, size, peer.addr, peer.rkey);
			CHECK(status == IBV_WC_SUCCESS, "WRITE %" PRIu64 ": %s", round, ibv_wc_status_str(status));
			continue;
		}
		volatile uint8_t *last = in + size - 1;
		double end = 0;
		for (uint64_t spins = 1; *last != value; spins++) {
			if (spins % 4096 != 0)
				continue;
			end = end == 0 ? now_s() + PATIENCE_S : end;
			CHECK(now_s() < end, "round %" PRIu64 ": no WRITE within %d s", round, PATIENCE_S);
		}
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		for (uint32_t i = 0; i < size; i++)
			CHECK(in[i] == value, "round %" PRIu64 ": byte %u of %u was 0x%02x when the last was 0x%02x", round, i, size, in[i], value);
		/* Fresh for the next message: none of its bytes may be there before. */
		memset(in, 0, size);
	}
	barrier(1);
	ok("%" PRIu64 " rounds", count);
	return 0;
}

/*
 * A word that its owner increments in a tight loop is READ, alone and in the middle of many bytes: it never runs
 * backwards, and no READ fails although the bytes change while they are on their way.
 */
#include "pair.h"

#define SIZE 65536u
#define WORD 20480u /* offset of the word */
#define STOP 32768u /* offset of the flag that ends the loop, written by the client */

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	struct node node = node_open();
	uint64_t count = opt.count ? opt.count : 100000;
	struct ibv_cq *cq = cq_make(&node, 16, NULL);
	struct ibv_qp *qp = qp_make(&node, cq, cq, NULL, 16);
	uint8_t *memory = pages(SIZE);
	struct ibv_mr *mr = mr_make(node.pd, memory, SIZE, ALL_REMOTE);
	struct address peer = connect_with(&node, qp, mr, &usual);
	volatile uint64_t *word = (volatile uint64_t *)(memory + WORD), *stop = (volatile uint64_t *)(memory + STOP);

	if (!is_client()) {
		while (*stop == 0)
			++*word;
		barrier(1);
		close_all(&node, qp, cq, &mr, 1);
		ok("counted to %" PRIu64, *word);
		return 0;
	}
	uint64_t last = 0, moved = 0;
	for (uint64_t i = 0; i < count; i++) {
		/* Every hundredth time the word is read with all the bytes around it. */
		bool whole = i % 100 == 99;
		uint32_t offset = whole ? 0 : WORD, length = whole ? SIZE : 8;
		enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_READ, memory + offset, mr->lkey, length, peer.addr + offset, peer.rkey);

		CHECK(status == IBV_WC_SUCCESS, "READ %" PRIu64 ": %s", i, ibv_wc_status_str(status));
		CHECK(*word >= last, "READ %" PRIu64 ": the word ran back from %" PRIu64 " to %" PRIu64, i, last, *word);
		moved += *word != last;
		last = *word;
	}
	CHECK(moved > 1, "the word did not move in %" PRIu64 " READs", count);
	*stop = 1;
	enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, (void *)stop, mr->lkey, 8, peer.addr + STOP, peer.rkey);
	CHECK(status == IBV_WC_SUCCESS, "the last WRITE: %s", ibv_wc_status_str(status));
	barrier(1);
	close_all(&node, qp, cq, &mr, 1);
	ok("%" PRIu64 " READs, the word moved between %" PRIu64 " of them, last %" PRIu64, count, moved, last);
	return 0;
}

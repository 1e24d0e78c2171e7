/* A device used alone: two queue pairs of one process talk to each other. Proof that a process can use the device. */
#ifndef SELF_H
#define SELF_H

#include "pair.h"

/* Connects two queue pairs with each other. */
__attribute__((unused)) static void connect_both(struct node *node, struct ibv_qp *a, struct ibv_qp *b)
{
	struct address at_a = address_of(node, a, NULL), at_b = address_of(node, b, NULL);

	qp_init(a, &usual);
	qp_init(b, &usual);
	qp_rtr(a, &at_b, node->port.active_mtu, &usual);
	qp_rtr(b, &at_a, node->port.active_mtu, &usual);
	qp_rts(a, &at_a, &usual);
	qp_rts(b, &at_b, &usual);
}

/* WRITE, READ and SEND within the process on an open device, with checked bytes; all objects are made and destroyed. */
__attribute__((unused)) static void self_test(struct node *node)
{
	const uint32_t length = 100000;
	struct ibv_cq *cq = cq_make(node, 16, NULL);
	struct ibv_qp *a = qp_make(node, cq, cq, NULL, 4), *b = qp_make(node, cq, cq, NULL, 4);
	uint8_t *from = pages(length), *to = pages(length);
	struct ibv_mr *from_mr = mr_make(node->pd, from, length, IBV_ACCESS_LOCAL_WRITE), *to_mr = mr_make(node->pd, to, length, ALL_REMOTE);

	connect_both(node, a, b);
	pattern(from, (uint64_t)getpid(), 0, length);
	enum ibv_wc_status status = do_one(a, IBV_WR_RDMA_WRITE, from, from_mr->lkey, length, (uintptr_t)to, to_mr->rkey);
	CHECK(status == IBV_WC_SUCCESS, "WRITE to itself: %s", ibv_wc_status_str(status));
	CHECK(memcmp(from, to, length) == 0, "WRITE to itself moved wrong bytes");
	memset(from, 0, length);
	status = do_one(a, IBV_WR_RDMA_READ, from, from_mr->lkey, length, (uintptr_t)to, to_mr->rkey);
	CHECK(status == IBV_WC_SUCCESS, "READ of itself: %s", ibv_wc_status_str(status));
	CHECK(memcmp(from, to, length) == 0, "READ of itself moved wrong bytes");
	memset(to, 0, length);
	CHECK(post_recv_one(b, to, to_mr->lkey, length) == 0, "posting a receive failed");
	CHECK(post_one(a, IBV_WR_SEND, from, from_mr->lkey, length, 0, 0) == 0, "posting a SEND failed");
	wait_success(cq, "SEND to itself");
	wait_success(cq, "SEND to itself");
	CHECK(memcmp(from, to, length) == 0, "SEND to itself moved wrong bytes");
	CHECK(ibv_destroy_qp(a) == 0 && ibv_destroy_qp(b) == 0 && ibv_destroy_cq(cq) == 0, "queues cannot be destroyed");
	CHECK(ibv_dereg_mr(from_mr) == 0 && ibv_dereg_mr(to_mr) == 0, "regions cannot be deregistered");
	munmap(from, length);
	munmap(to, length);
}

/* The same from ibv_get_device_list to ibv_close_device. */
__attribute__((unused)) static void self_test_anew(void)
{
	struct node node = node_open();

	self_test(&node);
	CHECK(ibv_dealloc_pd(node.pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node.context) == 0, "ibv_close_device failed");
}

#endif
